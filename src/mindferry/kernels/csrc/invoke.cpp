// Calls from outside MindSpore (the loader's self-test): an exception must not cross into C.
#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "api.h"

namespace {
std::string& last_error() {
    static thread_local std::string* text = new std::string();
    return *text;
}
}  // namespace

using Kernel = int (*)(int, void**, int*, int64_t**, const char**, void*, void*);

extern "C" int mf_invoke(Kernel kernel, int n, void** data, int* ndims, int64_t** shapes, const char** dtypes) {
    try {
        return kernel(n, data, ndims, shapes, dtypes, nullptr, nullptr);
    } catch (const std::exception& error) {
        last_error() = error.what();
        return -1;
    }
}

extern "C" const char* mf_last_error() { return last_error().c_str(); }

// Seconds of one product C [m, n] = A B by oneDNN alone, for the benchmarks' floor; operands as the layer has
// them: bit 0 of `transposed`: A is stored [k, m]; bit 1: B is stored [n, k].
extern "C" double mf_product_seconds(int64_t m, int64_t n, int64_t k, int half, int transposed) {
    using namespace mf;
    static auto* memory = new std::vector<float>();
    const size_t need = static_cast<size_t>(m * k + k * n + m * n);
    if (memory->size() < need) memory->assign(need, 0.01f);
    const int type = half ? kBf16 : kF32;
    float* base = memory->data();
    Mat a{base, type, m, k, k, 1}, b{base + m * k, type, k, n, n, 1};
    if (transposed & 1) a = {base, type, m, k, 1, m};
    if (transposed & 2) b = {base + m * k, type, k, n, 1, k};
    const auto start = std::chrono::steady_clock::now();
    gemm(a, b, {base + m * k + k * n, (transposed & 1) ? kF32 : type, m, n, n, 1});
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
