// Large biases that keys are stored without (headrace/checkpoint/key_biases.py): what they add to
// the product of a query and the key at a position is a sum of cosines and sines of the position.
#pragma once
#include <vector>

#include "memory.h"
#include "plan.h"

namespace headrace {

class KeyBias {
 public:
  KeyBias(const std::vector<KeyBiasPair>& pairs, int heads);

  // Makes room for contexts of so many tokens. No other thread may use the object.
  void reserve(int context);

  // Two for each pair of the head, of the tokens of a split counted from its start.
  int num_waves(int head) const { return static_cast<int>(2 * pairs(head).size()); }
  const float* waves(int head) const { return heads_[head].waves.data(); }

  // The factors of a query for the first split, [num_waves], and for another one.
  void first_factors(int head, const float* query, double* out) const;
  void turn(int head, int split, const double* first, float* out) const;

 private:
  struct Head {
    std::vector<KeyBiasPair> pairs;
    std::vector<float> waves;   // [pairs][cosines, sines][kSplitTokens]
    std::vector<double> turns;  // [splits][pairs][cosine, sine] of the split's start
  };
  const std::vector<KeyBiasPair>& pairs(int head) const { return heads_[head].pairs; }

  std::vector<Head> heads_;
  int splits_ = 0;
};

}  // namespace headrace
