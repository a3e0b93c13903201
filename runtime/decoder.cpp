#include "runtime/decoder.h"

#include <algorithm>
#include <cmath>

#include "runtime/kv/page_votes.h"

namespace thimble {

Decoder::Decoder(const Setting& setting, const Policies& policies, const Weights& weights,
                 const Layout& layout)
    : setting_(setting),
      model_(setting.model),
      shape_(setting.model.shape),
      options_(setting.options),
      dimensions_(setting.dimensions),
      policies_(policies),
      weights_(weights),
      at_(layout) {}

// ---- the step ----

// The programs for chunks have a segment for each layer, so that an interrupt takes effect soon. The step of
// one token is too short to need that, unless some layers, or their stores, have to be read from a file, or
// layers pass through a window. A second reading needs no logits. If a draft block follows, it reads all rows
// as they are normed for the output.
void Decoder::record_step(Recorder& r, Step step, uint32_t rows) const {
  const auto cut = [&] {
    if (step == Step::kChunk || step == Step::kAgain || step == Step::kDraft || !weights_.pager.empty() ||
        at_.recall.window || !weights_.window.empty())
      r.segment();
  };
  r.segment();
  stage(r, kHead);
  if (step == Step::kRebuild) policies_.host()->record_rows(r);
  embed(r);
  if (model_.embedding_scale != 1) scale(r, at_.x, at_.x, {.scale = model_.embedding_scale});
  if (model_.joined) join(r, *model_.joined);
  if (at_.first_x) copy_stream(r, at_.first_x);
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    cut();
    stage(r, kHead + 1 + layer);
    LayerStep l = layer_step(r, layer, step);
    l.lifts = step == Step::kChunk && at_.lifted_k && rows >= dimensions_.lifting_rows;
    layer_block(l, step);
  }
  if (step == Step::kAgain) return;
  if (options_.draft == Draft::kMtp) norm(r, at_.x, model_.output_norm, at_.x);
  cut();
  tail_block(r);
}

// Copies what comes next to the window. The copies run next to the segment's other ops.
void Decoder::stage(Recorder& r, uint32_t segment) const {
  for (const Tensor& t : weights_.window.copied_in(segment))
    r.record(Stage{.from = weights_.stored(t), .to = weights_.window.of(t)});
}

void Decoder::embed(Recorder& r) const {
  const Weight table = weights_.of(model_.token_embedding);
  r.record(Embed{.tokens = table ? at_.tokens : View{},
                 .table = table ? table : passed_rows(model_.token_embedding, at_.embedding_rows),
                 .x = at_.x,
                 .p = {.cols = shape_.d_model}});
}

// A draft block begins with a token's embedding and the model's last row for the token before it.
void Decoder::join(Recorder& r, const JoinedInput& in) const {
  const uint32_t d = shape_.d_model, both = 2 * d;
  const uint64_t half = d * sizeof(float);
  norm(r, at_.x, in.embedding_norm, at_.halves, {.row_stride = both, .x_row_stride = d});
  norm(r, at_.model_rows, in.row_norm, at_.halves.slice(half, at_.halves.bytes - half),
       {.row_stride = both, .x_row_stride = d});
  linear(r, at_.halves, both, in.join, {}, at_.x, d, false);
}

// A layer that attends to the keys of an earlier one appends nothing, and no policy scores anything for it.
// The earlier layer keeps its chunk until the last of these layers has read it.
template <>
void Decoder::mix(const LayerStep& l, Step step, const AttentionMixer& m) const {
  m.is_latent() ? project_latent(l) : project_qkv(l);
  if (step == Step::kAgain) {
    if (m.has_keys()) append(l, at_.retain_list);  // its saturated values were counted before; not used
    grow_queries(l);
    if (m.has_keys()) retention(l).record_upkeep(l);
    attend(l, {});
  } else if (step == Step::kRebuild) {
    const HostControl::Rebuilt rebuilt = policies_.host()->rebuilt();
    if (m.has_keys()) append(l, at_.saturated, rebuilt.positions);
    grow_queries(l, rebuilt.positions);
    if (options_.watch) keep_query(l);
    attend(l, {rebuilt.list, rebuilt.list_capacity}, rebuilt.index);
  } else {
    if (m.has_keys()) {
      append(l, at_.saturated);
      retention(l).record(l);
    }
    grow_queries(l);
    if (m.has_keys()) retention(l).record_queries(l);
    if (at_.recall.list && l.model_layer().retains()) keep_asking(l);
    if (options_.watch) keep_query(l);
    // A chunk attends to everything in few steps, a generated token in all of them.
    const bool all = options_.recalls_all() && model_.layers[m.owner].retains();
    if (l.lifts)
      attend_lifted(l, select(l));
    else if (!all || l.chunk)
      attend(l, select(l));
    if (all) attend_all(l);
  }
  const LayerStep owner = layer_step(l.recorder, m.owner, step);
  if (owner.attention().last_reader == l.layer) retain(owner, step);
  if (m.output_gate) gate(l);
  const bool attended_latent = m.is_latent() && !l.lifts;
  if (attended_latent) lift_values(l);
  add_branch(l.recorder, attended_latent ? at_.middle : at_.attention, m.output, m.output_bias,
             l.model_layer().post_norm);
}

template <>
void Decoder::mix(const LayerStep& l, Step, const ShortConvMixer& m) const {
  const uint32_t d = shape_.d_model;
  linear(l.recorder, l.input(), d, m.in, {}, at_.qkv, 3 * d, false);
  l.recorder.record(ShortConv{.x = at_.qkv,
                              .w = weights_.of(m.conv),
                              .bias = {},
                              .tail = at_.states[l.layer],
                              .y = at_.attention,
                              .p = {.channels = d,
                                    .taps = m.taps(),
                                    .x_column = 2 * d,
                                    .times_column = 0,
                                    .gate_column = d,
                                    .x_stride = 3 * d,
                                    .y_stride = d,
                                    .act = kActNone}});
  add_branch(l.recorder, at_.attention, m.out, {}, l.model_layer().post_norm);
}

