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
        for (int block = first; block < last; block++) {
            const char* from = weights + block * block_bytes<W>(k);
            for (int tile = 0; tile < tiles; tile++) {
                int row = share(num_rows, tile, tiles), size = share(num_rows, tile + 1, tiles) - row;
                auto prefetch = Prefetcher::of_tile(from, block_bytes<W>(k), tile, tiles);
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
            prefetch.fetch();
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
        for (int i = 0; i < padded(k); i += GROUP)
#pragma GCC unroll 2
            for (int j = i; j < i + GROUP; j += 2, block += 2 * sizeof(Uints)) {
                prefetch.fetch();
                Uints low = load<Uints>(block), high = load<Uints>(block + sizeof low);
                for (int r = 0; r < R; r++) {
                    Floats first = splat(x[r][j]), second = splat(x[r][j + 1]);
                    sums[r][0] = fma((Floats)(low << 16), first, sums[r][0]);
                    sums[r][1] = fma((Floats)(high << 16), first, sums[r][1]);
                    sums[r][0] = fma((Floats)(low & 0xffff0000), second, sums[r][0]);
                    sums[r][1] = fma((Floats)(high & 0xffff0000), second, sums[r][1]);
                }
            }
        for (int r = 0; r < R; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
    }
};

// Inputs in words, for weights whose products do not fit in them. Those of four inputs are stored as first, third, second,
// fourth, since pairs of weights are the even and the odd bytes of a word.
template <class Layout> struct WordInputs : QuantizedInputs<Layout> {
    using Inputs = QuantizedInputs<Layout>;
    static constexpr int INPUT_BYTES = sizeof(int16_t);

    static size_t row_bytes(int k) { return odd_lines(Inputs::header_bytes(k) + INPUT_BYTES * Inputs::size(k)); }
    static void prepare(const float* x, int k, char* row) {
        char* words = row + Inputs::header_bytes(k);
        Inputs::prepare(x, k, row, [=](const Ints* levels, int first) {
            for (int i = 0; i < Inputs::STEP_SIZE; i++) {
                int place = first + i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
                store(words + place * INPUT_BYTES, (int16_t)levels[i / LANES][i % LANES]);
            }
        });
    }
};

template <class Layout> struct ByteInputs : QuantizedInputs<Layout> {
    using Inputs = QuantizedInputs<Layout>;
    static constexpr int INPUT_BYTES = 1;

    static size_t row_bytes(int k) { return odd_lines(Inputs::header_bytes(k) + Inputs::size(k)); }
    static void prepare(const float* x, int k, char* row) {
        char* bytes = row + Inputs::header_bytes(k);
        Inputs::prepare(x, k, row, [=](const Ints* levels, int first) {
            for (int i = 0; i < Inputs::STEP_SIZE; i += LANES)
                store(bytes + first + i, __builtin_convertvector(levels[i / LANES], Bytes8));
        });
    }
};

// Sums of two products of neighbouring words.
inline Ints multiply_pairs(Shorts a, Shorts b) {
#ifdef __AVX2__
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    Ints even_a = (Ints)a << 16 >> 16, even_b = (Ints)b << 16 >> 16;
    return even_a * even_b + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}
// Sums of two products of neighbouring bytes, those of `a` without sign; they have to fit.
inline Shorts multiply_byte_pairs(Ushorts a, Shorts b) {
#ifdef __AVX2__
    return (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
    return (Shorts)(a & 0xff) * (b << 8 >> 8) + (Shorts)(a >> 8) * (b >> 8);
#endif
}

// What each number of bits makes of the products under one step of the inputs: for R rows, and for both halves of the
// channels, so that inputs are loaded once for them.
template <int BITS> struct Products;

template <> struct Products<8> {
    using Inputs = WordInputs<QuantizedLayout<8>>;

    template <int R> static void add(const char* weights, const char* words, size_t stride, Prefetcher& prefetch,
                                     Ints (*sums)[2]) {
#pragma GCC unroll 2  // fully unrolled it would be summed as a tree, which needs too many registers
        for (int i = 0; i < Inputs::STEP_SIZE; i += 4, weights += QuantizedLayout<8>::QUAD_BYTES, words += 8) {
            prefetch.fetch();
            Shorts even[2], odd[2];
            for (int half = 0; half < 2; half++) {
                Ushorts both = load<Ushorts>(weights + half * sizeof(Ushorts));
                even[half] = (Shorts)(both & 0xff), odd[half] = (Shorts)(both >> 8);
            }
            for (int r = 0; r < R; r++) {
                Shorts first = (Shorts)splat_bits(words + r * stride), second = (Shorts)splat_bits(words + r * stride + 4);
                for (int half = 0; half < 2; half++) {
                    sums[r][half] += multiply_pairs(even[half], first);
                    sums[r][half] += multiply_pairs(odd[half], second);
                }
            }
        }
    }
};

template <> struct Products<4> {
    using Inputs = ByteInputs<QuantizedLayout<4>>;

    // 16 products of 15 * 127 fit in a word.
    template <int R> static void add(const char* weights, const char* bytes, size_t stride, Prefetcher& prefetch,
                                     Ints (*sums)[2]) {
        Shorts words[R][2] = {};
#pragma GCC unroll 1  // as above
        for (int quad = 0; quad < QuantizedLayout<4>::QUADS; quad++, weights += QuantizedLayout<4>::QUAD_BYTES) {
            prefetch.fetch();
            for (int part = 0; part < 2; part++) {
                Ushorts levels[2];
                for (int half = 0; half < 2; half++)
                    levels[half] = load<Ushorts>(weights + half * sizeof(Ushorts)) >> (4 * part) & 0x0f0f;
                for (int r = 0; r < R; r++) {
                    const char* four = bytes + r * stride + (part * QuantizedLayout<4>::QUADS + quad) * 4;
                    for (int half = 0; half < 2; half++)
                        words[r][half] += multiply_byte_pairs(levels[half], (Shorts)splat_bits(four));
                }
            }
        }
        const Shorts ones = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) sums[r][half] += multiply_pairs(words[r][half], ones);
    }
};

template <int BITS, class P = Products<BITS>, class Layout = QuantizedLayout<BITS>, class Inputs = typename P::Inputs>
struct QuantizedWeights : Layout, Inputs, RowTiles<QuantizedWeights<BITS, P>> {
    using Layout::GROUP_BYTES, Layout::GROUP_SIZE, Inputs::row_bytes;
    static constexpr int TILE_ROWS = 4;

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        size_t stride = row_bytes(k);
        const char *inputs = rows + Inputs::header_bytes(k), *header = rows;
        for (int r = 0; r < R; r++) out[r][0] = out[r][1] = Floats{};
        for (int i = 0; i < k; i += GROUP_SIZE, block += GROUP_BYTES) {
            prefetch.fetch();
            Floats step[2], minimum[2];
            for (int half = 0; half < 2; half++) {
                step[half] = widen((const Float16*)block + half * LANES);
                minimum[half] = widen((const Float16*)block + BLOCK + half * LANES);
            }
            const char* weights = block + Layout::HEADER_BYTES;
            for (int part = 0; part < Inputs::STEPS; part++, header += sizeof(float)) {
                Ints products[R][2] = {};
                P::template add<R>(weights, inputs, stride, prefetch, products);
                for (int r = 0; r < R; r++)
                    for (int half = 0; half < 2; half++) {
                        Floats product = __builtin_convertvector(products[r][half], Floats);
                        out[r][half] = fma(product, step[half] * load<float>(header + r * stride), out[r][half]);
                    }
                weights += (GROUP_BYTES - Layout::HEADER_BYTES) / Inputs::STEPS;
                inputs += Inputs::STEP_SIZE * Inputs::INPUT_BYTES;
            }
            for (int r = 0; r < R; r++)
                for (int half = 0; half < 2; half++)
                    out[r][half] = fma(minimum[half], splat(load<float>(header + r * stride)), out[r][half]);
            header += sizeof(float);
        }
    }
};

}  // namespace
