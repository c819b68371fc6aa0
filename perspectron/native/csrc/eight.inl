// Eight floats at once, which AVX2 and AVX-512 handle alike.

using Eight = __m256;  // the scales and offsets of a block
inline Eight eight_halves(const uint16_t* p, int n) {
  return n == 8 ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))
                : _mm256_zextps128_ps256(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
}
inline Eight load_eight(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Eight x) { _mm256_storeu_ps(p, x); }
inline Eight fma(Eight a, float b, Eight c) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }

// Lanes l and l + 8 were added: now l + 4, l + 2, l + 1.
inline float tree_of(Eight x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
