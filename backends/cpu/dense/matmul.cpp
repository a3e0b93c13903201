#include "backends/cpu/dense/matmul.h"

#ifdef THIMBLE_BLAS
#include <blis.h>
#include <cblas.h>

#include "base/bits.h"
#include "base/system.h"
#endif

namespace thimble::cpu {

static void put(const Matmul& m, uint32_t row, uint32_t col, float sum) {
  float& y = m.y[row * m.y_stride + col];
  y = m.accumulate ? y + sum : sum;
}

// Reads several parts of W in parallel, each sequentially, which suits the processor's prefetcher. Returns
// how many columns are done.
static uint32_t multiply_streams(const Matmul& m, size_t row_bytes) {
  const DigitKernels& kernels = digit_kernels();
  const size_t x_stride = digit_blocks(m.n);
  const uint32_t cols = m.cols / kernels.streams;
  // The first bytes of each part, which dot_streams() does not prefetch itself; without this they arrive line
  // by line.
  const size_t part = cols * row_bytes, begin = std::min(part, kStreamsAhead);
  for (size_t line = 0; line < begin; line += 64)
    for (uint32_t i = 0; i < kernels.streams; ++i) __builtin_prefetch(m.w + i * part + line);
  for (uint32_t c = 0; c < cols; ++c)
    for (uint32_t first = 0; first < m.x_rows; first += kernels.stream_rows) {
      const uint32_t rows = std::min(kernels.stream_rows, m.x_rows - first);
      float out[kMaxStreams * kMaxStreamRows];
      kernels.dot_streams(m.type, m.w + c * row_bytes, part, m.n, m.digits + first * x_stride, x_stride, rows,
                          out);
      for (uint32_t i = 0; i < kernels.streams; ++i)
        for (uint32_t r = 0; r < rows; ++r) put(m, first + r, i * cols + c, out[i * rows + r]);
    }
  return kernels.streams * cols;
}

static void multiply_few_rows(const Matmul& m, size_t row_bytes, bool digits) {
  const size_t x_stride = digit_blocks(m.n);
  // If there are more rows than the streams take at once, dot() is faster when it takes more rows.
  const bool streams =
      digits && m.n > digit_kernels().narrow && (m.x_rows == 1 || digit_kernels().stream_rows > 1);
  for (uint32_t c = streams ? multiply_streams(m, row_bytes) : 0; c < m.cols; ++c)
    for (uint32_t first = 0; first < m.x_rows; first += kMaxDotRows) {
      const uint32_t rows = std::min(kMaxDotRows, m.x_rows - first);
      float out[kMaxDotRows];
      if (digits)
        digit_kernels().dot(m.type, m.w + c * row_bytes, m.n, m.digits + first * x_stride, x_stride, rows,
                            out);
      else
        kernels().dot(m.type, m.w + c * row_bytes, m.n, m.x + first * m.x_stride, m.x_stride, rows, out);
      for (uint32_t r = 0; r < rows; ++r) put(m, first + r, c, out[r]);
    }
}

const DigitBlock* take_digits(const Context& c, uint64_t offset, std::initializer_list<DType> types,
                              const float* x, size_t x_stride, uint32_t rows, uint32_t n) {
  if (std::min(rows, c.step.n_rows) > digit_kernels().few_rows ||
      std::none_of(types.begin(), types.end(), digit_kernels().knows))
    return nullptr;
  if (offset + digit_bytes(rows, n) > c.scratch.size()) return nullptr;
  DigitBlock* const digits = reinterpret_cast<DigitBlock*>(c.scratch.data() + offset);
  for_rows(c, rows, n, [&](uint32_t row) {
    digit_kernels().take(x + row * x_stride, n, digits + row * digit_blocks(n));
  });
  return digits;
}

void matmul(const Matmul& m, float* scratch) {
  const size_t row_bytes = dtype_bytes(m.type, m.n);
  const bool digits = m.digits && digit_kernels().knows(m.type);
  if (digits || m.x_rows <= kMaxDotRows) return multiply_few_rows(m, row_bytes, digits);

  const Kernels& k = kernels();
  for (uint32_t col = 0; col < m.cols; col += kBlockCols) {
    const uint32_t cols = std::min(kBlockCols, m.cols - col);
    for (uint32_t i = 0; i < m.n; i += kBlockDepth) {
      const uint32_t n = std::min(kBlockDepth, m.n - i);
      const std::byte* w = m.w + col * row_bytes + dtype_bytes(m.type, i);
      const bool accumulate = m.accumulate || i > 0;
#ifdef THIMBLE_BLAS
      for (uint32_t c = 0; c < cols; ++c) k.dequantize(m.type, w + c * row_bytes, n, scratch + size_t(c) * n);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(m.x_rows), static_cast<int>(cols),
                  static_cast<int>(n), 1.0f, m.x + i, static_cast<int>(m.x_stride), scratch,
                  static_cast<int>(n), accumulate ? 1.0f : 0.0f, m.y + col, static_cast<int>(m.y_stride));
#else
      for (uint32_t c = 0; c < cols; c += k.panel_cols)
        k.pack(m.type, w + c * row_bytes, row_bytes, std::min(k.panel_cols, cols - c), n,
               scratch + size_t(c) * n);
      k.multiply(m.x + i, m.x_stride, m.x_rows, scratch, n, cols, m.y + col, m.y_stride, accumulate);
#endif
    }
  }
}

void warm_up_matmul() {
#ifdef THIMBLE_BLAS
  bli_thread_set_num_threads(1);  // overrides the environment: threading is done by our workers
  // The largest possible product. If there is no memory for it now, later products fail as well.
  constexpr size_t kX = kBlockRows * kBlockDepth, kW = kBlockCols * kBlockDepth, kY = kBlockRows * kBlockCols;
  auto pages = Pages::allocate((kX + kW + kY + kMatmulScratch) * sizeof(float));
  if (!pages.ok()) return;
  float* memory = reinterpret_cast<float*>(pages->data());
  matmul({.x = memory,
          .x_stride = kBlockDepth,
          .x_rows = kBlockRows,
          .type = DType::kF32,
          .w = reinterpret_cast<const std::byte*>(memory + kX),
          .cols = kBlockCols,
          .n = kBlockDepth,
          .y = memory + kX + kW,
          .y_stride = kBlockCols,
          .accumulate = false},
         memory + kX + kW + kY);
#endif
}

uint64_t matmul_thread_bytes() {
#ifdef THIMBLE_BLAS
  static const uint64_t bytes = [] {
    const uint64_t before = resident_anonymous_bytes();
    warm_up_matmul();
    const uint64_t after = resident_anonymous_bytes();
    return round_up(after > before ? after - before : 0, 1 << 20);
  }();
  return bytes;
#else
  return 0;
#endif
}

}  // namespace thimble::cpu
