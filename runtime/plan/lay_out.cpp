#include "runtime/plan/lay_out.h"

#include <algorithm>
#include <cstring>

#include "base/bits.h"
#include "runtime/policy/kv_types.h"

namespace thimble {
namespace {

// The columns of a row of the lifted view: a key of each head, and as many columns for its value.
uint64_t lifted_columns(const Model& model) {
  uint64_t columns = 0;
  for (const Layer& layer : model.layers)
    if (const AttentionMixer* m = layer.attention(); m && m->is_latent())
      columns = std::max(columns, uint64_t(m->heads) * m->query_dim);
  return columns;
}

bool has_values(const Model& model) {
  return std::any_of(model.layers.begin(), model.layers.end(),
                     [](const Layer& layer) { return layer.attention() && layer.attention()->has_values(); });
}

// The arrays of the layers without a window, if runs move: parts of arrays in which all their runs are. These
// layers have keys of the same width, and so of the same format.
void place_moving(const Model& model, const SessionOptions& o, const Dimensions& d, Arena& arena,
                  std::vector<LayerPool>& layers) {
  const uint64_t f32 = 4, i32 = 4;
  const auto first = std::find_if(model.layers.begin(), model.layers.end(),
                                  [](const Layer& layer) { return layer.retains(); });
  const KvTypes types = kv_types(model, *first->attention(), o);
  const auto rows = [&](DType type) {
    return KvArray{arena.place(d.pool_entries * kv_bytes(type, model.retained_head_dim())), type};
  };
  const LayerPool all{.k = rows(types.k),
                      .v = has_values(model) ? rows(types.v) : KvArray{},
                      .pos = arena.place(d.pool_entries * i32),
                      .cis = arena.place(d.pool_entries * f32)};
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!model.layers[i].retains()) continue;
    const auto part = [&](const View& array) {
      const uint64_t entry_bytes = array.bytes / d.pool_entries;
      return array.slice(d.layer_first[i] * entry_bytes, d.layer_entries[i] * entry_bytes);
    };
    layers[i].k = {part(all.k.values), all.k.type};
    if (all.v) layers[i].v = {part(all.v.values), all.v.type};
    layers[i].pos = part(all.pos);
    layers[i].cis = part(all.cis);
  }
}

std::vector<LayerPool> place_pool(const Model& model, const SessionOptions& o, const Dimensions& d,
                                  Arena& arena) {
  const uint64_t f32 = 4, i32 = 4;
  std::vector<LayerPool> layers(model.layers.size());
  if (d.moves) place_moving(model, o, d, arena, layers);
  for (size_t i = 0; i < layers.size(); ++i) {
    const AttentionMixer* attention = model.layers[i].attention();
    if (!attention) continue;
    LayerPool& layer = layers[i];
    if (!attention->has_keys()) {
      layer = layers[attention->owner];
      continue;
    }
    if (d.moves && !attention->window) continue;
    const uint64_t entries = d.layer_entries[i];
    const KvTypes types = kv_types(model, *attention, o);
    layer.k = {arena.place(entries * kv_bytes(types.k, attention->head_dim)), types.k};
    if (attention->has_values())
      layer.v = {arena.place(entries * kv_bytes(types.v, attention->head_dim)), types.v};
    layer.pos = arena.place(entries * i32);
    if (d.runs[attention->first_run].evicts) layer.cis = arena.place(entries * f32);
  }
  return layers;
}

// The chunk's rows of each layer: those of layers whose keys other layers read, and those of all others.
std::vector<ChunkRows> place_chunks(const Setting& s, Arena& arena) {
  const uint64_t f32 = 4, i32 = 4, rows = s.options.chunk;
  // The bytes of one row's keys, and of its values, in all heads of a layer.
  struct RowBytes {
    uint64_t k, v;
  };
  const auto row_bytes = [&](const AttentionMixer& m) {
    const KvTypes types = kv_types(s.model, m, s.options);
    return RowBytes{m.kv_heads * kv_bytes(types.k, m.head_dim), m.kv_heads * kv_bytes(types.v, m.head_dim)};
  };
  const auto place = [&](uint64_t kv_heads, const RowBytes& bytes) {
    ChunkRows chunk;
    chunk.k.values = arena.place(rows * bytes.k);
    if (has_values(s.model)) chunk.v.values = arena.place(rows * bytes.v);
    chunk.pos = arena.place(rows * kv_heads * i32);
    if (s.dimensions.evicts) chunk.cis = arena.place(rows * kv_heads * f32);
    return chunk;
  };
  RowBytes most{};
  for (const Layer& layer : s.model.layers) {
    const AttentionMixer* m = layer.attention();
    if (!m || !m->has_keys()) continue;
    most.k = std::max(most.k, row_bytes(*m).k);
    most.v = std::max(most.v, row_bytes(*m).v);
  }
  std::vector<ChunkRows> chunks(s.model.layers.size(), place(s.model.shape.kv_heads, most));
  for (size_t i = 0; i < chunks.size(); ++i) {
    const AttentionMixer* m = s.model.layers[i].attention();
    if (!m) continue;
    if (!m->has_keys()) {
      chunks[i] = chunks[m->owner];
      continue;
    }
    if (m->last_reader != i) chunks[i] = place(m->kv_heads, row_bytes(*m));
    const KvTypes types = kv_types(s.model, *m, s.options);
    chunks[i].k.type = types.k;
    chunks[i].v.type = types.v;
  }
  return chunks;
}

