// Heads that hold different numbers of entries: every op that writes, scores, lists or moves entries, each
// head compared with plain loops over its own run. Memory between runs, and after a run's entries, is
// poisoned and must stay so. (Attention and kv_view: kv_attention_test; pages: kv_page_test.)
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Entries = std::vector<uint32_t>;

// Values for a chunk buffer: [heads][capacity], of which `rows` are used.
template <typename T, typename Make>
std::vector<T> chunk_of(uint32_t heads, uint32_t rows, uint32_t capacity, uint32_t width, const Make& make) {
  std::vector<T> all;
  for (uint32_t head = 0; head < heads; ++head) {
    std::vector<T> own(size_t(rows) * width);
    for (T& value : own) value = make();
    own = padded_rows(own, size_t(capacity) * width);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

class KvRuns : public OpTest {
 protected:
  const Entries kEntries = {0, 1, 63, 64, 65, 1000, 4000};

  // Whether arrays hold the same bytes, NaN or not.
  template <typename T>
  static bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
  }
};
THIMBLE_OP_TESTS(KvRuns);

TEST_P(KvRuns, AppendPutsRowsAfterEachHeadsEntries) {
  for (const uint32_t rows : {1u, 33u})
    for (const uint32_t dh : {64u, 80u}) {
      clear();
      Random random{dh + rows};
      Pool want(random, unequal_heads(kEntries, 40), dh);
      const uint32_t heads = want.count(), stride = 2 * heads * dh + 3, max_rows = rows + 2;
      const auto qkv = random.floats(size_t(rows) * stride);
      const View x = input(padded_rows(qkv, size_t(max_rows) * stride)), k = inout(want.k), v = inout(want.v),
                 pos = inout(want.pos), saturated = inout(std::vector<uint32_t>(1));
      run({.n_rows = rows, .position = 20000}, behind_other_rows(want.heads), max_rows, [&](Recorder& r) {
        r.record(KvAppend{x,
                          {},
                          {k},
                          {v},
                          pos,
                          saturated,
                          {.heads = heads,
                           .head_dim = dh,
                           .row_stride = stride,
                           .k_column = 3,
                           .v_column = 3 + heads * dh,
                           .head_state = kOtherRows,
                           .into = kIntoPool}});
      });
      for (uint32_t head = 0; head < heads; ++head)
        for (uint32_t row = 0; row < rows; ++row) {
          const size_t e = want.heads[head].first + want.heads[head].n_entries + row,
                       from = row * size_t(stride) + 3 + head * dh;
          want.pos[e] = 20000 + static_cast<int32_t>(row);
          for (uint32_t c = 0; c < dh; ++c) {
            want.k[e * dh + c] = f32_to_f16(qkv[from + c]);
            want.v[e * dh + c] = f32_to_f16(qkv[from + heads * dh + c]);
          }
        }
      EXPECT_TRUE(same(get<uint16_t>(k), want.k));
      EXPECT_TRUE(same(get<uint16_t>(v), want.v));
      EXPECT_TRUE(same(get<int32_t>(pos), want.pos));
    }
}

// Some devices use a different kernel for a single row.
TEST_P(KvRuns, AppendStoresTheRowsOwnPositions) {
  constexpr uint32_t kDim = 80, kLeft = 2;
  for (const uint32_t rows : {1u, 2u, 33u, 64u})
    for (const bool into_pool : {true, false}) {
      clear();
      Random random{rows};
      Pool want(random, unequal_heads(kEntries, 70), kDim);
      const uint32_t heads = want.count(), stride = 2 * heads * kDim,
                     max_rows = rows == 1 ? rows : rows + kLeft;
      const auto qkv = random.floats(size_t(rows) * stride);
      std::vector<int32_t> positions;
      for (uint32_t row = 0; row < rows; ++row)
        positions.push_back(static_cast<int32_t>(100 * row + random.below(100)));
      std::vector<int32_t> chunk_pos = padded_rows(std::vector<int32_t>(), size_t{heads} * max_rows);
      const View k = inout(want.k), v = inout(want.v), pos = inout(into_pool ? want.pos : chunk_pos),
                 saturated = inout(std::vector<uint32_t>(1));
      const KvAppend op{input(padded_rows(qkv, size_t(max_rows) * stride)),
                        {},
                        {k},
                        {v},
                        pos,
                        saturated,
                        {.heads = heads,
                         .head_dim = kDim,
                         .row_stride = stride,
                         .v_column = heads * kDim,
                         .chunk_capacity = max_rows,
                         .head_state = kOtherRows,
                         .into = into_pool ? kIntoPool : kIntoChunk},
                        input(padded_rows(positions, max_rows))};
      run({.n_rows = rows, .position = 20000}, behind_other_rows(want.heads), max_rows,
          [&](Recorder& r) { r.record(op); });
      for (uint32_t head = 0; head < heads; ++head)
        std::copy(positions.begin(), positions.end(),
                  into_pool ? &want.pos[want.heads[head].first + want.heads[head].n_entries]
                            : &chunk_pos[size_t{head} * max_rows]);
      EXPECT_TRUE(same(get<int32_t>(pos), into_pool ? want.pos : chunk_pos));
    }
}

TEST_P(KvRuns, CisStorePutsScoresAfterEachHeadsEntriesOrOverTheLastOnes) {
  Random random;
  const uint32_t rows = 4;
  for (const uint32_t into : {kIntoPool, kIntoRing})
    for (const uint32_t kind : {kCisHead, kCisPosition})
      for (const uint32_t share : {0u, 1u}) {
        SCOPED_TRACE(::testing::Message() << "into " << into << " kind " << kind << " share " << share);
        clear();
        Pool want(random, unequal_heads({4, 64, 5, 1000, 63}, 8), 1);
        const uint32_t heads = want.count();
        const auto scores = random.floats(rows * heads);
        const View score = input(padded_rows(scores, (rows + 2) * heads)), cis = inout(want.cis);
        run({.n_rows = rows, .position = 700}, behind_other_rows(want.heads), rows + 2, [&](Recorder& r) {
          r.record(CisStore{
              score,
              cis,
              {.heads = heads, .kind = kind, .share_heads = share, .head_state = kOtherRows, .into = into}});
        });
        for (uint32_t head = 0; head < heads; ++head)
          for (uint32_t row = 0; row < rows; ++row) {
            const HeadState& own = want.heads[head];
            const float* all = &scores[row * heads];
            want.cis[own.first + own.n_entries - (into == kIntoRing ? rows : 0) + row] =
                kind == kCisPosition ? static_cast<float>(700 + row)
                : share              ? *std::max_element(all, all + heads)
                                     : all[head];
          }
        EXPECT_TRUE(same(get<float>(cis), want.cis));
      }
}

// The kept entries: the first protected ones, the last protected ones, and the largest of the others.
Entries kept(const std::vector<float>& scores, const HeadState& head) {
  const uint32_t n = static_cast<uint32_t>(scores.size());
  if (head.keep >= n) return every_entry(n);
  const uint32_t last = std::min(head.protect_last, head.keep),
                 first = std::min(head.protect_first, head.keep - last);
  Entries l = largest(scores, first, n - last, head.keep - first - last);
  for (uint32_t i = 0; i < first; ++i) l.push_back(i);
  for (uint32_t i = n - last; i < n; ++i) l.push_back(i);
  std::sort(l.begin(), l.end());
  return l;
}

TEST_P(KvRuns, RetainsAsManyOfEachHeadAsItsRowSays) {
  Random random;
  const uint32_t chunk_capacity = 130, list_capacity = 4200;
  for (const uint32_t rows : {0u, 1u, 128u})
    for (const uint32_t in_runs : {0u, 1u}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, in runs " << in_runs);
      clear();
      Pool pool(random, unequal_heads({0, 1, 63, 64, 65, 1000, 4000, 4000, 700}, 3), 1);
      const uint32_t heads = pool.count(), score_capacity = 4003;
      for (uint32_t head = 0; head < heads; ++head) {
        HeadState& own = pool.heads[head];
        const uint32_t n = own.n_entries + rows;
        const uint32_t keeps[] = {0, n, n / 3, 1, n - 1, 300, 2500, 17, n + 9};
        own.keep = keeps[head];
        own.protect_first = head % 4;
        own.protect_last = head == 7 ? 60 : 3 * head;  // head 7 protects more entries than it keeps
      }
      const auto chunk =
          chunk_of<float>(heads, rows, chunk_capacity, 1, [&] { return random.uniform(-3, 3); });
      std::vector<float> apart = padded_rows(std::vector<float>(), size_t(heads) * score_capacity);
      for (uint32_t head = 0; head < heads; ++head)
        std::copy_n(&pool.cis[pool.heads[head].first], pool.heads[head].n_entries,
                    &apart[size_t(head) * score_capacity]);
      size_for(heads, 1, 16, session_of(behind_other_rows(pool.heads), chunk_capacity));
      const View list = output<uint32_t>(heads * list_capacity);
      const TopK op{input(in_runs ? pool.cis : apart),
                    input(chunk),
                    {},
                    {},
                    list,
                    {.heads = heads,
                     .head_state = kOtherRows,
                     .keep = kKeepOfHead,
                     .page = 1,
                     .in_runs = in_runs,
                     .score_capacity = in_runs ? 0 : score_capacity,
                     .chunk_capacity = chunk_capacity,
                     .list_capacity = list_capacity}};
      run({.n_rows = rows}, behind_other_rows(pool.heads), chunk_capacity,
          [&](Recorder& r) { r.record(op); });
      const auto got = get<uint32_t>(list);
      for (uint32_t head = 0; head < heads; ++head) {
        const HeadState& own = pool.heads[head];
        std::vector<float> scores(pool.cis.begin() + own.first, pool.cis.begin() + own.first + own.n_entries);
        const auto of_chunk = chunk.begin() + head * chunk_capacity;
        scores.insert(scores.end(), of_chunk, of_chunk + rows);
        EXPECT_EQ(list_of(got, list_capacity, head), kept(scores, own))
            << "head " << head << " of " << own.n_entries << " entries keeps " << own.keep;
      }
    }
}

// ---- selection ----

// A selecting step over heads some of which are too short to be selected from.
struct SelectCase {
  uint32_t group, dh, rows, window;
  Rotation rotation;
};

TEST_P(KvRuns, ScoresVotesAndListsEachHeadsOwnMiddle) {
  const uint32_t n_init = 5, select_k = 40, n_local = 20, most = n_init + select_k + n_local;
  for (const SelectCase& c :
       {SelectCase{4, 64, 1, 0, {}}, SelectCase{1, 80, 1, 3, {kRopeList, kRopeHalves, 80}},
        SelectCase{7, 128, 9, 0, {kRopeOriginal, kRopeHalves, 128}},
        SelectCase{8, 256, 1, 5, {kRopeList, kRopeAdjacent, 256}}}) {
    SCOPED_TRACE(::testing::Message() << "group " << c.group << " dh " << c.dh << " rows " << c.rows);
    clear();
    Random random{c.dh};
    // Including the step's rows: one head below the entries that are always attended, one exactly at them,
    // one with one more.
    const Pool pool(random,
                    unequal_heads({0, most - c.rows - 1, most - c.rows, most - c.rows + 1, 4000, 7, 300}, 10),
                    c.dh);
    const uint32_t kv_heads = pool.count(), heads = kv_heads * c.group, stride = heads * c.dh + 3,
                   capacity = 4020, list_capacity = 1 + most;
    const auto q = random.floats(size_t(c.rows) * stride);
    const StepParams step{
        .n_rows = c.rows, .position = 12500, .n_init = n_init, .n_local = n_local, .select_k = select_k};
    size_for(kv_heads, c.group, c.dh, session_of(behind_other_rows(pool.heads), c.rows + 1, 64, capacity));
    const View scores = output<float>(size_t(heads) * capacity), lse = output<float>(heads),
               votes = output<float>(size_t(kv_heads) * capacity),
               list = output<uint32_t>(kv_heads * list_capacity);
    const Selecting selecting{.q = input(padded_rows(q, size_t(c.rows + 1) * stride)),
                              .k = input(pool.k),
                              .table = input(c.rotation.table(12600)),
                              .pos = input(pool.pos),
                              .gate = {},
                              .scores = scores,
                              .lse = lse,
                              .votes = votes,
                              .list = list,
                              .p = {.heads = kv_heads,
                                    .group = c.group,
                                    .head_dim = c.dh,
                                    .row_stride = stride,
                                    .head_state = kOtherRows,
                                    .score_capacity = capacity,
                                    .scale = 1,
                                    .rope = c.rotation.params()},
                              .vote_capacity = capacity,
                              .list_capacity = list_capacity,
                              .window = c.window};
    run(step, behind_other_rows(pool.heads), c.rows + 1, [&](Recorder& r) { selecting.record(r); });

    const auto got = get<float>(scores), got_lse = get<float>(lse), got_votes = get<float>(votes);
    for (uint32_t head = 0; head < kv_heads; ++head) {
      SCOPED_TRACE(::testing::Message() << "KV head " << head);
      const HeadState& own = pool.heads[head];
      const uint32_t n = own.n_entries + c.rows, end = n - n_local;
      const Entries listed = list_of(get<uint32_t>(list), list_capacity, head);
      if (n <= most) {
        EXPECT_EQ(listed, every_entry(n));
        EXPECT_TRUE(is_poison(got, size_t(head) * c.group * capacity, size_t(c.group) * capacity));
        EXPECT_TRUE(is_poison(got_lse, head * c.group, c.group));
        EXPECT_TRUE(is_poison(got_votes, size_t(head) * capacity, capacity));
        continue;
      }
      std::vector<double> mass(n);
      for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h) {
        std::vector<double> query(c.dh);
        for (uint32_t row = 0; row < c.rows; ++row) {
          const double position = c.rotation.mode == kRopeList ? n_local + row : 12500 + row;
          const auto rotated = c.rotation.rotated(doubles(q, row * stride + h * c.dh, c.dh), position);
          for (uint32_t e = 0; e < c.dh; ++e) query[e] += rotated[e] / c.rows;
        }
        double sum = 0;
        for (uint32_t i = 0; i < capacity; ++i) {
          const size_t at = size_t(h) * capacity + i;
          if (i < n_init || i >= end) {
            ASSERT_TRUE(is_poison(got, at, 1)) << "entry " << i << " is not a candidate";
            continue;
          }
          // As in kv_many_entries_test.
          ASSERT_NEAR(got[at], dot(query, doubles(pool.k, (size_t(own.first) + i) * c.dh, c.dh)),
                      2 * c.dh * (c.dh + 8 + c.rows) * 0x1p-24)
              << "head " << h << " entry " << i;
          sum += std::exp(double{got[at]});
          mass[i] += std::exp(double{got[at]} - double{got_lse[h]});
        }
        ASSERT_NEAR(got_lse[h], std::log(sum), (64 + n / 64.0) * 0x1p-24 + 0x1p-19);
      }
      const std::vector<float> own_votes(got_votes.begin() + size_t(head) * capacity,
                                         got_votes.begin() + size_t(head) * capacity + n);
      for (uint32_t i = 0; i < n; ++i) {
        if (i < n_init || i >= end) {
          ASSERT_EQ(own_votes[i], -kInfinity) << "entry " << i;
          continue;
        }
        double top = 0;
        for (uint32_t near = std::max(n_init, i - std::min(i, c.window / 2));
             near < std::min(end, i + c.window / 2 + 1); ++near)
          top = std::max(top, mass[near]);
        ASSERT_NEAR(own_votes[i], std::log(top), 2 * 0x1p-19) << "entry " << i;
      }
      Entries want = every_entry(n_init);
      for (uint32_t i : largest(own_votes, n_init, end, select_k)) want.push_back(i);
      for (uint32_t i = end; i < n; ++i) want.push_back(i);
      EXPECT_EQ(listed, want);
    }
  }
}

