#include "adapters.h"

#include <algorithm>
#include <bit>
#include <new>

#include "plan.h"

namespace headrace {
namespace {

// Rounded to nearest even; what is not a number stays none.
uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr int even(int n) { return (n + 1) / 2 * 2; }

}  // namespace

LowRank::LowRank(const float* down, const float* up, float scale, int rank, int rows, int cols)
    : rank(rank),
      scale(scale),
      columns_(even(cols)),
      down_(product({rank_tiles(), even(cols)}, 16)),
      up_(product({(rows + 15) / 16, rank}, 16)) {
  for (int r = 0; r < rank; r++)
    for (int k = 0; k < cols; k++)
      down_[static_cast<size_t>(r / 16) * 16 * columns_ + static_cast<size_t>(k) * 16 + r % 16] =
          to_bf16(down[static_cast<size_t>(r) * cols + k]);
  for (int i = 0; i < rows; i++)
    for (int r = 0; r < rank; r++)
      up_[static_cast<size_t>(i / 16) * 16 * rank + static_cast<size_t>(r) * 16 + i % 16] =
          to_bf16(up[static_cast<size_t>(i) * rank + r]);
}

int Adapters::add() {
  auto at = std::find(adapters_.begin(), adapters_.end(), nullptr);
  if (at == adapters_.end()) at = adapters_.insert(at, nullptr);
  *at = std::make_unique<Matrices>();
  return static_cast<int>(at - adapters_.begin());
}

void Adapters::put(int adapter, int weight, LowRank matrices) {
  adapters_[adapter]->emplace(weight, std::move(matrices));
}

void Adapters::remove(int adapter) { adapters_[adapter] = nullptr; }

size_t Adapters::bytes(int adapter) const {
  size_t bytes = 0;
  for (const auto& [weight, matrices] : *adapters_[adapter]) bytes += matrices.bytes();
  return bytes;
}

void Adapters::begin(const Step& step) {
  work_.clear(), deltas_.clear();
  any_ = step.adapters && std::any_of(step.adapters, step.adapters + step.num_seqs,
                                      [](int adapter) { return adapter >= 0; });
  if (!any_) return;
  of_row_.resize(static_cast<size_t>(step.rows));
  for (int b = 0; b < step.num_seqs; b++)
    std::fill(of_row_.begin() + step.row_start[b], of_row_.begin() + step.row_start[b + 1],
              step.adapters[b]);
}

int Adapters::prepare(std::span<const int> weights, const Buffer& x, const Step& step) {
  work_.clear(), deltas_.clear();
  if (!any_) return 0;
  const int* gathered =
      x.rows == RowKind::kStep
          ? nullptr
          : step.gathered_row + (x.rows == RowKind::kPooled ? step.logit_rows : 0);
  const int rows = Plan::rows_of(x, step);
  size_t at = 0;
  for (const int weight : weights) {
    std::vector<Delta>& deltas = deltas_.emplace_back(weight, rows).second;
    for (int row = 0; row < rows; row++) {
      const int adapter = of_row_[gathered ? gathered[row] : row];
      if (adapter < 0) continue;
      const Matrices& all = *adapters_[adapter];
      const auto found = all.find(weight);
      if (found == all.end()) continue;
      const LowRank& matrices = found->second;
      deltas[row] = {&matrices, at};
      for (int tile = 0; tile < matrices.rank_tiles(); tile++, at += 16)
        work_.push_back({&matrices, row, tile, at});
    }
  }
  products_.resize(std::max(at, products_.size()));
  if (work_.size() > INT_MAX) throw std::bad_alloc();
  return static_cast<int>(work_.size());
}

void Adapters::run_down(const Plan& plan, const Buffer& x, int begin, int end) {
  const Blocks& blocks = plan.blocks_of(x);
  for (int i = begin; i < end; i++) {
    const Work& work = work_[i];
    const int b = blocks.of_row(work.row), m = work.row - blocks.first(b);
    const auto* block = reinterpret_cast<const float*>(
        x.block(Form::kF32, blocks, b));  // pairs of columns, row after row
    plan.kernels().adapter_down(block + 2 * m, 2 * static_cast<size_t>(blocks.rows(b)),
                                even(x.width), work.matrices->down_tile(work.tile),
                                work.matrices->scale, products_.data() + work.at);
  }
}

void Adapters::add_rows(const Kernels& kernels, int weight, int t, int first, int rows,
                        float* out) const {
  for (const auto& [of, deltas] : deltas_) {
    if (of != weight) continue;
    for (int m = 0; m < rows; m++)
      if (const auto& [matrices, at] = deltas[first + m]; matrices)
        kernels.adapter_up(products_.data() + at, matrices->rank, matrices->up_tile(t),
                           out + 16 * m);
    return;
  }
}

}  // namespace headrace
