// Products of experts in programs of more than one row: in tiles of at most 128 slots of one expert, with
// some columns of y for all experts at a time. W is first converted to f16 in scratch, if there are matrix
// units or experts with more than one tile of slots; x is converted only for matrix units. The slots'
// contributions to rows of y stay in scratch until all slots of a row are done.
#include <algorithm>
#include <cinttypes>
#include <optional>

#include "backends/vulkan/dense/experts.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint64_t kWBytes = 128ull << 20;     // of W as f16, unless 128 rows take more
constexpr uint64_t kPartsBytes = 32ull << 20;  // of the slots' contributions, unless 128 columns take more
constexpr uint64_t kAlignment = 256;           // in scratch, so that descriptors do not overlap

uint32_t groups(uint32_t n, uint32_t each) { return static_cast<uint32_t>(ceil_div(n, each)); }

// The shape of a product, which determines the layout of scratch.
struct Shape {
  uint32_t in_cols, out_cols, matrices, experts, chosen;
  bool of_tokens;  // x has a row for each token; otherwise y has, and slots add to it
};
Shape shape_of(const ExpertProduct& p) {
  return {p.in_cols, p.out_cols, p.up ? 2u : 1u, p.experts, p.chosen, p.of_tokens};
}

// The layout of scratch: W in turns, x and the inverse factors of its rows, each row's slots, parts of y.
struct Scratch {
  uint32_t depth;  // f16 numbers per row of x and W
  uint32_t unit;   // columns of y per tile, for a tile with 128 rows of W
  uint32_t turns;  // buffers for W: one is filled while the other is multiplied; 0: W is multiplied as stored
  uint32_t x_rows = 0;
  uint32_t slots, chosen;
  uint64_t w_bytes = 0;     // per buffer
  uint32_t most_cols;       // columns that the buffers for parts can hold
  uint64_t part_bytes = 0;  // per buffer, of which there are two

  Scratch(const Limits& l, uint32_t rows, const Shape& s)
      : depth(static_cast<uint32_t>(round_up(s.in_cols, kDepth))),
        slots(rows * s.chosen),
        chosen(s.chosen),
        most_cols(s.out_cols) {
    const bool units = has_matrices(l);
    unit = kTile / (units ? s.matrices : 1);
    turns = units ? 2 : uint64_t(slots) > uint64_t(s.experts) * most_tile_rows(l) ? 1 : 0;
    if (units) x_rows = s.of_tokens ? rows : slots;
    const uint64_t row_bytes = depth * sizeof(uint16_t);
    if (turns) {
      const uint64_t most = std::min(kWBytes / turns, largest_part(l)) / kAlignment * kAlignment;
      w_bytes = std::min(std::max(most, kTile * row_bytes),
                         s.experts * round_up(uint64_t(s.matrices) * s.out_cols, kTile) * row_bytes);
    }
    if (s.of_tokens) return;
    const uint64_t col_bytes = slots * sizeof(float);
    // Programs of fewer rows need less.
    part_bytes = round_up(std::max(std::min({kPartsBytes / 2, largest_part(l), s.out_cols * col_bytes}),
                                   std::min(kTile, s.out_cols) * col_bytes),
                          kAlignment);
    if (const uint64_t fit = part_bytes / col_bytes; fit < s.out_cols)
      most_cols = static_cast<uint32_t>(fit / kTile * kTile);
  }

  uint64_t x_bytes() const { return round_up(uint64_t(x_rows) * depth * sizeof(uint16_t), kAlignment); }
  uint64_t scale_bytes() const { return round_up(x_rows * sizeof(float), kAlignment); }
  uint64_t list_bytes() const { return part_bytes ? round_up(slots * sizeof(uint32_t), kAlignment) : 0; }
  uint64_t bytes() const {
    return turns * w_bytes + x_bytes() + scale_bytes() + list_bytes() + 2 * part_bytes;
  }

