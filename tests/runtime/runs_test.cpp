// Tests heads that hold different numbers of entries, because they keep different numbers or because their
// layer has a window. The kept entries are simulated from their scores; the logits are compared with a
// reference in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "backends/hash_score.h"
#include "tests/support/reference_model.h"
#include "tests/support/seeded_model.h"

namespace thimble::test {
namespace {

constexpr uint32_t kChunk = 40, kLocal = 20;
// One head keeps many more entries than the others; the average is 150.
const std::vector<uint32_t> kKeeps = {24, 24, 500, 52};

const SeededModel& model() {
  static const SeededModel m = seeded_model();
  return m;
}

SessionOptions retaining(Retention retention) {
  return {.retainer = retention == Retention::kLocret ? model().retainer : nullptr,
          .retention = retention,
          .keeps = kKeeps,
          .chunk = kChunk,
          .stabilizers = 30,
          .local = kLocal,
          .max_new = 50,
          .seed = 3};
}
SessionOptions selecting(SessionOptions o, Selection selection) {
  o.selection = selection;
  if (selection == Selection::kTokenSelect) {
    o.select_k = 20;
    o.select_init = 3;
    o.select_local = 12;
  } else if (selection == Selection::kQuest) {
    o.select_k = 32;
    o.select_page = 8;
    o.dense_layers = 1;  // the layers share a list, so the choice of one layer can be followed
  }
  return o;
}
constexpr Retention kRetentions[] = {Retention::kWindow, Retention::kRandom, Retention::kLocret,
                                     Retention::kKeyDiff};
constexpr Selection kSelections[] = {Selection::kDense, Selection::kTokenSelect, Selection::kQuest};

// Positions and scores of the entries that a head might keep.
using Scored = std::vector<std::pair<int32_t, float>>;

// The protected first and last entries, then the entries with the best scores; among equal scores, the later
// entry.
std::vector<int32_t> keep_best(const Scored& entries, uint32_t keep, uint32_t first, uint32_t last) {
  keep = std::min<uint32_t>(keep, static_cast<uint32_t>(entries.size()));
  last = std::min(last, keep);
  first = std::min(first, keep - last);
  std::vector<int32_t> kept;
  for (uint32_t i = 0; i < first; ++i) kept.push_back(entries[i].first);
  for (size_t i = entries.size() - last; i < entries.size(); ++i) kept.push_back(entries[i].first);
  Scored rest(entries.begin() + first, entries.end() - last);
  std::sort(rest.begin(), rest.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first > b.first;
  });
  for (uint32_t i = 0; i < keep - first - last; ++i) kept.push_back(rest[i].first);
  std::sort(kept.begin(), kept.end());
  return kept;
}

// ---- what each head keeps ----

// A session whose eviction is simulated. It has one layer, so that the chunk buffer and the pool show its
// scores, and no local tokens, so that a call reads one chunk.
class Simulated {
 public:
  Simulated(Retention retention, uint32_t protect_init)
      : m_(seeded_model({.layers = 1, .heads = 8, .kv_heads = 4})),
        options_(options(retention, protect_init)),
        w_(m_.model, options_) {
    w_.device->before_submit = [this](const Program&, const StepParams& step, std::span<const HeadState>) {
      if (step.n_rows) return;  // else this is an eviction, before which generated tokens get their scores
      for (uint32_t head = 0; head < 4; ++head) {
        const auto scores = w_.scores(0, head);
        for (const auto& [position, score] : held_[head])  // written once
          ASSERT_EQ(scores.at(position), score);
        held_[head].assign(scores.begin(), scores.end());
      }
      evict(false);
    };
  }

