// The architectures: the keys and tensors of each one, and the keys that are refused because they would
// change the result.
#include <algorithm>
#include <cmath>
#include <span>

#include "runtime/model/load.h"

namespace thimble {
namespace {

enum class QkNorm { kNone, kEachHead, kAllHeads };
enum class Norms { kBefore, kBeforeAndBehind, kBehind };  // of attention and feed-forward
enum class Experts {
  kNone,   // no experts
  kMay,    // if the file gives a number; as wide as the feed-forward of other layers
  kAlways  // always; with a width of their own
};

// The meaning of an architecture's keys and tensors (the facts are those of llama.cpp).
struct Architecture {
  const char* name;
  uint32_t pairing;
  QkNorm qk_norm = QkNorm::kNone;
  Norms norms = Norms::kBefore;
  const char* ffn_norm = "ffn_norm";
  uint32_t act = kActSilu;
  // `period`: every layer has a window, except each `period`-th one; the file may set another period. 0: no
  // layer has a window. `window`: its length. 0: the file must give it, or there is no window.
  uint32_t period = 0, window = 0;
  RopeRules rope = {};
  bool gemma = false;                      // scales embeddings by sqrt(d_model), has soft caps
  float attention_cap = 0, logit_cap = 0;  // of gemma, if the file does not give them
  uint32_t layers_of_27b = 0;  // layers of gemma's 27B, which scales by d_model / heads, not head_dim
  bool granite_scales = false;
  uint32_t unrotated_every = 0;  // every n-th layer does not rotate
  bool sinks = false;            // sinks in attention; biases of output, router and experts
  bool own_output = false;       // output is never the embedding
  Experts experts = Experts::kNone;
  uint32_t route = kRouteSoftmax;
  // Whether an expert that every token uses exists besides the others, if the file gives its width.
  bool shared_expert = false;
  // Whether queries are scaled up by their position, if the file gives the growth.
  bool grows_queries = false;
};
constexpr Architecture kGptOss = {.name = "gpt-oss",
                                  .pairing = kRopeHalves,
                                  .ffn_norm = "post_attention_norm",
                                  .act = kActClamped,
                                  .period = 2,
                                  .sinks = true,
                                  .own_output = true,
                                  .experts = Experts::kAlways,
                                  .route = kRouteSoftmaxOfChosen};
constexpr Architecture kGranite = {.name = "granite",
                                   .pairing = kRopeAdjacent,
                                   .granite_scales = true,
                                   .experts = Experts::kMay,
                                   .shared_expert = true};
constexpr Architecture named(Architecture a, const char* name) {
  a.name = name;
  return a;
}
constexpr Architecture kArchitectures[] = {
    {.name = "llama", .pairing = kRopeAdjacent, .experts = Experts::kMay},
    {.name = "mistral3",
     .pairing = kRopeAdjacent,
     .rope = {.reads_yarn = true},
     .experts = Experts::kMay,
     .grows_queries = true},
    {.name = "qwen2", .pairing = kRopeHalves},
    {.name = "qwen3", .pairing = kRopeHalves, .qk_norm = QkNorm::kEachHead},
    {.name = "qwen3moe", .pairing = kRopeHalves, .qk_norm = QkNorm::kEachHead, .experts = Experts::kAlways},
    {.name = "phi3", .pairing = kRopeHalves},
    {.name = "gemma2",
     .pairing = kRopeHalves,
     .norms = Norms::kBeforeAndBehind,
     .act = kActGelu,
     .period = 2,
     .window = 4096,
     .gemma = true,
     .attention_cap = 50,
     .logit_cap = 30,
     .layers_of_27b = 46},
    {.name = "gemma3",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kEachHead,
     .norms = Norms::kBeforeAndBehind,
     .act = kActGelu,
     .period = 6,
     .rope = {.scales_windows = false, .window_base = 10000},
     .gemma = true,
     .layers_of_27b = 62},
    kGptOss,
    named(kGptOss, "gptoss"),
    {.name = "smollm3", .pairing = kRopeAdjacent, .unrotated_every = 4},
    kGranite,
    named(kGranite, "granitemoe"),
    {.name = "olmo2",
     .pairing = kRopeHalves,
     .qk_norm = QkNorm::kAllHeads,
     .norms = Norms::kBehind,
     .period = 4,
     .rope = {.scales_windows = false, .reads_window_base = false},
     .own_output = true},
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

// Keys for features that the library lacks, and the value with which they do not change the result.
struct Refused {
  const char* key;
  double harmless;
};
constexpr Refused kRefused[] = {{"router_logit_softcapping", 0},
                                {"attention.clamp_kqv", 0},
                                {"attention.max_alibi_bias", 0},
                                {"attention.causal", 1}};
constexpr Refused kCaps[] = {{"attn_logit_softcapping", 0}, {"final_logit_softcapping", 0}};
constexpr Refused kGrowths[] = {{"attention.temperature_scale", 0}};
constexpr Refused kScales[] = {{"logit_scale", 1}, {"residual_scale", 1}, {"embedding_scale", 1}};

template <typename T>
std::optional<double> as_double(const std::optional<T>& value) {
  return value ? std::optional<double>(*value) : std::nullopt;
}

// Reads a number of any type.
Result<std::optional<double>> get_number(const Gguf& gguf, const std::string& key) {
  const GgufValue* value = gguf.find(key);
  if (value && (value->type == GgufType::kF32 || value->type == GgufType::kF64)) return gguf.get_float(key);
  THIMBLE_LET(integer, gguf.get_uint(key));
  return as_double(integer);
}

// Like get_number(), but also reads bools as 0 and 1.
Result<std::optional<double>> get_number_or_bool(const Gguf& gguf, const std::string& key) {
  const GgufValue* value = gguf.find(key);
  if (!value || value->type != GgufType::kBool) return get_number(gguf, key);
  THIMBLE_LET(flag, gguf.get_bool(key));
  return as_double(flag);
}

Status refused(const Gguf& gguf, const std::string& key, double value) {
  return error(Code::kUnsupported,
               "%s: key %s is %g, which is not supported; without it the model would be wrong",
               gguf.name().c_str(), in_quotes(key).c_str(), value);
}

Status refuse_what_would_change_the_result(const Gguf& gguf, const Architecture& a) {
  const auto refuse = [&](std::span<const Refused> keys) -> Status {
    for (const Refused& r : keys) {
      const std::string key = std::string(a.name) + "." + r.key;
      THIMBLE_LET(value, with_default(get_number_or_bool(gguf, key), r.harmless));
      if (value != r.harmless) return refused(gguf, key, value);
    }
    return {};
  };
  THIMBLE_TRY(refuse(kRefused));
  if (!a.gemma) THIMBLE_TRY(refuse(kCaps));
  if (!a.granite_scales) THIMBLE_TRY(refuse(kScales));
  if (!a.grows_queries) THIMBLE_TRY(refuse(kGrowths));
  return {};
}

// Reads a scale. 0 also gives the fallback.
Result<float> read_scale(const Gguf& gguf, const std::string& key, double fallback) {
  THIMBLE_LET(value, with_default(get_number(gguf, key), fallback));
  if (!std::isfinite(value) || value < 0)
    return error(Code::kFormat, "%s: key %s is %g instead of a positive number", gguf.name().c_str(),
                 in_quotes(key).c_str(), value);
  return static_cast<float>(value != 0 ? value : fallback);
}

// Loads the factors of embeddings, branches, attention and logits, and the caps.
Status load_scales(const Gguf& gguf, const Architecture& a, Model& model) {
  const std::string prefix = std::string(a.name) + ".";
  const ModelShape& s = model.shape;
  const uint32_t width = a.layers_of_27b == s.layers ? s.d_model / s.heads : s.head_dim;
  const double usual = 1 / std::sqrt(double(width));
  THIMBLE_LET(attention, read_scale(gguf, prefix + "attention.scale", usual));
  // Other architectures may have the key with the usual scale. Files of gemma may have another scale, which
  // no runtime reads.
  if (!a.granite_scales && !a.gemma && std::abs(attention / usual - 1) > 1e-5)
    return refused(gguf, prefix + "attention.scale", double(attention));
  model.attention_scale = a.granite_scales ? attention : static_cast<float>(usual);
  if (a.granite_scales) {
    if (!gguf.find(prefix + "logit_scale")) return gguf.lacks(prefix + "logit_scale");
    THIMBLE_LET(embedding, read_scale(gguf, prefix + "embedding_scale", 1));
    THIMBLE_LET(residual, read_scale(gguf, prefix + "residual_scale", 1));
    THIMBLE_LET(logits, read_scale(gguf, prefix + "logit_scale", 1));
    model.embedding_scale = embedding, model.residual_scale = residual, model.logit_scale = 1 / logits;
  }
  if (a.grows_queries) {
    THIMBLE_LET(growth, read_scale(gguf, prefix + "attention.temperature_scale", 0));
    model.query_growth = growth;
  }
  if (a.gemma) {
    model.embedding_scale = std::sqrt(float(s.d_model));
    THIMBLE_LET(attention_cap, read_scale(gguf, prefix + "attn_logit_softcapping", double(a.attention_cap)));
    THIMBLE_LET(logit_cap, read_scale(gguf, prefix + "final_logit_softcapping", double(a.logit_cap)));
    if (a.attention_cap == 0 && attention_cap != 0)
      model.warnings.push_back(
          error(Code::kUnsupported,
                "%s: key '%sattn_logit_softcapping' is %g, which models of this architecture do not have; it "
                "is passed over",
                gguf.name().c_str(), prefix.c_str(), double(attention_cap))
              .message());
    else
      model.attention_cap = attention_cap;
    model.logit_cap = logit_cap;
  }
  return {};
}

// Loads the number of experts of a layer, the number that a token uses, and the width of an expert.
Status load_expert_shape(const Gguf& gguf, const Architecture& a, Model& model) {
  const std::string prefix = std::string(a.name) + ".";
  const GgufValue* value = gguf.find(prefix + "expert_count");
  THIMBLE_LET(number, with_default(get_number(gguf, prefix + "expert_count"), 0));
  if (a.experts != Experts::kAlways && (!value || number == 0)) {
    if (a.experts == Experts::kMay && gguf.tensor("blk.0.ffn_gate_inp.weight"))
      return error(Code::kFormat, "%s has tensors of experts, and key '%sexpert_count' is %s",
                   gguf.name().c_str(), prefix.c_str(), value ? "0" : "absent");
    return {};
  }
  if (a.experts == Experts::kNone)
    return error(
        Code::kUnsupported,
        "%s: key '%sexpert_count' is %g, and experts of models of this architecture are not supported",
        gguf.name().c_str(), prefix.c_str(), number);
  ModelShape& shape = model.shape;
  THIMBLE_TRY(read_count(gguf, prefix + "expert_count", kMaxExperts, std::nullopt, shape.experts));
  THIMBLE_TRY(
      read_count(gguf, prefix + "expert_used_count", shape.experts, std::nullopt, shape.chosen_experts));
  if (a.experts == Experts::kAlways) {
    std::optional<uint64_t> share;
    if (shape.d_ff) share = std::max(shape.d_ff / shape.chosen_experts, 1u);
    THIMBLE_TRY(read_count(gguf, prefix + "expert_feed_forward_length", kMaxWidth, share, shape.d_ff));
  }
  if (a.shared_expert) {
    const std::string key = prefix + "expert_shared_feed_forward_length";
    THIMBLE_LET(width, with_default(get_number(gguf, key), 0));
    if (width != 0) THIMBLE_TRY(read_count(gguf, key, kMaxWidth, std::nullopt, shape.d_ff_shared));
  }
  model.route = {.experts = shape.experts,
                 .chosen = shape.chosen_experts,
                 .kind = a.route,
                 .share = a.route == kRouteSoftmax,
                 .scale = 1};
  return {};
}

Status load_shape(const Gguf& gguf, const Architecture& a, Model& model) {
  const std::string prefix = a.name;
  ModelShape& shape = model.shape;
  const auto count = [&](const char* key, uint64_t max, std::optional<uint64_t> fallback, uint32_t& to) {
    return read_count(gguf, prefix + "." + key, max, fallback, to);
  };
  const auto count_by_layer = [&](const char* key, uint64_t max, std::optional<uint64_t> fallback,
                                  uint32_t& to) {
    return read_count_by_layer(gguf, prefix + "." + key, shape.layers, max, fallback, to);
  };
  THIMBLE_TRY(count("context_length", kMaxPositions, std::nullopt, model.info.context_length));
  THIMBLE_TRY(count("block_count", kMaxLayers, std::nullopt, shape.layers));
  THIMBLE_TRY(count("embedding_length", kMaxWidth, std::nullopt, shape.d_model));
  // If all layers have experts, the file may give only the width of the experts.
  if (a.experts != Experts::kAlways || gguf.find(prefix + ".feed_forward_length"))
    THIMBLE_TRY(count_by_layer("feed_forward_length", kMaxWidth, std::nullopt, shape.d_ff));
  THIMBLE_TRY(count_by_layer("attention.head_count", kMaxHeads, std::nullopt, shape.heads));
  THIMBLE_TRY(count_by_layer("attention.head_count_kv", shape.heads, shape.heads, shape.kv_heads));
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

// Loads query, key and value: from parts of a fused matrix, or from one matrix each.
Status load_qkv(TensorSource& tensors, const std::string& block, const ModelShape& shape,
                LayerWeights& layer) {
  const uint32_t q_rows = shape.heads * shape.head_dim, kv_rows = shape.kv_heads * shape.head_dim;
  if (const std::string fused = block + "attn_qkv.weight"; tensors.has(fused)) {
    THIMBLE_LET(qkv, tensors.matrix(fused, q_rows + 2 * kv_rows, shape.d_model));
    layer.q = qkv.row_range(0, q_rows);
    layer.k = qkv.row_range(q_rows, kv_rows);
    layer.v = qkv.row_range(q_rows + kv_rows, kv_rows);
    THIMBLE_LET(bias, tensors.vector_if_any(block + "attn_qkv.bias", q_rows + 2 * kv_rows));
    if (!bias) return {};
    layer.q_bias = bias.part(0, q_rows);
    layer.k_bias = bias.part(q_rows, kv_rows);
    layer.v_bias = bias.part(q_rows + kv_rows, kv_rows);
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
  } else {  // one matrix; the rows of the gate come first
    THIMBLE_LET(gate_up, tensors.matrix(block + "ffn_up.weight", 2 * uint64_t(shape.d_ff), shape.d_model));
    layer.gate = gate_up.row_range(0, shape.d_ff);
    layer.up = gate_up.row_range(shape.d_ff, shape.d_ff);
  }
  THIMBLE_LET(down, tensors.matrix(block + "ffn_down.weight", shape.d_model, shape.d_ff));
  layer.down = down;
  return {};
}

Status load_experts(TensorSource& tensors, const std::string& block, const Architecture& a,
                    const ModelShape& s, LayerWeights& layer) {
  THIMBLE_LET(router, tensors.matrix(block + "ffn_gate_inp.weight", s.experts, s.d_model));
  THIMBLE_LET(gate, tensors.matrices(block + "ffn_gate_exps.weight", s.experts, s.d_ff, s.d_model));
  THIMBLE_LET(up, tensors.matrices(block + "ffn_up_exps.weight", s.experts, s.d_ff, s.d_model));
  THIMBLE_LET(down, tensors.matrices(block + "ffn_down_exps.weight", s.experts, s.d_model, s.d_ff));
  layer.router = router, layer.gate = gate, layer.up = up, layer.down = down;
  if (s.d_ff_shared) {
    THIMBLE_LET(shared_gate, tensors.matrix(block + "ffn_gate_shexp.weight", s.d_ff_shared, s.d_model));
    THIMBLE_LET(shared_up, tensors.matrix(block + "ffn_up_shexp.weight", s.d_ff_shared, s.d_model));
    THIMBLE_LET(shared_down, tensors.matrix(block + "ffn_down_shexp.weight", s.d_model, s.d_ff_shared));
    layer.shared_gate = shared_gate, layer.shared_up = shared_up, layer.shared_down = shared_down;
  }
  if (!a.sinks) return {};
  THIMBLE_LET(router_bias, tensors.vector(block + "ffn_gate_inp.bias", s.experts));
  THIMBLE_LET(gate_bias, tensors.floats(block + "ffn_gate_exps.bias", s.experts, s.d_ff));
  THIMBLE_LET(up_bias, tensors.floats(block + "ffn_up_exps.bias", s.experts, s.d_ff));
  THIMBLE_LET(down_bias, tensors.floats(block + "ffn_down_exps.bias", s.experts, s.d_model));
  layer.router_bias = router_bias, layer.gate_bias = gate_bias, layer.up_bias = up_bias;
  layer.down_bias = down_bias;
  return {};
}

Status load_norms(TensorSource& tensors, const std::string& block, const Architecture& a, const ModelShape& s,
                  LayerWeights& layer) {
  if (a.norms != Norms::kBehind) {
    THIMBLE_LET(attn_norm, tensors.vector(block + "attn_norm.weight", s.d_model));
    THIMBLE_LET(ffn_norm, tensors.vector(block + a.ffn_norm + ".weight", s.d_model));
    layer.attn_norm = attn_norm, layer.ffn_norm = ffn_norm;
  }
  if (a.norms != Norms::kBefore) {
    THIMBLE_LET(post_attn_norm, tensors.vector(block + "post_attention_norm.weight", s.d_model));
    THIMBLE_LET(post_ffn_norm, tensors.vector(block + "post_ffw_norm.weight", s.d_model));
    layer.post_attn_norm = post_attn_norm, layer.post_ffn_norm = post_ffn_norm;
  }
  if (a.qk_norm == QkNorm::kNone) return {};
  const uint32_t all = a.qk_norm == QkNorm::kAllHeads;
  THIMBLE_LET(q_norm, tensors.vector(block + "attn_q_norm.weight", s.head_dim * (all ? s.heads : 1)));
  THIMBLE_LET(k_norm, tensors.vector(block + "attn_k_norm.weight", s.head_dim * (all ? s.kv_heads : 1)));
  layer.q_norm = q_norm, layer.k_norm = k_norm;
  return {};
}

Result<LayerWeights> load_layer(TensorSource& tensors, const std::string& block, const Architecture& a,
                                const ModelShape& shape) {
  LayerWeights layer;
  THIMBLE_TRY(load_norms(tensors, block, a, shape, layer));
  THIMBLE_TRY(load_qkv(tensors, block, shape, layer));
  if (a.sinks) {
    THIMBLE_LET(sinks, tensors.vector(block + "attn_sinks.weight", shape.heads));
    layer.sinks = sinks;
  }
  THIMBLE_LET(output,
              tensors.matrix(block + "attn_output.weight", shape.d_model, shape.heads * shape.head_dim));
  const std::string bias = block + "attn_output.bias";
  THIMBLE_LET(output_bias,
              a.sinks ? tensors.vector(bias, shape.d_model) : tensors.vector_if_any(bias, shape.d_model));
  layer.attn_output = output, layer.attn_output_bias = output_bias;
  THIMBLE_TRY(shape.experts ? load_experts(tensors, block, a, shape, layer)
                            : load_ffn(tensors, block, shape, layer));
  return layer;
}

// Checks that windowed layers have the dimensions of the other layers.
Status check_window_shape(const Gguf& gguf, const std::string& prefix, const Model& model) {
  const struct {
    const char* key;
    uint32_t usual;
  } keys[] = {{"attention.key_length_swa", model.shape.head_dim},
              {"attention.value_length_swa", model.shape.head_dim},
              {"rope.dimension_count_swa", model.rope.n_rot}};
  for (const auto& k : keys) {
    const std::string key = prefix + k.key;
    uint32_t count;
    THIMBLE_TRY(read_count(gguf, key, kMaxHeadDim, k.usual, count));
    if (count != k.usual)
      return error(Code::kUnsupported,
                   "%s: key %s is %u, and %u in layers without a window, which must be equal",
                   gguf.name().c_str(), in_quotes(key).c_str(), count, k.usual);
  }
  return {};
}

// Sets the windows of layers: of every layer except each `sliding_window_pattern`-th one. If the pattern is
// 0, every layer has a window.
Status load_windows(const Gguf& gguf, const Architecture& a, Model& model) {
  const std::string prefix = std::string(a.name) + ".", key = prefix + "attention.sliding_window",
                    pattern = key + "_pattern";
  const auto or_none = [](uint32_t n) { return n ? std::optional<uint64_t>(n) : std::nullopt; };
  if (!a.window && !gguf.find(key) && !a.sinks) return {};  // files of gemma3 and olmo2 may have no window
  uint32_t window = 0, period = a.period;
  THIMBLE_TRY(read_count(gguf, key, kMaxPositions, or_none(a.window), window));
  // If the architecture has a usual period, other runtimes ignore a pattern that lists every layer.
  const GgufValue* given = gguf.find(pattern);
  if (given && given->is_array && a.period) {
    THIMBLE_TRY(check_by_layer(gguf, pattern, model.shape.layers));
  } else {
    THIMBLE_LET(number, with_default(get_number(gguf, pattern), 1));
    if (number == 0)
      period = UINT32_MAX;
    else
      THIMBLE_TRY(
          read_count(gguf, pattern, given ? model.shape.layers : kMaxLayers, or_none(a.period), period));
  }
  bool some = false;
  for (uint32_t i = 0; i < model.shape.layers; ++i)
    if ((i + 1) % period != 0) model.layers[i].window = window, some = true;
  return some ? check_window_shape(gguf, prefix, model) : Status();
}

// Warns about a window if the architecture has none.
Status pass_over_window(const Gguf& gguf, const Architecture& a, Model& model) {
  THIMBLE_LET(window, with_default(get_number(gguf, std::string(a.name) + ".attention.sliding_window"), 0));
  if (window == 0 || window >= model.info.context_length) return {};
  model.warnings.push_back(
      error(Code::kUnsupported,
            "%s: the sliding window of %g tokens is not applied; every layer attends to the whole "
            "context",
            gguf.name().c_str(), window)
          .message());
  return {};
}

// Refuses Ollama's files of gpt-oss, which differ in more than names. In the published files, mxfp4 has type
// 4, the halves of its bytes have another order, and the rows of gate and up alternate. In all of them, the
// biases of experts are bf16.
Status refuse_ollamas_gpt_oss(const Gguf& gguf, const Architecture& a) {
  if (!a.sinks || !gguf.tensor("blk.0.attn_out.weight")) return {};
  return error(Code::kUnsupported,
               "%s was written by Ollama, whose files of gpt-oss lay out the experts in a way that is not "
               "read; use one that llama.cpp wrote",
               gguf.name().c_str());
}

}  // namespace

Status load_weights(const Gguf& gguf, Model& model) {
  THIMBLE_LET(architecture, find_architecture(gguf));
  THIMBLE_TRY(refuse_ollamas_gpt_oss(gguf, architecture));
  const std::string prefix = architecture.name;
  THIMBLE_TRY(load_shape(gguf, architecture, model));
  THIMBLE_TRY(load_expert_shape(gguf, architecture, model));
  const ModelShape& shape = model.shape;
  THIMBLE_TRY(refuse_what_would_change_the_result(gguf, architecture));
  THIMBLE_TRY(load_scales(gguf, architecture, model));
  if (shape.experts) model.route.scale = model.residual_scale;  // their output is added to the stream
  const bool windowed =
      architecture.period || gguf.find(prefix + ".attention.sliding_window_pattern") != nullptr;
  if (!windowed) THIMBLE_TRY(pass_over_window(gguf, architecture, model));
  THIMBLE_LET(epsilon, gguf.need_float(prefix + ".attention.layer_norm_rms_epsilon"));
  if (!(epsilon > 0 && epsilon < 1))
    return error(Code::kFormat,
                 "%s: key '%s.attention.layer_norm_rms_epsilon' is %g, where 0 to 1 is possible",
                 gguf.name().c_str(), architecture.name, epsilon);
  model.norm_epsilon = static_cast<float>(epsilon);
  model.act = architecture.act;

  TensorSource tensors(gguf);
  model.rope.pairing = architecture.pairing;
  THIMBLE_TRY(load_rope(gguf, prefix, architecture.rope, tensors, model));
  THIMBLE_LET(embedding, tensors.matrix("token_embd.weight", shape.vocab, shape.d_model));
  THIMBLE_LET(output_norm, tensors.vector("output_norm.weight", shape.d_model));
  model.token_embedding = embedding, model.output_norm = output_norm, model.output = embedding;
  if (architecture.own_output || tensors.has("output.weight")) {
    THIMBLE_LET(output, tensors.matrix("output.weight", shape.vocab, shape.d_model));
    model.output = output;
  }
  // Files of granite without positions are marked in this way.
  bool rotates = true;
  if (architecture.granite_scales) {
    THIMBLE_LET(finetuned, with_default(gguf.get_bool(prefix + ".rope.scaling.finetuned"), true));
    rotates = finetuned;
  }
  for (uint32_t i = 0; i < shape.layers; ++i) {
    THIMBLE_LET(layer, load_layer(tensors, "blk." + std::to_string(i) + ".", architecture, shape));
    layer.rotates = rotates && (!architecture.unrotated_every || (i + 1) % architecture.unrotated_every != 0);
    model.layers.push_back(layer);
  }
  if (windowed) THIMBLE_TRY(load_windows(gguf, architecture, model));
  return tensors.all_taken();
}

}  // namespace thimble
