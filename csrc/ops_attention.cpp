// Paged attention. The context of a row is cut into splits of 256 tokens counted from position 0; each split is one online
// softmax over its blocks, and the splits are merged in ascending order. Where the splits of a row are computed, by one thread
// or by several, does not change a bit.
#include <algorithm>
#include <bit>
#include <cstring>

#include "plan.h"

namespace headrace {
namespace {

constexpr int kSplitBlocks = 8;
constexpr int kItemQueries = 64;  // query vectors (rows x heads of a group) that walk over the context together

// Some rows of a branch, one KV head, and the splits [first_split, last_split) of their context. `partial` >= 0: the first of this
// item's entries in the table of partial results, to be merged once all splits are there.
struct Item {
  int branch, head, first_row, last_row, first_split, last_split;
  int partial;
};

// Running softmax of some query vectors: maximum, sum, values.
struct States {
  std::vector<float> max, sum, out;

  void reset(int n, int width) {
    max.assign(n, kNoMax);
    sum.assign(n, 0.0f);
    out.assign(static_cast<size_t>(n) * width, 0.0f);
  }
};

// Working memory of a thread, the same for all layers.
struct Scratch {
  std::vector<uint8_t> queries, block;
  States split, total;
};
thread_local Scratch scratch;

class Attention : public Op {
 public:
  Attention(int out, int q, int layer, float scale, int window)
      : Op("attention"), out_(out), q_(q), layer_(layer), scale_(scale), window_(window) {}

  int items(const Plan& plan, const Step& step) override {
    plan_items(plan, step);
    return static_cast<int>(items_.size());
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    for (int i = begin; i < end; i++) run_item(plan, step, items_[i], scratch);
  }

  // The second region of a step whose contexts were split over threads: merges the partial results.
  int merge_items() const { return static_cast<int>(merges_.size()); }
  void merge(const Plan& plan, int i) const {
    const Item& item = merges_[i];
    const int width = plan.kv().shape().padded_dim(), queries = num_queries(plan, item), group = group_size(plan);
    States total;
    total.reset(queries, width);
    for (int s = 0; s < item.last_split; s++)
      for (int n = 0; n < queries; n++) {
        const size_t p = item.partial + static_cast<size_t>(s) * queries + n;
        plan.kernels().merge(&total.max[n], &total.sum[n], &total.out[static_cast<size_t>(n) * width], partial_.max[p], partial_.sum[p],
                             &partial_.out[p * width], width);
      }
    finish(plan, item, total, group);
  }

 private:
  static int group_size(const Plan& plan) { return plan.num_heads() / plan.kv().heads(); }
  static int num_queries(const Plan& plan, const Item& item) { return (item.last_row - item.first_row) * group_size(plan); }
  static int blocks_of(int tokens) { return (tokens + kKvTile - 1) / kKvTile; }

  void plan_items(const Plan& plan, const Step& step) {
    items_.clear();
    merges_.clear();
    const int rows_per_item = std::max(1, kItemQueries / group_size(plan)), heads = plan.kv().heads();
    int whole = 0;
    for (int b = 0; b < step.branches; b++)
      whole += (step.row_start[b + 1] - step.row_start[b] + rows_per_item - 1) / rows_per_item * heads;
    const bool few = whole < 4 * plan.threads() && plan.threads() > 1;
    int partial = 0;
    for (int b = 0; b < step.branches; b++)
      for (int row = step.row_start[b]; row < step.row_start[b + 1]; row += rows_per_item) {
        const int last = std::min(row + rows_per_item, step.row_start[b + 1]);
        const int splits = (blocks_of(deepest(step, row, last) + 1) + kSplitBlocks - 1) / kSplitBlocks;
        for (int h = 0; h < heads; h++) {
          Item item{b, h, row, last, 0, splits, -1};
          if (few && splits > 1) {
            item.partial = partial;
            merges_.push_back(item);
            for (int s = 0; s < splits; s++, partial += num_queries(plan, item)) items_.push_back({b, h, row, last, s, s + 1, partial});
          } else {
            items_.push_back(item);
          }
        }
      }
    // Long ones first, so that the threads end together.
    const auto cost = [&](const Item& i) {
      return (i.last_row - i.first_row) *
             (std::min(i.last_split * kSplitBlocks * kKvTile, step.positions[i.last_row - 1] + 1) - i.first_split * kSplitBlocks * kKvTile);
    };
    std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    partial_.max.resize(partial);
    partial_.sum.resize(partial);
    partial_.out.resize(static_cast<size_t>(partial) * plan.kv().shape().padded_dim());
  }

  static int deepest(const Step& step, int first, int last) { return *std::max_element(step.positions + first, step.positions + last); }

