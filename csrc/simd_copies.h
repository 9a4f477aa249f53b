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

// Four bytes of each of 16 lines, from 16 rows that have them side by side; of lines of two arrays
// of 16 bits, the first numbers of all rows come before the second ones.
template <bool kHalves, class Place>
HR_INLINE void transpose_lines(const uint8_t* const rows[16], size_t at, int line,
                               const Place& place) {
#if defined(__AVX512F__)
  __m512i v[16], pairs[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) v[r] = _mm512_loadu_si512(rows[r] + at);
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 2) {
    pairs[r] = _mm512_unpacklo_epi32(v[r], v[r + 1]);
    pairs[r + 1] = _mm512_unpackhi_epi32(v[r], v[r + 1]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {  // v[r + i]: lines 4 l + i of rows r to r + 3, in lane l
    v[r] = _mm512_unpacklo_epi64(pairs[r], pairs[r + 2]);
    v[r + 1] = _mm512_unpackhi_epi64(pairs[r], pairs[r + 2]);
    v[r + 2] = _mm512_unpacklo_epi64(pairs[r + 1], pairs[r + 3]);
    v[r + 3] = _mm512_unpackhi_epi64(pairs[r + 1], pairs[r + 3]);
  }
  const auto put = [&](int i, __m512i line_of_all) HR_INLINE_LAMBDA {
    if constexpr (kHalves) {
      alignas(64) static constexpr int16_t order[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                        22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                        13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
      line_of_all = _mm512_permutexvar_epi16(_mm512_load_si512(order), line_of_all);
    }
    _mm512_storeu_si512(place(line + i), line_of_all);
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88),
                  b = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88),
                  c = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xDD),
                  d = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xDD);
    put(i, _mm512_shuffle_i32x4(a, b, 0x88));
    put(8 + i, _mm512_shuffle_i32x4(a, b, 0xDD));
    put(4 + i, _mm512_shuffle_i32x4(c, d, 0x88));
    put(12 + i, _mm512_shuffle_i32x4(c, d, 0xDD));
  }
#else
  for (int i = 0; i < 16; i++)
    for (int r = 0; r < 16; r++) {
      if constexpr (kHalves) {
        memcpy(place(line + i) + 2 * r, rows[r] + at + 4 * i, 2);
        memcpy(place(line + i) + 32 + 2 * r, rows[r] + at + 4 * i + 2, 2);
      } else {
        memcpy(place(line + i) + 4 * r, rows[r] + at + 4 * i, 4);
      }
    }
#endif
}
