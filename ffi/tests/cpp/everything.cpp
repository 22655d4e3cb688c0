// Every function of the library through farheap.hpp, and what it throws.
#include "check.hpp"

#include <list>
#include <map>
#include <numeric>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using namespace farheap;

// Counts its objects; throws when told to.
struct counted {
    static inline int alive = 0;
    static inline int throw_at = -1;
    int value;
    explicit counted(int v) : value(v) { enter(); }
    counted(const counted &other) : value(other.value) { enter(); }
    counted &operator=(const counted &) = default;
    ~counted() { alive--; }
    void enter() {
        if (throw_at == 0) throw std::runtime_error("told to");
        if (throw_at > 0) throw_at--;
        alive++;
    }
};

static void without_a_heap() {
    CHECK(std::string(version()).size() >= 5);
    (void)has_feature(FARHEAP_FEATURE_USERFAULTFD);
    set_log([](farheap_log_level, const char *) { throw std::runtime_error("stays in C++"); });
    set_log(nullptr);
    check_config("far_limit:16MiB");
    throws<error>(FARHEAP_E_CONFIG, [] { check_config("limmit:16MiB"); });
    throws<farheap::bad_alloc>(FARHEAP_E_NOT_RUNNING, [] { std::vector<int, far_allocator<int>> v(10); });
    throws<error>(FARHEAP_E_NOT_RUNNING, [] { heap::running(); });
    throws<error>(FARHEAP_E_CONFIG, [] { heap wrong("unknown:1"); });
    std::vector<int, local_allocator<int>> local(1000, 7);
    CHECK(!is_far(local.data()) && local[999] == 7);
    // Both are caught as what they derive from.
    try {
        (void)far_allocator<int>().allocate(std::size_t{1} << 40);
        CHECK(!"no memory");
    } catch (const std::bad_alloc &) {
    }
    try {
        check_config("handlers:65");
        CHECK(!"so many handlers");
    } catch (const std::runtime_error &failed) {
        CHECK(std::string(failed.what()).find("handlers") != std::string::npos);
    }
    try {
        (void)far_allocator<long>().allocate(static_cast<std::size_t>(-1) / 4);
        CHECK(!"no such size");
    } catch (const std::bad_array_new_length &) {
    }
    clear_error();
}

