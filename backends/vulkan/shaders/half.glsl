// 16-bit floats, two per word. Reading them is exact. packHalf2x16() may round in any way; to_half() rounds
// to nearest, ties to even, and keeps subnormals.

float half_in(uint word, uint i) {
  const vec2 both = unpackHalf2x16(word);
  return (i & 1) == 0 ? both.x : both.y;
}

uint to_half(float x) {
  const uint bits = floatBitsToUint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
  if (magnitude >= 0x38800000) return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // A subnormal counts steps of 2^-24, which are `drop` bits up in the number's 24 bits; below 2^-25 it is
  // zero.
  const uint drop = 126 - (magnitude >> 23), mantissa = magnitude & 0x7fffff | 0x800000;
  if (drop > 24) return sign;
  return sign | (mantissa + (1 << drop - 1) - 1 + (mantissa >> drop & 1)) >> drop;
}
const float kLargestHalf = 65504;
uint pack_halves(float low, float high) { return to_half(low) | to_half(high) << 16; }

// Eight neighbours.
void unpack_halves(uvec4 words, out vec4 low, out vec4 high) {
  low = vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
  high = vec4(unpackHalf2x16(words.z), unpackHalf2x16(words.w));
}
