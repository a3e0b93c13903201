// The ops of the Vulkan backend, one function and one file each, called while a program is recorded: they
// choose shader, constants and grid.
#pragma once

#include <span>

#include "backends/vulkan/host/recording.h"
#include "base/bits.h"

namespace thimble::vulkan {

void embed(Recording&, const Embed&);
void rms_norm(Recording&, const RmsNorm&);
// One, or several that stand side by side. `prepared`: null, or the norm that makes their x and is made here
// from what linear_before() left; then the siblings read the same x, wherever they write to.
void linear(Recording&, std::span<const Linear> siblings, const RmsNorm* prepared = nullptr);
void glu(Recording&, const Glu&, const RmsNorm* prepared = nullptr);
// A linear whose y the norm reads, in a program of one row: what it leaves in scratch is for the products of
// the norm, which follow.
void linear_before(Recording&, const Linear&, const RmsNorm&);
void scale(Recording&, const Scale&);
void route(Recording&, const Route&);
void expert_glu(Recording&, const ExpertGlu&);
// Both, where the device can be shown all experts at once and gates and ups are of one type; else false, and
// nothing.
bool routed_expert_glu(Recording&, const Route&, const ExpertGlu&);
void expert_linear(Recording&, const ExpertLinear&);
// The same of an expert_linear, where the device can be shown all experts at once; else false, and nothing.
bool expert_linear_before(Recording&, const ExpertLinear&, const RmsNorm&);
void activation(Recording&, const Activation&);
void kv_append(Recording&, const KvAppend&);
// A token's, and the norms of its queries and keys before it, where the device can be shown a whole layer;
// else false, and nothing.
bool norm_append(Recording&, const RmsNorm& q, const RmsNorm& k, const KvAppend&);
void sink_score(Recording&, const SinkScore&);
void cis_store(Recording&, const CisStore&);
void given_score(Recording&, const GivenScore&);
void kv_view(Recording&, const KvView&);
void attention(Recording&, const Attention&);
void kv_compact(Recording&, const KvCompact&);
void kv_merge(Recording&, const KvMerge&);
void query_gate(Recording&, const QueryGate&);
// `leaves_parts`: of the log-sum-exps, to the vote, which follows. `clears`: what becomes zeros on the way,
// where a step selects.
void token_score(Recording&, const TokenScore&, bool leaves_parts = false, const View& clears = {});
// What it leaves at the beginning of scratch: [query heads][kMostScoreParts]{maximum, sum}; and what it needs
// there.
uint64_t score_parts_bytes(uint32_t query_heads);
uint64_t score_bytes(const Recording&, const TokenScoreParams&);
void page_bounds(Recording&, const PageBounds&);
void key_diff(Recording&, const KeyDiff&);
void query_score(Recording&, const QueryScore&);
void scatter_add(Recording&, const ScatterAdd&);
void page_score(Recording&, const PageScore&);
void vote(Recording&, const Vote&);
void top_k(Recording&, const TopK&);
void label(Recording&, const Label&);
void arg_max(Recording&, const ArgMax&);
void log_prob(Recording&, const LogProb&);
void copy(Recording&, const Copy&);

// Whether `list` is made of the votes of `vote`, and is so short that the two are recorded as one.
bool lists_votes(const Limits&, const Vote& vote, const TopK& list);
// `score`: null, or what makes the scores of the vote and is not recorded yet.
void vote_top_k(Recording&, const TokenScore* score, const Vote&, const TopK&);

// Whether there are shaders for an op, with its types and parameters.
bool supports(const Op&, const Limits&);

// The widest heads that attention takes on such a device, and those that token_score takes: a thread of it
// turns a pair of channels, and has its units of the queries in registers.
uint32_t most_attention_head_dim(const Limits&);
inline constexpr uint32_t kMostScoreHeadDim = 256;

// Bytes of Recording::scratch() that an op needs for such a session; an op without a function here needs
// none.
uint64_t product_scratch(const ModelShape&, const SessionShape&, const Limits&);  // linear, glu
uint64_t route_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t expert_scratch(const ModelShape&, const SessionShape&, const Limits&);  // expert_linear
uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t norm_scratch(const ModelShape&, const SessionShape&, const Limits&);  // linear, glu of a norm
uint64_t attention_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t token_score_scratch(const ModelShape&, const SessionShape&, const Limits&);  // page_score too
uint64_t vote_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t top_k_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t label_scratch(const ModelShape&, const SessionShape&, const Limits&);
uint64_t vote_top_k_scratch(const ModelShape&, const SessionShape&, const Limits&);

}  // namespace thimble::vulkan
