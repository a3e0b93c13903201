// No selection: every step attends to all entries of the pool.
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

class DenseSelection : public SelectionPolicy {
 public:
  Status resolve(const Model&, bool, SessionOptions& o) const override {
    o.select_prefill = 0;
    return {};
  }
};

}  // namespace

std::unique_ptr<SelectionPolicy> make_dense_selection() { return std::make_unique<DenseSelection>(); }

}  // namespace thimble
