// Keys and values in blocks, in formats that may differ: what devices store, show, attend to and move. Rows
// are stored as the CPU's plainest kernels store them, and decoded by tests/ops/kv_blocks.h.
#include "backends/cpu/kv_kernels.h"
#include "tests/ops/kv_blocks.h"

namespace thimble::test {
namespace {

struct Formats {
  DType k, v;
};
constexpr Formats kPairs[] = {{DType::kQ8_0, DType::kQ8_0}, {DType::kQ4_0, DType::kQ4_0},
                              {DType::kQ8_0, DType::kQ4_0}, {DType::kF16, DType::kQ4_0},
                              {DType::kF16, DType::kQ8_0},  {DType::kQ8_0, DType::kF16},
                              {DType::kQ4_0, DType::kQ8_0}};

// Rows of a format, and the numbers that they stand for.
struct StoredRows {
  DType type;
  uint32_t dh;
  std::vector<std::byte> bytes;

  StoredRows(DType t, uint32_t head_dim, const std::vector<float>& numbers) : type(t), dh(head_dim) {
    const cpu::KvKernels& kernels = cpu::kv_kernel_set(0);
    const auto* format = std::find_if(kernels.formats, kernels.formats + kernels.n_formats,
                                      [&](const cpu::KvFormat& f) { return f.type == type; });
    bytes.resize(numbers.size() / dh * kv_bytes(type, dh));
    for (size_t row = 0; row < numbers.size() / dh; ++row)
      format->store_row(&numbers[row * dh], &bytes[row * kv_bytes(type, dh)], dh);
  }
  std::vector<double> operator[](size_t row) const {
    const std::byte* at = &bytes[row * kv_bytes(type, dh)];
    if (type != DType::kF16) return stored_row(type, at, dh);
    std::vector<uint16_t> halves_of_row(dh);
    std::memcpy(halves_of_row.data(), at, dh * sizeof(uint16_t));
    return doubles(halves_of_row, 0, dh);
  }
};

class KvPairs : public OpTest {
 protected:
  static constexpr int32_t kPosition = 900;

