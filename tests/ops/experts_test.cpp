// scale, route, expert_glu and expert_linear on every device, compared with plain loops in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/ops/op_test.h"
#include "tests/ops/random_matrix.h"

namespace thimble::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class Experts : public OpTest {
 protected:
  void size_for_experts(uint32_t experts, uint32_t chosen, uint32_t d_model, uint32_t d_ff, uint32_t chunk) {
    ModelShape m = model;
    m.experts = experts, m.chosen_experts = chosen, m.d_model = d_model, m.d_ff = d_ff;
    SessionShape s = session;
    s.chunk = chunk;
    size_for(m, s);
  }

  // room: rows that the program has in addition; each: whether there are factors of weights
  void check_route(uint32_t experts, uint32_t rows, const RouteParams& p, bool biased, uint32_t room = 2,
                   bool each = false);
  struct Shape {
    uint32_t experts, chosen, rows, in_cols, out_cols;
    DType type;
    uint32_t act = kActSilu;
    bool biased = false;
    uint32_t max_rows = 0;  // 0: two more than rows
    bool routed = false;    // the program also chooses the experts
    bool fused = false;     // gate and up are in one tensor
    bool scaled = false;    // the matrices have scales
    bool gated = true;
  };
  void check_experts(const Shape&);
};
THIMBLE_SHARED_OP_TESTS(Experts);

// The results of route, in double.
struct Routed {
  std::vector<uint32_t> first, row;
  std::vector<double> weight;
};

Routed routed(const std::vector<float>& logits, const std::vector<float>& bias, uint32_t rows,
              const RouteParams& p, const std::vector<float>& each = {}) {
  struct Slot {
    uint32_t expert, row;
    double weight;
  };
  std::vector<Slot> slots;
  for (uint32_t r = 0; r < rows; ++r) {
    const float* l = &logits[size_t(r) * p.experts];
    std::vector<double> share(l, l + p.experts);
    if (p.kind == kRouteSigmoid)
      for (double& s : share) s = 1 / (1 + std::exp(-s));
    if (p.kind == kRouteSqrtSoftplus)
      for (double& s : share) s = std::sqrt(std::log1p(std::exp(s)));
    if (p.kind == kRouteSoftmax) {
      const double peak = *std::max_element(share.begin(), share.end());
      for (double& s : share) s = std::exp(s - peak);
      const double sum = std::accumulate(share.begin(), share.end(), 0.0);
      for (double& s : share) s /= sum;
    }
    std::vector<uint32_t> order(p.experts);
    std::iota(order.begin(), order.end(), 0u);
    const auto preference = [&](uint32_t e) {
      if (bias.empty()) return p.groups ? share[e] : double{l[e]};
      return share[e] + double{bias[e]};
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return preference(a) > preference(b); });
    if (p.groups) {
      const auto group_of = [&](uint32_t e) { return e / (p.experts / p.groups); };
      std::vector<double> value(p.groups);
      std::vector<uint32_t> best(p.groups), counted(p.groups);
      for (const uint32_t e : order)
        if (counted[group_of(e)]++ < 2) value[group_of(e)] += preference(e);
      std::iota(best.begin(), best.end(), 0u);
      std::stable_sort(best.begin(), best.end(), [&](uint32_t a, uint32_t b) { return value[a] > value[b]; });
      best.resize(p.groups_used);
      std::erase_if(
          order, [&](uint32_t e) { return std::find(best.begin(), best.end(), group_of(e)) == best.end(); });
    }
    order.resize(p.chosen);
    double sum = 0;
    for (const uint32_t e : order) {
      if (p.kind == kRouteSoftmaxOfChosen) share[e] = std::exp(share[e] - double{l[order[0]]});
      sum += share[e];
    }
    const bool divides = p.share || p.kind == kRouteSoftmaxOfChosen;
    for (const uint32_t e : order)
      slots.push_back({e, r,
                       share[e] / (divides ? std::max(sum, 0x1p-14) : 1) * double{p.scale} *
                           (each.empty() ? 1 : double{each[e]})});
  }
  std::stable_sort(slots.begin(), slots.end(),
                   [](const Slot& a, const Slot& b) { return a.expert < b.expert; });
  Routed out{std::vector<uint32_t>(p.experts + 1), {}, {}};
  for (const Slot& s : slots) {
    for (uint32_t e = s.expert + 1; e <= p.experts; ++e) ++out.first[e];
    out.row.push_back(s.row);
    out.weight.push_back(s.weight);
  }
  return out;
}

void Experts::check_route(uint32_t experts, uint32_t rows, const RouteParams& p, bool biased, uint32_t room,
                          bool has_each) {
  SCOPED_TRACE(::testing::Message() << p.chosen << " of " << experts << ", " << rows << " rows, kind "
                                    << p.kind << ", share " << p.share << ", scale " << p.scale << ", bias "
                                    << biased << ", " << p.groups_used << " of " << p.groups
                                    << " groups, each " << has_each);
  clear();
  Random random{experts * 31 + rows + p.kind};
  const uint32_t max_rows = rows + room;
  const std::vector<float> logits = random.floats(size_t(rows) * experts, -6, 6),
                           bias = random.floats(biased ? experts : 0, -2, 2),
                           each = random.floats(has_each ? experts : 0, 0.5f, 2);
  size_for_experts(experts, p.chosen, 64, 64, max_rows);
  const View first = output<uint32_t>(experts + 1), row = output<uint32_t>(size_t(max_rows) * p.chosen),
             weight = output<float>(size_t(max_rows) * p.chosen);
  const Route op{input(padded_rows(logits, size_t(max_rows) * experts)),
                 biased ? input(bias) : View{},
                 first,
                 row,
                 weight,
                 p,
                 has_each ? input(each) : View{}};
  run({.n_rows = rows}, max_rows, [&](Recorder& r) { r.record(op); });
  const Routed want = routed(logits, bias, rows, p, each);
  ASSERT_EQ(get<uint32_t>(first), want.first);
  const std::vector<uint32_t> rows_of_slots = get<uint32_t>(row);
  const std::vector<float> weights = get<float>(weight);
  for (size_t i = 0; i < want.row.size(); ++i) {
    ASSERT_EQ(rows_of_slots[i], want.row[i]) << "slot " << i;
    // Exponentials of rounded differences below 12 are off by 12 and 4 ulp; a sum over the experts by half an
    // ulp for each.
    ASSERT_NEAR(weights[i], want.weight[i], want.weight[i] * (40 + experts) * 0x1p-23) << "slot " << i;
  }
}

