// The builder of a plan as Python sees it: each op is checked here, with the shapes of
// all that it touches, and runs without a check.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bind.h"
#include "experts_work.h"
#include "plan.h"

namespace nb = nanobind;

namespace headrace {
namespace {

constexpr int kMaxHeadDim = 1 << 12;
constexpr int kMaxTopBlocks = 1 << 21;
constexpr int kMaxExperts = 1 << 16;
constexpr int kMaxTopK = 1 << 10;

const Buffer& buffer(const Plan& p, int id) {
  available(p);
  require(id >= 0 && id < p.num_buffers(), "a plan has no such buffer");
  return p.buffer(id);
}

const Buffer& floats(const Plan& p, int id) {
  const Buffer& b = buffer(p, id);
  require(!b.packed, "an op works on a buffer of floats here, not on a packed one");
  return b;
}

// Floats with a row for each row of the step.
const Buffer& row_floats(const Plan& p, int id) {
  const Buffer& b = floats(p, id);
  require(b.rows == RowKind::kStep,
          "an op works on a buffer with all rows here, not with some of them");
  return b;
}

const Weight& weight(const Plan& p, int id) {
  require(id >= 0 && id < p.num_weights(), "a plan has no such weight");
  return p.weight(id);
}

void check_vector(const Plan& p, int id, int length) {
  require(id >= 0 && id < p.num_vectors() && p.vector_length(id) == length,
          "a vector is not there, or not as long as what it goes with");
}

void check_bias(const Plan& p, int id, int length) {
  if (id != -1) check_vector(p, id, length);
}

void check_cap(float cap) {
  require(cap >= 1e-6f && cap <= 1e6f, "a cap lies between 1e-6 and 1e6");
}

void check_alike(const Buffer& a, const Buffer& b) {
  require(a.width == b.width && a.rows == b.rows,
          "an op works on buffers of one width, all with the same rows of a step");
}

// A vector of one number for each of `size` columns, which all groups of columns share,
// or for each of all columns.
void check_column_vector(const Plan& p, int id, int size, int width) {
  require(id >= 0 && id < p.num_vectors() &&
              (p.vector_length(id) == size || p.vector_length(id) == width),
          "a vector of a norm has a number for each column of a group, or for each of all");
}

NormKind norm_kind(const std::string& name) {
  for (const auto& [known, kind] : {std::pair("rms", NormKind::kRms), {"layer", NormKind::kLayer}})
    if (name == known) return kind;
  throw std::invalid_argument("unknown kind of norm: " + name);
}

Activation activation_of(const std::string& name) {
  for (const auto& [known, activation] : {std::pair("silu", Activation::kSilu),
                                          {"gelu", Activation::kGelu},
                                          {"gelu_tanh", Activation::kGeluTanh},
                                          {"relu", Activation::kRelu},
                                          {"clamped_swiglu", Activation::kClampedSwiglu}})
    if (name == known) return activation;
  throw std::invalid_argument("unknown activation: " + name);
}

// The activation of a value without a gate.
Activation alone(const Plan& p, const std::string& name) {
  const Activation activation = activation_of(name);
  require(p.kernels().activate[static_cast<int>(activation)] != nullptr,
          "this activation belongs to gates alone");
  return activation;
}

// The weight that a packed buffer is multiplied with.
const Weight& factor(Plan& p, int x, int w, bool offset) {
  buffer(p, x);
  const Weight& of = weight(p, w);
  p.reads(x, w, offset);
  return of;
}

void check_angles(const Plan& p, int angles, int head_dim) {
  require(head_dim > 0 && head_dim <= kMaxHeadDim, "a rope needs a head size");
  require(row_floats(p, angles).width == angles_width(head_dim),
          "angles are those of another head size");
}

// (group, place in it) of a layer that the last program reads or writes.
KvLayer kv_layer(Plan& p, std::array<int, 2> layer) {
  const auto [group, place] = layer;
  require(group >= 0 && group < static_cast<int>(p.kv_groups().size()),
          "there is no such group of layers");
  require(place >= 0 && place < p.kv(group).layers(), "there is no such layer in its group");
  p.keeps();
  return {group, place};
}

// A buffer that takes the embeddings of all rows.
void check_embedding(const Plan& p, int out, int w) {
  require(buffer(p, out).rows == RowKind::kStep && p.buffer(out).width == weight(p, w).cols,
          "an embedding is as wide as its buffer, which has all rows");
}

void embed(Plan& p, int out, int w, int first, int vocab) {
  check_embedding(p, out, w);
  const int rows = p.weight(w).rows;
  if (vocab == 0) vocab = rows;
  require(first >= 0 && rows <= vocab && first <= vocab - rows,
          "a weight has a part of the vocabulary");
  p.add_embed(out, w, first, vocab);
}

void embed_position(Plan& p, int out, int w) {
  check_embedding(p, out, w);
  p.add_op(make_embed_position(out, w));
}

void input(Plan& p, int out) {
  require(buffer(p, out).rows == RowKind::kStep, "input rows are all rows of a step");
  p.add_input(out);
}

// Of gathered rows a norm may take those that have logits, or those that are pooled.
void norm(Plan& p, int out, int x, int w, int bias, const std::string& kind, int size, float eps,
          int rank, int ranks) {
  const bool takes_some =
      floats(p, x).rows == RowKind::kGathered && buffer(p, out).rows >= RowKind::kLogit;
  require(buffer(p, out).width == p.buffer(x).width &&
              (takes_some || p.buffer(out).rows == p.buffer(x).rows),
          "a norm works on buffers of one width, with the same rows of a step, or some of the "
          "gathered ones");
  const int width = p.buffer(x).width;
  require(size > 0 && width % size == 0, "a norm takes whole groups of columns");
  check_column_vector(p, w, size, width);
  if (bias != -1) check_column_vector(p, bias, size, width);
  require(std::isfinite(eps) && eps >= 0, "the epsilon of a norm is a number, not below 0");
  require(ranks > 0 && rank >= 0 && rank < ranks && (ranks == 1 || !p.buffer(out).packed),
          "a rank norms a part of the rows of floats");
  p.add_op(make_norm({out, x, w, bias, norm_kind(kind), size, eps, rank, ranks}));
}

int rope_angles(Plan& p, std::vector<double> inverse_frequencies, double scale, int head_dim) {
  require(head_dim > 0 && head_dim % 2 == 0 && head_dim <= kMaxHeadDim,
          "a rope needs an even head size");
  const int out = available(p).add_buffer(angles_width(head_dim), RowKind::kStep, false);
  p.add_op(make_rope_angles(out, std::move(inverse_frequencies), scale, head_dim));
  return out;
}

void rope(Plan& p, int out, int x, int angles, int head_dim) {
  check_angles(p, angles, head_dim);
  require(row_floats(p, x).width % head_dim == 0, "a rope rotates whole heads");
  check_alike(buffer(p, out), p.buffer(x));
  p.add_op(make_rope(out, x, angles, head_dim));
}

void pack_rows(Plan& p, int out, int x, std::vector<int32_t> order) {
  check_alike(buffer(p, out), floats(p, x));
  require(p.buffer(out).packed, "what is packed goes to a packed buffer");
  const int width = p.buffer(x).width;
  require(order.empty() || order.size() == static_cast<size_t>(width), "an order has all columns");
  for (const int32_t column : order)
    require(column >= 0 && column < width, "an order names a column that is not there");
  p.add_op(make_pack(out, x, std::move(order)));
}

void gather_rows(Plan& p, int out, int x) {
  require(
      buffer(p, out).rows == RowKind::kGathered && row_floats(p, x).width == p.buffer(out).width,
      "gathered rows are as wide as the rows that they come from");
  p.add_op(make_gather_rows(out, x));
}

void take_columns(Plan& p, int out, int x, int first) {
  require(first >= 0 && buffer(p, out).width <= floats(p, x).width - first &&
              p.buffer(out).rows == p.buffer(x).rows,
          "an op takes columns that are there, of the same rows");
  p.add_op(make_take_columns(out, x, first));
}

using Rows = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

Rows rows_of(const Plan& p, int id, const Step& step) {
  const Buffer& b = p.buffer(id);
  return Rows(b.floats, {static_cast<size_t>(Plan::rows_of(b, step)), static_cast<size_t>(b.width)},
              nb::none());
}

void exchange(Plan& p, const std::string& kind, int out, const std::vector<int>& inputs,
              nb::callable f) {
  if (out != -1) floats(p, out);
  for (const int x : inputs)
    require(floats(p, x).width > 0 && x != out,
            "an exchange cannot overwrite the rows that it reads");
  p.add_op(make_exchange(kind, [f = std::move(f), out, inputs](const Plan& plan, const Step& step) {
    nb::gil_scoped_acquire lock;
    nb::list read;
    for (const int x : inputs) read.append(rows_of(plan, x, step));
    f(out == -1 ? nb::none() : nb::cast(rows_of(plan, out, step)), *read);
  }));
}

void add(Plan& p, int out, int x, int y) {
  check_alike(buffer(p, out), floats(p, x));
  check_alike(p.buffer(out), floats(p, y));
  p.add_op(make_add(out, x, y));
}

void glu(Plan& p, int out, int gate, int up, const std::string& activation) {
  check_alike(buffer(p, out), floats(p, gate));
  check_alike(p.buffer(out), floats(p, up));
  p.add_op(make_glu(out, gate, up, activation_of(activation)));
}

void activate(Plan& p, int out, int x, const std::string& activation) {
  check_alike(buffer(p, out), floats(p, x));
  p.add_op(make_activate(out, x, alone(p, activation)));
}

void scale(Plan& p, int out, int x, float factor) {
  check_alike(buffer(p, out), floats(p, x));
  p.add_op(make_scale(out, x, factor));
}

void soft_cap(Plan& p, int out, int x, float cap) {
  check_alike(buffer(p, out), floats(p, x));
  check_cap(cap);
  p.add_op(make_soft_cap(out, x, cap));
}

void exit_choice(Plan& p, int out, int early, int late, float min_margin) {
  check_alike(buffer(p, out), floats(p, early));
  if (late != -1) check_alike(p.buffer(out), floats(p, late));
  p.add_op(make_exit_choice(out, early, late, min_margin));
}

void gate_rows(Plan& p, int out, int x, int gate) {
  check_alike(buffer(p, out), floats(p, x));
  require(floats(p, gate).width == 1 && p.buffer(gate).rows == p.buffer(out).rows,
          "a row has one gate");
  p.add_op(make_gate_rows(out, x, gate));
}

// Adds the op that comes before a linear op over these weights.
void adapt(Plan& p, int x, std::vector<int> weights) {
  p.adapts(x);
  p.add_op(make_adapter_down(p.adapters(), x, std::move(weights)));
}

void linear(Plan& p, int out, int x, int w, int bias, int residual, bool offset) {
  const int rows = factor(p, x, w, offset).rows;
  require(floats(p, out).width == rows && p.buffer(out).rows == p.buffer(x).rows,
          "a linear op writes as many columns as its weight has rows");
  check_bias(p, bias, rows);
  if (residual != -1) check_alike(p.buffer(out), floats(p, residual));
  adapt(p, x, {w});
  p.add_op(make_linear(out, x, w, bias, residual, offset));
}

// The columns of the weight that no row needs are not read.
void sparse_linear(Plan& p, int out, int x, int w, int bias, int residual) {
  const int rows = factor(p, x, w, false).rows;
  require(floats(p, out).width == rows && p.buffer(out).rows == p.buffer(x).rows,
          "a linear op writes as many columns as its weight has rows");
  check_bias(p, bias, rows);
  if (residual != -1) check_alike(p.buffer(out), floats(p, residual));
  p.copy_columns(w);
  adapt(p, x, {w});
  p.add_op(make_sparse_linear(out, x, w, bias, residual));
}

void threshold(Plan& p, int out, int x, float least) {
  check_alike(buffer(p, out), floats(p, x));
  require(std::isfinite(least) && least >= 0, "a threshold is a number, not below 0");
  p.add_op(make_threshold(out, x, least));
}

// What writes tile by tile, packed or not, what it multiplies with `rows` rows of
// weights.
void check_tiled(Plan& p, int out, int x, int rows) {
  require(buffer(p, out).width == rows && p.buffer(out).rows == p.buffer(x).rows,
          "a linear op writes as many columns as its weights have rows");
  require(out != x, "a linear op cannot overwrite the rows that it reads");
  p.writes_pieces(out);
}

void linear_activate(Plan& p, int out, int x, int w, int bias, const std::string& activation) {
  const Activation by = alone(p, activation);
  const int rows = factor(p, x, w, false).rows;
  check_bias(p, bias, rows);
  check_tiled(p, out, x, rows);
  adapt(p, x, {w});
  p.add_op(make_linear_activate(out, x, w, bias, by));
}

void glu_linear(Plan& p, int out, int x, int gate, int up, int gate_bias, int up_bias,
                const std::string& activation, bool skips) {
  const Activation by = activation_of(activation);
  require(!skips || by == Activation::kRelu, "only ReLU makes zeros to skip");
  const int rows = factor(p, x, gate, false).rows;
  require(factor(p, x, up, false).rows == rows, "gate and up have one shape");
  check_bias(p, gate_bias, rows);
  check_bias(p, up_bias, rows);
  check_tiled(p, out, x, rows);
  adapt(p, x, {gate, up});
  if (!skips) return p.add_op(make_glu_linear(out, x, gate, up, gate_bias, up_bias, by));
  p.copy_rows(up);
  p.copy_tiles(gate, up);
  p.add_op(make_skipping_glu(out, x, gate, up, gate_bias, up_bias));
}

// Floats with `num_heads` heads of `dim` numbers, or with one that all share.
const Buffer& heads(const Plan& p, int id, int num_heads, int dim) {
  const Buffer& b = floats(p, id);
  require(num_heads > 0 && dim > 0 &&
              (b.width == dim || (b.width % dim == 0 && b.width / dim == num_heads)),
          "a buffer has as many heads as its op, or one that all share");
  return b;
}

void head_linear(Plan& p, int out, int x, const std::vector<int>& weights) {
  require(!weights.empty(), "a linear op by heads has a weight for each");
  const Weight& first = weight(p, weights[0]);
  for (const int w : weights)
    require(weight(p, w).rows == first.rows && weight(p, w).cols == first.cols,
            "heads are of one shape");
  const Buffer& from = heads(p, x, static_cast<int>(weights.size()), first.cols);
  require(floats(p, out).rows == from.rows &&
              p.buffer(out).width == static_cast<int64_t>(weights.size()) * first.rows,
          "a linear op by heads writes as many columns as its weights have rows");
  require(out != x, "a linear op cannot overwrite the rows that it reads");
  p.add_op(make_head_linear(out, x, weights));
}

void concat_heads(Plan& p, int out, int x, int y, int num_heads, int x_dim, int y_dim) {
  const Buffer &first = heads(p, x, num_heads, x_dim), &second = heads(p, y, num_heads, y_dim),
               &to = buffer(p, out);
  require(to.rows == first.rows && to.rows == second.rows,
          "heads are put together for all rows, or for the logit rows alone");
  require(to.width == static_cast<int64_t>(num_heads) * (static_cast<int64_t>(x_dim) + y_dim),
          "heads are as long as what they are put together of");
  p.add_op(make_concat_heads(out, x, y, x_dim, y_dim));
}

void qkv_rope_write(Plan& p, int out, int x, int angles, std::array<int, 3> weights,
                    std::array<int, 3> biases, std::array<int, 2> layer) {
  const KvLayer at = kv_layer(p, layer);
  const KvRecord& shape = p.kv(at.group).shape();
  const int head_dim = shape.key_dim, kv_width = p.kv(at.group).heads() * head_dim;
  require(shape.value_dim == head_dim,
          "queries, keys and values are one op where keys are as long as values");
  check_angles(p, angles, head_dim);
  require(buffer(p, x).rows == RowKind::kStep, "keys and values are those of all rows");
  require(out != angles, "queries cannot overwrite the angles that they are rotated by");
  const int widths[] = {row_floats(p, out).width, kv_width, kv_width};
  for (int i = 0; i < 3; i++) {
    require(factor(p, x, weights[i], true).rows == widths[i] && widths[i] % head_dim == 0,
            "queries, keys and values are whole heads");
    check_bias(p, biases[i], widths[i]);
  }
  adapt(p, x, {weights.begin(), weights.end()});
  for (auto& op :
       make_qkv_rope_write({out, x, angles, weights, biases, at, p.kv_buffers(at.group)}))
    p.add_op(std::move(op));
  if (p.kv(at.group).has_bounds()) p.add_op(make_key_bounds(at));
}

void kv_write(Plan& p, int k, int v, std::array<int, 2> layer) {
  const KvLayer at = kv_layer(p, layer);
  const KvCache& cache = p.kv(at.group);
  require((v == -1) == (cache.shape().value_dim == 0),
          "there are values to write unless they are part of the keys");
  require(row_floats(p, k).width == cache.heads() * cache.shape().key_dim,
          "keys are as wide as the heads of the cache");
  if (v != -1)
    require(row_floats(p, v).width == cache.heads() * cache.shape().value_dim,
            "values are as wide as the heads of the cache");
  p.add_op(make_kv_write("kv_write", k, v, at));
  if (cache.has_bounds()) p.add_op(make_key_bounds(at));
}

void attention(Plan& p, int out, int q, std::array<int, 2> layer, int num_heads, int value_dim,
               float scale, float softcap, std::vector<float> slopes, int sinks,
               const std::vector<std::tuple<int, int, double, float, float>>& key_bias,
               int top_blocks) {
  const KvLayer at = kv_layer(p, layer);
  require(top_blocks >= 0 && top_blocks <= kMaxTopBlocks &&
              (!top_blocks || p.kv(at.group).has_bounds()),
          "a choice of blocks needs their bounds, and a number of blocks");
  const KvRecord& shape = p.kv(at.group).shape();
  require(shape.value_dim ? value_dim == shape.value_dim
                          : value_dim > 0 && value_dim <= shape.key_dim && value_dim % 2 == 0,
          "values are those of the cache, or an even number of the first numbers of keys");
  require(num_heads > 0 && num_heads <= kMaxWidth / std::max(shape.key_dim, value_dim) &&
              num_heads % p.kv(at.group).heads() == 0,
          "query heads must be a multiple of KV heads");
  require(row_floats(p, q).width == num_heads * shape.key_dim,
          "queries are as wide as their heads");
  require(buffer(p, out).rows == RowKind::kStep && p.buffer(out).width == num_heads * value_dim,
          "attention writes a value for each head");
  require(out != q, "attention cannot overwrite the queries that it reads");
  require(!p.buffer(out).packed || value_dim % kGroup == 0,
          "what attention packs are heads of whole groups");
  require(scale >= 1e-20f && std::isfinite(scale), "scores have a scale above 0");
  if (softcap != 0) check_cap(softcap);
  require(slopes.empty() || static_cast<int>(slopes.size()) == num_heads,
          "every head has a slope, or none");
  check_bias(p, sinks, num_heads);
  const int heads = p.kv(at.group).heads();
  std::vector<KeyBiasPair> pairs;
  for (const auto& [head, dim, frequency, x, y] : key_bias) {
    require(head >= 0 && head < heads && dim >= 0 && dim < shape.key_dim - 1,
            "a pair of a key bias has a KV head and two numbers of its keys");
    require(std::abs(frequency) < 1e6 && std::abs(x) < 1e30f && std::abs(y) < 1e30f,
            "a pair of a key bias has a finite frequency and finite numbers");
    pairs.push_back({head, dim, frequency, x, y});
  }
  require(pairs.size() <= size_t{64} * heads, "a key bias has at most 64 pairs for each head");
  p.writes_pieces(out);
  AttentionWork& work = p.attention_work(at.group, num_heads, value_dim, top_blocks);
  p.reads_kv(work, at.layer);
  for (auto& op : make_attention({out, q, at.layer, value_dim, scale, softcap, std::move(slopes),
                                  sinks, std::move(pairs)},
                                 work, heads))
    p.add_op(std::move(op));
}

void route(Plan& p, int out, int x, int top_k, const std::string& scoring, bool normalised,
           float factor, std::array<int, 2> groups, int bias) {
  const auto [all, kept] = groups;
  const int experts = floats(p, x).width;
  require(scoring == "softmax" || scoring == "sigmoid",
          "scores are those of a softmax, or sigmoids");
  require(all > 0 && experts % all == 0 && kept > 0 && kept <= all,
          "groups of experts are of one size, and some of them are kept");
  require(experts <= kMaxExperts && top_k > 0 && top_k <= kMaxTopK && top_k <= experts / all * kept,
          "a row goes to at most 1,024 of the experts, of which there are at most 65,536");
  require(floats(p, out).width == 2 * top_k && p.buffer(out).rows == p.buffer(x).rows,
          "a routing has a number and a weight for each choice");
  require(std::isfinite(factor), "a factor is a number");
  check_bias(p, bias, experts);
  p.add_op(make_route({out, x, top_k, scoring == "sigmoid", normalised, factor, all, kept, bias}));
}

// The weights of experts, of one shape and multiplied with rows of one form.
void check_experts(const Plan& p, const std::vector<int>& weights, int rows, int cols) {
  const auto form = [&](int w) { return p.form(weight(p, w), false); };
  for (const int w : weights) {
    require(weight(p, w).rows == rows && weight(p, w).cols == cols,
            "the weights of experts fit their rows, and are of one shape");
    require(form(w) == form(weights[0]),
            "the weights of experts read their rows in one form: int8 by group, by row, bf16 or "
            "float32");
  }
}

void check_biases(const Plan& p, const std::vector<int>& biases, size_t experts, int length) {
  require(biases.empty() || biases.size() == experts, "all experts have a bias, or none");
  for (const int bias : biases) check_vector(p, bias, length);
}

void combine(Plan& p, int out, int x, int routing) {
  const Buffer &to = floats(p, out), &from = floats(p, x), &by = floats(p, routing);
  require(by.width % 2 == 0 && from.width == static_cast<int64_t>(by.width / 2) * to.width,
          "a row has a result for each of its choices");
  require(to.rows == from.rows && to.rows == by.rows && out != x && out != routing,
          "results are combined into other rows of the same kind");
  p.add_op(make_combine(out, x, routing));
}

void experts(Plan& p, int out, int x, int routing, const std::array<std::vector<int>, 3>& weights,
             const std::array<std::vector<int>, 3>& biases, const std::string& activation,
             int first_expert, int num_experts) {
  const auto& [gate, up, down] = weights;
  require(!gate.empty() && gate.size() <= kMaxExperts && gate.size() == up.size() &&
              gate.size() == down.size(),
          "each expert has gate, up and down, and there are at most 65,536");
  const bool is_part = num_experts != 0;
  const int own = static_cast<int>(gate.size()), top_k = floats(p, routing).width / 2;
  if (!is_part) num_experts = own;
  require(num_experts <= kMaxExperts && first_expert >= 0 && first_expert <= num_experts - own,
          "a part of the experts is some of them");
  require(!is_part || (top_k > 0 && floats(p, out).width % top_k == 0),
          "a part of the experts writes a result for each choice");
  const ExpertsShape shape{floats(p, x).width, weight(p, gate[0]).rows,
                           floats(p, out).width / (is_part ? top_k : 1), top_k, p.buffer(x).rows};
  require(p.buffer(out).rows == shape.rows && p.buffer(routing).rows == shape.rows,
          "experts read and write the same rows of a step");
  require(p.buffer(routing).width % 2 == 0 && shape.top_k <= kMaxTopK,
          "a routing has a number and a weight for each choice");
  require(out != routing, "experts cannot overwrite the routing that they read");
  check_experts(p, gate, shape.hidden, shape.width);
  check_experts(p, up, shape.hidden, shape.width);
  check_experts(p, down, shape.out, shape.hidden);
  for (int i = 0; i < 3; i++)
    check_biases(p, biases[i], gate.size(), i == 2 ? shape.out : shape.hidden);
  const Kernels::GluTile activate =
      p.kernels().glu_tile[static_cast<int>(activation_of(activation))];
  ExpertsArgs args{out,       x,         routing,  gate,         up,          down,    biases[0],
                   biases[1], biases[2], activate, first_expert, num_experts, !is_part};
  ExpertsWork& work = p.experts_work(shape);
  for (const auto* read : {&gate, &up})
    for (const int w : *read) p.reads(work.packed, w, false);
  for (const int w : down) p.reads(work.hidden, w, false);
  for (auto& op : make_experts(std::move(args), work)) p.add_op(std::move(op));
}

// Of each op over experts of a program: the rows that have gone to each expert since
// the start.
std::vector<std::vector<int64_t>> expert_loads(const Plan& p, int program) {
  require(program >= 0 && program < available(p).num_programs(), "a plan has no such program");
  std::vector<std::vector<int64_t>> all;
  for (const auto& op : p.program(program).ops)
    if (const auto loads = op->expert_loads(); !loads.empty())
      all.emplace_back(loads.begin(), loads.end());
  return all;
}

}  // namespace

void bind_ops(nb::class_<Plan>& c) {
  c.def("embed", &embed, nb::arg("out"), nb::arg("weight"), nb::arg("first") = 0,
        nb::arg("vocab") = 0,
        "The embeddings of `vocab` tokens, of which the weight has those from `first` on; 0: it "
        "has all.")
      .def("embed_position", &embed_position)
      .def("input", &input)
      .def("norm", &norm, nb::arg("out"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
           nb::arg("kind"), nb::arg("size"), nb::arg("eps"), nb::arg("rank") = 0,
           nb::arg("ranks") = 1, "Of several ranks each does a part of the rows.")
      .def("rope_angles", &rope_angles,
           "The angles of one head for each row, in a buffer of their own.")
      .def("rope", &rope)
      .def("pack", &pack_rows, nb::arg("out"), nb::arg("x"),
           nb::arg("order") = std::vector<int32_t>(),
           "Rows in the forms that their readers want; column i is column order[i] of x, where "
           "there is an order.")
      .def("gather_rows", &gather_rows)
      .def("take_columns", &take_columns)
      .def("exchange", &exchange, nb::arg("kind"), nb::arg("out"), nb::arg("inputs"), nb::arg("f"),
           "Calls f(out, *inputs) with the rows of these buffers, which are float32 [rows, width] "
           "and valid during the call; -1: no out.")
      .def("add", &add)
      .def("glu", &glu)
      .def("activate", &activate)
      .def("scale", &scale)
      .def("soft_cap", &soft_cap)
      .def("exit_choice", &exit_choice)
      .def("gate_rows", &gate_rows)
      .def("linear", &linear)
      .def("sparse_linear", &sparse_linear)
      .def("threshold", &threshold)
      .def("linear_activate", &linear_activate)
      .def("glu_linear", &glu_linear, nb::arg("out"), nb::arg("x"), nb::arg("gate"), nb::arg("up"),
           nb::arg("gate_bias"), nb::arg("up_bias"), nb::arg("activation"),
           nb::arg("skips") = false, "`skips`: rows of `up` whose gate is 0 may stay unread.")
      .def("head_linear", &head_linear)
      .def("concat_heads", &concat_heads)
      .def("qkv_rope_write", &qkv_rope_write)
      .def("kv_write", &kv_write)
      .def("attention", &attention, nb::arg("out"), nb::arg("q"), nb::arg("layer"),
           nb::arg("num_heads"), nb::arg("value_dim"), nb::arg("scale"), nb::arg("softcap") = 0.0f,
           nb::arg("slopes") = std::vector<float>(), nb::arg("sinks") = -1,
           nb::arg("key_bias") = std::vector<std::tuple<int, int, double, float, float>>(),
           nb::arg("top_blocks") = 0,
           "`key_bias`: (KV head, first of two numbers, radians for each position, both biases) of "
           "pairs that keys are stored without.")
      .def("route", &route)
      .def("experts", &experts, nb::arg("out"), nb::arg("x"), nb::arg("routing"),
           nb::arg("weights"), nb::arg("biases"), nb::arg("activation"), nb::arg("first") = 0,
           nb::arg("num_experts") = 0,
           "`num_experts`: the weights are those of some experts from `first` on, of so many; then "
           "out has what comes of each choice.")
      .def("combine", &combine)
      .def("expert_loads", &expert_loads, nb::arg("program") = 0,
           "Rows that have gone to each expert since the start, for each op over experts.");
}

}  // namespace headrace
