#include "gpu_work.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>

namespace headrace {
namespace {

constexpr int kNoTree = INT32_MAX;

constexpr int blocks(int n, int size) { return (n + size - 1) / size; }

}  // namespace

GpuWorkSize GpuWork::build(const GpuWorkBatch& batch, const GpuWorkArrays& out) {
  segments_.clear();
  num_paths_ = 0;
  find_indices(batch);
  const int seqs = static_cast<int>(batch.context.size());
  for (int seq = 0; seq < seqs; seq++)
    if (!has_tree_[seq]) add_chain(batch, seq);
  for (int seq = 0; seq < seqs; seq++)
    if (has_tree_[seq]) add_tree(batch, seq, out.paths);
  divide(out.items.size());
  const int partials = fill_rows(out.rows);
  if (partials > static_cast<int>(out.items.size()))
    throw std::invalid_argument("a step has " + std::to_string(partials) +
                                " partial results of attention, and there is room for " +
                                std::to_string(out.items.size()));
  const int items = fill_items(out.items);
  return {items, static_cast<int>(num_paths_), partials};
}

// Each row's own index among the keys that it sees, and which sequences have a tree:
// the draft rows of a chain see all rows before them.
void GpuWork::find_indices(const GpuWorkBatch& batch) {
  index_.resize(static_cast<size_t>(batch.row_start.back()));
  has_tree_.assign(batch.context.size(), false);
  for (size_t seq = 0; seq < batch.context.size(); seq++)
    for (int row = batch.row_start[seq]; row < batch.row_start[seq + 1]; row++) {
      index_[row] = batch.context[seq] + row - batch.row_start[seq];
      if (batch.ancestors.empty()) continue;
      int depth = 0;
      for (const uint64_t word : batch.ancestors.subspan(row * batch.words, batch.words))
        depth += std::popcount(word);
      if (!depth) continue;
      const int index = batch.context[seq] + batch.scheduled[seq] - 1 + depth;
      if (index != index_[row]) has_tree_[seq] = true;
      index_[row] = index;
    }
}

int GpuWork::first_split(int index) const {
  return shape.window && !shape.sink_tokens ? std::max(0, index - shape.window + 1) / shape.split
                                            : 0;
}

void GpuWork::add(const GpuWorkItem& item, int behind) {
  int splits = item.stop - item.begin;
  if (shape.sink_tokens) {
    const auto [sinks, window] = sinks_of(item);
    splits = std::max(std::min(sinks, item.stop) - item.begin, 0) +
             std::max(item.stop - std::max(item.begin, window), 0);
  }
  segments_.push_back({item, behind, splits, 1});
}

GpuWork::Sinks GpuWork::sinks_of(const GpuWorkItem& item) const {
  const int window = std::max(item.low - (shape.window - 1), 0) / shape.split;
  return {std::min(blocks(shape.sink_tokens, shape.split), window), window};
}

void GpuWork::add_chain(const GpuWorkBatch& batch, int seq) {
  const int end = batch.row_start[seq + 1], table = batch.table_offset + seq * batch.table_stride;
  for (int row = batch.row_start[seq]; row < end; row += shape.rows_per_tile) {
    const int num = std::min(shape.rows_per_tile, end - row), low = index_[row],
              stop = (low + num - 1) / shape.split + 1;
    add({row, num, table, low, low + num, first_split(low), stop, 0, kNoTree, 0}, -1);
  }
}

// Of each tile the splits before the tree, which are read once for all of its rows,
// then those behind: of its known rows, and row by row.
void GpuWork::add_tree(const GpuWorkBatch& batch, int seq, std::span<int32_t> paths) {
  const int start = batch.row_start[seq], end = batch.row_start[seq + 1],
            first_draft = start + batch.scheduled[seq];
  const int base = batch.context[seq] + batch.scheduled[seq],
            table = batch.table_offset + seq * batch.table_stride;
  for (int first = start; first < end; first += shape.rows_per_tile) {
    const int last = std::min(first + shape.rows_per_tile, end),
              known = std::min(last, first_draft);
    const int shared = known < last ? base / shape.split : 0;
    const int lowest = *std::min_element(index_.begin() + first, index_.begin() + last);
    int behind = -1;
    if (first_split(lowest) < shared) {
      behind = static_cast<int>(segments_.size());
      add({first, last - first, table, lowest, shared * shape.split, first_split(lowest), shared, 0,
           kNoTree, 0},
          -1);
    }
    if (first < known) {
      const int low = index_[first], top = index_[known - 1],
                begin = std::max(shared, first_split(low));
      if (begin <= top / shape.split)
        add({first, known - first, table, low, top + 1, begin, top / shape.split + 1, 0, kNoTree,
             0},
            behind);
    }
    add_drafts(batch, std::max(first, known), last, shared, behind, base, table, paths);
  }
}

void GpuWork::add_drafts(const GpuWorkBatch& batch, int row, int last, int shared, int behind,
                         int base, int table, std::span<int32_t> paths) {
  for (; row < last; row++) {
    const auto path = static_cast<int>(num_paths_);
    for (size_t word = 0; word < batch.words; word++)
      for (uint64_t bits = batch.ancestors[row * batch.words + word]; bits; bits &= bits - 1) {
        if (num_paths_ == paths.size())
          throw std::invalid_argument("the draft rows of a step have more than " +
                                      std::to_string(paths.size()) + " ancestors");
        paths[num_paths_++] = static_cast<int32_t>(64 * word) + std::countr_zero(bits);
      }
    const int index = index_[row], begin = std::max(shared, first_split(index));
    add({row, 1, table, index, index + 1, begin, index / shape.split + 1, 0, base,
         batch.path_offset + path},
        behind);
  }
}

// Decides how many items each segment has: one for each split where one alone would
// take a program longer than all take all work. Where there is no room for so many
// partial results, those that need the most stay whole.
void GpuWork::divide(size_t capacity) {
  int64_t splits = 0, over = -static_cast<int64_t>(capacity);
  for (const Segment& segment : segments_) splits += segment.splits;
  const int64_t limit = std::max<int64_t>(1, splits * shape.units_per_item / shape.programs);
  for (Segment& segment : segments_) {
    if (segment.splits > limit || segment.behind >= 0) segment.items = segment.splits;
    over += static_cast<int64_t>(segment.items) * segment.whole.num_rows;
  }
  if (over > 0) {
    const auto spare = [&](int i) {
      const Segment& segment = segments_[i];
      return segment.behind < 0 ? static_cast<int64_t>(segment.items - 1) * segment.whole.num_rows
                                : 0;
    };
    order_.resize(segments_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return spare(a) > spare(b); });
    for (const int i : order_) {
      if (over <= 0) break;
      over -= spare(i);
      if (segments_[i].behind < 0) segments_[i].items = 1;
    }
  }
  for (Segment& segment : segments_)
    if (segment.behind >= 0) segment.whole.ordinal = segments_[segment.behind].items;
}

