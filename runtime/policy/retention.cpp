#include "runtime/policy/retention.h"

#include <algorithm>

namespace thimble {

uint32_t retention_score(Retention retention) {
  switch (retention) {
    case Retention::kRandom:
      return kCisHash;
    case Retention::kLocret:
      return kCisHead;
    case Retention::kNone:
    case Retention::kWindow:
      break;
  }
  return kCisPosition;
}

void keep_pool(const SessionOptions& o, bool last, StepParams& step) {
  step.keep = std::min(o.pool, step.n_entries + step.n_rows);
  step.protect_first = o.protect_init;
  step.protect_last = last ? 0 : o.stabilizers;
}

void keep_all(StepParams& step) {
  step.keep = step.n_entries + step.n_rows;
  step.protect_first = step.protect_last = 0;
}

}  // namespace thimble
