// A compiled program: ops over buffers, run by all threads of a pool, one barrier
// between ops. A step is one call of run().
#pragma once
#include <array>
#include <climits>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "adapters.h"
#include "copies.h"
#include "kernels.h"
#include "kv.h"
#include "kv_ahead.h"
#include "memory.h"
#include "one_caller.h"
#include "packing.h"
#include "pool.h"
#include "weights.h"

namespace headrace {

// Where the rows of a step keep their KV in one group of layers.
struct KvRows {
  const int32_t *slots, *block_table;
  int max_blocks;
};

// One ragged batch, as in headrace/batch.py. Validated before it gets here.
struct Step {
  int rows, num_seqs, logit_rows, pooled_rows, ancestor_words;
  const int32_t *tokens, *positions, *row_start, *context_len, *scheduled_len;
  std::vector<KvRows> kv;       // by group; empty where the program keeps nothing
  const uint64_t* ancestors;    // null: every draft tree is a chain
  const int32_t* gathered_row;  // the logit rows, and behind them the pooled rows
  const float* inputs;  // [rows, as wide as the program reads]; null where it begins with tokens
  const int32_t* adapters;  // of each sequence, -1: none; null: none has one
};

// `count` rows cut into blocks of at most max_rows whose sizes differ by one at most:
// no block is left with a slow tail.
struct Blocks {
  int count = 0, base = 0, extra = 0;

  Blocks() = default;
  Blocks(int rows, int max_rows) : count((rows + max_rows - 1) / max_rows) {
    if (count) base = rows / count, extra = rows % count;
  }
  int rows(int block) const { return base + (block < extra); }
  int first(int block) const { return block * base + (block < extra ? block : extra); }
  int of_row(int row) const {
    return row < extra * (base + 1) ? row / (base + 1) : (row - extra) / base;
  }
};

// Which rows of a step a buffer has: all; those that are gathered, of which the first
// have logits and the others are pooled; or one of these two kinds alone.
enum class RowKind { kStep, kGathered, kLogit, kPooled };
constexpr int kNumRowKinds = 4;

// Rows of numbers between two ops: float32, or packed in each form that a reader wants
// (and then not as float32).
struct Buffer {
  int width;
  RowKind rows;
  bool packed;
  int per_row = 1;  // its rows for each of those
  bool in_pieces =
      false;  // its rows are not written whole, so no form can be wanted that takes a whole row
  int columns = 0;  // padded to the units of the readers
  std::array<bool, kNumForms> wanted{};
  float* floats = nullptr;  // parts of the plan's activation memory
  std::array<uint8_t*, kNumForms> forms{};

  float* row(int i) const { return floats + static_cast<size_t>(i) * width; }
  // A head of `dim` numbers in a row; the one head of a row that has no more is every
  // head.
  const float* head(int i, int number, int dim) const {
    return row(i) + (width == dim ? 0 : static_cast<size_t>(number) * dim);
  }
  uint8_t* block(Form form, const Blocks& blocks, int b) const {
    return forms[static_cast<int>(form)] + blocks.first(b) * form_row_bytes(form, columns);
  }
};

class Plan;
class AttentionWork;
class ExpertsWork;

// What ops over experts must share to share the memory of their rows.
struct ExpertsShape {
  int width, hidden, out, top_k;
  RowKind rows;
  auto operator<=>(const ExpertsShape&) const = default;
};

// A group of layers that keep alike, and see alike: `window` positions back, the row's
// own included, and the first `sink_tokens` of all; 0: everything.
struct KvGroup {
  KvCache cache;
  int window, sink_tokens;
};

// A layer by its group and its place in it.
struct KvLayer {
  int group, layer;
};

class Op {
 public:
  explicit Op(std::string kind) : kind(std::move(kind)) {}
  virtual ~Op() = default;
  // Items of work in this step; called by one thread before the region, so it may also
  // prepare.
  virtual int items(const Plan& plan, const Step& step) = 0;
  virtual void run(const Plan& plan, const Step& step, int begin, int end, int thread) = 0;
  // Groups of 32 columns that its matrix kernels multiply with each block of rows, of those that
  // read ahead.
  virtual int64_t groups(const Plan&) const { return 0; }
  // Rows that have gone to each expert since the start, of an op that sends rows to
  // experts.
  virtual std::span<const int64_t> expert_loads() const { return {}; }

