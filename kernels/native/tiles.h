// The processor's matrix unit (AMX): products of a tile of 16 rows and 32 columns with one of 32 columns and 16 rows, both
// bfloat16, added to 16 x 16 floats.
//
// A number of the result is a sum over the 32 columns in one order, whatever is in the other rows and columns. So a row
// has the same bits in a tile of its own as among fifteen others. The second tile of a product holds pairs: its row i has
// columns 2i and 2i + 1 of the first one's, side by side for each of 16 results.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sgl {

constexpr int TILE_ROWS = 16, TILE_COLS = 32, TILE_NUMBERS = TILE_ROWS * TILE_COLS;

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

// Whether the kernel lets this process use the unit: it has to be asked, once.
inline bool has_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// 32 numbers rounded to nearest, ties to even.
inline void round_columns(const float* from, uint16_t* to) {
    __m512bh both = _mm512_cvtne2ps_pbh(sgl::load(from + LANES), sgl::load(from));
    _mm512_storeu_si512(to, (__m512i)both);
}

// 16 of them.
inline void round_lanes(F x, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

// Two rows of 16 numbers rounded likewise, as pairs.
inline void round_pairs(F first, F second, uint16_t* to) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both));
}

// Scores where the lane's limit is above the key's number, else minus infinity.
inline F seen_only(F scores, F limits, float key) {
    return _mm512_mask_mov_ps(fill(-INFINITY), _mm512_cmp_ps_mask(limits, fill(key), _CMP_GT_OQ), scores);
}

// x * 2^n for whole n; 0, without a look at x, where `at` is below the bound.
inline F scale_from(float bound, F at, F x, F n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(at, fill(bound), _CMP_NLT_UQ), x, n);
}

// 16 rows of 16 words of 32 bits: row i, word j becomes row j, word i.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int half = 0; half < 2; half++) {
            r[i + 2 * half] = _mm512_unpacklo_epi64(t[i + half], t[i + 2 + half]);
            r[i + 2 * half + 1] = _mm512_unpackhi_epi64(t[i + half], t[i + 2 + half]);
        }
    }
    for (int i = 0; i < 4; i++) {  // r[4a + i] holds words i, 4 + i, 8 + i, 12 + i of rows 4a .. 4a + 3
        __m512i low = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), high = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i more = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), most = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(low, more, 0x88), t[8 + i] = _mm512_shuffle_i32x4(low, more, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(high, most, 0x88), t[12 + i] = _mm512_shuffle_i32x4(high, most, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// The same of rows that lie `stride` bytes apart, into rows of 64 bytes.
inline void transpose_words(const void* from, int64_t stride, void* to) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * stride);
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(static_cast<char*>(to) + i * 64, rows[i]);
}

// 16 columns, from `at` on, of 32 rows of bfloat16, as 16 rows of 32 numbers.
inline void transpose_columns(const uint16_t* const* from, int64_t at, uint16_t* to) {
    __m512i rows[16];
    auto wide = [&](int i) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[i] + at)));
    };
    for (int i = 0; i < 16; i++) rows[i] = _mm512_or_si512(wide(2 * i), _mm512_slli_epi32(wide(2 * i + 1), 16));
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * TILE_COLS, rows[i]);
}

// The calling thread's eight tiles, whole, as long as this lives.
class Tiles {
   public:
    Tiles() {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        };
        static const Config config;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;

    template <int T>
    void clear() const {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    // Rows of 64 bytes, `stride` bytes apart.
    template <int T>
    void load(const void* from, int64_t stride = 64) const {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    void store(void* to, int64_t stride = 64) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
    }
    // Tile C, floats, += A, rows of columns, x B, rows of pairs of columns.
    template <int C, int A, int B>
    void dot() const {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

#else

inline bool has_tiles() { return false; }

// None of these is used, then.
inline void round_columns(const float*, uint16_t*) {}
inline void round_lanes(F, uint16_t*) {}
inline void round_pairs(F, F, uint16_t*) {}
inline F seen_only(F scores, F, float) { return scores; }
inline F scale_from(float, F, F x, F) { return x; }
inline void transpose_words(const void*, int64_t, void*) {}
inline void transpose_columns(const uint16_t* const*, int64_t, uint16_t*) {}

class Tiles {
   public:
    template <int>
    void clear() const {}
    template <int>
    void load(const void*, int64_t = 64) const {}
    template <int>
    void store(void*, int64_t = 64) const {}
    template <int, int, int>
    void dot() const {}
};

#endif

}  // namespace sgl
