// route: a warp chooses a row's experts; then a block finds the slots of one expert, in the order of the rows
// that they serve. Of one row the first kernel does all.
#include "backends/cuda/kernel.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kSlotThreads = 128;

// [rows][chosen], the experts of a row ascending, and their weights.
struct Choices {
  uint32_t* experts;
  float* weights;
};

// Ordered as numbers are, and never 0; NaN is -inf, and -0 is 0.
__device__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(isnan(x) ? -kInfinity : x == 0 ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

// What an expert counts before the chosen ones are compared.
__device__ float share_of(uint32_t kind, float logit, float peak, float sum) {
  if (kind == kRouteSoftmax) return expf(logit - peak) / sum;
  return kind == kRouteSigmoid ? 1 / (1 + expf(-logit)) : logit;
}

// The best experts: each time the best that is left, of equals the one with the lower number. keys: not 0;
// they become it when they are chosen. A lane keeps the best of its own experts at hand.
__device__ void choose(uint32_t* keys, uint32_t experts, uint32_t* chosen, uint32_t count) {
  const uint32_t lane = threadIdx.x;
  uint32_t key = 0, expert = experts;
  const auto look = [&] {
    key = 0, expert = experts;
    for (uint32_t e = lane; e < experts; e += kWarp)
      if (keys[e] > key) key = keys[e], expert = e;
  };
  look();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t best_key = __reduce_max_sync(~0u, key);
    const uint32_t best = __reduce_min_sync(~0u, key == best_key ? expert : experts);
    if (lane == 0) chosen[i] = best;
    if (expert == best) {
      keys[best] = 0;
      look();
    }
  }
}

__global__ void route_kernel(const StepParams* step, RouteParams p, const float* logits, const float* bias,
                             Choices to, uint32_t* first, uint32_t* row_of_slot) {
  extern __shared__ uint32_t shared[];
  float* const shares = reinterpret_cast<float*>(shared);  // [experts]
  uint32_t* const keys = shared + p.experts;               // [experts]
  uint32_t* const chosen = keys + p.experts;               // [chosen], the best first
  begin_kernel();
  const uint32_t row = blockIdx.x, lane = threadIdx.x;
  if (row >= step->n_rows) return;
  const float* own = logits + uint64_t(row) * p.experts;
  float peak = -kInfinity, sum = 0;
  for (uint32_t e = lane; e < p.experts; e += kWarp) peak = fmaxf(peak, own[e]);
  peak = warp_max(peak);
  for (uint32_t e = lane; e < p.experts; e += kWarp) sum += expf(own[e] - peak);
  sum = warp_sum(sum);
  for (uint32_t e = lane; e < p.experts; e += kWarp) {
    shares[e] = share_of(p.kind, own[e], peak, sum);
    keys[e] = key_of(bias ? shares[e] + bias[e] : own[e]);
  }
  __syncwarp();
  choose(keys, p.experts, chosen, p.chosen);
  __syncwarp();

  float highest = -kInfinity, total = 0;
  for (uint32_t i = lane; i < p.chosen; i += kWarp) highest = fmaxf(highest, shares[chosen[i]]);
  highest = warp_max(highest);
  const bool of_chosen = p.kind == kRouteSoftmaxOfChosen;
  const auto weight_of = [&](uint32_t expert) {
    return of_chosen ? expf(shares[expert] - highest) : shares[expert];
  };
  for (uint32_t i = lane; i < p.chosen; i += kWarp) total += weight_of(chosen[i]);
  total = warp_sum(total);
  // The models' own code divides by no less than f16's smallest normal number.
  const float by = p.share || of_chosen ? fmaxf(total, 6.103515625e-5f) : 1;
  for (uint32_t i = lane; i < p.chosen; i += kWarp) {
    uint32_t place = 0;
    for (uint32_t j = 0; j < p.chosen; ++j) place += chosen[j] < chosen[i];
    const uint64_t at = uint64_t(row) * p.chosen + place;
    to.weights[at] = weight_of(chosen[i]) / by * p.scale;
    if (row_of_slot)
      row_of_slot[at] = 0;
    else
      to.experts[at] = chosen[i];
  }
  if (!row_of_slot) return;
  for (uint32_t e = lane; e <= p.experts; e += kWarp) {
    uint32_t before = 0;
    for (uint32_t j = 0; j < p.chosen; ++j) before += chosen[j] < e;
    first[e] = before;
  }
}

// The sum of the threads before this one, and that of all.
__device__ uint2 scan(uint32_t x, uint32_t* of_warps) {
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t sum = x;
#pragma unroll
  for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // all have read what was there
  if (lane == kWarp - 1) of_warps[warp] = sum;
  __syncthreads();
  uint2 result{sum - x, 0};
  for (uint32_t w = 0; w < kSlotThreads / kWarp; ++w) {
    if (w < warp) result.x += of_warps[w];
    result.y += of_warps[w];
  }
  return result;
}

__global__ void route_slots_kernel(const StepParams* step, RouteParams p, Choices choices, uint32_t* first,
                                   uint32_t* row_of_slot, float* weight_of_slot) {
  __shared__ uint32_t of_warps[kSlotThreads / kWarp];
  begin_kernel();
  const uint32_t own = blockIdx.x, n = step->n_rows * p.chosen, each = (n + kSlotThreads - 1) / kSlotThreads;
  const uint32_t begin = min(threadIdx.x * each, n), end = min(begin + each, n);
  uint32_t lower = 0, mine = 0;  // choices of experts before this one, and of it
  for (uint32_t i = begin; i < end; ++i) {
    lower += choices.experts[i] < own;
    mine += choices.experts[i] == own;
  }
  const uint32_t own_first = scan(lower, of_warps).y;
  uint32_t slot = own_first + scan(mine, of_warps).x;
  for (uint32_t i = begin; i < end; ++i) {
    if (choices.experts[i] != own) continue;
    row_of_slot[slot] = i / p.chosen;
    weight_of_slot[slot++] = choices.weights[i];
  }
  if (threadIdx.x > 0) return;
  first[own] = own_first;
  if (own == p.experts - 1) first[p.experts] = n;
}

}  // namespace

void route(const Launch& l, const Route& op) {
  const RouteParams& p = op.p;
  const bool one_row = l.max_rows == 1;
  uint32_t* const experts = reinterpret_cast<uint32_t*>(l.scratch);
  const Choices choices{experts, one_row
                                     ? data<float>(op.weight)
                                     : reinterpret_cast<float*>(experts + uint64_t(l.max_rows) * p.chosen)};
  launch(l, route_kernel, l.max_rows, kWarp, (2 * p.experts + p.chosen) * sizeof(uint32_t), l.step, p,
         data<float>(op.logits), data<float>(op.bias), choices, one_row ? data<uint32_t>(op.first) : nullptr,
         one_row ? data<uint32_t>(op.row) : nullptr);
  if (!one_row)
    launch(l, route_slots_kernel, p.experts, kSlotThreads, 0, l.step, p, choices, data<uint32_t>(op.first),
           data<uint32_t>(op.row), data<float>(op.weight));
}

uint64_t route_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  return uint64_t(s.chunk) * m.chosen_experts * (sizeof(uint32_t) + sizeof(float));
}

}  // namespace thimble::cuda
