// Plain C++, for every processor: the same lanes as AVX-512, in arrays.
#include <cmath>
#include <cstring>

#include <initializer_list>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace perspectron {
namespace {

struct Bytes {
  uint8_t at[64];
};
struct Ints {
  int32_t at[16];
};
struct Floats {
  float at[16];
};
constexpr int FEW = 1, FEW_GROUPED = 1, STREAMS = 1, TILE = 1, TILE_GROUPED = 1, TILE_TOKENS = 2;

template <class T = Floats, class F>
inline T each(F f) {
  T y;
  for (int i = 0; i < 16; i++) y.at[i] = f(i);
  return y;
}
inline int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline Bytes load(const void* p) {
  Bytes x;
  std::memcpy(x.at, p, 64);
  return x;
}
inline void store(void* p, const Bytes& x) { std::memcpy(p, x.at, 64); }
inline Bytes exclusive_or(Bytes a, const Bytes& b) {
  for (int i = 0; i < 64; i++) a.at[i] ^= b.at[i];
  return a;
}
inline Bytes bytes_of(uint8_t x) {
  Bytes y;
  std::memset(y.at, x, 64);
  return y;
}
inline void opaque(Bytes& x) { __asm__ volatile("" : "+m"(x)); }

template <Format F>
struct Decoder {
  static constexpr int fold(int) { return 1; }

