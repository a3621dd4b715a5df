// Products of activations and weights, for any number of rows.
//
// Each element of the result is one lane's sum over the columns in their order, whatever the number of rows, the thread
// and the place: rows are computed eight, four, two or one at a time with the same operations, so a row's bits do not depend on
// its neighbours. Weights are read once for all rows of a step (a chunk of them stays in the cache meanwhile).
//
// Quantized weights meet activations that were rounded to bytes, a scale for each 32 columns of a row. Other weights meet
// them in float, or in bfloat16 where the processor multiplies pairs or tiles of those.
#pragma once

#include <algorithm>
#include <type_traits>

#include "team.h"
#include "tiles.h"
#include "weights.h"

namespace sgl {

// The forms of a step's activations that its weights need: each in panels of PANEL rows.
struct Activations {
    int64_t rows, cols;
    Quantized bytes;         // for quantized weights
    const uint16_t* halves;  // for bfloat16 weights where BF16_DOT: tiles, or pairs of columns, PANEL rows of each
    const float* floats;     // for other weights, likewise
};

// Memory for these forms; the rows are filled up to a multiple of PANEL.
struct ActivationSpace {
    QuantizedRows<int8_t, float, int32_t> bytes;
    uint16_t* halves;
    float* floats;

    Activations of(int64_t rows, int64_t cols) const {
        return {rows, cols, {bytes.q, bytes.scale, bytes.sum, bytes.half_sums}, halves, floats};
    }
};

// Where the pairs of columns of a row begin; the next pair is 2 * PANEL numbers further.
inline int64_t pairs_at(int64_t row, int64_t cols) {
    return 2 * (row / PANEL * PANEL * ((cols + 1) / 2) + row % PANEL);
}

// One row rounded to bytes. A row with a NaN or an infinity gives NaN scales: it fails visibly, and alone.
SGL_OUTLINE inline void quantize_row(const float* x, int64_t row, int64_t cols, const ActivationSpace& space) {
    auto to = space.bytes.at(row, cols / BLOCK);
    for (const float* end = x + cols; x < end; x += BLOCK, to = to.next(PANEL)) {
        F top = zero(), check = zero();
        for (int i = 0; i < BLOCK; i += LANES) {
            F v = load(x + i);
            top = largest_of(top, magnitude(v));
            check = sgl::add(check, sgl::sub(v, v));
        }
        float d = largest(top) / 127.0f + sgl::sum(check);
        F halves[2] = {zero(), zero()};  // whole numbers, whose sums are exact
        if (d > 0) {
            F inverse = fill(1.0f / d);
            for (int i = 0; i < BLOCK; i += LANES) {
                F whole = nearest(mul(load(x + i), inverse));
                store_s8(to.q + i, whole);
                halves[2 * i / BLOCK] = sgl::add(halves[2 * i / BLOCK], whole);
            }
        } else {
            std::memset(to.q, 0, BLOCK);
        }
        float sums[2] = {sgl::sum(halves[0]), sgl::sum(halves[1])};
        *to.scale = d;
        *to.sum = d * (sums[0] + sums[1]);
        to.half_sums[0] = int32_t(sums[0]), to.half_sums[1] = int32_t(sums[1]);
    }
}

// Whether bfloat16 weights of so many columns are multiplied by tiles. Their groups are columns of tiles as they are.
inline bool in_tiles(int64_t cols) { return has_tiles() && cols % TILE_COLS == 0; }

// Where a row of bfloat16 begins among tiles; its next 32 columns are TILE_NUMBERS further.
inline int64_t tiles_at(int64_t row, int64_t cols) { return row / TILE_ROWS * TILE_ROWS * cols + row % TILE_ROWS * TILE_COLS; }

inline void copy_to_tiles(const float* x, int64_t row, int64_t cols, uint16_t* to) {
    to += tiles_at(row, cols);
    for (int64_t c = 0; c < cols; c += TILE_COLS, to += TILE_NUMBERS) round_columns(x + c, to);
}

template <class Number, class Convert>
inline void copy_pairs(const float* x, int64_t row, int64_t cols, Number* to, Convert convert) {
    to += pairs_at(row, cols);
    for (int64_t c = 0; c < cols; c++) to[c / 2 * 2 * PANEL + (c & 1)] = convert(x[c]);
    if (cols & 1) to[cols / 2 * 2 * PANEL + 1] = 0;
}

// Which forms the matrices need of one input.
struct Forms {
    bool bytes = false, halves = false, floats = false;

