#include "runtime/decoder.h"

#include <cmath>

#include "runtime/policy/retention.h"

namespace thimble {

Decoder::Decoder(const Model& model, const MemoryPlan& plan, const Weights& weights, const Layout& layout)
    : model_(model),
      shape_(model.shape),
      options_(plan.options),
      dimensions_(plan.dimensions),
      weights_(weights),
      at_(layout) {}

// ---- the step ----

// A chunk is cut into segments, so that an interrupt is quick; a token's step is over before that matters.
void Decoder::record_step(Recorder& r, Step step) const {
  const auto cut = [&] {
    if (step == Step::kChunk) r.segment();
  };
  r.segment();
  r.embed({.tokens = at_.tokens, .table = embedding(), .x = at_.x, .p = {.cols = shape_.d_model}});
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    cut();
    attention_block(r, layer, step);
    feed_forward(r, layer);
  }
  cut();
  tail_block(r);
}

void Decoder::attention_block(Recorder& r, uint32_t layer, Step step) const {
  const LayerWeights& w = model_.layers[layer];
  norm(r, at_.x, w.attn_norm, at_.norm, kStepRows);
  project_qkv(r, w);
  append(r, layer, step);
  select(r, layer, step);
  attend(r, layer, step);
  if (step == Step::kChunk) retain(r, layer, true);
  linear(r, at_.attention, shape_.heads * shape_.head_dim, w.attn_output, w.attn_output_bias, at_.x,
         shape_.d_model, true);
}

void Decoder::project_qkv(Recorder& r, const LayerWeights& w) const {
  const uint32_t k = shape_.heads * shape_.head_dim, v = k + shape_.kv_heads * shape_.head_dim;
  linear(r, at_.norm, shape_.d_model, w.q, w.q_bias, qkv_columns(0), dimensions_.qkv_cols, false);
  linear(r, at_.norm, shape_.d_model, w.k, w.k_bias, qkv_columns(k), dimensions_.qkv_cols, false);
  linear(r, at_.norm, shape_.d_model, w.v, w.v_bias, qkv_columns(v), dimensions_.qkv_cols, false);
  if (w.q_norm) head_norm(r, w.q_norm, 0, shape_.heads);
  if (w.k_norm) head_norm(r, w.k_norm, k, shape_.kv_heads);
}

// Keys, values, positions and retention scores of the step's rows.
void Decoder::append(Recorder& r, uint32_t layer, Step step) const {
  const LayerPool& pool = at_.layers[layer];
  const bool chunk = step == Step::kChunk;
  const uint32_t into = chunk ? kIntoChunk : kIntoPool;
  const uint32_t capacity = chunk ? options_.chunk : dimensions_.capacity;
  r.kv_append({.qkv = at_.qkv,
               .rope = at_.rope,
               .k = chunk ? at_.chunk_k : pool.k,
               .v = chunk ? at_.chunk_v : pool.v,
               .pos = chunk ? at_.chunk_pos : pool.pos,
               .p = {.first_head = 0,
                     .heads = shape_.kv_heads,
                     .head_dim = shape_.head_dim,
                     .row_stride = dimensions_.qkv_cols,
                     .k_column = shape_.heads * shape_.head_dim,
                     .v_column = (shape_.heads + shape_.kv_heads) * shape_.head_dim,
                     .capacity = capacity,
                     .into = into,
                     .rope = rope()}});
  if (options_.retention == Retention::kNone) return;
  if (options_.retention == Retention::kLocret && !chunk) {
    // A head reads far more weights than a token is worth: the token waits in the ring for its batch.
    r.copy({.src = at_.qkv,
            .dst = pool.ring,
            .p = {.cols = dimensions_.qkv_cols,
                  .src_stride = dimensions_.qkv_cols,
                  .dst_stride = dimensions_.qkv_cols,
                  .from_logit_row = 0,
                  .to_ring_row = 1,
                  .rows = kStepRows}});
    return;
  }
  retaining_head(r, layer, at_.qkv, into, chunk ? at_.chunk_cis : pool.cis, capacity);
}

