// Keys and values of a tile, quantised ones, and values that are part of keys. Included
// inside the namespace of an instruction set.

// bf16 of each number in the low half of its lane, rounded as `to_bf16` in kv.cpp does.
// What is not finite, or is not once it is rounded, is kNotFiniteBf16, and takes 1 off its
// lane of `finite`.
HR_INLINE Vi kv_codes(Vf x, Vi& finite) {
  const Vi u = bits(x);
  const Vi odd = and_bits(shift_right<16>(u), set1(1));
  const Vi code = shift_right<16>(add(u, add(odd, set1(0x7fff))));
  const Vi bad = shift_right_signed<31>(sub(set1(0x7f7f7fff), and_bits(u, set1(0x7fffffff))));
  finite = add(finite, bad);
  return add(and_bits(code, sub(set1(-1), bad)), and_bits(set1(int32_t{kNotFiniteBf16}), bad));
}

void write_key_tile(const float* x, int rows, uint8_t* const* to) {
  Vi finite = set1(0);
  for (int m = 0; m < rows; m++) {
    alignas(64) uint32_t codes[16];
    store(codes, kv_codes(load(x + 16 * m), finite));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      uint64_t two;
      memcpy(&two, codes + 2 * i, 8);
      const auto pair = static_cast<uint32_t>(two | two >> 16);
      memcpy(to[m] + 4 * kKvTile * i, &pair, 4);
    }
  }
}

bool write_value_tile(const float* x, int rows, uint8_t* const* to) {
  Vi finite = set1(0);
  for (int m = 0; m < rows; m++) {
    const Vi codes = kv_codes(load(x + 16 * m), finite);
    // Two tokens that share a line of pairs fill it.
    if (m + 1 < rows && to[m + 1] == to[m] + 2) {
      const Vi more = kv_codes(load(x + 16 * (m + 1)), finite);
      store(reinterpret_cast<uint32_t*>(to[m]), add(codes, shift_left<16>(more)));
      m++;
      continue;
    }
    alignas(64) uint32_t single[16];
    store(single, codes);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const auto code = static_cast<uint16_t>(single[i]);
      memcpy(to[m] + 4 * i, &code, 2);
    }
  }
  return reduce_add(finite) == 0;
}

// Walsh-Hadamard transform of blocks of `size` numbers, a power of two, scaled to keep
// lengths (QuaRot, Ashkboos et al. 2024): queries and keys turned alike have the same
// products, and what is weighted and summed can be turned back afterwards.
//
// Inside a vector it is a product with a matrix of signs, since no instruction set of
// ours adds lanes to each other at that pace.
struct Signs {
  float column[16][16];
};

constexpr Signs make_signs() {
  Signs s{};
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++)
      s.column[i][j] = __builtin_popcount(static_cast<unsigned>(i & j)) % 2 ? -1.0f : 1.0f;
  return s;
}

alignas(64) constexpr Signs kSigns = make_signs();

HR_INLINE void rotate_few(float* x, int n, int size, float factor) {
  for (int width = 1; width < size; width *= 2)
    for (int i = 0; i < n; i += 2 * width)
      for (int j = i; j < i + width; j++) {
        const float a = x[j], b = x[j + width];
        x[j] = a + b;
        x[j + width] = a - b;
      }
  for (int i = 0; i < n; i++) x[i] *= factor;
}

void rotate_head(float* x, int n, int size) {
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  if (size < 16) return rotate_few(x, n, size, factor);
  for (int i = 0; i < n; i += 16) {
    Vf sum = zero();
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) sum = fma(load(kSigns.column[j]), set1(factor * x[i + j]), sum);
    store(x + i, sum);
  }
  for (int width = 16; width < size; width *= 2)
    for (int i = 0; i < n; i += 2 * width)
      for (int j = i; j < i + width; j += 16) {
        const Vf a = load(x + j), b = load(x + j + width);
        store(x + j, add(a, b));
        store(x + j + width, sub(a, b));
      }
}

// bf16, rounded towards minus infinity or up; what is not a number stays so.
HR_INLINE uint16_t bf16_below(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>(x != x ? 0x7fc0 : (u + (x < 0 ? 0xffff : 0)) >> 16);
}
HR_INLINE uint16_t bf16_above(float x) { return static_cast<uint16_t>(bf16_below(-x) ^ 0x8000); }
HR_INLINE float from_bf16(uint16_t x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

// Numbers as codes 0 .. levels, before they are rounded.
struct Codes16 {
  Vf least, inverse, highest;

  HR_INLINE Codes16(const KvCodes& range, float levels)
      : least(set1(from_bf16(range.least))),
        inverse(set1(from_bf16(range.step) > 1e-36f ? 1.0f / from_bf16(range.step) : 0.0f)),
        highest(set1(-levels)) {}
  HR_INLINE Vf of(Vf x) const {
    const Vf code = max(mul(sub(x, least), inverse), zero());
    return sub(zero(), max(sub(zero(), code), highest));
  }
};

// The range of int4 codes with the least squared error, of some that cut off both ends of
// low .. high. `out` has the range of all numbers before.
constexpr int kNumCuts = 5;
constexpr float kCuts[kNumCuts] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};

