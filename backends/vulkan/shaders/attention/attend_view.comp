// attention to the view: softmax(q k^T) v in tiles of keys, with a running maximum and sum in base 2. A
// workgroup processes kRows queries of one KV head (rows and the heads of their group in one sequence) with
// the keys that they see: all of them, or a part of them if the head has more keys than others.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require

const uint kThreads = 128;
layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const uint kRows = 64;  // 8, 32, 64
layout(constant_id = 2) const uint kKeys = 64;  // 16, 32, 64: keys per tile
layout(constant_id = 3) const bool kHasList = false;
layout(constant_id = 4) const bool kAligned = false;  // rows of k and v consist of whole uvec4
layout(constant_id = 5) const uint kLanes = 32;        // lanes per subgroup
layout(constant_id = 6) const bool kEqualHeads = false;  // AttentionParams
layout(constant_id = 7) const bool kCaps = false;
layout(constant_id = 8) const bool kHasSinks = false;
layout(constant_id = 9) const bool kHasIndices = false;
layout(constant_id = 10) const uint kFirstValue = 0;

#include "attend_view.glsl"

// Stride of rows in shared memory, in units; odd, so that neighbouring rows are in different banks
const uint kStride = kUnits + 1;
shared uvec4 queries[kRows * kStride];
shared uvec4 tile[kKeys * kStride];
void store_unit(uint row, uint unit, uvec4 halves) { tile[row * kStride + unit] = halves; }

// Thread (i, j) of 8 x 16 handles the queries from i * kRowsEach on and, for these, keys j, j + 16, ... and
// output units j, j + 16, ..., or half a unit if there are 8 units or fewer.
const uint kRowsEach = kRows / 8, kKeysEach = kKeys / 16, kUnitsEach = (kValueUnits + 15) / 16;
const bool kHalfUnits = kValueUnits <= 8;
const uint kOutsEach = kHalfUnits ? 1 : 2 * kUnitsEach;  // quads of channels
// Rows are processed four at a time as vectors, or fewer. (Unlike this expression, a call of min is not a
// constant for NVIDIA's compiler: it then keeps the arrays of loops up to it in memory, and an H200 does 3.5
// TFLOP/s instead of 29.)
const uint kQuadsEach = (kRowsEach + 3) / 4, kRowQuads = 8 * kQuadsEach, kPartStride = kRowQuads + 1;
const uint kInQuad = kRowsEach < 4 ? kRowsEach : 4;
// Maxima and sums of the 16 threads j for the rows; or the weights of 16 keys.
shared vec4 parts[16 * kPartStride];
// For each row: the maximum so far, and the factor for its results
shared vec4 peaks[kRowQuads], factors[kRowQuads];

// The first channel of output o of a thread.
uint out_channel(uint j, uint o) { return kHalfUnits ? j * 4 : (j + 16 * (o / 2)) * 8 + o % 2 * 4; }

