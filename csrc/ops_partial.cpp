// Linear ops that read the part of a matrix that activations other than 0 need. Which part is that
// of all rows of a step; a step that needs too much of it, or has many rows, reads the whole
// matrix. A result has the same bits either way.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "copies.h"
#include "tiles.h"

namespace headrace {
namespace {

// Rows of a step up to which reading a part takes less time than reading the whole, and the share
// of the columns that it may need, as measured (benchmarks/activation_sparsity.py).
constexpr int kMostStepRows = 2;
double most_columns(int rows) { return rows == 1 ? 0.65 : 0.4; }

// Whether a step has so few rows that reading a part may pay.
bool is_short(const Blocks& blocks) { return blocks.count == 1 && blocks.rows(0) <= kMostStepRows; }

// x @ w.T + bias + residual, by the columns of w that x needs.
class SparseLinear : public Op {
 public:
  SparseLinear(int out, int x, int weight, int bias, int residual)
      : Op(residual >= 0 ? "linear_add" : "linear"),
        whole_(make_linear(out, x, weight, bias, residual, false)),
        out_(out),
        x_(x),
        weight_(weight),
        bias_(bias),
        residual_(residual) {}

  int items(const Plan& plan, const Step& step) override {
    const Weight& w = plan.weight(weight_);
    const Buffer& x = plan.buffer(x_);
    const Blocks& blocks = plan.blocks_of(x);
    copy_ = is_short(blocks) ? plan.copies().columns(weight_) : nullptr;
    if (copy_ && !find_columns(x.block(plan.form(w, false), blocks, 0), blocks.rows(0), w))
      copy_ = nullptr;
    return copy_ ? copy_->panels(w.tiles()) : whole_->items(plan, step);
  }
  int64_t groups(const Plan& plan) const override { return whole_->groups(plan); }

  void run(const Plan& plan, const Step& step, int begin, int end, int thread) override {
    if (!copy_) return whole_->run(plan, step, begin, end, thread);
    const Weight& w = plan.weight(weight_);
    const Buffer& x = plan.buffer(x_);
    const Blocks& blocks = plan.blocks_of(x);
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
                            x.block(plan.form(w, false), blocks, 0),
                            columns,
                            out};
      plan.copies().kernels().columns[static_cast<int>(w.format)](work);
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
      uint8_t places[kGroup + 3];
      int count = 0;
      for (int c = 0; c < kGroup; c += 8) {
        uint64_t any = 0;
        for (int m = 0; m < rows; m++) {
          uint64_t codes;
          std::memcpy(&codes, block + kGroup * m + c, 8);
          any |= codes;
        }
        for (; any; count++) {
          const int byte = std::countr_zero(any) / 8;
          places[count] = static_cast<uint8_t>(c + byte);
          any &= ~(uint64_t{255} << 8 * byte);
        }
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

  const std::unique_ptr<Op> whole_;
  const int out_, x_, weight_, bias_, residual_;
  const ColumnCopy* copy_ = nullptr;  // of this step; null: the whole matrix
  std::vector<int32_t> first_;
  std::vector<uint8_t> columns_;
  std::vector<int8_t> codes_;
};

// relu(x @ gate.T + gate_bias) * (x @ up.T + up_bias), by the rows of `up` whose gate is not 0. A
// thread computes some gates and then the rows that they need: rows in between would disturb the
// one stream that gates are. A dense step takes turns between tiles of `gate` and of `up`, and the
// processor fetches both, so gates have a copy of their own.
class SkippingGlu : public Op {
 public:
  SkippingGlu(int out, int x, int gate, int up, int gate_bias, int up_bias)
      : Op("glu_linear"),
        whole_(make_glu_linear(out, x, gate, up, gate_bias, up_bias, Activation::kRelu)),
        out_(out),
        x_(x),
        gate_(gate),
        up_(up),
        gate_bias_(gate_bias),
        up_bias_(up_bias) {}

  int items(const Plan& plan, const Step& step) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const Blocks& blocks = plan.blocks_of(x);
    copy_ = is_short(blocks) && !step.adapters ? plan.copies().rows(up_) : nullptr;
    if (!copy_) return whole_->items(plan, step);
    return ((out.packed ? out.columns : out.width) + kGroup - 1) / kGroup;
  }
  int64_t groups(const Plan& plan) const override { return whole_->groups(plan); }

  void run(const Plan& plan, const Step& step, int begin, int end, int thread) override {
    if (!copy_) return whole_->run(plan, step, begin, end, thread);
    for (; begin < end; begin += kGroupsTogether)
      multiply_groups(plan, begin, std::min(kGroupsTogether, end - begin));
  }

