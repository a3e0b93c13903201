// Tests drafts: what a session with drafts generates, holds and saves equals that of a session without.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/size_text.h"
#include "runtime/draft/lookup.h"
#include "runtime/draft/pace.h"
#include "tests/support/drafting.h"
#include "tests/support/reference_model.h"
#include "tests/support/synthetic_model.h"

namespace thimble::test {
namespace {

// ---- lookup ----

std::vector<int32_t> guess(Lookup& lookup, size_t tokens) {
  std::vector<int32_t> draft(tokens);
  draft.resize(must(lookup.guess(draft)));
  return draft;
}

TEST(Lookup, GuessesWhatFollowedTheLongestMatch) {
  Lookup lookup;
  const std::vector<int32_t> text = {9, 1, 2, 3, 4, 50, 8, 1, 2, 3, 4, 60, 7, 7, 1, 2, 3, 4};
  must(lookup.note(0, text));
  EXPECT_EQ(guess(lookup, 3), std::vector<int32_t>({60, 7, 7}));  // the later one of two equally long matches
  must(lookup.note(14, std::vector<int32_t>{9, 1, 2, 3, 4}));     // replaces 1 2 3 4
  EXPECT_EQ(guess(lookup, 2), std::vector<int32_t>({50, 8}));     // 9 1 2 3 4 is longer
}

TEST(Lookup, NeedsThreeEqualTokens) {
  Lookup lookup;
  EXPECT_TRUE(guess(lookup, 4).empty());
  must(lookup.note(0, std::vector<int32_t>{1, 2, 5, 6, 1, 2}));
  EXPECT_TRUE(guess(lookup, 4).empty());
  must(lookup.note(6, std::vector<int32_t>{5}));
  EXPECT_EQ(guess(lookup, 2), std::vector<int32_t>({6, 1}));
}

TEST(Lookup, GoesOnWithItsOwnGuess) {
  Lookup lookup;
  must(lookup.note(0, std::vector<int32_t>{1, 2, 1, 2, 1, 2}));
  EXPECT_EQ(guess(lookup, 5), std::vector<int32_t>({1, 2, 1, 2, 1}));
}

TEST(Lookup, ForgetsTheOldestTokensAndAllocatesNothing) {
  Lookup lookup;
  const uint64_t bytes = lookup.bytes();
  EXPECT_EQ(bytes, Lookup::planned_bytes());
  std::vector<int32_t> text(200000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i);
  must(lookup.note(0, text));
  EXPECT_EQ(lookup.bytes(), bytes);
  must(lookup.note(200000, std::vector<int32_t>{199000, 199001, 199002}));
  EXPECT_EQ(guess(lookup, 1), std::vector<int32_t>({199003}));
  must(lookup.note(200003, std::vector<int32_t>{10, 11, 12}));
  EXPECT_TRUE(guess(lookup, 1).empty());
  must(lookup.reset());
  must(lookup.note(0, std::vector<int32_t>{199000, 199001, 199002}));
  EXPECT_TRUE(guess(lookup, 1).empty());
}

// ---- pace ----

// Seconds of `tokens` generated tokens relative to plain steps, if a draft costs `cost` of a step per token
// and `once` of a step however long it is, and its guesses are right as `is_right` says.
template <typename Right>
double relative_time(double cost, int tokens, const Right& is_right, double once = 0) {
  Pace pace;
  double seconds = 0;
  for (int done = 0; done < tokens;) {
    const uint32_t drafted = pace.choose(Pace::kMostDrafted);
    if (!drafted) {
      pace.stepped(1);
      seconds += 1;
      ++done;
      continue;
    }
    uint32_t right = 0;
    while (right < drafted && is_right()) ++right;
    const double took = 1 + once + cost * drafted;
    pace.drafted(drafted, right, right < drafted, took);
    seconds += took;
    done += 1 + static_cast<int>(right);
  }
  return seconds / tokens;
}

TEST(Pace, TurnsDraftsOffThatDoNotPay) {
  EXPECT_LT(relative_time(0.3, 1000, [] { return false; }), 1.05);
  EXPECT_LT(relative_time(0.05, 1000, [] { return false; }), 1.03);
  int i = 0;
  EXPECT_LT(relative_time(1, 1000, [&] { return ++i % 2 == 0; }), 1.05);  // never pays
}

TEST(Pace, DraftsAsManyTokensAsPay) {
  EXPECT_LT(relative_time(0.3, 1000, [] { return true; }), 0.45);  // 16 tokens in 5.5 steps
  EXPECT_LT(relative_time(0.02, 1000, [] { return true; }), 0.1);  // 16 in 1.3
  int i = 0;
  EXPECT_LT(relative_time(0.1, 1000, [&] { return ++i % 4 != 0; }), 0.6);
}

// On a GPU a step with a draft of any length takes several plain steps, so only long drafts pay.
TEST(Pace, FindsThatOnlyLongDraftsPay) {
  const double once = 2.4, cost = 0.09;
  EXPECT_LT(relative_time(
                cost, 1000, [] { return true; }, once),
            0.35);  // 16 tokens in 4.75 steps: 0.3
  EXPECT_LT(relative_time(
                cost, 1000, [] { return false; }, once),
            1.03);
  int i = 0;
  EXPECT_LT(relative_time(
                cost, 1000, [&] { return ++i % 2 == 0; }, once),
            1.03);
  EXPECT_LT(relative_time(
                cost, 1000, [&] { return ++i % 30 != 0; }, once),
            0.5);
}

// A text may become one that repeats, here after twelve wrong guesses.
TEST(Pace, TriesAgain) {
  int asked = 0;
  EXPECT_LT(relative_time(0.3, 4000, [&] { return ++asked > 12; }), 0.65);
  asked = 0;
  EXPECT_LT(relative_time(
                0.09, 4000, [&] { return ++asked > 12; }, 2.4),
            0.65);
}

// ---- sessions ----

SessionOptions with_drafts(SessionOptions o, uint32_t tokens = 3) {
  o.draft = Draft::kLookup;
  o.draft_tokens = tokens;
  return o;
}

SessionOptions with_draft_model(SessionOptions o, std::shared_ptr<const Model> model, uint32_t tokens = 3) {
  o.draft = Draft::kModel;
  o.draft_tokens = tokens;
  o.draft_model = std::move(model);
  return o;
}

// The models of f32 weights: all layers attend to everything, or some to a window; heads share a pool equally
// or not.
std::vector<SeededModel> models() {
  return {seeded_model(), seeded_model({.layers = 3, .window = 25}),
          seeded_model({.shares = {0.3f, 2.4f, 0.9f, 0.4f}})};
}

// Up to four rows, products of f32 give a row the same bits as a single row.
TEST(Drafts, LeaveEveryBitAsWithoutThem) {
  for (const SeededModel& m : models())
    for_policies(m, [&](SessionOptions o) {
      if (!takes_drafts(o)) return;
      if (o.retainer && !o.retainer->shares.empty()) o.pool = 100;
      const auto plain = open_session(m.model, o);
      const auto drafting = open_session(m.model, with_drafts(o));
      const std::vector<int32_t> prompt = repeating(130), answer = repeating(300);
      for (Session* s : {plain.get(), drafting.get()}) read(*s, prompt);
      const uint64_t evictions = plain->state().evictions;
      for (size_t i = 130; i < 300; ++i) {
        must(plain->accept(answer[i]));
        must(drafting->accept(answer[i]));
        expect_same(*drafting, *plain);
        if (HasFatalFailure()) FAIL() << "after token " << i;
        if (i % 7 != 3) continue;  // saving leaves a draft
        EXPECT_EQ(body_of(save(*drafting)), body_of(save(*plain))) << i;
        expect_same(*drafting, *plain);
      }
      if (o.retention != Retention::kNone) {
        EXPECT_GT(plain->state().evictions, evictions);
      }
      EXPECT_EQ(go_on(*drafting), go_on(*plain));
    });
}

TEST(Drafts, SaveSteps) {
  for (const uint32_t pool_rows : {16u, 1u}) {  // 1: drafts are chunks
    Counted plain, drafting;
    drafting.device->pool_rows = pool_rows;
    const SeededModel m = seeded_model();
    const auto a = open_session(m.model, retaining(m, Retention::kNone), plain.device);
    const auto b = open_session(m.model, with_drafts(retaining(m, Retention::kNone)), drafting.device);
    for (Session* s : {a.get(), b.get()}) {
      read(*s, repeating(130));
      for (const int32_t token : repeating(250)) must(s->accept(token));
    }
    EXPECT_EQ(must(a->stats()).generated, 250u);
    EXPECT_EQ(must(b->stats()).generated, 250u);
    EXPECT_LT(drafting.steps, plain.steps * 2 / 3);
    expect_close(accept(*b, 1), accept(*a, 1));
  }
}

TEST(Drafts, SampleTheSameTokens) {
  for (const SeededModel& m : models())
    for_policies(m, [&](SessionOptions o) {
      if (!takes_drafts(o)) return;
      if (o.retainer && !o.retainer->shares.empty()) o.pool = 100;
      for (const SamplerOptions& sampler : {SamplerOptions{}, kWarm, SamplerOptions{.temperature = 0.3f}}) {
        const auto plain = open_session(m.model, o), drafting = open_session(m.model, with_drafts(o));
        for (Session* s : {plain.get(), drafting.get()}) {
          must(s->set_sampler(sampler));
          read(*s, repeating(100));
        }
        for (int i = 0; i < 120; ++i) ASSERT_EQ(must(drafting->step()), must(plain->step())) << i;
        expect_same(*drafting, *plain);
      }
    });
}

// Buffers have room for the rows of a chunk, so a draft has no more.
TEST(Drafts, AreNotLongerThanAChunk) {
  const SeededModel m = seeded_model();
  for (const uint32_t chunk : {1u, 2u, 3u}) {
    SCOPED_TRACE(chunk);
    SessionOptions o = retaining(m, Retention::kWindow);
    o.chunk = chunk;
    Counted counted;
    const auto plain = open_session(m.model, o);
    const auto drafting = open_session(m.model, with_drafts(o, 7), counted.device);
    for (Session* s : {plain.get(), drafting.get()}) read(*s, repeating(130));
    counted.steps = 0;
    for (const int32_t token : repeating(250)) {
      must(plain->accept(token)), must(drafting->accept(token));
      expect_same(*drafting, *plain);
    }
    if (chunk == 1) {
      EXPECT_GE(counted.steps, 250u);
    } else {
      EXPECT_LT(counted.steps, 200u);
    }
  }
}

// A draft that was read only in part is left by every other call.
TEST(Drafts, AreLeftByEveryOtherCall) {
  const SeededModel m = seeded_model();
  for_policies(m, [&](const SessionOptions& o) {
    if (!takes_drafts(o)) return;
    const auto plain = open_session(m.model, o), drafting = open_session(m.model, with_drafts(o, 3));
    const std::vector<int32_t> text = repeating(400);
    size_t at = 100;
    const auto both = [&](const auto& call) {
      call(*drafting), call(*plain);
      expect_same(*drafting, *plain);
    };
    const auto accept_some = [&](int tokens) {
      for (int i = 0; i < tokens; ++i, ++at) both([&](Session& s) { must(s.accept(text[at])); });
    };
    both([&](Session& s) { read(s, std::span(text).first(at)); });
    for (int some = 1; some < 5; ++some) {
      accept_some(some);
      std::vector<float> a(20), b(20);
      must(drafting->score(std::span(text).subspan(at, 20), a));
      must(plain->score(std::span(text).subspan(at, 20), b));
      EXPECT_EQ(a, b);
      at += 20;
      accept_some(some);
      both([&](Session& s) { read(s, std::span(text).subspan(at, 3)); });
      at += 3;
      accept_some(some);
      const uint64_t to = plain->state().read - 1;
      if (to < plain->state().earliest()) continue;
      accept_some(some);
      both([&](Session& s) {
        must(s.rewind(to));
        must(s.accept(text[at]));
      });
      ++at;
      accept_some(some);
      const auto a_twin = must(drafting->clone()), b_twin = must(plain->clone());
      expect_same(*a_twin, *b_twin);
      EXPECT_EQ(go_on(*a_twin), go_on(*b_twin));
      const SessionBytes saved = save(*drafting);
      for (Session* s : {drafting.get(), plain.get()}) {
        must(s->reset());
        restore(*s, saved);
      }
      expect_same(*drafting, *plain);
    }
  });
}

// Calls that are interrupted again and again.
TEST(Drafts, SurviveInterrupts) {
  const SeededModel m = seeded_model();
  for_policies(m, [&](const SessionOptions& o) {
    if (!takes_drafts(o)) return;
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto plain = open_session(m.model, o), drafting = open_session(m.model, with_drafts(o), device);
    const std::vector<int32_t> text = repeating(300);
    for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
    int submits = 0, interrupts = 0;
    device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
      if (++submits % 3 == 0) drafting->interrupt();
    };
    for (size_t i = 100; i < 250; ++i) {
      must(plain->accept(text[i]));
      interrupts += insist([&] { return drafting->accept(text[i]); });
      expect_same(*drafting, *plain);
      if (HasFatalFailure()) FAIL() << "after token " << i;
    }
    EXPECT_GT(interrupts, 50);
  });
}

// On devices whose steps read several rows only as chunks. Both round differently, and so do a retainer's
// scores. They are equal in the first layer for equal tokens, so that rounding decides which of these are
// kept; locret and mix are therefore left out.
TEST(Drafts, MayBeChunks) {
  const SeededModel m = seeded_model();
  for_policies(m, [&](const SessionOptions& o) {
    if (!takes_drafts(o) || o.retention == Retention::kLocret || o.retention == Retention::kMix) return;
    const auto device = std::make_shared<SpyDevice>(cpu());
    device->pool_rows = 1;
    const auto plain = open_session(m.model, o), drafting = open_session(m.model, with_drafts(o), device);
    const std::vector<int32_t> text = repeating(300);
    for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
    for (size_t i = 100; i < 250; ++i) {
      const std::vector<float> expected = accept(*plain, text[i]);
      expect_close(accept(*drafting, text[i]), expected, 0x1p-6f);
      ASSERT_EQ(kept(*drafting), kept(*plain)) << i;
    }
    EXPECT_EQ(drafting->state().evictions, plain->state().evictions);
    EXPECT_EQ(drafting->state().generated, plain->state().generated);
  });
}

// Some tokens have keys and values beyond the range of halves. Those of rows that are left do not count.
TEST(Drafts, DoNotCountNumbersOfRowsThatAreLeft) {
  const SeededModel m =
      seeded_model({.layers = 1, .edit = [](const std::string& name, std::vector<float>& values) {
                      if (name.ends_with("attn_k.weight"))
                        for (size_t i = 0; i < 32; ++i) values[9 * 32 + i] *= 60'000;
                    }});
  const SessionOptions o = retaining(m, Retention::kNone);
  const auto plain = open_session(m.model, o), drafting = open_session(m.model, with_drafts(o));
  const std::vector<int32_t> text = repeating(200);
  for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
  const uint64_t before = must(plain->stats()).saturated;
  for (size_t i = 100; i < 200; ++i) {
    must(plain->accept(text[i])), must(drafting->accept(text[i]));
    expect_same(*drafting, *plain);
  }
  EXPECT_GT(must(plain->stats()).saturated, before);
}

TEST(Drafts, AreRefusedIfEveryTokenNeedsAStep) {
  const SeededModel m = seeded_model();
  for_policies(m, [&](const SessionOptions& o) {
    const auto session = Session::create(m.model, cpu(), with_drafts(o));
    EXPECT_EQ(session.ok(), takes_drafts(o));
    if (!session.ok()) {
      EXPECT_EQ(session.status().code(), Code::kInvalidArgument);
    }
  });
  SessionOptions watching = with_drafts(retaining(m, Retention::kNone));
  watching.watch = true;
  EXPECT_EQ(Session::create(m.model, cpu(), watching).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(Session::create(m.model, cpu(), with_drafts(retaining(m, Retention::kNone), 16)).status().code(),
            Code::kInvalidArgument);
}

// With its own pace a session drafts as many tokens as pay. What it generates is the same.
TEST(Drafts, AtTheirOwnPaceGenerateTheSame) {
  const SeededModel m = seeded_model();
  const SessionOptions o = retaining(m, Retention::kLocret);
  const auto plain = open_session(m.model, o), drafting = open_session(m.model, with_drafts(o, 0));
  for (Session* s : {plain.get(), drafting.get()}) {
    read(*s, repeating(100));
    for (int i = 0; i < 200; ++i) must(s->step());
  }
  EXPECT_EQ(kept(*drafting), kept(*plain));
  EXPECT_EQ(drafting->state().sampler.saved().accepted, plain->state().sampler.saved().accepted);
}

// ---- a draft model ----

// The same model guesses right as long as its window holds the text. Another one guesses mostly wrong.
TEST(DraftModels, LeaveEveryBitAsWithoutThem) {
  const SeededModel m = seeded_model(), other = seeded_model({.layers = 1, .seed = 2});
  for (const std::shared_ptr<const Model>& drafter : {m.model, other.model})
    for_policies(m, [&](const SessionOptions& o) {
      if (!takes_drafts(o)) return;
      const auto plain = open_session(m.model, o);
      const auto drafting = open_session(m.model, with_draft_model(o, drafter));
      const std::vector<int32_t> text = repeating(300);
      for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
      for (int i = 0; i < 60; ++i) {
        ASSERT_EQ(must(drafting->step()), must(plain->step()));
        expect_same(*drafting, *plain);
      }
      for (size_t i = 100; i < 160; ++i) {
        must(drafting->accept(text[i])), must(plain->accept(text[i]));
        expect_same(*drafting, *plain);
      }
      const auto twin = must(drafting->clone()), plain_twin = must(plain->clone());
      EXPECT_EQ(go_on(*twin), go_on(*plain_twin));
      EXPECT_LE(twin->allocated(), 2 * twin->plan().total);
      EXPECT_EQ(go_on(*drafting), go_on(*plain));
    });
}

TEST(DraftModels, SaveSteps) {
  const SeededModel m = seeded_model();
  for (const Retention retention : {Retention::kNone, Retention::kWindow}) {
    Counted plain, drafting;
    const SessionOptions o = retaining(m, retention);
    const auto a = open_session(m.model, o, plain.device);
    // Its own steps are on another device, so that they do not count.
    const auto b = open_session(m.model, with_draft_model(o, m.model), drafting.device);
    uint64_t of_target = 0;
    drafting.device->before_submit = [&](const Program&, const StepParams& step, std::span<const HeadState>) {
      of_target += step.n_rows == 4 && step.n_logit_rows == 4;
    };
    for (Session* s : {a.get(), b.get()}) {
      read(*s, repeating(50));
      for (int i = 0; i < 200; ++i) must(s->step());
    }
    EXPECT_GT(of_target, 40u);          // each has several segments
    EXPECT_LT(of_target, 60u * 4 * 1);  // three of four tokens need no step
  }
}

TEST(DraftModels, AreInsideTheBudget) {
  const SeededModel m = seeded_model();
  SessionOptions o = retaining(m, Retention::kWindow);
  o.pool = 0;
  o.budget = 3 << 20;
  const uint32_t alone = must(make_plan(*m.model, *cpu(), o)).options.pool;
  const auto device = std::make_shared<SpyDevice>(cpu());
  const auto session = open_session(m.model, with_draft_model(o, m.model), device);
  EXPECT_LT(session->plan().options.pool, alone);
  EXPECT_GT(session->plan().draft, 0u);
  EXPECT_LE(session->plan().total, o.budget);
  EXPECT_LE(device->peak_bytes, session->plan().total);
}

// The message of a budget that is too small lists what drafts take, as it lists the other parts.
TEST(DraftModels, AreInTheMessageOfASmallBudget) {
  const SeededModel m = seeded_model();
  const SessionOptions o = retaining(m, Retention::kWindow), drafting = with_draft_model(o, m.model);
  const auto device = std::make_shared<SpyDevice>(cpu());
  device->discrete = true;  // weights are copied
  const auto refused = [&](const SessionOptions& options) {
    SessionOptions small = options;
    small.budget = 1000;
    return make_plan(*m.model, *device, small).status().message();
  };
  EXPECT_EQ(refused(o).find("drafts"), std::string::npos) << refused(o);
  const MemoryPlan plan = must(make_plan(*m.model, *device, drafting));
  ASSERT_GT(plan.draft_weights, 0u);
  EXPECT_NE(refused(drafting).find(", drafts " + size_text(plan.draft) + ", of which weights " +
                                   size_text(plan.draft_weights) + ");"),
            std::string::npos)
      << refused(drafting);
}

TEST(DraftModels, NeedTheSameVocabularyAndNoStates) {
  const SeededModel m = seeded_model(), other = seeded_model({.vocab = 32});
  const SessionOptions o = retaining(m, Retention::kNone);
  EXPECT_EQ(Session::create(m.model, cpu(), with_draft_model(o, other.model)).status().code(),
            Code::kMismatch);
  EXPECT_EQ(Session::create(m.model, cpu(), with_draft_model(o, nullptr)).status().code(),
            Code::kInvalidArgument);
}

// Their layers keep a state, which cannot leave out rows. Rows that stay are read again.
TEST(Drafts, LeaveNoTraceInStates) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  for (const char* family : {"lfm2", "qwen35", "falconh1"}) {
    SCOPED_TRACE(family);
    const std::shared_ptr<const Model> model = family_model(family, "drafts");
    for (const Retention retention : {Retention::kNone, Retention::kWindow}) {
      SessionOptions o{.pool = 400, .chunk = 64, .max_new = 64};
      if (retention == Retention::kWindow)
        o = {.retention = retention, .pool = 60, .chunk = 64, .local = 20, .max_new = 44};
      const auto plain = open_session(model, o), drafting = open_session(model, with_drafts(o));
      const std::vector<int32_t> text = repeating(320);
      for (Session* s : {plain.get(), drafting.get()}) read(*s, std::span(text).first(100));
      for (size_t i = 100; i < 300; ++i) {
        const std::vector<float> expected = accept(*plain, text[i]);
        expect_close(accept(*drafting, text[i]), expected);
        if (i % 13 != 5) continue;
        const SessionBytes a = save(*drafting), b = save(*plain);
        EXPECT_EQ(a.size(), b.size());
        EXPECT_EQ(without_costs(drafting->state()).recent, plain->state().recent);
        EXPECT_EQ(drafting->state().snapshots.size(), plain->state().snapshots.size());
        const auto restored = open_session(model, o);
        restore(*restored, a);
        expect_close(flush(*restored), expected);
        expect_close(accept(*restored, 3), accept(*must(plain->clone()), 3));
      }
      EXPECT_EQ(kept(*drafting), kept(*plain));
    }
  }
}

}  // namespace
}  // namespace thimble::test
