// delta_net row by row. Columns of a matrix are independent, so a block takes 32 of them, and holds its part
// of the matrix in registers while it goes through the rows.
#include <iterator>

#include "backends/cuda/cluster.cuh"
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

// A channel of a convolution of one row: its weights and the rows before it, which no kernel of this program
// writes.
struct Channel {
  float w[kMostTaps], u[kMostTaps - 1];
};
__device__ Channel read_channel(const StepParams& s, const Convolution& conv, uint32_t channel) {
  Channel c;
#pragma unroll
  for (uint32_t j = 0; j < kMostTaps; ++j) c.w[j] = j < conv.taps ? conv.w[channel * conv.taps + j] : 0.0f;
  const bool any = s.state_from != kNoState;
  const float* before = conv.tails + (any ? s.state_from : 0) * conv.tail_stride + channel;
#pragma unroll
  for (uint32_t j = 0; j < kMostTaps - 1; ++j)
    c.u[j] = any && j + 1 < conv.taps ? __ldcg(before + uint64_t(j) * conv.channels) : 0.0f;
  return c;
}
// The tail after a step without rows.
__device__ void copy_tail(const StepParams& s, const Convolution& conv, uint32_t channel, const Channel& c) {
  float* after = conv.tails + s.state_to * conv.tail_stride + channel;
#pragma unroll
  for (uint32_t j = 0; j + 1 < kMostTaps; ++j)
    if (j + 1 < conv.taps) after[uint64_t(j) * conv.channels] = c.u[j];
}
// y of the row. Writes it and the tail if `owns`.
__device__ float convolve(const StepParams& s, const Convolution& conv, uint32_t channel, const Channel& c,
                          bool owns) {
  const float x = conv.x[channel];
  float sum = 0;
#pragma unroll
  for (uint32_t j = 0; j < kMostTaps; ++j)
    if (j < conv.taps) sum += c.w[j] * (j + 1 < conv.taps ? c.u[min(j, kMostTaps - 2)] : x);
  const float y = silu(sum);
  if (!owns) return y;
  conv.y[channel] = y;
  float* after = conv.tails + s.state_to * conv.tail_stride + channel;
#pragma unroll
  for (uint32_t j = 0; j + 2 < kMostTaps; ++j)
    if (j + 2 < conv.taps) after[uint64_t(j) * conv.channels] = c.u[j + 1];
  after[uint64_t(conv.taps - 2) * conv.channels] = x;
  return y;
}