  void run_item(const Plan& plan, const Step& step, const Item& item, Scratch& s) const {
    const KvRecord& shape = plan.kv().shape();
    const int group = group_size(plan), queries = num_queries(plan, item), width = shape.padded_dim();
    const size_t stride = (static_cast<size_t>(shape.head_dim) + 16) * 4;
    s.queries.resize(std::max(s.queries.size(), queries * stride));
    s.block.resize(std::max(s.block.size(), shape.bytes()));
    for (int n = 0; n < queries; n++)
      plan.kernels().pack_query[static_cast<int>(shape.type)](
          plan.buffer(q_).row(item.first_row + n / group) + (item.head * group + n % group) * shape.head_dim, shape.head_dim,
          s.queries.data() + n * stride);
    s.total.reset(queries, width);
    for (int split = item.first_split; split < item.last_split; split++) {
      s.split.reset(queries, width);
      const int end = std::min((split + 1) * kSplitBlocks, blocks_of(deepest(step, item.first_row, item.last_row) + 1));
      for (int t = split * kSplitBlocks; t < end; t++) walk_block(plan, step, item, t, s);
      for (int n = 0; n < queries; n++) {
        const size_t at = static_cast<size_t>(n) * width;
        plan.kernels().merge(&s.total.max[n], &s.total.sum[n], &s.total.out[at], s.split.max[n], s.split.sum[n], &s.split.out[at], width);
      }
    }
    if (item.partial < 0) return finish(plan, item, s.total, group);
    std::copy(s.split.max.begin(), s.split.max.end(), partial_.max.begin() + item.partial);
    std::copy(s.split.sum.begin(), s.split.sum.end(), partial_.sum.begin() + item.partial);
    std::copy(s.split.out.begin(), s.split.out.end(), partial_.out.begin() + static_cast<size_t>(item.partial) * width);
  }

  // Block t of the context against all rows of the item. Below the guess rows of a tree every row sees the same slots; from there
  // on each row has a path of its own, gathered in position order so that every lane holds what it would hold in plain decoding.
  void walk_block(const Plan& plan, const Step& step, const Item& item, int t, Scratch& s) const {
    const int b = item.branch, shared = step.context_len[b] + step.forced_len[b];
    const uint8_t* record = plan.kv().record(layer_, item.head, step.block_table[b * step.max_blocks + t]);
    if (!step.ancestors || (t + 1) * kKvTile <= shared) return attend(plan, step, item, t, item.first_row, item.last_row, record, s);
    for (int row = item.first_row; row < item.last_row; row++) {
      const bool guess = row - step.row_start[b] >= step.forced_len[b];
      attend(plan, step, item, t, row, row + 1, guess ? gather(plan, step, item, t, row, record, s) : record, s);
    }
  }

  const uint8_t* gather(const Plan& plan, const Step& step, const Item& item, int t, int row, const uint8_t* record, Scratch& s) const {
    const KvRecord& shape = plan.kv().shape();
    const int b = item.branch, shared = step.context_len[b] + step.forced_len[b];
    std::memcpy(s.block.data(), record, shape.bytes());
    int position = shared;
    for (int word = 0; word < step.ancestor_words; word++)
      for (uint64_t bits = step.ancestors[static_cast<size_t>(row) * step.ancestor_words + word]; bits; bits &= bits - 1, position++) {
        if (position / kKvTile != t) continue;
        const int slot = step.slots[step.row_start[b] + step.forced_len[b] + 64 * word + std::countr_zero(bits)];
        copy_token(s.block.data(), position % kKvTile, plan.kv().record(layer_, item.head, slot / kKvTile), slot % kKvTile, shape);
      }
    return s.block.data();
  }

  void attend(const Plan& plan, const Step& step, const Item& item, int t, int first_row, int last_row, const uint8_t* record,
              Scratch& s) const {
    const KvRecord& shape = plan.kv().shape();
    const int group = group_size(plan), begin = (first_row - item.first_row) * group, end = (last_row - item.first_row) * group;
    const size_t stride = (static_cast<size_t>(shape.head_dim) + 16) * 4;
    int first[kMaxQueries], last[kMaxQueries];
    const Blocks chunks(end - begin, kMaxQueries);
    for (int c = 0; c < chunks.count; c++) {
      const int start = begin + chunks.first(c), num = chunks.rows(c);
      bool any = false;
      for (int n = 0; n < num; n++) {
        const int position = step.positions[item.first_row + (start + n) / group];
        first[n] = (window_ ? std::max(0, position - window_ + 1) : 0) - t * kKvTile;
        last[n] = position + 1 - t * kKvTile;
        any |= first[n] < kKvTile && last[n] > 0;
      }
      if (!any) continue;
      plan.kernels().attend[static_cast<int>(shape.type)]({record, shape, scale_, num, s.queries.data() + start * stride, stride, first,
                                                           last, &s.split.max[start], &s.split.sum[start],
                                                           &s.split.out[static_cast<size_t>(start) * shape.padded_dim()]});
    }
  }

  void finish(const Plan& plan, const Item& item, const States& states, int group) const {
    const KvRecord& shape = plan.kv().shape();
    for (int n = 0; n < static_cast<int>(states.sum.size()); n++)
      plan.kernels().scale(&states.out[static_cast<size_t>(n) * shape.padded_dim()], 1.0f / states.sum[n],
                           plan.buffer(out_).row(item.first_row + n / group) + (item.head * group + n % group) * shape.head_dim,
                           shape.head_dim);
  }

  const int out_, q_, layer_;
  const float scale_;
  const int window_;
  std::vector<Item> items_, merges_;
  mutable States partial_;
};

class AttentionMerge : public Op {
 public:
  explicit AttentionMerge(const Attention* attention) : Op("attention"), attention_(attention) {}
  int items(const Plan&, const Step&) override { return attention_->merge_items(); }
  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    for (int i = begin; i < end; i++) attention_->merge(plan, i);
  }

 private:
  const Attention* attention_;
};

}  // namespace

std::array<std::unique_ptr<Op>, 2> make_attention(int out, int q, int layer, float scale, int window) {
  auto attention = std::make_unique<Attention>(out, q, layer, scale, window);
  auto merge = std::make_unique<AttentionMerge>(attention.get());
  return {std::move(attention), std::move(merge)};
}

}  // namespace headrace
