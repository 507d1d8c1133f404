// cut_ids: the ids of a batch, cut by rows, in the order of the slots that they are sent in.
//
// "units" describes what is cut, from left to right. A unit is
//     number of its key, hashed, blocks n, edges (n + 1), then for each block: slots m, their numbers (m)
// and the ids of its key that are in the block [edge k, edge k + 1) go to each slot of block k, less edge k. Where they
// are hashed, it is their home rows (hashing.h) that are in the block, and the ids go there as they are. Two passes
// over a unit's ids: the first counts, bag by bag, the second writes to where the counts of the slots before it end.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "hashing.h"
#include "slots.h"

namespace shardrec {
namespace {

constexpr int64_t kSearched = 16;  // blocks from which on a search is faster than a count

struct Unit {
  int64_t key;
  bool hashed;
  std::vector<int64_t> edges;
  std::vector<std::vector<int64_t>> slots;  // of each block

  int64_t blocks() const { return int64_t(slots.size()); }

  // Number of the block that an id is in; out of range where it is in none.
  int64_t block_of(int64_t id) const {
    const int64_t row = hashed ? home_row(id, edges.back()) : id;
    if (row < edges.front() || row >= edges.back()) return blocks();
    if (blocks() > kSearched) {
      return std::upper_bound(edges.begin() + 1, edges.end() - 1, row) - (edges.begin() + 1);
    }
    int64_t block = 0;
    for (int64_t edge = 1; edge < blocks(); ++edge) block += row >= edges[edge];
    return block;
  }
};

// `most`: the largest id that there can be.
std::vector<Unit> units_of(at::IntArrayRef list, int64_t keys, int64_t slots, int64_t most) {
  TORCH_CHECK(slots >= 0 && slots <= int64_t(list.size()), "shardrec: a slot is in no unit");
  std::vector<Unit> units;
  std::vector<char> seen(slots, 0);
  size_t at = 0;
  const auto next = [&] {
    TORCH_CHECK(at < list.size(), "shardrec: units end inside of one");
    return list[at++];
  };
  while (at < list.size()) {
    Unit unit{next(), next() != 0, {}, {}};
    const int64_t blocks = next();
    TORCH_CHECK(
        unit.key >= 0 && unit.key < keys && blocks >= 1 && blocks <= int64_t(list.size() - at),
        "shardrec: a unit is malformed");
    for (int64_t i = 0; i <= blocks; ++i) {
      unit.edges.push_back(next());
      const int64_t edge = unit.edges.back();
      TORCH_CHECK(
          edge >= (i == 0 ? 0 : unit.edges[i - 1]) && edge <= most,
          "shardrec: edges of blocks ascend from 0 and are ids: an edge at ", edge, ", and ids up to ", most);
    }
    unit.slots.resize(blocks);
    for (auto& of_block : unit.slots) {
      for (int64_t left = next(); left > 0; --left) {
        const int64_t slot = next();
        TORCH_CHECK(slot >= 0 && slot < slots && !seen[slot], "shardrec: a slot is not one, or there twice");
        seen[slot] = 1;
        of_block.push_back(slot);
      }
    }
    units.push_back(std::move(unit));
  }
  TORCH_CHECK(std::find(seen.begin(), seen.end(), 0) == seen.end(), "shardrec: a slot is in no unit");
  return units;
}

template <class Id>
struct Cutting {
  const std::vector<Unit>& units;
  std::vector<int64_t> firsts;  // number of the first id of each key
  const Id* ids;
  const int32_t* lengths;  // (keys, batch)
  const float* weights;
  int64_t batch;
  int32_t* slot_lengths;        // (slots, batch)
  std::vector<int64_t> starts;  // of each slot, then the end
  Id* slot_ids = nullptr;
  float* slot_weights = nullptr;
  int64_t* positions = nullptr;

  int32_t* row(int64_t slot) const { return slot_lengths + slot * batch; }

