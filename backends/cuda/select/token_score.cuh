// What token_score leaves for who makes log-sum-exps of it. Host side.
#pragma once

#include "backends/cuda/host/launch.h"

namespace thimble::cuda {

struct LogSum;

// In scratch, until an op other than vote and top_k uses it: what each of `splits` blocks adds to a query
// head's log-sum-exp, [query heads][splits].
struct ScoreParts {
  LogSum* parts;
  uint32_t splits;
};
ScoreParts score_parts(const Launch&, const TokenScoreParams&);

}  // namespace thimble::cuda