static void manager_and_pool() {
    manager limit(16 * mib);
    limit.set_limit(24 * mib);
    CHECK(limit.limit() == 24 * mib);
    limit.set_deadline_ms(50);
    limit.set_temporary_ceiling(8 * mib);
    unsigned events = 0;
    limit.on_pressure([&](farheap_pressure, std::uint64_t) {
        __atomic_add_fetch(&events, 1, __ATOMIC_RELAXED);
        throw std::runtime_error("stays in C++");
    });
    void *memory = limit.allocate_temporary(mib);
    CHECK(!limit.is_spilled(memory) && limit.stats().temporary_bytes == mib);
    limit.free_temporary(memory);
    throws<error>(FARHEAP_E_BAD_RANGE, [&] { limit.free_temporary(memory); });
    throws<farheap::bad_alloc>(FARHEAP_E_OUT_OF_MEMORY, [&] { (void)limit.allocate_temporary(9 * mib); });
    CHECK(__atomic_load_n(&events, __ATOMIC_RELAXED) > 0);
    {
        temporary_resource query(limit);
        std::pmr::map<int, std::pmr::string> map(&query);
        for (int i = 0; i < 1000; i++) map.emplace(i, std::string(i % 100, 'x'));
        CHECK(map.at(999).size() == 99 && limit.stats().temporary_bytes > 0);
        CHECK(query.is_equal(query));
    }
    CHECK(limit.stats().temporary_bytes == 0);

    table_path table;
    std::uint64_t written = 0;
    pool_options options;
    options.page = 8192;
    options.before_write = [&](std::uint64_t, std::uint64_t lsn) {
        if (lsn == 13) throw std::runtime_error("stays in C++, and is a no");
        if (lsn > 0) __atomic_store_n(&written, lsn, __ATOMIC_RELAXED);
        return true;
    };
    std::vector<std::uint64_t> ids;
    {
        pool pages = pool::create(limit, table.path, 64 * mib, options);
        for (std::uint64_t i = 0; i < 100; i++) {
            exclusive_guard page = pages.allocate();
            page.write<std::uint64_t>(8, i);
            page.set_lsn(i);
            CHECK(page.lsn() == i && page.data()[8] == i);
            ids.push_back(page.id());
            try {
                page.write<std::uint64_t>(page.size() - 7, 0);
                CHECK(!"outside");
            } catch (const std::out_of_range &) {
            }
        }
        shared_guard shared = pages.fix_shared(ids[5]);
        CHECK(shared.read<std::uint64_t>(8) == 5 && shared.lsn() == 5);
        CHECK(!pages.try_fix_exclusive(ids[5]) && pages.try_fix_shared(ids[5]));
        throws<error>(FARHEAP_E_LATCH_TIMEOUT, [&] { pages.fix_exclusive(ids[5], 5); });
        shared_guard other = pages.fix_shared(ids[5], 100);
        CHECK(!shared.try_upgrade());
        other.unfix();
        CHECK(!other.holds());
        std::optional<exclusive_guard> exclusive = shared.try_upgrade();
        CHECK(exclusive && !shared.holds());
        optimistic_guard stale = pages.fix_optimistic(ids[6]);
        pages.fix_exclusive(ids[6]).write<int>(0, 1);
        CHECK(!stale.validate() && !stale.try_upgrade() && !stale.try_share());
        optimistic_guard fresh = pages.fix_optimistic(ids[6]);
        CHECK(fresh.read<int>(0) == 1 && fresh.data()[0] == 1 && fresh.validate());
        std::optional<shared_guard> kept = pages.fix_optimistic(ids[6]).try_share();
        CHECK(kept && kept->read<int>(0) == 1 && fresh.validate() && !fresh.try_upgrade());
        kept.reset();
        fresh.try_upgrade()->write<int>(0, 2);
        shared = std::move(*exclusive).downgrade();
        CHECK(shared.data()[8] == 5);
        shared.unfix();
        CHECK(pages.read_optimistic(ids[9], [](const page_guard &p) { return p.read<std::uint64_t>(8); }) == 9);
        throws<error>(FARHEAP_E_WRITE_REFUSED, [&] { pages.flush(); });
        CHECK(pages.stats().write_refusals > 0);
        pages.fix_exclusive(ids[13]).set_lsn(113);
        pages.flush();
        pages.prefetch(ids);
        CHECK(pages.fix_many(ids)[99].read<std::uint64_t>(8) == 99);
        std::move(*pages.try_fix_exclusive(ids[50])).free();
        pages.set_floor(mib);
        pages.set_ceiling(16 * mib);
        CHECK(pages.payload() == 8192 - 16 && pages.pages() > 100);
        CHECK(pages.stats().pages_written > 0);
        // A page that the pool has locked to bring it in or to evict it counts for that moment, and it tells nobody.
        for (int looks = 0; pages.stats().holders != 0 && looks < 60000; looks++) usleep(1000);
        CHECK(pages.stats().holders == 0);
        CHECK(pages.account().used() > 0);
        throws<error>(FARHEAP_E_ARGUMENT, [&] { pages.account().uncharge(1); });
        pages.flush();
    }
    CHECK(written > 0);
    options.before_write = nullptr;
    options.replacement = FARHEAP_REPLACEMENT_CLOCK;
    pool again = pool::open(limit, table.path, options);
    CHECK(again.fix_shared(ids[99]).read<std::uint64_t>(8) == 99);
    throws<error>(FARHEAP_E_NO_SUCH_PAGE, [&] { again.fix_shared(1 << 20); });
    CHECK(again.evict_clean(mib) > 0);
    again.evict_all();
    CHECK(again.stats().resident_bytes == 0);
    throws<error>(FARHEAP_E_DEVICE, [&] { pool::open(limit, "/nonexistent/table"); });
}

