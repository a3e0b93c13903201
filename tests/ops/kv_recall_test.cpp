// kv_spill, kv_recall and query_keep on every device that has them: entries that leave runs, and come back to
// their places, compared with lists of entries sorted by position.
#include <limits>
#include <map>

#include "tests/ops/kv_blocks.h"

namespace thimble::test {
namespace {

constexpr uint32_t kHeads = 3, kChunk = 9, kCapacity = 80;

// The formats of keys and of values in the pool, and in the rows that leave it or come back. Two formats of
// blocks are the same.
struct Formats {
  struct Pair {
    DType pool = DType::kF16, rows = DType::kF16;
    DType blocks() const { return dtype_info(rows).block > 1 ? rows : pool; }
  } k, v;
};
constexpr Formats kBlocks[] = {
    {{DType::kF16, DType::kQ8_0}, {DType::kF16, DType::kQ4_0}},
    {{DType::kQ8_0, DType::kQ8_0}, {DType::kQ4_0, DType::kQ4_0}},
    {{DType::kF16, DType::kQ4_0}, {DType::kQ8_0, DType::kQ8_0}},
};

// What a test knows of an entry: the numbers of its key and value, and its score.
struct Entry {
  std::vector<float> k, v;
  float score;
};

class KvRecalls : public OpTest {
 protected:
  // Numbers that only row i has, and that both formats can hold.
  static std::vector<float> numbers(const Formats::Pair& types, uint32_t i, uint32_t dh) {
    if (dtype_info(types.blocks()).block > 1) {
      Random random{i};
      return exact_blocks(types.blocks(), random, dh);
    }
    std::vector<float> row(dh);
    for (uint32_t c = 0; c < dh; ++c) row[c] = f16_to_f32(static_cast<uint16_t>((13 * i + 7 * c) % 0x7c00));
    return row;
  }
  static std::vector<std::byte> bytes(DType type, const std::vector<float>& row) {
    if (type != DType::kF16) return exact_rows(type, row, static_cast<uint32_t>(row.size()));
    const std::vector<uint16_t> stored = halves(row);
    const auto* const first = reinterpret_cast<const std::byte*>(stored.data());
    return {first, first + 2 * stored.size()};
  }
  static std::vector<std::byte> array(DType type, size_t rows, uint32_t dh) {
    return std::vector<std::byte>(rows * kv_bytes(type, dh));
  }
  static void put_row(std::vector<std::byte>& rows, DType type, size_t row, const std::vector<float>& x) {
    const std::vector<std::byte> stored = bytes(type, x);
    std::copy(stored.begin(), stored.end(), rows.begin() + static_cast<ptrdiff_t>(row * stored.size()));
  }
  static bool has_row(const std::vector<std::byte>& rows, DType type, size_t row,
                      const std::vector<float>& x) {
    const std::vector<std::byte> stored = bytes(type, x);
    return std::equal(stored.begin(), stored.end(),
                      rows.begin() + static_cast<ptrdiff_t>(row * stored.size()));
  }

