// Python's view of the sampler. Everything is checked here, once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>

#include "beams.h"
#include "bind.h"
#include "hardware.h"
#include "pool.h"
#include "sampler.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Logits = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

// Draws come from the caller's thread and from those of a pool; each keeps its memory
// for the next step.
thread_local Scratch scratch;

int width_of(const auto& logits, size_t ndim) {
  require(logits.ndim() == ndim,
          ndim == 1 ? "logits must be [vocab]" : "logits must be [rows, vocab]");
  const size_t width = logits.shape(ndim - 1);
  require(width > 0 && width <= 1 << 24, "a row of logits must have between 1 and 2^24 entries");
  return static_cast<int>(width);
}

nb::tuple as_tuple(const TokenLogprobs& p) {
  return nb::make_tuple(p.logprob, p.rank, nb::cast(p.top_ids), nb::cast(p.top_logprobs));
}

nb::tuple as_tuple(const Verified& verified) {
  nb::list logprobs;
  for (const TokenLogprobs& of : verified.logprobs) logprobs.append(as_tuple(of));
  return nb::make_tuple(nb::cast(verified.tokens), nb::cast(verified.path), logprobs);
}

nb::tuple as_tuple(const Drawn& drawn) {
  return nb::make_tuple(drawn.token,
                        drawn.logprobs ? nb::object(as_tuple(*drawn.logprobs)) : nb::none());
}

nb::tuple as_tuple(const Expanded& expanded) {
  return nb::make_tuple(expanded.tokens, expanded.scores);
}

// Its holder alone uses the sampler, also while it has given up Python's lock.
constexpr const char* kInUse = "the sampler is at work in another thread: one at a time";
OneCaller::Turn turn_of(Sampler& sampler) { return {sampler.caller(), kInUse}; }

// The masks of so many rows, none where there are none: a copy, which no other thread
// can write to.
using Masks = std::vector<uint32_t>;

Mask data_of(const Masks& masks) { return masks.empty() ? nullptr : masks.data(); }

void check_mask(std::span<const uint32_t> mask, int vocab) {
  const auto beyond = static_cast<uint32_t>(mask.size() * kMaskBits -
                                            static_cast<size_t>(vocab));  // bits of the last word
  const bool is_empty =
      std::all_of(mask.begin(), mask.end() - 1, [](uint32_t word) { return !word; });
  require(!is_empty || mask.back() << beyond, "a mask allows no token");
}

Masks masks_of(nb::handle given, int rows, int vocab) {
  if (given.is_none()) return {};
  nb::ndarray<const uint32_t, nb::c_contig, nb::device::cpu> array;
  require(nb::try_cast(given, array, false),
          "masks must be an array of uint32, one row after the other");
  const auto words = static_cast<size_t>(mask_words(vocab));
  const size_t size = static_cast<size_t>(rows) * words;
  require(
      array.ndim() == 2 && array.shape(0) == static_cast<size_t>(rows) && array.shape(1) == words,
      "masks must be [rows, words]: a row for each row of logits of the op, with a bit for each "
      "token");
  Masks masks(array.data(), array.data() + size);
  for (size_t first = 0; first < size; first += words)
    check_mask(std::span(masks).subspan(first, words), vocab);
  return masks;
}

nb::tuple draw(Sampler& sampler, const Logits& logits, uint32_t position, int num_logprobs,
               nb::handle given) {
  require(width_of(logits, 1) == sampler.vocab(),
          "the row of logits is not as wide as the vocabulary");
  const Masks masks = masks_of(given, 1, sampler.vocab());
  const OneCaller::Turn turn = turn_of(sampler);
  Drawn drawn;
  {
    nb::gil_scoped_release released;
    drawn = sampler.draw(logits.data(), position, data_of(masks), num_logprobs, scratch);
  }
  return as_tuple(drawn);
}

using Probabilities = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

