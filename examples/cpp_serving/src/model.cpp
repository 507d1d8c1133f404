#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <unordered_map>

#include "json.hpp"

namespace {

constexpr char kNotes[] = "shardrec.json";  // the name that shardrec.serve.save gives it

// A request that cannot be answered, with the reason.
struct BadRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::vector<std::string> strings(const json::Object& notes, const std::string& key) {
  std::vector<std::string> found;
  for (const json::Value& one : *notes.at(key).as<json::Array>()) found.push_back(*one.as<std::string>());
  return found;
}

const json::Array& array_of(const json::Object& request, const std::string& name) {
  const auto place = request.find(name);
  if (place == request.end()) throw BadRequest(json::quoted(name) + " is missing");
  const auto* array = place->second.as<json::Array>();
  if (array == nullptr) throw BadRequest(json::quoted(name) + " is not an array");
  return *array;
}

torch::Tensor whole_numbers(const json::Array& array, const std::string& name) {
  auto found = torch::empty({static_cast<std::int64_t>(array.size())}, torch::kInt64);
  auto* into = found.data_ptr<std::int64_t>();
  for (const json::Value& one : array) {
    const auto* number = one.as<std::int64_t>();
    if (number == nullptr) throw BadRequest(json::quoted(name) + " has something else than whole numbers");
    *into++ = *number;
  }
  return found;
}

// Nested arrays of equal lengths, row by row, into `into`; `shape` has what is known of it so far.
void collect(const json::Array& array, std::size_t depth, std::vector<std::int64_t>& shape, std::vector<float>& into,
             const std::string& name) {
  const auto size = static_cast<std::int64_t>(array.size());
  if (depth == shape.size()) {
    if (!into.empty()) throw BadRequest(json::quoted(name) + " has numbers and arrays side by side");
    shape.push_back(size);
  }
  if (shape[depth] != size) throw BadRequest(json::quoted(name) + " has rows of several lengths");
  for (const json::Value& one : array) {
    if (const auto* inner = one.as<json::Array>()) {
      collect(*inner, depth + 1, shape, into, name);
      continue;
    }
    if (depth + 1 != shape.size()) throw BadRequest(json::quoted(name) + " has numbers and arrays side by side");
    double number = 0;
    if (const auto* fraction = one.as<double>()) {
      number = *fraction;
    } else if (const auto* whole = one.as<std::int64_t>()) {
      number = static_cast<double>(*whole);
    } else {
      throw BadRequest(json::quoted(name) + " has something else than numbers");
    }
    if (std::abs(number) > std::numeric_limits<float>::max()) {
      throw BadRequest(json::quoted(name) + " has a number beyond the range of a float");
    }
    into.push_back(static_cast<float>(number));
  }
}

torch::Tensor numbers(const json::Array& array, const std::string& name) {
  std::vector<std::int64_t> shape;
  std::vector<float> found;
  collect(array, 0, shape, found, name);
  return torch::tensor(found, torch::kFloat32).view(shape);
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

void write(const torch::IValue& value, std::string& into) {
  if (value.isTensor()) {
    const torch::Tensor tensor = value.toTensor().to(torch::kCPU, torch::kFloat32).contiguous();
    const float* at = tensor.data_ptr<float>();
    write(at, tensor.sizes(), into);
    return;
  }
  if (value.isGenericDict()) {
    const char* comma = "{";
    for (const auto& item : value.toGenericDict()) {
      into += comma + json::quoted(item.key().toStringRef()) + ":";
      write(item.value(), into);
      comma = ",";
    }
    into += *comma == '{' ? "{}" : "}";
    return;
  }
  std::vector<torch::IValue> parts;
  if (value.isTuple()) {
    parts = value.toTupleRef().elements().vec();
  } else if (value.isList()) {
    parts = value.toListRef().vec();
  } else {
    throw BadRequest("the model's output is neither a tensor nor a tuple, list or dict of them");
  }
  into += '[';
  for (std::size_t part = 0; part < parts.size(); ++part) {
    if (part > 0) into += ',';
    write(parts[part], into);
  }
  into += ']';
}

// The reason in TorchScript's report, which follows a traceback.
std::string reason_of(const std::string& report) {
  constexpr std::string_view kMark = "Error: ";
  const auto mark = report.rfind(kMark);
  const auto start = mark == std::string::npos ? 0 : mark + kMark.size();
  const std::string line = report.substr(start, report.find('\n', start) - start);
  return line.substr(0, line.find_last_not_of(" ;\r") + 1);
}

std::string error(const std::string& reason) { return "{\"error\":" + json::quoted(reason) + "}"; }

}  // namespace

Model::Model(const std::string& path) {
  std::unordered_map<std::string, std::string> files{{kNotes, ""}};
  try {
    module_ = torch::jit::load(path, torch::kCPU, files);
  } catch (const c10::Error& failed) {
    throw std::runtime_error("cannot load " + path + ": " + failed.what_without_backtrace());
  }
  if (files[kNotes].empty()) throw std::runtime_error(path + " was not written by shardrec.serve.save");
  const json::Value notes = json::read(files[kNotes]);
  const auto& object = *notes.as<json::Object>();
  const auto ranks = *object.at("world_size").as<std::int64_t>();
  if (ranks != 1) {
    throw std::runtime_error(path + " is one of " + std::to_string(ranks) +
                             " ranks' files, and this program has no process group: save the model on one rank");
  }
  features_ = strings(object, "features");
  inputs_ = strings(object, "inputs");
  module_.eval();
}

std::string Model::answer(std::string_view request) {
  try {
    const json::Value value = json::read(request);
    const auto* object = value.as<json::Object>();
    if (object == nullptr) throw BadRequest("a request is an object, {\"values\": [...], ...}");
    std::vector<torch::IValue> arguments;
    for (const std::string& name : inputs_) {
      const json::Array& array = array_of(*object, name);
      if (name == "lengths" && (array.empty() || array.size() % features_.size() != 0)) {
        throw BadRequest("\"lengths\" has " + std::to_string(array.size()) + " entries; give one for each of " +
                         std::to_string(features_.size()) + " features and each sample");
      }
      const bool is_whole = name == "values" || name == "lengths";
      arguments.emplace_back(is_whole ? whole_numbers(array, name) : numbers(array, name));
    }
    for (const auto& [name, unused] : *object) {
      if (std::find(inputs_.begin(), inputs_.end(), name) == inputs_.end()) {
        throw BadRequest("the model takes no " + json::quoted(name));
      }
    }
    // Not InferenceMode, which leaves out fbgemm's training kernels; tables that are not quantized are looked up by them.
    const torch::NoGradGuard no_gradients;
    std::string output = "{\"output\":";
    write(module_.forward(std::move(arguments)), output);
    return output + "}";
  } catch (const c10::Error& failed) {
    return error(reason_of(failed.what_without_backtrace()));
  } catch (const json::Error& failed) {
    return error(failed.what());
  } catch (const BadRequest& failed) {
    return error(failed.what());
  } catch (const std::exception& failed) {
    return error(reason_of(failed.what()));
  }
}
