// The weight types of base/dtype.h as floats, four neighbours of a row at a time. backends/cpu/isa/dequant.h defines them.
//
// The type is specialisation constant 0: the branches of the others are gone when a pipeline is made. Products of scales and
// integers are exact in f32, so a weight is rounded at most once, as on the CPU.

layout(constant_id = 0) const uint kType = 0;

// Word i of a matrix; the shader that includes this defines it.
uint word_at(uint matrix, uint i);

#define kF32 0u  // numbered as in GGUF
#define kF16 1u
#define kQ4_0 2u
#define kQ4_1 3u
#define kQ5_0 6u
#define kQ5_1 7u
#define kQ8_0 8u
#define kQ4_K 12u
#define kQ5_K 13u
#define kQ6_K 14u
#define kBF16 30u

const bool kPlain = kType == kF32 || kType == kF16 || kType == kBF16;  // no blocks: rows of any length

// A row of a matrix, or what follows in it: a block, or the quants in that.
struct Row {
  uint matrix;
  uint first;  // byte of the matrix that it starts at; an even number
  uint cols;   // elements of the row
};
Row behind(Row row, uint bytes) { return Row(row.matrix, row.first + bytes, row.cols); }

// Word i of what starts at a whole word, or in the middle of one.
uint word(Row row, uint i) { return word_at(row.matrix, row.first / 4 + i); }
uint even_word(Row row, uint i) {
  const uint at = row.first / 4 + i, first = word_at(row.matrix, at);
  if (row.first % 4 == 0) return first;  // the word behind it may lie behind the matrix
  return first >> 16 | word_at(row.matrix, at + 1) << 16;
}
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
// Bits 0 to 3 to bit 4 of four bytes: a fifth bit's worth.
uint fifth_bits(uint bits) { return (bits & 15) * 0x02040810 & 0x10101010; }

// ---- f32, f16, bf16 ----

float plain_weight(Row row, uint column) {
  if (kType == kF32) return uintBitsToFloat(word(row, column));
  const uint bits = half_bits(behind(row, 2 * column));
  return kType == kF16 ? unpackHalf2x16(bits).x : uintBitsToFloat(bits << 16);
}
vec4 plain_weights(Row row, uint column) {
  if (column + 4 > row.cols) {  // the end of a row, filled up with zeros
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

// The types of 4 and 5 bits: the low halves of 16 bytes are elements 0 to 15, the high halves 16 to 31.
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

// q4_K, q5_K: d and m, 12 bytes with the scale and the minimum of each group in 6 bits, [q5_K: 32 bytes of fifth bits, bit g
// of byte i for element i of group g], 128 bytes, of which two groups share 32.
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

// 128 bytes of low halves, 64 of pairs of high bits, 16 signed scales of 16 elements each, d. Each half of 128 elements has
// 64 low and 32 high bytes: byte i of the high ones serves elements i, 32 + i, 64 + i, 96 + i.
vec4 q6_K(Row b, uint group, uint quad) {
  const uint part = group / 4, quarter = group % 4;
  const uint low = even_word(b, 16 * part + quarter % 2 * 8 + quad) >> quarter / 2 * 4 & 0x0f0f0f0f;
  const uint high = even_word(b, 32 + 8 * part + quad) >> 2 * quarter & 0x03030303;
  const uint scales = even_word(b, 48 + 2 * part + quarter / 2);
  const int scale = bitfieldExtract(int(scales), int(quarter % 2 * 2 + quad / 4) * 8, 8);
  return half_at(behind(b, 208)) * float(scale) * (unsigned_bytes(low | high << 4) - 32);
}

// The four weights of a row from column 256 unit + 32 group + 4 quad on, which is one of its columns; quad < 8, and group < 8
// where blocks are of 256.
vec4 weights(Row row, uint unit, uint group, uint quad) {
  const uint block = 8 * unit + group;
  switch (kType) {
    case kQ8_0: return q8_0(behind(row, block * 34), quad);
    case kQ4_0: return q4_0(behind(row, block * 18), quad);
    case kQ4_1: return q4_1(behind(row, block * 20), quad);
    case kQ5_0: return q5_0(behind(row, block * 22), quad);
    case kQ5_1: return q5_1(behind(row, block * 24), quad);
    case kQ4_K: return q45_K(behind(row, unit * 144), group, quad);
    case kQ5_K: return q45_K(behind(row, unit * 176), group, quad);
    case kQ6_K: return q6_K(behind(row, unit * 210), group, quad);
  }
  return plain_weights(row, 32 * block + 4 * quad);
}

// Eight weights as f16. No model comes near the largest; what does, stops there.
uvec4 pack_eight(vec4 low, vec4 high) {
  const float most = 65504;
  low = clamp(low, -most, most);
  high = clamp(high, -most, most);
  return uvec4(packHalf2x16(low.xy), packHalf2x16(low.zw), packHalf2x16(high.xy), packHalf2x16(high.zw));
}
