#include "runtime/kv/pool.h"

#include <algorithm>

#include "runtime/memory/layout.h"
#include "runtime/policy/policy.h"

namespace thimble {
namespace {

// A head that attends to everything. Where heads keep different numbers of entries, stabilizers are the same
// share of each.
HeadRun full_run(const SessionOptions& o, const RetentionPolicy& retention, uint32_t keep) {
  HeadRun run;
  run.evicts = retention.evicts();
  run.keep = keep;
  // What is read again stays until then.
  run.capacity = keep + std::max(o.local + o.max_new, retention.reads_again() ? o.chunk : 0);
  run.protect_first = std::min(o.protect_init, keep);
  run.protect_last = static_cast<uint32_t>(uint64_t(o.stabilizers) * keep / std::max(o.pool, 1u));
  return run;
}

// A head that sees its last tokens alone keeps them, whatever the other heads keep.
HeadRun windowed_run(const SessionOptions& o, uint32_t window) {
  HeadRun run;
  run.evicts = true;
  run.keep = window;
  run.capacity = window + o.local + o.max_new;
  return run;
}

}  // namespace

Dimensions dimensions(const Model& model, const SessionOptions& o, const Policies& policies) {
  const ModelShape& s = model.shape;
  Dimensions d;
  d.evicts = policies.evict(model);
  d.full_evict = policies.retention->evicts();
  const uint32_t most_selected = policies.selection->most_attended(o);
  const bool chunks_select = policies.selection->selects_chunks(o);
  uint32_t view_entries = 0;  // that a chunk attends to at most
  for (const LayerWeights& layer : model.layers) {
    uint64_t entries = 0;
    for (uint32_t head = 0; head < s.kv_heads; ++head) {
      const uint32_t keep = o.keeps.empty() ? o.pool : o.keeps[d.runs.size()];
      HeadRun run = layer.window ? windowed_run(o, layer.window) : full_run(o, *policies.retention, keep);
      run.first = static_cast<uint32_t>(entries);
      entries += run.capacity;
      d.runs.push_back(run);
      d.capacity = std::max(d.capacity, run.capacity);
      // A chunk either fits behind the entries, or is read behind as many as an eviction leaves.
      // What a step reads again stands beside them.
      uint32_t reach = run.evicts ? std::max(run.capacity + o.rebuild, run.keep + o.chunk) : run.capacity;
      if (policies.retention->reads_again()) reach = run.capacity + o.chunk;
      d.reach = std::max(d.reach, reach);
      const uint32_t most = layer.window ? UINT32_MAX : most_selected;
      const uint32_t of_chunk =
          chunks_select && !policies.retention->reads_again() ? std::min(reach, most) : reach;
      view_entries = std::max(view_entries, of_chunk);
      d.largest_list = std::max({d.largest_list, of_chunk, std::min(run.capacity, most)});
    }
    d.layer_entries.push_back(static_cast<uint32_t>(std::min<uint64_t>(entries, UINT32_MAX)));
    d.most_layer_entries = std::max(d.most_layer_entries, d.layer_entries.back());
  }
  d.view_capacity = std::min(view_entries, kMaxViewEntries);
  d.view_passes = static_cast<uint32_t>(ceil_div(view_entries, d.view_capacity));
  d.qkv_cols = (s.heads + 2 * s.kv_heads) * s.head_dim;
  d.rope_positions = std::max(d.reach, policies.selection->rope_positions(o));
  if (o.positions == Positions::kOriginal)
    d.rope_positions =
        std::max(d.rope_positions, o.context + (policies.retention->reads_again() ? o.chunk : 0));
  return d;
}

std::vector<LayerPool> place_pool(const Model& model, const Dimensions& d, Arena& arena) {
  const ModelShape& s = model.shape;
  const uint64_t f32 = 4, i32 = 4;
  std::vector<LayerPool> layers(s.layers);
  for (uint32_t i = 0; i < s.layers; ++i) {
    LayerPool& layer = layers[i];
    const uint64_t entries = d.layer_entries[i];
    layer.k.values = arena.place(entries * kv_bytes(layer.k.type, s.head_dim));
    layer.v.values = arena.place(entries * kv_bytes(layer.v.type, s.head_dim));
    layer.pos = arena.place(entries * i32);
    if (d.runs[uint64_t(i) * s.kv_heads].evicts) layer.cis = arena.place(entries * f32);
  }
  return layers;
}

}  // namespace thimble
