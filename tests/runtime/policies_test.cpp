// Tests what retention and selection must do with every model: the invariants of the methods on whole
// sessions. Also compares the kept and selected sets with our numpy reference (tests/reference) on the demo
// model.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "tests/support/data.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"
#include "tests/support/watched.h"

namespace thimble::test {
namespace {

std::vector<int32_t> range(int32_t first, int32_t last) {
  std::vector<int32_t> v(static_cast<size_t>(last - first));
  std::iota(v.begin(), v.end(), first);
  return v;
}

SessionOptions dense(uint32_t pool = 256) { return {.pool = pool, .chunk = 32, .max_new = 32}; }

SessionOptions locret(const SeededModel& m, uint32_t pool, uint32_t chunk, uint32_t stabilizers,
                      uint32_t local) {
  return {.retainer = m.retainer,
          .retention = Retention::kLocret,
          .pool = pool,
          .chunk = chunk,
          .stabilizers = stabilizers,
          .local = local,
          .protect_init = 0,  // as published
          .max_new = 32};
}

SessionOptions selecting(SessionOptions o, uint32_t k, uint32_t init, uint32_t local, VoteScope vote) {
  o.selection = Selection::kTokenSelect;
  o.select_k = k;
  o.select_init = init;
  o.select_local = local;
  o.vote = vote;
  o.select_prefill = 0;
  if (vote == VoteScope::kLayer && o.retention != Retention::kNone) o.context = 4096;
  return o;
}

// A model with one layer and one KV head, in which token t has the retention score silu(scores[t]). It has
// one-hot embeddings, a value matrix that looks up the score, and a head that reads it there.
SeededModel scored_model(std::vector<float> scores) {
  Seeded s{.layers = 1,
           .d_model = 16,
           .heads = 2,
           .kv_heads = 1,
           .head_dim = 4,
           .d_ff = 16,
           .vocab = 16,
           .d_retain = 1};
  s.edit = [scores](const std::string& name, std::vector<float>& values) {
    const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
    const auto clear = [&] { std::fill(values.begin(), values.end(), 0.0f); };
    if (is("token_embd")) {
      clear();
      for (size_t t = 0; t < 16; ++t) values[t * 16 + t] = 1;  // 4 after the norm: one of 16 channels is set
    } else if (is("attn_norm")) {
      std::fill(values.begin(), values.end(), 1.0f);
    } else if (is("attn_v")) {
      clear();
      for (size_t t = 0; t < scores.size(); ++t) values[t] = scores[t] / 4;
    } else if (is("locret_fc1")) {
      clear();
      values[12] = 1;  // after two query heads and one key head of 4 channels
    } else if (is("locret_fc2")) {
      values[0] = 1;
    }
  };
  return seeded_model(s);
}

// ---- all policies ----

TEST(Policies, HaveAHostControlIfTheirRowScoresOnTheHost) {
  for (int32_t i = 0; const char* name = policy_name(Retention(i)); ++i)
    EXPECT_EQ(Policies({.retention = Retention(i)}).host() != nullptr,
              traits(Retention(i)).scored == Scored::kOnHost)
        << name;
}

TEST(Policies, EqualDenseAttentionIfTheBudgetCoversTheText) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(150), more = seeded_tokens(8, 64, 8);
  const auto run = [&](const SessionOptions& o) {
    const auto session = open_session(m.model, o);
    std::vector<float> logits = read(*session, tokens);
    for (const int32_t t : more) logits = accept(*session, t);
    return logits;
  };
  const std::vector<float> expected = run(dense());
  const auto retaining = [&](Retention retention, RetainScope scope) {
    SessionOptions o = locret(m, 200, 32, 20, 10);
    o.retention = retention;
    o.retain_scope = scope;
    return o;
  };
  for (const Retention r : {Retention::kWindow, Retention::kRandom, Retention::kLocret, Retention::kTova})
    for (const RetainScope s : {RetainScope::kPerHead, RetainScope::kLayer})
      expect_close(run(retaining(r, s)), expected);
  for (const Retention r : {Retention::kReread, Retention::kMix})
    expect_close(run(retaining(r, RetainScope::kPerHead)), expected);
  for (const VoteScope vote : {VoteScope::kAuto, VoteScope::kLayer, VoteScope::kGroup}) {
    expect_close(run(selecting(dense(), 150, 4, 16, vote)), expected);
    expect_close(run(selecting(locret(m, 200, 32, 20, 10), 150, 4, 16, vote)), expected);
  }
  SessionOptions original = dense();
  original.positions = Positions::kOriginal;
  expect_close(run(original), expected);
}

// If no text can exceed the positions up to which queries do not grow, no queries are scaled.
TEST(Policies, GrowOnlyQueriesOfLongTexts) {
  const SeededModel m = seeded_model(growing());  // queries grow every 32 positions
  const auto growths = [&](const SessionOptions& o) {
    const auto device = std::make_shared<SpyDevice>(cpu());
    open_session(m.model, o, device);
    return device->growths.size();
  };
  SessionOptions window{
      .retention = Retention::kWindow, .pool = 16, .chunk = 8, .stabilizers = 4, .local = 2, .max_new = 4};
  const size_t of_all = growths(window);
  EXPECT_GE(of_all, 2 * 2u);  // in each of two layers, in the programs for a chunk and for a token
  window.context = 32;
  EXPECT_EQ(growths(window), 0u);
  window.context = 33;
  EXPECT_EQ(growths(window), of_all);
  EXPECT_EQ(growths({.pool = 24, .chunk = 8, .local = 0, .max_new = 8}), 0u);
  EXPECT_EQ(growths({.pool = 25, .chunk = 8, .local = 0, .max_new = 8}), of_all);
  SessionOptions reread{.retention = Retention::kReread,
                        .pool = 16,
                        .chunk = 8,
                        .stabilizers = 4,
                        .local = 2,
                        .max_new = 4,
                        .context = 24};
  EXPECT_EQ(growths(reread), 0u);
  reread.context = 25;  // a chunk that is read again is placed after the text
  EXPECT_GT(growths(reread), of_all);
}

// In a file with two sets of rotary factors, only the context decides which set is used, so that policies can
// be compared.
TEST(Policies, UseTheRotaryFactorsOfTheContext) {
  const SeededModel m = seeded_model({.context_length = 1024, .more = [](GgufWriter& w) {
                                        w.set("llama.rope.scaling.original_context_length", 512u);
                                        w.tensor("rope_factors_long.weight", {4}, {4, 6, 8, 16});
                                        w.tensor("rope_factors_short.weight", {4}, {1, 1, 1.5f, 2});
                                      }});
  const std::vector<int32_t> tokens = seeded_tokens(150);
  const auto run = [&](SessionOptions o, uint32_t context) {
    o.context = context;
    const auto session = open_session(m.model, o);
    read(*session, tokens);
    return accept(*session, 3);
  };
  SessionOptions quest = dense();
  quest.selection = Selection::kQuest;
  SessionOptions window = locret(m, 200, 32, 20, 10);
  window.retention = Retention::kWindow;
  std::vector<std::vector<float>> of_context;
  for (const uint32_t context : {512u, 513u, 0u}) {
    of_context.push_back(run(dense(), context));
    for (const SessionOptions& o :
         {window, locret(m, 200, 32, 20, 10), quest, selecting(dense(), 150, 4, 16, VoteScope::kLayer)})
      expect_close(run(o, context), of_context.back());
  }
  EXPECT_NE(of_context[0], of_context[1]);
  EXPECT_EQ(of_context[1], of_context[2]);
}

// A chunk that is larger than the room in a full run is read after as many entries as an eviction leaves.
TEST(Policies, SelectWhileReadingARetainedPool) {
  const SeededModel m = seeded_model();
  for (const Retention retention :
       {Retention::kWindow, Retention::kRandom, Retention::kLocret, Retention::kKeyDiff, Retention::kTova,
        Retention::kReread, Retention::kMix})
    for (const VoteScope vote : {VoteScope::kGroup, VoteScope::kLayer}) {
      SCOPED_TRACE(std::string(policy_name(retention)) + (vote == VoteScope::kGroup ? ", group" : ", layer"));
      SessionOptions o = selecting(locret(m, 150, 512, 20, 30), 256, 4, 512, vote);
      o.retention = retention;
      o.select_prefill = 1;
      o.select_k = 80;
      o.select_local = 300;  // this also sets the chunk, which is larger than local + max_new
      Followed f(m.model, o);
      EXPECT_EQ(f->plan().options.chunk, 300u);
      f.read(seeded_tokens(1000));
      f.accept(5);
      f.read(seeded_tokens(400, 64, 8));
      EXPECT_EQ(must(f->kept_count(0, 0)), 180u);
    }
}

// Counts every token once, whether read in chunks or one by one, including tokens that are evicted later.
TEST(Policies, CountWhatIsBeyondTheRangeOfHalves) {
  const SeededModel m =
      seeded_model({.layers = 1, .edit = [](const std::string& name, std::vector<float>& values) {
                      if (name.ends_with("attn_k.weight") || name.ends_with("attn_v.weight"))
                        // The weights of channel 9.
                        for (size_t i = 0; i < 32; ++i) values[9 * 32 + i] *= 100'000;
                    }});
  for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
    SessionOptions o = locret(m, 40, 16, 8, 10);
    o.positions = positions;
    const auto session = open_session(m.model, o);
    ReferenceModel reference(*m.model, positions);
    std::vector<int32_t> text = seeded_tokens(75);
    const auto count = [&] {
      reference.saturated = 0;
      for (size_t i = 0; i < text.size(); ++i)
        reference.append(text[i], i, [](uint32_t, uint32_t) { return std::vector<int32_t>(); });
      return reference.saturated;
    };
    for (const float logit : read(*session, text)) ASSERT_TRUE(std::isfinite(logit));
    EXPECT_EQ(must(session->stats()).saturated, count());
    EXPECT_GT(count(), 75u);
    EXPECT_LT(count(), 75u * 4);
    for (int32_t i = 0; i < 20; ++i) {
      accept(*session, i);
      text.push_back(i);
    }
    EXPECT_EQ(must(session->stats()).saturated, count());
    must(session->rewind(80));
    EXPECT_EQ(must(session->stats()).saturated, count());
    must(session->reset());
    EXPECT_EQ(must(session->stats()).saturated, 0u);
  }
}

