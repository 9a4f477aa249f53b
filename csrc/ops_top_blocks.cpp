// Which blocks of its context a row attends to (Quest, Tang et al. 2024): those whose keys can
// have the highest products with its queries, by the bounds of the keys. A choice depends on the
// row and on the tokens that it sees, and on nothing else of the step.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "attention_work.h"
#include "key_bias.h"

namespace headrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class KeyBounds : public Op {
 public:
  explicit KeyBounds(KvLayer layer) : Op("kv_write"), layer_(layer) {}

  int items(const Plan& plan, const Step& step) override {
    full_.clear();
    const int32_t* slots = step.kv[layer_.group].slots;
    for (int row = 0; row < step.rows; row++)
      if (slots[row] % kKvTile == kKvTile - 1) full_.push_back(slots[row] / kKvTile);
    return static_cast<int>(full_.size()) * plan.kv(layer_.group).heads();
  }

  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    const KvCache& cache = plan.kv(layer_.group);
    for (int i = begin; i < end; i++) {
      const int block = full_[i / cache.heads()], head = i % cache.heads();
      find_key_bounds(cache.record(layer_.layer, head, block), cache.shape(),
                      cache.bounds(layer_.layer, head, block));
    }
  }

 private:
  const KvLayer layer_;
  std::vector<int> full_;
};

// Working memory of a thread.
struct Scratch {
  std::vector<float> query, parts, scores, best, factors;
  std::vector<double> first_factors;
  std::vector<const uint16_t*> bounds;
  std::vector<uint8_t> block;
  std::vector<uint16_t> own_bounds;
  std::vector<uint64_t> order;
};
thread_local Scratch scratch;

// Numbers whose order is that of the scores, and of equal scores the reverse of the indices.
uint64_t rank_of(float score, int index) {
  const auto bits = __builtin_bit_cast(uint32_t, score + 0.0f);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (UINT32_MAX - static_cast<uint32_t>(index));
}

class ChooseBlocks : public Op {
 public:
  ChooseBlocks(const AttentionArgs& args, AttentionWork& work, int heads)
      : Op("choose_blocks"), a_(args), work_(work), heads_(heads), key_bias_(a_.key_bias, heads) {}

  int items(const Plan& plan, const Step& step) override {
    work_.prepare(plan, step);
    key_bias_.reserve(work_.context);
    return static_cast<int>(work_.choosing.size()) * heads_;
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    for (int i = begin; i < end; i++) {
      const ChoosingRow& row = work_.choosing[i / heads_];
      score(plan, step, row, i % heads_, scratch);
      choose(row, work_.chosen(plan, i / heads_, i % heads_), scratch);
    }
  }

 private:
  // The highest scores that the keys of each candidate can have, [query heads][candidates].
  void score(const Plan& plan, const Step& step, const ChoosingRow& row, int head,
             Scratch& s) const {
    const KvRecord& shape = plan.kv(work_.group).shape();
    const int n = row.candidates(), columns = shape.key_columns(), share = work_.share;
    const size_t stride = size_t{2} * columns;
    s.scores.resize(static_cast<size_t>(share) * n);
    s.parts.assign(share * stride, 0.0f);
    const float* q = plan.buffer(a_.q).row(row.row) + head * share * shape.key_dim;
    for (int g = 0; g < share; g++) {
      s.query.assign(q + g * shape.key_dim, q + (g + 1) * shape.key_dim);
      if (is_quantised(shape.type))  // turned as the keys are
        plan.kernels().rotate_head(s.query.data(), shape.key_dim, shape.key_turn());
      float* parts = s.parts.data() + g * stride;
      for (int d = 0; d < shape.key_dim; d++) {
        parts[d] = std::max(s.query[d], 0.0f);
        parts[columns + d] = std::min(s.query[d], 0.0f);
      }
    }
    find_bounds(plan, step, row, head, s);
    plan.kernels().bound_products(s.parts.data(), stride, share, 2 * columns / 16, s.bounds.data(),
                                  n, s.scores.data());
    for (int g = 0; g < share; g++) {
      float* scores = s.scores.data() + static_cast<size_t>(g) * n;
      if (const int waves = key_bias_.num_waves(head))
        add_waves(plan, row, head, waves, q + g * shape.key_dim, scores, s);
      plan.kernels().scale(scores, a_.scale, scores, n);
      if (a_.softcap > 0) plan.kernels().soft_cap(scores, a_.softcap, scores, n);
      if (a_.slopes.empty()) continue;
      const float slope = a_.slopes[head * share + g];
      for (int i = 0; i < n; i++)  // of the last key of the block
        scores[i] += slope * static_cast<float>((row.first_block + i + 2) * kKvTile - 1 -
                                                step.positions[row.row]);
    }
  }

