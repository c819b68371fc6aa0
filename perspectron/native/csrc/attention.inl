// Causal attention of a training: o = softmax(scale · q kᵀ) v, where token t sees the keys from first[t] to t. Queries go
// BLOCK at a time, and in it ATTEND_ROWS; the keys that a block sees are copied once as float: transposed for q kᵀ, where
// lanes are keys, and in rows for sums over keys.

constexpr int64_t BLOCK = 64;
constexpr int ATTEND_ROWS = 8;  // ATTEND_ROWS · 2 sums, in registers where there are 32 of them
constexpr int64_t SPARE = 32;   // numbers past a row of keys that its last vectors may touch

inline int64_t sixteen(int64_t n) { return ceil_div(n, 16) * 16; }

// c[r] = Σ_d a[r][d] b[d], for V vectors of each of R rows.
template <int V, int R = ATTEND_ROWS>
inline ALWAYS void rows_times(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc) {
  Floats sum[R][V];
  unroll<R>([&](auto r) ALWAYS { unroll<V>([&](auto j) ALWAYS { sum[r][j] = broadcast(0); }); });
  for (int64_t d = 0; d < depth; d++) {
    Floats x[V];
    unroll<V>([&](auto j) ALWAYS { x[j] = load_floats(b + d * ldb + 16 * j); });
    unroll<R>([&](auto r) ALWAYS {
      const Floats y = broadcast(a[r * lda + d]);
      unroll<V>([&](auto j) ALWAYS { sum[r][j] = fma(y, x[j], sum[r][j]); });
    });
  }
  unroll<R>([&](auto r) ALWAYS { unroll<V>([&](auto j) ALWAYS { store(c + r * ldc + 16 * j, sum[r][j]); }); });
}

// c[d] += Σ_r a[r][d] b[r], for V vectors of each row.
template <int V>
inline ALWAYS void add_rows(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc) {
  Floats x[ATTEND_ROWS][V];
  unroll<ATTEND_ROWS>([&](auto r) ALWAYS { unroll<V>([&](auto j) ALWAYS { x[r][j] = load_floats(b + r * ldb + 16 * j); }); });
  for (int64_t d = 0; d < depth; d++) {
    Floats sum[V];
    unroll<V>([&](auto j) ALWAYS { sum[j] = load_floats(c + d * ldc + 16 * j); });
    unroll<ATTEND_ROWS>([&](auto r) ALWAYS {
      const Floats y = broadcast(a[r * lda + d]);
      unroll<V>([&](auto j) ALWAYS { sum[j] = fma(y, x[r][j], sum[j]); });
    });
    unroll<V>([&](auto j) ALWAYS { store(c + d * ldc + 16 * j, sum[j]); });
  }
}

// f(V, column) over all columns of a multiple of 16.
template <class F>
inline ALWAYS void pairs(int64_t columns, const F& f) {
  int64_t c = 0;
  for (; c + 32 <= columns; c += 32) f(Index<2>{}, c);
  if (c < columns) f(Index<1>{}, c);
}

// [n][C] with rows `stride` apart, as float: rows of `wide`, zeros after C.
template <class T>
inline ALWAYS void copied(const T* from, int64_t stride, int64_t n, int64_t C, float* to, int64_t wide) {
  for (int64_t i = 0; i < n; i++) {
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) store(to + i * wide + c, get(from + i * stride + c));
    if (c < C) store(to + i * wide + c, get(from + i * stride + c, C - c));
  }
}

// The same as columns: [C][wide], zeros after n.
template <class T>
inline ALWAYS void turned(const T* from, int64_t stride, int64_t n, int64_t C, float* to, int64_t wide) {
  for (int64_t c = 0; c < C; c++) __builtin_memset(to + c * wide + n, 0, size_t(wide - n) * sizeof(float));
  for (int64_t i = 0; i < n; i++)
    for (int64_t c = 0; c < C; c += 16) {
      float lanes[16];
      const int64_t some = C - c < 16 ? C - c : 16;
      store(lanes, some == 16 ? get(from + i * stride + c) : get(from + i * stride + c, some));
      for (int64_t l = 0; l < some; l++) to[(c + l) * wide + i] = lanes[l];
    }
}

