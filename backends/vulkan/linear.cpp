#include "backends/vulkan/ops.h"
#include "backends/vulkan/product.h"

namespace thimble::vulkan {

void linear(Recording& r, const Linear& op) {
  multiply(r, {.x = op.x,
               .w = op.w,
               .bias = op.bias,
               .y = op.y,
               .x_stride = op.p.x_stride,
               .y_stride = op.p.y_stride,
               .rows = op.p.rows,
               .combine = op.p.add ? kCombineAdd : kCombineStore});
}

}  // namespace thimble::vulkan
