// KeyDiff: the entries whose keys are least like the mean of all stay, without any training (methods 2.10).
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// Scores say what is unlike the others that are there, so they are made anew with every eviction, of the pool
// and the chunk, and a token that was just read or generated has none before. Keys are compared as they are
// cached: before RoPE, and under original positions rotated, as published.
class KeyDiffRetention : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    take_shares(o);  // a file of heads says which heads need more; its scores are not used
    o.retainer = nullptr;
    if (o.retain_scope == RetainScope::kLayer)
      return error(
          Code::kInvalidArgument,
          "keydiff compares the keys of one head with each other, so a layer's heads cannot keep the "
          "same entries; leave retain_scope at head, or choose another retention");
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
