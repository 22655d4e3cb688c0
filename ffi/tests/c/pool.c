/* Memory manager and buffer pool from C. Needs no permission. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <unistd.h>

static unsigned told;

static void on_pressure(void *userdata, farheap_pressure event, uint64_t bytes) {
    (void)bytes;
    if (event != FARHEAP_PRESSURE_OTHER) __atomic_add_fetch((unsigned *)userdata, 1, __ATOMIC_RELAXED);
}

static uint64_t lsn_written;
static farheap_status log_says;

static farheap_status before_write(void *userdata, uint64_t page, uint64_t lsn) {
    (void)page;
    __atomic_store_n((uint64_t *)userdata, lsn, __ATOMIC_RELAXED);
    return __atomic_load_n(&log_says, __ATOMIC_RELAXED);
}

static void temporary_memory(farheap_manager *manager) {
    void *memory = NULL;
    OK(farheap_manager_allocate_temporary(manager, 4 * MIB, &memory));
    CHECK(memory && (uintptr_t)memory % 4096 == 0);
    memset(memory, 3, 4 * MIB);
    CHECK(!farheap_manager_is_spilled(manager, memory));
    farheap_manager_stats stats = {.size = sizeof stats};
    OK(farheap_manager_stats_get(manager, &stats));
    CHECK(stats.temporary_bytes == 4 * MIB && stats.limit_bytes == 16 * MIB);
    farheap_manager_stats old = {.size = offsetof(farheap_manager_stats, failed)};
    old.failed = 12345; /* a host of the version before: not written to */
    OK(farheap_manager_stats_get(manager, &old));
    CHECK(old.failed == 12345 && old.temporary_bytes == 4 * MIB);
    const uint64_t failed = stats.failed;
    FAILS(FARHEAP_E_IN_USE, farheap_manager_free(manager));
    OK(farheap_manager_free_temporary(manager, memory));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_manager_free_temporary(manager, memory));
    NOTHING(FARHEAP_E_BAD_RANGE, farheap_manager_is_spilled(manager, memory));
    OK(farheap_manager_free_temporary(manager, NULL));
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_manager_allocate_temporary(manager, 64 * MIB, &memory));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_manager_allocate_temporary(manager, SIZE_MAX, &memory));
    CHECK(__atomic_load_n(&told, __ATOMIC_RELAXED) > 0);
    OK(farheap_manager_stats_get(manager, &stats));
    CHECK(stats.failed > failed);
    OK(farheap_manager_set_temporary_ceiling(manager, 2 * MIB));
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_manager_allocate_temporary(manager, 4 * MIB, &memory));
    OK(farheap_manager_set_temporary_ceiling(manager, 16 * MIB));
}

static void small_temporary_objects(farheap_manager *manager) {
    farheap_temporary *temporary = NULL;
    OK(farheap_temporary_new(manager, &temporary));
    static unsigned *objects[10000];
    for (unsigned i = 0; i < 10000; i++) {
        objects[i] = farheap_temporary_allocate(temporary, 40 + i % 100, 8);
        CHECK(objects[i]);
        *objects[i] = i;
    }
    for (unsigned i = 0; i < 10000; i++) {
        CHECK(*objects[i] == i);
        OK(farheap_temporary_deallocate(temporary, objects[i], 40 + i % 100, 8));
    }
    OK(farheap_temporary_deallocate(temporary, NULL, 1, 1));
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, farheap_temporary_allocate(temporary, 64 * MIB, 8));
    NOTHING(FARHEAP_E_ARGUMENT, farheap_temporary_allocate(temporary, 8, 3));
    OK(farheap_temporary_free(temporary));
    FAILS(FARHEAP_E_HANDLE, farheap_temporary_free(temporary));
    NOTHING(FARHEAP_E_HANDLE, farheap_temporary_allocate(temporary, 8, 8));
}

