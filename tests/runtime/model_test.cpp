// Tests models: architectures, shapes, rotary schemes, retainers, and refusals.
#include "runtime/model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <numeric>
#include <tuple>

#include "base/bits.h"
#include "tests/support/data.h"
#include "tests/support/tiny_model.h"

namespace thimble {
namespace {

using Opened = Result<std::shared_ptr<const Model>>;

void expect_message(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(code_name(status.code()), std::string(code_name(code))) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

// A model that points into `bytes`, which exists as long as the model.
struct Lent {
  explicit Lent(const GgufWriter& writer)
      : bytes(writer.bytes()), opened(Model::open(lend(bytes), "m.gguf")) {}
  bool ok() const { return opened.ok(); }
  const Status& status() const { return opened.status(); }
  const Model& operator*() const { return **opened; }
  const Model* operator->() const { return opened->get(); }

  FileBytes bytes;
  Opened opened;
};

void expect_refused(const GgufWriter& writer, Code code, const std::string& part) {
  expect_message(Lent(writer).status(), code, part);
}

float value(const Tensor& t, uint32_t index) { return reinterpret_cast<const float*>(t.data)[index]; }

template <typename M>
const Experts& experts_of(const M& model, size_t layer) {
  return std::get<Experts>(model->layers[layer].feed_forward);
}

// ---- architectures and tensors ----

TEST(Model, ReadsEveryArchitecture) {
  for (const char* architecture : kArchitectureNames) {
    SCOPED_TRACE(architecture);
    const Lent m(tiny_model(architecture));
    ASSERT_TRUE(m.ok()) << m.status().message();
    EXPECT_EQ(m->info.architecture, architecture);
    EXPECT_EQ(m->info.name, "tiny");
    EXPECT_EQ(m->info.context_length, 64u);
    EXPECT_EQ(m->info.quantization, "f32");
    EXPECT_EQ(m->info.file_bytes, m.bytes.size());
    EXPECT_EQ(m->shape.layers, 2u);
    EXPECT_EQ(m->shape.d_model, 8u);
    EXPECT_EQ(m->shape.heads, 2u);
    EXPECT_EQ(m->shape.kv_heads, 1u);
    EXPECT_EQ(m->shape.head_dim, 4u);
    EXPECT_EQ(m->shape.d_ff, 12u);
    EXPECT_EQ(m->shape.vocab, 6u);
    EXPECT_EQ(m->norm_epsilon, 1e-5f);
    ASSERT_EQ(m->layers.size(), 2u);
    const AttentionMixer& layer = *m->layers[1].attention();
    const Experts* experts = std::get_if<Experts>(&m->layers[1].feed_forward);
    const Dense of_layer = experts ? Dense{experts->gate, experts->up, experts->down}
                                   : std::get<Dense>(m->layers[1].feed_forward);
    EXPECT_EQ(layer.q.rows, 8u);
    EXPECT_EQ(layer.k.rows, 4u);
    EXPECT_EQ(layer.v.rows, 4u);
    EXPECT_EQ(of_layer.gate.rows, 12u * std::max(m->shape.experts, 1u));
    EXPECT_EQ(of_layer.up.rows, 12u * std::max(m->shape.experts, 1u));
    EXPECT_EQ(of_layer.down.cols, 12u);
    const std::string& a = m->info.architecture;
    const bool is_qwen2 = a == "qwen2", has_qk_norms = a == "qwen3" || a == "qwen3moe" || a == "gemma3" ||
                                                       a == "olmo2" || a == "exaone4";
    EXPECT_EQ(bool(layer.q_bias), is_qwen2);
    EXPECT_EQ(bool(layer.k_bias), is_qwen2);
    EXPECT_EQ(bool(layer.v_bias), is_qwen2);
    EXPECT_EQ(bool(layer.q_norm), has_qk_norms);
    EXPECT_EQ(bool(layer.k_norm), has_qk_norms);
    EXPECT_EQ(bool(layer.output_bias), a == "gpt-oss");
    const bool adjacent = a == "llama" || a == "mistral3" || a == "smollm3" || a == "glm4" ||
                          a == "minicpm" || a.starts_with("granite") || a.starts_with("ernie4_5") ||
                          a.starts_with("cohere2");
    EXPECT_EQ(m->rope.pairing, adjacent ? kRopeAdjacent : kRopeHalves);
  }
}

TEST(Model, ReadsWhatMakesGemmaDiffer) {
  const Lent two(tiny_model("gemma2")), three(tiny_model("gemma3"));
  ASSERT_TRUE(two.ok() && three.ok());
  for (const auto* m : {&two, &three}) {
    EXPECT_EQ((*m)->act, kActGelu);
    EXPECT_EQ((*m)->embedding_scale, std::sqrt(8.0f));
    EXPECT_EQ((*m)->layers[0].attention()->window, 16u);
    EXPECT_EQ((*m)->layers[1].attention()->window, 0u);
    EXPECT_TRUE((*m)->layers[0].post_norm && (*m)->layers[0].post_ffn_norm);
    EXPECT_EQ((*m)->attention_scale, 0.5f);
  }
  EXPECT_EQ(two->attention_cap, 50);
  EXPECT_EQ(two->logit_cap, 30);
  EXPECT_EQ(three->attention_cap, 0);
  EXPECT_EQ(three->logit_cap, 0);
  // The windowed layers of gemma3 have their own base and no scaling.
  EXPECT_TRUE(two->window_rope.inverse_frequency.empty());
  const Lent scaled(tiny_model("gemma3")
                        .set("gemma3.rope.freq_base", 1e6f)
                        .set("gemma3.rope.scaling.type", "linear")
                        .set("gemma3.rope.scaling.factor", 8.0f));
  ASSERT_TRUE(scaled.ok()) << scaled.status().message();
  EXPECT_DOUBLE_EQ(scaled->rope.inverse_frequency[1], 1e-3 / 8);
  EXPECT_DOUBLE_EQ(scaled->window_rope.inverse_frequency[1], 1e-2);
  const Lent none(tiny_model("gemma3").erase("gemma3.attention.sliding_window"));
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->layers[0].attention()->window, 0u);
  // An explicit pattern is ignored if it is the usual one: the usual pattern has six layers per full layer,
  // and here it is two.
  const Lent spelled(
      tiny_model("gemma3").set("gemma3.attention.sliding_window_pattern", std::vector<int32_t>{0, 1}));
  ASSERT_TRUE(spelled.ok()) << spelled.status().message();
  EXPECT_EQ(spelled->layers[1].attention()->window, 16u);
}

TEST(Model, ReadsScalesOfGranite) {
  const Lent m(tiny_model("granite"));
  ASSERT_TRUE(m.ok());
  EXPECT_EQ(m->embedding_scale, 12);
  EXPECT_EQ(m->residual_scale, 0.25f);
  EXPECT_EQ(m->logit_scale, 0.125f);
  EXPECT_EQ(m->attention_scale, 0.125f);
  const Lent plain(
      tiny_model("granite").set("granite.residual_scale", 0.0f).erase("granite.attention.scale"));
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->residual_scale, 1);
  EXPECT_EQ(plain->attention_scale, 0.5f);
  EXPECT_TRUE(plain->layers[1].attention()->rotates);
  const Lent without(tiny_model("granite").set("granite.rope.scaling.finetuned", false));
  ASSERT_TRUE(without.ok());
  EXPECT_FALSE(without->layers[0].attention()->rotates || without->layers[1].attention()->rotates);
  expect_refused(tiny_model("granite").set("granite.logit_scale", -1.0f), Code::kFormat,
                 "key 'granite.logit_scale' is -1 instead of a positive number");
}

TEST(Model, ReadsScalesOfMiniCpm) {
  const std::string a = "minicpm.";
  const Lent given(tiny_model("minicpm").set(a + "embedding_scale", 3.0f).set(a + "residual_scale", 0.5f));
  ASSERT_TRUE(given.ok()) << given.status().message();
  EXPECT_EQ(given->embedding_scale, 3);
  EXPECT_EQ(given->residual_scale, 0.5f);
  EXPECT_EQ(given->logit_scale, 1 / 8.0f);
  const Lent early(tiny_model("minicpm").erase(a + "logit_scale"));
  ASSERT_TRUE(early.ok()) << early.status().message();
  EXPECT_EQ(early->embedding_scale, 12);
  EXPECT_EQ(early->residual_scale, static_cast<float>(1.4 / std::sqrt(2.0)));
  EXPECT_EQ(early->logit_scale, 256 / 8.0f);
}

TEST(Model, ReadsWhatMakesCohere2Differ) {
  for (const std::string a : {"cohere2", "cohere2moe"}) {
    SCOPED_TRACE(a);
    const Lent m(tiny_model(a));
    ASSERT_TRUE(m.ok()) << m.status().message();
    EXPECT_TRUE(m->norms_center);
    EXPECT_EQ(m->logit_scale, 8);
    const size_t full = a == "cohere2" ? 1 : 0;  // of a period, the last or the first layer has no window
    for (size_t i = 0; i < 2; ++i) {
      const Layer& layer = m->layers[i];
      EXPECT_TRUE(layer.parallel && layer.norm && !layer.ffn_norm);
      EXPECT_EQ(layer.attention()->window, i == full ? 0u : 16u);
      EXPECT_EQ(layer.attention()->rotates, i != full);
    }
    expect_refused(tiny_model(a).erase(a + ".attention.sliding_window"), Code::kFormat,
                   "lacks the key '" + a + ".attention.sliding_window'");
    expect_refused(tiny_model(a).erase(a + ".logit_scale"), Code::kFormat,
                   "lacks the key '" + a + ".logit_scale'");
    expect_refused(tiny_model(a).set(a + ".residual_scale", 2.0f), Code::kUnsupported,
                   "residual_scale' is 2");
  }
  const std::string a = "cohere2moe.";
  const Lent rms(tiny_model("cohere2moe").set(a + "attention.layer_norm_rms_epsilon", 1e-6f));
  ASSERT_TRUE(rms.ok()) << rms.status().message();
  EXPECT_FALSE(rms->norms_center);
  EXPECT_EQ(rms->norm_epsilon, 1e-6f);
  const Lent listed(
      tiny_model("cohere2moe").set(a + "attention.sliding_window_pattern", std::vector<bool>{true, false}));
  ASSERT_TRUE(listed.ok()) << listed.status().message();
  EXPECT_EQ(listed->layers[0].attention()->window, 16u);
  EXPECT_EQ(listed->layers[1].attention()->window, 0u);
  expect_refused(tiny_model("cohere2moe").erase(a + "attention.sliding_window_pattern"), Code::kFormat,
                 "lacks the key 'cohere2moe.attention.sliding_window_pattern'");
}

// A first layer without experts rotates although it has no window. The experts' sum is halved if there is a
// shared one.
TEST(Model, ReadsTheFirstLayersAndTheSharedExpertOfCohere2moe) {
  GgufWriter w = tiny_model("cohere2moe");
  const std::string a = "cohere2moe.";
  w.set(a + "leading_dense_block_count", 1u).set(a + "expert_shared_count", 2u);
  for (const char* name : {"ffn_gate.weight", "ffn_up.weight"})
    w.tensor(std::string("blk.0.") + name, {8, 12}, std::vector<float>(96));
  w.tensor("blk.0.ffn_down.weight", {12, 8}, std::vector<float>(96));
  for (const char* name :
       {"ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"})
    w.erase_tensor(std::string("blk.0.") + name);
  for (const char* name : {"ffn_gate_shexp.weight", "ffn_up_shexp.weight"})
    w.tensor(std::string("blk.1.") + name, {8, 24}, std::vector<float>(192));
  w.tensor("blk.1.ffn_down_shexp.weight", {24, 8}, std::vector<float>(192));
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->layers[0].attention()->window, 0u);
  EXPECT_TRUE(m->layers[0].attention()->rotates);
  EXPECT_EQ(experts_of(m, 1).scale, 0.5f);
  EXPECT_EQ(experts_of(m, 1).shared.gate.rows, 24u);
}

