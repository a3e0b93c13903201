// ssm: Mamba-2. Few rows go row by row, many in chunks. Columns of a state are independent, so a block that
// goes row by row takes 32 of them, and holds its part of the state in registers.
#include "backends/cuda/mixers/ssm.cuh"

namespace thimble::cuda {
namespace {

constexpr uint32_t kCols = kWarp;  // columns of a block
constexpr uint32_t kWarps = 8, kThreads = kWarps * kWarp;

// Number i * kWarps + warp of a column is of that warp, and a lane holds a column. kState is the state's size
// or more; numbers after its end remain 0.
template <uint32_t kState>
__global__ void __launch_bounds__(kThreads) ssm_kernel(const StepParams* step, SsmParams p, SsmOperands o) {
  constexpr uint32_t kNumbers = kState / kWarps;
  constexpr uint32_t kElements = (2 * kState + kThreads - 1) / kThreads;  // of B and C that a thread reads
  __shared__ float vectors[2][2 * kState];                                // [row % 2]: B and C
  __shared__ float sums[2][kWarps][kCols];                                // [row % 2]: each warp's part of y
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t head = blockIdx.y, group = head / (p.heads / p.groups), col = blockIdx.x * kCols + lane;
  const bool has_col = col < p.width;
  const float a = o.a[head], d = o.d[head], dt_bias = o.dt_bias[head];
  release_successor();
  const StepParams step_now = *step;

  const uint64_t of_head = uint64_t(head) * p.state * p.width + col;
  const float* before =
      step_now.state_from == kNoState ? nullptr : o.slots + step_now.state_from * o.slot_stride + of_head;
  float* after = o.slots + step_now.state_to * o.slot_stride + of_head;
  const auto holds = [&](uint32_t i) { return has_col && i * kWarps + warp < p.state; };
  const auto place = [&](uint32_t i) { return uint64_t(i * kWarps + warp) * p.width; };
  float s[kNumbers] = {};
  const auto read_state = [&] {
#pragma unroll
    for (uint32_t i = 0; i < kNumbers; ++i)
      if (holds(i)) s[i] = __ldcg(before + place(i));
  };
  // No kernel of this program writes the slot that is read, unless it is the slot that is written.
  const bool early = step_now.state_from != step_now.state_to;
  if (before && early) read_state();
  await_predecessor();
  if (before && !early) read_state();

  struct Row {
    float elements[kElements], x, dt;
  };
  const auto read_row = [&](uint32_t row) {
    Row of{};
    if (row >= step_now.n_rows) return of;
    const float* const xbc = o.xbc + uint64_t(row) * p.xbc_stride;
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e) {
      const uint32_t i = e * kThreads + threadIdx.x, n = i % kState;
      if (i < 2 * kState && n < p.state)
        of.elements[e] = xbc[(i < kState ? p.b_column : p.c_column) + group * p.state + n];
    }
    if (has_col) of.x = xbc[p.x_column + head * p.width + col];
    of.dt = o.dt[uint64_t(row) * p.dt_stride + p.dt_column + head];
    return of;
  };
  const auto share = [&](uint32_t row, const Row& of) {
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e)
      if (const uint32_t i = e * kThreads + threadIdx.x; i < 2 * kState) vectors[row % 2][i] = of.elements[e];
  };
  Row next = read_row(0);
  share(0, next);
  __syncthreads();
  for (uint32_t row = 0; row < step_now.n_rows; ++row) {
    const Row now = next;
    next = read_row(row + 1);
    const float *b = vectors[row % 2], *c = b + kState;
    const float delta = softplus(now.dt + dt_bias), decay = expf(delta * a), added = delta * now.x;
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kNumbers; ++i) {
      s[i] = decay * s[i] + b[i * kWarps + warp] * added;
      sum += c[i * kWarps + warp] * s[i];
    }
    sums[row % 2][warp][lane] = sum;
    share(row + 1, next);
    __syncthreads();
    if (warp > 0 || !has_col) continue;
    sum = d * now.x;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) sum += sums[row % 2][w][lane];
    o.y[uint64_t(row) * p.y_stride + head * p.width + col] = sum;
  }
#pragma unroll
  for (uint32_t i = 0; i < kNumbers; ++i)
    if (holds(i)) after[place(i)] = s[i];
}

}  // namespace

void ssm(const Launch& l, const Ssm& op) {
  const SsmParams& p = op.p;
  const SsmOperands o{
      data<float>(op.xbc), data<float>(op.dt),       data<float>(op.dt_bias),          data<float>(op.a),
      data<float>(op.d),   data<float>(op.s.block0), op.s.slot_stride / sizeof(float), data<float>(op.y)};
  if (l.max_rows >= kLeastChunkRows &&
      l.scratch_bytes >= ssm_chunk_bytes(p.heads, p.groups, p.heads * p.width, p.state))
    return ssm_chunks(l, p, o);
  const auto kernel = p.state <= 16    ? ssm_kernel<16>
                      : p.state <= 64  ? ssm_kernel<64>
                      : p.state <= 128 ? ssm_kernel<128>
                                       : ssm_kernel<256>;
  static_assert(kMostSsmState == 256);
  launch(l, kernel, dim3(static_cast<uint32_t>(ceil_div(p.width, kCols)), p.heads), kThreads, 0, l.step, p,
         o);
}

}  // namespace thimble::cuda
