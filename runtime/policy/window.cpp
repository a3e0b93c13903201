// Window retention keeps the first entries (sinks, StreamingLLM) and the most recent ones.
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

class Window : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    o.retainer = nullptr;
    return resolve_eviction(o);
  }
  void record(const LayerStep& l) const override { store_plain_score(l, kCisPosition); }
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_window_retention() { return std::make_unique<Window>(); }

}  // namespace thimble
