// vote, before its max-pool: copies the votes of a group, or packs those of a layer together with their
// positions.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

const uint kThreads = 128;  // also the tile of vote.comp
layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kHasGate = false;
layout(constant_id = 1) const bool kLayer = false;  // VoteParams::scope
#include "../scan.glsl"

layout(set = 0, binding = 1, std430) readonly buffer Votes { uint votes[]; };
layout(set = 0, binding = 2, std430) readonly buffer Gate { uint gate[]; };
// Number of votes in each tile; at index `tiles`, the total
layout(set = 0, binding = 3, std430) buffer Counts { uint counts[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Packed { uint packed_votes[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Places { uint places[]; };
layout(push_constant) uniform Push {
  VoteParams p;
  uint tiles;  // upper bound
  uint base[5];
} push;

void copy_group(uint head, uint n) {
  const uint own = head * push.p.vote_capacity;
  for (uint i = step.n_init + gl_GlobalInvocationID.x; i < middle_end(step, n); i += gl_NumWorkGroups.x * kThreads)
    packed_votes[push.base[3] + own + i] = votes[push.base[0] + own + i];
}

void pack_layer() {
  const uint thread = thread_in_order(), positions = uint(step.position) + step.n_rows;
  for (uint first = gl_WorkGroupID.x * kThreads; first < positions; first += gl_NumWorkGroups.x * kThreads) {
    uint count = 0;
    for (uint tile = thread; tile < first / kThreads; tile += kThreads) count += counts[push.base[2] + tile];
    const uint before = scan_threads(count).y, position = first + thread;
    const uint vote = position < positions ? votes[push.base[0] + position] : 0xff800000;
    const uvec2 sums = scan_threads(vote != 0xff800000 ? 1 : 0);
    if (vote != 0xff800000) {
      packed_votes[push.base[3] + before + sums.x] = vote;
      places[push.base[4] + before + sums.x] = position;
    }
    if (first + kThreads >= positions && thread == 0) counts[push.base[2] + push.tiles] = before + sums.y;
  }
}

void main() {
  const uint head = gl_WorkGroupID.y;  // 0 for a layer
  const uint n = units(step_entries(step, head_states[push.p.head_state + head]), push.p.page);
  if (!selects(step, n) || (kHasGate && gate[push.base[1]] != 0)) return;
  if (kLayer)
    pack_layer();
  else
    copy_group(head, n);
}
