// Tests the stream of a session: the same tokens give the same bits, regardless of how calls divide,
// interrupt, rewind, clone or reset it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "backends/cpu/host/cpu_device.h"
#include "backends/cpu/kernels.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {
namespace {

const SeededModel& model() {
  static const SeededModel m = seeded_model();
  return m;
}

struct Policy {
  const char* name;
  SessionOptions options;
  std::shared_ptr<const Model> on = model().model;

  std::unique_ptr<Session> open(const std::shared_ptr<Device>& device = cpu()) const {
    return open_session(on, options, device);
  }
  bool windowed() const { return on->layers[0].attention()->window != 0; }
  // Options with which nothing is evicted while `tokens` tokens are generated.
  SessionOptions with_room(uint32_t tokens) const {
    SessionOptions o = options;
    o.max_new = tokens;
    if (o.retention == Retention::kAdore) o.pool = 400;  // a full pool releases an entry with every token
    return o;
  }
};

// Every policy, in a pool that must evict if the policy evicts. Pools are 60 or 100, and texts are longer.
std::vector<Policy> policies(const Seeded& seeded = {}) {
  const SeededModel m = seeded_model(seeded);
  Seeded with_windows = seeded;
  with_windows.layers = 3;
  with_windows.window = 25;
  const SeededModel windowed = seeded_model(with_windows);

  SessionOptions none{.pool = 400, .chunk = 20, .max_new = 200};
  SessionOptions window{
      .retention = Retention::kWindow, .pool = 60, .chunk = 20, .stabilizers = 8, .local = 15, .max_new = 12};
  SessionOptions random = window, keydiff = window, tova = window, reread = window, locret = window, mix,
                 both;
  random.retention = Retention::kRandom;
  keydiff.retention = Retention::kKeyDiff;
  tova.retention = Retention::kTova;
  reread.retention = Retention::kReread;
  locret.retainer = m.retainer;
  locret.retention = Retention::kLocret;
  mix = locret;
  mix.retention = Retention::kMix;
  SessionOptions adore{.retainer = m.controller, .retention = Retention::kAdore, .pool = 60, .chunk = 20};
  SessionOptions rebuilding = adore;
  rebuilding.rebuild = 5;
  rebuilding.rebuild_every = 2;
  both = locret;
  both.selection = Selection::kTokenSelect;
  both.select_k = 8;
  both.select_init = 2;
  both.select_local = 12;
  both.select_theta = 0.5f;
  both.vote = VoteScope::kGroup;
  SessionOptions selecting = both;
  selecting.retainer = nullptr;
  selecting.retention = Retention::kNone;
  selecting.pool = 400;
  selecting.max_new = 200;
  selecting.chunk = 12;
  selecting.select_prefill = true;
  selecting.vote = VoteScope::kLayer;
  SessionOptions original = locret;
  original.positions = Positions::kOriginal;
  SessionOptions quest = none, quest_over_window = window;
  for (SessionOptions* o : {&quest, &quest_over_window}) {
    o->selection = Selection::kQuest;
    o->select_k = 32;
    o->select_page = 8;
    o->dense_layers = 0;
  }
  SessionOptions unequal = both;
  unequal.keeps = {20, 40, 150, 30};
  // Runs that move while a text is read, in a model that differs only in its retainer's file.
  Seeded with_shares = seeded;
  with_shares.shares = {0.3f, 2.4f, 0.9f, 0.4f};
  const SeededModel sharing = seeded_model(with_shares);
  SessionOptions shares = locret, shares_and_both = both, shares_and_quest = locret;
  for (SessionOptions* o : {&shares, &shares_and_both, &shares_and_quest}) {
    o->retainer = sharing.retainer;
    o->pool = 100;  // a head has at least 64 of it
  }
  shares_and_quest.selection = Selection::kQuest;
  shares_and_quest.select_k = 32;
  shares_and_quest.select_page = 8;
  shares_and_quest.dense_layers = 0;
  SessionOptions windows_and_both = both;
  windows_and_both.retainer = windowed.retainer;
  return {{"dense", none, m.model},
          {"window", window, m.model},
          {"locret", locret, m.model},
          {"locret and tokenselect", both, m.model},
          {"tokenselect", selecting, m.model},
          {"locret at original positions", original, m.model},
          {"quest", quest, m.model},
          {"quest over a window", quest_over_window, m.model},
          {"unequal runs and tokenselect", unequal, m.model},
          {"shares", shares, sharing.model},
          {"shares and tokenselect", shares_and_both, sharing.model},
          {"shares and quest", shares_and_quest, sharing.model},
          {"random", random, m.model},
          {"keydiff", keydiff, m.model},
          {"tova", tova, m.model},
          {"reread", reread, m.model},
          {"mix", mix, m.model},
          {"adore", adore, m.model},
          {"adore that rebuilds", rebuilding, m.model},
          {"windowed layers", none, windowed.model},
          {"windowed layers, locret and tokenselect", windows_and_both, windowed.model}};
}

// The visible state of a session.
struct State {
  std::vector<float> logits;
  Kept positions;
  uint64_t position = 0, evicted = 0;
  bool operator==(const State&) const = default;
};
State state(Session& session) {
  State s;
  s.logits = flush(session);
  s.positions = kept(session);
  const SessionStats stats = must(session.stats());
  s.position = stats.position;
  s.evicted = stats.evicted;
  return s;
}

// Repeats a call while it is interrupted. It must progress each time, and no call here has a thousand
// segments or parts of segments.
template <typename Call>
void finish(const Call& call, uint64_t* interrupts = nullptr) {
  for (int i = 0; i < 1000; ++i) {
    const auto result = call();
    const Status status = to_status(result);
    if (status.code() != Code::kInterrupted) return must(status);
    if (interrupts) ++*interrupts;
  }
  throw std::runtime_error("a call that is interrupted again and again makes no progress");
}

// A whole use of a session: a prompt, an answer, a score, another turn, and tokens until the pool has
// overflowed. Stores all results.
struct Life {
  std::vector<int32_t> answer;
  std::vector<float> log_probs;
  State end;
  uint64_t interrupts = 0;
  bool same_as(const Life& o) const { return answer == o.answer && log_probs == o.log_probs && end == o.end; }
};
Life live(
    Session& session, const std::function<void()>& after_interrupt = [] {}) {
  Life life;
  const auto done = [&](const auto& call) {
    finish(
        [&] {
          auto result = call();
          if (to_status(result).code() == Code::kInterrupted) after_interrupt();
          return result;
        },
        &life.interrupts);
  };
  const auto step = [&] {
    done([&] {
      const Result<int32_t> token = session.step();
      if (token.ok()) life.answer.push_back(*token);
      return token;
    });
  };
  const std::vector<int32_t> prompt = seeded_tokens(130), scored = seeded_tokens(30, 64, 8),
                             turn = seeded_tokens(40, 64, 9);
  done([&] { return session.feed(prompt); });
  for (int i = 0; i < 3; ++i) step();
  life.log_probs.resize(scored.size());
  done([&] { return session.score(scored, life.log_probs); });
  done([&] { return session.feed(turn); });
  done([&] { return session.flush(); });
  for (int i = 0; i < 16; ++i) step();
  done([&] { return session.accept(5); });
  life.end = state(session);
  return life;
}

// ---- feeding ----

TEST(Stream, GivesTheSameBitsHoweverItIsCut) {
  const std::vector<int32_t> tokens = seeded_tokens(333);
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    std::vector<State> states;
    for (const size_t piece : {1u, 7u, 1000u}) {
      const auto session = policy.open();
      for (size_t at = 0; at < tokens.size(); at += piece)
        must(session->feed(std::span(tokens).subspan(at, std::min(piece, tokens.size() - at))));
      states.push_back(state(*session));
      EXPECT_EQ(policy.options.retention != Retention::kNone || policy.windowed(), states.back().evicted > 0);
    }
    EXPECT_EQ(states[1], states[0]);
    EXPECT_EQ(states[2], states[0]);
  }
}