// Scores rows of q, k, v (methods 2.1), or gives them the score of a policy that needs no head.
void Decoder::retaining_head(Recorder& r, uint32_t layer, View qkv, uint32_t into, View cis,
                             uint32_t capacity) const {
  if (options_.retention == Retention::kLocret) {
    const RetainingHeads::Layer& head = options_.heads->layers[layer];
    const uint32_t d_r = options_.heads->d_r;
    linear(r, qkv, dimensions_.qkv_cols, head.fc1, {}, at_.retain_hidden, d_r, false);
    r.activation({.x = at_.retain_hidden, .p = {.cols = d_r, .act = options_.heads->act}});
    linear(r, at_.retain_hidden, d_r, head.fc2, {}, at_.retain_score, shape_.kv_heads, false);
  }
  r.cis_store({.score = at_.retain_score,
               .cis = cis,
               .p = {.first_head = 0,
                     .heads = shape_.kv_heads,
                     .kind = retention_score(options_.retention),
                     .share_heads = options_.retain_scope == RetainScope::kLayer,
                     .layer = layer,
                     .capacity = capacity,
                     .into = into}});
}

// The list of entries to attend to; without selection there is none and attention takes all.
void Decoder::select(Recorder& r, uint32_t layer, Step step) const {
  if (options_.selection == Selection::kDense) return;
  if (step == Step::kChunk && !options_.select_prefill) return;
  const LayerPool& pool = at_.layers[layer];
  const uint32_t group = shape_.heads / shape_.kv_heads;
  // The selection cache serves decode only: a chunk's mean query is no query to compare with
  // (methods 3.6).
  const View gate = step == Step::kDecode ? pool.gate : View{};
  if (gate)
    r.query_gate(
        {.q = at_.qkv, .cached = pool.query, .gate = gate, .p = {.cols = shape_.heads * shape_.head_dim}});
  r.token_score({.q = at_.qkv,
                 .k = pool.k,
                 .rope = at_.rope,
                 .gate = gate,
                 .scores = at_.scores,
                 .lse = at_.lse,
                 .p = {.first_head = 0,
                       .heads = shape_.kv_heads,
                       .group = group,
                       .head_dim = shape_.head_dim,
                       .row_stride = dimensions_.qkv_cols,
                       .capacity = dimensions_.capacity,
                       .score_capacity = dimensions_.capacity,
                       .scale = options_.vote_scaled ? 1.0f / std::sqrt(float(shape_.head_dim)) : 1.0f,
                       .rope = rope()}});
  r.vote({.scores = at_.scores,
          .lse = at_.lse,
          .pos = pool.pos,
          .gate = gate,
          .votes = at_.votes,
          .p = {.heads = shape_.kv_heads,
                .group = group,
                .capacity = dimensions_.capacity,
                .score_capacity = dimensions_.capacity,
                .vote_capacity = dimensions_.vote_capacity,
                .window = options_.vote_window}});
  r.top_k({.scores = at_.votes,
           .chunk_scores = {},
           .pos = pool.pos,
           .gate = gate,
           .list = pool.list,
           .p = {.heads = shape_.kv_heads,
                 .purpose = kTopKSelect,
                 .score_capacity = dimensions_.vote_capacity,
                 .chunk_capacity = 0,
                 .pos_capacity = dimensions_.capacity,
                 .list_capacity = dimensions_.select_list}});
}

