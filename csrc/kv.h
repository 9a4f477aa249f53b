// Storage of keys and values: blocks of 32 tokens, one record for each layer, KV head and block.
#pragma once
#include "kernels.h"
#include "memory.h"

namespace headrace {

// Eight blocks with adjacent numbers are adjacent for a head (a long linear read), and all layers and heads of these eight
// blocks are adjacent too: so the cache grows in huge pages, a chunk at a time, as blocks are first used.
class KvCache {
 public:
  static constexpr int kChunk = 8;

  KvCache(int layers, int heads, int blocks, KvRecord shape)
      : layers_(layers),
        heads_(heads),
        blocks_(blocks),
        shape_(shape),
        arena_(static_cast<size_t>((blocks + kChunk - 1) / kChunk) * kChunk * layers * heads * shape.bytes()) {}

  int heads() const { return heads_; }
  int num_blocks() const { return blocks_; }
  const KvRecord& shape() const { return shape_; }
  uint8_t* record(int layer, int head, int block) const {
    const size_t group = (static_cast<size_t>(block / kChunk) * layers_ + layer) * heads_ + head;
    return arena_.data() + (group * kChunk + block % kChunk) * shape_.bytes();
  }
  void move(int source, int target) const;

 private:
  int layers_, heads_, blocks_;
  KvRecord shape_;
  Arena arena_;
};

// Numbers d .. d + n - 1 of the key or value of token `lane`; d and n are even for keys. `last`: token lane + 1 is not written in the
// same step, where it may be another thread's.
void write_keys(uint8_t* record, const KvRecord& shape, int lane, int d, const float* x, int n);
void write_values(uint8_t* record, const KvRecord& shape, int lane, bool last, int d, const float* x, int n);
// A whole key and value, quantised.
void write_codes(uint8_t* record, const KvRecord& shape, int lane, bool last, const KvCodes& key, const KvCodes& value);
// Key and value of one token from record to record.
void copy_token(uint8_t* to, int to_lane, const uint8_t* from, int from_lane, const KvRecord& shape);

}  // namespace headrace
