// Experts: which of them each row reads, and the rows of each.

#pragma once

#include "interface.h"
#include "simd.h"

namespace {

// The experts of all rows of a pass, in the order of experts, and of rows for each. An assignment is one row of one expert.
struct Experts {
    int* chosen;    // [rows, experts_per_row], ascending
    float* shares;  // of them, in what the row gets
    int* num_met;   // experts that some row reads
    int* met;       // [num_met], ascending
    int* first;     // [num_met + 1], the first assignment of each
    int* rows;      // [assignments]
    int* places;    // [rows, experts_per_row], the assignment of each choice

    // Chooses those of the largest scores, the first among equals.
    void choose(const Model& m, const Layer& layer, const float* x, int row, float* scores) const {
        int stride = padded(m.hidden), count = m.experts_per_row, *to = chosen + row * count;
        for (int e = 0; e < m.num_experts; e++) {
            const float* router = layer.router + (size_t)e * stride;
            Floats sum{};
            for (int i = 0; i < stride; i += LANES) sum = fma(widen(router + i), widen(x + i), sum);
            scores[e] = horizontal_sum(sum) + (layer.router_bias ? layer.router_bias[e] : 0.f);
        }
        bool are_shares = m.scores_are_sigmoid || layer.choice_bias;
        if (are_shares) to_shares(m, scores);
        auto choice = [&](int e) { return scores[e] + (layer.choice_bias ? layer.choice_bias[e] : 0.f); };
        auto is_better = [&](int a, int b) { return choice(a) > choice(b) || (choice(a) == choice(b) && a < b); };
        for (int n = 0; n < count; n++) {
            int best = -1;
            for (int e = 0; e < m.num_experts; e++)
                if ((best < 0 || is_better(e, best)) && std::find(to, to + n, e) == to + n) best = e;
            to[n] = best;
        }
        float highest = scores[to[0]];
        std::sort(to, to + count);
        double total = 0;
        float* share = shares + row * count;
        for (int n = 0; n < count; n++) share[n] = are_shares ? scores[to[n]] : weight(scores[to[n]] - highest);
        if (m.shares_are_whole)
            for (int n = 0; n < count; n++) total += share[n];
        else
            for (int e = 0; e < m.num_experts && !are_shares; e++) total += weight(scores[e] - highest);
        for (int n = 0; n < count; n++) {
            if (total) share[n] /= (float)total;
            if (layer.expert_scale) share[n] *= layer.expert_scale[to[n]];
        }
    }
    void assign(const Model& m, int num_rows) const {
        int count = m.experts_per_row, next = 0;
        *num_met = 0;
        for (int e = 0; e < m.num_experts; e++) {
            first[*num_met] = next;
            for (int choice = 0; choice < num_rows * count; choice++)
                if (chosen[choice] == e) rows[next] = choice / count, places[choice] = next++;
            if (next > first[*num_met]) met[(*num_met)++] = e;
        }
        first[*num_met] = next;
    }

  private:
    static void to_shares(const Model& m, float* scores) {
        float highest = m.scores_are_sigmoid ? 0 : *std::max_element(scores, scores + m.num_experts);
        double total = 0;
        for (int e = 0; e < m.num_experts; e++) {
            float each = weight(scores[e] - highest);
            scores[e] = m.scores_are_sigmoid ? 1 / (1 + weight(-scores[e])) : each;
            total += each;
        }
        for (int e = 0; e < m.num_experts && !m.scores_are_sigmoid; e++) scores[e] /= (float)total;
    }
    static float weight(float below) { return fast_exp(splat(below))[0]; }
};

}  // namespace
