// The structures that Python passes (library.py).

#pragma once

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

// Low-rank factors of one layer: each matrix W is W + B A. In the order of LayerMatrix, A is [parts * rank, padded K] of the
// matrices packed in one, and B has blocks of [rank, 16], in the order of the weights' blocks; both are bfloat16.
struct LayerFactors {
    const char *a[4], *b[4];
};

// Factors of all layers.
struct Factors {
    int rank;  // a multiple of RANKS_TOGETHER
    const LayerFactors* layer;
};

// A tree of ids behind the first `length` ids of a text.
struct Text {
    int length, capacity;
    const int* parents;  // of all nodes; -1 is the text's last id
    char* kv;
    const Factors* factors;  // added to the weights for this text's rows; or null
};

// Rows of one or more texts. Row r is node `nodes[r]` of text `texts[r]`; every node without keys must be among them.
struct Pass {
    int rows, logit_rows, capacity, rank, threads;  // the largest capacity of a text, and the largest rank
    const int *ids, *texts, *nodes;                 // [rows]
    const Text* text;
    char* scratch;
    float* logits;  // [logit_rows, V] of the last rows
    float* hidden;  // [logit_rows, H], the normed inputs of the head; or null
};

enum WeightFormat { FLOAT32, BFLOAT16, INT8, INT4 };
}
