// The decay recurrence differentiated. Only the states at the borders of chunks are kept; those inside are computed
// again, V vectors of 16 columns of a row at a time.

template <int V, class Load, class Store>
inline ALWAYS void scan_columns_backward(const ScanBackward& s, const float* q, const float* k, const float* v,
                                         const float* gamma, const float* out, const float* border, float* dstate,
                                         float* dq, float* dk, int64_t n, Floats* dvs, Floats* dgammas, const Load& get,
                                         const Store& put) {
  Floats states[SCAN_TOKENS + 1][V], d[V];
  unroll<V>([&](auto j) ALWAYS { states[0][j] = get(border + 16 * j), d[j] = get(dstate + 16 * j); });
  for (int64_t t = 0; t < n; t++) {
    const Floats decay = broadcast(gamma[t * s.D]), value = broadcast(v[t * s.D]);
    unroll<V>([&](auto j) ALWAYS {
      states[t + 1][j] = fma(value, get(k + t * s.R + 16 * j), mul(decay, states[t][j]));
    });
  }
  for (int64_t t = n - 1; t >= 0; t--) {
    const Floats decay = broadcast(gamma[t * s.D]), value = broadcast(v[t * s.D]), g = broadcast(out[t * s.D]);
    unroll<V>([&](auto j) ALWAYS {
      const int64_t at = t * s.R + 16 * j;
      put(dq + at, fma(g, states[t + 1][j], get(dq + at)));
      d[j] = fma(g, get(q + at), d[j]);
      dvs[t] = fma(d[j], get(k + at), dvs[t]);
      dgammas[t] = fma(d[j], states[t][j], dgammas[t]);
      put(dk + at, fma(d[j], value, get(dk + at)));
      d[j] = mul(decay, d[j]);
    });
  }
  unroll<V>([&](auto j) ALWAYS { put(dstate + 16 * j, d[j]); });
}

// f(V, r, load, store) over the columns of a row: V vectors from column r.
template <class F>
inline ALWAYS void column_groups(int64_t R, const F& f) {
  const auto get = [](const float* p) ALWAYS { return load_floats(p); };
  const auto put = [](float* p, Floats x) ALWAYS { store(p, x); };
  int64_t r = 0;
  const auto groups = [&](auto V) ALWAYS {
    for (; r + 16 * V <= R; r += 16 * V) f(V, r, get, put);
  };
  groups(Index<4>{}), groups(Index<2>{}), groups(Index<1>{});
  if (const int64_t rest = R - r; rest > 0)
    f(Index<1>{}, r, [rest](const float* p) ALWAYS { return load_floats(p, rest); },
      [rest](float* p, Floats x) ALWAYS { store(p, x, rest); });
}

// Slabs [first, last) of `rows` rows of a batch each.
void scan_backward(const ScanBackward& s, int64_t first, int64_t last) {
  const int64_t slabs = ceil_div(s.D, s.rows), chunks = ceil_div(s.T, SCAN_TOKENS);
  float* borders = scratch<float>(BORDERS, chunks * s.rows * s.R);
  for (int64_t slab = first; slab < last; slab++) {
    const int64_t b = slab / slabs, begin = slab % slabs * s.rows;
    const int64_t rows = begin + s.rows < s.D ? s.rows : s.D - begin;
    float *dq = s.dq + (slab % slabs * s.B + b) * s.T * s.R, *dk = s.dk + (slab % slabs * s.B + b) * s.T * s.R;
    __builtin_memcpy(borders, s.state + (b * s.D + begin) * s.R, size_t(rows * s.R) * sizeof(float));
    for (int64_t c = 0; c + 1 < chunks; c++)
      for (int64_t row = 0; row < rows; row++) {
        const int64_t at = b * s.T + c * SCAN_TOKENS, column = at * s.D + begin + row;
        const float* from = borders + (c * s.rows + row) * s.R;
        float* to = borders + ((c + 1) * s.rows + row) * s.R;
        column_groups(s.R, [&](auto V, int64_t r, auto get, auto put) ALWAYS {
          Floats state[V];
          unroll<V>([&](auto j) ALWAYS { state[j] = get(from + r + 16 * j); });
          for (int64_t t = 0; t < SCAN_TOKENS; t++) {
            const Floats decay = broadcast(s.gamma[column + t * s.D]), value = broadcast(s.v[column + t * s.D]);
            unroll<V>([&](auto j) ALWAYS {
              state[j] = fma(value, get(s.k + (at + t) * s.R + r + 16 * j), mul(decay, state[j]));
            });
          }
          unroll<V>([&](auto j) ALWAYS { put(to + r + 16 * j, state[j]); });
        });
      }
    for (int64_t c = chunks - 1; c >= 0; c--) {
      const int64_t t = c * SCAN_TOKENS, n = t + SCAN_TOKENS < s.T ? SCAN_TOKENS : s.T - t, at = b * s.T + t;
      for (int64_t row = 0; row < rows; row++) {
        const int64_t column = at * s.D + begin + row;
        Floats dvs[SCAN_TOKENS], dgammas[SCAN_TOKENS];
        for (int64_t i = 0; i < n; i++) dvs[i] = dgammas[i] = broadcast(0);
        column_groups(s.R, [&](auto V, int64_t r, auto get, auto put) ALWAYS {
          scan_columns_backward<V>(s, s.q + at * s.R + r, s.k + at * s.R + r, s.v + column, s.gamma + column,
                                   s.out + column, borders + (c * s.rows + row) * s.R + r,
                                   s.dstate + (b * s.D + begin + row) * s.R + r, dq + t * s.R + r, dk + t * s.R + r, n,
                                   dvs, dgammas, get, put);
        });
        for (int64_t i = 0; i < n; i++)
          s.dv[column + i * s.D] = tree(dvs[i]), s.dgamma[column + i * s.D] = tree(dgammas[i]);
      }
    }
  }
}