TEST(Model, ReadsHowExpertsAreChosen) {
  const std::string a = "glm4moe.";
  const auto route = [&](const GgufWriter& w) {
    const Lent m(w);
    if (!m.ok()) ADD_FAILURE() << m.status().message();
    return m.ok() ? experts_of(m, 0).route : RouteParams{};
  };
  const RouteParams usual = route(tiny_model("glm4moe"));
  EXPECT_EQ(usual.kind, kRouteSigmoid);
  EXPECT_EQ(usual.share, 0u);
  EXPECT_EQ(usual.scale, 1);
  EXPECT_EQ(usual.groups, 0u);
  const RouteParams given = route(tiny_model("glm4moe", 4)
                                      .set(a + "expert_weights_norm", true)
                                      .set(a + "expert_weights_scale", 1.8f)
                                      .set(a + "expert_gating_func", 4u)
                                      .set(a + "expert_group_count", 2u)
                                      .set(a + "expert_group_used_count", 1u));
  EXPECT_EQ(given.kind, kRouteSqrtSoftplus);
  EXPECT_EQ(given.share, 1u);
  EXPECT_EQ(given.scale, 1.8f);
  EXPECT_EQ(given.groups, 2u);
  EXPECT_EQ(given.groups_used, 1u);
  EXPECT_EQ(route(tiny_model("glm4moe").set(a + "expert_group_count", 1u)).groups, 0u);
  EXPECT_EQ(route(tiny_model("glm4moe").set(a + "expert_weights_scale", 0.0f)).scale, 1);
  expect_refused(tiny_model("glm4moe", 4).set(a + "expert_group_count", 2u), Code::kFormat,
                 "lacks the key 'glm4moe.expert_group_used_count'");
  expect_refused(
      tiny_model("glm4moe").set(a + "expert_group_count", 2u).set(a + "expert_group_used_count", 1u),
      Code::kFormat, "2 of 3 experts cannot be chosen in 1 of 2 groups");
  expect_refused(tiny_model("ernie4_5-moe").set("ernie4_5-moe.interleave_moe_layer_step", 2u),
                 Code::kUnsupported, "key 'ernie4_5-moe.interleave_moe_layer_step' is 2");
}

TEST(Model, PairsChannelsOfGlm4ByHalvesIfItHasSections) {
  const Lent m(tiny_model("glm4").set("glm4.rope.dimension_sections", std::vector<int32_t>{1, 1, 0, 0}));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->rope.pairing, kRopeHalves);
}

TEST(Model, GivesWindowsToExaone4IfItHas64Layers) {
  const Lent small(tiny_model("exaone4").set("exaone4.attention.sliding_window", 16u));
  ASSERT_TRUE(small.ok()) << small.status().message();
  EXPECT_EQ(small->layers[0].attention()->window, 0u);
  EXPECT_TRUE(small->layers[0].attention()->rotates);
  GgufWriter w = tiny_model("exaone4");
  w.set("exaone4.block_count", 65u).set("exaone4.nextn_predict_layers", 1u);
  const std::vector<GgufWriter::Tensor> two = w.tensors;
  for (uint32_t i = 2; i < 64; ++i)
    for (const GgufWriter::Tensor& t : two)
      if (t.name.starts_with("blk.0."))
        w.tensor("blk." + std::to_string(i) + t.name.substr(5), t.shape, t.type, t.data);
  const Lent large(w);
  ASSERT_TRUE(large.ok()) << large.status().message();
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(large->layers[i].attention()->window, i % 4 == 3 ? 0u : 4096u);
    EXPECT_EQ(large->layers[i].attention()->rotates, i % 4 != 3);
  }
}

TEST(Model, ReadsHowQueriesOfMistral3Grow) {
  const std::string growth = "mistral3.attention.temperature_scale",
                    period = "mistral3.rope.scaling.original_context_length";
  GgufWriter w = tiny_model("mistral3");
  EXPECT_EQ(Lent(w)->query_growth, 0);
  const Lent m(w.set(growth, 0.1f));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->query_growth, 0.1f);
  EXPECT_EQ(m->rope.original_context, 64u);  // the context, if the file does not set it
  EXPECT_EQ(Lent(w.set(period, 16u))->rope.original_context, 16u);
  expect_refused(w.set(period, 0u), Code::kFormat, "key '" + period + "' is 0, where 1 to");
  expect_refused(w.set(period, 16u).set(growth, -0.5f), Code::kFormat,
                 "key '" + growth + "' is -0.5 instead of a positive number");
}

// The shared expert has no gate and its own width.
TEST(Model, ReadsTheExpertThatAllTokensOfGraniteShare) {
  const std::string width = "granitemoe.expert_shared_feed_forward_length";
  const auto add = [](GgufWriter w) {
    for (const std::string block : {"blk.0.", "blk.1."}) {
      w.tensor(block + "ffn_gate_shexp.weight", {8, 20}, std::vector<float>(160, 1));
      w.tensor(block + "ffn_up_shexp.weight", {8, 20}, std::vector<float>(160, 2));
      w.tensor(block + "ffn_down_shexp.weight", {20, 8}, std::vector<float>(160, 3));
    }
    return w;
  };
  const GgufWriter alone = tiny_model("granitemoe"), both = add(alone);
  const auto with = [&](GgufWriter w, uint32_t n) { return w.set(width, n); };
  const Lent m(with(both, 20)), without(with(alone, 0));
  ASSERT_TRUE(m.ok() && without.ok()) << m.status().message();
  EXPECT_EQ(m->shape.d_ff_shared, 20u);
  EXPECT_EQ(m->shape.d_ff, 12u);
  EXPECT_EQ(value(experts_of(m, 1).shared.gate, 0), 1);
  EXPECT_EQ(value(experts_of(m, 1).shared.up, 0), 2);
  EXPECT_EQ(value(experts_of(m, 1).shared.down, 0), 3);
  EXPECT_EQ(m->tensors().size(), without->tensors().size() + 2 * 3);
  EXPECT_FALSE(experts_of(without, 0).shared.gate);
  expect_refused(with(alone, 20), Code::kFormat, "lacks the tensor 'blk.0.ffn_gate_shexp.weight'");
  expect_refused(with(both, 16), Code::kFormat,
                 "tensor 'blk.0.ffn_gate_shexp.weight' is 8 x 20, where 8 x 16 is expected");
  for (const GgufWriter& w : {both, with(both, 0)})
    expect_refused(w, Code::kUnsupported,
                   "tensor 'blk.0.ffn_gate_shexp.weight' has no place in this architecture");
  // Other families have no shared expert, nor have models without experts.
  expect_refused(add(tiny_model("qwen3moe")).set("qwen3moe.expert_shared_feed_forward_length", 20u),
                 Code::kUnsupported, "tensor 'blk.0.ffn_gate_shexp.weight' has no place");
  EXPECT_EQ(
      Lent(tiny_model("granite").set("granite.expert_shared_feed_forward_length", 20u))->shape.d_ff_shared,
      0u);
}

