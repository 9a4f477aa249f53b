// Linear ops that read the part of a matrix that activations other than 0 need. Which part is that
// of all rows of a step; a step that needs too much of it, or has many rows, reads the whole
// matrix. A result has the same bits either way.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "copies.h"
#include "tiles.h"

namespace headrace {
namespace {

// Share of a matrix up to which reading the part takes less time than reading the whole, as
// measured (benchmarks/activation_sparsity.py).
double most_columns(int rows) { return rows == 1 ? 0.65 : rows == 2 ? 0.4 : 0.3; }
double most_rows(int rows) { return rows == 1 ? 0.4 : 0.3; }
// Rows of a step that are worth a look.
constexpr int kMostStepRows = kMaxBlockRows;

const CopyKernels& kernels_of(const Plan& plan) { return copy_kernels(plan.kernels().name); }

// What both kinds of op do for the whole matrix: all tiles, block by block.
template <class F>
void each_tile(const Plan& plan, const Blocks& blocks, int begin, int end, F&& f) {
  (void)plan;
  for (int t = begin; t < end; t++)
    for (int b = 0; b < blocks.count; b++) f(t, b);
}

// x @ w.T + bias + residual, by the columns of w that x needs.
class SparseLinear : public Op {
 public:
  SparseLinear(int out, int x, int weight, int bias, int residual)
      : Op(residual >= 0 ? "linear_add" : "linear"),
        out_(out),
        x_(x),
        weight_(weight),
        bias_(bias),
        residual_(residual) {}

  int items(const Plan& plan, const Step&) override {
    const Weight& w = plan.weight(weight_);
    const Buffer& x = plan.buffer(x_);
    const Blocks& blocks = plan.blocks_of(x);
    copy_ = plan.copies().columns(weight_);
    if (blocks.count != 1 || blocks.rows(0) > kMostStepRows) copy_ = nullptr;
    if (copy_ && !find_columns(x.block(plan.form(w, false), blocks, 0), blocks.rows(0), w))
      copy_ = nullptr;
    return copy_ ? copy_->panels(w.tiles()) : blocks.count ? w.tiles() : 0;
  }

  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    const Weight& w = plan.weight(weight_);
    const Buffer& x = plan.buffer(x_);
    const Blocks& blocks = plan.blocks_of(x);
    const Form form = plan.form(w, false);
    alignas(64) float tile[kMaxBlockRows * kTileRows];
    if (!copy_) {
      each_tile(plan, blocks, begin, end, [&](int t, int b) {
        multiply(plan, w, t, false, x.block(form, blocks, b), blocks.rows(b), plan.vector(bias_),
                 tile);
        finish(plan, t, blocks.first(b), blocks.rows(b), tile);
      });
      return;
    }
    thread_local std::vector<float> sums;
    const int rows = blocks.rows(0), chunk = chunk_tiles(unit_of(w.format).bits);
    if (const size_t needed = static_cast<size_t>(copy_->panel_tiles) * rows * kTileRows + 16;
        sums.size() < needed)
      sums.resize(needed);
    float* out =
        reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(sums.data()) + 63) / 64 * 64);
    const UnionOfColumns columns{first_.data(), columns_.data(), codes_.data()};
    for (int panel = begin; panel < end; panel++) {
      const int first = panel * copy_->panel_tiles,
                tiles = std::min(copy_->panel_tiles, w.tiles() - first);
      const ColumnWork work{copy_->data + panel * copy_->stride,
                            copy_->panel_tiles,
                            (tiles + chunk - 1) / chunk * chunk,
                            w.shape,
                            static_cast<int>(first_.size()) - 1,
                            rows,
                            x.block(form, blocks, 0),
                            columns,
                            out};
      kernels_of(plan).columns[static_cast<int>(w.format)](work);
      for (int t = 0; t < tiles; t++) {
        float* y = out + static_cast<size_t>(t) * rows * kTileRows;
        if (const float* bias = plan.vector(bias_))
          for (int m = 0; m < rows; m++)
            plan.kernels().add(y + 16 * m, bias + 16 * (first + t), y + 16 * m, 16);
        finish(plan, first + t, 0, rows, y);
      }
    }
  }

 private:
  void finish(const Plan& plan, int t, int row, int rows, float* tile) const {
    const Buffer& out = plan.buffer(out_);
    plan.adapters().add_up(plan.kernels(), weight_, t, row, rows, tile);
    const float* residual = residual_ >= 0 ? plan.buffer(residual_).row(row) + 16 * t : nullptr;
    plan.kernels().finish_tile(tile, rows, std::min(16, plan.weight(weight_).rows - 16 * t),
                               residual, out.width, out.row(row) + 16 * t, out.width);
  }

  // The columns whose int8 activation is not 0 in all rows. Returns false if they are too many.
  bool find_columns(const uint8_t* block, int rows, const Weight& w) {
    const int groups = w.shape.units * unit_of(w.format).groups();
    first_.assign(1, 0);
    columns_.clear();
    codes_.resize(static_cast<size_t>(groups) * rows * kGroup);
    const int most = static_cast<int>(most_columns(rows) * w.cols);
    int found = 0;
    for (int g = 0; g < groups; g++, block += q8_group_bytes(false) * rows) {
      uint8_t any[kGroup] = {};
      for (int m = 0; m < rows; m++)
        for (int c = 0; c < kGroup; c++) any[c] |= block[kGroup * m + c];
      uint8_t places[kGroup + 3];
      int count = 0;
      for (int c = 0; c < kGroup; c++) {
        places[count] = static_cast<uint8_t>(c);
        count += any[c] != 0;
      }
      if ((found += count) > most) return false;
      auto* x = codes_.data() + static_cast<size_t>(g) * rows * kGroup;
      const int padded = (count + 3) / 4 * 4;
      for (int m = 0; m < rows; m++)
        for (int i = 0; i < padded; i++)
          x[kGroup * m + i] = i < count ? static_cast<int8_t>(block[kGroup * m + places[i]]) : 0;
      for (int i = count; i < padded; i++) places[i] = places[count - 1];
      columns_.insert(columns_.end(), places, places + padded);
      first_.push_back(first_.back() + padded / 4);
    }
    return true;
  }

  const int out_, x_, weight_, bias_, residual_;
  const ColumnCopy* copy_ = nullptr;  // of this step; null: the whole matrix
  std::vector<int32_t> first_;
  std::vector<uint8_t> columns_;
  std::vector<int8_t> codes_;
};