template <>
void Decoder::mix(const LayerStep& l, Step, const DeltaNetMixer& m) const {
  Recorder& r = l.recorder;
  const uint32_t stride = m.first_cols();
  const auto project = [&](const Tensor& w, uint32_t column, bool exact) {
    linear(r, l.input(), shape_.d_model, w, {}, qkv_columns(column), stride, false, kStepRows, exact);
  };
  project(m.qkv, 0, false);
  project(m.z, m.z_column(), false);
  // The exponential of alpha multiplies everything that the state holds.
  project(m.beta, m.beta_column(), true);
  project(m.alpha, m.alpha_column(), true);
  r.record(ShortConv{.x = at_.qkv,
                     .w = weights_.of(m.conv),
                     .bias = {},
                     .tail = part_of_state(l, 0, m.tail_bytes()),
                     .y = at_.middle,
                     .p = {.channels = m.channels(),
                           .taps = m.taps(),
                           .x_column = 0,
                           .times_column = kNoColumn,
                           .gate_column = kNoColumn,
                           .x_stride = stride,
                           .y_stride = m.channels(),
                           .act = kActSilu}});
  r.record(DeltaNet{.qkv = at_.middle,
                    .gates = at_.qkv,
                    .a = weights_.of(m.a),
                    .dt = weights_.of(m.dt),
                    .m = part_of_state(l, m.tail_bytes(), m.state_bytes() - m.tail_bytes()),
                    .y = at_.attention,
                    .p = {.key_heads = m.key_heads,
                          .value_heads = m.value_heads,
                          .width = m.width,
                          .q_column = 0,
                          .k_column = m.key_cols(),
                          .v_column = 2 * m.key_cols(),
                          .qkv_stride = m.channels(),
                          .alpha_column = m.alpha_column(),
                          .beta_column = m.beta_column(),
                          .gates_stride = stride,
                          .y_stride = m.value_cols(),
                          .eps = model_.norm_epsilon,
                          .tiled = m.tiled}});
  r.record(GatedNorm{.x = at_.attention,
                     .z = at_.qkv,
                     .weight = weights_.of(m.norm),
                     .y = at_.attention,
                     .p = {.cols = m.width,
                           .groups = m.value_heads,
                           .row_stride = m.value_cols(),
                           .z_stride = stride,
                           .z_column = m.z_column(),
                           .eps = model_.norm_epsilon,
                           .order = kNormThenGate,
                           .act = kActSilu,
                           .weight_per_group = 0}});
  add_branch(r, at_.attention, m.out, {}, l.model_layer().post_norm);
}

template <>
void Decoder::mix(const LayerStep& l, Step, const SsmMixer& m) const {
  Recorder& r = l.recorder;
  const uint32_t stride = m.first_cols();
  linear(r, l.input(), shape_.d_model, m.in, {}, at_.qkv, stride, false);
  r.record(ShortConv{.x = at_.qkv,
                     .w = weights_.of(m.conv),
                     .bias = weights_.of(m.conv_bias),
                     .tail = part_of_state(l, m.ssm_bytes(), m.state_bytes() - m.ssm_bytes()),
                     .y = at_.middle,
                     .p = {.channels = m.channels(),
                           .taps = m.taps(),
                           .x_column = m.channels_column(),
                           .times_column = kNoColumn,
                           .gate_column = kNoColumn,
                           .x_stride = stride,
                           .y_stride = m.channels(),
                           .act = kActSilu}});
  r.record(Ssm{.xbc = at_.middle,
               .dt = at_.qkv,
               .dt_bias = weights_.of(m.dt_bias),
               .a = weights_.of(m.a),
               .d = weights_.of(m.d),
               .s = part_of_state(l, 0, m.ssm_bytes()),
               .y = at_.attention,
               .p = {.heads = m.heads,
                     .groups = m.groups,
                     .width = m.width,
                     .state = m.state,
                     .x_column = 0,
                     .b_column = m.value_cols(),
                     .c_column = m.value_cols() + m.key_cols(),
                     .xbc_stride = m.channels(),
                     .dt_column = m.dt_column(),
                     .dt_stride = stride,
                     .y_stride = m.value_cols()}});
  r.record(GatedNorm{.x = at_.attention,
                     .z = at_.qkv,
                     .weight = weights_.of(m.norm),
                     .y = at_.attention,
                     .p = {.cols = m.value_cols() / m.groups,
                           .groups = m.groups,
                           .row_stride = m.value_cols(),
                           .z_stride = stride,
                           .z_column = 0,
                           .eps = model_.norm_epsilon,
                           .order = m.norm ? kGateThenNorm : kGateOnly,
                           .act = kActSilu,
                           .weight_per_group = 1}});
  add_branch(r, at_.attention, m.out, {}, l.model_layer().post_norm);
}

void Decoder::layer_block(const LayerStep& l, Step step) const {
  const Layer& layer = l.model_layer();
  if (layer.norm) norm(l.recorder, at_.x, layer.norm, at_.norm);
  for (const Mixer& mixer : layer.mixers) std::visit([&](const auto& m) { mix(l, step, m); }, mixer);
  if (layer.ffn_norm) norm(l.recorder, at_.x, layer.ffn_norm, at_.norm);
  std::visit([&](const auto& f) { feed_forward(l, f); }, layer.feed_forward);
  if (layer.token_branch.gate) token_branch(l.recorder, l.layer, layer.token_branch);
  if (layer.scale != 1) scale(l.recorder, at_.x, at_.x, {.scale = layer.scale});
}

// Bytes of the layer's state, in every slot.
StateArray Decoder::part_of_state(const LayerStep& l, uint64_t first, uint64_t bytes) const {
  const StateArray& state = at_.states[l.layer];
  return {state.block0.slice(first, bytes), state.slot_stride, state.slots};
}

void Decoder::project_qkv(const LayerStep& l) const {
  Recorder& r = l.recorder;
  const AttentionMixer& m = l.attention();
  const uint32_t k = m.q_cols(), v = k + m.kv_cols();
  if (m.output_gate)
    linear(r, l.input(), shape_.d_model, m.q, m.q_bias, at_.middle, m.middle_cols(), false);
  else
    linear(r, l.input(), shape_.d_model, m.q, m.q_bias, qkv_columns(0), dimensions_.qkv_cols, false);
  if (m.k) linear(r, l.input(), shape_.d_model, m.k, m.k_bias, qkv_columns(k), dimensions_.qkv_cols, false);
  if (m.v) linear(r, l.input(), shape_.d_model, m.v, m.v_bias, qkv_columns(v), dimensions_.qkv_cols, false);
  if (m.k && m.norms_v) v_norm(l);  // before the norm of k, which v may come from
  if (m.output_gate)
    separate_queries(l);
  else if (m.q_norm)
    qk_norm(l, m.q_norm, 0, m.heads);
  if (m.k_norm) qk_norm(l, m.k_norm, k, m.kv_heads);
}

// The keys and queries of latent attention: the rotated channels come first. A query's product with the
// matrix of its head makes it comparable with the latent channels of keys.
void Decoder::project_latent(const LayerStep& l) const {
  Recorder& r = l.recorder;
  const AttentionMixer& m = l.attention();
  const uint32_t d = shape_.d_model, k = m.q_cols(), rotated = m.k_rotated.rows;
  // The products of the layer's input follow each other, so that backends can launch them together.
  if (m.q_in) linear(r, l.input(), d, m.q_in, {}, at_.attention, m.q_in.rows, false);
  linear(r, l.input(), d, m.k_rotated, {}, qkv_columns(k), dimensions_.qkv_cols, false);
  linear(r, l.input(), d, m.k, {}, qkv_columns(k + rotated), dimensions_.qkv_cols, false);
  if (m.q_in) norm(r, at_.attention, m.q_in_norm, at_.attention, {.cols = m.q_in.rows});
  linear(r, m.q_in ? at_.attention : l.input(), m.q.cols, m.q, {}, at_.middle, m.q.rows, false);
  head_linear(l, at_.middle, m.k_up, qkv_columns(0),
              {.in_cols = m.query_dim - rotated,
               .out_cols = m.latent(),
               .copied = rotated,
               .x_head_stride = m.query_dim,
               .y_stride = dimensions_.qkv_cols,
               .y_head_stride = m.head_dim});
  head_norm(l, m.k_norm, m.latent(), k + rotated, k + rotated, m.latent());
}

