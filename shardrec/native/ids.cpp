// map_ids: raw 64-bit ids to the rows of a shard, without collision.
//
// A map is two tensors. "records" (R, 3) int64 has for each row
//     id, uses, step of the last use
// and uses are 0 of a free row, and negative of one that is not to be given to an id. "buckets" is a hash table with
// open addressing and linear probing, a power of two long and at most half full. A bucket is int32: the number of the row
// plus 1, and above it, in the bits that are left, a tag of the id's hash, so that few records of other ids are read; or
// 0. The home bucket is the hash's lowest bits, its row block the highest ones, and the tag those from the 32nd on.
//
// What a step does, which docs/dynamic_ids.md states, is held to a dict in Python by tests/ids/test_id_map.py.

#include "hashing.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace shardrec {
namespace {

enum Policy : int64_t { kNever, kLfu, kLru, kTtl, kScore };

// Of the state of a map: the first row that may be free (of the map, of the candidates), then what is counted.
enum State : int64_t { kHint, kCandidateHint, kEvictedLast, kLookups, kHits, kInserts, kEvictions, kFallbacks, kNoRoom,
                       kCollisions, kState };

struct Record {
  int64_t id;
  int64_t uses;
  int64_t last;
};

// What is counted may have been written from outside, and then wraps.
void add(int64_t& to, int64_t number) { to = int64_t(uint64_t(to) + uint64_t(number)); }

void check_numbers(const at::Tensor& one, at::ScalarType dtype, const char* name) {
  TORCH_CHECK(
      one.device().is_cpu() && one.is_contiguous() && one.scalar_type() == dtype, "shardrec: ", name,
      " is contiguous, on the CPU and ", toString(dtype));
}

class Map {
 public:
  Map(const at::Tensor& records, const at::Tensor& buckets, int64_t* hint) : hint_(hint) {
    check_numbers(records, at::kLong, "records");
    check_numbers(buckets, at::kInt, "buckets");
    TORCH_CHECK(records.dim() == 2 && records.size(1) == 3, "shardrec: records are (rows, 3)");
    size_ = records.size(0);
    const int64_t places = buckets.numel();
    TORCH_CHECK(
        places > 0 && (places & (places - 1)) == 0 && places / 2 >= size_ &&
            size_ < std::numeric_limits<int32_t>::max(),
        "shardrec: ", places, " buckets for ", size_, " rows; they are a power of two, at least twice the rows");
    records_ = reinterpret_cast<Record*>(records.data_ptr<int64_t>());
    buckets_ = reinterpret_cast<uint32_t*>(buckets.data_ptr<int32_t>());
    mask_ = uint64_t(places - 1);
    row_bits_ = std::bit_width(uint32_t(size_));
  }

  int64_t size() const { return size_; }
  Record& at(int64_t row) { return records_[row]; }
  void prefetch_bucket(uint64_t hash) const { __builtin_prefetch(buckets_ + (hash & mask_)); }
  void prefetch_record(int64_t row) const {
    // As a number, for -1 has no record; nothing is read there.
    const uintptr_t record = reinterpret_cast<uintptr_t>(records_) + uint64_t(row) * sizeof(Record);
    __builtin_prefetch(reinterpret_cast<const void*>(record), 1);
    // A quarter of the records lie in two cache lines.
    __builtin_prefetch(reinterpret_cast<const void*>(record + offsetof(Record, last)), 1);
  }

  // Note in `places` each bucket that changes from now on.
  void log_into(std::vector<int64_t>* places) { log_ = places; }

  // The first row whose id has this hash's tag, or -1; from the bucket `place` on, which becomes the row's.
  int64_t probe(uint64_t hash, uint64_t& place) const {
    for (uint64_t left = mask_ + 1; left > 0; --left) {
      const uint32_t bucket = buckets_[place];
      const uint32_t row = (bucket ^ tag_of(hash)) - 1;  // if the tag is this one
      if (row < uint32_t(size_)) return row;
      if (bucket == 0) return -1;
      TORCH_CHECK((row + 1) >> row_bits_ != 0, "shardrec: a bucket has row ", int32_t(row), " of ", size_);
      place = (place + 1) & mask_;
    }
    TORCH_CHECK(false, "shardrec: the buckets of an id map are full");
  }

