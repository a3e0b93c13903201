// short_conv on every device, against its definition in double.
#include <cmath>

#include "tests/ops/op_test.h"

namespace thimble::test {
namespace {

constexpr uint32_t kSlots = 4;
constexpr uint32_t kBehind = 5;  // floats of another state, which follows the tail in each slot

class ShortConvs : public OpTest {
 protected:
  // The operands in addition to x and w, as in lfm2, qwen35, and a mamba layer.
  struct Kind {
    bool times, gate, silu, bias;
  };
  static constexpr Kind kGated{true, true, false, false}, kSilu{false, false, true, false},
      kBiased{false, false, true, true};

  // Inputs of u and the gate of a text, and the weights.
  struct Text {
    uint32_t rows, channels, taps;
    Kind kind;
    std::vector<float> x, times, gate;  // [rows][channels]; ones if the op has no such operand
    std::vector<float> w, bias;         // [channels][taps], [channels]

    Text(uint32_t n, uint32_t channel_count, uint32_t tap_count, Random& random, Kind of = kGated)
        : rows(n), channels(channel_count), taps(tap_count), kind(of) {
      const size_t size = size_t{n} * channels;
      x = random.floats(size, -2, 2);
      times = kind.times ? random.floats(size, -2, 2) : std::vector<float>(size, 1);
      gate = kind.gate ? random.floats(size, -2, 2) : std::vector<float>(size, 1);
      w = random.floats(size_t{channels} * taps, -1, 1);
      bias = kind.bias ? random.floats(channels, -1, 1) : std::vector<float>(channels);
    }
    // u as it is stored: the product rounded once, or zero before the text.
    float u(int row, uint32_t channel) const {
      const size_t i = size_t(std::max(row, 0)) * channels + channel;
      return row < 0 ? 0 : x[i] * times[i];
    }
    // y, and its largest error. Every term is rounded in u, in w u, in each of at most `taps` + 1 sums, and
    // in the product with the gate. silu is nowhere steeper than 1.1; its exponential is off by 2^-22, its
    // quotient by 2.5 ulp, as Vulkan allows, and a sum and a product are rounded.
    struct Value {
      double y, error;
    };
    Value y(uint32_t row, uint32_t channel) const {
      const double g = double{gate[size_t{row} * channels + channel]};
      double sum = double{bias[channel]}, size = std::fabs(sum);
      for (uint32_t j = 0; j < taps; ++j) {
        const int from = static_cast<int>(row + j) - static_cast<int>(taps - 1);
        if (from < 0) continue;
        const size_t i = size_t(from) * channels + channel;
        const double term = double{w[size_t{channel} * taps + j]} * double{x[i]} * double{times[i]};
        sum += term, size += std::fabs(term);
      }
      const double error = size * (taps + 4) * 0x1p-24;
      if (!kind.silu) return {g * sum, std::fabs(g) * error};
      const double y = sum / (1 + std::exp(-sum));
      return {g * y, std::fabs(g) * (1.1 * error + std::fabs(y) * (4 + 5 + 2) * 0x1p-24)};
    }
  };

  // A program of one short_conv, and operands whose rows have columns and padding around what the op uses.
  struct Conv {
    ShortConv op;
    std::unique_ptr<Program> program;
    View x, slots, y;
    uint32_t max_rows;
  };

  static uint64_t slot_floats(const Text& t) { return uint64_t{t.taps - 1} * t.channels + kBehind; }

  Conv conv_of(const Text& t, uint32_t max_rows, uint32_t slots = kSlots) {
    clear();
    const uint32_t c = t.channels;
    Conv conv;
    conv.max_rows = max_rows;
    // Columns: 3 unused, gate, 2 unused, x, times, 1 unused.
    const ShortConvParams p{.channels = c,
                            .taps = t.taps,
                            .x_column = c + 5,
                            .times_column = t.kind.times ? 2 * c + 5 : kNoColumn,
                            .gate_column = t.kind.gate ? 3 : kNoColumn,
                            .x_stride = 3 * c + 6,
                            .y_stride = c + 2,
                            .act = t.kind.silu ? kActSilu : kActNone};
    conv.x = inout(padded_rows(std::vector<float>(), size_t{max_rows} * p.x_stride));
    conv.slots = output<float>(slots * slot_floats(t));
    conv.y = output<float>(size_t{max_rows} * p.y_stride);
    const StateArray tail{.block0 = conv.slots.slice(0, (slot_floats(t) - kBehind) * sizeof(float)),
                          .slot_stride = slot_floats(t) * sizeof(float),
                          .slots = slots};
    conv.op = {conv.x, input(t.w), t.kind.bias ? input(t.bias) : View(), tail, conv.y, p};
    conv.program = record(max_rows, [&](Recorder& r) { r.record(conv.op); });
    return conv;
  }

