// expert_glu and expert_linear. For a single row, warps multiply rows of the chosen experts' matrices with
// vectors, if matvec_experts.cu does not support the types. For many rows, the slots of an expert are
// consecutive and form a group of a product on tensor cores (dense.h). expert_linear stores the slots'
// contributions in scratch, some columns at a time, and adds them up row by row.
#include "backends/cuda/dense/dense.h"
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/dense/groups.cuh"
#include "backends/cuda/dense/matvec.h"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kWarps = 4;  // per block, each with its own rows of the matrices
constexpr uint32_t kAddThreads = 128;
// Bytes of all experts' W as f16 at a time, unless kLeastCols columns take more. Many columns keep all
// multiprocessors busy: with 128 experts of 128 slots each, 256 columns are about 200 tiles.
constexpr uint64_t kWBytes = 128 << 20;
// Bytes of the slots' contributions at a time, with the same exception
constexpr uint64_t kPartsBytes = 32 << 20;
constexpr uint32_t kLeastCols = 128;

template <typename Elements>
__device__ inline float product_of(const Elements& w, const EightFloats& x) {
  float sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) sum = fmaf(w.at(i), x.v[i], sum);
  return sum;
}

// The matrices of all experts: [experts][out_cols][in_cols], those of a glu with other rows between two.
struct Matrices {
  const std::byte* w;
  uint64_t row_bytes;
  const float* bias;   // [experts][out_cols], or null
  const float* scale;  // [experts], or null
};
struct VectorGlu {
  Matrices gate, up;
  const float* x;
  const uint32_t* first;
  float* h;  // [chosen][out_cols]
  uint32_t in_cols, out_cols, experts, act;
  uint32_t matrix_rows;  // from the first row of one expert to that of the next
};

// glu of a single row, for matrices of one type. A warp computes kRows rows of one expert's gate and up, so
// that the part of x that it reads serves 2 kRows rows.
constexpr uint32_t kRows = 2;
template <DType type>
__global__ void __launch_bounds__(kWarps* kWarp) glu_kernel(VectorGlu p) {
  begin_kernel();
  const uint32_t lane = threadIdx.x % kWarp, slot = blockIdx.y;
  const uint32_t row = (blockIdx.x * kWarps + threadIdx.x / kWarp) * kRows;
  const uint64_t expert = expert_of(p.first, p.experts, slot);
  if (row >= p.out_cols) return;
  uint64_t rows[kRows];
  for (uint32_t r = 0; r < kRows; ++r) rows[r] = expert * p.matrix_rows + min(row + r, p.out_cols - 1);
  float gate[kRows] = {}, up[kRows] = {};
#pragma unroll 2
  for (uint32_t c = 8 * lane; c < p.in_cols; c += 8 * kWarp) {
    const EightFloats x = eight_of_floats(p.x, c, p.in_cols);
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      gate[r] += product_of(eight_of_row<type>(p.gate.w + rows[r] * p.gate.row_bytes, c, p.in_cols), x);
      up[r] += product_of(eight_of_row<type>(p.up.w + rows[r] * p.up.row_bytes, c, p.in_cols), x);
    }
  }
#pragma unroll
  for (uint32_t r = 0; r < kRows; ++r) {
    const uint64_t at = expert * p.out_cols + min(row + r, p.out_cols - 1);
    const auto whole = [&](const Matrices& m, float sum) {
      sum = warp_sum(sum);
      if (m.scale) sum *= m.scale[expert];
      return m.bias ? sum + m.bias[at] : sum;
    };
    const float g = whole(p.gate, gate[r]), u = whole(p.up, up[r]);
    if (lane == 0 && row + r < p.out_cols) p.h[uint64_t(slot) * p.out_cols + row + r] = glu_of(g, u, p.act);
  }
}

struct VectorLinear {
  Matrices w;
  const float* h;  // [chosen][in_cols]
  const uint32_t* first;
  const float* weight;  // [chosen]
  float* y;
  uint32_t in_cols, out_cols, experts, chosen;
};