TEST_P(Experts, AreChosenByTheirLogits) {
  for (const uint32_t kind : {kRouteSoftmax, kRouteSoftmaxOfChosen, kRouteSigmoid, kRouteSqrtSoftplus})
    for (const uint32_t share : {0u, 1u}) {
      check_route(8, 1, {.experts = 8, .chosen = 2, .kind = kind, .share = share, .scale = 1}, false);
      check_route(128, 33, {.experts = 128, .chosen = 8, .kind = kind, .share = share, .scale = 2.5f}, false);
      check_route(33, 70, {.experts = 33, .chosen = 5, .kind = kind, .share = share, .scale = 1}, true);
      check_route(33, 1, {.experts = 33, .chosen = 5, .kind = kind, .share = share, .scale = 1.5f}, true, 0);
      if (HasFatalFailure()) return;
    }
  check_route(1, 3, {.experts = 1, .chosen = 1, .kind = kRouteSoftmax, .share = 1, .scale = 1}, false);
  check_route(300, 5, {.experts = 300, .chosen = 300, .kind = kRouteSoftmax, .share = 1, .scale = 1}, false);
  check_route(32, 1000, {.experts = 32, .chosen = 4, .kind = kRouteSoftmaxOfChosen, .share = 0, .scale = 1},
              false);
}

TEST_P(Experts, AreChosenInTheBestGroups) {
  const struct {
    uint32_t experts, chosen, groups, used;
  } cases[] = {{256, 8, 8, 4}, {160, 6, 8, 3}, {8, 2, 4, 2}, {32, 4, 32, 5}, {33, 5, 3, 1}};
  for (const uint32_t kind : {kRouteSoftmax, kRouteSigmoid, kRouteSqrtSoftplus, kRouteSoftmaxOfChosen})
    for (const auto& c : cases) {
      if (is_slow() && c.experts != (kind == kRouteSigmoid ? 256u : kind == kRouteSoftmax ? 33u : 8u))
        continue;
      const RouteParams p{.experts = c.experts,
                          .chosen = c.chosen,
                          .kind = kind,
                          .share = 1,
                          .scale = 2.5f,
                          .groups = c.groups,
                          .groups_used = c.used};
      check_route(c.experts, 40, p, true);
      check_route(c.experts, 1, p, true, 0);
      check_route(c.experts, 5, p, false);
      if (HasFatalFailure()) return;
    }
}

TEST_P(Experts, HaveFactorsOfTheirWeights) {
  const RouteParams p{.experts = 33, .chosen = 5, .kind = kRouteSoftmax, .share = 1, .scale = 1.5f};
  check_route(33, 40, p, false, 2, true);
  check_route(33, 1, p, true, 0, true);
}

// Equal groups choose the lower one, of which NaN comes last; a group of NaN comes after all others.
TEST_P(Experts, TiesGoToTheLowerGroup) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = {0,   0,   1, 1,   1, 1, 1, 1,  //
                                     nan, nan, 2, nan, 3, 0, 1, 0,  //
                                     nan, nan, 0, 1,   1, 0, 3, nan};
  size_for_experts(8, 2, 64, 64, 3);
  const View first = output<uint32_t>(9), row = output<uint32_t>(6), weight = output<float>(6);
  const Route op{input(logits),
                 {},
                 first,
                 row,
                 weight,
                 {.experts = 8,
                  .chosen = 2,
                  .kind = kRouteSigmoid,
                  .share = 0,
                  .scale = 1,
                  .groups = 4,
                  .groups_used = 1}};
  run({.n_rows = 3}, 3, [&](Recorder& r) { r.record(op); });
  // Rows choose 2 3, 4 5 (for 2 + NaN counts as -inf), and 2 3.
  EXPECT_EQ(get<uint32_t>(first), (std::vector<uint32_t>{0, 0, 0, 2, 4, 5, 6, 6, 6}));
  EXPECT_EQ(get<uint32_t>(row), (std::vector<uint32_t>{0, 2, 0, 2, 1, 1}));
}

// Equal logits choose the lower expert, and NaN comes last.
TEST_P(Experts, TiesGoToTheLowerOne) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = {1,   2,   2,          2, 0,   0, 0,   0,  //
                                     0,   0,   0,          0, 0,   0, 0,   0,  //
                                     nan, nan, -kInfinity, 3, nan, 1, nan, nan};
  size_for_experts(8, 3, 64, 64, 3);
  const View first = output<uint32_t>(9), row = output<uint32_t>(9), weight = output<float>(9);
  const Route op{
      input(logits), {},
      first,         row,
      weight,        {.experts = 8, .chosen = 3, .kind = kRouteSoftmaxOfChosen, .share = 0, .scale = 1}};
  run({.n_rows = 3}, 3, [&](Recorder& r) { r.record(op); });
  // Rows choose 1 2 3, 0 1 2, and 3 5 with the first of those that are -inf or NaN.
  EXPECT_EQ(get<uint32_t>(first), (std::vector<uint32_t>{0, 2, 4, 6, 8, 8, 9, 9, 9}));
  EXPECT_EQ(get<uint32_t>(row), (std::vector<uint32_t>{1, 2, 0, 1, 0, 1, 0, 2, 2}));
}

