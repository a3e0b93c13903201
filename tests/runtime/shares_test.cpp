// Tests heads that share the pool by the shares of the retainer's file. The whole pool is used before
// anything is evicted, and runs move as a text grows. The logits are compared with dense attention, and with
// a reference in double precision.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/reference_model.h"
#include "tests/support/saved_sessions.h"

namespace thimble::test {
namespace {

const std::vector<float> kShares = {0.25f, 0.25f, 2.9f, 0.6f};  // [layer][kv head]

const SeededModel& model() {
  static const SeededModel m = seeded_model({.shares = kShares});
  return m;
}
// Pools in which heads get more or less than others; a head has at least 64 entries.
constexpr uint32_t kPool = 150;
SessionOptions sharing(const SeededModel& m, uint32_t pool = kPool) {
  SessionOptions o = retaining(m, Retention::kLocret);
  o.pool = pool;
  return o;
}
uint64_t held(const Session& session) {
  uint64_t sum = 0;
  for (const auto& layer : kept(session))
    for (const auto& head : layer) sum += head.size();
  return sum;
}
uint64_t keep_together(const std::vector<HeadRun>& runs) {
  return std::accumulate(runs.begin(), runs.end(), uint64_t{0},
                         [](uint64_t sum, const HeadRun& run) { return sum + run.keep; });
}

// ---- a pool as large as the text ----

// Reads a text and generates tokens until the pool is full. Returns the bits of all logits.
std::vector<std::vector<float>> answers(Session& session, std::span<const int32_t> text, uint32_t tokens) {
  std::vector<std::vector<float>> all = {read(session, text)};
  for (uint32_t i = 0; i < tokens; ++i) all.push_back(accept(session, static_cast<int32_t>(i * 7 % 64)));
  return all;
}

TEST(Shares, EqualDenseAttentionInAPoolAsLargeAsTheText) {
  constexpr uint32_t kTokens = 25;
  for (const char* kind : {"", "linear", "mlp", "sink"}) {
    const SeededModel m = seeded_model({.kind = kind, .shares = kShares});
    for_policies(m, [&](SessionOptions o) {
      // Other tests cover selections. The kinds of retainers differ only with the retention locret.
      if (o.selection != Selection::kDense || (*kind && o.retention != Retention::kLocret)) return;
      SCOPED_TRACE(kind);
      for (const uint32_t length : {30u, 64u, 200u}) {
        const std::vector<int32_t> text = seeded_tokens(length);
        o.pool = length + kTokens;
        const auto session = open_session(m.model, o);
        const auto dense = open_session(m.model, {.pool = o.pool, .chunk = o.chunk});
        ASSERT_EQ(answers(*session, text, kTokens), answers(*dense, text, kTokens)) << length;
        EXPECT_EQ(must(session->stats()).evicted, 0u);
      }
    });
  }
}

// KeyDiff has no trained scores to derive shares from, and uses the shares of a heads file.
TEST(Shares, AreTakenByKeyDiffAndMix) {
  SessionOptions o = sharing(model());
  const auto trained = open_session(model().model, o);
  o.retention = Retention::kMix;
  const auto mix = open_session(model().model, o);
  o.retention = Retention::kKeyDiff;
  const auto session = open_session(model().model, o);
  o.retainer = nullptr;
  const auto equal = open_session(model().model, o);
  const std::vector<int32_t> text = seeded_tokens(700);
  for (Session* s : {trained.get(), mix.get(), session.get(), equal.get()}) read(*s, text);
  const auto counts = [](const Session& of) {
    std::vector<size_t> all;
    for (const auto& layer : kept(of))
      for (const auto& head : layer) all.push_back(head.size());
    return all;
  };
  EXPECT_EQ(counts(*session), counts(*trained));
  EXPECT_EQ(counts(*mix), counts(*trained));
  EXPECT_NE(counts(*session), counts(*equal));
}

TEST(Shares, EvictNothingBeforeThePoolIsFull) {
  const auto session = open_session(model().model, sharing(model()));
  const std::vector<int32_t> text = seeded_tokens(700);
  uint64_t most = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    must(session->feed(std::span(text).subspan(at, 1)));
    const SessionStats stats = must(session->stats());
    const uint64_t read = stats.position - stats.waiting;
    most = std::max(most, held(*session));
    if (read <= kPool) {
      ASSERT_EQ(held(*session), 4 * read);
    }
    ASSERT_LE(held(*session), 4u * kPool);
  }
  EXPECT_EQ(most, 4u * kPool);
  EXPECT_EQ(held(*session), 4u * kPool);
}

// ---- how it is divided ----

TEST(Shares, AreGivenAsFarAsATextCanUseThem) {
  const auto plan = [](SessionOptions o) { return must(make_plan(*model().model, *cpu(), o)).dimensions; };
  const Dimensions d = plan(sharing(model(), 300));
  // Divisions for 300, 600 and 1,200 tokens: 2.9 times 300 entries are 870.
  ASSERT_EQ(d.divisions.size(), 3u);
  for (const Division& division : d.divisions) {
    EXPECT_EQ(keep_together(division.runs), 4u * 300);
    for (const HeadRun& run : division.runs) EXPECT_LE(run.keep, division.text);
  }
  EXPECT_EQ(d.divisions[1].runs[2].keep, 600u);
  EXPECT_GT(d.divisions[1].runs[3].keep, d.divisions[2].runs[3].keep);

  SessionOptions o = sharing(model(), 300);
  o.context = 500;  // the part that a head cannot use goes to the others
  const Dimensions bounded = plan(o);
  EXPECT_EQ(bounded.last_runs()[2].keep, 500u);
  EXPECT_EQ(keep_together(bounded.last_runs()), 4u * 300);
  o.context = 250;  // then every head has room for all entries
  EXPECT_FALSE(plan(o).moves);
  for (const HeadRun& run : plan(o).runs) EXPECT_EQ(run.keep, 300u);
}

// ---- runs that move ----

TEST(Shares, AnswerAsTheReferenceDoesWhileRunsMove) {
  const SeededModel two_large = seeded_model({.shares = {1.7f, 2, 0.2f, 0.1f}}),
                    windowed = seeded_model(
                        {.layers = 4, .shares = {1, 1, 0.3f, 0.4f, 1, 1, 2.6f, 0.7f}, .window = 24});
  for (const SeededModel& m : {model(), two_large, windowed}) {
    for (const auto& [selection, while_reading] :
         {std::pair(Selection::kDense, false), std::pair(Selection::kTokenSelect, false),
          std::pair(Selection::kTokenSelect, true), std::pair(Selection::kQuest, false)}) {
      SCOPED_TRACE(policy_name(selection));
      SessionOptions o = selecting(sharing(m, 200), selection, while_reading);
      if (while_reading) o.select_k = 8, o.select_local = 16;  // a view that is shorter than a head's entries
      o.watch = true;                                          // then layers do not share a list
      Followed f(m.model, o);
      f.read(seeded_tokens(120));
      for (uint32_t turn = 0; turn < 4; ++turn) {
        f.read(seeded_tokens(130, 64, 10 + turn));
        for (int32_t i = 0; i < 4; ++i) f.accept(i);
        f.rewind(must(f->stats()).position - 3);
      }
      EXPECT_EQ(f->state().division + 1, f->plan().dimensions.divisions.size());
      if (HasFailure()) return;
    }
  }
}

// No chunk is read in between, which would recompute what a selection knows about the entries.
TEST(Shares, MoveWhileTokensAreGenerated) {
  for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
    SCOPED_TRACE(policy_name(selection));
    Followed f(model().model, selecting(sharing(model()), selection, false));
    f.read(seeded_tokens(155));  // 150 and the local tokens
    EXPECT_EQ(f->state().division, 0u);
    for (int32_t i = 0; i < 220; ++i) f.accept(i % 64);
    EXPECT_EQ(f->state().division, 2u);
  }
}

