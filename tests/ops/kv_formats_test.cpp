// Ops and the formats of keys and values: the same numbers give the same bits whatever their format, on the
// CPU, which has formats besides f16.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

// Not a multiple of the widest vector, and more entries than a tile has.
constexpr uint32_t kDim = 72, kHeads = 2, kGroup = 2, kQueries = kHeads * kGroup, kCapacity = 100, kHeld = 90,
                   kRows = 3, kColumns = (kQueries + 2 * kHeads) * kDim;
constexpr RopeParams kRope{.mode = kRopeList, .pairing = kRopeHalves, .n_rot = 64};

class KvFormats : public OpTest {
 protected:
  void SetUp() override {
    OpTest::SetUp();
    size_for(kHeads, kGroup, kDim, session_of(heads(), kRows, kCapacity + kRows, kCapacity));
  }
  static std::vector<HeadState> heads() { return equal_heads(kHeads, kCapacity, kHeld, 80); }

  // Rows of these numbers, which f16 can hold, in a format.
  KvArray array(DType type, const std::vector<uint16_t>& numbers) {
    if (type == DType::kF16) return {inout(numbers), type};
    std::vector<float> wide(numbers.size());
    std::transform(numbers.begin(), numbers.end(), wide.begin(), f16_to_f32);
    return {inout(wide), type};
  }
  std::vector<float> numbers(const KvArray& a) {
    if (a.type == DType::kF32) return get<float>(a.values);
    const auto stored = get<uint16_t>(a.values);
    std::vector<float> wide(stored.size());
    std::transform(stored.begin(), stored.end(), wide.begin(), f16_to_f32);
    return wide;
  }