double activated(uint32_t act, double gate, double up) {
  switch (act) {
    case kActClamped: {
      const double a = std::min(gate, 7.0), b = std::clamp(up, -7.0, 7.0);
      return a / (1 + std::exp(-1.702 * a)) * (b + 1);
    }
    case kActGelu:
      return 0.5 * gate * (1 + std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up;
    default:
      return gate / (1 + std::exp(-gate)) * up;
  }
}

void Experts::check_experts(const Shape& s) {
  SCOPED_TRACE(::testing::Message() << s.chosen << " of " << s.experts << " experts, " << s.rows << " rows, "
                                    << s.in_cols << " to " << s.out_cols << " " << dtype_info(s.type).name
                                    << ", act " << s.act << ", biased " << s.biased << ", fused " << s.fused
                                    << ", scaled " << s.scaled << ", gated " << s.gated);
  clear();
  Random random{s.experts + s.rows + s.in_cols};
  const uint32_t max_rows = s.max_rows ? s.max_rows : s.rows + 2, slots = s.rows * s.chosen,
                 most_slots = max_rows * s.chosen;
  size_for_experts(s.experts, s.chosen, s.in_cols, s.out_cols, max_rows);
  // A few experts get most tokens, and some none.
  std::vector<float> logits = random.floats(size_t(s.rows) * s.experts, -3, 3);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] -= float(i % s.experts % 7);
  const RouteParams route{
      .experts = s.experts, .chosen = s.chosen, .kind = kRouteSoftmax, .share = 1, .scale = 1};
  const std::vector<float> preferred = random.floats(s.routed && s.biased ? s.experts : 0, -2, 2);
  const Routed to = routed(logits, preferred, s.rows, route);
  std::vector<float> weights(to.weight.begin(), to.weight.end());
  const std::vector<float> x = random.floats(size_t(s.rows) * s.in_cols, -2, 2),
                           before = random.floats(size_t(s.rows) * s.in_cols, -2, 2);
  // In a fused tensor, the rows of up follow those of the gate of each expert.
  const uint32_t matrix_rows = (s.fused ? 2 : 1) * s.out_cols;
  const Matrix gate = random_matrix(random, s.type, s.experts * matrix_rows, s.in_cols),
               up = s.fused ? Matrix{} : random_matrix(random, s.type, s.experts * s.out_cols, s.in_cols),
               down = random_matrix(random, s.type, s.experts * s.in_cols, s.out_cols);
  const auto bias = [&](uint32_t cols) { return random.floats(s.biased ? s.experts * cols : 0, -3, 3); };
  const std::vector<float> gate_bias = bias(s.out_cols), up_bias = bias(s.out_cols),
                           down_bias = bias(s.in_cols);
  const auto scales = [&] { return random.floats(s.scaled ? s.experts : 0, -4, 4); };
  const std::vector<float> gate_scale = scales(), up_scale = scales(), down_scale = scales();
  const auto of = [&](const std::vector<float>& b) { return b.empty() ? View{} : input(b); };
  const auto at_or_1 = [](const std::vector<float>& v, size_t i) { return v.empty() ? 1.0 : double{v[i]}; };
  const View first = s.routed ? output<uint32_t>(s.experts + 1) : input(to.first),
             row = s.routed ? output<uint32_t>(most_slots) : input(padded_rows(to.row, most_slots)),
             weight_of_slot = s.routed ? output<float>(most_slots) : input(padded_rows(weights, most_slots)),
             h = output<float>(size_t(most_slots) * s.out_cols),
             y = inout(padded_rows(before, size_t(max_rows) * s.in_cols));
  Weight gate_weight = weight(s.type, s.experts * matrix_rows, s.in_cols, gate.bytes), up_weight;
  if (s.fused) {
    const uint64_t bytes = dtype_bytes(s.type, uint64_t(s.out_cols) * s.in_cols);
    gate_weight.rows -= s.out_cols;
    up_weight = gate_weight;
    static_cast<View&>(up_weight) = gate_weight.slice(bytes, gate_weight.bytes - bytes);
    static_cast<View&>(gate_weight) = gate_weight.slice(0, gate_weight.bytes - bytes);
  } else {
    up_weight = weight(s.type, s.experts * s.out_cols, s.in_cols, up.bytes);
  }
  const ExpertGlu glu{input(padded_rows(x, size_t(max_rows) * s.in_cols)),
                      s.gated ? gate_weight : Weight{},
                      up_weight,
                      s.gated ? of(gate_bias) : View{},
                      of(up_bias),
                      first,
                      row,
                      h,
                      {.in_cols = s.in_cols,
                       .out_cols = s.out_cols,
                       .act = s.act,
                       .experts = s.experts,
                       .chosen = s.chosen,
                       .rows_between = s.fused ? s.out_cols : 0},
                      of(gate_scale),
                      of(up_scale)};
  const ExpertLinear linear{
      h,
      weight(s.type, s.experts * s.in_cols, s.out_cols, down.bytes),
      of(down_bias),
      first,
      row,
      weight_of_slot,
      y,
      {.in_cols = s.out_cols, .out_cols = s.in_cols, .experts = s.experts, .chosen = s.chosen},
      of(down_scale)};
  const Route choice{s.routed ? input(padded_rows(logits, size_t(max_rows) * s.experts)) : View{},
                     of(preferred),
                     first,
                     row,
                     weight_of_slot,
                     route};
  run({.n_rows = s.rows}, max_rows, [&](Recorder& r) {
    if (s.routed) r.record(choice);
    r.record(glu);
  });
  const std::vector<float> hidden = get<float>(h);
  if (s.routed) {
    ASSERT_EQ(get<uint32_t>(first), to.first);
    weights = get<float>(weight_of_slot);
    for (uint32_t slot = 0; slot < slots; ++slot) {
      ASSERT_EQ(get<uint32_t>(row)[slot], to.row[slot]);
      // As in AreChosenByTheirLogits
      ASSERT_NEAR(weights[slot], to.weight[slot], to.weight[slot] * (40 + s.experts) * 0x1p-23);
    }
  }
  run({.n_rows = s.rows}, max_rows, [&](Recorder& r) { r.record(linear); });
  const std::vector<float> got = get<float>(y);

  const bool f16 = rounds_to_f16(max_rows);
  std::vector<double> want(before.begin(), before.end()), tolerance(want.size());
  for (size_t i = 0; i < want.size(); ++i) tolerance[i] = std::fabs(want[i]) * 0x1p-22;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    const uint32_t expert =
        static_cast<uint32_t>(std::upper_bound(to.first.begin(), to.first.end(), slot) - to.first.begin()) -
        1;
    for (uint32_t c = 0; c < s.out_cols; ++c) {
      const float* token = &x[size_t(to.row[slot]) * s.in_cols];
      const uint32_t at = expert * s.out_cols + c;
      const uint32_t of_gate = expert * matrix_rows + c, of_up = s.fused ? of_gate + s.out_cols : at;
      const Product g = product(gate, of_gate, token, s.in_cols, s.biased ? double{gate_bias[at]} : 0, 0, f16,
                                at_or_1(gate_scale, expert)),
                    u = product(s.fused ? gate : up, of_up, token, s.in_cols,
                                s.biased ? double{up_bias[at]} : 0, 0, f16, at_or_1(up_scale, expert));
      if (!s.gated) {
        const double root = std::max(u.sum, 0.0);
        // The slope of the square is twice the root; two operations follow.
        ASSERT_NEAR(hidden[size_t(slot) * s.out_cols + c], root * root,
                    (2 * root + u.tolerance) * u.tolerance + root * root * 0x1p-22)
            << "slot " << slot << ", column " << c;
        continue;
      }
      // The slope of activations is at most 1.2 times their argument; a few operations follow.
      const double value = activated(s.act, g.sum, u.sum);
      const double moved = 1.2 * g.tolerance * (std::fabs(u.sum) + 1) + std::fabs(g.sum) * u.tolerance +
                           (std::fabs(g.sum) + 1) * (std::fabs(u.sum) + 1) * 0x1p-20;
      ASSERT_NEAR(hidden[size_t(slot) * s.out_cols + c], value, moved) << "slot " << slot << ", column " << c;
    }
    for (uint32_t c = 0; c < s.in_cols; ++c) {
      const uint32_t at = expert * s.in_cols + c;
      const Product p = product(down, at, &hidden[size_t(slot) * s.out_cols], s.out_cols,
                                s.biased ? double{down_bias[at]} : 0, 0, f16, at_or_1(down_scale, expert));
      const size_t to_element = size_t(to.row[slot]) * s.in_cols + c;
      want[to_element] += double{weights[slot]} * p.sum;
      tolerance[to_element] += double{weights[slot]} * (p.tolerance + std::fabs(p.sum) * s.chosen * 0x1p-22);
    }
  }
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance[i]) << "element " << i;
}

