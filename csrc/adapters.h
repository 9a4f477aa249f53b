// Low-rank adapters (LoRA, Hu et al. 2021): to the product of a row with a weight they
// add scale * up (down x), with two narrow matrices. Each sequence of a step may have
// an adapter of its own; weights that it has no matrices for are left alone.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels.h"

namespace headrace {

struct Buffer;
struct Step;
class Plan;

// The two matrices for one weight, in bf16. `down` has tiles of 16 ranks, each with 16
// numbers for each column of the weight; `up` tiles of 16 rows of the weight, each with
// 16 numbers for each rank. What fills a tile is zero.
class LowRank {
 public:
  // down[rank][cols], up[rows][rank]
  LowRank(const float* down, const float* up, float scale, int rank, int rows, int cols);

  int rank_tiles() const { return (rank + 15) / 16; }
  const uint16_t* down_tile(int t) const {
    return down_.data() + static_cast<size_t>(t) * 16 * columns_;
  }
  const uint16_t* up_tile(int t) const { return up_.data() + static_cast<size_t>(t) * 16 * rank; }
  size_t bytes() const { return 2 * (down_.size() + up_.size()); }

  const int rank;
  const float scale;

 private:
  const size_t columns_;  // an even number: kernels take two at a time
  std::vector<uint16_t> down_, up_;
};

class Adapters {
 public:
  // Returns its number; that of an adapter that was removed comes again.
  int add();
  void put(int adapter, int weight, LowRank matrices);
  void remove(int adapter);
  bool has(int adapter) const {
    return adapter >= 0 && adapter < static_cast<int>(adapters_.size()) && adapters_[adapter];
  }
  size_t bytes(int adapter) const;

  // Notes which adapter each row of the step has.
  void begin(const Step& step);
  // Lists the work of the first half, down x, for all rows of `x` that have an adapter
  // for some of these weights, at most three; returns the number of items. The next
  // linear op is that of these weights.
  int prepare(std::span<const int> weights, const Buffer& x, const Step& step);
  void run_down(const Plan& plan, const Buffer& x, int begin, int end);
  // Adds the second half to tile `t` of a product with `weight`, out[rows][16], of the
  // rows from `first` on.
  void add_up(const Kernels& kernels, int weight, int t, int first, int rows, float* out) const {
    if (!work_.empty()) add_rows(kernels, weight, t, first, rows, out);
  }

 private:
  using Matrices = std::map<int, LowRank>;  // by weight
  // What a row is given beside a product; null: nothing.
  struct Delta {
    const LowRank* matrices;
    size_t at;  // where its down x is
  };
  struct Work {
    const LowRank* matrices;
    int row, tile;
    size_t at;
  };

  void add_rows(const Kernels& kernels, int weight, int t, int first, int rows, float* out) const;

  std::vector<std::unique_ptr<Matrices>> adapters_;  // null: removed
  bool any_ = false;         // whether a sequence of the step has an adapter
  std::vector<int> of_row_;  // -1: none
  std::vector<std::pair<int, std::vector<Delta>>>
      deltas_;  // of the weights of the next linear op, by row
  std::vector<Work> work_;
  std::vector<float> products_;
};

}  // namespace headrace
