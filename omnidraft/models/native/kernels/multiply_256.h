// Products with vectors of 256 bits: for AVX2, and for every other processor as the compiler translates them.

#pragma once

#include "formats.h"

namespace {

// The loop of the formats whose `multiply` computes up to TILE_ROWS rows of one block.
template <class W> struct RowTiles {
    static constexpr int MIN_BLOCKS = 1;

    // Calls write(block, row, low, high) with the 16 outputs of each block and row. Several tiles of rows of equal size
    // read a block from the cache; together they prefetch the next one.
    template <class Write>
    static void multiply_all(const char* weights, int first, int last, const char* rows, int num_rows, int k, Write write) {
        Floats out[W::TILE_ROWS][2];
        int tiles = (num_rows + W::TILE_ROWS - 1) / W::TILE_ROWS;
        int groups = num_groups<W>(k);
        for (int block = first; block < last; block++) {
            const char* from = weights + block * block_bytes<W>(k);
            for (int tile = 0; tile < tiles; tile++) {
                int row = share(num_rows, tile, tiles), size = share(num_rows, tile + 1, tiles) - row;
                auto prefetch = Prefetcher::of_tile(from, W::GROUP_BYTES, groups, tile, tiles);
                multiply_rows(size, from, rows + row * W::row_bytes(k), k, prefetch, out);
                for (int r = 0; r < size; r++) write(block, row + r, out[r][0], out[r][1]);
            }
        }
    }
    template <int R = 1>
    static void multiply_rows(int num_rows, const char* block, const char* rows, int k, Prefetcher prefetch,
                              Floats (*out)[2]) {
        if constexpr (R < W::TILE_ROWS)
            if (num_rows > R) return multiply_rows<R + 1>(num_rows, block, rows, k, prefetch, out);
        W::template multiply<R>(block, rows, k, prefetch, out);
    }
};

struct Float32Weights : Float32Layout, FloatInputs, RowTiles<Float32Weights> {
    static constexpr int TILE_ROWS = 4;

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        for (int r = 0; r < R; r++) out[r][0] = out[r][1] = Floats{};
        for (int i = 0; i < padded(k); i++, block += BLOCK * sizeof(float)) {
            if (i % GROUP == 0) prefetch.fetch();
            Floats low = load<Floats>(block), high = load<Floats>(block + sizeof low);
            for (int r = 0; r < R; r++) {
                Floats x = splat(at(rows, r, k)[i]);
                out[r][0] = fma(low, x, out[r][0]), out[r][1] = fma(high, x, out[r][1]);
            }
        }
    }
};

struct Bfloat16Weights : Bfloat16Layout, FloatInputs, RowTiles<Bfloat16Weights> {
    static constexpr int TILE_ROWS = 4;
    static constexpr const char* BITS_NAME = "portable";

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        const float* x[R];
        Floats sums[R][2] = {};
        for (int r = 0; r < R; r++) x[r] = at(rows, r, k);
        for (int i = 0; i < padded(k); i += GROUP) {
            prefetch.fetch();
#pragma GCC unroll 2
            for (int j = i; j < i + GROUP; j += 2, block += 2 * sizeof(Uints)) {
                Uints low = load<Uints>(block), high = load<Uints>(block + sizeof low);
                for (int r = 0; r < R; r++) {
                    Floats first = splat(x[r][j]), second = splat(x[r][j + 1]);
                    sums[r][0] = fma((Floats)(low << 16), first, sums[r][0]);
                    sums[r][1] = fma((Floats)(high << 16), first, sums[r][1]);
                    sums[r][0] = fma((Floats)(low & 0xffff0000), second, sums[r][0]);
                    sums[r][1] = fma((Floats)(high & 0xffff0000), second, sums[r][1]);
                }
            }
        }
        for (int r = 0; r < R; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
    }
};