TEST(Policies, GiveTheSameBitsForEveryPlaceOfThePool) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(200);
  for (const VoteScope vote : {VoteScope::kLayer, VoteScope::kGroup}) {
    std::vector<std::vector<float>> logits;
    std::vector<Kept> sets;
    for (const uint32_t max_new :
         {32u, 32u, 77u, 500u}) {  // heads are further apart; the first two are the same case twice
      SessionOptions o = selecting(locret(m, 48, 20, 8, 10), 8, 2, 6, vote);
      o.max_new = max_new;
      Watched w(m.model, o);
      read(*w, tokens);
      logits.push_back(accept(*w, 5));
      sets.push_back(kept(*w));
      for (const auto& layer : w.lists())
        for (const auto& list : layer) sets.back().back().emplace_back(list.begin(), list.end());
    }
    for (size_t i = 1; i < logits.size(); ++i) {
      EXPECT_EQ(logits[i], logits[0]);
      EXPECT_EQ(sets[i], sets[0]);
    }
  }
}

TEST(Policies, ChunkSizeChangesNothingWhileNothingIsEvicted) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(130);
  const std::vector<float> expected = read(*open_session(m.model, dense()), tokens);
  for (const uint32_t chunk : {1u, 3u, 64u}) {
    expect_close(read(*open_session(m.model, locret(m, 160, chunk, 20, 10)), tokens), expected);
    SessionOptions o = dense();
    o.chunk = chunk;
    expect_close(read(*open_session(m.model, o), tokens), expected);
  }
}

