// Products of more than one row: W is converted to f16 in scratch, one slice of its rows after the other, and
// multiplied from there. This costs 2 bytes written and read per weight, on matrix units a tenth of the time
// to multiply 2048 rows. A product that converts W itself does so again for each of 16 tiles of rows.
//
// x is also converted to f16 in scratch for matrix units; without them it is used in place.
#include <algorithm>
#include <cinttypes>
#include <optional>

#include "backends/vulkan/dense/product.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint32_t kMostRows = 4096;            // rows of x in scratch at a time
constexpr uint32_t kMostCols = 32768;           // columns of y at a time, limited by the size of a grid
constexpr uint64_t kSlotsBytes = 128ull << 20;  // of W, unless 128 rows take more
constexpr uint64_t kAlignment = 16;             // in scratch
// Workgroups that keep matrix units busy. If a product has fewer tiles, several workgroups share the depth of
// each: an H200 then reads 128 tokens in 27 ms instead of 64. Parts with less depth than kLeastDepth do not
// pay.
constexpr uint32_t kBusyGroups = 256, kLeastDepth = 256;

// The layout of scratch: x, the inverse factors of its rows, parts of y, and slots for W.
struct Scratch {
  uint32_t depth = 0;  // f16 numbers per row of x and W
  uint32_t rows = 0;   // rows of x at a time; 0: x is used in place
  uint32_t cols = 0;   // rows of W, or of both matrices, at a time: a multiple of kTile
  // With two slots, one is filled while the other is multiplied. Without matrix units filling takes a
  // hundredth of the time; one slot of twice the size then means fewer slices, each of which ends with a half
  // idle device.
  uint32_t slots = 0;
  // Per workgroup on matrix units: the whole depth, or part of it, which gives a part of y
  uint32_t depth_each = 0;

  uint32_t parts() const { return static_cast<uint32_t>(ceil_div(depth, depth_each)); }
  uint64_t x_bytes() const { return round_up(rows, kTile) * depth * sizeof(uint16_t); }
  uint64_t scale_bytes() const { return round_up(rows, kTile) * sizeof(float); }
  uint64_t part_bytes() const {
    return parts() > 1 ? parts() * round_up(rows, kTile) * cols * sizeof(float) : 0;
  }
  uint64_t slot_bytes() const { return uint64_t(cols) * depth * sizeof(uint16_t); }
  uint64_t bytes() const { return x_bytes() + scale_bytes() + part_bytes() + slots * slot_bytes(); }

  // The slots are at both ends of scratch, so that the second slot of one product does not overlap with the
  // first of the next.
  View x(const View& all) const { return all.slice(slot_bytes(), x_bytes()); }
  View scales(const View& all) const { return all.slice(slot_bytes() + x_bytes(), scale_bytes()); }
  View parts_of_y(const View& all) const {
    return all.slice(slot_bytes() + x_bytes() + scale_bytes(), part_bytes());
  }
  View slot(const View& all, uint32_t turn) const {
    const uint64_t last = (all.bytes - slot_bytes()) / kAlignment * kAlignment;
    return all.slice(turn % slots == 0 ? 0 : last, slot_bytes());
  }
  View rows_of_slot(const View& slot, uint32_t first, uint32_t count) const {
    const uint64_t row_bytes = depth * sizeof(uint16_t);
    return slot.slice(first * row_bytes, count * row_bytes);
  }
};

// For one or two matrices of `cols` rows, in slices of about equal size.
Scratch scratch_for(const Limits& l, uint32_t max_rows, uint32_t in_cols, uint32_t cols,
                    uint32_t matrices = 1) {
  Scratch s;
  s.depth = static_cast<uint32_t>(round_up(in_cols, kDepth));
  const bool units = has_matrices(l);
  s.rows = units ? std::min(max_rows, kMostRows) : 0;
  s.slots = units ? 2 : 1;
  // The source of a slice is at most twice as large, if it is f32.
  const uint64_t bytes = std::min(kSlotsBytes / s.slots, largest_part(l) / 2);
  const uint64_t fit = std::min<uint64_t>(bytes / (s.depth * sizeof(uint16_t)), kMostCols) / kTile * kTile;
  const uint64_t all = uint64_t(matrices) * cols, slices = ceil_div(all, std::max<uint64_t>(fit, kTile));
  s.cols = static_cast<uint32_t>(round_up(ceil_div(all, slices), kTile));
  s.depth_each = s.depth;
  if (units) {
    const uint64_t tiles = ceil_div(s.rows, kTile) * (s.cols / kTile);
    const uint64_t parts =
        std::min<uint64_t>(ceil_div(kBusyGroups, tiles), std::max(s.depth / kLeastDepth, 1u));
    s.depth_each = static_cast<uint32_t>(round_up(ceil_div(s.depth, parts), kDepth));
  }
  return s;
}

