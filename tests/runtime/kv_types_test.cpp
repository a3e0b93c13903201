// Sessions whose keys and values are stored in blocks: the rules of kv_types.h, memory, and what holds for
// every policy.
#include "runtime/policy/kv_types.h"

#include <gtest/gtest.h>

#include "runtime/plan/planner.h"
#include "tests/support/reference_model.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {
namespace {

constexpr KvFormat kF16 = KvFormat::kF16, kQ8 = KvFormat::kQ8_0, kQ4 = KvFormat::kQ4_0;
constexpr KvTypes kHalves{};

Seeded wide(Seeded s = {}) {
  s.head_dim = 32;  // a block
  return s;
}
SessionOptions with(SessionOptions o, KvFormat keys, KvFormat values) {
  o.key_format = keys;
  o.value_format = values;
  return o;
}
// The formats of a layer's keys and values.
KvTypes types_of(const Model& model, uint32_t layer, KvFormat keys, KvFormat values) {
  return kv_types(model, *model.layers[layer].attention(), with({}, keys, values));
}

// ---- the rules ----

TEST(KvTypes, AreWhatTheOptionsSay) {
  const SeededModel m = seeded_model(wide());
  EXPECT_EQ(types_of(*m.model, 0, kF16, kF16), kHalves);
  EXPECT_EQ(types_of(*m.model, 0, kQ8, kQ4), (KvTypes{DType::kQ8_0, DType::kQ4_0}));
  EXPECT_EQ(types_of(*m.model, 1, kQ4, kF16), (KvTypes{DType::kQ4_0, DType::kF16}));
  EXPECT_EQ(finer_layers(*m.model, with({}, kQ4, kQ8)), 0u);
}

TEST(KvTypes, StayF16IfRowsAreNotWholeBlocks) {
  Seeded s;
  s.head_dim = 48;
  const SeededModel m = seeded_model(s);
  EXPECT_EQ(types_of(*m.model, 0, kQ8, kQ4), kHalves);
  EXPECT_EQ(finer_layers(*m.model, with({}, kQ8, kQ4)), 2u);
  EXPECT_EQ(finer_layers(*m.model, {}), 0u);
}

TEST(KvTypes, StayQ8IfFewLayersSeeTheWholeText) {
  Seeded s = wide();
  s.layers = 4;
  s.window = 16;
  const SeededModel m = seeded_model(s);
  ASSERT_EQ(m.model->layers[0].attention()->window, 16u);
  ASSERT_EQ(m.model->layers[1].attention()->window, 0u);
  EXPECT_EQ(types_of(*m.model, 0, kQ4, kQ4), (KvTypes{DType::kQ8_0, DType::kQ4_0}));
  EXPECT_EQ(types_of(*m.model, 1, kQ4, kQ4), (KvTypes{DType::kQ8_0, DType::kQ8_0}));
  EXPECT_EQ(types_of(*m.model, 1, kQ8, kF16), (KvTypes{DType::kQ8_0, DType::kF16}));
  EXPECT_EQ(finer_layers(*m.model, with({}, kQ4, kQ4)), 4u);
  EXPECT_EQ(finer_layers(*m.model, with({}, kQ8, kQ4)), 2u);
}

TEST(KvTypes, KeepMoreBitsIfKeysHaveABias) {
  Seeded s = wide();
  s.more = [](GgufWriter& w) {
    for (const char* name : {"attn_q", "attn_k", "attn_v"}) {
      const uint64_t width = name == std::string("attn_q") ? 4 * 32 : 2 * 32;
      std::vector<float> small(width, 9.5f), large = small;
      large[40] = -10.5f;
      w.tensor(std::string("blk.0.") + name + ".bias", {width}, small);
      w.tensor(std::string("blk.1.") + name + ".bias", {width}, large);
    }
  };
  const SeededModel m = seeded_model(s);
  EXPECT_EQ(types_of(*m.model, 0, kQ8, kQ8), (KvTypes{DType::kQ8_0, DType::kQ8_0}));
  EXPECT_EQ(types_of(*m.model, 0, kQ4, kQ4), (KvTypes{DType::kQ8_0, DType::kQ4_0}));
  EXPECT_EQ(types_of(*m.model, 1, kQ8, kQ8), (KvTypes{DType::kF16, DType::kQ8_0}));
  EXPECT_EQ(types_of(*m.model, 1, kQ4, kQ4), (KvTypes{DType::kF16, DType::kQ4_0}));
  EXPECT_EQ(finer_layers(*m.model, with({}, kQ4, kQ4)), 2u);
  EXPECT_EQ(finer_layers(*m.model, with({}, kQ8, kQ8)), 1u);
}

// Runs that move between layers are parts of one array, which has one format.
TEST(KvTypes, AreAlikeIfLayersShareOnePool) {
  Seeded s = wide({.shares = {0.25f, 0.25f, 2.9f, 0.6f}});
  const auto plan = [](const SeededModel& m, KvFormat keys) {
    SessionOptions o = retaining(m, Retention::kLocret);
    o.pool = 150;
    return make_plan(*m.model, *cpu(), with(o, keys, kQ4));
  };
  const SeededModel alike = seeded_model(s);
  EXPECT_TRUE(must(plan(alike, kQ8)).dimensions.moves);
  s.more = [](GgufWriter& w) {
    std::vector<float> large(2 * 32, 11.0f);
    w.tensor("blk.1.attn_q.bias", {4 * 32}, std::vector<float>(4 * 32, 0));
    w.tensor("blk.1.attn_k.bias", {2 * 32}, large);
    w.tensor("blk.1.attn_v.bias", {2 * 32}, large);
  };
  const SeededModel mixed = seeded_model(s);
  EXPECT_EQ(
      plan(mixed, kQ8).status().message(),
      "some layers of this model store keys or values more finely than the session asks for, and heads in "
      "different formats cannot share one pool unequally; store both as f16, or leave the shares out");
  EXPECT_TRUE(plan(mixed, kF16).ok());
}

// ---- memory and cost ----

TEST(KvTypes, TakeTheBytesThatThePlanCounts) {
  const SeededModel m = seeded_model(wide());
  // Arrays of 128 entries of two heads begin at multiples of 64 bytes in each format.
  const SessionOptions base{.pool = 96, .chunk = 32, .max_new = 32};
  const auto pool = [&](KvFormat keys, KvFormat values) {
    const SessionOptions o = with(base, keys, values);
    const auto device = std::make_shared<SpyDevice>(cpu());
    const MemoryPlan planned = must(make_plan(*m.model, *device, o));
    const auto session = open_session(m.model, o, device);
    EXPECT_EQ(planned.capacity, 128u);
    EXPECT_EQ(session->plan().total, planned.total);
    EXPECT_EQ(device->live_bytes + planned.fixed + host_bytes(*m.model, planned), planned.total);
    return planned.pool;
  };
  const uint64_t f16 = pool(kF16, kF16), rows = 2 * 2 * 128;  // layers, heads, entries
  EXPECT_EQ(f16 - pool(kQ8, kF16), rows * (64 - 36));
  EXPECT_EQ(f16 - pool(kF16, kQ4), rows * (64 - 20));
  EXPECT_EQ(f16 - pool(kQ8, kQ4), rows * (64 - 36 + 64 - 20));
}

TEST(KvTypes, CostTheirBytes) {
  const SeededModel m = seeded_model(wide());
  const EntryCost cost = full_entry_cost(*m.model, with({}, kQ8, kQ4)),
                  halves = full_entry_cost(*m.model, {});
  EXPECT_EQ(cost.keys.bytes, 2 * 2 * 36);  // layers, heads
  EXPECT_EQ(cost.both.bytes, 2 * 2 * (36 + 20));
  EXPECT_EQ(cost.both.flop, halves.both.flop);
  EXPECT_EQ(halves.both.bytes, 2 * 2 * (64 + 64));
}

TEST(KvTypes, LetABudgetHoldMoreEntries) {
  const SeededModel m = seeded_model(wide());
  SessionOptions o{.budget = 4 << 20, .retention = Retention::kWindow, .chunk = 32};
  const uint32_t halves = must(largest_pool(*m.model, *cpu(), o));
  const uint32_t bytes = must(largest_pool(*m.model, *cpu(), with(o, kQ8, kQ8)));
  EXPECT_GT(bytes, halves);
}

// ---- sessions ----

std::vector<float> logits_of(const SeededModel& m, const SessionOptions& o) {
  const auto session = open_session(m.model, o);
  std::vector<float> logits = read(*session, seeded_tokens(150));
  for (const int32_t t : seeded_tokens(8, 64, 8)) logits = accept(*session, t);
  return logits;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(sum);
}

struct Pair {
  KvFormat keys, values;
};
constexpr Pair kPairs[] = {{kQ8, kQ8}, {kQ4, kQ4}, {kQ8, kQ4}, {kF16, kQ4}};

SessionOptions with(const SessionOptions& o, const Pair& pair) { return with(o, pair.keys, pair.values); }

// Fewer bits are farther from f16, and every format is nearer than another text.
TEST(KvTypes, AreAsFarFromF16AsTheirBits) {
  const SeededModel m = seeded_model(wide());
  const SessionOptions o{.pool = 256, .chunk = 32, .max_new = 32};
  const std::vector<float> f16 = logits_of(m, o);
  const double q8 = distance(logits_of(m, with(o, kQ8, kQ8)), f16),
               q4 = distance(logits_of(m, with(o, kQ4, kQ4)), f16);
  EXPECT_GT(q8, 0);
  EXPECT_GT(q4, 4 * q8);
  EXPECT_LT(q4, distance(std::vector<float>(f16.size(), 0), f16) / 2);
}

// A pool as large as the text makes every policy dense attention in the same format.
TEST(KvTypes, EqualDenseAttentionIfTheBudgetCoversTheText) {
  const SeededModel m = seeded_model(wide());
  for (const Pair& pair : kPairs) {
    SessionOptions dense = with({.pool = 256, .chunk = 32, .max_new = 32}, pair);
    const std::vector<float> expected = logits_of(m, dense);
    dense.positions = Positions::kOriginal;  // keys are stored rotated, which rounds them in another way
    const std::vector<float> original = logits_of(m, dense);
    for_policies(m, [&](SessionOptions o) {
      o.pool = 200;
      o.select_k = o.select_k ? 160 : 0;
      expect_close(logits_of(m, with(o, pair)), o.selection == Selection::kQuest ? original : expected);
    });
  }
}

TEST(KvTypes, GoOnBitForBitAfterSavingCloningAndRewinding) {
  const SeededModel m = seeded_model(wide());
  for (const Pair& pair : kPairs)
    for_policies(m, [&](const SessionOptions& policy) {
      const SessionOptions o = with(policy, pair);
      const auto saved = open_session(m.model, o), restored = open_session(m.model, o);
      read(*saved, seeded_tokens(90));
      must(saved->step());
      const SessionBytes bytes = save(*saved);
      const auto clone = must(saved->clone());
      read(*restored, seeded_tokens(77, 64, 14));  // restoring discards this
      restore(*restored, bytes);
      const Outcome expected = go_on(*saved);
      EXPECT_EQ(go_on(*restored), expected);
      EXPECT_EQ(go_on(*clone), expected);
    });
}

TEST(KvTypes, RewindToTokensThatAreStoredAsBefore) {
  const SeededModel m = seeded_model(wide());
  const auto session = open_session(m.model, with({.pool = 256, .chunk = 32, .max_new = 32}, kQ4, kQ4));
  read(*session, seeded_tokens(100));
  const std::vector<float> expected = accept(*session, 5);
  for (const int32_t t : seeded_tokens(20, 64, 3)) accept(*session, t);
  must(session->rewind(100));
  EXPECT_EQ(accept(*session, 5), expected);
}

TEST(KvTypes, RefuseASavedSessionWithOthers) {
  const SeededModel m = seeded_model(wide());
  const SessionOptions o{.pool = 256, .chunk = 32, .max_new = 32};
  const auto refusal = [&](const SessionOptions& saver, const SessionOptions& other) {
    const auto from = open_session(m.model, saver), to = open_session(m.model, other);
    read(*from, seeded_tokens(40));
    return to->restore(lend(save(*from)), "saved").status().message();
  };
  EXPECT_EQ(
      refusal(with(o, kQ8, kF16), o),
      "saved was saved with key_format q8_0, this session has f16; make the session as the saved one was");
  EXPECT_EQ(
      refusal(o, with(o, kF16, kQ4)),
      "saved was saved with value_format f16, this session has q4_0; make the session as the saved one was");
  EXPECT_EQ(
      refusal(with(o, kQ8, kQ8), with(o, kQ8, kQ4)),
      "saved was saved with value_format q8_0, this session has q4_0; make the session as the saved one was");
  // Files of f16 do not name the format, so files that are older than formats stay useful.
  const auto session = open_session(m.model, o);
  for (const NamedSetting& setting : must(SessionFile::open(lend(save(*session)), "saved")).settings)
    EXPECT_EQ(setting.name.find("format"), std::string::npos) << setting.name;
}

}  // namespace
}  // namespace thimble::test