  // The buffers for W are at both ends of scratch, so that the second buffer of one product does not overlap
  // with the first of the next.
  View w(const View& all, uint32_t turn) const {
    const uint64_t last = (all.bytes - w_bytes) / kAlignment * kAlignment;
    return all.slice(turn % turns == 0 ? 0 : last, w_bytes);
  }
  View x(const View& all) const { return all.slice(behind_w(), x_bytes()); }
  View scales(const View& all) const { return all.slice(behind_w() + x_bytes(), scale_bytes()); }
  View slots_of_rows(const View& all) const {
    return all.slice(behind_w() + x_bytes() + scale_bytes(), list_bytes());
  }
  View part(const View& all, uint32_t turn) const {
    return all.slice(behind_w() + x_bytes() + scale_bytes() + list_bytes() + turn % 2 * part_bytes,
                     part_bytes);
  }

 private:
  uint64_t behind_w() const { return turns ? w_bytes : 0; }
};

// How many experts and columns of y are multiplied at a time.
struct Pieces {
  uint32_t experts;
  uint32_t cols;  // 0: not even one tile fits
  Pieces(const ExpertProduct& p, const Limits& l, const Scratch& s) {
    const ExpertWindow window(l, p);
    const uint64_t matrices = p.up ? 2 : 1, row_bytes = s.depth * sizeof(uint16_t);
    uint64_t fit = round_up(p.out_cols, s.unit);
    const auto at_most = [&](uint64_t limit) { fit = std::min(fit, limit / s.unit * s.unit); };
    if (s.most_cols < p.out_cols) at_most(s.most_cols);
    if (window.rows < p.out_cols) at_most(window.rows);
    experts = window.experts;
    if (s.turns) {
      experts = static_cast<uint32_t>(std::min<uint64_t>(experts, s.w_bytes / (kTile * row_bytes)));
      at_most(s.w_bytes / (experts * matrices * row_bytes));
    }
    cols = fit ? static_cast<uint32_t>(round_up(ceil_div(p.out_cols, ceil_div(p.out_cols, fit)), s.unit)) : 0;
  }
};

void dequantize(Recording& r, const Scratch& s, const ExpertProduct& p, const ExpertPart& part,
                const Weight& w, const View& to) {
  constexpr uint32_t kEach = 8 * 128;  // elements per workgroup
  const DequantizeParams params{.in_cols = w.cols,
                                .depth = s.depth,
                                .row_bytes = static_cast<uint32_t>(dtype_bytes(w.type, w.cols)),
                                .first_expert = part.first_expert,
                                .from_rows = p.matrix_rows,
                                .to_rows = part.matrix_rows};
  r.dispatch(Shader::kDequantizeExperts, {static_cast<uint32_t>(w.type)},
             {reads(matrices_of(p, w, part)), writes(to), reads(r.code_books()), reads(p.first)}, params,
             groups(s.depth, kEach), part.cols, part.experts);
}

// Converts the part's W into a buffer in scratch: one matrix of all experts, then the other.
void fill(Recording& r, const Scratch& s, const ExpertProduct& p, uint32_t cols, ExpertPart& part,
          const View& place) {
  const uint64_t bytes = uint64_t(part.experts) * cols * s.depth * sizeof(uint16_t);
  part.matrix_rows = cols;
  dequantize(r, s, p, part, p.w, place.slice(0, bytes));
  if (p.up) dequantize(r, s, p, part, p.up, place.slice(bytes, bytes));
  static_cast<View&>(part.w) = place;
  part.w.type = DType::kF16;
  part.w.cols = s.depth;
  part.w.rows = (p.up ? 2 : 1) * part.experts * cols;
}

