// page_bounds: the smallest and largest key of each page, channel by channel. A warp processes a page, a lane
// a pair of channels.
#include <algorithm>

#include "backends/cuda/kv_format.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;

// The blocks of KV head blockIdx.y process its pages in turn. `heads`: from KV head 0 of the layer on.
template <typename Format>
__global__ void __launch_bounds__(kThreads)
    page_bounds_kernel(const StepParams* step, const HeadState* heads, PageBoundsParams p,
                       const typename Format::Unit* k, __half2* bounds) {
  const StepParams s = begin_kernel(step);
  const uint32_t head = p.first_head + blockIdx.y, lane = threadIdx.x % kWarp, pairs = p.head_dim / 2,
                 row_units = Format::row_units(p.head_dim);
  const HeadState state = heads[head];
  const uint32_t entries = step_entries(s, state), end = p.all ? min(state.keep, entries) : entries;
  const uint32_t first = p.all ? 0 : state.n_entries / p.page;
  for (uint32_t page = first + blockIdx.x * kWarps + threadIdx.x / kWarp; page < units(end, p.page);
       page += gridDim.x * kWarps) {
    const uint32_t begin = page * p.page, rows = min(p.page, end - begin);
    const typename Format::Unit* const from = k + (uint64_t(state.first) + begin) * row_units;
    __half2* const to = bounds + (uint64_t(state.first / p.page) + head + page) * p.head_dim;
    for (uint32_t pair = lane; pair < pairs; pair += kWarp) {
      // NaN compares false, so it is ignored.
      float2 low{kInfinity, kInfinity}, high{-kInfinity, -kInfinity};
#pragma unroll 8
      for (uint32_t row = 0; row < rows; ++row) {
        float2 x = Format::load_two(from + uint64_t(row) * row_units, p.head_dim, pair);
        if constexpr (!Format::kPlain) {  // channels of blocks may be a little beyond the range of f16
          uint32_t beyond = 0;
          x = {HalfRows::bounded(x.x, beyond), HalfRows::bounded(x.y, beyond)};
        }
        if (x.x < low.x) low.x = x.x;
        if (x.y < low.y) low.y = x.y;
        if (x.x > high.x) high.x = x.x;
        if (x.y > high.y) high.y = x.y;
      }
      to[pair] = __float22half2_rn(low);
      to[pairs + pair] = __float22half2_rn(high);
    }
  }
}

}  // namespace

void page_bounds(const Launch& l, const PageBounds& op) {
  const PageBoundsParams& p = op.p;
  // In an eviction, blocks for all pages of the layer's arrays, or as many as keep the card busy.
  constexpr uint32_t kBlocksEach = 8;  // per multiprocessor
  const uint64_t pages = p.all ? op.k.values.bytes / kv_bytes(op.k.type, p.head_dim) / p.page
                               : uint64_t(l.max_rows) / p.page + 2;
  const uint32_t most = std::max(1u, kBlocksEach * l.card.multiprocessors / p.heads);
  const uint32_t blocks =
      std::max(1u, static_cast<uint32_t>(std::min<uint64_t>(ceil_div(pages, kWarps), most)));
  with_format(op.k.type, [&]<typename Format>(Format) {
    launch(l, page_bounds_kernel<Format>, dim3(blocks, p.heads), kThreads, 0, l.step, l.heads + p.head_state,
           p, data<typename Format::Unit>(op.k.values), data<__half2>(op.bounds));
  });
}

}  // namespace thimble::cuda
