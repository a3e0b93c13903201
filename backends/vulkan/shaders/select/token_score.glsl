// What the shaders of token_score share: operands, the part of the middle that a workgroup scores, its queries, and what the parts
// of a head add up to. A workgroup has 128 threads.
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "../../pool_parts.h"
#include "../half.glsl"
#include "../log_sum.glsl"
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kHeadDim = 128;
layout(constant_id = 1) const uint kHeads = 4;         // query heads of a pass, at most kMostHeads
layout(constant_id = 2) const bool kHasGate = false;
layout(constant_id = 3) const bool kSummed = false;    // sum_queries.comp has added up the rows
layout(constant_id = 4) const bool kAligned = false;   // rows of k are whole uvec4
layout(constant_id = 5) const uint kMode = kRopeList;  // RopeParams
layout(constant_id = 6) const uint kPairing = kRopeHalves;
layout(constant_id = 7) const uint kRotating = 128;
layout(constant_id = 8) const uint kLanes = 32;  // of a subgroup
layout(constant_id = 9) const bool kLeavesParts = false;  // a group's, to vote_count.comp
layout(constant_id = 10) const bool kEqualHeads = false;  // TokenScoreParams
layout(constant_id = 11) const uint kClears = 0;  // words, which vote_layer.comp counts in

layout(set = 0, binding = 1, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer Sums { float sums[]; };  // [slices][query heads * head_dim]
layout(set = 0, binding = 3, std430) readonly buffer K { uint k[]; };         // the window's runs; or all bounds
layout(set = 0, binding = 3, std430) readonly buffer K4 { uvec4 k4[]; };
layout(set = 0, binding = 4, std430) readonly buffer Rope { float rope_table[]; };
layout(set = 0, binding = 5, std430) readonly buffer Gate { uint gate[]; };
layout(set = 0, binding = 6, std430) writeonly buffer Scores { float all_scores[]; };
// [query heads][kMostScoreParts]{peak, sum}, and one counter for each pass over a KV head's group.
layout(set = 0, binding = 7, std430) coherent buffer Parts { vec2 part_sums[]; };
layout(set = 0, binding = 8, std430) coherent buffer Counters { uint counters[]; };
layout(set = 0, binding = 9, std430) writeonly buffer Lse { uint lse[]; };
layout(set = 0, binding = 10, std430) writeonly buffer Cleared { uint cleared[]; };
layout(push_constant) uniform Push {
#ifdef PAGES
  PageScoreParams p;
#else
  TokenScoreParams p;
#endif
  RunWindow window;
  uint slices;
  uint base[10];
} push;

#define ROPE RopeParams(kMode, kPairing, kRotating)
#define ROPE_BASE push.base[3]
#include "../rope.glsl"
#include "../last_group.glsl"

#ifdef PAGES
const uint kRowsOfUnit = 2;  // the smallest and the largest
// Bounds of rotated keys meet the query rotated to its own position.
bool rotates_query() { return kMode == kRopeOriginal; }
uint score_position() { return uint(step.position); }
uint first_row(HeadState own, uint head) { return own.first / push.p.page + head; }
uint units_of(HeadState own) { return units(step_entries(step, own), push.p.page); }
#else
#include "score_query.glsl"
const uint kRowsOfUnit = 1;
bool rotates_query() { return true; }
uint first_row(HeadState own, uint head) { return run_start(own, push.window); }
uint units_of(HeadState own) { return step_entries(step, own); }
#endif

const uint kUnits = (kHeadDim + 7) / 8;  // of 8 channels

// What the shader that includes this defines: units that a workgroup scores at a time, and where it finds its queries, whose
// channels it is given one by one.
uint tile_units();
void put_query(uint head, uint channel, float x);

uint tiles_of(uint local_head) {
  const uint n = units_of(head_states[push.p.head_state + push.p.first_head + local_head]);
  return selects(step, n) ? (middle_end(step, n) - step.n_init + tile_units() - 1) / tile_units() : 0;
}
const uint kMostShare = kMostScoreParts;
#include "../shares.glsl"

uint thread;  // lanes of a subgroup are neighbours

// What a workgroup scores: tiles first, first + stride and so on of a KV head, against `heads` of its query heads.
struct Part {
  uint local_head, head;  // of the dispatch, of the layer
  uint heads, first_query;
  uint first, stride, end;
  uint index, busy;  // among the parts of the head that have something to score, which are so many
  uint sums;         // where those of the first query head begin in part_sums
  HeadState own;
};
// False where there is nothing to score; whole workgroups call it.
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
  part.first = step.n_init + share.part * tile_units();
  part.stride = share.parts * tile_units();
  part.end = middle_end(step, n);
  if (part.first >= part.end) return false;
  part.index = share.part;
  part.busy = min((part.end - step.n_init + tile_units() - 1) / tile_units(), share.parts);
  part.sums = push.base[6] / 2 + part.first_query * kMostScoreParts;
  return true;
}
// What is written beside scores, once it is known that they are made.
void prepare_parts(Part part) {
  if (kLeavesParts && part.index == 0)  // whoever reads all parts finds nothing in those that there are not
    for (uint i = thread; i < part.heads * kMostScoreParts; i += 128)
      if (i % kMostScoreParts >= part.busy) part_sums[part.sums + i] = vec2(kNoPeak, 0);
  if (part.local_head == 0 && gl_WorkGroupID.x == 0)
    for (uint i = part.index * 128 + thread; i < kClears; i += part.busy * 128) cleared[push.base[9] + i] = 0;
}

