// The ops of the Vulkan backend, one function and one file each, called while a program is recorded: they
// choose shader, constants and grid.
#pragma once

#include <span>

#include "backends/kv_formats.h"
#include "backends/vulkan/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

#define THIMBLE_DECLARE_OP(Type, name, backends) void name(Recording&, const Type&);
THIMBLE_OPS(THIMBLE_DECLARE_OP)
#undef THIMBLE_DECLARE_OP

// Whether keys or values have blocks, so that a variant of the shader is needed; v may be absent.
inline bool has_kv_blocks(const KvArray& k, const KvArray& v) {
  return has_kv_blocks(k.type) || (v && has_kv_blocks(v.type));
}

// Ops that are recorded together.

// One, or several that stand side by side. `prepared`: null, or the norm that makes their x and is made here
// from what linear_before() left; then the siblings read the same x, wherever they write to.
void linear(Recording&, std::span<const Linear> siblings, const RmsNorm* prepared);
void glu(Recording&, const Glu&, const RmsNorm* prepared);
// A linear whose y the norm reads, in a program of one row: what it leaves in scratch is for the products of
// the norm, which follow.
void linear_before(Recording&, const Linear&, const RmsNorm&);
// Both, where the device can be shown all experts at once and gates and ups are of one type; else false, and
// nothing.
bool routed_expert_glu(Recording&, const Route&, const ExpertGlu&);
// An expert_linear whose y the norm reads, where the device can be shown all experts at once; else false, and
// nothing.
bool expert_linear_before(Recording&, const ExpertLinear&, const RmsNorm&);
// A token's append, and the norms of its queries and keys before it, where the device can be shown a whole
// layer; else false, and nothing.
bool norm_append(Recording&, const RmsNorm& q, const RmsNorm& k, const KvAppend&);
// `leaves_parts`: of the log-sum-exps, to the vote, which follows. `clears`: what becomes zeros on the way,
// where a step selects.
void token_score(Recording&, const TokenScore&, bool leaves_parts, const View& clears);
// What it leaves at the beginning of scratch: [query heads][kMostScoreParts]{maximum, sum}; and what it needs
// there.
uint64_t score_parts_bytes(uint32_t query_heads);
uint64_t score_bytes(const Recording&, const TokenScoreParams&);

// Whether `list` is made of the votes of `vote`, and is so short that the two are recorded as one.
bool lists_votes(const Limits&, const Vote& vote, const TopK& list);
// `score`: null, or what makes the scores of the vote and is not recorded yet.
void vote_top_k(Recording&, const TokenScore* score, const Vote&, const TopK&);

// Whether there are shaders for an op, with its types and parameters.
bool supports(const Op&, const Limits&);

// The widest heads that attention takes on such a device, and the widest values: a thread of attend_pool.comp
// adds up four channels.
uint32_t most_head_dim(const Limits&);
inline constexpr uint32_t kMostValueCols = 4 * 128;

// The shared memory of attend_all.
uint32_t attend_all_shared_bytes(uint32_t head_dim);

// Bytes of Recording::scratch() that an op needs for such a session; an op without a function here needs
// none.
uint64_t product_scratch(const ModelShape&, const SessionShape&, const Limits&);  // linear, glu
uint64_t route_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t expert_scratch(const ModelShape&, const SessionShape&, const Limits&);  // expert_linear
uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t norm_scratch(const ModelShape&, const SessionShape&, const Limits&);  // linear, glu of a norm
uint64_t attention_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t attend_all_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t delta_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t ssm_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t token_score_scratch(const ModelShape&, const SessionShape&, const Limits&);  // page_score too
uint64_t vote_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t top_k_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t label_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t kv_recall_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t vote_top_k_scratch(const ModelShape&, const SessionShape&, const Limits&);

}  // namespace thimble::vulkan
