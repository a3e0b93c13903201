// kv_append, cis_store, kv_view, attention and kv_compact against plain loops in double precision.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

class KvOps : public OpTest {};
THIMBLE_OP_TESTS(KvOps);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_P(KvOps, AppendStoresKeysUnrotatedUnderListAndRotatedUnderOriginal) {
  for (const uint32_t mode : {kRopeList, kRopeOriginal})
    for (const uint32_t pairing : {kRopeAdjacent, kRopeHalves})
      for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u}) {
        const Rotation rotation{mode, pairing, dh - 16, 1.19};
        const uint32_t heads = 3, rows = 5, capacity = 40, stride = 2 * heads * dh + 7, entries = 31;
        Random random{dh + pairing};
        const std::vector<float> qkv = random.floats(rows * stride);
        const View x = input(padded_rows(qkv, 8 * stride)), table = input(rotation.table(1100));
        for (const uint32_t into : {kIntoChunk, kIntoPool}) {
          const View k = output<uint16_t>(heads * capacity * dh), v = output<uint16_t>(heads * capacity * dh),
                     pos = output<int32_t>(heads * capacity);
          run({.n_rows = rows, .n_entries = entries, .position = 1000}, 8, [&](Recorder& r) {
            r.kv_append({x,
                         table,
                         k,
                         v,
                         pos,
                         {.heads = heads,
                          .head_dim = dh,
                          .row_stride = stride,
                          .k_column = 3,
                          .v_column = 3 + heads * dh,
                          .capacity = capacity,
                          .into = into,
                          .rope = rotation.params()}});
          });
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

// A device may do what a token's row goes through in one launch, and must not where one op needs another's
// result.
TEST_P(KvOps, ATokenIsAppendedCopiedComparedAndOverwritten) {
  constexpr uint32_t kHeads = 2, kDim = 64, kColumns = 4 * kDim + 2 * kHeads * kDim, kCapacity = 300;
  Random random{5};
  const std::vector<float> qkv = random.floats(kColumns), later = random.floats(kColumns),
                           w = random.floats(kColumns);
  const Rotation rotation{kRopeList, kRopeHalves, kDim, 1};
  const View x = inout(qkv), other = input(later), table = input(rotation.table(1100)),
             k = output<uint16_t>(kHeads * kCapacity * kDim), v = output<uint16_t>(kHeads * kCapacity * kDim),
             pos = output<int32_t>(kHeads * kCapacity), ring = output<float>(4 * kColumns),
             cached = output<float>(4 * kDim), gate = inout(std::vector<GateState>(1)), y = output<float>(1);
  const auto* bytes = reinterpret_cast<const std::byte*>(w.data());
  const Weight row = weight(DType::kF32, 1, kColumns, {bytes, bytes + kColumns * sizeof(float)});
  StepParams step{.n_rows = 1, .n_entries = 200, .position = 1000};
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
  run(step, 1, [&](Recorder& r) {
    r.kv_append({x,
                 table,
                 k,
                 v,
                 pos,
                 {.heads = kHeads,
                  .head_dim = kDim,
                  .row_stride = kColumns,
                  .k_column = 4 * kDim,
                  .v_column = 4 * kDim + kHeads * kDim,
                  .capacity = kCapacity,
                  .into = kIntoPool,
                  .rope = rotation.params()}});
    r.copy(copied(x, ring, 1));
    r.query_gate({x, cached, gate, {.cols = 4 * kDim}});
    r.copy(copied(other, x, 0));
    r.linear({x,
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

TEST_P(KvOps, AppendRoundsToHalvesAsIeeeDoes) {
  const std::vector<float> values = {0.0f,    -0.0f,   1.0f,     65504.0f,  65519.0f,   65520.0f, -1e6f,
                                     6e-8f,   2.9e-8f, -3.1e-8f, 6.1e-5f,   1e-5f,      0.1f,     2049.0f,
                                     2051.0f, 1e-30f,  0x1p-24f, kInfinity, -kInfinity, 3.14159f, 1e-7f};
  const uint32_t dh = static_cast<uint32_t>(values.size());
  std::vector<float> qkv = values;
  qkv.insert(qkv.end(), values.begin(), values.end());
  const View x = input(qkv), k = output<uint16_t>(dh), v = output<uint16_t>(dh), pos = output<int32_t>(1);
  run({.n_rows = 1}, 1, [&](Recorder& r) {
    r.kv_append({x,
                 {},
                 k,
                 v,
                 pos,
                 {.heads = 1, .head_dim = dh, .row_stride = 2 * dh, .v_column = dh, .capacity = 1}});
  });
  EXPECT_EQ(get<uint16_t>(k), halves(values));
  EXPECT_EQ(get<uint16_t>(v), halves(values));
}

// The hash of cis_store.cpp, written again.
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

TEST_P(KvOps, CisStoreKeepsTheScoreOfEachKind) {
  Random random;
  const uint32_t heads = 3, rows = 4, capacity = 20, entries = 10;
  const std::vector<float> scores = random.floats(rows * heads);
  const View score = input(padded_rows(scores, 6 * heads));
  for (const uint32_t kind : {kCisHead, kCisPosition, kCisHash})
    for (const uint32_t share : {0u, 1u})
      for (const uint32_t into : {kIntoChunk, kIntoPool, kIntoRing}) {
        const View cis = output<float>(heads * capacity);
        run({.n_rows = rows, .n_entries = entries, .position = 700, .seed = 9}, 6, [&](Recorder& r) {
          r.cis_store({score,
                       cis,
                       {.heads = heads,
                        .kind = kind,
                        .share_heads = share,
                        .layer = 2,
                        .capacity = capacity,
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
    r.cis_store({{}, cis, {.heads = heads, .kind = kCisHash, .capacity = rows}});
  });
  const auto got = get<float>(cis);
  // The mean of 2048 uniform numbers has a deviation of 0.0064, their product's mean one of 0.0086.
  EXPECT_NEAR(std::accumulate(got.begin(), got.end(), 0.0) / 2048, 0.5, 5 * 0.0064);
  EXPECT_NEAR(std::inner_product(got.begin(), got.begin() + rows, got.begin() + rows, 0.0) / rows, 0.25,
              5 * 0.0086);
  for (float f : got) EXPECT_TRUE(f >= 0 && f < 1);
}

// Pool and chunk of one layer with random contents, and the steps' view of them.
struct Store {
  uint32_t heads, dh, pool_capacity, chunk_capacity, entries, rows;
  std::vector<uint16_t> pool_k, pool_v, chunk_k, chunk_v;

  Store(Random& random, uint32_t h, uint32_t d, uint32_t n_entries, uint32_t n_rows)
      : heads(h),
        dh(d),
        pool_capacity(n_entries + 3),
        chunk_capacity(n_rows + 2),
        entries(n_entries),
        rows(n_rows) {
    pool_k = filled(random, pool_capacity, entries);
    pool_v = filled(random, pool_capacity, entries);
    chunk_k = filled(random, chunk_capacity, rows);
    chunk_v = filled(random, chunk_capacity, rows);
  }
  std::vector<uint16_t> filled(Random& random, uint32_t capacity, uint32_t n) const {
    std::vector<uint16_t> all;
    for (uint32_t head = 0; head < heads; ++head) {
      const auto own = padded_rows(halves(random.floats(size_t(n) * dh)), size_t(capacity) * dh);
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
  std::vector<double> entry(const std::vector<uint16_t>& pool, const std::vector<uint16_t>& chunk,
                            uint32_t head, uint32_t e) const {
    return e < entries ? doubles(pool, (head * pool_capacity + e) * size_t(dh), dh)
                       : doubles(chunk, (head * chunk_capacity + e - entries) * size_t(dh), dh);
  }
  std::vector<double> k(uint32_t head, uint32_t e) const { return entry(pool_k, chunk_k, head, e); }
  std::vector<double> v(uint32_t head, uint32_t e) const { return entry(pool_v, chunk_v, head, e); }
  Listed listed(uint32_t head, const std::vector<uint32_t>& list, const Rotation& rotation) const {
    return Listed(
        list, rotation, [&](uint32_t e) { return k(head, e); }, [&](uint32_t e) { return v(head, e); });
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
  const uint32_t element = view_element_bytes();
  for (const uint32_t mode : {kRopeList, kRopeOriginal})
    for (const uint32_t pairing : {kRopeAdjacent, kRopeHalves})
      for (const bool listed : {false, true})
        for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u}) {
          const Rotation rotation{mode, pairing, dh - 16, 1.19};
          Random random{dh};
          clear();
          const Store store(random, 2, dh, 150, 33);
          const uint32_t n = 183, capacity = 70, list_capacity = n + 1;
          std::vector<std::vector<uint32_t>> want_lists(2, std::vector<uint32_t>(n));
          for (auto& l : want_lists) std::iota(l.begin(), l.end(), 0u);
          if (listed) want_lists = {some_entries(random, n, 101, 33), some_entries(random, n, 77, 33)};
          const View pool_k = input(store.pool_k), pool_v = input(store.pool_v),
                     chunk_k = input(store.chunk_k), chunk_v = input(store.chunk_v),
                     table = input(rotation.table(n)),
                     list = listed ? input(lists(want_lists, list_capacity)) : View{};
          for (uint32_t first = 0; first < n; first += capacity) {
            const View k = output<std::byte>(2 * capacity * dh * element),
                       v = output<std::byte>(2 * capacity * dh * element);
            run({.n_rows = 33, .n_entries = 150}, 33, [&](Recorder& r) {
              r.kv_view({pool_k,
                         pool_v,
                         chunk_k,
                         chunk_v,
                         list,
                         table,
                         k,
                         v,
                         {.heads = 2,
                          .head_dim = dh,
                          .pool_capacity = store.pool_capacity,
                          .chunk_capacity = store.chunk_capacity,
                          .first_entry = first,
                          .view_capacity = capacity,
                          .list_capacity = list_capacity,
                          .rope = rotation.params()}});
            });
            const auto got_k = floats_of(get<std::byte>(k), element),
                       got_v = floats_of(get<std::byte>(v), element);
            for (uint32_t head = 0; head < 2; ++head)
              for (uint32_t i = first; i < std::min<size_t>(first + capacity, want_lists[head].size()); ++i) {
                const uint32_t e = want_lists[head][i];
                const size_t at = (head * capacity + i - first) * size_t(dh);
                std::vector<double> want = store.k(head, e);
                if (mode == kRopeList) want = rotation.rotated(want, i);
                const std::vector<double> want_v = store.v(head, e);
                for (uint32_t c = 0; c < dh; ++c) {
                  // Two products of numbers below 1.2 with cosines off by 3 roundings; f16 rounds once more
                  // below 2.
                  ASSERT_NEAR(got_k[at + c], want[c], 8 * 0x1p-23 + (element == 2 ? 0x1p-11 : 0))
                      << "index " << i;
                  ASSERT_EQ(got_v[at + c], want_v[c]);
                }
              }
          }
        }
}

struct AttentionCase {
  uint32_t kv_heads, group, dh, entries, rows;
  Rotation rotation;
  uint32_t listed = 0;    // length of the lists; 0: everything. The second head's is 5 shorter.
  uint32_t capacity = 0;  // of the view; 0: all in one pass
  uint32_t max_rows = 0;  // of the program; 0: two more than rows
};

// Runs kv_view and attention for a case and compares with plain loops.
class KvAttention : public KvOps {
 protected:
  static constexpr int32_t kPosition = 300;
  static constexpr double kQueryMax = 4;

  void check(const AttentionCase& c) {
    clear();
    SCOPED_TRACE(::testing::Message()
                 << "kv_heads " << c.kv_heads << " group " << c.group << " dh " << c.dh << " entries "
                 << c.entries << " rows " << c.rows << " mode " << c.rotation.mode << " pairing "
                 << c.rotation.pairing << " n_rot " << c.rotation.n_rot << " listed " << c.listed
                 << " capacity " << c.capacity << " max_rows " << c.max_rows);
    Random random{c.entries + c.dh};
    const Store store(random, c.kv_heads, c.dh, c.entries, c.rows);
    const uint32_t n = c.entries + c.rows, heads = c.kv_heads * c.group, row_stride = heads * c.dh + 5,
                   y_stride = heads * c.dh + 3, list_capacity = n + 1,
                   max_rows = c.max_rows ? c.max_rows : c.rows + 2, element = view_element_bytes();
    const auto q = random.floats(c.rows * row_stride, -kQueryMax, kQueryMax);
    std::vector<std::vector<uint32_t>> want_lists(c.kv_heads, std::vector<uint32_t>(n));
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      std::iota(want_lists[head].begin(), want_lists[head].end(), 0u);
      if (c.listed) want_lists[head] = some_entries(random, n, c.listed - 5 * (head % 2), c.rows);
    }
    const uint32_t capacity = c.capacity ? c.capacity : n;
    size_for(c.kv_heads, c.group, c.dh,
             {.chunk = max_rows, .pool_capacity = store.pool_capacity, .view_capacity = capacity});
    const View pool_k = input(store.pool_k), pool_v = input(store.pool_v), chunk_k = input(store.chunk_k),
               chunk_v = input(store.chunk_v), table = input(c.rotation.table(kPosition + n)),
               list = c.listed ? input(lists(want_lists, list_capacity)) : View{},
               view_k = output<std::byte>(c.kv_heads * capacity * c.dh * element),
               view_v = output<std::byte>(c.kv_heads * capacity * c.dh * element),
               x = input(padded_rows(q, max_rows * row_stride)), y = output<float>(max_rows * y_stride),
               ml = output<float>(max_rows * heads * 2);
    run({.n_rows = c.rows, .n_entries = c.entries, .position = kPosition}, max_rows, [&](Recorder& r) {
      ViewAttention{.q = x,
                    .pool_k = pool_k,
                    .pool_v = pool_v,
                    .chunk_k = chunk_k,
                    .chunk_v = chunk_v,
                    .list = list,
                    .table = table,
                    .view_k = view_k,
                    .view_v = view_v,
                    .y = y,
                    .ml = ml,
                    .pool_capacity = store.pool_capacity,
                    .chunk_capacity = store.chunk_capacity,
                    .entries = n,
                    .p = {.heads = c.kv_heads,
                          .group = c.group,
                          .head_dim = c.dh,
                          .row_stride = row_stride,
                          .y_stride = y_stride,
                          .source = kFromView,
                          .capacity = capacity,
                          .list_capacity = list_capacity,
                          .scale = static_cast<float>(1 / std::sqrt(c.dh)),
                          .rope = c.rotation.params()}}
          .record(r);
    });
    const auto got = get<float>(y);
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      const auto& l = want_lists[head];
      const Listed listed = store.listed(head, l, c.rotation);
      for (uint32_t row = 0; row < c.rows; ++row) {
        const size_t seen = l.size() - c.rows + row + 1;
        const double position =
            c.rotation.mode == kRopeList ? static_cast<double>(seen - 1) : kPosition + row;
        for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h) {
          const Attended want = attend(
              c.rotation.rotated(doubles(q, row * row_stride + h * c.dh, c.dh), position),
              listed.keys(seen, c.dh), listed.values(seen, c.dh), 1 / std::sqrt(c.dh), attends_in_f16());
          const double tolerance = attention_tolerance(c.dh, kQueryMax, n, c.rotation.factor);
          for (uint32_t e = 0; e < c.dh; ++e)
            ASSERT_NEAR(got[row * y_stride + h * c.dh + e], want.y[e],
                        tolerance + (attends_in_f16() ? want.f16_tolerance[e] : 0))
                << "row " << row << " head " << h << " element " << e;
        }
      }
    }
  }

  // Attention of a query of zeros is the mean of the values it sees. With multiples of 2^-6 as values every
  // sum is exact, so what is missing, doubled or not yet to be seen shows at any size. Rounding: a division,
  // and the results of at most 256 parts that a device may work on side by side.
  static constexpr double kMeanTolerance = (256 + 8) * 0x1p-24;

  // The value of an entry's channel.
  static float level(uint32_t head, uint32_t entry, uint32_t channel) {
    const uint32_t mixed = (entry * 2654435761u) ^ (channel * 40503u) ^ (head * 977u);
    return static_cast<float>(static_cast<int32_t>(mixed >> 8 & 127) - 63) / 64;
  }
  void check_mean(const AttentionCase& c, uint32_t source) {
    clear();
    SCOPED_TRACE(::testing::Message()
                 << (source == kFromPool ? "pool" : "view") << " kv_heads " << c.kv_heads << " group "
                 << c.group << " dh " << c.dh << " entries " << c.entries << " rows " << c.rows << " listed "
                 << c.listed << " capacity " << c.capacity << " max_rows " << c.max_rows);
    const bool pooled = source == kFromPool;  // the row is in the pool already
    const uint32_t n = c.entries + c.rows, in_pool = pooled ? n : c.entries, heads = c.kv_heads * c.group,
                   width = heads * c.dh, element = view_element_bytes(),
                   capacity = c.capacity ? c.capacity : n, list_capacity = n + 1,
                   max_rows = c.max_rows ? c.max_rows : c.rows;
    Random random{n};
    Store store(random, c.kv_heads, c.dh, in_pool, pooled ? 0 : c.rows);
    for (uint32_t head = 0; head < c.kv_heads; ++head)
      for (uint32_t e = 0; e < n; ++e)
        for (uint32_t channel = 0; channel < c.dh; ++channel) {
          const uint16_t value = f32_to_f16(level(head, e, channel));
          if (e < in_pool)
            store.pool_v[(size_t(head) * store.pool_capacity + e) * c.dh + channel] = value;
          else
            store.chunk_v[(size_t(head) * store.chunk_capacity + e - in_pool) * c.dh + channel] = value;
        }
    std::vector<std::vector<uint32_t>> want_lists(c.kv_heads, std::vector<uint32_t>(n));
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      std::iota(want_lists[head].begin(), want_lists[head].end(), 0u);
      if (c.listed) want_lists[head] = some_entries(random, n, c.listed - 5 * (head % 2), c.rows);
    }
    size_for(c.kv_heads, c.group, c.dh,
             {.chunk = max_rows, .pool_capacity = store.pool_capacity, .view_capacity = capacity});
    const View pool_k = input(store.pool_k), pool_v = input(store.pool_v), chunk_k = input(store.chunk_k),
               chunk_v = input(store.chunk_v), table = input(c.rotation.table(kPosition + n)),
               list = c.listed ? input(lists(want_lists, list_capacity)) : View{},
               view_k = output<std::byte>(size_t(c.kv_heads) * capacity * c.dh * element),
               view_v = output<std::byte>(size_t(c.kv_heads) * capacity * c.dh * element),
               x = input(padded_rows(std::vector<float>(size_t(c.rows) * width), size_t(max_rows) * width)),
               y = output<float>(size_t(max_rows) * width), ml = output<float>(size_t(max_rows) * heads * 2);
    const AttentionParams p{.heads = c.kv_heads,
                            .group = c.group,
                            .head_dim = c.dh,
                            .row_stride = width,
                            .y_stride = width,
                            .source = source,
                            .capacity = pooled ? store.pool_capacity : capacity,
                            .list_capacity = list_capacity,
                            .scale = static_cast<float>(1 / std::sqrt(c.dh)),
                            .rope = c.rotation.params()};
    const StepParams step{.n_rows = c.rows, .n_entries = c.entries, .position = kPosition};
    run(step, max_rows, [&](Recorder& r) {
      if (pooled)
        r.attention({x, pool_k, pool_v, list, table, y, {}, p});
      else
        ViewAttention{.q = x,
                      .pool_k = pool_k,
                      .pool_v = pool_v,
                      .chunk_k = chunk_k,
                      .chunk_v = chunk_v,
                      .list = list,
                      .table = table,
                      .view_k = view_k,
                      .view_v = view_v,
                      .y = y,
                      .ml = ml,
                      .pool_capacity = store.pool_capacity,
                      .chunk_capacity = store.chunk_capacity,
                      .entries = n,
                      .p = p}
            .record(r);
    });
    const auto got = get<float>(y);
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      std::vector<double> sums(c.dh);
      const auto& l = want_lists[head];
      for (uint32_t i = 0; i < l.size(); ++i) {
        for (uint32_t e = 0; e < c.dh; ++e) sums[e] += double{level(head, l[i], e)};
        const size_t unseen = l.size() - 1 - i;
        if (unseen >= c.rows) continue;
        const float* row = &got[(c.rows - 1 - unseen) * width];
        for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h)
          for (uint32_t e = 0; e < c.dh; ++e)
            ASSERT_NEAR(row[h * c.dh + e], sums[e] / (i + 1), kMeanTolerance)
                << "row " << c.rows - 1 - unseen << " head " << h << " element " << e;
      }
    }
  }
};
THIMBLE_OP_TESTS(KvAttention);

TEST_P(KvAttention, OfTheViewIsSoftmaxOfScoresTimesValues) {
  for (const uint32_t rows : {1u, 31u, 33u}) check({2, 4, 64, 100, rows, {}});
  check({1, 1, 64, 0, 1, {}});
  check({2, 4, 64, 0, 70, {}});
  check({1, 4, 64, 0, 1000, {}});
  check({2, 1, 80, 77, 33, {kRopeList, kRopeHalves, 80}});
  check({2, 7, 96, 64, 31, {kRopeList, kRopeAdjacent, 96}});
  check({2, 7, 128, 1000, 33, {kRopeList, kRopeHalves, 128, 1.19}});
  check({1, 3, 40, 63, 65, {kRopeList, kRopeHalves, 40}});
}

TEST_P(KvAttention, OfTheViewTakesEveryHeadSizeAndGroup) {
  const uint32_t rows[] = {1, 31, 33}, entries[] = {0, 1, 31, 33, 257, 1000};
  uint32_t variant = 0;
  for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u})
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

TEST_P(KvAttention, OfAZeroQueryIsTheMeanOfWhatItSees) {
  for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u}) {
    check_mean({.kv_heads = 2, .group = 4, .dh = dh, .entries = 1000, .rows = 150, .max_rows = 200},
               kFromView);
    check_mean({.kv_heads = 2, .group = 4, .dh = dh, .entries = 2999, .rows = 1}, kFromPool);
    if (HasFatalFailure()) return;
  }
  check_mean({.kv_heads = 1, .group = 7, .dh = 128, .entries = 20000, .rows = 1000, .capacity = 8192},
             kFromView);
  check_mean({.kv_heads = 2, .group = 1, .dh = 96, .entries = 20000, .rows = 70, .listed = 2700}, kFromView);
  check_mean(
      {.kv_heads = 2, .group = 1, .dh = 64, .entries = 20000, .rows = 33, .listed = 9000, .capacity = 4096},
      kFromView);
  check_mean({.kv_heads = 2, .group = 7, .dh = 128, .entries = 19999, .rows = 1}, kFromPool);
  check_mean({.kv_heads = 1, .group = 8, .dh = 64, .entries = 69999, .rows = 1}, kFromPool);
  check_mean({.kv_heads = 4, .group = 4, .dh = 64, .entries = 19999, .rows = 1, .listed = 2688}, kFromPool);
}

// One row against a pool that it is already part of.
TEST_P(KvAttention, OfThePoolGathersAndRotatesByItself) {
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
                             {1, 4, 128, 20000, 2688, {kRopeList, kRopeHalves, 128}}};
  const uint32_t lengths[] = {1, 31, 33, 1000};
  for (const uint32_t dh : {64u, 80u, 96u, 128u, 256u})
    for (const uint32_t group : {1u, 4u, 7u, 8u}) {
      const uint32_t variant = static_cast<uint32_t>(cases.size());
      const uint32_t n = lengths[variant % 4], pairing = variant % 2 ? kRopeHalves : kRopeAdjacent;
      cases.push_back({2, group, dh, n, n > 31 && variant % 3 ? n / 2 : 0, {kRopeList, pairing, dh}});
      cases.push_back({2, group, dh, 130 + group, 0, {kRopeOriginal, pairing, dh}});
    }
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << "kv_heads " << c.kv_heads << " group " << c.group << " dh " << c.dh
                                      << " n " << c.n << " listed " << c.listed);
    clear();
    Random random{c.n};
    const Store store(random, c.kv_heads, c.dh, c.n, 0);
    size_for(c.kv_heads, c.group, c.dh,
             {.chunk = 1, .pool_capacity = store.pool_capacity, .view_capacity = store.pool_capacity});
    const uint32_t heads = c.kv_heads * c.group, list_capacity = c.n + 1;
    std::vector<std::vector<uint32_t>> want_lists(c.kv_heads, std::vector<uint32_t>(c.n));
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      std::iota(want_lists[head].begin(), want_lists[head].end(), 0u);
      if (c.listed) want_lists[head] = some_entries(random, c.n, c.listed - 5 * (head % 2), 1);
    }
    const auto q = random.floats(heads * c.dh, -kQueryMax, kQueryMax);
    const View x = input(q), k = input(store.pool_k), v = input(store.pool_v),
               table = input(c.rotation.table(kPosition + c.n)), y = output<float>(heads * c.dh),
               list = c.listed ? input(lists(want_lists, list_capacity)) : View{};
    run({.n_rows = 1, .n_entries = c.n - 1, .position = kPosition}, 1, [&](Recorder& r) {
      r.attention({x,
                   k,
                   v,
                   list,
                   table,
                   y,
                   {},
                   {.heads = c.kv_heads,
                    .group = c.group,
                    .head_dim = c.dh,
                    .row_stride = heads * c.dh,
                    .y_stride = heads * c.dh,
                    .source = kFromPool,
                    .capacity = store.pool_capacity,
                    .list_capacity = list_capacity,
                    .scale = static_cast<float>(1 / std::sqrt(c.dh)),
                    .rope = c.rotation.params()}});
    });
    const auto got = get<float>(y);
    for (uint32_t head = 0; head < c.kv_heads; ++head) {
      const auto& l = want_lists[head];
      const Listed listed = store.listed(head, l, c.rotation);
      const double position = c.rotation.mode == kRopeList ? static_cast<double>(l.size() - 1) : kPosition;
      for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h) {
        const Attended want = attend(c.rotation.rotated(doubles(q, h * c.dh, c.dh), position), listed.k,
                                     listed.v, 1 / std::sqrt(c.dh), false);
        for (uint32_t e = 0; e < c.dh; ++e)
          ASSERT_NEAR(got[h * c.dh + e], want.y[e],
                      attention_tolerance(c.dh, kQueryMax, c.n, c.rotation.factor))
              << "head " << h << " element " << e;
      }
    }
  }
}

