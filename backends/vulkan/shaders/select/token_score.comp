// token_score and page_score: a workgroup scores a part of the middle with the query heads of one KV head.
// The last one combines the parts' contributions to the heads' log-sum-exps. Tile i belongs to part i %
// parts, so that no division is needed.
//
// A row is an entry's key; or, with PAGES, the bounds of a page: the smallest and the largest value of each
// channel.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#include "token_score.glsl"

// Thread (key, side) has the units side, side + kSides, ... of keys. kSides is such that its share of the
// queries fits its registers. A tile has two keys per thread.
const uint kSides = kHeads * ((kUnits + 7) / 8) > 8 ? 16 : 8;
const uint kUnitsEach = (kUnits + kSides - 1) / kSides, kRounds = 2, kKeys = 128 / kSides, kTile = kRounds * kKeys;
const uint kLoads = kUnitsEach * kRowsOfUnit;  // units of a key per thread
const uint kScoresEach = (kHeads * kTile + 127) / 128;
// Sums of sides, [heads][keys]{quads of sides, one unused to avoid bank conflicts}; before that queries,
// [heads][quads of channels].
const uint kSideQuads = kSides / 4, kPlace = kSideQuads + 1;
shared vec4 room[kHeads * (kTile * kPlace > kUnits * 2 ? kTile * kPlace : kUnits * 2)];
#include "token_score_queries.glsl"

#ifndef BLOCKS
// A unit of the row that begins at word `row`, or at uvec4 `row` if rows are aligned.
uvec4 k_unit(uint row, uint unit) {
  if (kAligned) return k4[row + unit];
  const uint words = kHeadDim / 2;
  uvec4 read = uvec4(0);
  for (uint i = 0; i < 4; ++i)
    if (unit * 4 + i < words) read[i] = k[row + unit * 4 + i];
  return read;
}
#endif

