// expert_glu and expert_linear: a warp takes a row of an expert's matrix, and multiplies it with all rows
// that the expert serves. expert_linear leaves what the slots add in scratch, some columns at a time, and
// adds it up row by row.
#include "backends/cuda/dense/activation.cuh"
#include "backends/cuda/dense/formats.cuh"
#include "backends/cuda/ops.h"

namespace thimble::cuda {
namespace {

constexpr uint32_t kWarps = 8;  // of a block, a row of W each
constexpr uint32_t kSlots = 8;  // that share what is read of W
constexpr uint32_t kAddThreads = 128;
constexpr uint64_t kPartsBytes =
    32 << 20;  // of slots in scratch at a time, unless kLeastCols columns are more
constexpr uint32_t kLeastCols = 128;

// y[slot][c] = x w[c] + bias[c] of the slot's expert, or act(y) times that.
struct ExpertProduct {
  const std::byte* w;  // [experts * out_cols][in_cols]
  uint64_t row_bytes;
  const float* x;     // a row for each token, or for each slot
  const float* bias;  // [experts][out_cols], or null
  const uint32_t *first, *row;
  float* y;  // [slots][y_stride], whose column 0 is first_col
  uint32_t in_cols, out_cols, experts, y_stride, first_col, cols;
  bool of_tokens, activates, one_row;
  uint32_t act;
};

// act(gate) times up. kActClamped: gpt-oss.
__device__ float glu_of(float gate, float up, uint32_t act) {
  if (act != kActClamped) return activated(gate, act) * up;
  gate = fminf(gate, 7.0f);
  return gate / (1 + expf(-1.702f * gate)) * (fminf(fmaxf(up, -7.0f), 7.0f) + 1);
}

// Whose slot it is: as many experts come before as have slots that end before it. Whole warps call it.
__device__ uint32_t expert_of(const uint32_t* first, uint32_t experts, uint32_t slot) {
  uint32_t before = 0;
  for (uint32_t from = 0; from < experts; from += kWarp) {
    const uint32_t e = from + threadIdx.x % kWarp;
    before += __popc(__ballot_sync(~0u, e < experts && first[e + 1] <= slot));
  }
  return before;
}

// Block: rows of W, and an expert; in a program of one row, a slot.
template <DType type>
__global__ void __launch_bounds__(kWarps* kWarp) expert_kernel(ExpertProduct p) {
  begin_kernel();
  const uint32_t lane = threadIdx.x % kWarp, col = blockIdx.x * kWarps + threadIdx.x / kWarp;
  const uint32_t expert = p.one_row ? expert_of(p.first, p.experts, blockIdx.y) : blockIdx.y;
  const uint32_t begin = p.one_row ? blockIdx.y : p.first[expert],
                 end = p.one_row ? begin + 1 : p.first[expert + 1];
  if (begin == end || col >= p.cols) return;
  const uint64_t w_row = uint64_t(expert) * p.out_cols + p.first_col + col;
  const std::byte* w = p.w + w_row * p.row_bytes;
  const float bias = p.bias ? p.bias[w_row] : 0;
  for (uint32_t slot = begin; slot < end; slot += kSlots) {
    const uint32_t slots = min(end - slot, kSlots);
    const float* x[kSlots];
    float sums[kSlots] = {};
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      const uint32_t own = slot + min(s, slots - 1);
      x[s] = p.x + uint64_t(p.of_tokens ? p.row[own] : own) * p.in_cols;
    }
    for (uint32_t c = 8 * lane; c < p.in_cols; c += 8 * kWarp) {
      const auto of_w = eight_of_row<type>(w, c, p.in_cols);
#pragma unroll
      for (uint32_t s = 0; s < kSlots; ++s) {
        if (s >= slots) break;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i)
          if (c + i < p.in_cols) sums[s] = fmaf(of_w.at(i), x[s][c + i], sums[s]);
      }
    }
#pragma unroll
    for (uint32_t s = 0; s < kSlots; ++s) {
      if (s >= slots) break;
      const float sum = warp_sum(sums[s]) + bias;
      float& y = p.y[uint64_t(slot + s) * p.y_stride + col];
      if (lane == 0) y = p.activates ? glu_of(y, sum, p.act) : sum;
    }
  }
}

using ExpertKernel = void (*)(ExpertProduct);
ExpertKernel kernel_of(DType type) {
  switch (type) {
#define X(name, number, block, bytes) \
  case DType::k##name:                \
    return expert_kernel<DType::k##name>;
    THIMBLE_DTYPES(X)
#undef X
  }
  return nullptr;
}

