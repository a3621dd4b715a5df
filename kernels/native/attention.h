// Causal attention of a step's tokens over KV pages.
//
// The arithmetic of a query is fixed by its context alone: keys are taken in blocks of KEYS from the sequence's
// beginning, with a running softmax (Milakov and Gimelshein 2018) inside each split of SPLIT keys, and the splits are
// merged in their order. So a token gets the same bits alone, in a batch, and in a chunk of any length. How the work is
// shared out follows from the step: a token alone in its chunk is cut into splits (so that a long context keeps all
// threads busy), a longer chunk into runs of QUERIES tokens. Tokens whose split lies in the same pages (forks of one
// prompt) are computed together: keys and values are then read once.
//
// A page's keys and values are [positions, kv_heads, dim], float or bfloat16. Nothing beyond a context is read. Where the
// processor has a matrix unit, bfloat16 keys and values meet queries and weights that are rounded to bfloat16, too
// (attention_tiles.h), in every step alike.
//
// The last tokens of a chunk may be a tree, of which each sees its ancestors only: their scores against others are
// minus infinity, so a chain has the bits that it has without being called a tree. A tree of 64 that begins with a block
// ends with it, and a later block holds the query's own key: no query meets a block of which it sees nothing.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_tiles.h"
#include "matmul.h"

namespace sgl {

constexpr int64_t SPLIT = 512, QUERIES = 16, TILED_QUERIES = 32;
constexpr int TOGETHER = MANY_REGISTERS ? 4 : 2;  // queries that look at a block of keys together
constexpr int64_t AHEAD = 6;  // positions that are fetched before they are read
constexpr int64_t FEW = 64;  // heads whose splits one member joins faster than a barrier lets several do it

// One sequence's part of a step: `length` tokens at positions from `start`. Python has the same struct (attention.py).
struct Chunk {
    int64_t start, length;
    const int32_t* pages;
    const uint64_t* ancestors;  // of the last `tree` tokens, or null: bit j of row i says that the i-th sees the j-th
    int64_t tree;

    int64_t first_of_tree() const { return start + length - (ancestors ? tree : 0); }
};

struct Heads {
    int32_t query, kv, dim, page_size;
    int32_t bfloat16;  // the type of keys and values; else float
    int32_t padding;

    int32_t group() const { return query / kv; }
    int64_t slot(const int32_t* pages, int64_t position) const {
        if (page_size == 1) return pages[position];
        return int64_t(pages[position / page_size]) * page_size + position % page_size;
    }
};

// Tokens row .. row + rows of the step against keys begin .. end; `last[i]` is the position of the i-th. `split` is the
// split to leave a partial result of, or -1 for all of them and a complete result.
struct Task {
    int64_t row, rows, position, step, split;  // token i is at position + i * step
    const int32_t* pages;
    const uint64_t* ancestors = nullptr;  // of the tokens from position `tree` on
    int64_t tree = 0;

    int64_t limit(int64_t i) const { return position + i * step + 1; }
    // What the i-th sees of the tree; everything when it comes before.
    uint64_t sees(int64_t i) const {
        int64_t node = limit(i) - 1 - tree;
        return ancestors && node >= 0 ? ancestors[node] : ~uint64_t(0);
    }
};

// What a query has seen so far: the weighted sum of values, the largest score, the sum of weights.
struct Seen {
    float* mixed;
    int64_t wide;

    float& top() const { return mixed[wide]; }
    float& mass() const { return mixed[wide + 1]; }
    void clear() const {
        std::fill(mixed, mixed + wide + 2, 0.0f);
        top() = -INFINITY;
    }
};

// Of the keys of a block, those of a tree that begins with key `first` which a query does not see.
struct Hidden {
    uint64_t sees = ~uint64_t(0);
    int64_t first = KEYS;

