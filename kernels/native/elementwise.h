// What happens to one row at a time: norm, rotary embedding, gated activation, the largest of a row of logits.
#pragma once

#include "simd.h"

namespace sgl {

// out = x / sqrt(mean(x^2) + eps) * weight. `out` may be `x`.
SGL_OUTLINE inline void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
    F squares = zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (int64_t j = i; j < n; j++) total += x[j] * x[j];
    float factor = 1.0f / std::sqrt(total / float(n) + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, mul(mul(load(x + i), fill(factor)), load(weight + i)));
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

// One head rotated by its token's angles, and scaled: feature i is paired with i + dim / 2. `out` may be `x`.
SGL_OUTLINE inline void rotate_head(const float* x, const float* cos, const float* sin, int64_t dim, float scale, float* out) {
    int64_t half = dim / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, mul(sgl::sub(mul(a, c), mul(b, s)), fill(scale)));
        store(out + half + i, mul(fma(b, c, mul(a, s)), fill(scale)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        out[i] = (a * cos[i] - b * sin[i]) * scale;
        out[half + i] = (b * cos[i] + a * sin[i]) * scale;
    }
}

inline F silu(F x) { return divide(x, sgl::add(fill(1.0f), exponential(sgl::sub(zero(), x)))); }

// out = silu(gate) * up. `out` may be either.
SGL_OUTLINE inline void silu_mul_row(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, mul(silu(load(gate + i)), load(up + i)));
    if (i < n) {
        float g[LANES] = {}, u[LANES] = {};
        std::memcpy(g, gate + i, size_t(n - i) * 4);
        std::memcpy(u, up + i, size_t(n - i) * 4);
        store(g, mul(silu(load(g)), load(u)));
        std::memcpy(out + i, g, size_t(n - i) * 4);
    }
}

// The first of the largest numbers; a row with a NaN, or with nothing above -infinity, gives -1.
SGL_OUTLINE inline int64_t argmax_row(const float* x, int64_t n) {
    F top = fill(-INFINITY), nan = zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        F v = load(x + i);
        top = largest_of(v, top);
        nan = sgl::add(nan, mul(v, zero()));
    }
    float best = largest(top), check = sum(nan);
    for (int64_t j = i; j < n; j++) best = x[j] > best ? x[j] : best, check += x[j] * 0.0f;
    if (check != check) {  // a NaN, or an infinity times zero
        for (int64_t j = 0; j < n; j++) {
            if (x[j] != x[j]) return -1;
            best = x[j] > best ? x[j] : best;
        }
    }
    if (best == -INFINITY) return -1;
    for (int64_t j = 0; j < n; j++) {
        if (x[j] == best) return j;
    }
    return -1;
}

// For each byte of a mask what is added to the eight numbers it stands for: 0 where the bit is 1, else -infinity.
struct MaskTable {
    float add[256][8];
    MaskTable() {
        for (int byte = 0; byte < 256; byte++) {
            for (int bit = 0; bit < 8; bit++) add[byte][bit] = byte >> bit & 1 ? 0.0f : -INFINITY;
        }
    }
};

inline const MaskTable& mask_table() {
    static const MaskTable table;
    return table;
}

inline bool is_allowed(const uint32_t* allowed, int64_t j) { return allowed[j / 32] >> (j % 32) & 1; }

// The first of the largest numbers whose bit is 1; a row with a NaN anywhere gives -1, and so does one that has nothing
// above -infinity under its mask. Words of ones cost what `argmax_row` does, mixed ones a look at the table.
SGL_OUTLINE inline int64_t masked_argmax_row(const float* x, const uint32_t* allowed, int64_t n) {
    const MaskTable& table = mask_table();
    F top = fill(-INFINITY), nan = zero();
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        uint32_t word = allowed[i / 32];
        float added[32];
        if (word != 0 && word != ~0u) {
            for (int part = 0; part < 4; part++) std::memcpy(added + 8 * part, table.add[word >> 8 * part & 255], 32);
        }
        for (int64_t j = 0; j < 32; j += LANES) {
            F v = load(x + i + j);
            nan = sgl::add(nan, mul(v, zero()));
            if (word == ~0u) {
                top = largest_of(v, top);
            } else if (word != 0) {
                top = largest_of(sgl::add(v, load(added + j)), top);
            }
        }
    }
    float best = largest(top), check = sum(nan);
    for (int64_t j = i; j < n; j++) {
        check += x[j] * 0.0f;
        if (is_allowed(allowed, j) && x[j] > best) best = x[j];
    }
    if (check != check) {  // a NaN, or an infinity times zero
        best = -INFINITY;
        for (int64_t j = 0; j < n; j++) {
            if (x[j] != x[j]) return -1;
            if (is_allowed(allowed, j) && x[j] > best) best = x[j];
        }
    }
    if (best == -INFINITY) return -1;
    for (int64_t j = 0; j < n; j++) {
        if (j % 32 == 0 && allowed[j / 32] == 0) {
            j += 31;
        } else if (x[j] == best && is_allowed(allowed, j)) {
            return j;
        }
    }
    return -1;
}

}  // namespace sgl
