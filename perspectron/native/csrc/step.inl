// One token of each conversation through one layer: everything between two expert shards in a single call, because a
// call of Python or torch with cold caches costs as much as reading a tenth of a megabyte of weights.
//
// T tokens, packed one after another; `rows` says which row of the state each of them belongs to.

struct Linear {
  const uint8_t* codes;
  const void* scales;
  const float* bias;  // or null
  int64_t format, N, K;
};

struct PdrLayer {
  const float *norm, *out_norm;  // out_norm: or null
  double eps, scale;
  Linear p, q, k, v, o;
};

struct GqaLayer {
  const float* norm;
  double eps;
  Linear q, kv, o;
  int64_t heads, kv_heads, window;
};

namespace perspectron {
namespace {

Matrix matrix(const Linear& l) { return matrix(l.codes, l.scales, int(l.format), l.N, l.K); }

struct Product {  // y = W x + bias of T tokens, its rows to be shared out
  Product(const Kernels& k, const Linear& l, int64_t T, int threads)
      : k(k), m(matrix(l)), bias(l.bias), claims(m.blocks(), grain(k, m, T, threads)) {}
  const Kernels& k;
  const Matrix m;
  const float* bias;
  Claims claims;

  // done(token, first row, rows) follows each piece of each token.
  template <class Done>
  void run(const Tokens& x, float* y, Done&& done) {
    for (int64_t first, last; claims.next(first, last);) {
      k.multiply(m, x, first, last, y, m.N);
      const int64_t row = first * ROWS[m.format], end = last * ROWS[m.format] < m.N ? last * ROWS[m.format] : m.N;
      for (int64_t t = 0; t < x.T; t++) {
        if (bias != nullptr) k.add(y + t * m.N + row, bias + row, end - row);
        done(t, row, end - row);
      }
    }
  }
};

bool there(const int64_t* index, int64_t T, int64_t end) {
  for (int64_t t = 0; t < T; t++)
    if (index[t] < 0 || index[t] >= end) return false;
  return true;
}

constexpr auto nothing = [](int64_t, int64_t, int64_t) {};

float* floats_in_scratch(int64_t n) {
  static thread_local Buffer buffer;
  return static_cast<float*>(buffer.of(size_t(n) * sizeof(float)));
}

// Normed (or as they are: weight null) and quantised.
void prepare(const Kernels& k, const float* x, const float* weight, double eps, float* normed, const Tokens& into,
             Claims& claims) {
  for (int64_t first, last; claims.next(first, last);)
    for (int64_t t = first; t < last; t++) {
      if (weight != nullptr) k.norm(x + t * into.K, weight, float(eps), into.K, normed + t * into.K);
      k.quantise((weight == nullptr ? x : normed) + t * into.K, into, t);
    }
}

}  // namespace
}  // namespace perspectron

API void pspx_norm(const float* x, const float* weight, double eps, int64_t T, int64_t n, float* y) {
  for (int64_t t = 0; t < T; t++) kernels().norm(x + t * n, weight, float(eps), n, y + t * n);
}

// y = x + W_o (S q), the state of B rows moved on by one token. 0; or 1, and nothing is touched, for a row that the
// state does not have.
API int pspx_step_pdr(const PdrLayer* l, const float* x, int64_t T, const int64_t* rows, float* state, int64_t B,
                      float* y, int threads) {
  if (!there(rows, T, B)) return 1;
  const Kernels& k = kernels();
  const int64_t D = l->o.N, R = l->q.N;
  threads = useful(threads, 4 * D * R, T);
  float *normed = floats_in_scratch(T * (4 * D + 2 * R) + D), *gamma = normed + T * D, *v = gamma + T * D;
  float *o = v + T * D, *q = o + T * D, *key = q + T * R, *zeros = key + T * R;
  Product p_rows(k, l->p, T, threads), v_rows(k, l->v, T, threads), q_rows(k, l->q, T, threads);
  Product k_rows(k, l->k, T, threads), o_rows(k, l->o, T, threads);
  const Tokens tokens = tokens_in_scratch(0, T, D), inner = tokens_in_scratch(1, T, D);
  __builtin_memset(zeros, 0, size_t(D) * sizeof(float));
  const int64_t piece = ceil_div(ceil_div(int64_t(64) << 10, 4 * R), 16) * 16, pieces = ceil_div(D, piece);
  Claims outer_ready(T, 1), inner_ready(T, 1), memory(T * pieces, 1);
  parallel(threads, [&](Team& team) {
    prepare(k, x, l->norm, l->eps, normed, tokens, outer_ready);
    team.barrier();
    p_rows.run(tokens, gamma, [&](int64_t t, int64_t row, int64_t n) { k.sigmoid(gamma + t * D + row, zeros, n); });
    v_rows.run(tokens, v, nothing);
    q_rows.run(tokens, q, [&](int64_t t, int64_t row, int64_t n) {
      for (int64_t i = t * R + row; i < t * R + row + n; i++) q[i] *= float(l->scale);
    });
    k_rows.run(tokens, key, nothing);
    team.barrier();
    for (int64_t first, last; memory.next(first, last);) {
      const int64_t t = first / pieces, begin = first % pieces * piece, end = begin + piece < D ? begin + piece : D;
      const Scan scan{q + t * R, key + t * R, v + t * D, gamma + t * D, state + rows[t] * D * R, o + t * D, nullptr, 1, 1, D, R, 0};
      k.scan(scan, begin, end);
    }
    team.barrier();
    prepare(k, o, l->out_norm, l->eps, o, inner, inner_ready);
    team.barrier();
    o_rows.run(inner, y, [&](int64_t t, int64_t row, int64_t n) { k.add(y + t * D + row, x + t * D + row, n); });
  });
  return 0;
}

