// kv_spill: copies the entries that a compaction is going to drop, to host memory; one dispatch per array.
#include <algorithm>

#include "backends/vulkan/heads.h"
#include "backends/vulkan/ops.h"

namespace thimble::vulkan {
namespace {

// The shader that copies rows from one format to another, and the number by which it knows the format.
struct Copier {
  Shader shader;
  uint32_t format;

  Copier(DType from, DType to) : shader(Shader::kKvSpill), format(0) {
    if (from == to) return;
    const bool numbers = to == DType::kF32;
    format = kv_format_number(numbers ? from : to);
    shader = !numbers              ? Shader::kKvSpillEncoded
             : has_kv_blocks(from) ? Shader::kKvSpillNumbersBlocks
                                   : Shader::kKvSpillNumbers;
  }
};

// Copies rows of so many channels. `count`: where their number goes, or nothing.
void spill(Recording& r, const KvSpill& op, const KvArray& pool, const View& chunk, const KvArray& to,
           uint32_t channels, const View& count) {
  constexpr uint32_t kRows = 32,
                     kMostSharers = 128;  // rows that a workgroup copies at a time; groups of a head
  const Copier copier(pool.type, to.type);
  const uint64_t row = kv_bytes(pool.type, channels), chunk_bytes = op.p.chunk_capacity * row,
                 copies = op.p.spill_capacity * kv_bytes(to.type, channels);
  const uint32_t groups = std::min(static_cast<uint32_t>(ceil_div(op.p.spill_capacity, kRows)), kMostSharers);
  for_run_windows(r.limits(), pool.values, row, [&](const RunWindow& window) {
    for_head_ranges(r.limits(), std::max(chunk_bytes, copies), op.p.first_head, op.p.heads,
                    [&](uint32_t first, uint32_t heads) {
                      struct {
                        KvSpillParams p;
                        RunWindow window;
                        uint32_t words;
                      } push{op.p, window, static_cast<uint32_t>(row / sizeof(uint32_t))};
                      push.p.first_head = first;
                      push.p.heads = heads;
                      r.dispatch(copier.shader, {chunk ? 1u : 0u, count ? 1u : 0u, copier.format},
                                 {reads(op.list), reads(window.of(pool.values, row)),
                                  reads(of_heads(chunk, chunk_bytes, first, heads)),
                                  writes(of_heads(to.values, copies, first, heads)), writes(count)},
                                 push, groups, heads);
                    });
  });
}

}  // namespace

void kv_spill(Recording& r, const KvSpill& op) {
  constexpr DType kWord = DType::kF32;
  spill(r, op, op.pool_k, op.chunk_k.values, op.k, op.p.head_dim, {});
  spill(r, op, op.pool_v, op.chunk_v.values, op.v, op.p.head_dim, {});
  spill(r, op, op.pool_k, op.chunk_k.values, {op.keys, kWord}, op.p.head_dim, {});
  spill(r, op, {op.pool_pos, kWord}, op.chunk_pos, {op.pos, kWord}, 1, op.count);
  spill(r, op, {op.pool_cis, kWord}, op.chunk_cis, {op.cis, kWord}, 1, {});
}

}  // namespace thimble::vulkan
