// delta_net on every device, against the recurrence in double.
#include <cmath>
#include <limits>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

constexpr uint32_t kSlots = 4;
constexpr uint32_t kFewRows = 8;  // a program of so few rows takes them one by one, on GPUs
constexpr uint32_t kBehind = 5;   // floats of another state, which follows the matrices in each slot
constexpr double kUnit = 0x1p-24;

struct Heads {
  uint32_t keys, values, width;
  bool tiled;
  uint32_t key_of(uint32_t head) const { return tiled ? head % keys : head / (values / keys); }
};

// The inputs of a text.
struct Text {
  Heads heads;
  uint32_t rows;
  std::vector<float> q, k, v, alpha, beta;  // [rows][key heads][width] twice, [rows][value heads][width], ...
  std::vector<float> a, dt;
  float eps = 1e-6f;

  Text(const Heads& of, uint32_t n, Random& random) : heads(of), rows(n) {
    const size_t keys = size_t{n} * of.keys * of.width, numbers = size_t{n} * of.values;
    q = random.floats(keys, -2, 2);
    k = random.floats(keys, -2, 2);
    v = random.floats(numbers * of.width, -2, 2);
    alpha = random.floats(numbers, -4, 4);
    beta = random.floats(numbers, -4, 4);
    a = random.floats(of.values, -2, -0.01f);
    dt = random.floats(of.values, -3, 1);
  }
};

// The matrices in double, and a bound of what f32 may differ from them.
//
// For a column of M, `mass` is the sum of the absolute values that were added to it, decayed: no product of
// the column with a unit vector is larger. A step rounds each of its sums, of at most `width` products with
// the state or of the chunk's rows, by at most kTerms units of mass + |v|. An error in M later passes through
// e^gamma (I - beta k k^T), whose second factor makes nothing longer, so errors add up as the masses do.
// e^gamma itself is off by the rounding of gamma and of the sum that softplus takes.
//
// A device that rounds the operands of products to 11 bits (OpTest::rounds_delta) is off by up to 2^-11 in
// each. These errors are independent, so their squares add up: in a product of two rounded operands, to at
// most 2/3 of 2^-22 of the squares of its terms. Those of the chunk's values with a row of (I + A)^-1 are
// about the square of the largest value, since that row is beta, and small products of keys. A row has two
// such products before its delta, and two before y. The errors of a column point in all directions, or in one
// that elements and queries do not prefer, so these see 1 / width of their squares. Six standard deviations
// are allowed.
struct Reference {
  const Text& text;
  std::vector<double> m;            // [value heads][width][width]
  std::vector<double> mass, error;  // [value heads][width of values]
  // The same: the variance of the errors of rounded operands, and the square of the largest value.
  std::vector<double> variance, largest;
  bool rounds = false;

  explicit Reference(const Text& t) : text(t) {
    const size_t columns = size_t{t.heads.values} * t.heads.width;
    m.resize(columns * t.heads.width);
    mass.resize(columns);
    error.resize(columns);
    variance.resize(columns);
    largest.resize(columns);
  }
  // Starts from these matrices.
  Reference(const Text& t, const std::vector<float>& start) : Reference(t) {
    const uint32_t width = t.heads.width;
    for (size_t i = 0; i < m.size(); ++i) {
      m[i] = double{start[i]};
      mass[i / width / width * width + i % width] += m[i] * m[i];
    }
    for (double& of : mass) of = std::sqrt(of);
  }

  static constexpr double kRounded = 4.0 / 3 * 0x1p-22;  // variance of two products
  double rounding(size_t column) const {
    return rounds ? 6 * std::sqrt(variance[column] / text.heads.width + kRounded * largest[column]) : 0;
  }

  double terms() const { return text.heads.width + 128 + 24; }  // no chunk has more than 128 rows

