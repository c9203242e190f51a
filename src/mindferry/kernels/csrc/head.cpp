// LM head with cross-entropy: loss and its gradients in one go, a chunk of tokens at a time.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "pool.h"
#include "rowwise.h"
#include "scratch.h"

namespace mf {
namespace {

// Bytes of the logits of one chunk. Larger: fewer passes over the weight gradient; smaller: less memory.
constexpr int64_t kChunkBytes = int64_t(96) << 20;

struct HeadOp {
    int64_t seq, batch, hidden, vocab;
    bool half, mean, gradients;
    const float *x, *weight, *mask;
    const int32_t* labels;

    explicit HeadOp(Args& args) {
        Settings s(args, 3);
        half = s.flag(), mean = s.flag(), gradients = s.flag();
        const Arg input = args.next("hidden_states", "float32", {-1, -1, -1});
        if (input.count() == 0) args.fail("hidden_states: empty tensor");
        seq = input.shape[0], batch = input.shape[1], hidden = input.shape[2];
        x = static_cast<const float*>(input.data);
        const Arg w = args.next("weight", "float32", {-1, hidden});
        vocab = w.shape[0];
        weight = static_cast<const float*>(w.data);
        labels = static_cast<const int32_t*>(args.next("labels", "int32", {batch * seq}).data);
        mask = args.floats("loss_mask", {batch * seq});
        for (int64_t i = 0; i < batch * seq; ++i)
            if (labels[i] >= vocab || (labels[i] < 0 && mask[i] != 0.0f))
                args.fail("label " + std::to_string(labels[i]) + " at [" + std::to_string(i / seq) + ", " +
                          std::to_string(i % seq) + "] is outside [0, " + std::to_string(vocab) + ")");
    }
};

// One row of logits -> its negative log-likelihood; the row becomes weight * (softmax - one-hot) in T, in place.
// The T values fill the front of the row: reading runs ahead of writing.
template <class T>
float loss_row(float* logits, int64_t vocab, int32_t label, float weight, bool gradients) {
    float top = -std::numeric_limits<float>::infinity();
    MF_SIMD_MAX(top)
    for (int64_t j = 0; j < vocab; ++j) top = logits[j] > top ? logits[j] : top;
    const float peak = top;
    const float picked = logits[label];
    // Short runs in float, their sums in double: 50 thousand terms would lose digits otherwise.
    double sum = 0.0;
    for (int64_t j0 = 0; j0 < vocab; j0 += 1024) {
        const int64_t stop = std::min<int64_t>(j0 + 1024, vocab);
        float part = 0.0f;
        MF_SIMD_SUM(part)
        for (int64_t j = j0; j < stop; ++j) {
            logits[j] = exp_fast(logits[j] - peak);
            part += logits[j];
        }
        sum += part;
    }
    if (gradients) {
        const float scale = static_cast<float>(weight / sum);
        T* out = reinterpret_cast<T*>(logits);
        const int64_t block = 256;
        float part[block];
        for (int64_t j0 = 0; j0 < vocab; j0 += block) {
            const int64_t m = std::min(block, vocab - j0);
            std::memcpy(part, logits + j0, sizeof(float) * m);
            MF_SIMD
            for (int64_t j = 0; j < m; ++j) part[j] *= scale;
            if (label >= j0 && label < j0 + m) part[label - j0] -= weight;
            T rounded[block];
            MF_SIMD
            for (int64_t j = 0; j < m; ++j) store(rounded + j, part[j]);
            std::memcpy(out + j0, rounded, sizeof(T) * m);
        }
    }
    return static_cast<float>(peak + std::log(sum) - picked);
}

template <class T>
void run(const HeadOp& op, const T* x, const T* w, double& total, double count, float* dx, float* dw) {
    const int64_t rows = op.seq * op.batch, padded = (op.vocab + 63) / 64 * 64;
    const int64_t chunk = std::min(rows, std::max<int64_t>(kChunkBytes / (4 * padded) / 32 * 32, 32));
    float* logits = shared<float>(kPre, chunk * padded);
    float* losses = shared<float>(kDelta, rows);
    const int64_t stride = padded * static_cast<int64_t>(sizeof(float) / sizeof(T));
    for (int64_t at = 0; at < rows; at += chunk) {
        const int64_t m = std::min(chunk, rows - at);
        gemm(mat(x + at * op.hidden, m, op.hidden), transposed(mat(w, op.vocab, op.hidden)),
             mat(logits, m, op.vocab, padded));
        parallel_blocks(m, 4, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                const int64_t row = at + r, from = row % op.batch * op.seq + row / op.batch;
                const float mask = op.mask[from];
                const float weight = op.mean ? static_cast<float>(mask / count) : mask;
                const int32_t label = std::max(op.labels[from], 0);
                losses[row] = mask * loss_row<T>(logits + r * padded, op.vocab, label, weight, op.gradients);
            }
        });
        if (!op.gradients) continue;
        const T* grad = reinterpret_cast<const T*>(logits);
        gemm(mat(grad, m, op.vocab, stride), mat(w, op.vocab, op.hidden), mat(dx + at * op.hidden, m, op.hidden));
        gemm(transposed(mat(grad, m, op.vocab, stride)), mat(x + at * op.hidden, m, op.hidden),
             mat(dw, op.vocab, op.hidden), at > 0);
    }
    for (int64_t i = 0; i < rows; ++i) total += losses[i];
}

}  // namespace