TEST(Stream, RunsManyTurnsInsideItsPlan) {
  for (const uint32_t max_new : {8u, 60u}) {  // an answer exceeds its room, or just fits
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto session = open_session(model().model,
                                      {.retainer = model().retainer,
                                       .retention = Retention::kLocret,
                                       .pool = 256,
                                       .chunk = 64,
                                       .stabilizers = 32,
                                       .local = 100,
                                       .max_new = max_new},
                                      device);
    const uint64_t live = device->live_bytes, allocations = device->allocations;
    const std::vector<int32_t> tokens = seeded_tokens(40 * 30);
    for (size_t turn = 0; turn < 40; ++turn) {
      must(session->feed(std::span(tokens).subspan(30 * turn, 30)));
      for (int i = 0; i < 60; ++i) must(session->step());
      const SessionStats stats = must(session->stats());
      ASSERT_LE(stats.entries, session->plan().capacity);
      ASSERT_EQ(stats.position, 90 * (turn + 1));
      ASSERT_EQ(stats.entries + stats.evicted, stats.position);
    }
    for (const float logit : must(session->logits())) ASSERT_TRUE(std::isfinite(logit));
    EXPECT_GT(must(session->stats()).evictions, 3u);
    EXPECT_EQ(device->live_bytes, live);
    EXPECT_EQ(device->allocations, allocations);
    EXPECT_LE(device->peak_bytes, session->plan().total);
  }
}