// Where a block and its rows are, and what they see: keys from `lo` on.
struct Seen {
  int64_t begin, end, lo;
};
inline Seen seen_by(const int32_t* first, int64_t begin, int64_t end) {
  int64_t lo = begin;
  for (int64_t t = begin; t < end; t++) lo = first[t] < lo ? first[t] : lo;
  return {begin, end, lo};
}

// Rows [begin, end) of a head as float, zeros up to ATTEND_ROWS.
template <class T>
inline ALWAYS void tile_of(const T* from, int64_t stride, const Seen& rows, int64_t C, float* to, int64_t wide) {
  const int64_t n = rows.end - rows.begin;
  copied(from + rows.begin * stride, stride, n, C, to, wide);
  __builtin_memset(to + n * wide, 0, size_t((ATTEND_ROWS - n) * wide) * sizeof(float));
}

template <class T>
inline ALWAYS void tile_to(T* to, int64_t stride, const Seen& rows, int64_t C, const float* from, int64_t wide) {
  for (int64_t t = rows.begin; t < rows.end; t++)
    sixteens(C, [&](auto at, auto into) ALWAYS { into(to + t * stride, at(from + (t - rows.begin) * wide)); });
}

// f(b, g, block) over the blocks of tasks [first, last), each a key head of a batch.
template <class F>
inline ALWAYS void attention_blocks(const Attention& a, int64_t first, int64_t last, const F& f) {
  for (int64_t task = first; task < last; task++)
    for (int64_t t = 0; t < a.T; t += BLOCK)
      f(task / a.G, task % a.G, seen_by(a.first + task / a.G * a.T, t, t + BLOCK < a.T ? t + BLOCK : a.T));
}

struct Row {
  int64_t from, to;  // keys it sees
};
// A row's raw scores become the weights e^(scale · s + down) of the keys it sees, and 0 for the tile's other keys.
inline ALWAYS void weigh(float* s, Row row, int64_t begin, int64_t end, Floats scale, Floats down) {
  for (int64_t i = row.from; i < row.to; i += 16) store(s + i, exponential(fma(load_floats(s + i), scale, down)));
  __builtin_memset(s + begin, 0, size_t(row.from - begin) * sizeof(float));
  __builtin_memset(s + row.to, 0, size_t(end - row.to + 16) * sizeof(float));
}

