// The token sequences of which an output must be one, as a tree of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

// Nodes are numbered breadth first, so the children of a node are adjacent, in the order of
// their tokens. Node 0 is the start of all sequences. A tree never changes, so threads may share
// it.
class TokenTrie {
 public:
  static constexpr int kMaxTokens = 1 << 24;  // of all sequences together

  // Sequence i has the tokens starts[i] to starts[i + 1]. Throws std::invalid_argument unless
  // there are sequences, and each has tokens, all of them below `vocab`.
  TokenTrie(std::span<const int32_t> tokens, std::span<const int32_t> starts, int vocab);

  int vocab() const { return vocab_; }
  int num_nodes() const { return static_cast<int>(tokens_.size()); }
  int num_sequences() const { return num_sequences_; }  // equal ones count once
  size_t num_bytes() const;

  // The tokens that may follow a node, ascending.
  std::span<const int32_t> choices(int node) const;
  // Whether a sequence ends at a node.
  bool is_complete(int node) const { return is_complete_[static_cast<size_t>(node)]; }
  // The child of a node by its token; -1: there is none.
  int child(int node, int token) const;
  bool is_leaf(int node) const { return choices(node).empty(); }
  // One of these tokens, which ascend, that a sequence has before its end; -1: there is none.
  int inner_token(std::span<const int32_t> tokens) const;

 private:
  int vocab_;
  int num_sequences_ = 0;
  std::vector<int32_t> tokens_;       // [nodes] the token that leads to a node
  std::vector<int32_t> first_child_;  // [nodes + 1]
  std::vector<bool> is_complete_;     // [nodes]
};

}  // namespace headrace
