// KeyDiff keeps the entries whose keys differ most from the mean of all keys. It needs no training (methods
// 2.10).
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// A score says how much a key differs from the other keys in the run. Every eviction therefore computes all
// scores of pool and chunk again, and a new token has no score until then. Keys are compared as they are
// cached: before RoPE; with original positions after RoPE, as published.
class KeyDiffRetention : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    take_shares(o);  // only the shares of the retainer's file are used, not its scores
    o.retainer = nullptr;
    THIMBLE_TRY(check_scope_of_keys(o));
    return resolve_eviction(o);
  }

  void place(const Setting& s, Arena&, Arena& workspace) override { sums_ = place_key_sums(s, workspace); }

  void record_eviction(const LayerStep& l) const override { record_key_diff(l, sums_, ranked_by(l)); }

 private:
  KeySums sums_;
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_keydiff_retention() { return std::make_unique<KeyDiffRetention>(); }

}  // namespace thimble