static void guards(farheap_pool *pool) {
    farheap_page a = {0}, b = {0};
    OK(farheap_pool_allocate(pool, &a));
    uint64_t id = a.id;
    CHECK(a.kind == FARHEAP_PAGE_EXCLUSIVE && a.len == farheap_pool_payload(pool));
    uint8_t *bytes = farheap_page_write(&a);
    CHECK(bytes && bytes == a.data && bytes[0] == 0);
    bytes[0] = 42;
    CHECK(farheap_pool_page_address(pool, id) == a.data);
    CHECK(farheap_pool_page_at(pool, a.data) == id && farheap_pool_page_at(pool, bytes + 4095) == id);
    NOTHING(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_page_address(pool, 1));
    NOTHING(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_page_address(pool, UINT64_MAX));
    NOTHING(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_page_at(pool, &a));
    NOTHING(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_page_at(pool, NULL));
    OK(farheap_page_set_lsn(&a, 7));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_pool_try_fix_shared(pool, id, &b));
    FAILS(FARHEAP_E_LATCH_TIMEOUT, farheap_pool_fix_shared_within(pool, id, 5, &b));
    FAILS(FARHEAP_E_LATCH_TIMEOUT, farheap_pool_fix_exclusive_within(pool, id, 5, &b));
    FAILS(FARHEAP_E_IN_USE, farheap_pool_free(pool));
    OK(farheap_page_downgrade(&a));
    CHECK(a.kind == FARHEAP_PAGE_SHARED && a.data[0] == 42 && farheap_page_lsn(&a) == 7);
    NOTHING(FARHEAP_E_ARGUMENT, farheap_page_write(&a));
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_set_lsn(&a, 8));
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_downgrade(&a));
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_free(&a));
    OK(farheap_pool_try_fix_shared(pool, id, &b));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_page_try_upgrade(&a));
    CHECK(a.kind == FARHEAP_PAGE_SHARED && a.data[0] == 42);
    OK(farheap_page_unfix(&b));
    FAILS(FARHEAP_E_HANDLE, farheap_page_unfix(&b));
    OK(farheap_page_try_upgrade(&a));
    CHECK(a.kind == FARHEAP_PAGE_EXCLUSIVE);
    OK(farheap_page_unfix(&a));
    CHECK(!farheap_page_validate(&a));

    farheap_page look = {0};
    uint8_t byte = 0;
    OK(farheap_pool_fix_optimistic(pool, id, &look));
    CHECK(look.kind == FARHEAP_PAGE_OPTIMISTIC);
    CHECK(*(const volatile uint8_t *)look.data == 42 && farheap_page_validate(&look));
    OK(farheap_page_read(&look, 0, &byte, 1));
    CHECK(byte == 42 && farheap_page_validate(&look));
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_read(&look, look.len, &byte, 1));
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_read(&look, SIZE_MAX, &byte, 2));
    FAILS(FARHEAP_E_NULL, farheap_page_read(&look, 0, NULL, 1));
    OK(farheap_pool_fix_exclusive(pool, id, &a));
    farheap_page_write(&a)[0] = 43;
    OK(farheap_page_unfix(&a));
    CHECK(!farheap_page_validate(&look));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_page_try_upgrade(&look));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_page_try_share(&look));
    CHECK(look.kind == FARHEAP_PAGE_OPTIMISTIC && *(const volatile uint8_t *)look.data == 43);
    FAILS(FARHEAP_E_CHANGED, farheap_page_upgrade(&look));
    CHECK(look.kind == FARHEAP_PAGE_OPTIMISTIC);
    OK(farheap_pool_fix_optimistic(pool, id, &look));
    OK(farheap_pool_fix_shared(pool, id, &a));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_page_try_upgrade(&look));
    CHECK(farheap_page_validate(&look)); /* held, and not changed */
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_upgrade(&a));
    OK(farheap_page_unfix(&a));
    OK(farheap_page_upgrade(&look));
    CHECK(look.kind == FARHEAP_PAGE_EXCLUSIVE && farheap_page_write(&look)[0] == 43);
    OK(farheap_page_unfix(&look));
    FAILS(FARHEAP_E_HANDLE, farheap_page_upgrade(&look));
    OK(farheap_pool_fix_optimistic(pool, id, &look));
    OK(farheap_page_try_share(&look));
    CHECK(look.kind == FARHEAP_PAGE_SHARED && look.data[0] == 43);
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_try_share(&look));
    OK(farheap_pool_try_fix_shared(pool, id, &b));
    OK(farheap_page_unfix(&b));
    OK(farheap_page_unfix(&look));
    OK(farheap_pool_fix_optimistic(pool, id, &look));
    OK(farheap_page_try_upgrade(&look));
    OK(farheap_page_unfix(&look));
    OK(farheap_pool_fix_shared(pool, id, &a));
    OK(farheap_page_read(&a, 0, &byte, 1));
    CHECK(byte == 43 && farheap_page_validate(&a));
    OK(farheap_page_unfix(&a));
    OK(farheap_pool_fix_shared_within(pool, id, 100, &a));
    OK(farheap_page_unfix(&a));
    OK(farheap_pool_fix_exclusive_within(pool, id, 100, &a));
    OK(farheap_page_unfix(&a));
    OK(farheap_pool_try_fix_exclusive(pool, id, &a));
    OK(farheap_page_free(&a));
    CHECK(a.kind == FARHEAP_PAGE_NONE);
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_shared(pool, 1 << 30, &a));
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_optimistic(pool, UINT64_MAX, &a));
}