TEST_P(Experts, ServeOneToken) {
  for (const DType type :
       {DType::kF32, DType::kF16, DType::kQ8_0, DType::kQ4_0, DType::kQ4_K, DType::kQ6_K, DType::kMXFP4}) {
    if (is_variation() && type != DType::kF16 && type != DType::kQ4_K) continue;
    check_experts(
        {.experts = 8, .chosen = 2, .rows = 1, .in_cols = 256, .out_cols = 512, .type = type, .max_rows = 1});
    if (HasFatalFailure()) return;
  }
  for (const uint32_t act : {kActGelu, kActClamped})
    check_experts({.experts = 32,
                   .chosen = 4,
                   .rows = 1,
                   .in_cols = 96,
                   .out_cols = 160,
                   .type = DType::kQ8_0,
                   .act = act,
                   .biased = true,
                   .max_rows = 1});
  check_experts({.experts = 3,
                 .chosen = 3,
                 .rows = 1,
                 .in_cols = 33,
                 .out_cols = 70,
                 .type = DType::kF32,
                 .max_rows = 1});
  // More experts than a subgroup examines at once, and more chosen ones than a workgroup adds up at once.
  check_experts({.experts = 300,
                 .chosen = 9,
                 .rows = 1,
                 .in_cols = 64,
                 .out_cols = 96,
                 .type = DType::kQ4_0,
                 .max_rows = 1});
  check_experts({.experts = 48,
                 .chosen = 40,
                 .rows = 1,
                 .in_cols = 64,
                 .out_cols = 1024,
                 .type = DType::kQ8_0,
                 .biased = true,
                 .max_rows = 1});
}

// Gate and up may be in one tensor. The columns of an expert fill a part of a tile, or several.
TEST_P(Experts, HaveGateAndUpInOneTensor) {
  for (const DType type : {DType::kF16, DType::kQ8_0, DType::kQ4_K, DType::kQ6_K, DType::kF32})
    for (const uint32_t rows : {1u, 5u, 70u}) {
      if (is_variation() && type != DType::kQ8_0) continue;
      if (is_slow() && rows == 70 && type != DType::kF16 && type != DType::kQ4_K) continue;
      check_experts({.experts = 6,
                     .chosen = 2,
                     .rows = rows,
                     .in_cols = 256,
                     .out_cols = rows == 5                    ? 512
                                 : dtype_info(type).block > 1 ? 256u
                                                              : 48u,
                     .type = type,
                     .act = kActGelu,
                     .biased = rows == 5,
                     .max_rows = rows,
                     .routed = rows == 1,
                     .fused = true});
      if (HasFatalFailure()) return;
    }
  // Experts that take more than one part of scratch.
  if (is_slow()) return;
  check_experts({.experts = 64,
                 .chosen = 4,
                 .rows = 200,
                 .in_cols = 256,
                 .out_cols = 704,
                 .type = DType::kQ8_0,
                 .fused = true});
}