    void take_from(float* scores, int64_t count) const {
        for (int64_t k = std::max<int64_t>(0, first); k < count; k++) {
            if (!(sees >> (k - first) & 1)) scores[k] = -INFINITY;
        }
    }
};

inline float exponential_of(float x) {
    float lanes[LANES];
    store(lanes, exponential(fill(x)));
    return lanes[0];
}

inline void merge(const Seen& into, const Seen& more) {
    float top = std::max(into.top(), more.top());
    float fade = exponential_of(into.top() - top), weight = exponential_of(more.top() - top);
    for (int64_t d = 0; d < into.wide; d += LANES) {
        store(into.mixed + d, fma(load(more.mixed + d), fill(weight), mul(load(into.mixed + d), fill(fade))));
    }
    into.mass() = into.mass() * fade + more.mass() * weight;
    into.top() = top;
}

// The attention of one step over one layer's pool. Rows of `mixed` and of `partial` states have dim rounded up to LANES.
class Attention {
   public:
    Attention(const Heads& heads, const Chunk* chunks, int64_t count)
        : heads_(heads),
          wide_((heads.dim + LANES - 1) / LANES * LANES),
          tiled_(heads.bfloat16 && attends_in_tiles(heads.dim)),
          most_(tiled_ ? TILED_QUERIES : QUERIES) {
        int64_t row = 0;
        std::vector<Task> alone;
        for (const Chunk* chunk = chunks; chunk < chunks + count; row += chunk->length, chunk++) {
            if (chunk->length == 1) {
                alone.push_back({row, 1, chunk->start, 0, 0, chunk->pages});
                continue;
            }
            for (int64_t i = 0; i < chunk->length; i += most_) {
                int64_t rows = std::min(most_, chunk->length - i);
                tasks_.push_back({row + i, rows, chunk->start + i, 1, -1, chunk->pages, chunk->ancestors,
                                  chunk->first_of_tree()});
            }
        }
        std::reverse(tasks_.begin(), tasks_.end());  // the longest first: what is left at the end is short
        first_partial_.assign(size_t(row), 0);
        split(alone);
    }

    int64_t partial_floats() const { return partials_ * heads_.query * (wide_ + 2); }
    int64_t scratch_floats() const {
        int64_t plain = KEYS * (2 * wide_ + TOGETHER) + most_ * heads_.group() * (wide_ + 2 * (wide_ + 2));
        return tiled_ ? std::max(plain, TiledLook::floats(heads_.dim, most_ * heads_.group())) : plain;
    }

    // Called by all members, and `then` by one at the end. `query` is [T, heads, dim], scaled already; `out` has the
    // same shape. `scratch` is the member's own.
    template <class Then>
    void run(Team& team, const float* query, const void* keys, const void* values, float* partial, float* scratch,
             float* out, Then&& then) const {
        // Heads of a position lie together: one member takes them all, unless there is too little to share out.
        int64_t count = int64_t(tasks_.size()), span = count >= 2 * team.size() ? heads_.kv : 1;
        auto task_of = [&](int64_t index) {
            const Task& task = tasks_[size_t(index * span / heads_.kv)];
            int64_t first = index * span % heads_.kv;
            for (int64_t head = first; head < first + span; head++) {
                int64_t reach = head == first ? span * heads_.dim : 0;
                if (tiled_ && hides_numbers_only(task, head, static_cast<const uint16_t*>(values))) {
                    compute_in_tiles(task, head, reach, query, static_cast<const uint16_t*>(keys),
                                     static_cast<const uint16_t*>(values), partial, scratch, out);
                } else if (heads_.bfloat16) {
                    compute(task, head, reach, query, static_cast<const uint16_t*>(keys),
                            static_cast<const uint16_t*>(values), partial, scratch, out);
                } else {
                    compute(task, head, reach, query, static_cast<const float*>(keys), static_cast<const float*>(values),
                            partial, scratch, out);
                }
            }
        };
        int64_t tasks = count * heads_.kv / span, joined = int64_t(alone_.size()) * heads_.query;
        auto join = [&](int64_t index) {
            join_splits(alone_[size_t(index / heads_.query)], index % heads_.query, partial, out);
        };
        if (joined <= FEW) {
            team.each(tasks, task_of, [&] {
                for (int64_t i = 0; i < joined; i++) join(i);
                then();
            });
        } else {
            team.each(tasks, task_of);
            team.each(joined, join, then);
        }
    }

