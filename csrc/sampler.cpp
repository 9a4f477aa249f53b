#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

namespace headrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;  // temperatures under this count as 0
constexpr int kFew = 128;              // tokens that are sorted rather than divided further
constexpr double kFarthest = 87;       // weights further down, in temperatures, are 0

// A row with its peaks, and the memory to work on it. The row may be a caller's array,
// which another thread can write to meanwhile: the token is then any, but one of the
// vocabulary.
class Row {
 public:
  Row(const Kernels& kernels, const float* logits, int size, Scratch& scratch,
      const int* tokens = nullptr)
      : kernels_(kernels), scratch_(scratch) {
    const size_t whole = static_cast<size_t>(size + 15) / 16 * 16;
    scratch.peaks.resize(whole / 16);
    scratch.weights.resize(whole);
    scratch.ids.resize(whole);
    row_ = {logits, scratch.peaks.data(), size, 0, 0, tokens};
    if (!kernels.peaks(logits, size, scratch.peaks.data())) throw NonFiniteLogits();
    row_.top_id = std::min(kernels.top(row_), size - 1);
    row_.top = logits[row_.top_id];
    if (!std::isfinite(row_.top)) throw NonFiniteLogits();
  }

  float operator[](int id) const { return row_.logits[id]; }
  float top() const { return row_.top; }
  int top_id() const { return row_.top_id; }
  // The tokens with logit >= floor.
  Cut down_to(float floor) const { return {floor, row_.size - 1}; }
  Cut all() const { return down_to(-kInfinity); }

  int count(Cut cut) const { return kernels_.count(row_, cut); }
  double weigh(Cut cut, double temperature) const {
    return kernels_.weigh(row_, cut, static_cast<float>(1 / temperature), scratch_.weights.data());
  }
  float weight(int id) const { return scratch_.weights[static_cast<size_t>(id)]; }
  bool keeps(Cut cut, int id) const {
    return (*this)[id] > cut.logit || ((*this)[id] == cut.logit && id <= cut.id);
  }
  int noisiest(Cut cut, double temperature, NoiseStream stream) const {
    return std::min(kernels_.noisiest(row_, cut, temperature, stream), row_.size - 1);
  }

  // The best `n` tokens, or those of the cut if they are fewer.
  Cut best(Cut cut, int n) const;
  // The smallest set of best tokens of the cut that has the share p of its mass.
  Cut nucleus(Cut cut, double temperature, double p) const;
  // The tokens of the cut, ascending; valid until the next call.
  std::span<const int> within(Cut cut) const {
    const int n = kernels_.collect(row_, {kInfinity, -1}, cut, scratch_.ids.data());
    return {scratch_.ids.data(), static_cast<size_t>(n)};
  }
  // The tokens kept by `to` and not by `from`, best first; valid until the next call.
  std::span<const int> sorted(Cut from, Cut to) const;

 private:
  // Two cuts between which a set of best tokens ends: the narrower does not hold
  // enough; the wider does, or it is all there is.
  struct Bracket {
    Cut narrower;
    Share inside;  // the narrower
    Cut wider;
  };
  template <class Measure, class Enough>
  Bracket bracket(Cut cut, double step, Measure&& measure, Enough&& enough) const;

  const Kernels& kernels_;
  Scratch& scratch_;
  LogitRow row_;
};

// Lower for a higher logit, of equal ones for the lower id, which is the low half. An
// integer, so that there is an order of any logits.
uint64_t rank(float logit, int id) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);  // of the two zeros one
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

std::span<const int> Row::sorted(Cut from, Cut to) const {
  const std::span<int> ids(scratch_.ids.data(), static_cast<size_t>(kernels_.collect(
                                                    row_, from, to, scratch_.ids.data())));
  scratch_.ranks.clear();
  for (const int id : ids) scratch_.ranks.push_back(rank(row_.logits[id], id));
  std::sort(scratch_.ranks.begin(), scratch_.ranks.end());
  std::transform(scratch_.ranks.begin(), scratch_.ranks.end(), ids.begin(),
                 [](uint64_t r) { return static_cast<int>(r & 0xffffffff); });
  return ids;
}

