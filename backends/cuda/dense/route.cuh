// Chooses the experts of a row with all threads of a block, for route.cu and for kernels that begin with the
// choice (matvec_experts.cu). Device side.
#pragma once

#include "backends/cuda/kernel.cuh"

namespace thimble::cuda {

// The router's logits of one row, and where the choice is stored.
struct Router {
  RouteParams p;
  const float *logits, *bias, *each;  // [experts]; the last two may be null
  float* weight;                      // [chosen], in the order of the experts
  uint32_t* experts;                  // [chosen], ascending; or null
  uint32_t *first, *row;              // as in Route, for a single row; both may be null
};

Router router_of(const Route&);  // for a single row

// Words of shared memory: a key and a logit per expert, one bit, and the keys of groups. A multiple of 16
// bytes.
__host__ __device__ constexpr uint32_t router_words(uint32_t experts) {
  const uint32_t words = (experts + 31) / 32;
  return 2 * 32 * words + (words + 3) / 4 * 4 + kMostGroups;
}
// The results of choose_experts() in shared memory.
struct Choice {
  const float* logits;   // [experts]
  const uint32_t* bits;  // one per expert: whether it was chosen
};

// Keys order like numbers and are never 0; NaN is -inf, and -0 is 0.
__device__ inline uint32_t router_key(float x) {
  const uint32_t bits = __float_as_uint(isnan(x) ? -kInfinity : x == 0 ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}
// The number with this key.
__device__ inline float router_value(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

// The weight of an expert before normalization over the chosen ones.
class Shares {
 public:
  __device__ Shares(const RouteParams& p, const float* logits)
      : kind_(p.kind), logits_(logits) {  // called by a warp
    if (kind_ != kRouteSoftmax) return;
    const uint32_t lane = threadIdx.x % kWarp;
    for (uint32_t e = lane; e < p.experts; e += kWarp) peak_ = fmaxf(peak_, logits[e]);
    peak_ = warp_max(peak_);
    for (uint32_t e = lane; e < p.experts; e += kWarp) sum_ += expf(logits[e] - peak_);
    sum_ = warp_sum(sum_);
  }
  __device__ float operator[](uint32_t expert) const {
    const float logit = logits_[expert];
    switch (kind_) {
      case kRouteSoftmax:
        return expf(logit - peak_) / sum_;
      case kRouteSigmoid:
        return 1 / (1 + expf(-logit));
      case kRouteSqrtSoftplus:
        return sqrtf(fmaxf(logit, 0) + log1pf(expf(-fabsf(logit))));
      default:
        return logit;
    }
  }

 private:
  const uint32_t kind_;
  const float* const logits_;
  float peak_ = -kInfinity, sum_ = 0;
};

// Sets the keys of experts outside the best groups to 0. `of_groups`: memory for a key per group. All threads
// of the block call this. A warp finds the two best experts of a group.
__device__ inline void keep_best_groups(const RouteParams& p, uint32_t* keys, uint32_t* of_groups) {
  const uint32_t size = p.experts / p.groups, lane = threadIdx.x % kWarp;
  for (uint32_t g = threadIdx.x / kWarp; g < p.groups; g += blockDim.x / kWarp) {
    uint32_t first = 0, second = 0;
    for (uint32_t e = lane; e < size; e += kWarp) {
      const uint32_t key = keys[g * size + e];
      second = max(second, min(first, key));
      first = max(first, key);
    }
    const uint32_t best = __reduce_max_sync(~0u, first);
    const uint32_t owner = __ffs(__ballot_sync(~0u, first == best)) - 1;
    const uint32_t other = __reduce_max_sync(~0u, lane == owner ? second : first);
    if (lane == 0) of_groups[g] = router_key(router_value(best) + (other ? router_value(other) : 0));
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < p.experts; e += blockDim.x) {
    const uint32_t own = e / size, key = of_groups[own];
    uint32_t before = 0;
    for (uint32_t g = 0; g < p.groups; ++g) before += of_groups[g] >= key + (g >= own);
    if (before >= p.groups_used) keys[e] = 0;
  }
  __syncthreads();
}

// Chooses experts: an expert is chosen if fewer than `chosen` others precede it, which have a larger key, or
// the same key and a lower number. (One warp that searches for one expert after the other takes 2 us longer
// for 8 of 128.) `memory`: router_words(). Logits are loaded from the second-level cache, because a kernel
// that has not waited for its predecessor may find values of the previous layer in the first-level cache.
// They are loaded once, because a load takes 2 to 5 us while weights are in flight.
__device__ inline Choice choose_experts(const Router& r, uint32_t* memory) {
  const uint32_t words = (r.p.experts + kWarp - 1) / kWarp, lane = threadIdx.x % kWarp;
  uint32_t *const keys = memory, *const bits = memory + 2 * words * kWarp;
  float* const logits = reinterpret_cast<float*>(keys + words * kWarp);
  for (uint32_t e = threadIdx.x; e < words * kWarp; e += blockDim.x) {
    const float logit = e < r.p.experts ? __ldcg(r.logits + e) : 0;
    logits[e] = logit;
    keys[e] = e < r.p.experts ? router_key(logit) : 0;
  }
  __syncthreads();
  if (r.bias || r.p.groups) {
    const Shares shares(r.p, logits);
    for (uint32_t e = threadIdx.x; e < r.p.experts; e += blockDim.x)
      keys[e] = router_key(shares[e] + (r.bias ? r.bias[e] : 0));
    __syncthreads();
  }
  if (r.p.groups) keep_best_groups(r.p, keys, bits + (words + 3) / 4 * 4);
  for (uint32_t word = threadIdx.x / kWarp; word < words; word += blockDim.x / kWarp) {
    const uint32_t key = keys[word * kWarp + lane];
    uint32_t before = __popc(__match_any_sync(~0u, key) & ((1u << lane) - 1));
    for (uint32_t other = 0; other < words; ++other) {
      const uint32_t least = key + (other >= word);
#pragma unroll
      for (uint32_t i = 0; i < kWarp; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + other * kWarp + i);
        before += (four.x >= least) + (four.y >= least) + (four.z >= least) + (four.w >= least);
      }
    }
    const uint32_t chosen = __ballot_sync(~0u, key != 0 && before < r.p.chosen);
    if (lane == 0) bits[word] = chosen;
  }
  __syncthreads();
  return {logits, bits};
}

// The expert of a slot: the one whose bit has that many set bits before it. Whole warps call this.
__device__ inline uint32_t expert_of_bit(const uint32_t* bits, uint32_t slot) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t word = 0;; ++word) {
    const uint32_t own = bits[word], count = __popc(own);
    if (slot < count) {
      const bool is_it = own >> lane & 1 && __popc(own & ((1u << lane) - 1)) == slot;
      return word * kWarp + __ffs(__ballot_sync(~0u, is_it)) - 1;
    }
    slot -= count;
  }
}

