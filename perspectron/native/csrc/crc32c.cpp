// CRC-32C (Castagnoli), as the CPU's instruction where there is one.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace perspectron {
namespace {

constexpr uint32_t POLYNOMIAL = 0x82f63b78;

struct Table {
  uint32_t at[256];
  constexpr Table() : at() {
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
      at[i] = crc;
    }
  }
};
constexpr Table TABLE;

uint32_t by_table(const uint8_t* p, int64_t n, uint32_t crc) {
  for (int64_t i = 0; i < n; i++) crc = crc >> 8 ^ TABLE.at[(crc ^ p[i]) & 255];
  return crc;
}

#if defined(__x86_64__)

constexpr int64_t PIECE = 4096;  // bytes of each of three streams: the instruction takes three cycles, one starts each

// What PIECE zero bytes make of a CRC, as four tables: the map is linear.
struct Shift {
  uint32_t at[4][256];
  Shift() {
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
      uint32_t crc = uint32_t(1) << bit;
      for (int64_t i = 0; i < PIECE; i++) crc = crc >> 8 ^ TABLE.at[crc & 255];
      of_bit[bit] = crc;
    }
    for (int byte = 0; byte < 4; byte++)
      for (int value = 0; value < 256; value++) {
        at[byte][value] = 0;
        for (int bit = 0; bit < 8; bit++)
          if (value >> bit & 1) at[byte][value] ^= of_bit[8 * byte + bit];
      }
  }
  uint32_t operator()(uint32_t crc) const {
    return at[0][crc & 255] ^ at[1][crc >> 8 & 255] ^ at[2][crc >> 16 & 255] ^ at[3][crc >> 24];
  }
};

inline uint64_t word(const uint8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* p, int64_t n, uint32_t start) {
  static const Shift shift;
  uint64_t a = start;
  for (; n >= 3 * PIECE; p += 3 * PIECE, n -= 3 * PIECE) {
    uint64_t b = 0, c = 0;
    for (int64_t i = 0; i < PIECE; i += 8) {
      a = _mm_crc32_u64(a, word(p + i));
      b = _mm_crc32_u64(b, word(p + PIECE + i));
      c = _mm_crc32_u64(c, word(p + 2 * PIECE + i));
    }
    a = shift(shift(uint32_t(a)) ^ uint32_t(b)) ^ c;
  }
  for (; n >= 8; p += 8, n -= 8) a = _mm_crc32_u64(a, word(p));
  for (; n > 0; p++, n--) a = _mm_crc32_u8(uint32_t(a), *p);
  return uint32_t(a);
}

#endif

}  // namespace

uint32_t crc32c(const uint8_t* p, int64_t n, uint32_t value) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(p, n, ~value);
#endif
  return ~by_table(p, n, ~value);
}

}  // namespace perspectron