TEST(Model, ReadsExperts) {
  const Lent mixtral(tiny_model("llama", 3)), qwen(tiny_model("qwen3moe")), gpt(tiny_model("gpt-oss"));
  ASSERT_TRUE(mixtral.ok()) << mixtral.status().message();
  ASSERT_TRUE(qwen.ok() && gpt.ok());
  for (const auto* m : {&mixtral, &qwen, &gpt}) {
    EXPECT_EQ((*m)->shape.experts, 3u);
    EXPECT_EQ((*m)->shape.chosen_experts, 2u);
    EXPECT_EQ((*m)->shape.d_ff, 12u);
    EXPECT_EQ(experts_of(*m, 1).router.rows, 3u);
    EXPECT_EQ(experts_of(*m, 1).down.rows, 3u * 8);
  }
  EXPECT_EQ(experts_of(mixtral, 0).route.kind, kRouteSoftmax);
  EXPECT_EQ(experts_of(mixtral, 0).route.share, 1u);
  EXPECT_EQ(experts_of(gpt, 0).route.kind, kRouteSoftmaxOfChosen);
  EXPECT_EQ(gpt->act, kActClamped);
  EXPECT_TRUE(gpt->layers[0].attention()->sinks && experts_of(gpt, 0).down_bias && gpt->layers[0].ffn_norm);
  EXPECT_FALSE(gpt->layers[0].post_norm);  // there, the name of this tensor means another norm
}

// The step adds the result of experts to the residual stream unscaled, and applies a norm to their input.
TEST(Model, RefusesExpertsOfFamiliesWhoseStepHasNone) {
  for (const char* architecture : {"qwen2", "qwen3", "phi3", "gemma2", "gemma3", "smollm3", "olmo2"})
    expect_refused(tiny_model(architecture, 3), Code::kUnsupported,
                   "key '" + std::string(architecture) +
                       ".expert_count' is 3, and experts of models of this architecture are not");
  EXPECT_TRUE(Lent(tiny_model("gemma3").set("gemma3.expert_count", 0u)).ok());
}

TEST(Model, TakesTheWidthOfExpertsIfAFileGivesNoOther) {
  for (const char* architecture : {"qwen3moe", "gpt-oss"}) {
    const std::string a = architecture, width = a + ".expert_feed_forward_length";
    GgufWriter w = tiny_model(a);
    w.set(a + ".feed_forward_length", 24u).erase(width);
    const Lent shared(w);  // the shared expert is one of the two that a token uses
    ASSERT_TRUE(shared.ok()) << shared.status().message();
    EXPECT_EQ(shared->shape.d_ff, 12u);
    const Lent own(w.set(width, 12u).erase(a + ".feed_forward_length"));
    ASSERT_TRUE(own.ok()) << own.status().message();
    EXPECT_EQ(own->shape.d_ff, 12u);
    expect_refused(w.erase(width), Code::kFormat, "lacks the key '" + width + "'");
  }
}

TEST(Model, RefusesImpossibleExpertsAndWindows) {
  const std::string q = "qwen3moe.";
  expect_refused(tiny_model("qwen3moe").set(q + "expert_count", 0u), Code::kFormat,
                 "key 'qwen3moe.expert_count' is 0");
  expect_refused(tiny_model("qwen3moe").set(q + "expert_count", 4u), Code::kFormat,
                 "tensor 'blk.0.ffn_gate_inp.weight' is 8 x 3, where 8 x 4 is expected");
  expect_refused(tiny_model("qwen3moe").set(q + "expert_used_count", 4u), Code::kFormat,
                 "key 'qwen3moe.expert_used_count' is 4, where 1 to 3 is possible");
  expect_refused(tiny_model("qwen3moe").erase(q + "expert_used_count"), Code::kFormat,
                 "lacks the key 'qwen3moe.expert_used_count'");
  expect_refused(tiny_model("llama").set("llama.expert_count", 8u).set("llama.expert_used_count", 2u),
                 Code::kFormat, "lacks the tensor 'blk.0.ffn_gate_inp.weight'");
  expect_refused(tiny_model("llama", 3).set("llama.expert_count", 0u), Code::kFormat,
                 "has tensors of experts, and key 'llama.expert_count' is 0");
  expect_refused(tiny_model("llama", 3).erase("llama.expert_count"), Code::kFormat,
                 "has tensors of experts, and key 'llama.expert_count' is absent");
  expect_refused(tiny_model("gemma3").set("gemma3.attention.sliding_window", 0u), Code::kFormat,
                 "key 'gemma3.attention.sliding_window' is 0");
  expect_refused(tiny_model("gpt-oss").erase("gpt-oss.attention.sliding_window"), Code::kFormat,
                 "lacks the key 'gpt-oss.attention.sliding_window'");
  expect_refused(tiny_model("gemma3").set("gemma3.attention.sliding_window_pattern", 3u), Code::kFormat,
                 "key 'gemma3.attention.sliding_window_pattern' is 3, where 1 to 2 is possible");
  expect_refused(
      tiny_model("gemma3").set("gemma3.attention.sliding_window_pattern", false), Code::kFormat,
      "key 'gemma3.attention.sliding_window_pattern' is of type bool, where an integer is expected");
}

TEST(Model, SaysWhoseFileOfGptOssCannotBeRead) {
  constexpr uint32_t kItsMxfp4 = 4;
  expect_refused(tiny_model("gpt-oss")
                     .tensor("blk.0.ffn_gate_up_exps.weight", {32, 2, 1}, kItsMxfp4, FileBytes(34))
                     .tensor("blk.0.attn_out.weight", {1, 1}, std::vector<float>(1)),
                 Code::kUnsupported, "was written by Ollama");
}

TEST(Model, CutsFusedMatricesIntoQKVAndGateThenUp) {
  const Lent m(tiny_model("phi3"));
  ASSERT_TRUE(m.ok()) << m.status().message();
  const AttentionMixer& layer = *m->layers[0].attention();
  const Dense& dense = std::get<Dense>(m->layers[0].feed_forward);
  // tiny_model numbers its weights consecutively, so the first element shows where a part begins.
  const float qkv = value(layer.q, 0), gate = value(dense.gate, 0);
  EXPECT_EQ(value(layer.k, 0), qkv + 8 * 8);
  EXPECT_EQ(value(layer.v, 0), qkv + (8 + 4) * 8);
  EXPECT_EQ(gate, qkv + 16 * 8);
  EXPECT_EQ(value(dense.up, 0), gate + 12 * 8);
}

TEST(Model, ReadsExpertsWithGateAndUpInOneTensor) {
  GgufWriter w = tiny_model("qwen3moe");
  for (const char* block : {"blk.0.", "blk.1."}) {
    for (const char* name : {"ffn_gate_exps.weight", "ffn_up_exps.weight"})
      w.erase_tensor(std::string(block) + name);
    w.tensor(std::string(block) + "ffn_gate_up_exps.weight", {8, 24, 3}, std::vector<float>(8 * 24 * 3));
  }
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  const Experts& experts = experts_of(m, 0);
  EXPECT_EQ(experts.gate.rows, 24u * 3);
  EXPECT_FALSE(experts.up);
  EXPECT_EQ(experts.d_ff(), 12u);
  expect_refused(w.tensor("blk.0.ffn_gate_up_exps.weight", {8, 12, 3}, std::vector<float>(8 * 12 * 3)),
                 Code::kFormat, "tensor 'blk.0.ffn_gate_up_exps.weight' is 8 x 12 x 3, where 8 x 24 x 3");
}

TEST(Model, CutsTheBiasOfAFusedMatrixAsTheMatrix) {
  std::vector<float> bias(16);
  std::iota(bias.begin(), bias.end(), 0.0f);
  GgufWriter w = tiny_model("phi3");
  const Lent m(w.tensor("blk.1.attn_qkv.bias", {16}, bias));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_FALSE(m->layers[0].attention()->q_bias || m->layers[0].attention()->k_bias ||
               m->layers[0].attention()->v_bias);
  const AttentionMixer& layer = *m->layers[1].attention();
  for (const auto& [part, first, count] :
       {std::tuple{layer.q_bias, 0, 8}, {layer.k_bias, 8, 4}, {layer.v_bias, 12, 4}}) {
    ASSERT_EQ(part.rows, 1u);
    ASSERT_EQ(part.cols, static_cast<uint32_t>(count));
    for (int i = 0; i < count; ++i) EXPECT_EQ(value(part, static_cast<uint32_t>(i)), first + i);
  }
  expect_refused(w.tensor("blk.1.attn_qkv.bias", {12}, std::vector<float>(12)), Code::kFormat,
                 "tensor 'blk.1.attn_qkv.bias' is 12, where 16 is expected");
}

TEST(Model, CutsRowsOfQuantizedMatrices) {
  const FileBytes bytes(100 * 34 * 2);
  const Tensor whole{bytes.data(), DType::kQ8_0, 100, 64};
  const Tensor part = whole.row_range(7, 3);
  EXPECT_EQ(part.data, bytes.data() + 7 * 34 * 2);
  EXPECT_EQ(part.rows, 3u);
  EXPECT_EQ(part.cols, 64u);
  EXPECT_EQ(part.bytes(), 3u * 34 * 2);
}

TEST(Model, TiesTheOutputToTheEmbedding) {
  GgufWriter w = tiny_model("llama");
  const Lent untied(w);
  ASSERT_TRUE(untied.ok());
  EXPECT_NE(untied->output.data, untied->token_embedding.data);
  const Lent tied(w.erase_tensor("output.weight"));
  ASSERT_TRUE(tied.ok());
  EXPECT_EQ(tied->output.data, tied->token_embedding.data);
  EXPECT_EQ(tied->output.rows, 6u);
}

TEST(Model, ReadsTheOutputBias) {
  GgufWriter w = tiny_model("llama");
  w.tensor("blk.1.attn_output.bias", {8}, std::vector<float>(8, 3.0f));
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_FALSE(m->layers[0].attention()->output_bias);
  EXPECT_EQ(value(m->layers[1].attention()->output_bias, 7), 3.0f);
}

TEST(Model, FillsAbsentKeysWithTheirDefaults) {
  const Lent m(tiny_model("llama").erase("llama.attention.head_count_kv"));
  // With one KV head for each query head, k and v would have 8 rows.
  expect_message(m.status(), Code::kFormat, "tensor 'blk.0.attn_k.weight' is 8 x 4, where 8 x 8 is expected");
}

