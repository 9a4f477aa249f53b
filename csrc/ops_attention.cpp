// Paged attention. The context of a row is cut into splits of 256 tokens counted from position 0; each split is a softmax of its own,
// and the splits are merged in ascending order. Where the splits of a row are computed, by one thread or by several, does not
// change a bit.
#include <algorithm>
#include <bit>
#include <cstring>

#include "attention_work.h"

namespace headrace {
namespace {

// Working memory of a thread, the same for all layers.
struct Scratch {
  std::vector<uint8_t> queries, blocks, expanded;
  std::vector<float> query;
  SoftmaxStates split, total;
  std::vector<int> first, last;
};
thread_local Scratch scratch;

class Attention : public Op {
 public:
  Attention(int out, int q, int layer, float scale, AttentionWork& work)
      : Op("attention"), out_(out), q_(q), layer_(layer), scale_(scale), work_(work) {}

  int items(const Plan& plan, const Step& step) override {
    work_.prepare(plan, step);
    return static_cast<int>(work_.items.size());
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    SplitRecords records = locate(plan, step, work_.items[begin], work_.items[begin].first_split);
    for (int i = begin; i < end; i++) run_item(plan, step, work_.items[i], i + 1 < end ? &work_.items[i + 1] : nullptr, records, scratch);
  }

  // The second region of a step whose contexts were split over threads: merges the partial results.
  int merge_items() const { return static_cast<int>(work_.merges.size()); }
  void merge(const Plan& plan, int i) const {
    const AttentionItem& item = work_.merges[i];
    const int queries = num_queries(item), splits = item.last_split - item.first_split;
    SoftmaxStates& total = work_.partial;  // the first split's, where no other thread writes
    for (int s = 1; s < splits; s++) merge_states(plan, total, item.partial, work_.partial, item.partial + s * queries, queries);
    finish(plan, item, total, item.partial);
  }

 private:
  const KvCache& cache(const Plan& plan) const { return plan.kv(work_.group); }
  int num_queries(const AttentionItem& item) const { return item.rows() * work_.share; }
  static size_t query_stride(const KvRecord& shape) { return (static_cast<size_t>(shape.head_dim) + 16) * 4; }

  SplitRecords locate(const Plan& plan, const Step& step, const AttentionItem& item, int split) const {
    SplitRecords records;
    const KvRows& kv = step.kv[work_.group];
    const int first = split * kSplitBlocks;
    for (; records.blocks < kSplitBlocks && (first + records.blocks) * kKvTile < item.context; records.blocks++)
      records.at[records.blocks] =
          cache(plan).record(layer_, item.head, kv.block_table[static_cast<size_t>(item.seq) * kv.max_blocks + first + records.blocks]);
    return records;
  }

  // `records` are those of the first split; when it is done, those of the next item.
  void run_item(const Plan& plan, const Step& step, const AttentionItem& item, const AttentionItem* next_item, SplitRecords& records,
                Scratch& s) const {
    const KvRecord& shape = cache(plan).shape();
    const int queries = num_queries(item), width = shape.padded_dim();
    s.blocks.resize(std::max(s.blocks.size(), kSplitBlocks * shape.bytes()));
    s.first.resize(queries), s.last.resize(queries);
    s.total.resize(queries, width), s.split.resize(queries, width);
    pack_queries(plan, item, queries, s);
    for (int split = item.first_split; split < item.last_split; split++) {
      SoftmaxStates& states = split == item.first_split ? s.total : s.split;
      const SplitRecords next = split + 1 < item.last_split ? locate(plan, step, item, split + 1)
                                : next_item                 ? locate(plan, step, *next_item, next_item->first_split)
                                                            : records;
      attend_split(plan, step, item, split, records, next, states, s);
      if (split > item.first_split) merge_states(plan, s.total, 0, s.split, 0, queries);
      records = next;
    }
    if (item.partial < 0) return finish(plan, item, s.total, 0);
    std::copy(s.total.max.begin(), s.total.max.end(), work_.partial.max.begin() + item.partial);
    std::copy(s.total.sum.begin(), s.total.sum.end(), work_.partial.sum.begin() + item.partial);
    std::copy(s.total.out.begin(), s.total.out.end(), work_.partial.out.begin() + static_cast<size_t>(item.partial) * width);
  }

  void pack_queries(const Plan& plan, const AttentionItem& item, int queries, Scratch& s) const {
    const KvRecord& shape = cache(plan).shape();
    const int group = work_.share;
    s.queries.resize(std::max(s.queries.size(), queries * query_stride(shape)));
    s.query.resize(shape.head_dim);
    for (int n = 0; n < queries; n++) {
      const float* q = plan.buffer(q_).row(item.first_row + n / group) + (item.head * group + n % group) * shape.head_dim;
      if (is_quantised(shape.type)) {  // turned as the keys are
        std::copy(q, q + shape.head_dim, s.query.begin());
        plan.kernels().rotate_head(s.query.data(), shape.head_dim);
        q = s.query.data();
      }
      plan.kernels().pack_query[static_cast<int>(shape.computed().type)](q, shape.head_dim, s.queries.data() + n * query_stride(shape));
    }
  }

  void merge_states(const Plan& plan, SoftmaxStates& to, int first, const SoftmaxStates& from, int first_from, int queries) const {
    const int width = cache(plan).shape().padded_dim();
    for (int n = 0; n < queries; n++) {
      const size_t a = first + n, b = first_from + n;
      plan.kernels().merge(&to.max[a], &to.sum[a], &to.out[a * width], from.max[b], from.sum[b], &from.out[b * width], width);
    }
  }