static void many_pages_and_buffers(farheap_pool *pool) {
    enum { PAGES = 4096, GROUP = 64 }; /* 32 MiB, twice the limit */
    static uint64_t ids[PAGES];
    farheap_page page = {0};
    for (int i = 0; i < PAGES; i++) {
        OK(farheap_pool_allocate(pool, &page));
        ids[i] = page.id;
        memcpy(farheap_page_write(&page), &i, sizeof i);
        OK(farheap_page_unfix(&page));
    }
    OK(farheap_pool_flush(pool));
    static farheap_page group[GROUP];
    for (int first = 0; first < PAGES; first += GROUP) {
        if (first + GROUP < PAGES) OK(farheap_pool_prefetch(pool, ids + first + GROUP, GROUP));
        OK(farheap_pool_fix_many(pool, ids + first, GROUP, group));
        for (int i = 0; i < GROUP; i++) {
            int number = first + i;
            CHECK(!memcmp(group[i].data, &number, sizeof number));
            OK(farheap_page_unfix(&group[i]));
        }
    }
    OK(farheap_pool_fix_many(pool, NULL, 0, NULL));
    farheap_pool_stats stats = {.size = sizeof stats};
    OK(farheap_pool_stats_get(pool, &stats));
    CHECK(stats.pages_written > 0 && stats.pages_read > 0);
    expect_unfixed(pool);
    CHECK(stats.resident_bytes <= 16 * MIB && farheap_pool_pages(pool) > PAGES);
    OK(farheap_pool_set_floor(pool, MIB));
    OK(farheap_pool_set_ceiling(pool, 16 * MIB));

    OK(farheap_pool_allocate(pool, &page));
    uint64_t id = page.id;
    OK(farheap_page_free(&page));
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_shared(pool, id, &page));
}

/* Numbers that a visit was told of. */
struct told {
    uint64_t ids[4];
    size_t count, room;
};

static bool tell(void *userdata, uint64_t page) {
    struct told *told = userdata;
    told->ids[told->count++] = page;
    return told->count < told->room;
}

/* The number of pages in use, or of changed ones. */
static bool count(void *userdata, uint64_t page) {
    (void)page;
    ++*(size_t *)userdata;
    return true;
}

