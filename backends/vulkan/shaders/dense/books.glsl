// The types whose elements come from a code book (backends/codebooks.h), with the interface of formats.glsl:
// elements 4 quad to 4 quad + 3 of a group of 32.
#include "../../../codebooks.h"

// Entry i of the book that begins at entry `first`.
uint book_entry(uint first, uint i) { return book_word((first + i) / 2) >> i % 2 * 16 & 0xffff; }

// Four indices into the list of a book's values, of `bits` bits each.
uvec4 places(uint entry, uint bits) {
  return uvec4(entry, entry >> bits, entry >> 2 * bits, entry >> 3 * bits) & (1 << bits) - 1;
}
// The indices of a quad within the eight elements of an entry.
uvec4 half_entry(uint entry, uint quad) { return places(entry >> quad % 2 * 8, 2); }

// Negates elements of a quad where `signs`, for eight elements, has a bit set.
vec4 with_signs(vec4 v, uint signs, uint quad) {
  const uint s = signs >> quad % 2 * 4;
  return uintBitsToFloat(floatBitsToUint(v) ^ (uvec4(s << 31, s << 30, s << 29, s << 28) & 0x80000000));
}
// Eight sign bits from seven: the number of set bits is even.
uint even_signs(uint seven) { return seven | (bitCount(seven) & 1) << 7; }

vec4 iq2_values(uvec4 place) { return vec4(8 + 17 * place + (place >> 1)); }      // 8, 25, 43
vec4 iq3_xxs_values(uvec4 place) { return vec4(4 + 8 * place + (place / 7) * 2); }  // 4, 12, ... 52, 62

// Bytes: d; 64 bytes with the low 8 bits of entries; 8 with their ninth bits; 32 of signs; 4 with a scale for
// each group.
vec4 iq3_s(Row b, uint group, uint quad) {
  const uint i = byte_at(b, 2 + 8 * group + quad) | (byte_at(b, 66 + group) >> quad & 1) << 8;
  const uint scale = byte_at(b, 106 + group / 2) >> group % 2 * 4 & 15;
  const vec4 values = vec4(2 * places(book_entry(THIMBLE_IQ3_S_FIRST, i), 4) + 1);
  return with_signs(half_at(b) * float(2 * scale + 1) * values, byte_at(b, 74 + 4 * group + quad / 2), quad);
}
// Bytes: d; 64 bytes of entries; for each group a word with seven signs for each 8 elements and the scale in
// its top 4 bits.
vec4 iq3_xxs(Row b, uint group, uint quad) {
  const uint entry = book_entry(THIMBLE_IQ3_XXS_FIRST, byte_at(b, 2 + 8 * group + quad)), w = even_word(behind(b, 66), group);
  return with_signs(half_at(b) * (0.5 + float(w >> 28)) * 0.5 * iq3_xxs_values(places(entry, 4)),
                    even_signs(w >> quad / 2 * 7 & 127), quad);
}

// Bytes: d; for each group 4 bytes of entries and such a word.
vec4 iq2_xxs(Row b, uint group, uint quad) {
  const Row words = behind(b, 2 + 8 * group);
  const uint entry = book_entry(THIMBLE_IQ2_XXS_FIRST, byte_at(words, quad / 2)), w = even_word(words, 1);
  return with_signs(half_at(b) * (0.5 + float(w >> 28)) * 0.25 * iq2_values(half_entry(entry, quad)),
                    even_signs(w >> quad / 2 * 7 & 127), quad);
}
// The scale of iq2_xs and iq2_s, whose bytes have a nibble for each 16 elements.
float iq2_scale(Row b, uint scales, uint group, uint quad) {
  return half_at(b) * (0.5 + float(byte_at(b, scales + group) >> quad / 4 * 4 & 15)) * 0.25;
}
// Bytes: d; for each 8 elements an entry of 9 bits and seven signs; 8 bytes of scales.
vec4 iq2_xs(Row b, uint group, uint quad) {
  const uint v = half_bits(behind(b, 2 + 8 * group + quad / 2 * 2));
  const vec4 values = iq2_values(half_entry(book_entry(THIMBLE_IQ2_XS_FIRST, v & 511), quad));
  return with_signs(iq2_scale(b, 66, group, quad) * values, even_signs(v >> 9), quad);
}
// Bytes: d; 32 bytes with the low 8 bits of entries; 32 of signs; 8 with the high two bits of entries; 8 of
// scales.
vec4 iq2_s(Row b, uint group, uint quad) {
  const uint eight = 4 * group + quad / 2;
  const uint entry = book_entry(THIMBLE_IQ2_S_FIRST, byte_at(b, 2 + eight) | (byte_at(b, 66 + group) >> quad / 2 * 2 & 3) << 8);
  return with_signs(iq2_scale(b, 74, group, quad) * iq2_values(half_entry(entry, quad)), byte_at(b, 34 + eight), quad);
}

vec4 iq1_values(uint entry, uint quad, bool less) { return vec4(half_entry(entry, quad)) - (less ? 1.125 : 0.875); }
// Bytes: d; 32 bytes with the low 8 bits of entries; for each group 16 bits: 3 high bits of each entry, 3
// bits of scale, and the sign of the 1/8.
vec4 iq1_s(Row b, uint group, uint quad) {
  const uint high = half_bits(behind(b, 34 + 2 * group));
  const uint entry = book_entry(THIMBLE_IQ1_FIRST, byte_at(b, 2 + 4 * group + quad / 2) | (high >> quad / 2 * 3 & 7) << 8);
  return half_at(b) * float(2 * (high >> 12 & 7) + 1) * iq1_values(entry, quad, high >> 15 != 0);
}
// Bytes: 32 bytes with the low 8 bits of entries; 16 with a nibble for each entry: 3 high bits and the sign
// of its 1/8; four times 16 bits: scales of 3 bits for each 16 elements, and a quarter of d in the top 4
// bits.
vec4 iq1_m(Row b, uint group, uint quad) {
  const uint eight = 4 * group + quad / 2;
  const uint high = byte_at(b, 32 + eight / 2) >> eight % 2 * 4 & 15;
  const uvec2 tops = uvec2(word(b, 12), word(b, 13));
  const uvec2 pairs = tops >> 12 & 15 | tops >> 24 & 0xf0;
  const float d = unpackHalf2x16(pairs.x | pairs.y << 8).x;
  const uint scale = tops[group / 4] >> group / 2 % 2 * 16 + group % 2 * 6 + quad / 4 * 3 & 7;
  const uint entry = book_entry(THIMBLE_IQ1_FIRST, byte_at(b, eight) | (high & 7) << 8);
  return d * float(2 * scale + 1) * iq1_values(entry, quad, high >= 8);
}

vec4 book_weights(Row b, uint group, uint quad) {
  switch (kType) {
    case kIQ3_S: return iq3_s(b, group, quad);
    case kIQ3_XXS: return iq3_xxs(b, group, quad);
    case kIQ2_S: return iq2_s(b, group, quad);
    case kIQ2_XS: return iq2_xs(b, group, quad);
    case kIQ2_XXS: return iq2_xxs(b, group, quad);
    case kIQ1_S: return iq1_s(b, group, quad);
    case kIQ1_M: return iq1_m(b, group, quad);
  }
  return vec4(0);
}
