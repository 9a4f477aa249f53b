// KV that attention reads next, fetched into the caches while matrix products keep the
// multipliers busy. In a step of many sequences memory would wait for the one, then the
// multipliers for the other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace headrace {

class AttentionWork;
class Plan;
struct Program;
struct Step;

// An op of a program that reads the KV of a layer.
struct KvReader {
  int op;
  AttentionWork* work;
  int layer;
};

class KvAhead {
 public:
  explicit KvAhead(int threads) : cursors_(static_cast<size_t>(threads)) {}

  // Before a step. Called by one thread, as `aim`.
  void begin(const Plan& plan, const Step& step);
  // Before op `op`. The KV of a layer is fetched during the last products before its attention
  // that take long enough: weights would drive out what comes earlier.
  void aim(const Plan& plan, const Step& step, const Program& program, int op);
  // Where `thread` goes on reading; null: nowhere. The caller fetches so many lines from there.
  const uint8_t* next(const Plan& plan, const Step& step, int thread, int lines);

 private:
  // The items of a thread that are left, the blocks of the first that are done, and bytes in a row.
  struct alignas(64) Cursor {
    int item = 0, end = 0, block = 0;
    const uint8_t *at = nullptr, *until = nullptr;
  };
  void start(const Plan& plan, const Program& program);
  bool go_on(const Plan& plan, const Step& step, Cursor& cursor) const;

  int blocks_ = 0;  // of rows in the step; 0: nothing is fetched
  const KvReader* reader_ = nullptr;
  size_t number_ = 0;  // of the reader
  int first_op_ = 0;   // from which its KV is fetched; -1: not known yet
  bool fetches_ = false;
  std::vector<Cursor> cursors_;
};

}  // namespace headrace
