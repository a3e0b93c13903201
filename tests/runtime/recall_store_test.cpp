// Tests the store of evicted entries alone: what was added is fetched bit for bit, in memory and in a file.
#include "runtime/kv/recall_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "backends/cpu/host/cpu_host.h"
#include "tests/support/random.h"
#include "tests/support/sessions.h"

#ifndef _WIN32
#include <unistd.h>
#endif

namespace thimble::test {
namespace {

constexpr uint32_t kDim = 8, kRowBytes = kDim * 2;
// The second run is one whose entries are not stored.
RecallStore::Shape shape(uint32_t pages, bool in_file) {
  return {.runs = {{.head_dim = kDim}, {}, {.head_dim = 2 * kDim}}, .pages = pages, .in_file = in_file};
}

Host& host() {
  static CpuHost host(2);
  return host;
}

// Entries of a run, with rows that differ.
struct Batch {
  std::vector<int32_t> positions;
  std::vector<float> scores, keys;
  std::vector<std::byte> k, v;

  void add(int32_t position, float score) {
    positions.push_back(position);
    scores.push_back(score);
    for (uint32_t c = 0; c < kDim; ++c) keys.push_back(key(position, c));
    for (uint32_t c = 0; c < kRowBytes; ++c) {
      k.push_back(static_cast<std::byte>(position * 3 + static_cast<int32_t>(c)));
      v.push_back(static_cast<std::byte>(position * 5 + static_cast<int32_t>(c)));
    }
  }
  static float key(int32_t position, uint32_t c) {
    return std::sin(static_cast<float>(position) * static_cast<float>(c + 1));
  }
  RecallStore::Entries entries() const { return {positions, scores.data(), keys.data(), k.data(), v.data()}; }
};

// All entries of a run: position, and its key's and value's bytes.
using Rows = std::map<int32_t, std::vector<std::byte>>;
Rows rows_of(const Batch& batch) {
  Rows all;
  for (size_t i = 0; i < batch.positions.size(); ++i) {
    std::vector<std::byte>& row = all[batch.positions[i]];
    row.assign(&batch.k[i * kRowBytes], &batch.k[i * kRowBytes] + kRowBytes);
    row.insert(row.end(), &batch.v[i * kRowBytes], &batch.v[i * kRowBytes] + kRowBytes);
  }
  return all;
}
Result<Rows> rows_of(const RecallStore& store, size_t run) {
  Rows all;
  int32_t positions[kRecallPage];
  std::byte k[kRecallPage * kRowBytes], v[kRecallPage * kRowBytes];
  for (uint32_t i = 0; i < store.count(run); ++i) {
    THIMBLE_LET(n, store.fetch(run, i, positions, k, v));
    for (uint32_t e = 0; e < n; ++e) {
      std::vector<std::byte>& row = all[positions[e]];
      row.assign(k + e * kRowBytes, k + (e + 1) * kRowBytes);
      row.insert(row.end(), v + e * kRowBytes, v + (e + 1) * kRowBytes);
    }
  }
  return all;
}

std::vector<std::byte> bytes_of(const RecallStore& store) {
  std::vector<std::byte> saved;
  must(store.save([&](const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    saved.insert(saved.end(), from, from + bytes);
    return Status();
  }));
  return saved;
}

class RecallStores : public ::testing::TestWithParam<bool> {
 protected:
  RecallStore make(uint32_t pages) { return must(RecallStore::create(shape(pages, GetParam()))); }
};
INSTANTIATE_TEST_SUITE_P(In, RecallStores, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "File" : "Memory"; });

TEST_P(RecallStores, GiveBackWhatTheyGot) {
  RecallStore store = make(20);
  Batch even, odd, all;
  for (int32_t p = 5; p < 200; ++p) {
    (p % 2 ? odd : even).add(p, 0);
    all.add(p, 0);
  }
  must(store.add(0, odd.entries(), host()));
  must(store.add(1, odd.entries(), host()));  // not stored
  must(store.add(0, even.entries(), host()));
  EXPECT_EQ(must(rows_of(store, 0)), rows_of(all));
  EXPECT_EQ(store.entries(), 195u);
  EXPECT_EQ(store.count(0), 13u);
  EXPECT_EQ(store.count(1), 0u);
  store.clear();
  EXPECT_TRUE(store.empty());
  EXPECT_EQ(store.count(0), 0u);
}

// However many batches they come in, summaries are those of all keys of a page.
TEST_P(RecallStores, SummariseTheKeysOfAPage) {
  RecallStore store = make(20);
  Batch first, second;
  for (int32_t p = 32; p < 48; ++p) (p % 3 ? second : first).add(p, 0);
  must(store.add(0, first.entries(), host()));
  must(store.add(0, second.entries(), host()));
  for (uint32_t c = 0; c < kDim; ++c) {
    double mean = 0, squares = 0;
    for (int32_t p = 32; p < 48; ++p) mean += static_cast<double>(Batch::key(p, c)) / 16;
    for (int32_t p = 32; p < 48; ++p) squares += std::pow(static_cast<double>(Batch::key(p, c)) - mean, 2);
    // 16 updates, each with a few roundings of numbers up to 1, or up to 16.
    EXPECT_NEAR(store.means(0, 0)[c], mean, 16 * 3 * 0x1p-24);
    EXPECT_NEAR(store.squares(0, 0)[c], squares, 16 * 3 * 16 * 0x1p-24);
  }
}

TEST_P(RecallStores, DropThePageWithTheLowestScore) {
  RecallStore store = make(4);
  Batch batch;
  for (int32_t page = 0; page < 4; ++page) {
    batch.add(page * 16 + 3, page == 2 ? -5.0f : static_cast<float>(page));
    batch.add(page * 16 + 4, -9);  // the highest score counts
  }
  must(store.add(0, batch.entries(), host()));
  Batch more;
  more.add(64, 1);
  more.add(96, -7);  // lower than all others
  more.add(128, std::nanf(""));
  must(store.add(0, more.entries(), host()));
  std::vector<int32_t> pages;
  for (uint32_t i = 0; i < store.count(0); ++i) pages.push_back(store.page(0, i).number);
  EXPECT_EQ(pages, (std::vector<int32_t>{0, 1, 3, 4}));
  EXPECT_EQ(store.entries(), 7u);
}

// A full store drops the page with the lowest score, of equal ones the first, as a list of all pages says;
// and the threads change no byte.
TEST_P(RecallStores, DropTheSamePagesAsAListWithAnyThreads) {
  constexpr uint32_t kPages = 40;
  Random random{3};
  CpuHost one(1), five(5);
  RecallStore store = make(kPages), other = make(kPages);
  std::map<int32_t, float> pages;  // the score of each page
  std::vector<bool> evicted(2000);
  for (int32_t read = 250; read <= 2000; read += 250) {
    Batch batch;
    for (int32_t p = 0; p < read; ++p) {
      if (evicted[static_cast<size_t>(p)] || random.uniform(0, 1) < 0.5f) continue;
      evicted[static_cast<size_t>(p)] = true;
      batch.add(p, std::floor(random.uniform(0, 12)));
    }
    for (size_t i = 0, end; i < batch.positions.size(); i = end) {
      const int32_t number = batch.positions[i] / 16;
      float score = batch.scores[i];
      for (end = i + 1; end < batch.positions.size() && batch.positions[end] / 16 == number; ++end)
        score = std::max(score, batch.scores[end]);
      const auto by_score = [](const auto& a, const auto& b) { return a.second < b.second; };
      const auto lowest = std::min_element(pages.begin(), pages.end(), by_score);
      if (pages.count(number)) {
        pages[number] = std::max(pages[number], score);
      } else if (pages.size() < kPages || score >= lowest->second) {
        if (pages.size() == kPages) pages.erase(lowest);
        pages[number] = score;
      }
    }
    must(store.add(0, batch.entries(), one));
    must(other.add(0, batch.entries(), five));
    std::map<int32_t, float> got;
    for (uint32_t i = 0; i < store.count(0); ++i) got[store.page(0, i).number] = store.page(0, i).score;
    EXPECT_EQ(got, pages);
    EXPECT_EQ(bytes_of(store), bytes_of(other));
    uint64_t entries = 0;
    for (const auto& [position, row] : must(rows_of(store, 0))) entries += position >= 0;
    EXPECT_EQ(store.entries(), entries);
    if (read == 1000) {  // a copy continues in the same way
      other.clear();
      must(other.copy_from(store));
    }
  }
}

TEST_P(RecallStores, FitTheirBudget) {
  for (const uint64_t budget : {5000ull, 20000ull, 1000000ull}) {
    RecallStore::Shape s = shape(0, GetParam());
    s.pages = RecallStore::most_pages(s, budget);
    const auto size = [&] { return GetParam() ? RecallStore::file_bytes(s) : RecallStore::bytes(s); };
    EXPECT_LE(size(), budget);
    if (s.pages) {
      RecallStore store = must(RecallStore::create(s));
      Batch batch;
      for (int32_t p = 0; p < static_cast<int32_t>(s.pages) * 20; ++p) batch.add(p, static_cast<float>(p));
      must(store.add(0, batch.entries(), host()));
      EXPECT_EQ(store.count(0), s.pages);
      EXPECT_LE(store.file_end(), budget);
    }
    ++s.pages;
    EXPECT_GT(size(), budget);
  }
}

TEST_P(RecallStores, CopiesAndFilesHaveTheSame) {
  RecallStore store = make(9), copy = make(9), restored = make(9);
  Batch batch;
  Random random{3};
  for (int32_t p = 0; p < 300; ++p)
    if (random.uniform(0, 1) < 0.7f) batch.add(p, random.uniform(-1, 1));
  must(store.add(0, batch.entries(), host()));
  const uint32_t chosen[] = {1, 4};
  store.set_recalled(0, chosen);
  must(copy.copy_from(store));
  const std::vector<std::byte> saved = bytes_of(store);
  const std::vector<uint32_t> counts(store.counts().begin(), store.counts().end());
  EXPECT_EQ(saved.size(), store.saved_bytes(counts));
  const uint32_t recalled[] = {
      static_cast<uint32_t>(std::popcount(store.page(0, 1).held) + std::popcount(store.page(0, 4).held)), 0,
      0};
  EXPECT_EQ(restored.fault(counts, saved, 300, recalled), nullptr);
  EXPECT_NE(restored.fault(counts, saved, store.page(0, 8).number * 16u, recalled), nullptr);
  const uint32_t none[] = {0, 0, 0};
  EXPECT_NE(restored.fault(counts, saved, 300, none), nullptr);
  const uint32_t not_stored[] = {counts[0], 1, 0};
  std::vector<std::byte> made_up = saved;
  made_up.resize(restored.saved_bytes(not_stored));
  const RecallStore::Page page{.held = 1};
  std::memcpy(&made_up[saved.size()], &page, sizeof page);
  EXPECT_STREQ(restored.fault(not_stored, made_up, 300, recalled),
               "its store has pages of a head that has none");
  restored.close();  // a file that failed before does no harm
  restored.restore(counts, saved, must(restored.file_of(counts, saved)));
  for (RecallStore* other : {&copy, &restored}) {
    EXPECT_EQ(must(rows_of(*other, 0)), must(rows_of(store, 0)));
    EXPECT_EQ(other->entries(), store.entries());
    for (uint32_t i = 0; i < 9; ++i) {
      EXPECT_EQ(other->page(0, i).recalled, store.page(0, i).recalled);
      EXPECT_EQ(other->means(0, i)[3], store.means(0, i)[3]);
    }
  }
}

TEST_P(RecallStores, SaveNothingOfAnEarlierText) {
  RecallStore store = make(4), fresh = make(4);
  Batch earlier, batch;
  for (int32_t p = 0; p < 64; ++p) earlier.add(p, 0);
  must(store.add(0, earlier.entries(), host()));
  store.clear();
  batch.add(5, 0);
  for (RecallStore* either : {&store, &fresh}) must(either->add(0, batch.entries(), host()));
  EXPECT_EQ(bytes_of(store), bytes_of(fresh));
}

#ifndef _WIN32
TEST(RecallStore, NoticesAFileThatWasChangedOrCut) {
  const auto filled = [] {
    RecallStore store = must(RecallStore::create(shape(9, true)));
    Batch batch;
    for (int32_t p = 0; p < 100; ++p) batch.add(p, 0);
    must(store.add(0, batch.entries(), host()));
    return store;
  };
  RecallStore changed = filled();
  const std::byte wrong{0x55};
  must(changed.file()->write(700, &wrong, 1));
  EXPECT_EQ(rows_of(changed, 0).status().message(), "the temporary file of evicted entries was changed");
  RecallStore cut = filled();
  ASSERT_EQ(ftruncate(fileno(cut.file()->handle()), 700), 0);
  EXPECT_EQ(rows_of(cut, 0).status().message(), "the temporary file is shorter than what was written to it");
}

TEST(RecallStore, SaysThatADiskIsFull) {
  std::FILE* full = std::fopen("/dev/full", "r+b");
  if (!full) return;  // no such device here
  RecallStore store = must(RecallStore::create(shape(9, true)));
  ASSERT_GE(dup2(fileno(full), fileno(store.file()->handle())), 0);
  std::fclose(full);
  Batch batch;
  batch.add(3, 0);
  const Status status = store.add(0, batch.entries(), host());
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_NE(status.message().find("No space left on device"), std::string::npos) << status.message();
  store.close();
  must(store.add(0, batch.entries(), host()));  // a closed store takes nothing
  EXPECT_TRUE(store.empty());
}
#endif

}  // namespace
}  // namespace thimble::test