/* A table as recovery makes it: pages of the log, whatever the table has of them. */
static void redo(farheap_manager *manager, const char *path) {
    farheap_pool *pool = NULL;
    farheap_page page = {0};
    OK(farheap_pool_create(manager, NULL, path, 16 * MIB, &pool));
    size_t pages = 0;
    OK(farheap_pool_pages_in_use(pool, count, &pages));
    CHECK(pages == 0);
    OK(farheap_pool_allocate(pool, &page));
    const uint64_t first = page.id;
    OK(farheap_page_unfix(&page));
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_shared(pool, first + 9, &page));
    OK(farheap_pool_fix_to_overwrite(pool, first + 9, &page)); /* beyond the end */
    CHECK(page.kind == FARHEAP_PAGE_EXCLUSIVE && page.id == first + 9 && page.data[0] == 0);
    farheap_page_write(&page)[0] = 9;
    OK(farheap_page_set_lsn(&page, 5));
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_fix_to_overwrite(pool, first + 9, &page)); /* and again: what it was is gone */
    CHECK(page.data[0] == 0 && farheap_page_lsn(&page) == 0);
    farheap_page_write(&page)[0] = 8;
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_fix_to_overwrite(pool, first + 16, &page));
    farheap_page_write(&page)[page.len - 1] = 7;
    OK(farheap_page_unfix(&page));
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_to_overwrite(pool, 0, &page));
    FAILS(FARHEAP_E_STORE_FULL, farheap_pool_fix_to_overwrite(pool, 1 << 30, &page));

    struct told told = {{0}, 0, 4};
    OK(farheap_pool_pages_in_use(pool, tell, &told));
    CHECK(told.count == 3 && told.ids[0] == first && told.ids[1] == first + 9);
    CHECK(told.ids[2] == first + 16);
    told = (struct told){{0}, 0, 1}; /* no more than it wants to know */
    OK(farheap_pool_dirty_pages(pool, tell, &told));
    CHECK(told.count == 1 && told.ids[0] == first);
    const uint64_t chosen[] = {first + 9, first};
    OK(farheap_pool_flush_pages(pool, chosen, 2));
    pages = 0;
    OK(farheap_pool_dirty_pages(pool, count, &pages));
    CHECK(pages == 1);
    OK(farheap_pool_flush_pages(pool, NULL, 0));
    const uint64_t missing = first + 1; /* free: it lay between the end and a page beyond */
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_flush_pages(pool, &missing, 1));
    FAILS(FARHEAP_E_NULL, farheap_pool_flush_pages(pool, NULL, 1));
    FAILS(FARHEAP_E_NULL, farheap_pool_pages_in_use(pool, NULL, NULL));
    OK(farheap_pool_flush(pool));
    OK(farheap_pool_free(pool));

    OK(farheap_pool_open(manager, NULL, path, &pool));
    OK(farheap_pool_fix_shared(pool, first + 9, &page));
    CHECK(page.data[0] == 8);
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_free(pool));

    /* Two readers at once, of a file that cannot be written. */
    farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
    config.read_only = FARHEAP_ON;
    farheap_pool *reader = NULL;
    FAILS(FARHEAP_E_CONFIG, farheap_pool_create(manager, &config, path, 16 * MIB, &pool));
    OK(farheap_pool_open(manager, &config, path, &pool));
    OK(farheap_pool_open(manager, &config, path, &reader));
    OK(farheap_pool_fix_shared(reader, first + 9, &page));
    CHECK(page.data[0] == 8);
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_page_try_upgrade(&page));
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_fix_optimistic(reader, first + 9, &page));
    FAILS(FARHEAP_E_DEVICE, farheap_page_upgrade(&page));
    OK(farheap_page_unfix(&page));
    FAILS(FARHEAP_E_DEVICE, farheap_pool_fix_exclusive(reader, first + 9, &page));
    FAILS(FARHEAP_E_DEVICE, farheap_pool_fix_to_overwrite(reader, first + 9, &page));
    FAILS(FARHEAP_E_DEVICE, farheap_pool_allocate(reader, &page));
    OK(farheap_pool_free(reader));
    OK(farheap_pool_free(pool));

    /* A damaged page cannot be read, and is overwritten. */
    FILE *file = fopen(path, "r+b");
    CHECK(file && fseek(file, (long)((first + 9) * 4096), SEEK_SET) == 0);
    CHECK(fputc(77, file) == 77 && fclose(file) == 0);
    OK(farheap_pool_open(manager, NULL, path, &pool));
    FAILS(FARHEAP_E_CORRUPT_PAGE, farheap_pool_fix_shared(pool, first + 9, &page));
    OK(farheap_pool_fix_to_overwrite(pool, first + 9, &page));
    farheap_page_write(&page)[0] = 6;
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_flush(pool));
    OK(farheap_pool_free(pool));
    OK(farheap_pool_open(manager, NULL, path, &pool));
    OK(farheap_pool_fix_shared(pool, first + 9, &page));
    CHECK(page.data[0] == 6);
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_free(pool));
    unlink(path);
}

/* Pages without the library's trailer. */
static void whole_pages(farheap_manager *manager, const char *path) {
    farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
    config.whole_pages = FARHEAP_ON;
    config.checksum = FARHEAP_ON;
    farheap_pool *pool = NULL;
    farheap_page page = {0};
    FAILS(FARHEAP_E_CONFIG, farheap_pool_create(manager, &config, path, 16 * MIB, &pool));
    config.checksum = FARHEAP_DEFAULT;
    config.whole_pages = 7;
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_create(manager, &config, path, 16 * MIB, &pool));
    config.whole_pages = FARHEAP_ON;
    OK(farheap_pool_create(manager, &config, path, 16 * MIB, &pool));
    CHECK(farheap_pool_payload(pool) == 4096);
    OK(farheap_pool_allocate(pool, &page));
    CHECK(page.len == 4096);
    const uint64_t id = page.id;
    memset(farheap_page_write(&page), 9, 4096);
    FAILS(FARHEAP_E_ARGUMENT, farheap_page_set_lsn(&page, 1));
    CHECK(farheap_page_lsn(&page) == 0);
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_flush(pool));
    OK(farheap_pool_free(pool));
    FAILS(FARHEAP_E_DEVICE, farheap_pool_open(manager, NULL, path, &pool));
    /* A program of an earlier header does not know the field. */
    farheap_pool_config older = config;
    older.size = offsetof(farheap_pool_config, whole_pages);
    FAILS(FARHEAP_E_DEVICE, farheap_pool_open(manager, &older, path, &pool));
    OK(farheap_pool_open(manager, &config, path, &pool));
    OK(farheap_pool_fix_shared(pool, id, &page));
    CHECK(page.data[0] == 9 && page.data[4095] == 9);
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_free(pool));
    unlink(path);
}

