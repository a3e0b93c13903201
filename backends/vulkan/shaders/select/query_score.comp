// query_score for several rows: how much attention weight queries give to entries. A workgroup processes
// tiles of entries, one entry per thread, with some queries at a time. It sums their weights, or with SCORES,
// scores its entries with the sums.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = kQueryScoreTile) in;
layout(constant_id = 0) const uint kHeadDim = 128;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { uint k[]; };             // the runs of the window
layout(set = 0, binding = 3, std430) readonly buffer ChunkK { uint chunk_k[]; };  // from first_head on
layout(set = 0, binding = 4, std430) readonly buffer RopeTable { float rope_table[]; };
#ifdef SCORES
// Bits of floats, from first_head on
layout(set = 0, binding = 5, std430) readonly buffer Sums { uint sums[]; };
layout(set = 0, binding = 6, std430) writeonly buffer Cis { uint cis[]; };   // bits of floats
layout(set = 0, binding = 7, std430) writeonly buffer ChunkCis { uint chunk_cis[]; };
const uint kOperands = 7;
#else
layout(set = 0, binding = 5, std430) writeonly buffer Sums { uint sums[]; };
const uint kOperands = 5;
#endif
layout(push_constant) uniform Push {
  QueryScoreParams p;
  RunWindow window;
  uint base[kOperands];
} push;
#define ROPE push.p.rope
#define ROPE_BASE push.base[3]
#define KV_FORMAT_ID 1
#include "../kv_format.glsl"
#include "../log_sum.glsl"
#include "../rope.glsl"
#include "../soft_cap.glsl"

const uint kVectors = kHeadDim > 256 ? 4 : 8;  // queries at a time
shared float turned[kVectors][kHeadDim];
shared float shared_logits[kVectors][kQueryScoreTile];

#ifdef BLOCKS
KV_READER(pool, k, kKvFormat)
KV_READER(chunk, chunk_k, kKvFormat)
// Eight channels of a key that were read at once: their first one, a multiple of 8.
struct Near {
  uint first;
  vec4 low, high;
};
float channel_of(inout Near near, HeadState own, uint entry, uint channel) {
  if (near.first != (channel & ~7u)) {
    near.first = channel & ~7u;
    if (entry < own.n_entries) {
      const uint at = push.base[1] + (run_start(own, push.window) + entry) * KV_ROW_WORDS(kHeadDim);
      pool_eight(at, near.first, near.low, near.high);
    } else {
      const uint row = gl_WorkGroupID.y * push.p.chunk_capacity + entry - own.n_entries;
      chunk_eight(push.base[2] + row * KV_ROW_WORDS(kHeadDim), near.first, near.low, near.high);
    }
  }
  return (channel & 4) == 0 ? near.low[channel & 3] : near.high[channel & 3];
}
#else
float channel_of(HeadState own, uint entry, uint channel) {
  if (entry < own.n_entries)
    return kv_channel(k[push.base[1] + (run_start(own, push.window) + entry) * KV_ROW_WORDS(kHeadDim) + channel / 2], channel);
  const uint row = gl_WorkGroupID.y * push.p.chunk_capacity + entry - own.n_entries;
  return kv_channel(chunk_k[push.base[2] + row * KV_ROW_WORDS(kHeadDim) + channel / 2], channel);
}
#endif

// Loads rotated and scaled queries from the first one on; a vector is a query head of a row.
void read_queries(HeadState own, QuerySpan span, uint head, uint first, uint count) {
  for (uint i = gl_LocalInvocationIndex; i < count * kHeadDim / 2; i += kQueryScoreTile) {
    const uint v = i / (kHeadDim / 2), pair = i % (kHeadDim / 2), row = (first + v) / push.p.group;
    const uint from = push.base[0] + row * push.p.row_stride +
                      (head * push.p.group + (first + v) % push.p.group) * kHeadDim;
    const uvec2 channels = channels_of(pair);
    vec2 x = vec2(q[from + channels.x], q[from + channels.y]) * push.p.scale;
    if (pair < rope_pairs()) x = rotated_pair(x, rope_angle(query_position(step, span, row, ROPE.mode), pair));
    x *= query_weights(channels);
    turned[v][channels.x] = x.x;
    turned[v][channels.y] = x.y;
  }
}

