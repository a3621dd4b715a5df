// A team of threads that run one function together: `run` starts it on all, `each` shares out a loop and waits.
//
// Owned by the process, used by one caller at a time (the engine's step thread). The caller is a member of the team.
// Waiting spins for a short while, because most waits are shorter than waking a thread, and then sleeps: an idle engine
// uses no processor, and neither does a member whose neighbour lost its core to another process.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace sgl {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
   public:
    explicit Team(int size) : size_(size), process_(getpid()) {
        for (int member = 1; member < size; member++) threads_.emplace_back([this] { serve(); });
    }

    ~Team() {
        stop_ = true;
        started_.fetch_add(1);
        started_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // A fork has the memory of the team, but only one of its threads.
    bool alive() const { return process_ == getpid(); }

    // Calls `work` on every member; returns when all are done.
    template <class Work>
    void run(Work&& work) {
        if (size_ == 1) {
            work();
            return;
        }
        work_ = std::ref(work);
        started_.fetch_add(1);
        started_.notify_all();
        work();
        barrier([] {});
    }

    // All members call this with the same `count`: each index below it is done once, by whoever is free. Ends with a
    // barrier, so that what was written may be read; `then` runs once before that, when all are done.
    template <class Do, class Then>
    void each(int64_t count, Do&& once, Then&& then) {
        for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) once(index);
        barrier(then);
    }
    template <class Do>
    void each(int64_t count, Do&& once) {
        each(count, once, [] {});
    }

   private:
    // Waits for all; the last to arrive calls `then`. What others may sleep on is written in sequentially consistent
    // order: `notify_all` first looks whether anybody sleeps, and a weaker write could still be on its way then, so that
    // a member that is about to sleep sees the old number and is not woken.
    template <class Then>
    void barrier(Then&& then) {
        uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            then();
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1);
            round_.notify_all();
        } else {
            wait_for_change(round_, round);
        }
    }

    void serve() {
        for (uint32_t seen = 0;; seen++) {
            wait_for_change(started_, seen);
            if (stop_) return;
            work_();
            barrier([] {});
        }
    }

    static void wait_for_change(std::atomic<uint32_t>& value, uint32_t old) {
        auto begin = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 32; i++) {
                if (value.load(std::memory_order_acquire) != old) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() - begin < SPIN);
        while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    }

    static constexpr std::chrono::microseconds SPIN{30};

    const int size_;
    const pid_t process_;
    std::vector<std::thread> threads_;
    std::function<void()> work_;
    bool stop_ = false;
    // Each on a cache line of its own: they are written by all.
    alignas(64) std::atomic<uint32_t> started_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace sgl
