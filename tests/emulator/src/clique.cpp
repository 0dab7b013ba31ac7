#include "clique.h"

#include <chrono>

#include "report.h"
#include "work.h"

namespace emulator {

namespace {

std::condition_variable changed;

bool agree(const Meeting& meeting) {
    const Task& first = meeting.parts[0].task;
    for (const Part& part : meeting.parts) {
        const Task& task = part.task;
        bool same = first.kind == Kind::Send ? task.count * bytes_of_type(task.type) == first.count * bytes_of_type(first.type)
                                             : task.kind == first.kind && task.count == first.count && task.type == first.type &&
                                                   task.op == first.op && task.peer == first.peer;
        if (!same) {
            return false;
        }
    }
    return true;
}

// A rank's work on its stream: its parts in some meetings.
struct Launched {
    std::shared_ptr<Rank> rank;
    std::vector<std::pair<Clique::Key, size_t>> places;
    std::vector<std::shared_ptr<Meeting>> meetings;
    bool has_arrived = false;

    void arrive(const std::unique_lock<std::mutex>&) {
        for (size_t i = 0; i < meetings.size() && !has_arrived; ++i) {
            Meeting& meeting = *meetings[i];
            meeting.parts[places[i].second].arrived = true;
            bool all = true;
            for (const Part& part : meeting.parts) {
                // An aborted rank's memory may be free.
                all = all && part.arrived && !part.rank->aborted;
            }
            if (all && agree(meeting)) {
                perform(meeting);
                meeting.done = true;
                rank->clique->meetings.erase(places[i].first);
            }
        }
        has_arrived = true;
        changed.notify_all();
    }

    bool is_over() const {
        bool all = true;
        for (const auto& meeting : meetings) {
            all = all && meeting->done;
        }
        return all || rank->aborted || rank->device->error != CUDA_SUCCESS;
    }

    // A GPU works by itself; here somebody has to move the other ranks' streams.
    void move_others(std::unique_lock<std::mutex>& lock) {
        std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> late;
        for (const auto& meeting : meetings) {
            for (const Part& part : meeting->parts) {
                if (part.number > 0 && !part.arrived) {
                    late.emplace_back(part.stream, part.number);
                }
            }
        }
        lock.unlock();
        for (auto& [stream, number] : late) {
            stream->run_through(number, false);
        }
        lock.lock();
    }

    bool step(bool may_block) {
        std::unique_lock lock(clique_mutex());
        if (!is_over()) {
            arrive(lock);
        }
        while (!is_over()) {
            if (!may_block) {
                return false;
            }
            move_others(lock);
            if (!is_over()) {
                changed.wait_for(lock, std::chrono::milliseconds(1));
            }
        }
        --rank->num_unfinished;
        return true;
    }
};

Clique::Key key_of(Rank& rank, const Task& task) {
    switch (task.kind) {
    case Kind::Send:
        return {rank.rank, task.peer, rank.num_sends[task.peer]++};
    case Kind::Recv:
        return {task.peer, rank.rank, rank.num_recvs[task.peer]++};
    default:
        return {-1, -1, rank.num_collectives++};
    }
}

} // namespace

std::mutex& clique_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

void launch(const std::shared_ptr<Rank>& rank, const std::shared_ptr<Stream>& stream, const std::vector<Task>& tasks) {
    auto launched = std::make_shared<Launched>();
    launched->rank = rank;
    {
        std::lock_guard lock(clique_mutex());
        for (const Task& task : tasks) {
            bool is_message = task.kind == Kind::Send || task.kind == Kind::Recv;
            size_t place = is_message ? task.kind == Kind::Recv : (size_t)rank->rank;
            Clique::Key key = key_of(*rank, task);
            auto& meeting = rank->clique->meetings[key];
            if (!meeting) {
                meeting = std::make_shared<Meeting>();
                meeting->parts.resize(is_message ? 2 : rank->clique->ranks.size());
            }
            Part& part = meeting->parts[place];
            part.task = task;
            part.rank = rank;
            part.device = rank->device;
            launched->places.emplace_back(key, place);
            launched->meetings.push_back(meeting);
        }
        ++rank->num_unfinished;
    }
    uint64_t number = stream->enqueue_step([launched](bool may_block) { return launched->step(may_block); });
    std::lock_guard lock(clique_mutex());
    rank->last_stream = stream;
    rank->last_number = number;
    for (size_t i = 0; i < launched->meetings.size(); ++i) {
        Part& part = launched->meetings[i]->parts[launched->places[i].second];
        part.stream = stream;
        part.number = number;
    }
    changed.notify_all();
}

void abort(Rank& rank) {
    std::lock_guard lock(clique_mutex());
    rank.aborted = true;
    for (const auto& other : rank.clique->ranks) {
        int none = SUCCESS;
        if (other && other.get() != &rank) {
            other->error.compare_exchange_strong(none, REMOTE_FAILED);
        }
    }
    changed.notify_all();
}

} // namespace emulator
