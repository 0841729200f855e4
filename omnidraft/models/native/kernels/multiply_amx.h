// Products with Intel's matrix instructions: a tile of 16 rows of inputs meets a tile of weights, 16 channels over one
// group of inputs. Rows do not mix, so each is what it is alone. Sums of quantised weights are exact inside a group, so
// their results are bit for bit those of multiply_256.h; those of bfloat16 weights are not.
//
// Tiles are configured by hand, since some hypervisors hide the description of them (CPUID leaf 0x1D).

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "multiply_512.h"

namespace {

constexpr int TILE_ROWS = 16, NUM_TILES = 8, TILE_BYTES = 1024;

// Asks Linux for permission to use tiles in this process, as often as one likes. Without it they are illegal instructions.
inline bool allow_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes) { rows[tile] = (uint8_t)num_rows, bytes[tile] = (uint16_t)num_bytes; }
    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

template <int TILE> inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE> inline void load_tile(const void* from, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}
template <int TILE> inline void store_tile(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(stride) : "memory");
}
// Adds the products of INPUTS and WEIGHTS to SUMS: pairs of bfloat16, or signed by unsigned bytes.
template <int SUMS, int INPUTS, int WEIGHTS> inline void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}
template <int SUMS, int INPUTS, int WEIGHTS> inline void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

// Inputs are split into two bfloat16 parts, whose sum is off by less than 2^-17 of the input. A group is its 32 high
// parts, then its low parts.
struct SplitInputs {
    static constexpr int PART_BYTES = GROUP * sizeof(BFloat16), INPUT_GROUP_BYTES = 2 * PART_BYTES;

    static size_t row_bytes(int k) { return (size_t)padded(k) / GROUP * INPUT_GROUP_BYTES + 64; }
    static void prepare(const float* x, int k, char* row) {
        for (int i = 0; i < padded(k); i += GROUP, row += INPUT_GROUP_BYTES) {
            __m512 first = _mm512_loadu_ps(x + i), second = _mm512_loadu_ps(x + i + 16);
            __m512bh high = _mm512_cvtne2ps_pbh(second, first);
            __m512 first_rest = _mm512_sub_ps(first, widened(_mm512_castsi512_si256((__m512i)high)));
            __m512 second_rest = _mm512_sub_ps(second, widened(_mm512_extracti64x4_epi64((__m512i)high, 1)));
            store(row, high), store(row + PART_BYTES, _mm512_cvtne2ps_pbh(second_rest, first_rest));
        }
    }
    static __m512 widened(__m256i halves) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
};

// Four blocks meet a tile of rows at once, so that its inputs are loaded once for them.
struct Bfloat16WeightsAmx : Bfloat16Layout, SplitInputs {
    static constexpr int MAX_BLOCKS = 4, MIN_BLOCKS = MAX_BLOCKS;
    static constexpr const char* BITS_NAME = "amx";

    static void configure(int num_rows) {
        TileConfig config;
        for (int tile = 0; tile < MAX_BLOCKS; tile++) config.set(tile, num_rows, BLOCK * sizeof(float));
        config.set(4, num_rows, PART_BYTES), config.set(5, num_rows, PART_BYTES);
        config.set(6, GROUP / 2, 64), config.set(7, GROUP / 2, 64);
        config.load();
    }

