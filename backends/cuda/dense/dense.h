// How linear, glu and the experts multiply many rows: x and a slice of W as f16 in scratch, then a product on
// tensor cores.
//
// f16 keeps 11 bits of a number, but none above 65504, and real models reach 1e5 before ffn_down. So a power
// of two scales each row of x until its largest magnitude lies in [2^14, 2^15), and its inverse the row's
// sums, which is exact. A number of x is off by at most 2^-11 of itself or, where f16 is subnormal, by 2^-25:
// 2^-39 of the row's largest. W has no scale: its numbers are off by 2^-11 of themselves or 2^-25, and end at
// 65504, which no model comes near.
#pragma once

#include <algorithm>

#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/launch.h"

namespace thimble::cuda {

// Both operands have room for a multiple of kOperandRows rows, and k is a multiple of kOperandDepth, so that
// tiles of these sizes and divisors of them are read without a check. Rows that are only room hold any bits,
// NaN among them; they reach no rows and columns of y but their own, which are not stored.
inline constexpr uint32_t kOperandRows = 256;
inline constexpr uint32_t kOperandDepth = 64;

// y[r][c] = x_scales[r] * sum over i of x[r][i] w[c][i], or y += it, or for glu h[r][c] = act(gate) * up. Row
// 0 of x and y is row first_row of the step.
struct Product {
  const __half* x = nullptr;        // [rows][k], 256-byte aligned
  const float* x_scales = nullptr;  // [rows]: what x's rows still are to be multiplied by, powers of two
  const __half* w = nullptr;        // [cols][k], 256-byte aligned; zeros behind in_cols, here and in x
  uint32_t k = 0;                   // a multiple of kOperandDepth
  uint32_t cols = 0;                // rows of w
  uint32_t first_row = 0;
  uint32_t rows = 0;   // at most; step->n_rows says how many there are
  float* y = nullptr;  // [rows][y_stride]; 4-byte aligned, any stride
  uint32_t y_stride = 0;
  uint32_t y_cols = 0;  // columns to write: cols, or for glu the outputs
  bool add = false;     // y += instead of y =
  // glu: w holds 8 rows of gate, then the 8 rows of up that belong to them, and so on; cols is 2 y_cols
  // rounded up to 16.
  bool glu = false;
  uint32_t act = 0;  // kActSilu, kActGelu, kActClamped
  // Where there are groups, group g has rows [groups_first[g], groups_first[g + 1]) of x and y, and w's rows
  // [g * cols, (g + 1) * cols); `rows` are all that the groups may have together, and first_row is 0. What
  // bias gives them is added, of a glu to the gate and to the up.
  const uint32_t* groups_first = nullptr;
  uint32_t groups = 0;
  const float* bias[2] = {};  // [groups][bias_stride], or null
  uint32_t bias_stride = 0;
};

// Rows of the product that this step has: none where it ends before first_row.
__device__ inline uint32_t product_rows(const StepParams& s, uint32_t first_row, uint32_t rows,
                                        uint32_t slots_of_a_row = 1) {
  const uint32_t all = s.n_rows * slots_of_a_row;
  return all <= first_row ? 0 : min(all - first_row, rows);
}

// A glu of this gate and up, within a few units in the last place: the product has lost 13 bits.
__device__ inline float glu_of_product(float gate, float up, uint32_t act) {
  if (act == kActClamped) return clamped_glu(gate, up);
  return __fdividef(gate, 1.0f + __expf(-sigmoid_argument(gate, act))) * up;
}

void multiply_mma(const Launch&, const Product&);  // every card: mma.sync

bool wgmma_can(const Launch&, const Product&);       // whether multiply_wgmma takes it, and is the faster one
void multiply_wgmma(const Launch&, const Product&);  // sm_90a only

inline void multiply(const Launch& l, const Product& p) {
  wgmma_can(l, p) ? multiply_wgmma(l, p) : multiply_mma(l, p);
}

// How operands lie in Launch::scratch: x, its rows' scales, then a slice of W.
struct Operands {
  uint32_t k = 0;
  uint32_t x_rows = 0;  // rows of x that are multiplied at a time
  uint32_t w_rows = 0;  // rows of W that there is room for, a multiple of kOperandRows

  uint64_t room() const { return round_up(x_rows, kOperandRows); }
  uint64_t x_bytes() const { return room() * (k * sizeof(__half) + sizeof(float)); }
  uint64_t w_bytes() const { return uint64_t(w_rows) * k * sizeof(__half); }
  __half* x(const Launch& l) const { return reinterpret_cast<__half*>(l.scratch); }
  float* x_scales(const Launch& l) const { return reinterpret_cast<float*>(x(l) + room() * k); }
  __half* w(const Launch& l) const { return reinterpret_cast<__half*>(l.scratch + x_bytes()); }
};
// For a program of max_rows rows and W [cols][in_cols].
Operands operands(uint32_t max_rows, uint32_t in_cols, uint32_t cols);
// Rows of W that one product takes: as many as there is room for, or fewer where that leaves fewer
// multiprocessors idle.
uint32_t slice_rows(const Launch&, const Operands&, uint32_t rows, uint32_t cols);

// Rows of x that an expert's product has: of slot s row row[s], or s itself where row is null.
struct Slots {
  const uint32_t* row = nullptr;
  uint32_t of_a_row = 1;  // slots of each row of the step
};
// The step's rows [first_row, first_row + rows) of x, or its slots, as f16 and their scales into the
// operands' place, zeros behind in_cols. A row that holds an infinity or NaN keeps it; what else it holds may
// become zero.
void scale_rows(const Launch&, const Operands&, const float* x, uint32_t x_stride, uint32_t in_cols,
                uint32_t first_row, uint32_t rows, const Slots& = {});
// `rows` rows of W as f16, from row `first` on, zero behind W's columns. They follow each other in `to`,
// [rows][k], or lie in groups of 8 with room for 8 others between the groups, as glu's gate and up do.
void dequantize(const Launch&, const Weight& w, uint32_t first, uint32_t rows, __half* to, uint32_t k,
                bool in_groups);
// The same of each of p.groups experts, whose matrices of `out_cols` rows lie one behind the other in w: they
// get p.cols rows of `to` each. Experts without rows are left out.
void dequantize_experts(const Launch&, const Weight& w, uint32_t out_cols, uint32_t first, uint32_t rows,
                        const Product& p, __half* to, bool in_groups);

// The product p of x in the operands' place and W [p.cols][k], a slice of W's rows after the other;
// fill(first, count, to) makes `count` of them, from row `first` on. p's operands and k are not read.
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