// Takes what each head attended to from the latent channels to those of its values.
void Decoder::lift_values(const LayerStep& l) const {
  const AttentionMixer& m = l.attention();
  head_linear(l, at_.attention, m.v_up, at_.middle,
              {.in_cols = m.latent(),
               .out_cols = m.value_dim,
               .x_head_stride = m.latent(),
               .y_stride = m.heads * m.value_dim,
               .y_head_stride = m.value_dim});
}

// Appends the keys, values and positions of the step's rows to the chunk buffer or the pool.
void Decoder::append(const LayerStep& l, const View& saturated, const View& positions) const {
  l.recorder.record(KvAppend{.qkv = at_.qkv,
                             .rope = l.rope_table(),
                             .k = l.chunk ? l.chunk_rows().k : l.pool().k,
                             .v = l.chunk ? l.chunk_rows().v : l.pool().v,
                             .pos = l.chunk ? l.chunk_rows().pos : l.pool().pos,
                             .saturated = saturated,
                             .p = {.first_head = 0,
                                   .heads = l.attention().kv_heads,
                                   .head_dim = l.attention().head_dim,
                                   .row_stride = dimensions_.qkv_cols,
                                   .k_column = l.attention().q_cols(),
                                   .v_column = l.attention().q_cols() + l.attention().kv_cols(),
                                   .chunk_capacity = options_.chunk,
                                   .head_state = l.head_state(),
                                   .into = l.chunk ? kIntoChunk : kIntoPool,
                                   .rope = l.rope()},
                             .positions = positions});
}

// Whether a text may be so long that its queries are scaled up.
bool Decoder::grows_queries() const {
  const uint64_t context = options_.context ? options_.context : uint64_t(INT32_MAX),
                 positions = dimensions_.evicts ? context + again_rows(options_) : dimensions_.capacity;
  return model_.query_growth != 0 && positions > model_.query_period;
}

// Scales queries by their position in the text, if the model does so, whatever their rotary position is.
// Retainers read the queries before this op, so that a token's score does not depend on its position.
void Decoder::grow_queries(const LayerStep& l, const View& positions) const {
  if (!grows_queries()) return;
  l.recorder.record(Scale{.x = at_.qkv,
                          .y = at_.qkv,
                          .p = {.cols = l.attention().q_cols(),
                                .row_stride = dimensions_.qkv_cols,
                                .scale = 1,
                                .growth = model_.query_growth,
                                .period = model_.query_period,
                                .cap = 0,
                                .add = 0,
                                .rows = kStepRows},
                          .positions = positions});
}

// Records the list of entries to attend to. A windowed layer attends to its window and has no selection.
SelectionPolicy::List Decoder::select(const LayerStep& l) const {
  if (l.attention().window) return {};
  return policies_.selection->record(l);
}

void Decoder::attend(const LayerStep& l, const SelectionPolicy::List& list, const View& row_index) const {
  const LayerPool& pool = l.pool();
  Attention attention{.q = at_.qkv,
                      .k = l.chunk ? at_.view_k : pool.k,
                      .v = l.chunk && pool.v ? at_.view_v : pool.v,  // empty if values are channels of keys
                      .list = list.entries,
                      .rope = l.rope_table(),
                      .sinks = weights_.of(l.attention().sinks),
                      .y = at_.attention,
                      .ml = at_.ml,
                      .p = {.first_head = 0,
                            .heads = l.attention().kv_heads,
                            .group = l.attention().group(),
                            .head_dim = l.attention().head_dim,
                            .row_stride = dimensions_.qkv_cols,
                            .y_stride = l.attention().attended_cols(),
                            .source = l.chunk ? kFromView : kFromPool,
                            .first_entry = 0,
                            .view_capacity = dimensions_.view_capacity,
                            .head_state = l.head_state(),
                            .list_capacity = list.capacity,
                            .window = l.attention().window,
                            .equal_heads = l.has_equal_heads(),
                            .scale = model_.attention_scale,
                            .cap = model_.attention_cap,
                            .rope = l.rope()},
                      .row_index = row_index};
  if (!l.chunk) {
    l.recorder.record(attention);
    return;
  }
  for (uint32_t pass = 0; pass < dimensions_.view_passes; ++pass) {
    attention.p.first_entry = pass * dimensions_.view_capacity;
    view(l, list, attention.p.first_entry, dimensions_.view_capacity);
    l.recorder.record(attention);
  }
}

// Shows list entries [first, first + capacity) in the view.
void Decoder::view(const LayerStep& l, const SelectionPolicy::List& list, uint32_t first,
                   uint32_t capacity) const {
  const LayerPool& pool = l.pool();
  l.recorder.record(KvView{.pool_k = pool.k,
                           .pool_v = pool.v,
                           .chunk_k = l.chunk_rows().k,
                           .chunk_v = l.chunk_rows().v,
                           .list = list.entries,
                           .rope = l.rope_table(),
                           .k = at_.view_k.values,
                           .v = pool.v ? at_.view_v.values : View{},
                           .p = {.first_head = 0,
                                 .heads = l.attention().kv_heads,
                                 .head_dim = l.attention().head_dim,
                                 .chunk_capacity = options_.chunk,
                                 .head_state = l.head_state(),
                                 .first_entry = first,
                                 .view_capacity = capacity,
                                 .list_capacity = list.capacity,
                                 .rope = l.rope()}});
}

