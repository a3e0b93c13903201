// attend_all on every device that has it: a run, rows and a store, compared with a softmax over their entries
// in the order of positions, in double precision.
#include <algorithm>

#include "tests/ops/kv_blocks.h"

namespace thimble::test {
namespace {

struct Case {
  const char* name;
  uint32_t heads = 2, group = 3, dh = 64;
  bool chunked = true;
  uint32_t rows = 5;  // 1 without a chunk
  // For each head, entries of the run and of the store.
  std::vector<uint32_t> held = {70, 33}, stored = {300, 211};
  Rotation rotation = {};
  DType run_k = DType::kF16, run_v = DType::kF16, stored_k = DType::kF16, stored_v = DType::kF16;
  double cap = 0;
  bool sinks = false;
};

struct Entry {
  int32_t position;
  std::vector<double> k, v;
};

// Numbers that all formats hold exactly, of magnitudes up to (127 + 31 * 15) / 512 < 1.2.
constexpr double kLargest = 1.2;

class AttendsAll : public OpTest {
 protected:
  static std::vector<float> numbers(DType a, DType b, Random& random, uint32_t dh) {
    if (a == DType::kF16 && b == DType::kF16) {  // heads of any width
      std::vector<float> x(dh);
      for (float& c : x) c = f16_to_f32(f32_to_f16(random.uniform(-1, 1)));
      return x;
    }
    const bool four = a == DType::kQ4_0 || b == DType::kQ4_0;
    return exact_blocks(four ? DType::kQ4_0 : DType::kQ8_0, random, dh);
  }
  // Puts a row into an array of rows.
  static void put(std::vector<std::byte>& rows, uint64_t at, DType type, const std::vector<float>& x) {
    const std::vector<std::byte> row = rows_of(type, x, static_cast<uint32_t>(x.size()));
    std::copy(row.begin(), row.end(), rows.begin() + static_cast<ptrdiff_t>(at));
  }

  // The store's arrays: pages in shuffled slots, and poison where nothing is held.
  struct Store {
    uint64_t stride = 0, rows_stride = 0;  // bytes
    uint32_t capacity = 0;
    std::vector<uint32_t> pages, order;
    std::vector<std::byte> rows;
    std::vector<uint32_t> count;
  };

