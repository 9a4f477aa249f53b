#include "experts_work.h"

#include <algorithm>
#include <new>

namespace headrace {
namespace {

constexpr int64_t kMostItems = 1 << 30;

// A run has at least so many blocks where its expert has more than that: with fewer,
// fetching the weights again for each run would cost more than is saved by finding the
// rows in a cache.
constexpr int kLeastBlocks = 8;

int checked(int64_t items) {
  if (items > kMostItems) throw std::bad_alloc();
  return static_cast<int>(items);
}

int expert_of(float number, size_t experts) {
  return number >= 0 && number < static_cast<float>(experts) ? static_cast<int>(number) : 0;
}

}  // namespace

ExpertsWork::ExpertsWork(Plan& plan, const ExpertsShape& shape)
    : top_k(shape.top_k),
      packed(plan.add_buffer(shape.width, shape.rows, true, top_k)),
      hidden(plan.add_buffer(shape.hidden, shape.rows, true, top_k)),
      loose_hidden(plan.add_buffer(shape.hidden, shape.rows, false, top_k)),
      result(plan.add_buffer(shape.out, shape.rows, false, top_k)) {}

void ExpertsWork::prepare(const Buffer& routing, int rows, int max_rows, std::span<int64_t> loads,
                          int first, int count) {
  checked(static_cast<int64_t>(rows) * top_k);
  start_.assign(static_cast<size_t>(count) + 1, 0);
  for (int row = 0; row < rows; row++)
    for (int k = 0; k < top_k; k++) {
      const int e = expert_of(routing.row(row)[k], loads.size());
      loads[e]++;
      if (e >= first && e - first < count) start_[e - first + 1]++;
    }
  for (int e = 0; e < count; e++) start_[e + 1] += start_[e];
  routed.resize(static_cast<size_t>(start_[count]));
  for (int row = 0, place = 0; row < rows;
       row++)  // moves the start of each expert to the start of the next
    for (int k = 0; k < top_k; k++, place++)
      if (const int e = expert_of(routing.row(row)[k], loads.size()) - first; e >= 0 && e < count)
        routed[start_[e]++] = {row, place};
  cut(max_rows);
}

void ExpertsWork::cut(int max_rows) {
  blocks.clear(), runs.clear();
  for (int e = 0, first = 0; e + 1 < static_cast<int>(start_.size()); first = start_[e++]) {
    const Blocks cut(start_[e] - first, max_rows);
    for (int b = 0; b < cut.count; b++) {
      if (b % kLeastBlocks == 0 && (b == 0 || b + kLeastBlocks <= cut.count)) {
        const int at = static_cast<int>(blocks.size());
        runs.push_back({at, at});
      }
      blocks.push_back({e, first + cut.first(b), cut.rows(b)});
      runs.back().last_block++;
    }
  }
}

int ExpertsWork::items(int tiles) const {
  return checked(static_cast<int64_t>(runs.size()) * tiles);
}

}  // namespace headrace
