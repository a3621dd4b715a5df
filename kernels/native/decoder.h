// The layers of a decoder over one step: each a pre-norm attention block and a pre-norm gated feed-forward block, added to
// the residual stream.
//
// One call computes all layers, so that a step costs one start of the team. Everything is a sequence of the other files'
// loops with a barrier after each (five in a layer when few tokens are decoded); activations between them are float.
#pragma once

#include "attention.h"
#include "elementwise.h"

namespace sgl {

// Python has the same structs (decoder.py). Optional pointers may be null.
struct Layer {
    const float* attention_norm;
    const float* query_norm;  // per head, optional
    const float* key_norm;
    const float* feed_forward_norm;
    Weight query, key, value, output, gate, up, down;
    void* keys;  // this layer's part of the pool
    void* values;
};

struct Shape {
    int64_t hidden, inner;
    float eps, scale;
    Heads heads;
};

struct Step {
    int64_t tokens, chunks;
    const Chunk* chunk;
    const float* cos;  // [tokens, dim], both halves equal
    const float* sin;
    float* x;  // [tokens, hidden], in and out
};

// Memory that grows to what the largest step needs and stays.
class Arena {
   public:
    // Everything handed out before is given back.
    void reset() { used_ = 0; }

    template <class T>
    T* take(int64_t count) {
        size_t begin = (used_ + 63) / 64 * 64;
        used_ = begin + size_t(count) * sizeof(T);
        return reinterpret_cast<T*>(memory_.get() + begin);
    }

    // Calls `plan`, which takes what it needs, with no memory at first, to learn how much it is.
    template <class Plan>
    void provide(Plan plan) {
        reset();
        plan();
        if (used_ + 64 > size_) {
            memory_.reset();
            memory_.reset(static_cast<char*>(std::aligned_alloc(64, (used_ + 127) / 64 * 64)));
            if (!memory_) throw std::bad_alloc();
            size_ = used_ + 64;
        }
        reset();
        plan();
    }

   private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t used_ = 0, size_ = 0;
};

inline ActivationSpace take_space(Arena& arena, int64_t rows, int64_t cols) {
    constexpr int64_t STEP = std::max(PANEL, TILE_ROWS);
    rows = (rows + STEP - 1) / STEP * STEP;
    int64_t blocks = rows * ((cols + BLOCK - 1) / BLOCK), pairs = rows * ((cols + 1) / 2);
    return {{arena.take<int8_t>(blocks * BLOCK), arena.take<float>(blocks), arena.take<float>(blocks),
             arena.take<int32_t>(2 * blocks)},
            arena.take<uint16_t>(2 * pairs), arena.take<float>(2 * pairs)};
}

// The working memory of one step.
struct DecoderSpace {
    float *normed, *query, *key, *value, *mixed, *gate, *up, *partial, *scratch;
    int64_t scratch_floats;
    ActivationSpace derived;
    uint16_t* gated;  // the input of `down` where tiles make it

    DecoderSpace(Arena& arena, const Shape& shape, int64_t tokens, const Attention& attention, int members) {
        int64_t query_size = int64_t(shape.heads.query) * shape.heads.dim, kv_size = int64_t(shape.heads.kv) * shape.heads.dim;
        normed = arena.take<float>(tokens * shape.hidden);
        query = arena.take<float>(tokens * query_size);
        key = arena.take<float>(tokens * kv_size);
        value = arena.take<float>(tokens * kv_size);
        mixed = arena.take<float>(tokens * query_size);
        gate = arena.take<float>(tokens * shape.inner);
        up = arena.take<float>(tokens * shape.inner);
        partial = arena.take<float>(attention.partial_floats());
        scratch_floats = (attention.scratch_floats() + 15) / 16 * 16;
        scratch = arena.take<float>(scratch_floats * members);
        derived = take_space(arena, tokens, std::max({shape.hidden, shape.inner, query_size}));
        gated = arena.take<uint16_t>((tokens + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * shape.inner);
    }
};

// Rows whose norms and activations one member computes faster than a barrier lets several do it.
constexpr int64_t FEW_ROWS = 2;

class Decoder {
   public:
    Decoder(Team& team, const Shape& shape, const Step& step, const Attention& attention, const DecoderSpace& space)
        : team_(team), shape_(shape), step_(step), attention_(attention), space_(space), few_(step.tokens <= FEW_ROWS) {}

