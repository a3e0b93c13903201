#include <algorithm>
#include <bit>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void arg_max(Recording& r, const ArgMax& op) {
  const uint32_t threads = std::min(std::bit_floor(r.limits().max_group_threads), 1024u);
  r.dispatch(Shader::kArgMax, {threads}, {reads(op.x), writes(op.index)}, op.p, r.most_rows(kLogitRows));
}

}  // namespace thimble::vulkan
