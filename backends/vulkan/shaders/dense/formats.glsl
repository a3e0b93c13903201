// The weight types of base/dtype_list.h as floats, four neighbours of a row at a time.
// backends/cpu/isa/dequant.h defines the formats.
//
// The type is specialisation constant 0, so the branches of other types are removed when a pipeline is
// created. Products of scales and integers are exact in f32, so a weight is rounded at most once, as on the
// CPU.
#include "../../../../base/dtype_list.h"

layout(constant_id = 0) const uint kType = 0;

// With BOOKS all types are supported, otherwise only those whose elements are numbers with a scale, and
// possibly an offset, of their group. The code of a token's products, which a card keeps in its caches, is
// then smaller.

// Word i of a matrix, and of the code books. The includer defines both.
uint word_at(uint matrix, uint i);
#ifdef BOOKS
uint book_word(uint i);
#endif

#define X(name, number, block, bytes) const uint k##name = number;
THIMBLE_DTYPES(X)
#undef X
#define X(name, number, block, bytes) kType == number ? block :
const uint kBlock = THIMBLE_DTYPES(X) 0;
#undef X
#define X(name, number, block, bytes) kType == number ? bytes :
const uint kBlockBytes = THIMBLE_DTYPES(X) 0;
#undef X

const bool kPlain = kBlock == 1;  // no blocks: rows of any length

// A row of a matrix, or a position inside one: a block, or the quants of a block.
struct Row {
  uint matrix;
  uint first;  // byte offset in the matrix; even, except for mxfp4
  uint cols;   // elements per row
};
Row behind(Row row, uint bytes) { return Row(row.matrix, row.first + bytes, row.cols); }

// Word i from a position that is at the start, or in the middle, of an aligned word.
uint word(Row row, uint i) { return word_at(row.matrix, row.first / 4 + i); }
uint even_word(Row row, uint i) {
  const uint at = row.first / 4 + i, first = word_at(row.matrix, at);
  if (row.first % 4 == 0) return first;  // the next word may be outside of the matrix
  return first >> 16 | word_at(row.matrix, at + 1) << 16;
}
// Four bytes at any byte position, and one byte.
uint any_word(Row row) {
  const uint at = row.first / 4, shift = row.first % 4 * 8, first = word_at(row.matrix, at);
  if (shift == 0) return first;
  return first >> shift | word_at(row.matrix, at + 1) << 32 - shift;
}
uint byte_at(Row row, uint i) { return word_at(row.matrix, (row.first + i) / 4) >> (row.first + i) % 4 * 8 & 0xff; }
// The first two bytes.
uint half_bits(Row row) { return word_at(row.matrix, row.first / 4) >> row.first / 2 % 2 * 16 & 0xffff; }
float half_at(Row row) { return unpackHalf2x16(half_bits(row)).x; }

// Four bytes as numbers.
vec4 unsigned_bytes(uint w) { return vec4(w & 0xff, w >> 8 & 0xff, w >> 16 & 0xff, w >> 24); }
vec4 signed_bytes(uint w) {
  const int i = int(w);
  return vec4(i << 24 >> 24, i << 16 >> 24, i << 8 >> 24, i >> 24);
}
uint byte_of(uint w, uint i) { return w >> 8 * i & 0xff; }
// Moves bits 0 to 3 to bit 4 of four bytes, the value of a fifth bit.
uint fifth_bits(uint bits) { return (bits & 15) * 0x02040810 & 0x10101010; }

// ---- f32, f16, bf16 ----

float plain_weight(Row row, uint column) {
  if (kType == kF32) return uintBitsToFloat(word(row, column));
  const uint bits = half_bits(behind(row, 2 * column));
  return kType == kF16 ? unpackHalf2x16(bits).x : uintBitsToFloat(bits << 16);
}
vec4 plain_weights(Row row, uint column) {
  if (column + 4 > row.cols) {  // the end of a row, padded with zeros
    vec4 w = vec4(0);
    [[unroll]] for (uint i = 0; i < 3; ++i)
      if (column + i < row.cols) w[i] = plain_weight(row, column + i);
    return w;
  }
  if (kType == kF32)
    return uintBitsToFloat(
        uvec4(word(row, column), word(row, column + 1), word(row, column + 2), word(row, column + 3)));
  const uint low = even_word(row, column / 2), high = even_word(row, column / 2 + 1);
  return kType == kF16 ? vec4(unpackHalf2x16(low), unpackHalf2x16(high))
                       : uintBitsToFloat(uvec4(low << 16, low & 0xffff0000, high << 16, high & 0xffff0000));
}

