// Bounds of the products of a query and the keys of a block, from the highest and lowest number
// of each dimension (Quest, Tang et al. 2024). Included inside the namespace of an instruction set.
#pragma once

template <int Num>
HR_INLINE void bound_block(const float* queries, size_t stride, int lines, const uint16_t* bounds,
                           float* out, size_t out_stride) {
  Vf sums[Num] = {};
  for (int i = 0; i < lines; i++) {
    const Vf b = load_bf16(bounds + 16 * i);
    each<Num>([&](int n) HR_INLINE_LAMBDA {
      stay_in_registers(sums[n] = fma(b, load(queries + n * stride + 16 * i), sums[n]));
    });
  }
  for (int n = 0; n < Num; n++) out[n * out_stride] = reduce_add(sums[n]);
}

void bound_products(const float* queries, size_t stride, int num, int lines,
                    const uint16_t* const* bounds, int blocks, float* out) {
  constexpr int kBlocksAhead = 8;
  const size_t width = static_cast<size_t>(blocks);
  for (int b = 0; b < blocks; b++) {
    if (b + kBlocksAhead < blocks)
      for (int i = 0; i < lines; i += 2) prefetch_l2(bounds[b + kBlocksAhead] + 16 * i);
    int n = 0;
    for (; n + 4 <= num; n += 4)
      bound_block<4>(queries + n * stride, stride, lines, bounds[b], out + n * width + b, width);
    for (; n < num; n++)
      bound_block<1>(queries + n * stride, stride, lines, bounds[b], out + n * width + b, width);
  }
}

void add_highest_waves(const float* waves, const float* factors, int num_waves, int blocks,
                       float* out) {
  for (int b = 0; b < blocks; b++, waves += kKvTile) {
    Vf left = zero(), right = zero();
    for (int w = 0; w < num_waves; w++) {
      const Vf factor = set1(factors[w]);
      left = fma(load(waves + w * kSplitTokens), factor, left);
      right = fma(load(waves + w * kSplitTokens + 16), factor, right);
    }
    out[b] += reduce_max(max(left, right));
  }
}