   private:
    // Cut tokens that are alone in their chunks into splits; put those together that read the same pages.
    void split(const std::vector<Task>& alone) {
        alone_ = alone;
        int64_t longest = 0;
        for (const Task& task : alone) {
            int64_t splits = (task.limit(0) + SPLIT - 1) / SPLIT;
            first_partial_[size_t(task.row)] = partials_;
            partials_ += splits;
            longest = std::max(longest, splits);
        }
        for (int64_t s = 0; s < longest; s++) {
            for (const Task& task : alone) {
                if (task.limit(0) <= s * SPLIT) continue;
                if (!tasks_.empty() && tasks_.back().split == s && joins(tasks_.back(), task)) {
                    tasks_.back().rows++;
                } else {
                    tasks_.push_back({task.row, 1, task.position, 0, s, task.pages});
                }
            }
        }
    }

    // Whether `next` reads in the split of `task` what that reads, all of it.
    bool joins(const Task& task, const Task& next) const {
        int64_t begin = task.split * SPLIT, end = begin + SPLIT;
        if (task.row + task.rows != next.row || task.rows == most_) return false;
        if (task.limit(0) < end || next.limit(0) < end) return false;
        int64_t first = begin / heads_.page_size, last = (end + heads_.page_size - 1) / heads_.page_size;
        return std::memcmp(task.pages + first, next.pages + first, size_t(last - first) * 4) == 0;
    }

    void join_splits(const Task& task, int64_t head, float* partial, float* out) const {
        Seen total = partial_state(partial, task.row, 0, head);
        for (int64_t s = 1; s * SPLIT < task.limit(0); s++) merge(total, partial_state(partial, task.row, s, head));
        finish(total, out + (task.row * heads_.query + head) * heads_.dim);
    }

    Seen partial_state(float* partial, int64_t row, int64_t split, int64_t head) const {
        int64_t index = first_partial_[size_t(row)] + split;
        return {partial + (index * heads_.query + head) * (wide_ + 2), wide_};
    }

    void finish(const Seen& seen, float* out) const {
        float inverse = 1.0f / seen.mass();
        for (int64_t d = 0; d < heads_.dim; d++) out[d] = seen.mixed[d] * inverse;
    }

    // Whether the values that some token of the task does not see are numbers. A weight of zero makes no NaN harmless
    // on the matrix unit, which multiplies by it.
    bool hides_numbers_only(const Task& task, int64_t head, const uint16_t* values) const {
        if (task.split >= 0) return true;  // its tokens see all of their split
        int64_t first = task.ancestors ? std::min(task.limit(0), task.tree) : task.limit(0), bad = 0;
        for (int64_t position = first; position < task.limit(task.rows - 1); position++) {
            const uint16_t* value = values + (heads_.slot(task.pages, position) * heads_.kv + head) * heads_.dim;
            for (int64_t d = 0; d < heads_.dim; d++) bad |= (value[d] & 0x7f80) == 0x7f80;
        }
        return !bad;
    }

    // As `compute`, on the matrix unit.
    SGL_OUTLINE void compute_in_tiles(const Task& task, int64_t head, int64_t reach, const float* query,
                                      const uint16_t* keys, const uint16_t* values, float* partial, float* scratch,
                                      float* out) const {
        int64_t group = heads_.group();
        auto row_of = [&](int64_t i) { return task.row + i / group; };
        auto head_of = [&](int64_t i) { return head * group + i % group; };
        auto offset_of = [&](int64_t i) { return (row_of(i) * heads_.query + head_of(i)) * heads_.dim; };
        Tiles tiles;
        TiledLook look(heads_.dim, task.rows * group, scratch);
        look.take_queries([&](int64_t i) { return query + offset_of(i); },
                          [&](int64_t i) { return task.limit(i / group); });
        if (task.split >= 0) {
            look_through(tiles, look, task, head, reach, task.split, keys, values);
            look.each(false, [&](int64_t i, int64_t d, const float* mixed, float top, float mass) {
                Seen state = partial_state(partial, row_of(i), task.split, head_of(i));
                std::memcpy(state.mixed + d, mixed, TILE_ROWS * 4);
                state.top() = top, state.mass() = mass;
            });
            return;
        }
        look.clear_total();
        for (int64_t s = 0; s * SPLIT < task.limit(task.rows - 1); s++) {
            look_through(tiles, look, task, head, reach, s, keys, values);
            look.merge_all();
        }
        look.each(true, [&](int64_t i, int64_t d, const float* mixed, float, float mass) {
            float* to = out + offset_of(i) + d;
            float inverse = 1.0f / mass;
            for (int64_t j = 0; j < TILE_ROWS; j++) to[j] = mixed[j] * inverse;
        });
    }