template <class T>
void attention(const Attention& a, int64_t first, int64_t last) {
  const int64_t share = a.H / a.G, Kp = sixteen(a.K), Vp = sixteen(a.V), q_row = a.H * a.K, k_row = a.G * a.K;
  const int64_t o_row = a.H * a.V, v_row = a.G * a.V;
  attention_blocks(a, first, last, [&](int64_t b, int64_t g, const Seen& block) ALWAYS {
    const int64_t n = block.end - block.lo, ld = sixteen(n) + SPARE;
    float* kt = scratch<float>(KEYS, a.K * ld + n * Vp + ATTEND_ROWS * (ld + Kp + Vp));
    float *v = kt + a.K * ld, *p = v + n * Vp, *q = p + ATTEND_ROWS * ld, *o = q + ATTEND_ROWS * Kp;
    turned(static_cast<const T*>(a.k) + (b * a.T + block.lo) * k_row + g * a.K, k_row, n, a.K, kt, ld);
    copied(static_cast<const T*>(a.v) + (b * a.T + block.lo) * v_row + g * a.V, v_row, n, a.V, v, Vp);
    for (int64_t h = g * share; h < (g + 1) * share; h++)
      for (int64_t t = block.begin; t < block.end; t += ATTEND_ROWS) {
        const Seen rows = seen_by(a.first + b * a.T, t, t + ATTEND_ROWS < block.end ? t + ATTEND_ROWS : block.end);
        const int64_t begin = rows.lo - block.lo, end = rows.end - block.lo;
        tile_of(static_cast<const T*>(a.q) + b * a.T * q_row + h * a.K, q_row, rows, a.K, q, Kp);
        for (int64_t j = begin; j < end; j += 32) rows_times<2>(q, Kp, kt + j, ld, a.K, p + j, ld);
        float total[ATTEND_ROWS] = {};
        for (int64_t r = 0; r < ATTEND_ROWS; r++) {
          float* s = p + r * ld;
          if (r >= rows.end - rows.begin) {
            __builtin_memset(s + begin, 0, size_t(end - begin) * sizeof(float));
            continue;
          }
          const Row row{a.first[b * a.T + t + r] - block.lo, t + r + 1 - block.lo};
          for (int64_t i = row.to; i < row.to + 16; i++) s[i] = -__FLT_MAX__;
          Floats top = broadcast(-__FLT_MAX__), sum = broadcast(0);
          for (int64_t i = row.from; i < row.to; i += 16) top = greatest(load_floats(s + i), top);
          float lanes[16];
          store(lanes, top);
          float most = lanes[0];
          for (float lane : lanes) most = lane > most ? lane : most;
          weigh(s, row, begin, end, broadcast(a.scale), broadcast(-most * a.scale));
          for (int64_t i = row.from; i < row.to; i += 16) sum = add(sum, load_floats(s + i));
          total[r] = tree(sum);
          a.lse[(b * a.T + t + r) * a.H + h] = most * a.scale + __builtin_logf(total[r]);
        }
        pairs(Vp, [&](auto V, int64_t c) ALWAYS { rows_times<V>(p + begin, ld, v + begin * Vp + c, Vp, end - begin, o + c, Vp); });
        for (int64_t r = 0; r < rows.end - rows.begin; r++)
          each(o + r * Vp, o + r * Vp, Vp, [&](Floats x, Floats) ALWAYS { return div(x, broadcast(total[r])); });
        tile_to(static_cast<T*>(a.o) + b * a.T * o_row + h * a.V, o_row, rows, a.V, o, Vp);
      }
  });
}

