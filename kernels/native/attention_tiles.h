// Attention of up to some dozens of queries over blocks of keys, on the matrix unit.
//
// Everything stands on its side: a tile of scores has keys for rows and 16 queries for columns, so that the running
// softmax goes down the lanes and a query never leaves its own. Queries, keys, values and weights are bfloat16, sums are
// float. A key that a query does not see has weight 0 and changes nothing where its value is a number, so a query's bits
// follow from its context alone, as attention.h promises; attention.h looks out for others.
#pragma once

#include <algorithm>
#include <utility>

#include "tiles.h"

namespace sgl {

constexpr int64_t KEYS = 64;

inline bool attends_in_tiles(int64_t dim) { return has_tiles() && LANES == TILE_ROWS && dim % TILE_COLS == 0; }

// e^x for x = `score` - top <= 0, where `shift` is top * LOG2E, to 3e-6 relative and what the difference of the two products
// rounds off: enough for a weight that is rounded to eight bits. 0 far below, 1 at the top, NaN for NaN. The Taylor polynomial of 2^x on [-1 / 2, 1 / 2].
constexpr float LOG2E = 1.44269504088896341f;
inline F weight_of(F score, F shift) {
    F x = sgl::sub(mul(score, fill(LOG2E)), shift);
    F n = nearest(x), r = sgl::sub(x, n);
    F p = fma(fill(1.33335581e-3f), r, fill(9.61812911e-3f));
    p = fma(p, r, fill(5.55041087e-2f));
    p = fma(p, r, fill(2.40226507e-1f));
    p = fma(p, r, fill(6.93147181e-1f));
    return scale_from(-125.0f, x, fma(p, r, fill(1.0f)), n);
}

// `count` queries of `dim` numbers, with what they have seen. Memory is the caller's.
class TiledLook {
   public:
    TiledLook(int64_t dim, int64_t count, float* memory) : dim_(dim), count_(count) {
        auto take = [&](int64_t floats) { return std::exchange(memory, memory + floats); };
        auto halves = [&](int64_t count) { return reinterpret_cast<uint16_t*>(take(count / 2)); };
        keys_ = halves(KEYS * dim), values_ = halves(KEYS * dim), queries_ = halves(tiles() * TILE_ROWS * dim);
        weights_ = halves(KEYS * TILE_ROWS), nothing_ = halves(dim);
        scores_[0] = take(KEYS * TILE_ROWS), scores_[1] = take(KEYS * TILE_ROWS), products_ = take(2 * TILE_ROWS * TILE_ROWS);
        limits_ = take(tiles() * TILE_ROWS);
        seen_ = take(tiles() * state_size()), total_ = take(tiles() * state_size());
        std::fill(nothing_, nothing_ + dim, uint16_t(0));
    }
    TiledLook(const TiledLook&) = delete;

    static int64_t floats(int64_t dim, int64_t count) {
        int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
        return KEYS * dim + tiles * TILE_ROWS * dim / 2 + KEYS * TILE_ROWS / 2 + dim / 2 + 2 * KEYS * TILE_ROWS +
               2 * TILE_ROWS * TILE_ROWS + tiles * TILE_ROWS * (2 * (dim + 2) + 1);
    }

    int64_t tiles() const { return (count_ + TILE_ROWS - 1) / TILE_ROWS; }

    // Query i is at `at(i)` and sees the keys below `limit(i)`, which does not fall with i.
    template <class At, class Limit>
    void take_queries(At at, Limit limit) {
        alignas(64) uint16_t rows[TILE_NUMBERS];
        for (int64_t tile = 0; tile < tiles(); tile++) {
            for (int64_t i = tile * TILE_ROWS; i < (tile + 1) * TILE_ROWS; i++) {
                limits_[i] = float(limit(std::min(i, count_ - 1)));
            }
            for (int64_t d = 0; d < dim_; d += TILE_COLS) {
                for (int64_t lane = 0; lane < TILE_ROWS; lane++) {
                    uint16_t* row = rows + lane * TILE_COLS;
                    int64_t i = tile * TILE_ROWS + lane;
                    if (i < count_) {
                        round_columns(at(i) + d, row);
                    } else {
                        std::fill(row, row + TILE_COLS, uint16_t(0));
                    }
                }
                transpose_words(rows, 64, queries_ + (tile * dim_ + d) * TILE_ROWS);
            }
        }
    }

