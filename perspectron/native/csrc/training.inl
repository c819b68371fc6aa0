// What a training does between its matrix products, forward and backward: the loss, norms, gated products, GELU, decays,
// mixes with the token before, short convolutions. T is float or bfloat16 (as uint16_t); sums are of float.

inline Floats get(const float* p) { return load_floats(p); }
inline Floats get(const float* p, int64_t n) { return load_floats(p, n); }
inline void put(float* p, Floats x) { store(p, x); }
inline void put(float* p, Floats x, int64_t n) { store(p, x, n); }
inline Floats get(const uint16_t* p) { return load_brief(p); }
inline Floats get(const uint16_t* p, int64_t n) {
  uint16_t whole[16] = {};
  __builtin_memcpy(whole, p, size_t(n) * 2);
  return load_brief(whole);
}
inline void put(uint16_t* p, Floats x) { store_brief(p, x); }
inline void put(uint16_t* p, Floats x, int64_t n) {
  uint16_t whole[16];
  store_brief(whole, x);
  __builtin_memcpy(p, whole, size_t(n) * 2);
}

// f(i, all) for each 16 numbers from i on, and f(i, rest) for what is left: the numbers there are at i.
template <class F>
inline ALWAYS void sixteens(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f([i](const auto* p) ALWAYS { return get(p + i); }, [i](auto* p, Floats x) ALWAYS { put(p + i, x); });
  if (const int64_t rest = n - i; rest > 0)
    f([i, rest](const auto* p) ALWAYS { return get(p + i, rest); }, [i, rest](auto* p, Floats x) ALWAYS { put(p + i, x, rest); });
}

inline Floats minus(Floats a, Floats b) { return add(a, mul(b, broadcast(-1.0f))); }
// Of silu's arguments: below −87 its value is 0 to float's precision, and `exponential` goes no further.
inline Floats bounded(Floats x) { return greatest(broadcast(-87.0f), x); }
inline Floats sigmoid_of(Floats x) {
  return div(broadcast(1.0f), add(broadcast(1.0f), exponential(mul(x, broadcast(-1.0f)))));
}

// Σ e^x in two parts whose sum is its logarithm: max x, and the logarithm of Σ e^(x − max x). The second is NaN where any
// x is NaN or infinite. (`greatest` passes over NaN; `exponential` takes −∞ for −87.)
template <class T>
void log_total(const T* x, int64_t n, float* parts) {
  Floats top = broadcast(-__FLT_MAX__), sum = broadcast(0), wrong = broadcast(0);
  sixteens(n / 16 * 16, [&](auto at, auto) ALWAYS {
    top = greatest(at(x), top);
    wrong = fma(greatest(broadcast(-__FLT_MAX__), at(x)), broadcast(0), wrong);
  });
  float lanes[16], most, bad = tree(wrong);
  store(lanes, top);
  most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  for (int64_t i = n / 16 * 16; i < n; i++) {
    float one[16];
    store(one, get(x + i, 1));
    most = one[0] > most ? one[0] : most, bad += one[0] > -__FLT_MAX__ ? one[0] * 0 : one[0] != one[0] ? one[0] : 0;
  }
  const Floats down = broadcast(-most);
  sixteens(n / 16 * 16, [&](auto at, auto) ALWAYS { sum = add(sum, exponential(add(at(x), down))); });
  float total = tree(sum) + bad;
  for (int64_t i = n / 16 * 16; i < n; i++) {
    float one[16];
    store(one, exponential(add(get(x + i, 1), down)));
    total += one[0];
  }
  parts[0] = most, parts[1] = __builtin_logf(total);
}

template <class T>
void entropy(const Entropy& e, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const T* x = static_cast<const T*>(e.logits) + row * e.V;
    const int64_t target = e.target[row];
    float own[16] = {};
    if (target >= 0) store(own, get(x + target, 1));
    float* total = e.total + 2 * row;
    total[0] = total[1] = 0;
    if (target >= 0) log_total(x, e.V, total);
    e.loss[row] = target < 0 ? 0 : total[1] - (own[0] - total[0]);
  }
}