  // The same from the home bucket on, which most ids are in.
  int64_t probe(uint64_t hash) const {
    uint64_t place = hash & mask_;
    const uint32_t row = (buckets_[place] ^ tag_of(hash)) - 1;
    return row < uint32_t(size_) ? row : probe(hash, place);
  }

  // The row of an id, or -1.
  int64_t find(int64_t id, uint64_t hash) const {
    uint64_t place = hash & mask_;
    for (uint64_t left = mask_ + 1; left > 0; --left) {
      const int64_t row = probe(hash, place);
      if (row < 0 || records_[row].id == id) return row;
      place = (place + 1) & mask_;
    }
    return -1;
  }

  // The row of an id whose first probe gave `row`.
  int64_t find_from(int64_t row, int64_t id, uint64_t hash) const {
    return row < 0 || records_[row].id == id ? row : find(id, hash);
  }

  void enter(int64_t row) {
    const uint64_t hash = mixed(records_[row].id);
    uint64_t place = hash & mask_;
    for (uint64_t left = mask_; buckets_[place] != 0; place = (place + 1) & mask_, --left) {
      TORCH_CHECK(left > 0, "shardrec: the buckets of an id map are full");
    }
    set_bucket(place, tag_of(hash) | uint32_t(row + 1));
  }

  // The free row of the least number, or -1.
  int64_t free_row() {
    int64_t row = std::max<int64_t>(*hint_, 0);
    while (row < size_ && records_[row].uses != 0) ++row;
    *hint_ = row;
    return row < size_ ? row : -1;
  }

  void insert(int64_t row, const Record& record) {
    records_[row] = record;
    enter(row);
  }

  void erase(int64_t row) {
    uint64_t place = mixed(records_[row].id) & mask_;
    for (uint64_t left = mask_; row_in(buckets_[place]) != row; place = (place + 1) & mask_, --left) {
      TORCH_CHECK(buckets_[place] != 0 && left > 0, "shardrec: a row of an id map has no bucket");
    }
    // Those behind it that would not be found any more move up.
    for (uint64_t next = place, left = mask_; left > 0; --left) {
      next = (next + 1) & mask_;
      const uint32_t other = buckets_[next];
      if (other == 0) break;
      const uint64_t home = mixed(records_[row_of(other)].id) & mask_;
      if (((next - home) & mask_) >= ((next - place) & mask_)) {
        set_bucket(place, other);
        place = next;
      }
    }
    set_bucket(place, 0);
    records_[row] = {0, 0, 0};
    *hint_ = std::min(*hint_, row);
  }

  // Number of free rows, counted up to `most`.
  int64_t free_rows(int64_t most) const {
    int64_t found = 0;
    for (int64_t row = std::max<int64_t>(*hint_, 0); row < size_ && found < most; ++row) {
      found += records_[row].uses == 0;
    }
    return found;
  }

  // Free rows so that `wanted` are free, or as many as may be. Those last used in step `protect` or later stay.
  std::vector<int64_t> make_room(int64_t wanted, Policy policy, int64_t ttl, int64_t step, int64_t protect) {
    const int64_t lacking = wanted - free_rows(wanted);
    if (lacking <= 0 || policy == kNever) return {};
    struct Victim {
      double worth;
      int64_t last;
      int64_t row;
    };
    std::vector<Victim> found;
    int64_t capacity = 0;
    for (int64_t row = 0; row < size_; ++row) {
      const Record& one = records_[row];
      capacity += one.uses >= 0;
      const double age = double(step) - double(one.last);
      if (one.uses <= 0 || one.last >= protect || (policy == kTtl && age <= double(ttl))) continue;
      double worth = 0;
      if (policy == kLfu) worth = double(one.uses);
      if (policy == kScore) worth = double(one.uses) / age;
      found.push_back({worth, one.last, row});
    }
    const int64_t count = std::min<int64_t>(std::max(lacking, capacity / 64), int64_t(found.size()));
    const auto less = [](const Victim& a, const Victim& b) {
      return std::tie(a.worth, a.last, a.row) < std::tie(b.worth, b.last, b.row);
    };
    if (count < int64_t(found.size())) std::nth_element(found.begin(), found.begin() + count, found.end(), less);
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < count; ++i) rows.push_back(found[i].row);
    std::sort(rows.begin(), rows.end());
    return rows;
  }

