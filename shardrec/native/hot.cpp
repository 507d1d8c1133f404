// split_hot: the ids of hot rows, after all the others of a batch, as positions among the hot rows of their table.
//
// Tables with hot rows lie one after the other in a space of rows, each from a multiple of 64 on. "index" (words, 2) int64
// has, for each 64 rows, a bit for each that says whether it is hot, and how many hot rows come before them. So an id takes
// one access to memory and no branch. (Zipf ids of 26 tables of 20,000 rows: 2 ns each; a binary search takes 50 to 120.)

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "slots.h"
#include "vectors.h"

namespace shardrec {
namespace {

struct Word {
  uint64_t bits;
  int64_t before;
};

constexpr int32_t kCold = -1;

// A key's positions: of each id among the hot rows of its table, or kCold; and how many of each bag are hot.
template <class Id>
struct Positions {
  const Word* words;   // of its table
  int64_t rows;        // 64 times their number
  int64_t start;       // hot rows before those of its table
  const Id* ids;
  const int32_t* lengths;
  int64_t batch;
  int32_t* positions;
  int32_t* hot_lengths;

  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    bool sound = true;
    int64_t at = 0;
    for (int64_t bag = 0; bag < batch; ++bag) {
      int32_t hot = 0;
      for (const int64_t stop = at + lengths[bag]; at < stop; ++at) {
        const bool inside = uint64_t(int64_t(ids[at])) < uint64_t(rows);
        const int64_t row = inside ? int64_t(ids[at]) : 0;
        const Word word = words[row >> 6];
        const int64_t is_hot = int64_t(word.bits >> (row & 63)) & 1;
        const int64_t found = word.before + std::popcount(word.bits & ((uint64_t(1) << (row & 63)) - 1)) - start;
        positions[at] = is_hot ? int32_t(found) : kCold;
        hot += int32_t(is_hot);
        sound &= inside;
      }
      hot_lengths[bag] = hot;
    }
    return sound;
  }
};

template <class Id>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> split_typed(
    const at::Tensor& lengths, const at::Tensor& ids, const Bags& bags, const at::Tensor& firsts,
    const at::Tensor& starts, const at::Tensor& hot, const at::Tensor& index, bool places) {
  const int64_t keys = lengths.size(0), batch = bags.samples, count = bags.count, words = index.size(0);
  const int64_t* const first = firsts.const_data_ptr<int64_t>();
  const int64_t* const start = starts.const_data_ptr<int64_t>();
  const int64_t* const split_key = hot.const_data_ptr<int64_t>();
  auto split = at::empty({keys + hot.numel(), batch}, lengths.options());
  auto found = at::empty_like(ids);
  auto found_weights = at::empty({bags.weights ? count : 0}, at::TensorOptions().dtype(at::kFloat));
  auto order = at::empty({places ? count : 0}, at::TensorOptions().dtype(at::kLong));
  int32_t* const left = split.data_ptr<int32_t>();
  const Id* const id = ids.const_data_ptr<Id>();
  std::copy_n(bags.lengths, keys * batch, left);
  std::vector<int64_t> ends{0};
  for (int64_t key = 0; key < keys; ++key) {
    ends.push_back(ends.back() + sum_of_lengths(bags.lengths + key * batch, batch));
  }
  TORCH_CHECK(ends.back() == count, "shardrec: lengths and ids do not fit");
  // First the positions and the lengths; then every id to its place, the others before those of hot rows.
  const auto positions = std::make_unique_for_overwrite<int32_t[]>(count);
  int64_t cold_at = 0, hot_at = count;
  for (int64_t number = 0; number < hot.numel(); ++number) {
    const int64_t key = split_key[number];
    TORCH_CHECK(
        key >= 0 && key < keys && (number == 0 || key > split_key[number - 1]),
        "shardrec: keys with hot rows ascend and are among the keys");
    TORCH_CHECK(
        first[key] >= 0 && first[key] % 64 == 0 && first[key] / 64 < words,
        "shardrec: a table with hot rows lies outside of the index");
    int32_t* const hot_lengths = left + (keys + number) * batch;
    const Positions<Id> job{
        reinterpret_cast<const Word*>(index.const_data_ptr<int64_t>()) + first[key] / 64,
        words * 64 - first[key], start[key], id + ends[key], bags.lengths + key * batch, batch,
        positions.get() + ends[key], hot_lengths};
    TORCH_CHECK(run(job), "shardrec: an id is not a row of its table");
    for (int64_t bag = 0; bag < batch; ++bag) {
      left[key * batch + bag] -= hot_lengths[bag];
      hot_at -= hot_lengths[bag];
    }
  }
  Id* const to = found.template data_ptr<Id>();
  float* const to_weights = found_weights.data_ptr<float>();
  int64_t* const from = order.data_ptr<int64_t>();
  for (int64_t key = 0, number = 0; key < keys; ++key) {
    const bool is_split = number < hot.numel() && split_key[number] == key;
    number += is_split;
    for (int64_t i = ends[key]; i < ends[key + 1]; ++i) {
      // Without a branch, which would be guessed wrong for a part of the ids.
      const int64_t is_hot = is_split && positions[i] != kCold, mask = -is_hot;
      const int64_t there = (hot_at & mask) | (cold_at & ~mask);
      to[there] = Id((int64_t(is_split ? positions[i] : 0) & mask) | (int64_t(id[i]) & ~mask));
      if (bags.weights) to_weights[there] = bags.weights[i];
      if (places) from[there] = i;
      hot_at += is_hot;
      cold_at += 1 - is_hot;
    }
  }
  return {split, found, found_weights, order};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> split_hot(
    const at::Tensor& lengths, const at::Tensor& ids, const std::optional<at::Tensor>& weights,
    const at::Tensor& firsts, const at::Tensor& starts, const at::Tensor& hot, const at::Tensor& index, bool places) {
  TORCH_CHECK(lengths.dim() == 2, "shardrec: lengths are (keys, samples) int32");
  const Bags bags = bags_of(ids, lengths, weights, lengths.size(0));
  for (const at::Tensor& one : {firsts, starts, hot, index}) {
    check_dense(one, "what is known of hot rows");
    TORCH_CHECK(one.scalar_type() == at::kLong, "shardrec: what is known of hot rows is int64");
  }
  TORCH_CHECK(
      hot.dim() == 1 && index.dim() == 2 && index.size(1) == 2 && firsts.numel() >= lengths.size(0) &&
          starts.numel() >= lengths.size(0),
      "shardrec: the index of hot rows is (words, 2), and each key has a first row and a start");
  const auto split = ids.scalar_type() == at::kInt ? split_typed<int32_t> : split_typed<int64_t>;
  return split(lengths, ids, bags, firsts, starts, hot, index, places);
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def(
      "split_hot(Tensor lengths, Tensor ids, Tensor? weights, Tensor firsts, Tensor starts, Tensor hot, Tensor index, "
      "bool places) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) { library.impl("split_hot", shardrec::split_hot); }
