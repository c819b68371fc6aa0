// The tokens of perspectron.designs.adr.gru_loop, forward and back, of some memories at a time that share weights.

#if defined(PERSPECTRON_TYPES)

constexpr int64_t GRU_ROWS = 8;  // memories of a piece

struct Gru {  // r, c = σ(gates + h W); n = tanh(n + r (gates + h W)); h ← h + rate c (n − h), of N memories of G groups
  const float *wh, *rates;         // [G] panels, D to 3D; [G][N], or null
  const uint8_t* reset;            // [L][N], 1 where h is emptied first; or null
  float *gates, *n, *h;            // [L][G][N][3D] r, c and what n adds, [L][G][N][D]; [L + 1][G][N][D]
  float rate;
  int64_t L, G, N, D;
};

struct GruBackward {  // of the same: dgates are of gates + h W, r, z and n; ĥ is h without its rate
  const float *wh, *rates;     // 3D to D; as above
  const float *gates, *n, *h;  // what forward left
  const float* draw;           // the gradient of ĥ, divided by the rate: [L][G][N][D], or null
  const uint8_t* reset;
  float *dgates, *dh;          // [G][L][N][4][D]; [L + 1][G][N][D], added to
  float rate;
  int64_t L, G, N, D;
};

#elif defined(PERSPECTRON_KERNELS)

// Exactly 0 far below, as padding has it.
inline Floats gate_of(Floats x) { return chosen(x, broadcast(-87.0f), broadcast(0), sigmoid_of(x)); }

template <int Rows>
void gru_rows(const Gru& m, int64_t group, int64_t first) {
  const int64_t D = m.D, wide = panelled(3 * D), step = m.G * m.N;
  Rooms rooms{scratch<float>(DENSE, Rows * (panelled(D) + wide))};
  float *opened = rooms.of(Rows * D), *products = rooms.of(Rows * wide);
  const float* panels = m.wh + group * wide * D;
  for (int64_t t = 0; t < m.L; t++) {
    const int64_t at = t * step + group * m.N + first;
    const float* met = m.h + at * D;
    if (m.reset != nullptr) {
      copied(met, opened, Rows * D);
      for (int64_t r = 0; r < Rows; r++)
        if (m.reset[t * m.N + first + r]) cleared(opened + r * D, D);
      met = opened;
    }
    times<Rows>(met, D, panels, D, 3 * D, products, wide);
    for (int64_t r = 0; r < Rows; r++) {
      float *gates = m.gates + (at + r) * 3 * D, *n = m.n + (at + r) * D, *after = m.h + (at + r + step) * D;
      const float *product = products + r * wide, *before = met + r * D;
      const Floats rate = broadcast(m.rates == nullptr ? m.rate : m.rates[group * m.N + first + r]);
      made(gates, gates, product, 2 * D, [](Floats a, Floats b) ALWAYS { return gate_of(add(a, b)); });
      add_to(gates + 2 * D, product + 2 * D, D);
      sixteens(D, [&](auto get_at, auto put_at) ALWAYS {
        const Floats candidate = tanh_of(fma(get_at(gates), get_at(gates + 2 * D), get_at(n))), old = get_at(before);
        put_at(n, candidate);
        put_at(after, fma(get_at(gates + D), mul(minus(candidate, old), rate), old));
      });
    }
  }
}

