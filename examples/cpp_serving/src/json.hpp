// A JSON value, a reader and a writer: as much as requests and answers need, without a library to install.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace json {

struct Value;
using Array = std::vector<Value>;
using Object = std::map<std::string, Value>;

// A number without fraction and exponent is an int64_t, any other a double: ids above 2^53 stay what they are.
struct Value {
  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object> held = nullptr;

  template <typename T>
  const T* as() const {
    return std::get_if<T>(&held);
  }

  // Throws Error for a value of another kind.
  template <typename T>
  const T& get() const;

  bool operator==(const Value&) const = default;
};

// What is wrong with a text; says at which character.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename T>
const T& Value::get() const {
  if (const T* value = as<T>()) return *value;
  throw Error("a value in it is of another kind than it has to be");
}

// The value that a text is. Throws Error for anything else, for more than 64 nested brackets, for a key that comes twice,
// and for a whole number beyond 64 bits.
Value read(std::string_view text);

// A text in quotes.
std::string quoted(std::string_view text);

// The shortest decimal that reads as the same float; null for what JSON has no number for.
std::string written(float value);

}  // namespace json
