// cap tanh(x / cap), up to an error of 2^-23 of the cap: the exponential may be off by 3 + 2 |x| ulp, but then is small.
float soft_cap(float x, float cap) {
  const float e = exp(-2 / cap * abs(x));
  return (x < 0 ? -cap : cap) * ((1 - e) / (1 + e));
}
