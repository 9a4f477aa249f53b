// 16-lane vectors as one AVX-512 register. Included inside the namespace of an
// instruction set. The dot products are inline assembly: with intrinsics GCC 12 neither
// folds the broadcast into the instruction nor keeps the accumulators of a 16-row block
// in registers. Those of integers are volatile, so that they stay in the order of the
// source: two sums in turns are a tenth faster than one after the other and, on Zen 4,
// faster than four.
using Vf = __m512;
struct Vi {
  __m512i v;
};
using Vb = Vi;
using Vs = Vi;  // two 16-bit numbers in each lane
constexpr int kMaxRows = 16;
constexpr int kAccumulators = 24;  // vectors of sums that stay in registers
constexpr int kLinesTogether = 1;
constexpr bool kReducesTogether = true;  // 16 rows of activations
constexpr bool kSumsBetweenDots = true;
constexpr int kSumsTogether = 2;  // integer sums that go on in turns: a dot product waits for the
                                  // one before it in the same sum
constexpr int kRowsToFetchFor =
    2;  // from so many rows in a block, weights with scales by group are fetched ahead
constexpr int kMaxQueries = kAccumulators / 2;

HR_INLINE Vf zero() { return _mm512_setzero_ps(); }
HR_INLINE Vf set1(float x) { return _mm512_set1_ps(x); }
HR_INLINE Vf load(const float* p) { return _mm512_loadu_ps(p); }
HR_INLINE void store(float* p, Vf x) { _mm512_storeu_ps(p, x); }
HR_INLINE __mmask16 lanes_below(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1);
}
HR_INLINE Vf load_partial(const float* p, int n) {
  return _mm512_maskz_loadu_ps(lanes_below(n), p);
}
HR_INLINE void store_partial(float* p, Vf x, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), x); }
HR_INLINE Vf add(Vf x, Vf y) { return _mm512_add_ps(x, y); }
HR_INLINE Vf sub(Vf x, Vf y) { return _mm512_sub_ps(x, y); }
HR_INLINE Vf mul(Vf x, Vf y) { return _mm512_mul_ps(x, y); }
HR_INLINE Vf div(Vf x, Vf y) { return _mm512_div_ps(x, y); }
HR_INLINE Vf fma(Vf x, Vf y, Vf z) { return _mm512_fmadd_ps(x, y, z); }
HR_INLINE Vf max(Vf x, Vf y) { return _mm512_max_ps(x, y); }
HR_INLINE Vf abs(Vf x) { return _mm512_abs_ps(x); }
HR_INLINE Vf swap_pairs(Vf x) { return _mm512_permute_ps(x, 0xB1); }
HR_INLINE Vf keep_lanes(Vf x, int first, int last, float other) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(other),
                            static_cast<__mmask16>(lanes_below(last) & ~lanes_below(first)), x);
}
// Bit i: whether x[i] >= y[i].
HR_INLINE uint32_t ge_mask(Vf x, Vf y) { return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ); }
// x where its bit is set, 0 elsewhere.
HR_INLINE Vf keep_bits(Vf x, uint32_t mask) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(mask), x);
}
HR_INLINE Vi set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
HR_INLINE Vi add(Vi x, Vi y) { return {_mm512_add_epi32(x.v, y.v)}; }
HR_INLINE Vi sub(Vi x, Vi y) { return {_mm512_sub_epi32(x.v, y.v)}; }
HR_INLINE Vi mul(Vi x, Vi y) { return {_mm512_mullo_epi32(x.v, y.v)}; }
template <int N>
HR_INLINE Vi shift_left(Vi x) {
  return {_mm512_slli_epi32(x.v, N)};
}
template <int N>
HR_INLINE Vi shift_right(Vi x) {  // zeros come in
  return {_mm512_srli_epi32(x.v, N)};
}
template <int N>
HR_INLINE Vi shift_right_signed(Vi x) {  // copies of the sign come in
  return {_mm512_srai_epi32(x.v, N)};
}
HR_INLINE Vi and_bits(Vi x, Vi y) { return {_mm512_and_si512(x.v, y.v)}; }
HR_INLINE Vi bits(Vf x) { return {_mm512_castps_si512(x)}; }
HR_INLINE Vf from_bits(Vi x) { return _mm512_castsi512_ps(x.v); }
HR_INLINE void store(uint32_t* p, Vi x) { _mm512_storeu_si512(p, x.v); }
HR_INLINE Vf to_float(Vi x) { return _mm512_cvtepi32_ps(x.v); }
HR_INLINE Vi round_to_int(Vf x) { return {_mm512_cvtps_epi32(x)}; }
HR_INLINE Vf exponent_from_low_bits(Vf x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
}
HR_INLINE Vf round(Vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for whole n.
HR_INLINE Vf times_power_of_2(Vf x, Vf n) { return _mm512_scalef_ps(x, n); }
HR_INLINE void store_s8(int8_t* p, Vi x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}
HR_INLINE void store_s16(int16_t* p, Vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(x.v));
}
// The low bytes.
HR_INLINE void store_u8(uint8_t* p, Vi x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
HR_INLINE int32_t reduce_add(Vi x) { return _mm512_reduce_add_epi32(x.v); }
HR_INLINE float reduce_add(Vf x) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
HR_INLINE float reduce_max(Vf x) { return _mm512_reduce_max_ps(x); }
// Of 16 vectors what `combine` makes of the lanes of each: lane i is that of x[i].
template <class F>
HR_INLINE __m512i combine_each(const __m512i (&x)[16], F&& combine) {
  __m512i four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i *v = x + 4 * i,
                  a = combine(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1])),
                  b = combine(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    four[i] = combine(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const auto quarters = [&](__m512i a, __m512i b) {
    return combine(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  };
  return quarters(quarters(four[0], four[1]), quarters(four[2], four[3]));
}
// The maxima of 16 vectors.
HR_INLINE Vf reduce_max_each(const Vf (&x)[16]) {
  __m512i v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) v[i] = _mm512_castps_si512(x[i]);
  return _mm512_castsi512_ps(combine_each(v, [](__m512i a, __m512i b) HR_INLINE_LAMBDA {
    return _mm512_castps_si512(_mm512_max_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
  }));
}
// The sums of the first and of the last 16 bytes of 16 rows of 32.
HR_INLINE void sum_halves(const int8_t* rows, Vi& low, Vi& high) {
  __m512i pairs[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const auto fours = [&](int j) HR_INLINE_LAMBDA {
      return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1),
                                 _mm512_loadu_si512(rows + 64 * j));
    };
    const __m512i a = fours(2 * i), b = fours(2 * i + 1);
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  const auto both = [&](int i) HR_INLINE_LAMBDA {
    return _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[i], pairs[i + 1]),
                            _mm512_unpackhi_epi64(pairs[i], pairs[i + 1]));
  };
  const __m512i first = both(0), last = both(2);  // quarter q: half q % 2 of rows q / 2, + 2, ..
  const __m512i at = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
  low.v = _mm512_permutex2var_epi32(first, at, last);
  high.v = _mm512_permutex2var_epi32(first, _mm512_add_epi32(at, _mm512_set1_epi32(4)), last);
}
HR_INLINE Vf load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HR_INLINE Vf load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
HR_INLINE Vi load_s8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
HR_INLINE Vi load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
HR_INLINE Vb load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE __m512i moved_down(__m512i x, int down) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  const auto words = reinterpret_cast<Words>(x);
  return reinterpret_cast<__m512i>(down < 0 ? words << -down : words >> down);
}
// Of each byte the bits of the mask, once it has been moved so many bits down; up,
// where that is negative.
HR_INLINE Vb fields(Vb x, int down, int mask) {
  return {mask == 255
              ? x.v
              : _mm512_and_si512(moved_down(x.v, down), _mm512_set1_epi8(static_cast<char>(mask)))};
}
// These bits beside those of `others`, which are 0 there: others | (x & mask).
HR_INLINE Vb or_fields(Vb others, Vb x, int down, int mask) {
  return {_mm512_ternarylogic_epi64(others.v, moved_down(x.v, down),
                                    _mm512_set1_epi8(static_cast<char>(mask)), 0xF8)};
}
// Byte C of each lane at its top, and others below.
template <int C>
HR_INLINE Vi top_byte(Vb x) {
  return shift_left<24 - 8 * C>(x);
}
// Byte C of each lane.
template <int C>
HR_INLINE Vi byte_of(Vb x) {
  return shift_right<24>(top_byte<C>(x));
}
// Of numbers below 16 in each lane, the float of the table that each is the number of.
HR_INLINE Vf look_up_floats(Vi numbers, const float* table) {
  return _mm512_permutexvar_ps(numbers.v, _mm512_loadu_ps(table));
}
// Of nibbles, the byte of the table that each is the number of.
HR_INLINE Vb look_up(Vb nibbles, const uint8_t* table) {
  const __m512i t =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(t, nibbles.v)};
}
// Of each lane the bytes that `bytes` has for the low three bits of the number in bits 4j .. of
// `numbers`; kNoByte: 0.
HR_INLINE Vb spread(Vb lanes, Vb numbers, int j, const LaneBytes& bytes) {
  typedef uint32_t Words __attribute__((vector_size(64)));
  const auto moved = reinterpret_cast<__m512i>(reinterpret_cast<Words>(numbers.v) >> 4 * j);
  const __m512i table =
      _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes.data())));
  const __m512i lane =
      _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  return {
      _mm512_shuffle_epi8(lanes.v, _mm512_add_epi8(_mm512_permutexvar_epi32(moved, table), lane))};
}
HR_INLINE Vb flip_bits(Vb x, int mask) {
  return {_mm512_xor_si512(x.v, _mm512_set1_epi8(static_cast<char>(mask)))};
}
HR_INLINE Vs load_pairs_s8(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
HR_INLINE Vs load_pairs_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Of numbers below 256.
HR_INLINE Vs low_nibbles(Vs x) { return {_mm512_and_si512(x.v, _mm512_set1_epi16(15))}; }
HR_INLINE Vs high_nibbles(Vs x) { return {_mm512_srli_epi16(x.v, 4)}; }
// The same two in every lane.
HR_INLINE Vs load_pair(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return set1(pair);
}
// Of numbers that 16 bits have room for.
HR_INLINE Vs join_shorts(Vi low, Vi high) {
  return {_mm512_mask_blend_epi16(0xAAAAAAAA, low.v, _mm512_slli_epi32(high.v, 16))};
}
HR_INLINE Vi high_shorts(Vs x) { return {_mm512_srai_epi32(x.v, 16)}; }
HR_INLINE Vi low_shorts(Vs x) { return {_mm512_srai_epi32(_mm512_slli_epi32(x.v, 16), 16)}; }
// The products of the low and of the high ones, added up.
HR_INLINE Vi dot_shorts(Vs x, Vs y) { return {_mm512_madd_epi16(x.v, y.v)}; }
HR_INLINE Vi add_dot_shorts(Vi acc, Vs x, const int16_t* pair) {
  typedef int32_t Both __attribute__((may_alias));
  asm volatile("vpdpwssd %2%{1to16%}, %1, %0"
               : "+v"(acc.v)
               : "v"(x.v), "m"(*reinterpret_cast<const Both*>(pair)));
  return acc;
}
// Of 16-bit fields the bits from `down` on, so many as a code has.
template <int Bits>
HR_INLINE Vs code_pairs(Vb x, int down) {
  const __m512i moved = down ? moved_down(x.v, down) : x.v;
  return {down + Bits == 16 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16((1 << Bits) - 1))};
}
// There are 32: nothing needs to be held there.
HR_INLINE void stay_in_registers(const Vi&) {}
HR_INLINE void stay_in_registers(const Vf&) {}
// Of R rows of x, 32 bytes apart: sums[i] += sum of w[j][4 lane + b] * x[32 i + 4 j +
// b] over Lines lines, whatever the width of w.
template <int Bits, int Lines, int R, class W>
HR_INLINE void dots(Vi* sums, const W& w, const int8_t* x) {
#pragma GCC unroll 8
  for (int j = 0; j < Lines; j++) {
    const Vb line = w[j];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      asm volatile("vpdpbusd %2%{1to16%}, %1, %0"
                   : "+v"(sums[i].v)
                   : "v"(line.v), "m"(*reinterpret_cast<const int32_t*>(x + 32 * i + 4 * j)));
  }
}
// The sums of w[j][4 lane + b] over Lines lines and b. Bits is the width of w.
template <int Bits, int Lines, class W>
HR_INLINE Vi code_sums(const W& w) {
  Vi sums = set1(0);
#pragma GCC unroll 8
  for (int j = 0; j < Lines; j++) sums.v = _mm512_dpbusd_epi32(sums.v, w[j].v, _mm512_set1_epi8(1));
  return sums;
}
#ifdef __AVX512BF16__
constexpr bool kHasBf16 = true;
using Pair = uint32_t;  // two bf16
constexpr int kPairStride = 1;
HR_INLINE Vf dot_pair(Vf acc, Vb w, const Pair* x) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w.v), "m"(*x));
  return acc;
}
HR_INLINE void store_pairs(Pair* p, Vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
HR_INLINE void store_pairs(Pair* p, Vf x, Vf more) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(more, x)));
}
HR_INLINE Vf dot_pair(Vf acc, Vb w, Vb x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w.v), "v"(x.v));
  return acc;
}
// The same pair in every lane. The compiler would load it again for each use.
HR_INLINE Vb spread_pair(const Pair* x) {
  Vb r;
  asm("vpbroadcastd %1, %0" : "=v"(r.v) : "m"(*x));
  return r;
}
// sums[i][n] += line i of pairs times x[n * stride]; the lines are adjacent. A Zen 5 has
// as many loads a cycle as dot products: each line, and each pair, is loaded once.
template <int Lines, int N>
HR_INLINE void dot_lines(Vf (&sums)[Lines][N], const uint8_t* lines, const Pair* x, size_t stride) {
  if constexpr (N < Lines) {
    Vb pairs[N];
    each<N>([&](int n) HR_INLINE_LAMBDA { pairs[n] = spread_pair(x + n * stride); });
    each<Lines>([&](int i) HR_INLINE_LAMBDA {
      const Vb line = load_bytes(lines + 64 * i);
      each<N>([&](int n) HR_INLINE_LAMBDA { sums[i][n] = dot_pair(sums[i][n], line, pairs[n]); });
    });
  } else {
    Vb line[Lines];
    each<Lines>([&](int i) HR_INLINE_LAMBDA { line[i] = load_bytes(lines + 64 * i); });
    each<N>([&](int n) HR_INLINE_LAMBDA {
      const Vb pair = spread_pair(x + n * stride);
      each<Lines>([&](int i)
                      HR_INLINE_LAMBDA { sums[i][n] = dot_pair(sums[i][n], line[i], pair); });
    });
  }
}
#else
HR_INLINE Vf even_bf16(Vb w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16)); }
HR_INLINE Vf odd_bf16(Vb w) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
#include "simd_pairs.h"
#endif
struct Vl {  // 8 lanes of 64 bits
  __m512i v;
};
HR_INLINE Vl set1(uint64_t x) { return {_mm512_set1_epi64(static_cast<int64_t>(x))}; }
HR_INLINE Vl load(const uint64_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE Vl add(Vl x, Vl y) { return {_mm512_add_epi64(x.v, y.v)}; }
HR_INLINE Vl xor3(Vl x, Vl y, Vl z) { return {_mm512_ternarylogic_epi64(x.v, y.v, z.v, 0x96)}; }
// Products of the low halves.
HR_INLINE Vl mul_low(Vl x, Vl y) { return {_mm512_mul_epu32(x.v, y.v)}; }
HR_INLINE Vl high_half(Vl x) { return {_mm512_srli_epi64(x.v, 32)}; }
// The low half of x below that of y.
HR_INLINE Vl join_low(Vl x, Vl y) {
  return {_mm512_mask_blend_epi32(0xAAAA, x.v, _mm512_slli_epi64(y.v, 32))};
}
// Lanes 0, 2, 4, 6 of x, each followed by that of y; lanes 1, 3, 5, 7.
HR_INLINE Vi even_lanes(Vl x, Vl y) { return {_mm512_unpacklo_epi64(x.v, y.v)}; }
HR_INLINE Vi odd_lanes(Vl x, Vl y) { return {_mm512_unpackhi_epi64(x.v, y.v)}; }
HR_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
HR_INLINE void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