  bool supports(const Formats& f, uint32_t dh) {
    const View any = input(std::vector<float>(1));
    return kv_fits(f.k, dh) && kv_fits(f.v, dh) &&
           device().supports(KvMerge{.k = {any, f.k}, .v = {any, f.v}, .p = {.head_dim = dh}});
  }
  // Numbers of which some channels are much larger than the others.
  static std::vector<float> uneven(Random& random, size_t count, uint32_t dh) {
    std::vector<float> x = random.floats(count, -1, 1);
    for (size_t i = 0; i < count; i += dh) x[i + 5] *= 8;
    return x;
  }
};
THIMBLE_OP_TESTS(KvPairs);

TEST_P(KvPairs, AreStoredAsTheCpuStoresThem) {
  for (const Formats& f : kPairs)
    for (const uint32_t dh : fewer({32, 64, 96, 128, 256, 512}, {32, 96})) {
      if (!supports(f, dh)) continue;
      SCOPED_TRACE(::testing::Message()
                   << dtype_info(f.k).name << ", " << dtype_info(f.v).name << ", " << dh);
      clear();
      constexpr uint32_t kHeads = 3, kRows = 5, kCapacity = 8, kHeld = 2;
      const uint32_t stride = 2 * kHeads * dh;
      Random random{dh};
      std::vector<float> qkv = uneven(random, kRows * stride, dh);
      qkv[7] = 1e9f;                                      // saturates
      for (uint32_t c = 0; c < 32; ++c) qkv[dh + c] = 0;  // a block without any number
      const View k = output<std::byte>(kHeads * kCapacity * kv_bytes(f.k, dh)),
                 v = output<std::byte>(kHeads * kCapacity * kv_bytes(f.v, dh)),
                 pos = output<int32_t>(kHeads * kCapacity), saturated = inout(std::vector<uint32_t>(1)),
                 x = input(qkv);
      for (const uint32_t into : {kIntoChunk, kIntoPool})
        for (const uint32_t rows : {1u, kRows}) {
          run({.n_rows = rows, .position = kPosition}, equal_heads(kHeads, kCapacity, kHeld), rows,
              [&](Recorder& r) {
                r.record(KvAppend{x,
                                  {},
                                  {k, f.k},
                                  {v, f.v},
                                  pos,
                                  saturated,
                                  {.heads = kHeads,
                                   .head_dim = dh,
                                   .row_stride = stride,
                                   .k_column = 0,
                                   .v_column = kHeads * dh,
                                   .chunk_capacity = kCapacity,
                                   .into = into}});
              });
          const uint32_t first = into == kIntoPool ? kHeld : 0;
          for (const auto& [view, type, column] : {std::tuple(k, f.k, 0u), std::tuple(v, f.v, kHeads * dh)}) {
            const auto got = get<std::byte>(view);
            for (uint32_t head = 0; head < kHeads; ++head)
              for (uint32_t row = 0; row < rows; ++row) {
                const auto from = qkv.begin() + row * stride + column + head * dh;
                const StoredRows want(type, dh, std::vector<float>(from, from + dh));
                const std::byte* at = &got[(head * kCapacity + first + row) * kv_bytes(type, dh)];
                ASSERT_EQ(std::vector<std::byte>(at, at + want.bytes.size()), want.bytes)
                    << "head " << head << ", row " << row << " of " << rows << ", column " << column;
              }
          }
        }
      EXPECT_EQ(get<uint32_t>(saturated)[0], 4u);  // once in each program
    }
}

// Under kRopeOriginal keys are rotated before they are stored. All angles are right ones, so that rotated
// keys are the same bits on all devices.
TEST_P(KvPairs, AreStoredRotated) {
  for (const Formats& f : {Formats{DType::kQ8_0, DType::kQ4_0}, Formats{DType::kQ4_0, DType::kF16}})
    for (const uint32_t pairing : {kRopeHalves, kRopeAdjacent}) {
      constexpr uint32_t kDim = 96, kRotating = 64, kRows = 3;
      if (!supports(f, kDim)) continue;
      SCOPED_TRACE(::testing::Message()
                   << dtype_info(f.k).name << ", " << dtype_info(f.v).name << ", pairing " << pairing);
      clear();
      Random random{pairing};
      const std::vector<float> qkv = uneven(random, kRows * 2 * kDim, kDim);
      const RopeParams rope{.mode = kRopeOriginal, .pairing = pairing, .n_rot = kRotating};
      // {cos, sin} of all pairs: a right angle in the 64 rows of the lower half, none in those of the upper.
      std::vector<float> table(2 * 80 * kRotating / 2);
      for (size_t i = 0; i < table.size(); ++i) table[i] = (i % 2 == 1) == (i < 64 * kRotating);
      const View k = output<std::byte>(kRows * kv_bytes(f.k, kDim)),
                 v = output<std::byte>(kRows * kv_bytes(f.v, kDim));
      run({.n_rows = kRows, .position = kPosition}, kRows, [&](Recorder& r) {
        r.record(KvAppend{input(qkv),
                          input(table),
                          {k, f.k},
                          {v, f.v},
                          output<int32_t>(kRows),
                          inout(std::vector<uint32_t>(1)),
                          {.heads = 1,
                           .head_dim = kDim,
                           .row_stride = 2 * kDim,
                           .v_column = kDim,
                           .chunk_capacity = kRows,
                           .rope = rope}});
      });
      const uint32_t apart = pairing == kRopeAdjacent ? 1 : kRotating / 2;
      for (uint32_t row = 0; row < kRows; ++row) {
        const float* from = &qkv[row * 2 * kDim];
        std::vector<float> turned(from, from + kDim), value(from + kDim, from + 2 * kDim);
        for (uint32_t c = 0; c < kRotating; ++c)
          turned[c] = c / apart % 2 ? from[c - apart] : -from[c + apart];
        for (const auto& [view, type, x] : {std::tuple(k, f.k, &turned), std::tuple(v, f.v, &value)}) {
          const StoredRows want(type, kDim, *x);
          const auto got = get<std::byte>(view);
          const std::byte* at = &got[row * kv_bytes(type, kDim)];
          EXPECT_EQ(std::vector<std::byte>(at, at + want.bytes.size()), want.bytes) << "row " << row;
        }
      }
    }
}

TEST_P(KvPairs, AreShownDecoded) {
  for (const Formats& f : kPairs)
    for (const auto& rotation :
         {Rotation{kRopeList, kRopeHalves, 64}, Rotation{kRopeList, kRopeAdjacent, 64},
          Rotation{kRopeOriginal, kRopeHalves, 64}, Rotation{kRopeList, kRopeHalves, 20}})
      for (const uint32_t dh : fewer({64, 96, 128}, {64, 96}, {96})) {
        if (!supports(f, dh)) continue;
        SCOPED_TRACE(::testing::Message()
                     << dtype_info(f.k).name << ", " << dtype_info(f.v).name << ", " << dh);
        clear();
        constexpr uint32_t kHeads = 2, kCapacity = 70, kHeld = 60, kRows = 4;
        Random random{dh};
        const auto rows = [&](DType type, uint32_t n) {
          return StoredRows(type, dh, uneven(random, kHeads * n * dh, dh));
        };
        const StoredRows k = rows(f.k, kCapacity), v = rows(f.v, kCapacity), chunk_k = rows(f.k, kRows),
                         chunk_v = rows(f.v, kRows);
        const uint32_t view_capacity = 40, list_capacity = 60;
        const std::vector<uint32_t> list = some_entries(random, kHeld + kRows, 35, kRows);
        const uint64_t view = kHeads * view_capacity * dh * view_element_bytes();
        size_for(kHeads, 1, dh, session_of(equal_heads(kHeads, kCapacity, kHeld), kRows, view_capacity));
        const View view_k = output<std::byte>(view), view_v = output<std::byte>(view);
        const KvView op{{input(k.bytes), f.k},
                        {input(v.bytes), f.v},
                        {input(chunk_k.bytes), f.k},
                        {input(chunk_v.bytes), f.v},
                        input(lists({list, list}, list_capacity)),
                        input(rotation.table(200)),
                        view_k,
                        view_v,
                        {.heads = kHeads,
                         .head_dim = dh,
                         .chunk_capacity = kRows,
                         .view_capacity = view_capacity,
                         .list_capacity = list_capacity,
                         .rope = rotation.params()}};
        run({.n_rows = kRows, .position = kPosition}, equal_heads(kHeads, kCapacity, kHeld), kRows,
            [&](Recorder& r) { r.record(op); });
        const auto shown = [&](const View& of) {
          if (view_element_bytes() == 4) return get<float>(of);
          std::vector<float> wide;
          for (const uint16_t half : get<uint16_t>(of)) wide.push_back(f16_to_f32(half));
          return wide;
        };
        const std::vector<float> got_k = shown(view_k), got_v = shown(view_v);
        for (uint32_t head = 0; head < kHeads; ++head)
          for (uint32_t i = 0; i < list.size(); ++i) {
            const bool held = list[i] < kHeld;
            const size_t at = held ? head * kCapacity + list[i] : head * kRows + list[i] - kHeld;
            std::vector<double> key = (held ? k : chunk_k)[at];
            if (rotation.mode == kRopeList) key = rotation.rotated(key, i);
            const std::vector<double> value = (held ? v : chunk_v)[at];
            for (uint32_t c = 0; c < dh; ++c) {
              // f16 rounds by 2^-11; a channel that rotates was rounded to f16 before, by as much of its
              // pair, and to f32 several times.
              const size_t to = (head * view_capacity + i) * dh + c;
              ASSERT_NEAR(got_k[to], key[c], 3 * 0x1p-11 * 9 + 0x1p-20) << i << ", " << c;
              ASSERT_NEAR(got_v[to], value[c], 0x1p-11 * std::fabs(value[c]) + 0x1p-20) << i << ", " << c;
            }
          }
      }
}

struct PoolCase {
  uint32_t dh, group, entries, listed = 0, window = 0;
  Rotation rotation;
  float cap = 0;
  bool sinks = false;
  uint32_t short_head = 0;  // entries of head 1, if it has fewer
};

TEST_P(KvPairs, AreAttendedToInThePool) {
  std::vector<PoolCase> cases;
  for (const uint32_t dh : fewer({32, 64, 96, 128, 256, 512}, {32, 96, 128, 256}, {96}))
    for (const uint32_t group : fewer({1, 4, 7, 16}, {4}))
      for (const uint32_t pairing : {kRopeHalves, kRopeAdjacent}) {
        const uint32_t turn = static_cast<uint32_t>(cases.size());
        cases.push_back({dh,
                         is_slow() ? turn % 8 + 1 : group,
                         fewer({700, 130, 65}, {130})[turn % fewer({0, 1, 2}, {0}).size()],
                         turn % 4 == 1 ? 50u : 0u,
                         turn % 4 == 3 ? 40u : 0u,
                         {turn % 5 == 4 ? kRopeOriginal : kRopeList, pairing, dh, 1.19}});
      }
  const std::vector<PoolCase> others = {
      {128, 4, 1, 0, 0, {kRopeList, kRopeHalves, 128}},
      {128, 4, 300, 0, 0, {kRopeList, kRopeHalves, 64}},  // some channels do not rotate
      {128, 2, 300, 100, 0, {kRopeList, kRopeAdjacent, 32}},
      {64, 3, 300, 0, 0, {kRopeList, kRopeHalves, 20}},  // pairs one by one
      {64, 3, 300, 0, 0, {kRopeList, kRopeHalves, 0}},   // nothing rotates
      {128, 5, 300, 0, 0, {kRopeList, kRopeHalves, 128}, 5.0f, true},
      // More tiles than a GPU has workgroups for, in both heads and in one.
      {32, 1, 7000, 0, 0, {kRopeList, kRopeHalves, 32}},
      {64, 2, 7000, 0, 0, {kRopeList, kRopeHalves, 32}, 0, false, 70}};
  if (!is_variation()) cases.insert(cases.end(), others.begin(), others.end());
  if (!is_slow() && GetParam() != "cpu") {
    cases.push_back({128, 4, 20000, 0, 0, {kRopeList, kRopeHalves, 128}});
    cases.push_back({64, 8, 20000, 2688, 0, {kRopeList, kRopeHalves, 64}});
    // So long that blocks on a card use the stages of their rings several times. Head 1 begins at an odd row.
    cases.push_back({128, 3, 100000, 0, 0, {kRopeList, kRopeAdjacent, 128, 1.19}});
    cases.push_back({128, 4, 20000, 0, 10001, {kRopeList, kRopeHalves, 128}});
  }
  // A software driver compiles a pipeline for each pair and case. There, each case gets one pair.
  const bool takes_turns = is_slow();
  for (size_t pair = 0; pair < std::size(kPairs); ++pair)
    for (size_t turn = 0; turn < cases.size(); ++turn) {
      const Formats& f = kPairs[pair];
      const PoolCase& c = cases[turn];
      if (!supports(f, c.dh) || (takes_turns && turn % std::size(kPairs) != pair)) continue;
      SCOPED_TRACE(::testing::Message()
                   << dtype_info(f.k).name << ", " << dtype_info(f.v).name << ", " << c.dh
                   << " channels, group " << c.group << ", entries " << c.entries << ", listed " << c.listed
                   << ", window " << c.window << ", rotates " << c.rotation.n_rot << ", mode "
                   << c.rotation.mode << ", pairing " << c.rotation.pairing);
      clear();
      constexpr uint32_t kHeads = 2;
      constexpr float kQueryMax = 3;
      Random random{c.dh + c.group};
      const uint32_t capacity = c.entries + 3, queries = kHeads * c.group;
      std::vector<HeadState> heads = equal_heads(kHeads, capacity, c.entries - 1);
      if (c.short_head) heads[1].n_entries = c.short_head - 1;
      const StoredRows k(f.k, c.dh, uneven(random, size_t{kHeads} * capacity * c.dh, c.dh)),
          v(f.v, c.dh, uneven(random, size_t{kHeads} * capacity * c.dh, c.dh));
      const std::vector<float> q = random.floats(size_t{queries} * c.dh, -kQueryMax, kQueryMax);
      std::vector<float> sinks;
      for (uint32_t h = 0; c.sinks && h < queries; ++h) sinks.push_back(3.0f * (h % 5) - 6.0f);
      const std::vector<uint32_t> longer =
          c.listed ? some_entries(random, c.entries, c.listed, 1) : every_entry(c.entries);
      const uint32_t list_capacity = c.listed ? c.listed + 2 : 0;
      size_for(kHeads, c.group, c.dh, session_of(heads, 1, capacity));
      const View y = output<float>(size_t{queries} * c.dh);
      const float scale = 0.3f / std::sqrt(static_cast<float>(c.dh));
      const Attention op{.q = input(q),
                         .k = {input(k.bytes), f.k},
                         .v = {input(v.bytes), f.v},
                         .list = c.listed ? input(lists({longer, longer}, list_capacity)) : View{},
                         .rope = input(c.rotation.table(kPosition + c.entries)),
                         .sinks = c.sinks ? input(sinks) : View{},
                         .y = y,
                         .ml = {},
                         .p = {.heads = kHeads,
                               .group = c.group,
                               .head_dim = c.dh,
                               .row_stride = queries * c.dh,
                               .y_stride = queries * c.dh,
                               .source = kFromPool,
                               .list_capacity = list_capacity,
                               .window = c.window,
                               .scale = scale,
                               .cap = c.cap,
                               .rope = c.rotation.params()}};
      run({.n_rows = 1, .position = kPosition}, heads, 1, [&](Recorder& r) { r.record(op); });
      const auto got = get<float>(y);
      for (uint32_t head = 0; head < kHeads; ++head) {
        const std::vector<uint32_t> list = head && c.short_head ? every_entry(c.short_head) : longer;
        const uint32_t first =
            c.window && list.size() > c.window ? static_cast<uint32_t>(list.size()) - c.window : 0;
        const Listed listed(
            list, c.rotation, [&](uint32_t e) { return k[head * capacity + e]; },
            [&](uint32_t e) { return v[head * capacity + e]; });
        const auto values = listed.values(first, list.size(), c.dh);
        double longest = 0;  // of a block of values
        for (size_t at = 0; at < values.size(); at += 32) {
          double squares = 0;
          for (size_t i = at; i < at + 32; ++i) squares += values[i] * values[i];
          longest = std::max(longest, std::sqrt(squares));
        }
        const double position =
            c.rotation.mode == kRopeList ? static_cast<double>(list.size() - 1) : kPosition;
        for (uint32_t h = head * c.group; h < (head + 1) * c.group; ++h) {
          Softmax softmax{.cap = double{c.cap}};
          if (c.sinks) softmax.sink = double{sinks[h]};
          const Attended want =
              attend(c.rotation.rotated_query(doubles(q, size_t{h} * c.dh, c.dh), position),
                     listed.keys(first, list.size(), c.dh), values, double{scale}, true, softmax);
          // Matrix units take keys in f16, and the numbers of which blocks of values are the transforms.
          // These are rounded by 2^-11 of themselves, which changes a channel by at most 2^-11 of its block's
          // length.
          for (uint32_t i = 0; i < c.dh; ++i)
            ASSERT_NEAR(got[size_t{h} * c.dh + i], want.y[i],
                        want.f16_tolerance[i] + 0x1p-11 * longest +
                            8 * attention_tolerance(c.dh, kQueryMax, c.entries))
                << "query " << h << ", channel " << i;
        }
      }
    }
}

TEST_P(KvPairs, AreMovedAsTheyAre) {
  for (const Formats& f : kPairs)
    for (const uint32_t dh : fewer({32, 64, 96, 128, 512}, {64, 96})) {
      if (!supports(f, dh)) continue;
      SCOPED_TRACE(::testing::Message()
                   << dtype_info(f.k).name << ", " << dtype_info(f.v).name << ", " << dh);
      clear();
      constexpr uint32_t kHeads = 2, kCapacity = 300, kHeld = 280, kRows = 7, kKeep = 200;
      Random random{dh};
      const auto rows = [&](DType type, uint32_t n) {
        return StoredRows(type, dh, uneven(random, kHeads * n * dh, dh));
      };
      const StoredRows k = rows(f.k, kCapacity), v = rows(f.v, kCapacity), chunk_k = rows(f.k, kRows),
                       chunk_v = rows(f.v, kRows);
      const std::vector<uint32_t> list = some_entries(random, kHeld + kRows, kKeep, kRows);
      std::vector<int32_t> positions(kHeads * kCapacity), chunk_positions(kHeads * kRows);
      for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(10 * (i % kCapacity));
      // The last rows belong before earlier entries.
      for (size_t i = 0; i < chunk_positions.size(); ++i)
        chunk_positions[i] = static_cast<int32_t>(1005 + 300 * (i % kRows));
      const View k_view = inout(k.bytes), v_view = inout(v.bytes), pos = inout(positions),
                 cis = inout(random.floats(kHeads * kCapacity));
      run({.n_rows = kRows, .position = kPosition}, equal_heads(kHeads, kCapacity, kHeld, kKeep), kRows,
          [&](Recorder& r) {
            r.record(KvCompact{
                input(lists({list, list}, kKeep + 1)),
                {input(chunk_k.bytes), f.k},
                {input(chunk_v.bytes), f.v},
                input(chunk_positions),
                input(random.floats(kHeads * kRows)),
                {k_view, f.k},
                {v_view, f.v},
                pos,
                cis,
                {.heads = kHeads, .head_dim = dh, .chunk_capacity = kRows, .list_capacity = kKeep + 1}});
            r.record(KvMerge{{k_view, f.k}, {v_view, f.v}, pos, cis, {.heads = kHeads, .head_dim = dh}});
          });
      std::vector<std::pair<int32_t, uint32_t>> order;
      for (const uint32_t e : list)
        order.push_back({e < kHeld ? static_cast<int32_t>(10 * e) : chunk_positions[e - kHeld], e});
      std::sort(order.begin(), order.end());
      for (const auto& [view, pool, chunk] :
           {std::tuple(k_view, &k, &chunk_k), std::tuple(v_view, &v, &chunk_v)}) {
        const auto got = get<std::byte>(view);
        const size_t bytes = kv_bytes(pool->type, dh);
        for (uint32_t head = 0; head < kHeads; ++head)
          for (uint32_t i = 0; i < kKeep; ++i) {
            const uint32_t e = order[i].second;
            const std::byte* from = e < kHeld ? &pool->bytes[(head * kCapacity + e) * bytes]
                                              : &chunk->bytes[(head * kRows + e - kHeld) * bytes];
            const std::byte* at = &got[(head * kCapacity + i) * bytes];
            ASSERT_EQ(std::vector<std::byte>(at, at + bytes), std::vector<std::byte>(from, from + bytes))
                << "head " << head << ", entry " << i;
          }
      }
    }
}

}  // namespace
}  // namespace thimble::test