// The sum for a single row: a warp computes one row of the matrices of all chosen experts.
template <DType type>
__global__ void __launch_bounds__(kWarps* kWarp) sum_kernel(VectorLinear p) {
  extern __shared__ uint32_t experts[];  // [chosen]
  begin_kernel();
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, col = blockIdx.x * kWarps + warp;
  for (uint32_t s = warp; s < p.chosen; s += kWarps) {
    const uint32_t expert = expert_of(p.first, p.experts, s);
    if (lane == 0) experts[s] = expert;
  }
  __syncthreads();
  if (col >= p.out_cols) return;
  float sum = 0;
#pragma unroll 4
  for (uint32_t s = 0; s < p.chosen; ++s) {
    const uint64_t row = uint64_t(experts[s]) * p.out_cols + col;
    const std::byte* w = p.w.w + row * p.w.row_bytes;
    float product = 0;
#pragma unroll 2
    for (uint32_t c = 8 * lane; c < p.in_cols; c += 8 * kWarp)
      product += product_of(eight_of_row<type>(w, c, p.in_cols),
                            eight_of_floats(p.h + uint64_t(s) * p.in_cols, c, p.in_cols));
    if (p.w.scale) product *= p.w.scale[experts[s]];
    if (p.w.bias && lane == 0) product += p.w.bias[row];
    sum = fmaf(p.weight[s], product, sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) p.y[col] += sum;
}

Matrices matrices_of(const Weight& w, const In& bias, const In& scale) {
  return {data<std::byte>(w), dtype_bytes(w.type, w.cols), data<float>(bias), data<float>(scale)};
}

// Which slots serve a row: slots[row][chosen], ascending.
struct SlotsOfRows {
  const uint32_t *first, *row;
  uint32_t* slots;
  uint32_t experts, chosen;
};

// A warp finds a row's slots: each lane searches the slots of an expert, in which rows ascend.
__global__ void __launch_bounds__(kWarps* kWarp) list_slots_kernel(const StepParams* step, SlotsOfRows p) {
  begin_kernel();
  const uint32_t lane = threadIdx.x % kWarp, row = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (row >= step->n_rows) return;
  uint32_t found = 0;
  for (uint32_t from = 0; from < p.experts; from += kWarp) {
    const uint32_t e = from + lane;
    uint32_t at = e < p.experts ? p.first[e] : 0;
    const uint32_t behind = e < p.experts ? p.first[e + 1] : 0;
    for (uint32_t end = behind; at < end;) {
      const uint32_t middle = (at + end) / 2;
      if (p.row[middle] < row)
        at = middle + 1;
      else
        end = middle;
    }
    const bool serves = at < behind && p.row[at] == row;
    const uint32_t all = __ballot_sync(~0u, serves);
    if (serves)
      p.slots[uint64_t(row) * p.chosen + min(found + __popc(all & ((1u << lane) - 1)), p.chosen - 1)] = at;
    found += __popc(all);
  }
}

// The columns of y that add_experts_kernel sums.
struct ExpertParts {
  const float* parts;     // [slots][cols]
  const uint32_t* slots;  // [rows][chosen]
  const float* weight;    // of each slot
  float* y;               // [rows][y_stride]
  uint32_t cols, y_stride, chosen;
};

__global__ void __launch_bounds__(kAddThreads) add_experts_kernel(const StepParams* step, ExpertParts p) {
  begin_kernel();
  const uint32_t row = blockIdx.x;
  if (row >= step->n_rows) return;
  const uint32_t* const slots = p.slots + uint64_t(row) * p.chosen;
  for (uint32_t col = threadIdx.x; col < p.cols; col += kAddThreads) {
    float& y = p.y[uint64_t(row) * p.y_stride + col];
    float sum = y;
#pragma unroll 8
    for (uint32_t i = 0; i < p.chosen; ++i)
      sum = fmaf(p.weight[slots[i]], p.parts[uint64_t(slots[i]) * p.cols + col], sum);
    y = sum;
  }
}

// How many columns fit in `bytes` if one takes `bytes_of_one`: all of them, or a number of whole tiles of the
// product.
uint32_t columns_at_once(uint64_t bytes, uint64_t bytes_of_one, uint32_t cols) {
  const uint64_t fit = std::max<uint64_t>(bytes / bytes_of_one / kLeastCols * kLeastCols, kLeastCols);
  return static_cast<uint32_t>(std::min<uint64_t>(fit, cols));
}

// The layout in scratch of a product of all experts: x of all slots, then W.
struct ExpertOperands {
  Operands o;
  uint32_t cols;  // output columns at a time

  // rows_to_output: rows of W per output, 2 for a glu.
  ExpertOperands(uint64_t slots, uint32_t in_cols, uint32_t out_cols, uint32_t experts,
                 uint32_t rows_to_output, uint64_t bytes_of_part) {
    o.k = static_cast<uint32_t>(round_up(std::max(in_cols, 1u), kOperandDepth));
    o.x_rows = static_cast<uint32_t>(slots);
    cols = columns_at_once(kWBytes, uint64_t(experts) * rows_to_output * o.k * sizeof(__half), out_cols);
    if (bytes_of_part) cols = std::min(cols, columns_at_once(kPartsBytes, bytes_of_part, out_cols));
    // A tile may read past the rows of its group, and past the last row.
    o.w_rows = static_cast<uint32_t>(uint64_t(experts) * rows_to_output * round_up(cols, 8) + kOperandRows);
  }
  uint64_t bytes() const { return o.x_bytes() + o.w_bytes(); }
};

}  // namespace