// p = e^(scale · s − lse), ds = scale · p · (do vᵀ − Σ do · o); dv = pᵀ do, dq = ds k, dk = dsᵀ q. Adds to dk and dv.
template <class T>
void attention_backward(const Attention& a, int64_t first, int64_t last) {
  const int64_t share = a.H / a.G, Kp = sixteen(a.K), Vp = sixteen(a.V), q_row = a.H * a.K, k_row = a.G * a.K;
  const int64_t o_row = a.H * a.V, v_row = a.G * a.V;
  attention_blocks(a, first, last, [&](int64_t b, int64_t g, const Seen& block) ALWAYS {
    const int64_t n = block.end - block.lo, ld = sixteen(n) + SPARE;
    float* kt = scratch<float>(KEYS, (a.K + a.V + 2 * ATTEND_ROWS) * ld + n * (2 * Kp + Vp) + ATTEND_ROWS * (2 * Kp + 2 * Vp));
    float *vt = kt + a.K * ld, *p = vt + a.V * ld, *ds = p + ATTEND_ROWS * ld, *k = ds + ATTEND_ROWS * ld;
    float *dk = k + n * Kp, *dv = dk + n * Kp, *q = dv + n * Vp, *dq = q + ATTEND_ROWS * Kp;
    float *out = dq + ATTEND_ROWS * Kp, *o = out + ATTEND_ROWS * Vp;
    const T* keys = static_cast<const T*>(a.k) + (b * a.T + block.lo) * k_row + g * a.K;
    turned(keys, k_row, n, a.K, kt, ld);
    copied(keys, k_row, n, a.K, k, Kp);
    turned(static_cast<const T*>(a.v) + (b * a.T + block.lo) * v_row + g * a.V, v_row, n, a.V, vt, ld);
    __builtin_memset(dk, 0, size_t(n * (Kp + Vp)) * sizeof(float));
    for (int64_t h = g * share; h < (g + 1) * share; h++)
      for (int64_t t = block.begin; t < block.end; t += ATTEND_ROWS) {
        const Seen rows = seen_by(a.first + b * a.T, t, t + ATTEND_ROWS < block.end ? t + ATTEND_ROWS : block.end);
        const int64_t begin = rows.lo - block.lo, end = rows.end - block.lo;
        tile_of(static_cast<const T*>(a.q) + b * a.T * q_row + h * a.K, q_row, rows, a.K, q, Kp);
        tile_of(static_cast<const T*>(a.out) + b * a.T * o_row + h * a.V, o_row, rows, a.V, out, Vp);
        tile_of(static_cast<const T*>(a.o) + b * a.T * o_row + h * a.V, o_row, rows, a.V, o, Vp);
        for (int64_t j = begin; j < end; j += 32) {
          rows_times<2>(q, Kp, kt + j, ld, a.K, p + j, ld);
          rows_times<2>(out, Vp, vt + j, ld, a.V, ds + j, ld);
        }
        for (int64_t r = 0; r < ATTEND_ROWS; r++) {
          float *s = p + r * ld, *d = ds + r * ld;
          if (r >= rows.end - rows.begin) {
            __builtin_memset(s + begin, 0, size_t(end - begin) * sizeof(float));
            __builtin_memset(d + begin, 0, size_t(end - begin) * sizeof(float));
            continue;
          }
          const Row row{a.first[b * a.T + t + r] - block.lo, t + r + 1 - block.lo};
          const Floats mean = broadcast(-dot_of(out + r * Vp, o + r * Vp, Vp)), scale = broadcast(a.scale);
          weigh(s, row, begin, end, scale, broadcast(-a.lse[(b * a.T + t + r) * a.H + h]));
          each(d + begin, s + begin, end - begin, [&](Floats x, Floats weight) ALWAYS { return mul(mul(weight, scale), add(x, mean)); });
        }
        pairs(Kp, [&](auto V, int64_t c) ALWAYS {
          rows_times<V>(ds + begin, ld, k + begin * Kp + c, Kp, end - begin, dq + c, Kp);
          add_rows<V>(ds + begin, ld, q + c, Kp, end - begin, dk + begin * Kp + c, Kp);
        });
        pairs(Vp, [&](auto V, int64_t c) ALWAYS { add_rows<V>(p + begin, ld, out + c, Vp, end - begin, dv + begin * Vp + c, Vp); });
        tile_to(static_cast<T*>(a.dq) + b * a.T * q_row + h * a.K, q_row, rows, a.K, dq, Kp);
      }
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = b * a.T + block.lo + i;
      sixteens(a.K, [&](auto from, auto to) ALWAYS { float* x = a.dk + at * k_row + g * a.K; to(x, add(from(x), from(dk + i * Kp))); });
      sixteens(a.V, [&](auto from, auto to) ALWAYS { float* x = a.dv + at * v_row + g * a.V; to(x, add(from(x), from(dv + i * Vp))); });
    }
  });
}

// y = (a cos − b sin, a sin + b cos) of the two halves of each head.
template <class T>
void turn(const Turn& r, int64_t first, int64_t last) {
  const int64_t half = r.K / 2;
  for (int64_t row = first; row < last; row++) {
    const float *cosine = r.cosine + row * half, *sine = r.sine + row * half;
    for (int64_t h = 0; h < r.H; h++) {
      const T* x = static_cast<const T*>(r.x) + row * r.stride + h * r.K;
      T* y = static_cast<T*>(r.y) + (row * r.H + h) * r.K;
      sixteens(half, [&](auto at, auto to) ALWAYS {
        const Floats a = at(x), b = at(x + half), c = at(cosine), s = at(sine);
        to(y, minus(mul(a, c), mul(b, s)));
        to(y + half, add(mul(a, s), mul(b, c)));
      });
    }
  }
}
