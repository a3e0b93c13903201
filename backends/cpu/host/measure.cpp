#include "backends/cpu/host/measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "backends/cpu/dense/matmul.h"
#include "base/system.h"

namespace thimble::cpu {

// The shortest of five runs, in seconds.
template <typename Body>
static double best_time(const Body& body) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

Result<Rates> measure_rates(ThreadPool& threads) {
  // Far larger than the caches.
  constexpr uint64_t kCopy = 256 << 20;
  constexpr uint32_t kPieces = 64;
  // One block of a product, as large as the blocks that linear gives to a worker.
  constexpr uint32_t kRows = kBlockRows, kCols = kBlockCols, kDepth = 4 * kBlockDepth;
  constexpr uint64_t kBlock =
      uint64_t(kRows) * kDepth + uint64_t(kCols) * kDepth + uint64_t(kRows) * kCols + kMatmulScratch;
  THIMBLE_LET(from, Pages::allocate(kCopy));
  THIMBLE_LET(to, Pages::allocate(kCopy));
  THIMBLE_LET(blocks, Pages::allocate(threads.size() * kBlock * sizeof(float)));
  std::memset(from.data(), 1, kCopy);

  const double copy = best_time([&] {
    threads.run(kPieces, [&](uint32_t item, uint32_t) {
      const uint64_t piece = kCopy / kPieces;
      std::memcpy(to.data() + item * piece, from.data() + item * piece, piece);
    });
  });
  const double multiply = best_time([&] {
    threads.run(threads.size(), [&](uint32_t item, uint32_t) {
      float* const x = reinterpret_cast<float*>(blocks.data()) + item * kBlock;
      float* const w = x + uint64_t(kRows) * kDepth;
      float* const y = w + uint64_t(kCols) * kDepth;
      matmul({.x = x,
              .x_stride = kDepth,
              .x_rows = kRows,
              .type = DType::kF32,
              .w = reinterpret_cast<const std::byte*>(w),
              .cols = kCols,
              .n = kDepth,
              .y = y,
              .y_stride = kCols,
              .accumulate = false},
             y + uint64_t(kRows) * kCols);
    });
  });
  return Rates{.bytes_per_second = 2.0 * kCopy / copy,
               .flop_per_second = 2.0 * kRows * kCols * kDepth * threads.size() / multiply};
}

}  // namespace thimble::cpu
