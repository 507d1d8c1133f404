// update: the gradient of each distinct row and the optimizer's step on it, table by table.
// sum_gradient: the same gradients, given out. update_rows: the step alone, on rows that are given.
// update_matrix: both, for the gradients of several backward calls, which are read in place.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "gradient.h"
#include "slots.h"
#include "vectors.h"

namespace shardrec {
namespace {

// As shardrec.lookup.native_kernel numbers them.
enum Rule : int64_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2 };

template <int Lanes, int Width>
SHARDREC_INLINE float sum_of_squares(const Row<Lanes, Width>& row, int64_t width) {
  constexpr int wide = Width ? std::min(Lanes, Width) : Lanes;
  Vector<wide> squares = {};
  float total = 0.0f;
  for_vectors<Lanes, Width>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
    const Vector<tag.lanes> part = row.at(i, tag) * row.at(i, tag);
    if constexpr (tag.lanes == wide) {
      squares += part;
    } else {
      for (int j = 0; j < tag.lanes; ++j) total += part[j];
    }
  });
  for (int j = 0; j < wide; ++j) total += squares[j];
  return total;
}

struct Setting {
  float* weights;
  float* states;
  float rate;  // minus the learning rate
  float eps;
};

template <int64_t Kind>
struct Update {
  Setting setting;
  float* table = nullptr;
  float* state = nullptr;

  SHARDREC_INLINE void begin(const Slot& slot) {
    table = setting.weights + slot.base;
    if (Kind != kSgd) state = setting.states + slot.state;
  }

  SHARDREC_INLINE void ahead(int64_t row, int64_t width) const {
    prefetch_row<1>(table + row * width, width);
    if (Kind == kRowwiseAdagrad) __builtin_prefetch(state + row, 1);
    if (Kind == kAdagrad) prefetch_row<1>(state + row * width, width);
  }

  template <int Lanes, int Width>
  SHARDREC_INLINE void row(int64_t row, const Row<Lanes, Width>& gradient, int64_t width) const {
    if constexpr (Kind == kAdagrad) {
      float* const to = table + row * width;
      for_vectors<Lanes, Width>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
        float* const sums = state + row * width + i;
        const Vector<tag.lanes> change = gradient.at(i, tag);
        store<tag.lanes>(sums, load<tag.lanes>(sums) + change * change);
        float roots[tag.lanes];
        for (int j = 0; j < tag.lanes; ++j) roots[j] = __builtin_sqrtf(sums[j]);
        const Vector<tag.lanes> step = setting.rate * change / (load<tag.lanes>(roots) + setting.eps);
        store<tag.lanes>(to + i, load<tag.lanes>(to + i) + step);
      });
    } else {
      float rate = setting.rate;
      if constexpr (Kind == kRowwiseAdagrad) {
        const float sum = state[row] += sum_of_squares<Lanes, Width>(gradient, width) / float(width);
        rate /= std::sqrt(sum) + setting.eps;
      }
      add<Lanes, Width>(row, gradient, width, rate);
    }
  }

  template <int Lanes, int Width>
  SHARDREC_INLINE void add(int64_t row, const Row<Lanes, Width>& gradient, int64_t width, float factor) const {
    float* const to = table + row * width;
    for_vectors<Lanes, Width>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
      store<tag.lanes>(to + i, load<tag.lanes>(to + i) + gradient.at(i, tag) * factor);
    });
  }
};

struct Collect {
  int64_t* rows;
  float* values;
  float* squares;
  int64_t base = 0;

  SHARDREC_INLINE void begin(const Slot& slot) { base = slot.base / slot.width; }
  SHARDREC_INLINE void ahead(int64_t, int64_t) const {}

  template <int Lanes, int Width>
  SHARDREC_INLINE void row(int64_t row, const Row<Lanes, Width>& gradient, int64_t width) {
    *rows++ = base + row;
    *squares++ = sum_of_squares<Lanes, Width>(gradient, width);
    for_vectors<Lanes, Width>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
      store<tag.lanes>(values + i, gradient.at(i, tag));
    });
    values += width;
  }
};

void find(const Gradient& gradient, const Task& task, Found& found) {
  TORCH_CHECK(run(Find{gradient, task, found}), "shardrec: an id is not a row of its table");
}

