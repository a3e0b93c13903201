// kv_merge on every device: runs whose last entries were appended out of order, compared with a sort.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

// Where the positions of a run's last entries belong.
enum class Tails { kBefore, kBehind, kAmong, kFew };

// One head's run: its number of entries, the last `appended` of which were appended out of order.
struct MergedRun {
  uint32_t entries, appended;
  Tails tail;
};

class KvMerges : public OpTest {
 protected:
  // The positions of a run: both parts ascend, and no two positions are equal.
  static std::vector<int32_t> positions(Random& random, const MergedRun& run) {
    const uint32_t older = run.entries - run.appended;
    // Older entries have even positions, appended ones odd positions.
    std::vector<uint32_t> odd;
    switch (run.tail) {
      case Tails::kBefore:
        odd = every_entry(run.appended);
        break;
      case Tails::kBehind:
        odd = every_entry(run.appended);
        for (uint32_t& i : odd) i += 100 + older;
        break;
      case Tails::kAmong:
        odd = some_entries(random, older + 2 * run.appended + 2, run.appended, 0);
        break;
      case Tails::kFew:  // the first two of them move far to the front, the others stay
        odd = every_entry(run.appended);
        for (uint32_t i = 0; i < run.appended; ++i) odd[i] += i < 2 ? older / 3 : 100 + older;
    }
    std::vector<int32_t> all;
    const int32_t first = run.tail == Tails::kBefore ? 2 * static_cast<int32_t>(run.appended) + 10 : 0;
    for (uint32_t i = 0; i < older; ++i) all.push_back(first + 2 * static_cast<int32_t>(i));
    for (const uint32_t i : odd) all.push_back(2 * static_cast<int32_t>(i) + 1);
    return all;
  }

  // The step that compacted had `rows` rows, and left the runs with the given number of entries.
  void check(const std::vector<MergedRun>& runs, uint32_t rows, uint32_t dh) {
    SCOPED_TRACE(::testing::Message() << rows << " rows, head size " << dh);
    clear();
    Random random{dh + rows};
    std::vector<HeadState> heads;
    uint32_t first = 3;
    for (const MergedRun& run : runs) {
      // Before, a head had some entries that were evicted; every other head kept all entries.
      const uint32_t went = heads.size() % 2 ? 0 : 7 + rows, before = run.entries + went;
      heads.push_back({.first = first,
                       .capacity = before + 3,
                       .n_entries = before - std::min(rows, before),
                       .keep = went ? run.entries : before + 100});
      if (before < rows) heads.back().keep = run.entries;
      first += before + 8;
    }
    const uint32_t count = static_cast<uint32_t>(heads.size());
    const size_t entries = layer_entries(heads) + 5;
    std::vector<uint16_t> k = padded_rows(std::vector<uint16_t>(), entries * dh), v = k;
    std::vector<int32_t> pos = padded_rows(std::vector<int32_t>(), entries);
    std::vector<float> cis = padded_rows(std::vector<float>(), entries);
    auto want_k = k, want_v = v;
    auto want_pos = pos;
    auto want_cis = cis;
    for (uint32_t head = 0; head < count; ++head) {
      const uint32_t n = runs[head].entries;
      const size_t at = heads[head].first;
      const std::vector<int32_t> own = positions(random, runs[head]);
      std::vector<uint32_t> order = every_entry(n);
      std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return own[a] < own[b]; });
      for (uint32_t i = 0; i < n; ++i) {
        for (uint32_t c = 0; c < dh; ++c) {
          k[(at + i) * dh + c] = static_cast<uint16_t>(random.next());
          v[(at + i) * dh + c] = static_cast<uint16_t>(random.next());
        }
        pos[at + i] = own[i];
        cis[at + i] = random.uniform(-1, 1);
      }
      for (uint32_t i = 0; i < n; ++i) {
        const size_t from = at + order[i], to = at + i;
        std::copy_n(&k[from * dh], dh, &want_k[to * dh]);
        std::copy_n(&v[from * dh], dh, &want_v[to * dh]);
        want_pos[to] = pos[from];
        want_cis[to] = cis[from];
      }
    }
    size_for(count, 1, dh, session_of(behind_other_rows(heads), kMostMergedRows));
    const View own_k = inout(k), own_v = inout(v), own_pos = inout(pos), own_cis = inout(cis);
    const KvMerge op{
        {own_k}, {own_v}, own_pos, own_cis, {.heads = count, .head_dim = dh, .head_state = kOtherRows}};
    const auto program = record(kMostMergedRows, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    for (const char* time : {"once", "again"}) {  // sorting twice changes nothing
      SCOPED_TRACE(time);
      run(*program, {.n_rows = rows}, behind_other_rows(heads));
      expect_same(get<uint16_t>(own_k), want_k, dh, "k");
      expect_same(get<uint16_t>(own_v), want_v, dh, "v");
      expect_same(get<int32_t>(own_pos), want_pos, 1, "position");
      expect_same(get<float>(own_cis), want_cis, 1, "score");
    }
  }

 private:
  // Compares every byte of the layer's arrays, also between runs and after their entries.
  template <typename T>
  static void expect_same(const std::vector<T>& got, const std::vector<T>& want, uint32_t width,
                          const char* what) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0) << what << " of entry " << i / width;
  }
};
THIMBLE_OP_TESTS(KvMerges);

TEST_P(KvMerges, PutTheLastEntriesWhereTheirPositionsBelong) {
  for (const uint32_t dh : {8u, 64u, 80u, 128u, 256u})
    for (const uint32_t rows : {1u, 2u, 9u, 33u, 64u}) {
      const uint32_t some = (rows + 1) / 2;
      check({{700, rows, Tails::kBefore},
             {701, rows, Tails::kAmong},
             {64, some, Tails::kAmong},
             {rows, rows, Tails::kBehind},  // only appended entries
             {300, some, Tails::kBehind},
             {301, 0, Tails::kBehind},
             {130, rows, Tails::kFew},
             {0, 0, Tails::kBehind},
             {rows + 1, rows, Tails::kBefore},
             {2, 1, Tails::kBefore}},
            rows, dh);
      if (HasFatalFailure()) return;
    }
}

// Tiles of every device and array, and runs that are not multiples of the tiles.
TEST_P(KvMerges, MoveLongRuns) {
  for (const uint32_t n : {256u, 512u, 1024u, 2048u, 4096u})
    for (const int more : {-1, 0, 1, 65}) {
      const uint32_t entries = n + static_cast<uint32_t>(more);
      check({{entries, 64, Tails::kBefore}, {entries, 1, Tails::kBefore}, {entries, 33, Tails::kAmong}}, 64,
            16);
      if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace thimble::test
