// Random entries stay. This is the baseline for other policies.
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

class Random : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    o.retainer = nullptr;
    return resolve_eviction(o);
  }
  void record(const LayerStep& l) const override { store_plain_score(l, kCisHash); }
  void fill(const SessionOptions& o, StepParams& step) const override { step.seed = o.seed; }
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_random_retention() { return std::make_unique<Random>(); }

}  // namespace thimble