// ---- blocks of 32: elements 4 quad to 4 quad + 3 ----

// The types of 4 and 5 bits: the low nibbles of 16 bytes are elements 0 to 15, the high nibbles 16 to 31.
uint low_or_high(uint w, uint quad) { return w >> quad / 4 * 4 & 0x0f0f0f0f; }

vec4 q8_0(Row b, uint quad) { return half_at(b) * signed_bytes(even_word(behind(b, 2), quad)); }
vec4 q4_0(Row b, uint quad) {
  const uint q = low_or_high(even_word(behind(b, 2), quad % 4), quad);
  return half_at(b) * (unsigned_bytes(q) - 8);
}
vec4 q4_1(Row b, uint quad) {
  const vec2 d = unpackHalf2x16(word(b, 0));
  return d.x * unsigned_bytes(low_or_high(word(b, 1 + quad % 4), quad)) + d.y;
}
vec4 q5_0(Row b, uint quad) {
  const uint q = low_or_high(even_word(behind(b, 6), quad % 4), quad);
  return half_at(b) * (unsigned_bytes(q | fifth_bits(even_word(behind(b, 2), 0) >> 4 * quad)) - 16);
}
vec4 q5_1(Row b, uint quad) {
  const vec2 d = unpackHalf2x16(word(b, 0));
  const uint q = low_or_high(word(b, 2 + quad % 4), quad);
  return d.x * unsigned_bytes(q | fifth_bits(word(b, 1) >> 4 * quad)) + d.y;
}

// ---- blocks of 256: elements 4 quad to 4 quad + 3 of a group of 32 ----

// q4_K, q5_K. Bytes: d and m; 12 bytes with the scale and the minimum of each group in 6 bits; for q5_K 32
// bytes of fifth bits, bit g of byte i for element i of group g; 128 bytes of nibbles, of which two groups
// share 32.
vec4 q45_K(Row b, uint group, uint quad) {
  const bool q5 = kType == kQ5_K;
  const vec2 d = unpackHalf2x16(word(b, 0));
  const uint low = word(b, 1), middle = word(b, 2), high = word(b, 3), i = group % 4;
  const uint scales = group < 4 ? low & 0x3f3f3f3f : (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030);
  const uint minima = group < 4 ? middle & 0x3f3f3f3f : (high >> 4 & 0x0f0f0f0f) | (middle >> 2 & 0x30303030);
  uint q = word(b, (q5 ? 12 : 4) + group / 2 * 8 + quad) >> group % 2 * 4 & 0x0f0f0f0f;
  if (q5) q |= (word(b, 4 + quad) >> group & 0x01010101) << 4;
  return d.x * float(byte_of(scales, i)) * unsigned_bytes(q) - d.y * float(byte_of(minima, i));
}

// Bytes: 128 bytes of low nibbles; 64 of pairs of high bits; 16 signed scales of 16 elements each; d. Each
// half of 128 elements has 64 low and 32 high bytes: byte i of the high ones belongs to elements i, 32 + i,
// 64 + i, 96 + i.
vec4 q6_K(Row b, uint group, uint quad) {
  const uint part = group / 4, quarter = group % 4;
  const uint low = even_word(b, 16 * part + quarter % 2 * 8 + quad) >> quarter / 2 * 4 & 0x0f0f0f0f;
  const uint high = even_word(b, 32 + 8 * part + quad) >> 2 * quarter & 0x03030303;
  const uint scales = even_word(b, 48 + 2 * part + quarter / 2);
  const int scale = bitfieldExtract(int(scales), int(quarter % 2 * 2 + quad / 4) * 8, 8);
  return half_at(behind(b, 208)) * float(scale) * (unsigned_bytes(low | high << 4) - 32);
}

