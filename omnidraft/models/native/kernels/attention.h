// Attention of up to 3 query heads that share their keys. Keys are stored as [K, C/8, D, 8], values as [K, C, D].

#pragma once

#include "simd.h"

namespace {

template <class T, int N>
void attention_scores(const float* queries, const T* keys, int end, int d, float* scores, int stride) {
    for (int slot = 0; slot < end; slot += 2 * LANES) {
        Floats sums[N][2] = {};
        const T* low = keys + (size_t)slot * d;
        for (int i = 0; i < d; i++) {
            Floats a = widen(low + i * LANES), b = widen(low + (d + i) * LANES);
            for (int n = 0; n < N; n++) {
                Floats query = splat(queries[n * d + i]);
                sums[n][0] = fma(a, query, sums[n][0]), sums[n][1] = fma(b, query, sums[n][1]);
            }
        }
        for (int n = 0; n < N; n++)
            store(scores + n * stride + slot, sums[n][0]), store(scores + n * stride + slot + LANES, sums[n][1]);
    }
}

// Turns scores into weights with a sum of 1; masked slots, -inf, have weight 0. The sum runs along the slots, so that
// masked slots between them do not change its bits. `sink` is one more score, or null.
void softmax(float* scores, int end, const float* sink) {
    Floats largest = widen(scores);
    for (int slot = LANES; slot < end; slot += LANES) largest = vmax(largest, widen(scores + slot));
    float highest = std::max(horizontal_max(largest), sink ? *sink : -INFINITY);
    double total = sink ? fast_exp(splat(*sink - highest))[0] : 0;
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
            for (int n = 0; n < N; n++) sums[n][s] = fma(value, splat(weights[n * stride + slot]), sums[n][s]);
        }
    for (int n = 0; n < N; n++)
        for (int s = 0; s < S; s++) store(out + n * d + s * LANES, sums[n][s]);
}

// The slots that a row sees.
struct Visible {
    int first, length, end;  // from `length` on, `masked` marks those that it does not see
    const bool* masked;
};

template <class T, int N>
void attend(const float* queries, const T* keys, const T* values, Visible sees, const float* sinks, float cap, int d,
            float* scores, int stride, float* out) {
    int skipped = sees.first / (2 * LANES) * 2 * LANES, end = sees.end - skipped, length = sees.length - skipped;
    keys += (size_t)skipped * d, values += (size_t)skipped * d;
    attention_scores<T, N>(queries, keys, end, d, scores, stride);
    int whole = (end + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    for (int n = 0; n < N; n++) {
        float* row = scores + n * stride;
        for (int slot = 0; cap && slot < whole; slot += LANES) store(row + slot, soft_cap(widen(row + slot), cap));
        std::fill(row, row + sees.first - skipped, -INFINITY);
        for (int slot = std::max(length, 0); slot < whole; slot++)
            if (slot >= end || sees.masked[slot - length]) row[slot] = -INFINITY;
        softmax(row, whole, sinks ? sinks + n : nullptr);
    }
    int i = 0;
    for (; i + 4 * LANES <= d; i += 4 * LANES) weighted_values<T, N, 4>(scores, stride, values + i, end, d, out + i);
    for (; i < d; i += LANES) weighted_values<T, N, 1>(scores, stride, values + i, end, d, out + i);
}

}  // namespace
