// given_score: stores retention scores of all entries that the host computed.
#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void given_score(Recording& r, const GivenScore& op) {
  constexpr uint32_t kThreads = 64;
  const uint64_t scores = op.score.bytes / sizeof(float);
  const uint32_t groups =
      static_cast<uint32_t>(std::clamp<uint64_t>(ceil_div(scores, kThreads), 1, r.limits().max_groups));
  r.dispatch(Shader::kGivenScore, {op.chunk_cis ? 1u : 0u},
             {reads(op.score), writes(op.cis), writes(op.chunk_cis)}, op.p, groups, op.p.heads);
}

}  // namespace thimble::vulkan
