// cuBLAS: handles and matrix products. Its header is not part of the toolkit here, so types are written as what they are.
#include <optional>

#include "handles.h"
#include "product.h"
#include "report.h"
#include "work.h"

namespace emulator {

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum ComputeType { COMPUTE_32F = 68, COMPUTE_64F = 70, FAST_16F = 74, FAST_16BF = 75, FAST_TF32 = 77 };

struct Blas {
    Device* device;
    std::mutex mutex;
    CUstream stream = nullptr;
    int pointer_mode = 0;
    int math_mode = 0;
};

// A product as it was asked for.
struct Product {
    int transposed[2];
    long long sizes[3]; // m, n, k
    CUdeviceptr values[3];
    int types[3];
    long long strides[3];
    // Values from one product of a batch to the next.
    long long steps[3];
    int batch;
    double alpha, beta;
    bool is_f64;
};

std::optional<Type> type_of(int data_type) {
    switch (data_type) {
    case 0:
        return Type::F32;
    case 1:
        return Type::F64;
    case 2:
        return Type::F16;
    case 14:
        return Type::BF16;
    default:
        return {};
    }
}

// Those types that cuBLAS multiplies and sums in the given one.
bool is_supported(const Product& product) {
    const auto a = type_of(product.types[0]), b = type_of(product.types[1]), c = type_of(product.types[2]);
    if (!a || !b || !c || a != b) {
        return false;
    }
    return product.is_f64 ? a == Type::F64 && c == a : a != Type::F64 && (c == a || c == Type::F32);
}

Matrix matrix_of(const Product& product, int which) {
    auto [m, n, k] = product.sizes;
    long long rows[] = {m, k, m}, cols[] = {k, n, n};
    bool transposed = which < 2 && product.transposed[which] != 0;
    return {*type_of(product.types[which]), nullptr, transposed, (size_t)rows[which], (size_t)cols[which],
            (size_t)product.strides[which]};
}

bool is_valid(const Product& product) {
    const char* names = "ABC";
    for (long long size : product.sizes) {
        if (size < 0) {
            report("a matrix product with a negative size");
            return false;
        }
    }
    for (int which = 0; which < 3; ++which) {
        Matrix matrix = matrix_of(product, which);
        if (product.strides[which] < 1 || (size_t)product.strides[which] < matrix.stored_rows()) {
            report("a matrix product whose ld%c is %lld for columns of %zu values", names[which] | 32, product.strides[which],
                   matrix.stored_rows());
            return false;
        }
    }
    return product.batch >= 0 && product.transposed[0] >= 0 && product.transposed[0] <= 2 && product.transposed[1] >= 0 &&
           product.transposed[1] <= 2;
}

// The matrix with all its batch in memory that is there; null values, and says why, if not.
Matrix placed(const Device& device, const Product& product, int which, When when) {
    static const char* const names[] = {"a matrix product, A", "a matrix product, B", "a matrix product, C"};
    Matrix matrix = matrix_of(product, which);
    if (matrix.extent() > 0) {
        size_t step = (size_t)product.steps[which] * bytes_of(matrix.type);
        size_t bytes = matrix.extent() + step * (size_t)(product.batch - 1);
        matrix.values = place(device, product.values[which], bytes, when, names[which], true);
    }
    return matrix;
}

CUresult run(const Product& product, Device& device) {
    Matrix matrices[3];
    for (int which = 0; which < 3; ++which) {
        matrices[which] = placed(device, product, which, When::Running);
        if (matrices[which].values == nullptr && matrices[which].extent() > 0) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    }
    for (int i = 0; i < product.batch; ++i) {
        multiply(matrices[0], matrices[1], matrices[2], product.alpha, product.beta);
        for (int which = 0; which < 3; ++which) {
            matrices[which].values += product.steps[which] * (long long)bytes_of(matrices[which].type);
        }
    }
    return CUDA_SUCCESS;
}

int put_product(void* handle, const Product& product) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas || check_current() != CUDA_SUCCESS) {
        return NOT_INITIALIZED;
    }
    if (blas->pointer_mode != 0 || !is_supported(product)) {
        report("a matrix product of types that cuBLAS or the emulator does not have");
        return NOT_SUPPORTED;
    }
    if (!is_valid(product)) {
        return INVALID_VALUE;
    }
    CUstream stream_handle;
    {
        std::lock_guard lock(blas->mutex);
        stream_handle = blas->stream;
    }
    std::shared_ptr<Stream> stream = stream_from(stream_handle);
    if (!stream || stream->device != blas->device) {
        report("a cuBLAS handle of GPU %d has no stream of that GPU", blas->device->ordinal);
        return EXECUTION_FAILED;
    }
    if (product.sizes[0] == 0 || product.sizes[1] == 0 || product.batch == 0) {
        return SUCCESS;
    }
    for (int which = 0; which < 3; ++which) {
        Matrix matrix = placed(*stream->device, product, which, When::Asked);
        if (matrix.values == nullptr && matrix.extent() > 0) {
            stream->device->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
            return EXECUTION_FAILED;
        }
    }
    put(*stream, [product](Device& device) { return run(product, device); });
    return SUCCESS;
}

CUdeviceptr address_of(const void* values) {
    return reinterpret_cast<CUdeviceptr>(values);
}