// Memory of the program's own under the limit.
static void accounts() {
    manager limit(16 * mib);
    limit.set_deadline_ms(50);
    account plans(limit, "plans");
    std::uint64_t held = 0;
    plans.on_reclaim([&](std::uint64_t, farheap_reclaim_cost cost) -> std::uint64_t {
        if (cost == FARHEAP_COST_FREE) throw std::runtime_error("stays in C++");
        const std::uint64_t bytes = __atomic_exchange_n(&held, 0, __ATOMIC_RELAXED);
        plans.uncharge(bytes);
        return bytes;
    });
    throws<error>(FARHEAP_E_CONFIG, [&] { plans.on_reclaim([](auto...) { return 0; }); });
    plans.charge(8 * mib);
    CHECK(plans.held() == 8 * mib);
    held = 8 * mib;
    CHECK(plans.used() == 8 * mib && !plans.try_charge(9 * mib));
    throws<error>(FARHEAP_E_ARGUMENT, [&] { plans.uncharge(9 * mib); });
    void *sorted = limit.allocate_temporary(12 * mib); // the plans give way
    CHECK(plans.used() == 0 && limit.consumer(1)->reclaimed_bytes == 8 * mib);
    CHECK(std::string(limit.consumer(0)->name) == "temporary" && !limit.consumer(16));
    limit.free_temporary(sorted);
    throws<farheap::bad_alloc>(FARHEAP_E_OUT_OF_MEMORY, [&] { plans.charge(17 * mib); });
    plans.set_used(mib);
    plans.set_floor(mib);
    plans.set_ceiling(2 * mib);
    CHECK(plans.used() == mib && plans.floor() == mib && plans.ceiling() == 2 * mib);
    account moved = std::move(plans), other(limit, "other");
    moved = std::move(other); // the first one ends
    CHECK(moved.used() == 0 && !limit.consumer(2));
    account temporary = limit.temporary_account();
    throws<error>(FARHEAP_E_ARGUMENT, [&] { temporary.charge(1); });
}

