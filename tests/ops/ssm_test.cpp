// ssm on every device, against the recurrence in double.
#include <cmath>
#include <limits>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

constexpr uint32_t kSlots = 4;
constexpr uint32_t kBehind = 5;  // floats of another state, which follows the matrices in each slot
constexpr double kUnit = 0x1p-24;

struct Heads {
  uint32_t heads, groups, width, state;
  uint32_t group_of(uint32_t head) const { return head / (heads / groups); }
  size_t values() const { return size_t{heads} * width; }
  size_t keys() const { return size_t{groups} * state; }
  size_t state_floats() const { return values() * state; }
  size_t slot_floats() const { return state_floats() + kBehind; }
};

// The inputs of a text.
struct Text {
  Heads of;
  uint32_t rows;
  std::vector<float> x, b, c, dt;  // [rows][heads][width], [rows][groups][state] twice, [rows][heads]
  std::vector<float> dt_bias, a, d;

  Text(const Heads& heads, uint32_t n, Random& random) : of(heads), rows(n) {
    x = random.floats(n * of.values(), -2, 2);
    b = random.floats(n * of.keys(), -2, 2);
    c = random.floats(n * of.keys(), -2, 2);
    dt = random.floats(size_t{n} * of.heads, -4, 3);
    dt_bias = random.floats(of.heads, -3, 1);
    a = random.floats(of.heads, -2, -0.01f);
    d = random.floats(of.heads, -3, 3);
  }
};

// The states in double, and a bound of what f32 may differ from them.
//
// `mass` of an element of S is the sum of the absolute values that were added to it, decayed. A step rounds
// each of its sums, of at most `state` products with the state or of the chunk's rows, by at most terms()
// units of the sum of the absolute values of its terms, which is that of the masses. (Matrix units that take
// a factor as two tf32 round a product by up to 12 units, and each of their sums, three for 8 terms, by 2.)
// The factor e^(delta a) is off by the rounding of its exponent and of the sum that softplus takes, and delta
// by that of the sum.
struct Reference {
  const Text& text;
  std::vector<double> s, mass, error;  // [heads][state][width]

  explicit Reference(const Text& t) : text(t) {
    for (auto* of : {&s, &mass, &error}) of->resize(t.of.state_floats());
  }
  // Starts from these states.
  Reference(const Text& t, const std::vector<float>& start) : Reference(t) {
    for (size_t i = 0; i < s.size(); ++i) mass[i] = std::fabs(s[i] = double{start[i]});
  }

  double terms() const { return text.of.state + 128 + 24; }  // no chunk has more than 128 rows

  struct Value {
    double y, error;
  };
  // Takes row `row`, and returns [heads][width].
  std::vector<Value> take(uint32_t row) {
    const Heads& h = text.of;
    std::vector<Value> values;
    for (uint32_t head = 0; head < h.heads; ++head) {
      const double a = double{text.a[head]};
      const double dt = double{text.dt[size_t{row} * h.heads + head]} + double{text.dt_bias[head]};
      const double delta = dt > 20 ? dt : std::log1p(std::exp(dt)), gamma = delta * a,
                   decay = std::exp(gamma);
      const double decay_error = decay * (16 * std::fabs(gamma) + std::fabs(a * dt) + 4) * kUnit;
      const double delta_error = (std::fabs(dt) + 16) * kUnit;
      const size_t key = size_t{row} * h.keys() + size_t{h.group_of(head)} * h.state;
      for (uint32_t col = 0; col < h.width; ++col) {
        const double x = double{text.x[size_t{row} * h.values() + size_t{head} * h.width + col]};
        const double skipped = double{text.d[head]} * x;
        Value value{skipped, terms() * kUnit * std::fabs(skipped)};
        for (uint32_t i = 0; i < h.state; ++i) {
          const size_t at = (size_t{head} * h.state + i) * h.width + col;
          const double added = double{text.b[key + i]} * delta * x, c = double{text.c[key + i]};
          error[at] = error[at] * decay + mass[at] * decay_error + std::fabs(added) * delta_error;
          mass[at] = mass[at] * decay + std::fabs(added);
          s[at] = s[at] * decay + added;
          error[at] += terms() * kUnit * mass[at];
          value.y += c * s[at];
          value.error += std::fabs(c) * (error[at] + terms() * kUnit * mass[at]);
        }
        values.push_back(value);
      }
    }
    return values;
  }
};

