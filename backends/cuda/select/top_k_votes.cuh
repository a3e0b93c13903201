// Votes that are made in the kernel that lists them. Only a cluster does this, because its blocks keep the
// keys. Device side.
#pragma once

#include "backends/cuda/mma.cuh"
#include "backends/cuda/select/top_k_threshold.cuh"
#include "backends/cuda/select/vote.cuh"

namespace thimble::cuda::topk {

// A sample of all candidates, the same in each block, determines where to search for the threshold first. The
// first kFew threads hold it.
__device__ inline uint32_t sampled(const HeadWork& w) {
  return w.candidates.begin + uint64_t(threadIdx.x % kFew) * w.candidates.size() / kFew;
}
__device__ inline void put_sample(Shared& b, float score) {
  if (threadIdx.x < kFew) b.few[threadIdx.x] = uint64_t(order_bits(score)) << 32 | threadIdx.x;
}

// Makes the keys of votes, and the samples. A vote whose key is not kept is stored at once. `scorers`: the
// blocks that made the parts of the head's log-sum-exps.
__device__ inline void make_votes(Shared& b, const Ballot& ballot, const HeadBlocks& scorers,
                                  const HeadWork& w, const KeptKeys& keys, Range own, uint32_t rank,
                                  uint32_t head) {
  const uint32_t group = ballot.p.group, score_capacity = ballot.p.score_capacity, first_query = head * group;
  const float* const scores = ballot.scores + uint64_t(first_query) * score_capacity;
  float* const votes = ballot.votes + uint64_t(head) * ballot.p.vote_capacity;
  // A warp computes the log-sum-exp of one query head; its parts are loaded before the scores.
  const uint32_t splits = scorers.count;
  const LogSum* const parts =
      ballot.sums.sums && warp() < group ? ballot.sums.sums + first_part_of(scorers, group, warp()) : nullptr;
  const LogSum first = first_part(parts, parts ? splits : 0);
  bool has_lse = false;
  const auto lse = [&]() -> const float* {
    if (has_lse) return b.lse;
    has_lse = true;
    if (parts) {
      const float sum = log_sum_exp(parts, splits, first);
      if (lane() == 0) b.lse[warp()] = sum;
      if (lane() == 0 && rank == 0) ballot.lse[first_query + warp()] = sum;
    } else if (warp() < group && lane() == 0) {
      b.lse[warp()] = ballot.lse[first_query + warp()];
    }
    __syncthreads();
    return b.lse;
  };
  constexpr uint32_t kEach = 4;  // per thread at once, and a sample
#pragma unroll 1
  for (uint32_t start = own.begin; start == own.begin || start < own.end; start += kEach * kThreads) {
    uint32_t entry[kEach + 1];
    float vote[kEach + 1];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
      entry[i] = min(start + i * kThreads + threadIdx.x, w.candidates.end - 1);
    entry[kEach] = threadIdx.x < kFew ? sampled(w) : entry[0];
    group_votes<kEach + 1>(scores, group, score_capacity, entry, lse, vote);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (start + i * kThreads + threadIdx.x >= own.end) break;
      if (keys.keeps(entry[i]))
        keys.shared[entry[i] - keys.first] = order_bits(vote[i]);
      else
        votes[entry[i]] = vote[i];
    }
    put_sample(b, vote[kEach]);
  }
  __syncthreads();
}

// Stores the votes whose keys are kept. It comes last, because a barrier of the cluster would wait for the
// stores. A cluster stores all votes of its head; entries that are not candidates get -inf.
template <uint32_t kBlocks>
__device__ inline void store_votes(const Ballot& ballot, const HeadWork& w, const KeptKeys& keys,
                                   uint32_t rank, uint32_t head) {
  float* const votes = ballot.votes + uint64_t(head) * ballot.p.vote_capacity;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < keys.kept; i += kThreads)
    votes[keys.first + i] = number_of(keys.shared[i]);
  if (rank == 0)
    for (uint32_t i = threadIdx.x; i < w.middle.begin; i += kThreads) votes[i] = -kInfinity;
  if (rank == kBlocks - 1)
    for (uint32_t i = w.middle.end + threadIdx.x; i < w.entries; i += kThreads) votes[i] = -kInfinity;
}

}  // namespace thimble::cuda::topk