// Row by row. Row j * 32 + warp * kWarpRows + t of the matrix is of that warp, and a lane holds a column.
// With p = M^T k and r = M^T q of the matrix before a row,
//   delta = beta (v - e^gamma p);  y = (e^gamma r + (k q) delta) / sqrt(width);  M = e^gamma M + k delta^T.
// kConvolves: for a single row, whose vectors are made by `conv`. kBlocks: 1, or those of a head, which are a
// cluster that makes the norm, too.
template <uint32_t kWidth, bool kConvolves, uint32_t kBlocks>
__global__ void THIMBLE_CLUSTER(kBlocks) __launch_bounds__(kThreads, 2)
    delta_steps_kernel(const StepParams* step, DeltaNetParams p, DeltaOperands o, bool chunks,
                       Convolution conv, Norm norm) {
  constexpr uint32_t kParts = kWidth / kWarp;            // of 32 rows
  __shared__ __align__(16) float vectors[2][2][kWidth];  // [row % 2]: key and query, before their norms
  __shared__ float sums[2][2][kWarps][kCols];            // [row % 2]: each warp's part of p and r
  __shared__ float squares[kBlocks];                     // of y, of each block's columns
  arrive_at_cluster_barrier<kBlocks>();  // blocks may write to each other's memory only once all have started
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
  const uint32_t element_at =
      (threadIdx.x < kWidth ? p.k_column : p.q_column) + key_head * kWidth + threadIdx.x % kWidth;
  const uint32_t value_at = p.v_column + head * kWidth + col;
  Channel element_channel, value_channel;
  if constexpr (kConvolves) {
    if (threadIdx.x < 2 * kWidth) element_channel = read_channel(s, conv, element_at);
    value_channel = read_channel(s, conv, value_at);
  }
  // Who writes what the convolution leaves.
  const bool owns_element = kConvolves && threadIdx.x < 2 * kWidth && blockIdx.x == 0 && leads(p, head);
  const bool owns_value = kConvolves && warp == 0;
  await_predecessor();
  if constexpr (kBlocks > 1) wait_at_cluster_barrier<kBlocks>();
  if (owns_element && s.n_rows == 0) copy_tail(s, conv, element_at, element_channel);
  if (owns_value && s.n_rows == 0) copy_tail(s, conv, value_at, value_channel);
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
    if constexpr (kConvolves) {
      if (threadIdx.x < 2 * kWidth) of.element = convolve(s, conv, element_at, element_channel, owns_element);
      of.value = convolve(s, conv, value_at, value_channel, owns_value);
    } else {
      if (threadIdx.x < 2 * kWidth) of.element = qkv[element_at];
      of.value = qkv[value_at];
    }
    of.alpha = gates[p.alpha_column];
    of.beta = gates[p.beta_column];
    return of;
  };
  const auto share = [&](uint32_t row, const Row& of) {
    if (threadIdx.x < 2 * kWidth) vectors[row % 2][threadIdx.x / kWidth][threadIdx.x % kWidth] = of.element;
  };
  const uint32_t y_at = head * kWidth + col;
  float gate = 1;  // and the norm's weight
  if (kConvolves && norm.z) {
    const float z = norm.z[y_at];
    gate = (norm.weight ? norm.weight[col] : 1.0f) * (norm.sigmoid ? sigmoid(z) : silu(z));
  }
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
    float of_y = decay * (q_scale * sum_r) + kq * delta;
    if (kConvolves && norm.z) {
      float sum = warp_sum(of_y * of_y);
      if constexpr (kBlocks > 1) {
        if (warp == 0 && lane < kBlocks) *of_rank<kBlocks>(&squares[blockIdx.x], lane) = sum;
        cluster_barrier<kBlocks>();
        sum = 0;
#pragma unroll
        for (uint32_t block = 0; block < kBlocks; ++block) sum += squares[block];
      }
      of_y *= rms_scale(sum, kWidth, norm.eps) * gate;
    }
    if (warp == 0) o.y[uint64_t(row) * p.y_stride + y_at] = of_y;
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

template <uint32_t kWidth>
void steps_of_width(const Launch& l, const DeltaNetParams& p, const DeltaOperands& o, bool chunks,
                    const Convolution* convolution, const Norm& norm) {
  constexpr uint32_t kBlocks = kWidth / kCols;
  const auto kernel = norm.z        ? delta_steps_kernel<kWidth, true, kBlocks>
                      : convolution ? delta_steps_kernel<kWidth, true, 1>
                                    : delta_steps_kernel<kWidth, false, 1>;
  launch(l, kernel, dim3(kBlocks, p.value_heads), kThreads, 0, l.step, p, o, chunks,
         convolution ? *convolution : Convolution{}, norm);
}

}  // namespace

void delta_steps(const Launch& l, const DeltaNetParams& p, const DeltaOperands& o, bool chunks,
                 const Convolution* convolution, const Norm& norm) {
  constexpr decltype(&steps_of_width<32>) kOfWidth[] = {steps_of_width<32>, steps_of_width<64>,
                                                        steps_of_width<96>, steps_of_width<128>};
  static_assert(std::size(kOfWidth) * kWarp == kMostDeltaWidth);
  kOfWidth[p.width / kWarp - 1](l, p, o, chunks, convolution, norm);
}

}  // namespace thimble::cuda
