// Loads gemma4. Its layers are of two kinds, with and without a window, which differ in the number and width
// of their heads and in their rotation. The last layers may attend to the keys of earlier ones. Layers may
// have experts besides their dense feed-forward, and a branch that reads the token itself.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/model/families.h"

namespace thimble {
namespace {

// What the loader reads from the keys before it loads layers.
struct Sizes {
  uint32_t layers = 0, d_model = 0, vocab = 0;
  uint32_t window = 0;
  uint32_t full_dim = 0, window_dim = 0;  // channels of a head
  uint32_t first_reader = 0;              // layers from here on have no keys of their own
  uint32_t token_width = 0;               // of a layer's token branch; 0: layers have none
  std::vector<bool> has_window;           // for each layer
  RouteParams route = {};                 // of layers with experts
  uint32_t expert_width = 0;
};

class Loader {
 public:
  Loader(const Gguf& gguf, const Family& family, Model& model)
      : gguf_(gguf), prefix_(std::string(family.name) + "."), tensors_(gguf), model_(model) {}

  Status load();

 private:
  Status read_sizes();
  Status read_windows();
  Status read_experts();
  Status read_scales();
  Status load_layer(uint32_t index);
  Result<AttentionMixer> load_attention(uint32_t index);
  Result<Dense> load_dense(uint32_t index);
  Result<Experts> load_experts(uint32_t index, const Dense& dense);
  Result<TokenBranch> load_token_branch(uint32_t index);
  Status load_scale_of_layer(uint32_t index, float& scale);
  ModelShape largest() const;

  std::string block(uint32_t index) const { return "blk." + std::to_string(index) + "."; }
  Status count(const char* key, uint64_t max, std::optional<uint64_t> fallback, uint32_t& to) const {
    return read_count(gguf_, prefix_ + key, max, fallback, to);
  }
  Status count_of_layer(const char* key, uint32_t layer, uint64_t max, uint32_t& to) const {
    return read_count_of_layer(gguf_, prefix_ + key, layer, sizes_.layers, max, std::nullopt, false, to);
  }
  // Reads a count that may be 0, and is 0 if the file lacks the key.
  Status count_or_0(const char* key, uint64_t max, uint32_t& to) const {
    THIMBLE_LET(value, with_default(gguf_.get_uint(prefix_ + key), 0));
    return value ? count(key, max, std::nullopt, to) : Status();
  }

