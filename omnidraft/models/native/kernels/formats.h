// Packed weights. A block holds 16 output channels over all inputs, so that lanes are channels and no sum crosses lanes;
// every variant reads the same blocks.
//
// Each format says how inputs are prepared for it (`prepare`), and multiplies one block by up to TILE_ROWS prepared rows
// (`multiply`). The sums of a row are added in the same order for any number of rows.

#pragma once

#include "levels.h"

namespace {

// Prefetches the weights of a block or of the next one while its own are multiplied, a line for each line that is read:
// many at a time would take all places of those that wait for memory, and loads from the cache would wait behind them. The
// hardware prefetcher is too late.
struct Prefetcher {
    static constexpr int NEAR = 8192, FAR = 24576;
    const char* from;
    int period;  // lines read for each that is fetched; 0: this block's own lines are
    int left;    // lines read until the next is fetched

    // For the `tile`th of the tiles of rows that meet a block.
    static Prefetcher of_tile(const char* block, size_t bytes, int tile, int tiles) {
        return tiles == 1 ? along(block) : of_next(block, bytes, tile, tiles);
    }
    // For one tile of rows: what comes soon to the first cache, and what comes later to the second.
    static Prefetcher along(const char* block) { return {block, 0, 0}; }
    // For one of several tiles of rows, which read this block from the cache: its part of the next block.
    static Prefetcher of_next(const char* block, size_t bytes, int tile, int tiles) {
        return {block + bytes + bytes / 64 * tile / tiles * 64, tiles, 1};
    }

    // Called for each line that is read.
    ALWAYS_INLINE void fetch() {
        if (period == 0) {
            __builtin_prefetch(from + NEAR);
            __builtin_prefetch(from + FAR, 0, 2);
            from += 64;
        } else if (--left == 0) {
            __builtin_prefetch(from, 0, 2);
            from += 64, left = period;
        }
    }
};

// Blocks are [K, 16] floats.
struct Float32Layout {
    static constexpr int GROUP_SIZE = GROUP, GROUP_BYTES = GROUP * BLOCK * sizeof(float);

    static void pack(const float* weights_NK, int n, int k, int first, char* block) {
        for (int i = 0; i < padded(k); i++)
            for (int c = first; c < first + BLOCK; c++, block += sizeof(float))
                store(block, c < n && i < k ? weights_NK[(size_t)c * k + i] : 0.f);
    }
};

// Blocks are [K/2, 16, 2] bfloat16, the layout of matrix instructions.
struct Bfloat16Layout {
    static constexpr int GROUP_SIZE = GROUP, GROUP_BYTES = GROUP * BLOCK * 2;

