// The shaders of the backend, one row a variant: name, file in shaders/ (without .comp), and the macros that
// it is compiled with ("A B=2"). The build reads this list too, compiles every row and embeds it; rows of XC
// use GL_KHR_cooperative_matrix and stay empty where the compiler does not know it. What specialisation
// constants can say needs no row.
#pragma once

#include <cstdint>
#include <span>

namespace thimble::vulkan {

// clang-format off
#define THIMBLE_SHADERS(X, XC) \
  X(Embed, "embed", "") \
  X(RmsNorm, "rms_norm", "") \
  X(Matvec, "matvec", "") \
  X(MatvecDigits, "matvec", "DIGITS") \
  X(Product, "product", "") \
  X(ScaleRows, "scale_rows", "") \
  X(Dequantize, "dequantize", "") \
  XC(ProductCooperative, "product_cooperative", "") \
  X(AddParts, "add_parts", "") \
  X(Activation, "activation", "") \
  X(KvAppend, "kv_append", "") \
  X(CisStore, "cis_store", "") \
  X(KvView, "kv_view", "") \
  X(AttendView, "attend_view", "") \
  XC(AttendViewCooperative, "attend_view_cooperative", "") \
  X(AttendPool, "attend_pool", "") \
  X(KvCompact, "kv_compact", "") \
  X(QueryGate, "query_gate", "") \
  X(SumQueries, "sum_queries", "") \
  X(TokenScore, "token_score", "") \
  X(Vote, "vote", "") \
  X(VoteCount, "vote_count", "") \
  X(VotePack, "vote_pack", "") \
  X(VoteWindow, "vote_window", "") \
  X(TopK, "top_k", "") \
  X(TopKVotes, "top_k_votes", "") \
  X(TopKCount, "top_k_count", "") \
  X(TopKList, "top_k_list", "") \
  X(ArgMax, "arg_max", "") \
  X(LogProb, "log_prob", "") \
  X(Copy, "copy", "")

// clang-format on

enum class Shader : uint32_t {
#define X(name, file, defines) k##name,
  THIMBLE_SHADERS(X, X)
#undef X
      kCount
};

// The SPIR-V of a shader; none of an XC row that this build could not compile.
std::span<const uint32_t> shader_code(Shader shader);
// Whether this build compiled the XC rows.
bool has_cooperative_shaders();
// Its name in the list, for messages.
const char* shader_name(Shader shader);

}  // namespace thimble::vulkan
