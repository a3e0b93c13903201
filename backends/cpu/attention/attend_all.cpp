// attend_all: attention to a run, the step's rows and the pages of a store, in the order of positions.
#include <bit>

#include "backends/cpu/attention/softmax.h"
#include "backends/cpu/entries.h"

namespace thimble::cpu {
namespace {

// A place between two entries: so many of the run and the rows are before it, and so many pages. `rank` is
// the number of all entries before it.
struct Place {
  uint32_t entry = 0, page = 0, rank = 0;
};

// The entries of one KV head.
class Entries {
 public:
  Entries(const Context& c, const AttendAll& o, uint32_t head)
      : state_(c.heads[o.p.head_state + head]),
        in_run_(o.chunk_k ? state_.n_entries : state_.n_entries + c.step.n_rows),
        k_(o.k, o.p.head_dim),
        v_(o.v, o.p.head_dim),
        chunk_k_(o.chunk_k, o.p.head_dim),
        chunk_v_(o.chunk_v, o.p.head_dim),
        stored_k_(o.stored_k, o.p.head_dim),
        stored_v_(o.stored_v, o.p.head_dim),
        first_row_(uint64_t(head) * o.p.chunk_capacity),
        pos_(thimble::cpu::in_run<int32_t>(o.pos, state_, 0)),
        before_rows_(uint64_t(head) * o.p.rows_stride * 64),
        pages_(data<std::byte>(o.pages) + uint64_t(head) * o.p.stored_stride * 64),
        order_(data<uint32_t>(o.order) + uint64_t(head) * o.p.stored_stride * (64 / sizeof(uint32_t))) {
    end_ = {in_run_ + (o.chunk_k ? c.step.n_rows : 0), data<uint32_t>(o.count)[head], 0};
    end_.rank = end_.entry + held_before(end_.page);
  }

  const Place& end() const { return end_; }
  // An upper bound on the number of entries, which is near it where pages are full.
  uint32_t work() const { return end_.entry + kStoredPage * end_.page; }

  // The first place between two pages that has at least `work` before it.
  Place after(uint32_t work) const {
    if (work >= this->work()) return end_;
    uint32_t low = 0, high = UINT32_MAX / kStoredPage;  // pages of the text
    const auto place = [&](uint32_t number) { return Place{run_before(number), pages_before(number), 0}; };
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      const Place at = place(middle);
      if (at.entry + kStoredPage * at.page >= work)
        high = middle;
      else
        low = middle + 1;
    }
    Place at = place(low);
    at.rank = at.entry + held_before(at.page);
    return at;
  }

  // Takes the next entries, at most n of those before `to`: where their rows are, and whether these are in
  // the store. Moves the place past them. `passed`: so many positions of its page come before the place.
  uint32_t take(Place& at, uint32_t& passed, const Place& to, uint32_t n, const std::byte** k,
                const std::byte** v, bool* stored) const {
    uint32_t taken = 0;
    while (taken < n && (at.entry < to.entry || at.page < to.page)) {
      const uint32_t slot = at.page < to.page ? order_[at.page] : 0;
      const uint32_t left = at.page < to.page ? held(slot) >> passed << passed : 0;
      if (at.page < to.page && !left) {
        ++at.page;
        passed = 0;
        continue;
      }
      const auto place = static_cast<uint32_t>(std::countr_zero(left));
      const bool from_store =
          left &&
          (at.entry >= to.entry || at.entry >= in_run_ ||
           number(slot) * static_cast<int32_t>(kStoredPage) + static_cast<int32_t>(place) < pos_[at.entry]);
      stored[taken] = from_store;
      if (from_store) {
        k[taken] = stored_row(stored_k_, slot, place);
        v[taken] = stored_row(stored_v_, slot, place);
        passed = place + 1;
      } else {
        const bool chunk = at.entry >= in_run_;
        const uint64_t row = first_row_ + at.entry - in_run_;
        k[taken] = chunk ? chunk_k_[row] : k_.in_run(state_, at.entry);
        v[taken] = chunk ? chunk_v_[row] : v_.in_run(state_, at.entry);
        ++at.entry;
      }
      ++at.rank;
      ++taken;
    }
    return taken;
  }

  const KvFormat& run_k() const { return k_.format; }
  const KvFormat& run_v() const { return v_.format; }
  const KvFormat& stored_k() const { return stored_k_.format; }
  const KvFormat& stored_v() const { return stored_v_.format; }

