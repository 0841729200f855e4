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
            for (int n = 0; n < N; n++) sums[n][s] = fma(value, splat(weights[n * stride + slot]), sums[n][s]);
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
