// farheap for C++: a heap larger than RAM, collective allocators, a buffer pool.
//
// C++17; with C++20 also a concept and std::span overloads. Everything is inline over farheap.h,
// which says what each function does; here is what C++ adds:
//
// - Objects own their handles and give them back in destructors, which never throw.
// - What fails throws farheap::bad_alloc (a std::bad_alloc) when there was no memory, farheap::error
//   (a std::runtime_error) otherwise; both have code() and what(). Functions named try_ do not throw
//   for lack of room.
// - It needs exceptions, and works without RTTI. What is compiled without exceptions uses farheap.h.
// - No exception passes through the library: callbacks of the program are wrapped.
// - A moved-from object may only be destroyed or assigned to.
#ifndef FARHEAP_HPP
#define FARHEAP_HPP

#if __cplusplus < 201703L
#error "farheap.hpp needs C++17: compile with -std=c++17 or later, or use farheap.h"
#elif !defined(__cpp_exceptions)
#error "farheap.hpp reports failures by exceptions: compile without -fno-exceptions, or use farheap.h"
#else

#include "farheap.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if __cplusplus >= 202002L
#include <concepts>
#include <span>
#endif

namespace farheap {

using status = farheap_status;
using stats = farheap_stats;
using usage = farheap_usage;
using manager_stats = farheap_manager_stats;
using pool_stats = farheap_pool_stats;
using consumer_stats = farheap_consumer_stats;
using latencies = farheap_latencies;
using range = farheap_range;

// ---- Errors -----------------------------------------------------------------------------------

// A call failed; what() is the library's message.
class error : public std::runtime_error {
public:
    explicit error(status code) : std::runtime_error(farheap_last_message()), code_(code),
                                  os_code_(farheap_last_errno()) {}
    status code() const noexcept { return code_; }
    const char *name() const noexcept { return farheap_status_name(code_); }
    // The errno value, or 0.
    int os_code() const noexcept { return os_code_; }

private:
    status code_;
    int os_code_;
};

// There is no room: in memory, in a sub-allocator, or in a table's file; what() is the library's message. No
// farheap::error: a host catches both, or std::exception.
class bad_alloc : public std::bad_alloc {
public:
    explicit bad_alloc(status code) noexcept : code_(code), os_code_(farheap_last_errno()) {
        std::strncpy(text_, farheap_last_message(), sizeof text_ - 1);
    }
    status code() const noexcept { return code_; }
    const char *name() const noexcept { return farheap_status_name(code_); }
    int os_code() const noexcept { return os_code_; }
    const char *what() const noexcept override { return text_; }

private:
    status code_;
    int os_code_;
    char text_[1024] = {}; // No memory is needed to say that there is none; all of any message.
};

namespace detail {

[[noreturn]] inline void raise(status code) {
    switch (code) {
    case FARHEAP_E_OUT_OF_MEMORY:
    case FARHEAP_E_STORE_FULL:
    case FARHEAP_E_ADDRESS_SPACE:
    case FARHEAP_E_FULL:
    case FARHEAP_E_TOO_LARGE:
    case FARHEAP_E_ALIGN:
        throw bad_alloc(code);
    default:
        throw error(code);
    }
}

inline void check(status code) {
    if (code != FARHEAP_OK) raise(code);
}

// Result of an allocation; whatever the reason, a failed allocation is a bad_alloc.
inline void *checked(void *memory) {
    if (!memory) throw bad_alloc(farheap_last_status());
    return memory;
}

// For what a destructor cannot leave as it is: prints why, and ends the process.
[[noreturn]] inline void end_process(const char *why) noexcept {
    std::fprintf(stderr, "farheap: %s\n", why);
    std::terminate();
}

// Bytes of `count` objects.
template <class T> std::size_t bytes(std::size_t count) {
    if (count > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_array_new_length();
    return count * sizeof(T);
}

// Owns a handle.
template <class T, status (*Free)(T *) noexcept> struct freed {
    void operator()(T *handle) const noexcept { Free(handle); }
};
template <class T, status (*Free)(T *) noexcept> using owned = std::unique_ptr<T, freed<T, Free>>;

} // namespace detail

// The library's version; throws if this header belongs to another ABI.
namespace detail {
using log_function = std::function<void(farheap_log_level, const char *)>;
extern "C" inline void farheap_hpp_log(void *userdata, farheap_log_level level, const char *text) {
    try {
        (*static_cast<log_function *>(userdata))(level, text);
    } catch (...) { // A line is not worth more.
    }
}
} // namespace detail

// Sends messages of the library to `log`; an empty function: to standard error. What it throws is dropped. It is kept for
// good, for a call may be under way.
inline void set_log(std::function<void(farheap_log_level, const char *)> log) {
    if (!log) return detail::check(farheap_set_log(nullptr, nullptr));
    auto made = std::make_unique<detail::log_function>(std::move(log));
    detail::check(farheap_set_log(detail::farheap_hpp_log, made.get()));
    made.release();
}

inline const char *version() {
    detail::check(farheap_check_abi(FARHEAP_ABI_VERSION));
    if (farheap_abi_version() != FARHEAP_ABI_VERSION) detail::raise(FARHEAP_E_ABI);
    return farheap_version();
}
inline bool has_feature(farheap_feature feature) noexcept { return farheap_has_feature(feature); }
inline void clear_error() noexcept { farheap_clear_error(); }

// ---- The far heap -----------------------------------------------------------------------------

// Options, by the names of the text form; see farheap_config.
inline farheap_config make_config() noexcept { return FARHEAP_CONFIG_INIT; }
inline void check_config(const char *config) { detail::check(farheap_check_config(config)); }

class account;

// The process's far heap. Destroying it stops nothing: far memory may live on. shutdown() does.
class heap {
public:
    heap(heap &&) noexcept = default;
    heap &operator=(heap &&) noexcept = default;
    explicit heap(const char *config = nullptr) {
        take([&](farheap_heap **out) { return farheap_start(config, out); });
    }
    explicit heap(const std::string &config) : heap(config.c_str()) {}
    explicit heap(const farheap_config &config) {
        take([&](farheap_heap **out) { return farheap_start_config(&config, out); });
    }
    static heap from_env() {
        return heap([](farheap_heap **out) { return farheap_start_env(out); }, 0);
    }
    // Another object for the heap that runs.
    static heap running() {
        return heap([](farheap_heap **out) { return farheap_running(out); }, 0);
    }
    // Another object for the tier of this name; "far" is the heap itself.
    static heap tier(const char *name) {
        return heap([=](farheap_heap **out) { return farheap_find_tier(name, out); }, 0);
    }
    // Adds a far tier: an object for it, with a placement() of its own.
    heap add_tier(const char *name, const char *config) {
        farheap_heap *const self = get();
        return heap([=](farheap_heap **out) { return farheap_add_tier(self, name, config, out); }, 0);
    }
    // Placement in this tier: tier_resource, scope, bump_resource take it.
    farheap_placement placement() const {
        farheap_placement answer = FARHEAP_FAR;
        detail::check(farheap_heap_placement(get(), &answer));
        return answer;
    }
    // Use of its memory.
    farheap::usage usage() const {
        farheap::usage out{};
        out.size = sizeof out;
        detail::check(farheap_heap_usage(get(), &out));
        return out;
    }

