// The B-tree of btree.hpp on a collective allocator, and on std::allocator.
#include "btree.hpp"

#include <cstdint>
#include <cstdio>
#include <map>

namespace {

template <class Allocator> bool fill_and_check(btree<std::uint64_t, std::uint64_t, Allocator> &tree) {
    std::map<std::uint64_t, std::uint64_t> model;
    std::uint64_t state = 7;
    for (std::uint64_t i = 0; i < 200'000; i++) {
        state = state * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
        const std::uint64_t key = (state >> 30) % 500'000;
        tree.insert(key, i);
        model[key] = i;
    }
    const auto agrees = [&] {
        if (tree.size() != model.size()) return false;
        for (const auto &[key, value] : model) {
            const std::uint64_t *found = tree.find(key);
            if (!found || *found != value) return false;
        }
        auto expected = model.lower_bound(50'000);
        bool same = true;
        tree.scan(50'000, 10'000, [&](std::uint64_t key, std::uint64_t value) {
            same = same && expected->first == key && expected->second == value;
            ++expected;
        });
        return same && !tree.find(500'001);
    };
    const bool before = agrees();
    tree.make_page_aware();
    return before && agrees();
}

int work() {
    farheap::collective memory("far_limit:8MiB,capacity:1GiB", 256 << 10);
    const auto neighbours = [&](const void *a, const void *b) { return memory.share_a_page(a, b); };
    btree<std::uint64_t, std::uint64_t, farheap::collective_allocator<int>> far{
        farheap::collective_allocator<int>(memory)};
    bool right = fill_and_check(far);
    const auto [together, links] = far.links(neighbours);
    std::printf("collective: %zu keys, %zu of %zu links within a page, %zu KiB local, %zu pages read\n",
                far.size(), together, links, static_cast<std::size_t>(memory.local_used() >> 10),
                static_cast<std::size_t>(memory.stats().pages_in));

    btree<std::uint64_t, std::uint64_t, std::allocator<int>> plain{std::allocator<int>()};
    right = fill_and_check(plain) && right;
    std::printf("std::allocator: %zu keys\n", plain.size());
    std::printf("%s\n", right ? "all answers are right" : "a wrong answer");
    return right && together * 2 > links ? 0 : 1;
}

} // namespace

int main() {
    try {
        return work();
    } catch (const farheap::error &error) {
        const bool forbidden = error.code() == FARHEAP_E_UFFD_UNAVAILABLE;
        std::printf("%s%s\n", forbidden ? "skipped: " : "", error.what());
        return forbidden ? 77 : 1;
    }
}