RecallViews place_recall(const Setting& s, const DeviceInfo& device, Arena& pool, Arena& io) {
  const uint64_t word = 4, kv_heads = s.model.shape.kv_heads, entries = s.dimensions.reach;
  const bool chooses = s.options.most_recalled();
  RecallViews r;
  uint64_t key_bytes = 0, value_bytes = 0, cols = 0;  // of all heads of a layer
  for (const Layer& layer : s.model.layers) {
    r.queries.push_back(
        chooses && layer.retains() ? pool.place(kAskingTokens * layer.attention()->q_cols() * word) : View{});
    if (!layer.retains()) continue;
    const AttentionMixer& m = *layer.attention();
    const KvTypes types = recall_types(s.model, m, s.options);
    key_bytes = std::max(key_bytes, m.kv_heads * kv_bytes(types.k, m.head_dim));
    value_bytes = std::max(value_bytes, m.kv_heads * kv_bytes(types.v, m.head_dim));
    cols = std::max(cols, uint64_t(m.kv_cols()));
  }
  const View k = io.place(entries * key_bytes), v = io.place(entries * value_bytes);
  for (const Layer& layer : s.model.layers) {
    const KvTypes types = layer.retains() ? recall_types(s.model, *layer.attention(), s.options) : KvTypes{};
    r.k.push_back({k, types.k});
    r.v.push_back({v, types.v});
  }
  r.keys = io.place(entries * cols * word);
  r.pos = io.place(entries * kv_heads * word);
  r.cis = io.place(entries * kv_heads * word);
  r.spilled = io.place((1 + kv_heads) * word);
  if (chooses) {
    r.rows = io.place(kv_heads * word);
    r.list = io.place(kv_heads * (1 + entries) * word);
  }
  const bool votes = votes_on_device(s.options, device);
  if (votes) {
    r.asked = io.place(3 * word);
    r.votes = io.place(kv_heads * recall_shape(s.model, s.options).pages * word);
  }
  if (s.options.recalls_all() || votes) r.pages = io.place(s.dimensions.runs.size() * word);
  if (s.options.recalls_all() && s.options.recall_disk)
    r.window = io.place(s.dimensions.stored * (key_bytes + value_bytes));
  return r;
}

// The columns that a layer's feed-forward needs for one row.
uint64_t ffn_cols(const Layer& layer) {
  const auto* experts = std::get_if<Experts>(&layer.feed_forward);
  if (!experts) return std::get<Dense>(layer.feed_forward).hidden_cols();
  return std::max(experts->route.chosen * uint64_t(experts->d_ff()), experts->shared.hidden_cols());
}

bool gates_shared_expert(const Layer& layer) {
  const auto* experts = std::get_if<Experts>(&layer.feed_forward);
  return experts && experts->shared_gate;
}
bool norms_experts(const Layer& layer) {
  const auto* experts = std::get_if<Experts>(&layer.feed_forward);
  return experts && experts->norm;
}

}  // namespace

RecallStore::Shape recall_shape(const Model& model, const SessionOptions& o) {
  RecallStore::Shape shape;
  for (size_t run = 0; run < model.layer_of_run.size(); ++run) {
    const AttentionMixer& m = model.owner_of_run(run);
    const KvTypes types = recall_types(model, m, o);
    shape.runs.push_back({m.window ? 0 : m.head_dim, types.k, types.v});
  }
  shape.in_file = o.recall_disk != 0;
  shape.pages = RecallStore::most_pages(shape, shape.in_file ? o.recall_disk : o.recall_mem);
  if (o.context)  // more pages than the text has would stay empty
    shape.pages = std::min(shape.pages, static_cast<uint32_t>(ceil_div(o.context, kRecallPage)));
  return shape;
}

