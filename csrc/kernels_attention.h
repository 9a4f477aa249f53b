// Attention of a few query vectors over one split of their context (flash decoding, Dao
// et al. 2023): scores, their maximum, weights and weighted values, each over the whole
// split, so that the accumulators of the values never leave the registers. Included
// inside the namespace of an instruction set.
//
// Lanes are tokens for the scores and dimensions for the weighted sum. A query's
// numbers go through the same operations in the same order whatever other queries share
// the split, so a row in a prefill tile equals the row alone (promise 1).

// A KV number format: the type of its sums, and how a line of keys or values is
// multiplied. `x` has the numbers, or the weights, of the first query; further queries
// follow every `stride` numbers.
struct KvBf16 {
  using Sum = Vf;
  using Query = Pair;
  static constexpr bool kIsQuantised = false, kHasPairs = true;
  static constexpr int kTokensPerLine = 2;  // tokens of a line of values
  static constexpr int kRight = 64;  // bytes from the first token of a line of keys to the 17th
  static constexpr int kPartsPerLine =
      1;  // sums that a line of values goes to, of 16 dimensions each
  static constexpr int kKeyNumbers = kPairStride;  // of x for a line of keys
  static constexpr int kWeightSize =
      kSplitTokens / 2 * kPairStride;  // numbers that are the weights of a split
  static HR_INLINE const Pair* query(const AttendSplit& t) {
    return reinterpret_cast<const Pair*>(t.queries);
  }
  static HR_INLINE void put_weights(Pair* weights, int token, Vf w) {
    store_pairs(weights + token / 2 * kPairStride, w);
  }
  static HR_INLINE void put_weights(Pair* weights, int token, Vf w, Vf more) {
    store_pairs(weights + token / 2 * kPairStride, w, more);
  }
};

struct KvF32 {
  using Sum = Vf;
  using Query = float;
  static constexpr bool kIsQuantised = false, kHasPairs = false;
  static constexpr int kTokensPerLine = 1, kPartsPerLine = 1, kRight = 64;
  static constexpr int kKeyNumbers = 1;
  static constexpr int kWeightSize = kSplitTokens;
  template <int N>
  static HR_INLINE void dot_keys(Vf (&sums)[N], const uint8_t* line, const float* x,
                                 size_t stride) {
    const Vf w = load(reinterpret_cast<const float*>(line));
    each<N>([&](int n) HR_INLINE_LAMBDA {
      stay_in_registers(sums[n] = fma(w, set1(x[n * stride]), sums[n]));
    });
  }
  template <int N>
  static HR_INLINE void dot_values(Vf (&sums)[N], const uint8_t* lines, int i, const float* x,
                                   size_t stride) {
    dot_keys(sums, lines + 64 * i, x, stride);
  }
  static HR_INLINE const float* query(const AttendSplit& t) {
    return reinterpret_cast<const float*>(t.queries);
  }
  static HR_INLINE void put_weights(float* weights, int token, Vf w) { store(weights + token, w); }
  static HR_INLINE void put_weights(float* weights, int token, Vf w, Vf more) {
    store(weights + token, w), store(weights + token + 16, more);
  }
};

