#include "scratch.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "pool.h"
#include "vec.h"

namespace mf {
namespace {

struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
    void* at_least(size_t wanted) {
        if (wanted > bytes) {
            std::free(data);
            bytes = (wanted + 4095) / 4096 * 4096;
            data = std::aligned_alloc(4096, bytes);
            if (data == nullptr) {
                bytes = 0;
                throw std::bad_alloc();
            }
        }
        return data;
    }
};

Buffer shared_buffers[kSlots];

}  // namespace

void* shared_scratch(Slot slot, size_t bytes) { return shared_buffers[slot].at_least(std::max<size_t>(bytes, 64)); }

void* thread_scratch(LocalSlot slot, size_t bytes) {
    static thread_local Buffer* buffers = new Buffer[kLocalSlots];
    return buffers[slot].at_least(std::max<size_t>(bytes, 64));
}

void release_scratch() {
    OpLock lock;
    for (Buffer& buffer : shared_buffers) {
        std::free(buffer.data);
        buffer = Buffer();
    }
}

void convert(const float* src, bf16* dst, int64_t n) {
    parallel_blocks(n, 1 << 17, [&](int64_t begin, int64_t end) {
        MF_SIMD
        for (int64_t i = begin; i < end; ++i) store(dst + i, src[i]);
    });
}

void convert(const float* src, float* dst, int64_t n) {
    parallel_blocks(n, 1 << 17, [&](int64_t begin, int64_t end) {
        std::memcpy(dst + begin, src + begin, sizeof(float) * (end - begin));
    });
}

}  // namespace mf
