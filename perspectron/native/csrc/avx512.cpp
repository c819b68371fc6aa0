// AVX-512 with VNNI and VBMI. Compiled with those flags; nothing here runs before the CPU was asked.
#include <immintrin.h>

#include <initializer_list>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace perspectron {
namespace {

using Bytes = __m512i;  // 64 codes or 64 activations, one a column
using Ints = __m512i;   // 16 lanes; lane l sums columns 4 l … 4 l + 3
using Floats = __m512;
constexpr int FEW = 4, FEW_GROUPED = 2;   // tokens whose accumulators fit in registers with the decoding
constexpr int STREAMS = 4;                // blocks of one token's product at once
constexpr int TILE = 5, TILE_GROUPED = 2; // tokens in a tile of the product over many
constexpr int TILE_TOKENS = 8;            // tokens at a time against 16 rows

inline Bytes load(const void* p) {
  Bytes x = _mm512_loadu_si512(p);
  __asm__("" : "+v"(x));  // gcc would load it again for every use
  return x;
}
inline void store(void* p, Bytes x) { _mm512_storeu_si512(p, x); }
inline Bytes exclusive_or(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes bytes_of(uint8_t x) { return _mm512_set1_epi8(char(x)); }
inline void opaque(Bytes& x) { __asm__ volatile("" : "+v"(x)); }

// Codes come out times fold: a mask alone parts the fields of a byte, where a shift would be one more instruction.
template <Format F>
struct Decoder {
  static constexpr int fold(int r) { return F == FOUR_BIT ? 1 << 4 * r : r == 4 ? 84 : 1 << 2 * r; }
  Bytes mask[4];
  Bytes fifth, low, high;

  Decoder() {
    alignas(64) uint8_t fifths[64], packed[128];
    for (int i = 0; i < 64; i++) fifths[i] = uint8_t(i >= 42 ? 168 : i >= 21 ? 84 : 0);  // byte / 4 tells the fifth code
    for (int i = 0; i < 128; i++) packed[i] = i > 80 ? 0 : uint8_t(i % 3 | i / 3 % 3 << 2 | i / 9 % 3 << 4 | i / 27 << 6);
    fifth = load(fifths), low = load(packed), high = load(packed + 64);
    for (int r = 0; r < 4; r++) mask[r] = F == FOUR_BIT ? bytes_of(uint8_t(15 << 4 * (r & 1))) : bytes_of(uint8_t(3 << 2 * r));
  }
  inline __attribute__((always_inline)) void operator()(Bytes x, Bytes* codes) const {
    if constexpr (F == INT8) {
      codes[0] = x;
      return;
    }
    if constexpr (F == TERNARY) {
      codes[4] = _mm512_permutexvar_epi8(_mm512_srli_epi16(x, 2), fifth);  // takes the low 6 bits of each byte
      x = _mm512_permutex2var_epi8(low, _mm512_sub_epi8(x, codes[4]), high);
    }
    for (int r = 0; r < (F == FOUR_BIT ? 2 : 4); r++) codes[r] = _mm512_and_si512(x, mask[r]);
  }
};

// From folded to plain codes: 84 and 168 are 1 and 2 in their top bits.
template <Format F>
inline Bytes unfolded(Bytes codes, int r) {
  if (F == INT8 || r == 0) return codes;
  return _mm512_and_si512(_mm512_srli_epi16(codes, F == FOUR_BIT ? 4 * r : r == 4 ? 6 : 2 * r), bytes_of(F == FOUR_BIT ? 15 : 3));
}

// In assembly, because gcc 12 copies and spills the accumulators of the intrinsic when there are twenty.
template <Format>
inline void dot(Ints& sum, Bytes codes, Bytes q) {
  __asm__("vpdpbusd %2,%1,%0" : "+v"(sum) : "v"(codes), "v"(q));
}

// Of tiles: the codes of columns that are four apart, four columns of all rows, and sums of a row in its lane.
inline Bytes low_halves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return low_halves(_mm512_srli_epi16(x, 4)); }
inline Bytes repeated(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
template <bool>
inline void lane_dots(Ints& sum, Bytes a, Bytes qa, Bytes b, Bytes qb) {
  dot<INT8>(sum, a, qa), dot<INT8>(sum, b, qb);
}
inline Ints begun(int32_t zero) { return _mm512_set1_epi32(zero); }
inline Floats floats_of_bytes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline int32_t total(Ints a) { return _mm512_reduce_add_epi32(a); }
inline void add_totals(Ints a, Ints b, Ints c, Ints d, int32_t* into) {
  const Ints ab = add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const Ints cd = add(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const Ints x = add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i z = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  _mm_storeu_si128((__m128i*)into, _mm_add_epi32(_mm_loadu_si128((const __m128i*)into), z));
}

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats root(Floats a) { return _mm512_sqrt_ps(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }     // b where either is NaN
inline Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
inline Floats chosen(Floats a, Floats b, Floats x, Floats y) {  // x where a < b, else y
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load_floats(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(__mmask16((1 << n) - 1), p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, Floats x, int64_t n) { _mm512_mask_storeu_ps(p, __mmask16((1 << n) - 1), x); }

inline Ints magnitude_bits(Floats x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
inline Ints greatest(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline int32_t greatest_of(Ints a) { return _mm512_reduce_max_epi32(a); }
inline Ints round_to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline void store_bytes(int8_t* p, Ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
inline Floats power_of_two(Floats shifted) {  // of n, given n + 1.5 · 2^23
  const Ints exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)));
}

// bfloat16, rounded to nearest, ties to even; NaN stays NaN.
inline Floats load_brief(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_brief(uint16_t* p, Floats x) {
  const Ints bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  Ints rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Products of pairs of bfloat16, for processors that have instructions for them: sum + y₁ x₁ + y₀ x₀, each as an fma would add
// it. In assembly: the rest of this file runs without them.
struct Paired {
  static constexpr int PAIR = 2, ITEM = 2;
  static bool known() { return __builtin_cpu_supports("avx512bf16"); }
  static inline Floats dot(Floats sum, Floats y, Floats x) {
    __asm__("vdpbf16ps %2,%1,%0" : "+v"(sum) : "v"(y), "v"(x));
    return sum;
  }
  static inline void brief(float* to, Floats low, Floats high) {
    Ints both;
    __asm__("vcvtne2ps2bf16 %2,%1,%0" : "=v"(both) : "v"(high), "v"(low));
    _mm512_storeu_si512(to, both);
  }
  static inline Floats joined(const uint16_t* first, const uint16_t* second) {
    const Ints low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
    const Ints high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};

#include "eight.inl"

inline float tree(Floats x) {
  return tree_of(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
// The trees of 16 vectors, added in pairs as each would be alone.
inline Floats trees(const Floats* x) {
  const auto halves = [&](int a, int b) { return add(_mm512_shuffle_f32x4(x[a], x[b], 0x44), _mm512_shuffle_f32x4(x[a], x[b], 0xee)); };
  const auto quarters = [](Floats a, Floats b) { return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  const auto four = [&](int i) { return quarters(halves(i, 4 + i), halves(8 + i, 12 + i)); };
  const auto eights = [](Floats a, Floats b) {
    const __m512d left = _mm512_castps_pd(a), right = _mm512_castps_pd(b);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)), _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  };
  const Floats a = eights(four(0), four(1)), b = eights(four(2), four(3));
  return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
inline Floats spread(Eight x, int r) {
  return _mm512_permutexvar_ps(_mm512_set1_epi32(r), _mm512_castps256_ps512(x));
}

#include "kernels.inl"

}  // namespace

const Kernels AVX512 = table("avx512");

}  // namespace perspectron
