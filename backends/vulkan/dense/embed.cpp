#include <algorithm>

#include "backends/vulkan/dense/product.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void embed(Recording& r, const Embed& op) {
  constexpr uint32_t kThreads = 64, kEach = 4;
  const uint64_t row_bytes = dtype_bytes(op.table.type, op.table.cols);
  // Parts of a table begin at whole words.
  const uint64_t most = largest_part(r.limits()) / row_bytes / 4 * 4;
  if (!most)
    return r.fail(error(Code::kUnsupported,
                        "an embedding of %u columns is too wide for the device; use --device cpu",
                        op.table.cols));
  for (uint64_t first = 0; first < op.table.rows; first += most) {
    const uint64_t tokens = std::min(most, op.table.rows - first);
    const TableParams params{.cols = op.p.cols,
                             .column = op.p.column,
                             .columns = op.table.cols,
                             .row_bytes = static_cast<uint32_t>(row_bytes),
                             .first_token = static_cast<uint32_t>(first),
                             .tokens = static_cast<uint32_t>(tokens),
                             .by_row = op.tokens ? 0u : 1u,
                             .scale = op.p.scale};
    r.dispatch(Shader::kEmbed, {static_cast<uint32_t>(op.table.type)},
               {reads(op.tokens), reads(op.table.slice(first * row_bytes, tokens * row_bytes)), writes(op.x),
                reads(r.code_books())},
               params, static_cast<uint32_t>(ceil_div(op.p.cols, kThreads * kEach)), r.most_rows());
  }
}

}  // namespace thimble::vulkan
