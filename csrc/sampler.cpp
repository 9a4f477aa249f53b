#include "sampler.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>

#include "noise.h"
#include "vec4.h"

namespace nb = nanobind;

namespace headrace {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;  // temperatures under this count as 0
constexpr int kTile = 32;
constexpr int kQuads = kTile / 4;

using Tile = std::array<Float4, kQuads>;

}  // namespace

// The logits of one position, read in tiles of fixed size.
class Row {
 public:
  Row(const float* logits, int size) : logits_(logits), size_(size) {}

  int size() const { return size_; }
  int tiles() const { return (size_ + kTile - 1) / kTile; }
  const float* begin() const { return logits_; }
  const float* end() const { return logits_ + size_; }
  float operator[](int id) const { return logits_[id]; }

  // The last tile is filled up with -inf.
  Tile tile(int index) const {
    const int first = index * kTile;
    Tile t;
    if (first + kTile <= size_) {
      std::memcpy(t.data(), logits_ + first, sizeof t);
    } else {
      t.fill(splat(-kInfinity));
      std::memcpy(t.data(), logits_ + first, sizeof(float) * static_cast<size_t>(size_ - first));
    }
    return t;
  }

  // The order of all tokens: higher logit first, then lower id.
  bool better(int a, int b) const { return logits_[a] > logits_[b] || (logits_[a] == logits_[b] && a < b); }

 private:
  const float* logits_;
  int size_;
};

namespace {

// The highest logit of each tile, and of the row.
struct Peaks {
  std::vector<float> tiles;
  float top = -kInfinity;
  int top_id = 0;
};

Peaks find_peaks(const Row& row) {
  Peaks peaks;
  peaks.tiles.resize(static_cast<size_t>(row.tiles()));
  Int4 is_nan{};
  int top_tile = 0;
  for (int t = 0; t < row.tiles(); t++) {
    const Tile tile = row.tile(t);
    Float4 high = tile[0];
    for (const Float4& v : tile) {
      is_nan |= v != v;
      high = high > v ? high : v;
    }
    peaks.tiles[t] = std::max(std::max(high[0], high[1]), std::max(high[2], high[3]));
    if (peaks.tiles[t] > peaks.tiles[top_tile]) top_tile = t;
  }
  peaks.top = peaks.tiles[top_tile];
  if (any(is_nan) || !std::isfinite(peaks.top)) throw NonFiniteLogits();
  for (peaks.top_id = top_tile * kTile; row[peaks.top_id] != peaks.top;) peaks.top_id++;
  return peaks;
}

// exp((logit - top) / temperature) for each logit >= floor, 0 for the others.
struct Weights {
  float top, inverse_temperature, floor;

