#include "load.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <ATen/Parallel.h>

namespace {

using Clock = std::chrono::steady_clock;

// The least value that so large a part of them does not exceed.
double quantile(const std::vector<double>& sorted, double part) {
  return sorted[std::min(sorted.size() - 1, static_cast<std::size_t>(part * static_cast<double>(sorted.size())))];
}

}  // namespace

void put_under_load(Model& model, const std::vector<std::string>& requests, int clients, double seconds, int threads,
                    std::ostream& into, std::set<std::string>* answers) {
  if (requests.empty()) throw std::runtime_error("no requests are on stdin to ask");
  for (std::size_t turn = 0; turn < 2 * requests.size(); ++turn) {
    const std::string answer = model.answer(requests[turn % requests.size()]);
    if (answer.rfind("{\"error\"", 0) == 0) throw std::runtime_error("a request cannot be answered: " + answer);
  }
  std::mutex collecting;
  std::vector<std::vector<double>> found(static_cast<std::size_t>(clients));
  std::atomic<bool> is_on{false};
  const auto ask = [&](std::size_t client) {
    at::set_num_threads(threads);
    while (!is_on) std::this_thread::yield();
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    Clock::time_point before = Clock::now();
    for (std::size_t turn = client; before < end; ++turn) {
      const std::string answer = model.answer(requests[turn % requests.size()]);
      if (answers != nullptr) {
        std::ostringstream line;
        line << '[' << turn % requests.size() << ',' << answer.substr(0, answer.find(",\"age\"")) << "}]";
        const std::lock_guard turn_of(collecting);
        answers->insert(line.str());
      }
      const Clock::time_point after = Clock::now();
      found[client].push_back(std::chrono::duration<double, std::milli>(after - before).count());
      before = after;
    }
  };
  std::vector<std::thread> asking;
  for (std::size_t client = 0; client < found.size(); ++client) asking.emplace_back(ask, client);
  const Clock::time_point start = Clock::now();
  is_on = true;
  for (std::thread& one : asking) one.join();
  const double took = std::chrono::duration<double>(Clock::now() - start).count();
  std::vector<double> all;
  for (const auto& times : found) all.insert(all.end(), times.begin(), times.end());
  std::sort(all.begin(), all.end());
  into << "{\"clients\":" << clients << ",\"requests\":" << all.size()
       << ",\"requests_per_second\":" << static_cast<double>(all.size()) / took << ",\"p50_ms\":" << quantile(all, 0.5)
       << ",\"p99_ms\":" << quantile(all, 0.99) << ",\"worst_ms\":" << all.back()
       << ",\"last\":" << model.answer(requests[0]) << "}" << std::endl;
}
