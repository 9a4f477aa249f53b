// Ops that work row by row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "plan.h"

namespace headrace {
namespace {

// Its items are the rows of a float buffer. Those of a packed one are its blocks: rows
// of a block share cache lines, which two threads that write to them would take from
// each other again and again.
class RowOp : public Op {
 public:
  RowOp(std::string kind, int out) : Op(std::move(kind)), out_(out) {}
  int items(const Plan& plan, const Step& step) override {
    const Buffer& out = plan.buffer(out_);
    return out.packed ? plan.blocks_of(out).count : Plan::rows_of(out, step);
  }
  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    const Buffer& out = plan.buffer(out_);
    if (out.packed) {
      const Blocks& blocks = plan.blocks_of(out);
      begin = blocks.first(begin), end = blocks.first(end);
    }
    run_rows(plan, step, begin, end);
  }

 protected:
  virtual void run_rows(const Plan& plan, const Step& step, int begin, int end) {
    for (int row = begin; row < end; row++) run_row(plan, step, row);
  }
  virtual void run_row(const Plan& plan, const Step& step, int row) = 0;
  const int out_;
};

// Computes a row as float32. Where the buffer is packed, it packs the rows of a block
// together, which takes less than half of the time.
class RowWriter : public RowOp {
 public:
  using RowOp::RowOp;

 protected:
  virtual void compute(const Plan& plan, const Step& step, int row, float* y) = 0;

 private:
  void run_rows(const Plan& plan, const Step& step, int begin, int end) override {
    const Buffer& out = plan.buffer(out_);
    if (!out.packed) return RowOp::run_rows(plan, step, begin, end);
    thread_local std::vector<float> scratch;
    const Blocks& blocks = plan.blocks_of(out);
    for (int row = begin; row < end;) {
      const int b = blocks.of_row(row),
                count = std::min(end, blocks.first(b) + blocks.rows(b)) - row;
      scratch.resize(static_cast<size_t>(count) * out.width);
      for (int m = 0; m < count; m++)
        compute(plan, step, row + m, &scratch[static_cast<size_t>(m) * out.width]);
      plan.pack_columns(out, row, count, 0, scratch.data(), out.width, out.width);
      row += count;
    }
  }
  void run_row(const Plan& plan, const Step& step, int row) override {
    compute(plan, step, row, plan.buffer(out_).row(row));
  }
};

// The weight has the tokens from `first` on; the rows of others are zeros.
class Embed : public RowWriter {
 public:
  Embed(int out, int weight, int first) : RowWriter("embed", out), weight_(weight), first_(first) {}

 private:
  void compute(const Plan& plan, const Step& step, int row, float* y) override {
    const Weight& w = plan.weight(weight_);
    const int at = step.tokens[row] - first_;
    if (at >= 0 && at < w.rows)
      unpack_row(w, at, y);
    else
      std::fill_n(y, w.cols, 0.0f);
  }

  const int weight_, first_;
};

class EmbedPosition : public RowWriter {
 public:
  EmbedPosition(int out, int weight) : RowWriter("embed_position", out), weight_(weight) {}

 private:
  void compute(const Plan& plan, const Step& step, int row, float* y) override {
    const Weight& w = plan.weight(weight_);
    unpack_row(w, std::min(step.positions[row], w.rows - 1), y);
  }

  const int weight_;
};

class Input : public RowWriter {
 public:
  explicit Input(int out) : RowWriter("input", out) {}

 private:
  void compute(const Plan& plan, const Step& step, int row, float* y) override {
    const int width = plan.buffer(out_).width;
    std::memcpy(y, step.inputs + static_cast<size_t>(row) * width, static_cast<size_t>(width) * 4);
  }
};

class RopeAngles : public RowOp {
 public:
  RopeAngles(int out, std::vector<double> inverse_frequencies, double scale, int head_dim)
      : RowOp("rope_angles", out),
        inverse_frequencies_(std::move(inverse_frequencies)),
        scale_(scale),
        head_dim_(head_dim) {}

