// The decay recurrence differentiated. Only the states at the borders of segments are kept; those inside are computed
// again, V vectors of 16 columns of some rows at a time, whose q, k, dq and dk are read and written once.

constexpr int WIDEST = 4;                                                   // vectors of a row at once
constexpr int WIDE_ROWS = MANY_REGISTERS ? 2 : 1, NARROW_ROWS = 2 * WIDE_ROWS;  // so wide, and of less: as registers hold

// v, γ and the gradient of o of a slab's rows in one chunk of n tokens, each [n][SCAN_ROWS]; out only for gradients.
struct Chunk {
  const float *v, *gamma, *out;
  int64_t n;
};

// From the states before a chunk, rows R apart, to those after it.
template <int Rows, int V, class Load, class Store>
inline ALWAYS void scan_columns_over(const Chunk& c, int64_t row, const float* k, int64_t R, const float* from, float* to,
                                     const Load& get, const Store& put) {
  Floats state[Rows][V];
  unroll<Rows>([&](auto i) ALWAYS { unroll<V>([&](auto j) ALWAYS { state[i][j] = get(from + i * R + 16 * j); }); });
  for (int64_t t = 0; t < c.n; t++)
    unroll<V>([&](auto j) ALWAYS {
      const Floats key = get(k + t * R + 16 * j);
      unroll<Rows>([&](auto i) ALWAYS {
        const int64_t at = t * SCAN_ROWS + row + i;
        state[i][j] = fma(broadcast(c.v[at]), key, mul(broadcast(c.gamma[at]), state[i][j]));
      });
    });
  unroll<Rows>([&](auto i) ALWAYS { unroll<V>([&](auto j) ALWAYS { put(to + i * R + 16 * j, state[i][j]); }); });
}

template <int Rows, int V, bool begins, class Load, class Store>
inline ALWAYS void scan_columns_backward(const Chunk& c, int64_t row, const float* q, const float* k, int64_t R,
                                         const float* border, float* dstate, float* dq, float* dk,
                                         Floats (*dvs)[SCAN_TOKENS], Floats (*dgammas)[SCAN_TOKENS], const Load& get,
                                         const Store& put) {
  Floats states[SCAN_TOKENS + 1][Rows][V], d[Rows][V];
  unroll<Rows>([&](auto i) ALWAYS {
    unroll<V>([&](auto j) ALWAYS { states[0][i][j] = get(border + i * R + 16 * j), d[i][j] = get(dstate + i * R + 16 * j); });
  });
  for (int64_t t = 0; t < c.n; t++)
    unroll<V>([&](auto j) ALWAYS {
      const Floats key = get(k + t * R + 16 * j);
      unroll<Rows>([&](auto i) ALWAYS {
        const int64_t at = t * SCAN_ROWS + row + i;
        states[t + 1][i][j] = fma(broadcast(c.v[at]), key, mul(broadcast(c.gamma[at]), states[t][i][j]));
      });
    });
  for (int64_t t = c.n - 1; t >= 0; t--) {
    Floats dv[Rows], dgamma[Rows], g[Rows], value[Rows], decay[Rows];
    unroll<Rows>([&](auto i) ALWAYS {
      const int64_t at = t * SCAN_ROWS + row + i;
      g[i] = broadcast(c.out[at]), value[i] = broadcast(c.v[at]), decay[i] = broadcast(c.gamma[at]);
      if constexpr (begins) dv[i] = dgamma[i] = broadcast(0);
      else dv[i] = dvs[i][t], dgamma[i] = dgammas[i][t];
    });
    unroll<V>([&](auto j) ALWAYS {
      const int64_t column = t * R + 16 * j;
      const Floats query = get(q + column), key = get(k + column);
      Floats into_q = get(dq + column), into_k = get(dk + column);
      unroll<Rows>([&](auto i) ALWAYS {
        into_q = fma(g[i], states[t + 1][i][j], into_q);
        d[i][j] = fma(g[i], query, d[i][j]);
        dv[i] = fma(d[i][j], key, dv[i]);
        dgamma[i] = fma(d[i][j], states[t][i][j], dgamma[i]);
        into_k = fma(d[i][j], value[i], into_k);
        d[i][j] = mul(decay[i], d[i][j]);
      });
      put(dq + column, into_q);
      put(dk + column, into_k);
    });
    unroll<Rows>([&](auto i) ALWAYS { dvs[i][t] = dv[i], dgammas[i][t] = dgamma[i]; });
  }
  unroll<Rows>([&](auto i) ALWAYS { unroll<V>([&](auto j) ALWAYS { put(dstate + i * R + 16 * j, d[i][j]); }); });
}

// f(Rows, row) over the rows of a slab.
template <class F>
inline ALWAYS void row_groups(int64_t rows, int64_t R, const F& f) {
  int64_t row = 0;
  const auto groups = [&](auto Rows) ALWAYS {
    for (; row + Rows <= rows; row += Rows) f(Rows, row);
  };
  if (R < 16 * WIDEST) groups(Index<NARROW_ROWS>{});
  groups(Index<WIDE_ROWS>{}), groups(Index<1>{});
}

