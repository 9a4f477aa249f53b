// Sampling kernels: passes over a row of logits. Included inside the namespace of an
// instruction set. Peaks let most of them skip most of the row.

constexpr float kInfinity = __builtin_inff();

// No word gives more noise: gumbel(0xFFFFFFFF) is 22.87.
constexpr float kMaxGumbel = 22.9f;

// No word gives less: gumbel(0) is -3.13.
constexpr double kMinGumbel = -3.2;

// More than all that rounding to float can take from, or add to, a score that is still
// in the race.
constexpr float kRounding = 1e-3f;

// Tokens 16 * tile to 16 * tile + 15, filled up with -inf.
HR_INLINE Vf load_tile(const float* logits, int size, int tile) {
  const int n = size - kTileRows * tile;
  const float* p = logits + kTileRows * tile;
  return n >= kTileRows ? load(p) : keep_lanes(load_partial(p, n), 0, n, -kInfinity);
}

// Bits of the tiles first .. first + 15 whose peaks reach the floor.
HR_INLINE uint32_t tiles_at(const LogitRow& row, int first, Vf floor) {
  const int n = row.num_peaks() - first;
  if (n >= 16) return ge_mask(load(row.peaks + first), floor);
  return ge_mask(load_partial(row.peaks + first, n), floor) & ((1u << n) - 1);
}

// Calls visit(tile, logits) for each tile whose peak reaches the floor, and then
// group() for each 16 tiles that had one.
template <class Visit, class Group>
HR_INLINE void each_tile(const LogitRow& row, float floor, Visit&& visit, Group&& group) {
  for (int first = 0; first < row.num_peaks(); first += 16) {
    uint32_t hits = tiles_at(row, first, set1(floor));
    if (!hits) continue;
    for (; hits; hits &= hits - 1) {
      const int tile = first + __builtin_ctz(hits);
      visit(tile, load_tile(row.logits, row.size, tile));
    }
    group();
  }
}

// Bits of the tokens of a tile that are kept.
HR_INLINE uint32_t kept(Vf x, int tile, Cut cut) {
  const Vf bound = set1(cut.logit);
  const uint32_t reaching = ge_mask(x, bound);
  const int n = cut.id + 1 - kTileRows * tile;  // tokens of the tile up to cut.id
  if (n >= kTileRows) return reaching;
  const uint32_t tied = reaching & ge_mask(bound, x);
  return reaching & ~(n > 0 ? tied >> n << n : tied);
}

bool peaks(const float* logits, int size, float* out) {
  uint32_t numbers = 0xffff;
  for (int tile = 0; kTileRows * tile < size; tile++) {
    const Vf x = load_tile(logits, size, tile);
    numbers &= ge_mask(x, x);
    out[tile] = reduce_max(x);
  }
  return numbers == 0xffff;
}

int top(const LogitRow& row) {
  Vf high = set1(-kInfinity);
  each_line(row.num_peaks(), [&](int i, int n) {
    high = max(high, keep_lanes(load_line(row.peaks + i, n), 0, n, -kInfinity));
  });
  const Vf highest = set1(reduce_max(high));
  for (int first = 0; first < row.num_peaks(); first += 16)
    if (const uint32_t hits = tiles_at(row, first, highest)) {
      const int tile = first + __builtin_ctz(hits);
      if (const uint32_t tokens = ge_mask(load_tile(row.logits, row.size, tile), highest))
        return kTileRows * tile + __builtin_ctz(tokens);
    }
  return 0;  // there is a NaN
}

int count(const LogitRow& row, Cut cut) {
  int n = 0;
  each_tile(
      row, cut.logit, [&](int tile, Vf x) { n += __builtin_popcount(kept(x, tile, cut)); }, [] {});
  return n;
}

int collect(const LogitRow& row, Cut from, Cut to, int* ids) {
  int n = 0;
  each_tile(
      row, to.logit,
      [&](int tile, Vf x) {
        for (uint32_t hits = kept(x, tile, to) & ~kept(x, tile, from); hits; hits &= hits - 1)
          ids[n++] = kTileRows * tile + __builtin_ctz(hits);
      },
      [] {});
  return n;
}

// e^x for x <= 0 within 2e-7 of its size; 0 below -88. Cephes' expf. Adding a number
// whose last bit counts ones rounds x / ln 2 to n and leaves n + 127, the exponent of
// 2^n, in the low bits.
constexpr float kRoundToExponent = 12582912.0f + 127.0f;
HR_INLINE Vf exp_negative(Vf x) {
  const Vf clamped = max(x, set1(-88.0f)),
           shifted = fma(clamped, set1(1.44269504f), set1(kRoundToExponent));
  const Vf n = sub(shifted, set1(kRoundToExponent));
  const Vf r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
  Vf p = set1(1.9875691500e-4f);
  constexpr float coefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                    1.6666665459e-1f, 5.0000001201e-1f};
  for (const float c : coefficients) p = fma(p, r, set1(c));
  p = fma(mul(p, r), r, add(r, set1(1.0f)));
  return mul(p, exponent_from_low_bits(shifted));
}

