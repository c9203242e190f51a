// Element-wise building blocks, written so that the compiler vectorises loops over them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gemm.h"

#define MF_SIMD _Pragma("omp simd")
#define MF_PRAGMA(text) _Pragma(#text)
#define MF_SIMD_SUM(...) MF_PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define MF_SIMD_MAX(...) MF_PRAGMA(omp simd reduction(max : __VA_ARGS__))

namespace mf {

inline float load(float x) { return x; }
inline float load(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

inline void store(float* p, float x) { *p = x; }
// Round to nearest, ties to even; a NaN stays one.
inline void store(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    *p = static_cast<bf16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x: 2^n * p(r) with |r| <= ln2/2, degree-6 Taylor-like polynomial (Cephes' expf coefficients); relative error
// below 2e-7. 0 below -87.3, infinity above 88.3 (n stays within an exponent), NaN stays NaN.
inline float exp_fast(float x) {
    const float low = -87.33654f, high = 88.3762626f;
    float y = x < low ? low : x;
    y = y > high ? high : y;
    const float n = __builtin_rintf(y * 1.44269504088896341f);
    float r = y - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n == n ? n : 0.0f) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    const float result = p * power;
    return x < low ? 0.0f : (x > high ? std::numeric_limits<float>::infinity() : result);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// erfc for any z, relative error below 1.2e-7 (Chebyshev fit of Press et al., Numerical Recipes, 6.2).
inline float erfc_fast(float z) {
    const float a = z < 0.0f ? -z : z;
    const float t = 1.0f / (1.0f + 0.5f * a);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    const float tail = t * exp_fast(p - a * a);
    return z < 0.0f ? 2.0f - tail : tail;
}

enum Activation : int { kGeluTanh = 0, kGeluErf = 1, kSilu = 2, kRelu = 3 };

// Value and derivative of an activation.
template <int A>
inline void activate(float x, float& y, float& dy) {
    if (A == kGeluTanh) {
        // x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of Hendrycks & Gimpel, rewritten.
        const float c = 1.5957691216057308f, x2 = x * x;
        const float s = sigmoid(c * x * (1.0f + 0.044715f * x2));
        y = x * s;
        const float slope = s + x * s * (1.0f - s) * c * (1.0f + 3.0f * 0.044715f * x2);
        // Far out s is exactly 0 or 1 while x^3 may be infinite: their product is 0, not NaN.
        dy = x > 12.0f ? 1.0f : (x < -12.0f ? 0.0f : slope);
        y = x < -1e4f ? 0.0f : y;
    } else if (A == kGeluErf) {
        const float cdf = 0.5f * erfc_fast(-0.70710678118654752f * x);
        y = x < -1e4f ? 0.0f : x * cdf;
        const float slope = cdf + x * 0.3989422804014327f * exp_fast(-0.5f * x * x);
        dy = x > 16.0f ? 1.0f : (x < -16.0f ? 0.0f : slope);
    } else if (A == kSilu) {
        const float s = sigmoid(x);
        y = x < -1e4f ? 0.0f : x * s;
        const float slope = s * (1.0f + x * (1.0f - s));
        dy = x > 100.0f ? 1.0f : (x < -100.0f ? 0.0f : slope);
    } else {
        y = x < 0.0f ? 0.0f : x;
        dy = x > 0.0f ? 1.0f : (x == x ? 0.0f : x);
    }
}

// Counter-based random bits for dropout: the mask of any element can be made again from (seed, row, column).
inline uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
inline uint32_t row_key(uint64_t seed, uint64_t stream, uint64_t row) {
    return static_cast<uint32_t>(mix64(mix64(seed ^ (stream << 56)) + row) >> 16);
}
inline uint32_t mix32(uint32_t key, uint32_t column) {
    uint32_t h = column * 0x9e3779b9u + key;
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    return h ^ (h >> 16);
}

struct Dropout {
    float keep_scale = 1.0f;   // 1 / (1 - p)
    uint32_t threshold = 0;    // dropped when the random word is below
    uint64_t seed = 0;
    bool on() const { return threshold != 0; }
    static Dropout make(double p, uint64_t seed) {
        Dropout d;
        if (p > 0.0) {
            d.keep_scale = static_cast<float>(1.0 / (1.0 - p));
            d.threshold = static_cast<uint32_t>(p * 4294967296.0);
            d.seed = seed;
        }
        return d;
    }
};
enum DropoutStream : uint64_t { kDropAttention = 1, kDropProj = 2, kDropMlp = 3, kDropEmbedding = 4 };
inline float dropped(const Dropout& d, uint32_t key, uint32_t column, float x) {
    return mix32(key, column) < d.threshold ? 0.0f : x * d.keep_scale;
}

// dst = src converted, on all threads.
void convert(const float* src, bf16* dst, int64_t n);
void convert(const float* src, float* dst, int64_t n);

}  // namespace mf
