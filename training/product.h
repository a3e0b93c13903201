// Matrix products on a device, by its op `linear`.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace thimble {

// What a device is told of programs over so many rows that read no entries.
SessionShape session_of_rows(uint32_t rows);

// y [rows][cols] = x [rows][inner] times w [cols][inner], for one shape of x and one w.
class Product {
 public:
  static Result<std::unique_ptr<Product>> make(const std::shared_ptr<Device>&, uint32_t rows, uint32_t inner,
                                               uint32_t cols, DType type_of_w);
  // By a matrix that lies on the device already; there is no w() then.
  static Result<std::unique_ptr<Product>> by(const std::shared_ptr<Device>&, uint32_t rows, const Weight&);

  // What all of it takes, w among it where it is made.
  static Result<uint64_t> bytes(const Device&, uint32_t rows, uint32_t inner, uint32_t cols, DType type_of_w);

  float* x() const { return static_cast<float*>(x_.host->mapped); }
  void* w() const { return w_.host->mapped; }
  const float* y() const { return static_cast<const float*>(y_.host->mapped); }
  Status run();

 private:
  // A matrix in memory that the host reaches, and where host and device share none, in the device's.
  struct Matrix {
    std::unique_ptr<Buffer> host, on_device;
    View view() const;  // for the device
  };

  explicit Product(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  Result<Matrix> allocate(uint64_t bytes) const;
  Status record(uint32_t rows, const Weight&);

  std::shared_ptr<Device> device_;
  Matrix x_, w_, y_;  // w_: empty where it was not made
  std::unique_ptr<Buffer> scratch_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Program> program_;
  StepParams step_{};
};

}  // namespace thimble