  struct Value {
    double y, error;
  };
  // Takes row `row`, and returns [value heads][width].
  std::vector<Value> take(uint32_t row) {
    const Heads& h = text.heads;
    const uint32_t width = h.width;
    std::vector<Value> values;
    std::vector<double> k(width), q(width);
    for (uint32_t head = 0; head < h.values; ++head) {
      const size_t key = (size_t{row} * h.keys + h.key_of(head)) * width;
      const size_t number = size_t{row} * h.values + head;
      const auto unit = [&](const std::vector<float>& from, std::vector<double>& to) {
        double squares = 0;
        for (uint32_t i = 0; i < width; ++i) squares += double{from[key + i]} * double{from[key + i]};
        for (uint32_t i = 0; i < width; ++i)
          to[i] = double{from[key + i]} / std::sqrt(squares + double{text.eps});
      };
      unit(text.k, k);
      unit(text.q, q);
      const double a = double{text.a[head]}, x = double{text.alpha[number]} + double{text.dt[head]};
      const double gamma = a * (x > 20 ? x : std::log1p(std::exp(x)));
      const double decay = std::exp(gamma);
      const double decay_error = decay * (4 * std::fabs(gamma) + std::fabs(a * x) + 2) * kUnit;
      const double beta = 1 / (1 + std::exp(-double{text.beta[number]}));
      double* const of_head = &m[size_t{head} * width * width];
      for (uint32_t c = 0; c < width; ++c) {
        double& sum = mass[size_t{head} * width + c];
        double& off = error[size_t{head} * width + c];
        double& most = largest[size_t{head} * width + c];
        double p = 0, y = 0, squares = 0;  // of the terms of both products with M
        for (uint32_t i = 0; i < width; ++i) {
          double& of = of_head[size_t{i} * width + c];
          p += k[i] * (of *= decay);
          squares += (k[i] * k[i] + q[i] * q[i]) * of * of;
        }
        const double value = double{text.v[number * width + c]};
        const double delta = beta * (value - p);
        for (uint32_t i = 0; i < width; ++i) y += q[i] * (of_head[size_t{i} * width + c] += k[i] * delta);
        off = off * decay + sum * decay_error;
        sum = sum * decay + std::fabs(delta);
        off += terms() * kUnit * (sum + std::fabs(value));
        most = std::max(most, std::pow(std::fabs(value) + std::fabs(p), 2) + squares);
        double& spread = variance[size_t{head} * width + c];
        spread = spread * decay * decay + (rounds ? kRounded * most : 0);
        values.push_back(
            {y / std::sqrt(width),
             (off + terms() * kUnit * sum + rounding(size_t{head} * width + c)) / std::sqrt(width)});
      }
    }
    return values;
  }
};

class DeltaNets : public OpTest {
 protected:
  // A program of one delta_net, and operands whose rows have columns and padding around what the op uses.
  struct Net {
    DeltaNet op;
    std::unique_ptr<Program> program;
    View qkv, gates, slots, y;
    uint32_t max_rows;
  };

  static size_t state_floats(const Heads& h) { return size_t{h.values} * h.width * h.width; }
  static size_t slot_floats(const Heads& h) { return state_floats(h) + kBehind; }

