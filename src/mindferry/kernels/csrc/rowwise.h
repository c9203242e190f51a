// Kernels that work row by row: norms with their residual, activations, column sums. T is float or bf16.
#pragma once

#include "vec.h"

namespace mf {

struct Norm {
    bool rms;             // RMSNorm (no mean, no beta) or LayerNorm
    float eps;
    const float* gamma;   // [width]
    const float* beta;    // [width] or null
};

// x1 = x + dropout(branch) when `branch`, else x; out = norm(x1). x1 may be null (not kept); stats [rows, 2] gets
// mean and 1/std of every row, or is null.
template <class T>
void norm_forward(const float* x, const T* branch, const Dropout& drop, DropoutStream stream, float* x1, T* out,
                  float* stats, int64_t rows, int64_t width, const Norm& norm);

// out = norm(x) from the kept stats.
template <class T>
void norm_again(const float* x, const float* stats, T* out, int64_t rows, int64_t width, const Norm& norm);

// What norm_backward writes; null: not wanted.
struct NormGrads {
    float* gamma;
    float* beta;
    float* bias;   // column sums of `masked`
};

// dx = residual (when given) + gradient of norm at x; masked = dropout mask times dx, for the branch before.
template <class T>
void norm_backward(const float* x, const float* stats, const T* dout, const float* residual, float* dx, T* masked,
                   const Dropout& drop, DropoutStream stream, const NormGrads& grads, int64_t rows, int64_t width,
                   const Norm& norm);

// y = x + dropout(branch).
template <class T>
void add_residual(const float* x, const T* branch, const Dropout& drop, DropoutStream stream, float* y, int64_t rows,
                  int64_t width);

// out = dropout mask times dy; bias (or null) gets its column sums.
template <class T>
void mask_gradient(const float* dy, const Dropout& drop, DropoutStream stream, T* out, float* bias, int64_t rows,
                   int64_t width);

template <class T>
void column_sums(const T* x, float* sums, int64_t rows, int64_t width);

struct ActivationSpec {
    int kind;          // Activation
    bool gated;        // out = act(gate) * up; pre is twice as wide
    bool interleaved;  // gate and up alternate column by column, else gate first
};

// out [rows, width] = activation(pre [rows, width or 2 width]).
template <class T>
void activation_forward(const T* pre, T* out, int64_t rows, int64_t width, const ActivationSpec& spec);

// Also makes the activation again (out), as the weight gradient after it needs. dpre may be pre's own memory;
// not dout's when gated. bias (or null) gets the column sums of dpre.
template <class T>
void activation_backward(const T* pre, const T* dout, T* out, T* dpre, float* bias, int64_t rows, int64_t width,
                         const ActivationSpec& spec);

}  // namespace mf
