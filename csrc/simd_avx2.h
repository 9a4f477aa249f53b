// 16-lane vectors as two AVX2 halves. Included inside the namespace of an instruction
// set.
struct Vf {
  __m256 a, b;
};
struct Vi {
  __m256i a, b;
};
using Vb = Vi;
using Vs = Vi;  // two 16-bit numbers in each lane
constexpr int kMaxRows = 4;
constexpr int kAccumulators = 6;  // vectors of sums that stay in registers
constexpr int kSumsTogether = 4;  // rows whose integer sums are computed together
constexpr int kLinesTogether = 8;
constexpr bool kReducesTogether = false;
constexpr bool kSumsBetweenDots = false;
constexpr int kRowsToFetchFor =
    1;  // from so many rows in a block, weights with scales by group are fetched ahead
constexpr int kMaxQueries = kAccumulators / 2;

HR_INLINE Vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE Vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HR_INLINE Vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, Vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
HR_INLINE Vi lane_numbers() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
HR_INLINE Vi lanes_below(int n) {
  const Vi i = lane_numbers();
  const __m256i bound = _mm256_set1_epi32(n);
  return {_mm256_cmpgt_epi32(bound, i.a), _mm256_cmpgt_epi32(bound, i.b)};
}
HR_INLINE Vf load_partial(const float* p, int n) {
  const Vi m = lanes_below(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
HR_INLINE void store_partial(float* p, Vf x, int n) {
  const Vi m = lanes_below(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
HR_INLINE Vf add(Vf x, Vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HR_INLINE Vf sub(Vf x, Vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HR_INLINE Vf mul(Vf x, Vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HR_INLINE Vf div(Vf x, Vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
HR_INLINE Vf fma(Vf x, Vf y, Vf z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
HR_INLINE Vf max(Vf x, Vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
HR_INLINE Vf abs(Vf x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
HR_INLINE Vf swap_pairs(Vf x) {
  return {_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)};
}
HR_INLINE Vf keep_lanes(Vf x, int first, int last, float other) {
  const Vi below_first = lanes_below(first), below_last = lanes_below(last);
  const __m256i ma = _mm256_andnot_si256(below_first.a, below_last.a),
                mb = _mm256_andnot_si256(below_first.b, below_last.b);
  const __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(ma)),
          _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(mb))};
}
HR_INLINE uint32_t ge_mask(Vf x, Vf y) {
  const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)),
            b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
  return static_cast<uint32_t>(a | b << 8);
}
HR_INLINE Vf keep_bits(Vf x, uint32_t mask) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128),
                all = _mm256_set1_epi32(static_cast<int>(mask));
  const __m256i a = _mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit);
  const __m256i b = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_srli_epi32(all, 8), bit), bit);
  return {_mm256_and_ps(x.a, _mm256_castsi256_ps(a)), _mm256_and_ps(x.b, _mm256_castsi256_ps(b))};
}
HR_INLINE Vi set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HR_INLINE Vi add(Vi x, Vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
HR_INLINE Vi sub(Vi x, Vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
HR_INLINE Vi mul(Vi x, Vi y) {
  return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
}
template <int N>
HR_INLINE Vi shift_left(Vi x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
HR_INLINE Vi shift_right(Vi x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
HR_INLINE Vi shift_right_signed(Vi x) {  // copies of the sign come in
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
HR_INLINE Vi and_bits(Vi x, Vi y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
HR_INLINE Vi bits(Vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
HR_INLINE Vf from_bits(Vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
HR_INLINE void store(uint32_t* p, Vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
HR_INLINE Vf to_float(Vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HR_INLINE Vi round_to_int(Vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HR_INLINE Vf exponent_from_low_bits(Vf x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.a), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.b), 23))};
}
HR_INLINE Vf round(Vf x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
// x * 2^n for whole n up to 127; 0 from -127 down.
HR_INLINE Vf times_power_of_2(Vf x, Vf n) {
  const Vi e = add(round_to_int(max(set1(-127.0f), n)), set1(127));
  return {_mm256_mul_ps(x.a, _mm256_castsi256_ps(_mm256_slli_epi32(e.a, 23))),
          _mm256_mul_ps(x.b, _mm256_castsi256_ps(_mm256_slli_epi32(e.b, 23)))};
}
HR_INLINE void store_s8(int8_t* p, Vi x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
HR_INLINE void store_s16(int16_t* p, Vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8));
}
// Of numbers from 0 to 255.
HR_INLINE void store_u8(uint8_t* p, Vi x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
HR_INLINE int32_t reduce_add(Vi x) {
  const __m256i s = _mm256_add_epi32(x.a, x.b);
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1)));
}
HR_INLINE float reduce_add(Vf x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
HR_INLINE float reduce_max(Vf x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
HR_INLINE Vf load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
HR_INLINE Vf load_bf16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
HR_INLINE Vi load_s8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadu_si64(p)), _mm256_cvtepi8_epi32(_mm_loadu_si64(p + 8))};
}
HR_INLINE Vi load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadu_si64(p)), _mm256_cvtepu8_epi32(_mm_loadu_si64(p + 8))};
}
HR_INLINE Vb load_bytes(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
HR_INLINE __m256i fields_half(__m256i x, int down, int mask) {
  if (mask == 255) return x;
  const __m256i moved = down > 0   ? _mm256_srli_epi16(x, down)
                        : down < 0 ? _mm256_slli_epi16(x, -down)
                                   : x;
  return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
}
// Of each byte the bits of the mask, once it has been moved so many bits down; up,
// where that is negative.
HR_INLINE Vb fields(Vb x, int down, int mask) {
  return {fields_half(x.a, down, mask), fields_half(x.b, down, mask)};
}
// These bits beside those of `others`, which are 0 there.
HR_INLINE Vb or_fields(Vb others, Vb x, int down, int mask) {
  return {_mm256_or_si256(others.a, fields_half(x.a, down, mask)),
          _mm256_or_si256(others.b, fields_half(x.b, down, mask))};
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
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  const auto half = [&](__m256i i) HR_INLINE_LAMBDA {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));  // bit 3 as the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                            upper);
  };
  return {half(numbers.a), half(numbers.b)};
}
// Of nibbles, the byte of the table that each is the number of.
HR_INLINE Vb look_up(Vb nibbles, const uint8_t* table) {
  const __m256i t =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, nibbles.a), _mm256_shuffle_epi8(t, nibbles.b)};
}
// Of each lane the bytes that `bytes` has for the low three bits of the number in bits 4j .. of
// `numbers`; kNoByte: 0.
HR_INLINE Vb spread(Vb lanes, Vb numbers, int j, const LaneBytes& bytes) {
  typedef uint32_t Words __attribute__((vector_size(32)));
  const __m256i table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes.data()));
  const __m256i lane =
      _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  const auto half = [&](__m256i x, __m256i n) HR_INLINE_LAMBDA {
    const auto moved = reinterpret_cast<__m256i>(reinterpret_cast<Words>(n) >> 4 * j);
    return _mm256_shuffle_epi8(x, _mm256_add_epi8(_mm256_permutevar8x32_epi32(table, moved), lane));
  };
  return {half(lanes.a, numbers.a), half(lanes.b, numbers.b)};
}
HR_INLINE Vb flip_bits(Vb x, int mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_xor_si256(x.a, m), _mm256_xor_si256(x.b, m)};
}
HR_INLINE Vs load_pairs_s8(const int8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
HR_INLINE Vs load_pairs_u8(const uint8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(q)), _mm256_cvtepu8_epi16(_mm_loadu_si128(q + 1))};
}
// Of numbers below 256.
HR_INLINE Vs low_nibbles(Vs x) {
  return {_mm256_and_si256(x.a, _mm256_set1_epi16(15)),
          _mm256_and_si256(x.b, _mm256_set1_epi16(15))};
}
HR_INLINE Vs high_nibbles(Vs x) { return {_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}; }
// The same two in every lane.
HR_INLINE Vs load_pair(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return set1(pair);
}
// Of numbers that 16 bits have room for.
HR_INLINE Vs join_shorts(Vi low, Vi high) {
  return {_mm256_blend_epi16(low.a, _mm256_slli_epi32(high.a, 16), 0xAA),
          _mm256_blend_epi16(low.b, _mm256_slli_epi32(high.b, 16), 0xAA)};
}
HR_INLINE Vi high_shorts(Vs x) { return {_mm256_srai_epi32(x.a, 16), _mm256_srai_epi32(x.b, 16)}; }
HR_INLINE Vi low_shorts(Vs x) { return high_shorts(shift_left<16>(x)); }
// The products of the low and of the high ones, added up.
HR_INLINE Vi dot_shorts(Vs x, Vs y) {
  return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)};
}
HR_INLINE Vi add_dot_shorts(Vi acc, Vs x, const int16_t* pair) {
  return add(acc, dot_shorts(x, load_pair(pair)));
}
// Of 16-bit fields the bits from `down` on, so many as a code has.
template <int Bits>
HR_INLINE __m256i code_pairs_half(__m256i x, int down) {
  if (down) x = _mm256_srli_epi16(x, down);
  return down + Bits == 16 ? x : _mm256_and_si256(x, _mm256_set1_epi16((1 << Bits) - 1));
}
template <int Bits>
HR_INLINE Vs code_pairs(Vb x, int down) {
  return {code_pairs_half<Bits>(x.a, down), code_pairs_half<Bits>(x.b, down)};
}
// Products of unsigned codes and signed bytes, the sum of each two in 16 bits.
HR_INLINE Vi products(Vb w, __m256i x) {
  return {_mm256_maddubs_epi16(w.a, x), _mm256_maddubs_epi16(w.b, x)};
}
HR_INLINE Vi add_shorts(Vi x, Vi y) {
  return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
}
HR_INLINE Vi add_pairs(Vi acc, Vi shorts, int16_t factor) {
  const __m256i f = _mm256_set1_epi16(factor);
  return add(acc, {_mm256_madd_epi16(shorts.a, f), _mm256_madd_epi16(shorts.b, f)});
}
// Holds the compiler to the order of the source, or it makes all products first and
// keeps them in memory.
HR_INLINE void stay_in_registers(Vi& x) { asm volatile("" : "+x"(x.a), "+x"(x.b)); }
HR_INLINE void stay_in_registers(Vf& x) { asm volatile("" : "+x"(x.a), "+x"(x.b)); }
HR_INLINE __m256i quad(const int8_t* x) {
  int32_t bytes;
  memcpy(&bytes, x, 4);
  return _mm256_set1_epi32(bytes);
}
// Of R rows of x, 32 bytes apart: sums[i] += sum of w[j][4 lane + b] * x[32 i + 4 j +
// b] over Lines lines. Bits is the width of w.
//
// Sums stay in 16 bits as long as none can overflow, with |x| <= 127: over 8 lines of 4
// bits, 4 of 5 bits, 2 of 6 bits. Codes of 8 bits are two of 4. Rows share the loads of
// w, as many as there are registers for their sums. Codes of 8 bits as two of 4: those
// that are looked up have a table for each.
template <class W>
HR_INLINE Vb low_nibbles(const W& w, int j) {
  if constexpr (requires { w.low_nibbles(j); })
    return w.low_nibbles(j);
  else
    return fields(w[j], 0, 15);
}
template <class W>
HR_INLINE Vb high_nibbles(const W& w, int j) {
  if constexpr (requires { w.high_nibbles(j); })
    return w.high_nibbles(j);
  else
    return fields(w[j], 4, 15);
}
template <int Bits, int Lines, int R, class W>
HR_INLINE void dots(Vi* sums, const W& w, const int8_t* x) {
  constexpr bool twice = Bits == 8;
  constexpr int most = 32767 / (2 * 127 * ((1 << (twice ? 4 : Bits)) - 1)),
                together = twice ? 2 : 4;
  static_assert(most > 0);
  if constexpr (R > together) {
    dots<Bits, Lines, together>(sums, w, x);
    dots<Bits, Lines, R - together>(sums + together, w, x + 32 * together);
  } else if constexpr (Lines > most) {
    dots<Bits, most, R>(sums, w, x);
    dots<Bits, Lines - most, R>(sums, w + most, x + 4 * most);
  } else {
    Vi low[R], high[R];
#pragma GCC unroll 8
    for (int j = 0; j < Lines; j++) {
      const Vb a = twice ? low_nibbles(w, j) : w[j], b = twice ? high_nibbles(w, j) : a;
#pragma GCC unroll 4
      for (int i = 0; i < R; i++) {
        const __m256i four = quad(x + 32 * i + 4 * j);
        low[i] = j ? add_shorts(low[i], products(a, four)) : products(a, four);
        stay_in_registers(low[i]);
        if constexpr (!twice) continue;
        high[i] = j ? add_shorts(high[i], products(b, four)) : products(b, four);
        stay_in_registers(high[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) {
      sums[i] = add_pairs(sums[i], low[i], 1);
      if constexpr (twice) sums[i] = add_pairs(sums[i], high[i], 16);
    }
  }
}

// The sums of w[j][4 lane + b] over Lines lines and b, in bytes at first, of as many
// lines as do not overflow them. Bits is the width of w.
template <int Bits, int Lines, class W>
HR_INLINE Vi code_sums(const W& w) {
  constexpr bool twice = Bits == 8;
  if constexpr (Lines * ((1 << (twice ? 4 : Bits)) - 1) > 255)
    return add(code_sums<Bits, Lines / 2>(w), code_sums<Bits, Lines / 2>(w + Lines / 2));
  const auto add_bytes = [](Vb x, Vb y) {
    return Vb{_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)};
  };
  Vb low = set1(0), high = low;
#pragma GCC unroll 8
  for (int j = 0; j < Lines; j++) {
    low = add_bytes(low, twice ? low_nibbles(w, j) : w[j]);
    if constexpr (twice) high = add_bytes(high, high_nibbles(w, j));
  }
  const __m256i ones = _mm256_set1_epi8(1);
  const Vi sums = add_pairs(set1(0), products(low, ones), 1);
  return twice ? add_pairs(sums, products(high, ones), 16) : sums;
}
HR_INLINE Vf even_bf16(Vb w) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
}
HR_INLINE Vf odd_bf16(Vb w) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(w.a, high)),
          _mm256_castsi256_ps(_mm256_and_si256(w.b, high))};
}
#include "simd_pairs.h"
struct Vl {
  __m256i a, b;
};
HR_INLINE Vl set1(uint64_t x) {
  return {_mm256_set1_epi64x(static_cast<int64_t>(x)), _mm256_set1_epi64x(static_cast<int64_t>(x))};
}
HR_INLINE Vl load(const uint64_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
HR_INLINE Vl add(Vl x, Vl y) { return {_mm256_add_epi64(x.a, y.a), _mm256_add_epi64(x.b, y.b)}; }
HR_INLINE Vl xor3(Vl x, Vl y, Vl z) {
  return {_mm256_xor_si256(_mm256_xor_si256(x.a, y.a), z.a),
          _mm256_xor_si256(_mm256_xor_si256(x.b, y.b), z.b)};
}
HR_INLINE Vl mul_low(Vl x, Vl y) {
  return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)};
}
HR_INLINE Vl high_half(Vl x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
HR_INLINE Vl join_low(Vl x, Vl y) {
  return {_mm256_blend_epi32(x.a, _mm256_slli_epi64(y.a, 32), 0xAA),
          _mm256_blend_epi32(x.b, _mm256_slli_epi64(y.b, 32), 0xAA)};
}
HR_INLINE Vi even_lanes(Vl x, Vl y) {
  return {_mm256_unpacklo_epi64(x.a, y.a), _mm256_unpacklo_epi64(x.b, y.b)};
}
HR_INLINE Vi odd_lanes(Vl x, Vl y) {
  return {_mm256_unpackhi_epi64(x.a, y.a), _mm256_unpackhi_epi64(x.b, y.b)};
}
HR_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
HR_INLINE void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
