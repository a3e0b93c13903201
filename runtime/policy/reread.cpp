// Reread reads each chunk twice and keeps the entries that the second reading attends to most. It needs no
// training (KVzip within a pool, methods 2.12).
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// The rows of the second reading come after the chunk and attend to it, so each entry is scored with the
// whole text up to the end of its chunk. A score is a weight relative to the entries of one chunk, so it is
// not computed again.
class Reread : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    o.retainer = nullptr;
    if (o.retain_scope == RetainScope::kLayer)
      return error(
          Code::kInvalidArgument,
          "reread scores the entries of each KV head by its own queries, so a layer's heads cannot keep "
          "the same entries; leave retain_scope at head, or choose another retention");
    return resolve_eviction(o);
  }

  void place(const Setting& s, Arena&, Arena& workspace) override {
    sums_ =
        workspace.place(uint64_t(s.model.shape.heads) * s.options.chunk * kQueryScoreSums * sizeof(float));
  }

  void record_upkeep(const LayerStep& l) const override { record_query_score(l, {}, sums_); }

 private:
  View sums_;  // f32 [H][chunk][kQueryScoreSums]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_reread_retention() { return std::make_unique<Reread>(); }

}  // namespace thimble
