// What steps cost, counted by hand for a model of round numbers.
#include "runtime/cost.h"

#include <gtest/gtest.h>

#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

// 2 layers, d 32, 4 query and 2 KV heads of 8, ffn 48, vocabulary 64, f32: a layer has (32 + 16 + 16) * 32
// weights for q, k, v, 32 * 32 for the output and 3 * 48 * 32 for the feed-forward, 7680 in all.
constexpr double kLayers = 2 * 7680, kOutput = 64 * 32;
constexpr double kKeys = 2 * 2 * 8;  // channels of one entry's keys in all layers
constexpr double kQueries = 2 * 4 * 8;

TEST(Cost, CountsWeightsOnceAndEveryAttendedEntry) {
  const CostModel cost(*seeded_model().model, {.pool = 100});
  const Cost one = cost.run({.n_rows = 1, .n_entries = 9}, true);
  EXPECT_EQ(one.bytes,
            4 * (kLayers + kOutput) + (10 + 1) * 2 * kKeys * 2);  // keys and values of 10 read, of 1 written
  EXPECT_EQ(one.flop, 2 * (kLayers + kOutput) + 10 * 2 * kQueries * 2);
  const Cost chunk = cost.run({.n_rows = 4, .n_entries = 6}, false);
  EXPECT_EQ(chunk.bytes, 4 * kLayers + (10 + 4) * 2 * kKeys * 2);
  EXPECT_EQ(chunk.flop, 4 * 2 * kLayers + (7 + 8 + 9 + 10) * 2 * kQueries * 2);
  EXPECT_EQ(cost.select({.n_rows = 1, .n_entries = 99}).bytes, 0);
}

TEST(Cost, OfASelectionIsItsListAndTheKeysItScores) {
  const CostModel cost(*seeded_model().model, {.pool = 100,
                                               .selection = Selection::kTokenSelect,
                                               .select_k = 8,
                                               .select_init = 2,
                                               .select_local = 10});
  const StepParams step{.n_rows = 1, .n_entries = 79, .n_init = 2, .n_local = 10, .select_k = 8};
  EXPECT_EQ(cost.run(step, false).bytes, 4 * kLayers + (20 + 1) * 2 * kKeys * 2);
  EXPECT_EQ(cost.select(step).bytes, (80 - 12) * kKeys * 2);
  EXPECT_EQ(cost.select(step).flop, (80 - 12) * kQueries * 2);
  EXPECT_EQ(cost.select({.n_rows = 1, .n_entries = 19, .n_init = 2, .n_local = 10, .select_k = 8}).bytes, 0);
}

TEST(Cost, IsInTheStatsOfASession) {
  const SeededModel m = seeded_model();
  SessionOptions options{.pool = 100,
                         .chunk = 16,
                         .selection = Selection::kTokenSelect,
                         .select_k = 8,
                         .select_init = 2,
                         .select_local = 10};
  options.select_theta = 2;  // every selection misses
  const auto session = open_session(m.model, options);
  must(session->feed(seeded_tokens(40)));
  must(session->flush());
  const Cost read = must(session->stats()).prefill;
  EXPECT_GE(read.flop, 40 * 2 * kLayers);
  for (int i = 0; i < 3; ++i) must(session->step());
  const Cost missed = must(session->stats()).decode;
  const CostModel cost(*m.model, options);
  Cost expected;
  for (uint32_t i = 0; i < 3; ++i) {
    const StepParams step{.n_rows = 1, .n_entries = 40 + i, .n_init = 2, .n_local = 10, .select_k = 8};
    expected += cost.run(step, true);
    expected += cost.select(step);
  }
  EXPECT_DOUBLE_EQ(missed.bytes, expected.bytes);
  EXPECT_DOUBLE_EQ(missed.flop, expected.flop);
  EXPECT_EQ(must(session->stats()).prefill.flop, read.flop);
}

}  // namespace
}  // namespace thimble::test
