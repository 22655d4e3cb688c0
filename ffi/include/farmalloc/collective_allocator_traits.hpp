// The collective interface under the names by which it was published, for containers that were written
// against those: what farheap.hpp calls farheap::collective_traits. Needs C++20, and nothing of farheap.
//
// A container asks `collective_allocator_traits<Allocator>` only. Any standard allocator will do: it is a
// collective of one sub-allocator, which contains everything. What an allocator may offer by itself:
// `suballocator`, `get_suballocator` (of a kind, of a pointer), `contains`, `is_occupancy_under`,
// `delete_suballocator_if_empty`, `batch_allocate`, `relocate`, and `try_allocate`, which says by a null
// pointer that there is no room.
#ifndef FARHEAP_FARMALLOC_COLLECTIVE_ALLOCATOR_TRAITS_HPP
#define FARHEAP_FARMALLOC_COLLECTIVE_ALLOCATOR_TRAITS_HPP

#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace FarMalloc {

// Request of one step: `size` objects of one type.
namespace request {
template <class T, std::size_t N> struct constant {
    using type = T;
    static constexpr std::size_t size = N;
};
template <class T> using single = constant<T, 1>;
template <class T> struct dynamic {
    using type = T;
    std::size_t size;
    constexpr dynamic(std::size_t count) noexcept : size(count) {} // Clang before 16 needs it for ().
};
// Nothing: its pointer is null, and stays what it is when others are relocated.
template <class T> struct null {
    using type = T;
};
} // namespace request

// Moves `count` objects to memory that holds none; what is left behind is destroyed.
template <class T> struct default_relocate {
    constexpr void operator()(T *from, std::size_t count, T *to) const {
        std::uninitialized_move_n(from, count, to);
        std::destroy_n(from, count);
    }
};

enum class suballocator_kind { purely_local, swappable_plain, new_per_page };
using enum suballocator_kind;

namespace detail {
template <class Allocator> struct suballocator_of {
    using type = Allocator;
};
template <class Allocator>
    requires requires { typename Allocator::suballocator; }
struct suballocator_of<Allocator> {
    using type = typename Allocator::suballocator;
};

template <class Request> using requested = typename std::remove_cvref_t<Request>::type;

template <class Request>
inline constexpr bool is_null =
    std::is_same_v<std::remove_cvref_t<Request>, request::null<requested<Request>>>;

// Relocates objects of any type.
struct relocate_each {
    template <class T> constexpr void operator()(T *from, std::size_t count, T *to) const {
        default_relocate<T>{}(from, count, to);
    }
};
} // namespace detail

template <class Allocator>
struct collective_allocator_traits : std::allocator_traits<Allocator> {
private:
    using plain = std::allocator_traits<Allocator>;
    template <class Request>
    using pointer_to = typename std::pointer_traits<
        typename plain::pointer>::template rebind<detail::requested<Request>>;
    template <class... Requests> using pointers = std::tuple<pointer_to<Requests>...>;

public:
    using typename plain::const_void_pointer;
    using typename plain::pointer;
    using typename plain::size_type;
    using suballocator = typename detail::suballocator_of<Allocator>::type;
    using suballocator_traits = collective_allocator_traits<suballocator>;
    template <class U>
    using rebind_traits = collective_allocator_traits<typename plain::template rebind_alloc<U>>;

    static constexpr suballocator get_suballocator(Allocator &alloc, suballocator_kind kind) {
        if constexpr (requires { alloc.get_suballocator(kind); }) {
            return alloc.get_suballocator(kind);
        } else {
            return alloc;
        }
    }
    // The one that the object at `ptr` came from.
    static constexpr suballocator get_suballocator(Allocator &alloc, const_void_pointer ptr) {
        if constexpr (requires { alloc.get_suballocator(ptr); }) {
            return alloc.get_suballocator(ptr);
        } else {
            return alloc;
        }
    }
    static constexpr bool if_suballocator_contains(Allocator &alloc, suballocator &sub,
                                                   const_void_pointer ptr) {
        if constexpr (requires { alloc.contains(sub, ptr); }) {
            return alloc.contains(sub, ptr);
        } else if constexpr (requires { sub.contains(ptr); }) {
            return sub.contains(ptr);
        } else {
            static_assert(std::is_same_v<suballocator, Allocator>,
                          "a sub-allocator has to say what it contains");
            return true;
        }
    }
    // The caller has no more use for a sub-allocator. What it holds goes unless objects are in it.
    static constexpr void delete_suballocator_if_empty(Allocator &alloc, suballocator &&sub) {
        if constexpr (requires { alloc.delete_suballocator_if_empty(std::move(sub)); }) {
            alloc.delete_suballocator_if_empty(std::move(sub));
        } else {
            [[maybe_unused]] const suballocator ended(std::move(sub));
        }
    }
    // True if less than `ratio` of the subspace is in use; true for what has no bound.
    static constexpr bool is_occupancy_under(Allocator &alloc, double ratio) {
        if constexpr (requires { alloc.is_occupancy_under(ratio); }) {
            return alloc.is_occupancy_under(ratio);
        } else {
            return true;
        }
    }

    // Memory for all requests, or for none of them: then nothing is held, and there is no tuple.
    template <class... Requests>
    static constexpr std::optional<pointers<Requests...>> batch_allocate(Allocator &alloc,
                                                                         Requests &&...asked) {
        if constexpr (requires { alloc.batch_allocate(std::forward<Requests>(asked)...); }) {
            return alloc.batch_allocate(std::forward<Requests>(asked)...);
        } else {
            std::optional<pointers<Requests...>> all(std::in_place);
            if (!allocate_from<0>(alloc, *all, asked...)) all.reset();
            return all;
        }
    }

