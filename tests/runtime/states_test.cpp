// Tests sequences of models with recurrent states: rewinding to snapshots, cloning and files.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "backends/cpu/host/cpu_device.h"
#include "backends/cpu/kernels.h"
#include "tests/support/reference_model.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/seeded_model.h"
#include "tests/support/spy_device.h"
#include "tests/support/synthetic_model.h"

namespace thimble::test {
namespace {

// Models with short convolutions, and with linear attention, whose states consist of two parts.
class States : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
    model_ = family_model(GetParam(), "states");
  }
  std::vector<int32_t> tokens(size_t count, uint64_t seed = 7) const {
    return seeded_tokens(count, model_->shape.vocab, seed);
  }
  std::unique_ptr<Session> open(const SessionOptions& o) const { return open_session(model_, o); }

  std::shared_ptr<const Model> model_;
};
INSTANTIATE_TEST_SUITE_P(Of, States, ::testing::Values("lfm2", "qwen35", "falconh1"),
                         [](const auto& family) { return std::string(family.param); });

SessionOptions dense() { return {.pool = 400, .chunk = 64, .max_new = 64}; }
SessionOptions window() {
  return {.retention = Retention::kWindow, .pool = 60, .chunk = 64, .local = 20, .max_new = 32};
}

std::vector<int32_t> first_of(std::vector<int32_t> tokens, size_t count) {
  tokens.resize(count);
  return tokens;
}

std::vector<float> logits_of(Session& session) {
  must(session.flush());
  const std::span<const float> logits = must(session.logits());
  return {logits.begin(), logits.end()};
}

// A chunk and one row at a time compute the same states up to rounding, so a wrong row of a state would show.
TEST_P(States, DoNotDependOnHowTheTextIsCut) {
  const std::vector<int32_t> text = tokens(150);
  const std::vector<float> expected = read(*open(dense()), text);
  for (const uint32_t chunk : {1u, 2u, 3u, 7u, 150u}) {
    SessionOptions o = dense();
    o.chunk = chunk;
    expect_close(read(*open(o), text), expected);
  }
  const auto by_token = open(dense());
  read(*by_token, std::span(text).first(1));
  std::vector<float> logits;
  for (const int32_t token : std::span(text).subspan(1)) logits = accept(*by_token, token);
  expect_close(logits, expected);
}

TEST_P(States, RewindToAPromptsEndIsExact) {
  const auto session = open(dense());
  const std::vector<float> first = read(*session, tokens(100)), second = read(*session, tokens(50, 8));
  for (const int32_t token : tokens(5, 9)) accept(*session, token);
  must(session->rewind(150));
  EXPECT_EQ(session->state().waiting.size(), 0u);
  const auto next = tokens(3, 10);
  const auto again = open(dense());
  read(*again, tokens(100)), read(*again, tokens(50, 8));
  for (const int32_t token : next) EXPECT_EQ(accept(*session, token), accept(*again, token));
  must(session->rewind(100));
  EXPECT_EQ(read(*session, tokens(50, 8)), second);
}

// Between snapshots, the tokens after the snapshot are read again.
TEST_P(States, RewindReadsTokensAfterTheSnapshotAgain) {
  const auto session = open(dense());
  read(*session, tokens(100));
  const std::vector<int32_t> more = tokens(20, 9);
  std::vector<std::vector<float>> expected;
  for (const int32_t token : more) expected.push_back(accept(*session, token));
  for (const uint64_t position : {119u, 110u, 101u}) {
    must(session->rewind(position));
    EXPECT_EQ(must(session->stats()).position, position);
    EXPECT_EQ(session->state().waiting.size(), position - 100);
    expect_close(logits_of(*session), expected[position - 101]);
  }
  must(session->rewind(50));  // the beginning is a snapshot too
  EXPECT_EQ(session->state().waiting.size(), 50u);
  expect_close(logits_of(*session), read(*open(dense()), first_of(tokens(100), 50)));
  must(session->rewind(0));
  EXPECT_EQ(read(*session, tokens(100)), read(*open(dense()), tokens(100)));
}

