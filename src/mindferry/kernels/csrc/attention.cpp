#include "attention.h"

#include <algorithm>

#include "pool.h"
#include "scratch.h"

namespace mf {
namespace {

// Query rows a block: scores of a block against all keys stay near the caches, and memory linear in S.
int64_t block_rows(int64_t seq) {
    const int64_t rows = (int64_t(256) << 10) / std::max<int64_t>(seq, 1) / 32 * 32;
    return std::clamp<int64_t>(rows, 32, 128);
}

// Heads are spread over a wide row; copies of them side by side make the products faster.
template <class T>
void gather_head(const T* src, int64_t stride, T* dst, int64_t rows, int64_t dim) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * dim, src + i * stride, sizeof(T) * dim);
}

template <class T>
void gather_transposed(const T* src, int64_t stride, T* dst, int64_t rows, int64_t dim) {
    const int64_t step = 16;
    for (int64_t i0 = 0; i0 < rows; i0 += step)
        for (int64_t j = 0; j < dim; ++j)
            for (int64_t i = i0; i < std::min(i0 + step, rows); ++i) dst[j * rows + i] = src[i * stride + j];
}

// Scores of one row -> exp(scaled score - maximum) in the compute type, zero beyond `valid`. Returns log-sum-exp;
// `inverse` gets what makes probabilities of them, applied to the much shorter output row later.
template <class T>
float softmax_row(const float* scores, T* weights, int64_t valid, int64_t width, float scale, float& inverse) {
    float top = -std::numeric_limits<float>::infinity();
    MF_SIMD_MAX(top)
    for (int64_t j = 0; j < valid; ++j) top = scores[j] > top ? scores[j] : top;
    const float peak = top;
    float sum = 0.0f;
    MF_SIMD_SUM(sum)
    for (int64_t j = 0; j < valid; ++j) {
        const float weight = exp_fast((scores[j] - peak) * scale);
        store(weights + j, weight);
        sum += weight;
    }
    inverse = 1.0f / sum;
    for (int64_t j = valid; j < width; ++j) store(weights + j, 0.0f);
    return peak * scale + std::log(sum);
}

template <class T>
void drop_row(T* probs, const Dropout& drop, uint32_t key, int64_t valid) {
    MF_SIMD
    for (int64_t j = 0; j < valid; ++j)
        store(probs + j, dropped(drop, key, static_cast<uint32_t>(j), load(probs[j])));
}

}  // namespace

template <class T>
void attention_forward(const T* qkv, T* context, float* lse, const AttentionShape& s, uint64_t seed) {
    const int64_t stride = s.batch * s.width(), out_stride = s.batch * s.heads * s.dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    const int64_t rows = block_rows(s.seq);
    const Dropout drop = Dropout::make(s.dropout, seed);
    Pool::get().parallel_for(static_cast<int>(s.batch * s.heads), [&](int item, int) {
        const int64_t b = item / s.heads, head = item % s.heads, group = head / s.queries_per_group();
        const T* base = qkv + b * s.width();
        T* q = local<T>(kTileQ, s.seq * s.dim);
        T* kt = local<T>(kTileKT, s.seq * s.dim);
        T* v = local<T>(kTileV, s.seq * s.dim);
        gather_head(base + s.query_at(head), stride, q, s.seq, s.dim);
        gather_transposed(base + s.key_at(group), stride, kt, s.seq, s.dim);
        gather_head(base + s.value_at(group), stride, v, s.seq, s.dim);
        float* scores = local<float>(kTileScores, rows * s.seq);
        T* probs = local<T>(kTileGrad, rows * s.seq);
        float* rescale = local<float>(kTileDV, rows);
        float* tile = local<float>(kTileOut, rows * s.dim);
        for (int64_t i = 0; i < s.seq; i += rows) {
            const int64_t m = std::min(rows, s.seq - i), keys = i + m;
            gemm(mat(q + i * s.dim, m, s.dim), mat(kt, s.dim, keys, s.seq), mat(scores, m, keys));
            for (int64_t r = 0; r < m; ++r) {
                T* p = probs + r * keys;
                lse[item * s.seq + i + r] = softmax_row(scores + r * keys, p, i + r + 1, keys, scale, rescale[r]);
                if (drop.on()) drop_row(p, drop, row_key(seed, kDropAttention, item * s.seq + i + r), i + r + 1);
            }
            T* out = context + i * out_stride + (b * s.heads + head) * s.dim;
            gemm(mat(probs, m, keys), mat(v, keys, s.dim), mat(tile, m, s.dim));
            for (int64_t r = 0; r < m; ++r) {
                MF_SIMD
                for (int64_t j = 0; j < s.dim; ++j) store(out + r * out_stride + j, tile[r * s.dim + j] * rescale[r]);
            }
        }
    });
}