TEST(Stream, ATurnThatFitsEvictsNothing) {
  const auto session = open_session(model().model, {.retainer = model().retainer,
                                                    .retention = Retention::kLocret,
                                                    .pool = 60,
                                                    .chunk = 20,
                                                    .stabilizers = 8,
                                                    .local = 15,
                                                    .max_new = 12});
  read(*session, seeded_tokens(40));
  for (int32_t i = 0; i < 12; ++i) accept(*session, i);
  for (int i = 0; i < 4; ++i) {  // 67, 82, 97, 112
    read(*session, seeded_tokens(15));
    EXPECT_EQ(must(session->stats()).evicted, 0u);
  }
  read(*session, seeded_tokens(15));  // 15 more exceed the 60 + 64 entries of room
  EXPECT_GT(must(session->stats()).evicted, 0u);
}

// Decoded tokens are also evicted, while the last ones are protected. When the ring of decoded tokens is
// full, they are scored before their room is used up.
TEST(Stream, DecodesForEverInAFullPool) {
  // 10: it is raised so that local and max_new are 64, or evictions would come too often.
  for (const uint32_t max_new : {10u, 150u}) {
    const auto session = open_session(model().model, {.retainer = model().retainer,
                                                      .retention = Retention::kLocret,
                                                      .pool = 60,
                                                      .chunk = 20,
                                                      .stabilizers = 16,
                                                      .local = 15,
                                                      .max_new = max_new});
    read(*session, seeded_tokens(100));
    uint64_t evictions = must(session->stats()).evictions;
    const uint64_t prompt = evictions;
    for (int32_t i = 0; i < 500; ++i) {
      accept(*session, (i * 7) % 64);
      const SessionStats stats = must(session->stats());
      ASSERT_LE(stats.entries, session->plan().capacity);
      if (stats.evictions == evictions) continue;
      evictions = stats.evictions;
      ASSERT_EQ(stats.entries, 61u);  // the pool, and the token that did not fit
      for (const auto& layer : kept(*session))
        for (const auto& head : layer)
          for (uint32_t k = 0; k < 17; ++k)
            ASSERT_EQ(head[head.size() - 1 - k], static_cast<int32_t>(stats.position - 1 - k));
    }
    const uint32_t room = std::max(15 + max_new, 64u);  // the prompt's local tokens take 15 of it
    EXPECT_EQ(evictions - prompt, 1 + (500 - (room - 15) - 1) / room);
  }
}

TEST(Stream, AnEmptySessionHasNothingToGoOnFrom) {
  const auto session = open_session(model().model, policies()[0].options);
  must(session->feed({}));
  must(session->flush());
  EXPECT_EQ(session->logits().status().code(), Code::kInvalidArgument);
  EXPECT_EQ(session->step().status().code(), Code::kInvalidArgument);
  read(*session, seeded_tokens(3));
  EXPECT_TRUE(session->step().ok());
}