template <int64_t Kind>
void update_by(const Gradient& gradient, const Setting& setting) {
  Found found;
  for (const Task& task : tasks_of(gradient)) {
    find(gradient, task, found);
    Update<Kind> use{setting};
    run(Visit<Update<Kind>>{gradient, task, found, use});
  }
}

void update_by(int64_t rule, const Gradient& gradient, const Setting& setting) {
  switch (rule) {
    case kSgd: return update_by<kSgd>(gradient, setting);
    case kAdagrad: return update_by<kAdagrad>(gradient, setting);
    default: return update_by<kRowwiseAdagrad>(gradient, setting);
  }
}

float* states_of(int64_t rule, const std::optional<at::Tensor>& states, const std::vector<Slot>& slots) {
  TORCH_CHECK(rule == kSgd || rule == kAdagrad || rule == kRowwiseAdagrad, "shardrec: there is no rule ", rule);
  if (rule == kSgd) return nullptr;
  TORCH_CHECK(states && states->scalar_type() == at::kFloat, "shardrec: the rule needs float32 states");
  check_dense(*states, "states");
  for (const Slot& slot : slots) {
    const int64_t size = rule == kAdagrad ? slot.rows * slot.width : slot.rows;
    TORCH_CHECK(size <= states->numel() - slot.state, "shardrec: a table lies outside of the states");
  }
  return states->data_ptr<float>();
}

// `slots` are those whose columns are read.
Part part_of(
    const at::Tensor& ids, const at::Tensor& lengths, const std::optional<at::Tensor>& weights,
    const at::Tensor& gradient, int64_t count, const std::vector<Slot>& slots, bool pooled) {
  const Bags bags = bags_of(ids, lengths, weights, count);
  check_gradient(gradient, slots, bags, pooled);
  return {bags, &ids, gradient.const_data_ptr<float>(), gradient.stride(0)};
}

void update(
    const at::Tensor& weights, const std::optional<at::Tensor>& states, const at::Tensor& slots, const at::Tensor& ids,
    const at::Tensor& lengths, const std::optional<at::Tensor>& id_weights, const at::Tensor& gradient, bool pooled,
    int64_t rule, double lr, double eps) {
  check_dense(weights, "weights");
  TORCH_CHECK(weights.scalar_type() == at::kFloat, "shardrec: weights are float32");
  std::vector<Slot> list = slots_of(slots, weights.numel());
  std::vector<Part> parts{part_of(ids, lengths, id_weights, gradient, slots.size(0), list, pooled)};
  const Setting setting{weights.data_ptr<float>(), states_of(rule, states, list), float(-lr), float(eps)};
  update_by(rule, gradient_of(std::move(list), std::move(parts), pooled), setting);
}

// Slots of one width, whose tables are one matrix of `rows` rows; a slot with base < 0 is not of it.
std::vector<Slot> matrix_slots(const at::Tensor& bases, const at::Tensor& columns, int64_t width, int64_t rows) {
  check_dense(bases, "bases");
  check_dense(columns, "columns");
  TORCH_CHECK(
      bases.scalar_type() == at::kLong && columns.scalar_type() == at::kLong && bases.numel() == columns.numel() &&
          width > 0 && width <= kMost,
      "shardrec: bases and columns are (slots,) int64, and tables have at least one column");
  TORCH_CHECK(
      rows >= 0 && rows <= std::numeric_limits<int64_t>::max() / width, "shardrec: a matrix of ", rows, " rows of ",
      width, " columns is too large");
  const int64_t* base = bases.const_data_ptr<int64_t>();
  const int64_t* column = columns.const_data_ptr<int64_t>();
  std::vector<int64_t> starts;
  for (int64_t s = 0; s < bases.numel(); ++s) {
    if (base[s] >= 0) starts.push_back(base[s]);
  }
  std::sort(starts.begin(), starts.end());
  starts.push_back(rows);
  std::vector<Slot> found;
  for (int64_t s = 0; s < bases.numel(); ++s) {
    Slot slot{-1, 0, 0, width, column[s], 0};
    if (base[s] >= 0) {
      const int64_t end = *std::upper_bound(starts.begin(), starts.end() - 1, base[s]);
      TORCH_CHECK(
          base[s] <= end && end <= rows && end - base[s] <= kMost && column[s] >= 0,
          "shardrec: a slot lies outside of its matrix");
      slot = {base[s], base[s] * width, end - base[s], width, column[s], 0};
    }
    found.push_back(slot);
  }
  return found;
}

