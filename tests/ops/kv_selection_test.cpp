// query_gate, token_score, vote and top_k, compared with plain loops in double precision and with the golden
// vectors of both methods: Locret's retention and TokenSelect's selection.
#include <map>
#include <set>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Entries = std::vector<uint32_t>;

class KvSelection : public OpTest {
 protected:
  // The retention of one head for pool and chunk scores.
  Entries retain(const std::vector<float>& pool, const std::vector<float>& chunk, uint32_t keep,
                 uint32_t protect_first, uint32_t protect_last) {
    const uint32_t n = static_cast<uint32_t>(pool.size() + chunk.size());
    const uint32_t entries = static_cast<uint32_t>(pool.size()), rows = static_cast<uint32_t>(chunk.size());
    const View scores = input(padded_rows(pool, entries + 1)),
               chunk_scores = chunk.empty() ? View{} : input(padded_rows(chunk, rows + 1)),
               list = output<uint32_t>(n + 1);
    const HeadState head{0, entries + 1, entries, keep, protect_first, protect_last};
    run({.n_rows = rows}, {head}, rows + 1, [&](Recorder& r) {
      r.record(TopK{scores,
                    chunk_scores,
                    {},
                    {},
                    list,
                    {.heads = 1,
                     .keep = kKeepOfHead,
                     .page = 1,
                     .score_capacity = entries + 1,
                     .chunk_capacity = rows + 1,
                     .list_capacity = n + 1}});
    });
    return list_of(get<uint32_t>(list), n + 1, 0);
  }

  // The operands of a selecting step of a layer; they stay on the device from step to step.
  struct Layer {
    uint32_t kv_heads, group, capacity, dh = 16;
    uint32_t scope = kVoteGroup;
    StepParams step{};
    std::vector<HeadState> heads{};
    uint32_t window = 0, vote_capacity = 0;
    View pos{}, scores{}, lse{}, votes{}, gate{}, list{};
    void set_entries(uint32_t n) {
      for (HeadState& head : heads) head.n_entries = n;
    }
  };
  // Heads with `entries` in the pool. Scores are [query heads][capacity]; positions equal entries unless
  // given.
  Layer layer(uint32_t kv_heads, uint32_t group, uint32_t capacity, uint32_t scope, uint32_t entries,
              const StepParams& step, const std::vector<float>& scores, std::vector<int32_t> positions = {}) {
    Layer l{kv_heads, group, capacity};
    l.scope = scope;
    l.step = step;
    l.heads = equal_heads(kv_heads, capacity, entries);
    if (positions.empty())
      for (uint32_t i = 0; i < kv_heads * capacity; ++i)
        positions.push_back(static_cast<int32_t>(i % capacity));
    l.pos = input(positions);
    l.scores = input(scores);
    std::vector<float> lse;
    for (uint32_t h = 0; h < kv_heads * group; ++h) {
      double sum = 0;
      for (uint32_t i = step.n_init; i < entries + step.n_rows - step.n_local; ++i)
        sum += std::exp(static_cast<double>(scores[h * capacity + i]));
      lse.push_back(static_cast<float>(std::log(sum)));
    }
    l.lse = input(lse);
    const bool by_position = scope == kVoteLayer;
    l.vote_capacity = by_position ? static_cast<uint32_t>(step.position) + step.n_rows + 5 : capacity;
    l.votes = output<float>(by_position ? l.vote_capacity : kv_heads * capacity);
    size_for(kv_heads, group, l.dh, session_of(l.heads, step.n_rows, capacity, l.vote_capacity));
    l.gate = input(std::vector<GateState>(1));
    l.list = output<uint32_t>(kv_heads * (capacity + 1));
    return l;
  }
  static void record_selection(Recorder& r, const Layer& l) {
    r.record(Vote{l.scores, l.lse, l.pos, l.gate, l.votes, vote_params(l)});
    r.record(TopK{l.votes, {}, l.pos, l.gate, l.list, select_params(l)});
  }
  void select(const Layer& l) {
    run(l.step, l.heads, l.step.n_rows, [&](Recorder& r) { record_selection(r, l); });
  }
  static VoteParams vote_params(const Layer& l) {
    return {.heads = l.kv_heads,
            .group = l.group,
            .scope = l.scope,
            .page = 1,
            .score_capacity = l.capacity,
            .vote_capacity = l.vote_capacity,
            .window = l.window};
  }
  static TopKParams select_params(const Layer& l) {
    return {.heads = l.kv_heads,
            .keep = kKeepOfStep,
            .page = 1,
            .by_position = l.scope == kVoteLayer,
            .score_capacity = l.vote_capacity,
            .list_capacity = l.capacity + 1};
  }
  Entries list(const Layer& l, uint32_t head = 0) {
    return list_of(get<uint32_t>(l.list), l.capacity + 1, head);
  }
};
THIMBLE_OP_TESTS(KvSelection);

// The expected list: sinks, the entries picked from the middle, then the local window.
Entries selection(const StepParams& s, uint32_t n, const Entries& picked) {
  Entries l;
  for (uint32_t i = 0; i < s.n_init; ++i) l.push_back(i);
  l.insert(l.end(), picked.begin(), picked.end());
  for (uint32_t i = n - s.n_local; i < n; ++i) l.push_back(i);
  return l;
}

// ---- retention ----

// Algorithms 8.6, with the positions that the list of each chunk stands for.
TEST_P(KvSelection, RetentionFollowsTheGoldenExample) {
  const std::vector<float> cis = {5, 1, 4, 2, 9, 0, 3, 8, 1};
  Entries kept;  // positions
  std::vector<float> pool;
  const auto chunk = [&](uint32_t first, uint32_t protect_last) {
    const std::vector<float> rows(cis.begin() + first, cis.begin() + first + 3);
    Entries all = kept, survivors;
    for (uint32_t i = 0; i < 3; ++i) all.push_back(first + i);
    std::vector<float> scores = pool;
    scores.insert(scores.end(), rows.begin(), rows.end());
    std::vector<float> next;
    for (uint32_t e : retain(pool, rows, 4, 0, protect_last)) {
      survivors.push_back(all[e]);
      next.push_back(scores[e]);
    }
    kept = survivors;
    pool = next;
  };
  chunk(0, 2);
  EXPECT_EQ(kept, (Entries{0, 1, 2}));
  chunk(3, 2);
  EXPECT_EQ(kept, (Entries{0, 2, 4, 5}));
  chunk(6, 0);
  EXPECT_EQ(kept, (Entries{0, 2, 4, 7}));
}

// The published algorithm as printed stores +inf in protected scores, so that they stay forever. Writing that
// into the scores gives a different result, so this test distinguishes the two.
TEST_P(KvSelection, RetentionLeavesProtectedScoresAsTheyAre) {
  EXPECT_EQ(retain({5, 1, 4}, {2, 9, 0}, 4, 0, 2), (Entries{0, 2, 4, 5}));
  EXPECT_EQ(retain({5, kInfinity, kInfinity}, {2, 9, 0}, 4, 0, 2), (Entries{1, 2, 4, 5}));
}