TEST(Policies, ALaterTurnContinuesAsOneText) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> first = seeded_tokens(60), answer = seeded_tokens(12, 64, 8),
                             second = seeded_tokens(50, 64, 9);
  std::vector<int32_t> all = first;
  all.insert(all.end(), answer.begin(), answer.end());
  all.insert(all.end(), second.begin(), second.end());
  const std::vector<float> expected = read(*open_session(m.model, dense()), all);
  for (const SessionOptions& o :
       {dense(), locret(m, 160, 32, 20, 10), selecting(dense(), 200, 4, 16, VoteScope::kLayer)}) {
    const auto session = open_session(m.model, o);
    read(*session, first);
    for (const int32_t t : answer) accept(*session, t);
    expect_close(read(*session, second), expected);
    EXPECT_EQ(must(session->stats()).evicted, 0u);
  }
}

// ---- Locret ----

// Invariant 6 of the method's specification. Algorithm 1 as printed protects stabilizers permanently and
// would keep {1, 2, 4, 5} in the end.
TEST(Locret, KeepsTheBestScoresAndStabilizersOnlyForAWhile) {
  const SeededModel m = scored_model({5, 1, 4, 2, 9, 0, 3, 8, 1, 0});
  const auto session = open_session(m.model, locret(m, 4, 3, 2, 1));
  must(session->feed(range(0, 5)));
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 1, 2}));
  must(session->feed(range(5, 8)));
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 2, 4, 5}));
  must(session->feed(range(8, 10)));
  must(session->flush());
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 2, 4, 7, 9}));
}

TEST(Locret, WithoutStabilizersKeepsTheBestScoresAlone) {
  const SeededModel m = scored_model({5, 1, 4, 2, 9, 0, 3, 8, 1, 0});
  const auto session = open_session(m.model, locret(m, 4, 3, 0, 1));
  must(session->feed(range(0, 8)));
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 2, 3, 4}));
  must(session->feed(range(8, 10)));
  must(session->flush());
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 2, 4, 7, 9}));
}

TEST(Locret, ALastChunkThatIsFullHasNoStabilizersEither) {
  const SeededModel m = scored_model({5, 1, 4, 2, 9, 0, 3, 8, 1, 0});
  const auto session = open_session(m.model, locret(m, 4, 3, 2, 1));
  must(session->feed(range(0, 7)));  // 7 tokens without 1 local one are two chunks
  must(session->flush());
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 2, 3, 4, 6}));
}

// Invariant 15. One session evicts layer by layer within its chunk. The other reads the same rows as local
// tokens, which stay, and then evicts after the whole pass. The following results are the same to the bit.
TEST(Locret, EvictingLayerByLayerEqualsEvictingAfterThePass) {
  const SeededModel m = seeded_model();
  constexpr uint32_t kPool = 8, kRows = 96, kMore = 12;
  const std::vector<int32_t> rows = seeded_tokens(kRows), more = seeded_tokens(kMore, 64, 8);

  const auto by_layer = open_session(m.model, locret(m, kPool, kRows, 0, kMore));
  must(by_layer->feed(rows));
  const std::vector<float> expected = read(*by_layer, more);

  SessionOptions afterwards = locret(m, kPool, kRows, 0, kRows);
  afterwards.max_new = 1;  // so that the next rows do not fit next to the first
  const auto after_pass = open_session(m.model, afterwards);
  read(*after_pass, rows);
  EXPECT_EQ(must(after_pass->stats()).evicted, 0u);
  EXPECT_EQ(read(*after_pass, more), expected);
  EXPECT_EQ(must(after_pass->stats()).evicted, kRows - kPool);
  EXPECT_EQ(kept(*after_pass), kept(*by_layer));
}

TEST(Locret, GivesTiesToTheLaterPosition) {
  const SeededModel m = scored_model(std::vector<float>(16, 1.0f));
  const auto session = open_session(m.model, locret(m, 4, 3, 0, 1));
  must(session->feed(range(0, 12)));
  must(session->flush());
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{7, 8, 9, 10, 11}));
}

TEST(Locret, ProtectsTheFirstEntriesIfAsked) {
  const SeededModel m = scored_model({0, 0, 4, 2, 9, 0, 3, 8, 1, 0});
  SessionOptions o = locret(m, 5, 3, 2, 1);
  o.protect_init = 2;
  const auto session = open_session(m.model, o);
  must(session->feed(range(0, 10)));
  must(session->flush());
  EXPECT_EQ(kept(*session)[0][0], (std::vector<int32_t>{0, 1, 2, 4, 7, 9}));
}