// Votes of the layer require heads with equal numbers of entries, wherever their runs are. Here heads hold
// different positions, so their lists differ in length.
TEST_P(KvRuns, LayerVotesAreOfThePositionsInEachHeadsRun) {
  Random random;
  const uint32_t kv_heads = 3, group = 2, rows = 3, held = 400, n = held + rows, n_init = 4, n_local = 30,
                 select_k = 50, capacity = 420, positions = 2000 + rows;
  Pool pool(random, unequal_heads(Entries(kv_heads, held), 20), 16);
  for (const HeadState& head : pool.heads) {
    const Entries own = some_entries(random, 2000, held, 10);
    std::copy(own.begin(), own.end(), pool.pos.begin() + head.first);
    for (uint32_t row = 0; row < rows; ++row)
      pool.pos[head.first + held + row] = static_cast<int32_t>(2000 + row);
  }
  const auto s = random.floats(kv_heads * group * capacity, -20, 20),
             sums = random.floats(kv_heads * group, 18, 24);
  size_for(kv_heads, group, 16, session_of(behind_other_rows(pool.heads), rows, 64, positions));
  const View scores = input(s), lse = input(sums), pos = input(pool.pos), votes = output<float>(positions),
             list = output<uint32_t>(kv_heads * capacity);
  run({.n_rows = rows, .position = 2000, .n_init = n_init, .n_local = n_local, .select_k = select_k},
      behind_other_rows(pool.heads), rows, [&](Recorder& r) {
        r.record(Vote{scores,
                      lse,
                      pos,
                      {},
                      votes,
                      {.heads = kv_heads,
                       .group = group,
                       .head_state = kOtherRows,
                       .scope = kVoteLayer,
                       .page = 1,
                       .score_capacity = capacity,
                       .vote_capacity = positions}});
        r.record(TopK{votes,
                      {},
                      pos,
                      {},
                      list,
                      {.heads = kv_heads,
                       .head_state = kOtherRows,
                       .keep = kKeepOfStep,
                       .page = 1,
                       .by_position = 1,
                       .score_capacity = positions,
                       .list_capacity = capacity}});
      });
  std::vector<double> mass(positions);
  for (uint32_t h = 0; h < kv_heads * group; ++h)
    for (uint32_t i = n_init; i < n - n_local; ++i)
      mass[static_cast<uint32_t>(pool.pos[pool.heads[h / group].first + i])] +=
          std::exp(double{s[h * capacity + i]} - double{sums[h]});
  const auto got = get<float>(votes);
  for (uint32_t p = 0; p < positions; ++p) {
    if (mass[p] == 0)
      ASSERT_EQ(got[p], -kInfinity) << "nobody holds position " << p;
    else  // as in kv_selection_test
      ASSERT_NEAR(got[p], std::log(mass[p]), 2 * 0x1p-19) << "position " << p;
  }
  std::vector<bool> chosen(positions);
  for (const uint32_t p : largest(got, 0, positions, select_k)) chosen[p] = true;
  for (uint32_t head = 0; head < kv_heads; ++head) {
    Entries want;
    for (uint32_t i = 0; i < n; ++i)
      if (i < n_init || i >= n - n_local ||
          chosen[static_cast<uint32_t>(pool.pos[pool.heads[head].first + i])])
        want.push_back(i);
    EXPECT_EQ(list_of(get<uint32_t>(list), capacity, head), want) << "head " << head;
  }
}

