// route: a block chooses the experts of a row; a second kernel then finds the slots of each expert, in the
// order of their rows. For a single row the first kernel does both.
#include "backends/cuda/dense/route.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kChooseThreads = 128, kSlotThreads = 1024;

__global__ void __launch_bounds__(kChooseThreads) route_kernel(const StepParams* step, Router all) {
  extern __shared__ uint4 shared[];
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= step->n_rows) return;
  Router own = all;
  own.logits += uint64_t(row) * all.p.experts;
  own.weight += uint64_t(row) * all.p.chosen;
  if (all.experts) own.experts += uint64_t(row) * all.p.chosen;
  const Choice choice = choose_experts(own, reinterpret_cast<uint32_t*>(shared));
  if (threadIdx.x < kWarp) store_choice(own, choice);
}

// [rows][chosen]: the experts of each row, ascending, and their weights.
struct Choices {
  uint32_t* experts;
  float* weights;
};

// A warp processes neighbouring choices, 32 at a time.
__global__ void __launch_bounds__(kSlotThreads)
    route_slots_kernel(const StepParams* step, RouteParams p, Choices choices, uint32_t* first,
                       uint32_t* row_of_slot, float* weight_of_slot) {
  constexpr uint32_t kWarps = kSlotThreads / kWarp;
  static_assert(kWarps <= kWarp);
  __shared__ uint2 of_warps[kWarps];  // choices of experts before this one, and of this one
  begin_kernel();
  const uint32_t own = blockIdx.x, n = step->n_rows * p.chosen, warp = threadIdx.x / kWarp,
                 lane = threadIdx.x % kWarp, each = (n + kSlotThreads - 1) / kSlotThreads * kWarp;
  const uint32_t begin = min(warp * each, n), end = min(begin + each, n);
  uint32_t lower = 0, mine = 0;
#pragma unroll 4
  for (uint32_t i = begin + lane; i < end; i += kWarp) {
    const uint32_t expert = choices.experts[i];
    lower += expert < own;
    mine += expert == own;
  }
  lower = __reduce_add_sync(~0u, lower);
  mine = __reduce_add_sync(~0u, mine);
  if (lane == 0) of_warps[warp] = {lower, mine};
  __syncthreads();
  const uint2 counts = of_warps[min(lane, kWarps - 1)];
  const uint32_t own_first = __reduce_add_sync(~0u, lane < kWarps ? counts.x : 0);
  uint32_t slot = own_first + __reduce_add_sync(~0u, lane < warp ? counts.y : 0);
  for (uint32_t i = begin + lane; i - lane < end; i += kWarp) {
    const bool serves = i < end && choices.experts[i] == own;
    const uint32_t those = __ballot_sync(~0u, serves);
    if (serves) {
      const uint32_t at = slot + __popc(those & ((1u << lane) - 1));
      row_of_slot[at] = i / p.chosen;
      weight_of_slot[at] = choices.weights[i];
    }
    slot += __popc(those);
  }
  if (threadIdx.x > 0) return;
  first[own] = own_first;
  if (own == p.experts - 1) first[p.experts] = n;
}

}  // namespace

Router router_of(const Route& op) {
  return {.p = op.p,
          .logits = data<float>(op.logits),
          .bias = data<float>(op.bias),
          .each = data<float>(op.each),
          .weight = data<float>(op.weight),
          .experts = nullptr,
          .first = data<uint32_t>(op.first),
          .row = data<uint32_t>(op.row)};
}

void route(const Launch& l, const Route& op) {
  const RouteParams& p = op.p;
  Router router = router_of(op);
  uint32_t* const experts = reinterpret_cast<uint32_t*>(l.scratch);
  const Choices choices{experts, reinterpret_cast<float*>(experts + uint64_t(l.max_rows) * p.chosen)};
  const bool one_row = l.max_rows == 1;
  if (!one_row) {
    router.weight = choices.weights;
    router.experts = choices.experts;
    router.first = router.row = nullptr;
  }
  launch(l, route_kernel, l.max_rows, kChooseThreads, router_words(p.experts) * sizeof(uint32_t), l.step,
         router);
  if (!one_row)
    launch(l, route_slots_kernel, p.experts, kSlotThreads, 0, l.step, p, choices, data<uint32_t>(op.first),
           data<uint32_t>(op.row), data<float>(op.weight));
}

uint64_t route_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  return uint64_t(s.chunk) * m.chosen_experts * (sizeof(uint32_t) + sizeof(float));
}

}  // namespace thimble::cuda
