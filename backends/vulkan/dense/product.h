// How linear and glu multiply: one row, or rows of logits, by products of vectors; others with W as f16 in
// scratch (product_slices.cpp), on matrix units where the device has them. Where it has not, rows that fit a
// tile are multiplied with W as it is.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "backends/vulkan/recording.h"
#include "backends/vulkan/shaders/dense/dense_params.h"

namespace thimble::vulkan {

// The most rows and columns of y that a workgroup makes, and the columns of x and W that pass through its
// shared memory at a time.
inline constexpr uint32_t kTile = 128, kDepth = 32;

// A norm that a product of one row has prepared in scratch: the row times the norm's weight, and sums of
// squares of the row, which give the scale that it lacks.
struct PreparedNorm {
  View row, squares;
  static PreparedNorm in(const View& scratch, uint32_t cols);
  static uint64_t bytes(uint32_t cols);
};

// y[r][c] = sum over i of x[r][i] w[c][i] + bias[c], or y += that, or y = act(y) times that.
struct Product {
  View x;     // [rows][x_stride]
  Weight w;   // [w.rows][w.cols]: in_cols or, in scratch, in_cols rounded up to kDepth, zeros at the end
  View bias;  // f32 [w.rows], or empty
  View y;     // [rows][y_stride]
  uint32_t in_cols = 0;
  uint32_t x_stride = 0, y_stride = 0;
  uint32_t rows = kStepRows;  // kStepRows, kLogitRows
  bool adds = false, activates = false;
  uint32_t act = 0;
  // A second matrix of w's shape, or empty; with it y = act(w x) * (up x). By vectors, where it is of w's
  // type, and by matrices.
  Weight up;
  uint32_t first_row = 0;  // the step's row that lies in row 0 of x and y
  // Of one row, by vectors. Where y is prepared for the norm that reads it next, and what that wants.
  PreparedNorm prepares;
  View norm_weight;
  // Where x is such, or empty: then `norm` is where the norm of it is written, or empty.
  PreparedNorm prepared;
  View norm;
  float eps = 0;

  // Its rows [row, row + rows) and columns [col, col + cols) of y.
  Product part(uint32_t row, uint32_t rows, uint32_t col, uint32_t cols) const;
  ProductParams params() const;
};
// One product, or some of the same x whose columns of y stand side by side.
void multiply(Recording&, std::span<const Product>);
// Has these products, which read a norm, read what is prepared of it; the first one writes it.
void finish_norm(const Recording&, std::span<Product>, const RmsNorm&);
// One with W as it is, in parts that the device can show a shader.
void multiply_parts(Recording&, const Product&);
// All of them with W as f16 in scratch.
void multiply_slices(Recording&, std::span<const Product>);
// Rows [first, first + count) of a matrix.
Weight rows_of(const Weight& w, uint32_t first, uint32_t count);

// Bytes that a dispatch can be shown of a large operand, wherever they start. Shaders count them in 32 bits.
inline uint64_t largest_part(const Limits& l) {
  return std::min<uint64_t>(l.max_range, std::numeric_limits<uint32_t>::max()) - l.offset_alignment;
}

// Whether rows of x from there on can be read four elements at a time: a descriptor starts at a multiple of
// 16 bytes or at x itself.
inline bool in_quads(const View& x, uint32_t x_stride, uint32_t in_cols) {
  constexpr uint32_t kQuad = 4;
  return (x.offset / sizeof(float) | x_stride | in_cols) % kQuad == 0;
}
// Whether rows of W are f16 and end with kDepth columns: product.comp takes eight in a word of 16 bytes.
inline bool in_eights(const Weight& w) {
  return w.type == DType::kF16 && w.cols % kDepth == 0 && w.offset % sizeof(uint16_t[8]) == 0;
}

// How matvec.comp is made for a matrix that is read once, for one row or a few.
struct Matvec {
  bool digits;        // by products of bytes
  bool books;         // by the shader that knows all types
  uint32_t lines;     // rows of W that share what is read of x, of both matrices of a glu
  uint32_t together;  // of them in a turn of the loop: 1, 2 or 4
  uint32_t threads;
  Matvec(const Limits&, const Weight&, uint32_t matrices);
};
// The tile of product.comp for so many rows.
struct ProductTile {
  static constexpr uint32_t kThreads = 128, kColThreads = 16;
  uint32_t thread_rows, thread_cols;  // of y that a thread makes
  ProductTile(const Limits&, uint32_t rows);
  uint32_t rows() const { return thread_rows * (kThreads / kColThreads); }
  uint32_t cols() const { return thread_cols * kColThreads; }
};

// Whether an op's rows are multiplied one by one: where there is one, or some rows of logits.
inline bool by_vectors(const Recording& r, uint32_t rows) { return rows == kLogitRows || r.max_rows() == 1; }

// Whether they are multiplied on matrix units, which want 44 KiB of shared memory.
inline bool has_matrices(const Limits& l) { return l.cooperative_matrix && l.max_shared_bytes >= 44 << 10; }
inline constexpr double kUnitSpeed = 8;  // of these beside the device's other units, at least
inline bool by_matrices(const Recording& r, uint32_t rows) {
  return has_matrices(r.limits()) && !by_vectors(r, rows);
}

// Rows of the largest tile of product.comp.
uint32_t most_tile_rows(const Limits&);

}  // namespace thimble::vulkan
