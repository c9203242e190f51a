#include "rowwise.h"

#include <algorithm>

#include "pool.h"
#include "scratch.h"

namespace mf {
namespace {

// Rows a block: at most 64 blocks whatever the number of threads, so that sums over rows do not depend on it.
int64_t grain_of(int64_t rows) { return std::max<int64_t>(4, (rows + 63) / 64); }

// sums[j] = sum over blocks of partial[block, j], in the order of the blocks.
void reduce_blocks(const float* partial, int64_t blocks, int64_t stride, float* sums, int64_t width) {
    parallel_blocks(width, 512, [&](int64_t begin, int64_t end) {
        std::memset(sums + begin, 0, sizeof(float) * (end - begin));
        for (int64_t b = 0; b < blocks; ++b) {
            const float* row = partial + b * stride;
            MF_SIMD
            for (int64_t j = begin; j < end; ++j) sums[j] += row[j];
        }
    });
}

template <class T>
void residual_row(const float* x, const T* branch, const Dropout& drop, uint32_t key, float* y, int64_t width) {
    if (drop.on()) {
        MF_SIMD
        for (int64_t j = 0; j < width; ++j)
            y[j] = x[j] + dropped(drop, key, static_cast<uint32_t>(j), load(branch[j]));
    } else {
        MF_SIMD
        for (int64_t j = 0; j < width; ++j) y[j] = x[j] + load(branch[j]);
    }
}

void row_stats(const float* x, int64_t width, const Norm& norm, float& mean, float& rstd) {
    // Two passes: the variance around the mean itself does not cancel for large offsets.
    float sum = 0.0f, squares = 0.0f;
    if (!norm.rms) {
        MF_SIMD_SUM(sum)
        for (int64_t j = 0; j < width; ++j) sum += x[j];
    }
    mean = sum / static_cast<float>(width);
    const float m = mean;
    MF_SIMD_SUM(squares)
    for (int64_t j = 0; j < width; ++j) squares += (x[j] - m) * (x[j] - m);
    rstd = 1.0f / std::sqrt(squares / static_cast<float>(width) + norm.eps);
}

template <class T>
void norm_row(const float* x, float mean, float rstd, const Norm& norm, T* out, int64_t width) {
    const float* gamma = norm.gamma;
    const float* beta = norm.beta;
    if (beta != nullptr) {
        MF_SIMD
        for (int64_t j = 0; j < width; ++j) store(out + j, (x[j] - mean) * rstd * gamma[j] + beta[j]);
    } else {
        MF_SIMD
        for (int64_t j = 0; j < width; ++j) store(out + j, (x[j] - mean) * rstd * gamma[j]);
    }
}

}  // namespace

template <class T>
void norm_forward(const float* x, const T* branch, const Dropout& drop, DropoutStream stream, float* x1, T* out,
                  float* stats, int64_t rows, int64_t width, const Norm& norm) {
    parallel_blocks(rows, grain_of(rows), [&](int64_t begin, int64_t end) {
        float* spare = branch != nullptr && x1 == nullptr ? local<float>(kTileScores, width) : nullptr;
        for (int64_t r = begin; r < end; ++r) {
            const float* row = x + r * width;
            if (branch != nullptr) {
                float* sum = x1 != nullptr ? x1 + r * width : spare;
                const uint32_t key = drop.on() ? row_key(drop.seed, stream, r) : 0;
                residual_row(row, branch + r * width, drop, key, sum, width);
                row = sum;
            } else if (x1 != nullptr) {
                std::memcpy(x1 + r * width, row, sizeof(float) * width);
            }
            float mean, rstd;
            row_stats(row, width, norm, mean, rstd);
            if (stats != nullptr) stats[2 * r] = mean, stats[2 * r + 1] = rstd;
            norm_row(row, mean, rstd, norm, out + r * width, width);
        }
    });
}

template <class T>
void norm_again(const float* x, const float* stats, T* out, int64_t rows, int64_t width, const Norm& norm) {
    parallel_blocks(rows, grain_of(rows), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            norm_row(x + r * width, stats[2 * r], stats[2 * r + 1], norm, out + r * width, width);
    });
}

