#version 450
// arg_max: the column of a row's largest element, the lower one if several are equal; -1 if any is NaN or
// infinite. Several workgroups share a row, and the last one combines their results: 128256 logits are half a
// megabyte, which a single one takes 20 us to read on an H200.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "../step.glsl"
#include "../../../order_bits.h"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;

layout(set = 0, binding = 1, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Index { uint index[]; };
layout(set = 0, binding = 3, std430) coherent buffer Bests { uvec2 bests[]; };  // [rows][parts]{bits, column}
layout(set = 0, binding = 4, std430) coherent buffer Counters { uint counters[]; };
layout(push_constant) uniform Push {
  ArgMaxParams p;
  uint base[4];
} push;

// An element's order_bits and its column. A non-finite element beats all others, with column -1.
struct Best {
  uint bits, column;
};
Best best_of(uint bits, uint column) {
  const bool finite = (bits & 0x7f800000) != 0x7f800000;
  return Best(finite ? order_bits(bits) : 0xffffffff, finite ? column : 0xffffffff);
}
shared Best subgroup_bests[kThreads / 4];

Best better(Best a, Best b) {
  return b.bits > a.bits || (b.bits == a.bits && b.column < a.column) ? b : a;
}

#include "../last_group.glsl"

// The best of all threads, in thread 0.
Best best_of_group(Best best) {
  const uint bits = subgroupMax(best.bits), column = subgroupMin(best.bits == bits ? best.column : 0xffffffff);
  if (subgroupElect()) subgroup_bests[gl_SubgroupID] = Best(bits, column);
  barrier();
  if (gl_LocalInvocationIndex != 0) return best;
  best = subgroup_bests[0];
  for (uint i = 1; i < gl_NumSubgroups; ++i) best = better(best, subgroup_bests[i]);
  return best;
}

void main() {
  const uint row = gl_WorkGroupID.y, cols = push.p.cols, part = gl_WorkGroupID.x, parts = gl_NumWorkGroups.x;
  if (row >= step.n_logit_rows) return;
  Best best = Best(0, cols);
  // Eight loads at a time. Columns after the end repeat the last one.
  for (uint first = part * kThreads; first < cols; first += 8 * parts * kThreads)
    [[unroll]] for (uint i = 0; i < 8; ++i) {
      const uint c = min(first + i * parts * kThreads + gl_LocalInvocationIndex, cols - 1);
      best = better(best, best_of(x[push.base[0] + row * cols + c], c));
    }
  best = best_of_group(best);
  const uint bests_of_row = push.base[2] / 2 + row * parts;
  if (gl_LocalInvocationIndex == 0) bests[bests_of_row + part] = uvec2(best.bits, best.column);
  if (!finishes_last(push.base[3] + row, parts)) return;
  best = Best(0, cols);
  for (uint i = gl_LocalInvocationIndex; i < parts; i += kThreads)
    best = better(best, Best(bests[bests_of_row + i].x, bests[bests_of_row + i].y));
  best = best_of_group(best);
  if (gl_LocalInvocationIndex == 0) index[push.base[1] + row] = best.column;
}
