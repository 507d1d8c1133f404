// Rounds of the local search; what rounds.py does, in the same order of operations. Names and shapes are those of it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace {

constexpr double kMost = 1e100;
constexpr std::int64_t kOptions = 24;
constexpr double kAim = 0.02;
constexpr double kMended = 0.5;
constexpr std::size_t kEvicted = 16;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The arrays of a problem, in the order in which choices.py has them.
struct Choices {
  const double* limit;
  const std::int64_t* table_group;
  const std::int64_t* set_first;
  const std::int64_t* set_width;
  const std::int64_t* set_ranks;
  const std::int64_t* kind_set;
  const std::int64_t* kind_first;
  const double* size;
  const std::int64_t* option_first;
  const std::int64_t* part_kind;
  const std::int64_t* part_count;
  const double* base;
  const double* work;
  const std::int64_t* choice_first;
  const std::int64_t* choice;
  const std::int64_t* level_first;
  const double* level;
  const std::int64_t* turns;
  const std::int64_t* free_first;
  const std::int64_t* free_level;
  const std::int64_t* free_turn;
  const std::int64_t* bound_first;
  const std::int64_t* bound_set;
  const std::int64_t* column_first;
  const std::int64_t* column_choice;
  const std::int64_t* column_count;
  const std::int64_t* cell_first;
  const std::int64_t* column_level;
  std::int64_t ranks;
  std::int64_t slots;
  std::int64_t dims;
  std::int64_t tables;
};

struct State {
  double* sums;
  double* base;
  std::int64_t* option;
  std::int32_t* spot;
  std::int32_t* on;
  double* cost;
  std::int64_t* best_option;
  std::int32_t* best_spot;
};

struct Steep {
  double* terms;
  double* lift;
  const double* grow;
  const double* shrink;
  const double* rise;
  const double* fall;
  const double* value;
  std::int64_t grid;
};

// A table and the option that it is to take.
struct Wanted {
  std::int64_t table;
  std::int64_t option;
};

class Rounds {
 public:
  Rounds(const Choices& choices, const State& state, const Steep& steep)
      : choices_(choices), state_(state), steep_(steep), lift_(*steep.lift) {
    left_.resize(choices.ranks);
    now_.resize(choices.ranks);
    by_room_.resize(choices.ranks);
  }

  // Goes through rounds with the numbers drawn for each.
  void run(std::int64_t rounds, std::int64_t draws, const double* drawn, const double* allowed) {
    double before = height();
    for (std::int64_t number = 0; number < rounds; ++number) {
      draws_ = drawn + number * draws;
      before = round(before, allowed[number]);
    }
    *steep_.lift = lift_;
  }

 private:
  double round(double before, double factor) {
    const bool random = next() < 0.5;
    random ? varied() : ruined();
    save();
    take_from(0);
    bool done = true;
    std::size_t back = 0;
    if (random) {
      for (; done && back < wanted_.size(); back += done) done = put(wanted_[back].table, wanted_[back].option, 0.0);
    }
    if (!random || (done && next() < kMended)) {
      const double drawn = next();
      const double aim = std::min(state_.cost[0], state_.cost[1]) * (1.0 - kAim * (drawn * drawn));
      const double room = aim - state_.base[0];
      done = room > 0;
      if (random && done) {
        overloaded(room);
        take_from(back);
      }
      for (; done && back < wanted_.size(); back += done) done = fill(wanted_[back].table, room);
    }
    const double after = height();
    if (done && after <= before * factor) {
      keep();
      return after;
    }
    restore(back);
    return before;
  }

  // Keeps what a round changes, but for its tables.
  void save() {
    sums_.assign(state_.sums, state_.sums + choices_.dims * choices_.ranks);
    base_.assign(state_.base, state_.base + choices_.dims);
    terms_.assign(steep_.terms, steep_.terms + choices_.ranks);
    saved_lift_ = lift_;
    option_.clear();
    spot_.clear();
  }

  // Takes the tables that are wanted off their ranks, from the first that is still there.
  void take_from(std::size_t first) {
    for (std::size_t index = first; index < wanted_.size(); ++index) {
      const std::int64_t table = wanted_[index].table;
      option_.push_back(state_.option[table]);
      const std::int32_t* const spot = state_.spot + table * choices_.slots;
      spot_.insert(spot_.end(), spot, spot + choices_.slots);
      take(table);
    }
  }

