// The kernel table: what an instruction set offers to the executor. One unit per
// instruction set fills one table from the same source; nothing else in the extension
// is compiled for more than the baseline processor.
#pragma once
#include "format.h"

namespace headrace {

enum class NormKind : int { kRms, kLayer };
constexpr int kNumNorms = 2;

// What makes a gate of a number: headrace/program/ops.py, `Activation`. The last
// belongs to gates alone.
enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kClampedSwiglu };
constexpr int kNumActivations = 5;

// kK8V4: keys in int8 and values in int4.
enum class KvType : int { kBf16, kF32, kInt8, kInt4, kF16, kK8V4 };
constexpr int kNumKvTypes = 6;
constexpr bool is_quantised(KvType t) {
  return t == KvType::kInt8 || t == KvType::kInt4 || t == KvType::kK8V4;
}
constexpr int kKvTile = 32;  // tokens in a KV block
constexpr int kSplitBlocks =
    8;  // blocks of a context that are one softmax; such splits are then merged in ascending order
constexpr int kSplitTokens = kSplitBlocks * kKvTile;
constexpr float kNoMax =
    -1e30f;  // maximum of no scores: finite, so that differences of two are numbers

// KV of one head and block: K as [key lines][32 tokens][4 bytes], then V as [32 /
// per][value lanes][4 bytes], where `per` numbers fill 4 bytes. A line is then 16
// tokens (K) or 16 dimensions (V) of one bf16 pair, float or four codes. With a
// value_dim of 0 there is no V: values are part of the keys.
//
// Half precision has no pairs, since no dot product takes them: a line of K is 32 tokens of one
// number, then of the next; a line of V is 16 dimensions of one token, then of the next.
//
// Quantised: a number is step * code + least, with a bf16 step and least number for
// each token's key and value; 32 steps and 32 least numbers stand behind the codes of
// K, and behind those of V. Four bytes are four dimensions of a key (K), or of four
// values (V), in the order 0, 2, 1, 3: what is at the same place of both 16-bit halves
// is then a pair, ready for dot products of 16-bit numbers. In int4 a byte has two
// numbers of one token, so that no two tokens, which two threads may write, share one:
// dimensions d and d + 16 of each 32.
struct KvRecord {
  KvType type;
  int key_dim, value_dim;

  constexpr int per() const { return is_quantised(type) ? 4 : type == KvType::kF32 ? 1 : 2; }
  constexpr int value_columns() const { return (value_dim + 15) / 16 * 16; }  // in whole lines
  // Bits of a code.
  constexpr int key_bits() const { return type == KvType::kInt4 ? 4 : 8; }
  constexpr int value_bits() const { return type == KvType::kInt8 ? 8 : 4; }
  // Bytes of the codes of a key and of a value, in whole lines of V.
  constexpr int key_code_bytes() const { return (key_dim * key_bits() + 127) / 128 * 16; }
  constexpr int value_code_bytes() const { return (value_dim * value_bits() + 127) / 128 * 16; }
  constexpr int key_lines() const {
    return is_quantised(type) ? key_code_bytes() / 4 : key_dim / per();
  }  // of 32 tokens
  constexpr int value_lanes() const {
    return is_quantised(type) ? value_code_bytes() : value_columns();
  }
  // Numbers that are turned together (`rotate_head`), of keys and of values.
  constexpr int key_turn() const { return key_dim & -key_dim; }
  constexpr int value_turn() const { return value_dim ? value_dim & -value_dim : key_turn(); }
  // Where the steps and least numbers stand, in K and in V.
  constexpr size_t key_scales() const { return static_cast<size_t>(key_lines()) * kKvTile * 4; }
  constexpr size_t value_scales() const {
    return static_cast<size_t>(kKvTile) / per() * value_lanes() * 4;
  }
  constexpr size_t scale_bytes() const {
    return is_quantised(type) ? 2 * kKvTile * sizeof(uint16_t) : 0;
  }
  constexpr size_t value_offset() const { return key_scales() + scale_bytes(); }
  constexpr size_t value_bytes() const { return value_dim ? value_scales() + scale_bytes() : 0; }
  constexpr size_t bytes() const { return (value_offset() + value_bytes() + 63) / 64 * 64; }
  constexpr int key_columns() const { return (key_dim + 15) / 16 * 16; }
  constexpr size_t bound_bytes() const { return size_t{2} * key_columns() * sizeof(uint16_t); }
  // What attention computes with, where values have so many numbers. The first numbers
  // of keys that were turned can be turned back in whole blocks alone: so many are then
  // values.
  constexpr KvRecord computed(int num_values) const {
    const int block = is_quantised(type) && !value_dim ? key_turn() : 1;
    return {type, key_dim, (num_values + block - 1) / block * block};
  }
};

constexpr uint16_t kNotFiniteBf16 = 0x7fc0;  // what stands for any number that is not finite