  const std::string kind;
};

// Several programs may share the weights, KV and buffers of a plan; only one runs at a
// time.
struct Program {
  std::vector<std::unique_ptr<Op>> ops;
  std::vector<KvReader> kv_readers;
  int input_width = 0;  // of the rows that the caller gives; 0: none
  bool keeps = false;   // whether it reads or writes KV
  int vocab = INT_MAX;  // tokens that it has embeddings for
};

class Plan {
 public:
  // The pool may be that of another plan that never runs at the same time.
  Plan(const Kernels* kernels, std::shared_ptr<Pool> pool);
  // A plan over the weights and KV of another, which must outlive it and never runs at the
  // same time; with `own_kv` it begins without KV groups. It has no ops, buffers and adapters yet.
  // Weights and vectors keep their numbers; it may add its own.
  Plan(Plan* shared, bool own_kv);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Adds a group of layers; groups are numbered in the order in which they come.
  void add_kv_group(KvGroup group) { kv_->push_back(std::move(group)); }
  // From now on some KV memory is resident before its blocks are used.
  void start_kv() {
    for (const KvGroup& group : *kv_) group.cache.start();
  }

  // From now on quantised weights are multiplied with float32 activations; not those of
  // int8 by row.
  void use_float_activations() { float_activations_ = true; }

  // A matrix that `start_weights` or the first run packs; `stored` points into what `keeps` keeps,
  // and `mapped` says that its codes are pages of a file.
  int add_weight(const Stored& stored, std::shared_ptr<void> keeps, bool mapped);
  // Two matrices of one format, tile by tile in turn, so that a gated unit reads one
  // stream.
  std::pair<int, int> add_weight_pair(const Stored& a, const Stored& b, std::shared_ptr<void> keeps,
                                      bool mapped);
  // Packs the matrices in a thread, on the pool. Only `wait_for_weights` and what adds to the plan
  // without the pool may be called until they are packed.
  void start_weights() { packing_.start(); }
  // Waits for so many milliseconds at most; returns whether all matrices are packed.
  bool wait_for_weights(int milliseconds) {
    if (!packing_.wait_for(milliseconds)) return false;
    if (unreadable() < 0) copies_.fill(*pool_);
    return true;
  }
  // Waits for all matrices. Throws std::runtime_error if the file of one could not be read.
  void pack_rest();
  // The first matrix whose pages could not be read, -1: none.
  int unreadable() const { return packing_.unreadable(); }
  // Matrices that are filled afterwards, some rows at a time; rows that never come are
  // zeros.
  int add_table(const TableSpec& spec);
  std::pair<int, int> add_table_pair(const TableSpec& a, const TableSpec& b);
  void fill_table(int weight, const TableRows& rows) {
    packing_.join();
    pack_table(weights_[weight], rows, *pool_);
  }
  void fill_table(int weight, const Stored& stored);
  int add_vector(const float* data, int n);
  // MatrixCopies of a matrix by columns or by rows, for sparse activations, if its format and form
  // of activations have one.
  void copy_columns(int weight);
  void copy_rows(int weight);
  // Of two matrices whose tiles take turns: the tiles of the first, as a stream of their own.
  void copy_tiles(int first, int second);
  const MatrixCopies& copies() const { return copies_; }
  // Makes room for so many bytes of weights that come next, in one piece.
  void reserve_weights(size_t bytes);
  int add_buffer(int width, RowKind rows, bool packed, int per_row = 1);
  // Begins another program; returns its number. Ops go to the last one.
  int add_program();
  void add_op(std::unique_ptr<Op> op) { programs_.back().ops.push_back(std::move(op)); }
  // Declares that the last program reads or writes KV.
  void keeps() { programs_.back().keeps = true; }
  // Declares that the op that comes next reads KV.
  void reads_kv(AttentionWork& work, int layer) {
    programs_.back().kv_readers.push_back(
        {static_cast<int>(programs_.back().ops.size()), &work, layer});
  }
  // The op that looks up the embeddings of `vocab` tokens, of which the weight has
  // those from `first` on.
  void add_embed(int out, int weight, int first, int vocab);
  // The op that brings the caller's rows into a buffer.
  void add_input(int out);
  // Declares that a linear op reads `buffer` through `weight`, with offset activations
  // or without.
  void reads(int buffer, int weight, bool offset);
  // Declares that an op writes the rows of `buffer` piece by piece.
  void writes_pieces(int buffer);

