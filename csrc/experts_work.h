// The rows of a step by expert: items of work for the threads, and the memory of what
// is between the regions of an op over experts.
#pragma once
#include <span>
#include <vector>

#include "plan.h"

namespace headrace {

// A row on its way to one of its experts, which is number `place` of all choices of the
// step: row * top_k + k.
struct RoutedRow {
  int row, place;
};

// Adjacent routed rows, up to max_rows, that go to one expert.
struct ExpertBlock {
  int expert, first, rows;
};

// Adjacent blocks of one expert. A thread that computes a tile for them reads its
// weights once.
struct ExpertRun {
  int first_block, last_block;
};

class ExpertsWork {
 public:
  // Adds its buffers to the plan.
  ExpertsWork(Plan& plan, const ExpertsShape& shape);

  // Lists the rows of the step that go to `count` experts from `first` on, by expert,
  // and among these in their own order: `routing` has top_k expert numbers a row. A
  // number that is no expert's counts as the first. Adds the rows of each of all
  // experts to `loads`.
  void prepare(const Buffer& routing, int rows, int max_rows, std::span<int64_t> loads, int first,
               int count);

  // Items of a region that computes so many tiles of each expert: all tiles of a run,
  // then those of the next.
  int items(int tiles) const;

  // Calls f(block, tile) for all of the items.
  template <class F>
  void each(int tiles, int begin, int end, F&& f) const {
    for (int item = begin; item < end; item++) {
      const ExpertRun& run = runs[item / tiles];
      for (int b = run.first_block; b < run.last_block; b++) f(blocks[b], item % tiles);
    }
  }

  const int top_k;
  std::vector<RoutedRow> routed;
  std::vector<ExpertBlock> blocks;
  std::vector<ExpertRun> runs;
  // Buffers with a row for each routed row: what goes into the experts and what comes
  // of gate and up, packed; that as floats too, for weights that want a whole row
  // packed at once; and what comes of the experts, by place.
  const int packed, hidden, loose_hidden, result;

 private:
  void cut(int max_rows);

  std::vector<int> start_;  // of the routed rows of each expert, and the end
};

}  // namespace headrace