HR_INLINE void cut_range(const float* x, int n, float low, float high, KvCodes& out) {
  constexpr float kLevels = 15;
  const float middle = 0.5f * low + 0.5f * high, half = 0.5f * high - 0.5f * low;
  float best = 3e38f;
  KvCodes range = out;
  for (int a = 0; a < kNumCuts; a++)
    for (int b = a < 2 ? 0 : a - 2; b < kNumCuts && b <= a + 2; b++) {
      range.least = bf16_below(middle - kCuts[a] * half);
      range.step = bf16_above((middle + kCuts[b] * half - from_bf16(range.least)) / kLevels);
      const Codes16 codes(range, kLevels);
      const Vf step = set1(from_bf16(range.step));
      Vf sum = zero();
      for (int i = 0; i < n; i += 16) {
        const Vf v = load_partial(x + i, n - i);
        const Vf d = sub(fma(to_float(round_to_int(codes.of(v))), step, codes.least), v);
        sum = fma(d, keep_lanes(d, 0, n - i, 0.0f), sum);
      }
      const float error = reduce_add(sum);
      if (!(error < best)) continue;
      best = error, out = range;
    }
}

// Codes 0 .. 2^bits - 1 over the range of the numbers, with step and least number rounded
// outwards; if it `cuts`, int4 has the part of the range with the least squared error. The least
// number is NaN where one of them is not finite, or the highest code would not be.
void quantise_kv(const float* x, int n, int bits, bool cuts, KvCodes& out) {
  Vf high = set1(x[0]), low = set1(-x[0]), zeros = zero();
  for (int i = 0; i < n; i += 16) {
    const Vf v = load_partial(x + i, n - i), known = keep_lanes(v, 0, n - i, x[0]);
    high = max(high, known);
    low = max(low, sub(zero(), known));
    zeros = fma(v, zero(), zeros);
  }
  const float top = reduce_max(high);
  out.least = bf16_below(-reduce_max(low));
  const float least = from_bf16(out.least), levels = static_cast<float>((1 << bits) - 1);
  out.step = bf16_above((top - least) / levels);
  const float step = from_bf16(out.step);
  if (!is_finite(zeros) || !(__builtin_fabsf(least) + step * levels < 3e38f)) {
    out = {out.codes, 0, kNotFiniteBf16};
    return;
  }
  if (bits == 4 && cuts) cut_range(x, n, -reduce_max(low), top, out);
  const Codes16 codes(out, levels);
  for (int i = 0; i < n; i += 16)
    store_u8(out.codes + i, round_to_int(codes.of(load_partial(x + i, n - i))));
}

void round_keys(const KeyToRound* keys, int count, int n) {
  constexpr float kLevels = 15, kRound = 12582912.0f;  // + and - round to a whole number
  constexpr int kMost = kMostKeysTogether;
  const int columns = (n + 15) / 16 * 16;
  float least[kMost], step[kMost], inverse[kMost];
  for (int k = 0; k < count; k++) {
    memcpy(keys[k].rest, keys[k].x, columns * sizeof(float));
    least[k] = from_bf16(keys[k].out->least), step[k] = from_bf16(keys[k].out->step);
    inverse[k] = step[k] > 1e-36f ? 1.0f / step[k] : 0.0f;
  }
  for (int i = 0; i < n; i++)
    for (int k = 0; k < count; k++) {
      const KeyToRound& key = keys[k];
      float code = (key.rest[i] - least[k]) * inverse[k];
      code = code > 0 ? code : 0;
      code = ((code < kLevels ? code : kLevels) + kRound) - kRound;
      key.out->codes[i] = static_cast<uint8_t>(code);
      const Vf error = set1(__builtin_fmaf(code, step[k], least[k]) - key.x[i]);
      const uint16_t* feedback = key.feedback + static_cast<size_t>(i) * columns;
      for (int j = i & -16; j < columns; j += 16)
        store(key.rest + j, sub(load(key.rest + j), mul(error, load_bf16(feedback + j))));
    }
}

// Four words, each two adjacent numbers of two adjacent tokens.
typedef uint64_t Words __attribute__((vector_size(32)));

// The numbers of a token came first in each word, and those of a dimension are to; 0
// for what is not finite.
HR_INLINE Words crossed(Words x) {
  constexpr uint64_t each = 0x0001000100010001, middle = 0xffff0000;
  const Words bad = ((x & 0x7f80 * each) + 0x80 * each) &
                    0x8000 * each;  // an exponent of all ones carries into the sign
  x &= ~((bad << 1) - (bad >> 15));
  return (x & ~(middle | middle << 16)) | (x & middle) << 16 | (x >> 16 & middle);
}