TEST(Locret, ATextWithinTheLocalTokensIsReadDensely) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(30);
  const auto session = open_session(m.model, locret(m, 12, 8, 4, 40));
  expect_close(read(*session, tokens), read(*open_session(m.model, dense()), tokens));
  EXPECT_EQ(kept(*session)[1][1], range(0, 30));
}

TEST(Locret, RefusesStabilizersThatLeaveNothingToChoose) {
  const SeededModel m = seeded_model();
  const auto refused = Session::create(m.model, cpu(), locret(m, 16, 8, 16, 4));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << refused.status().message();
  EXPECT_TRUE(Session::create(m.model, cpu(), locret(m, 16, 8, 15, 4)).ok());
}

// Invariants 7, 8 and 9, after each chunk of a long text.
TEST(Locret, KeepsItsInvariantsFromChunkToChunk) {
  const SeededModel m = seeded_model();
  const uint32_t chunk = 20, stabilizers = 12, pool = 40, local = 10;
  Watched w(m.model, locret(m, pool, chunk, stabilizers, local));
  const std::vector<int32_t> tokens = seeded_tokens(400);
  must(w->feed(std::span(tokens).first(chunk + local)));  // one token short of a chunk
  Kept before(2, std::vector<std::vector<int32_t>>(2));
  std::map<int32_t, float> scores[2][2];
  bool heads_differ = false;
  for (size_t at = chunk + local; at < tokens.size(); ++at) {
    must(w->feed(std::span(tokens).subspan(at, 1)));
    const SessionStats stats = must(w->stats());
    const int32_t done = static_cast<int32_t>(stats.position - stats.waiting);
    if ((at - chunk - local) % chunk) continue;
    ASSERT_EQ(done, at - local);
    const Kept now = kept(*w);
    for (uint32_t layer = 0; layer < 2; ++layer)
      for (uint32_t head = 0; head < 2; ++head) {
        const std::vector<int32_t>& positions = now[layer][head];
        ASSERT_EQ(positions.size(),
                  std::min<size_t>(pool, static_cast<size_t>(done)));  // the same number in every head
        ASSERT_TRUE(std::is_sorted(positions.begin(), positions.end()));
        EXPECT_EQ(std::vector<int32_t>(positions.end() - stabilizers, positions.end()),
                  range(done - int32_t{stabilizers}, done));
        std::vector<int32_t> fresh;
        std::set_difference(positions.begin(), positions.end(), before[layer][head].begin(),
                            before[layer][head].end(), std::back_inserter(fresh));
        for (const int32_t p : fresh) EXPECT_GE(p, done - int32_t{chunk});  // evicted entries do not return
        const std::map<int32_t, float> current = w.scores(layer, head);
        ASSERT_EQ(current.size(), positions.size());
        for (const auto& [position, score] : current)
          if (const auto known = scores[layer][head].find(position); known != scores[layer][head].end()) {
            EXPECT_EQ(score, known->second) << position;
          }
        scores[layer][head] = current;
      }
    heads_differ |= now[0][0] != now[0][1] && now[1][0] != now[1][1];
    before = now;
  }
  EXPECT_TRUE(heads_differ);
}

TEST(Locret, ScopeLayerKeepsOneSetForAllHeads) {
  const SeededModel m = seeded_model();
  SessionOptions o = locret(m, 40, 20, 12, 10);
  o.retain_scope = RetainScope::kLayer;
  const auto session = open_session(m.model, o);
  read(*session, seeded_tokens(300));
  const Kept sets = kept(*session);
  EXPECT_EQ(sets[0][0], sets[0][1]);
  EXPECT_EQ(sets[1][0], sets[1][1]);
  EXPECT_NE(sets[0][0], sets[1][0]);
}

// In layer 0, a score depends only on the token, so each occurrence has the same score, whether it was read
// in a chunk or decoded and scored from the ring. Other rows of a matrix product may sum in another order,
// which changes the last bits.
TEST(Locret, ScoresKnowNoPosition) {
  const SeededModel m = seeded_model();
  std::vector<int32_t> tokens;
  for (int i = 0; i < 9; ++i)
    for (const int32_t t : {3, 14, 15, 9, 26, 5, 35}) tokens.push_back(t);
  Watched w(m.model, locret(m, 160, 20, 12, 10));
  read(*w, tokens);
  for (int32_t t : {3, 14, 15, 9, 26, 5, 35}) accept(*w, t);
  read(*w, range(0, 12));  // scores the tokens in the ring
  for (uint32_t head = 0; head < 2; ++head) {
    const std::map<int32_t, float> scores = w.scores(0, head);
    ASSERT_EQ(scores.size(), 82u);
    for (int32_t p = 7; p < 70; ++p) EXPECT_NEAR(scores.at(p), scores.at(p % 7), 1e-5f) << p;
    EXPECT_NE(scores.at(0), scores.at(1));
  }
}