 private:
  // Groups of 32 outputs, of which a thread computes first the gates.
  static constexpr int kGroupsTogether = 16;
  // The gates of some groups, and those that are not 0 in all rows.
  struct Gates {
    alignas(64) float tiles[2 * kGroupsTogether][kMostStepRows * kTileRows];
    int columns[kGroupsTogether * kGroup], count = 0;
  };

  void compute_gates(const Plan& plan, int group, int count, Gates& gates) const {
    const Weight* apart = plan.copies().tiles(gate_);
    const Weight& w = apart ? *apart : plan.weight(gate_);
    const Buffer& x = plan.buffer(x_);
    const Blocks& blocks = plan.blocks_of(x);
    const uint8_t* block = x.block(plan.form(w, false), blocks, 0);
    const int rows = blocks.rows(0);
    for (int t = 2 * group; t < std::min(2 * (group + count), w.tiles()); t++) {
      float* tile = gates.tiles[t - 2 * group];
      multiply(plan, w, t, false, block, rows, plan.vector(gate_bias_), tile);
      plan.kernels().activate_tile[static_cast<int>(Activation::kRelu)](tile, rows, tile, 16);
      for (int i = 0; i < std::min(kTileRows, w.rows - kTileRows * t); i++) {
        bool any = false;
        for (int m = 0; m < rows; m++) any |= tile[16 * m + i] != 0;
        gates.columns[gates.count] = kTileRows * (t - 2 * group) + i;
        gates.count += any;
      }
    }
  }

  // Up to 16 rows of `up`, gathered to a tile, times all rows of the step.
  void multiply_rows(const Plan& plan, int offset, const Gates& gates, int first, int rows,
                     float* out) const {
    const Weight& w = plan.weight(up_);
    const Buffer& x = plan.buffer(x_);
    thread_local std::vector<uint8_t> memory;
    if (memory.size() < w.stride + 64) memory.resize(w.stride + 64);
    auto* tile =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    const auto row = [&](int i) {
      return copy_->data + (offset + gates.columns[i]) * copy_->stride;
    };
    const uint8_t* from[kTileRows];
    for (int r = 0; r < kTileRows; r++) from[r] = row(std::min(first + r, gates.count - 1));
    for (int i = first + kTileRows; i < std::min(first + 2 * kTileRows, gates.count); i++)
      for (size_t line = 0; line < copy_->stride; line += 64)
        __builtin_prefetch(row(i) + line, 0, 2);
    plan.copies().kernels().gather[static_cast<int>(w.format)](from, w.shape, tile);
    plan.kernels().matmul[static_cast<int>(w.mode(false))][static_cast<int>(w.format)][rows - 1](
        tile, w.shape, x.block(plan.form(w, false), plan.blocks_of(x), 0), out, {});
  }

  void multiply_groups(const Plan& plan, int first, int count) const {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const Blocks& blocks = plan.blocks_of(x);
    const int rows = blocks.rows(0);
    const float* bias = plan.vector(up_bias_);
    Gates gates;
    compute_gates(plan, first, count, gates);
    alignas(64) float products[kGroupsTogether][kMostStepRows * kGroup] = {};
    for (int i = 0; i < gates.count; i += kTileRows) {
      alignas(64) float tile[kMostStepRows * kTileRows];
      multiply_rows(plan, kGroup * first, gates, i, rows, tile);
      for (int r = 0; r < std::min(kTileRows, gates.count - i); r++) {
        const int c = gates.columns[i + r];
        for (int m = 0; m < rows; m++) {
          const float up = tile[kTileRows * m + r], y = bias ? up + bias[kGroup * first + c] : up;
          products[c / kGroup][kGroup * m + c % kGroup] =
              gates.tiles[c / kTileRows][kTileRows * m + c % kTileRows] * y;
        }
      }
    }
    for (int g = 0; g < count; g++) write_group(plan, out, blocks, 0, first + g, products[g]);
  }

  const std::unique_ptr<Op> whole_;
  const int out_, x_, gate_, up_, gate_bias_, up_bias_;
  const RowCopy* copy_ = nullptr;  // of this step; null: the whole matrix
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
std::unique_ptr<Op> make_skipping_glu(int out, int x, int gate, int up, int gate_bias,
                                      int up_bias) {
  return std::make_unique<SkippingGlu>(out, x, gate, up, gate_bias, up_bias);
}
std::unique_ptr<Op> make_threshold(int out, int x, float least) {
  return std::make_unique<Threshold>(out, x, least);
}

}  // namespace headrace
