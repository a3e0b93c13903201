// Tests a pool that is made smaller: the entries that it holds, the memory that is returned, and that the
// session equals one created with that pool.
#include <gtest/gtest.h>

#include "base/system.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/watched.h"

namespace thimble::test {
namespace {

constexpr uint32_t kSmaller = 40;

TEST(Shrink, LeavesASessionAsOneMadeWithTheSmallerPool) {
  for (const uint32_t window : {0u, 20u}) {
    const SeededModel m = seeded_model({.covers_windows = !window, .window = window});
    for_policies(m, [&](SessionOptions o) {
      if (o.retention == Retention::kNone) return;
      const auto session = open_session(m.model, o);
      must(session->set_sampler(kWarm));
      must(session->feed(seeded_tokens(150)));
      for (int i = 0; i < 9; ++i) must(session->step());
      must(session->feed(seeded_tokens(9, 64, 12)));  // these tokens wait
      must(session->shrink(kSmaller));
      EXPECT_EQ(session->plan().options.pool, kSmaller);
      EXPECT_EQ(must(session->stats()).waiting, 9u);
      const Kept sets = kept(*session);
      for (size_t layer = 0; layer < sets.size(); ++layer)
        for (const auto& head : sets[layer])
          EXPECT_EQ(head.size(), m.model->layers[layer].attention()->window ? window : kSmaller);
      o.pool = kSmaller;
      const auto made = open_session(m.model, o);
      EXPECT_EQ(session->plan().capacity, made->plan().capacity);
      EXPECT_EQ(session->plan().largest_position, made->plan().largest_position);
      restore(*made, save(*session));
      const auto twin = must(session->clone());
      const Outcome expected = go_on(*made);
      ASSERT_EQ(go_on(*session), expected);
      ASSERT_EQ(go_on(*twin), expected);
    });
  }
}

TEST(Shrink, DividesASmallerPoolByTheSharesOfHeads) {
  const SeededModel m = seeded_model({.shares = {0.3f, 1.7f, 1.2f, 0.8f}});
  SessionOptions o = retaining(m, Retention::kLocret);
  o.pool = 300;
  const auto session = open_session(m.model, o);
  read(*session, seeded_tokens(700));
  must(session->shrink(200));
  must(session->shrink(150));
  o.pool = 150;
  const auto made = open_session(m.model, o);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(session->runs()[i].keep, made->plan().dimensions.last_runs()[i].keep);
  restore(*made, save(*session));
  EXPECT_EQ(go_on(*made), go_on(*session));
}

// The memory of three quarters of the entries is returned, except parts of pages at both ends.
TEST(Shrink, GivesBackTheMemoryAfterEveryRun) {
  const SeededModel m = seeded_model({.head_dim = 64, .context_length = 1 << 20});
  SessionOptions o = retaining(m, Retention::kWindow);
  o.pool = 64 << 10;
  const auto session = open_session(m.model, o);
  const MemoryPlan before = session->plan();
  const uint64_t allocated = session->allocated();
  read(*session, seeded_tokens(3000));
  // Uses all pages, as after a long text.
  const auto twin = must(session->clone());
  [[maybe_unused]] const uint64_t resident = resident_anonymous_bytes();
  const uint64_t freed = must(twin->shrink(16 << 10));
  // 4 heads have K and V of 64 halves, a position and a score per entry. In each array, less than a page at
  // each end is not returned.
  constexpr uint64_t kBehind = uint64_t{4} * (48 << 10) * (2 * 64 * 2 + 4 + 4), kLost = 4 * 4 * 2 * 4096;
  EXPECT_LE(freed, kBehind);
  EXPECT_GT(freed + kLost, kBehind);
  EXPECT_EQ(twin->plan().pool, before.pool - freed);
  EXPECT_EQ(twin->plan().total, before.total - freed);
  EXPECT_EQ(session->plan().pool, before.pool);
  EXPECT_EQ(twin->allocated(), session->allocated());  // allocated() counts both together
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
  EXPECT_GT(resident - resident_anonymous_bytes(), freed / 4 * 3);
#endif
  const uint64_t both = session->allocated();
  const auto third = must(twin->clone());
  EXPECT_LT(third->allocated() - both, allocated - freed + 4096);
  EXPECT_EQ(go_on(*third), go_on(*twin));
}

// A clone's pool has the same holes as its original's, and no huge page may cover them.
TEST(Shrink, AClonesPoolTakesNoMoreThanItCounts) {
  const SeededModel m = seeded_model({.head_dim = 64, .context_length = 1 << 20});
  SessionOptions o = retaining(m, Retention::kWindow);
  o.pool = 64 << 10;
  const auto session = open_session(m.model, o);
  read(*session, seeded_tokens(3000));
  must(session->shrink(1 << 10));
  [[maybe_unused]] const uint64_t resident = resident_anonymous_bytes();
  const auto twin = must(session->clone());
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
  // In addition to its pool of 1.2 MiB, the twin touches a little of its other memory. Huge pages at the
  // starts of 4 heads' K and V would take 16 MiB.
  EXPECT_LT(resident_anonymous_bytes() - resident, twin->plan().pool + (4 << 20));
#endif
  EXPECT_EQ(go_on(*twin), go_on(*session));
}

TEST(Shrink, MakesRoomInTheBudget) {
  const SeededModel m = seeded_model({.context_length = 1 << 20});
  SessionOptions o = retaining(m, Retention::kWindow);
  o.pool = 32 << 10;
  const MemoryPlan plan = must(make_plan(*m.model, *cpu(), o));
  o.budget = plan.total + plan.total / 2;
  const auto session = open_session(m.model, o);
  read(*session, seeded_tokens(100));
  EXPECT_EQ(session->clone().status().code(), Code::kBudget);
  must(session->shrink(1 << 10));
  const auto twin = must(session->clone());
  EXPECT_EQ(go_on(*twin), go_on(*session));
}

TEST(Shrink, RefusesWhatItCannotAndChangesNothing) {
  const SeededModel m = seeded_model();
  const auto expect_refusal = [&](Session& session, uint32_t pool, Code code, const char* part) {
    const SessionBytes before = save(session);
    const Status status = session.shrink(pool).status();
    EXPECT_EQ(status.code(), code);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(save(session), before);
  };
  const auto window = open_session(m.model, retaining(m, Retention::kWindow));
  read(*window, seeded_tokens(150));
  expect_refusal(*window, 71, Code::kInvalidArgument, "not smaller than the 70");
  expect_refusal(*window, 0, Code::kInvalidArgument, "not smaller than the 70");
  expect_refusal(*window, 12, Code::kInvalidArgument, "leave nothing to choose in a pool of 12");
  EXPECT_EQ(must(window->shrink(70)), 0u);

  const auto none = open_session(m.model, retaining(m, Retention::kNone));
  read(*none, seeded_tokens(150));
  must(none->feed(seeded_tokens(10)));
  expect_refusal(*none, 127, Code::kUnsupported, "holds 160 tokens, a pool of 127 has room for 159");
  must(none->shrink(128));
  EXPECT_EQ(none->feed(seeded_tokens(1)).code(), Code::kContextFull);

  SessionOptions by_head = retaining(m, Retention::kLocret);
  by_head.keeps = {70, 60, 50, 100};
  expect_refusal(*open_session(m.model, by_head), 50, Code::kUnsupported, "a pool for each head");

  // A device that can only return whole buffers, as GPUs do.
  Watched other(m.model, retaining(m, Retention::kWindow));
  read(*other, seeded_tokens(150));
  expect_refusal(*other, 40, Code::kUnsupported, "gives memory back only when a session is freed");
}

TEST(Shrink, ContinuesAfterAnInterrupt) {
  const SeededModel m = seeded_model();
  const SessionOptions o = retaining(m, Retention::kLocret);
  const auto session = open_session(m.model, o), other = open_session(m.model, o);
  for (Session* s : {session.get(), other.get()}) {
    read(*s, seeded_tokens(150));
    for (int32_t i = 0; i < 5; ++i) accept(*s, i);
  }
  session->interrupt();
  EXPECT_EQ(session->shrink(kSmaller).status().code(), Code::kInterrupted);
  EXPECT_EQ(session->plan().options.pool, 70u);
  must(session->shrink(kSmaller));
  must(other->shrink(kSmaller));
  EXPECT_EQ(save(*session).size(), save(*other).size());
  EXPECT_EQ(go_on(*session), go_on(*other));
}

}  // namespace
}  // namespace thimble::test
