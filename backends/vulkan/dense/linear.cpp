#include <vector>

#include "backends/vulkan/dense/product.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

static Product product_of(const Linear& op) {
  return {.x = op.x,
          .w = op.w,
          .bias = op.bias,
          .y = op.y,
          .in_cols = op.p.in_cols,
          .x_stride = op.p.x_stride,
          .y_stride = op.p.y_stride,
          .rows = op.p.rows,
          .exact = op.exact,
          .adds = op.p.add != 0};
}

void linear(Recording& r, std::span<const Linear> siblings, const RmsNorm* prepared) {
  std::vector<Product> products;
  for (const Linear& op : siblings) products.push_back(product_of(op));
  if (prepared) finish_norm(r, products, *prepared);
  multiply(r, products);
}

void linear(Recording& r, const Linear& op) { linear(r, {&op, 1}, nullptr); }

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
