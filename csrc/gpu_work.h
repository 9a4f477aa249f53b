// The work of attention on a GPU in one step: which rows see which splits of their
// context. `attention_work.py` says what it is.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

// What decides which work there is, besides the batch; `sink_tokens` only beside a
// window.
struct GpuWorkShape {
  int rows_per_tile, units_per_item, programs, split, window, sink_tokens;
};

// As the kernel reads it, and as attention_work.py has its fields.
struct GpuWorkItem {
  int32_t first_row, num_rows, table, low, end, begin, stop, ordinal, base, path;
};

struct GpuWorkRow {
  int32_t first_partial, num_partials, index;
};

// What the work is made of; sequence b has the rows row_start[b] to row_start[b + 1] -
// 1.
struct GpuWorkBatch {
  std::span<const int32_t> row_start, context, scheduled;
  std::span<const uint64_t> ancestors;  // [rows, words], empty where all drafts are chains
  size_t words;
  int table_offset, table_stride;  // of the block tables
  int path_offset;                 // of what `paths` is a part of
};

struct GpuWorkArrays {
  std::span<GpuWorkItem> items;  // as many as there is room for partial results of a row
  std::span<GpuWorkRow> rows;    // those of padding behind those of the batch
  std::span<int32_t> paths;
};

struct GpuWorkSize {
  int items, paths, partials;
};

class GpuWork {
 public:
  explicit GpuWork(const GpuWorkShape& shape) : shape(shape) {}

  // Writes the items, the longest first, and the records of the rows. Throws
  // std::invalid_argument where the arrays are too small.
  GpuWorkSize build(const GpuWorkBatch& batch, const GpuWorkArrays& out);

  const GpuWorkShape shape;

 private:
  // A tile of rows with all splits that it sees; one that comes behind another, in
  // which the same rows see earlier splits, names that.
  struct Segment {
    GpuWorkItem whole;
    int behind, splits, items;
  };
  struct Sinks {
    int stop, window;  // the split behind the last of the sinks, and the one that the window begins
                       // in, which is not before that
  };

  void find_indices(const GpuWorkBatch& batch);
  void add_chain(const GpuWorkBatch& batch, int seq);
  void add_tree(const GpuWorkBatch& batch, int seq, std::span<int32_t> paths);
  void add_drafts(const GpuWorkBatch& batch, int row, int last, int shared, int behind, int base,
                  int table, std::span<int32_t> paths);
  void add(const GpuWorkItem& item, int behind);
  void divide(size_t capacity);
  int fill_rows(std::span<GpuWorkRow> out);
  int fill_items(std::span<GpuWorkItem> out);
  int first_split(int index) const;
  Sinks sinks_of(const GpuWorkItem& item) const;

  // Kept from step to step for their memory.
  std::vector<int> index_, partials_, order_;
  std::vector<bool> has_tree_;
  std::vector<Segment> segments_;
  size_t num_paths_ = 0;
};

}  // namespace headrace
