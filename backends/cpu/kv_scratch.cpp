#include "backends/cpu/kv_scratch.h"

#include <algorithm>

namespace thimble::cpu {

uint64_t kv_scratch_bytes(const ModelShape& m, const SessionShape& s, uint32_t workers) {
  const uint32_t group = std::max(1u, m.heads / std::max(1u, m.kv_heads));
  // Heads of a lifted view attend by themselves.
  const uint64_t tile = std::max(scratch_bytes<TileScratch>(attention_rows(group) * group, m.head_dim),
                                 scratch_bytes<TileScratch>(attention_rows(1), m.head_dim));
  uint64_t bytes = std::max(workers * tile, workers * scratch_bytes<RowScratch>(m.head_dim));
  bytes = std::max(bytes, scratch_bytes<PartScratch>(m.kv_heads, group, m.head_dim) + workers * tile);
  const auto tiles = static_cast<uint32_t>(ceil_div(s.reach, kTileKeys));
  bytes = std::max(bytes, scratch_bytes<PowerScratch>(1, tiles, group, m.head_dim) + workers * tile);
  if (s.stored_pages)
    bytes = std::max(
        bytes, scratch_bytes<PartScratch>(m.kv_heads, group, m.head_dim) +
                   workers * scratch_bytes<StoredTileScratch>(attention_rows(group) * group, m.head_dim));
  bytes = std::max(bytes, workers * scratch_bytes<BoundsScratch>(m.head_dim));
  bytes = std::max(bytes, workers * scratch_bytes<KeyScratch>(m.head_dim));
  if (s.positions == 0) return bytes;
  bytes = std::max(bytes, scratch_bytes<QueryScratch>(m.heads, m.head_dim) + workers * tile);
  bytes = std::max(bytes, scratch_bytes<QueryScratch>(m.heads, m.head_dim) +
                              workers * scratch_bytes<PageScratch>(group, m.head_dim));
  bytes = std::max(bytes, workers * scratch_bytes<VoteScratch>(m.heads));
  const uint64_t candidates = std::max(s.positions, s.layer_entries);
  return std::max(bytes, scratch_bytes<WindowScratch>(candidates));
}

}  // namespace thimble::cpu
