// Loops over rows of float32, compiled once for each width of vector registers that a processor may have.
//
// A job is a struct with a member template `bool run<Lanes>() const`. `run(job)` calls it with the lanes of this processor.
// One thread does all of it: ranks, of which there are as many as cores, are what runs side by side. Everything that a job
// calls is inlined into it (SHARDREC_INLINE), for a function takes the instructions of the one that it is inlined into, and
// only of that.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SHARDREC_INLINE __attribute__((always_inline)) inline
#define SHARDREC_BODY __attribute__((always_inline))  // of a lambda

namespace shardrec {

constexpr int64_t kLine = 64;  // bytes of a cache line

template <int Lanes>
struct VectorOf {
  typedef float type __attribute__((vector_size(Lanes * sizeof(float))));
};

template <int Lanes>
using Vector = typename VectorOf<Lanes>::type;

// Rows of 4 columns lie where they lie: nothing is known of the address.
template <int Lanes>
SHARDREC_INLINE Vector<Lanes> load(const float* at) {
  Vector<Lanes> value;
  __builtin_memcpy(&value, at, sizeof(value));
  return value;
}

template <int Lanes>
SHARDREC_INLINE void store(float* at, Vector<Lanes> value) {
  __builtin_memcpy(at, &value, sizeof(value));
}

// Calls body(start, tag) for the vectors of a row. Width > 0 is known to the compiler, which can then keep the row in
// registers; a row of any other width is taken in vectors of `Lanes`, then of 4, then of 1.
template <int Lanes>
struct Tag {
  static constexpr int lanes = Lanes;
};

template <int Lanes, class Body, size_t... Parts>
SHARDREC_INLINE void for_parts(Body&& body, std::index_sequence<Parts...>) {
  (body(int64_t(Parts) * Lanes, Tag<Lanes>{}), ...);
}

template <int Lanes, int Width, class Body>
SHARDREC_INLINE void for_vectors(int64_t width, Body&& body) {
  if constexpr (Width > 0) {
    constexpr int lanes = std::min(Lanes, Width);
    for_parts<lanes>(body, std::make_index_sequence<Width / lanes>{});
  } else {
    int64_t i = 0;
    for (; i + Lanes <= width; i += Lanes) body(i, Tag<Lanes>{});
    if constexpr (Lanes > 4) {
      for (; i + 4 <= width; i += 4) body(i, Tag<4>{});
    }
    for (; i < width; ++i) body(i, Tag<1>{});
  }
}

// Where a row would be that is asked for before its number is checked: arithmetic of pointers is undefined for some.
SHARDREC_INLINE const float* unchecked_row(const float* table, int64_t row, int64_t stride) {
  return reinterpret_cast<const float*>(uintptr_t(table) + uintptr_t(row) * uintptr_t(stride) * sizeof(float));
}

template <int Write = 0>
SHARDREC_INLINE void prefetch_row(const float* row, int64_t width) {
  for (int64_t i = 0; i < width; i += kLine / int64_t(sizeof(float))) {
    __builtin_prefetch(unchecked_row(row, i, 1), Write);
  }
}

// Past the caches, where the processor can: the line is not read first. `to` is aligned to 16 bytes.
template <int Lanes>
SHARDREC_INLINE void stream(float* to, Vector<Lanes> value) {
#if defined(__x86_64__)
  if constexpr (Lanes % 4 == 0) {
#pragma GCC unroll 4
    for (int i = 0; i < Lanes; i += 4) {
      __m128 part;
      __builtin_memcpy(&part, reinterpret_cast<const char*>(&value) + i * sizeof(float), sizeof(part));
      _mm_stream_ps(to + i, part);
    }
    return;
  }
#endif
  store<Lanes>(to, value);
}

inline void end_of_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

#if defined(__x86_64__)
template <class Job>
__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma"))) bool run_avx512(const Job& job) {
  return job.template run<16>();
}

template <class Job>
__attribute__((target("avx2,fma"))) bool run_avx2(const Job& job) {
  return job.template run<8>();
}
#endif

template <class Job>
bool run_anywhere(const Job& job) {
  return job.template run<4>();
}

// The lanes to use on this processor.
inline int lanes() {
#if defined(__x86_64__)
  static const int found = [] {
    __builtin_cpu_init();
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return wide && avx2 ? 16 : avx2 ? 8 : 4;
  }();
  return found;
#else
  return 4;
#endif
}

template <class Job>
bool run(const Job& job) {
#if defined(__x86_64__)
  if (lanes() == 16) return run_avx512(job);
  if (lanes() == 8) return run_avx2(job);
#endif
  return run_anywhere(job);
}

}  // namespace shardrec
