#include <algorithm>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ops.h"

namespace thimble::cpu {

void scale(const Context& c, const Scale& op) {
  constexpr uint32_t kPiece = 256;  // what is added lies on the stack until it is capped
  const ScaleParams& p = op.p;
  for_rows(c, row_count(c, p.rows), p.cols, [&](uint32_t row) {
    const float* x = data<float>(op.x) + size_t(row) * p.cols;
    float* y = data<float>(op.y) + size_t(row) * p.cols;
    for (uint32_t first = 0; first < p.cols; first += kPiece) {
      const uint32_t n = std::min(kPiece, p.cols - first);
      float piece[kPiece];
      for (uint32_t i = 0; i < n; ++i) piece[i] = x[first + i] * p.scale;
      if (p.cap != 0) kernels().soft_cap(piece, n, p.cap);
      for (uint32_t i = 0; i < n; ++i) y[first + i] = p.add ? y[first + i] + piece[i] : piece[i];
    }
  });
}

}  // namespace thimble::cpu
