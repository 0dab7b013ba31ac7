// Where an id is in a part of the vocabulary.
#pragma once

#include "index.cuh"

// Row of the local table, or local_vocab for an id that it does not hold: u32::MAX, other shards' ids.
__device__ inline u32 local_row(u32 id, u32 vocab_start, u32 local_vocab) {
    return id >= vocab_start && id - vocab_start < local_vocab ? id - vocab_start : local_vocab;
}