void scale_rows(Recording& r, const Scratch& s, const ExpertProduct& p) {
  constexpr uint32_t kThreads = 128;
  const View x = s.x(r.scratch()), scales = s.scales(r.scratch());
  const uint64_t from = p.in_cols * sizeof(float), to = s.depth * sizeof(uint16_t);
  const uint64_t most = largest_part(r.limits()) / std::max(from, to);
  for (uint32_t first = 0, rows = 0; first < s.x_rows; first += rows) {
    rows = static_cast<uint32_t>(std::min<uint64_t>(s.x_rows - first, most));
    const ScaleRowsParams params{.each = p.of_tokens ? 1 : p.chosen,
                                 .in_cols = p.in_cols,
                                 .depth = s.depth,
                                 .x_stride = p.in_cols,
                                 .first_row = first,
                                 .rows = kStepRows};
    r.dispatch(Shader::kScaleRows, {kThreads},
               {reads(p.x.slice(first * from, rows * from)), writes(x.slice(first * to, rows * to)),
                writes(scales.slice(first * sizeof(float), rows * sizeof(float)))},
               params, rows);
  }
}

void find_slots(Recording& r, const Scratch& s, const ExpertProduct& p) {
  r.dispatch(Shader::kSlotsOfRows, {r.limits().subgroup_size, p.chosen},
             {reads(p.first), reads(p.row), writes(s.slots_of_rows(r.scratch()))},
             SlotsOfRowsParams{.experts = p.experts}, r.max_rows());
}

// The largest number of tiles with up to `rows` slots each.
uint32_t most_tiles(const Scratch& s, const ExpertProduct& p, uint32_t rows) {
  return s.slots / rows + std::min(s.slots, p.experts);
}

void multiply_on_units(Recording& r, const Scratch& s, const ExpertProduct& p, ExpertPart part) {
  const View& all = r.scratch();
  const uint32_t matrices = p.up ? 2 : 1;
  const uint64_t x_row = s.depth * sizeof(uint16_t);
  View x = s.x(all), scales = s.scales(all);
  if (!p.of_tokens) {
    x = x.slice(part.first_slot * x_row, part.slots * x_row);
    scales = scales.slice(part.first_slot * sizeof(float), part.slots * sizeof(float));
  }
  ExpertProductParams params = params_of(p, part);
  params.in_cols = s.depth;
  r.expect(2.0 / kUnitSpeed * matrices * part.slots * part.cols * s.depth);
  r.dispatch(Shader::kExpertProductCooperative, {0, bool(p.up), 4 * r.limits().subgroup_size},
             {reads(x), reads(part.w), reads(scale_or_bias(p.scale, p.bias, part)), writes(part.y),
              reads(scales), reads(p.first), reads(p.row), reads(scale_or_bias(p.up_scale, p.up_bias, part))},
             params, groups(matrices * part.cols, kTile), most_tiles(s, p, kTile));
}

void multiply_without_units(Recording& r, const Scratch& s, const ExpertProduct& p, const ExpertPart& part) {
  const View x = p.of_tokens ? p.x : slots_of(p.x, p.in_cols, part, 0, p.in_cols);
  // The tile size follows the average number of slots per expert.
  const ProductTile tile(r.limits(), groups(s.slots, p.experts));
  r.expect(2.0 * part.slots * part.cols * p.in_cols);
  r.dispatch(Shader::kExpertProduct,
             {static_cast<uint32_t>(part.w.type), p.activates, in_quads(x, p.in_cols, p.in_cols),
              tile.thread_rows, tile.thread_cols, ProductTile::kThreads, p.in_cols % kDepth == 0,
              in_eights(part.w), r.limits().subgroup_size},
             {reads(x), reads(part.w), reads(scale_or_bias(p.scale, p.bias, part)), writes(part.y), reads({}),
              reads(p.first), reads(p.row), reads({}), reads(r.code_books())},
             params_of(p, part), groups(part.cols, tile.cols()), most_tiles(s, p, tile.rows()));
}

