#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bind.h"
#include "sampler.h"
#include "token_trie.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MaskArray = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int checked(const TokenTrie& trie, int node) {
  require(node >= 0 && node < trie.num_nodes(), "the trie has no such node");
  return node;
}

void make(TokenTrie* self, const Ints& tokens, const Ints& starts, int vocab) {
  require(vocab > 0 && vocab <= kMaxWidth, "vocab must be between 1 and 2^24");
  // Copies, which no other thread can write to.
  const std::vector<int32_t> own_tokens(tokens.data(), tokens.data() + tokens.size());
  const std::vector<int32_t> own_starts(starts.data(), starts.data() + starts.size());
  nb::gil_scoped_release released;
  new (self) TokenTrie(own_tokens, own_starts, vocab);
}

void fill(const TokenTrie& trie, int node, const MaskArray& mask) {
  const auto words = static_cast<size_t>(mask_words(trie.vocab()));
  require(mask.size() == words, "a mask must be [words], with a bit for each token");
  uint32_t* bits = mask.data();
  std::fill(bits, bits + words, 0);
  for (const int32_t token : trie.choices(checked(trie, node)))
    bits[token / kMaskBits] |= uint32_t{1} << token % kMaskBits;
}

}  // namespace

void bind_trie(nb::module_& m) {
  nb::class_<TokenTrie>(m, "TokenTrie")
      .def("__init__", &make, "tokens"_a, "starts"_a, "vocab"_a)
      .def_prop_ro("num_nodes", &TokenTrie::num_nodes)
      .def_prop_ro("num_sequences", &TokenTrie::num_sequences,
                   "Sequences, of which equal ones count once.")
      .def_prop_ro("num_bytes", &TokenTrie::num_bytes)
      .def(
          "child",
          [](const TokenTrie& trie, int node, int token) {
            return trie.child(checked(trie, node), token);
          },
          "node"_a, "token"_a, "The node after a token; -1 if the trie does not allow it.")
      .def(
          "is_complete",
          [](const TokenTrie& trie, int node) { return trie.is_complete(checked(trie, node)); },
          "node"_a, "Whether a sequence ends at a node.")
      .def(
          "is_leaf",
          [](const TokenTrie& trie, int node) { return trie.is_leaf(checked(trie, node)); },
          "node"_a, "Whether no token follows a node.")
      .def(
          "inner_token",
          [](const TokenTrie& trie, std::vector<int32_t> tokens) {
            std::sort(tokens.begin(), tokens.end());
            return trie.inner_token(tokens);
          },
          "tokens"_a, "One of these tokens that a sequence has before its end; -1: there is none.")
      .def("fill", &fill, "node"_a, "mask"_a,
           "Write the mask of the tokens that may follow a node, [words].");
}

}  // namespace headrace
