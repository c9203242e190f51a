#include "layer.h"

#include "pool.h"
#include "scratch.h"

namespace mf {

LayerShape::LayerShape(const int64_t* values) {
    Settings s(values);
    hidden = s.integer();
    attention.heads = s.integer();
    attention.groups = s.integer();
    attention.dim = s.integer();
    attention.contiguous = s.flag();
    ffn = s.integer();
    rotary_half = s.integer();
    activation.kind = static_cast<int>(s.integer());
    activation.gated = s.flag();
    activation.interleaved = s.flag();
    bf16_compute = s.flag();
    rms = s.flag();
    qkv_bias = s.flag();
    bias = s.flag();
    recompute_attention = s.flag();
    recompute_mlp = s.flag();
    keep = s.flag();
    qk_norm = s.flag();
    parallel_residual = s.flag();
    attention.dropout = s.real();
    hidden_dropout = s.real();
    eps = s.real();
    set_input(0, 0);
}

std::string LayerShape::problem() const {
    const AttentionShape& a = attention;
    if (hidden < 1 || ffn < 1 || a.heads < 1 || a.groups < 1 || a.dim < 1) return "a size below 1";
    if (a.heads % a.groups != 0) return "num_query_groups does not divide num_attention_heads";
    if (2 * rotary_half > a.dim) return "rotary dimensions exceed the head";
    if (activation.kind < 0 || activation.kind > 3) return "unknown activation";
    if (!(a.dropout >= 0.0 && a.dropout < 1.0 && hidden_dropout >= 0.0 && hidden_dropout < 1.0))
        return "a dropout outside [0, 1)";
    return "";
}

Kept::Kept(const LayerShape& s) {
    const int64_t rows = s.rows(), size = s.bf16_compute ? 2 : 4;
    bytes = 0;
    auto take = [this](bool wanted, int64_t n) {
        const int64_t at = bytes;
        if (wanted) bytes += (n + 63) / 64 * 64;
        return wanted ? at : -1;
    };
    seed = take(true, 64);
    const bool k = s.keep;
    stats1 = take(k, rows * 8);
    stats2 = take(k, rows * 8);
    lse = take(k, s.attention.heads * rows * 4);
    context = take(k, rows * s.context_width() * size);
    qkv = take(k && !s.recompute_attention, rows * s.attention.width() * size);
    residual = take(k && !s.parallel_residual && !(s.recompute_attention && s.recompute_mlp), rows * s.hidden * 4);
    pre = take(k && !s.recompute_mlp, rows * s.wide() * size);
    const int64_t weights_count =
        s.hidden * (s.attention.width() + s.context_width() + s.wide() + s.ffn);
    weights = take(k && s.keep_weights(), weights_count * 2);
}

namespace {

struct Parameters {
    const float *gamma1 = nullptr, *beta1 = nullptr, *qkv = nullptr, *qkv_bias = nullptr, *proj = nullptr,
                *proj_bias = nullptr, *gamma2 = nullptr, *beta2 = nullptr, *fc1 = nullptr, *fc1_bias = nullptr,
                *fc2 = nullptr, *fc2_bias = nullptr, *q_gamma = nullptr, *k_gamma = nullptr, *rotary = nullptr;
};

// Parameters, or their gradients, in the order of the parameter tree; the norms of query and key at the end.
template <class Table>
void take_parameters(Args& args, const LayerShape& s, Table& p) {
    p.gamma1 = args.floats("input_layernorm.gamma", {s.hidden});
    p.beta1 = args.optional(!s.rms, "input_layernorm.beta", {s.hidden});
    p.qkv = args.floats("linear_qkv.weight", {s.attention.width(), s.hidden});
    p.qkv_bias = args.optional(s.qkv_bias, "linear_qkv.bias", {s.attention.width()});
    p.proj = args.floats("linear_proj.weight", {s.hidden, s.context_width()});
    p.proj_bias = args.optional(s.bias, "linear_proj.bias", {s.hidden});
    p.gamma2 = args.floats("pre_mlp_layernorm.gamma", {s.hidden});
    p.beta2 = args.optional(!s.rms, "pre_mlp_layernorm.beta", {s.hidden});
    p.fc1 = args.floats("linear_fc1.weight", {s.wide(), s.hidden});
    p.fc1_bias = args.optional(s.bias, "linear_fc1.bias", {s.wide()});
    p.fc2 = args.floats("linear_fc2.weight", {s.hidden, s.ffn});
    p.fc2_bias = args.optional(s.bias, "linear_fc2.bias", {s.hidden});
    p.q_gamma = args.optional(s.qk_norm, "q_layernorm.weight", {s.attention.dim});
    p.k_gamma = args.optional(s.qk_norm, "k_layernorm.weight", {s.attention.dim});
}

void take_rotary(Args& args, const LayerShape& s, Parameters& p) {
    if (s.rotary_half > 0) {
        p.rotary = args.floats("rotary", {2, s.attention.seq, s.rotary_half});
    } else {
        args.next("rotary", "float32");
    }
}

struct Gradients {
    float *gamma1 = nullptr, *beta1 = nullptr, *qkv = nullptr, *qkv_bias = nullptr, *proj = nullptr,
          *proj_bias = nullptr, *gamma2 = nullptr, *beta2 = nullptr, *fc1 = nullptr, *fc1_bias = nullptr,
          *fc2 = nullptr, *fc2_bias = nullptr, *q_gamma = nullptr, *k_gamma = nullptr;
};

// The four matrices in the compute type: the parameters themselves, or bf16 copies.
template <class T>
struct Weights {
    const T *qkv, *proj, *fc1, *fc2;
};
void take_weights(Weights<float>& w, const LayerShape&, const Parameters& p, bf16*, bool) {
    w = {p.qkv, p.proj, p.fc1, p.fc2};
}
void take_weights(Weights<bf16>& w, const LayerShape& s, const Parameters& p, bf16* copy, bool filled) {
    const int64_t sizes[4] = {s.attention.width() * s.hidden, s.hidden * s.context_width(), s.wide() * s.hidden,
                              s.hidden * s.ffn};
    if (copy == nullptr) copy = shared<bf16>(kWeight, sizes[0] + sizes[1] + sizes[2] + sizes[3]);
    const float* from[4] = {p.qkv, p.proj, p.fc1, p.fc2};
    bf16* to[4];
    for (int i = 0; i < 4; ++i) {
        to[i] = copy;
        if (!filled) convert(from[i], to[i], sizes[i]);
        copy += sizes[i];
    }
    w = {to[0], to[1], to[2], to[3]};
}

template <class T>
class Layer {
  public:
    Layer(const LayerShape& shape, const Parameters& parameters, char* blob)
        : s(shape), p(parameters), kept(shape), base(blob), rows(shape.rows()) {
        norm1 = {s.rms, static_cast<float>(s.eps), p.gamma1, p.beta1};
        norm2 = {s.rms, static_cast<float>(s.eps), p.gamma2, p.beta2};
        head_norms = {p.q_gamma, p.k_gamma, static_cast<float>(s.eps)};
    }

