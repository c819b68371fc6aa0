// The recurrence of perspectron.ops.drm and its adjoint, a token of some texts at a time.

// Abramowitz and Stegun 7.1.26, as PyTorch has it: to 1.5e-7.
inline Floats gelu_of(Floats x) {
  const Floats u = mul(x, broadcast(0.70710678f)), size = magnitude(u), one = broadcast(1.0f);
  const Floats t = div(one, fma(broadcast(0.3275911f), size, one));
  Floats sum = broadcast(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fma(sum, t, broadcast(c));
  const Floats tail = mul(mul(sum, t), exponential(bounded(mul(mul(size, size), broadcast(-1.0f)))));
  const Floats below = mul(broadcast(0.5f), tail), above = minus(one, below);  // the normal law at x is one of them
  return mul(x, chosen(x, broadcast(0), below, above));
}

// log(1 + e^x) = max(x, 0) + 2 artanh(w), w = u / (2 + u), u = e^−|x|
inline Floats softplus_of(Floats x) {
  const Floats u = exponential(bounded(mul(magnitude(x), broadcast(-1.0f)))), w = div(u, add(u, broadcast(2.0f))), square = mul(w, w);
  Floats sum = broadcast(1.0f / 13);
  for (float c : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) sum = fma(sum, square, broadcast(c));
  return fma(mul(w, broadcast(2.0f)), sum, greatest(broadcast(0), x));
}

inline ALWAYS void add_times(float* y, float s, const float* x, int64_t n) {
  const Floats all = broadcast(s);
  each(y, x, n, [&](Floats a, Floats b) ALWAYS { return fma(all, b, a); });
}

// y = (G + λI)⁻¹ v = v / D − Qᵀ Q v
inline void naturalised(const float* v, const float* inverse, const float* Q, int64_t R, int64_t S, float* y) {
  __builtin_memcpy(y, v, size_t(S) * sizeof(float));
  each(y, inverse, S, [](Floats a, Floats b) ALWAYS { return mul(a, b); });
  for (int64_t r = 0; r < R; r++) add_times(y, -dot_of(Q + r * S, v, S), Q + r * S, S);
}

// Q = L⁻¹ U D⁻¹ with L Lᵀ = I + U D⁻¹ Uᵀ; L: room for R · R.
inline void solved(const float* U, const float* inverse, int64_t R, int64_t S, float* L, float* Q) {
  for (int64_t r = 0; r < R; r++) {
    __builtin_memcpy(Q + r * S, U + r * S, size_t(S) * sizeof(float));
    each(Q + r * S, inverse, S, [](Floats a, Floats b) ALWAYS { return mul(a, b); });
  }
  for (int64_t r = 0; r < R; r++)
    for (int64_t s = 0; s <= r; s++) {
      float sum = dot_of(Q + r * S, U + s * S, S) + (r == s ? 1.0f : 0.0f);
      for (int64_t i = 0; i < s; i++) sum -= L[r * R + i] * L[s * R + i];
      L[r * R + s] = r == s ? __builtin_sqrtf(sum) : sum / L[s * R + s];
    }
  for (int64_t r = 0; r < R; r++) {
    for (int64_t s = 0; s < r; s++) add_times(Q + r * S, -L[r * R + s], Q + s * S, S);
    const Floats scale = broadcast(1.0f / L[r * R + r]);
    each(Q + r * S, Q + r * S, S, [&](Floats a, Floats) ALWAYS { return mul(a, scale); });
  }
}

// One row's geometry at a token, from what the heads gave, X = (V, gates) and Y = (d, U).
inline void geometry_of(const Drm& m, int64_t at, const float* X, const float* Y, float* L) {
  const int64_t S = m.S, N = m.N, R = m.R;
  float *V = m.V + at * N * S, *a = m.a + at * N, *raw = m.raw + at * S, *inverse = m.inverse + at * S, *U = m.U + at * R * S;
  const Floats floor = broadcast(m.floor), damping = broadcast(m.damping), one = broadcast(1.0f);
  for (int64_t n = 0; n < N; n++) {
    const float* from = X + n * S;
    float norm = 1.0f;
    if (m.unit) {
      norm = __builtin_sqrtf(dot_of(from, from, S));
      norm = norm < 1e-12f ? 1e-12f : norm;
      m.norm[at * N + n] = norm;
    }
    const Floats by = broadcast(norm);
    each(V + n * S, from, S, [&](Floats, Floats x) ALWAYS { return div(x, by); });
  }
  const Floats bias = broadcast(m.gate_bias), warm = broadcast(m.gate_temperature);
  each(a, X + N * S, N, [&](Floats, Floats x) ALWAYS { return sigmoid_of(bounded(div(add(x, bias), warm))); });
  __builtin_memcpy(raw, Y, size_t(S) * sizeof(float));
  float* d = m.d + at * S;
  each(d, Y, S, [&](Floats, Floats x) ALWAYS { return add(softplus_of(x), floor); });
  each(inverse, d, S, [&](Floats, Floats x) ALWAYS { return div(one, add(x, damping)); });
  const Floats share = broadcast(R > 0 ? 1.0f / __builtin_sqrtf(float(R)) : 1.0f);
  each(U, Y + S, R * S, [&](Floats, Floats x) ALWAYS { return mul(x, share); });
  solved(U, inverse, R, S, L, m.Q + at * R * S);
}

// One row's velocity and the state after a token, z; before it, `met`.
inline void moved(const Drm& m, int64_t at, const float* met, float* z) {
  const int64_t S = m.S, N = m.N;
  float *c = m.c + at * m.coefficients(), *x = m.x + at * S, *v = m.v + at * S;
  __builtin_memset(z, 0, size_t(S) * sizeof(float));
  if (N == 0) __builtin_memcpy(z, c, size_t(S) * sizeof(float));
  for (int64_t n = 0; n < N; n++) add_times(z, m.a[at * N + n] * c[n], m.V + (at * N + n) * S, S);
  naturalised(z, m.inverse + at * S, m.Q + at * m.R * S, m.R, S, x);
  const Floats strength = broadcast(m.strength), dt = broadcast(m.dt);
  __builtin_memcpy(v, z, size_t(S) * sizeof(float));
  each(v, x, S, [&](Floats from, Floats to) ALWAYS { return fma(strength, minus(to, from), from); });
  __builtin_memcpy(z, met, size_t(S) * sizeof(float));
  each(z, v, S, [&](Floats a, Floats b) ALWAYS { return fma(dt, b, a); });
  if (!m.clip) return;
  const float norm = __builtin_sqrtf(dot_of(z, z, S));
  const Floats by = broadcast(norm > m.radius ? norm : m.radius), radius = broadcast(m.radius);
  if (m.squash) each(z, z, S, [&](Floats a, Floats) ALWAYS { return mul(tanh_of(div(a, by)), radius); });
  else each(z, z, S, [&](Floats a, Floats) ALWAYS { return mul(div(a, by), radius); });
}

template <int Rows>
void drm_rows(const Drm& m, int64_t first) {
  const int64_t S = m.S, H = m.H, N = m.N, R = m.R, G = 3 * H, M = N * S + N, Y = S + R * S, C = m.coefficients();
  Rooms rooms{scratch<float>(DENSE, Rows * (panelled(S) + 2 * panelled(G) + panelled(H) + panelled(M) + panelled(Y) + panelled(C)) + panelled(R * R))};
  float *met = rooms.of(Rows * S), *p = rooms.of(Rows * panelled(G)), *h = rooms.of(Rows * G), *k = rooms.of(Rows * panelled(H));
  float *x = rooms.of(Rows * panelled(M)), *y = rooms.of(Rows * panelled(Y)), *f = rooms.of(Rows * panelled(C)), *L = rooms.of(R * R);
  const auto added = [](Floats a, Floats b) ALWAYS { return add(a, b); };
  for (int64_t t = 0; t < m.T; t++) {
    const int64_t at = t * m.B + first;  // of the first row
    for (int64_t r = 0; r < Rows; r++) {
      const bool begins = m.reset != nullptr && m.reset[at + r];
      const float* from = begins ? m.start : t > 0 ? m.z + (at + r - m.B) * S : m.first + (first + r) * S;
      __builtin_memcpy(met + r * S, from, size_t(S) * sizeof(float));
    }
    times<Rows>(met, S, m.read, S, G, p, panelled(G));
    for (int64_t r = 0; r < Rows; r++) {
      float* kept = m.p + (at + r) * G;
      __builtin_memcpy(kept, m.drive + (at + r) * G, size_t(G) * sizeof(float));
      each(kept, p + r * panelled(G), G, added);
      each(h + r * G, kept, G, [](Floats, Floats a) ALWAYS { return gelu_of(a); });
    }
    for (int64_t i = 0; i < 2; i++) {  // the trunks of directions and of the metric
      times<Rows>(h + i * H, G, m.trunk + i * H * panelled(H), H, H, k, panelled(H));
      for (int64_t r = 0; r < Rows; r++) {
        float *own = k + r * panelled(H), *q = m.q + ((2 * t + i) * m.B + first + r) * H;
        each(own, m.trunk_b + i * H, H, added);
        __builtin_memcpy(q, own, size_t(H) * sizeof(float));
        each(own, q, H, [](Floats, Floats a) ALWAYS { return gelu_of(a); });
      }
      const int64_t wide = i == 0 ? M : Y;
      float* out = i == 0 ? x : y;
      if (wide == 0) continue;
      times<Rows>(k, panelled(H), i == 0 ? m.direction : m.metric, H, wide, out, panelled(wide));
      for (int64_t r = 0; r < Rows; r++) each(out + r * panelled(wide), i == 0 ? m.direction_b : m.metric_b, wide, added);
    }
    times<Rows>(h + 2 * H, G, m.flow, H, C, f, panelled(C));
    for (int64_t r = 0; r < Rows; r++) {
      float *c = m.c + (at + r) * C, *z = m.z + (at + r) * S;
      __builtin_memcpy(c, f + r * panelled(C), size_t(C) * sizeof(float));
      each(c, m.flow_b, C, [](Floats a, Floats b) ALWAYS { return tanh_of(add(a, b)); });
      geometry_of(m, at + r, x + r * panelled(M), y + r * panelled(Y), L);
      moved(m, at + r, met + r * S, z);
      if (m.pad != nullptr && m.pad[at + r]) __builtin_memcpy(z, met + r * S, size_t(S) * sizeof(float));
    }
  }
}

// The gradient of one row's velocity dv, which becomes that of what was naturalised; adds to those of d and U, in dY.
inline void through_solver(const DrmBackward& m, int64_t at, float* dv, float* y) {
  const int64_t S = m.S, R = m.R;
  const float *x = m.x + at * S, *U = m.U + at * R * S;
  float *dd = m.dY + at * (S + R * S), *dU = dd + S;
  naturalised(dv, m.inverse + at * S, m.Q + at * R * S, R, S, y);
  const Floats down = broadcast(-m.strength), up = broadcast(m.strength);
  sixteens(S, [&](auto get_at, auto put_at) ALWAYS { put_at(dd, fma(mul(down, get_at(y)), get_at(x), get_at(dd))); });
  for (int64_t r = 0; r < R; r++) {
    add_times(dU + r * S, -m.strength * dot_of(U + r * S, y, S), x, S);
    add_times(dU + r * S, -m.strength * dot_of(U + r * S, x, S), y, S);
  }
  each(dv, y, S, [&](Floats from, Floats to) ALWAYS { return fma(up, minus(to, from), from); });
}

// One row's gradients at a token from that of the state after it, up to the heads' outputs; dz becomes what goes on.
inline void token_back(const DrmBackward& m, int64_t at, float* dz, float* dv, float* y) {
  const int64_t S = m.S, N = m.N, R = m.R;
  const auto multiplied = [](Floats a, Floats b) ALWAYS { return mul(a, b); };
  if (m.squash != nullptr) each(dz, m.squash + at * S, S, multiplied);
  if (m.norm_moved != nullptr && m.norm_moved[at] > m.radius) {  // R z / |z| has no slope along z
    const float norm = m.norm_moved[at], *z = m.moved + at * S;
    add_times(dz, -dot_of(z, dz, S) / norm / norm, z, S);
    const Floats by = broadcast(m.radius / norm);
    each(dz, dz, S, [&](Floats a, Floats) ALWAYS { return mul(a, by); });
  }
  __builtin_memcpy(dv, m.dv + at * S, size_t(S) * sizeof(float));
  add_times(dv, m.dt, dz, S);
  through_solver(m, at, dv, y);
  float *dX = m.dX + at * (N * S + N), *da = dX + N * S, *dc = m.dc + at * m.coefficients();
  if (N == 0) __builtin_memcpy(dc, dv, size_t(S) * sizeof(float));
  for (int64_t n = 0; n < N; n++) {
    const float *V = m.V + (at * N + n) * S, mix = dot_of(V, dv, S);
    float* dV = dX + n * S;
    dc[n] = mix;
    da[n] += mix * m.c[at * N + n];
    add_times(dV, m.mix[at * N + n], dv, S);
    if (m.norm == nullptr) continue;
    add_times(dV, -dot_of(dV, V, S), V, S);  // what lies along a unit vector has no effect on it
    const Floats by = broadcast(m.norm[at * N + n]);
    each(dV, dV, S, [&](Floats a, Floats) ALWAYS { return div(a, by); });
  }
  each(dc, m.c_slope + at * m.coefficients(), m.coefficients(), multiplied);
  each(da, m.gate_slope + at * N, N, multiplied);
  float* dY = m.dY + at * (S + R * S);
  each(dY, m.raw_slope + at * S, S, multiplied);
  const Floats share = broadcast(R > 0 ? 1.0f / __builtin_sqrtf(float(R)) : 1.0f);
  each(dY + S, dY + S, R * S, [&](Floats a, Floats) ALWAYS { return mul(a, share); });
}

template <int Rows>
void drm_rows_back(const DrmBackward& m, int64_t first) {
  const int64_t S = m.S, H = m.H, N = m.N, G = 3 * H, M = N * S + N, Y = S + m.R * S, C = m.coefficients();
  Rooms rooms{scratch<float>(DENSE, (Rows + 2) * panelled(S) + 2 * Rows * panelled(S) + Rows * panelled(H))};
  float *dz = rooms.of(Rows * S), *frozen = rooms.of(Rows * S), *dv = rooms.of(S), *y = rooms.of(S);
  float *s = rooms.of(Rows * panelled(S)), *h = rooms.of(Rows * panelled(H));
  const auto added = [](Floats a, Floats b) ALWAYS { return add(a, b); };
  const auto multiplied = [](Floats a, Floats b) ALWAYS { return mul(a, b); };
  __builtin_memset(dz, 0, size_t(Rows * S) * sizeof(float));
  for (int64_t t = m.T - 1; t >= 0; t--) {
    const int64_t at = t * m.B + first;
    each(dz, m.dz + at * S, Rows * S, added);
    for (int64_t r = 0; r < Rows; r++) {
      if (m.pad != nullptr && m.pad[at + r]) {  // around the token, and nothing of it through the token
        __builtin_memcpy(frozen + r * S, dz + r * S, size_t(S) * sizeof(float));
        __builtin_memset(dz + r * S, 0, size_t(S) * sizeof(float));
      }
      token_back(m, at + r, dz + r * S, dv, y);
    }
    for (int64_t i = 0; i < 3; i++) {  // trunks, then the flow
      const float *a = m.dc + at * C, *panels = m.flow;
      int64_t depth = C, lda = C;
      if (i < 2) {
        const int64_t wide = i == 0 ? M : Y;
        float* dq = m.dq + ((2 * t + i) * m.B + first) * H;
        times<Rows>((i == 0 ? m.dX : m.dY) + at * wide, wide, i == 0 ? m.direction : m.metric, wide, H, h, panelled(H));
        for (int64_t r = 0; r < Rows; r++) {
          __builtin_memcpy(dq + r * H, h + r * panelled(H), size_t(H) * sizeof(float));
          each(dq + r * H, m.q_slope + ((2 * t + i) * m.B + first + r) * H, H, multiplied);
        }
        a = dq, panels = m.trunk + i * H * panelled(H), depth = H, lda = H;
      }
      times<Rows>(a, lda, panels, depth, H, h, panelled(H));
      for (int64_t r = 0; r < Rows; r++) {
        float* dp = m.dp + (at + r) * G + i * H;
        __builtin_memcpy(dp, h + r * panelled(H), size_t(H) * sizeof(float));
        each(dp, m.p_slope + (at + r) * G + i * H, H, multiplied);
      }
    }
    times<Rows>(m.dp + at * G, G, m.read, G, S, s, panelled(S));
    for (int64_t r = 0; r < Rows; r++) {
      each(dz + r * S, s + r * panelled(S), S, added);
      if (m.pad != nullptr && m.pad[at + r]) each(dz + r * S, frozen + r * S, S, added);
      if (m.reset == nullptr || !m.reset[at + r]) continue;
      each(m.dstart + (first + r) * S, dz + r * S, S, added);  // the state before was z0, and the past gets nothing
      __builtin_memset(dz + r * S, 0, size_t(S) * sizeof(float));
    }
  }
  __builtin_memcpy(m.dfirst + first * S, dz, size_t(Rows * S) * sizeof(float));
}

template <class M>
void drm(const M& m, int64_t first, int64_t last) {
  some_rows(first, last, [&](auto rows, int64_t row) {
    if constexpr (std::is_same_v<M, Drm>) drm_rows<rows>(m, row);
    else drm_rows_back<rows>(m, row);
  });
}