TEST(Model, AcceptsAnArrayOfEqualValuesForEachLayer) {
  GgufWriter w = tiny_model("llama");
  w.set("llama.attention.head_count_kv", std::vector<int32_t>{1, 1});
  w.set("llama.feed_forward_length", std::vector<uint32_t>{12, 12});
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->shape.kv_heads, 1u);
  EXPECT_EQ(m->shape.d_ff, 12u);
  expect_refused(w.set("llama.attention.head_count_kv", std::vector<int32_t>{1, 2}), Code::kFormat,
                 "tensor 'blk.1.attn_k.weight' is 8 x 4, where 8 x 8 is expected");
  expect_refused(w.set("llama.attention.head_count_kv", std::vector<int32_t>{}), Code::kFormat,
                 "has 0 values for 2 layers");
  expect_refused(w.set("llama.attention.head_count_kv", std::vector<int32_t>{-1, -1}), Code::kFormat,
                 "negative");
  for (const char* key :
       {"llama.attention.head_count", "llama.attention.head_count_kv", "llama.feed_forward_length"})
    for (const size_t count : {1, 3})
      expect_refused(tiny_model("llama").set(key, std::vector<uint32_t>(count, 1u)), Code::kFormat,
                     "key '" + std::string(key) + "' has " + std::to_string(count) + " values for 2 layers");
  expect_refused(tiny_model("llama").set("llama.block_count", std::vector<uint32_t>{2}), Code::kFormat,
                 "'llama.block_count' is an array");
}

// The last of three layers only drafts tokens. Its tensors may be in the file or not.
TEST(Model, SkipsLayersThatDraftTokens) {
  GgufWriter trunk = tiny_model("llama");
  trunk.set("llama.block_count", 3u).set("llama.nextn_predict_layers", 1u);
  trunk.set("llama.attention.head_count_kv", std::vector<int32_t>{1, 1, 2});
  GgufWriter whole = trunk;
  whole.tensor("blk.2.attn_norm.weight", {8}, std::vector<float>(8));
  whole.tensor("blk.2.nextn.eh_proj.weight", {16, 8}, std::vector<float>(128));
  whole.tensor("blk.2.eh_proj", {16, 8}, std::vector<float>(128));  // as early files name it
  for (const GgufWriter* w : {&trunk, &whole}) {
    const Lent m(*w);
    ASSERT_TRUE(m.ok()) << m.status().message();
    EXPECT_EQ(m->shape.layers, 2u);
    EXPECT_EQ(m->layers.size(), 2u);
    EXPECT_EQ(m->shape.kv_heads, 1u);
    EXPECT_EQ(m->fingerprint(), Lent(tiny_model("llama"))->fingerprint());
  }
  expect_refused(GgufWriter(whole).set("llama.nextn_predict_layers", 0u), Code::kFormat,
                 "lacks the tensor 'blk.2.ffn_norm.weight'");
  expect_refused(GgufWriter(whole).tensor("blk.3.attn_norm.weight", {8}, std::vector<float>(8)),
                 Code::kUnsupported, "tensor 'blk.3.attn_norm.weight' has no place");
  expect_refused(GgufWriter(trunk).set("llama.nextn_predict_layers", 3u), Code::kFormat,
                 "key 'llama.nextn_predict_layers' is 3, which leaves none of 3 layers");
  GgufWriter drafts = whole;
  std::erase_if(drafts.tensors,
                [](const auto& t) { return t.name.starts_with("blk.0.") || t.name.starts_with("blk.1."); });
  expect_refused(drafts, Code::kUnsupported,
                 "m.gguf contains only layers that draft tokens for another model");
}

TEST(Model, RefusesLayersOfWhichNoneHasAttention) {
  GgufWriter w = tiny_model("llama");
  w.set("general.architecture", std::string("lfm2"));
  for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                   {"block_count", 2u},
                                   {"embedding_length", 8u},
                                   {"feed_forward_length", 12u},
                                   {"attention.head_count", 2u},
                                   {"shortconv.l_cache", 3u}})
    w.set(std::string("lfm2.") + key, value);
  expect_refused(w.set("lfm2.attention.head_count_kv", std::vector<int32_t>{0, 0}), Code::kUnsupported,
                 "no layer has attention");
}

TEST(Model, AcceptsIntegersOfAnyWidth) {
  GgufWriter w = tiny_model("llama");
  w.set("llama.block_count", uint64_t{2}).set("llama.embedding_length", int16_t{8});
  EXPECT_TRUE(Lent(w).ok());
}

TEST(Model, NamesAMissingKey) {
  for (const char* key :
       {"general.architecture", "llama.context_length", "llama.block_count", "llama.embedding_length",
        "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"})
    expect_refused(tiny_model("llama").erase(key), Code::kFormat,
                   "m.gguf lacks the key '" + std::string(key) + "'");
  expect_refused(tiny_model("granite").erase("granite.logit_scale"), Code::kFormat,
                 "m.gguf lacks the key 'granite.logit_scale'");
}

TEST(Model, NamesAMissingTensor) {
  for (const std::string architecture : {"qwen3", "gemma3", "gpt-oss", "olmo2"}) {
    const GgufWriter whole = tiny_model(architecture);
    const bool may_share_output = architecture == "qwen3" || architecture == "gemma3";
    for (const GgufWriter::Tensor& tensor : whole.tensors) {
      if (tensor.name.ends_with("ffn_gate.weight")) continue;
      if (tensor.name == "output.weight" && may_share_output) continue;
      GgufWriter w = whole;
      expect_refused(w.erase_tensor(tensor.name), Code::kFormat,
                     "m.gguf lacks the tensor '" + tensor.name + "'");
    }
  }
  expect_refused(tiny_model("llama").erase_tensor("blk.1.ffn_gate.weight"), Code::kFormat,
                 "tensor 'blk.1.ffn_up.weight' is 8 x 12, where 8 x 24 is expected");
}

TEST(Model, NamesATensorOfTheWrongShape) {
  const GgufWriter whole = tiny_model("qwen2");
  for (const GgufWriter::Tensor& tensor : whole.tensors) {
    if (tensor.name == "token_embd.weight") continue;  // it sets the size of the vocabulary
    GgufWriter w = whole;
    std::vector<uint64_t> shape = tensor.shape;
    shape.back() *= 2;
    FileBytes data = tensor.data;
    data.resize(2 * data.size());
    expect_refused(w.tensor(tensor.name, shape, 0, data), Code::kFormat, "tensor '" + tensor.name + "' is ");
  }
  GgufWriter w = whole;
  w.tensor("output_norm.weight", {8, 1, 2}, std::vector<float>(16));
  expect_refused(w, Code::kFormat, "tensor 'output_norm.weight' is 8 x 1 x 2, where 8 is expected");
}

TEST(Model, NamesTensorAndTypeOfWhatItCannotRead) {
  GgufWriter w = tiny_model("llama");
  w.tensor("blk.0.attn_q.weight", {8, 8}, 36, FileBytes(300));
  expect_refused(w, Code::kUnsupported,
                 "tensor 'blk.0.attn_q.weight' is of type iq4_nl_4_4 (36), which cannot be read");
}

TEST(Model, RefusesATensorThatIsLongerOrShorterThanItsDataAndNamesFirstOneThatIsMissing) {
  GgufWriter w = tiny_model("llama");
  const auto q = std::find_if(w.tensors.begin(), w.tensors.end(),
                              [](const GgufWriter::Tensor& t) { return t.name == "blk.0.attn_q.weight"; });
  q->type = 1;  // f16, which would take half the bytes
  expect_refused(w, Code::kFormat, "tensor 'blk.0.attn_k.weight' begins at offset ");
  expect_refused(w.erase_tensor("blk.1.ffn_norm.weight"), Code::kFormat,
                 "lacks the tensor 'blk.1.ffn_norm.weight'");
}

TEST(Model, WantsNormsAndBiasesInF32) {
  for (const char* name : {"blk.1.ffn_norm.weight", "blk.1.attn_q.bias"}) {
    GgufWriter w = tiny_model("qwen2");
    w.tensor(name, {8}, 1, FileBytes(16));
    expect_refused(w, Code::kUnsupported,
                   "tensor '" + std::string(name) + "' is of type f16, where f32 is needed");
  }
}

TEST(Model, RefusesATensorThatItWouldNotUse) {
  GgufWriter w = tiny_model("llama");
  w.tensor("blk.0.ffn_sub_norm.weight", {12}, std::vector<float>(12));
  expect_refused(w, Code::kUnsupported,
                 "tensor 'blk.0.ffn_sub_norm.weight' has no place in this architecture");
}

TEST(Model, RefusesOtherArchitectures) {
  expect_refused(
      tiny_model("mamba"), Code::kUnsupported,
      "the architecture 'mamba' is not supported (only llama, mistral3, qwen2, qwen3, qwen3moe, phi3, "
      "gemma2, gemma3, gemma4, gpt-oss, gptoss, smollm3, granite, granitemoe, granitehybrid, nemotron_h, "
      "nemotron_h_moe, falcon-h1, olmo2, lfm2, lfm2moe, qwen35, qwen35moe, qwen3next, seed_oss, ");
  expect_refused(tiny_model("minicpm3"), Code::kUnsupported,
                 "the architecture 'minicpm3' is not supported; the nearest one is minicpm (only llama, ");
}

TEST(Model, RefusesAnAdapterAsAModel) {
  const FileBytes bytes = tiny_heads("llama").bytes();
  expect_message(Model::open(lend(bytes), "h.gguf").status(), Code::kFormat, "h.gguf is an adapter");
}

