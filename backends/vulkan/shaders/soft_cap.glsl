// cap tanh(x / cap) with an error of up to 2^-23 of the cap: the exponential may be off by 3 + 2 |x| ulp, but
// is small then.
float soft_cap(float x, float cap) {
  const float e = exp(-2 / cap * abs(x));
  return (x < 0 ? -cap : cap) * ((1 - e) / (1 + e));
}
