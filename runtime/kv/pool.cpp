#include "runtime/kv/pool.h"

#include "runtime/memory/layout.h"

namespace thimble {

Dimensions dimensions(const Model& model, const SessionOptions& o) {
  const ModelShape& s = model.shape;
  Dimensions d;
  d.capacity = o.pool + o.local + o.max_new;
  // A chunk either fits behind the pool or is read behind a pool of its own size.
  d.reach = o.retention == Retention::kNone ? d.capacity : std::max(d.capacity, o.pool + o.chunk);
  d.view_capacity = std::min(d.reach, kMaxViewEntries);
  d.view_passes = static_cast<uint32_t>(ceil_div(d.reach, d.view_capacity));
  d.qkv_cols = (s.heads + 2 * s.kv_heads) * s.head_dim;
  d.rope_positions = d.reach;
  if (o.positions == Positions::kOriginal) d.rope_positions = std::max(d.rope_positions, o.context);
  if (o.selection != Selection::kDense) {
    d.select_list = 1 + o.select_init + o.select_k + o.select_local;
    // While nothing was evicted a position is an entry, so only a layer vote over an evicted pool needs more.
    const bool by_position = o.vote == VoteScope::kLayer && o.retention != Retention::kNone;
    d.vote_capacity = by_position ? o.context : d.capacity;
    d.votes = std::max(d.vote_capacity, s.kv_heads * d.capacity);
    d.rope_positions = std::max(d.rope_positions, o.select_local + o.chunk);
  }
  return d;
}

std::vector<LayerPool> place_pool(const Model& model, const SessionOptions& o, const Dimensions& d,
                                  Arena& arena) {
  const ModelShape& s = model.shape;
  const uint64_t f16 = 2, f32 = 4, i32 = 4;
  const uint64_t entries = uint64_t(s.kv_heads) * d.capacity;
  std::vector<LayerPool> layers(s.layers);
  for (LayerPool& layer : layers) {
    layer.k = arena.place(entries * s.head_dim * f16);
    layer.v = arena.place(entries * s.head_dim * f16);
    layer.pos = arena.place(entries * i32);
    if (o.retention != Retention::kNone) layer.cis = arena.place(entries * f32);
    if (o.retention == Retention::kLocret) layer.ring = arena.place(uint64_t(kRingRows) * d.qkv_cols * f32);
    if (o.selection != Selection::kDense) {
      layer.gate = arena.place(sizeof(GateState));
      layer.query = arena.place(uint64_t(s.heads) * s.head_dim * f32);
      layer.list = arena.place(uint64_t(s.kv_heads) * d.select_list * i32);
    }
  }
  return layers;
}

}  // namespace thimble
