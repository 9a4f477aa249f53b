// Writes the keys and values of a step to the KV cache.
#include <algorithm>
#include <vector>

#include "plan.h"

namespace headrace {
namespace {

// Quantises one head of a row at a time.
class HeadQuantiser {
 public:
  HeadQuantiser(const Kernels& kernels, const KvRecord& shape) : kernels_(kernels), shape_(shape) {
    if (!is_quantised(shape.type)) return;
    vector_.resize(static_cast<size_t>(shape.padded_dim()));
    codes_.resize(vector_.size());
  }

  // The codes are valid until the next call.
  KvCodes operator()(const float* x) {
    KvCodes out{codes_.data(), 0, 0};
    std::copy(x, x + shape_.head_dim, vector_.begin());
    kernels_.rotate_head(vector_.data(), shape_.head_dim);
    kernels_.quantise_kv(vector_.data(), shape_.head_dim, shape_.bits(), out);
    return out;
  }

 private:
  const Kernels& kernels_;
  const KvRecord& shape_;
  std::vector<float> vector_;
  std::vector<uint8_t> codes_;
};

// From float buffers, [rows][heads x head_dim] of keys and of values: the range of a quantised head is known only when all of its
// numbers are.
class KvWrite : public Op {
 public:
  KvWrite(std::string kind, int k, int v, KvLayer layer) : Op(std::move(kind)), k_(k), v_(v), layer_(layer) {}

  int items(const Plan&, const Step& step) override { return step.rows; }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    const KvCache& cache = plan.kv(layer_.group);
    const KvRecord& shape = cache.shape();
    const KvRows& rows = step.kv[layer_.group];
    HeadQuantiser key(plan.kernels(), shape), value(plan.kernels(), shape);
    for (int row = begin; row < end; row++) {
      const int slot = rows.slots[row], lane = slot % kKvTile;
      const float *k = plan.buffer(k_).row(row), *v = plan.buffer(v_).row(row);
      for (int head = 0; head < cache.heads(); head++, k += shape.head_dim, v += shape.head_dim) {
        uint8_t* record = cache.record(layer_.layer, head, slot / kKvTile);
        if (is_quantised(shape.type)) {
          write_codes(record, shape, lane, key(k), value(v));
        } else {
          write_keys(record, shape, lane, 0, k, shape.head_dim);
          if (!write_values(record, shape, lane, 0, v, shape.head_dim)) settle(record, shape, lane);
        }
      }
    }
  }

 private:
  const int k_, v_;
  const KvLayer layer_;
};

}  // namespace

std::unique_ptr<Op> make_kv_write(std::string kind, int k, int v, KvLayer layer) {
  return std::make_unique<KvWrite>(std::move(kind), k, v, layer);
}

}  // namespace headrace
