#include "plan.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "attention_work.h"
#include "experts_work.h"
#include "grids.h"

namespace headrace {
namespace {

constexpr size_t kArenaBytes = size_t{64} << 20;

void check_whole_rows(const Buffer& buffer) {
  if (buffer.in_pieces && (buffer.wanted[static_cast<int>(Form::kQ8Row)] ||
                           buffer.wanted[static_cast<int>(Form::kQ8Mixed)]))
    throw std::invalid_argument(
        "a buffer that is written in pieces cannot be packed with one scale a row");
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Plan::Plan(const Kernels* kernels, std::shared_ptr<Pool> pool)
    : kernels_(kernels),
      pool_(std::move(pool)),
      kv_(std::make_shared<std::vector<KvGroup>>()),
      packing_(pool_),
      copies_(kernels_->name),
      programs_(1),
      deal_(pool_->threads()),
      kv_ahead_(std::make_unique<KvAhead>(pool_->threads())) {}

Plan::Plan(Plan* shared, bool own_kv)
    : kernels_(shared->kernels_),
      pool_(shared->pool_),
      kv_(own_kv ? std::make_shared<std::vector<KvGroup>>() : shared->kv_),
      float_activations_(shared->float_activations_),
      weights_(shared->weights_),
      packing_(pool_),
      copies_(kernels_->name),
      vectors_(shared->vectors_),
      vector_lengths_(shared->vector_lengths_),
      programs_(1),
      deal_(pool_->threads()),
      kv_ahead_(std::make_unique<KvAhead>(pool_->threads())) {
  shared->pack_rest();
  copies_ = shared->copies_;
}

Plan::~Plan() = default;

void Plan::reserve_weights(size_t bytes) {
  arenas_.emplace_back(bytes);
  arena_used_ = 0;
}

uint8_t* Plan::allocate(size_t bytes) {
  if (arenas_.empty() || arena_used_ + bytes > arenas_.back().size())
    reserve_weights(std::max(bytes, kArenaBytes));
  arena_used_ += bytes, weight_bytes_ += bytes;
  return arenas_.back().data() + arena_used_ - bytes;
}

int Plan::keep(Weight w) {
  w.wide |= float_activations_ && is_grouped(w.format);
  weights_.push_back(w);
  return static_cast<int>(weights_.size()) - 1;
}

// The points of a matrix's grid, kept for it; null where it has none.
const uint64_t* Plan::points_of(const Stored& stored) {
  const Grid* grid = find_grid(stored.format);
  return grid ? grids_.insert(headrace::points_of(*grid, stored.values)).first->data() : nullptr;
}

int Plan::queue(const Stored& stored, Weight w, std::shared_ptr<void> keeps, bool mapped) {
  const int number = keep(w);
  packing_.add({stored, w, number, mapped, std::move(keeps)});
  return number;
}

void Plan::pack_rest() {
  packing_.wait();
  if (unreadable() >= 0)
    throw std::runtime_error("the plan has a weight whose file could not be read");
  copies_.fill(*pool_);
}

int Plan::add_weight(const Stored& stored, std::shared_ptr<void> keeps, bool mapped) {
  check_stored(stored);
  const uint64_t* points = points_of(stored);
  const size_t bytes = packed_bytes(stored.format, stored.rows, stored.cols),
               tiles = (stored.rows + kTileRows - 1) / kTileRows;
  const Weight w = empty_weight(stored, points, allocate(bytes), bytes / tiles);
  return queue(stored, w, std::move(keeps), mapped);
}

std::pair<int, int> Plan::add_weight_pair(const Stored& a, const Stored& b,
                                          std::shared_ptr<void> keeps, bool mapped) {
  check_stored(a), check_stored(b);
  if (a.format != b.format || a.rows != b.rows || a.cols != b.cols) {
    const int first = add_weight(a, keeps, mapped);
    return {first, add_weight(b, std::move(keeps), mapped)};
  }
  const uint64_t *points_a = points_of(a), *points_b = points_of(b);
  const size_t bytes = packed_bytes(a.format, a.rows, a.cols),
               tile = bytes / ((a.rows + kTileRows - 1) / kTileRows);
  uint8_t* to = allocate(2 * bytes);
  const int first = queue(a, empty_weight(a, points_a, to, 2 * tile), keeps, mapped);
  return {first,
          queue(b, empty_weight(b, points_b, to + tile, 2 * tile), std::move(keeps), mapped)};
}

int Plan::add_table(const TableSpec& spec) {
  check_table(spec);
  Weight w = empty_table(spec);
  w.data = allocate(w.stride * w.tiles());
  return keep(w);
}

std::pair<int, int> Plan::add_table_pair(const TableSpec& a, const TableSpec& b) {
  check_table(a), check_table(b);
  Weight first = empty_table(a), second = empty_table(b);
  if (first.stride != second.stride || a.rows != b.rows) {
    const int one = add_table(a);
    return {one, add_table(b)};
  }
  const size_t tile = first.stride;
  first.data = allocate(2 * tile * first.tiles());
  second.data = first.data + tile;
  first.stride = second.stride = 2 * tile;
  const int one = keep(first);
  return {one, keep(second)};
}

void Plan::fill_table(int weight, const Stored& stored) {
  check_table_blocks(weights_[weight], stored);
  packing_.join();
  pack_table_blocks(weights_[weight], stored, *pool_);
}

int Plan::add_vector(const float* data, int n) {
  std::vector<float> v(data, data + n);
  v.resize(vector_bytes(n) / sizeof(float));
  weight_bytes_ += vector_bytes(n);
  vectors_.push_back(std::move(v));
  vector_lengths_.push_back(n);
  return static_cast<int>(vectors_.size()) - 1;
}

void Plan::copy_columns(int weight) {
  const Weight& w = weights_[weight];
  if (!has_copies(w) || copies_.columns(weight)) return;
  uint8_t* to = allocate(MatrixCopies::column_bytes(w, threads()));
  copies_.add_columns(weight, w, threads(), to);
}

void Plan::copy_rows(int weight) {
  const Weight& w = weights_[weight];
  if (!has_copies(w) || copies_.rows(weight)) return;
  copies_.add_rows(weight, w, allocate(MatrixCopies::row_bytes(w)));
}

void Plan::copy_tiles(int first, int second) {
  const Weight &a = weights_[first], &b = weights_[second];
  if (!has_copies(a) || copies_.tiles(first)) return;
  if (b.data <= a.data || b.data >= a.data + a.stride) return;
  const size_t tile = static_cast<size_t>(b.data - a.data);
  copies_.add_tiles(first, a, tile, allocate(tile * a.tiles()));
}

int Plan::add_buffer(int width, RowKind rows, bool packed, int per_row) {
  Buffer buffer;
  buffer.width = width;
  buffer.rows = rows;
  buffer.packed = packed;
  buffer.per_row = per_row;
  buffers_.push_back(std::move(buffer));
  capacity_ = {};  // the next step makes room for it
  return static_cast<int>(buffers_.size()) - 1;
}

int Plan::add_program() {
  programs_.emplace_back();
  return num_programs() - 1;
}

void Plan::add_embed(int out, int weight, int first, int vocab) {
  Program& program = programs_.back();
  program.vocab = std::min(program.vocab, vocab);
  add_op(make_embed(out, weight, first));
}

void Plan::add_input(int out) {
  int& width = programs_.back().input_width;
  if (width && width != buffers_[out].width)
    throw std::invalid_argument("a program has inputs of one width");
  width = buffers_[out].width;
  add_op(make_input(out));
}

void Plan::reads(int buffer, int weight, bool offset) {
  Buffer& b = buffers_[buffer];
  const Weight& w = weights_[weight];
  if (!b.packed || b.width != w.cols)
    throw std::invalid_argument("a linear op reads a packed buffer as wide as its weight");
  b.wanted[static_cast<int>(form(w, offset))] = true;
  capacity_ = {};  // the next step makes room for this form, also if the op is refused after all
  check_whole_rows(b);
  // Readers of different formats share the buffer: the longest padding serves all,
  // since each reads its own units from the start.
  const int unit = std::max({unit_columns(w.format), kGroup});
  b.columns = std::max(b.columns, (w.cols + unit - 1) / unit * unit);
}

void Plan::writes_pieces(int buffer) {
  buffers_[buffer].in_pieces = true;
  check_whole_rows(buffers_[buffer]);
}

// In the form of pairs of columns in float32.
void Plan::want_floats(int buffer) {
  buffers_[buffer].wanted[static_cast<int>(Form::kF32)] = true;
  capacity_ = {};  // the next step makes room for it
}

void Plan::adapts(int buffer) {
  if (adapted_.insert(buffer).second && has_adapters_) want_floats(buffer);
}

int Plan::add_adapter() {
  if (!has_adapters_)
    for (const int buffer : adapted_) want_floats(buffer);
  has_adapters_ = true;
  return adapters_.add();
}

// Gives every buffer room for the rows of the step; returns whether the buffers have
// moved. Grows by doubling, and never shrinks.
bool Plan::reserve(const Step& step) {
  std::array<int, kNumRowKinds> capacity = capacity_;
  for (size_t kind = 0; kind < kNumRowKinds; kind++)
    if (const int needed = rows_of(static_cast<RowKind>(kind), step); needed > capacity[kind])
      capacity[kind] = std::max(needed, 2 * capacity[kind]);
  if (capacity == capacity_) return false;
  const auto walk =
      [&](uint8_t* base) {  // lays all buffers out from `base` on; returns where they end
        size_t at = 0;
        const auto place = [&](size_t bytes) {
          uint8_t* p = base ? base + at : nullptr;
          if (std::max(at, bytes) > SIZE_MAX / 4) throw std::bad_alloc();
          const size_t padded = (bytes + 127) / 64 * 64;
          if (p) activations_->guard(p + bytes, padded - bytes);
          at += padded;
          return p;
        };
        for (Buffer& b : buffers_) {
          const auto rows_of = [&](size_t bytes) {
            return product({capacity[static_cast<size_t>(b.rows)], b.per_row}, bytes);
          };
          if (!b.packed)
            b.floats = reinterpret_cast<float*>(place(rows_of(static_cast<size_t>(b.width) * 4)));
          for (int f = 0; f < kNumForms; f++)
            if (b.wanted[f])
              b.forms[f] = place(rows_of(form_row_bytes(static_cast<Form>(f), b.columns)));
        }
        return at;
      };
  activations_.reset();
  capacity_ = {};  // so it stays if there is not enough memory
  const size_t bytes = walk(nullptr);
  check_fits_memory(bytes);
  activations_ = std::make_shared<Arena>(bytes);
  walk(activations_->data());
  capacity_ = capacity;
  return true;
}

void Plan::pack_columns(const Buffer& buffer, int row, int count, int first, const float* x,
                        size_t stride, int n) const {
  const Blocks& blocks = blocks_of(buffer);
  const int columns = first + n == buffer.width ? buffer.columns - first : n;
  while (count > 0) {
    const int b = blocks.of_row(row), rows = blocks.rows(b), m = row - blocks.first(b),
              here = std::min(count, rows - m);
    for (int f = 0; f < kNumForms;
         f++) {  // in every form the columns before `first` fill whole units of the block
      if (!buffer.wanted[f]) continue;
      const auto form = static_cast<Form>(f);
      kernels_->pack[f](x, stride, here, n, columns,
                        buffer.block(form, blocks, b) + form_column_bytes(form, first) * rows, rows,
                        m);
    }
    row += here, count -= here, x += here * stride;
  }
}

std::array<int, 2> Plan::kv_buffers(int group) {
  const KvCache& cache = kv(group);
  if (!is_quantised(cache.shape().type)) return {-1, -1};
  const int width = cache.heads() * cache.shape().key_dim;
  const auto [at, is_new] = kv_buffers_.try_emplace(width);
  if (is_new)
    for (int& buffer : at->second) buffer = add_buffer(width, RowKind::kStep, false);
  return at->second;
}

AttentionWork& Plan::attention_work(int group, int num_heads, int value_dim, int top_blocks) {
  auto& work = attention_work_[{group, num_heads, value_dim, top_blocks}];
  if (!work)
    work = std::make_unique<AttentionWork>(group, num_heads / kv(group).heads(),
                                           (*kv_)[static_cast<size_t>(group)],
                                           kv(group).shape().computed(value_dim), top_blocks);
  return *work;
}

ExpertsWork& Plan::experts_work(const ExpertsShape& shape) {
  auto& work = experts_work_[shape];
  if (!work) work = std::make_unique<ExpertsWork>(*this, shape);
  return *work;
}

// The first op from `op` on that has work for several threads. What is a single item is
// run on the way, while the others wait: that is as fast as a region of its own, and
// saves a barrier.
int Plan::advance(const Program& program, int op, const Step& step, int thread) {
  for (; op < static_cast<int>(program.ops.size()); op++) {
    Op& next = *program.ops[op];
    kv_ahead_->aim(*this, step, program, op);
    const int items = next.items(*this, step);
    if (items > 1) {
      deal_.reset(items);
      break;
    }
    if (items == 1) next.run(*this, step, 0, 1, thread);
    add_time(next);
  }
  return op;
}

bool Plan::run(int number, const Step& step) {
  pack_rest();
  const Program& program = programs_[static_cast<size_t>(number)];
  for (size_t kind = 0; kind < kNumRowKinds; kind++)
    blocks_[kind] = Blocks(rows_of(static_cast<RowKind>(kind), step), kernels_->max_rows);
  const bool moved = reserve(step);
  adapters_.begin(step);
  step_number_++;
  kv_ahead_->begin(*this, step);
  for (size_t g = 0; g < step.kv.size(); g++)
    (*kv_)[g].cache.use(*std::max_element(step.kv[g].slots, step.kv[g].slots + step.rows));
  last_time_ = now();
  FirstError error;
  const int n = static_cast<int>(program.ops.size());
  int op = advance(program, 0, step, 0);  // changed by one thread, between regions
  pool_->run([&](int thread) {
    while (op < n) {
      Op& region = *program.ops[op];
      error.guard([&] {
        int begin, end;
        while (deal_.next(thread, begin, end)) region.run(*this, step, begin, end, thread);
      });
      pool_->barrier([&] {
        int next = n;
        error.guard([&] {
          add_time(region);
          profile_.barriers++;
          if (!error) next = advance(program, op + 1, step, thread);
        });
        op = next;
      });
    }
  });
  error.rethrow();
  return moved;
}

void Plan::set_profiling(bool on) {
  profiling_ = on;
  profile_ = {};
}

// Books the time since the last call on `op`.
void Plan::add_time(const Op& op) {
  if (!profiling_) return;
  const double t = now(), seconds = t - last_time_;
  last_time_ = t;
  for (auto& [kind, total] : profile_.seconds)
    if (kind == op.kind) {
      total += seconds;
      return;
    }
  profile_.seconds.emplace_back(op.kind, seconds);
}

Plan::Profile Plan::profile() const { return profile_; }

}  // namespace headrace