  Net net_of(const Text& t, uint32_t max_rows, uint32_t slots = kSlots) {
    clear();
    const Heads& h = t.heads;
    size_for({.layers = 1,
              .d_model = 64,
              .heads = 1,
              .kv_heads = 1,
              .head_dim = 64,
              .d_ff = 64,
              .vocab = 64,
              .delta_keys = h.keys,
              .delta_values = h.values,
              .delta_width = h.width},
             {.chunk = max_rows,
              .run_capacity = 1,
              .layer_entries = 1,
              .reach = 1,
              .view_capacity = 1,
              .heads = 1});
    const uint32_t keys = h.keys * h.width, values = h.values * h.width;
    Net net;
    net.max_rows = max_rows;
    // Columns: 3 unused, v, k, 2 unused, q, 1 unused; 1 unused, beta, 2 unused, alpha.
    const DeltaNetParams p{.key_heads = h.keys,
                           .value_heads = h.values,
                           .width = h.width,
                           .q_column = values + keys + 5,
                           .k_column = values + 3,
                           .v_column = 3,
                           .qkv_stride = values + 2 * keys + 6,
                           .alpha_column = h.values + 3,
                           .beta_column = 1,
                           .gates_stride = 2 * h.values + 4,
                           .y_stride = values + 2,
                           .eps = t.eps,
                           .tiled = h.tiled};
    net.qkv = output<float>(size_t{max_rows} * p.qkv_stride);
    net.gates = output<float>(size_t{max_rows} * p.gates_stride);
    net.slots = output<float>(slots * slot_floats(h));
    net.y = output<float>(size_t{max_rows} * p.y_stride);
    const StateArray m{.block0 = net.slots.slice(0, state_floats(h) * sizeof(float)),
                       .slot_stride = slot_floats(h) * sizeof(float),
                       .slots = slots};
    net.op = {net.qkv, net.gates, input(t.a), input(t.dt), m, net.y, p};
    net.program = record(max_rows, [&](Recorder& r) { r.record(net.op); });
    return net;
  }

