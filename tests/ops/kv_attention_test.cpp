// kv_append, cis_store, kv_view, attention and kv_compact, compared with plain loops in double precision.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

class KvOps : public OpTest {
 protected:
  // Whether values may be channels of keys.
  bool takes_values_in_keys() {
    return device().supports(Attention{.k = {input(std::vector<uint16_t>(80))},
                                       .p = {.heads = 1, .group = 1, .head_dim = 80, .source = kFromPool}});
  }
};
THIMBLE_SHARED_OP_TESTS(KvOps);

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<uint32_t> kHeadSizes = {64, 80, 96, 128, 256};

TEST_P(KvOps, AppendStoresKeysUnrotatedUnderListAndRotatedUnderOriginal) {
  for (const uint32_t mode : {kRopeList, kRopeOriginal})
    for (const uint32_t pairing : {kRopeAdjacent, kRopeHalves})
      for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u, 512u}) {
        const Rotation rotation{mode, pairing, dh - 16, 1.19};
        const uint32_t heads = 3, rows = 5, capacity = 40, stride = 2 * heads * dh + 7, entries = 31;
        Random random{dh + pairing};
        const std::vector<float> qkv = random.floats(rows * stride);
        const View x = input(padded_rows(qkv, 8 * stride)), table = input(rotation.table(1100));
        for (const uint32_t into : {kIntoChunk, kIntoPool}) {
          const View k = output<uint16_t>(heads * capacity * dh), v = output<uint16_t>(heads * capacity * dh),
                     pos = output<int32_t>(heads * capacity), saturated = inout(std::vector<uint32_t>(1));
          run({.n_rows = rows, .position = 1000}, equal_heads(heads, capacity, entries), 8, [&](Recorder& r) {
            r.record(KvAppend{x,
                              table,
                              {k},
                              {v},
                              pos,
                              saturated,
                              {.heads = heads,
                               .head_dim = dh,
                               .row_stride = stride,
                               .k_column = 3,
                               .v_column = 3 + heads * dh,
                               .chunk_capacity = capacity,
                               .into = into,
                               .rope = rotation.params()}});
          });
          EXPECT_EQ(get<uint32_t>(saturated)[0], 0u);
          const auto got_k = get<uint16_t>(k), got_v = get<uint16_t>(v);
          const auto got_pos = get<int32_t>(pos);
          const uint32_t first = into == kIntoPool ? entries : 0;
          for (uint32_t head = 0; head < heads; ++head)
            for (uint32_t e = 0; e < capacity; ++e) {
              const uint32_t at = head * capacity + e;
              if (e < first || e >= first + rows) {
                EXPECT_TRUE(is_poison(got_k, at * dh, dh) && is_poison(got_v, at * dh, dh) &&
                            is_poison(got_pos, at, 1))
                    << "entry " << e << " is none of the step's";
                continue;
              }
              const uint32_t row = e - first;
              EXPECT_EQ(got_pos[at], 1000 + static_cast<int32_t>(row));
              const size_t source = row * stride + 3 + head * dh;
              std::vector<double> want = doubles(qkv, source, dh);
              if (mode == kRopeOriginal) want = rotation.rotated(want, 1000 + row);
              for (uint32_t c = 0; c < dh; ++c) {
                // Half a step of f16 below 2 is 2^-11; the rotation adds about 2^-22.
                EXPECT_NEAR(f16_to_f32(got_k[at * dh + c]), want[c], 0x1p-11 + 0x1p-21);
                if (mode == kRopeList) {
                  EXPECT_EQ(got_k[at * dh + c], f32_to_f16(qkv[source + c]));
                }
                EXPECT_EQ(got_v[at * dh + c], f32_to_f16(qkv[source + heads * dh + c]));
              }
            }
        }
      }
}

// If values are channels of keys, entries are appended, compacted and merged without values.
TEST_P(KvOps, KeysAreKeptWithoutValues) {
  if (!takes_values_in_keys()) GTEST_SKIP() << "the device needs values apart from keys";
  constexpr uint32_t kHeads = 2, kDim = 80, kRows = 5, kCapacity = 40, kEntries = 20, kKept = 6;
  const std::vector<std::vector<uint32_t>> kept = {{0, 3, 4, 20, 22, 24}, {1, 2, 19, 21, 23, 24}};
  Random random{9};
  const std::vector<float> qkv = random.floats(kRows * 2 * kHeads * kDim);
  const std::vector<uint16_t> before = halves(random.floats(kHeads * kCapacity * kDim));
  const std::vector<float> scores = random.floats(kHeads * kCapacity);
  std::vector<int32_t> positions(kHeads * kCapacity);
  // One of the last entries belongs to the front.
  for (uint32_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(10 * (i % kCapacity));
  const auto keys_of = [&](bool has_values) {
    clear();
    const View k = inout(before), v = has_values ? inout(before) : View{}, pos = inout(positions),
               cis = inout(scores), chunk_k = output<uint16_t>(kHeads * kRows * kDim),
               chunk_v = has_values ? output<uint16_t>(kHeads * kRows * kDim) : View{},
               chunk_pos = output<int32_t>(kHeads * kRows), chunk_cis = input(random.floats(kHeads * kRows)),
               list = input(lists(kept, kKept + 1)), saturated = inout(std::vector<uint32_t>(1));
    run({.n_rows = kRows, .position = 15}, equal_heads(kHeads, kCapacity, kEntries, kKept), kRows,
        [&](Recorder& r) {
          r.record(KvAppend{input(qkv),
                            {},
                            {chunk_k},
                            {chunk_v},
                            chunk_pos,
                            saturated,
                            {.heads = kHeads,
                             .head_dim = kDim,
                             .row_stride = 2 * kHeads * kDim,
                             .v_column = kHeads * kDim,
                             .chunk_capacity = kRows,
                             .into = kIntoChunk}});
          r.record(KvCompact{
              list,
              {chunk_k},
              {chunk_v},
              chunk_pos,
              chunk_cis,
              {k},
              {v},
              pos,
              cis,
              {.heads = kHeads, .head_dim = kDim, .chunk_capacity = kRows, .list_capacity = kKept + 1}});
          r.record(KvMerge{{k}, {v}, pos, cis, {.heads = kHeads, .head_dim = kDim}});
        });
    EXPECT_EQ(get<uint32_t>(saturated)[0], 0u);
    return std::pair(get<uint16_t>(k), get<int32_t>(pos));
  };
  const auto want = keys_of(true);
  EXPECT_EQ(keys_of(false), want);
  EXPECT_EQ(std::vector<int32_t>(want.second.begin(), want.second.begin() + kKept),
            (std::vector<int32_t>{0, 15, 17, 19, 30, 40}));
}

// A device may process everything for a token's row in one launch, but not if one op needs another's result.
TEST_P(KvOps, OneLaunchMayAppendCopyAndCompareAToken) {
  constexpr uint32_t kHeads = 2, kDim = 64, kColumns = 4 * kDim + 2 * kHeads * kDim, kCapacity = 300;
  Random random{5};
  const std::vector<float> qkv = random.floats(kColumns), later = random.floats(kColumns),
                           w = random.floats(kColumns);
  const Rotation rotation{kRopeList, kRopeHalves, kDim, 1};
  const View x = inout(qkv), other = input(later), table = input(rotation.table(1100)),
             k = output<uint16_t>(kHeads * kCapacity * kDim), v = output<uint16_t>(kHeads * kCapacity * kDim),
             pos = output<int32_t>(kHeads * kCapacity), ring = output<float>(4 * kColumns),
             cached = output<float>(4 * kDim), gate = inout(std::vector<GateState>(1)), y = output<float>(1),
             saturated = inout(std::vector<uint32_t>(1));
  const auto* bytes = reinterpret_cast<const std::byte*>(w.data());
  const Weight row = weight(DType::kF32, 1, kColumns, {bytes, bytes + kColumns * sizeof(float)});
  StepParams step{.n_rows = 1, .position = 1000};
  step.n_init = 4;
  step.n_local = 16;
  step.select_k = 32;
  step.theta = 0.5f;
  step.ring_row = 2;
  const auto copied = [](const View& from, const View& to, uint32_t to_ring_row) {
    return Copy{from,
                to,
                {.cols = kColumns,
                 .src_stride = kColumns,
                 .dst_stride = kColumns,
                 .from_logit_row = 0,
                 .to_ring_row = to_ring_row,
                 .rows = kStepRows}};
  };
  run(step, equal_heads(kHeads, kCapacity, 200), 1, [&](Recorder& r) {
    r.record(KvAppend{x,
                      table,
                      {k},
                      {v},
                      pos,
                      saturated,
                      {.heads = kHeads,
                       .head_dim = kDim,
                       .row_stride = kColumns,
                       .k_column = 4 * kDim,
                       .v_column = 4 * kDim + kHeads * kDim,
                       .into = kIntoPool,
                       .rope = rotation.params()}});
    r.record(copied(x, ring, 1));
    r.record(QueryGate{x, cached, gate, {.cols = 4 * kDim, .heads = kHeads}});
    r.record(copied(other, x, 0));
    r.record(
        Linear{x,
               row,
               {},
               y,
               {.in_cols = kColumns, .out_cols = 1, .x_stride = kColumns, .y_stride = 1, .rows = kStepRows}});
  });
  const auto got_k = get<uint16_t>(k), got_v = get<uint16_t>(v);
  for (uint32_t head = 0; head < kHeads; ++head)
    for (uint32_t c = 0; c < kDim; ++c) {
      const size_t at = (size_t(head) * kCapacity + 200) * kDim + c, from = 4 * kDim + head * kDim + c;
      EXPECT_EQ(got_k[at], f32_to_f16(qkv[from]));
      EXPECT_EQ(got_v[at], f32_to_f16(qkv[from + kHeads * kDim]));
    }
  const auto got_ring = get<float>(ring), got_cached = get<float>(cached);
  EXPECT_TRUE(std::equal(qkv.begin(), qkv.end(), got_ring.begin() + 2 * kColumns));
  EXPECT_TRUE(std::equal(got_cached.begin(), got_cached.end(), qkv.begin()));
  EXPECT_EQ(get<GateState>(gate)[0].misses, 1u);
  EXPECT_EQ(get<float>(x), later);
  double sum = 0, magnitude = 0;
  for (uint32_t i = 0; i < kColumns; ++i) {
    sum += double{w[i]} * double{later[i]};
    magnitude += std::fabs(double{w[i]} * double{later[i]});
  }
  EXPECT_NEAR(get<float>(y)[0], sum, 2 * kColumns * 0x1p-24 * magnitude);  // as in dense_ops_test
}

// The norms of a token's queries and keys may be computed while it is appended; the result must be that of
// separate ops.
TEST_P(KvOps, ATokenIsNormedAndAppended) {
  constexpr uint32_t kHeads = 2, kQueries = 6, kSlack = 8;
  for (const uint32_t mode : {kRopeList, kRopeOriginal})
    for (const uint32_t dh : {64u, 80u, 128u, 256u}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << dh << ", rope mode " << mode);
      clear();
      Random random{dh};
      const uint32_t columns = (kQueries + 2 * kHeads) * dh + kSlack;
      const std::vector<HeadState> heads = behind_other_rows(unequal_heads({37, 5}, 2));
      const uint32_t entries = layer_entries(heads);
      std::vector<float> qkv = random.floats(columns, -3, 3);
      qkv[(kQueries + kHeads) * dh + 1] = 1e6f;  // a value beyond f16's range
      const Rotation rotation{mode, kRopeHalves, dh, 1};
      const View x = inout(qkv), table = input(rotation.table(1100)), k = output<uint16_t>(entries * dh),
                 v = output<uint16_t>(entries * dh), pos = output<int32_t>(entries),
                 saturated = inout(std::vector<uint32_t>(1));
      const auto norm = [&](uint32_t column, uint32_t groups) {
        const View at = x.slice(column * sizeof(float), x.bytes - column * sizeof(float));
        return RmsNorm{
            at,
            input(random.floats(dh, 0, 2)),
            at,
            {.cols = dh, .groups = groups, .row_stride = columns, .eps = 1e-6f, .rows = kStepRows, .add = 0}};
      };
      const RmsNorm of_q = norm(0, kQueries), of_k = norm(kQueries * dh, kHeads);
      const KvAppend append{x,
                            table,
                            {k},
                            {v},
                            pos,
                            saturated,
                            {.heads = kHeads,
                             .head_dim = dh,
                             .row_stride = columns,
                             .k_column = kQueries * dh,
                             .v_column = (kQueries + kHeads) * dh,
                             .head_state = kOtherRows,
                             .into = kIntoPool,
                             .rope = rotation.params()}};
      const StepParams step{.n_rows = 1, .position = 1000};
      size_for(kHeads, kQueries / kHeads, dh, session_of(heads, 1));
      run(step, heads, 1, [&](Recorder& r) { r.record(of_q); });
      run(step, heads, 1, [&](Recorder& r) { r.record(of_k); });
      run(step, heads, 1, [&](Recorder& r) { r.record(append); });
      const auto normed = get<float>(x);
      const auto keys = get<uint16_t>(k), values = get<uint16_t>(v);
      const auto positions = get<int32_t>(pos);
      EXPECT_EQ(get<uint32_t>(saturated)[0], 1u);
      restore();
      run(step, heads, 1, [&](Recorder& r) {
        r.record(of_q);
        r.record(of_k);
        r.record(append);
      });
      const auto together = get<float>(x);
      const auto got = get<uint16_t>(k);
      // Squares are summed in some order; then a root and two products
      for (uint32_t i = 0; i < columns; ++i)
        ASSERT_NEAR(together[i], normed[i], std::fabs(normed[i]) * (dh / 2.0 + 7) * 0x1p-23) << i;
      for (uint32_t i = 0; i < entries * dh; ++i) {
        if (is_poison(keys, i, 1)) {
          ASSERT_TRUE(is_poison(got, i, 1)) << i;
          continue;
        }
        // A value that is slightly off may be rounded to the next f16. A rotation mixes two numbers below 8.
        const double want = f16_to_f32(keys[i]);
        ASSERT_NEAR(f16_to_f32(got[i]), want, std::fabs(want) * 0x1p-10 + 16 * (dh / 2.0 + 7) * 0x1p-23) << i;
      }
      EXPECT_EQ(get<uint16_t>(v), values);
      EXPECT_EQ(get<int32_t>(pos), positions);
      EXPECT_EQ(get<uint32_t>(saturated)[0], 1u);
    }
}