// Without a gate, the rows of up are those of the gate, too: max(u, 0)^2 = max(u, 0) u. Memory is read once.
static ExpertGlu gated(ExpertGlu op) {
  if (op.gate) return op;
  op.gate = op.up;
  op.gate_bias = op.up_bias;
  op.gate_scale = op.up_scale;
  return op;
}

void routed_experts(const Launch& l, const Route& router, const ExpertGlu& op, const ExpertLinear* linear,
                    const SharedExpert& shared) {
  const ExpertGlu glu = gated(op);
  const bool vectors = multiplies_vectors(l, glu) && chooses_experts(router),
             vector_sum = linear && vectors && multiplies_vectors(l, *linear),
             shares = vector_sum && multiplies_shared(glu, *linear, shared);
  if (vectors) {
    multiply_vectors(l, glu, &router, shares ? shared : SharedExpert{});
  } else {
    route(l, router);
    expert_glu(l, glu);
  }
  if (vector_sum)
    multiply_vectors(l, *linear, &router, shares ? shared : SharedExpert{});
  else if (linear)
    expert_linear(l, *linear);
  if (!shared.glu || shares) return;
  thimble::cuda::glu(l, *shared.glu);
  if (shared.gate) gate(l, *shared.gate);
  thimble::cuda::linear(l, *shared.linear);
}

void expert_glu(const Launch& l, const ExpertGlu& maybe_gated) {
  const ExpertGlu op = gated(maybe_gated);
  const ExpertGluParams& p = op.p;
  const uint32_t* const first = data<uint32_t>(op.first);
  if (multiplies_vectors(l, op)) return multiply_vectors(l, op, nullptr);
  if (l.max_rows == 1 && op.gate.type == op.up.type) {
    const VectorGlu v{.gate = matrices_of(op.gate, op.gate_bias, op.gate_scale),
                      .up = matrices_of(op.up, op.up_bias, op.up_scale),
                      .x = data<float>(op.x),
                      .first = first,
                      .h = data<float>(op.h),
                      .in_cols = p.in_cols,
                      .out_cols = p.out_cols,
                      .experts = p.experts,
                      .act = p.act,
                      .matrix_rows = p.out_cols + p.rows_between};
    launch(l, of_type(op.gate.type, [](auto type) { return glu_kernel<type()>; }),
           dim3(static_cast<uint32_t>(ceil_div(p.out_cols, kWarps * kRows)), p.chosen), kWarps * kWarp, 0, v);
    return;
  }
  const uint32_t slots = l.max_rows * p.chosen;
  const ExpertOperands e(slots, p.in_cols, p.out_cols, p.experts, 2, 0);
  scale_rows(l, e.o, data<float>(op.x), p.in_cols, p.in_cols, 0, slots, {data<uint32_t>(op.row), p.chosen});
  for (uint32_t col = 0; col < p.out_cols; col += e.cols) {
    const uint32_t cols = std::min(e.cols, p.out_cols - col);
    const Product product{.x = e.o.x(l),
                          .x_scales = e.o.x_scales(l),
                          .w = e.o.w(l),
                          .k = e.o.k,
                          .cols = 2 * static_cast<uint32_t>(round_up(cols, 8)),
                          .rows = slots,
                          .y = data<float>(op.h) + col,
                          .y_stride = p.out_cols,
                          .y_cols = cols,
                          .glu = true,
                          .act = p.act,
                          .groups_first = first,
                          .groups = p.experts,
                          .bias = {op.gate_bias ? data<float>(op.gate_bias) + col : nullptr,
                                   op.up_bias ? data<float>(op.up_bias) + col : nullptr},
                          .bias_stride = p.out_cols,
                          .group_scales = {data<float>(op.gate_scale), data<float>(op.up_scale)}};
    const uint32_t matrix_rows = p.out_cols + p.rows_between;
    dequantize_experts(l, op.gate, matrix_rows, col, cols, product, e.o.w(l), true);
    dequantize_experts(l, op.up, matrix_rows, col, cols, product, e.o.w(l) + 8 * e.o.k, true);
    multiply(l, product);
  }
}

