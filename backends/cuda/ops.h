// The ops of the CUDA backend, one function and one file each. They run while a program is recorded and only
// launch kernels.
#pragma once

#include <span>

#include "backends/cuda/host/launch.h"

namespace thimble::cuda {

// Most matrices that multiply the same rows in one launch: q, k and v of a layer.
inline constexpr uint32_t kMostSiblings = 3;
// The widest heads that there are kernels for.
inline constexpr uint32_t kMostHeadDim = 256;

void embed(const Launch&, const Embed&);
void rms_norm(const Launch&, const RmsNorm&);
// `norm`: null, or what makes their x and was not launched before, which takes a program of one row
// (matvec.h).
void linear(const Launch&, std::span<const Linear> siblings,  // same x, x_stride, in_cols and rows
            const RmsNorm* norm);
void glu(const Launch&, const Glu&, const RmsNorm* norm);
void scale(const Launch&, const Scale&);
void route(const Launch&, const Route&);
void expert_glu(const Launch&, const ExpertGlu&);
void expert_linear(const Launch&, const ExpertLinear&);
// A token's three, or two: the linear may be null.
void routed_experts(const Launch&, const Route&, const ExpertGlu&, const ExpertLinear*);
void activation(const Launch&, const Activation&);
void kv_append(const Launch&, const KvAppend&);
// kv_append of one row, and with it what is given of the others, of which none needs what another writes.
void append_token(const Launch&, const RmsNorm& q, const RmsNorm& k, const KvAppend&);
void append_token(const Launch&, const KvAppend&, const Copy*, const QueryGate*);
void sink_score(const Launch&, const SinkScore&);
void cis_store(const Launch&, const CisStore&);
void given_score(const Launch&, const GivenScore&);
void kv_view(const Launch&, const KvView&);
void attention(const Launch&, const Attention&);
void kv_compact(const Launch&, const KvCompact&);
void kv_merge(const Launch&, const KvMerge&);
void query_gate(const Launch&, const QueryGate&);
// `keys_stay`: the program writes no keys before it but the step's own, behind all others. `makes_lse`: else
// they are left to the vote.
void token_score(const Launch&, const TokenScore&, bool keys_stay, bool makes_lse);
void page_bounds(const Launch&, const PageBounds&);
void key_diff(const Launch&, const KeyDiff&);
void query_score(const Launch&, const QueryScore&);
void scatter_add(const Launch&, const ScatterAdd&);
void page_score(const Launch&, const PageScore&);
// `scored`: null, or what makes the scores of a layer's vote and has left it the log-sum-exps.
void vote(const Launch&, const Vote&, const TokenScore* scored = nullptr);
// `vote`: null, or what makes its scores and was not launched before (can_vote()); `scored`: null, or what
// makes that vote's scores and has left it the log-sum-exps.
void top_k(const Launch&, const TopK&, const Vote* vote, const TokenScore* scored);
// Whether top_k can make these votes; makes_votes() holds.
bool can_vote(const Launch&, const VoteParams&);
void label(const Launch&, const Label&);
void arg_max(const Launch&, const ArgMax&);
void log_prob(const Launch&, const LogProb&);
void copy(const Launch&, const Copy&);

// Bytes of Launch::scratch that an op needs for such a session; an op without a function here needs none.
uint64_t dense_scratch(const ModelShape&, const SessionShape&, const Card&);  // linear, glu
uint64_t route_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t expert_scratch(const ModelShape&, const SessionShape&, const Card&);  // expert_glu, expert_linear
uint64_t attention_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t token_score_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t page_score_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t vote_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t top_k_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t label_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Card&);

}  // namespace thimble::cuda