TEST_P(KvSelection, RetentionAgreesWithASort) {
  Random random;
  for (const uint32_t n : {1u, 31u, 33u, 64u, 1000u})
    for (const uint32_t keep : {1u, n / 3 + 1, n - 1, n, n + 7})
      for (const char* kind : {"spread", "ties", "close, but for one"}) {
        std::vector<float> scores = random.floats(n, -3, 3);
        for (float& s : scores) s = *kind == 't' ? std::trunc(s) : *kind == 'c' ? 1 + s / 1024 : s;
        if (*kind == 'c') scores[n / 2] = 1e30f;
        const uint32_t first = std::min(keep / 4, 3u), last = std::min(keep / 3, 10u), entries = n - n / 3;
        Entries want(std::min(n, keep));
        std::iota(want.begin(), want.end(), 0u);
        if (keep < n) {
          want = largest(scores, first, n - last, keep - first - last);
          for (uint32_t i = 0; i < first; ++i) want.push_back(i);
          for (uint32_t i = n - last; i < n; ++i) want.push_back(i);
          std::sort(want.begin(), want.end());
        }
        const auto middle = scores.begin() + entries;
        EXPECT_EQ(retain({scores.begin(), middle}, {middle, scores.end()}, keep, first, last), want)
            << "n " << n << " keep " << keep << ": " << kind;
      }
}

TEST_P(KvSelection, TiesGoToTheLargerPositionNanIsLowestAndZerosAreEqual) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(retain({1, 1, 1, 1}, {1}, 2, 0, 0), (Entries{3, 4}));
  EXPECT_EQ(retain({0.0f, -0.0f, 0.0f, -0.0f}, {}, 2, 0, 0), (Entries{2, 3}));
  EXPECT_EQ(retain({-0.0f, 0.0f, -1, -1e-40f}, {}, 2, 0, 0), (Entries{0, 1}));
  EXPECT_EQ(retain({nan, -kInfinity, -nan, -1e38f}, {kInfinity}, 2, 0, 0), (Entries{3, 4}));
  EXPECT_EQ(retain({nan, -kInfinity, -nan, -1e38f}, {kInfinity}, 3, 0, 0), (Entries{2, 3, 4}));
  EXPECT_EQ(retain({-kInfinity, nan, -kInfinity}, {}, 2, 0, 0), (Entries{1, 2}));
  EXPECT_EQ(retain({-2, -1, -3, 1e-40f}, {}, 2, 0, 0), (Entries{1, 3}));
}

TEST_P(KvSelection, HeadsRetainTheirOwn) {
  Random random;
  const uint32_t heads = 3, entries = 50, rows = 20, n = 70, keep = 30;
  const std::vector<float> pool = random.floats(heads * 60), chunk = random.floats(heads * 25);
  const View scores = input(pool), chunk_scores = input(chunk);
  for (const uint32_t in_runs : {0u, 1u}) {
    const View l = output<uint32_t>(heads * 80);
    run({.n_rows = rows}, equal_heads(heads, 60, entries, keep, 0, 5), rows, [&](Recorder& r) {
      r.record(TopK{scores,
                    chunk_scores,
                    {},
                    {},
                    l,
                    {.heads = heads,
                     .keep = kKeepOfHead,
                     .page = 1,
                     .in_runs = in_runs,
                     .score_capacity = in_runs ? 0 : 60u,
                     .chunk_capacity = 25,
                     .list_capacity = 80}});
    });
    for (uint32_t head = 0; head < heads; ++head) {
      std::vector<float> all(pool.begin() + head * 60, pool.begin() + head * 60 + entries);
      all.insert(all.end(), chunk.begin() + head * 25, chunk.begin() + head * 25 + rows);
      Entries want = largest(all, 0, n - 5, keep - 5);
      for (uint32_t i = n - 5; i < n; ++i) want.push_back(i);
      EXPECT_EQ(list_of(get<uint32_t>(l), 80, head), want);
    }
  }
}

// ---- scores ----

struct ScoreCase {
  uint32_t kv_heads, group, dh, rows;
  Rotation rotation;
  int32_t position = 5000;
  uint32_t middle = 680;  // entries that are scored
};