class Ssms : public OpTest {
 protected:
  // A program of one ssm, and operands whose rows have columns and padding around what the op uses.
  struct Net {
    Ssm op;
    std::unique_ptr<Program> program;
    View xbc, dt, slots, y;
    uint32_t max_rows;
  };

  Net net_of(const Text& t, uint32_t max_rows, uint32_t slots = kSlots) {
    clear();
    const Heads& h = t.of;
    const uint32_t values = h.heads * h.width, keys = h.groups * h.state;
    Net net;
    net.max_rows = max_rows;
    // Columns: some unused, B, x, some unused, C, some unused; 1 unused, dt, 2 unused. With an even number of
    // heads, B and C begin at whole quads, as they do in models.
    const uint32_t unused = h.heads % 2 == 0 ? 4 : 3;
    const SsmParams p{.heads = h.heads,
                      .groups = h.groups,
                      .width = h.width,
                      .state = h.state,
                      .x_column = keys + unused,
                      .b_column = unused,
                      .c_column = keys + values + 2 * unused,
                      .xbc_stride = 2 * keys + values + 3 * unused,
                      .dt_column = 1,
                      .dt_stride = h.heads + 3,
                      .y_stride = values + 2};
    net.xbc = output<float>(size_t{max_rows} * p.xbc_stride);
    net.dt = output<float>(size_t{max_rows} * p.dt_stride);
    net.slots = output<float>(slots * h.slot_floats());
    net.y = output<float>(size_t{max_rows} * p.y_stride);
    const StateArray s{.block0 = net.slots.slice(0, h.state_floats() * sizeof(float)),
                       .slot_stride = h.slot_floats() * sizeof(float),
                       .slots = slots};
    net.op = {net.xbc, net.dt, input(t.dt_bias), input(t.a), input(t.d), s, net.y, p};
    net.program = record(max_rows, [&](Recorder& r) { r.record(net.op); });
    return net;
  }

