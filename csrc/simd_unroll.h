// What keeps arrays of vectors in registers. Included inside the namespace of an
// instruction set, before its vectors.

// f(0), .. f(N - 1), written out before the compiler decides what lies in memory; a
// loop is unrolled too late for that.
template <int N, class F>
HR_INLINE void each(const F& f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(N - 1);
  }
}

// The same address, of which the compiler does not know that it has read it: a further
// load is cheaper than a register.
template <class T>
HR_INLINE const T* reload(const T* p) {
  asm volatile("" : "+r"(p));
  return p;
}
