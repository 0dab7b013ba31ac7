// NCCL's functions: communicators between threads of one process, each with a GPU. Its header is not part of the toolkit here,
// so types are written as what they are.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "chance.h"
#include "clique.h"
#include "handles.h"
#include "report.h"
#include "work.h"

namespace emulator {

struct Splitting {
    struct Part {
        int color, key;
        std::shared_ptr<Rank> child;
    };
    std::map<int, Part> parts;
};

namespace {

// The start of NCCL's ncclConfig_t of 2.28.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char* net_name;
};

struct UniqueId {
    char bytes[128];
};

thread_local std::string last_error;

int fails(int result, const std::string& why) {
    report("NCCL: %s", why.c_str());
    last_error = why;
    return result;
}

bool allows_ranks_on_one_gpu() {
    const char* text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return text != nullptr && std::strcmp(text, "1") == 0;
}

int read_config(const Config* config, bool& blocking) {
    if (config == nullptr) {
        return SUCCESS;
    }
    if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->version < 22800) {
        return fails(INVALID_ARGUMENT, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    }
    if (config->blocking != 0 && config->blocking != 1 && config->blocking != INT_MIN) {
        return fails(INVALID_ARGUMENT, "Invalid config blocking attribute value");
    }
    blocking = config->blocking != 0;
    return SUCCESS;
}

// Of a clique whose ranks are all there.
int check_gpus(const Clique& clique) {
    for (size_t i = 0; i < clique.ranks.size() && !allows_ranks_on_one_gpu(); ++i) {
        for (size_t j = 0; j < i; ++j) {
            if (clique.ranks[i]->device == clique.ranks[j]->device) {
                return INVALID_USAGE;
            }
        }
    }
    return SUCCESS;
}

// How far the rank is with what is under way.
int poll(Rank& rank) {
    if (rank.aborted) {
        return INVALID_USAGE;
    }
    if (rank.progress) {
        int result = rank.progress();
        if (result == IN_PROGRESS && rank.error == SUCCESS) {
            return result;
        }
        rank.progress = nullptr;
        // What the rank finds itself comes before what it hears of others.
        rank.error = result == SUCCESS || result == IN_PROGRESS ? rank.error.load() : result;
    }
    return rank.error;
}

int begin(Rank& rank, std::function<int()> progress) {
    rank.progress = std::move(progress);
    if (!rank.blocking) {
        return IN_PROGRESS;
    }
    int result;
    while ((result = poll(rank)) == IN_PROGRESS) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return result;
}

std::shared_ptr<Rank> ready_rank(void* handle, int& result) {
    std::shared_ptr<Rank> rank = handles<Rank>().get(handle);
    result = SUCCESS;
    if (!rank) {
        result = fails(INVALID_ARGUMENT, "communicator is not there, or was destroyed");
    } else if (rank->progress) {
        result = fails(INVALID_ARGUMENT, "Attempt to use communicator before the previous operation returned ncclSuccess");
    } else if (rank->error) {
        result = rank->error;
    }
    return result == SUCCESS ? rank : nullptr;
}

// What a group of calls has asked for, by rank.
struct Request {
    std::shared_ptr<Rank> rank;
    std::shared_ptr<Stream> stream;
    std::vector<Task> tasks;
};
thread_local int group_depth = 0;
thread_local std::vector<Request> group;

int end_group() {
    std::vector<Request> requests;
    std::swap(requests, group);
    int all = SUCCESS;
    for (Request& request : requests) {
        Rank& rank = *request.rank;
        // A rank that does not block may launch later, while it is polled.
        int result = begin(rank, [request = std::move(request)] {
            if (!request.rank->blocking && !everything_at_once() && once_in(2)) {
                return IN_PROGRESS;
            }
            launch(request.rank, request.stream, request.tasks);
            return SUCCESS;
        });
        all = result == SUCCESS ? all : result;
    }
    return all;
}

int ask(Task task, void* comm, CUstream stream_handle) {
    int result;
    std::shared_ptr<Rank> rank = ready_rank(comm, result);
    if (!rank) {
        return result;
    }
    std::shared_ptr<Stream> stream = handles<Stream>().get(stream_handle);
    if (!stream || stream->device != rank->device) {
        return fails(INVALID_USAGE, "a stream that is not of the communicator's GPU");
    }
    size_t num_ranks = rank->clique->ranks.size();
    if (bytes_of_type(task.type) == 0 || task.peer < 0 || (size_t)task.peer >= num_ranks || task.op < 0 || task.op > 3) {
        return fails(INVALID_ARGUMENT, "a type, reduction or rank that is not there");
    }
    std::pair<CUdeviceptr, size_t> buffers[] = {{task.send, bytes_read(task, num_ranks)}, {task.recv, bytes_written(task, num_ranks)}};
    for (auto [address, bytes] : buffers) {
        if (bytes > 0 && place(*rank->device, address, bytes, When::Asked, "NCCL", true) == nullptr) {
            return fails(INVALID_ARGUMENT, "an address that is not in the GPU's memory");
        }
    }
    auto same = std::find_if(group.begin(), group.end(), [&](const Request& request) { return request.rank == rank; });
    if (same == group.end()) {
        same = group.insert(same, Request{rank, stream, {}});
    }
    if (same->stream != stream) {
        return fails(INVALID_USAGE, "several streams in one group are not emulated");
    }
    same->tasks.push_back(task);
    return group_depth > 0 ? (int)SUCCESS : end_group();
}

std::shared_ptr<Rank> new_rank(std::shared_ptr<Clique> clique, Device* device, int number, bool blocking) {
    auto rank = std::make_shared<Rank>();
    rank->clique = std::move(clique);
    rank->rank = number;
    rank->device = device;
    rank->blocking = blocking;
    return rank;
}

// All ranks of a communicator have called ncclCommSplit: makes the children.
void split(const Clique& parent, Splitting& splitting) {
    std::map<int, std::vector<std::pair<int, int>>> colors;
    for (auto& [number, part] : splitting.parts) {
        if (part.color >= 0) {
            colors[part.color].emplace_back(part.key, number);
        }
    }
    for (auto& [color, members] : colors) {
        std::sort(members.begin(), members.end());
        auto clique = std::make_shared<Clique>();
        for (auto [key, number] : members) {
            const Rank& rank = *parent.ranks[(size_t)number];
            auto child = new_rank(clique, rank.device, (int)clique->ranks.size(), rank.blocking);
            splitting.parts[number].child = child;
            clique->ranks.push_back(child);
        }
        clique->result = check_gpus(*clique);
    }
}

CUdeviceptr address(const void* pointer) {
    return reinterpret_cast<CUdeviceptr>(pointer);
}

} // namespace

} // namespace emulator

