#include "follower.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <regex>
#include <set>

#include <ATen/Parallel.h>
#include <caffe2/serialize/crc_alt.h>

#include "sha256.hpp"

namespace {

constexpr std::int64_t kBlockBytes = 16 << 20;
constexpr double kLongestWait = 60;

// Rows of a part of which a version changes some, from `place` on, `width` bytes each.
struct Change {
  char* place = nullptr;
  std::int64_t stride = 0;
  std::size_t width = 0;
  std::vector<std::int64_t> rows;
  std::vector<char> values;

  void apply() const {
    const char* from = values.data();
    for (const std::int64_t row : rows) {
      std::memcpy(place + row * stride, from, width);
      from += width;
    }
  }
};

[[noreturn]] void fail(const std::string& fault) { throw std::runtime_error(fault); }

std::int64_t whole(const json::Value& value) { return value.get<std::int64_t>(); }

const json::Object& member(const json::Object& object, const std::string& name) {
  return object.at(name).get<json::Object>();
}

const json::Array& parts(const json::Object& tensor) { return tensor.at("parts").get<json::Array>(); }

Rect rect_of(const json::Array& part) { return {whole(part.at(0)), whole(part.at(1)), whole(part.at(2)), whole(part.at(3))}; }

// The attribute of a program at a path with dots.
torch::IValue attribute(torch::IValue value, std::istringstream path) {
  for (std::string name; std::getline(path, name, '.');) value = value.toObjectRef().getAttr(name);
  return value;
}

// The path of a regular file; a pipe would be waited for.
const std::string& regular(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) fail(path + " is missing, or no regular file");
  return path;
}

json::Object read_manifest(const std::string& path) {
  std::ifstream file(regular(path), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string body = text.substr(0, text.rfind(",\n\"sha256\": "));
  if (text != body + ",\n\"sha256\": \"" + sha256(body) + "\"}\n") fail(path + ": its checksum is not that of its text");
  json::Object manifest = json::read(body + "}").get<json::Object>();
  const std::int64_t format = whole(manifest.at("format"));
  if (format != 2 && format != 3) fail(path + " has format " + std::to_string(format) + ", and this program reads 2 and 3");
  return manifest;
}

// A data file, every byte of which is verified when it is opened.
class DataFile {
 public:
  DataFile(const std::string& path, const json::Object& note) : path_(path), file_(regular(path), std::ios::binary | std::ios::ate) {
    const std::int64_t size = whole(note.at("size"));
    if (!file_ || file_.tellg() != size) fail(path + " cannot be read, or has another size than was written");
    const json::Array& checksums = note.at("checksums").get<json::Array>();
    if (static_cast<std::int64_t>(checksums.size()) != (size + kBlockBytes - 1) / kBlockBytes) {
      fail(path + " has " + std::to_string(checksums.size()) + " checksums for " + std::to_string(size) + " bytes");
    }
    std::vector<char> block;
    std::int64_t start = 0;
    for (const json::Value& checksum : checksums) {
      block.resize(static_cast<std::size_t>(std::min(size - start, kBlockBytes)));
      read(start, static_cast<std::int64_t>(block.size()), block.data());
      if (crc32_fast(block.data(), block.size()) != whole(checksum)) fail(path + " is damaged: it is not what was written");
      start += kBlockBytes;
    }
  }

  void read(std::int64_t start, std::int64_t count, void* into) {
    if (!file_.seekg(start).read(static_cast<char*>(into), count)) fail(path_ + " cannot be read");
  }

 private:
  std::string path_;
  std::ifstream file_;
};

// Reads what a version changes of a part that the program has. If the program has an earlier state of it, these are the rows of the
// deltas since. Else, say of a new base, they are those of the base that differ from the program's, and of all of its deltas.
//
// `states` are the base and the deltas of the published rectangle `saved`: file, first byte, and of a delta the byte of the rows'
// numbers and how many there are. The program has the first `known` of them.
Change changed_rows(const Target& target, const Rect& saved, const std::vector<json::Array>& states, std::size_t known,
                    const std::function<DataFile&(const json::Value&)>& file) {
  const std::int64_t top = std::max(saved[0], target.rect[0]), bottom = std::min(saved[1], target.rect[1]);
  const std::int64_t left = std::max(saved[2], target.rect[2]), right = std::min(saved[3], target.rect[3]);
  if (top >= bottom || left >= right) return {};
  Change change{target.rows + (left - target.rect[2]) * target.itemsize, target.stride,
                static_cast<std::size_t>((right - left) * target.itemsize), {}, {}};
  const std::int64_t row_bytes = (saved[3] - saved[2]) * target.itemsize;
  const std::int64_t most = std::max<std::int64_t>(1, kBlockBytes / row_bytes);
  for (std::size_t at = known; at < states.size(); ++at) {
    const json::Array& state = states[at];
    DataFile& from = file(state[0]);
    const std::int64_t height = saved[1] - saved[0], count = at == 0 ? height : whole(state.at(3));
    if (count < 0 || count > height) fail("in a part of " + std::to_string(height) + " rows, as many rows as that cannot have changed");
    for (std::int64_t first = 0; first < count; first += most) {
      const std::int64_t length = std::min(most, count - first);
      std::vector<std::int64_t> numbers(static_cast<std::size_t>(length));
      std::iota(numbers.begin(), numbers.end(), first);
      if (at > 0) from.read(whole(state.at(2)) + 8 * first, 8 * length, numbers.data());
      std::vector<char> block(static_cast<std::size_t>(length * row_bytes));
      from.read(whole(state[1]) + first * row_bytes, length * row_bytes, block.data());
      const char* values = block.data() + (left - saved[2]) * target.itemsize;
      for (std::size_t number = 0; number < numbers.size(); ++number, values += row_bytes) {
        if (numbers[number] < 0 || numbers[number] >= height) fail("a row that has changed is outside of its part");
        const std::int64_t row = saved[0] + numbers[number];
        if (row < top || row >= bottom) continue;
        const char* present = change.place + (row - target.rect[0]) * change.stride;
        if (at == 0 && std::memcmp(present, values, change.width) == 0) continue;
        change.rows.push_back(row - target.rect[0]);
        change.values.insert(change.values.end(), values, values + change.width);
      }
    }
  }
  return change;
}

}  // namespace

