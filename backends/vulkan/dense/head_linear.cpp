#include "backends/vulkan/dense/product.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void head_linear(Recording& r, const HeadLinear& op) {
  constexpr uint32_t kCols = 64, kMostRows = 16;  // outputs and rows of a workgroup
  const HeadLinearParams& p = op.p;
  const uint64_t row_bytes = dtype_bytes(op.w.type, op.w.cols);
  if (op.w.bytes > largest_part(r.limits()))
    return r.fail(error(Code::kUnsupported,
                        "the matrices of %u heads are too large for the device; use --device cpu", p.heads));
  const struct {
    HeadLinearParams p;
    uint32_t row_bytes;
    float scale;
  } push{p, static_cast<uint32_t>(row_bytes), op.w.scale};
  const uint32_t rows = r.max_rows() == 1 ? 1 : kMostRows;
  r.expect(2.0 * r.max_rows() * p.heads * p.in_cols * p.out_cols);
  r.dispatch(Shader::kHeadLinear, {static_cast<uint32_t>(op.w.type), p.transposed, rows},
             {reads(op.x), reads(op.w), writes(op.y), reads(r.code_books())}, push,
             static_cast<uint32_t>(ceil_div(p.out_cols, kCols)),
             static_cast<uint32_t>(ceil_div(r.max_rows(), rows)), p.heads);
}

}  // namespace thimble::vulkan