TEST_P(States, OfTheLatestEvictionAreTheOldestToReturnTo) {
  const auto session = open(window());
  read(*session, tokens(200));
  const uint64_t evicted_at = session->state().last_eviction;
  for (const int32_t token : tokens(10, 9)) accept(*session, token);
  ASSERT_EQ(session->state().last_eviction, evicted_at);
  EXPECT_EQ(session->rewind(evicted_at - 1).code(), Code::kCannotRewind);
  EXPECT_EQ(must(session->stats()).position, 210u);
  must(session->rewind(evicted_at + 3));
  EXPECT_EQ(session->state().read, evicted_at);
  EXPECT_EQ(session->state().waiting.size(), 3u);
  // The same tokens again end where they ended before.
  const auto unbroken = open(window());
  const std::vector<float> expected = read(*unbroken, tokens(200));
  const std::vector<int32_t> text = tokens(200);
  must(session->feed(std::span(text).subspan(evicted_at + 3)));
  EXPECT_EQ(logits_of(*session), expected);
}

// A long text makes more snapshots than there are slots.
TEST_P(States, AreKeptAtSeveralPositionsOfALongText) {
  SessionOptions o = dense();
  o.pool = 1000;
  const auto session = open(o);
  std::vector<std::vector<float>> logits;
  for (uint64_t i = 0; i < 30; ++i) logits.push_back(read(*session, tokens(20, i)));
  const auto& snapshots = session->state().snapshots;
  ASSERT_EQ(snapshots.size(), size_t{kMostSnapshots});
  EXPECT_EQ(snapshots.back().position, 600u);
  for (size_t i = 1; i < snapshots.size(); ++i) {
    EXPECT_LT(snapshots[i - 1].position, snapshots[i].position);
    for (size_t j = 0; j < i; ++j) EXPECT_NE(snapshots[i].slot, snapshots[j].slot);
  }
  must(session->rewind(snapshots[7].position));
  const uint64_t turn = session->state().read / 20;
  EXPECT_EQ(session->state().waiting.size(), 0u);
  expect_close(read(*session, tokens(20, turn)), logits[turn]);
}

// Many short turns after an eviction make more snapshots than there are slots. The eviction's own snapshot
// stays.
TEST_P(States, OfAnEvictionStayThroughManyTurns) {
  const auto session = open(window());
  read(*session, tokens(200));
  const uint64_t earlier = session->state().last_eviction;
  std::vector<float> expected;
  while (session->state().last_eviction == earlier) expected = read(*session, tokens(1));
  const uint64_t evicted_at = session->state().last_eviction;
  for (size_t i = 0; i < kMostSnapshots + 4; ++i) read(*session, tokens(1, i));
  ASSERT_EQ(session->state().last_eviction, evicted_at);
  ASSERT_EQ(session->state().snapshots.size(), size_t{kMostSnapshots});
  EXPECT_EQ(session->rewind(evicted_at - 1).code(), Code::kCannotRewind);
  must(session->rewind(evicted_at));
  EXPECT_EQ(must(session->stats()).position, evicted_at);
  EXPECT_EQ(read(*session, tokens(1)), expected);
}

// With a single snapshot, the latest end of a prompt replaces that of the eviction.
TEST(SequenceOfStates, WithOneSnapshotKeepsTheLatestEndOfAPrompt) {
  SequenceState s(1, Sampler(16, 8));
  s.read = s.last_eviction = 10, s.state_slot = 0;
  s.drop_snapshots();
  EXPECT_EQ(s.earliest(), 10u);
  s.read = 14, s.state_slot = 1;
  s.keep_states(true, 1);
  ASSERT_EQ(s.snapshots.size(), 1u);
  EXPECT_EQ(s.earliest(), 14u);
}

TEST_P(States, AreClonedWithTheirSnapshots) {
  const auto session = open(dense());
  read(*session, tokens(100));
  for (const int32_t token : tokens(10, 9)) accept(*session, token);
  const auto twin = must(session->clone());
  EXPECT_EQ(accept(*twin, 5), accept(*session, 5));
  for (Session* one : {session.get(), twin.get()}) must(one->rewind(100));
  EXPECT_EQ(accept(*twin, 6), accept(*session, 6));
}