void dequantize(Recording& r, const Weight& w, uint32_t depth, const View& to) {
  constexpr uint32_t kEach = 8 * 128;  // elements per workgroup
  const DequantizeParams params{.in_cols = w.cols,
                                .depth = depth,
                                .row_bytes = static_cast<uint32_t>(dtype_bytes(w.type, w.cols)),
                                .first_expert = 0,
                                .from_rows = 0,
                                .to_rows = 0};
  r.dispatch(Shader::kDequantize, {static_cast<uint32_t>(w.type)},
             {reads(w), writes(to), reads(r.code_books())}, params,
             static_cast<uint32_t>(ceil_div(depth, kEach)), w.rows);
}

// Converts columns [col, end) of y, counted over all siblings.
void fill(Recording& r, const Scratch& s, std::span<const Product> siblings, uint32_t col, uint32_t end,
          const View& slot) {
  uint32_t first = 0;  // the sibling's first column
  for (const Product& p : siblings) {
    const uint32_t from = std::max(col, first), to = std::min(end, first + p.w.rows);
    if (from < to)
      dequantize(r, rows_of(p.w, from - first, to - from), s.depth,
                 s.rows_of_slot(slot, from - col, to - from));
    first += p.w.rows;
  }
}

// Converts the part's rows of x, for all slices.
void scale_rows(Recording& r, const Scratch& s, const Product& part, uint32_t rows) {
  constexpr uint32_t kThreads = 256;
  const View& all = r.scratch();
  const ScaleRowsParams params{.each = 1,
                               .in_cols = part.in_cols,
                               .depth = s.depth,
                               .x_stride = part.x_stride,
                               .first_row = part.first_row,
                               .rows = part.rows};
  r.dispatch(Shader::kScaleRows, {kThreads}, {reads(part.x), writes(s.x(all)), writes(s.scales(all))}, params,
             rows);
}

// The parameters of the shaders that compute a part of y.
ProductParams params_on_units(const Scratch& s, const Product& part) {
  ProductParams params = part.params();
  params.in_cols = s.depth;
  params.up_row = s.cols / 2;
  params.depth_each = s.depth_each;
  return params;
}

void multiply_on_units(Recording& r, const Scratch& s, const Product& part, uint32_t rows, const View& slot) {
  const View& all = r.scratch();
  const bool shared = s.parts() > 1;
  const uint64_t col_tiles = ceil_div((part.up ? 2 : 1) * part.w.rows, kTile),
                 row_tiles = ceil_div(rows, kTile);
  r.expect(2.0 / kUnitSpeed * static_cast<double>(row_tiles * col_tiles) * kTile * kTile * s.depth);
  r.dispatch(Shader::kProductCooperative, {0, bool(part.up), 4 * r.limits().subgroup_size},
             {reads(s.x(all)), reads(slot), reads(part.bias), writes(shared ? View{} : part.y),
              reads(s.scales(all)), writes(shared ? s.parts_of_y(all) : View{})},
             params_on_units(s, part), static_cast<uint32_t>(col_tiles), static_cast<uint32_t>(row_tiles),
             s.parts());
}

void add_parts(Recording& r, const Scratch& s, const Product& part, uint32_t rows) {
  constexpr uint32_t kThreads = 128;
  const View& all = r.scratch();
  r.dispatch(Shader::kAddParts, {0, bool(part.up)},
             {reads({}), reads({}), reads(part.bias), writes(part.y), reads(s.scales(all)),
              reads(s.parts_of_y(all))},
             params_on_units(s, part), static_cast<uint32_t>(ceil_div(part.w.rows, kThreads)), rows);
}

void multiply_without_units(Recording& r, const Scratch& s, Product part, const View& slot) {
  static_cast<View&>(part.w) = s.rows_of_slot(slot, 0, part.w.rows);
  part.w.type = DType::kF16;
  part.w.cols = s.depth;
  multiply_parts(r, part);
}

}  // namespace