// Goes down from the top in steps that double, then halves the last until few tokens,
// or equal ones, are left in it.
template <class Measure, class Enough>
Row::Bracket Row::bracket(Cut cut, double step, Measure&& measure, Enough&& enough) const {
  Bracket b{down_to(std::nextafter(row_.top, kInfinity)), {0, 0}, cut};
  Share outside;
  for (;; step *= 2) {
    const auto floor = static_cast<float>(row_.top - step);
    const bool is_last =
        !(floor > cut.logit);  // also where the cut is NaN, which another thread has just written
    const Cut at = is_last ? cut : down_to(floor);
    outside = measure(at);
    if (is_last || enough(outside)) {
      b.wider = at;
      break;
    }
    b.narrower = at;
    b.inside = outside;
  }
  while (outside.count - b.inside.count > kFew) {
    const float middle = 0.5f * b.wider.logit + 0.5f * b.narrower.logit;
    if (!(b.wider.logit < middle && middle < b.narrower.logit)) break;
    const Share share = measure(down_to(middle));
    if (enough(share)) {
      b.wider = down_to(middle);
      outside = share;
    } else {
      b.narrower = down_to(middle);
      b.inside = share;
    }
  }
  return b;
}

Cut Row::best(Cut cut, int n) const {
  if (n >= (cut.logit == -kInfinity ? row_.size : count(cut))) return cut;
  const auto measure = [this](Cut at) { return Share{0, count(at)}; };
  const Bracket b = bracket(cut, 1.0, measure, [n](Share share) { return share.count >= n; });
  const std::span<const int> ids = sorted(b.narrower, b.wider);
  if (ids.empty()) return b.wider;
  const int last =
      ids[static_cast<size_t>(std::clamp(n - b.inside.count, 1, static_cast<int>(ids.size())) - 1)];
  return {row_.logits[last], last};
}

Cut Row::nucleus(Cut cut, double temperature, double p) const {
  double needed = p * weigh(cut, temperature);
  const auto lowest = static_cast<float>(row_.top - kFarthest * temperature);
  if (cut.logit < lowest) cut = down_to(lowest);
  const auto measure = [this](Cut at) { return kernels_.share(row_, at, scratch_.weights.data()); };
  const Bracket b = bracket(cut, 2 * temperature, measure,
                            [needed](Share share) { return share.mass >= needed; });
  const std::span<const int> ids = sorted(b.narrower, b.wider);
  needed -= b.inside.mass;
  size_t last = 0;
  while (last + 1 < ids.size() && (needed -= static_cast<double>(weight(ids[last]))) > 0) last++;
  return ids.empty() ? b.wider : Cut{row_.logits[ids[last]], ids[last]};
}

// min_p, then top_k, then top_p: each keeps the best of the tokens that those before it
// kept.
Cut filter(const Row& row, const SamplingOptions& options) {
  Cut cut = row.all();
  if (options.min_p > 0)
    cut =
        row.down_to(static_cast<float>(row.top() + options.temperature * std::log(options.min_p)));
  if (options.top_k > 0 && options.top_k < options.vocab) cut = row.best(cut, options.top_k);
  if (options.top_p < 1) cut = row.nucleus(cut, options.temperature, options.top_p);
  return cut;
}

int choose(const Row& row, const SamplingOptions& options, uint32_t seq_index, uint32_t position) {
  if (options.temperature < kGreedyBelow) return row.top_id();
  return row.noisiest(filter(row, options), options.temperature,
                      {position, seq_index, options.seed});
}

TokenLogprobs describe(const Row& row, int token, int num_logprobs) {
  const double log_mass = std::log(row.weigh(row.all(), 1.0));
  const auto logprob = [&](int id) {
    return static_cast<float>(static_cast<double>(row[id]) - row.top() - log_mass);
  };
  TokenLogprobs result{logprob(token), row.count({row[token], token}), {}, {}};
  if (!num_logprobs) return result;
  for (int id : row.sorted({kInfinity, -1}, row.best(row.all(), num_logprobs))) {
    result.top_ids.push_back(id);
    result.top_logprobs.push_back(logprob(id));
  }
  return result;
}

// The logits of a map's tokens that the mask forbids become -inf.
void keep_allowed(Mask mask, std::span<float> logits, const int* tokens) {
  for (size_t i = 0; i < logits.size(); i++) {
    const auto token = static_cast<uint32_t>(tokens[i]);
    if (!(mask[token / kMaskBits] >> token % kMaskBits & 1)) logits[i] = -kInfinity;
  }
}