// y = x + W_o attention; cosine and sine [T][K / 2] are those of the positions [T]; the rings are of B rows. 0; or 1,
// and nothing is touched, for a row that they do not have or a position below 0, which would be a slot before the ring.
API int pspx_step_gqa(const GqaLayer* l, const float* x, int64_t T, const int64_t* rows, float* k_ring, float* v_ring,
                      int64_t B, const int64_t* positions, const float* cosine, const float* sine, float* y,
                      int threads) {
  if (!there(rows, T, B) || !there(positions, T, INT64_MAX)) return 1;
  const Kernels& k = kernels();
  const int64_t D = l->o.N, H = l->heads, G = l->kv_heads, K = l->q.N / H, W = l->window;
  threads = useful(threads, 2 * bytes_of(matrix(l->q)), T);
  float *normed = floats_in_scratch(T * (3 * D + l->kv.N)), *q = normed + T * D, *o = q + T * D, *kv = o + T * D;
  Product q_rows(k, l->q, T, threads), kv_rows(k, l->kv, T, threads), o_rows(k, l->o, T, threads);
  const Tokens tokens = tokens_in_scratch(0, T, D), inner = tokens_in_scratch(1, T, D);
  Claims outer_ready(T, 1), inner_ready(T, 1), groups(T * G, 1);
  parallel(threads, [&](Team& team) {
    prepare(k, x, l->norm, l->eps, normed, tokens, outer_ready);
    team.barrier();
    q_rows.run(tokens, q, nothing);
    kv_rows.run(tokens, kv, nothing);
    team.barrier();
    for (int64_t first, last; groups.next(first, last);) {
      const int64_t t = first / G, ring = rows[t] * G * W * K, angle = t * (K / 2);
      const Attend attend{q + t * D, kv + t * 2 * G * K, cosine + angle, sine + angle, k_ring + ring, v_ring + ring, o + t * D,
                          H, G, K, W, positions[t], 1.0f / __builtin_sqrtf(float(K))};
      k.attend(attend, first % G);
    }
    team.barrier();
    prepare(k, o, nullptr, 0, o, inner, inner_ready);
    team.barrier();
    o_rows.run(inner, y, [&](int64_t t, int64_t row, int64_t n) { k.add(y + t * D + row, x + t * D + row, n); });
  });
  return 0;
}

// The router: z = W x + b; power distances from z to the E places on a torus, or −z of a switch (place null), less
// what each expert is preferred by (handicap, or null); and the expert of the least, ties to the lowest id, a NaN
// before all. z and distance: or null.
API void pspx_route(const float* x, int64_t T, int64_t D, const float* weight, const float* bias, int64_t A,
                    const float* place, const float* handicap, int64_t E, float* z, float* distance, int64_t* expert) {
  const Kernels& k = kernels();
  float* own = floats_in_scratch(A);
  for (int64_t t = 0; t < T; t++) {
    for (int64_t a = 0; a < A; a++) own[a] = k.dot_product(x + t * D, weight + a * D, D) + bias[a];
    if (z != nullptr) __builtin_memcpy(z + t * A, own, size_t(A) * sizeof(float));
    float least = 0;
    for (int64_t e = 0; e < E; e++) {
      float d = 0;
      if (place == nullptr) {
        d = -own[e];
      } else {
        for (int64_t a = 0; a < A; a++) {
          const float apart = own[a] - place[e * A + a], wrapped = apart - __builtin_nearbyintf(apart);
          d += wrapped * wrapped;
        }
      }
      if (handicap != nullptr) d -= handicap[e];
      if (distance != nullptr) distance[t * E + e] = d;
      if (e == 0 || d < least || (d != d && least == least)) least = d, expert[t] = e;
    }
  }
}
