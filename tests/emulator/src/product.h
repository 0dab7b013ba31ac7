// Matrix products as BLAS counts them, along columns.
#pragma once

#include <cstddef>

namespace emulator {

enum class Type { F32, F64, F16, BF16 };

size_t bytes_of(Type type);

// A matrix of `rows` x `cols` after the transposition, if any, of what is stored with `stride` values from column to column.
struct Matrix {
    Type type;
    char* values;
    bool transposed;
    size_t rows, cols;
    size_t stride;

    size_t stored_rows() const { return transposed ? cols : rows; }
    size_t stored_cols() const { return transposed ? rows : cols; }
    // Bytes from the first to the last value.
    size_t extent() const;
};

// c = alpha a b + beta c, summed in f64 for f64 and in f32 otherwise; c is not read where beta is 0.
void multiply(const Matrix& a, const Matrix& b, const Matrix& c, double alpha, double beta);

} // namespace emulator
