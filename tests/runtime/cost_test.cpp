// Tests the cost of steps, counted by hand for a model with round numbers.
#include <gtest/gtest.h>

#include "runtime/plan/cost_model.h"
#include "runtime/policy/policy.h"
#include "tests/support/data.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

// 2 layers, d 32, 4 query and 2 KV heads of 8, ffn 48, vocabulary 64, f32: a layer has (32 + 16 + 16) * 32
// weights for q, k, v, 32 * 32 for the output and 3 * 48 * 32 for the feed-forward, 7680 in all.
constexpr double kLayers = 2 * 7680, kOutput = 64 * 32;
constexpr double kKeys = 2 * 2 * 8;  // channels of one entry's keys in all layers
constexpr double kQueries = 2 * 4 * 8;

const Model& model() {
  static const SeededModel m = seeded_model();
  return *m.model;
}

CostModel cost_model(const SessionOptions& options) { return {model(), options, Policies(options)}; }

SessionOptions selecting() {
  return {.pool = 100,
          .chunk = 16,
          .selection = Selection::kTokenSelect,
          .select_k = 8,
          .select_init = 2,
          .select_local = 10,
          .select_prefill = 0};
}

TEST(Cost, CountsWeightsOnceAndEveryAttendedEntry) {
  const CostModel cost = cost_model({.pool = 100});
  const Cost one = cost.run(1, 9, false, true);
  EXPECT_EQ(one.bytes,
            4 * (kLayers + kOutput) + (10 + 1) * 2 * kKeys * 2);  // keys and values: 10 read, 1 written
  EXPECT_EQ(one.flop, 2 * (kLayers + kOutput) + 10 * 2 * kQueries * 2);
  const Cost chunk = cost.run(4, 6, true, false);
  EXPECT_EQ(chunk.bytes, 4 * kLayers + (10 + 4) * 2 * kKeys * 2);
  EXPECT_EQ(chunk.flop, 4 * 2 * kLayers + (7 + 8 + 9 + 10) * 2 * kQueries * 2);
}

TEST(Cost, OfASelectionIsItsListAndTheKeysItScores) {
  const SessionOptions options = selecting();
  const CostModel cost = cost_model(options);
  EXPECT_EQ(cost.run(1, 79, false, false).bytes, 4 * kLayers + (20 + 1) * 2 * kKeys * 2);
  EXPECT_EQ(cost.run(1, 79, true, false).bytes, 4 * kLayers + (80 + 1) * 2 * kKeys * 2);  // reads densely
  const Policies policies(options);
  EXPECT_EQ(policies.selection->cost(model(), options, 80).bytes, (80 - 12) * kKeys * 2);
  EXPECT_EQ(policies.selection->cost(model(), options, 80).flop, (80 - 12) * kQueries * 2);
  EXPECT_EQ(policies.selection->cost(model(), options, 20).bytes, 0);
}

TEST(Cost, OfPagesIsTheBoundsThatAreScored) {
  SessionOptions options{
      .pool = 100, .selection = Selection::kQuest, .select_k = 32, .select_page = 8, .dense_layers = 1};
  const Policies policies(options);
  // In one of the two layers, this reads as much as two keys for each of 10 pages.
  EXPECT_EQ(policies.selection->cost(model(), options, 80).bytes, 10 * 2 * kKeys / 2 * 2);
  EXPECT_EQ(policies.selection->cost(model(), options, 32).bytes, 0);
}

