// Writes the keys and values of a step to the KV cache.
#include <algorithm>
#include <vector>

#include "plan.h"

namespace headrace {
namespace {

// Quantises one key or value of a row at a time.
class HeadQuantiser {
 public:
  HeadQuantiser(const Kernels& kernels, int dim, int bits)
      : kernels_(kernels), dim_(dim), bits_(bits) {
    vector_.resize((static_cast<size_t>(dim) + 15) / 16 * 16);
    codes_.resize(vector_.size());
  }

  // The codes are valid until the next call.
  KvCodes operator()(const float* x) {
    KvCodes out{codes_.data(), 0, 0};
    std::copy(x, x + dim_, vector_.begin());
    kernels_.rotate_head(vector_.data(), dim_, dim_ & -dim_);
    kernels_.quantise_kv(vector_.data(), dim_, bits_, out);
    return out;
  }

 private:
  const Kernels& kernels_;
  const int dim_, bits_;
  std::vector<float> vector_;
  std::vector<uint8_t> codes_;
};

// From float buffers, [rows][heads x numbers] of keys and of values: the range of a
// quantised head is known only when all of its numbers are. Without values where they
// are part of the keys.
class KvWrite : public Op {
 public:
  KvWrite(std::string kind, int k, int v, KvLayer layer)
      : Op(std::move(kind)), k_(k), v_(v), layer_(layer) {}

  int items(const Plan&, const Step& step) override { return step.rows; }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    const KvRecord& shape = plan.kv(layer_.group).shape();
    if (!is_quantised(shape.type))
      return each(plan, step, begin, end,
                  [&](uint8_t* record, int lane, const float* k, const float* v) {
                    write_keys(record, shape, lane, 0, k, shape.key_dim);
                    if (v && !write_values(record, shape, lane, 0, v, shape.value_dim))
                      settle(record, shape, lane);
                  });
    HeadQuantiser key(plan.kernels(), shape.key_dim, shape.bits()),
        value(plan.kernels(), shape.value_dim, shape.bits());
    each(plan, step, begin, end, [&](uint8_t* record, int lane, const float* k, const float* v) {
      const KvCodes keys = key(k), values = v ? value(v) : KvCodes{};
      write_codes(record, shape, lane, keys, v ? &values : nullptr);
    });
  }

 private:
  // Calls f(record, lane, key, value) for all heads of these rows.
  template <class F>
  void each(const Plan& plan, const Step& step, int begin, int end, F&& f) const {
    const KvCache& cache = plan.kv(layer_.group);
    for (int row = begin; row < end; row++) {
      const int slot = step.kv[layer_.group].slots[row];
      for (int head = 0; head < cache.heads(); head++)
        f(cache.record(layer_.layer, head, slot / kKvTile), slot % kKvTile,
          plan.buffer(k_).row(row) + head * cache.shape().key_dim,
          v_ < 0 ? nullptr : plan.buffer(v_).row(row) + head * cache.shape().value_dim);
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
