// One forward pass of a decoder over a few rows, for one instruction set; weights are read from memory once for
// all rows of a pass.
//
// Shapes: R rows, H hidden size, Q query heads, K key heads, D head size, M mlp size, V vocabulary, C slots, L layers;
// N output channels and K inputs of a matrix.
// The result of a row depends only on the text before it: neither on the other rows, nor on the slots of that text's
// keys (which ascend along it), nor on the number of threads. Nor does it depend on the instruction set, except for
// bfloat16 weights in instructions for bfloat16. Vectors between stages are padded to whole groups.

#include <time.h>

#include "forward.h"
#include "ranking.h"

namespace {

template <class W> void pack(const float* weights_NK, int n, int k, char* to, int stride, int offset) {
#pragma omp parallel for
    for (int block = 0; block < blocks(n); block++)
        W::pack(weights_NK, n, k, block * BLOCK, to + (size_t)(block * stride + offset) * block_bytes<W>(k));
}

template <class T> void move_slots(const Model& m, T* kv, int capacity, const int* sources, int count, int start) {
    for (const Layer* layer = m.layer; layer < m.layer + m.num_layers; layer++) {
        int d = layer->head_size, heads = layer->stores_keys ? 2 * layer->num_key_heads : 0;
        for (int head = 0; head < heads; head++, kv += (size_t)capacity * d)
            for (int n = 0; n < count; n++) {
                int from = sources[n], to = start + n;
                for (int i = 0; i < d; i++)
                    if (head < layer->num_key_heads)
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
    WorkQueue queue{{0}};
    Barrier all_threads;
#pragma omp parallel num_threads(threads)
    {
        int thread = omp_get_thread_num(), count = omp_get_num_threads();
        for (int row = share(rows, thread, count); row < share(rows, thread + 1, count); row++)
            W::prepare(x + (size_t)row * padded(k), k, scratch + row * W::row_bytes(k));
        all_threads.wait(count);
        queue.take_all(blocks(n), W::MIN_BLOCKS, count, [&](int first, int last) {
            W::multiply_all(weights, first, last, scratch, rows, k, [=](int block, int row, Floats low, Floats high) {
                float* at = out + (size_t)row * blocks(n) * BLOCK + block * BLOCK;
                store(at, low), store(at + LANES, high);
            });
        });
        all_threads.wait(count);  // before OpenMP's own at the end
    }
}

double seconds(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

// Adds the time of its life, and the calling thread's processor time meanwhile, to `spent_s`.
struct Stopwatch {
    double* spent_s;
    double started_s = seconds(CLOCK_MONOTONIC), computed_s = seconds(CLOCK_THREAD_CPUTIME_ID);
    ~Stopwatch() {
        spent_s[0] += seconds(CLOCK_MONOTONIC) - started_s;
        spent_s[1] += seconds(CLOCK_THREAD_CPUTIME_ID) - computed_s;
    }
};

}  // namespace

extern "C" {

// Called before all others; 0 if the system refuses this build's instructions to this process.
int omnidraft_start() { return allow_instructions(); }

// Names the bits of the products of a format: equal names, equal bits.
const char* omnidraft_bits(int kind) {
    switch (kind) {
        case FLOAT32: return "portable";
        case BFLOAT16: return Bfloat16Matrix::BITS_NAME;
        default: return "portable-bytes";
    }
}

size_t omnidraft_packed_bytes(int kind, int n, int k) {
    switch (kind) {
        case FLOAT32: return blocks(n) * block_bytes<Float32Weights>(k);
        case BFLOAT16: return blocks(n) * block_bytes<Bfloat16Matrix>(k);
        case INT4: return blocks(n) * block_bytes<Int4Matrix>(k);
        default: return blocks(n) * block_bytes<Int8Matrix>(k);
    }
}

// Writes the blocks of weights [N, K] to the blocks `offset`, `offset + stride`, ... of `to`.
void omnidraft_pack(int kind, const float* weights_NK, int n, int k, char* to, int stride, int offset) {
    switch (kind) {
        case FLOAT32: return pack<Float32Weights>(weights_NK, n, k, to, stride, offset);
        case BFLOAT16: return pack<Bfloat16Matrix>(weights_NK, n, k, to, stride, offset);
        case INT4: return pack<Int4Matrix>(weights_NK, n, k, to, stride, offset);
        default: return pack<Int8Matrix>(weights_NK, n, k, to, stride, offset);
    }
}

size_t omnidraft_linear_scratch_bytes(int rows, int k) { return prepared_bytes(rows, k); }

// `scratch` has omnidraft_linear_scratch_bytes.
void omnidraft_linear(int kind, const char* weights, const float* x, int rows, int n, int k, char* scratch, float* out,
                      int threads, double* spent_s) {
    Stopwatch watch{spent_s};
    switch (kind) {
        case FLOAT32: return linear<Float32Weights>(weights, x, rows, n, k, scratch, out, threads);
        case BFLOAT16: return linear<Bfloat16Matrix>(weights, x, rows, n, k, scratch, out, threads);
        case INT4: return linear<Int4Matrix>(weights, x, rows, n, k, scratch, out, threads);
        default: return linear<Int8Matrix>(weights, x, rows, n, k, scratch, out, threads);
    }
}

size_t omnidraft_scratch_bytes(const Model* m, int rows, int capacity, int rank, int threads) {
    return Scratch(*m, nullptr, rows, capacity, rank, 0, threads).bytes;
}

void omnidraft_forward(const Model* m, const Pass* p, double* spent_s) {
    Stopwatch watch{spent_s};
    switch (m->kind) {
        case FLOAT32: return forward<Float32Weights, Float32Weights, float, float>(*m, *p);
        case BFLOAT16: return forward<Bfloat16Matrix, Bfloat16Matrix, float, BFloat16>(*m, *p);
        case INT4: return forward<Int4Matrix, Int8Matrix, Float16, BFloat16>(*m, *p);
        default: return forward<Int8Matrix, Int8Matrix, Float16, BFloat16>(*m, *p);
    }
}

// Ranks logits [size]; `first` [num_known] has the first target token of each id, `num_target` where there is none.
void omnidraft_rank(const float* logits, int size, const int64_t* first, int num_known, int num_target, Ranking* to) {
    rank(logits, size, first, num_known, num_target, *to);
}

// Moves keys and values of the slots `sources` (ascending, none before its destination) to `start`, `start + 1`, ...
void omnidraft_move(const Model* m, char* kv, int capacity, const int* sources, int count, int start) {
    if (m->kind < INT8) return move_slots(*m, (float*)kv, capacity, sources, count, start);
    move_slots(*m, (Float16*)kv, capacity, sources, count, start);
}
}