// Each expert has a factor for each of its products.
TEST_P(Experts, HaveScales) {
  for (const DType type : {DType::kNVFP4, DType::kQ4_K})
    for (const uint32_t rows : {1u, 3u, 60u})
      for (const bool routed : {false, true}) {
        if (is_slow() && type == DType::kQ4_K && rows > 1) continue;
        check_experts({.experts = 6,
                       .chosen = 2,
                       .rows = rows,
                       .in_cols = 256,
                       .out_cols = 512,
                       .type = type,
                       .act = routed ? kActClamped : kActSilu,
                       .max_rows = rows == 1 ? 1u : 0u,
                       .routed = routed,
                       .scaled = true});
        if (HasFatalFailure()) return;
      }
}

// The biases come after the scales. Vulkan does not support both.
TEST_P(Experts, HaveScalesAndBiases) {
  if (GetParam().starts_with("vulkan")) return;
  for (const uint32_t rows : {1u, 40u})
    check_experts({.experts = 6,
                   .chosen = 2,
                   .rows = rows,
                   .in_cols = 256,
                   .out_cols = 64,
                   .type = DType::kNVFP4,
                   .biased = true,
                   .max_rows = rows == 1 ? 1u : 0u,
                   .scaled = true});
}

TEST_P(Experts, MayHaveNoGate) {
  for (const DType type : {DType::kF16, DType::kQ8_0, DType::kQ4_K, DType::kF32})
    for (const uint32_t rows : {1u, 5u, 70u}) {
      if (is_variation() && type != DType::kQ8_0) continue;
      if (is_slow() && rows == 70 && type != DType::kF16) continue;
      check_experts({.experts = 6,
                     .chosen = 2,
                     .rows = rows,
                     .in_cols = 256,
                     .out_cols = rows == 5 ? 512u : 256u,
                     .type = type,
                     .act = kActReluSqr,
                     .biased = rows == 5,
                     .max_rows = rows,
                     .routed = rows == 1,
                     .gated = false});
      if (HasFatalFailure()) return;
    }
}

// Backends may choose a token's experts inside the first product that needs them.
TEST_P(Experts, AreChosenAndServeOneToken) {
  bool biased = false;  // many experts for every second type, few for the others
  for (const DType type : {DType::kF32, DType::kQ8_0, DType::kQ4_K, DType::kMXFP4}) {
    if (is_variation() && type != DType::kQ8_0) continue;
    check_experts({.experts = 128,
                   .chosen = 8,
                   .rows = 1,
                   .in_cols = 256,
                   .out_cols = 256,
                   .type = type,
                   .biased = biased,
                   .max_rows = 1,
                   .routed = true});
    biased = !biased;
    check_experts({.experts = 5,
                   .chosen = 3,
                   .rows = 1,
                   .in_cols = 512,
                   .out_cols = 768,
                   .type = type,
                   .biased = biased,
                   .max_rows = 1,
                   .routed = true});
    if (HasFatalFailure()) return;
  }
  check_experts({.experts = 33,
                 .chosen = 33,
                 .rows = 1,
                 .in_cols = 64,
                 .out_cols = 64,
                 .type = DType::kQ8_0,
                 .max_rows = 1,
                 .routed = true});
  check_experts({.experts = 16,
                 .chosen = 4,
                 .rows = 5,
                 .in_cols = 64,
                 .out_cols = 96,
                 .type = DType::kQ8_0,
                 .routed = true});
}

TEST_P(Experts, ServeManyTokens) {
  for (const uint32_t rows : {2u, 5u, 33u, 150u}) {
    check_experts(
        {.experts = 8, .chosen = 2, .rows = rows, .in_cols = 256, .out_cols = 256, .type = DType::kQ4_K});
    check_experts({.experts = 16,
                   .chosen = 4,
                   .rows = rows,
                   .in_cols = 96,
                   .out_cols = 160,
                   .type = DType::kQ8_0,
                   .act = kActClamped,
                   .biased = true});
    if (HasFatalFailure()) return;
  }
  check_experts({.experts = 2,
                 .chosen = 1,
                 .rows = 300,
                 .in_cols = 64,
                 .out_cols = 96,
                 .type = DType::kF16,
                 .act = kActGelu});
  check_experts({.experts = 5, .chosen = 2, .rows = 40, .in_cols = 33, .out_cols = 70, .type = DType::kF32});
  // Several tiles per expert, and more columns than are added up at a time.
  check_experts(
      {.experts = 4, .chosen = 2, .rows = 300, .in_cols = 256, .out_cols = 512, .type = DType::kQ4_K});
  check_experts({.experts = 3,
                 .chosen = 2,
                 .rows = 400,
                 .in_cols = 6016,
                 .out_cols = 32,
                 .type = DType::kQ8_0,
                 .biased = true});
}

