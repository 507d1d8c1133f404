// Answers requests from stdin with a model that shardrec.serve.save or package wrote: a line of JSON each, in and out.
#include <algorithm>
#include <exception>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Parallel.h>

#include "load.hpp"
#include "model.hpp"
#include "operators.hpp"

namespace {

constexpr double kLongestInterval = 1e6;  // seconds

constexpr char kUsage[] =
    "usage: serve --model FILE [--operators FOLDER] [--threads N] [--follow FOLDER [--interval S]] [--libraries]\n"
    "             [--clients N [--seconds S] [--windows N] [--answers]]\n"
    "  --model      a file that shardrec.serve.save wrote, or shardrec.serve.package (.pt2)\n"
    "  --operators  the folder of the Python package fbgemm_gpu, with its .so files; not needed if these are preloaded\n"
    "  --threads    for one request; default 1\n"
    "  --follow     the folder of a shardrec.Publisher, whose versions are applied between requests\n"
    "  --interval   seconds between two looks into it, at most a million; default 1\n"
    "  --libraries  list the shared libraries of the process, and answer nothing\n"
    "  --clients    measure: this many threads send the requests on stdin without pause; prints requests a second and times\n"
    "  --seconds    how long they do; default 10\n"
    "  --windows    how often, one after the other; default 1\n"
    "  --answers    then print the answers that differ in more than the version's age\n";

struct Options {
  std::string model;
  std::string operators;
  Follow follow;
  int threads = 1;
  int clients = 0;
  double seconds = 10;
  int windows = 1;
  bool answers = false;
  bool libraries = false;
};

bool parse(int count, char** words, Options& options) {
  for (int place = 1; place < count; ++place) {
    const std::string_view word = words[place];
    if (word == "--libraries" || word == "--answers") {
      (word == "--answers" ? options.answers : options.libraries) = true;
      continue;
    }
    if (place + 1 == count) return false;
    const std::string value = words[++place];
    if (word == "--model") {
      options.model = value;
    } else if (word == "--operators") {
      options.operators = value;
    } else if (word == "--follow") {
      options.follow.folder = value;
    } else {
      try {
        if (word == "--threads") {
          options.threads = std::stoi(value);
        } else if (word == "--clients") {
          options.clients = std::stoi(value);
        } else if (word == "--seconds") {
          options.seconds = std::stod(value);
        } else if (word == "--windows") {
          options.windows = std::stoi(value);
        } else if (word == "--interval") {
          options.follow.interval = std::stod(value);
        } else {
          return false;
        }
      } catch (const std::exception&) {
        return false;
      }
    }
  }
  return !options.model.empty() && options.threads > 0 && options.clients >= 0 && options.seconds > 0 &&
         options.follow.interval > 0 && options.follow.interval <= kLongestInterval;
}

}  // namespace

int main(int count, char** words) {
  Options options;
  if (!parse(count, words, options)) {
    std::cerr << kUsage;
    return 2;
  }
  try {
    at::set_num_threads(options.threads);
    if (!options.operators.empty()) load_operators(options.operators);
    const std::unique_ptr<Model> model = load_model(options.model, std::max(options.clients, 1), options.follow);
    if (options.libraries) {
      for (const std::string& path : loaded_libraries()) std::cout << path << '\n';
      return 0;
    }
    std::vector<std::string> requests;
    for (std::string line; std::getline(std::cin, line);) {
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      if (options.clients > 0) {
        requests.push_back(line);
        continue;
      }
      // Flushed at once: who asks may wait for the answer before asking again.
      std::cout << model->answer(line) << std::endl;
    }
    std::set<std::string> answers;
    for (int window = 0; options.clients > 0 && window < options.windows; ++window) {
      put_under_load(*model, requests, options.clients, options.seconds, options.threads, std::cout,
                     options.answers ? &answers : nullptr);
    }
    for (const std::string& answer : answers) std::cout << answer << '\n';
  } catch (const std::exception& failed) {
    std::cerr << "serve: " << failed.what() << '\n';
    return 1;
  }
  return 0;
}
