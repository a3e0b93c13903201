// delta_net: the gated delta rule.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void delta_net(Recording& r, const DeltaNet& op) {
  constexpr uint32_t kColumns = 32, kMostThreads = 256;  // of the shader
  struct {
    DeltaNetParams p;
    uint32_t slot_stride;
  } push{op.p, static_cast<uint32_t>(op.m.slot_stride / sizeof(float))};
  r.dispatch(Shader::kDeltaStep, {r.limits().threads(kMostThreads), op.p.width},
             {reads(op.qkv), reads(op.gates), reads(op.a), reads(op.dt), writes(op.m.all()), writes(op.y)},
             push, op.p.width / kColumns, op.p.value_heads);
}

}  // namespace thimble::vulkan