void main() {
  // The gate is loaded together with the step, and the first keys before the gate is tested. One after the
  // other, each would take 0.7 us on an H200.
  const bool hits = kHasGate && gate[push.base[4]] != 0;
  const Share share = find_share(gl_WorkGroupID.y, gl_WorkGroupID.z, gl_NumWorkGroups.y, gl_NumWorkGroups.z);
  if (share.local_head >= push.p.heads) return;
  thread = gl_SubgroupID * kLanes + gl_SubgroupInvocationID;
  const uint parts = share.parts, part = share.part, local_head = share.local_head, first_head = gl_WorkGroupID.x * kHeads;
  const uint heads = min(kHeads, push.p.group - first_head), first_query = local_head * push.p.group + first_head;
  const HeadState own = head_states[push.p.head_state + push.p.first_head + local_head];
  const uint n = units_of(own);
  if (!selects(step, n) || !is_in(own, push.window)) return;
  const uint first = step.n_init + part * kTile, stride = parts * kTile, end = middle_end(step, n);
  if (first >= end) return;

  const uint key = thread / kSides, side = thread % kSides, busy = min((end - step.n_init + kTile - 1) / kTile, parts);
  const uint part_start = push.base[6] / 2 + first_query * kMostScoreParts;
  if (kLeavesParts && part == 0)  // parts that do not exist must be empty for the shader that reads all parts
    for (uint i = thread; i < heads * kMostScoreParts; i += 128)
      if (i % kMostScoreParts >= busy) part_sums[part_start + i] = vec2(kNoPeak, 0);
  const uint half_size = kAligned ? KEY_WORDS / 4 : KEY_WORDS, row_size = kRowsOfUnit * half_size;
  const uint row = (kAligned ? push.base[2] / 4 : push.base[2]) + first_row(own, push.p.first_head + local_head) * row_size;
#ifndef BLOCKS
  uvec4 keys[kRounds * kLoads];  // of the next tile
  [[unroll]] for (uint k_at = 0; k_at < kRounds * kLoads; ++k_at) {
    const uint unit = side + kSides * (k_at / kRowsOfUnit % kUnitsEach), entry = first + k_at / kLoads * kKeys + key;
    const uint start = row + min(entry, end - 1) * row_size + k_at % kRowsOfUnit * half_size;
    keys[k_at] = unit < kUnits ? k_unit(start, unit) : uvec4(0);
  }
#endif
  if (hits) return;
  if (local_head == 0 && gl_WorkGroupID.x == 0)
    for (uint i = part * 128 + thread; i < kClears; i += busy * 128) cleared[push.base[9] + i] = 0;
  rotate_queries(first_query, heads);
  barrier();
  vec4 queries[kHeads * kUnitsEach * 2];
  [[unroll]] for (uint i = 0; i < kHeads * kUnitsEach * 2; ++i) {
    const uint h = i / (kUnitsEach * 2), unit = side + kSides * (i / 2 % kUnitsEach);
    queries[i] = unit < kUnits ? room[(h * kUnits + unit) * 2 + i % 2] : vec4(0);
  }

  LogSum total[kScoresEach];
  [[unroll]] for (uint j = 0; j < kScoresEach; ++j) total[j] = kNoSum;
  [[dont_unroll]] for (uint tile = first; tile < end; tile += stride) {
    barrier();  // the previous scores are no longer read
    [[unroll]] for (uint r = 0; r < kRounds; ++r) {
      float dots[kHeads];
      [[unroll]] for (uint h = 0; h < kHeads; ++h) dots[h] = 0;
      const uint next = min(tile + stride + r * kKeys + key, end - 1);
      [[unroll]] for (uint u = 0; u < kUnitsEach; ++u) {
        const uint unit = side + kSides * u;
        vec4 low, high;  // the unit's channels
#ifdef BLOCKS
        low = high = vec4(0);
        if (unit < kUnits) key_eight(row + min(tile + r * kKeys + key, end - 1) * row_size, unit * 8, low, high);
#else
        const uint k_at = r * kLoads + u * kRowsOfUnit;
        read_unit(keys[k_at], low, high);
#endif
#ifdef PAGES
        vec4 most_low, most_high;
        read_unit(keys[k_at + 1], most_low, most_high);
        if (unit < kUnits) keys[k_at + 1] = k_unit(row + next * row_size + half_size, unit);
#endif
#ifndef BLOCKS
        if (unit < kUnits) keys[k_at] = k_unit(row + next * row_size, unit);
#endif
        [[unroll]] for (uint h = 0; h < kHeads; ++h) {
          const uint at = (h * kUnitsEach + u) * 2;
#ifdef PAGES
          [[unroll]] for (uint c = 0; c < 4; ++c) dots[h] += max(queries[at][c] * low[c], queries[at][c] * most_low[c]);
          [[unroll]] for (uint c = 0; c < 4; ++c) dots[h] += max(queries[at + 1][c] * high[c], queries[at + 1][c] * most_high[c]);
#else
          [[unroll]] for (uint c = 0; c < 4; ++c) dots[h] += queries[at][c] * low[c];
          [[unroll]] for (uint c = 0; c < 4; ++c) dots[h] += queries[at + 1][c] * high[c];
#endif
        }
      }
      [[unroll]] for (uint h = 0; h < kHeads; ++h)
        room[(h * kTile + r * kKeys + key) * kPlace + side / 4][side % 4] = dots[h];
    }
    barrier();
    [[unroll]] for (uint j = 0; j < kScoresEach; ++j) {
      const uint i = thread + 128 * j, h = i / kTile, entry = tile + i % kTile;
      if (h >= heads || entry >= end) continue;
      vec4 sums_of_sides = vec4(0);
      [[unroll]] for (uint s = 0; s < kSideQuads; ++s) sums_of_sides += room[i * kPlace + s];
      const float score = (sums_of_sides.x + sums_of_sides.y) + (sums_of_sides.z + sums_of_sides.w);
      all_scores[push.base[5] + (push.p.first_head * push.p.group + first_query + h) * push.p.score_capacity + entry] = score;
      total[j] = added(total[j], score);
    }
  }

  [[unroll]] for (uint j = 0; j < kScoresEach; ++j) {
    const uint h = (thread + 128 * j) / kTile;
    const float peak = max_of_threads(total[j].peak, kTile);
    const float sum = sum_of_threads(total[j].sum * exp(total[j].peak - peak), kTile);
    if (thread % kTile == 0 && h < heads) part_sums[part_start + h * kMostScoreParts + part] = vec2(peak, sum);
  }

  if (kLeavesParts) return;
  if (!finishes_last(push.base[7] + local_head * gl_NumWorkGroups.x + gl_WorkGroupID.x, busy)) return;
  const uint own_head = thread / kSharers, sharer = thread % kSharers;
  vec2 of_parts[kPartsEach];
  float peak = kNoPeak, sum = 0;
  [[unroll]] for (uint i = 0; i < kPartsEach; ++i) {
    const uint own_part = sharer + kSharers * i;
    of_parts[i] = vec2(kNoPeak, 0);
    if (own_part < busy && own_head < heads) of_parts[i] = part_sums[part_start + own_head * kMostScoreParts + own_part];
    peak = max(peak, of_parts[i].x);
  }
  peak = max_of_threads(peak, kSharers);
  [[unroll]] for (uint i = 0; i < kPartsEach; ++i) sum += of_parts[i].y * exp(of_parts[i].x - peak);
  sum = sum_of_threads(sum, kSharers);
  if (sharer == 0 && own_head < heads)
    lse[push.base[8] + push.p.first_head * push.p.group + first_query + own_head] = log_sum_bits(LogSum(peak, sum));
}
