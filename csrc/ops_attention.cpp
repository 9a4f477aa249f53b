// Paged attention. The context of a row is cut into splits of 256 tokens counted from
// position 0; each split is a softmax of its own, and the splits are merged in
// ascending order. Where the splits of a row are computed, by one thread or by several,
// does not change a bit. Sinks, the first tokens of all, which a row sees besides its
// window, are splits of their own that come first.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "attention_work.h"
#include "key_bias.h"

namespace headrace {
namespace {

// Working memory of a thread, the same for all layers.
struct Scratch {
  std::vector<uint8_t> queries, blocks;
  Arena values;  // made of keys; read in steps of a value, which may be as long as a page
  std::vector<float> query, slopes, factors;  // factors: of the queries for a split (`KeyBias`)
  std::vector<double> first_factors;
  SoftmaxStates split, total, block;
  std::vector<int> first, last, own;
};
thread_local Scratch scratch;

class Attention : public Op {
 public:
  Attention(AttentionArgs args, AttentionWork& work, int heads)
      : Op("attention"), a_(std::move(args)), work_(work), key_bias_(a_.key_bias, heads) {}

  int items(const Plan& plan, const Step& step) override {
    work_.prepare(plan, step);
    key_bias_.reserve(work_.context);
    return static_cast<int>(work_.items.size());
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    SplitRecords records = locate(plan, step, work_.items[begin], work_.items[begin].first_part);
    // The next item is this thread's too, but for the last of its range, also where
    // items are dealt one by one.
    const auto next = [this](int i) {
      return i + 1 < static_cast<int>(work_.items.size()) ? &work_.items[i + 1] : nullptr;
    };
    for (int i = begin; i < end; i++)
      run_item(plan, step, work_.items[i], next(i), records, scratch);
  }

  // The second region of a step whose contexts were split over threads: merges the
  // partial results.
  int merge_items() const { return static_cast<int>(work_.merges.size()); }
  void merge(const Plan& plan, int i) const {
    const AttentionItem& item = work_.merges[i];
    const int queries = num_queries(item), splits = item.last_part - item.first_part;
    SoftmaxStates& total = work_.partial;  // the first split's, where no other thread writes
    for (int s = 1; s < splits; s++)
      merge_states(plan, total, item.partial, work_.partial, item.partial + s * queries, queries);
    finish(plan, item, total, item.partial);
  }

 private:
  const KvCache& cache(const Plan& plan) const { return plan.kv(work_.group); }
  int num_queries(const AttentionItem& item) const { return item.rows() * work_.share; }
  size_t query_stride() const {
    return std::max(kQueryDistance, (static_cast<size_t>(work_.shape.key_dim) + 16) * 4);
  }
  int width() const { return work_.shape.value_columns(); }

  SplitRecords locate(const Plan& plan, const Step& step, const AttentionItem& item,
                      int part) const {
    SplitRecords records;
    if (item.choice >= 0 && !item.is_sinks(part)) return locate_chosen(plan, step, item, part);
    const KvRows& kv = step.kv[work_.group];
    const int first = item.split(part) * kSplitBlocks,
              end = item.is_sinks(part) ? work_.sink_tokens : item.context;
    for (; records.blocks < kSplitBlocks && (first + records.blocks) * kKvTile < end;
         records.blocks++)
      put(plan, records, records.blocks,
          cache(plan).record(a_.layer, item.head,
                             kv.block_table[static_cast<size_t>(item.seq) * kv.max_blocks + first +
                                            records.blocks]));
    return records;
  }

  // Which of the blocks of a choosing row a part begins with.
  static int first_chosen(const AttentionItem& item, int part) {
    return (part - item.sink_parts) * kSplitBlocks;
  }
  int chosen_block(const Plan& plan, const AttentionItem& item, int i) const {
    return work_.chosen_block(work_.choosing[item.choice],
                              work_.chosen(plan, item.choice, item.head), i);
  }

