// Matrices times tokens.
//
// A few tokens go straight against the packed codes, decoded in registers. For more, a chunk of rows is decoded once
// into scratch that stays in the second-level cache, and tiles of rows × tokens run over it.

constexpr int64_t COLUMNS_AT_ONCE = 4096;  // so that the tokens of a tile stay in the first-level cache
constexpr int64_t TOKENS_AT_ONCE = 160;    // so that the sums of a chunk of rows stay small
constexpr int tile_rows(Format format) { return grouped(format) ? 4 : 5; }

// sums[t][r] += Σ codes·q over `columns`; codes(j, w) gives R vectors of columns j … j + 63.
template <Format F, int R, int T, int U, class Codes>
inline ALWAYS void integer_sums(const Codes& codes, const int8_t* q, int64_t stride, int64_t columns, int32_t* sums,
                                int64_t ld) {
  Ints sum[U * T * R];
  unroll<U * T * R>([&](auto i) ALWAYS { sum[i] = zero_ints(); });
  const auto step = [&](int64_t j, auto u) ALWAYS {
    Bytes w[R];
    codes(j, w);
    unroll<T>([&](auto t) ALWAYS {
      const Bytes a = load(q + t * stride + j);
      unroll<R>([&](auto r) ALWAYS { dot<F>(sum[(u * T + t) * R + r], w[r], a); });
    });
  };
  int64_t j = 0;
  for (; j + U * LINE <= columns; j += U * LINE) unroll<U>([&](auto u) ALWAYS { step(j + u * LINE, u); });
  if constexpr (U > 1) {
    for (; j < columns; j += LINE) step(j, Index<0>{});
    unroll<(U - 1) * T * R>([&](auto i) ALWAYS { sum[i % (T * R)] = add(sum[i % (T * R)], sum[T * R + i]); });
  }
  if constexpr (R >= 4)
    unroll<T>([&](auto t) ALWAYS {
      constexpr int i = t * R;
      add_totals(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], sums + t * ld);
    });
  constexpr int left = R % 4;  // fifth rows, and single ones: four tokens at a time
  unroll<left * T / 4>([&](auto i) ALWAYS {
    const auto at = [&](int u) ALWAYS -> Ints& { return sum[(4 * i + u) * R + R - 1]; };
    alignas(16) int32_t four[4] = {};
    add_totals(at(0), at(1), at(2), at(3), four);
    for (int u = 0; u < 4; u++) sums[(4 * i + u) * ld + R - 1] += four[u];
  });
  unroll<left * T % 4>([&](auto u) ALWAYS {
    constexpr int t = T / 4 * 4 + u;
    sums[t * ld + R - 1] += total(sum[t * R + R - 1]);
  });
}

// y[t][r] = Σ_g (scale · Σ codes·q − offset · Σ q) in the order that __init__.py lays down; scales(g) gives R scales,
// then R offsets. A fold of the codes is a power of two: taking it out at the end changes no bit.
template <Format F, int R, int T, bool FOLDED, class Codes, class Scales>
inline ALWAYS void group_sums(const Codes& codes, const Scales& scales, const int8_t* q, int64_t stride, int64_t S,
                              const int32_t* groupsum, float* y) {
  const int64_t G = ceil_div(S, GROUP);
  Floats lanes[T * R];
  Eight correction[T];
  const float zeros[8] = {};
  unroll<T>([&](auto t) ALWAYS { correction[t] = load_eight(zeros); });
  unroll<T * R>([&](auto i) ALWAYS { lanes[i] = broadcast(0); });
  const auto group = [&](int64_t g, auto lines) ALWAYS {
    Ints sum[T * R];
    unroll<T * R>([&](auto i) ALWAYS { sum[i] = zero_ints(); });
    unroll<lines>([&](auto i) ALWAYS {
      const int64_t j = g * GROUP + i * LINE;
      Bytes w[R];
      codes(j, w);
      unroll<T>([&](auto t) ALWAYS {
        const Bytes a = load(q + t * stride + j);
        unroll<R>([&](auto r) ALWAYS { dot<F>(sum[t * R + r], w[r], a); });
      });
    });
    const Eight s = scales(g);
    unroll<R>([&](auto r) ALWAYS {
      const Floats scale = spread(s, r);
      unroll<T>([&](auto t) ALWAYS { lanes[t * R + r] = fma(scale, to_floats(sum[t * R + r]), lanes[t * R + r]); });
    });
    unroll<T>([&](auto t) ALWAYS { correction[t] = fma(s, float(groupsum[t * G + g]), correction[t]); });
  };
  for (int64_t g = 0; g < S / GROUP; g++) group(g, Index<2>{});
  if (S % GROUP > 0) group(S / GROUP, Index<1>{});
  unroll<T>([&](auto t) ALWAYS {
    float of_row[8];
    store(of_row, correction[t]);
    unroll<R>([&](auto r) ALWAYS {
      constexpr float unfold = FOLDED ? 1.0f / Decoder<F>::fold(r) : 1.0f;
      y[t * R + r] = tree(lanes[t * R + r]) * unfold - of_row[R + r];
    });
  });
}

