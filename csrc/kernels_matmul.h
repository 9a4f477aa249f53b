// Tile times activation block, for every packed format. Included inside the namespace
// of an instruction set.
//
// A group's weights are decoded once into registers and the rows of the block stream
// against them. Integer sums are exact, and the float sum of an output runs over the
// groups in ascending order in one accumulator, so a row's result does not depend on
// how many rows share the block (promise 1). All loops over the rows are unrolled by
// hand: one that is not makes the compiler keep the accumulators in memory.

// Scale and minimum of one group of 32 columns; `integers` and `minima` are those of
// its two 16-column halves.
template <Scales S>
struct GroupScale {
  Vf scale, min;
  Vs integers, minima;
  bool shifted =
      has_min(S);  // whether there is a minimum, so that the code 0 stands for no sum of its own
};

template <Unit U>
HR_INLINE GroupScale<U.scales> group_scale(const uint8_t* unit, int g) {
  constexpr Scales S = U.scales;
  GroupScale<S> r;
  const auto halves = [unit](int i) {
    return load_half(reinterpret_cast<const uint16_t*>(unit) + 16 * i);
  };
  if constexpr (S == Scales::kPower32) {
    r.scale = from_bits(shift_left<23>(load_u8(unit + 16 * g)));
  } else if constexpr (!is_super(S)) {
    r.scale = halves(g);
    if constexpr (has_min(S)) r.min = halves(U.groups() + g);
  } else {
    const auto* integers = reinterpret_cast<const int8_t*>(unit + 64);
    r.scale = S == Scales::kDecoded16 ? load(reinterpret_cast<const float*>(unit)) : halves(0);
    if constexpr (S == Scales::kSuper32) {
      r.scale = mul(r.scale, to_float(load_s8(integers + 16 * g)));
    } else if constexpr (S == Scales::kSuper32Min) {
      r.scale = mul(r.scale, to_float(load_s8(integers + 16 * g)));
      r.min = sub(zero(), mul(halves(1), to_float(load_u8(unit + U.min_offset() + 16 * g))));
    } else if constexpr (!has_min(S)) {
      r.integers = load_pairs_s8(integers + 32 * g);
    } else {
      const Vs both = load_pairs_u8(unit + 64 + 32 * g);
      r.integers = low_nibbles(both);
      r.minima = high_nibbles(both);
      r.min = mul(halves(1), set1(0.25f));  // half sums carry a factor -4
    }
  }
  return r;
}

// The codes of a group: line j has columns 4j .. 4j + 3.
template <Unit U>
struct GroupCodes {
  const uint8_t* lines;
  int first = 0;
  const uint8_t* table = kFloat4Codes;

  HR_INLINE Vb stored(int j) const {
    const CodePieces& pieces = kCodePieces<U.bits>[first + j];
    const CodePiece &p = pieces.of[0], &q = pieces.of[1], &r = pieces.of[2];
    Vb codes = fields(load_bytes(lines + 64 * p.line), p.at, p.mask);
    if (pieces.count > 1)
      codes = or_fields(codes, load_bytes(lines + 64 * q.line), q.at - q.up, q.mask << q.up);
    if (pieces.count > 2)
      codes = or_fields(codes, load_bytes(lines + 64 * r.line), r.at - r.up, r.mask << r.up);
    return codes;
  }
  HR_INLINE Vb operator[](int j) const {
    return U.is_lookup() ? look_up(stored(j), table) : stored(j);
  }
  HR_INLINE Vb low_nibbles(int j) const
    requires(U.is_lookup())
  {
    return look_up(stored(j), table + 16);
  }
  HR_INLINE Vb high_nibbles(int j) const
    requires(U.is_lookup())
  {
    return look_up(stored(j), table + 32);
  }
  HR_INLINE GroupCodes operator+(int more) const { return {lines, first + more, table}; }
};

// Group g of a unit whose values, if they are looked up, come with the matrix or are
// those of float codes.
template <Unit U>
HR_INLINE GroupCodes<U> group_codes(const uint8_t* unit, const TileShape& shape, int g) {
  const uint8_t* lines = unit + U.codes_offset() + g * U.lines_per_group() * 64;
  return {lines, 0, U.scales == Scales::kPower32 ? kFloat4Codes : shape.lookup.codes};
}

// Minus the zero code times a sum of activations, of which x is -Factor times: what a
// group's integer sum starts from.
template <Unit U, int Factor>
HR_INLINE Vi minus_zero(Vi x) {
  static_assert(U.zero() % Factor == 0);
  if constexpr (U.zero() == 0) return set1(0);
  if constexpr (U.zero() == Factor) return x;
  return shift_left<U.zero() ? __builtin_ctz(U.zero() / Factor) : 0>(x);
}