    // One split of the keys, block by block, for all queries of a task.
    void look_through(const Tiles& tiles, TiledLook& look, const Task& task, int64_t head, int64_t reach, int64_t split,
                      const uint16_t* keys, const uint16_t* values) const {
        int64_t group = heads_.group(), count = task.rows * group, stride = int64_t(heads_.kv) * heads_.dim;
        int64_t end = std::min(task.limit(task.rows - 1), (split + 1) * SPLIT);
        auto at = [&](int64_t position) { return heads_.slot(task.pages, position) * stride + head * heads_.dim; };
        look.clear();
        for (int64_t begin = split * SPLIT; begin < end; begin += KEYS) {
            int64_t there = std::min(KEYS, end - begin), from[KEYS];
            for (int64_t k = 0; k < there; k++) {
                from[k] = at(begin + k);
                int64_t later = reach ? at(std::min(begin + k + AHEAD, end - 1)) : 0;
                for (int64_t d = 0; d < reach; d += 32) {
                    __builtin_prefetch(keys + later + d), __builtin_prefetch(values + later + d);
                }
            }
            look.take_block(begin, there, [&](int64_t k) { return keys + from[k]; },
                            [&](int64_t k) { return values + from[k]; });
            look.look(tiles, [&](int64_t first, float* scores) {
                if (!task.ancestors || begin + there <= task.tree) return;
                for (int64_t lane = 0; lane < TILE_ROWS; lane++) {
                    uint64_t sees = task.sees(std::min(first + lane, count - 1) / group);
                    for (int64_t k = std::max<int64_t>(0, task.tree - begin); k < there; k++) {
                        if (!(sees >> (begin + k - task.tree) & 1)) scores[k * TILE_ROWS + lane] = -INFINITY;
                    }
                }
            });
        }
    }

    // `reach` numbers from the head's are fetched of each position, ahead of reading it: this head and those after it.
    template <class T>
    SGL_OUTLINE void compute(const Task& task, int64_t head, int64_t reach, const float* query, const T* keys,
                             const T* values, float* partial, float* scratch, float* out) const {
        int64_t group = heads_.group(), count = task.rows * group;
        float* queries = scratch + KEYS * (2 * wide_ + TOGETHER);
        float* states = queries + count * wide_;
        auto query_at = [&](int64_t i) { return ((task.row + i / group) * heads_.query + head * group + i % group) * heads_.dim; };
        auto own_state = [&](int64_t i) { return Seen{states + i * (wide_ + 2), wide_}; };
        for (int64_t i = 0; i < count; i++) {
            std::fill(queries + i * wide_, queries + (i + 1) * wide_, 0.0f);
            std::memcpy(queries + i * wide_, query + query_at(i), size_t(heads_.dim) * 4);
        }
        if (task.split >= 0) {
            look_through(task, head, reach, task.split, keys, values, scratch, queries, [&](int64_t i) {
                return partial_state(partial, task.row + i / group, task.split, head * group + i % group);
            });
            return;
        }
        auto total = [&](int64_t i) { return own_state(count + i); };
        for (int64_t i = 0; i < count; i++) total(i).clear();
        for (int64_t s = 0; s * SPLIT < task.limit(task.rows - 1); s++) {
            look_through(task, head, reach, s, keys, values, scratch, queries, own_state);
            for (int64_t i = 0; i < count; i++) {
                if (task.limit(i / group) > s * SPLIT) merge(total(i), own_state(i));
            }
        }
        for (int64_t i = 0; i < count; i++) finish(total(i), out + query_at(i));
    }

