#include "kv_ahead.h"

#include <algorithm>

#include "attention_work.h"

namespace headrace {
namespace {

constexpr int kLeastSequences = 16;  // with fewer, products wait for their weights themselves
constexpr int64_t kMostBytes = int64_t{12} << 20;  // of a layer, for a shared cache

const KvCache& cache_of(const Plan& plan, const KvReader& reader) {
  return plan.kv(reader.work->group);
}

// The blocks that an item reads, without those of sinks before a window, and those that a row has
// yet to choose.
int first_block(const AttentionItem& item) {
  return item.split(std::clamp(item.sink_parts, item.first_part, item.last_part - 1)) *
         kSplitBlocks;
}
int end_block(const AttentionItem& item) {
  if (item.choice >= 0) return first_block(item);
  return std::min((item.split(item.last_part - 1) + 1) * kSplitBlocks,
                  (item.context + kKvTile - 1) / kKvTile);
}

// Bytes of the KV that the items of a step read.
int64_t bytes_of(const Plan& plan, const KvReader& reader) {
  int64_t blocks = 0;
  for (const AttentionItem& item : reader.work->items)
    blocks += end_block(item) - first_block(item);
  return blocks * static_cast<int64_t>(cache_of(plan, reader).shape().bytes());
}

}  // namespace

void KvAhead::begin(const Plan& plan, const Step& step) {
  const Blocks blocks(step.rows, plan.kernels().max_rows);
  const bool pays =
      step.num_seqs >= kLeastSequences && blocks.rows(blocks.count - 1) >= kRowsToReadAheadFor;
  blocks_ = pays ? blocks.count : 0;
  number_ = 0, first_op_ = -1;
  fetches_ = false;
}

void KvAhead::aim(const Plan& plan, const Step& step, const Program& program, int op) {
  if (!blocks_) return;
  const std::vector<KvReader>& readers = program.kv_readers;
  while (number_ < readers.size() && readers[number_].op <= op) number_++, first_op_ = -1;
  if (number_ < readers.size() && first_op_ < 0) {
    reader_ = &readers[number_];
    reader_->work->prepare(plan, step);
    start(plan, program);
  }
  fetches_ = number_ < readers.size() && op >= first_op_;
}

void KvAhead::start(const Plan& plan, const Program& program) {
  int64_t bytes = std::min(bytes_of(plan, *reader_), kMostBytes);
  for (first_op_ = reader_->op; first_op_ > 0 && bytes > 0;)
    bytes -=
        program.ops[static_cast<size_t>(--first_op_)]->groups(plan) * blocks_ * 64 * kLinesAhead;
  const int64_t items = static_cast<int64_t>(reader_->work->items.size()),
                n = static_cast<int64_t>(cursors_.size());
  for (int64_t t = 0; t < n; t++) {
    Cursor& c = cursors_[static_cast<size_t>(t)];
    c = {};
    c.item = static_cast<int>(items * t / n), c.end = static_cast<int>(items * (t + 1) / n);
  }
}

const uint8_t* KvAhead::next(const Plan& plan, const Step& step, int thread, int lines) {
  Cursor& c = cursors_[static_cast<size_t>(thread)];
  if (!fetches_ || (c.at >= c.until && !go_on(plan, step, c))) return nullptr;
  const uint8_t* at = c.at;
  c.at += static_cast<size_t>(lines) * 64;
  return at;
}

// Moves on to the next block, which may follow the last one in memory.
bool KvAhead::go_on(const Plan& plan, const Step& step, Cursor& c) const {
  const AttentionWork& work = *reader_->work;
  const KvRows& kv = step.kv[static_cast<size_t>(work.group)];
  for (; c.item < c.end; c.item++, c.block = 0) {
    const AttentionItem& item = work.items[static_cast<size_t>(c.item)];
    for (int b; (b = first_block(item) + c.block) < end_block(item);) {
      const int32_t* table = kv.block_table + static_cast<size_t>(item.seq) * kv.max_blocks;
      const uint8_t* record = cache_of(plan, *reader_).record(reader_->layer, item.head, table[b]);
      if (record != c.until) c.at = record;
      c.until = record + cache_of(plan, *reader_).shape().bytes();
      c.block++;
      if (c.at < c.until) return true;
    }
  }
  return false;
}

}  // namespace headrace