TEST_P(States, OfClonesGoOnAloneAfterTheirParent) {
  auto session = open(dense());
  read(*session, tokens(100));
  auto twin = must(session->clone());
  const auto second = must(twin->clone());
  read(*twin, tokens(30, 8));
  session.reset();
  const auto unbroken = open(dense());
  read(*unbroken, tokens(100));
  EXPECT_EQ(read(*twin, tokens(10, 9)), [&] {
    read(*unbroken, tokens(30, 8));
    return read(*unbroken, tokens(10, 9));
  }());
  twin.reset();
  must(unbroken->rewind(100));
  EXPECT_EQ(read(*second, tokens(20, 10)), read(*unbroken, tokens(20, 10)));
}

TEST_P(States, AreSavedAndRestoredWithTheirSnapshots) {
  for (const SessionOptions& o : {dense(), window()}) {
    SCOPED_TRACE(policy_name(o.retention));
    const auto session = open(o);
    read(*session, tokens(100));
    read(*session, tokens(30, 8));
    for (const int32_t token : tokens(10, 9)) accept(*session, token);
    const auto restored = open(o);
    const SessionBytes saved = save(*session);
    restore(*restored, saved);
    EXPECT_EQ(accept(*restored, 5), accept(*session, 5));
    const uint64_t back = session->state().snapshots.back().position;
    for (Session* one : {session.get(), restored.get()}) must(one->rewind(back));
    EXPECT_EQ(accept(*restored, 6), accept(*session, 6));
    must(session->reset());
    EXPECT_EQ(read(*session, tokens(100)), read(*open(o), tokens(100)));
  }
}

// Files that end early or have another byte, in the states among others, change nothing.
TEST_P(States, OfADamagedFileAreRefused) {
  const auto session = open(dense()), same = open(dense());
  read(*session, tokens(100)), read(*same, tokens(100));
  const SessionBytes saved = save(*session);
  for (const size_t place : {saved.size() / 3, saved.size() * 2 / 3, saved.size() - 1}) {
    SessionBytes shorter(saved.begin(), saved.begin() + static_cast<ptrdiff_t>(place)), other = saved;
    other[place] ^= std::byte{1};
    for (const SessionBytes& bytes : {shorter, other})
      EXPECT_EQ(session->restore(lend(bytes), "saved").status().code(), Code::kFormat) << place;
  }
  EXPECT_EQ(accept(*session, 5), accept(*same, 5));
  EXPECT_EQ(read(*session, tokens(20, 8)), read(*same, tokens(20, 8)));
}

// A session with a smaller budget has fewer slots. It takes the latest end of a prompt and leaves out others.
TEST(StatesOfAFile, AreLeftOutIfThereIsNoRoom) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  // The longest convolution has the largest states, of which a small budget holds only a few.
  const auto model =
      SyntheticFile("tiny-lfm2 f16 FILE --seed 4 --sharp 3 --set shortconv.l_cache=8", "states_lfm2_8")
          .open();
  const auto tokens = [&](size_t count, uint64_t seed) {
    return seeded_tokens(count, model->shape.vocab, seed);
  };
  SessionOptions o = dense();
  o.pool = 120, o.chunk = 32;
  const auto session = open_session(model, o);
  const uint64_t turns = 10;
  for (uint64_t i = 0; i < turns; ++i) read(*session, tokens(10, i));
  for (const int32_t token : tokens(5, 9)) accept(*session, token);
  ASSERT_EQ(session->state().snapshots.size(), turns);
  const SessionBytes saved = save(*session);
  o.budget = session->plan().total;
  const auto restored = open_session(model, o);
  const size_t room = restored->plan().dimensions.state_slots - 2;
  ASSERT_LT(room, turns);
  restore(*restored, saved);
  const std::vector<Snapshot> left = restored->state().snapshots;
  ASSERT_EQ(left.size(), room);
  EXPECT_EQ(accept(*restored, 5), accept(*session, 5));
  for (auto snapshot = left.rbegin(); snapshot != left.rend(); ++snapshot) {
    for (Session* one : {session.get(), restored.get()}) must(one->rewind(snapshot->position));
    EXPECT_EQ(restored->state().waiting.size(), 0u);
    EXPECT_EQ(accept(*restored, 6), accept(*session, 6));
  }
}

