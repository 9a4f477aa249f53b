// Functions of numbers, and the activations that are made of them. Included inside the
// namespace of an instruction set.
//
// What is computed from a number that is not finite is not finite, also where the
// function itself would bring it back: of two operands of `max`, the second is what
// comes out when one is NaN, and a product with 0 tells the others.

// c[0] x^(N - 1) + .. + c[N - 1]
template <int N>
HR_INLINE Vf polynomial(Vf x, const float (&c)[N]) {
  Vf p = set1(c[0]);
#pragma GCC unroll 12
  for (int i = 1; i < N; i++) p = fma(p, x, set1(c[i]));
  return p;
}

HR_INLINE Vf negative(Vf x) { return sub(zero(), x); }
HR_INLINE Vf at_most(float most, Vf x) { return negative(max(set1(-most), negative(x))); }
// y, or NaN where x is not finite.
HR_INLINE Vf if_finite(Vf x, Vf y) { return fma(x, zero(), y); }

// 2^t to 3e-6, 0 far below: a power of two times a polynomial in the remainder, the
// best of its degree on [-1/2, 1/2] that is 1 at 0.
HR_INLINE Vf exp2(Vf t) {
  const Vf n = round(t);
  return times_power_of_2(
      polynomial(sub(t, n), {9.5828548e-3f, 5.5906430e-2f, 2.4024099e-1f, 6.9312418e-1f, 1.0f}), n);
}

// e^(high + low) to 2e-7, 0 far below; for sums up to 88, of which `low` is a small
// part. The first part of ln 2 has so few bits that its products are exact.
HR_INLINE Vf exp_of_sum(Vf high, Vf low) {
  high = max(set1(-110.0f), high);
  const Vf n = round(mul(add(high, low), set1(1.44269504f)));
  const Vf r = fma(n, set1(2.12194440e-4f), add(fma(n, set1(-0.693359375f), high), low));
  return times_power_of_2(
      polynomial(mul(r, set1(1.44269504f)), {1.53533620e-4f, 1.33988750e-3f, 9.61843692e-3f,
                                             5.55033237e-2f, 2.40226477e-1f, 6.93147182e-1f, 1.0f}),
      n);
}

// cap * tanh(x / cap) to 5e-7: tanh(y) / y as a quotient in y^2, the best of its
// degrees up to 9, from where on tanh is 1.
HR_INLINE Vf soft_cap(Vf x, float cap) {
  const Vf y = at_most(9.0f, max(set1(-9.0f), mul(x, set1(1.0f / cap)))), z = mul(y, y);
  const Vf above =
      polynomial(z, {1.33185747e-8f, 2.05831057e-5f, 3.49401101e-3f, 1.33796975e-1f, 1.0f});
  const Vf below =
      polynomial(z, {7.76181082e-7f, 3.28305468e-4f, 2.58709826e-2f, 4.67130125e-1f, 1.0f});
  return if_finite(x, mul(set1(cap), div(mul(y, above), below)));
}

HR_INLINE Vf silu(Vf x) {
  return div(x, add(set1(1.0f), exp2(mul(max(x, set1(-80.0f)), set1(-1.44269504f)))));
}

// x times the share of the normal distribution below x, to 1e-6. With a = |x| that
// share, or what it lacks of 1, is exp(-a^2 / 2) times a function that falls slowly,
// here a polynomial in 1 / (1 + 0.26 a). The square is taken in two parts: 16 a,
// rounded, has an exact one.
HR_INLINE Vf gelu(Vf x) {
  const Vf a = at_most(16.0f, abs(x)), near = mul(round(mul(a, set1(16.0f))), set1(0.0625f));
  const Vf e = exp_of_sum(mul(mul(near, near), set1(-0.5f)),
                          mul(mul(sub(a, near), add(a, near)), set1(-0.5f)));
  const Vf t = div(set1(1.0f), fma(a, set1(0.26f), set1(1.0f)));
  const Vf tail = mul(mul(t, polynomial(t, {2.94353869e-2f, -1.47663325e-1f, 2.40890056e-1f,
                                            -1.38903484e-1f, 1.52681097e-1f, 5.45280315e-2f,
                                            1.02139287e-1f, 1.03141159e-1f, 1.03751771e-1f})),
                      e);
  return sub(max(zero(), x), mul(abs(x), tail));
}

// The same with the logistic distribution of 2 sqrt(2 / pi) (x + 0.044715 x^3).
HR_INLINE Vf gelu_tanh(Vf x) {
  const Vf a = at_most(16.0f, abs(x));
  const Vf e =
      exp_of_sum(mul(a, fma(mul(a, a), set1(-7.13548163e-2f), set1(-1.59576912f))), zero());
  return sub(max(zero(), x), mul(abs(x), div(e, add(set1(1.0f), e))));
}

HR_INLINE Vf relu(Vf x) { return if_finite(x, max(zero(), x)); }

HR_INLINE Vf clamped_swiglu(Vf gate, Vf up) {
  const Vf g = at_most(7.0f, gate), u = at_most(7.0f, max(set1(-7.0f), up));
  const Vf open =
      div(g, add(set1(1.0f), exp2(mul(max(set1(-47.0f), g), set1(-1.702f * 1.44269504f)))));
  return if_finite(gate, if_finite(up, mul(open, add(u, set1(1.0f)))));
}

template <Activation A>
HR_INLINE Vf activated(Vf x) {
  if constexpr (A == Activation::kSilu)
    return silu(x);
  else if constexpr (A == Activation::kGelu)
    return gelu(x);
  else if constexpr (A == Activation::kGeluTanh)
    return gelu_tanh(x);
  else
    return relu(x);
}

template <Activation A>
HR_INLINE Vf gated(Vf gate, Vf up) {
  if constexpr (A == Activation::kClampedSwiglu)
    return clamped_swiglu(gate, up);
  else
    return mul(activated<A>(gate), up);
}
