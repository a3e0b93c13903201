// Quest (methods 4) stores bounds of the keys of every page of entries, channel by channel. A generated token
// attends to the pages whose bounds allow the largest dot products. Keys are cached with the rotation of
// their original positions, so no position is extrapolated.
#include <algorithm>

#include "base/bits.h"
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

constexpr uint32_t kDefaultK = 2048, kDefaultPage = 16, kDefaultDenseLayers = 2;

class Quest : public SelectionPolicy {
 public:
  Status resolve(const Model&, bool, SessionOptions& o) const override {
    if (!o.select_k) o.select_k = kDefaultK;
    if (!o.select_page) o.select_page = kDefaultPage;
    if (o.dense_layers == kDefault) o.dense_layers = kDefaultDenseLayers;
    o.positions = Positions::kOriginal;
    if (o.select_prefill == 1)
      return error(Code::kInvalidArgument,
                   "quest reads densely and selects for generated tokens alone; leave select_prefill out");
    o.select_prefill = 0;
    if (pages(o) < 2)
      return error(
          Code::kInvalidArgument,
          "quest needs select_k to be two pages or more, the last one among them; %u is less than 2 * %u",
          o.select_k, o.select_page);
    return {};
  }

  uint32_t most_attended(const SessionOptions& o) const override { return pages(o) * o.select_page; }

  void place(const Setting& s, Arena& pool, Arena& workspace) override {
    const ModelShape& m = s.model.shape;
    const uint64_t f32 = 4, i32 = 4;
    const uint32_t page = s.options.select_page;
    bounds_.clear();
    for (uint32_t i = 0; i < m.layers; ++i) {
      const AttentionMixer* attention = s.model.layers[i].attention();
      bounds_.push_back(!chooses(s, i)          ? View{}
                        : attention->has_keys() ? pool.place(bounds_bytes(s, *attention))
                                                : bounds_[attention->owner]);
    }
    page_capacity_ = static_cast<uint32_t>(ceil_div(s.dimensions.reach, page));
    list_capacity_ = 1 + most_attended(s.options);
    const uint64_t list_bytes = uint64_t(m.kv_heads) * list_capacity_ * i32;
    const View shared = s.options.watch ? View{} : workspace.place(list_bytes);
    lists_.clear();
    for (uint32_t i = 0; i < m.layers; ++i)
      lists_.push_back(!chooses(s, i) ? View{} : s.options.watch ? pool.place(list_bytes) : shared);
    scores_ = workspace.place(uint64_t(m.heads) * page_capacity_ * f32);
    lse_ = workspace.place(m.heads * f32);
    votes_ = workspace.place(uint64_t(m.kv_heads) * page_capacity_ * f32);
  }

  List record(const LayerStep& l) const override {
    if (l.chunk || !chooses(l.setting, l.layer)) return {};
    const AttentionMixer& m = l.attention();
    if (m.has_keys()) record_bounds(l, false);
    const uint32_t page = l.setting.options.select_page, group = m.group();
    l.recorder.record(PageScore{.q = l.at.qkv,
                                .bounds = bounds_[l.layer],
                                .rope = l.rope_table(),
                                .scores = scores_,
                                .lse = lse_,
                                .p = {.first_head = 0,
                                      .heads = m.kv_heads,
                                      .group = group,
                                      .head_dim = m.head_dim,
                                      .row_stride = l.setting.dimensions.qkv_cols,
                                      .head_state = l.head_state(),
                                      .page = page,
                                      .score_capacity = page_capacity_,
                                      .scale = l.setting.model.attention_scale,
                                      .rope = l.rope()}});
    // The query heads of a KV head share a list. If the group is one query head, this is the published
    // selection.
    l.recorder.record(Vote{.scores = scores_,
                           .lse = lse_,
                           .pos = {},
                           .gate = {},
                           .votes = votes_,
                           .p = {.heads = m.kv_heads,
                                 .group = group,
                                 .head_state = l.head_state(),
                                 .scope = kVoteGroup,
                                 .page = page,
                                 .score_capacity = page_capacity_,
                                 .vote_capacity = page_capacity_,
                                 .window = 0}});
    l.recorder.record(TopK{.scores = votes_,
                           .chunk_scores = {},
                           .pos = {},
                           .gate = {},
                           .list = lists_[l.layer],
                           .p = {.heads = m.kv_heads,
                                 .head_state = l.head_state(),
                                 .keep = kKeepOfStep,
                                 .page = page,
                                 .by_position = 0,
                                 .in_runs = 0,
                                 .score_capacity = page_capacity_,
                                 .chunk_capacity = 0,
                                 .list_capacity = list_capacity_}});
    return last_list(l.layer);
  }
  List last_list(uint32_t layer) const override { return {lists_[layer], list_capacity_}; }