// Attends as the queries were projected, before their products with the matrices of heads: those of the
// entries come instead.
void Decoder::attend_lifted(const LayerStep& l, const SelectionPolicy::List& list) const {
  const AttentionMixer& m = l.attention();
  const uint32_t rotated = m.k_rotated.rows, capacity = dimensions_.lifted_capacity;
  for (uint32_t pass = 0; pass < dimensions_.lifted_passes(); ++pass) {
    const uint32_t first = pass * capacity;
    view(l, list, first, capacity);
    l.recorder.record(LiftView{.view = at_.view_k.values,
                               .list = list.entries,
                               .k_up = weights_.of(m.k_up.all),
                               .v_up = weights_.of(m.v_up.all),
                               .k = at_.lifted_k.values,
                               .v = at_.lifted_v.values,
                               .p = {.heads = m.heads,
                                     .rotated = rotated,
                                     .latent = m.latent(),
                                     .key_cols = m.query_dim - rotated,
                                     .value_cols = m.value_dim,
                                     .k_first = m.k_up.first,
                                     .k_head_rows = m.k_up.head_rows,
                                     .k_transposed = !m.k_up.transposed,
                                     .v_first = m.v_up.first,
                                     .v_head_rows = m.v_up.head_rows,
                                     .head_state = l.head_state(),
                                     .first_entry = first,
                                     .view_capacity = capacity,
                                     .list_capacity = list.capacity}});
    l.recorder.record(Attention{.q = at_.middle,
                                .k = at_.lifted_k,
                                .v = at_.lifted_v,
                                .list = list.entries,
                                .rope = l.rope_table(),
                                .sinks = {},
                                .y = at_.attention,
                                .ml = at_.ml,
                                .p = {.first_head = 0,
                                      .heads = m.heads,
                                      .group = 1,
                                      .head_dim = m.query_dim,
                                      .row_stride = m.heads * m.query_dim,
                                      .y_stride = m.heads * m.value_dim,
                                      .source = kFromView,
                                      .first_entry = first,
                                      .view_capacity = capacity,
                                      .head_state = l.head_state(),
                                      .list_capacity = list.capacity,
                                      .window = m.window,
                                      .equal_heads = 1,
                                      .scale = model_.attention_scale,
                                      .cap = model_.attention_cap,
                                      .rope = l.rope()},
                                .lifted = {m.value_dim, m.query_dim - rotated}});
  }
}

// Attends to what is in the pool and in the store. In a chunk it replaces attend(), if the step reads the
// store and this has entries of the layer.
void Decoder::attend_all(const LayerStep& l) const {
  const LayerPool& pool = l.pool();
  const RecallViews::Stored& stored = at_.recall.stored[l.attention().owner];
  l.recorder.record(AttendAll{.q = at_.qkv,
                              .k = pool.k,
                              .v = pool.v,
                              .pos = pool.pos,
                              .chunk_k = l.chunk ? l.chunk_rows().k : KvArray{},
                              .chunk_v = l.chunk ? l.chunk_rows().v : KvArray{},
                              .pages = stored.pages,
                              .order = stored.order,
                              .stored_k = stored.k,
                              .stored_v = stored.v,
                              .count = at_.recall.pages.slice(l.head_state() * sizeof(uint32_t),
                                                              l.attention().kv_heads * sizeof(uint32_t)),
                              .rope = l.rope_table(),
                              .sinks = weights_.of(l.attention().sinks),
                              .y = at_.attention,
                              .p = {.first_head = 0,
                                    .heads = l.attention().kv_heads,
                                    .group = l.attention().group(),
                                    .head_dim = l.attention().head_dim,
                                    .row_stride = dimensions_.qkv_cols,
                                    .y_stride = l.attention().attended_cols(),
                                    .chunk_capacity = options_.chunk,
                                    .head_state = l.head_state(),
                                    .page_capacity = stored.page_capacity,
                                    .stored_stride = stored.stride,
                                    .rows_stride = stored.rows_stride,
                                    .if_stored = l.chunk,
                                    .scale = model_.attention_scale,
                                    .cap = model_.attention_cap,
                                    .rope = l.rope()}});
}

// Evicts after the step's rows, if the step does so.
void Decoder::retain(const LayerStep& l, Step step) const {
  const Eviction eviction = traits_of(l.attention(), options_).eviction;
  if (step == Step::kChunk || step == Step::kRebuild ||
      (step == Step::kDecode && eviction == Eviction::kAfterEachToken))
    compact(l);
  if (step == Step::kRebuild) merge(l);
}

// Compacts the layer's pool to the entries of pool and chunk that the policy keeps. The layer's pool is next
// read in the next step. Evicting layer by layer therefore gives the same result as evicting after the whole
// pass (methods 2.6).
void Decoder::compact(const LayerStep& l) const {
  const LayerPool& pool = l.pool();
  const bool evicts = traits_of(l.attention(), options_).evicts();
  const uint32_t list_capacity = 1 + dimensions_.reach;
  retention(l).record_eviction(l);
  const RetentionPolicy::Scores scores = retention(l).ranked_by(l);
  if (evicts)
    l.recorder.record(TopK{.scores = scores.pool,
                           .chunk_scores = scores.chunk,
                           .pos = {},
                           .gate = {},
                           .list = at_.retain_list,
                           .p = {.heads = l.attention().kv_heads,
                                 .head_state = l.head_state(),
                                 .keep = kKeepOfHead,
                                 .page = 1,
                                 .by_position = 0,
                                 .in_runs = 1,
                                 .score_capacity = 0,
                                 .chunk_capacity = options_.chunk,
                                 .list_capacity = list_capacity}});
  if (evicts && at_.recall.spilled && !l.attention().window) spill(l, scores);
  l.recorder.record(KvCompact{.list = evicts ? at_.retain_list : View{},
                              .chunk_k = l.chunk_rows().k,
                              .chunk_v = l.chunk_rows().v,
                              .chunk_pos = l.chunk_rows().pos,
                              .chunk_cis = evicts ? l.chunk_rows().cis : View{},
                              .k = pool.k,
                              .v = pool.v,
                              .pos = pool.pos,
                              .cis = pool.cis,
                              .p = {.first_head = 0,
                                    .heads = l.attention().kv_heads,
                                    .head_dim = l.attention().head_dim,
                                    .chunk_capacity = options_.chunk,
                                    .head_state = l.head_state(),
                                    .list_capacity = list_capacity}});
  policies_.selection->record_upkeep(l);
}

// Copies what a compaction is going to evict, for the store.
void Decoder::spill(const LayerStep& l, const RetentionPolicy::Scores& scores) const {
  const LayerPool& pool = l.pool();
  const RecallViews& to = at_.recall;
  l.recorder.record(KvSpill{.list = at_.retain_list,
                            .pool_k = pool.k,
                            .pool_v = pool.v,
                            .chunk_k = l.chunk_rows().k,
                            .chunk_v = l.chunk_rows().v,
                            .pool_pos = pool.pos,
                            .pool_cis = scores.pool,
                            .chunk_pos = l.chunk_rows().pos,
                            .chunk_cis = scores.chunk,
                            .k = to.k[l.layer],
                            .v = to.v[l.layer],
                            .keys = to.keys,
                            .pos = to.pos,
                            .cis = to.cis,
                            .count = to.spilled,
                            .p = {.first_head = 0,
                                  .heads = l.attention().kv_heads,
                                  .head_dim = l.attention().head_dim,
                                  .chunk_capacity = options_.chunk,
                                  .head_state = l.head_state(),
                                  .list_capacity = 1 + dimensions_.reach,
                                  .spill_capacity = dimensions_.reach}});
}

