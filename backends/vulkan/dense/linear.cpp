#include <vector>

#include "backends/vulkan/ops.h"
#include "backends/vulkan/dense/product.h"

namespace thimble::vulkan {

bool side_by_side(const Linear& a, const Linear& b) {
  return a.x.buffer == b.x.buffer && a.x.offset == b.x.offset && a.p.in_cols == b.p.in_cols &&
         a.p.x_stride == b.p.x_stride && a.p.rows == b.p.rows && a.y.buffer == b.y.buffer &&
         a.y.offset + a.p.out_cols * sizeof(float) == b.y.offset && a.p.y_stride == b.p.y_stride &&
         !a.p.add && !b.p.add && !a.bias && !b.bias;
}

static Product product_of(const Linear& op) {
  return {.x = op.x,
          .w = op.w,
          .bias = op.bias,
          .y = op.y,
          .in_cols = op.p.in_cols,
          .x_stride = op.p.x_stride,
          .y_stride = op.p.y_stride,
          .rows = op.p.rows,
          .adds = op.p.add != 0};
}

void linear(Recording& r, std::span<const Linear> siblings, const RmsNorm* prepared) {
  std::vector<Product> products;
  for (const Linear& op : siblings) products.push_back(product_of(op));
  if (prepared) finish_norm(r, products, *prepared);
  multiply(r, products);
}

void linear_before(Recording& r, const Linear& op, const RmsNorm& norm) {
  Product product = product_of(op);
  product.prepares = PreparedNorm::in(r.scratch(), norm.p.cols);
  product.norm_weight = norm.weight;
  multiply(r, {&product, 1});
}

uint64_t norm_scratch(const ModelShape& m, const SessionShape&, const Limits&) {
  return PreparedNorm::bytes(m.d_model);
}

}  // namespace thimble::vulkan
