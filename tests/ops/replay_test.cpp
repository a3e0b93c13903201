// A recorded program gives for each step, bit by bit, the result of a program that is recorded for that step
// alone, also when it is repeated. No counter and no scratch content of a step may affect another step.
#include "tests/ops/kv_reference.h"

namespace thimble::test {
namespace {

using Words = std::vector<uint32_t>;

struct Step {
  StepParams params;
  std::vector<HeadState> heads = {};
};

class Replays : public OpTest {
 protected:
  // Runs the steps twice with one program, then each with its own program, stream and poisoned scratch.
  // `prepare` sets a step's operands, `result` reads its relevant results. If steps follow from each other,
  // operands that change are reset only before the first step, otherwise before each.
  void check(uint32_t max_rows, bool in_sequence, const std::vector<Step>& steps,
             const std::function<void(const Step&)>& prepare, const Record& ops,
             const std::function<Words(const Step&)>& result) {
    std::vector<Words> first;
    std::unique_ptr<Program> program = record(max_rows, ops);
    for (const bool fresh : {false, false, true}) {
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        if (i == 0 || !in_sequence) restore();
        prepare(step);
        if (fresh) {
          program.reset();
          size_for(model, session);
          program = record(max_rows, ops);
        }
        ASSERT_TRUE(program);
        run(*program, step.params, step.heads);
        if (HasFatalFailure()) return;
        const Words words = result(step);
        if (first.size() < steps.size()) first.push_back(words);
        EXPECT_TRUE(words == first[i])
            << (fresh ? "alone" : "again") << ", step " << i << " with " << step.params.n_rows << " rows at "
            << step.params.position << " differs";
      }
    }
  }

