// Attention of a few query vectors over one split of their context (flash decoding, Dao et al. 2023): scores, their maximum, weights
// and weighted values, each over the whole split, so that the accumulators of the values never leave the registers.
// Included inside the namespace of an instruction set.
//
// Lanes are tokens for the scores and dimensions for the weighted sum. A query's numbers go through the same operations in the
// same order whatever other queries share the split, so a row in a prefill tile equals the row alone (promise 1).

struct KvBf16 {
  static constexpr int kPer = 2;
  using Query = Pair;
  static constexpr int kStride = kPairStride;
  static HR_INLINE Vf dot(Vf acc, const uint8_t* line, const Query* x) { return dot_pair(acc, load_bytes(line), x); }
};

struct KvF32 {
  static constexpr int kPer = 1;
  using Query = float;
  static constexpr int kStride = 1;
  static HR_INLINE Vf dot(Vf acc, const uint8_t* line, const Query* x) {
    return fma(load(reinterpret_cast<const float*>(line)), set1(*x), acc);
  }
};

// A query vector in the form that the scores read. Room for 16 more numbers than key_dim.
template <class Kv>
void pack_query(const float* q, int key_dim, uint8_t* out) {
  for (int i = 0; i < key_dim; i += 16) {
    const Vf v = load_partial(q + i, key_dim - i);
    if constexpr (Kv::kPer == 2)
      store_pairs(reinterpret_cast<Pair*>(out) + i / 2 * kPairStride, v);
    else
      store(reinterpret_cast<float*>(out) + i, v);
  }
}

// The split's tokens that query n, or any query, sees: a range of lanes.
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

// scores[query][token] = q . k, for the blocks with visible tokens.
template <class Kv, int Num>
HR_INLINE void score(const AttendSplit& t, Lanes lanes, float (*scores)[kSplitTokens]) {
  const size_t stride = t.query_stride / sizeof(typename Kv::Query);
  for (int b = lanes.begin / kKvTile; b * kKvTile < lanes.end; b++) {
    Vf sums[Num][2];
#pragma GCC unroll 12
    for (int n = 0; n < Num; n++) sums[n][0] = sums[n][1] = zero();
    const uint8_t* line = t.kv.at[b];
    // Keys two blocks ahead: the next one would be needed before memory answers.
    const int later = b + 2 - t.kv.blocks;
    const uint8_t* upcoming = !t.next ? nullptr : later < 0 ? t.kv.at[b + 2] : t.next->at[later < t.next->blocks ? later : 0];
    const auto* query = reinterpret_cast<const typename Kv::Query*>(t.queries);
    for (int d = 0; d < t.shape.key_dim / Kv::kPer; d++, line += 128, query += Kv::kStride) {
      if (upcoming) {
        const uint8_t* values = t.kv.values[b] + 128 * d;
        prefetch_l2(upcoming + 128 * d), prefetch_l2(upcoming + 128 * d + 64);
        prefetch_l2(values), prefetch_l2(values + 64);
      }
#pragma GCC unroll 12
      for (int n = 0; n < Num; n++) {
        sums[n][0] = Kv::dot(sums[n][0], line, query + n * stride);
        sums[n][1] = Kv::dot(sums[n][1], line + 64, query + n * stride);
      }
    }
#pragma GCC unroll 12
    for (int n = 0; n < Num; n++) {
      store(scores[n] + b * kKvTile, sums[n][0]);
      store(scores[n] + b * kKvTile + 16, sums[n][1]);
    }
  }
}

alignas(64) constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Products of query n as scores: scaled, capped, and lowered by the slope for each position that a key lies back. The distance is counted
// from the row itself, so that it is exact, and nearly all of the weight falls on small ones.
HR_INLINE void bend(const AttendSplit& t, int n, int begin, int end, float* scores) {
  for (int i = begin; i < end; i += 16) {
    Vf s = mul(load(scores + i), set1(t.scale));
    if (t.softcap > 0) s = soft_cap(s, t.softcap);
    if (t.slopes) s = fma(add(load(kLanes), set1(static_cast<float>(i - t.own[n]))), set1(t.slopes[n]), s);
    store(scores + i, s);
  }
}

