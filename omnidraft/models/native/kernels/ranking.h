// The most probable ids of a drafter's logits, and the first target tokens that they become (decode/drafting/ranking.py).

#pragma once

#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "interface.h"
#include "simd.h"

namespace {

const int SPAN = 8 * LANES;
const float LOWEST = -std::numeric_limits<float>::infinity();

// The largest number of each span; returns that of all, NaN where one of them is.
inline float span_maxima(const float* x, int size, std::vector<float>& maxima) {
    Ints odd{};
    bool is_nan = false;
    for (int first = 0; first < size; first += SPAN) {
        Floats most = splat(LOWEST);
        for (int i = first; i + LANES <= std::min(first + SPAN, size); i += LANES) {
            Floats each = widen(x + i);
            odd |= each != each;
            most = vmax(most, each);
        }
        maxima.push_back(horizontal_max(most));
    }
    for (int i = size - size % LANES; i < size; i++) is_nan |= x[i] != x[i], maxima.back() = std::max(maxima.back(), x[i]);
    for (int lane = 0; lane < LANES; lane++) is_nan |= odd[lane] != 0;
    return is_nan ? std::numeric_limits<float>::quiet_NaN() : *std::max_element(maxima.begin(), maxima.end());
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

// The ids of the `count` largest numbers, best first, equal ones by id, none of minus infinity. As many spans have one
// that is no less than the last of their largest ones.
inline std::vector<int> largest_ids(const float* x, int size, const std::vector<float>& maxima, int count) {
    float least = LOWEST;
    if ((int)maxima.size() > count) {
        std::vector<float> ranked = maxima;
        std::nth_element(ranked.begin(), ranked.begin() + count - 1, ranked.end(), std::greater<float>());
        least = ranked[count - 1];
    }
    std::vector<int> ids;
    for (int first = 0; first < size; first += SPAN)
        for (int i = first; maxima[first / SPAN] >= least && i < std::min(first + SPAN, size); i++)
            if (x[i] >= least && x[i] > LOWEST) ids.push_back(i);
    auto end = ids.begin() + std::min(count, (int)ids.size());
    std::partial_sort(ids.begin(), end, ids.end(), [x](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    ids.erase(end, ids.end());
    return ids;
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
    std::vector<float> maxima;
    to.max_logit = span_maxima(logits, size, maxima);
    if (!std::isfinite(to.max_logit)) return;
    double total = sum_of_exps(logits, size, to.max_logit);
    for (int id : largest_ids(logits, size, maxima, RANKED)) {
        double q = std::exp(logits[id] - to.max_logit) / total;
        if (id < num_known && q > 0 && first[id] < num_target) to.ids[to.num_ids] = id, to.q[to.num_ids++] = q;
    }
    group(first, to);
    sort_targets(to);
}

}  // namespace