  SplitRecords locate_chosen(const Plan& plan, const Step& step, const AttentionItem& item,
                             int part) const {
    SplitRecords records;
    const KvRows& kv = step.kv[work_.group];
    const int32_t* table = kv.block_table + static_cast<size_t>(item.seq) * kv.max_blocks;
    const int first = first_chosen(item, part);
    for (; records.blocks < kSplitBlocks && first + records.blocks < work_.num_chosen();
         records.blocks++)
      put(plan, records, records.blocks,
          cache(plan).record(a_.layer, item.head,
                             table[chosen_block(plan, item, first + records.blocks)]));
    return records;
  }

  void put(const Plan& plan, SplitRecords& records, int i, const uint8_t* record) const {
    records.at[i] = record;
    records.values[i] = record + cache(plan).shape().value_offset();
  }

  // `records` are those of the first part; when it is done, those of the next item.
  void run_item(const Plan& plan, const Step& step, const AttentionItem& item,
                const AttentionItem* next_item, SplitRecords& records, Scratch& s) const {
    const int queries = num_queries(item);
    s.blocks.resize(std::max(s.blocks.size(), kSplitBlocks * cache(plan).shape().bytes()));
    s.first.resize(queries), s.last.resize(queries), s.own.resize(queries);
    s.total.resize(queries, width()), s.split.resize(queries, width());
    pack_queries(plan, item, queries, s);
    for (int part = item.first_part; part < item.last_part; part++) {
      SoftmaxStates& states = part == item.first_part ? s.total : s.split;
      const SplitRecords next = part + 1 < item.last_part ? locate(plan, step, item, part + 1)
                                : next_item ? locate(plan, step, *next_item, next_item->first_part)
                                            : records;
      attend_split(plan, step, item, part, records, next, states, s);
      if (part > item.first_part) merge_states(plan, s.total, 0, s.split, 0, queries);
      records = next;
    }
    if (item.partial < 0) return finish(plan, item, s.total, 0);
    std::copy(s.total.max.begin(), s.total.max.end(), work_.partial.max.begin() + item.partial);
    std::copy(s.total.sum.begin(), s.total.sum.end(), work_.partial.sum.begin() + item.partial);
    std::copy(s.total.out.begin(), s.total.out.end(),
              work_.partial.out.begin() + static_cast<size_t>(item.partial) * width());
  }

  void pack_queries(const Plan& plan, const AttentionItem& item, int queries, Scratch& s) const {
    const KvRecord& shape = cache(plan).shape();
    const int group = work_.share;
    s.queries.resize(std::max(s.queries.size(), queries * query_stride()));
    s.query.resize(shape.key_dim);
    s.slopes.resize(queries);
    const int num_waves = key_bias_.num_waves(item.head);
    s.factors.resize(queries * num_waves), s.first_factors.resize(queries * num_waves);
    for (int n = 0; n < queries; n++) {
      const int head = item.head * group + n % group;
      if (!a_.slopes.empty()) s.slopes[n] = a_.slopes[head];
      const float* q = plan.buffer(a_.q).row(item.first_row + n / group) + head * shape.key_dim;
      key_bias_.first_factors(item.head, q, s.first_factors.data() + n * num_waves);
      if (is_quantised(shape.type)) {  // turned as the keys are
        std::copy(q, q + shape.key_dim, s.query.begin());
        plan.kernels().rotate_head(s.query.data(), shape.key_dim, shape.key_turn());
        q = s.query.data();
      }
      plan.kernels().pack_query[static_cast<int>(shape.type)](
          q, shape.key_dim, s.queries.data() + n * query_stride());
    }
  }

  void merge_states(const Plan& plan, SoftmaxStates& to, int first, const SoftmaxStates& from,
                    int first_from, int queries) const {
    for (int n = 0; n < queries; n++) {
      const size_t a = first + n, b = first_from + n;
      plan.kernels().merge(&to.max[a], &to.sum[a], &to.out[a * width()], from.max[b], from.sum[b],
                           &from.out[b * width()], width());
    }
  }

