// The ways to fill a rank; what fillings.py does, in the same order of operations.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

struct Fillings {
  const std::int64_t* sizes;  // of each kind, the largest first
  const std::int64_t* heavy;
  const std::int64_t* table;  // that a rank has no more than one piece of; -1: any number
  const double* worth;
  std::int64_t kinds;
  double least;  // worth of a way
  std::int64_t coarse;  // small steps of memory that are a large one
  std::int64_t columns;
  std::int64_t room;
  std::int64_t most;
  std::int64_t most_tries;
  std::int64_t* found;
  std::int64_t capacity;
  std::vector<double> rest;  // (kinds + 1, room + 1, columns) the most that pieces from a kind on are worth
  std::vector<std::int64_t> first;  // kind that fits, by load
  std::vector<std::int64_t> way;
  std::int64_t tries = 0;
  std::int64_t ways = 0;
  std::int64_t numbers = 0;

  bool fits(std::int64_t kind, std::int64_t left, std::int64_t bytes) const {
    return sizes[kind] <= left && heavy[kind] <= bytes;
  }

  // Whether there is a piece already with which one of a kind is on no rank.
  bool barred(std::int64_t kind) const {
    return table[kind] >= 0 &&
           std::any_of(way.begin(), way.end(), [=, this](std::int64_t piece) { return table[piece] == table[kind]; });
  }

  // Whether there may be more.
  bool extend(std::int64_t at, std::int64_t left, std::int64_t bytes, double spent) {
    if (++tries > most_tries) return false;
    if (spent + rest[std::size_t((at * (room + 1) + left) * columns + bytes / coarse)] < least) return true;
    bool last = true;
    std::int64_t heaviest = -1;
    for (std::int64_t kind = first[left]; kind < kinds; ++kind) {
      if (heavy[kind] > bytes || barred(kind)) continue;
      last = false;
      // Where nothing fits beside it, one that fits and is no smaller would do instead.
      if (left - sizes[kind] < sizes[kinds - 1] && table[kind] < 0 && heavy[kind] <= heaviest) continue;
      heaviest = std::max(heaviest, heavy[kind]);
      if (kind < at) continue;
      way.push_back(kind);
      const bool more = extend(kind, left - sizes[kind], bytes - heavy[kind], spent + worth[kind]);
      way.pop_back();
      if (!more) return false;
    }
    return !last || spent < least || has_larger(left, bytes) || note();
  }

  // Whether it could have a larger piece in the place of some.
  bool has_larger(std::int64_t left, std::int64_t bytes) const {
    for (std::size_t number = 0; number < way.size(); ++number) {
      const std::int64_t piece = way[number];
      if (number && piece == way[number - 1]) continue;
      for (std::int64_t kind = 0; kind < piece; ++kind) {
        const bool alike = table[kind] == table[piece] || (table[piece] < 0 && !barred(kind));
        if (alike && heavy[kind] >= heavy[piece] && fits(kind, left + sizes[piece], bytes + heavy[piece])) return true;
      }
    }
    return false;
  }

  // How many pieces it has, then their kinds.
  bool note() {
    const std::int64_t length = std::int64_t(way.size()) + 1;
    if (numbers + length <= capacity) {
      found[numbers] = length - 1;
      std::copy(way.begin(), way.end(), found + numbers + 1);
    }
    numbers += length;
    return ++ways <= most;
  }
};

}  // namespace

// sizes, heavy, table, worth: (K,) of each kind; none is after one that is as large in the first two and may have its
// place.
// found: room for `capacity` numbers; per way, how many pieces it has, then their kinds, ascending.
// Returns how many numbers there are, of which those are written that there was room for; -1 if there are too many ways.
extern "C" std::int64_t shardrec_solve_fillings(const std::int64_t* sizes, const std::int64_t* heavy,
                                                const std::int64_t* table, const double* worth,
                                                std::int64_t kinds, double least,
                                                std::int64_t coarse, std::int64_t room, std::int64_t bytes,
                                                std::int64_t most, std::int64_t most_tries, std::int64_t* found,
                                                std::int64_t capacity) {
  std::vector<std::int64_t> first(std::size_t(room + 1), kinds);
  for (std::int64_t left = room, kind = 0; left >= 0; --left) {
    while (kind < kinds && sizes[kind] > left) ++kind;
    first[std::size_t(left)] = kind;
  }
  const std::int64_t columns = bytes / coarse + 1, many = (room + 1) * columns;
  std::vector<double> rest(std::size_t((kinds + 1) * many));
  for (std::int64_t kind = kinds - 1; kind >= 0; --kind) {
    double* const here = rest.data() + kind * many;
    std::copy(here + many, here + 2 * many, here);
    const std::int64_t up = heavy[kind] / coarse;
    for (std::int64_t load = sizes[kind]; load <= room; ++load) {
      const double* const before = here + (load - sizes[kind]) * columns;
      double* const now = here + load * columns;
      for (std::int64_t column = up; column < columns; ++column) {
        now[column] = std::max(now[column], before[column - up] + worth[kind]);
      }
    }
  }
  Fillings fillings{sizes, heavy,      table, worth,    kinds,           least,            coarse, columns,
                    room,  most, most_tries, found, capacity, std::move(rest), std::move(first), {}};
  return fillings.extend(0, room, bytes, 0.0) ? fillings.numbers : -1;
}