int64_t distinct_rows(const Gradient& gradient, const Task& task, const Found& found) {
  if (!task.summed) {
    int64_t count = 0;
    for (int64_t i = 0; i < found.count; ++i) {
      count += i == 0 || found.sorted[i] >> 32 != found.sorted[i - 1] >> 32;
    }
    return count;
  }
  int64_t rows = 0, count = 0;
  for (int64_t t = task.first; t < task.last; ++t) rows += gradient.tables[t].slot.rows;
  for (int64_t row = 0; row < rows; ++row) count += found.touched.get()[row];
  return count;
}

Gradient gradient_of(
    at::TensorList ids, at::TensorList lengths, at::TensorList weights, at::TensorList gradients,
    std::vector<Slot> slots, bool pooled) {
  const size_t count = ids.size();
  TORCH_CHECK(
      lengths.size() == count && gradients.size() == count && (weights.empty() || weights.size() == count),
      "shardrec: ids, lengths and gradients are as many tensors, and so are weights, if there are any");
  std::vector<Slot> used;
  std::copy_if(slots.begin(), slots.end(), std::back_inserter(used), [](const Slot& slot) { return slot.table >= 0; });
  std::vector<Part> parts;
  for (size_t p = 0; p < count; ++p) {
    const auto weight = weights.empty() ? std::optional<at::Tensor>() : weights[p];
    parts.push_back(part_of(ids[p], lengths[p], weight, gradients[p], int64_t(slots.size()), used, pooled));
  }
  return gradient_of(std::move(slots), std::move(parts), pooled);
}

void update_matrix(
    const at::Tensor& weight, const std::optional<at::Tensor>& state, at::TensorList ids, at::TensorList lengths,
    at::TensorList id_weights, at::TensorList gradients, const at::Tensor& bases, const at::Tensor& columns,
    bool pooled, int64_t rule, double lr, double eps) {
  check_dense(weight, "the weight");
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat, "shardrec: the weight is (rows, columns) float32");
  std::vector<Slot> list = matrix_slots(bases, columns, weight.size(1), weight.size(0));
  for (Slot& slot : list) {
    if (slot.table >= 0) slot.state = rule == kAdagrad ? slot.base : slot.table;
  }
  const Setting setting{weight.data_ptr<float>(), states_of(rule, state, list), float(-lr), float(eps)};
  update_by(rule, gradient_of(ids, lengths, id_weights, gradients, std::move(list), pooled), setting);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sum_gradient(
    at::TensorList ids, at::TensorList lengths, at::TensorList weights, at::TensorList gradients,
    const at::Tensor& bases, const at::Tensor& columns, int64_t width, bool pooled, int64_t rows) {
  const Gradient found =
      gradient_of(ids, lengths, weights, gradients, matrix_slots(bases, columns, width, rows), pooled);
  const std::vector<Task> tasks = tasks_of(found);
  std::vector<Found> parts(tasks.size());
  int64_t count = 0;
  for (size_t number = 0; number < tasks.size(); ++number) {
    find(found, tasks[number], parts[number]);
    count += distinct_rows(found, tasks[number], parts[number]);
  }
  auto distinct = at::empty({count}, at::kLong);
  auto values = at::empty({count, width}, at::kFloat);
  auto squares = at::empty({count}, at::kFloat);
  Collect use{distinct.data_ptr<int64_t>(), values.data_ptr<float>(), squares.data_ptr<float>()};
  for (size_t number = 0; number < tasks.size(); ++number) {
    run(Visit<Collect>{found, tasks[number], parts[number], use});
  }
  return {distinct, values, squares};
}

template <int64_t Kind>
struct Step {
  Update<Kind> use;
  int64_t rows;
  int64_t width;
  int64_t count;
  const int64_t* row;
  const float* values;
  const float* mean_squares;  // of rowwise Adagrad
  float scale;
  float* scaled;  // (width,)

