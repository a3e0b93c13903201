// delta_net row by row. Columns of a matrix are independent, so a block takes 32 of them, and holds its part
// of the matrix in registers while it goes through the rows.
#include <iterator>

#include "backends/cuda/mixers/delta_net.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kCols = kWarp;  // columns of a block
constexpr uint32_t kWarps = 8, kThreads = kWarps * kWarp;
constexpr uint32_t kWarpRows = kWarp / kWarps;  // rows of a warp, of each 32 rows of the matrix

__device__ void read_four(float (&to)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// Row by row. Row j * 32 + warp * kWarpRows + t of the matrix is of that warp, and a lane holds a column.
// With p = M^T k and r = M^T q of the matrix before a row,
//   delta = beta (v - e^gamma p);  y = (e^gamma r + (k q) delta) / sqrt(width);  M = e^gamma M + k delta^T.
template <uint32_t kWidth>
__global__ void __launch_bounds__(kThreads)
    delta_steps_kernel(const StepParams* step, DeltaNetParams p, DeltaOperands o, bool chunks) {
  constexpr uint32_t kParts = kWidth / kWarp;            // of 32 rows
  __shared__ __align__(16) float vectors[2][2][kWidth];  // [row % 2]: key and query, before their norms
  __shared__ float sums[2][2][kWarps][kCols];            // [row % 2]: each warp's part of p and r
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t head = blockIdx.y, col = blockIdx.x * kCols + lane;
  const uint32_t key_head = key_head_of(p, head);
  const float a = o.a[head], dt = o.dt[head];
  release_successor();
  const StepParams s = *step;
  // The first row, which is the last row and one if the chunks took all.
  const uint32_t first = chunks && !grows(a) ? min(chunks_of(s.n_rows) * kDeltaChunk, s.n_rows) : 0;

  const uint64_t of_head = uint64_t(head) * kWidth * kWidth + col;
  const float* before = state_before(s, o, first > 0);
  if (before) before += of_head;
  float* after = o.slots + s.state_to * o.slot_stride + of_head;
  const auto row_of = [&](uint32_t j, uint32_t t) { return j * kWarp + warp * kWarpRows + t; };
  float m[kParts][kWarpRows] = {};
  const auto read_state = [&] {
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j)
#pragma unroll
      for (uint32_t t = 0; t < kWarpRows; ++t) m[j][t] = __ldcg(before + row_of(j, t) * kWidth);
  };
  // No kernel of this program writes the slot that is read, unless it is the slot that is written.
  const bool early = first == 0 && s.state_from != s.state_to;
  if (before && early) read_state();
  await_predecessor();
  if (first > 0 && first == s.n_rows) return;
  if (before && !early) read_state();

  // What a row brings: an element of its key or query for each of the first threads, and its column's value.
  struct Row {
    float element, value, alpha, beta;
  };
  const auto read_row = [&](uint32_t row) {
    Row of{};
    if (row >= s.n_rows) return of;
    const float* qkv = o.qkv + uint64_t(row) * p.qkv_stride;
    const float* gates = o.gates + uint64_t(row) * p.gates_stride + head;
    if (threadIdx.x < 2 * kWidth)
      of.element =
          qkv[(threadIdx.x < kWidth ? p.k_column : p.q_column) + key_head * kWidth + threadIdx.x % kWidth];
    of.value = qkv[p.v_column + head * kWidth + col];
    of.alpha = gates[p.alpha_column];
    of.beta = gates[p.beta_column];
    return of;
  };
  const auto share = [&](uint32_t row, const Row& of) {
    if (threadIdx.x < 2 * kWidth) vectors[row % 2][threadIdx.x / kWidth][threadIdx.x % kWidth] = of.element;
  };
  const float query_scale = 1.0f / sqrtf(static_cast<float>(kWidth));
  Row next = read_row(first);
  share(first, next);
  __syncthreads();
  for (uint32_t row = first; row < s.n_rows; ++row) {
    const Row now = next;
    next = read_row(row + 1);
    const float *key = vectors[row % 2][0], *query = vectors[row % 2][1];
    float keys[kParts][kWarpRows], part_p = 0, part_r = 0;
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j) {
      float queries[kWarpRows];
      read_four(keys[j], key + row_of(j, 0));
      read_four(queries, query + row_of(j, 0));
#pragma unroll
      for (uint32_t t = 0; t < kWarpRows; ++t) {
        part_p += keys[j][t] * m[j][t];
        part_r += queries[t] * m[j][t];
      }
    }
    float(&parts)[2][kWarps][kCols] = sums[row % 2];
    parts[0][warp][lane] = part_p;
    parts[1][warp][lane] = part_r;
    share(row + 1, next);
    float kk = 0, qq = 0, kq = 0;
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j) {
      const float k = key[j * kWarp + lane], q = query[j * kWarp + lane];
      kk += k * k, qq += q * q, kq += k * q;
    }
    const float k_scale = 1.0f / sqrtf(warp_sum(kk) + p.eps);
    const float q_scale = query_scale / sqrtf(warp_sum(qq) + p.eps);
    kq = warp_sum(kq) * k_scale * q_scale;
    const float decay = expf(log_decay(a, now.alpha, dt)), beta = sigmoid(now.beta);
    __syncthreads();
    float sum_p = 0, sum_r = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
      sum_p += parts[0][w][lane];
      sum_r += parts[1][w][lane];
    }
    const float delta = beta * (now.value - decay * (k_scale * sum_p));
    if (warp == 0)
      o.y[uint64_t(row) * p.y_stride + head * kWidth + col] = decay * (q_scale * sum_r) + kq * delta;
    const float scaled_delta = k_scale * delta;
#pragma unroll
    for (uint32_t j = 0; j < kParts; ++j)
#pragma unroll
      for (uint32_t t = 0; t < kWarpRows; ++t) m[j][t] = decay * m[j][t] + keys[j][t] * scaled_delta;
  }
#pragma unroll
  for (uint32_t j = 0; j < kParts; ++j)
#pragma unroll
    for (uint32_t t = 0; t < kWarpRows; ++t) after[row_of(j, t) * kWidth] = m[j][t];
}

}  // namespace

void delta_steps(const Launch& l, const DeltaNetParams& p, const DeltaOperands& o, bool chunks) {
  constexpr decltype(&delta_steps_kernel<32>) kOfWidth[] = {delta_steps_kernel<32>, delta_steps_kernel<64>,
                                                            delta_steps_kernel<96>, delta_steps_kernel<128>};
  static_assert(std::size(kOfWidth) * kWarp == kMostDeltaWidth);
  launch(l, kOfWidth[p.width / kWarp - 1], dim3(p.width / kCols, p.value_heads), kThreads, 0, l.step, p, o,
         chunks);
}

}  // namespace thimble::cuda
