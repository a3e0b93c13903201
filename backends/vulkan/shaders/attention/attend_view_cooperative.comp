// attention to the view with cooperative matrices: softmax(q k^T) v in tiles of keys, f16 times f16 summed in
// f32, with a running maximum and sum in base 2. A workgroup has 16 queries of one KV head per subgroup and
// processes the keys that they see: all of them, or a part of them if the head has more keys than others. A
// subgroup has all scores and channels of its queries, so it waits for the others only between tiles.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#pragma use_vulkan_memory_model

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint kThreads = 128;
layout(constant_id = 1) const uint kHeadDim = 128;  // a multiple of 16, at most 256
layout(constant_id = 2) const uint kSubgroups = 4;
layout(constant_id = 3) const bool kHasList = false;
layout(constant_id = 4) const bool kEqualHeads = false;  // AttentionParams
layout(constant_id = 5) const bool kCaps = false;
layout(constant_id = 6) const bool kHasSinks = false;
layout(constant_id = 7) const bool kHasIndices = false;
const bool kAligned = true;
const uint kSize = 16, kQuads = kSize / 4;  // rows and columns of a matrix; vectors of four per row
const uint kRows = kSubgroups * kSize, kKeys = 64, kLanes = kThreads / kSubgroups;
const uint kFirstValue = 0;
#include "attend_view.glsl"

#define MATRIX(type, use) coopmat<type, gl_ScopeSubgroup, kSize, kSize, gl_MatrixUse##use>
// Repeats for each matrix in a row of q, k, v. Matrices are separate variables and not arrays, because a
// compiler may keep arrays in memory: NVIDIA's does, at a third of the speed.
const uint kDepth = kHeadDim / kSize;
#define EACH_DEPTH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)

// All rows in shared memory have an odd number of 16-byte units, so that eight of them are in different
// banks.
const uint kStride = kHeadDim / 4 + 2, kScoreStride = kKeys / 4 + 1;
const uint kTileRows = kKeys > kRows ? kKeys : kRows;  // the queries pass through it too
shared f16vec4 tile[kTileRows * kStride];
// For each query the scores of a tile; then their weights in f16, followed by the factor for its output; at
// the end its output.
shared vec4 scores[kRows * kScoreStride];
const uint kFactors = kKeys / 8;
void store_unit(uint row, uint unit, uvec4 halves) {
  tile[row * kStride + 2 * unit] = f16vec4(unpackFloat2x16(halves.x), unpackFloat2x16(halves.y));
  tile[row * kStride + 2 * unit + 1] = f16vec4(unpackFloat2x16(halves.z), unpackFloat2x16(halves.w));
}
vec2 packed(vec4 x) { return uintBitsToFloat(uvec2(packFloat2x16(f16vec2(x.xy)), packFloat2x16(f16vec2(x.zw)))); }

// For the softmax, kSharers lanes share a row: lane, lane + kSize, ...
const uint kSharers = kLanes / kSize, kQuadsEach = kKeys / 4 / kSharers;
float max_of_sharers(float x) {
  [[unroll]] for (uint i = kSize; i < kLanes; i *= 2) x = max(x, subgroupShuffleXor(x, i));
  return x;
}
float sum_of_sharers(float x) {
  [[unroll]] for (uint i = kSize; i < kLanes; i *= 2) x += subgroupShuffleXor(x, i);
  return x;
}