// A sum of weights, as good as one in double: what the float sum of a lane rounds away
// is summed beside it (Knuth's two-sum). Where a nucleus ends at equal logits, a share
// that is there or not decides: of two equal tokens and a little more, the first has no
// half.
struct Mass {
  double total = 0;
  Vf sums = zero(), lost = zero();

  HR_INLINE void operator+=(Vf w) {
    const Vf sum = add(sums, w), added = sub(sum, sums);
    lost = add(lost, add(sub(sums, sub(sum, added)), sub(w, added)));
    sums = sum;
  }

  HR_INLINE void flush() {
    float lanes[2][16];
    store(lanes[0], sums);
    store(lanes[1], lost);
    for (const float* of : lanes)
      for (int i = 0; i < 16; i++) total += static_cast<double>(of[i]);
    sums = lost = zero();
  }
};

double weigh(const LogitRow& row, Cut cut, float inverse_temperature, float* weights) {
  const Vf top = set1(row.top), factor = set1(inverse_temperature);
  Mass mass;
  each_tile(
      row, cut.logit,
      [&](int tile, Vf x) {
        const Vf w = keep_bits(exp_negative(mul(sub(x, top), factor)), kept(x, tile, cut));
        store(weights + kTileRows * tile, w);
        mass += w;
      },
      [&] { mass.flush(); });
  return mass.total;
}

Share share(const LogitRow& row, Cut cut, const float* weights) {
  int count = 0;
  Mass mass;
  each_tile(
      row, cut.logit,
      [&](int tile, Vf x) {
        const uint32_t inside = kept(x, tile, cut);
        count += __builtin_popcount(inside);
        mass += keep_bits(load(weights + kTileRows * tile), inside);
      },
      [&] { mass.flush(); });
  return {mass.total, count};
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of
// 8 counters at once. A lane carries a 32-bit word in its low half; its high half fills
// with rubbish, which nothing reads.
struct Philox {
  Vl keys[10][2];

  explicit Philox(uint64_t key) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (auto& round : keys) {
      round[0] = set1(uint64_t{k0});
      round[1] = set1(uint64_t{k1});
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }

  HR_INLINE void operator()(Vl c[4]) const {
    const Vl m0 = set1(uint64_t{0xD2511F53u}), m1 = set1(uint64_t{0xCD9E8D57u});
#pragma GCC unroll 10
    for (int i = 0; i < 10; i++) {
      const Vl p0 = mul_low(c[0], m0), p1 = mul_low(c[2], m1);
      c[0] = xor3(high_half(p1), c[1], keys[i][0]);
      c[1] = p1;
      c[2] = xor3(high_half(p0), c[3], keys[i][1]);
      c[3] = p0;
    }
  }
};

void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
  Vl c[4];
  for (int i = 0; i < 4; i++) c[i] = set1(uint64_t{counter[i]});
  Philox(key[0] | static_cast<uint64_t>(key[1]) << 32)(c);
  uint32_t words[16];
  store(words, even_lanes(join_low(c[0], c[1]), join_low(c[2], c[3])));
  memcpy(out, words, 16);
}

// A standard Gumbel variate from 32 random bits, by inversion.
HR_INLINE double gumbel(uint32_t word) {
  return -__builtin_log(-__builtin_log((word + 0.5) * 0x1p-32));
}

// At least gumbel(word), and close to it where that is large, without a logarithm. With
// u the uniform number, -log u >= 1 - u, so gumbel <= -log(1 - u) = 32 log 2 -
// log(~word + 0.5); and the bits of a float, read as an integer, bound its log2 from
// below by a straight line between powers of two.
HR_INLINE Vf gumbel_bound(Vi words) {
  const Vf half = add(to_float(shift_right<1>(sub(set1(-1), words))),
                      set1(0.25f));  // (~word + 0.5) / 2, or a little less
  const Vf log2 = fma(to_float(bits(half)), set1(0x1p-23f), set1(-127.0f));
  return fma(sub(set1(31.0f), log2), set1(0.6931472f), set1(kRounding));
}

