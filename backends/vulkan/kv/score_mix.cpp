// score_mix: adds two standardised scores of a head's entries.
#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void score_mix(Recording& r, const ScoreMix& op) {
  const uint32_t lanes = r.limits().subgroup_size, threads = std::max(128u, lanes);
  r.dispatch(Shader::kScoreMix, {threads, lanes},
             {reads(op.scores), reads(op.chunk_scores), writes(op.mixed), writes(op.chunk_mixed)}, op.p,
             op.p.heads);
}

}  // namespace thimble::vulkan