// A B+-tree in a pool's pages.
static void trees() {
    manager limit(8 * mib);
    table_path table;
    std::uint64_t root = 0;
    std::map<std::string, std::string> model;
    {
        pool pages = pool::create(limit, table.path, 64 * mib);
        btree tree = btree::create(pages);
        for (unsigned i = 0; i < 30000; i++) {
            const std::string key = "key " + std::to_string(i * 7919u % 30011u);
            const std::string value(i % 300, static_cast<char>('a' + i % 26));
            CHECK(tree.insert(key, value) == (model.count(key) == 0));
            model[key] = value;
        }
        for (unsigned i = 0; i < 30000; i += 3) {
            const std::string key = "key " + std::to_string(i);
            CHECK(tree.remove(key) == (model.erase(key) == 1));
        }
        std::string again;
        for (const auto &[key, value] : model) {
            CHECK(tree.get(key, again) && again == value);
        }
        CHECK(!tree.get("missing", again) && again.empty() && !tree.get("missing"));
        CHECK(tree.contains(model.begin()->first) && !tree.contains("missing"));
        CHECK(tree.get(model.rbegin()->first) == model.rbegin()->second);

        CHECK(tree.insert("", "") && tree.get("") == "");
        CHECK(tree.remove("") && !tree.remove(""));
        CHECK(tree.update("key 1", [](char *value, std::size_t len) { std::memset(value, '!', len); }));
        model["key 1"].assign(model["key 1"].size(), '!');
        CHECK(!tree.update("missing", [](char *, std::size_t) { CHECK(!"there is none"); }));
        try {
            tree.update("key 1", [](char *, std::size_t) { throw std::runtime_error("told to"); });
            CHECK(!"thrown");
        } catch (const std::runtime_error &thrown) {
            CHECK(std::string(thrown.what()) == "told to");
        }
        throws<error>(FARHEAP_E_BAD_RANGE, [&] { tree.insert(std::string(1024, 'x'), ""); });
        throws<error>(FARHEAP_E_NO_SUCH_PAGE, [&] { btree::open(pages, 1 << 30); });

        CHECK(!tree.get_ref("missing"));
        {
            const std::optional<value_guard> lent = tree.get_ref("key 1");
            CHECK(lent && lent->get() == model["key 1"]);
        }
        cursor back = tree.scan_back();
        for (auto last = model.rbegin(); last != model.rend(); ++last) {
            const std::optional<entry> found = back.prev();
            CHECK(found && found->key == last->first && found->value == last->second);
        }
        CHECK(!back.prev() && back.next()->key == model.begin()->first);
        auto from_model = [&, at = model.begin()]() mutable -> std::optional<entry> {
            if (at == model.end()) return std::nullopt;
            const entry found{at->first, at->second};
            ++at;
            return found;
        };
        const std::size_t in_use = pages.pages_in_use().size();
        try {
            btree::load(pages, [&, left = 5000]() mutable {
                if (left-- == 0) throw std::runtime_error("no more");
                return from_model();
            });
            CHECK(!"thrown");
        } catch (const std::runtime_error &thrown) {
            CHECK(std::string(thrown.what()) == "no more");
        }
        CHECK(pages.pages_in_use().size() == in_use);
        auto whole_model = [&, at = model.begin()]() mutable -> std::optional<entry> {
            if (at == model.end()) return std::nullopt;
            const entry found{at->first, at->second};
            ++at;
            return found;
        };
        btree copy = btree::load(pages, whole_model);
        const std::size_t of_copy = pages.pages_in_use().size() - in_use;
        CHECK(of_copy > 1 && of_copy < in_use); // its nodes are full
        auto copied = model.begin();
        for (const entry &found : copy.scan()) {
            CHECK(found.key == copied->first && found.value == copied->second);
            ++copied;
        }
        CHECK(copied == model.end());

        auto expected = model.begin();
        for (const entry &found : tree.scan()) {
            CHECK(found.key == expected->first && found.value == expected->second);
            ++expected;
        }
        CHECK(expected == model.end());
        cursor from = tree.scan("key 2");
        CHECK(from.next()->key == model.lower_bound("key 2")->first);
        cursor behind = tree.scan("z");
        CHECK(!behind.next() && behind.begin() == behind.end() && !(behind.begin() != behind.end()));
        root = tree.root();
        farheap_pool *raw = pages.get();
        CHECK(farheap_pool_free(raw) == FARHEAP_E_IN_USE);
        pages.flush();
    }
    std::optional<pool> pages(pool::open(limit, table.path));
    btree tree = btree::open(*pages, root);
    pages.reset(); // fails, for there is a tree
    CHECK(tree.get("key 1") == model["key 1"]);
    CHECK(tree.get() != nullptr && tree.scan().get() != nullptr);
}

// What a log does to a table when it opens it again.
static void redo() {
    manager limit(8 * mib);
    table_path table;
    pool pages = pool::create(limit, table.path, 16 * mib);
    const std::uint64_t first = pages.allocate().id();
    pages.fix_to_overwrite(first + 5).write<int>(0, 5);
    pages.fix_to_overwrite(first + 8).write<int>(0, 8);
    CHECK((pages.pages_in_use() == std::vector<std::uint64_t>{first, first + 5, first + 8}));
    pages.flush_pages({first, first + 5});
    CHECK(pages.dirty_pages().size() == 1);
    throws<error>(FARHEAP_E_NO_SUCH_PAGE, [&] { pages.flush_pages({first + 1}); });
    CHECK(pages.fix_to_overwrite(first + 5).data()[0] == 0);
    pages.flush();
    CHECK(pages.dirty_pages().empty());
    pages.fix_exclusive(first + 5).write<int>(0, 7);
    pages.flush();
    { pool closed(std::move(pages)); }
    pool_options options;
    options.read_only = FARHEAP_ON;
    pool reader = pool::open(limit, table.path, std::move(options));
    CHECK(reader.fix_shared(first + 5).read<int>(0) == 7);
    throws<error>(FARHEAP_E_DEVICE, [&] { reader.fix_exclusive(first + 5); });
}

