// The erf form of gelu: x times the cumulative normal distribution at x. GLSL has no erf.

// The tail beyond t >= 0 is exp(-t^2 / 2) R(t) with a smooth R. A polynomial in u = 1 / (1 + 0.26 t) that
// interpolates R / u at Chebyshev nodes has a relative error below 2^-24 up to t = 13.3; beyond that the tail
// is not a normal number. Evaluated in f32, this becomes 6 half ulps, and 16 + t^2 / 2 with the errors of the
// square, the exponential and the division.
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
