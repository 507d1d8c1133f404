// Knapsacks of whole loads and memory; what plane.py does, in the same order of operations.

#include <algorithm>
#include <vector>

#include "knapsack.h"

using shardrec::solve::bytes_of;
using shardrec::solve::improve;
using shardrec::solve::kMore;
using shardrec::solve::Step;

// found: (memory + 1, most + 1) zeros; the most value within each.
// made, better: room for all steps that there may be, of (memory + 1, bytes_of(most)) bits each. A step's shift is that
// of the load.
// Returns how many there are.
extern "C" std::int64_t shardrec_solve_plane(const std::int64_t* sizes, const std::int64_t* heavy, const double* values,
                                             std::int64_t kinds, std::int64_t most, std::int64_t memory, double* found,
                                             Step* made, std::uint8_t* better) {
  const std::int64_t row = most + 1, bytes = bytes_of(most);
  std::int64_t steps = 0;
  for (std::int64_t kind = 0; kind < kinds; ++kind) {
    const std::int64_t size = sizes[kind], own = heavy[kind];
    if (size > most || own > memory || values[kind] <= found[own * row + size] + kMore) continue;
    std::int64_t left = std::min(most / size, own ? memory / own : most);
    for (std::int64_t doubled = 1; left > 0; doubled *= 2) {
      const std::int64_t times = std::min(doubled, left), shift = times * size;
      const double value = double(times) * values[kind];
      bool any = false;
      left -= times;
      // The most memory first, for the same reason as the largest size in improve().
      for (std::int64_t rest = memory - times * own; rest >= 0; --rest) {
        any |= improve(found + rest * row, found + (rest + times * own) * row + shift,
                       better + (steps * (memory + 1) + rest) * bytes, row - shift, value);
      }
      if (!any) break;
      made[steps++] = {kind, times, shift};
    }
  }
  return steps;
}

// The numbers of pieces that have the best value within a load and memory.
//
// counts: (K,) zeros.
extern "C" void shardrec_solve_plane_pieces(const Step* made, const std::uint8_t* better, std::int64_t steps,
                                            const std::int64_t* heavy, std::int64_t most, std::int64_t memory,
                                            std::int64_t size, std::int64_t bytes, std::int64_t* counts) {
  for (std::int64_t at = steps - 1; at >= 0; --at) {
    const Step& step = made[at];
    const std::int64_t load = size - step.shift, rest = bytes - step.times * heavy[step.kind];
    if (load < 0 || rest < 0) continue;
    if (better[(at * (memory + 1) + rest) * bytes_of(most) + load / 8] >> (load % 8) & 1) {
      counts[step.kind] += step.times;
      size = load;
      bytes = rest;
    }
  }
}

// Add the tables of which a rank has only one piece, or none.
//
// sizes, heavy, values: of the pieces, by table.
// ends: (tables,) of each table's.
// value: (memory + 1, most + 1) that of the other pieces; afterwards of all.
// worth: (1 + tables, memory + 1, most + 1) that of the other pieces everywhere; afterwards that of one of a table's or
// of others instead.
// picked: (tables, memory + 1, most + 1) -1; which piece of a table is taken.
extern "C" void shardrec_solve_plane_alone(const std::int64_t* sizes, const std::int64_t* heavy, const double* values,
                                           const std::int64_t* ends, std::int64_t tables, std::int64_t most,
                                           std::int64_t memory, double* value, double* worth, std::int64_t* picked) {
  const std::int64_t row = most + 1, all = (memory + 1) * row;
  const double* const free = worth;
  std::vector<double> before(all);
  for (std::int64_t table = 0, number = 0; table < tables; ++table) {
    worth += all;
    std::copy(value, value + all, before.begin());
    for (; number < ends[table]; ++number) {
      const std::int64_t shift = heavy[number] * row + sizes[number];
      const double mine = values[number];
      if (mine <= free[shift] + kMore) continue;
      for (std::int64_t rest = 0; rest <= memory - heavy[number]; ++rest) {
        for (std::int64_t from = rest * row, last = from + row - sizes[number]; from < last; ++from) {
          const std::int64_t at = from + shift;
          const double now = before[from] + mine;
          const bool better = now > value[at] + kMore;
          worth[at] = std::max(worth[at], mine);
          value[at] = better ? now : value[at];
          picked[at] = better ? number : picked[at];
        }
      }
    }
    picked += all;
  }
}