 private:
  void set_bucket(uint64_t place, uint32_t bucket) {
    buckets_[place] = bucket;
    if (log_ != nullptr) log_->push_back(int64_t(place));
  }

  uint32_t tag_of(uint64_t hash) const { return uint32_t(hash >> 32) << row_bits_; }

  // -1 of an empty bucket.
  int64_t row_in(uint32_t bucket) const { return int64_t(bucket & ((uint32_t(1) << row_bits_) - 1)) - 1; }

  int64_t row_of(uint32_t bucket) const {
    const int64_t row = row_in(bucket);
    TORCH_CHECK(row >= 0 && row < size_, "shardrec: a bucket has row ", row, " of ", size_);
    return row;
  }

  Record* records_;
  uint32_t* buckets_;
  int64_t size_;
  uint64_t mask_;
  int row_bits_;
  int64_t* hint_;
  std::vector<int64_t>* log_ = nullptr;
};

// Distinct ids in the order in which they first come; transient, of one step.
class FirstSeen {
 public:
  explicit FirstSeen(int64_t most) {
    uint64_t places = 16;
    while (places < uint64_t(most) * 2) places *= 2;
    numbers_.assign(places, -1);
  }

  int64_t number_of(int64_t id) {
    const uint64_t mask = numbers_.size() - 1;
    for (uint64_t place = mixed(id) & mask;; place = (place + 1) & mask) {
      if (numbers_[place] < 0) {
        numbers_[place] = int32_t(ids.size());
        ids.push_back(id);
      }
      if (ids[numbers_[place]] == id) return numbers_[place];
    }
  }

  std::vector<int64_t> ids;

 private:
  std::vector<int32_t> numbers_;
};

// Calls hit(place, row) for each id; a block of them at a time, as one waits for memory while the others do.
template <class Hit>
void find_all(const Map& given, const int64_t* ids, int64_t count, const Hit& hit) {
  constexpr int64_t kBlock = 128;
  const Map map = given;  // a copy, so that it stays in registers
  uint64_t hash[kBlock];
  int32_t rows[kBlock];
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = std::min(kBlock, count - start);
    const int64_t* const id = ids + start;
    for (int64_t i = 0; i < length; ++i) {
      hash[i] = mixed(id[i]);
      map.prefetch_bucket(hash[i]);
    }
    for (int64_t i = 0; i < length; ++i) {
      const int64_t row = map.probe(hash[i]);
      map.prefetch_record(row);
      rows[i] = int32_t(row);
    }
    for (int64_t i = 0; i < length; ++i) hit(start + i, map.find_from(rows[i], id[i], hash[i]));
  }
}

// Distinct ids without a row, with the uses of each and its row among those that wait, or -1.
struct Fresh {
  std::vector<int64_t> ids;
  std::vector<int64_t> uses;
  std::vector<int64_t> candidate;
  int64_t due = 0;  // ids that are to get a row
};

// Changes nothing.
Fresh fresh_of(std::vector<int64_t> ids, Map& waiting, int64_t admit_after) {
  Fresh fresh{std::move(ids), {}, {}, 0};
  for (const int64_t id : fresh.ids) {
    const int64_t row = admit_after > 1 ? waiting.find(id, mixed(id)) : -1;
    int64_t uses = 1;
    if (row >= 0) add(uses, waiting.at(row).uses);
    fresh.candidate.push_back(row);
    fresh.uses.push_back(uses);
    fresh.due += uses >= admit_after;
  }
  return fresh;
}

int32_t fallback_of(int64_t id, int64_t rows) {
  return rows == 0 ? int32_t(-1) : int32_t(uint32_t(mixed(id)) % uint64_t(rows));
}

