// The erf form of gelu, x times the normal distribution's share below x: GLSL has no erf.

// The share beyond t >= 0 is exp(-t^2 / 2) R(t), and R smooth: a polynomial in u = 1 / (1 + 0.26 t) that meets R / u at
// Chebyshev's nodes is off by less than 2^-24 of it up to t = 13.3, beyond which the share is no normal number. Evaluated in
// f32 that becomes 6 half ulps, and 16 + t^2 / 2 with those of the square, the exponential and the division.
float gelu_erf(float x) {
  const float t = min(abs(x), 13.3), u = 1 / (1 + 0.26 * t);
  float r = 0.0324409045;
  r = r * u - 0.162160531;
  r = r * u + 0.270606011;
  r = r * u - 0.172629699;
  r = r * u + 0.175805464;
  r = r * u + 0.0447428524;
  r = r * u + 0.104629569;
  r = r * u + 0.102793239;
  r = r * u + 0.103772186;
  const float beyond = exp_ulp(-0.5 * t * t) * (r * u);
  return x * (x < 0 ? beyond : 1 - beyond);
}
