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
    T* keys(int row, const Layer& layer, int head) const {
        return (T*)text(row).kv + (size_t)(layer.first_value + head * layer.head_size) * text(row).capacity;
    }
    T* values(int row, const Layer& layer, int head) const { return keys(row, layer, layer.num_key_heads + head); }

    void barrier() { all_threads.wait(threads); }
    // Runs this thread's share of so many tasks.
    template <class Run> void share_of(int count, Run run) const {
        for (int at = share(count, thread, threads); at < share(count, thread + 1, threads); at++) run(at);
    }

    void embed() {
        share_of(p.rows, [&](int row) {
            const E* from = (const E*)m.embedding + (size_t)p.ids[row] * m.hidden;
            float* to = s.x + row * size.hidden;
            std::fill(to + m.hidden, to + size.hidden, 0.f);
            for (int i = 0; i < m.hidden; i++) to[i] = widen_scalar(from + i) * m.embedding_scale;
        });
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
            if (factors && at.matrix != NONE) reduce(m, *factors, at, x, k, reduced(first + row));
        }
        if (is_shared()) barrier();
        return to;
    }
    // Norms `size` values of x; the factor is that of `width` values at `from`, of which x may be a part.
    void norm_row(const float* x, const float* weight, int size, const float* from, int width, float* to) const {
        Floats sum{}, squares{};
        if (m.norms_have_mean)
            for (int i = 0; i < width; i += LANES) sum += widen(from + i);
        float mean = horizontal_sum(sum) / width;
        for (int i = 0; i < width; i += LANES)
            squares = fma(widen(from + i) - mean, widen(from + i) - mean, squares);
        float factor = 1 / std::sqrt(horizontal_sum(squares) / width + m.eps);
        for (int i = 0; i < size; i += LANES) {
            Floats normed = (widen(x + i) - mean) * factor * widen(weight + i);
            store(to + i, m.norms_have_mean ? normed + widen(weight + size + i) : normed);
        }
    }
    void norm_hidden(const float* x, const float* weight, float* to) const {
        norm_row(x, weight, size.hidden, x, m.hidden, to);
    }
    // `copies` gets the normed rows too, unless it is null.
    template <class To = W>
    const char* normed(MatrixPlace at, const float* weight, int first = 0, float* copies = nullptr) {
        bool copy = copies && (is_shared() || thread == 0);
        return prepare<To>(at, m.hidden, first, [&](int row) -> const float* {
            const float* x = s.x + row * size.hidden;
            if (weight) norm_hidden(x, weight, s.thread_row), x = s.thread_row;
            if (copy) std::memcpy(copies + (size_t)(row - first) * m.hidden, x, sizeof(float) * m.hidden);
            return x;
        });
    }
    const char* prepared(MatrixPlace at, const float* from, int k, int stride) {
        return prepare(at, k, 0, [&](int row) { return from + (size_t)row * stride; });
    }

    template <class From = W, class Write>
    void matrix(const char* weights, int num_blocks, const char* rows, int count, int k, Write write, int unit = 1) {
        s.queues[number_of_matrix++].take_all(num_blocks / unit, From::MIN_BLOCKS, threads, [&](int first, int last) {
            From::multiply_all(weights, first * unit, last * unit, rows, count, k, write);
        });
    }
    // Multiplies by a matrix of a layer, and adds what the factors of each row's text give, and the bias.
    template <class Write>
    void layer_matrix(MatrixPlace at, const char* weights, const float* bias, int num_blocks, const char* rows, int k,
                      Write write, int unit = 1) {
        auto write_sum = [=](int block, int row, Floats low, Floats high) {
            if (const Factors* factors = text(row).factors) expand(m, *factors, at, block, reduced(row), low, high);
            if (bias) low += widen(bias + block * BLOCK), high += widen(bias + block * BLOCK + LANES);
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
    // Adds to x, with what a parallel branch gave.
    auto add_to_x(const float* parallel = nullptr) {
        return [=, this](int block, int row, Floats low, Floats high) {
            float* at = s.x + row * size.hidden + block * BLOCK;
            if (parallel) {
                const float* other = parallel + row * size.hidden + block * BLOCK;
                low += widen(other), high += widen(other + LANES);
            }
            store(at, widen(at) + m.residual_scale * low);
            store(at + LANES, widen(at + LANES) + m.residual_scale * high);
        };
    }
    // Multiplies by the last matrix of a branch, whose product is normed, or waits for the other branch, or is added.
    void end_branch(MatrixPlace at, const char* weights, const float* bias, const char* rows, int k, const float* norm,
                    float scale = 1) {
        bool waits = m.is_parallel && at.matrix == OUT;
        auto multiply = [&](auto write) { layer_matrix(at, weights, bias, blocks(m.hidden), rows, k, write); };
        if (norm || waits)
            multiply(write_to(s.product, size.hidden));
        else
            multiply(add_to_x(m.is_parallel ? s.product : nullptr));
        barrier();
        if (!norm) return;
        share_of(p.rows, [&](int row) {
            float *x = s.x + row * size.hidden, *product = s.product + row * size.hidden;
            norm_hidden(product, norm, product);
            for (int i = 0; i < size.hidden; i += LANES)
                store(x + i, scale * (widen(x + i) + m.residual_scale * widen(product + i)));
        });
        barrier();
    }

    void rotate(float* x, const Layer& layer, int at) const {
        int half = layer.rotated / 2;
        const float *cos = layer.cos + (size_t)at * half, *sin = layer.sin + (size_t)at * half;
        for (int i = 0; i < half; i += LANES) {
            Floats a = widen(x + i), b = widen(x + half + i), c = widen(cos + i), d = widen(sin + i);
            store(x + i, a * c - b * d), store(x + half + i, b * c + a * d);
        }
    }
    // Norms and rotates one of the `count` heads that begin at `first`.
    void norm_and_rotate(const float* first, int head, int count, const Layer& layer, const float* norm, int row,
                         float* to) const {
        int d = layer.head_size;
        auto norm_head = [&](const float* x) {
            if (m.norms_whole)
                norm_row(x, norm + head * d, d, first, count * d, to);
            else
                norm_row(x, norm, d, x, d, to);
        };
        if (norm && !m.norms_rotated)
            norm_head(first + head * d);
        else
            std::memcpy(to, first + head * d, sizeof(float) * d);
        if (layer.cos) rotate(to, layer, text(row).rotation_offset + position(row));
        if (norm && m.norms_rotated) norm_head(to);
    }

    // Writes queries where attention reads them, and then writes what it gives; and keys and values to their slots.
    void rotate_and_store(int number) {
        const Layer& layer = m.layer[number];
        int queries = m.num_query_heads, keys = layer.num_key_heads, d = layer.head_size;
        int heads = queries + (layer.stores_keys ? 2 * keys : 0);
        share_of(p.rows * heads, [&](int task) {
            int row = task / heads, head = task % heads;
            const float* x = s.qkv + (size_t)row * size.qkv;
            if (head < queries) {
                float* to = s.attended + (size_t)row * size.attended + head * d;
                norm_and_rotate(x, head, queries, layer, layer.query_norm, row, to);
                float scaling = m.scaling * (m.query_scale ? m.query_scale[position(row)] : 1.f);
                for (int i = 0; i < d; i++) to[i] *= scaling;
            } else if ((head -= queries) < keys) {
                norm_and_rotate(x + queries * d, head, keys, layer, layer.key_norm, row, s.thread_row);
                store_key(s.thread_row, this->keys(row, layer, head), slot(row), d);
            } else {
                head -= keys;
                x += (queries + keys + head) * d;
                if (layer.value_norm) norm_row(x, layer.value_norm, d, x, d, s.thread_row), x = s.thread_row;
                T* to = values(row, layer, head) + (size_t)slot(row) * d;
                for (int i = 0; i < d; i++) narrow(x[i], to + i);
            }
        });
    }
    void store_key(const float* x, T* keys, int slot, int d) const {
        T* to = keys + (size_t)slot / LANES * LANES * d + slot % LANES;
        for (int i = 0; i < d; i++) narrow(x[i], to + i * LANES);
    }

    void attend_all(int number) {
        const Layer& layer = m.layer[number];
        int group = m.num_query_heads / layer.num_key_heads;
        share_of(p.rows * layer.num_key_heads, [&](int task) {
            int row = task % p.rows, key = task / p.rows;
            Visible sees = visible(row, layer.window);
            for (int head = key * group; head < (key + 1) * group; head += MAX_GROUP)
                attend_heads(layer, row, sees, key, head, std::min(MAX_GROUP, (key + 1) * group - head));
        });
    }
    // Masks all nodes but the row's ancestors within its window; returns what it sees.
    Visible visible(int row, int window) const {
        int at = position(row), first = window ? std::max(at + 1 - window, 0) : 0;
        std::fill(s.masked, s.masked + node(row) + 1, true);
        for (int each = node(row); each >= 0 && at >= first; each = text(row).parents[each], at--) s.masked[each] = false;
        return {first, text(row).length, slot(row) + 1, s.masked};
    }
    void attend_heads(const Layer& layer, int row, const Visible& sees, int key, int head, int count) {
        float* heads = s.attended + (size_t)row * size.attended + head * layer.head_size;
        const float* sinks = layer.sinks;
        auto run = [&](auto attend) {
            attend(heads, keys(row, layer, key), values(row, layer, key), sees, sinks ? sinks + head : nullptr, m.score_cap,
                   layer.head_size, s.scores, p.capacity, heads);
        };
        switch (count) {
            case 1: run(attend<T, 1>); break;
            case 2: run(attend<T, 2>); break;
            default: run(attend<T, MAX_GROUP>);
        }
    }

    // Widths that differ from layer to layer are whole groups and have no padding.
    void clear_padding() {
        for (int row = thread; row < p.rows; row += threads) {
            float* attended = s.attended + (size_t)row * size.attended;
            std::fill(attended + m.num_query_heads * m.layer->head_size, attended + size.attended, 0.f);
            float* mlp = s.mlp + (size_t)row * size.mlp;
            std::fill(mlp + m.layer->mlp, mlp + size.mlp, 0.f);
            float* product = s.product + (size_t)row * size.hidden;
            std::fill(product + m.hidden, product + size.hidden, 0.f);
        }
    }

    void attention(int number) {
        const Layer& layer = m.layer[number];
        int attended = m.num_query_heads * layer.head_size;
        int stored = layer.stores_keys ? 2 * layer.num_key_heads * layer.head_size : 0;
        const char* rows = normed({number, QKV}, layer.norm);
        layer_matrix({number, QKV}, layer.qkv, layer.bias, blocks(attended + stored), rows, m.hidden,
                     write_to(s.qkv, size.qkv));
        barrier();
        rotate_and_store(number);
        barrier();
        attend_all(number);
        barrier();
        rows = prepared({number, OUT}, s.attended, attended, size.attended);
        end_branch({number, OUT}, layer.out, layer.out_bias, rows, attended, layer.post_norm);
    }
    Floats activated(Floats x) const {
        switch (m.activation) {
            case SILU: return x / (1.f + fast_exp(-x));
            case GELU_TANH: return x / (1.f + fast_exp(-1.59576912f * x * (1.f + .044715f * x * x)));
            case GELU: return x * normal_cdf(x);
            case CLAMPED_SWIGLU: x = vmin(x, splat(7.f)); return x / (1.f + fast_exp(-1.702f * x));
            default: x = vmax(x, Floats{}); return x * x;
        }
    }
    auto write_activated(float* to) {
        int parts = m.is_gated ? 2 : 1;
        return [=, this](int block, int row, Floats low, Floats high) {
            float* at = to + (size_t)row * size.mlp + block / parts * BLOCK;
            if (block % parts)
                store(at, widen(at) * gated(low)), store(at + LANES, widen(at + LANES) * gated(high));
            else
                store(at, activated(low)), store(at + LANES, activated(high));
        };
    }
    Floats gated(Floats up) const {
        return m.activation == CLAMPED_SWIGLU ? vmin(vmax(up, splat(-7.f)), splat(7.f)) + 1.f : up;
    }
    void feed_forward(int number) {
        const Layer& layer = m.layer[number];
        if (layer.gate_up) {
            int parts = m.is_gated ? 2 : 1;
            const char* rows = normed({number, GATE_UP}, layer.mlp_norm);
            layer_matrix({number, GATE_UP}, layer.gate_up, layer.gate_up_bias, parts * blocks(layer.mlp), rows, m.hidden,
                         write_activated(s.mlp), parts);
            barrier();
            MatrixPlace down{number, DOWN};
            rows = prepared(down, s.mlp, layer.mlp, size.mlp);
            if (layer.router)
                layer_matrix(down, layer.down, layer.down_bias, blocks(m.hidden), rows, layer.mlp,
                             write_to(s.dense, size.hidden));
            else
                end_branch(down, layer.down, layer.down_bias, rows, layer.mlp, layer.post_mlp_norm,
                           m.layer_inputs ? 1 : layer.scale);
        }
        if (layer.router) experts(number);
    }
    // Computes the inputs that each layer gets beside what the layer before gives: from the embedding, and from the id.
    void project_inputs() {
        int count = m.num_layers * m.layer_inputs;
        const char* rows = normed({0, NONE}, nullptr);
        matrix<W>(m.input_projection, blocks(count), rows, p.rows, m.hidden, write_to(s.inputs, size.inputs));
        barrier();
        float scale = 1 / std::sqrt((float)m.hidden), embedding_scale = std::sqrt((float)m.layer_inputs);
        share_of(p.rows * m.num_layers, [&](int task) {
            int row = task / m.num_layers, first = task % m.num_layers * m.layer_inputs;
            const E* own = (const E*)m.input_embedding + (size_t)p.ids[row] * count + first;
            float* x = s.inputs + (size_t)row * size.inputs + first;
            for (int i = 0; i < m.layer_inputs; i++) x[i] *= scale;
            norm_row(x, m.input_norm, m.layer_inputs, x, m.layer_inputs, x);
            for (int i = 0; i < m.layer_inputs; i++)
                x[i] = (x[i] + widen_scalar(own + i) * embedding_scale) * std::sqrt(.5f);
        });
        barrier();
    }
    void add_inputs(int number) {
        const Layer& layer = m.layer[number];
        const char* rows = normed({number, INPUT_GATE}, nullptr);
        auto write = [=, this](int block, int row, Floats low, Floats high) {
            const float* own = s.inputs + (size_t)row * size.inputs + number * m.layer_inputs + block * BLOCK;
            float* at = s.mlp + (size_t)row * size.mlp + block * BLOCK;
            store(at, activated(low) * widen(own)), store(at + LANES, activated(high) * widen(own + LANES));
        };
        layer_matrix({number, INPUT_GATE}, layer.input_gate, nullptr, blocks(m.layer_inputs), rows, m.hidden, write);
        barrier();
        rows = prepared({number, INPUT_OUT}, s.mlp, m.layer_inputs, size.mlp);
        end_branch({number, INPUT_OUT}, layer.input_out, nullptr, rows, m.layer_inputs, layer.post_input_norm, layer.scale);
    }
    // Multiplies the rows of each expert by its matrix of `num_blocks` blocks, and adds its bias.
    template <class Write>
    void expert_matrix(const char* weights, const float* bias, int num_blocks, int k, int unit, Write write) {
        const Experts& e = s.experts;
        int all = *e.num_met * num_blocks / unit;
        s.queues[number_of_matrix++].take_all(all, W::MIN_BLOCKS, threads, [&](int first, int last) {
            for (int at = first * unit; at < last * unit;) {
                int n = at / num_blocks, expert = e.met[n], begin = at % num_blocks;
                int end = std::min(num_blocks, begin + last * unit - at), row = e.first[n];
                at += end - begin;
                auto write_sum = [&](int block, int r, Floats low, Floats high) {
                    const float* own = bias ? bias + (expert * num_blocks + block) * BLOCK : nullptr;
                    if (own) low += widen(own), high += widen(own + LANES);
                    write(block, row + r, low, high);
                };
                W::multiply_all(weights + (size_t)expert * num_blocks * block_bytes<W>(k), begin, end,
                                s.expert_rows + row * W::row_bytes(k), e.first[n + 1] - row, k, write_sum);
            }
        });
        barrier();
    }
    void experts(int number) {
        const Layer& layer = m.layer[number];
        const Experts& e = s.experts;
        int parts = m.is_gated ? 2 : 1, assignments = p.rows * m.experts_per_row;
        share_of(p.rows, [&](int row) {
            float *x = s.x + row * size.hidden, *input = s.expert_input + row * size.hidden;
            const float* routed = input;
            norm_hidden(x, layer.expert_norm ? layer.expert_norm : layer.mlp_norm, input);
            if (layer.router_norm) norm_hidden(x, layer.router_norm, s.thread_row), routed = s.thread_row;
            e.choose(m, layer, routed, row, s.expert_scores);
        });
        barrier();
        if (thread == 0) e.assign(m, p.rows);
        barrier();
        share_of(assignments, [&](int at) {
            W::prepare(s.expert_input + e.rows[at] * size.hidden, m.hidden, s.expert_rows + at * W::row_bytes(m.hidden));
        });
        barrier();
        expert_matrix(layer.expert_gate_up, layer.expert_gate_up_bias, parts * blocks(layer.expert_mlp), m.hidden, parts,
                      write_activated(s.expert_mlp));
        share_of(assignments, [&](int at) {
            float* x = s.expert_mlp + (size_t)at * size.mlp;
            std::fill(x + layer.expert_mlp, x + size.mlp, 0.f);
            W::prepare(x, layer.expert_mlp, s.expert_rows + at * W::row_bytes(layer.expert_mlp));
        });
        barrier();
        expert_matrix(layer.expert_down, layer.expert_down_bias, blocks(m.hidden), layer.expert_mlp, 1,
                      write_to(s.expert_product, size.hidden));
        share_of(p.rows, [&](int row) { add_experts(layer, row); });
        barrier();
    }
    // Adds what the experts of a row give, and the MLP beside them.
    void add_experts(const Layer& layer, int row) {
        const Experts& e = s.experts;
        float *x = s.x + row * size.hidden, *sum = s.thread_row, *dense = s.dense + row * size.hidden;
        std::fill(sum + m.hidden, sum + size.hidden, 0.f);
        for (int i = 0; i < m.hidden; i += LANES) {
            Floats both{};
            for (int n = row * m.experts_per_row; n < (row + 1) * m.experts_per_row; n++)
                both = fma(widen(s.expert_product + (size_t)e.places[n] * size.hidden + i), splat(e.shares[n]), both);
            store(sum + i, both);
        }
        if (layer.post_expert_norm) norm_hidden(sum, layer.post_expert_norm, sum);
        if (layer.gate_up) {
            if (layer.post_dense_norm) norm_hidden(dense, layer.post_dense_norm, dense);
            float weight = layer.dense_gate ? dense_share(layer, s.expert_input + row * size.hidden) : 1;
            for (int i = 0; i < m.hidden; i += LANES) store(sum + i, widen(sum + i) + weight * widen(dense + i));
        }
        if (layer.post_mlp_norm) norm_hidden(sum, layer.post_mlp_norm, sum);
        for (int i = 0; i < m.hidden; i += LANES)
            store(x + i, layer.scale * (widen(x + i) + m.residual_scale * widen(sum + i)));
    }
    float dense_share(const Layer& layer, const float* input) const {
        Floats sum{};
        for (int i = 0; i < size.hidden; i += LANES) sum = fma(widen(layer.dense_gate + i), widen(input + i), sum);
        return 1 / (1 + fast_exp(splat(-horizontal_sum(sum)))[0]);
    }
    void logits() {
        const char* rows = normed<Head>({0, NONE}, m.norm, p.rows - p.logit_rows, p.hidden);
        auto write = [this](int block, int row, Floats low, Floats high) {
            float both[BLOCK];
            low *= m.logit_scale, high *= m.logit_scale;
            if (m.logit_cap) low = soft_cap(low, m.logit_cap), high = soft_cap(high, m.logit_cap);
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
        if (m.layer_inputs) project_inputs();
        for (int number = 0; number < m.num_layers; number++) {
            attention(number);
            feed_forward(number);
            if (m.layer_inputs) add_inputs(number);
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
