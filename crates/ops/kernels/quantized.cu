// Blockwise int8 and int4: of each 256 values of a row a scale, then their codes, as src/quantized.rs lays them out, and with its bits.
#include "pack.cuh"
#include "reduce.cuh"

constexpr int BLOCK = 256;
constexpr int SCALE_BYTES = 4;
// Values of a block whose codes are in the lower half of a byte, in int4.
constexpr int HALF = BLOCK / 2;
// Values that a thread has at a time, and times that a warp has so many, until it has a block.
constexpr int WIDTH = 4;
constexpr int TURNS = BLOCK / (WIDTH * WARP_SIZE);
constexpr float MIN_SCALE = 0x1p-126f;
// Added to a value of at most 2^22, it leaves no bits for fractions: the lowest bits of the sum are the nearest integer's.
constexpr float ROUNDER = 12582912.0f;
constexpr u32 NAN_BITS = 0x7fc00000u;

// How values are packed: two codes to a byte or one, the largest code, and the largest scale, whose multiple by that is finite.
struct Int8 {
    static constexpr bool IN_HALVES = false;
    static constexpr float MAX_CODE = 127.0f;
    static constexpr float MAX_SCALE = 0x1.020406p+121f;
    __device__ static i64 code_bytes(i64 len) { return len; }
};

struct Int4 {
    static constexpr bool IN_HALVES = true;
    static constexpr float MAX_CODE = 7.0f;
    static constexpr float MAX_SCALE = 0x1.249246p+125f;
    __device__ static i64 code_bytes(i64 len) { return len < HALF ? len : HALF; }
};

template <typename Q>
__device__ inline i64 block_bytes() {
    return SCALE_BYTES + Q::code_bytes(BLOCK);
}

template <typename Q>
__device__ inline i64 row_bytes_of(i64 len) {
    i64 rest = len % BLOCK;
    i64 bytes = len / BLOCK * block_bytes<Q>() + (rest == 0 ? 0 : SCALE_BYTES + Q::code_bytes(rest));
    return (bytes + 3) / 4 * 4;
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
template <typename Q, typename T>
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
        float scale = fminf(fmaxf(__fdiv_rn(max, Q::MAX_CODE), MIN_SCALE), Q::MAX_SCALE);
        float inverse = __fdiv_rn(1.0f, scale);
        u32* words = reinterpret_cast<u32*>(packed + block * block_bytes<Q>());
        if (lane == 0) {
            words[0] = broken ? NAN_BITS : __float_as_uint(scale);
        }
        u32 codes[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            codes[turn] = 0;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                u32 bits = __float_as_uint(__fadd_rn(__fmul_rn(x[turn].at[j], inverse), ROUNDER));
                codes[turn] |= (bits & (Q::IN_HALVES ? 0xfu : 0xffu)) << (8 * j);
            }
        }
        if (Q::IN_HALVES) {
            // A turn has as many values as half a block.
            static_assert(TURNS == 2, "two codes for each byte");
            codes[0] |= codes[1] << 4;
        }
#pragma unroll
        for (int turn = 0; turn < (Q::IN_HALVES ? 1 : TURNS); ++turn) {
            int word = turn * WARP_SIZE + lane;
            if (word * WIDTH < count) {
                words[1 + word] = broken ? 0 : codes[turn];
            }
        }
    }
}

// src (a, b, len), packed (b, a, bytes).
template <typename Q, typename T>
__device__ void quantize(u8* packed, const T* src, i64 a, i64 b, i64 len) {
    for_each_row(a * b, [&](i64 row) {
        i64 from = row % a * b + row / a;
        quantize_row<Q>(packed + row * row_bytes_of<Q>(len), src + from * len, len);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void quantize_int8##SUFFIX(u8* packed, const T* src, i64 a, i64 b, i64 len) {               \
        quantize<Int8>(packed, src, a, b, len);                                                                       \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void quantize_int4##SUFFIX(u8* packed, const T* src, i64 a, i64 b, i64 len) {               \
        quantize<Int4>(packed, src, a, b, len);                                                                       \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

// At any address.
__device__ inline float scale_at(const u8* bytes) {
    return __uint_as_float(bytes[0] | (u32)bytes[1] << 8 | (u32)bytes[2] << 16 | (u32)bytes[3] << 24);
}

// The signed code of value `i` of a block, in `byte`.
template <typename Q>
__device__ inline float code_of(u8 byte, i64 i) {
    if (!Q::IN_HALVES) {
        return (float)(signed char)byte;
    }
    u32 half = i < HALF ? byte & 0xfu : byte >> 4;
    return (float)((int)(half ^ 8u) - 8);
}

// dst (len) is the sum of num_summed packed rows, each summand_bytes after the one before it, after what is there if `add`.
template <typename Q, typename T>
__device__ void dequantize_row(T* dst, const u8* packed, i64 num_summed, i64 summand_bytes, i64 len, int add) {
    bool in_packs = aligned_to<WIDTH * sizeof(T)>(dst) && aligned_to<WIDTH>(packed);
    for_each_pack_of_grid<WIDTH>(len, in_packs, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> sum = {};
        if (add) {
            sum = load<N>(dst + i);
        }
        i64 in_block = i % BLOCK;
        i64 byte = SCALE_BYTES + (Q::IN_HALVES ? in_block % HALF : in_block);
        const u8* block = packed + i / BLOCK * block_bytes<Q>();
        for (i64 row = 0; row < num_summed; ++row, block += summand_bytes) {
            float scale = scale_at(block);
            Pack<u8, N> codes = *reinterpret_cast<const Pack<u8, N>*>(block + byte);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sum.at[j] = __fadd_rn(sum.at[j], __fmul_rn(code_of<Q>(codes.at[j], in_block), scale));
            }
        }
        store(dst + i, sum);
    });
}

// dst (rows, len), packed (num_summed, rows, bytes).
template <typename Q, typename T>
__device__ void dequantize(T* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {
    i64 row_bytes = row_bytes_of<Q>(len);
    for_each_row(rows, [&](i64 row) {
        dequantize_row<Q>(dst + row * len, packed + row * row_bytes, num_summed, rows * row_bytes, len, add);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void dequantize_int8##SUFFIX(                                                               \
        T* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {                                       \
        dequantize<Int8>(dst, packed, rows, num_summed, len, add);                                                    \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void dequantize_int4##SUFFIX(                                                               \
        T* dst, const u8* packed, i64 rows, i64 num_summed, i64 len, int add) {                                       \
        dequantize<Int4>(dst, packed, rows, num_summed, len, add);                                                    \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