  // Undoes a round; so many of its tables are back on ranks.
  void restore(std::size_t back) {
    for (std::size_t index = 0; index < back; ++index) count(wanted_[index].table, -1);
    for (std::size_t index = 0; index < wanted_.size(); ++index) {
      const std::int64_t table = wanted_[index].table;
      state_.option[table] = option_[index];
      std::copy_n(spot_.data() + static_cast<std::int64_t>(index) * choices_.slots, choices_.slots,
                  state_.spot + table * choices_.slots);
      count(table, 1);
    }
    std::copy(sums_.begin(), sums_.end(), state_.sums);
    std::copy(base_.begin(), base_.end(), state_.base);
    std::copy(terms_.begin(), terms_.end(), steep_.terms);
    lift_ = saved_lift_;
  }

  void keep() {
    state_.cost[0] = state_.base[0] + state_.sums[hottest()];
    if (state_.cost[0] < state_.cost[1] * (1.0 - 1e-9)) {
      state_.cost[1] = state_.cost[0];
      std::copy_n(state_.option, choices_.tables, state_.best_option);
      std::copy_n(state_.spot, choices_.tables * choices_.slots, state_.best_spot);
    }
  }

  double next() { return *draws_++; }

  std::int64_t below(std::int64_t count) {
    return std::min(static_cast<std::int64_t>(next() * static_cast<double>(count)), count - 1);
  }

  std::int64_t hottest() const { return std::max_element(state_.sums, state_.sums + choices_.ranks) - state_.sums; }

  bool is_wanted(std::int64_t table) const {
    return std::any_of(wanted_.begin(), wanted_.end(), [=](const Wanted& each) { return each.table == table; });
  }

  // The tables of a rank, those already wanted left out.
  void find_here(std::int64_t rank) {
    here_.clear();
    const std::int32_t* const on = state_.on + rank * choices_.tables;
    for (std::int64_t table = 0; table < choices_.tables; ++table)
      if (on[table] && !is_wanted(table)) here_.push_back(table);
  }

  void varied() {
    wanted_.clear();
    const double drawn = next();
    const std::size_t many = 1 + (drawn >= 0.5) + (drawn >= 0.85);
    if (next() < 0.5) {
      find_here(hottest());
      if (!here_.empty()) want(here_[below(static_cast<std::int64_t>(here_.size()))]);
    }
    while (wanted_.size() < many) {
      const std::int64_t table = below(choices_.tables);
      if (is_wanted(table)) break;
      want(table);
    }
    for (Wanted& each : wanted_) {
      const std::int64_t* const first = choices_.choice_first + choices_.table_group[each.table];
      if (next() < 0.5) each.option = choices_.choice[first[0] + below(first[1] - first[0])];
    }
    largest_first(0);
  }

  void want(std::int64_t table) { wanted_.push_back({table, state_.option[table]}); }

  void ruined() {
    wanted_.clear();
    std::int64_t picked[3];
    picked[0] = next() < 0.7 ? hottest() : below(choices_.ranks);
    picked[1] = below(choices_.ranks);
    std::int64_t count = 2;
    if (next() < 0.5) picked[count++] = below(choices_.ranks);
    for (std::int64_t number = 0; number < count; ++number) {
      find_here(picked[number]);
      const std::int64_t size = static_cast<std::int64_t>(here_.size());
      const std::int64_t many = std::min(size, 1 + below(number ? 2 : 3));
      for (std::int64_t index = 0; index < many; ++index) {
        std::swap(here_[index], here_[index + below(size - index)]);
      }
      for (std::int64_t index = 0; index < many; ++index) want(here_[index]);
    }
    if (next() < 0.3) {
      const std::int64_t table = below(choices_.tables);
      if (!is_wanted(table)) want(table);
    }
    largest_first(0);
  }

  // The tables of the ranks that have more than there is room for.
  void overloaded(double room) {
    const std::size_t first = wanted_.size();
    for (std::int64_t rank = 0; rank < choices_.ranks; ++rank) {
      if (!(state_.sums[rank] > room)) continue;
      find_here(rank);
      for (std::int64_t table : here_)
        if (wanted_.size() < first + kEvicted) want(table);
    }
    largest_first(first);
  }

