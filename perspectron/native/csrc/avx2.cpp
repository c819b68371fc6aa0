// AVX2 with FMA and F16C. Compiled with those flags; nothing here runs before the CPU was asked.
#include <immintrin.h>

#include <initializer_list>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace perspectron {
namespace {

// Lanes are those of AVX-512, in two halves.
struct Bytes {
  __m256i half[2];
};
struct Ints {
  __m256i half[2];
};
struct Floats {
  __m256 half[2];
};
constexpr int FEW = 1, FEW_GROUPED = 1, STREAMS = 1, TILE = 1, TILE_GROUPED = 1, TILE_TOKENS = 3;

#define EACH(T, expression) (T{{[&](int i) { return (expression); }(0), [&](int i) { return (expression); }(1)}})

inline Bytes load(const void* p) {
  return EACH(Bytes, _mm256_loadu_si256((const __m256i*)p + i));
}
inline void store(void* p, Bytes x) {
  for (int i = 0; i < 2; i++) _mm256_storeu_si256((__m256i*)p + i, x.half[i]);
}
inline Bytes exclusive_or(Bytes a, Bytes b) { return EACH(Bytes, _mm256_xor_si256(a.half[i], b.half[i])); }
inline Bytes bytes_of(uint8_t x) { return EACH(Bytes, (void(i), _mm256_set1_epi8(char(x)))); }
inline void opaque(Bytes& x) { __asm__ volatile("" : "+x"(x.half[0]), "+x"(x.half[1])); }

template <Format F>
struct Decoder {
  static constexpr int fold(int) { return 1; }

  inline __attribute__((always_inline)) void operator()(Bytes x, Bytes* codes) const {
    for (int i = 0; i < 2; i++) {
      if constexpr (F == INT8) {
        codes[0].half[i] = x.half[i];
      } else if constexpr (F == TERNARY) {
        ternary(x.half[i], codes, i);
      } else {
        constexpr int bits = F == TWO_BIT ? 2 : 4;
        const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
        for (int r = 0; r < ROWS[F]; r++)
          codes[r].half[i] = _mm256_and_si256(_mm256_srli_epi16(x.half[i], bits * r), mask);
      }
    }
  }

 private:
  // x / d of every byte, as the high half of products with 65536 / d, rounded up: odd bytes stand 8 bits higher.
  static inline __m256i divided(__m256i x, short factor) {
    const __m256i low = _mm256_set1_epi16(255), by = _mm256_set1_epi16(factor);
    const __m256i even = _mm256_mulhi_epu16(_mm256_and_si256(x, low), by);
    const __m256i odd = _mm256_mulhi_epu16(_mm256_andnot_si256(low, x), by);
    return _mm256_or_si256(even, _mm256_andnot_si256(low, odd));
  }
  static inline void ternary(__m256i x, Bytes* codes, int i) {
    const auto look = [](__m128i table, __m256i at) {
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), at);
    };
    const __m128i times_84 = _mm_setr_epi8(0, 84, char(168), char(252), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i modulo_3 = _mm_setr_epi8(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0);
    const __m128i over_3 = _mm_setr_epi8(0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0);
    const __m256i fifth = divided(x, 781);
    x = _mm256_sub_epi8(x, look(times_84, fifth));
    const __m256i nines = divided(x, 7282);
    x = _mm256_sub_epi8(x, _mm256_add_epi8(nines, _mm256_slli_epi16(nines, 3)));
    codes[0].half[i] = look(modulo_3, x), codes[1].half[i] = look(over_3, x);
    codes[2].half[i] = look(modulo_3, nines), codes[3].half[i] = look(over_3, nines);
    codes[4].half[i] = fifth;
  }
};

template <Format>
inline Bytes unfolded(Bytes codes, int) {
  return codes;
}

