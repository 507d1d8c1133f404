#include "model.hpp"

#include <algorithm>
#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace {

// The reason in a report of TorchScript, which follows a traceback.
std::string reason_of(const std::string& report) {
  constexpr std::string_view kMark = "Error: ";
  const auto mark = report.rfind(kMark);
  const auto start = mark == std::string::npos ? 0 : mark + kMark.size();
  const std::string line = report.substr(start, report.find('\n', start) - start);
  return line.substr(0, line.find_last_not_of(" ;\r") + 1);
}

std::string error(const std::string& reason) { return "{\"error\":" + json::quoted(reason) + "}"; }

}  // namespace

Model::Model(const std::string& path, const json::Object& notes)
    : features_(strings(notes, "features")), specs_(specs(notes)) {
  const auto ranks = *notes.at("world_size").as<std::int64_t>();
  if (ranks != 1) {
    throw std::runtime_error(path + " is one of " + std::to_string(ranks) +
                             " ranks' files, and this program has no process group: save the model on one rank");
  }
}

std::string Model::answer(std::string_view request) {
  try {
    const json::Value value = json::read(request);
    const auto* object = value.as<json::Object>();
    if (object == nullptr) throw BadRequest("a request is an object, {\"values\": [...], ...}");
    std::map<char, std::int64_t> sizes;
    std::vector<at::Tensor> arguments;
    for (const TensorSpec& spec : specs_) arguments.push_back(read(*object, spec, features_.size(), sizes));
    for (const auto& [name, unused] : *object) {
      const auto is_its = [&name = name](const TensorSpec& spec) { return spec.name == name; };
      if (std::none_of(specs_.begin(), specs_.end(), is_its)) {
        throw BadRequest("the model takes no " + json::quoted(name));
      }
    }
    std::string output = "{\"output\":";
    run(std::move(arguments), output);
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

std::unique_ptr<Model> load_model(const std::string& path, int clients, const Follow& follow) {
  constexpr std::string_view kPackage = ".pt2";
  const bool is_package =
      path.size() > kPackage.size() && path.compare(path.size() - kPackage.size(), kPackage.size(), kPackage) == 0;
  if (is_package && !follow.folder.empty()) throw std::runtime_error(path + " is compiled with its weights, and cannot follow: save the model");
  return is_package ? load_package(path, clients) : load_scripted(path, follow);
}
