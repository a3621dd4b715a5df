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

#include "elementwise.h"
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

// R tiles of rows with G groups of weights: 16 x 16 results of each, group by group.
template <int R, int G>
SGL_OUTLINE inline void tile_dots(const Tiles& tiles, int64_t cols, const uint8_t* const* groups, int64_t ahead,
                                  const uint16_t* x, float* out) {
    static_assert(R * G <= 4 && R <= 2);
    auto indices = [](auto count, auto&& visit) {
        [&]<int... I>(std::integer_sequence<int, I...>) { (visit(std::integral_constant<int, I>()), ...); }
        (std::make_integer_sequence<int, decltype(count)::value>());
    };
    std::integral_constant<int, R> num_rows;
    std::integral_constant<int, G> num_groups;
    indices(std::integral_constant<int, R * G>(), [&](auto i) { tiles.clear<i>(); });
    const int64_t further = TILE_ROWS * cols, bytes = TILE_ROWS * BFloat16::TILE;
    for (int64_t c = 0, at = 0; c < cols; c += TILE_COLS, x += TILE_NUMBERS, at += bytes) {
        indices(num_rows, [&](auto r) { tiles.load<4 + r>(x + r * further); });
        indices(num_groups, [&](auto g) {
            constexpr int B = 6 + g % 2;
            if (ahead) fetch(groups[g] + at + ahead, bytes);
            tiles.load<B>(groups[g] + at);
            indices(num_rows, [&](auto r) { tiles.dot<g * R + r, 4 + r, B>(); });
        });
    }
    indices(std::integral_constant<int, R * G>(), [&](auto i) { tiles.store<i>(out + i * TILE_ROWS * LANES); });
}

// Calls `pass(R, row)` for each one or two tiles of the rows begin .. end.
template <class Pass>
inline void each_rows_of_tiles(int64_t begin, int64_t end, Pass pass) {
    int64_t row = begin;
    for (; row + TILE_ROWS < end; row += 2 * TILE_ROWS) pass(std::integral_constant<int, 2>(), row);
    if (row < end) pass(std::integral_constant<int, 1>(), row);
}

// Some groups of a matrix with some rows of the activations: what one member does at a time.
struct Part {
    int64_t group, last_group, row, last_row;
};

// As `dots`, for all rows of a part: two tiles of rows at a time with two groups of weights, the last one with four.
SGL_OUTLINE inline void multiply_tiles(const Weight& w, const Part& part, int64_t far, const Target& to,
                                       const Activations& x) {
    if constexpr (LANES == TILE_ROWS) {
        Tiles tiles;
        alignas(64) float out[4 * TILE_ROWS * LANES];
        int64_t bytes = group_bytes(w);
        each_rows_of_tiles(part.row, part.last_row, [&](auto rows, int64_t row) {
            constexpr int R = decltype(rows)::value, MOST = 4 / R;
            const uint16_t* from = x.halves + tiles_at(row, w.cols);
            auto some = [&](auto groups, int64_t g) {
                constexpr int G = decltype(groups)::value;
                int64_t ahead = row ? 0 : g + G < part.last_group ? G * bytes : G * bytes + far;
                const uint8_t* at[G];
                for (int i = 0; i < G; i++) at[i] = w.data + (g + i) * bytes;
                tile_dots<R, G>(tiles, w.cols, at, ahead, from, out);
                for (int i = 0; i < G * R; i++) {
                    int64_t first = row + i % R * TILE_ROWS, count = std::min<int64_t>(TILE_ROWS, x.rows - first);
                    for (int64_t r = 0; r < count; r++) {
                        write_lanes(w, g + i / R, to, first + r, load(out + (i * TILE_ROWS + r) * LANES));
                    }
                }
            };
            int64_t g = part.group;
            for (; g + MOST <= part.last_group; g += MOST) some(std::integral_constant<int, MOST>(), g);
            for (; g < part.last_group; g++) some(std::integral_constant<int, 1>(), g);
        });
    }
}

// silu(gate) * up of a part, as tiles of the rows of `to`, which have a column for each row of the weights.
SGL_OUTLINE inline void multiply_gated_tiles(const Weight& gate, const Weight& up, const Part& part, int64_t far,
                                             const Activations& x, uint16_t* to) {
    if constexpr (LANES == TILE_ROWS) {
        Tiles tiles;
        alignas(64) float out[4 * TILE_ROWS * LANES];
        int64_t bytes = group_bytes(gate);
        each_rows_of_tiles(part.row, part.last_row, [&](auto rows, int64_t row) {
            constexpr int R = decltype(rows)::value;
            for (int64_t g = part.group; g < part.last_group; g++) {
                int64_t ahead = row ? 0 : g + 1 < part.last_group ? bytes : bytes + far;
                const uint8_t* at[] = {gate.data + g * bytes, up.data + g * bytes};
                tile_dots<R, 2>(tiles, gate.cols, at, ahead, x.halves + tiles_at(row, gate.cols), out);
                for (int64_t r = 0; r < std::min<int64_t>(R * TILE_ROWS, x.rows - row); r++) {
                    const float* products = out + r * LANES;
                    int64_t column = g * LANES, tile = column / TILE_COLS * TILE_NUMBERS + column % TILE_COLS;
                    round_lanes(mul(silu(load(products)), load(products + R * TILE_ROWS * LANES)),
                                to + tiles_at(row + r, gate.rows) + tile);
                }
            }
        });
    }
}