using namespace emulator;

extern "C" {

int ncclGetVersion(int* version) {
    *version = allows_ranks_on_one_gpu() ? 23007 : 22809;
    return SUCCESS;
}

const char* ncclGetErrorString(int result) {
    static const char* const texts[] = {"no error",
                                        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                        "internal error - please report this issue to the NCCL developers",
                                        "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                        "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= SUCCESS && result <= IN_PROGRESS ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(void*) {
    return last_error.c_str();
}

int ncclGetUniqueId(UniqueId* id) {
    static std::atomic<uint64_t> count{0};
    uint64_t words[16] = {0x6e63636c656d75ull, ++count};
    std::memcpy(id, words, sizeof *id);
    return SUCCESS;
}

int ncclCommInitRankConfig(void** comm, int num_ranks, UniqueId id, int number, const Config* config) {
    static std::map<std::string, std::shared_ptr<Clique>> cliques;
    bool blocking = true;
    if (int error = read_config(config, blocking)) {
        return error;
    }
    if (current_device() == nullptr) {
        return fails(CUDA_FAILED, "no context is current");
    }
    if (num_ranks < 1 || number < 0 || number >= num_ranks) {
        return fails(INVALID_ARGUMENT, "Invalid rank requested");
    }
    auto rank = new_rank(nullptr, current_device(), number, blocking);
    {
        std::lock_guard lock(clique_mutex());
        std::string name(id.bytes, sizeof id.bytes);
        auto& clique = cliques[name];
        clique = clique ? clique : std::make_shared<Clique>();
        clique->ranks.resize((size_t)num_ranks);
        if (clique->ranks[(size_t)number]) {
            return fails(INVALID_USAGE, "two ranks have the same number");
        }
        rank->clique = clique;
        clique->ranks[(size_t)number] = rank;
        if (std::all_of(clique->ranks.begin(), clique->ranks.end(), [](const auto& rank) { return rank != nullptr; })) {
            clique->result = check_gpus(*clique);
            cliques.erase(name);
        }
    }
    *comm = handles<Rank>().add(rank);
    return begin(*rank, [rank = rank.get()] {
        std::lock_guard lock(clique_mutex());
        int result = rank->clique->result;
        return result == INVALID_USAGE ? fails(result, "ncclAsyncJobComplete: a job has failed, job error 5") : result;
    });
}

int ncclCommSplit(void* comm, int color, int key, void** child, const Config* config) {
    int result;
    std::shared_ptr<Rank> rank = ready_rank(comm, result);
    bool blocking = true;
    if (int error = rank ? read_config(config, blocking) : result) {
        return error;
    }
    std::shared_ptr<Splitting> splitting;
    {
        std::lock_guard lock(clique_mutex());
        Clique& clique = *rank->clique;
        auto& entry = clique.splittings[rank->num_splits++];
        splitting = entry = entry ? entry : std::make_shared<Splitting>();
        splitting->parts[rank->rank] = {color, key, nullptr};
        if (splitting->parts.size() == clique.ranks.size()) {
            split(clique, *splitting);
        }
    }
    // The child is there when the parent is through, not before.
    *child = nullptr;
    return begin(*rank, [rank = rank.get(), splitting, child, blocking] {
        std::lock_guard lock(clique_mutex());
        if (splitting->parts.size() < rank->clique->ranks.size()) {
            return IN_PROGRESS;
        }
        auto& part = splitting->parts[rank->rank];
        if (part.child) {
            part.child->blocking = blocking;
            *child = handles<Rank>().add(part.child);
        }
        return SUCCESS;
    });
}

int ncclCommGetAsyncError(void* comm, int* error) {
    std::shared_ptr<Rank> rank = handles<Rank>().get(comm);
    if (!rank) {
        return fails(INVALID_ARGUMENT, "communicator is not there, or was destroyed");
    }
    *error = poll(*rank);
    return SUCCESS;
}

int ncclCommFinalize(void* comm) {
    int result;
    std::shared_ptr<Rank> rank = ready_rank(comm, result);
    if (!rank) {
        return result;
    }
    return begin(*rank, [rank = rank.get()] {
        if (rank->num_unfinished > 0) {
            rank->last_stream->run_through(rank->last_number, false);
        }
        return rank->num_unfinished > 0 ? IN_PROGRESS : SUCCESS;
    });
}

int ncclCommDestroy(void* comm) {
    std::shared_ptr<Rank> rank = handles<Rank>().remove(comm);
    if (!rank) {
        return fails(INVALID_ARGUMENT, "communicator is not there, or was destroyed");
    }
    if (rank->num_unfinished > 0) {
        return fails(INVALID_USAGE, "a communicator was destroyed with operations under way");
    }
    return SUCCESS;
}

int ncclCommAbort(void* comm) {
    std::shared_ptr<Rank> rank = handles<Rank>().remove(comm);
    if (!rank) {
        return fails(INVALID_ARGUMENT, "communicator is not there, or was destroyed");
    }
    // NCCL waits for what is under way on the host: a split may still give a child, which has to be aborted too.
    poll(*rank);
    abort(*rank);
    rank->progress = nullptr;
    return SUCCESS;
}

int ncclCommCount(void* comm, int* count) {
    int result;
    std::shared_ptr<Rank> rank = ready_rank(comm, result);
    *count = rank ? (int)rank->clique->ranks.size() : 0;
    return result;
}

int ncclCommUserRank(void* comm, int* number) {
    int result;
    std::shared_ptr<Rank> rank = ready_rank(comm, result);
    *number = rank ? rank->rank : -1;
    return result;
}

int ncclGroupStart() {
    ++group_depth;
    return SUCCESS;
}

int ncclGroupEnd() {
    if (group_depth == 0) {
        return fails(INVALID_USAGE, "ncclGroupEnd: not in a group call");
    }
    return --group_depth > 0 ? (int)SUCCESS : end_group();
}

int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, void* comm, CUstream stream) {
    return ask({Kind::AllReduce, address(send), address(recv), count, type, op, 0}, comm, stream);
}

int ncclAllGather(const void* send, void* recv, size_t count, int type, void* comm, CUstream stream) {
    return ask({Kind::AllGather, address(send), address(recv), count, type, 0, 0}, comm, stream);
}

int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, void* comm, CUstream stream) {
    return ask({Kind::ReduceScatter, address(send), address(recv), count, type, op, 0}, comm, stream);
}

int ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root, void* comm, CUstream stream) {
    return ask({Kind::Reduce, address(send), address(recv), count, type, op, root}, comm, stream);
}

int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, void* comm, CUstream stream) {
    return ask({Kind::Broadcast, address(send), address(recv), count, type, 0, root}, comm, stream);
}

int ncclSend(const void* send, size_t count, int type, int peer, void* comm, CUstream stream) {
    return ask({Kind::Send, address(send), 0, count, type, 0, peer}, comm, stream);
}

int ncclRecv(void* recv, size_t count, int type, int peer, void* comm, CUstream stream) {
    return ask({Kind::Recv, 0, address(recv), count, type, 0, peer}, comm, stream);
}

} // extern "C"