void main() {
  const uint thread = gl_LocalInvocationIndex, lane = gl_SubgroupInvocationID;
  const uint vectors = step.n_rows * push.p.group, groups = query_groups();
  if (gl_WorkGroupID.y >= groups || !find_head()) return;
  // Workgroups with the most keys start first, so that none of them runs alone at the end.
  const uint first = (groups - 1 - gl_WorkGroupID.y) * kRows;
  const Work work = work_of(local_head, first, min(first + kRows, vectors) - 1);
  const KeyPart taken = own_keys(work);
  if (push.p.first_entry >= work.count || share.part >= taken.busy) return;
  const bool begins = is_first_pass() || share.part > 0, ends = is_last_pass(work) && taken.busy == 1;
  const uint first_index = work.first_index, begin = taken.begin, end = taken.end;

  for (uint at = thread; at < kRows * kUnits; at += kThreads)
    store_unit(at / kUnits, at % kUnits, query_unit(first + at / kUnits, at % kUnits, first_index));
  barrier();
  const uint sub_row = gl_SubgroupID * kSize, sub_scores = sub_row * kScoreStride;  // the subgroup's first row
#define BEGIN(d)                                                                                                             \
  MATRIX(float16_t, A) query##d;                                                                                             \
  MATRIX(float, Accumulator) out##d = MATRIX(float, Accumulator)(0.0);                                                       \
  if (d < kDepth) coopMatLoad(query##d, tile, sub_row * kStride + d * kQuads, kStride, gl_CooperativeMatrixLayoutRowMajor);
  EACH_DEPTH(BEGIN)

  // The row whose softmax this lane and its sharers compute: all of them know its peak, each has a part of
  // the sum.
  const uint own_row = sub_row + lane % kSize, part = lane / kSize, own_vector = first + own_row;
  const uint seen = min(seen_end(first_index, own_vector), end), unseen = seen_begin(first_index, own_vector);
  const uint own_scores = own_row * kScoreStride;
  float peak = kNoPeak, sum = 0;
  if (kHasSinks && is_first_pass() && share.part == 0 && own_vector < vectors) {
    peak = sink_of(own_vector);
    if (part == 0) sum = 1;
  }
  // Load the results of earlier passes, and store those of this one, as matrices of channels.
  if (!begins) {
    if (own_vector < vectors) {
      peak = ml[ml_start(own_vector)];
      if (part == 0) sum = ml[ml_start(own_vector) + 1];
    }
#define COME(d)                                                                                                \
    if (d < kDepth) {                                                                                          \
      for (uint i = part; i < kQuads; i += kSharers) {                                                         \
        scores[own_scores + i] = own_vector < vectors ? y_quad(own_vector, d * kSize + 4 * i) : vec4(0);       \
      }                                                                                                        \
      subgroupBarrier();                                                                                       \
      coopMatLoad(out##d, scores, sub_scores, kScoreStride, gl_CooperativeMatrixLayoutRowMajor);               \
      subgroupBarrier();                                                                                       \
    }
    EACH_DEPTH(COME)
  }

  if (begin < end) load_keys(begin - push.p.first_entry, end - begin);
  for (uint key = begin; key < end; key += kKeys) {
    const uint row = key - push.p.first_entry;
    barrier();  // the queries and the previous values are no longer read
    store_tile();
    barrier();
    load_values(row, end - key);

    [[unroll]] for (uint c = 0; c < kKeys / kSize; ++c) {
      MATRIX(float, Accumulator) dots = MATRIX(float, Accumulator)(0.0);
      MATRIX(float16_t, B) keys;  // a row of keys is a column
#define SCORE(d)                                                                                                              \
      if (d < kDepth) {                                                                                                       \
        coopMatLoad(keys, tile, c * kSize * kStride + d * kQuads, kStride, gl_CooperativeMatrixLayoutColumnMajor);            \
        dots = coopMatMulAdd(query##d, keys, dots);                                                                           \
      }
      EACH_DEPTH(SCORE)
      coopMatStore(dots, scores, sub_scores + c * kQuads, kScoreStride, gl_CooperativeMatrixLayoutRowMajor);
    }
    subgroupBarrier();

    vec4 own[kQuadsEach];
    float top = peak;
    [[unroll]] for (uint i = 0; i < kQuadsEach; ++i) own[i] = scores[own_scores + part * kQuadsEach + i];
    if (kCaps)
      [[unroll]] for (uint i = 0; i < kQuadsEach; ++i)
        [[unroll]] for (uint e = 0; e < 4; ++e) own[i][e] = capped(own[i][e]);
    if (key < work.all_begin || key + kKeys > min(work.all_end, end))
      [[unroll]] for (uint i = 0; i < kQuadsEach; ++i)
        [[unroll]] for (uint e = 0; e < 4; ++e) {
          const uint entry = key + (part * kQuadsEach + i) * 4 + e;
          if (entry >= seen || entry < unseen) own[i][e] = kNoPeak;
        }
    [[unroll]] for (uint i = 0; i < kQuadsEach; ++i) top = max(top, max(max(own[i].x, own[i].y), max(own[i].z, own[i].w)));
    top = max_of_sharers(top);
    // If the row has not seen a key yet, weights are 0
    const float shrink = exp2(peak - top), base = max(top, kNoPeak / 2);
    peak = top;
    sum *= shrink;
    subgroupBarrier();  // all scores have been read
    [[unroll]] for (uint i = 0; i < kQuadsEach; i += 2) {
      const vec4 low = exp2(own[i] - base), high = exp2(own[i + 1] - base);
      sum += ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
      scores[own_scores + (part * kQuadsEach + i) / 2] = vec4(packed(low), packed(high));
    }
    const bool shrinks = subgroupMin(shrink) < 1;
    if (shrinks)
      for (uint i = part; i < kQuads; i += kSharers) scores[own_scores + kFactors + i] = vec4(shrink);
    barrier();  // the keys are no longer read
    store_tile();
    barrier();

    if (key + kKeys < end) load_keys(row + kKeys, end - key - kKeys);
    if (shrinks) {
      MATRIX(float, Accumulator) factors;
      coopMatLoad(factors, scores, sub_scores + kFactors, kScoreStride, gl_CooperativeMatrixLayoutRowMajor);
#define SHRINK(d) \
      if (d < kDepth) out##d = out##d * factors;
      EACH_DEPTH(SHRINK)
    }
    [[unroll]] for (uint c = 0; c < kKeys / kSize; ++c) {
      MATRIX(float16_t, A) weights;
      MATRIX(float16_t, B) values;
      coopMatLoad(weights, scores, sub_scores + c * kQuads / 2, kScoreStride, gl_CooperativeMatrixLayoutRowMajor);
#define ADD(d)                                                                                                          \
      if (d < kDepth) {                                                                                                 \
        coopMatLoad(values, tile, c * kSize * kStride + d * kQuads, kStride, gl_CooperativeMatrixLayoutRowMajor);       \
        out##d = coopMatMulAdd(weights, values, out##d);                                                                \
      }
      EACH_DEPTH(ADD)
    }
  }

  sum = sum_of_sharers(sum);
  if (!ends && part == 0 && own_vector < vectors) leave_stat(own_vector, vec2(peak, sum));
  const float scale = ends ? 1 / sum : 1;
#define GO(d)                                                                                                            \
  if (d < kDepth) {                                                                                                      \
    subgroupBarrier();                                                                                                   \
    coopMatStore(out##d, scores, sub_scores, kScoreStride, gl_CooperativeMatrixLayoutRowMajor);                          \
    subgroupBarrier();                                                                                                   \
    for (uint i = part; i < kQuads; i += kSharers)                                                                       \
      if (own_vector < vectors) leave_quad(own_vector, d * kSize + 4 * i, scores[own_scores + i] * scale);               \
  }
  EACH_DEPTH(GO)
  finish(first, taken, is_last_pass(work));
}