 private:
  uint32_t word(uint32_t slot, uint32_t i) const {
    uint32_t word;
    std::memcpy(&word, pages_ + (4 * uint64_t(slot) + i) * sizeof word, sizeof word);
    return word;
  }
  int32_t number(uint32_t slot) const { return static_cast<int32_t>(word(slot, 0)); }
  uint32_t held(uint32_t slot) const { return word(slot, 1) & 0xffff; }
  uint32_t held_before(uint32_t page) const {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < page; ++i) sum += static_cast<uint32_t>(std::popcount(held(order_[i])));
    return sum;
  }
  // The entries of the run, and the pages, before a page of the text.
  uint32_t run_before(uint32_t number) const {
    return static_cast<uint32_t>(std::lower_bound(pos_, pos_ + in_run_, int64_t{number} * kStoredPage) -
                                 pos_);
  }
  uint32_t pages_before(uint32_t number) const {
    const auto before = [&](uint32_t slot, uint32_t n) {
      return static_cast<uint32_t>(this->number(slot)) < n;
    };
    return static_cast<uint32_t>(std::lower_bound(order_, order_ + end_.page, number, before) - order_);
  }
  const std::byte* stored_row(const KvRows& rows, uint32_t slot, uint32_t place) const {
    const uint64_t page_bytes = kStoredPage * (stored_k_.bytes + stored_v_.bytes);
    return rows.first + before_rows_ + slot * page_bytes + place * rows.bytes;
  }

  const HeadState& state_;
  const uint32_t in_run_;  // entries of the run; the rest are rows of the chunk
  const KvRows k_, v_, chunk_k_, chunk_v_, stored_k_, stored_v_;
  const uint64_t first_row_;
  const int32_t* const pos_;
  const uint64_t before_rows_;  // bytes of other heads in the store's rows
  const std::byte* const pages_;
  const uint32_t* const order_;
  Place end_;
};

// A tile of rows, of which some are in the store's format. If all have one format, the functions of this
// format read them where they are; otherwise `decoded` gets them as floats.
struct TileRows {
  const std::byte* rows[kTileKeys];
  const KvFormat* format;

  TileRows(const std::byte* const* from, const bool* stored, uint32_t n, const KvFormat& of_run,
           const KvFormat& of_store, uint32_t head_dim, float* decoded) {
    format = stored[0] ? &of_store : &of_run;
    const auto has_format = [&](bool is_stored) { return (is_stored ? &of_store : &of_run) == format; };
    std::copy_n(from, n, rows);
    if (std::all_of(stored, stored + n, has_format)) return;
    format = kv_format(DType::kF32);
    for (uint32_t i = 0; i < n; ++i) {
      float* const row = decoded + uint64_t(i) * head_dim;
      (stored[i] ? of_store : of_run).load_row(from[i], row, head_dim);
      rows[i] = reinterpret_cast<const std::byte*>(row);
    }
  }
};

// Rows [first_row, first_row + rows) of one KV head's group.
struct Queries {
  uint32_t head, first_row, rows;
};

// Scales the queries, and rotates them unless each tile does.
void load_queries(const Context& ctx, const AttendAll& o, const Rope& rope, const Queries& of,
                  uint32_t first_rank, const TileScratch& t) {
  const AttendAllParams& p = o.p;
  const uint32_t width = padded_width(p.head_dim);
  const bool by_list = p.rope.mode == kRopeList;
  for (uint32_t row = 0, vector = 0; row < of.rows; ++row) {
    const uint32_t position =
        by_list ? first_rank + row : static_cast<uint32_t>(ctx.step.position) + of.first_row + row;
    if (rope.query_weight || !by_list) rope.angles(position, t.angles);
    const float* q =
        data<float>(o.q) + uint64_t(of.first_row + row) * p.row_stride + of.head * p.group * p.head_dim;
    for (uint32_t h = 0; h < p.group; ++h, ++vector) {
      float* const to = t.q + vector * width;
      write_scaled(q + h * p.head_dim, p.scale * kLog2E, p.head_dim, to);
      if (rope.query_weight || !by_list) rope.rotate_query(to, t.angles, p.head_dim);
    }
  }
}

// Attends to the entries between two places. The results (peak, sum, out) stay in the scratch.
void attend(const Context& ctx, const AttendAll& o, const Entries& entries, const Queries& of, Place at,
            const Place& to, const float* low, const StoredTileScratch& scratch) {
  const AttendAllParams& p = o.p;
  const TileScratch& t = scratch.tile;
  const Rope rope(o.rope, p.rope);
  const KvKernels& kernels = kv_kernels();
  const uint32_t width = padded_width(p.head_dim), vectors = of.rows * p.group;
  const uint32_t first_rank = entries.end().rank - ctx.step.n_rows + of.first_row;
  const bool by_list = p.rope.mode == kRopeList;
  load_queries(ctx, o, rope, of, first_rank, t);
  std::fill_n(t.out, vectors * width, 0.0f);
  std::fill_n(t.peak, vectors, -kInfinity);
  std::fill_n(t.sum, vectors, 0.0f);

  for (uint32_t passed = 0; at.rank < first_rank + of.rows;) {
    const uint32_t first_key = at.rank;
    const std::byte *k[kTileKeys], *v[kTileKeys];
    bool stored[kTileKeys];
    const uint32_t keys = entries.take(at, passed, to, kTileKeys, k, v, stored);
    if (!keys) break;
    const TileRows k_rows(k, stored, keys, entries.run_k(), entries.stored_k(), p.head_dim, scratch.decoded);
    k_rows.format->load_tile(k_rows.rows, keys, p.head_dim, t.keys);
    if (by_list) kernels.rotate_tile(t.keys, low, rope.pairs, rope.second, rope.step);
    for (uint32_t row = 0; row < of.rows; ++row) {
      const uint32_t seen = first_rank + row + 1, first = row * p.group;
      std::fill_n(t.visible + first, p.group, seen > first_key ? std::min(keys, seen - first_key) : 0);
      if (by_list && seen > first_key)
        rotate_for_tile(rope, seen - 1, first_key, p.group, width, t.q + first * width, t.angles,
                        t.rotated + first * width);
    }
    kernels.multiply_tile(vectors, p.head_dim, by_list ? t.rotated : t.q, width, t.keys, t.scores);
    cap_scores(t, vectors, p.cap);
    kernels.soften(t.scores, vectors, t.visible, t.peak, t.sum, t.out, width);
    const TileRows v_rows(v, stored, keys, entries.run_v(), entries.stored_v(), p.head_dim, scratch.decoded);
    v_rows.format->add_rows(vectors, keys, t.scores, v_rows.rows, p.head_dim, t.out, width);
  }
}

