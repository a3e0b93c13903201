// The smallest models that have every part, about 3 KB: for tests of reading files, not of computing.
#pragma once

#include <string>

#include "tests/support/gguf_writer.h"

namespace thimble {

// Two layers, width 8, two query heads on one KV head of 4 channels, 12 wide inside, 6 tokens; architecture
// "llama", "qwen2", "qwen3" or "phi3". All weights f32, numbered on from tensor to tensor so that parts can
// be told apart.
inline GgufWriter tiny_model(const std::string& architecture) {
  GgufWriter w;
  float next = 0;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    std::vector<float> values(shape[0] * (shape.size() > 1 ? shape[1] : 1));
    for (float& v : values) v = next++;
    w.tensor(name, std::move(shape), values);
  };
  const std::string a = architecture + ".";
  w.set("general.architecture", architecture).set("general.name", "tiny");
  w.set(a + "context_length", 64u).set(a + "block_count", 2u).set(a + "embedding_length", 8u);
  w.set(a + "feed_forward_length", 12u)
      .set(a + "attention.head_count", 2u)
      .set(a + "attention.head_count_kv", 1u);
  w.set(a + "attention.layer_norm_rms_epsilon", 1e-5f);
  add("token_embd.weight", {8, 6});
  add("output_norm.weight", {8});
  add("output.weight", {8, 6});
  for (const std::string block : {"blk.0.", "blk.1."}) {
    add(block + "attn_norm.weight", {8});
    add(block + "ffn_norm.weight", {8});
    if (architecture == "phi3") {
      add(block + "attn_qkv.weight", {8, 16});
      add(block + "ffn_up.weight", {8, 24});
    } else {
      add(block + "attn_q.weight", {8, 8});
      add(block + "attn_k.weight", {8, 4});
      add(block + "attn_v.weight", {8, 4});
      add(block + "ffn_gate.weight", {8, 12});
      add(block + "ffn_up.weight", {8, 12});
    }
    if (architecture == "qwen2") {
      add(block + "attn_q.bias", {8});
      add(block + "attn_k.bias", {4});
      add(block + "attn_v.bias", {4});
    }
    if (architecture == "qwen3") {
      add(block + "attn_q_norm.weight", {4});
      add(block + "attn_k_norm.weight", {4});
    }
    add(block + "attn_output.weight", {8, 8});
    add(block + "ffn_down.weight", {12, 8});
  }
  return w;
}

// Retaining heads for a tiny model, 3 wide, without a fingerprint.
inline GgufWriter tiny_heads(const std::string& architecture) {
  GgufWriter w;
  w.set("general.architecture", architecture).set("general.type", "adapter").set("adapter.type", "locret");
  w.set("locret.d_r", 3u).set("locret.act", "silu").set("locret.budget", 16u).set("locret.stabilizers", 0u);
  w.set("locret.base.block_count", 2u).set("locret.base.head_count", 2u).set("locret.base.head_count_kv", 1u);
  w.set("locret.base.key_length", 4u);
  for (const std::string block : {"blk.0.", "blk.1."}) {
    w.tensor(block + "locret_fc1.weight", {16, 3}, std::vector<float>(48, 0.5f));
    w.tensor(block + "locret_fc2.weight", {3, 1}, std::vector<float>(3, 0.5f));
  }
  return w;
}

}  // namespace thimble
