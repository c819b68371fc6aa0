// The decay recurrence: S = γ S + v k, o = S q. A row of the state, up to 256 columns of it at a time, stays in
// registers over the tokens of a chunk; the rows of a claim stay in the second-level cache over all chunks.

// V vectors of 16 columns of one row over n tokens; adds the products with q to dots[n], lane by lane. v and γ of a token
// are SCAN_ROWS after those of the one before.
template <int V, class Load, class Store>
inline ALWAYS void scan_columns(const float* q, const float* k, int64_t R, const float* v, const float* gamma,
                                float* state, int64_t n, Floats* dots, bool begins, const Load& get, const Store& put) {
  Floats s[V];
  unroll<V>([&](auto j) ALWAYS { s[j] = get(state + 16 * j); });
  for (int64_t t = 0; t < n; t++) {
    const Floats decay = broadcast(gamma[t * SCAN_ROWS]), value = broadcast(v[t * SCAN_ROWS]);
    Floats dot[4] = {begins ? broadcast(0) : dots[t], broadcast(0), broadcast(0), broadcast(0)};
    unroll<V>([&](auto j) ALWAYS {
      s[j] = fma(value, get(k + t * R + 16 * j), mul(decay, s[j]));
      dot[j % 4] = fma(get(q + t * R + 16 * j), s[j], dot[j % 4]);
    });
    dots[t] = V > 2 ? add(add(dot[0], dot[1]), add(dot[2], dot[3])) : V > 1 ? add(dot[0], dot[1]) : dot[0];
  }
  unroll<V>([&](auto j) ALWAYS { put(state + 16 * j, s[j]); });
}

// f(V, r, load, store) over the columns of a row: V vectors from column r, at most Most.
template <int Most, class F>
inline ALWAYS void column_groups(int64_t R, const F& f) {
  const auto get = [](const float* p) ALWAYS { return load_floats(p); };
  const auto put = [](float* p, Floats x) ALWAYS { store(p, x); };
  int64_t r = 0;
  const auto groups = [&](auto V) ALWAYS {
    if constexpr (V <= Most)
      for (; r + 16 * V <= R; r += 16 * V) f(V, r, get, put);
  };
  groups(Index<16>{}), groups(Index<8>{}), groups(Index<4>{}), groups(Index<2>{}), groups(Index<1>{});
  if (const int64_t rest = R - r; rest > 0)
    f(Index<1>{}, r, [rest](const float* p) ALWAYS { return load_floats(p, rest); },
      [rest](float* p, Floats x) ALWAYS { store(p, x, rest); });
}

// [n][rows], rows `stride` apart, side by side: a power of two apart they would share few places of a cache. Prefetches the
// rows `ahead` tokens later.
inline void beside(const float* from, int64_t stride, int64_t rows, int64_t n, int64_t ahead, float* to) {
  for (int64_t t = 0; t < n; t++) {
    for (int64_t i = 0; i < rows; i += 16) __builtin_prefetch(from + (t + ahead) * stride + i);
    __builtin_memcpy(to + t * SCAN_ROWS, from + t * stride, size_t(rows) * sizeof(float));
  }
}

// [n][rows], rows `stride` apart, from [rows][SCAN_TOKENS].
inline void turned_back(const float* from, int64_t rows, int64_t n, float* to, int64_t stride) {
  for (int64_t t = 0; t < n; t++)
    for (int64_t row = 0; row < rows; row++) to[t * stride + row] = from[row * SCAN_TOKENS + t];
}

void scan(const Scan& s, int64_t first, int64_t last) {
  float v[SCAN_TOKENS * SCAN_ROWS], gamma[SCAN_TOKENS * SCAN_ROWS], o[SCAN_ROWS * SCAN_TOKENS];
  for (int64_t t = 0; t < s.T; t += SCAN_TOKENS) {
    const int64_t n = t + SCAN_TOKENS < s.T ? SCAN_TOKENS : s.T - t;
    for (int64_t row = first, rows; row < last; row += rows) {
      const int64_t b = row / s.D, d = row % s.D, at = b * s.T + t, ends = (b + 1) * s.D < last ? (b + 1) * s.D : last;
      rows = row + SCAN_ROWS < ends ? SCAN_ROWS : ends - row;
      if (s.borders != nullptr && t % s.segment == 0)
        __builtin_memcpy(s.borders + (t / s.segment * s.B * s.D + row) * s.R, s.state + row * s.R, size_t(rows * s.R) * sizeof(float));
      beside(s.v + at * s.D + d, s.D, rows, n, SCAN_TOKENS, v);
      beside(s.gamma + at * s.D + d, s.D, rows, n, SCAN_TOKENS, gamma);
      for (int64_t i = 0; i < rows; i++) {
        Floats dots[SCAN_TOKENS];
        column_groups<16>(s.R, [&](auto V, int64_t r, auto get, auto put) ALWAYS {
          scan_columns<V>(s.q + at * s.R + r, s.k + at * s.R + r, s.R, v + i, gamma + i, s.state + (row + i) * s.R + r, n,
                          dots, r == 0, get, put);
        });
        if (n < SCAN_TOKENS)
          for (int64_t token = 0; token < n; token++) o[i * SCAN_TOKENS + token] = tree(dots[token]);
        else store(o + i * SCAN_TOKENS, trees(dots));
      }
      turned_back(o, rows, n, s.o + at * s.D + d, s.D);
    }
  }
}