    void forward(const float* x, float* y) {
        const uint64_t seed = next_seed();
        std::memcpy(base + kept.seed, &seed, sizeof seed);
        Weights<T> w;
        take_weights(w, s, p, at<bf16>(kept.weights), false);
        const Dropout drop = Dropout::make(s.hidden_dropout, seed);
        T* normed = shared<T>(kNormed, rows * s.hidden);
        T* branch = shared<T>(kBranch, rows * s.hidden);
        T* qkv = at_or<T>(kept.qkv, kQkv, rows * s.attention.width());
        T* context = at_or<T>(kept.context, kContext, rows * s.context_width());
        float* lse = at_or<float>(kept.lse, kDelta, rows * s.attention.heads);
        float* residual = at_or<float>(kept.residual, kMidResidual, rows * s.hidden);
        norm_forward<T>(x, nullptr, drop, kDropProj, nullptr, normed, at<float>(kept.stats1), rows, s.hidden, norm1);
        make_qkv(normed, w, qkv);
        attention_forward<T>(attention_input(qkv), context, lse, s.attention, seed);
        gemm(mat(context, rows, s.context_width()), transposed(mat(w.proj, s.hidden, s.context_width())),
             mat(branch, rows, s.hidden), false, p.proj_bias);
        float* stats2 = at<float>(kept.stats2);
        if (s.parallel_residual) {
            add_residual(x, branch, drop, kDropProj, residual, rows, s.hidden);
            norm_forward<T>(x, nullptr, drop, kDropProj, nullptr, normed, stats2, rows, s.hidden, norm2);
        } else {
            norm_forward(x, branch, drop, kDropProj, residual, normed, stats2, rows, s.hidden, norm2);
        }
        T* pre = at_or<T>(kept.pre, kPre, rows * s.wide());
        T* act = shared<T>(kWide, rows * s.ffn);
        make_pre(normed, w, pre);
        activation_forward(pre, act, rows, s.ffn, s.activation);
        gemm(mat(act, rows, s.ffn), transposed(mat(w.fc2, s.hidden, s.ffn)), mat(branch, rows, s.hidden), false,
             p.fc2_bias);
        add_residual(residual, branch, drop, kDropMlp, y, rows, s.hidden);
    }