// A llama file has the rows of Q and K interleaved, pair by pair. Heads made for it have their columns in the
// same order.
TEST(Locret, InterleavedRowsAndColumnsChangeNothing) {
  Seeded halves{.architecture = "qwen2"}, adjacent;
  adjacent.edit = [](const std::string& name, std::vector<float>& values) {
    const uint32_t dh = 8;
    const auto old_index = [](uint32_t i) { return i / dh * dh + i % 2 * (dh / 2) + i % dh / 2; };
    const std::vector<float> old = values;
    if (name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight")) {
      for (uint32_t i = 0; i < old.size(); ++i) values[i] = old[old_index(i / 32) * 32 + i % 32];
    } else if (name.ends_with("locret_fc1.weight")) {
      for (uint32_t i = 0; i < old.size(); ++i) {
        const uint32_t column = i % 64;  // 32 of q, 16 of k, 16 of v
        values[i] = old[i - column + (column < 48 ? old_index(column) : column)];
      }
    }
  };
  const std::vector<int32_t> tokens = seeded_tokens(200);
  const SeededModel a = seeded_model(halves), b = seeded_model(adjacent);
  const auto one = open_session(a.model, locret(a, 40, 20, 12, 10)),
             other = open_session(b.model, locret(b, 40, 20, 12, 10));
  expect_close(read(*one, tokens), read(*other, tokens));
  EXPECT_EQ(kept(*one), kept(*other));
}

TEST(Locret, ReadsFarBeyondTheTrainedLengthAtTrainedPositions) {
  const SeededModel m = seeded_model({.context_length = 96});
  SessionOptions o = locret(m, 24, 16, 8, 8);
  const auto session = open_session(m.model, o);
  EXPECT_LT(session->plan().largest_position, 96u);
  for (const float logit : read(*session, seeded_tokens(300))) ASSERT_TRUE(std::isfinite(logit));
}

// ---- the other retention policies ----

TEST(Window, KeepsTheFirstAndTheLastTokens) {
  const SeededModel m = seeded_model();
  const auto session = open_session(m.model, {.retention = Retention::kWindow,
                                              .pool = 16,
                                              .chunk = 20,
                                              .local = 5,
                                              .protect_init = 4,
                                              .max_new = 8});
  read(*session, seeded_tokens(100));
  std::vector<int32_t> expected = range(0, 4);
  for (const int32_t p : range(83, 100)) expected.push_back(p);
  for (const auto& layer : kept(*session))
    for (const auto& head : layer) EXPECT_EQ(head, expected);
}

TEST(RandomRetention, FollowsItsSeedAndNothingElse) {
  const SeededModel m = seeded_model(), other = seeded_model({.seed = 2});
  const auto run = [](const SeededModel& model, uint32_t seed) {
    const auto session = open_session(model.model, {.retention = Retention::kRandom,
                                                    .pool = 30,
                                                    .chunk = 20,
                                                    .stabilizers = 0,
                                                    .local = 0,
                                                    .max_new = 8,
                                                    .seed = seed});
    read(*session, seeded_tokens(300));
    return kept(*session);
  };
  const Kept sets = run(m, 1);
  EXPECT_EQ(sets, run(other, 1));
  EXPECT_NE(sets, run(m, 2));
  EXPECT_NE(sets[0][0], sets[0][1]);
  EXPECT_NE(sets[0][0], sets[1][0]);
  EXPECT_LT(sets[0][0][0], 100);  // differs from the last ones with a probability of 1 - (2/3)^30
}

// ---- TokenSelect ----

// Invariant 2: a list has the sinks, then the selected entries, then the last tokens; it is ascending and
// includes the current token.
TEST(TokenSelect, ListsAreSinksPicksAndLocalTokens) {
  const SeededModel m = seeded_model();
  const uint32_t k = 8, init = 4, local = 6, whole = k + init + local;
  for (const VoteScope vote : {VoteScope::kLayer, VoteScope::kGroup})
    for (const bool evicts : {false, true}) {
      Watched w(m.model, selecting(evicts ? locret(m, 30, 20, 8, 5) : dense(), k, init, local, vote));
      read(*w, seeded_tokens(evicts ? 100 : 10));
      bool ragged = false;
      for (const int32_t token : seeded_tokens(30, 64, 8)) {
        accept(*w, token);
        const uint32_t n = must(w->stats()).entries;
        const Kept positions = kept(*w);
        const auto lists = w.lists();
        for (uint32_t layer = 0; layer < 2; ++layer) {
          std::set<int32_t> picked;
          for (uint32_t head = 0; head < 2; ++head) {
            const std::vector<uint32_t>& list = lists[layer][head];
            ASSERT_TRUE(std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end());
            if (n <= whole) {
              ASSERT_EQ(list.size(), n);
              continue;
            }
            ASSERT_GE(list.size(), init + local);
            for (uint32_t i = 0; i < init; ++i) ASSERT_EQ(list[i], i);
            for (uint32_t i = 0; i < local; ++i) ASSERT_EQ(list[list.size() - local + i], n - local + i);
            for (size_t i = init; i < list.size() - local; ++i)
              picked.insert(positions[layer][head][list[i]]);
            if (vote == VoteScope::kLayer && evicts) {
              ASSERT_LE(list.size(), whole);  // a head lists the positions of the layer that it still holds
              ragged |= list.size() < whole;
            } else {
              ASSERT_EQ(list.size(), whole);
            }
          }
          if (vote == VoteScope::kLayer && n > whole) {
            ASSERT_EQ(picked.size(), k);
          }
        }
      }
      EXPECT_EQ(ragged, vote == VoteScope::kLayer && evicts);
    }
}

