// A request's tensors, and an answer's: to and from JSON.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "json.hpp"

// A request that cannot be answered, with the reason.
struct BadRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a model says that an argument is. `shape` has numbers ("4") and multiples of the samples ("B", "4*B") or of the ids
// ("N"); it is empty for a model that does not say.
struct TensorSpec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::string> shape;
};

// The list of strings under a key of a model's notes.
std::vector<std::string> strings(const json::Object& notes, const std::string& key);

// The arguments of a model, from its notes.
std::vector<TensorSpec> specs(const json::Object& notes);

// The tensor that a request has under an argument's name. `sizes` has what B and N are found to be; the first tensor says it
// to the others. Throws BadRequest for what the model does not take.
at::Tensor read(const json::Object& request, const TensorSpec& spec, std::size_t features,
                std::map<char, std::int64_t>& sizes);

// A tensor's numbers, as nested arrays.
void write(const at::Tensor& tensor, std::string& into);
