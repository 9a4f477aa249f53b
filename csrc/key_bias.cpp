#include "key_bias.h"

#include <algorithm>
#include <cmath>

namespace headrace {

KeyBias::KeyBias(const std::vector<KeyBiasPair>& pairs, int heads) : heads_(heads) {
  for (const KeyBiasPair& pair : pairs) heads_[pair.head].pairs.push_back(pair);
  for (Head& head : heads_)
    for (const KeyBiasPair& pair : head.pairs) {
      for (int i = 0; i < kSplitTokens; i++)
        head.waves.push_back(static_cast<float>(std::cos(i * pair.frequency)));
      for (int i = 0; i < kSplitTokens; i++)
        head.waves.push_back(static_cast<float>(std::sin(i * pair.frequency)));
    }
}

void KeyBias::reserve(int context) {
  const int splits = (context + kSplitTokens - 1) / kSplitTokens;
  if (splits <= splits_) return;
  const int more = std::max(splits, 2 * splits_);
  for (Head& head : heads_)
    for (int split = splits_; split < more; split++)
      for (const KeyBiasPair& pair : head.pairs) {
        const double angle = static_cast<double>(split) * kSplitTokens * pair.frequency;
        head.turns.push_back(std::cos(angle));
        head.turns.push_back(std::sin(angle));
      }
  splits_ = more;
}

void KeyBias::first_factors(int head, const float* query, double* out) const {
  for (const KeyBiasPair& pair : pairs(head)) {
    const double a = query[pair.dim], b = query[pair.dim + 1];
    *out++ = a * pair.x + b * pair.y;
    *out++ = b * pair.x - a * pair.y;
  }
}

void KeyBias::turn(int head, int split, const double* first, float* out) const {
  const double* turns = heads_[head].turns.data() + static_cast<size_t>(split) * num_waves(head);
  for (int i = 0; i < num_waves(head); i += 2) {
    out[i] = static_cast<float>(first[i] * turns[i] + first[i + 1] * turns[i + 1]);
    out[i + 1] = static_cast<float>(first[i + 1] * turns[i] - first[i] * turns[i + 1]);
  }
}

}  // namespace headrace
