#include "kv.h"

#include <cstring>

namespace headrace {
namespace {

uint16_t to_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// A block is filled in ascending order. An even token whose partner does not follow at once clears it: numbers of an earlier owner must
// not come into the dot products, where even a weight of zero would let a NaN through.
void store_value(uint32_t* pair, int lane, bool last, uint16_t bits) {
  if (lane % 2 == 0 && last)
    *pair = bits;
  else
    reinterpret_cast<uint16_t*>(pair)[lane % 2] = bits;
}

uint32_t* value_pairs(uint8_t* record, const KvRecord& shape, int lane) {
  return reinterpret_cast<uint32_t*>(record + shape.value_offset()) + static_cast<size_t>(lane / 2) * shape.padded_dim();
}

uint8_t* value_codes(uint8_t* record, const KvRecord& shape, int lane) {
  return record + shape.value_offset() + static_cast<size_t>(lane) * shape.code_dim() * shape.bits() / 8;
}

// The four scale numbers of a token. Those of a value whose partner does not follow at once are cleared for the same reason.
void write_scale(uint8_t* record, const KvRecord& shape, int part, int lane, bool last, uint16_t bits) {
  auto* scales = reinterpret_cast<uint16_t*>(record + shape.scale_offset()) + part * kKvTile;
  scales[lane] = bits;
  if (part >= 2 && lane % 2 == 0 && last) scales[lane + 1] = 0;
}

void copy_codes(uint8_t* to, int to_lane, const uint8_t* from, int from_lane, const KvRecord& shape) {
  for (size_t i = 0; i < shape.value_offset(); i += kKvTile) to[i + to_lane] = from[i + from_lane];
  const size_t width = static_cast<size_t>(shape.code_dim()) * shape.bits() / 8;
  std::memcpy(to + shape.value_offset() + to_lane * width, from + shape.value_offset() + from_lane * width, width);
  const auto* scales = reinterpret_cast<const uint16_t*>(from + shape.scale_offset()) + from_lane;
  for (int part = 0; part < 4; part++) write_scale(to, shape, part, to_lane, true, scales[part * kKvTile]);
}

}  // namespace

void write_keys(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n) {
  auto* lines = reinterpret_cast<uint32_t*>(record) + lane;
  if (shape.type == KvType::kBf16) {
    for (int i = 0; i < n; i += 2) lines[(d + i) / 2 * kKvTile] = to_bf16(x[i]) | static_cast<uint32_t>(to_bf16(x[i + 1])) << 16;
  } else {
    for (int i = 0; i < n; i++) std::memcpy(&lines[(d + i) * kKvTile], &x[i], 4);
  }
}

void write_values(uint8_t* record, const KvRecord& shape, int lane, bool last, int d, const float* x, int n) {
  if (shape.type == KvType::kF32) {
    std::memcpy(record + shape.value_offset() + (static_cast<size_t>(lane) * shape.padded_dim() + d) * 4, x, static_cast<size_t>(n) * 4);
    return;
  }
  uint32_t* pairs = value_pairs(record, shape, lane) + d;
  for (int i = 0; i < n; i++) store_value(&pairs[i], lane, last, to_bf16(x[i]));
}

void write_codes(uint8_t* record, const KvRecord& shape, int lane, bool last, const KvCodes& key, const KvCodes& value) {
  uint8_t *keys = record + lane, *values = value_codes(record, shape, lane);
  if (shape.bits() == 8) {
    for (int d = 0; d < shape.head_dim; d++) keys[d * kKvTile] = key.codes[d];
    std::memcpy(values, value.codes, static_cast<size_t>(shape.head_dim));
  } else {
    for (int d = 0; d < shape.head_dim; d += 2) keys[d / 2 * kKvTile] = static_cast<uint8_t>(key.codes[d] | key.codes[d + 1] << 4);
    for (int d = 0; d < shape.head_dim; d += 32)
      for (int i = 0; i < 16; i++) {
        const int high = d + 16 + i < shape.head_dim ? value.codes[d + 16 + i] : 0;
        values[d / 2 + i] = static_cast<uint8_t>((d + i < shape.head_dim ? value.codes[d + i] : 0) | high << 4);
      }
  }
  const uint16_t scales[] = {key.step, key.least, value.step, value.least};
  for (int part = 0; part < 4; part++) write_scale(record, shape, part, lane, last, scales[part]);
}

void copy_token(uint8_t* to, int to_lane, const uint8_t* from, int from_lane, const KvRecord& shape) {
  if (is_quantised(shape.type)) return copy_codes(to, to_lane, from, from_lane, shape);
  for (int line = 0; line < shape.head_dim / shape.per(); line++)
    std::memcpy(to + (line * kKvTile + to_lane) * 4, from + (line * kKvTile + from_lane) * 4, 4);
  const size_t values = shape.value_offset(), width = static_cast<size_t>(shape.padded_dim()) * 4;
  if (shape.type == KvType::kF32) {
    std::memcpy(to + values + to_lane * width, from + values + from_lane * width, width);
    return;
  }
  const auto* source = reinterpret_cast<const uint16_t*>(from + values + from_lane / 2 * width) + from_lane % 2;
  uint32_t* pairs = value_pairs(to, shape, to_lane);
  for (int d = 0; d < shape.head_dim; d++) store_value(&pairs[d], to_lane, true, source[2 * d]);
}

void KvCache::move(int source, int target) const {
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++)
      copy_token(record(layer, head, target / kKvTile), target % kKvTile, record(layer, head, source / kKvTile), source % kKvTile, shape_);
}

}  // namespace headrace