  // The bounds of each candidate; those that a draft tree crosses are computed for the row.
  void find_bounds(const Plan& plan, const Step& step, const ChoosingRow& row, int head,
                   Scratch& s) const {
    const KvCache& cache = plan.kv(work_.group);
    const KvRows& kv = step.kv[work_.group];
    const int n = row.candidates();
    const size_t size = cache.shape().bound_bytes() / sizeof(uint16_t);
    s.bounds.resize(n);
    s.block.resize(cache.shape().bytes());
    s.own_bounds.clear();
    int own = n;  // the first candidate with bounds of the row's own
    if (step.ancestors) {
      const int shared = step.context_len[row.seq] + step.scheduled_len[row.seq];
      own = std::clamp(shared / kKvTile - row.first_block - 1, 0, n);
      s.own_bounds.resize((n - own) * size);
    }
    for (int i = 0; i < n; i++) {
      const int t = row.first_block + 1 + i,
                block = kv.block_table[static_cast<size_t>(row.seq) * kv.max_blocks + t];
      s.bounds[i] = cache.bounds(a_.layer, head, block);
      if (i < own) continue;
      uint16_t* bounds = s.own_bounds.data() + (i - own) * size;
      find_key_bounds(block_on_path(plan, step, {work_.group, a_.layer}, head, row.seq, row.row, t,
                                    s.block.data()),
                      cache.shape(), bounds);
      s.bounds[i] = bounds;
    }
  }

  // What a large key bias can add.
  void add_waves(const Plan& plan, const ChoosingRow& row, int head, int num_waves, const float* q,
                 float* scores, Scratch& s) const {
    s.first_factors.resize(num_waves), s.factors.resize(num_waves);
    key_bias_.first_factors(head, q, s.first_factors.data());
    for (int i = 0, count; i < row.candidates(); i += count) {
      const int t = row.first_block + 1 + i, within = t % kSplitBlocks;
      count = std::min(kSplitBlocks - within, row.candidates() - i);
      key_bias_.turn(head, t / kSplitBlocks, s.first_factors.data(), s.factors.data());
      plan.kernels().add_highest_waves(key_bias_.waves(head) + within * kKvTile, s.factors.data(),
                                       num_waves, count, scores + i);
    }
  }

  // The best blocks by the highest score of any query head, relative to the head's best. Blocks
  // with a number that is not finite come first, since a row must not look past it.
  void choose(const ChoosingRow& row, int* chosen, Scratch& s) const {
    const int n = row.candidates();
    s.best.assign(n, -kInfinity);
    for (int g = 0; g < work_.share; g++) {
      const float* scores = s.scores.data() + static_cast<size_t>(g) * n;
      float top = -kInfinity;
      for (int i = 0; i < n; i++) top = std::max(top, scores[i]);
      for (int i = 0; i < n; i++) {
        const float below = scores[i] - top;
        s.best[i] = std::isnan(below) ? kInfinity : std::max(s.best[i], below);
      }
    }
    s.order.resize(n);
    for (int i = 0; i < n; i++) s.order[i] = rank_of(s.best[i], i);
    std::nth_element(s.order.begin(), s.order.begin() + work_.top_blocks, s.order.end(),
                     std::greater<>());
    for (int i = 0; i < work_.top_blocks; i++)
      chosen[i] =
          row.first_block + 1 + static_cast<int>(UINT32_MAX - static_cast<uint32_t>(s.order[i]));
    std::sort(chosen, chosen + work_.top_blocks);
  }

  const AttentionArgs a_;
  AttentionWork& work_;
  const int heads_;
  KeyBias key_bias_;
};

}  // namespace

std::unique_ptr<Op> make_key_bounds(KvLayer layer) { return std::make_unique<KeyBounds>(layer); }

std::unique_ptr<Op> make_choose_blocks(const AttentionArgs& args, AttentionWork& work, int heads) {
  return std::make_unique<ChooseBlocks>(args, work, heads);
}

}  // namespace headrace