  void largest_first(std::size_t first) {
    by_work_.clear();
    for (std::size_t index = first; index < wanted_.size(); ++index) {
      const Wanted& each = wanted_[index];
      by_work_.push_back({-(choices_.work[each.option] * (0.8 + 0.4 * next())), each});
    }
    std::stable_sort(by_work_.begin(), by_work_.end(),
                     [](const auto& one, const auto& other) { return one.first < other.first; });
    std::transform(by_work_.begin(), by_work_.end(), wanted_.begin() + static_cast<std::ptrdiff_t>(first),
                   [](const auto& each) { return each.second; });
  }

  // Calls with the kind of each of an option's parts and its number; ends, and returns false, where that does.
  template <typename Call>
  bool each_part(std::int64_t option, const Call& call) const {
    std::int64_t slot = 0;
    for (std::int64_t part = choices_.option_first[option]; part < choices_.option_first[option + 1]; ++part)
      for (std::int64_t turn = 0; turn < choices_.part_count[part]; ++turn)
        if (!call(choices_.part_kind[part], slot++)) return false;
    return true;
  }

  // (W,) ranks of a place.
  const std::int64_t* place_of(std::int64_t set, std::int64_t place) const {
    return choices_.set_ranks + choices_.set_first[set] + place * choices_.set_width[set];
  }

  std::int64_t places_of(std::int64_t set) const {
    return (choices_.set_first[set + 1] - choices_.set_first[set]) / choices_.set_width[set];
  }

  void take(std::int64_t table) {
    const std::int64_t option = state_.option[table];
    const std::int32_t* const spot = state_.spot + table * choices_.slots;
    each_part(option, [&](std::int64_t kind, std::int64_t slot) {
      shift(table, kind, spot[slot], -1);
      return true;
    });
    for (std::int64_t dim = 0; dim < choices_.dims; ++dim)
      state_.base[dim] -= choices_.base[option * choices_.dims + dim];
    lift_ = std::min(lift_ * steep_.fall[option], kMost);
  }

  // Brings up to date on which ranks a table is.
  void count(std::int64_t table, std::int32_t sign) {
    const std::int32_t* const spot = state_.spot + table * choices_.slots;
    each_part(state_.option[table], [&](std::int64_t kind, std::int64_t slot) {
      const std::int64_t set = choices_.kind_set[kind];
      const std::int64_t* const ranks = place_of(set, spot[slot]);
      for (std::int64_t index = 0; index < choices_.set_width[set]; ++index)
        state_.on[ranks[index] * choices_.tables + table] += sign;
      return true;
    });
  }

  // Adds a part at a place, or takes it off.
  void shift(std::int64_t table, std::int64_t kind, std::int64_t place, std::int32_t sign) {
    const std::int64_t set = choices_.kind_set[kind], first = choices_.kind_first[kind];
    const std::int64_t* const ranks = place_of(set, place);
    const double* const factor = (sign > 0 ? steep_.grow : steep_.shrink) + first;
    for (std::int64_t index = 0; index < choices_.set_width[set]; ++index) {
      const std::int64_t rank = ranks[index];
      state_.on[rank * choices_.tables + table] += sign;
      for (std::int64_t dim = 0; dim < choices_.dims; ++dim)
        state_.sums[dim * choices_.ranks + rank] += sign * choices_.size[(first + index) * choices_.dims + dim];
      steep_.terms[rank] = std::min(steep_.terms[rank] * factor[index], kMost);
    }
  }

  double height() const {
    double sum = 0.0;
    for (std::int64_t rank = 0; rank < choices_.ranks; ++rank) sum += steep_.terms[rank];
    return lift_ * sum;
  }

  double worth(double left, double scale) const {
    const double at = std::min(std::max(left * scale, 0.0), static_cast<double>(steep_.grid));
    return steep_.value[static_cast<std::int64_t>(at)];
  }