  void check_spill(bool chunked, uint32_t dh, const Formats& types) {
    SCOPED_TRACE(::testing::Message() << (chunked ? "chunk" : "pool") << ", head size " << dh);
    clear();
    Random random{dh + chunked};
    const uint32_t rows = chunked ? 7 : 0;
    const std::vector<HeadState> heads = unequal_heads({40, 64, 0}, 20);
    const size_t entries = layer_entries(heads);
    std::vector<std::byte> k = array(types.k.pool, entries, dh), v = array(types.v.pool, entries, dh),
                           chunk_k = array(types.k.pool, kHeads * kChunk, dh),
                           chunk_v = array(types.v.pool, kHeads * kChunk, dh);
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
        const Entry e{numbers(types.k, 5 * i + head, dh), numbers(types.v, 7 * i + 2 * head, dh),
                      random.uniform(-1, 1)};
        put_row(in_chunk ? chunk_k : k, types.k.pool, at, e.k);
        put_row(in_chunk ? chunk_v : v, types.v.pool, at, e.v);
        (in_chunk ? chunk_pos : pos)[at] = position;
        (in_chunk ? chunk_cis : cis)[at] = e.score;
        if (random.uniform(0, 1) < 0.6f)
          listed[++listed[0]] = i;
        else
          want[head].push_back({position, e});
      }
    }
    size_for(kHeads, 1, dh, session_of(behind_other_rows(heads), kChunk));
    const auto copies = [&](DType type) {
      return output<std::byte>(kHeads * kCapacity * kv_bytes(type, dh));
    };
    const View to_k = copies(types.k.rows), to_v = copies(types.v.rows),
               keys = output<float>(kHeads * kCapacity * dh), to_pos = output<int32_t>(kHeads * kCapacity),
               to_cis = output<float>(kHeads * kCapacity), count = output<uint32_t>(1 + kHeads);
    const KvSpill op{.list = input(list),
                     .pool_k = {input(k), types.k.pool},
                     .pool_v = {input(v), types.v.pool},
                     .chunk_k = chunked ? KvArray{input(chunk_k), types.k.pool} : KvArray{},
                     .chunk_v = chunked ? KvArray{input(chunk_v), types.v.pool} : KvArray{},
                     .pool_pos = input(pos),
                     .pool_cis = input(cis),
                     .chunk_pos = chunked ? input(chunk_pos) : View{},
                     .chunk_cis = chunked ? input(chunk_cis) : View{},
                     .k = {to_k, types.k.rows},
                     .v = {to_v, types.v.rows},
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
    const auto program = record(kChunk, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    run(*program, {.n_rows = rows}, behind_other_rows(heads));
    const auto counts = get<uint32_t>(count);
    const auto got_k = get<std::byte>(to_k), got_v = get<std::byte>(to_v);
    const auto got_pos = get<int32_t>(to_pos);
    const auto got_cis = get<float>(to_cis), got_keys = get<float>(keys);
    EXPECT_EQ(counts[0], 1 + kOtherRows);
    for (uint32_t head = 0; head < kHeads; ++head) {
      const size_t first = head * kCapacity, end = first + want[head].size();
      ASSERT_EQ(counts[1 + head], want[head].size());
      for (size_t at = first; at < end; ++at) {
        const auto& [position, e] = want[head][at - first];
        ASSERT_EQ(got_pos[at], position);
        ASSERT_EQ(got_cis[at], e.score);
        ASSERT_TRUE(has_row(got_k, types.k.rows, at, e.k)) << at;
        ASSERT_TRUE(has_row(got_v, types.v.rows, at, e.v)) << at;
        for (uint32_t c = 0; c < dh; ++c) ASSERT_EQ(got_keys[at * dh + c], e.k[c]);
      }
      EXPECT_TRUE(is_poison(got_pos, end, kCapacity - want[head].size()));
    }
  }

  // `listed` of the entries stay, and `came` rows come between them.
  void check_recall(uint32_t held, double listed, uint32_t came, uint32_t dh, const Formats& types) {
    SCOPED_TRACE(::testing::Message() << held << " entries, " << came << " rows, head size " << dh);
    clear();
    Random random{dh + held + came};
    std::vector<HeadState> heads = unequal_heads({held, held + 3, held / 2}, came);
    const size_t entries = layer_entries(heads);
    const uint32_t list_capacity = 1 + held + 3, room = came + 2;
    std::vector<std::byte> k = array(types.k.pool, entries, dh), v = array(types.v.pool, entries, dh),
                           row_k = array(types.k.rows, kHeads * room, dh),
                           row_v = array(types.v.rows, kHeads * room, dh);
    std::vector<int32_t> pos(entries), row_pos(kHeads * room);
    std::vector<float> cis(entries);
    std::vector<uint32_t> list(kHeads * list_capacity), count(kHeads);
    std::vector<std::map<int32_t, Entry>> want(kHeads);
    for (uint32_t head = 0; head < kHeads; ++head) {
      uint32_t* const stay = &list[head * list_capacity];
      for (uint32_t i = 0; i < heads[head].n_entries; ++i) {
        const size_t at = heads[head].first + i;
        const Entry e{numbers(types.k, i, dh), numbers(types.v, 2 * i + 1, dh), random.uniform(-1, 1)};
        put_row(k, types.k.pool, at, e.k);
        put_row(v, types.v.pool, at, e.v);
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
        const Entry e{numbers(types.k, 500 + row, dh), numbers(types.v, 700 + row, dh),
                      -std::numeric_limits<float>::infinity()};
        put_row(row_k, types.k.rows, at, e.k);
        put_row(row_v, types.v.rows, at, e.v);
        want[head][row_pos[at]] = e;
      }
      heads[head].n_entries = heads[head].keep = stay[0] + count[head];
    }
    SessionShape shape = session_of(behind_other_rows(heads), kChunk);
    shape.recalls = true;
    size_for(kHeads, 1, dh, shape);
    const View run_k = inout(k), run_v = inout(v), run_pos = inout(pos), run_cis = inout(cis);
    const KvRecall op{.list = input(list),
                      .row_k = {input(row_k), types.k.rows},
                      .row_v = {input(row_v), types.v.rows},
                      .row_pos = input(row_pos),
                      .count = input(count),
                      .k = {run_k, types.k.pool},
                      .v = {run_v, types.v.pool},
                      .pos = run_pos,
                      .cis = run_cis,
                      .p = {.heads = kHeads,
                            .head_dim = dh,
                            .head_state = kOtherRows,
                            .list_capacity = list_capacity,
                            .row_capacity = room}};
    const auto program = record(1, [&](Recorder& r) { r.record(op); });
    ASSERT_TRUE(program);
    run(*program, {}, behind_other_rows(heads));
    const auto got_k = get<std::byte>(run_k), got_v = get<std::byte>(run_v);
    const auto got_pos = get<int32_t>(run_pos);
    const auto got_cis = get<float>(run_cis);
    for (uint32_t head = 0; head < kHeads; ++head) {
      size_t at = heads[head].first;
      for (const auto& [position, e] : want[head]) {
        ASSERT_EQ(got_pos[at], position);
        ASSERT_EQ(got_cis[at], e.score);
        ASSERT_TRUE(has_row(got_k, types.k.pool, at, e.k)) << at;
        ASSERT_TRUE(has_row(got_v, types.v.pool, at, e.v)) << at;
        ++at;
      }
    }
  }
};
THIMBLE_OP_TESTS_WITH(KvRecalls, KvRecall);

TEST_P(KvRecalls, SpillWhatAListLacks) {
  for (const uint32_t dh : {8u, 64u, 80u})
    for (const bool chunked : {false, true}) {
      check_spill(chunked, dh, {});
      if (HasFailure()) return;
    }
}

// 96 channels have an odd number of blocks.
TEST_P(KvRecalls, SpillToOtherFormats) {
  for (const Formats& types : kBlocks)
    for (const uint32_t dh : {32u, 96u})
      for (const bool chunked : {false, true}) {
        check_spill(chunked, dh, types);
        if (HasFailure()) return;
      }
}

TEST_P(KvRecalls, ComeBackBetweenTheOthers) {
  for (const uint32_t dh : {8u, 64u})
    for (const double listed : {0.0, 0.5, 1.0})
      for (const uint32_t came : fewer({0, 1, 30, 100}, {0, 100}))
        for (const uint32_t held : fewer({50, 200, 700}, {700})) {  // tiles have up to 1024 entries
          check_recall(held, listed, came, dh, {});
          if (HasFailure()) return;
        }
}

TEST_P(KvRecalls, ComeBackFromOtherFormats) {
  for (const Formats& types : kBlocks)
    for (const uint32_t dh : {32u, 96u}) {
      check_recall(200, 0.5, 100, dh, types);
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
    run({.n_rows = rows, .position = static_cast<int>(position)}, 7, [&](Recorder& r) { r.record(op); });
    EXPECT_EQ(get<float>(ring), want);
  }
}

}  // namespace
}  // namespace thimble::test