  // Runs rows [first, first + rows) of the text, and returns [rows][value heads][width] of y. Expects that
  // nothing else of y is written.
  std::vector<float> rows_of(Net& net, const Text& t, uint32_t first, uint32_t rows, uint32_t from,
                             uint32_t to) {
    const DeltaNetParams& p = net.op.p;
    std::vector<float> qkv = padded_rows(std::vector<float>(), size_t{net.max_rows} * p.qkv_stride);
    std::vector<float> gates = padded_rows(std::vector<float>(), size_t{net.max_rows} * p.gates_stride);
    for (uint32_t row = 0; row < rows; ++row) {
      const auto copy = [&](const std::vector<float>& of, uint32_t cols, std::vector<float>& all,
                            uint32_t stride, uint32_t column) {
        std::copy_n(of.begin() + ptrdiff_t{first + row} * cols, cols,
                    all.begin() + ptrdiff_t{row} * stride + column);
      };
      copy(t.q, p.key_heads * p.width, qkv, p.qkv_stride, p.q_column);
      copy(t.k, p.key_heads * p.width, qkv, p.qkv_stride, p.k_column);
      copy(t.v, p.value_heads * p.width, qkv, p.qkv_stride, p.v_column);
      copy(t.alpha, p.value_heads, gates, p.gates_stride, p.alpha_column);
      copy(t.beta, p.value_heads, gates, p.gates_stride, p.beta_column);
    }
    put(net.qkv, qkv);
    put(net.gates, gates);
    put(net.y, padded_rows(std::vector<float>(), size_t{net.max_rows} * p.y_stride));
    run(*net.program, {.n_rows = rows, .state_from = from, .state_to = to});
    const std::vector<float> all = get<float>(net.y);
    std::vector<float> y;
    for (uint32_t row = 0; row < net.max_rows; ++row) {
      const size_t at = size_t{row} * p.y_stride, used = row < rows ? p.value_heads * p.width : 0;
      y.insert(y.end(), all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + used));
      EXPECT_TRUE(is_poison(all, at + used, p.y_stride - used)) << "row " << row;
    }
    return y;
  }

  std::vector<float> state(const Net& net, const Heads& h, uint32_t slot) {
    const std::vector<float> all = get<float>(net.slots);
    const auto begin = all.begin() + ptrdiff_t(slot * slot_floats(h));
    EXPECT_TRUE(is_poison(all, slot * slot_floats(h) + state_floats(h), kBehind)) << "slot " << slot;
    return {begin, begin + ptrdiff_t(state_floats(h))};
  }
  void expect_poison(const Net& net, const Heads& h, uint32_t slot) {
    EXPECT_TRUE(is_poison(get<float>(net.slots), slot * slot_floats(h), slot_floats(h))) << "slot " << slot;
  }
  void poison(const Net& net) {
    put(net.slots, padded_rows(std::vector<float>(), net.slots.bytes / sizeof(float)));
  }
  void fill(const Net& net, const Heads& h, uint32_t slot, const std::vector<float>& values) {
    std::vector<float> all = get<float>(net.slots);
    std::copy(values.begin(), values.end(), all.begin() + ptrdiff_t(slot * slot_floats(h)));
    put(net.slots, all);
  }

  // The rows of a step give what the reference gives, which goes on by these rows.
  void expect_values(const std::vector<float>& y, Reference& reference, uint32_t first) {
    const size_t cols = reference.mass.size(), rows = y.size() / cols;
    reference.rounds |= rounds_delta(static_cast<uint32_t>(rows));
    for (uint32_t row = 0; row < rows; ++row) {
      const std::vector<Reference::Value> want = reference.take(first + row);
      for (size_t c = 0; c < cols; ++c)
        ASSERT_NEAR(double{y[row * cols + c]}, want[c].y, want[c].error + 1e-30)
            << "row " << first + row << ", head " << c / reference.text.heads.width << ", column "
            << c % reference.text.heads.width;
    }
  }
  static void expect_state(const std::vector<float>& m, const Reference& reference) {
    const uint32_t width = reference.text.heads.width;
    for (size_t i = 0; i < m.size(); ++i) {
      const size_t column = i / width / width * width + i % width;
      const double error = reference.error[column] + reference.terms() * kUnit * reference.mass[column] +
                           reference.rounding(column);
      ASSERT_NEAR(double{m[i]}, reference.m[i], error + 1e-30) << "element " << i;
    }
  }
  // What gated_norm makes of a row. Errors of y move the result directly and through the norm of its head;
  // the op's own are those of gates_test.cpp.
  static void expect_normed(const std::vector<float>& got, const std::vector<Reference::Value>& y,
                            const GatedNormParams& p, const float* z, const std::vector<float>& weight) {
    for (uint32_t head = 0; head < p.groups; ++head) {
      double squares = 0, moved = 0;
      for (uint32_t c = 0; c < p.cols; ++c) {
        const Reference::Value& of = y[head * p.cols + c];
        squares += of.y * of.y / p.cols;
        moved += std::fabs(of.y) * of.error / p.cols;
      }
      const double scale = 1 / std::sqrt(squares + double{p.eps});
      for (uint32_t c = 0; c < p.cols; ++c) {
        const size_t i = head * p.cols + c;
        const double gate = (p.act == kActSilu ? double{z[i]} : 1) / (1 + std::exp(-double{z[i]}));
        const double factor = double{weight[c]} * gate, want = y[i].y * scale * factor;
        const double error = scale * y[i].error + std::fabs(y[i].y) * std::pow(scale, 3) * moved;
        ASSERT_NEAR(double{got[i]}, want,
                    std::fabs(factor) * error + std::fabs(want) * (p.cols / 2.0 + 16) * kUnit)
            << "head " << head << ", column " << c;
      }
    }
  }
  // Runs the whole text from zeros, in one step and in steps of a few rows.
  void expect_text(const Text& t) {
    for (const uint32_t rows : {t.rows, kFewRows}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows in a step");
      Net net = net_of(t, rows);
      ASSERT_TRUE(net.program);
      Reference reference(t);
      uint32_t from = kNoState;
      for (uint32_t first = 0; first < t.rows; first += rows) {
        const uint32_t to = from == 1 ? 2 : 1;
        expect_values(rows_of(net, t, first, std::min(rows, t.rows - first), from, to), reference, first);
        from = to;
      }
      expect_state(state(net, t.heads, from), reference);
    }
  }
};
THIMBLE_SHARED_OP_TESTS(DeltaNets);

