// Low-rank factors of single texts beside the weights that all texts share: y += B (A x).
//
// A x is computed where the inputs of a matrix are prepared, B is added where its products are written, block by block.
// So factors need no stage and no barrier of their own, and a row meets those of its own text only. The sums of a row are
// added in one order on every processor.

#pragma once

#include "interface.h"
#include "simd.h"

namespace {

constexpr int RANKS_TOGETHER = 4, MAX_PARTS = 3;
enum LayerMatrix { QKV, OUT, GATE_UP, DOWN, INPUT_GATE, INPUT_OUT, NONE };

// A matrix of a layer, whose factors are added; that of the head has none.
struct MatrixPlace {
    int layer;
    LayerMatrix matrix;
};

// The number of matrices that are packed in one, each with an A of its own.
inline int num_parts(const Model& m, MatrixPlace at) {
    if (at.matrix == QKV) return m.layer[at.layer].stores_keys ? 3 : 1;
    return at.matrix == GATE_UP && m.is_gated ? 2 : 1;
}

// The one of them that a block of channels belongs to.
inline int part_of_block(const Model& m, MatrixPlace at, int block) {
    const Layer& layer = m.layer[at.layer];
    if (at.matrix == GATE_UP) return m.is_gated ? block % 2 : 0;
    if (at.matrix != QKV) return 0;
    int first_key = m.num_query_heads * layer.head_size / BLOCK;
    int first_value = first_key + layer.num_key_heads * layer.head_size / BLOCK;
    return (block >= first_key) + (block >= first_value);
}

// Writes A x of one input x.
inline void reduce(const Model& m, const Factors& factors, MatrixPlace at, const float* x, int k, float* reduced) {
    const BFloat16* a = (const BFloat16*)factors.layer[at.layer].a[at.matrix];
    int inputs = padded(k), count = num_parts(m, at) * factors.rank;
    for (int i = 0; i < count; i += RANKS_TOGETHER, a += RANKS_TOGETHER * inputs) {
        Floats sums[RANKS_TOGETHER] = {};
        for (int j = 0; j < inputs; j += LANES)
            for (int r = 0; r < RANKS_TOGETHER; r++) sums[r] = fma(widen(a + r * inputs + j), widen(x + j), sums[r]);
        for (int r = 0; r < RANKS_TOGETHER; r++) reduced[i + r] = horizontal_sum(sums[r]);
    }
}

// Adds B A x to the 16 channels of a block.
inline void expand(const Model& m, const Factors& factors, MatrixPlace at, int block, const float* reduced, Floats& low,
                   Floats& high) {
    const BFloat16* b = (const BFloat16*)factors.layer[at.layer].b[at.matrix] + (size_t)block * factors.rank * BLOCK;
    reduced += part_of_block(m, at, block) * factors.rank;
    for (int i = 0; i < factors.rank; i++, b += BLOCK) {
        Floats x = splat(reduced[i]);
        low = fma(widen(b), x, low), high = fma(widen(b + LANES), x, high);
    }
}

}  // namespace