  Float4 exponent(Float4 logits) const { return (logits - top) * inverse_temperature; }
  Float4 operator()(Float4 logits) const { return logits >= floor ? exp_negative(exponent(logits)) : Float4{}; }
  double operator()(float logit) const { return static_cast<double>((*this)(splat(logit))[0]); }
};

// Sum of the weights of a row, in an order that depends on its size only.
double mass(const Row& row, const Weights& weights) {
  double sum = 0;
  for (int t = 0; t < row.tiles(); t++) {
    Float4 part{};  // eight terms a lane: float loses less here than exp_negative does
    for (const Float4& v : row.tile(t)) part += weights(v);
    sum += (static_cast<double>(part[0]) + part[1]) + (static_cast<double>(part[2]) + part[3]);
  }
  return sum;
}

// All tokens with logit >= floor, ascending.
std::vector<int> collect(const Row& row, const Peaks& peaks, float floor) {
  std::vector<int> ids;
  for (int t = 0; t < row.tiles(); t++) {
    if (peaks.tiles[t] < floor) continue;
    const int end = std::min((t + 1) * kTile, row.size());
    for (int id = t * kTile; id < end; id++)
      if (row[id] >= floor) ids.push_back(id);
  }
  return ids;
}

// A logit that at least k tokens reach, and few others. The peaks are k different tokens, so their k-th highest will do.
float reached_by(const Peaks& peaks, size_t k) {
  if (k > peaks.tiles.size()) return -kInfinity;
  std::vector<float> tiles = peaks.tiles;
  const auto kth = tiles.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(tiles.begin(), kth, tiles.end(), std::greater<float>());
  return *kth;
}

// The k best tokens, best first.
std::vector<int> best_tokens(const Row& row, const Peaks& peaks, int k) {
  std::vector<int> ids = collect(row, peaks, reached_by(peaks, static_cast<size_t>(k)));
  const auto better = [&row](int a, int b) { return row.better(a, b); };
  const auto end = ids.begin() + std::min<ptrdiff_t>(k, std::ssize(ids));
  std::nth_element(ids.begin(), end, ids.end(), better);
  ids.erase(end, ids.end());
  std::sort(ids.begin(), ids.end(), better);
  return ids;
}

// The first of the sorted tokens at which their weights, added up, reach the target.
int reach(const Row& row, const std::vector<int>& ids, const Weights& weights, double target) {
  auto id = ids.begin();
  while (id + 1 != ids.end() && (target -= weights(row[*id])) > 0) ++id;
  return *id;
}

// The worst token of the smallest set of best tokens that has the share p of the mass. A histogram over the exponent finds the
// narrow range of logits in which the set ends; only the tokens in that range are sorted.
int nucleus_end(const Row& row, const Peaks& peaks, const Weights& weights, double p) {
  constexpr int kBuckets = 2048;
  const auto bucket = [&weights](Float4 logits) {
    const Float4 x = weights.exponent(logits) * (-kBuckets / 88.0f);
    return __builtin_convertvector(x < kBuckets - 1.0f ? x : splat(kBuckets - 1.0f), Int4);
  };
  std::array<double, kBuckets> masses{};
  for (int t = 0; t < row.tiles(); t++) {
    for (const Float4& v : row.tile(t)) {
      const Int4 buckets = bucket(v);
      const Float4 w = weights(v);
      for (int i = 0; i < 4; i++) masses[buckets[i]] += static_cast<double>(w[i]);
    }
  }
  double target = p * std::accumulate(masses.begin(), masses.end(), 0.0);
  int last = 0, last_filled = kBuckets - 1;
  while (masses[last_filled] == 0) last_filled--;
  for (; last < last_filled && masses[last] < target; last++) target -= masses[last];
  std::vector<int> ids;
  for (int t = 0; t < row.tiles(); t++) {
    if (bucket(splat(peaks.tiles[t]))[0] > last) continue;
    const Tile tile = row.tile(t);
    for (int q = 0; q < kQuads; q++) {
      const Int4 inside = (bucket(tile[q]) == last) & (tile[q] >= weights.floor);
      for (int i = 0; any(inside) && i < 4; i++)
        if (inside[i]) ids.push_back(t * kTile + 4 * q + i);
    }
  }
  std::sort(ids.begin(), ids.end(), [&row](int a, int b) { return row.better(a, b); });
  return reach(row, ids, weights, target);
}

// Where filters end: they keep the tokens above `logit`, and those at it up to `id`.
struct Cut {
  float logit;
  int id;
};

// A copy of the row in which every token beyond the cut is -inf.
std::vector<float> keep_to(const Row& row, Cut cut) {
  std::vector<float> kept(static_cast<size_t>(row.size()));
  for (int id = 0; id < row.size(); id++) {
    const bool keep = (row[id] > cut.logit) | ((row[id] == cut.logit) & (id <= cut.id));
    kept[static_cast<size_t>(id)] = keep ? row[id] : -kInfinity;
  }
  return kept;
}

// min_p, then top_k, then top_p: each keeps the best of the tokens that those before it kept.
Cut filter(const Row& row, const Peaks& peaks, const SamplingOptions& options) {
  const float floor = options.min_p > 0 ? static_cast<float>(peaks.top + options.temperature * std::log(options.min_p)) : -kInfinity;
  const Weights weights{peaks.top, static_cast<float>(1 / options.temperature), floor};
  if (options.top_k > 0 && options.top_k < row.size()) {
    std::vector<int> ids = best_tokens(row, peaks, options.top_k);
    while (row[ids.back()] < floor) ids.pop_back();
    double total = 0;
    for (int id : ids) total += weights(row[id]);
    const int last = options.top_p < 1 ? reach(row, ids, weights, options.top_p * total) : ids.back();
    return {row[last], last};
  }
  if (options.top_p == 1) return {floor, row.size()};
  const int last = nucleus_end(row, peaks, weights, options.top_p);
  return {row[last], last};
}

// argmax of (logit - top) / temperature + Gumbel noise: a draw from the softmax (Gumbel 1954; Maddison et al. 2014).
// Tokens that no noise, or not the noise that they have, could lift to the best so far are passed over; the result is exact.
int noisiest(const Row& row, const Peaks& peaks, const SamplingOptions& options, uint32_t branch, uint32_t position) {
  const PhiloxKey key = {static_cast<uint32_t>(options.seed), static_cast<uint32_t>(options.seed >> 32)};
  const auto inverse_temperature = static_cast<float>(1 / options.temperature);
  const auto score = [&](int id, uint32_t word) { return (static_cast<double>(row[id]) - peaks.top) / options.temperature + gumbel(word); };
  const auto words_of = [&](int quad) { return philox({static_cast<uint32_t>(quad), position, branch, 0}, key); };
  int best_id = peaks.top_id;
  double best = score(best_id, words_of(best_id / 4)[0][best_id % 4]);
  for (int t = 0; t < row.tiles(); t++) {
    if ((peaks.tiles[t] - peaks.top) * inverse_temperature + kMaxGumbel < best) continue;
    const Tile tile = row.tile(t);
    for (int q = 0; q < kQuads; q += 2) {
      const std::array<Uint4, 2> words = words_of(t * kQuads + q);
      for (int pair = 0; pair < 2; pair++) {
        const Float4 bound = (tile[q + pair] - peaks.top) * inverse_temperature + gumbel_bound(words[pair]);
        const Int4 hopeful = bound >= static_cast<float>(best) - kRounding;
        if (!any(hopeful)) continue;
        for (int i = 0; i < 4; i++) {
          const int id = t * kTile + 4 * (q + pair) + i;
          if (!hopeful[i]) continue;
          const double s = score(id, words[pair][i]);
          if (s > best || (s == best && id < best_id)) {
            best = s;
            best_id = id;
          }
        }
      }
    }
  }
  return best_id;
}

bool greedy(const SamplingOptions& options) { return options.temperature < kGreedyBelow; }

bool filters(const SamplingOptions& options) { return options.top_k > 0 || options.top_p < 1 || options.min_p > 0; }

int choose(const Row& row, const SamplingOptions& options, uint32_t branch, uint32_t position) {
  const Peaks peaks = find_peaks(row);
  if (greedy(options)) return peaks.top_id;
  if (!filters(options)) return noisiest(row, peaks, options, branch, position);
  const std::vector<float> kept = keep_to(row, filter(row, peaks, options));
  const Row filtered(kept.data(), row.size());
  return noisiest(filtered, find_peaks(filtered), options, branch, position);
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void check_token(int token, int vocab) { check(token >= 0 && token < vocab, "a token id is outside the vocabulary"); }

void check_options(const SamplingOptions& o) {
  check(o.vocab > 0 && o.vocab <= 1 << 24, "vocab must be between 1 and 2^24");
  check(std::isfinite(o.temperature) && o.temperature >= 0, "temperature must be finite and not negative");
  check(o.top_k >= 0, "top_k must not be negative");
  check(o.top_p > 0 && o.top_p <= 1, "top_p must be above 0 and at most 1");
  check(o.min_p >= 0 && o.min_p <= 1, "min_p must be between 0 and 1");
  check(std::isfinite(o.repetition_penalty) && o.repetition_penalty > 0, "repetition_penalty must be finite and above 0");
  check(std::isfinite(o.presence_penalty) && std::isfinite(o.frequency_penalty), "penalties must be finite");
  for (const auto& [token, bias] : o.logit_bias) {
    check_token(token, o.vocab);
    check(std::isfinite(bias), "logit_bias must be finite");
  }
  for (int token : o.banned) check_token(token, o.vocab);
}

}  // namespace

TokenLogprobs token_logprobs(const Row& row, int token, int num_logprobs) {
  check_token(token, row.size());
  check(num_logprobs >= 0, "num_logprobs must not be negative");
  const Peaks peaks = find_peaks(row);
  const double log_mass = std::log(mass(row, {peaks.top, 1.0f, -kInfinity}));
  const auto logprob = [&](int id) { return static_cast<float>(static_cast<double>(row[id]) - peaks.top - log_mass); };
  TokenLogprobs result{logprob(token), 1, {}, {}};
  for (int id = 0; id < row.size(); id++) result.rank += (row[id] > row[token]) | ((row[id] == row[token]) & (id < token));
  if (num_logprobs) result.top_ids = best_tokens(row, peaks, std::min(num_logprobs, row.size()));
  for (int id : result.top_ids) result.top_logprobs.push_back(logprob(id));
  return result;
}

Sampler::Sampler(SamplingOptions options, const std::vector<int>& prompt, uint32_t branch) : options_(std::move(options)), branch_(branch) {
  check_options(options_);
  for (int token : prompt) {
    check_token(token, options_.vocab);
    if (has_penalties()) seen_[token].in_prompt = true;
  }
}

Sampler Sampler::clone(uint32_t branch) const {
  Sampler copy = *this;
  copy.branch_ = branch;
  return copy;
}

int Sampler::draw(const Row& row, uint32_t position) {
  check(row.size() == options_.vocab, "the row of logits is not as wide as the vocabulary");
  const std::vector<float> logits = adjusts(position) ? adjusted(row, position) : std::vector<float>();
  const int token = choose(logits.empty() ? row : Row(logits.data(), row.size()), options_, branch_, position);
  if (has_penalties()) seen_[token].in_output++;
  return token;
}

bool Sampler::has_penalties() const {
  return options_.repetition_penalty != 1 || options_.presence_penalty != 0 || options_.frequency_penalty != 0;
}

bool Sampler::adjusts(uint32_t position) const {
  return !options_.logit_bias.empty() || !seen_.empty() || (!options_.banned.empty() && position < options_.banned_until);
}

std::vector<float> Sampler::adjusted(const Row& row, uint32_t position) const {
  std::vector<float> logits(row.begin(), row.end());
  for (const auto& [token, bias] : options_.logit_bias) logits[static_cast<size_t>(token)] += bias;
  for (const auto& [token, seen] : seen_) {
    float& logit = logits[static_cast<size_t>(token)];
    logit = logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
    if (seen.in_output) logit -= options_.frequency_penalty * static_cast<float>(seen.in_output) + options_.presence_penalty;
  }
  if (position < options_.banned_until)
    for (int token : options_.banned) logits[static_cast<size_t>(token)] = -kInfinity;
  return logits;
}

namespace {

using LogitsArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Row as_row(const LogitsArray& logits) {
  check(logits.shape(0) > 0 && logits.shape(0) <= 1 << 24, "a row of logits must have between 1 and 2^24 entries");
  return {logits.data(), static_cast<int>(logits.shape(0))};
}

nb::tuple as_tuple(const TokenLogprobs& p) { return nb::make_tuple(p.logprob, p.rank, nb::cast(p.top_ids), nb::cast(p.top_logprobs)); }

nb::tuple draw(Sampler& sampler, const LogitsArray& logits, uint32_t position, int num_logprobs) {
  const Row row = as_row(logits);
  int token;
  std::optional<TokenLogprobs> logprobs;
  {
    nb::gil_scoped_release released;
    token = sampler.draw(row, position);
    if (num_logprobs >= 0) logprobs = token_logprobs(row, token, num_logprobs);
  }
  return nb::make_tuple(token, logprobs ? nb::object(as_tuple(*logprobs)) : nb::none());
}

nb::tuple logprobs_of(const LogitsArray& logits, int token, int num_logprobs) {
  const Row row = as_row(logits);
  TokenLogprobs result;
  {
    nb::gil_scoped_release released;
    result = token_logprobs(row, token, num_logprobs);
  }
  return as_tuple(result);
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const NonFiniteLogits& e) {
    const nb::object type = nb::module_::import_("headrace.errors").attr("NonFiniteLogitsError");
    PyErr_SetString(type.ptr(), e.what());
  }
}

}  // namespace

