// What a device, its buffers and its streams share: the card, whether it is lost, and how its errors become
// Status.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "backends/cuda/launch.h"
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

  // Bytes of the card that nobody has. What a stream or a program takes is only seen by it, so whoever takes
  // memory or gives it back holds `memory`; another process still counts where it does so meanwhile.
  Result<uint64_t> free_bytes() const;

  const Card card;
  mutable std::atomic<bool> lost = false;
  mutable std::mutex memory;
};

}  // namespace thimble::cuda
