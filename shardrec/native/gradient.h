// The gradient of each distinct row that was looked up, handed row by row to whoever uses it.
//
// A row's gradient is the sum over its occurrences of weight x gradient of the bag, in all the backward calls that are
// given, in their order. Tasks are
//   - one table: its (row, occurrence) pairs are sorted by row, and the occurrences are read from the gradient of the
//     output, which for a row that occurs once is all there is to do;
//   - or neighbouring tables with few rows for their ids: an array of sums of all their rows, which stays in the cache
//     while the gradient of the output goes by once, tile after tile of samples.
// Which of the two, and so the order of a row's sum, depends on the sizes alone.

#pragma once

#include <array>
#include <memory>
#include <vector>

#include "slots.h"
#include "vectors.h"

namespace shardrec {

constexpr int64_t kGradientTile = 64;           // samples
constexpr int64_t kSumsBytes = 256 << 10;       // of one task: a part of the second-level cache
constexpr int64_t kOccurrencesAhead = 16;
constexpr int64_t kIdsOfCopiedBag = 4;          // on average

template <class Element>
class Buffer {
 public:
  Element* of(int64_t count) {
    if (!data_ || count > count_) {
      data_ = std::make_unique_for_overwrite<Element[]>(count);
      count_ = count;
    }
    return data_.get();
  }
  const Element* get() const { return data_.get(); }

 private:
  std::unique_ptr<Element[]> data_;
  int64_t count_ = 0;
};

// One table's slots, [first, last) of the list of slots, and how many ids they have.
struct Table {
  Slot slot;
  int64_t first;
  int64_t last;
  int64_t count;
};

struct Task {
  int64_t first;  // tables [first, last)
  int64_t last;
  bool summed;  // by an array of sums; else by sorting one table
};

// What a task has found; reused from task to task.
struct Found {
  Buffer<uint64_t> pairs, others;
  Buffer<const float*> from;
  Buffer<float> scales;
  Buffer<float> bags;  // copies of the gradients of bags
  bool direct = false;  // pairs tell the number of a copy, and no occurrence
  Buffer<float> sums;
  Buffer<uint8_t> touched;
  const uint64_t* sorted = nullptr;  // row << 32 | occurrence
  int64_t count = 0;
};

// A row in registers, or, if its width is not known to the compiler, in memory.
template <int Lanes, int Width>
struct Row {
  static constexpr int lanes = std::min(Lanes, Width);
  Vector<lanes> parts[Width / lanes] = {};

  SHARDREC_INLINE explicit Row(float*) {}
  SHARDREC_INLINE Vector<lanes> at(int64_t i, Tag<lanes>) const { return parts[i / lanes]; }
  SHARDREC_INLINE void set(int64_t i, Tag<lanes>, Vector<lanes> value) { parts[i / lanes] = value; }
};

template <int Lanes>
struct Row<Lanes, 0> {
  float* memory;

