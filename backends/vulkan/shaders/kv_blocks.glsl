// The part of kv_format.glsl for shaders that are compiled with BLOCKS. Keys are f16, q8_0 or q4_0, as
// KV_FORMAT_ID says, and values as KV_VALUE_FORMAT_ID says, which an includer that reads values defines too.
//
// BlockRows in backends/cpu/isa/kv_formats.h defines the formats of blocks. A block of 32 channels x is stored
// as H x / 8, where H is the Hadamard matrix, in codes of 8 or 4 bits times a scale, and loaded as H times the
// codes times scale / 4. The sums over codes are exact in integers, so all backends load the same bits. A row
// has the codes of all channels, and then the scales of all blocks, two of them a word.

const uint kHalfRows = 0, kByteRows = 1, kNibbleRows = 2;  // backends/kv_formats.h
layout(constant_id = KV_FORMAT_ID) const uint kKvFormat = 0;
#ifdef KV_VALUE_FORMAT_ID
layout(constant_id = KV_VALUE_FORMAT_ID) const uint kValueFormat = 0;
#endif

const uint kBlock = 32;  // channels
// The words of a block's codes, of a row's codes, and of a row.
#define KV_BLOCK_WORDS(format) ((format) == kByteRows ? 8 : 4)
#define KV_CODE_WORDS(format, head_dim) ((head_dim) / kBlock * KV_BLOCK_WORDS(format))
#define KV_WORDS(format, head_dim) \
  ((format) == kHalfRows ? (head_dim) / 2 : KV_CODE_WORDS(format, head_dim) + ((head_dim) / kBlock + 1) / 2)
#define KV_ROW_WORDS(head_dim) KV_WORDS(kKvFormat, head_dim)

// Multiplies a block's codes by H: channels [8 eight, 8 eight + 8). Bits 3 and 4 of a channel's index choose
// among words or pairs of them, bit 2 and the others are in a word. A word holds several channels, whose sums
// stay in their own bits: as a whole it is a sum of multiples of 2^16 or 2^8, and borrows from the upper ones
// return when it is taken apart.
void byte_sums(uvec4 low, uvec4 high, uint eight, out ivec4 first, out ivec4 second) {
  low ^= 0x80808080;  // each code is 128 more
  high ^= 0x80808080;
  const uvec4 even_low = low & 0xff00ff, odd_low = low >> 8 & 0xff00ff, even_high = high & 0xff00ff,
              odd_high = high >> 8 & 0xff00ff;
  const bool minus_8 = (eight & 1) != 0, minus_16 = (eight & 2) != 0;
  const uvec4 even4 = minus_16 ? even_low - even_high : even_low + even_high,
              odd4 = minus_16 ? odd_low - odd_high : odd_low + odd_high;
  uvec2 even = minus_8 ? even4.xy - even4.zw : even4.xy + even4.zw,
        odd = minus_8 ? odd4.xy - odd4.zw : odd4.xy + odd4.zw;
  if (eight == 0) {
    even -= 0x2000200;
    odd -= 0x2000200;
  }
  const uint even_plus = even.x + even.y, even_minus = even.x - even.y, odd_plus = odd.x + odd.y,
             odd_minus = odd.x - odd.y;
  const ivec4 both = ivec4(even_plus + odd_plus, even_plus - odd_plus, even_minus + odd_minus, even_minus - odd_minus);
  const ivec4 a = both << 16 >> 16, b = both - a >> 16;
  const ivec4 plus = a + b, minus = a - b;
  first = ivec4(plus.xy, minus.xy);
  second = ivec4(plus.zw, minus.zw);
}
void nibble_sums(uvec4 words, uint eight, out ivec4 first, out ivec4 second) {
  const uvec4 even4 = words & 0x0f0f0f0f, odd4 = words >> 4 & 0x0f0f0f0f;  // each code is 8 more
  const bool minus_8 = (eight & 1) != 0, minus_16 = (eight & 2) != 0;
  const uvec2 even2 = minus_16 ? even4.xy - even4.zw : even4.xy + even4.zw,
              odd2 = minus_16 ? odd4.xy - odd4.zw : odd4.xy + odd4.zw;
  uint even = minus_8 ? even2.x - even2.y : even2.x + even2.y, odd = minus_8 ? odd2.x - odd2.y : odd2.x + odd2.y;
  if (eight == 0) {
    even -= 0x20202020;
    odd -= 0x20202020;
  }
  const uvec2 bytes = uvec2(even + odd, even - odd) + 0x80808080;  // each byte is 128 more than a sum
  const uvec2 low = bytes & 0xff00ff, high = bytes >> 8 & 0xff00ff;
  const ivec4 both = ivec4(low + high - 0x1000100, low - high);
  const ivec4 a = both << 16 >> 16, b = both - a >> 16;
  first = a + b;
  second = a - b;
}
void kv_decode(uint format, uvec4 low, uvec4 high, uint eight, float scale, out vec4 first, out vec4 second) {
  ivec4 a, b;
  if (format == kByteRows)
    byte_sums(low, high, eight, a, b);
  else
    nibble_sums(low, eight, a, b);
  first = vec4(a) * (scale * 0.25);
  second = vec4(b) * (scale * 0.25);
}

// KV_READER(name, words, format) defines what reads rows of the buffer `words`; `row` is a row's first word:
//
//   void name_eight(uint row, uint c, out vec4 first, out vec4 second)  // channels [c, c + 8), c a multiple of 8
//   float name_channel(uint row, uint c)
//   vec2 name_two(uint row, uint c)  // c is even
//
// The includer has declared kHeadDim, or defines it.
#define KV_READER(name, words, format)                                                                          \
  void name##_eight(uint row, uint c, out vec4 first, out vec4 second) {                                        \
    if (format == kHalfRows) {                                                                                  \
      const uint at = row + c / 2;                                                                              \
      unpack_halves(uvec4(words[at], words[at + 1], words[at + 2], words[at + 3]), first, second);              \
      return;                                                                                                   \
    }                                                                                                           \
    const uint block = c / kBlock, at = row + block * KV_BLOCK_WORDS(format);                                   \
    const uvec4 low = uvec4(words[at], words[at + 1], words[at + 2], words[at + 3]);                            \
    uvec4 high = uvec4(0);                                                                                      \
    if (format == kByteRows) high = uvec4(words[at + 4], words[at + 5], words[at + 6], words[at + 7]);          \
    const float scale = half_in(words[row + KV_CODE_WORDS(format, kHeadDim) + block / 2], block);               \
    kv_decode(format, low, high, c % kBlock / 8, scale, first, second);                                         \
  }                                                                                                             \
  float name##_channel(uint row, uint c) {                                                                      \
    vec4 first, second;                                                                                         \
    name##_eight(row, c & ~7u, first, second);                                                                  \
    return (c & 4) == 0 ? first[c & 3] : second[c & 3];                                                         \
  }                                                                                                             \
  vec2 name##_two(uint row, uint c) {                                                                           \
    vec4 first, second;                                                                                         \
    name##_eight(row, c & ~7u, first, second);                                                                  \
    const vec4 four = (c & 4) == 0 ? first : second;                                                            \
    return (c & 2) == 0 ? four.xy : four.zw;                                                                    \
  }