TEST(Stream, RefusesTokensThatAreNotInTheVocabulary) {
  const auto session = open_session(model().model, policies()[0].options);
  const State before = (read(*session, seeded_tokens(50)), state(*session));
  for (const int32_t bad : {-1, 64}) {
    const std::vector<int32_t> tokens = {1, bad};
    std::vector<float> log_probs(2);
    EXPECT_EQ(session->feed(tokens).code(), Code::kInvalidArgument);
    EXPECT_EQ(session->accept(bad).code(), Code::kInvalidArgument);
    EXPECT_EQ(session->score(tokens, log_probs).code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(state(*session), before);
}

TEST(Stream, AFullContextLeavesTheSessionUsable) {
  const std::vector<int32_t> tokens = seeded_tokens(81);
  const auto session = open_session(model().model, {.pool = 64, .chunk = 32, .max_new = 16});
  EXPECT_EQ(session->feed(tokens).code(), Code::kContextFull);
  EXPECT_EQ(must(session->stats()).position, 0u);
  must(session->feed(std::span(tokens).first(50)));
  EXPECT_EQ(session->feed(std::span(tokens).first(31)).code(), Code::kContextFull);
  EXPECT_EQ(must(session->stats()).position, 50u);
  must(session->feed(std::span(tokens).subspan(50, 30)));
  const State full = state(*session);
  EXPECT_EQ(full.position, 80u);
  std::vector<float> log_prob(1);
  EXPECT_EQ(session->accept(1).code(), Code::kContextFull);
  EXPECT_EQ(session->step().status().code(), Code::kContextFull);
  EXPECT_EQ(session->score(std::span(tokens).first(1), log_prob).code(), Code::kContextFull);
  EXPECT_EQ(state(*session), full);
  must(session->rewind(79));
  accept(*session, 3);
  EXPECT_EQ(session->step().status().code(), Code::kContextFull);
}

TEST(Stream, NeverPassesTheBoundOnPositions) {
  SessionOptions o = policies()[5].options;
  o.context = 100;
  const auto session = open_session(model().model, o);
  const std::vector<int32_t> tokens = seeded_tokens(101);
  EXPECT_EQ(session->feed(tokens).code(), Code::kContextFull);
  read(*session, std::span(tokens).first(99));
  EXPECT_TRUE(session->step().ok());
  EXPECT_EQ(session->step().status().code(), Code::kContextFull);
}

// ---- generating ----

TEST(Stream, AcceptOfTheSampledTokenEqualsAStep) {
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const auto stepping = policy.open(), accepting = policy.open();
    for (Session* s : {stepping.get(), accepting.get()}) read(*s, seeded_tokens(100));
    for (int i = 0; i < 40; ++i) must(accepting->accept(must(stepping->step())));
    EXPECT_EQ(state(*stepping), state(*accepting));
  }
}

TEST(Stream, ScoresAreTheLogSoftmaxOfEachStepsLogits) {
  const std::vector<int32_t> prompt = seeded_tokens(50),
                             scored = seeded_tokens(45, 64, 8);  // three slices and a rest
  for (Policy policy : policies()) {
    SCOPED_TRACE(policy.name);
    const bool selects = policy.options.selection != Selection::kDense;
    // Without a selection, a slice is read at once, and then evictions would happen at other positions.
    if (!selects) policy.options.max_new = 100;
    const auto scoring = policy.open(), stepping = policy.open();
    std::vector<float> log_probs(scored.size());
    must(scoring->feed(prompt));
    must(scoring->score(scored, log_probs));
    std::vector<float> logits = read(*stepping, prompt);
    for (size_t i = 0; i < scored.size(); ++i) {
      const double top = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (const float x : logits) sum += std::exp(x - top);
      // As in reference_model.h, a chunk and a step may round a key or value to adjacent halves.
      const double tolerance = 0x1p-9 * std::max(top, 1.0);
      ASSERT_NEAR(log_probs[i], logits[scored[i]] - top - std::log(sum), tolerance) << i;
      logits = accept(*stepping, scored[i]);
    }
    const State after = state(*scoring), expected = state(*stepping);
    if (selects) {
      EXPECT_EQ(after, expected);  // it runs in steps
    }
    for (size_t i = 0; i < after.logits.size(); ++i) EXPECT_NEAR(after.logits[i], logits[i], 0x1p-6) << i;
    EXPECT_EQ(after.position, 95u);
  }
}

TEST(Stream, GeneratesTheSameTokensWithTheSameSeed) {
  const auto run = [](uint64_t seed) {
    const auto session = open_session(model().model, policies()[2].options);
    must(session->set_sampler({.temperature = 1, .seed = seed}));
    must(session->feed(seeded_tokens(100)));
    std::vector<int32_t> tokens;
    for (int i = 0; i < 30; ++i) tokens.push_back(must(session->step()));
    return tokens;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

// ---- numbers that are none ----

// A token whose embedding is NaN makes every logit NaN from this token on.
TEST(NotFinite, IsReportedAndTheSessionCanRewind) {
  constexpr int32_t kBad = 63;
  Seeded seeded;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    seeded.edit = [&](const std::string& name, std::vector<float>& values) {
      if (name == "token_embd.weight") values[kBad * 32 + 5] = bad;
    };
    for (Policy& policy : policies(seeded)) {
      SCOPED_TRACE(policy.name);
      policy.options = policy.with_room(100);  // no eviction that would prevent the rewind
      const auto session = policy.open();
      const auto refused = [&](const Status& status) {
        EXPECT_EQ(status.code(), Code::kNotFinite) << status.message();
        EXPECT_NE(status.message().find("NaN or infinite"), std::string::npos) << status.message();
      };
      const std::vector<int32_t> prompt = seeded_tokens(80, 63);
      const std::vector<int32_t> scored = {3, kBad, 5, 6};
      std::vector<float> log_probs(scored.size());
      const State before = (read(*session, prompt), accept(*session, 3), state(*session));

      must(session->accept(kBad));
      refused(session->logits().status());
      refused(session->step().status());
      refused(session->score(scored, log_probs));
      refused(must(session->clone())->step().status());
      must(session->rewind(80));
      accept(*session, 3);
      EXPECT_EQ(state(*session), before);

      refused(session->score(scored, log_probs));  // while it scores
      must(session->rewind(80));
      accept(*session, 3);
      EXPECT_EQ(state(*session), before);

      must(session->feed(std::vector<int32_t>{kBad}));  // in a prompt
      refused(session->step().status());
      must(session->reset());
      read(*session, prompt);
      accept(*session, 3);
      EXPECT_EQ(state(*session), before);
    }
  }
}

// ---- interrupts ----

TEST(Interrupt, AtEverySubmitChangesNothing) {
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const auto device = std::make_shared<SpyDevice>(cpu());
    const Life expected = live(*policy.open(device));
    const uint64_t submits = device->submits;
    EXPECT_EQ(expected.interrupts, 0u);

    const auto session = policy.open(device);
    for (uint64_t at = 0; at <= submits; ++at) {  // the last case interrupts at every submit
      must(session->reset());
      device->submits = 0;
      device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
        if (device->submits == at + 1 || at == submits) session->interrupt();
      };
      const Life life = live(*session);
      ASSERT_TRUE(life.same_as(expected)) << "interrupted at submit " << at;
      ASSERT_GE(life.interrupts, at + 1 < submits ? 1 : 0) << at;
    }
  }
}