template <int Rows>
void gru_rows_back(const GruBackward& m, int64_t group, int64_t first) {
  const int64_t D = m.D, wide = panelled(D), step = m.G * m.N;
  Rooms rooms{scratch<float>(DENSE, Rows * wide + panelled(D))};
  float *products = rooms.of(Rows * wide), *nothing = rooms.of(D);
  cleared(nothing, D);
  const float* panels = m.wh + group * wide * 3 * D;
  const Floats one = broadcast(1.0f);
  for (int64_t t = m.L - 1; t >= 0; t--) {
    const int64_t at = t * step + group * m.N + first;
    const auto begins = [&](int64_t r) { return m.reset != nullptr && m.reset[t * m.N + first + r]; };
    const auto rate = [&](int64_t r) { return broadcast(m.rates == nullptr ? m.rate : m.rates[group * m.N + first + r]); };
    float* dgates = m.dgates + ((group * m.L + t) * m.N + first) * 4 * D;
    for (int64_t r = 0; r < Rows; r++) {
      const float *after = m.dh + (at + r + step) * D, *draw = m.draw == nullptr ? nothing : m.draw + (at + r) * D;
      const float *gates = m.gates + (at + r) * 3 * D, *n = m.n + (at + r) * D, *met = begins(r) ? nothing : m.h + (at + r) * D;
      float* own = dgates + 4 * r * D;
      const Floats share = rate(r);
      sixteens(D, [&](auto get_at, auto put_at) ALWAYS {  // slopes of tanh and sigmoid from their values
        const Floats opened = get_at(gates), c = get_at(gates + D), candidate = get_at(n);
        const Floats seed = mul(add(get_at(after), get_at(draw)), mul(c, share));
        const Floats of_n = mul(seed, minus(one, mul(candidate, candidate)));
        put_at(own, mul(of_n, opened));
        put_at(own + D, mul(mul(of_n, get_at(gates + 2 * D)), mul(opened, minus(one, opened))));
        put_at(own + 2 * D, mul(mul(seed, minus(one, c)), minus(get_at(met), candidate)));  // c is 1 − z
        put_at(own + 3 * D, of_n);
      });
    }
    times<Rows>(dgates, 4 * D, panels, 3 * D, D, products, wide);
    for (int64_t r = 0; r < Rows; r++) {  // straight through, and by way of the gates; both end at a reset
      if (begins(r)) continue;
      const float *after = m.dh + (at + r + step) * D, *c = m.gates + ((at + r) * 3 + 1) * D, *product = products + r * wide;
      float* dh = m.dh + (at + r) * D;
      const Floats share = rate(r);
      sixteens(D, [&](auto get_at, auto put_at) ALWAYS {
        const Floats through = minus(one, mul(get_at(c), share));
        put_at(dh, add(fma(get_at(after), through, get_at(product)), get_at(dh)));
      });
    }
  }
}

// Pieces of GRU_ROWS memories of a group each.
template <class M>
void gru(const M& m, int64_t first, int64_t last) {
  const int64_t pieces = ceil_div(m.N, GRU_ROWS);
  for (int64_t i = first; i < last; i++) {
    const int64_t group = i / pieces, from = i % pieces * GRU_ROWS, end = from + GRU_ROWS < m.N ? from + GRU_ROWS : m.N;
    some_rows(from, end, [&](auto rows, int64_t row) {
      if constexpr (std::is_same_v<M, Gru>) gru_rows<rows>(m, group, row);
      else gru_rows_back<rows>(m, group, row);
    });
  }
}

#elif defined(PERSPECTRON_API)

API void pspx_gru(const float* wh, const float* rates, double rate, const uint8_t* reset, int64_t L, int64_t G, int64_t N,
                  int64_t D, float* gates, float* n, float* h, int threads) {
  const Gru m{wh, rates, reset, gates, n, h, float(rate), L, G, N, D};
  shared(threads, G * ceil_div(N, GRU_ROWS), 1, [&](int64_t first, int64_t last) { kernels().gru(m, first, last); });
}

API void pspx_gru_backward(const float* wh, const float* rates, double rate, const float* gates, const float* n,
                           const float* h, const float* draw, const uint8_t* reset, int64_t L, int64_t G, int64_t N,
                           int64_t D, float* dgates, float* dh, int threads) {
  const GruBackward m{wh, rates, gates, n, h, draw, reset, dgates, dh, float(rate), L, G, N, D};
  shared(threads, G * ceil_div(N, GRU_ROWS), 1, [&](int64_t first, int64_t last) { kernels().gru_backward(m, first, last); });
}

#endif