    void shutdown() { detail::check(farheap_shutdown(get())); }
    void prefetch(const void *ptr, std::size_t len) {
        detail::check(farheap_prefetch(get(), ptr, len));
    }
    void prefetch(const std::vector<range> &ranges) {
        detail::check(farheap_prefetch_many(get(), ranges.data(), ranges.size()));
    }
    void evict(const void *ptr, std::size_t len) { detail::check(farheap_evict(get(), ptr, len)); }
    void evict_all() { detail::check(farheap_evict_all(get())); }
    void pin(const void *ptr, std::size_t len) { detail::check(farheap_pin(get(), ptr, len)); }
    void unpin(const void *ptr, std::size_t len) { detail::check(farheap_unpin(get(), ptr, len)); }
    void discard(void *ptr, std::size_t len) { detail::check(farheap_discard(get(), ptr, len)); }
    void advise(const void *ptr, std::size_t len, farheap_advice advice) {
        detail::check(farheap_advise(get(), ptr, len, advice));
    }
    void set_limit(std::uint64_t limit) { detail::check(farheap_set_limit(get(), limit)); }
    void set_far_limit(std::uint64_t limit) { detail::check(farheap_set_far_limit(get(), limit)); }
    void purge() { detail::check(farheap_purge(get())); }
    // FARHEAP_NONE when no size goes far by itself.
    std::uint64_t threshold() const {
        std::uint64_t answer = 0;
        detail::check(farheap_threshold(get(), &answer));
        return answer;
    }
    bool serves_kernel_faults() const {
        bool answer = false;
        detail::check(farheap_serves_kernel_faults(get(), &answer));
        return answer;
    }
    farheap::stats stats() const {
        farheap::stats out{};
        out.size = sizeof out;
        detail::check(farheap_heap_stats(get(), &out));
        return out;
    }
    farheap::latencies latencies() const {
        farheap::latencies out{};
        out.size = sizeof out;
        detail::check(farheap_heap_latencies(get(), &out));
        return out;
    }
    // Its share of the manager that it was started under; throws without one.
    farheap::account account();
    farheap_heap *get() const noexcept { return handle_.get(); }

private:
    friend class manager;
    friend class pinned;
    template <class Start> heap(Start start, int) { take(start); }
    template <class Start> void take(Start start) {
        farheap_heap *handle = nullptr;
        detail::check(start(&handle));
        handle_ = std::shared_ptr<farheap_heap>(handle, farheap_heap_free);
    }
    // Shared with what is pinned.
    std::shared_ptr<farheap_heap> handle_;
};

// Pins a range while it lives, on whichever thread; the heap object may be moved or destroyed before.
class pinned {
public:
    pinned(heap &of, const void *ptr, std::size_t len) : heap_(of.handle_), ptr_(ptr), len_(len) {
        of.pin(ptr, len);
    }
    pinned(const pinned &) = delete;
    pinned &operator=(const pinned &) = delete;
    ~pinned() { farheap_unpin(heap_.get(), ptr_, len_); }

private:
    std::shared_ptr<farheap_heap> heap_;
    const void *ptr_;
    std::size_t len_;
};

// Sends what this thread allocates by policy to one placement while it lives. It ends on its thread, and scopes in the
// reverse order of their beginning: else a thread would allocate by a scope that is gone, and the process ends with a
// sentence. So none may live across a co_await: the coroutine may go on in another thread, and what this one does
// meanwhile would be in the scope.
class scope {
public:
    explicit scope(farheap_placement placement) {
        detail::check(farheap_scope_push(placement));
        number_ = farheap_scope_number();
    }
    scope(const scope &) = delete;
    scope &operator=(const scope &) = delete;
    ~scope() {
        if (farheap_scope_number() != number_) {
            detail::end_process("a scope ends on another thread than it began on, or before a scope that was begun "
                                "inside of it: a scope must not live across co_await, and ends in its block");
        }
        farheap_scope_pop();
    }

private:
    std::uint64_t number_;
};

// ---- Memory -----------------------------------------------------------------------------------

inline bool is_far(const void *ptr) noexcept { return far_contains(ptr); }

// A block of far_malloc and kin, freed by far_free.
struct far_deleter {
    void operator()(void *block) const noexcept { far_free(block); }
};
using block = std::unique_ptr<void, far_deleter>;

inline block make_block(std::size_t size) { return block(detail::checked(far_malloc(size))); }
inline block make_zeroed_block(std::size_t count, std::size_t size) {
    return block(detail::checked(far_calloc(count, size)));
}
inline block make_aligned_block(std::size_t align, std::size_t size) {
    return block(detail::checked(far_aligned_alloc(align, size)));
}
// Resizes; on failure the block is as it was.
inline void resize(block &of, std::size_t size) {
    void *moved = detail::checked(far_realloc(of.get(), size));
    (void)of.release();
    of.reset(moved);
}
inline std::size_t usable_size(const block &of) noexcept { return far_usable_size(of.get()); }

// Memory of one tier, for containers of std::pmr: `std::pmr::vector<int> v{&ssd}`.
class tier_resource : public std::pmr::memory_resource {
public:
    explicit tier_resource(farheap_placement placement) noexcept : placement_(placement) {}
    farheap_placement placement() const noexcept { return placement_; }

protected:
    void *do_allocate(std::size_t bytes, std::size_t align) override {
        return detail::checked(far_allocate(placement_, bytes, align));
    }
    void do_deallocate(void *ptr, std::size_t bytes, std::size_t align) override {
        far_free_sized(ptr, bytes, align);
    }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
#ifdef __cpp_rtti
        const auto *tier = dynamic_cast<const tier_resource *>(&other);
        return tier && tier->placement_ == placement_;
#else
        return this == &other; // Without RTTI: containers on two resources copy, and do not move.
#endif
    }

private:
    farheap_placement placement_;
};

// Memory that goes at once, for containers of std::pmr: what is allocated in it is freed with it, whether
// containers give it back or not. Any thread may use it.
class bump_resource final : public std::pmr::memory_resource {
public:
    explicit bump_resource(farheap_placement placement = FARHEAP_LOCAL) {
        farheap_bump *handle = nullptr;
        detail::check(farheap_bump_new(placement, &handle));
        handle_.reset(handle);
    }
    // Bytes that it has: blocks, and what it has ready for more.
    std::uint64_t reserved() const {
        std::uint64_t answer = 0;
        detail::check(farheap_bump_reserved(handle_.get(), &answer));
        return answer;
    }

protected:
    void *do_allocate(std::size_t bytes, std::size_t align) override {
        return detail::checked(farheap_bump_allocate(handle_.get(), bytes, align));
    }
    void do_deallocate(void *ptr, std::size_t bytes, std::size_t align) override {
        farheap_bump_deallocate(handle_.get(), ptr, bytes, align);
    }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        return this == &other;
    }

private:
    detail::owned<farheap_bump, farheap_bump_free> handle_;
};

// The far tier: pages that can live on the heap's device.
class far_resource final : public tier_resource {
public:
    far_resource() noexcept : tier_resource(FARHEAP_FAR) {}
};

// RAM that is never evicted.
class local_resource final : public tier_resource {
public:
    local_resource() noexcept : tier_resource(FARHEAP_LOCAL) {}
};

// A standard allocator of one placement, without state.
template <class T, farheap_placement Placement = FARHEAP_FAR> class allocator {
public:
    using value_type = T;
    using is_always_equal = std::true_type;
    template <class U> struct rebind {
        using other = allocator<U, Placement>;
    };

    allocator() noexcept = default;
    template <class U> allocator(const allocator<U, Placement> &) noexcept {}

    [[nodiscard]] T *allocate(std::size_t count) {
        const std::size_t bytes = detail::bytes<T>(count);
        return static_cast<T *>(detail::checked(far_allocate(Placement, bytes, alignof(T))));
    }
    void deallocate(T *ptr, std::size_t count) noexcept {
        far_free_sized(ptr, count * sizeof(T), alignof(T));
    }
    template <class U> bool operator==(const allocator<U, Placement> &) const noexcept {
        return true;
    }
    template <class U> bool operator!=(const allocator<U, Placement> &) const noexcept {
        return false;
    }
};
template <class T> using far_allocator = allocator<T, FARHEAP_FAR>;
template <class T> using local_allocator = allocator<T, FARHEAP_LOCAL>;

// ---- Memory manager and buffer pool -----------------------------------------------------------

