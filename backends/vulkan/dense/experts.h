// How expert_glu and expert_linear multiply: a single row by vector products (experts.cpp), several rows in
// tiles of an expert's slots (expert_tiles.cpp).
#pragma once

#include "backends/vulkan/dense/product.h"

namespace thimble::vulkan {

// With the matrices and biases of the slot's expert: y[slot][c] = x w[c] + bias[c], or act(y) times that, or
// act(x w + bias) * (x up + up_bias), or with kActReluSqr act(x w + bias); or y[row][c] += weight * that,
// over the row's slots in order.
struct ExpertProduct {
  View x;                   // [rows][in_cols], one per token, or [slots][in_cols]
  Weight w, up;             // [experts][out_cols][in_cols]; up is empty, or another matrix for the same x
  View bias, up_bias;       // f32 [experts][out_cols], or empty
  View scale, up_scale;     // f32 [experts]: factors of the products, only without a bias; or empty
  View first, row, weight;  // as in Route; the weight is empty if y has a row for each slot
  View y;                   // [slots][out_cols], or [rows][out_cols]
  uint32_t in_cols = 0, out_cols = 0, experts = 0, chosen = 0;
  uint32_t matrix_rows = 0;  // from the first row of one expert to that of the next, in w and up
  bool of_tokens = false;    // x has a row for each token
  bool activates = false;
  uint32_t act = 0;
  // For a single row: where y is prepared for the norm that reads it next, and the norm's parameters; or
  // empty.
  PreparedNorm prepares;
  View norm_weight;
  // For a single row: the route that chooses the experts, or null if they are already chosen.
  const Route* route = nullptr;
};

// The part of a product that one dispatch computes: columns [col, col + cols) of y in slots [first_slot,
// first_slot + slots).
struct ExpertPart {
  uint32_t col = 0, cols = 0, first_slot = 0, slots = 0;
  uint32_t first_expert = 0, experts = 0;  // the experts whose matrices it covers
  Weight w, up;                            // from the first column's row of the first expert on
  uint32_t matrix_rows = 0;                // rows per expert in w and up
  View x, y;                               // from the first slot on, if they have rows for slots
  uint32_t y_stride = 0;                   // of y, which begins with the first column
};
ExpertProductParams params_of(const ExpertProduct&, const ExpertPart&);

// The rows of a matrix from the first to the last of the part's columns and experts, including those in
// between.
Weight matrices_of(const ExpertProduct&, const Weight& w, const ExpertPart&);
// The part's range of `v`, [slots][stride]: `cols` columns from `col` on.
View slots_of(const View& v, uint64_t stride, const ExpertPart&, uint64_t col, uint64_t cols);
// One vector per expert from the part's first column on, or an empty view.
View vectors_of(const View& v, const ExpertPart&);
// The scales, or else the biases from the part's first column on, or an empty view.
View scale_or_bias(const View& scale, const View& bias, const ExpertPart&);

// How many experts' matrices of a type a dispatch can cover at once: at least one, and of that so many rows.
struct ExpertWindow {
  uint32_t experts, rows;
  ExpertWindow(const Limits&, const ExpertProduct&);
};

// For programs of more than one row.
void multiply_tiles(Recording&, const ExpertProduct&);

}  // namespace thimble::vulkan
