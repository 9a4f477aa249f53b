#include "suffix_tree.h"

#include <algorithm>
#include <queue>
#include <stdexcept>

namespace headrace {
namespace {

constexpr size_t kMaxMatches = 32;
// Places that are looked at, with skipped ones.
constexpr size_t kMaxVisited = 128;
// Of a match in the own text: it outvotes all but much longer matches in other texts.
constexpr int kOwnWeight = 16;
// Greatest depth of a draft, in tokens: kDepthByLength lengths of the longest match more.
constexpr int kMinDepth = 8, kDepthByLength = 2;
// A node of std::set: colour and three pointers before the place, in a block of malloc.
constexpr size_t kBytesPerPlace = 48;

// Tokens at the ends that agree, at most kMaxMatch.
int agreement(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t limit = std::min({a.size(), b.size(), static_cast<size_t>(SuffixTree::kMaxMatch)});
  size_t length = 0;
  while (length < limit && a[a.size() - 1 - length] == b[b.size() - 1 - length]) length++;
  return static_cast<int>(length);
}

// Whether context a comes before context b; equal ones have no order.
bool is_before(std::span<const int32_t> a, std::span<const int32_t> b) {
  const auto length = static_cast<size_t>(agreement(a, b));
  if (length == SuffixTree::kMaxMatch || length == b.size()) return false;
  return length == a.size() || a[a.size() - 1 - length] < b[b.size() - 1 - length];
}

}  // namespace

bool SuffixTree::ByContext::operator()(const Place& a, const Place& b) const {
  const std::span<const int32_t> left = tree->context_of(a), right = tree->context_of(b);
  if (is_before(left, right)) return true;
  if (is_before(right, left)) return false;
  const uint64_t first = tree->texts_[a.text]->serial, second = tree->texts_[b.text]->serial;
  return first != second ? first < second : a.offset < b.offset;
}

bool SuffixTree::ByContext::operator()(const Place& a, std::span<const int32_t> known) const {
  return is_before(tree->context_of(a), known);
}

bool SuffixTree::ByContext::operator()(std::span<const int32_t> known, const Place& a) const {
  return is_before(known, tree->context_of(a));
}

const SuffixTree::Text& SuffixTree::text_at(int text) const {
  if (text < 0 || static_cast<size_t>(text) >= texts_.size() || !texts_[static_cast<size_t>(text)])
    throw std::out_of_range("the tree has no such text");
  return *texts_[static_cast<size_t>(text)];
}

std::span<const int32_t> SuffixTree::context_of(const Place& place) const {
  return std::span(texts_[place.text]->tokens).first(place.offset);
}

int SuffixTree::begin(std::span<const int32_t> context) {
  auto text = std::make_unique<Text>();
  text->tokens.assign(context.begin(), context.end());
  text->first_place = static_cast<uint32_t>(context.size());
  text->serial = num_begun_++;
  if (free_ids_.empty()) {
    texts_.push_back(std::move(text));
    return static_cast<int>(texts_.size()) - 1;
  }
  const int id = free_ids_.back();
  free_ids_.pop_back();
  texts_[static_cast<size_t>(id)] = std::move(text);
  return id;
}

void SuffixTree::append(int text, std::span<const int32_t> tokens) {
  text_at(text);
  std::vector<int32_t>& known = texts_[static_cast<size_t>(text)]->tokens;
  if (known.size() + tokens.size() > UINT32_MAX) throw std::length_error("the text is too long");
  auto offset = static_cast<uint32_t>(known.size());
  known.insert(known.end(), tokens.begin(), tokens.end());
  for (; offset < known.size(); offset++)
    if (offset > 0) places_.insert({static_cast<uint32_t>(text), offset});
}

void SuffixTree::remove(int text) {
  const Text& removed = text_at(text);
  for (uint32_t offset = removed.first_place; offset < removed.tokens.size(); offset++)
    places_.erase(Place{static_cast<uint32_t>(text), offset});
  texts_[static_cast<size_t>(text)].reset();
  free_ids_.push_back(text);
}

size_t SuffixTree::num_bytes() const {
  size_t bytes = places_.size() * kBytesPerPlace;
  for (const std::unique_ptr<Text>& text : texts_)
    bytes += sizeof text + (text ? sizeof *text + text->tokens.capacity() * sizeof(int32_t) : 0);
  return bytes;
}

void SuffixTree::find(std::span<const int32_t> known, int skipped, int min_length,
                      size_t max_matches, std::vector<Match>& found) const {
  const auto length_at = [&](auto place) { return agreement(context_of(*place), known); };
  auto next = places_.upper_bound(known), before = next;
  int next_length = next == places_.end() ? 0 : length_at(next);
  int before_length = before == places_.begin() ? 0 : length_at(--before);
  // Lengths fall in both directions. Places with an equal context are before `next`, and
  // the latest is met first.
  int longest = 0;
  for (size_t visited = 0; max_matches > 0 && visited < kMaxVisited; visited++) {
    const bool is_next = next_length > before_length;
    const int length = is_next ? next_length : before_length;
    if (length < min_length || 2 * length <= longest) return;
    const Place place = is_next ? *next : *before;
    if (is_next) {
      next_length = ++next == places_.end() ? 0 : length_at(next);
    } else {
      before_length = before == places_.begin() ? 0 : length_at(--before);
    }
    if (static_cast<int64_t>(place.text) == skipped) continue;
    const Text& text = *texts_[place.text];
    longest = std::max(longest, length);
    found.push_back({&text.tokens, place.offset, length, text.serial, false});
    max_matches--;
  }
}

namespace {

using Match = SuffixTree::Match;

// The token at so many tokens after a match; -1 after the end of its text. The own text
// goes on with the period that the match shows.
int32_t token_after(const Match& match, int depth) {
  const std::vector<int32_t>& tokens = *match.tokens;
  const size_t left = tokens.size() - match.place, distance = static_cast<size_t>(depth);
  if (distance < left) return tokens[match.place + distance];
  return match.is_own ? tokens[match.place + distance % left] : -1;
}

double weight_of(const Match& match) {
  return static_cast<double>(match.length) * match.length * (match.is_own ? kOwnWeight : 1);
}

struct Candidate {
  double value;  // product of the probabilities on the way to it
  double probability;
  int number;  // in the order of their making
  int parent;
  int depth;
  int32_t token;
  std::vector<uint8_t> voters;  // indices of the matches that go on so