void bind_sampler(nb::module_& m) {
  using namespace nb::literals;
  nb::register_exception_translator(translate);
  m.def(
      "philox",
      [](PhiloxCounter counter, PhiloxKey key) {
        const Uint4 words = philox(counter, key)[0];
        return std::array<uint32_t, 4>{words[0], words[1], words[2], words[3]};
      },
      "counter"_a, "key"_a);
  m.def("token_logprobs", &logprobs_of, "logits"_a, "token"_a, "num_logprobs"_a);
  nb::class_<Sampler>(m, "Sampler")
      .def(
          "__init__",
          [](Sampler* self, int vocab, const std::vector<int>& prompt, uint32_t branch, uint64_t seed, double temperature, int top_k,
             double top_p, double min_p, float repetition_penalty, float presence_penalty, float frequency_penalty,
             std::vector<std::pair<int, float>> logit_bias, std::vector<int> banned, int64_t banned_until) {
            new (self) Sampler({vocab, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed,
                                std::move(logit_bias), std::move(banned), banned_until},
                               prompt, branch);
          },
          "vocab"_a, "prompt"_a, nb::kw_only(), "branch"_a = 0, "seed"_a = 0, "temperature"_a = 1.0, "top_k"_a = 0, "top_p"_a = 1.0,
          "min_p"_a = 0.0, "repetition_penalty"_a = 1.0f, "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f,
          "logit_bias"_a = std::vector<std::pair<int, float>>(), "banned"_a = std::vector<int>(), "banned_until"_a = 0)
      .def("clone", &Sampler::clone, "branch"_a)
      .def("draw", &draw, "logits"_a, "position"_a, "num_logprobs"_a);
}

}  // namespace headrace