// Reading the state after an interrupt shows whole chunks and tokens, and does not change how the call
// continues.
TEST(Interrupt, LookingAfterItChangesNothing) {
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const auto device = std::make_shared<SpyDevice>(cpu());
    const Life expected = live(*policy.open(device));
    const auto session = policy.open(device);
    device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
      session->interrupt();
    };
    const Life life = live(*session, [&] {
      const uint64_t position = must(session->stats()).position;
      finish([&] { return session->settle(); });
      const SessionStats stats = must(session->stats());
      EXPECT_EQ(stats.position, position);
      const uint64_t read = must(session->positions_read());
      EXPECT_EQ(read, stats.position - stats.waiting);
      for (const auto& layer : kept(*session))
        for (const std::vector<int32_t>& head : layer) {
          EXPECT_EQ(std::adjacent_find(head.begin(), head.end(), std::greater_equal<>()), head.end());
          EXPECT_TRUE(head.empty() || head.back() < static_cast<int32_t>(read));
        }
    });
    device->before_submit = {};
    EXPECT_TRUE(life.same_as(expected));
    EXPECT_GT(life.interrupts, 0u);
    if (testing::Test::HasFailure()) return;
  }
}

// A long segment runs in parts. Here this applies to each segment of at least 85,000 operations: by estimate
// half a microsecond on a fast processor, with as many parts on a slow one.
TEST(Interrupt, WithinSegmentsChangesNothing) {
  const double part_seconds = 85e3 / cpu::kernels().flop_per_second;
  const auto in_parts = std::make_shared<SpyDevice>(must(open_cpu_device(1, part_seconds)));
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const auto whole = std::make_shared<SpyDevice>(cpu());
    const Life expected = live(*policy.open(whole));
    const auto session = policy.open(in_parts);
    in_parts->submits = 0;
    in_parts->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
      session->interrupt();
    };
    const Life life = live(*session);
    in_parts->before_submit = {};
    EXPECT_TRUE(life.same_as(expected));
    EXPECT_GT(in_parts->submits, 2 * whole->submits);
    EXPECT_GT(life.interrupts, whole->submits);
  }
}

