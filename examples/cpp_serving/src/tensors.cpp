#include "tensors.hpp"

#include <cmath>
#include <limits>

namespace {

at::ScalarType dtype_of(const std::string& name) {
  if (name == "int64") return at::kLong;
  if (name == "int32") return at::kInt;
  if (name == "float32") return at::kFloat;
  if (name == "float64") return at::kDouble;
  throw std::runtime_error("the model takes tensors of " + name + ", which this program cannot read from JSON");
}

const json::Array& array_of(const json::Object& request, const std::string& name) {
  const auto place = request.find(name);
  if (place == request.end()) throw BadRequest(json::quoted(name) + " is missing");
  const auto* array = place->second.as<json::Array>();
  if (array == nullptr) throw BadRequest(json::quoted(name) + " is not an array");
  return *array;
}

at::Tensor whole_numbers(const json::Array& array, const TensorSpec& spec) {
  auto found = at::empty({static_cast<std::int64_t>(array.size())}, at::kLong);
  auto* into = found.data_ptr<std::int64_t>();
  for (const json::Value& one : array) {
    const auto* number = one.as<std::int64_t>();
    if (number == nullptr) throw BadRequest(json::quoted(spec.name) + " has something else than whole numbers");
    // A number that is cut to 32 bits would be another id.
    if (spec.dtype == at::kInt && *number != static_cast<std::int32_t>(*number)) {
      throw BadRequest(json::quoted(spec.name) + " has a number beyond 32 bits");
    }
    *into++ = *number;
  }
  return spec.dtype == at::kInt ? found.to(at::kInt) : found;
}

// Nested arrays of equal lengths, row by row, into `into`; `shape` has what is known of it so far.
void collect(const json::Array& array, std::size_t depth, at::DimVector& shape, std::vector<double>& into,
             const TensorSpec& spec) {
  const auto size = static_cast<std::int64_t>(array.size());
  if (depth == shape.size()) {
    if (!into.empty()) throw BadRequest(json::quoted(spec.name) + " has numbers and arrays side by side");
    shape.push_back(size);
  }
  if (shape[depth] != size) throw BadRequest(json::quoted(spec.name) + " has rows of several lengths");
  for (const json::Value& one : array) {
    if (const auto* inner = one.as<json::Array>()) {
      collect(*inner, depth + 1, shape, into, spec);
      continue;
    }
    if (depth + 1 != shape.size()) throw BadRequest(json::quoted(spec.name) + " has numbers and arrays side by side");
    double number = 0;
    if (const auto* fraction = one.as<double>()) {
      number = *fraction;
    } else if (const auto* whole = one.as<std::int64_t>()) {
      number = static_cast<double>(*whole);
    } else {
      throw BadRequest(json::quoted(spec.name) + " has something else than numbers");
    }
    if (spec.dtype == at::kFloat && std::abs(number) > std::numeric_limits<float>::max()) {
      throw BadRequest(json::quoted(spec.name) + " has a number beyond the range of a float");
    }
    into.push_back(number);
  }
}

at::Tensor numbers(const json::Array& array, const TensorSpec& spec) {
  at::DimVector shape;
  std::vector<double> found;
  collect(array, 0, shape, found, spec);
  return at::tensor(found, at::kDouble).to(spec.dtype).view(shape);
}

// Compiled code reads a tensor of another shape as if it had the right one.
void check(const at::Tensor& tensor, const TensorSpec& spec, std::map<char, std::int64_t>& sizes) {
  std::string wanted;
  for (const std::string& size : spec.shape) wanted += (wanted.empty() ? "" : ", ") + size;
  std::string given;
  for (const std::int64_t size : tensor.sizes()) given += (given.empty() ? "" : ", ") + std::to_string(size);
  const auto refuse = [&](const std::string& why) {
    throw BadRequest(json::quoted(spec.name) + " has the shape [" + given + "]; the model takes [" + wanted + "]" + why);
  };
  if (static_cast<std::size_t>(tensor.dim()) != spec.shape.size()) refuse("");
  for (std::size_t dim = 0; dim < spec.shape.size(); ++dim) {
    const std::string& size = spec.shape[dim];
    const std::int64_t found = tensor.size(static_cast<std::int64_t>(dim));
    const char symbol = size.back();
    if (symbol != 'B' && symbol != 'N') {
      if (found != std::stoll(size)) refuse("");
      continue;
    }
    const std::int64_t factor = size.size() > 1 ? std::stoll(size) : 1;
    if (found % factor != 0) refuse("");
    const std::int64_t known = sizes.emplace(symbol, found / factor).first->second;
    if (known * factor != found) refuse(std::string(", and ") + symbol + " is " + std::to_string(known));
  }
}

// The numbers of a contiguous tensor of a shape; `at` moves past what was written.
void write(const float*& at, at::IntArrayRef shape, std::string& into) {
  if (shape.empty()) {
    into += json::written(*at++);
    return;
  }
  into += '[';
  for (std::int64_t row = 0; row < shape.front(); ++row) {
    if (row > 0) into += ',';
    write(at, shape.slice(1), into);
  }
  into += ']';
}

}  // namespace

std::vector<std::string> strings(const json::Object& notes, const std::string& key) {
  std::vector<std::string> found;
  for (const json::Value& one : *notes.at(key).as<json::Array>()) found.push_back(*one.as<std::string>());
  return found;
}

std::vector<TensorSpec> specs(const json::Object& notes) {
  std::vector<TensorSpec> found;
  if (notes.count("tensors") == 0) {
    for (const std::string& name : strings(notes, "inputs")) {
      found.push_back({name, name == "values" || name == "lengths" ? at::kLong : at::kFloat, {}});
    }
    return found;
  }
  for (const json::Value& one : *notes.at("tensors").as<json::Array>()) {
    const auto& note = *one.as<json::Object>();
    TensorSpec spec{*note.at("name").as<std::string>(), dtype_of(*note.at("dtype").as<std::string>()), {}};
    for (const json::Value& size : *note.at("shape").as<json::Array>()) {
      const auto* number = size.as<std::int64_t>();
      spec.shape.push_back(number != nullptr ? std::to_string(*number) : *size.as<std::string>());
    }
    found.push_back(std::move(spec));
  }
  return found;
}

at::Tensor read(const json::Object& request, const TensorSpec& spec, std::size_t features,
                std::map<char, std::int64_t>& sizes) {
  const json::Array& array = array_of(request, spec.name);
  if (spec.name == "lengths" && (array.empty() || array.size() % features != 0)) {
    throw BadRequest("\"lengths\" has " + std::to_string(array.size()) + " entries; give one for each of " +
                     std::to_string(features) + " features and each sample");
  }
  const bool is_whole = spec.dtype == at::kLong || spec.dtype == at::kInt;
  if (is_whole && spec.shape.size() > 1) throw BadRequest(json::quoted(spec.name) + " is a table of whole numbers");
  at::Tensor found = is_whole ? whole_numbers(array, spec) : numbers(array, spec);
  if (!spec.shape.empty()) check(found, spec, sizes);
  return found;
}

void write(const at::Tensor& tensor, std::string& into) {
  const at::Tensor plain = tensor.to(at::kCPU, at::kFloat).contiguous();
  const float* at = plain.data_ptr<float>();
  write(at, plain.sizes(), into);
}
