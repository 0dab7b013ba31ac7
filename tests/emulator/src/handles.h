// Objects that a program holds by handle. A handle is never given out twice, so one that is used after its end is found.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace emulator {

template <typename T>
class Handles {
  public:
    // An address that is none: the program cannot look behind it.
    void* add(std::shared_ptr<T> object) {
        std::lock_guard lock(mutex_);
        objects_[++last_] = std::move(object);
        return reinterpret_cast<void*>(FIRST + 16 * last_);
    }

    std::shared_ptr<T> get(const void* handle) const {
        std::lock_guard lock(mutex_);
        auto found = objects_.find(number(handle));
        return found == objects_.end() ? nullptr : found->second;
    }

    std::shared_ptr<T> remove(const void* handle) {
        std::lock_guard lock(mutex_);
        auto found = objects_.find(number(handle));
        if (found == objects_.end()) {
            return nullptr;
        }
        std::shared_ptr<T> object = std::move(found->second);
        objects_.erase(found);
        return object;
    }

    std::vector<std::shared_ptr<T>> all() const {
        std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<T>> objects;
        for (const auto& [handle, object] : objects_) {
            objects.push_back(object);
        }
        return objects;
    }

  private:
    static constexpr uintptr_t FIRST = 0x1000;

    static uintptr_t number(const void* handle) {
        uintptr_t address = reinterpret_cast<uintptr_t>(handle);
        return address % 16 == 0 ? (address - FIRST) / 16 : 0;
    }

    mutable std::mutex mutex_;
    std::map<uintptr_t, std::shared_ptr<T>> objects_;
    uintptr_t last_ = 0;
};

// The handles of a type; never destroyed, for threads that end last.
template <typename T>
Handles<T>& handles() {
    static auto* all = new Handles<T>;
    return *all;
}

} // namespace emulator
