// Tests how models with linear attention are loaded: which layers have it, and the order of their rows.
#include <gtest/gtest.h>

#include <numeric>

#include "runtime/model/model.h"
#include "tests/support/tiny_model.h"

namespace thimble {
namespace {

constexpr uint32_t kModel = 8, kKeys = 2, kValues = 4, kWidth = 32, kTaps = 4;
constexpr uint32_t kChannels = (2 * kKeys + kValues) * kWidth, kValueCols = kValues * kWidth;

// Two layers: linear attention, and attention. Row r of a matrix has the numbers r, r + 1/8, ...
GgufWriter tiny(const std::string& architecture, bool mixed_inputs = false) {
  GgufWriter w;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    std::vector<float> values(std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) / kModel;
    w.tensor(name, std::move(shape), values);
  };
  const std::string a = architecture + ".";
  w.set("general.architecture", architecture);
  for (const auto& [key, value] : {std::pair{"context_length", 64u},
                                   {"block_count", 2u},
                                   {"embedding_length", kModel},
                                   {"feed_forward_length", 12u},
                                   {"attention.head_count", 2u},
                                   {"attention.head_count_kv", 1u},
                                   {"attention.key_length", 16u},
                                   {"attention.value_length", 16u},
                                   {"rope.dimension_count", 8u},
                                   {"full_attention_interval", 2u},
                                   {"ssm.conv_kernel", kTaps},
                                   {"ssm.state_size", kWidth},
                                   {"ssm.group_count", kKeys},
                                   {"ssm.time_step_rank", kValues},
                                   {"ssm.inner_size", kValueCols}})
    w.set(a + key, value);
  w.set(a + "attention.layer_norm_rms_epsilon", 1e-6f);
  const bool is_next = architecture == "qwen3next";
  if (is_next)
    w.set(a + "expert_count", 2u)
        .set(a + "expert_used_count", 1u)
        .set(a + "expert_feed_forward_length", 12u)
        .set(a + "expert_shared_feed_forward_length", 4u);
  else
    w.set(a + "rope.dimension_sections", std::vector<int32_t>{2, 1, 1, 0});
  add("token_embd.weight", {kModel, 6});
  add("output_norm.weight", {kModel});
  for (const std::string b : {"blk.0.", "blk.1."}) {
    add(b + "attn_norm.weight", {kModel});
    if (b == "blk.0.") {
      if (mixed_inputs) {
        add(b + "ssm_in.weight", {kModel, kChannels + kValueCols});
      } else {
        add(b + "attn_qkv.weight", {kModel, kChannels});
        add(b + "attn_gate.weight", {kModel, kValueCols});
      }
      if (is_next) {
        add(b + "ssm_ba.weight", {kModel, 2 * kValues});
      } else {
        add(b + "ssm_beta.weight", {kModel, kValues});
        add(b + "ssm_alpha.weight", {kModel, kValues});
      }
      add(b + "ssm_conv1d.weight", {kTaps, kChannels});
      add(b + "ssm_a", {kValues});
      add(b + "ssm_dt.bias", {kValues});
      add(b + "ssm_norm.weight", {kWidth});
      add(b + "ssm_out.weight", {kValueCols, kModel});
    } else {
      add(b + "attn_q.weight", {kModel, 2 * 2 * 16});
      add(b + "attn_k.weight", {kModel, 16});
      add(b + "attn_v.weight", {kModel, 16});
      add(b + "attn_q_norm.weight", {16});
      add(b + "attn_k_norm.weight", {16});
      add(b + "attn_output.weight", {2 * 16, kModel});
    }
    add(b + "post_attention_norm.weight", {kModel});
    if (is_next) {
      add(b + "ffn_gate_inp.weight", {kModel, 2});
      add(b + "ffn_gate_exps.weight", {kModel, 12, 2});
      add(b + "ffn_up_exps.weight", {kModel, 12, 2});
      add(b + "ffn_down_exps.weight", {12, kModel, 2});
      add(b + "ffn_gate_inp_shexp.weight", {kModel});
      add(b + "ffn_gate_shexp.weight", {kModel, 4});
      add(b + "ffn_up_shexp.weight", {kModel, 4});
      add(b + "ffn_down_shexp.weight", {4, kModel});
    } else {
      add(b + "ffn_gate.weight", {kModel, 12});
      add(b + "ffn_up.weight", {kModel, 12});
      add(b + "ffn_down.weight", {12, kModel});
    }
  }
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

// The row of the file's matrix from which each row comes.
std::vector<uint32_t> rows_of(const Tensor& t) {
  std::vector<uint32_t> rows;
  for (uint32_t i = 0; i < t.rows; ++i)
    rows.push_back(static_cast<uint32_t>(reinterpret_cast<const float*>(t.data)[size_t{i} * t.cols]));
  return rows;
}
std::vector<uint32_t> count_from(uint32_t first, uint32_t count) {
  std::vector<uint32_t> all(count);
  std::iota(all.begin(), all.end(), first);
  return all;
}
const DeltaNetMixer& mixer(const Model& m) { return std::get<DeltaNetMixer>(m.layers[0].mixers[0]); }

TEST(LinearAttention, HasSizesAndTensors) {
  for (const char* architecture : {"qwen35", "qwen3next"}) {
    SCOPED_TRACE(architecture);
    const Lent lent(tiny(architecture));
    ASSERT_TRUE(lent.opened.ok()) << lent.opened.status().message();
    const DeltaNetMixer& m = mixer(**lent.opened);
    EXPECT_EQ(m.key_heads, kKeys);
    EXPECT_EQ(m.value_heads, kValues);
    EXPECT_EQ(m.channels(), kChannels);
    EXPECT_EQ(m.taps(), kTaps);
    EXPECT_EQ(m.tiled, architecture == std::string("qwen35"));
    EXPECT_EQ(m.state_bytes(), 4 * (3 * kChannels + kValueCols * kWidth));
    EXPECT_EQ(rows_of(m.qkv), count_from(0, kChannels));
    const AttentionMixer& attention = *lent->layers[1].attention();
    EXPECT_TRUE(attention.output_gate);
    EXPECT_EQ(attention.q.rows, 2 * attention.q_cols());
    EXPECT_EQ(lent->rope.n_rot, 8u);
    EXPECT_EQ(lent->shape.kv_heads, 1u);
    EXPECT_EQ(lent->layer_of_run, std::vector<uint32_t>{1});
  }
  EXPECT_TRUE(std::get<Experts>(Lent(tiny("qwen3next"))->layers[0].feed_forward).shared_gate);
}

// Two key heads with two value heads each: betas and alphas of the first, then of the second.
TEST(LinearAttention, OfQwen3NextHasItsRowsByKeyHead) {
  const Lent fresh(tiny("qwen3next")), early(tiny("qwen3next", true));
  ASSERT_TRUE(fresh.opened.ok()) << fresh.opened.status().message();
  ASSERT_TRUE(early.opened.ok()) << early.opened.status().message();
  for (const Lent* lent : {&fresh, &early}) {
    EXPECT_EQ(rows_of(mixer(**lent->opened).beta), (std::vector<uint32_t>{0, 1, 4, 5}));
    EXPECT_EQ(rows_of(mixer(**lent->opened).alpha), (std::vector<uint32_t>{2, 3, 6, 7}));
  }
  const DeltaNetMixer& m = mixer(**early.opened);
  std::vector<uint32_t> qkv, z;
  for (const uint32_t part : {0u, 1u})  // queries, keys
    for (const uint32_t head : {0u, 1u}) {
      const auto rows = count_from((head * 6 + part) * kWidth, kWidth);
      qkv.insert(qkv.end(), rows.begin(), rows.end());
    }
  for (const uint32_t head : {0u, 1u}) {
    const auto values = count_from((head * 6 + 2) * kWidth, 2 * kWidth);
    const auto gates = count_from((head * 6 + 4) * kWidth, 2 * kWidth);
    qkv.insert(qkv.end(), values.begin(), values.end());
    z.insert(z.end(), gates.begin(), gates.end());
  }
  EXPECT_EQ(rows_of(m.qkv), qkv);
  EXPECT_EQ(rows_of(m.z), z);
  // Host memory holds the matrices in their new order, and is where a device finds them.
  // The early file has one tensor less, which the tables do not describe.
  EXPECT_GE(early->host_bytes() + 500, fresh->host_bytes() + 4 * kModel * (kChannels + kValueCols));
  bool found = false;
  for (const auto& bytes : early->memory())
    found = found || (m.z.data >= bytes.data() && m.z.data < bytes.data() + bytes.size());
  EXPECT_TRUE(found);
}

TEST(LinearAttention, IsInTheLayersThatTheFileNames) {
  GgufWriter w = tiny("qwen35");
  const auto flags = [&](const std::vector<uint8_t>& values) {
    FileBytes bytes;
    const uint32_t type = 7;  // bool
    const uint64_t count = values.size();
    const auto put = [&](const void* data, size_t n) {
      const auto* from = static_cast<const std::byte*>(data);
      bytes.insert(bytes.end(), from, from + n);
    };
    put(&type, sizeof type), put(&count, sizeof count), put(values.data(), values.size());
    w.set("qwen35.attention.recurrent_layers", GgufType::kArray, std::move(bytes));
    return w;
  };
  const Lent same(flags({1, 0}));
  ASSERT_TRUE(same.opened.ok()) << same.opened.status().message();
  EXPECT_TRUE(same->layers[1].attention());
  expect_refused(flags({0, 1}), Code::kFormat, "tensor 'blk.0.attn_qkv.weight' is 8 x 256, where 8 x 96");
  expect_refused(flags({1, 1}), Code::kUnsupported, "no layer has attention");
  expect_refused(flags({1, 0, 0}), Code::kFormat, "has 3 values for 2 layers");
}

TEST(LinearAttention, RefusesSizesThatItLacks) {
  const auto with = [](const char* key, uint32_t value) {
    return tiny("qwen35").set(std::string("qwen35.") + key, value);
  };
  expect_refused(with("ssm.conv_kernel", 9), Code::kUnsupported,
                 "'qwen35.ssm.conv_kernel' is 9, and only 2 to 8");
  expect_refused(with("ssm.conv_kernel", 1), Code::kUnsupported, "'qwen35.ssm.conv_kernel' is 1");
  expect_refused(with("ssm.inner_size", 100), Code::kFormat, "4 value heads of 32 channels have 128");
  expect_refused(with("ssm.group_count", 3), Code::kFormat, "4 value heads cannot share 3 key heads evenly");
  GgufWriter wide = with("ssm.state_size", 256);
  expect_refused(wide.set("qwen35.ssm.inner_size", 1024u), Code::kUnsupported,
                 "'qwen35.ssm.state_size' is 256");
  for (const std::vector<int32_t>& sections : {std::vector<int32_t>{1, 1, 1, 1}, {4, 0, 0, 0}, {0, 0, 0, 4}})
    expect_refused(tiny("qwen35").set("qwen35.rope.dimension_sections", sections), Code::kUnsupported,
                   "sections that do not rotate by text positions");
  expect_refused(tiny("qwen35").set("qwen35.rope.dimension_sections", std::vector<int32_t>{2, 1, 1}),
                 Code::kFormat, "does not hold four sections");
}

}  // namespace
}  // namespace thimble
