// Mix: the sum of a trained score and KeyDiff's score, each standardised per head (methods 2.13).
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// Locret's functions compute the trained scores once, and the pool stores them. Every eviction computes
// KeyDiff's scores and the sums again, in the workspace.
class Mix : public RetentionPolicy {
 public:
  Status resolve(const Model& model, SessionOptions& o) const override {
    THIMBLE_TRY(check_scope_of_keys(o));
    return trained_->resolve(model, o);
  }

  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    trained_->place(s, pool, workspace);
    sums_ = place_key_sums(s, workspace);
    mixed_ = workspace.place(uint64_t(s.dimensions.most_layer_entries) * sizeof(float));
    chunk_mixed_ = workspace.place(uint64_t(s.model.shape.kv_heads) * s.options.chunk * sizeof(float));
  }

  void record(const LayerStep& l) const override { trained_->record(l); }
  void record_upkeep(const LayerStep& l) const override { trained_->record_upkeep(l); }
  void carry(const Held& held, std::vector<View>& views) const override { trained_->carry(held, views); }
  Cost cost(const SessionOptions& o) const override { return trained_->cost(o); }

  Scores ranked_by(const LayerStep& l) const override {
    return {mixed_.slice(0, l.pool().cis.bytes), l.chunk ? chunk_mixed_ : View{}};
  }

  void record_eviction(const LayerStep& l) const override {
    const Scores mixed = ranked_by(l);
    record_key_diff(l, sums_, mixed);
    l.recorder.record(ScoreMix{.scores = l.pool().cis,
                               .chunk_scores = l.chunk_rows().cis,
                               .mixed = mixed.pool,
                               .chunk_mixed = mixed.chunk,
                               .p = {.first_head = 0,
                                     .heads = l.attention().kv_heads,
                                     .chunk_capacity = l.setting.options.chunk,
                                     .head_state = l.head_state()}});
  }

 private:
  const std::unique_ptr<RetentionPolicy> trained_ = make_locret_retention();
  KeySums sums_;
  View mixed_, chunk_mixed_;  // f32 [entries of a layer's arrays], [kv heads][chunk]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_mix_retention() { return std::make_unique<Mix>(); }

}  // namespace thimble