// The logits of an entry for the loaded queries.
void multiply(HeadState own, uint entry, out float logits[kVectors]) {
  for (uint v = 0; v < kVectors; ++v) logits[v] = 0;
#ifdef BLOCKS
  Near near_x = Near(~0u, vec4(0), vec4(0)), near_y = near_x;
#endif
  for (uint pair = 0; pair < kHeadDim / 2; ++pair) {
    const uvec2 channels = channels_of(pair);
#ifdef BLOCKS
    vec2 x = vec2(channel_of(near_x, own, entry, channels.x), channel_of(near_y, own, entry, channels.y));
#else
    vec2 x = vec2(channel_of(own, entry, channels.x), channel_of(own, entry, channels.y));
#endif
    if (ROPE.mode == kRopeList && pair < rope_pairs()) x = rotated_pair(x, rope_angle(entry, pair));
    for (uint v = 0; v < kVectors; ++v) logits[v] += x.x * turned[v][channels.x] + x.y * turned[v][channels.y];
  }
  if (push.p.cap != 0)
    for (uint v = 0; v < kVectors; ++v) logits[v] = soft_cap(logits[v], push.p.cap);
}

// Where the sums of a vector begin.
uint sums_of(uint vector) {
  return push.base[4] + (gl_WorkGroupID.y * push.p.rows * push.p.group + vector) * kQueryScoreSums;
}

#ifdef SCORES

bool counts(float log_weight) {
  const uint bits = floatBitsToUint(log_weight);
  return bits != kMinusInfinity && (bits & 0x7fffffff) <= 0x7f800000;
}

// Scores the entries of a tile by the largest logarithm of a weight.
void work_on(HeadState own, QuerySpan span, uint head, uint tile) {
  const uint i = tile * kQueryScoreTile + gl_LocalInvocationIndex, vectors = span.rows * push.p.group;
  const uint entry = entry_of(span, min(i, span.count - 1));
  float score = kNoPeak;
  for (uint first = 0; first < vectors; first += kVectors) {
    const uint count = min(vectors - first, kVectors);
    read_queries(own, span, head, first, count);
    barrier();
    float logits[kVectors];
    multiply(own, entry, logits);
    for (uint v = 0; v < count; ++v) {
      const uint sum = sums[sums_of(first + v)];
      const float log_weight = logits[v] - uintBitsToFloat(sum);
      if (sum != kMinusInfinity && counts(log_weight)) score = max(score, log_weight);
    }
    barrier();
  }
  if (i < span.sinks || i >= span.sinks + span.scored) return;
  const uint bits = score == kNoPeak ? kMinusInfinity : floatBitsToUint(score);
  if (entry < own.n_entries)
    cis[push.base[5] + own.first + entry] = bits;
  else
    chunk_cis[push.base[6] + head * push.p.chunk_capacity + entry - own.n_entries] = bits;
}

void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const QuerySpan span = query_span(step, own, push.p, step_entries(step, own));
  for (uint tile = gl_WorkGroupID.x; tile * kQueryScoreTile < span.sinks + span.scored; tile += gl_NumWorkGroups.x)
    work_on(own, span, head, tile);
}

#else

// Computes the vectors' sums over tiles [begin, end).
void main() {
  const uint head = push.p.first_head + gl_WorkGroupID.y, own_i = gl_LocalInvocationIndex;
  const HeadState own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  const QuerySpan span = query_span(step, own, push.p, step_entries(step, own));
  const uint each = tiles_of_sum(span), begin = gl_WorkGroupID.x * each, end = min(begin + each, query_tiles(span));
  if (begin >= end) return;
  const uint vectors = span.rows * push.p.group;
  for (uint first = 0; first < vectors; first += kVectors) {
    const uint count = min(vectors - first, kVectors);
    read_queries(own, span, head, first, count);
    barrier();
    LogSum sum = kNoSum;  // for vector own_i
    for (uint tile = begin; tile < end; ++tile) {
      float logits[kVectors];
      const uint from = tile * kQueryScoreTile;
      multiply(own, entry_of(span, min(from + own_i, span.count - 1)), logits);
      for (uint v = 0; v < kVectors; ++v) shared_logits[v][own_i] = logits[v];
      barrier();
      if (own_i < count) {
        const uint seen = entries_seen(span, (first + own_i) / push.p.group);
        const uint n = seen > from ? min(seen - from, kQueryScoreTile) : 0;
        for (uint i = 0; i < n; ++i) sum = added(sum, shared_logits[own_i][i]);
      }
      barrier();
    }
    if (own_i < count) sums[sums_of(first + own_i) + gl_WorkGroupID.x] = log_sum_bits(sum);
  }
}

#endif