// Also methods 8.23: under list, the score is the rotary logit of a key that is n_local back, wherever the
// query is.
TEST_P(KvSelection, TokenScoreIsTheLogitOfAKeyAtTheLocalWindowsEdge) {
  std::vector<ScoreCase> cases = {{2, 4, 64, 1, {}},
                                  {2, 4, 64, 1, {}, 9000},
                                  {1, 7, 80, 3, {kRopeList, kRopeHalves, 80, 1.19}},
                                  {2, 1, 96, 9, {kRopeList, kRopeAdjacent, 40}},
                                  {2, 3, 128, 2, {kRopeOriginal, kRopeHalves, 128, 1.19}},
                                  {1, 7, 128, 512, {kRopeList, kRopeHalves, 128}}};
  const uint32_t middles[] = {1, 31, 33, 1000};
  for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u})
    for (const uint32_t group : {1u, 4u, 7u, 8u}) {
      const uint32_t variant = static_cast<uint32_t>(cases.size());
      cases.push_back({2,
                       group,
                       dh,
                       variant % 3 ? 1 : 33u,
                       {kRopeList, variant % 2 ? kRopeHalves : kRopeAdjacent, dh},
                       5000,
                       middles[variant % 4]});
    }
  // With weights of queries, a key is at position 0 and the query n_local after it.
  for (const uint32_t rows : {1u, 3u})
    if (!GetParam().starts_with("cuda"))
      cases.push_back(
          {2, 3, 80, rows, weighted({kRopeList, kRopeHalves, 64}, 80), static_cast<int32_t>(rows + 11), 33});
  if (takes_heads_of(576))
    for (const uint32_t group : {1u, 8u, 20u})
      cases.push_back({1, group, 576, group == 1 ? 33u : 1u, {kRopeList, kRopeHalves, 512}, 5000, 100});
  for (const ScoreCase& c : cases) {
    SCOPED_TRACE(::testing::Message() << "kv_heads " << c.kv_heads << " group " << c.group << " dh " << c.dh
                                      << " rows " << c.rows << " middle " << c.middle);
    clear();
    Random random{c.dh};
    const uint32_t heads = c.kv_heads * c.group, n_init = 7, n_local = c.rows + 11, end = n_init + c.middle,
                   n = end + n_local, entries = n - c.rows, capacity = n + 2, stride = heads * c.dh + 3;
    const std::vector<HeadState> runs = equal_heads(c.kv_heads, capacity, entries);
    size_for(c.kv_heads, c.group, c.dh, session_of(runs, c.rows + 1, 64, capacity));
    const auto k = halves(random.floats(c.kv_heads * capacity * c.dh));
    const auto q = random.floats(c.rows * stride);
    const View x = input(padded_rows(q, (c.rows + 1) * stride)), keys = input(k),
               table = input(c.rotation.table(9100)), scores = output<float>(heads * capacity),
               lse = output<float>(heads);
    const float scale = c.group == 3 ? 0.5f : 1;
    run({.n_rows = c.rows,
         .position = c.position,
         .n_init = n_init,
         .n_local = n_local,
         .select_k = c.middle / 7},
        runs, c.rows + 1, [&](Recorder& r) {
          r.record(TokenScore{x,
                              {keys},
                              table,
                              {},
                              scores,
                              lse,
                              {.heads = c.kv_heads,
                               .group = c.group,
                               .head_dim = c.dh,
                               .row_stride = stride,
                               .score_capacity = capacity,
                               .equal_heads = 1,
                               .scale = scale,
                               .rope = c.rotation.params()}});
        });
    const auto got = get<float>(scores), got_lse = get<float>(lse);
    Rotation plain = c.rotation;  // the model's factor applies once
    plain.factor = 1;
    for (uint32_t h = 0; h < heads; ++h) {
      // Queries and keys both rotated, n_local apart. The op computes this in another way, but the result is
      // equal.
      std::vector<double> query(c.dh);
      for (uint32_t row = 0; row < c.rows; ++row) {
        const auto rotated =
            c.rotation.rotated_query(doubles(q, row * stride + h * c.dh, c.dh), c.position + double(row));
        for (uint32_t e = 0; e < c.dh; ++e) query[e] += scale * rotated[e] / c.rows;
      }
      double sum = 0;
      for (uint32_t i = 0; i < capacity; ++i) {
        const uint32_t at = h * capacity + i;
        if (i < n_init || i >= end) {
          ASSERT_TRUE(is_poison(got, at, 1)) << "entry " << i << " is not a candidate";
          continue;
        }
        auto key = doubles(k, (h / c.group * capacity + i) * size_t(c.dh), c.dh);
        if (c.rotation.mode == kRopeList) key = plain.rotated(key, c.position - double(n_local));
        // A sum of dh products of numbers below 1.2. Queries are rotated, averaged over `rows` and scaled
        // before; they may be sums of two f16 vectors, which are off by 2^-20 of a channel.
        ASSERT_NEAR(got[at], dot(query, key), 1.44 * c.dh * (c.dh + 24 + c.rows) * 0x1p-24)
            << "head " << h << " entry " << i;
        sum += std::exp(static_cast<double>(got[at]));
      }
      // Exponentials and logarithms to about 2^-22, 64 + 1000/64 additions; differences of numbers below 32
      // and the result are rounded by 2^-20.
      ASSERT_NEAR(got_lse[h], std::log(sum), 100 * 0x1p-24 + 0x1p-19);
    }
  }
}

// ---- votes ----

TEST_P(KvSelection, GroupVotesSumToTheGroupAndIgnoreAConstant) {  // methods 8.18, 8.19, 8.27
  Random random;
  const uint32_t capacity = 300, n = 280;
  for (const uint32_t group : {1u, 4u, 7u}) {
    const StepParams step{.n_rows = 1, .position = 500, .n_init = 5, .n_local = 16, .select_k = 40};
    std::vector<float> scores = random.floats(2 * group * capacity, -20, 20);
    const Layer l = layer(2, group, capacity, kVoteGroup, n - 1, step, scores);
    select(l);
    for (uint32_t i = 0; i < capacity; ++i) scores[i] += 3;  // head 0
    const Layer shifted = layer(2, group, capacity, kVoteGroup, n - 1, step, scores);
    select(shifted);
    const auto votes = get<float>(l.votes), shifted_votes = get<float>(shifted.votes);
    for (uint32_t head = 0; head < 2; ++head) {
      double sum = 0;
      std::vector<float> direct(capacity, -kInfinity);
      for (uint32_t i = 0; i < n; ++i) {
        const float vote = votes[head * capacity + i];
        if (i < 5 || i >= n - 16) {
          EXPECT_EQ(vote, -kInfinity);
          continue;
        }
        sum += std::exp(static_cast<double>(vote));
        // Scores below 32 round by 2^-20, and so does their log-sum-exp: each vote changes by at most 4 of
        // those.
        EXPECT_NEAR(vote, shifted_votes[head * capacity + i], 4 * 0x1p-20);
      }
      // The log-sum-exp was rounded from a number below 32, and so were votes; the exponentials of votes have
      // smaller errors.
      EXPECT_NEAR(sum, group, group * 4 * 0x1p-20);
      EXPECT_EQ(list(l, head),
                selection(step, n,
                          largest({votes.begin() + head * capacity, votes.begin() + (head + 1) * capacity}, 5,
                                  n - 16, 40)));
    }
  }
}

TEST_P(KvSelection, SoftVotePicksWhatTheHeadsAgreeOn) {  // methods 8.19
  const std::vector<float> scores = {20, 10, 0, 9, 0, 3, 0, 9, 0, 3, 0, 9};
  for (const uint32_t scope : {kVoteGroup, kVoteLayer}) {
    const Layer l =
        layer(1, 3, 4, scope, 3, {.n_rows = 1, .position = 3, .n_local = 1, .select_k = 1}, scores);
    select(l);
    const auto votes = get<float>(l.votes);
    const double want[] = {1.0905, 1.8189, 0.0906};
    for (int i = 0; i < 3; ++i)
      EXPECT_NEAR(std::exp(votes[i]), want[i], 5e-5) << "to the four places that are given";
    EXPECT_EQ(votes[3], -kInfinity);
    EXPECT_EQ(list(l), (Entries{1, 3}));
  }
}

TEST_P(KvSelection, KeysOfZeroVoteUniformlyForTheirOwnHeads) {  // methods 8.26
  Random random;
  const uint32_t n = 40, dh = 16;
  const std::vector<HeadState> runs = equal_heads(2, n, n - 1);
  size_for(2, 2, dh, session_of(runs, 1, n, n));
  std::vector<uint16_t> k = halves(random.floats(2 * n * dh, -4, 4));
  std::fill(k.begin() + n * dh, k.end(), uint16_t{0});  // KV head 1
  const View x = input(random.floats(4 * dh, -4, 4)), keys = input(k),
             table = input(Rotation{.n_rot = dh}.table(64)), scores = output<float>(4 * n),
             lse = output<float>(4);
  run({.n_rows = 1, .position = 1, .n_local = 8, .select_k = 4}, runs, 1, [&](Recorder& r) {
    r.record(TokenScore{x,
                        {keys},
                        table,
                        {},
                        scores,
                        lse,
                        {.heads = 2,
                         .group = 2,
                         .head_dim = dh,
                         .row_stride = 4 * dh,
                         .score_capacity = n,
                         .equal_heads = 1,
                         .scale = 1,
                         .rope = Rotation{.n_rot = dh}.params()}});
  });
  const auto got = get<float>(scores);
  for (uint32_t h = 0; h < 4; ++h) {
    const auto [low, high] = std::minmax_element(got.begin() + h * n, got.begin() + h * n + 32);
    EXPECT_EQ(*low == *high, h >= 2) << "head " << h;
  }
  EXPECT_NEAR(get<float>(lse)[3], std::log(32.0), 0x1p-21);
}