namespace detail {
using pressure_function = std::function<void(farheap_pressure, std::uint64_t)>;
using write_function = std::function<bool(std::uint64_t page, std::uint64_t lsn)>;
using reclaim_function = std::function<std::uint64_t(std::uint64_t want, farheap_reclaim_cost cost)>;

// The callback for a manager's pressure. It lives as long as what may tell: manager, pools, heap.
struct pressure_slot {
    std::atomic<pressure_function *> told{nullptr};
    ~pressure_slot() { delete told.load(); }
};

extern "C" inline void farheap_hpp_on_pressure(void *userdata, farheap_pressure event,
                                               std::uint64_t bytes) {
    try {
        pressure_function *told = static_cast<pressure_slot *>(userdata)->told.load();
        if (told) (*told)(event, bytes);
    } catch (...) { // An event that was not understood costs nothing.
    }
}

// Keeps what may be called for ever: by the far heap, which may run until the process ends, and by what
// could not be freed.
inline void keep(std::shared_ptr<pressure_slot> slot) {
    static std::mutex lock;
    static auto *const kept = new std::vector<std::shared_ptr<pressure_slot>>;
    const std::lock_guard<std::mutex> guard(lock);
    kept->push_back(std::move(slot));
}

extern "C" inline std::uint64_t farheap_hpp_reclaim(void *userdata, std::uint64_t want,
                                                    farheap_reclaim_cost cost) {
    try {
        return (*static_cast<reclaim_function *>(userdata))(want, cost);
    } catch (...) { // Others are asked then.
        return 0;
    }
}

extern "C" inline farheap_status farheap_hpp_before_write(void *userdata, std::uint64_t page,
                                                          std::uint64_t lsn) {
    try {
        return (*static_cast<write_function *>(userdata))(page, lsn) ? FARHEAP_OK
                                                                     : FARHEAP_E_CALLBACK;
    } catch (...) { // The page stays in memory, which is safe.
        return FARHEAP_E_CALLBACK;
    }
}
} // namespace detail

// One limit over table pages, temporary memory and, by start_heap(), far memory.
class manager {
public:
    explicit manager(std::uint64_t limit) {
        farheap_manager *handle = nullptr;
        detail::check(farheap_manager_new(limit, &handle));
        handle_.reset(handle);
    }
    manager(manager &&) noexcept = default;
    manager &operator=(manager &&other) noexcept {
        manager old(std::move(*this)); // Ends as a whole, after the other's place is taken.
        told_ = std::move(other.told_);
        handle_ = std::move(other.handle_);
        return *this;
    }
    ~manager() {
        // A handle that cannot be freed leaves a manager that goes on, and tells.
        if (handle_ && farheap_manager_free(handle_.release()) != FARHEAP_OK) detail::keep(told_);
    }
    std::uint64_t limit() const noexcept { return farheap_manager_limit(get()); }
    void set_limit(std::uint64_t limit) { detail::check(farheap_manager_set_limit(get(), limit)); }
    void set_deadline_ms(std::uint64_t ms) {
        detail::check(farheap_manager_set_deadline(get(), ms));
    }
    void set_temporary_ceiling(std::uint64_t bytes) {
        detail::check(farheap_manager_set_temporary_ceiling(get(), bytes));
    }
    // Called from any thread; once for each manager. What it throws is dropped.
    void on_pressure(detail::pressure_function told) {
        auto made = std::make_unique<detail::pressure_function>(std::move(told));
        detail::check(farheap_manager_on_pressure(get(), detail::farheap_hpp_on_pressure,
                                                  told_.get()));
        told_->told.store(made.release());
    }
    manager_stats stats() const {
        manager_stats out{};
        out.size = sizeof out;
        detail::check(farheap_manager_stats_get(get(), &out));
        return out;
    }
    // Whole pages; gives back by free_temporary.
    [[nodiscard]] void *allocate_temporary(std::size_t len) {
        void *out = nullptr;
        detail::check(farheap_manager_allocate_temporary(get(), len, &out));
        return out;
    }
    void free_temporary(void *ptr) { detail::check(farheap_manager_free_temporary(get(), ptr)); }
    bool is_spilled(const void *ptr) const noexcept {
        return farheap_manager_is_spilled(get(), ptr);
    }
    // A consumer's figures; empty after the last one.
    std::optional<consumer_stats> consumer(std::uint64_t index) const {
        consumer_stats out{};
        out.size = sizeof out;
        const status code = farheap_manager_consumer(get(), index, &out);
        if (code == FARHEAP_E_BAD_RANGE) return std::nullopt;
        detail::check(code);
        return out;
    }
    // Temporary memory's share.
    account temporary_account();
    farheap_manager *get() const noexcept { return handle_.get(); }

    // Starts the process's far heap under this limit; temporary memory that does not fit spills to it.
    heap start_heap(const char *config = nullptr) {
        return start([&](farheap_heap **out) { return farheap_start_under(get(), config, out); });
    }
    heap start_heap(const farheap_config &config) {
        return start([&](farheap_heap **out) {
            return farheap_start_config_under(get(), &config, out);
        });
    }

private:
    friend class account;
    friend class pool;
    template <class Start> heap start(Start start) {
        detail::keep(told_);
        return heap(start, 0);
    }
    // Before the handle, so that it outlives it.
    std::shared_ptr<detail::pressure_slot> told_ = std::make_shared<detail::pressure_slot>();
    detail::owned<farheap_manager, farheap_manager_free> handle_;
};

// A consumer's share of a manager's limit: memory of the program's own, or of a pool, heap or temporary
// memory, which can be bounded only.
class account {
public:
    // Opens one for memory that the program allocates by itself.
    account(manager &of, const std::string &name)
        : account(of.told_, [&](farheap_account **out) {
              return farheap_account_new(of.get(), name.c_str(), out);
          }) {}

    account(account &&) noexcept = default;
    account &operator=(account &&other) noexcept {
        account old(std::move(*this)); // Ends as a whole, after the other's place is taken.
        told_ = std::move(other.told_);
        asked_ = std::move(other.asked_);
        handle_ = std::move(other.handle_);
        return *this;
    }
    ~account() {
        // From within its own callback it cannot end: then what may be called stays.
        if (handle_ && farheap_account_free(handle_.release()) != FARHEAP_OK) {
            detail::keep(told_);
            (void)asked_.release();
        }
    }

    // Charges memory before it is allocated: others give way for it.
    void charge(std::uint64_t bytes) { detail::check(farheap_account_charge(get(), bytes)); }
    // False when others would have to give way.
    [[nodiscard]] bool try_charge(std::uint64_t bytes) {
        const status code = farheap_account_try_charge(get(), bytes);
        if (code == FARHEAP_E_WOULD_BLOCK) return false;
        detail::check(code);
        return true;
    }
    void uncharge(std::uint64_t bytes) { detail::check(farheap_account_uncharge(get(), bytes)); }
    // For memory that can only be counted.
    void set_used(std::uint64_t bytes) { detail::check(farheap_account_set_used(get(), bytes)); }
    // Sets the callback that frees this memory when others need it, see farheap_reclaim; once for each account. What it
    // throws is dropped, and counts as nothing freed.
    void on_reclaim(detail::reclaim_function asked) {
        auto made = std::make_unique<detail::reclaim_function>(std::move(asked));
        detail::check(farheap_account_on_reclaim(get(), detail::farheap_hpp_reclaim, made.get()));
        asked_ = std::move(made);
    }
    void set_floor(std::uint64_t bytes) { detail::check(farheap_account_set_floor(get(), bytes)); }
    void set_ceiling(std::uint64_t bytes) {
        detail::check(farheap_account_set_ceiling(get(), bytes));
    }
    std::uint64_t used() const noexcept { return farheap_account_used(get()); }
    std::uint64_t held() const noexcept { return farheap_account_held(get()); }
    std::uint64_t floor() const noexcept { return farheap_account_floor(get()); }
    std::uint64_t ceiling() const noexcept { return farheap_account_ceiling(get()); }
    farheap_account *get() const noexcept { return handle_.get(); }

private:
    friend class heap;
    friend class manager;
    friend class pool;
    template <class Open>
    account(std::shared_ptr<detail::pressure_slot> told, Open open) : told_(std::move(told)) {
        farheap_account *handle = nullptr;
        detail::check(open(&handle));
        handle_.reset(handle);
    }
    // Before the handle, so that they outlive it. An account keeps its manager, which may tell.
    std::shared_ptr<detail::pressure_slot> told_;
    std::unique_ptr<detail::reclaim_function> asked_;
    detail::owned<farheap_account, farheap_account_free> handle_;
};

