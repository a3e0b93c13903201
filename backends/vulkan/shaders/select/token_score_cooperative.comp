// token_score with cooperative matrices: a subgroup multiplies 16 keys at a time with its queries, f16 times
// f16 summed in f32. A query is the sum of two f16 vectors, in units of a power of two: columns h and
// kMostHeads + h of the product. A subgroup copies its own keys to shared memory, with the next ones in
// flight, and does not wait for others.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#pragma use_vulkan_memory_model
#include "token_score.glsl"
#include "../lanes.glsl"

#define MATRIX(type, use) coopmat<type, gl_ScopeSubgroup, kSize, kSize, gl_MatrixUse##use>
const uint kSize = 16, kQuads = kSize / 4;  // rows and columns of a matrix; vectors of four per row
const uint kDepth = kHeadDim / kSize;       // kHeadDim: a multiple of 16, at most 256
// Repeats for each matrix in a row of keys or queries. Matrices are separate variables and not arrays,
// because a compiler may keep arrays in memory, as NVIDIA's does.
#define EACH_DEPTH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

// All rows in shared memory have an odd number of 16-byte units, so that eight of them are in different
// banks.
const uint kStride = kHeadDim / 4 + 2, kScoreStride = kSize / 4 + 1;
const uint kSubgroups = 128 / kLanes, kTile = kSubgroups * kSize;
const uint kScoreQuads = kTile * kScoreStride, kQueryQuads = kHeads * kUnits * 2;
// The subgroups' keys; before that the queries in halves, [2][kMostHeads]
shared f16vec4 tile[kTile * kStride];
// The subgroups' products, [keys]{columns}; before that the queries.
shared vec4 room[kScoreQuads > kQueryQuads ? kScoreQuads : kQueryQuads];
shared vec4 query_units[kMostHeads / 4];
shared vec2 of_subgroups[kHeads * kSubgroups];  // LogSum

#include "token_score_queries.glsl"

// token_score.comp contains the same code in its main(): as functions it took 18.4 us instead of 17.7 for
// 16,740 entries, and page_score 23.5 instead of 18.1 (one H100).

// The work of a workgroup: tiles first, first + stride and so on of a KV head, with `heads` of its query
// heads.
struct Part {
  uint local_head, head;  // within the dispatch, within the layer
  uint heads, first_query;
  uint first, stride, end;
  uint index, busy;  // index of this part, and the number of parts of the head that have work
  uint sums;         // where those of the first query head begin in part_sums
  HeadState own;
};
// Returns false if there is nothing to score; whole workgroups call this.
bool find_part(out Part part) {
  const Share share = find_share(gl_WorkGroupID.y, gl_WorkGroupID.z, gl_NumWorkGroups.y, gl_NumWorkGroups.z);
  if (share.local_head >= push.p.heads) return false;
  thread = gl_SubgroupID * kLanes + gl_SubgroupInvocationID;
  const uint first_head = gl_WorkGroupID.x * kHeads;
  part.local_head = share.local_head;
  part.head = push.p.first_head + share.local_head;
  part.heads = min(kHeads, push.p.group - first_head);
  part.first_query = share.local_head * push.p.group + first_head;
  part.own = head_states[push.p.head_state + part.head];
  const uint n = units_of(part.own);
  if (!selects(step, n) || !is_in(part.own, push.window)) return false;
  part.first = step.n_init + share.part * kTile;
  part.stride = share.parts * kTile;
  part.end = middle_end(step, n);
  if (part.first >= part.end) return false;
  part.index = share.part;
  part.busy = min((part.end - step.n_init + kTile - 1) / kTile, share.parts);
  part.sums = push.base[6] / 2 + part.first_query * kMostScoreParts;
  return true;
}
// Writes the other results, once it is known that scores are computed.
void prepare_parts(Part part) {
  // Parts that do not exist must be empty for the shader that reads all parts
  if (kLeavesParts && part.index == 0)
    for (uint i = thread; i < part.heads * kMostScoreParts; i += 128)
      if (i % kMostScoreParts >= part.busy) part_sums[part.sums + i] = vec2(kNoPeak, 0);
  if (part.local_head == 0 && gl_WorkGroupID.x == 0)
    for (uint i = part.index * 128 + thread; i < kClears; i += part.busy * 128) cleared[push.base[9] + i] = 0;
}