 protected:
  void run_row(const Plan& plan, const Step& step, int row) override {
    float* cos = plan.buffer(out_).row(row);
    float* sin = cos + plan.buffer(out_).width / 2;
    for (int d = 0; d < head_dim_; d++) {
      const size_t pair = d / 2;
      const bool rotated = pair < inverse_frequencies_.size();
      const double angle = rotated ? step.positions[row] * inverse_frequencies_[pair] : 0.0;
      cos[d] = static_cast<float>(rotated ? std::cos(angle) * scale_ : 1.0);
      sin[d] = static_cast<float>(rotated ? std::sin(angle) * scale_ * (d % 2 ? 1 : -1) : 0.0);
    }
    for (int d = head_dim_; d < plan.buffer(out_).width / 2; d++)
      cos[d] = cos[d - head_dim_], sin[d] = sin[d - head_dim_];
  }
  const std::vector<double> inverse_frequencies_;
  const double scale_;
  const int head_dim_;
};

class Rope : public RowWriter {
 public:
  Rope(int out, int x, int angles, int head_dim)
      : RowWriter("rope", out), x_(x), angles_(angles), head_dim_(head_dim) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    const Buffer &x = plan.buffer(x_), &angles = plan.buffer(angles_);
    const float* cos = angles.row(row);
    plan.kernels().rotate_row(x.row(row), cos, cos + angles.width / 2, head_dim_, x.width, y);
  }

  const int x_, angles_, head_dim_;
};

class Norm : public RowWriter {
 public:
  explicit Norm(const NormArgs& args) : RowWriter("norm", args.out), a_(args) {}

  int items(const Plan& plan, const Step& step) override {
    if (a_.ranks == 1) return RowWriter::items(plan, step);
    const int64_t rows = Plan::rows_of(plan.buffer(out_), step);
    first_ = static_cast<int>(rows * a_.rank / a_.ranks);
    return static_cast<int>(rows * (a_.rank + 1) / a_.ranks) - first_;
  }
  void run(const Plan& plan, const Step& step, int begin, int end, int thread) override {
    RowWriter::run(plan, step, first_ + begin, first_ + end, thread);
  }

 private:
  void compute(const Plan& plan, const Step& step, int row, float* y) override {
    const Buffer& x = plan.buffer(a_.x);
    const float *weight = plan.vector(a_.weight), *bias = plan.vector(a_.bias);
    const int weight_step = plan.vector_length(a_.weight) == x.width
                                ? a_.size
                                : 0;  // else all groups of columns share one
    const int bias_step = bias && plan.vector_length(a_.bias) == x.width ? a_.size : 0;
    if (x.rows == RowKind::kGathered && plan.buffer(out_).rows == RowKind::kPooled)
      row += step.logit_rows;
    for (int first = 0; first < x.width; first += a_.size, weight += weight_step, bias += bias_step)
      plan.kernels().norm[static_cast<int>(a_.kind)](x.row(row) + first, weight, bias, a_.eps,
                                                     a_.size, y + first);
  }

  const NormArgs a_;
  int first_ = 0;
};

class Pack : public RowOp {
 public:
  Pack(int out, int x, std::vector<int32_t> order)
      : RowOp("pack", out), x_(x), order_(std::move(order)) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    const Buffer& out = plan.buffer(out_);
    const float* x = plan.buffer(x_).row(row);
    if (!order_.empty()) {
      thread_local std::vector<float> ordered;
      ordered.resize(order_.size());
      std::transform(order_.begin(), order_.end(), ordered.begin(),
                     [x](int32_t column) { return x[column]; });
      x = ordered.data();
    }
    plan.pack_columns(out, row, 1, 0, x, out.width, out.width);
  }
  const int x_;
  const std::vector<int32_t>
      order_;  // column i of what is packed is column order_[i]; empty: as they are
};

class GatherRows : public RowOp {
 public:
  GatherRows(int out, int x) : RowOp("gather_rows", out), x_(x) {}

 protected:
  void run_row(const Plan& plan, const Step& step, int row) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const float* from = x.row(step.gathered_row[row]);
    if (out.packed)
      plan.pack_columns(out, row, 1, 0, from, x.width, out.width);
    else
      std::memcpy(out.row(row), from, static_cast<size_t>(x.width) * 4);
  }
  const int x_;
};

class TakeColumns : public RowWriter {
 public:
  TakeColumns(int out, int x, int first) : RowWriter("take_columns", out), x_(x), first_(first) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    std::memcpy(y, plan.buffer(x_).row(row) + first_,
                static_cast<size_t>(plan.buffer(out_).width) * 4);
  }

  const int x_, first_;
};

