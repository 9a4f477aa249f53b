#include "beams.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

namespace headrace {
namespace {

thread_local Scratch scratch;

// More than the rounding of a difference of totals.
constexpr double kRounding = 1e-6;

// The best candidates of the beams that one thread ranks.
class Ranking {
 public:
  std::vector<Candidate> candidates;

  // The loss of the last of `count` candidates that count; without so many: infinity.
  double bound(int count) const {
    return static_cast<int>(best_.size()) < count ? std::numeric_limits<double>::infinity()
                                                  : best_.front();
  }

  void add(const Candidate& candidate, bool counts, int count) {
    candidates.push_back(candidate);
    if (!counts) return;
    best_.push_back(candidate.loss);
    std::push_heap(best_.begin(), best_.end());
    if (static_cast<int>(best_.size()) <= count) return;
    std::pop_heap(best_.begin(), best_.end());
    best_.pop_back();
  }

 private:
  std::vector<double> best_;  // losses, a heap with the worst on top
};

// A bound that all threads lower. It only saves work: no candidate that it keeps out is among
// the best.
class SharedBound {
 public:
  double get() const { return value_.load(std::memory_order_relaxed); }
  void lower(double value) {
    double old = get();
    while (value < old && !value_.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
    }
  }

 private:
  std::atomic<double> value_{std::numeric_limits<double>::infinity()};
};

bool is_end(const SearchStep& step, int token) {
  return std::ranges::binary_search(step.end_ids, token);
}

// The tokens that the trie allows after a beam.
void choices_of(const SearchStep& step, int node, std::vector<int>& choices) {
  const std::span<const int32_t> children = step.trie->choices(node);
  choices.assign(children.begin(), children.end());
  if (!step.trie->is_complete(node)) return;
  for (const int token : step.end_ids)
    if (token < step.trie->vocab() && !std::ranges::binary_search(children, token))
      choices.push_back(token);
}

void rank_beam(const SearchStep& step, int index, const Beam& beam, SharedBound& bound,
               Ranking& ranking) {
  thread_local std::vector<int> choices;
  thread_local std::vector<Continuation> continuations;
  const int num_tokens = step.count + static_cast<int>(step.end_ids.size());
  const double floor = -beam.total - bound.get() - kRounding * (1 + std::abs(beam.total));
  if (step.trie) {
    choices_of(step, beam.node, choices);
    beam.sampler->weigh_choices(beam.logits, step.position, choices, floor, scratch, continuations);
  } else {
    beam.sampler->continuations(beam.logits, step.position, beam.mask, num_tokens, floor, scratch,
                                continuations);
  }
  for (const auto& [token, logprob] : continuations) {
    const double loss = -beam.total - static_cast<double>(logprob);
    if (loss > std::min(bound.get(), ranking.bound(step.count))) continue;
    bool ends = is_end(step, token);
    if (step.trie && !ends) ends = step.trie->is_leaf(step.trie->child(beam.node, token));
    ranking.add({loss, index, token, ends}, !ends || step.all_count, step.count);
  }
  bound.lower(ranking.bound(step.count));
}

}  // namespace

std::optional<std::vector<Candidate>> rank_beams(Pool& pool, std::span<const Beam> beams,
                                                 const SearchStep& step) {
  std::vector<Ranking> rankings(static_cast<size_t>(pool.threads()));
  SharedBound bound;
  std::atomic<bool> is_finite = true;
  pool.parallel(static_cast<int>(beams.size()), [&](int begin, int end, int thread) {
    for (int i = begin; i < end; i++) {
      try {
        rank_beam(step, i, beams[static_cast<size_t>(i)], bound,
                  rankings[static_cast<size_t>(thread)]);
      } catch (const NonFiniteLogits&) {
        is_finite = false;
      }
    }
  });
  if (!is_finite) return std::nullopt;

  std::vector<Candidate> result;
  for (const Ranking& ranking : rankings)
    for (const Candidate& candidate : ranking.candidates)
      if (candidate.loss <= bound.get()) result.push_back(candidate);
  std::sort(result.begin(), result.end());
  int counted = 0;
  const auto end = std::ranges::find_if(result, [&](const Candidate& candidate) {
    return (!candidate.ends || step.all_count) && ++counted == step.count;
  });
  if (end != result.end()) result.erase(end + 1, result.end());
  return result;
}

}  // namespace headrace
