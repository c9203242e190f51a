// Causal attention without an S x S tensor: a block of query rows at a time, each with its keys.
#pragma once

#include "vec.h"

namespace mf {

// The QKV buffer is [S, B, heads_total * head_dim] with mindformers' layouts: per group (its queries, key,
// value), or contiguous (all queries, all keys, all values).
struct AttentionShape {
    int64_t batch, seq, heads, groups, dim;
    bool contiguous;
    double dropout;
    int64_t width() const { return (heads + 2 * groups) * dim; }
    int64_t queries_per_group() const { return heads / groups; }
    int64_t query_at(int64_t head) const {
        return contiguous ? head * dim : (head / queries_per_group() * 2 + head) * dim;
    }
    int64_t key_at(int64_t group) const {
        return contiguous ? (heads + group) * dim : (group * (queries_per_group() + 2) + queries_per_group()) * dim;
    }
    // Query heads, then key heads: those that are normed and rotated.
    int64_t head_at(int64_t head) const { return head < heads ? query_at(head) : key_at(head - heads); }
    int64_t value_at(int64_t group) const { return key_at(group) + (contiguous ? groups * dim : dim); }
};

// context [S, B, heads * dim]; lse [B, heads, S]: log of the sum of exp(scores), all the backward needs.
template <class T>
void attention_forward(const T* qkv, T* context, float* lse, const AttentionShape& shape, uint64_t seed);

// dqkv, like qkv.
template <class T>
void attention_backward(const T* qkv, const T* context, const float* lse, const T* dcontext, T* dqkv,
                        const AttentionShape& shape, uint64_t seed);

// RMSNorm over every query head and every key head (Qwen3); gammas [dim].
struct HeadNorms {
    const float *query, *key;
    float eps;
};

// out = qkv with its queries and keys normed; values are copied.
template <class T>
void normalize_heads(const T* qkv, T* out, const HeadNorms& norms, const AttentionShape& shape);

// dqkv, the gradient at `out`, becomes the one at `qkv`; query and key [dim] get the gammas' gradients.
template <class T>
void normalize_heads_backward(const T* qkv, T* dqkv, const HeadNorms& norms, float* query, float* key,
                              const AttentionShape& shape);

// Rotate the first 2*half columns of every query and key head in place (GPT-NeoX halves: x1 cos - x2 sin,
// x2 cos + x1 sin); table [2, S, half] holds cos and sin. `inverse` rotates back, which is the gradient.
template <class T>
void rotate(T* qkv, const float* table, int64_t half, bool inverse, const AttentionShape& shape);

}  // namespace mf
