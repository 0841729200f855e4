// The stages of a pass, computed by all threads together.

#pragma once

#include <omp.h>

#include "attention.h"
#include "barrier.h"
#include "factors.h"
#include "interface.h"
#include "multiply.h"
#include "scratch.h"
#include "work_queue.h"

namespace {

// W, Head, T, E: formats of the matrices, the head, the keys and values, and the embeddings.
template <class W, class Head, class T, class E> struct Forward {
    const Model& m;
    const Pass& p;
    int thread, threads, number_of_matrix = 0;
    Sizes size;
    Scratch s;
    Barrier& all_threads;

    Forward(const Model& model, const Pass& pass, int thread, int threads, Barrier& all_threads)
        : m(model), p(pass), thread(thread), threads(threads), size(model),
          s(model, pass.scratch, pass.rows, pass.capacity, pass.rank, thread, threads), all_threads(all_threads) {}

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

    void barrier() { all_threads.wait(threads); }

    void embed() {
        for (int row = share(p.rows, thread, threads); row < share(p.rows, thread + 1, threads); row++) {
            const E* from = (const E*)m.embedding + (size_t)p.ids[row] * m.hidden;
            float* to = s.x + row * size.hidden;
            std::fill(to + m.hidden, to + size.hidden, 0.f);
            for (int i = 0; i < m.hidden; i++) to[i] = widen_scalar(from + i);
        }
    }

    bool is_shared() const { return p.rows > MAX_THREAD_ROWS; }
    float* reduced(int row) const {
        return (is_shared() ? s.shared_reduced : s.thread_reduced) + (size_t)row * MAX_PARTS * p.rank;
    }

    // Prepares rows as inputs of a matrix: few rows by each thread for itself, many by all threads together.
    template <class To = W, class Make> const char* prepare(MatrixPlace at, int k, int first, Make make) {
        char* to = is_shared() ? s.shared_rows : s.thread_rows;
        int count = p.rows - first;
        int begin = is_shared() ? share(count, thread, threads) : 0;
        int end = is_shared() ? share(count, thread + 1, threads) : count;
        for (int row = begin; row < end; row++) {
            const float* x = make(first + row);
            To::prepare(x, k, to + row * To::row_bytes(k));
            const Factors* factors = text(first + row).factors;
            if (factors && at.matrix != NONE) reduce(*factors, at, x, k, reduced(first + row));
        }
        if (is_shared()) barrier();
        return to;
    }
    // `copies` gets the normed rows too, unless it is null.
    template <class To = W>
    const char* normed(MatrixPlace at, const float* weight, int first = 0, float* copies = nullptr) {
        bool copy = copies && (is_shared() || thread == 0);
        return prepare<To>(at, m.hidden, first, [&](int row) {
            const float* x = s.x + row * size.hidden;
            Floats squares{};
            for (int i = 0; i < size.hidden; i += LANES) squares = fma(widen(x + i), widen(x + i), squares);
            float factor = 1 / std::sqrt(horizontal_sum(squares) / m.hidden + m.eps);
            for (int i = 0; i < size.hidden; i += LANES)
                store(s.thread_row + i, widen(x + i) * factor * widen(weight + i));
            if (copy) std::memcpy(copies + (size_t)(row - first) * m.hidden, s.thread_row, sizeof(float) * m.hidden);
            return s.thread_row;
        });
    }
    const char* prepared(MatrixPlace at, const float* from, int k) {
        return prepare(at, k, 0, [&](int row) { return from + row * padded(k); });
    }

    template <class From = W, class Write>
    void matrix(const char* weights, int num_blocks, const char* rows, int count, int k, Write write, int unit = 1) {
        s.queues[number_of_matrix++].take_all(num_blocks / unit, From::MIN_BLOCKS, threads, [&](int first, int last) {
            From::multiply_all(weights, first * unit, last * unit, rows, count, k, write);
        });
    }
    // Multiplies by a matrix of a layer, and adds what the factors of each row's text give.
    template <class Write>
    void layer_matrix(MatrixPlace at, const char* weights, int num_blocks, const char* rows, int k, Write write,
                      int unit = 1) {
        auto write_sum = [=](int block, int row, Floats low, Floats high) {
            if (const Factors* factors = text(row).factors) expand(m, *factors, at, block, reduced(row), low, high);
            write(block, row, low, high);
        };
        matrix(weights, num_blocks, rows, p.rows, k, write_sum, unit);
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
        const char* rows = normed({number, QKV}, layer.norm);
        layer_matrix({number, QKV}, layer.qkv, blocks((m.num_query_heads + 2 * m.num_key_heads) * d), rows, m.hidden,
                     write_to(s.qkv, size.qkv));
        barrier();
        rotate_and_store(number);
        barrier();
        attend_all(number);
        barrier();
        rows = prepared({number, OUT}, s.attended, m.num_query_heads * d);
        layer_matrix({number, OUT}, layer.out, blocks(m.hidden), rows, m.num_query_heads * d, add_to_x());
        barrier();
    }
    void feed_forward(int number) {
        const Layer& layer = m.layer[number];
        const char* rows = normed({number, GATE_UP}, layer.mlp_norm);
        auto gate_then_up = [this](int block, int row, Floats low, Floats high) {
            float* at = s.mlp + (size_t)row * size.mlp + block / 2 * BLOCK;
            if (block % 2)
                store(at, widen(at) * low), store(at + LANES, widen(at + LANES) * high);
            else
                store(at, low / (1.f + fast_exp(-low))), store(at + LANES, high / (1.f + fast_exp(-high)));
        };
        layer_matrix({number, GATE_UP}, layer.gate_up, 2 * blocks(m.mlp), rows, m.hidden, gate_then_up, 2);
        barrier();
        rows = prepared({number, DOWN}, s.mlp, m.mlp);
        layer_matrix({number, DOWN}, layer.down, blocks(m.hidden), rows, m.mlp, add_to_x());
        barrier();
    }
    void logits() {
        const char* rows = normed<Head>({0, NONE}, m.norm, p.rows - p.logit_rows, p.hidden);
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
        if (thread == 0)
            for (int i = 0; i < Scratch::num_matrices(m); i++) s.queues[i].next = 0;
        embed();
        clear_padding();
        barrier();
        for (int number = 0; number < m.num_layers; number++) {
            attention(number);
            feed_forward(number);
        }
        if (p.logit_rows) logits();
        barrier();  // before OpenMP's own at the end
    }
};

template <class W, class Head, class T, class E> void forward(const Model& m, const Pass& p) {
    Barrier all_threads;
#pragma omp parallel num_threads(p.threads)
    Forward<W, Head, T, E>(m, p, omp_get_thread_num(), omp_get_num_threads(), all_threads).run();
}

}  // namespace