  bool fill(std::int64_t table, double room) {
    const std::int64_t group = choices_.table_group[table], first = choices_.choice_first[group];
    find_prices(group, room);
    const std::int64_t options = static_cast<std::int64_t>(price_.size()), tried = std::min(options, kOptions);
    order_.clear();
    for (std::int64_t number = 0; number < options; ++number) order_.push_back({price_[number], number});
    std::partial_sort(order_.begin(), order_.begin() + tried, order_.end());
    for (std::int64_t index = 0; index < tried; ++index) {
      const auto [price, number] = order_[index];
      if (price < kInfinity && put(table, choices_.choice[first + number], room)) return true;
    }
    return false;
  }

  void find_prices(std::int64_t group, double room) {
    const std::int64_t ranks = choices_.ranks, first = choices_.choice_first[group];
    const std::int64_t options = choices_.choice_first[group + 1] - first;
    const double scale = static_cast<double>(steep_.grid) / room;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      left_[rank] = room - state_.sums[rank];
      now_[rank] = worth(left_[rank], scale);
      by_room_[rank] = rank;
    }
    // Most ranks are nearly full: only the first of these have room for a piece, the fewer the larger it is.
    std::sort(by_room_.begin(), by_room_.end(),
              [&](std::int64_t one, std::int64_t other) { return left_[one] > left_[other]; });
    const std::int64_t first_level = choices_.level_first[group];
    const std::int64_t levels = choices_.level_first[group + 1] - first_level;
    lost_.assign(levels * ranks, kInfinity);
    least_.resize(levels * ranks);
    std::int64_t roomy = ranks;
    for (std::int64_t level = 0; level < levels; ++level) {
      const double size = choices_.level[first_level + level];
      while (roomy && !(size <= left_[by_room_[roomy - 1]])) --roomy;
      double* const least = least_.data() + level * ranks;
      for (std::int64_t index = 0; index < roomy; ++index) {
        const std::int64_t rank = by_room_[index];
        least[index] = lost_[level * ranks + rank] = now_[rank] - worth(left_[rank] - size, scale);
      }
      const std::int64_t turns = choices_.turns[first_level + level];
      std::partial_sort(least, least + std::min(turns, roomy), least + roomy);
      for (std::int64_t turn = roomy; turn < turns; ++turn) least[turn] = kInfinity;
    }
    price_.assign(options, 0.0);
    const std::int64_t end = choices_.free_first[group + 1];
    for (std::int64_t cell = choices_.free_first[group], option = 0; cell < end; ++cell) {
      const std::int64_t level = choices_.free_level[cell];
      if (level >= 0) price_[option] += least_[level * ranks + choices_.free_turn[cell]];
      option = option + 1 == options ? 0 : option + 1;
    }
    const double everywhere = static_cast<double>(ranks) / room;
    for (std::int64_t number = 0; number < options; ++number)
      price_[number] += choices_.base[choices_.choice[first + number] * choices_.dims] * everywhere;
    for (std::int64_t bound = choices_.bound_first[group]; bound < choices_.bound_first[group + 1]; ++bound)
      add_bound(bound);
  }

  // Adds what the parts that are bound to a set of places take.
  void add_bound(std::int64_t bound) {
    const std::int64_t set = choices_.bound_set[bound], width = choices_.set_width[set], places = places_of(set);
    const std::int64_t first = choices_.column_first[bound], columns = choices_.column_first[bound + 1] - first;
    const std::int64_t* const level = choices_.column_level + choices_.cell_first[bound];
    at_places_.resize(places);
    for (std::int64_t column = 0; column < columns; ++column) {
      double& price = price_[choices_.column_choice[first + column]];
      const std::int64_t count = choices_.column_count[first + column];
      if (!count) price = kInfinity;
      if (!(price < kInfinity)) continue;
      for (std::int64_t place = 0; place < places; ++place) {
        const std::int64_t* const at = place_of(set, place);
        double sum = 0.0;
        for (std::int64_t index = 0; index < width && sum < kInfinity; ++index)
          sum += lost_[level[index * columns + column] * choices_.ranks + at[index]];
        at_places_[place] = sum;
      }
      std::partial_sort(at_places_.begin(), at_places_.begin() + count, at_places_.end());
      double sum = 0.0;
      for (std::int64_t place = 0; place < count; ++place) sum += at_places_[place];
      price += sum;
    }
  }

  bool over(const double* limit) const {
    for (std::int64_t dim = 1; dim < choices_.dims; ++dim) {
      const double* const sums = state_.sums + dim * choices_.ranks;
      bool any = false;
      for (std::int64_t rank = 0; rank < choices_.ranks; ++rank) any |= sums[rank] > limit[dim];
      if (any) return true;
    }
    return false;
  }

  bool put(std::int64_t table, std::int64_t option, double room) {
    const std::int64_t dims = choices_.dims;
    limit_.resize(dims);
    for (std::int64_t dim = 0; dim < dims; ++dim)
      limit_[dim] = choices_.limit[dim] - (state_.base[dim] + choices_.base[option * dims + dim]);
    if (over(limit_.data())) return false;
    found_.clear();
    const bool done = each_part(option, [&](std::int64_t kind, std::int64_t) {
      const std::int64_t place = least(kind, room);
      if (place < 0) return false;
      shift(table, kind, place, 1);
      found_.push_back(static_cast<std::int32_t>(place));
      // Two pieces of a part may be on one rank.
      return !over(limit_.data());
    });
    if (!done) {
      each_part(option, [&](std::int64_t kind, std::int64_t slot) {
        if (slot == static_cast<std::int64_t>(found_.size())) return false;
        shift(table, kind, found_[slot], -1);
        return true;
      });
      return false;
    }
    for (std::int64_t dim = 0; dim < dims; ++dim) state_.base[dim] += choices_.base[option * dims + dim];
    lift_ = std::min(lift_ * steep_.rise[option], kMost);
    state_.option[table] = option;
    std::copy(found_.begin(), found_.end(), state_.spot + table * choices_.slots);
    return true;
  }

  // The place where a part takes least; -1 if it fits nowhere.
  std::int64_t least(std::int64_t kind, double room) const {
    const std::int64_t set = choices_.kind_set[kind], width = choices_.set_width[set], dims = choices_.dims;
    const std::int64_t first = choices_.kind_first[kind], places = places_of(set);
    const double scale = static_cast<double>(steep_.grid) / room;
    double best = kInfinity;
    std::int64_t found = -1;
    for (std::int64_t place = 0; place < places; ++place) {
      const std::int64_t* const at = place_of(set, place);
      double score = 0.0;
      bool fits = true;
      for (std::int64_t index = 0; index < width && fits; ++index) {
        const std::int64_t rank = at[index], piece = first + index;
        if (room > 0) {
          const double left = room - state_.sums[rank], after = left - choices_.size[piece * dims];
          fits = after >= 0;
          score += worth(left, scale) - worth(after, scale);
        } else {
          score += steep_.terms[rank] * (steep_.grow[piece] - 1.0);
        }
        for (std::int64_t dim = 1; dim < dims; ++dim)
          fits = fits && state_.sums[dim * choices_.ranks + rank] + choices_.size[piece * dims + dim] <= limit_[dim];
      }
      if (fits && score < best) {
        best = score;
        found = place;
      }
    }
    return found;
  }

  const Choices choices_;
  const State state_;
  const Steep steep_;
  double lift_;
  double saved_lift_ = 0.0;
  const double* draws_ = nullptr;
  std::vector<Wanted> wanted_;
  std::vector<std::pair<double, Wanted>> by_work_;
  std::vector<std::int64_t> here_;
  std::vector<std::int64_t> option_;
  std::vector<std::int32_t> spot_;
  std::vector<double> sums_;
  std::vector<double> base_;
  std::vector<double> terms_;
  std::vector<double> left_;
  std::vector<double> now_;
  std::vector<std::int64_t> by_room_;
  std::vector<double> lost_;
  std::vector<double> least_;
  std::vector<double> at_places_;
  std::vector<double> price_;
  std::vector<std::pair<double, std::int64_t>> order_;
  std::vector<double> limit_;
  std::vector<std::int32_t> found_;
};

}  // namespace

// drawn: (rounds, draws) from [0, 1).
// allowed: (rounds,) by which factor the soft maximum may grow.
extern "C" void shardrec_solve_rebuild(const Choices* choices, const State* state, const Steep* steep,
                                       std::int64_t rounds, std::int64_t draws, const double* drawn,
                                       const double* allowed) {
  Rounds(*choices, *state, *steep).run(rounds, draws, drawn, allowed);
}