Probabilities probabilities(Sampler& sampler, const Logits& logits, uint32_t position,
                            nb::handle given) {
  require(width_of(logits, 1) == sampler.vocab(),
          "the row of logits is not as wide as the vocabulary");
  const Masks masks = masks_of(given, 1, sampler.vocab());
  const OneCaller::Turn turn = turn_of(sampler);
  auto values = std::make_unique<double[]>(static_cast<size_t>(sampler.vocab()));
  {
    nb::gil_scoped_release released;
    sampler.probabilities(logits.data(), position, data_of(masks), values.get(), scratch);
  }
  const size_t shape[] = {static_cast<size_t>(sampler.vocab())};
  double* data = values.release();
  return {data, 1, shape,
          nb::capsule(data, [](void* p) noexcept { delete[] static_cast<double*>(p); })};
}

// What the sampler was made with, by the names that its constructor has for them.
nb::dict options_of(const Sampler& sampler) {
  const SamplingOptions& o = sampler.options();
  nb::dict d;
  d["vocab"] = o.vocab;
  d["seq_index"] = sampler.seq_index();
  d["seed"] = o.seed;
  d["temperature"] = o.temperature;
  d["top_k"] = o.top_k;
  d["top_p"] = o.top_p;
  d["min_p"] = o.min_p;
  d["repetition_penalty"] = o.repetition_penalty;
  d["presence_penalty"] = o.presence_penalty;
  d["frequency_penalty"] = o.frequency_penalty;
  d["logit_bias"] = nb::cast(o.logit_bias);
  d["banned"] = nb::cast(o.banned);
  d["banned_until"] = o.banned_until;
  return d;
}

using Ints = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>;

// The tokens that penalties apply to, each with the number of times it is in the
// output: [2, tokens].
Ints seen_by(Sampler& sampler) {
  const OneCaller::Turn turn = turn_of(sampler);
  const std::span<const Sampler::Seen> seen = sampler.seen();
  const size_t n = seen.size(), shape[] = {2, n};
  auto* data = new int32_t[2 * n];
  for (size_t i = 0; i < n; i++) {
    data[i] = seen[i].token;
    data[n + i] = static_cast<int32_t>(seen[i].in_output);
  }
  return {data, 2, shape,
          nb::capsule(data, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); })};
}

uint64_t num_appended(Sampler& sampler) {
  const OneCaller::Turn turn = turn_of(sampler);
  return sampler.num_appended();
}

// The fields of a `Draw` of headrace/logit_ops.py, and of its `DraftTree`; what has no
// type is not read here.
using DraftFields =
    std::tuple<std::vector<int>, std::vector<int>, nb::handle, nb::handle, nb::handle>;
using HeldSampler =
    std::shared_ptr<Sampler>;  // stays while it draws, whatever becomes of the list that it came in
using Draw = std::tuple<int, uint32_t, HeldSampler, DraftFields, int, nb::handle, nb::handle>;
using HeldMap = std::shared_ptr<TokenMap>;
// Those of an `Expand`: row, position, sampler, index of the sequence, the number of
// tokens, whether it has probabilities, the masks and, last, the tokens of the row.
using Expand =
    std::tuple<int, uint32_t, HeldSampler, uint32_t, int, nb::handle, nb::handle, HeldMap>;

Sampler& sampler_of(const auto& op) { return *std::get<2>(op); }

template <class Op>
nb::handle given_masks(const Op& op) {
  return std::get<std::tuple_size_v<Op> - 1>(op);
}

nb::handle given_masks(const Expand& op) { return std::get<6>(op); }

// The logits of the op's rows.
int width_of_op(const auto& op) { return sampler_of(op).vocab(); }

int width_of_op(const Expand& op) {
  const HeldMap& map = std::get<7>(op);
  require(!map || map->vocab() == sampler_of(op).vocab(),
          "the token map belongs to another vocabulary");
  return map ? map->size() : sampler_of(op).vocab();
}

void check_draft(const DraftFields& draft) {
  const auto& [tokens, parents, confidence, indivisible, probabilities] = draft;
  require(tokens.size() == parents.size(), "a draft tree needs a parent for each of its tokens");
  for (size_t i = 0; i < parents.size(); i++)
    require(parents[i] >= -1 && parents[i] < static_cast<int>(i),
            "a draft node comes after its parent");
}