    static void pack(const float* weights_NK, int n, int k, int first, char* block) {
        for (int i = 0; i < padded(k); i += 2)
            for (int c = first; c < first + BLOCK; c++)
                for (int j = i; j < i + 2; j++, block += sizeof(BFloat16))
                    narrow(c < n && j < k ? weights_NK[(size_t)c * k + j] : 0.f, (BFloat16*)block);
    }
};

// Every channel has its own 2^BITS levels in each group of inputs: minimum + step * level. Scaling the sum of a group costs
// as much as 128 of its products, so groups are as large as the quality of the weights allows.
// Groups are 16 float16 steps, 16 float16 minimums and levels [32, 16, 4]: bytes, or, with 4 bits, [4, 16, 4] bytes whose
// lower halves are the first 16 inputs and whose upper halves are the others.
template <int BITS> struct QuantizedLayout {
    static constexpr int GROUP_SIZE = BITS == 8 ? 128 : 32, QUADS = GROUP_SIZE * BITS / 32;
    static constexpr int MAX_LEVEL = (1 << BITS) - 1, HEADER_BYTES = 2 * BLOCK * sizeof(Float16);
    static constexpr int QUAD_BYTES = 4 * BLOCK, GROUP_BYTES = HEADER_BYTES + QUADS * QUAD_BYTES;
    using Channels = ChannelGroup<GROUP_SIZE>;

    static void pack(const float* weights_NK, int n, int k, int first, char* block) {
        for (int i = 0; i < k; i += GROUP_SIZE, block += GROUP_BYTES)
            for (int c = 0; c < BLOCK; c += LANES) {
                int channels = std::max(0, std::min(LANES, n - first - c));
                Channels group(weights_NK + (size_t)(first + c) * k + i, channels, k, std::min(GROUP_SIZE, k - i));
                pack_channels(group, c, block);
            }
    }

    // Writes the channels from `first` on; 16 levels are too few to spend them on all of the range.
    static void pack_channels(const Channels& group, int first, char* to) {
        Levels levels = BITS == 4 ? group.least_squares(MAX_LEVEL) : group.full_range(MAX_LEVEL);
        narrow(levels.step, (Float16*)to + first);
        narrow(levels.minimum, (Float16*)to + BLOCK + first);
        Uints own[GROUP_SIZE] = {};
        for (int i = 0; i < group.size; i++)
            own[i] = __builtin_convertvector(levels.nearest(group.weights[i], MAX_LEVEL), Uints);
        store_levels(own, to + HEADER_BYTES + first * 4);
    }
    static void store_levels(const Uints* levels, char* to) {
        for (int quad = 0; quad < QUADS; quad++, to += QUAD_BYTES) {
            Uints bytes{};
            for (int i = 0; i < 4; i++) {
                bytes |= levels[quad * 4 + i] << (8 * i);
                if (BITS == 4) bytes |= levels[GROUP_SIZE / 2 + quad * 4 + i] << (8 * i + 4);
            }
            store(to, bytes);
        }
    }
};

template <class W> int num_groups(int k) { return (k + W::GROUP_SIZE - 1) / W::GROUP_SIZE; }
template <class W> size_t block_bytes(int k) { return (size_t)num_groups<W>(k) * W::GROUP_BYTES; }

// ---- inputs

struct FloatInputs {
    static size_t row_bytes(int k) { return sizeof(float) * padded(k); }
    static void prepare(const float* x, int k, char* row) { std::memcpy(row, x, row_bytes(k)); }
    static const float* at(const char* rows, int row, int k) { return (const float*)(rows + row * row_bytes(k)); }
};

// Inputs of quantised weights are rounded to 127 levels on each side of zero, with a step for every STEP_SIZE of them: they
// fit in bytes, and sums under one step are exact, in whatever order and pieces a processor adds them. A row begins with
// STEPS steps and the sum of the inputs for each group of weights.
template <class Layout> struct QuantizedInputs {
    static constexpr int STEP_SIZE = std::min(Layout::GROUP_SIZE, 64);
    static constexpr int STEPS = Layout::GROUP_SIZE / STEP_SIZE, HEADER_FLOATS = STEPS + 1;
    static constexpr float MAX_LEVEL = 127;
    using LevelsOfStep = Ints[STEP_SIZE / LANES];

    static int size(int k) { return num_groups<Layout>(k) * Layout::GROUP_SIZE; }
    static int header_bytes(int k) {
        return (num_groups<Layout>(k) * HEADER_FLOATS * (int)sizeof(float) + 63) / 64 * 64;
    }

    // Calls store_levels(levels, first) with the levels of STEP_SIZE inputs after the other.
    template <class StoreLevels> static void prepare(const float* x, int k, char* row, StoreLevels store_levels) {
        float* header = (float*)row;
        for (int first = 0; first < size(k);) {
            float sum = 0;
            for (int end = first + Layout::GROUP_SIZE; first < end; first += STEP_SIZE) {
                LevelsOfStep levels;
                float step = *header++ = find_levels(x + first, std::min(padded(k) - first, STEP_SIZE), levels);
                Ints total{};
                for (Ints part : levels) total += part;
                sum += step * horizontal_sum(__builtin_convertvector(total, Floats));
                store_levels(levels, first);
            }
            *header++ = sum;
        }
    }

  private:
    // Returns the step of `count` inputs; those behind them are zero.
    static float find_levels(const float* x, int count, LevelsOfStep& levels) {
        Floats inputs[STEP_SIZE / LANES] = {}, largest{};
        for (int i = 0; i < count; i += LANES) {
            inputs[i / LANES] = widen(x + i);
            largest = vmax(largest, vmax(inputs[i / LANES], -inputs[i / LANES]));
        }
        float step = std::max(horizontal_max(largest), 1e-30f) / MAX_LEVEL, inverse = 1 / step;
        for (int i = 0; i < STEP_SIZE / LANES; i++) levels[i] = round_to_int(inputs[i] * inverse);
        return step;
    }
};

// A length of at least `bytes` that is an odd number of cache lines, so that rows do not compete for the same ones.
inline size_t odd_lines(size_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

}  // namespace