    void backward(const float* x, const float* dy, float* dx, const Gradients& g) {
        uint64_t seed;
        std::memcpy(&seed, base + kept.seed, sizeof seed);
        Weights<T> w;
        take_weights(w, s, p, at<bf16>(kept.weights), kept.weights >= 0);
        const Dropout drop = Dropout::make(s.hidden_dropout, seed);
        T* normed = shared<T>(kNormed, rows * s.hidden);
        T* branch = shared<T>(kBranch, rows * s.hidden);
        float* dmid = shared<float>(kGradMid, rows * s.hidden);
        const float* residual = s.parallel_residual ? x : mid_residual(x, w, drop, branch);
        mlp_backward(residual, dy, dmid, w, drop, normed, branch, g);
        attention_part_backward(x, dmid, dx, w, drop, normed, branch, g, seed);
    }

  private:
    template <class U>
    U* at(int64_t offset) const { return offset < 0 ? nullptr : reinterpret_cast<U*>(base + offset); }
    template <class U>
    U* at_or(int64_t offset, Slot slot, int64_t count) const {
        return offset < 0 ? shared<U>(slot, count) : reinterpret_cast<U*>(base + offset);
    }

    void make_qkv(const T* normed, const Weights<T>& w, T* qkv) const {
        const int64_t width = s.attention.width();
        gemm(mat(normed, rows, s.hidden), transposed(mat(w.qkv, width, s.hidden)), mat(qkv, rows, width), false,
             p.qkv_bias);
        if (s.rotary_half > 0 && !s.qk_norm) rotate(qkv, p.rotary, s.rotary_half, false, s.attention);
    }
    // What attention reads: `qkv` itself, or with norms of query and key, whose gradient needs their input, a copy.
    T* attention_input(T* qkv) const {
        if (!s.qk_norm) return qkv;
        T* heads = shared<T>(kHeads, rows * s.attention.width());
        normalize_heads(qkv, heads, head_norms, s.attention);
        if (s.rotary_half > 0) rotate(heads, p.rotary, s.rotary_half, false, s.attention);
        return heads;
    }
    void make_pre(const T* normed, const Weights<T>& w, T* pre) const {
        gemm(mat(normed, rows, s.hidden), transposed(mat(w.fc1, s.wide(), s.hidden)), mat(pre, rows, s.wide()), false,
             p.fc1_bias);
    }