  // What all ops make of the same pool and chunk in one format, op by op.
  std::vector<std::vector<float>> results(DType type) {
    clear();
    Random random{7};
    const auto rows = [&](uint64_t count) { return array(type, halves(random.floats(count * kDim, -1, 1))); };
    const KvArray k = rows(kHeads * kCapacity), v = rows(kHeads * kCapacity), chunk_k = rows(kHeads * kRows),
                  chunk_v = rows(kHeads * kRows);
    std::vector<float> projected(kRows * kColumns);  // keys and values that f16 can hold
    for (float& x : projected) x = f16_to_f32(f32_to_f16(random.uniform(-1, 1)));
    std::vector<int32_t> positions(kHeads * kCapacity);
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(2 * (i % kCapacity));
    const View qkv = input(projected), rope = input(Rotation{.n_rot = 64}.table(kCapacity)),
               pos = inout(positions), cis = inout(random.floats(kHeads * kCapacity)),
               chunk_pos = inout(std::vector<int32_t>(kHeads * kRows, 200)),
               chunk_cis = inout(random.floats(kHeads * kRows)), saturated = inout(std::vector<uint32_t>(1)),
               y = output<float>(kRows * kQueries * kDim), scores = output<float>(kQueries * kCapacity),
               lse = output<float>(kQueries),
               sums = output<float>(kHeads * kRows * kGroup * kQueryScoreSums + kHeads * kDim),
               view_k = output<float>(kHeads * kCapacity * kDim),
               view_v = output<float>(kHeads * kCapacity * kDim),
               marked = input(std::vector<uint32_t>(kRows, 1)),
               range = input(std::vector<uint32_t>{2, 5, 80, 85}), row_sums = output<float>(kRows * kQueries),
               logits = inout(std::vector<float>(kHeads * kCapacity, -100)),
               logs = inout(std::vector<float>(kHeads * kCapacity, -100));
    const StepParams chunk{.n_rows = kRows, .position = kHeld, .n_init = 2, .n_local = 10, .select_k = 20};
    StepParams token = chunk, none = chunk;
    token.n_rows = 1;
    none.n_rows = 0;

    std::vector<std::vector<float>> all;
    const auto after = [&](const StepParams& step, const Op& op, const std::vector<View>& made) {
      SCOPED_TRACE(op_name(op));
      EXPECT_TRUE(device().supports(op));
      run(step, heads(), kRows, [&](Recorder& r) { r.record(op); });
      for (const View& view : made) all.push_back(get<float>(view));
    };
    QueryScoreParams query{.heads = kHeads,
                           .group = kGroup,
                           .head_dim = kDim,
                           .row_stride = kColumns,
                           .chunk_capacity = kRows,
                           .kind = kQueryRows,
                           .rows = kRows,
                           .sinks = 2,
                           .scale = 0.1f,
                           .rope = kRope};
    after(chunk, QueryScore{qkv, k, chunk_k, {}, rope, {}, sums, cis, {}, query}, {cis});
    query.kind = kQueryLast;
    query.rows = 1;
    query.sinks = 0;
    after(none, QueryScore{qkv, k, {}, {}, rope, {}, sums, cis, {}, query}, {cis});
    after(chunk,
          KeyDiff{k,
                  chunk_k,
                  sums,
                  cis,
                  chunk_cis,
                  {.heads = kHeads, .head_dim = kDim, .chunk_capacity = kRows, .blocks = 1}},
          {cis, chunk_cis});
    after(chunk,
          TokenScore{qkv,
                     k,
                     rope,
                     {},
                     scores,
                     lse,
                     {.heads = kHeads,
                      .group = kGroup,
                      .head_dim = kDim,
                      .row_stride = kColumns,
                      .score_capacity = kCapacity,
                      .scale = 1,
                      .rope = kRope}},
          {lse});
    RopeParams original = kRope;
    original.mode = kRopeOriginal;
    after(chunk,
          Label{qkv,
                marked,
                k,
                chunk_k,
                rope,
                range,
                {},
                {},
                {},
                row_sums,
                logits,
                logs,
                {.heads = kHeads,
                 .group = kGroup,
                 .head_dim = kDim,
                 .row_stride = kColumns,
                 .chunk_capacity = kRows,
                 .label_capacity = kCapacity,
                 .scale = 0.1f,
                 .least = -30,
                 .rope = original}},
          {logits, logs});
    after(chunk,
          KvView{k,
                 v,
                 chunk_k,
                 chunk_v,
                 {},
                 rope,
                 view_k,
                 view_v,
                 {.heads = kHeads,
                  .head_dim = kDim,
                  .chunk_capacity = kRows,
                  .view_capacity = kCapacity,
                  .rope = kRope}},
          {});
    for (const View& view : {view_k, view_v}) {  // the rest of the view is poison
      const auto shown = get<float>(view);
      for (uint32_t head = 0; head < kHeads; ++head)
        all.emplace_back(&shown[head * kCapacity * kDim], &shown[(head * kCapacity + kHeld + kRows) * kDim]);
    }
    after(token,
          KvAppend{qkv,
                   rope,
                   k,
                   v,
                   pos,
                   saturated,
                   {.heads = kHeads,
                    .head_dim = kDim,
                    .row_stride = kColumns,
                    .k_column = kQueries * kDim,
                    .v_column = (kQueries + kHeads) * kDim,
                    .into = kIntoPool,
                    .rope = kRope}},
          {});
    all.push_back(numbers(k));
    all.push_back(numbers(v));
    Attention attention{.q = qkv,
                        .k = k,
                        .v = v,
                        .list = {},
                        .rope = rope,
                        .sinks = {},
                        .y = y,
                        .ml = {},
                        .p = {.heads = kHeads,
                              .group = kGroup,
                              .head_dim = kDim,
                              .row_stride = kColumns,
                              .y_stride = kQueries * kDim,
                              .source = kFromPool,
                              .scale = 0.1f,
                              .rope = kRope}};
    after(token, attention, {});
    const auto attended = get<float>(y);
    all.emplace_back(attended.begin(), attended.begin() + kQueries * kDim);
    const uint32_t capacity = kCapacity + 1;
    const std::vector<uint32_t> list = some_entries(random, kHeld + kRows, 60, kRows);
    after(chunk,
          KvCompact{input(lists({list, list}, capacity)),
                    chunk_k,
                    chunk_v,
                    chunk_pos,
                    chunk_cis,
                    k,
                    v,
                    pos,
                    cis,
                    {.heads = kHeads, .head_dim = kDim, .chunk_capacity = kRows, .list_capacity = capacity}},
          {cis});
    all.push_back(numbers(k));
    all.push_back(numbers(v));
    for (uint32_t head = 0; head < kHeads;
         ++head)  // the last three of the 80 entries that stay belong further up
      for (uint32_t i = 0; i < kRows; ++i)
        positions[head * kCapacity + 77 + i] = 21 + 20 * static_cast<int32_t>(i);
    put(pos, positions);
    after(chunk, KvMerge{k, v, pos, cis, {.heads = kHeads, .head_dim = kDim}}, {cis});
    all.push_back(numbers(k));
    all.push_back(numbers(v));
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(On, KvFormats, ::testing::Values("cpu"), device_test_name);

TEST_P(KvFormats, TheSameNumbersGiveTheSameBits) {
  const auto of_halves = results(DType::kF16), of_floats = results(DType::kF32);
  ASSERT_EQ(of_halves.size(), of_floats.size());
  for (size_t i = 0; i < of_halves.size(); ++i) EXPECT_EQ(of_halves[i], of_floats[i]) << "result " << i;
}

// Numbers that f16 rounds or cannot hold.
TEST_P(KvFormats, FloatsAreStoredAsTheyAre) {
  std::vector<float> row(2 * kDim, 0.1f);
  row[3] = 1e9f;
  row[kDim + 5] = -70000;
  const KvArray k{output<float>(kDim), DType::kF32}, v{output<float>(kDim), DType::kF32};
  const View saturated = inout(std::vector<uint32_t>(1));
  run({.n_rows = 1}, 1, [&](Recorder& r) {
    r.record(KvAppend{
        input(row),
        {},
        k,
        v,
        output<int32_t>(1),
        saturated,
        {.heads = 1, .head_dim = kDim, .row_stride = 2 * kDim, .v_column = kDim, .chunk_capacity = 1}});
  });
  EXPECT_EQ(get<float>(k.values), std::vector<float>(row.begin(), row.begin() + kDim));
  EXPECT_EQ(get<float>(v.values), std::vector<float>(row.begin() + kDim, row.end()));
  EXPECT_EQ(get<uint32_t>(saturated)[0], 0u);
}

TEST_P(KvFormats, AreRefusedWhereAnOpLacksThem) {
  const KvArray floats{output<float>(kDim), DType::kF32}, blocks{output<float>(kDim), DType::kQ8_0};
  EXPECT_TRUE(device().supports(KvMerge{.k = floats, .v = floats}));
  EXPECT_FALSE(device().supports(KvMerge{.k = floats, .v = blocks}));
  EXPECT_FALSE(device().supports(PageBounds{.k = floats}));  // f16 bounds would not hold them
  const KvArray halves{output<uint16_t>(kDim), DType::kF16};
  EXPECT_FALSE(device().supports(KvCompact{.chunk_k = halves, .chunk_v = halves, .k = floats, .v = floats}));
}

}  // namespace
}  // namespace thimble::test
