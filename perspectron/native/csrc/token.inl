// What one token needs between its matrix products while it is decoded: norms, gates, attention to a ring.

inline ALWAYS float dot_of(const float* a, const float* b, int64_t n) {
  Floats sum[4] = {broadcast(0), broadcast(0), broadcast(0), broadcast(0)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    unroll<4>([&](auto u) ALWAYS { sum[u] = fma(load_floats(a + i + 16 * u), load_floats(b + i + 16 * u), sum[u]); });
  for (; i + 16 <= n; i += 16) sum[0] = fma(load_floats(a + i), load_floats(b + i), sum[0]);
  if (i < n) sum[1] = fma(load_floats(a + i, n - i), load_floats(b + i, n - i), sum[1]);
  return tree(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

float dot_product(const float* a, const float* b, int64_t n) { return dot_of(a, b, n); }

// y = x / √(mean x² + eps) · weight
void norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  const Floats r = broadcast(1.0f / __builtin_sqrtf(dot_of(x, x, n) / float(n) + eps));
  __builtin_memcpy(y, x, size_t(n) * sizeof(float));
  each(y, weight, n, [&](Floats a, Floats w) ALWAYS { return mul(mul(a, r), w); });
}

void add_to(float* y, const float* x, int64_t n) {
  each(y, x, n, [](Floats a, Floats b) ALWAYS { return add(a, b); });
}

// x = 1 / (1 + e^−(x + bias))
void sigmoid(float* x, const float* bias, int64_t n) {
  each(x, bias, n, [](Floats a, Floats b) ALWAYS {
    return div(broadcast(1.0f), add(broadcast(1.0f), exponential(mul(add(a, b), broadcast(-1.0f)))));
  });
}

// The halves of a head turned by the angles of its position.
inline void rotate(const float* x, const float* cosine, const float* sine, int64_t half, float* y) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    y[i] = a * cosine[i] - b * sine[i];
    y[i + half] = a * sine[i] + b * cosine[i];
  }
}

// One key head, and the query heads that share it: the token's key and value go into the ring, then softmax(q kᵀ) v.
void attend(const Attend& a, int64_t g) {
  const int64_t K = a.K, half = K / 2, heads = a.H / a.G, slot = a.position % a.W;
  const int64_t n = a.position + 1 < a.W ? a.position + 1 : a.W;
  float *keys = a.k_ring + g * a.W * K, *values = a.v_ring + g * a.W * K;
  rotate(a.kv + g * K, a.cosine, a.sine, half, keys + slot * K);
  __builtin_memcpy(values + slot * K, a.kv + (a.G + g) * K, size_t(K) * sizeof(float));
  float *q = scratch<float>(QUERY, heads * K), *score = scratch<float>(SCORES, heads * a.W);
  for (int64_t h = 0; h < heads; h++) rotate(a.q + (g * heads + h) * K, a.cosine, a.sine, half, q + h * K);
  for (int64_t s = 0; s < n; s++)
    for (int64_t h = 0; h < heads; h++) score[h * a.W + s] = a.scale * dot_of(q + h * K, keys + s * K, K);
  for (int64_t h = 0; h < heads; h++) {
    float *own = score + h * a.W, *o = a.o + (g * heads + h) * K, most = own[0], total = 0;
    for (int64_t s = 1; s < n; s++) most = own[s] > most ? own[s] : most;
    const Floats top = broadcast(-most);
    each(own, own, n, [&](Floats x, Floats) ALWAYS { return exponential(add(x, top)); });
    for (int64_t s = 0; s < n; s++) total += own[s];
    const float share = 1.0f / total;
    for (int64_t c = 0; c < K; c += 64) {
      const int64_t width = K - c < 64 ? K - c : 64;
      Floats sum[4] = {broadcast(0), broadcast(0), broadcast(0), broadcast(0)};
      const auto part = [&](const float* p, auto u) ALWAYS {
        const int64_t left = width - 16 * u;
        return left >= 16 ? load_floats(p + 16 * u) : left > 0 ? load_floats(p + 16 * u, left) : broadcast(0);
      };
      for (int64_t s = 0; s < n; s++)
        unroll<4>([&](auto u) ALWAYS { sum[u] = fma(broadcast(own[s]), part(values + s * K + c, u), sum[u]); });
      unroll<4>([&](auto u) ALWAYS {
        const int64_t left = width - 16 * u;
        if (left > 0) store(o + c + 16 * u, mul(sum[u], broadcast(share)), left < 16 ? left : 16);
      });
    }
  }
}