TEST_P(KvOps, AppendRoundsToHalvesAsIeeeDoesAndSaturates) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {
      0.0f,  -0.0f, 1.0f,    65504.0f, 65519.0f, 65520.0f, -1e6f,     6e-8f,      2.9e-8f,  -3.1e-8f, 6.1e-5f,
      1e-5f, 0.1f,  2049.0f, 2051.0f,  1e-30f,   0x1p-24f, kInfinity, -kInfinity, 3.14159f, 1e-7f,    nan};
  const uint32_t dh = static_cast<uint32_t>(values.size());
  std::vector<float> qkv = values;
  qkv.insert(qkv.end(), values.begin(), values.end());
  const View x = input(qkv), k = output<uint16_t>(dh), v = output<uint16_t>(dh), pos = output<int32_t>(1),
             saturated = inout(std::vector<uint32_t>(1));
  run({.n_rows = 1}, 1, [&](Recorder& r) {
    r.record(
        KvAppend{x,
                 {},
                 {k},
                 {v},
                 pos,
                 saturated,
                 {.heads = 1, .head_dim = dh, .row_stride = 2 * dh, .v_column = dh, .chunk_capacity = 1}});
  });
  for (const View& stored : {k, v}) {
    const auto got = get<uint16_t>(stored);
    for (uint32_t c = 0; c + 1 < dh; ++c)
      EXPECT_EQ(got[c], f32_to_f16(std::clamp(values[c], -65504.0f, 65504.0f))) << values[c];
    EXPECT_TRUE(std::isnan(f16_to_f32(got[dh - 1])));
  }
}

// Values above 65504 count, even if they would round to it.
TEST_P(KvOps, AppendCountsSaturatedValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const uint32_t dh : {64u, 80u, 256u})
    for (const uint32_t into : {kIntoChunk, kIntoPool})
      for (const uint32_t rows : {1u, 33u}) {
        SCOPED_TRACE(::testing::Message() << "dh " << dh << " into " << into << " rows " << rows);
        clear();
        Random random{dh + rows};
        const uint32_t kv_heads = 3, stride = 2 * kv_heads * dh, max_rows = rows + 2, capacity = max_rows;
        std::vector<float> qkv = random.floats(size_t(rows) * stride, -60000, 60000);
        const float beyond[] = {65505, -65519, 65520, -3e38f, kInfinity, -kInfinity};
        uint32_t count = 0;
        for (float& f : qkv) switch (random.below(19)) {
            case 0:
              f = beyond[count++ % 6];
              break;
            case 1:
              f = nan;
          }
        // Rows beyond the step's do not count.
        qkv.resize(size_t(max_rows) * stride, 1e9f);
        const View x = input(qkv), k = output<uint16_t>(kv_heads * capacity * dh),
                   v = output<uint16_t>(kv_heads * capacity * dh), pos = output<int32_t>(kv_heads * capacity),
                   saturated = inout(std::vector<uint32_t>{5});
        const auto program = record(max_rows, [&](Recorder& r) {
          r.record(KvAppend{x,
                            {},
                            {k},
                            {v},
                            pos,
                            saturated,
                            {.heads = kv_heads,
                             .head_dim = dh,
                             .row_stride = stride,
                             .v_column = kv_heads * dh,
                             .chunk_capacity = capacity,
                             .into = into}});
        });
        ASSERT_TRUE(program);
        for (const uint32_t runs : {1u, 2u}) {
          run(*program, {.n_rows = rows}, equal_heads(kv_heads, capacity, 0));
          EXPECT_EQ(get<uint32_t>(saturated)[0], 5 + runs * count) << "after " << runs << " runs";
        }
        const auto got_k = get<uint16_t>(k), got_v = get<uint16_t>(v);
        for (uint32_t head = 0; head < kv_heads; ++head)
          for (uint32_t row = 0; row < rows; ++row)
            for (uint32_t c = 0; c < dh; ++c) {
              const size_t to = (head * capacity + row) * size_t(dh) + c,
                           from = size_t(row) * stride + head * dh + c;
              for (const auto& [stored, f] :
                   {std::pair{got_k[to], qkv[from]}, {got_v[to], qkv[from + kv_heads * dh]}}) {
                if (std::isnan(f))
                  ASSERT_TRUE(std::isnan(f16_to_f32(stored)));
                else
                  ASSERT_EQ(stored, f32_to_f16(std::clamp(f, -65504.0f, 65504.0f))) << f;
              }
            }
      }
}

