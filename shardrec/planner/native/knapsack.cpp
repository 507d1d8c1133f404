#include "knapsack.h"

#include <algorithm>
#include <cstring>

namespace shardrec::solve {
namespace {

constexpr std::int64_t kByte = 8;  // bits

template <int Lanes>
struct VectorOf {
  typedef double values __attribute__((vector_size(Lanes * sizeof(double))));
  typedef std::int64_t masks __attribute__((vector_size(Lanes * sizeof(std::int64_t))));
};

// As improve(), by so many values at once. The largest first, and values are read before what is as large is written.
template <int Lanes>
__attribute__((always_inline)) inline bool improve_by(const double* before, double* later, std::uint8_t* better,
                                                      std::int64_t count, double value) {
  typename VectorOf<Lanes>::masks bits{}, any{};
  for (int lane = 0; lane < Lanes; ++lane) bits[lane] = std::int64_t(1) << lane;
  std::int64_t at = count / kByte * kByte, last = 0;
  for (std::int64_t lane = count - at; lane-- > 0;) {
    const double now = before[at + lane] + value;
    const bool is = now > later[at + lane] + kMore;
    if (is) later[at + lane] = now;
    last |= std::int64_t(is) << lane;
  }
  better[at / kByte] = std::uint8_t(last);
  while ((at -= kByte) >= 0) {
    typename VectorOf<Lanes>::masks here{};
    for (int part = kByte - Lanes; part >= 0; part -= Lanes) {
      typename VectorOf<Lanes>::values now, was;
      std::memcpy(&now, before + at + part, sizeof(now));
      std::memcpy(&was, later + at + part, sizeof(was));
      now += value;
      const typename VectorOf<Lanes>::masks is = now > was + kMore;
      was = is ? now : was;
      std::memcpy(later + at + part, &was, sizeof(was));
      here |= (is & bits) << part;
    }
    any |= here;
    std::int64_t byte = 0;
    for (int lane = 0; lane < Lanes; ++lane) byte |= here[lane];
    better[at / kByte] = std::uint8_t(byte);
  }
  for (int lane = 0; lane < Lanes; ++lane) last |= any[lane];
  return last != 0;
}

typedef bool (*Improve)(const double*, double*, std::uint8_t*, std::int64_t, double);

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool improve_by_four(const double* before, double* later, std::uint8_t* better,
                                                     std::int64_t count, double value) {
  return improve_by<4>(before, later, better, count, value);
}
#endif

bool improve_by_two(const double* before, double* later, std::uint8_t* better, std::int64_t count, double value) {
  return improve_by<2>(before, later, better, count, value);
}

Improve fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return improve_by_four;
#endif
  return improve_by_two;
}

}  // namespace

bool improve(const double* before, double* later, std::uint8_t* better, std::int64_t count, double value) {
  static const Improve fast = fastest();
  return fast(before, later, better, count, value);
}

void knapsacks(const std::int64_t* weights, const double* values, const std::int64_t* counts, const double* start,
               std::int64_t most, const std::int64_t* ends, std::int64_t n, double* found, Steps* steps) {
  const std::int64_t sizes = most + 1;
  std::vector<double> best(sizes, 0.0);
  if (start) std::copy(start, start + sizes, best.begin());
  std::vector<std::uint8_t> unused(steps ? 0 : bytes_of(most));
  std::int64_t kind = 0;
  for (std::int64_t number = 0; number < n; ++number) {
    for (; kind < ends[number]; ++kind) {
      const std::int64_t weight = weights[kind];
      // No more than others have in its place, of which there are any number: of no use, as most kinds are.
      if (weight > most || values[kind] <= (counts ? kMore : best[weight] + kMore)) continue;
      std::int64_t left = most / weight;
      if (counts) left = std::min(left, counts[kind]);
      for (std::int64_t doubled = 1; left > 0; doubled *= 2) {
        const std::int64_t times = std::min(doubled, left);
        left -= times;
        const std::int64_t shift = times * weight, count = sizes - shift;
        std::uint8_t* const better = steps ? steps->better + steps->count * bytes_of(most) : unused.data();
        if (!improve(best.data(), best.data() + shift, better, count, double(times) * values[kind])) break;
        if (steps) steps->made[steps->count++] = {kind, times, shift};
      }
    }
    std::copy(best.begin(), best.end(), found + number * sizes);
  }
}

}  // namespace shardrec::solve

using shardrec::solve::bytes_of;
using shardrec::solve::Step;
using shardrec::solve::Steps;

// made, better: room for all steps that there may be. Returns how many there are.
extern "C" std::int64_t shardrec_solve_knapsacks(const std::int64_t* weights, const double* values,
                                                 const std::int64_t* counts, const double* start, std::int64_t most,
                                                 const std::int64_t* ends, std::int64_t n, double* found, Step* made,
                                                 std::uint8_t* better) {
  Steps steps{made, better, 0};
  shardrec::solve::knapsacks(weights, values, counts, start, most, ends, n, found, &steps);
  return steps.count;
}

// The numbers of pieces that have the best value within a size, of the first `end` kinds.
//
// counts: (K,) zeros.
extern "C" void shardrec_solve_knapsack_pieces(const Step* made, const std::uint8_t* better, std::int64_t steps,
                                               std::int64_t most, std::int64_t end, std::int64_t size,
                                               std::int64_t* counts) {
  std::int64_t place = size;
  for (std::int64_t at = steps - 1; at >= 0; --at) {
    const Step& step = made[at];
    if (step.kind >= end || place < step.shift) continue;
    const std::int64_t rest = place - step.shift;
    if (better[at * bytes_of(most) + rest / 8] >> (rest % 8) & 1) {
      counts[step.kind] += step.times;
      place = rest;
    }
  }
}
