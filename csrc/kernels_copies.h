// Kernels over copies by columns and by rows (copy_shape.h). Included inside the namespace of an
// instruction set, after kernels_matmul_table.h.

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

// Groups after this one whose runs are fetched: no prefetcher of the hardware foresees them.
constexpr int kGroupsAhead = 12;

// Some tiles of N rows, over the columns that are not 0 in all rows: those of a chunk, or of codes
// of 4 bits those in the nibbles of `part`. The order of the float sum of an output is that of
// `add_group`.
template <Format F, int N, int Tiles>
HR_INLINE void multiply_chunk(const ColumnWork& work, const PanelShape<F>& shape, int chunk,
                              int part, int m) {
  constexpr Unit U = unit_of(F);
  const bool shifted = has_min(U.scales) || (is_table(F) && work.shape.zeros != Number::kNone);
  const int tile = chunk * chunk_tiles(U.bits) + 4 * part;
  const bool fetches = part == 0 && m == 0;
  Vf acc[Tiles][N];
#pragma GCC unroll 8
  for (int j = 0; j < Tiles; j++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) acc[j][i] = zero();
  for (int g = 0; g < work.groups; g++) {
    if (const int later = g + kGroupsAhead; fetches && later < work.groups) {
      const uint8_t* codes = work.panel + shape.codes(later, work.panel_tiles) + 64 * chunk;
      // The first chunk brings the whole runs, which the others then have in a cache.
      const size_t lines = chunk ? 64 : shape.run;
      for (int q = 4 * work.x.first[later]; q < 4 * work.x.first[later + 1]; q++)
        for (size_t line = 0; line < lines; line += 64)
          prefetch(codes + work.x.columns[q] * shape.run + line);
      if (!is_table(F) && later % U.groups() == 0)
        for (size_t line = 0; line < chunk_tiles(U.bits) * shape.header; line += 64)
          prefetch(work.panel + shape.tile_header(later / U.groups(), tile) + line);
    }
    const int first = work.x.first[g], quads = work.x.first[g + 1] - first;
    if (!quads) continue;
    const uint8_t* codes = work.panel + shape.codes(g, work.panel_tiles) + 64 * chunk;
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
          const Vb half = part ? fields(w[j], 4, 15) : fields(w[j], 0, 15);
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
    for (int i = 0; i < N; i++)
      store(work.out + (static_cast<size_t>(tile + j) * work.rows + m + i) * kTileRows, acc[j][i]);
}

template <Format F>
void multiply_columns(const ColumnWork& work) {
  constexpr int chunk = chunk_tiles(unit_of(F).bits);
  const PanelShape<F> shape(work.panel_tiles, work.shape);
  for (int c = 0; c < work.tiles / chunk; c++) {
    if (work.rows == 1) {
      multiply_chunk<F, 1, chunk>(work, shape, c, 0, 0);
      continue;
    }
    for (int m = 0; m < work.rows;) {
      const int left = work.rows - m, n = left == 4 || left == 2 ? 2 : left < 3 ? left : 3;
      for (int part = 0; part < chunk / 4; part++)
        if (n == 3)
          multiply_chunk<F, 3, 4>(work, shape, c, part, m);
        else if (n == 2)
          multiply_chunk<F, 2, 4>(work, shape, c, part, m);
        else
          multiply_chunk<F, 1, 4>(work, shape, c, part, m);
      m += n;
    }
  }
}

template <int kBytes>
HR_INLINE const uint8_t* gather_numbers(const uint8_t* const rows[kTileRows], size_t at, int count,
                                        uint8_t* to) {
  for (int r = 0; r < kTileRows; r++)
    for (int i = 0; i < count; i++)
      memcpy(to + (kTileRows * i + r) * kBytes, rows[r] + at + i * kBytes, kBytes);
  return nullptr;
}

template <Format F>
void gather_rows(const uint8_t* const rows[kTileRows], const TileShape& shape, uint8_t* tile) {
  constexpr Unit U = unit_of(F);
  size_t at = 0;
  int lines_of_unit = U.groups() * U.lines_per_group();
  if constexpr (is_table(F)) {
    const auto part = [&](Number type, size_t to) {
      if (type == Number::kF32)
        gather_numbers<4>(rows, at, shape.num_scales, tile + to);
      else if (type == Number::kU8)
        gather_numbers<1>(rows, at, shape.num_scales, tile + to);
      else if (type != Number::kNone)
        gather_numbers<2>(rows, at, shape.num_scales, tile + to);
      at += shape.num_scales * number_bytes(type);
    };
    part(shape.scales, 0);
    part(shape.zeros, shape.zeros_offset());
    lines_of_unit *= shape.units;
    tile += shape.codes_offset();
  } else {
    // Lines of two arrays of f16: of all units first, two numbers of a row side by side.
    constexpr int pairs = is_super(U.scales) ? 1 : U.codes_offset() / 64,
                  bytes = is_super(U.scales) ? (U.codes_offset() - 64) / 16 : 0;
    const auto place_pair = [&](int i) HR_INLINE_LAMBDA {
      return tile + i / pairs * U.bytes() + i % pairs * 64;
    };
    int pair = 0;
    for (; pair + 16 <= pairs * shape.units; pair += 16)
      transpose_lines<true>(rows, at + 4 * pair, pair, place_pair);
    for (; pair < pairs * shape.units; pair++)
      for (int r = 0; r < kTileRows; r++) {
        memcpy(place_pair(pair) + 2 * r, rows[r] + at + 4 * pair, 2);
        memcpy(place_pair(pair) + 32 + 2 * r, rows[r] + at + 4 * pair + 2, 2);
      }
    at += 4 * pairs * shape.units;
    for (int u = 0; u < shape.units && bytes; u++, at += bytes)
      gather_numbers<1>(rows, at, bytes, tile + u * U.bytes() + 64);
  }
  at = (at + 3) / 4 * 4;
  const int lines = U.groups() * U.lines_per_group() * shape.units;
  int line = 0;
  const auto place = [&](int i) HR_INLINE_LAMBDA {
    if constexpr (is_table(F)) return tile + 64 * i;
    return tile + i / (U.groups() * U.lines_per_group()) * U.bytes() + U.codes_offset() +
           i % (U.groups() * U.lines_per_group()) * 64;
  };
  for (; line + 16 <= lines; line += 16) transpose_lines<false>(rows, at + 4 * line, line, place);
  for (; line < lines; line++)
    for (int r = 0; r < kTileRows; r++) memcpy(place(line) + 4 * r, rows[r] + at + 4 * line, 4);
}

template <int F = 0>
void fill_copies(CopyKernels& k) {
  constexpr auto format = static_cast<Format>(F);
  if constexpr (has_copies(format)) {
    k.columns[F] = multiply_columns<format>;
    k.gather[F] = gather_rows<format>;
  }
  if constexpr (F + 1 < kNumFormats) fill_copies<F + 1>(k);
}