  // One split of the context against all rows of the item. Below the draft rows of a
  // tree every row sees the same slots; from there on each row has a path of its own,
  // gathered in position order so that every lane holds what it would hold in plain
  // decoding.
  void attend_split(const Plan& plan, const Step& step, const AttentionItem& item, int part,
                    const SplitRecords& records, const SplitRecords& next, SoftmaxStates& states,
                    Scratch& s) const {
    if (item.choice >= 0 && !item.is_sinks(part))
      return attend_chosen(plan, step, item, part, records, next, states, s);
    const int b = item.seq, shared = step.context_len[b] + step.scheduled_len[b],
              group = work_.share, split = item.split(part);
    for (int row = item.first_row, n = 0; row < item.last_row; row++) {
      const int position = step.positions[row], seen = work_.first_visible(position);
      const int first = item.is_sinks(part) ? 0 : seen, last = !item.is_sinks(part) ? position + 1
                                                               : seen ? work_.sink_tokens
                                                                      : 0;
      for (int g = 0; g < group; g++, n++) {
        s.first[n] = first - split * kSplitTokens;
        s.last[n] = last - split * kSplitTokens;
        s.own[n] = position - split * kSplitTokens;
      }
    }
    const int num_waves = key_bias_.num_waves(item.head);
    for (int n = 0; num_waves && n < num_queries(item); n++)
      key_bias_.turn(item.head, split, s.first_factors.data() + n * num_waves,
                     s.factors.data() + n * num_waves);
    SplitRecords shared_records = records;
    make_values(plan, shared_records, s);
    int row = item.last_row;
    if (step.ancestors && split * kSplitTokens + records.blocks * kKvTile > shared)
      row = std::clamp(step.row_start[b] + step.scheduled_len[b], item.first_row, item.last_row);
    attend(plan, item.head, shared_records, &next, 0, (row - item.first_row) * group, states, s);
    for (; row < item.last_row; row++) {
      SplitRecords gathered = records;
      for (int i = 0; i < records.blocks; i++)
        put(plan, gathered, i,
            block_on_path(plan, step, {work_.group, a_.layer}, item.head, item.seq, row,
                          split * kSplitBlocks + i, &s.blocks[i * cache(plan).shape().bytes()]));
      make_values(plan, gathered, s);
      attend(plan, item.head, gathered, nullptr, (row - item.first_row) * group,
             (row + 1 - item.first_row) * group, states, s);
    }
  }

  // A part of the blocks of a choosing row. They are no neighbours, so scores that depend on
  // positions are those of a block at a time.
  void attend_chosen(const Plan& plan, const Step& step, const AttentionItem& item, int part,
                     const SplitRecords& records, const SplitRecords& next, SoftmaxStates& states,
                     Scratch& s) const {
    SplitRecords path = records;
    const int first = first_chosen(item, part), position = step.positions[item.first_row];
    if (step.ancestors)
      for (int i = 0; i < path.blocks; i++)
        put(plan, path, i,
            block_on_path(plan, step, {work_.group, a_.layer}, item.head, item.seq, item.first_row,
                          chosen_block(plan, item, first + i),
                          &s.blocks[i * cache(plan).shape().bytes()]));
    make_values(plan, path, s);
    const int num_waves = key_bias_.num_waves(item.head), queries = num_queries(item);
    if (a_.slopes.empty() && !num_waves) {
      see_chosen(plan, item, first, path.blocks, position, s);
      return attend(plan, item.head, path, &next, 0, queries, states, s);
    }
    s.block.resize(queries, width());
    for (int i = 0; i < path.blocks; i++) {
      const int block = chosen_block(plan, item, first + i);
      SplitRecords one;
      one.blocks = 1, one.at[0] = path.at[i], one.values[0] = path.values[i];
      see_chosen(plan, item, first + i, 1, position, s);
      for (int n = 0; n < queries; n++) {
        s.own[n] = position - block * kKvTile;
        if (num_waves)
          key_bias_.turn(item.head, block / kSplitBlocks, s.first_factors.data() + n * num_waves,
                         s.factors.data() + n * num_waves);
      }
      attend(plan, item.head, one, nullptr, 0, queries, i ? s.block : states, s,
             block % kSplitBlocks * kKvTile);
      if (i) merge_states(plan, states, 0, s.block, 0, queries);
    }
  }

  // The visible tokens of chosen blocks [first, first + count), counted from the first of them.
  void see_chosen(const Plan& plan, const AttentionItem& item, int first, int count, int position,
                  Scratch& s) const {
    const int begin =
        first ? 0 : work_.first_visible(position) - chosen_block(plan, item, 0) * kKvTile;
    const bool is_end = first + count == work_.num_chosen();
    const int end = (count - is_end) * kKvTile + (is_end ? position % kKvTile + 1 : 0);
    std::fill(s.first.begin(), s.first.end(), begin);
    std::fill(s.last.begin(), s.last.end(), end);
  }

