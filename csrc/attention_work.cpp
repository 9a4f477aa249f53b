#include "attention_work.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr int kItemQueries =
    48;  // query vectors (rows x heads of a group) that walk over the context together
constexpr int kItemsPerThread = 4;  // an item that is more than its share of so many is cut

}  // namespace

void AttentionWork::prepare(const Plan& plan, const Step& step) {
  if (step_ == plan.step_number()) return;
  step_ = plan.step_number();
  items.clear();
  merges.clear();
  context = 0;
  partial.resize(0, 0);
  const int heads = plan.kv(group).heads(), rows_per_item = std::max(1, kItemQueries / share);
  std::vector<AttentionItem> whole;
  for (int b = 0; b < step.num_seqs; b++)
    for (int row = step.row_start[b]; row < step.row_start[b + 1]; row += rows_per_item) {
      const int last = std::min(row + rows_per_item, step.row_start[b + 1]);
      const auto [low, high] = std::minmax_element(step.positions + row, step.positions + last);
      context = std::max(context, *high + 1);
      const int first = first_visible(*low) / kSplitTokens;
      const int sinks = first_visible(*high) ? (sink_tokens + kSplitTokens - 1) / kSplitTokens : 0;
      for (int h = 0; h < heads; h++)
        whole.push_back({b, h, row, last, 0, sinks + *high / kSplitTokens + 1 - first, sinks, first,
                         *high + 1, -1});
    }
  int64_t total = 0;
  for (const AttentionItem& item : whole) total += item.cost();
  for (const AttentionItem& item : whole)
    add(item, plan.threads() > 1 && item.cost() * plan.threads() * kItemsPerThread > total);
  if (items.size() > static_cast<size_t>(plan.threads())) deal(plan.threads());
}

// Every thread has long items first and short ones at the end, so that all end
// together.
void AttentionWork::deal(int threads) {
  std::stable_sort(items.begin(), items.end(), [](const AttentionItem& a, const AttentionItem& b) {
    return a.cost() > b.cost();
  });
  std::vector<AttentionItem> dealt;
  dealt.reserve(items.size());
  const size_t n = static_cast<size_t>(threads);
  for (size_t t = 0; t < n; t++)
    for (size_t i = t; i < items.size(); i += n) dealt.push_back(items[i]);
  items = std::move(dealt);
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