/* Several tables in one pool, each with a file and page numbers of its own. */
static void tables(farheap_manager *manager, const char *path) {
    enum { TABLES = 3, PAGES = 2000 };
    farheap_pool *pools[TABLES] = {NULL};
    char paths[TABLES][4200];
    farheap_page page = {0};
    farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
    for (int n = 0; n < TABLES; n++) {
        snprintf(paths[n], sizeof paths[n], "%s.%d", path, n);
        config.beside = n > 0 ? pools[n - 1] : NULL;
        OK(farheap_pool_create(manager, &config, paths[n], 16 * MIB, &pools[n]));
    }
    for (uint64_t at = 0; at < PAGES; at++) {
        for (int n = 0; n < TABLES; n++) {
            OK(farheap_pool_allocate(pools[n], &page));
            CHECK(page.id == at + 2);
            farheap_page_write(&page)[7] = (uint8_t)(at + (uint64_t)n);
            OK(farheap_page_unfix(&page));
        }
    }
    OK(farheap_pool_flush(pools[0]));
    OK(farheap_pool_free(pools[0])); /* the others go on */
    config.beside = pools[2];
    config.read_only = FARHEAP_ON;
    OK(farheap_pool_open(manager, &config, paths[0], &pools[0]));
    for (uint64_t at = 0; at < PAGES; at++) {
        for (int n = 0; n < TABLES; n++) {
            OK(farheap_pool_fix_shared(pools[n], at + 2, &page));
            CHECK(page.data[7] == (uint8_t)(at + (uint64_t)n));
            OK(farheap_page_unfix(&page));
        }
    }
    FAILS(FARHEAP_E_DEVICE, farheap_pool_fix_exclusive(pools[0], 2, &page));
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_shared(pools[1], PAGES + 2, &page));
    CHECK(strstr(farheap_last_message(), paths[1]) != NULL);
    while (farheap_pool_allocate(pools[1], &page) == FARHEAP_OK) OK(farheap_page_unfix(&page));
    CHECK(farheap_last_status() == FARHEAP_E_STORE_FULL);
    CHECK(strstr(farheap_last_message(), paths[1]) != NULL);
    farheap_manager *other = NULL;
    OK(farheap_manager_new(8 * MIB, &other));
    config.read_only = FARHEAP_DEFAULT;
    farheap_pool *stranger = NULL;
    FAILS(FARHEAP_E_CONFIG, farheap_pool_create(other, &config, path, 16 * MIB, &stranger));
    OK(farheap_manager_free(other));
    for (int n = 0; n < TABLES; n++) {
        OK(farheap_pool_free(pools[n]));
        unlink(paths[n]);
    }
}

static void the_log_is_asked_before_a_write(farheap_pool *pool) {
    farheap_page page = {0};
    OK(farheap_pool_allocate(pool, &page));
    OK(farheap_page_set_lsn(&page, 99));
    OK(farheap_page_unfix(&page));
    __atomic_store_n(&log_says, FARHEAP_E_CALLBACK, __ATOMIC_RELAXED);
    farheap_pool_stats before = {.size = sizeof before}, after = before;
    OK(farheap_pool_stats_get(pool, &before));
    FAILS(FARHEAP_E_WRITE_REFUSED, farheap_pool_flush(pool)); /* all but that page */
    CHECK(strstr(farheap_last_message(), "1 changed pages of "));
    CHECK(strstr(farheap_last_message(), " were not written"));
    OK(farheap_pool_stats_get(pool, &after));
    CHECK(after.pages_written == before.pages_written);
    CHECK(after.write_refusals > before.write_refusals);
    farheap_pool_stats old = {.size = offsetof(farheap_pool_stats, write_refusals)};
    old.write_refusals = 12345; /* a host of the version before: not written to */
    OK(farheap_pool_stats_get(pool, &old));
    CHECK(old.write_refusals == 12345 && old.pages_written == after.pages_written);
    __atomic_store_n(&log_says, FARHEAP_OK, __ATOMIC_RELAXED);
    OK(farheap_pool_flush(pool));
    OK(farheap_pool_stats_get(pool, &after));
    CHECK(after.pages_written > before.pages_written);
    CHECK(__atomic_load_n(&lsn_written, __ATOMIC_RELAXED) == 99);
}

