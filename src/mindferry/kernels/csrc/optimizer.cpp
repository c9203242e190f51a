// AdamW and the global norm of the gradients.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "pool.h"
#include "scratch.h"

namespace mf {

// Any number of gradients -> [sum of squares], infinite or NaN when an element is.
MF_KERNEL(mf_squares) {
    OpLock lock;
    Args args("squares", n, data, ndims, shapes, dtypes);
    double total = 0.0;
    for (int i = 0; i + 1 < n; ++i) {
        const Arg g = args.next("gradient", "float32");
        const float* values = static_cast<const float*>(g.data);
        const int64_t grain = 1 << 16, blocks = (g.count() + grain - 1) / grain;
        float* partial = shared<float>(kPartial2, blocks);
        parallel_blocks(g.count(), grain, [&](int64_t begin, int64_t end) {
            // Runs of 1024 keep float sums exact enough.
            double sum = 0.0;
            for (int64_t at = begin; at < end; at += 1024) {
                const int64_t stop = std::min(at + 1024, end);
                float part = 0.0f;
                MF_SIMD_SUM(part)
                for (int64_t j = at; j < stop; ++j) part += values[j] * values[j];
                sum += part;
            }
            partial[begin / grain] = static_cast<float>(sum);
        });
        for (int64_t b = 0; b < blocks; ++b) total += partial[b];
    }
    *args.floats("sum of squares", {1}) = static_cast<float>(total);
    args.done();
    return 0;
}

// One AdamW step in place (Loshchilov & Hutter 2019, with bias correction), one pass:
//   hyper [8]: learning rate, beta1, beta2, eps, weight decay, 1 - beta1^t, 1 - beta2^t, gradient scale
//   hyper, parameter, m, v, gradient -> done [1]
MF_KERNEL(mf_adamw) {
    OpLock lock;
    Args args("adamw", n, data, ndims, shapes, dtypes);
    const float* h = args.floats("hyper", {8});
    const Arg parameter = args.next("parameter", "float32");
    const Arg others[3] = {args.next("m", "float32"), args.next("v", "float32"), args.next("gradient", "float32")};
    for (const Arg& o : others)
        if (o.count() != parameter.count()) args.fail("parameter, m, v and gradient differ in size");
    *args.floats("done", {1}) = 0.0f;
    args.done();
    float* p = static_cast<float*>(parameter.data);
    float* m = static_cast<float*>(others[0].data);
    float* v = static_cast<float*>(others[1].data);
    const float* g = static_cast<const float*>(others[2].data);
    const float lr = h[0], beta1 = h[1], beta2 = h[2], eps = h[3], scale = h[7];
    const float shrink = 1.0f - lr * h[4], step = lr / h[5], root = 1.0f / std::sqrt(h[6]);
    parallel_blocks(parameter.count(), 1 << 16, [&](int64_t begin, int64_t end) {
        MF_SIMD
        for (int64_t j = begin; j < end; ++j) {
            const float d = g[j] * scale;
            const float first = beta1 * m[j] + (1.0f - beta1) * d;
            const float second = beta2 * v[j] + (1.0f - beta2) * d * d;
            m[j] = first;
            v[j] = second;
            p[j] = p[j] * shrink - step * first / (std::sqrt(second) * root + eps);
        }
    });
    return 0;
}

// ---- What the loader asks ----

extern "C" const char* mf_problem() { return onednn_problem(); }
extern "C" int mf_threads() { return Pool::get().get_num_threads(); }
extern "C" void mf_set_threads(int threads) { Pool::get().set_threads(threads); }
extern "C" int mf_isa() { return dnnl_get_effective_cpu_isa(); }
extern "C" void mf_release() { release_scratch(); }

}  // namespace mf
