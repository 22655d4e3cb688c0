// A container that knows nothing of farheap, written against the published collective interface: with the
// library's collective allocator, with the standard one, and with one of the program's own.
#include <farmalloc/collective_allocator.hpp>
#include <farmalloc/collective_allocator_traits.hpp>

#include "../cpp/check.hpp"

#include <cstdint>
#include <new>
#include <type_traits>

namespace {

namespace request = FarMalloc::request;

// A list in the order of its keys, whose nodes have arrays of words beside them. A node and its words are
// allocated in one step: purely local as long as there is room, else beside the node before.
template <class Allocator> class strand {
public:
    struct node;
    using traits = typename FarMalloc::collective_allocator_traits<
        Allocator>::template rebind_traits<node>;
    using alloc_type = typename traits::allocator_type;
    using sub_type = typename traits::suballocator;
    using sub_traits = typename traits::suballocator_traits;
    using node_ptr = typename traits::pointer;
    using word_ptr = typename std::pointer_traits<node_ptr>::template rebind<std::uint64_t>;

    struct node {
        std::uint64_t key;
        std::size_t words;
        word_ptr array;
        node_ptr before, after;
    };

    explicit strand(const Allocator &alloc) : alloc_(alloc) {}
    strand(const strand &) = delete;
    strand &operator=(const strand &) = delete;
    ~strand() {
        for (node_ptr at = first_; at != nullptr;) at = end(at);
    }

    void push(std::uint64_t key, std::size_t words) {
        auto sub = traits::get_suballocator(alloc_, FarMalloc::purely_local);
        auto room = sub_traits::batch_allocate(sub, request::single<node>(),
                                               request::dynamic<std::uint64_t>(words));
        if (!room && last_ != nullptr) {
            sub = traits::get_suballocator(alloc_, last_);
            room = sub_traits::batch_allocate(sub, request::single<node>(),
                                              request::dynamic<std::uint64_t>(words));
        }
        if (!room) {
            sub = traits::get_suballocator(alloc_, FarMalloc::swappable_plain);
            room = sub_traits::batch_allocate(sub, request::single<node>(),
                                              request::dynamic<std::uint64_t>(words));
        }
        if (!room) throw std::bad_alloc();
        auto [made, array] = *room;
        std::uninitialized_fill_n(array, words, key * 3);
        traits::construct(alloc_, std::addressof(*made), node{key, words, array, last_, nullptr});
        (last_ == nullptr ? first_ : last_->after) = made;
        last_ = made;
        ++size_;
    }

    // Puts nodes that are not purely local on pages of their own, in order.
    void regroup() {
        auto local = traits::get_suballocator(alloc_, FarMalloc::purely_local);
        auto page = traits::get_suballocator(alloc_, FarMalloc::new_per_page);
        for (node_ptr at = first_; at != nullptr; at = at->after) {
            if (traits::if_suballocator_contains(alloc_, local, at) && local_is_apart()) continue;
            if (!sub_traits::is_occupancy_under(page, 0.7)) {
                traits::delete_suballocator_if_empty(alloc_, std::move(page));
                page = traits::get_suballocator(alloc_, FarMalloc::new_per_page);
            }
            move_to(at, page);
            CHECK(traits::if_suballocator_contains(alloc_, page, at));
        }
    }

    // Moves a node and its words; the pointer follows.
    void move_to(node_ptr &at, sub_type &sub) {
        word_ptr words = at->array;
        const auto move = [&]<class T>(T *from, std::size_t count, T *to) {
            FarMalloc::default_relocate<T>{}(from, count, to);
            if constexpr (std::is_same_v<T, node>) {
                (to->before == nullptr ? first_ : to->before->after) = to;
                (to->after == nullptr ? last_ : to->after->before) = to;
            }
        };
        CHECK(traits::relocate(alloc_, sub, move, std::tie(at, words), request::single<node>(),
                               request::dynamic<std::uint64_t>(at->words)));
        at->array = words;
    }

    void check(std::uint64_t count) const {
        std::uint64_t key = 0;
        node_ptr before = nullptr;
        for (node_ptr at = first_; at != nullptr; at = at->after) {
            CHECK(at->key == key && at->before == before);
            for (std::size_t n = 0; n < at->words; ++n) CHECK(at->array[n] == key * 3);
            before = at;
            ++key;
        }
        CHECK(key == count && before == last_ && size_ == count);
    }

    // Frees every second node.
    void thin() {
        bool odd = false;
        for (node_ptr at = first_; at != nullptr; odd = !odd) at = odd ? end(at) : at->after;
        std::uint64_t key = 0;
        for (node_ptr at = first_; at != nullptr; at = at->after, ++key) {
            at->key = key;
            for (std::size_t n = 0; n < at->words; ++n) at->array[n] = key * 3;
        }
    }

    node_ptr first() const { return first_; }
    alloc_type &alloc() { return alloc_; }

private:
    // With an allocator of one subspace all is local.
    static constexpr bool local_is_apart() { return !std::is_same_v<sub_type, alloc_type>; }

    node_ptr end(node_ptr at) {
        const node_ptr next = at->after;
        (at->before == nullptr ? first_ : at->before->after) = next;
        (next == nullptr ? last_ : next->before) = at->before;
        using word_traits = typename traits::template rebind_traits<std::uint64_t>;
        typename word_traits::allocator_type of_words(alloc_);
        word_traits::deallocate(of_words, at->array, at->words);
        traits::destroy(alloc_, std::addressof(*at));
        traits::deallocate(alloc_, at, 1);
        --size_;
        return next;
    }

    alloc_type alloc_;
    node_ptr first_ = nullptr, last_ = nullptr;
    std::uint64_t size_ = 0;
};

template <class Allocator> void use(strand<Allocator> &list) {
    for (std::uint64_t key = 0; key < 20'000; ++key) list.push(key, 1 + key % 7 * 16);
    list.check(20'000);
    list.regroup();
    list.check(20'000);
    list.thin();
    list.check(10'000);
    for (std::uint64_t key = 10'000; key < 12'000; ++key) list.push(key, 2);
    list.regroup();
    list.check(12'000);
}

// An allocator of the program's own that takes batches by itself, and fails when it is told to.
struct tally {
    std::size_t batches = 0, live = 0, room = static_cast<std::size_t>(-1);
};
template <class T> struct tallied {
    using value_type = T;
    tally *of;
    explicit tallied(tally *to) : of(to) {}
    template <class U> tallied(const tallied<U> &other) : of(other.of) {}
    T *allocate(std::size_t count) {
        if (of->live + 1 > of->room) throw std::bad_alloc();
        T *const ptr = std::allocator<T>().allocate(count);
        ++of->live;
        return ptr;
    }
    void deallocate(T *ptr, std::size_t count) {
        std::allocator<T>().deallocate(ptr, count);
        --of->live;
    }
    bool operator==(const tallied &other) const { return of == other.of; }
};

// Counts its objects; the move of one of them throws.
struct fragile {
    static inline int alive = 0, moves_left = -1;
    int value;
    explicit fragile(int of) : value(of) { ++alive; }
    fragile(fragile &&other) : value(other.value) {
        if (moves_left == 0) throw 7;
        if (moves_left > 0) --moves_left;
        ++alive;
    }
    ~fragile() { --alive; }
};

void requests() {
    using allocator = tallied<int>;
    using traits = FarMalloc::collective_allocator_traits<allocator>;
    static_assert(std::is_base_of_v<std::allocator_traits<allocator>, traits>);
    static_assert(std::is_same_v<traits::suballocator, allocator>);
    tally count;
    allocator alloc(&count);
    auto all = traits::batch_allocate(alloc, request::constant<int, 3>(), request::null<char>(),
                                      request::dynamic<double>(4), request::single<long>());
    CHECK(all && count.live == 3);
    auto [three, none, four, one] = *all;
    static_assert(std::is_same_v<decltype(none), char *>);
    CHECK(three && !none && four && one);
    // One more finds no room: none of a batch is left.
    count.room = 5;
    CHECK(!traits::batch_allocate(alloc, request::single<int>(), request::single<char>(),
                                  request::single<long>()));
    CHECK(count.live == 3);
    int *kept = three;
    CHECK(traits::is_occupancy_under(alloc, 0.1));
    bool has_thrown = false;
    try {
        auto more = std::tie(three, four, one);
        traits::relocate(alloc, alloc, more, request::constant<int, 3>(),
                         request::dynamic<double>(4), request::single<long>());
    } catch (const std::bad_alloc &) {
        has_thrown = true;
    }
    CHECK(has_thrown && three == kept && count.live == 3);
    count.room = 100;
    three[0] = 1, three[1] = 2, three[2] = 3, *one = 9;
    for (int n = 0; n < 4; ++n) four[n] = n;
    CHECK(traits::relocate(alloc, alloc, std::tie(three, none, four, one),
                           request::constant<int, 3>(), request::null<char>(),
                           request::dynamic<double>(4), request::single<long>()));
    CHECK(three != kept && three[2] == 3 && !none && four[3] == 3 && *one == 9 && count.live == 3);
    traits::deallocate(alloc, three, 3);
    traits::rebind_traits<double>::allocator_type of_double(alloc);
    traits::rebind_traits<double>::deallocate(of_double, four, 4);
    traits::rebind_traits<long>::allocator_type of_long(alloc);
    traits::rebind_traits<long>::deallocate(of_long, one, 1);
    CHECK(count.live == 0);
}

// A move that throws leaves every object where it was.
void a_move_that_throws() {
    using traits = FarMalloc::collective_allocator_traits<tallied<fragile>>;
    for (int moves = 0; moves < 3; ++moves) {
        tally count;
        tallied<fragile> alloc(&count);
        auto [one, two, three] = *traits::batch_allocate(
            alloc, request::single<fragile>(), request::single<fragile>(), request::single<fragile>());
        fragile *all[] = {new (one) fragile(1), new (two) fragile(2), new (three) fragile(3)};
        // Back again they move without an exception.
        const auto move = [&](fragile *from, std::size_t n, fragile *to) {
            const bool is_back = to == all[0] || to == all[1] || to == all[2];
            const int left = fragile::moves_left;
            if (is_back) fragile::moves_left = -1;
            FarMalloc::default_relocate<fragile>{}(from, n, to);
            if (is_back) fragile::moves_left = left;
        };
        fragile::moves_left = moves;
        bool has_thrown = false;
        try {
            traits::relocate(alloc, alloc, move, std::tie(one, two, three),
                             request::single<fragile>(), request::single<fragile>(),
                             request::single<fragile>());
        } catch (int) {
            has_thrown = true;
        }
        fragile::moves_left = -1;
        CHECK(has_thrown && one == all[0] && two == all[1] && three == all[2]);
        CHECK(one->value == 1 && two->value == 2 && three->value == 3);
        CHECK(count.live == 3 && fragile::alive == 3);
        for (fragile *each : all) {
            each->~fragile();
            traits::deallocate(alloc, each, 1);
        }
        CHECK(count.live == 0 && fragile::alive == 0);
    }
}

// Sub-allocators are values: copied, rebound, and as long-lived as the page that they name.
void suballocators() {
    using allocator = FarMalloc::CollectiveAllocator<std::uint64_t, 4096>;
    using traits = FarMalloc::collective_allocator_traits<allocator>;
    allocator alloc(64 << 10);
    const farheap::collective &all = alloc.get_collective();
    auto page = traits::get_suballocator(alloc, FarMalloc::new_per_page);
    CHECK(all.far_pages() >= 1);
    {
        auto copy = page;
        typename traits::suballocator_traits::template rebind_traits<char>::allocator_type chars(copy);
        char *text = chars.allocate(100);
        std::uint64_t *number = copy.allocate(1);
        CHECK(page.contains(text) && all.share_a_page(text, number) && copy == page);
        auto found = traits::get_suballocator(alloc, number);
        CHECK(found.contains(text) && traits::if_suballocator_contains(alloc, found, text));
        chars.deallocate(text, 100);
        alloc.deallocate(number, 1);
    }
    // It is full one day, and says so.
    std::size_t count = 0;
    std::uint64_t *last = nullptr;
    while (std::uint64_t *next = page.try_allocate(8)) last = next, ++count;
    CHECK(count > 40 && count <= 64 && !page.is_occupancy_under(0.7));
    bool has_thrown = false;
    try {
        (void)page.allocate(8);
    } catch (const std::bad_alloc &) {
        has_thrown = true;
    }
    CHECK(has_thrown);
    auto local = traits::get_suballocator(alloc, FarMalloc::purely_local);
    CHECK(!local.contains(last) && traits::suballocator_traits::is_occupancy_under(local, 0.7));
    // Its objects go with the collective. A page without objects goes with its last copy.
    const std::uint64_t pages = all.far_pages();
    {
        auto empty = traits::get_suballocator(alloc, FarMalloc::new_per_page);
        auto copy = empty;
        CHECK(all.far_pages() == pages + 1);
        traits::delete_suballocator_if_empty(alloc, std::move(empty));
        CHECK(all.far_pages() == pages + 1);
    }
    CHECK(all.far_pages() == pages);
}

} // namespace

int main() {
    requests();
    a_move_that_throws();
    {
        strand<std::allocator<char>> list{std::allocator<char>()};
        use(list);
    }
    {
        tally count;
        {
            strand<tallied<char>> list{tallied<char>(&count)};
            use(list);
            CHECK(count.live == 24'000);
        }
        CHECK(count.live == 0);
    }
    return run([] {
        suballocators();
        setenv("FARHEAP_CONF", "far_limit:8MiB", 1);
        FarMalloc::CollectiveAllocator<char, 4096> alloc(256 << 10);
        {
            strand<decltype(alloc)> list(alloc);
            use(list);
            // The first are purely local, and stayed so.
            CHECK(alloc.get_collective().is_local(list.first()));
            CHECK(alloc.get_collective().local_used() > 0);
        }
        CHECK(alloc.get_collective().local_used() == 0);
        // The page that small objects come from next stays.
        CHECK(alloc.get_collective().far_pages() <= 1);
    });
}
