// Knapsacks of whole sizes; what knapsack.py does, in the same order of operations.

#pragma once

#include <cstdint>
#include <vector>

namespace shardrec::solve {

constexpr double kMore = 1e-12;  // by which a value must be more to count as better

// One step of the dynamic programme: so many pieces of a kind, which are better than what there was for some sizes.
struct Step {
  std::int64_t kind;
  std::int64_t times;
  std::int64_t shift;  // what they take of a size
};

// Where to note the steps, for whoever wants to know the pieces.
struct Steps {
  Step* made;
  std::uint8_t* better;  // per step, a bit for each size less its shift: whether it was better there
  std::int64_t count;
};

// Bytes that hold the bits of a step.
constexpr std::int64_t bytes_of(std::int64_t most) { return most / 8 + 1; }

// So many pieces more, wherever that is better: later[at] against before[at] + value. Whether it was anywhere.
//
// before, later: (count,), which may overlap if `later` begins after `before`. A piece is not used again by what it has
// just made better: the largest size is the first.
// better: (bytes_of(count),) a bit for each size.
bool improve(const double* before, double* later, std::uint8_t* better, std::int64_t count, double value);

// The best multisets of the first so many kinds, for several numbers of kinds.
//
// counts: how many pieces of each kind there are, or nothing: any number.
// start: (most + 1) what each size is worth without any, or nothing: 0.
// found: (n, most + 1) the most value within each size.
// steps: or nothing.
void knapsacks(const std::int64_t* weights, const double* values, const std::int64_t* counts, const double* start,
               std::int64_t most, const std::int64_t* ends, std::int64_t n, double* found, Steps* steps);

}  // namespace shardrec::solve