    // The next block: `count` keys and values from position `begin`, the k-th of them at `key(k)` and `value(k)`.
    template <class Key, class Value>
    void take_block(int64_t begin, int64_t count, Key key, Value value) {
        begin_ = begin;
        rows_ = (count + TILE_COLS - 1) / TILE_COLS * TILE_COLS;
        const uint16_t* from[KEYS];
        for (int64_t k = 0; k < rows_; k++) {
            std::memcpy(keys_ + k * dim_, k < count ? key(k) : nothing_, size_t(dim_) * 2);
            from[k] = k < count ? value(k) : nothing_;
        }
        for (int64_t k = 0; k < rows_; k += TILE_COLS) {
            for (int64_t d = 0; d < dim_; d += TILE_ROWS) transpose_columns(from + k, d, value_tile(d, k));
        }
    }

    // What all queries see of the block: keys below their limits, less those that `hide(first, scores)` makes minus
    // infinity, for the 16 queries from `first` on, which lie side by side for each key. The matrix unit has the next
    // scores under way while these become weights.
    template <class Hide>
    SGL_OUTLINE void look(const Tiles& tiles, Hide hide) {
        int64_t tile = 0, end = this->tiles();
        while (limits_[(tile + 1) * TILE_ROWS - 1] <= float(begin_)) tile++;
        score(tiles, tile);
        for (; tile < end; tile++) {
            if (tile + 1 < end) score(tiles, tile + 1);
            float* scores = scores_[tile % 2];
            const float* limits = limits_ + tile * TILE_ROWS;
            for (int64_t k = std::max<int64_t>(0, int64_t(*limits) - begin_); k < rows_; k++) {
                store(scores + k * TILE_ROWS, seen_only(load(scores + k * TILE_ROWS), load(limits), float(begin_ + k)));
            }
            hide(tile * TILE_ROWS, scores);
            float* state = seen_ + tile * state_size();
            F fade = weigh(scores, state);
            for (int64_t d = 0; d < dim_; d += 2 * TILE_ROWS) mix(tiles, d, fade, state + d * TILE_ROWS);
        }
    }

    // Nothing was seen yet of this split, or at all.
    void clear() { clear(seen_); }
    void clear_total() { clear(total_); }

    // What was seen of a split joins the rest.
    void merge_all() {
        for (int64_t tile = 0; tile < tiles(); tile++) {
            float *into = total_ + tile * state_size(), *more = seen_ + tile * state_size();
            F before = load(top(into)), now = largest_of(before, load(top(more)));
            F fade = exponential(below(before, now)), weight = exponential(below(load(top(more)), now));
            for (int64_t d = 0; d < dim_ * TILE_ROWS; d += TILE_ROWS) {
                store(into + d, fma(load(more + d), weight, mul(load(into + d), fade)));
            }
            store(mass(into), sgl::add(mul(load(mass(into)), fade), mul(load(mass(more)), weight)));
            store(top(into), now);
        }
    }

    // Calls `visit(i, mixed, top, mass)` for each query with what it has seen of this split, or in all.
    template <class Visit>
    void each(bool in_all, Visit visit) const {
        alignas(64) float columns[TILE_ROWS * TILE_ROWS];
        for (int64_t tile = 0; tile < tiles(); tile++) {
            const float* state = (in_all ? total_ : seen_) + tile * state_size();
            int64_t there = std::min<int64_t>(TILE_ROWS, count_ - tile * TILE_ROWS);
            for (int64_t d = 0; d < dim_; d += TILE_ROWS) {
                transpose_words(state + d * TILE_ROWS, 64, columns);
                for (int64_t lane = 0; lane < there; lane++) {
                    visit(tile * TILE_ROWS + lane, d, columns + lane * TILE_ROWS, top(state)[lane], mass(state)[lane]);
                }
            }
        }
    }

