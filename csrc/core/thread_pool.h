// A fork-join pool for the CPU backend: the caller works too, and workers sleep when there is nothing to do.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace turbomill {

class ThreadPool {
  public:
    // `threads` counts the caller; 0 means every core the process may run on.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return int(workers_.size()) + 1; }

    // Calls fn(task, worker) for each task in [0, tasks), worker in [0, size()). Returns when all are done.
    // Tasks must not throw. Only one thread may call run() at a time.
    template <class F>
    void run(int tasks, F&& fn) {
        dispatch(
            tasks, [](void* context, int task, int worker) { (*static_cast<F*>(context))(task, worker); },
            const_cast<void*>(static_cast<const void*>(&fn)));
    }

  private:
    using Task = void (*)(void* context, int task, int worker);

    void dispatch(int tasks, Task task, void* context);
    void work(int worker);
    void drain(int worker);

    // A round is one run(): its number, whether workers may still join, and how many have joined, in one
    // word, so that joining and closing cannot race. A worker that wakes late finds the round closed and is
    // not waited for: on a busy machine the caller does the work alone rather than wait for a descheduled
    // thread.
    static constexpr uint64_t kOpen = 1, kJoin = 2, kRound = uint64_t(1) << 32;
    static uint64_t round_of(uint64_t state) { return state / kRound; }
    static uint64_t joined(uint64_t state) { return state % kRound / kJoin; }

    std::vector<std::thread> workers_;
    Task task_ = nullptr;
    void* context_ = nullptr;
    int tasks_ = 0;
    std::atomic<int> next_{0};  // next task to take
    std::atomic<uint64_t> state_{0};
    std::atomic<uint32_t> wake_{0};  // bumped with every round; idle workers sleep on it
    std::atomic<bool> stop_{false};
};

}  // namespace turbomill
