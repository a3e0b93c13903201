#include <algorithm>
#include <memory>
#include <type_traits>

#include "backends/cuda/host/measure.h"
#include "backends/cuda/wgmma.cuh"

namespace thimble::cuda {
namespace {

// Both kernels compute about 17 GFLOP per multiprocessor. This takes 3 ms on an H200, longer than the card
// needs to raise its clocks.
constexpr uint32_t kMatrixThreads = 256;
constexpr uint32_t kWgmmaRounds = 4096;
constexpr uint32_t kMmaBlocks = 2;  // per multiprocessor
constexpr uint32_t kMmaRounds = 32768;
constexpr double kWgmmaFlop = 2.0 * kWgmmaRounds * (kMatrixThreads / kWarpgroup) * 64 * 256 * 64;
constexpr double kMmaFlop = 2.0 * kMmaRounds * kMmaBlocks * (kMatrixThreads / 32) * 8 * 16 * 8 * 16;

// Two f16 in +-[0.5, 1) or +-[1, 2), different for each i. A matrix unit needs more power when bits change,
// so its clock is lower. On an H200, a product of random bf16 reaches 788 TFLOP/s, a product of zeros 894.
__device__ inline uint32_t two_numbers(uint32_t i) {
  i = (i + 1) * 2654435761u;
  i = (i ^ i >> 15) * 2246822519u;
  return ((i ^ i >> 13) & 0x87ff87ffu) | 0x38003800u;
}

// Each warpgroup multiplies 64 rows with 256 columns, repeatedly from the same shared memory.
__global__ __launch_bounds__(kMatrixThreads, 1) void wgmma_rate_kernel(float* result) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ alignas(1024)
      // Rows of 64 elements: first those of a, then those of b.
      uint32_t tiles[(kMatrixThreads / 2 + 256) * 32];
  for (uint32_t i = threadIdx.x; i < sizeof tiles / sizeof *tiles; i += kMatrixThreads)
    tiles[i] = two_numbers(i);
  publish_stores();
  __syncthreads();
  const uint64_t a = tile_descriptor(tiles + threadIdx.x / kWarpgroup * 64 * 32);
  const uint64_t b = tile_descriptor(tiles + kMatrixThreads / 2 * 32);
  float sums[32][4];
  for (uint32_t round = 0; round < kWgmmaRounds; ++round) {
    begin_products();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      multiply_async_f16(sums, a + i * kDescriptorStep, b + i * kDescriptorStep, round | i);
    commit_products();
    wait_products<1>();
  }
  wait_products<0>();
  pin(sums);
  float total = 0;
#pragma unroll
  for (uint32_t i = 0; i < 128; ++i) total += sums[i / 4][i % 4];
  result[blockIdx.x * kMatrixThreads + threadIdx.x] = total;
#endif
}

// Each warp multiplies 32 rows with 32 columns, repeatedly from the same registers.
__global__ __launch_bounds__(kMatrixThreads, kMmaBlocks) void mma_rate_kernel(float* result) {
  const uint32_t thread = blockIdx.x * kMatrixThreads + threadIdx.x;
  uint32_t a[2][4], b[4][2];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    a[i / 4][i % 4] = two_numbers(16 * thread + i);
    b[i / 2][i % 2] = two_numbers(16 * thread + 8 + i);
  }
  float sums[2][4][4] = {};
  for (uint32_t round = 0; round < kMmaRounds; ++round)
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) multiply_f16(sums[i / 4][i % 4], a[i / 4], b[i % 4][0], b[i % 4][1]);
  float total = 0;
#pragma unroll
  for (uint32_t i = 0; i < 32; ++i) total += sums[i / 16][i / 4 % 4][i % 4];
  result[thread] = total;
}

struct Destroy {
  void operator()(void* memory) const { cudaFree(memory); }
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Memory = std::unique_ptr<void, Destroy>;
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Destroy>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Destroy>;

Result<Memory> allocate(const CardState& card, uint64_t bytes) {
  void* memory = nullptr;
  THIMBLE_TRY(card.check(cudaMalloc(&memory, bytes), "allocating memory"));
  return Memory(memory);
}

// A stream and two events on it.
class Clock {
 public:
  explicit Clock(const CardState& card) : card_(card) {}

