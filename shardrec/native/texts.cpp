// text_keys: 64-bit keys of texts, as shardrec/trainer/data/ids.py makes them with NumPy where this is not compiled.
//
// Texts are a column of Arrow: value i is the bytes offsets[i] to offsets[i + 1] (not included) of "data".

#include "hashing.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <limits>
#include <tuple>

namespace shardrec {
namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15u;

constexpr std::array<uint8_t, 256> kNibbles = [] {
  std::array<uint8_t, 256> nibbles{};
  nibbles.fill(255);
  for (int digit = 0; digit < 10; ++digit) nibbles['0' + digit] = digit;
  for (int digit = 10; digit < 16; ++digit) nibbles['a' + digit - 10] = nibbles['A' + digit - 10] = digit;
  return nibbles;
}();

// A number of 1 to 16 hexadecimal digits.
bool hexadecimal(const uint8_t* text, int64_t length, uint64_t* key) {
  uint64_t value = 0;
  uint8_t seen = 0;
  for (int64_t i = 0; i < length && i < 16; ++i) {
    const uint8_t nibble = kNibbles[text[i]];
    seen |= nibble;
    value = value << 4 | (nibble & 15);
  }
  *key = value;
  return length <= 16 && seen < 16;
}

// A whole number of 64 bits as it is usually written ("7", "-7", not "07", "+7" or "-0"), modulo 2^64.
bool decimal(const uint8_t* text, int64_t length, uint64_t* key) {
  if (length > 20) return false;
  const bool minus = text[0] == '-';
  const int64_t digits = length - minus;
  text += minus;
  if (digits == 0 || (text[0] == '0' && (digits > 1 || minus))) return false;
  uint64_t value = 0;
  for (int64_t i = 0; i < digits; ++i) {
    const uint64_t digit = uint8_t(text[i] - '0');
    // The 20th digit is the only one that can pass 2^64.
    if (digit > 9 || (i == 19 && value > (std::numeric_limits<uint64_t>::max() - digit) / 10)) return false;
    value = value * 10 + digit;
  }
  *key = minus ? 0 - value : value;
  return !minus || value <= uint64_t(1) << 63;
}

// A polynomial of the bytes, then mixed.
uint64_t hashed(const uint8_t* text, int64_t length) {
  uint64_t sum = 0;
  for (int64_t i = length; i-- > 0;) sum = (sum + text[i] + 1) * kBase;
  return mixed(int64_t(sum));
}

template <typename Offset>
void write_keys(
    const at::Tensor& data, const at::Tensor& offsets, bool as_hexadecimal, bool spread, int64_t* keys, bool* bad) {
  const uint8_t* bytes = data.const_data_ptr<uint8_t>();
  const Offset* at = offsets.const_data_ptr<Offset>();
  const int64_t count = offsets.numel() - 1, size = data.numel();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = at[i], stop = at[i + 1];
    TORCH_CHECK(start >= 0 && start <= stop && stop <= size, "shardrec: offsets ascend from 0 to the size of the data");
    const uint8_t* text = bytes + start;
    const int64_t length = stop - start;
    uint64_t key = 0;
    bad[i] = false;
    if (length == 0) {
    } else if (as_hexadecimal) {
      bad[i] = !hexadecimal(text, length, &key);
    } else if (decimal(text, length, &key)) {
      if (spread) key = mixed(int64_t(key));
    } else {
      key = hashed(text, length);
    }
    keys[i] = int64_t(key);
  }
}

std::tuple<at::Tensor, at::Tensor> text_keys(
    const at::Tensor& data, const at::Tensor& offsets, bool as_hexadecimal, bool spread) {
  TORCH_CHECK(
      data.device().is_cpu() && data.is_contiguous() && data.scalar_type() == at::kByte,
      "shardrec: data are contiguous uint8 on the CPU");
  const bool is_small = offsets.scalar_type() == at::kInt;
  TORCH_CHECK(
      offsets.device().is_cpu() && offsets.is_contiguous() && offsets.numel() > 0 &&
          (is_small || offsets.scalar_type() == at::kLong),
      "shardrec: offsets are contiguous int32 or int64 on the CPU, one more than texts");
  auto keys = at::empty({offsets.numel() - 1}, at::kLong);
  auto bad = at::empty({offsets.numel() - 1}, at::kBool);
  const auto write = is_small ? write_keys<int32_t> : write_keys<int64_t>;
  write(data, offsets, as_hexadecimal, spread, keys.data_ptr<int64_t>(), bad.data_ptr<bool>());
  return {keys, bad};
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def("text_keys(Tensor data, Tensor offsets, bool hexadecimal, bool spread) -> (Tensor keys, Tensor bad)");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) { library.impl("text_keys", shardrec::text_keys); }
