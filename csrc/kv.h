// Storage of keys and values: blocks of 32 tokens, one record for each layer, KV head and block.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "memory.h"

namespace headrace {

// Eight blocks with adjacent numbers are adjacent for a head (a long linear read), and all layers and heads of these eight
// blocks are adjacent too: so the cache grows in huge pages, a chunk at a time, as blocks are first used. The last chunk has as many
// blocks as are left.
class KvCache {
 public:
  static constexpr int kChunk = 8;

  KvCache(int layers, int heads, int blocks, KvRecord shape)
      : layers_(layers), heads_(heads), blocks_(blocks), shape_(shape), arena_(bytes()) {}

  int heads() const { return heads_; }
  int num_blocks() const { return blocks_; }
  int layers() const { return layers_; }
  const KvRecord& shape() const { return shape_; }
  size_t bytes() const { return static_cast<size_t>(blocks_) * layers_ * heads_ * shape_.bytes(); }
  uint8_t* record(int layer, int head, int block) const {
    const int first = block / kChunk * kChunk, chunk = std::min(kChunk, blocks_ - first);
    const size_t before = static_cast<size_t>(first) * layers_ * heads_, within = static_cast<size_t>(layer) * heads_ + head;
    return arena_.data() + (before + within * chunk + block - first) * shape_.bytes();
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