// A key with two channels of 60000, rotated by one radian at position 1: one channel becomes 82906.
TEST_P(KvOps, AppendSaturatesAfterRotation) {
  const uint32_t dh = 64;
  const Rotation rotation{kRopeOriginal, kRopeHalves, dh, 1};
  std::vector<float> qkv(2 * dh);
  qkv[0] = qkv[dh / 2] = 60000;
  const View x = input(qkv), table = input(rotation.table(64)), k = output<uint16_t>(dh),
             v = output<uint16_t>(dh), pos = output<int32_t>(1), saturated = inout(std::vector<uint32_t>(1));
  run({.n_rows = 1, .position = 1}, equal_heads(1, 1, 0), 1, [&](Recorder& r) {
    r.record(KvAppend{x,
                      table,
                      {k},
                      {v},
                      pos,
                      saturated,
                      {.heads = 1,
                       .head_dim = dh,
                       .row_stride = 2 * dh,
                       .v_column = dh,
                       .into = kIntoPool,
                       .rope = rotation.params()}});
  });
  const auto got = get<uint16_t>(k);
  const double small = 60000 * (std::cos(1.0) - std::sin(1.0));
  EXPECT_NEAR(f16_to_f32(got[0]), small, 16);  // an ulp of f16 at 18070
  EXPECT_EQ(f16_to_f32(got[dh / 2]), 65504.0f);
  EXPECT_EQ(get<uint32_t>(saturated)[0], 1u);
}

// The hash of cis_store.cpp, written independently.
float hash_score(uint32_t seed, uint32_t layer, uint32_t head, uint32_t position) {
  uint32_t h = seed;
  for (const uint32_t next : {layer, head, position, 0u}) {
    h += 2654435769u;
    h = (h ^ h >> 16) * 2146121005u;
    h = (h ^ h >> 15) * 2221713035u;
    h = (h ^ h >> 16) ^ next;
  }
  return static_cast<float>(h / 256) / 16777216.0f;
}

TEST_P(KvOps, CisStoreStoresScoresOfEachKind) {
  Random random;
  const uint32_t heads = 3, rows = 4, capacity = 20, entries = 10;
  const std::vector<float> scores = random.floats(rows * heads);
  const View score = input(padded_rows(scores, 6 * heads));
  for (const uint32_t kind : {kCisHead, kCisPosition, kCisHash})
    for (const uint32_t share : {0u, 1u})
      for (const uint32_t into : {kIntoChunk, kIntoPool, kIntoRing}) {
        const View cis = output<float>(heads * capacity);
        run({.n_rows = rows, .position = 700, .seed = 9}, equal_heads(heads, capacity, entries), 6,
            [&](Recorder& r) {
              r.record(CisStore{score,
                                cis,
                                {.heads = heads,
                                 .kind = kind,
                                 .share_heads = share,
                                 .layer = 2,
                                 .chunk_capacity = capacity,
                                 .into = into}});
            });
        const auto got = get<float>(cis);
        const uint32_t first = into == kIntoChunk ? 0 : into == kIntoPool ? entries : entries - rows;
        for (uint32_t head = 0; head < heads; ++head)
          for (uint32_t e = 0; e < capacity; ++e) {
            const uint32_t row = e - first;
            if (e < first || row >= rows) {
              EXPECT_TRUE(is_poison(got, head * capacity + e, 1));
              continue;
            }
            const float own = scores[row * heads + head];
            const float top = *std::max_element(&scores[row * heads], &scores[row * heads] + heads);
            const float want = kind == kCisPosition ? static_cast<float>(700 + row)
                               : kind == kCisHash   ? hash_score(9, 2, share ? 0 : head, 700 + row)
                                                    : (share ? top : own);
            EXPECT_EQ(got[head * capacity + e], want)
                << "kind " << kind << " share " << share << " into " << into;
          }
      }
}

TEST_P(KvOps, HashScoresAreUniformAndSharedByNoTwoHeads) {
  const uint32_t rows = 1024, heads = 2;
  const View cis = output<float>(heads * rows);
  run({.n_rows = rows, .seed = 5}, rows, [&](Recorder& r) {
    r.record(CisStore{{}, cis, {.heads = heads, .kind = kCisHash, .chunk_capacity = rows}});
  });
  const auto got = get<float>(cis);
  // The mean of 2048 uniform numbers has a deviation of 0.0064, the mean of their products one of 0.0086.
  EXPECT_NEAR(std::accumulate(got.begin(), got.end(), 0.0) / 2048, 0.5, 5 * 0.0064);
  EXPECT_NEAR(std::inner_product(got.begin(), got.begin() + rows, got.begin() + rows, 0.0) / rows, 0.25,
              5 * 0.0086);
  for (float f : got) EXPECT_TRUE(f >= 0 && f < 1);
}

// Pool and chunk of one layer with random contents and poison where there are no entries, and the steps'
// views of them.
struct Store {
  std::vector<HeadState> heads;
  uint32_t dh, rows, chunk_capacity;
  std::vector<uint16_t> pool_k, pool_v, chunk_k, chunk_v;

  Store(Random& random, const std::vector<HeadState>& h, uint32_t d, uint32_t n_rows)
      : heads(h), dh(d), rows(n_rows), chunk_capacity(n_rows + 2) {
    for (auto* pool : {&pool_k, &pool_v}) {
      *pool = padded_rows(std::vector<uint16_t>(), size_t(layer_entries(heads)) * dh);
      for (const HeadState& head : heads) {
        const auto own = halves(random.floats(size_t(head.n_entries) * dh));
        std::copy(own.begin(), own.end(), pool->begin() + size_t(head.first) * dh);
      }
    }
    for (auto* chunk : {&chunk_k, &chunk_v})
      for (size_t head = 0; head < heads.size(); ++head) {
        const auto own = padded_rows(halves(random.floats(size_t(rows) * dh)), size_t(chunk_capacity) * dh);
        chunk->insert(chunk->end(), own.begin(), own.end());
      }
  }
  uint32_t entries(uint32_t head) const { return heads[head].n_entries + rows; }
  std::vector<double> entry(const std::vector<uint16_t>& pool, const std::vector<uint16_t>& chunk,
                            uint32_t head, uint32_t e) const {
    const HeadState& run = heads[head];
    return e < run.n_entries ? doubles(pool, (run.first + e) * size_t(dh), dh)
                             : doubles(chunk, (head * chunk_capacity + e - run.n_entries) * size_t(dh), dh);
  }
  std::vector<double> k(uint32_t head, uint32_t e) const { return entry(pool_k, chunk_k, head, e); }
  std::vector<double> v(uint32_t head, uint32_t e) const { return entry(pool_v, chunk_v, head, e); }
  // `latent`: the value of an entry consists of the channels of its key that do not rotate.
  Listed listed(uint32_t head, const std::vector<uint32_t>& list, const Rotation& rotation,
                bool latent = false) const {
    const auto value = [&](uint32_t e) {
      if (!latent) return v(head, e);
      const std::vector<double> key = k(head, e);
      return std::vector<double>(key.begin() + rotation.n_rot, key.end());
    };
    return Listed(
        list, rotation, [&](uint32_t e) { return k(head, e); }, value);
  }
};

std::vector<float> floats_of(const std::vector<std::byte>& bytes, uint32_t element_bytes) {
  std::vector<float> f(bytes.size() / element_bytes);
  for (size_t i = 0; i < f.size(); ++i) {
    if (element_bytes == 4) {
      std::memcpy(&f[i], &bytes[i * 4], 4);
    } else {
      uint16_t h;
      std::memcpy(&h, &bytes[i * 2], 2);
      f[i] = f16_to_f32(h);
    }
  }
  return f;
}

TEST_P(KvOps, ViewShowsListedEntriesOfPoolAndChunkInPasses) {
  constexpr uint32_t kRows = 33, kCapacity = 70;
  const uint32_t element = view_element_bytes();
  for (const std::vector<HeadState>& heads : {equal_heads(2, 153, 150), unequal_heads({0, 150, 1, 70}, 3)})
    for (const uint32_t mode : {kRopeList, kRopeOriginal})
      for (const uint32_t pairing : {kRopeAdjacent, kRopeHalves})
        for (const bool listed : {false, true})
          for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u, 512u}) {
            const Rotation rotation{mode, pairing, dh - 16, 1.19};
            Random random{dh};
            clear();
            const Store store(random, heads, dh, kRows);
            const uint32_t n_heads = static_cast<uint32_t>(heads.size()), n = 150 + kRows,
                           list_capacity = n + 1;
            std::vector<std::vector<uint32_t>> want_lists;
            for (uint32_t head = 0; head < n_heads; ++head) {
              const uint32_t own = store.entries(head);
              want_lists.push_back(listed ? some_entries(random, own, (own + kRows) / 2 - head % 2, kRows - 1)
                                          : every_entry(own));
            }
            const View pool_k = input(store.pool_k), pool_v = input(store.pool_v),
                       chunk_k = input(store.chunk_k), chunk_v = input(store.chunk_v),
                       table = input(rotation.table(n)),
                       list = listed ? input(lists(want_lists, list_capacity)) : View{};
            for (uint32_t first = 0; first < n; first += kCapacity) {
              const View k = output<std::byte>(n_heads * kCapacity * dh * element),
                         v = output<std::byte>(n_heads * kCapacity * dh * element);
              run({.n_rows = kRows}, behind_other_rows(heads), kRows, [&](Recorder& r) {
                r.record(KvView{{pool_k},
                                {pool_v},
                                {chunk_k},
                                {chunk_v},
                                list,
                                table,
                                k,
                                v,
                                {.heads = n_heads,
                                 .head_dim = dh,
                                 .chunk_capacity = store.chunk_capacity,
                                 .head_state = kOtherRows,
                                 .first_entry = first,
                                 .view_capacity = kCapacity,
                                 .list_capacity = list_capacity,
                                 .rope = rotation.params()}});
              });
              const auto got_k = floats_of(get<std::byte>(k), element),
                         got_v = floats_of(get<std::byte>(v), element);
              for (uint32_t head = 0; head < n_heads; ++head)
                for (uint32_t i = first; i < std::min<size_t>(first + kCapacity, want_lists[head].size());
                     ++i) {
                  const uint32_t e = want_lists[head][i];
                  const size_t at = (head * kCapacity + i - first) * size_t(dh);
                  std::vector<double> want = store.k(head, e);
                  if (mode == kRopeList) want = rotation.rotated(want, i);
                  const std::vector<double> want_v = store.v(head, e);
                  for (uint32_t c = 0; c < dh; ++c) {
                    // Two products of numbers below 1.2 with cosines that have 3 roundings; f16 rounds once
                    // more, below 2.
                    ASSERT_NEAR(got_k[at + c], want[c], 8 * 0x1p-23 + (element == 2 ? 0x1p-11 : 0))
                        << "head " << head << " index " << i;
                    ASSERT_EQ(got_v[at + c], want_v[c]) << "head " << head << " index " << i;
                  }
                }
            }
          }
}