    // x + attention branch: kept, or made again from the kept context (one product out of four).
    const float* mid_residual(const float* x, const Weights<T>& w, const Dropout& drop, T* branch) const {
        if (kept.residual >= 0) return at<float>(kept.residual);
        float* residual = shared<float>(kMidResidual, rows * s.hidden);
        gemm(mat(at<T>(kept.context), rows, s.context_width()),
             transposed(mat(w.proj, s.hidden, s.context_width())), mat(branch, rows, s.hidden), false, p.proj_bias);
        add_residual(x, branch, drop, kDropProj, residual, rows, s.hidden);
        return residual;
    }

    // Gradient through the MLP and its norm, whose input `residual` is (the layer's own with parallel_residual). On
    // return `dmid` is the gradient there, dy included, and `branch` the one at the projection's output.
    void mlp_backward(const float* residual, const float* dy, float* dmid, const Weights<T>& w, const Dropout& drop,
                      T* normed, T* branch, const Gradients& g) const {
        const float* stats = at<float>(kept.stats2);
        norm_again(residual, stats, normed, rows, s.hidden, norm2);
        T* pre = at_or<T>(kept.pre, kPre, rows * s.wide());
        if (s.recompute_mlp) make_pre(normed, w, pre);
        mask_gradient(dy, drop, kDropMlp, branch, g.fc2_bias, rows, s.hidden);
        T* dact = shared<T>(kWide, rows * s.ffn);
        T* act = shared<T>(kWide2, rows * s.ffn);
        gemm(mat(branch, rows, s.hidden), mat(w.fc2, s.hidden, s.ffn), mat(dact, rows, s.ffn));
        T* dpre = s.activation.gated ? shared<T>(kGradQkv, rows * s.wide()) : dact;
        activation_backward(pre, dact, act, dpre, g.fc1_bias, rows, s.ffn, s.activation);
        gemm(transposed(mat(branch, rows, s.hidden)), mat(act, rows, s.ffn), mat(g.fc2, s.hidden, s.ffn));
        gemm(transposed(mat(dpre, rows, s.wide())), mat(normed, rows, s.hidden), mat(g.fc1, s.wide(), s.hidden));
        gemm(mat(dpre, rows, s.wide()), mat(w.fc1, s.wide(), s.hidden), mat(normed, rows, s.hidden));
        if (s.parallel_residual) {
            norm_backward<T>(residual, stats, normed, dy, dmid, nullptr, drop, kDropProj,
                             {g.gamma2, g.beta2, nullptr}, rows, s.hidden, norm2);
            mask_gradient(dy, drop, kDropProj, branch, g.proj_bias, rows, s.hidden);
        } else {
            norm_backward(residual, stats, normed, dy, dmid, branch, drop, kDropProj,
                          {g.gamma2, g.beta2, g.proj_bias}, rows, s.hidden, norm2);
        }
    }

    void attention_part_backward(const float* x, const float* dmid, float* dx, const Weights<T>& w,
                                 const Dropout& drop, T* normed, T* branch, const Gradients& g, uint64_t seed) const {
        const int64_t width = s.attention.width();
        const T* context = at<T>(kept.context);
        gemm(transposed(mat(branch, rows, s.hidden)), mat(context, rows, s.context_width()),
             mat(g.proj, s.hidden, s.context_width()));
        T* dcontext = shared<T>(kContext, rows * s.context_width());
        gemm(mat(branch, rows, s.hidden), mat(w.proj, s.hidden, s.context_width()),
             mat(dcontext, rows, s.context_width()));
        norm_again(x, at<float>(kept.stats1), normed, rows, s.hidden, norm1);
        T* qkv = at_or<T>(kept.qkv, kQkv, rows * width);
        if (s.recompute_attention) make_qkv(normed, w, qkv);
        T* dqkv = shared<T>(kGradQkv, rows * width);
        attention_backward<T>(attention_input(qkv), context, at<float>(kept.lse), dcontext, dqkv, s.attention, seed);
        if (s.rotary_half > 0) rotate(dqkv, p.rotary, s.rotary_half, true, s.attention);
        if (s.qk_norm) normalize_heads_backward(qkv, dqkv, head_norms, g.q_gamma, g.k_gamma, s.attention);
        if (g.qkv_bias != nullptr) column_sums(dqkv, g.qkv_bias, rows, width);
        gemm(transposed(mat(dqkv, rows, width)), mat(normed, rows, s.hidden), mat(g.qkv, width, s.hidden));
        gemm(mat(dqkv, rows, width), mat(w.qkv, width, s.hidden), mat(normed, rows, s.hidden));
        norm_backward<T>(x, at<float>(kept.stats1), normed, dmid, dx, nullptr, drop, kDropProj,
                         {g.gamma1, g.beta1, nullptr}, rows, s.hidden, norm1);
    }

