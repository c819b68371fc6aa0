// One token through one layer: everything between two expert shards in a single call, because a call of Python or
// torch with cold caches costs as much as reading a tenth of a megabyte of weights.

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

struct Router {
  const float *weight, *bias, *place, *handicap;  // place: or null, of a switch; handicap: or null
  int64_t axes, experts, width;
};

namespace perspectron {
namespace {

Matrix matrix(const Linear& l) { return matrix(l.codes, l.scales, int(l.format), l.N, l.K); }

struct Rows {  // of a product, to be shared out
  Rows(const Kernels& k, const Linear& l, int threads) : m(matrix(l)), bias(l.bias), claims(m.blocks(), grain(k, m, 1, threads)) {}
  const Matrix m;
  const float* bias;
  Claims claims;

  // y = W x + bias; then done(first row, rows) of each piece.
  template <class Done>
  void run(const Kernels& k, const Tokens& x, float* y, Done&& done) {
    for (int64_t first, last; claims.next(first, last);) {
      k.multiply(m, x, first, last, y, m.N);
      const int64_t row = first * ROWS[m.format], end = last * ROWS[m.format] < m.N ? last * ROWS[m.format] : m.N;
      if (bias != nullptr) k.add(y + row, bias + row, end - row);
      done(row, end - row);
    }
  }
};

constexpr auto nothing = [](int64_t, int64_t) {};

float* floats_in_scratch(int64_t n) {
  static thread_local Buffer buffer;
  return static_cast<float*>(buffer.of(size_t(n) * sizeof(float)));
}

}  // namespace
}  // namespace perspectron

API void pspx_norm(const float* x, const float* weight, double eps, int64_t n, float* y) {
  kernels().norm(x, weight, float(eps), n, y);
}

// y = x + W_o (S q), the state moved on by one token.
API void pspx_step_pdr(const PdrLayer* l, const float* x, float* state, float* y, int threads) {
  const Kernels& k = kernels();
  const int64_t D = l->o.N, R = l->q.N;
  threads = useful(threads, 4 * D * R, 1);
  float *normed = floats_in_scratch(4 * D + 2 * R), *gamma = normed + D, *v = gamma + D, *o = v + D, *q = o + D, *key = q + R;
  Rows p_rows(k, l->p, threads), v_rows(k, l->v, threads), q_rows(k, l->q, threads), k_rows(k, l->k, threads);
  Rows o_rows(k, l->o, threads);
  k.norm(x, l->norm, float(l->eps), D, normed);
  const Tokens tokens = tokens_in_scratch(0, 1, D), inner = tokens_in_scratch(1, 1, D);
  k.quantise(normed, tokens, 0);
  __builtin_memset(normed, 0, size_t(D) * sizeof(float));  // from here on the zeros that sigmoid adds
  const Scan scan{q, key, v, gamma, state, o, 1, 1, D, R};
  Claims memory(D, ceil_div(ceil_div(int64_t(64) << 10, 4 * R), 16) * 16), once(1, 1);
  parallel(threads, [&](Team& team) {
    p_rows.run(k, tokens, gamma, [&](int64_t row, int64_t n) { k.sigmoid(gamma + row, normed + row, n); });
    v_rows.run(k, tokens, v, nothing);
    q_rows.run(k, tokens, q, [&](int64_t row, int64_t n) {
      for (int64_t i = row; i < row + n; i++) q[i] *= float(l->scale);
    });
    k_rows.run(k, tokens, key, nothing);
    team.barrier();
    for (int64_t first, last; memory.next(first, last);) k.scan(scan, first, last);
    team.barrier();
    for (int64_t first, last; once.next(first, last);) {
      if (l->out_norm != nullptr) k.norm(o, l->out_norm, float(l->eps), D, o);
      k.quantise(o, inner, 0);
    }
    team.barrier();
    o_rows.run(k, inner, y, [&](int64_t row, int64_t n) { k.add(y + row, x + row, n); });
  });
}

// y = x + W_o attention; cosine and sine [K / 2] are those of the position.
API void pspx_step_gqa(const GqaLayer* l, const float* x, float* k_ring, float* v_ring, int64_t position,
                       const float* cosine, const float* sine, float* y, int threads) {
  const Kernels& k = kernels();
  const int64_t D = l->o.N, H = l->heads, G = l->kv_heads, K = l->q.N / H;
  threads = useful(threads, 2 * bytes_of(matrix(l->q)), 1);
  float *normed = floats_in_scratch(3 * D + l->kv.N), *q = normed + D, *o = q + D, *kv = o + D;
  Rows q_rows(k, l->q, threads), kv_rows(k, l->kv, threads), o_rows(k, l->o, threads);
  k.norm(x, l->norm, float(l->eps), D, normed);
  const Tokens tokens = tokens_in_scratch(0, 1, D), inner = tokens_in_scratch(1, 1, D);
  k.quantise(normed, tokens, 0);
  const Attend attend{q, kv, cosine, sine, k_ring, v_ring, o, H, G, K, l->window, position, 1.0f / __builtin_sqrtf(float(K))};
  Claims groups(G, 1), once(1, 1);
  parallel(threads, [&](Team& team) {
    q_rows.run(k, tokens, q, nothing);
    kv_rows.run(k, tokens, kv, nothing);
    team.barrier();
    for (int64_t first, last; groups.next(first, last);)
      for (int64_t g = first; g < last; g++) k.attend(attend, g);
    team.barrier();
    for (int64_t first, last; once.next(first, last);) k.quantise(o, inner, 0);
    team.barrier();
    o_rows.run(k, inner, y, [&](int64_t row, int64_t n) { k.add(y + row, x + row, n); });
  });
}

// The expert of a token: argmin of the power distances on a torus, or of −logit.
API int64_t pspx_route(const Router* r, const float* x) {
  const Kernels& k = kernels();
  float* z = floats_in_scratch(r->axes);
  for (int64_t a = 0; a < r->axes; a++) z[a] = k.dot_product(x, r->weight + a * r->width, r->width) + r->bias[a];
  int64_t best = 0;
  float least = __builtin_inff();
  for (int64_t e = 0; e < r->experts; e++) {
    float d = 0;
    if (r->place == nullptr) {
      d = -z[e];
    } else {
      for (int64_t a = 0; a < r->axes; a++) {
        const float apart = z[a] - r->place[e * r->axes + a], wrapped = apart - __builtin_nearbyintf(apart);
        d += wrapped * wrapped;
      }
    }
    if (r->handicap != nullptr) d -= r->handicap[e];
    if (d < least) least = d, best = e;
  }
  return best;
}
