// What Python calls: plain C, no allocation that Python must free. Where memory for scratch runs out, std::bad_alloc
// ends the process.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.h"
#include "pool.h"

#define API extern "C" __attribute__((visibility("default")))

namespace perspectron {

namespace {

std::atomic<bool> poison{false};

struct Buffer {  // of one thread, kept until it ends
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }

  void* of(size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = 0;
      data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (data == nullptr) throw std::bad_alloc();
      size = bytes;
    }
    if (poison.load(std::memory_order_relaxed)) std::memset(data, 0xff, size);
    return data;
  }
};

const Kernels* const* all_kernels(int* count) {
#ifdef PERSPECTRON_X86
  static const Kernels* const found[] = {&SCALAR, &AVX2, &AVX512};
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and F16C, which every CPU with AVX2 has
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  *count = avx512 ? 3 : avx2 ? 2 : 1;
#else
  static const Kernels* const found[] = {&SCALAR};
  *count = 1;
#endif
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* now = chosen.load(std::memory_order_relaxed);
  if (now == nullptr) {
    int count;
    const Kernels* const* found = all_kernels(&count);
    chosen.store(now = found[count - 1], std::memory_order_relaxed);
  }
  return *now;
}

// Tokens quantised into memory of the calling thread; `which` keeps two of them apart.
Tokens tokens_in_scratch(int which, int64_t T, int64_t K, Format format) {
  static thread_local Buffer buffers[2];
  const int64_t S = ceil_div(K, LINE) * LINE, stride = S + LINE, G = ceil_div(S, GROUP);
  if (tiled(format)) {
    const int64_t numbers = T * (S / TILE_GROUP);
    char* data = static_cast<char*>(buffers[which].of(size_t(T * stride + 3 * numbers * 4)));
    float* steps = reinterpret_cast<float*>(data + T * stride);
    int32_t* zeros = reinterpret_cast<int32_t*>(steps + 2 * numbers);
    return {reinterpret_cast<int8_t*>(data), nullptr, nullptr, nullptr, T, K, S, stride, steps, steps + numbers, zeros};
  }
  const int64_t numbers = T * (2 + G);  // an odd stride keeps the tokens of a tile in different sets of the cache
  char* data = static_cast<char*>(buffers[which].of(size_t(T * stride + numbers * 4)));
  int32_t* sum = reinterpret_cast<int32_t*>(data + T * stride);
  float* step = reinterpret_cast<float*>(sum + T * (1 + G));
  return {reinterpret_cast<int8_t*>(data), step, sum, sum + T, T, K, S, stride, nullptr, nullptr, nullptr};
}

void quantise_one(const Kernels& k, const float* x, const Tokens& into, int64_t token) {
  (into.steps == nullptr ? k.quantise : k.quantise_groups)(x, into, token);
}

void quantise_all(const Kernels& k, const float* x, const Tokens& into, Claims& claims) {
  for (int64_t first, last; claims.next(first, last);)
    for (int64_t t = first; t < last; t++) quantise_one(k, x + t * into.K, into, t);
}

Claims token_claims(int64_t T) { return {T, 4}; }

// Bytes to read in one go of so many: long, because a stretch starts before its prefetches are there, and some for
// each thread, because threads are not equally fast.
int64_t stretch(int64_t bytes, int threads) {
  const int64_t fair = bytes / (8 * threads), least = int64_t(64) << 10;
  return fair > least ? fair : least;
}

// Rows in pieces: large enough to be read in one go, small enough to share out and, for many tokens, for the decoded
// codes to stay in the second-level cache. Whole tiles: 20 rows are whole tiles of every format.
int64_t grain(const Kernels& k, const Matrix& m, int64_t T, int threads) {
  const int64_t R = ROWS[m.format];
  if (T <= k.few) return ceil_div(stretch(m.blocks() * m.line(), threads), m.line());
  if (tiled(m.format)) {  // of the second-level cache
    const int64_t tiles = (int64_t(256) << 10) / m.line(), fair = ceil_div(m.blocks(), 4 * threads);
    return tiles < 1 ? 1 : tiles < fair ? tiles : fair;
  }
  int64_t rows = (int64_t(384) << 10) / (grouped(m.format) || m.S < 4096 ? m.S : 4096);
  const int64_t fair = ceil_div(m.N, 4 * threads);
  rows = rows < fair ? rows : fair;
  rows = ceil_div(rows < 480 ? rows : 480, 20) * 20;
  return rows / R;
}

