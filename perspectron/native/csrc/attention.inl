// Causal attention of a chunk: o = softmax(scale · q kᵀ) v, where token t sees the keys from first[t] to `ahead` + t. Keys go
// SPAN at a time, copied once as items: transposed for q kᵀ, where lanes are keys, and in rows for sums over keys. All
// queries that see some of them pass by, ATTEND_ROWS at a time; what they gather from span to span waits in `sums`. What a
// token gathers depends on its keys and on their numbers, not on the chunk that it is in.

constexpr int64_t SPAN = 512;
constexpr int ATTEND_ROWS = 8;  // ATTEND_ROWS · 2 sums, in registers where there are 32 of them
constexpr int64_t SPARE = 32;   // numbers past a row of keys that its last vectors may touch

inline int64_t sixteen(int64_t n) { return ceil_div(n, 16) * 16; }

// How products over keys, channels and queries are taken. Of float: one number at a time. Of bfloat16: pairs of numbers,
// the second of a pair first, and weights are rounded to bfloat16 for them. `Paired`, where a set of instructions has it,
// is Rounded by instructions for pairs, which lie in the place of a float; it gives the same bits, but takes denormal numbers
// for 0. An item is a float or such a pair.
struct Single {
  static constexpr int PAIR = 1, ITEM = 1;
};
struct Rounded {
  static constexpr int PAIR = 2, ITEM = 1;
};

// f(d) for each item of a depth, in the order in which they are added.
template <class P, class F>
inline ALWAYS void in_order(int64_t depth, const F& f) {
  if constexpr (P::PAIR == P::ITEM) {
    for (int64_t d = 0; d < depth; d++) f(d);
  } else {
    for (int64_t d = 0; d < depth; d += 2) {
      if (d + 1 < depth) f(d + 1);
      f(d);
    }
  }
}
template <class P>
inline ALWAYS Floats plus_product(Floats sum, Floats y, Floats x) {
  if constexpr (P::ITEM == 2) return P::dot(sum, y, x);
  else return fma(y, x, sum);
}

// c[r] = Σ_d a[r][d] b[d], for V vectors of each of R rows.
template <int V, int R = ATTEND_ROWS, class P = Single>
inline ALWAYS void rows_times(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc) {
  Floats sum[R][V];
  unroll<R>([&](auto r) ALWAYS { unroll<V>([&](auto j) ALWAYS { sum[r][j] = broadcast(0); }); });
  in_order<P>(depth, [&](int64_t d) ALWAYS {
    Floats x[V];
    unroll<V>([&](auto j) ALWAYS { x[j] = load_floats(b + d * ldb + 16 * j); });
    unroll<R>([&](auto r) ALWAYS {
      const Floats y = broadcast(a[r * lda + d]);
      unroll<V>([&](auto j) ALWAYS { sum[r][j] = plus_product<P>(sum[r][j], y, x[j]); });
    });
  });
  unroll<R>([&](auto r) ALWAYS { unroll<V>([&](auto j) ALWAYS { store(c + r * ldc + 16 * j, sum[r][j]); }); });
}