  // Declares that a linear op reads `buffer` through weights that adapters may add to.
  void adapts(int buffer);
  // The buffers that adapters read have the form that they need from the first one on.
  Adapters& adapters() { return adapters_; }
  const Adapters& adapters() const { return adapters_; }
  int add_adapter();

  // Runs a step; returns whether the buffers have moved. What an op throws ends the
  // step, and is thrown here.
  bool run(int program, const Step& step);
  // A caller that works on the plan without Python's lock has a turn, from before it is
  // given up.
  OneCaller& caller() { return caller_; }
  bool is_in_use() const { return caller_.is_taken(); }

  int num_programs() const { return static_cast<int>(programs_.size()); }
  const Program& program(int number) const { return programs_[static_cast<size_t>(number)]; }
  const Kernels& kernels() const { return *kernels_; }
  // The form of activations that a weight is multiplied with.
  Form form(const Weight& w, bool offset) const {
    return kernels_->form[static_cast<int>(w.mode(offset))][static_cast<int>(w.format)];
  }
  int num_weights() const { return static_cast<int>(weights_.size()); }
  const Weight& weight(int id) const { return weights_[id]; }
  int num_vectors() const { return static_cast<int>(vectors_.size()); }
  int vector_length(int id) const { return vector_lengths_[id]; }
  const float* vector(int id) const { return id < 0 ? nullptr : vectors_[id].data(); }
  int num_buffers() const { return static_cast<int>(buffers_.size()); }
  const Buffer& buffer(int id) const { return buffers_[id]; }
  Buffer& buffer(int id) { return buffers_[id]; }
  const std::vector<KvGroup>& kv_groups() const { return *kv_; }
  void set_key_rounding(int group, int layer, int head, KeyRounding rounding) {
    (*kv_)[static_cast<size_t>(group)].cache.set_key_rounding(layer, head, std::move(rounding));
  }
  const KvCache& kv(int group) const { return (*kv_)[static_cast<size_t>(group)].cache; }
  int threads() const { return pool_->threads(); }
  const std::shared_ptr<Pool>& pool() const { return pool_; }
  // The memory of the buffers, and the rows that a buffer has room for. The memory is
  // another when they have grown.
  const std::shared_ptr<Arena>& activations() const { return activations_; }
  size_t capacity(const Buffer& buffer) const {
    return static_cast<size_t>(capacity_[static_cast<size_t>(buffer.rows)]) * buffer.per_row;
  }
  // Rows of a buffer in a step, and the blocks that they are packed in.
  static int rows_of(const Buffer& buffer, const Step& step) { return rows_of(buffer.rows, step); }
  const Blocks& blocks_of(const Buffer& buffer) const {
    return blocks_[static_cast<size_t>(buffer.rows)];
  }
  // Writes x[count][n], `stride` apart, to columns `first`.. of rows `row`.. of a
  // packed buffer, in all wanted forms; `first` is a multiple of the group. What comes
  // last in a row brings the zeros behind it.
  void pack_columns(const Buffer& buffer, int row, int count, int first, const float* x,
                    size_t stride, int n) const;
  // The buffers for keys and for values that a group quantises; -1 where its cache
  // takes them tile by tile.
  std::array<int, 2> kv_buffers(int group);
  // The attention work of the running step, planned once for all layers of a group with
  // so many heads and such values, which attend to so many chosen blocks (0: all).
  AttentionWork& attention_work(int group, int num_heads, int value_dim, int top_blocks);
  int64_t step_number() const { return step_number_; }
  KvAhead& kv_ahead() const { return *kv_ahead_; }
  // What the ops over experts of one shape share, one after the other.
  ExpertsWork& experts_work(const ExpertsShape& shape);

  // Seconds spent in each kind of op and barriers passed, since profiling was switched
  // on.
  struct Profile {
    std::vector<std::pair<std::string, double>> seconds;
    int64_t barriers = 0;
  };
  void set_profiling(bool on);
  Profile profile() const;
  size_t weight_bytes() const { return weight_bytes_; }  // of packed matrices and of vectors

