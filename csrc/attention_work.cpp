#include "attention_work.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr int kItemQueries = 48;  // query vectors (rows x heads of a group) that walk over the context together

}  // namespace

void AttentionWork::prepare(const Plan& plan, const Step& step) {
  if (step_ == plan.step_number()) return;
  step_ = plan.step_number();
  items.clear();
  merges.clear();
  const int heads = plan.kv(group).heads(), rows_per_item = std::max(1, kItemQueries / share);
  int64_t whole = 0;
  for (int b = 0; b < step.num_seqs; b++)
    whole += static_cast<int64_t>(step.row_start[b + 1] - step.row_start[b] + rows_per_item - 1) / rows_per_item * heads;
  const bool cut = plan.threads() > 1 && whole < 4 * plan.threads();
  partial.resize(0, 0);
  for (int b = 0; b < step.num_seqs; b++)
    for (int row = step.row_start[b]; row < step.row_start[b + 1]; row += rows_per_item) {
      const int last = std::min(row + rows_per_item, step.row_start[b + 1]);
      const auto [low, high] = std::minmax_element(step.positions + row, step.positions + last);
      for (int h = 0; h < heads; h++)
        add({b, h, row, last, first_visible(*low) / kSplitTokens, *high / kSplitTokens + 1, *high + 1, -1}, cut);
    }
  // Long ones first, so that the threads end together.
  const auto cost = [&](const AttentionItem& i) {
    return static_cast<int64_t>(i.rows()) * (std::min(i.last_split * kSplitTokens, i.context) - i.first_split * kSplitTokens);
  };
  if (items.size() > static_cast<size_t>(plan.threads()))
    std::stable_sort(items.begin(), items.end(), [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
}

void AttentionWork::add(const AttentionItem& item, bool cut) {
  if (!cut || item.last_split - item.first_split == 1) return items.push_back(item);
  const int queries = item.rows() * share;
  AttentionItem part = item;
  part.partial = static_cast<int>(partial.sum.size());
  merges.push_back(part);
  for (int s = item.first_split; s < item.last_split; s++, part.partial += queries) {
    part.first_split = s, part.last_split = s + 1;
    items.push_back(part);
  }
  partial.resize(part.partial, shape.value_columns());
}

}  // namespace headrace