// A cached selection is valid for the heads that were selected from when it was made. If another head is
// added, it is not used.
TEST_P(KvRuns, TheGateMissesWhenAnotherHeadBeginsToBeSelectedFrom) {
  Random random;
  constexpr uint32_t kCols = 64;
  const View q = input(random.floats(kCols)), cached = output<float>(kCols),
             gate = inout(std::vector<GateState>(1));
  const auto program = record(1, [&](Recorder& r) {
    r.record(QueryGate{q, cached, gate, {.cols = kCols, .heads = 3, .head_state = kOtherRows}});
  });
  ASSERT_TRUE(program);
  StepParams step{.n_rows = 1, .position = 1000, .n_init = 4, .n_local = 64, .select_k = 32, .theta = 0.9f};
  struct Turn {
    Entries entries;
    bool hit, valid;
    uint32_t hits, misses;
  };
  for (const Turn& t : {Turn{{10, 0, 99}, false, false, 0, 0}, Turn{{10, 0, 100}, false, true, 0, 1},
                        Turn{{11, 1, 101}, true, true, 1, 1}, Turn{{100, 2, 102}, false, true, 1, 2},
                        Turn{{101, 3, 103}, true, true, 2, 2}, Turn{{102, 100, 104}, false, true, 2, 3},
                        Turn{{103, 101, 105}, true, true, 3, 3}, Turn{{9, 9, 9}, false, false, 3, 3},
                        Turn{{103, 101, 105}, false, true, 3, 4}}) {
    run(*program, step, behind_other_rows(unequal_heads(t.entries, 3)));
    ++step.position;
    const GateState g = get<GateState>(gate)[0];
    EXPECT_EQ(g.hit != 0, t.hit) << "at " << step.position;
    EXPECT_EQ(g.valid != 0, t.valid) << "at " << step.position;
    EXPECT_EQ(g.hits, t.hits);
    EXPECT_EQ(g.misses, t.misses);
  }
}

