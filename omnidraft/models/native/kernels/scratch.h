// The buffers of a pass, inside memory that the caller lends.

#pragma once

#include "experts.h"
#include "factors.h"
#include "interface.h"
#include "multiply.h"
#include "work_queue.h"

namespace {

// Rows that each thread prepares for itself, since waiting for the others takes longer; query heads attended at once.
constexpr int MAX_THREAD_ROWS = 4, MAX_GROUP = 3;

// Widths of rows between stages, enough for every layer.
struct Sizes {
    int hidden, qkv = 0, attended = 0, mlp, inputs, widest;
    explicit Sizes(const Model& m)
        : hidden(padded(m.hidden)), mlp(padded(m.layer_inputs)), inputs(padded(m.num_layers * m.layer_inputs)) {
        for (const Layer* layer = m.layer; layer < m.layer + m.num_layers; layer++) {
            qkv = std::max(qkv, padded((m.num_query_heads + 2 * layer->num_key_heads) * layer->head_size));
            attended = std::max(attended, padded(m.num_query_heads * layer->head_size));
            mlp = std::max({mlp, padded(layer->mlp), padded(layer->expert_mlp)});
        }
        widest = std::max({hidden, attended, mlp});
    }
};

// The buffers of one pass inside the caller's scratch memory.
struct Scratch {
    float *x, *qkv, *attended, *mlp;
    float* product;  // of a branch, before it is added
    float* inputs;   // of all layers, their own
    Experts experts;
    float *expert_mlp, *expert_product, *expert_scores;  // of each assignment, and the scores of this thread's row
    float *expert_input, *dense;                         // what experts read; what the MLP beside them gives
    char* expert_rows;
    char* shared_rows;
    float* shared_reduced;                         // the rows' inputs times the A of their factors
    float *thread_row, *thread_reduced, *scores;  // of this thread
    char* thread_rows;
    bool* masked;
    WorkQueue* queues;  // of the matrices of a pass
    size_t bytes;

    Scratch(const Model& m, char* memory, int rows, int capacity, int rank, int thread, int threads) {
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
        product = floats((size_t)rows * size.hidden);
        inputs = floats((size_t)rows * size.inputs);
        queues = (WorkQueue*)take((size_t)num_matrices(m) * sizeof(WorkQueue));
        int assignments = rows * m.experts_per_row;
        auto integers = [&](int count) { return (int*)take(count * sizeof(int)); };
        experts = {integers(assignments), floats(assignments), integers(1), integers(m.num_experts),
                   integers(m.num_experts + 1), integers(assignments), integers(assignments)};
        expert_mlp = floats((size_t)assignments * size.mlp);
        expert_product = floats((size_t)assignments * size.hidden);
        expert_input = floats(m.num_experts ? (size_t)rows * size.hidden : 0);
        dense = floats(m.num_experts ? (size_t)rows * size.hidden : 0);
        if (assignments) expert_rows = take(prepared_bytes(assignments, std::max(size.hidden, size.mlp)));
        shared_rows = take(prepared_bytes(rows, size.widest));
        shared_reduced = floats((size_t)rows * MAX_PARTS * rank);
        for (int t = 0; t < threads; t++) {
            float* row = floats(size.widest);
            char* rows_of_thread = take(prepared_bytes(MAX_THREAD_ROWS, size.widest));
            float* reduced = floats((size_t)MAX_THREAD_ROWS * MAX_PARTS * rank);
            float* weights = floats((size_t)MAX_GROUP * capacity);
            char* slots = take(capacity);
            float* scores_of_row = floats(m.num_experts);
            if (t != thread) continue;
            thread_row = row, thread_rows = rows_of_thread, thread_reduced = reduced;
            scores = weights, masked = (bool*)slots, expert_scores = scores_of_row;
        }
        bytes = next - memory;
    }
    static int num_matrices(const Model& m) { return 8 * m.num_layers + 2; }
};

}  // namespace
