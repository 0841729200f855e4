// One forward pass of a Llama-family model over a few rows. Weights are read from memory once for all rows of a pass.
//
// Shapes: R rows, H hidden size, Q query heads, K key heads, D head size, M mlp size, V vocabulary, C slots, L layers.
// Weights are stored in blocks of 16 output channels, each over all inputs, so that lanes are channels and no sum
// crosses lanes. A bfloat16 block is multiplied in float32. An int8 block has its own 256 levels for each channel and
// each group of 32 inputs; its inputs are rounded to 16 bits (off by less than sqrt(K)/2^16 of their root mean square),
// so that sums inside a group are exact.
// The result of a row depends only on the text before it: neither on the other rows, nor on the slots of that text's
// keys (which ascend along it), nor on the number of threads.
// Keys are stored as [K, C/8, D, 8], values as [K, C, D]. Vectors between stages are padded to whole groups.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <omp.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8, BLOCK = 16, GROUP = 32, MAX_THREAD_ROWS = 4, MAX_GROUP = 3;

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Uints __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int16_t Shorts8 __attribute__((vector_size(16)));
typedef uint16_t Ushorts8 __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t Bytes8 __attribute__((vector_size(8)));

struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

template <class T> T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> void store(void* to, T value) { std::memcpy(to, &value, sizeof value); }

Floats widen(const float* from) { return load<Floats>(from); }
Floats widen(const Float16* from) {
#ifdef __F16C__
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Uints bits = __builtin_convertvector(load<Ushorts8>(from), Uints);
    Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;  // the exponents' biases differ by 112
    return (Floats)((Uints)size | (bits & 0x8000) << 16);
#endif
}

Shorts widen(Bytes x) {
#ifdef __AVX2__
    return (Shorts)_mm256_cvtepu8_epi16((__m128i)x);
#else
    return __builtin_convertvector(x, Shorts);
#endif
}

float widen_scalar(const float* from) { return *from; }
float widen_scalar(const Float16* from) {
    Float16 eight[LANES] = {*from};
    return widen(eight)[0];
}

float widen_scalar(const BFloat16* from) {
    uint32_t bits = (uint32_t)from->bits << 16;
    return load<float>(&bits);
}

void narrow(float value, float* to) { *to = value; }
void narrow(float value, Float16* to) {
    float size = std::min(std::fabs(value), 65504.f) * 0x1p-112f;
    uint32_t bits = load<uint32_t>(&size);
    to->bits = (uint16_t)((bits + 0xfff + (bits >> 13 & 1)) >> 13 | (std::signbit(value) ? 0x8000 : 0));
}

Floats vmax(Floats a, Floats b) { return a > b ? a : b; }
Floats vmin(Floats a, Floats b) { return a < b ? a : b; }

Ints round_to_int(Floats x) { return (Ints)(x + 12582912.f) - 0x4b400000; }  // to nearest, below 2^22

float horizontal_sum(Floats x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }
float horizontal_max(Floats x) {
    return std::max(std::max(std::max(x[0], x[1]), std::max(x[2], x[3])),
                    std::max(std::max(x[4], x[5]), std::max(x[6], x[7])));
}

// e^x within 2 units in the last place; results outside the normal numbers are clamped to their limits.
Floats fast_exp(Floats x) {
    x = vmax(x, Floats{} - 87.f);
    x = x < 88.f ? x : Floats{} + 88.f;
    Ints n = round_to_int(x * 1.44269504f);
    Floats whole = __builtin_convertvector(n, Floats);
    Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats p = Floats{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + c;
    return (p * r * r + r + 1.f) * (Floats)((n + 127) << 23);
}

int padded(int size) { return (size + GROUP - 1) / GROUP * GROUP; }
int blocks(int channels) { return (channels + BLOCK - 1) / BLOCK; }
int share(int work, int thread, int threads) { return (int)((int64_t)work * thread / threads); }

// ---- weights

// Prefetches weights that are needed soon: while a tile of rows uses the weights of one group of inputs, it prefetches
// the next `step` bytes. The hardware prefetcher is too late.
struct Prefetcher {
    const char* from;
    int step;

    void fetch() {
        for (int line = 0; line < step; line += 64) __builtin_prefetch(from + line);
        from += step;
    }
};

struct FloatInputs {
    static size_t row_bytes(int k) { return sizeof(float) * padded(k); }
    static void prepare(const float* x, int k, char* row) { std::memcpy(row, x, row_bytes(k)); }
};

// Blocks are [K, 16] floats.
struct Float32Weights : FloatInputs {
    static constexpr int TILE_ROWS = 4, GROUP_BYTES = GROUP * BLOCK * sizeof(float), LOOKAHEAD = 2048;

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        for (int r = 0; r < R; r++) out[r][0] = out[r][1] = Floats{};
        for (int i = 0; i < padded(k); i++, block += BLOCK * sizeof(float)) {
            if (i % GROUP == 0) prefetch.fetch();
            Floats low = load<Floats>(block), high = load<Floats>(block + sizeof low);
            for (int r = 0; r < R; r++) {
                float x = ((const float*)(rows + r * row_bytes(k)))[i];
                out[r][0] += low * x, out[r][1] += high * x;
            }
        }
    }

    static void pack(const float* weights_NK, int n, int k, int first, char* block) {
        for (int i = 0; i < padded(k); i++)
            for (int c = first; c < first + BLOCK; c++, block += sizeof(float))
                store(block, c < n && i < k ? weights_NK[(size_t)c * k + i] : 0.f);
    }
};

