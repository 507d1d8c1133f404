// Operators for what torch has no single operator for, on the CPU.
//
// assemble, distribute: rows put together from blocks of several ranks, and their gradient taken apart, in one pass over
// the rows. A "pieces" list describes the output's columns from left to right. Each piece is
//     width, number of sources n, block 0, first column 0, ..., block n-1, first column n-1
// and its columns are the sum of its sources' columns.
//
// are_sound: the checks of a batch in one pass over its ids.
//
// sum_gradient, rowwise_adagrad: the gradient of each distinct row that was looked up, and its update, for the tables that
// fbgemm's fused kernels cannot train.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace {

struct Copy {
  float* block;
  int64_t stride;
  int64_t place;
  int64_t width;
  float scale;
  bool first;
};

constexpr int64_t kRowsPerTask = 64;

float* rows_of(const at::Tensor& block, int64_t rows, int64_t* stride) {
  TORCH_CHECK(
      block.dim() == 2 && block.size(0) == rows && block.scalar_type() == at::kFloat && block.device().is_cpu() &&
          (block.stride(1) == 1 || block.size(1) <= 1 || rows == 0),
      "shardrec: a block is (", rows, ", columns) float32 on the CPU with neighbouring columns");
  *stride = block.stride(0);
  return const_cast<float*>(block.const_data_ptr<float>());
}

std::vector<Copy> copies(
    at::TensorList blocks, at::IntArrayRef pieces, at::ArrayRef<double> scales, int64_t rows, int64_t cols) {
  std::vector<float*> base(blocks.size());
  std::vector<int64_t> stride(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) base[i] = rows_of(blocks[i], rows, &stride[i]);
  std::vector<Copy> found;
  int64_t place = 0;
  for (size_t at = 0; at < pieces.size();) {
    TORCH_CHECK(at + 2 <= pieces.size(), "shardrec: pieces end inside of one");
    const int64_t width = pieces[at], sources = pieces[at + 1];
    at += 2;
    TORCH_CHECK(
        width >= 0 && sources >= 1 && sources <= int64_t(pieces.size() - at) / 2 && place + width <= cols,
        "shardrec: pieces are malformed");
    for (int64_t source = 0; source < sources; ++source, at += 2) {
      const int64_t block = pieces[at], start = pieces[at + 1];
      TORCH_CHECK(
          block >= 0 && block < int64_t(blocks.size()) && start >= 0 && start + width <= blocks[block].size(1),
          "shardrec: a piece lies outside of its block");
      const float scale = scales.empty() ? 1.0f : float(scales[block]);
      found.push_back({base[block] + start, stride[block], place, width, scale, source == 0});
    }
    place += width;
  }
  TORCH_CHECK(place == cols, "shardrec: pieces cover ", place, " of ", cols, " columns");
  return found;
}

at::Tensor assemble(at::TensorList blocks, at::IntArrayRef pieces, int64_t rows, int64_t cols) {
  const auto list = copies(blocks, pieces, {}, rows, cols);
  auto output = at::empty({rows, cols}, at::kFloat);
  float* out = output.data_ptr<float>();
  at::parallel_for(0, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* line = out + row * cols;
      for (const Copy& one : list) {
        const float* __restrict__ from = one.block + row * one.stride;
        float* __restrict__ to = line + one.place;
        if (one.first) {
          std::memcpy(to, from, sizeof(float) * one.width);
        } else {
          for (int64_t i = 0; i < one.width; ++i) to[i] += from[i];
        }
      }
    }
  });
  return output;
}

void distribute(const at::Tensor& gradient, at::TensorList blocks, at::IntArrayRef pieces, at::ArrayRef<double> scales) {
  TORCH_CHECK(scales.size() == blocks.size(), "shardrec: one scale for each block");
  const int64_t rows = gradient.size(0), cols = gradient.size(1);
  int64_t stride = 0;
  const float* in = rows_of(gradient, rows, &stride);
  const auto list = copies(blocks, pieces, scales, rows, cols);
  at::parallel_for(0, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* line = in + row * stride;
      for (const Copy& one : list) {
        const float* __restrict__ from = line + one.place;
        float* __restrict__ to = one.block + row * one.stride;
        if (one.scale == 1.0f) {
          std::memcpy(to, from, sizeof(float) * one.width);
        } else {
          const float scale = one.scale;
          for (int64_t i = 0; i < one.width; ++i) to[i] = from[i] * scale;
        }
      }
    }
  });
}

void check_flat(const at::Tensor& values, const char* name) {
  TORCH_CHECK(values.device().is_cpu() && values.is_contiguous(), "shardrec: ", name, " is contiguous and on the CPU");
}

