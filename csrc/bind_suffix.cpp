#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "suffix_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

constexpr int kMaxNodes = 4096;

nb::tuple draft(const SuffixTree& local, int own, const SuffixTree* corpus, int skipped,
                int max_nodes, int max_width, int min_length, double min_value) {
  require(max_nodes >= 0 && max_nodes <= kMaxNodes, "max_nodes must be from 0 to 4,096");
  require(max_width >= 1, "max_width must be at least 1");
  require(min_length >= 1, "min_length must be at least 1");
  const SuffixDraft made =
      draft_from(local, own, corpus, skipped, {max_nodes, max_width, min_length, min_value});
  return nb::make_tuple(made.tokens, made.parents, made.probabilities, made.match_length,
                        made.is_own);
}

}  // namespace

void bind_suffix(nb::module_& m) {
  nb::class_<SuffixTree>(m, "SuffixTree")
      .def(nb::init<>())
      .def(
          "begin",
          [](SuffixTree& tree, const std::vector<int32_t>& context) { return tree.begin(context); },
          "context"_a,
          "The id of a new text. The tokens of `context` are before it, and are never drafted.")
      .def(
          "append",
          [](SuffixTree& tree, int text, const std::vector<int32_t>& tokens) {
            tree.append(text, tokens);
          },
          "text"_a, "tokens"_a)
      .def("remove", &SuffixTree::remove, "text"_a)
      .def_prop_ro("num_places", &SuffixTree::num_places,
                   "Tokens of all texts that may be drafted; contexts are left out.")
      .def_prop_ro("num_bytes", &SuffixTree::num_bytes);
  m.def("suffix_draft", &draft, "local"_a, "own"_a, "corpus"_a.none(), "skipped"_a, nb::kw_only(),
        "max_nodes"_a, "max_width"_a, "min_length"_a, "min_value"_a,
        nb::sig("def suffix_draft(local: SuffixTree, own: int, corpus: SuffixTree | None, "
                "skipped: int, *, max_nodes: int, max_width: int, min_length: int, "
                "min_value: float) "
                "-> tuple[list[int], list[int], list[float], int, bool]"),
        "Tokens, parents and probabilities of the likeliest continuations of a text, and the "
        "length of its longest match, and whether that is in the text itself.");
}

}  // namespace headrace