// The logits of all tokens that the mask forbids become -inf.
void keep_allowed(Mask mask, std::span<float> logits) {
  for (size_t first = 0; first < logits.size(); first += kMaskBits) {
    const std::span<float> part =
        logits.subspan(first, std::min<size_t>(kMaskBits, logits.size() - first));
    const uint32_t allowed = mask[first / kMaskBits];
    if (!allowed)
      std::fill(part.begin(), part.end(), -kInfinity);
    else if (~allowed)
      for (size_t i = 0; i < part.size(); i++)
        if (!(allowed >> i & 1)) part[i] = -kInfinity;
  }
}

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void check_token(int token, int vocab) {
  check(token >= 0 && token < vocab, "a token id is outside the vocabulary");
}

void check_options(const SamplingOptions& o) {
  check(o.vocab > 0 && o.vocab <= 1 << 24, "vocab must be between 1 and 2^24");
  check(std::isfinite(o.temperature) && o.temperature >= 0,
        "temperature must be finite and not negative");
  check(o.top_k >= 0, "top_k must not be negative");
  check(o.top_p > 0 && o.top_p <= 1, "top_p must be above 0 and at most 1");
  check(o.min_p >= 0 && o.min_p <= 1, "min_p must be between 0 and 1");
  check(std::isfinite(o.repetition_penalty) && o.repetition_penalty > 0,
        "repetition_penalty must be finite and above 0");
  check(std::isfinite(o.presence_penalty) && std::isfinite(o.frequency_penalty),
        "penalties must be finite");
  for (const auto& [token, bias] : o.logit_bias) {
    check_token(token, o.vocab);
    check(std::isfinite(bias), "logit_bias must be finite");
  }
  for (int token : o.banned) check_token(token, o.vocab);
}

}  // namespace

TokenLogprobs token_logprobs(const Kernels& kernels, const float* logits, int size, int token,
                             int num_logprobs, Scratch& scratch) {
  check_token(token, size);
  check(num_logprobs >= 0, "num_logprobs must not be negative");
  return describe(Row(kernels, logits, size, scratch), token, num_logprobs);
}

TokenMap::TokenMap(std::vector<int> tokens, int vocab) : tokens_(std::move(tokens)) {
  check(vocab > 0 && vocab <= 1 << 24, "vocab must be between 1 and 2^24");
  check(!tokens_.empty(), "a token map needs tokens");
  index_.assign(static_cast<size_t>(vocab), -1);
  int last = -1;
  for (int i = 0; i < size(); i++) {
    const int token = tokens_[static_cast<size_t>(i)];
    check_token(token, vocab);
    check(token > last, "the tokens of a map must ascend");
    last = token;
    index_[static_cast<size_t>(token)] = i;
  }
}

Sampler::Sampler(const Kernels* kernels, SamplingOptions options, const std::vector<int>& prompt,
                 uint32_t seq_index)
    : kernels_(kernels), options_(std::move(options)), seq_index_(seq_index) {
  check_options(options_);
  for (int token : prompt) {
    check_token(token, options_.vocab);
    if (options_.repetition_penalty != 1) see(token, 0);
  }
}

Sampler Sampler::clone(uint32_t seq_index) const {
  Sampler copy = *this;
  copy.seq_index_ = seq_index;
  return copy;
}

Drawn Sampler::draw(const float* logits, uint32_t position, Mask mask, int num_logprobs,
                    Scratch& scratch) {
  Drawn drawn;
  const bool adjusting = adjusts(position, mask);
  {
    const Row row(*kernels_,
                  adjusting ? adjusted(logits, position, mask, scratch.adjusted) : logits,
                  options_.vocab, scratch);
    drawn.token = choose(row, options_, seq_index_, position);
    if (num_logprobs >= 0 && !adjusting) drawn.logprobs = describe(row, drawn.token, num_logprobs);
  }
  if (num_logprobs >= 0 && adjusting)
    drawn.logprobs =
        token_logprobs(*kernels_, logits, options_.vocab, drawn.token, num_logprobs, scratch);
  append(drawn.token);
  return drawn;
}

namespace {

// The log-probabilities of the tokens of a row, by their logits.
class LogSoftmax {
 public:
  explicit LogSoftmax(const Row& row)
      : top_(row.top()), log_mass_(std::log(row.weigh(row.all(), 1.0))) {}

  float operator()(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - top_ - log_mass_);
  }
  // A logit that is a little less than any with the log-probability.
  float logit_below(double logprob) const {
    const double logit = logprob + top_ + log_mass_;
    return static_cast<float>(logit - kSlack * (1 + std::abs(logit) + std::abs(top_) + log_mass_));
  }
  // A logit that is a little less than any with the log-probability of another logit.
  float below_equals(float logit) const {
    return logit_below(static_cast<double>(logit) - top_ - log_mass_);
  }

