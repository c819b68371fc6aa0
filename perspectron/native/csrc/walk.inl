// Shared by recurrences whose products must wait for the previous token: a few rows go through all tokens together, and a
// row's sums do not depend on how many rows there are. Weights come in panels of 32 columns, which are read in order.

constexpr int64_t PANEL = 32;
constexpr int WALK_VECTORS = MANY_REGISTERS ? 2 : 1;  // of WALK_ROWS rows each: as many sums as registers hold
constexpr int WALK_ROWS = MANY_REGISTERS ? 8 : 4;
inline int64_t panelled(int64_t n) { return ceil_div(n, PANEL) * PANEL; }

// c = a W for `Rows` rows of depth numbers; W in panels [⌈N / 32⌉][depth][32], zeros after N; c has room for them.
template <int Rows>
void times(const float* a, int64_t lda, const float* panels, int64_t depth, int64_t N, float* c, int64_t ldc) {
  for (int64_t j = 0; j < N; j += PANEL)
    for (int64_t i = 0; i < PANEL; i += 16 * WALK_VECTORS)
      rows_times<WALK_VECTORS, Rows>(a, lda, panels + j * depth + i, PANEL, depth, c + j + i, ldc);
}

inline Floats tanh_of(Floats x) {
  const Floats one = broadcast(1.0f), square = mul(x, x);
  const Floats e = exponential(mul(magnitude(x), broadcast(-2.0f))), far = div(minus(one, e), add(one, e));
  Floats near = broadcast(-1382.0f / 155925);
  for (float c : {62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) near = fma(near, square, broadcast(c));
  const Floats signed_far = chosen(x, broadcast(0), mul(far, broadcast(-1.0f)), far);
  return chosen(square, broadcast(0.09f), mul(near, x), signed_far);
}

// Slices of this thread's scratch memory, each a multiple of a panel.
struct Rooms {
  float* next;
  float* of(int64_t n) {
    float* room = next;
    next += panelled(n);
    return room;
  }
};

// f(Index<rows>{}, first) for rows [first, last), as many at a time as registers hold, and then fewer.
template <class F>
inline void some_rows(int64_t first, int64_t last, const F& f) {
  const auto some = [&](auto rows) ALWAYS {
    for (; first + rows <= last; first += rows) f(rows, first);
  };
  if constexpr (WALK_ROWS > 4) some(Index<WALK_ROWS>{});
  some(Index<4>{}), some(Index<2>{}), some(Index<1>{});
}

// y = f(x) and y = f(a, b), 16 numbers at a time.
template <class F>
inline ALWAYS void made(float* y, const float* x, int64_t n, const F& f) {
  sixteens(n, [&](auto at, auto put_at) ALWAYS { put_at(y, f(at(x))); });
}
template <class F>
inline ALWAYS void made(float* y, const float* a, const float* b, int64_t n, const F& f) {
  sixteens(n, [&](auto at, auto put_at) ALWAYS { put_at(y, f(at(a), at(b))); });
}
inline Floats sum_of(Floats a, Floats b) { return add(a, b); }
inline Floats product_of(Floats a, Floats b) { return mul(a, b); }

inline ALWAYS void add_times(float* y, float s, const float* x, int64_t n) {
  const Floats all = broadcast(s);
  each(y, x, n, [&](Floats a, Floats b) ALWAYS { return fma(all, b, a); });
}
inline ALWAYS void scaled(float* y, float s, const float* x, int64_t n) {
  const Floats all = broadcast(s);
  made(y, x, n, [&](Floats a) ALWAYS { return mul(a, all); });
}
// y = from + share (to − from), without loss where share is near 1
inline ALWAYS void between(float* y, const float* from, const float* to, float share, int64_t n) {
  const Floats there = broadcast(share), here = broadcast(1.0f - share);
  made(y, from, to, n, [&](Floats a, Floats b) ALWAYS { return fma(there, b, mul(here, a)); });
}
inline void copied(const float* from, float* to, int64_t n) { __builtin_memcpy(to, from, size_t(n) * sizeof(float)); }
inline void cleared(float* to, int64_t n) { __builtin_memset(to, 0, size_t(n) * sizeof(float)); }