struct KvF16 {
  using Sum = Vf;
  using Query = float;
  static constexpr bool kIsQuantised = false, kHasPairs = false;
  static constexpr int kTokensPerLine = 2, kPartsPerLine = 1, kRight = 32;
  static constexpr int kKeyNumbers = 2;
  static constexpr int kWeightSize = kSplitTokens;
  template <int N>
  static HR_INLINE void dot_halves(Vf (&sums)[N], const uint8_t* halves, const float* x,
                                   size_t stride) {
    const Vf w = load_half(reinterpret_cast<const uint16_t*>(halves));
    each<N>([&](int n) HR_INLINE_LAMBDA {
      stay_in_registers(sums[n] = fma(w, set1(x[n * stride]), sums[n]));
    });
  }
  template <int N>
  static HR_INLINE void dot_keys(Vf (&sums)[N], const uint8_t* line, const float* x,
                                 size_t stride) {
    dot_halves(sums, line, x, stride);
    dot_halves(sums, line + 64, x + 1, stride);
  }
  template <int N>
  static HR_INLINE void dot_values(Vf (&sums)[N], const uint8_t* lines, int i, const float* x,
                                   size_t stride) {
    dot_halves(sums, lines + 64 * i, x, stride);
    dot_halves(sums, lines + 64 * i + 32, x + 1, stride);
  }
  static HR_INLINE const float* query(const AttendSplit& t) { return KvF32::query(t); }
  static HR_INLINE void put_weights(float* weights, int token, Vf w) { store(weights + token, w); }
  static HR_INLINE void put_weights(float* weights, int token, Vf w, Vf more) {
    store(weights + token, w), store(weights + token + 16, more);
  }
};

// Scales and minima of 16 tokens: a number is code * scale + min.
struct TokenScales {
  Vf scale, min;
};

HR_INLINE TokenScales load_scales(const uint8_t* scales, int token) {
  const auto* numbers = reinterpret_cast<const uint16_t*>(scales) + token;
  return {load_bf16(numbers), load_bf16(numbers + kKvTile)};
}

// The header of a quantised query, before its 16-bit codes. The scale is NaN if a
// number of the query is not finite.
struct QuantisedQuery {
  float scale;  // of a code
  float sum;    // of the numbers that the codes represent

  static HR_INLINE const QuantisedQuery& of(const AttendSplit& t, int n) {
    return *reinterpret_cast<const QuantisedQuery*>(t.queries + n * t.query_stride);
  }
};

// Codes of 8 or 4 bits times 16-bit numbers, which is exact. Queries and weights are
// rounded to fractions of their maximum in 32767 levels, because 256 tokens times 255
// times 32767 just fit in int32. Queries of more than 257 numbers use fewer levels.
template <int Bits>
struct KvQuantised {
  using Sum = Vi;
  using Query = int16_t;
  static constexpr bool kIsQuantised = true, kHasPairs = false;
  static constexpr int kBits = Bits, kTokensPerLine = 4, kPartsPerLine = 8 / Bits, kRight = 64;
  static constexpr int kKeyNumbers = 32 / Bits;
  static constexpr int kWeightSize = kSplitTokens;

  // sums[n] += pairs of codes, the bits from `down` on of both halves of each lane,
  // times a pair of x.
  template <int N>
  static HR_INLINE void dot_pairs_of(Vi (&sums)[N], const uint8_t* line, int down, const int16_t* x,
                                     size_t stride) {
    const Vs codes = code_pairs<Bits>(load_bytes(line), down);
    x = reload(x);
    each<N>([&](int n) HR_INLINE_LAMBDA {
      stay_in_registers(sums[n] = add_dot_shorts(sums[n], codes, x + n * stride));
    });
  }
  template <int N>
  static HR_INLINE void dot_keys(Vi (&sums)[N], const uint8_t* line, const int16_t* x,
                                 size_t stride) {
    each<16 / Bits>([&](int i) HR_INLINE_LAMBDA {
      dot_pairs_of(sums, reload(line), Bits * i, x + 2 * i, stride);
    });
  }
  static HR_INLINE const int16_t* query(const AttendSplit& t) {
    return reinterpret_cast<const int16_t*>(t.queries + sizeof(QuantisedQuery));
  }
  template <int N>
  static HR_INLINE void dot_values(Vi (&sums)[N], const uint8_t* lines, int i, const int16_t* x,
                                   size_t stride) {
    const uint8_t* line = lines + i / kPartsPerLine * 64;
    each<2>([&](int pair) HR_INLINE_LAMBDA {
      dot_pairs_of(sums, reload(line), 8 * pair + i % kPartsPerLine * Bits, x + 2 * pair, stride);
    });
  }
};

