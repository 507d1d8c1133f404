// The ways to fill a rank; what fillings.py does, in the same order of operations.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Fillings {
  const std::int64_t* sizes;  // of each kind, the largest first
  const std::int64_t* heavy;
  const double* worth;
  std::int64_t kinds;
  const double* value;
  std::int64_t room;
  double budget;
  std::int64_t most;
  std::int64_t most_tries;
  std::int64_t* found;
  std::int64_t capacity;
  std::vector<std::int64_t> way;
  std::int64_t tries = 0;
  std::int64_t ways = 0;
  std::int64_t numbers = 0;

  bool fits(std::int64_t kind, std::int64_t left, std::int64_t bytes) const {
    return sizes[kind] <= left && heavy[kind] <= bytes;
  }

  // Whether there may be more.
  bool extend(std::int64_t at, std::int64_t left, std::int64_t bytes, double spent) {
    if (++tries > most_tries) return false;
    if (value[room] - spent - value[left] > budget) return true;
    bool last = true;
    for (; at < kinds; ++at) {
      if (!fits(at, left, bytes)) continue;
      last = false;
      way.push_back(at);
      const bool more = extend(at, left - sizes[at], bytes - heavy[at], spent + worth[at]);
      way.pop_back();
      if (!more) return false;
    }
    // What is left may have been too little memory for what its load is worth.
    return !last || value[room] - spent > budget || has_room(left, bytes) || note();
  }

  // Whether it could have another piece, or a larger one in the place of some.
  bool has_room(std::int64_t left, std::int64_t bytes) const {
    for (std::int64_t kind = 0; kind < kinds; ++kind) {
      if (fits(kind, left, bytes)) return true;
    }
    for (std::size_t number = 0; number < way.size(); ++number) {
      const std::int64_t piece = way[number];
      if (number && piece == way[number - 1]) continue;
      for (std::int64_t kind = 0; kind < piece; ++kind) {
        if (heavy[kind] >= heavy[piece] && fits(kind, left + sizes[piece], bytes + heavy[piece])) return true;
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

// sizes, heavy, worth: (K,) of each kind; no kind is after one that is as large in both.
// value: (room + 1,).
// found: room for `capacity` numbers; per way, how many pieces it has, then their kinds, ascending.
// Returns how many numbers there are, of which those are written that there was room for; -1 if there are too many ways.
extern "C" std::int64_t shardrec_solve_fillings(const std::int64_t* sizes, const std::int64_t* heavy,
                                                const double* worth, std::int64_t kinds, const double* value,
                                                std::int64_t room, std::int64_t bytes, double budget,
                                                std::int64_t most, std::int64_t most_tries, std::int64_t* found,
                                                std::int64_t capacity) {
  Fillings fillings{sizes, heavy, worth, kinds, value, room, budget, most, most_tries, found, capacity, {}};
  return fillings.extend(0, room, bytes, 0.0) ? fillings.numbers : -1;
}
