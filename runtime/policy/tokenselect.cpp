// TokenSelect (methods 3): the query heads vote for the entries that a step attends to, in addition to the
// first entries (sinks) and the most recent ones.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/policy/kv_types.h"
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

constexpr uint32_t kDefaultK = 2048, kDefaultInit = 128, kDefaultLocal = 512;  // methods 3.3
// The bound on positions that a vote over positions of an evicted pool needs: 4 MiB of votes.
constexpr uint32_t kDefaultContext = 1u << 20;

class TokenSelect : public SelectionPolicy {
 public:
  Status resolve(const Model&, bool evicts, SessionOptions& o) const override {
    if (!o.select_k) o.select_k = kDefaultK;
    if (!o.select_local) o.select_local = kDefaultLocal;
    if (o.select_init == kDefault) o.select_init = kDefaultInit;
    if (!(o.select_theta >= -1.0f && o.select_theta <= 1e9f))
      return error(Code::kInvalidArgument, "select_theta is %g; it is a cosine: -1 always reuses, 1 never",
                   o.select_theta);
    // The published method also selects in prefill. With a retention policy, the pool already bounds the work
    // (methods 6.2).
    if (o.select_prefill == kDefault) o.select_prefill = !evicts;
    // All rows of a chunk must be in the local window. Otherwise the lists of the last rows would lack the
    // first rows (methods 3.4).
    if (o.select_prefill) o.chunk = std::min(o.chunk, o.select_local);
    // As long as nothing was evicted, each position has one entry. After an eviction, heads hold different
    // tokens, and each KV head votes separately (methods 6.1).
    if (o.vote == VoteScope::kAuto) o.vote = evicts ? VoteScope::kGroup : VoteScope::kLayer;
    if (o.vote == VoteScope::kLayer && evicts && !o.context) o.context = kDefaultContext;
    const bool unequal = !o.keeps.empty() || o.shares || o.recalls_per_head();
    if (o.vote == VoteScope::kLayer && unequal)
      return error(
          Code::kInvalidArgument,
          "a vote over the layer needs heads that keep the same number of entries; use the group vote");
    return {};
  }

