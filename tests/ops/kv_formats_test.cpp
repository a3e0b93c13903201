// Ops and the formats of keys and values: the same numbers give the same bits whatever their format. bf16 is
// the format that only tests use, on all devices; the CPU has f32 as well. q8_0 and q4_0 have blocks.
#include <bit>
#include <limits>

#include "tests/ops/kv_blocks.h"

namespace thimble::test {
namespace {

// More entries than a tile has.
constexpr uint32_t kHeads = 2, kCapacity = 100, kHeld = 90, kRows = 3, kPage = 16;
// The index of TokenScore's logarithms of sums among the compared results.
constexpr size_t kLogOfSums = 4;

// The widths that choose how kernels read rows.
struct Shape {
  uint32_t head_dim, group;
  RopeParams rope;
};
constexpr Shape kShapes[] = {
    {72, 2, {.mode = kRopeList, .pairing = kRopeHalves, .n_rot = 64}},  // not a multiple of the widest vector
    {64, 8, {.mode = kRopeList, .pairing = kRopeAdjacent, .n_rot = 64}},  // matrix units, if there are any
    {40, 2, {.mode = kRopeList, .pairing = kRopeHalves, .n_rot = 20}},    // one channel at a time
    {96, 2, {.mode = kRopeList, .pairing = kRopeHalves, .n_rot = 40}},    // an odd number of blocks
};

bool has_blocks(DType type) { return dtype_info(type).block > 1; }

class KvFormats : public OpTest {
 protected:
  static std::vector<HeadState> heads() { return equal_heads(kHeads, kCapacity, kHeld, 80); }
  std::vector<DType> other_formats() {
    std::vector<DType> formats;
    for (const DType type : {DType::kBF16, DType::kF32, DType::kQ8_0, DType::kQ4_0})
      if (const KvArray a{View(), type}; device().supports(KvMerge{.k = a, .v = a, .p = {.head_dim = 64}}))
        formats.push_back(type);
    return formats;
  }

  // Numbers that f16 and this format can hold. bf16 has 8 significant bits.
  static std::vector<float> exact(DType type, Random& random, size_t count) {
    if (has_blocks(type)) return exact_blocks(type, random, count);
    std::vector<float> numbers(count);
    for (float& x : numbers) x = (static_cast<float>(random.below(257)) - 128) / 128;
    return numbers;
  }
  // Rows of these numbers in a format.
  KvArray array(DType type, const std::vector<float>& numbers, uint32_t head_dim) {
    if (type == DType::kF32) return {inout(numbers), type};
    if (has_blocks(type)) return {inout(exact_rows(type, numbers, head_dim)), type};
    std::vector<uint16_t> stored(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i)
      stored[i] = type == DType::kF16 ? f32_to_f16(numbers[i])
                                      : static_cast<uint16_t>(std::bit_cast<uint32_t>(numbers[i]) >> 16);
    return {inout(stored), type};
  }
  std::vector<float> numbers(const KvArray& a, uint32_t head_dim) {
    if (a.type == DType::kF32) return get<float>(a.values);
    if (has_blocks(a.type)) {
      const auto bytes = get<std::byte>(a.values);
      std::vector<float> wide;
      for (size_t row = 0; row < bytes.size(); row += kv_bytes(a.type, head_dim))
        for (const double x : stored_row(a.type, &bytes[row], head_dim))
          wide.push_back(static_cast<float>(x));
      return wide;
    }
    const auto stored = get<uint16_t>(a.values);
    std::vector<float> wide(stored.size());
    std::transform(stored.begin(), stored.end(), wide.begin(),
                   a.type == DType::kF16 ? f16_to_f32 : bf16_to_f32);
    return wide;
  }