  SHARDREC_INLINE explicit Row(float* memory) : memory(memory) {}
  template <int Some>
  SHARDREC_INLINE Vector<Some> at(int64_t i, Tag<Some>) const {
    return load<Some>(memory + i);
  }
  template <int Some>
  SHARDREC_INLINE void set(int64_t i, Tag<Some>, Vector<Some> value) {
    store<Some>(memory + i, value);
  }
};

// What one backward gives: the ids that were looked up, and the gradient of the output.
struct Part {
  Bags bags;
  const at::Tensor* ids;
  const float* data;
  int64_t stride;
  std::vector<int64_t> firsts = {};  // per slot of the gradient, the number of its first id
};

struct Gradient {
  std::vector<Slot> slots;  // those of a table next to each other
  std::vector<Table> tables;
  std::vector<int64_t> numbers;  // per slot, its number in the lengths
  std::vector<Part> parts;
  bool weighted = false;
  bool pooled = true;
};

// Slots by table, in the order of the tables in the weights; those with table < 0 are left out.
inline Gradient gradient_of(std::vector<Slot> slots, std::vector<Part> parts, bool pooled) {
  Gradient made;
  made.pooled = pooled;
  for (int64_t s = 0; s < int64_t(slots.size()); ++s) {
    if (slots[s].table >= 0) made.numbers.push_back(s);
  }
  std::stable_sort(made.numbers.begin(), made.numbers.end(), [&](int64_t one, int64_t other) {
    return slots[one].base < slots[other].base;
  });
  for (const int64_t number : made.numbers) {
    const Slot& slot = slots[number];
    const int64_t place = int64_t(made.slots.size());
    if (made.tables.empty() || made.tables.back().slot.table != slot.table) {
      made.tables.push_back({slot, place, place, 0});
    }
    const Slot& first = made.tables.back().slot;
    TORCH_CHECK(
        slot.base == first.base && slot.rows == first.rows && slot.width == first.width && slot.state == first.state,
        "shardrec: slots of table ", slot.table, " disagree on where it is, or on its size: ", first.rows, " rows of ",
        first.width, " columns from element ", first.base, ", and ", slot.rows, " of ", slot.width, " from ", slot.base);
    made.tables.back().last = place + 1;
    made.slots.push_back(slot);
  }
  for (Part& part : parts) {
    made.weighted |= part.bags.weights != nullptr;
    find_ids(slots, part.bags);
    for (Table& table : made.tables) {
      for (int64_t s = table.first; s < table.last; ++s) {
        const Slot& slot = slots[made.numbers[s]];
        part.firsts.push_back(slot.first);
        table.count += slot.end - slot.first;
      }
      TORCH_CHECK(table.count < kMost, "shardrec: ", table.count, " ids of one table are too many for one call");
    }
  }
  made.parts = std::move(parts);
  return made;
}

// Tasks in the order of the tables.
inline std::vector<Task> tasks_of(const Gradient& gradient) {
  std::vector<Task> tasks;
  int64_t held = 0;
  for (int64_t t = 0; t < int64_t(gradient.tables.size()); ++t) {
    const Table& table = gradient.tables[t];
    if (table.count == 0) continue;
    const int64_t row_bytes = table.slot.width * int64_t(sizeof(float)) + 1;
    if (table.slot.rows <= kSumsBytes / row_bytes && table.slot.rows <= 2 * table.count) {
      const int64_t bytes = table.slot.rows * row_bytes;
      if (!tasks.empty() && tasks.back().summed && tasks.back().last == t && held + bytes <= kSumsBytes) {
        tasks.back().last = t + 1;
        held += bytes;
      } else {
        tasks.push_back({t, t + 1, true});
        held = bytes;
      }
    } else {
      tasks.push_back({t, t + 1, false});
    }
  }
  return tasks;
}

// Stable, by row: least significant digits first.
inline const uint64_t* sort_pairs(uint64_t* pairs, uint64_t* others, int64_t count, int64_t rows) {
  constexpr int kMostBits = 11;
  int bits = 1;
  while ((rows - 1) >> bits > 0) ++bits;
  const int passes = (bits + kMostBits - 1) / kMostBits, digit = (bits + passes - 1) / passes;
  const uint64_t mask = (uint64_t(1) << digit) - 1;
  std::array<uint32_t, (1 << kMostBits) + 1> starts;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = 32 + pass * digit;
    std::fill_n(starts.begin(), mask + 2, 0);
    for (int64_t i = 0; i < count; ++i) ++starts[((pairs[i] >> shift) & mask) + 1];
    for (uint64_t value = 0; value <= mask; ++value) starts[value + 1] += starts[value];
    for (int64_t i = 0; i < count; ++i) others[starts[(pairs[i] >> shift) & mask]++] = pairs[i];
    std::swap(pairs, others);
  }
  return pairs;
}

