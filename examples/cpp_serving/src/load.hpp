// A model under load: so many threads ask it one request after the other.
#pragma once

#include <string>
#include <vector>

#include "model.hpp"

// Asks for `seconds`, after a tenth of that to warm up, and gives what was measured as a line of JSON: "clients",
// "requests", "per_second", and of a request's time "p50_ms" and "p99_ms". Throws std::runtime_error for no requests, or for one
// that the model refuses.
std::string load(Model& model, const std::vector<std::string>& requests, int clients, double seconds);