// A key or value, quantised: codes, and bf16 numbers.
struct KvCodes {
  uint8_t* codes;  // of all numbers, rounded up to 16
  uint16_t step, least;

  bool is_finite() const { return least != kNotFiniteBf16; }
};

// A key of a KV head that is rounded to int4 with error feedback (headrace/quant/key_rounding.py).
// `x` and `rest` have room for whole lines; `out` has the step and least number.
constexpr int kMostKeysTogether = 8;
struct KeyToRound {
  const float* x;            // turned
  float* rest;               // x minus what the errors before take off
  const uint16_t* feedback;  // bf16 [numbers][whole lines]
  KvCodes* out;
};

// The KV records of a split, at most kSplitBlocks, and where their values lie.
struct SplitRecords {
  int blocks = 0;
  const uint8_t* at[kSplitBlocks];
  const uint8_t* values[kSplitBlocks];
};

// Bytes from a packed query to the next, unless one is longer.
constexpr size_t kQueryDistance = (256 + 16) * 4;

// One split of a context against up to max_queries query vectors. The maximum is that
// of the scores over ln 2.
struct AttendSplit {
  const SplitRecords& kv;
  const SplitRecords* next;  // what this thread reads after `kv`, if that is not in the caches:
                             // values and these are fetched ahead
  KvRecord shape;
  float scale, softcap;  // of scores; a cap of 0 is none
  const float*
      slopes;  // [num] what a score is lowered by for each position that the key lies back, or null
  int num;
  const uint8_t* queries;  // packed by pack_query, query_stride bytes apart
  size_t query_stride;
  const int* first;  // [num] visible tokens of the split: first..last-1
  const int* last;
  const int* own;  // [num] the query's own place, counted from the start of the split
  float* max;      // [num] maximum, sum of weights and weighted values, written
  float* sum;
  float* out;  // [num][value columns]
  // Added to the products with keys: for each token, the sum of all waves times the query's
  // factors.
  int num_waves;
  const float* waves;    // [num_waves][kSplitTokens]
  const float* factors;  // [num][num_waves]
};

// A row of logits with its peaks: the highest logit of each 16 tokens. Tokens are
// ordered by logit, of equal ones the lower id first.
struct LogitRow {
  const float* logits;  // [size]
  const float* peaks;   // [num_peaks]
  int size;
  float top;  // the highest logit
  int top_id;
  const int* tokens = nullptr;  // [size] token of each logit, ascending; null: logit i is token i's

  int num_peaks() const { return (size + kTileRows - 1) / kTileRows; }
};

// The best tokens of a row: those above `logit`, and those at it up to `id`, which is
// below the size of the row.
struct Cut {
  float logit;
  int id;
};

struct Share {
  double mass;
  int count;
};

// The noise of a position of a sequence: a counter's upper words, and the key.
struct NoiseStream {
  uint32_t position, seq_index;
  uint64_t seed;
};

// While a matrix kernel multiplies blocks of so many rows, memory has time for what comes later:
// so many lines for each group of columns.
constexpr int kRowsToReadAheadFor = 10, kLinesAhead = 6;
constexpr int kRowsToKeepSumsFor = 8;
constexpr bool reads_ahead(Format f) {
  return is_grouped(f) && !is_table(f) && f != Format::kGrid && !is_sub16(unit_of(f).scales);
}

// What a matrix kernel does apart from its product.
struct Aside {
  // What this thread reads later, or null. Kernels of `reads_ahead` fetch kLinesAhead lines of it
  // for each group.
  const uint8_t* later = nullptr;
  // Room for the sums of the weights of each group, or null. Kernels of kRowsToKeepSumsFor rows for
  // activations with an offset leave them there, or find them there if they are known.
  float* sums = nullptr;
  bool knows_sums = false;
};

struct Kernels {
  const char* name;
  int max_rows;     // rows of an activation block
  int max_queries;  // query vectors of an AttendSplit

  // out[rows][16] = 16 weight rows times a block of activation rows.
  using Matmul = void (*)(const uint8_t* tile, const TileShape& shape, const uint8_t* block,
                          float* out, const Aside& aside);
  Matmul matmul[kNumModes][kNumFormats][16];  // [mode][format][rows - 1]
  Form form[kNumModes][kNumFormats];          // the activations that these kernels read