TEST_P(DeltaNets, FollowTheRecurrence) {
  std::vector<Heads> all{{1, 1, 64, true}, {2, 6, 64, true}, {2, 6, 32, false}, {2, 2, 96, true}};
  if (is_slow())
    all.push_back({1, 2, 128, false});
  else
    all.insert(all.end(), {{16, 32, 128, true}, {4, 16, 128, false}});
  for (const Heads& h : all) {
    Random random{h.values * 1000 + h.width};
    const uint32_t before = 5;  // rows of the text before the step that reads a slot
    const Text text(h, before + 200, random);
    const std::vector<float> start = random.floats(state_floats(h), -0.3f, 0.3f);
    Net net = net_of(text, 203);
    ASSERT_TRUE(net.program);
    std::vector<uint32_t> sizes{1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 200};
    if (is_slow() || h.width * h.values > 400) sizes = {1, 3, 17, 33, 65, 200};
    for (const uint32_t rows : sizes) {
      SCOPED_TRACE(::testing::Message() << h.values << " heads of " << h.width << ", " << rows << " rows");
      poison(net);
      Reference from_none(text);
      expect_values(rows_of(net, text, 0, rows, kNoState, 2), from_none, 0);
      expect_state(state(net, h, 2), from_none);
      for (const uint32_t slot : {0u, 1u, 3u}) expect_poison(net, h, slot);

      fill(net, h, 1, start);
      const std::vector<float> other = state(net, h, 2);
      Reference from_slot(text, start);
      expect_values(rows_of(net, text, before, rows, 1, 3), from_slot, before);
      expect_state(state(net, h, 3), from_slot);
      EXPECT_EQ(state(net, h, 1), start);
      EXPECT_EQ(state(net, h, 2), other);
      expect_poison(net, h, 0);
    }
  }
}

TEST_P(DeltaNets, CarryTheStateFromStepToStep) {
  Random random;
  const Heads h{2, 4, 64, true};
  const Text text(h, 300, random);
  for (const uint32_t most : {kFewRows, 128u}) {
    SCOPED_TRACE(::testing::Message() << "a program of " << most << " rows");
    Net net = net_of(text, most);
    ASSERT_TRUE(net.program);
    Reference reference(text);
    uint32_t first = 0, from = kNoState;
    for (uint32_t rows : {1u, 1u, 2u, 5u, 1u, 8u, 16u, 33u, 3u, 64u, 1u, 128u, 37u}) {
      SCOPED_TRACE(first);
      rows = std::min(rows, most);
      const uint32_t to = from == 0 ? 1 : 0;
      expect_values(rows_of(net, text, first, rows, from, to), reference, first);
      expect_state(state(net, h, to), reference);
      first += rows;
      from = to;
    }
  }
}

// GPUs divide a long step.
TEST_P(DeltaNets, TakeManyRows) {
  Random random;
  const Heads h{1, 2, 32, true};
  const Text text(h, 600, random);
  Net net = net_of(text, 600);
  ASSERT_TRUE(net.program);
  for (const uint32_t rows : {600u, 513u, 512u, 257u, 256u, 5u}) {
    SCOPED_TRACE(rows);
    poison(net);
    Reference reference(text);
    expect_values(rows_of(net, text, 0, rows, kNoState, 1), reference, 0);
    expect_state(state(net, h, 1), reference);
  }
}

