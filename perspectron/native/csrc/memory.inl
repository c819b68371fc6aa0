// Matrix memories with gates of their key channels, and the delta rule:
//   u_t = z_t − S_{t−1}ᵀ e_t,  S_t = diag(α_t) S_{t−1} + w_t u_tᵀ [+ k_t v_tᵀ],  o_t = S_tᵀ q_t
// with z = v and w = k, or, where there is b, z = 0, w = b and the last term. Without e, u = v.
// Lanes are value channels: V vectors of 16 of them go through all tokens, K rows in the first-level cache.

constexpr int64_t MEMORY_TOKENS = 8;  // whose states a backward pass keeps at once

// Loads and stores of V vectors of the columns from `column` on, the last of them with `rest` numbers.
template <int V>
struct Columns {
  int64_t rest;
  inline ALWAYS Floats get(const float* p, int j) const { return j + 1 < V || rest == 16 ? load_floats(p + 16 * j) : load_floats(p + 16 * j, rest); }
  inline ALWAYS void put(float* p, int j, Floats x) const { j + 1 < V || rest == 16 ? store(p + 16 * j, x) : store(p + 16 * j, x, rest); }
};

template <int V>
struct Token {  // one token of one memory
  const float *q, *k, *e, *b, *alpha;
  Floats u[V], v[V];
  bool narrow;  // one gate for all rows
  inline ALWAYS float gate(int64_t r) const { return alpha[narrow ? 0 : r]; }
};

template <int V>
inline ALWAYS Token<V> token_of(const Memory& m, int64_t n, int64_t t, int64_t column, Columns<V> columns) {
  const int64_t at = n * m.T + t, shared_at = n / m.share * m.T + t;
  Token<V> token{m.q + shared_at * m.K, m.k + shared_at * m.K, m.e ? m.e + at * m.K : nullptr, m.b ? m.b + at * m.K : nullptr,
                 m.alpha + at * m.A, {}, {}, m.A == 1};
  unroll<V>([&](auto j) ALWAYS { token.u[j] = token.v[j] = columns.get(m.v + at * m.V + column, j); });
  return token;
}

// From the state before [K][16 V] to that after, which may be the same; fills u.
template <int V, class Read>
inline ALWAYS void advance(const Memory& m, Token<V>& token, const float* before, float* after, const Read& read) {
  if (token.b != nullptr) unroll<V>([&](auto j) ALWAYS { token.u[j] = broadcast(0); });
  if (token.e != nullptr)
    for (int64_t r = 0; r < m.K; r++)
      unroll<V>([&](auto j) ALWAYS {
        token.u[j] = fma(broadcast(-token.e[r]), load_floats(before + (r * V + j) * 16), token.u[j]);
      });
  const float* writes = token.b != nullptr ? token.b : token.k;
  for (int64_t r = 0; r < m.K; r++)
    unroll<V>([&](auto j) ALWAYS {
      const int64_t at = (r * V + j) * 16;
      Floats x = fma(broadcast(writes[r]), token.u[j], mul(broadcast(token.gate(r)), load_floats(before + at)));
      if (token.b != nullptr) x = fma(broadcast(token.k[r]), token.v[j], x);
      store(after + at, x);
      read(r, j, x);
    });
}

// f(V, column, how many numbers the last vector has) over the columns of a slab.
template <class F>
inline ALWAYS void column_slabs(int64_t begin, int64_t end, const F& f) {
  const int64_t vectors = ceil_div(end - begin, 16), rest = end - begin - 16 * (vectors - 1);
  if (vectors == 4) f(Index<4>{}, begin, rest);
  if (vectors == 3) f(Index<2>{}, begin, int64_t(16)), f(Index<1>{}, begin + 32, rest);
  if (vectors == 2) f(Index<2>{}, begin, rest);
  if (vectors == 1) f(Index<1>{}, begin, rest);
}