inline Ints multiply_pairs(Ushorts a, Shorts b) {
#ifdef __AVX2__
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    Ints even_a = (Ints)a << 16 >> 16, even_b = (Ints)b << 16 >> 16;
    return even_a * even_b + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// Levels of inputs as words. Those of four inputs are stored as first, third, second, fourth, since pairs of weights are
// the even and the odd bytes of a word.
template <class Layout> struct WordInputs : QuantizedInputs<Layout> {
    using Inputs = QuantizedInputs<Layout>;
    static constexpr int INPUT_GROUP_BYTES = Layout::GROUP_SIZE * sizeof(int16_t);

    static size_t row_bytes(int k) { return odd_lines(Inputs::header_bytes(k) + sizeof(int16_t) * Inputs::size(k)); }
    static void prepare(const float* x, int k, char* row) {
        char* words = row + Inputs::header_bytes(k);
        Inputs::prepare(x, k, row, [=](const Ints* levels, int first) {
            for (int i = 0; i < GROUP; i++) {
                int place = first + i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
                store(words + place * sizeof(int16_t), (int16_t)levels[i / LANES][i % LANES]);
            }
        });
    }
};

template <int BITS, class Layout = QuantizedLayout<BITS>, class Inputs = WordInputs<Layout>>
struct QuantizedWeights : Layout, Inputs, RowTiles<QuantizedWeights<BITS>> {
    using Layout::GROUP_BYTES, Layout::GROUP_SIZE, Inputs::INPUT_GROUP_BYTES, Inputs::row_bytes;
    static constexpr int TILE_ROWS = 4;

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        size_t stride = row_bytes(k);
        const char *words = rows + Inputs::header_bytes(k), *sum = (const char*)Inputs::sums(rows);
        for (int r = 0; r < R; r++) out[r][0] = out[r][1] = Floats{};
        for (int i = 0; i < k; i += GROUP_SIZE, block += GROUP_BYTES, words += INPUT_GROUP_BYTES, sum += sizeof(float)) {
            prefetch.fetch();
            Ints products[R][2] = {};
            const char* weights = block + Layout::HEADER_BYTES;
            add_quads<R, 0>(weights, words, stride, products);
            if constexpr (BITS == 4) add_quads<R, 1>(weights, words, stride, products);
            const Float16 *steps = (const Float16*)block, *minimums = steps + BLOCK;
            for (int half = 0; half < 2; half++) {
                Floats step = widen(steps + half * LANES), minimum = widen(minimums + half * LANES);
                for (int r = 0; r < R; r++) {
                    out[r][half] = fma(__builtin_convertvector(products[r][half], Floats), step, out[r][half]);
                    out[r][half] = fma(minimum, splat(load<float>(sum + r * stride)), out[r][half]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) out[r][half] *= Inputs::step(rows + r * stride);
    }

    // Adds the products of the levels in the lower bits of each byte, or of those in the upper bits.
    template <int R, int PART>
    static void add_quads(const char* weights, const char* x, size_t stride, Ints (*products)[2]) {
        x += PART * GROUP_BYTES_OF_PART;
#pragma GCC unroll 2  // fully unrolled it would be summed as a tree, which needs too many registers
        for (int quad = 0; quad < Layout::QUADS; quad++, weights += Layout::QUAD_BYTES, x += 4 * sizeof(int16_t)) {
            Ushorts even[2], odd[2];  // of both halves, so that inputs are loaded once for them
            for (int half = 0; half < 2; half++) {
                Ushorts both = load<Ushorts>(weights + half * sizeof(Ushorts)) >> (PART * BITS);
                even[half] = both & (uint16_t)Layout::MAX_LEVEL, odd[half] = both >> 8 & (uint16_t)Layout::MAX_LEVEL;
            }
            for (int r = 0; r < R; r++) {
                Shorts first = pair(x + r * stride), second = pair(x + r * stride + sizeof(int32_t));
                for (int half = 0; half < 2; half++) {
                    products[r][half] += multiply_pairs(even[half], first);
                    products[r][half] += multiply_pairs(odd[half], second);
                }
            }
        }
    }
    static constexpr int GROUP_BYTES_OF_PART = INPUT_GROUP_BYTES * BITS / 8;
    static Shorts pair(const char* from) {
        int32_t both = load<int32_t>(from);
        return (Shorts)Ints{both, both, both, both, both, both, both, both};
    }
};

}  // namespace