TEST_P(KvRuns, AHitRenewsEachHeadsOwnLocalWindow) {
  Random random;
  const uint32_t n_init = 4, n_local = 16, select_k = 10, capacity = 400, list_capacity = 31;
  const StepParams step{
      .n_rows = 1, .position = 900, .n_init = n_init, .n_local = n_local, .select_k = select_k};
  std::vector<HeadState> heads = unequal_heads({29, 300, 4, 65}, 20);
  size_for(4, 1, 16, session_of(behind_other_rows(heads), 1, 64, capacity));
  const View votes = input(random.floats(4 * capacity)), gate = inout(std::vector<GateState>(1)),
             list = output<uint32_t>(4 * list_capacity);
  const auto program = record(1, [&](Recorder& r) {
    r.record(TopK{votes,
                  {},
                  {},
                  gate,
                  list,
                  {.heads = 4,
                   .head_state = kOtherRows,
                   .keep = kKeepOfStep,
                   .page = 1,
                   .score_capacity = capacity,
                   .list_capacity = list_capacity}});
  });
  ASSERT_TRUE(program);
  run(*program, step, behind_other_rows(heads));
  const auto before = get<uint32_t>(list);
  EXPECT_EQ(list_of(before, list_capacity, 0), every_entry(30));
  EXPECT_EQ(list_of(before, list_capacity, 2), every_entry(5));
  for (HeadState& head : heads)
    if (head.n_entries != 29) head.n_entries += 6;
  put(gate, std::vector<GateState>{{.hit = 1}});
  run(*program, step, behind_other_rows(heads));
  const auto after = get<uint32_t>(list);
  EXPECT_EQ(list_of(after, list_capacity, 0), every_entry(30));
  EXPECT_EQ(list_of(after, list_capacity, 2), every_entry(11));
  for (const uint32_t head : {1u, 3u}) {
    Entries want = list_of(before, list_capacity, head);
    ASSERT_EQ(want.size(), n_init + select_k + n_local);
    for (uint32_t i = 0; i < n_local; ++i) want[want.size() - n_local + i] += 6;
    EXPECT_EQ(list_of(after, list_capacity, head), want);
  }
}