void expert_linear(const Launch& l, const ExpertLinear& op) {
  const ExpertLinearParams& p = op.p;
  const uint32_t* const first = data<uint32_t>(op.first);
  if (multiplies_vectors(l, op)) return multiply_vectors(l, op, nullptr);
  if (l.max_rows == 1) {
    const VectorLinear v{.w = matrices_of(op.w, op.bias, op.scale),
                         .h = data<float>(op.h),
                         .first = first,
                         .weight = data<float>(op.weight),
                         .y = data<float>(op.y),
                         .in_cols = p.in_cols,
                         .out_cols = p.out_cols,
                         .experts = p.experts,
                         .chosen = p.chosen};
    launch(l, of_type(op.w.type, [](auto type) { return sum_kernel<type()>; }),
           static_cast<uint32_t>(ceil_div(p.out_cols, kWarps)), kWarps * kWarp, p.chosen * sizeof(uint32_t),
           v);
    return;
  }
  const uint32_t slots = l.max_rows * p.chosen;
  const ExpertOperands e(slots, p.in_cols, p.out_cols, p.experts, 1, slots * sizeof(float));
  float* const parts = reinterpret_cast<float*>(l.scratch + round_up(e.bytes(), sizeof(float4)));
  uint32_t* const slots_of_rows = reinterpret_cast<uint32_t*>(parts + uint64_t(slots) * e.cols);
  launch(l, list_slots_kernel, static_cast<uint32_t>(ceil_div(l.max_rows, kWarps)), kWarps * kWarp, 0, l.step,
         SlotsOfRows{first, data<uint32_t>(op.row), slots_of_rows, p.experts, p.chosen});
  scale_rows(l, e.o, data<float>(op.h), p.in_cols, p.in_cols, 0, slots, {nullptr, p.chosen});
  for (uint32_t col = 0; col < p.out_cols; col += e.cols) {
    const uint32_t cols = std::min(e.cols, p.out_cols - col);
    const Product product{.x = e.o.x(l),
                          .x_scales = e.o.x_scales(l),
                          .w = e.o.w(l),
                          .k = e.o.k,
                          .cols = cols,
                          .rows = slots,
                          .y = parts,
                          .y_stride = cols,
                          .y_cols = cols,
                          .groups_first = first,
                          .groups = p.experts,
                          .bias = {op.bias ? data<float>(op.bias) + col : nullptr},
                          .bias_stride = p.out_cols,
                          .group_scales = {data<float>(op.scale)}};
    dequantize_experts(l, op.w, p.out_cols, col, cols, product, e.o.w(l), false);
    multiply(l, product);
    const ExpertParts all{.parts = parts,
                          .slots = slots_of_rows,
                          .weight = data<float>(op.weight),
                          .y = data<float>(op.y) + col,
                          .cols = cols,
                          .y_stride = p.out_cols,
                          .chosen = p.chosen};
    launch(l, add_experts_kernel, l.max_rows, kAddThreads, 0, l.step, all);
  }
}

uint64_t expert_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  if (!m.experts) return 0;
  const uint64_t slots = uint64_t(s.chunk) * m.chosen_experts;
  const ExpertOperands glu(slots, m.d_model, m.d_ff, m.experts, 2, 0),
      linear(slots, m.d_ff, m.d_model, m.experts, 1, slots * sizeof(float));
  // Programs of fewer rows process more columns of parts at once, up to kPartsBytes.
  const uint64_t parts = std::min(std::max<uint64_t>(kPartsBytes, slots * kLeastCols * sizeof(float)),
                                  slots * m.d_model * sizeof(float));
  return std::max(glu.bytes(), round_up(linear.bytes(), sizeof(float4)) + parts + slots * sizeof(uint32_t));
}

}  // namespace thimble::cuda
