// TOVA keeps the entries to which the last token pays most attention. It needs no training (methods 2.11).
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// A weight can only be compared with weights of the same softmax. Every eviction therefore computes all
// scores of pool and chunk again, from the query of the last token that was read. Each layer stores the query
// of its last step for evictions between steps.
class Tova : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    o.retainer = nullptr;
    if (!o.keeps.empty())
      return error(
          Code::kInvalidArgument,
          "tova keeps the same entries in all heads of a layer, so heads cannot keep different numbers "
          "of them; give one pool size, or choose another retention");
    o.retain_scope = RetainScope::kLayer;
    return resolve_eviction(o);
  }

  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    queries_.clear();
    for (const Layer& layer : s.model.layers)
      queries_.push_back(layer.retains() ? pool.place(uint64_t(layer.attention()->q_cols()) * sizeof(float))
                                         : View{});
    sums_ = workspace.place(s.model.shape.heads * kQueryScoreSums * sizeof(float));
  }

  void record_queries(const LayerStep& l) const override {
    l.recorder.record(Copy{.src = l.at.qkv,
                           .dst = queries_[l.layer],
                           .p = {.cols = l.attention().q_cols(),
                                 .src_stride = l.setting.dimensions.qkv_cols,
                                 .dst_stride = 0,  // one row: a step's logits are those of its last row
                                 .from_logit_row = 1,
                                 .to_ring_row = 0,
                                 .rows = kLogitRows}});
  }

  void record_eviction(const LayerStep& l) const override { record_query_score(l, queries_[l.layer], sums_); }

  bool takes_drafts() const override { return false; }

  void carry(const Held&, std::vector<View>& views) const override {
    for (const View& query : queries_)
      if (query) views.push_back(query);
  }

 private:
  std::vector<View> queries_;  // f32 [H dh] of each layer; empty if the layer has a window or no attention
  View sums_;                  // f32 [H][kQueryScoreSums]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_tova_retention() { return std::make_unique<Tova>(); }

}  // namespace thimble
