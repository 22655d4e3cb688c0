// The C and C++ sides of the benchmark: loops over calls. One object, used in three ways: in a
// program with farheap linked statically, in one linked with the shared library, and in a shared
// object with farheap in it that is loaded late.
#include <farheap.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>

using namespace farheap;

namespace {
struct node {
    std::uint64_t words[40];
};
struct world {
    heap far;
    manager limit;
    farheap::pool pages;
    std::uint64_t id;
    collective memory;
    collective_allocator<node> nodes;
    explicit world(const char *table)
        : far("far_limit:64MiB,capacity:256MiB"), limit(64 << 20),
          pages(farheap::pool::create(limit, table, 16 << 20)), id(pages.allocate().id()),
          memory("far_limit:64MiB,capacity:256MiB", 1 << 20), nodes(memory) {}
};
std::optional<world> here;
} // namespace

extern "C" {

bool side_start(const char *table) {
    try {
        here.emplace(table);
        return true;
    } catch (const std::exception &error) {
        std::printf("skipped: %s\n", error.what());
        return false;
    }
}

std::uint64_t side_contains(std::uint64_t calls) {
    std::uint64_t far = 0;
    for (std::uint64_t i = 0; i < calls; i++) far += far_contains(reinterpret_cast<void *>(i));
    return far;
}

std::uint64_t side_malloc_free_sized(std::uint64_t calls) {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < calls; i++) {
        void *block = far_allocate(FARHEAP_FAR, 64, 16);
        sum += far_contains(block);
        far_free_sized(block, 64, 16);
    }
    return sum;
}

std::uint64_t side_malloc_free(std::uint64_t calls) {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < calls; i++) {
        void *block = far_allocate(FARHEAP_FAR, 64, 16);
        sum += far_contains(block);
        far_free(block);
    }
    return sum;
}

std::uint64_t side_fix_unfix(std::uint64_t calls) {
    std::uint64_t sum = 0;
    farheap_page page;
    for (std::uint64_t i = 0; i < calls; i++) {
        if (farheap_pool_fix_shared(here->pages.get(), here->id, &page) != FARHEAP_OK) std::abort();
        sum += page.data[0] + page.id;
        farheap_page_unfix(&page);
    }
    return sum / here->id;
}

std::uint64_t side_guard(std::uint64_t calls) {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < calls; i++) {
        shared_guard page = here->pages.fix_shared(here->id);
        sum += page.data()[0] + page.id();
    }
    return sum / here->id;
}

std::uint64_t side_optimistic(std::uint64_t calls) {
    std::uint64_t sum = 0;
    farheap_page page;
    for (std::uint64_t i = 0; i < calls; i++) {
        if (farheap_pool_fix_optimistic(here->pages.get(), here->id, &page) != FARHEAP_OK) std::abort();
        sum += farheap_page_validate(&page);
    }
    return sum;
}

std::uint64_t side_node(std::uint64_t calls) {
    std::uint64_t sum = 0;
    farheap_collective *memory = here->memory.get();
    for (std::uint64_t i = 0; i < calls; i++) {
        void *made = farheap_collective_allocate(memory, FARHEAP_SWAPPABLE_PLAIN, sizeof(node), alignof(node));
        sum += made != nullptr;
        farheap_collective_deallocate(memory, made, sizeof(node), alignof(node));
    }
    return sum;
}

std::uint64_t side_template(std::uint64_t calls) {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < calls; i++) {
        node *made = here->nodes.get_suballocator(swappable_plain).allocate(1);
        sum += made != nullptr;
        here->nodes.deallocate(made, 1);
    }
    return sum;
}

std::uint64_t side_template_page(std::uint64_t calls) {
    std::uint64_t sum = 0;
    auto page = here->nodes.get_suballocator(new_per_page);
    for (std::uint64_t i = 0; i < calls; i++) {
        node *made = page.allocate(1);
        sum += made != nullptr;
        here->nodes.deallocate(made, 1);
    }
    return sum;
}

std::uint64_t side_pmr(std::uint64_t calls) {
    far_resource ssd;
    std::pmr::memory_resource *any = &ssd;
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < calls; i++) {
        void *block = any->allocate(64, 16);
        sum += block != nullptr;
        any->deallocate(block, 64, 16);
    }
    return sum;
}

} // extern "C"

// As a program: a table's path as argument, then a line `loop calls` for each measurement on the standard
// input, and its nanoseconds and answer on the standard output.
int main(int count, char **arguments) {
    const struct {
        const char *name;
        std::uint64_t (*loop)(std::uint64_t);
    } loops[] = {
        {"side_contains", side_contains},
        {"side_malloc_free_sized", side_malloc_free_sized},
        {"side_malloc_free", side_malloc_free},
        {"side_fix_unfix", side_fix_unfix},
        {"side_guard", side_guard},
        {"side_optimistic", side_optimistic},
        {"side_node", side_node},
        {"side_template", side_template},
        {"side_template_page", side_template_page},
        {"side_pmr", side_pmr},
    };
    if (count != 2 || !side_start(arguments[1])) return 1;
    char name[64];
    unsigned long long calls = 0;
    while (std::scanf("%63s %llu", name, &calls) == 2) {
        for (const auto &known : loops) {
            if (std::string(known.name) != name) continue;
            known.loop(calls / 16); // What the other side has pushed out of the caches comes back.
            const auto began = std::chrono::steady_clock::now();
            const unsigned long long answer = known.loop(calls);
            const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began;
            std::printf("%lld %llu\n", static_cast<long long>(took.count()), answer);
            std::fflush(stdout);
        }
    }
    return 0;
}