// Chunk borders depend on the text alone, if steps begin at multiples of a chunk.
TEST_P(DeltaNets, GiveTheSameBitsForOneStepAndForSeveral) {
  Random random;
  const Heads h{2, 4, 64, true};
  const Text text(h, 200, random);
  Net net = net_of(text, 200);
  ASSERT_TRUE(net.program);
  const std::vector<float> whole = rows_of(net, text, 0, 200, kNoState, 3), after = state(net, h, 3);
  std::vector<uint32_t> borders{64, 128, 192};
  if (!GetParam().starts_with("cuda")) borders.insert(borders.end(), {32, 96, 160});  // of chunks of 32 rows
  for (const uint32_t border : borders) {
    SCOPED_TRACE(border);
    std::vector<float> cut = rows_of(net, text, 0, border, kNoState, 0);
    const std::vector<float> rest = rows_of(net, text, border, 200 - border, 0, 1);
    cut.insert(cut.end(), rest.begin(), rest.end());
    EXPECT_EQ(whole, cut);
    EXPECT_EQ(after, state(net, h, 1));
  }
}

TEST_P(DeltaNets, ReadAndWriteTheOnlySlot) {
  Random random;
  const Heads h{1, 2, 64, true};
  const Text text(h, 90, random);
  for (const uint32_t most : {kFewRows, 40u}) {
    Net net = net_of(text, most, 1);
    ASSERT_TRUE(net.program);
    Reference reference(text);
    uint32_t first = 0;
    for (uint32_t rows : {3u, 1u, 0u, 40u, 6u, 40u}) {
      rows = std::min(rows, most);
      expect_values(rows_of(net, text, first, rows, first ? 0 : kNoState, 0), reference, first);
      expect_state(state(net, h, 0), reference);
      first += rows;
    }
  }
}

TEST_P(DeltaNets, CopyTheStateInAStepWithoutRows) {
  Random random;
  const Heads h{1, 2, 32, true};
  const Text text(h, 20, random);
  for (const uint32_t rows : {kFewRows, 20u}) {
    Net net = net_of(text, rows);
    ASSERT_TRUE(net.program);
    rows_of(net, text, 0, 0, kNoState, 0);
    EXPECT_EQ(state(net, h, 0), std::vector<float>(state_floats(h)));
    rows_of(net, text, 0, rows, kNoState, 1);
    rows_of(net, text, 0, 0, 1, 2);
    EXPECT_EQ(state(net, h, 2), state(net, h, 1));
  }
}

