// The two halves of a low-rank adapter, for one row. Included inside the namespace of
// an instruction set. Each sum has one order, whatever rows lie beside this one.

// out[16] = scale times the sum of x[k] times down[k][16] over n columns, an even
// number. Of x two columns lie side by side, `stride` floats apart.
void adapter_down(const float* x, size_t stride, int n, const uint16_t* down, float scale,
                  float* out) {
  Vf sums[4] = {zero(), zero(), zero(), zero()};
  int k = 0;
  for (; k + 4 <= n; k += 4, x += 2 * stride, down += 64) {
    sums[0] = fma(set1(x[0]), load_bf16(down), sums[0]);
    sums[1] = fma(set1(x[1]), load_bf16(down + 16), sums[1]);
    sums[2] = fma(set1(x[stride]), load_bf16(down + 32), sums[2]);
    sums[3] = fma(set1(x[stride + 1]), load_bf16(down + 48), sums[3]);
  }
  if (k < n) {
    sums[0] = fma(set1(x[0]), load_bf16(down), sums[0]);
    sums[1] = fma(set1(x[1]), load_bf16(down + 16), sums[1]);
  }
  store(out, mul(set1(scale), add(add(sums[0], sums[1]), add(sums[2], sums[3]))));
}

// out[16] += the sum of products[r] times up[r][16].
void adapter_up(const float* products, int rank, const uint16_t* up, float* out) {
  Vf even = zero(), odd = zero();
  int r = 0;
  for (; r + 2 <= rank; r += 2, up += 32) {
    even = fma(set1(products[r]), load_bf16(up), even);
    odd = fma(set1(products[r + 1]), load_bf16(up + 16), odd);
  }
  if (r < rank) even = fma(set1(products[r]), load_bf16(up), even);
  store(out, add(load(out), add(even, odd)));
}
