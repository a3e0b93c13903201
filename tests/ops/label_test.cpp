// label, compared with plain loops in double precision.
#include <array>
#include <set>

#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

constexpr float kLeast = -4;  // some labels of these operands are below it

struct Shape {
  uint32_t group, head_dim;
  std::vector<uint32_t> entries;  // per KV head
  uint32_t rows;
  Rotation rotation;
  std::array<uint32_t, 4> range = {0, 0, UINT32_MAX, UINT32_MAX};  // all entries
  bool weighed = false;                                            // with the inputs x and worth
  float cap = 0;
  bool sinks = false;
};

// The devices that have the op.
std::vector<std::string> labelling_devices() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) {
    const auto device = open_device(name.substr(0, name.find(kPortable)), strictly({}));
    return !device.ok() || !(*device)->supports(Label{});
  });
  return names;
}

class Labels : public OpTest {
 protected:
  void expect_labels(const Shape& s, const std::vector<uint32_t>& marked) {
    SCOPED_TRACE(::testing::Message()
                 << s.entries.size() << " heads, group " << s.group << ", width " << s.head_dim << ", "
                 << s.entries[0] << " entries, " << s.rows << " rows");
    clear();
    const auto heads = static_cast<uint32_t>(s.entries.size()), queries = heads * s.group, dh = s.head_dim;
    const uint32_t max_rows = s.rows + 2, chunk_capacity = max_rows + 1, stride = queries * dh + 3,
                   position = 37;
    const std::vector<HeadState> runs = behind_other_rows(unequal_heads(s.entries, 4));
    const std::vector<HeadState> own(runs.begin() + kOtherRows, runs.end());
    const uint32_t longest = *std::max_element(s.entries.begin(), s.entries.end()), capacity = longest + 3;
    SessionShape shape = session_of(runs, max_rows);
    shape.labels = true;
    size_for(heads, s.group, dh, shape);
    Random random{s.group + dh + s.rows + longest};
    const std::vector<float> q = random.floats(size_t(s.rows) * stride, -3, 3);
    const std::vector<uint16_t> k = halves(random.floats(size_t(layer_entries(own)) * dh)),
                                chunk_k = halves(random.floats(size_t(heads) * chunk_capacity * dh));
    const std::vector<float> before = random.floats(size_t(heads) * capacity, -9, 1);
    const View lse = output<float>(size_t(max_rows) * queries), max_logit = inout(before),
               log_prob = inout(before);
    KvArray keys, own_keys;
    keys.values = input(k);
    own_keys.values = input(chunk_k);
    const float scale = 1 / std::sqrt(float(dh));
    RopeParams rope = s.rotation.params();
    constexpr uint32_t kCols = 19;
    const std::vector<float> x = random.floats(size_t(s.rows) * kCols, -2, 3),
                             worth = random.floats(size_t(queries) * capacity, -2, 1),
                             sinks = random.floats(queries, -1, 6);
    const Label op{input(padded_rows(q, size_t(max_rows) * stride)),
                   input(padded_rows(marked, max_rows)),
                   keys,
                   own_keys,
                   input(s.rotation.table(position + max_rows)),
                   input(std::vector<uint32_t>(s.range.begin(), s.range.end())),
                   s.weighed ? input(padded_rows(x, size_t(max_rows) * kCols)) : View{},
                   s.weighed ? input(worth) : View{},
                   s.sinks ? input(sinks) : View{},
                   lse,
                   max_logit,
                   log_prob,
                   {.heads = heads,
                    .group = s.group,
                    .head_dim = dh,
                    .row_stride = stride,
                    .chunk_capacity = chunk_capacity,
                    .head_state = kOtherRows,
                    .label_capacity = capacity,
                    .x_cols = kCols,
                    .cap = s.cap,
                    .scale = scale,
                    .least = kLeast,
                    .rope = rope}};
    StepParams step{.n_rows = s.rows, .position = static_cast<int>(position)};
    run(step, runs, max_rows, [&](Recorder& r) { r.record(op); });

    const std::vector<float> logits = get<float>(max_logit), logs = get<float>(log_prob),
                             sums = get<float>(lse);
    const bool any = std::any_of(marked.begin(), marked.end(), [](uint32_t m) { return m != 0; });
    // The error of a logit, as in attention_tolerance(), whose conditions |q| <= 3 and |k| <= 1 hold.
    const double of_logit =
        (dh + 8) * 0x1p-24 * 3 * std::sqrt(double(dh)) * s.rotation.factor + double{s.cap} * 0x1p-22;
    for (uint32_t head = 0; head < heads; ++head) {
      const uint32_t n = s.entries[head];
      const auto labelled = [&](uint32_t t) { return t < n && t >= s.range[1] && t < s.range[2]; };
      std::vector<double> expected_logit(capacity), expected_log(capacity), tolerance(capacity, 0);
      for (uint32_t t = 0; t < capacity; ++t) {
        expected_logit[t] = expected_log[t] = before[head * capacity + t];
        if (any && labelled(t))
          expected_logit[t] = expected_log[t] = std::max(expected_logit[t], double{kLeast});
      }
      for (uint32_t row = 0; row < s.rows; ++row)
        for (uint32_t h = 0; h < s.group; ++h) {
          const uint32_t query = head * s.group + h;
          if (!marked[row]) {
            EXPECT_TRUE(is_poison(sums, row * queries + query, 1));
            continue;
          }
          const std::vector<double> rotated =
              s.rotation.rotated_query(doubles(q, row * stride + query * dh, dh), position + row);
          std::vector<double> row_logits;
          double sum = s.sinks ? std::exp(double{sinks[query]}) : 0;
          for (uint32_t t = 0; t <= n + row; ++t) {
            const std::vector<double> key =
                t < n ? doubles(k, (own[head].first + size_t(t)) * dh, dh)
                      : doubles(chunk_k, (size_t(head) * chunk_capacity + t - n) * dh, dh);
            const double logit = dot(rotated, key) * double{scale}, cap = double{s.cap};
            row_logits.push_back(cap == 0 ? logit : cap * std::tanh(logit / cap));
            if (t < s.range[0] || labelled(t) || t >= std::min(s.range[3], n))
              sum += std::exp(row_logits.back());
          }
          double log_sum = std::log(sum);
          if (s.weighed) {
            const std::vector<double> x_row = doubles(x, row * kCols, kCols);
            log_sum += std::log(std::sqrt(dot(x_row, x_row)));
          }
          // Tiles of 64 are added as logarithms. Each addition rounds a few times, in the summand and in the
          // sum so far, and so do the 64 terms within a tile.
          const double of_sum =
              of_logit + (4 * (n + row + 1) / 64.0 + 8) * 0x1p-23 * (1 + std::fabs(log_sum)) + 64 * 0x1p-24;
          EXPECT_NEAR(sums[row * queries + query], log_sum, of_sum);
          for (uint32_t t = 0; t < n; ++t) {
            if (!labelled(t)) continue;
            const float more = s.weighed ? worth[query * capacity + t] : 0;
            expected_logit[t] = std::max(expected_logit[t], row_logits[t]);
            expected_log[t] = std::max(expected_log[t], row_logits[t] - log_sum + double{more});
            tolerance[t] = std::max(tolerance[t], of_sum + of_logit);
          }
        }
      for (uint32_t t = 0; t < capacity; ++t) {
        ASSERT_NEAR(logits[head * capacity + t], expected_logit[t], tolerance[t] + 0x1p-22) << "entry " << t;
        ASSERT_NEAR(logs[head * capacity + t], expected_log[t], tolerance[t] + 0x1p-22) << "entry " << t;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(On, Labels, ::testing::ValuesIn(labelling_devices()), device_test_name);

TEST_P(Labels, AreTheLargestLogitsAndLogProbabilitiesOfMarkedRows) {
  const Rotation original{kRopeOriginal, kRopeAdjacent, 16};
  const Rotation in_halves{kRopeOriginal, kRopeHalves, 8, 1.25};
  expect_labels({4, 16, {70, 131}, 9, original}, {0, 1, 1, 0, 0, 1, 0, 0, 1});
  expect_labels({1, 16, {513}, 200, original}, std::vector<uint32_t>(200, 1));
  expect_labels({3, 24, {64, 5, 1030}, 67, in_halves}, [] {
    std::vector<uint32_t> marked(67);
    for (uint32_t i = 3; i < 67; i += 7) marked[i] = 1;
    return marked;
  }());
  expect_labels({2, 72, {200, 97}, 40, in_halves}, std::vector<uint32_t>(40, 1));
  expect_labels({4, 128, {1500}, 60, original}, std::vector<uint32_t>(60, 1));
  if (!GetParam().starts_with("cuda"))
    expect_labels({4, 16, {70, 131}, 9, weighted(original, 16)}, {0, 1, 1, 0, 0, 1, 0, 0, 1});
  Label wide{};
  wide.p.head_dim = 576;
  if (takes_heads_of(576) && device().supports(wide))
    expect_labels({20, 576, {70, 131}, 9, {kRopeOriginal, kRopeAdjacent, 64}}, {0, 1, 1, 0, 0, 1, 0, 0, 1});
  const uint32_t most_group = GetParam().starts_with("cuda") ? 16 : 130;
  expect_labels({most_group, 16, {3}, 2, original}, {0, 1});
}

// Sinks, a chunk and entries after the text; entries in between must have no effect.
TEST_P(Labels, AreOfTheEntriesInRange) {
  const Rotation original{kRopeOriginal, kRopeAdjacent, 16};
  expect_labels({2, 16, {300, 290}, 9, original, {4, 70, 210, 280}}, {1, 1, 1, 0, 0, 1, 0, 0, 1});
  expect_labels({1, 16, {1200}, 5, original, {0, 0, 1111, 1111}}, {1, 1, 0, 0, 1});
  expect_labels({2, 16, {65}, 3, original, {2, 2, 65, 65}}, {1, 1, 1});
}

TEST_P(Labels, WeighRowsByTheirLengthAndEntriesByTheirWorth) {
  const Rotation original{kRopeOriginal, kRopeAdjacent, 16};
  expect_labels({3, 16, {70, 131}, 70, original, {0, 0, UINT32_MAX, UINT32_MAX}, true},
                std::vector<uint32_t>(70, 1));
  expect_labels({2, 16, {300, 290}, 9, original, {4, 70, 210, 280}, true}, {1, 1, 1, 0, 0, 1, 0, 0, 1});
}

TEST_P(Labels, IncludeCapsAndSinksOfAttention) {
  Shape s{2, 16, {300, 70}, 9, {kRopeOriginal, kRopeAdjacent, 16}};
  s.cap = 2;
  expect_labels(s, {1, 1, 1, 0, 0, 1, 0, 0, 1});
  s.sinks = true;
  expect_labels(s, {1, 1, 1, 0, 0, 1, 0, 0, 1});
  s.cap = 0;
  expect_labels(s, {1, 1, 1, 0, 0, 1, 0, 0, 1});
}

TEST_P(Labels, AreUnchangedWithoutAMarkedRow) {
  expect_labels({2, 16, {40, 3}, 5, {kRopeOriginal, kRopeAdjacent, 16}}, {0, 0, 0, 0, 0});
}

TEST_P(Labels, DoNotExistForAnEmptyPool) {
  expect_labels({2, 16, {0, 3}, 5, {kRopeOriginal, kRopeAdjacent, 16}}, {1, 0, 0, 0, 1});
}

}  // namespace
}  // namespace thimble::test