inline account heap::account() {
    // The function is kept for ever: `start_heap` sees to it.
    return farheap::account(nullptr, [&](farheap_account **out) {
        return farheap_heap_account(get(), out);
    });
}
inline account manager::temporary_account() {
    return account(told_, [&](farheap_account **out) {
        return farheap_manager_temporary_account(get(), out);
    });
}

// Temporary memory of queries, for containers of std::pmr.
class temporary_resource final : public std::pmr::memory_resource {
public:
    explicit temporary_resource(manager &of) {
        farheap_temporary *handle = nullptr;
        detail::check(farheap_temporary_new(of.get(), &handle));
        handle_.reset(handle);
    }

protected:
    void *do_allocate(std::size_t bytes, std::size_t align) override {
        return detail::checked(farheap_temporary_allocate(handle_.get(), bytes, align));
    }
    void do_deallocate(void *ptr, std::size_t bytes, std::size_t align) override {
        farheap_temporary_deallocate(handle_.get(), ptr, bytes, align);
    }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        return this == &other;
    }

private:
    detail::owned<farheap_temporary, farheap_temporary_free> handle_;
};

// A page that is held: the base of the guards. Ends its fix when destroyed, on whichever thread. A guard that holds
// nothing, made without a page, moved from or unfixed, may be assigned to: its size() and data() are 0, id() is what it
// was, and all else throws error with FARHEAP_E_HANDLE.
class page_guard {
public:
    page_guard(page_guard &&other) noexcept : page_(other.release()) {}
    page_guard &operator=(page_guard &&other) noexcept {
        if (this != &other) {
            unfix();
            page_ = other.release();
        }
        return *this;
    }
    ~page_guard() { unfix(); }

    std::uint64_t id() const noexcept { return page_.id; }
    std::size_t size() const noexcept { return page_.len; }
    bool holds() const noexcept { return page_.kind != FARHEAP_PAGE_NONE; }
    // Ends the fix now.
    void unfix() noexcept {
        if (page_.kind == FARHEAP_PAGE_OPTIMISTIC) {
            (void)release(); // Nothing is held.
        } else if (holds()) {
            farheap_page_unfix(&page_);
        }
    }
    // Copies a value out of the page.
    template <class T> T read(std::size_t at) const {
        static_assert(std::is_trivially_copyable_v<T>);
        T value;
        detail::check(farheap_page_read(&page_, at, &value, sizeof value));
        return value;
    }
    const farheap_page &raw() const noexcept { return page_; }

protected:
    page_guard() noexcept : page_() {}
    explicit page_guard(const farheap_page &page) noexcept : page_(page) {}
    // Fixes in place: a copy of what was just stored makes the processor wait.
    template <class Fix, class... Arguments>
    page_guard(farheap_pool *of, Fix fix, Arguments... arguments) {
        detail::check(fix(of, arguments..., &page_));
    }
    farheap_page release() noexcept {
        farheap_page page = page_;
        page_.kind = FARHEAP_PAGE_NONE;
        page_.data = nullptr;
        page_.len = 0;
        return page;
    }
    // Throws unless a page is held.
    void check_holds() const {
        // Fails, and says why.
        if (!holds()) detail::check(farheap_page_read(&page_, 0, nullptr, 0));
    }
    farheap_page page_;
};

class exclusive_guard;

// Holds a page together with other readers.
class shared_guard : public page_guard {
public:
    shared_guard() noexcept = default; // Holds nothing.
    const std::uint8_t *data() const noexcept { return page_.data; }
    std::uint64_t lsn() const {
        check_holds();
        return farheap_page_lsn(&page_);
    }
    // Empty, and this guard as it was, when there are other holders.
    std::optional<exclusive_guard> try_upgrade();

private:
    friend class btree;
    friend class pool;
    friend class exclusive_guard;
    friend class optimistic_guard;
    friend class value_guard;
    using page_guard::page_guard;
};

// Holds a page alone.
class exclusive_guard : public page_guard {
public:
    exclusive_guard() noexcept = default; // Holds nothing.
    const std::uint8_t *data() const noexcept { return page_.data; }
    // The bytes to change: marks the page as changed.
    std::uint8_t *write() {
        std::uint8_t *const bytes = farheap_page_write(&page_);
        if (!bytes) detail::raise(farheap_last_status());
        return bytes;
    }
    template <class T> void write(std::size_t at, const T &value) {
        static_assert(std::is_trivially_copyable_v<T>);
        check_holds();
        if (at > size() || size() - at < sizeof value) {
            throw std::out_of_range("the value does not lie within the page");
        }
        std::memcpy(write() + at, &value, sizeof value);
    }
    std::uint64_t lsn() const {
        check_holds();
        return farheap_page_lsn(&page_);
    }
    void set_lsn(std::uint64_t lsn) { detail::check(farheap_page_set_lsn(&page_, lsn)); }
    // Becomes shared, without letting anybody in between.
    shared_guard downgrade() && {
        detail::check(farheap_page_downgrade(&page_));
        return shared_guard(release());
    }
    // Frees the page.
    void free() && { detail::check(farheap_page_free(&page_)); }

private:
    friend class pool;
    friend class shared_guard;
    friend class optimistic_guard;
    using page_guard::page_guard;
};

inline std::optional<exclusive_guard> shared_guard::try_upgrade() {
    const status code = farheap_page_try_upgrade(&page_);
    if (code == FARHEAP_E_WOULD_BLOCK) return std::nullopt;
    detail::check(code);
    return exclusive_guard(release());
}

// A page was changed, or taken away, under an optimistic look at it: what was read does not count, and the
// attempt begins anew (optimistically()). Means nothing else, so it is no farheap::error.
class restart : public std::exception {
public:
    const char *what() const noexcept override { return "a page was changed under an optimistic look"; }
};