    // Multiplies N blocks, which the first tile of rows prefetches; `out` gets [N, num_rows, 16].
    template <int N>
    static void multiply(const char* blocks, const char* rows, int num_rows, int k, bool is_first, float* out) {
        size_t stride = row_bytes(k), bytes = block_bytes<Bfloat16Layout>(k);
        int groups = padded(k) / GROUP;
        zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        for (int g = 0; g < groups; g++, blocks += GROUP_BYTES, rows += INPUT_GROUP_BYTES) {
            if (is_first) prefetch<N>(blocks, g, groups);
            load_tile<4>(rows, stride), load_tile<5>(rows + PART_BYTES, stride);
            add_products<0, 6>(blocks);
            if (N > 1) add_products<1, 7>(blocks + bytes);
            if (N > 2) add_products<2, 6>(blocks + 2 * bytes);
            if (N > 3) add_products<3, 7>(blocks + 3 * bytes);
        }
        store_tile<0>(out, 64);
        if (N > 1) store_tile<1>(out + num_rows * BLOCK, 64);
        if (N > 2) store_tile<2>(out + 2 * num_rows * BLOCK, 64);
        if (N > 3) store_tile<3>(out + 3 * num_rows * BLOCK, 64);
    }
    // Blocks are read side by side; near their end the next ones are fetched.
    template <int N> static void prefetch(const char* blocks, int group, int groups) {
        constexpr int AHEAD = 8;
        size_t bytes = (size_t)groups * GROUP_BYTES;
        const char* from = blocks + AHEAD * GROUP_BYTES + (group + AHEAD >= groups ? (N - 1) * bytes : 0);
        for (int n = 0; n < N; n++, from += bytes)
            for (int line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(from + line);
    }
    template <int SUMS, int WEIGHTS> static void add_products(const char* weights) {
        load_tile<WEIGHTS>(weights, 64);
        multiply_bfloat16<SUMS, 4, WEIGHTS>(), multiply_bfloat16<SUMS, 5, WEIGHTS>();
    }

    template <class Write>
    static void multiply_all(const char* weights, int first, int last, const char* rows, int num_rows, int k, Write write) {
        alignas(64) float out[MAX_BLOCKS * TILE_ROWS * BLOCK];
        int tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS, tile_rows = (num_rows + tiles - 1) / std::max(tiles, 1);
        if (tiles) configure(tile_rows);
        for (int block = first; block < last;) {
            const char* from = weights + block * block_bytes<Bfloat16Layout>(k);
            int count = last - block < MAX_BLOCKS ? 1 : MAX_BLOCKS;
            for (int row = 0; row < num_rows; row += tile_rows) {
                const char* tile = rows + row * row_bytes(k);
                count == 1 ? multiply<1>(from, tile, tile_rows, k, row == 0, out)
                           : multiply<MAX_BLOCKS>(from, tile, tile_rows, k, row == 0, out);
                for (int n = 0; n < count; n++)
                    for (int r = 0; r < std::min(tile_rows, num_rows - row); r++) {
                        const float* result = out + (n * tile_rows + r) * BLOCK;
                        write(block + n, row + r, widen(result), widen(result + LANES));
                    }
            }
            block += count;
        }
        _tile_release();
    }
};

// A tile of inputs has what is under one step of up to 16 rows. Vectors are faster for few rows, more of them in four bits,
// whose levels a tile needs unpacked in memory.
template <int BITS, class Layout = QuantizedLayout<BITS>, class Inputs = ByteInputs<Layout>>
struct QuantizedWeightsAmx : Layout, Inputs {
    using Layout::GROUP_BYTES, Inputs::row_bytes;
    static constexpr int MIN_BLOCKS = 1, MAX_VECTOR_ROWS = BITS == 4 ? 5 : 2;
    static constexpr int STEPS = Inputs::STEPS, STEP_SIZE = Inputs::STEP_SIZE;

    static void configure(int num_rows) {
        TileConfig config;
        for (int odd = 0; odd < 2; odd++) {
            config.set(odd, num_rows, BLOCK * sizeof(int32_t));
            config.set(2 + odd, num_rows, STEP_SIZE);
            config.set(4 + odd, STEP_SIZE / 4, Layout::QUAD_BYTES);
        }
        config.load();
    }

    struct alignas(64) TileSums {
        int32_t of_row[TILE_ROWS][BLOCK];
    };
    struct alignas(64) Levels {
        char bytes[STEP_SIZE * BLOCK];
    };

