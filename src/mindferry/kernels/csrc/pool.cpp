#include "pool.h"

#include <immintrin.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace mf {
namespace {

thread_local bool in_task = false;

// Quota of one cgroup v2 file ("max 100000" or "quota period"), or of the v1 pair; 0: no limit.
int quota_v2(const char* path) {
    int cpus = 0;
    if (FILE* f = std::fopen(path, "r")) {
        long long quota = 0, period = 0;
        if (std::fscanf(f, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0)
            cpus = static_cast<int>((quota + period - 1) / period);
        std::fclose(f);
    }
    return cpus;
}

long long number_in(const char* path) {
    long long value = -1;
    if (FILE* f = std::fopen(path, "r")) {
        if (std::fscanf(f, "%lld", &value) != 1) value = -1;
        std::fclose(f);
    }
    return value;
}

int cgroup_cpus() {
    if (int cpus = quota_v2("/sys/fs/cgroup/cpu.max")) return cpus;
    const long long quota = number_in("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    const long long period = number_in("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    return quota > 0 && period > 0 ? static_cast<int>((quota + period - 1) / period) : 0;
}

}  // namespace

int usable_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    if (const int limit = cgroup_cpus()) cpus = std::min(cpus, limit);
    if (const char* asked = std::getenv("MINDFERRY_NUM_THREADS")) {
        const int n = std::atoi(asked);
        if (n > 0) cpus = std::min(n, 4 * cpus);
    }
    return std::max(cpus, 1);
}

Pool& Pool::get() {
    // Never destroyed: MindSpore's threads may still be inside a kernel while the process ends.
    static Pool* pool = new Pool();
    return *pool;
}

Pool::Pool() : active_(usable_cpus()), pid_(getpid()) {
    const int threads = active_;
    for (int i = 1; i < threads; ++i) {
        workers_.emplace_back([this, i] { work(i); });
        workers_.back().detach();
    }
}

bool Pool::get_in_parallel() const { return in_task; }

void Pool::set_threads(int threads) {
    OpLock lock;
    active_ = std::clamp(threads, 1, created());
    dnnl_threadpool_interop_set_max_concurrency(active_);
}

void Pool::drain(const std::function<void(int, int)>& fn, int n) {
    in_task = true;
    for (int i = next_.fetch_add(1); i < n; i = next_.fetch_add(1)) fn(i, n);
    in_task = false;
}

void Pool::parallel_for(int n, const std::function<void(int, int)>& fn) {
    // A forked child has none of the threads.
    if (in_task || n <= 1 || active_ == 1 || workers_.empty() || getpid() != pid_) {
        const bool before = in_task;
        in_task = true;
        for (int i = 0; i < n; ++i) fn(i, n);
        in_task = before;
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        count_ = n;
        next_ = 0;
        job_ = &fn;
        generation_.fetch_add(1);
    }
    wake_.notify_all();
    drain(fn, n);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = nullptr;  // a worker that has not started by now finds nothing to do
    }
    for (int spins = 0; busy_.load() != 0; ++spins) {
        if (spins < 2000) {
            _mm_pause();
        } else {
            std::this_thread::yield();
        }
    }
}

void Pool::work(int index) {
    uint64_t seen = 0;
    for (;;) {
        // Kernels follow each other within microseconds: look a moment before going to sleep.
        for (int spins = 0; spins < 3000 && generation_.load() == seen; ++spins) _mm_pause();
        const std::function<void(int, int)>* fn = nullptr;
        int n = 0;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return generation_.load() != seen; });
            seen = generation_.load();
            fn = job_.load();
            n = count_.load();
            if (fn != nullptr && index < active_) {
                busy_.fetch_add(1);
            } else {
                fn = nullptr;
            }
        }
        if (fn != nullptr) {
            drain(*fn, n);
            busy_.fetch_sub(1);
        }
    }
}

namespace {
std::recursive_mutex& op_mutex() {
    static std::recursive_mutex* mutex = new std::recursive_mutex();
    return *mutex;
}
}  // namespace

OpLock::OpLock() : lock_(op_mutex()) {}

}  // namespace mf
