// Matrix products on a device, by its op `linear`.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace thimble {

// y [rows][cols] = x [rows][inner] times w [cols][inner], for one shape of x and one w.
class Product {
 public:
  static Result<std::unique_ptr<Product>> make(const std::shared_ptr<Device>&, uint32_t rows, uint32_t inner,
                                               uint32_t cols, DType type_of_w);
  // By a matrix that lies on the device already; there is no w() then.
  static Result<std::unique_ptr<Product>> by(const std::shared_ptr<Device>&, uint32_t rows, const Weight&);

  // What all of it takes, w among it where it is made.
  static Result<uint64_t> bytes(const Device&, uint32_t rows, uint32_t inner, uint32_t cols, DType type_of_w);

  float* x() const { return static_cast<float*>(x_->mapped); }
  void* w() const { return w_->mapped; }
  const float* y() const { return static_cast<const float*>(y_->mapped); }
  Status run();

 private:
  Status record(Device&, uint32_t rows, const Weight&);

  std::unique_ptr<Buffer> x_, w_, y_, scratch_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Program> program_;
  StepParams step_{};
};

}  // namespace thimble
