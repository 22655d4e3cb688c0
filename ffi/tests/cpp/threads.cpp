// Two threads at every kind of handle at once.
#include "check.hpp"

#include <list>
#include <thread>

using namespace farheap;

template <class Work> void twice(Work work) {
    std::thread other(work, 1);
    work(0);
    other.join();
}

static void on_the_heap(heap &far) {
    twice([&](int me) {
        for (int round = 0; round < 300; round++) {
            scope here(round % 2 ? FARHEAP_FAR : FARHEAP_LOCAL);
            std::vector<long, far_allocator<long>> column(20000 + me * 1000, round);
            far.advise(column.data(), 4096, FARHEAP_ADVICE_RANDOM);
            far.prefetch(column.data(), 4096);
            if (round % 50 == 0) far.evict(column.data(), 65536);
            if (round % 60 == 0) pinned held(far, column.data(), 4096);
            block small = make_block(64);
            resize(small, 640);
            for (long value : column) CHECK(value == round);
            (void)far.stats();
            if (round % 100 == 0) (void)heap::running().stats();
        }
    });
}

static void on_a_collective(const collective &memory) {
    struct node { int who, number; char rest[100]; };
    std::vector<node *> given[2];
    twice([&](int me) {
        collective_allocator<node> of(memory);
        auto page = of.get_suballocator(new_per_page);
        for (int number = 0; number < 20000; number++) {
            node *made = number % 10 == 0 ? of.get_suballocator(purely_local).try_allocate() : nullptr;
            if (!made) made = number % 3 ? page.try_allocate() : of.allocate(1);
            if (!made) {
                page = of.get_suballocator(new_per_page);
                made = page.allocate();
            }
            *made = {me, number, {}};
            given[me].push_back(made);
            if (number % 7 == 0) CHECK(of.get_suballocator(made).contains(made));
        }
    });
    // Each frees what the other made.
    twice([&](int me) {
        collective_allocator<node> of(memory);
        int number = 0;
        for (node *made : given[1 - me]) {
            CHECK(made->who == 1 - me && made->number == number++);
            of.deallocate(made, 1);
        }
    });
    CHECK(memory.local_used() == 0);
}

static void on_a_pool_and_its_manager(manager &limit) {
    table_path table;
    pool pages = pool::create(limit, table.path, 64 * mib);
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < 4000; i++) ids.push_back(pages.allocate().id());
    twice([&](int me) {
        temporary_resource query(limit);
        std::pmr::list<int> scratch(&query);
        for (int round = 0; round < 20000; round++) {
            const std::uint64_t id = ids[static_cast<std::size_t>(round * 7919) % ids.size()];
            if (round % 4 == me) {
                exclusive_guard page = pages.fix_exclusive(id);
                const long value = page.read<long>(0) + 1;
                page.write(0, value);
                page.write(8, value);
            } else if (round % 4 == 2) {
                shared_guard page = pages.fix_shared(id);
                CHECK(page.read<long>(0) == page.read<long>(8));
            } else {
                const bool same = pages.read_optimistic(id, [](const page_guard &page) {
                    return page.read<long>(0) == page.read<long>(8);
                });
                CHECK(same);
            }
            scratch.push_back(round);
            if (round % 500 == 0) {
                void *memory = limit.allocate_temporary(mib);
                CHECK(!limit.is_spilled(memory) && limit.stats().used_bytes <= limit.limit());
                limit.free_temporary(memory);
                scratch.clear();
            }
        }
    });
    long sum = 0;
    for (std::uint64_t id : ids) sum += pages.fix_shared(id).read<long>(0);
    CHECK(sum == 2 * 5000);
}

static void on_a_tree(manager &limit) {
    table_path table;
    pool pages = pool::create(limit, table.path, 64 * mib);
    btree tree = btree::create(pages);
    const auto key = [](int who, int number) {
        return std::to_string(number * 7919 % 20011) + (who ? "b" : "a");
    };
    // Each has keys of its own, between the other's.
    twice([&](int me) {
        for (int number = 0; number < 20000; number++) {
            CHECK(tree.insert(key(me, number), std::string(100, static_cast<char>('x' + me))));
            if (number % 2) CHECK(tree.remove(key(me, number - 1)));
            if (number % 1000 == 0) {
                std::string last;
                for (const entry &found : tree.scan(key(me, number))) {
                    CHECK(found.key > last && found.value.size() == 100);
                    last = found.key;
                }
            }
        }
    });
    int count = 0;
    for (const entry &found : tree.scan()) {
        CHECK(found.value[99] == (found.key.back() == 'b' ? 'y' : 'x'));
        count++;
    }
    CHECK(count == 20000);
}

static void handles_come_and_go() {
    twice([](int) {
        for (int round = 0; round < 200; round++) {
            manager limit(8 * mib);
            temporary_resource query(limit);
            std::pmr::vector<int> v(1000, round, &query);
            CHECK(v[999] == round);
        }
    });
}

int main() {
    return run([] {
        handles_come_and_go();
        manager limit(8 * mib);
        on_a_pool_and_its_manager(limit);
        on_a_tree(limit);
        heap far("far_limit:16MiB,capacity:256MiB");
        on_the_heap(far);
        far.shutdown();
        on_a_collective(collective("far_limit:16MiB,capacity:64MiB", 64 << 10));
    });
}