// Multiplies all slots: as many at a time as a descriptor can cover and as take no longer than a dispatch
// may.
void multiply_slots(Recording& r, const Scratch& s, const ExpertProduct& p, ExpertPart part) {
  const uint64_t x_row = s.x_rows ? s.depth * sizeof(uint16_t) : p.in_cols * sizeof(float);
  const uint64_t row_bytes = std::max(p.of_tokens ? 0 : x_row, part.y_stride * sizeof(float));
  const double operations = 2.0 / (s.x_rows ? kUnitSpeed : 1) * (p.up ? 2 : 1) * part.cols * s.depth;
  const uint64_t in_time = uint64_t(r.most_operations() / operations) / kTile * kTile;
  const uint64_t most = std::min(largest_part(r.limits()) / row_bytes, std::max<uint64_t>(in_time, kTile));
  const View y = part.y;
  for (; part.first_slot < s.slots; part.first_slot += part.slots) {
    part.slots = static_cast<uint32_t>(std::min<uint64_t>(s.slots - part.first_slot, most));
    part.y = slots_of(y, part.y_stride, part, 0, part.cols);
    if (s.x_rows)
      multiply_on_units(r, s, p, part);
    else
      multiply_without_units(r, s, p, part);
  }
}

void add_experts(Recording& r, const Scratch& s, const ExpertProduct& p, const ExpertPart& part) {
  constexpr uint32_t kThreads = 128;
  r.dispatch(Shader::kAddExperts, {p.chosen},
             {reads(part.y), reads(s.slots_of_rows(r.scratch())), reads(p.weight),
              writes(p.y.slice(part.col * sizeof(float), p.y.bytes - part.col * sizeof(float)))},
             AddExpertsParams{.cols = part.cols, .y_stride = p.out_cols}, groups(part.cols, kThreads),
             r.max_rows());
}

}  // namespace

void multiply_tiles(Recording& r, const ExpertProduct& p) {
  const Scratch s(r.limits(), r.max_rows(), shape_of(p));
  const Pieces pieces(p, r.limits(), s);
  if (s.bytes() > r.scratch().bytes)
    return r.fail(error(Code::kInternal,
                        "a product of experts needs %" PRIu64 " bytes of scratch, not %" PRIu64, s.bytes(),
                        r.scratch().bytes));
  if (!pieces.cols)
    return r.fail(error(Code::kUnsupported,
                        "experts of [%u][%u] are too large for the device; use --device cpu", p.out_cols,
                        p.in_cols));
  std::optional<ExpertPart> to_add;  // a part that was multiplied but not yet added
  const auto add_last = [&] {
    if (to_add) add_experts(r, s, p, *to_add);
    to_add.reset();
  };
  for (uint32_t col = 0, turn = 0; col < p.out_cols; col += pieces.cols, ++turn) {
    ExpertPart part{.col = col, .cols = std::min(pieces.cols, p.out_cols - col)};
    const bool adds = bool(p.weight);
    part.y_stride = adds ? part.cols : p.out_cols;
    part.y =
        adds ? s.part(r.scratch(), turn) : p.y.slice(col * sizeof(float), p.y.bytes - col * sizeof(float));
    for (; part.first_expert < p.experts; part.first_expert += part.experts) {
      part.experts = std::min(pieces.experts, p.experts - part.first_expert);
      // W comes first, because it can be converted while the previous ops are still running.
      if (s.turns) {
        fill(r, s, p, pieces.cols, part, s.w(r.scratch(), r.turn()));
      } else {
        part.w = matrices_of(p, p.w, part);
        part.matrix_rows = p.matrix_rows;
      }
      add_last();
      if (col == 0 && part.first_expert == 0) {
        if (s.x_rows) scale_rows(r, s, p);
        if (adds) find_slots(r, s, p);
      }
      multiply_slots(r, s, p, part);
    }
    if (adds) to_add = part;
  }
  add_last();
}

uint64_t expert_scratch(const ModelShape& m, const SessionShape& s, const Limits& l) {
  if (!m.experts) return 0;
  const uint32_t rows = std::max(s.chunk, 1u), matrices = has_matrices(l) ? 2 : 1;
  const Shape up{m.d_model, m.d_ff, matrices, m.experts, m.chosen_experts, true},
      down{m.d_ff, m.d_model, 1, m.experts, m.chosen_experts, false};
  return std::max(Scratch(l, rows, up).bytes(), Scratch(l, rows, down).bytes());
}

}  // namespace thimble::vulkan
