// kv_spill, kv_recall and query_keep on every device that has them: entries that leave runs, and come back to
// their places, compared with lists of entries sorted by position.
#include <limits>
#include <map>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr uint32_t kHeads = 3, kChunk = 9, kCapacity = 80;

// What a test knows of an entry: its key's and value's first channel as halves, and its score.
struct Entry {
  uint16_t k, v;
  float score;
  bool operator==(const Entry&) const = default;
};

class KvRecalls : public OpTest {
 protected:
  // Fills the row of an entry with values that only it has.
  static void fill(std::vector<uint16_t>& rows, size_t row, uint32_t dh, uint32_t i) {
    for (uint32_t c = 0; c < dh; ++c) rows[row * dh + c] = half(i, c);
  }
  static uint16_t half(uint32_t i, uint32_t c = 0) {  // a finite half
    return static_cast<uint16_t>((13 * i + 7 * c) % 0x7c00);
  }

  void check_spill(bool chunked, uint32_t dh) {
    SCOPED_TRACE(::testing::Message() << (chunked ? "chunk" : "pool") << ", head size " << dh);
    clear();
    Random random{dh + chunked};
    const uint32_t rows = chunked ? 7 : 0;
    const std::vector<HeadState> heads = unequal_heads({40, 64, 0}, 20);
    const size_t entries = layer_entries(heads);
    std::vector<uint16_t> k(entries * dh), v(k), chunk_k(kHeads * kChunk * dh), chunk_v(chunk_k);
    std::vector<int32_t> pos(entries), chunk_pos(kHeads * kChunk);
    std::vector<float> cis(entries), chunk_cis(kHeads * kChunk);
    std::vector<uint32_t> list(kHeads * (1 + kCapacity));
    std::vector<std::vector<std::pair<int32_t, Entry>>> want(kHeads);
    for (uint32_t head = 0; head < kHeads; ++head) {
      const uint32_t held = heads[head].n_entries;
      uint32_t* const listed = &list[head * (1 + kCapacity)];
      for (uint32_t i = 0; i < held + rows; ++i) {
        const bool in_chunk = i >= held;
        const size_t at = in_chunk ? head * kChunk + i - held : heads[head].first + i;
        const auto position = static_cast<int32_t>(3 * i + head);
        const Entry e{half(5 * i + head), half(7 * i + 2 * head), random.uniform(-1, 1)};
        fill(in_chunk ? chunk_k : k, at, dh, 5 * i + head);
        fill(in_chunk ? chunk_v : v, at, dh, 7 * i + 2 * head);
        (in_chunk ? chunk_pos : pos)[at] = position;
        (in_chunk ? chunk_cis : cis)[at] = e.score;
        if (random.uniform(0, 1) < 0.6f)
          listed[++listed[0]] = i;
        else
          want[head].push_back({position, e});
      }
    }
    size_for(kHeads, 1, dh, session_of(behind_other_rows(heads), kChunk));
    const View to_k = output<uint16_t>(kHeads * kCapacity * dh),
               to_v = output<uint16_t>(kHeads * kCapacity * dh),
               keys = output<float>(kHeads * kCapacity * dh), to_pos = output<int32_t>(kHeads * kCapacity),
               to_cis = output<float>(kHeads * kCapacity), count = output<uint32_t>(1 + kHeads);
    const KvSpill op{.list = input(list),
                     .pool_k = {input(k)},
                     .pool_v = {input(v)},
                     .chunk_k = chunked ? KvArray{input(chunk_k)} : KvArray{},
                     .chunk_v = chunked ? KvArray{input(chunk_v)} : KvArray{},
                     .pool_pos = input(pos),
                     .pool_cis = input(cis),
                     .chunk_pos = chunked ? input(chunk_pos) : View{},
                     .chunk_cis = chunked ? input(chunk_cis) : View{},
                     .k = {to_k},
                     .v = {to_v},
                     .keys = keys,
                     .pos = to_pos,
                     .cis = to_cis,
                     .count = count,
                     .p = {.heads = kHeads,
                           .head_dim = dh,
                           .chunk_capacity = kChunk,
                           .head_state = kOtherRows,
                           .list_capacity = 1 + kCapacity,
                           .spill_capacity = kCapacity}};
    if (!device().supports(op)) return;
    const auto program = record(kChunk, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    run(*program, {.n_rows = rows}, behind_other_rows(heads));
    const auto counts = get<uint32_t>(count);
    EXPECT_EQ(counts[0], 1 + kOtherRows);
    for (uint32_t head = 0; head < kHeads; ++head) {
      ASSERT_EQ(counts[1 + head], want[head].size());
      for (size_t i = 0; i < want[head].size(); ++i) {
        const auto& [position, e] = want[head][i];
        const size_t at = head * kCapacity + i;
        EXPECT_EQ(get<int32_t>(to_pos)[at], position);
        EXPECT_EQ(get<float>(to_cis)[at], e.score);
        const auto got_k = get<uint16_t>(to_k), got_v = get<uint16_t>(to_v);
        const auto got_keys = get<float>(keys);
        EXPECT_EQ(got_k[at * dh], e.k);
        EXPECT_EQ(got_v[at * dh], e.v);
        for (uint32_t c = 0; c < dh; ++c) EXPECT_EQ(got_keys[at * dh + c], f16_to_f32(got_k[at * dh + c]));
        if (HasFailure()) return;
      }
    }
  }

  // `listed` of the entries stay, and `came` rows come between them.
  void check_recall(uint32_t held, double listed, uint32_t came, uint32_t dh) {
    SCOPED_TRACE(::testing::Message() << held << " entries, " << came << " rows, head size " << dh);
    clear();
    Random random{dh + held + came};
    std::vector<HeadState> heads = unequal_heads({held, held + 3, held / 2}, came);
    const size_t entries = layer_entries(heads);
    const uint32_t list_capacity = 1 + held + 3, room = came + 2;
    std::vector<uint16_t> k(entries * dh), v(k), row_k(kHeads * room * dh), row_v(row_k);
    std::vector<int32_t> pos(entries), row_pos(kHeads * room);
    std::vector<float> cis(entries);
    std::vector<uint32_t> list(kHeads * list_capacity), count(kHeads);
    std::vector<std::map<int32_t, Entry>> want(kHeads);
    for (uint32_t head = 0; head < kHeads; ++head) {
      uint32_t* const stay = &list[head * list_capacity];
      for (uint32_t i = 0; i < heads[head].n_entries; ++i) {
        const size_t at = heads[head].first + i;
        const Entry e{half(i), half(2 * i + 1), random.uniform(-1, 1)};
        fill(k, at, dh, i);
        fill(v, at, dh, 2 * i + 1);
        pos[at] = static_cast<int32_t>(2 * i);
        cis[at] = e.score;
        if (random.uniform(0, 1) >= static_cast<float>(listed)) continue;
        stay[++stay[0]] = i;
        want[head][pos[at]] = e;
      }
      count[head] = head == 1 ? came / 2 : came;
      const std::vector<uint32_t> places = some_entries(random, held + came + 4, count[head], 0);
      for (uint32_t row = 0; row < count[head]; ++row) {
        const size_t at = head * room + row;
        row_pos[at] = static_cast<int32_t>(2 * places[row] + 1);
        fill(row_k, at, dh, 500 + row);
        fill(row_v, at, dh, 700 + row);
        want[head][row_pos[at]] = {half(500 + row), half(700 + row), -std::numeric_limits<float>::infinity()};
      }
      heads[head].n_entries = heads[head].keep = stay[0] + count[head];
    }
    size_for(kHeads, 1, dh, session_of(behind_other_rows(heads), kChunk));
    const View run_k = inout(k), run_v = inout(v), run_pos = inout(pos), run_cis = inout(cis);
    const KvRecall op{.list = input(list),
                      .row_k = {input(row_k)},
                      .row_v = {input(row_v)},
                      .row_pos = input(row_pos),
                      .count = input(count),
                      .k = {run_k},
                      .v = {run_v},
                      .pos = run_pos,
                      .cis = run_cis,
                      .p = {.heads = kHeads,
                            .head_dim = dh,
                            .head_state = kOtherRows,
                            .list_capacity = list_capacity,
                            .row_capacity = room}};
    if (!device().supports(op)) return;
    const auto program = record(1, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    run(*program, {}, behind_other_rows(heads));
    const auto got_k = get<uint16_t>(run_k), got_v = get<uint16_t>(run_v);
    const auto got_pos = get<int32_t>(run_pos);
    const auto got_cis = get<float>(run_cis);
    for (uint32_t head = 0; head < kHeads; ++head) {
      size_t at = heads[head].first;
      for (const auto& [position, e] : want[head]) {
        ASSERT_EQ(got_pos[at], position);
        ASSERT_EQ((Entry{got_k[at * dh], got_v[at * dh], got_cis[at]}), e);
        const uint16_t* const key = &got_k[at * dh];
        for (uint32_t c = 1; c < dh; ++c) ASSERT_EQ((key[c] + 0x7c00 - key[0]) % 0x7c00, 7 * c % 0x7c00);
        ++at;
      }
    }
  }
};
THIMBLE_OP_TESTS(KvRecalls);

TEST_P(KvRecalls, SpillWhatAListLacks) {
  for (const uint32_t dh : {8u, 64u, 80u})
    for (const bool chunked : {false, true}) {
      check_spill(chunked, dh);
      if (HasFailure()) return;
    }
}

TEST_P(KvRecalls, ComeBackBetweenTheOthers) {
  for (const uint32_t dh : {8u, 64u})
    for (const double listed : {0.0, 0.5, 1.0})
      for (const uint32_t came : {0u, 1u, 30u, 100u}) {
        check_recall(50, listed, came, dh);
        check_recall(200, listed, came, dh);
        if (HasFailure()) return;
      }
}

TEST_P(KvRecalls, KeepTheLatestQueries) {
  constexpr uint32_t kCols = 6, kStride = 10, kRing = 4;
  const QueryKeep shape{{}, {}, {.cols = kCols, .row_stride = kStride, .ring = kRing}};
  std::vector<float> q(7 * kStride);
  for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i);
  for (const uint32_t rows : {1u, 3u, 4u, 7u}) {
    clear();
    const uint32_t position = 13;
    std::vector<float> kept(kRing * kCols, -1), want = kept;
    for (uint32_t row = 0; row < rows; ++row)  // later rows overwrite earlier ones
      for (uint32_t c = 0; c < kCols; ++c) want[(position + row) % kRing * kCols + c] = q[row * kStride + c];
    QueryKeep op = shape;
    const View ring = inout(kept);
    op.q = input(q);
    op.kept = ring;
    if (!device().supports(op)) return;
    run({.n_rows = rows, .position = static_cast<int>(position)}, 7, [&](Recorder& r) { r.record(op); });
    EXPECT_EQ(get<float>(ring), want);
  }
}

}  // namespace
}  // namespace thimble::test