// Packs a query vector for the scores. `out` has room for 16 numbers more than key_dim.
template <class Kv>
void pack_numbers(const float* q, int key_dim, uint8_t* out) {
  for (int i = 0; i < key_dim; i += 16) {
    const Vf v = load_partial(q + i, key_dim - i);
    if constexpr (Kv::kHasPairs)
      store_pairs(reinterpret_cast<Pair*>(out) + i / 2 * kPairStride, v);
    else
      store(reinterpret_cast<float*>(out) + i, v);
  }
}

// Pairs of dimensions of int4 in the order of their codes: d, d + 16, d + 2, d + 18.
HR_INLINE void interleave(int16_t* codes) {
  uint32_t pairs[16], out[16];
  memcpy(pairs, codes, sizeof pairs);
  for (int i = 0; i < 16; i++) out[i] = pairs[i / 4 * 2 + i % 4 / 2 + i % 2 * 8];
  memcpy(codes, out, sizeof out);
}

constexpr float kMinMax = 1e-33f;  // 32767 / x may overflow for a smaller x

template <int Bits>
void pack_codes(const float* q, int key_dim, uint8_t* out) {
  constexpr int chunk = 128 / Bits;                              // numbers in four lines of keys
  const int max_code = INT32_MAX / ((1 << Bits) - 1) / key_dim;  // sums then fit in int32
  const int limit = max_code < INT16_MAX ? max_code : INT16_MAX;
  Vf highest = zero(), zeros = zero();
  for (int i = 0; i < key_dim; i += 16) {
    const Vf v = load_partial(q + i, key_dim - i);
    highest = max(highest, abs(v));
    zeros = fma(v, zero(), zeros);
  }
  const float top = is_finite(zeros) ? reduce_max(highest) : kNotFinite,
              levels = static_cast<float>(limit);
  const Vf inverse = set1(top > kMinMax ? levels / top : 0.0f);
  auto* codes = reinterpret_cast<int16_t*>(out + sizeof(QuantisedQuery));
  Vi total = set1(0);
  for (int i = 0; i < key_dim; i += chunk) {
    for (int j = i; j < i + chunk; j += 16) {
      const Vi code =
          round_to_int(mul(load_partial(q + j, top > kMinMax ? key_dim - j : 0), inverse));
      store_s16(codes + j, code);
      total = add(total, code);
    }
    if constexpr (Bits == 4) interleave(codes + i);
  }
  const float scale = top / levels;
  const QuantisedQuery head{scale, scale * static_cast<float>(reduce_add(total))};
  memcpy(out, &head, sizeof head);
}

// The range of the split's tokens that a query sees.
struct Lanes {
  int begin, end;
};

HR_INLINE Lanes visible_to(const AttendSplit& t, int n) {
  const int tokens = t.kv.blocks * kKvTile;
  return {t.first[n] < 0 ? 0 : t.first[n], t.last[n] > tokens ? tokens : t.last[n]};
}

HR_INLINE Lanes visible_to_any(const AttendSplit& t) {
  Lanes all{t.kv.blocks * kKvTile, 0};
  for (int n = 0; n < t.num; n++) {
    const Lanes lanes = visible_to(t, n);
    all.begin = lanes.begin < all.begin ? lanes.begin : all.begin;
    all.end = lanes.end > all.end ? lanes.end : all.end;
  }
  return all;
}

// The products of query n and 16 keys, from their integer or float sums. `scales`
// belongs to the block of the keys; `token` is the place of the first key in the block.
template <class Kv>
HR_INLINE Vf product(const AttendSplit& t, int n, typename Kv::Sum sum, const uint8_t* scales,
                     int token) {
  if constexpr (Kv::kIsQuantised) {
    const auto& query = QuantisedQuery::of(t, n);
    const TokenScales token_scales = load_scales(scales, token);
    return fma(to_float(sum), mul(token_scales.scale, set1(query.scale)),
               mul(token_scales.min, set1(query.sum)));
  } else {
    return sum;
  }
}

