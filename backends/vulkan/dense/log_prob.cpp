#include <algorithm>
#include <bit>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void log_prob(Recording& r, const LogProb& op) {
  const uint32_t threads = std::min(std::bit_floor(r.limits().max_group_threads), 1024u);
  r.dispatch(Shader::kLogProb, {threads}, {reads(op.x), reads(op.target), writes(op.y)}, op.p,
             r.most_rows(kLogitRows));
}

}  // namespace thimble::vulkan