void Decoder::attend(Recorder& r, uint32_t layer, Step step) const {
  const LayerPool& pool = at_.layers[layer];
  const bool chunk = step == Step::kChunk;
  const bool by_list = options_.selection != Selection::kDense && (!chunk || options_.select_prefill);
  const View list = by_list ? pool.list : View{};
  AttentionParams p = {.first_head = 0,
                       .heads = shape_.kv_heads,
                       .group = shape_.heads / shape_.kv_heads,
                       .head_dim = shape_.head_dim,
                       .row_stride = dimensions_.qkv_cols,
                       .y_stride = shape_.heads * shape_.head_dim,
                       .source = chunk ? kFromView : kFromPool,
                       .first_entry = 0,
                       .capacity = chunk ? dimensions_.view_capacity : dimensions_.capacity,
                       .list_capacity = dimensions_.select_list,
                       .scale = 1.0f / std::sqrt(float(shape_.head_dim)),
                       .rope = rope()};
  if (!chunk) {
    r.attention({.q = at_.qkv,
                 .k = pool.k,
                 .v = pool.v,
                 .list = list,
                 .rope = at_.rope,
                 .y = at_.attention,
                 .ml = at_.ml,
                 .p = p});
    return;
  }
  for (uint32_t pass = 0; pass < dimensions_.view_passes; ++pass) {
    p.first_entry = pass * dimensions_.view_capacity;
    r.kv_view({.pool_k = pool.k,
               .pool_v = pool.v,
               .chunk_k = at_.chunk_k,
               .chunk_v = at_.chunk_v,
               .list = list,
               .rope = at_.rope,
               .k = at_.view_k,
               .v = at_.view_v,
               .p = {.first_head = 0,
                     .heads = shape_.kv_heads,
                     .head_dim = shape_.head_dim,
                     .pool_capacity = dimensions_.capacity,
                     .chunk_capacity = options_.chunk,
                     .first_entry = p.first_entry,
                     .view_capacity = dimensions_.view_capacity,
                     .list_capacity = dimensions_.select_list,
                     .rope = rope()}});
    r.attention({.q = at_.qkv,
                 .k = at_.view_k,
                 .v = at_.view_v,
                 .list = list,
                 .rope = at_.rope,
                 .y = at_.attention,
                 .ml = at_.ml,
                 .p = p});
  }
}

// Compacts the layer's pool to what the policy keeps of pool and chunk. It is next read in the next step, so
// evicting here, layer by layer, gives what evicting after the whole pass would (methods 2.6).
void Decoder::retain(Recorder& r, uint32_t layer, bool with_chunk) const {
  const LayerPool& pool = at_.layers[layer];
  const bool evicts = options_.retention != Retention::kNone;
  const uint32_t list_capacity = 1 + dimensions_.reach;
  if (evicts)
    r.top_k({.scores = pool.cis,
             .chunk_scores = with_chunk ? at_.chunk_cis : View{},
             .pos = {},
             .gate = {},
             .list = at_.retain_list,
             .p = {.heads = shape_.kv_heads,
                   .purpose = kTopKRetain,
                   .score_capacity = dimensions_.capacity,
                   .chunk_capacity = options_.chunk,
                   .pos_capacity = 0,
                   .list_capacity = list_capacity}});
  r.kv_compact({.list = evicts ? at_.retain_list : View{},
                .chunk_k = with_chunk ? at_.chunk_k : View{},
                .chunk_v = with_chunk ? at_.chunk_v : View{},
                .chunk_pos = with_chunk ? at_.chunk_pos : View{},
                .chunk_cis = with_chunk && evicts ? at_.chunk_cis : View{},
                .k = pool.k,
                .v = pool.v,
                .pos = pool.pos,
                .cis = pool.cis,
                .p = {.first_head = 0,
                      .heads = shape_.kv_heads,
                      .head_dim = shape_.head_dim,
                      .pool_capacity = dimensions_.capacity,
                      .chunk_capacity = options_.chunk,
                      .list_capacity = list_capacity}});
}

void Decoder::feed_forward(Recorder& r, uint32_t layer) const {
  const LayerWeights& w = model_.layers[layer];
  norm(r, at_.x, w.ffn_norm, at_.norm, kStepRows);
  r.glu({.x = at_.norm,
         .gate = weights_.of(w.gate),
         .up = weights_.of(w.up),
         .h = at_.ffn,
         .p = {.in_cols = shape_.d_model, .out_cols = shape_.d_ff, .act = model_.act}});
  linear(r, at_.ffn, shape_.d_ff, w.down, {}, at_.x, shape_.d_model, true);
}

void Decoder::tail_block(Recorder& r) const {
  r.copy({.src = at_.x,
          .dst = at_.logit_x,
          .p = {.cols = shape_.d_model,
                .src_stride = shape_.d_model,
                .dst_stride = shape_.d_model,
                .from_logit_row = 1,
                .to_ring_row = 0,
                .rows = kLogitRows}});
  norm(r, at_.logit_x, model_.output_norm, at_.logit_x, kLogitRows);
  linear(r, at_.logit_x, shape_.d_model, model_.output, {}, at_.logits, shape_.vocab, false, kLogitRows);
  r.arg_max({.x = at_.logits, .index = at_.arg_max, .p = {.cols = shape_.vocab}});
}

