// Row kernels: norm, activation, gated unit, rotation. Included inside the namespace of
// an instruction set. Every reduction has one order, fixed by the length of the row
// alone.

constexpr float kNotFinite =
    __builtin_nanf("");  // what is computed from numbers that are not finite, or too large

// The lines of a row: whole ones, then what is left; `line(i, n)` has n numbers at i.
template <class F>
HR_INLINE void each_line(int n, F&& line) {
  int i = 0;
  for (; i + 16 <= n; i += 16) line(i, 16);
  if (i < n) line(i, n - i);
}

HR_INLINE Vf load_line(const float* p, int n) { return n == 16 ? load(p) : load_partial(p, n); }
HR_INLINE void store_line(float* p, Vf x, int n) {
  if (n == 16)
    store(p, x);
  else
    store_partial(p, x, n);
}

// The sum of `part` over the lines of a row; beyond its end a line has zeros.
template <class F>
HR_INLINE float sum_lines(const float* x, int n, F&& part) {
  Vf sums[4] = {zero(), zero(), zero(), zero()};  // one sum would wait for itself line after line
  int k = 0;
  for (; k + 64 <= n; k += 64)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sums[i] = part(load(x + k + 16 * i), 16, sums[i]);
  each_line(n - k, [&](int i, int m) { sums[0] = part(load_line(x + k + i, m), m, sums[0]); });
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <NormKind Kind>
void norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  constexpr bool centred = Kind == NormKind::kLayer;
  const float count = static_cast<float>(n);
  Vf mean = zero();
  if constexpr (centred)
    mean = set1(sum_lines(x, n, [](Vf v, int, Vf sum) { return add(sum, v); }) / count);
  const float square =
      sum_lines(x, n,
                [&](Vf v, int m, Vf sum) {
                  if constexpr (centred)
                    v = m == 16 ? sub(v, mean) : keep_lanes(sub(v, mean), 0, m, 0.0f);
                  return fma(v, v, sum);
                }) /
      count;
  // Where the squares are too large for a sum, a factor of 0 would make a row of zeros
  // of it.
  const Vf factor =
      set1(__builtin_isfinite(square) ? 1.0f / __builtin_sqrtf(square + eps) : kNotFinite);
  each_line(n, [&](int i, int m) {
    Vf v = load_line(x + i, m);
    if constexpr (centred) v = sub(v, mean);
    v = mul(mul(v, factor), load_line(weight + i, m));
    store_line(out + i, bias ? add(v, load_line(bias + i, m)) : v, m);
  });
}

template <Activation A>
void activate(const float* x, float* out, int n) {
  each_line(n, [&](int i, int m) { store_line(out + i, activated<A>(load_line(x + i, m)), m); });
}

template <Activation A>
void glu(const float* gate, const float* up, float* out, int n) {
  each_line(n, [&](int i, int m) {
    store_line(out + i, gated<A>(load_line(gate + i, m), load_line(up + i, m)), m);
  });
}

template <Activation A>
void activate_tile(const float* x, int rows, float* out, size_t stride) {
  for (int m = 0; m < rows; m++) store(out + m * stride, activated<A>(load(x + 16 * m)));
}

template <Activation A>
void glu_tile(const float* gate, const float* up, int rows, float* out, size_t stride) {
  for (int m = 0; m < rows; m++)
    store(out + m * stride, gated<A>(load(gate + 16 * m), load(up + 16 * m)));
}

template <int A = 0>
void fill_activations(Kernels& k) {
  constexpr auto activation = static_cast<Activation>(A);
  if constexpr (activation != Activation::kClampedSwiglu) {
    k.activate[A] = activate<activation>;
    k.activate_tile[A] = activate_tile<activation>;
  }
  k.glu[A] = glu<activation>;
  k.glu_tile[A] = glu_tile<activation>;
  if constexpr (A + 1 < kNumActivations) fill_activations<A + 1>(k);
}

void add_rows(const float* x, const float* y, float* out, int n) {
  each_line(n, [&](int i, int m) {
    store_line(out + i, add(load_line(x + i, m), load_line(y + i, m)), m);
  });
}

