#include "token_trie.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace headrace {
namespace {

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Sequences with a common beginning are neighbours in the order of their tokens; a node has the
// sequences `first` to `end` of that order.
struct Run {
  int first, end;
};

}  // namespace

TokenTrie::TokenTrie(std::span<const int32_t> tokens, std::span<const int32_t> starts, int vocab)
    : vocab_(vocab) {
  check(tokens.size() <= kMaxTokens, "a trie has at most 2^24 tokens");
  check(starts.size() > 1 && starts.front() == 0 &&
            starts.back() == static_cast<int32_t>(tokens.size()),
        "starts must begin with 0 and end with the number of tokens");
  for (size_t i = 1; i < starts.size(); i++)
    check(starts[i] > starts[i - 1], "a sequence of a trie needs a token");
  for (const int32_t token : tokens)
    check(token >= 0 && token < vocab, "a token is not in the vocabulary");

  const auto sequence = [&](int i) {
    const auto first = static_cast<size_t>(starts[static_cast<size_t>(i)]);
    return tokens.subspan(first, static_cast<size_t>(starts[static_cast<size_t>(i) + 1]) - first);
  };
  std::vector<int> order(starts.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return std::ranges::lexicographical_compare(sequence(a), sequence(b));
  });
  const auto ordered = [&](int place) { return sequence(order[static_cast<size_t>(place)]); };

  std::vector<Run> level = {{0, static_cast<int>(order.size())}}, next;
  tokens_.push_back(-1);
  for (size_t depth = 0; !level.empty(); depth++) {
    next.clear();
    for (auto [first, end] : level) {
      first_child_.push_back(static_cast<int32_t>(tokens_.size()));
      is_complete_.push_back(ordered(first).size() == depth);
      num_sequences_ += is_complete_.back();
      while (first < end && ordered(first).size() == depth) first++;
      while (first < end) {
        const int32_t token = ordered(first)[depth];
        const int start = first;
        while (first < end && ordered(first)[depth] == token) first++;
        tokens_.push_back(token);
        next.push_back({start, first});
      }
    }
    level.swap(next);
  }
  first_child_.push_back(static_cast<int32_t>(tokens_.size()));
  tokens_.shrink_to_fit();
  first_child_.shrink_to_fit();
}

size_t TokenTrie::num_bytes() const {
  return (tokens_.size() + first_child_.size()) * sizeof(int32_t) + is_complete_.size() / 8;
}

std::span<const int32_t> TokenTrie::choices(int node) const {
  const auto first = static_cast<size_t>(first_child_[static_cast<size_t>(node)]);
  const auto end = static_cast<size_t>(first_child_[static_cast<size_t>(node) + 1]);
  return std::span(tokens_).subspan(first, end - first);
}

int TokenTrie::child(int node, int token) const {
  const std::span<const int32_t> tokens = choices(node);
  const auto found = std::ranges::lower_bound(tokens, token);
  if (found == tokens.end() || *found != token) return -1;
  return first_child_[static_cast<size_t>(node)] + static_cast<int>(found - tokens.begin());
}

int TokenTrie::inner_token(std::span<const int32_t> tokens) const {
  for (int node = 1; node < num_nodes(); node++) {
    const int32_t token = tokens_[static_cast<size_t>(node)];
    if (!is_leaf(node) && std::ranges::binary_search(tokens, token)) return token;
  }
  return -1;
}

}  // namespace headrace
