// Vectors of 8 lanes, whose arithmetic gives the same bits on every processor: sums and products are written in one
// order, and the compiler may not fuse them (-ffp-contract=off); fma is fused everywhere.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#define ALWAYS_INLINE __attribute__((always_inline)) inline

constexpr int LANES = 8, BLOCK = 16, GROUP = 32;

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Uints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef uint16_t Ushorts __attribute__((vector_size(32)));
typedef uint16_t Ushorts8 __attribute__((vector_size(16)));
typedef uint8_t Bytes8 __attribute__((vector_size(8)));

struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

template <class T> inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> inline void store(void* to, T value) { std::memcpy(to, &value, sizeof value); }

inline Floats splat(float x) { return Floats{x, x, x, x, x, x, x, x}; }
inline Ints splat_bits(const void* from) {
    int32_t x = load<int32_t>(from);
    return Ints{x, x, x, x, x, x, x, x};
}

inline Floats fma(Floats a, Floats b, Floats c) {
#ifdef __FMA__
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    struct Halves {
        float32x4_t low, high;
    } x = load<Halves>(&a), y = load<Halves>(&b), z = load<Halves>(&c);
    Halves sums{vfmaq_f32(z.low, x.low, y.low), vfmaq_f32(z.high, x.high, y.high)};
    return load<Floats>(&sums);
#else
    for (int lane = 0; lane < LANES; lane++) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    return c;
#endif
}

inline Floats widen(const float* from) { return load<Floats>(from); }
inline Floats widen(const Float16* from) {
#ifdef __F16C__
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Uints bits = __builtin_convertvector(load<Ushorts8>(from), Uints);
    Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;  // the exponents' biases differ by 112
    return (Floats)((Uints)size | (bits & 0x8000) << 16);
#endif
}
inline Floats widen(const BFloat16* from) {
    return (Floats)(__builtin_convertvector(load<Ushorts8>(from), Uints) << 16);
}

inline float widen_scalar(const float* from) { return *from; }
inline float widen_scalar(const BFloat16* from) {
    uint32_t bits = (uint32_t)from->bits << 16;
    return load<float>(&bits);
}

inline Floats vmax(Floats a, Floats b) { return a > b ? a : b; }
inline Floats vmin(Floats a, Floats b) { return a < b ? a : b; }

inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, Float16* to) {
    float size = std::min(std::fabs(value), 65504.f) * 0x1p-112f;
    uint32_t bits = load<uint32_t>(&size);
    to->bits = (uint16_t)((bits + 0xfff + (bits >> 13 & 1)) >> 13 | (std::signbit(value) ? 0x8000 : 0));
}
inline void narrow(Floats values, Float16* to) {
    Uints bits = (Uints)(vmin(vmax(values, -values), splat(65504.f)) * 0x1p-112f);
    bits = (bits + 0xfff + (bits >> 13 & 1)) >> 13 | ((Uints)values >> 31 << 15);
    store(to, __builtin_convertvector(bits, Ushorts8));
}
inline void narrow(float value, BFloat16* to) {
    uint32_t bits = load<uint32_t>(&value);
    to->bits = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Ints round_to_int(Floats x) { return (Ints)(x + 12582912.f) - 0x4b400000; }  // to nearest, below 2^22
inline Floats round_to_whole(Floats x) { return (x + 12582912.f) - 12582912.f; }
inline Floats round_to_float16(Floats x) {
    Float16 halves[LANES];
    narrow(x, halves);
    return widen(halves);
}

inline float horizontal_sum(Floats x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }
inline float horizontal_max(Floats x) {
    return std::max(std::max(std::max(x[0], x[1]), std::max(x[2], x[3])),
                    std::max(std::max(x[4], x[5]), std::max(x[6], x[7])));
}

// e^x within 2 units in the last place; results outside the normal numbers are clamped to their limits.
inline Floats fast_exp(Floats x) {
    x = vmin(vmax(x, splat(-87.f)), splat(88.f));
    Ints n = round_to_int(x * 1.44269504f);
    Floats whole = __builtin_convertvector(n, Floats);
    Floats r = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), x));
    Floats p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, splat(c));
    return (fma(p * r, r, r) + 1.f) * (Floats)((n + 127) << 23);
}

// The cumulative normal distribution: 1/2 (1 + erf(x / sqrt 2)), within 1e-7 (Abramowitz and Stegun, 7.1.26).
inline Floats normal_cdf(Floats x) {
    Floats size = vmax(x, -x) * .707106781f, t = 1 / (1.f + .3275911f * size), p = splat(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -.284496736f, .254829592f}) p = fma(p, t, splat(c));
    Floats half_tail = .5f * p * t * fast_exp(-size * size);
    return x < 0.f ? half_tail : 1.f - half_tail;
}
// x within `cap` of zero: cap tanh(x / cap).
inline Floats soft_cap(Floats x, float cap) { return cap - 2 * cap / (fast_exp(x * (2 / cap)) + 1.f); }

inline int padded(int size) { return (size + GROUP - 1) / GROUP * GROUP; }
inline int blocks(int channels) { return (channels + BLOCK - 1) / BLOCK; }
inline int share(int work, int thread, int threads) { return (int)((int64_t)work * thread / threads); }

}  // namespace
