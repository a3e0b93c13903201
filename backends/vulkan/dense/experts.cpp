// expert_glu and expert_linear, and their products for a single row.
#include "backends/vulkan/dense/experts.h"

#include <algorithm>
#include <numeric>

#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

uint32_t groups(uint32_t n, uint32_t each) { return static_cast<uint32_t>(ceil_div(n, each)); }

// Threads that multiply the slots of a sum at once. A thread uses at most 40 bytes of shared memory, and as
// many registers as 512 threads can have.
uint32_t most_threads(const Limits& l) {
  return std::min({l.max_group_threads, l.max_shared_bytes / 48, 512u});
}

// Threads wait for a line while others are multiplied, so a workgroup takes few lines if the work takes only
// microseconds, and a few more of MXFP4, which takes longer. Fetched lines of MXFP4, q4_K and q5_K need few
// registers, so more of them are in flight.
Matvec matvec_of(const Limits& l, const Weight& w, uint32_t matrices) {
  Matvec m(l, w, matrices);
  const bool has_room = m.lines > 4;
  m.lines = std::min(m.lines, 4 * matrices);
  if (has_room && (w.type == DType::kQ4_K || w.type == DType::kQ5_K)) m.together = 2;
  if (has_room && w.type == DType::kMXFP4) m.lines = 12, m.together = 4;
  return m;
}

void dispatch_matvec(Recording& r, const ExpertProduct& p, const ExpertPart& part) {
  const uint32_t matrices = p.up ? 2 : 1;
  const Matvec m = matvec_of(r.limits(), p.w, matrices);
  const bool adds = bool(p.weight), prepares = bool(p.prepares.row);
  const uint32_t teams = adds ? std::clamp(most_threads(r.limits()) / m.threads, 1u, p.chosen) : 1;
  const bool routes = p.route;
  const Route route = routes ? *p.route : Route{};
  // The shader has operands that it writes in the same places.
  const auto reads_or_writes = [](const View& operand) { return Operand{operand, !operand}; };
  r.dispatch(m.digits  ? Shader::kExpertMatvecDigits
             : m.books ? Shader::kExpertMatvecBooks
                       : Shader::kExpertMatvec,
             {static_cast<uint32_t>(p.w.type), p.activates, in_quads(part.x, p.in_cols, p.in_cols), m.lines,
              1, matrices, m.threads * teams, r.limits().subgroup_size, m.together, adds ? p.chosen : 0,
              teams, prepares, routes ? p.experts : 1, routes ? p.chosen : 0, route.bias ? 1u : 0u,
              std::max(route.p.groups, 1u), route.p.groups_used},
             {reads(part.x), reads(part.w), reads(scale_or_bias(p.scale, p.bias, part)), writes(part.y),
              prepares ? writes(p.prepares.squares) : reads_or_writes(part.up), Operand{p.first, routes},
              prepares ? writes(p.prepares.row) : writes(route.row),
              reads(prepares ? p.norm_weight : scale_or_bias(p.up_scale, p.up_bias, part)),
              routes ? writes(route.weight) : reads_or_writes(p.weight), reads(route.logits),
              reads(route.bias), reads(r.code_books())},
             params_of(p, part), groups(part.cols, m.lines / matrices), adds ? 1 : part.slots);
}

// Multiplies the slots of a single row.
void multiply_vectors(Recording& r, const ExpertProduct& p) {
  const ExpertWindow window(r.limits(), p);
  for (uint32_t first = 0; first < p.experts; first += window.experts)
    for (uint32_t col = 0; col < p.out_cols; col += window.rows) {
      ExpertPart part{.col = col,
                      .cols = std::min(window.rows, p.out_cols - col),
                      .first_slot = 0,
                      .slots = p.chosen,
                      .first_expert = first,
                      .experts = std::min(window.experts, p.experts - first)};
      part.w = matrices_of(p, p.w, part);
      part.up = matrices_of(p, p.up, part);
      part.matrix_rows = p.matrix_rows;
      part.x = p.x;
      part.y = p.weight ? vectors_of(p.y, part) : slots_of(p.y, p.out_cols, part, col, part.cols);
      part.y_stride = p.out_cols;
      dispatch_matvec(r, p, part);
    }
}

// Whether that takes a single dispatch.
bool is_shown_at_once(const Recording& r, const ExpertProduct& p) {
  const ExpertWindow window(r.limits(), p);
  return window.experts == p.experts && window.rows == p.out_cols;
}

void multiply(Recording& r, const ExpertProduct& p) {
  if (r.max_rows() == 1)
    multiply_vectors(r, p);
  else
    multiply_tiles(r, p);
}

}  // namespace

ExpertProductParams params_of(const ExpertProduct& p, const ExpertPart& part) {
  const auto kind = [](const View& scale, const View& bias) {
    return scale ? kHasScale : bias ? kHasBias : 0;
  };
  return {.in_cols = p.in_cols,
          .out_cols = part.cols,
          .x_stride = p.in_cols,
          .y_stride = part.y_stride,
          .row_bytes = static_cast<uint32_t>(dtype_bytes(part.w.type, part.w.cols)),
          .matrix_rows = part.matrix_rows,
          .bias_rows = p.out_cols,
          .experts = p.experts,
          .first_expert = part.first_expert,
          .seen_experts = part.experts,
          .first_slot = part.first_slot,
          .seen_slots = part.slots,
          .of_tokens = p.of_tokens,
          .act = p.act,
          .has_bias = kind(p.scale, p.bias),
          .has_up_bias = kind(p.up_scale, p.up_bias),
          .route_kind = p.route ? p.route->p.kind : 0,
          .route_share = p.route ? p.route->p.share : 0,
          .route_scale = p.route ? p.route->p.scale : 0};
}

