// The decay recurrence: S = γ S + v k, o = S q. A row of the state, up to 256 columns of it at a time, stays in
// registers over the tokens of a chunk; the rows of a claim stay in the second-level cache over all chunks.

constexpr int64_t SCAN_TOKENS = 16;

// V vectors of 16 columns of one row over n tokens; adds the products with q to dots[n], lane by lane.
template <int V, class Load, class Store>
inline ALWAYS void scan_columns(const float* q, const float* k, int64_t R, const float* v, const float* gamma, int64_t D,
                                float* state, int64_t n, Floats* dots, const Load& get, const Store& put) {
  Floats s[V];
  unroll<V>([&](auto j) ALWAYS { s[j] = get(state + 16 * j); });
  for (int64_t t = 0; t < n; t++) {
    const Floats decay = broadcast(gamma[t * D]), value = broadcast(v[t * D]);
    Floats dot[4] = {dots[t], broadcast(0), broadcast(0), broadcast(0)};
    unroll<V>([&](auto j) ALWAYS {
      s[j] = fma(value, get(k + t * R + 16 * j), mul(decay, s[j]));
      dot[j % 4] = fma(get(q + t * R + 16 * j), s[j], dot[j % 4]);
    });
    dots[t] = V > 1 ? add(add(dot[0], dot[1]), add(dot[2], dot[3])) : dot[0];
  }
  unroll<V>([&](auto j) ALWAYS { put(state + 16 * j, s[j]); });
}

void scan_row(const float* q, const float* k, int64_t R, const float* v, const float* gamma, int64_t D, float* state,
              float* o, int64_t n) {
  const auto get = [](const float* p) ALWAYS { return load_floats(p); };
  const auto put = [](float* p, Floats x) ALWAYS { store(p, x); };
  Floats dots[SCAN_TOKENS];
  for (int64_t t = 0; t < n; t++) dots[t] = broadcast(0);
  int64_t r = 0;
  const auto columns = [&](auto V) ALWAYS {
    for (; r + 16 * V <= R; r += 16 * V) scan_columns<V>(q + r, k + r, R, v, gamma, D, state + r, n, dots, get, put);
  };
  columns(Index<16>{}), columns(Index<8>{}), columns(Index<4>{}), columns(Index<2>{}), columns(Index<1>{});
  if (const int64_t rest = R - r; rest > 0) {
    const auto get_rest = [rest](const float* p) ALWAYS { return load_floats(p, rest); };
    const auto put_rest = [rest](float* p, Floats x) ALWAYS { store(p, x, rest); };
    scan_columns<1>(q + r, k + r, R, v, gamma, D, state + r, n, dots, get_rest, put_rest);
  }
  for (int64_t t = 0; t < n; t++) o[t * D] = tree(dots[t]);
}

void scan(const Scan& s, int64_t first, int64_t last) {
  for (int64_t t = 0; t < s.T; t += SCAN_TOKENS) {
    const int64_t n = t + SCAN_TOKENS < s.T ? SCAN_TOKENS : s.T - t;
    for (int64_t row = first; row < last; row++) {
      const int64_t b = row / s.D, d = row % s.D, at = b * s.T + t;
      scan_row(s.q + at * s.R, s.k + at * s.R, s.R, s.v + at * s.D + d, s.gamma + at * s.D + d, s.D,
               s.state + row * s.R, s.o + at * s.D + d, n);
    }
  }
}