    // One split of the keys, block by block, for all queries of a task. `state_of(i)` is where the i-th keeps its state.
    template <class T, class StateOf>
    void look_through(const Task& task, int64_t head, int64_t reach, int64_t split, const T* keys, const T* values,
                      float* scratch, const float* queries, StateOf state_of) const {
        int64_t group = heads_.group(), count = task.rows * group;
        float *key_block = scratch, *value_block = key_block + KEYS * wide_, *scores = value_block + KEYS * wide_;
        int64_t end = 0;
        for (int64_t r = 0; r < task.rows; r++) end = std::max(end, task.limit(r));
        end = std::min(end, (split + 1) * SPLIT);
        for (int64_t i = 0; i < count; i++) state_of(i).clear();
        for (int64_t begin = split * SPLIT; begin < end; begin += KEYS) {
            int64_t there = std::min(KEYS, end - begin);
            gather(keys, values, task, head, begin, there, end, reach, key_block, value_block);
            auto visible = [&](int64_t i) { return std::min(there, task.limit(i / group) - begin); };
            for (int64_t i = 0; i < count;) {
                int64_t keys_seen = visible(i), same = 1;
                if (task.ancestors && begin + keys_seen > task.tree && keys_seen > 0) {
                    Hidden hidden{task.sees(i / group), task.tree - begin};
                    Seen state = state_of(i);
                    look<1>(queries + i * wide_, key_block, value_block, keys_seen, scores, &state, hidden);
                    i++;
                    continue;
                }
                while (same < TOGETHER && i + same < count && visible(i + same) == keys_seen) same++;
                if (same < TOGETHER) same = std::min<int64_t>(same, 2);
                if (keys_seen > 0) {
                    Seen seen[TOGETHER];
                    for (int64_t q = 0; q < same; q++) seen[q] = state_of(i + q);
                    const float* first = queries + i * wide_;
                    if (same == TOGETHER) {
                        look<TOGETHER>(first, key_block, value_block, keys_seen, scores, seen);
                    } else if (same == 2) {
                        look<2>(first, key_block, value_block, keys_seen, scores, seen);
                    } else {
                        look<1>(first, key_block, value_block, keys_seen, scores, seen);
                    }
                }
                i += same;
            }
        }
    }

    static F load_number(const float* p) { return load(p); }
    static F load_number(const uint16_t* p) { return load_bf16(p); }
    static float number(float x) { return x; }
    static float number(uint16_t x) { return bf16_to_float(x); }

    // One head of `count` positions from `begin`, keys and values, as rows of wide_ floats; rows up to a multiple of
    // LANES are filled. Positions lie apart, where the processor does not guess them: those ahead, before `end`, are
    // fetched, `reach` numbers of each.
    template <class T>
    SGL_OUTLINE void gather(const T* keys, const T* values, const Task& task, int64_t head, int64_t begin, int64_t count,
                            int64_t end, int64_t reach, float* key_rows, float* value_rows) const {
        int64_t stride = int64_t(heads_.kv) * heads_.dim;
        auto at = [&](int64_t position) { return heads_.slot(task.pages, position) * stride + head * heads_.dim; };
        for (int64_t i = 0; i < count; i++, key_rows += wide_, value_rows += wide_) {
            if (reach) {
                int64_t later = at(std::min(begin + i + AHEAD, end - 1));
                for (int64_t d = 0; d < reach; d += 64 / int64_t(sizeof(T))) {
                    __builtin_prefetch(keys + later + d), __builtin_prefetch(values + later + d);
                }
            }
            int64_t from = at(begin + i);
            widen(keys + from, key_rows);
            widen(values + from, value_rows);
        }
        for (int64_t i = count; i % LANES; i++, key_rows += wide_, value_rows += wide_) {
            std::fill(key_rows, key_rows + wide_, 0.0f);
            std::fill(value_rows, value_rows + wide_, 0.0f);
        }
    }

    template <class T>
    void widen(const T* from, float* to) const {
        int64_t d = 0;
        for (; d + LANES <= heads_.dim; d += LANES) store(to + d, load_number(from + d));
        for (; d < heads_.dim; d++) to[d] = number(from[d]);
        for (; d < wide_; d++) to[d] = 0;
    }

