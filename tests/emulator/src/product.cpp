#include "product.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <vector>

namespace emulator {

namespace {

// Rows of a and columns of b that are in registers at once.
constexpr size_t TILE = 4;

template <typename T>
double value_at(const char* values, size_t index) {
    T value;
    std::memcpy(&value, values + index * sizeof value, sizeof value);
    return (double)value;
}

double load(Type type, const char* values, size_t index) {
    switch (type) {
    case Type::F32:
        return value_at<float>(values, index);
    case Type::F64:
        return value_at<double>(values, index);
    case Type::F16: {
        __half_raw raw;
        std::memcpy(&raw.x, values + 2 * index, 2);
        return __half2float(__half(raw));
    }
    case Type::BF16: {
        __nv_bfloat16_raw raw;
        std::memcpy(&raw.x, values + 2 * index, 2);
        return __bfloat162float(__nv_bfloat16(raw));
    }
    }
    return 0;
}

void store(Type type, char* values, size_t index, double value) {
    switch (type) {
    case Type::F32: {
        float rounded = (float)value;
        std::memcpy(values + 4 * index, &rounded, 4);
        return;
    }
    case Type::F64:
        std::memcpy(values + 8 * index, &value, 8);
        return;
    case Type::F16: {
        __half_raw raw = __float2half_rn((float)value);
        std::memcpy(values + 2 * index, &raw.x, 2);
        return;
    }
    case Type::BF16: {
        __nv_bfloat16_raw raw = __float2bfloat16_rn((float)value);
        std::memcpy(values + 2 * index, &raw.x, 2);
        return;
    }
    }
}

// The values, row by row, or column by column if `along_columns`; zeros up to a whole tile.
template <typename T>
std::vector<T> packed(const Matrix& matrix, bool along_columns) {
    size_t lines = along_columns ? matrix.cols : matrix.rows, len = along_columns ? matrix.rows : matrix.cols;
    std::vector<T> values((lines + TILE - 1) / TILE * TILE * len);
    for (size_t line = 0; line < lines; ++line) {
        for (size_t i = 0; i < len; ++i) {
            size_t row = along_columns ? i : line, col = along_columns ? line : i;
            size_t index = matrix.transposed ? col + row * matrix.stride : row + col * matrix.stride;
            values[line * len + i] = (T)load(matrix.type, matrix.values, index);
        }
    }
    return values;
}

// Inner products of TILE lines of a with TILE lines of b.
template <typename T>
inline __attribute__((always_inline)) void tile_of(const T* a, const T* b, size_t len, T* sums) {
    constexpr size_t LANES = 16;
    T lanes[TILE][TILE][LANES] = {};
    size_t i = 0;
    for (; i + LANES <= len; i += LANES) {
        for (size_t row = 0; row < TILE; ++row) {
            for (size_t col = 0; col < TILE; ++col) {
                for (size_t lane = 0; lane < LANES; ++lane) {
                    lanes[row][col][lane] += a[row * len + i + lane] * b[col * len + i + lane];
                }
            }
        }
    }
    for (size_t row = 0; row < TILE; ++row) {
        for (size_t col = 0; col < TILE; ++col) {
            T sum = 0;
            for (size_t lane = 0; lane < LANES; ++lane) {
                sum += lanes[row][col][lane];
            }
            for (size_t rest = i; rest < len; ++rest) {
                sum += a[row * len + rest] * b[col * len + rest];
            }
            sums[row * TILE + col] = sum;
        }
    }
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void tile(const float* a, const float* b, size_t len, float* sums) {
    tile_of(a, b, len, sums);
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void tile(const double* a, const double* b, size_t len, double* sums) {
    tile_of(a, b, len, sums);
}

template <typename T>
void multiply_in(const Matrix& a, const Matrix& b, const Matrix& c, double alpha, double beta) {
    size_t len = a.cols;
    std::vector<T> rows = packed<T>(a, false), cols = packed<T>(b, true);
    T sums[TILE * TILE];
    for (size_t col = 0; col < c.cols; col += TILE) {
        for (size_t row = 0; row < c.rows; row += TILE) {
            tile(rows.data() + row * len, cols.data() + col * len, len, sums);
            for (size_t i = row; i < row + TILE && i < c.rows; ++i) {
                for (size_t j = col; j < col + TILE && j < c.cols; ++j) {
                    size_t index = i + j * c.stride;
                    T sum = (T)alpha * sums[(i - row) * TILE + (j - col)];
                    store(c.type, c.values, index, beta == 0 ? sum : sum + (T)beta * (T)load(c.type, c.values, index));
                }
            }
        }
    }
}

} // namespace

size_t bytes_of(Type type) {
    return type == Type::F64 ? 8 : type == Type::F32 ? 4 : 2;
}

size_t Matrix::extent() const {
    return rows == 0 || cols == 0 ? 0 : ((stored_cols() - 1) * stride + stored_rows()) * bytes_of(type);
}

void multiply(const Matrix& a, const Matrix& b, const Matrix& c, double alpha, double beta) {
    if (c.type == Type::F64) {
        multiply_in<double>(a, b, c, alpha, beta);
    } else {
        multiply_in<float>(a, b, c, alpha, beta);
    }
}

} // namespace emulator
