// Products of activations and weights, for any number of rows.
//
// Each element of the result is one lane's sum over the columns in their order, whatever the number of rows, the thread
// and the place: rows are computed four, two or one at a time with the same operations, so a row's bits do not depend on
// its neighbours. Weights are read once for all rows of a step (a chunk of them stays in the cache meanwhile).
//
// Quantized weights meet activations that were rounded to bytes, a scale for each 32 columns of a row. Other weights meet
// them in float, or in bfloat16 where the processor multiplies pairs of those.
#pragma once

#include <algorithm>
#include <type_traits>

#include "team.h"
#include "weights.h"

namespace sgl {

// The forms of a step's activations that its weights need. `values` is [rows, cols].
struct Activations {
    const float* values;
    int64_t rows, cols;
    Quantized bytes;         // for quantized weights
    const uint16_t* halves;  // for bfloat16 weights where BF16_DOT; rows padded to an even number of columns
};

// Memory for the two derived forms.
struct ActivationSpace {
    int8_t* q;
    float *scale, *sum;
    int32_t* half_sums;
    uint16_t* halves;

    Quantized bytes() const { return {q, scale, sum, half_sums}; }
};

// One row rounded to bytes. A row with a NaN or an infinity gives NaN scales: it fails visibly, and alone.
SGL_OUTLINE inline void quantize_row(const float* x, int64_t cols, int8_t* q, float* scale, float* sum, int32_t* half_sums) {
    for (int64_t b = 0; b < cols / BLOCK; b++) {
        const float* block = x + b * BLOCK;
        F top = zero(), check = zero();
        for (int i = 0; i < BLOCK; i += LANES) {
            F v = load(block + i);
            top = largest_of(top, magnitude(v));
            check = add(check, sgl::sub(v, v));
        }
        float d = largest(top) / 127.0f + sgl::sum(check);
        float inverse = 1.0f / d;
        int8_t* bytes = q + b * BLOCK;
        if (d > 0) {
            for (int i = 0; i < BLOCK; i += LANES) store_s8(bytes + i, nearest(mul(load(block + i), fill(inverse))));
        } else {
            std::memset(bytes, 0, BLOCK);
        }
        int32_t halves[2] = {0, 0};
        for (int i = 0; i < BLOCK; i++) halves[i / 16] += bytes[i];
        scale[b] = d;
        sum[b] = d * float(halves[0] + halves[1]);
        half_sums[2 * b] = halves[0], half_sums[2 * b + 1] = halves[1];
    }
}

inline void round_row(const float* x, int64_t cols, uint16_t* halves) {
    for (int64_t c = 0; c < cols; c++) halves[c] = float_to_bf16(x[c]);
    if (cols & 1) halves[cols] = 0;
}

// Which forms the matrices need of one input.
struct Forms {
    bool bytes = false, halves = false;

