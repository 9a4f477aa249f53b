// Attention of a few query vectors over one KV block (online softmax, Milakov and Gimelshein 2018; Dao et al. 2022).
// Included inside the namespace of an instruction set.
//
// Lanes are tokens for the scores and dimensions for the weighted sum. A query's numbers go through the same operations in the
// same order whoever shares the block, so a row in a prefill tile equals the row alone (promise 1).

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

// A query vector in the form that the scores read. Room for 16 more numbers than head_dim.
template <class Kv>
void pack_query(const float* q, int head_dim, uint8_t* out) {
  for (int i = 0; i < head_dim; i += 16) {
    const Vf v = load_partial(q + i, head_dim - i);
    if constexpr (Kv::kPer == 2)
      store_pairs(reinterpret_cast<Pair*>(out) + i / 2 * kPairStride, v);
    else
      store(reinterpret_cast<float*>(out) + i, v);
  }
}

// Weights of one block for one query: updates maximum, sum and the values gathered so far; p[32] is ready for weigh_values.
template <class Kv>
HR_INLINE void soften(const AttendBlock& t, int n, Vf s0, Vf s1, typename Kv::Query* p) {
  const int first = t.first[n], last = t.last[n], width = t.shape.padded_dim();
  const bool whole = first <= 0 && last >= kKvTile;
  s0 = mul(s0, set1(t.scale));
  s1 = mul(s1, set1(t.scale));
  if (!whole) {
    s0 = keep_lanes(s0, first, last, kNoMax);
    s1 = keep_lanes(s1, first - 16, last - 16, kNoMax);
  }
  const float top = reduce_max(max(s0, s1));
  if (top > t.max[n]) {
    const Vf shrink = exp(set1(t.max[n] - top));
    t.max[n] = top;
    alignas(64) float factor[16];
    store(factor, shrink);
    t.sum[n] *= factor[0];
    float* out = t.out + static_cast<size_t>(n) * width;
    for (int i = 0; i < width; i += 16) store(out + i, mul(load(out + i), shrink));
  }
  s0 = exp(sub(s0, set1(t.max[n])));
  s1 = exp(sub(s1, set1(t.max[n])));
  if (!whole) {
    s0 = keep_lanes(s0, first, last, 0.0f);
    s1 = keep_lanes(s1, first - 16, last - 16, 0.0f);
  }
  t.sum[n] += reduce_add(add(s0, s1));
  if constexpr (Kv::kPer == 2) {
    store_pairs(p, s0);
    store_pairs(p + 8 * kPairStride, s1);
  } else {
    store(p, s0);
    store(p + 16, s1);
  }
}

// out[query][dims d .. d + 16 Lines) += p @ V, for Queries queries at once.
template <class Kv, int Queries, int Lines>
HR_INLINE void weigh_values(const AttendBlock& t, int n, int d, int begin, int end, const typename Kv::Query (*p)[kKvTile]) {
  const int width = t.shape.padded_dim();
  const uint8_t* values = t.record + t.shape.value_offset() + static_cast<size_t>(d) * 4;
  float* out = t.out + static_cast<size_t>(n) * width + d;
  Vf acc[Queries][Lines];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; q++)
#pragma GCC unroll 4
    for (int i = 0; i < Lines; i++) acc[q][i] = load(out + q * width + 16 * i);
  for (int k = begin; k < end; k++) {
    const uint8_t* line = values + static_cast<size_t>(k) * width * 4;
#pragma GCC unroll 4
    for (int i = 0; i < Lines; i++)
#pragma GCC unroll 4
      for (int q = 0; q < Queries; q++) acc[q][i] = Kv::dot(acc[q][i], line + 64 * i, &p[n + q][k * Kv::kStride]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < Queries; q++)
#pragma GCC unroll 4
    for (int i = 0; i < Lines; i++) store(out + q * width + 16 * i, acc[q][i]);
}

template <class Kv, int Queries>
HR_INLINE void weigh_all_values(const AttendBlock& t, int n, int begin, int end, const typename Kv::Query (*p)[kKvTile]) {
  const int width = t.shape.padded_dim();
  int d = 0;
  for (; d + 64 <= width; d += 64) weigh_values<Kv, Queries, 4>(t, n, d, begin, end, p);
  for (; d < width; d += 16) weigh_values<Kv, Queries, 1>(t, n, d, begin, end, p);
}

template <class Kv, int Num>
void attend_num(const AttendBlock& t) {
  using Query = typename Kv::Query;
  Vf scores[Num][2];
#pragma GCC unroll 8
  for (int n = 0; n < Num; n++) scores[n][0] = scores[n][1] = zero();
  const uint8_t* line = t.record;
  const auto* query = reinterpret_cast<const Query*>(t.queries);
  const size_t stride = t.query_stride / sizeof(Query);
  for (int d = 0; d < t.shape.head_dim / Kv::kPer; d++, line += 128, query += Kv::kStride)
#pragma GCC unroll 8
    for (int n = 0; n < Num; n++) {
      scores[n][0] = Kv::dot(scores[n][0], line, query + n * stride);
      scores[n][1] = Kv::dot(scores[n][1], line + 64, query + n * stride);
    }
  alignas(64) Query p[Num][kKvTile];
  int begin = kKvTile, end = 0;
#pragma GCC unroll 8
  for (int n = 0; n < Num; n++) {
    soften<Kv>(t, n, scores[n][0], scores[n][1], p[n]);
    begin = t.first[n] < begin ? t.first[n] : begin;
    end = t.last[n] > end ? t.last[n] : end;
  }
  begin = (begin < 0 ? 0 : begin) / Kv::kPer;
  end = ((end > kKvTile ? kKvTile : end) + Kv::kPer - 1) / Kv::kPer;
  int n = 0;
  for (; n + 4 <= Num; n += 4) weigh_all_values<Kv, 4>(t, n, begin, end, p);
  if constexpr (Num % 4 >= 2) weigh_all_values<Kv, 2>(t, n, begin, end, p), n += 2;
  if constexpr (Num % 2 == 1) weigh_all_values<Kv, 1>(t, n, begin, end, p);
}

template <class Kv>
void attend(const AttendBlock& t) {
  switch (t.num) {
    case 1:
      return attend_num<Kv, 1>(t);
    case 2:
      return attend_num<Kv, 2>(t);
    case 3:
      return attend_num<Kv, 3>(t);
    case 4:
      return attend_num<Kv, 4>(t);
    case 5:
      return attend_num<Kv, 5>(t);
    case 6:
      return attend_num<Kv, 6>(t);
    case 7:
      return attend_num<Kv, 7>(t);
    default:
      return attend_num<Kv, 8>(t);
  }
}

void merge(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b, int n) {
  const float top = *max_a > max_b ? *max_a : max_b;
  const Vf a = exp(set1(*max_a - top)), b = exp(set1(max_b - top));
  alignas(64) float factor[2][16];
  store(factor[0], a);
  store(factor[1], b);
  *max_a = top;
  *sum_a = *sum_a * factor[0][0] + sum_b * factor[1][0];
  for (int i = 0; i < n; i += 16) store(out_a + i, fma(load(out_b + i), b, mul(load(out_a + i), a)));
}
