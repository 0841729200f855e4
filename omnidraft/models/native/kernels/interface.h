// The structures that Python passes (library.py).

#pragma once

#include <cstdint>

extern "C" {

// What is null is not there. A norm's weights [padded width] are followed by its bias where `norms_have_mean`.
struct Layer {
    const float *norm, *post_norm, *mlp_norm, *post_mlp_norm;  // of what attention and MLP read, and of what they give
    const float *post_input_norm, *post_dense_norm;             // of what the layer's own inputs, and the MLP beside experts give
    const float *expert_norm, *post_expert_norm, *router_norm;  // of what experts read and give, and the router reads
    const float *query_norm, *key_norm, *value_norm;            // [D], or of all heads together
    const float *bias, *out_bias, *gate_up_bias, *down_bias;    // in the order of the matrices' blocks
    const float *cos, *sin;                                     // [positions, rotated / 2]; of long texts behind those of short ones
    const float* sinks;                                         // [Q], a score for each head that no value has
    const float *router, *router_bias;                          // [experts, padded H], and [experts] or null
    const float *choice_bias, *expert_scale;                    // [experts], of scores that choose; of what each gives
    const float* dense_gate;                                    // [padded H]: the share of the MLP beside experts
    const float *expert_gate_up_bias, *expert_down_bias;
    const char *qkv, *out, *gate_up, *down;
    const char *expert_gate_up, *expert_down;                   // of all experts, one after the other
    const char *input_gate, *input_out;                         // of the layer's own inputs
    int num_key_heads, head_size, mlp, expert_mlp;
    int rotated;       // leading values of a head that are rotated
    int window;        // positions that a row sees, its own included; 0: all
    int stores_keys;   // otherwise `qkv` has queries alone, which see the keys of another layer
    int first_value;   // of those keys in a slot
    float scale;       // of what leaves the layer
};

// Model::activation, of the gate.
enum Activation { SILU, GELU_TANH, GELU, SQUARED_RELU, CLAMPED_SWIGLU };  // the last is that of gpt-oss

struct Model {
    int kind, num_layers, hidden, num_query_heads, vocabulary;
    int layer_inputs;                               // the size of a layer's own inputs; 0: none
    int activation, is_gated;                       // without a gate the MLP is down(activation(up(x)))
    int norms_have_mean;                            // LayerNorm instead of RMSNorm
    int norms_whole, norms_rotated;                 // query_norm and key_norm: of all heads together; behind the rotation
    int is_parallel;                                // the MLP reads what attention reads
    int num_experts, experts_per_row;               // 0: none
    int shares_are_whole;                           // of a row's experts: they sum to 1
    int scores_are_sigmoid;                         // of experts, instead of softmax
    float eps, scaling;                             // of scores
    float embedding_scale, residual_scale, logit_scale;
    float score_cap, logit_cap;                     // x becomes cap tanh(x / cap); 0: no cap
    const Layer* layer;
    const float* norm;
    const char *head, *embedding;
    const float* query_scale;  // [positions], or null
    const char *input_embedding, *input_projection;  // of all layers' own inputs, [V, L * size] and of [L * size, H]
    const float* input_norm;                         // [size], of what is projected
};

// Low-rank factors of one layer: each matrix W is W + B A. In the order of LayerMatrix, A is [parts * rank, padded K] of the
// matrices packed in one, and B has blocks of [rank, 16], in the order of the weights' blocks; both are bfloat16.
struct LayerFactors {
    const char *a[6], *b[6];
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
    int rotation_offset;     // of its first position in `cos` and `sin`
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

const int RANKED = 128;  // a drafter's most probable ids that are ranked

// A drafter's most probable ids that become target tokens, best first, and the first target tokens of these.
struct Ranking {
    int num_ids, num_targets;
    int64_t ids[RANKED], targets[RANKED], firsts[RANKED];  // `firsts`: the number of the best id of each target token
    double q[RANKED], target_q[RANKED];
    double max_logit;  // NaN where a logit is; without a finite one nothing is ranked
};
}
