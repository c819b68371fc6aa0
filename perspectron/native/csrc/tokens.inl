// What is done to tokens: quantising, sums, and silu(gate) · up.

// step = a / 127 with a = max |x|, q = x · (127 / a) to the nearest, ties to even. A token with NaN or infinity gets
// step NaN; one so small that 127 / a is not finite counts as zero.
void quantise(const float* x, const Tokens& into, int64_t token) {
  const int64_t K = into.K, whole = K / 16 * 16, G = into.G();
  int8_t* q = into.q + token * into.stride;
  int32_t* groupsum = into.groupsum + token * G;
  Ints bits = zero_ints();  // as integers they are in order, with infinity and NaN above all else
  for (int64_t k = 0; k < whole; k += 16) bits = greatest(bits, magnitude_bits(load_floats(x + k)));
  if (whole < K) bits = greatest(bits, magnitude_bits(load_floats(x + whole, K - whole)));
  const int32_t most = greatest_of(bits);
  float a;
  __builtin_memcpy(&a, &most, 4);
  const bool finite = most < 0x7f800000;
  const float inverse = 127.0f / a;
  into.step[token] = finite ? a / 127.0f : __builtin_nanf("");
  into.sum[token] = 0;
  if (!finite || !(inverse < __builtin_inff())) {
    __builtin_memset(q, 0, size_t(into.S));
    __builtin_memset(groupsum, 0, size_t(G) * sizeof(int32_t));
    return;
  }
  const Floats factor = broadcast(inverse);
  for (int64_t g = 0; g < G; g++) {
    const int64_t end = (g + 1) * GROUP < into.S ? (g + 1) * GROUP : into.S;
    Ints sum = zero_ints();
    for (int64_t k = g * GROUP; k < end; k += 16) {
      const Floats part = k < whole ? load_floats(x + k) : load_floats(x + (k < K ? k : 0), k < K ? K - k : 0);
      const Ints rounded = round_to_ints(mul(part, factor));
      sum = add(sum, rounded);
      store_bytes(q + k, rounded);
    }
    groupsum[g] = total(sum);
    into.sum[token] += groupsum[g];
  }
}

// e^x for x in −87 … 88, outside as at the ends; the same operations everywhere, so the same bits.
inline Floats exponential(Floats x) {
  const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to a whole number
  x = greatest(broadcast(-87.0f), least(broadcast(88.0f), x));
  const Floats shifted = fma(x, broadcast(1.44269504f), broadcast(magic));
  const Floats n = add(shifted, broadcast(-magic));
  Floats r = fma(n, broadcast(-0.693145752f), x);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Floats sum = broadcast(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = fma(sum, r, broadcast(c));
  return mul(sum, power_of_two(shifted));
}

// f(x, y) of 16 numbers at a time, into x.
template <class F>
inline ALWAYS void each(float* x, const float* y, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, f(load_floats(x + i), load_floats(y + i)));
  if (i < n) store(x + i, f(load_floats(x + i, n - i), load_floats(y + i, n - i)), n - i);
}

constexpr float FAR = 88.7228317f;  // the last float whose e^x is one

void silu(float* gate, const float* up, int64_t n) {
  each(gate, up, n, [](Floats a, Floats b) ALWAYS {
    const Floats e = chosen(a, broadcast(-FAR), broadcast(__builtin_inff()), exponential(mul(a, broadcast(-1.0f))));
    return mul(div(a, add(broadcast(1.0f), e)), b);
  });
}

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

inline void add_to(float* y, const float* x, int64_t n) {
  each(y, x, n, [](Floats a, Floats b) ALWAYS { return add(a, b); });
}