// The embedding of one token is NaN, so the states after it are, and stay so until the token is taken back.
TEST(StatesThatAreNotFinite, AreLeftByRewinding) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  constexpr int32_t kBroken = 5;
  const SyntheticFile file("tiny-qwen35moe f16 FILE --seed 4 --sharp 3", "states_nan");
  {
    const auto model = file.open();
    const Tensor row = model->token_embedding.row_range(kBroken, 1);
    const std::string nan(row.bytes(), '\xff');
    std::fstream bytes(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(row.data - model->memory()[0].data());
    bytes.write(nan.data(), static_cast<std::streamsize>(nan.size()));
    ASSERT_TRUE(bytes.good());
  }
  const auto model = file.open();
  std::vector<int32_t> text = seeded_tokens(100, model->shape.vocab);
  std::replace(text.begin(), text.end(), kBroken, kBroken + 1);
  const auto session = open_session(model, dense()), other = open_session(model, dense());
  read(*session, text), read(*other, text);
  for (const int32_t token : {7, 8}) EXPECT_EQ(accept(*session, token), accept(*other, token));
  must(session->accept(kBroken));
  EXPECT_EQ(session->logits().status().code(), Code::kNotFinite);
  must(session->accept(1));
  EXPECT_EQ(session->logits().status().code(), Code::kNotFinite);
  must(session->rewind(102));
  EXPECT_TRUE(session->state().waiting.empty());  // the states before the broken token were kept
  EXPECT_EQ(accept(*session, 1), accept(*other, 1));

  // The same in a prompt.
  must(session->feed(std::vector<int32_t>{2, kBroken}));
  must(session->flush());
  EXPECT_EQ(session->logits().status().code(), Code::kNotFinite);
  must(session->rewind(103));
  EXPECT_TRUE(session->state().waiting.empty());
  EXPECT_EQ(accept(*session, 2), accept(*other, 2));

  // States that are not finite fill every slot. A sequence that begins anew does not read them.
  for (uint32_t i = 0; i < session->plan().dimensions.state_slots; ++i) {
    must(session->accept(kBroken));
    must(session->flush());
  }
  must(session->reset()), must(other->reset());
  EXPECT_EQ(read(*session, text), read(*other, text));
}

// A budget decides how many slots there are.
TEST_P(States, ArePlannedToTheByte) {
  SessionOptions o = dense();
  const uint64_t total = must(make_plan(*model_, *cpu(), o)).total;
  std::set<uint32_t> slots;
  for (const uint64_t budget : {uint64_t{0}, 2 * total, total * 3 / 2, total}) {
    o.budget = budget;
    const Result<MemoryPlan> plan = make_plan(*model_, *cpu(), o);
    if (!plan.ok()) continue;
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto session = open_session(model_, o, device);
    EXPECT_EQ(device->live_bytes + plan->fixed + host_bytes(*model_, *plan), plan->total);
    slots.insert(plan->dimensions.state_slots);
  }
  EXPECT_GT(slots.size(), GetParam() == std::string("lfm2") ? 0u : 1u);  // its states are small
}

// The states of the first layer depend on no entries. What the second reading of a chunk leaves is dropped,
// so they are those of a session that reads every token once.
TEST_P(States, AreNotChangedByTokensThatAreReadAgain) {
  const auto tail_after = [&](const SessionOptions& o) {
    const auto device = std::make_shared<SpyDevice>(cpu());
    const auto session = open_session(model_, o, device);
    read(*session, tokens(200));
    EXPECT_GT(must(session->stats()).evictions, 0u);
    const View tail = device->convolutions.front().tail.slot(session->state().state_slot);
    std::vector<float> values(tail.bytes / sizeof(float));
    must(device->read(values.data(), tail));
    return values;
  };
  SessionOptions o = window();
  o.stabilizers = 8;
  const std::vector<float> expected = tail_after(o);
  o.retention = Retention::kReread;
  EXPECT_EQ(tail_after(o), expected);
}