 private:
  static constexpr double kSlack = 1e-6;  // more than two roundings to float
  double top_, log_mass_;
};

}  // namespace

void Sampler::continuations(const float* logits, uint32_t position, Mask mask, int count,
                            double floor, Scratch& scratch, std::vector<Continuation>& out) const {
  out.clear();
  if (adjusts(position, nullptr)) logits = adjusted(logits, position, nullptr, scratch.adjusted);
  const Row row(*kernels_, logits, options_.vocab, scratch);
  const LogSoftmax logprob(row);
  const auto add_best = [&](const Row& allowed) {
    const Cut wide = allowed.down_to(logprob.logit_below(floor));
    const Cut best = allowed.best(wide, count);
    for (const int id : allowed.within(allowed.down_to(logprob.below_equals(best.logit)))) {
      const float p = logprob(allowed[id]);
      if (static_cast<double>(p) >= floor && p > -kInfinity) out.push_back({id, p});
    }
  };
  if (!mask) return add_best(row);

  if (logits != scratch.adjusted.data()) scratch.adjusted.assign(logits, logits + options_.vocab);
  keep_allowed(mask, scratch.adjusted);
  if (std::ranges::all_of(scratch.adjusted, [](float logit) { return logit == -kInfinity; }))
    return;
  add_best(Row(*kernels_, scratch.adjusted.data(), options_.vocab, scratch));
}

void Sampler::weigh_choices(const float* logits, uint32_t position, std::span<const int> choices,
                            double floor, Scratch& scratch, std::vector<Continuation>& out) const {
  out.clear();
  if (adjusts(position, nullptr)) logits = adjusted(logits, position, nullptr, scratch.adjusted);
  const Row row(*kernels_, logits, options_.vocab, scratch);
  const LogSoftmax logprob(row);
  for (const int id : choices) {
    const float p = logprob(row[id]);
    if (static_cast<double>(p) >= floor && p > -kInfinity) out.push_back({id, p});
  }
}

void Sampler::append(int token) {
  check_token(token, options_.vocab);
  num_appended_++;
  if (has_penalties()) see(token, 1);
}

void Sampler::probabilities(const float* logits, uint32_t position, Mask mask, double* out,
                            Scratch& scratch) const {
  const Row row(
      *kernels_,
      adjusts(position, mask) ? adjusted(logits, position, mask, scratch.adjusted) : logits,
      options_.vocab, scratch);
  const int vocab = options_.vocab;
  if (options_.temperature < kGreedyBelow) {
    std::fill(out, out + vocab, 0.0);
    out[row.top_id()] = 1;
    return;
  }
  const Cut cut = filter(row, options_);
  double mass = 0;
  for (int id = 0; id < vocab; id++) {
    out[id] = row.keeps(cut, id)
                  ? std::exp((static_cast<double>(row[id]) - row.top()) / options_.temperature)
                  : 0.0;
    mass += out[id];
  }
  for (int id = 0; id < vocab; id++) out[id] /= mass;
}

std::pair<double, double> Sampler::uniforms(uint32_t position) const {
  // Philox as in `noisiest`, with another last word of the counter, which gives blocks
  // of their own.
  const uint32_t counter[] = {0, position, seq_index_, 1};
  const uint32_t key[] = {static_cast<uint32_t>(options_.seed),
                          static_cast<uint32_t>(options_.seed >> 32)};
  uint32_t words[4];
  kernels_->philox(counter, key, words);
  const auto uniform = [](uint32_t high, uint32_t low) {  // the middles of 2^53 equal parts
    return (static_cast<double>((static_cast<uint64_t>(high) << 32 | low) >> 11) + 0.5) * 0x1p-53;
  };
  return {uniform(words[0], words[1]), uniform(words[2], words[3])};
}

bool Sampler::has_penalties() const {
  return options_.repetition_penalty != 1 || options_.presence_penalty != 0 ||
         options_.frequency_penalty != 0;
}

void Sampler::see(int token, uint32_t in_output) {
  const auto [at, is_new] = index_.try_emplace(token, seen_.size());
  if (is_new) seen_.push_back({token, 0});
  seen_[at->second].in_output += in_output;
}

bool Sampler::adjusts(uint32_t position, Mask mask) const {
  return mask || !options_.logit_bias.empty() || !seen_.empty() ||
         (!options_.banned.empty() && position < options_.banned_until);
}

