// The recurrence of perspectron.designs.drm.op and its adjoint, a token of some texts at a time.

#if defined(PERSPECTRON_TYPES)

// With G = 3H, M = NS + N, Y = S + RS and C coefficients. Weights are in panels of 32 columns, of
// y = x W: see walk.inl.
struct DrmSizes {
  int64_t T, B, S, H, N, R;
  float dt, radius, strength;
  int64_t coefficients() const { return N > 0 ? N : S; }
};

struct Drm : DrmSizes {
  const float *drive, *first, *start;                     // [T][B][G], [B][S], [S] of a document
  const float *read, *trunk, *direction, *metric, *flow;  // S to G, 2 × H to H, H to M, H to Y, H to C
  const float *trunk_b, *direction_b, *metric_b, *flow_b;
  const uint8_t *reset, *pad;                             // [T][B], or null
  float *z, *p, *c, *x, *v;                               // [T][B][S], [T][B][G], [T][B][C], [T][B][S] both
  float *V, *a, *d, *U, *inverse, *Q;                     // [T][B] of [N][S], [N], [S], [R][S], [S], [R][S]
  float *q, *raw;                                         // [T][2][B][H], [T][B][S]
  float* norm;                                            // [T][B][N], or null where directions are no unit vectors
  float damping, floor, gate_bias, gate_temperature;
  bool clip, squash;
};

struct DrmBackward : DrmSizes {
  const float *dz, *dv;                                   // [T][B][S] both
  const float *p_slope, *q_slope, *c_slope;               // as p, q and c
  const float *mix, *gate_slope, *raw_slope;              // as a, a and raw
  const float* squash;                                    // as z, or null
  const float *moved, *norm_moved;                        // as z, [T][B]; or null both
  const float *c, *x, *V, *U, *inverse, *Q, *norm;        // as above
  const float *read, *trunk, *direction, *metric, *flow;  // the other way: G to S and so on
  const uint8_t *reset, *pad;
  float *dX, *dY, *dc, *dq, *dp;                          // [T][B][M], [T][B][Y], both added to; as c, q, p
  float *dstart, *dfirst;                                 // [B][S] both, the first added to
};

#elif defined(PERSPECTRON_KERNELS)

