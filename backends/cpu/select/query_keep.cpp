// query_keep: keeps the queries of the latest tokens.
#include <algorithm>
#include <cstring>

#include "backends/cpu/ops.h"

namespace thimble::cpu {

void query_keep(const Context& c, const QueryKeep& o) {
  const QueryKeepParams& p = o.p;
  const uint32_t n = c.step.n_rows;
  for (uint32_t row = n - std::min(n, p.ring); row < n; ++row) {
    const uint32_t to = (static_cast<uint32_t>(c.step.position) + row) % p.ring;
    std::memcpy(data<float>(o.kept) + uint64_t(to) * p.cols, data<float>(o.q) + uint64_t(row) * p.row_stride,
                p.cols * sizeof(float));
  }
}

}  // namespace thimble::cpu