// One item, which a function outside of the plan computes with the rows of the op's
// buffers.
class Exchange : public Op {
 public:
  Exchange(std::string kind, std::function<void(const Plan&, const Step&)> exchange)
      : Op(std::move(kind)), exchange_(std::move(exchange)) {}

  int items(const Plan&, const Step&) override { return 1; }
  void run(const Plan& plan, const Step& step, int, int, int) override { exchange_(plan, step); }

 private:
  const std::function<void(const Plan&, const Step&)> exchange_;
};

class Add : public RowWriter {
 public:
  Add(int out, int x, int y) : RowWriter("add", out), x_(x), y_(y) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    plan.kernels().add(plan.buffer(x_).row(row), plan.buffer(y_).row(row), y,
                       plan.buffer(out_).width);
  }

  const int x_, y_;
};

class ConcatHeads : public RowWriter {
 public:
  ConcatHeads(int out, int x, int y, int x_dim, int y_dim)
      : RowWriter("concat_heads", out), x_(x), y_(y), x_dim_(x_dim), y_dim_(y_dim) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* to) override {
    const int heads = plan.buffer(out_).width / (x_dim_ + y_dim_);
    for (int head = 0; head < heads; head++, to += x_dim_ + y_dim_) {
      std::memcpy(to, plan.buffer(x_).head(row, head, x_dim_), static_cast<size_t>(x_dim_) * 4);
      std::memcpy(to + x_dim_, plan.buffer(y_).head(row, head, y_dim_),
                  static_cast<size_t>(y_dim_) * 4);
    }
  }

  const int x_, y_, x_dim_, y_dim_;
};

class Glu : public RowWriter {
 public:
  Glu(int out, int gate, int up, Activation activation)
      : RowWriter("glu", out), gate_(gate), up_(up), activation_(activation) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    const auto glu = plan.kernels().glu[static_cast<int>(activation_)];
    glu(plan.buffer(gate_).row(row), plan.buffer(up_).row(row), y, plan.buffer(out_).width);
  }

  const int gate_, up_;
  const Activation activation_;
};

class Activate : public RowWriter {
 public:
  Activate(int out, int x, Activation activation)
      : RowWriter("activate", out), x_(x), activation_(activation) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    plan.kernels().activate[static_cast<int>(activation_)](plan.buffer(x_).row(row), y,
                                                           plan.buffer(out_).width);
  }

  const int x_;
  const Activation activation_;
};

class Scale : public RowWriter {
 public:
  Scale(int out, int x, float factor) : RowWriter("scale", out), x_(x), factor_(factor) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    plan.kernels().scale(plan.buffer(x_).row(row), factor_, y, plan.buffer(out_).width);
  }

  const int x_;
  const float factor_;
};

class SoftCap : public RowWriter {
 public:
  SoftCap(int out, int x, float cap) : RowWriter("soft_cap", out), x_(x), cap_(cap) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    plan.kernels().soft_cap(plan.buffer(x_).row(row), cap_, y, plan.buffer(out_).width);
  }

  const int x_;
  const float cap_;
};

// The probability of the best token less that of the next best; NaN for logits that are
// not finite. Tokens far below the best are left out of the sum: all of them add less than
// its rounding.
double margin(const Kernels& kernels, const float* logits, int size) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kFar = 30;
  thread_local std::vector<float> peaks;
  const int tiles = (size + kTileRows - 1) / kTileRows;
  peaks.resize(static_cast<size_t>(tiles));
  if (!kernels.peaks(logits, size, peaks.data())) return std::numeric_limits<double>::quiet_NaN();
  const auto each = [&](float floor, auto&& visit) {
    for (int tile = 0; tile < tiles; tile++) {
      if (peaks[static_cast<size_t>(tile)] < floor) continue;
      const int begin = kTileRows * tile, end = std::min(size, begin + kTileRows);
      for (int i = begin; i < end; i++) visit(logits[i]);
    }
  };

  const float best = *std::max_element(peaks.begin(), peaks.end());
  if (!std::isfinite(best)) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  float next = -kInfinity;
  bool is_first = true;  // of the tokens that equal the best
  each(best - kFar, [&](float x) {
    sum += std::exp(static_cast<double>(x) - best);
    if (x == best && is_first)
      is_first = false;
    else
      next = std::max(next, x);
  });
  return (1 - std::exp(static_cast<double>(next) - best)) / sum;
}

