// Small models with seeded random weights, and retainers for them, for tests of computing and not of reading
// files.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/model/model.h"
#include "tests/support/gguf_writer.h"

namespace thimble::test {

// Two layers that take microseconds per token. Queries and keys are large enough for attention to be peaked,
// so that a wrong position, list or mask shows in the logits.
struct Seeded {
  std::string architecture = "llama";
  uint32_t layers = 2, d_model = 32, heads = 4, kv_heads = 2, head_dim = 8, d_ff = 48, vocab = 64;
  uint32_t context_length = 4096;
  std::string kind = "";   // of the retainer; empty: locret, in the form of its first files
  std::string input = "";  // the retainer's input; empty: the kind's default
  std::string act = "silu";
  uint32_t d_retain = 16, rank = 16, sinks = 16;
  bool has_values = true;          // whether values have columns of their own in rows of kind qkv
  bool covers_windows = true;      // whether the retainer also has tensors for layers with a window
  std::vector<float> shares = {};  // shares of the pools, [layer][kv head]
  uint32_t window = 0;             // of every layer except each second one; 0: no layer has one
  uint64_t seed = 1;
  // May change the values of a tensor, identified by its name in the file: [rows][cols].
  std::function<void(const std::string& name, std::vector<float>& values)> edit = {};
  std::function<void(GgufWriter& model)> more = {};  // may add keys and tensors
};

// Queries that grow at each 32nd position. Those of Ministral 3 grow at larger intervals and by less.
inline Seeded growing(Seeded s = {}) {
  s.architecture = "mistral3";
  s.more = [](GgufWriter& w) {
    w.set("mistral3.attention.temperature_scale", 0.5f);
    w.set("mistral3.rope.scaling.original_context_length", 32u);
  };
  return s;
}

struct SeededModel {
  std::shared_ptr<const Model> model;
  std::shared_ptr<const Retainer> retainer;
  std::shared_ptr<const Retainer> controller;  // for kind adore
};

// f32 tensors that are the same on every system.
class SeededTensors {
 public:
  SeededTensors(uint64_t seed, std::function<void(const std::string&, std::vector<float>&)> edit)
      : random_(seed), edit_(std::move(edit)) {}

  void add(GgufWriter& to, const std::string& name, uint32_t rows, uint32_t cols, float mean,
           float deviation) {
    std::vector<float> values(uint64_t{rows} * cols);
    for (float& v : values) v = mean + deviation * normal();
    if (edit_) edit_(name, values);
    to.tensor(name, rows == 1 && mean != 0 ? std::vector<uint64_t>{cols} : std::vector<uint64_t>{cols, rows},
              values);
  }

 private:
  float normal() {  // the sum of four uniform numbers: close enough to normal, and the same on every system
    double sum = -2;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(random_() >> 11) * 0x1p-53;
    return static_cast<float>(sum * std::sqrt(3.0));
  }