// Rows [begin, begin + rows) of batch b.
struct Slab {
  int64_t b, begin, rows;
};

// Gradients of a chunk from token t on, from the states before it, [rows][R].
inline void scan_chunk_backward(const ScanBackward& s, const Slab& slab, const Chunk& c, int64_t t, const float* before,
                                float* dq, float* dk) {
  const int64_t at = (slab.b * s.T + t) * s.R;
  float dv[SCAN_ROWS * SCAN_TOKENS], dgamma[SCAN_ROWS * SCAN_TOKENS];
  row_groups(slab.rows, s.R, [&](auto Rows, int64_t row) ALWAYS {
    Floats dvs[Rows][SCAN_TOKENS], dgammas[Rows][SCAN_TOKENS];
    for (int64_t n = c.n; n < SCAN_TOKENS; n++) unroll<Rows>([&](auto j) ALWAYS { dvs[j][n] = dgammas[j][n] = broadcast(0); });
    column_groups<WIDEST>(s.R, [&](auto V, int64_t r, auto get, auto put) ALWAYS {
      const auto differentiate = [&](auto begins) ALWAYS {
        scan_columns_backward<Rows, V, decltype(begins)::value>(
            c, row, s.q + at + r, s.k + at + r, s.R, before + row * s.R + r,
            s.dstate + (slab.b * s.D + slab.begin + row) * s.R + r, dq + t * s.R + r, dk + t * s.R + r, dvs, dgammas, get, put);
      };
      if (r == 0) differentiate(std::true_type{});
      else differentiate(std::false_type{});
    });
    unroll<Rows>([&](auto j) ALWAYS {
      store(dv + (row + j) * SCAN_TOKENS, trees(dvs[j]));
      store(dgamma + (row + j) * SCAN_TOKENS, trees(dgammas[j]));
    });
  });
  const int64_t to = (slab.b * s.T + t) * s.D + slab.begin;
  turned_back(dv, slab.rows, c.n, s.dv + to, s.D);
  turned_back(dgamma, slab.rows, c.n, s.dgamma + to, s.D);
}

// Slabs [first, last) of at most SCAN_ROWS rows of a batch each. Of a segment the states at the borders of its chunks are
// computed again, and then its chunks are differentiated, the last first.
void scan_backward(const ScanBackward& s, int64_t first, int64_t last) {
  const int64_t slabs = ceil_div(s.D, s.rows), size = s.rows * s.R;
  float* borders = scratch<float>(BORDERS, ceil_div(s.segment, SCAN_TOKENS) * size);
  float v[SCAN_TOKENS * SCAN_ROWS], gamma[SCAN_TOKENS * SCAN_ROWS], out[SCAN_TOKENS * SCAN_ROWS];
  for (int64_t i = first; i < last; i++) {
    const int64_t begin = i % slabs * s.rows, part = (i % slabs * s.B + i / slabs) * s.T * s.R;
    const Slab slab{i / slabs, begin, begin + s.rows < s.D ? s.rows : s.D - begin};
    const auto chunk_at = [&](int64_t t, bool backwards) ALWAYS {
      const int64_t ahead = backwards ? -SCAN_TOKENS : SCAN_TOKENS;
      const int64_t n = t + SCAN_TOKENS < s.T ? SCAN_TOKENS : s.T - t, from = (slab.b * s.T + t) * s.D + begin;
      beside(s.v + from, s.D, slab.rows, n, ahead, v);
      beside(s.gamma + from, s.D, slab.rows, n, ahead, gamma);
      if (backwards) beside(s.out + from, s.D, slab.rows, n, ahead, out);
      return Chunk{v, gamma, out, n};
    };
    for (int64_t segment = (s.T - 1) / s.segment; segment >= 0; segment--) {
      const int64_t t0 = segment * s.segment, end = t0 + s.segment < s.T ? t0 + s.segment : s.T;
      const int64_t from = ((segment * s.B + slab.b) * s.D + begin) * s.R;
      __builtin_memcpy(borders, s.borders + from, size_t(slab.rows * s.R) * sizeof(float));
      float* border = borders;
      for (int64_t t = t0; t + SCAN_TOKENS < end; t += SCAN_TOKENS, border += size) {
        const Chunk c = chunk_at(t, false);
        const float* k = s.k + (slab.b * s.T + t) * s.R;
        row_groups(slab.rows, s.R, [&](auto Rows, int64_t row) ALWAYS {
          float* own = border + row * s.R;
          column_groups<WIDEST>(s.R, [&](auto V, int64_t r, auto get, auto put) ALWAYS {
            scan_columns_over<Rows, V>(c, row, k + r, s.R, own + r, own + size + r, get, put);
          });
        });
      }
      for (int64_t t = t0 + (border - borders) / size * SCAN_TOKENS; t >= t0; t -= SCAN_TOKENS, border -= size)
        scan_chunk_backward(s, slab, chunk_at(t, true), t, border, s.dq + part, s.dk + part);
    }
  }
}