// Algorithms 8.3 and 8.42: a survivor's bits do not change, wherever it lies.
TEST_P(KvOps, CompactedPoolReadsAsTheListDid) {
  for (const bool with_cis : {true, false}) {
    const Rotation rotation;
    Random random{3};
    const uint32_t heads = 2, dh = 64, entries = 200, rows = 40, n = entries + rows, keep = 130,
                   list_capacity = n + 1;
    const Store store(random, heads, dh, entries, rows);
    std::vector<int32_t> pos, chunk_pos;
    std::vector<float> cis, chunk_cis;
    for (uint32_t head = 0; head < heads; ++head) {
      for (uint32_t e = 0; e < store.pool_capacity; ++e) pos.push_back(static_cast<int32_t>(3 * e + head));
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
    KvViewParams view{.heads = heads,
                      .head_dim = dh,
                      .pool_capacity = store.pool_capacity,
                      .chunk_capacity = store.chunk_capacity,
                      .view_capacity = keep,
                      .list_capacity = list_capacity,
                      .rope = rotation.params()};
    run({.n_rows = rows, .n_entries = entries}, rows, [&](Recorder& r) {
      r.kv_view({k, v, chunk_k, chunk_v, list, table, before_k, before_v, view});
      r.kv_compact({list,
                    chunk_k,
                    chunk_v,
                    chunk_p,
                    chunk_s,
                    k,
                    v,
                    p,
                    s,
                    {.heads = heads,
                     .head_dim = dh,
                     .pool_capacity = store.pool_capacity,
                     .chunk_capacity = store.chunk_capacity,
                     .list_capacity = list_capacity}});
    });
    run({.n_rows = 0, .n_entries = keep}, rows, [&](Recorder& r) {
      r.kv_view({k, v, {}, {}, {}, table, after_k, after_v, view});
    });
    EXPECT_EQ(get<std::byte>(before_k), get<std::byte>(after_k));
    EXPECT_EQ(get<std::byte>(before_v), get<std::byte>(after_v));
    const auto got_pos = get<int32_t>(p);
    for (uint32_t head = 0; head < heads; ++head)
      for (uint32_t i = 0; i < keep; ++i) {
        const uint32_t e = survivors[head][i], at = head * store.pool_capacity;
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
  const Store store(random, 2, 64, 5, 3);
  const std::vector<int32_t> pos(2 * store.pool_capacity, 1),
      chunk_pos = {10, 11, 12, 0, 0, 20, 21, 22, 0, 0};
  const View k = inout(store.pool_k), v = inout(store.pool_v), p = inout(pos), chunk_k = input(store.chunk_k),
             chunk_v = input(store.chunk_v), chunk_p = input(chunk_pos);
  run({.n_rows = 3, .n_entries = 5}, 4, [&](Recorder& r) {
    r.kv_compact({{},
                  chunk_k,
                  chunk_v,
                  chunk_p,
                  {},
                  k,
                  v,
                  p,
                  {},
                  {.heads = 2,
                   .head_dim = 64,
                   .pool_capacity = store.pool_capacity,
                   .chunk_capacity = store.chunk_capacity}});
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