namespace {

// Gradient of one head; dk and dv [S, dim] are added to.
template <class T>
void head_backward(const T* qkv, const T* context, const float* lse, const T* dcontext, T* dqkv,
                   const AttentionShape& s, uint64_t seed, int64_t item, float* dk, float* dv) {
    const int64_t stride = s.batch * s.width(), out_stride = s.batch * s.heads * s.dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    const int64_t rows = block_rows(s.seq);
    const Dropout drop = Dropout::make(s.dropout, seed);
    const int64_t b = item / s.heads, head = item % s.heads, group = head / s.queries_per_group();
    const T* base = qkv + b * s.width();
    const T* ctx = context + (b * s.heads + head) * s.dim;
    const T* dctx = dcontext + (b * s.heads + head) * s.dim;
    T* q = local<T>(kTileQ, s.seq * s.dim);
    T* k = local<T>(kTileK, s.seq * s.dim);
    T* kt = local<T>(kTileKT, s.seq * s.dim);
    T* vt = local<T>(kTileVT, s.seq * s.dim);
    T* grad = local<T>(kTileDO, s.seq * s.dim);
    gather_head(base + s.query_at(head), stride, q, s.seq, s.dim);
    gather_head(base + s.key_at(group), stride, k, s.seq, s.dim);
    gather_transposed(base + s.key_at(group), stride, kt, s.seq, s.dim);
    gather_transposed(base + s.value_at(group), stride, vt, s.seq, s.dim);
    gather_head(dctx, out_stride, grad, s.seq, s.dim);
    float* scores = local<float>(kTileScores, rows * s.seq);
    float* dprobs = local<float>(kTileGrad, rows * s.seq);
    T* probs = local<T>(kTileOut, rows * s.seq);
    T* dscores = local<T>(kTileDQ, rows * s.seq);
    for (int64_t i = 0; i < s.seq; i += rows) {
        const int64_t m = std::min(rows, s.seq - i), keys = i + m;
        gemm(mat(q + i * s.dim, m, s.dim), mat(kt, s.dim, keys, s.seq), mat(scores, m, keys));
        gemm(mat(grad + i * s.dim, m, s.dim), mat(vt, s.dim, keys, s.seq), mat(dprobs, m, keys));
        for (int64_t r = 0; r < m; ++r) {
            const int64_t valid = i + r + 1;
            const T* o = ctx + (i + r) * out_stride;
            const T* d = grad + (i + r) * s.dim;
            float delta = 0.0f;
            MF_SIMD_SUM(delta)
            for (int64_t j = 0; j < s.dim; ++j) delta += load(o[j]) * load(d[j]);
            const float* sc = scores + r * keys;
            const float* dp = dprobs + r * keys;
            T* p = probs + r * keys;
            T* ds = dscores + r * keys;
            const float l = lse[item * s.seq + i + r];
            if (drop.on()) {
                const uint32_t key = row_key(seed, kDropAttention, item * s.seq + i + r);
                MF_SIMD
                for (int64_t j = 0; j < valid; ++j) {
                    const float prob = exp_fast(sc[j] * scale - l);
                    const float kept = dropped(drop, key, static_cast<uint32_t>(j), 1.0f);
                    store(p + j, prob * kept);
                    store(ds + j, prob * (dp[j] * kept - delta) * scale);
                }
            } else {
                MF_SIMD
                for (int64_t j = 0; j < valid; ++j) {
                    const float prob = exp_fast(sc[j] * scale - l);
                    store(p + j, prob);
                    store(ds + j, prob * (dp[j] - delta) * scale);
                }
            }
            for (int64_t j = valid; j < keys; ++j) store(p + j, 0.0f), store(ds + j, 0.0f);
        }
        T* dq = dqkv + i * stride + b * s.width() + s.query_at(head);
        gemm(mat(dscores, m, keys), mat(k, keys, s.dim), mat(dq, m, s.dim, stride));
        gemm(transposed(mat(dscores, m, keys)), mat(q + i * s.dim, m, s.dim), mat(dk, keys, s.dim), true);
        gemm(transposed(mat(probs, m, keys)), mat(grad + i * s.dim, m, s.dim), mat(dv, keys, s.dim), true);
    }
}

template <class T>
void scatter(const float* src, T* dst, int64_t stride, int64_t rows, int64_t dim) {
    for (int64_t i = 0; i < rows; ++i) {
        MF_SIMD
        for (int64_t j = 0; j < dim; ++j) store(dst + i * stride + j, src[i * dim + j]);
    }
}

}  // namespace