void multiply(const Launch& l, const Weight& w, uint32_t chosen, ExpertProduct p) {
  p.w = data<std::byte>(w);
  p.row_bytes = dtype_bytes(w.type, p.in_cols);
  p.one_row = l.max_rows == 1;
  launch(l, kernel_of(w.type),
         dim3(static_cast<uint32_t>(ceil_div(p.cols, kWarps)), p.one_row ? chosen : p.experts),
         kWarps * kWarp, 0, p);
}

// What add_experts_kernel adds up: columns of y.
struct ExpertParts {
  const float* parts;  // [slots][cols]
  const uint32_t *first, *row;
  const float* weight;
  float* y;  // [rows][y_stride]
  uint32_t cols, y_stride, experts, chosen;
};

// The row's slots, in order: a warp looks it up in the slots of all experts, in which rows ascend.
__device__ void find_slots(const ExpertParts& p, uint32_t row, uint32_t* slots) {
  uint32_t found = 0;
  for (uint32_t from = 0; from < p.experts; from += kWarp) {
    const uint32_t e = from + threadIdx.x;
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
    if (serves) slots[min(found + __popc(all & ((1u << threadIdx.x) - 1)), p.chosen - 1)] = at;
    found += __popc(all);
  }
}

__global__ void __launch_bounds__(kAddThreads) add_experts_kernel(const StepParams* step, ExpertParts p) {
  extern __shared__ uint32_t slots[];  // [chosen]
  begin_kernel();
  const uint32_t row = blockIdx.y, col = blockIdx.x * kAddThreads + threadIdx.x;
  if (row >= step->n_rows) return;
  if (threadIdx.x < kWarp) find_slots(p, row, slots);
  __syncthreads();
  if (col >= p.cols) return;
  float& y = p.y[uint64_t(row) * p.y_stride + col];
  float sum = y;
  for (uint32_t i = 0; i < p.chosen; ++i)
    sum = fmaf(p.weight[slots[i]], p.parts[uint64_t(slots[i]) * p.cols + col], sum);
  y = sum;
}

// Columns of y whose parts lie in scratch at a time.
uint32_t columns_at_once(uint64_t slots, uint32_t out_cols) {
  return static_cast<uint32_t>(
      std::min<uint64_t>(std::max<uint64_t>(kPartsBytes / (slots * sizeof(float)), kLeastCols), out_cols));
}

}  // namespace

void expert_glu(const Launch& l, const ExpertGlu& op) {
  const ExpertGluParams& p = op.p;
  ExpertProduct product{.x = data<float>(op.x),
                        .bias = data<float>(op.gate_bias),
                        .first = data<uint32_t>(op.first),
                        .row = data<uint32_t>(op.row),
                        .y = data<float>(op.h),
                        .in_cols = p.in_cols,
                        .out_cols = p.out_cols,
                        .experts = p.experts,
                        .y_stride = p.out_cols,
                        .cols = p.out_cols,
                        .of_tokens = true,
                        .act = p.act};
  multiply(l, op.gate, p.chosen, product);
  product.bias = data<float>(op.up_bias);
  product.activates = true;
  multiply(l, op.up, p.chosen, product);
}

void expert_linear(const Launch& l, const ExpertLinear& op) {
  const ExpertLinearParams& p = op.p;
  float* const parts = reinterpret_cast<float*>(l.scratch);
  const uint32_t most = columns_at_once(uint64_t(l.max_rows) * p.chosen, p.out_cols);
  for (uint32_t col = 0; col < p.out_cols; col += most) {
    const uint32_t cols = std::min(most, p.out_cols - col);
    multiply(l, op.w, p.chosen,
             {.x = data<float>(op.h),
              .bias = data<float>(op.bias),
              .first = data<uint32_t>(op.first),
              .row = data<uint32_t>(op.row),
              .y = parts,
              .in_cols = p.in_cols,
              .out_cols = p.out_cols,
              .experts = p.experts,
              .y_stride = cols,
              .first_col = col,
              .cols = cols});
    const ExpertParts all{.parts = parts,
                          .first = data<uint32_t>(op.first),
                          .row = data<uint32_t>(op.row),
                          .weight = data<float>(op.weight),
                          .y = data<float>(op.y) + col,
                          .cols = cols,
                          .y_stride = p.out_cols,
                          .experts = p.experts,
                          .chosen = p.chosen};
    launch(l, add_experts_kernel, dim3(static_cast<uint32_t>(ceil_div(cols, kAddThreads)), l.max_rows),
           kAddThreads, p.chosen * sizeof(uint32_t), l.step, all);
  }
}

uint64_t expert_scratch(const ModelShape& m, const SessionShape& s, const Card&) {
  const uint64_t slots = uint64_t(s.chunk) * m.chosen_experts;
  // Programs of fewer rows have more columns at once.
  return std::max(slots * kLeastCols * sizeof(float),
                  std::min<uint64_t>(kPartsBytes, slots * m.d_model * sizeof(float)));
}

}  // namespace thimble::cuda
