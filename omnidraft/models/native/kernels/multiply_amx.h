// Products with Intel's matrix instructions: a tile of 16 rows of inputs meets a tile of weights, 16 channels over one
// group of inputs. Rows do not mix, so each is what it is alone. Sums of quantised weights are exact inside a group, so
// their results are bit for bit those of multiply_256.h; those of bfloat16 weights are not.
//
// Tiles are configured by hand, since some hypervisors hide the description of them (CPUID leaf 0x1D).

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <type_traits>

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

    // Where the next tiles of weights and of inputs are, and what is fetched meanwhile.
    struct Place {
        const char *multiplied, *unpacked, *added, *inputs, *fetched;
        int lines;  // fetched for each tile

        ALWAYS_INLINE void fetch() {
            for (int line = 0; line < lines; line++, fetched += 64) {
                __builtin_prefetch(fetched + Prefetcher::NEAR);
                __builtin_prefetch(fetched + Prefetcher::FAR, 0, 2);
            }
        }
    };

    // One block by R rows, tile by tile of inputs. What a tile stores can be read only after a while, and so can what a
    // vector stores by a tile; and a load waits for an earlier store whose address ends in the same 12 bits. So weights are
    // unpacked AHEAD tiles before their product, which is stored when the next is computed, and added to the sums after
    // that. All is in registers but what tiles read or write: the counters of a loop that are not wait for their stores.
    template <int R>
    ALWAYS_INLINE static void multiply_part(Place at, size_t stride, int tiles, QuantizedSums<Inputs, R>& sums) {
        constexpr int AHEAD = 3;
        constexpr std::integral_constant<int, 0> even;
        constexpr std::integral_constant<int, 1> odd;
        TileSums products[2];
        Levels levels[BITS == 8 ? 1 : AHEAD + 1];
        int next = 0, num_unpacked = 0;
        auto unpack = [&]() __attribute__((always_inline)) {
            unpack_group(at.unpacked + Layout::HEADER_BYTES, levels[num_unpacked++ % (AHEAD + 1)].bytes);
            at.unpacked += GROUP_BYTES;
        };
        auto multiply = [&](auto tile) __attribute__((always_inline)) {
            const char* weights = at.multiplied + Layout::HEADER_BYTES + tile % STEPS * STEP_SIZE * BLOCK;
            if (BITS == 4) weights = levels[next % (AHEAD + 1)].bytes;
            at.fetch();
            zero_tile<tile>();
            load_tile<4 + tile>(weights, Layout::QUAD_BYTES), load_tile<2 + tile>(at.inputs, stride);
            multiply_bytes<tile, 2 + tile, 4 + tile>();
            at.inputs += STEP_SIZE, next++;
            if (tile % STEPS == STEPS - 1) at.multiplied += GROUP_BYTES;
            if (BITS == 4 && num_unpacked < tiles) unpack();
        };
        auto store = [&](auto tile) __attribute__((always_inline)) { store_tile<tile>(products[tile].of_row, 64); };
        auto add = [&](auto tile) __attribute__((always_inline)) {
            sums.add_products(at.added, [&](int r) { return _mm512_load_si512(products[tile].of_row[r]); });
            if (tile % STEPS == STEPS - 1) sums.add_minimums(at.added), at.added += GROUP_BYTES;
        };
        if (BITS == 4)
            while (num_unpacked < std::min(AHEAD, tiles)) unpack();
        multiply(even);
        if (tiles == 1) return store(even), add(even);
        multiply(odd), store(even);
        while (next + 1 < tiles) {
            multiply(even), store(odd), add(even);
            multiply(odd), store(even), add(odd);
        }
        if (next == tiles) return store(odd), add(even), add(odd);
        multiply(even), store(odd), add(even), store(even), add(odd), add(even);
    }
    ALWAYS_INLINE static void unpack_group(const char* from, char* to) {
        for (int nibble = 0; nibble < 8 / BITS; nibble++)
            for (int quad = 0; quad < Layout::QUADS; quad++, to += Layout::QUAD_BYTES) {
                __m512i both = _mm512_loadu_si512(from + quad * Layout::QUAD_BYTES);
                _mm512_store_si512(to, QuantizedWeights512<BITS>::nibbles(both, nibble));
            }
    }

    // Groups of inputs that meet all tiles of rows before the next ones, so that the first cache has their weights for all
    // but the first; and the most tiles of rows that they meet.
    static constexpr int PART_GROUPS = 8 / STEPS, MOST_TILES = 4;

    template <class Write>
    static void multiply_all(const char* weights, int first, int last, const char* rows, int num_rows, int k, Write write) {
        if (num_rows <= MAX_VECTOR_ROWS)
            return QuantizedWeights512<BITS>::multiply_all(weights, first, last, rows, num_rows, k, write);
        int tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS, tile_rows = (num_rows + tiles - 1) / tiles;
        configure(tile_rows);
        for (int row = 0; row < num_rows; row += MOST_TILES * tile_rows) {
            int count = std::min(MOST_TILES * tile_rows, num_rows - row);
            auto shifted = [&](int block, int r, Floats low, Floats high) { write(block, row + r, low, high); };
            for (int block = first; block < last; block++)
                multiply_rows(block, weights + block * block_bytes<Layout>(k), rows + row * row_bytes(k), count, tile_rows, k,
                              shifted);
        }
        _tile_release();
    }
    template <int R = 1, class Write>
    static void multiply_rows(int block, const char* weights, const char* rows, int num_rows, int tile_rows, int k,
                              const Write& write) {
        if constexpr (R < TILE_ROWS)
            if (tile_rows > R) return multiply_rows<R + 1>(block, weights, rows, num_rows, tile_rows, k, write);
        multiply_block<R>(block, weights, rows, num_rows, k, write);
    }
    template <int R, class Write>
    static void multiply_block(int block, const char* weights, const char* rows, int num_rows, int k, const Write& write) {
        alignas(64) float partial[MOST_TILES][R][BLOCK];
        int tiles = (num_rows + R - 1) / R, groups = num_groups<Layout>(k), lines = (Layout::QUADS / STEPS + tiles) / tiles;
        size_t stride = row_bytes(k);
        for (int at = 0, size; at < groups; at += size) {
            size = tiles == 1 ? groups : std::min(PART_GROUPS, groups - at);
            const char* group = weights + (size_t)at * GROUP_BYTES;
            for (int tile = 0; tile < tiles; tile++) {
                const char* row = rows + tile * R * stride;
                QuantizedSums<Inputs, R> sums(row + (size_t)at * (STEPS + 1) * sizeof(float), k);
                if (at > 0) sums.restore(partial[tile][0]);
                const char* inputs = row + Inputs::header_bytes(k) + (size_t)at * STEPS * STEP_SIZE;
                const char* fetched = group + (size_t)tile * size * STEPS * lines * 64;
                multiply_part<R>({group, group, group, inputs, fetched, lines}, stride, size * STEPS, sums);
                if (at + size < groups) {
                    sums.keep(partial[tile][0]);
                    continue;
                }
                Floats out[R][2];
                sums.write(out);
                for (int r = 0; r < std::min(R, num_rows - tile * R); r++)
                    write(block, tile * R + r, out[r][0], out[r][1]);
            }
        }
    }
};

}  // namespace