  // Adds the first `count` words of a view.
  void add(Words& words, const View& view, size_t count, size_t first = 0) {
    const Words all = get<uint32_t>(view.slice(first * 4, count * 4));
    words.insert(words.end(), all.begin(), all.end());
  }
  // Adds the lists, without the memory after their ends.
  void add_lists(Words& words, const View& view, uint32_t heads, uint32_t capacity) {
    const Words all = get<uint32_t>(view);
    for (uint32_t head = 0; head < heads; ++head) {
      const Words list = list_of(all, capacity, head);
      words.push_back(all[head * capacity]);
      words.insert(words.end(), list.begin(), list.end());
    }
  }
  // Bytes of a matrix with small scales in its blocks.
  Weight some_weight(Random& random, DType type, uint32_t rows, uint32_t cols) {
    const DTypeInfo& info = dtype_info(type);
    std::vector<std::byte> bytes(dtype_bytes(type, uint64_t(rows) * cols));
    for (std::byte& b : bytes) b = static_cast<std::byte>(random.below(256));
    const uint16_t scale = f32_to_f16(0.01f);
    for (size_t block = 0; block < bytes.size(); block += info.block_bytes) {
      if (type == DType::kQ6_K) {
        std::memcpy(&bytes[block + 208], &scale, 2);
        continue;
      }
      std::memcpy(&bytes[block], &scale, 2);
      if (type == DType::kQ4_K) std::memcpy(&bytes[block + 2], &scale, 2);
    }
    return weight(type, rows, cols, bytes);
  }
};
THIMBLE_OP_TESTS(Replays);

// The dense ops of a step, one after the other. Sums over the rows of W are long enough to be divided into
// parts.
TEST_P(Replays, DenseOpsGiveTheSameBitsWhenReplayed) {
  Random random;
  const uint32_t d = 1024, kv = 256, width = d + 2 * kv, d_ff = 2048, vocab = 3000;
  for (const uint32_t max_rows : {1u, 256u}) {
    SCOPED_TRACE(::testing::Message() << "a program for " << max_rows << " rows");
    clear();
    size_for(
        {.layers = 1, .d_model = d, .heads = 8, .kv_heads = 2, .head_dim = 128, .d_ff = d_ff, .vocab = vocab},
        {.chunk = max_rows, .view_capacity = 64});
    const uint32_t logit_rows = std::min(max_rows, 16u);
    const View tokens = input(std::vector<int32_t>(max_rows)), norm = input(random.floats(d)),
               bias = input(random.floats(kv)), x = output<float>(size_t(max_rows) * d),
               y = output<float>(size_t(max_rows) * d), qkv = output<float>(size_t(max_rows) * width),
               h = output<float>(size_t(max_rows) * d_ff), last = output<float>(logit_rows * d),
               logits = output<float>(logit_rows * vocab), index = output<int32_t>(logit_rows);
    const Weight table = some_weight(random, DType::kQ8_0, vocab, d),
                 q = some_weight(random, DType::kQ4_K, d, d), k = some_weight(random, DType::kQ4_K, kv, d),
                 v = some_weight(random, DType::kQ6_K, kv, d),
                 gate = some_weight(random, DType::kQ4_K, d_ff, d),
                 up = some_weight(random, DType::kQ4_K, d_ff, d),
                 down = some_weight(random, DType::kQ6_K, d, d_ff),
                 out = some_weight(random, DType::kQ6_K, vocab, d);
    const auto columns = [&](uint32_t first) { return qkv.slice(first * 4, qkv.bytes - first * 4); };
    const auto linear = [&](Recorder& r, const View& from, const Weight& w, const View& b, const View& to,
                            uint32_t y_stride, uint32_t add_to, uint32_t rows) {
      r.record(Linear{from,
                      w,
                      b,
                      to,
                      {.in_cols = w.cols,
                       .out_cols = w.rows,
                       .x_stride = w.cols,
                       .y_stride = y_stride,
                       .add = add_to,
                       .rows = rows}});
    };
    const Record ops = [&](Recorder& r) {
      RmsNormParams p{.cols = d, .groups = 1, .row_stride = d, .eps = 1e-5f, .rows = kStepRows};
      r.record(Embed{tokens, table, x, {.cols = d}});
      r.record(RmsNorm{x, norm, y, p});
      linear(r, y, q, {}, columns(0), width, 0, kStepRows);
      linear(r, y, k, bias, columns(d), width, 0, kStepRows);
      linear(r, y, v, {}, columns(d + kv), width, 0, kStepRows);
      r.record(Glu{y, gate, up, h, {.in_cols = d, .out_cols = d_ff, .act = kActSilu}});
      linear(r, h, down, {}, x, d, 1, kStepRows);
      r.record(Copy{
          x, last, {.cols = d, .src_stride = d, .dst_stride = d, .from_logit_row = 1, .rows = kLogitRows}});
      p.rows = kLogitRows;
      r.record(RmsNorm{last, norm, last, p});
      linear(r, last, out, {}, logits, vocab, 0, kLogitRows);
      r.record(ArgMax{logits, index, {.cols = vocab}});
    };
    std::vector<Step> steps;
    for (uint32_t rows : {31u, 1u, 256u, 2u, 129u, 1u}) {
      const uint32_t n = std::min(rows, max_rows), n_logits = std::min(n, 1 + rows % 3);
      steps.push_back({{.n_rows = n,
                        .position = static_cast<int32_t>(steps.size()),
                        .first_logit_row = n - n_logits,
                        .n_logit_rows = n_logits}});
    }
    check(
        max_rows, false, steps,
        [&](const Step& s) {
          Random own{static_cast<uint64_t>(s.params.position) + 5};
          std::vector<int32_t> ids(s.params.n_rows);
          for (int32_t& id : ids) id = static_cast<int32_t>(own.below(vocab));
          put(tokens, padded_rows(ids, max_rows));
        },
        ops,
        [&](const Step& s) {
          Words words;
          add(words, x, s.params.n_rows * d);
          add(words, qkv, s.params.n_rows * width);
          add(words, logits, s.params.n_logit_rows * vocab);
          add(words, index, s.params.n_logit_rows);
          return words;
        });
  }
}

// The operands of the KV ops of a step. Rows beyond n_rows are poison.
constexpr uint32_t kHeads = 2, kGroup = 4, kDh = 64, kQueries = kHeads * kGroup * kDh,
                   kWidth = kQueries + 2 * kHeads * kDh;

// The head table of a layer whose heads hold different numbers of entries.
std::vector<HeadState> two_heads(uint32_t capacity, uint32_t first_entries, uint32_t second_entries) {
  std::vector<HeadState> heads = equal_heads(kHeads, capacity, first_entries);
  heads[1].n_entries = second_entries;
  return heads;
}

// A chunk of prefill: selection, attention to its list and to all entries in passes, then eviction. With
// votes by group, heads hold different numbers of entries; votes of the layer require equal ones.
TEST_P(Replays, ReadingOpsGiveTheSameBitsWhenReplayed) {
  const uint32_t max_rows = 64, capacity = 4200, reach = capacity + max_rows, view_capacity = 2048,
                 n_init = 8, n_local = 80, select_k = 300, select_list = 1 + n_init + n_local + select_k;
  for (const uint32_t scope : {kVoteGroup, kVoteLayer}) {
    SCOPED_TRACE(::testing::Message() << "scope " << scope);
    clear();
    size_for(kHeads, kGroup, kDh,
             session_of(equal_heads(kHeads, capacity, 0), max_rows, view_capacity, 5000));
    const Rotation rotation;
    Random random;
    const size_t entries = size_t(kHeads) * capacity, rows = size_t(kHeads) * max_rows;
    std::vector<int32_t> positions(entries);
    for (size_t i = 0; i < entries; ++i) positions[i] = static_cast<int32_t>(i % capacity);
    const View qkv = input(std::vector<float>(max_rows * kWidth)), table = input(rotation.table(reach)),
               k = inout(halves(random.floats(entries * kDh))),
               v = inout(halves(random.floats(entries * kDh))), pos = inout(positions),
               cis = inout(random.floats(entries)), chunk_k = output<uint16_t>(rows * kDh),
               chunk_v = output<uint16_t>(rows * kDh), chunk_pos = output<int32_t>(rows),
               chunk_cis = output<float>(rows), scores = output<float>(size_t(kHeads) * kGroup * capacity),
               lse = output<float>(kHeads * kGroup),
               votes = output<float>(std::max(5000u, kHeads * capacity)),
               list = output<uint32_t>(kHeads * select_list), kept = output<uint32_t>(kHeads * (reach + 1)),
               view_k = output<float>(size_t(kHeads) * view_capacity * kDh),
               view_v = output<float>(size_t(kHeads) * view_capacity * kDh),
               ml = output<float>(max_rows * kHeads * kGroup * 2),
               listed = output<float>(max_rows * kQueries), dense = output<float>(max_rows * kQueries),
               saturated = inout(std::vector<uint32_t>(1));
    // The list fits the view; all entries take several passes.
    const auto attend = [&](Recorder& r, const View& of, const View& y, uint32_t count) {
      ViewAttention{.q = qkv,
                    .pool_k = k,
                    .pool_v = v,
                    .chunk_k = chunk_k,
                    .chunk_v = chunk_v,
                    .list = of,
                    .table = table,
                    .view_k = view_k,
                    .view_v = view_v,
                    .y = y,
                    .ml = ml,
                    .chunk_capacity = max_rows,
                    .entries = count,
                    .p = {.heads = kHeads,
                          .group = kGroup,
                          .head_dim = kDh,
                          .row_stride = kWidth,
                          .y_stride = kQueries,
                          .source = kFromView,
                          .view_capacity = view_capacity,
                          .list_capacity = select_list,
                          .scale = 0.125f,
                          .rope = rotation.params()}}
          .record(r);
    };
    const Record ops = [&](Recorder& r) {
      r.record(KvAppend{qkv,
                        table,
                        {chunk_k},
                        {chunk_v},
                        chunk_pos,
                        saturated,
                        {.heads = kHeads,
                         .head_dim = kDh,
                         .row_stride = kWidth,
                         .k_column = kQueries,
                         .v_column = kQueries + kHeads * kDh,
                         .chunk_capacity = max_rows,
                         .into = kIntoChunk,
                         .rope = rotation.params()}});
      r.record(CisStore{{},
                        chunk_cis,
                        {.heads = kHeads, .kind = kCisHash, .chunk_capacity = max_rows, .into = kIntoChunk}});
      Selecting{.q = qkv,
                .k = k,
                .table = table,
                .pos = pos,
                .gate = {},
                .scores = scores,
                .lse = lse,
                .votes = votes,
                .list = list,
                .p = {.heads = kHeads,
                      .group = kGroup,
                      .head_dim = kDh,
                      .row_stride = kWidth,
                      .score_capacity = capacity,
                      .scale = 1,
                      .rope = rotation.params()},
                .scope = scope,
                .vote_capacity = capacity,
                .list_capacity = select_list,
                .window = 3}
          .record(r);
      attend(r, list, listed, view_capacity);
      attend(r, {}, dense, reach);
      r.record(TopK{cis,
                    chunk_cis,
                    {},
                    {},
                    kept,
                    {.heads = kHeads,
                     .keep = kKeepOfHead,
                     .page = 1,
                     .in_runs = 1,
                     .chunk_capacity = max_rows,
                     .list_capacity = reach + 1}});
      r.record(KvCompact{
          kept,
          {chunk_k},
          {chunk_v},
          chunk_pos,
          chunk_cis,
          {k},
          {v},
          pos,
          cis,
          {.heads = kHeads, .head_dim = kDh, .chunk_capacity = max_rows, .list_capacity = reach + 1}});
    };
    std::vector<Step> steps;
    for (const auto& [n_entries, n_rows] : std::vector<std::pair<uint32_t, uint32_t>>{{0, 64},
                                                                                      {64, 64},
                                                                                      {400, 1},
                                                                                      {4000, 64},
                                                                                      {33, 17},
                                                                                      {3300, 31},
                                                                                      {4100, 33},
                                                                                      {350, 64},
                                                                                      {0, 1},
                                                                                      {2047, 2},
                                                                                      {4000, 64}}) {
      Step s{{.n_rows = n_rows,
              .position = static_cast<int32_t>(n_entries),
              .n_init = n_init,
              .n_local = n_local,
              .select_k = select_k,
              .seed = n_rows},
             two_heads(capacity, n_entries, scope == kVoteLayer ? n_entries : 4100 - n_entries)};
      for (HeadState& head : s.heads) {
        const uint32_t most = scope == kVoteGroup && &head == &s.heads[1] ? 2000 : 3000;
        head.keep = std::min(head.n_entries + n_rows, most);
        head.protect_first = 2;
        head.protect_last = 1;
      }
      steps.push_back(s);
    }
    check(
        max_rows, false, steps,
        [&](const Step& s) {
          Random own{s.heads[0].n_entries + s.params.n_rows};
          put(qkv,
              padded_rows(own.floats(size_t(s.params.n_rows) * kWidth, -2, 2), size_t(max_rows) * kWidth));
        },
        ops,
        [&](const Step& s) {
          Words words;
          add_lists(words, list, kHeads, select_list);
          add_lists(words, kept, kHeads, reach + 1);
          add(words, listed, s.params.n_rows * kQueries);
          add(words, dense, s.params.n_rows * kQueries);
          for (const HeadState& head : s.heads) {
            add(words, k, head.keep * kDh / 2, head.first * kDh / 2);
            add(words, v, head.keep * kDh / 2, head.first * kDh / 2);
            add(words, pos, head.keep, head.first);
            add(words, cis, head.keep, head.first);
          }
          return words;
        });
  }
}

// Attention to a pool that grows and shrinks: the division of the work into parts, and among heads, differs
// in each step.
TEST_P(Replays, AttentionToThePoolGivesTheSameBitsWhenReplayed) {
  const uint32_t capacity = 20001;
  const size_t entries = size_t(kHeads) * capacity;
  size_for(kHeads, kGroup, kDh, session_of(equal_heads(kHeads, capacity, 0), 1));
  const Rotation rotation;
  Random random;
  const View q = input(random.floats(kQueries, -4, 4)), table = input(rotation.table(capacity)),
             k = input(halves(random.floats(entries * kDh))), v = input(halves(random.floats(entries * kDh))),
             y = output<float>(kQueries);
  std::vector<Step> steps;
  for (const uint32_t n : {31u, 9000u, 1u, 20001u, 33u, 20000u, 1000u, 2u, 5000u, 257u})
    for (const uint32_t other : {n, 20002 - n})
      steps.push_back(
          {{.n_rows = 1, .position = static_cast<int32_t>(n) - 1}, two_heads(capacity, n - 1, other - 1)});
  check(
      1, false, steps, [](const Step&) {},
      [&](Recorder& r) {
        r.record(Attention{q,
                           {k},
                           {v},
                           {},
                           table,
                           {},
                           y,
                           {},
                           {.heads = kHeads,
                            .group = kGroup,
                            .head_dim = kDh,
                            .row_stride = kQueries,
                            .y_stride = kQueries,
                            .source = kFromPool,
                            .scale = 0.125f,
                            .rope = rotation.params()}});
      },
      [&](const Step&) { return get<uint32_t>(y); });
}

// Tokens one after the other: the pool grows beyond what is always attended, and the gate hits and misses.
// With votes by group, the second head is short and is selected from later than the first.
TEST_P(Replays, WritingOpsGiveTheSameBitsWhenReplayed) {
  const uint32_t n_init = 8, n_local = 32, select_k = 64, list_capacity = 1 + n_init + n_local + select_k;
  for (const uint32_t first_entry : {90u, 5000u, 20000u})
    for (const uint32_t scope : {kVoteGroup, kVoteLayer}) {
      SCOPED_TRACE(::testing::Message() << "from " << first_entry << " entries on, scope " << scope);
      clear();
      const uint32_t capacity = first_entry + 30, n_steps = first_entry == 90 ? 25 : 8;
      const size_t entries = size_t(kHeads) * capacity;
      size_for(kHeads, kGroup, kDh, session_of(equal_heads(kHeads, capacity, 0), 1, 64, capacity));
      const Rotation rotation;
      Random random;
      std::vector<int32_t> positions(entries);
      for (size_t i = 0; i < entries; ++i) positions[i] = static_cast<int32_t>(i % capacity);
      const View qkv = input(std::vector<float>(kWidth)), table = input(rotation.table(capacity)),
                 k = inout(halves(random.floats(entries * kDh))),
                 v = inout(halves(random.floats(entries * kDh))), pos = inout(positions),
                 scores = output<float>(entries * kGroup), lse = output<float>(kHeads * kGroup),
                 votes = output<float>(entries), list = output<uint32_t>(kHeads * list_capacity),
                 gate = inout(std::vector<GateState>(1)), cached = output<float>(kQueries),
                 y = output<float>(kQueries), saturated = inout(std::vector<uint32_t>(1));
      const Record ops = [&](Recorder& r) {
        r.record(KvAppend{qkv,
                          table,
                          {k},
                          {v},
                          pos,
                          saturated,
                          {.heads = kHeads,
                           .head_dim = kDh,
                           .row_stride = kWidth,
                           .k_column = kQueries,
                           .v_column = kQueries + kHeads * kDh,
                           .into = kIntoPool,
                           .rope = rotation.params()}});
        r.record(QueryGate{qkv, cached, gate, {.cols = kQueries, .heads = kHeads}});
        Selecting{.q = qkv,
                  .k = k,
                  .table = table,
                  .pos = pos,
                  .gate = gate,
                  .scores = scores,
                  .lse = lse,
                  .votes = votes,
                  .list = list,
                  .p = {.heads = kHeads,
                        .group = kGroup,
                        .head_dim = kDh,
                        .row_stride = kWidth,
                        .score_capacity = capacity,
                        .scale = 1,
                        .rope = rotation.params()},
                  .scope = scope,
                  .vote_capacity = capacity,
                  .list_capacity = list_capacity}
            .record(r);
        r.record(Attention{qkv,
                           {k},
                           {v},
                           list,
                           table,
                           {},
                           y,
                           {},
                           {.heads = kHeads,
                            .group = kGroup,
                            .head_dim = kDh,
                            .row_stride = kWidth,
                            .y_stride = kQueries,
                            .source = kFromPool,
                            .list_capacity = list_capacity,
                            .scale = 0.125f,
                            .rope = rotation.params()}});
      };
      const uint32_t second_entry = scope == kVoteLayer ? first_entry : 88;
      std::vector<Step> steps;
      for (uint32_t i = 0; i < n_steps; ++i)
        steps.push_back({{.n_rows = 1,
                          .position = static_cast<int32_t>(first_entry + i),
                          .n_init = n_init,
                          .n_local = n_local,
                          .select_k = select_k,
                          .theta = 0.9f},
                         two_heads(capacity, first_entry + i, second_entry + i)});
      check(
          1, true, steps,
          [&](const Step& s) {
            // Queries are similar for three tokens.
            const uint32_t token = s.heads[0].n_entries;
            Random own{token}, shared{token / 3};
            std::vector<float> row = own.floats(kWidth);
            const std::vector<float> query = shared.floats(kQueries, -4, 4);
            for (uint32_t i = 0; i < kQueries; ++i) row[i] += query[i];
            put(qkv, row);
          },
          ops,
          [&](const Step& s) {
            Words words;
            add_lists(words, list, kHeads, list_capacity);
            add(words, gate, sizeof(GateState) / 4);
            add(words, y, kQueries);
            for (const HeadState& head : s.heads)
              add(words, k, (head.n_entries + 1) * kDh / 2, head.first * kDh / 2);
            return words;
          });
      const GateState g = get<GateState>(gate)[0];
      EXPECT_TRUE(g.hits && g.misses)
          << "the test needs both: " << g.hits << " hits, " << g.misses << " misses";
    }
}

}  // namespace
}  // namespace thimble::test
