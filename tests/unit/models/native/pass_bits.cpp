// Prints a hash of what a build of the kernels packs and computes, for each format: whole matrices, and passes of a small
// random model over a prompt and a tree. Equal bits give equal lines on any processor.

#include <cstdio>
#include <vector>

#include "kernels.cpp"

namespace {

struct Random {
    uint64_t state = 42;
    float next() {  // in [-1, 1)
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (float)(int32_t)(state >> 32) * 0x1p-31f;
    }
    std::vector<float> numbers(size_t count, float scale) {
        std::vector<float> all(count);
        for (float& each : all) each = next() * scale;
        return all;
    }
};

struct Hash {
    uint64_t value = 14695981039346656037u;
    void add(const void* from, size_t bytes) {
        for (size_t i = 0; i < bytes; i++) value = (value ^ ((const unsigned char*)from)[i]) * 1099511628211u;
    }
};

using Packed = std::vector<char>;

Packed packed(int kind, const std::vector<float>& weights, int n, int k) {
    Packed to(omnidraft_packed_bytes(kind, n, k) + 32768);  // prefetching reads nothing, but may look behind the end
    omnidraft_pack(kind, weights.data(), n, k, to.data(), 1, 0);
    return to;
}

void print_matrix(int kind, int n, int k, int rows) {
    Random random;
    Packed weights = packed(kind, random.numbers((size_t)n * k, .1f), n, k);
    std::vector<float> x((size_t)rows * padded(k)), out((size_t)rows * blocks(n) * BLOCK);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < k; i++) x[(size_t)row * padded(k) + i] = random.next() * 3;
    Packed scratch(omnidraft_linear_scratch_bytes(rows, k));
    double spent_s[2] = {};
    omnidraft_linear(kind, weights.data(), x.data(), rows, n, k, scratch.data(), out.data(), 2, spent_s);
    Hash hash;
    hash.add(weights.data(), omnidraft_packed_bytes(kind, n, k));
    hash.add(out.data(), out.size() * sizeof(float));
    printf("matrix %d of %d x %d, %d rows: %016llx\n", kind, n, k, rows, (unsigned long long)hash.value);
}

void print_pass(int kind) {
    constexpr int LAYERS = 2, HIDDEN = 96, QUERIES = 4, KEYS = 2, D = 32, MLP = 160, VOCABULARY = 50, SLOTS = 64;
    Random random;
    std::vector<std::vector<float>> floats;
    std::vector<Packed> matrices;
    auto numbers = [&](size_t count, float scale) {
        floats.push_back(random.numbers(count, scale));
        return floats.back().data();
    };
    auto matrix = [&](int of, int n, int k) {
        matrices.push_back(packed(of, random.numbers((size_t)n * k, .1f), n, k));
        return matrices.back().data();
    };
    Layer layers[LAYERS];
    for (Layer& layer : layers)
        layer = {numbers(padded(HIDDEN), 1), numbers(padded(HIDDEN), 1), numbers((QUERIES + 2 * KEYS) * D, .5f),
                 matrix(kind, (QUERIES + 2 * KEYS) * D, HIDDEN), matrix(kind, HIDDEN, QUERIES * D),
                 matrix(kind, 2 * MLP, HIDDEN), matrix(kind, HIDDEN, MLP)};
    std::vector<BFloat16> halves(VOCABULARY * HIDDEN);
    const float* embedding = numbers(VOCABULARY * HIDDEN, 1);
    for (size_t i = 0; i < halves.size(); i++) narrow(embedding[i], &halves[i]);
    Model model{kind, LAYERS, HIDDEN, QUERIES, KEYS, D, MLP, VOCABULARY, 1e-5f, .18f, layers, numbers(padded(HIDDEN), 1),
                matrix(kind == INT4 ? INT8 : kind, VOCABULARY, HIDDEN),
                kind == FLOAT32 ? (const char*)embedding : (const char*)halves.data(), numbers(SLOTS * D / 2, 1),
                numbers(SLOTS * D / 2, 1)};
    std::vector<char> kv((size_t)LAYERS * 2 * KEYS * SLOTS * D * sizeof(float));
    int parents[] = {-1, 0, 0, 1, 1, 2, 5, 6, 3}, ids[9], texts[9] = {}, nodes[9], chain[9];
    for (int row = 0; row < 9; row++) ids[row] = row * 5 % VOCABULARY, nodes[row] = row, chain[row] = row - 1;
    Packed scratch(omnidraft_scratch_bytes(&model, 9, SLOTS, 0, 2) + 64);
    char* aligned = scratch.data() + (64 - (uintptr_t)scratch.data() % 64) % 64;
    std::vector<float> logits(9 * VOCABULARY), hidden(9 * HIDDEN);
    Hash hash;
    for (int length : {0, 9}) {  // a prompt, then a tree behind it
        Text text{length, SLOTS, length ? parents : chain, kv.data(), nullptr};
        Pass pass{9, 9, SLOTS, 0, 2, ids, texts, nodes, &text, aligned, logits.data(), hidden.data()};
        double spent_s[2] = {};
        omnidraft_forward(&model, &pass, spent_s);
        hash.add(logits.data(), logits.size() * sizeof(float));
        hash.add(hidden.data(), hidden.size() * sizeof(float));
    }
    printf("passes %d: %016llx, first logit %a\n", kind, (unsigned long long)hash.value, logits[0]);
}

}  // namespace

int main() {
    omnidraft_start();
    for (int kind : {FLOAT32, BFLOAT16, INT8, INT4}) {
        printf("%s\n", omnidraft_bits(kind));
        for (int rows : {1, 2, 3, 4, 5, 9}) {
            print_matrix(kind, 40, 300, rows);
            print_matrix(kind, 16, 256, rows);
        }
        print_pass(kind);
    }
}