void finish_tile(const float* x, int rows, int n, const float* residual, size_t residual_stride,
                 float* out, size_t stride) {
  for (int m = 0; m < rows; m++) {
    const Vf v = load(x + 16 * m);
    store_line(out + m * stride,
               residual ? add(v, load_line(residual + m * residual_stride, n)) : v, n);
  }
}

void rotate_tile(const float* x, int rows, const float* cos, const float* sin, size_t stride,
                 float* out, size_t out_stride) {
  for (int m = 0; m < rows; m++) {
    const Vf v = load(x + 16 * m);
    store(out + m * out_stride,
          fma(v, load(cos + m * stride), mul(swap_pairs(v), load(sin + m * stride))));
  }
}

void rotate_row(const float* x, const float* cos, const float* sin, int head_dim, int n,
                float* out) {
  each_line(n, [&](int i, int m) {
    const Vf v = load_line(x + i, m);
    store_line(out + i,
               fma(v, load(cos + i % head_dim), mul(swap_pairs(v), load(sin + i % head_dim))), m);
  });
}

void scale(const float* x, float factor, float* out, int n) {
  each_line(n,
            [&](int i, int m) { store_line(out + i, mul(load_line(x + i, m), set1(factor)), m); });
}

void soft_cap_row(const float* x, float cap, float* out, int n) {
  each_line(n, [&](int i, int m) { store_line(out + i, soft_cap(load_line(x + i, m), cap), m); });
}

void combine(const float* x, const float* weights, int count, int n, float* out) {
  each_line(n, [&](int k, int m) {
    Vf sum = mul(load_line(x + k, m), set1(weights[0]));
    for (int i = 1; i < count; i++)
      sum = fma(load_line(x + static_cast<size_t>(i) * n + k, m), set1(weights[i]), sum);
    store_line(out + k, sum, m);
  });
}

// Multiply-adds done by `iterations` rounds of twelve independent dots, to measure what
// the processor can do: of int8 eight at a time, since some processors sum up a group
// of columns in 16 bits.
template <int Kind>
double dot_rate_of(int64_t iterations) {
  alignas(64) int8_t x[64 + 32 * kSumsTogether];
  for (size_t i = 0; i < sizeof x; i++) x[i] = static_cast<int8_t>(i % 64);
  const int8_t* read = x;
  const auto forget = [&read] {
    asm volatile("" : "+r"(read) : : "memory");
  };  // what was read may be other now
  forget();
  Vb w[8];
#pragma GCC unroll 8
  for (Vb& each : w) each = fields(load_bytes(reinterpret_cast<const uint8_t*>(read)), 0, 15);
  Vi sums[12];
  Vf floats[12];
  // All lanes are different, or one chain would do for several.
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++)
    sums[i] = add(load_s8(read), set1(16 * i)), floats[i] = to_float(sums[i]);
  const volatile float half = 0.5f;
  const Vf f = set1(half);
  for (int64_t n = 0; n < iterations; n++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      if constexpr (Kind == 0) {
        if (i % kSumsTogether) continue;
        forget();
        dots<4, 8, kSumsTogether>(&sums[i], w, read);
      } else if constexpr (Kind == 1) {
        forget();
        floats[i] = dot_pair(floats[i], w[0], reinterpret_cast<const Pair*>(read));
      } else {
        floats[i] = fma(f, f, floats[i]);
      }
    }
  }
  int32_t total = 0;
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) total += reduce_add(add(sums[i], round_to_int(floats[i])));
  [[maybe_unused]] static volatile int32_t sink = 0;  // keeps the loop alive
  sink = total;
  return static_cast<double>(iterations) * 12 * (Kind == 0 ? 8 * 64 : Kind == 1 ? 32 : 16);
}

double dot_rate(int kind, int64_t iterations) {
  return kind == 0   ? dot_rate_of<0>(iterations / 8)
         : kind == 1 ? dot_rate_of<1>(iterations)
                     : dot_rate_of<2>(iterations);
}
