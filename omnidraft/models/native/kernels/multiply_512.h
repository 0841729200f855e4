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
        for (int i = 0; i < padded(k); i += GROUP) {
            prefetch.fetch();
#pragma GCC unroll 2
            for (int j = i; j < i + GROUP; j += 2, block += sizeof(__m512i)) {
                __m512i both = _mm512_loadu_si512(block);
                __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, upper_halves));
                for (int r = 0; r < R; r++) {
                    sums[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r][j]), sums[r]);
                    sums[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[r][j + 1]), sums[r]);
                }
            }
        }
        for (int r = 0; r < R; r++) out[r][0] = lower(sums[r]), out[r][1] = upper(sums[r]);
    }
};

// Levels of inputs are split into bytes: 256 * high + low, both signed. A row is as long as two tile rows: its header and
// its high bytes, and, `part_bytes` later, its low bytes.
template <class Layout> struct ByteInputs : QuantizedInputs<Layout> {
    using Inputs = QuantizedInputs<Layout>;

    static size_t part_bytes(int k) { return odd_lines(Inputs::header_bytes(k) + Inputs::size(k)); }
    static size_t row_bytes(int k) { return 2 * part_bytes(k); }

    static void prepare(const float* x, int k, char* row) {
        char *high_bytes = row + Inputs::header_bytes(k), *low_bytes = high_bytes + part_bytes(k);
        Inputs::prepare(x, k, row, [=](const Ints* levels, int first) {
            for (int j = 0; j < GROUP / LANES; j++) {
                int place = first + j * LANES;
                Ints low = levels[j] << 24 >> 24, high = (levels[j] - low) >> 8;
                store(high_bytes + place, __builtin_convertvector(high, Bytes8));
                store(low_bytes + place, __builtin_convertvector(low, Bytes8));
            }
        });
    }
};

// The sums of one tile of rows over the groups of a block.
template <class Inputs, int R> struct QuantizedSums {
    __m512 sums[R];
    const char* rows;
    size_t stride;

    QuantizedSums(const char* rows, int k) : rows(rows), stride(Inputs::row_bytes(k)) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    }

    // Adds a group: `header` has its steps and minimums; high(r) and low(r) are the sums of its products.
    template <class High, class Low> ALWAYS_INLINE void add_group(int group, const char* header, High high, Low low) {
        __m512 step = _mm512_cvtph_ps(load<__m256i>(header)), minimum = _mm512_cvtph_ps(load<__m256i>(header + 32));
        const float* row_sum = Inputs::sums(rows) + group;
#pragma GCC unroll 16  // so that the sums stay in registers
        for (int r = 0; r < R; r++) {
            __m512i product = _mm512_add_epi32(_mm512_slli_epi32(high(r), 8), low(r));
            __m512 total = _mm512_set1_ps(*row_sum);
            row_sum = (const float*)((const char*)row_sum + stride);
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), step, sums[r]);
            sums[r] = _mm512_fmadd_ps(minimum, total, sums[r]);
        }
    }
    ALWAYS_INLINE void write(Floats (*out)[2]) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            __m512 result = _mm512_mul_ps(sums[r], _mm512_set1_ps(Inputs::step(rows + r * stride)));
            out[r][0] = lower(result), out[r][1] = upper(result);
        }
    }
};

template <int BITS, class Layout = QuantizedLayout<BITS>, class Inputs = ByteInputs<Layout>>
struct QuantizedWeights512 : Layout, Inputs, RowTiles<QuantizedWeights512<BITS>> {
    using Layout::GROUP_BYTES, Layout::GROUP_SIZE, Layout::QUADS, Inputs::row_bytes;
    static constexpr int TILE_ROWS = 8;

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        size_t stride = row_bytes(k), to_low = Inputs::part_bytes(k);
        QuantizedSums<Inputs, R> sums(rows, k);
        const char* bytes = rows + Inputs::header_bytes(k);
        for (int group = 0; group < num_groups<Layout>(k); group++, block += GROUP_BYTES, bytes += GROUP_SIZE) {
            prefetch.fetch();
            __m512i high[R], low[R];
            for (int r = 0; r < R; r++) high[r] = low[r] = _mm512_setzero_si512();
            const char* weights = block + Layout::HEADER_BYTES;
#pragma GCC unroll 2
            for (int quad = 0; quad < QUADS; quad++, weights += Layout::QUAD_BYTES) {
                __m512i both = _mm512_loadu_si512(weights);
                for (int part = 0; part < 8 / BITS; part++) {
                    __m512i levels = BITS == 8 ? both : nibbles(both, part);
                    for (int r = 0; r < R; r++) {
                        const char* at = bytes + r * stride + (part * QUADS + quad) * 4;
                        high[r] = _mm512_dpbusd_epi32(high[r], levels, _mm512_set1_epi32(load<int32_t>(at)));
                        low[r] = _mm512_dpbusd_epi32(low[r], levels, _mm512_set1_epi32(load<int32_t>(at + to_low)));
                    }
                }
            }
            sums.add_group(group, block, [&](int r) { return high[r]; }, [&](int r) { return low[r]; });
        }
        sums.write(out);
    }
    static __m512i nibbles(__m512i bytes, int part) {
        __m512i shifted = part ? _mm512_srli_epi16(bytes, 4) : bytes;
        return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
    }
};

}  // namespace