// Let the ids wait, or give them the rows that are free once `evicted` are. Returns the row of each, or its fallback.
std::vector<int32_t> admit(
    Map& map, Map& waiting, int64_t* counts, const Fresh& fresh, const std::vector<int64_t>& evicted,
    int64_t fallback_rows, int64_t admit_after, int64_t step) {
  const size_t count = fresh.ids.size();
  if (admit_after > 1) {
    int64_t unknown = 0;
    for (size_t i = 0; i < count; ++i) {
      unknown += fresh.candidate[i] < 0;
      if (fresh.candidate[i] < 0) continue;
      Record& one = waiting.at(fresh.candidate[i]);
      one.uses = fresh.uses[i];
      one.last = step;
    }
    for (const int64_t row : waiting.make_room(unknown, kLru, 0, step, step)) waiting.erase(row);
    for (size_t i = 0; i < count; ++i) {
      const int64_t row = fresh.candidate[i] < 0 ? waiting.free_row() : -1;
      if (row >= 0) waiting.insert(row, {fresh.ids[i], 1, step});
    }
  }
  for (const int64_t row : evicted) {
    counts[kEvictedLast] = std::max(counts[kEvictedLast], map.at(row).last);
    map.erase(row);
  }
  std::vector<int32_t> row_of(count);
  std::vector<bool> taken(fallback_rows);
  for (size_t i = 0; i < count; ++i) {
    const bool due = fresh.uses[i] >= admit_after;
    const int64_t row = due ? map.free_row() : -1;
    if (row < 0) {
      row_of[i] = fallback_of(fresh.ids[i], fallback_rows);
      add(counts[kNoRoom], due);
      if (fallback_rows == 0) continue;
      add(counts[kCollisions], taken[row_of[i]]);
      taken[row_of[i]] = true;
      continue;
    }
    map.insert(row, {fresh.ids[i], fresh.uses[i], step});
    if (fresh.candidate[i] >= 0) waiting.erase(fresh.candidate[i]);
    row_of[i] = int32_t(row);
    add(counts[kInserts], 1);
  }
  add(counts[kEvictions], int64_t(evicted.size()));
  return row_of;
}

int64_t* counts_of(at::Tensor& state, const at::Tensor& records, int64_t policy, int64_t fallback_rows) {
  check_numbers(state, at::kLong, "state");
  TORCH_CHECK(state.numel() == kState, "shardrec: state has ", int64_t(kState), " numbers");
  TORCH_CHECK(policy >= kNever && policy <= kScore, "shardrec: no policy has number ", policy);
  TORCH_CHECK(
      fallback_rows >= 0 && fallback_rows <= records.size(0), "shardrec: ", fallback_rows, " rows of the fallback");
  return state.data_ptr<int64_t>();
}

// Returns the rows that were taken from their ids, and how many places of `out` are -1.
std::tuple<at::Tensor, int64_t> map_ids(
    const at::Tensor& ids, at::Tensor& out, at::Tensor& records, at::Tensor& buckets, at::Tensor& candidates,
    at::Tensor& candidate_buckets, at::Tensor& state, int64_t fallback_rows, int64_t admit_after, int64_t policy,
    int64_t ttl, int64_t step, int64_t protect, bool assign_new_ids) {
  check_numbers(ids, at::kLong, "ids");
  check_numbers(out, at::kInt, "out");
  TORCH_CHECK(ids.dim() == 1 && out.numel() == ids.numel(), "shardrec: ids and out are (N,)");
  TORCH_CHECK(ids.numel() < std::numeric_limits<int32_t>::max(), "shardrec: ", ids.numel(), " ids are too many");
  int64_t* const counts = counts_of(state, records, policy, fallback_rows);
  Map map(records, buckets, counts + kHint);
  Map waiting(candidates, candidate_buckets, counts + kCandidateHint);
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  int32_t* const to = out.data_ptr<int32_t>();
  const int64_t count = ids.numel();
  if (!assign_new_ids) {
    int64_t lacking = 0;
    find_all(map, id, count, [&](int64_t i, int64_t row) {
      to[i] = row < 0 ? fallback_of(id[i], fallback_rows) : int32_t(row);
      lacking += to[i] < 0;
    });
    return {at::empty({0}, ids.options()), lacking};
  }
  std::vector<int64_t> missing;
  find_all(map, id, count, [&](int64_t i, int64_t row) {
    to[i] = int32_t(row);
    if (row < 0) {
      missing.push_back(i);
      return;
    }
    Record& one = map.at(row);
    add(one.uses, one.last != step);
    one.last = step;
  });
  FirstSeen seen(int64_t(missing.size()));
  std::vector<int32_t> number;
  for (const int64_t i : missing) number.push_back(int32_t(seen.number_of(id[i])));
  const Fresh fresh = fresh_of(std::move(seen.ids), waiting, admit_after);
  const auto evicted = map.make_room(fresh.due, Policy(policy), ttl, step, protect);
  const auto row_of = admit(map, waiting, counts, fresh, evicted, fallback_rows, admit_after, step);
  int64_t lacking = 0;
  for (size_t i = 0; i < missing.size(); ++i) {
    const int32_t row = row_of[number[i]];
    to[missing[i]] = row;
    lacking += row < 0;
    add(counts[kFallbacks], row < fallback_rows);
  }
  add(counts[kLookups], count);
  add(counts[kHits], count - int64_t(missing.size()));
  return {at::tensor(evicted, ids.options()), lacking};
}

