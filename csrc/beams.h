// The best continuations of the beams of a search.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pool.h"
#include "sampler.h"
#include "token_trie.h"

namespace headrace {

struct Beam {
  const Sampler* sampler = nullptr;
  const float* logits = nullptr;  // [vocab]
  Mask mask = nullptr;            // the tokens that may follow; null: all, or those of the trie
  double total = 0;               // the sum of the log-probabilities of its tokens
  int node = 0;                   // of the trie
};

struct SearchStep {
  uint32_t position = 0;     // of the next token, in each beam
  int count = 1;             // candidates to find that do not end
  bool all_count = false;    // whether candidates that end count, too
  std::vector<int> end_ids;  // tokens that end a beam, ascending
  const TokenTrie* trie = nullptr;
};

// A beam with one more token. Best first; equal totals by beam, then by token.
struct Candidate {
  double loss = 0;  // the negated total
  int beam = 0;
  int token = 0;
  bool ends = false;  // by an end token, or at a leaf of the trie

  friend auto operator<=>(const Candidate&, const Candidate&) = default;
};

// The candidates up to the last that counts, or all of them if they are too few. A token of
// probability 0 is none. Nothing if a row of logits is not finite. The threads of the pool share
// the beams; the result depends on none of them.
std::optional<std::vector<Candidate>> rank_beams(Pool& pool, std::span<const Beam> beams,
                                                 const SearchStep& step);

}  // namespace headrace