TEST(TokenSelect, DropsOneTokenWhenOneIsTooMany) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(40);
  Watched w(m.model, selecting(dense(), 10, 4, 6, VoteScope::kLayer));
  const auto reference = open_session(m.model, dense());
  read(*w, std::span(tokens).first(19));
  read(*reference, std::span(tokens).first(19));
  expect_close(accept(*w, 1), accept(*reference, 1));  // 20 entries, which are all
  EXPECT_EQ(w.lists()[1][0].size(), 20u);
  accept(*w, 2);
  const std::vector<uint32_t> list = w.lists()[0][0];
  ASSERT_EQ(list.size(), 20u);
  EXPECT_EQ(list.back(), 20u);
  EXPECT_NE(list, std::vector<uint32_t>(list.size(), 0));
  uint32_t missing = 0;
  for (uint32_t i = 0; i < 21; ++i)
    if (!std::binary_search(list.begin(), list.end(), i)) missing = i;
  EXPECT_GE(missing, 4u);
  EXPECT_LT(missing, 15u);
}

TEST(TokenSelect, OneMorePickOnlyAddsOne) {
  const SeededModel m = seeded_model({.layers = 1});  // later layers would see another query
  for (const VoteScope vote : {VoteScope::kLayer, VoteScope::kGroup}) {
    std::vector<uint32_t> before;
    for (uint32_t k = 1; k < 20; ++k) {
      Watched w(m.model, selecting(dense(), k, 4, 6, vote));
      read(*w, seeded_tokens(100));
      accept(*w, 33);
      const std::vector<uint32_t> list = w.lists()[0][1];
      ASSERT_EQ(list.size(), k + 10);
      EXPECT_TRUE(std::includes(list.begin(), list.end(), before.begin(), before.end())) << k;
      before = list;
    }
  }
}

// Invariants 18 and 38, on the votes that the device computed.
TEST(TokenSelect, VotesSumToTheQueryHeadsAndGroupsCaptureTheirMost) {
  const SeededModel m = seeded_model({.layers = 1});
  const auto run = [&](VoteScope scope, std::vector<std::vector<uint32_t>>& lists) {
    Watched w(m.model, selecting(dense(), 12, 4, 6, scope));
    read(*w, seeded_tokens(120));
    accept(*w, 33);
    lists = w.lists()[0];
    const View& votes = w.device->selections.back().scores;
    std::vector<float> values(votes.bytes / 4);
    must(w.device->read(values.data(), votes));
    return values;
  };
  std::vector<std::vector<uint32_t>> by_group, by_layer;
  const std::vector<float> group = run(VoteScope::kGroup, by_group), layer = run(VoteScope::kLayer, by_layer);
  const uint32_t capacity = 256 + 32, n = 121;
  double all = 0;
  for (uint32_t i = 4; i < n - 6; ++i) all += std::exp(layer[i]);
  EXPECT_NEAR(all, 4, 4e-5);  // the number of heads; 115 f32 exponentials
  for (uint32_t head = 0; head < 2; ++head) {
    const float* votes = &group[head * capacity];
    const auto mass = [&](auto first, auto last) {
      double sum = 0;
      for (; first != last; ++first) sum += std::exp(votes[*first]);
      return sum;
    };
    const std::vector<int32_t> middle = range(4, int32_t{n} - 6);
    EXPECT_NEAR(mass(middle.begin(), middle.end()), 2, 2e-5);
    const double own = mass(by_group[head].begin() + 4, by_group[head].end() - 6);
    EXPECT_GE(own, mass(by_layer[head].begin() + 4, by_layer[head].end() - 6) - 1e-6);
    EXPECT_LT(own, 2);
  }
  EXPECT_NE(by_group, by_layer);
}

TEST(TokenSelect, ScoresQueryHeadsAgainstTheirOwnGroupsKeys) {
  const SeededModel m =
      seeded_model({.layers = 1, .edit = [](const std::string& name, std::vector<float>& values) {
                      if (name.ends_with("attn_k.weight"))  // the keys of KV head 1 are zeros
                        std::fill(values.begin() + 8 * 32, values.end(), 0.0f);
                    }});
  Watched w(m.model, selecting(dense(), 5, 2, 4, VoteScope::kGroup));
  read(*w, seeded_tokens(60));
  accept(*w, 33);
  const auto lists = w.lists()[0];
  // All votes of KV head 1 are equal, so its picks are the latest of the middle. If heads were assigned
  // round-robin, one of its two query heads would have used the keys of KV head 0.
  EXPECT_EQ(lists[1], (std::vector<uint32_t>{0, 1, 52, 53, 54, 55, 56, 57, 58, 59, 60}));
  EXPECT_NE(lists[0], lists[1]);
}

TEST(TokenSelect, OneKvHeadIsItsOwnGroup) {
  const SeededModel m = seeded_model({.kv_heads = 1});
  std::vector<std::vector<float>> logits;
  for (const VoteScope vote : {VoteScope::kLayer, VoteScope::kGroup}) {
    Watched w(m.model, selecting(dense(), 8, 4, 6, vote));
    read(*w, seeded_tokens(100));
    logits.push_back(accept(*w, 33));
  }
  EXPECT_EQ(logits[0], logits[1]);
}

TEST(TokenSelect, VotesByPositionAsByEntryWhileNothingIsEvicted) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(100);
  std::vector<std::vector<std::vector<std::vector<uint32_t>>>> lists;
  SessionOptions shared = locret(m, 160, 32, 20, 0);
  shared.retain_scope = RetainScope::kLayer;
  for (const SessionOptions& o : {dense(), locret(m, 160, 32, 20, 0), shared}) {
    Watched w(m.model, selecting(o, 8, 4, 6, VoteScope::kLayer));
    read(*w, tokens);
    accept(*w, 33);
    lists.push_back(w.lists());
  }
  EXPECT_EQ(lists[0], lists[1]);
  EXPECT_EQ(lists[0], lists[2]);
}

