// Matrix products on a device, computed with its op `linear`.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace thimble {

// The session shape for programs over so many rows that read no KV entries.
SessionShape session_of_rows(uint32_t rows);

// y [rows][cols] = x [rows][inner] times w [cols][inner], for a fixed shape of x and a fixed w.
class Product {
 public:
  static Result<std::unique_ptr<Product>> make(const std::shared_ptr<Device>&, uint32_t rows, uint32_t inner,
                                               uint32_t cols, DType type_of_w);
  // Multiplies by a matrix that is already on the device. w() must not be called then.
  static Result<std::unique_ptr<Product>> by(const std::shared_ptr<Device>&, uint32_t rows, const Weight&);

  // Bytes that a Product from make() allocates, including w.
  static Result<uint64_t> bytes(const Device&, uint32_t rows, uint32_t inner, uint32_t cols, DType type_of_w);

  float* x() const { return static_cast<float*>(x_.host->mapped); }
  void* w() const { return w_.host->mapped; }
  const float* y() const { return static_cast<const float*>(y_.host->mapped); }
  Status run();

 private:
  // A matrix in host-visible memory, plus a copy in device memory if host and device do not share memory.
  struct Matrix {
    std::unique_ptr<Buffer> host, on_device;
    View view() const;  // the buffer that the device uses
  };

  explicit Product(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  Result<Matrix> allocate(uint64_t bytes) const;
  Status record(uint32_t rows, const Weight&);

  std::shared_ptr<Device> device_;
  Matrix x_, w_, y_;  // w_ is empty after by()
  std::unique_ptr<Buffer> scratch_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Program> program_;
  StepParams step_{};
};

}  // namespace thimble
