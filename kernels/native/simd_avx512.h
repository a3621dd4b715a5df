// AVX-512 with VNNI (and BF16 where there is it). See simd.h for the names.
#pragma once

#include <immintrin.h>

namespace sgl {

constexpr int LANES = 16;
constexpr int S8_OFFSET = 128;
constexpr bool MANY_REGISTERS = true;
#if defined(__AVX512BF16__)
constexpr bool BF16_DOT = true;
constexpr const char* ISA = "avx512+vnni+bf16";
#else
constexpr bool BF16_DOT = false;
constexpr const char* ISA = "avx512+vnni";
#endif

using F = __m512;
using I = __m512i;
using Bytes = __m512i;
using Partial = __m512i;

inline F zero() { return _mm512_setzero_ps(); }
inline F fill(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F divide(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F largest_of(F a, F b) { return _mm512_max_ps(a, b); }
inline F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F magnitude(F x) { return _mm512_abs_ps(x); }

// `value`, but 0 where x is below the bound.
inline F zero_below(F x, float bound, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, fill(bound), _CMP_NLT_UQ), value);
}

// 2^n for whole n in -126 .. 127.
inline F power_of_two(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

inline F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float largest(F x) { return _mm512_reduce_max_ps(x); }

// Lane i: the sum of x[i].
inline F sums_of(const F x[LANES]) {
    __m256 half[16];
    for (int i = 0; i < 16; i++) {
        half[i] = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm512_extractf32x8_ps(x[i], 1));
    }
    __m256 eight[2];
    for (int i = 0; i < 2; i++) {
        const __m256* y = half + 8 * i;
        __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
        __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
        eight[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    return _mm512_insertf32x8(_mm512_castps256_ps512(eight[0]), eight[1], 1);
}

inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I fill_int(int32_t x) { return _mm512_set1_epi32(x); }
inline I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
inline I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I zero_int() { return _mm512_setzero_si512(); }
inline I load_s8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Nearest whole numbers in -127 .. 127 as bytes.
inline void store_s8(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes four_bytes(const int8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}
inline Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
// Bits 2 * field and the one above it, at bits 4 and 5.
template <int field>
inline Bytes two_bits_high(Bytes b) {
    Bytes moved = field < 2 ? _mm512_slli_epi16(b, field == 0 ? 4 : 2) : _mm512_srli_epi16(b, field == 3 ? 2 : 0);
    return _mm512_and_si512(moved, _mm512_set1_epi8(0x30));
}
inline Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }

inline void settle(Partial&) {}
inline Partial no_products() { return _mm512_setzero_si512(); }
inline Partial add_products(Partial p, Bytes u, Bytes s) { return _mm512_dpbusd_epi32(p, u, s); }
inline I widen(Partial p) { return p; }

// acc + the products of (w + 128) and s.
inline I dot_signed(I acc, Bytes w, Bytes s) {
    return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80))), s);
}

// A bfloat16 pair in each lane, as two vectors.
inline F first_of_pair(Bytes b) { return _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)); }
inline F second_of_pair(Bytes b) { return _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32(int32_t(0xffff0000)))); }
#if defined(__AVX512BF16__)
inline F dot_pairs(F acc, Bytes w, const uint16_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    __m512i pair = _mm512_set1_epi32(bits);
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)pair);
}
#else
inline F dot_pairs(F acc, Bytes, const uint16_t*) { return acc; }  // never called: BF16_DOT is false
#endif

}  // namespace sgl
