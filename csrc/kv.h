// Storage of keys and values: blocks of 32 tokens, one record for each layer, KV head
// and block.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "kv_pages.h"
#include "memory.h"

namespace headrace {

// How the keys of a KV head are rounded to int4 (headrace/quant/key_rounding.py).
struct KeyRounding {
  std::vector<float> centre;       // [key numbers], which keys are stored without
  std::vector<uint16_t> feedback;  // bf16 [key numbers][key columns], zeros up to the diagonal
};

// Eight blocks with adjacent numbers are adjacent for a head (a long linear read), and
// all layers and heads of these eight blocks are adjacent too: so the cache grows in
// huge pages, a chunk at a time, as blocks are first used. The last chunk has as many
// blocks as are left.
class KvCache {
 public:
  static constexpr int kChunk = 8;

  KvCache(int layers, int heads, int blocks, KvRecord shape, bool has_bounds = false)
      : layers_(layers),
        heads_(heads),
        blocks_(blocks),
        shape_(shape),
        arena_(product({layers, heads, blocks}, shape.bytes())),
        bounds_(has_bounds ? product({layers, heads, blocks}, shape.bound_bytes()) : 0),
        pages_(std::make_unique<KvPages>(arena_.data(), records() * shape.bytes())) {}

  int heads() const { return heads_; }
  int num_blocks() const { return blocks_; }
  int layers() const { return layers_; }
  const KvRecord& shape() const { return shape_; }
  bool has_bounds() const { return bounds_.data() != nullptr; }
  size_t bytes() const {
    return records() * (shape_.bytes() + (has_bounds() ? shape_.bound_bytes() : 0));
  }
  uint8_t* record(int layer, int head, int block) const {
    return arena_.data() + place(layer, head, block) * shape_.bytes();
  }
  // How keys are rounded; null: each number by itself.
  const KeyRounding* key_rounding(int layer, int head) const {
    if (roundings_.empty()) return nullptr;
    const KeyRounding& of = roundings_[static_cast<size_t>(layer) * heads_ + head];
    return of.centre.empty() ? nullptr : &of;
  }
  void set_key_rounding(int layer, int head, KeyRounding rounding) {
    roundings_.resize(static_cast<size_t>(layers_) * heads_);
    roundings_[static_cast<size_t>(layer) * heads_ + head] = std::move(rounding);
  }
  // The bounds of a block's keys, [highest, lowest][key columns] in bf16 with zeros at the end:
  // those of its last content when its last slot was written, or any slot was moved to.
  uint16_t* bounds(int layer, int head, int block) const {
    return reinterpret_cast<uint16_t*>(bounds_.data() +
                                       place(layer, head, block) * shape_.bound_bytes());
  }
  void move(int source, int target) const;
  // Bytes of the records of a block, of all layers and heads one after another.
  size_t block_bytes() const { return static_cast<size_t>(layers_) * heads_ * shape_.bytes(); }
  void copy_out(int block, uint8_t* to) const;
  // Fills a block with such bytes, and computes its bounds.
  void copy_in(int block, const uint8_t* from) const;
  // Computes the bounds of a block again, in all layers and heads.
  void find_bounds(int block) const;
  // From now on some pages are resident before their blocks are used.
  void start() const { pages_->use(0); }
  // Says that blocks up to the one of `slot` are in use: pages after them become resident.
  void use(int slot) const {
    const int blocks = std::min(blocks_, (slot / kKvTile / kChunk + 1) * kChunk);
    pages_->use(static_cast<size_t>(blocks) * layers_ * heads_ * shape_.bytes());
  }

 private:
  size_t records() const { return static_cast<size_t>(blocks_) * layers_ * heads_; }
  size_t place(int layer, int head, int block) const {
    const int first = block / kChunk * kChunk, chunk = std::min(kChunk, blocks_ - first);
    const size_t before = static_cast<size_t>(first) * layers_ * heads_,
                 within = static_cast<size_t>(layer) * heads_ + head;
    return before + within * chunk + block - first;
  }

  int layers_, heads_, blocks_;
  KvRecord shape_;
  std::vector<KeyRounding> roundings_;  // [layers][heads], or none
  Arena arena_, bounds_;
  std::unique_ptr<KvPages> pages_;  // of the arena, so it goes first
};

// What is not finite is kept in the key, as NaN, and never in a value, where even a
// weight of zero would let it through: to rows that do not see the token, and to a
// later owner of the block. So a token with a number that is not finite makes NaN of
// all rows that see it. Values that are part of keys are made without such numbers
// (`values_of_keys`).

// Numbers d .. d + n - 1 of the key or value of token `lane`; d and n are even for
// keys. Values say whether all of them are finite: where they are not, `settle` must
// follow before anything reads the token.
void write_keys(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n);
bool write_values(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n);
// Where these numbers begin in a record of bf16.
uint8_t* key_place(uint8_t* record, int lane, int d);
uint8_t* value_place(uint8_t* record, const KvRecord& shape, int lane, int d);
// Zeros for a value with a number that is not finite, and NaN for its key.
void settle(uint8_t* record, const KvRecord& shape, int lane);
// A whole key and value, quantised; null where values are part of keys.
void write_codes(uint8_t* record, const KvRecord& shape, int lane, const KvCodes& key,
                 const KvCodes* value);
// The highest and lowest number of each dimension of a block's keys, rounded outwards to bf16 and
// in the basis of quantised keys. NaN for a dimension with a number that is not finite.
void find_key_bounds(const uint8_t* record, const KvRecord& shape, uint16_t* bounds);
// Key and value of one token from record to record.
void copy_token(uint8_t* to, int to_lane, uint8_t* from, int from_lane, const KvRecord& shape);

}  // namespace headrace