TEST(Model, RefusesKeysThatWouldChangeTheResult) {
  const std::string a = "llama.";
  const struct {
    const char* key;
    float harmless, harmful;
  } cases[] = {{"attn_logit_softcapping", 0, 50},
               {"final_logit_softcapping", 0, 30},
               {"logit_scale", 1, 0.5f},
               {"residual_scale", 1, 0.2f},
               {"embedding_scale", 1, 12},
               {"attention.clamp_kqv", 0, 8},
               {"attention.temperature_scale", 0, 0.1f},  // only mistral3 has this
               {"attention.scale", 0.5f, 0.25f}};         // 1 / sqrt(4)
  for (const auto& c : cases) {
    EXPECT_TRUE(Lent(tiny_model("llama").set(a + c.key, c.harmless)).ok()) << c.key;
    expect_refused(tiny_model("llama").set(a + c.key, c.harmful), Code::kUnsupported,
                   "key '" + a + c.key + "' is ");
  }
  EXPECT_TRUE(Lent(tiny_model("llama").set(a + "expert_count", 0u)).ok());
  expect_refused(tiny_model("llama").set(a + "attention.causal", false), Code::kUnsupported,
                 "'llama.attention.causal'");
}

TEST(Model, WarnsAboutASoftCapOfAttentionThatGemma3DoesNotHave) {
  const Lent m(tiny_model("gemma3").set("gemma3.attn_logit_softcapping", 50.0f));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->attention_cap, 0);
  ASSERT_EQ(m->warnings.size(), 1u);
  EXPECT_NE(
      m->warnings[0].find("key 'gemma3.attn_logit_softcapping' is 50, which models of this architecture do"),
      std::string::npos)
      << m->warnings[0];
}

TEST(Model, WarnsAboutASlidingWindowThatIsNotApplied) {
  for (const char* architecture : {"phi3", "llama", "qwen2", "qwen3", "qwen3moe", "smollm3", "granite"}) {
    SCOPED_TRACE(architecture);
    const std::string key = std::string(architecture) + ".attention.sliding_window";
    const Lent narrow(tiny_model(architecture).set(key, 63u));
    ASSERT_TRUE(narrow.ok()) << narrow.status().message();
    ASSERT_EQ(narrow->warnings.size(), 1u);
    EXPECT_NE(narrow->warnings[0].find("sliding window of 63 tokens is not applied"), std::string::npos);
    EXPECT_EQ(narrow->layers[0].attention()->window, 0u);
    for (const uint32_t window : {0u, 64u, 262144u}) {
      const Lent wide(tiny_model(architecture).set(key, window));
      ASSERT_TRUE(wide.ok());
      EXPECT_TRUE(wide->warnings.empty());
    }
  }
}

TEST(Model, GivesTheWindowToTheLayersThatThePatternNames) {
  const auto with = [](const char* architecture, uint32_t window, const auto& pattern) {
    const std::string key = std::string(architecture) + ".attention.sliding_window";
    return tiny_model(architecture).set(key, window).set(key + "_pattern", pattern);
  };
  const auto windows = [&](uint32_t window, uint32_t pattern) {
    const Lent m(with("llama", window, pattern));
    return std::vector<uint32_t>{m->layers[0].attention()->window, m->layers[1].attention()->window};
  };
  EXPECT_EQ(windows(32, 2), (std::vector<uint32_t>{32, 0}));
  EXPECT_EQ(windows(32, 1), (std::vector<uint32_t>{0, 0}));
  EXPECT_EQ(windows(32, 0), (std::vector<uint32_t>{32, 32}));
  // Texts may be longer than in training.
  EXPECT_EQ(windows(1u << 20, 2), (std::vector<uint32_t>{1u << 20, 0}));
  using Layers = std::vector<int32_t>;
  for (const Layers& layers : {Layers{1}, Layers{1, 0, 1}})
    expect_refused(with("gemma3", 16, layers), Code::kFormat,
                   "key 'gemma3.attention.sliding_window_pattern' has " + std::to_string(layers.size()) +
                       " values for 2 layers");
  // If a family has no usual pattern, the meaning of a pattern in another form is unknown.
  expect_refused(with("llama", 16, Layers{1, 0}), Code::kFormat,
                 "key 'llama.attention.sliding_window_pattern' is an array");
}

TEST(Model, RefusesLayersWithAWindowOfAnotherShape) {
  for (const char* key :
       {"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"}) {
    const std::string of_gemma3 = "gemma3." + std::string(key), of_llama = "llama." + std::string(key);
    EXPECT_TRUE(Lent(tiny_model("gemma3").set(of_gemma3, 4u)).ok());
    expect_refused(tiny_model("gemma3").set(of_gemma3, 2u), Code::kUnsupported,
                   "key '" + of_gemma3 + "' is 2, and 4 in layers without a window");
    EXPECT_TRUE(Lent(tiny_model("llama").set(of_llama, 2u)).ok());  // this family has no such layers
  }
}

TEST(Model, RefusesImpossibleShapes) {
  expect_refused(tiny_model("llama").set("llama.attention.head_count", 0u), Code::kFormat,
                 "head_count' is 0");
  expect_refused(tiny_model("llama").set("llama.attention.head_count_kv", 3u), Code::kFormat,
                 "head_count_kv' is 3");
  expect_refused(tiny_model("llama").set("llama.block_count", UINT64_MAX), Code::kFormat,
                 "'llama.block_count' is");
  expect_refused(tiny_model("llama").set("llama.embedding_length", 1u << 30), Code::kFormat,
                 "embedding_length' is");
  expect_refused(tiny_model("llama").set("llama.attention.value_length", 8u), Code::kUnsupported,
                 "keys of 4 and values of 8 channels are not supported");
  expect_refused(tiny_model("llama").set("llama.attention.layer_norm_rms_epsilon", NAN), Code::kFormat,
                 "epsilon' is");
  GgufWriter three = tiny_model("llama");
  three.set("llama.attention.head_count", 3u).set("llama.attention.head_count_kv", 2u);
  expect_refused(three, Code::kFormat, "3 query heads cannot share 2 key and value heads evenly");
}

TEST(Model, OpensWithoutATokenizerAndSaysWhy) {
  const Lent m(tiny_model("llama"));
  ASSERT_TRUE(m.ok());
  EXPECT_TRUE(m->has_weights());
  EXPECT_FALSE(m->tokenizer.ok());
  EXPECT_NE(m->description_of_tokenizer_error.find("tokenizer.ggml"), std::string::npos)
      << m->description_of_tokenizer_error;
}

TEST(Model, RefusesAFileWithNeitherWeightsNorVocabulary) {
  GgufWriter w;
  w.set("general.architecture", "llama");
  expect_refused(w, Code::kFormat, "m.gguf holds no weights, and no vocabulary either");
}

// A vocabulary of `size` single-character tokens.
GgufWriter& add_vocabulary(GgufWriter& w, uint32_t size) {
  std::vector<std::string> tokens;
  for (uint32_t i = 0; i < size; ++i) tokens.push_back(std::string(1, static_cast<char>('a' + i)));
  w.set("tokenizer.ggml.model", "gpt2")
      .set("tokenizer.ggml.pre", "default")
      .set("tokenizer.ggml.tokens", tokens);
  w.set("tokenizer.ggml.token_type", std::vector<int32_t>(size, 1))
      .set("tokenizer.ggml.merges", std::vector<std::string>{});
  return w;
}

TEST(Model, OpensAVocabularyOfAnyArchitectureWithoutWeights) {
  GgufWriter w;
  w.set("general.architecture", "falcon").set("tokenizer.chat_template", "{{ messages }}");
  const Lent m(add_vocabulary(w, 6));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_FALSE(m->has_weights());
  EXPECT_TRUE(m->tokenizer.ok());
  EXPECT_EQ(m->tokenizer.size(), 6u);
  EXPECT_EQ(m->chat_template, "{{ messages }}");
}

// The text that a writer makes of one question.
std::string asked(const Lent& model, const Result<ChatWriter>& writer) {
  EXPECT_TRUE(writer.ok()) << writer.status().message();
  if (!writer.ok()) return {};
  Conversation c;
  c.messages = {{"user", "Hi"}};
  const auto text = writer->write(c, model->tokenizer);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? *text : "";
}

TEST(Model, KnowsItsFurtherChatTemplatesByName) {
  GgufWriter w;
  w.set("general.architecture", "falcon").set("tokenizer.chat_template", "{{ messages[0].content }}");
  w.set("tokenizer.chat_template.tool_use", "tools: {{ messages[0].content }}")
      .set("tokenizer.chat_template.chatml", "own: {{ messages[0].content }}")
      .set("tokenizer.chat_template.broken", "{{ 1|nope }}")
      .set("tokenizer.chat_templates", std::vector<std::string>{"tool_use", "chatml", "broken"});
  const Lent m(add_vocabulary(w, 6));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->chat_template_names(), (std::vector<std::string_view>{"tool_use", "chatml", "broken"}));
  EXPECT_EQ(asked(m, m->chat), "Hi");
  EXPECT_EQ(asked(m, m->chat_named("tool_use")), "tools: Hi");
  // The template takes precedence over the known format of this name.
  EXPECT_EQ(asked(m, m->chat_named("chatml")), "own: Hi");
  EXPECT_NE(asked(m, m->chat_named("zephyr")).find("<|user|>"), std::string::npos);
  EXPECT_NE(m->chat_named("broken").status().message().find("the filter 'nope'"), std::string::npos);
  const Status unknown = m->chat_named("rag").status();
  EXPECT_EQ(unknown.code(), Code::kInvalidArgument);
  EXPECT_NE(unknown.message().find("no chat format 'rag'"), std::string::npos) << unknown.message();
  EXPECT_NE(unknown.message().find("or of the file's own templates: tool_use, chatml, broken"),
            std::string::npos)
      << unknown.message();
}

TEST(Model, TakesTheChatTemplateNamedDefaultIfNoneIsNameless) {
  GgufWriter w;
  w.set("general.architecture", "falcon")
      .set("tokenizer.chat_template.default", "d: {{ messages[0].content }}");
  const Lent m(add_vocabulary(w, 6));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(asked(m, m->chat), "d: Hi");
}

