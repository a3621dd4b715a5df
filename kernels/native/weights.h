// Weight matrices in the order in which the kernels read them.
//
// A matrix [rows, cols] is cut into groups of LANES rows. A group is read from its first column to its last, so that one
// lane of a vector belongs to one row and no sum crosses lanes. Quantized types keep the numbers of their GGUF blocks,
// scales included, to the bit; only the order changes (`write`), and `read` gives the row back.
//
// A codec has: SUBS blocks of 32 columns share a header of HEADER bytes; each block has TILE bytes (LANES rows);
// SOURCE bytes are one row's SUBS blocks in a GGUF file. `add` adds the products of a block with R rows of bytes to their
// sums; where LOWS, a weight has an offset that is constant in the block (`low`), which meets the block's sum.
#pragma once

#include "simd.h"

namespace sgl {

// Numbers of the GGUF format.
enum Type : int32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q6_K = 14, BF16 = 30 };

constexpr int BLOCK = 32;
constexpr int PANEL = MANY_REGISTERS ? 8 : 4;  // rows of activations that are multiplied together
constexpr int HALVES = LANES * 2;  // bytes of one 16-bit number per lane

// Rows of activations as bytes: 32 columns share a scale. `sum` is the scaled sum of a block, `half_sums` those of the
// bytes of each half. PANEL rows lie together, block by block, so that one pointer and fixed distances reach all rows of
// a product: the next row is one block further, the next block PANEL.
template <class Byte, class Float, class Int>
struct QuantizedRows {
    Byte* q;
    Float* scale;
    Float* sum;
    Int* half_sums;

    QuantizedRows at(int64_t row, int64_t blocks) const { return next(row / PANEL * PANEL * blocks + row % PANEL); }
    QuantizedRows next(int64_t count) const {
        return {q + count * BLOCK, scale + count, sum + count, half_sums + 2 * count};
    }
};
using Quantized = QuantizedRows<const int8_t, const float, const int32_t>;

inline uint16_t half_at(const uint8_t* p, int i) {
    uint16_t bits;
    std::memcpy(&bits, p + 2 * i, 2);
    return bits;
}
inline float float_at(const uint8_t* p, int i) { return f16_to_float(half_at(p, i)); }
inline F load_halves(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }

// 16 bytes of nibbles of one row <-> its places in a tile: four bytes for each of four quads.
inline void write_nibbles(uint8_t* tile, int lane, const uint8_t* nibbles) {
    for (int quad = 0; quad < 4; quad++) std::memcpy(tile + 4 * (LANES * quad + lane), nibbles + 4 * quad, 4);
}
inline int nibble_at(const uint8_t* tile, int lane, int column) {
    int byte = tile[4 * (LANES * ((column & 15) / 4) + lane) + (column & 3)];
    return column < 16 ? byte & 15 : byte >> 4;
}

// Dot products of one tile of nibbles with R rows of bytes.
template <int R>
inline void dot_nibbles(const uint8_t* tile, const int8_t* q, I out[R]) {
    Partial p[R];
    for (int r = 0; r < R; r++) p[r] = no_products();
    for (int quad = 0; quad < 4; quad++) {
        Bytes both = load_bytes(tile + 4 * LANES * quad);
        Bytes low = low_nibbles(both), high = high_nibbles(both);
        for (int r = 0; r < R; r++) {
            const int8_t* x = q + r * BLOCK + 4 * quad;
            p[r] = add_products(p[r], low, four_bytes(x));
            p[r] = add_products(p[r], high, four_bytes(x + 16));
            settle(p[r]);
        }
    }
    for (int r = 0; r < R; r++) out[r] = widen(p[r]);
}

// acc += d * the rows' scales * dots.
template <int R>
inline void add_scaled(F d, const I dots[R], const Quantized& x, F acc[R]) {
    for (int r = 0; r < R; r++) acc[r] = fma(mul(d, fill(x.scale[r])), to_float(dots[r]), acc[r]);
}

