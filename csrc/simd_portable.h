// 16-lane vectors in the vector extension of GCC and Clang: any processor, in whatever
// width it has. Included inside the namespace of an instruction set; simd_avx2.h and
// simd_avx512.h offer the same names.
typedef float Vf __attribute__((vector_size(64)));
typedef int32_t Vint __attribute__((vector_size(64)));
struct Vi {
  Vint v;
};
struct Vb {  // 16 lanes of 4 bytes
  Vint v;
};
struct Vs {  // 16 lanes of two 16-bit numbers
  int16_t v[32];
};
constexpr int kMaxRows = 4;
constexpr int kAccumulators = 4;  // vectors of sums that stay in registers
constexpr int kSumsTogether = 1;
constexpr int kLinesTogether = 1;
constexpr bool kReducesTogether = false;
constexpr bool kSumsBetweenDots = false;
constexpr int kRowsToFetchFor =
    1;  // from so many rows in a block, weights with scales by group are fetched ahead
constexpr int kMaxQueries = kAccumulators / 2;

#define EACH_LANE(expr)                     \
  for (int i = 0; i < 16; i++) r[i] = expr; \
  return r

HR_INLINE Vf zero() { return Vf{}; }
HR_INLINE Vf set1(float x) { return Vf{} + x; }
HR_INLINE Vf load(const float* p) {
  Vf r;
  memcpy(&r, p, 64);
  return r;
}
HR_INLINE void store(float* p, Vf a) { memcpy(p, &a, 64); }
HR_INLINE Vf load_partial(const float* p, int n) {
  if (n >= 16) return load(p);
  Vf r;
  EACH_LANE(i < n ? p[i] : 0.0f);
}
HR_INLINE void store_partial(float* p, Vf a, int n) {
  for (int i = 0; i < n; i++) p[i] = a[i];
}
HR_INLINE Vf add(Vf a, Vf b) { return a + b; }
HR_INLINE Vf sub(Vf a, Vf b) { return a - b; }
HR_INLINE Vf mul(Vf a, Vf b) { return a * b; }
HR_INLINE Vf div(Vf a, Vf b) { return a / b; }
HR_INLINE Vf fma(Vf a, Vf b, Vf c) { return a * b + c; }
HR_INLINE Vf max(Vf a, Vf b) { return a > b ? a : b; }
HR_INLINE Vf abs(Vf a) { return a < 0 ? -a : a; }
HR_INLINE Vf swap_pairs(Vf a) {
  Vf r;
  EACH_LANE(a[i ^ 1]);
}
// Lanes first..last-1 of a, `other` elsewhere.
HR_INLINE Vf keep_lanes(Vf a, int first, int last, float other) {
  Vf r;
  EACH_LANE(i >= first && i < last ? a[i] : other);
}
// Bit i: whether a[i] >= b[i].
HR_INLINE uint32_t ge_mask(Vf a, Vf b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= static_cast<uint32_t>(a[i] >= b[i]) << i;
  return mask;
}
// a where its bit is set, 0 elsewhere.
HR_INLINE Vf keep_bits(Vf a, uint32_t mask) {
  Vf r;
  EACH_LANE(mask >> i & 1 ? a[i] : 0.0f);
}
HR_INLINE Vi set1(int32_t x) { return {Vint{} + x}; }
// Sums wrap around, as in all instruction sets.
typedef uint32_t Vwords __attribute__((vector_size(64)));
HR_INLINE Vi add(Vi a, Vi b) {
  return {reinterpret_cast<Vint>(reinterpret_cast<Vwords>(a.v) + reinterpret_cast<Vwords>(b.v))};
}
HR_INLINE Vi sub(Vi a, Vi b) {
  return {reinterpret_cast<Vint>(reinterpret_cast<Vwords>(a.v) - reinterpret_cast<Vwords>(b.v))};
}
HR_INLINE Vi mul(Vi a, Vi b) { return {a.v * b.v}; }
template <int N>
HR_INLINE Vi shift_left(Vi a) {
  return {a.v << N};
}
template <int N>
HR_INLINE Vi shift_right(Vi a) {  // zeros come in
  typedef uint32_t Words __attribute__((vector_size(64)));
  return {reinterpret_cast<Vint>(reinterpret_cast<Words>(a.v) >> N)};
}
template <int N>
HR_INLINE Vi shift_right_signed(Vi x) {  // copies of the sign come in
  return {x.v >> N};
}
HR_INLINE Vi and_bits(Vi x, Vi y) { return {x.v & y.v}; }
HR_INLINE Vi bits(Vf a) { return {reinterpret_cast<Vint>(a)}; }
HR_INLINE Vf from_bits(Vi a) { return reinterpret_cast<Vf>(a.v); }
HR_INLINE void store(uint32_t* p, Vi a) { memcpy(p, &a, 64); }
HR_INLINE Vf to_float(Vi a) { return __builtin_convertvector(a.v, Vf); }
// What no int32 is becomes the least one, as x86 has it.
HR_INLINE Vi round_to_int(Vf a) {
  Vint r;
  for (int i = 0; i < 16; i++)
    r[i] = a[i] >= -0x1p31f && a[i] < 0x1p31f ? static_cast<int32_t>(__builtin_rintf(a[i]))
                                              : INT32_MIN;
  return {r};
}
// The number whose exponent field is the low bits of x.
HR_INLINE Vf exponent_from_low_bits(Vf a) {
  return reinterpret_cast<Vf>(reinterpret_cast<Vint>(a) << 23);
}
HR_INLINE Vf round(Vf a) {
  Vf r;
  EACH_LANE(__builtin_rintf(a[i]));
}
// a * 2^n for whole n up to 127; 0 from -127 down.
HR_INLINE Vf times_power_of_2(Vf a, Vf n) {
  return a * reinterpret_cast<Vf>(
                 shift_left<23>(add(round_to_int(max(set1(-127.0f), n)), set1(127))).v);
}
HR_INLINE void store_s8(int8_t* p, Vi a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a.v[i]);
}
HR_INLINE void store_s16(int16_t* p, Vi a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(a.v[i]);
}
HR_INLINE void store_u8(uint8_t* p, Vi a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint8_t>(a.v[i]);
}
HR_INLINE int32_t reduce_add(Vi a) {
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += a.v[i];
  return s;
}
// Sums of lanes 8 apart, then 4, 2 and 1.
HR_INLINE float reduce_add(Vf a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a[i] += a[i + n];
  return a[0];
}
HR_INLINE float reduce_max(Vf a) {
  float top = a[0];
  for (int i = 1; i < 16; i++) top = a[i] > top ? a[i] : top;
  return top;
}
HR_INLINE Vf load_half(const uint16_t* p) {
  Vf r;
  EACH_LANE(half_to_float(p[i]));
}
HR_INLINE Vf load_bf16(const uint16_t* p) {
  Vf r;
  EACH_LANE(bf16_to_float(p[i]));
}
HR_INLINE Vi load_s8(const int8_t* p) {
  Vint r;
  for (int i = 0; i < 16; i++) r[i] = p[i];
  return {r};
}
HR_INLINE Vi load_u8(const uint8_t* p) {
  Vint r;
  for (int i = 0; i < 16; i++) r[i] = p[i];
  return {r};
}
HR_INLINE Vb load_bytes(const uint8_t* p) {
  Vb r;
  memcpy(&r, p, 64);
  return r;
}
// Of each byte the bits of the mask, once it has been moved so many bits down; up,
// where that is negative.
HR_INLINE Vb fields(Vb a, int down, int mask) {
  return {(down < 0 ? a.v << -down : a.v >> down) &
          static_cast<int32_t>(static_cast<uint32_t>(mask) * 0x01010101u)};
}
// These bits beside those of `others`, which are 0 there.
HR_INLINE Vb or_fields(Vb others, Vb a, int down, int mask) {
  return {others.v | fields(a, down, mask).v};
}
// Byte C of each lane at its top, and others below.
template <int C>
HR_INLINE Vi top_byte(Vb x) {
  return shift_left<24 - 8 * C>(Vi{x.v});
}
// Byte C of each lane.
template <int C>
HR_INLINE Vi byte_of(Vb x) {
  return shift_right<24>(top_byte<C>(x));
}
// Of numbers below 16 in each lane, the float of the table that each is the number of.
HR_INLINE Vf look_up_floats(Vi numbers, const float* table) {
  Vf r;
  EACH_LANE(table[numbers.v[i]]);
}
// Of nibbles, the byte of the table that each is the number of.
HR_INLINE Vb look_up(Vb nibbles, const uint8_t* table) {
  uint8_t bytes[64];
  memcpy(bytes, &nibbles, 64);
  for (uint8_t& byte : bytes) byte = table[byte];
  memcpy(&nibbles, bytes, 64);
  return nibbles;
}
// Of each lane the bytes that `bytes` has for the low three bits of the number in bits 4j .. of
// `numbers`; kNoByte: 0.
HR_INLINE Vb spread(Vb lanes, Vb numbers, int j, const LaneBytes& bytes) {
  uint8_t from[64], to[64];
  memcpy(from, &lanes, 64);
  for (int i = 0; i < 16; i++) {
    const uint32_t entry = bytes[static_cast<uint32_t>(numbers.v[i]) >> 4 * j & 7];
    for (int b = 0; b < 4; b++) {
      const uint32_t byte = entry >> 8 * b & 255;
      to[4 * i + b] = byte == kNoByte ? 0 : from[4 * i + byte];
    }
  }
  memcpy(&lanes, to, 64);
  return lanes;
}
HR_INLINE Vb flip_bits(Vb x, int mask) {
  return {x.v ^ static_cast<int32_t>(static_cast<uint32_t>(mask) * 0x01010101u)};
}
#define EACH_SHORT(expr)                                            \
  Vs r;                                                             \
  for (int i = 0; i < 32; i++) r.v[i] = static_cast<int16_t>(expr); \
  return r