Weight matrices_of(const ExpertProduct& p, const Weight& w, const ExpertPart& part) {
  const uint64_t first = uint64_t(part.first_expert) * p.matrix_rows + part.col;
  return rows_of(w, static_cast<uint32_t>(first), (part.experts - 1) * p.matrix_rows + part.cols);
}
View slots_of(const View& v, uint64_t stride, const ExpertPart& part, uint64_t col, uint64_t cols) {
  return v.slice((part.first_slot * stride + col) * sizeof(float),
                 ((part.slots - 1) * stride + cols) * sizeof(float));
}
View vectors_of(const View& v, const ExpertPart& part) {
  return v ? v.slice(part.col * sizeof(float), v.bytes - part.col * sizeof(float)) : v;
}

View scale_or_bias(const View& scale, const View& bias, const ExpertPart& part) {
  return scale ? scale : vectors_of(bias, part);
}

ExpertWindow::ExpertWindow(const Limits& l, const ExpertProduct& p) : rows(p.out_cols) {
  constexpr uint64_t kAlignment = 16;  // of a shader's view of the matrices
  const uint64_t most = largest_part(l), of_w = dtype_bytes(p.w.type, p.w.cols),
                 of_up = p.up ? dtype_bytes(p.up.type, p.up.cols) : of_w, row_bytes = std::max(of_w, of_up),
                 step = kAlignment / std::gcd(kAlignment, p.matrix_rows * std::gcd(of_w, of_up));
  const uint64_t all_rows = most / row_bytes;
  uint64_t fit = all_rows < p.out_cols ? 0 : 1 + (all_rows - p.out_cols) / p.matrix_rows;
  if (fit < p.experts) fit = fit / step * step;
  // A window on some rows of one expert may begin at any of its rows.
  experts = static_cast<uint32_t>(std::clamp<uint64_t>(fit, 1, p.experts));
  const uint64_t most_rows = std::min<uint64_t>(fit ? p.out_cols : all_rows, l.max_groups);
  if (most_rows < p.out_cols) rows = static_cast<uint32_t>(most_rows / kTile * kTile);
}

// The product of the gate, or of the only matrix.
static ExpertProduct product_of(const ExpertGlu& op) {
  const ExpertGluParams& p = op.p;
  const bool gated = bool(op.gate);
  return {.x = op.x,
          .w = gated ? op.gate : op.up,
          .up = {},
          .bias = gated ? op.gate_bias : op.up_bias,
          .up_bias = {},
          .scale = gated ? op.gate_scale : op.up_scale,
          .up_scale = {},
          .first = op.first,
          .row = op.row,
          .weight = {},
          .y = op.h,
          .in_cols = p.in_cols,
          .out_cols = p.out_cols,
          .experts = p.experts,
          .chosen = p.chosen,
          .matrix_rows = p.out_cols + p.rows_between,
          .of_tokens = true,
          .act = p.act};
}

static void add_up(ExpertProduct& product, const ExpertGlu& op) {
  product.up = op.up;
  product.up_bias = op.up_bias;
  product.up_scale = op.up_scale;
}

void expert_glu(Recording& r, const ExpertGlu& op) {
  ExpertProduct product = product_of(op);
  if (!op.gate) return multiply(r, product);
  // A single row reads x once for both matrices, and matrix units compute both at once. Otherwise the gate is
  // written where h will be, and the second product multiplies it.
  if (by_matrices(r, kStepRows) || (by_vectors(r, kStepRows) && op.gate.type == op.up.type)) {
    add_up(product, op);
    return multiply(r, product);
  }
  multiply(r, product);
  product.w = op.up;
  product.bias = op.up_bias;
  product.scale = op.up_scale;
  product.activates = true;
  multiply(r, product);
}

bool routed_expert_glu(Recording& r, const Route& route, const ExpertGlu& op) {
  ExpertProduct product = product_of(op);
  if (op.gate) {
    if (op.gate.type != op.up.type) return false;
    add_up(product, op);
  }
  if (route.each || !is_shown_at_once(r, product)) return false;
  product.route = &route;
  multiply_vectors(r, product);
  return true;
}

static ExpertProduct product_of(const ExpertLinear& op) {
  return {.x = op.h,
          .w = op.w,
          .up = {},
          .bias = op.bias,
          .up_bias = {},
          .scale = op.scale,
          .up_scale = {},
          .first = op.first,
          .row = op.row,
          .weight = op.weight,
          .y = op.y,
          .in_cols = op.p.in_cols,
          .out_cols = op.p.out_cols,
          .experts = op.p.experts,
          .chosen = op.p.chosen,
          .matrix_rows = op.p.out_cols};
}

void expert_linear(Recording& r, const ExpertLinear& op) { multiply(r, product_of(op)); }

bool expert_linear_before(Recording& r, const ExpertLinear& op, const RmsNorm& norm) {
  ExpertProduct product = product_of(op);
  if (!is_shown_at_once(r, product)) return false;
  product.prepares = PreparedNorm::in(r.scratch(), norm.p.cols);
  product.norm_weight = norm.weight;
  multiply_vectors(r, product);
  return true;
}

}  // namespace thimble::vulkan