// gradient = g · (e^(x − max x − log) − 1 at the target)
template <class T>
void entropy_backward(const Entropy& e, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const T* x = static_cast<const T*>(e.logits) + row * e.V;
    T* into = static_cast<T*>(e.gradient) + row * e.V;
    const int64_t target = e.target[row];
    if (target < 0) {
      __builtin_memset(into, 0, size_t(e.V) * sizeof(T));
      continue;
    }
    const Floats top = broadcast(-e.total[2 * row]), log = broadcast(-e.total[2 * row + 1]), g = broadcast(e.g);
    const auto share = [&](Floats x) ALWAYS { return exponential(add(add(x, top), log)); };
    sixteens(e.V, [&](auto at, auto to) ALWAYS { to(into, mul(share(at(x)), g)); });
    float own[16];
    store(own, share(get(x + target, 1)));
    put(into + target, broadcast((own[0] - 1) * e.g), 1);
  }
}

// y = x · r · weight with r = 1 / √(mean x² + eps)
void norm_rows(const Norm& n, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const float* x = n.x + row * n.D;
    const float r = 1.0f / __builtin_sqrtf(dot_of(x, x, n.D) / float(n.D) + n.eps);
    n.r[row] = r;
    sixteens(n.D, [&](auto at, auto to) ALWAYS { to(n.y + row * n.D, mul(mul(at(x), broadcast(r)), at(n.weight))); });
  }
}

// dx = r · (dy · weight − x · r² · mean(dy · weight · x)); adds dy · x · r to dweight.
void norm_backward(const Norm& n, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const float *x = n.x + row * n.D, *dy = n.dy + row * n.D, r = n.r[row];
    float *dx = n.dx + row * n.D, *dweight = n.dweight + row / n.rows * n.D;
    Floats sum = broadcast(0);
    sixteens(n.D, [&](auto at, auto to) ALWAYS {
      const Floats scaled = mul(at(dy), at(x));
      sum = fma(scaled, at(n.weight), sum);
      to(dweight, fma(scaled, broadcast(r), at(dweight)));
    });
    const Floats back = broadcast(-tree(sum) / float(n.D) * r * r * r), scale = broadcast(r);
    sixteens(n.D, [&](auto at, auto to) ALWAYS {
      to(dx, fma(at(x), back, mul(mul(at(dy), at(n.weight)), scale)));
    });
  }
}

// The token before row (b, t), null where it counts as zeros.
inline const float* before_row(const Shifted& s, int64_t row) {
  if (s.reset != nullptr && s.reset[row]) return nullptr;
  return row % s.T == 0 ? s.last + row / s.T * s.D : s.x + (row - 1) * s.D;
}

void shifted(const Shifted& s, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    const float *x = s.x + row * s.D, *before = before_row(s, row);
    sixteens(s.D, [&](auto at, auto to) ALWAYS {
      const Floats own = at(x), apart = minus(before == nullptr ? broadcast(0) : at(before), own);
      for (int64_t n = 0; n < s.N; n++) to(s.y[n] + row * s.D, fma(apart, at(s.mix + n * s.D), own));
    });
  }
}

// What row t gives back to the token before it: Σ_n dy_n · mix_n.
inline ALWAYS void given_back(const Shifted& s, int64_t row, float* back) {
  sixteens(s.D, [&](auto at, auto to) ALWAYS {
    Floats sum = broadcast(0);
    for (int64_t n = 0; n < s.N; n++) sum = fma(at(s.dy[n] + row * s.D), at(s.mix + n * s.D), sum);
    to(back, sum);
  });
}

