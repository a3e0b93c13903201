// kv_append: appends the step's k and v rows to the pool or the chunk buffer.
#version 450
#extension GL_GOOGLE_include_directive : require
#define KV_FORMAT_ID 3
#include "../kv_format.glsl"
#include "../step.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kRotates = false;   // keys, under kRopeOriginal
layout(constant_id = 1) const bool kIntoRun = false;  // KvAppendParams::into
layout(constant_id = 2) const bool kHasPositions = false;

layout(set = 0, binding = 1, std430) readonly buffer Qkv { float qkv[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rope { float rope_table[]; };
// From first_head on, or the runs of the window; so is v
layout(set = 0, binding = 3, std430) buffer K { uint k[]; };
layout(set = 0, binding = 4, std430) buffer V { uint v[]; };
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

uint beyond = 0;  // among a thread's elements

// Element i of a head's rows, [n_rows][head_dim], which begin at `column` of qkv; 0 outside of them.
uint element(uint column, uint i, bool of_k) {
  const uint row = i / push.p.head_dim, c = i % push.p.head_dim;
  if (row >= step.n_rows) return 0;
  const uint at = push.base[0] + row * push.p.row_stride + column;
  float x = qkv[at + c];
  if (kRotates && of_k && c < push.p.rope.n_rot)
    x = rotated(c, x, qkv[at + partner_of(c)], rope_angle(uint(step.position) + row, pair_of(c)));
  return kv_bits(x, beyond);
}

// One thread per two elements of k, or of v, that share a word.
void main() {
  const uint i = gl_GlobalInvocationID.x, head = push.p.first_head + gl_WorkGroupID.y;
  const bool of_k = gl_WorkGroupID.z == 0;
  const HeadState own = head_states[push.p.head_state + head];
  if (kIntoRun && !is_in(own, push.window)) return;
  // Where the head's first row goes, in pos and in k and v.
  const uint first_pos = kIntoRun ? own.first + own.n_entries : head * push.p.chunk_capacity;
  const uint first = kIntoRun ? run_start(own, push.window) + own.n_entries : gl_WorkGroupID.y * push.p.chunk_capacity;
  if (of_k && i < step.n_rows)
    pos[push.base[4] + first_pos + i] = kHasPositions ? positions[push.base[6] + i] : step.position + int(i);

  const uint n = step.n_rows * push.p.head_dim, start = first * push.p.head_dim;
  // low is -1, a large number, if start is odd
  const uint word = start / 2 + i, low = 2 * word - start, high = low + 1;
  const uint column = (of_k ? push.p.k_column : push.p.v_column) + head * push.p.head_dim;
  const uint both = kv_word(element(column, low, of_k), element(column, high, of_k));
  if (low < n && high < n) {
    if (of_k)
      k[push.base[2] + word] = both;
    else
      v[push.base[3] + word] = both;
  // Only for odd sizes: the other half belongs to a neighbour, which may be writing it now
  } else if (low < n || high < n) {
    const uint others = low < n ? 0xffff0000 : 0xffff;
    if (of_k) {
      atomicAnd(k[push.base[2] + word], others);
      atomicOr(k[push.base[2] + word], both);
    } else {
      atomicAnd(v[push.base[3] + word], others);
      atomicOr(v[push.base[3] + word], both);
    }
  }
  if (beyond > 0) atomicAdd(saturated[push.base[5]], beyond);
}