TEST(Interrupt, FromTheProgressCallbackChangesNothing) {
  const SessionOptions o = policies()[3].options;
  const Life expected = live(*open_session(model().model, o));
  const auto session = open_session(model().model, o);
  uint64_t calls = 0;
  session->set_progress([&](const Progress& p) {
    ++calls;
    EXPECT_LE(p.done, p.total);
    EXPECT_LE(p.entries, p.capacity);
    session->interrupt();
  });
  const Life life = live(*session);
  EXPECT_TRUE(life.same_as(expected));
  EXPECT_GT(calls, 8u);
  EXPECT_GT(life.interrupts, 0u);
}

TEST(Interrupt, FromAnotherThreadChangesNothing) {
  const SessionOptions o = policies()[2].options;
  const Life expected = live(*open_session(model().model, o));
  const auto session = open_session(model().model, o);
  std::jthread other([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      session->interrupt();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // Windows has no shorter sleep than this
    }
  });
  uint64_t interrupts = 0;
  bool same = true;
  for (int i = 0; i < 20; ++i) {
    must(session->reset());
    const Life life = live(*session);  // state() at its end only reads what is there
    same &= life.same_as(expected);
    interrupts += life.interrupts;
  }
  EXPECT_TRUE(same);
  EXPECT_GT(interrupts, 0u);
}

TEST(Interrupt, WaitsForTheNextCallThatWorks) {
  const auto session = open_session(model().model, policies()[2].options);
  session->interrupt();
  must(session->feed(seeded_tokens(5)));  // the tokens are only queued
  EXPECT_EQ(session->flush().code(), Code::kInterrupted);
  must(session->flush());
  EXPECT_EQ(must(session->stats()).entries, 5u);
}

// ---- going back ----

TEST(Rewind, GoesOnAsIfTheRestHadNeverBeenRead) {
  enum Astray { kNever, kDecoding, kReading };
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const SessionOptions o = policy.with_room(200);  // nothing is evicted before the rewind
    const auto run = [&](Astray astray) {
      const auto session = open_session(policy.on, o);
      must(session->feed(seeded_tokens(100)));
      must(session->flush());
      for (int32_t t = 0; t < 5; ++t) must(session->accept(t));
      for (int32_t t = 10; astray && t < (astray == kReading ? 90 : 20); ++t) must(session->accept(t % 64));
      if (astray == kReading) {  // until after the ring is full; reading scores it
        read(*session, seeded_tokens(12, 64, 9));
        must(session->feed(seeded_tokens(3)));  // these tokens still wait
      }
      if (astray) must(session->rewind(105));
      read(*session, seeded_tokens(10, 64, 8));
      for (int32_t t = 0; t < 7; ++t) must(session->accept(t));
      read(*session, seeded_tokens(70, 64, 10));  // evicts by the scores of all decoded tokens
      return state(*session);
    };
    const State expected = run(kNever);
    EXPECT_EQ(run(kDecoding), expected);
    // Windowed layers without local tokens evict each time something is read.
    if (!policy.windowed() || o.retention != Retention::kNone) {
      EXPECT_EQ(run(kReading), expected);
    }
  }
}

