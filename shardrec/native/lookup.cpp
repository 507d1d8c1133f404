// look_up: sums of rows, or rows, of many tables in one pass. weight_gradient: products of rows and the sums' gradient.
//
// Samples are taken in blocks, and inside a block slot after slot, so that what is written lies together, while each
// slot's ids are still read one after the other:
//
//     output      slot 0   slot 1   slot 2          ids of slot 0 | slot 1 | slot 2
//     block 0   |   1    |   2    |   3   |              each: block 0, block 1, ...
//     block 1   |   4    |   5    |   6   |
//
// Of large tables with short bags, all the rows of a block are asked for before the first is used: on 26 tables of
// 100,000 x 64 in random order, reads and writes then take about the sum of their times alone, where asking row by row
// takes 10 to 20% more. Of long bags, of which a block would not fit in the cache, a row is asked for some ids in advance.
// Small tables are taken a few at a time, so that they stay in the cache for all the samples; their columns are written
// past it, whole lines at a time, for at a stride of a whole row each line would be read first to no use.

#include <ATen/ATen.h>
#include <torch/library.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <optional>
#include <vector>

#include "slots.h"
#include "vectors.h"

namespace shardrec {
namespace {

constexpr int64_t kTile = 64;                 // samples
constexpr int64_t kBlockBytes = 64 << 10;     // of output, and about as much of rows
constexpr int64_t kCachedTables = 256 << 10;  // of a group of small tables
constexpr int64_t kLinesAhead = 32;           // cache lines asked for in advance
constexpr int64_t kCachedBytes = 16ll << 20;  // output up to this size are written through the caches

int64_t ids_ahead(int64_t width) {
  const int64_t lines = (width * int64_t(sizeof(float)) + kLine - 1) / kLine;
  return std::clamp<int64_t>(kLinesAhead / lines, 2, 32);
}

// Neighbouring slots [first, last) that are looked up block after block of samples.
struct Group {
  int64_t first;
  int64_t last;
  int64_t block;  // samples
  bool cached;    // the tables fit in the cache, and stay in it from block to block
  bool asked;     // the rows of a block are asked for before the first is used
};

template <class Id>
struct Pool {
  const float* weights;
  const Slot* slots;
  Bags bags;
  const Id* ids;
  float* output;  // (samples, columns)
  int64_t columns;
  bool streamed;
  const std::vector<Group>& groups;
  int64_t* at;  // (slots,) the next id of each

  // Whether all the ids were rows.
  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    for (const Group& group : groups) {
      const bool past = streamed && group.cached;
      for (int64_t sample = 0; sample < bags.samples; sample += group.block) {
        const int64_t count = std::min(group.block, bags.samples - sample);
        if (group.asked) ask_for_rows(group, sample, count);
        for (int64_t s = group.first; s < group.last; ++s) {
          const int64_t ahead = group.asked || group.cached ? 0 : ids_ahead(slots[s].width);
          const bool sound = bags.weights ? by_width<Lanes, true>(s, sample, count, ahead, past)
                                          : by_width<Lanes, false>(s, sample, count, ahead, past);
          if (!sound) return false;
        }
      }
    }
    if (streamed) end_of_streams();
    return true;
  }

  SHARDREC_INLINE void ask_for_rows(const Group& group, int64_t sample, int64_t count) const {
    for (int64_t s = group.first; s < group.last; ++s) {
      const Slot& slot = slots[s];
      const int32_t* const lengths = bags.lengths + s * bags.samples + sample;
      int64_t total = 0;
      for (int64_t i = 0; i < count; ++i) total += lengths[i];
      for (int64_t i = at[s]; i < at[s] + total; ++i) {
        prefetch_row(unchecked_row(weights + slot.base, int64_t(ids[i]), slot.width), slot.width);
      }
    }
  }

  template <int Lanes, bool Weighted>
  SHARDREC_INLINE bool by_width(int64_t s, int64_t sample, int64_t count, int64_t ahead, bool past) const {
    switch (slots[s].width) {
      case 4: return pool<Lanes, 4, Weighted>(s, sample, count, ahead, past);
      case 8: return pool<Lanes, 8, Weighted>(s, sample, count, ahead, past);
      case 16: return pool<Lanes, 16, Weighted>(s, sample, count, ahead, past);
      case 32: return pool<Lanes, 32, Weighted>(s, sample, count, ahead, past);
      case 64: return pool<Lanes, 64, Weighted>(s, sample, count, ahead, past);
      case 128: return pool<Lanes, 128, Weighted>(s, sample, count, ahead, past);
      default: return pool<Lanes, 0, Weighted>(s, sample, count, ahead, past);
    }
  }