// Replaces the entries of the layer that came from the store. The selection sees them as after an eviction.
void Decoder::exchange(const LayerStep& l) const {
  const LayerPool& pool = l.pool();
  const RecallViews& from = at_.recall;
  l.recorder.record(KvRecall{.list = from.list,
                             .row_k = from.k[l.layer],
                             .row_v = from.v[l.layer],
                             .row_pos = from.pos,
                             .count = from.rows,
                             .k = pool.k,
                             .v = pool.v,
                             .pos = pool.pos,
                             .cis = pool.cis,
                             .p = {.first_head = 0,
                                   .heads = l.attention().kv_heads,
                                   .head_dim = l.attention().head_dim,
                                   .head_state = l.head_state(),
                                   .list_capacity = 1 + dimensions_.reach,
                                   .row_capacity = dimensions_.reach}});
  policies_.selection->record_upkeep(l);
}

// Votes with the latest queries for the pages of the store that come back.
void Decoder::vote_for_pages(const LayerStep& l) const {
  const RecallViews& r = at_.recall;
  const RecallViews::Stored& stored = r.stored[l.layer];
  const uint32_t head_dim = l.attention().head_dim;
  l.recorder.record(PageVote{
      .queries = r.queries[l.layer],
      .asked = r.asked,
      .list = r.list,
      .pos = l.pool().pos,
      .pages = stored.pages,
      .order = stored.order,
      .stored_k = stored.k,
      .count = r.pages.slice(l.head_state() * sizeof(uint32_t), l.attention().kv_heads * sizeof(uint32_t)),
      .rope = l.rope_table(),
      .votes = r.votes,
      .p = {.first_head = 0,
            .heads = l.attention().kv_heads,
            .group = l.attention().group(),
            .head_dim = head_dim,
            .cols = l.attention().q_cols(),
            .ring = kAskingTokens,
            .head_state = l.head_state(),
            .list_capacity = 1 + dimensions_.reach,
            .page_capacity = stored.page_capacity,
            .stored_stride = stored.stride,
            .rows_stride = stored.rows_stride,
            .page_bytes = static_cast<uint32_t>(
                kStoredPage * (kv_bytes(stored.k.type, head_dim) + kv_bytes(stored.v.type, head_dim))),
            .scale = model_.attention_scale,
            .rope = l.rope()}});
}

// Keeps the queries of the latest tokens, which choose what comes back from the store.
void Decoder::keep_asking(const LayerStep& l) const {
  l.recorder.record(QueryKeep{
      .q = at_.qkv,
      .kept = at_.recall.queries[l.layer],
      .p = {.cols = l.attention().q_cols(), .row_stride = dimensions_.qkv_cols, .ring = kAskingTokens}});
}

// After a compaction, the rows that were read again come after all other entries. This op moves them to their
// places in position order.
void Decoder::merge(const LayerStep& l) const {
  const LayerPool& pool = l.pool();
  l.recorder.record(KvMerge{.k = pool.k,
                            .v = pool.v,
                            .pos = pool.pos,
                            .cis = pool.cis,
                            .p = {.first_head = 0,
                                  .heads = l.attention().kv_heads,
                                  .head_dim = l.attention().head_dim,
                                  .head_state = l.head_state()}});
}

// Copies the queries of the step's last row, for watch().
void Decoder::keep_query(const LayerStep& l) const {
  l.recorder.record(Copy{.src = at_.qkv,
                         .dst = at_.last_queries[l.layer],
                         .p = {.cols = l.attention().q_cols(),
                               .src_stride = dimensions_.qkv_cols,
                               .dst_stride = 0,  // one row: a step's logits are those of its last row
                               .from_logit_row = 1,
                               .to_ring_row = 0,
                               .rows = kLogitRows}});
}

// Computes the attention weights that the last token gave to entries. It repeats attend() with the queries
// that keep_query() copied.
void Decoder::watch(const LayerStep& l, const SelectionPolicy::List& list) const {
  l.recorder.record(QueryScore{.q = at_.last_queries[l.layer],
                               .k = l.pool().k,
                               .chunk_k = {},
                               .list = list.entries,
                               .rope = l.rope_table(),
                               .sinks = weights_.of(l.attention().sinks),
                               .sums = at_.watch_sums,
                               .cis = at_.watch_weights[l.layer],
                               .chunk_cis = {},
                               .p = {.first_head = 0,
                                     .heads = l.attention().kv_heads,
                                     .group = l.attention().group(),
                                     .head_dim = l.attention().head_dim,
                                     .row_stride = l.attention().q_cols(),
                                     .chunk_capacity = options_.chunk,
                                     .head_state = l.head_state(),
                                     .kind = kQueryHeads,
                                     .rows = 1,
                                     .sinks = 0,
                                     .window = l.attention().window,
                                     .list_capacity = list.entries ? list.capacity : 0,
                                     .scale = model_.attention_scale,
                                     .cap = model_.attention_cap,
                                     .rope = l.rope()}});
}

// Adds the weights of the layer's entries, or 1 for each entry, to the sums for the positions of a slice.
// `first`: the sums start at 0.
void Decoder::add_by_position(const LayerStep& l, const View& weights, const SelectionPolicy::List& list,
                              bool first) const {
  l.recorder.record(ScatterAdd{.pos = l.pool().pos,
                               .weights = weights,
                               .list = list.entries,
                               .sums = at_.position_sums,
                               .p = {.first_head = 0,
                                     .heads = l.attention().kv_heads,
                                     .head_state = l.head_state(),
                                     .slots = kPositionsAtOnce,
                                     .window = weights ? l.attention().window : 0,
                                     .list_capacity = list.entries ? list.capacity : 0,
                                     .add = !first}});
}

void Decoder::feed_forward(const LayerStep& l, const Dense& f) const {
  if (!f.down) return;
  const Layer& layer = l.model_layer();
  glu(l.recorder, layer.ffn_norm || layer.parallel ? at_.norm : at_.x, f);
  add_branch(l.recorder, at_.ffn, f.down, f.down_bias, layer.post_ffn_norm);
}

// Rows of a matrix in device memory.
static Weight rows_of(Weight w, uint32_t first, uint32_t count) {
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols);
  static_cast<View&>(w) = w.slice(first * row_bytes, count * row_bytes);
  w.rows = count;
  return w;
}

void Decoder::feed_forward(const LayerStep& l, const Experts& f) const {
  if (f.norm) return feed_forward_apart(l, f);
  Recorder& r = l.recorder;
  linear(r, at_.norm, shape_.d_model, f.router, f.router_bias, at_.router_logits, f.route.experts, false);
  if (f.shared_gate) linear(r, at_.norm, shape_.d_model, f.shared_gate, {}, at_.shared_gate, 1, false);
  if (f.latent_down) {
    linear(r, at_.norm, shape_.d_model, f.latent_down, {}, at_.latent_x, f.width(), false);
    // The experts add to it.
    scale(r, at_.latent_x, at_.latent_sum, {.cols = f.width(), .scale = 0});
    experts(r, at_.latent_x, at_.latent_sum, f);
    linear(r, at_.latent_sum, f.width(), f.latent_up, {}, at_.x, shape_.d_model, true);
  } else {
    experts(r, at_.norm, at_.x, f);
  }
  if (!f.shared.up) return;
  // The shared expert comes last, because its result may overwrite the input of all experts.
  glu(r, at_.norm, f.shared);
  if (f.shared_gate)
    r.record(Gate{.g = at_.shared_gate,
                  .x = at_.ffn,
                  .p = {.cols = f.shared.gate.rows,
                        .groups = 1,
                        .x_stride = f.shared.gate.rows,
                        .g_stride = 1,
                        .g_column = 0,
                        .g_group_stride = 0,
                        .g_cols = 1}});
  add_branch(r, at_.ffn, f.shared.down, {}, {}, f.scale);
}

