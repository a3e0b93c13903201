#include "backends/vulkan/host/hazards.h"

#include <algorithm>

namespace thimble::vulkan {

static bool conflict(const Access& a, const Access& b) {
  return (a.writes || b.writes) && a.buffer == b.buffer && a.first < b.end && b.first < a.end;
}

bool Hazards::add(std::span<const Access> dispatch) {
  const bool barrier = std::any_of(dispatch.begin(), dispatch.end(), [&](const Access& access) {
    return std::any_of(since_barrier_.begin(), since_barrier_.end(),
                       [&](const Access& earlier) { return conflict(access, earlier); });
  });
  if (barrier) since_barrier_.clear();
  since_barrier_.insert(since_barrier_.end(), dispatch.begin(), dispatch.end());
  return barrier;
}

}  // namespace thimble::vulkan
