// Lines of 2:4 weights, spread to all columns in registers. Included inside the namespace of an
// instruction set.

// The codes of a group: line j has columns 4j .. 4j + 3, of which two have the code of 0.
template <Unit U>
struct SparseCodes {
  const uint8_t* lines;
  int first = 0;

  HR_INLINE Vb operator[](int j) const {
    const int line = first + j, quad = line / 2;
    const Vb stored = load_bytes(lines + 64 * (1 + quad % (U.bits / 2)));
    const Vb kept = U.bits == 8 ? stored : fields(stored, quad / (U.bits / 2) * U.bits, 15);
    return flip_bits(spread(kept, load_bytes(lines), line, kSpreadBytes[line % 2]), U.zero());
  }
  HR_INLINE SparseCodes operator+(int more) const { return {lines, first + more}; }
};

// Columns 4j + 2 half and the next of a group of bf16.
HR_INLINE Vb sparse_pairs(const uint8_t* lines, int j, int half) {
  return spread(load_bytes(lines + 64 * (1 + j)), load_bytes(lines), j, kSpreadShorts[half]);
}

// The lines of a group, spread once for all rows of a block: a compiler would spread them again
// for each pair of rows.
struct SpreadLines {
  Vb lines[8];
  int first = 0;

  template <Unit U>
  HR_INLINE explicit SpreadLines(const SparseCodes<U>& w) {
    each<8>([&](int j) HR_INLINE_LAMBDA { lines[j] = w[j]; });
  }
  HR_INLINE Vb operator[](int j) const { return lines[first + j]; }
  HR_INLINE SpreadLines operator+(int more) const {
    SpreadLines rest = *this;
    rest.first += more;
    return rest;
  }
};
