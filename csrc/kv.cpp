#include "kv.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "half.h"

namespace headrace {
namespace {

constexpr float kNotFinite = std::numeric_limits<float>::quiet_NaN();

// The bits of the largest number that is finite once it is rounded; bf16's is that of float32 too.
constexpr int32_t largest(KvType type) { return type == KvType::kF16 ? 0x477fefff : 0x7f7f7fff; }

// Below 0 for a number that is not finite, or is not once it is rounded.
int32_t margin(KvType type, float x) {
  return largest(type) - (__builtin_bit_cast(int32_t, x) & 0x7fffffff);
}

// The numbers as they are stored: `x` itself, or a copy in `memory` where any that is
// not finite is one NaN. A query would look past a key of minus infinity.
const float* settled(KvType type, const float* x, int n, std::vector<float>& memory) {
  int32_t margins = 0;
  for (int i = 0; i < n; i++) margins |= margin(type, x[i]);
  if (margins >= 0) return x;
  memory.resize(static_cast<size_t>(n));
  std::transform(x, x + n, memory.begin(),
                 [type](float v) { return margin(type, v) < 0 ? kNotFinite : v; });
  return memory.data();
}

uint16_t to_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

struct Half {
  uint16_t bits;
};

void store(uint16_t* to, float x) { *to = to_bf16(x); }
void store(Half* to, float x) { to->bits = float_to_half(x); }
void store(float* to, float x) { *to = x; }
bool is_nan(uint16_t x) { return x == kNotFiniteBf16; }
bool is_nan(Half x) { return (x.bits & 0x7fff) > 0x7c00; }
bool is_nan(float x) { return x != x; }

// Number d of a token's key or value in a record of T: bf16, half precision or float32.
template <class T>
T* key_number(uint8_t* record, int lane, int d) {
  constexpr int per = std::is_same_v<T, Half> ? 1 : 4 / sizeof(T);
  return reinterpret_cast<T*>(record) + (d / per * kKvTile + lane) * per + d % per;
}

template <class T>
T* value_number(uint8_t* record, const KvRecord& shape, int lane, int d) {
  if constexpr (std::is_same_v<T, Half>)
    return reinterpret_cast<Half*>(record + shape.value_offset()) +
           (lane / 2 * (shape.value_columns() / 16) + d / 16) * 32 + lane % 2 * 16 + d % 16;
  constexpr int per = 4 / sizeof(T);
  return reinterpret_cast<T*>(record + shape.value_offset()) +
         (lane / per * shape.value_columns() + d) * per + lane % per;
}

// Byte i of a token's codes, in K and in V.
constexpr int place_in_lane(int i) { return i % 2 * 2 + i / 2; }

uint8_t* key_byte(uint8_t* record, int lane, int i) {
  return record + (i / 4 * kKvTile + lane) * 4 + place_in_lane(i % 4);
}

uint8_t* value_byte(uint8_t* record, const KvRecord& shape, int lane, int i) {
  return record + shape.value_offset() + (lane / 4 * shape.value_lanes() + i) * 4 +
         place_in_lane(lane % 4);
}

// The step of a token, and kKvTile numbers behind it its least number.
uint16_t* key_scale(uint8_t* record, const KvRecord& shape, int lane) {
  return reinterpret_cast<uint16_t*>(record + shape.key_scales()) + lane;
}

uint16_t* value_scale(uint8_t* record, const KvRecord& shape, int lane) {
  return reinterpret_cast<uint16_t*>(record + shape.value_offset() + shape.value_scales()) + lane;
}

uint8_t code_byte(const uint8_t* codes, int dim, int bits, int i) {
  const auto code = [&](int d) { return d < dim ? codes[d] : 0; };
  if (bits == 8) return static_cast<uint8_t>(code(i));
  const int d = i / 16 * 32 + i % 16;
  return static_cast<uint8_t>(code(d) | code(d + 16) << 4);
}

template <class T>
void settle_value(uint8_t* record, const KvRecord& shape, int lane) {
  bool finite = true;
  for (int d = 0; d < shape.value_dim; d++)
    finite &= !is_nan(*value_number<T>(record, shape, lane, d));
  if (finite) return;
  for (int d = 0; d < shape.key_dim; d++) store(key_number<T>(record, lane, d), kNotFinite);
  for (int d = 0; d < shape.value_dim; d++) store(value_number<T>(record, shape, lane, d), 0.0f);
}

template <class T>
void copy_numbers(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape) {
  for (int d = 0; d < shape.key_dim; d++)
    *key_number<T>(to, to_lane, d) = *key_number<T>(from, from_lane, d);
  for (int d = 0; d < shape.value_dim; d++)
    *value_number<T>(to, shape, to_lane, d) = *value_number<T>(from, shape, from_lane, d);
}

void copy_codes(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape) {
  for (int i = 0; i < shape.key_code_bytes(); i++)
    *key_byte(to, to_lane, i) = *key_byte(from, from_lane, i);
  for (int i = 0; i < shape.value_code_bytes(); i++)
    *value_byte(to, shape, to_lane, i) = *value_byte(from, shape, from_lane, i);
  for (int part = 0; part < 2 * kKvTile; part += kKvTile) {
    key_scale(to, shape, to_lane)[part] = key_scale(from, shape, from_lane)[part];
    if (shape.value_dim)
      value_scale(to, shape, to_lane)[part] = value_scale(from, shape, from_lane)[part];
  }
}

float to_float(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }
float to_float(Half x) { return half_to_float(x.bits); }
float to_float(float x) { return x; }

// bf16, rounded towards zero or away from it.
uint16_t to_bf16(float x, bool away) {
  return static_cast<uint16_t>((__builtin_bit_cast(uint32_t, x) + (away ? 0xffff : 0)) >> 16);
}

// Bounds of the numbers `number(d, lane)`.
template <class F>
void bound_numbers(const KvRecord& shape, uint16_t* bounds, F&& number) {
  const int columns = shape.key_columns();
  std::fill(bounds, bounds + 2 * columns, uint16_t{0});
  for (int d = 0; d < shape.key_dim; d++) {
    float high = number(d, 0), low = high, zeros = 0;
    for (int lane = 0; lane < kKvTile; lane++) {
      const float x = number(d, lane);
      high = std::max(high, x), low = std::min(low, x);
      zeros += x * 0.0f;
    }
    const bool finite = zeros == 0;
    bounds[d] = finite ? to_bf16(high, high > 0) : kNotFiniteBf16;
    bounds[columns + d] = finite ? to_bf16(low, low < 0) : kNotFiniteBf16;
  }
}

template <class T>
void bound_keys(const uint8_t* record, const KvRecord& shape, uint16_t* bounds) {
  bound_numbers(shape, bounds, [&](int d, int lane) {
    return to_float(*key_number<T>(const_cast<uint8_t*>(record), lane, d));
  });
}

void bound_codes(const uint8_t* record, const KvRecord& shape, uint16_t* bounds) {
  auto* keys = const_cast<uint8_t*>(record);
  bound_numbers(shape, bounds, [&](int d, int lane) {
    const bool is_byte = shape.key_bits() == 8;
    const int byte = *key_byte(keys, lane, is_byte ? d : d / 32 * 16 + d % 16);
    const int code = is_byte ? byte : byte >> d / 16 % 2 * 4 & 15;
    const uint16_t* scale = key_scale(keys, shape, lane);
    return static_cast<float>(code) * to_float(scale[0]) + to_float(scale[kKvTile]);
  });
}

}  // namespace

void find_key_bounds(const uint8_t* record, const KvRecord& shape, uint16_t* bounds) {
  if (is_quantised(shape.type)) return bound_codes(record, shape, bounds);
  if (shape.type == KvType::kF16) return bound_keys<Half>(record, shape, bounds);
  return shape.type == KvType::kBf16 ? bound_keys<uint16_t>(record, shape, bounds)
                                     : bound_keys<float>(record, shape, bounds);
}

void write_keys(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n) {
  std::vector<float> memory;
  x = settled(shape.type, x, n, memory);
  if (shape.type == KvType::kF16) {
    Half* to = key_number<Half>(record, lane, d);
    for (int i = 0; i < n; i++, to += kKvTile) store(to, x[i]);
  } else if (shape.type == KvType::kBf16) {
    auto* to = reinterpret_cast<uint8_t*>(key_number<uint16_t>(record, lane, d));
    for (int i = 0; i < n; i += 2, to += 4 * kKvTile) {
      const uint32_t pair = to_bf16(x[i]) | static_cast<uint32_t>(to_bf16(x[i + 1])) << 16;
      std::memcpy(to, &pair, 4);
    }
  } else {
    float* to = key_number<float>(record, lane, d);
    for (int i = 0; i < n; i++, to += kKvTile) *to = x[i];
  }
}

bool write_values(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n) {
  std::vector<float> memory;
  const float* from = settled(shape.type, x, n, memory);
  if (shape.type == KvType::kF16) {
    for (int i = 0; i < n; i++) store(value_number<Half>(record, shape, lane, d + i), from[i]);
  } else if (shape.type == KvType::kBf16) {
    uint16_t* to = value_number<uint16_t>(record, shape, lane, d);
    for (int i = 0; i < n; i++) to[2 * i] = to_bf16(from[i]);
  } else {
    std::copy(from, from + n, value_number<float>(record, shape, lane, d));
  }
  return from == x;
}

uint8_t* key_place(uint8_t* record, int lane, int d) {
  return reinterpret_cast<uint8_t*>(key_number<uint16_t>(record, lane, d));
}

uint8_t* value_place(uint8_t* record, const KvRecord& shape, int lane, int d) {
  return reinterpret_cast<uint8_t*>(value_number<uint16_t>(record, shape, lane, d));
}

void settle(uint8_t* record, const KvRecord& shape, int lane) {
  if (shape.type == KvType::kF16) return settle_value<Half>(record, shape, lane);
  return shape.type == KvType::kBf16 ? settle_value<uint16_t>(record, shape, lane)
                                     : settle_value<float>(record, shape, lane);
}

void write_codes(uint8_t* record, const KvRecord& shape, int lane, const KvCodes& key,
                 const KvCodes* value) {
  for (int i = 0; i < shape.key_code_bytes(); i++)
    *key_byte(record, lane, i) = code_byte(key.codes, shape.key_dim, shape.key_bits(), i);
  const bool finite = !value || value->is_finite();
  uint16_t* scale = key_scale(record, shape, lane);
  scale[0] = key.step, scale[kKvTile] = finite ? key.least : kNotFiniteBf16;
  if (!value) return;
  for (int i = 0; i < shape.value_lanes(); i++)
    *value_byte(record, shape, lane, i) =
        code_byte(value->codes, shape.value_dim, shape.value_bits(), i);
  scale = value_scale(record, shape, lane);
  scale[0] = value->step, scale[kKvTile] = finite ? value->least : uint16_t{0};
}

void copy_token(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape) {
  if (is_quantised(shape.type)) return copy_codes(to, to_lane, from, from_lane, shape);
  if (shape.type == KvType::kF16) return copy_numbers<Half>(to, to_lane, from, from_lane, shape);
  return shape.type == KvType::kBf16 ? copy_numbers<uint16_t>(to, to_lane, from, from_lane, shape)
                                     : copy_numbers<float>(to, to_lane, from, from_lane, shape);
}

void KvCache::move(int source, int target) const {
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++)
      copy_token(record(layer, head, target / kKvTile), target % kKvTile,
                 record(layer, head, source / kKvTile), source % kKvTile, shape_);
}

void KvCache::copy_out(int block, uint8_t* to) const {
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++, to += shape_.bytes())
      std::memcpy(to, record(layer, head, block), shape_.bytes());
}

void KvCache::copy_in(int block, const uint8_t* from) const {
  use(block * kKvTile);
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++, from += shape_.bytes())
      std::memcpy(record(layer, head, block), from, shape_.bytes());
  if (has_bounds()) find_bounds(block);
}

void KvCache::find_bounds(int block) const {
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++)
      find_key_bounds(record(layer, head, block), shape_, bounds(layer, head, block));
}

}  // namespace headrace
