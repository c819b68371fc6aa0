// What training calls; the shapes are those of kernels.h.

namespace {

// f over [0, total) in pieces of `grain`.
template <class F>
void shared(int threads, int64_t total, int64_t grain, F&& f) {
  if (total == 0) return;
  const int64_t pieces = ceil_div(total, grain);
  if (pieces <= 1 || threads <= 1) return f(0, total);
  Claims claims(total, grain);
  parallel(threads, [&](Team&) {
    for (int64_t first, last; claims.next(first, last);) f(first, last);
  });
}

int64_t rows_of(int64_t width) { return 1 + (int64_t(1) << 15) / (width > 0 ? width : 1); }  // that are worth a thread

}  // namespace

API void pspx_entropy(const void* logits, int brief, const int64_t* target, int64_t N, int64_t V, float* loss,
                      float* total, int threads) {
  const Entropy e{logits, target, loss, total, nullptr, 0, V};
  shared(threads, N, rows_of(V), [&](int64_t first, int64_t last) { kernels().entropy[brief](e, first, last); });
}

API void pspx_entropy_backward(const void* logits, int brief, const int64_t* target, int64_t N, int64_t V,
                               const float* total, double g, void* gradient, int threads) {
  const Entropy e{logits, target, nullptr, const_cast<float*>(total), gradient, float(g), V};
  shared(threads, N, rows_of(V), [&](int64_t first, int64_t last) { kernels().entropy_backward[brief](e, first, last); });
}

API void pspx_norm_rows(const float* x, const float* weight, double eps, int64_t N, int64_t D, float* y, float* r,
                        int threads) {
  const Norm n{x, weight, y, r, nullptr, nullptr, nullptr, D, 1, float(eps)};
  shared(threads, N, rows_of(D), [&](int64_t first, int64_t last) { kernels().norm_rows(n, first, last); });
}

API void pspx_norm_backward(const float* x, const float* weight, const float* r, const float* dy, int64_t N, int64_t D,
                            int64_t rows, float* dx, float* dweight, int threads) {
  const Norm n{x, weight, nullptr, const_cast<float*>(r), dy, dx, dweight, D, rows, 0};
  shared(threads, N, rows, [&](int64_t first, int64_t last) { kernels().norm_backward(n, first, last); });
}

API void pspx_shifted(const float* x, const float* last, const float* mix, const uint8_t* reset, int64_t B, int64_t T,
                      int64_t D, int64_t N, float* const* y, int threads) {
  const Shifted s{x, last, mix, reset, y, nullptr, nullptr, nullptr, nullptr, T, D, N, 1};
  shared(threads, B * T, rows_of(N * D), [&](int64_t first, int64_t end) { kernels().shifted(s, first, end); });
}

API void pspx_shifted_backward(const float* x, const float* last, const float* mix, const uint8_t* reset, int64_t B,
                               int64_t T, int64_t D, int64_t N, int64_t rows, const float* const* dy, float* dx,
                               float* dlast, float* dmix, int threads) {
  const Shifted s{x, last, mix, reset, nullptr, dy, dx, dlast, dmix, T, D, N, rows};
  shared(threads, B * T, rows, [&](int64_t first, int64_t end) { kernels().shifted_backward(s, first, end); });
}

API void pspx_gated(const void* a, const void* b, int brief, int64_t n, void* y, int threads) {
  const Gated g{a, b, y, nullptr, nullptr, nullptr};
  shared(threads, n, 1 << 15, [&](int64_t first, int64_t last) { kernels().gated[brief](g, first, last); });
}

API void pspx_gated_backward(const void* a, const void* b, const void* dy, int brief, int64_t n, void* da, void* db,
                             int threads) {
  const Gated g{a, b, nullptr, dy, da, db};
  shared(threads, n, 1 << 15, [&](int64_t first, int64_t last) { kernels().gated_backward[brief](g, first, last); });
}

API void pspx_gelu(const void* x, int brief, int64_t n, void* y, int threads) {
  const Gelu g{x, y, nullptr, nullptr};
  shared(threads, n, 1 << 15, [&](int64_t first, int64_t last) { kernels().gelu[brief](g, first, last); });
}

API void pspx_gelu_backward(const void* x, const void* dy, int brief, int64_t n, void* dx, int threads) {
  const Gelu g{x, nullptr, dy, dx};
  shared(threads, n, 1 << 15, [&](int64_t first, int64_t last) { kernels().gelu_backward[brief](g, first, last); });
}

API void pspx_decayed(const void* p, const void* v, int brief, int64_t n, float* gamma, float* y, int threads) {
  const Decayed u{p, v, gamma, y, nullptr, nullptr, nullptr, nullptr};
  shared(threads, n, 1 << 15, [&](int64_t first, int64_t last) { kernels().decayed[brief](u, first, last); });
}

API void pspx_decayed_backward(const void* p, const void* v, const float* dgamma, const float* dy, int brief, int64_t n,
                            void* dp, void* dv, int threads) {
  const Decayed u{p, v, nullptr, nullptr, dgamma, dy, dp, dv};
  shared(threads, n, 1 << 15, [&](int64_t first, int64_t last) { kernels().decayed_backward[brief](u, first, last); });
}

