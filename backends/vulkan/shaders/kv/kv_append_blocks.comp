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

const uint kEach = 8, kSharers = kBlock / kEach;  // channels of a thread, and threads of a block
shared float room[kEach * kThreads];
float x[kEach];  // the thread's channels, and then those of the transform

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

// Multiplies the blocks by H / 8. Sums have the order that the CPU's have, because they are rounded: from
// channels that are 16 apart to neighbours. All threads call this.
void transform() {
  const uint thread = gl_LocalInvocationIndex;
  [[unroll]] for (uint apart = kSharers / 2; apart > 0; apart /= 2) {
    barrier();
    [[unroll]] for (uint i = 0; i < kEach; ++i) room[i * kThreads + thread] = x[i];
    barrier();
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      const float other = room[i * kThreads + (thread ^ apart)];
      x[i] = (thread & apart) != 0 ? other - x[i] : x[i] + other;
    }
  }
  [[unroll]] for (uint apart = kEach / 2; apart > 0; apart /= 2)
    [[unroll]] for (uint i = 0; i < kEach; ++i) {
      if ((i & apart) != 0) continue;
      const float a = x[i], b = x[i + apart];
      x[i] = a + b;
      x[i + apart] = a - b;
    }
  [[unroll]] for (uint i = 0; i < kEach; ++i) x[i] *= 0.125;
}

bool is_nan(float y) { return (floatBitsToUint(y) & 0x7fffffff) > 0x7f800000; }
float power_of_two(int exponent) { return uintBitsToFloat(uint(127 + exponent) << 23); }

// a / b, rounded to nearest, where drivers may be off by 2.5 ulp. Both are normal, and so is the result.
float quotient(float a, float b) {
  const uint a_bits = floatBitsToUint(a), b_bits = floatBitsToUint(b);
  const uint whole_a = a_bits & 0x7fffff | 0x800000, whole_b = b_bits & 0x7fffff | 0x800000;
  const int shift = whole_a < whole_b ? 24 : 23;  // the quotient has 24 bits
  uint q = uint(float(whole_a) / float(whole_b) * power_of_two(shift));
  int rest = int((whole_a << shift) - q * whole_b);  // it is small, so the upper bits do not matter
  for (; rest < 0; rest += int(whole_b)) --q;
  for (; rest >= int(whole_b); rest -= int(whole_b)) ++q;
  const uint twice = 2 * uint(rest);
  if (twice > whole_b || twice == whole_b && (q & 1) != 0) ++q;
  const int exponent = int(a_bits >> 23 & 0xff) - int(b_bits >> 23 & 0xff) - shift;
  const float magnitude = float(q) * power_of_two(exponent);
  return ((a_bits ^ b_bits) >> 31) != 0 ? -magnitude : magnitude;
}

// The bits of a block's scale, if its first number of the largest magnitude is to get the lowest code.
uint scale_bits(float largest, float lowest) {
  if (is_nan(largest)) return to_half(largest);
  if (largest == 0) return 0;
  if (abs(largest) < 1e-12) return largest > 0 ? 0x8000 : 0;  // far below f16's smallest number
  return to_half(quotient(largest, lowest));
}

// The number of largest magnitude in the thread's block; if the block has a NaN, all its numbers are NaN. All
// threads call this.
float largest_of_block() {
  const uint thread = gl_LocalInvocationIndex;
  float largest = x[0];
  [[unroll]] for (uint i = 1; i < kEach; ++i) largest = abs(x[i]) > abs(largest) ? x[i] : largest;
  barrier();
  room[thread] = largest;
  barrier();
  const uint first = thread / kSharers * kSharers;
  largest = room[first];
  [[unroll]] for (uint i = 1; i < kSharers; ++i)
    largest = abs(room[first + i]) > abs(largest) ? room[first + i] : largest;
  return largest;
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
  const float lowest = format == kByteRows ? -127 : -8, highest = format == kByteRows ? 127 : 7;
  transform();
  const uint bits = scale_bits(largest_of_block(), lowest);
  const float scale = half_in(bits, 0), steps = scale == 0 || is_nan(scale) ? 0 : quotient(1, scale);
  uvec2 words = uvec2(0);
  [[unroll]] for (uint e = 0; e < kEach; ++e) {
    const float rounded = roundEven(x[e] * steps);
    const int code = int(rounded > highest ? highest : rounded >= lowest ? rounded : lowest);  // NaN: lowest
    if (format == kByteRows)
      words[e / 4] |= uint(code & 0xff) << e % 4 * 8;
    else
      words[0] |= uint(code + 8) << e * 4;
  }
  barrier();
  room[thread] = uintBitsToFloat(bits);  // 0 after the last block
  barrier();
  if (!there) return;
  if (format == kByteRows) {
    put(of_k, to + c / 4, words.x);
    put(of_k, to + c / 4 + 1, words.y);
  } else {
    put(of_k, to + c / 8, words.x);
  }
  if (thread % (2 * kSharers) == 0)
    put(of_k, to + KV_CODE_WORDS(format, head_dim) + block / 2,
        floatBitsToUint(room[thread]) | floatBitsToUint(room[thread + kSharers]) << 16);
}