    static constexpr void deallocate(Allocator &alloc, pointer ptr, size_type count) {
        if constexpr (requires { alloc.deallocate(ptr, count); }) {
            alloc.deallocate(ptr, count);
        } else {
            suballocator sub = get_suballocator(alloc, ptr);
            suballocator_traits::deallocate(sub, ptr, count);
        }
    }

    // Moves objects into memory of `sub`, all or none, and has the pointers name where they are now. Throws
    // std::bad_alloc when there is no room, and what a move throws: all is as it was then, if moving back
    // does not throw.
    template <class... Requests>
    static constexpr bool relocate(Allocator &alloc, suballocator &sub,
                                   std::tuple<pointer_to<Requests> &...> from,
                                   Requests &&...asked) {
        return relocate(alloc, sub, detail::relocate_each{}, from,
                        std::forward<Requests>(asked)...);
    }
    // The same, by `move(from, count, to)`, which is called once for each request.
    template <class Move, class... Requests>
    static constexpr bool relocate(Allocator &alloc, suballocator &sub, Move &&move,
                                   std::tuple<pointer_to<Requests> &...> from,
                                   Requests &&...asked) {
        if constexpr (requires { alloc.relocate(from, sub, move, asked...); }) {
            return alloc.relocate(from, sub, std::forward<Move>(move),
                                  std::forward<Requests>(asked)...);
        } else {
            auto to = suballocator_traits::batch_allocate(sub, asked...);
            if (!to) throw std::bad_alloc();
            pointers<Requests...> old(from);
            move_from<0>(alloc, sub, move, from, old, *to, asked...);
            return true;
        }
    }

private:
    template <class Request> static constexpr auto rebound(Allocator &alloc) {
        using traits = rebind_traits<detail::requested<Request>>;
        return typename traits::allocator_type(alloc);
    }
    // Null when there is no room.
    template <class Request>
    static constexpr pointer_to<Request> try_one(Allocator &alloc, const Request &asked) {
        auto own = rebound<Request>(alloc);
        if constexpr (requires { own.try_allocate(asked.size); }) {
            return own.try_allocate(asked.size);
        } else {
            try {
                return rebind_traits<detail::requested<Request>>::allocate(own, asked.size);
            } catch (const std::bad_alloc &) {
                return nullptr;
            }
        }
    }
    template <class Request>
    static constexpr void free_one(Allocator &alloc, pointer_to<Request> ptr,
                                   const Request &asked) {
        auto own = rebound<Request>(alloc);
        rebind_traits<detail::requested<Request>>::deallocate(own, ptr, asked.size);
    }

    template <std::size_t, class Pointers>
    static constexpr bool allocate_from(Allocator &, Pointers &) {
        return true;
    }
    template <std::size_t I, class Pointers, class First, class... Rest>
    static constexpr bool allocate_from(Allocator &alloc, Pointers &all, const First &first,
                                        const Rest &...rest) {
        if constexpr (detail::is_null<First>) {
            return allocate_from<I + 1>(alloc, all, rest...);
        } else {
            auto &ptr = std::get<I>(all);
            ptr = try_one(alloc, first);
            if (ptr == nullptr) return false;
            if (allocate_from<I + 1>(alloc, all, rest...)) return true;
            free_one(alloc, ptr, first);
            return false;
        }
    }

    // Moves the objects of the requests from the I-th on, and frees where they were when all have been
    // moved; when a move throws, frees where they were to go.
    template <std::size_t, class Move, class From, class Pointers>
    static constexpr void move_from(Allocator &, suballocator &, Move &, From &, Pointers &,
                                    Pointers &) {}
    template <std::size_t I, class Move, class From, class Pointers, class First, class... Rest>
    static constexpr void move_from(Allocator &alloc, suballocator &sub, Move &move, From &from,
                                    Pointers &old, Pointers &to, const First &first,
                                    const Rest &...rest) {
        if constexpr (detail::is_null<First>) {
            move_from<I + 1>(alloc, sub, move, from, old, to, rest...);
        } else {
            auto *const here = std::to_address(std::get<I>(old));
            auto *const there = std::to_address(std::get<I>(to));
            bool is_moved = false;
            try {
                move(here, first.size, there);
                is_moved = true;
                std::get<I>(from) = std::get<I>(to);
                move_from<I + 1>(alloc, sub, move, from, old, to, rest...);
            } catch (...) {
                if (is_moved) {
                    move(there, first.size, here);
                    std::get<I>(from) = std::get<I>(old);
                } else {
                    // Those behind have not been looked at.
                    free_rest<I + 1>(alloc, to, rest...);
                }
                free_one(alloc, std::get<I>(to), first);
                throw;
            }
            free_one(alloc, std::get<I>(old), first);
        }
    }
    template <std::size_t, class Pointers>
    static constexpr void free_rest(Allocator &, Pointers &) {}
    template <std::size_t I, class Pointers, class First, class... Rest>
    static constexpr void free_rest(Allocator &alloc, Pointers &all, const First &first,
                                    const Rest &...rest) {
        if constexpr (!detail::is_null<First>) free_one(alloc, std::get<I>(all), first);
        free_rest<I + 1>(alloc, all, rest...);
    }
};

} // namespace FarMalloc

#endif