// Abramowitz and Stegun 7.1.26, as PyTorch has it: to 1.5e-7.
inline Floats gelu_of(Floats x) {
  const Floats u = mul(x, broadcast(0.70710678f)), size = magnitude(u), one = broadcast(1.0f);
  const Floats t = div(one, fma(broadcast(0.3275911f), size, one));
  Floats sum = broadcast(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fma(sum, t, broadcast(c));
  const Floats tail = mul(mul(sum, t), exponential(mul(mul(size, size), broadcast(-1.0f))));
  const Floats below = mul(broadcast(0.5f), tail), above = minus(one, below);  // the normal law at x is one of them
  return mul(x, chosen(x, broadcast(0), below, above));
}

// log(1 + e^x) = max(x, 0) + 2 artanh(w), w = u / (2 + u), u = e^−|x|
inline Floats softplus_of(Floats x) {
  const Floats u = exponential(mul(magnitude(x), broadcast(-1.0f))), w = div(u, add(u, broadcast(2.0f))), square = mul(w, w);
  Floats sum = broadcast(1.0f / 13);
  for (float c : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) sum = fma(sum, square, broadcast(c));
  return fma(mul(w, broadcast(2.0f)), sum, greatest(broadcast(0), x));
}

// y = (G + λI)⁻¹ v = v / D − Qᵀ Q v
inline void naturalised(const float* v, const float* inverse, const float* Q, int64_t R, int64_t S, float* y) {
  made(y, v, inverse, S, product_of);
  for (int64_t r = 0; r < R; r++) add_times(y, -dot_of(Q + r * S, v, S), Q + r * S, S);
}

// Q = L⁻¹ U D⁻¹ with L Lᵀ = I + U D⁻¹ Uᵀ; L: room for R · R.
inline void solved(const float* U, const float* inverse, int64_t R, int64_t S, float* L, float* Q) {
  for (int64_t r = 0; r < R; r++) made(Q + r * S, U + r * S, inverse, S, product_of);
  for (int64_t r = 0; r < R; r++)
    for (int64_t s = 0; s <= r; s++) {
      float sum = dot_of(Q + r * S, U + s * S, S) + (r == s ? 1.0f : 0.0f);
      for (int64_t i = 0; i < s; i++) sum -= L[r * R + i] * L[s * R + i];
      L[r * R + s] = r == s ? __builtin_sqrtf(sum) : sum / L[s * R + s];
    }
  for (int64_t r = 0; r < R; r++) {
    for (int64_t s = 0; s < r; s++) add_times(Q + r * S, -L[r * R + s], Q + s * S, S);
    scaled(Q + r * S, 1.0f / L[r * R + r], Q + r * S, S);
  }
}

inline float root_of_rank(const DrmSizes& m) { return m.R > 0 ? 1.0f / __builtin_sqrtf(float(m.R)) : 1.0f; }

// One row's geometry at a token, from what the heads gave, X = (V, gates) and Y = (d, U).
inline void geometry_of(const Drm& m, int64_t at, const float* X, const float* Y, float* L) {
  const int64_t S = m.S, N = m.N, R = m.R;
  float *d = m.d + at * S, *inverse = m.inverse + at * S, *U = m.U + at * R * S;
  for (int64_t n = 0; n < N; n++) {
    const float* from = X + n * S;
    float norm = 1.0f;
    if (m.norm != nullptr) {
      norm = __builtin_sqrtf(dot_of(from, from, S));
      norm = m.norm[at * N + n] = norm < 1e-12f ? 1e-12f : norm;  // NORM of drm_loop.py
    }
    const Floats by = broadcast(norm);
    made(m.V + (at * N + n) * S, from, S, [&](Floats x) ALWAYS { return div(x, by); });
  }
  const Floats bias = broadcast(m.gate_bias), warm = broadcast(m.gate_temperature);
  made(m.a + at * N, X + N * S, N, [&](Floats x) ALWAYS { return sigmoid_of(bounded(div(add(x, bias), warm))); });
  copied(Y, m.raw + at * S, S);
  const Floats floor = broadcast(m.floor), damping = broadcast(m.damping), one = broadcast(1.0f);
  made(d, Y, S, [&](Floats x) ALWAYS { return add(softplus_of(x), floor); });
  made(inverse, d, S, [&](Floats x) ALWAYS { return div(one, add(x, damping)); });
  scaled(U, root_of_rank(m), Y + S, R * S);
  solved(U, inverse, R, S, L, m.Q + at * R * S);
}

// One row's velocity and the state after a token, z; before it, `met`.
inline void moved(const Drm& m, int64_t at, const float* met, float* z) {
  const int64_t S = m.S, N = m.N;
  float *c = m.c + at * m.coefficients(), *x = m.x + at * S, *v = m.v + at * S;
  if (N == 0) copied(c, z, S);
  else cleared(z, S);
  for (int64_t n = 0; n < N; n++) add_times(z, m.a[at * N + n] * c[n], m.V + (at * N + n) * S, S);
  naturalised(z, m.inverse + at * S, m.Q + at * m.R * S, m.R, S, x);
  between(v, z, x, m.strength, S);
  const Floats dt = broadcast(m.dt);
  made(z, met, v, S, [&](Floats a, Floats b) ALWAYS { return fma(dt, b, a); });
  if (!m.clip) return;
  const float norm = __builtin_sqrtf(dot_of(z, z, S));
  const Floats by = broadcast(norm > m.radius ? norm : m.radius), radius = broadcast(m.radius);
  if (m.squash) made(z, z, S, [&](Floats a) ALWAYS { return mul(tanh_of(div(a, by)), radius); });
  else made(z, z, S, [&](Floats a) ALWAYS { return mul(div(a, by), radius); });
}

template <int Rows>
void drm_rows(const Drm& m, int64_t first) {
  const int64_t S = m.S, H = m.H, N = m.N, R = m.R, G = 3 * H, M = N * S + N, Y = S + R * S, C = m.coefficients();
  Rooms rooms{scratch<float>(DENSE, Rows * (panelled(S) + 2 * panelled(G) + panelled(H) + panelled(M) + panelled(Y) + panelled(C)) + panelled(R * R))};
  float *met = rooms.of(Rows * S), *p = rooms.of(Rows * panelled(G)), *h = rooms.of(Rows * G), *k = rooms.of(Rows * panelled(H));
  float *x = rooms.of(Rows * panelled(M)), *y = rooms.of(Rows * panelled(Y)), *f = rooms.of(Rows * panelled(C)), *L = rooms.of(R * R);
  for (int64_t t = 0; t < m.T; t++) {
    const int64_t at = t * m.B + first;  // of the first row
    for (int64_t r = 0; r < Rows; r++) {
      const bool begins = m.reset != nullptr && m.reset[at + r];
      copied(begins ? m.start : t > 0 ? m.z + (at + r - m.B) * S : m.first + (first + r) * S, met + r * S, S);
    }
    times<Rows>(met, S, m.read, S, G, p, panelled(G));
    for (int64_t r = 0; r < Rows; r++) {
      float* kept = m.p + (at + r) * G;
      made(kept, m.drive + (at + r) * G, p + r * panelled(G), G, sum_of);
      made(h + r * G, kept, G, gelu_of);
    }
    for (int64_t i = 0; i < 2; i++) {  // the trunks of directions and of the metric
      times<Rows>(h + i * H, G, m.trunk + i * H * panelled(H), H, H, k, panelled(H));
      for (int64_t r = 0; r < Rows; r++) {
        float *own = k + r * panelled(H), *q = m.q + ((2 * t + i) * m.B + first + r) * H;
        made(q, own, m.trunk_b + i * H, H, sum_of);
        made(own, q, H, gelu_of);
      }
      const int64_t wide = i == 0 ? M : Y;
      float* out = i == 0 ? x : y;
      times<Rows>(k, panelled(H), i == 0 ? m.direction : m.metric, H, wide, out, panelled(wide));
      for (int64_t r = 0; r < Rows; r++) add_to(out + r * panelled(wide), i == 0 ? m.direction_b : m.metric_b, wide);
    }
    times<Rows>(h + 2 * H, G, m.flow, H, C, f, panelled(C));
    for (int64_t r = 0; r < Rows; r++) {
      float* z = m.z + (at + r) * S;
      made(m.c + (at + r) * C, f + r * panelled(C), m.flow_b, C, [](Floats a, Floats b) ALWAYS { return tanh_of(add(a, b)); });
      geometry_of(m, at + r, x + r * panelled(M), y + r * panelled(Y), L);
      moved(m, at + r, met + r * S, z);
      if (m.pad != nullptr && m.pad[at + r]) copied(met + r * S, z, S);
    }
  }
}

// The gradient of one row's velocity dv, which becomes that of what was naturalised; adds to those of d and U, in dY.
inline void through_solver(const DrmBackward& m, int64_t at, float* dv, float* y) {
  const int64_t S = m.S, R = m.R;
  const float *x = m.x + at * S, *U = m.U + at * R * S;
  float *dd = m.dY + at * (S + R * S), *dU = dd + S;
  naturalised(dv, m.inverse + at * S, m.Q + at * R * S, R, S, y);
  const Floats down = broadcast(-m.strength);
  sixteens(S, [&](auto get_at, auto put_at) ALWAYS { put_at(dd, fma(mul(down, get_at(y)), get_at(x), get_at(dd))); });
  for (int64_t r = 0; r < R; r++) {
    add_times(dU + r * S, -m.strength * dot_of(U + r * S, y, S), x, S);
    add_times(dU + r * S, -m.strength * dot_of(U + r * S, x, S), y, S);
  }
  between(dv, dv, y, m.strength, S);
}

// One row's gradients at a token from that of the state after it, up to the heads' outputs; dz becomes what goes on.
inline void token_back(const DrmBackward& m, int64_t at, float* dz, float* dv, float* y) {
  const int64_t S = m.S, N = m.N, R = m.R, C = m.coefficients();
  if (m.squash != nullptr) made(dz, dz, m.squash + at * S, S, product_of);
  if (m.norm_moved != nullptr && m.norm_moved[at] > m.radius) {  // R z / |z| has no slope along z
    const float norm = m.norm_moved[at], *z = m.moved + at * S;
    add_times(dz, -dot_of(z, dz, S) / norm / norm, z, S);
    scaled(dz, m.radius / norm, dz, S);
  }
  const Floats dt = broadcast(m.dt);
  made(dv, m.dv + at * S, dz, S, [&](Floats a, Floats b) ALWAYS { return fma(dt, b, a); });
  through_solver(m, at, dv, y);
  float *dX = m.dX + at * (N * S + N), *da = dX + N * S, *dc = m.dc + at * C;
  if (N == 0) copied(dv, dc, S);
  for (int64_t n = 0; n < N; n++) {
    const float *V = m.V + (at * N + n) * S, mix = dot_of(V, dv, S);
    float* dV = dX + n * S;
    dc[n] = mix;
    da[n] += mix * m.c[at * N + n];
    add_times(dV, m.mix[at * N + n], dv, S);
    if (m.norm == nullptr) continue;
    add_times(dV, -dot_of(dV, V, S), V, S);  // what lies along a unit vector has no effect on it
    const Floats by = broadcast(m.norm[at * N + n]);
    made(dV, dV, S, [&](Floats a) ALWAYS { return div(a, by); });
  }
  made(dc, dc, m.c_slope + at * C, C, product_of);
  made(da, da, m.gate_slope + at * N, N, product_of);
  float* dY = m.dY + at * (S + R * S);
  made(dY, dY, m.raw_slope + at * S, S, product_of);
  scaled(dY + S, root_of_rank(m), dY + S, R * S);
}

template <int Rows>
void drm_rows_back(const DrmBackward& m, int64_t first) {
  const int64_t S = m.S, H = m.H, N = m.N, G = 3 * H, M = N * S + N, Y = S + m.R * S, C = m.coefficients();
  Rooms rooms{scratch<float>(DENSE, (3 * Rows + 2) * panelled(S) + Rows * panelled(H))};
  float *dz = rooms.of(Rows * S), *frozen = rooms.of(Rows * S), *dv = rooms.of(S), *y = rooms.of(S);
  float *s = rooms.of(Rows * panelled(S)), *h = rooms.of(Rows * panelled(H));
  cleared(dz, Rows * S);
  for (int64_t t = m.T - 1; t >= 0; t--) {
    const int64_t at = t * m.B + first;
    add_to(dz, m.dz + at * S, Rows * S);
    for (int64_t r = 0; r < Rows; r++) {
      if (m.pad != nullptr && m.pad[at + r]) {  // around the token, and nothing of it through the token
        copied(dz + r * S, frozen + r * S, S);
        cleared(dz + r * S, S);
      }
      token_back(m, at + r, dz + r * S, dv, y);
    }
    for (int64_t i = 0; i < 3; i++) {  // trunks, then the flow
      const float *a = m.dc + at * C, *panels = m.flow;
      int64_t depth = C;
      if (i < 2) {
        const int64_t wide = i == 0 ? M : Y;
        float* dq = m.dq + ((2 * t + i) * m.B + first) * H;
        times<Rows>((i == 0 ? m.dX : m.dY) + at * wide, wide, i == 0 ? m.direction : m.metric, wide, H, h, panelled(H));
        for (int64_t r = 0; r < Rows; r++)
          made(dq + r * H, h + r * panelled(H), m.q_slope + ((2 * t + i) * m.B + first + r) * H, H, product_of);
        a = dq, panels = m.trunk + i * H * panelled(H), depth = H;
      }
      times<Rows>(a, depth, panels, depth, H, h, panelled(H));
      for (int64_t r = 0; r < Rows; r++) {
        const int64_t own = (at + r) * G + i * H;
        made(m.dp + own, h + r * panelled(H), m.p_slope + own, H, product_of);
      }
    }
    times<Rows>(m.dp + at * G, G, m.read, G, S, s, panelled(S));
    for (int64_t r = 0; r < Rows; r++) {
      add_to(dz + r * S, s + r * panelled(S), S);
      if (m.pad != nullptr && m.pad[at + r]) add_to(dz + r * S, frozen + r * S, S);
      if (m.reset == nullptr || !m.reset[at + r]) continue;
      add_to(m.dstart + (first + r) * S, dz + r * S, S);  // the state before was z0, and the past gets nothing
      cleared(dz + r * S, S);
    }
  }
  copied(dz, m.dfirst + first * S, Rows * S);
}

template <class M>
void drm(const M& m, int64_t first, int64_t last) {
  some_rows(first, last, [&](auto rows, int64_t row) {
    if constexpr (std::is_same_v<M, Drm>) drm_rows<rows>(m, row);
    else drm_rows_back<rows>(m, row);
  });
}

#elif defined(PERSPECTRON_API)

namespace {

// The fields of a struct from pointers in their order.
template <class M, class P, size_t n>
void* const* taken(M& m, P* M::* const (&fields)[n], void* const* from) {
  for (const auto field : fields) m.*field = static_cast<P*>(*from++);
  return from;
}

template <class M>
void sized(M& m, const int64_t* sizes, const double* law) {
  m.T = sizes[0], m.B = sizes[1], m.S = sizes[2], m.H = sizes[3], m.N = sizes[4], m.R = sizes[5];
  m.dt = float(law[0]), m.radius = float(law[1]), m.strength = float(law[2]);
}

}  // namespace

// pointers: the fields of Drm or DrmBackward in their order; sizes: T, B, S, H, N, R; law: dt, radius, strength, and of
// the first damping, floor, gate_bias, gate_temperature, clip, squash.
API void pspx_drm(void* const* pointers, const int64_t* sizes, const double* law, int threads) {
  Drm m{};
  sized(m, sizes, law);
  m.damping = float(law[3]), m.floor = float(law[4]), m.gate_bias = float(law[5]), m.gate_temperature = float(law[6]);
  m.clip = law[7] != 0, m.squash = law[8] != 0;
  const float* Drm::* const given[] = {&Drm::drive, &Drm::first, &Drm::start, &Drm::read, &Drm::trunk, &Drm::direction,
                                       &Drm::metric, &Drm::flow, &Drm::trunk_b, &Drm::direction_b, &Drm::metric_b, &Drm::flow_b};
  const uint8_t* Drm::* const masks[] = {&Drm::reset, &Drm::pad};
  float* Drm::* const made[] = {&Drm::z, &Drm::p, &Drm::c, &Drm::x, &Drm::v, &Drm::V, &Drm::a, &Drm::d, &Drm::U,
                                &Drm::inverse, &Drm::Q, &Drm::q, &Drm::raw, &Drm::norm};
  taken(m, made, taken(m, masks, taken(m, given, pointers)));
  shared(threads, m.B, ceil_div(m.B, threads), [&](int64_t first, int64_t last) { kernels().drm(m, first, last); });
}

API void pspx_drm_backward(void* const* pointers, const int64_t* sizes, const double* law, int threads) {
  using M = DrmBackward;
  M m{};
  sized(m, sizes, law);
  const float* M::* const given[] = {&M::dz, &M::dv, &M::p_slope, &M::q_slope, &M::c_slope, &M::mix, &M::gate_slope,
                                     &M::raw_slope, &M::squash, &M::moved, &M::norm_moved, &M::c, &M::x, &M::V, &M::U,
                                     &M::inverse, &M::Q, &M::norm, &M::read, &M::trunk, &M::direction, &M::metric, &M::flow};
  const uint8_t* M::* const masks[] = {&M::reset, &M::pad};
  float* M::* const made[] = {&M::dX, &M::dY, &M::dc, &M::dq, &M::dp, &M::dstart, &M::dfirst};
  taken(m, made, taken(m, masks, taken(m, given, pointers)));
  shared(threads, m.B, ceil_div(m.B, threads), [&](int64_t first, int64_t last) { kernels().drm_backward(m, first, last); });
}

#endif
