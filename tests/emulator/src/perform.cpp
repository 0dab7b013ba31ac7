// What NCCL's kernels do to values.
#include <cstring>
#include <type_traits>

#include "clique.h"
#include "work.h"

namespace emulator {

namespace {

// NCCL's numbers of types and reductions.
enum DataType { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
constexpr int SUM = 0, PROD = 1, MAX = 2;

struct Brain {
    uint16_t bits;

    explicit Brain(float x) {
        uint32_t wide;
        std::memcpy(&wide, &x, sizeof wide);
        bits = x != x ? 0x7fc0 : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }

    operator float() const {
        uint32_t wide = (uint32_t)bits << 16;
        float x;
        std::memcpy(&x, &wide, sizeof x);
        return x;
    }
};

// Sums of half precision are rounded after each rank, and a maximum or minimum drops a NaN, as on the GPU.
template <typename T>
T combined(int op, T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        return op == SUM ? (T)((U)a + (U)b) : op == PROD ? (T)(U)((uint64_t)(U)a * (U)b) : (op == MAX) == (a > b) ? a : b;
    } else if constexpr (std::is_same_v<T, Brain>) {
        return Brain(combined<float>(op, a, b));
    } else {
        return op == SUM ? a + b : op == PROD ? a * b : a != a || (op == MAX ? b > a : b < a) ? b : a;
    }
}

using Bytes = std::vector<char>;

template <typename T>
void fold(int op, Bytes& acc, const Bytes& values) {
    T* out = reinterpret_cast<T*>(acc.data());
    const T* in = reinterpret_cast<const T*>(values.data());
    for (size_t i = 0; i < acc.size() / sizeof(T); ++i) {
        out[i] = combined(op, out[i], in[i]);
    }
}

void reduce(int type, int op, Bytes& acc, const Bytes& values) {
    switch (type) {
    case INT8:
        return fold<int8_t>(op, acc, values);
    case UINT8:
        return fold<uint8_t>(op, acc, values);
    case INT32:
        return fold<int32_t>(op, acc, values);
    case UINT32:
        return fold<uint32_t>(op, acc, values);
    case INT64:
        return fold<int64_t>(op, acc, values);
    case UINT64:
        return fold<uint64_t>(op, acc, values);
    case FLOAT16:
        return fold<_Float16>(op, acc, values);
    case FLOAT32:
        return fold<float>(op, acc, values);
    case FLOAT64:
        return fold<double>(op, acc, values);
    default:
        return fold<Brain>(op, acc, values);
    }
}

Bytes read(const Part& part, size_t bytes) {
    const char* from = bytes == 0 ? nullptr : place(*part.device, part.task.send, bytes, When::Running, "what NCCL reads", true);
    if (from == nullptr) {
        if (bytes > 0) {
            part.device->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        return Bytes(bytes);
    }
    return Bytes(from, from + bytes);
}

void write(const Part& part, const char* values, size_t bytes) {
    if (bytes == 0) {
        return;
    }
    char* to = place(*part.device, part.task.recv, bytes, When::Running, "what NCCL writes", true);
    if (to == nullptr) {
        part.device->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
        return;
    }
    std::memcpy(to, values, bytes);
}

} // namespace

size_t bytes_of_type(int type) {
    constexpr size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type <= BFLOAT16 ? BYTES[type] : 0;
}

size_t bytes_read(const Task& task, size_t num_ranks) {
    size_t bytes = task.count * bytes_of_type(task.type);
    return task.kind == Kind::Recv ? 0 : task.kind == Kind::ReduceScatter ? bytes * num_ranks : bytes;
}

size_t bytes_written(const Task& task, size_t num_ranks) {
    size_t bytes = task.count * bytes_of_type(task.type);
    return task.kind == Kind::Send ? 0 : task.kind == Kind::AllGather ? bytes * num_ranks : bytes;
}

void perform(const Meeting& meeting) {
    const std::vector<Part>& parts = meeting.parts;
    const Task& task = parts[0].task;
    std::vector<Bytes> inputs;
    for (const Part& part : parts) {
        inputs.push_back(read(part, bytes_read(part.task, parts.size())));
    }
    Bytes all;
    if (task.kind == Kind::Send) {
        return write(parts[1], inputs[0].data(), inputs[0].size());
    } else if (task.kind == Kind::Broadcast) {
        all = inputs[(size_t)task.peer];
    } else if (task.kind == Kind::AllGather) {
        for (const Bytes& input : inputs) {
            all.insert(all.end(), input.begin(), input.end());
        }
    } else {
        all = inputs[0];
        for (size_t rank = 1; rank < inputs.size(); ++rank) {
            reduce(task.type, task.op, all, inputs[rank]);
        }
    }
    size_t bytes = bytes_written(task, parts.size());
    for (size_t rank = 0; rank < parts.size(); ++rank) {
        if (task.kind == Kind::Reduce && rank != (size_t)task.peer) {
            continue;
        }
        write(parts[rank], all.data() + (task.kind == Kind::ReduceScatter ? rank * bytes : 0), bytes);
    }
}

} // namespace emulator