// gate * (x @ w.T + bias), by the rows of w whose gate is not 0.
class GatedRows : public Op {
 public:
  GatedRows(int out, int x, int gate, int weight, int bias)
      : Op("gated_rows"), out_(out), x_(x), gate_(gate), weight_(weight), bias_(bias) {}

  int items(const Plan& plan, const Step& step) override {
    const Weight& w = plan.weight(weight_);
    const Blocks& blocks = plan.blocks_of(plan.buffer(x_));
    copy_ = plan.copies().rows(weight_);
    if (blocks.count != 1 || blocks.rows(0) > kMostStepRows || step.adapters) copy_ = nullptr;
    if (copy_ && !find_rows(plan, blocks.rows(0))) copy_ = nullptr;
    if (!copy_) return blocks.count ? w.tiles() : 0;
    const Buffer& out = plan.buffer(out_);
    std::fill_n(out.row(0), static_cast<size_t>(blocks.rows(0)) * out.width, 0.0f);
    return (static_cast<int>(rows_.size()) + kTileRows - 1) / kTileRows;
  }

  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    const Weight& w = plan.weight(weight_);
    const Buffer &x = plan.buffer(x_), &gate = plan.buffer(gate_), &out = plan.buffer(out_);
    const Blocks& blocks = plan.blocks_of(x);
    const Form form = plan.form(w, false);
    alignas(64) float tile[kMaxBlockRows * kTileRows];
    if (!copy_) {
      each_tile(plan, blocks, begin, end, [&](int t, int b) {
        const int rows = blocks.rows(b), first = blocks.first(b), n = std::min(16, w.rows - 16 * t);
        multiply(plan, w, t, false, x.block(form, blocks, b), rows, plan.vector(bias_), tile);
        plan.adapters().add_up(plan.kernels(), weight_, t, first, rows, tile);
        for (int m = 0; m < rows; m++)
          for (int i = 0; i < n; i++)
            out.row(first + m)[16 * t + i] = gate.row(first + m)[16 * t + i] * tile[16 * m + i];
      });
      return;
    }
    thread_local std::vector<uint8_t> memory;
    if (memory.size() < w.stride + 64) memory.resize(w.stride + 64);
    auto* to =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    const float* bias = plan.vector(bias_);
    const int rows = blocks.rows(0), last = static_cast<int>(rows_.size()) - 1;
    for (int item = begin; item < end; item++) {
      const int first = kTileRows * item, n = std::min(kTileRows, last + 1 - first);
      const uint8_t* from[kTileRows];
      for (int r = 0; r < kTileRows; r++)
        from[r] = copy_->data + rows_[std::min(first + r, last)] * copy_->stride;
      for (int r = first + kTileRows; r < first + 2 * kTileRows && r <= last; r++)
        for (size_t line = 0; line < copy_->stride; line += 64)
          __builtin_prefetch(copy_->data + rows_[r] * copy_->stride + line, 0, 2);
      kernels_of(plan).gather[static_cast<int>(w.format)](from, w.shape, to);
      plan.kernels().matmul[static_cast<int>(w.mode(false))][static_cast<int>(w.format)][rows - 1](
          to, w.shape, x.block(form, blocks, 0), tile, {});
      for (int m = 0; m < rows; m++)
        for (int r = 0; r < n; r++) {
          const int column = rows_[first + r];
          const float y = bias ? tile[16 * m + r] + bias[column] : tile[16 * m + r];
          out.row(m)[column] = gate.row(m)[column] * y;
        }
    }
  }

 private:
  bool find_rows(const Plan& plan, int rows) {
    const Buffer& gate = plan.buffer(gate_);
    rows_.resize(static_cast<size_t>(gate.width));
    const int most = static_cast<int>(most_rows(rows) * gate.width);
    int count = 0;
    for (int c = 0; c < gate.width; c++) {
      int any = gate.row(0)[c] != 0;
      for (int m = 1; m < rows; m++) any |= gate.row(m)[c] != 0;
      rows_[static_cast<size_t>(count)] = c;
      count += any;
    }
    rows_.resize(static_cast<size_t>(count));
    return count <= most;
  }

  const int out_, x_, gate_, weight_, bias_;
  const RowCopy* copy_ = nullptr;  // of this step; null: the whole matrix
  std::vector<int> rows_;
};

