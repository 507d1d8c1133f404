// Models in TorchScript, which shardrec.serve.save wrote.
#include <optional>
#include <unordered_map>

#include <torch/script.h>

#include "follower.hpp"
#include "model.hpp"

namespace {

void compose(const torch::IValue& value, std::string& into) {
  if (value.isTensor()) {
    write(value.toTensor(), into);
    return;
  }
  if (value.isGenericDict()) {
    const char* comma = "{";
    for (const auto& item : value.toGenericDict()) {
      into += comma + json::quoted(item.key().toStringRef()) + ":";
      compose(item.value(), into);
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
    compose(parts[part], into);
  }
  into += ']';
}

class Scripted : public Model {
 public:
  Scripted(const std::string& path, const json::Object& notes, torch::jit::Module module, const Follow& follow)
      : Model(path, notes), module_(std::move(module)) {
    module_.eval();
    if (!follow.folder.empty()) follower_.emplace(module_, notes, follow);
  }

 protected:
  void run(std::vector<at::Tensor> arguments, std::string& into) override {
    // Not InferenceMode, which leaves out fbgemm's training kernels; tables that are not quantized are looked up by them.
    const torch::NoGradGuard no_gradients;
    std::shared_lock<std::shared_mutex> reading;
    if (follower_) reading = follower_->reading();
    compose(module_.forward({arguments.begin(), arguments.end()}), into);
    if (follower_) into += follower_->state();
  }

 private:
  torch::jit::Module module_;
  std::optional<Follower> follower_;
};

}  // namespace

std::unique_ptr<Model> load_scripted(const std::string& path, const Follow& follow) {
  std::unordered_map<std::string, std::string> files{{kNotes, ""}};
  torch::jit::Module module;
  try {
    module = torch::jit::load(path, torch::kCPU, files);
  } catch (const std::exception& failed) {
    const std::string said = failed.what();
    const bool is_without = said.find("Unknown builtin op: fbgemm") != std::string::npos;
    throw std::runtime_error("cannot load " + path + ": " +
                             (is_without ? "fbgemm's operators are not loaded: give --operators, or preload them" : said));
  }
  if (files[kNotes].empty()) throw std::runtime_error(path + " was not written by shardrec.serve.save");
  const json::Value notes = json::read(files[kNotes]);
  return std::make_unique<Scripted>(path, *notes.as<json::Object>(), std::move(module), follow);
}
