#include <vector>

#include "backends/vulkan/ops.h"
#include "backends/vulkan/product.h"

namespace thimble::vulkan {

bool side_by_side(const Linear& a, const Linear& b) {
  return a.x.buffer == b.x.buffer && a.x.offset == b.x.offset && a.p.in_cols == b.p.in_cols &&
         a.p.x_stride == b.p.x_stride && a.p.rows == b.p.rows && a.y.buffer == b.y.buffer &&
         a.y.offset + a.p.out_cols * sizeof(float) == b.y.offset && a.p.y_stride == b.p.y_stride &&
         !a.p.add && !b.p.add && !a.bias && !b.bias;
}

void linear(Recording& r, std::span<const Linear> siblings, const RmsNorm* norm) {
  std::vector<Product> products;
  for (const Linear& op : siblings)
    products.push_back({.x = op.x,
                        .w = op.w,
                        .bias = op.bias,
                        .y = op.y,
                        .in_cols = op.p.in_cols,
                        .x_stride = op.p.x_stride,
                        .y_stride = op.p.y_stride,
                        .rows = op.p.rows,
                        .combine = op.p.add ? kCombineAdd : kCombineStore});
  if (norm) make_norm(products, *norm);
  multiply(r, products);
}

}  // namespace thimble::vulkan
