// What sessions of any device compute on the host: loops that several threads share, and inner loops in the
// widest instructions that the processor has. Sessions take turns to use the threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace thimble {

struct Host {
  virtual ~Host() = default;
  // Workers of run() have numbers below this.
  virtual uint32_t threads() const = 0;
  // As ThreadPool::run(). `body` must not call run().
  template <typename Body>
  void run(uint32_t items, const Body& body) {
    dispatch(
        items,
        [](const void* b, uint32_t item, uint32_t worker) { (*static_cast<const Body*>(b))(item, worker); },
        &body);
  }

  static constexpr uint32_t kMostRows = 64;
  // y[r][c] = sum over k of x[r][k] * w[c][k], for w_rows <= kMostRows. Rows of x and w have n floats.
  // `scratch`: kMostRows * n floats.
  virtual void multiply(const float* x, uint32_t x_rows, const float* w, uint32_t w_rows, uint32_t n,
                        float* y, size_t y_stride, float* scratch) const = 0;
  // x = the n channels of a row of keys or values (kv_bytes() in backend.h).
  virtual void load_row(DType, const std::byte* row, uint32_t n, float* x) const = 0;
  // The sum of exp(x - shift).
  virtual double sum_exp(const float* x, uint32_t n, float shift) const = 0;

 protected:
  using Call = void (*)(const void* body, uint32_t item, uint32_t worker);
  virtual void dispatch(uint32_t items, Call call, const void* body) = 0;
};

}  // namespace thimble
