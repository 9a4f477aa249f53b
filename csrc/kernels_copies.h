// Kernels over copies by columns and by rows (copy_shape.h). Included inside the namespace of an
// instruction set, behind kernels_matmul_table.h.

// The scale of group g of a tile, from its scales in a panel or in front of a row.
template <Format F>
HR_INLINE GroupScale<unit_of(F).scales> copied_scale(const uint8_t* header, const TileShape& shape,
                                                     int g) {
  constexpr Unit U = unit_of(F);
  if constexpr (is_table(F))
    return table_scale(header, shape, g / (shape.scale_columns / kGroup));
  else
    return group_scale<U>(header, g % U.groups());
}

// Groups of a panel that all its chunks multiply before the next ones, which they fetch meanwhile:
// no prefetcher of the hardware foresees runs of single columns.
constexpr int kGroupsTogether = 8;

// Fetches the runs of group g that are needed, and its scales.
template <Format F>
HR_INLINE void fetch_group(const ColumnWork& work, const PanelShape<F>& shape, int g) {
  constexpr Unit U = unit_of(F);
  const uint8_t* codes = work.panel + shape.codes(g, work.panel_tiles);
  for (int q = 4 * work.x.first[g]; q < 4 * work.x.first[g + 1]; q++)
    for (size_t line = 0; line < shape.run; line += 64)
      prefetch(codes + work.x.columns[q] * shape.run + line);
  if (is_table(F) || g % U.groups()) return;
  const uint8_t* scales = work.panel + shape.tile_header(g / U.groups(), 0);
  for (size_t line = 0; line < work.tiles * shape.header; line += 64) prefetch(scales + line);
}

// What one call multiplies: the groups from `first` to `last` of some tiles and rows. Tiles are
// those of a chunk, or of codes of 4 bits those in the nibbles of `part`.
struct ChunkWork {
  int first, last, chunk, part, m;
  int fetched, step;  // every so many groups from `fetched` on are fetched meanwhile
};

// Some tiles of N rows, over the columns that are not 0 in all rows. The order of the float sum of
// an output is that of `add_group`; sums lie in `out` between the calls.
template <Format F, int N, int Tiles>
HR_INLINE void multiply_chunk(const ColumnWork& work, const PanelShape<F>& shape,
                              const ChunkWork& now) {
  constexpr Unit U = unit_of(F);
  const bool shifted = has_min(U.scales) || (is_table(F) && work.shape.zeros != Number::kNone);
  const int tile = now.chunk * chunk_tiles(U.bits) + 4 * now.part, m = now.m;
  const auto place = [&](int j, int i) HR_INLINE_LAMBDA {
    return work.out + (static_cast<size_t>(tile + j) * work.rows + m + i) * kTileRows;
  };
  Vf acc[Tiles][N];
#pragma GCC unroll 8
  for (int j = 0; j < Tiles; j++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) acc[j][i] = now.first ? load(place(j, i)) : zero();
  int fetched = now.fetched;
  for (int g = now.first; g < now.last; g++) {
    if (fetched == g + kGroupsTogether) {
      if (fetched < work.groups) fetch_group<F>(work, shape, fetched);
      fetched += now.step;
    }
    const int first = work.x.first[g], quads = work.x.first[g + 1] - first;
    if (!quads) continue;
    const uint8_t* codes = work.panel + shape.codes(g, work.panel_tiles) + 64 * now.chunk;
    const uint8_t* group = work.block + static_cast<size_t>(g) * q8_group_bytes(false) * work.rows;
    const auto* scales = reinterpret_cast<const float*>(group + kGroup * work.rows) + m;
    const auto* zero_sums = reinterpret_cast<const int32_t*>(scales + work.rows);
    const int8_t* x = work.x.x + (static_cast<size_t>(g) * work.rows + m) * kGroup;
    Vi sums[Tiles][N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Vi start = start_of_sum<U>(zero_sums[i], shifted);
#pragma GCC unroll 8
      for (int j = 0; j < Tiles; j++) sums[j][i] = start;
    }
    for (int q = 0; q < quads; q++) {
      const uint8_t* at = work.x.columns + 4 * (first + q);
      Vb w[4];
      interleave(codes + at[0] * shape.run, codes + at[1] * shape.run, codes + at[2] * shape.run,
                 codes + at[3] * shape.run, w);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        if constexpr (U.bits == 8) {
          dots<8, 1, N>(sums[j], &w[j], x + 4 * q);
        } else if constexpr (Tiles == 8) {
          const Vb low = fields(w[j], 0, 15), high = fields(w[j], 4, 15);
          dots<4, 1, N>(sums[j], &low, x + 4 * q);
          dots<4, 1, N>(sums[4 + j], &high, x + 4 * q);
        } else {
          const Vb half = now.part ? fields(w[j], 4, 15) : fields(w[j], 0, 15);
          dots<4, 1, N>(sums[j], &half, x + 4 * q);
        }
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < Tiles; j++) {
      const auto s =
          copied_scale<F>(work.panel + shape.tile_header(g / U.groups(), tile + j), work.shape, g);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) {
        acc[j][i] = fma(to_float(sums[j][i]), mul(s.scale, set1(scales[i])), acc[j][i]);
        if (s.shifted) acc[j][i] = fma(s.min, set1(scales[3 * work.rows + i]), acc[j][i]);
      }
    }
  }
  for (int j = 0; j < Tiles; j++)
    for (int i = 0; i < N; i++) store(place(j, i), acc[j][i]);
}

