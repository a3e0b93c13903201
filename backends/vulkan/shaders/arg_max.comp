#version 450
// arg_max: the column of a row's largest element, the lower one of equals. A workgroup takes a row: 128256 logits are half a
// megabyte.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "step.glsl"
#include "order.glsl"

layout(local_size_x_id = 0) in;
const uint kThreads = gl_WorkGroupSize.x;

layout(set = 0, binding = 1, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Index { uint index[]; };
layout(push_constant) uniform Push {
  ArgMaxParams p;
  uint base[2];
} push;

// An element's order_bits, and its column.
struct Best {
  uint bits, column;
};
shared Best subgroup_bests[kThreads / 4];

Best better(Best a, Best b) {
  return b.bits > a.bits || (b.bits == a.bits && b.column < a.column) ? b : a;
}

void main() {
  const uint row = gl_WorkGroupID.x, cols = push.p.cols;
  if (row >= step.n_logit_rows) return;
  Best best = Best(0, cols);
  // Eight loads at a time: one thread waits for 125 of them otherwise, one after the other. Columns behind the end repeat the
  // last.
  for (uint first = gl_LocalInvocationIndex; first < cols; first += 8 * kThreads)
    [[unroll]] for (uint i = 0; i < 8; ++i) {
      const uint c = min(first + i * kThreads, cols - 1);
      best = better(best, Best(order_bits(x[push.base[0] + row * cols + c]), c));
    }
  const uint bits = subgroupMax(best.bits), column = subgroupMin(best.bits == bits ? best.column : cols);
  if (subgroupElect()) subgroup_bests[gl_SubgroupID] = Best(bits, column);
  barrier();
  if (gl_LocalInvocationIndex != 0) return;
  best = subgroup_bests[0];
  for (uint i = 1; i < gl_NumSubgroups; ++i) best = better(best, subgroup_bests[i]);
  index[push.base[1] + row] = best.column;
}