// 2^(x - 128), the scale of an mxfp4 block.
float fp4_scale(uint x) { return uintBitsToFloat(x < 2 ? 0x00200000 << x : x - 1 << 23); }

#ifdef BOOKS
uint pairs_of_bits(uint w, uint group) { return w >> 2 * (group % 4) & 0x03030303; }

// Bytes: 16 bytes with scales (low nibbles) and minima (high nibbles) of 16 elements each; 64 bytes of pairs
// of bits; d; m. Each half of 128 elements has 32 bytes: byte i belongs to elements i, 32 + i, 64 + i, 96 +
// i.
vec4 q2_K(Row b, uint group, uint quad) {
  const uint q = pairs_of_bits(word(b, 4 + group / 4 * 8 + quad), group);
  const uint scale = byte_at(b, 2 * group + quad / 4);
  const vec2 d = unpackHalf2x16(word(b, 20));
  return d.x * float(scale & 15) * unsigned_bytes(q) - d.y * float(scale >> 4);
}
// Bytes: 32 bytes of third bits, bit g of byte i for element i of group g; 64 bytes as in q2_K; 12 bytes with
// 16 scales of six bits, first low nibbles, then pairs of high bits; d.
vec4 q3_K(Row b, uint group, uint quad) {
  const uint q = pairs_of_bits(even_word(b, 8 + group / 4 * 8 + quad), group);
  const uint third = even_word(b, quad) >> group & 0x01010101;
  const uint i = 2 * group + quad / 4;
  const uint scale = byte_at(b, 96 + i % 8) >> i / 8 * 4 & 15 | (byte_at(b, 104 + i % 4) >> i / 4 * 2 & 3) << 4;
  return half_at(behind(b, 108)) * float(int(scale) - 32) * (unsigned_bytes(q | third << 2) - 4);
}

// Types whose nibbles index a table of 16 values, stored four per word.
const uint kIq4Values[4] = {0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535};  // -127 -104 -83 ... 89 113
const uint kFp4Values[4] = {0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc};  // 0 1 2 3 4 6 8 12 0 -1 ... -12
vec4 iq4_values(uint q) {
  vec4 v;
  [[unroll]] for (uint i = 0; i < 4; ++i) {
    const uint n = byte_of(q, i);
    const uint four = kType == kMXFP4 || kType == kNVFP4 ? kFp4Values[n / 4] : kIq4Values[n / 4];
    v[i] = float(bitfieldExtract(int(four), int(n % 4 * 8), 8));
  }
  return v;
}
vec4 iq4_nl(Row b, uint quad) {
  return half_at(b) * iq4_values(low_or_high(even_word(behind(b, 2), quad % 4), quad));
}
// Bytes: an exponent x, 16 bytes of nibbles. Value: 2^(x - 128) * value, since the table's values are
// doubled.
vec4 mxfp4(Row b, uint quad) {
  return fp4_scale(byte_at(b, 0)) * iq4_values(low_or_high(any_word(behind(b, 1 + quad % 4 * 4)), quad));
}
// Half of a number of 8 bits: no sign, 4 bits of exponent, 3 of mantissa. NaN is read as 0.
float half_of_e4m3(uint bits) {
  if (bits == 0x7f) return 0;
  const uint exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 0) return float(mantissa) * (1.0 / 1024);
  return float(8 + mantissa) * uintBitsToFloat(exponent + (127 - 11) << 23);
}
// Bytes: 4 scales of 16 elements; for each of these groups 8 bytes, of which the low nibbles are elements 0
// to 7 and the high nibbles the others. `group` is one of two of 32 elements.
vec4 nvfp4(Row b, uint group, uint quad) {
  const uint sixteen = 2 * group + quad / 4;
  const uint q = word(b, 1 + 2 * sixteen + quad % 2) >> quad / 2 % 2 * 4 & 0x0f0f0f0f;
  return half_of_e4m3(byte_of(word(b, 0), sixteen)) * iq4_values(q);
}
// Bytes: d; 2 bytes with the high bits of the scales in pairs; 4 with their low nibbles; 128 of nibbles.
vec4 iq4_xs(Row b, uint group, uint quad) {
  const uint head = word(b, 0);
  const uint scale = word(b, 1) >> 4 * group & 15 | (head >> 16 + 2 * group & 3) << 4;
  const uint q = low_or_high(word(b, 2 + 4 * group + quad % 4), quad);
  return unpackHalf2x16(head).x * float(int(scale) - 32) * iq4_values(q);
}

