// The smallest models that have every part, about 3 KB, for tests of reading files and not of computing.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/gguf_writer.h"

namespace thimble {

// All supported architectures.
inline constexpr const char* kArchitectureNames[] = {
    "llama",   "mistral3", "qwen2",   "qwen3",      "qwen3moe", "phi3",      "gemma2",   "gemma3",
    "gpt-oss", "smollm3",  "granite", "granitemoe", "olmo2",    "seed_oss",  "ernie4_5", "ernie4_5-moe",
    "glm4",    "glm4moe",  "exaone4", "minicpm",    "cohere2",  "cohere2moe"};

// Two layers, width 8, two query heads for one KV head of 4 channels, feed-forward width 12, 6 tokens.
// `experts`: number of experts, two of which are used per token (families of experts have at least three).
// All weights are f32 and numbered across tensors, so that every part differs.
inline GgufWriter tiny_model(const std::string& architecture, uint32_t experts = 0) {
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), architecture) != names.end();
  };
  const bool own_width = is({"qwen3moe", "gpt-oss", "ernie4_5-moe", "glm4moe", "cohere2moe"});
  if (own_width || is({"granitemoe"})) experts = std::max(experts, 3u);
  const bool cohere = is({"cohere2", "cohere2moe"});
  GgufWriter w;
  float next = 0;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    std::vector<float> values(std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>()));
    for (float& v : values) v = next++;
    w.tensor(name, std::move(shape), values);
  };
  const std::string a = architecture + ".";
  w.set("general.architecture", architecture).set("general.name", "tiny");
  w.set(a + "context_length", 64u).set(a + "block_count", 2u).set(a + "embedding_length", 8u);
  w.set(a + "feed_forward_length", 12u)
      .set(a + "attention.head_count", 2u)
      .set(a + "attention.head_count_kv", 1u);
  w.set(a + (cohere ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"), 1e-5f);
  if (experts) w.set(a + "expert_count", experts).set(a + "expert_used_count", 2u);
  if (own_width) w.set(a + "expert_feed_forward_length", 12u);
  if (cohere || is({"gemma2", "gemma3", "gpt-oss", "olmo2"}))
    w.set(a + "attention.sliding_window", 16u).set(a + "attention.sliding_window_pattern", 2u);
  if (cohere || is({"minicpm"})) w.set(a + "logit_scale", 8.0f);
  if (is({"granite", "granitemoe"}))
    w.set(a + "embedding_scale", 12.0f)
        .set(a + "residual_scale", 0.25f)
        .set(a + "logit_scale", 8.0f)
        .set(a + "attention.scale", 0.125f);
  add("token_embd.weight", {8, 6});
  add("output_norm.weight", {8});
  add("output.weight", {8, 6});
  for (const std::string block : {"blk.0.", "blk.1."}) {
    if (!is({"olmo2", "exaone4"})) add(block + "attn_norm.weight", {8});
    if (!cohere && !is({"olmo2", "exaone4", "gpt-oss", "seed_oss", "glm4moe"}))
      add(block + "ffn_norm.weight", {8});
    if (is({"gemma2", "gemma3", "olmo2", "exaone4", "glm4", "gpt-oss", "seed_oss", "glm4moe"}))
      add(block + "post_attention_norm.weight", {8});
    if (is({"gemma2", "gemma3", "olmo2", "exaone4", "glm4"})) add(block + "post_ffw_norm.weight", {8});
    if (architecture == "phi3") {
      add(block + "attn_qkv.weight", {8, 16});
      add(block + "ffn_up.weight", {8, 24});
    } else {
      add(block + "attn_q.weight", {8, 8});
      add(block + "attn_k.weight", {8, 4});
      add(block + "attn_v.weight", {8, 4});
      if (is({"glm4"})) add(block + "ffn_up.weight", {8, 24});
      if (!experts && !is({"glm4"})) add(block + "ffn_gate.weight", {8, 12});
      if (!experts && !is({"glm4"})) add(block + "ffn_up.weight", {8, 12});
    }
    if (architecture == "qwen2") {
      add(block + "attn_q.bias", {8});
      add(block + "attn_k.bias", {4});
      add(block + "attn_v.bias", {4});
    }
    if (is({"qwen3", "qwen3moe", "gemma3", "exaone4", "olmo2"})) {  // those of olmo2 cover all heads together
      add(block + "attn_q_norm.weight", {is({"olmo2"}) ? 8u : 4u});
      add(block + "attn_k_norm.weight", {4});
    }
    if (experts) {
      add(block + "ffn_gate_inp.weight", {8, experts});
      if (is({"glm4moe"})) add(block + "exp_probs_b.bias", {experts});
      add(block + "ffn_gate_exps.weight", {8, 12, experts});
      add(block + "ffn_up_exps.weight", {8, 12, experts});
      add(block + "ffn_down_exps.weight", {12, 8, experts});
    }
    if (is({"gpt-oss"})) {
      add(block + "attn_sinks.weight", {2});
      add(block + "attn_output.bias", {8});
      add(block + "ffn_gate_inp.bias", {experts});
      add(block + "ffn_gate_exps.bias", {12, experts});
      add(block + "ffn_up_exps.bias", {12, experts});
      add(block + "ffn_down_exps.bias", {8, experts});
    }
    add(block + "attn_output.weight", {8, 8});
    if (!experts) add(block + "ffn_down.weight", {12, 8});
  }
  return w;
}

// A retainer of width 3 for a tiny model, without a fingerprint, like the first retainer files.
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

// A retainer of any kind for a tiny model: of width 3, or with 5 sinks and queries and keys of 4 channels.
inline GgufWriter tiny_retainer(const std::string& architecture, const std::string& kind) {
  GgufWriter w;
  w.set("general.architecture", architecture).set("general.type", "adapter");
  w.set("adapter.type", "retainer").set("retainer.kind", kind);
  w.set("retainer.input", kind == "locret" ? "qkv" : "x").set("retainer.act", "gelu_erf");
  w.set("retainer.hidden", 3u).set("retainer.rank", 4u).set("retainer.sinks", 5u);
  w.set("retainer.stabilizers", 7u).set("retainer.protect_init", 2u);
  w.set("retainer.base.block_count", 2u).set("retainer.base.head_count", 2u);
  w.set("retainer.base.head_count_kv", 1u).set("retainer.base.key_length", 4u);
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    const uint64_t elements = shape[0] * (shape.size() > 1 ? shape[1] : 1);
    w.tensor(name, std::move(shape), std::vector<float>(elements, 0.5f));
  };
  for (const std::string block : {"blk.0.retain", "blk.1.retain"}) {
    if (kind == "linear") {
      add(block + ".weight", {8, 1});
      add(block + ".bias", {1});
    } else if (kind == "sink") {
      add(block + "_q.weight", {8, 8});
      add(block + "_q.bias", {8});
      add(block + "_k.weight", {8, 4});
      add(block + "_q_norm.weight", {4});
      add(block + "_k_norm.weight", {4});
      add(block + "_kbase", {4, 5});
      add(block + "_b", {2});
    } else {
      add(block + "_fc1.weight", {kind == "locret" ? 16u : 8u, 3});
      add(block + "_fc2.weight", {3, 1});
      if (kind == "locret") continue;
      add(block + "_fc1.bias", {3});
      add(block + "_fc2.bias", {1});
    }
  }
  return w;
}

}  // namespace thimble