// leave_sum: one thread stores the part's sum of a query head. The next function combines the heads' sums
// when all parts are stored; all threads call it.
void leave_sum(Part part, uint head, LogSum sum) {
  part_sums[part.sums + head * kMostScoreParts + part.index] = vec2(sum.peak, sum.sum);
}
void add_up_parts(Part part) {
  if (kLeavesParts) return;
  if (!finishes_last(push.base[7] + part.local_head * gl_NumWorkGroups.x + gl_WorkGroupID.x, part.busy)) return;
  const uint own_head = thread / kSharers, sharer = thread % kSharers;
  vec2 of_parts[kPartsEach];
  float peak = kNoPeak, sum = 0;
  [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
    const uint own_part = sharer + kSharers * i;
    of_parts[i] = vec2(kNoPeak, 0);
    if (own_part < part.busy && own_head < part.heads)
      of_parts[i] = part_sums[part.sums + own_head * kMostScoreParts + own_part];
    peak = max(peak, of_parts[i].x);
  }
  peak = max_of_threads(peak, kSharers);
  [[unroll]] for (uint i = 0; i < kPartsEach; ++i) sum += of_parts[i].y * exp(of_parts[i].x - peak);
  sum = sum_of_threads(sum, kSharers);
  if (sharer == 0 && own_head < part.heads)
    lse[push.base[8] + push.p.first_head * push.p.group + part.first_query + own_head] = log_sum_bits(LogSum(peak, sum));
}

// Splits the queries into halves. The unit is such that the largest channel is 2^14 to 2^15 units. The upper
// half has the bits of a channel that f16 keeps, selected by a mask: a compiler may remove a conversion to
// f16 and back, and NVIDIA's did. The lower half has an error below 2^-10 of itself, and is less than 2^-10
// of the channel.
void split_queries() {
  const uint lane = gl_SubgroupInvocationID, kBeyondHalf = 0x1fff;
  for (uint h = gl_SubgroupID; h < kMostHeads; h += kSubgroups) {
    float most = 0;
    if (h < kHeads)
      for (uint c = lane; c < kHeadDim; c += kLanes) most = max(most, abs(room[h * kUnits * 2 + c / 4][c % 4]));
    const int exponent = int(floatBitsToUint(max_of_lanes(most)) >> 23) - 127, shift = min(14 - exponent, 126);
    const float scale = uintBitsToFloat(uint(127 + shift) << 23);
    for (uint quad = lane; quad < kHeadDim / 4; quad += kLanes) {
      vec4 x = vec4(0);
      if (h < kHeads) x = room[h * kUnits * 2 + quad] * scale;
      const vec4 high = uintBitsToFloat(floatBitsToUint(x) & ~kBeyondHalf);
      tile[h * kStride + quad] = f16vec4(high);
      tile[(kMostHeads + h) * kStride + quad] = f16vec4(x - high);
    }
    if (lane == 0) query_units[h / 4][h % 4] = uintBitsToFloat(uint(127 - shift) << 23);
  }
}

// A lane copies some units of a subgroup's keys, which are consecutive.
const uint kCopies = (kSize * kUnits + kLanes - 1) / kLanes;
uvec4 keys[kCopies];
void fetch_keys(uint row, uint first, uint end) {
  [[unroll]] for (uint i = 0; i < kCopies; ++i)
    keys[i] = k4[row + min(first * kUnits + i * kLanes + gl_SubgroupInvocationID, end * kUnits - 1)];
}
void store_keys() {
  [[unroll]] for (uint i = 0; i < kCopies; ++i) {
    const uint at = i * kLanes + gl_SubgroupInvocationID, key = gl_SubgroupID * kSize + at / kUnits;
    if (at >= kSize * kUnits) continue;
    const uint to = key * kStride + at % kUnits * 2;
    const uvec4 halves = kv_halves(keys[i]);
    tile[to] = f16vec4(unpackFloat2x16(halves.x), unpackFloat2x16(halves.y));
    tile[to + 1] = f16vec4(unpackFloat2x16(halves.z), unpackFloat2x16(halves.w));
  }
}

// For the scores, a lane has one key, and quads of heads for it.
const uint kQuadLanes = kLanes / kSize, kQuadsEach = ((kHeads + 3) / 4 + kQuadLanes - 1) / kQuadLanes;