// Codes of eight bits would saturate the sums of 16 bits: those are widened first.
template <Format F>
inline void dot(Ints& sum, Bytes codes, Bytes q) {
  for (int i = 0; i < 2; i++) {
    __m256i products;
    if constexpr (F == INT8) {
      const auto part = [&](__m128i c, __m128i a) {
        return _mm256_madd_epi16(_mm256_cvtepu8_epi16(c), _mm256_cvtepi8_epi16(a));
      };
      products = _mm256_add_epi32(
          part(_mm256_castsi256_si128(codes.half[i]), _mm256_castsi256_si128(q.half[i])),
          part(_mm256_extracti128_si256(codes.half[i], 1), _mm256_extracti128_si256(q.half[i], 1)));
    } else {
      products = _mm256_madd_epi16(_mm256_maddubs_epi16(codes.half[i], q.half[i]), _mm256_set1_epi16(1));
    }
    sum.half[i] = _mm256_add_epi32(sum.half[i], products);
  }
}

// Of tiles, as AVX-512 has it, but codes of eight bits have their sign, so that sums of pairs fit in 16.
inline Bytes low_halves(Bytes x) { return EACH(Bytes, _mm256_and_si256(x.half[i], _mm256_set1_epi8(15))); }
inline Bytes high_halves(Bytes x) {
  return EACH(Bytes, _mm256_and_si256(_mm256_srli_epi16(x.half[i], 4), _mm256_set1_epi8(15)));
}
inline Bytes repeated(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m256i all = _mm256_set1_epi32(four);
  return {{all, all}};
}
template <bool FOUR>
inline void lane_dots(Ints& sum, Bytes a, Bytes qa, Bytes b, Bytes qb) {
  const auto signed_dot = [](__m256i code, __m256i q) {
    const __m256i w = _mm256_xor_si256(code, _mm256_set1_epi8(char(128)));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(w, q));
  };
  const __m256i one = _mm256_set1_epi16(1);
  for (int i = 0; i < 2; i++) {
    if constexpr (FOUR) {
      const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(a.half[i], qa.half[i]), _mm256_maddubs_epi16(b.half[i], qb.half[i]));
      sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(pairs, one));
    } else {
      const __m256i first = _mm256_madd_epi16(signed_dot(a.half[i], qa.half[i]), one);
      const __m256i second = _mm256_madd_epi16(signed_dot(b.half[i], qb.half[i]), one);
      sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_add_epi32(first, second));
    }
  }
}
inline Ints begun(int32_t) { return EACH(Ints, (void(i), _mm256_setzero_si256())); }
inline Floats floats_of_bytes(const uint8_t* p) {
  return EACH(Floats, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)))));
}

inline Ints zero_ints() { return EACH(Ints, (void(i), _mm256_setzero_si256())); }
inline Ints add(Ints a, Ints b) { return EACH(Ints, _mm256_add_epi32(a.half[i], b.half[i])); }
inline Floats to_floats(Ints a) { return EACH(Floats, _mm256_cvtepi32_ps(a.half[i])); }
inline int32_t total(Ints a) {
  const __m256i x = _mm256_add_epi32(a.half[0], a.half[1]);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_hadd_epi32(y, y);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(y, y));
}
inline void add_totals(Ints a, Ints b, Ints c, Ints d, int32_t* into) {
  into[0] += total(a), into[1] += total(b), into[2] += total(c), into[3] += total(d);
}

