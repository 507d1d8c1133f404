// What a call of the lookups is about: slots, their tables, and where their ids begin.
//
// "slots" (S, 6) int64 depends on the plan only. A row of it is
//     number of the table, its first element in the weights, its rows, its width, first output column, first state
// Slot s has `lengths[s][b]` ids for sample b; ids lie slot after slot, sample after sample.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace shardrec {

struct Slot {
  int64_t table;
  int64_t base;
  int64_t rows;
  int64_t width;
  int64_t column;
  int64_t state;
  int64_t first = 0;  // number of its first id
  int64_t end = 0;
};

constexpr int64_t kSlotFields = 6;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // rows, or columns, of a table

inline void check_dense(const at::Tensor& one, const char* name) {
  TORCH_CHECK(one.device().is_cpu() && one.is_contiguous(), "shardrec: ", name, " is contiguous and on the CPU");
}

inline std::vector<Slot> slots_of(const at::Tensor& slots, int64_t elements) {
  check_dense(slots, "slots");
  TORCH_CHECK(
      slots.dim() == 2 && slots.size(1) == kSlotFields && slots.scalar_type() == at::kLong,
      "shardrec: slots are (slots, ", kSlotFields, ") int64");
  std::vector<Slot> found(slots.size(0));
  const int64_t* one = slots.const_data_ptr<int64_t>();
  for (Slot& slot : found) {
    slot = {one[0], one[1], one[2], one[3], one[4], one[5]};
    one += kSlotFields;
    TORCH_CHECK(
        slot.table >= 0 && slot.base >= 0 && slot.rows >= 0 && slot.rows <= kMost && slot.width > 0 &&
            slot.width <= kMost && slot.column >= 0 && slot.state >= 0 && slot.base <= elements &&
            slot.rows <= (elements - slot.base) / slot.width,
        "shardrec: a table lies outside of the weights: table ", slot.table, " has ", slot.rows, " rows of ",
        slot.width, " columns from element ", slot.base, " of ", elements);
  }
  return found;
}

// Ids, lengths (S, B) and weights of ids, checked.
struct Bags {
  const int32_t* lengths;
  int64_t samples;
  int64_t count;
  const float* weights;
};

inline Bags bags_of(
    const at::Tensor& ids, const at::Tensor& lengths, const std::optional<at::Tensor>& weights, int64_t slots) {
  check_dense(ids, "ids");
  check_dense(lengths, "lengths");
  TORCH_CHECK(
      ids.dim() == 1 && (ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong),
      "shardrec: ids are (N,) int32 or int64");
  TORCH_CHECK(
      lengths.dim() == 2 && lengths.size(0) == slots && lengths.scalar_type() == at::kInt,
      "shardrec: lengths are (slots, samples) int32");
  TORCH_CHECK(ids.numel() < kMost, "shardrec: ", ids.numel(), " ids are too many for one call");
  const float* scale = nullptr;
  if (weights) {
    check_dense(*weights, "weights of ids");
    TORCH_CHECK(
        weights->scalar_type() == at::kFloat && weights->numel() == ids.numel(),
        "shardrec: weights of ids are (N,) float32");
    scale = weights->const_data_ptr<float>();
  }
  return {lengths.const_data_ptr<int32_t>(), lengths.size(1), ids.numel(), scale};
}

// The gradient of the output: (samples, columns), or (N, width) without pooling; its rows may lie apart.
inline void check_gradient(const at::Tensor& gradient, const std::vector<Slot>& slots, const Bags& bags, bool pooled) {
  TORCH_CHECK(
      gradient.dim() == 2 && gradient.scalar_type() == at::kFloat && gradient.device().is_cpu() &&
          gradient.size(0) == (pooled ? bags.samples : bags.count) &&
          (gradient.stride(1) == 1 || gradient.size(1) == 1 || gradient.size(0) == 0),
      "shardrec: the gradient is (rows, columns) float32 with neighbouring columns, as the output");
  for (const Slot& slot : slots) {
    TORCH_CHECK(
        pooled ? slot.width <= gradient.size(1) - slot.column : slot.width == gradient.size(1),
        "shardrec: a slot lies outside of the gradient");
  }
}

inline int64_t sum_of_lengths(const int32_t* lengths, int64_t count) {
  int64_t total = 0;
  int32_t least = 0;
  for (int64_t i = 0; i < count; ++i) {
    total += lengths[i];
    least = std::min(least, lengths[i]);
  }
  TORCH_CHECK(least >= 0, "shardrec: a bag of negative length");
  return total;
}

// The first id of each slot, and where they end.
inline void find_ids(std::vector<Slot>& slots, const Bags& bags) {
  int64_t at = 0;
  for (size_t s = 0; s < slots.size(); ++s) {
    slots[s].first = at;
    at += sum_of_lengths(bags.lengths + int64_t(s) * bags.samples, bags.samples);
    slots[s].end = at;
  }
  TORCH_CHECK(at == bags.count, "shardrec: lengths and ids do not fit");
}

}  // namespace shardrec