TEST_P(KvSelection, LayerVotesAddUpForHeadsThatHoldTheSamePosition) {
  Random random;
  const uint32_t heads = 3, group = 2, entries = 400, capacity = 410, rows = 3, n = entries + rows;
  const StepParams step{.n_rows = rows, .position = 2000, .n_init = 4, .n_local = 30, .select_k = 50};
  std::vector<int32_t> pos;
  for (uint32_t head = 0; head < heads; ++head) {
    Entries held = some_entries(random, 2000, entries, 10);
    for (uint32_t i = 0; i < rows; ++i) held.push_back(2000 + i);
    held.resize(capacity, 0);
    pos.insert(pos.end(), held.begin(), held.end());
  }
  const auto scores = random.floats(heads * group * capacity, -20, 20);
  const Layer l = layer(heads, group, capacity, kVoteLayer, entries, step, scores, pos);
  select(l);
  const auto votes = get<float>(l.votes), lse = get<float>(l.lse);
  std::map<uint32_t, double> want;
  for (uint32_t h = 0; h < heads * group; ++h)
    for (uint32_t i = 4; i < n - 30; ++i)
      want[static_cast<uint32_t>(pos[h / group * capacity + i])] +=
          std::exp(static_cast<double>(scores[h * capacity + i]) - static_cast<double>(lse[h]));
  for (uint32_t p = 0; p < 2000 + rows; ++p) {
    if (!want.count(p))
      ASSERT_EQ(votes[p], -kInfinity) << "nobody holds position " << p;
    else  // differences of numbers below 64 round by 2^-19; exponentials and logarithms by less
      ASSERT_NEAR(votes[p], std::log(want[p]), 2 * 0x1p-19) << "position " << p;
  }
  // Algorithms 8.40: each head lists those of the layer's positions that it holds.
  const Entries chosen = largest(votes, 0, 2000 + rows, 50);
  const std::set<uint32_t> set(chosen.begin(), chosen.end());
  std::set<size_t> lengths;
  for (uint32_t head = 0; head < heads; ++head) {
    Entries picked;
    for (uint32_t i = 4; i < n - 30; ++i)
      if (set.count(static_cast<uint32_t>(pos[head * capacity + i]))) picked.push_back(i);
    EXPECT_EQ(list(l, head), selection(step, n, picked));
    lengths.insert(list(l, head).size());
  }
  EXPECT_GT(lengths.size(), 1u) << "the test needs heads that hold different numbers of the chosen";
}

TEST_P(KvSelection, GroupListsCaptureAtLeastTheVotesOfLayerLists) {  // methods 8.38
  Random random;
  const uint32_t heads = 4, group = 2, n = 300;
  const auto scores = random.floats(heads * group * n, -8, 8);
  const StepParams step{.n_rows = 1, .position = n - 1, .n_init = 4, .n_local = 10, .select_k = 30};
  const Layer own = layer(heads, group, n, kVoteGroup, n - 1, step, scores);
  select(own);
  const Layer shared = layer(heads, group, n, kVoteLayer, n - 1, step, scores);
  select(shared);
  const auto votes = get<float>(own.votes);
  for (uint32_t head = 0; head < heads; ++head) {
    const auto mass = [&](const Entries& entries) {
      double sum = 0;
      for (uint32_t e : entries) sum += std::exp(static_cast<double>(votes[head * n + e]));
      return sum;
    };
    EXPECT_GT(mass(list(own, head)), mass(list(shared, head)));
    EXPECT_EQ(list(own, head).size(), 44u);
    EXPECT_EQ(list(shared, head), list(shared, 0)) << "nothing was evicted, so all heads hold all positions";
  }
}

TEST_P(KvSelection, MaxPoolWidensVotes) {  // methods 8.25
  // With one head, votes are scores minus a constant.
  const std::vector<float> scores = {9, 1, 0, 0, 5, 0, 0, 9, 9};
  for (const uint32_t scope : {kVoteGroup, kVoteLayer})
    for (const uint32_t window : {0u, 1u, 2u, 3u, 4u, 5u, 32u}) {
      Layer l = layer(1, 1, 9, scope, 8,
                      {.n_rows = 1, .position = 8, .n_init = 1, .n_local = 2, .select_k = 2}, scores);
      l.window = window;
      select(l);
      const float lse = get<float>(l.lse)[0];
      std::vector<float> want = {1, 0, 0, 5, 0, 0};
      if (window == 2) want = {1, 0, 5, 5, 0, -kInfinity};
      if (window == 3) want = {1, 1, 5, 5, 5, 0};
      if (window == 4) want = {1, 5, 5, 5, 5, -kInfinity};
      if (window == 5) want = {1, 5, 5, 5, 5, 5};
      if (window == 32) want = {5, 5, 5, 5, 5, -kInfinity};
      const auto votes = get<float>(l.votes);
      for (uint32_t i = 0; i < 6; ++i) {
        if (want[i] == -kInfinity)
          EXPECT_EQ(votes[1 + i], want[i]);
        else
          EXPECT_NEAR(votes[1 + i], want[i] - lse, 0x1p-20) << "window " << window << " vote " << i;
      }
      EXPECT_EQ(votes[0], -kInfinity);
      EXPECT_EQ(votes[7], -kInfinity);
      // Ties go to the larger position; the last candidate of an even window has no vote
      if (window == 3 || window == 32) {
        EXPECT_EQ(list(l), (Entries{0, 4, 5, 7, 8}));
      }
    }
}

TEST_P(KvSelection, LayerMaxPoolRunsOverCandidatesNotOverGaps) {
  const std::vector<float> scores = {1, 0, 0, 5, 0, 0, 9};
  Layer l = layer(1, 1, 7, kVoteLayer, 6, {.n_rows = 1, .position = 500, .n_local = 1, .select_k = 2}, scores,
                  {2, 30, 31, 99, 301, 302, 500});
  l.window = 3;
  select(l);
  const auto votes = get<float>(l.votes);
  const float lse = get<float>(l.lse)[0];
  const std::map<uint32_t, float> want = {{2, 1}, {30, 1}, {31, 5}, {99, 5}, {301, 5}, {302, 0}};
  for (uint32_t p = 0; p <= 500; ++p) {
    if (want.count(p))
      EXPECT_NEAR(votes[p], want.at(p) - lse, 0x1p-20) << "position " << p;
    else
      EXPECT_EQ(votes[p], -kInfinity) << "position " << p;
  }
}

