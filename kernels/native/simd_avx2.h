// AVX2 with FMA and F16C (and AVX-VNNI where there is it). See simd.h for the names.
#pragma once

#include <immintrin.h>

namespace sgl {

constexpr int LANES = 8;
constexpr int S8_OFFSET = 0;
constexpr bool MANY_REGISTERS = false;
constexpr bool BF16_DOT = false;
#if defined(__AVXVNNI__)
constexpr const char* ISA = "avx2+vnni";
#else
constexpr const char* ISA = "avx2";
#endif

using F = __m256;
using I = __m256i;
using Bytes = __m256i;
using Partial = __m256i;

inline F zero() { return _mm256_setzero_ps(); }
inline F fill(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F divide(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F largest_of(F a, F b) { return _mm256_max_ps(a, b); }
inline F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F magnitude(F x) { return _mm256_andnot_ps(fill(-0.0f), x); }

// `value`, but 0 where x is below the bound.
inline F zero_below(F x, float bound, F value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, fill(bound), _CMP_LT_OQ), value);
}

// 2^n for whole n in -126 .. 127.
inline F power_of_two(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

inline F load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline F load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

inline float sum(F x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(F x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Lane i: the sum of x[i].
inline F sums_of(const F x[LANES]) {
    F a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    F b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline I fill_int(int32_t x) { return _mm256_set1_epi32(x); }
inline I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
inline I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
inline I zero_int() { return _mm256_setzero_si256(); }
inline I load_s8(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
// Nearest whole numbers in -127 .. 127 as bytes.
inline void store_s8(int8_t* p, F x) {
    I whole = _mm256_cvtps_epi32(x);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes four_bytes(const int8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}
inline Bytes low_nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(15)); }
// Bits 2 * field and the one above it, at bits 4 and 5.
template <int field>
inline Bytes two_bits_high(Bytes b) {
    Bytes moved = field < 2 ? _mm256_slli_epi16(b, field == 0 ? 4 : 2) : _mm256_srli_epi16(b, field == 3 ? 2 : 0);
    return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
}
inline Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }

// Keeps the compiler from computing all products before it adds them: they would not stay in registers.
inline void settle(Partial& p) { asm volatile("" : "+x"(p)); }
inline Partial no_products() { return _mm256_setzero_si256(); }
#if defined(__AVXVNNI__)
inline Partial add_products(Partial p, Bytes u, Bytes s) { return _mm256_dpbusd_avx_epi32(p, u, s); }
inline I widen(Partial p) { return p; }
#else
// Sums of two products of 16 bits: u below 16 may be added 8 times, u below 64 twice.
inline Partial add_products(Partial p, Bytes u, Bytes s) { return _mm256_add_epi16(p, _mm256_maddubs_epi16(u, s)); }
inline I widen(Partial p) { return _mm256_madd_epi16(p, _mm256_set1_epi16(1)); }
#endif

// acc + the products of signed bytes (s not -128).
inline I dot_signed(I acc, Bytes w, Bytes s) {
    Bytes u = _mm256_abs_epi8(w), signed_s = _mm256_sign_epi8(s, w);
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, u, signed_s);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, signed_s), _mm256_set1_epi16(1)));
#endif
}

// A bfloat16 pair in each lane, as two vectors.
inline F first_of_pair(Bytes b) { return _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)); }
inline F second_of_pair(Bytes b) { return _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(int32_t(0xffff0000)))); }
inline F dot_pairs(F acc, Bytes, const uint16_t*) { return acc; }  // never called: BF16_DOT is false

}  // namespace sgl
