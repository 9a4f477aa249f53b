// Linear ops: tiles of 16 outputs, each over some blocks of activation rows, with the
// epilogue while they are in the L1 cache.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "kv_ahead.h"
#include "tiles.h"

namespace headrace {
namespace {

// Block `b` of the input of a weight, in the form that the weight is multiplied with.
const uint8_t* block_for(const Plan& plan, const Buffer& x, bool offset, const Blocks& blocks,
                         int b, const Weight& w) {
  return x.block(plan.form(w, offset), blocks, b);
}

// Groups of columns of a weight whose kernel reads ahead.
int64_t groups_ahead(const Weight& w) {
  return reads_ahead(w.format) && !w.wide ? int64_t{w.tiles()} * (w.cols / kGroup) : 0;
}

// Sums of the weights of a tile, which its next blocks need too.
thread_local std::vector<float> tile_sums;

// What a thread does apart from its products: it reads ahead (`KvAhead`), and keeps sums of
// weights.
struct Extras {
  const Plan& plan;
  const Step& step;
  int thread;

  Aside operator()(const Weight& w, bool keeps_sums, bool knows_sums) const {
    Aside aside;
    if (groups_ahead(w))
      aside.later = plan.kv_ahead().next(plan, step, thread, w.cols / kGroup * kLinesAhead);
    if (keeps_sums && is_grouped(w.format) && !is_table(w.format)) {
      const size_t sums = static_cast<size_t>(w.shape.units) * unit_columns(w.format) / 2;
      if (tile_sums.size() < sums) tile_sums.resize(sums);
      aside.sums = tile_sums.data(), aside.knows_sums = knows_sums;
    }
    return aside;
  }
};

// Which of the blocks that a thread multiplies a tile with comes now.
struct Turn {
  int number, count;

  // Fewer blocks do not make up for the store.
  bool keeps_sums(int rows) const { return count >= 4 && rows >= kRowsToKeepSumsFor; }
};

// Tile `t` of a weight times block `b` of its input: out[rows][16], plus the bias and
// what the adapters of the rows add.
void multiply(const Plan& plan, const Buffer& x, bool offset, const Blocks& blocks, int b,
              int weight, int t, int bias, float* out, const Extras& extras, Turn turn) {
  const Weight& w = plan.weight(weight);
  const bool keeps = offset && turn.keeps_sums(blocks.rows(b)),
             knows = turn.number && turn.keeps_sums(blocks.rows(b - 1));
  multiply(plan, w, t, offset, block_for(plan, x, offset, blocks, b, w), blocks.rows(b),
           plan.vector(bias), out, extras(w, keeps, knows));
  plan.adapters().add_up(plan.kernels(), weight, t, blocks.first(b), blocks.rows(b), out);
}

class AdapterDown : public Op {
 public:
  AdapterDown(Adapters& adapters, int x, std::vector<int> weights)
      : Op("adapter_down"), adapters_(adapters), x_(x), weights_(std::move(weights)) {}

  int items(const Plan& plan, const Step& step) override {
    return adapters_.prepare(weights_, plan.buffer(x_), step);
  }
  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    adapters_.run_down(plan, plan.buffer(x_), begin, end);
  }

 private:
  Adapters& adapters_;
  const int x_;
  const std::vector<int> weights_;
};

// A line of each of `rows` rows, that a tile of outputs is written to, and of the residuals
// unless these are null: fetched while the tile is computed. No prefetcher of the hardware
// foresees lines of rows that lie far apart.
constexpr int kRowsToFetch = 8;
void fetch(const float* out, const float* residual, size_t stride, int rows) {
  for (int m = 0; m < rows; m++) {
    __builtin_prefetch(out + m * stride, 1);
    if (residual) __builtin_prefetch(residual + m * stride);
  }
}

// Items of a matrix product: all tiles of the weight for some blocks of rows, then for
// the next. Contiguous items, as threads get them, are then rows of their own: what a
// thread writes in one op it reads in the next, out of its own cache.
class TileItems {
 public:
  TileItems(const Plan& plan, const Blocks& blocks, int tiles)
      : blocks_(blocks),
        tiles_(tiles),
        chunks_(std::max(blocks.count / kLeastBlocks,
                         std::min({blocks.count, plan.threads(), kFewChunks}))) {}

  int count() const { return chunks_ * tiles_; }

  // Calls f(tile, block, turn) for all of the items.
  template <class F>
  void each(int begin, int end, F&& f) const {
    for (int item = begin; item < end; item++) {
      const int chunk = item / tiles_;
      const int first = first_block(chunk), count = first_block(chunk + 1) - first;
      for (int i = 0; i < count; i++) f(item % tiles_, first + i, Turn{i, count});
    }
  }

