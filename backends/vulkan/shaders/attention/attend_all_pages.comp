// attend_all: copies the table of a head's pages to the device's memory, in the order of positions, with the
// number of entries that the pages before each one have. A workgroup takes a head.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../step.glsl"
#include "attend_all_params.h"

const uint kThreads = 128;
layout(local_size_x = 128) in;

layout(set = 0, binding = 1, std430) readonly buffer Pages { uint pages[]; };
layout(set = 0, binding = 2, std430) readonly buffer Order { uint order[]; };
layout(set = 0, binding = 3, std430) readonly buffer Count { uint page_counts[]; };
// [heads][page_capacity + 1]{number, held positions, slot, entries before}; the last one has only the number of
// all entries
layout(set = 0, binding = 4, std430) writeonly buffer Table { uint table[]; };
layout(push_constant) uniform Push {
  AttendAllPagesParams p;
  uint base[4];
} push;

shared uint sums[kThreads];

void main() {
  const uint head = gl_WorkGroupID.x, thread = gl_LocalInvocationIndex, stride = push.p.stored_stride * 16;
  const uint count = page_counts[push.base[2] + head];
  const uint to = push.base[3] + head * (push.p.page_capacity + 1) * 4;
  uint before = 0;  // entries of the pages before `first`
  for (uint first = 0; first <= count; first += kThreads) {
    const uint i = first + thread;
    uint slot = 0, number = 0, held = 0;
    if (i < count) {
      slot = order[push.base[1] + head * stride + i];
      const uint at = push.base[0] + head * stride + 4 * slot;
      number = pages[at];
      held = pages[at + 1] & 0xffff;
    }
    barrier();  // the last sums have been read
    sums[thread] = bitCount(held);
    for (uint apart = 1; apart < kThreads; apart *= 2) {
      barrier();
      const uint other = thread >= apart ? sums[thread - apart] : 0;
      barrier();
      sums[thread] += other;
    }
    barrier();
    if (i <= count) {
      table[to + 4 * i] = number;
      table[to + 4 * i + 1] = held;
      table[to + 4 * i + 2] = slot;
      table[to + 4 * i + 3] = before + sums[thread] - bitCount(held);
    }
    before += sums[kThreads - 1];
  }
}