// Threads that pay: waking one takes as long as reading some hundred kilobytes.
int useful(int threads, int64_t bytes, int64_t T) {
  const int64_t most = 1 + bytes * T / (int64_t(256) << 10);
  return int(threads < most ? threads : most);
}

int64_t bytes_of(const Matrix& m) { return m.blocks() * m.line(); }

Matrix matrix(const uint8_t* codes, const void* scales, int format, int64_t N, int64_t K) {
  return {codes, scales, Format(format), N, ceil_div(K, LINE) * LINE};
}

}  // namespace

void* scratch(Slot slot, size_t bytes) {
  static thread_local Buffer buffers[SLOTS];
  return buffers[slot].of(bytes);
}

}  // namespace perspectron

using namespace perspectron;

#ifndef PERSPECTRON_DIGEST
#define PERSPECTRON_DIGEST ""
#endif

API const char* pspx_digest() { return PERSPECTRON_DIGEST; }

API const char* pspx_isa() { return kernels().name; }

// 1 when this machine has it.
API int pspx_set_isa(const char* name) {
  int count;
  const Kernels* const* found = all_kernels(&count);
  for (int i = 0; i < count; i++)
    if (std::strcmp(name, found[i]->name) == 0) {
      chosen.store(found[i]);
      return 1;
    }
  return 0;
}

API void pspx_forked() { forked(); }

API void pspx_poison(int on) { poison.store(on != 0); }

namespace {

// y = x Wᵀ of tokens that are quantised already, or of x.
void multiply_all(const Kernels& k, const float* x, const Tokens& tokens, bool quantised, const Matrix& m, float* y, int threads) {
  threads = useful(threads, bytes_of(m), tokens.T);
  Claims ready = token_claims(tokens.T), rows(m.blocks(), grain(k, m, tokens.T, threads));
  if (tokens.T == 1 && !quantised) quantise_all(k, x, tokens, ready);
  parallel(threads, [&](Team& team) {
    if (tokens.T > 1 && !quantised) {
      quantise_all(k, x, tokens, ready);
      team.barrier();
    }
    for (int64_t first, last; rows.next(first, last);) k.multiply(m, tokens, first, last, y, m.N);
  });
}

}  // namespace

API void pspx_linear(const float* x, int64_t T, int64_t K, const uint8_t* codes, const void* scales, int format,
                     int64_t N, float* y, int threads) {
  const Tokens tokens = tokens_in_scratch(0, T, K, Format(format));
  multiply_all(kernels(), x, tokens, false, matrix(codes, scales, format, N, K), y, threads);
}