template <typename Length, typename Id>
bool sound(const Length* lengths, int64_t features, int64_t batch, const Id* ids, int64_t count, const int64_t* limits) {
  int64_t at = 0;
  bool inside = true;
  for (int64_t feature = 0; feature < features; ++feature) {
    int64_t total = 0;
    bool negative = false;
    for (int64_t sample = 0; sample < batch; ++sample) {
      const int64_t length = lengths[feature * batch + sample];
      negative |= length < 0;
      total += length;
    }
    if (negative || total > count - at) return false;
    const int64_t limit = limits[feature];
    if (limit != std::numeric_limits<int64_t>::max()) {
      for (int64_t i = at; i < at + total; ++i) inside &= ids[i] >= 0 && int64_t(ids[i]) < limit;
    }
    at += total;
  }
  return inside && at == count;
}

template <typename Length>
bool sound_lengths(const at::Tensor& lengths, const at::Tensor& values, const int64_t* limits) {
  const Length* data = lengths.const_data_ptr<Length>();
  const int64_t features = lengths.size(0), batch = lengths.size(1), count = values.numel();
  if (values.scalar_type() == at::kInt) {
    return sound(data, features, batch, values.const_data_ptr<int32_t>(), count, limits);
  }
  return sound(data, features, batch, values.const_data_ptr<int64_t>(), count, limits);
}

at::Tensor are_sound(const at::Tensor& lengths, const at::Tensor& values, const at::Tensor& limits) {
  check_flat(lengths, "lengths");
  check_flat(values, "values");
  check_flat(limits, "limits");
  TORCH_CHECK(lengths.dim() == 2 && limits.numel() == lengths.size(0), "shardrec: a limit for each row of lengths");
  const int64_t* most = limits.const_data_ptr<int64_t>();
  const bool answer = lengths.scalar_type() == at::kInt ? sound_lengths<int32_t>(lengths, values, most)
                                                        : sound_lengths<int64_t>(lengths, values, most);
  return at::scalar_tensor(answer, at::TensorOptions().dtype(at::kBool));
}

struct Looked {
  int64_t row;
  int64_t from;
  float weight;
};

// Stable, by row: least significant digit first.
void sort_by_row(std::vector<Looked>& list, int64_t rows) {
  constexpr int kBits = 11;
  std::vector<Looked> other(list.size());
  for (int shift = 0; (rows - 1) >> shift > 0; shift += kBits) {
    std::array<int64_t, (1 << kBits) + 1> starts{};
    for (const Looked& one : list) ++starts[((one.row >> shift) & ((1 << kBits) - 1)) + 1];
    for (int digit = 0; digit < 1 << kBits; ++digit) starts[digit + 1] += starts[digit];
    for (const Looked& one : list) other[starts[(one.row >> shift) & ((1 << kBits) - 1)]++] = one;
    list.swap(other);
  }
}

