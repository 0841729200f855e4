// Products of bfloat16 weights with AVX-512's bfloat16 instruction, twice as many in a cycle as multiply_512.h. Inputs are
// rounded to bfloat16 (off by at most 2^-9 of themselves) as torch and vLLM do in bfloat16; sums and everything between two
// matrices stay float32.

#pragma once

#include "multiply_512.h"

namespace {

struct Bfloat16Inputs {
    static size_t row_bytes(int k) { return odd_lines(sizeof(BFloat16) * padded(k)); }
    static void prepare(const float* x, int k, char* row) {
        for (int i = 0; i < padded(k); i += GROUP, row += GROUP * sizeof(BFloat16))
            store(row, _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
    }
};

struct Bfloat16WeightsDot : Bfloat16Layout, Bfloat16Inputs, RowTiles<Bfloat16WeightsDot> {
    static constexpr int TILE_ROWS = 16;
    static constexpr const char* BITS_NAME = "bfloat16-inputs";

    // The instruction adds the product of the second of a pair, then that of the first, rounding after each, on every
    // processor that has it.
    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        size_t stride = row_bytes(k);
        __m512 sums[R];
#pragma GCC unroll 16  // so that the sums stay in registers
        for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
        for (int i = 0; i < padded(k); i += GROUP)
#pragma GCC unroll 2
            for (int j = i; j < i + GROUP; j += 2, block += sizeof(__m512i)) {
                prefetch.fetch();
                __m512bh weights = (__m512bh)_mm512_loadu_si512(block);
                const char* pair = rows + j * sizeof(BFloat16);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    __m512i inputs = _mm512_set1_epi32(load<int32_t>(pair + r * stride));
                    sums[r] = _mm512_dpbf16_ps(sums[r], weights, (__m512bh)inputs);
                }
            }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) out[r][0] = lower(sums[r]), out[r][1] = upper(sums[r]);
    }
};

}  // namespace