// rows: null, or which row of x and y each token is.
API void pspx_swiglu(const float* x, int64_t T, const int64_t* rows, int64_t D, int64_t F, const uint8_t* gate_codes,
                     const void* gate_scales, const uint8_t* up_codes, const void* up_scales, const uint8_t* down_codes,
                     const void* down_scales, int format, float* y, int threads) {
  const Kernels& k = kernels();
  const Matrix gate = matrix(gate_codes, gate_scales, format, F, D), up = matrix(up_codes, up_scales, format, F, D);
  const Matrix down = matrix(down_codes, down_scales, format, D, F);
  threads = useful(threads, 3 * bytes_of(gate), T);
  static thread_local Buffer hiddens;
  float* hidden = static_cast<float*>(hiddens.of(size_t(2 * T * F + (rows != nullptr) * T * D) * sizeof(float)));
  float *other = hidden + T * F, *out = rows == nullptr ? y : other + T * F;
  const Tokens tokens = tokens_in_scratch(0, T, D, gate.format), inner = tokens_in_scratch(1, T, F, gate.format);
  Claims ready = token_claims(T), blocks(gate.blocks(), grain(k, gate, T, threads));
  Claims inner_ready = token_claims(T), inner_blocks(down.blocks(), grain(k, down, T, threads));
  const auto place = [&](int64_t t) { return (rows == nullptr ? t : rows[t]) * D; };
  parallel(threads, [&](Team& team) {
    for (int64_t first, last; ready.next(first, last);)
      for (int64_t t = first; t < last; t++) quantise_one(k, x + place(t), tokens, t);
    team.barrier();
    for (int64_t first, last; blocks.next(first, last);) {
      k.multiply(gate, tokens, first, last, hidden, F);
      k.multiply(up, tokens, first, last, other, F);
      const int64_t row = first * ROWS[format], end = last * ROWS[format] < F ? last * ROWS[format] : F;
      for (int64_t t = 0; t < T; t++) k.silu(hidden + t * F + row, other + t * F + row, end - row);
    }
    team.barrier();
    quantise_all(k, hidden, inner, inner_ready);
    team.barrier();
    for (int64_t first, last; inner_blocks.next(first, last);) {
      k.multiply(down, inner, first, last, out, D);
      const int64_t row = first * ROWS[format], end = last * ROWS[format] < D ? last * ROWS[format] : D;
      for (int64_t t = 0; rows != nullptr && t < T; t++)
        std::memcpy(y + place(t) + row, out + t * D + row, size_t(end - row) * sizeof(float));
    }
  });
}

API void pspx_scan(const float* q, const float* k, const float* v, const float* gamma, float* state, float* o,
                   float* borders, int64_t B, int64_t T, int64_t D, int64_t R, int64_t segment, int threads) {
  if (segment % SCAN_TOKENS != 0) __builtin_trap();
  const Kernels& with = kernels();
  const Scan all{q, k, v, gamma, state, o, borders, B, T, D, R, segment};
  const int64_t grain = ceil_div(ceil_div(int64_t(64) << 10, 4 * R), 16) * 16;  // whole lines of v, γ and o
  Claims claims(B * D, grain);
  parallel(useful(threads, 4 * B * D * R, T), [&](Team&) {
    for (int64_t first, last; claims.next(first, last);) with.scan(all, first, last);
  });
}

API uint64_t pspx_read(const uint8_t* p, int64_t n, int threads) {
  const Kernels& k = kernels();
  Claims claims(n, ceil_div(stretch(n, threads), 4096) * 4096);
  std::atomic<uint64_t> sum{0};
  Claims places(threads, 1);  // on so many threads, however large the team is
  parallel(useful(threads, n, 1), [&](Team&) {
    uint64_t own = 0;
    int64_t place, after;
    if (!places.next(place, after)) return;
    for (int64_t first, last; claims.next(first, last);) own += k.read(p + first, last - first);
    sum += own;
  });
  return sum;
}

// Multiply-adds of int8 a second, all in registers, over some milliseconds.
API double pspx_peak(int threads) {
  const Kernels& k = kernels();
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int64_t> made{0};
  Claims places(threads, 1);
  parallel(threads, [&](Team&) {
    double own = 0;
    int64_t place, after;
    if (!places.next(place, after)) return;
    for (int i = 0; i < 50; i++) own += k.dots(5000);
    made += int64_t(own);
  });
  return double(made) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The router: z = W x + b; power distances from z to the E places on a torus, or −z of a switch (place null), less
// what each expert is preferred by (handicap, or null); and the expert of the least, ties to the lowest id, a NaN
// before all. z and distance: or null.
API void pspx_route(const float* x, int64_t T, int64_t D, const float* weight, const float* bias, int64_t A,
                    const float* place, const float* handicap, int64_t E, float* z, float* distance, int64_t* expert) {
  const Kernels& k = kernels();
  float* own = scratch<float>(SCORES, A);
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

#include "api_training.inl"

#include "api_tape.inl"

#define PERSPECTRON_API
#if __has_include("adr.inl")
#include "adr.inl"
#endif
#if __has_include("drm.inl")
#include "drm.inl"
#endif
