// No retention: every entry stays, and a full pool is an error.
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

class None : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    o.retainer = nullptr;
    o.local = o.stabilizers = o.protect_init = 0;
    return {};
  }
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_none_retention() { return std::make_unique<None>(); }

}  // namespace thimble
