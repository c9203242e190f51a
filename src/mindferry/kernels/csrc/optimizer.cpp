// AdamW and the global norm of the gradients.
#include <algorithm>
#include <cmath>
#include <vector>

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

namespace {

struct Rates {
    float lr, beta1, beta2, eps, decay, correction1, correction2, scale;
};

void update(const Rates& h, float* p, float* m, float* v, const float* g, int64_t begin, int64_t end) {
    const float beta1 = h.beta1, beta2 = h.beta2, eps = h.eps, scale = h.scale;
    const float shrink = 1.0f - h.lr * h.decay, step = h.lr / h.correction1, root = 1.0f / std::sqrt(h.correction2);
    MF_SIMD
    for (int64_t j = begin; j < end; ++j) {
        const float d = g[j] * scale;
        const float first = beta1 * m[j] + (1.0f - beta1) * d;
        const float second = beta2 * v[j] + (1.0f - beta2) * d * d;
        m[j] = first;
        v[j] = second;
        p[j] = p[j] * shrink - step * first / (std::sqrt(second) * root + eps);
    }
}

}  // namespace

// One AdamW step in place (Loshchilov & Hutter 2019, with bias correction), one pass over k parameters:
//   shared [6]: beta1, beta2, eps, 1 - beta1^t, 1 - beta2^t, gradient scale
//   shared, learning rates [k], weight decays [k], k parameters, k m, k v, k gradients -> done [1]
MF_KERNEL(mf_adamw) {
    OpLock lock;
    Args args("adamw", n, data, ndims, shapes, dtypes);
    const float* shared_rates = args.floats("shared", {6});
    const int64_t k = (n - 4) / 4;
    const float* rates = args.floats("learning rates", {k});
    const float* decays = args.floats("weight decays", {k});
    std::vector<Arg> all;
    for (int64_t i = 0; i < 4 * k; ++i) all.push_back(args.next("parameter, m, v or gradient", "float32"));
    *args.floats("done", {1}) = 0.0f;
    args.done();
    // Tasks of equal size over all parameters together, small ones included.
    struct Piece {
        int64_t parameter, begin, end;
    };
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < k; ++i) {
        const int64_t count = all[i].count(), grain = 1 << 16;
        for (int64_t which = 1; which < 4; ++which)
            if (all[which * k + i].count() != count) args.fail("parameter, m, v and gradient differ in size");
        for (int64_t at = 0; at < count; at += grain) pieces.push_back({i, at, std::min(at + grain, count)});
    }
    Pool::get().parallel_for(static_cast<int>(pieces.size()), [&](int task, int) {
        const Piece& piece = pieces[task];
        const int64_t i = piece.parameter;
        const Rates h{rates[i],        shared_rates[0], shared_rates[1], shared_rates[2],
                      decays[i],       shared_rates[3], shared_rates[4], shared_rates[5]};
        update(h, static_cast<float*>(all[i].data), static_cast<float*>(all[k + i].data),
               static_cast<float*>(all[2 * k + i].data), static_cast<const float*>(all[3 * k + i].data), piece.begin,
               piece.end);
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
