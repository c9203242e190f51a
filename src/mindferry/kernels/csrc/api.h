// How MindSpore calls a kernel, and the checks at that border.
//
// An AOT custom operator is `int f(int n, void** data, int* ndims, int64_t** shapes, const char** dtypes,
// void* stream, void* extra)`: inputs, then outputs. An exception becomes MindSpore's error with its text.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "vec.h"

#define MF_KERNEL(name)                                                                                             \
    extern "C" int name(int n, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)

namespace mf {

struct Arg {
    void* data;
    int ndim;
    const int64_t* shape;
    const char* dtype;
    int64_t count() const {
        int64_t c = 1;
        for (int i = 0; i < ndim; ++i) c *= shape[i];
        return c;
    }
};

// Takes the arguments one after the other and checks each.
class Args {
  public:
    Args(const char* name, int n, void** data, int* ndims, int64_t** shapes, const char** dtypes)
        : name_(name), n_(n), data_(data), ndims_(ndims), shapes_(shapes), dtypes_(dtypes) {}

    [[noreturn]] void fail(const std::string& what) const {
        throw std::invalid_argument(std::string("mindferry ") + name_ + ": " + what);
    }

    // The next argument, of this type; -1 stands for any size. No shape given: any shape.
    Arg next(const char* what, const char* dtype, std::initializer_list<int64_t> shape = {}) {
        if (at_ >= n_) fail(std::string(what) + ": missing argument");
        const Arg arg{data_[at_], ndims_[at_], shapes_[at_], dtypes_[at_]};
        ++at_;
        if (std::strcmp(arg.dtype, dtype) != 0)
            fail(std::string(what) + ": found " + arg.dtype + ", expected " + dtype);
        bool fits = shape.size() == 0 || static_cast<int>(shape.size()) == arg.ndim;
        int i = 0;
        if (fits && shape.size() != 0)
            for (const int64_t size : shape) fits = (size < 0 || size == arg.shape[i]) && arg.shape[i] >= 0 && fits, ++i;
        if (!fits) fail(std::string(what) + ": found shape " + text(arg) + ", expected " + text(shape));
        if (arg.data == nullptr && arg.count() > 0) fail(std::string(what) + ": no data");
        return arg;
    }
    float* floats(const char* what, std::initializer_list<int64_t> shape = {}) {
        return static_cast<float*>(next(what, "float32", shape).data);
    }
    // An operator's number of arguments is fixed: what is not wanted is passed as any tensor and left alone.
    float* optional(bool wanted, const char* what, std::initializer_list<int64_t> shape) {
        if (wanted) return floats(what, shape);
        next(what, "float32");
        return nullptr;
    }
    void done() const {
        if (at_ != n_) fail("found " + std::to_string(n_) + " arguments, expected " + std::to_string(at_));
    }

  private:
    static std::string text(const Arg& arg) {
        std::string s = "[";
        for (int i = 0; i < arg.ndim; ++i) s += (i ? ", " : "") + std::to_string(arg.shape[i]);
        return s + "]";
    }
    static std::string text(std::initializer_list<int64_t> shape) {
        std::string s = "[";
        for (const int64_t size : shape) s += (s.size() > 1 ? ", " : "") + (size < 0 ? "any" : std::to_string(size));
        return s + "]";
    }

    const char* name_;
    int n_, at_ = 0;
    void** data_;
    int* ndims_;
    int64_t** shapes_;
    const char** dtypes_;
};

// Settings travel as one int64 tensor; floating-point ones as the bits of a double.
class Settings {
  public:
    Settings(Args& args, int64_t count) {
        values_ = static_cast<const int64_t*>(args.next("settings", "int64", {count}).data);
    }
    explicit Settings(const int64_t* values) : values_(values) {}
    int64_t integer() { return values_[at_++]; }
    bool flag() { return integer() != 0; }
    double real() {
        double d;
        std::memcpy(&d, values_ + at_++, sizeof d);
        return d;
    }

  private:
    const int64_t* values_;
    int at_ = 0;
};

// A new seed at each call: the process's seed and a counter.
uint64_t next_seed();

}  // namespace mf