inline Floats broadcast(float x) { return EACH(Floats, (void(i), _mm256_set1_ps(x))); }
inline Floats add(Floats a, Floats b) { return EACH(Floats, _mm256_add_ps(a.half[i], b.half[i])); }
inline Floats mul(Floats a, Floats b) { return EACH(Floats, _mm256_mul_ps(a.half[i], b.half[i])); }
inline Floats div(Floats a, Floats b) { return EACH(Floats, _mm256_div_ps(a.half[i], b.half[i])); }
inline Floats root(Floats a) { return EACH(Floats, _mm256_sqrt_ps(a.half[i])); }
inline Floats fma(Floats a, Floats b, Floats c) {
  return EACH(Floats, _mm256_fmadd_ps(a.half[i], b.half[i], c.half[i]));
}
inline Floats least(Floats a, Floats b) { return EACH(Floats, _mm256_min_ps(a.half[i], b.half[i])); }
inline Floats greatest(Floats a, Floats b) { return EACH(Floats, _mm256_max_ps(a.half[i], b.half[i])); }
inline Floats magnitude(Floats a) { return EACH(Floats, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.half[i])); }
inline Floats chosen(Floats a, Floats b, Floats x, Floats y) {  // x where a < b, else y
  return EACH(Floats, _mm256_blendv_ps(y.half[i], x.half[i], _mm256_cmp_ps(a.half[i], b.half[i], _CMP_LT_OQ)));
}
inline Floats load_floats(const float* p) { return EACH(Floats, _mm256_loadu_ps(p + 8 * i)); }
inline Floats load_floats(const float* p, int64_t n) {
  float whole[16] = {};
  for (int64_t i = 0; i < n; i++) whole[i] = p[i];
  return load_floats(whole);
}
inline void store(float* p, Floats x) {
  for (int i = 0; i < 2; i++) _mm256_storeu_ps(p + 8 * i, x.half[i]);
}
inline void store(float* p, Floats x, int64_t n) {
  float whole[16];
  store(whole, x);
  for (int64_t i = 0; i < n; i++) p[i] = whole[i];
}

inline Ints magnitude_bits(Floats x) {
  return EACH(Ints, _mm256_and_si256(_mm256_castps_si256(x.half[i]), _mm256_set1_epi32(0x7fffffff)));
}
inline Ints greatest(Ints a, Ints b) { return EACH(Ints, _mm256_max_epi32(a.half[i], b.half[i])); }
inline int32_t greatest_of(Ints a) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256((__m256i*)lanes, _mm256_max_epi32(a.half[0], a.half[1]));
  int32_t found = lanes[0];
  for (int32_t x : lanes) found = x > found ? x : found;
  return found;
}
inline Ints round_to_ints(Floats x) { return EACH(Ints, _mm256_cvtps_epi32(x.half[i])); }
inline void store_bytes(int8_t* p, Ints x) {
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.half[0], x.half[1]), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
inline Floats power_of_two(Floats shifted) {  // of n, given n + 1.5 · 2^23
  return EACH(Floats, _mm256_castsi256_ps(_mm256_add_epi32(
                          _mm256_slli_epi32(_mm256_castps_si256(shifted.half[i]), 23), _mm256_set1_epi32(127 << 23))));
}

// bfloat16, rounded to nearest, ties to even; NaN stays NaN.
inline Floats load_brief(const uint16_t* p) {
  return EACH(Floats, _mm256_castsi256_ps(_mm256_slli_epi32(
                          _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8 * i))), 16)));
}
inline void store_brief(uint16_t* p, Floats x) {
  for (int i = 0; i < 2; i++) {
    const __m256i bits = _mm256_castps_si256(x.half[i]), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(x.half[i], x.half[i], _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), unordered), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0xd8);
    _mm_storeu_si128((__m128i*)(p + 8 * i), _mm256_castsi256_si128(packed));
  }
}

#include "eight.inl"

inline float tree(Floats x) { return tree_of(_mm256_add_ps(x.half[0], x.half[1])); }
inline Floats trees(const Floats* x) {
  float sums[16];
  for (int i = 0; i < 16; i++) sums[i] = tree(x[i]);
  return load_floats(sums);
}
inline Floats spread(Eight x, int r) {
  const __m256 all = _mm256_permutevar8x32_ps(x, _mm256_set1_epi32(r));
  return {{all, all}};
}

using Paired = void;  // pairs of bfloat16 have no instructions here

#include "kernels.inl"

}  // namespace

const Kernels AVX2 = table("avx2");

}  // namespace perspectron
