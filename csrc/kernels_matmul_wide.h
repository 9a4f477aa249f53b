// Quantised tile times float32 activations: a group is decoded to float32, and the rows of the block stream against it. For activations
// that are to be exact, and for codes that no integer product takes. Included inside the namespace of an instruction set, behind
// kernels_matmul_table.h.

// A small float in the low byte of each lane, over 2^120 (e4m3) or 2^112 (e5m2): its fields are where float32 has them, whose exponent has
// more bits, so that the bias of the two differs. None is infinite or NaN.
template <Format F>
HR_INLINE Vf small_float(Vi byte) {
  const Vi magnitude = shift_left<25>(byte), sign = shift_left<31>(shift_right<7>(byte));
  return from_bits(add(F == Format::kFloat8E4 ? shift_right<5>(magnitude) : shift_right<4>(magnitude), sign));
}
template <Format F>
constexpr float kSmallFloatUnit = F == Format::kFloat8E4 ? 0x1p120f : 0x1p112f;

using Columns = float[kGroup][kTileRows];

// Four columns of a line, as `value` makes them of a byte of each lane.
template <class Value>
HR_INLINE void decode_line(Vb line, int first, Columns& out, const Value& value) {
  store(out[first], value(byte_of<0>(line)));
  store(out[first + 1], value(byte_of<1>(line)));
  store(out[first + 2], value(byte_of<2>(line)));
  store(out[first + 3], value(byte_of<3>(line)));
}

// Group g of a unit of a format with scales of its own: scale * (code - zero) + minimum.
template <Unit U>
HR_INLINE void decode_group(const uint8_t* unit, int g, Columns& out) {
  const GroupCodes<U> w{unit + U.codes_offset() + g * U.lines_per_group() * 64};
  auto s = group_scale<U>(unit, g);
  const Vf low = s.scale, low_min = s.min;
  for (int j = 0; j < 8; j++) {
    Vf scale = low, min = low_min;
    if constexpr (is_sub16(U.scales)) {
      scale = mul(low, to_float(j < 4 ? low_shorts(s.integers) : high_shorts(s.integers)));
      if constexpr (has_min(U.scales)) min = mul(mul(low_min, set1(-4.0f)), to_float(j < 4 ? low_shorts(s.minima) : high_shorts(s.minima)));
    }
    decode_line(w[j], 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA {
      const Vf code = to_float(sub(byte, set1(U.zero())));
      return has_min(U.scales) ? fma(code, scale, min) : mul(code, scale);
    });
  }
}

// Group g of a tile whose scales lie in a table.
template <Format F>
HR_INLINE void decode_table(const uint8_t* tile, const TileShape& shape, int g, Columns& out) {
  constexpr Unit U = unit_of(F), stored = {U.low_bits, U.high_bits, U.scales};  // what is looked up is a float here
  const GroupCodes<stored> w{tile + shape.codes_offset() + static_cast<size_t>(g) * unit_bytes(F)};
  for (int j = 0; j < 8; j++) {
    const int group = (g * kGroup + 4 * j) / shape.scale_columns;  // columns beyond the last have no scale, and zeros to go with
    const auto s = table_scale(tile, shape, group < shape.num_scales ? group : shape.num_scales - 1);
    if constexpr (is_float8(F)) {
      const Vf scale = mul(s.scale, set1(kSmallFloatUnit<F>));
      decode_line(w[j], 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA { return mul(small_float<F>(byte), scale); });
    } else if constexpr (U.is_lookup) {
      decode_line(w[j], 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA { return mul(look_up_floats(byte, shape.lookup.values), s.scale); });
    } else {
      const Vi zero_code = set1(s.shifted ? 0 : U.zero());
      decode_line(w[j], 4 * j, out, [&](Vi byte) HR_INLINE_LAMBDA {
        const Vf code = to_float(sub(byte, zero_code));
        return s.shifted ? fma(code, s.scale, s.min) : mul(code, s.scale);
      });
    }
  }
}

// Functions of their own, so that there is one for each format and one for each number of rows, and not one for each pair.
template <Format F>
__attribute__((noinline)) void decode(const uint8_t* tile, const TileShape& shape, int g, Columns& out) {
  constexpr Unit U = unit_of(F);
  if constexpr (is_table(F))
    decode_table<F>(tile, shape, g, out);
  else
    decode_group<U>(tile + static_cast<size_t>(g / U.groups()) * U.bytes(), g % U.groups(), out);
}

template <int Rows>
__attribute__((noinline)) void add_columns(const Columns& w, const float* x, float* sums) {
  Vf acc[Rows];
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) acc[m] = load(sums + 16 * m);
  for (int k = 0; k < kGroup; k += 2, x += 2 * Rows) {
    const Vf even = load(w[k]), odd = load(w[k + 1]);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) acc[m] = fma(odd, set1(x[2 * m + 1]), fma(even, set1(x[2 * m]), acc[m]));
  }
#pragma GCC unroll 16
  for (int m = 0; m < Rows; m++) store(sums + 16 * m, acc[m]);
}

template <Format F, int Rows>
void matmul_wide(const uint8_t* tile, const TileShape& shape, const uint8_t* block, float* out) {
  const auto* x = reinterpret_cast<const float*>(block);
  alignas(64) Columns w;
  for (int i = 0; i < 16 * Rows; i += 16) store(out + i, zero());
  for (int g = 0; g < shape.units * unit_of(F).groups(); g++, x += kGroup * Rows) {
    decode<F>(tile, shape, g, w);
    add_columns<Rows>(w, x, out);
  }
}
