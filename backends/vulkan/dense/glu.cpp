#include "backends/vulkan/dense/product.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void glu(Recording& r, const Glu& op, const RmsNorm* prepared) {
  Product product{.x = op.x,
                  .w = op.gate,
                  .y = op.h,
                  .in_cols = op.p.in_cols,
                  .x_stride = op.p.in_cols,
                  .y_stride = op.p.out_cols,
                  .act = op.p.act};
  if (prepared) finish_norm(r, {&product, 1}, *prepared);
  // A single row reads x once for both matrices, and matrix units compute both at once. Otherwise the gate is
  // written where h will be, and the second product multiplies it.
  if (by_matrices(r, kStepRows) || (by_vectors(r, kStepRows) && op.gate.type == op.up.type)) {
    product.up = op.up;
    return multiply(r, {&product, 1});
  }
  multiply(r, {&product, 1});
  product.w = op.up;
  product.norm = {};  // the norm was written by the first product
  product.activates = true;
  multiply(r, {&product, 1});
}

void glu(Recording& r, const Glu& op) { glu(r, op, nullptr); }

}  // namespace thimble::vulkan