   private:
    int64_t state_size() const { return (dim_ + 2) * TILE_ROWS; }
    template <class Number>
    Number* top(Number* state) const { return state + dim_ * TILE_ROWS; }
    template <class Number>
    Number* mass(Number* state) const { return state + (dim_ + 1) * TILE_ROWS; }
    uint16_t* value_tile(int64_t d, int64_t k) const { return values_ + (d * KEYS / TILE_ROWS + k) * TILE_ROWS; }

    // a - top, and minus infinity where there is no top yet.
    static F below(F a, F top) { return sgl::sub(a, finite(top)); }
    static F finite(F top) { return largest_of(top, fill(-1e38f)); }

    void clear(float* states) const {
        for (int64_t tile = 0; tile < tiles(); tile++) {
            float* state = states + tile * state_size();
            std::fill(state, state + state_size(), 0.0f);
            store(top(state), fill(-INFINITY));
        }
    }

    // Keys x queries.
    void score(const Tiles& tiles, int64_t tile) const {
        float* scores = scores_[tile % 2];
        const uint16_t* query = queries_ + tile * dim_ * TILE_ROWS;
        for (int64_t k = 0; k < rows_; k += 2 * TILE_ROWS) {
            const uint16_t* keys = keys_ + k * dim_;
            tiles.clear<0>(), tiles.clear<1>();
            for (int64_t d = 0; d < dim_; d += TILE_COLS) {
                tiles.load<4>(query + d * TILE_ROWS);
                tiles.load<5>(keys + d, dim_ * 2);
                tiles.load<6>(keys + TILE_ROWS * dim_ + d, dim_ * 2);
                tiles.dot<0, 5, 4>(), tiles.dot<1, 6, 4>();
            }
            tiles.store<0>(scores + k * TILE_ROWS), tiles.store<1>(scores + (k + TILE_ROWS) * TILE_ROWS);
        }
    }

    // Scores become weights, relative to the largest so far. Returns what becomes of what was seen before.
    F weigh(const float* scores, float* state) const {
        F before = load(top(state)), tops[4] = {before, before, before, before};
        for (int64_t k = 0; k < rows_; k += 4) {
            for (int i = 0; i < 4; i++) tops[i] = largest_of(load(scores + (k + i) * TILE_ROWS), tops[i]);
        }
        F now = largest_of(largest_of(tops[0], tops[1]), largest_of(tops[2], tops[3]));
        F shift = mul(finite(now), fill(LOG2E)), sums[2] = {zero(), zero()};
        for (int64_t k = 0; k < rows_; k += 2) {
            F first = weight_of(load(scores + k * TILE_ROWS), shift);
            F second = weight_of(load(scores + (k + 1) * TILE_ROWS), shift);
            sums[0] = sgl::add(sums[0], first), sums[1] = sgl::add(sums[1], second);
            round_pairs(first, second, weights_ + k * TILE_ROWS);
        }
        F fade = exponential(below(before, now));
        store(mass(state), fma(load(mass(state)), fade, sgl::add(sums[0], sums[1])));
        store(top(state), now);
        return fade;
    }

    // Values x weights, of 32 features from `d` on, join what was seen of them.
    void mix(const Tiles& tiles, int64_t d, F fade, float* seen) const {
        tiles.clear<0>(), tiles.clear<1>();
        for (int64_t k = 0; k < rows_; k += TILE_COLS) {
            tiles.load<4>(weights_ + k * TILE_ROWS);
            tiles.load<5>(value_tile(d, k)), tiles.load<6>(value_tile(d + TILE_ROWS, k));
            tiles.dot<0, 5, 4>(), tiles.dot<1, 6, 4>();
        }
        tiles.store<0>(products_), tiles.store<1>(products_ + TILE_ROWS * TILE_ROWS);
        for (int64_t i = 0; i < 2 * TILE_ROWS * TILE_ROWS; i += TILE_ROWS) {
            store(seen + i, fma(load(seen + i), fade, load(products_ + i)));
        }
    }

    const int64_t dim_, count_;
    int64_t begin_ = 0, rows_ = 0;  // of the block; rows at its end that are no keys have weight 0
    uint16_t *keys_, *values_, *queries_, *weights_, *nothing_;
    float *scores_[2], *products_, *limits_, *seen_, *total_;
};

}  // namespace sgl