// dx_t = Σ_n dy_n − Σ_n dy_n · mix_n, and what token t + 1 gives back; adds dy_n · (before − x) to dmix_n.
void shifted_backward(const Shifted& s, int64_t first, int64_t last) {
  float* back = scratch<float>(BORDERS, s.D);  // of the row after this one
  for (int64_t row = last - 1; row >= first; row--) {
    const bool ends = (row + 1) % s.T == 0 || (s.reset != nullptr && s.reset[row + 1]);  // its document, or the chunk
    if (ends) __builtin_memset(back, 0, size_t(s.D) * sizeof(float));
    else if (row == last - 1) given_back(s, row + 1, back);
    const float *x = s.x + row * s.D, *before = before_row(s, row);
    float* dmix = s.dmix + row / s.rows * s.N * s.D;
    sixteens(s.D, [&](auto at, auto to) ALWAYS {
      const Floats apart = minus(before == nullptr ? broadcast(0) : at(before), at(x));
      Floats all = broadcast(0), own = broadcast(0);
      for (int64_t n = 0; n < s.N; n++) {
        const Floats d = at(s.dy[n] + row * s.D);
        all = add(all, d), own = fma(d, at(s.mix + n * s.D), own);
        to(dmix + n * s.D, fma(d, apart, at(dmix + n * s.D)));
      }
      to(s.dx + row * s.D, add(minus(all, own), at(back)));
      to(back, own);
      if (row % s.T == 0 && before != nullptr) to(s.dlast + row / s.T * s.D, own);
    });
  }
}

// y = silu(a) · b
template <class T>
void gated(const Gated& g, int64_t first, int64_t last) {
  const T *a = static_cast<const T*>(g.a) + first, *b = static_cast<const T*>(g.b) + first;
  T* y = static_cast<T*>(g.y) + first;
  sixteens(last - first, [&](auto at, auto to) ALWAYS { to(y, mul(mul(bounded(at(a)), sigmoid_of(at(a))), at(b))); });
}

// d silu(a) = s + a s (1 − s), with s = σ(a)
inline Floats silu_slope(Floats a, Floats s) { return fma(mul(a, s), minus(broadcast(1.0f), s), s); }

template <class T>
void gated_backward(const Gated& g, int64_t first, int64_t last) {
  const T *a = static_cast<const T*>(g.a) + first, *b = static_cast<const T*>(g.b) + first;
  const T* dy = static_cast<const T*>(g.dy) + first;
  T *da = static_cast<T*>(g.da) + first, *db = static_cast<T*>(g.db) + first;
  sixteens(last - first, [&](auto at, auto to) ALWAYS {
    const Floats x = bounded(at(a)), s = sigmoid_of(x), d = at(dy), other = at(b);
    to(da, mul(mul(d, other), silu_slope(x, s)));
    to(db, mul(d, mul(x, s)));
  });
}

constexpr float BEND = 1.5957691216057308f, CUBE = 0.044715f;  // 2 √(2/π)

template <class T>
void gelu(const Gelu& g, int64_t first, int64_t last) {
  const T* x = static_cast<const T*>(g.x) + first;
  T* y = static_cast<T*>(g.y) + first;
  sixteens(last - first, [&](auto at, auto to) ALWAYS {
    const Floats own = bounded(at(x)), inner = fma(mul(own, own), broadcast(BEND * CUBE), broadcast(BEND));
    to(y, mul(own, sigmoid_of(mul(own, inner))));
  });
}

// dx = dy · (s + x s (1 − s) · 2 √(2/π) (1 + 3 · 0.044715 x²)), with s the σ of y
template <class T>
void gelu_backward(const Gelu& g, int64_t first, int64_t last) {
  const T *x = static_cast<const T*>(g.x) + first, *dy = static_cast<const T*>(g.dy) + first;
  T* dx = static_cast<T*>(g.dx) + first;
  sixteens(last - first, [&](auto at, auto to) ALWAYS {
    const Floats own = least(broadcast(87.0f), bounded(at(x))), square = mul(own, own);
    const Floats s = sigmoid_of(mul(own, fma(square, broadcast(BEND * CUBE), broadcast(BEND))));
    const Floats slope = mul(mul(own, s), minus(broadcast(1.0f), s));
    to(dx, mul(at(dy), fma(slope, fma(square, broadcast(3 * BEND * CUBE), broadcast(BEND)), s)));
  });
}

