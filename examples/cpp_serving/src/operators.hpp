// fbgemm's operators, which the saved models call.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

// Load the shared libraries of a folder (of the Python package fbgemm_gpu), whatever needs which; loading one registers
// its operators with torch. Throws std::runtime_error if there are none, or one does not load.
void load_operators(const std::filesystem::path& folder);

// The paths of all the shared libraries in this process.
std::vector<std::string> loaded_libraries();