// Two tables in one pool.
static void tables() {
    manager limit(8 * mib);
    table_path one, other;
    std::optional<pool> first(pool::create(limit, one.path, 16 * mib));
    pool_options options;
    options.beside = &*first;
    pool second = pool::create(limit, other.path, 16 * mib, std::move(options));
    const std::uint64_t page = first->allocate().id();
    CHECK(second.allocate().id() == page);
    first->fix_exclusive(page).write<int>(0, 1);
    second.fix_exclusive(page).write<int>(0, 2);
    first->flush();
    first.reset();
    pool_options again;
    again.beside = &second;
    first = pool::open(limit, one.path, std::move(again));
    CHECK(first->fix_shared(page).read<int>(0) == 1 && second.fix_shared(page).read<int>(0) == 2);
    CHECK(first->account().used() == second.account().used());
}

// The constructors as functions that bindings can look up, not as the header's macros.
static void plain_constructors() {
    farheap_manager *limit = nullptr;
    farheap_collective *objects = nullptr;
    farheap_heap *far = nullptr;
    CHECK((farheap_manager_new)(mib, &limit) == FARHEAP_OK);
    CHECK(farheap_manager_free(limit) == FARHEAP_OK);
    CHECK((farheap_collective_new)("lymit:1MiB", mib, 0, &objects) == FARHEAP_E_CONFIG);
    CHECK((farheap_start)("lymit:1MiB", &far) == FARHEAP_E_CONFIG);
    CHECK((farheap_start_config)(nullptr, &far) == FARHEAP_E_NULL);
    CHECK((farheap_start_env)(nullptr) == FARHEAP_E_NULL);
    clear_error();
}

// What is destroyed too early goes on for those who hold it.
static void wrong_orders() {
    table_path table;
    std::optional<manager> limit(std::in_place, 16 * mib);
    pool_options options;
    static unsigned asked = 0; // The pool asks to the end.
    options.before_write = [large = std::vector<int>(100, 7)](std::uint64_t, std::uint64_t) {
        __atomic_add_fetch(&asked, static_cast<unsigned>(large[99]), __ATOMIC_RELAXED);
        return true;
    };
    std::optional<pool> pages(pool::create(*limit, table.path, 16 * mib, options));
    exclusive_guard held = pages->allocate();
    held.set_lsn(9);
    held.write<int>(0, 3);
    farheap_pool *raw = pages->get();
    void *memory = limit->allocate_temporary(mib);
    limit.reset();
    pages.reset(); // fails, for a page is held
    CHECK(held.holds() && held.data()[0] == 3);
    held.unfix();
    CHECK(farheap_pool_flush(raw) == FARHEAP_OK && __atomic_load_n(&asked, __ATOMIC_RELAXED) >= 7);
    static_cast<char *>(memory)[mib - 1] = 1; // the manager could not be freed either
}

// Far memory under a manager's limit; the manager's object goes first.
static void one_limit_for_all() {
    std::optional<heap> far;
    static std::uint64_t told = 0;
    {
        manager limit(32 * mib);
        farheap_config config = make_config();
        config.capacity = 256 * mib;
        throws<error>(FARHEAP_E_CONFIG, [&] { (void)limit.start_heap("limitt:1GiB"); });
        far.emplace(limit.start_heap(config));
        throws<error>(FARHEAP_E_ALREADY_RUNNING, [&] { (void)limit.start_heap(); });
        limit.on_pressure([](farheap_pressure, std::uint64_t) {
            __atomic_add_fetch(&told, 1, __ATOMIC_RELAXED);
        });
        CHECK(far->account().ceiling() > 0 && far->account().ceiling() <= 32 * mib);
        temporary_resource query(limit);
        std::pmr::vector<char> sorted(64 * mib, 1, &query); // spills
        // The heap's local memory is counted when it is there already.
        CHECK(limit.stats().spilled_bytes >= 64 * mib && limit.stats().used_bytes_max <= 33 * mib);
        CHECK(sorted[63 * mib] == 1);
    }
    CHECK(__atomic_load_n(&told, __ATOMIC_RELAXED) > 0);
    {
        far_resource ssd;
        std::pmr::vector<char> column(64 * mib, 1, &ssd);
        CHECK(column[63 * mib] == 1);
    }
    far->shutdown();
}

