// Follows what a shardrec.Publisher publishes (docs/publishing.md): a version is verified, its rows are set aside, and then copied
// into the program's tensors at once, between requests.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/script.h>

#include "model.hpp"

// Rows [0, 1) and columns [2, 3) of a published tensor.
using Rect = std::array<std::int64_t, 4>;

// A part of a published tensor, in the program's memory. Rows are `stride` bytes apart.
struct Target {
  Rect rect;
  std::int64_t itemsize;
  char* rows = nullptr;
  std::int64_t stride = 16;
};

class Follower {
 public:
  // Applies the last version, if there is one, and begins to look for further ones. Throws std::runtime_error if the notes do
  // not say where the program has what is published.
  Follower(torch::jit::Module program, const json::Object& notes, const Follow& follow);

  // While it is held, no version is applied. Threads may hold it at a time.
  std::shared_lock<std::shared_mutex> reading();

  // The version, its age in seconds and the number of faults, as members of a JSON object; for who is reading.
  std::string state() const;

 private:
  void run(const std::stop_token& stop);
  void poll();
  void take(const std::string& name, std::int64_t version);
  void check_fits(const json::Object& manifest) const;

  torch::jit::Module program_;
  const json::Object notes_;
  const Follow follow_;
  std::map<std::string, std::vector<Target>> targets_;      // of each published tensor
  std::map<std::string, std::vector<at::Tensor>> records_;  // ids of rows, by the module that looks ids up
  // What the program has of each published part: the base and the deltas.
  std::map<std::pair<std::string, Rect>, std::vector<std::string>> applied_;
  std::mutex turnstile_;  // else readers that overlap would keep a version waiting
  std::shared_mutex lock_;
  std::int64_t version_ = 0;
  double published_ = 0;
  std::string fault_;
  std::atomic<int> faults_ = 0;
  std::mutex sleep_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // the last, so that it ends before the others
};
