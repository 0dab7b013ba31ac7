// What the ranks of an emulated NCCL communicator share: who is in it, and the operations that wait for ranks.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "device.h"
#include "stream.h"

namespace emulator {

// Results of NCCL's functions, of its ncclResult_t.
enum NcclResult { SUCCESS = 0, CUDA_FAILED, SYSTEM_FAILED, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_FAILED, IN_PROGRESS };

enum class Kind { AllReduce, AllGather, ReduceScatter, Reduce, Broadcast, Send, Recv };

// What one rank asks for, with NCCL's numbers for types and reductions. `peer` is the root of a broadcast or a reduction.
struct Task {
    Kind kind;
    CUdeviceptr send, recv;
    size_t count;
    int type, op, peer;
};

struct Rank;

// One rank's part in an operation: asked for on a stream, as work with a number, and arrived when the stream has got there.
struct Part {
    Task task;
    std::shared_ptr<Rank> rank;
    Device* device = nullptr;
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
    bool arrived = false;
};

// An operation: done when all parts have arrived and agree. Those that do not agree, or of which a rank was aborted, stay for ever, as
// NCCL hangs.
struct Meeting {
    std::vector<Part> parts;
    std::atomic<bool> done{false};
};

struct Clique {
    // Source, destination and number of a message; -1, -1 and the number of a collective.
    using Key = std::tuple<int, int, uint64_t>;
    std::vector<std::shared_ptr<Rank>> ranks;
    std::map<Key, std::shared_ptr<Meeting>> meetings;
    std::map<uint64_t, std::shared_ptr<struct Splitting>> splittings;
    int result = IN_PROGRESS;
};

// One rank's communicator. One thread at a time uses it, but for `aborted` and `error`.
struct Rank {
    std::shared_ptr<Clique> clique;
    int rank = 0;
    Device* device = nullptr;
    bool blocking = true;
    std::atomic<bool> aborted{false};
    std::atomic<int> error{SUCCESS};
    // What is under way: IN_PROGRESS, or how it has ended.
    std::function<int()> progress;
    std::atomic<int> num_unfinished{0};
    std::shared_ptr<Stream> last_stream;
    uint64_t last_number = 0;
    uint64_t num_collectives = 0, num_splits = 0;
    std::map<int, uint64_t> num_sends, num_recvs;
};

// Guards all cliques. Never held while work of a stream runs.
std::mutex& clique_mutex();

size_t bytes_of_type(int type);
// Bytes that a task reads and writes on its rank.
size_t bytes_read(const Task& task, size_t num_ranks);
size_t bytes_written(const Task& task, size_t num_ranks);

// Puts tasks on a rank's stream, all under way together.
void launch(const std::shared_ptr<Rank>& rank, const std::shared_ptr<Stream>& stream, const std::vector<Task>& tasks);
// Ends what a rank has under way, undone; the others hear of it, as between hosts.
void abort(Rank& rank);

// Moves and reduces the values of an operation whose ranks have all arrived; what fails a GPU.
void perform(const Meeting& meeting);

} // namespace emulator