TEST_P(States, AreNotTouchedByAScoredTextThatWasInterrupted) {
  const auto whole = open(dense()), broken = open(dense());
  const std::vector<int32_t> text = tokens(120, 4);
  std::vector<float> expected(text.size()), got(text.size());
  read(*whole, tokens(30)), read(*broken, tokens(30));
  must(whole->score(text, expected));
  broken->interrupt();
  EXPECT_EQ(broken->score(text, got).code(), Code::kInterrupted);
  must(broken->score(text, got));
  EXPECT_EQ(got, expected);
  EXPECT_EQ(accept(*broken, 3), accept(*whole, 3));
}

// Interrupts every part of a text and of some steps, and then a step that is not repeated. A part takes about
// so many floating-point operations.
void expect_interrupts_change_nothing(const std::shared_ptr<const Model>& model, double operations) {
  const double part_seconds = operations / cpu::kernels().flop_per_second;
  const auto device = std::make_shared<SpyDevice>(must(open_cpu_device(1, part_seconds)));
  const auto tokens = [&](size_t count, uint64_t seed) {
    return seeded_tokens(count, model->shape.vocab, seed);
  };
  const auto whole = open_session(model, dense()), broken = open_session(model, dense(), device);
  device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
    broken->interrupt();
  };
  int interrupts = 0;
  const std::vector<int32_t> text = tokens(150, 7);
  read(*whole, text);
  interrupts += insist([&] { return broken->feed(text); });
  interrupts += insist([&] { return broken->flush(); });
  EXPECT_GT(interrupts, 50);
  EXPECT_EQ(logits_of(*broken), logits_of(*whole));
  for (const int32_t token : tokens(3, 9)) {
    interrupts += insist([&] { return broken->accept(token); });
    must(whole->accept(token));
  }
  EXPECT_EQ(logits_of(*broken), logits_of(*whole));

  // A step that was interrupted and then left.
  device->before_submit = {};
  must(whole->rewind(150)), must(broken->rewind(150));
  device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
    broken->interrupt();
  };
  EXPECT_EQ(broken->accept(7).code(), Code::kInterrupted);
  device->before_submit = {};
  must(broken->rewind(150));
  EXPECT_EQ(accept(*broken, 8), accept(*whole, 8));
}

// The scratch of one layer's heads, and the slot that a step writes, are in use when it is interrupted.
TEST_P(States, AreTheSameAfterAnInterruptInEveryPart) { expect_interrupts_change_nothing(model_, 200e3); }

// The keys of a chunk are in use until the last layer that reads them, and experts add to a sum of their own.
TEST(LayersThatShare, AreTheSameAfterAnInterruptInEveryPart) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  for (const char* family : {"gemma4_e2b", "gemma4moe", "nemotronh_latent"}) {
    SCOPED_TRACE(family);
    // With smaller parts, their list takes more memory than is planned.
    expect_interrupts_change_nothing(family_model(family, "interrupted"), 1e6);
  }
}

TEST_P(States, DoNotDependOnThreads) {
  const std::vector<int32_t> text = tokens(150);
  std::vector<float> expected;
  for (const uint32_t threads : {1u, 2u, 3u}) {
    const auto session = open_session(model_, dense(), must(open_cpu_device(threads)));
    std::vector<float> logits = read(*session, text);
    for (const int32_t token : tokens(4, 9)) logits = accept(*session, token);
    if (expected.empty()) expected = logits;
    EXPECT_EQ(logits, expected) << threads;
  }
}

TEST_P(States, RewindToAnyPosition) {
  SessionOptions o = dense();
  o.chunk = 32;
  const auto session = open(o);
  const std::vector<int32_t> text = tokens(200);
  read(*session, text);
  const auto unbroken = open(o);
  for (const uint64_t position : {199u, 170u, 129u, 128u, 97u, 64u, 33u, 1u}) {
    must(session->rewind(position));
    must(unbroken->reset());
    // Snapshots are at borders of chunks, so the tokens after one are read as they would be at first.
    EXPECT_EQ(logits_of(*session), read(*unbroken, first_of(text, position))) << position;
  }
}

}  // namespace
}  // namespace thimble::test
