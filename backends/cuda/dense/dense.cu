// Decides how much of a product's operands is in scratch at a time.
#include "backends/cuda/dense/dense.h"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

static constexpr uint32_t kMostRows = 4096;  // rows of x at a time
// Bytes of W at a time, unless kOperandRows rows take more
static constexpr uint64_t kSliceBytes = 64ull << 20;

Operands operands(uint32_t max_rows, uint32_t in_cols, uint32_t cols) {
  Operands o;
  o.k = static_cast<uint32_t>(round_up(std::max(in_cols, 1u), kOperandDepth));
  o.x_rows = std::min(max_rows, kMostRows);
  const uint64_t fit = kSliceBytes / (o.k * sizeof(__half)) / kOperandRows * kOperandRows;
  o.w_rows =
      static_cast<uint32_t>(std::min(round_up(cols, kOperandRows), std::max<uint64_t>(fit, kOperandRows)));
  return o;
}

uint32_t slice_rows(const Launch& l, const Operands& o, uint32_t rows, uint32_t cols) {
  // The blocks of a product compute tiles of 128 rows and 256 columns, or the same area in smaller tiles; a
  // wave has one block per multiprocessor.
  const uint64_t row_tiles = ceil_div(rows, 128), col_tiles = ceil_div(cols, kOperandRows);
  const auto waves = [&](uint64_t tiles) { return ceil_div(tiles * row_tiles, l.card.multiprocessors); };
  uint64_t best = 0, fewest = ~0ull;
  for (uint64_t n = o.w_rows / kOperandRows; n > 0; --n) {
    const uint64_t all = col_tiles / n * waves(n) + waves(col_tiles % n);
    if (all < fewest) best = n, fewest = all;
  }
  return static_cast<uint32_t>(best * kOperandRows);
}

uint64_t dense_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  const uint32_t q_cols = m.heads * m.head_dim, qkv_cols = (m.heads + 2 * m.kv_heads) * m.head_dim;
  const struct {
    uint32_t in_cols, cols;
  } products[] = {{m.d_model, qkv_cols},
                  {q_cols, m.d_model},
                  {m.d_model, 2 * static_cast<uint32_t>(round_up(m.d_ff, 8))},
                  {m.d_ff, m.d_model},
                  {m.d_model, 2 * static_cast<uint32_t>(round_up(m.d_ff_shared, 8))},
                  {m.d_ff_shared, m.d_model},
                  {m.d_model, m.mixer_in},
                  {m.mixer_out, m.d_model},
                  {m.retainer[0].cols, m.retainer[0].rows},
                  {m.retainer[1].cols, m.retainer[1].rows}};
  // Rows that a retainer scores at once in decode (kBatchRows of runtime/policy/policy.h)
  constexpr uint32_t kBatchRows = 64;
  uint64_t x_bytes = 0, w_bytes = 0;
  for (const auto& p : products) {
    const Operands o = operands(std::max(s.chunk, kBatchRows), p.in_cols, p.cols);
    x_bytes = std::max(x_bytes, o.x_bytes());
    w_bytes = std::max(w_bytes, o.w_bytes());
  }
  return x_bytes + w_bytes;
}

}  // namespace thimble::cuda
