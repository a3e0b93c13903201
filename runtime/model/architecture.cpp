// Loads a model of any family: its sizes, scales, windows and layers. Refuses keys that would change the
// result if they were ignored.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <span>

#include "runtime/model/delta_net.h"
#include "runtime/model/families.h"
#include "runtime/model/latent.h"
#include "runtime/model/ssm.h"

namespace thimble {
namespace {

// Keys for features that the library lacks, and the value with which they do not change the result.
struct Refused {
  const char* key;
  double harmless;
};
constexpr Refused kRefused[] = {{"router_logit_softcapping", 0},
                                {"attention.clamp_kqv", 0},
                                {"attention.max_alibi_bias", 0},
                                {"attention.causal", 1},
                                {"interleave_moe_layer_step", 1}};
constexpr Refused kCaps[] = {{"attn_logit_softcapping", 0}, {"final_logit_softcapping", 0}};
constexpr Refused kGrowths[] = {{"attention.temperature_scale", 0}};
constexpr Refused kLogitScale[] = {{"logit_scale", 1}};
constexpr Refused kScales[] = {{"residual_scale", 1}, {"embedding_scale", 1}};

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

bool scales_all(const Family& family) {
  return family.scales == Scales::kGranite || family.scales == Scales::kMiniCpm;
}

Status refuse_what_would_change_the_result(const Gguf& gguf, const Family& family) {
  const auto refuse = [&](std::span<const Refused> keys) -> Status {
    for (const Refused& r : keys) {
      const std::string key = std::string(family.name) + "." + r.key;
      THIMBLE_LET(value, with_default(get_number_or_bool(gguf, key), r.harmless));
      if (value != r.harmless) return refused(gguf, key, value);
    }
    return {};
  };
  THIMBLE_TRY(refuse(kRefused));
  if (!family.gemma) THIMBLE_TRY(refuse(kCaps));
  if (family.scales == Scales::kNone) THIMBLE_TRY(refuse(kLogitScale));
  if (!scales_all(family)) THIMBLE_TRY(refuse(kScales));
  if (!family.grows_queries) THIMBLE_TRY(refuse(kGrowths));
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

// Loads the factors of embeddings, branches, attention and logits, and the caps. `query_dim`: the channels of
// a head's query.
Status load_scales(const Gguf& gguf, const Family& family, uint32_t query_dim, Model& model) {
  const std::string prefix = std::string(family.name) + ".";
  const ModelShape& s = model.shape;
  const uint32_t width = family.layers_of_27b == s.layers ? s.d_model / s.heads : query_dim;
  const double usual = 1 / std::sqrt(double(width));
  THIMBLE_LET(attention, read_scale(gguf, prefix + "attention.scale", usual));
  // Other architectures may have the key with the usual scale. Files of gemma may have another scale, which
  // no runtime reads.
  const bool scales = scales_all(family) || family.attention_scale;
  if (!scales && !family.gemma && std::abs(attention / usual - 1) > 1e-5)
    return refused(gguf, prefix + "attention.scale", double(attention));
  model.attention_scale = scales ? attention : static_cast<float>(usual);
  // Early files of minicpm lack the scales, with which all its models were trained.
  const bool minicpm = family.scales == Scales::kMiniCpm;
  if (!minicpm && family.scales != Scales::kNone && !gguf.find(prefix + "logit_scale"))
    return gguf.lacks(prefix + "logit_scale");
  if (scales_all(family)) {
    THIMBLE_LET(embedding, read_scale(gguf, prefix + "embedding_scale", minicpm ? 12 : 1));
    THIMBLE_LET(residual,
                read_scale(gguf, prefix + "residual_scale", minicpm ? 1.4 / std::sqrt(double(s.layers)) : 1));
    THIMBLE_LET(logits, read_scale(gguf, prefix + "logit_scale", minicpm ? s.d_model / 256.0 : 1));
    model.embedding_scale = embedding, model.residual_scale = residual, model.logit_scale = 1 / logits;
  }
  if (family.scales == Scales::kLogits) {
    THIMBLE_LET(logits, read_scale(gguf, prefix + "logit_scale", 1));
    model.logit_scale = logits;
  }
  if (family.grows_queries) {
    THIMBLE_LET(growth, read_scale(gguf, prefix + "attention.temperature_scale", 0));
    model.query_growth = growth;
    if (growth != 0 && family.growth_period)
      THIMBLE_TRY(
          read_count(gguf, prefix + family.growth_period, kMaxPositions, std::nullopt, model.query_period));
  }
  if (family.gemma) {
    model.embedding_scale = std::sqrt(float(s.d_model));
    THIMBLE_LET(attention_cap,
                read_scale(gguf, prefix + "attn_logit_softcapping", double(family.attention_cap)));
    THIMBLE_LET(logit_cap, read_scale(gguf, prefix + "final_logit_softcapping", double(family.logit_cap)));
    if (family.attention_cap == 0 && attention_cap != 0)
      model.warnings.push_back(
          error(Code::kUnsupported,
                "%s: key '%sattn_logit_softcapping' is %g, which models of this architecture do not have; it "
                "is ignored",
                gguf.name().c_str(), prefix.c_str(), double(attention_cap))
              .message());
    else
      model.attention_cap = attention_cap;
    model.logit_cap = logit_cap;
  }
  return {};
}

// The sizes of one layer.
struct LayerSizes {
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t d_ff = 0;  // of a layer without experts
};
struct ExpertSizes {
  RouteParams route = {};
  uint32_t d_ff = 0;         // of one expert
  uint32_t d_ff_shared = 0;  // of the expert that processes every token; 0: none
  uint32_t latent = 0;       // width of the experts' input and output, if it is not d_model; or 0
};
struct Sizes {
  uint32_t d_model = 0, vocab = 0;
  std::vector<LayerSizes> layers;
  uint32_t draft_layers = 0;  // the file's last layers, which only draft tokens
  ExpertSizes experts;        // route.experts is 0: the model has none
  uint32_t dense_layers = 0;  // the first layers, which have no experts
  uint32_t taps = 0;          // of short convolutions
  DeltaNetSizes delta_net;    // of layers with linear attention
  SsmSizes ssm;               // of layers with Mamba-2
  LatentSizes latent;         // of latent attention

  // The layers that the file counts.
  uint32_t blocks() const { return static_cast<uint32_t>(layers.size()) + draft_layers; }
};

// Loads how the router's logits become weights, and the groups of experts.
Status load_route(const Gguf& gguf, const std::string& prefix, const ExpertFacts& facts, RouteParams& route) {
  if (facts.route_from_file) {
    constexpr uint32_t kKinds[] = {kRouteSoftmax, kRouteSigmoid, kRouteSoftmaxOfChosen, kRouteSqrtSoftplus};
    const auto usual = std::find(std::begin(kKinds), std::end(kKinds), facts.route) - std::begin(kKinds);
    uint32_t function = 0;  // as llama.cpp numbers them
    THIMBLE_TRY(
        read_count(gguf, prefix + "expert_gating_func", std::size(kKinds), uint64_t(usual) + 1, function));
    route.kind = kKinds[function - 1];
    route.share = route.kind != kRouteSoftmaxOfChosen;
  }
  if (facts.norm_from_file) {
    THIMBLE_LET(norm, with_default(gguf.get_bool(prefix + "expert_weights_norm"), false));
    route.share = route.share && norm;
  }
  THIMBLE_SET(route.scale, read_scale(gguf, prefix + "expert_weights_scale", 1));
  THIMBLE_LET(groups, with_default(get_number(gguf, prefix + "expert_group_count"), 0));
  if (groups <= 1) return {};
  THIMBLE_TRY(read_count(gguf, prefix + "expert_group_count", kMostGroups, std::nullopt, route.groups));
  THIMBLE_TRY(
      read_count(gguf, prefix + "expert_group_used_count", route.groups, std::nullopt, route.groups_used));
  if (route.experts % route.groups != 0 || route.chosen > route.groups_used * (route.experts / route.groups))
    return error(Code::kFormat, "%s: %u of %u experts cannot be chosen in %u of %u groups",
                 gguf.name().c_str(), route.chosen, route.experts, route.groups_used, route.groups);
  return {};
}

// Loads the number of experts of a layer, the number that a token uses, and the width of an expert.
Status load_expert_sizes(const Gguf& gguf, const Family& family, Sizes& sizes) {
  const std::string prefix = std::string(family.name) + ".";
  const GgufValue* value = gguf.find(prefix + "expert_count");
  THIMBLE_LET(number, with_default(get_number(gguf, prefix + "expert_count"), 0));
  if (family.experts.has != HasExperts::kAlways && (!value || number == 0)) {
    if (family.experts.has == HasExperts::kMay && gguf.tensor("blk.0.ffn_gate_inp.weight"))
      return error(Code::kFormat, "%s has tensors of experts, and key '%sexpert_count' is %s",
                   gguf.name().c_str(), prefix.c_str(), value ? "0" : "absent");
    return {};
  }
  if (family.experts.has == HasExperts::kNone)
    return error(
        Code::kUnsupported,
        "%s: key '%sexpert_count' is %g, and experts of models of this architecture are not supported",
        gguf.name().c_str(), prefix.c_str(), number);
  ExpertSizes& e = sizes.experts;
  uint32_t count = 0, chosen = 0;
  THIMBLE_TRY(read_count(gguf, prefix + "expert_count", kMaxExperts, std::nullopt, count));
  THIMBLE_TRY(read_count(gguf, prefix + "expert_used_count", count, std::nullopt, chosen));
  ExpertFacts facts = family.experts;
  // Early files of GLM-4.7-Flash do not give the kind of its router.
  const bool glm = sizes.vocab == 154880 && (sizes.blocks() == 47 || sizes.blocks() == 48);
  if (family.latent && glm) facts.route = kRouteSigmoid;
  e.route = {.experts = count,
             .chosen = chosen,
             .kind = facts.route,
             .share = facts.route != kRouteSoftmaxOfChosen,
             .scale = 1};
  THIMBLE_TRY(load_route(gguf, prefix, facts, e.route));
  e.d_ff = sizes.layers[0].d_ff;
  if (family.single_parts && gguf.find(prefix + "moe_latent_size"))
    THIMBLE_TRY(read_count(gguf, prefix + "moe_latent_size", sizes.d_model, std::nullopt, e.latent));
  if (family.experts.has != HasExperts::kMay) {
    std::optional<uint64_t> share;
    if (e.d_ff) share = std::max(e.d_ff / chosen, 1u);
    THIMBLE_TRY(read_count(gguf, prefix + "expert_feed_forward_length", kMaxWidth, share, e.d_ff));
  }
  THIMBLE_LET(dense, with_default(gguf.get_uint(prefix + "leading_dense_block_count"), 0));
  sizes.dense_layers = static_cast<uint32_t>(std::min<uint64_t>(dense, sizes.layers.size()));
  if (!facts.shared) return {};
  // The file gives the width of the shared expert, or a number of experts that it stands for.
  const std::string key = prefix + "expert_shared_feed_forward_length",
                    shared = prefix + "expert_shared_count";
  THIMBLE_LET(width, with_default(get_number(gguf, key), 0));
  THIMBLE_LET(experts, with_default(get_number(gguf, shared), 0));
  if (width != 0) {
    THIMBLE_TRY(read_count(gguf, key, kMaxWidth, std::nullopt, e.d_ff_shared));
  } else if (experts != 0) {
    THIMBLE_TRY(read_count(gguf, shared, kMaxWidth / e.d_ff, std::nullopt, e.d_ff_shared));
    e.d_ff_shared *= e.d_ff;
  }
  return {};
}

// Loads the number of layers. The last layers of a file may only draft tokens (multi-token prediction). They
// are not part of the model, and the file need not contain them. A file that contains nothing else is
// refused.
Status load_layer_count(const Gguf& gguf, const Family& family, const TensorSource& tensors, Sizes& sizes) {
  const std::string prefix = std::string(family.name) + ".", key = prefix + "nextn_predict_layers";
  uint32_t blocks = 0;
  THIMBLE_TRY(read_count(gguf, prefix + "block_count", kMaxLayers, std::nullopt, blocks));
  THIMBLE_LET(drafts, with_default(gguf.get_uint(key), 0));
  if (drafts >= blocks)
    return error(Code::kFormat, "%s: key %s is %" PRIu64 ", which leaves none of %" PRIu32 " layers",
                 gguf.name().c_str(), in_quotes(key).c_str(), drafts, blocks);
  if (drafts > 0 && !tensors.has_any("blk.0."))
    return error(
        Code::kUnsupported,
        "%s contains only layers that draft tokens for another model (key %s); open the file of that "
        "model",
        gguf.name().c_str(), in_quotes(key).c_str());
  sizes.draft_layers = static_cast<uint32_t>(drafts);
  sizes.layers.resize(blocks - sizes.draft_layers);
  return {};
}

Result<Sizes> load_sizes(const Gguf& gguf, const Family& family, const TensorSource& tensors, Model& model) {
  const std::string prefix = std::string(family.name) + ".";
  Sizes sizes;
  const auto count = [&](const char* key, uint64_t max, std::optional<uint64_t> fallback, uint32_t& to) {
    return read_count(gguf, prefix + key, max, fallback, to);
  };
  THIMBLE_TRY(count("context_length", kMaxPositions, std::nullopt, model.info.context_length));
  THIMBLE_TRY(load_layer_count(gguf, family, tensors, sizes));
  THIMBLE_TRY(count("embedding_length", kMaxWidth, std::nullopt, sizes.d_model));
  const uint32_t layers = static_cast<uint32_t>(sizes.layers.size());
  // Reads a number of each layer. `most`, if given, is its bound and the value that the file may leave out.
  const auto by_layer = [&](const char* key, uint64_t max, uint32_t LayerSizes::*most,
                            uint32_t LayerSizes::*to, bool may_be_0 = false) -> Status {
    for (uint32_t i = 0; i < layers; ++i) {
      LayerSizes& layer = sizes.layers[i];
      const std::optional<uint64_t> bound = most ? std::optional<uint64_t>(layer.*most) : std::nullopt;
      THIMBLE_TRY(read_count_of_layer(gguf, prefix + key, i, sizes.blocks(), bound.value_or(max), bound,
                                      may_be_0, layer.*to));
    }
    return {};
  };
  // If all layers have experts, the file may give only the width of the experts.
  if (family.experts.has != HasExperts::kAlways || gguf.find(prefix + "feed_forward_length"))
    THIMBLE_TRY(by_layer("feed_forward_length", kMaxWidth, nullptr, &LayerSizes::d_ff, family.single_parts));
  // Early files of lfm2 give a wrong width, so the tensors decide.
  for (uint32_t i = 0; family.short_conv && i < layers; ++i)
    if (const GgufTensor* gate = gguf.tensor("blk." + std::to_string(i) + ".ffn_gate.weight"))
      sizes.layers[i].d_ff = static_cast<uint32_t>(std::min(gate->shape[1], kMaxWidth));
  THIMBLE_TRY(by_layer("attention.head_count", kMaxHeads, nullptr, &LayerSizes::heads));
  THIMBLE_TRY(by_layer(
      "attention.head_count_kv", kMaxHeads, &LayerSizes::heads, &LayerSizes::kv_heads,
      family.short_conv || family.delta_net != DeltaNetHeads::kNone || family.ssm == SsmLayers::kSome));
  if (family.short_conv) THIMBLE_TRY(count("shortconv.l_cache", kMostTaps, std::nullopt, sizes.taps));
  if (family.delta_net != DeltaNetHeads::kNone) {
    THIMBLE_LET(recurrent, load_recurrent_layers(gguf, prefix, sizes.blocks()));
    for (uint32_t i = 0; i < layers; ++i)
      if (recurrent[i]) sizes.layers[i].kv_heads = 0;
    THIMBLE_SET(sizes.delta_net, load_delta_net_sizes(gguf, prefix));
  }
  if (family.ssm != SsmLayers::kNone) THIMBLE_SET(sizes.ssm, load_ssm_sizes(gguf, prefix));
  if (family.latent) THIMBLE_SET(sizes.latent, load_latent_sizes(gguf, prefix));
  for (LayerSizes& layer : sizes.layers) {
    if (!layer.kv_heads) continue;  // no attention
    if (family.latent) {
      layer.kv_heads = 1;
      layer.head_dim = sizes.latent.latent + sizes.latent.rotated;
      continue;
    }
    if (layer.heads % layer.kv_heads != 0)
      return error(Code::kFormat, "%s: %u query heads cannot share %u key and value heads evenly",
                   gguf.name().c_str(), layer.heads, layer.kv_heads);
    uint32_t value_dim = 0;
    const uint32_t usual_dim = sizes.d_model / layer.heads;
    THIMBLE_TRY(count("attention.key_length", kMaxHeadDim, usual_dim, layer.head_dim));
    THIMBLE_TRY(count("attention.value_length", kMaxHeadDim, usual_dim, value_dim));
    if (layer.head_dim != value_dim)
      return error(Code::kUnsupported,
                   "%s: keys of %u and values of %u channels are not supported; they must be equal",
                   gguf.name().c_str(), layer.head_dim, value_dim);
  }

  if (std::none_of(sizes.layers.begin(), sizes.layers.end(),
                   [](const LayerSizes& layer) { return layer.kv_heads > 0; }))
    return error(Code::kUnsupported, "%s: no layer has attention, which is not supported",
                 gguf.name().c_str());

  const GgufTensor* embedding = gguf.tensor("token_embd.weight");
  if (!embedding) return error(Code::kFormat, "%s lacks the tensor 'token_embd.weight'", gguf.name().c_str());
  if (embedding->shape[1] > INT32_MAX)  // token ids are int32
    return error(Code::kFormat, "%s: tensor 'token_embd.weight' has too many rows", gguf.name().c_str());
  sizes.vocab = static_cast<uint32_t>(embedding->shape[1]);
  THIMBLE_TRY(load_expert_sizes(gguf, family, sizes));
  return sizes;
}

// The largest sizes of any layer.
ModelShape largest(const Sizes& sizes) {
  ModelShape s{.layers = static_cast<uint32_t>(sizes.layers.size()),
               .d_model = sizes.d_model,
               .d_ff = sizes.experts.d_ff,
               .vocab = sizes.vocab,
               .experts = sizes.experts.route.experts,
               .chosen_experts = sizes.experts.route.chosen,
               .d_ff_shared = sizes.experts.d_ff_shared,
               .delta_keys = sizes.delta_net.key_heads,
               .delta_values = sizes.delta_net.value_heads,
               .delta_width = sizes.delta_net.width};
  for (const LayerSizes& layer : sizes.layers) {
    if (!s.experts) s.d_ff = std::max(s.d_ff, layer.d_ff);
    if (!layer.kv_heads) continue;
    s.heads = std::max(s.heads, layer.heads);
    s.kv_heads = std::max(s.kv_heads, layer.kv_heads);
    s.head_dim = std::max(s.head_dim, layer.head_dim);
  }
  return s;
}

// Loads query, key and value: from parts of a fused matrix, or from one matrix each.
Status load_qkv(TensorSource& tensors, const std::string& block, uint32_t d_model, AttentionMixer& m) {
  const uint32_t q_rows = (m.output_gate ? 2 : 1) * m.q_cols(), kv_rows = m.kv_cols();
  if (const std::string fused = block + "attn_qkv.weight"; tensors.has(fused)) {
    THIMBLE_LET(qkv, tensors.matrix(fused, q_rows + 2 * uint64_t(kv_rows), d_model));
    m.q = qkv.row_range(0, q_rows);
    m.k = qkv.row_range(q_rows, kv_rows);
    m.v = qkv.row_range(q_rows + kv_rows, kv_rows);
    THIMBLE_LET(bias, tensors.vector_if_any(block + "attn_qkv.bias", qkv.rows));
    if (!bias) return {};
    m.q_bias = bias.part(0, q_rows);
    m.k_bias = bias.part(q_rows, kv_rows);
    m.v_bias = bias.part(q_rows + kv_rows, kv_rows);
    return {};
  }
  THIMBLE_SET(m.q, tensors.matrix(block + "attn_q.weight", q_rows, d_model));
  THIMBLE_SET(m.k, tensors.matrix(block + "attn_k.weight", kv_rows, d_model));
  THIMBLE_SET(m.v, tensors.matrix(block + "attn_v.weight", kv_rows, d_model));
  THIMBLE_SET(m.q_bias, tensors.vector_if_any(block + "attn_q.bias", q_rows));
  THIMBLE_SET(m.k_bias, tensors.vector_if_any(block + "attn_k.bias", kv_rows));
  THIMBLE_SET(m.v_bias, tensors.vector_if_any(block + "attn_v.bias", kv_rows));
  return {};
}

Result<AttentionMixer> load_attention(TensorSource& tensors, const std::string& block, const Family& family,
                                      uint32_t d_model, const LayerSizes& sizes) {
  AttentionMixer m{.heads = sizes.heads, .kv_heads = sizes.kv_heads, .head_dim = sizes.head_dim};
  m.output_gate = family.delta_net != DeltaNetHeads::kNone;
  THIMBLE_TRY(load_qkv(tensors, block, d_model, m));
  const bool has_norms = family.qk_norm == QkNorm::kEachHeadIfAny ? tensors.has(block + "attn_q_norm.weight")
                                                                  : family.qk_norm != QkNorm::kNone;
  if (has_norms) {
    const bool all = family.qk_norm == QkNorm::kAllHeads;
    m.norms_after_rotation = family.qk_norm == QkNorm::kEachRotated;
    THIMBLE_SET(m.q_norm, tensors.vector(block + "attn_q_norm.weight", all ? m.q_cols() : m.head_dim));
    THIMBLE_SET(m.k_norm, tensors.vector(block + "attn_k_norm.weight", all ? m.kv_cols() : m.head_dim));
  }
  if (family.sinks) THIMBLE_SET(m.sinks, tensors.vector(block + "attn_sinks.weight", m.heads));
  THIMBLE_SET(m.output, tensors.matrix(block + "attn_output.weight", d_model, m.q_cols()));
  const std::string bias = block + "attn_output.bias";
  if (family.no_output_bias) {
    tensors.skip(bias);
    return m;
  }
  THIMBLE_SET(m.output_bias,
              family.biases ? tensors.vector(bias, d_model) : tensors.vector_if_any(bias, d_model));
  return m;
}

Result<ShortConvMixer> load_short_conv(TensorSource& tensors, const std::string& block, uint32_t d_model,
                                       uint32_t taps) {
  ShortConvMixer m;
  THIMBLE_SET(m.in, tensors.matrix(block + "shortconv.in_proj.weight", 3 * uint64_t(d_model), d_model));
  THIMBLE_SET(m.conv, tensors.floats(block + "shortconv.conv.weight", d_model, taps));
  THIMBLE_SET(m.out, tensors.matrix(block + "shortconv.out_proj.weight", d_model, d_model));
  return m;
}

Result<Dense> load_dense(TensorSource& tensors, const std::string& block, bool gated, uint32_t d_model,
                         uint32_t d_ff) {
  Dense f;
  if (!gated || tensors.has(block + "ffn_gate.weight")) {
    if (gated) THIMBLE_SET(f.gate, tensors.matrix(block + "ffn_gate.weight", d_ff, d_model));
    THIMBLE_SET(f.up, tensors.matrix(block + "ffn_up.weight", d_ff, d_model));
  } else {  // one matrix; the rows of the gate come first
    THIMBLE_LET(gate_up, tensors.matrix(block + "ffn_up.weight", 2 * uint64_t(d_ff), d_model));
    f.gate = gate_up.row_range(0, d_ff);
    f.up = gate_up.row_range(d_ff, d_ff);
  }
  THIMBLE_SET(f.down, tensors.matrix(block + "ffn_down.weight", d_model, d_ff));
  if (gated) THIMBLE_SET(f.gate_bias, tensors.vector_if_any(block + "ffn_gate.bias", d_ff));
  THIMBLE_SET(f.up_bias, tensors.vector_if_any(block + "ffn_up.bias", d_ff));
  THIMBLE_SET(f.down_bias, tensors.vector_if_any(block + "ffn_down.bias", d_model));
  return f;
}

Result<Experts> load_experts(TensorSource& tensors, const std::string& block, const Family& family,
                             uint32_t d_model, const ExpertSizes& sizes) {
  const uint32_t count = sizes.route.experts, d_ff = sizes.d_ff, d_ff_shared = sizes.d_ff_shared;
  Experts f{.route = sizes.route};
  THIMBLE_SET(f.router, tensors.matrix(block + "ffn_gate_inp.weight", count, d_model));
  const uint32_t width = sizes.latent ? sizes.latent : d_model;
  if (sizes.latent) {
    THIMBLE_SET(f.latent_down, tensors.matrix(block + "ffn_latent_down.weight", width, d_model));
    THIMBLE_SET(f.latent_up, tensors.matrix(block + "ffn_latent_up.weight", d_model, width));
  }
  if (const std::string fused = block + "ffn_gate_up_exps.weight"; tensors.has(fused)) {
    THIMBLE_SET(f.gate, tensors.matrices(fused, count, 2 * uint64_t(d_ff), width));
    THIMBLE_SET(f.gate_scale, tensors.scales(fused, count));
    f.up_scale = f.gate_scale;
  } else {
    if (family.gated) {
      THIMBLE_SET(f.gate, tensors.matrices(block + "ffn_gate_exps.weight", count, d_ff, width));
      THIMBLE_SET(f.gate_scale, tensors.scales(block + "ffn_gate_exps.weight", count));
    }
    THIMBLE_SET(f.up, tensors.matrices(block + "ffn_up_exps.weight", count, d_ff, width));
    THIMBLE_SET(f.up_scale, tensors.scales(block + "ffn_up_exps.weight", count));
  }
  THIMBLE_SET(f.down, tensors.matrices(block + "ffn_down_exps.weight", count, width, d_ff));
  THIMBLE_SET(f.down_scale, tensors.scales(block + "ffn_down_exps.weight", count));
  if (d_ff_shared) {
    f.scale = family.experts.scale_with_shared;
    if (family.gated)
      THIMBLE_SET(f.shared.gate, tensors.matrix(block + "ffn_gate_shexp.weight", d_ff_shared, d_model));
    THIMBLE_SET(f.shared.up, tensors.matrix(block + "ffn_up_shexp.weight", d_ff_shared, d_model));
    THIMBLE_SET(f.shared.down, tensors.matrix(block + "ffn_down_shexp.weight", d_model, d_ff_shared));
  }
  if (d_ff_shared && family.experts.shared_gate)
    THIMBLE_SET(f.shared_gate, tensors.matrix(block + "ffn_gate_inp_shexp.weight", 1, d_model));
  const std::string choice_bias = block + "exp_probs_b.bias";
  if (family.experts.choice_bias == ChoiceBias::kMust ||
      (family.experts.choice_bias == ChoiceBias::kMay && tensors.has(choice_bias)))
    THIMBLE_SET(f.choice_bias, tensors.vector(choice_bias, count));
  if (!family.biases) return f;
  THIMBLE_SET(f.router_bias, tensors.vector(block + "ffn_gate_inp.bias", count));
  THIMBLE_SET(f.gate_bias, tensors.floats(block + "ffn_gate_exps.bias", count, d_ff));
  THIMBLE_SET(f.up_bias, tensors.floats(block + "ffn_up_exps.bias", count, d_ff));
  THIMBLE_SET(f.down_bias, tensors.floats(block + "ffn_down_exps.bias", count, d_model));
  return f;
}

Status load_norms(TensorSource& tensors, const std::string& block, const Family& family, uint32_t d_model,
                  Layer& layer) {
  if (family.norms != Norms::kBehind)
    THIMBLE_SET(layer.norm, tensors.vector(block + "attn_norm.weight", d_model));
  if (family.norms == Norms::kBefore || family.norms == Norms::kBeforeAndBehind) {
    const std::string bare = block + family.ffn_norm;  // so named in files of falcon-h1
    THIMBLE_SET(layer.ffn_norm, tensors.vector(tensors.has(bare) ? bare : bare + ".weight", d_model));
  }
  layer.parallel = family.norms == Norms::kOnce;
  if (family.norms == Norms::kBehind || family.norms == Norms::kBeforeAndBehind) {
    THIMBLE_SET(layer.post_norm, tensors.vector(block + "post_attention_norm.weight", d_model));
    THIMBLE_SET(layer.post_ffn_norm, tensors.vector(block + "post_ffw_norm.weight", d_model));
  }
  return {};
}

Result<Layer> load_layer(const Gguf& gguf, TensorSource& tensors, uint32_t index, const LayerSizes& its,
                         const Family& family, const Sizes& sizes, Model& model) {
  const std::string block = "blk." + std::to_string(index) + ".";
  Layer layer;
  // A layer with a single part has a norm before it, whatever it is.
  const bool has_feed_forward = !family.single_parts || (its.d_ff && !its.kv_heads);
  const bool has_mixer = !family.single_parts || !has_feed_forward;
  if (family.single_parts) {
    Tensor& norm = has_mixer ? layer.norm : layer.ffn_norm;
    THIMBLE_SET(norm, tensors.vector(block + "attn_norm.weight", sizes.d_model));
  } else {
    THIMBLE_TRY(load_norms(tensors, block, family, sizes.d_model, layer));
  }
  const auto add = [&](auto mixer) -> Status {
    THIMBLE_TRY(mixer);
    layer.mixers.emplace_back(std::move(*mixer));
    return {};
  };
  if (has_mixer) {
    if (family.latent)
      THIMBLE_TRY(add(load_latent(tensors, block, gguf, sizes.d_model, its.heads, sizes.latent)));
    else if (its.kv_heads)
      THIMBLE_TRY(add(load_attention(tensors, block, family, sizes.d_model, its)));
    if (family.ssm == SsmLayers::kAll || (family.ssm == SsmLayers::kSome && !its.kv_heads))
      THIMBLE_TRY(add(load_ssm(tensors, block, family, sizes.d_model, sizes.ssm)));
    else if (!its.kv_heads && family.delta_net != DeltaNetHeads::kNone)
      THIMBLE_TRY(add(load_delta_net(tensors, block, family, sizes.delta_net, model)));
    else if (!its.kv_heads)
      THIMBLE_TRY(add(load_short_conv(tensors, block, sizes.d_model, sizes.taps)));
  }
  if (!has_feed_forward) return layer;
  if (sizes.experts.route.experts && index >= sizes.dense_layers)
    THIMBLE_SET(layer.feed_forward, load_experts(tensors, block, family, sizes.d_model, sizes.experts));
  else
    THIMBLE_SET(layer.feed_forward, load_dense(tensors, block, family.gated, sizes.d_model, its.d_ff));
  return layer;
}

// Loads the first of the layers that draft tokens as a model of one layer. It is like the last layer with
// attention.
Result<std::unique_ptr<Model>> load_draft_block(const Gguf& gguf, TensorSource& tensors, const Family& family,
                                                const Sizes& sizes, const Model& model) {
  const uint32_t index = model.shape.layers, d = model.shape.d_model;
  const std::string own = "blk." + std::to_string(index) + ".nextn.";
  auto block = std::make_unique<Model>();
  const auto attends = std::find_if(sizes.layers.rbegin(), sizes.layers.rend(),
                                    [](const LayerSizes& layer) { return layer.kv_heads > 0; });
  THIMBLE_LET(layer, load_layer(gguf, tensors, index, *attends, family, sizes, *block));
  auto& attention = std::get<AttentionMixer>(layer.mixers.front());
  block->layer_of_run.assign(attention.kv_heads, 0);
  block->shape = model.shape_of(layer);
  block->shape.layers = 1;
  block->shape.delta_keys = block->shape.delta_values = block->shape.delta_width = 0;
  // Backends have scratch memory for a first product and a last one of mixers. Here these are the product of
  // the queries, which may have gates, and that which joins a token and a row.
  block->shape.mixer_in = attention.q.rows;
  block->shape.mixer_out = 2 * d;
  block->target = &model;
  block->layers.push_back(std::move(layer));
  JoinedInput& in = block->joined.emplace();
  THIMBLE_SET(in.embedding_norm, tensors.vector(own + "enorm.weight", d));
  THIMBLE_SET(in.row_norm, tensors.vector(own + "hnorm.weight", d));
  THIMBLE_SET(in.join, tensors.matrix(own + "eh_proj.weight", d, 2 * uint64_t(d)));
  // What the block does not have itself, it shares with the model.
  block->token_embedding = model.token_embedding, block->output_norm = model.output_norm;
  block->output = model.output;
  if (const std::string name = own + "embed_tokens.weight"; tensors.has(name))
    THIMBLE_SET(block->token_embedding, tensors.table(name, model.shape.vocab, d));
  if (const std::string name = own + "shared_head_norm.weight"; tensors.has(name))
    THIMBLE_SET(block->output_norm, tensors.vector(name, d));
  if (const std::string name = own + "shared_head_head.weight"; tensors.has(name))
    THIMBLE_SET(block->output, tensors.matrix(name, model.shape.vocab, d));
  block->info = model.info;
  block->rope = model.rope;
  block->norm_epsilon = model.norm_epsilon;
  block->act = model.act;
  block->attention_scale = model.attention_scale;
  block->query_growth = model.query_growth, block->query_period = model.query_period;
  return block;
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

// Sets the windows of layers.
Status load_windows(const Gguf& gguf, const Family& family, const Sizes& sizes, Model& model) {
  const Windows& facts = family.windows;
  const std::string prefix = std::string(family.name) + ".", key = prefix + "attention.sliding_window",
                    pattern = key + "_pattern";
  const auto or_none = [](uint32_t n) { return n ? std::optional<uint64_t>(n) : std::nullopt; };
  if (!facts.length && !gguf.find(key) && !facts.required)
    return {};  // files of gemma3 and olmo2 may have no window
  const uint32_t layers = model.shape.layers;
  uint32_t window = 0, period = facts.period;
  THIMBLE_TRY(read_count(gguf, key, kMaxPositions, or_none(facts.length), window));
  std::vector<bool> has_window(layers);
  const GgufValue* given = gguf.find(pattern);
  if (given && given->is_array && facts.lists_layers) {
    THIMBLE_TRY(check_by_layer(gguf, pattern, sizes.blocks()));
    if (given->type != GgufType::kBool)
      return error(Code::kFormat, "%s: the elements of key %s are not bools", gguf.name().c_str(),
                   in_quotes(pattern).c_str());
    for (uint32_t i = 0; i < layers; ++i) has_window[i] = given->bytes[i] != std::byte{0};
  } else {
    // If the architecture has a usual period, other runtimes ignore a pattern that lists every layer.
    if (given && given->is_array && facts.period) {
      THIMBLE_TRY(check_by_layer(gguf, pattern, sizes.blocks()));
    } else {
      THIMBLE_LET(number, with_default(get_number(gguf, pattern), 1));
      if (number == 0)
        period = UINT32_MAX;  // every layer has a window
      else
        THIMBLE_TRY(read_count(gguf, pattern, given ? layers : kMaxLayers, or_none(facts.period), period));
    }
    for (uint32_t i = 0; i < layers; ++i)
      has_window[i] = period == UINT32_MAX || (facts.first_is_full ? i : i + 1) % period != 0;
  }
  bool some = false;
  for (uint32_t i = 0; i < layers; ++i)
    for (Mixer& mixer : model.layers[i].mixers)
      if (auto* attention = std::get_if<AttentionMixer>(&mixer); attention && has_window[i])
        attention->window = window, some = true;
  if (!some) return {};
  if (family.rotates == Rotates::kWindows)
    for (uint32_t i = 0; i < layers; ++i)
      for (Mixer& mixer : model.layers[i].mixers)
        if (auto* attention = std::get_if<AttentionMixer>(&mixer))
          attention->rotates = has_window[i] || i < sizes.dense_layers;
  return check_window_shape(gguf, prefix, model);
}

// Warns about a window if the architecture has none.
Status pass_over_window(const Gguf& gguf, const Family& family, Model& model) {
  THIMBLE_LET(window,
              with_default(get_number(gguf, std::string(family.name) + ".attention.sliding_window"), 0));
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
Status refuse_ollamas_gpt_oss(const Gguf& gguf, const Family& family) {
  if (std::string_view(family.name) != "gpt-oss" && std::string_view(family.name) != "gptoss") return {};
  if (!gguf.tensor("blk.0.attn_out.weight")) return {};
  return error(Code::kUnsupported,
               "%s was written by Ollama, whose files of gpt-oss lay out the experts in a way that is not "
               "read; use one that llama.cpp wrote",
               gguf.name().c_str());
}

// Loads the kind of the norms, and their epsilon.
Status load_norm_kind(const Gguf& gguf, const Family& family, Model& model) {
  const std::string attention = std::string(family.name) + ".attention.",
                    rms = attention + "layer_norm_rms_epsilon";
  const bool has_rms = gguf.find(rms);
  model.norms_center =
      family.norm_kind == NormKind::kLayer || (family.norm_kind == NormKind::kByEpsilon && !has_rms);
  const bool of_layer = model.norms_center || (family.norm_kind == NormKind::kRmsOfLayer && !has_rms);
  const std::string key = of_layer ? attention + "layer_norm_epsilon" : rms;
  THIMBLE_LET(epsilon, gguf.need_float(key));
  if (!(epsilon > 0 && epsilon < 1))
    return error(Code::kFormat, "%s: key %s is %g, where 0 to 1 is possible", gguf.name().c_str(),
                 in_quotes(key).c_str(), epsilon);
  model.norm_epsilon = static_cast<float>(epsilon);
  return {};
}

}  // namespace

Status load_weights(const Gguf& gguf, Model& model) {
  THIMBLE_LET(family, find_family(gguf));
  THIMBLE_TRY(refuse_ollamas_gpt_oss(gguf, family));
  const std::string prefix = family.name;
  model.act = family.act;
  model.rope.pairing = family.pairing;
  if (family.loads) {
    THIMBLE_TRY(refuse_what_would_change_the_result(gguf, family));
    THIMBLE_TRY(load_norm_kind(gguf, family, model));
    return family.loads(gguf, family, model);
  }

  TensorSource tensors(gguf);
  THIMBLE_LET(sizes, load_sizes(gguf, family, tensors, model));
  for (uint32_t i = 0; i < sizes.draft_layers; ++i)
    tensors.skip("blk." + std::to_string(sizes.layers.size() + i) + ".");
  model.shape = largest(sizes);
  const ModelShape& shape = model.shape;
  THIMBLE_TRY(refuse_what_would_change_the_result(gguf, family));
  THIMBLE_TRY(load_scales(gguf, family, family.latent ? sizes.latent.query_dim : shape.head_dim, model));
  const Windows& windows = family.windows;
  const bool windowed = windows.layers
                            ? windows.layers == shape.layers
                            : windows.period || windows.required ||
                                  gguf.find(prefix + ".attention.sliding_window_pattern") != nullptr;
  if (!windowed) THIMBLE_TRY(pass_over_window(gguf, family, model));
  THIMBLE_TRY(load_norm_kind(gguf, family, model));
  THIMBLE_TRY(load_rope(gguf, prefix, family.rope, tensors, model));
  if (!model.query_period) model.query_period = model.rope.original_context;
  THIMBLE_LET(embedding, tensors.table("token_embd.weight", shape.vocab, shape.d_model));
  // Files of lfm2 call the last norm so, except early ones.
  const char* const norm_of_lfm2 = "token_embd_norm.weight";
  const bool so_called = family.short_conv && tensors.has(norm_of_lfm2);
  THIMBLE_LET(output_norm, tensors.vector(so_called ? norm_of_lfm2 : "output_norm.weight", shape.d_model));
  model.token_embedding = embedding, model.output_norm = output_norm, model.output = embedding;
  if (family.own_output || tensors.has("output.weight")) {
    THIMBLE_LET(output, tensors.matrix("output.weight", shape.vocab, shape.d_model));
    model.output = output;
  }
  // Files of granite without positions are marked in this way.
  bool rotates = family.rotates != Rotates::kNoLayer;
  if (family.scales == Scales::kGranite) {
    THIMBLE_LET(finetuned, with_default(gguf.get_bool(prefix + ".rope.scaling.finetuned"), true));
    rotates = finetuned;
  }
  for (uint32_t i = 0; i < shape.layers; ++i) {
    THIMBLE_LET(layer, load_layer(gguf, tensors, i, sizes.layers[i], family, sizes, model));
    for (Mixer& mixer : layer.mixers) {
      auto* const attention = std::get_if<AttentionMixer>(&mixer);
      if (!attention) continue;
      attention->rotates = rotates && (family.rotates != Rotates::kThreeOfFour || (i + 1) % 4 != 0);
      attention->owner = attention->last_reader = i;
      attention->first_run = static_cast<uint32_t>(model.layer_of_run.size());
      model.layer_of_run.insert(model.layer_of_run.end(), attention->kv_heads, i);
    }
    for (const Mixer& mixer : layer.mixers)
      if (const auto* m = std::get_if<SsmMixer>(&mixer)) {
        model.shape.ssm_heads = m->heads;
        model.shape.mixer_in = m->first_cols();
        model.shape.mixer_out = m->last_cols();
      }
    model.layers.push_back(std::move(layer));
  }
  if (windowed) THIMBLE_TRY(load_windows(gguf, family, sizes, model));
  if (family.drafts && tensors.has_any("blk." + std::to_string(shape.layers) + ".nextn.")) {
    auto block = load_draft_block(gguf, tensors, family, sizes, model);
    if (block.ok())
      model.draft_block = std::move(*block);
    else
      model.description_of_draft_block_error = block.status().message();
  }
  return tensors.all_taken();
}

}  // namespace thimble