  const Gguf& gguf_;
  const std::string prefix_;
  TensorSource tensors_;
  Model& model_;
  Sizes sizes_;
  Tensor project_, project_norm_;  // of the token branches of all layers
};

// Reads the number of channels of a head, which keys and values share.
Status read_head_dim(const Gguf& gguf, const std::string& key, const std::string& value, uint32_t& dim) {
  uint32_t value_dim = 0;
  THIMBLE_TRY(read_count(gguf, key, kMaxHeadDim, std::nullopt, dim));
  THIMBLE_TRY(read_count(gguf, value, kMaxHeadDim, std::nullopt, value_dim));
  if (dim == value_dim) return {};
  return error(Code::kUnsupported,
               "%s: keys of %u and values of %u channels are not supported; they must be equal",
               gguf.name().c_str(), dim, value_dim);
}

Status Loader::read_sizes() {
  THIMBLE_TRY(count("context_length", kMaxPositions, std::nullopt, model_.info.context_length));
  THIMBLE_TRY(count("block_count", kMaxLayers, std::nullopt, sizes_.layers));
  THIMBLE_TRY(count("embedding_length", kMaxWidth, std::nullopt, sizes_.d_model));
  THIMBLE_TRY(count("attention.sliding_window", kMaxPositions, std::nullopt, sizes_.window));
  const std::string attention = prefix_ + "attention.";
  THIMBLE_TRY(read_head_dim(gguf_, attention + "key_length", attention + "value_length", sizes_.full_dim));
  THIMBLE_TRY(
      read_head_dim(gguf_, attention + "key_length_swa", attention + "value_length_swa", sizes_.window_dim));
  uint32_t readers = 0;
  THIMBLE_TRY(count_or_0("attention.shared_kv_layers", sizes_.layers - 1, readers));
  sizes_.first_reader = sizes_.layers - readers;
  THIMBLE_TRY(count_or_0("embedding_length_per_layer_input", kMaxWidth / sizes_.layers, sizes_.token_width));
  THIMBLE_TRY(read_windows());
  const GgufTensor* embedding = gguf_.tensor("token_embd.weight");
  if (!embedding)
    return error(Code::kFormat, "%s lacks the tensor 'token_embd.weight'", gguf_.name().c_str());
  if (embedding->shape[1] > INT32_MAX)  // token ids are int32
    return error(Code::kFormat, "%s: tensor 'token_embd.weight' has too many rows", gguf_.name().c_str());
  sizes_.vocab = static_cast<uint32_t>(embedding->shape[1]);
  return read_experts();
}

// Reads which layers have a window: a bool for each layer, or one for all.
Status Loader::read_windows() {
  const std::string key = prefix_ + "attention.sliding_window_pattern";
  const GgufValue* value = gguf_.find(key);
  if (!value) return gguf_.lacks(key);
  if (value->type != GgufType::kBool)
    return error(Code::kFormat, "%s: key %s does not say which layers have a window", gguf_.name().c_str(),
                 in_quotes(key).c_str());
  if (value->is_array) THIMBLE_TRY(check_by_layer(gguf_, key, sizes_.layers));
  for (uint32_t i = 0; i < sizes_.layers; ++i)
    sizes_.has_window.push_back(value->bytes[value->is_array ? i : 0] != std::byte{0});
  return {};
}

Status Loader::read_experts() {
  uint32_t experts = 0, chosen = 0;
  THIMBLE_TRY(count_or_0("expert_count", kMaxExperts, experts));
  if (!experts) return {};
  THIMBLE_TRY(count("expert_used_count", experts, std::nullopt, chosen));
  THIMBLE_TRY(count("expert_feed_forward_length", kMaxWidth, std::nullopt, sizes_.expert_width));
  sizes_.route = {.experts = experts, .chosen = chosen, .kind = kRouteSoftmax, .share = 1, .scale = 1};
  return {};
}

// Without the key, logits are capped all the same.
Status Loader::read_scales() {
  constexpr double kCap = 30;
  const std::string key = prefix_ + "final_logit_softcapping";
  THIMBLE_LET(cap, with_default(gguf_.get_float(key), kCap));
  if (!std::isfinite(cap) || cap < 0)
    return error(Code::kFormat, "%s: key %s is %g instead of a positive number or 0", gguf_.name().c_str(),
                 in_quotes(key).c_str(), cap);
  model_.logit_cap = static_cast<float>(cap);
  model_.embedding_scale = std::sqrt(float(sizes_.d_model));
  model_.attention_scale = 1;  // the norms of queries and keys contain it
  return {};
}

Result<AttentionMixer> Loader::load_attention(uint32_t index) {
  const std::string in = block(index);
  const bool windowed = sizes_.has_window[index];
  AttentionMixer m{.head_dim = windowed ? sizes_.window_dim : sizes_.full_dim,
                   .owner = index,
                   .last_reader = index,
                   .window = windowed ? sizes_.window : 0,
                   .norms_v = true};
  const uint32_t d = sizes_.d_model;
  THIMBLE_TRY(count_of_layer("attention.head_count", index, kMaxHeads, m.heads));
  if (index < sizes_.first_reader) {
    THIMBLE_TRY(count_of_layer("attention.head_count_kv", index, m.heads, m.kv_heads));
    THIMBLE_SET(m.k, tensors_.matrix(in + "attn_k.weight", m.kv_cols(), d));
    THIMBLE_SET(m.k_norm, tensors_.vector(in + "attn_k_norm.weight", m.head_dim));
    if (tensors_.has(in + "attn_v.weight"))
      THIMBLE_SET(m.v, tensors_.matrix(in + "attn_v.weight", m.kv_cols(), d));
    m.first_run = static_cast<uint32_t>(model_.layer_of_run.size());
    model_.layer_of_run.insert(model_.layer_of_run.end(), m.kv_heads, index);
  } else {  // it attends to the keys of the last layer of its kind that has some
    const auto has =
        std::find(sizes_.has_window.rend() - sizes_.first_reader, sizes_.has_window.rend(), windowed);
    if (has == sizes_.has_window.rend())
      return error(Code::kFormat,
                   "%s: layer %u attends to the keys of an earlier layer of its kind, and there is none",
                   gguf_.name().c_str(), index);
    m.owner = static_cast<uint32_t>(sizes_.has_window.rend() - has) - 1;
    auto& owner = std::get<AttentionMixer>(model_.layers[m.owner].mixers[0]);
    owner.last_reader = index;
    m.kv_heads = owner.kv_heads;
    m.first_run = owner.first_run;
    for (const char* unused : {"attn_k.", "attn_k_norm.", "attn_v."}) tensors_.skip(in + unused);
  }
  if (m.heads % m.kv_heads != 0)
    return error(Code::kFormat, "%s: %u query heads cannot share %u key and value heads evenly",
                 gguf_.name().c_str(), m.heads, m.kv_heads);
  THIMBLE_SET(m.q, tensors_.matrix(in + "attn_q.weight", m.q_cols(), d));
  THIMBLE_SET(m.q_norm, tensors_.vector(in + "attn_q_norm.weight", m.head_dim));
  THIMBLE_SET(m.output, tensors_.matrix(in + "attn_output.weight", d, m.q_cols()));
  return m;
}

Result<Dense> Loader::load_dense(uint32_t index) {
  const std::string in = block(index);
  uint32_t width = 0;
  THIMBLE_TRY(count_of_layer("feed_forward_length", index, kMaxWidth, width));
  Dense f;
  THIMBLE_SET(f.gate, tensors_.matrix(in + "ffn_gate.weight", width, sizes_.d_model));
  THIMBLE_SET(f.up, tensors_.matrix(in + "ffn_up.weight", width, sizes_.d_model));
  THIMBLE_SET(f.down, tensors_.matrix(in + "ffn_down.weight", sizes_.d_model, width));
  return f;
}

// The dense feed-forward is the expert that processes every token.
Result<Experts> Loader::load_experts(uint32_t index, const Dense& dense) {
  const std::string in = block(index);
  const uint32_t d = sizes_.d_model, width = sizes_.expert_width, count = sizes_.route.experts;
  Experts f{.route = sizes_.route, .shared = dense};
  THIMBLE_SET(f.router, tensors_.matrix(in + "ffn_gate_inp.weight", count, d));
  THIMBLE_SET(f.router_norm, tensors_.vector(in + "ffn_gate_inp.scale", d));
  if (const std::string fused = in + "ffn_gate_up_exps.weight"; tensors_.has(fused)) {
    THIMBLE_SET(f.gate, tensors_.matrices(fused, count, 2 * uint64_t(width), d));
    THIMBLE_SET(f.gate_scale, tensors_.scales(fused, count));
    f.up_scale = f.gate_scale;
  } else {
    THIMBLE_SET(f.gate, tensors_.matrices(in + "ffn_gate_exps.weight", count, width, d));
    THIMBLE_SET(f.up, tensors_.matrices(in + "ffn_up_exps.weight", count, width, d));
    THIMBLE_SET(f.gate_scale, tensors_.scales(in + "ffn_gate_exps.weight", count));
    THIMBLE_SET(f.up_scale, tensors_.scales(in + "ffn_up_exps.weight", count));
  }
  THIMBLE_SET(f.down, tensors_.matrices(in + "ffn_down_exps.weight", count, d, width));
  THIMBLE_SET(f.factor, tensors_.vector_if_any(in + "ffn_down_exps.scale", count));
  THIMBLE_SET(f.norm, tensors_.vector(in + "pre_ffw_norm_2.weight", d));
  THIMBLE_SET(f.post_norm, tensors_.vector(in + "post_ffw_norm_2.weight", d));
  THIMBLE_SET(f.shared_post_norm, tensors_.vector(in + "post_ffw_norm_1.weight", d));
  return f;
}

Result<TokenBranch> Loader::load_token_branch(uint32_t index) {
  TokenBranch b;
  if (!sizes_.token_width) return b;
  const std::string in = block(index);
  const uint32_t width = sizes_.token_width;
  b.project = project_.row_range(index * width, width);
  b.project_norm = project_norm_;
  THIMBLE_SET(b.gate, tensors_.matrix(in + "inp_gate.weight", width, sizes_.d_model));
  THIMBLE_SET(b.out, tensors_.matrix(in + "proj.weight", sizes_.d_model, width));
  THIMBLE_SET(b.out_norm, tensors_.vector(in + "post_norm.weight", sizes_.d_model));
  return b;
}

Status Loader::load_scale_of_layer(uint32_t index, float& scale) {
  const std::string name = block(index) + "layer_output_scale.weight";
  THIMBLE_LET(tensor, tensors_.vector_if_any(name, 1));
  if (!tensor) return {};
  std::memcpy(&scale, tensor.data, sizeof scale);
  if (std::isfinite(scale)) return {};
  return error(Code::kFormat, "%s: tensor '%s' is %g instead of a number", gguf_.name().c_str(), name.c_str(),
               static_cast<double>(scale));
}

Status Loader::load_layer(uint32_t index) {
  const std::string in = block(index);
  const uint32_t d = sizes_.d_model;
  Layer layer;
  THIMBLE_SET(layer.norm, tensors_.vector(in + "attn_norm.weight", d));
  THIMBLE_SET(layer.post_norm, tensors_.vector(in + "post_attention_norm.weight", d));
  THIMBLE_SET(layer.ffn_norm, tensors_.vector(in + "ffn_norm.weight", d));
  THIMBLE_SET(layer.post_ffn_norm, tensors_.vector(in + "post_ffw_norm.weight", d));
  THIMBLE_LET(attention, load_attention(index));
  layer.mixers.emplace_back(attention);
  THIMBLE_LET(dense, load_dense(index));
  layer.feed_forward = dense;
  if (sizes_.route.experts && tensors_.has(in + "ffn_gate_inp.weight"))
    THIMBLE_SET(layer.feed_forward, load_experts(index, dense));
  THIMBLE_SET(layer.token_branch, load_token_branch(index));
  THIMBLE_TRY(load_scale_of_layer(index, layer.scale));
  model_.layers.push_back(std::move(layer));
  return {};
}

// The largest sizes of any layer.
ModelShape Loader::largest() const {
  ModelShape s = model_.shape;
  for (const Layer& layer : model_.layers) {
    const AttentionMixer& m = *layer.attention();
    s.heads = std::max(s.heads, m.heads);
    s.kv_heads = std::max(s.kv_heads, m.kv_heads);
    s.head_dim = std::max(s.head_dim, m.head_dim);
    if (const auto* experts = std::get_if<Experts>(&layer.feed_forward)) {
      s.experts = experts->route.experts;
      s.chosen_experts = experts->route.chosen;
      s.d_ff = experts->d_ff();
      s.d_ff_shared = std::max(s.d_ff_shared, experts->shared.down.cols);
    } else if (!s.experts) {
      s.d_ff = std::max(s.d_ff, std::get<Dense>(layer.feed_forward).down.cols);
    }
  }
  return s;
}

Status Loader::load() {
  THIMBLE_TRY(read_sizes());
  THIMBLE_TRY(read_scales());
  model_.shape = {
      .layers = sizes_.layers, .d_model = sizes_.d_model, .head_dim = sizes_.full_dim, .vocab = sizes_.vocab};
  const uint32_t d = sizes_.d_model, width = sizes_.token_width;
  const RopeRules rope{.scales_windows = false, .window_base = 10000, .window_head_dim = sizes_.window_dim};
  THIMBLE_TRY(load_rope(gguf_, prefix_.substr(0, prefix_.size() - 1), rope, tensors_, model_));
  THIMBLE_SET(model_.token_embedding, tensors_.table("token_embd.weight", sizes_.vocab, d));
  THIMBLE_SET(model_.output_norm, tensors_.vector("output_norm.weight", d));
  model_.output = model_.token_embedding;
  if (tensors_.has("output.weight"))
    THIMBLE_SET(model_.output, tensors_.matrix("output.weight", sizes_.vocab, d));
  if (width) {
    const uint32_t all = width * sizes_.layers;
    THIMBLE_SET(model_.layer_embedding, tensors_.table("per_layer_token_embd.weight", sizes_.vocab, all));
    THIMBLE_SET(project_, tensors_.matrix("per_layer_model_proj.weight", all, d));
    THIMBLE_SET(project_norm_, tensors_.vector("per_layer_proj_norm.weight", width));
    const DTypeInfo& type = dtype_info(model_.layer_embedding.type);
    if (width % type.block != 0)
      return error(
          Code::kUnsupported,
          "%s: tensor 'per_layer_token_embd.weight' cannot be %s, whose blocks have %u elements, and a "
          "layer uses %u; use another file",
          gguf_.name().c_str(), type.name, type.block, width);
  }
  for (uint32_t i = 0; i < sizes_.layers; ++i) THIMBLE_TRY(load_layer(i));
  model_.shape = largest();
  return tensors_.all_taken();
}

}  // namespace

Status load_gemma4(const Gguf& gguf, const Family& family, Model& model) {
  return Loader(gguf, family, model).load();
}

}  // namespace thimble