TEST(Rewind, DropsWaitingTokensFirst) {
  const auto session = open_session(model().model, policies()[2].options);
  const std::vector<int32_t> tokens = seeded_tokens(10);
  must(session->feed(tokens));
  must(session->rewind(4));
  EXPECT_EQ(must(session->stats()).position, 4u);
  const std::vector<float> logits = flush(*session);
  EXPECT_EQ(logits, read(*open_session(model().model, policies()[2].options), std::span(tokens).first(4)));
  EXPECT_EQ(session->rewind(5).code(), Code::kInvalidArgument);
}

TEST(Rewind, RefusesToRewindBeforeAnEvictionAndChangesNothing) {
  const auto session = open_session(model().model, policies()[2].options);
  const std::vector<int32_t> tokens = seeded_tokens(100);
  read(*session, tokens);  // the last chunk ended at 85 and was evicted
  const State before = state(*session);
  EXPECT_EQ(session->rewind(84).code(), Code::kCannotRewind);
  EXPECT_EQ(state(*session), before);
  must(session->rewind(85));
  EXPECT_EQ(must(session->stats()).entries, 60u);
  EXPECT_EQ(read(*session, std::span(tokens).subspan(85)), before.logits);
}

// A rewind also restores the sampler: its random numbers, and the tokens that it penalises.
TEST(Rewind, RestoresTheSampler) {
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const SessionOptions o = policy.with_room(200);
    const std::vector<int32_t> prompt = seeded_tokens(100);
    const auto steps = [](Session& session, int n) {
      std::vector<int32_t> tokens;
      for (int i = 0; i < n; ++i) tokens.push_back(must(session.step()));
      return tokens;
    };
    const auto begin = [&] {
      auto session = open_session(policy.on, o);
      must(session->set_sampler({.temperature = 1, .repeat_penalty = 1.5f, .top_k = 0, .seed = 9}));
      must(session->feed(prompt));
      return session;
    };
    const auto session = begin();
    const std::vector<int32_t> answer = steps(*session, 30);
    must(session->rewind(110));
    must(session->accept(answer[10]));
    const std::vector<int32_t> again = steps(*session, 20);

    const auto straight = begin();
    EXPECT_EQ(steps(*straight, 10), std::vector<int32_t>(answer.begin(), answer.begin() + 10));
    must(straight->accept(answer[10]));
    EXPECT_EQ(steps(*straight, 20), again);

    // With other options, the prompt's end cannot be read again, or not in the chunk with which it selected.
    if (!policy.windowed() && o.retention == Retention::kNone && o.select_prefill != 1) {
      must(session->rewind(99));
      must(session->feed(std::span(prompt).last(1)));
      EXPECT_EQ(steps(*session, 30), answer);
    }
    must(session->reset());
    must(session->feed(prompt));
    EXPECT_EQ(steps(*session, 30), answer);
  }
}

TEST(Rewind, NeedsATokenBeforeTheNextStep) {
  const auto session = open_session(model().model, policies()[0].options);
  const std::vector<int32_t> tokens = seeded_tokens(40);
  read(*session, tokens);
  must(session->rewind(39));
  EXPECT_EQ(session->step().status().code(), Code::kInvalidArgument);
  must(session->feed(std::span(tokens).last(1)));
  EXPECT_TRUE(session->step().ok());
}

// ---- clones and resets ----

TEST(Clone, GoesOnFromTheSameStateAndLeavesItsParentAlone) {
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const auto one = [&](Session& s) {
      must(s.feed(seeded_tokens(30, 64, 8)));
      for (int i = 0; i < 20; ++i) must(s.step());
      return state(s);
    };
    const auto other = [&](Session& s) {
      must(s.feed(seeded_tokens(50, 64, 9)));
      for (int32_t t = 0; t < 20; ++t) must(s.accept(t));
      return state(s);
    };
    const auto begin = [&] {
      auto session = policy.open();
      must(session->set_sampler({.temperature = 1, .seed = 3}));
      must(session->feed(seeded_tokens(100)));
      for (int i = 0; i < 5; ++i) must(session->step());
      must(session->feed(seeded_tokens(2)));  // these tokens wait
      return session;
    };
    const auto first = begin(), second = begin();
    const State expected_one = one(*first), expected_other = other(*second);

    const auto parent = begin();
    const auto clone = must(parent->clone()), spare = must(parent->clone());
    EXPECT_EQ(other(*clone), expected_other);
    EXPECT_EQ(one(*parent), expected_one);
    EXPECT_EQ(one(*spare), expected_one);
  }
}

