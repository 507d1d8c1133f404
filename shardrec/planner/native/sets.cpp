// Sets of parts that fit the ranks of a host; what sets.py does, in the same order of operations.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace {

// What there is to choose from; shapes as in sets.py.
struct Parts {
  std::int64_t kinds;
  std::int64_t local;             // L
  const std::int64_t* ways;       // (W, L)
  const std::int64_t* first_way;  // (K + 1,)
  const double* price;            // (K,)
  const double* rest;             // (K + 1, room + 1)
  const double* free;             // (room + 1,)
  std::int64_t room;

  // What the pieces are worth that the ranks have room for beside such loads, by one of the functions.
  double pieces(const double* value, const std::int64_t* loads) const {
    double sum = value[room - loads[0]];
    for (std::int64_t rank = 1; rank < local; ++rank) sum += value[room - loads[rank]];
    return sum;
  }

  const double* rest_of(std::int64_t kind) const { return rest + kind * (room + 1); }
};

// Sets with the same number of parts; of each its price, the loads of the ranks and then the kinds of the parts.
struct States {
  std::int64_t width;
  std::vector<double> value;
  std::vector<std::int64_t> rows;

  std::int64_t count() const { return std::int64_t(value.size()); }
  const std::int64_t* row(std::int64_t at) const { return rows.data() + at * width; }

  void drop_last() {
    value.pop_back();
    rows.resize(rows.size() - std::size_t(width));
  }

  void add(double worth, const std::int64_t* row) {
    value.push_back(worth);
    rows.insert(rows.end(), row, row + width);
  }
};

std::vector<std::int64_t> falling(const std::vector<double>& values) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto one, auto other) { return values[one] > values[other]; });
  return order;
}

// Which rows there were before. Those that only have the hash in common with an earlier one count as new.
class Seen {
 public:
  explicit Seen(const std::uint64_t* factors) : factors_(factors), table_(1024, -1) {}

  // Whether the last of the states is new.
  bool add(const States& states) {
    const std::int64_t last = states.count() - 1;
    if (2 * last > std::int64_t(table_.size())) grow();
    hashes_.resize(std::size_t(last) + 1);
    hashes_[last] = hash(states, last);
    for (std::uint64_t slot = place(hashes_[last]);; slot = (slot + 1) % table_.size()) {
      const std::int64_t other = table_[slot];
      if (other < 0) {
        table_[slot] = last;
        return true;
      }
      if (hashes_[other] == hashes_[last]) {
        return !std::equal(states.row(last), states.row(last) + states.width, states.row(other));
      }
    }
  }

 private:
  std::uint64_t hash(const States& states, std::int64_t at) const {
    std::uint64_t sum = 0;
    for (std::int64_t column = 0; column < states.width; ++column) {
      sum += std::uint64_t(states.row(at)[column]) * factors_[column];
    }
    return sum;
  }

  std::uint64_t place(std::uint64_t hash) const { return (hash ^ hash >> 32) % table_.size(); }

  void grow() {
    std::vector<std::int64_t> old(4 * table_.size(), -1);
    old.swap(table_);
    for (const std::int64_t at : old) {
      if (at < 0) continue;
      std::uint64_t slot = place(hashes_[at]);
      while (table_[slot] >= 0) slot = (slot + 1) % table_.size();
      table_[slot] = at;
    }
  }

  const std::uint64_t* factors_;
  std::vector<std::int64_t> table_;  // numbers of states, or -1; its size is a power of two
  std::vector<std::uint64_t> hashes_;
};

