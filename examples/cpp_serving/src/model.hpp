// A model that shardrec.serve.save wrote, and how it answers a request.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <torch/script.h>

class Model {
 public:
  // Throws std::runtime_error for a file that cannot be loaded, was not written by shardrec.serve.save, or needs other
  // ranks.
  explicit Model(const std::string& path);

  // The answer to a request, both JSON: {"values": [...], "lengths": [...], ...} to {"output": ...}. A request that the
  // model cannot take gives {"error": "..."}; nothing is thrown.
  std::string answer(std::string_view request);

 private:
  torch::jit::Module module_;
  std::vector<std::string> features_;
  std::vector<std::string> inputs_;
};