/* A cache of the host's own that gives way. */
struct cache {
    farheap_account *account;
    uint64_t bytes; /* atomic */
    farheap_status within; /* what a charge and a free from within the callback gave */
    farheap_status freed;
};

static uint64_t give_way(void *userdata, uint64_t want, farheap_reclaim_cost cost) {
    struct cache *cache = userdata;
    (void)want;
    if (cost < FARHEAP_COST_REREAD) return 0;
    uint64_t bytes = __atomic_exchange_n(&cache->bytes, 0, __ATOMIC_RELAXED);
    if (bytes == 0) return 0;
    if (farheap_account_uncharge(cache->account, bytes) != FARHEAP_OK) return 0;
    cache->within = farheap_account_charge(cache->account, 64 * MIB);
    cache->freed = farheap_account_free(cache->account);
    return bytes;
}

static void accounts(farheap_manager *manager, farheap_pool *pool) {
    struct cache cache = {NULL, 8 * MIB, FARHEAP_OK, FARHEAP_OK};
    OK(farheap_account_new(manager, "plans", &cache.account));
    farheap_account *plans = cache.account, *pages = NULL, *temporary = NULL;
    OK(farheap_pool_account(pool, &pages));
    CHECK(farheap_account_used(pages) > 0);
    OK(farheap_pool_evict_all(pool));
    OK(farheap_account_charge(plans, 8 * MIB));
    CHECK(farheap_account_used(plans) == 8 * MIB);
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_uncharge(plans, 8 * MIB + 1));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_account_try_charge(plans, 15 * MIB));
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_account_charge(plans, 17 * MIB));
    OK(farheap_account_try_charge(plans, 4096));
    OK(farheap_account_uncharge(plans, 4096));
    OK(farheap_account_on_reclaim(plans, give_way, &cache));
    FAILS(FARHEAP_E_CONFIG, farheap_account_on_reclaim(plans, give_way, &cache));
    void *memory = NULL;
    OK(farheap_manager_allocate_temporary(manager, 12 * MIB, &memory)); /* the plans give way */
    CHECK(farheap_account_used(plans) == 0 && cache.bytes == 0);
    CHECK(cache.within == FARHEAP_E_OUT_OF_MEMORY && cache.freed == FARHEAP_E_IN_USE);
    OK(farheap_manager_free_temporary(manager, memory));

    farheap_consumer_stats figures = {.size = sizeof figures};
    uint64_t index = 0;
    while (strcmp(figures.name, "plans")) OK(farheap_manager_consumer(manager, index++, &figures));
    CHECK(figures.used_bytes == 0 && figures.used_bytes_max >= 8 * MIB);
    CHECK(figures.reclaimed_bytes == 8 * MIB);
    FAILS(FARHEAP_E_BAD_RANGE, farheap_manager_consumer(manager, 16, &figures));
    figures.size = 8;
    FAILS(FARHEAP_E_ARGUMENT, farheap_manager_consumer(manager, 0, &figures));

    OK(farheap_account_set_used(plans, MIB));
    CHECK(farheap_account_used(plans) == MIB && farheap_account_held(plans) == MIB);
    OK(farheap_account_charge(plans, MIB)); /* beside it, which is a mistake: nothing wraps */
    OK(farheap_account_set_used(plans, MIB));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_uncharge(plans, MIB + 1));
    CHECK(farheap_account_used(plans) == MIB);
    farheap_manager_stats all = {.size = sizeof all};
    OK(farheap_manager_stats_get(manager, &all));
    CHECK(all.held_bytes == all.used_bytes && all.held_bytes_max >= all.held_bytes);
    OK(farheap_account_set_floor(plans, 2 * MIB));
    CHECK(farheap_account_floor(plans) == 2 * MIB);
    FAILS(FARHEAP_E_LIMIT_EXCEEDED, farheap_account_set_floor(plans, 17 * MIB));
    OK(farheap_account_set_ceiling(plans, 4 * MIB));
    CHECK(farheap_account_floor(plans) == 2 * MIB && farheap_account_ceiling(plans) == 4 * MIB);
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_account_charge(plans, 5 * MIB));

    OK(farheap_manager_temporary_account(manager, &temporary));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_charge(pages, 1)); /* the library's */
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_try_charge(pages, 1));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_uncharge(pages, 1));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_set_used(temporary, 1));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_on_reclaim(temporary, give_way, &cache));
    OK(farheap_account_set_floor(pages, MIB));
    OK(farheap_account_set_floor(pages, 0));
    OK(farheap_account_free(pages));
    OK(farheap_account_free(temporary));
    OK(farheap_account_free(plans)); /* with what is charged */
    FAILS(FARHEAP_E_HANDLE, farheap_account_free(plans));
}

