// The state that a device, its buffers and its streams share: the card, whether it is lost, and the
// conversion of CUDA errors to Status.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "backends/cuda/launch.h"
#include "base/status.h"

namespace thimble::cuda {

struct CardState {
  explicit CardState(const Card& c) : card(c) {}

  // Makes the card current in the calling thread. Returns an error if the card is lost.
  Status use() const;
  // The Status of a call; `doing` completes "the card failed while ...". An error in a kernel destroys the
  // context for the whole process, and driver 580 does not create a new one. The card is then lost until the
  // program restarts.
  Status check(cudaError_t, const char* doing) const;

  // Free bytes of the card. The memory that a stream or a program takes is measured as a difference of free
  // bytes, so code that allocates or frees memory must hold `memory`. Allocations of other processes at the
  // same time still distort the result.
  Result<uint64_t> free_bytes() const;

  const Card card;
  mutable std::atomic<bool> lost = false;
  mutable std::mutex memory;
};

}  // namespace thimble::cuda
