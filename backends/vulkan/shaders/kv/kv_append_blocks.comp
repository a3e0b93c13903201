// kv_append to rows in blocks; keys or values may be f16. A thread stores eight channels. Four threads have a
// block, and eight the two blocks whose scales share a word.
#version 450
#extension GL_EXT_control_flow_attributes : require
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 3
#define KV_VALUE_FORMAT_ID 4
#include "../kv_format.glsl"
#include "../step.glsl"

const uint kThreads = 128;
layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kRotates = false;   // keys, under kRopeOriginal
layout(constant_id = 1) const bool kIntoRun = false;  // KvAppendParams::into
layout(constant_id = 2) const bool kHasPositions = false;

layout(set = 0, binding = 1, std430) readonly buffer Qkv { float qkv[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rope { float rope_table[]; };
// From first_head on, or the runs of the window; so is v
layout(set = 0, binding = 3, std430) writeonly buffer K { uint k[]; };
layout(set = 0, binding = 4, std430) writeonly buffer V { uint v[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Pos { int pos[]; };
layout(set = 0, binding = 6, std430) buffer Saturated { uint saturated[]; };
layout(set = 0, binding = 7, std430) readonly buffer Positions { int positions[]; };  // of the rows
layout(push_constant) uniform Push {
  KvAppendParams p;
  RunWindow window;
  uint base[7];
} push;

#define ROPE push.p.rope
#define ROPE_BASE push.base[1]
#include "../rope.glsl"

#define kHeadDim push.p.head_dim
#include "../kv_encode.glsl"
KV_WRITER(write_key, k, kKvFormat)
KV_WRITER(write_value, v, kValueFormat)

// Reads the channels [c, c + 8) of a row of the step, within the range of f16. Returns how many were beyond it.
uint read_channels(uint column, uint row, uint c, bool of_k) {
  const uint at = push.base[0] + row * push.p.row_stride + column;
  uint beyond = 0;
  [[unroll]] for (uint i = 0; i < kEach; ++i) {
    x[i] = qkv[at + c + i];
    if (kRotates && of_k && c + i < push.p.rope.n_rot)
      x[i] = rotated(c + i, x[i], qkv[at + partner_of(c + i)], rope_angle(uint(step.position) + row, pair_of(c + i)));
    if (x[i] < -kLargestHalf || x[i] > kLargestHalf) {
      ++beyond;
      x[i] = x[i] < 0 ? -kLargestHalf : kLargestHalf;
    }
  }
  return beyond;
}

void put(bool of_k, uint at, uint word) {
  if (of_k)
    k[push.base[2] + at] = word;
  else
    v[push.base[3] + at] = word;
}

void main() {
  const uint thread = gl_LocalInvocationIndex, i = gl_GlobalInvocationID.x;
  const uint head = push.p.first_head + gl_WorkGroupID.y, head_dim = push.p.head_dim, blocks = head_dim / kBlock;
  const bool of_k = gl_WorkGroupID.z == 0;
  const uint format = of_k ? kKvFormat : kValueFormat;
  const HeadState own = head_states[push.p.head_state + head];
  if (kIntoRun && !is_in(own, push.window)) return;
  // Where the head's first row goes, in pos and in k and v.
  const uint first_pos = kIntoRun ? own.first + own.n_entries : head * push.p.chunk_capacity;
  const uint first = kIntoRun ? run_start(own, push.window) + own.n_entries : gl_WorkGroupID.y * push.p.chunk_capacity;
  if (of_k && i < step.n_rows)
    pos[push.base[4] + first_pos + i] = kHasPositions ? positions[push.base[6] + i] : step.position + int(i);

  const uint spans = (blocks + 1) / 2;  // of two blocks, per row
  const uint span = i / (2 * kSharers), row = span / spans, block = span % spans * 2 + thread / kSharers % 2;
  const uint c = block * kBlock + thread % kSharers * kEach;
  const bool there = row < step.n_rows && block < blocks;
  [[unroll]] for (uint e = 0; e < kEach; ++e) x[e] = 0;
  if (there) {
    const uint column = (of_k ? push.p.k_column : push.p.v_column) + head * head_dim;
    const uint beyond = read_channels(column, row, c, of_k);
    if (beyond > 0) atomicAdd(saturated[push.base[5]], beyond);
  }
  const uint to = (first + row) * KV_WORDS(format, head_dim);
  if (format == kHalfRows) {  // so for the whole workgroup
    if (there)
      [[unroll]] for (uint e = 0; e < kEach; e += 2) put(of_k, to + (c + e) / 2, pack_halves(x[e], x[e + 1]));
    return;
  }
  uvec2 codes;
  uint scales;
  encode(format, codes, scales);
  if (!there) return;
  if (of_k)
    write_key(push.base[2] + to, c, codes, scales);
  else
    write_value(push.base[3] + to, c, codes, scales);
}