  template <int Lanes>
  SHARDREC_INLINE bool run() const {
    for (int64_t u = 0; u < count; ++u) {
      if (u + kOccurrencesAhead < count) {
        const int64_t next = row[u + kOccurrencesAhead];
        if (uint64_t(next) < uint64_t(rows)) use.ahead(next, width);
      }
      if (uint64_t(row[u]) >= uint64_t(rows)) return false;
      const Row<Lanes, 0> gradient(scaled);
      for_vectors<Lanes, 0>(width, [&](int64_t i, auto tag) SHARDREC_BODY {
        store<tag.lanes>(scaled + i, load<tag.lanes>(values + u * width + i) * scale);
      });
      if constexpr (Kind == kRowwiseAdagrad) {
        const float sum = use.state[row[u]] += mean_squares[u];
        use.template add<Lanes, 0>(row[u], gradient, width, use.setting.rate / (std::sqrt(sum) + use.setting.eps));
      } else {
        use.template row<Lanes, 0>(row[u], gradient, width);
      }
    }
    return true;
  }
};

void update_rows(
    const at::Tensor& weight, const std::optional<at::Tensor>& state, const at::Tensor& rows, const at::Tensor& values,
    const std::optional<at::Tensor>& mean_squares, double scale, int64_t rule, double lr, double eps) {
  for (const at::Tensor& one : {weight, rows, values}) check_dense(one, "every tensor");
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat, "shardrec: the weight is (rows, columns) float32");
  const int64_t width = weight.size(1), count = rows.numel();
  TORCH_CHECK(
      values.dim() == 2 && values.size(0) == count && values.size(1) == width,
      "shardrec: the update does not fit the table");
  const auto floats = [](const std::optional<at::Tensor>& one, int64_t size) {
    TORCH_CHECK(one && one->numel() == size, "shardrec: the update does not fit the table");
    check_dense(*one, "every tensor");
    return one->data_ptr<float>();
  };
  const Setting setting{weight.data_ptr<float>(), nullptr, float(-lr), float(eps)};
  const auto scaled = std::make_unique_for_overwrite<float[]>(width);
  const auto step = [&](auto kind) {
    constexpr int64_t Kind = decltype(kind)::value;
    Update<Kind> use{setting, setting.weights};
    const float* squares = nullptr;
    if (Kind != kSgd) use.state = floats(state, Kind == kAdagrad ? weight.numel() : weight.size(0));
    if (Kind == kRowwiseAdagrad) squares = floats(mean_squares, count);
    const Step<Kind> job{
        use,     weight.size(0), width,       count, rows.const_data_ptr<int64_t>(), values.const_data_ptr<float>(),
        squares, float(scale),   scaled.get()};
    TORCH_CHECK(run(job), "shardrec: a row outside of its table");
  };
  switch (rule) {
    case kSgd: return step(std::integral_constant<int64_t, kSgd>{});
    case kAdagrad: return step(std::integral_constant<int64_t, kAdagrad>{});
    case kRowwiseAdagrad: return step(std::integral_constant<int64_t, kRowwiseAdagrad>{});
    default: TORCH_CHECK(false, "shardrec: there is no rule ", rule);
  }
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def(
      "update(Tensor(a!) weights, Tensor(b!)? states, Tensor slots, Tensor ids, Tensor lengths, Tensor? id_weights, "
      "Tensor gradient, bool pooled, int rule, float lr, float eps) -> ()");
  library.def(
      "update_matrix(Tensor(a!) weight, Tensor(b!)? state, Tensor[] ids, Tensor[] lengths, Tensor[] id_weights, "
      "Tensor[] gradients, Tensor bases, Tensor columns, bool pooled, int rule, float lr, float eps) -> ()");
  library.def(
      "sum_gradient(Tensor[] ids, Tensor[] lengths, Tensor[] weights, Tensor[] gradients, Tensor bases, "
      "Tensor columns, int width, bool pooled, int rows) -> (Tensor, Tensor, Tensor)");
  library.def(
      "update_rows(Tensor(a!) weight, Tensor(b!)? state, Tensor rows, Tensor values, Tensor? mean_squares, float scale, "
      "int rule, float lr, float eps) -> ()");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) {
  library.impl("update", shardrec::update);
  library.impl("update_matrix", shardrec::update_matrix);
  library.impl("sum_gradient", shardrec::sum_gradient);
  library.impl("update_rows", shardrec::update_rows);
}