  template <int Lanes, int Width, bool Weighted>
  SHARDREC_INLINE bool pool(int64_t s, int64_t sample, int64_t count, int64_t ahead, bool past) const {
    const Slot& slot = slots[s];
    const int64_t width = Width ? Width : slot.width, rows = slot.rows, end = slot.end;
    const float* const table = weights + slot.base;
    const int32_t* const lengths = bags.lengths + s * bags.samples + sample;
    float* to = output + sample * columns + slot.column;
    const bool whole_lines = past && Width % 16 == 0 && Width > 0 && slot.column % 16 == 0;
    int64_t next = at[s];
    const auto next_row = [&]() SHARDREC_BODY -> const float* {
      if (ahead && next + ahead < end) prefetch_row(unchecked_row(table, int64_t(ids[next + ahead]), width), width);
      const uint64_t row = uint64_t(int64_t(ids[next]));
      return row < uint64_t(rows) ? table + row * width : nullptr;
    };
    for (int64_t i = 0; i < count; ++i, to += columns) {
      const int64_t stop = next + lengths[i];
      if constexpr (Width > 0) {
        constexpr int lanes = std::min(Lanes, Width);
        Vector<lanes> sum[Width / lanes] = {};
        for (; next < stop; ++next) {
          const float* const row = next_row();
          if (!row) return false;
          for_vectors<Lanes, Width>(width, [&](int64_t j, auto) SHARDREC_BODY {
            const Vector<lanes> part = load<lanes>(row + j);
            if constexpr (Weighted) {
              sum[j / lanes] += part * bags.weights[next];
            } else {
              sum[j / lanes] += part;
            }
          });
        }
        for_vectors<Lanes, Width>(width, [&](int64_t j, auto) SHARDREC_BODY {
          if (whole_lines) {
            stream<lanes>(to + j, sum[j / lanes]);
          } else {
            store<lanes>(to + j, sum[j / lanes]);
          }
        });
      } else {
        std::memset(to, 0, sizeof(float) * width);
        for (; next < stop; ++next) {
          const float* const row = next_row();
          if (!row) return false;
          const float scale = Weighted ? bags.weights[next] : 1.0f;
          for_vectors<Lanes, 0>(width, [&](int64_t j, auto tag) SHARDREC_BODY {
            store<tag.lanes>(to + j, load<tag.lanes>(to + j) + load<tag.lanes>(row + j) * scale);
          });
        }
      }
    }
    at[s] = next;
    return true;
  }
};

template <class Id>
struct Rows {
  const float* weights;
  const Slot* slots;
  int64_t slot_count;
  const Id* ids;
  float* output;  // (N, width)
  int64_t width;
  bool streamed;

  // Whether all the ids were rows.
  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    const int64_t ahead = ids_ahead(width);
    const bool whole_lines = streamed && width % 16 == 0;
    for (int64_t s = 0; s < slot_count; ++s) {
      const Slot slot = slots[s];
      const float* const table = weights + slot.base;
      for (int64_t at = slot.first; at < slot.end; ++at) {
        if (at + ahead < slot.end) prefetch_row(unchecked_row(table, int64_t(ids[at + ahead]), width), width);
        const uint64_t number = uint64_t(int64_t(ids[at]));
        if (number >= uint64_t(slot.rows)) return false;
        const float* const row = table + number * width;
        float* const to = output + at * width;
        if (whole_lines) {
          for (int64_t i = 0; i < width; i += 16) {
            for_vectors<Lanes, 16>(16, [&](int64_t j, auto tag) SHARDREC_BODY {
              stream<tag.lanes>(to + i + j, load<tag.lanes>(row + i + j));
            });
          }
        } else {
          for_vectors<Lanes, 0>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
            store<tag.lanes>(to + i, load<tag.lanes>(row + i));
          });
        }
      }
    }
    if (streamed) end_of_streams();
    return true;
  }
};

