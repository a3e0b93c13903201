// kv_recall: puts rows back into runs, and takes out the entries that are not listed. Rows and lists are in
// host memory.
#include <algorithm>

#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

constexpr uint64_t kWord = sizeof(uint32_t);
constexpr uint32_t kMostSharers = 128;  // groups of a head

// In scratch: the lists, and how many listed entries come before each row, at the row's index in its run.
struct Scratch {
  View lists, before;

  Scratch(const Recording& r, const KvRecall& op)
      : lists(r.scratch().slice(0, uint64_t(op.p.first_head + op.p.heads) * op.p.list_capacity * kWord)),
        before(r.scratch().slice(lists.bytes, op.pos.bytes)) {}
};

// The listed entries of an array, of so many channels, have moved together. They move up to open gaps, and
// the rows go into these. Without rows, they are scores of -inf.
void insert(Recording& r, const KvRecall& op, const Scratch& scratch, const KvArray& rows, const KvArray& run,
            uint32_t channels) {
  constexpr uint32_t kWidth = 8, kRows = 8;  // words of a row per workgroup, as in kv_compact; rows of one
  const uint64_t row_bytes = kv_bytes(run.type, channels),
                 head_bytes = op.p.row_capacity * kv_bytes(rows.type, channels);
  const uint32_t words = static_cast<uint32_t>(row_bytes / kWord), width = std::min(words, kWidth),
                 threads = std::min(256u, r.limits().max_group_threads);
  const uint32_t groups = std::min(static_cast<uint32_t>(ceil_div(op.p.row_capacity, kRows)), kMostSharers);
  const bool decodes = rows.type != run.type;
  const Shader shader = decodes ? Shader::kRecallRowsBlocks : Shader::kRecallRows;
  for_run_windows(r.limits(), run.values, row_bytes, [&](const RunWindow& window) {
    struct {
      KvRecallParams p;
      RunWindow window;
      uint32_t words;
    } push{op.p, window, words};
    r.dispatch(Shader::kRecallGaps, {threads / width * width, width},
               {reads(scratch.lists), reads(op.count), reads(scratch.before),
                writes(window.of(run.values, row_bytes))},
               push, static_cast<uint32_t>(ceil_div(words, width)), op.p.heads);
    for_head_ranges(r.limits(), head_bytes, op.p.first_head, op.p.heads, [&](uint32_t first, uint32_t heads) {
      push.p.first_head = first;
      push.p.heads = heads;
      r.dispatch(
          shader, {rows.values ? 0u : 1u, decodes ? channels : 0, decodes ? kv_format_number(rows.type) : 0},
          {reads(op.count), reads(scratch.before), reads(of_heads(rows.values, head_bytes, first, heads)),
           writes(window.of(run.values, row_bytes))},
          push, groups, heads);
    });
  });
}

}  // namespace

uint64_t kv_recall_scratch(const ModelShape& m, const SessionShape& s, const Limits&) {
  return s.recalls ? (m.kv_heads * (1 + uint64_t(s.reach)) + s.layer_entries) * kWord : 0;
}

void kv_recall(Recording& r, const KvRecall& op) {
  const KvRecallParams& p = op.p;
  const Scratch scratch(r, op);
  constexpr uint32_t kBlocks = 8;  // of a head, for its list and its rows
  r.dispatch(Shader::kRecallLists, {}, {reads(op.list), writes(scratch.lists)}, p, kBlocks, p.heads);
  kv_compact(r, {.list = scratch.lists,
                 .chunk_k = {},
                 .chunk_v = {},
                 .chunk_pos = {},
                 .chunk_cis = {},
                 .k = op.k,
                 .v = op.v,
                 .pos = op.pos,
                 .cis = op.cis,
                 .p = {.first_head = p.first_head,
                       .heads = p.heads,
                       .head_dim = p.head_dim,
                       .chunk_capacity = 0,
                       .head_state = p.head_state,
                       .list_capacity = p.list_capacity}});
  r.dispatch(
      Shader::kRecallPlaces, {},
      {reads(scratch.lists), reads(op.count), reads(op.row_pos), reads(op.pos), writes(scratch.before)}, p,
      kBlocks, p.heads);
  insert(r, op, scratch, op.row_k, op.k, p.head_dim);
  insert(r, op, scratch, op.row_v, op.v, p.head_dim);
  insert(r, op, scratch, {op.row_pos, DType::kF32}, {op.pos, DType::kF32}, 1);
  insert(r, op, scratch, {{}, DType::kF32}, {op.cis, DType::kF32}, 1);
}

}  // namespace thimble::vulkan