struct AttentionCase {
  uint32_t kv_heads, group, dh, entries, rows;
  Rotation rotation;
  // Length of the lists; 0: all entries. The lists of every other head are 5 shorter.
  uint32_t listed = 0;
  uint32_t capacity = 0;               // of the view; 0: all in one pass
  uint32_t max_rows = 0;               // of the program; 0: two more than rows
  std::vector<uint32_t> unequal = {};  // entries of each head, if they differ
  uint32_t window = 0;
  float cap = 0;
  bool sinks = false;
  std::vector<uint32_t> indices = {};  // list index of each row's own entry; empty: the last ones
  bool latent = false;                 // values are the channels of keys that do not rotate

  uint32_t width() const { return latent ? dh - rotation.n_rot : dh; }  // channels of a value
  // Entries of the head with the most, including the step's rows.
  uint32_t n() const {
    return rows + (unequal.empty() ? entries : *std::max_element(unequal.begin(), unequal.end()));
  }
  // The head table when `more` entries are already in the pool.
  std::vector<HeadState> heads(uint32_t more = 0) const {
    if (unequal.empty()) return equal_heads(kv_heads, entries + more + 3, entries + more);
    std::vector<uint32_t> held = unequal;
    for (uint32_t& count : held) count += more;
    return unequal_heads(held, 3);
  }
  // The entries that each head attends to.
  std::vector<std::vector<uint32_t>> attended(Random& random) const {
    std::vector<std::vector<uint32_t>> all;
    for (uint32_t head = 0; head < kv_heads; ++head) {
      const uint32_t own = rows + (unequal.empty() ? entries : unequal[head]),
                     wanted = listed - 5 * (head % 2);
      all.push_back(listed && wanted < own ? some_entries(random, own, wanted, rows) : every_entry(own));
    }
    return all;
  }
  // In a list of this many entries, the index of a row's own entry.
  size_t own_index(size_t count, uint32_t row) const {
    return indices.empty() ? count - rows + row : indices[row];
  }
  // The first list index that a row with index `own` sees.
  size_t first_seen(size_t own) const { return window && own + 1 > window ? own + 1 - window : 0; }

  friend std::ostream& operator<<(std::ostream& out, const AttentionCase& c) {
    out << "kv_heads " << c.kv_heads << " group " << c.group << " dh " << c.dh << " entries " << c.entries;
    for (const uint32_t held : c.unequal) out << " " << held;
    return out << " rows " << c.rows << " mode " << c.rotation.mode << " pairing " << c.rotation.pairing
               << " n_rot " << c.rotation.n_rot << " listed " << c.listed << " capacity " << c.capacity
               << " max_rows " << c.max_rows << " window " << c.window << " cap " << c.cap << " sinks "
               << c.sinks << " latent " << c.latent << (c.indices.empty() ? "" : " indices ")
               << (c.indices.empty() ? "" : ::testing::PrintToString(c.indices));
  }
};

// Runs attention for a case and compares the result with plain loops.
class KvAttention : public KvOps {
 protected:
  static constexpr int32_t kPosition = 300;
  static constexpr double kQueryMax = 4;

  // The parameters of a case; its rows of the head table follow those of other layers.
  static AttentionParams params(const AttentionCase& c, uint32_t source, uint32_t row_stride,
                                uint32_t y_stride) {
    return {.heads = c.kv_heads,
            .group = c.group,
            .head_dim = c.dh,
            .row_stride = row_stride,
            .y_stride = y_stride,
            .source = source,
            .view_capacity = c.capacity ? c.capacity : c.n(),
            .head_state = kOtherRows,
            .list_capacity = c.n() + 1,
            .window = c.window,
            .equal_heads = c.unequal.empty(),
            .scale = static_cast<float>(1 / std::sqrt(c.dh)),
            .cap = c.cap,
            .rope = c.rotation.params()};
  }
  // Attention of `rows` rows that are in the chunk buffer.
  ViewAttention of_view(const AttentionCase& c, const Store& store, const View& q, const View& list,
                        const View& table, const View& y, uint32_t max_rows, const AttentionParams& p) {
    const size_t view = size_t(c.kv_heads) * p.view_capacity * c.dh * view_element_bytes();
    return {.q = q,
            .pool_k = input(store.pool_k),
            .pool_v = c.latent ? View{} : input(store.pool_v),
            .chunk_k = input(store.chunk_k),
            .chunk_v = c.latent ? View{} : input(store.chunk_v),
            .list = list,
            .table = table,
            .view_k = output<std::byte>(view),
            .view_v = c.latent ? View{} : output<std::byte>(view),
            .y = y,
            .ml = output<float>(size_t(max_rows) * c.kv_heads * c.group * 2),
            .chunk_capacity = store.chunk_capacity,
            .entries = c.n(),
            .p = p};
  }
  void run_view(const AttentionCase& c, const Store& store, const View& q, const View& list,
                const View& table, const View& y, uint32_t max_rows, const AttentionParams& p,
                const View& of_sinks = {}) {
    ViewAttention attention = of_view(c, store, q, list, table, y, max_rows, p);
    attention.sinks = of_sinks;
    if (!c.indices.empty()) attention.row_index = input(padded_rows(c.indices, max_rows));
    run({.n_rows = c.rows, .position = kPosition}, behind_other_rows(store.heads), max_rows,
        [&](Recorder& r) { attention.record(r); });
  }
  // Attention of a single row that is already in the pool.
  void run_pool(const Store& store, const View& q, const View& list, const View& table, const View& y,
                const AttentionParams& p, const View& of_sinks = {}, bool latent = false) {
    std::vector<HeadState> before = store.heads;
    for (HeadState& head : before) --head.n_entries;
    const View v = latent ? View{} : input(store.pool_v);
    const Attention attention{q, {input(store.pool_k)}, {v}, list, table, of_sinks, y, {}, p};
    run({.n_rows = 1, .position = kPosition}, behind_other_rows(before), 1,
        [&](Recorder& r) { r.record(attention); });
  }

  // The sink logit of each query head: some outweigh all keys, some do not matter.
  static std::vector<float> sinks(const AttentionCase& c) {
    std::vector<float> logits;
    for (uint32_t h = 0; c.sinks && h < c.kv_heads * c.group; ++h) logits.push_back(3.0f * (h % 5) - 6.0f);
    return logits;
  }