// (N,) gradient of the ids' weights: products of a sample's gradient with the rows.
template <class Id>
struct Products {
  const float* weights;
  const Slot* slots;
  int64_t slot_count;
  Bags bags;
  const Id* ids;
  const float* gradient;
  int64_t stride;
  float* output;
  int64_t* next;  // (slots,) the next id of each

  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    for (int64_t first = 0; first < bags.samples; first += kTile) {
      for (int64_t s = 0; s < slot_count; ++s) {
        const Slot slot = slots[s];
        const float* const table = weights + slot.base;
        const int64_t width = slot.width, ahead = ids_ahead(width);
        const int64_t last = std::min(first + kTile, bags.samples);
        int64_t at = next[s];
        for (int64_t sample = first; sample < last; ++sample) {
          const int64_t stop = at + bags.lengths[s * bags.samples + sample];
          const float* const one = gradient + sample * stride + slot.column;
          for (; at < stop; ++at) {
            if (at + ahead < slot.end) prefetch_row(unchecked_row(table, int64_t(ids[at + ahead]), width), width);
            const uint64_t number = uint64_t(int64_t(ids[at]));
            if (number >= uint64_t(slot.rows)) return false;
            output[at] = product<Lanes>(table + number * width, one, width);
          }
        }
        next[s] = at;
      }
    }
    return true;
  }

  template <int Lanes>
  SHARDREC_INLINE static float product(const float* one, const float* other, int64_t width) {
    Vector<Lanes> wide = {};
    Vector<4> narrow = {};
    float total = 0.0f;
    for_vectors<Lanes, 0>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
      const Vector<tag.lanes> both = load<tag.lanes>(one + i) * load<tag.lanes>(other + i);
      if constexpr (tag.lanes == Lanes) {
        wide += both;
      } else if constexpr (tag.lanes == 4) {
        narrow += both;
      } else {
        total += both[0];
      }
    });
    for (int i = 0; i < 4; ++i) total += narrow[i];
    for (int i = 0; i < Lanes; ++i) total += wide[i];
    return total;
  }
};

struct Call {
  std::vector<Slot> slots;
  Bags bags;

  std::vector<int64_t> first_ids() const {
    std::vector<int64_t> found;
    for (const Slot& slot : slots) found.push_back(slot.first);
    return found;
  }
};

Call call_of(
    const at::Tensor& weights, const at::Tensor& slots, const at::Tensor& ids, const at::Tensor& lengths,
    const std::optional<at::Tensor>& id_weights) {
  check_dense(weights, "weights");
  TORCH_CHECK(weights.scalar_type() == at::kFloat, "shardrec: weights are float32");
  Call call{slots_of(slots, weights.numel()), {}};
  call.bags = bags_of(ids, lengths, id_weights, slots.size(0));
  find_ids(call.slots, call.bags);
  return call;
}

template <class Job>
void run_checked(const Job& job) {
  TORCH_CHECK(run(job), "shardrec: an id is not a row of its table");
}

bool is_streamed(const at::Tensor& output) {
  return output.nbytes() > size_t(kCachedBytes) && reinterpret_cast<uintptr_t>(output.const_data_ptr()) % kLine == 0;
}