// The shared expert, the router and the experts have norms of their own: x += norm(norm(shared expert) +
// norm(experts)). The router's logits are divided by the root of the width.
void Decoder::feed_forward_apart(const LayerStep& l, const Experts& f) const {
  Recorder& r = l.recorder;
  const uint32_t d = shape_.d_model;
  glu(r, at_.norm, f.shared);
  linear(r, at_.ffn, f.shared.down.cols, f.shared.down, {}, at_.norm, d, false);
  norm(r, at_.norm, f.shared_post_norm, at_.branch_sum);
  norm(r, at_.x, f.router_norm, at_.norm);
  linear(r, at_.norm, d, f.router, {}, at_.router_logits, f.route.experts, false);
  scale(r, at_.router_logits, at_.router_logits,
        {.cols = f.route.experts, .scale = 1 / std::sqrt(static_cast<float>(d))});
  norm(r, at_.x, f.norm, at_.norm);
  scale(r, at_.norm, at_.expert_sum, {.scale = 0});  // the experts add to it
  experts(r, at_.norm, at_.expert_sum, f);
  norm(r, at_.expert_sum, f.post_norm, at_.branch_sum, {.add = 1});
  norm(r, at_.branch_sum, l.model_layer().post_ffn_norm, at_.x, {.add = 1});
}

// Chooses experts by the router's logits, and adds what they make of x to y.
void Decoder::experts(Recorder& r, const View& x, const View& y, const Experts& f) const {
  // The experts' output is added to the stream.
  RouteParams route = f.route;
  route.scale *= f.scale * model_.residual_scale;
  r.record(Route{.logits = at_.router_logits,
                 .bias = weights_.of(f.choice_bias),
                 .first = at_.expert_first,
                 .row = at_.expert_row,
                 .weight = at_.expert_weight,
                 .p = route,
                 .each = weights_.of(f.factor)});
  Weight gate = weights_.of(f.gate), up = weights_.of(f.up);
  const bool fused = !f.up;
  if (fused) {
    up = rows_of(gate, f.d_ff(), gate.rows - f.d_ff());
    gate = rows_of(gate, 0, gate.rows - f.d_ff());
  }
  r.record(ExpertGlu{.x = x,
                     .gate = gate,
                     .up = up,
                     .gate_bias = weights_.of(f.gate_bias),
                     .up_bias = weights_.of(f.up_bias),
                     .first = at_.expert_first,
                     .row = at_.expert_row,
                     .h = at_.ffn,
                     .p = {.in_cols = f.width(),
                           .out_cols = f.d_ff(),
                           .act = model_.act,
                           .experts = f.route.experts,
                           .chosen = f.route.chosen,
                           .rows_between = fused ? f.d_ff() : 0},
                     .gate_scale = weights_.of(f.gate_scale),
                     .up_scale = weights_.of(f.up_scale)});
  r.record(ExpertLinear{
      .h = at_.ffn,
      .w = weights_.of(f.down),
      .bias = weights_.of(f.down_bias),
      .first = at_.expert_first,
      .row = at_.expert_row,
      .weight = at_.expert_weight,
      .y = y,
      .p = {.in_cols = f.d_ff(), .out_cols = f.width(), .experts = f.route.experts, .chosen = f.route.chosen},
      .scale = weights_.of(f.down_scale)});
}

// Adds what a layer makes of the token itself, in proportion to a gate that reads the stream:
//   part = norm(project x_0 / sqrt(d)) + sqrt(width) * the token's row, both divided by sqrt(2)
//   x += norm(out (act(gate x) * part))
// The two divisions come before norms, so that they only change the epsilon of these.
void Decoder::token_branch(Recorder& r, uint32_t layer, const TokenBranch& b) const {
  const uint32_t d = shape_.d_model, width = b.width();
  const Weight table = weights_.of(model_.layer_embedding);
  r.record(
      Embed{.tokens = at_.layer_embedding_rows ? View{} : at_.tokens,
            .table = at_.layer_embedding_rows ? passed_rows(model_.layer_embedding, at_.layer_embedding_rows)
                                              : table,
            .x = at_.token_part,
            .p = {.cols = width, .column = layer * width, .scale = std::sqrt(static_cast<float>(width))}});
  linear(r, at_.first_x, d, b.project, {}, at_.token_gate, width, false);
  norm(r, at_.token_gate, b.project_norm, at_.token_part,
       {.cols = width, .eps = model_.norm_epsilon * static_cast<float>(d), .add = 1});
  linear(r, at_.x, d, b.gate, {}, at_.token_gate, width, false);
  r.record(Activation{.x = at_.token_gate, .p = {.cols = width, .act = model_.act}, .times = at_.token_part});
  linear(r, at_.token_gate, width, b.out, {}, at_.norm, d, false);
  norm(r, at_.norm, b.out_norm, at_.x, {.cols = d, .eps = 2 * model_.norm_epsilon, .add = 1});
}

// What the last matrix of a feed-forward multiplies. The op glu computes it at once, unless there are biases
// or no gate.
void Decoder::glu(Recorder& r, const View& x, const Dense& f) const {
  const uint32_t cols = f.up.rows;
  if (f.gate && !f.gate_bias && !f.up_bias)
    return r.record(Glu{.x = x,
                        .gate = weights_.of(f.gate),
                        .up = weights_.of(f.up),
                        .h = at_.ffn,
                        .p = {.in_cols = f.gate.cols, .out_cols = cols, .act = model_.act}});
  View times;
  if (f.gate) {
    const uint64_t bytes = uint64_t(options_.chunk) * cols * sizeof(float);
    times = at_.ffn.slice(bytes, bytes);
    linear(r, x, shape_.d_model, f.up, f.up_bias, times, cols, false);
  }
  linear(r, x, shape_.d_model, f.gate ? f.gate : f.up, f.gate ? f.gate_bias : f.up_bias, at_.ffn, cols,
         false);
  r.record(Activation{.x = at_.ffn, .p = {.cols = cols, .act = model_.act}, .times = times});
}

