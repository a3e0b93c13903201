// e^x with an error of at most 1.1 ulp, as in backends/cpu/isa/vector.h; GLSL's own may be off by 3 + 2 |x|
// ulp.

float exp_ulp(float x) {
  const float low = -87.336544, high = 88.37626;  // in this range 2^n is a normal number
  const float c = clamp(x, low, high);
  // x = n ln 2 + r. ln 2 is split in two parts; the product of n and the first is exact, and so is the
  // difference. This does not use fma(), which `precise` does not protect: Mesa would merge both parts.
  const float n = roundEven(c * 1.44269504);
  precise const float rest = c - n * 0.693145752;
  precise const float r = fma(n, -1.42860677e-6, rest);
  // Taylor series up to r^7; the remainder is below 2^-27 for |r| <= ln 2 / 2.
  precise float p = fma(r, 1.0 / 5040, 1.0 / 720);
  p = fma(p, r, 1.0 / 120);
  p = fma(p, r, 1.0 / 24);
  p = fma(p, r, 1.0 / 6);
  p = fma(p, r, 0.5);
  p = fma(p * r, r, r) + 1.0;
  const float result = p * uintBitsToFloat(uint(int(n) + 127) << 23);
  return x < low ? 0 : x > high ? uintBitsToFloat(0x7f800000) : result;
}
