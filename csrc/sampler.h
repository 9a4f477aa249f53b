// Choosing a token from a row of logits. Everything here depends on the row, the
// sequence's own history and its seed only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "one_caller.h"

namespace headrace {

struct NonFiniteLogits : std::runtime_error {
  NonFiniteLogits() : std::runtime_error("the model produced non-finite logits") {}
};

struct SamplingOptions {
  int vocab = 0;
  double temperature = 1.0;  // 0: greedy
  int top_k = 0;             // 0: off
  double top_p = 1.0;
  double min_p = 0.0;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;
  std::vector<std::pair<int, float>> logit_bias;
  std::vector<int> banned;  // tokens that may not be drawn before position `banned_until`
  int64_t banned_until = 0;
};

// Log-probabilities of the raw row at one position.
struct TokenLogprobs {
  float logprob = 0;
  int rank = 0;  // 1 is the likeliest token
  std::vector<int> top_ids;
  std::vector<float> top_logprobs;
};

// The tokens that may be drawn from a row: bit i % 32 of word i / 32 is token i's. None
// at all: every token may.
using Mask = const uint32_t*;
constexpr int kMaskBits = 32;
constexpr int mask_words(int vocab) { return (vocab + kMaskBits - 1) / kMaskBits; }

// The tokens that a row of logits has, ascending, if it has not all of the vocabulary.
class TokenMap {
 public:
  // Throws invalid_argument unless the tokens ascend from 0 to below `vocab`.
  TokenMap(std::vector<int> tokens, int vocab);

  int size() const { return static_cast<int>(tokens_.size()); }
  int vocab() const { return static_cast<int>(index_.size()); }
  const int* tokens() const { return tokens_.data(); }
  int index(int token) const { return index_[static_cast<size_t>(token)]; }  // -1: no logit

 private:
  std::vector<int> tokens_, index_;
};

struct Drawn {
  int token = 0;
  std::optional<TokenLogprobs> logprobs;
};

// A token that may follow, and its log-probability.
struct Continuation {
  int token = 0;
  float logprob = 0;
};

// Memory that a thread's draws use one after the other: as large as a row, too large to
// be taken anew for each.
struct Scratch {
  std::vector<float> peaks, weights, adjusted;
  std::vector<int> ids;
  std::vector<uint64_t> ranks;
};

// Throws NonFiniteLogits.
TokenLogprobs token_logprobs(const Kernels& kernels, const float* logits, int size, int token,
                             int num_logprobs, Scratch& scratch);

// The tokens of an expanded row, and the logarithm of the estimated probability of each.
struct Expanded {
  std::vector<int> tokens;
  std::vector<double> scores;
};

// The sampling state of one sequence.
class Sampler {
 public:
  Sampler(const Kernels* kernels, SamplingOptions options, const std::vector<int>& prompt,
          uint32_t seq_index);

  // The same state under another sequence's noise.
  Sampler clone(uint32_t seq_index) const;

  // A token of the sequence that penalties apply to.
  struct Seen {
    int token;
    uint32_t in_output;  // how often it is there; 0 for one of the prompt alone
  };

  int vocab() const { return options_.vocab; }
  const SamplingOptions& options() const { return options_; }
  uint32_t seq_index() const { return seq_index_; }
  bool has_penalties() const;
  std::span<const Seen> seen() const { return seen_; }
  uint64_t num_appended() const {
    return num_appended_;
  }  // a copy elsewhere of what was seen is out of date if this is more than then
  OneCaller& caller() { return caller_; }  // a caller that draws has a turn

  // The token at `position` from a row as wide as the vocabulary, of those that the
  // mask allows; it becomes part of the state. Log-probabilities, which are those of
  // the row itself, if num_logprobs >= 0. Throws NonFiniteLogits, also where no token
  // is left.
  Drawn draw(const float* logits, uint32_t position, Mask mask, int num_logprobs, Scratch& scratch);

  // The best tokens that the mask allows, in any order: at least the best `count`, and all that
  // are as likely as the last of these, but none below the log-probability `floor` and none of
  // probability 0. Log-probabilities are those among all tokens of the row under biases,
  // penalties and bans, at temperature 1. Throws NonFiniteLogits.
  void continuations(const float* logits, uint32_t position, Mask mask, int count, double floor,
                     Scratch& scratch, std::vector<Continuation>& out) const;
  // The same of these tokens alone.
  void weigh_choices(const float* logits, uint32_t position, std::span<const int> choices,
                     double floor, Scratch& scratch, std::vector<Continuation>& out) const;

  // Draws a token, and then the next best under the same noise, up to `width`; the logits
  // of drawn tokens may become -inf. It ends early if no token is left; throws
  // NonFiniteLogits if there is not one. The first token becomes part of the state; the
  // others are drawn as sequence `seq_index` of the request draws. With a map, the row has
  // the logits of its tokens only. A score compares logits with the noise of drawn tokens, and
  // without that of all others: softmax(logit + temperature * noise).
  Expanded expand(float* logits, uint32_t position, Mask mask, uint32_t seq_index, int width,
                  const TokenMap* map, Scratch& scratch);

  // A token that was chosen elsewhere becomes part of the state, as if it had been
  // drawn.
  void append(int token);

  // The distribution that `draw` draws from, [vocab]. Throws NonFiniteLogits.
  void probabilities(const float* logits, uint32_t position, Mask mask, double* out,
                     Scratch& scratch) const;
  // Two numbers between 0 and 1 that belong to the position, independent of the noise
  // that `draw` uses.
  std::pair<double, double> uniforms(uint32_t position) const;

 private:
  bool adjusts(uint32_t position, Mask mask) const;
  float* adjusted(const float* logits, uint32_t position, Mask mask, std::vector<float>& memory,
                  const TokenMap* map = nullptr) const;
  double scaled_noise(int token, uint32_t position, uint32_t seq_index) const;
  void see(int token, uint32_t in_output);

  OneCaller caller_;
  const Kernels* kernels_;
  SamplingOptions options_;
  uint32_t seq_index_;
  uint64_t num_appended_ = 0;
  std::vector<Seen>
      seen_;  // kept only when there are penalties, and of the prompt only what they look at
  std::unordered_map<int, size_t> index_;  // of a token in seen_
};

// Draft tokens below the last known token of a sequence: node i follows node parents[i]
// < i, or that token if it is -1.
struct DraftTree {
  std::span<const int> tokens, parents;
};

// The tokens of the accepted path of a draft tree, and the one drawn at its end.
struct Verified {
  std::vector<int> tokens, path;        // the path names nodes, from the root down
  std::vector<TokenLogprobs> logprobs;  // of each token, if they were asked for
};

// Draws a token, goes to the first draft node that has it, and so on until there is
// none. The rows of the nodes follow `logits`, that of the last known token, and so do
// their masks, if there are any; `position` is that of the first token. Throws
// NonFiniteLogits.
Verified verify_exact(Sampler& sampler, const float* logits, uint32_t position, DraftTree draft,
                      Mask masks, int num_logprobs, Scratch& scratch);

}  // namespace headrace