// Rows for a draft block are normed already.
void Decoder::tail_block(Recorder& r) const {
  r.record(Copy{.src = at_.x,
                .dst = at_.logit_x,
                .p = {.cols = shape_.d_model,
                      .src_stride = shape_.d_model,
                      .dst_stride = shape_.d_model,
                      .from_logit_row = 1,
                      .to_ring_row = 0,
                      .rows = kLogitRows}});
  if (options_.draft != Draft::kMtp)
    norm(r, at_.logit_x, model_.output_norm, at_.logit_x, {.rows = kLogitRows});
  linear(r, at_.logit_x, shape_.d_model, model_.output, {}, at_.logits, model_.output.rows, false,
         kLogitRows);
  if (model_.logit_scale != 1 || model_.logit_cap != 0)
    scale(r, at_.logits, at_.logits,
          {.cols = model_.output.rows,
           .scale = model_.logit_scale,
           .cap = model_.logit_cap,
           .rows = kLogitRows});
  r.record(ArgMax{.x = at_.logits, .index = at_.arg_max, .p = {.cols = model_.output.rows}});
}

// ---- the programs ----

uint64_t Programs::bytes() const {
  uint64_t bytes = 0;
  for (const ChunkProgram& chunk : chunks) bytes += chunk.program->bytes;
  for (const auto* program :
       {&decode, &draft, &rebuild, &embed, &upkeep, &evict, &recall, &log_prob, &kept, &watch, &attended})
    if (*program) bytes += (*program)->bytes;
  return bytes;
}

namespace {

// Passes ops on, and remembers the first op that the device does not support.
class SupportedOps : public Recorder {
 public:
  SupportedOps(const Device& device, std::unique_ptr<Recorder> recorder)
      : device_(device), recorder_(std::move(recorder)) {}
  void segment() override { recorder_->segment(); }
  void record(const Op& op) override {
    if (status_.ok() && !device_.supports(op))
      status_ = error(Code::kUnsupported,
                      "%s cannot compute %s, which this session's policies or model need; use another device",
                      device_.info().name.c_str(), op_name(op));
    if (status_.ok()) recorder_->record(op);
  }
  Status finish(Stream& stream, std::unique_ptr<Program>& into) {
    THIMBLE_TRY(status_);
    THIMBLE_LET(program, stream.finish(std::move(recorder_)));
    into = std::move(program);
    return {};
  }

 private:
  const Device& device_;
  std::unique_ptr<Recorder> recorder_;
  Status status_;
};

}  // namespace

Result<Programs> Decoder::record(const Device& device, Stream& stream) const {
  Programs programs;
  const MakeProgram make = [&](uint32_t rows, std::unique_ptr<Program>& into,
                               const RecordOps& ops) -> Status {
    SupportedOps recorder(device, stream.record(rows));
    ops(recorder);
    return recorder.finish(stream, into);
  };
  // Buffers have room for the rows of a chunk.
  const uint32_t drafted = std::min({device.info().pool_rows, kLogitRowsAtOnce, options_.chunk});
  THIMBLE_TRY(make_steps(make, drafted, programs));
  THIMBLE_TRY(make_upkeep(make, programs));
  THIMBLE_TRY(make_reports(make, programs));
  return programs;
}

Status Decoder::make_steps(const MakeProgram& make, uint32_t drafted, Programs& programs) const {
  for (const uint32_t rows : {32u, 256u, options_.chunk}) {
    if (rows > options_.chunk || (!programs.chunks.empty() && programs.chunks.back().max_rows == rows))
      continue;
    ChunkProgram& chunk = programs.chunks.emplace_back();
    chunk.max_rows = rows;
    THIMBLE_TRY(make(rows, chunk.program, [&](Recorder& r) { record_step(r, Step::kChunk, rows); }));
  }
  THIMBLE_TRY(make(1, programs.decode, [&](Recorder& r) { record_step(r, Step::kDecode); }));
  if (options_.draft != Draft::kNone && drafted > 1)
    THIMBLE_TRY(make(drafted, programs.draft, [&](Recorder& r) { record_step(r, Step::kDraft); }));
  if (options_.rebuild)
    THIMBLE_TRY(
        make(1 + options_.rebuild, programs.rebuild, [&](Recorder& r) { record_step(r, Step::kRebuild); }));
  if (policies_.host())
    THIMBLE_TRY(make(options_.chunk, programs.embed, [&](Recorder& r) {
      r.segment();
      embed(r);
    }));
  return {};
}

Status Decoder::make_upkeep(const MakeProgram& make, Programs& programs) const {
  // Records a segment for each layer whose retention `needs` one.
  const auto layers = [&](Recorder& r, const auto& needs, const auto& ops) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const AttentionMixer* attention = model_.layers[layer].attention();
      if (!attention || !attention->has_keys() || !needs(traits_of(*attention, options_))) continue;
      r.segment();
      ops(layer_step(r, layer, Step::kDecode));
    }
  };
  if (const uint32_t rows = unscored_rows(options_))
    THIMBLE_TRY(make(rows, programs.upkeep, [&](Recorder& r) {
      if (again_rows(options_)) return record_step(r, Step::kAgain);
      layers(
          r, [](const RetentionTraits& t) { return t.scoring == Scoring::kInBatches; },
          [&](const LayerStep& l) { retention(l).record_upkeep(l); });
    }));
  if (dimensions_.evicts)
    THIMBLE_TRY(make(1, programs.evict, [&](Recorder& r) {
      layers(
          r, [](const RetentionTraits& t) { return t.evicts(); }, [&](const LayerStep& l) { compact(l); });
    }));
  if (options_.most_recalled())
    THIMBLE_TRY(make(1, programs.recall, [&](Recorder& r) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        if (!model_.layers[layer].retains()) continue;
        const LayerStep l = layer_step(r, layer, Step::kDecode);
        r.segment();
        if (at_.recall.votes) {
          vote_for_pages(l);
          r.segment();
        }
        exchange(l);
      }
    }));
  THIMBLE_TRY(make(kLogitRowsAtOnce, programs.log_prob, [&](Recorder& r) {
    r.segment();
    r.record(LogProb{
        .x = at_.logits, .target = at_.targets, .y = at_.log_prob, .p = {.cols = model_.output.rows}});
  }));
  return {};
}

Status Decoder::make_reports(const MakeProgram& make, Programs& programs) const {
  if (full_heads(model_))
    THIMBLE_TRY(make(1, programs.kept, [&](Recorder& r) {
      r.segment();
      bool first = true;
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        if (!model_.layers[layer].retains()) continue;
        add_by_position(layer_step(r, layer, Step::kDecode), {}, {}, first);
        first = false;
      }
    }));
  if (!options_.watch) return {};
  // Records a segment for all entries and, with a selection, one for lists: ops(layer, list).
  const auto attending = [&](Recorder& r, const auto& ops) {
    for (const bool listed : {false, true}) {
      if (listed && !policies_.selection->selects(options_)) return;
      r.segment();
      for (uint32_t layer = 0; layer < shape_.layers; ++layer)
        if (model_.layers[layer].attention())
          ops(layer_step(r, layer, Step::kDecode),
              listed ? policies_.selection->last_list(layer) : SelectionPolicy::List{});
    }
  };
  THIMBLE_TRY(make(1, programs.watch, [&](Recorder& r) {
    attending(r, [&](const LayerStep& l, const SelectionPolicy::List& list) { watch(l, list); });
  }));
  THIMBLE_TRY(make(1, programs.attended, [&](Recorder& r) {
    attending(r, [&](const LayerStep& l, const SelectionPolicy::List& list) {
      add_by_position(l, at_.watch_weights[l.layer], list, l.attention().has_keys() && l.head_state() == 0);
    });
  }));
  return {};
}

