#include "gemm.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "pool.h"

namespace mf {
namespace {

void check(dnnl_status_t status, const char* what) {
    if (status != 0) throw std::runtime_error(std::string("oneDNN: ") + what + ": status " + std::to_string(status));
}

struct Key {
    int64_t m, n, k, a_row, a_col, b_row, b_col, c_row;
    int32_t a_type, b_type, c_type, flags;
    bool operator==(const Key& o) const { return std::memcmp(this, &o, sizeof o) == 0; }
};

struct KeyHash {
    size_t operator()(const Key& key) const {
        const auto* words = reinterpret_cast<const uint64_t*>(&key);
        uint64_t h = 1469598103934665603ull;
        for (size_t i = 0; i < sizeof key / sizeof *words; ++i) h = (h ^ words[i]) * 1099511628211ull + (h >> 29);
        return h;
    }
};

struct Product {
    dnnl_primitive_t primitive;
    dnnl_memory_desc_t a, b, c, bias, scratch;
    size_t scratch_bytes;
};

// Memory objects and scratch of one thread; handles are set at each call.
struct Bound {
    dnnl_memory_t a, b, c, bias, scratch;
    const Product* product;
};

struct Local {
    std::unordered_map<Key, Bound, KeyHash> bound;
    void* scratch = nullptr;
    size_t scratch_bytes = 0;
    dnnl_stream_t serial = nullptr;
    dnnl_stream_t parallel = nullptr;
};

// A one-thread pool, for products inside a task.
struct Serial final : dnnl::threadpool_interop::threadpool_iface {
    int get_num_threads() const override { return 1; }
    bool get_in_parallel() const override { return true; }
    void parallel_for(int n, const std::function<void(int, int)>& fn) override {
        for (int i = 0; i < n; ++i) fn(i, n);
    }
    uint64_t get_flags() const override { return 0; }
};

dnnl_engine_t engine() {
    static dnnl_engine_t cpu = [] {
        dnnl_engine_t e = nullptr;
        check(dnnl_engine_create(&e, kCpu, 0), "engine");
        return e;
    }();
    return cpu;
}

dnnl_memory_desc_t describe(int type, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
    dnnl_dims_t dims = {rows, cols}, strides = {row_stride, col_stride};
    dnnl_memory_desc_t md = nullptr;
    check(dnnl_memory_desc_create_with_strides(&md, 2, dims, type, strides), "memory descriptor");
    return md;
}

Product* build(const Key& key, int threads) {
    auto* p = new Product();
    p->a = describe(key.a_type, key.m, key.k, key.a_row, key.a_col);
    p->b = describe(key.b_type, key.k, key.n, key.b_row, key.b_col);
    p->c = describe(key.c_type, key.m, key.n, key.c_row, 1);
    p->bias = key.flags & 2 ? describe(kF32, 1, key.n, key.n, 1) : nullptr;
    dnnl_primitive_attr_t attr = nullptr;
    check(dnnl_primitive_attr_create(&attr), "attributes");
    check(dnnl_primitive_attr_set_scratchpad_mode(attr, kScratchpadUser), "scratchpad mode");
    if (key.flags & 1) {
        dnnl_post_ops_t ops = nullptr;
        check(dnnl_post_ops_create(&ops), "post-ops");
        check(dnnl_post_ops_append_sum(ops, 1.0f, 0, 0), "sum");
        check(dnnl_primitive_attr_set_post_ops(attr, ops), "post-ops");
        dnnl_post_ops_destroy(ops);
    }
    dnnl_threadpool_interop_set_max_concurrency(threads);
    dnnl_primitive_desc_t pd = nullptr;
    check(dnnl_matmul_primitive_desc_create(&pd, engine(), p->a, p->b, p->bias, p->c, attr), "matmul");
    check(dnnl_memory_desc_clone(&p->scratch, dnnl_primitive_desc_query_md(pd, kQueryScratchpad, 0)), "scratchpad");
    p->scratch_bytes = dnnl_memory_desc_get_size(p->scratch);
    check(dnnl_primitive_create(&p->primitive, pd), "primitive");
    dnnl_primitive_desc_destroy(pd);
    dnnl_primitive_attr_destroy(attr);
    return p;
}

const Product* product_for(const Key& key, int threads) {
    static std::mutex mutex;
    static auto* table = new std::unordered_map<Key, Product*, KeyHash>();
    std::lock_guard<std::mutex> lock(mutex);
    Product*& p = (*table)[key];
    if (p == nullptr) p = build(key, threads);
    return p;
}

Local& local() {
    // Left to the operating system at exit: oneDNN may already be gone when thread-locals are destroyed.
    static thread_local Local* mine = new Local();
    return *mine;
}

dnnl_memory_t memory(dnnl_memory_desc_t md) {
    dnnl_memory_t m = nullptr;
    check(dnnl_memory_create(&m, md, engine(), nullptr), "memory");
    return m;
}

dnnl_stream_t stream_of(Local& mine, bool serial) {
    dnnl_stream_t& stream = serial ? mine.serial : mine.parallel;
    if (stream == nullptr) {
        static Serial one;
        void* pool = serial ? static_cast<void*>(static_cast<dnnl::threadpool_interop::threadpool_iface*>(&one))
                            : static_cast<dnnl::threadpool_interop::threadpool_iface*>(&Pool::get());
        check(dnnl_threadpool_interop_stream_create(&stream, engine(), pool), "stream");
    }
    return stream;
}

}  // namespace

const char* onednn_problem() {
    const dnnl_version_t* v = dnnl_version();
    if (v->major != 3) return "not oneDNN 3.x";
    if (v->cpu_runtime != 8) return "oneDNN was not built for a thread pool";
    return "";
}

void gemm(const Mat& a, const Mat& b, const Mat& c, bool accumulate, const float* bias) {
    if (a.cols != b.rows || a.rows != c.rows || b.cols != c.cols || c.col_stride != 1)
        throw std::runtime_error("gemm: shapes do not fit");
    Pool& pool = Pool::get();
    const bool serial = pool.get_in_parallel() || pool.get_num_threads() == 1;
    const int threads = serial ? 1 : pool.get_num_threads();
    Key key;
    std::memset(&key, 0, sizeof key);
    key.m = a.rows, key.n = b.cols, key.k = a.cols;
    key.a_row = a.row_stride, key.a_col = a.col_stride, key.b_row = b.row_stride, key.b_col = b.col_stride;
    key.c_row = c.row_stride;
    key.a_type = a.type, key.b_type = b.type, key.c_type = c.type;
    key.flags = (accumulate ? 1 : 0) | (bias != nullptr ? 2 : 0) | (threads << 2);

    Local& mine = local();
    auto found = mine.bound.find(key);
    if (found == mine.bound.end()) {
        const Product* p = product_for(key, threads);
        Bound fresh{memory(p->a), memory(p->b), memory(p->c), p->bias ? memory(p->bias) : nullptr, memory(p->scratch), p};
        found = mine.bound.emplace(key, fresh).first;
    }
    const Bound& bound = found->second;
    if (bound.product->scratch_bytes > mine.scratch_bytes) {
        std::free(mine.scratch);
        mine.scratch_bytes = (bound.product->scratch_bytes + 4095) / 4096 * 4096;
        mine.scratch = std::aligned_alloc(4096, mine.scratch_bytes);
        if (mine.scratch == nullptr) throw std::bad_alloc();
    }
    dnnl_memory_set_data_handle(bound.a, a.data);
    dnnl_memory_set_data_handle(bound.b, b.data);
    dnnl_memory_set_data_handle(bound.c, c.data);
    dnnl_memory_set_data_handle(bound.scratch, mine.scratch);
    dnnl_exec_arg_t args[5] = {
        {kArgSrc, bound.a}, {kArgWeights, bound.b}, {kArgDst, bound.c}, {kArgScratchpad, bound.scratch}};
    if (bias != nullptr) {
        dnnl_memory_set_data_handle(bound.bias, const_cast<float*>(bias));
        args[4] = {kArgBias, bound.bias};
    }
    dnnl_stream_t stream = stream_of(mine, serial);
    check(dnnl_primitive_execute(bound.product->primitive, stream, bias != nullptr ? 5 : 4, args), "matmul execution");
}

}  // namespace mf