// An expert that every token takes follows the chosen ones. Both launches of these may compute it as one more
// slot; the result must be the same as with separate launches.
TEST_P(Experts, AndASharedExpertServeOneToken) {
  constexpr uint32_t kExperts = 16, kChosen = 3;
  const RouteParams route{
      .experts = kExperts, .chosen = kChosen, .kind = kRouteSoftmax, .share = 1, .scale = 1};
  const struct {
    uint32_t cols, inner;
    DType type, shared, shared_down;
    bool gated;
  } cases[] = {{256, 512, DType::kQ4_K, DType::kQ4_K, DType::kQ4_K, true},
               {256, 512, DType::kQ8_0, DType::kQ8_0, DType::kQ8_0, false},
               {2048, 512, DType::kQ4_K, DType::kQ4_K, DType::kQ6_K, true},
               {512, 768, DType::kQ6_K, DType::kQ6_K, DType::kQ6_K, true},
               {512, 256, DType::kQ4_K, DType::kQ8_0, DType::kQ8_0, true},
               {256, 1280, DType::kQ5_K, DType::kQ6_K, DType::kQ8_0, true},
               {512, 512, DType::kQ6_K, DType::kQ8_0, DType::kQ8_0, false},
               {256, 256, DType::kQ4_K, DType::kQ4_0, DType::kQ4_K, true},
               {96, 64, DType::kQ8_0, DType::kQ8_0, DType::kQ8_0, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(::testing::Message() << c.cols << " to " << c.inner << " " << dtype_info(c.type).name << ", "
                                      << dtype_info(c.shared_down).name);
    if (is_slow() && c.cols != 96) continue;
    clear();
    Random random{c.cols + c.inner};
    size_for_experts(kExperts, kChosen, c.cols, c.inner, 1);
    struct Made {
      Matrix matrix;
      Weight weight;
    };
    const auto make = [&](DType type, uint32_t rows, uint32_t cols) {
      Matrix m = random_matrix(random, type, rows, cols);
      const Weight w = weight(type, rows, cols, m.bytes);
      return Made{std::move(m), w};
    };
    const Made gate = make(c.type, kExperts * c.inner, c.cols), up = make(c.type, kExperts * c.inner, c.cols),
               down = make(c.type, kExperts * c.cols, c.inner), shared_gate = make(c.shared, c.inner, c.cols),
               shared_up = make(c.shared, c.inner, c.cols),
               shared_down = make(c.shared_down, c.cols, c.inner);
    const std::vector<float> token = random.floats(c.cols, -1, 1), before = random.floats(c.cols, -1, 1),
                             factor = random.floats(1, -1, 1);
    const View x = input(token), first = output<uint32_t>(kExperts + 1), row = output<uint32_t>(kChosen),
               weights = output<float>(kChosen), h = output<float>(size_t(kChosen + 1) * c.inner),
               y = inout(before);
    const Op ops[] = {
        Route{input(random.floats(kExperts, -3, 3)), {}, first, row, weights, route},
        ExpertGlu{
            x,
            gate.weight,
            up.weight,
            {},
            {},
            first,
            row,
            h,
            {.in_cols = c.cols, .out_cols = c.inner, .act = kActSilu, .experts = kExperts, .chosen = kChosen},
            {},
            {}},
        ExpertLinear{h,
                     down.weight,
                     {},
                     first,
                     row,
                     weights,
                     y,
                     {.in_cols = c.inner, .out_cols = c.cols, .experts = kExperts, .chosen = kChosen},
                     {}},
        Glu{x,
            shared_gate.weight,
            shared_up.weight,
            h,
            {.in_cols = c.cols, .out_cols = c.inner, .act = kActSilu}},
        Gate{input(factor),
             h,
             {.cols = c.inner,
              .groups = 1,
              .x_stride = c.inner,
              .g_stride = 1,
              .g_column = 0,
              .g_group_stride = 0,
              .g_cols = 1}},
        Linear{h,
               shared_down.weight,
               {},
               y,
               {.in_cols = c.inner,
                .out_cols = c.cols,
                .x_stride = c.inner,
                .y_stride = c.cols,
                .add = 1,
                .rows = kStepRows}}};
    const auto is_gate = [](const Op& op) { return std::holds_alternative<Gate>(op); };
    std::vector<float> of_chosen, of_shared;
    for (const Op& op : ops) {
      if (is_gate(op) && !c.gated) continue;
      run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(op); });
      if (std::holds_alternative<ExpertGlu>(op)) of_chosen = get<float>(h);
      if (std::holds_alternative<Glu>(op) || is_gate(op)) of_shared = get<float>(h);
    }
    const std::vector<float> alone = get<float>(y), share = get<float>(weights);
    const std::vector<uint32_t> starts = get<uint32_t>(first);
    put(y, before);
    run({.n_rows = 1}, 1, [&](Recorder& r) {
      for (const Op& op : ops)
        if (!is_gate(op) || c.gated) r.record(op);
    });
    const std::vector<float> together = get<float>(y);

    // What both ways may differ by: twice the errors of the products of check_experts().
    std::vector<double> tolerance(c.cols);
    for (uint32_t i = 0; i < c.cols; ++i)
      tolerance[i] = std::fabs(double{alone[i]}) * (kChosen + 2) * 0x1p-23;
    const auto add = [&](const Made& g, const Made& u, const Made& d, uint32_t expert, const float* vector,
                         double of_all) {
      std::vector<double> moved(c.inner);
      for (uint32_t i = 0; i < c.inner; ++i) {
        const Product of_gate = product(g.matrix, expert * c.inner + i, token.data(), c.cols, 0, 0, false),
                      of_up = product(u.matrix, expert * c.inner + i, token.data(), c.cols, 0, 0, false);
        moved[i] = 1.2 * of_gate.tolerance * (std::fabs(of_up.sum) + 1) +
                   std::fabs(of_gate.sum) * of_up.tolerance +
                   (std::fabs(of_gate.sum) + 1) * (std::fabs(of_up.sum) + 1) * 0x1p-20;
      }
      for (uint32_t i = 0; i < c.cols; ++i) {
        const uint32_t at = expert * c.cols + i;
        tolerance[i] += 2 * of_all * product(d.matrix, at, vector, c.inner, 0, 0, false).tolerance;
        for (uint32_t k = 0; k < c.inner; ++k)
          tolerance[i] +=
              2 * of_all * std::fabs(double{d.matrix.values[size_t(at) * c.inner + k]}) * moved[k];
      }
    };
    for (uint32_t slot = 0; slot < kChosen; ++slot)
      add(gate, up, down,
          static_cast<uint32_t>(std::upper_bound(starts.begin(), starts.end(), slot) - starts.begin()) - 1,
          &of_chosen[size_t(slot) * c.inner], double{share[slot]});
    add(shared_gate, shared_up, shared_down, 0, of_shared.data(), 1);
    for (uint32_t i = 0; i < c.cols; ++i) ASSERT_NEAR(together[i], alone[i], tolerance[i]) << "element " << i;
  }
}

