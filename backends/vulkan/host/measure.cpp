#include "backends/vulkan/host/measure.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace thimble::vulkan {
namespace {

// The seconds of the fastest of 3 runs of `work`, after one warm-up run. The host's clock is precise enough:
// a run takes milliseconds, and a submit takes microseconds.
template <typename Work>
Result<double> best_seconds(const Work& work) {
  double best = 0;
  for (int run = 0; run < 4; ++run) {
    const auto start = std::chrono::steady_clock::now();
    THIMBLE_TRY(work());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (run == 1 || (run > 1 && seconds < best)) best = seconds;
  }
  return best;
}

// Runs a program of one segment.
Status run(Stream& stream, Program& program, uint32_t rows) {
  THIMBLE_TRY(stream.submit(program, 0, 1, {.n_rows = rows}, {}));
  return stream.wait();
}

// Uses the op copy, because vkCmdCopyBuffer takes five times as long on an H200.
Result<double> measure_copy(Device& device, const DeviceInfo& info) {
  constexpr uint32_t kRows = 256, kQuadBytes = 16;
  const uint64_t most = std::min({uint64_t(1) << 30, info.free_bytes / 8, info.max_binding});
  const uint64_t row_bytes = most / kRows / kQuadBytes * kQuadBytes, bytes = kRows * row_bytes;
  THIMBLE_LET(from, device.alloc(MemKind::kWorkspace, bytes));
  THIMBLE_LET(to, device.alloc(MemKind::kWorkspace, bytes));
  const uint32_t cols = static_cast<uint32_t>(row_bytes / sizeof(float));
  THIMBLE_LET(stream, device.open_stream({}, 0));
  std::unique_ptr<Recorder> recorder = stream->record(kRows);
  recorder->segment();
  recorder->record(Copy{.src = View{from.get(), 0, bytes},
                        .dst = View{to.get(), 0, bytes},
                        .p = {.cols = cols, .src_stride = cols, .dst_stride = cols, .rows = kStepRows}});
  THIMBLE_LET(program, stream->finish(std::move(recorder)));
  THIMBLE_LET(seconds, best_seconds([&] { return run(*stream, *program, kRows); }));
  return 2.0 * static_cast<double>(bytes) / seconds;
}

// `count` words of two f16, or of one f32, in +-[0.5, 2). Products of zeros would need less power, and clocks
// would rise.
std::vector<uint32_t> numbers(uint64_t count, uint32_t mask, uint32_t ones) {
  std::vector<uint32_t> words(count);
  uint32_t state = 1;
  for (uint32_t& word : words) {
    state = state * 1664525u + 1013904223u;
    word = ((state ^ state >> 15) & mask) | ones;
  }
  return words;
}

// The seconds that linear takes for a product of [rows][n] and an f16 matrix [n][n].
Result<double> time_product(Device& device, uint32_t rows, uint32_t n) {
  const std::vector<uint32_t> x = numbers(uint64_t(rows) * n, 0x80ffffffu, 0x3f000000u);
  const std::vector<uint32_t> w = numbers(uint64_t(n) * n / 2, 0x87ff87ffu, 0x38003800u);
  const uint64_t x_bytes = x.size() * sizeof(uint32_t), w_bytes = w.size() * sizeof(uint32_t);
  THIMBLE_LET(
      needs,
      device.needs(
          {.layers = 1, .d_model = n, .heads = 1, .kv_heads = 1, .head_dim = 64, .d_ff = n, .vocab = n},
          {.chunk = rows, .run_capacity = 1, .layer_entries = 1, .reach = 1, .view_capacity = 1}));
  THIMBLE_LET(x_buffer, device.alloc(MemKind::kWorkspace, x_bytes));
  THIMBLE_LET(y_buffer, device.alloc(MemKind::kWorkspace, x_bytes));
  THIMBLE_LET(w_buffer, device.alloc(MemKind::kWeights, w_bytes));
  THIMBLE_LET(scratch, device.alloc(MemKind::kWorkspace, needs.workspace));
  THIMBLE_TRY(device.write({x_buffer.get(), 0, x_bytes}, x.data()));
  THIMBLE_TRY(device.write({w_buffer.get(), 0, w_bytes}, w.data()));

  Linear product;
  product.x = View{x_buffer.get(), 0, x_bytes};
  product.y = View{y_buffer.get(), 0, x_bytes};
  static_cast<View&>(product.w) = {w_buffer.get(), 0, w_bytes};
  product.w.type = DType::kF16;
  product.w.rows = product.w.cols = n;
  product.p = {.in_cols = n, .out_cols = n, .x_stride = n, .y_stride = n, .add = 0, .rows = kStepRows};

  THIMBLE_LET(stream, device.open_stream({scratch.get(), 0, needs.workspace}, 0));
  std::unique_ptr<Recorder> recorder = stream->record(rows);
  recorder->segment();
  recorder->record(product);
  THIMBLE_LET(program, stream->finish(std::move(recorder)));
  return best_seconds([&] { return run(*stream, *program, rows); });
}

// Increases the size of the product until one takes 50 ms, so that the cost of starting it can be neglected.
Result<double> measure_products(Device& device) {
  double best = 0, seconds = 0;
  for (uint32_t n = 512; n <= 8192 && seconds < 0.05; n *= 2) {
    const uint32_t rows = std::min(n / 2, 1024u);
    THIMBLE_LET(measured, time_product(device, rows, n));
    seconds = measured;
    best = std::max(best, 2.0 * rows * n * n / seconds);
  }
  return best;
}

}  // namespace

Result<Rates> measure_rates(Device& device, const DeviceInfo& info) {
  THIMBLE_LET(bytes_per_second, measure_copy(device, info));
  THIMBLE_LET(flop_per_second, measure_products(device));
  return Rates{bytes_per_second, flop_per_second};
}

}  // namespace thimble::vulkan
