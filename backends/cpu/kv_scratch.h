// The scratch of the CPU backend's KV ops. The code that lays it out also computes its size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/backend.h"
#include "backends/cpu/kv_kernels.h"
#include "backends/log_sum.h"
#include "base/bits.h"

namespace thimble::cpu {

// Bytes of scratch that the KV ops need for these shapes and this many workers.
uint64_t kv_scratch_bytes(const ModelShape&, const SessionShape&, uint32_t workers);

// Hands out parts of a scratch buffer, or only counts bytes if it starts at null.
class ScratchLayout {
 public:
  explicit ScratchLayout(std::byte* start = nullptr) : start_(start) {}
  template <typename T>
  T* take(uint64_t count) {
    T* part = start_ ? reinterpret_cast<T*>(start_ + used_) : nullptr;
    used_ += round_up(count * sizeof(T), 64);
    return part;
  }
  uint64_t used() const { return used_; }

 private:
  std::byte* start_;
  uint64_t used_ = 0;
};

// Size in bytes of a Scratch.
template <typename Scratch, typename... Shape>
uint64_t scratch_bytes(const Shape&... shape) {
  ScratchLayout layout;
  Scratch(layout, shape...);
  return layout.used();
}
// The Scratch of one worker; those of all workers are stored one after the other from `start` on.
template <typename Scratch, typename... Shape>
Scratch worker_scratch(std::byte* start, uint32_t worker, const Shape&... shape) {
  ScratchLayout layout(start + worker * scratch_bytes<Scratch>(shape...));
  return Scratch(layout, shape...);
}

// Stride in floats between vectors of one head's channels.
inline uint32_t padded_width(uint32_t head_dim) { return static_cast<uint32_t>(round_up(head_dim, kPad)); }

// Scratch of one worker of kv_append and kv_view.
struct RowScratch {
  float *row, *angles;  // [head_dim] each
  RowScratch(ScratchLayout& l, uint32_t head_dim)
      : row(l.take<float>(head_dim)), angles(l.take<float>(head_dim)) {}
};

// Scratch of one worker of page_bounds.
struct BoundsScratch {
  float *lowest, *highest, *key;  // [head_dim] each
  BoundsScratch(ScratchLayout& l, uint32_t head_dim)
      : lowest(l.take<float>(head_dim)), highest(l.take<float>(head_dim)), key(l.take<float>(head_dim)) {}
};

// Scratch of one worker of key_diff.
struct KeyScratch {
  float *key, *sum;  // [head_dim] each
  KeyScratch(ScratchLayout& l, uint32_t head_dim)
      : key(l.take<float>(head_dim)), sum(l.take<float>(head_dim)) {}
};

// Scratch of one worker of attention and token_score: `vectors` queries of one KV head with a tile of its
// keys.
struct TileScratch {
  float *q, *rotated;  // [vectors][padded_width]
  float* angles;       // [head_dim]
  float* keys;         // [padded_width][kTileKeys]
  float* scores;       // [vectors][kTileKeys]
  float* out;          // [vectors][padded_width]
  float *peak, *sum;   // [vectors]
  uint32_t* visible;   // [vectors]
  TileScratch(ScratchLayout& l, uint32_t vectors, uint32_t head_dim) {
    const uint64_t width = padded_width(head_dim);
    q = l.take<float>(vectors * width);
    rotated = l.take<float>(vectors * width);
    angles = l.take<float>(head_dim);
    keys = l.take<float>(width * kTileKeys);
    scores = l.take<float>(uint64_t(vectors) * kTileKeys);
    out = l.take<float>(vectors * width);
    peak = l.take<float>(vectors);
    sum = l.take<float>(vectors);
    visible = l.take<uint32_t>(vectors);
  }
};

// Scratch of one worker of attend_all.
struct StoredTileScratch {
  TileScratch tile;
  float* decoded;  // [kTileKeys][head_dim]: keys or values of a tile whose rows have two formats
  StoredTileScratch(ScratchLayout& l, uint32_t vectors, uint32_t head_dim)
      : tile(l, vectors, head_dim), decoded(l.take<float>(uint64_t(kTileKeys) * head_dim)) {}
};

// Rows of a KV head's group that attention over the view processes at a time: about 120 queries, so that
// loading a tile of keys is 1/30 of the work on it.
inline uint32_t attention_rows(uint32_t group) { return group < 120 ? 120 / group : 1; }

// Attention over the pool divides the entries into at most this many parts, whose results are combined in
// order.
constexpr uint32_t kMaxParts = 32;

// Scratch that the workers of attention over the pool share.
struct PartScratch {
  float* low;         // [head_dim][kTileKeys]: cos and sin of each pair for positions 0 to 63
  float *peak, *sum;  // [kv heads][kMaxParts][group]
  float* out;         // [kv heads][kMaxParts][group][padded_width]
  PartScratch(ScratchLayout& l, uint32_t heads, uint32_t group, uint32_t head_dim) {
    const uint64_t vectors = uint64_t(heads) * kMaxParts * group;
    low = l.take<float>(uint64_t(head_dim) * kTileKeys);
    peak = l.take<float>(vectors);
    sum = l.take<float>(vectors);
    out = l.take<float>(vectors * padded_width(head_dim));
  }
};

// Scratch that the workers of query_score share; all members except the first are for a single row.
struct PowerScratch {
  float* low;     // as in PartScratch
  float* powers;  // [kv heads at once][tiles][group][kTileKeys]
  LogSum* parts;  // [kv heads at once][tiles][group]
  PowerScratch(ScratchLayout& l, uint64_t heads, uint32_t tiles, uint32_t group, uint32_t head_dim)
      : low(l.take<float>(uint64_t(head_dim) * kTileKeys)),
        powers(l.take<float>(heads * tiles * group * kTileKeys)),
        parts(l.take<LogSum>(heads * tiles * group)) {}
};

// Scratch that the workers of token_score or page_score share.
struct QueryScratch {
  float* q;  // [kv heads * group][padded_width]: rotated, averaged over rows, scaled
  QueryScratch(ScratchLayout& l, uint32_t heads, uint32_t head_dim)
      : q(l.take<float>(uint64_t(heads) * padded_width(head_dim))) {}
};

// Scratch of one worker of page_score: a KV head's queries with the bounds of a tile of pages.
struct PageScratch {
  float* angles;            // [head_dim]
  float *lowest, *highest;  // [head_dim][kTileKeys] each
  float* scores;            // [group][kTileKeys]
  PageScratch(ScratchLayout& l, uint32_t group, uint32_t head_dim)
      : angles(l.take<float>(head_dim)),
        lowest(l.take<float>(uint64_t(head_dim) * kTileKeys)),
        highest(l.take<float>(uint64_t(head_dim) * kTileKeys)),
        scores(l.take<float>(uint64_t(group) * kTileKeys)) {}
};

// Positions that a layer vote processes at a time.
constexpr uint32_t kVotePositions = 256;

// Scratch of one worker of a layer vote.
struct VoteScratch {
  float* scores;  // [query heads][kVotePositions]
  explicit VoteScratch(ScratchLayout& l, uint32_t heads)
      : scores(l.take<float>(uint64_t(heads) * kVotePositions)) {}
};

// The candidates of a max-pool over votes: those of every KV head, or those of the layer with their
// positions.
struct WindowScratch {
  float* votes;
  uint32_t* places;
  WindowScratch(ScratchLayout& l, uint64_t candidates)
      : votes(l.take<float>(candidates)), places(l.take<uint32_t>(candidates)) {}
};

}  // namespace thimble::cpu