    void add(const Weight& w) {
        bytes |= w.quantized();
        halves |= BF16_DOT && w.type == BF16;
    }
};

inline void derive_row(Forms forms, const float* x, int64_t row, int64_t cols, const ActivationSpace& to) {
    if (forms.bytes) {
        int64_t at = row * (cols / BLOCK);
        quantize_row(x, cols, to.q + row * cols, to.scale + at, to.sum + at, to.half_sums + 2 * at);
    }
    if (forms.halves) round_row(x, cols, to.halves + row * ((cols + 1) / 2 * 2));
}

template <class Codec, int R>
SGL_OUTLINE inline void block_dots(const Weight& w, const uint8_t* group, const Activations& x, int64_t row, F out[R]) {
    F acc[R], lows[R];
    for (int r = 0; r < R; r++) acc[r] = zero(), lows[r] = zero();
    int64_t blocks = w.blocks();
    Quantized q = x.bytes.at(row, 0, blocks);
    for (int64_t b = 0; b < blocks; b += Codec::SUBS) {
        auto head = Codec::head(group);
        group += Codec::HEADER;
        for (int sub = 0; sub < Codec::SUBS; sub++, group += Codec::TILE) {
            Codec::template block<R>(head, group, sub, q.at(0, b + sub, blocks), blocks, acc, lows);
        }
    }
    for (int r = 0; r < R; r++) out[r] = sgl::add(acc[r], lows[r]);
}

template <class Codec, int R, int G>
SGL_OUTLINE inline void float_dots(const Weight& w, const uint8_t* group, const Activations& x, int64_t row, F out[G * R]) {
    F even[G * R], odd[G * R];
    for (int i = 0; i < G * R; i++) even[i] = zero(), odd[i] = zero();
    int64_t bytes = float_group_bytes<Codec>(w), whole = w.cols / 2;
    const float* v = x.values + row * w.cols;
    for (int64_t p = 0; p < whole; p++) {
        for (int g = 0; g < G; g++) {
            F first, second;
            Codec::load_two(group + g * bytes + p * Codec::TILE, first, second);
            for (int r = 0; r < R; r++) {
                even[g * R + r] = fma(first, fill(v[r * w.cols + 2 * p]), even[g * R + r]);
                odd[g * R + r] = fma(second, fill(v[r * w.cols + 2 * p + 1]), odd[g * R + r]);
            }
        }
    }
    if (w.cols & 1) {
        for (int g = 0; g < G; g++) {
            F first, second;
            Codec::load_two(group + g * bytes + whole * Codec::TILE, first, second);
            for (int r = 0; r < R; r++) even[g * R + r] = fma(first, fill(v[r * w.cols + 2 * whole]), even[g * R + r]);
        }
    }
    for (int i = 0; i < G * R; i++) out[i] = sgl::add(even[i], odd[i]);
}

template <int R, int G>
SGL_OUTLINE inline void pair_dots(const Weight& w, const uint8_t* group, const Activations& x, int64_t row, F out[G * R]) {
    F acc[G * R];
    for (int i = 0; i < G * R; i++) acc[i] = zero();
    int64_t bytes = float_group_bytes<BFloat16>(w), pairs = w.pairs();
    const uint16_t* v = x.halves + row * 2 * pairs;
    for (int64_t p = 0; p < pairs; p++) {
        for (int g = 0; g < G; g++) {
            Bytes two = load_bytes(group + g * bytes + p * BFloat16::TILE);
            for (int r = 0; r < R; r++) acc[g * R + r] = dot_pairs(acc[g * R + r], two, v + 2 * (r * pairs + p));
        }
    }
    for (int i = 0; i < G * R; i++) out[i] = acc[i];
}

// Where a product goes: `out[row * stride + w.rows' index]`, added to what is there or replacing it.
struct Target {
    float* out;
    int64_t stride;
    bool accumulate;
};

inline void write_lanes(const Weight& w, int64_t group, const Target& to, int64_t row, F value) {
    float* at = to.out + row * to.stride + group * LANES;
    int64_t left = w.rows - group * LANES;
    float buffer[LANES];
    if (left < LANES) {
        store(buffer, value);
        for (int64_t i = 0; i < left; i++) {
            at[i] = buffer[i] + (w.bias ? w.bias[group * LANES + i] : 0.0f) + (to.accumulate ? at[i] : 0.0f);
        }
        return;
    }
    if (w.bias) value = sgl::add(value, load(w.bias + group * LANES));
    if (to.accumulate) value = sgl::add(value, load(at));
    store(at, value);
}

// Groups of floating-point weights that are computed together, so that enough sums are under way.
constexpr int groups_together(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

template <int R>
SGL_OUTLINE inline void dots(const Weight& w, int64_t begin, int64_t end, const Activations& x, int64_t row, const Target& to) {
    constexpr int G = groups_together(R);
    int64_t bytes = group_bytes(w);
    with_block_codec(w.type, [&](auto codec) {
        for (int64_t g = begin; g < end; g++) {
            F out[R];
            block_dots<decltype(codec), R>(w, w.data + g * bytes, x, row, out);
            for (int r = 0; r < R; r++) write_lanes(w, g, to, row + r, out[r]);
        }
    });
    with_float_codec(w.type, [&](auto codec) {
        using C = decltype(codec);
        auto some = [&](auto together, int64_t g) {
            constexpr int N = decltype(together)::value;
            F out[N * R];
            if (BF16_DOT && w.type == BF16) {
                pair_dots<R, N>(w, w.data + g * bytes, x, row, out);
            } else {
                float_dots<C, R, N>(w, w.data + g * bytes, x, row, out);
            }
            for (int i = 0; i < N * R; i++) write_lanes(w, g + i / R, to, row + i % R, out[i]);
        };
        int64_t g = begin;
        for (; g + G <= end; g += G) some(std::integral_constant<int, G>(), g);
        for (; g < end; g++) some(std::integral_constant<int, 1>(), g);
    });
}

// Groups that one member takes at a time.
constexpr int64_t CHUNK = 4;

SGL_OUTLINE inline void multiply_chunk(const Weight& w, int64_t chunk, const Target& to, const Activations& x) {
    int64_t begin = chunk * CHUNK, end = std::min(begin + CHUNK, w.groups()), row = 0;
    for (; row + 4 <= x.rows; row += 4) dots<4>(w, begin, end, x, row, to);
    if (row + 2 <= x.rows) dots<2>(w, begin, end, x, row, to), row += 2;
    if (row < x.rows) dots<1>(w, begin, end, x, row, to);
}

// Products of one input with several matrices, and `then`. Called by all members of the team.
template <class Then>
inline void multiply(Team& team, const Weight* const* weights, const Target* targets, int count, const Activations& x,
                     Then&& then) {
    int64_t chunks = 0;
    for (int i = 0; i < count; i++) chunks += (weights[i]->groups() + CHUNK - 1) / CHUNK;
    team.each(
        chunks,
        [&](int64_t index) {
            int i = 0;
            for (int64_t n; index >= (n = (weights[i]->groups() + CHUNK - 1) / CHUNK); i++) index -= n;
            multiply_chunk(*weights[i], index, targets[i], x);
        },
        then);
}

}  // namespace sgl
