// Reread: each chunk is read twice, and its entries that the second reading attends to most stay, without any
// training (KVzip within a pool, methods 2.12).
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// The second reading stands behind the chunk and sees it, so it scores each entry with everything that a text
// says of it. Once made a score stays, as it is a weight among the entries of one chunk.
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

  bool reads_again() const override { return true; }
  uint32_t upkeep_rows(const SessionOptions& o) const override { return o.chunk; }
  void record_upkeep(const LayerStep& l) const override { record_query_score(l, {}, sums_); }

 private:
  View sums_;  // f32 [H][chunk][kQueryScoreSums]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_reread_retention() { return std::make_unique<Reread>(); }

}  // namespace thimble