  void check(const AttentionCase& c, uint32_t source = kFromView) {
    clear();
    const bool pooled = source == kFromPool;
    SCOPED_TRACE(::testing::Message() << (pooled ? "pool: " : "view: ") << c);
    Random random{pooled ? c.n() : c.entries + c.dh};
    const Store store(random, c.heads(pooled), c.dh, pooled ? 0 : c.rows);
    const uint32_t heads = c.kv_heads * c.group, row_stride = heads * c.dh + (pooled ? 0 : 5),
                   y_stride = heads * c.width() + (pooled ? 0 : 3),
                   max_rows = pooled       ? 1
                              : c.max_rows ? c.max_rows
                                           : c.rows + 2;
    std::vector<float> q;
    if (!pooled) q = random.floats(c.rows * row_stride, -kQueryMax, kQueryMax);
    const auto attended = c.attended(random);
    if (pooled) q = random.floats(row_stride, -kQueryMax, kQueryMax);
    const AttentionParams p = params(c, source, row_stride, y_stride);
    size_for(c.kv_heads, c.group, c.dh,
             session_of(behind_other_rows(store.heads), max_rows, p.view_capacity));
    const View table = input(c.rotation.table(kPosition + c.n())),
               list = c.listed ? input(lists(attended, p.list_capacity)) : View{},
               x = input(padded_rows(q, size_t(max_rows) * row_stride)),
               y = output<float>(size_t(max_rows) * y_stride);
    const std::vector<float> own_logits = sinks(c);
    const View of_sinks = c.sinks ? input(own_logits) : View{};
    if (pooled)
      run_pool(store, x, list, table, y, p, of_sinks, c.latent);
    else
      run_view(c, store, x, list, table, y, max_rows, p, of_sinks);
    const auto got = get<float>(y);
    const bool f16 = pooled ? attends_to_pool_in_f16(c.latent) : attends_in_f16();
    // A capped logit is rounded by 2^-22 of the cap, which doubles in its weight.
    const double tolerance =
        attention_tolerance(c.dh, kQueryMax, c.n(), c.rotation.factor) + double{c.cap} * 0x1p-21;
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      const auto& l = attended[head];
      const Listed listed = store.listed(head, l, c.rotation, c.latent);
      for (uint32_t row = 0; row < c.rows; ++row) {
        const size_t own = c.own_index(l.size(), row), first = c.first_seen(own);
        const double position = c.rotation.mode == kRopeList ? static_cast<double>(own) : kPosition + row;
        for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h) {
          Softmax softmax{.cap = double{c.cap}};
          if (c.sinks) softmax.sink = double{own_logits[h]};
          const Attended want =
              attend(c.rotation.rotated_query(doubles(q, row * row_stride + h * c.dh, c.dh), position),
                     listed.keys(first, own + 1, c.dh), listed.values(first, own + 1, c.width()),
                     1 / std::sqrt(c.dh), f16, softmax);
          for (uint32_t e = 0; e < c.width(); ++e)
            ASSERT_NEAR(got[row * y_stride + h * c.width() + e], want.y[e],
                        tolerance + (f16 ? want.f16_tolerance[e] : 0))
                << "row " << row << " head " << h << " element " << e;
        }
        ASSERT_TRUE(is_poison(got, row * y_stride + heads * c.width(), y_stride - heads * c.width()));
      }
    }
  }

  // Attention with a query of zeros is the mean of the visible values. With multiples of 2^-6 as values every
  // sum is exact, so a missing, doubled or wrongly visible entry is detected at any size. Rounding: a
  // division, and the results of at most 256 parts that a device may process in parallel.
  static constexpr double kMeanTolerance = (256 + 8) * 0x1p-24;

  // The value of a channel of an entry.
  static float level(uint32_t head, uint32_t entry, uint32_t channel) {
    const uint32_t mixed = (entry * 2654435761u) ^ (channel * 40503u) ^ (head * 977u);
    return static_cast<float>(static_cast<int32_t>(mixed >> 8 & 127) - 63) / 64;
  }
  void check_mean(const AttentionCase& c, uint32_t source) {
    clear();
    const bool pooled = source == kFromPool;
    SCOPED_TRACE(::testing::Message() << "mean, " << (pooled ? "pool: " : "view: ") << c);
    const uint32_t width = c.kv_heads * c.group * c.dh, max_rows = c.max_rows ? c.max_rows : c.rows;
    Random random{c.n()};
    Store store(random, c.heads(pooled), c.dh, pooled ? 0 : c.rows);
    for (uint32_t head = 0; head < c.kv_heads; ++head)
      for (uint32_t e = 0; e < store.entries(head); ++e)
        for (uint32_t channel = 0; channel < c.dh; ++channel) {
          const HeadState& own = store.heads[head];
          const uint16_t value = f32_to_f16(level(head, e, channel));
          if (e < own.n_entries)
            store.pool_v[(size_t(own.first) + e) * c.dh + channel] = value;
          else
            store.chunk_v[(size_t(head) * store.chunk_capacity + e - own.n_entries) * c.dh + channel] = value;
        }
    const auto attended = c.attended(random);
    const AttentionParams p = params(c, source, width, width);
    size_for(c.kv_heads, c.group, c.dh,
             session_of(behind_other_rows(store.heads), max_rows, p.view_capacity));
    const View table = input(c.rotation.table(kPosition + c.n())),
               list = c.listed ? input(lists(attended, p.list_capacity)) : View{},
               x = input(padded_rows(std::vector<float>(size_t(c.rows) * width), size_t(max_rows) * width)),
               y = output<float>(size_t(max_rows) * width);
    if (pooled)
      run_pool(store, x, list, table, y, p);
    else
      run_view(c, store, x, list, table, y, max_rows, p);
    const auto got = get<float>(y);
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      std::vector<double> sums(c.dh);
      const auto& l = attended[head];
      for (uint32_t i = 0, first = 0; i < l.size(); ++i) {
        for (uint32_t e = 0; e < c.dh; ++e) sums[e] += double{level(head, l[i], e)};
        for (; first < c.first_seen(i); ++first)
          for (uint32_t e = 0; e < c.dh; ++e) sums[e] -= double{level(head, l[first], e)};
        const size_t unseen = l.size() - 1 - i;
        if (unseen >= c.rows) continue;
        const float* row = &got[(c.rows - 1 - unseen) * width];
        for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h)
          for (uint32_t e = 0; e < c.dh; ++e)
            ASSERT_NEAR(row[h * c.dh + e], sums[e] / (i + 1 - first), kMeanTolerance)
                << "row " << c.rows - 1 - unseen << " head " << h << " element " << e;
      }
    }
  }
};
THIMBLE_SHARED_OP_TESTS(KvAttention);

TEST_P(KvAttention, OfTheViewIsSoftmaxOfScoresTimesValues) {
  for (const uint32_t rows : {1u, 31u, 33u}) check({2, 4, 64, 100, rows, {}});
  check({1, 1, 64, 0, 1, {}});
  check({2, 4, 64, 0, 70, {}});
  check({1, 4, 64, 0, 1000, {}});
  check({2, 1, 80, 77, 33, {kRopeList, kRopeHalves, 80}});
  if (is_variation()) return;
  check({2, 7, 96, 64, 31, {kRopeList, kRopeAdjacent, 96}});
  check({2, 7, 128, 1000, 33, {kRopeList, kRopeHalves, 128, 1.19}});
  check({1, 3, 40, 63, 65, {kRopeList, kRopeHalves, 40}});
}

TEST_P(KvAttention, OfTheViewTakesEveryHeadSizeAndGroup) {
  const uint32_t rows[] = {1, 31, 33}, entries[] = {0, 1, 31, 33, 257, 1000};
  uint32_t variant = 0;
  for (const uint32_t dh : fewer(kHeadSizes, kHeadSizes, {80, 128}))
    for (const uint32_t group : {1u, 4u, 7u, 8u}) {
      const uint32_t kv_heads = group == 1 ? 3 : 1, pairing = variant % 2 ? kRopeHalves : kRopeAdjacent;
      check({kv_heads, group, dh, entries[variant % 6], rows[variant % 3], {kRopeList, pairing, dh}});
      if (HasFatalFailure()) return;
      ++variant;
    }
  check({1, 1, 64, 1000, 1000, {}});
}

TEST_P(KvAttention, TakesFewerRowsThanItsProgramIsFor) {
  for (const uint32_t rows : {1u, 2u, 31u, 33u, 255u})
    for (const uint32_t listed : {0u, 290u})
      check({.kv_heads = 2,
             .group = 4,
             .dh = 128,
             .entries = 300,
             .rows = rows,
             .rotation = {kRopeList, kRopeHalves, 128},
             .listed = listed,
             .max_rows = 256});
}

TEST_P(KvAttention, RotatesTheFirstChannelsOnly) {
  for (const uint32_t mode : {kRopeList, kRopeOriginal})
    for (const uint32_t pairing : {kRopeAdjacent, kRopeHalves})
      check({2, 4, 64, 50, 33, {mode, pairing, 20, 1.19}});
}

TEST_P(KvAttention, FollowsListsWithGaps) {
  for (const uint32_t mode : {kRopeList, kRopeOriginal}) {
    check({2, 4, 64, 300, 33, {mode}, 140});
    check({3, 2, 80, 300, 1, {mode, kRopeHalves, 80}, 65});
  }
}

TEST_P(KvAttention, InPassesEqualsOnePass) {
  for (const uint32_t capacity : {1u, 31u, 64u, 100u, 132u, 133u})
    check({2, 4, 64, 100, 33, {}, 0, capacity});
  for (const uint32_t capacity : {40u, 95u, 96u, 100u}) check({2, 4, 64, 300, 33, {}, 100, capacity});
}

TEST_P(KvAttention, OfAZeroQueryIsTheMeanOfTheVisibleValues) {
  if (is_variation()) return;
  for (const uint32_t dh : fewer(kHeadSizes, {64, 256})) {
    check_mean({.kv_heads = 2, .group = 4, .dh = dh, .entries = 1000, .rows = 150, .max_rows = 200},
               kFromView);
    check_mean({.kv_heads = 2, .group = 4, .dh = dh, .entries = 2999, .rows = 1}, kFromPool);
    if (HasFatalFailure()) return;
  }
  check_mean({.kv_heads = 1,
              .group = 7,
              .dh = 128,
              .entries = smaller(20000, 17000),
              .rows = smaller(1000, 100),
              .capacity = 8192},
             kFromView);
  check_mean({.kv_heads = 2, .group = 1, .dh = 96, .entries = 20000, .rows = 70, .listed = 2700}, kFromView);
  check_mean(
      {.kv_heads = 2, .group = 1, .dh = 64, .entries = 20000, .rows = 33, .listed = 9000, .capacity = 4096},
      kFromView);
  check_mean({.kv_heads = 2, .group = 7, .dh = 128, .entries = 19999, .rows = 1}, kFromPool);
  check_mean({.kv_heads = 1, .group = 8, .dh = 64, .entries = 69999, .rows = 1}, kFromPool);
  check_mean({.kv_heads = 4, .group = 4, .dh = 64, .entries = 19999, .rows = 1, .listed = 2688}, kFromPool);
}

// The widest heads have kernels of their own on some devices.
TEST_P(KvAttention, TakesHeadsOf512Channels) {
  if (is_variation()) return;
  for (const uint32_t pairing : {kRopeHalves, kRopeAdjacent}) {
    const Rotation rotation{.pairing = pairing, .n_rot = 512};
    check({.kv_heads = 2, .group = 4, .dh = 512, .entries = 150, .rows = 33, .rotation = rotation});
    check({.kv_heads = 2, .group = 8, .dh = 512, .entries = 333, .rows = 1, .rotation = rotation});
    if (HasFatalFailure()) return;
  }
  check({.kv_heads = 1,
         .group = 3,
         .dh = 512,
         .entries = 200,
         .rows = 40,
         .rotation = {kRopeOriginal},
         .capacity = 70});
  check({.kv_heads = 2,
         .group = 2,
         .dh = 512,
         .entries = 200,
         .rows = 1,
         .rotation = {.n_rot = 20},
         .listed = 90});
  check({.kv_heads = 2, .group = 2, .dh = 512, .rows = 1, .rotation = {.n_rot = 512}, .unequal = {0, 500}});
  check(
      {.kv_heads = 3, .group = 2, .dh = 512, .rows = 9, .rotation = {.n_rot = 512}, .unequal = {64, 300, 0}});
  for (const uint32_t rows : {1u, 30u})
    check({.kv_heads = 2,
           .group = 2,
           .dh = 512,
           .entries = 100,
           .rows = rows,
           .rotation = {.pairing = kRopeHalves, .n_rot = 512},
           .window = 40,
           .cap = 20,
           .sinks = true});
  check({.kv_heads = 2,
         .group = 2,
         .dh = 512,
         .entries = 60,
         .rows = 2,
         .rotation = {.n_rot = 512},
         .indices = {7, 50}});
}