  // Runs rows [first, first + rows) of the text, and returns [rows][heads][width] of y. Expects that nothing
  // else of y is written.
  std::vector<float> rows_of(Net& net, const Text& t, uint32_t first, uint32_t rows, uint32_t from,
                             uint32_t to) {
    const SsmParams& p = net.op.p;
    std::vector<float> xbc = padded_rows(std::vector<float>(), size_t{net.max_rows} * p.xbc_stride);
    std::vector<float> dt = padded_rows(std::vector<float>(), size_t{net.max_rows} * p.dt_stride);
    for (uint32_t row = 0; row < rows; ++row) {
      const auto copy = [&](const std::vector<float>& of, size_t cols, std::vector<float>& all,
                            uint32_t stride, uint32_t column) {
        std::copy_n(of.begin() + ptrdiff_t((first + row) * cols), cols,
                    all.begin() + ptrdiff_t{row} * stride + column);
      };
      copy(t.x, t.of.values(), xbc, p.xbc_stride, p.x_column);
      copy(t.b, t.of.keys(), xbc, p.xbc_stride, p.b_column);
      copy(t.c, t.of.keys(), xbc, p.xbc_stride, p.c_column);
      copy(t.dt, p.heads, dt, p.dt_stride, p.dt_column);
    }
    put(net.xbc, xbc);
    put(net.dt, dt);
    put(net.y, padded_rows(std::vector<float>(), size_t{net.max_rows} * p.y_stride));
    run(*net.program, {.n_rows = rows, .state_from = from, .state_to = to});
    const std::vector<float> all = get<float>(net.y);
    std::vector<float> y;
    for (uint32_t row = 0; row < net.max_rows; ++row) {
      const size_t at = size_t{row} * p.y_stride, used = row < rows ? t.of.values() : 0;
      y.insert(y.end(), all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + used));
      EXPECT_TRUE(is_poison(all, at + used, p.y_stride - used)) << "row " << row;
    }
    return y;
  }

  std::vector<float> state(const Net& net, const Heads& h, uint32_t slot) {
    const std::vector<float> all = get<float>(net.slots);
    const auto begin = all.begin() + ptrdiff_t(slot * h.slot_floats());
    EXPECT_TRUE(is_poison(all, slot * h.slot_floats() + h.state_floats(), kBehind)) << "slot " << slot;
    return {begin, begin + ptrdiff_t(h.state_floats())};
  }
  void expect_poison(const Net& net, const Heads& h, uint32_t slot) {
    EXPECT_TRUE(is_poison(get<float>(net.slots), slot * h.slot_floats(), h.slot_floats())) << "slot " << slot;
  }
  void poison(const Net& net) {
    put(net.slots, padded_rows(std::vector<float>(), net.slots.bytes / sizeof(float)));
  }
  void fill(const Net& net, const Heads& h, uint32_t slot, const std::vector<float>& values) {
    std::vector<float> all = get<float>(net.slots);
    std::copy(values.begin(), values.end(), all.begin() + ptrdiff_t(slot * h.slot_floats()));
    put(net.slots, all);
  }

  // The rows of a step give what the reference gives, which goes on by these rows.
  static void expect_values(const std::vector<float>& y, Reference& reference, uint32_t first) {
    const size_t cols = reference.text.of.values();
    for (uint32_t row = 0; row < y.size() / cols; ++row) {
      const std::vector<Reference::Value> want = reference.take(first + row);
      for (size_t c = 0; c < cols; ++c)
        ASSERT_NEAR(double{y[row * cols + c]}, want[c].y, want[c].error + 1e-30)
            << "row " << first + row << ", head " << c / reference.text.of.width << ", column "
            << c % reference.text.of.width;
    }
  }
  static void expect_state(const std::vector<float>& s, const Reference& reference) {
    for (size_t i = 0; i < s.size(); ++i)
      ASSERT_NEAR(double{s[i]}, reference.s[i], reference.error[i] + 1e-30) << "element " << i;
  }
  // Runs the whole text in one step from zeros.
  void expect_text(const Text& t) {
    Net net = net_of(t, t.rows);
    ASSERT_TRUE(net.program);
    Reference reference(t);
    expect_values(rows_of(net, t, 0, t.rows, kNoState, 1), reference, 0);
    expect_state(state(net, t.of, 1), reference);
  }
};
THIMBLE_OP_TESTS_WITH(Ssms, Ssm);
INSTANTIATE_TEST_SUITE_P(InParts, Ssms, ::testing::Values(kCpuInParts), device_test_name);