int rows_of(const auto&) { return 1; }

int rows_of(const Draw& draw) {
  const DraftFields& draft = std::get<3>(draw);
  check_draft(draft);
  return 1 + static_cast<int>(std::get<0>(draft).size());
}

bool all_differ(auto& values) {
  std::sort(values.begin(), values.end());
  return std::adjacent_find(values.begin(), values.end()) == values.end();
}

template <class Op>
void check_ops(const std::vector<Op>& ops, int rows, int width) {
  std::vector<const Sampler*> samplers;
  for (const Op& op : ops) {
    require(std::get<2>(op) && width_of_op(op) == width,
            "the rows of logits are not as wide as the vocabulary");
    require(std::get<0>(op) >= 0 && std::get<0>(op) <= rows - rows_of(op),
            "a draw names a row that is not there");
    samplers.push_back(&sampler_of(op));
  }
  require(all_differ(samplers), "a sampler can make one draw at a time");
}

// What `method` makes of each op and its rows, or nothing where a row is not finite;
// the threads of the pool share the ops.
template <class Result, class Op, class Method>
std::vector<std::optional<Result>> for_each(Pool& pool, const auto& logits,
                                            const std::vector<Op>& ops, Method method) {
  const int width = width_of(logits, 2);
  require(logits.shape(0) <= 1 << 30, "logits have at most 2^30 rows");
  check_ops(ops, static_cast<int>(logits.shape(0)), width);
  std::deque<OneCaller::Turn> turns;
  std::vector<Masks> masks;
  for (const Op& op : ops) {
    turns.emplace_back(sampler_of(op).caller(), kInUse);
    masks.push_back(masks_of(given_masks(op), rows_of(op), sampler_of(op).vocab()));
  }
  std::vector<std::optional<Result>> results(ops.size());
  const auto run = [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) {
      const Op& op = ops[static_cast<size_t>(i)];
      try {
        const Mask its_masks = data_of(masks[static_cast<size_t>(i)]);
        results[static_cast<size_t>(i)] =
            method(op, logits.data() + static_cast<size_t>(std::get<0>(op)) * width, its_masks);
      } catch (const NonFiniteLogits&) {  // stays without a result
      }
    }
  };
  {
    nb::gil_scoped_release released;
    const int n = static_cast<int>(ops.size());
    if (n == 1)
      run(0, 1, 0);
    else
      pool.parallel(n, run);
  }
  return results;
}

// `as_tuple` of each result; None for what has none.
template <class Result>
nb::list as_list(const std::vector<std::optional<Result>>& results) {
  nb::list list;
  for (const auto& result : results)
    list.append(result ? nb::object(as_tuple(*result)) : nb::none());
  return list;
}

nb::list verify_all(Pool& pool, const Logits& logits, const std::vector<Draw>& draws) {
  return as_list(
      for_each<Verified>(pool, logits, draws, [](const Draw& op, const float* rows, Mask masks) {
        const auto& [row, position, sampler, draft, num_logprobs, method, given] = op;
        return verify_exact(*sampler, rows, position, {std::get<0>(draft), std::get<1>(draft)},
                            masks, num_logprobs, scratch);
      }));
}

// Those of a `RankBeams`: the rows, the position, the samplers and the totals of the beams, the
// candidates to find and whether all of them count, the end tokens, the masks, the trie, and the
// nodes of the beams in it.
using HeldTrie = std::shared_ptr<TokenTrie>;
using RankBeams =
    std::tuple<std::vector<int>, uint32_t, std::vector<HeldSampler>, std::vector<double>, int, bool,
               std::vector<int>, nb::handle, HeldTrie, std::vector<int>>;