    // One block by R rows, tile by tile of inputs. What a tile stores can be read only after a while, and so can what a
    // vector stores by a tile; and a load waits for an earlier store whose address ends in the same 12 bits. So weights are
    // unpacked AHEAD tiles before their product, which is stored when the next is computed, and added to the sums LAG
    // tiles later.
    template <int R> struct Pipeline {
        static constexpr int AHEAD = 3, LAG = 3, RING = 4, LINES = Layout::QUADS / STEPS;
        const char *block, *bytes;
        size_t stride;
        int tiles;
        TileSums products[RING];
        Levels levels[BITS == 8 ? 1 : RING];

        Prefetcher prefetch;

        Pipeline(const char* block, const char* rows, int k, Prefetcher prefetch)
            : block(block), bytes(rows + Inputs::header_bytes(k)), stride(row_bytes(k)),
              tiles(num_groups<Layout>(k) * STEPS), prefetch(prefetch) {}

        void run(const char* rows, int k, Floats (*out)[2]) {
            QuantizedSums<Inputs, R> sums(rows, k);
            if (BITS == 4)
                for (int t = 0; t < std::min(AHEAD, tiles); t++) unpack(t);
            for (int t = 0; t < tiles + LAG; t += 2) step<0>(t, sums), step<1>(t + 1, sums);
            sums.write(out);
        }
        template <int ODD> ALWAYS_INLINE void step(int t, QuantizedSums<Inputs, R>& sums) {
            if (t < tiles) multiply<ODD>(t);
            if (t >= 1 && t - 1 < tiles) store_tile<1 - ODD>(products[(t - 1) % RING].of_row, 64);
            if (BITS == 4 && t + AHEAD < tiles) unpack(t + AHEAD);
            if (t >= LAG && t - LAG < tiles) add<(ODD + LAG) % STEPS>(t - LAG, sums);
        }
        ALWAYS_INLINE const char* group_of(int t) const { return block + (size_t)(t / STEPS) * GROUP_BYTES; }
        template <int ODD> ALWAYS_INLINE void multiply(int t) {
            const char* weights = group_of(t) + Layout::HEADER_BYTES + t % STEPS * STEP_SIZE * BLOCK;
            if (BITS == 4) weights = levels[t % RING].bytes;
            for (int line = 0; line < LINES + (t % STEPS == 0); line++) prefetch.fetch();
            zero_tile<ODD>();
            load_tile<4 + ODD>(weights, Layout::QUAD_BYTES), load_tile<2 + ODD>(bytes + (size_t)t * STEP_SIZE, stride);
            multiply_bytes<ODD, 2 + ODD, 4 + ODD>();
        }
        ALWAYS_INLINE void unpack(int t) {
            const char* from = group_of(t) + Layout::HEADER_BYTES;
            for (int nibble = 0; nibble < 8 / BITS; nibble++)
                for (int quad = 0; quad < Layout::QUADS; quad++) {
                    __m512i both = _mm512_loadu_si512(from + quad * Layout::QUAD_BYTES);
                    char* to = levels[t % RING].bytes + (nibble * Layout::QUADS + quad) * Layout::QUAD_BYTES;
                    _mm512_store_si512(to, QuantizedWeights512<BITS>::nibbles(both, nibble));
                }
        }
        template <int PART> ALWAYS_INLINE void add(int t, QuantizedSums<Inputs, R>& sums) {
            const auto& from = products[t % RING].of_row;
            sums.add_products(group_of(t), [&](int r) { return _mm512_load_si512(from[r]); });
            if (PART == STEPS - 1) sums.add_minimums(group_of(t));
        }
    };

    template <class Write>
    static void multiply_all(const char* weights, int first, int last, const char* rows, int num_rows, int k, Write write) {
        if (num_rows <= MAX_VECTOR_ROWS)
            return QuantizedWeights512<BITS>::multiply_all(weights, first, last, rows, num_rows, k, write);
        Floats out[TILE_ROWS][2];
        int tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS, tile_rows = (num_rows + tiles - 1) / tiles;
        configure(tile_rows);
        for (int block = first; block < last; block++)
            for (int row = 0; row < num_rows; row += tile_rows) {
                const char *from = weights + block * block_bytes<Layout>(k), *tile = rows + row * row_bytes(k);
                auto prefetch = Prefetcher::of_tile(from, block_bytes<Layout>(k), row / tile_rows, tiles);
                multiply_rows(tile_rows, from, tile, k, prefetch, out);
                for (int r = 0; r < std::min(tile_rows, num_rows - row); r++) write(block, row + r, out[r][0], out[r][1]);
            }
        _tile_release();
    }
    template <int R = 1>
    static void multiply_rows(int num_rows, const char* block, const char* rows, int k, Prefetcher prefetch,
                              Floats (*out)[2]) {
        if constexpr (R < TILE_ROWS)
            if (num_rows > R) return multiply_rows<R + 1>(num_rows, block, rows, k, prefetch, out);
        Pipeline<R>(block, rows, k, prefetch).run(rows, k, out);
    }
};

}  // namespace