// w = scale * nibble + low, both per row and block. Q4_0 has no lows of its own: they are -8 scales.
template <bool with_low>
struct Nibbles {
    static constexpr int SUBS = 1, HEADER = 0;
    static constexpr bool LOWS = true;
    static constexpr int SCALES = with_low ? 2 : 1;
    static constexpr int TILE = HALVES * SCALES + 16 * LANES, SOURCE = 2 * SCALES + 16;
    struct Head {};

    static void write(uint8_t* group, int lane, const uint8_t* source) {
        for (int i = 0; i < SCALES; i++) std::memcpy(group + HALVES * i + 2 * lane, source + 2 * i, 2);
        write_nibbles(group + HALVES * SCALES, lane, source + 2 * SCALES);
    }
    static void read(const uint8_t* group, int lane, float* out) {
        float d = float_at(group, lane), low = with_low ? float_at(group + HALVES, lane) : -8 * d;
        for (int i = 0; i < BLOCK; i++) out[i] = d * nibble_at(group + HALVES * SCALES, lane, i) + low;
    }
    static Head head(const uint8_t*) { return {}; }

    template <int R>
    static void add(const Head&, const uint8_t* tile, const Quantized& x, F acc[R]) {
        I dots[R];
        dot_nibbles<R>(tile + HALVES * SCALES, x.q, dots);
        add_scaled<R>(load_halves(tile), dots, x, acc);
    }
    static F low(const Head&, const uint8_t* tile) {
        return with_low ? load_halves(tile + HALVES) : mul(load_halves(tile), fill(-8.0f));
    }
};

// w = scale * byte.
struct Int8 {
    static constexpr int SUBS = 1, HEADER = 0, TILE = HALVES + 32 * LANES, SOURCE = 34;
    static constexpr bool LOWS = S8_OFFSET != 0;
    struct Head {};

    static void write(uint8_t* group, int lane, const uint8_t* source) {
        std::memcpy(group + 2 * lane, source, 2);
        for (int quad = 0; quad < 8; quad++) {
            std::memcpy(group + HALVES + 4 * (LANES * quad + lane), source + 2 + 4 * quad, 4);
        }
    }
    static void read(const uint8_t* group, int lane, float* out) {
        float d = float_at(group, lane);
        for (int i = 0; i < BLOCK; i++) out[i] = d * int8_t(group[HALVES + 4 * (LANES * (i / 4) + lane) + (i & 3)]);
    }
    static Head head(const uint8_t*) { return {}; }

    template <int R>
    static void add(const Head&, const uint8_t* tile, const Quantized& x, F acc[R]) {
        I dots[R];
        for (int r = 0; r < R; r++) dots[r] = zero_int();
        for (int quad = 0; quad < 8; quad++) {
            Bytes w = load_bytes(tile + HALVES + 4 * LANES * quad);
            for (int r = 0; r < R; r++) dots[r] = dot_signed(dots[r], w, four_bytes(x.q + r * BLOCK + 4 * quad));
        }
        add_scaled<R>(load_halves(tile), dots, x, acc);
    }
    static F low(const Head&, const uint8_t* tile) { return mul(load_halves(tile), fill(-float(S8_OFFSET))); }
};

// Q4_K: w = d * scale * nibble - dmin * min; d and dmin per 256 columns, scale and min of 6 bits per 32.
struct NibblesK {
    static constexpr int SUBS = 8, HEADER = 2 * HALVES, TILE = 2 * LANES + 16 * LANES, SOURCE = 144;
    static constexpr bool LOWS = true;
    struct Head { F d, dmin; };

