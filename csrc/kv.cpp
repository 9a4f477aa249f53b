#include "kv.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace headrace {
namespace {

constexpr float kNotFinite = std::numeric_limits<float>::quiet_NaN();

// Below 0 for a number that is not finite, or is not once it is rounded to bf16.
int32_t margin(float x) { return 0x7f7f7fff - (__builtin_bit_cast(int32_t, x) & 0x7fffffff); }

// The numbers as they are stored: `x` itself, or a copy in `memory` where any that is not finite is one NaN. A query would look past a key
// of minus infinity.
const float* settled(const float* x, int n, std::vector<float>& memory) {
  int32_t margins = 0;
  for (int i = 0; i < n; i++) margins |= margin(x[i]);
  if (margins >= 0) return x;
  memory.resize(static_cast<size_t>(n));
  std::transform(x, x + n, memory.begin(), [](float v) { return margin(v) < 0 ? kNotFinite : v; });
  return memory.data();
}

uint16_t to_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

void store(uint16_t* to, float x) { *to = to_bf16(x); }
void store(float* to, float x) { *to = x; }
bool is_nan(uint16_t x) { return x == kNotFiniteBf16; }
bool is_nan(float x) { return x != x; }

// Number d of a token's key or value in a record of T, bf16 or float32.
template <class T>
T* key_number(uint8_t* record, int lane, int d) {
  constexpr int per = 4 / sizeof(T);
  return reinterpret_cast<T*>(record) + (d / per * kKvTile + lane) * per + d % per;
}

template <class T>
T* value_number(uint8_t* record, const KvRecord& shape, int lane, int d) {
  constexpr int per = 4 / sizeof(T);
  return reinterpret_cast<T*>(record + shape.value_offset()) + (lane / per * shape.value_columns() + d) * per + lane % per;
}

uint8_t* value_codes(uint8_t* record, const KvRecord& shape, int lane) {
  return record + shape.value_offset() + static_cast<size_t>(lane) * shape.code_dim() * shape.bits() / 8;
}

// The steps and least numbers of keys, then those of values.
uint16_t* scale_number(uint8_t* record, const KvRecord& shape, int part, int lane) {
  return reinterpret_cast<uint16_t*>(record + shape.scale_offset()) + part * kKvTile + lane;
}

void write_value_codes(uint8_t* record, const KvRecord& shape, int lane, const KvCodes& value) {
  uint8_t* values = value_codes(record, shape, lane);
  if (shape.bits() == 8) {
    std::memcpy(values, value.codes, static_cast<size_t>(shape.value_dim));
  } else {
    for (int d = 0; d < shape.value_dim; d += 32)
      for (int i = 0; i < 16; i++) {
        const int high = d + 16 + i < shape.value_dim ? value.codes[d + 16 + i] : 0;
        values[d / 2 + i] = static_cast<uint8_t>((d + i < shape.value_dim ? value.codes[d + i] : 0) | high << 4);
      }
  }
  *scale_number(record, shape, 2, lane) = value.step;
  *scale_number(record, shape, 3, lane) = value.is_finite() ? value.least : uint16_t{0};
}

template <class T>
void settle_value(uint8_t* record, const KvRecord& shape, int lane) {
  bool finite = true;
  for (int d = 0; d < shape.value_dim; d++) finite &= !is_nan(*value_number<T>(record, shape, lane, d));
  if (finite) return;
  for (int d = 0; d < shape.key_dim; d++) store(key_number<T>(record, lane, d), kNotFinite);
  for (int d = 0; d < shape.value_dim; d++) store(value_number<T>(record, shape, lane, d), 0.0f);
}

template <class T>
void copy_numbers(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape) {
  for (int d = 0; d < shape.key_dim; d++) *key_number<T>(to, to_lane, d) = *key_number<T>(from, from_lane, d);
  for (int d = 0; d < shape.value_dim; d++) *value_number<T>(to, shape, to_lane, d) = *value_number<T>(from, shape, from_lane, d);
}

void copy_codes(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape) {
  for (size_t i = 0; i < shape.value_offset(); i += kKvTile) to[i + to_lane] = from[i + from_lane];
  std::memcpy(value_codes(to, shape, to_lane), value_codes(from, shape, from_lane),
              static_cast<size_t>(shape.code_dim()) * shape.bits() / 8);
  for (int part = 0; part < shape.num_scales(); part++)
    *scale_number(to, shape, part, to_lane) = *scale_number(from, shape, part, from_lane);
}

}  // namespace

void write_keys(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n) {
  std::vector<float> memory;
  x = settled(x, n, memory);
  if (shape.type == KvType::kBf16) {
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
  const float* from = settled(x, n, memory);
  if (shape.type == KvType::kBf16) {
    uint16_t* to = value_number<uint16_t>(record, shape, lane, d);
    for (int i = 0; i < n; i++) to[2 * i] = to_bf16(from[i]);
  } else {
    std::copy(from, from + n, value_number<float>(record, shape, lane, d));
  }
  return from == x;
}

void settle(uint8_t* record, const KvRecord& shape, int lane) {
  return shape.type == KvType::kBf16 ? settle_value<uint16_t>(record, shape, lane) : settle_value<float>(record, shape, lane);
}

void write_codes(uint8_t* record, const KvRecord& shape, int lane, const KvCodes& key, const KvCodes* value) {
  uint8_t* keys = record + lane;
  if (shape.bits() == 8)
    for (int d = 0; d < shape.key_dim; d++) keys[d * kKvTile] = key.codes[d];
  else
    for (int d = 0; d < shape.key_dim; d += 2) keys[d / 2 * kKvTile] = static_cast<uint8_t>(key.codes[d] | key.codes[d + 1] << 4);
  const bool finite = !value || value->is_finite();
  const uint16_t scales[] = {key.step, finite ? key.least : kNotFiniteBf16};
  for (int part = 0; part < 2; part++) *scale_number(record, shape, part, lane) = scales[part];
  if (value) write_value_codes(record, shape, lane, *value);
}

void copy_token(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape) {
  if (is_quantised(shape.type)) return copy_codes(to, to_lane, from, from_lane, shape);
  return shape.type == KvType::kBf16 ? copy_numbers<uint16_t>(to, to_lane, from, from_lane, shape)
                                     : copy_numbers<float>(to, to_lane, from, from_lane, shape);
}

void KvCache::move(int source, int target) const {
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++)
      copy_token(record(layer, head, target / kKvTile), target % kKvTile, record(layer, head, source / kKvTile), source % kKvTile, shape_);
}

}  // namespace headrace
