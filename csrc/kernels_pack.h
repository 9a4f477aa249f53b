// Activation packing: rows of floats into the blocks that the matrix kernels read.
// Included inside the namespace of an instruction set.

// Numbers that are not finite have no code: the group, or the row, that has one gets
// the code 0 and a scale that is NaN, so that all that is computed from it is NaN, and
// no other row is.
HR_INLINE bool is_finite(Vf sum_of_zeros) { return ge_mask(sum_of_zeros, zero()) == 0xffff; }

// int8 per 32 columns: scale = half of the range / 127, codes rounded to nearest even;
// around 0, or around the middle of the range.
template <bool Offset>
HR_INLINE void pack_group(const float* x, int n, uint8_t* group, int rows, int m) {
  Vf a = n >= kGroup ? load(x) : load_partial(x, n),
     b = n >= kGroup ? load(x + 16) : load_partial(x + 16, n - 16);
  const bool finite = is_finite(fma(a, zero(), mul(b, zero())));
  float top, middle = 0;
  if constexpr (Offset) {
    const float high = reduce_max(max(a, b)),
                low = -reduce_max(max(sub(zero(), a), sub(zero(), b)));
    middle = 0.5f * (high + low);
    top = 0.5f * (high - low);
    a = sub(a, set1(middle));
    b = sub(b, set1(middle));
  } else {
    top = reduce_max(max(abs(a), abs(b)));
  }
  if (!finite) {
    a = b = zero();
    top = middle = kNotFinite;
  }
  const Vf inverse =
      set1(top > 1e-36f ? 127.0f / top : 0.0f);  // of less the inverse would overflow
  const Vi low = round_to_int(mul(a, inverse)), high = round_to_int(mul(b, inverse));
  auto* codes = reinterpret_cast<int8_t*>(group) + kGroup * m;
  store_s8(codes, low);
  store_s8(codes + 16, high);
  const int32_t sum_low = reduce_add(low), sum = reduce_add(add(low, high));
  auto* scales = reinterpret_cast<float*>(group + kGroup * rows) + m;
  auto* sums = reinterpret_cast<int32_t*>(scales);
  scales[0] = top / 127.0f;
  sums[rows] = -8 * sum;
  auto* halves = reinterpret_cast<int16_t*>(group + kGroup * rows + 8 * rows) + 2 * m;
  halves[0] = static_cast<int16_t>(-4 * sum_low);
  halves[1] = static_cast<int16_t>(-4 * (sum - sum_low));
  scales[3 * rows] = scales[0] * static_cast<float>(sum);
  if constexpr (Offset) scales[4 * rows] = middle;
}

// The same for whole groups of `count` rows, up to 16, whose numbers begin at row[i]: beyond
// them are rows again. Returns false, and leaves the group as it is, where any number is not
// finite.
template <bool Offset, int Most>
HR_INLINE bool pack_group_together(const float* const (&row)[Most], int count, uint8_t* group,
                                   int rows, int m) {
  Vf highs[Most], lows[Most], zeros = zero();
#pragma GCC unroll 16
  for (int i = 0; i < Most; i++) {
    const Vf a = load(row[i]), b = load(row[i] + 16);
    zeros = fma(a, zero(), fma(b, zero(), zeros));
    if constexpr (Offset) {
      highs[i] = max(a, b);
      lows[i] = max(sub(zero(), a), sub(zero(), b));
    } else {
      highs[i] = max(abs(a), abs(b));
    }
  }
  if (!is_finite(zeros)) return false;
  Vf top = reduce_max_each(highs), middle = zero();
  if constexpr (Offset) {
    const Vf low = sub(zero(), reduce_max_each(lows)), high = top;
    middle = mul(set1(0.5f), add(high, low));
    top = mul(set1(0.5f), sub(high, low));
  }
  alignas(64) float inverses[Most], middles[Most];
  alignas(64) int8_t codes[Most * kGroup];
  store(inverses, keep_bits(div(set1(127.0f), top), ~ge_mask(set1(1e-36f), top)));
  if constexpr (Offset) store(middles, middle);
#pragma GCC unroll 16
  for (int i = 0; i < Most; i++) {
    Vf a = load(row[i]), b = load(row[i] + 16);
    if constexpr (Offset) a = sub(a, set1(middles[i])), b = sub(b, set1(middles[i]));
    store_s8(codes + kGroup * i, round_to_int(mul(a, set1(inverses[i]))));
    store_s8(codes + kGroup * i + 16, round_to_int(mul(b, set1(inverses[i]))));
  }
  memcpy(group + kGroup * m, codes, static_cast<size_t>(kGroup * count));
  Vi low, high;
  sum_halves(codes, low, high);
  const Vi sum = add(low, high),
           halves = add(and_bits(mul(low, set1(-4)), set1(0xffff)), mul(high, set1(-4 * 65536)));
  const Vf scale = div(top, set1(127.0f));
  auto* scales = reinterpret_cast<float*>(group + kGroup * rows) + m;
  store_partial(scales, scale, count);
  store_partial(scales + rows, from_bits(mul(sum, set1(-8))), count);
  store_partial(scales + 2 * rows, from_bits(halves), count);
  store_partial(scales + 3 * rows, mul(scale, to_float(sum)), count);
  if constexpr (Offset) store_partial(scales + 4 * rows, middle, count);
  return true;
}

