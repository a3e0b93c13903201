// Locret (methods 2): a trained retaining head in each layer scores every token once, from its query, key and
// value.
#include <algorithm>

#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// Decoded tokens whose q, k, v wait in a ring for the head: one batch reads its weights once for all
// (methods 2.7).
constexpr uint32_t kRingRows = 64;

class Locret : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    const RetainingHeads* heads = o.heads.get();
    if (!heads)
      return error(Code::kInvalidArgument,
                   "locret retention needs the retaining heads of this model; give their file (--heads), or "
                   "choose another retention");
    if (!o.chunk) o.chunk = heads->chunk;
    if (o.local == kDefault && heads->local) o.local = heads->local;
    if (!o.pool && !o.budget) o.pool = heads->budget;
    if (o.pool && o.stabilizers == kDefault)  // the share of the pool that the heads were trained with
      o.stabilizers = heads->stabilizers && heads->budget
                          ? static_cast<uint32_t>(uint64_t(heads->stabilizers) * o.pool / heads->budget)
                          : o.pool / 4;
    THIMBLE_TRY(resolve_eviction(o, 0));
    if (o.pool && !heads->shares.empty()) return divide_pool(heads->shares, o);
    return {};
  }

  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    const uint64_t f32 = 4, rows = std::max(s.options.chunk, kRingRows);
    rings_.clear();
    for (const LayerWeights& layer : s.model.layers)
      rings_.push_back(layer.window ? View{} : pool.place(uint64_t(kRingRows) * s.dimensions.qkv_cols * f32));
    hidden_ = workspace.place(rows * s.options.heads->d_r * f32);
    score_ = workspace.place(rows * s.model.shape.kv_heads * f32);
  }

  // A head reads far more weights than one token is worth: a token waits in the ring.
  void record(const LayerStep& l) const override {
    const uint32_t cols = l.setting.dimensions.qkv_cols;
    if (l.chunk)
      score(l, l.at.qkv, l.at.chunk_cis, kIntoChunk);
    else
      l.recorder.record(Copy{.src = l.at.qkv,
                             .dst = rings_[l.layer],
                             .p = {.cols = cols,
                                   .src_stride = cols,
                                   .dst_stride = cols,
                                   .from_logit_row = 0,
                                   .to_ring_row = 1,
                                   .rows = kStepRows}});
  }

  uint32_t upkeep_rows() const override { return kRingRows; }
  void record_upkeep(const LayerStep& l) const override {
    score(l, rings_[l.layer], l.pool().cis, kIntoRing);
  }

  Cost cost(const SessionOptions& o) const override {
    Cost cost;
    for (const Tensor& t : o.heads->tensors()) cost += product_cost(t);
    return cost;
  }

 private:
  // Gives every head its share of what equal pools would take together: as many as the stabilizers and
  // protected entries leave room to choose, and what rounding leaves to the head with most.
  static Status divide_pool(const std::vector<float>& shares, SessionOptions& o) {
    constexpr uint32_t kLeast = 64;
    const uint64_t total = uint64_t(o.pool) * shares.size();
    const uint32_t least = std::min(o.pool, std::max(kLeast, 2 * (o.protect_init + 1)));
    o.keeps.assign(shares.size(), least);
    const double left = static_cast<double>(total - least * shares.size());
    double above = 0;  // shares beyond the least
    const double floor = static_cast<double>(least) / o.pool;
    for (const float share : shares) above += std::max(0.0, share - floor);
    uint64_t given = least * shares.size();
    for (size_t i = 0; i < shares.size() && above > 0; ++i) {
      const auto more = static_cast<uint32_t>(left * std::max(0.0, shares[i] - floor) / above);
      o.keeps[i] += more;
      given += more;
    }
    *std::max_element(o.keeps.begin(), o.keeps.end()) += static_cast<uint32_t>(total - given);
    return {};
  }

  // Scores rows of q, k, v (methods 2.1).
  void score(const LayerStep& l, const View& qkv, const View& cis, uint32_t into) const {
    const RetainingHeads& heads = *l.setting.options.heads;
    const RetainingHeads::Layer& head = heads.layers[l.layer];
    const uint32_t cols = l.setting.dimensions.qkv_cols, kv_heads = l.shape().kv_heads;
    l.recorder.record(Linear{.x = qkv,
                             .w = l.weights.of(head.fc1),
                             .bias = {},
                             .y = hidden_,
                             .p = {.in_cols = cols,
                                   .out_cols = heads.d_r,
                                   .x_stride = cols,
                                   .y_stride = heads.d_r,
                                   .add = 0,
                                   .rows = kStepRows}});
    l.recorder.record(Activation{.x = hidden_, .p = {.cols = heads.d_r, .act = heads.act}});
    l.recorder.record(Linear{.x = hidden_,
                             .w = l.weights.of(head.fc2),
                             .bias = {},
                             .y = score_,
                             .p = {.in_cols = heads.d_r,
                                   .out_cols = kv_heads,
                                   .x_stride = heads.d_r,
                                   .y_stride = kv_heads,
                                   .add = 0,
                                   .rows = kStepRows}});
    l.recorder.record(CisStore{.score = score_,
                               .cis = cis,
                               .p = {.first_head = 0,
                                     .heads = kv_heads,
                                     .kind = kCisHead,
                                     .share_heads = l.setting.options.retain_scope == RetainScope::kLayer,
                                     .layer = l.layer,
                                     .chunk_capacity = l.setting.options.chunk,
                                     .head_state = l.head_state(),
                                     .into = into}});
  }

  std::vector<View> rings_;  // f32 [kRingRows][qkv_cols] of each layer
  View hidden_, score_;      // f32 [rows][d_r], [rows][kv heads]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_locret_retention() { return std::make_unique<Locret>(); }

}  // namespace thimble