HR_INLINE Vs load_pairs_s8(const int8_t* p) { EACH_SHORT(p[i]); }
HR_INLINE Vs load_pairs_u8(const uint8_t* p) { EACH_SHORT(p[i]); }
// Of numbers below 256.
HR_INLINE Vs low_nibbles(const Vs& a) { EACH_SHORT(a.v[i] & 15); }
HR_INLINE Vs high_nibbles(const Vs& a) { EACH_SHORT(a.v[i] >> 4); }
// The same two in every lane.
HR_INLINE Vs load_pair(const int16_t* p) { EACH_SHORT(p[i % 2]); }
// Of numbers that 16 bits have room for.
HR_INLINE Vs join_shorts(Vi low, Vi high) { EACH_SHORT(i % 2 ? high.v[i / 2] : low.v[i / 2]); }
#undef EACH_SHORT
HR_INLINE Vi low_shorts(const Vs& a) {
  Vint r;
  for (int i = 0; i < 16; i++) r[i] = a.v[2 * i];
  return {r};
}
HR_INLINE Vi high_shorts(const Vs& a) {
  Vint r;
  for (int i = 0; i < 16; i++) r[i] = a.v[2 * i + 1];
  return {r};
}
// The products of the low and of the high ones, added up.
HR_INLINE Vi dot_shorts(const Vs& a, const Vs& b) {
  Vint r;
  for (int i = 0; i < 16; i++) r[i] = a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
  return {r};
}
HR_INLINE Vi add_dot_shorts(Vi acc, const Vs& x, const int16_t* pair) {
  return add(acc, dot_shorts(x, load_pair(pair)));
}
// Of 16-bit fields the bits from `down` on, so many as a code has.
template <int Bits>
HR_INLINE Vs code_pairs(Vb a, int down) {
  Vs r;
  memcpy(&r, &a, 64);
  for (int16_t& x : r.v)
    x = static_cast<int16_t>(static_cast<uint16_t>(x) >> down & ((1 << Bits) - 1));
  return r;
}
HR_INLINE void stay_in_registers(const Vi&) {}
HR_INLINE void stay_in_registers(const Vf&) {}
// Of R rows of x, 32 bytes apart: sums[i] += sum of w[j][4 lane + b] * x[32 i + 4 j +
// b] over Lines lines. Bits is the width of w.
template <int Bits, int Lines, int R, class W>
HR_INLINE void dots(Vi* sums, const W& w, const int8_t* x) {
  for (int j = 0; j < Lines; j++)
    for (int i = 0; i < R; i++) {
      const int8_t* q = x + 32 * i + 4 * j;
      const Vint v = w[j].v;
      sums[i].v += (v & 255) * static_cast<int32_t>(q[0]) +
                   (v >> 8 & 255) * static_cast<int32_t>(q[1]) +
                   (v >> 16 & 255) * static_cast<int32_t>(q[2]) +
                   (v >> 24 & 255) * static_cast<int32_t>(q[3]);
    }
}
// The sums of w[j][4 lane + b] over Lines lines and b. Bits is the width of w.
template <int Bits, int Lines, class W>
HR_INLINE Vi code_sums(const W& w) {
  Vint sums = {};
  for (int j = 0; j < Lines; j++)
    sums += (w[j].v & 255) + (w[j].v >> 8 & 255) + (w[j].v >> 16 & 255) + (w[j].v >> 24 & 255);
  return {sums};
}
HR_INLINE Vf even_bf16(Vb a) { return reinterpret_cast<Vf>(a.v << 16); }
HR_INLINE Vf odd_bf16(Vb a) {
  return reinterpret_cast<Vf>(a.v & static_cast<int32_t>(0xffff0000u));
}
#include "simd_pairs.h"
// 8 lanes of 64 bits.
typedef uint64_t Vlong __attribute__((vector_size(64)));
struct Vl {
  Vlong v;
};
HR_INLINE Vl set1(uint64_t x) { return {Vlong{} + x}; }
HR_INLINE Vl load(const uint64_t* p) {
  Vl r;
  memcpy(&r, p, 64);
  return r;
}
HR_INLINE Vl add(Vl a, Vl b) { return {a.v + b.v}; }
HR_INLINE Vl xor3(Vl a, Vl b, Vl c) { return {a.v ^ b.v ^ c.v}; }
// Products of the low halves.
HR_INLINE Vl mul_low(Vl a, Vl b) { return {(a.v & 0xffffffffu) * (b.v & 0xffffffffu)}; }
HR_INLINE Vl high_half(Vl a) { return {a.v >> 32}; }
// The low half of a below that of b.
HR_INLINE Vl join_low(Vl a, Vl b) { return {(a.v & 0xffffffffu) | b.v << 32}; }
// Lanes 0, 2, 4, 6 of a, each followed by that of b; lanes 1, 3, 5, 7.
HR_INLINE Vi even_lanes(Vl a, Vl b) {
  const Vlong r = {a.v[0], b.v[0], a.v[2], b.v[2], a.v[4], b.v[4], a.v[6], b.v[6]};
  return {reinterpret_cast<Vint>(r)};
}
HR_INLINE Vi odd_lanes(Vl a, Vl b) {
  const Vlong r = {a.v[1], b.v[1], a.v[3], b.v[3], a.v[5], b.v[5], a.v[7], b.v[7]};
  return {reinterpret_cast<Vint>(r)};
}
HR_INLINE void prefetch(const void*) {}
HR_INLINE void prefetch_l2(const void*) {}
#undef EACH_LANE