// ---- compaction ----

class KvRunsCompact : public KvRuns {
 protected:
  // Lists `keeps` of each head's entries including the step's rows, or all if there is no list, and compares
  // the resulting pool.
  void check(const Entries& entries, uint32_t rows, uint32_t dh, const Entries& keeps) {
    SCOPED_TRACE(::testing::Message() << rows << " rows, head size " << dh << (keeps.empty() ? ", all" : ""));
    clear();
    Random random{dh + rows};
    const bool listed = !keeps.empty();
    Pool want(random, unequal_heads(entries, listed ? 3 : rows + 3), dh);
    const Pool before = want;
    const uint32_t heads = want.count(), chunk_capacity = rows + 2, list_capacity = 4100;
    const auto word = [&] { return static_cast<uint16_t>(random.next()); };
    const auto new_k = chunk_of<uint16_t>(heads, rows, chunk_capacity, dh, word),
               new_v = chunk_of<uint16_t>(heads, rows, chunk_capacity, dh, word);
    const auto new_pos = chunk_of<int32_t>(heads, rows, chunk_capacity, 1,
                                           [&] { return static_cast<int32_t>(20000 + random.below(5)); });
    const auto new_cis =
        chunk_of<float>(heads, rows, chunk_capacity, 1, [&] { return random.uniform(-1, 1); });
    std::vector<Entries> survivors;
    for (uint32_t head = 0; head < heads; ++head) {
      const uint32_t n = entries[head] + rows;
      survivors.push_back(listed ? some_entries(random, n, std::min(n, keeps[head]), 0) : every_entry(n));
      const HeadState& own = want.heads[head];
      for (uint32_t i = 0; i < survivors[head].size(); ++i) {
        const uint32_t e = survivors[head][i];
        const bool in_pool = e < own.n_entries;
        const size_t to = own.first + i,
                     from = in_pool ? own.first + e : size_t(head) * chunk_capacity + e - own.n_entries;
        std::copy_n(&(in_pool ? before.k : new_k)[from * dh], dh, &want.k[to * dh]);
        std::copy_n(&(in_pool ? before.v : new_v)[from * dh], dh, &want.v[to * dh]);
        want.pos[to] = (in_pool ? before.pos : new_pos)[from];
        want.cis[to] = (in_pool ? before.cis : new_cis)[from];
      }
    }
    size_for(heads, 1, dh, session_of(behind_other_rows(want.heads), rows + 1));
    const View k = inout(before.k), v = inout(before.v), pos = inout(before.pos), cis = inout(before.cis);
    const KvCompact op{listed ? input(lists(survivors, list_capacity)) : View{},
                       {rows ? input(new_k) : View{}},
                       {rows ? input(new_v) : View{}},
                       rows ? input(new_pos) : View{},
                       rows ? input(new_cis) : View{},
                       {k},
                       {v},
                       pos,
                       cis,
                       {.heads = heads,
                        .head_dim = dh,
                        .chunk_capacity = chunk_capacity,
                        .head_state = kOtherRows,
                        .list_capacity = listed ? list_capacity : 0}};
    run({.n_rows = rows}, behind_other_rows(want.heads), rows + 1, [&](Recorder& r) { r.record(op); });
    compare(get<uint16_t>(k), want.k, want.heads, survivors, dh, "k");
    compare(get<uint16_t>(v), want.v, want.heads, survivors, dh, "v");
    compare(get<int32_t>(pos), want.pos, want.heads, survivors, 1, "position");
    compare(get<float>(cis), want.cis, want.heads, survivors, 1, "score");
  }