int GpuWork::fill_rows(std::span<GpuWorkRow> out) {
  partials_.assign(index_.size(), 0);
  for (const Segment& segment : segments_)
    for (int i = 0; i < segment.whole.num_rows; i++)
      partials_[segment.whole.first_row + i] += segment.items;
  int first = 0;
  for (size_t row = 0; row < out.size(); row++) {
    if (row >= index_.size()) {
      out[row] = {0, 0, 0};
      continue;
    }
    out[row] = {first, partials_[row], index_[row]};
    first += partials_[row];
  }
  return first;
}

int GpuWork::fill_items(std::span<GpuWorkItem> out) {
  const auto length = [&](int i) { return segments_[i].items > 1 ? 1 : segments_[i].splits; };
  order_.resize(segments_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return length(a) > length(b); });
  size_t used = 0;
  for (const int i : order_) {
    const auto& [whole, behind, splits, items] = segments_[i];
    if (items == 1) {
      out[used++] = whole;
      continue;
    }
    const auto [sinks, window] = shape.sink_tokens ? sinks_of(whole) : Sinks{whole.stop, 0};
    const int before = std::max(sinks - whole.begin, 0);
    for (int number = 0; number < items; number++) {
      GpuWorkItem item = whole;
      item.begin =
          number < before ? whole.begin + number : std::max(whole.begin, window) + number - before;
      item.stop = item.begin + 1;
      item.ordinal += number;
      out[used++] = item;
    }
  }
  return static_cast<int>(used);
}

}  // namespace headrace
