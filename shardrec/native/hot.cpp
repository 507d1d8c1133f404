// split_hot: the ids of hot rows, after all the others of a batch, as positions among the hot rows of their table.
//
// Tables with hot rows lie one after the other in a space of rows, each from a multiple of 64 on. A bit for each row says
// whether it is hot, and a number for each word of 64 bits how many hot rows come before it: so a row takes a bit of a
// table and, if it is hot, one more number, both of which stay in a cache.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <bit>
#include <tuple>
#include <vector>

namespace shardrec {
namespace {

constexpr int32_t kCold = -1;

// What is known of the keys.
struct Keys {
  const int64_t* firsts;  // of each key, the first row of its table in the space of all, or far below 0
  const int64_t* starts;  // how many hot rows come before those of its table
  const uint64_t* bits;
  const int32_t* before;
  int64_t words;
};

// Position of a row among the hot rows of its table, or kCold.
inline int32_t position(const Keys& keys, int64_t first, int64_t start, int64_t row) {
  if (row < 0 || row >= keys.words * 64 - first) return kCold;
  const int64_t linear = first + row, word = linear >> 6;
  const uint64_t bit = uint64_t(1) << (linear & 63);
  if (!(keys.bits[word] & bit)) return kCold;
  return int32_t(keys.before[word] + std::popcount(keys.bits[word] & (bit - 1)) - start);
}

template <class Id>
std::tuple<at::Tensor, at::Tensor, at::Tensor> split_typed(
    const at::Tensor& lengths, const at::Tensor& ids, const Keys& keys, const at::Tensor& hot) {
  const int64_t rows = lengths.size(0), batch = lengths.size(1), count = ids.numel(), hot_rows = hot.numel();
  auto split = at::empty({rows + hot_rows, batch}, lengths.options());
  auto found = at::empty_like(ids);
  auto moved = at::empty({count}, at::TensorOptions().dtype(at::kLong));
  const int32_t* const given = lengths.const_data_ptr<int32_t>();
  const Id* const id = ids.const_data_ptr<Id>();
  std::vector<int32_t*> hot_lengths(rows, nullptr);
  for (int64_t i = 0; i < hot_rows; ++i) {
    const int64_t key = hot.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(
        key >= 0 && key < rows && !hot_lengths[key], "shardrec: a key with hot rows is none, or there twice");
    TORCH_CHECK(
        keys.firsts[key] >= 0 && keys.firsts[key] <= keys.words * 64 && keys.starts[key] >= 0 &&
            keys.starts[key] <= keys.words * 64,
        "shardrec: a table with hot rows lies outside of the bits");
    hot_lengths[key] = split.data_ptr<int32_t>() + (rows + i) * batch;
  }
  // First the positions, bag by bag; then every id to its place, the others before those of hot rows.
  std::vector<int32_t> positions(count, kCold);
  int64_t at = 0, hot_ids = 0;
  for (int64_t key = 0; key < rows; ++key) {
    int32_t* const left = split.data_ptr<int32_t>() + key * batch;
    for (int64_t bag = 0; bag < batch; ++bag) {
      const int32_t length = given[key * batch + bag];
      TORCH_CHECK(length >= 0 && length <= count - at, "shardrec: lengths and ids do not fit");
      int32_t here = 0;
      if (hot_lengths[key]) {
        for (int64_t i = at; i < at + length; ++i) {
          positions[i] = position(keys, keys.firsts[key], keys.starts[key], id[i]);
          here += positions[i] != kCold;
        }
        hot_lengths[key][bag] = here;
      }
      left[bag] = length - here;
      hot_ids += here;
      at += length;
    }
  }
  Id* const to = found.template data_ptr<Id>();
  int64_t* const place = moved.data_ptr<int64_t>();
  int64_t cold_at = 0, hot_at = at - hot_ids;
  for (int64_t i = 0; i < at; ++i) {
    const bool is_hot = positions[i] != kCold;
    int64_t& next = is_hot ? hot_at : cold_at;
    to[next] = is_hot ? Id(positions[i]) : id[i];
    place[i] = next++;
  }
  for (int64_t i = at; i < count; ++i) {  // no ids
    to[i] = id[i];
    place[i] = i;
  }
  return {split, found, moved};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> split_hot(
    const at::Tensor& lengths, const at::Tensor& ids, const at::Tensor& firsts, const at::Tensor& starts,
    const at::Tensor& hot, const at::Tensor& bits, const at::Tensor& before) {
  for (const at::Tensor& one : {lengths, ids, firsts, starts, hot, bits, before}) {
    TORCH_CHECK(one.device().is_cpu() && one.is_contiguous(), "shardrec: a batch is contiguous and on the CPU");
  }
  TORCH_CHECK(
      ids.dim() == 1 && (ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong),
      "shardrec: ids are (N,) int32 or int64");
  TORCH_CHECK(
      lengths.dim() == 2 && lengths.scalar_type() == at::kInt, "shardrec: lengths are (keys, samples) int32");
  for (const at::Tensor& one : {firsts, starts, hot, bits}) {
    TORCH_CHECK(one.dim() == 1 && one.scalar_type() == at::kLong, "shardrec: of keys and hot rows all are (n,) int64");
  }
  TORCH_CHECK(
      firsts.numel() >= lengths.size(0) && starts.numel() >= lengths.size(0), "shardrec: a table for each key");
  TORCH_CHECK(
      before.dim() == 1 && before.scalar_type() == at::kInt && before.numel() == bits.numel(),
      "shardrec: hot rows are counted for each word of bits, (n,) int32");
  const Keys keys{
      firsts.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>(),
      reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>()), before.const_data_ptr<int32_t>(),
      bits.numel()};
  return ids.scalar_type() == at::kInt ? split_typed<int32_t>(lengths, ids, keys, hot)
                                       : split_typed<int64_t>(lengths, ids, keys, hot);
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def(
      "split_hot(Tensor lengths, Tensor ids, Tensor firsts, Tensor starts, Tensor hot, Tensor bits, Tensor before) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) { library.impl("split_hot", shardrec::split_hot); }