// The shared scratch, and where the workers' scratch begins.
struct Shared {
  ScratchLayout layout;
  PartScratch parts;
  Shared(const Context& ctx, const AttendAll& o)
      : layout(ctx.scratch.data()), parts(layout, o.p.heads, o.p.group, o.p.head_dim) {
    if (o.p.rope.mode == kRopeList) transpose_low_half(o.rope, o.p.rope, parts.low);
  }
  StoredTileScratch of_worker(const Context& ctx, uint32_t worker, uint32_t vectors,
                              uint32_t head_dim) const {
    return worker_scratch<StoredTileScratch>(ctx.scratch.data() + layout.used(), worker, vectors, head_dim);
  }
};

// A generated token: workers attend to parts of the entries, as attention over the pool does.
void attend_in_parts(const Context& ctx, const AttendAll& o) {
  const AttendAllParams& p = o.p;
  const Shared shared(ctx, o);
  const uint32_t width = padded_width(p.head_dim);
  uint32_t most = 0;
  for (uint32_t head = 0; head < p.heads; ++head)
    most = std::max(most, Entries(ctx, o, p.first_head + head).work());
  const uint32_t part = std::max(4 * kTileKeys, static_cast<uint32_t>(ceil_div(most, kMaxParts)));
  const auto n_parts = static_cast<uint32_t>(ceil_div(most, part));
  ctx.threads.run(p.heads * n_parts, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = item / n_parts, number = item % n_parts;
    const Entries entries(ctx, o, p.first_head + head);
    const StoredTileScratch scratch = shared.of_worker(ctx, worker, p.group, p.head_dim);
    attend(ctx, o, entries, {p.first_head + head, 0, 1}, entries.after(number * part),
           entries.after((number + 1) * part), shared.parts.low, scratch);
    keep_part(shared.parts, head, number, p.group, width, scratch.tile);
  });
  ctx.threads.run(p.heads * p.group, [&](uint32_t query, uint32_t) {
    const uint32_t of_layer = p.first_head * p.group + query;
    combine_parts(shared.parts, query / p.group, n_parts, p.group, query % p.group, width, o.sinks, of_layer,
                  p.head_dim, data<float>(o.y) + of_layer * p.head_dim);
  });
}

// The rows of a chunk: workers take blocks of rows.
void attend_in_blocks(const Context& ctx, const AttendAll& o) {
  const AttendAllParams& p = o.p;
  const Shared shared(ctx, o);
  const uint32_t width = padded_width(p.head_dim), block = attention_rows(p.group);
  const auto blocks = static_cast<uint32_t>(ceil_div(ctx.step.n_rows, block));
  for_share(ctx, p.heads * blocks, [&](uint32_t item, uint32_t worker) {
    const uint32_t first_row = item / p.heads * block, head = p.first_head + item % p.heads;
    const Queries of{head, first_row, std::min(block, ctx.step.n_rows - first_row)};
    const Entries entries(ctx, o, head);
    const StoredTileScratch scratch = shared.of_worker(ctx, worker, block * p.group, p.head_dim);
    attend(ctx, o, entries, of, {}, entries.end(), shared.parts.low, scratch);
    for (uint32_t row = 0, vector = 0; row < of.rows; ++row)
      for (uint32_t h = 0; h < p.group; ++h, ++vector) {
        const uint32_t query = head * p.group + h;
        const LogSum sink = sink_of(o.sinks, query),
                     keys{scratch.tile.peak[vector], scratch.tile.sum[vector]};
        const LogSum all = merged(keys, sink, std::exp2(gap(keys, sink)));
        write_scaled(scratch.tile.out + vector * width, std::exp2(keys.peak - all.peak) / all.sum, p.head_dim,
                     data<float>(o.y) + uint64_t(first_row + row) * p.y_stride + query * p.head_dim);
      }
  });
}

}  // namespace

void attend_all(const Context& ctx, const AttendAll& o) {
  const uint32_t* const count = data<uint32_t>(o.count) + o.p.first_head;
  const bool stored = std::any_of(count, count + o.p.heads, [](uint32_t pages) { return pages != 0; });
  if (o.p.if_stored && !stored) return;
  o.chunk_k ? attend_in_blocks(ctx, o) : attend_in_parts(ctx, o);
}

}  // namespace thimble::cpu