// Four words of each of four lines become four lines.
HR_INLINE void cross_words(const uint8_t* from, size_t from_stride, uint8_t* to, size_t to_stride) {
  const auto line = [&](int i) {
    Words x;
    memcpy(&x, from + i * from_stride, sizeof x);
    return crossed(x);
  };
  const auto put = [&](int i, Words x) { memcpy(to + i * to_stride, &x, sizeof x); };
  const Words x = line(0), y = line(1), z = line(2), w = line(3);
  const Words a = __builtin_shufflevector(x, y, 0, 4, 2, 6),
              b = __builtin_shufflevector(x, y, 1, 5, 3, 7);
  const Words c = __builtin_shufflevector(z, w, 0, 4, 2, 6),
              d = __builtin_shufflevector(z, w, 1, 5, 3, 7);
  put(0, __builtin_shufflevector(a, c, 0, 1, 4, 5));
  put(1, __builtin_shufflevector(b, d, 0, 1, 4, 5));
  put(2, __builtin_shufflevector(a, c, 2, 3, 6, 7));
  put(3, __builtin_shufflevector(b, d, 2, 3, 6, 7));
}

HR_INLINE void cross_bf16(const uint8_t* keys, const KvRecord& shape, uint8_t* out) {
  const size_t key_stride = 4 * kKvTile,
               value_stride = static_cast<size_t>(shape.value_columns()) * 4;
  int d = 0;
  for (; d + 16 <= shape.value_dim; d += 16)  // a line at a time
    for (int t = 0; t < kKvTile; t += 8)
      for (int e = d; e < d + 16; e += 8)
        cross_words(keys + e / 2 * key_stride + 4 * t, key_stride,
                    out + t / 2 * value_stride + 4 * e, value_stride);
  for (; d < shape.value_dim; d += 2)
    for (int t = 0; t < kKvTile; t += 2) {
      Words x{};
      memcpy(&x, keys + d / 2 * key_stride + 4 * t, 8);
      x = crossed(x);
      memcpy(out + t / 2 * value_stride + 4 * d, &x, 8);
    }
}

HR_INLINE void cross_f32(const float* keys, int num_values, int width, float* out) {
  for (int first = 0; first < num_values; first += 16)
    for (int t = 0; t < kKvTile; t++)
      for (int d = first; d < first + 16 && d < num_values; d++) {
        const float x = keys[d * kKvTile + t];
        out[static_cast<size_t>(t) * width + d] = __builtin_isfinite(x) ? x : 0.0f;
      }
}

HR_INLINE void cross_half(const uint16_t* keys, int num_values, int width, uint16_t* out) {
  for (int t = 0; t < kKvTile; t++)
    for (int d = 0; d < num_values; d++) {
      const uint16_t x = keys[d * kKvTile + t];
      out[(t / 2 * (width / 16) + d / 16) * 32 + t % 2 * 16 + d % 16] =
          (x & 0x7c00) == 0x7c00 ? uint16_t{0} : x;
    }
}

// Codes of four tokens and four dimensions: each lane was a token's, and is a
// dimension's.
typedef uint8_t Codes __attribute__((vector_size(16)));
HR_INLINE Codes crossed(Codes x) {
  return __builtin_shufflevector(x, x, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
}

HR_INLINE void cross_codes(const uint8_t* keys, const KvRecord& shape, uint8_t* out) {
  const int lanes = shape.value_lanes();
  for (int i = 0; i < lanes; i += 4)
    for (int t = 0; t < kKvTile; t += 4) {
      Codes x;
      memcpy(&x, keys + i * kKvTile + 4 * t, sizeof x);
      x = crossed(x);
      memcpy(out + t * lanes + 4 * i, &x, sizeof x);
    }
  uint16_t scales[2 * kKvTile];
  memcpy(scales, keys + shape.key_scales(), sizeof scales);
  for (int t = kKvTile; t < 2 * kKvTile; t++)
    if (scales[t] == kNotFiniteBf16) scales[t] = 0;
  memcpy(out + shape.value_scales(), scales, sizeof scales);
}

void values_of_keys(const uint8_t* keys, const KvRecord& shape, uint8_t* out) {
  if (is_quantised(shape.type))
    cross_codes(keys, shape, out);
  else if (shape.type == KvType::kF32)
    cross_f32(reinterpret_cast<const float*>(keys), shape.value_dim, shape.value_columns(),
              reinterpret_cast<float*>(out));
  else if (shape.type == KvType::kF16)
    cross_half(reinterpret_cast<const uint16_t*>(keys), shape.value_dim, shape.value_columns(),
               reinterpret_cast<uint16_t*>(out));
  else
    cross_bf16(keys, shape, out);
}
