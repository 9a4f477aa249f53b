// Linear ops by heads, each of which has a matrix of its own.
#include <algorithm>
#include <vector>

#include "tiles.h"

namespace headrace {
namespace {

// Its items are a head for some blocks of rows: a thread packs these for the head's
// weight, and multiplies them with all of its tiles.
class HeadLinear : public Op {
 public:
  HeadLinear(int out, int x, std::vector<int> weights)
      : Op("head_linear"), out_(out), x_(x), weights_(std::move(weights)) {}

  int items(const Plan& plan, const Step&) override {
    return chunks(plan) * static_cast<int>(weights_.size());
  }

  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    const int heads = static_cast<int>(weights_.size());
    for (int item = begin; item < end; item++)
      run_item(plan, item % heads, item / heads * kMostBlocks);
  }

 private:
  static constexpr int kMostBlocks = 8;  // whose rows stay in a cache beside the weight

  int chunks(const Plan& plan) const {
    return (plan.blocks_of(plan.buffer(x_)).count + kMostBlocks - 1) / kMostBlocks;
  }

  void run_item(const Plan& plan, int head, int first_block) const {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const Weight& w = plan.weight(weights_[head]);
    const Form form = plan.form(w, false);
    const Blocks& blocks = plan.blocks_of(x);
    const int last_block = std::min(first_block + kMostBlocks, blocks.count),
              unit = std::max(unit_columns(w.format), kGroup);
    const int columns = (w.cols + unit - 1) / unit * unit, first_row = blocks.first(first_block);
    const size_t row_bytes = form_row_bytes(form, columns);
    thread_local std::vector<uint8_t> packed;
    packed.resize(std::max(packed.size(), (blocks.first(last_block) - first_row) * row_bytes));
    const auto block = [&](int b) {
      return packed.data() + (blocks.first(b) - first_row) * row_bytes;
    };
    for (int b = first_block; b < last_block; b++) {
      const float* from = x.head(blocks.first(b), head, w.cols);
      plan.kernels().pack[static_cast<int>(form)](from, x.width, blocks.rows(b), w.cols, columns,
                                                  block(b), blocks.rows(b), 0);
    }
    alignas(64) float tile[kMaxBlockRows * 16];
    for (int t = 0; t < w.tiles(); t++)
      for (int b = first_block; b < last_block; b++) {
        multiply(plan, w, t, false, block(b), blocks.rows(b), nullptr, tile);
        float* to = out.row(blocks.first(b)) + static_cast<size_t>(head) * w.rows + 16 * t;
        plan.kernels().finish_tile(tile, blocks.rows(b), std::min(16, w.rows - 16 * t), nullptr, 0,
                                   to, out.width);
      }
  }

  const int out_, x_;
  const std::vector<int> weights_;
};

}  // namespace

std::unique_ptr<Op> make_head_linear(int out, int x, std::vector<int> weights) {
  return std::make_unique<HeadLinear>(out, x, std::move(weights));
}

}  // namespace headrace