    // Scores of Q queries against the first `count` keys of a block, KEYS apart; -infinity up to a multiple of LANES.
    template <int Q>
    void score(const float* queries, const float* keys, int64_t count, float* scores) const {
        constexpr int STEP = LANES < 4 ? LANES : 4;  // keys that are read once for all queries
        for (int64_t first = 0; first < count; first += LANES) {
            F products[Q][LANES];
            for (int k = 0; k < LANES; k += STEP) {
                F sums[Q][STEP];
                for (int q = 0; q < Q; q++) {
                    for (int i = 0; i < STEP; i++) sums[q][i] = zero();
                }
                const float* key = keys + (first + k) * wide_;
                for (int64_t d = 0; d < wide_; d += LANES) {
                    F query[Q];
                    for (int q = 0; q < Q; q++) query[q] = load(queries + q * wide_ + d);
                    for (int i = 0; i < STEP; i++) {
                        F values = load(key + i * wide_ + d);
                        for (int q = 0; q < Q; q++) sums[q][i] = fma(query[q], values, sums[q][i]);
                    }
                }
                for (int q = 0; q < Q; q++) {
                    for (int i = 0; i < STEP; i++) products[q][k + i] = sums[q][i];
                }
            }
            for (int q = 0; q < Q; q++) store(scores + q * KEYS + first, sums_of(products[q]));
        }
        for (int q = 0; q < Q; q++) {
            for (int64_t k = count; k % LANES; k++) scores[q * KEYS + k] = -INFINITY;
        }
    }

    // What Q queries see in the first `count` keys of a block: each the same as alone, but keys and values are read once.
    template <int Q>
    SGL_OUTLINE void look(const float* queries, const float* keys, const float* values, int64_t count, float* scores,
                          const Seen* seen, const Hidden& hidden = Hidden()) const {
        score<Q>(queries, keys, count, scores);
        if (Q == 1) hidden.take_from(scores, count);
        for (int q = 0; q < Q; q++) weigh(count, scores + q * KEYS, seen[q]);
        constexpr int WIDE = (MANY_REGISTERS ? 16 : 8) / Q;  // vectors of each query's sum that are under way
        int64_t d = 0;
        for (; d + WIDE * LANES <= wide_; d += WIDE * LANES) mix<Q, WIDE>(scores, values + d, count, seen, d);
        for (; d < wide_; d += LANES) mix<Q, 1>(scores, values + d, count, seen, d);
    }

    // Scores become weights, relative to the largest score so far; what was seen before is scaled to that.
    void weigh(int64_t count, float* scores, const Seen& seen) const {
        F tops = fill(-INFINITY), mass = zero();
        for (int64_t k = 0; k < count; k += LANES) tops = largest_of(load(scores + k), tops);
        float top = std::max(seen.top(), largest(tops));
        for (int64_t k = 0; k < count; k += LANES) {
            F weight = exponential(sgl::sub(load(scores + k), fill(top)));
            store(scores + k, weight);
            mass = sgl::add(mass, weight);
        }
        if (top != seen.top()) {
            float fade = exponential_of(seen.top() - top);
            for (int64_t d = 0; d < wide_; d += LANES) store(seen.mixed + d, mul(load(seen.mixed + d), fill(fade)));
            seen.mass() *= fade;
            seen.top() = top;
        }
        seen.mass() += sum(mass);
    }

    // mixed += weights x values for Q queries, N vectors wide, from feature `at`.
    template <int Q, int N>
    void mix(const float* weights, const float* values, int64_t count, const Seen* seen, int64_t at) const {
        F sums[Q][N];
        for (int q = 0; q < Q; q++) {
            for (int v = 0; v < N; v++) sums[q][v] = load(seen[q].mixed + at + v * LANES);
        }
        for (int64_t k = 0; k < count; k++, values += wide_) {
            F weight[Q];
            for (int q = 0; q < Q; q++) weight[q] = fill(weights[q * KEYS + k]);
            for (int v = 0; v < N; v++) {
                F value = load(values + v * LANES);
                for (int q = 0; q < Q; q++) sums[q][v] = fma(weight[q], value, sums[q][v]);
            }
        }
        for (int q = 0; q < Q; q++) {
            for (int v = 0; v < N; v++) store(seen[q].mixed + at + v * LANES, sums[q][v]);
        }
    }

    const Heads heads_;
    const int64_t wide_;
    const bool tiled_;
    const int64_t most_;  // tokens of a task
    std::vector<Task> tasks_, alone_;
    std::vector<int64_t> first_partial_;  // by row of the step, for those that are alone
    int64_t partials_ = 0;
};

}  // namespace sgl