 private:
  // Memory of a run after its surviving entries may have any contents.
  template <typename T>
  static void compare(std::vector<T> got, const std::vector<T>& want, const std::vector<HeadState>& heads,
                      const std::vector<Entries>& survivors, uint32_t width, const char* what) {
    for (uint32_t head = 0; head < heads.size(); ++head) {
      const size_t end = heads[head].first + heads[head].capacity;
      for (size_t at = (heads[head].first + survivors[head].size()) * width; at < end * width; ++at)
        got[at] = want[at];
    }
    EXPECT_TRUE(same(got, want)) << what;
  }
};
THIMBLE_OP_TESTS(KvRunsCompact);

TEST_P(KvRunsCompact, MovesEachHeadsOwnSurvivors) {
  for (const uint32_t dh : {64u, 80u, 128u, 256u}) {
    check({0, 1, 63, 64, 65, 1000, 4000}, 33, dh, {3, 0, 66, 40, 68, 999, 3000});
    check({0, 1, 63, 64, 65, 1000, 4000}, 0, dh, {0, 1, 63, 1, 64, 100, 3999});
  }
  check({4000, 0, 0, 64}, 1, 64, {4001, 1, 0, 10});
}

TEST_P(KvRunsCompact, AppendsTheChunkAfterEachHeadsEntries) {
  for (const uint32_t rows : {1u, 33u, 130u}) check({0, 1, 63, 64, 65, 1000, 3900}, rows, 64, {});
}

