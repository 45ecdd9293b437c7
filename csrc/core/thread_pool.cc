#include "core/thread_pool.h"

#include <sched.h>

#include <algorithm>

#include "core/thread_name.h"

namespace turbomill {
namespace {

// Between two kernels of a step a worker spins this often before it sleeps: waking costs tens of
// microseconds.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int available_cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    if (threads <= 0) threads = available_cores();
    workers_.reserve(threads - 1);
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

ThreadPool::~ThreadPool() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& thread : workers_) thread.join();
}

void ThreadPool::dispatch(int tasks, Task task, void* context) {
    if (tasks <= 0) return;
    if (workers_.empty() || tasks == 1) {
        for (int i = 0; i < tasks; ++i) task(context, i, 0);
        return;
    }
    task_ = task;
    context_ = context;
    tasks_ = tasks;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t round = round_of(state_.load(std::memory_order_relaxed)) + 1;
    state_.store(round % (uint64_t(1) << 32) * kRound + kOpen, std::memory_order_release);
    wake_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
    drain(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; joined(state_.load(std::memory_order_acquire)) != 0; ++spins) {
        if (spins < kSpins) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

void ThreadPool::drain(int worker) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, i, worker);
}

void ThreadPool::work(int worker) {
    name_thread("tm-worker");
    uint32_t seen = 0;
    while (true) {
        for (int spins = 0; wake_.load(std::memory_order_acquire) == seen; ++spins) {
            if (spins < kSpins) {
                relax();
            } else {
                wake_.wait(seen, std::memory_order_acquire);
            }
        }
        seen = wake_.load(std::memory_order_acquire);
        if (stop_.load()) return;
        uint64_t state = state_.load(std::memory_order_acquire);
        bool in = false;
        while (state & kOpen && !in)
            in = state_.compare_exchange_weak(state, state + kJoin, std::memory_order_acq_rel);
        if (!in) continue;
        drain(worker);
        state_.fetch_sub(kJoin, std::memory_order_acq_rel);
    }
}

}  // namespace turbomill
