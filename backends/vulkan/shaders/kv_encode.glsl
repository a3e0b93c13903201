// Makes rows of blocks (kv_blocks.glsl), eight channels a thread. Four threads have a block, and eight the two
// blocks whose scales share a word. The includer defines kThreads, the threads of a workgroup, and has declared
// kHeadDim, or defines it.
#extension GL_EXT_control_flow_attributes : require

const uint kEach = 8, kSharers = kBlock / kEach;  // channels of a thread, and threads of a block
shared float room[kEach * kThreads];
float x[kEach];  // the thread's channels, and then those of the transform

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

// The codes of the thread's channels x, and the scales of its two blocks; of a block that is not there, x is 0.
// All threads call this, with one format.
void encode(uint format, out uvec2 codes, out uint scales) {
  const uint thread = gl_LocalInvocationIndex, first = thread / (2 * kSharers) * (2 * kSharers);
  const float lowest = format == kByteRows ? -127 : -8, highest = format == kByteRows ? 127 : 7;
  transform();
  const uint bits = scale_bits(largest_of_block(), lowest);
  const float scale = half_in(bits, 0), steps = scale == 0 || is_nan(scale) ? 0 : quotient(1, scale);
  codes = uvec2(0);
  [[unroll]] for (uint e = 0; e < kEach; ++e) {
    const float rounded = roundEven(x[e] * steps);
    const int code = int(rounded > highest ? highest : rounded >= lowest ? rounded : lowest);  // NaN: lowest
    if (format == kByteRows)
      codes[e / 4] |= uint(code & 0xff) << e % 4 * 8;
    else
      codes[0] |= uint(code + 8) << e * 4;
  }
  barrier();
  room[thread] = uintBitsToFloat(bits);
  barrier();
  scales = floatBitsToUint(room[first]) | floatBitsToUint(room[first + kSharers]) << 16;
}

// KV_WRITER(name, words, format) defines what writes the channels [c, c + 8) of a row to the buffer `words`, as
// encode() returns them; `row` is the row's first word.
#define KV_WRITER(name, words, format)                                                                        \
  void name(uint row, uint c, uvec2 codes, uint scales) {                                                     \
    const uint at = row + c / (format == kByteRows ? 4 : 8);                                               \
    words[at] = codes.x;                                                                                      \
    if (format == kByteRows) words[at + 1] = codes.y;                                                         \
    if (c % (2 * kBlock) == 0) words[row + KV_CODE_WORDS(format, kHeadDim) + c / (2 * kBlock)] = scales;       \
  }
