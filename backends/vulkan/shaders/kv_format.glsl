// The formats of rows of keys and values. A format stores floats as a row and loads channels of a row as
// floats. Every shader that reads or writes a row uses it through the functions and macros of this file. A row
// consists of whole words, KV_ROW_WORDS(head_dim) of them. The includer defines KV_FORMAT_ID: the
// specialisation constant that chooses the format by its place in the list of backends/kv_formats.h.
//
// A shader that is compiled with BLOCKS also has the formats of blocks. The others stay as short as they are
// with f16 alone.
#include "half.glsl"

#ifdef BLOCKS
#include "kv_blocks.glsl"
#else

#ifdef THIMBLE_TEST_FORMATS
// 0 is f16, and 3 is bf16, which only tests use.
layout(constant_id = KV_FORMAT_ID) const uint kKvFormat = 0;
#define IF_BRAIN_ROWS(statement) \
  if (kKvFormat == 3) statement
vec2 brain_two(uint word) { return uintBitsToFloat(uvec2(word << 16, word & 0xffff0000)); }
uint to_brain(float x) {  // to nearest, ties to even
  const uint bits = floatBitsToUint(x);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
#else
#define IF_BRAIN_ROWS(statement)
#endif

#define KV_ROW_WORDS(head_dim) ((head_dim) / 2)

// The bits of channel c; f16 replaces values beyond its range by its largest number, and adds 1 to `beyond`.
uint kv_bits(float x, inout uint beyond) {
  IF_BRAIN_ROWS(return to_brain(x);)
  if (x < -kLargestHalf || x > kLargestHalf) {
    ++beyond;
    x = x < 0 ? -kLargestHalf : kLargestHalf;
  }
  return to_half(x);
}
uint kv_bits(uint word, uint c) { return word >> c % 2 * 16 & 0xffff; }
// A word of the bits of two channels.
uint kv_word(uint low, uint high) { return low | high << 16; }

// Channels of a word, of two words and of four.
vec2 kv_two(uint word) {
  IF_BRAIN_ROWS(return brain_two(word);)
  return unpackHalf2x16(word);
}
float kv_channel(uint word, uint c) {
  IF_BRAIN_ROWS(return brain_two(word)[c & 1];)
  return half_in(word, c);
}
vec4 kv_four(uvec2 words) { return vec4(kv_two(words.x), kv_two(words.y)); }
void kv_eight(uvec4 words, out vec4 low, out vec4 high) {
  low = kv_four(words.xy);
  high = kv_four(words.zw);
}
// The same channels as f16.
uint kv_halves(uint word) {
  IF_BRAIN_ROWS({
    const vec2 x = brain_two(word);
    return pack_halves(x.x, x.y);
  })
  return word;
}
uvec4 kv_halves(uvec4 words) {
  IF_BRAIN_ROWS(return uvec4(kv_halves(words.x), kv_halves(words.y), kv_halves(words.z), kv_halves(words.w));)
  return words;
}

#endif