  // What all ops make of the same pool and chunk in one format, op by op. `other` can hold their numbers,
  // too.
  std::vector<std::vector<float>> results(const Shape& shape, DType type, DType other) {
    clear();
    const uint32_t head_dim = shape.head_dim, group = shape.group, queries = kHeads * group,
                   columns = (queries + 2 * kHeads) * head_dim;
    size_for(kHeads, group, head_dim, session_of(heads(), kRows, kCapacity + kRows, kCapacity));
    Random random{7};
    const auto exact = [&](uint64_t count) { return KvFormats::exact(other, random, count); };
    const auto rows = [&](uint64_t count) { return array(type, exact(count * head_dim), head_dim); };
    const auto numbers = [&](const KvArray& a) { return KvFormats::numbers(a, head_dim); };
    const KvArray k = rows(kHeads * kCapacity), v = rows(kHeads * kCapacity), chunk_k = rows(kHeads * kRows),
                  chunk_v = rows(kHeads * kRows);
    const std::vector<float> projected = exact(kRows * columns);
    std::vector<int32_t> positions(kHeads * kCapacity);
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(2 * (i % kCapacity));
    const View qkv = inout(projected), rope = input(Rotation{.n_rot = shape.rope.n_rot}.table(kCapacity)),
               pos = inout(positions), cis = inout(random.floats(kHeads * kCapacity)),
               chunk_pos = inout(std::vector<int32_t>(kHeads * kRows, 200)),
               chunk_cis = inout(random.floats(kHeads * kRows)), saturated = inout(std::vector<uint32_t>(1)),
               y = output<float>(kRows * queries * head_dim), scores = output<float>(queries * kCapacity),
               lse = output<float>(queries),
               sums = output<float>(kHeads * kRows * group * kQueryScoreSums + kHeads * head_dim),
               view_k = output<std::byte>(kHeads * kCapacity * head_dim * view_element_bytes()),
               view_v = output<std::byte>(kHeads * kCapacity * head_dim * view_element_bytes()),
               bounds = output<uint16_t>((kHeads * kCapacity / kPage + kHeads) * 2 * head_dim),
               marked = input(std::vector<uint32_t>(kRows, 1)),
               range = input(std::vector<uint32_t>{2, 5, 80, 85}), row_sums = output<float>(kRows * queries),
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
                           .group = group,
                           .head_dim = head_dim,
                           .row_stride = columns,
                           .chunk_capacity = kRows,
                           .kind = kQueryRows,
                           .rows = kRows,
                           .sinks = 2,
                           .scale = 0.1f,
                           .rope = shape.rope};
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
                  {.heads = kHeads, .head_dim = head_dim, .chunk_capacity = kRows, .blocks = 1}},
          {cis, chunk_cis});
    after(chunk,
          TokenScore{qkv,
                     k,
                     rope,
                     {},
                     scores,
                     lse,
                     {.heads = kHeads,
                      .group = group,
                      .head_dim = head_dim,
                      .row_stride = columns,
                      .score_capacity = kCapacity,
                      .scale = 1,
                      .rope = shape.rope}},
          {lse});
    EXPECT_EQ(all.size(), kLogOfSums + 1);
    PageBounds pages{{{}, other}, bounds, {.heads = kHeads, .head_dim = head_dim, .page = kPage, .all = 1}};
    if (device().supports(pages)) {
      pages.k = k;
      after(none, pages, {});
      const auto halves = get<uint16_t>(bounds);
      all.emplace_back(halves.begin(), halves.end());
    }
    RopeParams original = shape.rope;
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
                 .group = group,
                 .head_dim = head_dim,
                 .row_stride = columns,
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
                  .head_dim = head_dim,
                  .chunk_capacity = kRows,
                  .view_capacity = kCapacity,
                  .rope = shape.rope}},
          {});
    for (const View& view : {view_k, view_v}) {  // the rest of the view is poison
      const std::vector<float> shown = numbers({view, view_element_bytes() == 2 ? DType::kF16 : DType::kF32});
      for (uint32_t head = 0; head < kHeads; ++head)
        all.emplace_back(&shown[head * kCapacity * head_dim],
                         &shown[(head * kCapacity + kHeld + kRows) * head_dim]);
    }
    KvAppend append{qkv,
                    rope,
                    chunk_k,
                    chunk_v,
                    chunk_pos,
                    saturated,
                    {.heads = kHeads,
                     .head_dim = head_dim,
                     .row_stride = columns,
                     .k_column = queries * head_dim,
                     .v_column = (queries + kHeads) * head_dim,
                     .chunk_capacity = kRows,
                     .into = kIntoChunk,
                     .rope = shape.rope}};
    after(chunk, append, {});
    all.push_back(numbers(chunk_k));
    all.push_back(numbers(chunk_v));
    append.k = k;
    append.v = v;
    append.pos = pos;
    append.p.into = kIntoPool;
    after(token, append, {});
    // With the norms before it, in one program of one row: of keys of length sqrt(head_dim), so that the
    // normed keys are exact as well. For blocks, they are the weights.
    std::vector<float> signs = projected;
    for (uint32_t c = 0; c < (queries + kHeads) * head_dim; ++c)
      signs[c] = random.below(2) || has_blocks(other) ? 1.0f : -1.0f;
    put(qkv, signs);
    const View weight = input(exact(head_dim));
    const auto norm = [&](uint32_t column, uint32_t groups) {
      const View own = qkv.slice(column * sizeof(float), qkv.bytes - column * sizeof(float));
      return RmsNorm{own, weight, own, {.cols = head_dim, .groups = groups, .row_stride = columns}};
    };
    std::vector<HeadState> longer = heads();
    for (HeadState& head : longer) ++head.n_entries;
    run(token, longer, 1, [&](Recorder& r) {
      r.record(norm(0, queries));
      r.record(norm(append.p.k_column, kHeads));
      r.record(append);
    });
    all.push_back(numbers(k));
    all.push_back(numbers(v));
    put(qkv, projected);
    Attention attention{.q = qkv,
                        .k = k,
                        .v = v,
                        .list = {},
                        .rope = rope,
                        .sinks = {},
                        .y = y,
                        .ml = {},
                        .p = {.heads = kHeads,
                              .group = group,
                              .head_dim = head_dim,
                              .row_stride = columns,
                              .y_stride = queries * head_dim,
                              .source = kFromPool,
                              .scale = 0.1f,
                              .rope = shape.rope}};
    if (!has_blocks(other) || GetParam() == "cpu") {  // other devices have other kernels for blocks
      after(token, attention, {});
      const auto attended = get<float>(y);
      all.emplace_back(attended.begin(), attended.begin() + queries * head_dim);
    }
    const uint32_t capacity = kCapacity + 1;
    const std::vector<uint32_t> list = some_entries(random, kHeld + kRows, 60, kRows);
    after(chunk,
          KvCompact{
              input(lists({list, list}, capacity)),
              chunk_k,
              chunk_v,
              chunk_pos,
              chunk_cis,
              k,
              v,
              pos,
              cis,
              {.heads = kHeads, .head_dim = head_dim, .chunk_capacity = kRows, .list_capacity = capacity}},
          {cis});
    all.push_back(numbers(k));
    all.push_back(numbers(v));
    for (uint32_t head = 0; head < kHeads;
         ++head)  // the last three of the 80 entries that stay belong further up
      for (uint32_t i = 0; i < kRows; ++i)
        positions[head * kCapacity + 77 + i] = 21 + 20 * static_cast<int32_t>(i);
    put(pos, positions);
    after(chunk, KvMerge{k, v, pos, cis, {.heads = kHeads, .head_dim = head_dim}}, {cis});
    all.push_back(numbers(k));
    all.push_back(numbers(v));
    return all;
  }
};
THIMBLE_OP_TESTS(KvFormats);