void main() {
  // The gate is loaded together with the step, and the first keys before the gate is tested, as in
  // token_score.comp.
  const bool hits = kHasGate && gate[push.base[4]] != 0;
  Part part;
  if (!find_part(part)) return;
  const uint own_key = gl_SubgroupID * kSize;
  const uint row = push.base[2] / 4 + first_row(part.own, part.head) * kUnits;
  fetch_keys(row, part.first + own_key, part.end);
  if (hits) return;
  prepare_parts(part);
  rotate_queries(part.first_query, part.heads);
  barrier();
  split_queries();
  barrier();
#define BEGIN(d)                  \
  MATRIX(float16_t, B) query##d;  \
  if (d < kDepth) coopMatLoad(query##d, tile, d * kQuads, kStride, gl_CooperativeMatrixLayoutColumnMajor);
  EACH_DEPTH(BEGIN)
  const uint key = gl_SubgroupInvocationID % kSize, first_quad = gl_SubgroupInvocationID / kSize;
  vec4 own_units[kQuadsEach];
  LogSum total[kQuadsEach * 4];
  [[unroll]] for (uint i = 0; i < kQuadsEach; ++i) {
    own_units[i] = query_units[min(first_quad + i * kQuadLanes, kMostHeads / 4 - 1)];
    [[unroll]] for (uint e = 0; e < 4; ++e) total[i * 4 + e] = kNoSum;
  }
  barrier();  // keys replace the queries

  const uint to = push.base[5] + (push.p.first_head * push.p.group + part.first_query) * push.p.score_capacity;
  [[dont_unroll]] for (uint first = part.first + own_key; first < part.end; first += part.stride) {
    store_keys();
    subgroupBarrier();
    fetch_keys(row, min(first + part.stride, part.end - 1), part.end);
    MATRIX(float, Accumulator) dots = MATRIX(float, Accumulator)(0.0);
    MATRIX(float16_t, A) rows;
#define MULTIPLY(d)                                                                                                \
    if (d < kDepth) {                                                                                              \
      coopMatLoad(rows, tile, own_key * kStride + d * kQuads, kStride, gl_CooperativeMatrixLayoutRowMajor);        \
      dots = coopMatMulAdd(rows, query##d, dots);                                                                  \
    }
    EACH_DEPTH(MULTIPLY)
    coopMatStore(dots, room, own_key * kScoreStride, kScoreStride, gl_CooperativeMatrixLayoutRowMajor);
    subgroupBarrier();
    const uint at = (own_key + key) * kScoreStride, entry = first + key;
    [[unroll]] for (uint i = 0; i < kQuadsEach; ++i) {
      const uint quad = min(first_quad + i * kQuadLanes, kMostHeads / 4 - 1);
      const vec4 scores = (room[at + quad] + room[at + kMostHeads / 4 + quad]) * own_units[i];
      [[unroll]] for (uint e = 0; e < 4; ++e) {
        const uint h = (first_quad + i * kQuadLanes) * 4 + e;
        if (h >= part.heads || entry >= part.end) continue;
        all_scores[to + h * push.p.score_capacity + entry] = scores[e];
        total[i * 4 + e] = added(total[i * 4 + e], scores[e]);
      }
    }
  }

  // Reduce over lanes of the same heads, then over subgroups.
  [[unroll]] for (uint i = 0; i < kQuadsEach * 4; ++i) {
    float peak = total[i].peak;
    [[unroll]] for (uint apart = 1; apart < kSize; apart *= 2) peak = max(peak, subgroupShuffleXor(peak, apart));
    float sum = total[i].sum * exp(total[i].peak - peak);
    [[unroll]] for (uint apart = 1; apart < kSize; apart *= 2) sum += subgroupShuffleXor(sum, apart);
    const uint h = (first_quad + i / 4 * kQuadLanes) * 4 + i % 4;
    if (key == 0 && h < kHeads) of_subgroups[h * kSubgroups + gl_SubgroupID] = vec2(peak, sum);
  }
  barrier();
  if (thread < part.heads) {
    LogSum sum = kNoSum;
    for (uint i = 0; i < kSubgroups; ++i) {
      const vec2 other = of_subgroups[thread * kSubgroups + i];
      sum = added(sum, LogSum(other.x, other.y));
    }
    leave_sum(part, thread, sum);
  }
  add_up_parts(part);
}