 private:
  // Chunks beyond a few have at least so many blocks: with fewer, fetching the weights
  // again for each would cost more than it saves.
  static constexpr int kLeastBlocks = 8, kFewChunks = 4;
  int first_block(int chunk) const {
    return static_cast<int>(static_cast<int64_t>(blocks_.count) * chunk / chunks_);
  }

  const Blocks& blocks_;
  const int tiles_, chunks_;
};

class Linear : public Op {
 public:
  Linear(int out, int x, int weight, int bias, int residual, bool offset)
      : Op(residual >= 0 ? "linear_add" : "linear"),
        out_(out),
        x_(x),
        weight_(weight),
        bias_(bias),
        residual_(residual),
        offset_(offset) {}

  int items(const Plan& plan, const Step&) override { return work(plan).count(); }
  int64_t groups(const Plan& plan) const override { return groups_ahead(plan.weight(weight_)); }

  void run(const Plan& plan, const Step& step, int begin, int end, int thread) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const Extras extras{plan, step, thread};
    const int rows = plan.weight(weight_).rows;
    const Blocks& blocks = plan.blocks_of(x);
    alignas(64) float tile[kMaxBlockRows * 16];
    work(plan).each(begin, end, [&](int t, int b, Turn turn) {
      const int n = std::min(16, rows - 16 * t), row = blocks.first(b);
      const float* residual = residual_ >= 0 ? plan.buffer(residual_).row(row) + 16 * t
                                             : nullptr;  // as wide as the output
      if (blocks.rows(b) >= kRowsToFetch)
        fetch(out.row(row) + 16 * t, residual, out.width, blocks.rows(b));
      multiply(plan, x, offset_, blocks, b, weight_, t, bias_, tile, extras, turn);
      plan.kernels().finish_tile(tile, blocks.rows(b), n, residual, out.width,
                                 out.row(row) + 16 * t, out.width);
    });
  }

 private:
  TileItems work(const Plan& plan) const {
    return {plan, plan.blocks_of(plan.buffer(x_)), plan.weight(weight_).tiles()};
  }

  const int out_, x_, weight_, bias_, residual_;
  const bool offset_;
};

// An op that computes tiles of 16 columns of its output by themselves; two of them make
// one 32-column group of a packed one.
class TiledOp : public Op {
 public:
  TiledOp(std::string kind, int out, int x) : Op(std::move(kind)), out_(out), x_(x) {}

  int items(const Plan& plan, const Step&) override { return work(plan).count(); }

  void run(const Plan& plan, const Step& step, int begin, int end, int thread) override {
    const Buffer &x = plan.buffer(x_), &out = plan.buffer(out_);
    const Extras extras{plan, step, thread};
    const Blocks& blocks = plan.blocks_of(x);
    alignas(64) float rows[kMaxBlockRows * kGroup];  // zeros beyond the width
    work(plan).each(begin, end, [&](int pair, int b, Turn turn) {
      for (int half = 0; half < 2; half++) {
        const int t = 2 * pair + half;
        if (16 * t < out.width)
          compute(plan, x, blocks, b, t, rows + 16 * half, extras, turn);
        else
          for (int m = 0; m < blocks.rows(b); m++)
            std::fill_n(rows + kGroup * m + 16 * half, 16, 0.0f);
      }
      write_group(plan, out, blocks, b, pair, rows);
    });
  }

 protected:
  // Tile t of the output for block b: rows[m][16], kGroup apart.
  virtual void compute(const Plan& plan, const Buffer& x, const Blocks& blocks, int b, int t,
                       float* rows, const Extras& extras, Turn turn) const = 0;

 private:
  TileItems work(const Plan& plan) const {
    const Buffer& out = plan.buffer(out_);
    return {plan, plan.blocks_of(plan.buffer(x_)),
            ((out.packed ? out.columns : out.width) + kGroup - 1) / kGroup};
  }

  const int out_, x_;
};

class GluLinear : public TiledOp {
 public:
  GluLinear(int out, int x, int gate, int up, int gate_bias, int up_bias, Activation activation)
      : TiledOp("glu_linear", out, x),
        gate_(gate),
        up_(up),
        gate_bias_(gate_bias),
        up_bias_(up_bias),
        activation_(activation) {}

  int64_t groups(const Plan& plan) const override {
    return groups_ahead(plan.weight(gate_)) + groups_ahead(plan.weight(up_));
  }