// scores[query][token] = q . k, for the blocks with visible tokens. Query n has its numbers
// from queries + n * stride on.
template <class Kv, int Num>
HR_INLINE void score_queries(const AttendSplit& t, Lanes lanes, const typename Kv::Query* queries,
                             size_t stride, float (*scores)[kSplitTokens]) {
  const int lines = t.shape.key_lines();
  for (int b = lanes.begin / kKvTile; b * kKvTile < lanes.end; b++) {
    typename Kv::Sum sums[2][Num] = {};  // of the first and the last 16 tokens
    const uint8_t* line = t.kv.at[b];
    // Prefetch keys two blocks ahead: the next block would be needed before memory
    // delivers it.
    const int later = b + 2 - t.kv.blocks;
    const uint8_t* upcoming = !t.next     ? nullptr
                              : later < 0 ? t.kv.at[b + 2]
                                          : t.next->at[later < t.next->blocks ? later : 0];
    const typename Kv::Query* query = queries;
    for (int d = 0; d < lines; d++, line += 128, query += Kv::kKeyNumbers) {
      if (upcoming) {
        const uint8_t* values = t.kv.values[b] + 128 * d;
        prefetch_l2(upcoming + 128 * d), prefetch_l2(upcoming + 128 * d + 64);
        prefetch_l2(values), prefetch_l2(values + 64);
      }
      if constexpr (Kv::kHasPairs) {
        dot_lines(sums, line, query, stride);
      } else {
        Kv::dot_keys(sums[0], line, query, stride);
        Kv::dot_keys(sums[1], line + Kv::kRight, query, stride);
      }
    }
    each<Num>([&](int n) HR_INLINE_LAMBDA {
      store(scores[n] + b * kKvTile, product<Kv>(t, n, sums[0][n], line, 0));
      store(scores[n] + b * kKvTile + 16, product<Kv>(t, n, sums[1][n], line, 16));
    });
  }
}

// Short queries lie at a distance that the compiler knows: it has no register for the address of
// each.
template <class Kv, int Num>
HR_INLINE void score(const AttendSplit& t, Lanes lanes, float (*scores)[kSplitTokens]) {
  constexpr size_t size = sizeof(typename Kv::Query);
  if (Num < 4 || t.query_stride != kQueryDistance)
    return score_queries<Kv, Num>(t, lanes, Kv::query(t), t.query_stride / size, scores);
  score_queries<Kv, Num>(t, lanes, Kv::query(t), kQueryDistance / size, scores);
}

// scores[query][token] += factors . waves, for the lines with visible tokens.
template <int Num>
HR_INLINE void add_waves(const AttendSplit& t, Lanes lanes, float (*scores)[kSplitTokens]) {
  for (int i = lanes.begin & -16; i < lanes.end; i += 16) {
    Vf sums[Num];
    each<Num>([&](int n) HR_INLINE_LAMBDA { sums[n] = load(scores[n] + i); });
    const float* factors = t.factors;
    for (int w = 0; w < t.num_waves; w++, factors++) {
      const Vf wave = load(t.waves + w * kSplitTokens + i);
      each<Num>([&](int n) HR_INLINE_LAMBDA {
        stay_in_registers(sums[n] = fma(wave, set1(factors[n * t.num_waves]), sums[n]));
      });
    }
    each<Num>([&](int n) HR_INLINE_LAMBDA { store(scores[n] + i, sums[n]); });
  }
}

