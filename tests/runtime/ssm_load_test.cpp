// Tests how models with Mamba-2 are loaded: what each layer consists of, and which sizes are refused.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "runtime/model/model.h"
#include "tests/support/tiny_model.h"

namespace thimble {
namespace {

constexpr uint32_t kModel = 8, kInner = 32, kState = 16, kHeads = 2, kTaps = 4, kWide = 12;
constexpr uint32_t kChannels = kInner + 2 * kState;

struct Parts {
  bool mamba, attention, feed_forward;
};

// A layer of each of these parts.
GgufWriter tiny(const std::string& architecture, const std::vector<Parts>& layers) {
  GgufWriter w;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    w.tensor(name, shape,
             std::vector<float>(std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>())));
  };
  const std::string a = architecture + ".";
  w.set("general.architecture", architecture);
  for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                   {"block_count", static_cast<uint32_t>(layers.size())},
                                   {"embedding_length", kModel},
                                   {"attention.head_count", 2u},
                                   {"ssm.conv_kernel", kTaps},
                                   {"ssm.state_size", kState},
                                   {"ssm.group_count", 1u},
                                   {"ssm.time_step_rank", kHeads},
                                   {"ssm.inner_size", kInner}})
    w.set(a + key, value);
  const bool single = architecture == "nemotron_h";
  w.set(a + (single ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"), 1e-6f);
  add("token_embd.weight", {kModel, 6});
  add("output_norm.weight", {kModel});
  std::vector<int32_t> kv_heads, widths;
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string b = "blk." + std::to_string(i) + ".";
    kv_heads.push_back(layers[i].attention ? 1 : 0);
    widths.push_back(layers[i].feed_forward ? kWide : 0);
    add(b + "attn_norm.weight", {kModel});
    if (layers[i].mamba) {
      add(b + "ssm_in.weight", {kModel, kInner + kChannels + kHeads});
      add(b + "ssm_conv1d.weight", {kTaps, kChannels});
      add(b + "ssm_dt.bias", {kHeads});
      add(b + "ssm_a", {1, kHeads});
      add(b + "ssm_d", {1, kHeads});
      add(b + "ssm_out.weight", {kInner, kModel});
      if (single) add(b + "ssm_norm.weight", {kInner, 1});
    }
    if (layers[i].attention) {
      add(b + "attn_q.weight", {kModel, 8});
      add(b + "attn_k.weight", {kModel, 4});
      add(b + "attn_v.weight", {kModel, 4});
      add(b + "attn_output.weight", {8, kModel});
      add(b + "attn_output.bias", {kModel});
    }
    if (layers[i].feed_forward) {
      if (!single) add(b + "ffn_gate.weight", {kModel, kWide});
      if (!single) add(b + "ffn_norm", {kModel});  // so named, without a suffix
      add(b + "ffn_up.weight", {kModel, kWide});
      add(b + "ffn_down.weight", {kWide, kModel});
    }
  }
  w.set(a + "attention.head_count_kv", kv_heads).set(a + "feed_forward_length", widths);
  return w;
}

Result<std::shared_ptr<const Model>> opened(const GgufWriter& w) {
  static std::vector<FileBytes> kept;  // the model reads them
  kept.push_back(w.bytes());
  return Model::open(lend(kept.back()), "m.gguf");
}

TEST(SsmLoad, FalconHasTwoMixersInALayer) {
  const auto model = opened(tiny("falcon-h1", {{true, true, true}}));
  ASSERT_TRUE(model.ok()) << model.status().message();
  const Layer& layer = (*model)->layers.at(0);
  ASSERT_EQ(layer.mixers.size(), 2u);
  EXPECT_FALSE(layer.attention()->output_bias);
  const auto& ssm = std::get<SsmMixer>(layer.mixers[1]);
  EXPECT_FALSE(ssm.norm);
  EXPECT_FALSE(ssm.conv_bias);
  EXPECT_EQ(ssm.first_cols(), 2 * kInner + 2 * kState + kHeads);
  EXPECT_EQ(layer.state_bytes(), (kInner * kState + (kTaps - 1) * kChannels) * sizeof(float));
  EXPECT_TRUE(layer.ffn_norm);
}

TEST(SsmLoad, LayersOfNemotronHaveASinglePart) {
  const auto model =
      opened(tiny("nemotron_h", {{true, false, false}, {false, false, true}, {false, true, false}}));
  ASSERT_TRUE(model.ok()) << model.status().message();
  const std::vector<Layer>& layers = (*model)->layers;
  ASSERT_EQ(layers[0].mixers.size(), 1u);
  EXPECT_TRUE(std::get<SsmMixer>(layers[0].mixers[0]).norm);
  EXPECT_FALSE(std::get<Dense>(layers[0].feed_forward).down);
  EXPECT_TRUE(layers[1].mixers.empty());
  EXPECT_FALSE(layers[1].norm);
  EXPECT_TRUE(layers[1].ffn_norm);
  EXPECT_FALSE(std::get<Dense>(layers[1].feed_forward).gate);
  ASSERT_TRUE(layers[2].attention());
  EXPECT_FALSE(layers[2].attention()->rotates);
  EXPECT_TRUE(layers[2].attention()->output_bias);
}

// As llama.cpp does. Files that lack the first key are taken too.
TEST(SsmLoad, NemotronHHasTheEpsilonOfRmsNorms) {
  GgufWriter w = tiny("nemotron_h", {{true, false, false}, {false, false, true}, {false, true, false}});
  EXPECT_FLOAT_EQ((*opened(w))->norm_epsilon, 1e-6f);
  w.set("nemotron_h.attention.layer_norm_rms_epsilon", 1e-3f);
  EXPECT_FLOAT_EQ((*opened(w))->norm_epsilon, 1e-3f);
}

TEST(SsmLoad, RefusesSizesThatItCannotCompute) {
  const struct {
    const char* key;
    uint32_t value;
    Code code;
    const char* message;
  } cases[] = {
      {"ssm.group_count", 3, Code::kFormat, "m.gguf: 2 Mamba heads cannot share 3 groups evenly"},
      {"ssm.inner_size", 33, Code::kFormat, "'falcon-h1.ssm.inner_size' is 33, which 2 heads cannot share"},
      {"ssm.inner_size", 48, Code::kUnsupported, "Mamba heads of 24 channels are not supported"},
      {"ssm.inner_size", 544, Code::kUnsupported, "Mamba heads of 272 channels are not supported"},
      {"ssm.state_size", 272, Code::kUnsupported, "'falcon-h1.ssm.state_size' is 272, and only"},
      {"ssm.conv_kernel", 9, Code::kUnsupported, "'falcon-h1.ssm.conv_kernel' is 9, and only 2 to 8"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.message);
    GgufWriter w = tiny("falcon-h1", {{true, true, true}});
    w.set(std::string("falcon-h1.") + c.key, c.value);
    const auto model = opened(w);
    ASSERT_FALSE(model.ok());
    EXPECT_EQ(model.status().code(), c.code);
    EXPECT_NE(model.status().message().find(c.message), std::string::npos) << model.status().message();
  }
}

}  // namespace
}  // namespace thimble