  // A compaction moves entries between pages. Without an eviction it only appends the chunk to
  // the pool.
  void record_upkeep(const LayerStep& l) const override {
    if (chooses(l.setting, l.layer)) record_bounds(l, l.setting.dimensions.full_evict);
  }

  // The unit is a page. The last page, which contains the token itself, is always attended to. The query
  // heads vote for the others.
  void fill(const SessionOptions& o, uint32_t, StepParams& step) const override {
    step.n_init = 0;
    step.n_local = 1;
    step.select_k = pages(o) - 1;
  }

  // The bounds of a page have the size of two keys.
  Cost cost(const Model& model, const SessionOptions& o, double entries) const override {
    if (entries <= most_attended(o)) return {};
    return full_key_cost(model, o.dense_layers) * (2 * entries / o.select_page);
  }

  Status read_stats(Device& device, SelectionStats& stats) const override {
    // The list of the last layer that selects: all layers may share one list.
    const auto last =
        std::find_if(lists_.rbegin(), lists_.rend(), [](const View& list) { return bool(list); });
    return last == lists_.rend() ? Status() : add_list_counts(device, {*last, list_capacity_}, stats);
  }

  // The bounds of the pages that heads hold, at the places that PageBoundsParams describes.
  void carry(const Held& held, std::vector<View>& views) const override {
    const Model& model = held.setting.model;
    const uint32_t page = held.setting.options.select_page;
    for (uint32_t i = 0; i < held.entries.size(); ++i) {
      const AttentionMixer& m = model.owner_of_run(i);
      const View& bounds = bounds_[model.layer_of_run[i]];
      const uint64_t page_bytes = 2 * kv_bytes(DType::kF16, m.head_dim);
      const uint64_t first = held.runs[i].first / page + i - m.first_run;
      if (bounds && held.entries[i])
        views.push_back(bounds.slice(first * page_bytes, ceil_div(held.entries[i], page) * page_bytes));
    }
  }

 private:
  static uint32_t pages(const SessionOptions& o) { return o.select_k / o.select_page; }
  // A layer that attends to the keys of an earlier one needs the bounds of that one.
  static bool chooses(const Setting& s, uint32_t layer) {
    const Layer& its = s.model.layers[layer];
    return its.attends_to_all() && its.attention()->owner >= s.options.dense_layers;
  }
  // The bytes of a layer's bounds, with as many pages as PageBoundsParams counts.
  static uint64_t bounds_bytes(const Setting& s, const AttentionMixer& m) {
    const uint64_t pages = s.dimensions.most_layer_entries / s.options.select_page + m.kv_heads;
    return pages * 2 * kv_bytes(DType::kF16, m.head_dim);
  }
  void record_bounds(const LayerStep& l, bool all) const {
    l.recorder.record(PageBounds{.k = l.pool().k,
                                 .bounds = bounds_[l.layer],
                                 .p = {.first_head = 0,
                                       .heads = l.attention().kv_heads,
                                       .head_dim = l.attention().head_dim,
                                       .head_state = l.head_state(),
                                       .page = l.setting.options.select_page,
                                       .all = all}});
  }

  std::vector<View> bounds_;   // f16 [pages][2][dh] of each layer that selects
  View scores_, lse_, votes_;  // [H][pages], [H], [kv head][pages]
  // [kv head][list_capacity] of each layer that selects. All layers share one list, or have their own if the
  // session watches.
  std::vector<View> lists_;
  uint32_t page_capacity_ = 0, list_capacity_ = 0;
};

}  // namespace

std::unique_ptr<SelectionPolicy> make_quest_selection() { return std::make_unique<Quest>(); }

}  // namespace thimble
