// Models compiled by AOTInductor, which shardrec.serve.package wrote.
#include <filesystem>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include "model.hpp"

namespace {

using torch::inductor::AOTIModelPackageLoader;

// An output as the notes draw it: the number of a tensor, or an array or object of such.
void compose(const json::Value& drawn, const std::vector<at::Tensor>& tensors, std::string& into) {
  if (const auto* number = drawn.as<std::int64_t>()) {
    write(tensors.at(static_cast<std::size_t>(*number)), into);
    return;
  }
  const char* comma = "";
  if (const auto* object = drawn.as<json::Object>()) {
    into += '{';
    for (const auto& [key, item] : *object) {
      into += comma + json::quoted(key) + ":";
      compose(item, tensors, into);
      comma = ",";
    }
    into += '}';
    return;
  }
  into += '[';
  for (const json::Value& item : *drawn.as<json::Array>()) {
    into += comma;
    compose(item, tensors, into);
    comma = ",";
  }
  into += ']';
}

class Package : public Model {
 public:
  Package(const std::string& path, const json::Object& notes, std::unique_ptr<AOTIModelPackageLoader> loader)
      : Model(path, notes), loader_(std::move(loader)), output_(notes.at("output")) {}

 protected:
  void run(std::vector<at::Tensor> arguments, std::string& into) override {
    const at::NoGradGuard no_gradients;
    compose(output_, loader_->boxed_run(std::move(arguments)), into);
  }

 private:
  std::unique_ptr<AOTIModelPackageLoader> loader_;
  json::Value output_;
};

}  // namespace

std::unique_ptr<Model> load_package(const std::string& path, int clients) {
  if (!std::filesystem::exists(path)) throw std::runtime_error("cannot load " + path + ": there is no such file");
  std::unique_ptr<AOTIModelPackageLoader> loader;
  try {
    // A runner answers one client at a time; all of them share the weights.
    loader = std::make_unique<AOTIModelPackageLoader>(path, "model", /*run_single_threaded=*/false,
                                                      static_cast<std::size_t>(clients));
  } catch (const std::exception& failed) {
    throw std::runtime_error("cannot load " + path + ": " + failed.what());
  }
  const auto metadata = loader->get_metadata();
  const auto found = metadata.find(kNotes);
  if (found == metadata.end()) throw std::runtime_error(path + " was not written by shardrec.serve.package");
  const json::Value notes = json::read(found->second);
  return std::make_unique<Package>(path, *notes.as<json::Object>(), std::move(loader));
}
