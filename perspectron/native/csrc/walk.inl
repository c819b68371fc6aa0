// What the recurrences have in common whose products wait for the token before: some rows walk through all tokens together,
// and a row's sums do not depend on how many there are. Weights come in panels of 32 columns, which are read in order.

constexpr int64_t PANEL = 32;
constexpr int WALK_VECTORS = TILE * TILE > 12 ? 2 : 1;  // of WALK_ROWS rows each: as many sums as registers hold
constexpr int WALK_ROWS = TILE * TILE > 12 ? 8 : 4;
inline int64_t panelled(int64_t n) { return ceil_div(n, PANEL) * PANEL; }

// c = a W for `Rows` rows of depth numbers; W in panels [⌈N / 32⌉][depth][32], zeros after N; c has room for them.
template <int Rows>
void times(const float* a, int64_t lda, const float* panels, int64_t depth, int64_t N, float* c, int64_t ldc) {
  for (int64_t j = 0; j < N; j += PANEL)
    for (int64_t i = 0; i < PANEL; i += 16 * WALK_VECTORS)
      rows_times<WALK_VECTORS, Rows>(a, lda, panels + j * depth + i, PANEL, depth, c + j + i, ldc);
}

inline Floats magnitude(Floats x) { return greatest(x, mul(x, broadcast(-1.0f))); }

inline Floats tanh_of(Floats x) {
  const Floats one = broadcast(1.0f), square = mul(x, x);
  const Floats e = exponential(mul(magnitude(x), broadcast(-2.0f))), far = div(minus(one, e), add(one, e));
  Floats near = broadcast(-1382.0f / 155925);
  for (float c : {62.0f / 2835, -17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) near = fma(near, square, broadcast(c));
  const Floats signed_far = chosen(x, broadcast(0), mul(far, broadcast(-1.0f)), far);
  return chosen(square, broadcast(0.09f), mul(near, x), signed_far);
}

// Rooms in this thread's memory, each a multiple of a panel.
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
  some(Index<WALK_ROWS>{}), some(Index<4>{}), some(Index<2>{}), some(Index<1>{});
}