  // Runs rows [first, first + rows) of the text, and returns [rows][channels] of y. Expects that nothing else
  // of y is written.
  std::vector<float> rows_of(Conv& conv, const Text& t, uint32_t first, uint32_t rows, uint32_t from,
                             uint32_t to) {
    const ShortConvParams& p = conv.op.p;
    std::vector<float> x = padded_rows(std::vector<float>(), size_t{conv.max_rows} * p.x_stride);
    for (uint32_t row = 0; row < rows; ++row) {
      const auto copy = [&](const std::vector<float>& of, uint32_t column) {
        std::copy_n(of.begin() + ptrdiff_t(first + row) * t.channels, t.channels,
                    x.begin() + ptrdiff_t{row} * p.x_stride + column);
      };
      copy(t.x, p.x_column);
      if (t.kind.times) copy(t.times, p.times_column);
      if (t.kind.gate) copy(t.gate, p.gate_column);
    }
    put(conv.x, x);
    put(conv.y, padded_rows(std::vector<float>(), size_t{conv.max_rows} * p.y_stride));
    run(*conv.program, {.n_rows = rows, .state_from = from, .state_to = to});
    const std::vector<float> all = get<float>(conv.y);
    std::vector<float> y;
    for (uint32_t row = 0; row < conv.max_rows; ++row) {
      const size_t at = size_t{row} * p.y_stride, used = row < rows ? t.channels : 0;
      y.insert(y.end(), all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + used));
      EXPECT_TRUE(is_poison(all, at + used, p.y_stride - used)) << "row " << row;
    }
    return y;
  }

  // The slot has the tail after so many rows of the text, and the state after it is not written.
  void expect_tail(const Conv& conv, const Text& t, uint32_t slot, uint32_t rows) {
    SCOPED_TRACE(::testing::Message() << "slot " << slot << " after " << rows << " rows");
    const std::vector<float> all = get<float>(conv.slots);
    size_t at = slot * slot_floats(t);
    for (uint32_t i = 0; i + 1 < t.taps; ++i)
      for (uint32_t c = 0; c < t.channels; ++c, ++at)
        ASSERT_EQ(all[at], t.u(static_cast<int>(rows + i) - static_cast<int>(t.taps - 1), c))
            << i << " " << c;
    EXPECT_TRUE(is_poison(all, at, kBehind));
  }
  void expect_poison(const Conv& conv, const Text& t, uint32_t slot) {
    EXPECT_TRUE(is_poison(get<float>(conv.slots), slot * slot_floats(t), slot_floats(t))) << "slot " << slot;
  }
  static void expect_values(const std::vector<float>& y, const Text& t, uint32_t first) {
    for (size_t i = 0; i < y.size(); ++i) {
      const uint32_t row = first + static_cast<uint32_t>(i / t.channels), c = i % t.channels;
      const Text::Value want = t.y(row, c);
      ASSERT_NEAR(double{y[i]}, want.y, want.error) << "row " << row << ", channel " << c;
    }
  }