// The shared expert is computed in addition to two of four experts: its matrices are read once, and every row
// is multiplied with them.
TEST(Cost, OfAnExpertThatAllTokensShareIsThatOfAnyMatrix) {
  const std::string path = project_file("tests/reference/tiny-granitemoe-shared.gguf");
  const auto shared = must(Model::open(must(MappedFile::open(path)), path));
  Cost of_all = product_cost(shared->output), of_experts;
  for (const Layer& layer : shared->layers) {
    const AttentionMixer& m = *layer.attention();
    const Experts& f = std::get<Experts>(layer.feed_forward);
    for (const Tensor& t : {m.q, m.k, m.v, m.output, f.router, f.shared.gate, f.shared.up, f.shared.down})
      of_all += product_cost(t);
    for (const Tensor& t : {f.gate, f.up, f.down}) of_experts += product_cost(t);
  }
  const SessionOptions o{.pool = 100};
  const Cost one = CostModel(*shared, o, Policies(o)).run(1, 9, true, true);
  const double keys = 3 * 16, queries = 3 * 2 * 16;  // number of channels in all layers
  EXPECT_DOUBLE_EQ(one.bytes, of_all.bytes + of_experts.bytes / 2 + (10 + 1) * 2 * keys * 2);
  EXPECT_DOUBLE_EQ(one.flop, of_all.flop + of_experts.flop / 2 + 10 * 2 * queries * 2);
}

TEST(Cost, OfAWindowedLayerEndsAtItsWindow) {
  const SeededModel m = seeded_model({.window = 6});  // the window of layer 0
  const SessionOptions options{.pool = 100};
  const CostModel cost(*m.model, options, Policies(options));
  EXPECT_EQ(cost.run(1, 9, false, false).bytes, 4 * kLayers + (10 + 1 + 6 + 1) * kKeys * 2);
  EXPECT_EQ(cost.run(3, 3, true, false).flop, 3 * 2 * kLayers + (4 + 5 + 6) * 2 * kQueries * 2);
  EXPECT_EQ(cost.run(3, 6, true, false).flop, 3 * 2 * kLayers + (7 + 8 + 9 + 6 + 6 + 6) * kQueries * 2);
}

// KVzap's network for Qwen3-8B has 75.7 million weights.
TEST(Cost, OfARetainerIsItsMatrices) {
  const auto matrix = [](uint32_t rows, uint32_t cols) {
    return Tensor{.data = {}, .type = DType::kF16, .rows = rows, .cols = cols};
  };
  const auto retainer = std::make_shared<Retainer>();
  retainer->kind = Retainer::Kind::kMlp;
  retainer->layers.resize(36);
  for (Retainer::Networks& layer : retainer->layers)
    layer = {.fc1 = matrix(512, 4096), .fc1_bias = {}, .fc2 = matrix(8, 512)};
  const SessionOptions options{.retainer = retainer, .retention = Retention::kLocret, .pool = 100};
  const Cost cost = Policies(options).retention->cost(options);
  EXPECT_EQ(cost.bytes, 2.0 * 36 * (512 * 4096 + 8 * 512));
  EXPECT_EQ(cost.flop, cost.bytes);  // two operations and two bytes per weight
  EXPECT_NEAR(cost.flop, 151e6, 0.5e6);
}

TEST(Cost, IsInTheStatsOfASession) {
  const SeededModel m = seeded_model();
  SessionOptions options = selecting();
  options.select_theta = 2;  // every selection misses
  const auto session = open_session(m.model, options);
  must(session->feed(seeded_tokens(40)));
  must(session->flush());
  const Cost read = must(session->stats()).prefill;
  EXPECT_GE(read.flop, 40 * 2 * kLayers);
  for (int i = 0; i < 3; ++i) must(session->step());
  const Cost missed = must(session->stats()).decode;
  const CostModel cost = cost_model(options);
  const Policies policies(options);
  Cost expected;
  for (uint32_t i = 0; i < 3; ++i) {
    expected += cost.run(1, 40 + i, false, true);
    expected += policies.selection->cost(*m.model, options, 41 + i);
  }
  EXPECT_DOUBLE_EQ(missed.bytes, expected.bytes);
  EXPECT_DOUBLE_EQ(missed.flop, expected.flop);
  EXPECT_EQ(must(session->stats()).prefill.flop, read.flop);
}

}  // namespace
}  // namespace thimble::test