template <class T>
void norm_backward(const float* x, const float* stats, const T* dout, const float* residual, float* dx, T* masked,
                   const Dropout& drop, DropoutStream stream, const NormGrads& grads, int64_t rows, int64_t width,
                   const Norm& norm) {
    const int64_t grain = grain_of(rows), blocks = (rows + grain - 1) / grain;
    float* partial = shared<float>(kPartial, blocks * 3 * width);
    std::memset(partial, 0, sizeof(float) * blocks * 3 * width);
    const float inverse = 1.0f / static_cast<float>(width);
    parallel_blocks(rows, grain, [&](int64_t begin, int64_t end) {
        float* dgamma = partial + begin / grain * 3 * width;
        float* dbeta = dgamma + width;
        float* dbias = dbeta + width;
        for (int64_t r = begin; r < end; ++r) {
            const float mean = stats[2 * r], rstd = stats[2 * r + 1];
            const float* xr = x + r * width;
            const T* dr = dout + r * width;
            float* out = dx + r * width;
            float sum = 0.0f, dot = 0.0f;
            MF_SIMD_SUM(sum, dot)
            for (int64_t j = 0; j < width; ++j) {
                const float d = load(dr[j]), hat = (xr[j] - mean) * rstd, g = d * norm.gamma[j];
                dgamma[j] += d * hat;
                dbeta[j] += d;
                sum += g;
                dot += g * hat;
            }
            sum = norm.rms ? 0.0f : sum * inverse;
            dot *= inverse;
            const float* res = residual != nullptr ? residual + r * width : nullptr;
            if (res != nullptr) {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j)
                    out[j] = res[j] + rstd * (load(dr[j]) * norm.gamma[j] - sum - (xr[j] - mean) * rstd * dot);
            } else {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j)
                    out[j] = rstd * (load(dr[j]) * norm.gamma[j] - sum - (xr[j] - mean) * rstd * dot);
            }
            if (masked == nullptr) continue;
            T* m = masked + r * width;
            if (drop.on()) {
                const uint32_t key = row_key(drop.seed, stream, r);
                MF_SIMD
                for (int64_t j = 0; j < width; ++j)
                    store(m + j, dropped(drop, key, static_cast<uint32_t>(j), out[j]));
            } else {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) store(m + j, out[j]);
            }
            if (grads.bias != nullptr) {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) dbias[j] += load(m[j]);
            }
        }
    });
    if (grads.gamma != nullptr) reduce_blocks(partial, blocks, 3 * width, grads.gamma, width);
    if (grads.beta != nullptr) reduce_blocks(partial + width, blocks, 3 * width, grads.beta, width);
    if (grads.bias != nullptr) reduce_blocks(partial + 2 * width, blocks, 3 * width, grads.bias, width);
}

template <class T>
void add_residual(const float* x, const T* branch, const Dropout& drop, DropoutStream stream, float* y, int64_t rows,
                  int64_t width) {
    parallel_blocks(rows, grain_of(rows), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            residual_row(x + r * width, branch + r * width, drop, drop.on() ? row_key(drop.seed, stream, r) : 0,
                         y + r * width, width);
    });
}

template <class T>
void mask_gradient(const float* dy, const Dropout& drop, DropoutStream stream, T* out, float* bias, int64_t rows,
                   int64_t width) {
    const int64_t grain = grain_of(rows), blocks = (rows + grain - 1) / grain;
    float* partial = shared<float>(kPartial, blocks * width);
    std::memset(partial, 0, sizeof(float) * blocks * width);
    parallel_blocks(rows, grain, [&](int64_t begin, int64_t end) {
        float* sums = partial + begin / grain * width;
        for (int64_t r = begin; r < end; ++r) {
            const float* d = dy + r * width;
            T* o = out + r * width;
            if (drop.on()) {
                const uint32_t key = row_key(drop.seed, stream, r);
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) store(o + j, dropped(drop, key, static_cast<uint32_t>(j), d[j]));
            } else {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) store(o + j, d[j]);
            }
            MF_SIMD
            for (int64_t j = 0; j < width; ++j) sums[j] += load(o[j]);
        }
    });
    if (bias != nullptr) reduce_blocks(partial, blocks, width, bias, width);
}

template <class T>
void column_sums(const T* x, float* sums, int64_t rows, int64_t width) {
    const int64_t grain = grain_of(rows), blocks = (rows + grain - 1) / grain;
    float* partial = shared<float>(kPartial, blocks * width);
    std::memset(partial, 0, sizeof(float) * blocks * width);
    parallel_blocks(rows, grain, [&](int64_t begin, int64_t end) {
        float* mine = partial + begin / grain * width;
        for (int64_t r = begin; r < end; ++r) {
            const T* row = x + r * width;
            MF_SIMD
            for (int64_t j = 0; j < width; ++j) mine[j] += load(row[j]);
        }
    });
    reduce_blocks(partial, blocks, width, sums, width);
}

