// Moves of bytes for the kernels over copies (copy_shape.h), for each kind of vector. Included
// inside the namespace of an instruction set.

// Four runs of 64 bytes to four vectors: vector j has of each run the bytes 16 l + 4 j + i in
// lane 4 l + i, side by side.
#if defined(__AVX512F__)
HR_INLINE void interleave(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d,
                          Vb (&out)[4]) {
  const __m512i va = _mm512_loadu_si512(a), vb = _mm512_loadu_si512(b), vc = _mm512_loadu_si512(c),
                vd = _mm512_loadu_si512(d);
  const __m512i ab = _mm512_unpacklo_epi8(va, vb), cd = _mm512_unpacklo_epi8(vc, vd),
                ab_high = _mm512_unpackhi_epi8(va, vb), cd_high = _mm512_unpackhi_epi8(vc, vd);
  out[0].v = _mm512_unpacklo_epi16(ab, cd);
  out[1].v = _mm512_unpackhi_epi16(ab, cd);
  out[2].v = _mm512_unpacklo_epi16(ab_high, cd_high);
  out[3].v = _mm512_unpackhi_epi16(ab_high, cd_high);
}
#elif defined(__AVX2__)
HR_INLINE void interleave(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d,
                          Vb (&out)[4]) {
  const auto half = [&](int at, __m256i(&to)[4]) HR_INLINE_LAMBDA {
    const auto load = [at](const uint8_t* p) HR_INLINE_LAMBDA {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + at));
    };
    const __m256i va = load(a), vb = load(b), vc = load(c), vd = load(d);
    const __m256i ab = _mm256_unpacklo_epi8(va, vb), cd = _mm256_unpacklo_epi8(vc, vd),
                  ab_high = _mm256_unpackhi_epi8(va, vb), cd_high = _mm256_unpackhi_epi8(vc, vd);
    to[0] = _mm256_unpacklo_epi16(ab, cd);
    to[1] = _mm256_unpackhi_epi16(ab, cd);
    to[2] = _mm256_unpacklo_epi16(ab_high, cd_high);
    to[3] = _mm256_unpackhi_epi16(ab_high, cd_high);
  };
  __m256i low[4], high[4];
  half(0, low), half(32, high);
  for (int j = 0; j < 4; j++) out[j] = {low[j], high[j]};
}
#else
HR_INLINE void interleave(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d,
                          Vb (&out)[4]) {
  const uint8_t* const runs[4] = {a, b, c, d};
  for (int j = 0; j < 4; j++) {
    uint8_t bytes[64];
    for (int lane = 0; lane < 16; lane++)
      for (int k = 0; k < 4; k++) bytes[4 * lane + k] = runs[k][16 * (lane / 4) + 4 * j + lane % 4];
    out[j] = load_bytes(bytes);
  }
}
#endif

// x * y + z, rounded as `fma` of vectors does.
HR_INLINE float fma_one(float x, float y, float z) {
#if defined(__AVX2__) || defined(__aarch64__)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

// out[g] = starts[g] + the dots of group g with x, of 16 groups of a row of a copy by rows of which
// the first four times `quads` are there (copy_shape.h); x is as long.
#if defined(__AVX512F__)
template <int kBits>
HR_INLINE void sum_groups(const uint8_t* codes, const int8_t* x, const int32_t* starts, int quads,
                          float* out) {
  __m512i v[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++) {
    v[q] = _mm512_setzero_si512();
    if (q >= quads) continue;
    const __m512i first = _mm512_loadu_si512(codes + 16 * kBits * q);
    const __m512i nibbles = _mm512_set1_epi8(15);
    const __m512i low = kBits == 8 ? first : _mm512_and_si512(first, nibbles),
                  high = kBits == 8 ? _mm512_loadu_si512(codes + 16 * kBits * q + 64)
                                    : _mm512_and_si512(_mm512_srli_epi16(first, 4), nibbles);
    v[q] = _mm512_dpbusd_epi32(v[q], low, _mm512_loadu_si512(x + 128 * q));
    v[q] = _mm512_dpbusd_epi32(v[q], high, _mm512_loadu_si512(x + 128 * q + 64));
  }
  const auto fold = [](__m512i a, __m512i b) HR_INLINE_LAMBDA {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i a = fold(v[0], v[1]), b = fold(v[2], v[3]);
  // Lane 4 l + q is the sum of group 4 q + l.
  const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i total =
      _mm512_add_epi32(_mm512_permutexvar_epi32(order, sums), _mm512_loadu_si512(starts));
  _mm512_storeu_ps(out, _mm512_cvtepi32_ps(total));
}
#elif defined(__AVX2__)
// The sums of pairs of products, of 16 codes and activations.
HR_INLINE __m256i dots_of_16(const uint8_t* codes, const int8_t* x) {
  const auto load = [](const void* p) HR_INLINE_LAMBDA {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  };
  return _mm256_madd_epi16(_mm256_cvtepu8_epi16(load(codes)), _mm256_cvtepi8_epi16(load(x)));
}
template <int kBits>
HR_INLINE void sum_groups(const uint8_t* codes, const int8_t* x, const int32_t* starts, int quads,
                          float* out) {
  for (int q = 0; q < 4; q++) {
    __m256i v[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};  // groups 0, 1 and 2, 3
    for (int i = 0; i < 2 && q < quads; i++) {
      const uint8_t* at = codes + 16 * kBits * q + 32 * i;
      const int8_t* xs = x + 128 * q + 32 * i;
      if constexpr (kBits == 4) {
        const auto load = [](const void* p) HR_INLINE_LAMBDA {
          return _mm256_loadu_si256(static_cast<const __m256i*>(p));
        };
        const __m256i both = load(at), nibbles = _mm256_set1_epi8(15);
        const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(both, nibbles), load(xs));
        const __m256i high = _mm256_maddubs_epi16(
            _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles), load(xs + 64));
        v[i] = _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
      } else {
        const __m256i a = _mm256_add_epi32(dots_of_16(at, xs), dots_of_16(at + 64, xs + 64)),
                      b = _mm256_add_epi32(dots_of_16(at + 16, xs + 16),
                                           dots_of_16(at + 80, xs + 80));
        v[i] = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                _mm256_permute2x128_si256(a, b, 0x31));
      }
    }
    const __m256i pairs = _mm256_hadd_epi32(v[0], v[1]), fours = _mm256_hadd_epi32(pairs, pairs);
    const __m128i sums =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    const __m128i start = _mm_loadu_si128(reinterpret_cast<const __m128i*>(starts + 4 * q));
    _mm_storeu_ps(out + 4 * q, _mm_cvtepi32_ps(_mm_add_epi32(sums, start)));
  }
}
#else
template <int kBits>
HR_INLINE void sum_groups(const uint8_t* codes, const int8_t* x, const int32_t* starts, int quads,
                          float* out) {
  for (int g = 0; g < 16; g++) {
    int32_t sum = starts[g];
    const uint8_t* at = codes + 16 * kBits * (g / 4) + 16 * (g % 4);
    const int8_t* xs = x + 128 * (g / 4) + 16 * (g % 4);
    for (int c = 0; c < 16 && g / 4 < quads; c++)
      if (kBits == 8)
        sum += at[c] * xs[c] + at[64 + c] * xs[64 + c];
      else
        sum += (at[c] & 15) * xs[c] + (at[c] >> 4) * xs[64 + c];
    out[g] = static_cast<float>(sum);
  }
}
#endif
