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

  int rows() const { return last_row - first_row; }
  bool is_sinks(int part) const { return part < sink_parts; }
  int split(int part) const { return is_sinks(part) ? part : window_split + part - sink_parts; }
  // Pairs of a row and a token, about; a part with sinks counts as a whole split.
  int64_t cost() const {
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

class AttentionWork {
 public:
  // `share`: query heads of a KV head; `shape`: what is computed with.
  AttentionWork(int group, int share, const KvGroup& seen, const KvRecord& shape)
      : group(group),
        share(share),
        sink_tokens(seen.sink_tokens),
        shape(shape),
        window_(seen.window) {}

  // Plans the running step, unless that is done already.
  void prepare(const Plan& plan, const Step& step);

  // Visible tokens for a row at `position`: from here to `position`, and the sinks
  // before it.
  int first_visible(int position) const {
    return window_ && position - window_ >= sink_tokens ? position - window_ + 1 : 0;
  }

  const int group, share, sink_tokens;
  const KvRecord shape;
  int context = 0;  // tokens up to the deepest row of all
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> merges;  // items that were cut into splits
  SoftmaxStates partial;              // their results

 private:
  void add(const AttentionItem& item, bool cut);
  void deal(int threads);

  const int window_;
  int64_t step_ = -1;
};

}  // namespace headrace