 private:
  void compute(const Plan& plan, const Buffer& x, const Blocks& blocks, int b, int t, float* rows,
               const Extras& extras, Turn turn) const override {
    alignas(64) float g[kMaxBlockRows * 16], u[kMaxBlockRows * 16];
    multiply(plan, x, false, blocks, b, gate_, t, gate_bias_, g, extras, turn);
    multiply(plan, x, false, blocks, b, up_, t, up_bias_, u, extras, turn);
    plan.kernels().glu_tile[static_cast<int>(activation_)](g, u, blocks.rows(b), rows, kGroup);
  }

  const int gate_, up_, gate_bias_, up_bias_;
  const Activation activation_;
};

class LinearActivate : public TiledOp {
 public:
  LinearActivate(int out, int x, int weight, int bias, Activation activation)
      : TiledOp("linear_activate", out, x), weight_(weight), bias_(bias), activation_(activation) {}

  int64_t groups(const Plan& plan) const override { return groups_ahead(plan.weight(weight_)); }

 private:
  void compute(const Plan& plan, const Buffer& x, const Blocks& blocks, int b, int t, float* rows,
               const Extras& extras, Turn turn) const override {
    alignas(64) float tile[kMaxBlockRows * 16];
    multiply(plan, x, false, blocks, b, weight_, t, bias_, tile, extras, turn);
    plan.kernels().activate_tile[static_cast<int>(activation_)](tile, blocks.rows(b), rows, kGroup);
  }

  const int weight_, bias_;
  const Activation activation_;
};

// q, k and v of the same rows, where keys are as long as values. Queries and keys are
// rotated in place, keys and values go straight to the KV cache unless it is quantised.
class QkvRopeWrite : public Op {
 public:
  explicit QkvRopeWrite(const QkvArgs& args) : Op("qkv_rope_write"), a_(args) {}

  int items(const Plan& plan, const Step&) override { return work(plan).count(); }
  int64_t groups(const Plan& plan) const override {
    int64_t sum = 0;
    for (const int w : a_.weights) sum += groups_ahead(plan.weight(w));
    return sum;
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int thread) override {
    const Extras extras{plan, step, thread};
    const Buffer& x = plan.buffer(a_.x);
    const Blocks& blocks = plan.blocks_of(x);
    alignas(64) float tile[kMaxBlockRows * 16];
    work(plan).each(begin, end, [&](int t, int b, Turn turn) {
      int part = 0;
      while (t >= plan.weight(a_.weights[part]).tiles())
        t -= plan.weight(a_.weights[part++]).tiles();
      const int n = std::min(16, plan.weight(a_.weights[part]).rows - 16 * t),
                row = blocks.first(b), rows = blocks.rows(b);
      const Buffer* out = part == 0              ? &plan.buffer(a_.out)
                          : a_.kv[part - 1] >= 0 ? &plan.buffer(a_.kv[part - 1])
                                                 : nullptr;
      if (out && rows >= kRowsToFetch) fetch(out->row(row) + 16 * t, nullptr, out->width, rows);
      Places places;
      const bool together = !out && find(plan, step, part, row, rows, 16 * t, n, places);
      multiply(plan, x, true, blocks, b, a_.weights[part], t, a_.biases[part], tile, extras, turn);
      const bool rotated_to_out = part < 2 && out && n == 16;
      if (part < 2) {
        const Buffer& angles = plan.buffer(a_.angles);
        const float* cos = angles.row(row) + 16 * t % plan.kv(a_.layer.group).shape().key_dim;
        plan.kernels().rotate_tile(tile, rows, cos, cos + angles.width / 2, angles.width,
                                   rotated_to_out ? out->row(row) + 16 * t : tile,
                                   rotated_to_out ? out->width : 16);
      }
      if (together)
        write(plan, part, rows, places, tile);
      else if (!out)
        for (int m = 0; m < rows; m++)
          write_row(plan, step, part, row + m, 16 * t, n, tile + 16 * m);
      else if (!rotated_to_out)
        plan.kernels().finish_tile(tile, rows, n, nullptr, 0, out->row(row) + 16 * t, out->width);
    });
  }

  // Whether a value that is not finite has been written since the last call.
  bool take_unsettled() { return unsettled_.exchange(false, std::memory_order_relaxed); }

 private:
  TileItems work(const Plan& plan) const {
    int tiles = 0;
    for (const int w : a_.weights) tiles += plan.weight(w).tiles();
    return {plan, plan.blocks_of(plan.buffer(a_.x)), tiles};
  }

  using Places = std::array<uint8_t*, kMaxBlockRows>;