alignas(64) constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Turns products of query n into scores: scaled, soft-capped, and lowered by the ALiBi
// slope times the distance of the key. The distance is counted from the row itself, so
// it is exact, and most of the weight falls on small distances.
HR_INLINE void apply_softcap_alibi(const AttendSplit& t, int n, int begin, int end, float* scores) {
  for (int i = begin; i < end; i += 16) {
    Vf s = mul(load(scores + i), set1(t.scale));
    if (t.softcap > 0) s = soft_cap(s, t.softcap);
    if (t.slopes)
      s = fma(add(load(kLanes), set1(static_cast<float>(i - t.own[n]))), set1(t.slopes[n]), s);
    store(scores + i, s);
  }
}

// The softmax weights of a split, in the form that is multiplied with values. Weights
// of quantised values include the scales of the values; the minima of the values are
// added at the end.
template <class Kv, int Num>
struct Weights {
  alignas(64) typename Kv::Query numbers[Num][Kv::kWeightSize];
  float scale[Num];  // of a code
  float min[Num];    // the minima of the values, weighted and summed
};

// Quantises weights times scales, with zeros for tokens that only other queries see. A
// NaN gets any code; the sum of the weights is then NaN too.
template <class Kv, int Num>
HR_INLINE void encode(const AttendSplit& t, int n, Lanes seen, Lanes all, float* scores,
                      Weights<Kv, Num>& out) {
  Vf top = zero(), min_sum = zero();
  for (int i = seen.begin; i < seen.end; i += 16) {
    const TokenScales token_scales =
        load_scales(t.kv.values[i / kKvTile] + t.shape.value_scales(), i % kKvTile);
    const Vf w = load(scores + i), x = mul(w, token_scales.scale);
    min_sum = fma(w, token_scales.min, min_sum);
    top = max(x, top);
    store(scores + i, x);
  }
  const float highest = reduce_max(top);
  const Vf inverse = set1(highest > kMinMax ? INT16_MAX / highest : 0.0f);
  int16_t* codes = out.numbers[n];
  for (int i = all.begin; i < seen.begin; i += 16) store_s16(codes + i, set1(0));
  for (int i = seen.begin; i < seen.end; i += 16)
    store_s16(codes + i, round_to_int(mul(load(scores + i), inverse)));
  for (int i = seen.end; i < all.end; i += 16) store_s16(codes + i, set1(0));
  out.scale[n] = highest / INT16_MAX;
  out.min[n] = reduce_add(min_sum);
}

// The whole lines of the split with tokens that query n sees; none if it sees none.
HR_INLINE Lanes lines_seen(const AttendSplit& t, int n, Lanes all) {
  const Lanes seen = visible_to(t, n);
  const bool any = seen.begin < seen.end;
  const int begin = (any ? seen.begin : all.begin) & -16;
  return {begin, any ? (seen.end + 15) & -16 : begin};
}

// The highest score of query n in each lane, of its lines. Query n may see only part of the
// first and the last: hides the other lanes there.
HR_INLINE Vf top_scores(const AttendSplit& t, int n, Lanes lines, float* scores) {
  if (t.softcap > 0 || t.slopes) apply_softcap_alibi(t, n, lines.begin, lines.end, scores);
  const Lanes seen = visible_to(t, n);
  const auto hide = [&](int i) {
    store(scores + i, keep_lanes(load(scores + i), seen.begin - i, seen.end - i, kNoMax));
  };
  if (lines.begin < lines.end && seen.begin > lines.begin) hide(lines.begin);
  if (lines.begin < lines.end && seen.end < lines.end) hide(lines.end - 16);
  Vf even = set1(kNoMax), odd = even;
  int i = lines.begin;
  for (; i + 32 <= lines.end; i += 32) {
    even = max(even, load(scores + i));
    odd = max(odd, load(scores + i + 16));
  }
  if (i < lines.end) even = max(even, load(scores + i));
  return max(even, odd);
}