// First step of a task: pairs, or sums. Whether all the ids were rows.
struct Find {
  const Gradient& gradient;
  const Task& task;
  Found& found;

  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    const bool sound = task.summed ? sum<Lanes>() : list();
    if (sound && !task.summed) {
      const int64_t rows = gradient.tables[task.first].slot.rows;
      found.sorted = sort_pairs(found.pairs.of(found.count), found.others.of(found.count), found.count, rows);
    }
    return sound;
  }

  SHARDREC_INLINE bool list() const {
    const Table& table = gradient.tables[task.first];
    found.pairs.of(table.count);
    found.from.of(table.count);
    if (gradient.weighted) found.scales.of(table.count);
    found.count = 0;
    int64_t bags = 0;
    for (const Part& part : gradient.parts) bags += part.bags.samples * (table.last - table.first);
    // The gradients of bags that several rows share lie side by side in a copy, on a fraction of the pages: the rows
    // read them in any order.
    const bool copies = gradient.pooled && table.count >= kIdsOfCopiedBag * bags;
    float* copy = copies ? found.bags.of(bags * table.slot.width) : nullptr;
    found.direct = copies && !gradient.weighted;
    for (const Part& part : gradient.parts) {
      const bool is_int = part.ids->scalar_type() == at::kInt;
      if (!(is_int ? list_part<int32_t>(part, table, copy) : list_part<int64_t>(part, table, copy))) return false;
    }
    return true;
  }

  template <class Id>
  SHARDREC_INLINE bool list_part(const Part& part, const Table& table, float*& copy) const {
    const Id* const ids = part.ids->const_data_ptr<Id>();
    const Bags& bags = part.bags;
    uint64_t* const pairs = found.pairs.of(table.count);
    const float** const from = found.from.of(table.count);
    float* const scales = bags.weights ? found.scales.of(table.count) : nullptr;
    int64_t count = found.count;
    uint64_t number = copy ? (copy - found.bags.get()) / table.slot.width : 0;
    for (int64_t s = table.first; s < table.last; ++s) {
      const Slot& slot = gradient.slots[s];
      const int32_t* const lengths = bags.lengths + gradient.numbers[s] * bags.samples;
      int64_t at = part.firsts[s];
      for (int64_t sample = 0; sample < bags.samples; ++sample, ++number) {
        const int64_t stop = at + lengths[sample];
        const float* bag = part.data + sample * part.stride + slot.column;
        if (copy) {
          bag = std::copy_n(bag, slot.width, copy) - slot.width;
          copy += slot.width;
        }
        for (; at < stop; ++at) {
          const uint64_t row = uint64_t(int64_t(ids[at]));
          if (row >= uint64_t(slot.rows)) return false;
          pairs[count] = row << 32 | (found.direct ? number : uint64_t(count));
          if (!found.direct) from[count] = gradient.pooled ? bag : part.data + at * part.stride;
          if (scales) scales[count] = bags.weights[at];
          ++count;
        }
      }
    }
    found.count = count;
    return true;
  }

  template <int Lanes>
  SHARDREC_INLINE bool sum() const {
    int64_t rows = 0, elements = 0;
    for (int64_t t = task.first; t < task.last; ++t) {
      rows += gradient.tables[t].slot.rows;
      elements += gradient.tables[t].slot.rows * gradient.tables[t].slot.width;
    }
    std::memset(found.sums.of(elements), 0, elements * sizeof(float));
    std::memset(found.touched.of(rows), 0, rows);
    for (const Part& part : gradient.parts) {
      const bool is_int = part.ids->scalar_type() == at::kInt;
      if (!(is_int ? sum_part<Lanes, int32_t>(part, elements, rows) : sum_part<Lanes, int64_t>(part, elements, rows))) {
        return false;
      }
    }
    return true;
  }

  template <int Lanes, class Id>
  SHARDREC_INLINE bool sum_part(const Part& part, int64_t elements, int64_t rows) const {
    const int64_t first = gradient.tables[task.first].first, last = gradient.tables[task.last - 1].last;
    std::vector<int64_t> places(part.firsts.begin() + first, part.firsts.begin() + last);
    for (int64_t sample = 0; sample < part.bags.samples; sample += kGradientTile) {
      float* sums = found.sums.of(elements);
      uint8_t* touched = found.touched.of(rows);
      for (int64_t t = task.first; t < task.last; ++t) {
        const Table& table = gradient.tables[t];
        for (int64_t s = table.first; s < table.last; ++s) {
          if (!by_width<Lanes, Id>(part, s, places[s - first], sample, sums, touched)) return false;
        }
        sums += table.slot.rows * table.slot.width;
        touched += table.slot.rows;
      }
    }
    return true;
  }

  template <int Lanes, class Id>
  SHARDREC_INLINE bool by_width(
      const Part& part, int64_t s, int64_t& at, int64_t sample, float* sums, uint8_t* touched) const {
    switch (gradient.slots[s].width) {
      case 4: return sum_tile<Lanes, 4, Id>(part, s, at, sample, sums, touched);
      case 8: return sum_tile<Lanes, 8, Id>(part, s, at, sample, sums, touched);
      case 16: return sum_tile<Lanes, 16, Id>(part, s, at, sample, sums, touched);
      case 32: return sum_tile<Lanes, 32, Id>(part, s, at, sample, sums, touched);
      case 64: return sum_tile<Lanes, 64, Id>(part, s, at, sample, sums, touched);
      case 128: return sum_tile<Lanes, 128, Id>(part, s, at, sample, sums, touched);
      default: return sum_tile<Lanes, 0, Id>(part, s, at, sample, sums, touched);
    }
  }

  template <int Lanes, int Width, class Id>
  SHARDREC_INLINE bool sum_tile(
      const Part& part, int64_t s, int64_t& place, int64_t sample, float* sums, uint8_t* touched) const {
    const Slot slot = gradient.slots[s];
    const Bags& bags = part.bags;
    const Id* const ids = part.ids->const_data_ptr<Id>();
    const int64_t width = Width ? Width : slot.width, stride = part.stride;
    const int64_t last = std::min(sample + kGradientTile, bags.samples);
    const int32_t* const lengths = bags.lengths + gradient.numbers[s] * bags.samples;
    int64_t at = place;
    for (; sample < last; ++sample) {
      const int64_t stop = at + lengths[sample];
      const float* const bag = part.data + sample * stride + slot.column;
      if (gradient.pooled) prefetch_row(unchecked_row(bag, kOccurrencesAhead, stride), width);
      for (; at < stop; ++at) {
        const uint64_t row = uint64_t(int64_t(ids[at]));
        if (row >= uint64_t(slot.rows)) return false;
        const float* const source = gradient.pooled ? bag : part.data + at * stride;
        float* const to = sums + row * width;
        touched[row] = 1;
        const float scale = bags.weights ? bags.weights[at] : 1.0f;
        for_vectors<Lanes, Width>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
          store<tag.lanes>(to + i, load<tag.lanes>(to + i) + load<tag.lanes>(source + i) * scale);
        });
      }
    }
    place = at;
    return true;
  }
};