  inline void operator()(const Bytes& x, Bytes* codes) const {
    for (int i = 0; i < 64; i++) {
      if constexpr (F == INT8) {
        codes[0].at[i] = x.at[i];
      } else if constexpr (F == TERNARY) {
        // Quotients as products of 16 bits, which compilers turn into vectors.
        const uint16_t fifth = uint16_t(x.at[i] * 49) >> 12, rest = uint16_t(x.at[i] - 84 * fifth);
        const uint16_t nines = uint16_t(rest * 57) >> 9, ones = uint16_t(rest - 9 * nines);
        const uint16_t second = uint16_t(ones * 171) >> 9, fourth = uint16_t(nines * 171) >> 9;
        codes[0].at[i] = uint8_t(ones - 3 * second), codes[1].at[i] = uint8_t(second);
        codes[2].at[i] = uint8_t(nines - 3 * fourth), codes[3].at[i] = uint8_t(fourth), codes[4].at[i] = uint8_t(fifth);
      } else {
        constexpr int bits = F == TWO_BIT ? 2 : 4;
        for (int r = 0; r < ROWS[F]; r++) codes[r].at[i] = uint8_t(x.at[i] >> bits * r & ((1 << bits) - 1));
      }
    }
  }
};

template <Format>
inline const Bytes& unfolded(const Bytes& codes, int) {
  return codes;
}

// Where only the total counts, any lane does; neighbours of one sum would keep compilers from using vectors.
template <Format F>
inline void dot(Ints& sum, const Bytes& codes, const Bytes& q) {
  int16_t products[64];
  for (int i = 0; i < 64; i++) products[i] = int16_t(int16_t(codes.at[i]) * int16_t(int8_t(q.at[i])));
  if constexpr (grouped(F)) {
    for (int l = 0; l < 16; l++)
      for (int i = 4 * l; i < 4 * l + 4; i++) sum.at[l] += products[i];
  } else {
    for (int j = 0; j < 64; j += 16)
      for (int l = 0; l < 16; l++) sum.at[l] += products[j + l];
  }
}

// Of tiles, as AVX-512 has it.
template <class F>
inline Bytes each_byte(F f) {
  Bytes y;
  for (int i = 0; i < 64; i++) y.at[i] = f(i);
  return y;
}
inline Bytes low_halves(const Bytes& x) {
  return each_byte([&](int i) { return uint8_t(x.at[i] & 15); });
}
inline Bytes high_halves(const Bytes& x) {
  return each_byte([&](int i) { return uint8_t(x.at[i] >> 4); });
}
inline Bytes repeated(const int8_t* p) {
  return each_byte([&](int i) { return uint8_t(p[i % 4]); });
}
template <bool>
inline void lane_dots(Ints& sum, const Bytes& a, const Bytes& qa, const Bytes& b, const Bytes& qb) {
  dot<FOUR_BIT>(sum, a, qa), dot<FOUR_BIT>(sum, b, qb);
}
inline Ints begun(int32_t zero) {
  return each<Ints>([&](int) { return zero; });
}
inline Floats floats_of_bytes(const uint8_t* p) {
  return each([&](int i) { return float(p[i]); });
}

inline Ints zero_ints() { return Ints{}; }
inline Ints add(const Ints& a, const Ints& b) {
  return each<Ints>([&](int i) { return a.at[i] + b.at[i]; });
}
inline Floats to_floats(const Ints& a) {
  return each([&](int i) { return float(a.at[i]); });
}
inline int32_t total(const Ints& a) {
  int32_t sum = 0;
  for (int32_t x : a.at) sum += x;
  return sum;
}
inline void add_totals(const Ints& a, const Ints& b, const Ints& c, const Ints& d, int32_t* into) {
  into[0] += total(a), into[1] += total(b), into[2] += total(c), into[3] += total(d);
}

inline Floats broadcast(float x) {
  return each([&](int) { return x; });
}
inline Floats add(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.at[i] + b.at[i]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.at[i] * b.at[i]; });
}
inline Floats div(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.at[i] / b.at[i]; });
}
inline Floats root(const Floats& a) {
  return each([&](int i) { return __builtin_sqrtf(a.at[i]); });
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
}
inline Floats least(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
inline Floats greatest(const Floats& a, const Floats& b) {
  return each([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
inline Floats magnitude(const Floats& a) {
  return each([&](int i) { return __builtin_fabsf(a.at[i]); });
}
inline Floats chosen(const Floats& a, const Floats& b, const Floats& x, const Floats& y) {  // x where a < b, else y
  return each([&](int i) { return a.at[i] < b.at[i] ? x.at[i] : y.at[i]; });
}
inline Floats load_floats(const float* p, int64_t n = 16) {
  Floats x{};
  std::memcpy(x.at, p, size_t(n) * 4);
  return x;
}
inline void store(float* p, const Floats& x, int64_t n = 16) { std::memcpy(p, x.at, size_t(n) * 4); }

inline Ints magnitude_bits(const Floats& x) {
  return each<Ints>([&](int i) { return bits_of(x.at[i]) & 0x7fffffff; });
}
inline Ints greatest(const Ints& a, const Ints& b) {
  return each<Ints>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
inline int32_t greatest_of(const Ints& a) {
  int32_t found = a.at[0];
  for (int32_t x : a.at) found = x > found ? x : found;
  return found;
}
inline Ints round_to_ints(const Floats& x) {
  return each<Ints>([&](int i) { return int32_t(std::lrintf(x.at[i])); });
}
inline void store_bytes(int8_t* p, const Ints& x) {
  for (int i = 0; i < 16; i++) p[i] = int8_t(x.at[i]);  // within ±127
}
inline Floats power_of_two(const Floats& shifted) {  // of n, given n + 1.5 · 2^23
  return each([&](int i) { return float_of((uint32_t(bits_of(shifted.at[i])) << 23) + (127u << 23)); });
}

// bfloat16, rounded to nearest, ties to even; NaN stays NaN.
inline Floats load_brief(const uint16_t* p) {
  return each([&](int i) { return float_of(uint32_t(p[i]) << 16); });
}
inline void store_brief(uint16_t* p, const Floats& x) {
  for (int i = 0; i < 16; i++) {
    const uint32_t bits = uint32_t(bits_of(x.at[i]));
    p[i] = x.at[i] != x.at[i] ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

inline float tree(const Floats& x) {
  float sum[8];
  for (int l = 0; l < 8; l++) sum[l] = x.at[l] + x.at[l + 8];
  for (int n = 4; n > 0; n /= 2)
    for (int l = 0; l < n; l++) sum[l] += sum[l + n];
  return sum[0];
}
inline Floats trees(const Floats* x) {
  Floats sums;
  for (int i = 0; i < 16; i++) sums.at[i] = tree(x[i]);
  return sums;
}
struct Eight {  // the scales and offsets of a block
  float at[8];
};
inline Eight eight_halves(const uint16_t* p, int n) {
  Eight x{};
  for (int i = 0; i < n; i++) {
    const uint32_t sign = uint32_t(p[i] & 0x8000) << 16, exponent = p[i] >> 10 & 31, fraction = p[i] & 1023;
    const uint32_t bits = exponent == 31 ? 0x7f800000 | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
    const float magnitude = exponent == 0 ? float(fraction) * 0x1p-24f : float_of(bits);
    x.at[i] = sign ? -magnitude : magnitude;
  }
  return x;
}
inline Eight load_eight(const float* p) {
  Eight x;
  std::memcpy(x.at, p, sizeof x.at);
  return x;
}
inline void store(float* p, const Eight& x) { std::memcpy(p, x.at, sizeof x.at); }
inline Eight fma(const Eight& a, float b, Eight c) {
  for (int i = 0; i < 8; i++) c.at[i] = std::fma(a.at[i], b, c.at[i]);
  return c;
}
inline Floats spread(const Eight& x, int r) { return broadcast(x.at[r]); }

using Paired = void;  // pairs of bfloat16 have no instructions here

#include "kernels.inl"

}  // namespace

const Kernels SCALAR = table("scalar");

}  // namespace perspectron
