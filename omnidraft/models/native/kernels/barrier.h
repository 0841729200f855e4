// Where the threads of a pass wait for each other. OpenMP's own barrier spins for milliseconds, which is the time slice of
// a thread that waits for its processor to get there.

#pragma once

#include <atomic>
#include <chrono>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace {

class Barrier {
    // Threads that have processors of their own arrive within this time; to sleep and to be woken takes about as long.
    static constexpr std::chrono::microseconds SPIN{20};
    std::atomic<int> arrived{0}, round{0}, sleeping{0};

public:
    // Returns when all `threads` have called it.
    void wait(int threads) {
        int mine = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1);
            if (sleeping.load()) wake();
            return;
        }
        using Clock = std::chrono::steady_clock;
        for (auto end = Clock::now() + SPIN; Clock::now() < end;)
            if (round.load(std::memory_order_acquire) != mine) return;
        sleeping++;
        while (round.load() == mine) sleep(mine);
        sleeping--;
    }

private:
#ifdef __linux__
    void sleep(int mine) { syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, mine, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, sleeping.load(), nullptr, nullptr, 0); }
#else
    void sleep(int) { std::this_thread::yield(); }
    void wake() {}
#endif
};

}  // namespace