  uint32_t most_attended(const SessionOptions& o) const override {
    return o.select_init + o.select_k + o.select_local;
  }
  bool selects_chunks(const SessionOptions& o) const override { return o.select_prefill == 1; }
  uint32_t vote_positions(const Setting& s) const override {
    return s.options.vote == VoteScope::kLayer && s.dimensions.full_evict ? s.options.context
                                                                          : s.dimensions.reach;
  }
  // A chunk's queries score with positions after the local window (methods 3.5).
  uint32_t rope_positions(const SessionOptions& o) const override { return o.select_local + o.chunk; }

  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    const ModelShape& m = s.model.shape;
    const uint64_t f32 = 4, i32 = 4, reach = s.dimensions.reach;
    list_capacity_ = 1 + most_attended(s.options);
    layers_.clear();
    for (const Layer& model_layer : s.model.layers) {
      Cache& layer = layers_.emplace_back();
      if (!model_layer.attends_to_all()) continue;
      const AttentionMixer& attention = *model_layer.attention();
      layer.gate = pool.place(sizeof(GateState));
      layer.query = pool.place(uint64_t(attention.q_cols()) * f32);
      layer.list = pool.place(uint64_t(attention.kv_heads) * list_capacity_ * i32);
    }
    scores_ = workspace.place(m.heads * reach * f32);
    lse_ = workspace.place(m.heads * f32);
    vote_capacity_ = vote_positions(s);
    const bool layer_vote = s.options.vote == VoteScope::kLayer;
    votes_ = workspace.place((layer_vote ? vote_capacity_ : m.kv_heads * reach) * f32);
  }

  List record(const LayerStep& l) const override {
    const SessionOptions& o = l.setting.options;
    if (l.chunk && !selects_chunks(o)) return {};
    const AttentionMixer& m = l.attention();
    const Cache& layer = layers_[l.layer];
    const uint32_t group = m.group(), reach = l.setting.dimensions.reach;
    // Only decode uses the selection cache, since a chunk's mean query cannot be compared with another query
    // (methods 3.6).
    const View gate = l.chunk ? View{} : layer.gate;
    if (gate)
      l.recorder.record(
          QueryGate{.q = l.at.qkv,
                    .cached = layer.query,
                    .gate = gate,
                    .p = {.cols = m.q_cols(), .heads = m.kv_heads, .head_state = l.head_state()}});
    const bool scaled = o.vote_scale == VoteScale::kSqrt;
    l.recorder.record(TokenScore{.q = l.at.qkv,
                                 .k = l.pool().k,
                                 .rope = l.rope_table(),
                                 .gate = gate,
                                 .scores = scores_,
                                 .lse = lse_,
                                 .p = {.first_head = 0,
                                       .heads = m.kv_heads,
                                       .group = group,
                                       .head_dim = m.head_dim,
                                       .row_stride = l.setting.dimensions.qkv_cols,
                                       .head_state = l.head_state(),
                                       .score_capacity = reach,
                                       .equal_heads = l.has_equal_heads(),
                                       .scale = scaled ? l.setting.model.attention_scale : 1.0f,
                                       .rope = l.rope()}});
    const bool by_position = o.vote == VoteScope::kLayer;
    const uint32_t vote_capacity = by_position ? vote_capacity_ : reach;
    l.recorder.record(Vote{.scores = scores_,
                           .lse = lse_,
                           .pos = l.pool().pos,
                           .gate = gate,
                           .votes = votes_,
                           .p = {.heads = m.kv_heads,
                                 .group = group,
                                 .head_state = l.head_state(),
                                 .scope = by_position ? kVoteLayer : kVoteGroup,
                                 .page = 1,
                                 .score_capacity = reach,
                                 .vote_capacity = vote_capacity,
                                 .window = o.vote_window}});
    l.recorder.record(TopK{.scores = votes_,
                           .chunk_scores = {},
                           .pos = by_position ? l.pool().pos : View{},
                           .gate = gate,
                           .list = layer.list,
                           .p = {.heads = m.kv_heads,
                                 .head_state = l.head_state(),
                                 .keep = kKeepOfStep,
                                 .page = 1,
                                 .by_position = by_position,
                                 .in_runs = 0,
                                 .score_capacity = vote_capacity,
                                 .chunk_capacity = 0,
                                 .list_capacity = list_capacity_}});
    return last_list(l.layer);
  }
  List last_list(uint32_t layer) const override { return {layers_[layer].list, list_capacity_}; }

  void fill(const SessionOptions& o, uint32_t generation, StepParams& step) const override {
    step.n_init = o.select_init;
    step.n_local = o.select_local;
    step.select_k = o.select_k;
    step.theta = o.select_theta;
    step.generation = generation;
  }

  // Each key between the first and the local entries is read once.
  Cost cost(const Model& model, const SessionOptions& o, double entries) const override {
    if (entries <= most_attended(o)) return {};
    return full_entry_cost(model, o).keys * (entries - o.select_init - o.select_local);
  }

  Status clear(Device& device) const override {
    const GateState empty{};
    for (const Cache& layer : layers_)
      if (layer.gate) THIMBLE_TRY(device.write(layer.gate, &empty));
    return {};
  }

  Status read_stats(Device& device, SelectionStats& stats) const override {
    for (const Cache& layer : layers_) {
      if (!layer.gate) continue;
      GateState gate;
      THIMBLE_TRY(device.read(&gate, layer.gate));
      stats.hits += gate.hits;
      stats.misses += gate.misses;
      THIMBLE_TRY(add_list_counts(device, {layer.list, list_capacity_}, stats));
    }
    return {};
  }

  // The selection cache.
  void carry(const Held&, std::vector<View>& views) const override {
    for (const Cache& layer : layers_)
      if (layer.gate) views.insert(views.end(), {layer.gate, layer.query, layer.list});
  }

  bool can_carry(const Held& held, std::span<const Bytes> bytes) const override {
    for (uint32_t i = 0; i < layers_.size(); ++i) {
      if (!layers_[i].gate) continue;
      GateState gate;
      std::memcpy(&gate, bytes[0].data(), sizeof gate);
      // A list of an older generation is never used again. A list of a later generation cannot exist.
      const bool is_used = gate.valid && gate.generation == held.generation;
      if (gate.valid && (gate.generation > held.generation || gate.position < 0)) return false;
      const AttentionMixer& m = *held.setting.model.layers[i].attention();
      for (uint32_t head = 0; is_used && head < m.kv_heads; ++head)
        if (!is_list(bytes[2].subspan(head * list_capacity_ * sizeof(uint32_t)), held.setting.options,
                     held.entries[m.first_run + head]))
          return false;
      bytes = bytes.subspan(3);
    }
    return true;
  }

 private:
  // Whether the bytes are a count and as many ascending entries of a head. If the head must select, the list
  // must contain the local entries, which a step that reuses the list replaces.
  bool is_list(Bytes bytes, const SessionOptions& o, uint32_t entries) const {
    const auto at = [&](uint32_t i) {
      uint32_t value;
      std::memcpy(&value, &bytes[i * sizeof value], sizeof value);
      return value;
    };
    const uint32_t count = at(0);
    const uint64_t chosen = uint64_t(o.select_init) + o.select_k + o.select_local;
    if (count >= list_capacity_ || (entries >= chosen && count < o.select_local)) return false;
    for (uint32_t i = 1; i <= count; ++i)
      if (at(i) >= entries || (i > 1 && at(i) <= at(i - 1))) return false;
    return true;
  }

  struct Cache {  // of one layer; empty if it has a window or no attention
    View gate;    // GateState
    View query;   // f32 [H dh], of the cached selection
    View list;    // [kv head][list_capacity]
  };
  std::vector<Cache> layers_;
  View scores_, lse_, votes_;  // [H][reach], [H], [kv head][reach] or [positions]
  uint32_t list_capacity_ = 0, vote_capacity_ = 0;
};

}  // namespace

std::unique_ptr<SelectionPolicy> make_tokenselect_selection() { return std::make_unique<TokenSelect>(); }

}  // namespace thimble
