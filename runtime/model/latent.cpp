#include "runtime/model/latent.h"

namespace thimble {

// Early files give the channels of a head where others give those of the pool's keys and values.
Result<LatentSizes> load_latent_sizes(const Gguf& gguf, const std::string& prefix) {
  LatentSizes s;
  const auto count = [&](const std::string& key, std::optional<uint64_t> fallback, uint32_t& to) {
    return read_count(gguf, prefix + key, kMaxHeadDim, fallback, to);
  };
  THIMBLE_TRY(count("attention.kv_lora_rank", std::nullopt, s.latent));
  THIMBLE_TRY(count("rope.dimension_count", std::nullopt, s.rotated));
  const std::string mla = gguf.find(prefix + "attention.key_length_mla") ? "_mla" : "";
  THIMBLE_TRY(count("attention.key_length" + mla, std::nullopt, s.query_dim));
  THIMBLE_TRY(count("attention.value_length" + mla, std::nullopt, s.value_dim));
  if (s.rotated >= s.query_dim)
    return error(Code::kFormat, "%s: key '%srope.dimension_count' is %u, and queries have %u channels",
                 gguf.name().c_str(), prefix.c_str(), s.rotated, s.query_dim);
  if (s.latent > kMostHeadColumns - s.rotated)
    return error(Code::kUnsupported, "%s: keys of %u and %u channels are not supported, only up to %u",
                 gguf.name().c_str(), s.rotated, s.latent, kMostHeadColumns);
  return s;
}

namespace {

// Loads queries: with one matrix, or through a narrow vector.
Status load_queries(TensorSource& tensors, const std::string& block, const Gguf& gguf, uint32_t d_model,
                    AttentionMixer& m) {
  const std::string narrow = block + "attn_q_a.weight";
  const uint32_t rows = m.heads * m.query_dim;
  if (!tensors.has(narrow)) {
    THIMBLE_SET(m.q, tensors.matrix(block + "attn_q.weight", rows, d_model));
    return {};
  }
  const auto cols = static_cast<uint32_t>(std::min(gguf.tensor(narrow)->shape[1], kMaxWidth));
  THIMBLE_SET(m.q_in, tensors.matrix(narrow, cols, d_model));
  THIMBLE_SET(m.q_in_norm, tensors.vector(block + "attn_q_a_norm.weight", cols));
  THIMBLE_SET(m.q, tensors.matrix(block + "attn_q_b.weight", rows, cols));
  return {};
}

// Loads the matrices of heads. Early files have one tensor, with the rows of a head that make its key and
// then those that make its value.
Status load_heads(TensorSource& tensors, const std::string& block, const LatentSizes& sizes,
                  AttentionMixer& m) {
  const uint32_t unrotated = sizes.query_dim - sizes.rotated;
  if (const std::string early = block + "attn_kv_b.weight"; tensors.has(early)) {
    const uint32_t rows = unrotated + sizes.value_dim;
    THIMBLE_LET(both, tensors.matrix(early, uint64_t(m.heads) * rows, sizes.latent));
    m.k_up = {.all = both, .first = 0, .head_rows = rows, .transposed = true};
    m.v_up = {.all = both, .first = unrotated, .head_rows = rows};
    return {};
  }
  THIMBLE_SET(m.k_up.all, tensors.matrices(block + "attn_k_b.weight", m.heads, sizes.latent, unrotated));
  THIMBLE_SET(m.v_up.all,
              tensors.matrices(block + "attn_v_b.weight", m.heads, sizes.value_dim, sizes.latent));
  m.k_up.head_rows = sizes.latent;
  m.v_up.head_rows = sizes.value_dim;
  return {};
}

}  // namespace

Result<AttentionMixer> load_latent(TensorSource& tensors, const std::string& block, const Gguf& gguf,
                                   uint32_t d_model, uint32_t heads, const LatentSizes& sizes) {
  AttentionMixer m{.heads = heads,
                   .kv_heads = 1,
                   .head_dim = sizes.latent + sizes.rotated,
                   .query_dim = sizes.query_dim,
                   .value_dim = sizes.value_dim};
  THIMBLE_TRY(load_queries(tensors, block, gguf, d_model, m));
  THIMBLE_LET(key, tensors.matrix(block + "attn_kv_a_mqa.weight", m.head_dim, d_model));
  m.k = key.row_range(0, sizes.latent);
  m.k_rotated = key.row_range(sizes.latent, sizes.rotated);
  THIMBLE_SET(m.k_norm, tensors.vector(block + "attn_kv_a_norm.weight", sizes.latent));
  THIMBLE_TRY(load_heads(tensors, block, sizes, m));
  THIMBLE_SET(m.output, tensors.matrix(block + "attn_output.weight", d_model, m.value_cols()));
  return m;
}

}  // namespace thimble
