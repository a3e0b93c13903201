// kv_recall: puts rows back into runs, and takes out the entries that are not listed.
#include <cstring>
#include <limits>

#include "backends/cpu/entries.h"
#include "backends/cpu/kv_scratch.h"

namespace thimble::cpu {
namespace {

// One array of a run. `move` moves an entry inside it, `put` writes the value of a row.
template <typename Move, typename Put>
void rewrite(const EntryList& list, const int32_t* pos, const int32_t* row_pos, uint32_t rows,
             const Move& move, const Put& put) {
  // Where a listed entry is once the entries between are gone. Positions are still where they were.
  for (uint32_t i = 0; i < list.count; ++i)
    if (list[i] != i) move(list[i], i);
  uint32_t entry = list.count;
  for (uint32_t row = rows; row-- > 0;) {
    while (entry && pos[list[entry - 1]] > row_pos[row]) {
      --entry;
      move(entry, entry + row + 1);
    }
    put(row, entry + row);
  }
}

}  // namespace

void kv_recall(const Context& ctx, const KvRecall& o) {
  const KvRecallParams& p = o.p;
  const KvRows k(o.k, p.head_dim), v(o.v, p.head_dim), row_k(o.row_k, p.head_dim), row_v(o.row_v, p.head_dim);
  ctx.threads.run(p.heads, [&](uint32_t item, uint32_t worker) {
    const uint32_t head = p.first_head + item;
    const HeadState& state = ctx.heads[p.head_state + head];
    const EntryList list = entry_list(ctx, o.list, head, p.list_capacity, p.head_state);
    const uint32_t rows = data<uint32_t>(o.count)[head];
    int32_t* const pos = in_run<int32_t>(o.pos, state, 0);
    float* const cis = in_run<float>(o.cis, state, 0);
    const int32_t* const row_pos = at<int32_t>(o.row_pos, head, p.row_capacity, 0);
    const RowScratch scratch = worker_scratch<RowScratch>(ctx.scratch.data(), worker, p.head_dim);
    const auto rewrite_rows = [&](const KvRows& run, const KvRows& from) {
      rewrite(
          list, pos, row_pos, rows,
          [&](uint32_t entry, uint32_t to) {
            std::memcpy(run.in_run(state, to), run.in_run(state, entry), run.bytes);
          },
          [&](uint32_t row, uint32_t to) {
            const std::byte* const x = from.at(head, p.row_capacity, row);
            if (from.format.type == run.format.type) {
              std::memcpy(run.in_run(state, to), x, run.bytes);
            } else {
              from.format.load_row(x, scratch.row, p.head_dim);
              run.format.store_row(scratch.row, run.in_run(state, to), p.head_dim);
            }
          });
    };
    rewrite_rows(k, row_k);
    rewrite_rows(v, row_v);
    rewrite(
        list, pos, row_pos, rows, [&](uint32_t entry, uint32_t to) { cis[to] = cis[entry]; },
        [&](uint32_t, uint32_t to) { cis[to] = -std::numeric_limits<float>::infinity(); });
    // Positions are the last array, since the others are ordered by them. Once compacted, entry i is i.
    for (uint32_t i = 0; i < list.count; ++i) pos[i] = pos[list[i]];
    rewrite(
        EntryList{list.count, nullptr}, pos, row_pos, rows,
        [&](uint32_t entry, uint32_t to) { pos[to] = pos[entry]; },
        [&](uint32_t row, uint32_t to) { pos[to] = row_pos[row]; });
  });
}

}  // namespace thimble::cpu