  void check(const Case& c) {
    SCOPED_TRACE(c.name);
    clear();
    Random random{c.dh + c.rows + c.group};
    std::vector<HeadState> heads = unequal_heads(c.held, 4);
    const size_t in_arrays = layer_entries(heads) + 5;
    const uint64_t run_k = kv_bytes(c.run_k, c.dh), run_v = kv_bytes(c.run_v, c.dh),
                   stored_k = kv_bytes(c.stored_k, c.dh), stored_v = kv_bytes(c.stored_v, c.dh),
                   page_bytes = kStoredPage * (stored_k + stored_v);
    const uint32_t in_run = c.chunked ? 0 : 1, chunk_capacity = c.rows + 2;
    constexpr auto kPoison = std::byte{0xff};  // NaN in every format
    std::vector<std::byte> k(in_arrays * run_k, kPoison), v(in_arrays * run_v, kPoison);
    std::vector<std::byte> chunk_k(c.heads * chunk_capacity * run_k, kPoison),
        chunk_v(c.heads * chunk_capacity * run_v, kPoison);
    std::vector<int32_t> pos(in_arrays, -1);
    Store store;
    const uint32_t most =
        *std::max_element(c.stored.begin(), c.stored.end()) + *std::max_element(c.held.begin(), c.held.end());
    const int32_t text = static_cast<int32_t>(most) * 2 + 40;  // some positions have no entry at all
    store.capacity = static_cast<uint32_t>(text) / kStoredPage + 3;
    store.rows_stride = round_up(store.capacity * page_bytes, 64);
    store.stride = round_up(store.capacity * 16, 64) + 64;
    store.pages.assign(c.heads * store.stride / 4, UINT32_MAX);
    store.order = store.pages;
    store.rows.assign(c.heads * store.rows_stride, kPoison);
    std::vector<std::vector<Entry>> entries(c.heads);
    for (uint32_t head = 0; head < c.heads; ++head) {
      const uint32_t held = c.held[head] - in_run, all = held + c.stored[head];
      std::vector<uint32_t> places = some_entries(random, static_cast<uint32_t>(text), all, 0);
      std::vector<bool> is_stored(all);
      std::fill_n(is_stored.begin(), c.stored[head], true);
      for (uint32_t i = all; i-- > 1;) {
        const uint32_t other = random.below(i + 1);
        const bool swapped = is_stored[i];
        is_stored[i] = is_stored[other];
        is_stored[other] = swapped;
      }
      std::vector<uint32_t> slots = every_entry(store.capacity);
      for (uint32_t i = store.capacity; i-- > 1;) std::swap(slots[i], slots[random.below(i + 1)]);
      uint32_t pages = 0, entry = 0;
      uint32_t* const order = &store.order[head * store.stride / 4];
      for (uint32_t i = 0; i < all; ++i) {
        const std::vector<float> key = numbers(c.run_k, c.stored_k, random, c.dh),
                                 value = numbers(c.run_v, c.stored_v, random, c.dh);
        entries[head].push_back(
            {static_cast<int32_t>(places[i]), doubles(key, 0, c.dh), doubles(value, 0, c.dh)});
        if (!is_stored[i]) {
          const uint64_t at = heads[head].first + entry++;
          pos[at] = static_cast<int32_t>(places[i]);
          put(k, at * run_k, c.run_k, key);
          put(v, at * run_v, c.run_v, value);
          continue;
        }
        const uint32_t number = places[i] / kStoredPage, place = places[i] % kStoredPage;
        const auto page_at = [&](uint32_t slot) { return &store.pages[head * store.stride / 4 + slot * 4]; };
        if (pages == 0 || *page_at(order[pages - 1]) != number) {
          order[pages] = slots[pages];
          uint32_t* const page = page_at(order[pages++]);
          page[0] = number;
          page[1] = 0xabcd0000;
        }
        const uint32_t slot = order[pages - 1];
        page_at(slot)[1] |= 1u << place;
        const uint64_t at = head * store.rows_stride + slot * page_bytes;
        put(store.rows, at + place * stored_k, c.stored_k, key);
        put(store.rows, at + kStoredPage * stored_k + place * stored_v, c.stored_v, value);
      }
      store.count.push_back(pages);
      for (uint32_t row = 0; row < c.rows; ++row) {
        const std::vector<float> key = numbers(c.run_k, c.stored_k, random, c.dh),
                                 value = numbers(c.run_v, c.stored_v, random, c.dh);
        entries[head].push_back(
            {text + static_cast<int32_t>(row), doubles(key, 0, c.dh), doubles(value, 0, c.dh)});
        const uint64_t at = c.chunked ? head * chunk_capacity + row : heads[head].first + entry;
        put(c.chunked ? chunk_k : k, at * run_k, c.run_k, key);
        put(c.chunked ? chunk_v : v, at * run_v, c.run_v, value);
        if (!c.chunked) pos[at] = text;
      }
      heads[head].n_entries = entry;
    }
    const uint32_t queries = c.heads * c.group, stride = queries * c.dh + 8;
    const std::vector<float> q = random.floats(c.rows * stride, -2, 2), sinks = random.floats(queries, -1, 3);
    SessionShape shape = session_of(behind_other_rows(heads), chunk_capacity);
    shape.stored_pages = store.capacity;
    size_for(c.heads, c.group, c.dh, shape);
    const View y = output<float>(c.rows * stride), rows = input(store.rows);
    const double scale = 1 / std::sqrt(c.dh);
    AttendAll op{
        .q = input(q),
        .k = {input(k), c.run_k},
        .v = {input(v), c.run_v},
        .pos = input(pos),
        .chunk_k = {},
        .chunk_v = {},
        .pages = input(store.pages),
        .order = input(store.order),
        .stored_k = {rows, c.stored_k},
        .stored_v = {rows.slice(kStoredPage * stored_k, rows.bytes - kStoredPage * stored_k), c.stored_v},
        .count = input(store.count),
        .rope = input(c.rotation.table(store.capacity * kStoredPage + 2048)),
        .sinks = c.sinks ? input(sinks) : View{},
        .y = y,
        .p = {.heads = c.heads,
              .group = c.group,
              .head_dim = c.dh,
              .row_stride = stride,
              .y_stride = stride,
              .chunk_capacity = chunk_capacity,
              .head_state = kOtherRows,
              .page_capacity = store.capacity,
              .stored_stride = static_cast<uint32_t>(store.stride / 64),
              .rows_stride = static_cast<uint32_t>(store.rows_stride / 64),
              .if_stored = 1,
              .scale = static_cast<float>(scale),
              .cap = static_cast<float>(c.cap),
              .rope = c.rotation.params()}};
    if (c.chunked) op.chunk_k = {input(chunk_k), c.run_k}, op.chunk_v = {input(chunk_v), c.run_v};
    if (!device().supports(op)) return;
    const StepParams step{.n_rows = c.rows, .position = text};
    run(step, behind_other_rows(heads), c.rows, [&](Recorder& r) { r.record(op); });
    const auto got = get<float>(y);
    if (std::all_of(store.count.begin(), store.count.end(), [](uint32_t n) { return n == 0; })) {
      EXPECT_TRUE(is_poison(got, 0, got.size()));
      return;
    }
    for (uint32_t head = 0; head < c.heads; ++head) {
      std::vector<double> keys, values;
      const std::vector<Entry>& all = entries[head];
      for (size_t i = 0; i < all.size(); ++i) {
        std::vector<double> key = all[i].k;
        if (c.rotation.mode == kRopeList) key = c.rotation.rotated(key, static_cast<double>(i));
        keys.insert(keys.end(), key.begin(), key.end());
        values.insert(values.end(), all[i].v.begin(), all[i].v.end());
      }
      for (uint32_t row = 0; row < c.rows; ++row) {
        const size_t seen = all.size() - c.rows + row + 1;
        const double position =
            c.rotation.mode == kRopeList ? static_cast<double>(seen - 1) : double(text) + row;
        for (uint32_t h = 0; h < c.group; ++h) {
          const uint32_t query = head * c.group + h;
          const Attended want =
              attend(c.rotation.rotated_query(doubles(q, row * stride + query * c.dh, c.dh), position),
                     std::span(keys).first(seen * c.dh), std::span(values).first(seen * c.dh), scale, false,
                     {.cap = c.cap, .sink = c.sinks ? double{sinks[query]} : -INFINITY});
          // attention_tolerance() is for keys and values up to 1, whose errors are proportional to them. Up
          // to 32 parts are combined with two more roundings each.
          const double tolerance =
              kLargest * kLargest *
                  attention_tolerance(c.dh, 2, static_cast<uint32_t>(seen), c.rotation.factor) +
              64 * 0x1p-24;
          for (uint32_t i = 0; i < c.dh; ++i)
            ASSERT_NEAR(got[row * stride + query * c.dh + i], want.y[i], tolerance)
                << "head " << head << ", row " << row << ", query " << h << ", channel " << i;
        }
      }
    }
  }
};
THIMBLE_SHARED_OP_TESTS(AttendsAll);

TEST_P(AttendsAll, EqualsASoftmaxInTheOrderOfPositions) {
  const Rotation part{.mode = kRopeList, .pairing = kRopeHalves, .n_rot = 24, .factor = 1.19},
      adjacent{.mode = kRopeList, .pairing = kRopeAdjacent, .n_rot = 64},
      original{.mode = kRopeOriginal, .pairing = kRopeHalves, .n_rot = 64};
  check({.name = "chunk"});
  check({.name = "token", .chunked = false, .rows = 1});
  check({.name = "one row of a chunk", .rows = 1, .rotation = adjacent});
  if (!is_slow()) check({.name = "odd head", .group = 1, .dh = 40, .rows = 3, .rotation = part});
  check({.name = "odd head, token", .group = 7, .dh = 40, .chunked = false, .rows = 1, .rotation = part});
  check({.name = "blocks of rows", .group = 14, .dh = 64, .rows = 29});
  check({.name = "original", .rotation = original});
  check({.name = "original, token", .chunked = false, .rows = 1, .rotation = original});
  check({.name = "capped, sinks", .rows = 4, .cap = 0.7, .sinks = true});
  check({.name = "capped, sinks, token", .chunked = false, .rows = 1, .cap = 0.7, .sinks = true});
  check({.name = "weighted", .rotation = weighted(adjacent, 64)});
  check({.name = "weighted, token", .chunked = false, .rows = 1, .rotation = weighted(adjacent, 64)});
}

TEST_P(AttendsAll, ReadsBothFormats) {
  const auto all_of = [&](DType type, bool chunked, uint32_t rows) {
    check({.name = "all of blocks",
           .chunked = chunked,
           .rows = rows,
           .run_k = type,
           .run_v = type,
           .stored_k = type,
           .stored_v = type});
  };
  if (is_slow()) {  // each case is a pipeline
    check({.name = "keys of blocks", .dh = 96, .stored_k = DType::kQ8_0});
    return all_of(DType::kQ4_0, false, 1);
  }
  for (const bool chunked : {true, false})
    for (const DType store : {DType::kQ8_0, DType::kQ4_0}) {
      const uint32_t rows = chunked ? 6 : 1;
      check({.name = "store of blocks",
             .chunked = chunked,
             .rows = rows,
             .stored_k = store,
             .stored_v = store});
      check({.name = "keys of blocks", .dh = 96, .chunked = chunked, .rows = rows, .stored_k = store});
      all_of(store, chunked, rows);
    }
}

// Heads without a store among others, long runs with few stored entries, and many parts.
TEST_P(AttendsAll, TakesAnyShares) {
  for (const bool chunked : {true, false}) {
    const uint32_t rows = chunked ? 3 : 1;
    check({.name = "no pages", .chunked = chunked, .rows = rows, .stored = {0, 0}});
    check({.name = "one head", .chunked = chunked, .rows = rows, .stored = {0, 17}});
    check({.name = "one entry", .chunked = chunked, .rows = rows, .held = {1, 700}, .stored = {1, 1}});
    check({.name = "nothing but a store",
           .chunked = chunked,
           .rows = rows,
           .held = {1, 1},
           .stored = {64, 65}});
    if (is_slow() && chunked) continue;
    check({.name = "many",
           .group = 1,
           .dh = 32,
           .chunked = chunked,
           .rows = rows,
           .held = {900, 64},
           .stored = {900, 1500},
           .rotation = {.n_rot = 32}});
  }
}

}  // namespace
}  // namespace thimble::test