static void eviction(farheap_pool *pool) {
    farheap_pool_stats stats = {.size = sizeof stats};
    farheap_page page = {0};
    uint64_t freed = 0;
    OK(farheap_pool_allocate(pool, &page));
    OK(farheap_page_unfix(&page));
    OK(farheap_pool_flush(pool));
    OK(farheap_pool_evict_clean(pool, MIB, &freed));
    CHECK(freed > 0);
    FAILS(FARHEAP_E_NULL, farheap_pool_evict_clean(pool, MIB, NULL));
    OK(farheap_pool_evict_all(pool));
    OK(farheap_pool_stats_get(pool, &stats));
    CHECK(stats.evicted > 0 && stats.resident_bytes == 0);
}

/* A structure of the version before ends before `replacement`, whatever lies behind it. */
static void an_old_config(farheap_manager *manager, const char *path) {
    farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
    farheap_pool *pool = NULL;
    config.page = 8192;
    config.replacement = (farheap_replacement)77;
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_open(manager, &config, path, &pool));
    config.size = offsetof(farheap_pool_config, replacement);
    OK(farheap_pool_open(manager, &config, path, &pool));
    OK(farheap_pool_free(pool));
    config.size = sizeof config;
    config.replacement = FARHEAP_REPLACEMENT_CLOCK;
    OK(farheap_pool_open(manager, &config, path, &pool));
    OK(farheap_pool_free(pool));
}

static void an_empty_file(farheap_manager *manager, const char *path) {
    farheap_pool *pool = NULL;
    FILE *file = fopen(path, "w");
    CHECK(file);
    fclose(file);
    FAILS(FARHEAP_E_DEVICE, farheap_pool_create(manager, NULL, path, 64 * MIB, &pool));
    const char *message = farheap_last_message(); /* what it is, how large it must be, what to do */
    CHECK(strstr(message, path) && strstr(message, "exists and has 0 bytes, but 64.0 MiB"));
    CHECK(strstr(message, "delete it") && strstr(message, "truncate --size=67108864"));
    unlink(path);
}

/* Far memory, table pages and temporary memory under one limit. */
static void one_limit_for_all(void) {
    farheap_manager *manager = NULL;
    farheap_heap *heap = NULL;
    void *sorted = NULL;
    OK(farheap_manager_new(32 * MIB, &manager));
    FAILS(FARHEAP_E_CONFIG, farheap_start_under(manager, "limitt:1GiB", &heap));
    FAILS(FARHEAP_E_NULL, farheap_start_config_under(manager, NULL, &heap));
    farheap_config config = FARHEAP_CONFIG_INIT;
    config.capacity = 256 * MIB;
    farheap_status status = farheap_start_config_under(manager, &config, &heap);
    if (status == FARHEAP_E_UFFD_UNAVAILABLE) {
        printf("far memory is not permitted: %s\n", farheap_last_message());
        OK(farheap_manager_free(manager));
        return;
    }
    CHECK(status == FARHEAP_OK);
    FAILS(FARHEAP_E_ALREADY_RUNNING, farheap_start_under(manager, NULL, &heap));
    unsigned char *far = far_allocate(FARHEAP_FAR, 24 * MIB, 16);
    CHECK(far);
    memset(far, 1, 24 * MIB);
    OK(farheap_manager_allocate_temporary(manager, 64 * MIB, &sorted)); /* twice the limit */
    CHECK(farheap_manager_is_spilled(manager, sorted));
    memset(sorted, 2, 64 * MIB);
    farheap_manager_stats stats = {.size = sizeof stats};
    OK(farheap_manager_stats_get(manager, &stats));
    /* The heap's local memory is counted when it is there already. */
    CHECK(stats.used_bytes_max <= 33 * MIB && stats.spilled_bytes >= 64 * MIB);
    for (size_t at = 0; at < 24 * MIB; at += 4096) CHECK(far[at] == 1);
    for (size_t at = 0; at < 64 * MIB; at += 4096) CHECK(((unsigned char *)sorted)[at] == 2);
    OK(farheap_manager_free_temporary(manager, sorted));
    farheap_account *account = NULL;
    OK(farheap_heap_account(heap, &account));
    CHECK(farheap_account_used(account) > 0);
    OK(farheap_account_set_floor(account, 9 * MIB));
    CHECK(farheap_account_floor(account) == 9 * MIB);
    OK(farheap_account_set_floor(account, MIB)); /* a far heap keeps what it needs to serve faults */
    CHECK(farheap_account_floor(account) == 8 * MIB);
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_uncharge(account, 1));
    OK(farheap_account_free(account));
    OK(farheap_manager_free(manager)); /* the handle; the limit holds on */
    memset(far, 3, 24 * MIB);
    far_free(far);
    OK(farheap_shutdown(heap));
    OK(farheap_heap_free(heap));
}

