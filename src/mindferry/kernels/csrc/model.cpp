// The parts of a model around its layers: embedding, norm, linear, head with cross-entropy.
#include <algorithm>

#include "api.h"
#include "pool.h"
#include "rowwise.h"
#include "scratch.h"

namespace mf {
namespace {

std::atomic<uint64_t> base_seed{0}, calls{0};

void check_ids(const Args& args, const char* what, const int32_t* ids, int64_t batch, int64_t seq, int64_t limit) {
    for (int64_t i = 0; i < batch * seq; ++i)
        if (ids[i] < 0 || ids[i] >= limit)
            args.fail(std::string(what) + " " + std::to_string(ids[i]) + " at [" + std::to_string(i / seq) + ", " +
                      std::to_string(i % seq) + "] is outside [0, " + std::to_string(limit) + ")");
}

}  // namespace

uint64_t next_seed() { return mix64(base_seed.load() + calls.fetch_add(1)); }

extern "C" void mf_set_seed(uint64_t seed) {
    base_seed = mix64(seed);
    calls = 0;
}

namespace {

struct Embedding {
    int64_t vocab, positions, hidden, batch, seq;
    bool has_positions, tied;
    double dropout;
    const int32_t *ids, *at;

    Embedding(Args& args) {
        Settings s(args, 6);
        vocab = s.integer(), positions = s.integer(), hidden = s.integer(), has_positions = s.flag();
        tied = s.flag();
        dropout = s.real();
        if (!(dropout >= 0.0 && dropout < 1.0)) args.fail("dropout outside [0, 1)");
        const Arg id = args.next("input_ids", "int32", {-1, -1});
        batch = id.shape[0], seq = id.shape[1];
        ids = static_cast<const int32_t*>(id.data);
        at = static_cast<const int32_t*>(args.next("position_ids", "int32", {batch, seq}).data);
        check_ids(args, "token id", ids, batch, seq, vocab);
        if (has_positions) check_ids(args, "position id", at, batch, seq, positions);
    }
};

}  // namespace

// settings, ids [B, S], position ids, words [V, H], positions [P, H] -> x [S, B, H], seed [1] int64
MF_KERNEL(mf_embedding_forward) {
    OpLock lock;
    Args args("embedding_forward", n, data, ndims, shapes, dtypes);
    const Embedding e(args);
    const float* words = args.floats("word_embeddings.weight", {e.vocab, e.hidden});
    const float* places = args.optional(e.has_positions, "position_embeddings.weight", {e.positions, e.hidden});
    float* out = args.floats("output", {e.seq, e.batch, e.hidden});
    auto* seed = static_cast<int64_t*>(args.next("seed", "int64", {1}).data);
    args.done();
    const uint64_t fresh = next_seed();
    std::memcpy(seed, &fresh, sizeof fresh);
    const Dropout drop = Dropout::make(e.dropout, fresh);
    parallel_blocks(e.seq * e.batch, 16, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t from = r % e.batch * e.seq + r / e.batch;
            const float* word = words + e.ids[from] * e.hidden;
            float* o = out + r * e.hidden;
            std::memcpy(o, word, sizeof(float) * e.hidden);
            if (places != nullptr) {
                const float* place = places + e.at[from] * e.hidden;
                MF_SIMD
                for (int64_t j = 0; j < e.hidden; ++j) o[j] += place[j];
            }
            if (drop.on()) {
                const uint32_t key = row_key(fresh, kDropEmbedding, r);
                MF_SIMD
                for (int64_t j = 0; j < e.hidden; ++j) o[j] = dropped(drop, key, static_cast<uint32_t>(j), o[j]);
            }
        }
    });
    return 0;
}

// settings, ids, position ids, seed, dx [S, B, H] -> dwords [V, H], dpositions [P, H]
// Tied: dwords is an input, the head's gradient of the same table, that is added to in place.
MF_KERNEL(mf_embedding_backward) {
    OpLock lock;
    Args args("embedding_backward", n, data, ndims, shapes, dtypes);
    const Embedding e(args);
    uint64_t seed;
    std::memcpy(&seed, args.next("seed", "int64", {1}).data, sizeof seed);
    const float* dx = args.floats("output gradient", {e.seq, e.batch, e.hidden});
    float* words = args.floats("word gradient", {e.vocab, e.hidden});
    float* places = args.optional(e.has_positions, "position gradient", {e.positions, e.hidden});
    args.done();
    const Dropout drop = Dropout::make(e.dropout, seed);
    if (!e.tied) {
        parallel_blocks(e.vocab, 1024, [&](int64_t begin, int64_t end) {
            std::memset(words + begin * e.hidden, 0, sizeof(float) * (end - begin) * e.hidden);
        });
    }
    if (places != nullptr) std::memset(places, 0, sizeof(float) * e.positions * e.hidden);
    // Every task owns some columns and adds all tokens to them in order: no races, the same sums always.
    parallel_blocks(e.hidden, 128, [&](int64_t begin, int64_t end) {
        for (int64_t r = 0; r < e.seq * e.batch; ++r) {
            const int64_t from = r % e.batch * e.seq + r / e.batch;
            const float* d = dx + r * e.hidden;
            float* word = words + e.ids[from] * e.hidden;
            float* place = places != nullptr ? places + e.at[from] * e.hidden : nullptr;
            const uint32_t key = drop.on() ? row_key(seed, kDropEmbedding, r) : 0;
            for (int64_t j = begin; j < end; ++j) {
                const float g = drop.on() ? dropped(drop, key, static_cast<uint32_t>(j), d[j]) : d[j];
                word[j] += g;
                if (place != nullptr) place[j] += g;
            }
        }
    });
    return 0;
}