uint64_t product_scratch(const ModelShape& m, const SessionShape& s, const Limits& l) {
  const uint32_t rows = std::max(s.chunk, 64u);
  if (!has_matrices(l) && rows <= most_tile_rows(l)) return 0;
  const uint32_t q_cols = m.heads * m.head_dim, kv_cols = m.kv_heads * m.head_dim,
                 qkv_cols = q_cols + 2 * kv_cols;
  const uint32_t delta_cols = m.delta_values * m.delta_width,
                 delta_qkv = 2 * m.delta_keys * m.delta_width + delta_cols;
  const bool has_gates = m.delta_values > 0;  // of attention and of shared experts
  const struct {
    uint32_t in_cols, cols, matrices = 1;
  } products[] = {{m.d_model, q_cols},
                  {m.d_model, kv_cols},
                  {m.d_model, q_cols + kv_cols},
                  {m.d_model, qkv_cols},
                  {m.d_model, 2 * kv_cols},
                  {q_cols, m.d_model},
                  {m.d_model, has_gates ? 2 * q_cols : 0},
                  {m.d_model, has_gates && m.d_ff_shared ? 1u : 0u},
                  {m.d_model, delta_qkv + delta_cols},
                  {delta_cols, m.d_model},
                  {m.d_ff, m.d_model},
                  {m.d_ff_shared, m.d_model},
                  {m.d_model, m.mixer_in},
                  {m.mixer_out, m.d_model},
                  {m.d_model, m.experts},
                  {m.retainer[0].cols, m.retainer[0].rows},
                  {m.retainer[1].cols, m.retainer[1].rows},
                  {m.d_model, m.d_ff, has_matrices(l) ? 2u : 1u},
                  {m.d_model, m.d_ff_shared, has_matrices(l) ? 2u : 1u}};
  uint64_t between = 0, slots_bytes = 0;  // between: the space between the slots
  for (const auto& p : products) {
    if (!p.in_cols || !p.cols) continue;
    // Programs of fewer rows have more parts of y.
    for (uint32_t tile = 0; tile < std::min(rows, kMostRows); tile += kTile) {
      const Scratch of = scratch_for(l, tile + kTile, p.in_cols, p.cols, p.matrices);
      between = std::max(between, of.x_bytes() + of.scale_bytes() + of.part_bytes());
      slots_bytes = std::max(slots_bytes, of.slots * of.slot_bytes());
    }
  }
  return between + slots_bytes;
}

void multiply_slices(Recording& r, std::span<const Product> siblings) {
  const Product& p = siblings[0];
  uint32_t all_cols = 0;
  for (const Product& sibling : siblings) all_cols += sibling.w.rows;
  const uint32_t all_rows = r.most_rows(p.rows), matrices = p.up ? 2 : 1;
  const Scratch s = scratch_for(r.limits(), r.max_rows(), p.in_cols, all_cols, matrices);
  if (s.bytes() > r.scratch().bytes)
    return r.fail(error(Code::kInternal,
                        "a product of %u columns needs %" PRIu64 " bytes of scratch, not %" PRIu64, p.in_cols,
                        s.bytes(), r.scratch().bytes));
  // Columns of y at a time
  const uint32_t most_rows = s.rows ? s.rows : all_rows, most_cols = s.cols / matrices;
  for (uint32_t row = 0; row < all_rows; row += most_rows) {
    const uint32_t rows = std::min(all_rows - row, most_rows);
    std::optional<Product> in_parts;  // the previous product, if its parts are still to be added
    const auto finish_last = [&] {
      if (in_parts) add_parts(r, s, *in_parts, rows);
      in_parts.reset();
    };
    for (uint32_t col = 0; col < all_cols; col += most_cols) {
      const uint32_t cols = std::min(all_cols - col, most_cols);
      const Product part = p.part(row, rows, col, cols);
      const View slot = s.slot(r.scratch(), r.turn());
      // W comes first: with two slots it can be converted while the previous slice, or the product that
      // computes x, is still running.
      fill(r, s, siblings, col, col + cols, slot);
      if (part.up) dequantize(r, part.up, s.depth, s.rows_of_slot(slot, most_cols, cols));
      if (!s.rows) {  // this is the only iteration over `row`
        multiply_without_units(r, s, part, slot);
        continue;
      }
      finish_last();
      if (col == 0) scale_rows(r, s, part, rows);
      multiply_on_units(r, s, part, rows, slot);
      if (s.parts() > 1) in_parts = part;
    }
    finish_last();
  }
}

}  // namespace thimble::vulkan