  Status open() {
    cudaStream_t stream = nullptr;
    THIMBLE_TRY(card_.check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "opening a stream"));
    stream_.reset(stream);
    for (Event* e : {&start_, &end_}) {
      cudaEvent_t event = nullptr;
      THIMBLE_TRY(card_.check(cudaEventCreate(&event), "making an event"));
      e->reset(event);
    }
    return {};
  }

  // The seconds of the fastest of 5 runs of `work(stream)`, after one warm-up run. `work` returns a
  // cudaError_t.
  template <typename Work>
  Result<double> best(const char* doing, const Work& work) {
    double best = 0;
    for (int run = 0; run < 6; ++run) {
      float milliseconds = 0;
      THIMBLE_TRY(card_.check(cudaEventRecord(start_.get(), stream_.get()), doing));
      THIMBLE_TRY(card_.check(work(stream_.get()), doing));
      THIMBLE_TRY(card_.check(cudaEventRecord(end_.get(), stream_.get()), doing));
      THIMBLE_TRY(card_.check(cudaEventSynchronize(end_.get()), doing));
      THIMBLE_TRY(card_.check(cudaEventElapsedTime(&milliseconds, start_.get(), end_.get()), doing));
      if (run == 1 || (run > 1 && milliseconds * 1e-3 < best)) best = milliseconds * 1e-3;
    }
    return best;
  }

 private:
  const CardState& card_;
  Stream stream_;
  Event start_, end_;
};

Result<double> measure_bandwidth(const CardState& card, Clock& clock) {
  size_t free = 0, total = 0;
  THIMBLE_TRY(card.check(cudaMemGetInfo(&free, &total), "asking for free memory"));
  const size_t bytes = std::min<size_t>(size_t(1) << 30, free / 4 / 256 * 256);
  if (bytes == 0) return error(Code::kOutOfMemory, "measuring the card: it has no free memory");
  THIMBLE_LET(from, allocate(card, bytes));
  THIMBLE_LET(to, allocate(card, bytes));
  THIMBLE_LET(filling, clock.best("filling memory", [&](cudaStream_t stream) {
    return cudaMemsetAsync(from.get(), 0x5a, bytes, stream);
  }));
  static_cast<void>(filling);
  THIMBLE_LET(seconds, clock.best("copying", [&](cudaStream_t stream) {
    return cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, stream);
  }));
  return 2.0 * static_cast<double>(bytes) / seconds;
}

Result<double> measure_products(const CardState& state, Clock& clock) {
  const Card& card = state.card;
  const bool hopper = card.major == 9;
  const uint32_t blocks = card.multiprocessors * (hopper ? 1 : kMmaBlocks);
  THIMBLE_LET(result, allocate(state, uint64_t(blocks) * kMatrixThreads * sizeof(float)));
  THIMBLE_LET(seconds, clock.best("multiplying matrices", [&](cudaStream_t stream) {
    const auto kernel = hopper ? wgmma_rate_kernel : mma_rate_kernel;
    cudaLaunchConfig_t all{};
    all.gridDim = dim3(blocks);
    all.blockDim = dim3(kMatrixThreads);
    all.stream = stream;
    return cudaLaunchKernelEx(&all, kernel, static_cast<float*>(result.get()));
  }));
  return (hopper ? kWgmmaFlop : kMmaFlop) * card.multiprocessors / seconds;
}

}  // namespace

Result<Rates> measure_rates(const CardState& card) {
  Clock clock(card);
  THIMBLE_TRY(clock.open());
  THIMBLE_LET(bytes_per_second, measure_bandwidth(card, clock));
  THIMBLE_LET(flop_per_second, measure_products(card, clock));
  return Rates{bytes_per_second, flop_per_second};
}

}  // namespace thimble::cuda