TEST_P(Ssms, FollowTheRecurrence) {
  std::vector<Heads> all{{1, 1, 16, 16}, {10, 2, 32, 64}, {3, 3, 80, 16}, {2, 1, 64, 256}};
  if (!is_slow())
    all.insert(all.end(), {{48, 1, 64, 128}, {16, 8, 64, 128}, {3, 1, 256, 256}, {2, 2, 112, 80}});
  for (const Heads& h : all) {
    Random random{h.heads * 1000 + h.width};
    const uint32_t before = 5;  // rows of the text before the step that reads a slot
    const Text text(h, before + 300, random);
    const std::vector<float> start = random.floats(h.state_floats(), -0.3f, 0.3f);
    Net net = net_of(text, 303);
    ASSERT_TRUE(net.program);
    std::vector<uint32_t> sizes{1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 300};
    if (is_slow() || h.values() > 400) sizes = {1, 3, 17, 33, 65, 200};
    for (const uint32_t rows : sizes) {
      SCOPED_TRACE(::testing::Message()
                   << h.heads << " heads of " << h.width << " x " << h.state << ", " << rows << " rows");
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

TEST_P(Ssms, CarryTheStateFromStepToStep) {
  Random random;
  const Heads h{4, 2, 64, 64};
  const Text text(h, 300, random);
  Net net = net_of(text, 128);
  ASSERT_TRUE(net.program);
  Reference reference(text);
  uint32_t first = 0, from = kNoState;
  for (const uint32_t rows : {1u, 1u, 2u, 5u, 1u, 8u, 16u, 33u, 3u, 64u, 1u, 128u, 37u}) {
    SCOPED_TRACE(first);
    const uint32_t to = from == 0 ? 1 : 0;
    expect_values(rows_of(net, text, first, rows, from, to), reference, first);
    expect_state(state(net, h, to), reference);
    first += rows;
    from = to;
  }
  EXPECT_EQ(first, text.rows);
}

// GPUs read programs of few rows row by row.
TEST_P(Ssms, ReadFewRowsInASmallProgram) {
  std::vector<Heads> all{{4, 2, 32, 64}};
  if (!is_slow()) all.insert(all.end(), {{1, 1, 16, 16}, {3, 3, 80, 48}, {2, 1, 64, 128}, {2, 1, 112, 256}});
  for (const Heads& h : all)
    for (const uint32_t most : fewer({1, 2, 8, 15, 16}, {1, 8})) {
      SCOPED_TRACE(::testing::Message() << h.width << " x " << h.state << ", up to " << most << " rows");
      Random random;
      const Text text(h, 40, random);
      Net net = net_of(text, most);
      ASSERT_TRUE(net.program);
      Reference reference(text);
      uint32_t from = kNoState;
      for (uint32_t first = 0; first < text.rows; first += most) {
        const uint32_t rows = std::min(most, text.rows - first), to = from == 0 ? 1 : 0;
        expect_values(rows_of(net, text, first, rows, from, to), reference, first);
        expect_state(state(net, h, to), reference);
        from = to;
      }
    }
}

// GPUs divide a long step: Vulkan by its rows, CUDA by the size of the states between chunks.
TEST_P(Ssms, TakeManyRows) {
  std::vector<Heads> all{{1, 1, 16, 32}};
  if (GetParam().starts_with("cuda")) all.push_back({64, 1, 64, 256});
  for (const Heads& h : all) {
    SCOPED_TRACE(h.heads);
    Random random;
    const Text text(h, 600, random);
    Net net = net_of(text, 600);
    ASSERT_TRUE(net.program);
    // A step of few rows leaves the later passes nothing.
    for (const uint32_t rows : {600u, 5u}) {
      poison(net);
      Reference reference(text);
      expect_values(rows_of(net, text, 0, rows, kNoState, 1), reference, 0);
      expect_state(state(net, h, 1), reference);
    }
  }
}

// Chunk borders depend on the text alone, if steps begin at multiples of a chunk.
TEST_P(Ssms, GiveTheSameBitsForOneStepAndForSeveral) {
  Random random;
  const Heads h{6, 2, 32, 64};
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

TEST_P(Ssms, ReadAndWriteTheOnlySlot) {
  Random random;
  const Heads h{2, 1, 48, 32};
  const Text text(h, 90, random);
  Net net = net_of(text, 40, 1);
  ASSERT_TRUE(net.program);
  Reference reference(text);
  uint32_t first = 0;
  for (const uint32_t rows : {3u, 1u, 0u, 40u, 6u, 40u}) {
    expect_values(rows_of(net, text, first, rows, first ? 0 : kNoState, 0), reference, first);
    expect_state(state(net, h, 0), reference);
    first += rows;
  }
}

TEST_P(Ssms, CopyTheStateInAStepWithoutRows) {
  Random random;
  const Heads h{2, 1, 32, 16};
  const Text text(h, 20, random);
  Net net = net_of(text, 20);
  ASSERT_TRUE(net.program);
  rows_of(net, text, 0, 0, kNoState, 0);
  EXPECT_EQ(state(net, h, 0), std::vector<float>(h.state_floats()));
  rows_of(net, text, 0, 20, kNoState, 1);
  rows_of(net, text, 0, 0, 1, 2);
  EXPECT_EQ(state(net, h, 2), state(net, h, 1));
}

// Decays from nothing to everything, and both sides of softplus's border.
TEST_P(Ssms, TakeExtremeDecays) {
  Random random;
  const Heads h{8, 1, 32, 64};
  Text text(h, 70, random);
  // decays of about e^-80, 1 and e^-1e-8, and a growth
  text.a = {-80, 0, -1e-8f, 0.01f, -1, -1, -1, -1};
  std::fill(text.dt_bias.begin(), text.dt_bias.end(), 0.0f);
  const float logits[] = {0.54f, 3, 0.54f, 1, 19.9f, 20, 20.1f, -90};
  for (size_t i = 0; i < text.dt.size(); ++i) text.dt[i] = logits[i % 8];
  expect_text(text);
  // The first rows forget everything, and later ones nothing: the decays within a chunk differ by e^-2000.
  // What later rows add is small next to d x.
  std::fill(text.d.begin(), text.d.end(), 0.0f);
  for (size_t i = 0; i < text.dt.size() / 3; ++i) text.dt[i] = 80;
  for (size_t i = text.dt.size() / 3; i < text.dt.size(); ++i) text.dt[i] = -12;
  expect_text(text);
}

TEST_P(Ssms, TakeEqualKeysAndZeros) {
  Random random;
  const Heads h{2, 1, 32, 64};
  Text text(h, 100, random);
  text.a = {-1e-3f, -0.5f};
  for (size_t i = h.state; i < text.b.size(); ++i) text.b[i] = text.b[i % h.state];
  expect_text(text);
  for (uint32_t row = 10; row < 30; ++row) {
    std::fill_n(text.b.begin() + ptrdiff_t{row} * h.state, h.state, 0.0f);
    std::fill_n(text.c.begin() + ptrdiff_t{row + 1} * h.state, h.state, 0.0f);
    std::fill_n(text.x.begin() + ptrdiff_t{row + 2} * h.heads * h.width, h.width, 0.0f);
  }
  expect_text(text);
}

TEST_P(Ssms, KeepNaNInItsHeadsAndInLaterRows) {
  Random random;
  const Heads h{4, 2, 32, 32};
  const uint32_t rows = 80;
  const Text text(h, rows, random);
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  Net net = net_of(text, rows);
  ASSERT_TRUE(net.program);
  for (const uint32_t from : {6u, 37u})
    for (const std::string operand : {"x", "dt", "b", "c"}) {
      SCOPED_TRACE(operand + " of row " + std::to_string(from));
      Text broken = text;
      if (operand == "x") broken.x[(size_t{from} * 4 + 1) * 32 + 7] = kNaN;
      if (operand == "dt") broken.dt[size_t{from} * 4 + 1] = kNaN;
      if (operand == "b") broken.b[(size_t{from} * 2 + 1) * 32 + 7] = kNaN;
      if (operand == "c") broken.c[(size_t{from} * 2 + 1) * 32 + 7] = kNaN;
      const std::vector<float> y = rows_of(net, broken, 0, rows, kNoState, 0);
      for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t c = 0; c < h.values(); ++c) {
          const uint32_t head = c / 32;
          const bool in_columns = operand == "x"    ? c == 32 + 7
                                  : operand == "dt" ? head == 1
                                                    : h.group_of(head) == 1;
          const bool in_rows = operand == "c" ? row == from : row >= from;
          ASSERT_EQ(std::isnan(y[size_t{row} * h.values() + c]), in_columns && in_rows) << row << " " << c;
        }
    }
}

TEST_P(Ssms, GiveTheSameBitsWithAnyNumberOfThreads) {
  Random random;
  const Heads h{10, 2, 32, 64};
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
