#include "runtime/model/delta_net.h"

namespace thimble {

Result<DeltaNetSizes> load_delta_net_sizes(const Gguf& gguf, const std::string& prefix) {
  DeltaNetSizes s;
  uint32_t cols = 0;
  const auto count = [&](const char* key, uint64_t max, uint32_t& to) {
    return read_count(gguf, prefix + "ssm." + key, max, std::nullopt, to);
  };
  THIMBLE_TRY(count("group_count", kMaxHeads, s.key_heads));
  THIMBLE_TRY(count("time_step_rank", kMaxHeads, s.value_heads));
  THIMBLE_TRY(count("state_size", kMaxHeadDim, s.width));
  THIMBLE_TRY(count("conv_kernel", kMaxHeadDim, s.taps));
  THIMBLE_TRY(count("inner_size", kMaxWidth, cols));
  if (s.value_heads % s.key_heads != 0)
    return error(Code::kFormat, "%s: %u value heads cannot share %u key heads evenly", gguf.name().c_str(),
                 s.value_heads, s.key_heads);
  if (uint64_t(s.value_heads) * s.width != cols)
    return error(Code::kFormat, "%s: key '%sssm.inner_size' is %u, and %u value heads of %u channels have %u",
                 gguf.name().c_str(), prefix.c_str(), cols, s.value_heads, s.width, s.value_heads * s.width);
  if (s.width % 32 != 0 || s.width > kMostDeltaWidth)
    return error(Code::kUnsupported,
                 "%s: key '%sssm.state_size' is %u, and only 32, 64, 96 and 128 are supported",
                 gguf.name().c_str(), prefix.c_str(), s.width);
  THIMBLE_TRY(check_taps(gguf, prefix, s.taps));
  return s;
}

Result<std::vector<bool>> load_recurrent_layers(const Gguf& gguf, const std::string& prefix,
                                                uint32_t layers) {
  const std::string key = prefix + "attention.recurrent_layers";
  THIMBLE_LET(given, gguf.get_bools(key));
  if (given) {
    THIMBLE_TRY(check_by_layer(gguf, key, layers));
    return *given;
  }
  uint32_t interval = 0;
  THIMBLE_TRY(read_count(gguf, prefix + "full_attention_interval", kMaxLayers, 4, interval));
  std::vector<bool> recurrent;
  for (uint32_t i = 0; i < layers; ++i) recurrent.push_back((i + 1) % interval != 0);
  return recurrent;
}

namespace {

// Loads queries, keys, values and the output's gate. Early files of qwen3next have them in one matrix, by key
// head.
Status load_inputs(TensorSource& tensors, const std::string& block, uint32_t d_model, DeltaNetMixer& m,
                   Model& model) {
  const std::string mixed = block + "ssm_in.weight";
  if (!tensors.has(mixed)) {
    THIMBLE_SET(m.qkv, tensors.matrix(block + "attn_qkv.weight", m.channels(), d_model));
    THIMBLE_SET(m.z, tensors.matrix(block + "attn_gate.weight", m.value_cols(), d_model));
    return {};
  }
  THIMBLE_LET(by_head, tensors.matrix(mixed, m.channels() + m.value_cols(), d_model));
  const uint32_t values = m.value_cols() / m.key_heads;  // of the value heads of a key head
  const Rows of_head[] = {
      {0, m.width}, {m.width, m.width}, {2 * m.width, values}, {2 * m.width + values, values}};
  std::vector<Rows> rows;
  for (const Rows& part : of_head)
    for (uint32_t head = 0; head < m.key_heads; ++head)
      rows.push_back({head * 2 * (m.width + values) + part.first, part.count});
  THIMBLE_LET(all, reorder(by_head, rows, model));
  m.qkv = all.row_range(0, m.channels());
  m.z = all.row_range(m.channels(), m.value_cols());
  return {};
}

// Loads the matrices of the two numbers that each value head gets. Files of qwen3next have them in one
// matrix, by key head.
Status load_gates(TensorSource& tensors, const std::string& block, uint32_t d_model, DeltaNetMixer& m,
                  Model& model) {
  const std::string mixed = block + "ssm_ba.weight";
  if (!tensors.has(mixed)) {
    THIMBLE_SET(m.beta, tensors.matrix(block + "ssm_beta.weight", m.value_heads, d_model));
    THIMBLE_SET(m.alpha, tensors.matrix(block + "ssm_alpha.weight", m.value_heads, d_model));
    return {};
  }
  THIMBLE_LET(by_head, tensors.matrix(mixed, 2 * uint64_t(m.value_heads), d_model));
  const uint32_t group = m.value_heads / m.key_heads;
  std::vector<Rows> rows;
  for (const uint32_t first : {0u, group})
    for (uint32_t head = 0; head < m.key_heads; ++head) rows.push_back({head * 2 * group + first, group});
  THIMBLE_LET(all, reorder(by_head, rows, model));
  m.beta = all.row_range(0, m.value_heads);
  m.alpha = all.row_range(m.value_heads, m.value_heads);
  return {};
}

}  // namespace

Result<DeltaNetMixer> load_delta_net(TensorSource& tensors, const std::string& block, const Family& family,
                                     const DeltaNetSizes& sizes, Model& model) {
  const uint32_t d_model = model.shape.d_model;
  DeltaNetMixer m{.key_heads = sizes.key_heads,
                  .value_heads = sizes.value_heads,
                  .width = sizes.width,
                  .tiled = family.delta_net == DeltaNetHeads::kTiled};
  THIMBLE_TRY(load_inputs(tensors, block, d_model, m, model));
  THIMBLE_TRY(load_gates(tensors, block, d_model, m, model));
  THIMBLE_SET(m.conv, tensors.floats(block + "ssm_conv1d.weight", m.channels(), sizes.taps));
  THIMBLE_SET(m.a, tensors.vector(block + "ssm_a", m.value_heads));
  THIMBLE_SET(m.dt, tensors.vector(block + "ssm_dt.bias", m.value_heads));
  THIMBLE_SET(m.norm, tensors.vector(block + "ssm_norm.weight", m.width));
  THIMBLE_SET(m.out, tensors.matrix(block + "ssm_out.weight", d_model, m.value_cols()));
  return m;
}

}  // namespace thimble
