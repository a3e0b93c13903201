// The threads of the host, and the CPU backend's inner loops for sessions of all devices.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "backends/host.h"
#include "base/fair_mutex.h"
#include "base/thread_pool.h"

namespace thimble {

class CpuHost : public Host {
 public:
  // Threads start with the first call that needs them.
  explicit CpuHost(uint32_t threads) : threads_(threads) {}

  uint32_t threads() const override { return threads_; }
  void multiply(const float* x, uint32_t x_rows, const float* w, uint32_t w_rows, uint32_t n, float* y,
                size_t y_stride, float* scratch) const override;
  void load_row(DType, const std::byte* row, uint32_t n, float* x) const override;
  double sum_exp(const float* x, uint32_t n, float shift) const override;

  // Code that uses the pool directly must lock the queue.
  FairMutex queue;
  ThreadPool& pool();

 protected:
  void dispatch(uint32_t items, Call call, const void* body) override;

 private:
  uint32_t threads_;
  std::mutex starting_;
  std::optional<ThreadPool> pool_;
};

// 0: one thread for each core, but at most 16.
std::shared_ptr<Host> make_host(uint32_t threads);

}  // namespace thimble