namespace {

// Where gate and up of column j lie.
struct Pair {
    int64_t step, up;
    Pair(const ActivationSpec& spec, int64_t width) : step(spec.interleaved ? 2 : 1), up(spec.interleaved ? 1 : width) {}
};

template <int A, class T>
void forward_rows(const T* pre, T* out, int64_t rows, int64_t width, const ActivationSpec& spec) {
    const Pair at(spec, width);
    parallel_blocks(rows, grain_of(rows), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            T* o = out + r * width;
            const T* p = pre + r * width * (spec.gated ? 2 : 1);
            if (spec.gated) {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) {
                    float y, slope;
                    activate<A>(load(p[j * at.step]), y, slope);
                    store(o + j, y * load(p[j * at.step + at.up]));
                }
            } else {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) {
                    float y, slope;
                    activate<A>(load(p[j]), y, slope);
                    store(o + j, y);
                }
            }
        }
    });
}

template <int A, class T>
void backward_rows(const T* pre, const T* dout, T* out, T* dpre, float* bias, int64_t rows, int64_t width,
                   const ActivationSpec& spec) {
    const Pair at(spec, width);
    const int64_t wide = width * (spec.gated ? 2 : 1);
    const int64_t grain = grain_of(rows), blocks = (rows + grain - 1) / grain;
    float* partial = shared<float>(kPartial, blocks * wide);
    std::memset(partial, 0, sizeof(float) * blocks * wide);
    parallel_blocks(rows, grain, [&](int64_t begin, int64_t end) {
        float* sums = partial + begin / grain * wide;
        for (int64_t r = begin; r < end; ++r) {
            const T* p = pre + r * wide;
            const T* d = dout + r * width;
            T* o = out + r * width;
            T* dp = dpre + r * wide;
            if (spec.gated) {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) {
                    float y, slope;
                    const float up = load(p[j * at.step + at.up]), g = load(d[j]);
                    activate<A>(load(p[j * at.step]), y, slope);
                    store(o + j, y * up);
                    store(dp + j * at.step, g * up * slope);
                    store(dp + j * at.step + at.up, g * y);
                }
            } else {
                MF_SIMD
                for (int64_t j = 0; j < width; ++j) {
                    float y, slope;
                    const float g = load(d[j]);
                    activate<A>(load(p[j]), y, slope);
                    store(o + j, y);
                    store(dp + j, g * slope);
                }
            }
            if (bias == nullptr) continue;
            MF_SIMD
            for (int64_t j = 0; j < wide; ++j) sums[j] += load(dp[j]);
        }
    });
    if (bias != nullptr) reduce_blocks(partial, blocks, wide, bias, wide);
}

}  // namespace

template <class T>
void activation_forward(const T* pre, T* out, int64_t rows, int64_t width, const ActivationSpec& spec) {
    switch (spec.kind) {
        case kGeluTanh: return forward_rows<kGeluTanh>(pre, out, rows, width, spec);
        case kGeluErf: return forward_rows<kGeluErf>(pre, out, rows, width, spec);
        case kSilu: return forward_rows<kSilu>(pre, out, rows, width, spec);
        default: return forward_rows<kRelu>(pre, out, rows, width, spec);
    }
}

template <class T>
void activation_backward(const T* pre, const T* dout, T* out, T* dpre, float* bias, int64_t rows, int64_t width,
                         const ActivationSpec& spec) {
    switch (spec.kind) {
        case kGeluTanh: return backward_rows<kGeluTanh>(pre, dout, out, dpre, bias, rows, width, spec);
        case kGeluErf: return backward_rows<kGeluErf>(pre, dout, out, dpre, bias, rows, width, spec);
        case kSilu: return backward_rows<kSilu>(pre, dout, out, dpre, bias, rows, width, spec);
        default: return backward_rows<kRelu>(pre, dout, out, dpre, bias, rows, width, spec);
    }
}

#define MF_INSTANTIATE(T)                                                                                            \
    template void norm_forward<T>(const float*, const T*, const Dropout&, DropoutStream, float*, T*, float*, int64_t, \
                                  int64_t, const Norm&);                                                             \
    template void norm_again<T>(const float*, const float*, T*, int64_t, int64_t, const Norm&);                      \
    template void norm_backward<T>(const float*, const float*, const T*, const float*, float*, T*, const Dropout&,   \
                                   DropoutStream, const NormGrads&, int64_t, int64_t, const Norm&);                  \
    template void add_residual<T>(const float*, const T*, const Dropout&, DropoutStream, float*, int64_t, int64_t);  \
    template void mask_gradient<T>(const float*, const Dropout&, DropoutStream, T*, float*, int64_t, int64_t);       \
    template void column_sums<T>(const T*, float*, int64_t, int64_t);                                                \
    template void activation_forward<T>(const T*, T*, int64_t, int64_t, const ActivationSpec&);                      \
    template void activation_backward<T>(const T*, const T*, T*, T*, float*, int64_t, int64_t, const ActivationSpec&);
MF_INSTANTIATE(float)
MF_INSTANTIATE(bf16)

}  // namespace mf
