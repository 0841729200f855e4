// Experts: which of them each row reads, and the rows of each.

#pragma once

#include "interface.h"
#include "simd.h"

namespace {

// The experts of all rows of a pass, in the order of experts, and of rows for each. An assignment is one row of one expert.
struct Experts {
    int* chosen;    // [rows, experts_per_row], ascending
    float* shares;  // of them, in what the row gets
    int* first;     // [experts + 1], the first assignment of each expert
    int* rows;      // [assignments]
    int* places;    // [rows, experts_per_row], the assignment of each choice

    // Chooses those of the largest scores, the first among equals.
    void choose(const Model& m, const float* router, const float* bias, const float* x, int row, float* scores) const {
        int stride = padded(m.hidden), count = m.experts_per_row, *to = chosen + row * count;
        for (int e = 0; e < m.num_experts; e++) {
            Floats sum{};
            for (int i = 0; i < stride; i += LANES) sum = fma(widen(router + (size_t)e * stride + i), widen(x + i), sum);
            scores[e] = horizontal_sum(sum) + (bias ? bias[e] : 0.f);
        }
        auto is_better = [&](int a, int b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); };
        for (int n = 0; n < count; n++) {
            int best = -1;
            for (int e = 0; e < m.num_experts; e++)
                if ((best < 0 || is_better(e, best)) && std::find(to, to + n, e) == to + n) best = e;
            to[n] = best;
        }
        float highest = scores[to[0]];
        std::sort(to, to + count);
        double total = 0;
        for (int n = 0; n < count; n++) shares[row * count + n] = weight(scores[to[n]] - highest);
        if (m.shares_are_whole)
            for (int n = 0; n < count; n++) total += shares[row * count + n];
        else
            for (int e = 0; e < m.num_experts; e++) total += weight(scores[e] - highest);
        for (int n = 0; n < count; n++) shares[row * count + n] /= (float)total;
    }
    void assign(const Model& m, int num_rows) const {
        int count = m.experts_per_row, next = 0;
        for (int e = 0; e < m.num_experts; e++) {
            first[e] = next;
            for (int choice = 0; choice < num_rows * count; choice++)
                if (chosen[choice] == e) rows[next] = choice / count, places[choice] = next++;
        }
        first[m.num_experts] = next;
    }

  private:
    static float weight(float below) { return fast_exp(splat(below))[0]; }
};

}  // namespace
