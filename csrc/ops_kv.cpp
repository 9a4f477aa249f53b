// Writes the keys and values of a step to the KV cache.
#include <algorithm>
#include <functional>
#include <vector>

#include "plan.h"

namespace headrace {
namespace {

// Quantises keys or values of one size.
class HeadQuantiser {
 public:
  HeadQuantiser(const Kernels& kernels, int dim, int bits)
      : kernels_(kernels), dim_(dim), bits_(bits), columns_((dim + 15) / 16 * 16) {
    vectors_.resize(static_cast<size_t>(kMostKeysTogether) * 2 * columns_);
    codes_.resize(static_cast<size_t>(kMostKeysTogether) * columns_);
  }

  // Place `k` of kMostKeysTogether. Its codes are valid until the next call for it.
  const KvCodes& quantise(int k, const float* x, const KeyRounding* rounding) {
    float* v = vector(k);
    if (rounding)
      std::transform(x, x + dim_, rounding->centre.begin(), v, std::minus<>());
    else
      std::copy(x, x + dim_, v);
    std::fill(v + dim_, v + columns_, 0.0f);
    kernels_.rotate_head(v, dim_, dim_ & -dim_);
    results_[k] = {codes_.data() + static_cast<size_t>(k) * columns_, 0, 0};
    kernels_.quantise_kv(v, dim_, bits_, !rounding, results_[k]);
    if (rounding && results_[k].is_finite())
      fed_[num_fed_++] = {v, v + columns_, rounding->feedback.data(), &results_[k]};
    return results_[k];
  }

  // Rounds the keys with feedback since the last call.
  void feed_errors() {
    if (num_fed_) kernels_.round_keys(fed_, num_fed_, dim_);
    num_fed_ = 0;
  }

 private:
  float* vector(int k) { return vectors_.data() + static_cast<size_t>(k) * 2 * columns_; }

  const Kernels& kernels_;
  const int dim_, bits_, columns_;
  std::vector<float> vectors_;
  std::vector<uint8_t> codes_;
  KvCodes results_[kMostKeysTogether];
  KeyToRound fed_[kMostKeysTogether];
  int num_fed_ = 0;
};

// From float buffers, [rows][heads x numbers] of keys and of values: the range of a
// quantised head is known only when all of its numbers are. Without values where they
// are part of the keys. An item is a row and a KV head.
class KvWrite : public Op {
 public:
  KvWrite(std::string kind, int k, int v, KvLayer layer)
      : Op(std::move(kind)), k_(k), v_(v), layer_(layer) {}

  int items(const Plan& plan, const Step& step) override {
    return step.rows * plan.kv(layer_.group).heads();
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    const KvRecord& shape = plan.kv(layer_.group).shape();
    if (is_quantised(shape.type)) return quantise(plan, step, begin, end);
    for (int i = begin; i < end; i++) {
      const Item at(*this, plan, step, i);
      write_keys(at.record, shape, at.lane, 0, at.key, shape.key_dim);
      if (at.value && !write_values(at.record, shape, at.lane, 0, at.value, shape.value_dim))
        settle(at.record, shape, at.lane);
    }
  }

 private:
  struct Item {
    Item(const KvWrite& op, const Plan& plan, const Step& step, int i) {
      const KvCache& cache = plan.kv(op.layer_.group);
      const int row = i / cache.heads(), slot = step.kv[op.layer_.group].slots[row];
      head = i % cache.heads(), lane = slot % kKvTile;
      record = cache.record(op.layer_.layer, head, slot / kKvTile);
      key = plan.buffer(op.k_).row(row) + head * cache.shape().key_dim;
      if (op.v_ >= 0) value = plan.buffer(op.v_).row(row) + head * cache.shape().value_dim;
    }

    int head, lane;
    uint8_t* record;
    const float *key, *value = nullptr;
  };

  // Some keys together: the numbers of a key wait for each other.
  void quantise(const Plan& plan, const Step& step, int begin, int end) const {
    const KvCache& cache = plan.kv(layer_.group);
    const KvRecord& shape = cache.shape();
    HeadQuantiser keys(plan.kernels(), shape.key_dim, shape.key_bits()),
        values(plan.kernels(), shape.value_dim, shape.value_bits());
    const KvCodes *key[kMostKeysTogether], *value[kMostKeysTogether];
    for (int i = begin; i < end; i += kMostKeysTogether) {
      const int count = std::min(kMostKeysTogether, end - i);
      for (int k = 0; k < count; k++) {
        const Item at(*this, plan, step, i + k);
        key[k] = &keys.quantise(k, at.key, cache.key_rounding(layer_.layer, at.head));
        value[k] = at.value ? &values.quantise(k, at.value, nullptr) : nullptr;
      }
      keys.feed_errors();
      for (int k = 0; k < count; k++) {
        const Item at(*this, plan, step, i + k);
        write_codes(at.record, shape, at.lane, *key[k], value[k]);
      }
    }
  }

  const int k_, v_;
  const KvLayer layer_;
};

}  // namespace

std::unique_ptr<Op> make_kv_write(std::string kind, int k, int v, KvLayer layer) {
  return std::make_unique<KvWrite>(std::move(kind), k, v, layer);
}

}  // namespace headrace
