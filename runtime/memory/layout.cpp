#include "runtime/memory/layout.h"

namespace thimble {

Layout lay_out(const Model& model, const SessionOptions& o, const Dimensions& d, const DeviceInfo& device,
               uint64_t scratch, Arena& pool, Arena& workspace, Arena& io) {
  const ModelShape& s = model.shape;
  const uint64_t f16 = 2, f32 = 4, i32 = 4;
  const uint64_t chunk_entries = uint64_t(s.kv_heads) * o.chunk;
  const bool retains = o.retention != Retention::kNone;
  const bool locret = o.retention == Retention::kLocret;
  const bool selects = o.selection != Selection::kDense;

  Layout l;
  l.layers = place_pool(model, o, d, pool);

  const uint64_t rows = o.chunk;
  l.rope = workspace.place(uint64_t(rope_table_rows(d.rope_positions)) * model.rope.n_rot * f32);
  l.scratch = workspace.place(scratch);
  l.x = workspace.place(rows * s.d_model * f32);
  l.norm = workspace.place(rows * s.d_model * f32);
  l.logit_x = workspace.place(uint64_t(kLogitRowsAtOnce) * s.d_model * f32);
  l.view_k = workspace.place(uint64_t(s.kv_heads) * d.view_capacity * s.head_dim * device.view_element_bytes);
  l.view_v = workspace.place(uint64_t(s.kv_heads) * d.view_capacity * s.head_dim * device.view_element_bytes);
  l.chunk_k = workspace.place(chunk_entries * s.head_dim * f16);
  l.chunk_v = workspace.place(chunk_entries * s.head_dim * f16);
  l.chunk_pos = workspace.place(chunk_entries * i32);
  if (retains) {
    l.chunk_cis = workspace.place(chunk_entries * f32);
    l.retain_list = workspace.place(s.kv_heads * (1 + uint64_t(d.reach)) * i32);
  }
  if (selects) {
    l.scores = workspace.place(uint64_t(s.heads) * d.capacity * f32);
    l.lse = workspace.place(s.heads * f32);
    l.votes = workspace.place(uint64_t(d.votes) * f32);
  }
  l.logits = (device.unified ? io : workspace).place(uint64_t(kLogitRowsAtOnce) * s.vocab * f32);
  // Attention's buffers and the feed-forward's are never alive together.
  const uint64_t before_attention = workspace.mark();
  l.qkv = workspace.place(rows * d.qkv_cols * f32);
  l.attention = workspace.place(rows * s.heads * s.head_dim * f32);
  l.ml = workspace.place(rows * s.heads * 2 * f32);
  if (locret) {
    l.retain_hidden = workspace.place(std::max<uint64_t>(rows, kRingRows) * o.heads->d_r * f32);
    l.retain_score = workspace.place(std::max<uint64_t>(rows, kRingRows) * s.kv_heads * f32);
  }
  workspace.release(before_attention);
  l.ffn = workspace.place(rows * s.d_ff * f32);

  l.tokens = io.place(rows * i32);
  l.targets = io.place(kLogitRowsAtOnce * i32);
  l.arg_max = io.place(kLogitRowsAtOnce * i32);
  l.log_prob = io.place(kLogitRowsAtOnce * f32);
  if (!device.unified) {
    l.host_logits = io.place(s.vocab * f32);
    if (model.output.data != model.token_embedding.data)
      l.embedding_rows = io.place(rows * dtype_bytes(model.token_embedding.type, s.d_model));
  }
  return l;
}

}  // namespace thimble