  // Reads a chunk; `last`: the end of a prompt.
  void read(std::span<const int32_t> tokens, uint32_t rows, bool last) {
    const auto first = static_cast<int32_t>(position_);
    must(w_->feed(tokens));
    if (last) must(w_->flush());
    position_ += rows;
    ASSERT_EQ(must(w_->stats()).position - must(w_->stats()).waiting, position_);
    const auto chunk = std::find_if(w_.device->scores.begin(), w_.device->scores.end(),
                                    [](const CisStore& op) { return op.p.into == kIntoChunk; });
    for (uint32_t head = 0; head < 4; ++head) {
      std::vector<float> cis(rows);
      const uint64_t at = uint64_t{head} * chunk->p.chunk_capacity * sizeof(float);
      must(w_.device->read(cis.data(), chunk->cis.slice(at, rows * sizeof(float))));
      for (uint32_t row = 0; row < rows; ++row) held_[head].emplace_back(first + int32_t(row), cis[row]);
    }
    evict(last);
    compare(0);
  }
  // Generates tokens until after an eviction.
  void generate(uint32_t tokens) {
    for (uint32_t i = 0; i < tokens; ++i) {
      const uint64_t evictions = must(w_->stats()).evictions;
      must(w_->accept(static_cast<int32_t>(i * 7 % 64)));
      ++position_;
      if (must(w_->stats()).evictions > evictions) compare(1);
    }
  }
  Watched& watched() { return w_; }

 private:
  SessionOptions options(Retention retention, uint32_t protect_init) const {
    SessionOptions o = retaining(retention);
    o.retainer = retention == Retention::kLocret ? m_.retainer : nullptr;
    o.local = 0;
    o.max_new = 64;
    o.protect_init = protect_init;
    return o;
  }
  void evict(bool last) {
    for (uint32_t head = 0; head < 4; ++head) {
      const auto best = keep_best(held_[head], kKeeps[head], std::min(options_.protect_init, kKeeps[head]),
                                  last ? 0 : options_.stabilizers * kKeeps[head] / 150);
      std::erase_if(held_[head], [&](const auto& entry) {
        return !std::binary_search(best.begin(), best.end(), entry.first);
      });
    }
  }
  // `more`: the number of tokens after the entries that an eviction left.
  void compare(uint32_t more) {
    const Kept now = kept(*w_);
    for (uint32_t head = 0; head < 4; ++head) {
      std::vector<int32_t> expected;
      for (const auto& [position, score] : held_[head]) {
        expected.push_back(position);
        if (options_.retention == Retention::kRandom) {
          ASSERT_EQ(score, hash_score(options_.seed, 0, head, static_cast<uint32_t>(position)));
        }
      }
      for (uint32_t i = 0; i < more; ++i) expected.push_back(static_cast<int32_t>(position_ - more + i));
      ASSERT_EQ(now[0][head], expected) << "head " << head << " at " << position_;
    }
  }

