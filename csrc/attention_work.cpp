#include "attention_work.h"

#include <algorithm>
#include <bit>
#include <cstring>

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
  choosing.clear();
  context = 0;
  partial.resize(0, 0);
  const int heads = plan.kv(group).heads(), rows_per_item = std::max(1, kItemQueries / share);
  std::vector<AttentionItem> whole;
  for (int b = 0; b < step.num_seqs; b++)
    for (int row = step.row_start[b], last; row < step.row_start[b + 1]; row = last) {
      const int limit = std::min(row + rows_per_item, step.row_start[b + 1]);
      last = row + 1;
      if (chooses(step.positions[row])) {
        const AttentionItem item = choosing_item(b, row, step.positions[row]);
        for (int h = 0; h < heads; h++) whole.push_back(item), whole.back().head = h;
        continue;
      }
      while (last < limit && !chooses(step.positions[last])) last++;
      const auto [low, high] = std::minmax_element(step.positions + row, step.positions + last);
      context = std::max(context, *high + 1);
      const int first = first_visible(*low) / kSplitTokens;
      const int sinks = first_visible(*high) ? (sink_tokens + kSplitTokens - 1) / kSplitTokens : 0;
      for (int h = 0; h < heads; h++)
        whole.push_back({b, h, row, last, 0, sinks + *high / kSplitTokens + 1 - first, sinks, first,
                         *high + 1, -1});
    }
  chosen_.resize(choosing.size() * heads * top_blocks);
  int64_t total = 0;
  for (const AttentionItem& item : whole) total += item.cost();
  for (const AttentionItem& item : whole)
    add(item, plan.threads() > 1 && item.cost() * plan.threads() * kItemsPerThread > total);
  if (items.size() > static_cast<size_t>(plan.threads())) deal(plan.threads());
}

// Depends on nothing but the position, so that a row has the same result in every step.
bool AttentionWork::chooses(int position) const {
  const int first = first_visible(position) / kKvTile;
  return top_blocks && position / kKvTile - first - 2 > top_blocks;
}

AttentionItem AttentionWork::choosing_item(int seq, int row, int position) {
  const int seen = first_visible(position),
            sinks = seen ? (sink_tokens + kSplitTokens - 1) / kSplitTokens : 0;
  context = std::max(context, position + 1);
  choosing.push_back({seq, row, seen / kKvTile, position / kKvTile});
  return {seq,
          0,
          row,
          row + 1,
          0,
          sinks + (num_chosen() + kSplitBlocks - 1) / kSplitBlocks,
          sinks,
          0,
          position + 1,
          -1,
          static_cast<int>(choosing.size()) - 1};
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

const uint8_t* block_on_path(const Plan& plan, const Step& step, KvLayer layer, int head, int seq,
                             int row, int t, uint8_t* copy) {
  const KvCache& cache = plan.kv(layer.group);
  const KvRows& kv = step.kv[layer.group];
  const uint8_t* record =
      cache.record(layer.layer, head, kv.block_table[static_cast<size_t>(seq) * kv.max_blocks + t]);
  const int shared = step.context_len[seq] + step.scheduled_len[seq];
  if (!step.ancestors || (t + 1) * kKvTile <= shared ||
      row < step.row_start[seq] + step.scheduled_len[seq])
    return record;
  std::memcpy(copy, record, cache.shape().bytes());
  int position = shared;
  for (int word = 0; word < step.ancestor_words; word++)
    for (uint64_t bits = step.ancestors[static_cast<size_t>(row) * step.ancestor_words + word];
         bits; bits &= bits - 1, position++) {
      if (position / kKvTile != t) continue;
      const int slot = kv.slots[step.row_start[seq] + step.scheduled_len[seq] + 64 * word +
                                std::countr_zero(bits)];
      copy_token(copy, position % kKvTile, cache.record(layer.layer, head, slot / kKvTile),
                 slot % kKvTile, cache.shape());
    }
  return copy;
}

}  // namespace headrace