void main() {
  const uint thread = gl_LocalInvocationIndex, i = thread / 16, j = thread % 16;
  const uint vectors = step.n_rows * push.p.group, groups = query_groups();
  if (gl_WorkGroupID.y >= groups || !find_head()) return;
  // Workgroups with the most keys start first, so that none of them runs alone at the end.
  const uint first = (groups - 1 - gl_WorkGroupID.y) * kRows, own_first = first + i * kRowsEach;
  const Work work = work_of(local_head, first, min(first + kRows, vectors) - 1);
  const KeyPart taken = own_keys(work);
  if (push.p.first_entry >= work.count || share.part >= taken.busy) return;
  const bool begins = is_first_pass() || share.part > 0, ends = is_last_pass(work) && taken.busy == 1;
  const uint first_index = work.first_index, begin = taken.begin, end = taken.end;

  if (begin < end) load_keys(begin - push.p.first_entry, end - begin);
  for (uint at = thread; at < kRows * kUnits; at += 128)
    queries[at / kUnits * kStride + at % kUnits] = query_unit(first + at / kUnits, at % kUnits, first_index);

  vec4 out_quads[kRowsEach * kOutsEach];
  [[unroll]] for (uint r = 0; r < kRowsEach; ++r)
    [[unroll]] for (uint o = 0; o < kOutsEach; ++o) {
      out_quads[r * kOutsEach + o] = vec4(0);
      const uint c = out_channel(j, o);
      if (!begins && own_first + r < vectors) out_quads[r * kOutsEach + o] = y_quad(own_first + r, c);
    }
  // Thread t maintains the maxima and sums of rows from 4 t on, in the layout of parts.
  vec4 before = vec4(0);  // the sums of earlier passes, or the sink
  const bool counts_sink = kHasSinks && is_first_pass() && share.part == 0;
  if (thread < kRowQuads) {
    peaks[thread] = vec4(kNoPeak);
    for (uint e = 0; e < 4 && (!begins || counts_sink); ++e) {
      const uint r = thread % kQuadsEach * 4 + e, vector = first + thread / kQuadsEach * kRowsEach + r;
      if (r >= kRowsEach || vector >= vectors) continue;
      peaks[thread][e] = counts_sink ? sink_of(vector) : ml[ml_start(vector)];
      before[e] = counts_sink ? 1 : ml[ml_start(vector) + 1];
    }
  }
  vec4 sums[kQuadsEach];  // over this thread's keys
  [[unroll]] for (uint s = 0; s < kQuadsEach; ++s) sums[s] = vec4(0);

  for (uint key = begin; key < end; key += kKeys) {
    const uint row = key - push.p.first_entry;
    store_tile();
    barrier();

    float scores[kRowsEach * kKeysEach];
    [[unroll]] for (uint s = 0; s < kRowsEach * kKeysEach; ++s) scores[s] = 0;
    for (uint unit = 0; unit < kUnits; ++unit) {
      vec4 k_low[kKeysEach], k_high[kKeysEach];
      [[unroll]] for (uint c = 0; c < kKeysEach; ++c) unpack_halves(tile[(j + 16 * c) * kStride + unit], k_low[c], k_high[c]);
      [[unroll]] for (uint r = 0; r < kRowsEach; ++r) {
        vec4 q_low, q_high;
        unpack_halves(queries[(i * kRowsEach + r) * kStride + unit], q_low, q_high);
        [[unroll]] for (uint e = 0; e < 4; ++e)
          [[unroll]] for (uint c = 0; c < kKeysEach; ++c) {
            scores[r * kKeysEach + c] += q_low[e] * k_low[c][e];
            scores[r * kKeysEach + c] += q_high[e] * k_high[c][e];
          }
      }
    }
    load_values(row, end - key);
    if (kCaps)
      [[unroll]] for (uint s = 0; s < kRowsEach * kKeysEach; ++s) scores[s] = capped(scores[s]);
    if (key < work.all_begin || key + kKeys > min(work.all_end, end))
      [[unroll]] for (uint r = 0; r < kRowsEach; ++r) {
        const uint seen = min(seen_end(first_index, own_first + r), end), unseen = seen_begin(first_index, own_first + r);
        [[unroll]] for (uint c = 0; c < kKeysEach; ++c)
          if (key + j + 16 * c >= seen || key + j + 16 * c < unseen) scores[r * kKeysEach + c] = kNoPeak;
      }

    [[unroll]] for (uint s = 0; s < kQuadsEach; ++s) {
      vec4 top = vec4(kNoPeak);
      [[unroll]] for (uint e = 0; e < kInQuad; ++e)
        [[unroll]] for (uint c = 0; c < kKeysEach; ++c) top[e] = max(top[e], scores[(4 * s + e) * kKeysEach + c]);
      parts[j * kPartStride + i * kQuadsEach + s] = top;
    }
    barrier();
    if (thread < kRowQuads) {
      const vec4 peak = peaks[thread];
      vec4 top = peak;
      [[unroll]] for (uint part = 0; part < 16; ++part) top = max(top, parts[part * kPartStride + thread]);
      peaks[thread] = top;
      factors[thread] = exp2(peak - top);
      before *= factors[thread];
    }
    barrier();

    store_tile();  // the keys are no longer read
    if (key + kKeys < end) load_keys(row + kKeys, end - key - kKeys);
    [[unroll]] for (uint s = 0; s < kQuadsEach; ++s) {
      // For a row that has not seen a key yet, the weights of hidden keys must still be 0.
      const vec4 peak = max(peaks[i * kQuadsEach + s], vec4(kNoPeak / 2)), factor = factors[i * kQuadsEach + s];
      sums[s] *= factor;
      [[unroll]] for (uint e = 0; e < kInQuad; ++e) {
        const uint r = 4 * s + e;
        [[unroll]] for (uint c = 0; c < kKeysEach; ++c) {
          scores[r * kKeysEach + c] = exp2(scores[r * kKeysEach + c] - peak[e]);
          sums[s][e] += scores[r * kKeysEach + c];
        }
        [[unroll]] for (uint o = 0; o < kOutsEach; ++o) out_quads[r * kOutsEach + o] *= factor[e];
      }
    }
    [[unroll]] for (uint c = 0; c < kKeysEach; ++c) {
      [[unroll]] for (uint s = 0; s < kQuadsEach; ++s) {
        vec4 weights = vec4(0);
        [[unroll]] for (uint e = 0; e < kInQuad; ++e) weights[e] = scores[(4 * s + e) * kKeysEach + c];
        parts[j * kPartStride + i * kQuadsEach + s] = weights;
      }
      barrier();
      for (uint part = 0; part < 16; ++part) {
        vec4 weights[kQuadsEach];
        [[unroll]] for (uint s = 0; s < kQuadsEach; ++s) weights[s] = parts[part * kPartStride + i * kQuadsEach + s];
        [[unroll]] for (uint u = 0; u < kUnitsEach; ++u) {
          const uint unit = kHalfUnits ? j / 2 : j + 16 * u;
          if (unit >= kValueUnits) continue;
          vec4 low, high;
          unpack_halves(tile[(part + 16 * c) * kStride + unit], low, high);
          if (kHalfUnits && j % 2 != 0) low = high;
          [[unroll]] for (uint r = 0; r < kRowsEach; ++r) {
            out_quads[r * kOutsEach + 2 * u] += weights[r / 4][r % 4] * low;
            if (!kHalfUnits) out_quads[r * kOutsEach + 2 * u + 1] += weights[r / 4][r % 4] * high;
          }
        }
      }
      barrier();
    }
  }

  [[unroll]] for (uint s = 0; s < kQuadsEach; ++s) parts[j * kPartStride + i * kQuadsEach + s] = sums[s];
  barrier();
  if (thread < kRowQuads) {
    vec4 sum = before;
    for (uint part = 0; part < 16; ++part) sum += parts[part * kPartStride + thread];
    factors[thread] = ends ? 1 / sum : vec4(1);
    for (uint e = 0; e < 4 && !ends; ++e) {
      const uint r = thread % kQuadsEach * 4 + e, vector = first + thread / kQuadsEach * kRowsEach + r;
      if (r >= kRowsEach || vector >= vectors) continue;
      leave_stat(vector, vec2(peaks[thread][e], sum[e]));
    }
  }
  barrier();
  [[unroll]] for (uint r = 0; r < kRowsEach; ++r)
    [[unroll]] for (uint o = 0; o < kOutsEach; ++o) {
      const uint c = out_channel(j, o);
      if (own_first + r >= vectors) continue;
      const float factor = factors[i * kQuadsEach + r / 4][r % 4];
      leave_quad(own_first + r, c, out_quads[r * kOutsEach + o] * factor);
    }
  finish(first, taken, is_last_pass(work));
}