// For a token, a convolution, the delta_net that reads it, and the norm of what that writes may be launched
// together.
TEST_P(DeltaNets, StandBetweenAConvolutionAndANorm) {
  if (!device().supports(ShortConv{.p = {.taps = 2, .times_column = kNoColumn, .gate_column = kNoColumn}}))
    return;
  for (const Heads& h :
       std::vector<Heads>{{2, 4, 32, true}, {2, 6, 64, false}, {1, 3, 96, true}, {2, 4, 128, true}})
    for (const uint32_t taps : {2u, 4u, 8u, 3u, 5u}) {
      const bool normed = taps != 2 && taps != 8;
      SCOPED_TRACE(::testing::Message() << h.values << " heads of " << h.width << ", " << taps << " taps");
      clear();
      Random random{taps * 1000 + h.width};
      const uint32_t keys = h.keys * h.width, values = h.values * h.width, channels = 2 * keys + values;
      const uint32_t stride = channels + 2 * h.values + 3 + values;  // alpha, 1 unused, beta, 2 unused, z
      const size_t tail = size_t{taps - 1} * channels, slot = tail + state_floats(h) + kBehind;
      const std::vector<float> w = random.floats(size_t{channels} * taps);
      Text text(h, 0, random);
      const View x = output<float>(stride), middle = output<float>(channels), y = output<float>(values),
                 slots = output<float>(kSlots * slot);
      const auto part = [&](size_t first, size_t count) {
        return StateArray{slots.slice(first * sizeof(float), count * sizeof(float)), slot * sizeof(float),
                          kSlots};
      };
      const ShortConv conv{.x = x,
                           .w = input(w),
                           .bias = {},
                           .tail = part(0, tail),
                           .y = middle,
                           .p = {.channels = channels,
                                 .taps = taps,
                                 .x_column = 0,
                                 .times_column = kNoColumn,
                                 .gate_column = kNoColumn,
                                 .x_stride = stride,
                                 .y_stride = channels,
                                 .act = kActSilu}};
      const DeltaNet net{middle,
                         x,
                         input(text.a),
                         input(text.dt),
                         part(tail, state_floats(h)),
                         y,
                         {.key_heads = h.keys,
                          .value_heads = h.values,
                          .width = h.width,
                          .q_column = 0,
                          .k_column = keys,
                          .v_column = 2 * keys,
                          .qkv_stride = channels,
                          .alpha_column = channels,
                          .beta_column = channels + h.values + 1,
                          .gates_stride = stride,
                          .y_stride = values,
                          .eps = text.eps,
                          .tiled = h.tiled}};
      const std::vector<float> weight = random.floats(h.width, -2, 2);
      const GatedNorm norm{y,
                           x,
                           taps == 5 ? View() : input(weight),
                           y,
                           {.cols = h.width,
                            .groups = h.values,
                            .row_stride = values,
                            .z_stride = stride,
                            .z_column = stride - values,
                            .eps = 1e-2f,
                            .order = kNormThenGate,
                            .act = taps == 5 ? kActSigmoid : kActSilu}};
      const std::unique_ptr<Program> program = record(1, [&](Recorder& r) {
        r.record(conv);
        r.record(net);
        if (normed) r.record(norm);
      });
      ASSERT_TRUE(program);
      std::vector<float> tails(tail);
      Reference reference(text);
      uint32_t from = kNoState;
      for (const uint32_t rows : {1u, 1u, 0u, 1u, 1u}) {
        const std::vector<float> row = random.floats(stride, -2, 2);
        put(x, row);
        const uint32_t to = from == 2 ? 1 : 2;
        run(*program, {.n_rows = rows, .state_from = from, .state_to = to});
        from = to;
        if (rows) {
          const std::vector<float> convolved = get<float>(middle);
          for (uint32_t c = 0; c < channels; ++c) {
            double sum = 0, size = 0;
            for (uint32_t j = 0; j < taps; ++j) {
              const float u = j + 1 < taps ? tails[size_t{j} * channels + c] : row[c];
              sum += double{w[size_t{c} * taps + j]} * double{u};
              size += std::fabs(double{w[size_t{c} * taps + j]} * double{u});
            }
            const double want = sum / (1 + std::exp(-sum));  // tolerance: short_conv_test.cpp
            ASSERT_NEAR(double{convolved[c]}, want, (1.1 * size * (taps + 4) + 11 * std::fabs(want)) * kUnit);
          }
          tails.insert(tails.end(), row.begin(), row.begin() + channels);
          tails.erase(tails.begin(), tails.begin() + channels);
          // The next row of the text is what was convolved.
          const auto append = [](std::vector<float>& to_rows, const std::vector<float>& of, uint32_t first,
                                 uint32_t count) {
            to_rows.insert(to_rows.end(), of.begin() + first, of.begin() + first + count);
          };
          append(text.q, convolved, 0, keys);
          append(text.k, convolved, keys, keys);
          append(text.v, convolved, 2 * keys, values);
          append(text.alpha, row, net.p.alpha_column, h.values);
          append(text.beta, row, net.p.beta_column, h.values);
          if (normed)
            expect_normed(get<float>(y), reference.take(text.rows++), norm.p, &row[norm.p.z_column],
                          taps == 5 ? std::vector<float>(h.width, 1) : weight);
          else
            expect_values(get<float>(y), reference, text.rows++);
        }
        const std::vector<float> all = get<float>(slots);
        const auto begin = all.begin() + ptrdiff_t(to * slot);
        ASSERT_EQ(std::vector<float>(begin, begin + ptrdiff_t(tail)), tails);
        expect_state({begin + ptrdiff_t(tail), begin + ptrdiff_t(tail + state_floats(h))}, reference);
        ASSERT_TRUE(is_poison(all, 0, slot));
      }
    }
}