  std::mt19937_64 random_;
  std::function<void(const std::string&, std::vector<float>&)> edit_;
};

// The keys of a retainer's file, and its tensors for a layer.
inline bool reads_qkv(const Seeded& s) {
  return s.input.empty() ? s.kind.empty() || s.kind == "locret" : s.input == "qkv";
}
inline void set_retainer_keys(const Seeded& s, GgufWriter& to) {
  const std::string type = s.kind.empty() ? "locret" : "retainer", keys = type + ".";
  to.set("general.architecture", s.architecture).set("general.type", "adapter").set("adapter.type", type);
  if (!s.kind.empty()) to.set("retainer.kind", s.kind).set("retainer.input", reads_qkv(s) ? "qkv" : "x");
  to.set(s.kind.empty() ? "locret.d_r" : "retainer.hidden", s.d_retain).set(keys + "act", s.act);
  if (s.kind == "sink") to.set("retainer.rank", s.rank).set("retainer.sinks", s.sinks);
  if (!s.shares.empty()) to.set("retainer.budget", s.shares);
  to.set(keys + "base.block_count", s.layers).set(keys + "base.head_count", s.heads);
  to.set(keys + "base.head_count_kv", s.kv_heads).set(keys + "base.key_length", s.head_dim);
}
inline void add_retainer_layer(const Seeded& s, uint32_t layer, SeededTensors& tensors, GgufWriter& to) {
  const uint32_t q_rows = s.heads * s.head_dim, kv_rows = s.kv_heads * s.head_dim;
  const std::string stem = "blk." + std::to_string(layer) + (s.kind.empty() ? ".locret" : ".retain");
  const uint32_t cols = reads_qkv(s) ? q_rows + (s.has_values ? 2 : 1) * kv_rows : s.d_model;
  const float gain = 1 / std::sqrt(static_cast<float>(cols));
  const auto part = [&](const char* name, uint32_t rows, uint32_t of, float mean, float deviation) {
    tensors.add(to, stem + name, rows, of, mean, deviation);
  };
  const auto vector = [&](const char* name, uint32_t size) { part(name, 1, size, 0.25f, 1); };
  if (s.kind == "linear") {
    part(".weight", s.kv_heads, cols, 0, gain);
    vector(".bias", s.kv_heads);
  } else if (s.kind == "sink") {
    part("_q.weight", s.heads * s.rank, cols, 0, gain);
    vector("_q.bias", s.heads * s.rank);
    part("_k.weight", s.kv_heads * s.rank, cols, 0, gain);
    vector("_q_norm.weight", s.rank);
    vector("_k_norm.weight", s.rank);
    part("_kbase", s.kv_heads * s.sinks, s.rank, 0, 1);
    vector("_b", s.heads);
  } else {
    part("_fc1.weight", s.d_retain, cols, 0, gain);
    part("_fc2.weight", s.kv_heads, s.d_retain, 0, 1);
    if (s.kind != "mlp") return;
    vector("_fc1.bias", s.d_retain);
    vector("_fc2.bias", s.kv_heads);
  }
}

// A file of kind adore.
inline GgufWriter seeded_controller(const Seeded& s, SeededTensors& tensors) {
  constexpr uint32_t kWidth = 16;
  GgufWriter control;
  control.set("general.architecture", s.architecture)
      .set("general.type", "adapter")
      .set("adapter.type", "adore")
      .set("adore.width", kWidth)
      .set("adore.pool", 48u)
      .set("adore.base.block_count", s.layers)
      .set("adore.base.head_count", s.heads)
      .set("adore.base.head_count_kv", s.kv_heads)
      .set("adore.base.key_length", s.head_dim);
  const struct {
    const char* name;
    uint32_t rows, cols;
  } parts[] = {{"gru.weight_ih", 3 * kWidth, s.d_model},
               {"gru.bias_ih", 1, 3 * kWidth},
               {"gru.weight_hh", 3 * kWidth, kWidth},
               {"gru.bias_hh", 1, 3 * kWidth},
               {"position.weight", 1, kWidth},
               {"position.bias", 1, kWidth},
               {"interaction.weight", kWidth, kWidth},
               {"interaction.bias", 1, kWidth},
               {"output.weight", 1, kWidth},
               {"output.bias", 1, 1}};
  for (const auto& [name, rows, cols] : parts)
    tensors.add(control, std::string("adore.") + name, rows, cols, 0,
                rows > 1 ? 1.5f / std::sqrt(float(cols)) : 0.7f);
  return control;
}

// All weights are f32. The model keeps the bytes of its file alive.
inline SeededModel seeded_model(const Seeded& s = {}) {
  SeededTensors tensors(s.seed, s.edit);
  GgufWriter file, sidecar;
  const auto add = [&](const std::string& name, uint32_t rows, uint32_t cols, float mean, float deviation) {
    tensors.add(file, name, rows, cols, mean, deviation);
  };
  const auto matrix = [&](const std::string& name, uint32_t rows, uint32_t cols, float gain) {
    add(name, rows, cols, 0, gain / std::sqrt(static_cast<float>(cols)));
  };
  const std::string a = s.architecture + ".";
  file.set("general.architecture", s.architecture).set(a + "context_length", s.context_length);
  file.set(a + "block_count", s.layers)
      .set(a + "embedding_length", s.d_model)
      .set(a + "feed_forward_length", s.d_ff);
  file.set(a + "attention.head_count", s.heads).set(a + "attention.head_count_kv", s.kv_heads);
  file.set(a + "attention.key_length", s.head_dim).set(a + "attention.value_length", s.head_dim);
  file.set(a + "attention.layer_norm_rms_epsilon", 1e-5f);
  if (s.window)
    file.set(a + "attention.sliding_window", s.window)
        .set(a + "attention.sliding_window_pattern", s.layers > 1 ? 2u : 0u);
  if (s.more) s.more(file);
  add("token_embd.weight", s.vocab, s.d_model, 0, 1);
  add("output_norm.weight", 1, s.d_model, 1, 0.1f);
  matrix("output.weight", s.vocab, s.d_model, 1.5f);
  const uint32_t q_rows = s.heads * s.head_dim, kv_rows = s.kv_heads * s.head_dim;
  for (uint32_t i = 0; i < s.layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    add(block + "attn_norm.weight", 1, s.d_model, 1, 0.1f);
    add(block + "ffn_norm.weight", 1, s.d_model, 1, 0.1f);
    matrix(block + "attn_q.weight", q_rows, s.d_model, 1.5f);
    matrix(block + "attn_k.weight", kv_rows, s.d_model, 1.5f);
    matrix(block + "attn_v.weight", kv_rows, s.d_model, 1);
    matrix(block + "attn_output.weight", s.d_model, q_rows, 1);
    matrix(block + "ffn_gate.weight", s.d_ff, s.d_model, 1);
    matrix(block + "ffn_up.weight", s.d_ff, s.d_model, 1);
    matrix(block + "ffn_down.weight", s.d_model, s.d_ff, 1);
    if (s.covers_windows || !s.window || i % 2 != 0) add_retainer_layer(s, i, tensors, sidecar);
  }
  set_retainer_keys(s, sidecar);
  const GgufWriter control = seeded_controller(s, tensors);

  struct Held {
    FileBytes bytes, head_bytes, control_bytes;
    std::shared_ptr<const Model> model;
    std::shared_ptr<const Retainer> retainer, controller;
  };
  const auto held = std::make_shared<Held>();
  held->bytes = file.bytes();
  held->head_bytes = sidecar.bytes();
  held->control_bytes = control.bytes();
  auto model = Model::open(lend(held->bytes), "seeded.gguf");
  if (!model.ok()) {
    ADD_FAILURE() << model.status().message();
    return {};
  }
  held->model = *model;
  auto heads = (*model)->open_retainer(lend(held->head_bytes), "seeded.locret.gguf");
  if (!heads.ok()) {
    ADD_FAILURE() << heads.status().message();
    return {};
  }
  held->retainer = *heads;
  auto controller = (*model)->open_retainer(lend(held->control_bytes), "seeded.adore.gguf");
  if (!controller.ok()) {
    ADD_FAILURE() << controller.status().message();
    return {};
  }
  held->controller = *controller;
  return {{held, held->model.get()}, {held, held->retainer.get()}, {held, held->controller.get()}};
}

// A retainer of this kind, or a controller for "adore", for a model of any family.
inline std::shared_ptr<const Retainer> seeded_retainer(const Model& model, const std::string& kind) {
  const ModelShape& m = model.shape;
  const Seeded s{.architecture = model.info.architecture,
                 .layers = m.layers,
                 .d_model = m.d_model,
                 .heads = m.heads,
                 .kv_heads = m.kv_heads,
                 .head_dim = m.head_dim,
                 .kind = kind,
                 .act = "gelu_erf"};
  SeededTensors tensors(s.seed, {});
  GgufWriter file;
  if (kind == "adore") {
    file = seeded_controller(s, tensors);
  } else {
    for (uint32_t layer = 0; layer < m.layers; ++layer) {
      const AttentionMixer* attention = model.layers[layer].attention();
      if (!attention || !attention->has_keys()) continue;
      Seeded its = s;
      its.heads = attention->heads;
      its.kv_heads = attention->kv_heads;
      its.head_dim = attention->head_dim;
      its.has_values = attention->has_values();
      add_retainer_layer(its, layer, tensors, file);
    }
    set_retainer_keys(s, file);
  }
  struct Held {
    FileBytes bytes;
    std::shared_ptr<const Retainer> retainer;
  };
  const auto held = std::make_shared<Held>();
  held->bytes = file.bytes();
  auto retainer = model.open_retainer(lend(held->bytes), kind + ".gguf");
  if (!retainer.ok()) {
    ADD_FAILURE() << retainer.status().message();
    return {};
  }
  held->retainer = *retainer;
  return {held, held->retainer.get()};
}

// Token ids that are the same on every system.
inline std::vector<int32_t> seeded_tokens(size_t count, uint32_t vocab = 64, uint64_t seed = 7) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& t : tokens) t = static_cast<int32_t>((random() >> 32) * vocab >> 32);
  return tokens;
}

}  // namespace thimble::test