void check_beams(const RankBeams& op, int num_rows, int width) {
  const auto& [rows, position, samplers, totals, count, all_count, ends, given, trie, nodes] = op;
  const size_t n = rows.size();
  require(n > 0 && samplers.size() == n && totals.size() == n,
          "each beam needs a row, a sampler and a total");
  require(count > 0 && count <= kMaxWidth, "a count must be above 0, and at most 2^24");
  for (const int row : rows)
    require(row >= 0 && row < num_rows, "a beam names a row that is not there");
  std::vector<const Sampler*> distinct;
  for (const HeldSampler& sampler : samplers) {
    require(sampler && sampler->vocab() == width,
            "the rows of logits are not as wide as the vocabulary");
    distinct.push_back(sampler.get());
  }
  require(all_differ(distinct), "each beam needs a sampler of its own");
  require(nodes.size() == (trie ? n : 0), "each beam needs a node of the trie");
  require(!trie || given.is_none(), "beams have masks or a trie");
  require(!trie || trie->vocab() == width, "the trie belongs to another vocabulary");
  for (const int node : nodes)
    require(node >= 0 && node < trie->num_nodes(), "a beam is at a node that is not there");
}

nb::object ranked_beams(Pool& pool, const Logits& logits, const RankBeams& op) {
  const int width = width_of(logits, 2);
  require(logits.shape(0) <= 1 << 30, "logits have at most 2^30 rows");
  check_beams(op, static_cast<int>(logits.shape(0)), width);
  const auto& [rows, position, samplers, totals, count, all_count, ends, given, trie, nodes] = op;
  const Masks masks = masks_of(given, static_cast<int>(rows.size()), width);
  std::deque<OneCaller::Turn> turns;
  std::vector<Beam> beams;
  for (size_t i = 0; i < rows.size(); i++) {
    turns.emplace_back(samplers[i]->caller(), kInUse);
    beams.push_back(
        {samplers[i].get(), logits.data() + static_cast<size_t>(rows[i]) * width,
         masks.empty() ? nullptr : masks.data() + i * static_cast<size_t>(mask_words(width)),
         totals[i], nodes.empty() ? 0 : nodes[i]});
  }
  SearchStep step{position, count, all_count, ends, trie.get()};
  std::sort(step.end_ids.begin(), step.end_ids.end());
  std::optional<std::vector<Candidate>> ranked;
  {
    nb::gil_scoped_release released;
    ranked = rank_beams(pool, beams, step);
  }
  if (!ranked) return nb::none();
  nb::list of, tokens, sums, finished;
  for (const Candidate& candidate : *ranked) {
    of.append(candidate.beam);
    tokens.append(candidate.token);
    sums.append(-candidate.loss);
    finished.append(candidate.ends);
  }
  return nb::make_tuple(of, tokens, sums, finished);
}

nb::list rank_all(Pool& pool, const Logits& logits, const std::vector<RankBeams>& ops) {
  nb::list results;
  for (const RankBeams& op : ops) results.append(ranked_beams(pool, logits, op));
  return results;
}

nb::list expand_all(Pool& pool, const nb::ndarray<float, nb::c_contig, nb::device::cpu>& logits,
                    const std::vector<Expand>& ops) {
  std::vector<int> rows;
  for (const Expand& op : ops) {
    require(std::get<4>(op) > 0, "a width must be above 0");
    rows.push_back(std::get<0>(op));
  }
  require(all_differ(rows), "a row of logits can be expanded once: it is overwritten");
  return as_list(
      for_each<Expanded>(pool, logits, ops, [](const Expand& op, float* logits_row, Mask mask) {
        const auto& [row, position, sampler, seq_index, width, probabilities, given, map] = op;
        return sampler->expand(logits_row, position, mask, seq_index, width, map.get(), scratch);
      }));
}

