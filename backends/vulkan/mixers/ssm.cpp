// ssm: Mamba-2.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void ssm(Recording& r, const Ssm& op) {
  constexpr uint32_t kCols = 16;  // of a workgroup
  struct {
    SsmParams p;
    uint32_t slot_stride;
  } push{op.p, static_cast<uint32_t>(op.s.slot_stride / sizeof(float))};
  r.dispatch(Shader::kSsm, {op.p.state},
             {reads(op.xbc), reads(op.dt), reads(op.dt_bias), reads(op.a), reads(op.d), writes(op.s.all()),
              writes(op.y)},
             push, op.p.width / kCols, op.p.heads);
}

}  // namespace thimble::vulkan