// A step that must evict first samples its token and may then be interrupted. That token is not in the stream
// yet.
TEST(Sampling, GoesByTheNewSamplerAlsoForAnInterruptedStep) {
  const SessionOptions options{
      .retention = Retention::kWindow, .pool = 60, .chunk = 32, .local = 8, .max_new = 9};
  for (const bool repeated : {false, true}) {
    SCOPED_TRACE(repeated);
    const auto session = open_session(model().model, options), check = open_session(model().model, options);
    for (Session* s : {session.get(), check.get()}) {
      read(*s, seeded_tokens(150));
      while (must(s->stats()).entries < s->plan().capacity) must(s->step());
    }
    session->interrupt();
    EXPECT_EQ(session->step().status().code(), Code::kInterrupted);
    std::vector<int32_t> answers[2];
    for (const auto& [s, answer] : {std::pair{session.get(), &answers[0]}, {check.get(), &answers[1]}}) {
      must(s->set_sampler({.temperature = 1, .seed = 7}));
      if (!repeated) must(s->accept(3));
      for (int i = 0; i < 12; ++i) answer->push_back(must(s->step()));
    }
    EXPECT_EQ(answers[0], answers[1]);
  }
}

TEST(Clone, AnswersAtOnceIfItsParentCould) {
  const auto parent = open_session(model().model, policies()[3].options);
  read(*parent, seeded_tokens(100));
  const auto clone = must(parent->clone());
  EXPECT_EQ(must(clone->step()), must(parent->step()));
}

TEST(Clone, CountsTowardsTheSameBudget) {
  SessionOptions o = policies()[2].options;
  const MemoryPlan plan = open_session(model().model, o)->plan();
  const uint64_t shared = plan.fixed - plan.programs;
  o.budget = 2 * plan.total - shared;
  const auto parent = open_session(model().model, o);
  read(*parent, seeded_tokens(100));
  const State before = state(*parent);
  const uint64_t alone = parent->allocated();
  auto clone = must(parent->clone());
  EXPECT_EQ(parent->allocated(), 2 * alone - shared);
  const auto refused = parent->clone();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kBudget);
  EXPECT_EQ(refused.status().bytes_missing(), plan.total - shared);
  EXPECT_EQ(state(*parent), before);
  clone.reset();
  EXPECT_EQ(parent->allocated(), alone);
  EXPECT_TRUE(parent->clone().ok());
}

TEST(Clone, OutlivesItsParent) {
  auto parent = open_session(model().model, policies()[3].options);
  read(*parent, seeded_tokens(100));
  const auto clone = must(parent->clone());
  const State expected = state(*parent);
  parent.reset();
  EXPECT_EQ(state(*clone), expected);
}

// Remains of a longer use in the pool, chunk buffer, ring and votes must have no effect.
TEST(Reset, IsAsGoodAsANewSession) {
  for (const Policy& policy : policies()) {
    SCOPED_TRACE(policy.name);
    const auto session = policy.open(), fresh = policy.open();
    for (Session* s : {session.get(), fresh.get()}) must(s->set_sampler({.temperature = 1, .seed = 3}));
    live(*session);
    must(session->reset());
    const SessionStats stats = must(session->stats());
    EXPECT_EQ(stats.position + stats.entries + stats.evicted + stats.generated + stats.cache_hits +
                  stats.cache_misses,
              0u);
    for (Session* s : {session.get(), fresh.get()}) {
      must(s->feed(seeded_tokens(7, 64, 8)));
      for (int i = 0; i < 5; ++i) must(s->step());
    }
    EXPECT_EQ(state(*session), state(*fresh));
    EXPECT_TRUE(live(*session).same_as(live(*fresh)));
  }
}

TEST(Reset, ForgetsAnInterruptedCall) {
  const SessionOptions o = policies()[2].options;
  const auto session = open_session(model().model, o);
  const std::vector<int32_t> tokens = seeded_tokens(100);
  session->interrupt();
  EXPECT_EQ(session->feed(tokens).code(), Code::kInterrupted);
  must(session->reset());
  EXPECT_EQ(read(*session, tokens), read(*open_session(model().model, o), tokens));
}

}  // namespace
}  // namespace thimble::test