// deepseek2: one KV head serves all queries, and its values are channels of the keys, after the ones that
// rotate.
TEST_P(KvAttention, TakesValuesFromTheKeys) {
  if (!takes_values_in_keys()) GTEST_SKIP() << "the device needs values apart from keys";
  const auto check_latent = [&](AttentionCase c, uint32_t source = kFromView) {
    c.kv_heads = std::max(c.kv_heads, 1u);
    c.rotation.factor = 1.19;
    c.latent = true;
    check(c, source);
  };
  const Rotation narrow{.n_rot = 16}, wide{.n_rot = 64};
  for (const uint32_t rows : {1u, 33u})
    check_latent({.group = 4, .dh = 80, .entries = 150, .rows = rows, .rotation = narrow, .capacity = 70});
  for (const uint32_t n : {1u, 64u, 700u})
    check_latent({.group = 4, .dh = 80, .entries = n - 1, .rows = 1, .rotation = narrow}, kFromPool);
  if (HasFatalFailure() || is_variation()) return;
  check_latent({.group = 20, .dh = 576, .entries = 100, .rows = 9, .rotation = wide});
  check_latent({.group = 20, .dh = 576, .entries = 299, .rows = 1, .rotation = wide}, kFromPool);
  check_latent({.group = 128, .dh = 576, .entries = 70, .rows = 2, .rotation = wide});
  check_latent({.group = 128, .dh = 576, .entries = 99, .rows = 1, .rotation = wide, .listed = 60},
               kFromPool);
  for (const uint32_t mode : {kRopeList, kRopeOriginal}) {
    const Rotation rotation{mode, kRopeHalves, 64};
    check_latent({.group = 16, .dh = 576, .entries = 200, .rows = 5, .rotation = rotation, .listed = 90});
    check_latent({.group = 16, .dh = 576, .entries = 499, .rows = 1, .rotation = rotation, .listed = 300},
                 kFromPool);
    if (HasFatalFailure()) return;
  }
  for (const uint32_t rows : {1u, 5u})
    check_latent({.kv_heads = 2, .group = 3, .dh = 96, .rows = rows, .rotation = narrow, .unequal = {90, 9}});
  check_latent({.kv_heads = 2, .group = 3, .dh = 96, .rows = 1, .rotation = narrow, .unequal = {900, 9}},
               kFromPool);
  for (const uint32_t source : {kFromView, kFromPool})
    check_latent({.group = 8,
                  .dh = 144,
                  .entries = 200,
                  .rows = 1,
                  .rotation = {.n_rot = 32},
                  .window = 90,
                  .cap = 20,
                  .sinks = true},
                 source);
  check_latent({.group = 4, .dh = 80, .entries = 60, .rows = 2, .rotation = narrow, .indices = {7, 50}});
  check_latent({.group = 20, .dh = 576, .entries = 60, .rows = 2, .rotation = wide, .indices = {7, 50}});
  // Several passes over the view, and several blocks and tiles.
  check_latent({.group = 20, .dh = 576, .entries = 300, .rows = 40, .rotation = wide, .capacity = 130});
  for (const uint32_t group : {16u, 20u}) {
    check_latent({.group = group, .dh = 576, .entries = smaller(9000, 900), .rows = 1, .rotation = wide},
                 kFromPool);
    if (HasFatalFailure()) return;
  }
  for (const uint32_t source : {kFromView, kFromPool})
    check_latent({.group = 20,
                  .dh = 576,
                  .entries = 300,
                  .rows = 1,
                  .rotation = {.pairing = kRopeHalves, .n_rot = 64},
                  .window = 170,
                  .cap = 20,
                  .sinks = true},
                 source);
  check_latent({.kv_heads = 2,
                .group = 18,
                .dh = 576,
                .rows = 1,
                .rotation = wide,
                .unequal = {smaller(3000, 300), 9}},
               kFromPool);
  check_latent({.kv_heads = 3, .group = 5, .dh = 576, .rows = 7, .rotation = wide, .unequal = {64, 300, 0}});
}

// Logits reach 60 here, so caps of 2 and 20 bend them and one of 1000 hardly does.
TEST_P(KvAttention, CapsItsLogits) {
  for (const float cap : {2.0f, 20.0f, 1000.0f})
    for (const bool sinks : {false, true}) {
      if (!sinks && is_variation()) continue;
      check({.kv_heads = 2, .group = 4, .dh = 64, .entries = 100, .rows = 33, .cap = cap, .sinks = sinks});
      check({.kv_heads = 2,
             .group = 3,
             .dh = 80,
             .entries = 300,
             .rows = 5,
             .rotation = {kRopeList, kRopeHalves, 80},
             .listed = 140,
             .window = 30,
             .cap = cap,
             .sinks = sinks});
      check({.kv_heads = 2,
             .group = 4,
             .dh = 128,
             .entries = 999,
             .rows = 1,
             .rotation = {kRopeOriginal, kRopeHalves, 128},
             .cap = cap,
             .sinks = sinks},
            kFromPool);
      if (HasFatalFailure()) return;
    }
}

// In one pass and in several, from parts of a pool, with windows and lists, in heads with unequal numbers of
// entries.
TEST_P(KvAttention, CountsEachHeadsSinkOnce) {
  if (is_variation()) return;
  for (const uint32_t capacity : {0u, 40u, 101u})
    check({.kv_heads = 2,
           .group = 4,
           .dh = 64,
           .entries = 100,
           .rows = 33,
           .capacity = capacity,
           .sinks = true});
  check({.kv_heads = 3,
         .group = 5,
         .dh = 128,
         .entries = 0,
         .rows = 70,
         .rotation = {kRopeList, kRopeHalves, 128},
         .sinks = true});
  check({.kv_heads = 2, .group = 8, .dh = 64, .entries = 300, .rows = 33, .window = 20, .sinks = true});
  check({.kv_heads = 3,
         .group = 2,
         .dh = 64,
         .entries = 0,
         .rows = 40,
         .unequal = {700, 3, 60},
         .sinks = true});
  for (const uint32_t n : {1u, 64u, 1000u, 3000u})
    for (const uint32_t window : {0u, 30u})
      check(
          {.kv_heads = 2, .group = 7, .dh = 64, .entries = n - 1, .rows = 1, .window = window, .sinks = true},
          kFromPool);
  check({.kv_heads = 2,
         .group = 4,
         .dh = 96,
         .entries = 999,
         .rows = 1,
         .rotation = {kRopeList, kRopeHalves, 96},
         .listed = 333,
         .sinks = true},
        kFromPool);
  check(
      {.kv_heads = 3, .group = 2, .dh = 64, .entries = 0, .rows = 1, .unequal = {2000, 3, 60}, .sinks = true},
      kFromPool);
}

// For layers without positions.
TEST_P(KvAttention, RotatesNothingWithoutChannelsToRotate) {
  for (const uint32_t mode : {kRopeList, kRopeOriginal}) {
    check({.kv_heads = 2,
           .group = 4,
           .dh = 64,
           .entries = 100,
           .rows = 33,
           .rotation = {mode, kRopeAdjacent, 0}});
    check({.kv_heads = 2,
           .group = 4,
           .dh = 64,
           .entries = 999,
           .rows = 1,
           .rotation = {mode, kRopeHalves, 0},
           .listed = 333},
          kFromPool);
  }
}

// hunyuan-dense: the weights do not commute with the rotation.
TEST_P(KvAttention, WeighsRotatedQueries) {
  if (GetParam().starts_with("cuda")) return;
  for (const uint32_t mode : {kRopeList, kRopeOriginal})
    for (const Rotation& rotation :
         {Rotation{mode, kRopeHalves, 64}, Rotation{mode, kRopeAdjacent, 40, 1.19}}) {
      check({.kv_heads = 2,
             .group = 3,
             .dh = 64,
             .entries = 200,
             .rows = 5,
             .rotation = weighted(rotation, 64)},
            kFromView);
      for (const uint32_t listed : {0u, 300u})
        check({.kv_heads = 2,
               .group = 3,
               .dh = 64,
               .entries = 700,
               .rows = 1,
               .rotation = weighted(rotation, 64),
               .listed = listed},
              kFromPool);
      if (HasFatalFailure()) return;
    }
}

