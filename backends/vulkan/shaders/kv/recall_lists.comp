// kv_recall: copies the lists of the heads from host memory, because later dispatches read them several times.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"

layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer Lists { uint lists[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Copies { uint copies[]; };
layout(push_constant) uniform Push {
  KvRecallParams p;
  uint base[2];
} push;

void main() {
  const uint first = (push.p.first_head + gl_WorkGroupID.y) * push.p.list_capacity;
  const uint words = 1 + lists[push.base[0] + first];
  for (uint i = gl_GlobalInvocationID.x; i < words; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x)
    copies[push.base[1] + first + i] = lists[push.base[0] + first + i];
}
