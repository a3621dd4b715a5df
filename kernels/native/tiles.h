// The processor's matrix unit (AMX): products of a tile of 16 rows and 32 columns with one of 32 columns and 16 rows, both
// bfloat16, added to 16 x 16 floats.
//
// A number of the result is a sum over the 32 columns in one order, whatever is in the other rows and columns. So a row
// has the same bits in a tile of its own as among fifteen others.
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

inline void round_columns(const float*, uint16_t*) {}

inline bool has_tiles() { return false; }

class Tiles {  // never used: `has_tiles` is false
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