TEST(Model, RefusesMoreTokensThanEmbeddings) {
  GgufWriter w = tiny_model("llama");
  const Lent fits(add_vocabulary(w, 6));
  ASSERT_TRUE(fits.ok()) << fits.status().message();
  ASSERT_TRUE(fits->tokenizer.ok()) << fits->description_of_tokenizer_error;
  expect_refused(add_vocabulary(w, 7), Code::kFormat,
                 "the vocabulary has 7 tokens, and tensor 'token_embd.weight' only 6");
}

// ---- rotary positions ----

// A tiny model whose heads have 64 channels, so that every part of a scheme has an effect; the width stays 8.
GgufWriter wide_heads(const std::string& architecture) {
  GgufWriter w = tiny_model(architecture);
  const std::string a = architecture + ".";
  w.set(a + "attention.key_length", 64u)
      .set(a + "attention.value_length", 64u)
      .set(a + "context_length", 2048u);
  for (const std::string block : {"blk.0.", "blk.1."}) {
    if (architecture == "phi3") {
      w.tensor(block + "attn_qkv.weight", {8, 4 * 64}, std::vector<float>(8 * 4 * 64));
    } else {
      w.tensor(block + "attn_q.weight", {8, 128}, std::vector<float>(8 * 128));
      w.tensor(block + "attn_k.weight", {8, 64}, std::vector<float>(8 * 64));
      w.tensor(block + "attn_v.weight", {8, 64}, std::vector<float>(8 * 64));
    }
    w.tensor(block + "attn_output.weight", {128, 8}, std::vector<float>(128 * 8));
  }
  return w;
}

// The values result from at most three rounded operations and a pow() with an error of a few units in the
// last place.
void expect_close(double actual, double expected) {
  EXPECT_NEAR(actual, expected, 1e-14 * std::abs(expected));
}

TEST(Rope, UsesTheBaseAndTheNumberOfRotatedChannels) {
  const Lent plain(wide_heads("llama"));
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  ASSERT_EQ(plain->rope.inverse_frequency.size(), 32u);
  EXPECT_EQ(plain->rope.inverse_frequency[0], 1.0);
  expect_close(plain->rope.inverse_frequency[16], 0.01);  // 10000^(-1/2)
  EXPECT_EQ(plain->rope.attention_factor, 1.0);

  GgufWriter w = wide_heads("llama");
  const Lent partial(w.set("llama.rope.freq_base", 1e6f).set("llama.rope.dimension_count", 16u));
  ASSERT_TRUE(partial.ok());
  EXPECT_EQ(partial->rope.n_rot, 16u);
  ASSERT_EQ(partial->rope.inverse_frequency.size(), 8u);
  expect_close(partial->rope.inverse_frequency[4], 0.001);  // 1e6^(-1/2)
}

TEST(Rope, DividesAllFrequenciesByALinearFactor) {
  GgufWriter w = wide_heads("llama");
  w.set("llama.rope.scaling.factor", 4.0f);
  for (const char* how : {"typed", "untyped", "legacy", "none"}) {
    SCOPED_TRACE(how);
    if (how == std::string("typed")) w.set("llama.rope.scaling.type", "linear");
    if (how == std::string("untyped")) w.erase("llama.rope.scaling.type");
    if (how == std::string("legacy"))
      w.erase("llama.rope.scaling.factor").set("llama.rope.scale_linear", 4.0f);
    if (how == std::string("none")) w.set("llama.rope.scaling.type", "none");
    const Lent m(w);
    ASSERT_TRUE(m.ok()) << m.status().message();
    const double factor = how == std::string("none") ? 1 : 4;
    expect_close(m->rope.inverse_frequency[0], 1 / factor);
    expect_close(m->rope.inverse_frequency[16], 0.01 / factor);
    EXPECT_EQ(m->rope.attention_factor, 1.0);
  }
}

TEST(Rope, BlendsFrequenciesUnderYarn) {
  GgufWriter w = wide_heads("qwen2");
  for (const std::string block : {"blk.0.", "blk.1."}) {
    w.tensor(block + "attn_q.bias", {128}, std::vector<float>(128));
    w.tensor(block + "attn_k.bias", {64}, std::vector<float>(64));
    w.tensor(block + "attn_v.bias", {64}, std::vector<float>(64));
  }
  w.set("qwen2.rope.scaling.type", "yarn").set("qwen2.rope.scaling.factor", 4.0f);
  w.set("qwen2.rope.scaling.original_context_length", 256u);
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  // The pair that turns t times in 256 positions has index 64 ln(256 / (2 pi t)) / (2 ln 10000): 0.84 for 32
  // turns, 12.88 for one. So the ramp goes from pair 0 to pair 13.
  const std::vector<double>& f = m->rope.inverse_frequency;
  EXPECT_EQ(f[0], 1.0);
  expect_close(f[5], std::pow(10000.0, -5.0 / 32) * (8.0 / 13 + 5.0 / 13 / 4));
  expect_close(f[12], std::pow(10000.0, -12.0 / 32) * (1.0 / 13 + 12.0 / 13 / 4));
  for (const uint32_t i : {13, 20, 31}) expect_close(f[i], std::pow(10000.0, -1.0 * i / 32) / 4);
  expect_close(m->rope.attention_factor, 1.1386294361119891);  // 1 + 0.1 ln 4

  const Lent scaled(w.set("qwen2.rope.scaling.attn_factor", 0.5f));
  ASSERT_TRUE(scaled.ok());
  expect_close(scaled->rope.attention_factor, 0.5 * 1.1386294361119891);

  // The range of the ramp is not read from the file.
  w.set("qwen2.rope.scaling.yarn_beta_fast", 8.0f).set("qwen2.rope.scaling.yarn_beta_slow", 0.5f);
  const Lent same(w);
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(same->rope.inverse_frequency, f);
}

TEST(Rope, ReadsTheRampAndTheMagnitudeOfMistral3) {
  GgufWriter w = wide_heads("mistral3");
  w.set("mistral3.rope.scaling.type", "yarn").set("mistral3.rope.scaling.factor", 4.0f);
  w.set("mistral3.rope.scaling.original_context_length", 256u);
  // Pair 5.66 turns 8 times and pair 15.29 half a time, so the ramp goes from pair 5 to pair 16.
  w.set("mistral3.rope.scaling.yarn_beta_fast", 8.0f).set("mistral3.rope.scaling.yarn_beta_slow", 0.5f);
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  expect_close(m->rope.inverse_frequency[5], std::pow(10000.0, -5.0 / 32));
  expect_close(m->rope.inverse_frequency[10], std::pow(10000.0, -10.0 / 32) * (6.0 / 11 + 5.0 / 11 / 4));
  expect_close(m->rope.attention_factor, 1.1386294361119891);  // 1 + 0.1 ln 4
  const Lent half(w.set("mistral3.rope.scaling.yarn_log_multiplier", 0.5f)),
      whole(w.set("mistral3.rope.scaling.yarn_log_multiplier", 1.0f));
  ASSERT_TRUE(half.ok() && whole.ok());
  expect_close(half->rope.attention_factor, 1.1386294361119891 / 1.0693147180559945);
  EXPECT_EQ(whole->rope.attention_factor, 1);
  expect_refused(w.set("mistral3.rope.scaling.yarn_log_multiplier", -1.0f), Code::kFormat,
                 "yarn_log_multiplier' is -1");
}

// The norms of this family follow the rotation, so no length of cos and sin reaches the scores.
TEST(Rope, LeavesNormedRotationsAtTheirLength) {
  GgufWriter w = wide_heads("hunyuan-dense");
  for (const char* norm :
       {"blk.0.attn_q_norm", "blk.0.attn_k_norm", "blk.1.attn_q_norm", "blk.1.attn_k_norm"})
    w.tensor(std::string(norm) + ".weight", {64}, std::vector<float>(64, 1.0f));
  w.set("hunyuan-dense.rope.scaling.type", "yarn").set("hunyuan-dense.rope.scaling.factor", 4.0f);
  w.set("hunyuan-dense.rope.scaling.original_context_length", 256u);
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  expect_close(m->rope.inverse_frequency[31], std::pow(10000.0, -31.0 / 32) / 4);
  EXPECT_EQ(m->rope.attention_factor, 1);
}

// Converters also write yarn keys that other families read; the families here do not read them.
TEST(Rope, PassesOverWhatItsFamilyDoesNotReadOfYarn) {
  GgufWriter w = tiny_model("olmo2");
  w.set("olmo2.rope.scaling.type", "yarn").set("olmo2.rope.scaling.factor", 8.0f);
  const Lent plain(w);
  w.set("olmo2.rope.scaling.yarn_attn_factor", 1.2079442f).set("olmo2.rope.scaling.yarn_ext_factor", 0.5f);
  w.set("olmo2.rope.scaling.yarn_log_multiplier", 0.1f);
  const Lent more(w);
  ASSERT_TRUE(plain.ok() && more.ok()) << more.status().message();
  EXPECT_EQ(more->rope.inverse_frequency, plain->rope.inverse_frequency);
  EXPECT_EQ(more->rope.attention_factor, plain->rope.attention_factor);
}

