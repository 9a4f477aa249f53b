// Ops that work row by row.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "plan.h"

namespace headrace {
namespace {

// Its items are the rows of a float buffer. Those of a packed one are its blocks: rows of a block share cache lines, which two threads
// that write to them would take from each other again and again.
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
    for (int row = begin; row < end; row++) run_row(plan, step, row);
  }

 protected:
  virtual void run_row(const Plan& plan, const Step& step, int row) = 0;
  const int out_;
};

class Embed : public RowOp {
 public:
  Embed(int out, int weight) : RowOp("embed", out), weight_(weight) {}

 protected:
  void run_row(const Plan& plan, const Step& step, int row) override {
    unpack_row(plan.weight(weight_), step.tokens[row], plan.buffer(out_).row(row));
  }
  const int weight_;
};

class Input : public RowOp {
 public:
  explicit Input(int out) : RowOp("input", out) {}

 protected:
  void run_row(const Plan& plan, const Step& step, int row) override {
    const Buffer& out = plan.buffer(out_);
    const float* x = step.inputs + static_cast<size_t>(row) * out.width;
    std::memcpy(out.row(row), x, static_cast<size_t>(out.width) * 4);
  }
};

class RopeAngles : public RowOp {
 public:
  RopeAngles(int out, std::vector<double> inverse_frequencies, double scale, int head_dim)
      : RowOp("rope_angles", out), inverse_frequencies_(std::move(inverse_frequencies)), scale_(scale), head_dim_(head_dim) {}

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
    for (int d = head_dim_; d < plan.buffer(out_).width / 2; d++) cos[d] = cos[d - head_dim_], sin[d] = sin[d - head_dim_];
  }
  const std::vector<double> inverse_frequencies_;
  const double scale_;
  const int head_dim_;
};

class Rope : public RowOp {
 public:
  Rope(int out, int x, int angles, int head_dim) : RowOp("rope", out), x_(x), angles_(angles), head_dim_(head_dim) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    const Buffer &out = plan.buffer(out_), &angles = plan.buffer(angles_);
    const float* cos = angles.row(row);
    plan.kernels().rotate_row(plan.buffer(x_).row(row), cos, cos + angles.width / 2, head_dim_, out.width, out.row(row));
  }
  const int x_, angles_, head_dim_;
};

class Norm : public RowOp {
 public:
  Norm(int out, int x, int weight, float eps) : RowOp("norm", out), x_(x), weight_(weight), eps_(eps) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    thread_local std::vector<float> scratch;
    scratch.resize(x.width);
    float* y = out.packed ? scratch.data() : out.row(row);
    plan.kernels().norm(x.row(row), plan.vector(weight_), eps_, x.width, y);
    if (out.packed) plan.pack_columns(out, row, 1, 0, y, x.width, x.width);
  }
  const int x_, weight_;
  const float eps_;
};

class Pack : public RowOp {
 public:
  Pack(int out, int x) : RowOp("pack", out), x_(x) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    const Buffer& out = plan.buffer(out_);
    plan.pack_columns(out, row, 1, 0, plan.buffer(x_).row(row), out.width, out.width);
  }
  const int x_;
};

class GatherRows : public RowOp {
 public:
  GatherRows(int out, int x) : RowOp("gather_rows", out), x_(x) {}

 protected:
  void run_row(const Plan& plan, const Step& step, int row) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const float* from = x.row(step.logit_row[row]);
    if (out.packed)
      plan.pack_columns(out, row, 1, 0, from, x.width, out.width);
    else
      std::memcpy(out.row(row), from, static_cast<size_t>(x.width) * 4);
  }
  const int x_;
};

class Add : public RowOp {
 public:
  Add(int out, int x, int y) : RowOp("add", out), x_(x), y_(y) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    plan.kernels().add(plan.buffer(x_).row(row), plan.buffer(y_).row(row), plan.buffer(out_).row(row), plan.buffer(out_).width);
  }
  const int x_, y_;
};

class Glu : public RowOp {
 public:
  Glu(int out, int gate, int up) : RowOp("glu", out), gate_(gate), up_(up) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    plan.kernels().silu_mul(plan.buffer(gate_).row(row), plan.buffer(up_).row(row), plan.buffer(out_).row(row), plan.buffer(out_).width);
  }
  const int gate_, up_;
};

class Silu : public RowOp {
 public:
  Silu(int out, int x) : RowOp("silu", out), x_(x) {}

 protected:
  void run_row(const Plan& plan, const Step&, int row) override {
    thread_local std::vector<float> ones;  // so that it is the gated kernel, with an open gate
    ones.resize(std::max(ones.size(), static_cast<size_t>(plan.buffer(x_).width)), 1.0f);
    plan.kernels().silu_mul(plan.buffer(x_).row(row), ones.data(), plan.buffer(out_).row(row), plan.buffer(out_).width);
  }
  const int x_;
};

}  // namespace

std::unique_ptr<Op> make_embed(int out, int weight) { return std::make_unique<Embed>(out, weight); }
std::unique_ptr<Op> make_input(int out) { return std::make_unique<Input>(out); }
std::unique_ptr<Op> make_rope_angles(int out, std::vector<double> inverse_frequencies, double scale, int head_dim) {
  return std::make_unique<RopeAngles>(out, std::move(inverse_frequencies), scale, head_dim);
}
std::unique_ptr<Op> make_rope(int out, int x, int angles, int head_dim) { return std::make_unique<Rope>(out, x, angles, head_dim); }
std::unique_ptr<Op> make_norm(int out, int x, int weight, float eps) { return std::make_unique<Norm>(out, x, weight, eps); }
std::unique_ptr<Op> make_pack(int out, int x) { return std::make_unique<Pack>(out, x); }
std::unique_ptr<Op> make_gather_rows(int out, int x) { return std::make_unique<GatherRows>(out, x); }
std::unique_ptr<Op> make_add(int out, int x, int y) { return std::make_unique<Add>(out, x, y); }
std::unique_ptr<Op> make_glu(int out, int gate, int up) { return std::make_unique<Glu>(out, gate, up); }
std::unique_ptr<Op> make_silu(int out, int x) { return std::make_unique<Silu>(out, x); }

}  // namespace headrace