API void pspx_convolve(const float* u, const float* weight, const float* bias, const float* sees, int64_t B, int64_t T,
                       int64_t W, int64_t C, float* y, int threads) {
  const Conv c{u, weight, bias, sees, y, nullptr, nullptr, nullptr, nullptr, T, W, C};
  shared(threads, B, 1, [&](int64_t first, int64_t last) { kernels().convolve(c, first, last); });
}

API void pspx_convolve_backward(const float* u, const float* weight, const float* bias, const float* sees,
                                const float* dy, int64_t B, int64_t T, int64_t W, int64_t C, float* du, float* dweight,
                                float* dbias, int threads) {
  const Conv c{u, weight, bias, sees, nullptr, dy, du, dweight, dbias, T, W, C};
  shared(threads, B, 1, [&](int64_t first, int64_t last) { kernels().convolve_backward(c, first, last); });
}

API void pspx_scan_backward(const float* q, const float* k, const float* v, const float* gamma, const float* borders,
                            const float* out, int64_t B, int64_t T, int64_t D, int64_t R, int64_t rows, int64_t segment,
                            float* dq, float* dk, float* dv, float* dgamma, float* dstate, int threads) {
  if (rows > SCAN_ROWS || segment % SCAN_TOKENS != 0) __builtin_trap();
  const ScanBackward s{q, k, v, gamma, borders, out, dq, dk, dv, dgamma, dstate, B, T, D, R, rows, segment};
  shared(threads, B * ceil_div(D, rows), 1, [&](int64_t first, int64_t last) { kernels().scan_backward(s, first, last); });
}

API void pspx_memory(const float* q, const float* k, const float* v, const float* e, const float* b, const float* alpha,
                     int64_t N, int64_t T, int64_t K, int64_t V, int64_t A, int64_t share, float* state, float* o,
                     int threads) {
  const Memory m{q, k, v, e, b, alpha, state, o, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                 N, T, K, V, A, share};
  shared(threads, N * ceil_div(V, 64), 1, [&](int64_t first, int64_t last) { kernels().memory(m, first, last); });
}

API void pspx_memory_backward(const float* q, const float* k, const float* v, const float* e, const float* b,
                              const float* alpha, const float* state, const float* out, int64_t N, int64_t T, int64_t K,
                              int64_t V, int64_t A, int64_t share, float* dq, float* dk, float* de, float* db,
                              float* dalpha, float* dv, float* dstate, int threads) {
  const Memory m{q, k, v, e, b, alpha, const_cast<float*>(state), nullptr, out, dq, dk, de, db, dalpha, dv, dstate,
                 N, T, K, V, A, share};
  shared(threads, N * ceil_div(V, 64), 1, [&](int64_t first, int64_t last) { kernels().memory_backward(m, first, last); });
}

API void pspx_attention(const void* q, const void* k, const void* v, int brief, const int32_t* first, int64_t B, int64_t T,
                        int64_t H, int64_t G, int64_t K, int64_t V, double scale, void* o, float* lse, int threads) {
  const Strides keys{T * G * K, K, G * K}, values{T * G * V, V, G * V};
  const Attention a{q, k, v, first, o, lse, nullptr, nullptr, nullptr, nullptr, T, H, G, K, V, float(scale), keys, values};
  shared(threads, B * G, 1, [&](int64_t from, int64_t to) { kernels().attention[brief](a, from, to); });
}

// Without gradients, after `ahead` other keys: k and v [B][G][ahead + T][·], in float.
API void pspx_attention_after(const float* q, const float* k, const float* v, const int32_t* first, int64_t ahead, int64_t B,
                              int64_t T, int64_t H, int64_t G, int64_t K, int64_t V, double scale, float* o, int threads) {
  const int64_t S = ahead + T;
  const Strides keys{G * S * K, S * K, K}, values{G * S * V, S * V, V};
  const Attention a{q, k, v, first, o, nullptr, nullptr, nullptr, nullptr, nullptr, T, H, G, K, V, float(scale), keys, values, ahead, false};
  shared(threads, B * H, 1, [&](int64_t from, int64_t to) { kernels().attention[0](a, from, to); });
}

API void pspx_attention_backward(const void* q, const void* k, const void* v, int brief, const int32_t* first, int64_t B,
                                 int64_t T, int64_t H, int64_t G, int64_t K, int64_t V, double scale, const void* o,
                                 const float* lse, const void* out, void* dq, void* dk, void* dv, int threads) {
  const Attention a{q, k, v, first, const_cast<void*>(o), const_cast<float*>(lse), out, dq, dk, dv, T, H, G, K, V, float(scale), {}, {}};
  shared(threads, B * G, 1, [&](int64_t from, int64_t to) { kernels().attention_backward[brief](a, from, to); });
}

API void pspx_turn(const void* x, int brief, const float* cosine, const float* sine, int64_t N, int64_t H,
                   int64_t K, int64_t stride, void* y, int threads) {
  const Turn r{x, cosine, sine, y, H, K, stride};
  shared(threads, N, rows_of(H * K), [&](int64_t first, int64_t last) { kernels().turn[brief](r, first, last); });
}
