// A model under load: several clients that ask without pause.
#pragma once

#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "model.hpp"

// Lets each client, on its own thread, send the requests in turn for a number of seconds, the next one as soon as it has its answer;
// then writes a line of JSON: how many requests a second were answered, how long half of them, 99% of them and all of them took at most,
// and the answer to one more.
// Into `answers` go those that differ, each as an array: the number of its request, and the answer without the age of its version.
// Every request is asked twice before the clock starts, and an error among these answers is thrown as std::runtime_error.
void put_under_load(Model& model, const std::vector<std::string>& requests, int clients, double seconds, int threads,
                    std::ostream& into, std::set<std::string>* answers);