TEST(TokenSelect, SelectsWhileReadingAsWhileDecoding) {
  const SeededModel m = seeded_model();
  const std::vector<int32_t> tokens = seeded_tokens(90);
  SessionOptions o = selecting(dense(), 8, 4, 6, VoteScope::kLayer);
  o.max_new = 100;
  Watched decoding(m.model, o);
  std::vector<float> expected = read(*decoding, std::span(tokens).first(1));
  for (const int32_t t : std::span(tokens).subspan(1)) expected = accept(*decoding, t);
  o.chunk = 1;
  o.select_prefill = true;
  Watched reading(m.model, o);
  expect_close(read(*reading, tokens), expected);
  EXPECT_EQ(reading.lists(), decoding.lists());

  o.chunk = 7;  // the first rows of such a chunk would be before the local window
  EXPECT_EQ(open_session(m.model, o)->plan().options.chunk, 6u);
}

TEST(TokenSelect, StaysFiniteFarBeyondTheTrainedLength) {
  const SeededModel m = seeded_model({.context_length = 64});
  SessionOptions o = selecting(dense(400), 24, 4, 16, VoteScope::kLayer);
  o.chunk = 16;
  o.select_prefill = true;
  const auto session = open_session(m.model, o);
  for (const float logit : read(*session, seeded_tokens(300))) ASSERT_TRUE(std::isfinite(logit));
  for (const float logit : accept(*session, 3)) ASSERT_TRUE(std::isfinite(logit));
}

// ---- the selection cache ----

uint64_t hits(Watched& w) { return must(w->stats()).cache_hits; }
uint64_t misses(Watched& w) { return must(w->stats()).cache_misses; }

TEST(SelectionCache, IsOffAtACosineOfOneAndAlwaysOnAtMinusOne) {
  const SeededModel m = seeded_model();
  SessionOptions o = selecting(dense(), 8, 4, 12, VoteScope::kLayer);
  Watched never(m.model, o);
  o.select_theta = -1;
  Watched always(m.model, o);
  for (Watched* w : {&never, &always}) read(**w, seeded_tokens(60));
  for (int i = 0; i < 6; ++i) accept(*never, 33), accept(*always, 33 + i);
  EXPECT_EQ(hits(never), 0u);
  EXPECT_EQ(misses(never), 12u);
  EXPECT_EQ(misses(always), 2u);  // one per layer
  EXPECT_EQ(hits(always), 10u);
}

TEST(SelectionCache, AHitKeepsThePicksAndRenewsTheLocalTokens) {
  const SeededModel m = seeded_model({.layers = 1});
  SessionOptions o = selecting(dense(), 8, 4, 12, VoteScope::kGroup);
  o.select_theta = 0.9999f;
  Watched w(m.model, o);
  read(*w, seeded_tokens(60));
  accept(*w, 33);
  const auto first = w.lists()[0];
  accept(*w, 33);  // in layer 0, the same token has the same query
  EXPECT_EQ(hits(w), 1u);
  const auto second = w.lists()[0];
  for (uint32_t head = 0; head < 2; ++head) {
    ASSERT_EQ(second[head].size(), 24u);
    EXPECT_TRUE(std::equal(first[head].begin(), first[head].begin() + 12, second[head].begin()));
    for (uint32_t i = 0; i < 12; ++i) EXPECT_EQ(second[head][12 + i], 50 + i);
  }
  accept(*w, 34);
  EXPECT_EQ(hits(w), 1u);
}

TEST(SelectionCache, IsRenewedBeforeTokensFallBetweenPicksAndLocal) {
  const SeededModel m = seeded_model({.layers = 1});
  SessionOptions o = selecting(dense(), 8, 4, 12, VoteScope::kLayer);
  o.select_theta = -1;
  Watched w(m.model, o);
  read(*w, seeded_tokens(60));
  std::vector<uint64_t> when;
  for (uint64_t i = 0, seen = 0; i < 20; ++i) {
    accept(*w, 33);
    if (misses(w) != seen) when.push_back(i);
    seen = misses(w);
  }
  EXPECT_EQ(when, (std::vector<uint64_t>{0, 7, 14}));  // a list is reused for at most 12 / 2 tokens
}

TEST(SelectionCache, IsDroppedByAPromptAnEvictionAndARewind) {
  const SeededModel m = seeded_model({.layers = 1});
  SessionOptions o = selecting(locret(m, 40, 20, 8, 10), 8, 4, 24, VoteScope::kGroup);
  o.select_theta = -1;
  o.max_new = 54;
  Watched w(m.model, o);
  read(*w, seeded_tokens(60));
  for (const size_t n : {10u, 10u, 10u, 10u, 4u}) read(*w, seeded_tokens(n));  // 94 entries of 104
  accept(*w, 1), accept(*w, 2), accept(*w, 3);
  EXPECT_EQ(misses(w), 1u);
  read(*w, range(0, 2));
  accept(*w, 4);
  EXPECT_EQ(misses(w), 2u);
  accept(*w, 5);
  must(w->rewind(must(w->stats()).position - 1));
  accept(*w, 6);
  EXPECT_EQ(misses(w), 3u);  // now 101 entries; by age, the next miss comes after 12 tokens
  const uint64_t evictions = must(w->stats()).evictions;
  for (int32_t i = 0; i < 3; ++i) accept(*w, i);
  EXPECT_EQ(must(w->stats()).evictions, evictions);
  EXPECT_EQ(misses(w), 3u);
  accept(*w, 7);
  EXPECT_EQ(must(w->stats()).evictions, evictions + 1);
  EXPECT_EQ(misses(w), 4u);
  accept(*w, 8);
  EXPECT_EQ(misses(w), 4u);
}

