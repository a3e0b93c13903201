#include "runtime/model/ssm.h"

namespace thimble {

Result<SsmSizes> load_ssm_sizes(const Gguf& gguf, const std::string& prefix) {
  SsmSizes s;
  uint32_t cols = 0;
  const auto count = [&](const char* key, uint64_t max, uint32_t& to) {
    return read_count(gguf, prefix + "ssm." + key, max, std::nullopt, to);
  };
  THIMBLE_TRY(count("time_step_rank", kMaxHeads, s.heads));
  THIMBLE_TRY(count("group_count", kMaxHeads, s.groups));
  THIMBLE_TRY(count("state_size", kMaxHeadDim, s.state));
  THIMBLE_TRY(count("conv_kernel", kMaxHeadDim, s.taps));
  THIMBLE_TRY(count("inner_size", kMaxWidth, cols));
  if (s.heads % s.groups != 0)
    return error(Code::kFormat, "%s: %u Mamba heads cannot share %u groups evenly", gguf.name().c_str(),
                 s.heads, s.groups);
  if (cols % s.heads != 0)
    return error(Code::kFormat, "%s: key '%sssm.inner_size' is %u, which %u heads cannot share evenly",
                 gguf.name().c_str(), prefix.c_str(), cols, s.heads);
  s.width = cols / s.heads;
  if (s.width % 16 != 0 || s.width > kMostSsmWidth)
    return error(Code::kUnsupported,
                 "%s: Mamba heads of %u channels are not supported, only multiples of 16 up to %u",
                 gguf.name().c_str(), s.width, kMostSsmWidth);
  if (s.state % 16 != 0 || s.state > kMostSsmState)
    return error(Code::kUnsupported,
                 "%s: key '%sssm.state_size' is %u, and only multiples of 16 up to %u are supported",
                 gguf.name().c_str(), prefix.c_str(), s.state, kMostSsmState);
  THIMBLE_TRY(check_taps(gguf, prefix, s.taps));
  return s;
}

Result<SsmMixer> load_ssm(TensorSource& tensors, const std::string& block, const Family& family,
                          uint32_t d_model, const SsmSizes& sizes) {
  SsmMixer m{.heads = sizes.heads, .groups = sizes.groups, .width = sizes.width, .state = sizes.state};
  const std::string norm = block + "ssm_norm.weight";
  // A number of each head. These tensors have a dimension of 1, and no suffix.
  const auto by_head = [&](const char* name) -> Result<Tensor> {
    THIMBLE_LET(column, tensors.floats(block + name, m.heads, 1));
    return column.part(0, m.heads);
  };
  THIMBLE_SET(m.in, tensors.matrix(block + "ssm_in.weight", m.first_cols(), d_model));
  THIMBLE_SET(m.conv, tensors.floats(block + "ssm_conv1d.weight", m.channels(), sizes.taps));
  THIMBLE_SET(m.conv_bias, tensors.vector_if_any(block + "ssm_conv1d.bias", m.channels()));
  THIMBLE_SET(m.dt_bias, tensors.vector(block + "ssm_dt.bias", m.heads));
  THIMBLE_SET(m.a, by_head("ssm_a"));
  THIMBLE_SET(m.d, by_head("ssm_d"));
  if (family.ssm != SsmLayers::kAll || tensors.has(norm)) {
    THIMBLE_LET(weight, tensors.floats(norm, m.groups, m.value_cols() / m.groups));
    m.norm = weight.part(0, m.value_cols());
  }
  THIMBLE_SET(m.out, tensors.matrix(block + "ssm_out.weight", d_model, m.value_cols()));
  return m;
}

}  // namespace thimble
