// Shares work among threads as they come, since a processor that the system or a neighbour slows down would let the
// others wait.

#pragma once

#include <algorithm>
#include <atomic>

namespace {

struct WorkQueue {
    std::atomic<int> next;

    // Calls run(first, last) with parts of [0, size) until all are taken; parts get smaller towards the end. Every part
    // begins with weights that no prefetch reached, so the first are nearly a thread's share, and the last are not tiny.
    //
    // Args: smallest: parts are multiples of it.
    template <class Run> void take_all(int size, int smallest, int threads, Run run) {
        int least = std::clamp(size / 24 / smallest, 1, 4);
        int first = next.load(std::memory_order_relaxed);
        while (first < size) {
            int wanted = std::max((size - first) * 7 / (8 * threads) / smallest, least) * smallest;
            int last = std::min(first + wanted, size);
            if (!next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
            run(first, last);
            first = next.load(std::memory_order_relaxed);
        }
    }
};

}  // namespace