// ---- the numpy reference on the demo model ----

nlohmann::json policies() {
  std::ifstream file(project_file("tests/reference/policies.json"));
  return nlohmann::json::parse(file);
}

std::shared_ptr<const Model> demo() {
  static const auto model =
      must(Model::open(must(MappedFile::open(project_file("models/thimble-demo-28m-q8_0.gguf"))), "demo"));
  return model;
}

SessionOptions demo_locret(uint32_t scope) {
  SessionOptions o{.retention = Retention::kLocret,
                   .retain_scope = static_cast<RetainScope>(scope),
                   .pool = 128,
                   .chunk = 96,
                   .stabilizers = 32,
                   .local = 20,
                   .protect_init = 0,
                   .max_new = 16};
  o.retainer = must(demo()->open_retainer(
      must(MappedFile::open(project_file("models/thimble-demo-28m.locret.gguf"))), "heads"));
  return o;
}

void expect_top(const std::vector<float>& logits, const nlohmann::json& golden) {
  const float tolerance = golden.at("tolerance");
  for (const auto& [token, logit] : golden.at("top").get<std::vector<std::pair<int32_t, float>>>())
    EXPECT_NEAR(logits.at(token), logit, tolerance) << "token " << token;
}

// Expects the same positions, except those whose score is too close to the threshold for f32 to decide, which
// may be at most one in a hundred.
void expect_same_set(const std::vector<int32_t>& got, const std::vector<int32_t>& expected,
                     const std::vector<int32_t>& close) {
  EXPECT_EQ(got.size(), expected.size());
  std::vector<int32_t> differing;
  std::set_symmetric_difference(got.begin(), got.end(), expected.begin(), expected.end(),
                                std::back_inserter(differing));
  EXPECT_LE(differing.size(), 2 * std::max<size_t>(1, expected.size() / 100));
  for (const int32_t p : differing)
    EXPECT_TRUE(std::binary_search(close.begin(), close.end(), p))
        << "position " << p << " is not close to the threshold";
}

TEST(NumpyReference, LocretKeepsTheSamePositions) {
  const nlohmann::json all = policies();
  const auto ids = all.at("ids").get<std::vector<int32_t>>();
  size_t compared = 0;
  for (const nlohmann::json& golden : all.at("locret")) {
    SCOPED_TRACE(golden.at("shared").get<bool>() ? "scope layer" : "scope head");
    const auto session = open_session(demo(), demo_locret(golden.at("shared").get<bool>()));
    const std::vector<float> logits = read(*session, std::span(ids).first(golden.at("n").get<size_t>()));
    const Kept got = kept(*session), expected = golden.at("kept").get<Kept>(),
               close = golden.at("close").get<Kept>();
    for (size_t layer = 0; layer < got.size(); ++layer)
      for (size_t head = 0; head < got[layer].size(); ++head) {
        SCOPED_TRACE("layer " + std::to_string(layer) + " head " + std::to_string(head));
        expect_same_set(got[layer][head], expected[layer][head], close[layer][head]);
      }
    if (got != expected) continue;  // different entries give different logits
    expect_top(logits, golden);
    ++compared;
  }
  EXPECT_GT(compared, 0u) << "no case kept the same entries, so no logits were compared";
}

TEST(NumpyReference, TokenSelectPicksTheSamePositions) {
  const nlohmann::json all = policies();
  const auto ids = all.at("ids").get<std::vector<int32_t>>();
  size_t compared = 0;
  for (const nlohmann::json& golden : all.at("select")) {
    const bool evicts = golden.at("locret");
    const bool by_layer = golden.at("vote") == "layer";
    SCOPED_TRACE(std::string(by_layer ? "layer" : "group") + (evicts ? ", locret" : ", dense"));
    SessionOptions o = evicts ? demo_locret(0) : SessionOptions{.pool = 320, .chunk = 96, .max_new = 16};
    Watched w(demo(), selecting(o, golden.at("k"), golden.at("n_init"), golden.at("n_local"),
                                by_layer ? VoteScope::kLayer : VoteScope::kGroup));
    const size_t n = golden.at("n");
    read(*w, std::span(ids).first(n));
    const std::vector<float> logits = accept(*w, ids[n]);
    const Kept positions = kept(*w), expected = golden.at("lists").get<Kept>(),
               close = golden.at("close").get<Kept>();
    const auto lists = w.lists();
    bool same = true;
    for (size_t layer = 0; layer < lists.size(); ++layer)
      for (size_t head = 0; head < lists[layer].size(); ++head) {
        SCOPED_TRACE("layer " + std::to_string(layer) + " head " + std::to_string(head));
        std::vector<int32_t> got;
        for (const uint32_t entry : lists[layer][head]) got.push_back(positions[layer][head].at(entry));
        std::vector<int32_t> sorted_close = close[layer][head];
        std::sort(sorted_close.begin(), sorted_close.end());
        expect_same_set(got, expected[layer][head], sorted_close);
        same &= got == expected[layer][head];
      }
    if (!same) continue;
    expect_top(logits, golden);
    ++compared;
  }
  EXPECT_GT(compared, 0u) << "no case chose the same entries, so no logits were compared";
}

}  // namespace
}  // namespace thimble::test
