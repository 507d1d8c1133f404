// A model that shardrec.serve.save or shardrec.serve.package wrote, and how it answers a request.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensors.hpp"

class Model {
 public:
  virtual ~Model() = default;

  // The answer to a request, both JSON: {"values": [...], "lengths": [...], ...} to {"output": ...}. A request that the
  // model cannot take gives {"error": "..."}; nothing is thrown. Threads may call it at a time.
  std::string answer(std::string_view request);

 protected:
  // Throws std::runtime_error for notes of a model that needs other ranks.
  Model(const std::string& path, const json::Object& notes);

  // The model's output for its arguments, as JSON at the end of `into`.
  virtual void run(std::vector<at::Tensor> arguments, std::string& into) = 0;

 private:
  std::vector<std::string> features_;
  std::vector<TensorSpec> specs_;
};

// A folder to which versions of the model are published, "" for none, and the seconds between two looks.
struct Follow {
  std::string folder;
  double interval = 1;
};

// A model in TorchScript, whose tensors become those of the versions in the folder; or for a path that ends in .pt2 one compiled by
// AOTInductor, which up to this number of clients may call at a time. Throws std::runtime_error for a file that cannot be loaded, was
// written by something else, or needs other ranks.
std::unique_ptr<Model> load_model(const std::string& path, int clients, const Follow& follow);

// The name under which a file has its notes.
constexpr char kNotes[] = "shardrec.json";

// load_model for each of the two.
std::unique_ptr<Model> load_scripted(const std::string& path, const Follow& follow);
std::unique_ptr<Model> load_package(const std::string& path, int clients);