float* Sampler::adjusted(const float* logits, uint32_t position, Mask mask,
                         std::vector<float>& memory, const TokenMap* map) const {
  memory.assign(logits, logits + (map ? map->size() : options_.vocab));
  const auto logit_of = [&](int token) -> float* {  // null: the row has no logit of the token
    const int i = map ? map->index(token) : token;
    return i < 0 ? nullptr : &memory[static_cast<size_t>(i)];
  };
  for (const auto& [token, bias] : options_.logit_bias)
    if (float* logit = logit_of(token)) *logit += bias;
  for (const Seen& seen : seen_) {
    float* logit = logit_of(seen.token);
    if (!logit) continue;
    *logit =
        *logit > 0 ? *logit / options_.repetition_penalty : *logit * options_.repetition_penalty;
    if (seen.in_output)
      *logit -= options_.frequency_penalty * static_cast<float>(seen.in_output) +
                options_.presence_penalty;
  }
  if (position < options_.banned_until)
    for (int token : options_.banned)
      if (float* logit = logit_of(token)) *logit = -kInfinity;
  if (mask && map)
    keep_allowed(mask, memory, map->tokens());
  else if (mask)
    keep_allowed(mask, memory);
  return memory.data();
}

// The noise of a token as `noisiest` has it, in units of logits.
double Sampler::scaled_noise(int token, uint32_t position, uint32_t seq_index) const {
  if (options_.temperature < kGreedyBelow) return 0;
  const uint32_t counter[] = {static_cast<uint32_t>(token) >> 2, position, seq_index, 0};
  const uint32_t key[] = {static_cast<uint32_t>(options_.seed),
                          static_cast<uint32_t>(options_.seed >> 32)};
  uint32_t words[4];
  kernels_->philox(counter, key, words);
  return -options_.temperature * std::log(-std::log((words[token & 3] + 0.5) * 0x1p-32));
}

Expanded Sampler::expand(float* logits, uint32_t position, Mask mask, uint32_t seq_index, int width,
                         const TokenMap* map, Scratch& scratch) {
  if (adjusts(position, mask)) logits = adjusted(logits, position, mask, scratch.adjusted, map);
  const int size = map ? map->size() : options_.vocab;
  const int* tokens = map ? map->tokens() : nullptr;
  Expanded result;
  double top = 0, rest = 0, mass = 0;
  for (int i = 0; i < width; i++) {
    const uint32_t stream = i ? seq_index : seq_index_;
    int index = 0;
    try {
      const Row row(*kernels_, logits, size, scratch, tokens);
      if (!i) {
        top = static_cast<double>(row.top());
        rest = row.weigh(row.all(), 1.0);
      }
      index = choose(row, options_, stream, position);
    } catch (const NonFiniteLogits&) {
      if (!i) throw;
      break;
    }
    const int token = tokens ? tokens[index] : index;
    const double below = static_cast<double>(logits[index]) - top;
    const double score = below + scaled_noise(token, position, stream);
    rest -= std::exp(below);
    mass += std::exp(score);
    result.tokens.push_back(token);
    result.scores.push_back(score);
    logits[index] = -kInfinity;
  }
  const double log_mass = std::log(mass + std::max(rest, 0.0));
  for (double& score : result.scores) score -= log_mass;
  append(result.tokens.front());
  return result;
}

Verified verify_exact(Sampler& sampler, const float* logits, uint32_t position, DraftTree draft,
                      Mask masks, int num_logprobs, Scratch& scratch) {
  const int num_nodes = static_cast<int>(draft.tokens.size());
  Verified result;
  int node = -1;
  do {
    if (node >= 0) result.path.push_back(node);
    const float* row = logits + static_cast<ptrdiff_t>(node + 1) * sampler.vocab();
    const Mask mask =
        masks ? masks + static_cast<ptrdiff_t>(node + 1) * mask_words(sampler.vocab()) : nullptr;
    Drawn drawn = sampler.draw(row, position++, mask, num_logprobs, scratch);
    result.tokens.push_back(drawn.token);
    if (drawn.logprobs) result.logprobs.push_back(std::move(*drawn.logprobs));
    const int parent = node++;  // children come after their parent
    const auto is_next = [&](size_t i) {
      return draft.parents[i] == parent && draft.tokens[i] == drawn.token;
    };
    while (node < num_nodes && !is_next(static_cast<size_t>(node))) node++;
  } while (node < num_nodes);
  return result;
}

}  // namespace headrace
