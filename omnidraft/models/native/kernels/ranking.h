// The most probable ids of a drafter's logits, and the first target tokens that they become (decode/drafting/ranking.py).

#pragma once

#include <limits>
#include <numeric>
#include <vector>

#include "interface.h"
#include "simd.h"

namespace {

// The largest of these numbers; NaN where one of them is.
inline float largest(const float* x, int size) {
    Floats most = splat(-std::numeric_limits<float>::infinity());
    Ints odd{};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        Floats each = widen(x + i);
        odd |= each != each;
        most = vmax(most, each);
    }
    float result = horizontal_max(most);
    bool is_nan = false;
    for (int lane = 0; lane < LANES; lane++) is_nan |= odd[lane] != 0;
    for (; i < size; i++) is_nan |= x[i] != x[i], result = std::max(result, x[i]);
    return is_nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

// The sum of e^(x - most); numbers that are infinitely less count as e^-87 each.
inline double sum_of_exps(const float* x, int size, float most) {
    Floats sums[4]{};
    int i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int n = 0; n < 4; n++) sums[n] += fast_exp(widen(x + i + n * LANES) - most);
    double total = horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) total += std::exp(x[i] - most);
    return total;
}

// Puts the ids of the `count` largest numbers first, best first, equal ones by id; returns how many of them there are.
inline int take_largest(const float* x, int size, float most, int count, std::vector<int>& ids) {
    auto is_before = [x](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    for (float span : {6.f, 9.f, 12.f, std::numeric_limits<float>::infinity()}) {  // few are close to the largest one
        ids.clear();
        for (int first = 0; first < size; first += 4 * LANES) {
            int end = std::min(first + 4 * LANES, size), close = 0;
            for (int i = first; i < end; i++) close |= x[i] > most - span;
            for (int i = first; close && i < end; i++)
                if (x[i] > most - span) ids.push_back(i);
        }
        if ((int)ids.size() >= count) break;
    }
    count = std::min(count, (int)ids.size());
    std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), is_before);
    return count;
}

// Sums the probabilities of ids that begin with the same target token.
inline void group(const int64_t* first, Ranking& to) {
    to.num_targets = 0;
    for (int n = 0; n < to.num_ids; n++) {
        int64_t target = first[to.ids[n]];
        int at = (int)(std::find(to.targets, to.targets + to.num_targets, target) - to.targets);
        if (at == to.num_targets) to.targets[at] = target, to.firsts[at] = n, to.target_q[at] = 0, to.num_targets++;
        to.target_q[at] += to.q[n];
    }
}

// Sorts the target tokens, best first, equal ones by id.
inline void sort_targets(Ranking& to) {
    Ranking from = to;
    int order[RANKED];
    std::iota(order, order + to.num_targets, 0);
    std::sort(order, order + to.num_targets, [&](int a, int b) {
        return from.target_q[a] > from.target_q[b] || (from.target_q[a] == from.target_q[b] && from.targets[a] < from.targets[b]);
    });
    for (int n = 0; n < to.num_targets; n++) {
        int at = order[n];
        to.targets[n] = from.targets[at], to.firsts[n] = from.firsts[at], to.target_q[n] = from.target_q[at];
    }
}

inline void rank(const float* logits, int size, const int64_t* first, int num_known, int num_target, Ranking& to) {
    to.num_ids = to.num_targets = 0;
    to.max_logit = largest(logits, size);
    if (!std::isfinite(to.max_logit)) return;
    std::vector<int> ids;
    int count = take_largest(logits, size, to.max_logit, std::min(RANKED, size), ids);
    double total = sum_of_exps(logits, size, to.max_logit);
    for (int n = 0; n < count; n++) {
        int id = ids[n];
        double q = std::exp(logits[id] - to.max_logit) / total;
        if (id < num_known && q > 0 && first[id] < num_target) to.ids[to.num_ids] = id, to.q[to.num_ids++] = q;
    }
    group(first, to);
    sort_targets(to);
}

}  // namespace