// weights[token] = 2^(s - max), 0 for tokens that query n does not see; their sum. Scores are in units of ln 2, so that a power of
// two is a power of e.
template <class Kv>
HR_INLINE void soften(const AttendSplit& t, int n, Lanes all, float* scores, typename Kv::Query* weights) {
  const Lanes seen = visible_to(t, n);
  const auto put = [weights](int i, Vf w) {
    if constexpr (Kv::kPer == 2)
      store_pairs(weights + i / 2 * Kv::kStride, w);
    else
      store(weights + i, w);
  };
  // Lanes that query n does not see have a weight of 0: made so in the first and last line, the others are whole.
  const bool any = seen.begin < seen.end;
  const int begin = (any ? seen.begin : all.begin) & -16, end = any ? (seen.end + 15) & -16 : begin;
  const auto hide = [&](int i) { store(scores + i, keep_lanes(load(scores + i), seen.begin - i, seen.end - i, kNoMax)); };
  const bool bent = t.softcap > 0 || t.slopes;
  if (bent) bend(t, n, begin, end, scores);
  if (any) hide(begin), hide(end - 16);
  Vf top = set1(kNoMax), sum = zero();
  for (int i = begin; i < end; i += 16) top = max(top, load(scores + i));
  const float unit = (bent ? 1.0f : t.scale) * 1.44269504f, high = reduce_max(top) * unit;
  for (int i = all.begin & -16; i < begin; i += 16) put(i, zero());
#pragma GCC unroll 2
  for (int i = begin; i < end; i += 16) {
    const Vf w = exp2(fma(load(scores + i), set1(unit), set1(-high)));
    sum = add(sum, w);
    put(i, w);
  }
  for (int i = end; i < all.end; i += 16) put(i, zero());
  t.max[n] = any ? high : kNoMax;
  t.sum[n] = reduce_add(sum);
}

// out[query][dims d .. d + 16 Lines) = weights @ V.
template <class Kv, int Num, int Lines>
HR_INLINE void weigh_lines(const AttendSplit& t, int d, Lanes lanes, const typename Kv::Query (*weights)[kSplitTokens]) {
  const int width = t.shape.value_columns();
  Vf acc[Num][Lines];
#pragma GCC unroll 12
  for (int n = 0; n < Num; n++)
#pragma GCC unroll 8
    for (int i = 0; i < Lines; i++) acc[n][i] = zero();
  for (int b = lanes.begin / kKvTile; b * kKvTile < lanes.end; b++) {
    const int begin = lanes.begin - b * kKvTile, end = lanes.end - b * kKvTile;
    const int first = begin < 0 ? 0 : begin / Kv::kPer, last = ((end > kKvTile ? kKvTile : end) + Kv::kPer - 1) / Kv::kPer;
    const uint8_t* line = t.kv.values[b] + (static_cast<size_t>(first) * width + d) * 4;
    const uint8_t* upcoming = t.next && d == 0 && b < t.next->blocks ? t.next->at[b] : nullptr;
    for (int k = first; k < last; k++, line += static_cast<size_t>(width) * 4) {
      if (upcoming)
        for (int i = 0; i < width * 4; i += 64) prefetch_l2(upcoming + static_cast<size_t>(k) * width * 4 + i);
      const int pair = (b * (kKvTile / Kv::kPer) + k) * Kv::kStride;
#pragma GCC unroll 8
      for (int i = 0; i < Lines; i++)
#pragma GCC unroll 12
        for (int n = 0; n < Num; n++) acc[n][i] = Kv::dot(acc[n][i], line + 64 * i, &weights[n][pair]);
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < Num; n++)
#pragma GCC unroll 8
    for (int i = 0; i < Lines; i++) store(t.out + static_cast<size_t>(n) * width + d + 16 * i, acc[n][i]);
}

// As many dimensions from d on as fill whole sets of lines; returns the first one left.
template <class Kv, int Num, int Lines>
HR_INLINE int weigh(const AttendSplit& t, int d, Lanes lanes, const typename Kv::Query (*weights)[kSplitTokens]) {
  for (; d + 16 * Lines <= t.shape.value_columns(); d += 16 * Lines) weigh_lines<Kv, Num, Lines>(t, d, lanes, weights);
  return d;
}

template <class Kv, int Num>
void attend_num(const AttendSplit& t) {
  alignas(64) float scores[Num][kSplitTokens];
  alignas(64) typename Kv::Query weights[Num][kSplitTokens];
  const Lanes lanes = visible_to_any(t);
  score<Kv, Num>(t, lanes, scores);
  for (int n = 0; n < Num; n++) soften<Kv>(t, n, lanes, scores[n], weights[n]);
  int d = 0;
  if constexpr (8 * Num <= kAccumulators) d = weigh<Kv, Num, 8>(t, d, lanes, weights);
  if constexpr (4 * Num <= kAccumulators) d = weigh<Kv, Num, 4>(t, d, lanes, weights);
  if constexpr (2 * Num <= kAccumulators) d = weigh<Kv, Num, 2>(t, d, lanes, weights);
  weigh<Kv, Num, 1>(t, d, lanes, weights);
}

template <class Kv, int Num = 1>
void attend(const AttendSplit& t) {
  if (t.num == Num) return attend_num<Kv, Num>(t);
  if constexpr (Num < kMaxQueries) attend<Kv, Num + 1>(t);
}

void merge(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b, int n) {
  const float top = *max_a > max_b ? *max_a : max_b;
  const Vf a = exp2(set1(*max_a - top)), b = exp2(set1(max_b - top));
  alignas(64) float factor[2][16];
  store(factor[0], a);
  store(factor[1], b);
  *max_a = top;
  *sum_a = *sum_a * factor[0][0] + sum_b * factor[1][0];
  for (int i = 0; i < n; i += 16) store(out_a + i, fma(load(out_b + i), b, mul(load(out_a + i), a)));
}