// Straight from the codes

template <Format F>
struct Packed {  // the codes of one block, from memory
  const uint8_t* block;
  const Decoder<F>& decode;
  inline ALWAYS void operator()(int64_t j, Bytes* w) const {
    __builtin_prefetch(block + j + PREFETCH);
    decode(load(block + j), w);
  }
};

// One token against blocks [first, first + STREAMS · count): as many streams of memory at once, because one alone does
// not keep it busy. Block i of stream s is first + s · count + i.
template <Format F>
void streamed_sums(const Matrix& m, const int8_t* q, int64_t first, int64_t count, int32_t* sums) {
  constexpr int R = ROWS[F], ALL = STREAMS * R;
  const Decoder<F> decode;
  for (int64_t i = 0; i < count; i++) {
    const uint8_t* block = m.codes + (first + i) * m.S;
    Ints sum[ALL];
    unroll<ALL>([&](auto n) ALWAYS { sum[n] = zero_ints(); });
    for (int64_t j = 0; j < m.S; j += LINE) {
      const Bytes a = load(q + j);
      unroll<STREAMS>([&](auto s) ALWAYS {
        Bytes w[R];
        __builtin_prefetch(block + s * count * m.S + j + PREFETCH / STREAMS);
        decode(load(block + s * count * m.S + j), w);
        unroll<R>([&](auto r) ALWAYS { dot<F>(sum[s * R + r], w[r], a); });
      });
    }
    alignas(16) int32_t all[ALL] = {};
    unroll<ALL / 4>([&](auto n) ALWAYS { add_totals(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3], all + 4 * n); });
    unroll<ALL % 4>([&](auto n) ALWAYS { all[ALL / 4 * 4 + n] = total(sum[ALL / 4 * 4 + n]); });
    unroll<ALL>([&](auto n) ALWAYS { sums[(n / R * count + i) * R + n % R] = all[n] / Decoder<F>::fold(n % R); });
  }
}

template <Format F, int T>
void few_sums(const Matrix& m, const int8_t* q, int64_t stride, int64_t first, int64_t last, int32_t* sums, int64_t ld) {
  constexpr int R = ROWS[F], U = R * T >= 10 ? 1 : R * T >= 5 ? 2 : 4;
  const Decoder<F> decode;
  int64_t b = first;
  if constexpr (T == 1 && STREAMS > 1) {
    const int64_t count = (last - first) / STREAMS;
    streamed_sums<F>(m, q, first, count, sums);
    b += STREAMS * count;
  }
  for (; b < last; b++) {
    int32_t* of_block = sums + (b - first) * R;
    integer_sums<F, R, T, U>(Packed<F>{m.codes + b * m.S, decode}, q, stride, m.S, of_block, ld);
    for (int t = 0; t < T; t++)
      unroll<R>([&](auto r) ALWAYS { of_block[t * ld + r] /= Decoder<F>::fold(r); });
  }
}

