// The shaders of the backend, one row a variant: name, file in shaders/ (without .comp), and the macros that
// it is compiled with ("A B=2"). The build reads this list too, compiles the rows of X and embeds all rows.
// Rows of XC use GL_KHR_cooperative_matrix, which many systems' compilers do not know: scripts/update-spirv
// compiles them, and spirv/ has the results. What specialisation constants can say needs no row.
#pragma once

#include <cstdint>
#include <span>

namespace thimble::vulkan {

// clang-format off
#define THIMBLE_SHADERS(X, XC) \
  X(Embed, "dense/embed", "") \
  X(RmsNorm, "dense/rms_norm", "") \
  X(Scale, "dense/scale", "") \
  X(Matvec, "dense/matvec", "") \
  X(MatvecDigits, "dense/matvec", "DIGITS") \
  X(MatvecBooks, "dense/matvec", "BOOKS") \
  X(Product, "dense/product", "") \
  X(ScaleRows, "dense/scale_rows", "") \
  X(HeadLinear, "dense/head_linear", "") \
  X(Dequantize, "dense/dequantize", "") \
  X(DequantizeExperts, "dense/dequantize", "EXPERTS") \
  XC(ProductCooperative, "dense/product_cooperative", "") \
  X(AddParts, "dense/add_parts", "") \
  X(Route, "dense/route", "") \
  X(RouteSlots, "dense/route_slots", "") \
  X(ExpertMatvec, "dense/matvec", "EXPERTS") \
  X(ExpertMatvecDigits, "dense/matvec", "EXPERTS DIGITS") \
  X(ExpertMatvecBooks, "dense/matvec", "EXPERTS BOOKS") \
  X(ExpertProduct, "dense/product", "EXPERTS") \
  XC(ExpertProductCooperative, "dense/product_cooperative", "EXPERTS") \
  X(SlotsOfRows, "dense/slots_of_rows", "") \
  X(AddExperts, "dense/add_experts", "") \
  X(Activation, "dense/activation", "") \
  X(ShortConv, "mixers/short_conv", "") \
  X(DeltaStep, "mixers/delta_step", "") \
  X(DeltaPrepare, "mixers/delta_prepare", "") \
  X(DeltaChunks, "mixers/delta_chunks", "") \
  X(GatedNorm, "mixers/gated_norm", "") \
  X(Gate, "mixers/gate", "") \
  X(SsmStep, "mixers/ssm_step", "") \
  X(SsmPrepare, "mixers/ssm_prepare", "") \
  X(SsmChunks, "mixers/ssm_chunks", "") \
  X(KvAppend, "kv/kv_append", "") \
  X(KvAppendBlocks, "kv/kv_append_blocks", "BLOCKS") \
  X(NormAppend, "kv/norm_append", "") \
  X(SinkScore, "select/sink_score", "") \
  X(CisStore, "kv/cis_store", "") \
  X(GivenScore, "kv/given_score", "") \
  X(PageBounds, "kv/page_bounds", "") \
  X(PageBoundsBlocks, "kv/page_bounds", "BLOCKS") \
  X(KeyDiff, "kv/key_diff", "") \
  X(KeyDiffBlocks, "kv/key_diff", "BLOCKS") \
  X(ScoreMix, "kv/score_mix", "") \
  X(QuerySum, "select/query_score", "") \
  X(QueryScore, "select/query_score", "SCORES") \
  X(QueryRowSum, "select/query_score_row", "") \
  X(QueryRowScore, "select/query_score_row", "SCORES") \
  X(QuerySumBlocks, "select/query_score", "BLOCKS") \
  X(QueryScoreBlocks, "select/query_score", "SCORES BLOCKS") \
  X(QueryRowSumBlocks, "select/query_score_row", "BLOCKS") \
  X(QueryRowScoreBlocks, "select/query_score_row", "SCORES BLOCKS") \
  X(QueryMerge, "select/query_merge", "") \
  X(QueryMean, "select/query_mean", "") \
  X(ScatterAdd, "select/scatter_add", "") \
  X(KvView, "kv/kv_view", "") \
  X(KvViewBlocks, "kv/kv_view", "BLOCKS") \
  X(AttendView, "attention/attend_view", "") \
  XC(AttendViewCooperative, "attention/attend_view_cooperative", "") \
  X(AttendPool, "attention/attend_pool", "") \
  X(AttendPoolSinks, "attention/attend_pool", "SINKS") \
  X(AttendPoolBlocks, "attention/attend_pool", "BLOCKS") \
  X(AttendPoolSinksBlocks, "attention/attend_pool", "SINKS BLOCKS") \
  X(AttendAllPages, "attention/attend_all_pages", "") \
  X(AttendAllQueries, "attention/attend_all_queries", "") \
  X(AttendAll, "attention/attend_all", "BLOCKS") \
  X(AttendAllJoin, "attention/attend_all_join", "") \
  X(KvCompact, "kv/kv_compact", "") \
  X(KvMerge, "kv/kv_merge", "") \
  X(KvSpill, "kv/kv_spill", "") \
  X(KvSpillEncoded, "kv/kv_spill", "ENCODES BLOCKS") \
  X(KvSpillNumbers, "kv/kv_spill", "NUMBERS") \
  X(KvSpillNumbersBlocks, "kv/kv_spill", "NUMBERS BLOCKS") \
  X(RecallLists, "kv/recall_lists", "") \
  X(RecallPlaces, "kv/recall_places", "") \
  X(RecallGaps, "kv/recall_gaps", "") \
  X(RecallRows, "kv/recall_rows", "") \
  X(RecallRowsBlocks, "kv/recall_rows", "BLOCKS") \
  X(QueryKeep, "select/query_keep", "") \
  X(QueryGate, "select/query_gate", "") \
  X(SumQueries, "select/sum_queries", "") \
  X(TokenScore, "select/token_score", "") \
  X(TokenScoreBlocks, "select/token_score", "BLOCKS") \
  XC(TokenScoreCooperative, "select/token_score_cooperative", "") \
  X(PageScore, "select/token_score", "PAGES") \
  X(Vote, "select/vote", "") \
  X(VoteCount, "select/vote_count", "") \
  X(VoteOfLayer, "select/vote_layer", "") \
  X(VotePack, "select/vote_pack", "") \
  X(VoteWindow, "select/vote_window", "") \
  X(TopK, "select/top_k", "") \
  X(TopKVotes, "select/top_k_votes", "") \
  X(TopKOfLayer, "select/top_k_layer", "") \
  X(TopKCount, "select/top_k_count", "") \
  X(TopKList, "select/top_k_list", "") \
  X(LabelGather, "select/label_gather", "") \
  X(LabelSums, "select/label_sums", "") \
  X(LabelEntries, "select/label_entries", "") \
  X(LabelSumsBlocks, "select/label_sums", "BLOCKS") \
  X(LabelEntriesBlocks, "select/label_entries", "BLOCKS") \
  X(ArgMax, "dense/arg_max", "") \
  X(LogProb, "dense/log_prob", "") \
  X(Copy, "dense/copy", "")

// clang-format on

enum class Shader : uint32_t {
#define X(name, file, defines) k##name,
  THIMBLE_SHADERS(X, X)
#undef X
      kCount
};

// The SPIR-V of a shader.
std::span<const uint32_t> shader_code(Shader shader);
// Its name in the list, for messages.
const char* shader_name(Shader shader);

}  // namespace thimble::vulkan
