// What there is to attend to in a step: items of work for the threads, the same for
// every layer of a group.
#pragma once
#include <algorithm>
#include <vector>

#include "plan.h"

namespace headrace {

// Some rows of a sequence, one KV head, and parts of what they see: [first_part,
// last_part) of the splits with tokens that they see as sinks, and then of the splits
// that their windows reach.
struct AttentionItem {
  int seq, head, first_row, last_row, first_part, last_part;
  int sink_parts;    // parts with sinks, of all that there are
  int window_split;  // of the first part behind them
  int context;       // tokens up to the deepest row
  int partial;  // >= 0: the first of this item's entries among the partial results, to be merged
                // once all splits are there
  int choice = -1;  // >= 0: the number of its only row among those that choose blocks; its parts
                    // are then those of the sinks and of the chosen blocks

  int rows() const { return last_row - first_row; }
  bool is_sinks(int part) const { return part < sink_parts; }
  int split(int part) const { return is_sinks(part) ? part : window_split + part - sink_parts; }
  // Pairs of a row and a token, about; a part with sinks counts as a whole split.
  int64_t cost() const {
    if (choice >= 0) return int64_t{kSplitTokens} * (last_part - first_part);
    const int before = window_split - sink_parts;
    return static_cast<int64_t>(rows()) * (std::min((before + last_part) * kSplitTokens, context) -
                                           (before + first_part) * kSplitTokens);
  }
};

// Softmax of some query vectors over a part of their context: maximum, sum of weights,
// weighted values.
struct SoftmaxStates {
  std::vector<float> max, sum, out;

  void resize(size_t n, int width) {
    max.resize(n), sum.resize(n);
    out.resize(n * width);
  }
};

// A row that attends to a choice of blocks: its first visible block, `top_blocks` of those
// between, and the last two.
struct ChoosingRow {
  int seq, row, first_block, last_block;

  int candidates() const { return last_block - first_block - 2; }
};

// The record of block t of a row's context. If the row's own path through a draft tree crosses it,
// puts it together in `copy`.
const uint8_t* block_on_path(const Plan& plan, const Step& step, KvLayer layer, int head, int seq,
                             int row, int t, uint8_t* copy);

class AttentionWork {
 public:
  // `share`: query heads of a KV head; `shape`: what is computed with.
  AttentionWork(int group, int share, const KvGroup& seen, const KvRecord& shape, int top_blocks)
      : group(group),
        share(share),
        sink_tokens(seen.sink_tokens),
        top_blocks(top_blocks),
        shape(shape),
        window_(seen.window) {}

  // Plans the running step, unless that is done already.
  void prepare(const Plan& plan, const Step& step);

  // Visible tokens for a row at `position`: from here to `position`, and the sinks
  // before it.
  int first_visible(int position) const {
    return window_ && position - window_ >= sink_tokens ? position - window_ + 1 : 0;
  }

  // The blocks that a choosing row attends to, ascending, are cut in parts of kSplitBlocks. Here:
  // number i of them.
  int chosen_block(const ChoosingRow& row, const int* chosen, int i) const {
    return i == 0            ? row.first_block
           : i <= top_blocks ? chosen[i - 1]
                             : row.last_block - top_blocks - 2 + i;
  }
  int num_chosen() const { return top_blocks + 3; }
  // The blocks that a row chose for a KV head, ascending.
  int* chosen(const Plan& plan, int choice, int head) {
    return chosen_.data() +
           (static_cast<size_t>(choice) * plan.kv(group).heads() + head) * top_blocks;
  }

  const int group, share, sink_tokens, top_blocks;  // 0 top blocks: all are attended to
  const KvRecord shape;
  int context = 0;  // tokens up to the deepest row of all
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> merges;  // items that were cut into splits
  SoftmaxStates partial;              // their results
  std::vector<ChoosingRow> choosing;

 private:
  void add(const AttentionItem& item, bool cut);
  void deal(int threads);
  bool chooses(int position) const;
  AttentionItem choosing_item(int seq, int row, int position);

  std::vector<int> chosen_;
  const int window_;
  int64_t step_ = -1;
};

}  // namespace headrace