    const LayerShape& s;
    const Parameters& p;
    const Kept kept;
    char* base;
    const int64_t rows;
    Norm norm1, norm2;
    HeadNorms head_norms;
};

LayerShape take_shape(Args& args, Arg& x) {
    const Arg settings = args.next("settings", "int64", {kLayerSettings});
    LayerShape s(static_cast<const int64_t*>(settings.data));
    if (const std::string problem = s.problem(); !problem.empty()) args.fail(problem);
    x = args.next("hidden_states", "float32", {-1, -1, s.hidden});
    if (x.count() == 0) args.fail("hidden_states: empty tensor");
    s.set_input(x.shape[0], x.shape[1]);
    return s;
}

}  // namespace

// Bytes that layer_forward keeps for layer_backward.
extern "C" int64_t mf_layer_kept_bytes(const int64_t* settings, int64_t seq, int64_t batch) {
    LayerShape s(settings);
    s.set_input(seq, batch);
    return Kept(s).bytes;
}

// settings, x [S, B, H], 14 parameters, rotary table [2, S, half] -> y [S, B, H], kept [bytes] uint8
MF_KERNEL(mf_layer_forward) {
    OpLock lock;
    Args args("layer_forward", n, data, ndims, shapes, dtypes);
    Arg x;
    const LayerShape s = take_shape(args, x);
    Parameters p;
    take_parameters(args, s, p);
    take_rotary(args, s, p);
    float* y = args.floats("output", {x.shape[0], x.shape[1], s.hidden});
    char* blob = static_cast<char*>(args.next("kept", "uint8", {Kept(s).bytes}).data);
    args.done();
    const float* in = static_cast<const float*>(x.data);
    if (s.bf16_compute) {
        Layer<bf16>(s, p, blob).forward(in, y);
    } else {
        Layer<float>(s, p, blob).forward(in, y);
    }
    return 0;
}

// settings, x, 14 parameters, rotary, kept, dy -> dx, 14 parameter gradients
MF_KERNEL(mf_layer_backward) {
    OpLock lock;
    Args args("layer_backward", n, data, ndims, shapes, dtypes);
    Arg x;
    const LayerShape s = take_shape(args, x);
    Parameters p;
    take_parameters(args, s, p);
    take_rotary(args, s, p);
    char* blob = static_cast<char*>(args.next("kept", "uint8", {Kept(s).bytes}).data);
    if (!s.keep) args.fail("the forward pass kept nothing (evaluation mode)");
    const float* dy = args.floats("output gradient", {x.shape[0], x.shape[1], s.hidden});
    float* dx = args.floats("input gradient", {x.shape[0], x.shape[1], s.hidden});
    Gradients g;
    take_parameters(args, s, g);
    args.done();
    const float* in = static_cast<const float*>(x.data);
    if (s.bf16_compute) {
        Layer<bf16>(s, p, blob).backward(in, dy, dx, g);
    } else {
        Layer<float>(s, p, blob).backward(in, dy, dx, g);
    }
    return 0;
}

}  // namespace mf