// The same for a group, of -8 times the sum. That of a table has its zero code, or
// none, when a step runs.
template <Unit U>
HR_INLINE Vi start_of_sum(int32_t x, bool shifted) {
  if constexpr (U.scales == Scales::kTable) {
    constexpr int up = U.code_bits() > 4 ? U.code_bits() - 4 : 0,
                  down = U.code_bits() < 4 ? 4 - U.code_bits() : 0;
    return set1(shifted ? 0 : x * (1 << up) / (1 << down));
  } else {
    return minus_zero<U, 8>(set1(x));
  }
}

// The sums of a group's halves, each times its integer. Pairs of 16 bits have room for
// all but those of 6 bits.
template <Unit U>
HR_INLINE Vi scale_halves(Vi low, Vi high, Vs integers) {
  if constexpr (16 * 127 * ((1 << U.code_bits()) - 1) <= 32767)
    return dot_shorts(join_shorts(low, high), integers);
  else
    return add(mul(low, low_shorts(integers)), mul(high, high_shorts(integers)));
}

constexpr int16_t kOnes[2] = {1, 1};

// Sums of the group's weights, for the offset of the activations.
template <Unit U, class W>
HR_INLINE Vf weight_sums(const W& w, const GroupScale<U.scales>& s) {
  if constexpr (!is_sub16(U.scales)) {
    const int zero_code = s.shifted ? 0 : U.zero();
    const Vf codes =
        mul(to_float(sub(code_sums<U.code_bits(), 8>(w), set1(32 * zero_code))), s.scale);
    return s.shifted ? fma(s.min, set1(32.0f), codes) : codes;
  } else {
    const Vi zeros = set1(16 * U.zero());
    const Vi low = sub(code_sums<U.code_bits(), 4>(w), zeros),
             high = sub(code_sums<U.code_bits(), 4>(w + 4), zeros);
    const Vf codes = mul(to_float(dot_shorts(join_shorts(low, high), s.integers)), s.scale);
    if constexpr (!has_min(U.scales)) return codes;
    return fma(to_float(dot_shorts(s.minima, load_pair(kOnes))), mul(s.min, set1(-4.0f * 16)),
               codes);
  }
}

// The dots of one row and a group, in four sums: a dot waits for the one before it in its sum.
// Any order is exact.
template <Unit U, class W>
HR_INLINE Vi dots_of_row(Vi start, const W& w, const int8_t* x) {
  Vi sums[4] = {start, set1(0), set1(0), set1(0)};
  each<4>([&](int i)
              HR_INLINE_LAMBDA { dots<U.code_bits(), 2, 1>(sums + i, w + 2 * i, x + 8 * i); });
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

// Rows m .. m + N - 1 of a block times a group, their integer sums together.
template <Unit U, int N, class W>
HR_INLINE void add_group(Vf* acc, const W& w, const GroupScale<U.scales>& s, const uint8_t* group,
                         int rows, int m) {
  constexpr Scales S = U.scales;
  const auto* x = reinterpret_cast<const int8_t*>(group) + kGroup * m;
  const auto* scales = reinterpret_cast<const float*>(group + kGroup * rows) + m;
  const auto* zero_sums = reinterpret_cast<const int32_t*>(scales + rows);
  if constexpr (!is_sub16(S)) {
    Vi sums[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) sums[i] = start_of_sum<U>(zero_sums[i], s.shifted);
    if constexpr (N == 1 && kMaxRows >= 16)
      sums[0] = dots_of_row<U>(sums[0], w, x);
    else
      dots<U.code_bits(), 8, N>(sums, w, x);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++)
      acc[i] = fma(to_float(sums[i]), mul(s.scale, set1(scales[i])), acc[i]);
    if (s.shifted) {
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) acc[i] = fma(s.min, set1(scales[3 * rows + i]), acc[i]);
    }
  } else {
    const auto* half_sums = reinterpret_cast<const int16_t*>(zero_sums + rows);
    Vi low[N], high[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) low[i] = high[i] = set1(0);
    dots<U.code_bits(), 4, N>(low, w, x);
    dots<U.code_bits(), 4, N>(high, w + 4, x + 16);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Vs halves = load_pair(half_sums + 2 * i);
      const Vf xs = set1(scales[i]);
      Vi sum = scale_halves<U>(low[i], high[i], s.integers);
      if constexpr (U.zero() > 0) sum = add(sum, minus_zero<U, 4>(dot_shorts(s.integers, halves)));
      acc[i] = fma(to_float(sum), mul(s.scale, xs), acc[i]);
      if constexpr (has_min(S))
        acc[i] = fma(to_float(dot_shorts(s.minima, halves)), mul(s.min, xs), acc[i]);
    }
  }
}

