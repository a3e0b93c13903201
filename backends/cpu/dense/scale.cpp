#include <algorithm>
#include <cmath>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {
namespace {

float scale_of(const Context& c, const Scale& op, uint32_t row) {
  const ScaleParams& p = op.p;
  if (p.growth == 0) return p.scale;
  const auto position = static_cast<uint32_t>(op.positions ? data<int32_t>(op.positions)[row]
                                                           : c.step.position + static_cast<int32_t>(row));
  return p.scale * (1 + p.growth * std::log(static_cast<float>(1 + position / p.period)));
}

}  // namespace

void scale(const Context& c, const Scale& op) {
  constexpr uint32_t kPiece = 256;  // the addend stays on the stack until it is capped
  const ScaleParams& p = op.p;
  for_rows(c, row_count(c, p.rows), p.cols, [&](uint32_t row) {
    const float* x = data<float>(op.x) + size_t(row) * p.row_stride;
    float* y = data<float>(op.y) + size_t(row) * p.row_stride;
    const float scale = scale_of(c, op, row);
    for (uint32_t first = 0; first < p.cols; first += kPiece) {
      const uint32_t n = std::min(kPiece, p.cols - first);
      float piece[kPiece];
      for (uint32_t i = 0; i < n; ++i) piece[i] = x[first + i] * scale;
      if (p.cap != 0) kernels().soft_cap(piece, n, p.cap);
      for (uint32_t i = 0; i < n; ++i) y[first + i] = p.add ? y[first + i] + piece[i] : piece[i];
    }
  });
}

}  // namespace thimble::cpu
