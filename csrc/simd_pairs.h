// Pairs of bf16 for instruction sets that do not multiply them. Included by their
// vector headers.
constexpr bool kHasBf16 = false;
using Pair = float;
constexpr int kPairStride = 2;
HR_INLINE Vf dot_pair(Vf acc, Vb w, const Pair* x) {
  return fma(odd_bf16(w), set1(x[1]), fma(even_bf16(w), set1(x[0]), acc));
}
// sums[n] += a line of pairs times x[n * stride]. One half of the line at a time, so
// that 16 registers have room for the sums.
template <int N>
HR_INLINE void dot_pairs(Vf (&sums)[N], const uint8_t* line, const Pair* x, size_t stride) {
  x = reload(x);
  const Vf even = even_bf16(load_bytes(line));
  each<N>([&](int n) HR_INLINE_LAMBDA {
    stay_in_registers(sums[n] = fma(even, set1(x[n * stride]), sums[n]));
  });
  const Vf odd = odd_bf16(load_bytes(reload(line)));
  each<N>([&](int n) HR_INLINE_LAMBDA {
    stay_in_registers(sums[n] = fma(odd, set1(x[n * stride + 1]), sums[n]));
  });
}
// sums[i][n] += line i of pairs times x[n * stride]; the lines are adjacent.
template <int Lines, int N>
HR_INLINE void dot_lines(Vf (&sums)[Lines][N], const uint8_t* lines, const Pair* x, size_t stride) {
  each<Lines>([&](int i) HR_INLINE_LAMBDA { dot_pairs(sums[i], lines + 64 * i, x, stride); });
}
HR_INLINE void store_pairs(Pair* p, Vf x) { store(p, x); }
HR_INLINE void store_pairs(Pair* p, Vf x, Vf more) { store(p, x), store(p + 16, more); }
