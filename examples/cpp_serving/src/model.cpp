#include "model.hpp"

#include <algorithm>
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
    if (const auto* number = one.as<double>()) {
      into.push_back(static_cast<float>(*number));
    } else if (const auto* whole = one.as<std::int64_t>()) {
      into.push_back(static_cast<float>(*whole));
    } else {
      throw BadRequest(json::quoted(name) + " has something else than numbers");
    }
  }
}

torch::Tensor numbers(const json::Array& array, const std::string& name) {
  std::vector<std::int64_t> shape;
  std::vector<float> found;
  collect(array, 0, shape, found, name);
  return torch::tensor(found, torch::kFloat32).view(shape);
}

void write(const torch::Tensor& tensor, std::string& into) {
  if (tensor.dim() == 0) {
    into += json::written(tensor.item<float>());
    return;
  }
  into += '[';
  for (std::int64_t row = 0; row < tensor.size(0); ++row) {
    if (row > 0) into += ',';
    write(tensor[row], into);
  }
  into += ']';
}

void write(const torch::IValue& value, std::string& into) {
  if (value.isTensor()) {
    write(value.toTensor().detach().to(torch::kCPU, torch::kFloat32), into);
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

// What a model says of its own accord stands in the last line of TorchScript's report, after the traceback.
std::string reason_of(const std::string& report) {
  const auto end = report.find_last_not_of(" \t\r\n");
  if (end == std::string::npos) return "the model failed";
  const auto start = report.find_last_of('\n', end);
  return report.substr(start == std::string::npos ? 0 : start + 1, end - (start == std::string::npos ? 0 : start));
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
