#include "json.hpp"

#include <charconv>
#include <cmath>

namespace json {
namespace {

constexpr int kDeepest = 64;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Value whole() {
    Value value = any(0);
    space();
    if (at_ < text_.size()) {
      fail("something follows the value");
    }
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("not JSON: " + what + " at character " + std::to_string(at_ + 1));
  }

  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) {
      ++at_;
    }
  }

  bool take(char wanted) {
    space();
    if (at_ < text_.size() && text_[at_] == wanted) {
      ++at_;
      return true;
    }
    return false;
  }

  bool word(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) {
      return false;
    }
    at_ += wanted.size();
    return true;
  }

  Value any(int depth) {
    if (depth > kDeepest) {
      fail("more than " + std::to_string(kDeepest) + " nested brackets");
    }
    space();
    if (at_ == text_.size()) {
      fail("the text ends where a value should be");
    }
    switch (text_[at_]) {
      case '{':
        return {object(depth)};
      case '[':
        return {array(depth)};
      case '"':
        return {string()};
      default:
        break;
    }
    if (word("true")) return {true};
    if (word("false")) return {false};
    if (word("null")) return {nullptr};
    return number();
  }

  Array array(int depth) {
    ++at_;
    Array found;
    if (take(']')) return found;
    do {
      found.push_back(any(depth + 1));
    } while (take(','));
    if (!take(']')) fail("a comma or ] is missing");
    return found;
  }

  Object object(int depth) {
    ++at_;
    Object found;
    if (take('}')) return found;
    do {
      space();
      if (at_ == text_.size() || text_[at_] != '"') fail("a key in quotes is missing");
      std::string key = string();
      if (!take(':')) fail("a colon is missing");
      if (!found.emplace(key, any(depth + 1)).second) fail("the key " + quoted(key) + " comes twice, the second time");
    } while (take(','));
    if (!take('}')) fail("a comma or } is missing");
    return found;
  }

  // from_chars would take more than JSON does: "inf", "nan", "01" and ".5".
  Value number() {
    const std::size_t start = at_;
    if (at_ < text_.size() && text_[at_] == '-') ++at_;
    const std::size_t first = at_;
    if (digits() == 0) fail("there is no value");
    if (text_[first] == '0' && at_ - first > 1) fail("a number begins with 0");
    bool is_whole = true;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      is_whole = false;
      if (digits() == 0) fail("a digit is missing");
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      is_whole = false;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      if (digits() == 0) fail("a digit is missing");
    }
    const char* begin = text_.data() + start;
    const char* end = text_.data() + at_;
    if (is_whole) {
      std::int64_t value = 0;
      if (std::from_chars(begin, end, value).ec != std::errc()) fail("a whole number is beyond 64 bits");
      return {value};
    }
    double value = 0;
    if (std::from_chars(begin, end, value).ec != std::errc()) fail("a number is beyond the range of a double");
    return {value};
  }

  std::size_t digits() {
    const std::size_t start = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ - start;
  }

  std::string string() {
    ++at_;
    std::string found;
    while (true) {
      if (at_ == text_.size()) fail("a string has no end");
      const char one = text_[at_++];
      if (one == '"') return found;
      if (static_cast<unsigned char>(one) < 0x20) fail("a control character is in a string");
      if (one == '\\') {
        escape(found);
      } else {
        found += one;
      }
    }
  }

  void escape(std::string& into) {
    if (at_ == text_.size()) fail("a string has no end");
    const char one = text_[at_++];
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kMeant = "\"\\/\b\f\n\r\t";
    const std::size_t place = kNames.find(one);
    if (place != std::string_view::npos) {
      into += kMeant[place];
    } else if (one == 'u') {
      unsigned point = unit();
      if (point >= 0xD800 && point < 0xDC00 && word("\\u")) {
        const unsigned low = unit();
        if (low < 0xDC00 || low > 0xDFFF) fail("half a surrogate pair is missing");
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
      }
      if (point >= 0xD800 && point <= 0xDFFF) fail("half a surrogate pair is missing");
      utf8(point, into);
    } else {
      fail("an unknown escape");
    }
  }

  unsigned unit() {
    unsigned value = 0;
    const std::string_view four = text_.substr(at_, 4);
    const auto [end, error] = std::from_chars(four.data(), four.data() + four.size(), value, 16);
    if (four.size() != 4 || error != std::errc() || end != four.data() + 4) fail("four hexadecimal digits are missing");
    at_ += 4;
    return value;
  }

  static void utf8(unsigned point, std::string& into) {
    if (point < 0x80) {
      into += static_cast<char>(point);
      return;
    }
    int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    constexpr unsigned kHeads[] = {0, 0xC0, 0xE0, 0xF0};
    into += static_cast<char>(kHeads[more] | (point >> (6 * more)));
    while (more-- > 0) into += static_cast<char>(0x80 | ((point >> (6 * more)) & 0x3F));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Value read(std::string_view text) { return Reader(text).whole(); }

std::string quoted(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string found = "\"";
  for (const char one : text) {
    const auto code = static_cast<unsigned char>(one);
    if (one == '"' || one == '\\') {
      found += '\\';
      found += one;
    } else if (code < 0x20) {
      found += "\\u00";
      found += kHex[code >> 4];
      found += kHex[code & 15];
    } else {
      found += one;
    }
  }
  return found + '"';
}

std::string written(float value) {
  if (!std::isfinite(value)) return "null";
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  return {digits, end};
}

}  // namespace json