 private:
  static int rows_of(RowKind kind, const Step& step) {
    const int rows[kNumRowKinds] = {step.rows, step.logit_rows + step.pooled_rows, step.logit_rows,
                                    step.pooled_rows};
    return rows[static_cast<int>(kind)];
  }
  uint8_t* allocate(size_t bytes);
  void want_floats(int buffer);
  bool reserve(const Step& step);
  int advance(const Program& program, int op, const Step& step, int thread);
  void add_time(const Op& op);

  const Kernels* kernels_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<std::vector<KvGroup>> kv_;
  std::vector<Arena> arenas_;
  size_t arena_used_ = 0, weight_bytes_ = 0;
  int keep(Weight w);
  int queue(const Stored& stored, Weight w, std::shared_ptr<void> keeps, bool mapped);
  const uint64_t* points_of(const Stored& stored);

  bool float_activations_ = false;
  std::vector<Weight> weights_;
  Packing packing_;
  MatrixCopies copies_;
  std::set<std::vector<uint64_t>> grids_;  // points, which matrices of one grid share
  std::vector<std::vector<float>> vectors_;
  std::vector<int> vector_lengths_;  // without what fills their last line
  std::vector<Buffer> buffers_;
  std::map<int, std::array<int, 2>> kv_buffers_;  // by width
  std::set<int> adapted_;                         // buffers that adapters read
  bool has_adapters_ = false;                     // whether there has been one
  Adapters adapters_;
  std::vector<Program> programs_;
  std::array<Blocks, kNumRowKinds> blocks_;
  std::shared_ptr<Arena> activations_;
  OneCaller caller_;
  std::array<int, kNumRowKinds> capacity_{};  // rows that buffers of each kind have room for
  Deal deal_;
  std::unique_ptr<KvAhead> kv_ahead_;
  std::map<std::array<int, 4>, std::unique_ptr<AttentionWork>>
      attention_work_;  // by group, heads, value_dim and top blocks
  std::map<ExpertsShape, std::unique_ptr<ExpertsWork>> experts_work_;
  int64_t step_number_ = 0;
  bool profiling_ = false;
  Profile profile_;
  double last_time_ = 0;
};

// The ops. Buffers, weights and vectors by id; -1 is none.
std::unique_ptr<Op> make_embed(int out, int weight, int first);
std::unique_ptr<Op> make_embed_position(int out, int weight);
std::unique_ptr<Op> make_input(int out);
// A row of angles has cosines, then signed sines, one for each dimension of a head and
// 16 more from the start: whatever dimension a tile of 16 outputs begins with, its
// angles are 16 adjacent numbers.
constexpr int angles_width(int head_dim) { return 2 * (head_dim + kTileRows); }
std::unique_ptr<Op> make_rope_angles(int out, std::vector<double> inverse_frequencies, double scale,
                                     int head_dim);
std::unique_ptr<Op> make_rope(int out, int x, int angles, int head_dim);
struct NormArgs {
  int out, x, weight, bias;  // vectors of `size` numbers, or as wide as the buffers
  NormKind kind;
  int size;  // columns that are taken together
  float eps;
  int rank = 0, ranks = 1;  // the op does a part of the rows, as even as can be
};
std::unique_ptr<Op> make_norm(const NormArgs& args);
std::unique_ptr<Op> make_pack(int out, int x, std::vector<int32_t> order);
std::unique_ptr<Op> make_gather_rows(int out, int x);
std::unique_ptr<Op> make_take_columns(int out, int x, int first);
// What other processes have a part in: a function that reads and writes buffers of the
// plan. What it throws ends the step.
std::unique_ptr<Op> make_exchange(std::string kind,
                                  std::function<void(const Plan&, const Step&)> exchange);
std::unique_ptr<Op> make_add(int out, int x, int y);
std::unique_ptr<Op> make_glu(int out, int gate, int up, Activation activation);
std::unique_ptr<Op> make_activate(int out, int x, Activation activation);
std::unique_ptr<Op> make_scale(int out, int x, float factor);
std::unique_ptr<Op> make_soft_cap(int out, int x, float cap);
// Rows of `early` if their margin is at least `min_margin`, else of `late`, or NaN if it is -1.
std::unique_ptr<Op> make_exit_choice(int out, int early, int late, float min_margin);
// x / (1 + exp(-gate)), where a gate is one number for its row.
std::unique_ptr<Op> make_gate_rows(int out, int x, int gate);
// What comes before a linear op over these weights: the first half of what adapters add
// to it.
std::unique_ptr<Op> make_adapter_down(Adapters& adapters, int x, std::vector<int> weights);
std::unique_ptr<Op> make_linear(int out, int x, int weight, int bias, int residual, bool offset);
std::unique_ptr<Op> make_glu_linear(int out, int x, int gate, int up, int gate_bias, int up_bias,
                                    Activation activation);
std::unique_ptr<Op> make_linear_activate(int out, int x, int weight, int bias,
                                         Activation activation);
// The same as linear and glu_linear, over the part of the weight that x, or the gate after its
// activation, needs; activations have no offset.
std::unique_ptr<Op> make_sparse_linear(int out, int x, int weight, int bias, int residual);
std::unique_ptr<Op> make_skipping_glu(int out, int x, int gate, int up, int gate_bias, int up_bias);
// x where |x| > least, else 0.
std::unique_ptr<Op> make_threshold(int out, int x, float least);
// Each head of x, or the one that it has, times the head's weight.
std::unique_ptr<Op> make_head_linear(int out, int x, std::vector<int> weights);
// The x_dim numbers of each head of x, or of the one that it has, then the y_dim
// numbers of y.
std::unique_ptr<Op> make_concat_heads(int out, int x, int y, int x_dim, int y_dim);
struct QkvArgs {
  int out, x, angles;
  std::array<int, 3> weights, biases;
  KvLayer layer;
  std::array<int, 2>
      kv;  // buffers that take keys and values instead of the KV cache; -1: straight there
};
// And the op after it, which puts the keys and values of those buffers into the KV
// cache, or settles values that are not finite.
std::array<std::unique_ptr<Op>, 2> make_qkv_rope_write(const QkvArgs& args);
// Keys and values from two buffers to the KV cache, in its number format; v is -1 where
// values are part of the keys. Its time is booked on `kind`.
std::unique_ptr<Op> make_kv_write(std::string kind, int k, int v, KvLayer layer);
// A rotary pair of a key bias that the keys of a KV head are stored without: the numbers `dim` and
// dim + 1 of each key, before they are rotated by the key's position times `frequency`.
struct KeyBiasPair {
  int head, dim;
  double frequency;
  float x, y;
};
struct AttentionArgs {
  int out, q, layer, value_dim;  // value_dim: numbers of a head that are written
  float scale, softcap;          // a cap of 0 is none
  std::vector<float> slopes;     // of each head, or empty
  int sinks;                     // vector of a score for each head; -1: none
  std::vector<KeyBiasPair> key_bias;
};
// Attention, and the op after it that merges contexts split over threads. `heads`: of the KV.
// Before it, the choice of blocks if there is one.
std::vector<std::unique_ptr<Op>> make_attention(AttentionArgs args, AttentionWork& work, int heads);
std::unique_ptr<Op> make_choose_blocks(const AttentionArgs& args, AttentionWork& work, int heads);
// The bounds of the keys of blocks whose last slot the step wrote.
std::unique_ptr<Op> make_key_bounds(KvLayer layer);
struct RouteArgs {
  int out, x, top_k;
  bool sigmoid,
      normalised;  // scores are those of a softmax, or sigmoids; the weights come to a sum of 1
  float factor;
  int groups, top_groups, bias;
};
std::unique_ptr<Op> make_route(const RouteArgs& args);
// Weights and biases by expert; no biases: none.
struct ExpertsArgs {
  int out, x, routing;
  std::vector<int> gate, up, down, gate_bias, up_bias, down_bias;
  Kernels::GluTile activate;
  int first, num_experts;  // the experts that the weights are of begin with `first`, of so many
  bool combines;  // else `out` has what comes of each choice of a row; of an expert that is not
                  // here, anything
};
// What comes of a row's choices, [rows, top_k * width], summed up by the weights of its
// routing.
std::unique_ptr<Op> make_combine(int out, int x, int routing);
// The regions of an op over experts.
std::vector<std::unique_ptr<Op>> make_experts(ExpertsArgs args, ExpertsWork& work);

}  // namespace headrace