  // One split of the context against all rows of the item. Below the draft rows of a tree every row sees the same slots; from there
  // on each row has a path of its own, gathered in position order so that every lane holds what it would hold in plain decoding.
  void attend_split(const Plan& plan, const Step& step, const AttentionItem& item, int split, const SplitRecords& records,
                    const SplitRecords& next, SoftmaxStates& states, Scratch& s) const {
    const int b = item.seq, shared = step.context_len[b] + step.scheduled_len[b], group = work_.share;
    for (int row = item.first_row, n = 0; row < item.last_row; row++)
      for (int g = 0; g < group; g++, n++) {
        s.first[n] = work_.first_visible(step.positions[row]) - split * kSplitTokens;
        s.last[n] = step.positions[row] + 1 - split * kSplitTokens;
      }
    SplitRecords shared_records = records;
    expand(plan, records, next, shared_records, s);
    int row = item.last_row;
    if (step.ancestors && split * kSplitTokens + records.blocks * kKvTile > shared)
      row = std::clamp(step.row_start[b] + step.scheduled_len[b], item.first_row, item.last_row);
    attend(plan, shared_records, &next, 0, (row - item.first_row) * group, states, s);
    for (; row < item.last_row; row++) {
      SplitRecords gathered = records;
      for (int i = 0; i < records.blocks; i++)
        gathered.at[i] = gather(plan, step, item, row, split * kSplitBlocks + i, records.at[i], &s.blocks[i * cache(plan).shape().bytes()]);
      expand(plan, gathered, gathered, gathered, s);
      attend(plan, gathered, nullptr, (row - item.first_row) * group, (row + 1 - item.first_row) * group, states, s);
    }
  }

  // Quantised records in the form that attention computes with; those of `next` are fetched meanwhile.
  void expand(const Plan& plan, const SplitRecords& records, const SplitRecords& next, SplitRecords& expanded, Scratch& s) const {
    const KvRecord& shape = cache(plan).shape();
    if (!is_quantised(shape.type)) return;
    const size_t bytes = shape.computed().bytes();
    s.expanded.resize(std::max(s.expanded.size(), kSplitBlocks * bytes));
    for (int i = 0; i < records.blocks; i++) {
      uint8_t* to = s.expanded.data() + i * bytes;
      plan.kernels().expand_kv(records.at[i], shape, next.at[std::min(i, next.blocks - 1)], to);
      expanded.at[i] = to;
    }
  }

  // Block t of a draft row's context, put together in `copy` if the row's own path crosses it.
  const uint8_t* gather(const Plan& plan, const Step& step, const AttentionItem& item, int row, int t, const uint8_t* record,
                        uint8_t* copy) const {
    const KvRecord& shape = cache(plan).shape();
    const int b = item.seq, shared = step.context_len[b] + step.scheduled_len[b];
    if ((t + 1) * kKvTile <= shared) return record;
    std::memcpy(copy, record, shape.bytes());
    int position = shared;
    for (int word = 0; word < step.ancestor_words; word++)
      for (uint64_t bits = step.ancestors[static_cast<size_t>(row) * step.ancestor_words + word]; bits; bits &= bits - 1, position++) {
        if (position / kKvTile != t) continue;
        const int slot = step.kv[work_.group].slots[step.row_start[b] + step.scheduled_len[b] + 64 * word + std::countr_zero(bits)];
        copy_token(copy, position % kKvTile, cache(plan).record(layer_, item.head, slot / kKvTile), slot % kKvTile, shape);
      }
    return copy;
  }

  // Query vectors [begin, end) of the item. `next` is fetched ahead by the first of them, for which nothing is in the caches.
  void attend(const Plan& plan, const SplitRecords& records, const SplitRecords* next, int begin, int end, SoftmaxStates& states,
              Scratch& s) const {
    const KvRecord shape = cache(plan).shape().computed();
    const Blocks chunks(end - begin, plan.kernels().max_queries);
    if (is_quantised(cache(plan).shape().type)) next = nullptr;  // fetched already
    for (int c = 0; c < chunks.count; c++) {
      const int n = begin + chunks.first(c);
      plan.kernels().attend[static_cast<int>(shape.type)](
          {records, c ? nullptr : next, shape, scale_, chunks.rows(c), s.queries.data() + n * query_stride(shape), query_stride(shape),
           &s.first[n], &s.last[n], &states.max[n], &states.sum[n], &states.out[static_cast<size_t>(n) * shape.padded_dim()]});
    }
  }

  void finish(const Plan& plan, const AttentionItem& item, SoftmaxStates& states, int first) const {
    const KvRecord& shape = cache(plan).shape();
    const Buffer& out = plan.buffer(out_);
    const int group = work_.share;
    const int width = shape.padded_dim(), column = item.head * group * shape.head_dim;
    float* values = &states.out[static_cast<size_t>(first) * width];
    for (int n = 0; n < num_queries(item); n++) {
      float* to = out.packed ? values + n * width : out.row(item.first_row + n / group) + column + n % group * shape.head_dim;
      plan.kernels().scale(values + n * width, 1.0f / states.sum[first + n], to, shape.head_dim);
      if (is_quantised(shape.type)) plan.kernels().rotate_head(to, shape.head_dim);
    }
    // What is packed here has no padding between heads: head_dim is a multiple of the group.
    if (out.packed) plan.pack_columns(out, item.first_row, item.rows(), column, values, group * width, group * shape.head_dim);
  }

  const int out_, q_, layer_;
  const float scale_;
  AttentionWork& work_;
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

std::array<std::unique_ptr<Op>, 2> make_attention(int out, int q, int layer, float scale, AttentionWork& work) {
  auto attention = std::make_unique<Attention>(out, q, layer, scale, work);
  auto merge = std::make_unique<AttentionMerge>(attention.get());
  return {std::move(attention), std::move(merge)};
}

}  // namespace headrace