TEST_P(KvFormats, TheSameNumbersGiveTheSameBits) {
  for (const uint32_t i : fewer({0, 1, 2, 3}, {0, 2, 3}, {0, 3})) {
    SCOPED_TRACE(kShapes[i].head_dim);
    for (const DType type : other_formats()) {
      if (!kv_fits(type, kShapes[i].head_dim)) continue;
      SCOPED_TRACE(dtype_info(type).name);
      const auto of_halves = results(kShapes[i], DType::kF16, type), others = results(kShapes[i], type, type);
      ASSERT_EQ(of_halves.size(), others.size());
      for (size_t r = 0; r < others.size(); ++r) {
        if (r == kLogOfSums && GetParam().starts_with("vulkan")) {
          // A driver may add the up to kCapacity terms of a sum in another order in each variant of a shader.
          constexpr float kRounding = kCapacity * std::numeric_limits<float>::epsilon();
          ASSERT_EQ(of_halves[r].size(), others[r].size());
          for (size_t j = 0; j < others[r].size(); ++j) EXPECT_NEAR(of_halves[r][j], others[r][j], kRounding);
          continue;
        }
        EXPECT_EQ(of_halves[r], others[r]) << "result " << r;
      }
    }
  }
}

TEST_P(KvFormats, IncludeOneThatIsNotF16) {
  const std::vector<DType> formats = other_formats();
  EXPECT_EQ(std::count(formats.begin(), formats.end(), DType::kBF16), 1);
}

