// Products of tiles: 16 rows side by side, a lane for each, and a scale for each 32 columns (perspectron/ops/tiles.py).
//
// Whole numbers are summed over a group and rounded to float once; groups follow one another in their order. A lane's
// sums depend on its row and one token alone.

constexpr int64_t TOKENS_PASSED = 64;  // so that tokens stay in the first-level cache while tiles pass by

// Each group as `quantise` has a token.
void quantise_groups(const float* x, const Tokens& into, int64_t token) {
  const int64_t K = into.K, G = into.groups();
  int8_t* q = into.q + token * into.stride;
  for (int64_t g = 0; g < G; g++) {
    const int64_t at = g * TILE_GROUP, left = K - at;
    const auto part = [&](int64_t i) ALWAYS {
      const int64_t n = left - i;
      return n >= 16 ? load_floats(x + at + i) : load_floats(x + (n > 0 ? at + i : 0), n > 0 ? n : 0);
    };
    const Floats low = part(0), high = part(16);
    const int32_t most = greatest_of(greatest(magnitude_bits(low), magnitude_bits(high)));
    float a;
    __builtin_memcpy(&a, &most, 4);
    const bool finite = most < 0x7f800000;
    const float inverse = 127.0f / a;
    int32_t sum = 0;
    if (finite && inverse < __builtin_inff()) {
      const Ints first = round_to_ints(mul(low, broadcast(inverse))), second = round_to_ints(mul(high, broadcast(inverse)));
      store_bytes(q + at, first), store_bytes(q + at + 16, second);
      sum = total(add(first, second));
    } else {
      __builtin_memset(q + at, 0, TILE_GROUP);
    }
    into.steps[token * G + g] = finite ? a / 127.0f : __builtin_nanf("");
    into.fifteens[token * G + g] = float(-15 * sum);
    into.zeros[token * G + g] = -128 * sum;
  }
}

// y[t][0 … 16) of one tile and T tokens.
template <Format F, int T>
inline ALWAYS void tile_product(const uint8_t* line, const float* unit, const Tokens& tokens, int64_t t0, float* y, int64_t ld, int64_t rows) {
  constexpr bool four = F == FOUR_BIT_32;
  constexpr int64_t head = four ? 32 : 16, bytes = four ? 256 : 512;
  const int64_t G = tokens.groups(), stride = tokens.stride;
  const uint8_t* codes = line + tile_head(F, tokens.S);
  Floats acc[T];
  unroll<T>([&](auto t) ALWAYS { acc[t] = broadcast(0); });
  for (int64_t g = 0; g < G; g++) {
    const int8_t* q = tokens.q + t0 * stride + g * TILE_GROUP;
    const uint8_t* group = codes + g * bytes;
    Ints sum[T];
    unroll<T>([&](auto t) ALWAYS { sum[t] = four ? zero_ints() : begun(tokens.zeros[(t0 + t) * G + g]); });
    unroll<4>([&](auto j) ALWAYS {
      Bytes low, high;
      if constexpr (four) {
        __builtin_prefetch(group + j * LINE + PREFETCH);
        const Bytes both = load(group + j * LINE);
        low = low_halves(both), high = high_halves(both);
      } else {
        __builtin_prefetch(group + 2 * j * LINE + PREFETCH), __builtin_prefetch(group + (2 * j + 1) * LINE + PREFETCH);
        low = load(group + 2 * j * LINE), high = load(group + (2 * j + 1) * LINE);
      }
      unroll<T>([&](auto t) ALWAYS {
        const int8_t* at = q + t * stride + 8 * j;
        lane_dots<four>(sum[t], low, repeated(at), high, repeated(at + 4));
      });
    });
    const Floats a = floats_of_bytes(line + g * head);
    if constexpr (four) {
      const Floats b = floats_of_bytes(line + g * head + 16);
      unroll<T>([&](auto t) ALWAYS {
        const Floats whole = fma(b, broadcast(tokens.fifteens[(t0 + t) * G + g]), mul(to_floats(sum[t]), a));
        acc[t] = fma(whole, broadcast(tokens.steps[(t0 + t) * G + g]), acc[t]);
      });
    } else {
      unroll<T>([&](auto t) ALWAYS {
        acc[t] = fma(mul(to_floats(sum[t]), a), broadcast(tokens.steps[(t0 + t) * G + g]), acc[t]);
      });
    }
  }
  const Floats u = rows < 16 ? load_floats(unit, rows) : load_floats(unit);
  unroll<T>([&](auto t) ALWAYS {
    const Floats all = mul(acc[t], u);
    if (rows < 16) store(y + t * ld, all, rows);
    else store(y + t * ld, all);
  });
}

template <Format F>
void multiply_tiles(const Matrix& m, const Tokens& tokens, int64_t first, int64_t last, float* y, int64_t ld) {
  const int64_t line = m.line();
  for (int64_t t0 = 0; t0 < tokens.T; t0 += TOKENS_PASSED) {
    const int64_t t1 = t0 + TOKENS_PASSED < tokens.T ? t0 + TOKENS_PASSED : tokens.T;
    for (int64_t b = first; b < last; b++) {
      const int64_t row = b * 16, rows = m.N - row < 16 ? m.N - row : 16;
      const float* unit = static_cast<const float*>(m.scales) + row;
      int64_t t = t0;
      for (; t + TILE_TOKENS <= t1; t += TILE_TOKENS) tile_product<F, TILE_TOKENS>(m.codes + b * line, unit, tokens, t, y + t * ld + row, ld, rows);
      dispatch<TILE_TOKENS - 1>(t1 - t, [&](auto T) { tile_product<F, T>(m.codes + b * line, unit, tokens, t, y + t * ld + row, ld, rows); });
    }
  }
}
