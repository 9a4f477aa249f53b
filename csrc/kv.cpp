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

void copy_token(uint8_t* to, int to_lane, const uint8_t* from, int from_lane, const KvRecord& shape) {
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