bool votes_on_device(const SessionOptions& o, const DeviceInfo& device) {
  return device.votes_pages && o.recall_mem && o.most_recalled();
}

Layout lay_out(const Setting& setting, Policies& policies, const DeviceInfo& device, uint64_t scratch,
               WeightWindow& window, Arena& pool, Arena& workspace, Arena& io) {
  const Model& model = setting.model;
  const SessionOptions& o = setting.options;
  const Dimensions& d = setting.dimensions;
  const ModelShape& s = model.shape;
  const uint64_t f32 = 4, i32 = 4;

  Layout l;
  l.layers = place_pool(model, o, d, pool);
  for (const Layer& layer : model.layers) {
    StateArray& state = l.states.emplace_back();
    if (!layer.state_bytes()) continue;
    state.slots = d.state_slots;
    state.slot_stride = round_up(layer.state_bytes(), device.alignment);
    state.block0 = pool.place(state.slots * state.slot_stride).slice(0, layer.state_bytes());
  }
  l.saturated = pool.place(i32);
  for (size_t i = 0; i < model.layers.size() && o.watch; ++i) {
    const AttentionMixer* attention = model.layers[i].attention();
    l.last_queries.push_back(attention ? pool.place(uint64_t(attention->q_cols()) * f32) : View{});
  }

  const uint64_t rows = o.chunk;
  const auto rope_words = [&](const RopeScheme& rope) {
    return uint64_t(rope_table_rows(d.rope_positions)) * rope.n_rot;
  };
  const bool weighted = std::any_of(model.layers.begin(), model.layers.end(), [](const Layer& layer) {
    return layer.attention() && layer.attention()->norms_after_rotation;
  });
  if (weighted) l.query_weights = static_cast<uint32_t>(rope_words(model.rope));
  l.rope = workspace.place((rope_words(model.rope) + (weighted ? uint64_t(s.layers) * s.head_dim : 0)) * f32);
  if (!model.window_rope.inverse_frequency.empty())
    l.window_rope = workspace.place(rope_words(model.window_rope) * f32);
  l.scratch = workspace.place(scratch);
  window.place(workspace);
  l.x = workspace.place(rows * s.d_model * f32);
  l.norm = workspace.place(rows * s.d_model * f32);
  if (model.joined) {
    l.model_rows = pool.place((rows + 1) * s.d_model * f32);
    l.halves = workspace.place(rows * 2 * s.d_model * f32);
  }
  l.logit_x = workspace.place(uint64_t(kLogitRowsAtOnce) * s.d_model * f32);
  const uint64_t view_bytes = uint64_t(d.view_capacity) * d.kv_cols * device.view_element_bytes;
  for (KvArray* view : {&l.view_k, &l.view_v}) {
    if (view == &l.view_k || has_values(model)) view->values = workspace.place(view_bytes);
    view->type = device.view_element_bytes == 4 ? DType::kF32 : DType::kF16;
  }
  if (d.lifting_rows && device.lifts_views)
    for (KvArray* lifted : {&l.lifted_k, &l.lifted_v})
      *lifted = {workspace.place(lifted_columns(model) * d.lifted_capacity * device.view_element_bytes),
                 l.view_k.type};
  l.chunks = place_chunks(setting, workspace);
  if (d.evicts) l.retain_list = workspace.place(s.kv_heads * (1 + uint64_t(d.reach)) * i32);
  if (model.layer_embedding) l.first_x = workspace.place(rows * s.d_model * f32);
  l.logits = (device.unified ? io : workspace).place(uint64_t(kLogitRowsAtOnce) * model.output.rows * f32);
  l.position_sums = workspace.place(kPositionsAtOnce * f32);
  // The buffers of attention and of the feed-forward are never used at the same time, so they share memory.
  const uint64_t before_attention = workspace.mark();
  l.qkv = workspace.place(rows * d.mixer_cols * f32);
  if (d.middle_cols) l.middle = workspace.place(rows * d.middle_cols * f32);
  l.attention = workspace.place(rows * d.mixed_cols * f32);
  l.ml = workspace.place(rows * s.heads * 2 * f32);
  policies.retention->place(setting, pool, workspace);
  policies.selection->place(setting, pool, workspace);
  workspace.release(before_attention);
  uint64_t most_ffn_cols = 0;
  for (const Layer& layer : model.layers) most_ffn_cols = std::max(most_ffn_cols, ffn_cols(layer));
  l.ffn = workspace.place(rows * most_ffn_cols * f32);
  if (s.experts) {
    uint64_t latent_cols = 0;
    for (const Layer& layer : model.layers)
      if (const auto* experts = std::get_if<Experts>(&layer.feed_forward))
        latent_cols = std::max(latent_cols, uint64_t(experts->latent_down.rows));
    if (latent_cols) {
      l.latent_x = workspace.place(rows * latent_cols * f32);
      l.latent_sum = workspace.place(rows * latent_cols * f32);
    }
    l.router_logits = workspace.place(rows * s.experts * f32);
    if (std::any_of(model.layers.begin(), model.layers.end(), gates_shared_expert))
      l.shared_gate = workspace.place(rows * f32);
    l.expert_first = workspace.place((uint64_t(s.experts) + 1) * i32);
    l.expert_row = workspace.place(rows * s.chosen_experts * i32);
    l.expert_weight = workspace.place(rows * s.chosen_experts * f32);
  }
  if (std::any_of(model.layers.begin(), model.layers.end(), norms_experts)) {
    l.expert_sum = workspace.place(rows * s.d_model * f32);
    l.branch_sum = workspace.place(rows * s.d_model * f32);
  }
  // The branches of the token come after both.
  workspace.release(before_attention);
  if (model.layer_embedding) {
    const uint64_t width = model.layers[0].token_branch.width();
    l.token_part = workspace.place(rows * width * f32);
    l.token_gate = workspace.place(rows * width * f32);
  }
  // Reports run between steps, when none of these buffers is used. The lists that they read are in the pool
  // if the session watches.
  if (o.watch) {
    workspace.release(before_attention);
    l.watch_sums = workspace.place(s.heads * kQueryScoreSums * f32);
    for (const uint32_t entries : d.layer_entries)
      l.watch_weights.push_back(entries ? workspace.place(entries * f32) : View{});
  }

  l.tokens = io.place(rows * i32);
  if (HostControl* host = policies.host()) host->place_on_host(setting, io);
  if (o.recall) l.recall = place_recall(setting, device, pool, io);
  l.targets = io.place(kLogitRowsAtOnce * i32);
  l.arg_max = io.place(kLogitRowsAtOnce * i32);
  l.log_prob = io.place(kLogitRowsAtOnce * f32);
  if (!device.unified) {
    l.host_logits = io.place(model.output.rows * f32);
    if (model.output.data != model.token_embedding.data)
      l.embedding_rows = io.place(rows * dtype_bytes(model.token_embedding.type, s.d_model));
    if (const Tensor& table = model.layer_embedding)
      l.layer_embedding_rows = io.place(rows * dtype_bytes(table.type, table.cols));
  }
  return l;
}