// Windowed layers of gemma2 and gpt-oss have the scaling of the others, with their own base if the file gives
// one. That base decides the range of the yarn ramp. Windowed layers of olmo2 have neither.
TEST(Rope, OfLayersWithAWindowHasTheirBase) {
  for (const char* architecture : {"gemma2", "gpt-oss", "olmo2"}) {
    SCOPED_TRACE(architecture);
    const std::string rope = std::string(architecture) + ".rope.";
    GgufWriter w = tiny_model(architecture), other = w;
    for (GgufWriter* file : {&w, &other})
      file->set(rope + "scaling.type", "yarn")
          .set(rope + "scaling.factor", 4.0f)
          .set(rope + "scaling.attn_factor", 0.5f)
          .set(rope + "scaling.original_context_length", 16u);
    const Lent windowed(w.set(rope + "freq_base_swa", 100.0f)), full(other.set(rope + "freq_base", 100.0f)),
        same(w.set(rope + "freq_base_swa", 10000.0f));
    ASSERT_TRUE(windowed.ok() && full.ok() && same.ok()) << windowed.status().message();
    if (architecture == std::string("olmo2")) {
      EXPECT_EQ(windowed->window_rope.inverse_frequency, (std::vector<double>{1, 0.01}));
      EXPECT_EQ(windowed->window_rope.attention_factor, 1);
      continue;
    }
    EXPECT_EQ(windowed->window_rope.inverse_frequency, full->rope.inverse_frequency);
    EXPECT_EQ(windowed->window_rope.attention_factor, full->rope.attention_factor);
    EXPECT_EQ(windowed->rope.inverse_frequency, same->rope.inverse_frequency);
    EXPECT_NE(windowed->rope.inverse_frequency, full->rope.inverse_frequency);
    EXPECT_TRUE(same->window_rope.inverse_frequency.empty());
    expect_refused(w.set(rope + "freq_base_swa", 1.0f), Code::kFormat, "freq_base_swa' is 1");
  }
}

TEST(Rope, TakesAFactorOf0ForNone) {
  for (const char* key : {"llama.rope.scaling.factor", "llama.rope.scale_linear"}) {
    const Lent m(tiny_model("llama").set(key, 0.0f));
    ASSERT_TRUE(m.ok()) << m.status().message();
    EXPECT_EQ(m->rope.inverse_frequency, (std::vector<double>{1, 0.01}));
  }
}

TEST(Rope, DividesByLlama3Factors) {
  GgufWriter w = wide_heads("llama");
  std::vector<float> divisors(32);
  for (size_t i = 0; i < 32; ++i) divisors[i] = 1 + static_cast<float>(i) / 4;
  const Lent m(w.tensor("rope_freqs.weight", {32}, divisors));
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(m->rope.inverse_frequency[0], 1.0);
  expect_close(m->rope.inverse_frequency[16], 0.01 / 5);
  expect_close(m->rope.inverse_frequency[31], std::pow(10000.0, -31.0 / 32) / 8.75);
  EXPECT_TRUE(m->rope.inverse_frequency_short.empty());
}

TEST(Rope, ChoosesLongOrShortFactorsByTheContextOfTheSession) {
  GgufWriter w = wide_heads("phi3");
  w.set("phi3.rope.scaling.original_context_length", 256u);
  w.tensor("rope_factors_long.weight", {32}, std::vector<float>(32, 8.0f));
  w.tensor("rope_factors_short.weight", {32}, std::vector<float>(32, 2.0f));
  const Lent m(w);
  ASSERT_TRUE(m.ok()) << m.status().message();
  expect_close(m->rope.inverse_frequency[16], 0.01 / 8);
  expect_close(m->rope.inverse_frequency_short[16], 0.01 / 2);
  EXPECT_EQ(m->rope.original_context, 256u);
  // sqrt(1 + ln(2048 / 256) / ln 256) = sqrt(1 + 3/8), because 8 and 256 are powers of two.
  expect_close(m->rope.attention_factor, 1.1726039399558574);

  for (const auto& [context, divisor] : {std::pair<uint32_t, double>{256, 2}, {257, 8}, {2048, 8}}) {
    std::vector<float> table(rope_table_rows(2) * 32 * 2);
    fill_rope_table(m->rope, 2, context, table.data());
    const float angle = std::atan2(table[(32 + 16) * 2 + 1], table[(32 + 16) * 2]);  // row 1, pair 16
    EXPECT_NEAR(angle, 0.01 / divisor, 1e-8) << "context " << context;  // floats near 0.01 are 1e-9 apart
  }

  const Lent given(w.set("phi3.rope.scaling.attn_factor", 1.19f).set("phi3.rope.scaling.type", "longrope"));
  ASSERT_TRUE(given.ok());
  EXPECT_EQ(given->rope.attention_factor, double{1.19f});

  expect_refused(w.erase_tensor("rope_factors_short.weight"), Code::kFormat,
                 "lacks the tensor 'rope_factors_short");
  expect_refused(w.erase_tensor("rope_factors_long.weight"), Code::kFormat,
                 "lacks the tensor 'rope_factors_long");
}

TEST(Rope, RefusesWhatHasNoMeaning) {
  const std::string a = "llama.rope.";
  expect_refused(tiny_model("llama").set(a + "freq_base", 0.0f), Code::kFormat,
                 "'llama.rope.freq_base' is 0");
  expect_refused(tiny_model("llama").set(a + "freq_base", 1.0f), Code::kFormat,
                 "'llama.rope.freq_base' is 1");
  expect_refused(tiny_model("llama").set(a + "freq_base", INFINITY), Code::kFormat,
                 "'llama.rope.freq_base' is inf");
  expect_refused(tiny_model("llama").set(a + "dimension_count", 3u), Code::kFormat, "is 3, which is odd");
  expect_refused(tiny_model("llama").set(a + "dimension_count", 6u), Code::kFormat, "dimension_count' is 6");
  expect_refused(tiny_model("llama").set(a + "scaling.type", "su"), Code::kUnsupported, "type' is 'su'");
  expect_refused(tiny_model("llama").set(a + "scaling.factor", -1.0f), Code::kFormat, "factor' is -1");
  GgufWriter w = tiny_model("llama");
  expect_refused(w.tensor("rope_freqs.weight", {2}, std::vector<float>{1, 0}), Code::kFormat,
                 "element 1 of tensor 'rope_freqs.weight' is 0 instead of a positive number");
  expect_refused(w.tensor("rope_freqs.weight", {4}, std::vector<float>{1, 1, 1, 1}), Code::kFormat,
                 "tensor 'rope_freqs.weight' is 4, where 2 is expected");
}

TEST(Rope, FillsATableWhoseRowsMultiplyToEveryPosition) {
  RopeScheme rope;
  rope.n_rot = 4;
  rope.inverse_frequency = {1.0, 0.013};
  rope.attention_factor = 1.19;
  const uint32_t positions = 131072;
  ASSERT_EQ(rope_table_rows(positions), 64u + 2048);
  EXPECT_EQ(rope_table_rows(0), 64u);
  EXPECT_EQ(rope_table_rows(1), 65u);
  EXPECT_EQ(rope_table_rows(64), 65u);
  EXPECT_EQ(rope_table_rows(65), 66u);
  std::vector<float> table(rope_table_rows(positions) * 2 * 2);
  fill_rope_table(rope, positions, positions, table.data());
  const auto at = [&](uint32_t row, uint32_t pair) {
    return std::complex<double>(table[(row * 2 + pair) * 2], table[(row * 2 + pair) * 2 + 1]);
  };
  // Each of the four factors is rounded to float once, by at most 2^-25 for 1 and 2^-24 for 1.19 (which is in
  // [1, 2)). So a sum of two products is off by less than 2 * (1.19 * 2^-25 + 2^-24) < 2^-22.
  for (uint32_t position = 0; position < positions; position += 97)
    for (uint32_t pair = 0; pair < 2; ++pair) {
      const std::complex<double> expected = std::polar(1.19, position * rope.inverse_frequency[pair]);
      const std::complex<double> actual = at(64 + position / 64, pair) * at(position % 64, pair);
      ASSERT_NEAR(actual.real(), expected.real(), 0x1p-22) << "position " << position;
      ASSERT_NEAR(actual.imag(), expected.imag(), 0x1p-22) << "position " << position;
    }
  EXPECT_EQ(at(0, 0), std::complex<double>(1, 0));  // the first rows do not include the attention factor
  EXPECT_EQ(at(64, 0), std::complex<double>(1.19f, 0));
}

// ---- retainers (of every kind: retainer_test) ----

Result<std::shared_ptr<const Retainer>> open_heads(const Model& model, const FileBytes& bytes) {
  return model.open_retainer(lend(bytes), "h.gguf");
}

TEST(Heads, OfEachKindHaveTheirPlaceInTheFile) {
  const Lent m(tiny_model("qwen2"));
  ASSERT_TRUE(m.ok());
  GgufWriter w = tiny_heads("qwen2");
  const FileBytes bytes = w.set("locret.base.fingerprint", m->fingerprint()).bytes();
  const auto heads = open_heads(*m, bytes);
  ASSERT_TRUE(heads.ok()) << heads.status().message();
  EXPECT_EQ((*heads)->layers.size(), 2u);
  EXPECT_EQ((*heads)->layers[1].fc1.rows, 3u);
  EXPECT_EQ((*heads)->layers[1].fc1.cols, 16u);
  EXPECT_EQ((*heads)->layers[1].fc2.rows, 1u);
  EXPECT_EQ((*heads)->hidden, 3u);
  EXPECT_EQ((*heads)->act, kActSilu);
  EXPECT_EQ((*heads)->budget, 16u);
  EXPECT_EQ((*heads)->stabilizers, 0u);
  EXPECT_EQ((*heads)->chunk, 0u);
  EXPECT_EQ((*heads)->warning, "");
}

TEST(Heads, WithoutAFingerprintAreReadWithAWarning) {
  const Lent m(tiny_model("llama"));
  ASSERT_TRUE(m.ok());
  const FileBytes bytes = tiny_heads("llama").bytes();
  const auto heads = open_heads(*m, bytes);
  ASSERT_TRUE(heads.ok()) << heads.status().message();
  EXPECT_NE((*heads)->warning.find("h.gguf has no fingerprint of its model"), std::string::npos);
}