// All the sets with a part more that may be worth `bar`.
States extended(const Parts& parts, const States& states, double bar, const std::uint64_t* factors) {
  States found{states.width + 1, {}, {}};
  Seen seen(factors);
  std::vector<std::int64_t> row(std::size_t(found.width));
  for (std::int64_t at = 0; at < states.count(); ++at) {
    const std::int64_t* const before = states.row(at);
    std::copy(before, before + states.width, row.begin());
    // Kinds are in order, so that a set is made in one order only.
    const std::int64_t last = states.width > parts.local ? before[states.width - 1] : 0;
    for (std::int64_t kind = last; kind < parts.kinds; ++kind) {
      const double value = states.value[at] + parts.price[kind];
      const double* const rest = parts.rest_of(kind);
      row.back() = kind;
      for (std::int64_t way = parts.first_way[kind]; way < parts.first_way[kind + 1]; ++way) {
        const std::int64_t* const own = parts.ways + way * parts.local;
        std::int64_t most = 0;
        for (std::int64_t rank = 0; rank < parts.local; ++rank) {
          row[rank] = before[rank] + own[rank];
          most = std::max(most, row[rank]);
        }
        if (most > parts.room || !(value + parts.pieces(rest, row.data()) >= bar)) continue;
        found.add(value, row.data());
        // Ways of equal parts may change places: one of those that look the same is enough.
        if (!seen.add(found)) found.drop_last();
      }
    }
  }
  return found;
}

}  // namespace

// ways: (W, L) of the kinds one after the other; first_way: (K + 1,).
// rest: (K + 1, room + 1); free: (room + 1,).
// factors: (L + width,) of the hash.
// values, sets, loads: room for `wanted` sets; sets: (wanted, width), -1 where there are fewer parts.
// most: 1 number.
// Returns how many sets there are.
extern "C" std::int64_t shardrec_solve_best_sets(std::int64_t kinds, std::int64_t local, const std::int64_t* ways,
                                                 const std::int64_t* first_way, const double* price,
                                                 const double* rest, const double* free, std::int64_t room,
                                                 double least, std::int64_t beam, double near,
                                                 std::int64_t most_states, const std::uint64_t* factors,
                                                 std::int64_t wanted, std::int64_t width, double* values,
                                                 std::int64_t* sets, std::int64_t* loads, double* most) {
  const Parts parts{kinds, local, ways, first_way, price, rest, free, room};
  const double nothing = -std::numeric_limits<double>::infinity();
  double bar = least, passed = nothing;
  std::int64_t looked = 0;
  std::vector<double> worth;
  std::vector<std::vector<std::int64_t>> found;
  States states{local, {0.0}, std::vector<std::int64_t>(std::size_t(local), 0)};
  while (states.count()) {
    double best = nothing;
    const double before = bar;
    for (std::int64_t at = 0; at < states.count(); ++at) {
      const double own = states.value[at] + parts.pieces(free, states.row(at));
      if (own < before) continue;
      best = std::max(best, own);
      worth.push_back(own);
      found.emplace_back(states.row(at), states.row(at) + states.width);
    }
    if (best > nothing) {
      bar = std::max(bar, best - near);
      if (!beam) {
        passed = std::numeric_limits<double>::infinity();
        break;
      }
    }
    if ((beam && states.count() > beam) || looked > most_states) {
      std::vector<double> promise(states.value);
      for (std::int64_t at = 0; at < states.count(); ++at) {
        const std::int64_t* const row = states.row(at);
        const std::int64_t last = states.width > local ? row[states.width - 1] : 0;
        promise[at] += parts.pieces(parts.rest_of(last), row);
      }
      const auto order = falling(promise);
      const std::int64_t keep = looked <= most_states ? beam : 0;
      passed = std::max(passed, promise[order[keep]]);
      if (!keep) break;
      States kept{states.width, {}, {}};
      for (std::int64_t at = 0; at < keep; ++at) kept.add(states.value[order[at]], states.row(order[at]));
      states = std::move(kept);
    }
    states = extended(parts, states, bar, factors);
    looked += states.count();
  }
  std::int64_t count = 0;
  *most = std::max(passed, least);
  for (const std::int64_t at : falling(worth)) {
    if (!count) *most = std::max(*most, worth[at]);
    if (worth[at] < bar || count == wanted) break;
    const auto& row = found[at];
    values[count] = worth[at];
    std::copy(row.begin(), row.begin() + local, loads + count * local);
    std::int64_t* const set = sets + count * width;
    std::fill(set, set + width, -1);
    std::copy(row.begin() + local, row.end(), set);
    ++count;
  }
  return count;
}
