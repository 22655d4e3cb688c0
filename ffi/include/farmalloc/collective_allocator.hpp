// The collective allocator under the names by which it was published, on farheap; see
// collective_allocator_traits.hpp. Needs C++20. A program links farheap as for farheap.hpp.
#ifndef FARHEAP_FARMALLOC_COLLECTIVE_ALLOCATOR_HPP
#define FARHEAP_FARMALLOC_COLLECTIVE_ALLOCATOR_HPP

#include "../farheap.hpp"
#include "collective_allocator_traits.hpp"
#include "page_size.hpp"

#include <cstdlib>
#include <string>

namespace FarMalloc {

namespace detail {
inline farheap::kind kind_of(suballocator_kind kind) noexcept {
    switch (kind) {
    case purely_local: return farheap::purely_local;
    case new_per_page: return farheap::new_per_page;
    default: return farheap::swappable_plain;
    }
}
} // namespace detail

// Hands out objects within one subspace. A page of its own (new_per_page) goes when the last copy is gone
// and no object is in it.
template <class T, std::size_t BlockSize> struct Suballocator {
    using value_type = T;
    template <class U> struct rebind {
        using other = Suballocator<U, BlockSize>;
    };

    Suballocator(farheap::collective of, suballocator_kind kind)
        : collective_(std::move(of)), sub_{collective_.get(), FARHEAP_PURELY_LOCAL, 0, {0, 0}} {
        sub_.kind = static_cast<std::uint32_t>(detail::kind_of(kind));
        if (kind == new_per_page) {
            farheap::detail::check(
                farheap_collective_suballocator(collective_.get(), sub_.kind, &sub_));
            keep_page();
        }
    }
    // The one that the object at `ptr` came from.
    Suballocator(farheap::collective of, const void *ptr) : collective_(std::move(of)), sub_{} {
        farheap::detail::check(
            farheap_collective_suballocator_of(collective_.get(), ptr, &sub_));
        if (sub_.kind == FARHEAP_NEW_PER_PAGE) keep_page();
    }
    template <class U>
    Suballocator(const Suballocator<U, BlockSize> &other) noexcept
        : collective_(other.collective_), sub_(other.sub_), page_(other.page_) {}

    [[nodiscard]] T *allocate(std::size_t count) {
        T *const ptr = try_allocate(count);
        if (ptr == nullptr) throw std::bad_alloc();
        return ptr;
    }
    // nullptr when there is no room.
    [[nodiscard]] T *try_allocate(std::size_t count) noexcept {
        if (count > static_cast<std::size_t>(-1) / 2 / sizeof(T)) return nullptr;
        void *const ptr = farheap_suballocator_allocate(&sub_, count * sizeof(T), alignof(T));
        return static_cast<T *>(ptr);
    }
    void deallocate(T *ptr, std::size_t count) noexcept {
        farheap_collective_deallocate(collective_.get(), ptr, count * sizeof(T), alignof(T));
    }
    bool contains(const void *ptr) const noexcept {
        return farheap_suballocator_contains(&sub_, ptr);
    }
    bool is_occupancy_under(double ratio) const noexcept {
        return farheap_suballocator_is_occupancy_under(&sub_, ratio);
    }
    template <class U>
    friend bool operator==(const Suballocator &one, const Suballocator<U, BlockSize> &other) noexcept {
        return one.is_of(other);
    }

private:
    template <class, std::size_t> friend struct Suballocator;
    // Copies of the structure share what is released once.
    void keep_page() {
        struct page {
            farheap::collective of; // Outlives its page.
            farheap_suballocator sub;
            ~page() { farheap_suballocator_release(&sub); }
        };
        try {
            page_ = std::shared_ptr<page>(new page{collective_, sub_});
        } catch (...) {
            farheap_suballocator_release(&sub_);
            throw;
        }
    }
    // Objects that either allocated, the other can free.
    template <class U> bool is_of(const Suballocator<U, BlockSize> &other) const noexcept {
        return collective_.get() == other.collective_.get();
    }
    farheap::collective collective_;
    farheap_suballocator sub_;
    std::shared_ptr<void> page_;
};

// Far memory in pages of BlockSize, and purely-local memory. Copies share it; it goes with the last of
// them. What else there is to say, such as the limit of the pages in memory, is in the environment, in
// FARHEAP_CONF.
template <class T, std::size_t BlockSize = PageSize> struct CollectiveAllocator {
    using value_type = T;
    using suballocator = Suballocator<T, BlockSize>;
    using propagate_on_container_copy_assignment = std::true_type;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;
    using is_always_equal = std::false_type;
    template <class U> struct rebind {
        using other = CollectiveAllocator<U, BlockSize>;
    };

    // With this number of bytes of purely-local memory.
    CollectiveAllocator(std::size_t purely_local_capacity)
        : collective_(config(), purely_local_capacity, BlockSize) {}
    explicit CollectiveAllocator(farheap::collective of) : collective_(std::move(of)) {
        if (collective_.page_size() != BlockSize) {
            throw std::invalid_argument("the collective has pages of another size");
        }
    }
    template <class U>
    CollectiveAllocator(const CollectiveAllocator<U, BlockSize> &other) noexcept
        : collective_(other.get_collective()) {}

    [[nodiscard]] T *allocate(std::size_t count) {
        return suballocator(collective_, swappable_plain).allocate(count);
    }
    void deallocate(T *ptr, std::size_t count) noexcept {
        farheap_collective_deallocate(collective_.get(), ptr, count * sizeof(T), alignof(T));
    }
    [[nodiscard]] suballocator get_suballocator(suballocator_kind kind) const {
        return suballocator(collective_, kind);
    }
    [[nodiscard]] suballocator get_suballocator(const void *ptr) const {
        return suballocator(collective_, ptr);
    }
    const farheap::collective &get_collective() const noexcept { return collective_; }
    template <class U>
    friend bool operator==(const CollectiveAllocator &one,
                           const CollectiveAllocator<U, BlockSize> &other) noexcept {
        return one.collective_.get() == other.get_collective().get();
    }

private:
    static const char *config() {
        const char *const conf = secure_getenv("FARHEAP_CONF");
        return conf == nullptr ? "" : conf;
    }
    farheap::collective collective_;
};

} // namespace FarMalloc

#endif