namespace detail {
// Spins a while, and then gives the time slice up.
class backoff {
public:
    void wait() noexcept {
        if (++turns_ > 32) return std::this_thread::yield();
        for (unsigned spins = 1u << (turns_ / 8); spins > 0; spins--) pause();
    }

private:
    static void pause() noexcept {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    unsigned turns_ = 0;
};
} // namespace detail

// Returns what `attempt()` returns; calls it again as long as it throws restart: a descent of a tree through
// optimistic guards of several pages. What else it throws passes. Guards of an attempt have ended when the
// next begins; it must not have changed anything before its last check().
template <class Attempt> decltype(auto) optimistically(Attempt &&attempt) {
    for (detail::backoff backoff;; backoff.wait()) {
        try {
            return attempt();
        } catch (const restart &) {
        }
    }
}

// Looks at a page without holding it: what read() gave, or a look at data(), counts if validate() says
// so afterwards.
class optimistic_guard : public page_guard {
public:
    optimistic_guard() noexcept = default; // Holds nothing.
    // The bytes, which others may change at any time: see farheap_pool_fix_optimistic.
    const volatile std::uint8_t *data() const noexcept { return page_.data; }
    bool validate() const noexcept { return farheap_page_validate(&page_); }
    // Throws restart unless validate().
    void check() const {
        if (validate()) return;
        if (!holds()) detail::raise(FARHEAP_E_HANDLE); // A restart would come back here for ever.
        throw restart();
    }
    // Becomes shared, or exclusive, as try_share() and try_upgrade() do, or throws restart.
    shared_guard share_or_restart() {
        std::optional<shared_guard> shared = try_share();
        if (!shared) throw restart();
        return std::move(*shared);
    }
    exclusive_guard upgrade_or_restart() {
        std::optional<exclusive_guard> exclusive = try_upgrade();
        if (!exclusive) throw restart();
        return std::move(*exclusive);
    }
    // Becomes exclusive, and waits for holders up to the pool's deadline. Throws restart when the page was
    // changed, and error with FARHEAP_E_LATCH_TIMEOUT, this guard being as it was.
    exclusive_guard upgrade() {
        const status code = farheap_page_upgrade(&page_);
        if (code == FARHEAP_E_CHANGED) throw restart();
        detail::check(code);
        return exclusive_guard(release());
    }
    // Empty, and this guard as it was, when the page was changed or is held exclusively; for an upgrade, held
    // at all: validate() tells which.
    std::optional<shared_guard> try_share() {
        const status code = farheap_page_try_share(&page_);
        if (code == FARHEAP_E_WOULD_BLOCK) return std::nullopt;
        detail::check(code);
        return shared_guard(release());
    }
    std::optional<exclusive_guard> try_upgrade() {
        const status code = farheap_page_try_upgrade(&page_);
        if (code == FARHEAP_E_WOULD_BLOCK) return std::nullopt;
        detail::check(code);
        return exclusive_guard(release());
    }

private:
    friend class pool;
    using page_guard::page_guard;
};

class pool;

// How a pool is set up.
struct pool_options {
    std::uint64_t page = 0;        // bytes; 4 KiB
    std::uint64_t deadline_ms = 0; // 30 s
    farheap_switch checksum = FARHEAP_DEFAULT;
    farheap_switch cleaner = FARHEAP_DEFAULT;
    farheap_replacement replacement = FARHEAP_REPLACEMENT_DEFAULT;
    farheap_switch overwrite = FARHEAP_DEFAULT; // create over data, an older table too; off
    farheap_switch read_only = FARHEAP_DEFAULT; // open beside other readers, to change nothing; off
    // A table under the same manager whose pool this one joins: one limit and one order in which pages leave
    // for all their tables. Each is destroyed by itself.
    const pool *beside = nullptr;
    // All bytes of a page are the program's: payload() is the page size. No checksum, no lsn; off.
    farheap_switch whole_pages = FARHEAP_DEFAULT;
    // True if the log holds a record; called from any thread. What throws is a no.
    detail::write_function before_write{};
};

namespace detail {
// Numbers of pages, and what noting them threw.
struct visiting {
    std::vector<std::uint64_t> pages;
    std::exception_ptr thrown;
};

extern "C" inline bool farheap_hpp_visit(void *userdata, std::uint64_t page) {
    visiting *const self = static_cast<visiting *>(userdata);
    try {
        self->pages.push_back(page);
    } catch (...) {
        self->thrown = std::current_exception();
    }
    return !self->thrown;
}
} // namespace detail

// Pages of a table file within a manager's limit. Any number of threads use one. Its numbers of pages begin with
// 2. Destroying it closes the file without a flush(): what was changed since the last one is lost, or half
// of it. Guards, trees and cursors are to be destroyed before it.
class pool {
public:
    // Creates a table file of up to `capacity` bytes. One that exists has to be free, or options.overwrite
    // allows its loss.
    static pool create(manager &under, const std::string &path, std::uint64_t capacity,
                       pool_options options = {}) {
        return pool(under, std::move(options), [&](auto *config, farheap_pool **out) {
            return farheap_pool_create(under.get(), config, path.c_str(), capacity, out);
        });
    }
    // Opens what create() has made, with the pages of its last flush(), or later ones that were evicted.
    static pool open(manager &under, const std::string &path, pool_options options = {}) {
        return pool(under, std::move(options), [&](auto *config, farheap_pool **out) {
            return farheap_pool_open(under.get(), config, path.c_str(), out);
        });
    }

    pool(pool &&) noexcept = default;
    pool &operator=(pool &&other) noexcept {
        pool old(std::move(*this)); // Ends as a whole, after the other's place is taken.
        told_ = std::move(other.told_);
        asked_ = std::move(other.asked_);
        handle_ = std::move(other.handle_);
        return *this;
    }
    ~pool() {
        // A pool with pages that guards hold still, or with trees, goes on until the process ends,
        // and asks.
        if (handle_ && farheap_pool_free(handle_.release()) != FARHEAP_OK) {
            detail::keep(told_);
            if (*asked_) (void)asked_.release();
        }
    }

    // A page that is in use from now on, zeroed, of payload() bytes.
    exclusive_guard allocate() { return exclusive_guard(get(), farheap_pool_allocate); }
    shared_guard fix_shared(std::uint64_t id) {
        return shared_guard(get(), farheap_pool_fix_shared, id);
    }
    shared_guard fix_shared(std::uint64_t id, std::uint64_t deadline_ms) {
        return shared_guard(get(), farheap_pool_fix_shared_within, id, deadline_ms);
    }
    exclusive_guard fix_exclusive(std::uint64_t id) {
        return exclusive_guard(get(), farheap_pool_fix_exclusive, id);
    }
    exclusive_guard fix_exclusive(std::uint64_t id, std::uint64_t deadline_ms) {
        return exclusive_guard(get(), farheap_pool_fix_exclusive_within, id, deadline_ms);
    }
    // Brings the page in if it is absent, and holds nothing.
    optimistic_guard fix_optimistic(std::uint64_t id) {
        return optimistic_guard(get(), farheap_pool_fix_optimistic, id);
    }
    // For redo: a page to overwrite whatever it is, zeroed; in use from now on.
    exclusive_guard fix_to_overwrite(std::uint64_t id) {
        return exclusive_guard(get(), farheap_pool_fix_to_overwrite, id);
    }
    // Empty when it would need waiting or I/O.
    std::optional<shared_guard> try_fix_shared(std::uint64_t id) {
        farheap_page page{};
        if (!tried(farheap_pool_try_fix_shared(get(), id, &page))) return std::nullopt;
        return shared_guard(page);
    }
    std::optional<exclusive_guard> try_fix_exclusive(std::uint64_t id) {
        farheap_page page{};
        if (!tried(farheap_pool_try_fix_exclusive(get(), id, &page))) return std::nullopt;
        return exclusive_guard(page);
    }
    // Fixes many pages with one batch of reads.
    std::vector<shared_guard> fix_many(const std::vector<std::uint64_t> &ids) {
        std::vector<shared_guard> guards;
        std::vector<farheap_page> pages(ids.size());
        guards.reserve(ids.size()); // Nothing throws once pages are held.
        detail::check(farheap_pool_fix_many(get(), ids.data(), ids.size(), pages.data()));
        for (const farheap_page &page : pages) guards.push_back(shared_guard(page));
        return guards;
    }
    // Calls `read(guard)` until nobody changed the page meanwhile; at last under a shared guard.
    template <class Read> auto read_optimistic(std::uint64_t id, Read read) {
        for (int attempt = 0; attempt < 8; attempt++) {
            optimistic_guard guard = fix_optimistic(id);
            auto value = read(static_cast<const page_guard &>(guard));
            if (guard.validate()) return value;
        }
        shared_guard guard = fix_shared(id);
        return read(static_cast<const page_guard &>(guard));
    }
    void prefetch(const std::vector<std::uint64_t> &ids) {
        detail::check(farheap_pool_prefetch(get(), ids.data(), ids.size()));
    }
    // The checkpoint: all that was changed before is on the device when it returns. Throws when before_write
    // refused pages: FARHEAP_E_WRITE_REFUSED.
    void flush() { detail::check(farheap_pool_flush(get())); }
    // Makes these pages durable, which is no checkpoint.
    void flush_pages(const std::vector<std::uint64_t> &ids) {
        detail::check(farheap_pool_flush_pages(get(), ids.data(), ids.size()));
    }
    // The numbers of the pages in use; of those that were changed and not written. They ascend.
    std::vector<std::uint64_t> pages_in_use() const { return visited(farheap_pool_pages_in_use); }
    std::vector<std::uint64_t> dirty_pages() const { return visited(farheap_pool_dirty_pages); }
    // Evicts all pages that nobody holds; throws as flush() does.
    void evict_all() { detail::check(farheap_pool_evict_all(get())); }
    // Evicts about as many bytes of unchanged pages; returns how many.
    std::uint64_t evict_clean(std::uint64_t want) {
        std::uint64_t freed = 0;
        detail::check(farheap_pool_evict_clean(get(), want, &freed));
        return freed;
    }
    // The pool's share of the manager's limit.
    farheap::account account() {
        return farheap::account(told_, [&](farheap_account **out) {
            return farheap_pool_account(get(), out);
        });
    }
    void set_floor(std::uint64_t bytes) { detail::check(farheap_pool_set_floor(get(), bytes)); }
    void set_ceiling(std::uint64_t bytes) {
        detail::check(farheap_pool_set_ceiling(get(), bytes));
    }
    std::size_t payload() const noexcept { return farheap_pool_payload(get()); }
    std::uint64_t pages() const noexcept { return farheap_pool_pages(get()); }
    // Where a page's bytes are whenever it is resident, and the page of an address; see
    // farheap_pool_page_address on what may be done with it. nullptr and empty when there is none.
    const volatile std::uint8_t *page_address(std::uint64_t id) const noexcept {
        return farheap_pool_page_address(get(), id);
    }
    std::optional<std::uint64_t> page_at(const volatile void *address) const noexcept {
        const std::uint64_t id = farheap_pool_page_at(get(), const_cast<const void *>(address));
        return id ? std::optional(id) : std::nullopt;
    }
    pool_stats stats() const {
        pool_stats out{};
        out.size = sizeof out;
        detail::check(farheap_pool_stats_get(get(), &out));
        return out;
    }
    farheap_pool *get() const noexcept { return handle_.get(); }

private:
    template <class Make> pool(manager &under, pool_options &&options, Make make)
        : told_(under.told_),
          asked_(std::make_unique<detail::write_function>(std::move(options.before_write))) {
        farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
        config.page = options.page;
        config.deadline_ms = options.deadline_ms;
        config.checksum = options.checksum;
        config.cleaner = options.cleaner;
        config.replacement = options.replacement;
        config.overwrite = options.overwrite;
        config.read_only = options.read_only;
        config.beside = options.beside ? options.beside->get() : nullptr;
        config.whole_pages = options.whole_pages;
        if (*asked_) {
            config.before_write = detail::farheap_hpp_before_write;
            config.userdata = asked_.get();
        }
        farheap_pool *handle = nullptr;
        detail::check(make(&config, &handle));
        handle_.reset(handle);
    }
    std::vector<std::uint64_t> visited(status (*visit)(farheap_pool *, farheap_visit,
                                                       void *) noexcept) const {
        detail::visiting state{};
        detail::check(visit(get(), detail::farheap_hpp_visit, &state));
        if (state.thrown) std::rethrow_exception(state.thrown);
        return std::move(state.pages);
    }
    static bool tried(status code) {
        if (code == FARHEAP_E_WOULD_BLOCK) return false;
        detail::check(code);
        return true;
    }
    // Before the handle, so that they outlive it.
    std::shared_ptr<detail::pressure_slot> told_;
    std::unique_ptr<detail::write_function> asked_;
    detail::owned<farheap_pool, farheap_pool_free> handle_;
};

// ---- B+-trees ---------------------------------------------------------------------------------

// A key with its value; the bytes are the cursor's, until it moves on.
struct entry {
    std::string_view key;
    std::string_view value;
};

// A place between two entries of a tree. It holds no page: the tree may be changed meanwhile.
class cursor {
public:
    explicit cursor(farheap_cursor *handle) noexcept : handle_(handle) {}
    // The entry behind the cursor, over which it goes; empty behind the last.
    std::optional<entry> next() { return moved(farheap_cursor_next); }
    // The entry before the cursor, back over which it goes; empty before the first.
    std::optional<entry> prev() { return moved(farheap_cursor_prev); }
    farheap_cursor *get() const noexcept { return handle_.get(); }