  SeededModel m_;
  SessionOptions options_;
  Watched w_;
  uint64_t position_ = 0;
  std::vector<Scored> held_ = std::vector<Scored>(4);
};

TEST(UnequalRuns, EveryHeadKeepsTheBestOfItsOwn) {
  const std::vector<int32_t> text = seeded_tokens(15 * kChunk + 31);
  for (const Retention retention : {Retention::kWindow, Retention::kRandom, Retention::kLocret})
    for (const uint32_t protect_init : {0u, 30u}) {  // 30 is more than the shortest heads keep
      SCOPED_TRACE(std::string(policy_name(retention)) + ", first " + std::to_string(protect_init));
      Simulated s(retention, protect_init);
      // A chunk is read when more tokens than a chunk wait.
      s.read(std::span(text).first(kChunk + 1), kChunk, false);
      for (size_t at = kChunk + 1; at + kChunk < text.size(); at += kChunk)
        s.read(std::span(text).subspan(at, kChunk), kChunk, false);
      if (::testing::Test::HasFatalFailure()) return;
      s.read(std::span(text).last(30), 31, true);
      s.generate(150);
      if (::testing::Test::HasFatalFailure()) return;
      const SessionStats stats = must(s.watched()->stats());
      uint64_t evicted = 0;
      for (uint32_t head = 0; head < 4; ++head)
        evicted += stats.position - must(s.watched()->kept_count(0, head));
      EXPECT_EQ(stats.evicted, evicted / 4);
      EXPECT_EQ(stats.entries, must(s.watched()->kept_count(0, 2)));
    }
}

// ---- what they answer ----

TEST(UnequalRuns, AnswerAsTheReferenceDoes) {
  const std::vector<int32_t> text = seeded_tokens(350), turn = seeded_tokens(70, 64, 8);
  for (const Retention retention : kRetentions)
    for (const Selection selection : kSelections) {
      SCOPED_TRACE(std::string(policy_name(retention)) + " and " + policy_name(selection));
      Followed f(model().model, selecting(retaining(retention), selection));
      f.read(text);
      for (int32_t i = 0; i < 60; ++i) f.accept(i);  // until after an eviction
      f.read(turn);
      f.rewind(must(f->stats()).position - 10);  // the local tokens stay until more tokens come
      f.read(std::span(turn).last(3));
      f.accept(5);
      EXPECT_GT(must(f->kept_count(1, 0)), 300u);
      EXPECT_LT(must(f->kept_count(0, 0)), 100u);
    }
}

// Short runs fill up first. Then all runs are evicted from, if they hold more than they keep.
TEST(UnequalRuns, MakeRoomIfAnyIsFull) {
  for (const Retention retention : kRetentions) {
    SCOPED_TRACE(policy_name(retention));
    SessionOptions o = retaining(retention);
    o.keeps = {90, 24, 500, 24};
    Followed f(model().model, o);
    f.read(seeded_tokens(60));
    for (int32_t i = 0; i < 51; ++i) f.accept(i);  // 24 + 20 + 50 fit
    EXPECT_EQ(must(f->kept_count(0, 0)), 91u);
    EXPECT_EQ(must(f->kept_count(0, 1)), 25u);
    EXPECT_EQ(must(f->kept_count(1, 0)), 111u);
    EXPECT_EQ(f->rewind(109).code(), Code::kCannotRewind);
    f.rewind(110);
    f.accept(7);
  }
}

TEST(UnequalRuns, ThatAreEqualGiveTheBitsOfAPool) {
  const std::vector<int32_t> text = seeded_tokens(300);
  for (const Retention retention : kRetentions)
    for (const Selection selection : kSelections) {
      SCOPED_TRACE(std::string(policy_name(retention)) + " and " + policy_name(selection));
      SessionOptions o = selecting(retaining(retention), selection);
      o.vote = VoteScope::kGroup;
      o.keeps = {60, 60, 60, 60};
      SessionOptions pool = o;
      pool.keeps.clear();
      pool.pool = 60;
      const auto one = open_session(model().model, o), other = open_session(model().model, pool);
      EXPECT_EQ(one->plan().total, other->plan().total);
      EXPECT_EQ(read(*one, text), read(*other, text));
      for (int32_t i = 0; i < 80; ++i) ASSERT_EQ(accept(*one, i % 64), accept(*other, i % 64)) << i;
      EXPECT_EQ(kept(*one), kept(*other));
    }
}

TEST(UnequalRuns, EqualDenseAttentionIfEachCoversTheText) {
  const std::vector<int32_t> text = seeded_tokens(150);
  const auto dense = open_session(model().model, {.pool = 400, .chunk = kChunk});
  const std::vector<float> first = read(*dense, text), second = accept(*dense, 3);
  for (const Retention retention : kRetentions) {
    SessionOptions o = retaining(retention);
    o.keeps = {151, 700, 160, 2000};
    const auto session = open_session(model().model, o);
    expect_close(read(*session, text), first);
    expect_close(accept(*session, 3), second);
    EXPECT_EQ(must(session->stats()).evicted, 0u);
  }
}

// The plan counts the memory of each head: its keys and values, positions and scores.
TEST(UnequalRuns, ArePlannedByTheHead) {
  SessionOptions o = retaining(Retention::kWindow);
  const MemoryPlan plan = must(make_plan(*model().model, *cpu(), o));
  EXPECT_EQ(plan.options.pool, 150u);
  EXPECT_EQ(plan.capacity, 500u + kLocal + o.max_new);
  o.keeps[2] += 4000;
  const MemoryPlan more = must(make_plan(*model().model, *cpu(), o));
  EXPECT_NEAR(double(more.pool - plan.pool), 4000 * (2 * 8 * 2 + 4 + 4), 4 * 64);  // arrays are aligned
}

// A retainer's file may set each head's share of the pools.
TEST(UnequalRuns, FollowTheSharesOfTheRetainersFile) {
  const auto keeps = [](std::vector<float> shares, uint32_t pool, Positions positions = Positions::kList) {
    const SeededModel m = seeded_model({.shares = std::move(shares)});
    SessionOptions o{.retainer = m.retainer, .retention = Retention::kLocret, .pool = pool};
    o.positions = positions;
    const MemoryPlan plan = must(make_plan(*m.model, *cpu(), o));
    std::vector<uint32_t> all;
    for (const HeadRun& run : plan.dimensions.last_runs()) all.push_back(run.keep);
    return all;
  };
  // Each head gets 64 entries. The rest of 4 * 300 is divided by each head's share above 64 / 300.
  EXPECT_EQ(keeps({1, 1, 1, 1}, 300), (std::vector<uint32_t>{300, 300, 300, 300}));
  EXPECT_EQ(keeps({0.1f, 0.1f, 100, 0.1f}, 300), (std::vector<uint32_t>{64, 64, 4 * 300 - 3 * 64, 64}));
  EXPECT_EQ(keeps({0.1f, 2, 1, 0.9f}, 40), (std::vector<uint32_t>{40, 40, 40, 40}));  // less than 64
  for (const uint32_t pool : {65u, 131u, 1000u, 12345u}) {
    const std::vector<uint32_t> uneven = keeps({1, 2, 3, 0.5f}, pool);
    EXPECT_EQ(uneven[0] + uneven[1] + uneven[2] + uneven[3], 4 * pool);
    EXPECT_TRUE(uneven[2] >= uneven[1] && uneven[1] >= uneven[0] && uneven[0] >= uneven[3]) << pool;
  }
  // A chunk leaves 3072 of the 4096 trained positions, and the other heads share the rest.
  EXPECT_EQ(keeps({0.1f, 0.1f, 100, 0.1f}, 1000), (std::vector<uint32_t>{310, 309, 3072, 309}));
  EXPECT_EQ(keeps({1, 2, 3, 0.5f}, 2000), (std::vector<uint32_t>{1407, 2823, 3072, 698}));
  EXPECT_EQ(keeps({1, 2, 3, 0.5f}, 3100), (std::vector<uint32_t>(4, 3100)));
  // Positions of the text, regardless of the number of kept entries.
  EXPECT_EQ(keeps({0.1f, 0.1f, 100, 0.1f}, 1000, Positions::kOriginal),
            (std::vector<uint32_t>{64, 64, 4 * 1000 - 3 * 64, 64}));
}

TEST(UnequalRuns, AreRefusedIfTheyContradictOtherOptions) {
  const auto refused = [](SessionOptions o, const char* part) {
    const Status status = make_plan(*model().model, *cpu(), o).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  SessionOptions o = retaining(Retention::kWindow);
  o.keeps.pop_back();
  refused(o, "3 heads are given");
  refused({.keeps = kKeeps}, "a retention that evicts");
  o = selecting(retaining(Retention::kWindow), Selection::kTokenSelect);
  o.vote = VoteScope::kLayer;
  refused(o, "group vote");
}

// ---- layers with a sliding window ----

constexpr uint32_t kWindow = 24;

const SeededModel& windowed() {  // layers 0 and 2 have a window
  static const SeededModel m = seeded_model({.layers = 4, .window = kWindow});
  return m;
}

std::vector<std::pair<std::string, SessionOptions>> windowed_policies() {
  std::vector<std::pair<std::string, SessionOptions>> all;
  for (const Retention retention :
       {Retention::kNone, Retention::kWindow, Retention::kRandom, Retention::kLocret, Retention::kKeyDiff,
        Retention::kTova, Retention::kReread, Retention::kMix})
    for (const Selection selection : kSelections) {
      SessionOptions o = retaining(retention);
      o.retainer = windowed().retainer;
      o.keeps.clear();
      o.pool = retention == Retention::kNone ? 500 : 60;
      o.stabilizers = 10;
      o = selecting(o, selection);
      if (selection == Selection::kQuest) o.dense_layers = 2;
      all.emplace_back(std::string(policy_name(retention)) + " and " + policy_name(selection), o);
    }
  return all;
}

TEST(WindowedLayers, AnswerAsTheReferenceDoesWhateverTheChunk) {
  ASSERT_EQ(windowed().model->layers[0].attention()->window, kWindow);
  ASSERT_EQ(windowed().model->layers[1].attention()->window, 0u);
  const std::vector<int32_t> text = seeded_tokens(150), turn = seeded_tokens(30, 64, 8);
  for (const auto& [name, policy] : windowed_policies())
    for (const uint32_t chunk : {1u, 3u, 64u}) {
      SCOPED_TRACE(name + ", chunk " + std::to_string(chunk));
      SessionOptions o = policy;
      o.chunk = chunk;
      Followed f(windowed().model, o);
      f.read(text);
      const uint64_t evictions = must(f->stats()).evictions;
      for (int32_t i = 0; i < 75; ++i) f.accept(i % 64);  // 70 tokens fit
      EXPECT_GT(must(f->stats()).evictions, evictions);
      f.read(turn);
      f.accept(5);
      EXPECT_LT(must(f->kept_count(0, 0)), kWindow + 71);
      if (HasFailure()) return;
    }
}

TEST(WindowedLayers, KeepTheirLastTokens) {
  for (const auto& [name, policy] : windowed_policies()) {
    SCOPED_TRACE(name);
    SessionOptions o = policy;
    const auto session = open_session(windowed().model, o);
    read(*session, seeded_tokens(200));
    // There are no local tokens that an eviction leaves out.
    const bool none = o.retention == Retention::kNone;
    const Kept sets = kept(*session);
    for (const uint32_t layer : {0u, 2u})
      for (const auto& head : sets[layer]) {
        ASSERT_EQ(head.size(), none ? kWindow : kWindow + kLocal);
        for (size_t i = 0; i < head.size(); ++i)
          ASSERT_EQ(head[i], static_cast<int32_t>(200 - head.size() + i));
      }
    EXPECT_EQ(sets[1][0].size(), none ? 200u : 60u + kLocal);
    EXPECT_EQ(must(session->stats()).entries, sets[1][0].size());
  }
}

TEST(WindowedLayers, GoBackAsFarAsTheirEntriesDo) {
  for (const auto& [name, policy] : windowed_policies()) {
    SCOPED_TRACE(name);
    Followed f(windowed().model, policy);
    f.read(seeded_tokens(130));
    const uint64_t last = policy.retention == Retention::kNone ? 130 : 130 - kLocal;
    for (int32_t i = 0; i < 20; ++i) f.accept(i);
    EXPECT_EQ(f->rewind(last - 1).code(), Code::kCannotRewind);
    f.rewind(std::max<uint64_t>(last, 125));
    f.read(seeded_tokens(12, 64, 8));
    f.accept(9);
  }
}

TEST(WindowedLayers, ThatCoverTheTextAreDense) {
  const SeededModel wide = seeded_model({.layers = 4, .window = 300}), plain = seeded_model({.layers = 4});
  const std::vector<int32_t> text = seeded_tokens(200);
  const SessionOptions o{.pool = 400, .chunk = 64};
  const auto one = open_session(wide.model, o), other = open_session(plain.model, o);
  expect_close(read(*one, text), read(*other, text));
  expect_close(accept(*one, 3), accept(*other, 3));
}

// If a layer has a window, its pool need not have room for the text.
TEST(WindowedLayers, TakeOnlyWhatTheySee) {
  const SeededModel all = seeded_model({.layers = 1, .window = kWindow});
  SessionOptions o{.pool = 4000, .chunk = 64, .max_new = 40};
  const MemoryPlan plan = must(make_plan(*all.model, *cpu(), o));
  EXPECT_EQ(plan.capacity, kWindow + o.max_new);
  const auto session = open_session(all.model, o);
  for (const float logit : read(*session, seeded_tokens(5000))) ASSERT_TRUE(std::isfinite(logit));
}

}  // namespace
}  // namespace thimble::test