Status write_rope_tables(Device& device, const Setting& setting, const Layout& l, uint32_t context) {
  const auto filled = [&](const RopeScheme& rope, const View& to) {
    std::vector<float> table(to.bytes / sizeof(float));
    fill_rope_table(rope, setting.dimensions.rope_positions, context, table.data());
    return table;
  };
  std::vector<float> table = filled(setting.model.rope, l.rope);
  const uint32_t head_dim = setting.model.shape.head_dim;
  for (uint32_t i = 0; i < setting.model.layers.size() && l.query_weights; ++i) {
    const AttentionMixer* attention = setting.model.layers[i].attention();
    if (!attention || !attention->norms_after_rotation) continue;
    const float* q = reinterpret_cast<const float*>(attention->q_norm.data);
    const float* k = reinterpret_cast<const float*>(attention->k_norm.data);
    for (uint32_t c = 0; c < head_dim; ++c) table[l.query_weights + i * head_dim + c] = q[c] * k[c];
  }
  THIMBLE_TRY(device.write(l.rope, table.data()));
  if (!l.window_rope) return {};
  return device.write(l.window_rope, filled(setting.model.window_rope, l.window_rope).data());
}

namespace {

void copy_rows(const Tensor& table, std::span<const int32_t> tokens, const View& to) {
  const uint64_t row_bytes = dtype_bytes(table.type, table.cols);
  for (size_t i = 0; i < tokens.size(); ++i)
    std::memcpy(on_host<std::byte>(to) + i * row_bytes,
                table.data + static_cast<uint64_t>(tokens[i]) * row_bytes, row_bytes);
}

}  // namespace

void set_tokens(const Model& model, const Layout& l, std::span<const int32_t> tokens) {
  std::copy(tokens.begin(), tokens.end(), on_host<int32_t>(l.tokens));
  if (l.embedding_rows) copy_rows(model.token_embedding, tokens, l.embedding_rows);
  if (l.layer_embedding_rows) copy_rows(model.layer_embedding, tokens, l.layer_embedding_rows);
}

}  // namespace thimble