// A norm between the experts' sum and the products that read it. Both sides may compute a part of it; the
// result must be the same as with a separate norm.
TEST_P(Experts, NormTheirSums) {
  constexpr uint32_t kExperts = 6, kChosen = 3, kInner = 64, kOut = 40;
  for (const uint32_t cols : {33u, 96u, 2048u}) {
    SCOPED_TRACE(cols);
    clear();
    Random random{cols};
    size_for_experts(kExperts, kChosen, cols, kInner, 1);
    const Matrix down = random_matrix(random, DType::kQ8_0, kExperts * cols, kInner),
                 after = random_matrix(random, DType::kF32, kOut, cols);
    const std::vector<float> before = random.floats(cols, -2, 2);
    const View y = inout(before), norm = output<float>(cols), out = output<float>(kOut);
    const ExpertLinear sums{input(random.floats(kChosen * kInner, -2, 2)),
                            weight(DType::kQ8_0, kExperts * cols, kInner, down.bytes),
                            input(random.floats(kExperts * cols)),
                            input(std::vector<uint32_t>{0, 1, 1, 1, 2, 2, 3}),
                            input(std::vector<uint32_t>(kChosen)),
                            input(random.floats(kChosen, 0, 1)),
                            y,
                            {.in_cols = kInner, .out_cols = cols, .experts = kExperts, .chosen = kChosen}};
    const RmsNorm normed{
        y,
        input(random.floats(cols, 0, 2)),
        norm,
        {.cols = cols, .groups = 1, .row_stride = cols, .eps = 1e-5f, .rows = kStepRows, .add = 0}};
    const Linear product{norm,
                         weight(DType::kF32, kOut, cols, after.bytes),
                         {},
                         out,
                         {.in_cols = cols, .out_cols = kOut, .x_stride = cols, .y_stride = kOut}};
    run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(sums); });
    run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(normed); });
    run({.n_rows = 1}, 1, [&](Recorder& r) { r.record(product); });
    const std::vector<float> sum = get<float>(y), alone = get<float>(norm), last = get<float>(out);
    put(y, before);
    put(norm, std::vector<float>(cols));
    run({.n_rows = 1}, 1, [&](Recorder& r) {
      r.record(sums);
      r.record(normed);
      r.record(product);
    });
    EXPECT_EQ(get<float>(y), sum);
    const std::vector<float> together = get<float>(norm), got = get<float>(out);
    // Both sum the squares in f32 in some order, and take a root and two products.
    const double relative = (cols / 2.0 + 7) * 0x1p-23;
    for (uint32_t i = 0; i < cols; ++i)
      ASSERT_NEAR(together[i], alone[i], std::fabs(alone[i]) * relative) << i;
    for (uint32_t i = 0; i < kOut; ++i) {
      const thimble::test::Product p = thimble::test::product(after, i, alone.data(), cols, 0, 0, false);
      double size = 0;
      for (uint32_t c = 0; c < cols; ++c)
        size += std::fabs(double{alone[c]} * double{after.values[size_t(i) * cols + c]});
      ASSERT_NEAR(got[i], last[i], 2 * p.tolerance + size * relative) << i;
    }
  }
}

// The shared expert's products are the model's widest, and must give the same bits with scratch for wider
// ones.
TEST_P(Experts, AndASharedExpertHaveScratch) {
  constexpr uint32_t kModel = 256, kShared = 4096;
  const ModelShape wide = model;
  const SessionShape long_chunk = session;
  const auto products = [&](DType type, uint32_t rows) {
    clear();
    Random random{rows};
    const auto matrix = [&](uint32_t m, uint32_t n) {
      return weight(type, m, n, random_matrix(random, type, m, n).bytes);
    };
    const Weight gate = matrix(kShared, kModel), up = matrix(kShared, kModel), down = matrix(kModel, kShared);
    const View x = input(random.floats(rows * kModel, -1, 1)), h = output<float>(rows * kShared),
               y = output<float>(rows * kModel);
    run({.n_rows = rows}, rows, [&](Recorder& r) {
      r.record(Glu{x, gate, up, h, {.in_cols = kModel, .out_cols = kShared, .act = kActSilu}});
      r.record(Linear{h,
                      down,
                      {},
                      y,
                      {.in_cols = kShared,
                       .out_cols = kModel,
                       .x_stride = kShared,
                       .y_stride = kModel,
                       .add = 0,
                       .rows = kStepRows}});
    });
    return get<float>(y);
  };
  for (const DType type : {DType::kQ8_0, DType::kIQ4_XS})
    for (const uint32_t rows : {1u, 3u, 130u}) {
      if (is_slow() && (type == DType::kQ8_0) != (rows == 130)) continue;
      size_for(wide, long_chunk);
      const std::vector<float> expected = products(type, rows);
      size_for({.layers = 1,
                .d_model = kModel,
                .heads = 1,
                .kv_heads = 1,
                .head_dim = 64,
                .d_ff = 32,
                .vocab = 64,
                .experts = 4,
                .chosen_experts = 2,
                .d_ff_shared = kShared},
               session_of(equal_heads(1, 8, 0), rows));
      EXPECT_EQ(products(type, rows), expected) << dtype_info(type).name << ", " << rows << " rows";
    }
}

