// Products with the dot products of ARM's 128-bit vectors (NEON with `sdot`, or with `usdot` of i8mm), bit for bit those
// of multiply_256.h: each vector holds four channels of a block.

#pragma once

#include "multiply_256.h"

namespace {

// Sums of the products of weights' levels and inputs under one step, which are exact. `sdot` takes signed bytes only, so
// levels of 8 bits are lowered by 128, which every input gets back.
template <int BITS> struct DotProducts {
    using Inputs = ByteInputs<QuantizedLayout<BITS>>;
    static constexpr int QUADS = QuantizedLayout<BITS>::QUADS / Inputs::STEPS, VECTORS = BLOCK / 4;
#ifdef __ARM_FEATURE_MATMUL_INT8
    static constexpr bool IS_LOWERED = false;
    static int32x4_t dot(int32x4_t sums, uint8x16_t levels, int8x16_t inputs) {
        return vusdotq_s32(sums, levels, inputs);
    }
#else
    static constexpr bool IS_LOWERED = BITS == 8;
    static int32x4_t dot(int32x4_t sums, uint8x16_t levels, int8x16_t inputs) {
        return vdotq_s32(sums, vreinterpretq_s8_u8(levels), inputs);
    }
#endif

    template <int R> static void add(const char* weights, const char* bytes, size_t stride, Prefetcher& prefetch,
                                     Ints (*sums)[2]) {
        int32x4_t products[R][VECTORS], lowered[R];
        for (int r = 0; r < R; r++) {
            lowered[r] = vdupq_n_s32(0);
            for (int v = 0; v < VECTORS; v++) products[r][v] = vdupq_n_s32(0);
        }
        for (int quad = 0; quad < QUADS; quad++, weights += QuantizedLayout<BITS>::QUAD_BYTES) {
            prefetch.fetch();
            for (int part = 0; part < 8 / BITS; part++) {
                uint8x16_t levels[VECTORS];
                for (int v = 0; v < VECTORS; v++) levels[v] = part_of(vld1q_u8((const uint8_t*)weights + 16 * v), part);
                const char* four = bytes + (part * QUADS + quad) * 4;
                for (int r = 0; r < R; r++) {
                    int8x16_t inputs = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(four + r * stride)));
                    for (int v = 0; v < VECTORS; v++) products[r][v] = dot(products[r][v], levels[v], inputs);
                    if (IS_LOWERED) lowered[r] = vdotq_s32(lowered[r], vdupq_n_s8(1), inputs);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) {
                int32x4_t product = vaddq_s32(products[r][v], vshlq_n_s32(lowered[r], 7));
                for (int lane = 0; lane < 4; lane++) sums[r][v / 2][v % 2 * 4 + lane] += product[lane];
            }
    }

  private:
    static uint8x16_t part_of(uint8x16_t bytes, int part) {
        if (BITS == 8) return IS_LOWERED ? veorq_u8(bytes, vdupq_n_u8(128)) : bytes;
        return part ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    }
};

}  // namespace