// weights[token] = 2^(score * unit - high), or 0 for tokens that query n does not see, and
// their sum. Scores are in units of ln 2, so that a power of two is a power of e.
template <class Kv, int Num>
HR_INLINE void weights_of(const AttendSplit& t, int n, Lanes lines, Lanes all, float unit,
                          float high, float* scores, Weights<Kv, Num>& weights) {
  const auto put = [&](int i, auto... w) {
    if constexpr (Kv::kIsQuantised)
      KvF32::put_weights(scores, i, w...);
    else
      Kv::put_weights(weights.numbers[n], i, w...);
  };
  const auto weight = [&](int i) { return exp2(fma(load(scores + i), set1(unit), set1(-high))); };
  Vf sum = zero();
  int i = lines.begin;
  for (; i + 32 <= lines.end; i += 32) {
    const Vf w = weight(i), more = weight(i + 16);
    sum = add(add(sum, w), more);
    put(i, w, more);
  }
  if (i < lines.end) {
    const Vf w = weight(i);
    sum = add(sum, w);
    put(i, w);
  }
  t.max[n] = lines.begin < lines.end ? high : kNoMax;
  t.sum[n] = reduce_add(sum);
  if constexpr (Kv::kIsQuantised)
    return encode(t, n, lines, {all.begin & -16, all.end}, scores, weights);
  for (int k = all.begin & -16; k < lines.begin; k += 16) put(k, zero());
  for (int k = lines.end; k < all.end; k += 16) put(k, zero());
}

// The highest number of each vector.
template <int Num>
HR_INLINE void highest_of_each(const Vf (&x)[Num], float* out) {
  if constexpr (kReducesTogether && Num >= 4) {
    Vf all[Num < 16 ? 16 : Num];
#pragma GCC unroll 16
    for (int n = 0; n < 16; n++) all[n] = x[n < Num ? n : 0];
    store(out, reduce_max_each(all));
  } else {
    for (int n = 0; n < Num; n++) out[n] = reduce_max(x[n]);
  }
}

// The softmax of all queries. First their maxima: each waits for itself, and the weights
// wait for it.
template <class Kv, int Num>
HR_INLINE void softmax(const AttendSplit& t, Lanes all, float (*scores)[kSplitTokens],
                       Weights<Kv, Num>& weights) {
  const float unit = (t.softcap > 0 || t.slopes ? 1.0f : t.scale) * 1.44269504f;
  Vf tops[Num];
  alignas(64) float highs[16];
  for (int n = 0; n < Num; n++) tops[n] = top_scores(t, n, lines_seen(t, n, all), scores[n]);
  highest_of_each(tops, highs);
  for (int n = 0; n < Num; n++)
    weights_of<Kv, Num>(t, n, lines_seen(t, n, all), all, unit, highs[n] * unit, scores[n],
                        weights);
}