// Large outputs are written, and their gradients read, at strides of a row: in huge pages, if the system has any.
void ask_for_huge_pages(const at::Tensor& output) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(output.const_data_ptr()), end = begin + output.nbytes();
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = end / kHuge * kHuge;
  if (first + kHuge <= last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

std::vector<Group> groups_of(const Call& call) {
  std::vector<Group> groups;
  int64_t held = 0;
  for (int64_t s = 0; s < int64_t(call.slots.size()); ++s) {
    const Slot& slot = call.slots[s];
    const int64_t bytes = slot.rows * slot.width * int64_t(sizeof(float));
    const bool cached = bytes <= kCachedTables;
    if (!groups.empty() && groups.back().cached == cached && (!cached || held + bytes <= kCachedTables)) {
      groups.back().last = s + 1;
      held += bytes;
    } else {
      groups.push_back({s, s + 1, kTile, cached, false});
      held = bytes;
    }
  }
  for (Group& group : groups) {
    int64_t ids = 0, bytes = 0;
    for (int64_t s = group.first; s < group.last; ++s) {
      ids += call.slots[s].end - call.slots[s].first;
      bytes += call.slots[s].width * int64_t(sizeof(float));
    }
    group.asked = !group.cached && ids <= 2 * (group.last - group.first) * call.bags.samples;
    if (group.asked) group.block = std::clamp<int64_t>(kBlockBytes / bytes, 1, kTile);
  }
  return groups;
}

template <class Id>
void pool_into(const at::Tensor& output, const Call& call, const at::Tensor& weights, const at::Tensor& ids) {
  const std::vector<Group> groups = groups_of(call);
  Pool<Id> job{.groups = groups};
  job.weights = weights.const_data_ptr<float>();
  job.slots = call.slots.data();
  job.bags = call.bags;
  job.ids = ids.const_data_ptr<Id>();
  job.output = output.data_ptr<float>();
  job.columns = output.stride(0);
  job.streamed = is_streamed(output) && job.columns % 16 == 0;
  std::vector<int64_t> next = call.first_ids();
  job.at = next.data();
  run_checked(job);
}

template <class Id>
void rows_into(const at::Tensor& output, const Call& call, const at::Tensor& weights, const at::Tensor& ids) {
  Rows<Id> job{};
  job.weights = weights.const_data_ptr<float>();
  job.slots = call.slots.data();
  job.slot_count = int64_t(call.slots.size());
  job.ids = ids.const_data_ptr<Id>();
  job.output = output.data_ptr<float>();
  job.width = output.size(1);
  job.streamed = is_streamed(output);
  run_checked(job);
}

void check_columns(const Call& call, int64_t columns, bool pooled) {
  int64_t place = 0;
  for (const Slot& slot : call.slots) {
    TORCH_CHECK(
        pooled ? slot.column == place && slot.width <= columns - place : slot.width == columns,
        "shardrec: a slot lies outside of the output, or not beside the one before: ", slot.width,
        " columns from column ", slot.column, " of ", columns);
    place += slot.width;
  }
  TORCH_CHECK(place == columns || !pooled, "shardrec: slots cover ", place, " of ", columns, " columns");
}

at::Tensor look_up(
    const at::Tensor& weights, const at::Tensor& slots, const at::Tensor& ids, const at::Tensor& lengths,
    const std::optional<at::Tensor>& id_weights, int64_t columns, bool pooled) {
  const Call call = call_of(weights, slots, ids, lengths, id_weights);
  check_columns(call, columns, pooled);
  TORCH_CHECK(pooled || !id_weights, "shardrec: rows that are not pooled take no weights");
  const bool narrow = ids.scalar_type() == at::kInt;
  auto output = at::empty({pooled ? call.bags.samples : call.bags.count, columns}, at::kFloat);
  ask_for_huge_pages(output);
  if (pooled) {
    narrow ? pool_into<int32_t>(output, call, weights, ids) : pool_into<int64_t>(output, call, weights, ids);
  } else {
    narrow ? rows_into<int32_t>(output, call, weights, ids) : rows_into<int64_t>(output, call, weights, ids);
  }
  return output;
}

void look_up_out(
    const at::Tensor& output, const at::Tensor& weights, const at::Tensor& slots, const at::Tensor& ids,
    const at::Tensor& lengths, const std::optional<at::Tensor>& id_weights) {
  const Call call = call_of(weights, slots, ids, lengths, id_weights);
  TORCH_CHECK(
      output.dim() == 2 && output.size(0) == call.bags.samples && output.scalar_type() == at::kFloat &&
          output.device().is_cpu() && (output.stride(1) == 1 || output.size(1) <= 1 || output.size(0) == 0) &&
          (output.stride(0) >= output.size(1) || output.size(0) <= 1),
      "shardrec: the output is (samples, columns) float32 on the CPU with neighbouring columns");
  check_columns(call, output.size(1), true);
  ids.scalar_type() == at::kInt ? pool_into<int32_t>(output, call, weights, ids)
                                : pool_into<int64_t>(output, call, weights, ids);
}

template <class Id>
void products_into(
    const at::Tensor& output, const Call& call, const at::Tensor& weights, const at::Tensor& ids,
    const at::Tensor& gradient) {
  Products<Id> job{};
  job.weights = weights.const_data_ptr<float>();
  job.slots = call.slots.data();
  job.slot_count = int64_t(call.slots.size());
  job.bags = call.bags;
  job.ids = ids.const_data_ptr<Id>();
  job.gradient = gradient.const_data_ptr<float>();
  job.stride = gradient.stride(0);
  job.output = output.data_ptr<float>();
  std::vector<int64_t> next = call.first_ids();
  job.next = next.data();
  run_checked(job);
}

at::Tensor weight_gradient(
    const at::Tensor& weights, const at::Tensor& slots, const at::Tensor& ids, const at::Tensor& lengths,
    const at::Tensor& gradient) {
  const Call call = call_of(weights, slots, ids, lengths, std::nullopt);
  check_gradient(gradient, call.slots, call.bags, true);
  auto output = at::empty({ids.numel()}, at::kFloat);
  ids.scalar_type() == at::kInt ? products_into<int32_t>(output, call, weights, ids, gradient)
                                : products_into<int64_t>(output, call, weights, ids, gradient);
  return output;
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def(
      "look_up(Tensor weights, Tensor slots, Tensor ids, Tensor lengths, Tensor? id_weights, int columns, bool pooled) "
      "-> Tensor");
  library.def(
      "look_up_out(Tensor(a!) output, Tensor weights, Tensor slots, Tensor ids, Tensor lengths, Tensor? id_weights) "
      "-> ()");
  library.def(
      "weight_gradient(Tensor weights, Tensor slots, Tensor ids, Tensor lengths, Tensor gradient) -> Tensor");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) {
  library.impl("look_up", shardrec::look_up);
  library.impl("look_up_out", shardrec::look_up_out);

  library.impl("weight_gradient", shardrec::weight_gradient);
}