TEST(Heads, OfAnotherModelAreRefused) {
  const Lent m(tiny_model("llama"));
  ASSERT_TRUE(m.ok());
  const auto refused = [&](const GgufWriter& w) { return open_heads(*m, w.bytes()).status(); };
  expect_message(refused(tiny_heads("qwen2")), Code::kMismatch,
                 "for the architecture 'qwen2', and the model is of architecture 'llama'");
  for (const char* key : {"block_count", "head_count", "head_count_kv", "key_length"}) {
    const std::string full = std::string("locret.base.") + key;
    expect_message(refused(tiny_heads("llama").set(full, 77u)), Code::kMismatch,
                   "key '" + full + "' is 77, and the model has");
    expect_message(refused(tiny_heads("llama").erase(full)), Code::kFormat, "lacks the key '" + full + "'");
  }
  expect_message(refused(tiny_heads("llama").set("locret.base.fingerprint", m->fingerprint() + 1)),
                 Code::kMismatch, "another model of the same shape: the fingerprint is ");
}

TEST(Heads, ThatAreDamagedAreRefused) {
  const Lent m(tiny_model("llama"));
  ASSERT_TRUE(m.ok());
  const auto refused = [&](const GgufWriter& w) { return open_heads(*m, w.bytes()).status(); };
  expect_message(refused(tiny_model("llama")), Code::kFormat, "h.gguf holds no retainer");
  expect_message(refused(tiny_heads("llama").set("adapter.type", "lora")), Code::kFormat,
                 "'adapter.type' is 'lora'");
  expect_message(refused(tiny_heads("llama").set("locret.act", "relu")), Code::kUnsupported,
                 "'locret.act' is 'relu'");
  expect_message(refused(tiny_heads("llama").erase("locret.d_r")), Code::kFormat,
                 "lacks the key 'locret.d_r'");
  expect_message(refused(tiny_heads("llama").set("locret.d_r", 4u)), Code::kFormat,
                 "tensor 'blk.0.locret_fc1.weight' is 16 x 3, where 16 x 4 is expected");
  expect_message(refused(tiny_heads("llama").set("locret.chunk", uint64_t{1} << 32)), Code::kFormat,
                 "'locret.chunk'");
  expect_message(refused(tiny_heads("llama").erase_tensor("blk.1.locret_fc2.weight")), Code::kFormat,
                 "lacks the tensor 'blk.1.locret_fc2.weight'");
}

TEST(Heads, MayDivideThePools) {
  const Lent m(tiny_model("llama"));  // the model has two KV heads in all layers
  const auto open = [&](std::vector<float> shares) {
    const FileBytes bytes = tiny_heads("llama").set("retainer.budget", shares).bytes();
    auto heads = open_heads(*m, bytes);
    return heads.ok() ? Result<std::vector<float>>((*heads)->shares) : heads.status();
  };
  EXPECT_EQ(*open({1, 3}), (std::vector<float>{0.5f, 1.5f}));  // 1 on average
  expect_message(open({1}).status(), Code::kMismatch, "'retainer.budget' has 1 shares");
  expect_message(open({1, 2, 3}).status(), Code::kMismatch, "the model has 2 KV heads");
  for (const float bad :
       {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    expect_message(open({1, bad}).status(), Code::kFormat, "where more than 0 is possible");
}

TEST(Heads, NeedAModelWithWeights) {
  GgufWriter w;
  w.set("general.architecture", "llama");
  const Lent m(add_vocabulary(w, 6));
  ASSERT_TRUE(m.ok()) << m.status().message();
  const FileBytes bytes = tiny_heads("llama").bytes();
  expect_message(open_heads(*m, bytes).status(), Code::kInvalidArgument, "the model has no weights");
}

TEST(Model, HasAFingerprintOfShapeAndNormsOnly) {
  GgufWriter w = tiny_model("llama");
  const uint64_t before = Lent(w)->fingerprint();
  w.tensor("blk.0.attn_q.weight", {8, 8}, 1, FileBytes(128));  // another quantisation
  w.set("general.name", "other");
  EXPECT_EQ(Lent(w)->fingerprint(), before);
  w.tensor("blk.1.ffn_norm.weight", {8}, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_NE(Lent(w)->fingerprint(), before);
}

// ---- whole files ----

Opened open_path(const std::string& path) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file.ok()) return file.status();
  return Model::open(std::move(*file), path);
}

TEST(Model, OpensTheDemoModelAndItsHeads) {
  const Opened m = open_path(project_file("models/thimble-demo-28m-q8_0.gguf"));
  ASSERT_TRUE(m.ok()) << m.status().message();
  const Model& model = **m;
  EXPECT_EQ(model.info.architecture, "llama");
  EXPECT_EQ(model.shape.layers, 8u);
  EXPECT_EQ(model.shape.heads, 8u);
  EXPECT_EQ(model.shape.kv_heads, 2u);
  EXPECT_EQ(model.shape.head_dim, 64u);
  EXPECT_EQ(model.info.quantization, "q8_0");
  EXPECT_EQ(model.info.file_bytes,
            std::filesystem::file_size(project_file("models/thimble-demo-28m-q8_0.gguf")));
  EXPECT_NEAR(static_cast<double>(model.info.parameters), 28e6, 2e6);  // as its name says
  EXPECT_TRUE(model.warnings.empty());
  EXPECT_GT(model.host_bytes(), model.gguf().host_bytes());

  Result<MappedFile> file = MappedFile::open(project_file("models/thimble-demo-28m.locret.gguf"));
  ASSERT_TRUE(file.ok());
  const Result<Gguf> sidecar = Gguf::parse(*file, "heads");
  ASSERT_TRUE(sidecar.ok());
  EXPECT_EQ(*sidecar->need_uint("locret.base.fingerprint"), model.fingerprint());
  const auto heads = model.open_retainer(std::move(*file), "heads");
  ASSERT_TRUE(heads.ok()) << heads.status().message();
  EXPECT_EQ((*heads)->hidden, 256u);
  EXPECT_EQ((*heads)->layers.size(), 8u);
  EXPECT_EQ((*heads)->budget, 2048u);
  EXPECT_EQ((*heads)->chunk, 1024u);
  EXPECT_EQ((*heads)->stabilizers, 512u);
  EXPECT_EQ((*heads)->local, 100u);
  EXPECT_EQ((*heads)->warning, "");
}

// A tiny model that a script wrote; the script computed the retainer's fingerprint itself.
void expect_synthetic(const std::string& path, const std::string& heads_path) {
  const Opened m = open_path(path);
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ((*m)->shape.layers, 2u);
  EXPECT_EQ((*m)->shape.vocab, 512u);
  EXPECT_TRUE((*m)->tokenizer.ok()) << (*m)->description_of_tokenizer_error;
  Result<MappedFile> file = MappedFile::open(heads_path);
  ASSERT_TRUE(file.ok());
  const auto heads = (*m)->open_retainer(std::move(*file), "heads");
  ASSERT_TRUE(heads.ok()) << heads.status().message();
  EXPECT_EQ((*heads)->warning, "");
}

// A separate folder for a test's files.
struct Folder {
  const std::filesystem::path path;
  explicit Folder(const char* name) : path(std::filesystem::path(testing::TempDir()) / name) {
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const char* name) const { return (path / name).string(); }
};

TEST(Model, OpensWhatTheProjectsScriptWrites) {
  THIMBLE_NEEDS("/usr/bin/python3");
  const Folder folder("thimble_random_model_test");
  const std::string model = folder.file("model.gguf"), heads = folder.file("heads.gguf");
  const std::string run = "/usr/bin/python3 '" + project_file("scripts/random-model") + "' tiny-llama '" +
                          model + "' '" + heads + "' > '" + folder.file("log") + "'";
  ASSERT_EQ(std::system(run.c_str()), 0) << run;
  expect_synthetic(model, heads);
}

TEST(Model, OpensSyntheticFilesOfWellKnownShapes) {
  const std::string tool = shared_file("tools/synth_gguf.py");
  THIMBLE_NEEDS(tool);
  const Folder folder("thimble_model_test");
  const std::string model = folder.file("model.gguf"), heads = folder.file("heads.gguf");
  for (const char* what : {"tiny-llama f16", "tiny-llama q4_k", "tiny-qwen2 q8_0", "tiny-phi3 q4_0",
                           "--rope llama3 tiny-llama f16", "--rope longrope tiny-phi3 f16"}) {
    SCOPED_TRACE(what);
    const std::string run = "/usr/bin/python3 '" + tool + "' --heads '" + heads + "' --d-r 32 " + what +
                            " '" + model + "' > '" + folder.file("log") + "'";
    ASSERT_EQ(std::system(run.c_str()), 0) << run;
    expect_synthetic(model, heads);
  }
}

TEST(Model, SurvivesEveryByteOfTheHeaderReplaced) {
  GgufWriter w = tiny_model("phi3");
  w.set("phi3.rope.scaling.original_context_length", 32u);
  w.tensor("rope_factors_long.weight", {2}, std::vector<float>{1, 2});
  w.tensor("rope_factors_short.weight", {2}, std::vector<float>{1, 2});
  const Lent m(tiny_model("phi3"));
  ASSERT_TRUE(m.ok());
  const FileBytes good = w.bytes(), good_heads = tiny_heads("phi3").bytes();
  size_t accepted = 0;
  for (const uint8_t replaced : {0x00, 0x01, 0x40, 0xff}) {
    for (size_t at = 0; at < good.size() / 2; ++at) {
      FileBytes bytes = good;
      bytes[at] = std::byte{replaced};
      const Opened opened = Model::open(lend(bytes), "m.gguf");
      accepted += opened.ok();
      ASSERT_EQ(opened.ok(), opened.status().message().empty());
    }
    for (size_t at = 0; at < good_heads.size(); ++at) {
      FileBytes bytes = good_heads;
      bytes[at] = std::byte{replaced};
      const auto heads = open_heads(*m, bytes);
      accepted += heads.ok();
      ASSERT_EQ(heads.ok(), heads.status().message().empty());
    }
  }
  EXPECT_GT(accepted, 0u);
}

}  // namespace
}  // namespace thimble