// settings, x [S, B, H], weight [V, H], labels [B * S], mask [B * S] -> loss [1], count [1], dx, dweight
// With `mean`: loss = total / count and gradients of that; else loss = total and gradients of the total.
// count is the sum of the mask plus 1e-8, as mindformers has it.
MF_KERNEL(mf_head_loss) {
    OpLock lock;
    Args args("head_loss", n, data, ndims, shapes, dtypes);
    const HeadOp op(args);
    float* loss = args.floats("loss", {1});
    float* counted = args.floats("count", {1});
    float* dx = op.gradients ? args.floats("input gradient", {op.seq, op.batch, op.hidden}) : nullptr;
    float* dw = op.gradients ? args.floats("weight gradient", {op.vocab, op.hidden}) : nullptr;
    args.done();
    double count = 1e-8, total = 0.0;
    for (int64_t i = 0; i < op.seq * op.batch; ++i) count += op.mask[i];
    if (op.half) {
        bf16* x = shared<bf16>(kNormed, op.seq * op.batch * op.hidden);
        bf16* w = shared<bf16>(kHead, op.vocab * op.hidden);
        convert(op.x, x, op.seq * op.batch * op.hidden);
        convert(op.weight, w, op.vocab * op.hidden);
        run<bf16>(op, x, w, total, count, dx, dw);
    } else {
        run<float>(op, op.x, op.weight, total, count, dx, dw);
    }
    *loss = static_cast<float>(op.mean ? total / count : total);
    *counted = static_cast<float>(count);
    return 0;
}

// In place: tensors *= scale[0]; nothing is touched when the scale is 1. scale [1], dx, dweight -> done [1]
MF_KERNEL(mf_head_scale) {
    OpLock lock;
    Args args("head_scale", n, data, ndims, shapes, dtypes);
    const float scale = *args.floats("scale", {1});
    const Arg tensors[2] = {args.next("input gradient", "float32"), args.next("weight gradient", "float32")};
    *args.floats("done", {1}) = 0.0f;
    args.done();
    if (scale == 1.0f) return 0;
    for (const Arg& t : tensors) {
        float* values = static_cast<float*>(t.data);
        parallel_blocks(t.count(), 1 << 17, [&](int64_t begin, int64_t end) {
            MF_SIMD
            for (int64_t j = begin; j < end; ++j) values[j] *= scale;
        });
    }
    return 0;
}

}  // namespace mf