// Groups that one member takes at a time.
constexpr int64_t CHUNK = 4;
// What of the weights and of the activations of a part in tiles stays in a member's cache while many rows are computed,
// and the rows of such a part.
constexpr int64_t WEIGHT_BYTES = 300 << 10, ACTIVATION_BYTES = 800 << 10, FEWEST_ROWS = 64, MOST_ROWS = 256;

// How products of an input with matrices of one number of columns are cut into parts: first all of the first rows.
class Parts {
   public:
    Parts(const Weight* const* weights, int count, int64_t rows, bool tiled)
        : weights_(weights), count_(count), rows_(rows) {
        int64_t cols = weights[0]->cols, fitting = ACTIVATION_BYTES / (2 * cols) / FEWEST_ROWS * FEWEST_ROWS;
        if (tiled && rows > FEWEST_ROWS) {
            groups_ = std::max(CHUNK, WEIGHT_BYTES / (2 * cols * LANES) / CHUNK * CHUNK);
            row_step_ = std::clamp(fitting, FEWEST_ROWS, MOST_ROWS);
        }
        for (int i = 0; i < count; i++) chunks_ += chunks_of(i);
    }

    int64_t size() const { return chunks_ * ((rows_ + row_step_ - 1) / row_step_); }
    // Bytes from a part to that of another member, which comes next for this one when `members` are in step.
    int64_t far(const Weight& w, int members) const { return groups_ * (members - 1) * group_bytes(w); }

    // Calls `visit(i, part)` for the part of that number, of matrix i.
    template <class Visit>
    void at(int64_t index, Visit visit) const {
        int64_t row = index / chunks_ * row_step_, chunk = index % chunks_;
        int i = 0;
        for (int64_t n; chunk >= (n = chunks_of(i)); i++) chunk -= n;
        int64_t group = chunk * groups_;
        visit(i, Part{group, std::min(group + groups_, weights_[i]->groups()), row, std::min(row + row_step_, rows_)});
    }

   private:
    int64_t chunks_of(int i) const { return (weights_[i]->groups() + groups_ - 1) / groups_; }

    const Weight* const* weights_;
    const int count_;
    const int64_t rows_;
    int64_t groups_ = CHUNK, row_step_ = std::max<int64_t>(rows_, 1), chunks_ = 0;
};

// The first pass over the rows brings the weights from memory, the others find them in the cache.
SGL_OUTLINE inline void multiply_part(const Weight& w, const Part& part, int64_t far, const Target& to, const Activations& x) {
    int64_t row = part.row;
    auto pass = [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        dots<R>(w, part.group, part.last_group, row == 0, far, x, row, to);
        row += R;
    };
    while (row + PANEL <= part.last_row) pass(std::integral_constant<int, PANEL>());
    if (PANEL > 4 && row + 4 <= part.last_row) pass(std::integral_constant<int, 4>());
    if (row + 2 <= part.last_row) pass(std::integral_constant<int, 2>());
    if (row < part.last_row) pass(std::integral_constant<int, 1>());
}

// Products of one input with several matrices, and `then`. Called by all members of the team.
template <class Then>
inline void multiply(Team& team, const Weight* const* weights, const Target* targets, int count, const Activations& x,
                     Then&& then) {
    bool tiled = in_tiles(x.cols);
    for (int i = 0; i < count; i++) tiled &= weights[i]->type == BF16;
    Parts parts(weights, count, x.rows, tiled);
    team.each(
        parts.size(),
        [&](int64_t index) {
            parts.at(index, [&](int i, const Part& part) {
                const Weight& w = *weights[i];
                if (w.type == BF16 && in_tiles(w.cols)) {
                    multiply_tiles(w, part, parts.far(w, team.size()), targets[i], x);
                } else {
                    multiply_part(w, part, parts.far(w, team.size()), targets[i], x);
                }
            });
        },
        then);
}

// Whether `multiply_gated` can make the input of `down`.
inline bool gates_in_tiles(const Weight& gate, const Weight& up, const Weight& down) {
    bool same = gate.type == BF16 && up.type == BF16 && down.type == BF16 && !gate.bias && !up.bias;
    return same && in_tiles(gate.cols) && in_tiles(down.cols);
}

// silu(gate) * up as the tiles that `down` multiplies: the same bits as by way of floats, which are not written.
inline void multiply_gated(Team& team, const Weight& gate, const Weight& up, const Activations& x, uint16_t* to) {
    const Weight* weights[] = {&gate};
    Parts parts(weights, 1, x.rows, true);
    team.each(parts.size(), [&](int64_t index) {
        parts.at(index, [&](int, const Part& part) {
            multiply_gated_tiles(gate, up, part, parts.far(gate, team.size()), x, to);
        });
    });
}

}  // namespace sgl