  // Finds and fetches the lines that a tile of keys (part 1) or values (part 2) is written
  // to, of columns first .. first + n - 1; returns false unless it can be written whole.
  bool find(const Plan& plan, const Step& step, int part, int row, int rows, int first, int n,
            Places& places) const {
    const KvCache& cache = plan.kv(a_.layer.group);
    const KvRecord& shape = cache.shape();
    const int head = first / shape.key_dim, d = first % shape.key_dim;
    if (shape.type != KvType::kBf16 || n < 16 || d + 16 > shape.key_dim) return false;
    const auto line = [](const uint8_t* p) { return reinterpret_cast<uintptr_t>(p) / 64; };
    for (int m = 0; m < rows; m++) {
      const int slot = step.kv[a_.layer.group].slots[row + m], lane = slot % kKvTile;
      uint8_t* record = cache.record(a_.layer.layer, head, slot / kKvTile);
      places[m] = part == 1 ? key_place(record, lane, d) : value_place(record, shape, lane, d);
      if (m && line(places[m]) == line(places[m - 1])) continue;
      for (int i = 0; i < (part == 1 ? 8 : 1); i++)
        __builtin_prefetch(places[m] + 4 * kKvTile * i, 1);
    }
    return true;
  }

  void write(const Plan& plan, int part, int rows, const Places& places, const float* y) {
    if (part == 1)
      plan.kernels().write_key_tile(y, rows, places.data());
    else if (!plan.kernels().write_value_tile(y, rows, places.data()))
      unsettled_.store(true, std::memory_order_relaxed);
  }

  // Columns first .. first + n - 1 of the key or value of one row, in any type, where a
  // tile may reach into the next head.
  void write_row(const Plan& plan, const Step& step, int part, int row, int first, int n,
                 const float* y) {
    const KvCache& cache = plan.kv(a_.layer.group);
    const KvRecord& shape = cache.shape();
    const int slot = step.kv[a_.layer.group].slots[row], lane = slot % kKvTile;
    for (int i = 0; i < n;) {  // a tile of a small head reaches into the next
      const int head = (first + i) / shape.key_dim, d = (first + i) % shape.key_dim,
                run = std::min(n - i, shape.key_dim - d);
      uint8_t* record = cache.record(a_.layer.layer, head, slot / kKvTile);
      if (part == 1)
        write_keys(record, shape, lane, d, y + i, run);
      else if (!write_values(record, shape, lane, d, y + i, run))
        unsettled_.store(true, std::memory_order_relaxed);
      i += run;
    }
  }

  const QkvArgs a_;
  std::atomic<bool> unsettled_{false};
};

// Settles the tokens of a step in which a value is not finite. Their keys are those of
// other threads until the op before is done.
class SettleValues : public Op {
 public:
  SettleValues(QkvRopeWrite* written, KvLayer layer)
      : Op(written->kind), written_(written), layer_(layer) {}

  int items(const Plan&, const Step& step) override {
    return written_->take_unsettled() ? step.rows : 0;
  }

  void run(const Plan& plan, const Step& step, int begin, int end, int) override {
    const KvCache& cache = plan.kv(layer_.group);
    for (int row = begin; row < end; row++) {
      const int slot = step.kv[layer_.group].slots[row];
      for (int head = 0; head < cache.heads(); head++)
        settle(cache.record(layer_.layer, head, slot / kKvTile), cache.shape(), slot % kKvTile);
    }
  }

 private:
  QkvRopeWrite* const written_;
  const KvLayer layer_;
};

}  // namespace

std::unique_ptr<Op> make_adapter_down(Adapters& adapters, int x, std::vector<int> weights) {
  return std::make_unique<AdapterDown>(adapters, x, std::move(weights));
}
std::unique_ptr<Op> make_linear(int out, int x, int weight, int bias, int residual, bool offset) {
  return std::make_unique<Linear>(out, x, weight, bias, residual, offset);
}
std::unique_ptr<Op> make_glu_linear(int out, int x, int gate, int up, int gate_bias, int up_bias,
                                    Activation activation) {
  return std::make_unique<GluLinear>(out, x, gate, up, gate_bias, up_bias, activation);
}
std::unique_ptr<Op> make_linear_activate(int out, int x, int weight, int bias,
                                         Activation activation) {
  return std::make_unique<LinearActivate>(out, x, weight, bias, activation);
}
std::array<std::unique_ptr<Op>, 2> make_qkv_rope_write(const QkvArgs& args) {
  auto write = std::make_unique<QkvRopeWrite>(args);
  auto after = args.kv[0] >= 0 ? make_kv_write(write->kind, args.kv[0], args.kv[1], args.layer)
                               : std::make_unique<SettleValues>(write.get(), args.layer);
  return {std::move(write), std::move(after)};
}

}  // namespace headrace
