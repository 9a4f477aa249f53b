// Choosing a token from a row of logits. Everything here depends on the row, the branch's own history and its seed only.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

namespace headrace {

class Row;

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

TokenLogprobs token_logprobs(const Row& row, int token, int num_logprobs);

// The sampling state of one branch.
class Sampler {
 public:
  Sampler(SamplingOptions options, const std::vector<int>& prompt, uint32_t branch);

  // The same state under another branch's noise.
  Sampler clone(uint32_t branch) const;

  // The token at `position`, which becomes part of the state. Throws NonFiniteLogits.
  int draw(const Row& row, uint32_t position);

 private:
  struct Seen {
    bool in_prompt = false;
    uint32_t in_output = 0;
  };

  bool has_penalties() const;
  bool adjusts(uint32_t position) const;
  std::vector<float> adjusted(const Row& row, uint32_t position) const;

  SamplingOptions options_;
  uint32_t branch_;
  std::unordered_map<int, Seen> seen_;  // kept only when there are penalties
};

}  // namespace headrace
