#include "load.hpp"

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

std::chrono::duration<double, std::milli> since(Clock::time_point begin) { return Clock::now() - begin; }

}  // namespace

std::string load(Model& model, const std::vector<std::string>& requests, int clients, double seconds) {
  if (requests.empty()) throw std::runtime_error("there are no requests on stdin to ask with");
  for (const std::string& one : requests) {
    const std::string answer = model.answer(one);
    if (answer.rfind("{\"error\"", 0) == 0) throw std::runtime_error("the model refuses a request: " + answer);
  }
  const auto start = Clock::now();
  const double warm = 1e3 * seconds / 10, end = warm + 1e3 * seconds;
  std::vector<std::vector<double>> times(clients);
  std::vector<std::thread> threads;
  for (int client = 0; client < clients; ++client) {
    threads.emplace_back([&, client] {
      // Each begins at another request.
      for (std::size_t next = client; since(start).count() < end; ++next) {
        const auto begin = Clock::now();
        model.answer(requests[next % requests.size()]);
        const double took = since(begin).count();
        if (since(start).count() > warm) times[client].push_back(took);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  std::vector<double> all;
  for (const auto& some : times) all.insert(all.end(), some.begin(), some.end());
  if (all.empty()) throw std::runtime_error("no request was answered in time: give more seconds");
  std::sort(all.begin(), all.end());
  const auto at = [&all](double share) { return all[std::min(all.size() - 1, std::size_t(share * all.size()))]; };
  std::ostringstream found;
  found << std::setprecision(6) << "{\"clients\":" << clients << ",\"requests\":" << all.size()
        << ",\"per_second\":" << all.size() / seconds << ",\"p50_ms\":" << at(0.5) << ",\"p99_ms\":" << at(0.99) << "}";
  return found.str();
}
