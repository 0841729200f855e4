// The products of this build's instruction set.

#pragma once

#ifdef __AMX_TILE__
#include "multiply_amx.h"
#elif defined(__AVX512BF16__)
#include "multiply_bfloat16.h"
#elif defined(__AVX512VNNI__)
#include "multiply_512.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "multiply_neon.h"
#else
#include "multiply_256.h"
#endif

namespace {

#ifdef __AMX_TILE__
inline bool allow_instructions() { return allow_tiles(); }
using Bfloat16Matrix = Bfloat16WeightsAmx;
template <int BITS> using QuantizedMatrix = QuantizedWeightsAmx<BITS>;
#elif defined(__AVX512BF16__)
inline bool allow_instructions() { return true; }
using Bfloat16Matrix = Bfloat16WeightsDot;
template <int BITS> using QuantizedMatrix = QuantizedWeights512<BITS>;
#elif defined(__AVX512VNNI__)
inline bool allow_instructions() { return true; }
using Bfloat16Matrix = Bfloat16Weights512;
template <int BITS> using QuantizedMatrix = QuantizedWeights512<BITS>;
#elif defined(__ARM_FEATURE_DOTPROD)
inline bool allow_instructions() { return true; }
using Bfloat16Matrix = Bfloat16Weights;
template <int BITS> using QuantizedMatrix = QuantizedWeights<BITS, DotProducts<BITS>>;
#else
inline bool allow_instructions() { return true; }
using Bfloat16Matrix = Bfloat16Weights;
template <int BITS> using QuantizedMatrix = QuantizedWeights<BITS>;
#endif
using Int8Matrix = QuantizedMatrix<8>;
using Int4Matrix = QuantizedMatrix<4>;

// Memory for prepared rows of any format. Tiles of rows may read, and ignore, rows behind the last.
inline size_t prepared_bytes(int rows, int k) { return (size_t)(rows + BLOCK) * (sizeof(float) * padded(k) + 512); }

}  // namespace
