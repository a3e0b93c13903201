// How expert_glu and expert_linear multiply: one row by products of vectors (experts.cpp), more of them in
// tiles of an expert's slots (expert_tiles.cpp).
#pragma once

#include "backends/vulkan/dense/product.h"

namespace thimble::vulkan {

// y[slot][c] = x w[c] + bias[c] of the slot's expert, or act(y) times that, or act(x w + bias) times
// (x up + up_bias); or y[row][c] += weight times that, over the row's slots in order.
struct ExpertProduct {
  View x;                   // [rows][in_cols] of tokens, or [slots][in_cols]
  Weight w, up;             // [experts * out_cols][in_cols]; up is empty, or another matrix for the same x
  View bias, up_bias;       // f32 [experts][out_cols], or empty
  View first, row, weight;  // as route gives them; the weight is empty where y has a row for each slot
  View y;                   // [slots][out_cols], or [rows][out_cols]
  uint32_t in_cols = 0, out_cols = 0, experts = 0, chosen = 0;
  bool of_tokens = false;  // x has a row for each token
  bool activates = false;
  uint32_t act = 0;
  // Of one row: where y is prepared for the norm that reads it next, and what that wants; or empty.
  PreparedNorm prepares;
  View norm_weight;
  // Of one row: what chooses the experts, or null where they are chosen.
  const Route* route = nullptr;
};

// What a dispatch sees of one: columns [col, col + cols) of y in slots [first_slot, first_slot + slots).
struct ExpertPart {
  uint32_t col = 0, cols = 0, first_slot = 0, slots = 0;
  uint32_t first_expert = 0, experts = 0;  // whose matrices
  Weight w, up;                            // from the first column's row of the first expert on
  uint32_t matrix_rows = 0;                // of an expert in these
  View x, y;                               // from the first slot on, where they have rows for slots
  uint32_t y_stride = 0;                   // of y, which begins with the first column
};
ExpertProductParams params_of(const ExpertProduct&, const ExpertPart&);

// The part's columns of its experts in a matrix, and what lies between them.
Weight matrices_of(const ExpertProduct&, const Weight& w, const ExpertPart&);
// What `v`, [slots][stride], holds of a part: `cols` columns from `col` on.
View slots_of(const View& v, uint64_t stride, const ExpertPart&, uint64_t col, uint64_t cols);
// A vector of each expert from the part's first column on, or nothing.
View vectors_of(const View& v, const ExpertPart&);

// How many experts' matrices of a type a dispatch can be shown at once; one at least, and of one so many
// rows.
struct ExpertWindow {
  uint32_t experts, rows;
  ExpertWindow(const Limits&, const ExpertProduct&);
};

// In programs of more than one row.
void multiply_tiles(Recording&, const ExpertProduct&);

}  // namespace thimble::vulkan