// A single row with a pool that already contains it.
TEST_P(KvAttention, OfThePoolGathersAndRotatesKeys) {
  struct Case {
    uint32_t kv_heads, group, dh, n, listed;
    Rotation rotation;
  };
  std::vector<Case> cases = {{2, 4, 64, 1, 0, {}},
                             {2, 4, 64, 1000, 0, {}},
                             {2, 4, 64, 1000, 333, {}},
                             {2, 4, 64, 700, 300, {kRopeOriginal, kRopeHalves, 64, 1.19}},
                             {1, 1, 80, 257, 0, {kRopeList, kRopeHalves, 80, 1.19}},
                             {2, 7, 96, 65, 31, {kRopeList, kRopeAdjacent, 40, 1.19}},
                             {1, 7, 128, 3000, 0, {kRopeList, kRopeAdjacent, 128}},
                             {8, 4, 128, 700, 0, {kRopeList, kRopeHalves, 128}},
                             {3, 2, 40, 64, 0, {kRopeList, kRopeHalves, 40}},
                             {1, 4, 64, 20000, 0, {}},
                             {1, 4, 128, 20000, 2688, {kRopeList, kRopeHalves, 128}},
                             {4, 2, 64, 2500, 0, {}},
                             {4, 8, 128, 3000, 2688, {kRopeList, kRopeHalves, 128}}};
  if (is_variation()) cases.resize(5);
  // Every head size with every group, alternating between both modes: a driver compiles each case, a software
  // driver a third of them.
  uint32_t turn = 0;
  for (const uint32_t dh : fewer(kHeadSizes, kHeadSizes, {})) {
    for (const uint32_t group : {1u, 4u, 7u, 8u}) {
      const uint32_t pairing = turn / 2 % 2 ? kRopeHalves : kRopeAdjacent;
      const Case in_list_order = {2, group, dh, 1000, turn % 3 ? 500u : 0u, {kRopeList, pairing, dh}},
                 in_place = {2, group, dh, 130 + group, 0, {kRopeOriginal, pairing, dh}};
      if (!is_slow() || turn % 3 == 1) cases.push_back(turn % 2 ? in_list_order : in_place);
      ++turn;
    }
    ++turn;
  }
  for (const Case& c : cases) {
    check({c.kv_heads, c.group, c.dh, c.n - 1, 1, c.rotation, c.listed}, kFromPool);
    if (HasFatalFailure()) return;
  }
}

// ---- heads with different runs ----

TEST_P(KvAttention, OfTheViewSeesEachHeadsOwnEntries) {
  if (is_variation()) return;
  const std::vector<uint32_t> few = {0, 1, 63, 64, 65, 200}, many = {64, 4000, 0, 65};
  uint32_t turn = 0;  // every second case has lists, or the other mode
  for (const uint32_t dh : fewer({64, 80, 128, 256}, {80}))
    for (const uint32_t rows : {1u, 33u, 130u}) {
      check({.kv_heads = 6,
             .group = 2,
             .dh = dh,
             .rows = rows,
             .rotation = {.n_rot = dh},
             .listed = turn++ % 2 ? 150u : 0u,
             .unequal = few});
      if (HasFatalFailure()) return;
    }
  for (const uint32_t listed : {0u, 1000u})
    for (const uint32_t capacity : {0u, 65u, 1500u}) {  // later passes contain no entries of the short heads
      check({.kv_heads = 4,
             .group = 4,
             .dh = 64,
             .rows = 33,
             .rotation = {turn++ % 2 ? kRopeOriginal : kRopeList},
             .listed = listed,
             .capacity = capacity,
             .unequal = many});
      if (HasFatalFailure()) return;
    }
  for (const auto& [dh, group, capacity] :
       {std::tuple{40u, 1u, 0u}, {40u, 7u, 1000u}, {128u, 1u, 1000u}, {128u, 7u, 0u}}) {
    check({.kv_heads = 5,
           .group = group,
           .dh = dh,
           .rows = 33,
           .rotation = {.n_rot = dh},
           .capacity = capacity,
           .unequal = {64, 2500, 0, 65, 900}});
    if (HasFatalFailure()) return;
  }
  // More rows and heads than a device has workgroups for, each with a part of the longest head.
  check_mean({.kv_heads = 12,
              .group = 7,
              .dh = 64,
              .rows = smaller(300, 70),
              .capacity = 2048,
              .unequal = {64, 64, 5000, 64, 64, 64, 64, 0, 1, 64, 64, 700}},
             kFromView);
  check_mean({.kv_heads = 4,
              .group = 4,
              .dh = 128,
              .rows = 150,
              .listed = 700,
              .capacity = 512,
              .max_rows = 200,
              .unequal = {0, 3000, 64, 800}},
             kFromView);
  check_mean({.kv_heads = 8,
              .group = 4,
              .dh = 128,
              .rows = smaller(512, 128),
              .unequal = {64, 64, 64, smaller(16384, 4096), 64, 64, 64, 64}},
             kFromView);
}

// One program, alternating between heads of which one or another has the most entries, and equal ones.
TEST_P(KvAttention, OfTheViewGivesTheSameBitsForTheSameHeads) {
  const AttentionCase c{.kv_heads = 4, .group = 4, .dh = 64, .entries = 4000, .rows = 33, .capacity = 1500};
  Random random;
  const Store store(random, c.heads(), c.dh, c.rows);
  const uint32_t width = c.kv_heads * c.group * c.dh, max_rows = 64;
  size_for(c.kv_heads, c.group, c.dh, session_of(behind_other_rows(store.heads), max_rows, c.capacity));
  const View q = input(padded_rows(random.floats(size_t(c.rows) * width), size_t(max_rows) * width)),
             table = input(c.rotation.table(kPosition + c.n())), y = output<float>(size_t(max_rows) * width);
  AttentionParams p = params(c, kFromView, width, width);
  p.equal_heads = 0;  // they are equal in some runs
  const ViewAttention attention = of_view(c, store, q, {}, table, y, max_rows, p);
  const auto program = record(max_rows, [&](Recorder& r) { attention.record(r); });
  ASSERT_TRUE(program);
  const std::vector<std::vector<uint32_t>> turns = {
      {64, 4000, 0, 65}, {900, 900, 900, 900}, {1600, 64, 3000, 64}, {64, 65, 64, 63}};
  std::vector<std::vector<uint32_t>> first;
  for (size_t turn = 0; turn < 2 * turns.size(); ++turn) {
    const auto& entries = turns[turn % turns.size()];
    std::vector<HeadState> heads = store.heads;
    for (uint32_t head = 0; head < c.kv_heads; ++head) heads[head].n_entries = entries[head];
    run(*program, {.n_rows = c.rows, .position = kPosition}, behind_other_rows(heads));
    const auto got = get<uint32_t>(y);
    if (turn < turns.size())
      first.push_back(got);
    else
      EXPECT_TRUE(got == first[turn - turns.size()]) << "heads of " << ::testing::PrintToString(entries);
  }
}

TEST_P(KvAttention, OfThePoolSeesEachHeadsOwnEntries) {
  if (is_variation()) return;
  const std::vector<uint32_t> some = {0, 1, 62, 63, 64, 999, 4000};
  uint32_t turn = 0;  // every second case has lists
  for (const uint32_t dh : fewer(kHeadSizes, {64}))
    for (const uint32_t group : fewer({1, 4, 7}, {1, 7})) {
      check({.kv_heads = 7,
             .group = group,
             .dh = dh,
             .rows = 1,
             .rotation = {group == 4 ? kRopeOriginal : kRopeList, kRopeHalves, dh},
             .listed = turn++ % 2 ? 70u : 0u,
             .unequal = some},
            kFromPool);
      if (HasFatalFailure()) return;
    }
  for (const uint32_t longest : {0u, 3u, 7u}) {
    std::vector<uint32_t> one_long(8, 63);
    one_long[longest] = 40000;
    for (const uint32_t listed : {0u, 2688u})
      check_mean({.kv_heads = 8, .group = 4, .dh = 128, .rows = 1, .listed = listed, .unequal = one_long},
                 kFromPool);
  }
}

// ---- windows ----

// ---- rows whose own entries are not the last ----

// Possible list indices of a step's rows, in lists of at least n entries.
enum class Indices { kMiddle, kLast, kFirst, kFront };
std::vector<uint32_t> indices_of(Indices kind, Random& random, uint32_t n, uint32_t rows) {
  std::vector<uint32_t> indices = every_entry(rows);
  if (kind == Indices::kLast)
    for (uint32_t& i : indices) i += n - rows;
  if (kind == Indices::kMiddle || kind == Indices::kFirst) indices = some_entries(random, n - 1, rows, 0);
  if (kind == Indices::kFirst) indices[0] = 0;
  return indices;
}

TEST_P(KvAttention, OfTheViewSeesUpToEachRowsOwnIndex) {
  if (is_variation()) return;
  Random random{7};
  constexpr uint32_t kGroups[] = {1, 4, 7};
  uint32_t turn = 0;
  for (const uint32_t dh : fewer({8, 64, 80, 128, 256}, {8, 128}))
    for (const uint32_t rows : {1u, 2u, 9u, 33u, 64u}) {
      const uint32_t entries = 40 + random.below(200);
      check({.kv_heads = 2,
             .group = kGroups[turn % 3],
             .dh = dh,
             .entries = entries,
             .rows = rows,
             .rotation = {.pairing = turn / 2 % 2 ? kRopeHalves : kRopeAdjacent, .n_rot = dh},
             .max_rows = turn % 2 ? rows : 66,
             .indices = indices_of(static_cast<Indices>(turn % 4), random, entries + rows, rows)});
      if (HasFatalFailure()) return;
      ++turn;
    }
}

// Passes end before, between and after the indices; some passes contain no index.
TEST_P(KvAttention, OfTheViewSeesUpToEachRowsOwnIndexInPasses) {
  Random random{8};
  for (const Indices kind : {Indices::kMiddle, Indices::kLast, Indices::kFirst, Indices::kFront})
    for (const uint32_t capacity : {1u, 31u, 64u, 100u, 132u}) {
      check({.kv_heads = 2,
             .group = 4,
             .dh = 64,
             .entries = 100,
             .rows = 33,
             .capacity = capacity,
             .indices = indices_of(kind, random, 133, 33)});
      check({.kv_heads = 2,
             .group = 7,
             .dh = 128,
             .entries = 300,
             .rows = 9,
             .rotation = {.n_rot = 128},
             .listed = 200,
             .capacity = 3 * capacity,
             .cap = 20,
             .sinks = true,
             .indices = indices_of(kind, random, 195, 9)});
      if (HasFatalFailure()) return;
    }
}