    // for (entry e : tree.scan("from")): an input range, that is, to be gone through once.
    class iterator {
    public:
        using iterator_category = std::input_iterator_tag;
        using value_type = entry;
        using difference_type = std::ptrdiff_t;
        using pointer = const entry *;
        using reference = const entry &;
        iterator() noexcept = default;
        explicit iterator(cursor &of) : of_(&of), at_(of.next()) {}
        reference operator*() const noexcept { return *at_; }
        pointer operator->() const noexcept { return &*at_; }
        iterator &operator++() {
            at_ = of_->next();
            return *this;
        }
        void operator++(int) { ++*this; }
        // Iterators are equal when both are at the end.
        friend bool operator==(const iterator &a, const iterator &b) noexcept {
            return !a.at_ && !b.at_;
        }
        friend bool operator!=(const iterator &a, const iterator &b) noexcept { return !(a == b); }

    private:
        cursor *of_ = nullptr;
        std::optional<entry> at_;
    };
    iterator begin() { return iterator(*this); }
    iterator end() noexcept { return iterator(); }

private:
    std::optional<entry> moved(status (*move)(farheap_cursor *, farheap_entry *, bool *) noexcept) {
        farheap_entry found{};
        bool is_there = false;
        detail::check(move(get(), &found, &is_there));
        if (!is_there) return std::nullopt;
        return entry{{reinterpret_cast<const char *>(found.key), found.key_len},
                     {reinterpret_cast<const char *>(found.value), found.value_len}};
    }
    detail::owned<farheap_cursor, farheap_cursor_free> handle_;
};

namespace detail {
// A change of a value, and what it threw.
struct changing {
    std::function<void(char *, std::size_t)> change;
    std::exception_ptr thrown;
};

extern "C" inline void farheap_hpp_change(void *userdata, void *value, std::size_t len) {
    changing *const self = static_cast<changing *>(userdata);
    try {
        self->change(static_cast<char *>(value), len);
    } catch (...) {
        self->thrown = std::current_exception();
    }
}

// A source of entries, and what it threw.
struct loading {
    std::function<std::optional<entry>()> next;
    std::exception_ptr thrown;
};

extern "C" inline bool farheap_hpp_next_entry(void *userdata, farheap_entry *out) {
    loading *const self = static_cast<loading *>(userdata);
    std::optional<entry> found;
    try {
        if (!self->thrown) found = self->next();
    } catch (...) {
        self->thrown = std::current_exception();
    }
    // A key that does not ascend ends a load, which leaves nothing then.
    if (self->thrown) found.emplace();
    if (!found) return false;
    out->key = reinterpret_cast<const std::uint8_t *>(found->key.data());
    out->key_len = found->key.size();
    out->value = reinterpret_cast<const std::uint8_t *>(found->value.data());
    out->value_len = found->value.size();
    return true;
}
} // namespace detail

// A value in its page, which is held together with other readers as long as this exists. A thread that
// has it must not change the tree.
class value_guard {
public:
    std::string_view get() const {
        page_.check_holds(); // Not after a move from it.
        return value_;
    }
    operator std::string_view() const { return get(); }

private:
    friend class btree;
    value_guard(shared_guard page, std::string_view value) noexcept
        : page_(std::move(page)), value_(value) {}
    shared_guard page_;
    std::string_view value_;
};

// An ordered map from bytes to bytes in a pool's pages. To be destroyed before the pool.
class btree {
public:
    static btree create(pool &in) {
        farheap_btree *handle = nullptr;
        detail::check(farheap_btree_create(in.get(), &handle));
        return btree(handle);
    }
    // Of entries in ascending order, each key once: `next()` gives a std::optional<entry>, empty at the
    // end, whose bytes stay until it is called again; it must not use the pool. What it throws is thrown
    // here. The nodes are full; after a failure all pages are free again.
    template <class Next> static btree load(pool &in, Next &&next) {
        detail::loading state{std::ref(next), nullptr};
        farheap_btree *handle = nullptr;
        const status code =
            farheap_btree_load(in.get(), detail::farheap_hpp_next_entry, &state, &handle);
        if (state.thrown) std::rethrow_exception(state.thrown);
        detail::check(code);
        return btree(handle);
    }
    // By its root(), which a tree keeps as long as it lives: the host writes it down, mostly in a page of its own.
    static btree open(pool &in, std::uint64_t root) {
        farheap_btree *handle = nullptr;
        detail::check(farheap_btree_open(in.get(), root, &handle));
        return btree(handle);
    }
    std::uint64_t root() const noexcept { return farheap_btree_root(get()); }