static void tiers_and_bumps(heap &far) {
    heap cold = far.add_tier("cold", "far_limit:8MiB,capacity:64MiB");
    throws<error>(FARHEAP_E_CONFIG, [&] { (void)far.add_tier("cold", "far_limit:8MiB"); });
    throws<error>(FARHEAP_E_NOT_RUNNING, [] { (void)heap::tier("warm"); });
    CHECK(heap::tier("cold").placement() == cold.placement() && cold.placement() != far.placement());
    {
        tier_resource there(cold.placement());
        std::pmr::vector<int> column(mib, 3, &there);
        CHECK(is_far(column.data()) && cold.usage().allocated_bytes == 4 * mib);
        CHECK(cold.usage().metadata_bytes > 0 && column[mib - 1] == 3);
    }
    for (farheap_placement placement : {FARHEAP_LOCAL, FARHEAP_FAR, cold.placement()}) {
        bump_resource query(placement);
        auto *map = new (query.allocate(sizeof(std::pmr::map<int, std::pmr::string>)))
            std::pmr::map<int, std::pmr::string>(&query);
        for (int i = 0; i < 1000; i++) map->emplace(i, std::string(i % 100, 'x'));
        CHECK(map->at(999).size() == 99 && query.reserved() > 64 << 10);
        CHECK(is_far(map) == (placement != FARHEAP_LOCAL) && query.is_equal(query));
        std::pmr::vector<int> given_back(100000, 1, &query);
        // The map is never destroyed: its memory goes all the same.
    }
    CHECK(cold.usage().allocated_bytes == 0);
    cold.shutdown();
    throws<farheap::bad_alloc>(FARHEAP_E_NOT_RUNNING, [&] {
        tier_resource gone(cold.placement());
        std::pmr::vector<int> nothing(10, 1, &gone);
    });
}

static void far_containers(heap &far) {
    tiers_and_bumps(far);
    far_resource ssd;
    local_resource ram;
    std::pmr::vector<int> column{&ssd};
    column.resize(8 * mib); // 32 MiB, twice the limit
    std::iota(column.begin(), column.end(), 0);
    CHECK(is_far(column.data()) && !ssd.is_equal(ram) && ssd.is_equal(far_resource()));
    CHECK(ssd.placement() == FARHEAP_FAR);
    std::pmr::vector<int> index(100, 1, &ram);
    CHECK(!is_far(index.data()));
    far.prefetch(column.data(), mib);
    far.prefetch({{column.data(), mib}, {column.data() + mib, mib}});
    far.advise(column.data(), 4 * mib, FARHEAP_ADVICE_SEQUENTIAL);
    {
        pinned held(far, column.data(), mib);
        far.evict_all();
    }
    throws<error>(FARHEAP_E_BAD_RANGE, [&] { far.unpin(column.data(), mib); });
    far.evict(column.data(), mib);
    long sum = std::accumulate(column.begin(), column.end(), 0L);
    CHECK(sum == static_cast<long>(8 * mib) * (8 * mib - 1) / 2);
    CHECK(far.stats().resident_bytes_max <= 16 * mib && far.stats().bytes_read > 0);
    CHECK(far.latencies().read.count > 0);
    throws<error>(FARHEAP_E_ARGUMENT, [&] { far.account(); });
    far.set_far_limit(12 * mib);
    far.set_limit(1024 * mib);
    CHECK(far.serves_kernel_faults() || far.threshold() == FARHEAP_NONE);
    throws<error>(FARHEAP_E_IN_USE, [&] { far.shutdown(); });
    far.discard(column.data(), 32 * mib);
    CHECK(column[4 * mib] == 0);
    far.evict_all();
    auto end = reinterpret_cast<std::uintptr_t>(column.data() + column.size()) / 4096 * 4096;
    CHECK(far_madvise(reinterpret_cast<void *>(end - 4096), 4096, MADV_DONTNEED) == 0);
    CHECK(*reinterpret_cast<int *>(end - 4) == 0);

    std::map<int, std::string, std::less<int>, far_allocator<std::pair<const int, std::string>>> map;
    for (int i = 0; i < 10000; i++) map[i] = "a string that is too long to be kept inside of itself";
    CHECK(is_far(&map.at(77)) && far_allocator<int>() == far_allocator<long>());
    CHECK(!(far_allocator<int>() != far_allocator<long>()));

    block raw = make_zeroed_block(1000, 100);
    CHECK(is_far(raw.get()) == (far.threshold() != FARHEAP_NONE) && usable_size(raw) >= 100000);
    resize(raw, mib);
    CHECK(static_cast<char *>(raw.get())[99999] == 0);
    throws<farheap::bad_alloc>(FARHEAP_E_OUT_OF_MEMORY, [&] { resize(raw, std::size_t{1} << 50); });
    CHECK(make_aligned_block(4096, 10) && make_block(10));
    {
        scope all_far(FARHEAP_FAR);
        CHECK(is_far(make_block(10).get()));
    }
    CHECK(!is_far(make_block(10).get()));
    throws<error>(FARHEAP_E_ARGUMENT, [] { scope wrong(FARHEAP_POLICY); });
    throws<error>(FARHEAP_E_ALREADY_RUNNING, [] { heap second("far_limit:16MiB"); });
    CHECK(heap::running().stats().limit_bytes == 12 * mib);
    far.purge();
}

