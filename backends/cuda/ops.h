// The ops of the CUDA backend, one function and one file each. They run while a program is recorded and only
// launch kernels.
#pragma once

#include <span>

#include "backends/cuda/launch.h"

namespace thimble::cuda {

// Matrices that multiply the same rows: q, k and v of a layer. They may share a launch.
inline constexpr uint32_t kMostSiblings = 3;

void embed(const Launch&, const Embed&);
void rms_norm(const Launch&, const RmsNorm&);
void linear(const Launch&,
            std::span<const Linear> siblings);  // same x, x_stride, in_cols and rows; 1 to kMostSiblings
void glu(const Launch&, const Glu&);
void activation(const Launch&, const Activation&);
void kv_append(const Launch&, const KvAppend&);
void cis_store(const Launch&, const CisStore&);
void kv_view(const Launch&, const KvView&);
void attention(const Launch&, const Attention&);
void kv_compact(const Launch&, const KvCompact&);
void query_gate(const Launch&, const QueryGate&);
void token_score(const Launch&, const TokenScore&);
void vote(const Launch&, const Vote&);
void top_k(const Launch&, const TopK&);
void arg_max(const Launch&, const ArgMax&);
void log_prob(const Launch&, const LogProb&);
void copy(const Launch&, const Copy&);

// Bytes of Launch::scratch that an op needs for such a session; an op without a function here needs none.
uint64_t dense_scratch(const ModelShape&, const SessionShape&, const Card&);  // linear, glu
uint64_t attention_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t token_score_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t vote_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t top_k_scratch(const ModelShape&, const SessionShape&, const Card&);
uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Card&);

}  // namespace thimble::cuda