  // Whether each id is in a block.
  bool count(const Unit& unit) const {
    const int32_t* const bags = lengths + unit.key * batch;
    if (unit.blocks() == 1) {
      for (const int64_t slot : unit.slots[0]) std::copy_n(bags, batch, row(slot));
      return true;
    }
    // Blocks without a slot are also counted, in a row that is never read.
    std::vector<int32_t> spare(batch);
    std::vector<int32_t*> to;
    for (const auto& of_block : unit.slots) to.push_back(of_block.empty() ? spare.data() : row(of_block[0]));
    const Id* id = ids + firsts[unit.key];
    if (unit.blocks() == 2 && !unit.hashed) {
      const Id first = Id(unit.edges[0]), middle = Id(unit.edges[1]), last = Id(unit.edges[2] - 1);
      bool sound = true;
      for (int64_t bag = 0; bag < batch; ++bag) {
        int32_t above = 0;
        for (int32_t i = 0; i < bags[bag]; ++i) {
          above += id[i] >= middle;
          sound &= (id[i] >= first) & (id[i] <= last);
        }
        id += bags[bag];
        to[0][bag] = bags[bag] - above;
        to[1][bag] = above;
      }
      if (!sound) return false;
      share_counts(unit);
      return true;
    }
    for (int32_t* const counts : to) std::fill_n(counts, batch, 0);
    for (int64_t bag = 0; bag < batch; ++bag) {
      for (int32_t left = bags[bag]; left > 0; --left) {
        const int64_t block = unit.block_of(*id++);
        if (block == unit.blocks()) return false;
        ++to[block][bag];
      }
    }
    share_counts(unit);
    return true;
  }

  void share_counts(const Unit& unit) const {
    for (const auto& of_block : unit.slots) {
      for (size_t i = 1; i < of_block.size(); ++i) {
        std::copy_n(row(of_block[0]), batch, row(of_block[i]));
      }
    }
  }

  // Of a key that is not cut.
  bool copy(const Unit& unit) const {
    const int64_t first = firsts[unit.key], total = firsts[unit.key + 1] - first;
    const Id least = Id(unit.hashed ? 0 : unit.edges[0]), most = Id(unit.edges[1] - 1);
    bool sound = true;
    for (int64_t i = first; i < first + total; ++i) sound &= unit.hashed | ((ids[i] >= least) & (ids[i] <= most));
    if (!sound) return false;
    for (const int64_t slot : unit.slots[0]) {
      const int64_t place = starts[slot];
      for (int64_t i = 0; i < total; ++i) slot_ids[place + i] = ids[first + i] - least;
      if (weights) std::copy_n(weights + first, total, slot_weights + place);
      if (positions) {
        for (int64_t i = 0; i < total; ++i) positions[place + i] = first + i;
      }
    }
    return true;
  }

