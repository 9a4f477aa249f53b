#include "kv.h"

#include <cstring>

namespace headrace {
namespace {

uint16_t to_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

void store_value(uint8_t* record, const KvRecord& shape, int lane, int d, uint16_t bits) {
  auto* pair = reinterpret_cast<uint16_t*>(record + shape.value_offset()) + (static_cast<size_t>(lane / 2) * shape.padded_dim() + d) * 2;
  pair[lane % 2] = bits;
  // A block is filled in ascending order; clearing the partner keeps numbers of an earlier owner out of the dot products, where
  // even a weight of zero would let a NaN through.
  if (lane % 2 == 0) pair[1] = 0;
}

}  // namespace

void write_key(uint8_t* record, const KvRecord& shape, int lane, int d, float x) {
  if (shape.type == KvType::kBf16) {
    const uint16_t bits = to_bf16(x);
    std::memcpy(record + (static_cast<size_t>(d / 2 * kKvTile + lane) * 2 + d % 2) * 2, &bits, 2);
  } else {
    std::memcpy(record + static_cast<size_t>(d * kKvTile + lane) * 4, &x, 4);
  }
}

void write_value(uint8_t* record, const KvRecord& shape, int lane, int d, float x) {
  if (shape.type == KvType::kBf16)
    store_value(record, shape, lane, d, to_bf16(x));
  else
    std::memcpy(record + shape.value_offset() + (static_cast<size_t>(lane) * shape.padded_dim() + d) * 4, &x, 4);
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
  for (int d = 0; d < shape.head_dim; d++) store_value(to, shape, to_lane, d, source[2 * d]);
}

void KvCache::move(int source, int target) const {
  for (int layer = 0; layer < layers_; layer++)
    for (int head = 0; head < heads_; head++)
      copy_token(record(layer, head, target / kKvTile), target % kKvTile, record(layer, head, source / kKvTile), source % kKvTile, shape_);
}

}  // namespace headrace