    // The 6-bit numbers of block `sub` among the 12 bytes of a superblock.
    static void six_bits(const uint8_t* s, int sub, uint8_t* scale, uint8_t* min) {
        if (sub < 4) {
            *scale = s[sub] & 63, *min = s[sub + 4] & 63;
        } else {
            *scale = (s[sub + 4] & 15) | ((s[sub - 4] >> 6) << 4);
            *min = (s[sub + 4] >> 4) | ((s[sub] >> 6) << 4);
        }
    }
    static void write(uint8_t* group, int lane, const uint8_t* source) {
        std::memcpy(group + 2 * lane, source, 2);
        std::memcpy(group + HALVES + 2 * lane, source + 2, 2);
        for (int sub = 0; sub < SUBS; sub++) {
            uint8_t* tile = group + HEADER + sub * TILE;
            six_bits(source + 4, sub, tile + lane, tile + LANES + lane);
            const uint8_t* bytes = source + 16 + 32 * (sub / 2);  // two blocks share 32 bytes: low nibbles, high nibbles
            int shift = 4 * (sub & 1);
            uint8_t nibbles[16];
            for (int i = 0; i < 16; i++) {
                nibbles[i] = uint8_t(((bytes[i] >> shift) & 15) | (((bytes[i + 16] >> shift) & 15) << 4));
            }
            write_nibbles(tile + 2 * LANES, lane, nibbles);
        }
    }
    static void read(const uint8_t* group, int lane, float* out) {
        float d = float_at(group, lane), dmin = float_at(group + HALVES, lane);
        for (int sub = 0; sub < SUBS; sub++) {
            const uint8_t* tile = group + HEADER + sub * TILE;
            float scale = d * tile[lane], min = dmin * tile[LANES + lane];
            for (int i = 0; i < BLOCK; i++) out[BLOCK * sub + i] = scale * nibble_at(tile + 2 * LANES, lane, i) - min;
        }
    }
    static Head head(const uint8_t* group) { return {load_halves(group), load_halves(group + HALVES)}; }

    template <int R>
    static void add(const Head& h, const uint8_t* tile, const Quantized& x, F acc[R]) {
        I dots[R];
        dot_nibbles<R>(tile + 2 * LANES, x.q, dots);
        add_scaled<R>(mul(h.d, load_u8(tile)), dots, x, acc);
    }
    static F low(const Head& h, const uint8_t* tile) { return sub(zero(), mul(h.dmin, load_u8(tile + LANES))); }
};

// Q6_K: w = d * scale * (six bits - 32); d per 256 columns, a signed byte as scale per 16.
struct SixBits {
    static constexpr int SUBS = 8, HEADER = HALVES, TILE = 2 * LANES + 24 * LANES, SOURCE = 210;
    static constexpr bool LOWS = false;
    static constexpr int LOW = 2 * LANES, HIGH = 18 * LANES;  // where in a tile the low four bits and the high two are
    struct Head { F d; };

    static int source_bits(const uint8_t* source, int column) {
        int half = column / 128, in_half = column % 128, quarter = in_half / 32, l = in_half % 32;
        int low = source[64 * half + l + 32 * (quarter & 1)] >> (quarter < 2 ? 0 : 4);
        int high = source[128 + 32 * half + l] >> (2 * quarter);
        return (low & 15) | ((high & 3) << 4);
    }
    static void write(uint8_t* group, int lane, const uint8_t* source) {
        std::memcpy(group + 2 * lane, source + 208, 2);
        for (int sub = 0; sub < SUBS; sub++) {
            uint8_t* tile = group + HEADER + sub * TILE;
            for (int half = 0; half < 2; half++) tile[LANES * half + lane] = source[192 + 2 * sub + half];
            for (int i = 0; i < BLOCK; i++) {
                int bits = source_bits(source, BLOCK * sub + i), quad = i / 4;
                tile[LOW + 4 * (LANES * (quad & 3) + lane) + (i & 3)] |= uint8_t((bits & 15) << (quad < 4 ? 0 : 4));
                tile[HIGH + 4 * (LANES * (quad / 4) + lane) + (i & 3)] |= uint8_t((bits >> 4) << (2 * (quad & 3)));
            }
        }
    }
    static void read(const uint8_t* group, int lane, float* out) {
        float d = float_at(group, lane);
        for (int sub = 0; sub < SUBS; sub++) {
            const uint8_t* tile = group + HEADER + sub * TILE;
            for (int i = 0; i < BLOCK; i++) {
                int quad = i / 4;
                int high = tile[HIGH + 4 * (LANES * (quad / 4) + lane) + (i & 3)] >> (2 * (quad & 3));
                int bits = nibble_at(tile + LOW, lane, i) | ((high & 3) << 4);
                out[BLOCK * sub + i] = d * int8_t(tile[LANES * (i / 16) + lane]) * (bits - 32);
            }
        }
    }
    static Head head(const uint8_t* group) { return {load_halves(group)}; }

