// KeyDiff: the entries whose keys are least like the mean of all stay, without any training (methods 2.10).
#include "base/bits.h"
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

  void place(const Setting& s, Arena&, Arena& workspace) override {
    blocks_ = static_cast<uint32_t>(ceil_div(s.dimensions.reach, kKeyDiffBlock));
    sums_ =
        workspace.place(uint64_t(s.model.shape.kv_heads) * blocks_ * s.model.shape.head_dim * sizeof(float));
  }

  void record_eviction(const LayerStep& l) const override {
    l.recorder.record(KeyDiff{.k = l.pool().k,
                              .chunk_k = l.chunk ? l.at.chunk_k : KvArray{},
                              .sums = sums_,
                              .cis = l.pool().cis,
                              .chunk_cis = l.chunk ? l.at.chunk_cis : View{},
                              .p = {.first_head = 0,
                                    .heads = l.shape().kv_heads,
                                    .head_dim = l.shape().head_dim,
                                    .chunk_capacity = l.setting.options.chunk,
                                    .head_state = l.head_state(),
                                    .blocks = blocks_}});
  }

 private:
  uint32_t blocks_ = 0;
  View sums_;  // f32 [kv heads][blocks_][head_dim]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_keydiff_retention() { return std::make_unique<KeyDiffRetention>(); }

}  // namespace thimble
