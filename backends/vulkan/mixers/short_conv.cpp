// short_conv: a causal convolution of each channel between two gates.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void short_conv(Recording& r, const ShortConv& op) {
  constexpr uint32_t kThreads = 64, kRows = 8;  // of the shader
  struct {
    ShortConvParams p;
    uint32_t slot_stride;
  } push{op.p, static_cast<uint32_t>(op.tail.slot_stride / sizeof(float))};
  r.dispatch(Shader::kShortConv, {op.p.taps}, {reads(op.x), reads(op.w), writes(op.tail.all()), writes(op.y)},
             push, static_cast<uint32_t>(ceil_div(op.p.channels, kThreads)),
             static_cast<uint32_t>(ceil_div(r.most_rows(), kRows)));
}

}  // namespace thimble::vulkan