// Blocks are [K, 8] words of 32 bits: a lower channel in the lower half, and one of the upper 8 in the upper half.
struct Bfloat16Weights : FloatInputs {
    static constexpr int TILE_ROWS = 6, GROUP_BYTES = GROUP * BLOCK * 2, LOOKAHEAD = 4096;

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        const float* x[R];
        Floats sums[R][2] = {};
        for (int r = 0; r < R; r++) x[r] = (const float*)(rows + r * row_bytes(k));
        for (int i = 0; i < padded(k); i += GROUP) {
            prefetch.fetch();
#pragma GCC unroll 2
            for (int j = i; j < i + GROUP; j++, block += sizeof(Uints)) {
                Uints both = load<Uints>(block);
                Floats low = (Floats)(both << 16), high = (Floats)(both & 0xffff0000);
                for (int r = 0; r < R; r++) sums[r][0] += low * x[r][j], sums[r][1] += high * x[r][j];
            }
        }
        for (int r = 0; r < R; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
    }

    static void pack(const float* weights_NK, int n, int k, int first, char* block) {
        auto bits = [&](int c, int i) { return c < n && i < k ? round_to_bfloat16(weights_NK[(size_t)c * k + i]) : 0; };
        for (int i = 0; i < padded(k); i++)
            for (int c = first; c < first + LANES; c++, block += sizeof(uint32_t))
                store(block, bits(c, i) | bits(c + LANES, i) << 16);
    }
    static uint32_t round_to_bfloat16(float value) {
        uint32_t bits = load<uint32_t>(&value);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

inline Ints multiply_pairs(Shorts a, Shorts b) {
#ifdef __AVX2__
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    Ints even_a = (Ints)a << 16 >> 16, even_b = (Ints)b << 16 >> 16;
    return even_a * even_b + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// Blocks are groups of 16 float16 steps, 16 float16 minimums and [16, 16, 2] levels: bytes, or, with 4 bits, bytes with
// the levels of the lower 8 channels in their lower halves and of the upper 8 in their upper halves.
// Inputs are stored as their step, their 16-bit levels, and the sum of each group.
template <int BITS> struct QuantizedWeights {
    static constexpr int MAX_LEVEL = (1 << BITS) - 1, PAIR_BYTES = 2 * BLOCK * BITS / 8, HEADER_BYTES = 32;
    static constexpr int TILE_ROWS = 4, GROUP_BYTES = 4 * BLOCK + GROUP / 2 * PAIR_BYTES, LOOKAHEAD = 8 * GROUP_BYTES;

    static size_t row_bytes(int k) {
        return HEADER_BYTES + sizeof(int16_t) * padded(k) + sizeof(float) * padded(k) / GROUP;
    }

    static void prepare(const float* x, int k, char* row) {
        int size = padded(k);
        Floats largest{};
        for (int i = 0; i < size; i += LANES) largest = vmax(largest, vmax(widen(x + i), -widen(x + i)));
        float step = std::max(horizontal_max(largest), 1e-30f) / 32767;
        store(row, step);
        char *shorts = row + HEADER_BYTES, *sums = shorts + sizeof(int16_t) * size;
        for (int i = 0; i < size; i += GROUP, sums += sizeof(float)) {
            Ints total{};
            for (int j = i; j < i + GROUP; j += LANES) {
                Ints levels = round_to_int(widen(x + j) * (1 / step));
                total += levels;
                store(shorts + sizeof(int16_t) * j, __builtin_convertvector(levels, Shorts8));
            }
            store(sums, horizontal_sum(__builtin_convertvector(total, Floats)));
        }
    }

    template <int R>
    static void multiply(const char* block, const char* rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
        size_t stride = row_bytes(k);
        const char *shorts = rows + HEADER_BYTES, *sums = shorts + sizeof(int16_t) * padded(k);
        for (int r = 0; r < R; r++) out[r][0] = out[r][1] = Floats{};
        for (int i = 0; i < padded(k); i += GROUP, block += GROUP_BYTES, sums += sizeof(float)) {
            prefetch.fetch();
            Ints products[R][2] = {};
            const char* weights = block + 4 * BLOCK;
#pragma GCC unroll 2  // fully unrolled it would be summed as a tree, which needs too many registers
            for (int j = 0; j < GROUP / 2; j++, weights += PAIR_BYTES, shorts += 4) {
                Bytes first = load<Bytes>(weights);
                Bytes second = BITS == 8 ? load<Bytes>(weights + PAIR_BYTES - BLOCK) : first >> 4;
                Shorts low = widen(first & (uint8_t)MAX_LEVEL), high = widen(second);
                for (int r = 0; r < R; r++) {
                    Shorts pair = (Shorts)(Ints{} + load<int32_t>(shorts + r * stride));
                    products[r][0] += multiply_pairs(low, pair);
                    products[r][1] += multiply_pairs(high, pair);
                }
            }
            const Float16 *steps = (const Float16*)block, *minimums = steps + BLOCK;
            for (int half = 0; half < 2; half++) {
                Floats step = widen(steps + half * LANES), minimum = widen(minimums + half * LANES);
                for (int r = 0; r < R; r++)
                    out[r][half] += __builtin_convertvector(products[r][half], Floats) * step +
                                    minimum * load<float>(sums + r * stride);
            }
        }
        for (int r = 0; r < R; r++) out[r][0] *= load<float>(rows + r * stride), out[r][1] *= load<float>(rows + r * stride);
    }

    static void pack(const float* weights_NK, int n, int k, int first, char* block) {
        for (int i = 0; i < padded(k); i += GROUP, block += GROUP_BYTES)
            for (int c = 0; c < BLOCK; c++) {
                int size = first + c < n ? std::max(0, std::min(GROUP, k - i)) : 0;
                pack_group(weights_NK + (size_t)(first + c) * k + i, size, c, block);
            }
    }

    static void pack_group(const float* weights, int size, int channel, char* group) {
        float own[GROUP] = {};
        std::copy_n(weights, size, own);
        std::fill(own + size, own + GROUP, own[0]);
        Floats highest = widen(own), negated = -highest;
        for (int i = LANES; i < GROUP; i += LANES)
            highest = vmax(highest, widen(own + i)), negated = vmax(negated, -widen(own + i));
        Float16 *step = (Float16*)group + channel, *minimums = step + BLOCK;
        narrow(-horizontal_max(negated), minimums);
        float minimum = widen_scalar(minimums);
        narrow(std::max(0.f, horizontal_max(highest) - minimum) / MAX_LEVEL, step);
        float inverse = step->bits ? 1 / widen_scalar(step) : 0;
        uint8_t levels[GROUP];
        for (int i = 0; i < GROUP; i += LANES) {
            Floats level = vmax((widen(own + i) - minimum) * inverse, Floats{});
            store(levels + i, __builtin_convertvector(round_to_int(vmin(level, Floats{} + (float)MAX_LEVEL)), Bytes8));
        }
        std::fill(levels + size, levels + GROUP, 0);
        bool is_upper = BITS == 4 && channel >= LANES;
        char* to = group + 4 * BLOCK + 2 * (is_upper ? channel - LANES : channel);
        for (int i = 0; i < GROUP; i += 2, to += PAIR_BYTES) {
            uint16_t pair = load<uint16_t>(levels + i);
            store(to, is_upper ? (uint16_t)(load<uint16_t>(to) | pair << 4) : pair);
        }
    }
};

using Int8Weights = QuantizedWeights<8>;
using Int4Weights = QuantizedWeights<4>;

template <class W> size_t block_bytes(int k) { return (size_t)padded(k) / GROUP * W::GROUP_BYTES; }

template <class W>
void multiply_tile(const char* block, const char* rows, int num_rows, int k, Prefetcher prefetch, Floats (*out)[2]) {
    switch (num_rows) {
        case 1: return W::template multiply<1>(block, rows, k, prefetch, out);
        case 2: return W::template multiply<2>(block, rows, k, prefetch, out);
        case 3: return W::template multiply<3>(block, rows, k, prefetch, out);
        case 4: return W::template multiply<4>(block, rows, k, prefetch, out);
        case 5: return W::template multiply<std::min(5, W::TILE_ROWS)>(block, rows, k, prefetch, out);
        default: return W::template multiply<W::TILE_ROWS>(block, rows, k, prefetch, out);
    }
}

// Calls write(block, row, low, high) with the 16 outputs of each block and row. Several tiles of rows of equal size
// read a block from the cache; together they prefetch the next one.
template <class W, class Write>
void multiply(const char* weights, int first, int last, const char* rows, int num_rows, int k, Write write) {
    Floats out[W::TILE_ROWS][2];
    int tiles = (num_rows + W::TILE_ROWS - 1) / W::TILE_ROWS;
    int step = (W::GROUP_BYTES / std::max(tiles, 1) + 63) / 64 * 64;
    size_t bytes = block_bytes<W>(k), distance = tiles == 1 ? W::LOOKAHEAD : bytes;
    for (int block = first; block < last; block++) {
        const char* from = weights + block * bytes;
        for (int tile = 0; tile < tiles; tile++) {
            int row = share(num_rows, tile, tiles), size = share(num_rows, tile + 1, tiles) - row;
            Prefetcher prefetch{from + distance + (size_t)tile * step * (padded(k) / GROUP), step};
            multiply_tile<W>(from, rows + row * W::row_bytes(k), size, k, prefetch, out);
            for (int r = 0; r < size; r++) write(block, row + r, out[r][0], out[r][1]);
        }
    }
}

// ---- attention of up to 3 query heads that share their keys

template <class T, int N>
void attention_scores(const float* queries, const T* keys, int end, int d, float* scores, int stride) {
    for (int slot = 0; slot < end; slot += 2 * LANES) {
        Floats sums[N][2] = {};
        const T* low = keys + (size_t)slot * d;
        for (int i = 0; i < d; i++) {
            Floats a = widen(low + i * LANES), b = widen(low + (d + i) * LANES);
            for (int n = 0; n < N; n++) sums[n][0] += a * queries[n * d + i], sums[n][1] += b * queries[n * d + i];
        }
        for (int n = 0; n < N; n++)
            store(scores + n * stride + slot, sums[n][0]), store(scores + n * stride + slot + LANES, sums[n][1]);
    }
}

// Turns scores into weights with a sum of 1; masked slots, -inf, have weight 0. The sum runs along the slots, so that
// masked slots between them do not change its bits.
void softmax(float* scores, int end) {
    Floats largest = widen(scores);
    for (int slot = LANES; slot < end; slot += LANES) largest = vmax(largest, widen(scores + slot));
    float highest = horizontal_max(largest);
    double total = 0;
    for (int slot = 0; slot < end; slot += LANES) {
        Floats score = widen(scores + slot), weight = fast_exp(score - highest);
        weight = score == -INFINITY ? Floats{} : weight;
        store(scores + slot, weight);
        for (int lane = 0; lane < LANES; lane++) total += weight[lane];
    }
    float inverse = (float)(1 / total);
    for (int slot = 0; slot < end; slot += LANES) store(scores + slot, widen(scores + slot) * inverse);
}

template <class T, int N, int S>
void weighted_values(const float* weights, int stride, const T* values, int end, int d, float* out) {
    Floats sums[N][S] = {};
    for (int slot = 0; slot < end; slot++, values += d)
        for (int s = 0; s < S; s++) {
            Floats value = widen(values + s * LANES);
            for (int n = 0; n < N; n++) sums[n][s] += value * weights[n * stride + slot];
        }
    for (int n = 0; n < N; n++)
        for (int s = 0; s < S; s++) store(out + n * d + s * LANES, sums[n][s]);
}

// `masked` marks the slots from `length` on that this row does not see.
template <class T, int N>
void attend(const float* queries, const T* keys, const T* values, int length, int end, const bool* masked, int d,
            float* scores, int stride, float* out) {
    attention_scores<T, N>(queries, keys, end, d, scores, stride);
    int whole = (end + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    for (int n = 0; n < N; n++) {
        float* row = scores + n * stride;
        for (int slot = length; slot < whole; slot++)
            if (slot >= end || masked[slot - length]) row[slot] = -INFINITY;
        softmax(row, whole);
    }
    int i = 0;
    for (; i + 4 * LANES <= d; i += 4 * LANES) weighted_values<T, N, 4>(scores, stride, values + i, end, d, out + i);
    for (; i < d; i += LANES) weighted_values<T, N, 1>(scores, stride, values + i, end, d, out + i);
}

}  // namespace

// ---- the interface to Python (library.py)

extern "C" {

struct Layer {
    const float *norm, *mlp_norm, *bias;  // bias of qkv, or null
    const char *qkv, *out, *gate_up, *down;
};

struct Model {
    int kind, num_layers, hidden, num_query_heads, num_key_heads, head_size, mlp, vocabulary;
    float eps, scaling;
    const Layer* layer;
    const float* norm;
    const char *head, *embedding;
    const float *cos, *sin;  // [positions, D/2]
};

// A tree of ids behind the first `length` ids of a text.
struct Text {
    int length, capacity;
    const int* parents;  // of all nodes; -1 is the text's last id
    char* kv;
};

// Rows of one or more texts. Row r is node `nodes[r]` of text `texts[r]`; every node without keys must be among them.
struct Pass {
    int rows, logit_rows, capacity, threads;  // the largest capacity of a text
    const int *ids, *texts, *nodes;           // [rows]
    const Text* text;
    char* scratch;
    float* logits;  // [logit_rows, V] of the last rows
    float* hidden;  // [logit_rows, H], the normed inputs of the head; or null
};
}

namespace {

struct Sizes {
    int hidden, qkv, attended, mlp, widest;
    explicit Sizes(const Model& m)
        : hidden(padded(m.hidden)), qkv(padded((m.num_query_heads + 2 * m.num_key_heads) * m.head_size)),
          attended(padded(m.num_query_heads * m.head_size)), mlp(padded(m.mlp)),
          widest(std::max({hidden, attended, mlp})) {}
};

// The buffers of one pass inside the caller's scratch memory.
struct Scratch {
    float *x, *qkv, *attended, *mlp;
    char* shared_rows;
    float *thread_row, *scores;  // of this thread
    char* thread_rows;
    bool* masked;
    size_t bytes;

    Scratch(const Model& m, char* memory, int rows, int capacity, int thread, int threads) {
        Sizes size(m);
        char* next = memory;
        auto take = [&](size_t wanted) {
            char* start = next;
            next += (wanted + 63) / 64 * 64;
            return start;
        };
        auto floats = [&](size_t count) { return (float*)take(count * sizeof(float)); };
        x = floats((size_t)rows * size.hidden);
        qkv = floats((size_t)rows * size.qkv);
        attended = floats((size_t)rows * size.attended);
        mlp = floats((size_t)rows * size.mlp);
        shared_rows = take((size_t)rows * size.widest * sizeof(float));
        for (int t = 0; t < threads; t++) {
            float* row = floats(size.widest);
            char* rows_of_thread = take((size_t)MAX_THREAD_ROWS * size.widest * sizeof(float));
            float* weights = floats((size_t)MAX_GROUP * capacity);
            char* slots = take(capacity);
            if (t == thread) thread_row = row, thread_rows = rows_of_thread, scores = weights, masked = (bool*)slots;
        }
        bytes = next - memory;
    }

};

// W, Head, T, E: formats of the matrices, the head, the keys and values, and the embeddings.
template <class W, class Head, class T, class E> struct Forward {
    const Model& m;
    const Pass& p;
    int thread, threads;
    Sizes size;
    Scratch s;

    Forward(const Model& model, const Pass& pass, int thread, int threads)
        : m(model), p(pass), thread(thread), threads(threads), size(model),
          s(model, pass.scratch, pass.rows, pass.capacity, thread, threads) {}

    const Text& text(int row) const { return p.text[p.texts[row]]; }
    int node(int row) const { return p.nodes[row]; }
    int slot(int row) const { return text(row).length + node(row); }
    int position(int row) const {
        const Text& tree = text(row);
        int depth = 0;
        for (int at = tree.parents[node(row)]; at >= 0; at = tree.parents[at]) depth++;
        return tree.length + depth;
    }
    T* keys(int row, int layer, int head) const {
        return (T*)text(row).kv + ((size_t)layer * 2 * m.num_key_heads + head) * text(row).capacity * m.head_size;
    }
    T* values(int row, int layer, int head) const { return keys(row, layer, m.num_key_heads + head); }

    static void barrier() {
#pragma omp barrier
    }

    void embed() {
        for (int row = share(p.rows, thread, threads); row < share(p.rows, thread + 1, threads); row++) {
            const E* from = (const E*)m.embedding + (size_t)p.ids[row] * m.hidden;
            float* to = s.x + row * size.hidden;
            std::fill(to + m.hidden, to + size.hidden, 0.f);
            for (int i = 0; i < m.hidden; i++) to[i] = widen_scalar(from + i);
        }
    }

    // Prepares rows as inputs of a matrix: few rows by each thread for itself, many by all threads together.
    template <class To = W, class Make> const char* prepare(int k, int first, Make make) {
        bool is_shared = p.rows > MAX_THREAD_ROWS;
        char* to = is_shared ? s.shared_rows : s.thread_rows;
        int count = p.rows - first;
        int begin = is_shared ? share(count, thread, threads) : 0;
        int end = is_shared ? share(count, thread + 1, threads) : count;
        for (int row = begin; row < end; row++) To::prepare(make(first + row), k, to + row * To::row_bytes(k));
        if (is_shared) barrier();
        return to;
    }
    // `copies` gets the normed rows too, unless it is null.
    template <class To = W> const char* normed(const float* weight, int first = 0, float* copies = nullptr) {
        bool copy = copies && (p.rows > MAX_THREAD_ROWS || thread == 0);
        return prepare<To>(m.hidden, first, [&](int row) {
            const float* x = s.x + row * size.hidden;
            Floats squares{};
            for (int i = 0; i < size.hidden; i += LANES) squares += widen(x + i) * widen(x + i);
            float factor = 1 / std::sqrt(horizontal_sum(squares) / m.hidden + m.eps);
            for (int i = 0; i < size.hidden; i += LANES)
                store(s.thread_row + i, widen(x + i) * factor * widen(weight + i));
            if (copy) std::memcpy(copies + (size_t)(row - first) * m.hidden, s.thread_row, sizeof(float) * m.hidden);
            return s.thread_row;
        });
    }
    const char* prepared(const float* from, int k) {
        return prepare(k, 0, [&](int row) { return from + row * padded(k); });
    }

    template <class From = W, class Write>
    void matrix(const char* weights, int num_blocks, const char* rows, int count, int k, Write write, int unit = 1) {
        int units = num_blocks / unit;
        multiply<From>(weights, share(units, thread, threads) * unit, share(units, thread + 1, threads) * unit, rows,
                    count, k, write);
    }
    auto write_to(float* to, int stride) {
        return [=](int block, int row, Floats low, Floats high) {
            float* at = to + (size_t)row * stride + block * BLOCK;
            store(at, low), store(at + LANES, high);
        };
    }
    auto add_to_x() {
        return [this](int block, int row, Floats low, Floats high) {
            float* at = s.x + row * size.hidden + block * BLOCK;
            store(at, widen(at) + low), store(at + LANES, widen(at + LANES) + high);
        };
    }

    void rotate(float* x, int at) const {
        int half = m.head_size / 2;
        const float *cos = m.cos + (size_t)at * half, *sin = m.sin + (size_t)at * half;
        for (int i = 0; i < half; i += LANES) {
            Floats a = widen(x + i), b = widen(x + half + i), c = widen(cos + i), d = widen(sin + i);
            store(x + i, a * c - b * d), store(x + half + i, b * c + a * d);
        }
    }

    // Rotates queries in place; writes rotated keys and values to their slots.
    void rotate_and_store(int layer) {
        int heads = m.num_query_heads + 2 * m.num_key_heads, d = m.head_size;
        for (int task = share(p.rows * heads, thread, threads); task < share(p.rows * heads, thread + 1, threads); task++) {
            int row = task / heads, head = task % heads;
            float* x = s.qkv + (size_t)row * size.qkv + head * d;
            if (const float* bias = m.layer[layer].bias)
                for (int i = 0; i < d; i++) x[i] += bias[head * d + i];
            if (head < m.num_query_heads + m.num_key_heads) rotate(x, position(row));
            if (head < m.num_query_heads)
                for (int i = 0; i < d; i++) x[i] *= m.scaling;
            else if (head < m.num_query_heads + m.num_key_heads)
                store_key(x, keys(row, layer, head - m.num_query_heads), slot(row));
            else
                store_value(x, values(row, layer, head - m.num_query_heads - m.num_key_heads) + (size_t)slot(row) * d);
        }
    }
    void store_key(const float* x, T* keys, int slot) const {
        T* to = keys + (size_t)slot / LANES * LANES * m.head_size + slot % LANES;
        for (int i = 0; i < m.head_size; i++) narrow(x[i], to + i * LANES);
    }
    void store_value(const float* x, T* to) const {
        for (int i = 0; i < m.head_size; i++) narrow(x[i], to + i);
    }

    void attend_all(int layer) {
        int tasks = p.rows * m.num_key_heads, group = m.num_query_heads / m.num_key_heads;
        for (int task = share(tasks, thread, threads); task < share(tasks, thread + 1, threads); task++) {
            int row = task % p.rows, key = task / p.rows;
            mask_all_but_ancestors(row);
            for (int head = key * group; head < (key + 1) * group; head += MAX_GROUP)
                attend_heads(layer, row, key, head, std::min(MAX_GROUP, (key + 1) * group - head));
        }
    }
    void mask_all_but_ancestors(int row) {
        std::fill(s.masked, s.masked + node(row) + 1, true);
        for (int at = node(row); at >= 0; at = text(row).parents[at]) s.masked[at] = false;
    }
    void attend_heads(int layer, int row, int key, int head, int count) {
        const float* from = s.qkv + (size_t)row * size.qkv + head * m.head_size;
        float* to = s.attended + (size_t)row * size.attended + head * m.head_size;
        auto run = [&](auto attend) {
            attend(from, keys(row, layer, key), values(row, layer, key), text(row).length, slot(row) + 1, s.masked,
                   m.head_size, s.scores, p.capacity, to);
        };
        switch (count) {
            case 1: run(attend<T, 1>); break;
            case 2: run(attend<T, 2>); break;
            default: run(attend<T, MAX_GROUP>);
        }
    }

    void clear_padding() {
        for (int row = thread; row < p.rows; row += threads) {
            float* attended = s.attended + (size_t)row * size.attended;
            std::fill(attended + m.num_query_heads * m.head_size, attended + size.attended, 0.f);
            float* mlp = s.mlp + (size_t)row * size.mlp;
            std::fill(mlp + m.mlp, mlp + size.mlp, 0.f);
        }
    }

    void attention(int number) {
        const Layer& layer = m.layer[number];
        int d = m.head_size;
        const char* rows = normed(layer.norm);
        matrix(layer.qkv, blocks((m.num_query_heads + 2 * m.num_key_heads) * d), rows, p.rows, m.hidden,
               write_to(s.qkv, size.qkv));
        barrier();
        rotate_and_store(number);
        barrier();
        attend_all(number);
        barrier();
        rows = prepared(s.attended, m.num_query_heads * d);
        matrix(layer.out, blocks(m.hidden), rows, p.rows, m.num_query_heads * d, add_to_x());
        barrier();
    }
    void feed_forward(const Layer& layer) {
        const char* rows = normed(layer.mlp_norm);
        auto gate_then_up = [this](int block, int row, Floats low, Floats high) {
            float* at = s.mlp + (size_t)row * size.mlp + block / 2 * BLOCK;
            if (block % 2)
                store(at, widen(at) * low), store(at + LANES, widen(at + LANES) * high);
            else
                store(at, low / (1.f + fast_exp(-low))), store(at + LANES, high / (1.f + fast_exp(-high)));
        };
        matrix(layer.gate_up, 2 * blocks(m.mlp), rows, p.rows, m.hidden, gate_then_up, 2);
        barrier();
        rows = prepared(s.mlp, m.mlp);
        matrix(layer.down, blocks(m.hidden), rows, p.rows, m.mlp, add_to_x());
        barrier();
    }
    void logits() {
        const char* rows = normed<Head>(m.norm, p.rows - p.logit_rows, p.hidden);
        auto write = [this](int block, int row, Floats low, Floats high) {
            float both[BLOCK];
            store(both, low), store(both + LANES, high);
            int first = block * BLOCK;
            std::memcpy(p.logits + (size_t)row * m.vocabulary + first, both,
                        sizeof(float) * std::min(BLOCK, m.vocabulary - first));
        };
        matrix<Head>(m.head, blocks(m.vocabulary), rows, p.logit_rows, m.hidden, write);
    }
    void run() {
        embed();
        clear_padding();
        barrier();
        for (int number = 0; number < m.num_layers; number++) {
            attention(number);
            feed_forward(m.layer[number]);
        }
        if (p.logit_rows) logits();
    }
};

template <class W, class Head, class T, class E> void forward(const Model& m, const Pass& p) {
#pragma omp parallel num_threads(p.threads)
    Forward<W, Head, T, E>(m, p, omp_get_thread_num(), omp_get_num_threads()).run();
}

template <class W> void pack(const float* weights_NK, int n, int k, char* to, int stride, int offset) {
#pragma omp parallel for
    for (int block = 0; block < blocks(n); block++)
        W::pack(weights_NK, n, k, block * BLOCK, to + (size_t)(block * stride + offset) * block_bytes<W>(k));
}

template <class T> void move_slots(const Model& m, T* kv, int capacity, const int* sources, int count, int start) {
    int d = m.head_size;
    for (int head = 0; head < m.num_layers * 2 * m.num_key_heads; head++, kv += (size_t)capacity * d) {
        bool is_key = head / m.num_key_heads % 2 == 0;
        for (int n = 0; n < count; n++) {
            int from = sources[n], to = start + n;
            for (int i = 0; i < d; i++)
                if (is_key)
                    kv[((size_t)to / LANES * d + i) * LANES + to % LANES] =
                        kv[((size_t)from / LANES * d + i) * LANES + from % LANES];
                else
                    kv[(size_t)to * d + i] = kv[(size_t)from * d + i];
        }
    }
}

// Multiplies rows x [R, padded K] by packed weights; `out` has whole blocks of channels.
template <class W>
void linear(const char* weights, const float* x, int rows, int n, int k, char* scratch, float* out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int thread = omp_get_thread_num(), count = omp_get_num_threads();
        for (int row = share(rows, thread, count); row < share(rows, thread + 1, count); row++)
            W::prepare(x + (size_t)row * padded(k), k, scratch + row * W::row_bytes(k));
#pragma omp barrier
        multiply<W>(weights, share(blocks(n), thread, count), share(blocks(n), thread + 1, count), scratch, rows, k,
                    [=](int block, int row, Floats low, Floats high) {
                        float* at = out + (size_t)row * blocks(n) * BLOCK + block * BLOCK;
                        store(at, low), store(at + LANES, high);
                    });
    }
}

}  // namespace

extern "C" {

enum { FLOAT32, BFLOAT16, INT8, INT4 };

size_t omnidraft_packed_bytes(int kind, int n, int k) {
    switch (kind) {
        case FLOAT32: return blocks(n) * block_bytes<Float32Weights>(k);
        case BFLOAT16: return blocks(n) * block_bytes<Bfloat16Weights>(k);
        case INT4: return blocks(n) * block_bytes<Int4Weights>(k);
        default: return blocks(n) * block_bytes<Int8Weights>(k);
    }
}

// Writes the blocks of weights [N, K] to the blocks `offset`, `offset + stride`, ... of `to`.
void omnidraft_pack(int kind, const float* weights_NK, int n, int k, char* to, int stride, int offset) {
    switch (kind) {
        case FLOAT32: return pack<Float32Weights>(weights_NK, n, k, to, stride, offset);
        case BFLOAT16: return pack<Bfloat16Weights>(weights_NK, n, k, to, stride, offset);
        case INT4: return pack<Int4Weights>(weights_NK, n, k, to, stride, offset);
        default: return pack<Int8Weights>(weights_NK, n, k, to, stride, offset);
    }
}

size_t omnidraft_row_bytes(int kind, int k) {
    return kind < INT8 ? Bfloat16Weights::row_bytes(k) : Int8Weights::row_bytes(k);
}

// `scratch` has omnidraft_row_bytes for each row.
void omnidraft_linear(int kind, const char* weights, const float* x, int rows, int n, int k, char* scratch, float* out,
                      int threads) {
    switch (kind) {
        case FLOAT32: return linear<Float32Weights>(weights, x, rows, n, k, scratch, out, threads);
        case BFLOAT16: return linear<Bfloat16Weights>(weights, x, rows, n, k, scratch, out, threads);
        case INT4: return linear<Int4Weights>(weights, x, rows, n, k, scratch, out, threads);
        default: return linear<Int8Weights>(weights, x, rows, n, k, scratch, out, threads);
    }
}

size_t omnidraft_scratch_bytes(const Model* m, int rows, int capacity, int threads) {
    return Scratch(*m, nullptr, rows, capacity, 0, threads).bytes;
}

void omnidraft_forward(const Model* m, const Pass* p) {
    switch (m->kind) {
        case FLOAT32: return forward<Float32Weights, Float32Weights, float, float>(*m, *p);
        case BFLOAT16: return forward<Bfloat16Weights, Bfloat16Weights, float, BFloat16>(*m, *p);
        case INT4: return forward<Int4Weights, Int8Weights, Float16, BFloat16>(*m, *p);
        default: return forward<Int8Weights, Int8Weights, Float16, BFloat16>(*m, *p);
    }
}

// Moves keys and values of the slots `sources` (ascending, none before its destination) to `start`, `start + 1`, ...
void omnidraft_move(const Model* m, char* kv, int capacity, const int* sources, int count, int start) {
    if (m->kind < INT8) return move_slots(*m, (float*)kv, capacity, sources, count, start);
    move_slots(*m, (Float16*)kv, capacity, sources, count, start);
}
}
