// 16-lane vectors as four NEON quarters, for processors with dot products of bytes.
// Included inside the namespace of an instruction set. What is rounded is rounded as in
// AVX2, and in the same order.
struct Vf {
  float32x4_t q[4];
};
struct Vi {
  int32x4_t q[4];
};
struct Vb {
  uint8x16_t q[4];
};
struct Vs {  // two 16-bit numbers in each lane
  int16x8_t q[4];
};
constexpr int kMaxRows = 4;
constexpr int kAccumulators = 6;  // vectors of sums that stay in registers
constexpr int kSumsTogether = 1;
constexpr int kLinesTogether = 1;
constexpr bool kReducesTogether = false;
constexpr bool kSumsBetweenDots = false;
constexpr int kRowsToFetchFor =
    1;  // from so many rows in a block, weights with scales by group are fetched ahead
constexpr int kMaxQueries = kAccumulators / 2;

// A vector whose quarter i is `expr`.
#define QUARTERS(Vector, expr) make<Vector>([&]([[maybe_unused]] int i) { return expr; })
template <class Vector, class F>
HR_INLINE Vector make(F&& quarter) {
  return {quarter(0), quarter(1), quarter(2), quarter(3)};
}

HR_INLINE Vf set1(float x) { return QUARTERS(Vf, vdupq_n_f32(x)); }
HR_INLINE Vf zero() { return set1(0.0f); }
HR_INLINE Vf load(const float* p) { return QUARTERS(Vf, vld1q_f32(p + 4 * i)); }
HR_INLINE void store(float* p, Vf x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.q[i]);
}
HR_INLINE Vf load_partial(const float* p, int n) {
  if (n >= 16) return load(p);
  float lanes[16] = {};
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return load(lanes);
}
HR_INLINE void store_partial(float* p, Vf x, int n) {
  if (n >= 16) return store(p, x);
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < n; i++) p[i] = lanes[i];
}
HR_INLINE Vf add(Vf x, Vf y) { return QUARTERS(Vf, vaddq_f32(x.q[i], y.q[i])); }
HR_INLINE Vf sub(Vf x, Vf y) { return QUARTERS(Vf, vsubq_f32(x.q[i], y.q[i])); }
HR_INLINE Vf mul(Vf x, Vf y) { return QUARTERS(Vf, vmulq_f32(x.q[i], y.q[i])); }
HR_INLINE Vf div(Vf x, Vf y) { return QUARTERS(Vf, vdivq_f32(x.q[i], y.q[i])); }
HR_INLINE Vf fma(Vf x, Vf y, Vf z) { return QUARTERS(Vf, vfmaq_f32(z.q[i], x.q[i], y.q[i])); }
// NEON's own maximum is NaN where either operand is; here it is the second, as on x86.
HR_INLINE float32x4_t larger(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcgtq_f32(x, y), x, y);
}
HR_INLINE Vf max(Vf x, Vf y) { return QUARTERS(Vf, larger(x.q[i], y.q[i])); }
HR_INLINE Vf abs(Vf x) { return QUARTERS(Vf, vabsq_f32(x.q[i])); }
HR_INLINE Vf swap_pairs(Vf x) { return QUARTERS(Vf, vrev64q_f32(x.q[i])); }
HR_INLINE int32x4_t lane_numbers(int quarter) {
  const int32_t first[4] = {0, 1, 2, 3};
  return vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * quarter));
}
HR_INLINE uint32x4_t lanes_below(int n, int quarter) {
  return vcltq_s32(lane_numbers(quarter), vdupq_n_s32(n));
}
HR_INLINE Vf keep_lanes(Vf x, int first, int last, float other) {
  return QUARTERS(Vf, vbslq_f32(vbicq_u32(lanes_below(last, i), lanes_below(first, i)), x.q[i],
                                vdupq_n_f32(other)));
}
HR_INLINE uint32x4_t bits_of_lanes(int quarter) {
  return vshlq_u32(vdupq_n_u32(1), lane_numbers(quarter));
}
// Bit i: whether x[i] >= y[i].
HR_INLINE uint32_t ge_mask(Vf x, Vf y) {
  const auto part = [&](int i) { return vandq_u32(vcgeq_f32(x.q[i], y.q[i]), bits_of_lanes(i)); };
  return vaddvq_u32(vorrq_u32(vorrq_u32(part(0), part(1)), vorrq_u32(part(2), part(3))));
}
// x where its bit is set, 0 elsewhere.
HR_INLINE Vf keep_bits(Vf x, uint32_t mask) {
  return QUARTERS(
      Vf, vbslq_f32(vtstq_u32(vdupq_n_u32(mask), bits_of_lanes(i)), x.q[i], vdupq_n_f32(0.0f)));
}
HR_INLINE Vi set1(int32_t x) { return QUARTERS(Vi, vdupq_n_s32(x)); }
HR_INLINE Vi add(Vi x, Vi y) { return QUARTERS(Vi, vaddq_s32(x.q[i], y.q[i])); }
HR_INLINE Vi sub(Vi x, Vi y) { return QUARTERS(Vi, vsubq_s32(x.q[i], y.q[i])); }
HR_INLINE Vi mul(Vi x, Vi y) { return QUARTERS(Vi, vmulq_s32(x.q[i], y.q[i])); }
template <int N>
HR_INLINE Vi shift_left(Vi x) {
  return QUARTERS(Vi, vshlq_n_s32(x.q[i], N));
}
template <int N>
HR_INLINE Vi shift_right(Vi x) {  // zeros come in
  return QUARTERS(Vi, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.q[i]), N)));
}
template <int N>
HR_INLINE Vi shift_right_signed(Vi x) {  // copies of the sign come in
  return QUARTERS(Vi, vshrq_n_s32(x.q[i], N));
}
HR_INLINE Vi and_bits(Vi x, Vi y) { return QUARTERS(Vi, vandq_s32(x.q[i], y.q[i])); }
HR_INLINE Vi bits(Vf x) { return QUARTERS(Vi, vreinterpretq_s32_f32(x.q[i])); }
HR_INLINE Vf from_bits(Vi x) { return QUARTERS(Vf, vreinterpretq_f32_s32(x.q[i])); }
HR_INLINE void store(uint32_t* p, Vi x) {
  for (int i = 0; i < 4; i++) vst1q_u32(p + 4 * i, vreinterpretq_u32_s32(x.q[i]));
}
HR_INLINE Vf to_float(Vi x) { return QUARTERS(Vf, vcvtq_f32_s32(x.q[i])); }
// What no int32 is becomes the least one, as x86 has it; NEON's own conversion gives 0
// or the nearest.
HR_INLINE Vi round_to_int(Vf x) {
  return QUARTERS(Vi, vbslq_s32(vcltq_f32(x.q[i], vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(x.q[i]),
                                vdupq_n_s32(INT32_MIN)));
}
HR_INLINE Vf exponent_from_low_bits(Vf x) { return from_bits(shift_left<23>(bits(x))); }
HR_INLINE Vf round(Vf x) { return QUARTERS(Vf, vrndnq_f32(x.q[i])); }
// x * 2^n for whole n up to 127; 0 from -127 down.
HR_INLINE Vf times_power_of_2(Vf x, Vf n) {
  return mul(x, from_bits(shift_left<23>(add(round_to_int(max(set1(-127.0f), n)), set1(127)))));
}
HR_INLINE void store_s8(int8_t* p, Vi x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.q[0]), vqmovn_s32(x.q[1])),
                  high = vcombine_s16(vqmovn_s32(x.q[2]), vqmovn_s32(x.q[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
HR_INLINE void store_s16(int16_t* p, Vi x) {
  vst1q_s16(p, vcombine_s16(vqmovn_s32(x.q[0]), vqmovn_s32(x.q[1])));
  vst1q_s16(p + 8, vcombine_s16(vqmovn_s32(x.q[2]), vqmovn_s32(x.q[3])));
}
// Of numbers from 0 to 255.
HR_INLINE void store_u8(uint8_t* p, Vi x) {
  const uint16x8_t low = vcombine_u16(vqmovun_s32(x.q[0]), vqmovun_s32(x.q[1]));
  const uint16x8_t high = vcombine_u16(vqmovun_s32(x.q[2]), vqmovun_s32(x.q[3]));
  vst1q_u8(p, vcombine_u8(vqmovn_u16(low), vqmovn_u16(high)));
}
HR_INLINE int32_t reduce_add(Vi x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.q[0], x.q[1]), vaddq_s32(x.q[2], x.q[3])));
}
// Sums of lanes 8 apart, then 4, 2 and 1.
HR_INLINE float reduce_add(Vf x) {
  const float32x4_t s = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
HR_INLINE float reduce_max(Vf x) {
  float32x4_t s = larger(larger(x.q[0], x.q[2]), larger(x.q[1], x.q[3]));
  s = larger(s, vextq_f32(s, s, 2));
  return vgetq_lane_f32(larger(s, vextq_f32(s, s, 1)), 0);
}
HR_INLINE Vf load_half(const uint16_t* p) {
  return QUARTERS(Vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
HR_INLINE Vf load_bf16(const uint16_t* p) {
  return QUARTERS(Vf, vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)));
}
HR_INLINE Vi load_s8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
          vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))};
}
HR_INLINE Vi load_u8(const uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))),
                  high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(x)));
  return {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
          vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))};
}
HR_INLINE Vb load_bytes(const uint8_t* p) { return QUARTERS(Vb, vld1q_u8(p + 16 * i)); }
HR_INLINE uint8x16_t fields_quarter(uint8x16_t x, int down, int mask) {
  return vandq_u8(vshlq_u8(x, vdupq_n_s8(static_cast<int8_t>(-down))),
                  vdupq_n_u8(static_cast<uint8_t>(mask)));
}
// Of each byte the bits of the mask, once it has been moved so many bits down; up,
// where that is negative.
HR_INLINE Vb fields(Vb x, int down, int mask) {
  return QUARTERS(Vb, fields_quarter(x.q[i], down, mask));
}
// These bits beside those of `others`, which are 0 there.
HR_INLINE Vb or_fields(Vb others, Vb x, int down, int mask) {
  return QUARTERS(Vb, vorrq_u8(others.q[i], fields_quarter(x.q[i], down, mask)));
}
// Byte C of each lane at its top, and others below.
template <int C>
HR_INLINE Vi top_byte(Vb x) {
  return shift_left<24 - 8 * C>(QUARTERS(Vi, vreinterpretq_s32_u8(x.q[i])));
}
// Byte C of each lane.
template <int C>
HR_INLINE Vi byte_of(Vb x) {
  return shift_right<24>(top_byte<C>(x));
}
// Of numbers below 16 in each lane, the float of the table that each is the number of.
HR_INLINE Vf look_up_floats(Vi numbers, const float* table) {
  float r[16];
  for (int i = 0; i < 16; i++) r[i] = table[numbers.q[i / 4][i % 4]];
  return load(r);
}
// Of nibbles, the byte of the table that each is the number of.
HR_INLINE Vb look_up(Vb nibbles, const uint8_t* table) {
  return QUARTERS(Vb, vqtbl1q_u8(vld1q_u8(table), nibbles.q[i]));
}
// Of each lane the bytes that `bytes` has for the low three bits of the number in bits 4j .. of
// `numbers`; kNoByte: 0.
HR_INLINE Vb spread(Vb lanes, Vb numbers, int j, const LaneBytes& bytes) {
  const auto* entries = reinterpret_cast<const uint8_t*>(bytes.data());
  const uint8x16x2_t table = {{vld1q_u8(entries), vld1q_u8(entries + 16)}};
  const uint32x4_t lane = {0, 0x04040404, 0x08080808, 0x0c0c0c0c};
  const auto quarter = [&](int i) {
    const uint32x4_t number = vandq_u32(
        vshlq_u32(vreinterpretq_u32_u8(numbers.q[i]), vdupq_n_s32(-4 * j)), vdupq_n_u32(7));
    const uint32x4_t entry = vmlaq_n_u32(vdupq_n_u32(0x03020100), number, 0x04040404);
    const uint8x16_t from = vqtbl2q_u8(table, vreinterpretq_u8_u32(entry));
    return vqtbl1q_u8(lanes.q[i], vaddq_u8(from, vreinterpretq_u8_u32(lane)));
  };
  return QUARTERS(Vb, quarter(i));
}
HR_INLINE Vb flip_bits(Vb x, int mask) {
  return QUARTERS(Vb, veorq_u8(x.q[i], vdupq_n_u8(static_cast<uint8_t>(mask))));
}
HR_INLINE Vs load_pairs_s8(const int8_t* p) { return QUARTERS(Vs, vmovl_s8(vld1_s8(p + 8 * i))); }
HR_INLINE Vs load_pairs_u8(const uint8_t* p) {
  return QUARTERS(Vs, vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * i))));
}
// Of numbers below 256.
HR_INLINE Vs low_nibbles(Vs x) { return QUARTERS(Vs, vandq_s16(x.q[i], vdupq_n_s16(15))); }
HR_INLINE Vs high_nibbles(Vs x) { return QUARTERS(Vs, vshrq_n_s16(x.q[i], 4)); }
// The same two in every lane.
HR_INLINE Vs load_pair(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return QUARTERS(Vs, vreinterpretq_s16_s32(vdupq_n_s32(pair)));
}
// Of numbers that 16 bits have room for.
HR_INLINE Vs join_shorts(Vi low, Vi high) {
  return QUARTERS(Vs, vreinterpretq_s16_s32(vsliq_n_s32(low.q[i], high.q[i], 16)));
}
HR_INLINE Vi high_shorts(Vs x) {
  return QUARTERS(Vi, vshrq_n_s32(vreinterpretq_s32_s16(x.q[i]), 16));
}
HR_INLINE Vi low_shorts(Vs x) {
  return QUARTERS(Vi, vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(x.q[i]), 16), 16));
}
// The products of the low and of the high ones, added up.
HR_INLINE Vi dot_shorts(Vs x, Vs y) {
  return QUARTERS(Vi, vpaddq_s32(vmull_s16(vget_low_s16(x.q[i]), vget_low_s16(y.q[i])),
                                 vmull_high_s16(x.q[i], y.q[i])));
}
HR_INLINE Vi add_dot_shorts(Vi acc, Vs x, const int16_t* pair) {
  return add(acc, dot_shorts(x, load_pair(pair)));
}
// Of 16-bit fields the bits from `down` on, so many as a code has.
template <int Bits>
HR_INLINE Vs code_pairs(Vb x, int down) {
  const auto moved = [&](int i) {
    return vshlq_u16(vreinterpretq_u16_u8(x.q[i]), vdupq_n_s16(static_cast<int16_t>(-down)));
  };
  return QUARTERS(Vs, vreinterpretq_s16_u16(vandq_u16(moved(i), vdupq_n_u16((1 << Bits) - 1))));
}
// There are 32 registers: nothing needs to be held there.
HR_INLINE void stay_in_registers(const Vi&) {}
HR_INLINE void stay_in_registers(const Vf&) {}
// Both operands of the instruction are signed. A code of fewer than 8 bits is the same
// number either way; one of 8 bits is taken from 128 down, and 128 times the sum of the
// four activations, the same in all lanes, makes up for it.
template <int Bits>
HR_INLINE Vi dot(Vi acc, Vb w, const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  const int8x16_t xx = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  if constexpr (Bits < 8) return QUARTERS(Vi, vdotq_s32(acc.q[i], vreinterpretq_s8_u8(w.q[i]), xx));
  const int32x4_t below = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), xx);
  return QUARTERS(Vi, vdotq_s32(vsubq_s32(acc.q[i], below),
                                vreinterpretq_s8_u8(veorq_u8(w.q[i], vdupq_n_u8(128))), xx));
}
// Of R rows of x, 32 bytes apart: sums[i] += sum of w[j][4 lane + b] * x[32 i + 4 j +
// b] over Lines lines. Bits is the width of w.
template <int Bits, int Lines, int R, class W>
HR_INLINE void dots(Vi* sums, const W& w, const int8_t* x) {
  for (int j = 0; j < Lines; j++) {
    const Vb line = w[j];
    for (int i = 0; i < R; i++) sums[i] = dot<Bits>(sums[i], line, x + 32 * i + 4 * j);
  }
}
// The sums of w[j][4 lane + b] over Lines lines and b. Bits is the width of w.
template <int Bits, int Lines, class W>
HR_INLINE Vi code_sums(const W& w) {
  Vi sums = set1(0);
  for (int j = 0; j < Lines; j++) {
    const Vb line = w[j];
    const auto total = [&](int i) {
      return vdotq_u32(vreinterpretq_u32_s32(sums.q[i]), line.q[i], vdupq_n_u8(1));
    };
    sums = QUARTERS(Vi, vreinterpretq_s32_u32(total(i)));
  }
  return sums;
}
HR_INLINE Vf even_bf16(Vb w) {
  return QUARTERS(Vf, vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(w.q[i]), 16)));
}
HR_INLINE Vf odd_bf16(Vb w) {
  return QUARTERS(
      Vf, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(w.q[i]), vdupq_n_u32(0xffff0000u))));
}
#include "simd_pairs.h"
struct Vl {  // 8 lanes of 64 bits
  uint64x2_t q[4];
};
HR_INLINE Vl set1(uint64_t x) { return QUARTERS(Vl, vdupq_n_u64(x)); }
HR_INLINE Vl load(const uint64_t* p) { return QUARTERS(Vl, vld1q_u64(p + 2 * i)); }
HR_INLINE Vl add(Vl x, Vl y) { return QUARTERS(Vl, vaddq_u64(x.q[i], y.q[i])); }
HR_INLINE Vl xor3(Vl x, Vl y, Vl z) {
  return QUARTERS(Vl, veorq_u64(veorq_u64(x.q[i], y.q[i]), z.q[i]));
}
// Products of the low halves.
HR_INLINE Vl mul_low(Vl x, Vl y) {
  return QUARTERS(Vl, vmull_u32(vmovn_u64(x.q[i]), vmovn_u64(y.q[i])));
}
HR_INLINE Vl high_half(Vl x) { return QUARTERS(Vl, vshrq_n_u64(x.q[i], 32)); }
// The low half of x below that of y.
HR_INLINE Vl join_low(Vl x, Vl y) { return QUARTERS(Vl, vsliq_n_u64(x.q[i], y.q[i], 32)); }
// Lanes 0, 2, 4, 6 of x, each followed by that of y; lanes 1, 3, 5, 7.
HR_INLINE Vi even_lanes(Vl x, Vl y) {
  return QUARTERS(Vi, vreinterpretq_s32_u64(vzip1q_u64(x.q[i], y.q[i])));
}
HR_INLINE Vi odd_lanes(Vl x, Vl y) {
  return QUARTERS(Vi, vreinterpretq_s32_u64(vzip2q_u64(x.q[i], y.q[i])));
}
HR_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
HR_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
#undef QUARTERS
