// attention: softmax(q k^T) v over tiles of keys, with a running maximum and sum, so the score matrix is
// never stored.
#include "backends/cpu/attention/softmax.h"
#include "backends/cpu/entries.h"

namespace thimble::cpu {

// The first list index that a row sees, if it sees `seen` entries without a window.
static uint32_t first_visible(uint32_t seen, uint32_t window) {
  return window && window < seen ? seen - window : 0;
}

// Masks the scores of keys before the rows' windows in the tile whose first list index is `key`. Row 0 has
// list index first_index; each row has `group` query vectors.
static void hide_before_window(const TileScratch& t, uint32_t vectors, uint32_t group, uint32_t first_index,
                               uint32_t window, uint32_t key) {
  for (uint32_t vector = 0; vector < vectors; ++vector) {
    const uint32_t first = first_visible(first_index + vector / group + 1, window);
    if (first <= key) continue;
    const uint32_t hidden = first - key;
    if (hidden < t.visible[vector])
      std::fill_n(t.scores + vector * kTileKeys, hidden, -kInfinity);
    else
      t.visible[vector] = 0;
  }
}

// The values of a layer: an array of their own, or the last channels of the keys.
struct Values {
  const KvArray& rows;   // the array of the rows that contain them
  uint32_t first, cols;  // channels of a row
  explicit Values(const Attention& o)
      : rows(o.v ? o.v : o.k), first(o.v ? 0 : o.p.head_dim - o.value_cols()), cols(o.value_cols()) {}
};

// Rows [first_row, first_row + rows) of one KV head's group attend to the current pass of the view.
static void attend_view(const Context& ctx, const Attention& o, uint32_t head, uint32_t first_row,
                        uint32_t rows, const TileScratch& t) {
  const AttentionParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const KvKernels& kernels = kv_kernels();
  const uint32_t count =
      entry_list(ctx, o.list, o.lifted.value_dim ? 0 : head, p.list_capacity, p.head_state).count;
  if (p.first_entry >= count) return;
  const Values values(o);
  const bool first_pass = p.first_entry == 0, last_pass = p.first_entry + p.view_capacity >= count;
  const uint32_t end = std::min(count, p.first_entry + p.view_capacity), width = padded_width(p.head_dim),
                 out_width = padded_width(values.cols);
  const uint32_t vectors = rows * p.group, query_heads = (p.first_head + p.heads) * p.group;
  // The list index of a row's own entry.
  const auto index_of = [&](uint32_t row) {
    return o.row_index ? data<uint32_t>(o.row_index)[first_row + row]
                       : count - ctx.step.n_rows + first_row + row;
  };

  const auto y = [&](uint32_t row, uint32_t h) {
    return data<float>(o.y) + uint64_t(first_row + row) * p.y_stride + (head * p.group + h) * values.cols;
  };
  const auto ml = [&](uint32_t row, uint32_t h) {
    return data<float>(o.ml) + (uint64_t(first_row + row) * query_heads + head * p.group + h) * 2;
  };
  for (uint32_t row = 0, vector = 0; row < rows; ++row) {
    const uint32_t position =
        p.rope.mode == kRopeList ? index_of(row) : static_cast<uint32_t>(ctx.step.position) + first_row + row;
    rope.angles(position, t.angles);
    const float* q =
        data<float>(o.q) + uint64_t(first_row + row) * p.row_stride + head * p.group * p.head_dim;
    for (uint32_t h = 0; h < p.group; ++h, ++vector) {
      write_scaled(q + h * p.head_dim, p.scale * kLog2E, p.head_dim, t.q + vector * width);
      rope.rotate_query(t.q + vector * width + o.lifted.rope_first, t.angles, p.head_dim);
      std::fill_n(t.out + vector * out_width, out_width, 0.0f);
      if (!first_pass) std::memcpy(t.out + vector * out_width, y(row, h), values.cols * sizeof(float));
      const LogSum before =
          first_pass ? sink_of(o.sinks, head * p.group + h) : LogSum{ml(row, h)[0], ml(row, h)[1]};
      t.peak[vector] = before.peak;
      t.sum[vector] = before.sum;
    }
  }

  const KvFormat& view = *kv_format(DType::kF32);
  const uint64_t row_bytes = kv_bytes(view.type, p.head_dim);
  const std::byte* own_k = at<std::byte>(o.k.values, head, p.view_capacity, 0, row_bytes);
  const std::byte* own_v = at<std::byte>(values.rows.values, head, p.view_capacity, 0, row_bytes) +
                           kv_bytes(view.type, values.first);
  uint32_t key = p.first_entry;
  const uint32_t first_seen = first_visible(index_of(0) + 1, p.window);
  if (first_seen > key) key += (first_seen - key) / kTileKeys * kTileKeys;  // skip tiles that no row sees
  for (; key < end && key <= index_of(rows - 1); key += kTileKeys) {
    const uint32_t n = std::min(kTileKeys, end - key);
    const std::byte *k[kTileKeys], *v[kTileKeys];
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t row = (key - p.first_entry + i) * row_bytes;
      k[i] = own_k + row;
      v[i] = own_v + row;
    }
    view.load_tile(k, n, p.head_dim, t.keys);
    for (uint32_t vector = 0; vector < vectors; ++vector) {
      const uint32_t seen = index_of(vector / p.group) + 1;
      t.visible[vector] = seen > key ? std::min(n, seen - key) : 0;
    }
    kernels.multiply_tile(vectors, p.head_dim, t.q, width, t.keys, t.scores);
    cap_scores(t, vectors, p.cap);
    if (p.window) hide_before_window(t, vectors, p.group, index_of(0), p.window, key);
    kernels.soften(t.scores, vectors, t.visible, t.peak, t.sum, t.out, out_width);
    view.add_rows(vectors, n, t.scores, v, values.cols, t.out, out_width);
  }