// ---- shorthands ----

LayerStep Decoder::layer_step(Recorder& r, uint32_t layer, Step step) const {
  return {r, setting_, weights_, at_, layer, step != Step::kDecode && step != Step::kDraft};
}

// A table of which the engine passes the rows of the step's tokens, because it stays on the host.
Weight Decoder::passed_rows(const Tensor& table, const View& rows) const {
  Weight w;
  static_cast<View&>(w) = rows;
  w.type = table.type;
  w.rows = options_.chunk;
  w.cols = table.cols;
  return w;
}

void Decoder::copy_stream(Recorder& r, const View& to) const {
  r.record(Copy{.src = at_.x,
                .dst = to,
                .p = {.cols = shape_.d_model,
                      .src_stride = shape_.d_model,
                      .dst_stride = shape_.d_model,
                      .from_logit_row = 0,
                      .to_ring_row = 0,
                      .rows = kStepRows}});
}

void Decoder::norm(Recorder& r, View x, const Tensor& weight, View y, RmsNormParams p) const {
  if (!p.cols) p.cols = shape_.d_model;
  if (p.eps == 0) p.eps = model_.norm_epsilon;
  p.groups = 1;
  if (!p.row_stride) p.row_stride = p.cols;
  p.center = model_.norms_center;
  r.record(RmsNorm{.x = x, .weight = weights_.of(weight), .y = y, .p = p});
}

void Decoder::scale(Recorder& r, View x, View y, ScaleParams p) const {
  if (!p.cols) p.cols = shape_.d_model;
  p.row_stride = p.cols;
  r.record(Scale{.x = x, .y = y, .p = p});
}

// Adds factor * (W x + bias) to the stream. If the model has a norm or a scale here, it is applied first.
void Decoder::add_branch(Recorder& r, View x, const Tensor& w, const Tensor& bias, const Tensor& norm_weight,
                         float factor) const {
  factor *= model_.residual_scale;
  const bool plain = !norm_weight && factor == 1;
  linear(r, x, w.cols, w, bias, plain ? at_.x : at_.norm, shape_.d_model, plain);
  if (norm_weight)
    norm(r, at_.norm, norm_weight, at_.x, {.add = 1});
  else if (!plain)
    scale(r, at_.norm, at_.x, {.scale = factor, .add = 1});
}

// Applies the norm of q or k in place, to each head (qwen3) or to all heads at once (olmo2).
void Decoder::qk_norm(const LayerStep& l, const Tensor& weight, uint32_t first_column, uint32_t heads) const {
  head_norm(l, l.attention().norms_after_rotation ? Tensor{} : weight, weight.cols, first_column,
            first_column, heads * l.attention().head_dim);
}

// Norms each value, without a weight. It reads the columns of the keys if the layer has no matrix for values.
void Decoder::v_norm(const LayerStep& l) const {
  const AttentionMixer& m = l.attention();
  const uint32_t k = m.q_cols(), v = k + m.kv_cols();
  head_norm(l, {}, m.head_dim, m.v ? v : k, v, m.kv_cols());
}

// Norms `cols` columns of the qkv rows from column `from` on, in vectors of `width`.
void Decoder::head_norm(const LayerStep& l, const Tensor& weight, uint32_t width, uint32_t from, uint32_t to,
                        uint32_t cols) const {
  l.recorder.record(RmsNorm{.x = qkv_columns(from),
                            .weight = weights_.of(weight),
                            .y = qkv_columns(to),
                            .p = {.cols = width,
                                  .groups = cols / width,
                                  .row_stride = dimensions_.qkv_cols,
                                  .eps = model_.norm_epsilon,
                                  .rows = kStepRows,
                                  .add = 0}});
}

// Norms the queries, which alternate with the gates of their heads, into the rows with keys and values.
void Decoder::separate_queries(const LayerStep& l) const {
  const AttentionMixer& m = l.attention();
  l.recorder.record(RmsNorm{.x = at_.middle,
                            .weight = weights_.of(m.q_norm),
                            .y = qkv_columns(0),
                            .p = {.cols = m.head_dim,
                                  .groups = m.heads,
                                  .row_stride = dimensions_.qkv_cols,
                                  .eps = model_.norm_epsilon,
                                  .rows = kStepRows,
                                  .add = 0,
                                  .x_row_stride = m.middle_cols(),
                                  .x_group_stride = 2 * m.head_dim}});
}

// Multiplies the output of attention by the sigmoids of the gates that came with the queries.
void Decoder::gate(const LayerStep& l) const {
  const AttentionMixer& m = l.attention();
  l.recorder.record(Gate{.g = at_.middle,
                         .x = at_.attention,
                         .p = {.cols = m.head_dim,
                               .groups = m.heads,
                               .x_stride = m.q_cols(),
                               .g_stride = m.middle_cols(),
                               .g_column = m.head_dim,
                               .g_group_stride = 2 * m.head_dim,
                               .g_cols = m.head_dim}});
}

void Decoder::linear(Recorder& r, View x, uint32_t x_stride, const Tensor& w, const Tensor& bias, View y,
                     uint32_t y_stride, bool add, uint32_t rows, bool exact) const {
  r.record(Linear{.x = x,
                  .w = weights_.of(w),
                  .bias = weights_.of(bias),
                  .y = y,
                  .p = {.in_cols = w.cols,
                        .out_cols = w.rows,
                        .x_stride = x_stride,
                        .y_stride = y_stride,
                        .add = add,
                        .rows = rows},
                  .exact = exact});
}

// The heads of x are next to each other. `p` gives the columns of a head and the strides of y.
void Decoder::head_linear(const LayerStep& l, View x, const HeadMatrices& w, View y,
                          HeadLinearParams p) const {
  p.heads = l.attention().heads;
  p.x_stride = p.heads * p.x_head_stride;
  p.w_first = w.first, p.w_head_rows = w.head_rows, p.transposed = w.transposed;
  l.recorder.record(HeadLinear{.x = x, .w = weights_.of(w.all), .y = y, .p = p});
}

// The columns of the qkv rows from column `first` on. q begins at column 0.
View Decoder::qkv_columns(uint32_t first) const {
  const uint64_t offset = first * sizeof(float);
  return at_.qkv.slice(offset, at_.qkv.bytes - offset);
}

}  // namespace thimble