// Numbers that a format rounds or cannot hold.
TEST_P(KvFormats, RoundToNearestWithinTheirRange) {
  constexpr uint32_t kDim = 72;
  std::vector<float> row(2 * kDim, 0.1f);
  row[3] = 1e9f;
  row[kDim + 5] = -70000;
  struct Stored {
    DType type;
    float tenth, large, larger;  // 0.1, 1e9 and -70000
    uint32_t saturated;
  };
  // bf16 has 7 bits after the leading one: 0.1 = 1.1001100|11.. * 2^-4 rounds up to 205 / 2^11, 1e9 =
  // 1.1101110|01.. * 2^29 down to 238 * 2^22, and 70000 = 1.0001000|10111.. * 2^16 up to 137 * 2^9. f16 has
  // 10 bits: 0.1 rounds down to 1638 / 2^14.
  const Stored all[] = {{DType::kF16, 1638 / 16384.0f, 65504, -65504, 2},
                        {DType::kBF16, 205 / 2048.0f, 238 * 4194304.0f, -137 * 512.0f, 0},
                        {DType::kF32, 0.1f, 1e9f, -70000, 0}};
  const std::vector<DType> others = other_formats();
  for (const Stored& s : all) {
    if (s.type != DType::kF16 && !std::count(others.begin(), others.end(), s.type)) continue;
    SCOPED_TRACE(dtype_info(s.type).name);
    clear();
    const KvArray k{output<std::byte>(kv_bytes(s.type, kDim)), s.type},
        v{output<std::byte>(kv_bytes(s.type, kDim)), s.type};
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
    std::vector<float> keys(kDim, s.tenth), values = keys;
    keys[3] = s.large;
    values[5] = s.larger;
    EXPECT_EQ(numbers(k, kDim), keys);
    EXPECT_EQ(numbers(v, kDim), values);
    EXPECT_EQ(get<uint32_t>(saturated)[0], s.saturated);
  }
}

TEST_P(KvFormats, AreRefusedIfAnOpLacksThem) {
  constexpr uint32_t kDim = 72;
  const KvArray halves{View(), DType::kF16}, brains{View(), DType::kBF16}, blocks{View(), DType::kQ8_0},
      others{View(), DType::kQ4_1};
  EXPECT_TRUE(device().supports(KvMerge{.k = halves, .v = halves, .p = {.head_dim = kDim}}));
  EXPECT_FALSE(
      device().supports(KvMerge{.k = blocks, .v = blocks, .p = {.head_dim = kDim}}));  // no whole block
  EXPECT_FALSE(device().supports(KvMerge{.k = others, .v = others, .p = {.head_dim = 64}}));
  EXPECT_FALSE(
      device().supports(PageBounds{.k = brains, .p = {.head_dim = kDim}}));  // f16 bounds would not hold them
  const KvArray rows{output<uint16_t>(kDim), DType::kF16};
  EXPECT_FALSE(device().supports(
      KvCompact{.chunk_k = rows, .chunk_v = rows, .k = brains, .v = brains, .p = {.head_dim = kDim}}));
}

}  // namespace
}  // namespace thimble::test
