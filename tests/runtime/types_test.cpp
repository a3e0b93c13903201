// Tests whole models of every tensor type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backends/cpu/kernels.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/random_blocks.h"
#include "tests/support/sessions.h"

namespace thimble::test {
namespace {

constexpr uint32_t kWidth = 256;  // the block size of the type with the largest blocks

// A model with one layer whose matrices and embedding have the given type, or are f32 with the same values.
// The output matrix stays f32, because it is multiplied with one row, for which other types may sum in
// another order.
GgufWriter model_of(DType type, bool as_floats) {
  Random random;
  GgufWriter w;
  w.set("general.architecture", "llama").set("llama.context_length", 256u).set("llama.block_count", 1u);
  w.set("llama.embedding_length", kWidth).set("llama.feed_forward_length", kWidth);
  w.set("llama.attention.head_count", 4u).set("llama.attention.head_count_kv", 2u);
  w.set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  const auto matrix = [&](const std::string& name, uint64_t rows) {
    const std::vector<std::byte> blocks = random_blocks(random, type, rows * kWidth);
    std::vector<float> floats(rows * kWidth);
    cpu::kernels().dequantize(type, blocks.data(), static_cast<uint32_t>(floats.size()), floats.data());
    FileBytes bytes;
    append(bytes, blocks.data(), blocks.size());
    if (as_floats)
      w.tensor(name, {kWidth, rows}, floats);
    else
      w.tensor(name, {kWidth, rows}, static_cast<uint32_t>(type), bytes);
  };
  matrix("token_embd.weight", 64);
  w.tensor("output.weight", {kWidth, 64}, random.floats(kWidth * 64));
  w.tensor("output_norm.weight", {kWidth}, random.floats(kWidth));
  for (const char* name : {"attn_norm", "ffn_norm"})
    w.tensor("blk.0." + std::string(name) + ".weight", {kWidth}, random.floats(kWidth));
  for (const char* name : {"attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
    matrix("blk.0." + std::string(name) + ".weight", kWidth);
  for (const char* name : {"attn_k", "attn_v"}) matrix("blk.0." + std::string(name) + ".weight", kWidth / 2);
  return w;
}

// The same for a layer of experts, or one without, whose matrices have scales in tensors of their own. As
// floats, the matrices are multiplied by them. All scales are powers of two, so that this changes no bit.
GgufWriter model_with_scales(bool experts, bool as_floats) {
  constexpr DType kType = DType::kNVFP4;
  const uint64_t count = experts ? 4 : 1;
  Random random;
  GgufWriter w = model_of(kType, as_floats);
  if (experts) w.set("llama.expert_count", 4u).set("llama.expert_used_count", 2u);
  const auto matrices = [&](const std::string& name, uint64_t rows, uint64_t n) {
    const std::vector<std::byte> blocks = random_blocks(random, kType, n * rows * kWidth);
    std::vector<float> floats(n * rows * kWidth), scales(n);
    cpu::kernels().dequantize(kType, blocks.data(), static_cast<uint32_t>(floats.size()), floats.data());
    for (float& scale : scales)
      scale = (random.below(2) ? 1.0f : -1.0f) * std::ldexp(1.0f, int(random.below(5)) - 2);
    for (size_t i = 0; i < floats.size(); ++i) floats[i] *= scales[i / (rows * kWidth)];
    FileBytes bytes;
    append(bytes, blocks.data(), blocks.size());
    const std::vector<uint64_t> shape = {kWidth, rows, n};
    const std::vector<uint64_t> of_one = {kWidth, rows};
    if (as_floats) {
      w.tensor(name + ".weight", n > 1 ? shape : of_one, floats);
      return;
    }
    w.tensor(name + ".weight", n > 1 ? shape : of_one, static_cast<uint32_t>(kType), bytes);
    w.tensor(name + ".scale", {n}, scales);
    w.tensor(name + ".input_scale", {n}, std::vector<float>(n, 3));  // not used
  };
  for (const char* name : {"blk.0.attn_q", "blk.0.attn_output"}) matrices(name, kWidth, 1);
  for (const char* name : {"blk.0.attn_k", "blk.0.attn_v"}) matrices(name, kWidth / 2, 1);
  for (const std::string name : {"blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"}) {
    if (experts) w.erase_tensor(name + ".weight");
    matrices(name + (experts ? "_exps" : ""), kWidth, count);
  }
  if (experts) w.tensor("blk.0.ffn_gate_inp.weight", {kWidth, count}, random.floats(kWidth * count));
  return w;
}

std::vector<float> logits_of(const GgufWriter& writer) {
  const FileBytes bytes = writer.bytes();
  const auto session = open_session(must(Model::open(lend(bytes), "m.gguf")), {.max_new = 1, .context = 64});
  std::vector<int32_t> tokens(40);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 13 % 64);
  return read(*session, tokens);
}

// The CPU multiplies many rows with weights converted to f32, in the same order for all types.
void expect_same(DType type) {
  const std::vector<float> packed = logits_of(model_of(type, false)),
                           floats = logits_of(model_of(type, true));
  EXPECT_EQ(packed, floats) << dtype_info(type).name;
  EXPECT_NE(packed[0], packed[1]) << dtype_info(type).name;
}

TEST(Types, AModelIsTheModelOfItsWeightsAsFloats) {
#define X(name, number, block, bytes) expect_same(DType::k##name);
  THIMBLE_DTYPES(X)
#undef X
}

TEST(Types, AModelWithScalesIsTheModelOfItsWeightsTimesTheirScales) {
  for (const bool experts : {false, true}) {
    const std::vector<float> scaled = logits_of(model_with_scales(experts, false));
    EXPECT_EQ(scaled, logits_of(model_with_scales(experts, true))) << "experts " << experts;
    EXPECT_NE(scaled[0], scaled[1]);
  }
}

}  // namespace
}  // namespace thimble::test