// The part of map_ids that is for distinct ids without a row, in the order in which they first came; hits, lookups and
// fallbacks are counted by the caller. Returns the row of each id, or its fallback; the buckets that changed; and 0. If
// rows lack and `evicted` (E,) is not given, it changes nothing and returns how many lack.
std::tuple<at::Tensor, at::Tensor, int64_t> admit_ids(
    const at::Tensor& ids, at::Tensor& records, at::Tensor& buckets, at::Tensor& candidates,
    at::Tensor& candidate_buckets, at::Tensor& state, int64_t fallback_rows, int64_t admit_after, int64_t policy,
    int64_t step, const std::optional<at::Tensor>& evicted) {
  check_numbers(ids, at::kLong, "ids");
  int64_t* const counts = counts_of(state, records, policy, fallback_rows);
  Map map(records, buckets, counts + kHint);
  Map waiting(candidates, candidate_buckets, counts + kCandidateHint);
  const auto values = [](const at::Tensor& one) {
    return std::vector<int64_t>(one.const_data_ptr<int64_t>(), one.const_data_ptr<int64_t>() + one.numel());
  };
  const Fresh fresh = fresh_of(values(ids), waiting, admit_after);
  std::vector<int64_t> taken;
  if (evicted) {
    check_numbers(*evicted, at::kLong, "evicted");
    taken = values(*evicted);
    for (const int64_t row : taken) {
      TORCH_CHECK(row >= 0 && row < map.size() && map.at(row).uses > 0, "shardrec: row ", row, " has no id to evict");
    }
  } else if (policy != kNever) {
    const int64_t lacking = fresh.due - map.free_rows(fresh.due);
    if (lacking > 0) return {at::empty({0}, at::kInt), at::empty({0}, at::kLong), lacking};
  }
  std::vector<int64_t> places;
  map.log_into(&places);
  const auto row_of = admit(map, waiting, counts, fresh, taken, fallback_rows, admit_after, step);
  return {at::tensor(row_of, at::kInt), at::tensor(places, at::kLong), 0};
}

void index_ids(const at::Tensor& records, at::Tensor& buckets) {
  int64_t hint = 0;
  Map map(records, buckets, &hint);
  buckets.zero_();
  for (int64_t row = 0; row < map.size(); ++row) {
    if (map.at(row).uses <= 0) continue;
    const int64_t id = map.at(row).id;
    TORCH_CHECK(map.find(id, mixed(id)) < 0, "shardrec: id ", id, " has several rows");
    map.enter(row);
  }
}

}  // namespace
}  // namespace shardrec

TORCH_LIBRARY_FRAGMENT(shardrec, library) {
  library.def(
      "map_ids(Tensor ids, Tensor(a!) out, Tensor(b!) records, Tensor(c!) buckets, Tensor(d!) candidates, "
      "Tensor(e!) candidate_buckets, Tensor(f!) state, int fallback_rows, int admit_after, int policy, int ttl, "
      "int step, int protect, bool assign_new_ids) -> (Tensor, int)");
  library.def(
      "admit_ids(Tensor ids, Tensor(a!) records, Tensor(b!) buckets, Tensor(c!) candidates, "
      "Tensor(d!) candidate_buckets, Tensor(e!) state, int fallback_rows, int admit_after, int policy, int step, "
      "Tensor? evicted) -> (Tensor, Tensor, int)");
  library.def("index_ids(Tensor records, Tensor(a!) buckets) -> ()");
}

TORCH_LIBRARY_IMPL(shardrec, CPU, library) {
  library.impl("map_ids", shardrec::map_ids);
  library.impl("admit_ids", shardrec::admit_ids);
  library.impl("index_ids", shardrec::index_ids);
}