  // Values that are part of keys, laid out as values.
  void make_values(const Plan& plan, SplitRecords& records, Scratch& s) const {
    if (cache(plan).shape().value_dim) return;
    const size_t bytes = work_.shape.value_bytes();
    if (s.values.size() < kSplitBlocks * bytes) s.values = Arena(kSplitBlocks * bytes);
    for (int i = 0; i < records.blocks; i++) {
      uint8_t* values = s.values.data() + i * bytes;
      plan.kernels().values_of_keys(records.at[i], work_.shape, values);
      records.values[i] = values;
    }
  }

  // Query vectors [begin, end) of the item. `next` is fetched ahead by the first of
  // them, for which nothing is in the caches. The records begin with a token of a split.
  void attend(const Plan& plan, int head, const SplitRecords& records, const SplitRecords* next,
              int begin, int end, SoftmaxStates& states, Scratch& s, int token = 0) const {
    const int num_waves = key_bias_.num_waves(head);
    const KvRecord& shape = work_.shape;
    const Blocks chunks(end - begin, plan.kernels().max_queries);
    for (int c = 0; c < chunks.count; c++) {
      const int n = begin + chunks.first(c);
      plan.kernels().attend[static_cast<int>(shape.type)](
          {records, c ? nullptr : next, shape, a_.scale, a_.softcap,
           a_.slopes.empty() ? nullptr : &s.slopes[n], chunks.rows(c),
           s.queries.data() + n * query_stride(), query_stride(), &s.first[n], &s.last[n],
           &s.own[n], &states.max[n], &states.sum[n], &states.out[static_cast<size_t>(n) * width()],
           num_waves, key_bias_.waves(head) + token, s.factors.data() + n * num_waves});
    }
  }

  // What the weights are divided by: their sum, and the weight of the head's sink.
  float total_weight(const Plan& plan, int head, float max, float sum) const {
    if (a_.sinks < 0) return sum;
    return static_cast<float>(sum +
                              std::exp2(plan.vector(a_.sinks)[head] * std::numbers::log2e - max));
  }

  void finish(const Plan& plan, const AttentionItem& item, SoftmaxStates& states, int first) const {
    const KvRecord& shape = cache(plan).shape();
    const Buffer& out = plan.buffer(a_.out);
    const int group = work_.share, column = item.head * group * a_.value_dim;
    float* values = &states.out[static_cast<size_t>(first) * width()];
    for (int n = 0; n < num_queries(item); n++) {
      float* y = values + n * width();
      const float total = total_weight(plan, item.head * group + n % group, states.max[first + n],
                                       states.sum[first + n]);
      plan.kernels().scale(y, 1.0f / total, y, work_.shape.value_dim);
      if (is_quantised(shape.type))
        plan.kernels().rotate_head(y, work_.shape.value_dim, shape.value_turn());
      if (!out.packed)
        std::copy_n(y, a_.value_dim,
                    out.row(item.first_row + n / group) + column + n % group * a_.value_dim);
    }
    if (!out.packed) return;
    const int heads = width() == a_.value_dim ? group : 1;  // without padding between them
    for (int g = 0; g < group; g += heads)
      plan.pack_columns(out, item.first_row, item.rows(), column + g * a_.value_dim,
                        values + g * width(), group * width(), heads * a_.value_dim);
  }

  const AttentionArgs a_;
  AttentionWork& work_;
  KeyBias key_bias_;
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

std::vector<std::unique_ptr<Op>> make_attention(AttentionArgs args, AttentionWork& work,
                                                int heads) {
  std::vector<std::unique_ptr<Op>> ops;
  if (work.top_blocks) ops.push_back(make_choose_blocks(args, work, heads));
  auto attention = std::make_unique<Attention>(std::move(args), work, heads);
  auto merge = std::make_unique<AttentionMerge>(attention.get());
  ops.push_back(std::move(attention));
  ops.push_back(std::move(merge));
  return ops;
}

}  // namespace headrace
