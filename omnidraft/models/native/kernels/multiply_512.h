// Products with vectors of 512 bits (AVX-512 with VNNI), bit for bit those of multiply_256.h: one vector holds the 16
// channels of a block.

#pragma once

#include "multiply_256.h"

namespace {

inline Floats lower(__m512 x) { return (Floats)_mm512_castps512_ps256(x); }
inline Floats upper(__m512 x) { return (Floats)_mm512_extractf32x8_ps(x, 1); }

struct Bfloat16Weights512 : Bfloat16Layout, FloatInputs, RowTiles<Bfloat16Weights512> {
    static constexpr int TILE_ROWS = 12;
    static constexpr const char* BITS_NAME = "portable";

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        const float* x[R];
        __m512 sums[R];
        for (int r = 0; r < R; r++) x[r] = at(rows, r, k), sums[r] = _mm512_setzero_ps();
        const __m512i upper_halves = _mm512_set1_epi32((int)0xffff0000);
        for (int i = 0; i < padded(k); i += GROUP)
#pragma GCC unroll 2
            for (int j = i; j < i + GROUP; j += 2, block += sizeof(__m512i)) {
                prefetch.fetch();
                __m512i both = _mm512_loadu_si512(block);
                __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, upper_halves));
                for (int r = 0; r < R; r++) {
                    sums[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r][j]), sums[r]);
                    sums[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[r][j + 1]), sums[r]);
                }
            }
        for (int r = 0; r < R; r++) out[r][0] = lower(sums[r]), out[r][1] = upper(sums[r]);
    }
};

// The sums of one tile of rows over the groups of a block.
template <class Inputs, int R> struct QuantizedSums {
    __m512 sums[R];
    const char* header;  // of the first row, at what is added next
    size_t stride;

    QuantizedSums(const char* rows, int k) : header(rows), stride(Inputs::row_bytes(k)) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    }

    // Adds what is under one step of the inputs: product(r) has the sums of products, `weights` the group's header.
    template <class Product> ALWAYS_INLINE void add_products(const char* weights, Product product) {
        __m512 step = _mm512_cvtph_ps(load<__m256i>(weights));
        const char* at = header;
        header += sizeof(float);
#pragma GCC unroll 16  // so that the sums stay in registers
        for (int r = 0; r < R; r++, at += stride)
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product(r)), step * load<float>(at), sums[r]);
    }
    // Adds the minimums of a group, after its products.
    ALWAYS_INLINE void add_minimums(const char* weights) {
        __m512 minimum = _mm512_cvtph_ps(load<__m256i>(weights + BLOCK * sizeof(Float16)));
        const char* at = header;
        header += sizeof(float);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++, at += stride)
            sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(load<float>(at)), sums[r]);
    }
    ALWAYS_INLINE void restore(const float* from) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = _mm512_load_ps(from + r * BLOCK);
    }
    ALWAYS_INLINE void keep(float* to) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) _mm512_store_ps(to + r * BLOCK, sums[r]);
    }
    ALWAYS_INLINE void write(Floats (*out)[2]) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) out[r][0] = lower(sums[r]), out[r][1] = upper(sums[r]);
    }
};

template <int BITS, class Layout = QuantizedLayout<BITS>, class Inputs = ByteInputs<Layout>>
struct QuantizedWeights512 : Layout, Inputs, RowTiles<QuantizedWeights512<BITS>> {
    using Layout::GROUP_BYTES, Inputs::row_bytes;
    static constexpr int TILE_ROWS = 8, QUADS = Layout::QUADS / Inputs::STEPS;  // the quads under one step

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        size_t stride = row_bytes(k);
        QuantizedSums<Inputs, R> sums(rows, k);
        const char* bytes = rows + Inputs::header_bytes(k);
        for (int group = 0; group < num_groups<Layout>(k); group++, block += GROUP_BYTES) {
            prefetch.fetch();
            const char* weights = block + Layout::HEADER_BYTES;
            for (int part = 0; part < Inputs::STEPS; part++, bytes += Inputs::STEP_SIZE) {
                __m512i products[R];
                for (int r = 0; r < R; r++) products[r] = _mm512_setzero_si512();
#pragma GCC unroll 2
                for (int quad = 0; quad < QUADS; quad++, weights += Layout::QUAD_BYTES) {
                    prefetch.fetch();
                    __m512i both = _mm512_loadu_si512(weights);
                    for (int nibble = 0; nibble < 8 / BITS; nibble++) {
                        __m512i levels = BITS == 8 ? both : nibbles(both, nibble);
                        const char* four = bytes + (nibble * QUADS + quad) * 4;
                        for (int r = 0; r < R; r++) {
                            __m512i inputs = _mm512_set1_epi32(load<int32_t>(four + r * stride));
                            products[r] = _mm512_dpbusd_epi32(products[r], levels, inputs);
                        }
                    }
                }
                sums.add_products(block, [&](int r) { return products[r]; });
            }
            sums.add_minimums(block);
        }
        sums.write(out);
    }
    static __m512i nibbles(__m512i bytes, int part) {
        __m512i shifted = part ? _mm512_srli_epi16(bytes, 4) : bytes;
        return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
    }
};

}  // namespace
