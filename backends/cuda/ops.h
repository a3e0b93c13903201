// The ops of the CUDA backend, one function and one file each. They run while a program is recorded and only
// launch kernels.
#pragma once

#include <span>

#include "backends/cuda/launch.h"

namespace thimble {
struct SharedExpert;
}

namespace thimble::cuda {

// Most matrices that multiply the same rows in one launch: qkv, z, beta and alpha of a delta_net.
inline constexpr uint32_t kMostSiblings = 4;
// The widest rows of keys that there are kernels for, and heads with values of their own: up to
// kMostNarrowHeadDim channels, or kWideHeadDim.
inline constexpr uint32_t kMostHeadDim = 576, kWideHeadDim = 512, kMostNarrowHeadDim = 256;

#define THIMBLE_DECLARE_OP(Type, name, backends) void name(const Launch&, const Type&);
THIMBLE_OPS(THIMBLE_DECLARE_OP)
#undef THIMBLE_DECLARE_OP

// Ops that are launched together.

// `norm`: null, or the op that computes their x, which then is not launched by itself. It needs a program of
// one row (matvec.h).
void linear(const Launch&, std::span<const Linear> siblings,  // same x, x_stride, in_cols and rows
            const RmsNorm* norm);
void glu(const Launch&, const Glu&, const RmsNorm* norm);
// The three ops of a single token. The linear may be null, and then there is no shared expert.
void routed_experts(const Launch&, const Route&, const ExpertGlu&, const ExpertLinear*, const SharedExpert&);
// kv_append for one row, launched together with ops that do not depend on each other.
void append_token(const Launch&, const RmsNorm& q, const RmsNorm& k, const KvAppend&);
void append_token(const Launch&, const KvAppend&, const Copy*, const QueryGate*);
// Of one row: makes_vectors() holds. The norm may be null; it takes a card of Hopper or later.
void delta_net(const Launch&, const DeltaNet&, const ShortConv&, const GatedNorm*);
// Leaves the log-sum-exps to the vote.
void token_score_before_vote(const Launch&, const TokenScore&);
// `scored`: null, or the op that computes the scores of a layer's vote and left it the log-sum-exps.
void vote(const Launch&, const Vote&, const TokenScore* scored);
// `vote`: null, or the op that computes its scores and is not launched by itself (can_vote()). `scored`:
// null, or the op that computes that vote's scores and left it the log-sum-exps.
void top_k(const Launch&, const TopK&, const Vote* vote, const TokenScore* scored);
// Whether top_k can compute these votes; makes_votes() holds.
bool can_vote(const Launch&, const VoteParams&);

// Whether attention has kernels for such rows, whose values are channels of the keys.
bool takes_latent(const AttentionParams&);
// Whether label has space for the keys of such heads in shared memory.
bool takes_label(const Card&, uint32_t head_dim);

// Bytes of Launch::scratch that an op needs for such a session; an op without a function here needs none.
uint64_t dense_scratch(const ModelShape&, const SessionShape&, const Card&);  // linear, glu
uint64_t route_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t expert_scratch(const ModelShape&, const SessionShape&, const Card&);  // expert_glu, expert_linear
uint64_t delta_net_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t ssm_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t attention_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t attend_all_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t token_score_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t page_score_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t vote_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t top_k_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t label_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t kv_recall_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t page_vote_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Card&);

}  // namespace thimble::cuda
