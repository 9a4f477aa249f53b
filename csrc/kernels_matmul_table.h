// Tile times activation block, for formats whose scales are those of groups of any
// size. Included inside the namespace of an instruction set, behind kernels_matmul.h.

HR_INLINE Vf load_numbers(const uint8_t* numbers, Number type, int i) {
  const uint8_t* p = numbers + i * kTileRows * number_bytes(type);
  if (type == Number::kF16) return load_half(reinterpret_cast<const uint16_t*>(p));
  if (type == Number::kBf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  return type == Number::kU8 ? to_float(load_u8(p)) : load(reinterpret_cast<const float*>(p));
}

// Scale i of a tile, and the minimum beside it: that of a zero point is scale times
// zero point, below 0, which is exact for 16-bit scales.
HR_INLINE GroupScale<Scales::kTable> table_scale(const uint8_t* tile, const TileShape& shape,
                                                 int i) {
  GroupScale<Scales::kTable> s;
  s.scale = load_numbers(tile, shape.scales, i);
  s.shifted = shape.zeros != Number::kNone;
  if (!s.shifted) return s;
  s.min = load_numbers(tile + shape.zeros_offset(), shape.zeros, i);
  if (shape.zeros == Number::kU8) s.min = mul(sub(zero(), s.min), s.scale);
  return s;
}

// The codes of a group whose lines these are.
template <Unit U>
HR_INLINE auto table_codes(const uint8_t* lines, const TileShape& shape) {
  if constexpr (U.sparse)
    return SpreadLines(SparseCodes<U>{lines});
  else
    return GroupCodes<U>{lines, 0, shape.lookup.codes};
}

template <Format F, int Rows, bool Offset>
void matmul_table(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out,
                  const Aside&) {
  constexpr Unit U = unit_of(F);
  constexpr int bytes = unit_bytes(F);
  Vf acc[Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[m] = zero();
  const uint8_t* codes = tile + shape.codes_offset();
  const int groups = shape.scale_columns / kGroup;
  for (int i = 0, g = 0; g < shape.units; i++) {
    auto s = table_scale(tile, shape, i);
    if constexpr (U.is_lookup()) s.scale = mul(s.scale, set1(shape.lookup.unit));
    const int end = g + groups < shape.units ? g + groups : shape.units;
    for (; g < end; g++, codes += bytes, block += q8_group_bytes(Offset) * Rows) {
      // Also for a single row, which takes 2.3 times as long without.
      for (int line = 0; line < bytes; line += 64) prefetch_l2(codes + kFetchAhead + line);
      add_whole_group<U, Rows, Offset>(acc, table_codes<U>(codes, shape), s, block);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) store(out + 16 * m, acc[m]);
}