template <int V>
void memory_columns(const Memory& m, int64_t n, int64_t column, int64_t rest) {
  const Columns<V> columns{rest};
  float *state = scratch<float>(BORDERS, m.K * V * 16), *own = m.state + n * m.K * m.V + column;
  for (int64_t r = 0; r < m.K; r++)
    unroll<V>([&](auto j) ALWAYS { store(state + (r * V + j) * 16, columns.get(own + r * m.V, j)); });
  for (int64_t t = 0; t < m.T; t++) {
    Token<V> token = token_of<V>(m, n, t, column, columns);
    Floats o[V];
    unroll<V>([&](auto j) ALWAYS { o[j] = broadcast(0); });
    advance<V>(m, token, state, state, [&](int64_t r, auto j, Floats x) ALWAYS { o[j] = fma(broadcast(token.q[r]), x, o[j]); });
    unroll<V>([&](auto j) ALWAYS { columns.put(m.o + (n * m.T + t) * m.V + column, j, o[j]); });
  }
  for (int64_t r = 0; r < m.K; r++)
    unroll<V>([&](auto j) ALWAYS { columns.put(own + r * m.V, j, load_floats(state + (r * V + j) * 16)); });
}

template <int V>
inline ALWAYS Floats added(const Floats* x) {
  if constexpr (V == 1) return x[0];
  if constexpr (V == 2) return add(x[0], x[1]);
  if constexpr (V == 4) return add(add(x[0], x[1]), add(x[2], x[3]));
}

// Which of a memory's inputs there are, known when it is compiled: the loops over rows have no branches.
template <bool e, bool b, bool narrow>
struct Has {
  static constexpr bool erases = e, writes = b, one_gate = narrow;
};
template <class F>
inline ALWAYS void with_inputs(const Memory& m, const F& f) {
  const auto gates = [&](auto e, auto b) ALWAYS {
    if (m.A == 1) f(Has<decltype(e)::value, decltype(b)::value, true>{});
    else f(Has<decltype(e)::value, decltype(b)::value, false>{});
  };
  if (m.e != nullptr && m.b != nullptr) gates(std::true_type{}, std::true_type{});
  else if (m.e != nullptr) gates(std::true_type{}, std::false_type{});
  else if (m.b != nullptr) gates(std::false_type{}, std::true_type{});
  else gates(std::false_type{}, std::false_type{});
}

// Adds to the gradients of q, k, e, b and α of the slab, of its row (n, t).
template <int V, class Inputs>
void token_backward(const Memory& m, const Token<V>& token, const Floats* out, const float* before, const float* after,
                    float* d, Floats* dv, int64_t row) {
  constexpr bool erases = Inputs::erases, writes = Inputs::writes, one_gate = Inputs::one_gate;
  const float *q = token.q, *k = token.k, *e = token.e, *b = token.b, *alpha = token.alpha;
  const int64_t K = m.K, at = row * K;
  Floats o[V], u[V], v[V], du[V], dw[V], all = broadcast(0);
  unroll<V>([&](auto j) ALWAYS { o[j] = out[j], u[j] = token.u[j], v[j] = token.v[j], du[j] = dw[j] = broadcast(0); });
  const auto given = [&](int64_t r, auto j) ALWAYS {  // the gradient of the state after the token
    const Floats x = fma(broadcast(q[r]), o[j], load_floats(d + (r * V + j) * 16));
    du[j] = fma(broadcast((writes ? b : k)[r]), x, du[j]);
    if constexpr (writes) dw[j] = fma(broadcast(k[r]), x, dw[j]);
    return x;
  };
  if constexpr (erases)  // which needs all of du
    for (int64_t r = 0; r < K; r++) unroll<V>([&](auto j) ALWAYS { store(d + (r * V + j) * 16, given(r, j)); });
  for (int64_t r = 0; r < K; r++) {
    const Floats gate = broadcast(alpha[one_gate ? 0 : r]);
    Floats dq[V], dz[V], dk[V], da[V], de[V];
    unroll<V>([&](auto j) ALWAYS {
      const Floats x = erases ? load_floats(d + (r * V + j) * 16) : given(r, j), old = load_floats(before + (r * V + j) * 16);
      dq[j] = mul(o[j], load_floats(after + (r * V + j) * 16));
      dz[j] = mul(x, u[j]);
      if constexpr (writes) dk[j] = mul(x, v[j]);
      da[j] = mul(x, old);
      Floats next = mul(gate, x);
      if constexpr (erases) de[j] = mul(du[j], old), next = fma(broadcast(-e[r]), du[j], next);
      store(d + (r * V + j) * 16, next);
    });
    m.dq[at + r] += tree(added<V>(dq));
    if constexpr (one_gate) all = add(all, added<V>(da));
    else m.dalpha[at + r] += tree(added<V>(da));
    (writes ? m.db : m.dk)[at + r] += tree(added<V>(dz));
    if constexpr (writes) m.dk[at + r] += tree(added<V>(dk));
    if constexpr (erases) m.de[at + r] -= tree(added<V>(de));
  }
  if constexpr (one_gate) m.dalpha[row] += tree(all);
  unroll<V>([&](auto j) ALWAYS { dv[j] = writes ? dw[j] : du[j]; });
}