int multiply_ex(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
                long long a_step, const void* b, int b_type, int ldb, long long b_step, const void* beta, void* c, int c_type,
                int ldc, long long c_step, int batch, int compute) {
    bool is_f64 = compute == COMPUTE_64F;
    if (!is_f64 && compute != COMPUTE_32F && compute != FAST_16F && compute != FAST_16BF && compute != FAST_TF32) {
        report("a matrix product summed in a type that the emulator does not have: %d", compute);
        return NOT_SUPPORTED;
    }
    auto scale = [&](const void* x) { return is_f64 ? *static_cast<const double*>(x) : *static_cast<const float*>(x); };
    return put_product(handle, {{transa, transb},
                                {m, n, k},
                                {address_of(a), address_of(b), address_of(c)},
                                {a_type, b_type, c_type},
                                {lda, ldb, ldc},
                                {a_step, b_step, c_step},
                                batch,
                                scale(alpha),
                                scale(beta),
                                is_f64});
}

} // namespace

} // namespace emulator

using namespace emulator;

extern "C" {

int cublasCreate_v2(void** handle) {
    if (check_current() != CUDA_SUCCESS) {
        return NOT_INITIALIZED;
    }
    auto blas = std::make_shared<Blas>();
    blas->device = current_device();
    *handle = handles<Blas>().add(blas);
    return SUCCESS;
}

int cublasDestroy_v2(void* handle) {
    return handles<Blas>().remove(handle) ? SUCCESS : NOT_INITIALIZED;
}

int cublasSetStream_v2(void* handle, CUstream stream) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    std::lock_guard lock(blas->mutex);
    blas->stream = stream;
    return SUCCESS;
}

int cublasGetStream_v2(void* handle, CUstream* stream) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    std::lock_guard lock(blas->mutex);
    *stream = blas->stream;
    return SUCCESS;
}

int cublasSetPointerMode_v2(void* handle, int mode) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    blas->pointer_mode = mode;
    return SUCCESS;
}

int cublasGetPointerMode_v2(void* handle, int* mode) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    *mode = blas->pointer_mode;
    return SUCCESS;
}

int cublasGetProperty(int property, int* value) {
    // As cuBLAS of the driver's CUDA.
    const int version[] = {CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10, 0};
    if (property < 0 || property > 2) {
        return INVALID_VALUE;
    }
    *value = version[property];
    return SUCCESS;
}

int cublasSetMathMode(void* handle, int mode) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    blas->math_mode = mode;
    return SUCCESS;
}

int cublasGetMathMode(void* handle, int* mode) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    *mode = blas->math_mode;
    return SUCCESS;
}

// The workspace is only looked at: nothing here needs one.
int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    std::shared_ptr<Blas> blas = handles<Blas>().get(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    const char* who = "a cuBLAS workspace";
    bool good = bytes == 0 || place(*blas->device, address_of(workspace), bytes, When::Asked, who, true) != nullptr;
    return good && address_of(workspace) % 256 == 0 ? SUCCESS : INVALID_VALUE;
}

int cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
                 const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute, int) {
    return multiply_ex(handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1,
                       compute);
}

int cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* a,
                               int a_type, int lda, long long a_step, const void* b, int b_type, int ldb, long long b_step,
                               const void* beta, void* c, int c_type, int ldc, long long c_step, int batch, int compute, int) {
    return multiply_ex(handle, transa, transb, m, n, k, alpha, a, a_type, lda, a_step, b, b_type, ldb, b_step, beta, c, c_type,
                       ldc, c_step, batch, compute);
}

int cublasSgemm_v2(void* handle, int transa, int transb, int m, int n, int k, const float* alpha, const float* a, int lda,
                   const float* b, int ldb, const float* beta, float* c, int ldc) {
    return multiply_ex(handle, transa, transb, m, n, k, alpha, a, 0, lda, 0, b, 0, ldb, 0, beta, c, 0, ldc, 0, 1, COMPUTE_32F);
}

int cublasDgemm_v2(void* handle, int transa, int transb, int m, int n, int k, const double* alpha, const double* a, int lda,
                   const double* b, int ldb, const double* beta, double* c, int ldc) {
    return multiply_ex(handle, transa, transb, m, n, k, alpha, a, 1, lda, 0, b, 1, ldb, 0, beta, c, 1, ldc, 0, 1, COMPUTE_64F);
}

int cublasSgemmStridedBatched(void* handle, int transa, int transb, int m, int n, int k, const float* alpha, const float* a,
                              int lda, long long a_step, const float* b, int ldb, long long b_step, const float* beta, float* c,
                              int ldc, long long c_step, int batch) {
    return multiply_ex(handle, transa, transb, m, n, k, alpha, a, 0, lda, a_step, b, 0, ldb, b_step, beta, c, 0, ldc, c_step,
                       batch, COMPUTE_32F);
}

int cublasDgemmStridedBatched(void* handle, int transa, int transb, int m, int n, int k, const double* alpha, const double* a,
                              int lda, long long a_step, const double* b, int ldb, long long b_step, const double* beta,
                              double* c, int ldc, long long c_step, int batch) {
    return multiply_ex(handle, transa, transb, m, n, k, alpha, a, 1, lda, a_step, b, 1, ldb, b_step, beta, c, 1, ldc, c_step,
                       batch, COMPUTE_64F);
}

} // extern "C"
