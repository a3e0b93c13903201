// The architectures: which keys and tensors a model is made of, and what is refused because it would change
// the result.
#include <cmath>

#include "runtime/model/load.h"

namespace thimble {
namespace {

struct Architecture {
  const char* name;
  uint32_t pairing;
  bool head_norms;  // an RMS norm of each head's query and key
  bool
      ignores_window;  // attends to everything where the file asks for a sliding window, as other runtimes do
};
constexpr Architecture kArchitectures[] = {
    {"llama", kRopeAdjacent, false, false},
    {"qwen2", kRopeHalves, false, false},
    {"qwen3", kRopeHalves, true, false},
    {"phi3", kRopeHalves, false, true},
};

Result<Architecture> find_architecture(const Gguf& gguf) {
  THIMBLE_LET(name, gguf.need_string("general.architecture"));
  std::string known;
  for (const Architecture& a : kArchitectures) {
    if (name == a.name) return a;
    known += known.empty() ? a.name : std::string(", ") + a.name;
  }
  return error(Code::kUnsupported, "%s: the architecture %s is not supported (only %s)", gguf.name().c_str(),
               in_quotes(name).c_str(), known.c_str());
}

// Keys that ask for something we do not compute, and the value with which they ask for nothing.
struct Refused {
  const char* key;
  double harmless;
};
constexpr Refused kRefused[] = {
    {"expert_count", 0},
    {"attn_logit_softcapping", 0},
    {"final_logit_softcapping", 0},
    {"router_logit_softcapping", 0},
    {"logit_scale", 1},
    {"residual_scale", 1},
    {"embedding_scale", 1},
    {"attention.clamp_kqv", 0},
    {"attention.max_alibi_bias", 0},
    {"attention.causal", 1},
    {"rope.scaling.yarn_ext_factor", 1},
    {"rope.scaling.yarn_attn_factor", 1},
    {"rope.scaling.yarn_log_multiplier", 0},
};

// A number of any type; bools are 0 and 1.
Result<std::optional<double>> get_number(const Gguf& gguf, const std::string& key) {
  const GgufValue* value = gguf.find(key);
  const auto as_double = [](const auto& v) { return v ? std::optional<double>(*v) : std::nullopt; };
  if (value && value->type == GgufType::kBool) {
    THIMBLE_LET(flag, gguf.get_bool(key));
    return as_double(flag);
  }
  if (value && (value->type == GgufType::kF32 || value->type == GgufType::kF64)) return gguf.get_float(key);
  THIMBLE_LET(integer, gguf.get_uint(key));
  return as_double(integer);
}

Status refuse_what_would_change_the_result(const Gguf& gguf, const std::string& prefix, uint32_t head_dim) {
  const auto refused = [&](const std::string& key, double value) {
    return error(Code::kUnsupported,
                 "%s: key %s is %g, which is not supported; without it the model would be wrong",
                 gguf.name().c_str(), in_quotes(key).c_str(), value);
  };
  for (const Refused& r : kRefused) {
    const std::string key = prefix + "." + r.key;
    THIMBLE_LET(value, with_default(get_number(gguf, key), r.harmless));
    if (value != r.harmless) return refused(key, value);
  }
  // The one scale that we do use may be spelled out.
  const std::string key = prefix + ".attention.scale";
  const double ours = 1 / std::sqrt(head_dim);
  THIMBLE_LET(scale, with_default(get_number(gguf, key), ours));
  if (std::abs(scale / ours - 1) > 1e-5) return refused(key, scale);
  return {};
}

Status load_shape(const Gguf& gguf, const std::string& prefix, Model& model) {
  ModelShape& shape = model.shape;
  const auto count = [&](const char* key, uint64_t max, std::optional<uint64_t> fallback, uint32_t& to) {
    return read_count(gguf, prefix + "." + key, max, fallback, to);
  };
  THIMBLE_TRY(count("context_length", kMaxPositions, std::nullopt, model.info.context_length));
  THIMBLE_TRY(count("block_count", kMaxLayers, std::nullopt, shape.layers));
  THIMBLE_TRY(count("embedding_length", kMaxWidth, std::nullopt, shape.d_model));
  THIMBLE_TRY(count("feed_forward_length", kMaxWidth, std::nullopt, shape.d_ff));
  THIMBLE_TRY(count("attention.head_count", kMaxHeads, std::nullopt, shape.heads));
  THIMBLE_TRY(count("attention.head_count_kv", shape.heads, shape.heads, shape.kv_heads));
  if (shape.heads % shape.kv_heads != 0)
    return error(Code::kFormat, "%s: %u query heads cannot share %u key and value heads evenly",
                 gguf.name().c_str(), shape.heads, shape.kv_heads);
  uint32_t value_dim = 0;
  const uint32_t usual_dim = shape.d_model / shape.heads;
  THIMBLE_TRY(count("attention.key_length", kMaxHeadDim, usual_dim, shape.head_dim));
  THIMBLE_TRY(count("attention.value_length", kMaxHeadDim, usual_dim, value_dim));
  if (shape.head_dim != value_dim)
    return error(Code::kUnsupported,
                 "%s: keys of %u and values of %u channels are not supported; they must be equal",
                 gguf.name().c_str(), shape.head_dim, value_dim);

  const GgufTensor* embedding = gguf.tensor("token_embd.weight");
  if (!embedding) return error(Code::kFormat, "%s lacks the tensor 'token_embd.weight'", gguf.name().c_str());
  if (embedding->shape[1] > INT32_MAX)  // token ids are int32
    return error(Code::kFormat, "%s: tensor 'token_embd.weight' has too many rows", gguf.name().c_str());
  shape.vocab = static_cast<uint32_t>(embedding->shape[1]);
  return {};
}

// Makes parts of a fused matrix or its own matrices of query, key and value.
Status load_qkv(TensorSource& tensors, const std::string& block, const ModelShape& shape,
                LayerWeights& layer) {
  const uint32_t q_rows = shape.heads * shape.head_dim, kv_rows = shape.kv_heads * shape.head_dim;
  if (const std::string fused = block + "attn_qkv.weight"; tensors.has(fused)) {
    THIMBLE_LET(qkv, tensors.matrix(fused, q_rows + 2 * kv_rows, shape.d_model));
    layer.q = qkv.row_range(0, q_rows);
    layer.k = qkv.row_range(q_rows, kv_rows);
    layer.v = qkv.row_range(q_rows + kv_rows, kv_rows);
    return {};
  }
  THIMBLE_LET(q, tensors.matrix(block + "attn_q.weight", q_rows, shape.d_model));
  THIMBLE_LET(k, tensors.matrix(block + "attn_k.weight", kv_rows, shape.d_model));
  THIMBLE_LET(v, tensors.matrix(block + "attn_v.weight", kv_rows, shape.d_model));
  THIMBLE_LET(q_bias, tensors.vector_if_any(block + "attn_q.bias", q_rows));
  THIMBLE_LET(k_bias, tensors.vector_if_any(block + "attn_k.bias", kv_rows));
  THIMBLE_LET(v_bias, tensors.vector_if_any(block + "attn_v.bias", kv_rows));
  layer.q = q, layer.k = k, layer.v = v;
  layer.q_bias = q_bias, layer.k_bias = k_bias, layer.v_bias = v_bias;
  return {};
}

Status load_ffn(TensorSource& tensors, const std::string& block, const ModelShape& shape,
                LayerWeights& layer) {
  if (tensors.has(block + "ffn_gate.weight")) {
    THIMBLE_LET(gate, tensors.matrix(block + "ffn_gate.weight", shape.d_ff, shape.d_model));
    THIMBLE_LET(up, tensors.matrix(block + "ffn_up.weight", shape.d_ff, shape.d_model));
    layer.gate = gate, layer.up = up;
  } else {  // one matrix, the gate's rows first
    THIMBLE_LET(gate_up, tensors.matrix(block + "ffn_up.weight", 2 * uint64_t(shape.d_ff), shape.d_model));
    layer.gate = gate_up.row_range(0, shape.d_ff);
    layer.up = gate_up.row_range(shape.d_ff, shape.d_ff);
  }
  THIMBLE_LET(down, tensors.matrix(block + "ffn_down.weight", shape.d_model, shape.d_ff));
  layer.down = down;
  return {};
}

Result<LayerWeights> load_layer(TensorSource& tensors, const std::string& block,
                                const Architecture& architecture, const ModelShape& shape) {
  LayerWeights layer;
  THIMBLE_LET(attn_norm, tensors.vector(block + "attn_norm.weight", shape.d_model));
  THIMBLE_LET(ffn_norm, tensors.vector(block + "ffn_norm.weight", shape.d_model));
  layer.attn_norm = attn_norm, layer.ffn_norm = ffn_norm;
  THIMBLE_TRY(load_qkv(tensors, block, shape, layer));
  if (architecture.head_norms) {
    THIMBLE_LET(q_norm, tensors.vector(block + "attn_q_norm.weight", shape.head_dim));
    THIMBLE_LET(k_norm, tensors.vector(block + "attn_k_norm.weight", shape.head_dim));
    layer.q_norm = q_norm, layer.k_norm = k_norm;
  }
  THIMBLE_LET(output,
              tensors.matrix(block + "attn_output.weight", shape.d_model, shape.heads * shape.head_dim));
  THIMBLE_LET(output_bias, tensors.vector_if_any(block + "attn_output.bias", shape.d_model));
  layer.attn_output = output, layer.attn_output_bias = output_bias;
  THIMBLE_TRY(load_ffn(tensors, block, shape, layer));
  return layer;
}

// Which layers attend to their last tokens alone: every one but each `sliding_window_pattern`-th.
Status load_windows(const Gguf& gguf, const std::string& prefix, Model& model) {
  uint32_t window = 0, period = 0;
  THIMBLE_TRY(read_count(gguf, prefix + ".attention.sliding_window", kMaxPositions, std::nullopt, window));
  THIMBLE_TRY(read_count(gguf, prefix + ".attention.sliding_window_pattern", kMaxLayers, std::nullopt, period));
  if (window < model.info.context_length)
    for (uint32_t i = 0; i < model.shape.layers; ++i)
      if ((i + 1) % period != 0) model.layers[i].window = window;
  return {};
}

Status check_window(const Gguf& gguf, const std::string& prefix, const Architecture& architecture,
                    Model& model) {
  const std::string key = prefix + ".attention.sliding_window";
  THIMBLE_LET(window, with_default(get_number(gguf, key), 0));
  if (window == 0 || window >= model.info.context_length) return {};
  if (!architecture.ignores_window)
    return error(Code::kUnsupported,
                 "%s: key %s asks for a sliding window of %g tokens, which is not supported",
                 gguf.name().c_str(), in_quotes(key).c_str(), window);
  model.warnings.push_back(
      error(Code::kUnsupported,
            "%s: the sliding window of %g tokens is not applied; every layer attends to the whole "
            "context",
            gguf.name().c_str(), window)
          .message());
  return {};
}

}  // namespace

Status load_weights(const Gguf& gguf, Model& model) {
  THIMBLE_LET(architecture, find_architecture(gguf));
  const std::string prefix = architecture.name;
  THIMBLE_TRY(load_shape(gguf, prefix, model));
  const ModelShape& shape = model.shape;
  THIMBLE_TRY(refuse_what_would_change_the_result(gguf, prefix, shape.head_dim));
  const bool windowed = gguf.find(prefix + ".attention.sliding_window_pattern") != nullptr;
  if (!windowed) THIMBLE_TRY(check_window(gguf, prefix, architecture, model));
  THIMBLE_LET(epsilon, gguf.need_float(prefix + ".attention.layer_norm_rms_epsilon"));
  if (!(epsilon > 0 && epsilon < 1))
    return error(Code::kFormat,
                 "%s: key '%s.attention.layer_norm_rms_epsilon' is %g, where 0 to 1 is possible",
                 gguf.name().c_str(), architecture.name, epsilon);
  model.norm_epsilon = static_cast<float>(epsilon);

  TensorSource tensors(gguf);
  model.rope.pairing = architecture.pairing;
  THIMBLE_TRY(load_rope(gguf, prefix, tensors, model));
  THIMBLE_LET(embedding, tensors.matrix("token_embd.weight", shape.vocab, shape.d_model));
  THIMBLE_LET(output_norm, tensors.vector("output_norm.weight", shape.d_model));
  model.token_embedding = embedding, model.output_norm = output_norm, model.output = embedding;
  if (tensors.has("output.weight")) {
    THIMBLE_LET(output, tensors.matrix("output.weight", shape.vocab, shape.d_model));
    model.output = output;
  }
  for (uint32_t i = 0; i < shape.layers; ++i) {
    THIMBLE_LET(layer, load_layer(tensors, "blk." + std::to_string(i) + ".", architecture, shape));
    model.layers.push_back(layer);
  }
  if (windowed) THIMBLE_TRY(load_windows(gguf, prefix, model));
  return tensors.all_taken();
}

}  // namespace thimble