// A draw from the softmax (Gumbel 1954; Maddison et al. 2014). Tokens that no noise, or
// not the noise that they have, could lift to the best so far are passed over; the
// result is exact. Words 0..3 of counter i are the noise of tokens 4 i to 4 i + 3.
struct Race {
  const LogitRow& row;
  const Cut cut;
  const double temperature;
  const NoiseStream stream;
  const Philox random;
  const Vf top, factor;
  double best = kMinGumbel;  // what the best token of the row has at least
  int best_id = row.size;

  Race(const LogitRow& row, Cut cut, double temperature, NoiseStream stream)
      : row(row),
        cut(cut),
        temperature(temperature),
        stream(stream),
        random(stream.seed),
        top(set1(row.top)),
        factor(set1(static_cast<float>(1 / temperature))) {}

  // Tiles 2 pair and 2 pair + 1.
  HR_INLINE void run(int pair) {
    constexpr uint64_t order[8] = {0, 4, 1, 5,
                                   2, 6, 3, 7};  // so that even lanes have the first four counters
    Vl c[4] = {add(set1(static_cast<uint64_t>(8 * pair)), load(order)),
               set1(uint64_t{stream.position}), set1(uint64_t{stream.seq_index}),
               set1(uint64_t{0})};
    random(c);
    const Vl low = join_low(c[0], c[1]), high = join_low(c[2], c[3]);
    run(2 * pair, even_lanes(low, high));
    if (2 * pair + 1 < row.num_peaks()) run(2 * pair + 1, odd_lanes(low, high));
  }

  HR_INLINE void run(int tile, Vi words) {
    const Vf x = load_tile(row.logits, row.size, tile);
    const Vf bound = fma(sub(x, top), factor, gumbel_bound(words));
    uint32_t hopeful =
        ge_mask(bound, set1(static_cast<float>(best) - kRounding)) & kept(x, tile, cut);
    if (!hopeful) return;
    uint32_t noise[16];
    store(noise, words);
    for (; hopeful; hopeful &= hopeful - 1) {
      const int i = __builtin_ctz(hopeful), id = kTileRows * tile + i;
      const double score =
          (static_cast<double>(row.logits[id]) - row.top) / temperature + gumbel(noise[i]);
      if (score > best || (score == best && id < best_id)) {
        best = score;
        best_id = id;
      }
    }
  }

  // A tile of a row with a token map.
  HR_INLINE void run_mapped(int tile) {
    const int first = kTileRows * tile, n = row.size - first < kTileRows ? row.size - first : 16;
    uint64_t counters[16] = {};
    for (int i = 0; i < n; i++) counters[i] = static_cast<uint64_t>(row.tokens[first + i]) >> 2;
    uint32_t words[16][4];
    for (int half = 0; half < 2; half++) {
      Vl c[4] = {load(counters + 8 * half), set1(uint64_t{stream.position}),
                 set1(uint64_t{stream.seq_index}), set1(uint64_t{0})};
      random(c);
      const Vl low = join_low(c[0], c[1]), high = join_low(c[2], c[3]);
      uint32_t even[16], odd[16];
      store(even, even_lanes(low, high));
      store(odd, odd_lanes(low, high));
      for (int lane = 0; lane < 8; lane++)
        memcpy(words[8 * half + lane], (lane % 2 ? odd : even) + lane / 2 * 4, 16);
    }
    float noise[16] = {};
    for (int i = 0; i < n; i++)
      memcpy(noise + i, words[i] + (static_cast<uint32_t>(row.tokens[first + i]) & 3), 4);
    run(tile, bits(load(noise)));
  }

  // Bits of the tiles first .. first + 15 that may have the winner.
  HR_INLINE uint32_t hopeful_tiles(int first) const {
    const int n = row.num_peaks() - first;
    const Vf peaks = n >= 16 ? load(row.peaks + first)
                             : keep_lanes(load_partial(row.peaks + first, n), 0, n, -kInfinity);
    return ge_mask(mul(sub(peaks, top), factor),
                   set1(static_cast<float>(best) - kMaxGumbel - kRounding)) &
           ge_mask(peaks, set1(cut.logit));
  }
};

int noisiest(const LogitRow& row, Cut cut, double temperature, NoiseStream stream) {
  Race race(row, cut, temperature, stream);
  if (row.tokens)
    race.run_mapped(row.top_id / kTileRows);
  else
    race.run(row.top_id / 32);
  for (int first = 0; first < row.num_peaks(); first += 16) {
    const uint32_t hits = race.hopeful_tiles(first);
    if (row.tokens) {
      for (uint32_t tiles = hits; tiles; tiles &= tiles - 1)
        race.run_mapped(first + __builtin_ctz(tiles));
      continue;
    }
    for (uint32_t pairs = (hits | hits >> 1) & 0x5555; pairs; pairs &= pairs - 1)
      race.run((first + __builtin_ctz(pairs)) / 2);
  }
  return race.best_id;
}
