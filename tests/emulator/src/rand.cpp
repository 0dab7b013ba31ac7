// cuRAND: uniform and normal numbers. Other numbers than the real one's; the same from the same seed.
#include <cmath>

#include "handles.h"
#include "report.h"
#include "work.h"

namespace emulator {

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 101, LENGTH_NOT_MULTIPLE = 105, LAUNCH_FAILURE = 201 };

struct Generator {
    Device* device;
    CUstream stream = nullptr;
    uint64_t seed = 0;
    uint64_t next = 0;
};

// splitmix64 (Steele, Lea and Flood 2014) of the number's place, as a uniform number in (0, 1].
double uniform(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xd1342543de82ef95ull + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (double)(((z ^ (z >> 31)) >> 40) + 1) / (double)(1 << 24);
}

// Box and Muller 1958: numbers come in pairs.
double normal(uint64_t seed, uint64_t index) {
    double radius = std::sqrt(-2 * std::log(uniform(seed, index / 2 * 2)));
    double angle = 2 * M_PI * uniform(seed, index / 2 * 2 + 1);
    return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

template <typename T, typename F>
int generate(void* handle, T* out, size_t count, F value_at) {
    std::shared_ptr<Generator> generator = handles<Generator>().get(handle);
    if (!generator || check_current() != CUDA_SUCCESS) {
        return NOT_INITIALIZED;
    }
    std::shared_ptr<Stream> stream = stream_from(generator->stream);
    CUdeviceptr address = reinterpret_cast<CUdeviceptr>(out);
    const char* who = "random numbers";
    if (!stream || stream->device != generator->device ||
        place(*stream->device, address, count * sizeof(T), When::Asked, who, true) == nullptr) {
        return LAUNCH_FAILURE;
    }
    put(*stream, [=, seed = generator->seed, first = generator->next](Device& device) {
        T* values = reinterpret_cast<T*>(place(device, address, count * sizeof(T), When::Running, who, true));
        if (values == nullptr) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        for (size_t i = 0; i < count; ++i) {
            values[i] = (T)value_at(seed, first + i);
        }
        return CUDA_SUCCESS;
    });
    generator->next += (count + 1) / 2 * 2;
    return SUCCESS;
}

template <typename T>
int generate_normal(void* handle, T* out, size_t count, T mean, T deviation) {
    if (count % 2 != 0) {
        report("cuRAND makes normal numbers in pairs, got a length of %zu", count);
        return LENGTH_NOT_MULTIPLE;
    }
    return generate(handle, out, count, [=](uint64_t seed, uint64_t i) { return mean + deviation * normal(seed, i); });
}

} // namespace

} // namespace emulator

using namespace emulator;

extern "C" {

int curandCreateGenerator(void** handle, int) {
    if (check_current() != CUDA_SUCCESS) {
        return NOT_INITIALIZED;
    }
    auto generator = std::make_shared<Generator>();
    generator->device = current_device();
    *handle = handles<Generator>().add(generator);
    return SUCCESS;
}

int curandDestroyGenerator(void* handle) {
    return handles<Generator>().remove(handle) ? SUCCESS : NOT_INITIALIZED;
}

int curandSetStream(void* handle, CUstream stream) {
    std::shared_ptr<Generator> generator = handles<Generator>().get(handle);
    if (!generator) {
        return NOT_INITIALIZED;
    }
    generator->stream = stream;
    return SUCCESS;
}

int curandSetPseudoRandomGeneratorSeed(void* handle, unsigned long long seed) {
    std::shared_ptr<Generator> generator = handles<Generator>().get(handle);
    if (!generator) {
        return NOT_INITIALIZED;
    }
    generator->seed = seed;
    generator->next = 0;
    return SUCCESS;
}

int curandSetGeneratorOffset(void* handle, unsigned long long offset) {
    std::shared_ptr<Generator> generator = handles<Generator>().get(handle);
    if (!generator) {
        return NOT_INITIALIZED;
    }
    generator->next = offset;
    return SUCCESS;
}

int curandGenerateUniform(void* handle, float* out, size_t count) {
    return generate(handle, out, count, uniform);
}

int curandGenerateUniformDouble(void* handle, double* out, size_t count) {
    return generate(handle, out, count, uniform);
}

int curandGenerateNormal(void* handle, float* out, size_t count, float mean, float deviation) {
    return generate_normal(handle, out, count, mean, deviation);
}

int curandGenerateNormalDouble(void* handle, double* out, size_t count, double mean, double deviation) {
    return generate_normal(handle, out, count, mean, deviation);
}

} // extern "C"