// out[query][dims d .. d + 16 Lines) = weights @ V.
template <class Kv, int Num, int Lines>
HR_INLINE void weigh_lines(const AttendSplit& t, int d, Lanes lanes,
                           const Weights<Kv, Num>& weights) {
  const int width = t.shape.value_columns(),
            part = Lines % Kv::kPartsPerLine ? d / 16 % Kv::kPartsPerLine : 0;
  const size_t row = static_cast<size_t>(t.shape.value_lanes()) * 4,
               offset = static_cast<size_t>(d / 16 / Kv::kPartsPerLine) * 64;
  typename Kv::Sum acc[Lines][Num] = {};
  for (int b = lanes.begin / kKvTile; b * kKvTile < lanes.end; b++) {
    const int begin = lanes.begin - b * kKvTile, end = lanes.end - b * kKvTile;
    const int first = begin < 0 ? 0 : begin / Kv::kTokensPerLine,
              last =
                  ((end > kKvTile ? kKvTile : end) + Kv::kTokensPerLine - 1) / Kv::kTokensPerLine;
    const uint8_t* lines = t.kv.values[b] + first * row + offset;
    // Prefetch as many keys of the next split as values are read here, so that memory
    // never idles.
    const uint8_t* upcoming = t.next && b < t.next->blocks ? t.next->at[b] + offset : nullptr;
    for (int k = first; k < last; k++, lines += row) {
      if (upcoming)
        for (int i = 0; i < Lines; i += Kv::kPartsPerLine)
          prefetch_l2(upcoming + k * row + i / Kv::kPartsPerLine * 64);
      const auto* w = &weights.numbers[0][(b * kKvTile / Kv::kTokensPerLine + k) *
                                          (Kv::kWeightSize / (kSplitTokens / Kv::kTokensPerLine))];
      if constexpr (Kv::kHasPairs)
        dot_lines(acc, lines, w, Kv::kWeightSize);
      else
        each<Lines>([&](int i) HR_INLINE_LAMBDA {
          Kv::dot_values(acc[i], lines, part + i, w, Kv::kWeightSize);
        });
    }
  }
  each<Lines>([&](int i) HR_INLINE_LAMBDA {
    each<Num>([&](int n) HR_INLINE_LAMBDA {
      float* out = t.out + static_cast<size_t>(n) * width + d + 16 * i;
      if constexpr (Kv::kIsQuantised)
        store(out, fma(to_float(acc[i][n]), set1(weights.scale[n]), set1(weights.min[n])));
      else
        store(out, acc[i][n]);
    });
  });
}

// Computes the dimensions from d on in whole sets of lines; returns the first dimension
// left over.
template <class Kv, int Num, int Lines>
HR_INLINE int weigh(const AttendSplit& t, int d, Lanes lanes, const Weights<Kv, Num>& weights) {
  for (; d + 16 * Lines <= t.shape.value_columns(); d += 16 * Lines)
    weigh_lines<Kv, Num, Lines>(t, d, lanes, weights);
  return d;
}

template <class Key, class Value, int Num>
void attend_num(const AttendSplit& t) {
  alignas(64) float scores[Num][kSplitTokens];
  Weights<Value, Num> weights;
  const Lanes lanes = visible_to_any(t);
  score<Key, Num>(t, lanes, scores);
  if (t.num_waves) add_waves<Num>(t, lanes, scores);
  softmax<Value, Num>(t, lanes, scores, weights);
  int d = 0;
  if constexpr (8 * Num <= kAccumulators) d = weigh<Value, Num, 8>(t, d, lanes, weights);
  if constexpr (4 * Num <= kAccumulators) d = weigh<Value, Num, 4>(t, d, lanes, weights);
  if constexpr (2 * Num <= kAccumulators) d = weigh<Value, Num, 2>(t, d, lanes, weights);
  weigh<Value, Num, 1>(t, d, lanes, weights);
}

template <class Key, class Value, int Num = 1>
void attend(const AttendSplit& t) {
  if (t.num == Num) return attend_num<Key, Value, Num>(t);
  if constexpr (Num < kMaxQueries) attend<Key, Value, Num + 1>(t);
}

// The formats of keys and of values are quantised both, or the same.
template <KvType Type, class Key, class Value = Key>
void fill_attention(Kernels& k) {
  if constexpr (Key::kIsQuantised)
    k.pack_query[static_cast<int>(Type)] = pack_codes<Key::kBits>;
  else
    k.pack_query[static_cast<int>(Type)] = pack_numbers<Key>;
  k.attend[static_cast<int>(Type)] = attend<Key, Value>;
}

void merge(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b,
           int n) {
  const float top = *max_a > max_b ? *max_a : max_b;
  const Vf a = exp2(set1(*max_a - top)), b = exp2(set1(max_b - top));
  alignas(64) float factor[2][16];
  store(factor[0], a);
  store(factor[1], b);
  *max_a = top;
  *sum_a = *sum_a * factor[0][0] + sum_b * factor[1][0];
  for (int i = 0; i < n; i += 16)
    store(out_a + i, fma(load(out_b + i), b, mul(load(out_a + i), a)));
}
