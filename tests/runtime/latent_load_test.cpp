// Tests how models with latent attention (deepseek2) are loaded: both forms of their files, the factor of
// attention, and routers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "runtime/model/model.h"
#include "runtime/plan/planner.h"
#include "tests/support/random.h"
#include "tests/support/sessions.h"
#include "tests/support/tiny_model.h"

namespace thimble::test {
namespace {

constexpr uint32_t kModel = 16, kHeads = 3, kUnrotated = 8, kRotated = 4, kLatent = 12, kValue = 6,
                   kVocab = 20;
constexpr uint32_t kQuery = kUnrotated + kRotated;

enum class Form { kApart, kEarly };

// Two layers with experts, the second of which only drafts tokens.
GgufWriter tiny(Form form) {
  GgufWriter w;
  Random random;
  const auto put = [&](const std::string& name, std::vector<uint64_t> shape,
                       const std::vector<float>& values) { w.tensor(name, std::move(shape), values); };
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    const uint64_t n = std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
    put(name, std::move(shape), random.floats(n, -1, 1));
  };
  const std::string a = "deepseek2.";
  w.set("general.architecture", "deepseek2");
  for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                   {"block_count", 2u},
                                   {"nextn_predict_layers", 1u},
                                   {"embedding_length", kModel},
                                   {"feed_forward_length", 24u},
                                   {"attention.head_count", kHeads},
                                   {"attention.kv_lora_rank", kLatent},
                                   {"rope.dimension_count", kRotated},
                                   {"expert_count", 4u},
                                   {"expert_used_count", 2u},
                                   {"expert_feed_forward_length", 8u},
                                   {"expert_shared_count", 2u}})
    w.set(a + key, value);
  w.set(a + "attention.layer_norm_rms_epsilon", 1e-6f);
  if (form == Form::kEarly)
    w.set(a + "attention.head_count_kv", kHeads)
        .set(a + "attention.key_length", kQuery)
        .set(a + "attention.value_length", kValue);
  else
    w.set(a + "attention.head_count_kv", 1u)
        .set(a + "attention.key_length", kLatent + kRotated)
        .set(a + "attention.value_length", kLatent)
        .set(a + "attention.key_length_mla", kQuery)
        .set(a + "attention.value_length_mla", kValue);
  add("token_embd.weight", {kModel, kVocab});
  add("output_norm.weight", {kModel});
  add("output.weight", {kModel, kVocab});
  const std::string b = "blk.0.";
  add(b + "attn_norm.weight", {kModel});
  add(b + "attn_q.weight", {kModel, kHeads * kQuery});
  add(b + "attn_kv_a_mqa.weight", {kModel, kLatent + kRotated});
  add(b + "attn_kv_a_norm.weight", {kLatent});
  const uint32_t rows = kUnrotated + kValue;  // of a head
  const std::vector<float> both = random.floats(size_t{kHeads} * rows * kLatent, -1, 1);
  if (form == Form::kEarly) {
    put(b + "attn_kv_b.weight", {kLatent, kHeads * rows}, both);
  } else {
    std::vector<float> keys, values;
    for (uint32_t head = 0; head < kHeads; ++head) {
      const float* of_head = &both[size_t{head} * rows * kLatent];
      for (uint32_t c = 0; c < kLatent; ++c)
        for (uint32_t row = 0; row < kUnrotated; ++row) keys.push_back(of_head[row * kLatent + c]);
      values.insert(values.end(), of_head + kUnrotated * kLatent, of_head + rows * kLatent);
    }
    put(b + "attn_k_b.weight", {kUnrotated, kLatent, kHeads}, keys);
    put(b + "attn_v_b.weight", {kLatent, kValue, kHeads}, values);
  }
  add(b + "attn_output.weight", {kHeads * kValue, kModel});
  add(b + "ffn_norm.weight", {kModel});
  add(b + "ffn_gate_inp.weight", {kModel, 4});
  add(b + "ffn_gate_exps.weight", {kModel, 8, 4});
  add(b + "ffn_up_exps.weight", {kModel, 8, 4});
  add(b + "ffn_down_exps.weight", {8, kModel, 4});
  add(b + "ffn_gate_shexp.weight", {kModel, 16});
  add(b + "ffn_up_shexp.weight", {kModel, 16});
  add(b + "ffn_down_shexp.weight", {16, kModel});
  add("blk.1.nextn.eh_proj.weight", {2 * kModel, kModel});  // of the layer that drafts
  return w;
}

struct Lent {
  explicit Lent(const GgufWriter& writer)
      : bytes(writer.bytes()), opened(Model::open(lend(bytes), "m.gguf")) {}
  const Model* operator->() const { return opened->get(); }
  FileBytes bytes;
  Result<std::shared_ptr<const Model>> opened;
};