TEST_P(KvSelection, VotesIgnoreNanScores) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> scores = {1, nan, -kInfinity, 2, 0, 1, 2, nan, -kInfinity, 0};
  Layer l = layer(1, 2, 5, kVoteGroup, 4, {.n_rows = 1, .position = 4, .n_local = 1, .select_k = 2}, scores);
  l.lse = input(std::vector<float>{2.0f, 2.5f});
  select(l);
  const auto votes = get<float>(l.votes);
  EXPECT_NEAR(votes[0], std::log(std::exp(-1.0) + std::exp(-1.5)), 0x1p-20);
  EXPECT_NEAR(votes[1], -0.5, 0x1p-20);
  EXPECT_EQ(votes[2], -kInfinity);
  EXPECT_NEAR(votes[3], 0.0, 0x1p-20);
  EXPECT_EQ(list(l), (Entries{1, 3, 4}));
}

// ---- lists ----

TEST_P(KvSelection, OneMoreSelectedEntryOnlyAddsOne) {  // methods 8.2, 8.20, 8.21
  Random random;
  const uint32_t n = 60;
  auto scores = random.floats(2 * n, -5, 5);
  for (float& s : scores) s = std::trunc(s);  // ties
  for (const uint32_t scope : {kVoteGroup, kVoteLayer}) {
    Entries before;
    for (uint32_t k = 0; k <= 48; ++k) {
      const Layer l =
          layer(1, 2, n, scope, n - 1,
                {.n_rows = 1, .position = n - 1, .n_init = 4, .n_local = 8, .select_k = k}, scores);
      select(l);
      const Entries now = list(l);
      EXPECT_EQ(now.size(), 12 + k) << "at 48 everything is listed";
      EXPECT_TRUE(std::is_sorted(now.begin(), now.end()) &&
                  std::adjacent_find(now.begin(), now.end()) == now.end());
      EXPECT_TRUE(std::includes(now.begin(), now.end(), before.begin(), before.end())) << "k " << k;
      before = now;
      if (k == 48) {
        EXPECT_TRUE(is_poison(get<float>(l.votes), 0, 1)) << "nothing is selected, so nobody votes";
      }
    }
  }
}

TEST_P(KvSelection, EverythingIsListedWithoutScoresBelowTheBudget) {
  const uint32_t n = 30, dh = 16;
  Random random;
  const StepParams step{.n_rows = 1, .position = n - 1, .n_init = 5, .n_local = 5, .select_k = 20};
  Layer l = layer(2, 1, n, kVoteGroup, n - 1, step, random.floats(2 * n));
  const View gate = inout(std::vector<GateState>{{.hit = 1, .valid = 1, .hits = 3, .misses = 4}}),
             keys = input(halves(random.floats(2 * n * dh))), x = input(random.floats(2 * dh)),
             cached = output<float>(2 * dh), scores = output<float>(2 * n), lse = output<float>(2),
             table = input(Rotation{.n_rot = dh}.table(64));
  l.gate = gate;
  run(step, l.heads, 1, [&](Recorder& r) {
    r.record(QueryGate{x, cached, gate, {.cols = 2 * dh, .heads = 2}});
    r.record(TokenScore{x,
                        {keys},
                        table,
                        gate,
                        scores,
                        lse,
                        {.heads = 2,
                         .group = 1,
                         .head_dim = dh,
                         .row_stride = 2 * dh,
                         .score_capacity = n,
                         .equal_heads = 1,
                         .scale = 1,
                         .rope = Rotation{.n_rot = dh}.params()}});
    r.record(Vote{scores, lse, l.pos, gate, l.votes, vote_params(l)});
    r.record(TopK{l.votes, {}, l.pos, gate, l.list, select_params(l)});
  });
  Entries all(n);
  std::iota(all.begin(), all.end(), 0u);
  EXPECT_EQ(list(l, 0), all);
  EXPECT_EQ(list(l, 1), all);
  EXPECT_TRUE(is_poison(get<float>(scores), 0, 2 * n) && is_poison(get<float>(lse), 0, 2) &&
              is_poison(get<float>(l.votes), 0, 2 * n) && is_poison(get<float>(cached), 0, 2 * dh));
  const GateState g = get<GateState>(gate)[0];
  EXPECT_EQ(std::vector<uint32_t>({g.hit, g.valid, g.hits, g.misses}), (std::vector<uint32_t>{0, 0, 3, 4}));
}

// A device may count votes in bins that it chooses with a sample. Each head has a different distribution of
// votes. For each bin scheme, some number of picks puts the smallest picked vote where the bins are bad.
TEST_P(KvSelection, ListsFollowVotesOfEveryKind) {
  constexpr uint32_t kKinds = 12, group = 5, n_init = 8, n_local = 32;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float odd[] = {nan, -nan, -kInfinity, -0.0f, 1e-40f, -1, 1, -50};
  for (const uint32_t n : {4000u, 16740u}) {
    Random random{n};
    const uint32_t size = n - n_init - n_local, capacity = n + 3;
    // Vulkan samples, with 512 to 128 threads, 64 to 16 runs of 8 entries at equal distances.
    std::vector<bool> sampled(size);
    for (uint32_t i = 0; i < 512; ++i) sampled[i / 8 * size / 64 + i % 8] = true;
    std::vector<float> scores, votes_like;
    for (uint32_t kind = 0; kind < kKinds; ++kind) {
      std::vector<float> head(capacity, 40.0f);  // larger than the score of any candidate
      for (uint32_t i = 0; i < size; ++i) {
        float& s = head[n_init + i];
        switch (kind) {
          case 0:  // all different
            s = random.uniform(-30, -1);
            break;
          case 1:  // all equal
            s = -7;
            break;
          case 2:  // many ties
            s = std::trunc(random.uniform(-12, -8));
            break;
          case 3:  // NaN, infinities and signed zeros
            s = odd[random.below(8)];
            break;
          case 4:  // all -inf or NaN
            s = i % 2 ? nan : -kInfinity;
            break;
          case 5:  // close together, with one far away
            s = i == 20 * size / 64 ? -kInfinity : -9 - random.uniform(0, 1) / 1024;
            break;
          case 6:  // a few hundred above all sampled ones
            s = (sampled[i] || i % 16 ? -20.0f : -10.0f) + random.uniform(0, 1);
            break;
          case 7:  // nearly all above all sampled ones
            s = (sampled[i] ? -20.0f : -10.0f) + random.uniform(0, 1);
            break;
          case 8:  // nearly all below all sampled ones, and so close that they are in one bin
            s = sampled[i] ? random.uniform(9.601f, 9.602f) : random.uniform(9.59f, 9.5999f);
            break;
          case 9:  // some below all sampled ones
            s = (sampled[i] || i % 40 ? -3.0f : -300.0f) + random.uniform(0, 1);
            break;
          case 10:  // ties above all sampled ones
            s = sampled[i] ? random.uniform(-12, -11) : -5;
            break;
          default:  // ascending, so that neighbours are similar
            s = -20 + 10 * static_cast<float>(i) / static_cast<float>(size);
        }
      }
      for (uint32_t query = 0; query < group; ++query) scores.insert(scores.end(), head.begin(), head.end());
      votes_like.insert(votes_like.end(), head.begin(), head.end());
    }
    const StepParams step{
        .n_rows = 1, .position = static_cast<int32_t>(n) - 1, .n_init = n_init, .n_local = n_local};
    clear();
    Layer l = layer(kKinds, group, capacity, kVoteGroup, n - 1, step, scores);
    l.lse = input(std::vector<float>(kKinds * group));
    for (const uint32_t k :
         {0u, 1u, 2u, 30u, size / 20, size / 8, size / 2, size - 600, size - 80, size - 1}) {
      l.step.select_k = k;
      restore();
      select(l);
      const auto votes = get<float>(l.votes);
      for (uint32_t head = 0; head < kKinds; ++head) {
        SCOPED_TRACE(::testing::Message() << n << " entries, " << k << " picked, kind " << head);
        const std::vector<float> own(votes.begin() + head * capacity, votes.begin() + head * capacity + n);
        for (uint32_t i = 0; i < n; ++i) {
          const float like = votes_like[head * capacity + i];
          if (i < n_init || i >= n - n_local || std::isnan(like) || like == -kInfinity)
            ASSERT_EQ(own[i], -kInfinity) << "entry " << i;
          else  // sums of numbers below 512 and of numbers below 8 round by 2^-16 at most
            ASSERT_NEAR(own[i], double{like} + std::log(double{group}), 0x1p-15) << "entry " << i;
        }
        EXPECT_TRUE(list(l, head) == selection(l.step, n, largest(own, n_init, n - n_local, k)));
      }
    }
  }
}