// Second step of a task: its rows, ascending, each given to `use` with its gradient.
//
// `Use` has `use.begin(table)`, `use.ahead(row, width)` and `use.row<Lanes, Width>(row, gradient, width)`.
template <class Use>
struct Visit {
  const Gradient& gradient;
  const Task& task;
  Found& found;
  Use& use;

  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    const float* sums = found.sums.get();
    const uint8_t* touched = found.touched.get();
    for (int64_t t = task.first; t < task.last; ++t) {
      const Slot& slot = gradient.tables[t].slot;
      use.begin(slot);
      by_width<Lanes>(slot, sums, touched);
      if (task.summed) {
        sums += slot.rows * slot.width;
        touched += slot.rows;
      }
    }
    return true;
  }

  template <int Lanes>
  SHARDREC_INLINE void by_width(const Slot& slot, const float* sums, const uint8_t* touched) const {
    switch (slot.width) {
      case 4: return visit<Lanes, 4>(slot, sums, touched);
      case 8: return visit<Lanes, 8>(slot, sums, touched);
      case 16: return visit<Lanes, 16>(slot, sums, touched);
      case 32: return visit<Lanes, 32>(slot, sums, touched);
      case 64: return visit<Lanes, 64>(slot, sums, touched);
      case 128: return visit<Lanes, 128>(slot, sums, touched);
      default: return visit<Lanes, 0>(slot, sums, touched);
    }
  }

  template <int Lanes, int Width>
  SHARDREC_INLINE void visit(const Slot& slot, const float* sums, const uint8_t* touched) const {
    std::unique_ptr<float[]> memory;
    if (Width == 0) memory = std::make_unique_for_overwrite<float[]>(slot.width);
    if (task.summed) {
      visit_sums<Lanes, Width>(slot, sums, touched, memory.get());
    } else {
      visit_pairs<Lanes, Width>(slot, memory.get());
    }
  }

  template <int Lanes, int Width>
  SHARDREC_INLINE void visit_sums(const Slot& slot, const float* sums, const uint8_t* touched, float* memory) const {
    const int64_t width = Width ? Width : slot.width;
    for (int64_t row = 0; row < slot.rows; ++row) {
      if (!touched[row]) continue;
      use.ahead(std::min(row + kOccurrencesAhead, slot.rows - 1), width);
      Row<Lanes, Width> total(memory);
      for_vectors<Lanes, Width>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
        total.set(i, tag, load<tag.lanes>(sums + row * width + i));
      });
      use.template row<Lanes, Width>(row, total, width);
    }
  }

  template <int Lanes, int Width>
  SHARDREC_INLINE void visit_pairs(const Slot& slot, float* memory) const {
    const int64_t width = Width ? Width : slot.width, count = found.count;
    const uint64_t* const pairs = found.sorted;
    const float* const* const from = found.from.get();
    const float* const bags = found.bags.get();
    const bool direct = found.direct;
    const float* const scales = gradient.weighted ? found.scales.get() : nullptr;
    const auto source = [&](uint64_t pair) SHARDREC_BODY {
      return direct ? bags + int64_t(uint32_t(pair)) * width : from[uint32_t(pair)];
    };
    for (int64_t i = 0; i < count;) {
      const uint64_t row = pairs[i] >> 32;
      Row<Lanes, Width> total(memory);
      const auto ask_for_later = [&]() SHARDREC_BODY {
        if (i + kOccurrencesAhead >= count) return;
        const uint64_t later = pairs[i + kOccurrencesAhead];
        prefetch_row(source(later), width);
        use.ahead(int64_t(later >> 32), width);
      };
      ask_for_later();
      const float* const first = source(pairs[i]);
      const float its_scale = scales ? scales[uint32_t(pairs[i])] : 1.0f;
      for_vectors<Lanes, Width>(width, [&](int64_t j, auto tag) SHARDREC_BODY {
        total.set(j, tag, load<tag.lanes>(first + j) * its_scale);
      });
      for (++i; i < count && pairs[i] >> 32 == row; ++i) {
        ask_for_later();
        const float* const part = source(pairs[i]);
        const float scale = scales ? scales[uint32_t(pairs[i])] : 1.0f;
        for_vectors<Lanes, Width>(width, [&](int64_t j, auto tag) SHARDREC_BODY {
          total.set(j, tag, total.at(j, tag) + load<tag.lanes>(part + j) * scale);
        });
      }
      use.template row<Lanes, Width>(int64_t(row), total, width);
    }
  }
};

}  // namespace shardrec