template <typename Id>
std::vector<Looked> looked_up(
    const Id* ids, const at::Tensor& lengths, const float* weights, const int64_t* bases, const int64_t* columns,
    int64_t stride, int64_t width, bool pooled, int64_t count) {
  std::vector<Looked> list;
  list.reserve(count);
  const int32_t* length = lengths.const_data_ptr<int32_t>();
  const int64_t slots = lengths.size(0), batch = lengths.size(1);
  int64_t at = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    for (int64_t sample = 0; sample < batch; ++sample) {
      const int64_t end = at + length[slot * batch + sample];
      TORCH_CHECK(end >= at && end <= count, "shardrec: lengths and ids do not fit");
      for (; at < end; ++at) {
        if (bases[slot] < 0) continue;
        const int64_t from = pooled ? sample * stride + columns[slot] : at * width;
        list.push_back({int64_t(ids[at]) + bases[slot], from, weights ? weights[at] : 1.0f});
      }
    }
  }
  return list;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sum_gradient(
    const at::Tensor& ids, const at::Tensor& lengths, const std::optional<at::Tensor>& weights,
    const at::Tensor& gradient, const at::Tensor& bases, const at::Tensor& columns, int64_t width, bool pooled,
    int64_t rows) {
  check_flat(ids, "ids");
  check_flat(lengths, "lengths");
  check_flat(gradient, "gradient");
  TORCH_CHECK(gradient.dim() == 2 && gradient.scalar_type() == at::kFloat, "shardrec: gradient is (rows, columns) float32");
  TORCH_CHECK(lengths.scalar_type() == at::kInt, "shardrec: lengths are int32");
  const int64_t count = ids.numel(), stride = gradient.size(1);
  TORCH_CHECK(
      gradient.size(0) >= (pooled ? lengths.size(1) : count) && (pooled || stride == width) &&
          bases.numel() == lengths.size(0) && columns.numel() == lengths.size(0),
      "shardrec: the gradient does not fit the ids");
  const float* scale = weights ? weights->const_data_ptr<float>() : nullptr;
  TORCH_CHECK(!weights || weights->numel() == count, "shardrec: one weight for each id");
  const int64_t* base = bases.const_data_ptr<int64_t>();
  const int64_t* column = columns.const_data_ptr<int64_t>();
  for (int64_t slot = 0; slot < columns.numel(); ++slot) {
    TORCH_CHECK(!pooled || base[slot] < 0 || column[slot] + width <= stride, "shardrec: a slot lies outside of the gradient");
  }
  std::vector<Looked> list = ids.scalar_type() == at::kInt
      ? looked_up(ids.const_data_ptr<int32_t>(), lengths, scale, base, column, stride, width, pooled, count)
      : looked_up(ids.const_data_ptr<int64_t>(), lengths, scale, base, column, stride, width, pooled, count);
  for (const Looked& one : list) TORCH_CHECK(one.row >= 0 && one.row < rows, "shardrec: an id outside of its table");
  sort_by_row(list, rows);
  int64_t distinct = 0;
  for (size_t i = 0; i < list.size(); ++i) distinct += i == 0 || list[i].row != list[i - 1].row;
  auto found = at::empty({distinct}, at::kLong);
  auto values = at::empty({distinct, width}, at::kFloat);
  auto squares = at::empty({distinct}, at::kFloat);
  int64_t* row = found.data_ptr<int64_t>();
  float* value = values.data_ptr<float>();
  float* square = squares.data_ptr<float>();
  const float* from = gradient.const_data_ptr<float>();
  size_t next = 0;
  for (int64_t u = 0; u < distinct; ++u) {
    float* __restrict__ to = value + u * width;
    row[u] = list[next].row;
    for (bool first = true; next < list.size() && list[next].row == row[u]; ++next, first = false) {
      constexpr size_t kAhead = 16;
      if (next + kAhead < list.size()) __builtin_prefetch(from + list[next + kAhead].from);
      const float* __restrict__ part = from + list[next].from;
      const float weight = list[next].weight;
      if (first) {
        for (int64_t i = 0; i < width; ++i) to[i] = part[i] * weight;
      } else {
        for (int64_t i = 0; i < width; ++i) to[i] += part[i] * weight;
      }
    }
    float total = 0.0f;
    for (int64_t i = 0; i < width; ++i) total += to[i] * to[i];
    square[u] = total;
  }
  return {found, values, squares};
}

void rowwise_adagrad(
    const at::Tensor& weight, const at::Tensor& state, const at::Tensor& rows, const at::Tensor& values,
    const at::Tensor& mean_squares, double lr, double eps) {
  for (const at::Tensor& one : {weight, state, rows, values, mean_squares}) check_flat(one, "every tensor");
  const int64_t width = weight.size(1), count = rows.numel();
  TORCH_CHECK(
      state.numel() == weight.size(0) && values.numel() == count * width && mean_squares.numel() == count,
      "shardrec: the update does not fit the table");
  float* table = weight.data_ptr<float>();
  float* sums = state.data_ptr<float>();
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const float* value = values.const_data_ptr<float>();
  const float* square = mean_squares.const_data_ptr<float>();
  at::parallel_for(0, count, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      constexpr int64_t kAhead = 8;
      if (u + kAhead < end) {
        const float* ahead = table + row[u + kAhead] * width;
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(ahead + i, 1);
        __builtin_prefetch(sums + row[u + kAhead], 1);
      }
      TORCH_CHECK(row[u] >= 0 && row[u] < weight.size(0), "shardrec: a row outside of its table");
      const float total = sums[row[u]] += square[u];
      const float root = std::sqrt(total) + float(eps);
      const float rate = float(-lr);
      float* __restrict__ to = table + row[u] * width;
      const float* __restrict__ from = value + u * width;
      for (int64_t i = 0; i < width; ++i) to[i] += rate * (from[i] / root);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def("assemble(Tensor[] blocks, int[] pieces, int rows, int cols) -> Tensor");
  library.def("distribute(Tensor gradient, Tensor(a!)[] blocks, int[] pieces, float[] scales) -> ()");
  library.def("are_sound(Tensor lengths, Tensor values, Tensor limits) -> Tensor");
  library.def(
      "sum_gradient(Tensor ids, Tensor lengths, Tensor? weights, Tensor gradient, Tensor bases, Tensor columns, "
      "int width, bool pooled, int rows) -> (Tensor, Tensor, Tensor)");
  library.def(
      "rowwise_adagrad(Tensor(a!) weight, Tensor(b!) state, Tensor rows, Tensor values, Tensor mean_squares, "
      "float lr, float eps) -> ()");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) {
  library.impl("assemble", assemble);
  library.impl("distribute", distribute);
  library.impl("are_sound", are_sound);
  library.impl("sum_gradient", sum_gradient);
  library.impl("rowwise_adagrad", rowwise_adagrad);
}