// A constructor that throws inside of a far container leaves nothing behind.
template <class Container, class Fill> void leaks_nothing(heap &far, Fill fill) {
    const std::uint64_t before = far.stats().allocated_bytes;
    for (int at = 0; at < 40; at++) {
        Container container;
        counted::throw_at = at;
        try {
            fill(container);
        } catch (const std::runtime_error &) {
        }
        counted::throw_at = -1;
    }
    CHECK(counted::alive == 0);
    CHECK(far.stats().allocated_bytes == before);
}

static void exceptions_leak_nothing(heap &far) {
    using vector = std::vector<counted, far_allocator<counted>>;
    using list = std::list<counted, far_allocator<counted>>;
    leaks_nothing<vector>(far, [](vector &v) { for (int i = 0; i < 20; i++) v.emplace_back(i); });
    leaks_nothing<list>(far, [](list &l) { for (int i = 0; i < 20; i++) l.emplace_back(i); });
    leaks_nothing<vector>(far, [](vector &v) { v.assign(20, counted(1)); });
}

template <class Allocator> void collective_interface(Allocator of) {
    using traits = collective_traits<Allocator>;
    using pointer = typename traits::pointer;
    using standard = std::allocator_traits<Allocator>;
    auto plain = traits::get_suballocator(of, swappable_plain);
    auto page = traits::get_suballocator(of, new_per_page);
    auto local = traits::get_suballocator(of, purely_local);
    std::vector<pointer> objects(8);
    CHECK(traits::batch_allocate(of, plain, objects.data(), objects.size()));
    for (int i = 0; i < 8; i++) standard::construct(of, objects[i], i);
    CHECK(counted::alive == 8);
    pointer moved = traits::relocate(of, local, objects[0]);
    CHECK(moved && moved->value == 0);
    objects[0] = moved;
    CHECK(traits::relocate(of, page, objects.data(), objects.size()));
    for (int i = 0; i < 8; i++) CHECK(objects[i]->value == i);
    CHECK(traits::if_suballocator_contains(of, page, objects[3]) && page.is_occupancy_under(1.1));
    auto found = traits::get_suballocator(of, static_cast<const void *>(objects[0]));
    CHECK(found.contains(objects[7]));
    // A copy that throws: everything is where it was, and nothing is lost.
    const std::vector<pointer> before = objects;
    counted::throw_at = 3;
    try {
        (void)traits::relocate(of, plain, objects.data(), objects.size());
        CHECK(!"thrown");
    } catch (const std::runtime_error &) {
    }
    counted::throw_at = -1;
    CHECK(objects == before && counted::alive == 8);
#if __cplusplus >= 202002L
    CHECK(traits::relocate(of, plain, std::span(objects)));
#endif
    for (pointer object : objects) {
        standard::destroy(of, object);
        traits::deallocate(of, object, 1);
    }
    CHECK(counted::alive == 0);
    std::vector<int, typename traits::template rebind_alloc<int>> numbers(1000, 5, of);
    CHECK(numbers[999] == 5);
}