TEST_P(Experts, ScaleMultipliesCapsAndAdds) {
  for (const uint32_t cols : {1u, 33u, 256u, 1000u})
    for (const float cap : {0.0f, 5.0f})
      for (const bool add : {false, true})
        for (const bool in_place : {false, true}) {
          clear();
          Random random{cols};
          constexpr uint32_t kRows = 3, kMaxRows = 5;
          const float scale = 0.7f;
          const std::vector<float> x = random.floats(kRows * cols, -20, 20),
                                   before = random.floats(kRows * cols, -2, 2);
          const std::vector<float>& old = in_place ? x : before;
          const View y = inout(padded_rows(old, kMaxRows * cols)),
                     from = in_place ? y : input(padded_rows(x, kMaxRows * cols));
          const Scale op{
              from,
              y,
              {.cols = cols, .row_stride = cols, .scale = scale, .cap = cap, .add = add, .rows = kStepRows}};
          run({.n_rows = kRows}, kMaxRows, [&](Recorder& r) { r.record(op); });
          const std::vector<float> got = get<float>(y);
          for (uint32_t i = 0; i < kRows * cols; ++i) {
            double want = double{x[i]} * double{scale};
            if (cap != 0) want = double{cap} * std::tanh(want / double{cap});
            if (add) want += double{old[i]};
            // A product and a sum; if capped, with an error of 2^-22 of the cap.
            ASSERT_NEAR(got[i], want, std::fabs(want) * 0x1p-23 + 20 * 0x1p-23 + double{cap} * 0x1p-22) << i;
          }
        }
}

// Columns that are a part of a row, with consecutive and with explicit positions.
TEST_P(Experts, ScaleGrowsWithThePosition) {
  constexpr uint32_t kRows = 6, kMaxRows = 8, kStride = 300, kPeriod = 7;
  const float scale = 0.7f, growth = 0.25f;
  const std::vector<int32_t> apart = {3, 6, 7, 20, 1000000, 2000000011};
  for (const uint32_t cols : {1u, 33u, 256u, 299u})
    for (const bool follow : {false, true})
      for (const bool in_place : {false, true}) {
        clear();
        Random random{cols};
        const std::vector<float> x = random.floats(kRows * kStride, -20, 20),
                                 before = random.floats(kRows * kStride, -2, 2);
        const std::vector<float>& old = in_place ? x : before;
        const View y = inout(padded_rows(old, kMaxRows * kStride)),
                   from = in_place ? y : input(padded_rows(x, kMaxRows * kStride));
        Scale op{from,
                 y,
                 {.cols = cols,
                  .row_stride = kStride,
                  .scale = scale,
                  .growth = growth,
                  .period = kPeriod,
                  .cap = 0,
                  .add = 0,
                  .rows = kStepRows}};
        if (!follow) op.positions = input(padded_rows(apart, kMaxRows));
        const int32_t first = 11;
        run({.n_rows = kRows, .position = first}, kMaxRows, [&](Recorder& r) { r.record(op); });
        const std::vector<float> got = get<float>(y);
        for (uint32_t row = 0; row < kRows; ++row) {
          const int32_t position = follow ? first + static_cast<int32_t>(row) : apart[row];
          const double grown =
              double{scale} * (1 + double{growth} * std::log(1 + position / int32_t{kPeriod}));
          for (uint32_t i = 0; i < kStride; ++i) {
            const uint32_t at = row * kStride + i;
            if (i >= cols) {
              ASSERT_EQ(got[at], old[at]) << i;
              continue;
            }
            // A logarithm is off by 2^-21 near 1, and otherwise by three units in the last place, which is
            // 2^-21 of it. A quarter of that counts. Its argument, two sums and two products are rounded by
            // 2^-24 each.
            ASSERT_NEAR(got[at], double{x[at]} * grown, std::fabs(double{x[at]}) * grown * 0x1p-20) << i;
          }
        }
      }
}

TEST_P(Experts, NormsMayBeAdded) {
  for (const uint32_t cols : {1u, 31u, 64u, 1000u, 4096u}) {
    clear();
    Random random{cols};
    constexpr uint32_t kRows = 3, kMaxRows = 5;
    const std::vector<float> x = random.floats(kRows * cols, -3, 3), w = random.floats(cols),
                             before = random.floats(kRows * cols);
    const View y = inout(padded_rows(before, kMaxRows * cols));
    const RmsNorm op{
        input(padded_rows(x, kMaxRows * cols)),
        input(w),
        y,
        {.cols = cols, .groups = 1, .row_stride = cols, .eps = 1e-5f, .rows = kStepRows, .add = 1}};
    run({.n_rows = kRows}, kMaxRows, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got = get<float>(y);
    for (uint32_t row = 0; row < kRows; ++row) {
      double squares = 0;
      for (uint32_t i = 0; i < cols; ++i) squares += double{x[row * cols + i]} * double{x[row * cols + i]};
      const double scale = 1 / std::sqrt(squares / cols + 1e-5);
      for (uint32_t i = 0; i < cols; ++i) {
        const double normed = double{x[row * cols + i]} * scale * double{w[i]};
        // As norms that are not added, plus a sum.
        ASSERT_NEAR(got[row * cols + i], normed + double{before[row * cols + i]},
                    std::fabs(normed) * (cols / 2.0 + 7) * 0x1p-24 + 4 * 0x1p-24);
      }
    }
  }
}

// The types that the previous tests omit. A software driver tests one row for every second type, and several
// for the others.
TEST_P(Experts, SupportMatricesOfEveryType) {
  if (is_variation()) return;
  uint32_t turn = 0;
  for (const DType type :
       {DType::kBF16,   DType::kQ4_1,    DType::kQ5_0,   DType::kQ5_1,  DType::kIQ4_NL,  DType::kQ2_K,
        DType::kQ3_K,   DType::kQ5_K,    DType::kIQ4_XS, DType::kIQ3_S, DType::kIQ3_XXS, DType::kIQ2_S,
        DType::kIQ2_XS, DType::kIQ2_XXS, DType::kIQ1_M,  DType::kIQ1_S, DType::kTQ2_0,   DType::kTQ1_0,
        DType::kNVFP4,  DType::kQ2_0,    DType::kQ1_0}) {
    ++turn;
    for (const uint32_t rows : {1u, 3u}) {
      if (is_slow() && (turn % 2 == 0) == (rows == 1)) continue;
      check_experts({.experts = 3,
                     .chosen = 2,
                     .rows = rows,
                     .in_cols = 256,
                     .out_cols = 256,
                     .type = type,
                     .max_rows = rows});
    }
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace thimble::test
