// A model's weights as a device sees them.
#pragma once

#include <memory>

#include "backends/backend.h"
#include "runtime/model/model.h"

namespace thimble {

class PlacedWeights {
 public:
  // Shows the mapped files to the device. `heads` may be null.
  static Result<PlacedWeights> place(const Model& model, const RetainingHeads* heads, Device& device);

  Weight weight(const Tensor&) const;  // an empty one for a tensor that the model does not have
  In vector(const Tensor& t) const { return weight(t); }

 private:
  struct Placed {
    const std::byte* first = nullptr;
    std::unique_ptr<Buffer> buffer;
  };
  Placed model_, heads_;
};

}  // namespace thimble