template <class T>
void attention_backward(const T* qkv, const T* context, const float* lse, const T* dcontext, T* dqkv,
                        const AttentionShape& s, uint64_t seed) {
    const int64_t stride = s.batch * s.width(), size = s.seq * s.dim, per_group = s.queries_per_group();
    // Groups share their key and value: one task per group while that keeps the threads busy, else one per
    // head with sums of its own. The choice rests on the shape alone.
    const bool by_group = per_group == 1 || s.batch * s.groups >= 16;
    float* sums = by_group ? nullptr : shared<float>(kGradK, s.batch * s.heads * 2 * size);
    const int64_t tasks = s.batch * (by_group ? s.groups : s.heads);
    Pool::get().parallel_for(static_cast<int>(tasks), [&](int task, int) {
        const int64_t first = by_group ? task * per_group : task, count = by_group ? per_group : 1;
        float* dk = by_group ? local<float>(kTileDK, 2 * size) : sums + task * 2 * size;
        float* dv = dk + size;
        std::memset(dk, 0, sizeof(float) * 2 * size);
        for (int64_t h = first; h < first + count; ++h)
            head_backward(qkv, context, lse, dcontext, dqkv, s, seed, h, dk, dv);
        if (!by_group) return;
        T* base = dqkv + task / s.groups * s.width();
        scatter(dk, base + s.key_at(task % s.groups), stride, s.seq, s.dim);
        scatter(dv, base + s.value_at(task % s.groups), stride, s.seq, s.dim);
    });
    if (by_group) return;
    Pool::get().parallel_for(static_cast<int>(s.batch * s.groups), [&](int item, int) {
        float* total = sums + item * per_group * 2 * size;
        for (int64_t h = 1; h < per_group; ++h) {
            const float* more = total + h * 2 * size;
            MF_SIMD
            for (int64_t j = 0; j < 2 * size; ++j) total[j] += more[j];
        }
        T* base = dqkv + item / s.groups * s.width();
        scatter(total, base + s.key_at(item % s.groups), stride, s.seq, s.dim);
        scatter(total + size, base + s.value_at(item % s.groups), stride, s.seq, s.dim);
    });
}

namespace {

// 1 / root mean square of one head.
template <class T>
float head_scale(const T* x, int64_t dim, float eps) {
    float squares = 0.0f;
    MF_SIMD_SUM(squares)
    for (int64_t j = 0; j < dim; ++j) squares += load(x[j]) * load(x[j]);
    return 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
}

}  // namespace