// Puts the queries from first_query on, the mean over the rows times scale, to where put_query() says. A thread has the same pair
// of channels of several heads, so that one angle turns them all, and asks for all it reads at once; heads that there are not get
// what nobody reads.
void rotate_queries(uint first_query, uint heads) {
  const uint kPairs = kUnits * 4, kAtOnce = 128 / kPairs, kQueriesEach = (kHeads + kAtOnce - 1) / kAtOnce;
  const uint pair = thread % kPairs, first_head = thread / kPairs;
  const uvec2 channels = channels_of(pair);
  vec2 angle = vec2(push.p.scale, 0);
  if (kSummed)
    angle.x /= float(step.n_rows);
  else if (pair < rope_pairs() && rotates_query())
    angle = rope_angle(score_position(), pair) * push.p.scale;
  vec2 x[kQueriesEach];
  [[unroll]] for (uint j = 0; j < kQueriesEach; ++j) {
    const uint query = first_query + min(first_head + kAtOnce * j, heads - 1);
    x[j] = vec2(0);
    if (pair >= kHeadDim / 2) continue;
    if (kSummed) {
      const uint at = push.base[1] + query * kHeadDim, stride = push.p.heads * push.p.group * kHeadDim;
      for (uint slice = 0; slice < push.slices; ++slice)
        x[j] += vec2(sums[at + slice * stride + channels.x], sums[at + slice * stride + channels.y]);
    } else {
      const uint at = push.base[0] + (push.p.first_head * push.p.group + query) * kHeadDim;
      x[j] = vec2(q[at + channels.x], q[at + channels.y]);
    }
  }
  [[unroll]] for (uint j = 0; j < kQueriesEach; ++j) {
    const uint h = first_head + kAtOnce * j;
    if (h >= kHeads) continue;
    put_query(h, channels.x, x[j].x * angle.x - x[j].y * angle.y);
    put_query(h, channels.y, x[j].x * angle.y + x[j].y * angle.x);
  }
}

shared float of_threads[128];
// x of the thread whose number differs by `apart`, a power of two.
float from_thread(float x, uint apart) {
  if (apart < kLanes) return subgroupShuffleXor(x, apart);
  barrier();
  of_threads[thread] = x;
  barrier();
  return of_threads[thread ^ apart];
}
// The largest and the sum of `sharers` neighbouring threads, a power of two.
float max_of_threads(float x, uint sharers) {
  [[unroll]] for (uint apart = 1; apart < sharers; apart *= 2) x = max(x, from_thread(x, apart));
  return x;
}
float sum_of_threads(float x, uint sharers) {
  [[unroll]] for (uint apart = 1; apart < sharers; apart *= 2) x += from_thread(x, apart);
  return x;
}

// The part's sum of a query head, by one thread; and, where all parts are there, the heads' of all parts, by all threads.
void leave_sum(Part part, uint head, LogSum sum) {
  part_sums[part.sums + head * kMostScoreParts + part.index] = vec2(sum.peak, sum.sum);
}
const uint kSharers = kHeads > 4 ? 16 : 32, kPartsEach = kMostScoreParts / kSharers;  // at the end, threads that share a head
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
