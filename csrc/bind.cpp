// Python's view of the plan and of the machine. Each batch is checked here, once; the
// ops trust what they get.
#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <variant>

#include "hardware.h"
#include "plan.h"
#include "processor.h"

namespace nb = nanobind;

namespace headrace {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
using Ints = Array<int32_t>;
using GivenScales =
    std::variant<Array<float>, Array<uint8_t>>;  // of the rows of a weight, or of its blocks
using GivenValues = std::optional<Array<int8_t>>;

// A weight as Python gives it, and its arrays, which stay until it is packed. The row order is
// copied: it is checked and then used without Python's lock.
struct GivenWeight {
  Array<uint8_t> data;
  std::optional<GivenScales> scales;
  GivenValues values;
  std::vector<int64_t> order;
  Stored stored;

  GivenWeight(const std::string& format, int rows, int cols, const Array<uint8_t>& codes,
              const std::optional<Array<int64_t>>& row_order,
              const std::optional<GivenScales>& given_scales, const GivenValues& given_values)
      : data(codes),
        scales(given_scales),
        values(given_values),
        stored{format, rows, cols, data.data(), data.size()} {
    if (values) stored.values = {values->data(), values->size()};
    if (row_order) order.assign(row_order->data(), row_order->data() + row_order->size());
    stored.row_order = order;
    if (!scales) return;
    if (const auto* of_rows = std::get_if<Array<float>>(&*scales))
      stored.row_scales = {of_rows->data(), of_rows->size()};
    if (const auto* of_blocks = std::get_if<Array<uint8_t>>(&*scales))
      stored.block_scales = {of_blocks->data(), of_blocks->size()};
  }
};

// What `f` makes of the plan without Python's lock; other threads get an error
// meanwhile.
auto unlocked(Plan& plan, auto&& f) {
  const OneCaller::Turn turn(plan.caller(), "the plan is at work in another thread: one at a time");
  nb::gil_scoped_release release;
  return f(plan);
}

// A signal ends the wait, and what Python raises for it is thrown.
int wait_for_weights(Plan& p) {
  constexpr int kLookEveryMs = 50;
  while (!unlocked(p, [](Plan& plan) { return plan.wait_for_weights(kLookEveryMs); }))
    if (PyErr_CheckSignals()) throw nb::python_error();
  return p.unreadable();
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const Weight& table_of(const Plan& plan, int weight) {
  require(weight >= 0 && weight < plan.num_weights() && is_table(plan.weight(weight).format),
          "there is no such matrix with a table");
  return plan.weight(weight);
}

void fill_table(Plan& p, int weight, int first, const Bytes& codes, const Bytes& scales,
                const std::optional<Bytes>& zeros, const std::optional<Bytes>& places) {
  const Weight& w = table_of(available(p), weight);
  const size_t count = codes.shape(0), numbers = static_cast<size_t>(w.shape.num_scales);
  require(first >= 0 && first % kTileRows == 0 && first <= w.rows &&
              count <= static_cast<size_t>(w.rows - first),
          "the rows of a matrix come in order, a multiple of 16 at a time");
  require(count % kTileRows == 0 || first + static_cast<int>(count) == w.rows,
          "all rows but the last come 16 at a time");
  require(codes.shape(1) == code_row_bytes(w),
          "a matrix has a code for each column, or for each one that is kept");
  const size_t place_bytes = (static_cast<size_t>(w.cols) + 7) / 8;
  require(places.has_value() == is_sparse(w.format) &&
              (!places || (places->shape(0) == count && places->shape(1) == place_bytes)),
          "a row of 2:4 weights has a bit for each column, other rows have none");
  const auto fits = [&](const Bytes& b, Number type) {
    return b.shape(0) == count && b.shape(1) == numbers * number_bytes(type);
  };
  require(fits(scales, w.shape.scales), "a row has a scale for each group of columns");
  require(zeros.has_value() == (w.shape.zeros != Number::kNone) &&
              (!zeros || fits(*zeros, w.shape.zeros)),
          "a row has a zero for each scale, or none at all in this format");
  const TableRows rows{
      first,         static_cast<int>(count),         codes.data(),
      scales.data(), zeros ? zeros->data() : nullptr, places ? places->data() : nullptr};
  unlocked(p, [&](Plan& to) { to.fill_table(weight, rows); });
}

void fill_table_blocks(Plan& p, int weight, const std::string& format, const Array<uint8_t>& data,
                       const std::optional<Array<int64_t>>& order) {
  const Weight& w = table_of(available(p), weight);
  const GivenWeight given(format, w.rows, w.cols, data, order, {}, {});
  unlocked(p, [&](Plan& plan) { plan.fill_table(weight, given.stored); });
}

KvRecord kv_record(const std::string& dtype, int key_dim, int value_dim) {
  require(key_dim > 0 && key_dim <= kMaxWidth, "a KV cache needs keys, of at most 2^24 numbers");
  require(value_dim >= 0 && value_dim <= kMaxWidth,
          "values have at most 2^24 numbers, or 0 where they are part of the keys");
  for (const auto& [name, type] : {std::pair("bf16", KvType::kBf16),
                                   {"f16", KvType::kF16},
                                   {"f32", KvType::kF32},
                                   {"int8", KvType::kInt8},
                                   {"int4", KvType::kInt4},
                                   {"k8v4", KvType::kK8V4}}) {
    if (dtype != name) continue;
    const bool is_latent = type == KvType::kK8V4 && !value_dim;  // values are a part of the keys
    return {is_latent ? KvType::kInt8 : type, key_dim, value_dim};
  }
  throw std::invalid_argument("unknown number format of keys and values: " + dtype);
}

constexpr const char* kVectorLength = "a vector has 1 to 2^24 numbers";
RowKind row_kind(const std::string& name) {
  for (const auto& [known, kind] : {std::pair("step", RowKind::kStep),
                                    {"gathered", RowKind::kGathered},
                                    {"logit", RowKind::kLogit},
                                    {"pooled", RowKind::kPooled}})
    if (name == known) return kind;
  throw std::invalid_argument("unknown rows of a buffer: " + name);
}

constexpr int kMaxContext = 1 << 30, kMaxRows = 1 << 24;

void check_sequences(const Step& s) {
  require(s.row_start[0] == 0 && s.row_start[s.num_seqs] == s.rows,
          "row_start must run from 0 to the number of rows");
  for (int b = 0; b < s.num_seqs; b++)
    require(s.row_start[b + 1] > s.row_start[b],
            "a sequence needs a row");  // so all lie in the step
  for (int b = 0; b < s.num_seqs; b++) {
    const int rows = s.row_start[b + 1] - s.row_start[b], context = s.context_len[b];
    require(s.scheduled_len[b] >= 0 && s.scheduled_len[b] <= rows,
            "a sequence has no more scheduled rows than rows");
    require(context >= 0 && context <= kMaxContext, "a context has no more than 2^30 tokens");
    for (int row = s.row_start[b]; row < s.row_start[b + 1]; row++) {
      require(s.positions[row] >= context && s.positions[row] <= context + row - s.row_start[b],
              "a position lies outside its sequence");
      const int drafts = rows - s.scheduled_len[b];
      for (int w = 0; s.ancestors && w < s.ancestor_words; w++) {
        const uint64_t bits = s.ancestors[static_cast<size_t>(row) * s.ancestor_words + w];
        const int num_bits = std::clamp(drafts - 64 * w, 0, 64);
        require(num_bits == 64 || bits >> num_bits == 0, "an ancestor lies outside its sequence");
      }
    }
  }
}

void check_slot(int slot, const KvCache& cache) {
  require(slot >= 0 && slot / kKvTile < cache.num_blocks(), "a slot lies outside the KV cache");
}

using BlockBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const KvCache& cache_of(const Plan& plan, int group, int block, size_t nbytes) {
  require(group >= 0 && group < static_cast<int>(plan.kv_groups().size()),
          "there is no such group of layers");
  const KvCache& cache = plan.kv(group);
  require(block >= 0 && block < cache.num_blocks(), "a block lies outside the KV cache");
  require(nbytes == cache.block_bytes(), "the bytes are not those of a block");
  return cache;
}

void check_kv(const Step& s, const KvRows& kv, const KvCache& cache) {
  for (int b = 0; b < s.num_seqs; b++) {
    const int blocks =
        (s.context_len[b] + s.row_start[b + 1] - s.row_start[b] + kKvTile - 1) / kKvTile;
    require(blocks <= kv.max_blocks, "a sequence needs more blocks than the block table has");
    for (int i = 0; i < blocks; i++) {
      const int block = kv.block_table[static_cast<size_t>(b) * kv.max_blocks + i];
      require(block >= 0 && block < cache.num_blocks(),
              "the block table names a block that is not there");
    }
  }
  for (int i = 0; i < s.rows; i++) check_slot(kv.slots[i], cache);
}

void check_step(const Step& s, const Plan& plan,
                int vocab) {  // tokens that the program has embeddings for
  require(s.rows >= 1 && s.num_seqs >= 1, "a step needs a row");
  check_sequences(s);
  for (size_t g = 0; g < s.kv.size(); g++) check_kv(s, s.kv[g], plan.kv(static_cast<int>(g)));
  for (int i = 0; i < s.rows; i++)
    require(s.tokens[i] >= 0 && s.tokens[i] < vocab, "a token lies outside the vocabulary");
  for (int i = 0; i < s.logit_rows + s.pooled_rows; i++)
    require(s.gathered_row[i] >= 0 && s.gathered_row[i] < s.rows,
            "a logit row or a pooled row lies outside the step");
}

// Copies of the numbers that a step is steered by: while it runs, without Python's
// lock, other threads may write to the arrays.
class Copies {
 public:
  const int32_t* operator()(const Ints& array) {
    return ints_.emplace_back(array.data(), array.data() + array.size()).data();
  }
  const int32_t* operator()(const Ints& array, const std::optional<Ints>& behind) {
    (*this)(array);
    if (behind)
      ints_.back().insert(ints_.back().end(), behind->data(), behind->data() + behind->size());
    return ints_.back().data();
  }
  const uint64_t* operator()(const Array<uint64_t>& array) {
    words_.assign(array.data(), array.data() + array.size());
    return words_.data();
  }

 private:
  std::vector<std::vector<int32_t>> ints_;
  std::vector<uint64_t> words_;
};

// slots [T] and block_table [B, blocks] of each group, or nothing at all where the
// program keeps nothing.
std::vector<KvRows> kv_rows(const std::vector<std::pair<Ints, Ints>>& kv, const Plan& plan,
                            bool keeps, size_t rows, size_t seqs, Copies& copy) {
  require(kv.size() == plan.kv_groups().size() || (kv.empty() && !keeps),
          "a step needs the slots and the block table of every group of layers");
  std::vector<KvRows> all;
  for (const auto& [slots, block_table] : kv) {
    require(slots.size() == rows, "a group of layers needs a slot for each row");
    require(block_table.ndim() == 2 && block_table.shape(0) == seqs &&
                block_table.shape(1) <= kMaxContext / kKvTile,
            "block_table must be [sequences, blocks]");
    all.push_back({copy(slots), copy(block_table), static_cast<int>(block_table.shape(1))});
  }
  return all;
}

// tokens, positions [T]; row_start [B + 1]; context_len, scheduled_len [B]; (slots,
// block_table) of each group; ancestors [T, words]; logit_rows [R]; pooled_rows [P] or
// none; inputs [T, width] or none; adapters [B] or none
bool run(Plan& plan, const Ints& tokens, const Ints& positions, const Ints& row_start,
         const Ints& context_len, const Ints& scheduled_len,
         const std::vector<std::pair<Ints, Ints>>& kv,
         const std::optional<Array<uint64_t>>& ancestors, const Ints& logit_rows,
         const std::optional<Ints>& pooled_rows, const std::optional<Array<float>>& inputs,
         int program, const std::optional<Ints>& adapters) {
  const OneCaller::Turn turn(plan.caller(), "the plan is at work in another thread: one at a time");
  require(program >= 0 && program < plan.num_programs(), "a plan has no such program");
  require(
      tokens.size() <= kMaxRows && logit_rows.size() <= kMaxRows && context_len.size() <= kMaxRows,
      "a step has at most 2^24 rows");
  require(!pooled_rows || pooled_rows->size() <= kMaxRows, "a step has at most 2^24 pooled rows");
  Copies copy;
  Step s{};
  s.rows = static_cast<int>(tokens.size());
  s.num_seqs = static_cast<int>(context_len.size());
  s.logit_rows = static_cast<int>(logit_rows.size());
  s.pooled_rows = pooled_rows ? static_cast<int>(pooled_rows->size()) : 0;
  require(positions.size() == tokens.size() && row_start.size() == context_len.size() + 1 &&
              scheduled_len.size() == context_len.size(),
          "the arrays of a step must agree in length");
  s.tokens = copy(tokens), s.positions = copy(positions), s.row_start = copy(row_start);
  s.context_len = copy(context_len), s.scheduled_len = copy(scheduled_len),
  s.gathered_row = copy(logit_rows, pooled_rows);
  s.kv = kv_rows(kv, plan, plan.program(program).keeps, tokens.size(), context_len.size(), copy);
  if (ancestors) {
    require(ancestors->ndim() == 2 && ancestors->shape(0) == tokens.size() &&
                ancestors->shape(1) <= tokens.size() / 64 + 1,
            "ancestors must be [rows, words], with no more words than rows have bits");
    s.ancestors = copy(*ancestors);
    s.ancestor_words = static_cast<int>(ancestors->shape(1));
  }
  const int width = plan.program(program).input_width;
  require(inputs.has_value() == (width > 0),
          "a program has input rows, or none: the step must be alike");
  if (inputs) {
    require(inputs->ndim() == 2 && inputs->shape(0) == tokens.size() &&
                inputs->shape(1) == static_cast<size_t>(width),
            "inputs must be [rows, the width that the program reads]");
    s.inputs = inputs->data();
  }
  if (adapters) {
    require(adapters->size() == context_len.size(), "adapters has a number for each sequence");
    s.adapters = copy(*adapters);
    for (int b = 0; b < s.num_seqs; b++)
      require(s.adapters[b] == -1 || plan.adapters().has(s.adapters[b]),
              "there is no such adapter");
  }
  check_step(s, plan, plan.program(program).vocab);
  nb::gil_scoped_release release;
  return plan.run(program, s);
}

constexpr int kMaxRank = 1 << 12;

// An adapter of matrices down [rank, columns] and up [rows, rank], with a scale, for
// some weights; returns its number.
int add_adapter(Plan& plan,
                const std::vector<std::tuple<int, Array<float>, Array<float>, float>>& matrices) {
  available(plan);
  std::vector<std::pair<int, LowRank>> all;
  for (const auto& [id, down, up, scale] : matrices) {
    require(id >= 0 && id < plan.num_weights(), "a plan has no such weight");
    const Weight& weight = plan.weight(id);
    require(down.ndim() == 2 && up.ndim() == 2 && down.shape(0) == up.shape(1),
            "down is [rank, columns], and up [rows, rank]");
    require(down.shape(0) > 0 && down.shape(0) <= kMaxRank, "an adapter has a rank of 1 to 4,096");
    require(down.shape(1) == static_cast<size_t>(weight.cols) &&
                up.shape(0) == static_cast<size_t>(weight.rows),
            "an adapter has the shape of its weight");
    all.emplace_back(id, LowRank(down.data(), up.data(), scale, static_cast<int>(down.shape(0)),
                                 weight.rows, weight.cols));
  }
  const int adapter = plan.add_adapter();
  for (auto& [id, low_rank] : all) plan.adapters().put(adapter, id, std::move(low_rank));
  return adapter;
}

int checked_threads(int threads) {
  require(threads <= 1024, "a pool has at most 1,024 threads");
  return threads;
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> floats_of(Plan& plan, int id, int rows) {
  require(id >= 0 && id < available(plan).num_buffers(), "a plan has no such buffer");
  const Buffer& b = plan.buffer(id);
  if (!b.floats)
    throw std::invalid_argument(
        "a packed buffer, or one of a plan that has not run, has no float rows");
  require(rows >= 0 && static_cast<size_t>(rows) <= plan.capacity(b),
          "a buffer has not so many rows");
  const size_t shape[] = {static_cast<size_t>(rows), static_cast<size_t>(b.width)};
  using Owner = std::shared_ptr<Arena>;  // the memory stays while there is a view of it, also when
                                         // the plan has moved on to a larger one
  nb::capsule owner(new Owner(plan.activations()),
                    [](void* p) noexcept { delete static_cast<Owner*>(p); });
  return {b.row(0), 2, shape, owner};
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<Pool>(m, "Pool").def(
      "__init__", [](Pool* self, int threads) { new (self) Pool(checked_threads(threads)); },
      nb::arg("threads"));
  nb::class_<Plan> plan(m, "Plan");
  plan.def(
          "__init__",
          [](Plan* self, const std::string& isa, std::shared_ptr<Pool> pool) {
            require(pool != nullptr, "a plan needs threads");
            new (self) Plan(kernels_for(isa), std::move(pool));
          },
          nb::arg("isa"), nb::arg("pool"),
          "A plan on the threads of another, which never runs at the same time.")
      .def(
          "__init__",
          [](Plan* self, const std::string& isa, int threads) {
            new (self) Plan(kernels_for(isa), std::make_shared<Pool>(checked_threads(threads)));
          },
          nb::arg("isa"), nb::arg("threads"))
      .def(
          "__init__",
          [](Plan* self, Plan* shared, bool own_kv) {
            new (self) Plan(&available(*shared), own_kv);
          },
          nb::arg("shared"), nb::arg("own_kv") = false, nb::keep_alive<1, 2>(),
          "A plan over the weights of another, which never runs at the same time, and over its KV "
          "or KV of its own. It has no ops, buffers and adapters yet.")
      .def(
          "add_kv_group",
          [](Plan& p, int layers, int kv_heads, int key_dim, int value_dim, int window, int blocks,
             const std::string& kv_dtype, int num_sink_tokens, bool has_bounds) {
            require(layers >= 0 && kv_heads > 0 && blocks > 0 && blocks <= kMaxContext / kKvTile,
                    "a KV cache needs heads and blocks, and its layers are a number from 0 on");
            require(key_dim % 2 == 0 && value_dim % 2 == 0, "a KV cache needs even head sizes");
            require(kv_heads <= kMaxWidth / std::max({key_dim, value_dim, 1}),
                    "a KV cache is not so wide");
            require(window >= 0, "a window is a number of positions");
            require(num_sink_tokens >= 0 && num_sink_tokens <= (window ? kMaxContext : 0),
                    "sinks are the first tokens, beside a window");
            available(p).add_kv_group({KvCache(layers, kv_heads, blocks,
                                               kv_record(kv_dtype, key_dim, value_dim), has_bounds),
                                       window, num_sink_tokens});
          },
          nb::arg("layers"), nb::arg("kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"),
          nb::arg("window"), nb::arg("blocks"), nb::arg("kv_dtype"), nb::arg("num_sink_tokens") = 0,
          nb::arg("has_bounds") = false,
          "Layers that keep alike and see alike, without values (0) where they are part of the "
          "keys; with the bounds of the keys of each block. Groups are numbered in the order in "
          "which they come.")
      .def(
          "set_key_rounding",
          [](Plan& p, int group, int layer, int head, const Array<float>& centre,
             const Array<float>& feedback) {
            require(group >= 0 && group < static_cast<int>(available(p).kv_groups().size()),
                    "there is no such group of layers");
            const KvCache& cache = p.kv(group);
            const KvRecord& shape = cache.shape();
            require(layer >= 0 && layer < cache.layers() && head >= 0 && head < cache.heads(),
                    "there is no such layer and KV head");
            const size_t n = static_cast<size_t>(shape.key_dim),
                         columns = static_cast<size_t>(shape.key_columns());
            require(is_quantised(shape.type) && shape.key_bits() == 4 && shape.value_dim,
                    "keys with a rounding of their own are in int4, with values of their own");
            require(centre.size() == n && feedback.size() == n * n,
                    "a rounding has a centre and a square matrix, as wide as a key");
            KeyRounding rounding{{centre.data(), centre.data() + n}, {}};
            rounding.feedback.resize(n * columns);
            for (size_t i = 0; i < n; i++)
              for (size_t j = i + 1; j < n; j++)
                rounding.feedback[i * columns + j] = static_cast<uint16_t>(
                    __builtin_bit_cast(uint32_t, feedback.data()[i * n + j]) >> 16);
            p.set_key_rounding(group, layer, head, std::move(rounding));
          },
          nb::arg("group"), nb::arg("layer"), nb::arg("head"), nb::arg("centre"),
          nb::arg("feedback"),
          "How int4 keys of a KV head are rounded from now on: what they are stored without, and "
          "what the error of each number adds to later ones, in bf16 above the diagonal.")
      .def(
          "start_kv", [](Plan& p) { available(p).start_kv(); },
          "Begins to make KV memory resident ahead of its use.")
      .def(
          "use_float_activations", [](Plan& p) { available(p).use_float_activations(); },
          "From now on quantised weights are multiplied with float32 activations; not those of "
          "int8 by row.")
      .def(
          "add_weight",
          [](Plan& p, const std::string& format, int rows, int cols, const Array<uint8_t>& data,
             const std::optional<Array<int64_t>>& order, const std::optional<GivenScales>& scales,
             const GivenValues& values, bool mapped) {
            const auto weight =
                std::make_shared<GivenWeight>(format, rows, cols, data, order, scales, values);
            return unlocked(
                p, [&](Plan& plan) { return plan.add_weight(weight->stored, weight, mapped); });
          },
          nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::arg("row_order").none(), nb::arg("scales").none() = nb::none(),
          nb::arg("values").none() = nb::none(), nb::arg("mapped") = false,
          "A matrix, which `start_weights` or the next run packs. Scales that lie apart are those "
          "of rows, as floats, or of the blocks of each row, as bytes. Values are what codes are "
          "the numbers\n"
          "of, where these are integers that come with the matrix: 16, or the points of a grid, "
          "[points, columns of a point]. `mapped`: the data are pages of a file, given back after "
          "packing.")
      .def(
          "add_weight_pair",
          [](Plan& p, const std::string& format_a, const Array<uint8_t>& a,
             const std::optional<GivenScales>& scales_a, const std::string& format_b,
             const Array<uint8_t>& b, const std::optional<GivenScales>& scales_b, int rows,
             int cols, const GivenValues& values, bool mapped) {
            using Pair = std::pair<GivenWeight, GivenWeight>;
            const auto pair =
                std::make_shared<Pair>(GivenWeight(format_a, rows, cols, a, {}, scales_a, values),
                                       GivenWeight(format_b, rows, cols, b, {}, scales_b, values));
            return unlocked(p, [&](Plan& plan) {
              return plan.add_weight_pair(pair->first.stored, pair->second.stored, pair, mapped);
            });
          },
          nb::arg("format_a"), nb::arg("a"), nb::arg("scales_a").none(), nb::arg("format_b"),
          nb::arg("b"), nb::arg("scales_b").none(), nb::arg("rows"), nb::arg("cols"),
          nb::arg("values").none() = nb::none(), nb::arg("mapped") = false)
      .def(
          "start_weights", [](Plan& p) { available(p).start_weights(); },
          "Pack the weights in a thread, on the threads of the plan.")
      .def("wait_for_weights", &wait_for_weights,
           "Wait until all weights are packed. Returns the number of one whose file could not be "
           "read, or -1.")
      .def(
          "reserve_weights", [](Plan& p, size_t nbytes) { available(p).reserve_weights(nbytes); },
          nb::arg("nbytes"), "Make room for the weights that come next, in one piece.")
      .def(
          "add_table", [](Plan& p, const TableSpec& spec) { return available(p).add_table(spec); },
          nb::arg("spec"), "A matrix whose rows `fill_table` brings; returns its number.")
      .def(
          "add_table_pair",
          [](Plan& p, const TableSpec& a, const TableSpec& b) {
            return available(p).add_table_pair(a, b);
          },
          nb::arg("a"), nb::arg("b"))
      .def("fill_table", &fill_table, nb::arg("weight"), nb::arg("first"), nb::arg("codes"),
           nb::arg("scales"), nb::arg("zeros").none(), nb::arg("places").none() = nb::none(),
           "Rows from `first` on, a multiple of 16: codes [rows, columns], and the bytes of scales "
           "and zeros [rows, bytes of a row]. 2:4 weights have the bytes of kept codes, and places "
           "[rows, (columns + 7) / 8], a bit for each column.")
      .def("fill_table_blocks", &fill_table_blocks, nb::arg("weight"), nb::arg("format"),
           nb::arg("data"), nb::arg("row_order").none(),
           "All rows, as blocks of a file; those that are codes with scales of 16 bits.")
      .def("add_vector",
           [](Plan& p, const Array<float>& data) {
             require(data.size() > 0 && data.size() <= kMaxWidth, kVectorLength);
             return available(p).add_vector(data.data(), static_cast<int>(data.size()));
           })
      .def(
          "add_buffer",
          [](Plan& p, int width, const std::string& rows, bool packed) {
            require(width > 0 && width <= kMaxWidth, "a buffer is 1 to 2^24 numbers wide");
            return available(p).add_buffer(width, row_kind(rows), packed);
          },
          nb::arg("width"), nb::arg("rows"), nb::arg("packed"))
      .def(
          "add_program", [](Plan& p) { return available(p).add_program(); },
          "Begin another program over the same weights, KV and buffers; returns its number.")
      .def("run", &run, nb::arg("tokens"), nb::arg("positions"), nb::arg("row_start"),
           nb::arg("context_len"), nb::arg("scheduled_len"), nb::arg("kv"),
           nb::arg("ancestors").none(), nb::arg("logit_rows"),
           nb::arg("pooled_rows").none() = nb::none(), nb::arg("inputs").none() = nb::none(),
           nb::arg("program") = 0, nb::arg("adapters").none() = nb::none(),
           "Run a step; returns whether the buffers have moved.")
      .def("add_adapter", &add_adapter, nb::arg("matrices"),
           "An adapter: (weight, down [rank, columns], up [rows, rank], scale) for some weights. "
           "Returns its number.")
      .def(
          "remove_adapter",
          [](Plan& p, int adapter) {
            require(available(p).adapters().has(adapter), "there is no such adapter");
            p.adapters().remove(adapter);
          },
          "Give the memory of an adapter back; its number may come again.")
      .def("adapter_bytes",
           [](const Plan& p, int adapter) {
             require(available(p).adapters().has(adapter), "there is no such adapter");
             return p.adapters().bytes(adapter);
           })
      .def("floats", &floats_of,
           "A view of the float rows of a buffer; valid until the next run overwrites them or "
           "moves the buffers.")
      .def("move_slots",
           [](Plan& p, int group, const Ints& source, const Ints& target) {
             require(group >= 0 && group < static_cast<int>(p.kv_groups().size()),
                     "there is no such group of layers");
             require(source.size() == target.size(), "moves need as many targets as sources");
             const KvCache& cache = p.kv(group);
             Copies copy;
             const std::span from(copy(source), source.size()), to(copy(target), target.size());
             for (const auto slots : {from, to})
               for (const int slot : slots) check_slot(slot, cache);
             unlocked(p, [&](Plan&) {
               for (size_t i = 0; i < from.size(); i++) cache.move(from[i], to[i]);
               if (!cache.has_bounds()) return;
               std::set<int> moved;
               for (const int slot : to) moved.insert(slot / kKvTile);
               for (const int block : moved) cache.find_bounds(block);
             });
           })
      .def(
          "read_block",
          [](const Plan& p, int group, int block, const BlockBytes& to) {
            const KvCache& cache = cache_of(p, group, block, to.size());
            uint8_t* const data = to.data();
            nb::gil_scoped_release release;
            cache.copy_out(block, data);
          },
          nb::arg("group"), nb::arg("block"), nb::arg("to"),
          "Copy the KV of a block out. Another thread may do so during a run that leaves the block "
          "alone.")
      .def(
          "write_block",
          [](Plan& p, int group, int block, const Array<uint8_t>& from) {
            const KvCache& cache = cache_of(p, group, block, from.size());
            const uint8_t* const data = from.data();
            unlocked(p, [&](Plan&) { cache.copy_in(block, data); });
          },
          nb::arg("group"), nb::arg("block"), nb::arg("source"),
          "Fill a block with KV that `read_block` copied from a block of the same form.")
      .def(
          "block_bytes",
          [](const Plan& p) {
            std::vector<size_t> bytes;
            for (const KvGroup& group : p.kv_groups()) bytes.push_back(group.cache.block_bytes());
            return bytes;
          },
          "Bytes that `read_block` copies, for each group.")
      .def("set_profiling", [](Plan& p, bool on) { available(p).set_profiling(on); })
      .def("profile",
           [](const Plan& p) {
             const Plan::Profile profile = available(p).profile();
             return std::make_pair(profile.seconds, profile.barriers);
           })
      .def_prop_ro("isa", [](const Plan& p) { return std::string(p.kernels().name); })
      .def_prop_ro("threads", &Plan::threads)
      .def_prop_ro("pool", &Plan::pool, "Its threads, for other work between two runs.")
      .def_prop_ro("weight_bytes", &Plan::weight_bytes)
      .def_prop_ro(
          "kv_bytes",
          [](const Plan& p) {
            std::vector<size_t> bytes;
            for (const KvGroup& group : p.kv_groups()) bytes.push_back(group.cache.bytes());
            return bytes;
          },
          "Bytes of the KV of each group.");
  bind_ops(plan);
  m.def(
      "kv_block_bytes",
      [](const std::string& dtype, int key_dim, int value_dim) {
        return kv_record(dtype, key_dim, value_dim).bytes();
      },
      nb::arg("kv_dtype"), nb::arg("key_dim"), nb::arg("value_dim"),
      "Bytes of the keys and values of 32 tokens, of one layer and KV head.");
  m.def("kv_bytes_ahead", &kv_bytes_ahead, nb::arg("bytes"),
        "Bytes of the KV memory of a group of layers that are resident ahead of those in use.");
  m.def("packed_bytes", &packed_bytes, nb::arg("format"), nb::arg("rows"), nb::arg("cols"),
        "Bytes that a matrix in this stored format takes once it is packed.");
  m.def(
      "copy_bytes",
      [](const std::string& format, int rows, int cols, bool by_rows) {
        Weight w{packed_format(format), rows, cols, {}, 0, nullptr};
        w.shape.units = (cols + unit_columns(w.format) - 1) / unit_columns(w.format);
        return copy_bytes(w, by_rows);
      },
      nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("by_rows"),
      "Bytes of a copy of a matrix in this stored format, of which kernels read rows or columns; "
      "0: "
      "none has one.");
  m.def(
      "vector_bytes",
      [](int n) {
        require(n > 0 && n <= kMaxWidth, kVectorLength);
        return vector_bytes(n);
      },
      nb::arg("n"), "Bytes that a vector of n floats takes.");
  m.def("isas", &available_isas,
        "Instruction sets that this build has and this processor can run, best last.");
  m.def("isa", [] { return available_isas().back(); }, "The best of `isas()`, used by default.");
  m.def("processor_isas", &processor_isas,
        "Instruction sets of this processor that kernels exist for, best last.");
  m.def(
      "read_bandwidth",
      [](int threads, size_t nbytes) { return read_bandwidth(checked_threads(threads), nbytes); },
      nb::call_guard<nb::gil_scoped_release>(), nb::arg("threads"), nb::arg("nbytes"));
  m.def(
      "dot_rate",
      [](const std::string& kind, int threads) { return dot_rate(kind, checked_threads(threads)); },
      nb::call_guard<nb::gil_scoped_release>(), nb::arg("kind"), nb::arg("threads"));
}

}  // namespace headrace