// ---- the programs ----

Result<Programs> Decoder::record(Stream& stream) const {
  Programs programs;
  const auto finish = [&](std::unique_ptr<Recorder> r, std::unique_ptr<Program>& into) -> Status {
    THIMBLE_LET(program, stream.finish(std::move(r)));
    into = std::move(program);
    return {};
  };

  for (const uint32_t rows : {32u, 256u, options_.chunk}) {
    if (rows > options_.chunk || (!programs.chunks.empty() && programs.chunks.back().max_rows == rows))
      continue;
    ChunkProgram& chunk = programs.chunks.emplace_back();
    chunk.max_rows = rows;
    auto r = stream.record(rows);
    record_step(*r, Step::kChunk);
    THIMBLE_TRY(finish(std::move(r), chunk.program));
  }

  auto decode = stream.record(1);
  record_step(*decode, Step::kDecode);
  THIMBLE_TRY(finish(std::move(decode), programs.decode));

  if (options_.retention == Retention::kLocret) {
    auto r = stream.record(kRingRows);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      r->segment();
      retaining_head(*r, layer, at_.layers[layer].ring, kIntoRing, at_.layers[layer].cis,
                     dimensions_.capacity);
    }
    THIMBLE_TRY(finish(std::move(r), programs.score_ring));
  }
  if (options_.retention != Retention::kNone) {
    auto r = stream.record(1);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      r->segment();
      retain(*r, layer, false);
    }
    THIMBLE_TRY(finish(std::move(r), programs.evict));
  }

  auto log_prob = stream.record(kLogitRowsAtOnce);
  log_prob->segment();
  log_prob->log_prob(
      {.x = at_.logits, .target = at_.targets, .y = at_.log_prob, .p = {.cols = shape_.vocab}});
  THIMBLE_TRY(finish(std::move(log_prob), programs.log_prob));
  return programs;
}

// ---- shorthands ----

// The embedding, or where it stays on the host the rows of it that the session hands over.
Weight Decoder::embedding() const {
  Weight table = weights_.of(model_.token_embedding);
  if (table) return table;
  static_cast<View&>(table) = at_.embedding_rows;
  table.type = model_.token_embedding.type;
  table.rows = options_.chunk;
  table.cols = shape_.d_model;
  return table;
}

void Decoder::norm(Recorder& r, View x, const Tensor& weight, View y, uint32_t rows) const {
  r.rms_norm({.x = x,
              .weight = weights_.of(weight),
              .y = y,
              .p = {.cols = shape_.d_model,
                    .groups = 1,
                    .row_stride = shape_.d_model,
                    .eps = model_.norm_epsilon,
                    .rows = rows}});
}

// The norm of each head's q or k, in place (qwen3).
void Decoder::head_norm(Recorder& r, const Tensor& weight, uint32_t first_column, uint32_t heads) const {
  r.rms_norm({.x = qkv_columns(first_column),
              .weight = weights_.of(weight),
              .y = qkv_columns(first_column),
              .p = {.cols = shape_.head_dim,
                    .groups = heads,
                    .row_stride = dimensions_.qkv_cols,
                    .eps = model_.norm_epsilon,
                    .rows = kStepRows}});
}

void Decoder::linear(Recorder& r, View x, uint32_t x_stride, const Tensor& w, const Tensor& bias, View y,
                     uint32_t y_stride, bool add, uint32_t rows) const {
  r.linear({.x = x,
            .w = weights_.of(w),
            .bias = weights_.of(bias),
            .y = y,
            .p = {.in_cols = w.cols,
                  .out_cols = w.rows,
                  .x_stride = x_stride,
                  .y_stride = y_stride,
                  .add = add,
                  .rows = rows}});
}

// The qkv rows from this column on; q is column 0.
View Decoder::qkv_columns(uint32_t first) const {
  const uint64_t offset = first * sizeof(float);
  return at_.qkv.slice(offset, at_.qkv.bytes - offset);
}

RopeParams Decoder::rope() const {
  return {.mode = options_.positions == Positions::kOriginal ? kRopeOriginal : kRopeList,
          .pairing = model_.rope.pairing,
          .n_rot = model_.rope.n_rot};
}

}  // namespace thimble
