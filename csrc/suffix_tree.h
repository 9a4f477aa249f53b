// Continuations of contexts in earlier text, for drafts by frequency.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

namespace headrace {

// A place is a position in a text; its context is the tokens before it, read backwards.
// The places are in the order of their contexts, so that places with a common context
// are neighbours: the leaves of the suffix tree of the reversed texts, without its inner
// nodes (a suffix array in a search tree, so that places come and go in O(log n)).
class SuffixTree {
 public:
  // Tokens of a context that count; longer contexts that agree so far are equal.
  static constexpr int kMaxMatch = 32;

  // A place whose context agrees with the end of a text.
  struct Match {
    const std::vector<int32_t>* tokens;
    uint32_t place;
    int length;       // tokens that agree
    uint64_t serial;  // of the text: later texts have higher ones
    bool is_own;      // whether the text is the one that is continued
  };

  SuffixTree() : places_(ByContext{this}) {}
  SuffixTree(const SuffixTree&) = delete;
  SuffixTree& operator=(const SuffixTree&) = delete;

  // A new text, and `context` tokens before it, which are no places.
  int begin(std::span<const int32_t> context);
  void append(int text, std::span<const int32_t> tokens);
  // Throws std::out_of_range, as all that take a text do.
  void remove(int text);

  const std::vector<int32_t>& tokens(int text) const { return text_at(text).tokens; }
  size_t num_places() const { return places_.size(); }
  // Bytes of the texts and places, as the allocator rounds them.
  size_t num_bytes() const;

  // Appends up to `max_matches` matches of at least `min_length` with the end of
  // `known`, the longest first, none of half the longest length or less. Text `skipped`
  // has none (-1: all have).
  void find(std::span<const int32_t> known, int skipped, int min_length, size_t max_matches,
            std::vector<Match>& found) const;

 private:
  struct Text {
    std::vector<int32_t> tokens;
    uint32_t first_place = 0;
    uint64_t serial = 0;
  };
  struct Place {
    uint32_t text;
    uint32_t offset;
  };
  struct ByContext {
    using is_transparent = void;
    const SuffixTree* tree;
    bool operator()(const Place& a, const Place& b) const;
    bool operator()(const Place& a, std::span<const int32_t> known) const;
    bool operator()(std::span<const int32_t> known, const Place& a) const;
  };

  const Text& text_at(int text) const;
  std::span<const int32_t> context_of(const Place& place) const;

  std::vector<std::unique_ptr<Text>> texts_;  // by id; the ids of removed texts are used again
  std::vector<int> free_ids_;
  uint64_t num_begun_ = 0;
  std::set<Place, ByContext> places_;
};

struct SuffixDraft {
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
  std::vector<double> probabilities;  // of each node, its parent taken as right
  int match_length = 0;               // of the longest match
  bool is_own = false;                // whether the longest match is in the own text
};

struct SuffixDraftOptions {
  int max_nodes = 16;
  int max_width = 3;       // children of a node
  int min_length = 1;      // tokens of a match
  double min_value = 0.1;  // least product of the probabilities on the way to a node
};

// The likeliest continuations of text `own` of `local`, from its own earlier places and
// from `corpus` (nullptr: none), of which text `skipped` counts not. A match votes for
// its next token with the square of its length, and one in `own` with a multiple of it.
SuffixDraft draft_from(const SuffixTree& local, int own, const SuffixTree* corpus, int skipped,
                       const SuffixDraftOptions& options);

}  // namespace headrace
