// Matrix products by oneDNN.
#pragma once

#include <cstdint>

#include "onednn.h"

namespace mf {

using bf16 = uint16_t;

// A matrix somewhere in memory; strides in elements.
struct Mat {
    void* data;
    int type;  // kBf16 or kF32
    int64_t rows, cols, row_stride, col_stride;
};

inline Mat mat(float* p, int64_t rows, int64_t cols, int64_t stride) { return {p, kF32, rows, cols, stride, 1}; }
inline Mat mat(bf16* p, int64_t rows, int64_t cols, int64_t stride) { return {p, kBf16, rows, cols, stride, 1}; }
template <class T>
inline Mat mat(const T* p, int64_t rows, int64_t cols, int64_t stride) {
    return mat(const_cast<T*>(p), rows, cols, stride);
}
template <class T>
inline Mat mat(T* p, int64_t rows, int64_t cols) { return mat(p, rows, cols, cols); }
inline Mat transposed(Mat m) { return {m.data, m.type, m.cols, m.rows, m.col_stride, m.row_stride}; }

// C = A B (+ bias [cols]), or C += A B when `accumulate`; float32 accumulation. Runs on all threads, or on the calling
// thread alone inside a pool task. Throws std::runtime_error when oneDNN refuses.
void gemm(const Mat& a, const Mat& b, const Mat& c, bool accumulate = false, const float* bias = nullptr);

// "" or what is wrong with the loaded oneDNN.
const char* onednn_problem();

}  // namespace mf