// A device may divide the candidates, and there may be fewer candidates than parts.
TEST_P(KvSelection, AFewVotesAreListed) {
  Random random;
  for (const uint32_t size : {1u, 2u, 15u, 17u, 127u, 129u, 511u, 513u})
    for (const uint32_t k : {0u, size / 2, size - 1}) {
      clear();
      const uint32_t n = 3 + size + 4, heads = 3, capacity = n + 1;
      const Layer l = layer(
          heads, 2, capacity, kVoteGroup, n - 1,
          {.n_rows = 1, .position = static_cast<int32_t>(n) - 1, .n_init = 3, .n_local = 4, .select_k = k},
          random.floats(heads * 2 * capacity, -9, 9));
      select(l);
      const auto votes = get<float>(l.votes);
      for (uint32_t head = 0; head < heads; ++head) {
        const std::vector<float> own(votes.begin() + head * capacity, votes.begin() + head * capacity + n);
        EXPECT_EQ(list(l, head), selection(l.step, n, largest(own, 3, n - 4, k)))
            << size << " candidates, " << k;
      }
    }
}

// Neither the state of a step, nor the vote scope of another program, may affect the next step.
TEST_P(KvSelection, ScopesHitsAndMissesMayAlternate) {
  Random random;
  const uint32_t heads = 3, group = 2, capacity = 3000, vote_capacity = 4000, n_init = 5, n_local = 40;
  std::vector<int32_t> pos;
  for (uint32_t head = 0; head < heads; ++head) {
    Entries held = some_entries(random, vote_capacity, capacity, 100);
    pos.insert(pos.end(), held.begin(), held.end());
  }
  const auto scores = random.floats(heads * group * capacity, -20, 20);
  Layer l{heads, group, capacity};
  l.vote_capacity = vote_capacity;
  l.heads = equal_heads(heads, capacity, 0);
  size_for(heads, group, l.dh, session_of(l.heads, 1, 64, vote_capacity));
  l.pos = input(pos);
  l.scores = input(scores);
  l.lse = input(random.floats(heads * group));
  l.votes = output<float>(heads * vote_capacity);
  l.gate = inout(std::vector<GateState>(1));
  l.list = output<uint32_t>(heads * (capacity + 1));
  std::unique_ptr<Program> programs[2];  // by scope
  for (const uint32_t scope : {kVoteLayer, kVoteGroup}) {
    l.scope = scope;
    programs[scope] = record(1, [&](Recorder& r) { record_selection(r, l); });
    ASSERT_TRUE(programs[scope]);
  }

  struct Turn {
    uint32_t n, k, scope;
    bool hit = false;
  };
  std::vector<Entries> before(heads);  // the previous picks
  std::vector<uint32_t> votes_before;
  for (const Turn t :
       {Turn{2900, 300, kVoteGroup}, Turn{2901, 300, kVoteGroup, true}, Turn{2902, 300, kVoteGroup},
        Turn{2903, 300, kVoteLayer}, Turn{2904, 300, kVoteLayer, true}, Turn{345, 300, kVoteGroup},
        Turn{346, 300, kVoteGroup}, Turn{50, 10, kVoteLayer}, Turn{51, 5, kVoteGroup},
        Turn{3000, 2954, kVoteGroup}, Turn{3000, 1, kVoteGroup}, Turn{3000, 700, kVoteLayer},
        Turn{3000, 700, kVoteGroup}}) {
    SCOPED_TRACE(::testing::Message()
                 << t.n << " entries, " << t.k << " picked, scope " << t.scope << (t.hit ? ", a hit" : ""));
    const uint32_t end = t.n - n_local;
    l.step = {.n_rows = 1,
              .position = static_cast<int32_t>(vote_capacity) - 1,
              .n_init = n_init,
              .n_local = n_local,
              .select_k = t.k};
    l.set_entries(t.n - 1);
    put(l.gate, std::vector<GateState>{{.hit = t.hit}});
    run(*programs[t.scope], l.step, l.heads);
    if (t.hit) {
      EXPECT_EQ(get<uint32_t>(l.votes), votes_before) << "nobody votes";
    }
    votes_before = get<uint32_t>(l.votes);
    const auto votes = get<float>(l.votes);
    for (uint32_t head = 0; head < heads; ++head) {
      Entries& picked = before[head];
      if (t.n - n_init - n_local <= t.k) {
        picked.resize(end - n_init);
        std::iota(picked.begin(), picked.end(), n_init);
      } else if (!t.hit) {
        const std::vector<float> own(
            votes.begin() + (t.scope == kVoteGroup ? head * vote_capacity : 0),
            votes.begin() + (t.scope == kVoteGroup ? head * vote_capacity + t.n : vote_capacity));
        const Entries chosen =
            t.scope == kVoteGroup ? largest(own, n_init, end, t.k) : largest(own, 0, vote_capacity, t.k);
        const std::set<uint32_t> set(chosen.begin(), chosen.end());
        picked.clear();
        for (uint32_t i = n_init; i < end; ++i)
          if (set.count(t.scope == kVoteGroup ? i : static_cast<uint32_t>(pos[head * capacity + i])))
            picked.push_back(i);
      }
      EXPECT_EQ(list(l, head), selection(l.step, t.n, picked)) << "head " << head;
    }
  }
}