template <class T>
void normalize_heads(const T* qkv, T* out, const HeadNorms& norms, const AttentionShape& s) {
    parallel_blocks(s.seq * s.batch, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            std::memcpy(out + row * s.width(), qkv + row * s.width(), sizeof(T) * s.width());
            for (int64_t head = 0; head < s.heads + s.groups; ++head) {
                const float* gamma = head < s.heads ? norms.query : norms.key;
                const T* x = qkv + row * s.width() + s.head_at(head);
                T* y = out + row * s.width() + s.head_at(head);
                const float scale = head_scale(x, s.dim, norms.eps);
                MF_SIMD
                for (int64_t j = 0; j < s.dim; ++j) store(y + j, load(x[j]) * scale * gamma[j]);
            }
        }
    });
}

template <class T>
void normalize_heads_backward(const T* qkv, T* dqkv, const HeadNorms& norms, float* query, float* key,
                              const AttentionShape& s) {
    // At most 64 blocks, whatever the number of threads; their sums are added in order.
    const int64_t rows = s.seq * s.batch, grain = std::max<int64_t>(4, (rows + 63) / 64);
    const int64_t blocks = (rows + grain - 1) / grain;
    float* partial = shared<float>(kPartial, blocks * 2 * s.dim);
    std::memset(partial, 0, sizeof(float) * blocks * 2 * s.dim);
    parallel_blocks(rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t head = 0; head < s.heads + s.groups; ++head) {
                const float* gamma = head < s.heads ? norms.query : norms.key;
                float* dgamma = partial + begin / grain * 2 * s.dim + (head < s.heads ? 0 : s.dim);
                const T* x = qkv + row * s.width() + s.head_at(head);
                T* d = dqkv + row * s.width() + s.head_at(head);
                const float scale = head_scale(x, s.dim, norms.eps);
                float dot = 0.0f;
                MF_SIMD_SUM(dot)
                for (int64_t j = 0; j < s.dim; ++j) {
                    const float hat = load(x[j]) * scale;
                    dgamma[j] += load(d[j]) * hat;
                    dot += load(d[j]) * gamma[j] * hat;
                }
                dot /= static_cast<float>(s.dim);
                MF_SIMD
                for (int64_t j = 0; j < s.dim; ++j)
                    store(d + j, scale * (load(d[j]) * gamma[j] - load(x[j]) * scale * dot));
            }
        }
    });
    for (float* sums : {query, key}) {
        std::memset(sums, 0, sizeof(float) * s.dim);
        for (int64_t b = 0; b < blocks; ++b)
            for (int64_t j = 0; j < s.dim; ++j) sums[j] += partial[b * 2 * s.dim + (sums == key ? s.dim : 0) + j];
    }
}

template <class T>
void rotate(T* qkv, const float* table, int64_t half, bool inverse, const AttentionShape& s) {
    const float sign = inverse ? -1.0f : 1.0f;
    parallel_blocks(s.seq * s.batch, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* cosine = table + row / s.batch * half;
            const float* sine = cosine + s.seq * half;
            for (int64_t head = 0; head < s.heads + s.groups; ++head) {
                T* x = qkv + row * s.width() + s.head_at(head);
                MF_SIMD
                for (int64_t j = 0; j < half; ++j) {
                    const float a = load(x[j]), b = load(x[j + half]);
                    store(x + j, a * cosine[j] - sign * b * sine[j]);
                    store(x + j + half, b * cosine[j] + sign * a * sine[j]);
                }
            }
        }
    });
}

#define MF_INSTANTIATE(T)                                                                                      \
    template void attention_forward<T>(const T*, T*, float*, const AttentionShape&, uint64_t);                 \
    template void attention_backward<T>(const T*, const T*, const float*, const T*, T*, const AttentionShape&, \
                                        uint64_t);                                                             \
    template void normalize_heads<T>(const T*, T*, const HeadNorms&, const AttentionShape&);                   \
    template void normalize_heads_backward<T>(const T*, T*, const HeadNorms&, float*, float*,                  \
                                              const AttentionShape&);                                          \
    template void rotate<T>(T*, const float*, int64_t, bool, const AttentionShape&);
MF_INSTANTIATE(float)
MF_INSTANTIATE(bf16)

}  // namespace mf