// Decays from nothing to everything, and gates that are shut or open.
TEST_P(DeltaNets, TakeExtremeGates) {
  Random random;
  const Heads h{1, 8, 64, true};
  for (const float logit : {-40.0f, 0.0f, 40.0f}) {
    SCOPED_TRACE(logit);
    Text text(h, 70, random);
    std::fill(text.beta.begin(), text.beta.end(), logit);
    // gamma of about -80, 0, -1e-8, and a growth
    text.a = {-80, 0, -1e-8f, 0.01f, -1, -1, -1, -1};
    std::fill(text.dt.begin(), text.dt.end(), 0.0f);
    const float alphas[] = {0.54f, 3, 0.54f, 1, 19.9f, 20, 20.1f, -90};
    for (size_t i = 0; i < text.alpha.size(); ++i) text.alpha[i] = alphas[i % 8];
    expect_text(text);
    // The first rows forget everything, and later ones nothing: the decays within a chunk differ by e^-2000.
    for (size_t i = 0; i < text.alpha.size() / 3; ++i) text.alpha[i] = 80;
    for (size_t i = text.alpha.size() / 3; i < text.alpha.size(); ++i) text.alpha[i] = -15;
    expect_text(text);
  }
}

TEST_P(DeltaNets, TakeEqualKeysAndZeros) {
  Random random;
  const Heads h{1, 2, 64, true};
  Text text(h, 100, random);
  text.a = {-1e-3f, -0.5f};
  for (size_t i = h.width; i < text.k.size(); ++i) text.k[i] = text.k[i % h.width];
  expect_text(text);
  std::fill(text.beta.begin(), text.beta.end(), 40.0f);  // each value replaces the one before it
  expect_text(text);
  for (uint32_t row = 10; row < 30; ++row) {
    std::fill_n(text.k.begin() + ptrdiff_t{row} * h.width, h.width, 0.0f);
    std::fill_n(text.q.begin() + ptrdiff_t{row + 1} * h.width, h.width, 0.0f);
  }
  expect_text(text);
  for (float& x : text.k) x *= 1e-4f;  // as small as eps
  expect_text(text);
}

TEST_P(DeltaNets, KeepNaNInItsHead) {
  Random random;
  const Heads h{1, 3, 64, true};
  Text text(h, 40, random);
  text.v[(size_t{5} * 3 + 1) * 64 + 7] = std::numeric_limits<float>::quiet_NaN();
  for (const uint32_t rows : {kFewRows, 40u}) {
    Net net = net_of(text, rows);
    ASSERT_TRUE(net.program);
    const std::vector<float> y = rows_of(net, text, 0, rows, kNoState, 0);
    for (uint32_t row = 0; row < rows; ++row)
      for (uint32_t c = 0; c < 3 * 64; ++c) {
        // Products of tiles multiply what comes later by zeros.
        if (rounds_delta(rows) && c == 64 + 7 && row < 5) continue;
        ASSERT_EQ(std::isnan(y[size_t{row} * 3 * 64 + c]), c == 64 + 7 && row >= 5) << row << " " << c;
      }
  }
}

TEST_P(DeltaNets, GiveTheSameBitsWithAnyNumberOfThreads) {
  if (!GetParam().starts_with("cpu")) return;
  Random random;
  const Heads h{2, 6, 64, true};
  const Text text(h, 67, random);
  std::vector<float> first;
  for (const uint32_t threads : {1u, 2u, 5u}) {
    open({.threads = threads});
    Net net = net_of(text, 67);
    ASSERT_TRUE(net.program);
    std::vector<float> y = rows_of(net, text, 0, 67, kNoState, 0);
    const std::vector<float> after = state(net, h, 0);
    y.insert(y.end(), after.begin(), after.end());
    if (first.empty()) first = y;
    EXPECT_EQ(first, y) << threads;
  }
}

}  // namespace
}  // namespace thimble::test
