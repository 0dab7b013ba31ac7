// The positions of a batch in the order of their ids, for the embedding's gradient: a radix sort by digits of 8 bits, from
// the lowest on, each pass keeping the order of equal digits (Knuth, The Art of Computer Programming 3, 5.2.5). A pass is
// three launches: how often each digit is in each tile, where each tile's share of each digit starts, and the move. No
// atomics: places follow from counts alone. 256 comparisons per position and pass.
#include "embedding_row.cuh"
#include "reduce.cuh"

// Positions in a tile, threads of a block and values of a digit.
constexpr u32 TILE = 256;

__device__ inline u32 digit_of(u32 row, u32 shift) {
    return row >> shift & (TILE - 1);
}

// This tile's digits in shared memory; TILE, which no digit is, beyond the end. Returns how many are there.
__device__ inline u32 load_digits(u32* digits, const u32* rows, u32 num_ids, u32 shift) {
    u32 first = blockIdx.x * TILE;
    u32 len = num_ids - first < TILE ? num_ids - first : TILE;
    digits[threadIdx.x] = threadIdx.x < len ? digit_of(rows[first + threadIdx.x], shift) : TILE;
    __syncthreads();
    return len;
}

// rows[i] = local row of ids[i], local_vocab for an id that is not here; order[i] = i.
extern "C" __global__ void order_start(u32* rows, u32* order, const u32* ids, u32 num_ids, u32 vocab_start,
                                       u32 local_vocab) {
    for (i64 i = thread_index(); i < num_ids; i += thread_count()) {
        rows[i] = local_row(ids[i], vocab_start, local_vocab);
        order[i] = (u32)i;
    }
}

// counts (TILE, tiles): how often each digit is in each tile. A block per tile.
extern "C" __global__ void order_count(u32* counts, const u32* rows, u32 num_ids, u32 shift) {
    u32* digits = reinterpret_cast<u32*>(shared);
    load_digits(digits, rows, num_ids, shift);
    u32 count = 0;
    for (u32 i = 0; i < TILE; ++i) {
        count += digits[i] == threadIdx.x ? 1u : 0u;
    }
    counts[(i64)threadIdx.x * gridDim.x + blockIdx.x] = count;
}

// Each of the counts becomes the sum of those before it. One block; each thread sums a stretch.
extern "C" __global__ void order_sum(u32* counts, u32 len) {
    u32* sums = reinterpret_cast<u32*>(shared);
    u32 stretch = (len + blockDim.x - 1) / blockDim.x;
    u32 first = threadIdx.x * stretch < len ? threadIdx.x * stretch : len;
    u32 end = len - first < stretch ? len : first + stretch;
    u32 sum = 0;
    for (u32 i = first; i < end; ++i) {
        sum += counts[i];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    // The sums of the threads up to this one, twice as many after each round.
    for (u32 distance = 1; distance < blockDim.x; distance *= 2) {
        u32 before = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    u32 total = sums[threadIdx.x] - sum;
    for (u32 i = first; i < end; ++i) {
        u32 count = counts[i];
        counts[i] = total;
        total += count;
    }
}

// Moves each position to its place by this digit: after those of smaller digits, of earlier tiles, and earlier in its own.
extern "C" __global__ void order_move(u32* rows_to, u32* order_to, const u32* rows, const u32* order,
                                      const u32* starts, u32 num_ids, u32 shift) {
    u32* digits = reinterpret_cast<u32*>(shared);
    u32 len = load_digits(digits, rows, num_ids, shift);
    if (threadIdx.x >= len) {
        return;
    }
    u32 digit = digits[threadIdx.x];
    u32 place = starts[(i64)digit * gridDim.x + blockIdx.x];
    for (u32 i = 0; i < threadIdx.x; ++i) {
        place += digits[i] == digit ? 1u : 0u;
    }
    u32 from = blockIdx.x * TILE + threadIdx.x;
    rows_to[place] = rows[from];
    order_to[place] = order[from];
}