// The same for all rows, two at a time. The float sums of two rows, which wait for the last
// of their dots, come between those of the next two. So do the lines of `later`, which is null
// if there is nothing to fetch: fetched together, dots would wait for them.
template <Unit U, int Rows, class W>
HR_INLINE void add_rows_in_turns(Vf* acc, const W& w, const GroupScale<U.scales>& s,
                                 const uint8_t* group, const uint8_t* later) {
  const auto* x = reinterpret_cast<const int8_t*>(group);
  const auto* scales = reinterpret_cast<const float*>(group + kGroup * Rows);
  const auto* zero_sums = reinterpret_cast<const int32_t*>(scales + Rows);
  Vi sums[Rows + 1];
  each<Rows / 2 + Rows % 2 + 1>([&](int p) HR_INLINE_LAMBDA {
    const int m = 2 * p;
    const auto half_dots = [&](int half) HR_INLINE_LAMBDA {
      const int8_t* from = x + kGroup * m + 16 * half;
      if (m + 1 < Rows)
        dots<U.code_bits(), 4, 2>(sums + m, w + 4 * half, from);
      else if (m < Rows)
        dots<U.code_bits(), 4, 1>(sums + m, w + 4 * half, from);
    };
    for (int i = m; i < m + 2 && i < Rows; i++) sums[i] = start_of_sum<U>(zero_sums[i], s.shifted);
    half_dots(0);
    if (Rows >= kRowsToReadAheadFor && p < kLinesAhead && later) prefetch_l2(later + 64 * p);
    for (int i = m - 2; i >= 0 && i < m && i < Rows; i++) {
      acc[i] = fma(to_float(sums[i]), mul(s.scale, set1(scales[i])), acc[i]);
      if (s.shifted) acc[i] = fma(s.min, set1(scales[3 * Rows + i]), acc[i]);
    }
    half_dots(1);
  });
}

// All rows of a block times a group, without offsets.
template <Unit U, int Rows, int M = 0, class W>
HR_INLINE void add_rows(Vf* acc, const W& w, const GroupScale<U.scales>& s, const uint8_t* group) {
  constexpr int most = is_sub16(U.scales) ? (kSumsTogether + 1) / 2 : kSumsTogether,
                left = Rows - M;
  constexpr int turns = (left + most - 1) / most, n = (left + turns - 1) / turns;
  add_group<U, n>(acc + M, w, s, group, Rows, M);
  if constexpr (M + n < Rows) add_rows<U, Rows, M + n>(acc, w, s, group);
}

// Weights are fetched this far ahead, into L2: it has room for more misses under way
// than L1, and the hardware's prefetcher falls behind as soon as there is something to
// compute. (4 to 16 KB do equally well; into L1, five rows of Q8_0 take 1.6 times as
// long. Where dot products are one instruction, a single row runs at the pace of memory
// without; in AVX2 it takes twice as long.)
constexpr int kFetchAhead = 7168;

// All rows of a block times a group, with their offsets if they have any. `kept`: where the sums
// of the weights lie, or are left, or null.
template <Unit U, int Rows, bool Offset, class W>
HR_INLINE void add_whole_group(Vf* acc, const W& w, const GroupScale<U.scales>& s,
                               const uint8_t* block, const uint8_t* later = nullptr,
                               float* kept = nullptr, bool is_kept = false) {
  if constexpr (kSumsBetweenDots && !is_sub16(U.scales) && Rows >= 4)
    add_rows_in_turns<U, Rows>(acc, w, s, block, later);
  else
    add_rows<U, Rows>(acc, w, s, block);
  if constexpr (Offset) {
    Vf sums;
    if (Rows >= kRowsToKeepSumsFor && is_kept) {
      sums = load(kept);
    } else {
      sums = weight_sums<U>(w, s);
      if (Rows >= kRowsToKeepSumsFor && kept) store(kept, sums);
    }
    const auto* offsets = reinterpret_cast<const float*>(block + q8_group_bytes(false) * Rows);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) acc[m] = fma(sums, set1(offsets[m]), acc[m]);
  }
}

