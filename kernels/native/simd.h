// The vector unit as a few small functions; the kernels are written once, in terms of these.
//
// Owns the choice of the instruction set, which follows from the compiler's flags (library.py picks them). Each variant
// defines the same names:
//
//   LANES                      numbers in a vector of 32-bit numbers
//   F, I                       vectors of float and of int32
//   Bytes                      4 bytes in each of LANES lanes
//   Partial                    sums of products of bytes, before they are widened to I
//   S8_OFFSET                  what `dot_signed` adds to each weight (0, or 128 where bytes must be unsigned)
//   MANY_REGISTERS             32 vectors, not 16
//   BF16_DOT                   whether products of bfloat16 pairs are an instruction
//
// Every function does the same arithmetic for a lane whatever is in the others, so results do not depend on how rows
// are grouped. The sums over a vector (`sum`, `sums_of`) have a fixed order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Kept out of their callers, of which there are many: compiling takes seconds, not minutes.
#define SGL_OUTLINE __attribute__((noinline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

namespace sgl {

inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Have `count` bytes from `p` on their way into the cache; nothing happens where there is no such memory.
inline void fetch(const uint8_t* p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(p + i, 0, 3);
}

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000 | ((magnitude & 0x3ff) << 13);
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {
        float tiny = float(magnitude) * (1.0f / 16777216.0f);
        std::memcpy(&bits, &tiny, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// e^x to about 1e-7 relative, for x <= 88; 0 far below, NaN for NaN. Range reduction by ln 2 in two parts, then the
// Taylor polynomial of degree 6 on [-ln2 / 2, ln2 / 2].
inline F exponential(F x) {
    F n = nearest(mul(x, fill(1.44269504088896341f)));
    n = largest_of(n, fill(-126.0f));
    F r = fma(n, fill(-0.693145751953125f), x);
    r = fma(n, fill(-1.428606765330187e-6f), r);
    F p = fill(1.0f / 720);
    p = fma(p, r, fill(1.0f / 120));
    p = fma(p, r, fill(1.0f / 24));
    p = fma(p, r, fill(1.0f / 6));
    p = fma(p, r, fill(0.5f));
    p = fma(p, r, fill(1.0f));
    p = fma(p, r, fill(1.0f));
    return zero_below(x, -87.0f, mul(p, power_of_two(n)));
}

}  // namespace sgl