    // Called by all members with their numbers, for one layer after the other. `next` is the layer after, or null.
    // Before the first one, `begin`.
    void layer(const Layer& layer, const Layer* next, int member) const {
        auto rotate = [&](int64_t row) { rotate_and_write(layer, row); };
        auto mixed = [&, forms = forms_of({&layer.output})](int64_t row) {
            derive_row(forms, space_.mixed + row * query_size(), row, query_size(), space_.derived);
        };
        auto feed_forward = [&, forms = forms_of({&layer.gate, &layer.up})](int64_t row) {
            normed(layer.feed_forward_norm, forms, row);
        };
        auto activated = [&, forms = forms_of({&layer.down})](int64_t row) {
            float* gate = space_.gate + row * shape_.inner;
            silu_mul_row(gate, space_.up + row * shape_.inner, shape_.inner, gate);
            derive_row(forms, gate, row, shape_.inner, space_.derived);
        };
        auto after = [&](int64_t row) {
            if (next) begin_row(*next, row);
        };
        product(derived(shape_.hidden), {&layer.query, &layer.key, &layer.value},
                {space_.query, space_.key, space_.value}, false, rotate);
        attention_.run(team_, space_.query, layer.keys, layer.values, space_.partial,
                       space_.scratch + member * space_.scratch_floats, space_.mixed, [&] { if (few_) all_rows(mixed); });
        if (!few_) team_.each(step_.tokens, mixed);
        product(derived(query_size()), {&layer.output}, {step_.x}, true, feed_forward);
        Activations inner = derived(shape_.inner);
        if (gates_in_tiles(layer.gate, layer.up, layer.down)) {
            inner.halves = space_.gated;
            multiply_gated(team_, layer.gate, layer.up, derived(shape_.hidden), space_.gated);
        } else {
            product(derived(shape_.hidden), {&layer.gate, &layer.up}, {space_.gate, space_.up}, false, activated);
        }
        product(inner, {&layer.down}, {step_.x}, true, after);
    }

    // The first layer's input.
    void begin(const Layer& first) const {
        team_.each(step_.tokens, [&](int64_t row) { begin_row(first, row); });
    }

   private:
    using Weights = std::initializer_list<const Weight*>;

    int64_t query_size() const { return int64_t(shape_.heads.query) * shape_.heads.dim; }

    template <class Once>
    void all_rows(Once&& once) const {
        for (int64_t row = 0; row < step_.tokens; row++) once(row);
    }

    // A row of x, normed, in the forms that the next products need.
    void normed(const float* norm, Forms forms, int64_t row) const {
        float* out = space_.normed + row * shape_.hidden;
        rms_norm_row(step_.x + row * shape_.hidden, norm, shape_.hidden, shape_.eps, out);
        derive_row(forms, out, row, shape_.hidden, space_.derived);
    }

    void begin_row(const Layer& layer, int64_t row) const {
        normed(layer.attention_norm, forms_of({&layer.query, &layer.key, &layer.value}), row);
    }

    static Forms forms_of(Weights weights) {
        Forms forms;
        for (const Weight* w : weights) forms.add(*w);
        return forms;
    }

    // What was derived of rows of so many columns.
    Activations derived(int64_t cols) const { return space_.derived.of(step_.tokens, cols); }

    // Products of activations, and then `once` for each row: by one member where the rows are few, which
    // spares a barrier.
    template <class Once>
    void product(const Activations& x, Weights weights, std::initializer_list<float*> outs, bool add,
                 Once&& once) const {
        Target targets[3];
        int count = 0;
        for (float* out : outs) targets[count] = {out, weights.begin()[count]->rows, add}, count++;
        multiply(team_, weights.begin(), targets, count, x, [&] { if (few_) all_rows(once); });
        if (!few_) team_.each(step_.tokens, once);
    }

    // Queries rotated and scaled in place; keys rotated and values into the pool.
    void rotate_and_write(const Layer& layer, int64_t row) const {
        const Heads& heads = shape_.heads;
        const float *cos = step_.cos + row * heads.dim, *sin = step_.sin + row * heads.dim;
        for (int64_t h = 0; h < heads.query; h++) {
            float* head = space_.query + (row * heads.query + h) * heads.dim;
            if (layer.query_norm) rms_norm_row(head, layer.query_norm, heads.dim, shape_.eps, head);
            rotate_head(head, cos, sin, heads.dim, shape_.scale, head);
        }
        const Chunk* chunk = step_.chunk;
        int64_t in_chunk = row;
        for (; in_chunk >= chunk->length; chunk++) in_chunk -= chunk->length;
        int64_t slot = heads.slot(chunk->pages, chunk->start + in_chunk);
        for (int64_t h = 0; h < heads.kv; h++) {
            float* key = space_.key + (row * heads.kv + h) * heads.dim;
            if (layer.key_norm) rms_norm_row(key, layer.key_norm, heads.dim, shape_.eps, key);
            rotate_head(key, cos, sin, heads.dim, 1.0f, key);
        }
        int64_t size = int64_t(heads.kv) * heads.dim;
        write(space_.key + row * size, layer.keys, slot * size, size);
        write(space_.value + row * size, layer.values, slot * size, size);
    }

    void write(const float* from, void* pool, int64_t at, int64_t count) const {
        if (!shape_.heads.bfloat16) {
            std::memcpy(static_cast<float*>(pool) + at, from, size_t(count) * 4);
            return;
        }
        uint16_t* to = static_cast<uint16_t*>(pool) + at;
        for (int64_t i = 0; i < count; i++) to[i] = float_to_bf16(from[i]);
    }

    Team& team_;
    const Shape& shape_;
    const Step& step_;
    const Attention& attention_;
    const DecoderSpace& space_;
    const bool few_;
};

}  // namespace sgl