template <Format F, int Rows, bool Offset>
void matmul_grouped(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                    const Aside& aside) {
  constexpr Unit U = unit_of(F);
  const uint8_t* later = aside.later;
  float* kept = aside.sums;
  Vf acc[Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[m] = zero();
  for (int u = 0; u < shape.units; u++, tile += U.bytes()) {
    for (int g = 0; g < U.groups(); g++, block += q8_group_bytes(Offset) * Rows) {
      if constexpr (Rows >= kRowsToFetchFor) {
        constexpr int share = U.bytes() / U.groups();
        for (int i = 0; i < share; i += 64) prefetch_l2(tile + g * share + kFetchAhead + i);
      }
      add_whole_group<U, Rows, Offset>(acc, group_codes<U>(tile, shape, g), group_scale<U>(tile, g),
                                       block, later, kept, aside.knows_sums);
      if (later) later += 64 * kLinesAhead;
      if (kept) kept += kTileRows;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) store(out + 16 * m, acc[m]);
}

// A super-block of a tile of points of a grid, decoded.
HR_INLINE void decode_grid(const uint8_t* blocks, const TileShape& shape, uint8_t* unit) {
  for (int r = 0; r < kTileRows; r += kGridRows)
    shape.grid->decode(blocks + r * shape.grid->block_bytes, shape.points, r, unit);
}

template <int Rows, bool Offset>
void matmul_grid(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                 const Aside&) {
  constexpr Unit U = unit_of(Format::kGrid);
  alignas(64) uint8_t unit[U.bytes()];
  const int bytes = kTileRows * shape.grid->block_bytes;
  Vf acc[Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[m] = zero();
  for (int u = 0; u < shape.units; u++, tile += bytes) {
    for (int i = 0; i < bytes; i += 64) prefetch_l2(tile + kFetchAhead + i);
    decode_grid(tile, shape, unit);
    for (int g = 0; g < U.groups(); g++, block += q8_group_bytes(Offset) * Rows)
      add_whole_group<U, Rows, Offset>(acc, group_codes<U>(unit, shape, g), group_scale<U>(unit, g),
                                       block);
  }
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) store(out + 16 * m, acc[m]);
}

// int8 weights with one scale a row: nothing but dot products until the end of the
// tile. Sums start at minus the zero code times the sum of the activations, so no
// partial one is larger than kMaxRowColumns allows. With few rows each has several
// sums, as many as it takes for one to be ready when its turn comes again: any order is
// exact.
//
// The loop is so tight that what it waits for is weights. Up to 4 rows the hardware's
// prefetcher is the best that there is; then it falls behind, and weights are fetched
// into L2, and with 8 rows or more from there into L1. Of 2:4 weights it falls behind
// with any rows.
template <Format F, int Rows>
void matmul_i8_row(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                   const Aside&) {
  constexpr int turns = Rows >= 3 || kMaxRows < 16 ? 1 : 4 / Rows;
  const auto* scales = reinterpret_cast<const float*>(block);
  const auto* zero_sums = reinterpret_cast<const int32_t*>(scales + Rows);
  const auto* x = reinterpret_cast<const int8_t*>(zero_sums + Rows);
  Vi sums[turns][Rows];
#pragma GCC unroll 4
  for (int t = 0; t < turns; t++)
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) sums[t][m] = set1(t ? 0 : zero_sums[m]);
  constexpr int near = 1024, bytes = unit_bytes(F);
  const auto* first_scale = reinterpret_cast<const float*>(tile);
  tile += shape.codes_offset();
  for (int u = 0; u < shape.units; u++, tile += bytes, x += kGroup * Rows) {
#pragma GCC unroll(kMaxRows < 16 ? 1 : 8)
    for (int j = 0; j < 8; j += kLinesTogether) {
      Vb w[kLinesTogether];
      for (int i = 0; i < kLinesTogether; i++) {
        const int line = j + i;
        if ((Rows >= 5 || is_sparse(F)) && 64 * line < bytes)
          prefetch_l2(tile + kFetchAhead + 64 * line);
        if (Rows >= 8 && 64 * line < bytes) prefetch(tile + near + 64 * line);
        if constexpr (is_sparse(F))
          w[i] = SparseCodes<unit_of(F)>{tile}[line];
        else
          w[i] = load_bytes(tile + 64 * line);
      }
      dots<8, kLinesTogether, Rows>(sums[j % turns], w, x + 4 * j);
    }
  }
  const Vf weight_scales = load(is_sparse(F) ? first_scale : reinterpret_cast<const float*>(tile));
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) {
    Vi sum = sums[0][m];
#pragma GCC unroll 4
    for (int t = 1; t < turns; t++) sum = add(sum, sums[t][m]);
    store(out + 16 * m, mul(to_float(sum), mul(weight_scales, set1(scales[m]))));
  }
}

