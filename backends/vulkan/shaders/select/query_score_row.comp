// query_score of a single row. It has few queries, so keys pass by as fast as they can be read. Eight threads
// share an entry; each processes every eighth pair of its channels. A workgroup sums the weights of its
// tiles, or with SCORES, scores its entries with the sums.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const bool kHasList = false;

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer K { uint k[]; };             // the runs of the window
layout(set = 0, binding = 3, std430) readonly buffer ChunkK { uint chunk_k[]; };  // from first_head on
layout(set = 0, binding = 4, std430) readonly buffer List { uint list[]; };
layout(set = 0, binding = 5, std430) readonly buffer RopeTable { float rope_table[]; };
#ifdef SCORES
// Bits of floats, from first_head on
layout(set = 0, binding = 6, std430) readonly buffer Sums { uint sums[]; };
layout(set = 0, binding = 7, std430) writeonly buffer Cis { float cis[]; };
layout(set = 0, binding = 8, std430) writeonly buffer ChunkCis { float chunk_cis[]; };
const uint kOperands = 8;
#else
layout(set = 0, binding = 6, std430) writeonly buffer Sums { uint sums[]; };
const uint kOperands = 6;
#endif
layout(push_constant) uniform Push {
  QueryScoreParams p;
  RunWindow window;
  uint base[kOperands];
} push;
#define ROPE push.p.rope
#define ROPE_BASE push.base[4]
#define LIST_BASE push.base[3]
#define LIST_CAPACITY push.p.list_capacity
#include "../exp.glsl"
#define KV_FORMAT_ID 2
#include "../kv_format.glsl"
#include "../list.glsl"
#include "../log_sum.glsl"
#include "../rope.glsl"
#include "../soft_cap.glsl"

// kEntries: entries of a tile per thread
const uint kThreads = 128, kSharers = 8, kEntries = kQueryScoreTile * kSharers / kThreads;
const uint kVectors = 4;                                     // queries at a time
const uint kLogits = kVectors * kQueryScoreTile / kThreads;  // logits per thread, all for the same entry
shared float turned[kVectors][kHeadDim];
shared float products[kVectors * kQueryScoreTile][kSharers + 1];  // padded by one to avoid bank conflicts
shared vec2 of_threads[kThreads * kLogits];

HeadState own;
QuerySpan span;
uint head;

uint entry_in_tile() { return gl_LocalInvocationIndex % kQueryScoreTile; }
// The query, of those processed at a time, of the thread's logit i.
uint vector_of(uint i) { return gl_LocalInvocationIndex / kQueryScoreTile + i * (kThreads / kQueryScoreTile); }
// Where the sums of a vector begin.
uint sums_of(uint vector) { return push.base[5] + (gl_WorkGroupID.y * push.p.group + vector) * kQueryScoreSums; }

// Rotates and scales the queries from the first one on for a tile. Under kRopeList, keys rotate by their
// index in the tile, so 64 rows of the table suffice for all of them, and queries rotate by the remaining
// difference. Queries with weights rotate to their position first, and then back by that of the tile.
void turn_queries(uint tile, uint first) {
  const bool by_place = ROPE.mode == kRopeList;
  uint position = query_position(step, span, 0, ROPE.mode);
  const bool weighted = ROPE.query_weight != 0;
  const uint begin = by_place ? min(position, entry_of(span, tile * kQueryScoreTile)) : 0;
  if (!weighted) position -= begin;
  for (uint i = gl_LocalInvocationIndex; i < kVectors * kHeadDim / 2; i += kThreads) {
    const uint v = i / (kHeadDim / 2), pair = i % (kHeadDim / 2);
    const uint from = push.base[0] + (head * push.p.group + min(first + v, push.p.group - 1)) * kHeadDim;
    const uvec2 channels = channels_of(pair);
    vec2 x = vec2(q[from + channels.x], q[from + channels.y]) * push.p.scale;
    if (pair < rope_pairs())  // a place lacks the model's attention factor
      x = rotated_pair(x, rope_angle(position, pair) * (by_place && !weighted ? rope_factor() : 1));
    if (weighted) {
      x *= query_weights(channels);
      if (by_place && pair < rope_pairs()) x = rotated_back(x, rope_angle(begin, pair));
    }
    turned[v][channels.x] = x.x;
    turned[v][channels.y] = x.y;
  }
}

#ifdef BLOCKS
KV_READER(pool, k, kKvFormat)
KV_READER(chunk, chunk_k, kKvFormat)
// Two channels of a row of the pool or of the chunk.
vec2 two_channels(bool pooled, uint row, uvec2 c) {
  if (pooled) return vec2(pool_channel(row, c.x), pool_channel(row, c.y));
  return vec2(chunk_channel(row, c.x), chunk_channel(row, c.y));
}
#endif