template <Format F>
void multiply_columns(const ColumnWork& work) {
  constexpr int chunk = chunk_tiles(unit_of(F).bits);
  const PanelShape<F> shape(work.panel_tiles, work.shape);
  const int chunks = work.tiles / chunk;
  for (int g = 0; g < kGroupsTogether && g < work.groups; g++) fetch_group<F>(work, shape, g);
  for (int first = 0; first < work.groups; first += kGroupsTogether) {
    const int end = first + kGroupsTogether, last = end < work.groups ? end : work.groups;
    for (int c = 0; c < chunks; c++) {
      // The chunks share what is to be fetched.
      ChunkWork now{first, last, c, 0, 0, end + c, chunks};
      if (work.rows == 1) {
        multiply_chunk<F, 1, chunk>(work, shape, now);
        continue;
      }
      while (now.m < work.rows) {
        const int left = work.rows - now.m, n = left == 4 || left == 2 ? 2 : left < 3 ? left : 3;
        for (now.part = 0; now.part < chunk / 4; now.part++, now.fetched = -1)
          if (n == 3)
            multiply_chunk<F, 3, 4>(work, shape, now);
          else if (n == 2)
            multiply_chunk<F, 2, 4>(work, shape, now);
          else
            multiply_chunk<F, 1, 4>(work, shape, now);
        now.m += n;
      }
    }
  }
}

template <Format F>
void copied_scales(const uint8_t* tile, const TileShape& shape, int g, float* scales,
                   float* minima) {
  constexpr Unit U = unit_of(F);
  const uint8_t* header =
      is_table(F) ? tile : tile + static_cast<size_t>(g / U.groups()) * U.bytes();
  const auto s = copied_scale<F>(header, shape, g);
  store(scales, s.scale);
  if (s.shifted) store(minima, s.min);
}

// Rows of a copy that are fetched ahead.
constexpr int kRowsAhead = 12;

// Up to four rows of a copy are multiplied together, because a float sum waits for its last step.
// The order of the float sum of a row is that of `add_group`.
template <int kBits, bool kShifted, int N>
HR_INLINE void multiply_some_rows(const RowWork& work, int first) {
  const RowShape& shape = work.shape;
  const uint8_t* const* rows = work.rows + first;
  float acc[N] = {};
  for (int g = 0; g < shape.groups; g += 16) {
    alignas(64) float sums[N][16], scales[N][16];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      sum_groups<kBits>(rows[i] + shape.codes_offset() + g * 4 * kBits, work.x.x + 32 * g,
                        work.x.starts + g, shape.quads() - g / 4, sums[i]);
      const auto* own = reinterpret_cast<const float*>(rows[i]) + g;
      store(scales[i], mul(load(own), load(work.x.scales + g)));
    }
    const int end = shape.groups - g < 16 ? shape.groups - g : 16;
    for (int k = 0; k < end; k++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) {
        acc[i] = fma_one(sums[i][k], scales[i][k], acc[i]);
        if (kShifted) {
          const auto* minima = reinterpret_cast<const float*>(rows[i]) + shape.padded() + g;
          acc[i] = fma_one(minima[k], work.x.sums[g + k], acc[i]);
        }
      }
  }
  for (int i = 0; i < N; i++) work.out[first + i] = acc[i];
}

template <int kBits, bool kShifted>
HR_INLINE void multiply_rows(const RowWork& work) {
  const auto fetch = [&](int begin) HR_INLINE_LAMBDA {
    for (int i = begin; i < begin + 4 && i < work.count; i++)
      for (size_t line = 0; line < work.shape.bytes(); line += 64) prefetch_l2(work.rows[i] + line);
  };
  for (int i = 0; i < kRowsAhead; i += 4) fetch(i);
  int first = 0;
  for (; first + 4 <= work.count; first += 4) {
    fetch(first + kRowsAhead);
    multiply_some_rows<kBits, kShifted, 4>(work, first);
  }
  const int left = work.count - first;
  if (left == 3) multiply_some_rows<kBits, kShifted, 3>(work, first);
  if (left == 2) multiply_some_rows<kBits, kShifted, 2>(work, first);
  if (left == 1) multiply_some_rows<kBits, kShifted, 1>(work, first);
}

template <Format F>
void multiply_rows_of(const RowWork& work) {
  constexpr int bits = unit_of(F).bits;
  if (work.shape.shifted)
    multiply_rows<bits, true>(work);
  else
    multiply_rows<bits, false>(work);
}

template <int F = 0>
void fill_copies(CopyKernels& k) {
  constexpr auto format = static_cast<Format>(F);
  if constexpr (has_copies(format)) {
    k.columns[F] = multiply_columns<format>;
    k.rows[F] = multiply_rows_of<format>;
    k.scales[F] = copied_scales<format>;
  }
  if constexpr (F + 1 < kNumFormats) fill_copies<F + 1>(k);
}
