// The functions that Python calls (library.py): each is one loop or one step on the team. Pointers are to contiguous
// memory of the sizes that the arguments say; the caller checks them. One caller at a time.

#include <cstdlib>
#include <memory>
#include <new>

#include "decoder.h"
#include "top_k.h"

using namespace sgl;

namespace {

Team*& the_team() {
    static Team* team = new Team(1);
    return team;
}

// The team; a forked process starts its own (the threads of its parent's did not come along).
Team& team() {
    Team*& team = the_team();
    if (!team->alive()) team = new Team(team->size());
    return *team;
}

Arena& arena() {
    static Arena arena;
    return arena;
}

template <class Once>
void for_each(int64_t count, Once once) {
    team().run([&] { team().each(count, once); });
}

// x [rows, w.cols] in the form that `w` needs, then the product.
void linear(const Weight* w, const float* x, int64_t rows, float* out) {
    ActivationSpace space;
    arena().provide([&] { space = take_space(arena(), rows, w->cols); });
    Forms forms;
    forms.add(*w);
    Activations activations = space.of(rows, w->cols);
    Target target{out, w->rows, false};
    Team& all = team();
    all.run([&] {
        all.each(rows, [&](int64_t row) { derive_row(forms, x + row * w->cols, row, w->cols, space); });
        multiply(all, &w, &target, 1, activations, [] {});
    });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* sgl_isa() { return ISA; }

int32_t sgl_lanes() { return LANES; }

void sgl_set_threads(int32_t count) {
    Team*& team = the_team();
    if (team->alive() && team->size() == count) return;
    if (team->alive()) delete team;
    team = new Team(count);
}

int64_t sgl_packed_bytes(const Weight* w) { return w->groups() * group_bytes(*w); }

void sgl_pack(const Weight* w, const uint8_t* source) {
    for_each(w->groups(), [&](int64_t group) { pack_group(*w, source, group); });
}

// Returns how many of the ids are rows: fewer than `count` where one is none, and then nothing is written.
int64_t sgl_rows(const Weight* w, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= w->rows) return i;
    }
    for_each(count, [&](int64_t i) { read_row(*w, ids[i], out + i * w->cols); });
    return count;
}

void sgl_linear(const Weight* w, const float* x, int64_t rows, float* out) { linear(w, x, rows, out); }

void sgl_rms_norm(const float* x, const float* weight, int64_t rows, int64_t n, float eps, float* out) {
    for_each(rows, [&](int64_t row) { rms_norm_row(x + row * n, weight, n, eps, out + row * n); });
}

void sgl_silu_mul(const float* gate, const float* up, int64_t rows, int64_t n, float* out) {
    for_each(rows, [&](int64_t row) { silu_mul_row(gate + row * n, up + row * n, n, out + row * n); });
}

void sgl_rotary(const float* x, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t dim, float* out) {
    for_each(rows * heads, [&](int64_t i) {
        rotate_head(x + i * dim, cos + i / heads * dim, sin + i / heads * dim, dim, 1.0f, out + i * dim);
    });
}

// `words` holds a mask of `word_stride` words for each row, or is null.
void sgl_argmax(const float* x, int64_t rows, int64_t stride, int64_t n, const uint32_t* words, int64_t word_stride,
                int64_t* out) {
    for_each(rows, [&](int64_t row) {
        const float* numbers = x + row * stride;
        out[row] = words ? masked_argmax_row(numbers, words + row * word_stride, n) : argmax_row(numbers, n);
    });
}

// See `top_k_row`; `scale` and `log_mass` have a number for each row, `values` and `ids` have `k`.
void sgl_top_k(const float* x, int64_t rows, int64_t stride, int64_t n, int64_t k, const double* scale, float* values,
               int64_t* ids, double* log_mass) {
    for_each(rows, [&](int64_t row) {
        top_k_row(x + row * stride, n, k, scale[row], values + row * k, ids + row * k, log_mass + row);
    });
}

void sgl_attention(const Heads* heads, const Chunk* chunks, int64_t count, const float* query, const void* keys,
                   const void* values, float* out) {
    Attention attention(*heads, chunks, count);
    Team& all = team();
    float *partial, *scratch;
    int64_t own = (attention.scratch_floats() + 15) / 16 * 16;
    arena().provide([&] {
        partial = arena().take<float>(attention.partial_floats());
        scratch = arena().take<float>(own * all.size());
    });
    std::atomic<int> members{0};
    all.run([&] { attention.run(all, query, keys, values, partial, scratch + own * members++, out, [] {}); });
}

void sgl_decoder(const Shape* shape, const Layer* layers, int64_t count, const Step* step) {
    Attention attention(shape->heads, step->chunk, step->chunks);
    Team& all = team();
    std::unique_ptr<DecoderSpace> space;
    arena().provide([&] {
        space = std::make_unique<DecoderSpace>(arena(), *shape, step->tokens, attention, all.size());
    });
    Decoder decoder(all, *shape, *step, attention, *space);
    std::atomic<int> members{0};
    all.run([&] {
        int member = members++;
        decoder.begin(layers[0]);
        for (int64_t i = 0; i < count; i++) decoder.layer(layers[i], i + 1 < count ? layers + i + 1 : nullptr, member);
    });
}

}  // extern "C"
#pragma GCC visibility pop