// c[d] += Σ_r a[r][d] b[r], for V vectors of each row.
template <int V, class P>
inline ALWAYS void add_rows(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc) {
  constexpr int R = ATTEND_ROWS / P::ITEM;
  Floats x[R][V];
  unroll<R>([&](auto r) ALWAYS { unroll<V>([&](auto j) ALWAYS { x[r][j] = load_floats(b + r * ldb + 16 * j); }); });
  for (int64_t d = 0; d < depth; d++) {
    Floats sum[V];
    unroll<V>([&](auto j) ALWAYS { sum[j] = load_floats(c + d * ldc + 16 * j); });
    unroll<R>([&](auto i) ALWAYS {
      const Index<P::PAIR == P::ITEM ? int(decltype(i){}) : int(decltype(i){}) ^ 1> r;
      const Floats y = broadcast(a[r * lda + d]);
      unroll<V>([&](auto j) ALWAYS { sum[j] = plus_product<P>(sum[j], y, x[r][j]); });
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

// A row of T as the items of P.
template <class P, class T>
inline auto items(const T* p) {
  if constexpr (P::ITEM == 2) return reinterpret_cast<const float*>(p);
  else return p;
}

// [n][C] as the items of P from row to row, in rows of `wide`; zeros where a pair lacks its second.
template <class P, class T>
inline ALWAYS void stacked(const T* from, int64_t stride, int64_t n, int64_t C, float* to, int64_t wide) {
  if constexpr (P::ITEM == 2) {
    for (int64_t i = 0; i < n; i += 2)
      for (int64_t c = 0; c < C; c += 16) {
        uint16_t two[2][16] = {};
        for (int64_t j = 0; j < 2 && i + j < n; j++)
          __builtin_memcpy(two[j], from + (i + j) * stride + c, C - c < 16 ? size_t(C - c) * 2 : 32);
        store(to + i / 2 * wide + c, P::joined(two[0], two[1]));
      }
  } else {
    copied(from, stride, n, C, to, wide);
    if (P::PAIR == 2 && n % 2 == 1) __builtin_memset(to + n * wide, 0, size_t(wide) * sizeof(float));
  }
}

struct Rows {  // queries [begin, end), at most ATTEND_ROWS
  int64_t begin, end;
};

// Those of a head as float, zeros up to ATTEND_ROWS.
template <class T>
inline ALWAYS void tile_of(const T* from, int64_t stride, Rows rows, int64_t C, float* to, int64_t wide) {
  const int64_t n = rows.end - rows.begin;
  copied(from + rows.begin * stride, stride, n, C, to, wide);
  __builtin_memset(to + n * wide, 0, size_t((ATTEND_ROWS - n) * wide) * sizeof(float));
}

// The first n of rows that are `wide`, as rows `stride` apart.
template <class T>
inline ALWAYS void tile_to(T* to, int64_t stride, int64_t n, int64_t C, const float* from, int64_t wide) {
  for (int64_t r = 0; r < n; r++)
    sixteens(C, [&](auto at, auto into) ALWAYS { into(to + r * stride, at(from + r * wide)); });
}

// f(rows, begin, end) for the queries that see some of the keys [lo, hi): together they see lo + [begin, end), whole pairs.
template <class P, class F>
inline ALWAYS void passing(const int32_t* first, int64_t T, int64_t ahead, int64_t lo, int64_t hi, const F& f) {
  for (int64_t t = lo > ahead ? lo - ahead : 0; t < T; t += ATTEND_ROWS) {
    const Rows rows{t, t + ATTEND_ROWS < T ? t + ATTEND_ROWS : T};
    int64_t from = ahead + t, to = ahead + rows.end;
    for (int64_t i = t; i < rows.end; i++) from = first[i] < from ? first[i] : from;
    if (from < hi) f(rows, ((from > lo ? from : lo) - lo) / P::PAIR * P::PAIR, ceil_div((to < hi ? to : hi) - lo, P::PAIR) * P::PAIR);
  }
}

struct Row {
  int64_t from, to;  // keys of the span that it sees
  bool none() const { return from >= to; }
};
inline Row row_of(const int32_t* first, int64_t ahead, Rows rows, int64_t r, int64_t lo, int64_t hi) {
  const int64_t t = rows.begin + r, end = ahead + t + 1;
  if (t >= rows.end) return {0, 0};
  return {(first[t] > lo ? first[t] : lo) - lo, (end < hi ? end : hi) - lo};
}
// A row's raw scores become the weights e^(scale · s + down) of the keys it sees, and 0 for the other keys in [begin, end).
inline ALWAYS void weigh(float* s, Row row, int64_t begin, int64_t end, Floats scale, Floats down) {
  for (int64_t i = row.from; i < row.to; i += 16) store(s + i, exponential(fma(load_floats(s + i), scale, down)));
  __builtin_memset(s + begin, 0, size_t(row.from - begin) * sizeof(float));
  __builtin_memset(s + row.to, 0, size_t(end - row.to + 16) * sizeof(float));
}

// Weights s[r][begin … end) as a product over keys takes them: `along`, as items along the rows.
template <class P>
inline ALWAYS void along_rows(float* s, int64_t ld, int64_t begin, int64_t end, float* along) {
  for (int64_t r = 0; r < ATTEND_ROWS; r++) {
    float* row = s + r * ld;
    if constexpr (P::ITEM == 2) {
      for (int64_t i = begin; i < end; i += 32) P::brief(along + (r * ld + i) / 2, load_floats(row + i), load_floats(row + i + 16));
    } else if constexpr (P::PAIR == 2) {
      for (int64_t i = begin; i < end; i += 16) {
        uint16_t brief[16];
        store_brief(brief, load_floats(row + i));
        store(row + i, load_brief(brief));
      }
    }
  }
}
// The same weights as a product over queries takes them: as items from row to row.
template <class P>
inline ALWAYS void down_rows(const float* along, int64_t ld, int64_t begin, int64_t end, float* down) {
  if constexpr (P::ITEM == 2) {
    const uint16_t* s = reinterpret_cast<const uint16_t*>(along);
    for (int64_t r = 0; r < ATTEND_ROWS; r += 2)
      for (int64_t i = begin; i < end; i += 16) store(down + r / 2 * ld + i, P::joined(s + r * ld + i, s + (r + 1) * ld + i));
  }
}

template <class P, class T>
void attention_by(const Attention& a, int64_t from_task, int64_t to_task) {
  constexpr int ITEM = P::ITEM;
  const int64_t group = a.H / a.G, share = a.together ? group : 1, Kp = sixteen(a.K), Vp = sixteen(a.V), q_row = a.H * a.K;
  const int64_t o_row = a.H * a.V, S = a.ahead + a.T, wide = sixteen(S < SPAN ? S : SPAN), ld = wide + SPARE;
  float* kt = scratch<float>(KEYS, a.K * ld + wide * Vp + ATTEND_ROWS * (2 * ld + Kp + Vp) + share * a.T * (Vp + 2));
  float *v = kt + a.K * ld, *p = v + wide * Vp, *along = ITEM == 1 ? p : p + ATTEND_ROWS * ld, *q = p + 2 * ATTEND_ROWS * ld;
  float *o = q + ATTEND_ROWS * Kp, *sums = o + ATTEND_ROWS * Vp, *tops = sums + share * a.T * Vp, *totals = tops + share * a.T;
  for (int64_t task = from_task; task < to_task; task++) {
    const int64_t head = task * share, b = head / a.H, at_head = head % a.H, g = at_head / group;
    const int32_t* first = a.first + b * a.T;
    __builtin_memset(sums, 0, size_t(share * a.T * Vp) * sizeof(float));
    __builtin_memset(totals, 0, size_t(share * a.T) * sizeof(float));
    for (int64_t i = 0; i < share * a.T; i++) tops[i] = -__FLT_MAX__;
    for (int64_t lo = 0; lo < S; lo += SPAN) {
      const int64_t hi = lo + SPAN < S ? lo + SPAN : S;
      turned(items<P>(a.keys.at<T>(a.k, b, g, lo)), a.keys.row / ITEM, hi - lo, a.K / ITEM, kt, ld);
      stacked<P>(a.values.at<T>(a.v, b, g, lo), a.values.row, hi - lo, a.V, v, Vp);
      for (int64_t h = 0; h < share; h++)
        passing<P>(first, a.T, a.ahead, lo, hi, [&](Rows rows, int64_t begin, int64_t end) ALWAYS {
          const T* queries = static_cast<const T*>(a.q) + b * a.T * q_row + (at_head + h) * a.K;
          tile_of(items<P>(queries), q_row / ITEM, rows, a.K / ITEM, q, Kp);
          for (int64_t j = begin; j < end; j += 32) rows_times<2, ATTEND_ROWS, P>(q, Kp, kt + j, ld, a.K / ITEM, p + j, ld);
          float fading[ATTEND_ROWS];  // of what was gathered before: its weights have another top
          for (int64_t r = 0; r < ATTEND_ROWS; r++) {
            float* s = p + r * ld;
            const Row row = row_of(first, a.ahead, rows, r, lo, hi);
            fading[r] = 1;
            if (row.none()) {
              __builtin_memset(s + begin, 0, size_t(end - begin) * sizeof(float));
              continue;
            }
            float &top = tops[h * a.T + rows.begin + r], &total = totals[h * a.T + rows.begin + r];
            for (int64_t i = row.to; i < row.to + 16; i++) s[i] = -__FLT_MAX__;
            Floats highest = broadcast(-__FLT_MAX__), sum = broadcast(0);
            for (int64_t i = row.from; i < row.to; i += 16) highest = greatest(load_floats(s + i), highest);
            float lanes[16], most = top;
            store(lanes, highest);
            for (float lane : lanes) most = lane > most ? lane : most;
            if (total > 0) {
              store(lanes, exponential(broadcast((top - most) * a.scale)));
              fading[r] = lanes[0];
            }
            weigh(s, row, begin, end, broadcast(a.scale), broadcast(-most * a.scale));
            for (int64_t i = row.from; i < row.to; i += 16) sum = add(sum, load_floats(s + i));
            top = most;
            total = total * fading[r] + tree(sum);
          }
          along_rows<P>(p, ld, begin, end, along);
          pairs(Vp, [&](auto V, int64_t c) ALWAYS {
            rows_times<V, ATTEND_ROWS, P>(along + begin / ITEM, ld / ITEM, v + begin / ITEM * Vp + c, Vp, (end - begin) / ITEM, o + c, Vp);
          });
          for (int64_t r = 0; r < rows.end - rows.begin; r++) {
            float* gathered = sums + (h * a.T + rows.begin + r) * Vp;
            each(gathered, o + r * Vp, Vp, [&](Floats before, Floats x) ALWAYS { return fma(before, broadcast(fading[r]), x); });
          }
        });
    }
    for (int64_t h = 0; h < share; h++)
      for (int64_t t = 0; t < a.T; t++) {
        const int64_t at = h * a.T + t;
        each(sums + at * Vp, sums + at * Vp, Vp, [&](Floats x, Floats) ALWAYS { return div(x, broadcast(totals[at])); });
        if (a.lse) a.lse[(b * a.T + t) * a.H + at_head + h] = tops[at] * a.scale + __builtin_logf(totals[at]);
      }
    for (int64_t h = 0; h < share; h++)
      tile_to(static_cast<T*>(a.o) + b * a.T * o_row + (at_head + h) * a.V, o_row, a.T, a.V, sums + h * a.T * Vp, Vp);
  }
}

// p = e^(scale · s − lse), ds = scale · p · (do vᵀ − Σ do · o); dv = pᵀ do, dq = ds k, dk = dsᵀ q.
template <class P, class T>
void attention_backward_by(const Attention& a, int64_t from_task, int64_t to_task) {
  constexpr int ITEM = P::ITEM, ROWS = ATTEND_ROWS;
  const int64_t share = a.H / a.G, Kp = sixteen(a.K), Vp = sixteen(a.V), q_row = a.H * a.K, k_row = a.G * a.K;
  const int64_t o_row = a.H * a.V, v_row = a.G * a.V, wide = sixteen(a.T < SPAN ? a.T : SPAN), ld = wide + SPARE;
  float* room = scratch<float>(KEYS, (a.K + a.V + 4 * ROWS) * ld + wide * (2 * Kp + Vp) + ROWS * (3 * Kp + 4 * Vp) + share * a.T * Kp);
  const auto next = [&](int64_t n) {
    float* here = room;
    room += n;
    return here;
  };
  float *kt = next(a.K * ld), *vt = next(a.V * ld), *p = next(ROWS * ld), *ds = next(ROWS * ld), *k = next(wide * Kp);
  float *dk = next(wide * Kp), *dv = next(wide * Vp), *dq = next(ROWS * Kp), *o = next(ROWS * Vp), *out = next(ROWS * Vp);
  float *sums = next(share * a.T * Kp), *q_along = next(ROWS * Kp), *out_along = out, *q_down = q_along, *out_down = out;
  float *p_along = p, *ds_along = ds, *p_down = p, *ds_down = ds;
  if constexpr (ITEM == 2) {
    out_along = next(ROWS * Vp), q_down = next(ROWS * Kp), out_down = next(ROWS * Vp);
    p_along = next(ROWS / 2 * ld), ds_along = next(ROWS / 2 * ld), p_down = next(ROWS / 2 * ld), ds_down = next(ROWS / 2 * ld);
  }
  for (int64_t task = from_task; task < to_task; task++) {
    const int64_t b = task / a.G, g = task % a.G;
    const int32_t* first = a.first + b * a.T;
    __builtin_memset(sums, 0, size_t(share * a.T * Kp) * sizeof(float));
    for (int64_t lo = 0; lo < a.T; lo += SPAN) {
      const int64_t hi = lo + SPAN < a.T ? lo + SPAN : a.T, at_keys = (b * a.T + lo) * k_row + g * a.K;
      const int64_t at_values = (b * a.T + lo) * v_row + g * a.V;
      const T *keys = static_cast<const T*>(a.k) + at_keys, *values = static_cast<const T*>(a.v) + at_values;
      turned(items<P>(keys), k_row / ITEM, hi - lo, a.K / ITEM, kt, ld);
      stacked<P>(keys, k_row, hi - lo, a.K, k, Kp);
      turned(items<P>(values), v_row / ITEM, hi - lo, a.V / ITEM, vt, ld);
      __builtin_memset(dk, 0, size_t(wide * (Kp + Vp)) * sizeof(float));
      for (int64_t h = 0; h < share; h++) {
        const T* queries = static_cast<const T*>(a.q) + b * a.T * q_row + (g * share + h) * a.K;
        const int64_t outputs = b * a.T * o_row + (g * share + h) * a.V;
        const T *given = static_cast<const T*>(a.out) + outputs, *was = static_cast<const T*>(a.o) + outputs;
        passing<P>(first, a.T, 0, lo, hi, [&](Rows rows, int64_t begin, int64_t end) ALWAYS {
          tile_of(items<P>(queries), q_row / ITEM, rows, a.K / ITEM, q_along, Kp);
          tile_of(was, o_row, rows, a.V, o, Vp);
          tile_of(given, o_row, rows, a.V, out, Vp);
          if constexpr (ITEM == 2) {
            tile_of(items<P>(given), o_row / ITEM, rows, a.V / ITEM, out_along, Vp);
            __builtin_memset(q_down, 0, size_t(ROWS * Kp) * sizeof(float));
            __builtin_memset(out_down, 0, size_t(ROWS * Vp) * sizeof(float));
            stacked<P>(queries + rows.begin * q_row, q_row, rows.end - rows.begin, a.K, q_down, Kp);
            stacked<P>(given + rows.begin * o_row, o_row, rows.end - rows.begin, a.V, out_down, Vp);
          }
          for (int64_t j = begin; j < end; j += 32) {
            rows_times<2, ROWS, P>(q_along, Kp, kt + j, ld, a.K / ITEM, p + j, ld);
            rows_times<2, ROWS, P>(out_along, Vp, vt + j, ld, a.V / ITEM, ds + j, ld);
          }
          for (int64_t r = 0; r < ROWS; r++) {
            float *s = p + r * ld, *d = ds + r * ld;
            const Row row = row_of(first, 0, rows, r, lo, hi);
            if (row.none()) {
              __builtin_memset(s + begin, 0, size_t(end - begin) * sizeof(float));
              __builtin_memset(d + begin, 0, size_t(end - begin) * sizeof(float));
              continue;
            }
            const Floats mean = broadcast(-dot_of(out + r * Vp, o + r * Vp, Vp)), scale = broadcast(a.scale);
            const float lse = a.lse[(b * a.T + rows.begin + r) * a.H + g * share + h];
            weigh(s, row, begin, end, scale, broadcast(-lse));
            each(d + begin, s + begin, end - begin, [&](Floats x, Floats weight) ALWAYS { return mul(mul(weight, scale), add(x, mean)); });
          }
          along_rows<P>(p, ld, begin, end, p_along);
          along_rows<P>(ds, ld, begin, end, ds_along);
          down_rows<P>(p_along, ld, begin, end, p_down);
          down_rows<P>(ds_along, ld, begin, end, ds_down);
          pairs(Kp, [&](auto V, int64_t c) ALWAYS {
            rows_times<V, ROWS, P>(ds_along + begin / ITEM, ld / ITEM, k + begin / ITEM * Kp + c, Kp, (end - begin) / ITEM, dq + c, Kp);
            add_rows<V, P>(ds_down + begin, ld, q_down + c, Kp, end - begin, dk + begin * Kp + c, Kp);
          });
          pairs(Vp, [&](auto V, int64_t c) ALWAYS {
            add_rows<V, P>(p_down + begin, ld, out_down + c, Vp, end - begin, dv + begin * Vp + c, Vp);
          });
          float* gathered = sums + (h * a.T + rows.begin) * Kp;
          each(gathered, dq, (rows.end - rows.begin) * Kp, [&](Floats before, Floats x) ALWAYS { return add(before, x); });
        });
      }
      tile_to(static_cast<T*>(a.dk) + at_keys, k_row, hi - lo, a.K, dk, Kp);
      tile_to(static_cast<T*>(a.dv) + at_values, v_row, hi - lo, a.V, dv, Vp);
    }
    for (int64_t h = 0; h < share; h++)
      tile_to(static_cast<T*>(a.dq) + b * a.T * q_row + (g * share + h) * a.K, q_row, a.T, a.K, sums + h * a.T * Kp, Kp);
  }
}

// f(P{}) for the way in which products of T are taken here.
template <class T, class P = Paired, class F>
void by_product(const Attention& a, const F& f) {
  if constexpr (sizeof(T) == 4) return f(Single{});
  else {
    if constexpr (!std::is_void_v<P>)
      if (P::known() && a.K % 2 == 0 && a.V % 2 == 0) return f(P{});
    f(Rounded{});
  }
}
template <class T>
void attention(const Attention& a, int64_t from, int64_t to) {
  by_product<T>(a, [&](auto p) { attention_by<decltype(p), T>(a, from, to); });
}
template <class T>
void attention_backward(const Attention& a, int64_t from, int64_t to) {
  by_product<T>(a, [&](auto p) { attention_backward_by<decltype(p), T>(a, from, to); });
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
