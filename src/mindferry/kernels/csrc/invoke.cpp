// Calls from outside MindSpore (the loader's self-test): an exception must not cross into C.
#include <exception>
#include <string>

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