namespace {

struct NormOp {
    Arg x;
    int64_t rows, width;
    Norm norm;
    NormOp(Args& args) {
        Settings s(args, 2);
        norm.rms = s.flag();
        norm.eps = static_cast<float>(s.real());
        x = args.next("input", "float32");
        if (x.ndim < 1 || x.count() == 0) args.fail("input: empty tensor");
        width = x.shape[x.ndim - 1];
        rows = x.count() / width;
        norm.gamma = args.floats("gamma", {width});
        norm.beta = args.optional(!norm.rms, "beta", {width});
    }
};

}  // namespace

// settings, x [..., H], gamma, beta -> y, stats [rows, 2]
MF_KERNEL(mf_norm_forward) {
    OpLock lock;
    Args args("norm_forward", n, data, ndims, shapes, dtypes);
    const NormOp op(args);
    float* y = args.floats("output");
    float* stats = args.floats("stats", {op.rows, 2});
    args.done();
    norm_forward<float>(static_cast<float*>(op.x.data), nullptr, Dropout(), kDropProj, nullptr, y, stats, op.rows,
                        op.width, op.norm);
    return 0;
}

// settings, x, gamma, beta, stats, dy -> dx, dgamma, dbeta
MF_KERNEL(mf_norm_backward) {
    OpLock lock;
    Args args("norm_backward", n, data, ndims, shapes, dtypes);
    const NormOp op(args);
    const float* stats = args.floats("stats", {op.rows, 2});
    const float* dy = args.floats("output gradient");
    float* dx = args.floats("input gradient");
    float* dgamma = args.floats("gamma gradient", {op.width});
    float* dbeta = args.optional(!op.norm.rms, "beta gradient", {op.width});
    args.done();
    norm_backward<float>(static_cast<float*>(op.x.data), stats, dy, nullptr, dx, nullptr, Dropout(), kDropProj,
                         {dgamma, dbeta, nullptr}, op.rows, op.width, op.norm);
    return 0;
}

namespace {

struct LinearOp {
    bool half, has_bias;
    int64_t rows, in, out;
    const float *x, *weight, *bias;
    LinearOp(Args& args) {
        Settings s(args, 2);
        half = s.flag(), has_bias = s.flag();
        const Arg input = args.next("input", "float32");
        if (input.ndim < 1 || input.count() == 0) args.fail("input: empty tensor");
        in = input.shape[input.ndim - 1];
        rows = input.count() / in;
        const Arg w = args.next("weight", "float32", {-1, in});
        out = w.shape[0];
        x = static_cast<const float*>(input.data), weight = static_cast<const float*>(w.data);
        bias = args.optional(has_bias, "bias", {out});
    }
    bf16* half_of(Slot slot, const float* from, int64_t count) const {
        bf16* to = shared<bf16>(slot, count);
        convert(from, to, count);
        return to;
    }
};

}  // namespace

// settings, x [..., in], weight [out, in], bias -> y [..., out]
MF_KERNEL(mf_linear_forward) {
    OpLock lock;
    Args args("linear_forward", n, data, ndims, shapes, dtypes);
    const LinearOp op(args);
    float* y = args.floats("output");
    args.done();
    if (op.half) {
        const bf16* x = op.half_of(kNormed, op.x, op.rows * op.in);
        const bf16* w = op.half_of(kHead, op.weight, op.out * op.in);
        gemm(mat(x, op.rows, op.in), transposed(mat(w, op.out, op.in)), mat(y, op.rows, op.out), false, op.bias);
    } else {
        gemm(mat(op.x, op.rows, op.in), transposed(mat(op.weight, op.out, op.in)), mat(y, op.rows, op.out), false,
             op.bias);
    }
    return 0;
}

// settings, x, weight, bias, dy -> dx, dweight, dbias
MF_KERNEL(mf_linear_backward) {
    OpLock lock;
    Args args("linear_backward", n, data, ndims, shapes, dtypes);
    const LinearOp op(args);
    const float* dy = args.floats("output gradient");
    float* dx = args.floats("input gradient");
    float* dw = args.floats("weight gradient", {op.out, op.in});
    float* dbias = args.optional(op.has_bias, "bias gradient", {op.out});
    args.done();
    if (op.half) {
        const bf16* x = op.half_of(kNormed, op.x, op.rows * op.in);
        const bf16* w = op.half_of(kHead, op.weight, op.out * op.in);
        const bf16* d = op.half_of(kWide, dy, op.rows * op.out);
        gemm(transposed(mat(d, op.rows, op.out)), mat(x, op.rows, op.in), mat(dw, op.out, op.in));
        gemm(mat(d, op.rows, op.out), mat(w, op.out, op.in), mat(dx, op.rows, op.in));
    } else {
        gemm(transposed(mat(dy, op.rows, op.out)), mat(op.x, op.rows, op.in), mat(dw, op.out, op.in));
        gemm(mat(dy, op.rows, op.out), mat(op.weight, op.out, op.in), mat(dx, op.rows, op.in));
    }
    if (dbias != nullptr) column_sums(dy, dbias, op.rows, op.out);
    return 0;
}

}  // namespace mf