// The same, and what the outliers of each row add: a column of weights times a number,
// in the order of columns.
template <int Rows>
void matmul_i8_mixed(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                     const Aside& aside) {
  const auto* outliers = reinterpret_cast<const Outliers*>(block);
  matmul_i8_row<Format::kI8Row, Rows>(tile, shape, block + Rows * sizeof(Outliers), out, aside);
  const auto* scales = reinterpret_cast<const float*>(tile + static_cast<size_t>(shape.units) *
                                                                 unit_bytes(Format::kI8Mixed));
  for (int m = 0; m < Rows; m++)
    for (int i = 0; i < outliers[m].count; i++) {
      const int column = outliers[m].columns[i];
      const uint8_t* codes = tile + column / 4 * 64 + column % 4;
      for (int r = 0; r < kTileRows; r++)
        out[16 * m + r] +=
            outliers[m].values[i] * (scales[r] * static_cast<float>(codes[4 * r] - 128));
    }
}

// Units of bf16 weights times all rows: of a dense matrix pairs of columns, of a 2:4 one groups.
template <Format F, int Rows>
HR_INLINE void add_pairs(Vf (&acc)[Rows], const uint8_t* unit, const Pair* x, size_t distance) {
  constexpr int lines = unit_columns(F) / 2, bytes = unit_bytes(F);
#pragma GCC unroll 16
  for (int i = 0; i < lines; i++) {
    // Of dense weights the hardware keeps up with few rows alone.
    if ((is_sparse(F) || Rows >= 6) && 64 * i < bytes) prefetch_l2(unit + distance + 64 * i);
    const Vb w = is_sparse(F) ? sparse_pairs(unit, i / 2, i % 2) : load_bytes(unit);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) acc[m] = dot_pair(acc[m], w, x + kPairStride * (Rows * i + m));
  }
}

// bf16 weights: activations in pairs, bf16 where the processor multiplies them, else float32. Each
// half of the groups of 32 columns has a sum of its own; a 2:4 matrix has the products of the dense
// one in its order. A product waits for the one before it in the same sum, and with one sum per row
// memory would wait for the products of few rows with 2:4 weights: these go on with both at once.
template <Format F, int Rows>
void matmul_pairs(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                  const Aside&) {
  constexpr int per_group = kGroup / unit_columns(F), bytes = unit_bytes(F),
                step = kPairStride * Rows * unit_columns(F) / 2;
  const int half = (shape.units + per_group - 1) / per_group / 2 * per_group;
  const auto* x = reinterpret_cast<const Pair*>(block);
  Vf acc[2][Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[0][m] = acc[1][m] = zero();
  if constexpr (is_sparse(F) && 2 * Rows <= kAccumulators) {
    const size_t later = static_cast<size_t>(half) * bytes,
                 whole = static_cast<size_t>(shape.units) * bytes;
    const auto* more = x + static_cast<size_t>(half) * step;
    for (int u = 0; u < half; u++, tile += bytes, x += step, more += step) {
      // After the first half comes that of the next tile's second one, which is read at once.
      const size_t jump = (half - u) * bytes <= kFetchAhead ? whole : 0;
      add_pairs<F, Rows>(acc[0], tile, x, kFetchAhead + jump);
      add_pairs<F, Rows>(acc[1], tile + later, more, kFetchAhead);
    }
    if (2 * half < shape.units) add_pairs<F, Rows>(acc[1], tile + later, more, kFetchAhead);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) store(out + 16 * m, add(acc[0][m], acc[1][m]));
  } else {
    for (int u = 0; u < half; u++, tile += bytes, x += step)
      add_pairs<F, Rows>(acc[0], tile, x, kFetchAhead);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) store(out + 16 * m, acc[0][m]);
    for (int u = half; u < shape.units; u++, tile += bytes, x += step)
      add_pairs<F, Rows>(acc[1], tile, x, kFetchAhead);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) store(out + 16 * m, add(load(out + 16 * m), acc[1][m]));
  }
}

// f16 and f32 weights: float32 activations, two columns of a row side by side as for
// bf16.
template <Format F, int Rows>
void matmul_float(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                  const Aside&) {
  Vf acc[Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[m] = zero();
  const auto* x = reinterpret_cast<const float*>(block);
  for (int u = 0; u < shape.units; u++, tile += unit_bytes(F)) {
    const Vf w = F == Format::kF16 ? load_half(reinterpret_cast<const uint16_t*>(tile))
                                   : load(reinterpret_cast<const float*>(tile));
    const float* column = x + (u / 2) * 2 * Rows + u % 2;
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) acc[m] = fma(w, set1(column[2 * m]), acc[m]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) store(out + 16 * m, acc[m]);
}
