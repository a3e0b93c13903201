// short_conv: a causal convolution of each channel.
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void short_conv(Recording& r, const ShortConv& op) {
  constexpr uint32_t kThreads = 64, kRows = 8;  // of the shader
  const ShortConvParams& p = op.p;
  struct {
    ShortConvParams p;
    uint32_t slot_stride;
  } push{p, static_cast<uint32_t>(op.tail.slot_stride / sizeof(float))};
  r.dispatch(
      Shader::kShortConv,
      {p.taps, p.times_column != kNoColumn, p.gate_column != kNoColumn, bool(op.bias), p.act == kActSilu},
      {reads(op.x), reads(op.w), reads(op.bias), writes(op.tail.all()), writes(op.y)}, push,
      static_cast<uint32_t>(ceil_div(p.channels, kThreads)),
      static_cast<uint32_t>(ceil_div(r.most_rows(), kRows)));
}

}  // namespace thimble::vulkan