  // Rows m .. m + count - 1 of a block of `rows` activation rows, from x[count][n],
  // `stride` apart; zeros up to `columns`.
  void (*pack[kNumForms])(const float* x, size_t stride, int count, int n, int columns,
                          uint8_t* block, int rows, int m);
  // x / sqrt(mean square + eps) * weight + bias; kLayer takes the mean off first.
  // `bias` may be null.
  void (*norm[kNumNorms])(const float* x, const float* weight, const float* bias, float eps, int n,
                          float* out);
  // Null for an activation that belongs to gates alone.
  void (*activate[kNumActivations])(const float* x, float* out, int n);
  void (*glu[kNumActivations])(const float* gate, const float* up, float* out, int n);
  void (*add)(const float* x, const float* y, float* out, int n);
  // The halves of a low-rank adapter, for one row: out[16] = scale * down x, over n
  // columns, an even number, of which two lie side by side and `stride` floats apart;
  // and out[16] += up products.
  void (*adapter_down)(const float* x, size_t stride, int n, const uint16_t* down, float scale,
                       float* out);
  void (*adapter_up)(const float* products, int rank, const uint16_t* up, float* out);
  // What becomes of a tile of outputs, x[rows][16]; strides are in floats. `residual`
  // may be null; the first n columns are written.
  void (*finish_tile)(const float* x, int rows, int n, const float* residual,
                      size_t residual_stride, float* out, size_t stride);
  using GluTile = void (*)(const float* gate, const float* up, int rows, float* out, size_t stride);
  void (*activate_tile[kNumActivations])(const float* x, int rows, float* out, size_t stride);
  GluTile glu_tile[kNumActivations];
  // Each row of x[rows][16] rotated pair by pair: x * cos + swapped x * sin, with the signs
  // in `sin`. `out` may be x.
  void (*rotate_tile)(const float* x, int rows, const float* cos, const float* sin, size_t stride,
                      float* out, size_t out_stride);
  // The same for a whole row of heads, x[n]: `cos` and `sin` have the numbers of one
  // head, and 16 more from its start.
  void (*rotate_row)(const float* x, const float* cos, const float* sin, int head_dim, int n,
                     float* out);
  // 16 numbers of the bf16 keys, or values, of each of `rows` tokens, x[rows][16]; `to` has
  // the place of the first of each token. Returns whether all values are finite.
  void (*write_key_tile)(const float* x, int rows, uint8_t* const* to);
  bool (*write_value_tile)(const float* x, int rows, uint8_t* const* to);
  void (*pack_query[kNumKvTypes])(const float* q, int key_dim, uint8_t* out);
  void (*attend[kNumKvTypes])(const AttendSplit&);
  // out[num][blocks]: the highest product that each query can have with a key of each block. A
  // query's `lines` of 16 numbers are its numbers above zero and then those below, `stride`
  // numbers from the next query's.
  void (*bound_products)(const float* queries, size_t stride, int num, int lines,
                         const uint16_t* const* bounds, int blocks, float* out);
  // out[block] += the highest sum of factors times waves of its tokens. `waves` begin with those
  // of the first block.
  void (*add_highest_waves)(const float* waves, const float* factors, int num_waves, int blocks,
                            float* out);
  // Turns a vector into a basis in which no dimension stands out, and back: it is its
  // own inverse.
  void (*rotate_head)(float* x, int n, int size);  // in blocks of `size`, a power of two
  void (*quantise_kv)(const float* x, int n, int bits, bool cuts, KvCodes& out);
  // Up to kMostKeysTogether keys, one number after another: each error changes what is left.
  void (*round_keys)(const KeyToRound* keys, int count, int n);
  // The first numbers of a block's keys as values: zeros for those that are not finite.
  void (*values_of_keys)(const uint8_t* keys, const KvRecord& shape, uint8_t* out);
  // Folds one softmax state into another: a over the context before, b over what
  // follows.
  void (*merge)(float* max, float* sum, float* out, float max_b, float sum_b, const float* out_b,
                int n);
  void (*scale)(const float* x, float factor, float* out, int n);
  void (*soft_cap)(const float* x, float cap, float* out, int n);  // cap * tanh(x / cap)
  // out[n] = the sum of weights[i] * x[i][n], in the order of i.
  void (*combine)(const float* x, const float* weights, int count, int n, float* out);

  // Sampling. Sums of weights are taken in an order that depends on the size of the row
  // only.
  bool (*peaks)(const float* logits, int size, float* out);  // whether there is no NaN
  int (*top)(const LogitRow&);  // the best token, from logits and peaks
  int (*count)(const LogitRow&, Cut);
  // The tokens kept by `to` and not by `from`, ascending; returns how many.
  int (*collect)(const LogitRow&, Cut from, Cut to, int* ids);
  // exp((logit - top) * inverse_temperature) of the tokens kept, and 0 for others
  // beside them; returns the sum.
  double (*weigh)(const LogitRow&, Cut, float inverse_temperature, float* weights);
  // Sum of these weights over a narrower cut, and its tokens.
  Share (*share)(const LogitRow&, Cut, const float* weights);
  // The index of the cut with the highest (logit - top) / temperature + Gumbel noise of its token.
  int (*noisiest)(const LogitRow&, Cut, double temperature, NoiseStream);
  void (*philox)(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

  double (*dot_rate)(
      int kind,
      int64_t iterations);  // multiply-adds done by a loop of dots: 0 int8, 1 bf16, 2 float32
};

// Defined for the instruction sets that this build has, by isa.cpp.
const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_neon();

}  // namespace headrace