int main(void) {
    one_limit_for_all();
    farheap_manager *manager = NULL;
    OK(farheap_manager_new(64 * MIB, &manager));
    void *memory = NULL;
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_manager_allocate_temporary(manager, 65 * MIB, &memory));
    OK(farheap_manager_free(manager));
    OK((farheap_manager_new)(MIB, &manager)); /* as bindings call it */
    OK(farheap_manager_free(manager));

    OK(farheap_manager_new(24 * MIB, &manager));
    OK(farheap_manager_set_limit(manager, 16 * MIB));
    CHECK(farheap_manager_limit(manager) == 16 * MIB);
    OK(farheap_manager_set_deadline(manager, 100));
    OK(farheap_manager_on_pressure(manager, on_pressure, &told));
    FAILS(FARHEAP_E_CONFIG, farheap_manager_on_pressure(manager, on_pressure, &told));
    temporary_memory(manager);
    small_temporary_objects(manager);

    const char *dir = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/farheap-table-XXXXXX", dir ? dir : "/tmp");
    int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    unlink(path);
    redo(manager, path);
    tables(manager, path);
    whole_pages(manager, path);
    farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
    config.page = 8192;
    config.deadline_ms = 1000;
    config.checksum = FARHEAP_ON;
    config.cleaner = FARHEAP_ON;
    config.before_write = before_write;
    config.userdata = &lsn_written;
    farheap_pool *pool = NULL;
    OK(farheap_pool_create(manager, &config, path, 64 * MIB, &pool));
    guards(pool);
    many_pages_and_buffers(pool);
    the_log_is_asked_before_a_write(pool);
    accounts(manager, pool);
    eviction(pool);
    OK(farheap_pool_free(pool));
    FAILS(FARHEAP_E_HANDLE, farheap_pool_flush(pool));

    config.before_write = NULL;
    OK(farheap_pool_open(manager, &config, path, &pool));
    CHECK(farheap_pool_pages(pool) > 4096);
    OK(farheap_pool_free(pool));
    an_old_config(manager, path);
    config.page = 4096;
    FAILS(FARHEAP_E_DEVICE, farheap_pool_open(manager, &config, path, &pool));
    config.page = 5000;
    FAILS(FARHEAP_E_CONFIG, farheap_pool_create(manager, &config, path, 64 * MIB, &pool));
    config.page = 8192;
    FAILS(FARHEAP_E_DEVICE, farheap_pool_create(manager, &config, path, 64 * MIB, &pool));
    CHECK(strstr(farheap_last_message(), "holds data at byte 0"));
    config.overwrite = (farheap_switch)9;
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_create(manager, &config, path, 64 * MIB, &pool));
    config.overwrite = FARHEAP_OFF;
    OK(farheap_pool_open(manager, &config, path, &pool));
    CHECK(farheap_pool_pages(pool) > 4096); /* what was refused is as it was */
    OK(farheap_pool_free(pool));
    config.overwrite = FARHEAP_ON;
    OK(farheap_pool_create(manager, &config, path, 64 * MIB, &pool));
    CHECK(farheap_pool_pages(pool) == 2);
    OK(farheap_pool_free(pool));
    config.size = 3;
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_create(manager, &config, path, 64 * MIB, &pool));
    FAILS(FARHEAP_E_DEVICE, farheap_pool_open(manager, NULL, "/nonexistent/table", &pool));
    unlink(path);
    an_empty_file(manager, path);
    OK(farheap_manager_free(manager));
    return 0;
}
