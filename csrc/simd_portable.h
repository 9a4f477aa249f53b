// 16-lane vectors in plain C++: correct everywhere, as fast as the compiler's auto-vectoriser makes it.
// Included inside the namespace of an instruction set; simd_avx2.h and simd_avx512.h offer the same names.
struct Vf {
  float v[16];
};
struct Vi {
  int32_t v[16];
};
struct Vb {
  uint8_t v[64];
};
constexpr int kMaxRows = 4;
constexpr bool kHasBf16 = false;

#define LANES(expr)                      \
  for (int i = 0; i < 16; i++) r.v[i] = expr; \
  return r

HR_INLINE Vf zero() { return Vf{}; }
HR_INLINE Vf set1(float x) { Vf r; LANES(x); }
HR_INLINE Vf load(const float* p) { Vf r; LANES(p[i]); }
HR_INLINE void store(float* p, Vf a) { for (int i = 0; i < 16; i++) p[i] = a.v[i]; }
HR_INLINE Vf load_partial(const float* p, int n) { Vf r; LANES(i < n ? p[i] : 0.0f); }
HR_INLINE void store_partial(float* p, Vf a, int n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
HR_INLINE Vf add(Vf a, Vf b) { Vf r; LANES(a.v[i] + b.v[i]); }
HR_INLINE Vf sub(Vf a, Vf b) { Vf r; LANES(a.v[i] - b.v[i]); }
HR_INLINE Vf mul(Vf a, Vf b) { Vf r; LANES(a.v[i] * b.v[i]); }
HR_INLINE Vf div(Vf a, Vf b) { Vf r; LANES(a.v[i] / b.v[i]); }
HR_INLINE Vf fma(Vf a, Vf b, Vf c) { Vf r; LANES(a.v[i] * b.v[i] + c.v[i]); }
HR_INLINE Vf max(Vf a, Vf b) { Vf r; LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
HR_INLINE Vf abs(Vf a) { Vf r; LANES(a.v[i] < 0 ? -a.v[i] : a.v[i]); }
HR_INLINE Vf swap_pairs(Vf a) { Vf r; LANES(a.v[i ^ 1]); }
// Lanes first..last-1 of a, `other` elsewhere.
HR_INLINE Vf keep_lanes(Vf a, int first, int last, float other) { Vf r; LANES(i >= first && i < last ? a.v[i] : other); }
// a where x >= bound, 0 elsewhere.
HR_INLINE Vf keep_if_ge(Vf a, Vf x, float bound) { Vf r; LANES(x.v[i] >= bound ? a.v[i] : 0.0f); }
HR_INLINE Vi set1(int32_t x) { Vi r; LANES(x); }
HR_INLINE Vi add(Vi a, Vi b) { Vi r; LANES(a.v[i] + b.v[i]); }
HR_INLINE Vi sub(Vi a, Vi b) { Vi r; LANES(a.v[i] - b.v[i]); }
HR_INLINE Vi mul(Vi a, Vi b) { Vi r; LANES(a.v[i] * b.v[i]); }
template <int N>
HR_INLINE Vi shift_left(Vi a) { Vi r; LANES(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N)); }
HR_INLINE Vf to_float(Vi a) { Vf r; LANES(static_cast<float>(a.v[i])); }
HR_INLINE Vi round_to_int(Vf a) { Vi r; LANES(static_cast<int32_t>(__builtin_rintf(a.v[i]))); }
HR_INLINE Vf round(Vf a) { Vf r; LANES(__builtin_rintf(a.v[i])); }
// a * 2^n for integral n.
HR_INLINE Vf scale_by_power(Vf a, Vf n) {
  Vf r;
  LANES(a.v[i] * __builtin_bit_cast(float, (static_cast<int32_t>(n.v[i]) + 127) << 23));
}
HR_INLINE void store_s8(int8_t* p, Vi a) { for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a.v[i]); }
HR_INLINE int32_t reduce_add(Vi a) {
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += a.v[i];
  return s;
}
// Sums of lanes 8 apart, then 4, 2 and 1.
HR_INLINE float reduce_add(Vf a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a.v[i] += a.v[i + n];
  return a.v[0];
}
HR_INLINE float reduce_max(Vf a) {
  for (int i = 1; i < 16; i++) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}
HR_INLINE Vf load_half(const uint16_t* p) { Vf r; LANES(half_to_float(p[i])); }
HR_INLINE Vi load_s8(const int8_t* p) { Vi r; LANES(p[i]); }
HR_INLINE Vi load_u8(const uint8_t* p) { Vi r; LANES(p[i]); }
HR_INLINE Vb load_bytes(const uint8_t* p) {
  Vb r;
  memcpy(r.v, p, 64);
  return r;
}
HR_INLINE Vb low_nibbles(Vb a) {
  for (auto& x : a.v) x &= 15;
  return a;
}
HR_INLINE Vb high_nibbles(Vb a) {
  for (auto& x : a.v) x >>= 4;
  return a;
}
// acc[i] += sum of w[4 i + b] * x[b]; Bits is the width of w.
template <int Bits>
HR_INLINE Vi dot(Vi acc, const Vb& w, const int8_t* x) {
  for (int i = 0; i < 16; i++)
    for (int b = 0; b < 4; b++) acc.v[i] += w.v[4 * i + b] * x[b];
  return acc;
}
// A line of 16 bf16 pairs times one activation pair in float32.
using Pair = float;
constexpr int kPairStride = 2;
HR_INLINE Vf dot_pair(Vf acc, const Vb& w, const Pair* x) {
  uint32_t d[16];
  memcpy(d, w.v, 64);
  for (int i = 0; i < 16; i++) {
    acc.v[i] = __builtin_bit_cast(float, d[i] << 16) * x[0] + acc.v[i];
    acc.v[i] = __builtin_bit_cast(float, d[i] & 0xffff0000u) * x[1] + acc.v[i];
  }
  return acc;
}
// 16 floats in the form that dot_pair takes: 8 pairs.
HR_INLINE void store_pairs(Pair* p, Vf a) { store(p, a); }
HR_INLINE void prefetch(const void*) {}
#undef LANES
