#include <algorithm>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kMostParts = 32;  // workgroups per row

uint64_t best_bytes(uint32_t rows) { return uint64_t(rows) * kMostParts * sizeof(uint32_t[2]); }

}  // namespace

void arg_max(Recording& r, const ArgMax& op) {
  const uint32_t threads = r.limits().threads(256), rows = r.most_rows(kLogitRows);
  const uint32_t parts = static_cast<uint32_t>(std::min<uint64_t>(ceil_div(op.p.cols, threads), kMostParts));
  r.dispatch(Shader::kArgMax, {threads},
             {reads(op.x), writes(op.index), writes(r.scratch().slice(0, best_bytes(rows))),
              writes(r.counters().slice(0, rows * sizeof(uint32_t)))},
             op.p, parts, rows);
}

uint64_t arg_max_scratch(const ModelShape&, const SessionShape&, const Limits&) {
  return best_bytes(kMostLogitRows);
}

}  // namespace thimble::vulkan