    // 16 columns: the low bits of four quads, and their high ones in the four fields of one vector.
    template <int R>
    static void half_block(const Bytes low[4], Bytes high, const int8_t* q, I out[R]) {
        Bytes w[4] = {either(low[0], two_bits_high<0>(high)), either(low[1], two_bits_high<1>(high)),
                      either(low[2], two_bits_high<2>(high)), either(low[3], two_bits_high<3>(high))};
        for (int r = 0; r < R; r++) {
            const int8_t* x = q + r * BLOCK;
            Partial first = add_products(add_products(no_products(), w[0], four_bytes(x)), w[1], four_bytes(x + 4));
            Partial rest = add_products(add_products(no_products(), w[2], four_bytes(x + 8)), w[3], four_bytes(x + 12));
            out[r] = add_int(widen(first), widen(rest));
        }
    }

    template <int R>
    static void add(const Head& h, const uint8_t* tile, const Quantized& x, F acc[R]) {
        Bytes low[4], high[4];
        for (int quad = 0; quad < 4; quad++) {
            Bytes both = load_bytes(tile + LOW + 4 * LANES * quad);
            low[quad] = low_nibbles(both), high[quad] = high_nibbles(both);
        }
        I dots[2][R];
        half_block<R>(low, load_bytes(tile + HIGH), x.q, dots[0]);
        half_block<R>(high, load_bytes(tile + HIGH + 4 * LANES), x.q + 16, dots[1]);
        I scale[2] = {load_s8(tile), load_s8(tile + LANES)}, totals[R];
        for (int r = 0; r < R; r++) {
            totals[r] = zero_int();
            for (int half = 0; half < 2; half++) {
                I centred = sub_int(dots[half][r], fill_int(32 * x.half_sums[2 * r + half]));
                totals[r] = add_int(totals[r], mul_int(scale[half], centred));
            }
        }
        add_scaled<R>(h.d, totals, x, acc);
    }
    static F low(const Head&, const uint8_t*) { return zero(); }  // never called
};

// Floating-point weights: two columns at a time, in a tile of TILE bytes; the products of even and odd columns are summed
// apart.
struct BFloat16 {
    static constexpr int BITS = 16, TILE = 4 * LANES;
    static void write(uint8_t* tile, int lane, int column, const uint8_t* source) {
        std::memcpy(tile + 4 * lane + 2 * column, source, 2);
    }
    static float read(const uint8_t* tile, int lane, int column) {
        return bf16_to_float(half_at(tile + 4 * lane, column));
    }
    static void load_two(const uint8_t* tile, F& first, F& second) {
        Bytes pair = load_bytes(tile);
        first = first_of_pair(pair), second = second_of_pair(pair);
    }
};

struct Float16 {
    static constexpr int BITS = 16, TILE = 4 * LANES;
    static void write(uint8_t* tile, int lane, int column, const uint8_t* source) {
        std::memcpy(tile + HALVES * column + 2 * lane, source, 2);
    }
    static float read(const uint8_t* tile, int lane, int column) { return float_at(tile + HALVES * column, lane); }
    static void load_two(const uint8_t* tile, F& first, F& second) {
        first = load_halves(tile), second = load_halves(tile + HALVES);
    }
};

struct Float32 {
    static constexpr int BITS = 32, TILE = 8 * LANES;
    static void write(uint8_t* tile, int lane, int column, const uint8_t* source) {
        std::memcpy(tile + 4 * (LANES * column + lane), source, 4);
    }
    static float read(const uint8_t* tile, int lane, int column) {
        float value;
        std::memcpy(&value, tile + 4 * (LANES * column + lane), 4);
        return value;
    }
    static void load_two(const uint8_t* tile, F& first, F& second) {
        const float* p = reinterpret_cast<const float*>(tile);
        first = load(p), second = load(p + LANES);
    }
};