template <Format F, int T>
void few_groups(const Matrix& m, const Tokens& tokens, int64_t t0, int64_t first, int64_t last, float* y, int64_t ld) {
  constexpr int R = ROWS[F];
  const Decoder<F> decode;
  const int64_t G = m.G();
  for (int64_t b = first; b < last; b++) {
    const uint16_t* of_block = static_cast<const uint16_t*>(m.scales) + b * G * 2 * R;
    const auto scales = [&](int64_t g) ALWAYS {
      __builtin_prefetch(of_block + g * 2 * R + PREFETCH / GROUP * 2 * R);
      return eight_halves(of_block + g * 2 * R, 2 * R);
    };
    float all[T * R];
    group_sums<F, R, T, true>(Packed<F>{m.codes + b * m.S, decode}, scales, tokens.q + t0 * tokens.stride, tokens.stride, m.S,
                        tokens.groupsum + t0 * G, all);
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R && b * R + r < m.N; r++) y[t * ld + b * R + r] = tokens.step[t0 + t] * all[t * R + r];
  }
}

// Over decoded codes

template <int R>
struct Dense {  // R rows side by side, 64 columns of each in turn
  const uint8_t* tile;
  inline ALWAYS void operator()(int64_t j, Bytes* w) const {
    unroll<R>([&](auto r) ALWAYS { w[r] = load(tile + R * j + r * LINE); });
  }
};

// Columns k0 … k1 of the rows in blocks [first, last), in tiles; rows that fill up the last tile are zero.
template <Format F>
void unpack(const Matrix& m, int64_t first, int64_t last, int64_t k0, int64_t k1, uint8_t* dense) {
  constexpr int R = ROWS[F], TR = tile_rows(F);
  const Decoder<F> decode;
  const int64_t rows = (last - first) * R, width = k1 - k0;
  const auto line = [&](int64_t row, int64_t k) {
    return dense + row / TR * TR * width + (k - k0) * TR + row % TR * LINE;
  };
  for (int64_t b = first; b < last; b++)
    for (int64_t k = k0; k < k1; k += LINE) {
      Bytes w[R];
      Packed<F>{m.codes + b * m.S, decode}(k, w);
      unroll<R>([&](auto r) ALWAYS { store(line((b - first) * R + r, k), unfolded<F>(w[r], r)); });
    }
  for (int64_t row = rows; row % TR != 0; row++)
    for (int64_t k = k0; k < k1; k += LINE) store(line(row, k), bytes_of(0));
}

template <Format F>
void many_sums(const Matrix& m, const int8_t* q, int64_t stride, int64_t T, int64_t first, int64_t last, int32_t* sums,
               int64_t ld) {
  constexpr int TR = tile_rows(F);
  const int64_t tiles = ceil_div((last - first) * ROWS[F], TR);
  const int64_t width = ceil_div(ceil_div(m.S, ceil_div(m.S, COLUMNS_AT_ONCE)), LINE) * LINE;
  uint8_t* dense = scratch<uint8_t>(DENSE, tiles * TR * width);
  for (int64_t k0 = 0; k0 < m.S; k0 += width) {
    const int64_t k1 = k0 + width < m.S ? k0 + width : m.S;
    unpack<F>(m, first, last, k0, k1, dense);
    const auto tile = [&](int64_t t, int64_t i, auto count) {
      integer_sums<F, TR, count, 1>(Dense<TR>{dense + i * TR * (k1 - k0)}, q + t * stride + k0, stride, k1 - k0,
                                    sums + t * ld + i * TR, ld);
    };
    int64_t t = 0;
    for (; t + TILE <= T; t += TILE)
      for (int64_t i = 0; i < tiles; i++) tile(t, i, Index<TILE>{});
    for (; t < T; t++)
      for (int64_t i = 0; i < tiles; i++) tile(t, i, Index<1>{});
  }
}

