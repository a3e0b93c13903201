// Locret (methods 2), and every retention by a trained score. In each layer, a retainer scores each token
// once, from its query, key and value or from its hidden state.
#include <algorithm>
#include <cmath>

#include "runtime/policy/policy.h"

namespace thimble {
namespace {

constexpr float kSinkEpsilon = 1e-6f;  // of the norms, in every published file

class Locret : public RetentionPolicy {
 public:
  Status resolve(const Model&, SessionOptions& o) const override {
    const Retainer* retainer = o.retainer.get();
    if (!o.chunk) o.chunk = retainer->chunk;
    if (o.local == kDefault && retainer->local) o.local = retainer->local;
    if (!o.pool && !o.budget) o.pool = retainer->budget;
    if (o.protect_init == kDefault) o.protect_init = retainer->protect_init.value_or(kSinks);
    if (o.pool && o.stabilizers == kDefault) o.stabilizers = stabilizers(*retainer, o);
    take_shares(o);
    return resolve_eviction(o);
  }

  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    const Retainer& retainer = *s.options.retainer;
    const uint64_t f32 = 4, rows = std::max(s.options.chunk, kBatchRows);
    const auto [first, second] = retainer.matrices();
    rings_.clear();
    for (const Layer& layer : s.model.layers)
      rings_.push_back(layer.retains()
                           ? pool.place(uint64_t(kBatchRows) * input_cols(s, *layer.attention()) * f32)
                           : View{});
    first_ = workspace.place(rows * first.rows * f32);
    second_ = workspace.place(rows * second.rows * f32);
    score_ = retainer.kind == Retainer::Kind::kSink ? workspace.place(rows * s.model.shape.kv_heads * f32)
                                                    : second_;
  }

  // Running the retainer for a single token would read too many weights, so a generated token waits in the
  // ring.
  void record(const LayerStep& l) const override {
    const bool of_qkv = l.setting.options.retainer->input == Retainer::Input::kQkv;
    const View& input = of_qkv ? l.at.qkv : l.input();
    const uint32_t cols = input_cols(l.setting, l.attention()),
                   stride = of_qkv ? l.setting.dimensions.qkv_cols : cols;
    if (l.chunk)
      score(l, input, stride, l.chunk_rows().cis, kIntoChunk);
    else
      l.recorder.record(Copy{.src = input,
                             .dst = rings_[l.layer],
                             .p = {.cols = cols,
                                   .src_stride = stride,
                                   .dst_stride = cols,
                                   .from_logit_row = 0,
                                   .to_ring_row = 1,
                                   .rows = kStepRows}});
  }

  void record_upkeep(const LayerStep& l) const override {
    score(l, rings_[l.layer], input_cols(l.setting, l.attention()), l.pool().cis, kIntoRing);
  }

  // The waiting rows of the rings.
  void carry(const Held& held, std::vector<View>& views) const override {
    for (const View& ring : rings_)
      if (ring && held.unscored) views.push_back(ring.slice(0, held.unscored * (ring.bytes / kBatchRows)));
  }

  Cost cost(const SessionOptions& o) const override {
    Cost cost;
    for (const Retainer::Networks& l : o.retainer->layers)
      for (const Tensor& matrix : {l.fc1, l.fc2, l.q, l.k}) cost += product_cost(matrix);
    return cost;
  }

 private:
  // As many stabilizers as the retainer was trained with. If the file says with which pool it was trained,
  // the number is scaled to this pool. At least one entry is left to choose.
  static uint32_t stabilizers(const Retainer& r, const SessionOptions& o) {
    uint64_t wanted = o.pool / 4;
    if (r.stabilizers && r.budget)
      wanted = uint64_t(r.stabilizers) * o.pool / r.budget;
    else if (r.stabilizers)
      wanted = std::min(r.stabilizers, o.pool / 2);
    const uint64_t unavailable = std::min<uint64_t>(o.pool, uint64_t(o.protect_init) + 1);
    return static_cast<uint32_t>(std::min(wanted, o.pool - unavailable));
  }

  static uint32_t input_cols(const Setting& s, const AttentionMixer& m) {
    return s.options.retainer->input == Retainer::Input::kQkv ? m.qkv_cols() : s.model.shape.d_model;
  }

  // Records the score of rows of the retainer's input, which begin `stride` elements apart.
  void score(const LayerStep& l, const View& input, uint32_t stride, const View& cis, uint32_t into) const {
    const Retainer::Networks& layer = l.setting.options.retainer->layers[l.layer];
    if (l.setting.options.retainer->kind == Retainer::Kind::kSink)
      score_among_sinks(l, layer, input, stride);
    else
      score_by_products(l, layer, input, stride);
    l.recorder.record(CisStore{.score = score_,
                               .cis = cis,
                               .p = {.first_head = 0,
                                     .heads = l.attention().kv_heads,
                                     .kind = kCisHead,
                                     .share_heads = l.setting.options.retain_scope == RetainScope::kLayer,
                                     .layer = l.layer,
                                     .chunk_capacity = l.setting.options.chunk,
                                     .head_state = l.head_state(),
                                     .into = into}});
  }

  // The kinds locret, linear and mlp (methods 2.1), with or without a hidden layer.
  void score_by_products(const LayerStep& l, const Retainer::Networks& layer, View x, uint32_t stride) const {
    if (layer.fc1) {
      linear(l, x, stride, layer.fc1, layer.fc1_bias, first_);
      l.recorder.record(
          Activation{.x = first_, .p = {.cols = layer.fc1.rows, .act = l.setting.options.retainer->act}});
      x = first_;
      stride = layer.fc1.rows;
    }
    linear(l, x, stride, layer.fc2, layer.fc2_bias, score_);
  }

  // The kind sink: the part of a query's attention that the token would take from the learned sinks of its
  // head.
  void score_among_sinks(const LayerStep& l, const Retainer::Networks& layer, const View& x,
                         uint32_t stride) const {
    const Retainer& retainer = *l.setting.options.retainer;
    linear(l, x, stride, layer.q, layer.q_bias, first_);
    linear(l, x, stride, layer.k, {}, second_);
    l.recorder.record(SinkScore{.q = first_,
                                .k = second_,
                                .q_norm = l.weights.of(layer.q_norm),
                                .k_norm = l.weights.of(layer.k_norm),
                                .sinks = l.weights.of(layer.sinks),
                                .bias = l.weights.of(layer.sink_bias),
                                .score = score_,
                                .p = {.heads = l.attention().kv_heads,
                                      .group = l.attention().group(),
                                      .width = retainer.rank,
                                      .sinks = retainer.sinks,
                                      .eps = kSinkEpsilon,
                                      .scale = 1.0f / std::sqrt(float(retainer.rank))}});
  }

  static void linear(const LayerStep& l, const View& x, uint32_t stride, const Tensor& w, const Tensor& bias,
                     const View& y) {
    l.recorder.record(Linear{.x = x,
                             .w = l.weights.of(w),
                             .bias = l.weights.of(bias),
                             .y = y,
                             .p = {.in_cols = w.cols,
                                   .out_cols = w.rows,
                                   .x_stride = stride,
                                   .y_stride = w.rows,
                                   .add = 0,
                                   .rows = kStepRows}});
  }

  std::vector<View> rings_;  // f32 [kBatchRows][columns of the retainer's input], for each layer
  View first_, second_;      // f32 [rows][...]: outputs of the retainer's matrices
  View score_;               // f32 [rows][kv heads]
};

}  // namespace

std::unique_ptr<RetentionPolicy> make_locret_retention() { return std::make_unique<Locret>(); }

}  // namespace thimble
