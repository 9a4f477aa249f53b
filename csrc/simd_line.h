// For instruction sets that do not round to bf16. Included by their vector headers.

// 16 pairs of bf16, rounded to nearest even: lane i has even[i], then odd[i].
HR_INLINE void store_line(uint8_t* line, Vf even, Vf odd) {
  const auto rounded = [](Vf x) {
    const Vi u = bits(x);
    return shift_right<16>(add(add(u, set1(0x7fff)), shift_right<31>(shift_left<15>(u))));
  };
  store(reinterpret_cast<uint32_t*>(line), add(rounded(even), shift_left<16>(rounded(odd))));
}