Follower::Follower(torch::jit::Module program, const json::Object& notes, const Follow& follow)
    : program_(std::move(program)), notes_(notes), follow_(follow) {
  if (notes.count("published") == 0 || member(notes, "published").empty()) {
    fail("this model cannot follow " + follow.folder + ": save one that shardrec.serve.quantize returned, on one rank");
  }
  for (const auto& [name, note] : member(notes, "published")) {
    for (const json::Value& entry : parts(note.get<json::Object>())) {
      const auto& part = entry.get<json::Array>();
      const std::string& path = part.at(4).get<std::string>();
      Target target{rect_of(part), whole(member(member(notes, "published"), name).at("itemsize"))};
      if (part.size() == 6) {
        auto& records = records_[path];
        const auto number = static_cast<std::size_t>(whole(part[5]));
        records.resize(std::max(records.size(), number + 1));
        records[number] = torch::zeros({target.rect[1] - target.rect[0], 2}, torch::kLong);
        target.rows = static_cast<char*>(records[number].data_ptr());
      } else {
        const at::Tensor memory = attribute(program_._ivalue(), std::istringstream(path)).toTensor();
        target.rows = static_cast<char*>(memory.data_ptr()) + whole(part[5]);
        target.stride = whole(part.at(6));
      }
      targets_[name].push_back(target);
    }
  }
  poll();
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

std::shared_lock<std::shared_mutex> Follower::reading() {
  const std::lock_guard turn(turnstile_);
  return std::shared_lock(lock_);
}

std::string Follower::state() const {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::string age = version_ == 0 ? "null" : std::to_string(std::max(0.0, now - published_));
  return ",\"version\":" + std::to_string(version_) + ",\"age\":" + age + ",\"faults\":" + std::to_string(faults_);
}

void Follower::run(const std::stop_token& stop) {
  at::set_num_threads(1);  // the others are for requests
  std::unique_lock asleep(sleep_);
  for (double wait_s = follow_.interval; !stop.stop_requested();) {
    wake_.wait_for(asleep, stop, std::chrono::duration<double>(wait_s), [] { return false; });
    if (stop.stop_requested()) return;
    poll();
    wait_s = fault_.empty() ? follow_.interval : std::min(kLongestWait, 2 * wait_s);
  }
}

// Applies the newest good version that the model does not have; a fault of a newer one is counted, and said once.
void Follower::poll() {
  std::string fault;
  try {
    std::map<std::int64_t, std::string, std::greater<>> names;
    for (const auto& entry : std::filesystem::directory_iterator(follow_.folder)) {
      const std::string name = entry.path().filename();
      static const std::regex kVersion("version-(\\d{12})\\.json");
      if (std::smatch match; std::regex_match(name, match, kVersion)) names.emplace(std::stoll(match[1]), name);
    }
    if (!names.empty() && names.begin()->first < version_) fault = follow_.folder + " begins anew: start this program again";
    for (auto at = names.begin(); at != names.end() && at->first > version_; ++at) {
      try {
        take(follow_.folder + "/" + at->second, at->first);
        break;
      } catch (const std::exception& error) {
        if (fault.empty()) fault = "version " + std::to_string(at->first) + " is not applied: " + error.what();
      }
    }
  } catch (const std::filesystem::filesystem_error& error) {
    if (error.code() != std::errc::no_such_file_or_directory) fault = follow_.folder + " cannot be listed: " + error.what();
  } catch (const std::exception& error) {  // which would end the program
    fault = error.what();
  }
  faults_ += !fault.empty();
  if (!fault.empty() && fault != fault_) {
    std::cerr << "serve: " << fault << "; the model keeps version " << version_ << std::endl;
  }
  fault_ = fault;
}

void Follower::check_fits(const json::Object& manifest) const {
  const json::Object &served = member(notes_, "published"), &published = member(manifest, "tensors");
  const auto refuse = [](const std::string& what) { fail("another model than this one is published: " + what); };
  if (member(manifest, "extra").at("formats") != notes_.at("formats")) refuse("its tables have other formats");
  for (const auto& [name, unused] : published.size() > served.size() ? published : served) {
    if (published.count(name) == 0 || served.count(name) == 0) refuse(name + " is not in both");
    const json::Object &theirs = member(published, name), &here = member(served, name);
    if (theirs.at("dtype") != here.at("dtype") || theirs.at("shape") != here.at("shape")) refuse(name + " is another tensor");
    std::int64_t rows = 0, columns = 0, covered = 0;
    for (const json::Value& part : parts(here)) {
      const Rect rect = rect_of(part.get<json::Array>());
      rows = std::max(rows, rect[1]), columns = std::max(columns, rect[3]);
    }
    for (const json::Value& part : parts(theirs)) {
      const Rect rect = rect_of(part.get<json::Array>());
      const bool has_rows = 0 <= rect[0] && rect[0] <= rect[1] && rect[1] <= rows;
      const bool has_columns = 0 <= rect[2] && rect[2] <= rect[3] && rect[3] <= columns;
      if (!has_rows || !has_columns) fail("a part of " + name + " is outside of it");
      covered += (rect[1] - rect[0]) * (rect[3] - rect[2]);
    }
    if (covered != rows * columns) fail("the parts of " + name + " are not all of it");
    const auto cut = [](const json::Object& tensor) {
      std::set<Rect> rects;
      for (const json::Value& part : parts(tensor)) rects.insert(rect_of(part.get<json::Array>()));
      return rects;
    };
    if (here.at("same_cut").get<bool>() && cut(theirs) != cut(here)) refuse(name + " is cut in another way");
  }
}

// All that may fail comes before the first byte of the model changes.
void Follower::take(const std::string& path, std::int64_t version) {
  const json::Object manifest = read_manifest(path);
  const json::Object& extra = member(manifest, "extra");
  if (whole(extra.at("version")) != version) fail(path + " is the manifest of another version");
  check_fits(manifest);
  const auto published = extra.at("published").get<double>();
  json::Array files = manifest.at("files").get<json::Array>();
  if (manifest.count("linked") != 0) {
    for (const json::Value& note : manifest.at("linked").get<json::Array>()) files.push_back(note);
  }
  const auto note_of = [&](const json::Value& number) -> const json::Object& {
    return files.at(static_cast<std::size_t>(whole(number))).get<json::Object>();
  };
  const auto path_of = [&](const json::Value& number) {
    return follow_.folder + "/" + manifest.at("data").get<std::string>() + "/" + note_of(number).at("name").get<std::string>();
  };
  std::map<std::int64_t, DataFile> opened;
  const auto file = [&](const json::Value& number) -> DataFile& {
    return opened.try_emplace(whole(number), path_of(number), note_of(number)).first->second;
  };
  std::vector<Change> changes, of_ids;
  std::map<std::pair<std::string, Rect>, std::vector<std::string>> contents;
  for (const auto& [name, tensor] : member(manifest, "tensors")) {
    for (const json::Value& entry : parts(tensor.get<json::Object>())) {
      const auto& part = entry.get<json::Array>();
      const std::pair key(name, rect_of(part));
      std::vector<json::Array> states{{part.at(4), part.at(5)}};
      for (std::size_t at = 6; at < part.size(); ++at) states.push_back(part[at].get<json::Array>());
      auto& content = contents[key];
      for (const auto& state : states) content.push_back(path_of(state.at(0)) + ":" + std::to_string(whole(state.at(1))));
      const auto& known = applied_[key];
      const bool is_later = known.size() <= content.size() && std::equal(known.begin(), known.end(), content.begin());
      for (const Target& target : targets_.at(name)) {
        Change change = changed_rows(target, key.second, states, is_later ? known.size() : 0, file);
        (name.rfind("ids.", 0) == 0 ? of_ids : changes).push_back(std::move(change));
      }
    }
  }
  for (const Change& change : of_ids) change.apply();  // to records, which no request reads
  std::vector<std::pair<torch::jit::Module, torch::IValue>> maps;
  for (const auto& [name, records] : records_) {
    torch::jit::Module module = attribute(program_._ivalue(), std::istringstream(name)).toModule();
    maps.emplace_back(module, module.run_method("prepared", records));
  }
  {
    const std::lock_guard turn(turnstile_);
    const std::unique_lock writing(lock_);
    for (const Change& change : changes) change.apply();
    for (auto& [module, prepared] : maps) module.run_method("replace", prepared);
    version_ = version;
    published_ = published;
  }
  applied_ = std::move(contents);
}