// Calls see(expert, slot) for each chosen expert, one per lane. A warp calls this.
template <typename See>
__device__ inline void for_each_chosen(const Router& r, const uint32_t* bits, const See& see) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t word = 0, slot = 0; word * kWarp < r.p.experts; ++word) {
    const uint32_t own = bits[word];
    if (own >> lane & 1) see(word * kWarp + lane, slot + __popc(own & ((1u << lane) - 1)));
    slot += __popc(own);
  }
}

// Stores the choice. A warp calls this.
__device__ inline void store_choice(const Router& r, const Choice& choice) {
  const uint32_t* const bits = choice.bits;
  const Shares shares(r.p, choice.logits);
  const bool of_chosen = r.p.kind == kRouteSoftmaxOfChosen;
  float highest = -kInfinity, total = 0;
  if (of_chosen) {
    for_each_chosen(r, bits, [&](uint32_t expert, uint32_t) { highest = fmaxf(highest, shares[expert]); });
    highest = warp_max(highest);
  }
  const auto weight_of = [&](uint32_t expert) {
    return of_chosen ? expf(shares[expert] - highest) : shares[expert];
  };
  for_each_chosen(r, bits, [&](uint32_t expert, uint32_t) { total += weight_of(expert); });
  total = warp_sum(total);
  // As in the models' own code, the divisor is at least f16's smallest normal number.
  const float by = r.p.share || of_chosen ? fmaxf(total, 6.103515625e-5f) : 1;
  for_each_chosen(r, bits, [&](uint32_t expert, uint32_t slot) {
    r.weight[slot] = weight_of(expert) / by * r.p.scale * (r.each ? r.each[expert] : 1);
    if (r.experts) r.experts[slot] = expert;
    if (r.row) r.row[slot] = 0;
  });
  if (!r.first) return;
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t before = 0;
  for (uint32_t from = 0; from <= r.p.experts; from += kWarp) {
    const uint32_t own = from < r.p.experts ? bits[from / kWarp] : 0;
    if (from + lane <= r.p.experts) r.first[from + lane] = before + __popc(own & ((1u << lane) - 1));
    before += __popc(own);
  }
}

}  // namespace thimble::cuda