nb::tuple logprobs_of(const Logits& logits, int token, int num_logprobs, const std::string& isa) {
  const int width = width_of(logits, 1);
  const Kernels& kernels = *kernels_for(isa);
  TokenLogprobs result;
  {
    nb::gil_scoped_release released;
    result = token_logprobs(kernels, logits.data(), width, token, num_logprobs, scratch);
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
      [](std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key, const std::string& isa) {
        std::array<uint32_t, 4> words;
        kernels_for(isa)->philox(counter.data(), key.data(), words.data());
        return words;
      },
      "counter"_a, "key"_a, "isa"_a = "");
  m.def("token_logprobs", &logprobs_of, "logits"_a, "token"_a, "num_logprobs"_a, "isa"_a = "");
  m.def("verify_exact", &verify_all, "pool"_a, "logits"_a, "draws"_a,
        "The fields of the `Drawn` that each `Draw` gives by exact verification, from logits "
        "[rows, vocab], with its log-probabilities as "
        "tuples; None where a row that it came to is not finite.");
  m.def("rank_beams", &rank_all, "pool"_a, "logits"_a, "ops"_a,
        "The fields of the `RankedBeams` that each `RankBeams` gives; None if one of its rows is "
        "not finite.");
  m.def("expand", &expand_all, "pool"_a, "logits"_a, "ops"_a,
        "The tokens and scores of the `Expanded` that each `Expand` gives, whose row it may "
        "overwrite; None if its row is not finite.");
  nb::class_<TokenMap>(m, "TokenMap")
      .def(
          "__init__",
          [](TokenMap* self, std::vector<int> tokens, int vocab) {
            new (self) TokenMap(std::move(tokens), vocab);
          },
          "tokens"_a, "vocab"_a)
      .def_prop_ro(
          "tokens",
          [](const TokenMap& map) {
            return std::vector<int>(map.tokens(), map.tokens() + map.size());
          },
          "The tokens of a row of logits, ascending.");
  nb::class_<Sampler>(m, "Sampler", nb::is_weak_referenceable())
      .def(
          "__init__",
          [](Sampler* self, int vocab, const std::vector<int>& prompt, uint32_t seq_index,
             uint64_t seed, double temperature, int top_k, double top_p, double min_p,
             float repetition_penalty, float presence_penalty, float frequency_penalty,
             std::vector<std::pair<int, float>> logit_bias, std::vector<int> banned,
             int64_t banned_until, const std::string& isa) {
            new (self) Sampler(
                kernels_for(isa),
                {vocab, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                 frequency_penalty, seed, std::move(logit_bias), std::move(banned), banned_until},
                prompt, seq_index);
          },
          "vocab"_a, "prompt"_a, nb::kw_only(), "seq_index"_a = 0, "seed"_a = 0,
          "temperature"_a = 1.0, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0,
          "repetition_penalty"_a = 1.0f, "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f,
          "logit_bias"_a = std::vector<std::pair<int, float>>(), "banned"_a = std::vector<int>(),
          "banned_until"_a = 0, "isa"_a = "")
      .def(
          "clone",
          [](Sampler& sampler, uint32_t seq_index) {
            const OneCaller::Turn turn = turn_of(sampler);
            return sampler.clone(seq_index);
          },
          "seq_index"_a)
      .def("draw", &draw, "logits"_a, "position"_a, "num_logprobs"_a, "masks"_a = nb::none(),
           "A token, of those that `masks` [1, words] allows, and its log-probabilities.")
      .def(
          "append",
          [](Sampler& sampler, int token) {
            const OneCaller::Turn turn = turn_of(sampler);
            sampler.append(token);
          },
          "token"_a)
      .def("probabilities", &probabilities, "logits"_a, "position"_a, "masks"_a = nb::none(),
           "The distribution that a draw would be from, [vocab].")
      .def_prop_ro("options", &options_of, "What it was made with, by the names of the arguments.")
      .def_prop_ro("has_penalties", &Sampler::has_penalties,
                   "Whether a draw depends on the tokens before it.")
      .def_prop_ro("num_appended", &num_appended, "Tokens that were drawn with it, or appended.")
      .def("seen", &seen_by,
           "The tokens that penalties apply to, and how often each is in the output: [2, tokens].")
      .def("uniforms", &Sampler::uniforms, "position"_a,
           "Two numbers between 0 and 1, independent of the noise of a draw.");
}

}  // namespace headrace