  // Runs steps of many lengths from zeros and from a slot.
  void expect_sums(Kind kind) {
    for (const uint32_t taps : fewer({2, 3, 4, 8}, {2, 3, 8})) {
      for (const uint32_t channels : fewer({1, 63, 64, 65, 300, 2048}, {65, 300})) {
        SCOPED_TRACE(::testing::Message() << taps << " taps, " << channels << " channels");
        Random random{taps * 1000 + channels};
        const uint32_t before = taps + 6;  // rows of the text before the step that reads a slot
        const Text text(before + 200, channels, taps, random, kind);
        Conv conv = conv_of(text, 203);
        ASSERT_TRUE(conv.program);
        for (const uint32_t rows : {0u, 1u, 2u, taps - 2, taps, 15u, 16u, 17u, 63u, 64u, 65u, 200u}) {
          SCOPED_TRACE(::testing::Message() << rows << " rows");
          put(conv.slots, padded_rows(std::vector<float>(), conv.slots.bytes / sizeof(float)));
          expect_values(rows_of(conv, text, 0, rows, kNoState, 2), text, 0);
          expect_tail(conv, text, 2, rows);
          for (const uint32_t slot : {0u, 1u, 3u}) expect_poison(conv, text, slot);

          rows_of(conv, text, 0, before, kNoState, 1);
          expect_values(rows_of(conv, text, before, rows, 1, 3), text, before);
          expect_tail(conv, text, 1, before);
          expect_tail(conv, text, 2, rows);
          expect_tail(conv, text, 3, before + rows);
          expect_poison(conv, text, 0);
        }
      }
    }
  }
};
THIMBLE_OP_TESTS(ShortConvs);

TEST_P(ShortConvs, AddTheLastRowsOfEachChannel) { expect_sums(kGated); }

TEST_P(ShortConvs, PassTheirSumsThroughSilu) { expect_sums(kSilu); }
TEST_P(ShortConvs, AddABias) { expect_sums(kBiased); }

// A program is replayed with other slots: bits do not depend on how a text is cut into steps.
TEST_P(ShortConvs, GiveTheSameBitsForOneStepAndForSeveral) {
  for (const uint32_t taps : {2u, 3u, 8u}) {
    SCOPED_TRACE(::testing::Message() << taps << " taps");
    Random random{taps};
    const Text text(70, 65, taps, random);
    Conv conv = conv_of(text, 70);
    ASSERT_TRUE(conv.program);
    const std::vector<float> whole = rows_of(conv, text, 0, 70, kNoState, 3);
    std::vector<float> cut;
    uint32_t first = 0, from = kNoState;
    for (const uint32_t rows : {1u, 1u, 2u, 5u, 0u, 1u, 8u, 16u, 33u, 3u}) {
      const uint32_t to = from == 0 ? 1 : 0;
      const std::vector<float> y = rows_of(conv, text, first, rows, from, to);
      cut.insert(cut.end(), y.begin(), y.end());
      first += rows;
      from = to;
      expect_tail(conv, text, to, first);
    }
    ASSERT_EQ(whole.size(), cut.size());
    EXPECT_EQ(std::memcmp(whole.data(), cut.data(), cut.size() * sizeof(float)), 0);
  }
}

TEST_P(ShortConvs, ReadAndWriteTheOnlySlot) {
  Random random;
  const Text text(60, 300, 8, random);
  Conv conv = conv_of(text, 40, 1);
  ASSERT_TRUE(conv.program);
  uint32_t first = 0;
  for (const uint32_t rows : {3u, 1u, 40u, 2u, 14u}) {
    expect_values(rows_of(conv, text, first, rows, first ? 0 : kNoState, 0), text, first);
    first += rows;
    expect_tail(conv, text, 0, first);
  }
}

// Two layers whose states are in one buffer, as in a pool: the second one reads what the first one writes.
TEST_P(ShortConvs, FollowEachOther) {
  Random random;
  const Text first(20, 64, 3, random);
  const uint32_t c = first.channels;
  std::vector<float> x;
  for (uint32_t row = 0; row < first.rows; ++row)
    for (const std::vector<float>* part : {&first.x, &first.times, &first.gate})
      x.insert(x.end(), part->begin() + ptrdiff_t{row} * c, part->begin() + ptrdiff_t{row + 1} * c);
  const uint64_t bytes = uint64_t{2} * c * sizeof(float);
  const View states = output<float>(2 * 2 * 2 * c), rows = input(x), w = input(first.w);
  const View y = inout(x);  // the first layer replaces the first columns
  const View z = output<float>(size_t{first.rows} * c);
  const ShortConvParams p{.channels = c,
                          .taps = 3,
                          .x_column = 0,
                          .times_column = c,
                          .gate_column = 2 * c,
                          .x_stride = 3 * c,
                          .y_stride = 3 * c,
                          .act = kActNone};
  ShortConvParams second = p;
  second.y_stride = c;
  run({.n_rows = first.rows, .state_to = 1}, first.rows, [&](Recorder& r) {
    r.record(ShortConv{rows, w, {}, {states.slice(0, bytes), 2 * bytes, 2}, y, p});
    r.record(ShortConv{y, w, {}, {states.slice(bytes, bytes), 2 * bytes, 2}, z, second});
  });
  Text after = first;
  const std::vector<float> between = get<float>(y);
  for (uint32_t row = 0; row < first.rows; ++row)
    for (uint32_t channel = 0; channel < c; ++channel) {
      const float value = between[size_t{row} * p.x_stride + channel];
      const Text::Value want = first.y(row, channel);
      ASSERT_NEAR(double{value}, want.y, want.error);
      after.x[size_t{row} * c + channel] = value;
    }
  expect_values(get<float>(z), after, 0);
}

TEST_P(ShortConvs, KeepNaNInItsChannelAndItsRows) {
  Random random;
  Text text(20, 65, 3, random);
  text.x[size_t{5} * 65 + 7] = std::numeric_limits<float>::quiet_NaN();
  Conv conv = conv_of(text, 20);
  ASSERT_TRUE(conv.program);
  const std::vector<float> y = rows_of(conv, text, 0, 20, kNoState, 0);
  for (uint32_t row = 0; row < 20; ++row)
    for (uint32_t c = 0; c < 65; ++c)
      ASSERT_EQ(std::isnan(y[size_t{row} * 65 + c]), c == 7 && row >= 5 && row < 8) << row << " " << c;
}

}  // namespace
}  // namespace thimble::test