// γ = σ(p), y = √(1 − γ²) v; 1 − γ is σ(−p), which does not vanish where γ rounds to 1.
inline Floats height(Floats p, Floats s) { return root(mul(sigmoid_of(mul(p, broadcast(-1.0f))), add(s, broadcast(1.0f)))); }

template <class T>
void decayed(const Decayed& u, int64_t first, int64_t last) {
  const T *p = static_cast<const T*>(u.p) + first, *v = static_cast<const T*>(u.v) + first;
  sixteens(last - first, [&](auto at, auto to) ALWAYS {
    const Floats x = at(p), s = sigmoid_of(x);
    to(u.gamma + first, s);
    to(u.y + first, mul(height(x, s), at(v)));
  });
}

// dp = γ (1 − γ) dγ − γ² / (1 + γ) y dy
template <class T>
void decayed_backward(const Decayed& u, int64_t first, int64_t last) {
  const T *p = static_cast<const T*>(u.p) + first, *v = static_cast<const T*>(u.v) + first;
  T *dp = static_cast<T*>(u.dp) + first, *dv = static_cast<T*>(u.dv) + first;
  sixteens(last - first, [&](auto at, auto to) ALWAYS {
    const Floats x = at(p), s = sigmoid_of(x), rest = sigmoid_of(mul(x, broadcast(-1.0f)));
    const Floats down = mul(height(x, s), at(u.dy + first)), slope = div(mul(s, s), add(s, broadcast(1.0f)));
    to(dv, down);
    to(dp, minus(mul(mul(s, rest), at(u.dgamma + first)), mul(mul(slope, at(v)), down)));
  });
}

// What a channel's sum is before the swish: bias + Σ_j weight_j u_{t+j}, without the taps that the token may not see.
template <class At>
inline ALWAYS Floats taps_of(const Conv& c, const float* u, const float* sees, At at) {
  Floats sum = at(c.bias);
  for (int64_t j = 0; j < c.W; j++)
    if (sees == nullptr || sees[j] != 0) sum = fma(at(c.weight + j * c.C), at(u + j * c.C), sum);
  return sum;
}

void convolve(const Conv& c, int64_t first, int64_t last) {
  for (int64_t b = first; b < last; b++)
    for (int64_t t = 0; t < c.T; t++) {
      const float* u = c.u + (b * (c.T + c.W - 1) + t) * c.C;
      const float* sees = c.sees == nullptr ? nullptr : c.sees + (b * c.T + t) * c.W;
      sixteens(c.C, [&](auto at, auto to) ALWAYS {
        const Floats x = bounded(taps_of(c, u, sees, at));
        to(c.y + (b * c.T + t) * c.C, mul(x, sigmoid_of(x)));
      });
    }
}

// Adds to du, and to dweight [W][C] and dbias [C] of the row.
void convolve_backward(const Conv& c, int64_t first, int64_t last) {
  for (int64_t b = first; b < last; b++) {
    float *dweight = c.dweight + b * c.W * c.C, *dbias = c.dbias + b * c.C;
    for (int64_t t = 0; t < c.T; t++) {
      const float* u = c.u + (b * (c.T + c.W - 1) + t) * c.C;
      float* du = c.du + (b * (c.T + c.W - 1) + t) * c.C;
      const float* sees = c.sees == nullptr ? nullptr : c.sees + (b * c.T + t) * c.W;
      sixteens(c.C, [&](auto at, auto to) ALWAYS {
        const Floats x = bounded(taps_of(c, u, sees, at));
        const Floats d = mul(at(c.dy + (b * c.T + t) * c.C), silu_slope(x, sigmoid_of(x)));
        to(dbias, add(at(dbias), d));
        for (int64_t j = 0; j < c.W; j++)
          if (sees == nullptr || sees[j] != 0) {
            to(dweight + j * c.C, fma(d, at(u + j * c.C), at(dweight + j * c.C)));
            to(du + j * c.C, fma(d, at(c.weight + j * c.C), at(du + j * c.C)));
          }
      });
    }
  }
}