template <int V>
void memory_columns_backward(const Memory& m, int64_t n, int64_t slab, int64_t column, int64_t rest) {
  const Columns<V> columns{rest};
  const int64_t size = m.K * V * 16, chunks = ceil_div(m.T, MEMORY_TOKENS);
  float* borders = scratch<float>(BORDERS, size * (chunks + MEMORY_TOKENS + 1));  // and the states of a chunk, and d
  float *states = borders + chunks * size, *d = states + MEMORY_TOKENS * size;
  const float* own = m.state + n * m.K * m.V + column;
  float* dstate = m.dstate + n * m.K * m.V + column;
  const auto nothing = [](int64_t, auto, Floats) ALWAYS {};
  for (int64_t r = 0; r < m.K; r++)
    unroll<V>([&](auto j) ALWAYS {
      store(borders + (r * V + j) * 16, columns.get(own + r * m.V, j));
      store(d + (r * V + j) * 16, columns.get(dstate + r * m.V, j));
    });
  for (int64_t c = 0; c + 1 < chunks; c++)
    for (int64_t t = 0; t < MEMORY_TOKENS; t++) {
      Token<V> token = token_of<V>(m, n, c * MEMORY_TOKENS + t, column, columns);
      advance<V>(m, token, t == 0 ? borders + c * size : borders + (c + 1) * size, borders + (c + 1) * size, nothing);
    }
  for (int64_t c = chunks - 1; c >= 0; c--) {
    const int64_t begin = c * MEMORY_TOKENS, tokens = begin + MEMORY_TOKENS < m.T ? MEMORY_TOKENS : m.T - begin;
    const auto state = [&](int64_t t) { return t == 0 ? borders + c * size : states + (t - 1) * size; };
    Floats us[MEMORY_TOKENS][V];
    for (int64_t t = 0; t < tokens; t++) {
      Token<V> token = token_of<V>(m, n, begin + t, column, columns);
      advance<V>(m, token, state(t), state(t + 1), nothing);
      unroll<V>([&](auto j) ALWAYS { us[t][j] = token.u[j]; });
    }
    for (int64_t t = tokens - 1; t >= 0; t--) {
      Token<V> token = token_of<V>(m, n, begin + t, column, columns);
      Floats out[V], dv[V];
      const int64_t at = n * m.T + begin + t;
      unroll<V>([&](auto j) ALWAYS { token.u[j] = us[t][j], out[j] = columns.get(m.out + at * m.V + column, j); });
      with_inputs(m, [&](auto inputs) ALWAYS {
        token_backward<V, decltype(inputs)>(m, token, out, state(t), state(t + 1), d, dv, slab * m.N * m.T + at);
      });
      unroll<V>([&](auto j) ALWAYS { columns.put(m.dv + at * m.V + column, j, dv[j]); });
    }
  }
  for (int64_t r = 0; r < m.K; r++)
    unroll<V>([&](auto j) ALWAYS { columns.put(dstate + r * m.V, j, load_floats(d + (r * V + j) * 16)); });
}

// Slabs [first, last) of 64 columns of a memory each.
template <bool backward>
void memory(const Memory& m, int64_t first, int64_t last) {
  const int64_t slabs = ceil_div(m.V, 64);
  for (int64_t i = first; i < last; i++) {
    const int64_t n = i / slabs, slab = i % slabs, end = 64 * (slab + 1) < m.V ? 64 * (slab + 1) : m.V;
    column_slabs(64 * slab, end, [&](auto V, int64_t column, int64_t rest) ALWAYS {
      if constexpr (backward) memory_columns_backward<V>(m, n, slab, column, rest);
      else memory_columns<V>(m, n, column, rest);
    });
  }
}
