// kv_append: the step's k and v rows go into the pool or the chunk buffer.
#include <cstring>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"
#include "backends/cpu/rope.h"

namespace thimble::cpu {

void kv_append(const Context& ctx, const KvAppend& o) {
  const KvAppendParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const KvKernels& kernels = kv_kernels();
  const bool rotates = p.rope.mode == kRopeOriginal;
  const uint32_t first = p.into == kIntoPool ? ctx.step.n_entries : 0;
  ctx.threads.run(ctx.step.n_rows, [&](uint32_t row, uint32_t worker) {
    const RowScratch scratch = worker_scratch<RowScratch>(ctx.scratch.data(), worker, p.head_dim);
    const float* qkv = data<float>(o.qkv) + uint64_t(row) * p.row_stride;
    const int32_t position = ctx.step.position + static_cast<int32_t>(row);
    if (rotates) rope.angles(static_cast<uint32_t>(position), scratch.angles);
    for (uint32_t head = p.first_head; head < p.first_head + p.heads; ++head) {
      const float* k = qkv + p.k_column + head * p.head_dim;
      const float* v = qkv + p.v_column + head * p.head_dim;
      if (rotates) {
        std::memcpy(scratch.row, k, p.head_dim * sizeof(float));
        rope.rotate(scratch.row, scratch.angles);
        k = scratch.row;
      }
      kernels.narrow(k, at<uint16_t>(o.k, head, p.capacity, first + row, p.head_dim), p.head_dim);
      kernels.narrow(v, at<uint16_t>(o.v, head, p.capacity, first + row, p.head_dim), p.head_dim);
      *at<int32_t>(o.pos, head, p.capacity, first + row) = position;
    }
  });
}

}  // namespace thimble::cpu