static void collectives() {
    throws<error>(FARHEAP_E_CONFIG, [] { collective("pages:1", 0); });
    collective memory("far_limit:16MiB,capacity:64MiB", 64 << 10);
    collective_allocator<counted> of(memory);
    collective_interface(of);
    collective_interface(std::allocator<counted>());
    static_assert(collective_traits<collective_allocator<int>>::is_collective);
    static_assert(!collective_traits<std::allocator<int>>::is_collective);
#if __cplusplus >= 202002L
    static_assert(collective_like<collective_allocator<int>>);
    static_assert(!collective_like<std::allocator<int>>);
#endif
    CHECK(memory.local_used() == 0 && memory.local_capacity() == 64 << 10);
    CHECK(memory.page_size() == 4096);

    using wide = collective_allocator<counted, 65536>;
    try {
        wide wrong(memory);
        CHECK(!"other pages");
    } catch (const std::invalid_argument &) {
    }
    // All or none: nine of these fill a page, ten do not fit.
    struct big { char bytes[440]; };
    collective_allocator<big> bigs(of);
    CHECK(bigs == of && !(bigs != of));
    using traits = collective_traits<collective_allocator<big>>;
    const std::uint64_t pages = memory.far_pages();
    {
        auto page = bigs.get_suballocator(new_per_page);
        std::vector<big *> ten(10, nullptr);
        CHECK(!traits::batch_allocate(bigs, page, ten.data(), ten.size()));
        CHECK(page.is_occupancy_under(0.001) && page.kind() == new_per_page);
        CHECK(!page.try_allocate(static_cast<std::size_t>(-1)) && !page.try_allocate(10));
        throws<farheap::bad_alloc>(FARHEAP_E_TOO_LARGE, [&] { (void)page.allocate(10); });
    }
    CHECK(memory.far_pages() == pages);
    big *a = bigs.allocate(1, new_per_page);
    big *b = bigs.allocate(1, a);
    big *c = bigs.allocate(1, purely_local);
    CHECK(memory.share_a_page(a, b) && memory.is_local(c) && bigs.contains(a));
    CHECK(bigs.if_suballocator_contains(bigs.get_suballocator(a), b));
    CHECK(bigs.is_occupancy_under(0.5) && bigs.is_occupancy_under(0.0, swappable_plain));
    CHECK(!memory.contains(&memory));
    throws<error>(FARHEAP_E_BAD_RANGE, [&] { (void)bigs.get_suballocator(&memory); });
    memory.prefetch({{a, 4096}});
    memory.advise(a, 4096, FARHEAP_ADVICE_COLD);
    memory.pin(a, 1);
    memory.evict_all();
    memory.unpin(a, 1);
    memory.set_limit(8 * mib);
    CHECK(memory.stats().limit_bytes > 0 && memory.latencies().fault.count > 0);
    bigs.deallocate(a, 1);
    bigs.deallocate(b, 1);
    bigs.deallocate(c, 1);
    // Containers of the standard work on it, with a copy that shares and one that moves.
    std::map<int, int, std::less<int>, collective_allocator<std::pair<const int, int>>> map{
        collective_allocator<std::pair<const int, int>>(memory)};
    for (int i = 0; i < 20000; i++) map[i] = -i;
    auto copy = map;
    auto moved = std::move(map);
    copy.erase(5);
    CHECK(copy.size() == 19999 && moved.at(19999) == -19999 && memory.contains(&moved.at(7)));
}

int main() {
    return run([] {
        without_a_heap();
        manager_and_pool();
        accounts();
        trees();
        redo();
        tables();
        plain_constructors();
        wrong_orders();
        farheap_config config = make_config();
        config.far_limit = 16 * mib;
        config.capacity = 256 * mib;
        {
            heap first(config);
            first.shutdown();
        }
        one_limit_for_all();
        setenv("FARHEAP_CONF", "far_limit:16MiB,capacity:256MiB", 1);
        heap::from_env().shutdown();
        heap far(std::string("far_limit:16MiB,capacity:256MiB"));
        far_containers(far);
        exceptions_leak_nothing(far);
        far.shutdown();
        throws<error>(FARHEAP_E_NOT_RUNNING, [&] { far.shutdown(); });
        collectives();
    });
}
