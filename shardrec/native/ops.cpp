// Operators for what torch has no single operator for, on the CPU.
//
// assemble, distribute: rows put together from blocks of several ranks, and their gradient taken apart, in one pass over
// the rows. A "pieces" list describes the output's columns from left to right. Each piece is
//     width, number of sources n, block 0, first column 0, ..., block n-1, first column n-1
// and its columns are the sum of its sources' columns.
//
// are_sound: the checks of a batch in one pass over its ids.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>
#include <limits>
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
    for (int64_t sample = 0; sample < batch; ++sample) {
      // Each length by itself, for a sum of large ones may wrap.
      const int64_t length = lengths[feature * batch + sample];
      if (length < 0 || length > count - at - total) return false;
      total += length;
    }
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def("assemble(Tensor[] blocks, int[] pieces, int rows, int cols) -> Tensor");
  library.def("distribute(Tensor gradient, Tensor(a!)[] blocks, int[] pieces, float[] scales) -> ()");
  library.def("are_sound(Tensor lengths, Tensor values, Tensor limits) -> Tensor");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) {
  library.impl("assemble", assemble);
  library.impl("distribute", distribute);
  library.impl("are_sound", are_sound);
}
