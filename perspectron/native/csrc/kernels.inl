// The kernels, written once over the vectors that each instruction set defines before it includes this file.
#define ALWAYS __attribute__((always_inline))

constexpr int64_t PREFETCH = 10240;  // bytes ahead, in what is read once from memory

constexpr bool MANY_REGISTERS = TILE * TILE > 12;  // 32 of them

template <int I>
struct Index {
  constexpr operator int() const { return I; }
};
template <int... I, class F>
inline ALWAYS void unrolled(F&& f, Index<sizeof...(I)>, std::integer_sequence<int, I...>) {
  (f(Index<I>{}), ...);
}
// f(Index<0>{}), …: the compiler must see separate variables before it decides what lives in registers.
template <int N, class F>
inline ALWAYS void unroll(F&& f) {
  unrolled(f, Index<N>{}, std::make_integer_sequence<int, N>{});
}

#include "tokens.inl"

#include "products.inl"

#include "tiles.inl"

void multiply(const Matrix& m, const Tokens& tokens, int64_t first, int64_t last, float* y, int64_t ld) {
  switch (m.format) {
    case TERNARY: return multiply_as<TERNARY>(m, tokens, first, last, y, ld);
    case TWO_BIT: return multiply_as<TWO_BIT>(m, tokens, first, last, y, ld);
    case FOUR_BIT: return multiply_as<FOUR_BIT>(m, tokens, first, last, y, ld);
    case INT8: return multiply_as<INT8>(m, tokens, first, last, y, ld);
    case FOUR_BIT_32: return multiply_tiles<FOUR_BIT_32>(m, tokens, first, last, y, ld);
    case EIGHT_BIT_32: return multiply_tiles<EIGHT_BIT_32>(m, tokens, first, last, y, ld);
  }
}

#include "scan.inl"

#include "scan_backward.inl"

#include "memory.inl"

#include "training.inl"

#include "attention.inl"

#include "walk.inl"

#define PERSPECTRON_KERNELS
#if __has_include("adr.inl")
#include "adr.inl"
#endif
#if __has_include("drm.inl")
#include "drm.inl"
#endif
#undef PERSPECTRON_KERNELS

#include "tape.inl"

// Four streams at once and no prefetches: a tenth faster than one stream, with prefetches or without.
uint64_t read_all(const uint8_t* p, int64_t n) {
  Bytes sum[4] = {bytes_of(0), bytes_of(0), bytes_of(0), bytes_of(0)};
  const int64_t quarter = n / (4 * LINE) * LINE;
  for (int64_t i = 0; i < quarter; i += LINE)
    unroll<4>([&](auto u) ALWAYS {
      sum[u] = exclusive_or(sum[u], load(p + u * quarter + i));
      opaque(sum[u]);  // gcc would copy each sum in each turn, and fewer loads would be under way
    });
  alignas(64) uint8_t lanes[64];
  store(lanes, exclusive_or(exclusive_or(sum[0], sum[1]), exclusive_or(sum[2], sum[3])));
  uint64_t all = 0;
  for (uint8_t x : lanes) all += x;
  for (int64_t i = 4 * quarter; i < n; i++) all += p[i];
  return all;
}

double dots_in_registers(int64_t repeats) {
  constexpr int CHAINS = MANY_REGISTERS ? 20 : 4;
  Ints sum[CHAINS];
  unroll<CHAINS>([&](auto i) ALWAYS { sum[i] = zero_ints(); });
  Bytes codes = bytes_of(3), q = bytes_of(5);
  for (int64_t n = 0; n < repeats; n++) {
    opaque(q);
    unroll<CHAINS>([&](auto i) ALWAYS {
      opaque(codes);  // or one product would serve all
      dot<TERNARY>(sum[i], codes, q);
    });
  }
  unroll<CHAINS - 1>([&](auto i) ALWAYS { sum[0] = add(sum[0], sum[i + 1]); });
  volatile int32_t used = total(sum[0]);
  (void)used;
  return double(repeats) * CHAINS * 64;
}

constexpr Kernels table(const char* name) {
  return {name, FEW, quantise, quantise_groups, multiply, silu, scan, scan_backward, memory<false>, memory<true>, dot_product, read_all, dots_in_registers,
          {entropy<float>, entropy<uint16_t>}, {entropy_backward<float>, entropy_backward<uint16_t>},
          {gated<float>, gated<uint16_t>}, {gated_backward<float>, gated_backward<uint16_t>},
          {gelu<float>, gelu<uint16_t>}, {gelu_backward<float>, gelu_backward<uint16_t>},
          {decayed<float>, decayed<uint16_t>}, {decayed_backward<float>, decayed_backward<uint16_t>},
          {attention<float>, attention<uint16_t>}, {attention_backward<float>, attention_backward<uint16_t>}, {turn<float>, turn<uint16_t>},
          shifted, shifted_backward, norm_rows, norm_backward, convolve, convolve_backward, tape::run, tape::product, tape::attend_ring,
#if __has_include("adr.inl")
          gru<Gru>, gru<GruBackward>,
#endif
#if __has_include("drm.inl")
          drm<Drm>, drm<DrmBackward>,
#endif
  };
}