// A device may delay a vote until the list that uses it.
TEST_P(KvSelection, VotesAreMadeWhateverOpFollows) {
  Random random;
  const uint32_t n = 300, heads = 2;
  const auto scores = random.floats(heads * n, -9, 9);
  const StepParams step{.n_rows = 1, .position = n - 1, .n_init = 4, .n_local = 8, .select_k = 50};
  const Layer l = layer(heads, 1, n, kVoteGroup, n - 1, step, scores);
  const std::vector<float> others = random.floats(heads * n);
  const View other = input(others), y = output<float>(2);
  const Weight w = weight(DType::kF32, 2, 32, std::vector<std::byte>(2 * 32 * 4));  // zeros
  const auto vote = [&](Recorder& r, const View& from) {
    r.record(Vote{from, l.lse, l.pos, l.gate, l.votes, vote_params(l)});
  };
  const auto top_k = [&](Recorder& r, const View& from) {
    r.record(TopK{from, {}, l.pos, l.gate, l.list, select_params(l)});
  };
  struct Case {
    const char* what;
    bool lists_votes, lists_others, multiplies;
    Record ops;
  };
  for (const Case& c : {Case{"nothing", false, false, false, [&](Recorder& r) { vote(r, l.scores); }},
                        {"a product of them", false, false, true,
                         [&](Recorder& r) {
                           vote(r, l.scores);
                           r.record(Linear{l.votes.slice(16 * sizeof(float), 32 * sizeof(float)),
                                           w,
                                           {},
                                           y,
                                           {.in_cols = 32, .out_cols = 2, .x_stride = 32, .y_stride = 2}});
                         }},
                        {"a list of other scores", false, true, false,
                         [&](Recorder& r) {
                           vote(r, l.scores);
                           top_k(r, other);
                         }},
                        {"another vote", true, false, false, [&](Recorder& r) {
                           vote(r, other);
                           vote(r, l.scores);
                           top_k(r, l.votes);
                         }}}) {
    SCOPED_TRACE(c.what);
    restore();
    run(step, l.heads, 1, c.ops);
    const auto votes = get<float>(l.votes), lse = get<float>(l.lse);
    for (uint32_t head = 0; head < heads; ++head) {
      for (uint32_t i = 4; i < n - 8; ++i)
        ASSERT_NEAR(votes[head * n + i], double{scores[head * n + i]} - double{lse[head]}, 0x1p-19)
            << "entry " << i;
      const auto& listed = c.lists_others ? others : votes;
      const std::vector<float> own(listed.begin() + head * n, listed.begin() + (head + 1) * n);
      if (c.lists_votes || c.lists_others) {
        EXPECT_EQ(list(l, head), selection(step, n, largest(own, 4, n - 8, 50)));
      }
    }
    if (c.multiplies) {
      EXPECT_EQ(get<float>(y), (std::vector<float>{0, 0})) << "poison was read for votes";
    }
  }
}

// ---- the selection cache ----

class KvGate : public KvSelection {
 protected:
  static constexpr uint32_t kCols = 100;
  const std::vector<HeadState> runs_ = equal_heads(2, 120, 99);
  View cached_, gate_;
  StepParams step_{.n_rows = 1,
                   .position = 500,
                   .n_init = 4,
                   .n_local = 16,
                   .select_k = 10,
                   .theta = 0.9f,
                   .generation = 7};

  void SetUp() override {
    KvSelection::SetUp();
    cached_ = output<float>(kCols);
    gate_ = inout(std::vector<GateState>(1));
  }
  bool hits(const std::vector<float>& q) {
    const View x = input(q);
    run(step_, runs_, 1, [&](Recorder& r) {
      r.record(QueryGate{x, cached_, gate_, {.cols = kCols, .heads = 2}});
    });
    return get<GateState>(gate_)[0].hit != 0;
  }
};
THIMBLE_OP_TESTS(KvGate);

TEST_P(KvGate, HitsWhenTheQueryIsCloseToTheOneThatSelected) {  // methods 8.22
  // Unit vectors in a plane: the cosine is that of the angle between them.
  const auto at_cosine = [](double cosine) {
    std::vector<float> q(kCols);
    q[3] = static_cast<float>(5 * cosine);
    q[71] = static_cast<float>(5 * std::sqrt(1 - cosine * cosine));
    return q;
  };
  EXPECT_FALSE(hits(at_cosine(1))) << "nothing is cached yet";
  EXPECT_TRUE(hits(at_cosine(1)));
  EXPECT_TRUE(hits(at_cosine(0.95)));
  EXPECT_TRUE(hits(at_cosine(0.901)));
  EXPECT_EQ(get<float>(cached_), at_cosine(1)) << "the query that selected, not the last one";
  EXPECT_FALSE(hits(at_cosine(0.899)));
  EXPECT_EQ(get<float>(cached_), at_cosine(0.899));
  EXPECT_TRUE(hits(at_cosine(0.899)));
  const GateState g = get<GateState>(gate_)[0];
  EXPECT_EQ(g.hits, 4u);
  EXPECT_EQ(g.misses, 2u);
  EXPECT_EQ(g.valid, 1u);
}

TEST_P(KvGate, ThetaOfOneNeverHitsAndMinusOneAlwaysDoes) {  // methods 8.22
  Random random;
  step_.theta = 1;
  const auto q = random.floats(kCols);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(hits(q));
  step_.theta = -1;
  for (int i = 0; i < 8; ++i) {
    std::vector<float> any = i == 7 ? std::vector<float>(kCols) : random.floats(kCols, -1e3f, 1e3f);
    if (i == 6) std::transform(q.begin(), q.end(), any.begin(), [](float f) { return -f; });
    EXPECT_TRUE(hits(any)) << i;
  }
  for (int i = 0; i < 50; ++i) {  // equal queries hit for the largest theta below 1
    const auto any = random.floats(kCols, -30, 30);
    step_.theta = 1;
    EXPECT_FALSE(hits(any));
    step_.theta = std::nextafter(1.0f, 0.0f);
    EXPECT_TRUE(hits(any)) << i;
  }
}

// Equal queries hit for every theta below 1, whatever order a device adds in.
TEST_P(KvGate, ComparesQueriesOfEveryWidth) {
  Random random;
  for (const uint32_t cols : {1u, 31u, 33u, 1000u, 4096u, 8192u}) {
    const auto q = random.floats(cols, -30, 30);
    std::vector<float> other = q;
    for (uint32_t i = 0; i < cols; i += 2) other[i] = -other[i];  // a cosine far below 1
    const View x = inout(q), cached = output<float>(cols), gate = inout(std::vector<GateState>(1));
    step_.theta = std::nextafter(1.0f, 0.0f);
    std::vector<uint32_t> hits;
    for (const auto& query : {q, q, other, other, q}) {
      put(x, query);
      run(step_, runs_, 1, [&](Recorder& r) {
        r.record(QueryGate{x, cached, gate, {.cols = cols, .heads = 2}});
      });
      hits.push_back(get<GateState>(gate)[0].hit);
    }
    EXPECT_EQ(hits, (Entries{0, 1, 0, 1, 0})) << cols << " columns";
    EXPECT_EQ(get<float>(cached), q);
  }
}