void expect_refused(const GgufWriter& writer, Code code, const std::string& part) {
  const Status status = Lent(writer).opened.status();
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

TEST(LatentAttention, HasOneHeadOfKeysThatAreItsValuesToo) {
  for (const Form form : {Form::kApart, Form::kEarly}) {
    const Lent lent(tiny(form));
    ASSERT_TRUE(lent.opened.ok()) << lent.opened.status().message();
    ASSERT_EQ(lent->layers.size(), 1u);
    const AttentionMixer& m = *lent->layers[0].attention();
    EXPECT_TRUE(m.is_latent());
    EXPECT_FALSE(m.has_values());
    EXPECT_EQ(m.kv_heads, 1u);
    EXPECT_EQ(m.head_dim, kLatent + kRotated);
    EXPECT_EQ(m.qkv_cols(), (kHeads + 1) * (kLatent + kRotated));
    EXPECT_EQ(m.k_rotated.rows, kRotated);
    EXPECT_EQ(m.k_up.transposed, form == Form::kEarly);
    EXPECT_EQ(lent->rope.n_rot, kRotated);
    EXPECT_FLOAT_EQ(lent->attention_scale, 1 / std::sqrt(float{kQuery}));
    const auto& experts = std::get<Experts>(lent->layers[0].feed_forward);
    EXPECT_EQ(experts.route.kind, kRouteSoftmax);
    EXPECT_EQ(experts.route.share, 0u);
    EXPECT_EQ(experts.shared.down.cols, 16u);
  }
}

TEST(LatentAttention, StoresItsRowsAsF16Only) {
  const Lent lent(tiny(Form::kApart));
  for (const auto& [keys, values] :
       {std::pair(KvFormat::kQ8_0, KvFormat::kF16), std::pair(KvFormat::kF16, KvFormat::kQ4_0)}) {
    const SessionOptions o{.pool = 60, .key_format = keys, .value_format = values};
    const Status status = make_plan(**lent.opened, *cpu(), o).status();
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_EQ(
        status.message(),
        "m.gguf reads values from its keys' rows, which are stored as f16 only; leave their formats out");
  }
}

// Products of a head's matrix and its transpose are sums of at most 12 products in another order.
TEST(LatentAttention, OfEarlyFilesComputesTheSame) {
  const Lent apart(tiny(Form::kApart)), early(tiny(Form::kEarly));
  ASSERT_TRUE(early.opened.ok()) << early.opened.status().message();
  std::vector<int32_t> text(50);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i * i % kVocab);
  const SessionOptions options{.pool = 60, .chunk = 16, .max_new = 8};
  const auto logits = [&](const Lent& lent) {
    const auto session = open_session(*lent.opened, options);
    std::vector<float> all = read(*session, text);
    for (const int32_t token : {3, 7}) {
      const std::vector<float> next = accept(*session, token);
      all.insert(all.end(), next.begin(), next.end());
    }
    return all;
  };
  const std::vector<float> want = logits(apart), got = logits(early);
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 1e-4f * (1 + std::fabs(want[i]))) << i;
}

// With a = 1.1, s = 8 and a tenth of the multiplier 0.07: (1.1 (1 + 0.07 ln 8))^2, and cos and sin get a
// alone.
TEST(LatentAttention, IsScaledByTheMagnitudeOfYarn) {
  GgufWriter w = tiny(Form::kApart);
  w.set("deepseek2.rope.scaling.type", "yarn")
      .set("deepseek2.rope.scaling.factor", 8.0f)
      .set("deepseek2.rope.scaling.original_context_length", 16u)
      .set("deepseek2.rope.scaling.attn_factor", 1.1f)
      .set("deepseek2.rope.scaling.yarn_log_multiplier", 0.07f);
  const Lent lent(w);
  ASSERT_TRUE(lent.opened.ok()) << lent.opened.status().message();
  const double m = 1.1 * (1 + 0.07 * std::log(8.0));
  EXPECT_NEAR(lent->attention_scale, m * m / std::sqrt(double{kQuery}), 1e-6);
  EXPECT_NEAR(lent->rope.attention_factor, 1.1, 1e-6);
}

// llama.cpp's values of such files. Published files with yarn have a multiplier.
TEST(LatentAttention, ScalesWithoutAMultiplierAsIfItWere1) {
  const double longer = 1 + 0.1 * std::log(8.0);
  GgufWriter w = tiny(Form::kApart);
  w.set("deepseek2.rope.scaling.factor", 8.0f).set("deepseek2.rope.scaling.original_context_length", 16u);
  for (const char* type : {"linear", "yarn"}) {
    const Lent lent(w.set("deepseek2.rope.scaling.type", type));
    ASSERT_TRUE(lent.opened.ok()) << lent.opened.status().message();
    EXPECT_NEAR(lent->attention_scale, longer * longer / std::sqrt(double{kQuery}), 1e-6) << type;
    const double turned = type == std::string("yarn") ? longer : 1;
    EXPECT_NEAR(lent->rope.attention_factor, turned, 1e-6) << type;
  }
}

TEST(LatentAttention, MayScaleQueriesByTheirPosition) {
  GgufWriter w = tiny(Form::kApart);
  w.set("deepseek2.attention.temperature_scale", 0.1f);
  expect_refused(w, Code::kFormat, "attention.temperature_length");
  const Lent lent(w.set("deepseek2.attention.temperature_length", 8u));
  ASSERT_TRUE(lent.opened.ok()) << lent.opened.status().message();
  EXPECT_FLOAT_EQ(lent->query_growth, 0.1f);
  EXPECT_EQ(lent->query_period, 8u);
}

TEST(LatentAttention, RefusesSizesThatDoNotFit) {
  expect_refused(tiny(Form::kApart).set("deepseek2.rope.dimension_count", kQuery), Code::kFormat,
                 "'deepseek2.rope.dimension_count' is 12, and queries have 12 channels");
  expect_refused(tiny(Form::kApart).set("deepseek2.attention.value_length_mla", 7u), Code::kFormat,
                 "tensor 'blk.0.attn_v_b.weight' is 12 x 6 x 3, where 12 x 7 x 3 is expected");
  expect_refused(tiny(Form::kApart).set("deepseek2.attention.kv_lora_rank", 4093u), Code::kUnsupported,
                 "keys of 4 and 4093 channels are not supported, only up to 4096");
}

}  // namespace
}  // namespace thimble::test