// In every division, a session that is saved and restored, cloned, or read again after a reset continues in
// the same way.
TEST(Shares, AreSavedAndClonedAtEveryPosition) {
  for (const Selection selection : {Selection::kDense, Selection::kTokenSelect, Selection::kQuest}) {
    SCOPED_TRACE(policy_name(selection));
    SessionOptions o = selecting(sharing(model()), selection, false);
    const auto session = open_session(model().model, o), other = open_session(model().model, o);
    must(session->set_sampler(kWarm));
    for (const uint32_t length : {120u, 250u, 400u, 700u}) {
      must(session->reset());
      must(session->feed(seeded_tokens(length)));
      must(session->step());
      must(session->feed(seeded_tokens(5, 64, 7)));  // these tokens wait
      const auto twin = must(session->clone());
      restore(*other, save(*session));
      EXPECT_EQ(other->state().division, session->state().division);
      const Outcome expected = go_on(*session);
      ASSERT_EQ(go_on(*twin), expected) << length;
      ASSERT_EQ(go_on(*other), expected) << length;
    }
  }
}

// A smaller pool is divided by the length of the text so far, and keeps this division.
TEST(Shares, ShrinkAtEveryPosition) {
  for (const uint32_t length : {120u, 250u, 700u}) {
    const auto session = open_session(model().model, sharing(model()));
    must(session->feed(seeded_tokens(length)));
    const std::vector<HeadRun> before = session->runs();
    must(session->shrink(100));
    const std::vector<HeadRun> after = session->runs();
    EXPECT_LE(keep_together(after), 4u * 100);
    EXPECT_GE(keep_together(after) + 4, 4u * 100);  // shares are rounded
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_LE(after[i].keep, before[i].keep);
      EXPECT_LE(kept(*session)[i / 2][i % 2].size(), after[i].keep);
    }
    read(*session, seeded_tokens(200, 64, 8));
    const auto twin = must(session->clone());
    EXPECT_EQ(go_on(*twin), go_on(*session));
  }
}

}  // namespace
}  // namespace thimble::test
