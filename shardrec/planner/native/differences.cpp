// Tables one by one, by how much the shares of two hosts differ; what differences.py does, with the same sums.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr std::int64_t kBlock = 32;  // differences that are looked at together
constexpr double kNever = std::numeric_limits<double>::infinity();

// What a table may add to a difference of 0, and at which price.
struct Move {
  std::int64_t by;
  double price;
};

// Where the sums of one number of tables with shares are: there[d] for any difference d, with a block's room on either
// side. None that is farther from 0 than `width` is finite.
struct Row {
  double* there;
  std::int64_t width;
};

// The least of `found` and what the moves make of a row's sums, for the differences from `first` on.
template <int Lanes>
__attribute__((always_inline)) inline void move_by(const Row& row, const std::vector<Move>& moves, std::int64_t first,
                                                   double* found) {
  typedef double values __attribute__((vector_size(Lanes * sizeof(double))));
  values least[kBlock / Lanes];
  std::memcpy(least, found, sizeof(least));
  for (const Move& move : moves) {
    const std::int64_t from = first - move.by;
    if (from > row.width || from + kBlock <= -row.width) continue;
    for (std::int64_t part = 0; part < kBlock / Lanes; ++part) {
      values now;
      std::memcpy(&now, row.there + from + part * Lanes, sizeof(now));
      now += move.price;
      least[part] = now < least[part] ? now : least[part];
    }
  }
  std::memcpy(found, least, sizeof(least));
}

typedef void (*MoveAll)(const Row&, const std::vector<Move>&, std::int64_t, double*);

#if defined(__x86_64__)
__attribute__((target("avx2"))) void move_by_four(const Row& row, const std::vector<Move>& moves, std::int64_t first,
                                                  double* found) {
  move_by<4>(row, moves, first, found);
}
#endif

void move_by_two(const Row& row, const std::vector<Move>& moves, std::int64_t first, double* found) {
  move_by<2>(row, moves, first, found);
}

MoveAll fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return move_by_four;
#endif
  return move_by_two;
}

}  // namespace

// The least sum of prices of one option per table, by number of tables with shares and difference.
//
// ends: (tables,) of each table's moves. The first is that of options without shares.
// by: of each move, not negative; the same in the other direction costs the same.
// prices: infinite where there is none.
// most: number of tables with shares that stands for all larger ones.
// reach: the largest difference.
// budget: what costs so much more than the least that there is, or more, is left out.
// found: (most + 1, reach + 1), infinite; stays so if some table has no option.
// lowest: (1,) 0; the least sum of all.
extern "C" void shardrec_solve_differences(const std::int64_t* ends, const std::int64_t* by, const double* prices,
                                           std::int64_t tables, std::int64_t most, std::int64_t reach, double budget,
                                           double* found, double* lowest) {
  static const MoveAll move_all = fastest();
  const std::int64_t beside = reach + kBlock, length = 2 * beside + 1;
  std::vector<double> sums((most + 2) * length, kNever), next(beside);
  std::vector<Row> rows;
  for (std::int64_t row = 0; row < most + 2; ++row) rows.push_back({sums.data() + row * length + beside, -1});
  Row& either = rows[most + 1];
  rows[0].there[0] = 0.0;
  rows[0].width = 0;
  std::vector<Move> without, with;
  for (std::int64_t table = 0, move = 0; table < tables; ++table) {
    const double least = *std::min_element(prices + move, prices + ends[table]);
    *lowest += least;
    if (least == kNever) return;
    std::int64_t farthest = 0;
    without.clear();
    with.clear();
    for (bool first = true; move < ends[table]; ++move, first = false) {
      if (prices[move] > least + budget) continue;
      (first ? without : with).push_back({by[move], prices[move]});
      farthest = std::max(farthest, by[move]);
      if (by[move]) with.push_back({-by[move], prices[move]});
    }
    // The largest number comes of itself and the one before.
    const Row &last = rows[most], &before = rows[most ? most - 1 : 0];
    either.width = std::max(last.width, before.width);
    for (std::int64_t at = -reach; at <= reach; ++at) either.there[at] = std::min(last.there[at], before.there[at]);
    // The largest first, as each number is made of itself and the one before.
    for (std::int64_t number = most; number >= 0; --number) {
      Row& row = rows[number];
      const Row* const shared = number == most ? &either : number ? &rows[number - 1] : nullptr;
      std::int64_t width = row.width;
      if (shared) width = std::max(width, std::min(reach, shared->width + farthest));
      for (std::int64_t first = 0; first <= width; first += kBlock) {
        std::fill_n(next.begin() + first, kBlock, kNever);
        move_all(row, without, first, next.data() + first);
        if (shared) move_all(*shared, with, first, next.data() + first);
      }
      const double cut = *lowest + budget;
      for (std::int64_t at = 0; at <= width; ++at) row.there[at] = next[at] <= cut ? next[at] : kNever;
      for (std::int64_t at = 1; at <= width; ++at) row.there[-at] = row.there[at];
      while (width >= 0 && row.there[width] == kNever) --width;
      row.width = width;
    }
  }
  for (std::int64_t number = 0; number <= most; ++number) {
    std::copy(rows[number].there, rows[number].there + reach + 1, found + number * (reach + 1));
  }
}
