// expert_glu and expert_linear: by products of vectors in programs of one row, else in tiles of an expert's
// slots, with W as it is. expert_linear leaves what the slots add in scratch, some columns at a time, and
// adds it up row by row.
#include <algorithm>
#include <cinttypes>
#include <numeric>

#include "backends/vulkan/dense/product.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint64_t kPartsBytes = 32 << 20;  // of slots in scratch at a time, unless kTile columns are more

uint32_t groups(uint32_t n, uint32_t each) { return static_cast<uint32_t>(ceil_div(n, each)); }

// y[slot][c] = x w[c] + bias[c] of the slot's expert, or act(y) times that, or act(x w + bias) times
// (x up + up_bias).
struct ExpertProduct {
  View x;
  Weight w, up;        // [experts * out_cols][in_cols]; up is empty, or of w's type
  View bias, up_bias;  // f32 [experts][out_cols], or empty
  View first, row;
  View y;  // [slots][y_stride], whose column 0 is first_col
  uint32_t in_cols, out_cols, experts, slots, y_stride;
  bool of_tokens = false, activates = false;  // x has a row for each token, not for each slot
  uint32_t act = 0;
  uint32_t first_col = 0, cols = out_cols;  // of y to be made
};

// What a dispatch sees of one.
struct Part {
  uint32_t first_expert, experts, col, cols, first_slot, slots;
};

// The experts' rows of a matrix for the part's columns, and what lies between them.
View matrices_of(const ExpertProduct& p, const Weight& w, const Part& part) {
  if (!w) return w;
  const uint64_t row_bytes = dtype_bytes(w.type, w.cols), rows = uint64_t(part.experts - 1) * p.out_cols;
  return w.slice((uint64_t(part.first_expert) * p.out_cols + part.col) * row_bytes,
                 (rows + part.cols) * row_bytes);
}

void dispatch(Recording& r, const ExpertProduct& p, const Part& part) {
  const auto floats = [](const View& v, uint64_t first) {
    return v ? v.slice(first * sizeof(float), v.bytes - first * sizeof(float)) : v;
  };
  const auto slots = [&](const View& v, uint64_t stride, uint64_t col, uint64_t cols) {
    return v.slice((part.first_slot * stride + col) * sizeof(float),
                   ((part.slots - 1) * stride + cols) * sizeof(float));
  };
  const View x = p.of_tokens ? p.x : slots(p.x, p.in_cols, 0, p.in_cols);
  const ExpertProductParams params{.in_cols = p.in_cols,
                                   .out_cols = part.cols,
                                   .x_stride = p.in_cols,
                                   .y_stride = p.y_stride,
                                   .row_bytes = static_cast<uint32_t>(dtype_bytes(p.w.type, p.w.cols)),
                                   .matrix_rows = p.out_cols,
                                   .experts = p.experts,
                                   .first_expert = part.first_expert,
                                   .seen_experts = part.experts,
                                   .first_slot = part.first_slot,
                                   .seen_slots = part.slots,
                                   .of_tokens = p.of_tokens,
                                   .act = p.act,
                                   .has_bias = p.bias ? 1u : 0u,
                                   .has_up_bias = p.up_bias ? 1u : 0u};
  const auto record = [&](Shader shader, std::initializer_list<uint32_t> constants, uint32_t across,
                          uint32_t down) {
    r.dispatch(
        shader, constants,
        {reads(x), reads(matrices_of(p, p.w, part)), reads(floats(p.bias, part.col)),
         writes(slots(p.y, p.y_stride, part.col - p.first_col, part.cols)), reads(matrices_of(p, p.up, part)),
         reads(p.first), reads(p.row), reads(floats(p.up_bias, part.col)), reads(r.code_books())},
        params, across, down);
  };
  const uint32_t type = static_cast<uint32_t>(p.w.type), lanes = r.limits().subgroup_size;
  const bool quads = in_quads(x, p.in_cols, p.in_cols);
  if (by_vectors(r, kStepRows)) {
    const uint32_t matrices = p.up ? 2 : 1;
    Weight multiplied = p.w;
    multiplied.rows = part.slots * part.cols;
    const Matvec m(r.limits(), multiplied, matrices);
    return record(m.digits ? Shader::kExpertMatvecDigits : Shader::kExpertMatvec,
                  {type, p.activates, quads, m.lines, 1, matrices, m.threads, lanes, m.together},
                  groups(part.cols, m.lines / matrices), part.slots);
  }
  // Tiles are as large as the slots that an expert has on average.
  const ProductTile tile(r.limits(), groups(p.slots, p.experts));
  const uint32_t tiles = p.slots / tile.rows() + std::min(p.slots, p.experts);
  r.expect(2.0 * part.slots * part.cols * p.in_cols);
  record(Shader::kExpertProduct,
         {type, p.activates, quads, tile.thread_rows, tile.thread_cols, ProductTile::kThreads,
          p.in_cols % kDepth == 0, in_eights(p.w), lanes},
         groups(part.cols, tile.cols()), tiles);
}