// x where |x| > least, else 0. What is not a number stays.
class Threshold : public Op {
 public:
  Threshold(int out, int x, float least) : Op("threshold"), out_(out), x_(x), least_(least) {}

  int items(const Plan& plan, const Step& step) override {
    return Plan::rows_of(plan.buffer(x_), step);
  }
  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    std::vector<float> kept(static_cast<size_t>(x.width));
    for (int row = begin; row < end; row++) {
      const float* from = x.row(row);
      float* to = out.packed ? kept.data() : out.row(row);
      for (int i = 0; i < x.width; i++) to[i] = std::abs(from[i]) <= least_ ? 0.0f : from[i];
      if (out.packed) plan.pack_columns(out, row, 1, 0, to, static_cast<size_t>(x.width), x.width);
    }
  }

 private:
  const int out_, x_;
  const float least_;
};

}  // namespace

std::unique_ptr<Op> make_sparse_linear(int out, int x, int weight, int bias, int residual) {
  return std::make_unique<SparseLinear>(out, x, weight, bias, residual);
}
std::unique_ptr<Op> make_gated_rows(int out, int x, int gate, int weight, int bias) {
  return std::make_unique<GatedRows>(out, x, gate, weight, bias);
}
std::unique_ptr<Op> make_threshold(int out, int x, float least) {
  return std::make_unique<Threshold>(out, x, least);
}

}  // namespace headrace