TEST_P(KvAttention, OfTheViewSeesUpToEachRowsOwnIndexInEachHeadsOwnEntries) {
  if (is_variation()) return;
  Random random{9};
  for (const Indices kind : {Indices::kMiddle, Indices::kLast, Indices::kFirst, Indices::kFront})
    for (const uint32_t dh : fewer({64, 80, 256}, {64}))
      for (const uint32_t capacity : {0u, 1000u}) {
        check({.kv_heads = 4,
               .group = 4,
               .dh = dh,
               .rows = 33,
               .rotation = {.n_rot = dh},
               .capacity = capacity,
               .unequal = {64, 2500, 31, 900},
               .indices = indices_of(kind, random, 64, 33)});
        if (HasFatalFailure()) return;
      }
}

TEST_P(KvAttention, SeesNoFurtherBackThanItsWindow) {
  if (is_variation()) return;
  uint32_t turn = 0;
  for (const uint32_t window : fewer({1, 5, 64, 100, 5000}, {5, 100, 5000})) {
    for (const uint32_t rows : {1u, 33u, 200u}) {
      const uint32_t one = turn++ % 2 ? 300u : 0u, other = 300 - one;  // every second case has lists
      check({.kv_heads = 2,
             .group = 4,
             .dh = 64,
             .entries = 500,
             .rows = rows,
             .rotation = {},
             .listed = one,
             .window = window});
      check({.kv_heads = 2,
             .group = 7,
             .dh = 128,
             .entries = 333,
             .rows = rows,
             .rotation = {kRopeOriginal, kRopeHalves, 128},
             .listed = other,
             .window = window});
      // Passes that are completely before some windows, or before all.
      check({.kv_heads = 2,
             .group = 1,
             .dh = 80,
             .entries = 500,
             .rows = rows,
             .rotation = {kRopeList, kRopeHalves, 80},
             .listed = one,
             .capacity = 96,
             .window = window});
      if (HasFatalFailure()) return;
    }
    check({.kv_heads = 2, .group = 4, .dh = 64, .entries = 0, .rows = 150, .rotation = {}, .window = window});
    for (const uint32_t listed : {0u, 300u}) {
      check({.kv_heads = 5,
             .group = 2,
             .dh = 96,
             .rows = 70,
             .rotation = {.n_rot = 96},
             .listed = listed,
             .unequal = {0, 1, 64, 1500, 3},
             .window = window});
      check({.kv_heads = 5,
             .group = 2,
             .dh = 64,
             .rows = 130,
             .rotation = {},
             .listed = listed,
             .capacity = 400,
             .unequal = {1500, 1, 64, 700, 3},
             .window = window});
      if (HasFatalFailure()) return;
    }
  }
  for (const uint32_t window : fewer({1, 100, 1024, 4096}, {1, 1024})) {
    check_mean({.kv_heads = 2,
                .group = 4,
                .dh = 128,
                .entries = smaller(9000, 8500),
                .rows = smaller(300, 70),
                .capacity = 4096,
                .window = window},
               kFromView);
    check_mean(
        {.kv_heads = 2, .group = 4, .dh = 64, .entries = 5000, .rows = 70, .listed = 2000, .window = window},
        kFromView);
    if (HasFatalFailure()) return;
  }
}

TEST_P(KvAttention, OfThePoolSeesNoFurtherBackThanItsWindow) {
  if (is_variation()) return;
  for (const uint32_t window : {1u, 5u, 64u, 100u, 5000u})
    for (const uint32_t listed : {0u, 300u})
      for (const uint32_t dh : fewer({64, 128, 256}, {64})) {
        check({.kv_heads = 2,
               .group = 4,
               .dh = dh,
               .entries = 1500,
               .rows = 1,
               .rotation = {kRopeList, kRopeHalves, dh},
               .listed = listed,
               .window = window},
              kFromPool);
        check({.kv_heads = 5,
               .group = 7,
               .dh = dh,
               .rows = 1,
               .rotation = {kRopeOriginal, kRopeHalves, dh},
               .listed = listed,
               .unequal = {0, 63, 99, 3000, 4},
               .window = window},
              kFromPool);
        if (HasFatalFailure()) return;
      }
  for (const uint32_t window : {1u, 100u, 1024u, 15000u, 20001u})
    check_mean({.kv_heads = 2, .group = 4, .dh = 64, .entries = 19999, .rows = 1, .window = window},
               kFromPool);
  check_mean(
      {.kv_heads = 2, .group = 4, .dh = 64, .entries = 20000, .rows = 1, .listed = 9000, .window = 4096},
      kFromPool);
}

// ---- compaction ----

// Algorithms 8.3 and 8.42: the bits of a surviving entry do not change, wherever it is stored.
TEST_P(KvOps, ACompactedPoolEqualsItsList) {
  for (const bool with_cis : {true, false}) {
    const Rotation rotation;
    Random random{3};
    const uint32_t heads = 2, dh = 64, entries = 200, rows = 40, n = entries + rows, keep = 130,
                   list_capacity = n + 1;
    const Store store(random, equal_heads(heads, entries + 3, entries), dh, rows);
    const uint32_t capacity = entries + 3;
    std::vector<int32_t> pos, chunk_pos;
    std::vector<float> cis, chunk_cis;
    for (uint32_t head = 0; head < heads; ++head) {
      for (uint32_t e = 0; e < capacity; ++e) pos.push_back(static_cast<int32_t>(3 * e + head));
      for (uint32_t e = 0; e < store.chunk_capacity; ++e) chunk_pos.push_back(static_cast<int32_t>(1000 + e));
    }
    cis = random.floats(pos.size());
    chunk_cis = random.floats(chunk_pos.size());
    const std::vector<std::vector<uint32_t>> survivors = {some_entries(random, n, keep, 7),
                                                          some_entries(random, n, keep, 0)};
    const View k = inout(store.pool_k), v = inout(store.pool_v), chunk_k = input(store.chunk_k),
               chunk_v = input(store.chunk_v), p = inout(pos), chunk_p = input(chunk_pos),
               s = with_cis ? inout(cis) : View{}, chunk_s = with_cis ? input(chunk_cis) : View{},
               list = input(lists(survivors, list_capacity)), table = input(rotation.table(n));
    const uint32_t element = view_element_bytes();
    const View before_k = output<std::byte>(heads * keep * dh * element),
               before_v = output<std::byte>(heads * keep * dh * element),
               after_k = output<std::byte>(heads * keep * dh * element),
               after_v = output<std::byte>(heads * keep * dh * element);
    const KvViewParams view{.heads = heads,
                            .head_dim = dh,
                            .chunk_capacity = store.chunk_capacity,
                            .view_capacity = keep,
                            .list_capacity = list_capacity,
                            .rope = rotation.params()};
    run({.n_rows = rows}, store.heads, rows, [&](Recorder& r) {
      r.record(KvView{{k}, {v}, {chunk_k}, {chunk_v}, list, table, before_k, before_v, view});
      r.record(KvCompact{list,
                         {chunk_k},
                         {chunk_v},
                         chunk_p,
                         chunk_s,
                         {k},
                         {v},
                         p,
                         s,
                         {.heads = heads,
                          .head_dim = dh,
                          .chunk_capacity = store.chunk_capacity,
                          .list_capacity = list_capacity}});
    });
    run({.n_rows = 0}, equal_heads(heads, capacity, keep), rows, [&](Recorder& r) {
      r.record(KvView{{k}, {v}, {}, {}, {}, table, after_k, after_v, view});
    });
    EXPECT_EQ(get<std::byte>(before_k), get<std::byte>(after_k));
    EXPECT_EQ(get<std::byte>(before_v), get<std::byte>(after_v));
    const auto got_pos = get<int32_t>(p);
    for (uint32_t head = 0; head < heads; ++head)
      for (uint32_t i = 0; i < keep; ++i) {
        const uint32_t e = survivors[head][i], at = head * capacity;
        EXPECT_EQ(got_pos[at + i], e < entries ? pos[at + e] : chunk_pos[e - entries]);
        if (with_cis) {
          EXPECT_EQ(get<float>(s)[at + i],
                    e < entries ? cis[at + e] : chunk_cis[head * store.chunk_capacity + e - entries]);
        }
      }
  }
}

TEST_P(KvOps, CompactWithoutAListAppendsTheChunk) {
  Random random;
  const Store store(random, equal_heads(2, 8, 5), 64, 3);
  const std::vector<int32_t> pos(16, 1), chunk_pos = {10, 11, 12, 0, 0, 20, 21, 22, 0, 0};
  const View k = inout(store.pool_k), v = inout(store.pool_v), p = inout(pos), chunk_k = input(store.chunk_k),
             chunk_v = input(store.chunk_v), chunk_p = input(chunk_pos);
  run({.n_rows = 3}, store.heads, 4, [&](Recorder& r) {
    r.record(KvCompact{{},
                       {chunk_k},
                       {chunk_v},
                       chunk_p,
                       {},
                       {k},
                       {v},
                       p,
                       {},
                       {.heads = 2, .head_dim = 64, .chunk_capacity = store.chunk_capacity}});
  });
  EXPECT_EQ(get<int32_t>(p), (std::vector<int32_t>{1, 1, 1, 1, 1, 10, 11, 12, 1, 1, 1, 1, 1, 20, 21, 22}));
  const auto got = get<uint16_t>(k);
  for (uint32_t head = 0; head < 2; ++head)
    for (uint32_t e = 0; e < 8; ++e)
      EXPECT_EQ(doubles(got, (head * 8 + e) * size_t(64), 64), store.k(head, e))
          << "head " << head << " entry " << e;
}

}  // namespace
}  // namespace thimble::test
