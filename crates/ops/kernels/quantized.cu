// Blockwise int8: of each 256 values of a row a scale, then their codes, as src/quantized.rs lays them out, and with its bits.
#include "pack.cuh"
#include "reduce.cuh"

constexpr int BLOCK = 256;
constexpr int SCALE_BYTES = 4;
constexpr int BLOCK_BYTES = SCALE_BYTES + BLOCK;
// Values that a thread has at a time, and times that a warp has so many, until it has a block.
constexpr int WIDTH = 4;
constexpr int TURNS = BLOCK / (WIDTH * WARP_SIZE);
constexpr float MIN_SCALE = 0x1p-126f;
// The largest one whose multiple by 127 is finite.
constexpr float MAX_SCALE = 0x1.020406p+121f;
// Added to a value of at most 2^22, it leaves no bits for fractions: the lowest 8 bits of the sum are the nearest integer's.
constexpr float ROUNDER = 12582912.0f;
constexpr u32 NAN_BITS = 0x7fc00000u;

__device__ inline i64 quantized_bytes(i64 len) {
    i64 num_blocks = (len + BLOCK - 1) / BLOCK;
    return (len + num_blocks * SCALE_BYTES + 3) / 4 * 4;
}

template <int BYTES, typename P>
__device__ inline bool aligned_to(const P* address) {
    return reinterpret_cast<u64>(address) % BYTES == 0;
}

// Calls `body` with the rows that fall to this block: those of y, and of as many later ones as the grid is too small for.
template <typename Body>
__device__ inline void for_each_row(i64 rows, Body body) {
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        body(row);
    }
}

// A row of len values, a warp per block of it. `packed` is aligned to 4 bytes.
template <typename T>
__device__ void quantize_row(u8* packed, const T* src, i64 len) {
    bool in_packs = aligned_to<WIDTH * sizeof(T)>(src);
    int lane = (int)threadIdx.x % WARP_SIZE;
    for (i64 block = thread_index() / WARP_SIZE; block * BLOCK < len; block += thread_count() / WARP_SIZE) {
        const T* from = src + block * BLOCK;
        int count = len - block * BLOCK < BLOCK ? (int)(len - block * BLOCK) : BLOCK;
        Floats<WIDTH> x[TURNS];
        float max = 0.0f;
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int first = (turn * WARP_SIZE + lane) * WIDTH;
            if (in_packs && first + WIDTH <= count) {
                x[turn] = load<WIDTH>(from + first);
            } else {
                for (int j = 0; j < WIDTH; ++j) {
                    x[turn].at[j] = first + j < count ? to_f32(from[first + j]) : 0.0f;
                }
            }
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                max = Max()(fabsf(x[turn].at[j]), max);
            }
        }
        max = reduce_lanes<Max>(max, WARP_SIZE);
        bool broken = !isfinite(max);
        float scale = fminf(fmaxf(__fdiv_rn(max, 127.0f), MIN_SCALE), MAX_SCALE);
        float inverse = __fdiv_rn(1.0f, scale);
        u32* words = reinterpret_cast<u32*>(packed + block * BLOCK_BYTES);
        if (lane == 0) {
            words[0] = broken ? NAN_BITS : __float_as_uint(scale);
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int word = turn * WARP_SIZE + lane;
            u32 codes = 0;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                u32 bits = __float_as_uint(__fadd_rn(__fmul_rn(x[turn].at[j], inverse), ROUNDER));
                codes |= (bits & 0xffu) << (8 * j);
            }
            if (word * WIDTH < count) {
                words[1 + word] = broken ? 0 : codes;
            }
        }
    }
}

// src (rows, len).
template <typename T>
__device__ void quantize(u8* packed, const T* src, i64 rows, i64 len) {
    for_each_row(rows, [&](i64 row) { quantize_row(packed + row * quantized_bytes(len), src + row * len, len); });
}

extern "C" __global__ void quantize_int8_f32(u8* packed, const float* src, i64 rows, i64 len) {
    quantize(packed, src, rows, len);
}

extern "C" __global__ void quantize_int8_bf16(u8* packed, const bf16* src, i64 rows, i64 len) {
    quantize(packed, src, rows, len);
}

extern "C" __global__ void quantize_int8_f16(u8* packed, const f16* src, i64 rows, i64 len) {
    quantize(packed, src, rows, len);
}

// At any address.
__device__ inline float scale_at(const u8* bytes) {
    return __uint_as_float(bytes[0] | (u32)bytes[1] << 8 | (u32)bytes[2] << 16 | (u32)bytes[3] << 24);
}

// dst (len) is the sum of num_summed packed rows of row_bytes, after what is there if `add`.
template <typename T>
__device__ void dequantize_row(T* dst, const u8* packed, i64 num_summed, i64 row_bytes, i64 len, int add) {
    bool in_packs = aligned_to<WIDTH * sizeof(T)>(dst) && aligned_to<WIDTH>(packed);
    for_each_pack_of_grid<WIDTH>(len, in_packs, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> sum = {};
        if (add) {
            sum = load<N>(dst + i);
        }
        const u8* block = packed + i / BLOCK * BLOCK_BYTES;
        for (i64 row = 0; row < num_summed; ++row, block += row_bytes) {
            float scale = scale_at(block);
            Pack<u8, N> codes = *reinterpret_cast<const Pack<u8, N>*>(block + SCALE_BYTES + i % BLOCK);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sum.at[j] = __fadd_rn(sum.at[j], __fmul_rn((float)(signed char)codes.at[j], scale));
            }
        }
        store(dst + i, sum);
    });
}

// dst (rows, len), packed (rows, num_summed, bytes).
template <typename T>
__device__ void dequantize(T* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {
    i64 row_bytes = quantized_bytes(len);
    for_each_row(rows, [&](i64 row) {
        dequantize_row(dst + row * len, packed + row * num_summed * row_bytes, num_summed, row_bytes, len, add);
    });
}

extern "C" __global__ void dequantize_int8_f32(float* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {
    dequantize(dst, packed, rows, num_summed, len, add);
}

extern "C" __global__ void dequantize_int8_bf16(bf16* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {
    dequantize(dst, packed, rows, num_summed, len, add);
}

extern "C" __global__ void dequantize_int8_f16(f16* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {
    dequantize(dst, packed, rows, num_summed, len, add);
}
