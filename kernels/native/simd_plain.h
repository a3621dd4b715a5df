// Plain C++ for any processor: loops over arrays, which compilers turn into what vectors there are. See simd.h.
#pragma once

namespace sgl {

constexpr int LANES = 8;
constexpr int S8_OFFSET = 0;
constexpr bool MANY_REGISTERS = true;
constexpr bool BF16_DOT = false;
constexpr const char* ISA = "plain";

struct F { float v[LANES]; };
struct I { int32_t v[LANES]; };
struct Bytes { uint8_t v[4 * LANES]; };
using Partial = I;

uint16_t float_to_bf16(float value);
float f16_to_float(uint16_t half);
float bf16_to_float(uint16_t bits);

template <class Vector, class Make>
inline Vector each_lane(Make make) {
    Vector out;
    for (int i = 0; i < LANES; i++) out.v[i] = make(i);
    return out;
}

inline F fill(float x) { return each_lane<F>([&](int) { return x; }); }
inline F zero() { return fill(0.0f); }
inline F load(const float* p) { return each_lane<F>([&](int i) { return p[i]; }); }
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
inline F add(F a, F b) { return each_lane<F>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F sub(F a, F b) { return each_lane<F>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F mul(F a, F b) { return each_lane<F>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F divide(F a, F b) { return each_lane<F>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return each_lane<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F largest_of(F a, F b) { return each_lane<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F nearest(F x) { return each_lane<F>([&](int i) { return std::nearbyint(x.v[i]); }); }
inline F magnitude(F x) { return each_lane<F>([&](int i) { return std::fabs(x.v[i]); }); }
inline F zero_below(F x, float bound, F value) {
    return each_lane<F>([&](int i) { return x.v[i] < bound ? 0.0f : value.v[i]; });
}
inline F power_of_two(F n) { return each_lane<F>([&](int i) { return std::ldexp(1.0f, int(n.v[i])); }); }

inline F load_bf16(const uint16_t* p) { return each_lane<F>([&](int i) { return bf16_to_float(p[i]); }); }
inline F load_f16(const uint16_t* p) { return each_lane<F>([&](int i) { return f16_to_float(p[i]); }); }
inline F load_u8(const uint8_t* p) { return each_lane<F>([&](int i) { return float(p[i]); }); }

inline float sum(F x) {
    return ((x.v[0] + x.v[4]) + (x.v[2] + x.v[6])) + ((x.v[1] + x.v[5]) + (x.v[3] + x.v[7]));
}
inline float largest(F x) {
    float top = x.v[0];
    for (int i = 1; i < LANES; i++) top = x.v[i] > top ? x.v[i] : top;
    return top;
}
inline F sums_of(const F x[LANES]) { return each_lane<F>([&](int i) { return sum(x[i]); }); }

inline F to_float(I x) { return each_lane<F>([&](int i) { return float(x.v[i]); }); }
inline I fill_int(int32_t x) { return each_lane<I>([&](int) { return x; }); }
inline I zero_int() { return fill_int(0); }
inline I sub_int(I a, I b) { return each_lane<I>([&](int i) { return a.v[i] - b.v[i]; }); }
inline I add_int(I a, I b) { return each_lane<I>([&](int i) { return a.v[i] + b.v[i]; }); }
inline I mul_int(I a, I b) { return each_lane<I>([&](int i) { return a.v[i] * b.v[i]; }); }
inline I load_s8(const uint8_t* p) { return each_lane<I>([&](int i) { return int32_t(int8_t(p[i])); }); }
inline void store_s8(int8_t* p, F x) {
    for (int i = 0; i < LANES; i++) p[i] = int8_t(std::nearbyint(x.v[i]));
}

template <class Make>
inline Bytes each_byte(Make make) {
    Bytes out;
    for (int i = 0; i < 4 * LANES; i++) out.v[i] = uint8_t(make(i));
    return out;
}
inline Bytes load_bytes(const uint8_t* p) { return each_byte([&](int i) { return p[i]; }); }
inline Bytes four_bytes(const int8_t* p) { return each_byte([&](int i) { return p[i & 3]; }); }
inline Bytes low_nibbles(Bytes b) { return each_byte([&](int i) { return b.v[i] & 15; }); }
inline Bytes high_nibbles(Bytes b) { return each_byte([&](int i) { return b.v[i] >> 4; }); }
template <int field>
inline Bytes two_bits_high(Bytes b) {
    return each_byte([&](int i) { return ((b.v[i] >> (2 * field)) & 3) << 4; });
}
inline Bytes either(Bytes a, Bytes b) { return each_byte([&](int i) { return a.v[i] | b.v[i]; }); }

inline void settle(Partial&) {}
inline Partial no_products() { return zero_int(); }
inline Partial add_products(Partial p, Bytes u, Bytes s) {
    for (int i = 0; i < 4 * LANES; i++) p.v[i / 4] += int32_t(u.v[i]) * int32_t(int8_t(s.v[i]));
    return p;
}
inline I widen(Partial p) { return p; }
inline I dot_signed(I acc, Bytes w, Bytes s) {
    for (int i = 0; i < 4 * LANES; i++) acc.v[i / 4] += int32_t(int8_t(w.v[i])) * int32_t(int8_t(s.v[i]));
    return acc;
}

inline uint16_t half_of(Bytes b, int i, int which) {
    uint16_t bits;
    std::memcpy(&bits, b.v + 4 * i + 2 * which, 2);
    return bits;
}
inline F first_of_pair(Bytes b) { return each_lane<F>([&](int i) { return bf16_to_float(half_of(b, i, 0)); }); }
inline F second_of_pair(Bytes b) { return each_lane<F>([&](int i) { return bf16_to_float(half_of(b, i, 1)); }); }
inline F dot_pairs(F acc, Bytes, const uint16_t*) { return acc; }  // never called: BF16_DOT is false

}  // namespace sgl