  bool operator<(const Candidate& other) const {  // the next of a priority queue is the greatest
    return value != other.value ? value < other.value : number > other.number;
  }
};

struct Votes {
  int32_t token;
  double weight;
  std::vector<uint8_t> voters;
};

// The tokens that follow, those with most votes first, then those with the better match.
std::vector<Votes> count_votes(const std::vector<Match>& matches,
                               const std::vector<uint8_t>& voters, int depth, double& total) {
  std::vector<Votes> votes;
  total = 0;
  for (const uint8_t voter : voters) {
    const double weight = weight_of(matches[voter]);
    total += weight;
    const int32_t token = token_after(matches[voter], depth);
    if (token < 0) continue;
    auto same = std::find_if(votes.begin(), votes.end(),
                             [&](const Votes& each) { return each.token == token; });
    if (same == votes.end()) same = votes.insert(same, Votes{token, 0, {}});
    same->weight += weight;
    same->voters.push_back(voter);
  }
  std::stable_sort(votes.begin(), votes.end(),
                   [](const Votes& a, const Votes& b) { return a.weight > b.weight; });
  return votes;
}

}  // namespace

SuffixDraft draft_from(const SuffixTree& local, int own, const SuffixTree* corpus, int skipped,
                       const SuffixDraftOptions& options) {
  const std::vector<int32_t>& known = local.tokens(own);
  std::vector<Match> matches;
  local.find(known, -1, options.min_length, kMaxMatches, matches);
  for (Match& match : matches) match.is_own = true;
  if (corpus) corpus->find(known, skipped, options.min_length, kMaxMatches, matches);
  SuffixDraft draft;
  if (matches.empty()) return draft;

  std::sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) {
    if (a.length != b.length) return a.length > b.length;
    if (a.is_own != b.is_own) return a.is_own;
    return a.serial != b.serial ? a.serial > b.serial : a.place > b.place;
  });
  draft.match_length = matches.front().length;
  draft.is_own = matches.front().is_own;
  std::vector<uint8_t> voters;
  for (size_t i = 0; i < std::min(matches.size(), kMaxMatches); i++)
    if (2 * matches[i].length > draft.match_length) voters.push_back(static_cast<uint8_t>(i));

  const int max_depth = kMinDepth + kDepthByLength * draft.match_length;
  std::priority_queue<Candidate> candidates;
  int num_candidates = 0;
  const auto expand = [&](int node, int depth, double value, const std::vector<uint8_t>& from) {
    if (depth >= max_depth) return;
    double total;
    std::vector<Votes> votes = count_votes(matches, from, depth, total);
    if (votes.size() > static_cast<size_t>(options.max_width))
      votes.resize(static_cast<size_t>(options.max_width));
    for (Votes& each : votes) {
      const double probability = each.weight / total;
      if (value * probability >= options.min_value)
        candidates.push({value * probability, probability, num_candidates++, node, depth,
                         each.token, std::move(each.voters)});
    }
  };
  expand(-1, 0, 1.0, voters);
  while (!candidates.empty() && draft.tokens.size() < static_cast<size_t>(options.max_nodes)) {
    const Candidate taken = candidates.top();
    candidates.pop();
    const auto node = static_cast<int>(draft.tokens.size());
    draft.tokens.push_back(taken.token);
    draft.parents.push_back(taken.parent);
    draft.probabilities.push_back(taken.probability);
    expand(node, taken.depth + 1, taken.value, taken.voters);
  }
  return draft;
}

}  // namespace headrace
