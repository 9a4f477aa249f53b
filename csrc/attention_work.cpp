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
      const int first = first_visible(*low) / kSplitTokens;
      const int sinks = first_visible(*high) ? (sink_tokens + kSplitTokens - 1) / kSplitTokens : 0;
      for (int h = 0; h < heads; h++) add({b, h, row, last, 0, sinks + *high / kSplitTokens + 1 - first, sinks, first, *high + 1, -1}, cut);
    }
  // Long ones first, so that the threads end together.
  const auto cost = [&](const AttentionItem& i) {
    const int before = i.window_split - i.sink_parts;  // so that a part with sinks counts as a whole split
    return static_cast<int64_t>(i.rows()) *
           (std::min((before + i.last_part) * kSplitTokens, i.context) - (before + i.first_part) * kSplitTokens);
  };
  if (items.size() > static_cast<size_t>(plan.threads()))
    std::stable_sort(items.begin(), items.end(), [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
}

void AttentionWork::add(const AttentionItem& item, bool cut) {
  if (!cut || item.last_part - item.first_part == 1) return items.push_back(item);
  const int queries = item.rows() * share;
  AttentionItem part = item;
  part.partial = static_cast<int>(partial.sum.size());
  merges.push_back(part);
  for (int i = item.first_part; i < item.last_part; i++, part.partial += queries) {
    part.first_part = i, part.last_part = i + 1;
    items.push_back(part);
  }
  partial.resize(part.partial, shape.value_columns());
}

}  // namespace headrace
