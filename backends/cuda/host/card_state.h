// What a device, its buffers and its streams share: the card, whether it is lost, and how its errors become
// Status.
#pragma once

#include <atomic>

#include "backends/cuda/host/launch.h"
#include "base/status.h"

namespace thimble::cuda {

struct CardState {
  explicit CardState(const Card& c) : card(c) {}

  // Makes the card the calling thread's, or says that it is lost.
  Status use() const;
  // The Status of a call; `doing` completes "the card failed while ...". An error that a kernel left ends the
  // context for the whole process, and driver 580 gives it no other: the card is lost until the program
  // starts again.
  Status check(cudaError_t, const char* doing) const;

  const Card card;
  mutable std::atomic<bool> lost = false;
};

}  // namespace thimble::cuda
