// How matvec multiplies q4_K, q5_K, q6_K and q8_0 if a device sums the products of four bytes in one
// instruction: exactly, in integers. The 32 numbers of x in a piece share a unit, a power of two. In this
// unit each number is a 23-bit integer, written as three signed bytes, its digits in base 256. An H200 then
// takes four instructions per weight of q4_K; with floats it takes eight.
//
// Error: let M be the largest of these numbers, M >= 2^(e - 127). The unit is 2^(e - 148), so rounding to a
// whole number of units changes each by at most half a unit, 2^-22 M. A product is therefore off by at most
// 2^-22 M times the sum of |w| over the piece, plus the rounding of any sum in f32. Below M = 2^-105 the unit
// stays 2^-126.

// Sums products of signed bytes with bytes that are unsigned in the first function and signed in the second.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4452)
int dot_unsigned(int digits, uint numbers, spirv_literal uint packed_format);
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_signed(int digits, int numbers, spirv_literal uint packed_format);
#define kFourBytes 0u

const uint kDigits = 3;
struct Digits {
  int words[kDigits * 8];  // digit d of the four numbers of quad i is word 8 d + i
  float unit;              // of digit 0
};

// `sum`: of all 32 numbers.
Digits digits_of(vec4 quads[8], float sum) {
  vec4 largest = vec4(0);
  [[unroll]] for (uint i = 0; i < 8; ++i) largest = max(largest, abs(quads[i]));
  // All are below 2^(exponent - 126), so after scaling by 2^(148 - exponent) they are below 2^22.
  const uint exponent = max(floatBitsToUint(max(max(largest.x, largest.y), max(largest.z, largest.w))) >> 23, 22);
  const float scale = uintBitsToFloat((275 - exponent) << 23);
  Digits d;
  // Infinity and NaN, which max() may have lost, have no digits; their products are NaN.
  const bool is_number = exponent < 255 && (floatBitsToUint(sum) & 0x7fffffff) <= 0x7f800000;
  d.unit = uintBitsToFloat(is_number ? (exponent - 21) << 23 : 0x7fc00000);
  [[unroll]] for (uint i = 0; i < 8; ++i) {
    // Adding 3 * 2^22 gives a float whose last bits are the integer's. Adding 128 to each lower byte carries
    // into the next byte if a digit becomes negative; flipping its top bit subtracts the 128 again.
    const uvec4 n = floatBitsToUint(fma(quads[i], vec4(scale), vec4(12582912.0))) - 0x4b400000 + 0x8080;
    // Digits 0 and 2 of two numbers, interleaved, and digit 1 of two.
    const uvec2 even = n.xz & 0x00ff00ff | (n.yw & 0x00ff00ff) << 8, odd = n.xz >> 8 & 0xff | n.yw & 0xff00;
    d.words[i] = int((even.x & 0xffff | even.y << 16) ^ 0x80808080);
    d.words[8 + i] = int((odd.x | odd.y << 16) ^ 0x80808080);
    d.words[16 + i] = int(even.x >> 16 | even.y & 0xffff0000);
  }
  return d;
}