  for (uint32_t row = 0, vector = 0; row < rows; ++row)
    for (uint32_t h = 0; h < p.group; ++h, ++vector) {
      write_scaled(t.out + vector * out_width, last_pass ? 1 / t.sum[vector] : 1, values.cols, y(row, h));
      if (last_pass) continue;
      ml(row, h)[0] = t.peak[vector];
      ml(row, h)[1] = t.sum[vector];
    }
}

// A row attends to list entries [first, end) of one KV head. The results (peak, sum, out) stay in t.
static void attend_pool(const Context& ctx, const Attention& o, uint32_t row, uint32_t head,
                        const EntryList& list, uint32_t first, uint32_t end, const float* low,
                        const TileScratch& t) {
  const AttentionParams& p = o.p;
  const Rope rope(o.rope, p.rope);
  const KvKernels& kernels = kv_kernels();
  const Values values(o);
  const uint32_t width = padded_width(p.head_dim), out_width = padded_width(values.cols);
  const bool by_list = p.rope.mode == kRopeList;
  for (uint32_t h = 0; h < p.group; ++h)
    write_scaled(data<float>(o.q) + uint64_t(row) * p.row_stride + (head * p.group + h) * p.head_dim,
                 p.scale * kLog2E, p.head_dim, t.q + h * width);
  // Under kRopeList, a tile's keys rotate by their index in the tile (softmax.h).
  if (rope.query_weight || !by_list) {
    rope.angles(by_list ? list.count - 1 : static_cast<uint32_t>(ctx.step.position) + row, t.angles);
    for (uint32_t h = 0; h < p.group; ++h) rope.rotate_query(t.q + h * width, t.angles, p.head_dim);
    std::memcpy(t.rotated, t.q, p.group * width * sizeof(float));
  }
  std::fill_n(t.out, p.group * out_width, 0.0f);
  std::fill_n(t.peak, p.group, -kInfinity);
  std::fill_n(t.sum, p.group, 0.0f);

  const HeadState& state = ctx.heads[p.head_state + head];
  const KvRows k_rows(o.k, p.head_dim), v_rows(values.rows, p.head_dim);
  const uint64_t first_value = kv_bytes(values.rows.type, values.first);
  for (uint32_t key = first; key < end; key += kTileKeys) {
    const uint32_t keys = std::min(kTileKeys, end - key);
    const std::byte *k[kTileKeys], *v[kTileKeys];
    for (uint32_t i = 0; i < keys; ++i) {
      const uint32_t entry = list[key + i];
      k[i] = k_rows.in_run(state, entry);
      v[i] = v_rows.in_run(state, entry) + first_value;
      if (o.v) prefetch_row(v[i], v_rows.bytes);
    }
    for (uint32_t i = key + keys; i < std::min(end, key + 2 * kTileKeys); ++i)
      prefetch_row(k_rows.in_run(state, list[i]), k_rows.bytes);
    k_rows.format.load_tile(k, keys, p.head_dim, t.keys);
    if (by_list) {
      kernels.rotate_tile(t.keys, low, rope.pairs, rope.second, rope.step);
      rotate_for_tile(rope, list.count - 1, key, p.group, width, t.q, t.angles, t.rotated);
    }
    std::fill_n(t.visible, p.group, keys);
    kernels.multiply_tile(p.group, p.head_dim, t.rotated, width, t.keys, t.scores);
    cap_scores(t, p.group, p.cap);
    kernels.soften(t.scores, p.group, t.visible, t.peak, t.sum, t.out, out_width);
    v_rows.format.add_rows(p.group, keys, t.scores, v, values.cols, t.out, out_width);
  }
}

