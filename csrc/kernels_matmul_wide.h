// Quantised tile times float32 activations: a group is decoded to float32, and the rows
// of the block stream against it. For activations that are to be exact, and for codes
// that no integer product takes. Included inside the namespace of an instruction set,
// behind kernels_matmul_table.h.

// A small float at the top of each lane, over 2^120 (e4m3) or 2^112 (e5m2): its fields
// move to where float32 has them, whose exponent has more bits, so that the bias of the
// two differs. None is infinite or NaN.
template <Format F>
HR_INLINE Vf small_float(Vi top) {
  constexpr bool e4 = F == Format::kFloat8E4;
  return from_bits(and_bits(shift_right_signed<e4 ? 4 : 3>(top),
                            set1(static_cast<int32_t>(e4 ? 0x87F00000 : 0x8FE00000))));
}
template <Format F>
constexpr float kSmallFloatUnit = F == Format::kFloat8E4 ? 0x1p120f : 0x1p112f;

using Columns = float[kGroup][kTileRows];

// What becomes of the columns of a group: they are kept for the rows of a block, or
// added to the sum of a single row at once, in the order in which a row of a block has
// them.
struct Kept {
  Columns& columns;
  HR_INLINE void take(int k, Vf column) { store(columns[k], column); }
};
struct Summed {
  const float* x;
  Vf sum;
  HR_INLINE void take(int k, Vf column) { sum = fma(column, set1(x[k]), sum); }
};

// Four columns of a line, as `value` makes them of a byte of each lane.
template <class Out, class Value>
HR_INLINE void decode_line(Vb line, int first, Out& out, const Value& value) {
  out.take(first, value(byte_of<0>(line)));
  out.take(first + 1, value(byte_of<1>(line)));
  out.take(first + 2, value(byte_of<2>(line)));
  out.take(first + 3, value(byte_of<3>(line)));
}

// Group g of a unit of a format with scales of its own: scale * (code - zero) +
// minimum.
template <Unit U, class Out>
HR_INLINE void decode_group(const uint8_t* unit, const TileShape& shape, int g, Out& out) {
  const auto w = group_codes<U>(unit, shape, g);
  auto s = group_scale<U>(unit, g);
  const Vf low = s.scale, low_min = s.min;
  for (int j = 0; j < 8; j++) {
    Vf scale = low, min = low_min;
    if constexpr (is_sub16(U.scales)) {
      scale = mul(low, to_float(j < 4 ? low_shorts(s.integers) : high_shorts(s.integers)));
      if constexpr (has_min(U.scales))
        min = mul(mul(low_min, set1(-4.0f)),
                  to_float(j < 4 ? low_shorts(s.minima) : high_shorts(s.minima)));
    }
    decode_line(w[j], 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA {
      const Vf code = to_float(sub(byte, set1(U.zero())));
      return has_min(U.scales) ? fma(code, scale, min) : mul(code, scale);
    });
  }
}

// Group g of a tile whose scales lie in a table.
template <Format F, class Out>
HR_INLINE void decode_table(const uint8_t* tile, const TileShape& shape, int g, Out& out) {
  // What is looked up is a float here.
  constexpr Unit U = unit_of(F), stored = {U.bits, U.scales, 0, U.sparse};
  const auto w = table_codes<stored>(
      tile + shape.codes_offset() + static_cast<size_t>(g) * unit_bytes(F), shape);
  for (int half = 0; half < 2; half++) {
    const int group =
        (g * kGroup + 16 * half) /
        shape.scale_columns;  // columns beyond the last have no scale, and zeros to go with
    const auto s =
        table_scale(tile, shape, group < shape.num_scales ? group : shape.num_scales - 1);
    for (int j = 4 * half; j < 4 * half + 4; j++) {
      const Vb line = w[j];
      if constexpr (is_float8(F)) {
        const Vf scale = mul(s.scale, set1(kSmallFloatUnit<F>));
        out.take(4 * j, mul(small_float<F>(top_byte<0>(line)), scale));
        out.take(4 * j + 1, mul(small_float<F>(top_byte<1>(line)), scale));
        out.take(4 * j + 2, mul(small_float<F>(top_byte<2>(line)), scale));
        out.take(4 * j + 3, mul(small_float<F>(top_byte<3>(line)), scale));
      } else if constexpr (U.is_lookup()) {
        decode_line(line, 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA {
          return mul(look_up_floats(byte, shape.lookup.values), s.scale);
        });
      } else {
        const Vi zero_code = set1(s.shifted ? 0 : U.zero());
        decode_line(line, 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA {
          const Vf code = to_float(sub(byte, zero_code));
          return s.shifted ? fma(code, s.scale, s.min) : mul(code, s.scale);
        });
      }
    }
  }
}

// Group g of a tile; of points of a grid, of a decoded super-block.
template <Format F, class Out>
HR_INLINE void decode(const uint8_t* tile, const TileShape& shape, int g, Out& out) {
  constexpr Unit U = unit_of(F);
  if constexpr (is_table(F))
    decode_table<F>(tile, shape, g, out);
  else
    decode_group<U>(tile + static_cast<size_t>(g / U.groups()) * U.bytes(), shape, g % U.groups(),
                    out);
}

// Functions of their own, so that there is one for each format and one for each number
// of rows, and not one for each pair.
template <Format F>
__attribute__((noinline)) void decode_columns(const uint8_t* tile, const TileShape& shape, int g,
                                              Columns& columns) {
  Kept out{columns};
  decode<F>(tile, shape, g, out);
}

template <int Rows>
__attribute__((noinline)) void add_columns(const Columns& w, const float* x, float* sums) {
  Vf acc[Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[m] = load(sums + 16 * m);
  for (int k = 0; k < kGroup; k += 2, x += 2 * Rows) {
    const Vf even = load(w[k]), odd = load(w[k + 1]);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++)
      acc[m] = fma(odd, set1(x[2 * m + 1]), fma(even, set1(x[2 * m]), acc[m]));
  }
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) store(sums + 16 * m, acc[m]);
}

template <Format F, int Rows>
void matmul_wide(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                 const Aside&) {
  const auto* x = reinterpret_cast<const float*>(block);
  const int groups = shape.units * unit_of(F).groups();
  if constexpr (Rows == 1) {
    Summed row{x, zero()};
    for (int g = 0; g < groups; g++, row.x += kGroup) decode<F>(tile, shape, g, row);
    store(out, row.sum);
  } else {
    alignas(64) Columns w;
    for (int i = 0; i < 16 * Rows; i += 16) store(out + i, zero());
    for (int g = 0; g < groups; g++, x += kGroup * Rows) {
      decode_columns<F>(tile, shape, g, w);
      add_columns<Rows>(w, x, out);
    }
  }
}

template <int Rows>
void matmul_grid_wide(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                      const Aside&) {
  constexpr Unit U = unit_of(Format::kGrid);
  alignas(64) uint8_t unit[U.bytes()];
  alignas(64) Columns w;
  const auto* x = reinterpret_cast<const float*>(block);
  for (int i = 0; i < 16 * Rows; i += 16) store(out + i, zero());
  for (int u = 0; u < shape.units; u++, tile += kTileRows * shape.grid->block_bytes) {
    decode_grid(tile, shape, unit);
    for (int g = 0; g < U.groups(); g++, x += kGroup * Rows) {
      decode_columns<Format::kGrid>(unit, shape, g, w);
      add_columns<Rows>(w, x, out);
    }
  }
}