// Products of the thread's channels of keys and queries. Indices after the last entry use the last entry.
void multiply(uint tile) {
  const uint lane = gl_LocalInvocationIndex % kSharers, first_entry = gl_LocalInvocationIndex / kSharers * kEntries;
  bool pooled[kEntries];
  uint rows[kEntries];
  [[unroll]] for (uint e = 0; e < kEntries; ++e) {
    const uint i = min(tile * kQueryScoreTile + first_entry + e, span.count - 1);
    const uint entry = list_entry(head, entry_of(span, i));
    pooled[e] = entry < own.n_entries;
    rows[e] = pooled[e] ? push.base[1] + (run_start(own, push.window) + entry) * KV_ROW_WORDS(kHeadDim)
                        : push.base[2] + (gl_WorkGroupID.y * push.p.chunk_capacity + entry - own.n_entries) * KV_ROW_WORDS(kHeadDim);
  }
  vec4 sum[kEntries];
  [[unroll]] for (uint e = 0; e < kEntries; ++e) sum[e] = vec4(0);
  for (uint pair = lane; pair < kHeadDim / 2; pair += kSharers) {
    const uvec2 c = channels_of(pair);
    const bool turns = ROPE.mode == kRopeList && pair < rope_pairs();
    const vec4 x = vec4(turned[0][c.x], turned[1][c.x], turned[2][c.x], turned[3][c.x]),
               y = vec4(turned[0][c.y], turned[1][c.y], turned[2][c.y], turned[3][c.y]);
    [[unroll]] for (uint e = 0; e < kEntries; ++e) {
#ifdef BLOCKS
      vec2 key = two_channels(pooled[e], rows[e], c);
#else
      const uvec2 at = rows[e] + c / 2, words = pooled[e] ? uvec2(k[at.x], k[at.y]) : uvec2(chunk_k[at.x], chunk_k[at.y]);
      vec2 key = vec2(kv_channel(words.x, c.x), kv_channel(words.y, c.y));
#endif
      if (turns) key = rotated_pair(key, rope_row(first_entry + e, pair));
      sum[e] += key.x * x + key.y * y;
    }
  }
  [[unroll]] for (uint e = 0; e < kEntries; ++e)
    [[unroll]] for (uint v = 0; v < kVectors; ++v) products[v * kQueryScoreTile + first_entry + e][lane] = sum[e][v];
}

// The thread's logits for the queries from the first one on; logits after the last query must not be used.
// All threads must call this.
float[kLogits] logits_of(uint tile, uint first) {
  barrier();
  turn_queries(tile, first);
  barrier();
  multiply(tile);
  barrier();
  float logits[kLogits];
  [[unroll]] for (uint i = 0; i < kLogits; ++i) {
    logits[i] = 0;
    for (uint lane = 0; lane < kSharers; ++lane)
      logits[i] += products[vector_of(i) * kQueryScoreTile + entry_in_tile()][lane];
    if (push.p.cap != 0) logits[i] = soft_cap(logits[i], push.p.cap);
  }
  return logits;
}

#ifdef SCORES

bool counts(float log_weight) {
  const uint bits = floatBitsToUint(log_weight);
  return bits != kMinusInfinity && (bits & 0x7fffffff) <= 0x7f800000;
}

// Scores the entries of a tile by the sum of their weights.
void work_on(uint tile) {
  float score = 0;
  for (uint first = 0; first < push.p.group; first += kVectors) {
    const float logits[kLogits] = logits_of(tile, first);
    for (uint i = 0; i < kLogits; ++i) {
      const uint vector = first + vector_of(i);
      if (vector >= push.p.group) continue;
      const uint sum = sums[sums_of(vector)];
      const float log_weight = logits[i] - uintBitsToFloat(sum);
      if (sum != kMinusInfinity && counts(log_weight)) score += exp_ulp(log_weight);
    }
  }
  barrier();
  of_threads[gl_LocalInvocationIndex].x = score;
  barrier();
  const uint i = tile * kQueryScoreTile + gl_LocalInvocationIndex;
  if (gl_LocalInvocationIndex >= kQueryScoreTile || i >= span.count) return;
  for (uint from = kQueryScoreTile; from < kThreads; from += kQueryScoreTile)
    score += of_threads[from + gl_LocalInvocationIndex].x;
  const uint entry = entry_of(span, i);
  if (entry < own.n_entries)
    cis[push.base[6] + own.first + entry] = score;
  else
    chunk_cis[push.base[7] + head * push.p.chunk_capacity + entry - own.n_entries] = score;
}

#else

// The sum over all threads of a query, in the first of them.
LogSum sum_of_entries(uint i, LogSum sum) {
  const uint at = i * kThreads + gl_LocalInvocationIndex;
  for (uint apart = kQueryScoreTile / 2; apart > 0; apart /= 2) {
    barrier();
    of_threads[at] = vec2(sum.peak, sum.sum);
    barrier();
    if (entry_in_tile() >= apart) continue;
    const vec2 other = of_threads[at + apart];
    sum = added(sum, LogSum(other.x, other.y));
  }
  return sum;
}

// Computes the sums over tiles [begin, end).
void add_up(uint begin, uint end) {
  for (uint first = 0; first < push.p.group; first += kVectors) {
    LogSum own_sums[kLogits];
    [[unroll]] for (uint i = 0; i < kLogits; ++i) own_sums[i] = kNoSum;
    for (uint tile = begin; tile < end; ++tile) {
      const float logits[kLogits] = logits_of(tile, first);
      if (tile * kQueryScoreTile + entry_in_tile() >= span.count) continue;
      [[unroll]] for (uint i = 0; i < kLogits; ++i) own_sums[i] = added(own_sums[i], logits[i]);
    }
    [[unroll]] for (uint i = 0; i < kLogits; ++i) {
      const LogSum sum = sum_of_entries(i, own_sums[i]);
      const uint vector = first + vector_of(i);
      if (entry_in_tile() == 0 && vector < push.p.group) sums[sums_of(vector) + gl_WorkGroupID.x] = log_sum_bits(sum);
    }
  }
}

#endif

void main() {
  head = push.p.first_head + gl_WorkGroupID.y;
  own = head_states[push.p.head_state + head];
  if (!is_in(own, push.window)) return;
  span = query_span(step, own, push.p, list_count(head, step_entries(step, own)));
#ifdef SCORES
  for (uint tile = gl_WorkGroupID.x; tile < query_tiles(span); tile += gl_NumWorkGroups.x) work_on(tile);
#else
  const uint each = tiles_of_sum(span), begin = gl_WorkGroupID.x * each;
  add_up(begin, min(begin + each, query_tiles(span)));
#endif
}
