// Which kernel multiplies which packed format, and what it reads. Included inside the
// namespace of an instruction set.

template <Format F, int Rows, Mode M>
constexpr Kernels::Matmul matmul_for() {
  constexpr bool offset = M == Mode::kInt8Offset;
  if constexpr (F == Format::kGrid && M == Mode::kFloat)
    return matmul_grid_wide<Rows>;
  else if constexpr (F == Format::kGrid)
    return matmul_grid<Rows, offset>;
  else if constexpr (is_grouped(F) && (M == Mode::kFloat || is_float8(F)))
    return matmul_wide<F, Rows>;
  else if constexpr (is_grouped(F) && is_table(F))
    return matmul_table<F, Rows, offset>;
  else if constexpr (is_grouped(F))
    return matmul_grouped<F, Rows, offset>;
  else if constexpr (F == Format::kI8Row || F == Format::kSparseI8)
    return matmul_i8_row<F, Rows>;
  else if constexpr (F == Format::kI8Mixed)
    return matmul_i8_mixed<Rows>;
  else if constexpr (F == Format::kBf16 || F == Format::kSparseBf16)
    return matmul_pairs<F, Rows>;
  else
    return matmul_float<F, Rows>;
}

constexpr Form form_for(Format f, Mode mode) {
  if (is_grouped(f) && (mode == Mode::kFloat || is_float8(f))) return Form::kF32;
  if (is_grouped(f)) return mode == Mode::kInt8Offset ? Form::kQ8Offset : Form::kQ8;
  if (is_i8(f) || f == Format::kSparseI8)
    return f == Format::kI8Mixed ? Form::kQ8Mixed : Form::kQ8Row;
  const bool is_bf16 = f == Format::kBf16 || f == Format::kSparseBf16;
  return is_bf16 && kHasBf16 ? Form::kBf16 : Form::kF32;
}

template <Format F, Mode M, int Rows = 1>
void fill_matmul(Kernels& k) {
  k.matmul[static_cast<int>(M)][static_cast<int>(F)][Rows - 1] = matmul_for<F, Rows, M>();
  if constexpr (Rows < kMaxRows) fill_matmul<F, M, Rows + 1>(k);
}

template <Mode M, int F = 0>
void fill_mode(Kernels& k) {
  k.form[static_cast<int>(M)][F] = form_for(static_cast<Format>(F), M);
  fill_matmul<static_cast<Format>(F), M>(k);
  if constexpr (F + 1 < kNumFormats) fill_mode<M, F + 1>(k);
}

inline void fill_integer_matmuls(Kernels& k) {
  fill_mode<Mode::kInt8>(k);
  fill_mode<Mode::kInt8Offset>(k);
}

inline void fill_float_matmuls(Kernels& k) { fill_mode<Mode::kFloat>(k); }