template <Format F>
void many_groups(const Matrix& m, const Tokens& tokens, int64_t t0, int64_t t1, int64_t first, int64_t last, float* y,
                 int64_t ld) {
  constexpr int R = ROWS[F], TR = 4;
  const int64_t rows = (last - first) * R, tiles = ceil_div(rows, TR), G = m.G();
  uint8_t* dense = scratch<uint8_t>(DENSE, tiles * TR * m.S);
  float* scales = scratch<float>(SCALES, tiles * G * 2 * TR);  // [tile][group][scale or offset][row]
  unpack<F>(m, first, last, 0, m.S, dense);
  __builtin_memset(scales, 0, size_t(tiles * G * 2 * TR) * sizeof(float));
  for (int64_t b = first; b < last; b++)
    for (int64_t g = 0; g < G; g++) {
      float s[8];
      store(s, eight_halves(static_cast<const uint16_t*>(m.scales) + (b * G + g) * 2 * R, 2 * R));
      const int64_t row = (b - first) * R;
      for (int i = 0; i < 2 * R; i++) scales[((row / TR * G + g) * 2 + i / R) * TR + row % TR + i % R] = s[i];
    }
  const auto tile = [&](int64_t t, int64_t i, auto count) {
    float all[count * TR];
    const auto of_group = [&](int64_t g) ALWAYS { return load_eight(scales + (i * G + g) * 2 * TR); };
    group_sums<F, TR, count, false>(Dense<TR>{dense + i * TR * m.S}, of_group, tokens.q + t * tokens.stride, tokens.stride, m.S,
                             tokens.groupsum + t * G, all);
    for (int u = 0; u < count; u++)
      for (int64_t r = 0, row = first * R + i * TR; r < TR && i * TR + r < rows && row + r < m.N; r++)
        y[(t + u) * ld + row + r] = tokens.step[t + u] * all[u * TR + r];
  };
  int64_t t = t0;
  for (; t + TILE_GROUPED <= t1; t += TILE_GROUPED)
    for (int64_t i = 0; i < tiles; i++) tile(t, i, Index<TILE_GROUPED>{});
  for (; t < t1; t++)
    for (int64_t i = 0; i < tiles; i++) tile(t, i, Index<1>{});
}

// Choosing

// f(Index<n>{}) for a number n from 1 to MOST.
template <int MOST, class F>
inline void dispatch(int64_t n, F&& f) {
  unroll<MOST>([&](auto i) ALWAYS {
    if (n == i + 1) f(Index<i + 1>{});
  });
}

template <Format F>
void multiply_as(const Matrix& m, const Tokens& tokens, int64_t first, int64_t last, float* y, int64_t ld) {
  const int64_t row = first * ROWS[F], end = last * ROWS[F] < m.N ? last * ROWS[F] : m.N;
  for (int64_t t0 = 0; t0 < tokens.T; t0 += TOKENS_AT_ONCE) {
    const int64_t t1 = t0 + TOKENS_AT_ONCE < tokens.T ? t0 + TOKENS_AT_ONCE : tokens.T;
    if constexpr (grouped(F)) {
      if (t1 - t0 > FEW_GROUPED) {
        many_groups<F>(m, tokens, t0, t1, first, last, y, ld);
      } else {
        dispatch<FEW_GROUPED>(t1 - t0, [&](auto T) { few_groups<F, T>(m, tokens, t0, first, last, y + t0 * ld, ld); });
      }
    } else {
      const int64_t width = ceil_div((last - first) * ROWS[F], tile_rows(F)) * tile_rows(F);  // whole tiles
      const int8_t* q = tokens.q + t0 * tokens.stride;
      int32_t* sums = scratch<int32_t>(SUMS, (t1 - t0) * width);
      __builtin_memset(sums, 0, size_t((t1 - t0) * width) * sizeof(int32_t));
      if (t1 - t0 > FEW) {
        many_sums<F>(m, q, tokens.stride, t1 - t0, first, last, sums, width);
      } else {
        dispatch<FEW>(t1 - t0, [&](auto T) { few_sums<F, T>(m, q, tokens.stride, first, last, sums, width); });
      }
      for (int64_t t = t0; t < t1; t++)
        for (int64_t n = row; n < end; n++) {
          const int32_t sum = sums[(t - t0) * width + n - row] - ZERO[F] * tokens.sum[t];
          y[t * ld + n] = tokens.step[t] * static_cast<const float*>(m.scales)[n] * float(sum);
        }
    }
  }
}
