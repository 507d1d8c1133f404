// Where a raw 64-bit id belongs: shardrec/exchange/hashing.py says the same in torch's operators.

#pragma once

#include <cstdint>

namespace shardrec {

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of the 64-bit numbers.
inline uint64_t mixed(int64_t id) {
  uint64_t z = uint64_t(id);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The row of a table of `rows` rows, up to 2^31, that tells which row block an id belongs to.
inline int64_t home_row(int64_t id, int64_t rows) { return int64_t(((mixed(id) >> 32) * uint64_t(rows)) >> 32); }

}  // namespace shardrec
