// The largest numbers of a row of logits, and the mass of all of them, in one pass over the row.
//
// What is kept is the first `k` by (number, the smaller index first): a bound rises as the row is read, and after a short
// while almost every block of the row is left out by its largest number alone.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace sgl {

struct Candidate {
    float value;
    int32_t id;

    bool operator<(const Candidate& other) const {  // ranks before
        return value != other.value ? value > other.value : id < other.id;
    }
};

// The first-ranked `k` of what it was shown, in the order of their ids.
class Best {
   public:
    explicit Best(int64_t k) : k_(size_t(k)) { kept_.reserve(4 * k_); }

    // Numbers up to this one are not among them.
    float bound() const { return bound_; }

    void look_through(const float* x, int64_t count, int64_t first_id) {
        for (int64_t i = 0; i < count; i += LANES) {
            if (!(largest(load(x + i)) > bound_)) continue;
            for (int64_t j = i; j < i + LANES; j++) {
                if (x[j] > bound_) offer({x[j], int32_t(first_id + j)});
            }
        }
    }

    // All of them in order.
    const std::vector<Candidate>& ranked() {
        if (kept_.size() > k_) shrink();
        std::sort(kept_.begin(), kept_.end());
        return kept_;
    }

   private:
    void offer(Candidate candidate) {
        kept_.push_back(candidate);
        if (kept_.size() == 4 * k_) shrink();
    }

    void shrink() {
        std::nth_element(kept_.begin(), kept_.begin() + int64_t(k_) - 1, kept_.end());
        kept_.resize(k_);
        bound_ = kept_.back().value;
    }

    const size_t k_;
    std::vector<Candidate> kept_;
    float bound_ = -INFINITY;
};

constexpr int64_t LOOK = 1024;  // numbers that are looked at several times while they are near

// The `k` largest of x[0 .. n) with their places, largest first, and ln of the sum of e^(scale * x). No number is a NaN
// or infinity. Where fewer than `k` are above -infinity, the rest is -infinity at place 0.
SGL_OUTLINE inline void top_k_row(const float* x, int64_t n, int64_t k, double scale, float* values, int64_t* ids,
                                  double* log_mass) {
    Best best(k);
    float top = -INFINITY, last[LOOK];
    double mass = 0;
    for (int64_t begin = 0; begin < n; begin += LOOK) {
        const float* block = x + begin;
        if (n - begin < LOOK) {
            std::fill(last, last + LOOK, -INFINITY);
            std::copy(block, x + n, last);
            block = last;
        }
        F tops = fill(-INFINITY);
        for (int64_t i = 0; i < LOOK; i += LANES) tops = largest_of(load(block + i), tops);
        float here = largest(tops);
        if (here == -INFINITY) continue;
        if (here > top) {
            mass *= std::exp(scale * (double(top) - double(here)));
            top = here;
        }
        F sums = zero();
        for (int64_t i = 0; i < LOOK; i += LANES) {
            sums = sgl::add(sums, exponential(mul(sgl::sub(load(block + i), fill(top)), fill(float(scale)))));
        }
        mass += double(sum(sums));
        if (here > best.bound()) best.look_through(block, LOOK, begin);
    }
    const std::vector<Candidate>& ranked = best.ranked();
    for (size_t i = 0; i < size_t(k); i++) {
        bool is_there = i < ranked.size();
        values[i] = is_there ? ranked[i].value : -INFINITY;
        ids[i] = is_there ? ranked[i].id : 0;
    }
    *log_mass = scale * double(top) + std::log(mass);
}

}  // namespace sgl