    void add(const Weight& w) {
        bool pairs = BF16_DOT && w.type == BF16;
        bytes |= w.quantized();
        halves |= pairs;
        floats |= !w.quantized() && !pairs;
    }
};

inline void derive_row(Forms forms, const float* x, int64_t row, int64_t cols, const ActivationSpace& to) {
    if (forms.bytes) quantize_row(x, row, cols, to);
    if (forms.halves && in_tiles(cols)) {
        copy_to_tiles(x, row, cols, to.halves);
    } else if (forms.halves) {
        copy_pairs(x, row, cols, to.halves, float_to_bf16);
    }
    if (forms.floats) copy_pairs(x, row, cols, to.floats, [](float v) { return v; });
}

// Calls `visit(head, tile, x)` for each block of a group of rows of the weights and of rows of activations, from the
// first column to the last. What lies `ahead` bytes further is fetched meanwhile, unless that is 0.
template <class Codec, class Visit>
inline void each_block(const Weight& w, const uint8_t* group, int64_t ahead, Quantized x, Visit&& visit) {
    for (int64_t b = 0; b < w.blocks(); b += Codec::SUBS) {
        auto head = Codec::head(group);
        group += Codec::HEADER;
        for (int sub = 0; sub < Codec::SUBS; sub++, group += Codec::TILE, x = x.next(PANEL)) {
            if (ahead) fetch(group + ahead, Codec::TILE);
            visit(head, group, x);
        }
    }
}

// Where registers are few, the offsets of several rows are added up in a loop of their own, which leaves them to the products.
template <class Codec, int R>
SGL_OUTLINE inline void block_dots(const Weight& w, const uint8_t* group, int64_t ahead, const Activations& x, int64_t row, F out[R]) {
    F acc[R], lows[R];
    for (int r = 0; r < R; r++) acc[r] = zero(), lows[r] = zero();
    Quantized rows = x.bytes.at(row, w.blocks());
    auto add_offsets = [&](auto& head, const uint8_t* tile, const Quantized& at) {
        F low = Codec::low(head, tile);
        for (int r = 0; r < R; r++) lows[r] = fma(low, fill(at.sum[r]), lows[r]);
    };
    constexpr bool at_once = MANY_REGISTERS || R <= 2;
    each_block<Codec>(w, group, ahead, rows, [&](auto& head, const uint8_t* tile, const Quantized& at) {
        Codec::template add<R>(head, tile, at, acc);
        if constexpr (Codec::LOWS && at_once) add_offsets(head, tile, at);
    });
    if constexpr (Codec::LOWS && !at_once) each_block<Codec>(w, group, 0, rows, add_offsets);
    for (int r = 0; r < R; r++) out[r] = sgl::add(acc[r], lows[r]);
}

template <class Codec, int R, int G>
SGL_OUTLINE inline void float_dots(const Weight& w, const uint8_t* group, int64_t ahead, const Activations& x, int64_t row, F out[G * R]) {
    F even[G * R], odd[G * R];
    for (int i = 0; i < G * R; i++) even[i] = zero(), odd[i] = zero();
    int64_t bytes = float_group_bytes<Codec>(w);
    const float* v = x.floats + pairs_at(row, w.cols);
    for (int64_t p = 0; p < w.pairs(); p++, v += 2 * PANEL, group += Codec::TILE) {
        for (int g = 0; g < G; g++) {
            if (ahead) fetch(group + g * bytes + ahead, Codec::TILE);
            F first, second;
            Codec::load_two(group + g * bytes, first, second);
            for (int r = 0; r < R; r++) {
                even[g * R + r] = fma(first, fill(v[2 * r]), even[g * R + r]);
                odd[g * R + r] = fma(second, fill(v[2 * r + 1]), odd[g * R + r]);
            }
        }
    }
    for (int i = 0; i < G * R; i++) out[i] = sgl::add(even[i], odd[i]);
}

template <int R, int G>
SGL_OUTLINE inline void pair_dots(const Weight& w, const uint8_t* group, int64_t ahead, const Activations& x, int64_t row, F out[G * R]) {
    F acc[G * R];
    for (int i = 0; i < G * R; i++) acc[i] = zero();
    int64_t bytes = float_group_bytes<BFloat16>(w);
    const uint16_t* v = x.halves + pairs_at(row, w.cols);
    for (int64_t p = 0; p < w.pairs(); p++, v += 2 * PANEL, group += BFloat16::TILE) {
        for (int g = 0; g < G; g++) {
            if (ahead) fetch(group + g * bytes + ahead, BFloat16::TILE);
            Bytes two = load_bytes(group + g * bytes);
            for (int r = 0; r < R; r++) acc[g * R + r] = dot_pairs(acc[g * R + r], two, v + 2 * r);
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
constexpr int groups_together(int rows) { return MANY_REGISTERS && rows > 2 ? 2 : rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// Groups begin .. end of the weights with R rows from `row` on. While a group is computed, memory brings the next one;
// behind the last one that is the group `far` bytes further.
template <int R>
SGL_OUTLINE inline void dots(const Weight& w, int64_t begin, int64_t end, bool fetching, int64_t far, const Activations& x,
                             int64_t row, const Target& to) {
    constexpr int G = groups_together(R);
    int64_t bytes = group_bytes(w);
    auto ahead = [&](int64_t g, int64_t count) { return !fetching ? 0 : g + count < end ? count * bytes : count * bytes + far; };
    with_block_codec(w.type, [&](auto codec) {
        for (int64_t g = begin; g < end; g++) {
            F out[R];
            block_dots<decltype(codec), R>(w, w.data + g * bytes, ahead(g, 1), x, row, out);
            for (int r = 0; r < R; r++) write_lanes(w, g, to, row + r, out[r]);
        }
    });
    with_float_codec(w.type, [&](auto codec) {
        using C = decltype(codec);
        auto some = [&](auto together, int64_t g) {
            constexpr int N = decltype(together)::value;
            F out[N * R];
            if (BF16_DOT && w.type == BF16) {
                pair_dots<R, N>(w, w.data + g * bytes, ahead(g, N), x, row, out);
            } else {
                float_dots<C, R, N>(w, w.data + g * bytes, ahead(g, N), x, row, out);
            }
            for (int i = 0; i < N * R; i++) write_lanes(w, g + i / R, to, row + i % R, out[i]);
        };
        int64_t g = begin;
        for (; g + G <= end; g += G) some(std::integral_constant<int, G>(), g);
        for (; g < end; g++) some(std::integral_constant<int, 1>(), g);
    });
}

// R tiles of rows with G groups of the weights, from `group` on: 16 x 16 results of each, group by group.
template <int R, int G>
SGL_OUTLINE inline void tile_dots(const Tiles& tiles, const Weight& w, const uint8_t* group, int64_t ahead,
                                  const uint16_t* x, float* out) {
    static_assert(R * G <= 4 && R <= 2);
    int64_t bytes = float_group_bytes<BFloat16>(w), further = TILE_ROWS * w.cols;
    auto indices = [](auto count, auto&& visit) {
        [&]<int... I>(std::integer_sequence<int, I...>) { (visit(std::integral_constant<int, I>()), ...); }
        (std::make_integer_sequence<int, decltype(count)::value>());
    };
    std::integral_constant<int, R> rows;
    std::integral_constant<int, G> groups;
    indices(std::integral_constant<int, R * G>(), [&](auto i) { tiles.clear<i>(); });
    for (int64_t c = 0; c < w.cols; c += TILE_COLS, x += TILE_NUMBERS, group += TILE_ROWS * BFloat16::TILE) {
        indices(rows, [&](auto r) { tiles.load<4 + r>(x + r * further); });
        indices(groups, [&](auto g) {
            constexpr int B = 6 + g % 2;
            if (ahead) fetch(group + g * bytes + ahead, TILE_ROWS * BFloat16::TILE);
            tiles.load<B>(group + g * bytes);
            indices(rows, [&](auto r) { tiles.dot<g * R + r, 4 + r, B>(); });
        });
    }
    indices(std::integral_constant<int, R * G>(), [&](auto i) { tiles.store<i>(out + i * TILE_ROWS * LANES); });
}

// As `dots`, for all rows: two tiles of rows at a time with two groups of weights, the last one with four.
SGL_OUTLINE inline void multiply_tiles(const Weight& w, int64_t begin, int64_t end, int64_t far, const Target& to,
                                       const Activations& x) {
    if constexpr (LANES == TILE_ROWS) {
        Tiles tiles;
        alignas(64) float out[4 * TILE_ROWS * LANES];
        int64_t bytes = group_bytes(w);
        auto pass = [&](auto rows, int64_t row) {
            constexpr int R = decltype(rows)::value;
            const uint16_t* from = x.halves + tiles_at(row, w.cols);
            auto some = [&](auto groups, int64_t g) {
                constexpr int G = decltype(groups)::value;
                int64_t ahead = row ? 0 : g + G < end ? G * bytes : G * bytes + far;
                tile_dots<R, G>(tiles, w, w.data + g * bytes, ahead, from, out);
                for (int i = 0; i < G * R; i++) {
                    int64_t first = row + i % R * TILE_ROWS, count = std::min<int64_t>(TILE_ROWS, x.rows - first);
                    for (int64_t r = 0; r < count; r++) {
                        write_lanes(w, g + i / R, to, first + r, load(out + (i * TILE_ROWS + r) * LANES));
                    }
                }
            };
            constexpr int G = 4 / R;
            int64_t g = begin;
            for (; g + G <= end; g += G) some(std::integral_constant<int, G>(), g);
            for (; g < end; g++) some(std::integral_constant<int, 1>(), g);
        };
        int64_t row = 0;
        for (; row + TILE_ROWS < x.rows; row += 2 * TILE_ROWS) pass(std::integral_constant<int, 2>(), row);
        if (row < x.rows) pass(std::integral_constant<int, 1>(), row);
    }
}

// Groups that one member takes at a time.
constexpr int64_t CHUNK = 4;

// The first pass over the rows brings the weights from memory, the others find them in the cache. Of a team of `members`
// in step, this one's next chunk lies behind one chunk of each of the others.
SGL_OUTLINE inline void multiply_chunk(const Weight& w, int64_t chunk, int members, const Target& to, const Activations& x) {
    int64_t begin = chunk * CHUNK, end = std::min(begin + CHUNK, w.groups()), row = 0;
    int64_t far = (members - 1) * CHUNK * group_bytes(w);
    if (w.type == BF16 && in_tiles(w.cols)) {
        multiply_tiles(w, begin, end, far, to, x);
        return;
    }
    auto pass = [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        dots<R>(w, begin, end, row == 0, far, x, row, to);
        row += R;
    };
    while (row + PANEL <= x.rows) pass(std::integral_constant<int, PANEL>());
    if (PANEL > 4 && row + 4 <= x.rows) pass(std::integral_constant<int, 4>());
    if (row + 2 <= x.rows) pass(std::integral_constant<int, 2>());
    if (row < x.rows) pass(std::integral_constant<int, 1>());
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
            multiply_chunk(*weights[i], index, team.size(), targets[i], x);
        },
        then);
}

}  // namespace sgl
