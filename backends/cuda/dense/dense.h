// How linear, glu and the experts multiply many rows: x and a slice of W are converted to f16 in scratch,
// followed by a product on tensor cores.
//
// f16 keeps 11 bits of a number but ends at 65504, and real models reach 1e5 before ffn_down. A power of two
// therefore scales each row of x so that its largest magnitude is in [2^14, 2^15), and the inverse scales the
// row's sums; both are exact. A number of x has an error of at most 2^-11 of itself or, if f16 is subnormal,
// of 2^-25, which is 2^-39 of the row's largest. W is not scaled: its numbers have an error of 2^-11 of
// themselves or 2^-25, and end at 65504, far above those of any model.
#pragma once

#include <algorithm>

#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/launch.h"

namespace thimble::cuda {

// Both operands are padded to a multiple of kOperandRows rows, and k is a multiple of kOperandDepth, so that
// tiles of these sizes and their divisors are read without bounds checks. Padding rows may hold any bits,
// including NaN. They only affect their own rows and columns of y, which are not stored.
inline constexpr uint32_t kOperandRows = 256;
inline constexpr uint32_t kOperandDepth = 64;

// y[r][c] = x_scales[r] * w_scale[0] * sum over i of x[r][i] w[c][i], or y += that, or for glu h[r][c] =
// act(gate) * up.
// Row 0 of x and y is row first_row of the step.
struct Product {
  const __half* x = nullptr;        // [rows][k], 256-byte aligned
  const float* x_scales = nullptr;  // [rows]: factors that x's rows still need, powers of two
  const __half* w = nullptr;        // [cols][k], 256-byte aligned; zeros from in_cols on, here and in x
  uint32_t k = 0;                   // a multiple of kOperandDepth
  uint32_t cols = 0;                // rows of w
  uint32_t first_row = 0;
  uint32_t rows = 0;   // upper bound; step->n_rows says how many there are
  float* y = nullptr;  // [rows][y_stride]; 4-byte aligned, any stride
  uint32_t y_stride = 0;
  uint32_t y_cols = 0;  // columns to write: cols, or for glu the number of outputs
  bool add = false;     // y += instead of y =
  // glu: w holds 8 rows of gate, then the corresponding 8 rows of up, and so on; cols is 2 y_cols rounded up
  // to 16.
  bool glu = false;
  uint32_t act = 0;           // kActSilu, kActGelu, kActClamped
  float w_scale[2] = {1, 1};  // of w; for glu of the gate and of the up
  // With groups, group g has rows [groups_first[g], groups_first[g + 1]) of x and y, and rows [g * cols, (g +
  // 1) * cols) of w. `rows` is then a bound for all groups together, and first_row is 0. The biases are added
  // to the groups' results; for glu one to the gate and one to the up.
  const uint32_t* groups_first = nullptr;
  uint32_t groups = 0;
  const float* bias[2] = {};  // [groups][bias_stride], or null
  uint32_t bias_stride = 0;
  const float* group_scales[2] = {};  // [groups], in place of w_scale; or null
};

// The number of rows of the product in this step: 0 if the step ends before first_row.
__device__ inline uint32_t product_rows(const StepParams& s, uint32_t first_row, uint32_t rows,
                                        uint32_t slots_of_a_row = 1) {
  const uint32_t all = s.n_rows * slots_of_a_row;
  return all <= first_row ? 0 : min(all - first_row, rows);
}

// The glu of a gate and up, with an error of a few units in the last place, because the product has lost 13
// bits anyway.
__device__ inline float glu_of_product(float gate, float up, uint32_t act) {
  if (act == kActClamped) return clamped_glu(gate, up);
  if (act == kActReluSqr) return relu_of(gate, up);
  return __fdividef(gate, 1.0f + __expf(-sigmoid_argument(gate, act))) * up;
}

void multiply_mma(const Launch&, const Product&);  // every card: mma.sync

// Whether multiply_wgmma supports the product and is faster
bool wgmma_can(const Launch&, const Product&);
void multiply_wgmma(const Launch&, const Product&);  // sm_90a only

inline void multiply(const Launch& l, const Product& p) {
  wgmma_can(l, p) ? multiply_wgmma(l, p) : multiply_mma(l, p);
}

// The layout of operands in Launch::scratch: x, the scales of its rows, then a slice of W.
struct Operands {
  uint32_t k = 0;
  uint32_t x_rows = 0;  // rows of x that are multiplied at a time
  uint32_t w_rows = 0;  // rows of W that fit, a multiple of kOperandRows

  uint64_t room() const { return round_up(x_rows, kOperandRows); }
  uint64_t x_bytes() const { return room() * (k * sizeof(__half) + sizeof(float)); }
  uint64_t w_bytes() const { return uint64_t(w_rows) * k * sizeof(__half); }
  __half* x(const Launch& l) const { return reinterpret_cast<__half*>(l.scratch); }
  float* x_scales(const Launch& l) const { return reinterpret_cast<float*>(x(l) + room() * k); }
  __half* w(const Launch& l) const { return reinterpret_cast<__half*>(l.scratch + x_bytes()); }
};
// For a program of max_rows rows and W [cols][in_cols].
Operands operands(uint32_t max_rows, uint32_t in_cols, uint32_t cols);
// Rows of W for one product: as many as fit, or fewer if that leaves fewer multiprocessors idle.
uint32_t slice_rows(const Launch&, const Operands&, uint32_t rows, uint32_t cols);

// The rows of x in an expert's product. Slot s uses row row[s], or row s if row is null.
struct Slots {
  const uint32_t* row = nullptr;
  uint32_t of_a_row = 1;  // slots per row of the step
};
// Converts the step's rows [first_row, first_row + rows) of x, or its slots, to f16 with scales in the
// operands, with zeros from in_cols on. A row with an infinity or NaN keeps it; its other elements may become
// zero.
void scale_rows(const Launch&, const Operands&, const float* x, uint32_t x_stride, uint32_t in_cols,
                uint32_t first_row, uint32_t rows, const Slots& = {});
// Converts `rows` rows of W from row `first` on to f16, with zeros after W's columns. In `to`, [rows][k],
// they are consecutive, or in groups of 8 with space for 8 other rows between the groups, as for glu's gate
// and up.
void dequantize(const Launch&, const Weight& w, uint32_t first, uint32_t rows, __half* to, uint32_t k,
                bool in_groups);
// The same for each of p.groups experts, whose matrices of `out_cols` rows are consecutive in w. Each expert
// gets p.cols rows of `to`. Experts without rows are skipped.
void dequantize_experts(const Launch&, const Weight& w, uint32_t out_cols, uint32_t first, uint32_t rows,
                        const Product& p, __half* to, bool in_groups);

// Computes product p of the operands' x and W [p.cols][k], one slice of W's rows after the other. fill(first,
// count, to) makes `count` rows from row `first` on. The operands and k in p are not read.
template <typename Fill>
void multiply_slices(const Launch& l, const Operands& o, const Product& p, const Fill& fill) {
  const uint32_t slice = slice_rows(l, o, p.rows, p.cols), rows_to_output = p.glu ? 2 : 1;
  for (uint32_t first = 0; first < p.cols; first += slice) {
    Product part = p;
    part.x = o.x(l);
    part.x_scales = o.x_scales(l);
    part.w = o.w(l);
    part.k = o.k;
    part.cols = std::min(slice, p.cols - first);
    part.y = p.y + first / rows_to_output;
    part.y_cols = std::min(part.cols / rows_to_output, p.y_cols - first / rows_to_output);
    fill(first, part.cols, o.w(l));
    multiply(l, part);
  }
}

}  // namespace thimble::cuda
