// One transformer layer, x -> x + attention(norm(x)) -> + mlp(norm(.)), or with parallel_residual
// x + attention(norm(x)) + mlp(norm(x)); forward and backward.
#pragma once

#include "api.h"
#include "attention.h"
#include "rowwise.h"

namespace mf {

constexpr int64_t kLayerSettings = 22;

struct LayerShape {
    int64_t hidden, ffn, rotary_half;
    AttentionShape attention;   // batch and seq follow from x
    ActivationSpec activation;
    bool bf16_compute, rms, qkv_bias, bias;
    bool recompute_attention, recompute_mlp, keep;
    bool qk_norm;             // RMSNorm of every query and key head, before the rotation
    bool parallel_residual;   // the MLP reads the layer's input, too
    double hidden_dropout, eps;

    explicit LayerShape(const int64_t* settings);
    void set_input(int64_t seq, int64_t batch) { attention.seq = seq, attention.batch = batch; }
    int64_t rows() const { return attention.seq * attention.batch; }
    int64_t context_width() const { return attention.heads * attention.dim; }
    int64_t wide() const { return ffn * (activation.gated ? 2 : 1); }
    bool keep_weights() const { return bf16_compute && !recompute_attention && !recompute_mlp; }
    std::string problem() const;
};

// Where each kept activation lies in the blob that goes from forward to backward; offsets in bytes, -1: not kept.
struct Kept {
    int64_t seed, stats1, stats2, lse, context, qkv, residual, pre, weights, bytes;
    explicit Kept(const LayerShape& s);
};

}  // namespace mf