// ---- bits ----

// A selecting step of a single row, with attention to its lists and to all entries, on 1, 2 and 5 workers,
// with runs in order, with gaps, and in reverse order: the bits must be the same (methods 8.3).
TEST_P(KvRuns, NeitherThreadsNorThePlaceOfRunsChangeABit) {
  const Entries entries = {3000, 63, 0, 900};
  const uint32_t group = 4, dh = 64, kv_heads = 4, heads = kv_heads * group, width = heads * dh,
                 capacity = 3100, list_capacity = 1 + 384;
  const Rotation rotation;
  std::vector<std::vector<uint32_t>> first;
  for (const uint32_t threads : {1u, 2u, 5u})
    for (const bool reversed : {false, true}) {
      open({.threads = threads});
      std::vector<HeadState> runs = unequal_heads(entries, 7);
      if (reversed)
        for (uint32_t head = 0, at = 1; head < kv_heads; ++head) {
          runs[kv_heads - 1 - head].first = at;
          at += runs[kv_heads - 1 - head].capacity + 2;
        }
      Random random;
      std::vector<uint16_t> k, v;
      for (auto* array : {&k, &v}) {
        *array = padded_rows(*array, size_t(layer_entries(runs)) * dh);
        for (const HeadState& run : runs) {
          const auto own = halves(random.floats(size_t(run.n_entries + 1) * dh));  // including the step's row
          std::copy(own.begin(), own.end(), array->begin() + size_t(run.first) * dh);
        }
      }
      size_for(kv_heads, group, dh, session_of(runs, 1, 64, capacity));
      const View q = input(random.floats(width, -3, 3)), keys = input(k), values = input(v),
                 table = input(rotation.table(4096)), scores = output<float>(heads * capacity),
                 lse = output<float>(heads), votes = output<float>(kv_heads * capacity),
                 list = output<uint32_t>(kv_heads * list_capacity), listed = output<float>(width),
                 dense = output<float>(width);
      run({.n_rows = 1, .position = 2500, .n_init = 16, .n_local = 64, .select_k = 304}, runs, 1,
          [&](Recorder& r) {
            Selecting{.q = q,
                      .k = keys,
                      .table = table,
                      .pos = {},
                      .gate = {},
                      .scores = scores,
                      .lse = lse,
                      .votes = votes,
                      .list = list,
                      .p = {.heads = kv_heads,
                            .group = group,
                            .head_dim = dh,
                            .row_stride = width,
                            .score_capacity = capacity,
                            .scale = 1,
                            .rope = rotation.params()},
                      .vote_capacity = capacity,
                      .list_capacity = list_capacity,
                      .window = 3}
                .record(r);
            AttentionParams p{.heads = kv_heads,
                              .group = group,
                              .head_dim = dh,
                              .row_stride = width,
                              .y_stride = width,
                              .source = kFromPool,
                              .list_capacity = list_capacity,
                              .scale = 0.125f,
                              .rope = rotation.params()};
            r.record(Attention{q, {keys}, {values}, list, table, {}, listed, {}, p});
            r.record(Attention{q, {keys}, {values}, {}, table, {}, dense, {}, p});
          });
      std::vector<std::vector<uint32_t>> got;
      for (const View& out : {scores, lse, votes, list, listed, dense}) got.push_back(get<uint32_t>(out));
      if (first.empty())
        first = got;
      else
        EXPECT_TRUE(got == first) << threads << " threads" << (reversed ? ", runs the other way round" : "");
    }
}

}  // namespace
}  // namespace thimble::test