// Decoding: workers attend to parts of the lists in parallel; the parts are then combined in order. Parts of
// all heads have the same length. A head has as many parts as its entries require, and a worker takes parts
// of any head. The bits of a row's result do not depend on the other rows.
static void attend_pool(const Context& ctx, const Attention& o, uint32_t row) {
  const AttentionParams& p = o.p;
  const Values values(o);
  const uint32_t width = padded_width(values.cols);
  ScratchLayout layout(ctx.scratch.data());
  const PartScratch parts(layout, p.heads, p.group, p.head_dim);
  std::byte* const tiles = ctx.scratch.data() + layout.used();
  if (p.rope.mode == kRopeList) transpose_low_half(o.rope, p.rope, parts.low);
  const auto list_of = [&](uint32_t head) {  // the row does not see the rows after it
    EntryList list = entry_list(ctx, o.list, p.first_head + head, p.list_capacity, p.head_state);
    list.count -= ctx.step.n_rows - 1 - row;
    return list;
  };
  const auto first_of = [&](const EntryList& list) { return first_visible(list.count, p.window); };
  uint32_t longest = 0;
  for (uint32_t head = 0; head < p.heads; ++head) {
    const EntryList list = list_of(head);
    longest = std::max(longest, list.count - first_of(list));
  }
  // Parts consist of whole tiles; 256 keys take about 3 us.
  const uint32_t part = static_cast<uint32_t>(
      std::max<uint64_t>(4 * kTileKeys, round_up(ceil_div(longest, kMaxParts), kTileKeys)));
  const uint32_t n_parts = static_cast<uint32_t>(ceil_div(longest, part));

  ctx.threads.run(p.heads * n_parts, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = item / n_parts, number = item % n_parts;
    const EntryList list = list_of(head);
    const uint32_t first = first_of(list) + number * part;
    if (first >= list.count) return;
    const TileScratch t = worker_scratch<TileScratch>(tiles, worker, p.group, p.head_dim);
    attend_pool(ctx, o, row, p.first_head + head, list, first, std::min(list.count, first + part), parts.low,
                t);
    keep_part(parts, head, number, p.group, width, t);
  });

  ctx.threads.run(p.heads * p.group, [&](uint32_t query, uint32_t) {
    const uint32_t head = query / p.group;
    const EntryList list = list_of(head);
    const uint32_t n = static_cast<uint32_t>(ceil_div(list.count - first_of(list), part));
    const uint32_t of_layer = p.first_head * p.group + query;
    combine_parts(parts, head, n, p.group, query % p.group, width, o.sinks, of_layer, values.cols,
                  data<float>(o.y) + uint64_t(row) * p.y_stride + of_layer * values.cols);
  });
}

void attention(const Context& ctx, const Attention& o) {
  const AttentionParams& p = o.p;
  if (p.source == kFromPool) {
    for (uint32_t row = 0; row < ctx.step.n_rows; ++row) attend_pool(ctx, o, row);
    return;
  }
  const uint32_t rows = attention_rows(p.group);
  const uint32_t blocks = static_cast<uint32_t>(ceil_div(ctx.step.n_rows, rows));
  for_share(ctx, p.heads * blocks, [&](uint32_t item, uint32_t worker) {
    const uint32_t first_row = item / p.heads * rows;
    attend_view(ctx, o, p.first_head + item % p.heads, first_row, std::min(rows, ctx.step.n_rows - first_row),
                worker_scratch<TileScratch>(ctx.scratch.data(), worker, rows * p.group, p.head_dim));
  });
}

}  // namespace thimble::cpu
