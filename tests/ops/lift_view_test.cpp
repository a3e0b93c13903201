// lift_view on every device that has it, against products in double.
#include "tests/ops/kv_reference.h"
#include "tests/ops/op_test.h"
#include "tests/ops/random_matrix.h"

namespace thimble::test {
namespace {

class LiftsViews : public OpTest {
 protected:
  struct Case {
    DType type = DType::kQ8_0;
    uint32_t heads = 3, rotated = 16, latent = 64, key_cols = 32, value_cols = 32;
    bool transposed = false;  // the matrices of keys; values then follow in the same tensor
    uint32_t entries = 90, first_entry = 0, capacity = 70;
    bool listed = false;
  };

  std::vector<float> numbers(const View& of) {
    if (view_element_bytes() == 4) return get<float>(of);
    std::vector<float> x;
    for (const uint16_t h : get<uint16_t>(of)) x.push_back(f16_to_f32(h));
    return x;
  }
  View shown(const std::vector<float>& x) { return view_element_bytes() == 4 ? input(x) : input(halves(x)); }

  void check(Random& random, const Case& c) {
    SCOPED_TRACE(::testing::Message() << dtype_info(c.type).name << ", " << c.heads << " heads, keys of "
                                      << c.key_cols << (c.transposed ? ", transposed" : "") << ", entries "
                                      << c.first_entry << " to " << c.entries);
    clear();
    const uint32_t width = c.rotated + c.latent, key_dim = c.rotated + c.key_cols;
    // Of keys, as files have them: the rows of a head are those of latent channels, or with others after them
    // those of key channels.
    const uint32_t k_rows = c.transposed ? c.latent : c.key_cols + 5,
                   k_cols = c.transposed ? c.key_cols : c.latent, v_rows = c.value_cols + 3;
    const Matrix k = random_matrix(random, c.type, c.heads * k_rows, k_cols),
                 v = random_matrix(random, c.type, c.heads * v_rows, c.latent);
    const auto plain = [&](const Matrix& of, uint32_t rows, uint32_t outputs, bool transposed) {
      Matrix all{{}, std::vector<float>(size_t(c.heads) * outputs * c.latent)};
      for (uint32_t head = 0; head < c.heads; ++head)
        for (uint32_t o = 0; o < outputs; ++o)
          for (uint32_t i = 0; i < c.latent; ++i)
            all.values[(size_t(head) * outputs + o) * c.latent + i] =
                of.values[(size_t(head) * rows + (transposed ? i : o)) * (transposed ? outputs : c.latent) +
                          (transposed ? o : i)];
      return all;
    };
    const Matrix keys = plain(k, k_rows, c.key_cols, c.transposed),
                 values = plain(v, v_rows, c.value_cols, false);
    std::vector<float> rows = random.floats(size_t(c.capacity) * width, -1, 1);
    for (float& x : rows) x = f16_to_f32(f32_to_f16(x));
    const uint32_t valid = std::min(c.entries - c.first_entry, c.capacity);
    std::vector<float> view = rows;
    std::fill(view.begin() + ptrdiff_t(valid) * width, view.end(), NAN);
    const LiftView op{.view = shown(view),
                      .list = c.listed ? input(std::vector<uint32_t>{c.entries, 0}) : View{},
                      .k_up = weight(c.type, c.heads * k_rows, k_cols, k.bytes),
                      .v_up = weight(c.type, c.heads * v_rows, c.latent, v.bytes),
                      .k = output<std::byte>(size_t(c.heads) * c.capacity * key_dim * view_element_bytes()),
                      .v = output<std::byte>(size_t(c.heads) * c.capacity * key_dim * view_element_bytes()),
                      .p = {.heads = c.heads,
                            .rotated = c.rotated,
                            .latent = c.latent,
                            .key_cols = c.key_cols,
                            .value_cols = c.value_cols,
                            .k_first = 0,
                            .k_head_rows = k_rows,
                            .k_transposed = c.transposed,
                            .v_first = 0,
                            .v_head_rows = v_rows,
                            .head_state = 0,
                            .first_entry = c.first_entry,
                            .view_capacity = c.capacity,
                            .list_capacity = 2}};
    if (!device().supports(op)) return;
    const std::vector<HeadState> heads{
        {.first = 0, .capacity = c.entries, .n_entries = c.listed ? 5 : c.entries - 3}};
    run({.n_rows = 3}, heads, 3, [&](Recorder& r) { r.record(op); });
    const std::vector<float> got_k = numbers(op.k), got_v = numbers(op.v);
    for (uint32_t head = 0; head < c.heads; ++head)
      for (uint32_t row = 0; row < valid; ++row) {
        const float* const from = &rows[size_t(row) * width];
        const size_t to = (size_t(head) * c.capacity + row) * key_dim;
        const auto expect = [&](const Matrix& of, uint32_t outputs, const std::vector<float>& got) {
          for (uint32_t o = 0; o < outputs; ++o) {
            const Product want =
                product(of, head * outputs + o, from + c.rotated, c.latent, 0, 0, has_tensor_cores());
            const double rounding = has_tensor_cores() ? std::fabs(want.sum) * 0x1p-11 : 0;
            ASSERT_NEAR(got[to + o], want.sum, want.tolerance + rounding)
                << "row " << row << ", output " << o;
          }
        };
        expect(keys, c.key_cols, got_k);
        expect(values, c.value_cols, got_v);
        for (uint32_t i = 0; i < c.rotated; ++i) ASSERT_EQ(got_k[to + c.key_cols + i], from[i]) << row;
        if (HasFatalFailure()) return;
      }
  }
};
THIMBLE_OP_TESTS(LiftsViews);

TEST_P(LiftsViews, MultipliesLatentChannelsByTheMatricesOfHeads) {
  Random random;
  for (const DType type : {DType::kF16, DType::kQ8_0, DType::kQ4_K})
    for (const bool transposed : {false, true}) {
      const uint32_t block = std::max(dtype_info(type).block, 32u);
      check(random, {.type = type, .latent = block, .key_cols = block, .transposed = transposed});
      check(random, {.type = type,
                     .latent = 2 * block,
                     .key_cols = 2 * block,
                     .value_cols = block,
                     .transposed = transposed,
                     .entries = 100,
                     .first_entry = 70,
                     .listed = true});
    }
}

// A view of which this pass shows nothing, or one entry.
TEST_P(LiftsViews, TakesAnyPass) {
  Random random;
  check(random, {.entries = 71, .first_entry = 70});
  check(random, {.entries = 70, .first_entry = 70});
  check(random, {.heads = 1, .entries = 4, .capacity = 4});
}

// Attention to such a view: heads with keys and values of their own, all with the entries of one run. Values
// have fewer channels than keys, and queries rotate in their last ones.
TEST_P(LiftsViews, AreAttendedTo) {
  if (!device().info().lifts_views) return;
  Random random;
  constexpr uint32_t kHeads = 3, kDim = 48, kValue = 32, kRows = 7, kEntries = 150, kCapacity = 64,
                     kStride = 160;
  const Rotation rotation{.mode = kRopeList, .n_rot = 16};
  std::vector<float> k = random.floats(size_t(kHeads) * kEntries * kDim),
                     v = random.floats(size_t(kHeads) * kEntries * kDim),
                     q = random.floats(size_t(kRows) * kStride, -2, 2);
  for (std::vector<float>* x : {&k, &v})
    for (float& number : *x) number = f16_to_f32(f32_to_f16(number));
  const double scale = 1 / std::sqrt(kDim);
  const View queries = input(q), table = input(rotation.table(256)), ml = output<float>(kRows * kHeads * 2),
             y = output<float>(kRows * kHeads * kValue);
  const std::vector<HeadState> heads{{.first = 0, .capacity = kEntries, .n_entries = kEntries - kRows}};
  run({.n_rows = kRows}, heads, kRows, [&](Recorder& r) {
    for (uint32_t first = 0; first < kEntries; first += kCapacity) {
      std::vector<float> pass_k, pass_v;
      for (uint32_t head = 0; head < kHeads; ++head)
        for (uint32_t i = 0; i < kCapacity; ++i)
          for (uint32_t c = 0; c < kDim; ++c) {
            const size_t from = (size_t(head) * kEntries + first + i) * kDim + c;
            const bool there = first + i < kEntries;
            pass_k.push_back(there ? k[from] : NAN);
            pass_v.push_back(there && c < kValue ? v[from] : NAN);
          }
      const DType type = view_element_bytes() == 4 ? DType::kF32 : DType::kF16;
      r.record(Attention{.q = queries,
                         .k = {shown(pass_k), type},
                         .v = {shown(pass_v), type},
                         .list = {},
                         .rope = table,
                         .sinks = {},
                         .y = y,
                         .ml = ml,
                         .p = {.first_head = 0,
                               .heads = kHeads,
                               .group = 1,
                               .head_dim = kDim,
                               .row_stride = kStride,
                               .y_stride = kHeads * kValue,
                               .source = kFromView,
                               .first_entry = first,
                               .view_capacity = kCapacity,
                               .head_state = 0,
                               .list_capacity = 0,
                               .window = 0,
                               .equal_heads = 1,
                               .scale = static_cast<float>(scale),
                               .cap = 0,
                               .rope = rotation.params()},
                         .lifted = {kValue, kDim - rotation.n_rot}});
    }
  });
  const std::vector<float> got = get<float>(y);
  for (uint32_t row = 0; row < kRows; ++row)
    for (uint32_t head = 0; head < kHeads; ++head) {
      const uint32_t seen = kEntries - kRows + row + 1, unrotated = kDim - rotation.n_rot;
      const std::vector<double> of_row = doubles(q, size_t(row) * kStride + head * kDim, kDim);
      std::vector<double> query(of_row.begin() + unrotated, of_row.end());
      query = rotation.rotated(query, seen - 1);
      query.insert(query.begin(), of_row.begin(), of_row.begin() + unrotated);
      const std::vector<double> keys = doubles(k, size_t(head) * kEntries * kDim, size_t(seen) * kDim);
      std::vector<double> values;
      for (uint32_t i = 0; i < seen; ++i)
        for (uint32_t c = 0; c < kValue; ++c) values.push_back(v[(size_t(head) * kEntries + i) * kDim + c]);
      const Attended want = attend(query, keys, values, scale, has_tensor_cores());
      for (uint32_t c = 0; c < kValue; ++c)
        ASSERT_NEAR(got[(row * kHeads + head) * kValue + c], want.y[c],
                    attention_tolerance(kDim, 2, seen) + (has_tensor_cores() ? want.f16_tolerance[c] : 0))
            << "row " << row << ", head " << head << ", channel " << c;
    }
}

}  // namespace
}  // namespace thimble::test
