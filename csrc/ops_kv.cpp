// Quantises the keys and values of a step into the KV cache. They come from a buffer, since a head's range is known only when all of
// its numbers are, and these are made tile by tile.
#include <vector>

#include "plan.h"

namespace headrace {
namespace {

class KvQuantise : public Op {
 public:
  KvQuantise(int x, KvLayer layer) : Op("qkv_rope_write"), x_(x), layer_(layer) {}

  int items(const Plan&, const Step& step) override { return step.rows; }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    const KvCache& cache = plan.kv(layer_.group);
    const KvRecord& shape = cache.shape();
    const int32_t* slots = step.kv[layer_.group].slots;
    const size_t width = static_cast<size_t>(shape.padded_dim());
    std::vector<float> vector(width);
    std::vector<uint8_t> codes(2 * width);
    for (int row = begin; row < end; row++) {
      const int slot = slots[row], lane = slot % kKvTile;
      const bool last = row + 1 == step.rows || slots[row + 1] != slot + 1;
      for (int head = 0; head < cache.heads(); head++) {
        KvCodes parts[2] = {{codes.data(), 0, 0}, {codes.data() + width, 0, 0}};
        for (int part = 0; part < 2; part++) {
          const float* x = plan.buffer(x_).row(row) + (part * cache.heads() + head) * shape.head_dim;
          std::copy(x, x + shape.head_dim, vector.begin());
          plan.kernels().rotate_head(vector.data(), shape.head_dim);
          plan.kernels().quantise_kv(vector.data(), shape.head_dim, shape.bits(), parts[part]);
        }
        write_codes(cache.record(layer_.layer, head, slot / kKvTile), shape, lane, last, parts[0], parts[1]);
      }
    }
  }

 private:
  const int x_;
  const KvLayer layer_;
};

}  // namespace

std::unique_ptr<Op> make_kv_quantise(int x, KvLayer layer) { return std::make_unique<KvQuantise>(x, layer); }

}  // namespace headrace