    std::optional<std::string> get(std::string_view key) const {
        std::string value;
        if (!get(key, value)) return std::nullopt;
        return value;
    }
    // The same into a string that is used again; returns whether the key is there.
    bool get(std::string_view key, std::string &into) const {
        into.resize(into.capacity());
        for (;;) {
            std::size_t len = 0;
            bool found = false;
            detail::check(farheap_btree_get(get(), key.data(), key.size(), into.data(), into.size(),
                                            &len, &found));
            const bool is_whole = len <= into.size();
            into.resize(len);
            if (is_whole) return found;
        }
    }
    // The value where it is.
    std::optional<value_guard> get_ref(std::string_view key) const {
        farheap_page page{};
        const std::uint8_t *value = nullptr;
        std::size_t len = 0;
        bool found = false;
        detail::check(farheap_btree_get_ref(get(), key.data(), key.size(), &page, &value, &len, &found));
        if (!found) return std::nullopt;
        return value_guard(shared_guard(page), {reinterpret_cast<const char *>(value), len});
    }
    bool contains(std::string_view key) const {
        std::size_t len = 0;
        bool found = false;
        detail::check(
            farheap_btree_get(get(), key.data(), key.size(), nullptr, 0, &len, &found));
        return found;
    }
    // Returns whether the key is new.
    bool insert(std::string_view key, std::string_view value) {
        bool is_new = false;
        detail::check(farheap_btree_insert(get(), key.data(), key.size(), value.data(),
                                           value.size(), &is_new));
        return is_new;
    }
    // Calls `change(bytes, len)` with the key's value, in place; it must not use the pool. What it
    // throws is thrown here. Returns whether the key is there.
    template <class Change> bool update(std::string_view key, Change &&change) {
        detail::changing state{std::ref(change), nullptr};
        bool found = false;
        detail::check(farheap_btree_update(get(), key.data(), key.size(),
                                           detail::farheap_hpp_change, &state, &found));
        if (state.thrown) std::rethrow_exception(state.thrown);
        return found;
    }
    // Returns whether there was the key.
    bool remove(std::string_view key) {
        bool found = false;
        detail::check(farheap_btree_remove(get(), key.data(), key.size(), &found));
        return found;
    }
    // Entries from a key on, in order.
    cursor scan(std::string_view from = {}) const {
        farheap_cursor *handle = nullptr;
        detail::check(farheap_btree_scan(get(), from.data(), from.size(), &handle));
        return cursor(handle);
    }
    // From behind the last entry, to be gone through by prev().
    cursor scan_back() const {
        farheap_cursor *handle = nullptr;
        detail::check(farheap_btree_scan_back(get(), &handle));
        return cursor(handle);
    }
    farheap_btree *get() const noexcept { return handle_.get(); }

private:
    explicit btree(farheap_btree *handle) noexcept : handle_(handle) {}
    detail::owned<farheap_btree, farheap_btree_free> handle_;
};

// ---- Collective allocators --------------------------------------------------------------------

// Which kind of sub-allocator.
enum class kind : std::uint32_t {
    purely_local = FARHEAP_PURELY_LOCAL,
    swappable_plain = FARHEAP_SWAPPABLE_PLAIN,
    new_per_page = FARHEAP_NEW_PER_PAGE,
};
inline constexpr kind purely_local = kind::purely_local;
inline constexpr kind swappable_plain = kind::swappable_plain;
inline constexpr kind new_per_page = kind::new_per_page;

// Local memory and pages of far memory, shared by all allocators on it and by copies. The memory goes
// with the last of them.
class collective {
public:
    collective(const char *config, std::uint64_t local_bytes, std::uint64_t page_bytes = 0) {
        farheap_collective *handle = nullptr;
        detail::check(farheap_collective_new(config, local_bytes, page_bytes, &handle));
        handle_ = std::shared_ptr<farheap_collective>(handle, farheap_collective_free);
    }
    bool contains(const void *ptr) const noexcept {
        return farheap_collective_contains(get(), ptr);
    }
    bool is_local(const void *ptr) const noexcept {
        return farheap_collective_is_local(get(), ptr);
    }
    bool share_a_page(const void *a, const void *b) const noexcept {
        return farheap_collective_share_a_page(get(), a, b);
    }
    std::size_t page_size() const noexcept { return farheap_collective_page_size(get()); }
    std::uint64_t local_capacity() const noexcept {
        return farheap_collective_local_capacity(get());
    }
    std::uint64_t local_used() const noexcept { return farheap_collective_local_used(get()); }
    std::uint64_t far_pages() const noexcept { return farheap_collective_far_pages(get()); }
    farheap::stats stats() const {
        farheap::stats out{};
        out.size = sizeof out;
        detail::check(farheap_collective_stats(get(), &out));
        return out;
    }
    farheap::latencies latencies() const {
        farheap::latencies out{};
        out.size = sizeof out;
        detail::check(farheap_collective_latencies(get(), &out));
        return out;
    }
    void set_limit(std::uint64_t limit) {
        detail::check(farheap_collective_set_limit(get(), limit));
    }
    void prefetch(const std::vector<range> &ranges) {
        detail::check(farheap_collective_prefetch_many(get(), ranges.data(), ranges.size()));
    }
    void advise(const void *ptr, std::size_t len, farheap_advice advice) {
        detail::check(farheap_collective_advise(get(), ptr, len, advice));
    }
    void pin(const void *ptr, std::size_t len) {
        detail::check(farheap_collective_pin(get(), ptr, len));
    }
    void unpin(const void *ptr, std::size_t len) {
        detail::check(farheap_collective_unpin(get(), ptr, len));
    }
    void evict_all() { detail::check(farheap_collective_evict_all(get())); }
    farheap_collective *get() const noexcept { return handle_.get(); }

private:
    std::shared_ptr<farheap_collective> handle_;
};

// Hands out objects within one subspace. It must not outlive its collective.
template <class T> class suballocator {
public:
    using value_type = T;
    using pointer = T *;

    suballocator(suballocator &&other) noexcept : sub_(other.sub_) { other.sub_.kind = 0; }
    suballocator &operator=(suballocator &&other) noexcept {
        if (this != &other) {
            release();
            sub_ = other.sub_;
            other.sub_.kind = 0;
        }
        return *this;
    }
    ~suballocator() { release(); }

    // Objects that it hands out; new_per_page: one page.
    farheap::kind kind() const noexcept { return static_cast<farheap::kind>(sub_.kind); }
    [[nodiscard]] T *allocate(std::size_t count = 1) {
        const std::size_t bytes = detail::bytes<T>(count);
        void *object = farheap_suballocator_allocate(&sub_, bytes, alignof(T));
        return static_cast<T *>(detail::checked(object));
    }
    // nullptr when there is no room, without an exception.
    [[nodiscard]] T *try_allocate(std::size_t count = 1) noexcept {
        if (count > static_cast<std::size_t>(-1) / 2 / sizeof(T)) return nullptr;
        void *object = farheap_suballocator_allocate(&sub_, count * sizeof(T), alignof(T));
        return static_cast<T *>(object);
    }
    bool contains(const void *ptr) const noexcept {
        return farheap_suballocator_contains(&sub_, ptr);
    }
    bool is_occupancy_under(double ratio) const noexcept {
        return farheap_suballocator_is_occupancy_under(&sub_, ratio);
    }

private:
    template <class, std::size_t> friend class collective_allocator;
    suballocator(farheap_collective *of, farheap::kind kind)
        : sub_{of, static_cast<std::uint32_t>(kind), 0, {0, 0}} {
        if (kind == new_per_page) {
            detail::check(farheap_collective_suballocator(of, sub_.kind, &sub_));
        }
    }
    suballocator(farheap_collective *of, const void *ptr) {
        detail::check(farheap_collective_suballocator_of(of, ptr, &sub_));
    }
    void release() noexcept {
        // The others hold nothing.
        if (sub_.kind == FARHEAP_NEW_PER_PAGE) farheap_suballocator_release(&sub_);
    }
    farheap_suballocator sub_;
};

// The collective allocator: a standard allocator whose memory comes from sub-allocators. Pointers
// from any of them are plain, and it frees them all.
template <class T, std::size_t PageSize = 4096> class collective_allocator {
public:
    using value_type = T;
    using pointer = T *;
    using size_type = std::size_t;
    using difference_type = std::ptrdiff_t;
    using suballocator_type = suballocator<T>;
    using propagate_on_container_copy_assignment = std::true_type;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;
    using is_always_equal = std::false_type;
    template <class U> struct rebind {
        using other = collective_allocator<U, PageSize>;
    };
    static constexpr std::size_t page_size = PageSize;

    // Throws std::invalid_argument when the collective has pages of another size.
    collective_allocator(const collective &of) : collective_(of) {
        if (of.page_size() != PageSize) {
            throw std::invalid_argument("the collective has pages of another size");
        }
    }
    template <class U>
    collective_allocator(const collective_allocator<U, PageSize> &other) noexcept
        : collective_(other.get_collective()) {}

    [[nodiscard]] suballocator_type get_suballocator(farheap::kind kind) const {
        return suballocator_type(collective_.get(), kind);
    }
    // The sub-allocator that an object came from.
    [[nodiscard]] suballocator_type get_suballocator(const void *ptr) const {
        return suballocator_type(collective_.get(), ptr);
    }
    bool if_suballocator_contains(const suballocator_type &sub, const void *ptr) const noexcept {
        return sub.contains(ptr);
    }
    bool contains(const void *ptr) const noexcept { return collective_.contains(ptr); }
    // True if less than `ratio` of a kind's subspace is in use; true for the unbounded ones.
    bool is_occupancy_under(double ratio, farheap::kind kind = purely_local) const noexcept {
        if (kind != purely_local) return true;
        farheap_suballocator sub{collective_.get(), FARHEAP_PURELY_LOCAL, 0, {0, 0}};
        return farheap_suballocator_is_occupancy_under(&sub, ratio);
    }

    [[nodiscard]] T *allocate(std::size_t count) { return allocate(count, swappable_plain); }
    [[nodiscard]] T *allocate(std::size_t count, farheap::kind kind) {
        const std::size_t bytes = detail::bytes<T>(count);
        return static_cast<T *>(detail::checked(farheap_collective_allocate(
            collective_.get(), static_cast<std::uint32_t>(kind), bytes, alignof(T))));
    }
    // In the subspace that `hint` lies in if that has room.
    [[nodiscard]] T *allocate(std::size_t count, const void *hint) {
        const std::size_t bytes = detail::bytes<T>(count);
        return static_cast<T *>(detail::checked(farheap_collective_allocate_near(
            collective_.get(), hint, bytes, alignof(T))));
    }
    // Frees what any sub-allocator gave.
    void deallocate(T *ptr, std::size_t count) noexcept {
        farheap_collective_deallocate(collective_.get(), ptr, count * sizeof(T), alignof(T));
    }

    const collective &get_collective() const noexcept { return collective_; }
    template <class U>
    bool operator==(const collective_allocator<U, PageSize> &other) const noexcept {
        return collective_.get() == other.get_collective().get();
    }
    template <class U>
    bool operator!=(const collective_allocator<U, PageSize> &other) const noexcept {
        return !(*this == other);
    }

private:
    collective collective_;
};

// An ordinary allocator as a collective: one subspace, without bound, that contains all.
template <class Allocator> class plain_suballocator {
    using traits = std::allocator_traits<Allocator>;

public:
    using value_type = typename traits::value_type;
    using pointer = typename traits::pointer;

    explicit plain_suballocator(const Allocator &of) : allocator_(of) {}
    farheap::kind kind() const noexcept { return swappable_plain; }
    [[nodiscard]] pointer allocate(std::size_t count = 1) {
        return traits::allocate(allocator_, count);
    }
    [[nodiscard]] pointer try_allocate(std::size_t count = 1) {
        try {
            return traits::allocate(allocator_, count);
        } catch (const std::bad_alloc &) {
            return nullptr;
        }
    }
    bool contains(const void *) const noexcept { return true; }
    bool is_occupancy_under(double) const noexcept { return true; }

private:
    Allocator allocator_;
};

namespace detail {
template <class Allocator, class = void> struct collective_of : std::false_type {
    using suballocator_type = plain_suballocator<Allocator>;
};
template <class Allocator>
struct collective_of<Allocator, std::void_t<typename Allocator::suballocator_type>>
    : std::true_type {
    using suballocator_type = typename Allocator::suballocator_type;
};
} // namespace detail

// The collective interface of any allocator: its own, or plain behaviour for an ordinary one.
template <class Allocator> struct collective_traits {
    using allocator_type = Allocator;
    using standard = std::allocator_traits<Allocator>;
    using value_type = typename standard::value_type;
    using pointer = typename standard::pointer;
    using suballocator_type = typename detail::collective_of<Allocator>::suballocator_type;
    template <class U> using rebind_alloc = typename standard::template rebind_alloc<U>;
    // True if placement can be chosen.
    static constexpr bool is_collective = detail::collective_of<Allocator>::value;

    [[nodiscard]] static suballocator_type get_suballocator(const Allocator &of, kind kind) {
        if constexpr (is_collective) {
            return of.get_suballocator(kind);
        } else {
            (void)kind;
            return suballocator_type(of);
        }
    }
    [[nodiscard]] static suballocator_type get_suballocator(const Allocator &of, const void *ptr) {
        if constexpr (is_collective) {
            return of.get_suballocator(ptr);
        } else {
            (void)ptr;
            return suballocator_type(of);
        }
    }
    static bool if_suballocator_contains(const Allocator &, const suballocator_type &sub,
                                         const void *ptr) noexcept {
        return sub.contains(ptr);
    }
    static void deallocate(Allocator &of, pointer ptr, std::size_t count) {
        standard::deallocate(of, ptr, count);
    }

    // Allocates one object for each pointer of an array, all or none: false when there is no room.
    [[nodiscard]] static bool batch_allocate(Allocator &of, suballocator_type &from, pointer *out,
                                             std::size_t count) {
        for (std::size_t done = 0; done < count; done++) {
            pointer object = from.try_allocate(1);
            if (!object) {
                while (done > 0) standard::deallocate(of, out[--done], 1);
                return false;
            }
            out[done] = object;
        }
        return true;
    }

    // Moves an object to another subspace: its new place, or nullptr when there is no room and it
    // is where it was. So it is when its constructor throws, if it can be copied.
    [[nodiscard]] static pointer relocate(Allocator &of, suballocator_type &to, pointer object) {
        return relocate(of, to, &object, 1) ? object : nullptr;
    }

    // Moves the objects of an array, all or none, and notes their new places in it.
    [[nodiscard]] static bool relocate(Allocator &of, suballocator_type &to, pointer *objects,
                                       std::size_t count) {
        std::vector<pointer> places(count);
        if (!batch_allocate(of, to, places.data(), count)) return false;
        std::size_t made = 0;
        try {
            for (; made < count; made++) {
                standard::construct(of, std::addressof(*places[made]),
                                    std::move_if_noexcept(*objects[made]));
            }
        } catch (...) {
            while (made > 0) standard::destroy(of, std::addressof(*places[--made]));
            for (pointer place : places) standard::deallocate(of, place, 1);
            throw;
        }
        for (std::size_t index = 0; index < count; index++) {
            standard::destroy(of, std::addressof(*objects[index]));
            standard::deallocate(of, objects[index], 1);
            objects[index] = places[index];
        }
        return true;
    }

#if __cplusplus >= 202002L
    [[nodiscard]] static bool batch_allocate(Allocator &of, suballocator_type &from,
                                             std::span<pointer> out) {
        return batch_allocate(of, from, out.data(), out.size());
    }
    [[nodiscard]] static bool relocate(Allocator &of, suballocator_type &to,
                                       std::span<pointer> objects) {
        return relocate(of, to, objects.data(), objects.size());
    }
#endif
};

#if __cplusplus >= 202002L
// An allocator whose placement can be chosen.
template <class A>
concept collective_like = requires(A of, const void *ptr, typename A::suballocator_type sub) {
    { of.get_suballocator(swappable_plain) } -> std::same_as<typename A::suballocator_type>;
    { of.get_suballocator(ptr) } -> std::same_as<typename A::suballocator_type>;
    { of.if_suballocator_contains(sub, ptr) } -> std::convertible_to<bool>;
    { sub.is_occupancy_under(0.5) } -> std::convertible_to<bool>;
    { sub.allocate(1) } -> std::same_as<typename A::pointer>;
};
#endif

} // namespace farheap

#endif // C++17 with exceptions

#endif // FARHEAP_HPP
