// attention: calls attend_view in prefill and attend_pool in decode.
#include <algorithm>

#include "backends/cuda/attention/attention.h"
#include "backends/cuda/ops.h"

namespace thimble::cuda {

void attention(const Launch& l, const Attention& op) {
  if (op.p.source == kFromView)
    attend_view(l, op);
  else
    attend_pool(l, op);
}

uint64_t attention_scratch(const ModelShape& m, const SessionShape& s, const Card& c) {
  return std::max(attend_view_scratch(m, s, c), attend_pool_scratch(m, s, c));
}

}  // namespace thimble::cuda