class ExitChoice : public RowWriter {
 public:
  ExitChoice(int out, int early, int late, float min_margin)
      : RowWriter("exit_choice", out), early_(early), late_(late), min_margin_(min_margin) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    const int width = plan.buffer(out_).width;
    const float* early = plan.buffer(early_).row(row);
    if (margin(plan.kernels(), early, width) >= min_margin_)  // false for NaN
      std::copy_n(early, width, y);
    else if (late_ >= 0)
      std::copy_n(plan.buffer(late_).row(row), width, y);
    else
      std::fill_n(y, width, std::numeric_limits<float>::quiet_NaN());
  }

  const int early_, late_;
  const float min_margin_;
};

class GateRows : public RowWriter {
 public:
  GateRows(int out, int x, int gate) : RowWriter("gate_rows", out), x_(x), gate_(gate) {}

 private:
  void compute(const Plan& plan, const Step&, int row, float* y) override {
    const double gate = *plan.buffer(gate_).row(row);
    const double open =
        std::isfinite(gate) ? 1 / (1 + std::exp(-gate)) : std::numeric_limits<double>::quiet_NaN();
    plan.kernels().scale(plan.buffer(x_).row(row), static_cast<float>(open), y,
                         plan.buffer(out_).width);
  }

  const int x_, gate_;
};

}  // namespace

std::unique_ptr<Op> make_embed(int out, int weight, int first) {
  return std::make_unique<Embed>(out, weight, first);
}
std::unique_ptr<Op> make_embed_position(int out, int weight) {
  return std::make_unique<EmbedPosition>(out, weight);
}
std::unique_ptr<Op> make_input(int out) { return std::make_unique<Input>(out); }
std::unique_ptr<Op> make_rope_angles(int out, std::vector<double> inverse_frequencies, double scale,
                                     int head_dim) {
  return std::make_unique<RopeAngles>(out, std::move(inverse_frequencies), scale, head_dim);
}
std::unique_ptr<Op> make_rope(int out, int x, int angles, int head_dim) {
  return std::make_unique<Rope>(out, x, angles, head_dim);
}
std::unique_ptr<Op> make_norm(const NormArgs& args) { return std::make_unique<Norm>(args); }
std::unique_ptr<Op> make_pack(int out, int x, std::vector<int32_t> order) {
  return std::make_unique<Pack>(out, x, std::move(order));
}
std::unique_ptr<Op> make_gather_rows(int out, int x) {
  return std::make_unique<GatherRows>(out, x);
}
std::unique_ptr<Op> make_take_columns(int out, int x, int first) {
  return std::make_unique<TakeColumns>(out, x, first);
}
std::unique_ptr<Op> make_exchange(std::string kind,
                                  std::function<void(const Plan&, const Step&)> exchange) {
  return std::make_unique<Exchange>(std::move(kind), std::move(exchange));
}
std::unique_ptr<Op> make_add(int out, int x, int y) { return std::make_unique<Add>(out, x, y); }
std::unique_ptr<Op> make_concat_heads(int out, int x, int y, int x_dim, int y_dim) {
  return std::make_unique<ConcatHeads>(out, x, y, x_dim, y_dim);
}
std::unique_ptr<Op> make_glu(int out, int gate, int up, Activation activation) {
  return std::make_unique<Glu>(out, gate, up, activation);
}
std::unique_ptr<Op> make_activate(int out, int x, Activation activation) {
  return std::make_unique<Activate>(out, x, activation);
}
std::unique_ptr<Op> make_scale(int out, int x, float factor) {
  return std::make_unique<Scale>(out, x, factor);
}
std::unique_ptr<Op> make_exit_choice(int out, int early, int late, float min_margin) {
  return std::make_unique<ExitChoice>(out, early, late, min_margin);
}
std::unique_ptr<Op> make_soft_cap(int out, int x, float cap) {
  return std::make_unique<SoftCap>(out, x, cap);
}
std::unique_ptr<Op> make_gate_rows(int out, int x, int gate) {
  return std::make_unique<GateRows>(out, x, gate);
}

}  // namespace headrace