TEST_P(KvGate, MissesOnceMoreThanHalfOfTheLocalWindowWasAppendedOrEntriesMoved) {
  Random random;
  const auto q = random.floats(kCols);
  EXPECT_FALSE(hits(q));
  step_.position += 8;  // n_local / 2
  EXPECT_TRUE(hits(q));
  step_.position += 1;
  EXPECT_FALSE(hits(q));
  step_.position += 8;
  EXPECT_TRUE(hits(q)) << "counted from the last miss";
  ++step_.generation;
  EXPECT_FALSE(hits(q));
  EXPECT_TRUE(hits(q));
}

TEST_P(KvGate, AHitKeepsTheSelectionAndRenewsTheLocalWindow) {  // methods 8.22
  Random random;
  const uint32_t capacity = 120;
  for (const uint32_t scope : {kVoteGroup, kVoteLayer}) {
    step_.position = 99;
    Layer l = layer(2, 1, capacity, scope, 99, step_, random.floats(2 * capacity));
    select(l);
    const Entries before[] = {list(l, 0), list(l, 1)};
    const auto votes = get<uint32_t>(l.votes);
    l.gate = input(std::vector<GateState>{{.hit = 1}});
    l.scores = input(random.floats(2 * capacity));
    l.set_entries(99 + 5);
    l.step.position += 5;
    select(l);
    EXPECT_EQ(get<uint32_t>(l.votes), votes);
    for (uint32_t head = 0; head < 2; ++head) {
      Entries want = before[head];
      for (uint32_t i = 0; i < step_.n_local; ++i) want[want.size() - step_.n_local + i] += 5;
      EXPECT_EQ(list(l, head), want);
    }
  }
}

// ---- all of them ----

// A whole selecting step, prefill attention and eviction on 1, 2 and 5 workers; three times on devices whose
// workers we do not control.
TEST_P(KvSelection, TheNumberOfThreadsChangesNoBit) {
  std::vector<std::vector<uint32_t>> first;
  for (const uint32_t threads : {1u, 2u, 5u}) {
    open({.threads = threads});
    Random random;
    const uint32_t heads = 2, group = 4, dh = 64, capacity = 2400, entries = 2000, rows = 200,
                   width = heads * group * dh;
    const std::vector<HeadState> runs = equal_heads(heads, capacity, entries, 1500, 0, 9);
    size_for(heads, group, dh, session_of(runs, rows, capacity, 2501));
    const Rotation rotation;
    const View q = input(random.floats(rows * width, -3, 3)),
               k = inout(halves(random.floats(heads * capacity * dh))),
               v = inout(halves(random.floats(heads * capacity * dh))), table = input(rotation.table(4096)),
               scores = output<float>(heads * group * capacity), lse = output<float>(heads * group),
               cis = inout(random.floats(heads * capacity)),
               chunk_k = input(halves(random.floats(heads * rows * dh))),
               chunk_v = input(halves(random.floats(heads * rows * dh))),
               chunk_cis = input(random.floats(heads * rows)),
               chunk_pos = input(std::vector<int32_t>(heads * rows, 7)), y = output<float>(width),
               all = output<float>(rows * width), ml = output<float>(rows * heads * group * 2),
               view_k = output<float>(heads * capacity * dh), view_v = output<float>(heads * capacity * dh);
    std::vector<int32_t> positions(heads * capacity);
    for (uint32_t i = 0; i < heads * capacity; ++i)
      positions[i] = static_cast<int32_t>(i % capacity + i % capacity / 9);
    const View pos = inout(positions), list = output<uint32_t>(heads * (capacity + 1));
    StepParams step{.n_rows = 1, .position = 2500, .n_init = 16, .n_local = 64, .select_k = 300};
    const View votes = output<float>(2501);
    AttentionParams attention{.heads = heads,
                              .group = group,
                              .head_dim = dh,
                              .row_stride = width,
                              .y_stride = width,
                              .source = kFromPool,
                              .list_capacity = capacity + 1,
                              .scale = 0.125f,
                              .rope = rotation.params()};
    run(step, runs, 1, [&](Recorder& r) {
      Selecting{.q = q,
                .k = k,
                .table = table,
                .pos = pos,
                .gate = {},
                .scores = scores,
                .lse = lse,
                .votes = votes,
                .list = list,
                .p = {.heads = heads,
                      .group = group,
                      .head_dim = dh,
                      .row_stride = width,
                      .score_capacity = capacity,
                      .scale = 1,
                      .rope = rotation.params()},
                .scope = kVoteLayer,
                .vote_capacity = 2501,
                .list_capacity = capacity + 1,
                .window = 3}
          .record(r);
      r.record(Attention{q, {k}, {v}, list, table, {}, y, {}, attention});
    });
    std::vector<std::vector<uint32_t>> got = {get<uint32_t>(votes), get<uint32_t>(list), get<uint32_t>(y)};
    step.n_rows = rows;
    attention.source = kFromView;
    attention.view_capacity = capacity;
    run(step, runs, rows, [&](Recorder& r) {
      r.record(KvView{{k},
                      {v},
                      {chunk_k},
                      {chunk_v},
                      {},
                      table,
                      view_k,
                      view_v,
                      {.heads = heads,
                       .head_dim = dh,
                       .chunk_capacity = rows,
                       .view_capacity = capacity,
                       .rope = rotation.params()}});
      r.record(Attention{q, {view_k}, {view_v}, {}, table, {}, all, ml, attention});
      r.record(TopK{cis,
                    chunk_cis,
                    {},
                    {},
                    list,
                    {.heads = heads,
                     .keep = kKeepOfHead,
                     .page = 1,
                     .in_runs = 1,
                     .chunk_capacity = rows,
                     .list_capacity = capacity + 1}});
      r.record(
          KvCompact{list,
                    {chunk_k},
                    {chunk_v},
                    chunk_pos,
                    chunk_cis,
                    {k},
                    {v},
                    pos,
                    cis,
                    {.heads = heads, .head_dim = dh, .chunk_capacity = rows, .list_capacity = capacity + 1}});
    });
    for (const View& out : {all, list, k, v, pos, cis}) got.push_back(get<uint32_t>(out));
    if (first.empty())
      first = got;
    else
      EXPECT_TRUE(got == first) << threads << " threads";
  }
}

}  // namespace
}  // namespace thimble::test