template <bool Offset>
void pack_q8(const float* x, size_t stride, int count, int n, int columns, uint8_t* block, int rows,
             int m) {
  // So many rows take less time together, though they take that of 16.
  constexpr int kWorthIt = 8;
  if constexpr (kReducesTogether) {
    const float* row[16];
    for (int i = 0; i < 16; i++) row[i] = x + (i < count ? i : count - 1) * stride;
    for (; count >= kWorthIt && n >= kGroup; x += kGroup, n -= kGroup, columns -= kGroup) {
      if (!pack_group_together<Offset>(row, count, block, rows, m))
        for (int i = 0; i < count; i++) pack_group<Offset>(row[i], kGroup, block, rows, m + i);
      for (const float*& each : row) each += kGroup;
      block += q8_group_bytes(Offset) * rows;
    }
  }
  for (int i = 0; i < count; i++, x += stride, m++) {
    uint8_t* group = block;
    for (int k = 0; k < columns; k += kGroup, group += q8_group_bytes(Offset) * rows)
      pack_group<Offset>(x + k, n - k, group, rows, m);
  }
}

// The numbers of a row that are outliers: beyond the threshold, or where these are too
// many beyond the next higher one that leaves few.
void find_outliers(const float* x, int n, Outliers& found) {
  for (float threshold = Outliers::kThreshold;; threshold *= 1.25f) {
    int count = 0;
    for (int k = 0; k < n && count <= Outliers::kMost; k++)
      if (x[k] > threshold || x[k] < -threshold) {
        if (count < Outliers::kMost) found.columns[count] = k, found.values[count] = x[k];
        count++;
      }
    found.count = count;
    if (count <= Outliers::kMost) return;
  }
}

// Columns k to k + 15 of a row of n, where outliers are 0. `next` is the first of them
// from column k on, and is moved on.
Vf without_outliers(const float* x, int k, int n, const Outliers& outliers, int& next) {
  const Vf v = n - k >= 16 ? load(x + k) : load_partial(x + k, n - k);
  if (next == outliers.count || outliers.columns[next] >= k + 16) return v;
  alignas(64) float some[16];
  store(some, v);
  while (next < outliers.count && outliers.columns[next] < k + 16)
    some[outliers.columns[next++] - k] = 0;
  return load(some);
}

// int8 with one scale a row: the row's highest magnitude / 127. kMixed: that of all but
// its outliers, which are listed before.
template <bool kMixed>
void pack_q8_row(const float* x, size_t stride, int count, int n, int columns, uint8_t* block,
                 int rows, int m) {
  uint8_t* const start = block + (kMixed ? rows * sizeof(Outliers) : 0);
  Outliers none;
  for (int i = 0; i < count; i++, x += stride, m++) {
    Vf highest = zero(), zeros = zero();
    for (int k = 0; k < n; k += 16) {
      const Vf v = n - k >= 16 ? load(x + k) : load_partial(x + k, n - k);
      highest = max(highest, abs(v));
      zeros = fma(v, zero(), zeros);
    }
    const bool finite = is_finite(zeros);
    const int coded = finite ? n : 0;
    Outliers& outliers = kMixed ? reinterpret_cast<Outliers*>(block)[m] : none;
    outliers.count = 0;
    int next = 0;
    if (kMixed && finite && reduce_max(highest) > Outliers::kThreshold) {
      find_outliers(x, n, outliers);
      highest = zero();
      for (int k = 0; k < n; k += 16)
        highest = max(highest, abs(without_outliers(x, k, n, outliers, next)));
    }
    const float top = finite ? reduce_max(highest) : kNotFinite;
    const Vf inverse =
        set1(top > 1e-36f ? 127.0f / top : 0.0f);  // of less the inverse would overflow
    auto* scales = reinterpret_cast<float*>(start);
    auto* zero_sums = reinterpret_cast<int32_t*>(scales + rows);
    auto* codes = reinterpret_cast<int8_t*>(zero_sums + rows) + kGroup * m;
    Vi sum = set1(0);
    next = 0;
    for (int k = 0; k < columns; k += kGroup, codes += kGroup * rows)
      for (int half = 0; half < kGroup; half += 16) {
        const Vi code =
            round_to_int(mul(without_outliers(x, k + half, coded, outliers, next), inverse));
        store_s8(codes + half, code);
        sum = add(sum, code);
      }
    scales[m] = top / 127.0f;
    zero_sums[m] = -128 * reduce_add(sum);
  }
}

// Two columns of a row side by side: x[columns / 2][rows][2].
void pack_f32(const float* x, size_t stride, int count, int n, int columns, uint8_t* block,
              int rows, int m) {
  auto* out = reinterpret_cast<float*>(block);
  for (int i = 0; i < count; i++, x += stride, m++)
    for (int k = 0; k < columns; k++) out[(k / 2 * rows + m) * 2 + k % 2] = k < n ? x[k] : 0.0f;
}

// The same in bf16. Only where a pair is two bf16: elsewhere the kernels of bf16
// weights read float32.
void pack_bf16([[maybe_unused]] const float* x, [[maybe_unused]] size_t stride,
               [[maybe_unused]] int count, [[maybe_unused]] int n, [[maybe_unused]] int columns,
               [[maybe_unused]] uint8_t* block, [[maybe_unused]] int rows, [[maybe_unused]] int m) {
  if constexpr (kHasBf16) {
    auto* out = reinterpret_cast<Pair*>(block);
    for (int i = 0; i < count; i++, x += stride, m++)
      for (int k = 0; k < columns; k += 16) {
        alignas(64) Pair pairs[16];
        store_pairs(pairs, load_partial(x + k, n - k));
        const int num = columns - k < 16 ? (columns - k) / 2 : 8;
        for (int j = 0; j < num; j++) out[(k / 2 + j) * rows + m] = pairs[j];
      }
  }
}
