// query_keep: keeps the queries of the latest tokens.
#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {

void query_keep(Recording& r, const QueryKeep& op) {
  constexpr uint32_t kThreads = 128;
  r.dispatch(Shader::kQueryKeep, {}, {reads(op.q), writes(op.kept)}, op.p,
             static_cast<uint32_t>(ceil_div(op.p.cols, kThreads)), std::min(r.most_rows(), op.p.ring));
}

}  // namespace thimble::vulkan
