#include "backends/cpu/host/cpu_host.h"

#include <algorithm>

#include "backends/cpu/kernels.h"
#include "backends/cpu/kv_kernels.h"
#include "base/system.h"

namespace thimble {

ThreadPool& CpuHost::pool() {
  const std::lock_guard lock(starting_);
  if (!pool_) pool_.emplace(threads_);
  return *pool_;
}

void CpuHost::dispatch(uint32_t items, Call call, const void* body) {
  const std::lock_guard turn(queue);
  pool().run(items, [&](uint32_t item, uint32_t worker) { call(body, item, worker); });
}

void CpuHost::multiply(const float* x, uint32_t x_rows, const float* w, uint32_t w_rows, uint32_t n, float* y,
                       size_t y_stride, float* scratch) const {
  const cpu::Kernels& k = cpu::kernels();
  const auto* const rows = reinterpret_cast<const std::byte*>(w);
  const size_t row_bytes = n * sizeof(float);
  for (uint32_t c = 0; c < w_rows; c += k.panel_cols)
    k.pack(DType::kF32, rows + c * row_bytes, row_bytes, std::min(k.panel_cols, w_rows - c), n,
           scratch + size_t(c) * n);
  k.multiply(x, n, x_rows, scratch, n, w_rows, y, y_stride, false);
}

void CpuHost::load_row(DType type, const std::byte* row, uint32_t n, float* x) const {
  cpu::kv_format(type)->load_row(row, x, n);
}

double CpuHost::sum_exp(const float* x, uint32_t n, float shift) const {
  return cpu::kernels().sum_exp(x, n, shift);
}

std::shared_ptr<Host> make_host(uint32_t threads) {
  constexpr uint32_t kMost = 16;  // the loops are short
  return std::make_shared<CpuHost>(threads ? threads : std::min(core_count(), kMost));
}

}  // namespace thimble
