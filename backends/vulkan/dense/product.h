// How linear and glu multiply. A single row, rows of logits and exact products use vector products. Other
// programs use W as f16 in scratch (product_slices.cpp), on matrix units if the device has them. Without
// matrix units, rows that fit a single tile use W as stored.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "backends/vulkan/recording.h"
#include "backends/vulkan/shaders/dense/dense_params.h"

namespace thimble::vulkan {

// The most rows and columns of y that a workgroup computes, and the columns of x and W that are in its shared
// memory at a time.
inline constexpr uint32_t kTile = 128, kDepth = 32;

// A norm that a product of a single row has prepared in scratch: the row times the norm's weight, and sums of
// squares of the row, from which the missing scale is computed.
struct PreparedNorm {
  View row, squares;
  static PreparedNorm in(const View& scratch, uint32_t cols);
  static uint64_t bytes(uint32_t cols);
};

// y[r][c] = w.scale times the sum over i of x[r][i] w[c][i] + bias[c], or y += that, or y = act(y) times
// that.
struct Product {
  View x;  // [rows][x_stride]
  // [w.rows][w.cols]: cols is in_cols; in scratch it is in_cols rounded up to kDepth, with zeros at the end
  Weight w;
  View bias;  // f32 [w.rows], or empty
  View y;     // [rows][y_stride]
  uint32_t in_cols = 0;
  uint32_t x_stride = 0, y_stride = 0;
  uint32_t rows = kStepRows;  // kStepRows, kLogitRows
  bool exact = false;         // as in Linear
  bool adds = false, activates = false;
  uint32_t act = 0;
  // A second matrix of w's shape, or empty; with it y = act(w x) * (up x). Supported by vector products if it
  // is of w's type, and on matrix units.
  Weight up;
  uint32_t first_row = 0;  // the step's row that is row 0 of x and y
  // For a single row, by vector products: where y is prepared for the norm that reads it next, and the norm's
  // parameters.
  PreparedNorm prepares;
  View norm_weight;
  // If x is such a prepared norm; otherwise empty. Then `norm` is where the finished norm is written, or
  // empty.
  PreparedNorm prepared;
  View norm;
  float eps = 0;

  // The part for rows [row, row + rows) and columns [col, col + cols) of y.
  Product part(uint32_t row, uint32_t rows, uint32_t col, uint32_t cols) const;
  ProductParams params() const;
};
// Records one product, or several of the same x whose columns of y are adjacent.
void multiply(Recording&, std::span<const Product>);
// Makes these products, which read a norm, read the prepared norm instead; the first one writes the finished
// norm.
void finish_norm(const Recording&, std::span<Product>, const RmsNorm&);
// Multiplies with W as stored, in parts that a descriptor can cover.
void multiply_parts(Recording&, const Product&);
// Multiplies all of them with W as f16 in scratch.
void multiply_slices(Recording&, std::span<const Product>);
// Rows [first, first + count) of a matrix.
Weight rows_of(const Weight& w, uint32_t first, uint32_t count);

// Bytes of a large operand that a dispatch can cover, wherever they begin. Shaders count them in 32 bits.
inline uint64_t largest_part(const Limits& l) {
  return std::min<uint64_t>(l.max_range, std::numeric_limits<uint32_t>::max()) - l.offset_alignment;
}

// Whether rows of x can be read four elements at a time. A descriptor begins at a multiple of 16 bytes, or at
// x itself.
inline bool in_quads(const View& x, uint32_t x_stride, uint32_t in_cols) {
  constexpr uint32_t kQuad = 4;
  return (x.offset / sizeof(float) | x_stride | in_cols) % kQuad == 0;
}
// Whether rows of W are f16 and a multiple of kDepth columns: product.comp then reads eight at a time in
// units of 16 bytes.
inline bool in_eights(const Weight& w) {
  return w.type == DType::kF16 && w.cols % kDepth == 0 && w.offset % sizeof(uint16_t[8]) == 0;
}

// The variant of matvec.comp for a matrix that is read once, for one row or a few.
struct Matvec {
  bool digits;        // multiplies digits
  bool books;         // uses the shader that supports all types
  uint32_t lines;     // rows of W that share what is read of x, counting both matrices of a glu
  uint32_t together;  // lines per iteration of the loop: 1, 2 or 4
  uint32_t threads;
  Matvec(const Limits&, const Weight&, uint32_t matrices);
};
// The tile of product.comp for this many rows.
struct ProductTile {
  static constexpr uint32_t kThreads = 128, kColThreads = 16;
  uint32_t thread_rows, thread_cols;  // rows and columns of y per thread
  ProductTile(const Limits&, uint32_t rows);
  uint32_t rows() const { return thread_rows * (kThreads / kColThreads); }
  uint32_t cols() const { return thread_cols * kColThreads; }
};

// Whether an op's rows are multiplied one by one: if there is only one, or for rows of logits.
inline bool by_vectors(const Recording& r, uint32_t rows) { return rows == kLogitRows || r.max_rows() == 1; }

// Whether they are multiplied on matrix units, which needs 44 KiB of shared memory.
inline bool has_matrices(const Limits& l) { return l.cooperative_matrix && l.max_shared_bytes >= 44 << 10; }
inline constexpr double kUnitSpeed = 8;  // least speed of matrix units relative to the device's other units
inline bool by_matrices(const Recording& r, uint32_t rows) {
  return has_matrices(r.limits()) && !by_vectors(r, rows);
}

// Rows of the largest tile of product.comp.
uint32_t most_tile_rows(const Limits&);

}  // namespace thimble::vulkan
