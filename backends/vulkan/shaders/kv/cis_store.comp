// cis_store: the retention scores of the step's rows, written once and never changed.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../../../hash_score.h"
#include "../step.glsl"

layout(local_size_x = 64) in;

layout(set = 0, binding = 1, std430) readonly buffer Score { float score[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Cis { float cis[]; };
layout(push_constant) uniform Push {
  CisStoreParams p;
  uint base[2];
} push;

void main() {
  const uint row = gl_GlobalInvocationID.x, head = push.p.first_head + gl_WorkGroupID.y;
  if (row >= step.n_rows) return;
  const int position = step.position + int(row);
  float value;
  if (push.p.kind == kCisPosition) {
    value = float(position);
  } else if (push.p.kind == kCisHash) {
    value = hash_score(step.seed, push.p.layer, push.p.share_heads != 0 ? 0 : head, uint(position));
  } else {
    const uint columns = push.p.first_head + push.p.heads, own = push.base[0] + row * columns;
    value = score[own + (push.p.share_heads != 0 ? 0 : head)];
    if (push.p.share_heads != 0)
      for (uint other = 1; other < columns; ++other)
        if (value < score[own + other]) value = score[own + other];
  }
  const HeadState own = head_states[push.p.head_state + head];
  uint first = head * push.p.chunk_capacity;
  if (push.p.into != kIntoChunk) first = own.first + own.n_entries - (push.p.into == kIntoRing ? step.n_rows : 0);
  cis[push.base[1] + first + row] = value;
}
