// The few oneDNN entry points that the kernels use.
//
// The MindSpore wheel ships libdnnl.so.3 without headers. These declarations follow the public C API of
// oneDNN 3.x (stable within a major version); `mf_version_problem` in gemm.cpp checks the library at load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

extern "C" {
typedef int dnnl_status_t;  // 0: success
typedef struct dnnl_engine* dnnl_engine_t;
typedef struct dnnl_stream* dnnl_stream_t;
typedef struct dnnl_memory_desc* dnnl_memory_desc_t;
typedef const struct dnnl_memory_desc* const_dnnl_memory_desc_t;
typedef struct dnnl_memory* dnnl_memory_t;
typedef struct dnnl_primitive_desc* dnnl_primitive_desc_t;
typedef struct dnnl_primitive* dnnl_primitive_t;
typedef struct dnnl_primitive_attr* dnnl_primitive_attr_t;
typedef struct dnnl_post_ops* dnnl_post_ops_t;
typedef int64_t dnnl_dims_t[12];

typedef struct {
    int arg;
    dnnl_memory_t memory;
} dnnl_exec_arg_t;

typedef struct {
    int major, minor, patch;
    const char* hash;
    unsigned cpu_runtime, gpu_runtime;
} dnnl_version_t;

const dnnl_version_t* dnnl_version(void);
int dnnl_get_effective_cpu_isa(void);
dnnl_status_t dnnl_engine_create(dnnl_engine_t*, int kind, size_t index);
dnnl_status_t dnnl_threadpool_interop_stream_create(dnnl_stream_t*, dnnl_engine_t, void* threadpool);
dnnl_status_t dnnl_threadpool_interop_set_max_concurrency(int);
dnnl_status_t dnnl_stream_wait(dnnl_stream_t);
dnnl_status_t dnnl_memory_desc_create_with_strides(dnnl_memory_desc_t*, int ndims, const dnnl_dims_t dims,
                                                   int data_type, const dnnl_dims_t strides);
dnnl_status_t dnnl_memory_desc_create_with_tag(dnnl_memory_desc_t*, int ndims, const dnnl_dims_t dims,
                                               int data_type, int tag);
dnnl_status_t dnnl_memory_desc_destroy(dnnl_memory_desc_t);
dnnl_status_t dnnl_memory_desc_clone(dnnl_memory_desc_t*, const_dnnl_memory_desc_t);
size_t dnnl_memory_desc_get_size(const_dnnl_memory_desc_t);
dnnl_status_t dnnl_memory_create(dnnl_memory_t*, const_dnnl_memory_desc_t, dnnl_engine_t, void* handle);
dnnl_status_t dnnl_memory_set_data_handle(dnnl_memory_t, void* handle);
dnnl_status_t dnnl_memory_destroy(dnnl_memory_t);
dnnl_status_t dnnl_primitive_attr_create(dnnl_primitive_attr_t*);
dnnl_status_t dnnl_primitive_attr_destroy(dnnl_primitive_attr_t);
dnnl_status_t dnnl_primitive_attr_set_scratchpad_mode(dnnl_primitive_attr_t, int mode);
dnnl_status_t dnnl_primitive_attr_set_post_ops(dnnl_primitive_attr_t, dnnl_post_ops_t);
dnnl_status_t dnnl_post_ops_create(dnnl_post_ops_t*);
dnnl_status_t dnnl_post_ops_destroy(dnnl_post_ops_t);
dnnl_status_t dnnl_post_ops_append_sum(dnnl_post_ops_t, float scale, int32_t zero_point, int data_type);
dnnl_status_t dnnl_matmul_primitive_desc_create(dnnl_primitive_desc_t*, dnnl_engine_t,
                                                const_dnnl_memory_desc_t src, const_dnnl_memory_desc_t weights,
                                                const_dnnl_memory_desc_t bias, const_dnnl_memory_desc_t dst,
                                                dnnl_primitive_attr_t);
dnnl_status_t dnnl_primitive_desc_destroy(dnnl_primitive_desc_t);
const_dnnl_memory_desc_t dnnl_primitive_desc_query_md(dnnl_primitive_desc_t, int what, int index);
dnnl_status_t dnnl_primitive_desc_query(dnnl_primitive_desc_t, int what, int index, void* result);
dnnl_status_t dnnl_primitive_create(dnnl_primitive_t*, dnnl_primitive_desc_t);
dnnl_status_t dnnl_primitive_execute(dnnl_primitive_t, dnnl_stream_t, int nargs, const dnnl_exec_arg_t*);
}

namespace dnnl {
namespace threadpool_interop {
// Layout of oneDNN's abstract thread pool; the library calls it through the vtable, so order matters.
struct threadpool_iface {
    virtual int get_num_threads() const = 0;
    virtual bool get_in_parallel() const = 0;
    virtual void parallel_for(int n, const std::function<void(int, int)>& fn) = 0;
    virtual uint64_t get_flags() const = 0;
    virtual void wait() {}
    virtual ~threadpool_iface() {}
};
}  // namespace threadpool_interop
}  // namespace dnnl

namespace mf {
enum OneDnn : int {
    kCpu = 1,
    kBf16 = 2,
    kF32 = 3,
    kArgSrc = 1,
    kArgDst = 17,
    kArgWeights = 33,
    kArgBias = 41,
    kArgScratchpad = 80,
    kQueryScratchpad = 136,
    kScratchpadUser = 1,
};
}