// All of its columns, in parts that the device can show a shader, and that take no longer than they may.
void multiply(Recording& r, const ExpertProduct& p) {
  constexpr uint64_t kAlignment = 16;  // of what a shader sees of the matrices
  const uint64_t most = largest_part(r.limits()), row_bytes = dtype_bytes(p.w.type, p.w.cols),
                 expert_bytes = p.out_cols * row_bytes,
                 step = kAlignment / std::gcd(kAlignment, expert_bytes);
  uint64_t experts = most / expert_bytes, cols = most / row_bytes;
  if (experts < p.experts) experts = std::max<uint64_t>(experts, 1) / step * step;
  const uint64_t slots = most / sizeof(float) / std::max(p.in_cols, p.y_stride);
  if (!by_vectors(r, kStepRows))
    cols = std::min(cols,
                    std::max<uint64_t>(uint64_t(r.most_operations() / (2.0 * p.slots * p.in_cols)), kTile));
  cols = std::min<uint64_t>(cols, r.limits().max_groups);
  if (cols < p.cols) cols = cols / kTile * kTile;
  if (!experts || !cols || !slots)
    return r.fail(error(Code::kUnsupported,
                        "experts of [%u][%u] are too large for the device; use --device cpu", p.out_cols,
                        p.in_cols));
  const auto now = [](uint32_t left, uint64_t at_once) {
    return static_cast<uint32_t>(std::min<uint64_t>(left, at_once));
  };
  Part part{};
  for (part.first_slot = 0; part.first_slot < p.slots; part.first_slot += part.slots) {
    part.slots = now(p.slots - part.first_slot, slots);
    for (part.first_expert = 0; part.first_expert < p.experts; part.first_expert += part.experts) {
      part.experts = now(p.experts - part.first_expert, experts);
      for (part.col = p.first_col; part.col < p.first_col + p.cols; part.col += part.cols) {
        part.cols = now(p.first_col + p.cols - part.col, cols);
        dispatch(r, p, part);
      }
    }
  }
}

// Columns of y whose parts lie in scratch at a time.
uint32_t columns_at_once(uint64_t slots, uint32_t out_cols) {
  const uint64_t fit = kPartsBytes / (slots * sizeof(float)) / kTile * kTile;
  return static_cast<uint32_t>(std::min<uint64_t>(std::max<uint64_t>(fit, kTile), out_cols));
}

}  // namespace

void expert_glu(Recording& r, const ExpertGlu& op) {
  const ExpertGluParams& p = op.p;
  ExpertProduct product{.x = op.x,
                        .w = op.gate,
                        .up = {},
                        .bias = op.gate_bias,
                        .up_bias = {},
                        .first = op.first,
                        .row = op.row,
                        .y = op.h,
                        .in_cols = p.in_cols,
                        .out_cols = p.out_cols,
                        .experts = p.experts,
                        .slots = r.max_rows() * p.chosen,
                        .y_stride = p.out_cols,
                        .of_tokens = true,
                        .act = p.act};
  // One row is read once for both matrices; else the gate goes where h will be.
  if (by_vectors(r, kStepRows) && op.gate.type == op.up.type) {
    product.up = op.up;
    product.up_bias = op.up_bias;
    return multiply(r, product);
  }
  multiply(r, product);
  product.w = op.up;
  product.bias = op.up_bias;
  product.activates = true;
  multiply(r, product);
}

void expert_linear(Recording& r, const ExpertLinear& op) {
  constexpr uint32_t kThreads = 128;
  const ExpertLinearParams& p = op.p;
  const uint32_t slots = r.max_rows() * p.chosen, most = columns_at_once(slots, p.out_cols);
  for (uint32_t col = 0; col < p.out_cols; col += most) {
    const uint32_t cols = std::min(most, p.out_cols - col);
    const View parts = r.scratch().slice(0, uint64_t(slots) * cols * sizeof(float));
    multiply(r, {.x = op.h,
                 .w = op.w,
                 .up = {},
                 .bias = op.bias,
                 .up_bias = {},
                 .first = op.first,
                 .row = op.row,
                 .y = parts,
                 .in_cols = p.in_cols,
                 .out_cols = p.out_cols,
                 .experts = p.experts,
                 .slots = slots,
                 .y_stride = cols,
                 .first_col = col,
                 .cols = cols});
    const View y = op.y.slice(col * sizeof(float), op.y.bytes - col * sizeof(float));
    r.dispatch(Shader::kAddExperts, {p.chosen, r.limits().subgroup_size, r.max_rows() == 1},
               {reads(parts), reads(op.first), reads(op.row), reads(op.weight), writes(y)},
               AddExpertsParams{.cols = cols, .y_stride = p.out_cols, .experts = p.experts},
               groups(cols, kThreads), r.max_rows());
  }
}

uint64_t expert_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  if (!m.experts) return 0;
  const uint64_t slots = uint64_t(s.chunk) * m.chosen_experts;
  // Programs of fewer rows have more columns at once.
  return std::max(slots * kTile * sizeof(float),
                  std::min<uint64_t>(kPartsBytes, slots * m.d_model * sizeof(float)));
}

}  // namespace thimble::vulkan