// Numbers -1, 0 and 1: as pairs of bits, or as base-3 digits, which multiplication by 3 moves out at the top
// of a byte.
vec4 tq2_0(Row b, uint group, uint quad) {
  return half_at(behind(b, 64)) * (unsigned_bytes(pairs_of_bits(even_word(b, group / 4 * 8 + quad), group)) - 1);
}
const uint kPowersOf3[5] = {1, 3, 9, 27, 81};
vec4 tq1_0(Row b, uint group, uint quad) {
  // 32 bytes for groups 0 to 4, 16 for groups 5, 6 and half of 7, 4 for the rest.
  const uint sixteen = 2 * (group - 5) + quad / 4;
  const bool last = group == 7 && quad >= 4;
  const uint w = even_word(b, group < 5 ? quad : last ? 12 : 8 + quad % 4);
  const uint power = kPowersOf3[group < 5 ? group : last ? quad - 4 : sixteen];
  const uvec4 bytes = uvec4(w, w >> 8, w >> 16, w >> 24) & 0xff;
  return half_at(behind(b, 52)) * (vec4((bytes * power & 0xff) * 3 >> 8) - 1);
}

// Numbers of one or two bits. Bytes: d; 16 bytes.
vec4 q2_0(Row b, uint group, uint quad) {
  const uint q = byte_at(b, 2 + 8 * group + quad);
  return half_at(b) * (vec4(uvec4(q, q >> 2, q >> 4, q >> 6) & 3) - 1);
}
vec4 q1_0(Row b, uint group, uint quad) {
  const uint q = byte_at(b, 2 + 4 * group + quad / 2) >> quad % 2 * 4;
  return half_at(b) * (vec4(uvec4(q << 1, q, q >> 1, q >> 2) & 2) - 1);
}

#include "books.glsl"

vec4 other_weights(Row b, uint group, uint quad) {
  switch (kType) {
    case kIQ4_NL: return iq4_nl(b, quad);
    case kMXFP4: return mxfp4(b, quad);
    case kQ2_K: return q2_K(b, group, quad);
    case kQ3_K: return q3_K(b, group, quad);
    case kIQ4_XS: return iq4_xs(b, group, quad);
    case kTQ1_0: return tq1_0(b, group, quad);
    case kTQ2_0: return tq2_0(b, group, quad);
    case kNVFP4: return nvfp4(b, group, quad);
    case kQ2_0: return q2_0(b, group, quad);
    case kQ1_0: return q1_0(b, group, quad);
  }
  return book_weights(b, group, quad);
}
#else
vec4 other_weights(Row b, uint group, uint quad) { return vec4(0); }
#endif

// The four weights of a row from column 256 unit + 32 group + 4 quad on, which must exist; group and quad are
// below 8.
vec4 weights(Row row, uint unit, uint group, uint quad) {
  if (kPlain) return plain_weights(row, 256 * unit + 32 * group + 4 * quad);
  const uint groups = max(kBlock / 32, 1);  // of a block
  const Row b = behind(row, (8 * unit + group) / groups * kBlockBytes);
  switch (kType) {
    case kQ8_0: return q8_0(b, quad);
    case kQ4_0: return q4_0(b, quad);
    case kQ4_1: return q4_1(b, quad);
    case kQ5_0: return q5_0(b, quad);
    case kQ5_1: return q5_1(b, quad);
    case kQ4_K: return q45_K(b, group, quad);
    case kQ5_K: return q45_K(b, group, quad);
    case kQ6_K: return q6_K(b, group, quad);
  }
  return other_weights(b, group % groups, quad);
}

// Eight weights as f16. Values beyond f16's range, which no model comes near, are clamped.
uvec4 pack_eight(vec4 low, vec4 high) {
  const float most = 65504;
  low = clamp(low, -most, most);
  high = clamp(high, -most, most);
  return uvec4(packHalf2x16(low.xy), packHalf2x16(low.zw), packHalf2x16(high.xy), packHalf2x16(high.zw));
}