  bool write(const Unit& unit) const {
    if (unit.blocks() == 1) return copy(unit);
    const int64_t first = firsts[unit.key], end = firsts[unit.key + 1];
    std::vector<int64_t> to;
    for (const auto& of_block : unit.slots) to.push_back(of_block.empty() ? -1 : starts[of_block[0]]);
    for (int64_t i = first; i < end; ++i) {
      const int64_t block = unit.block_of(ids[i]);
      if (block == unit.blocks()) return false;
      if (to[block] < 0) continue;
      const int64_t place = to[block]++;
      slot_ids[place] = unit.hashed ? ids[i] : Id(ids[i] - unit.edges[block]);
      if (weights) slot_weights[place] = weights[i];
      if (positions) positions[place] = i;
    }
    for (const auto& of_block : unit.slots) {
      for (size_t i = 1; i < of_block.size(); ++i) {
        const int64_t from = starts[of_block[0]], total = starts[of_block[0] + 1] - from, place = starts[of_block[i]];
        std::copy_n(slot_ids + from, total, slot_ids + place);
        if (weights) std::copy_n(slot_weights + from, total, slot_weights + place);
        if (positions) std::copy_n(positions + from, total, positions + place);
      }
    }
    return true;
  }
};

template <class Id>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cut_typed(
    const at::Tensor& ids, const at::Tensor& lengths, const std::optional<at::Tensor>& weights,
    const std::vector<Unit>& units, int64_t slots, bool positions) {
  const int64_t keys = lengths.size(0), batch = lengths.size(1);
  const auto ints = at::TensorOptions().dtype(at::kInt), longs = at::TensorOptions().dtype(at::kLong);
  auto slot_lengths = at::empty({slots, batch}, ints);
  Cutting<Id> job{units, {0}, ids.const_data_ptr<Id>(), lengths.const_data_ptr<int32_t>()};
  job.weights = weights ? weights->const_data_ptr<float>() : nullptr;
  job.batch = batch;
  job.slot_lengths = slot_lengths.data_ptr<int32_t>();
  for (int64_t key = 0; key < keys; ++key) {
    job.firsts.push_back(job.firsts.back() + sum_of_lengths(job.lengths + key * batch, batch));
  }
  TORCH_CHECK(job.firsts.back() == ids.numel(), "shardrec: lengths and ids do not fit");
  for (const Unit& unit : units) TORCH_CHECK(job.count(unit), "shardrec: an id is not a row of its table");
  job.starts = {0};
  for (int64_t slot = 0; slot < slots; ++slot) {
    job.starts.push_back(job.starts.back() + sum_of_lengths(job.row(slot), batch));
  }
  const int64_t total = job.starts.back();
  auto slot_ids = at::empty({total}, ids.options());
  auto slot_weights = at::empty({weights ? total : 0}, at::TensorOptions().dtype(at::kFloat));
  auto places = at::empty({positions ? total : 0}, longs);
  job.slot_ids = slot_ids.template data_ptr<Id>();
  job.slot_weights = slot_weights.template data_ptr<float>();
  job.positions = positions ? places.template data_ptr<int64_t>() : nullptr;
  for (const Unit& unit : units) TORCH_CHECK(job.write(unit), "shardrec: an id is not a row of its table");
  return {slot_lengths, slot_ids, slot_weights, places};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cut_ids(
    const at::Tensor& ids, const at::Tensor& lengths, const std::optional<at::Tensor>& weights, at::IntArrayRef units,
    int64_t slots, bool positions) {
  for (const at::Tensor& one : {ids, lengths, weights.value_or(ids)}) {
    TORCH_CHECK(one.device().is_cpu() && one.is_contiguous(), "shardrec: a batch is contiguous and on the CPU");
  }
  TORCH_CHECK(
      ids.dim() == 1 && (ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong),
      "shardrec: ids are (N,) int32 or int64");
  TORCH_CHECK(
      lengths.dim() == 2 && lengths.scalar_type() == at::kInt, "shardrec: lengths are (keys, samples) int32");
  TORCH_CHECK(
      !weights || (weights->scalar_type() == at::kFloat && weights->numel() == ids.numel()),
      "shardrec: weights of ids are (N,) float32");
  const bool narrow = ids.scalar_type() == at::kInt;
  const int64_t most = narrow ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int64_t>::max();
  const auto described = units_of(units, lengths.size(0), slots, most);
  for (const Unit& unit : described) {
    TORCH_CHECK(!unit.hashed || (!narrow && unit.edges.back() <= kMost + 1), "shardrec: hashed ids are int64");
  }
  return narrow ? cut_typed<int32_t>(ids, lengths, weights, described, slots, positions)
                : cut_typed<int64_t>(ids, lengths, weights, described, slots, positions);
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def(
      "cut_ids(Tensor ids, Tensor lengths, Tensor? weights, int[] units, int slots, bool positions) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) { library.impl("cut_ids", shardrec::cut_ids); }