// A matrix as Python hands it over (weights.py has the same struct). `bias` may be null.
struct Weight {
    int32_t type;
    int32_t rows, cols;
    int32_t padding;
    uint8_t* data;
    const float* bias;

    int64_t groups() const { return (rows + LANES - 1) / LANES; }
    int64_t blocks() const { return cols / BLOCK; }
    int64_t pairs() const { return (cols + 1) / 2; }
    bool quantized() const { return type != F32 && type != F16 && type != BF16; }
};

// Calls `visit(codec)` with the codec of a quantized type.
template <class Visit>
inline void with_block_codec(int32_t type, Visit&& visit) {
    switch (type) {
        case Q4_0: visit(Nibbles<false>()); break;
        case Q4_1: visit(Nibbles<true>()); break;
        case Q8_0: visit(Int8()); break;
        case Q4_K: visit(NibblesK()); break;
        case Q6_K: visit(SixBits()); break;
    }
}

// The same for floating-point types.
template <class Visit>
inline void with_float_codec(int32_t type, Visit&& visit) {
    switch (type) {
        case F32: visit(Float32()); break;
        case F16: visit(Float16()); break;
        case BF16: visit(BFloat16()); break;
    }
}

template <class Codec>
inline int64_t block_group_bytes(const Weight& w) {
    return w.blocks() / Codec::SUBS * (Codec::HEADER + Codec::SUBS * Codec::TILE);
}
template <class Codec>
inline int64_t float_group_bytes(const Weight& w) {
    return w.pairs() * Codec::TILE;
}

// Bytes of LANES rows.
SGL_OUTLINE inline int64_t group_bytes(const Weight& w) {
    int64_t bytes = 0;
    with_block_codec(w.type, [&](auto codec) { bytes = block_group_bytes<decltype(codec)>(w); });
    with_float_codec(w.type, [&](auto codec) { bytes = float_group_bytes<decltype(codec)>(w); });
    return bytes;
}

// Fills one group of `w` from a matrix in the order of its file.
SGL_OUTLINE inline void pack_group(const Weight& w, const uint8_t* source, int64_t group) {
    uint8_t* to = w.data + group * group_bytes(w);
    int64_t first = group * LANES;
    int lanes = int(w.rows - first < LANES ? w.rows - first : LANES);
    std::memset(to, 0, size_t(group_bytes(w)));
    with_block_codec(w.type, [&](auto codec) {
        using C = decltype(codec);
        int64_t supers = w.blocks() / C::SUBS;
        for (int64_t s = 0; s < supers; s++, to += C::HEADER + C::SUBS * C::TILE) {
            for (int lane = 0; lane < lanes; lane++) C::write(to, lane, source + ((first + lane) * supers + s) * C::SOURCE);
        }
    });
    with_float_codec(w.type, [&](auto codec) {
        using C = decltype(codec);
        constexpr int64_t SIZE = C::BITS / 8;
        for (int64_t c = 0; c < w.cols; c += 2, to += C::TILE) {
            for (int lane = 0; lane < lanes; lane++) {
                const uint8_t* from = source + ((first + lane) * w.cols + c) * SIZE;
                C::write(to, lane, 0, from);
                if (c + 1 < w.cols) C::write(to, lane, 1, from + SIZE);
            }
        }
    });
}

// One row as numbers.
SGL_OUTLINE inline void read_row(const Weight& w, int64_t row, float* out) {
    const uint8_t* from = w.data + row / LANES * group_bytes(w);
    int lane = int(row % LANES);
    with_block_codec(w.type, [&](auto codec) {
        using C = decltype(codec);
        for (int64_t s = 0; s < w.blocks() / C::SUBS; s++) {
            C::read(from + s * (C::HEADER + C::SUBS * C::TILE), lane, out + s * C::SUBS * BLOCK);
        }
    });
    with_float_codec(w.type, [&](auto codec) {
        using C = decltype(codec);
        for (int64_t c = 0; c < w.cols; c++) out[c] = C::read(from + c / 2 * C::TILE, lane, int(c & 1));
    });
}

}  // namespace sgl
