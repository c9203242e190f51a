// Threads for the kernels, and the same threads behind oneDNN's threadpool interface.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "onednn.h"

namespace mf {

// As many threads as the process may use: CPU affinity, further limited by the cgroup's CPU quota.
int usable_cpus();

class Pool final : public dnnl::threadpool_interop::threadpool_iface {
  public:
    static Pool& get();

    int get_num_threads() const override { return active_; }
    bool get_in_parallel() const override;
    uint64_t get_flags() const override { return 0; }  // parallel_for returns when all is done
    // fn(i, n) for i in [0, n), in any order; runs serially when called from inside a task.
    void parallel_for(int n, const std::function<void(int, int)>& fn) override;

    // Use `threads` threads from now on (1 .. created at start).
    void set_threads(int threads);
    int created() const { return static_cast<int>(workers_.size()) + 1; }

  private:
    Pool();
    void work(int index);
    void drain(const std::function<void(int, int)>& fn, int n);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<const std::function<void(int, int)>*> job_{nullptr};
    std::atomic<int> count_{0}, next_{0}, busy_{0};
    int active_;
    int pid_;
};

// One kernel at a time: each uses every thread, and they share the scratch memory.
class OpLock {
  public:
    OpLock();

  private:
    std::unique_lock<std::recursive_mutex> lock_;
};

// body(begin, end) over [0, n) in blocks of `grain`, on all threads. Block borders do not depend on the
// number of threads, so sums kept per block are the same for any number.
template <class Body>
void parallel_blocks(int64_t n, int64_t grain, const Body& body) {
    if (n <= 0) return;
    const int64_t blocks = (n + grain - 1) / grain;
    if (blocks == 1) {
        body(int64_t(0), n);
        return;
    }
    Pool::get().parallel_for(static_cast<int>(blocks), [&](int i, int) {
        const int64_t begin = i * grain;
        body(begin, begin + grain < n ? begin + grain : n);
    });
}

}  // namespace mf
