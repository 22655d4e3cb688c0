/* What an attacker tries: sizes and alignments that overflow, texts of a megabyte, paths that are no
 * files, numbers that no field can hold. Each call fails with a code, or does what it says. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <unistd.h>

enum { LONG_TEXT = 1 << 20 };
static char long_text[LONG_TEXT + 1];

/* An allocation that must fail as `malloc` does. */
#define REFUSED(code, number, call)                     \
    do {                                                \
        errno = 0;                                      \
        NOTHING(code, call);                            \
        CHECK(errno == (number));                       \
        CHECK(strlen(farheap_last_message()) > 10);     \
    } while (0)

static void sizes_and_alignments(void) {
    const size_t huge[] = {SIZE_MAX, SIZE_MAX - 4095, SIZE_MAX / 2 + 1, SIZE_MAX / 2, (size_t)1 << 62};
    for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
        REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_malloc(huge[i]));
        REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_calloc(1, huge[i]));
        REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_aligned_alloc(64, huge[i]));
        REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_allocate(FARHEAP_LOCAL, huge[i], 1));
        char *block = far_malloc(100);
        block[99] = 7;
        REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_realloc(block, huge[i]));
        CHECK(block[99] == 7 && far_usable_size(block) >= 100);
        far_free(block);
    }
    /* Products that wrap around to 0, 4 and 2^63. */
    REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_calloc((size_t)1 << 32, (size_t)1 << 32));
    REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_calloc(((size_t)1 << 62) + 1, 4));
    REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_calloc(SIZE_MAX, SIZE_MAX));
    REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_calloc(SIZE_MAX / 2 + 1, 1));
    const size_t wrong[] = {0, 3, 24, SIZE_MAX, SIZE_MAX / 2};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REFUSED(FARHEAP_E_ARGUMENT, EINVAL, far_aligned_alloc(wrong[i], 64));
        REFUSED(FARHEAP_E_ARGUMENT, EINVAL, far_allocate(FARHEAP_LOCAL, 64, wrong[i]));
    }
    REFUSED(FARHEAP_E_ARGUMENT, EINVAL, far_allocate((farheap_placement)77, 64, 16));
    REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_aligned_alloc((size_t)1 << 63, 1));
    REFUSED(FARHEAP_E_OUT_OF_MEMORY, ENOMEM, far_aligned_alloc((size_t)1 << 62, SIZE_MAX / 4));
    for (size_t align = 1; align <= (size_t)1 << 24; align *= 2) {
        char *block = far_aligned_alloc(align, 1);
        CHECK(block && (uintptr_t)block % align == 0 && far_usable_size(block) >= 1);
        *block = 1;
        far_free(block);
    }
    for (int log = 40; log < 64; log++) { /* the far heap has one such address, or none */
        for (size_t size = 1; size <= (size_t)1 << 20; size <<= 10) {
            char *block = far_allocate(FARHEAP_FAR, size, (size_t)1 << log);
            CHECK((uintptr_t)block % ((size_t)1 << log) == 0 && (!block || log < 47));
            far_free(block);
        }
    }
    /* Nothing is one byte, and each block another. */
    void *nothing[6] = {far_malloc(0), far_calloc(0, 8), far_calloc(SIZE_MAX, 0),
                        far_aligned_alloc(4096, 0), far_allocate(FARHEAP_LOCAL, 0, 1),
                        far_realloc(NULL, 0)};
    for (int i = 0; i < 6; i++) {
        CHECK(nothing[i] && far_usable_size(nothing[i]) >= 1);
        for (int k = 0; k < i; k++) CHECK(nothing[i] != nothing[k]);
    }
    for (int i = 0; i < 6; i++) far_free(nothing[i]);
    char *block = far_realloc(far_malloc(10), 0);
    CHECK(block);
    far_free_sized(block, 0, 16);
    far_free(NULL);
    far_free_sized(NULL, SIZE_MAX, 3);
    CHECK(far_usable_size(NULL) == 0 && !far_contains(NULL) && !far_contains((void *)UINTPTR_MAX));
}

/* A call that must fail with a code, and with a message of a length that a log can take. */
#define BRIEFLY(code, call)                              \
    do {                                                 \
        FAILS(code, call);                               \
        CHECK(strlen(farheap_last_message()) < 1000);    \
    } while (0)

static const char *filled(const char *with) {
    size_t len = strlen(with);
    for (size_t i = 0; i < LONG_TEXT; i++) long_text[i] = with[i % len];
    return long_text;
}

static void texts(void) {
    OK(farheap_check_config("far_limit:16MiB\0,nonsense:1")); /* a string ends at its zero */
    const char *patterns[] = {"a", "far_limit:16MiB,", "limit:", ",", ":", "\"", "\\", "9"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        BRIEFLY(FARHEAP_E_CONFIG, farheap_check_config(filled(patterns[i])));
    }
    memcpy(long_text, "limit:", 6);
    BRIEFLY(FARHEAP_E_CONFIG, farheap_check_config(long_text));
    OK(farheap_check_config(filled(" ")));
    const char *wrong[] = {
        "limit", "limit:", "limit:-1", "far_limit:0", "far_limit:1e400", "limit:NaN", "far_limit:101%", "far_limit:0%",
        "far_limit:99999999999999999999GiB", "far_limit:18446744073709551615GiB", "handlers:65", "page:1",
        "page:16GiB", "handlers:0", "handlers:65", "handlers:99999999999", "deadline:-1s",
        "capacity:0", "span:1", "span:18446744073709551615", ":", ",,", "device:", "mode:\x01",
        "limt:1GiB", "far_limit:16MiB,far_limit:17MiB", "device:/x,dir:/y", "LIMIT:16MiB;x", "threshold:-"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        BRIEFLY(FARHEAP_E_CONFIG, farheap_check_config(wrong[i]));
    }
    BRIEFLY(FARHEAP_E_ARGUMENT, farheap_check_config("limit:\xFF\xFE"));
    farheap_config config = FARHEAP_CONFIG_INIT;
    farheap_heap *heap = NULL;
    config.mode = filled("x");
    BRIEFLY(FARHEAP_E_CONFIG, farheap_start_config(&config, &heap));
    config.mode = "auto,far_limit:1"; /* one value, not a second key */
    BRIEFLY(FARHEAP_E_CONFIG, farheap_start_config(&config, &heap));
    config.mode = NULL;
    config.size = SIZE_MAX;
    BRIEFLY(FARHEAP_E_ARGUMENT, farheap_start_config(&config, &heap));
    config.size = 0;
    BRIEFLY(FARHEAP_E_ARGUMENT, farheap_start_config(&config, &heap));
    CHECK(!heap);
}

static void numbers_of_a_manager(void) {
    farheap_manager *m = NULL;
    farheap_temporary *t = NULL;
    void *memory = NULL;
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_manager_new(0, &m));
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_manager_new(1, &m));
    OK(farheap_manager_new(UINT64_MAX, &m));
    FAILS(FARHEAP_E_OS, farheap_manager_allocate_temporary(m, SIZE_MAX / 2, &memory));
    OK(farheap_manager_free(m));
    OK(farheap_manager_new(8 * MIB, &m));
    OK(farheap_manager_set_deadline(m, UINT64_MAX));
    OK(farheap_manager_set_deadline(m, 0));
    OK(farheap_manager_allocate_temporary(m, 0, &memory)); /* a page */
    OK(farheap_manager_free_temporary(m, memory));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_manager_free_temporary(m, &m));
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_manager_set_limit(m, 0));
    OK(farheap_manager_set_limit(m, UINT64_MAX));
    OK(farheap_manager_set_limit(m, 8 * MIB));
    OK(farheap_manager_set_temporary_ceiling(m, UINT64_MAX));
    OK(farheap_temporary_new(m, &t));
    NOTHING(FARHEAP_E_ARGUMENT, farheap_temporary_allocate(t, SIZE_MAX, 8));
    NOTHING(FARHEAP_E_ARGUMENT, farheap_temporary_allocate(t, 8, 0));
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, farheap_temporary_allocate(t, SIZE_MAX / 2 - 100, 8));
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, farheap_temporary_allocate(t, 8, (size_t)1 << 62));
    void *a = farheap_temporary_allocate(t, 0, 1), *b = farheap_temporary_allocate(t, 0, 1);
    CHECK(a && b && a != b);
    FAILS(FARHEAP_E_PANIC, farheap_temporary_deallocate(t, (char *)a + 1, 0, 1));
    FAILS(FARHEAP_E_PANIC, farheap_temporary_deallocate(t, &m, 8, 8));
    FAILS(FARHEAP_E_PANIC, farheap_temporary_deallocate(t, &m, MIB, 8));
    FAILS(FARHEAP_E_ARGUMENT, farheap_temporary_deallocate(t, &m, SIZE_MAX, 8));
    OK(farheap_temporary_deallocate(t, a, 0, 1));
    OK(farheap_temporary_deallocate(t, b, 0, 1));
    OK(farheap_temporary_free(t));
    OK(farheap_manager_free(m));
}

static uint64_t lie(void *userdata, uint64_t want, farheap_reclaim_cost cost) {
    farheap_manager_stats stats = {.size = sizeof stats};
    (void)want, (void)cost;
    OK(farheap_manager_stats_get(userdata, &stats)); /* looking is allowed */
    return UINT64_MAX;
}

static void *free_it(void *temporary) {
    const farheap_status status = farheap_temporary_free(temporary);
    CHECK(status == FARHEAP_OK || status == FARHEAP_E_HANDLE);
    return status == FARHEAP_OK ? temporary : NULL;
}

/* Of two threads that free a handle one does, and the other is told. */
static void two_threads_free_one_handle(farheap_manager *m) {
    for (int i = 0; i < 200; i++) {
        farheap_temporary *t = NULL;
        void *here = NULL, *there = NULL;
        pthread_t thread;
        OK(farheap_temporary_new(m, &t));
        CHECK(!pthread_create(&thread, NULL, free_it, t));
        here = free_it(t);
        CHECK(!pthread_join(thread, &there));
        CHECK(!here != !there);
    }
}

static void an_account(void) {
    farheap_manager *m = NULL;
    farheap_account *a = NULL, *many[32];
    OK(farheap_manager_new(8 * MIB, &m));
    OK(farheap_manager_set_deadline(m, 10));
    FAILS(FARHEAP_E_NULL, farheap_account_new(m, NULL, &a));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_new(m, "\xFF", &a));
    OK(farheap_account_new(m, filled("\xF0\x9F\x90\x82"), &a)); /* a megabyte, cut to characters */
    farheap_consumer_stats figures = {.size = sizeof figures};
    OK(farheap_manager_consumer(m, 1, &figures));
    CHECK(strlen(figures.name) == 60);
    FAILS(FARHEAP_E_BAD_RANGE, farheap_manager_consumer(m, UINT64_MAX, &figures));
    const uint64_t huge[] = {UINT64_MAX, UINT64_MAX / 2, (uint64_t)1 << 62};
    for (int i = 0; i < 3; i++) {
        FAILS(FARHEAP_E_ARGUMENT, farheap_account_charge(a, huge[i]));
        FAILS(FARHEAP_E_ARGUMENT, farheap_account_try_charge(a, huge[i]));
        FAILS(FARHEAP_E_ARGUMENT, farheap_account_uncharge(a, huge[i]));
        FAILS(FARHEAP_E_ARGUMENT, farheap_account_set_used(a, huge[i]));
        FAILS(FARHEAP_E_LIMIT_EXCEEDED, farheap_account_set_floor(a, huge[i]));
        OK(farheap_account_set_ceiling(a, huge[i]));
    }
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_account_charge(a, (uint64_t)1 << 60));
    OK(farheap_account_set_used(a, (uint64_t)1 << 60)); /* what can only be counted is counted */
    CHECK(farheap_account_used(a) == 8 * MIB && farheap_account_held(a) == (uint64_t)1 << 60);
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_account_try_charge(a, 1));
    OK(farheap_account_set_used(a, 0));
    FAILS(FARHEAP_E_ARGUMENT, farheap_account_uncharge(a, 1));
    OK(farheap_account_uncharge(a, 0));
    int made = 0;
    while (made < 32 && farheap_account_new(m, "", &many[made]) == FARHEAP_OK) made++;
    CHECK(made > 0 && farheap_last_status() == FARHEAP_E_TOO_MANY_CONSUMERS);
    while (made > 0) OK(farheap_account_free(many[--made]));
    /* A callback that frees nothing and says the contrary. */
    void *memory = NULL;
    OK(farheap_account_set_floor(a, 0));
    OK(farheap_account_charge(a, 6 * MIB));
    OK(farheap_account_on_reclaim(a, lie, m));
    FAILS(FARHEAP_E_OUT_OF_MEMORY, farheap_manager_allocate_temporary(m, 4 * MIB, &memory));
    OK(farheap_account_uncharge(a, 6 * MIB));
    two_threads_free_one_handle(m);
    OK(farheap_account_charge(a, MIB));
    OK(farheap_manager_free(m)); /* the account keeps the manager */
    OK(farheap_account_charge(a, MIB));
    OK(farheap_account_free(a));
}

static void a_pool(void) {
    farheap_manager *m = NULL;
    farheap_pool *p = NULL;
    OK(farheap_manager_new(8 * MIB, &m));
    const char *paths[] = {"", "/", "/dev/null", "/proc/self/mem", "/dev/zero", filled("x")};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        BRIEFLY(FARHEAP_E_DEVICE, farheap_pool_create(m, NULL, paths[i], MIB, &p));
        BRIEFLY(FARHEAP_E_DEVICE, farheap_pool_open(m, NULL, paths[i], &p));
    }
    FAILS(FARHEAP_E_NULL, farheap_pool_create(m, NULL, NULL, MIB, &p));
    const char *dir = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/farheap-table-XXXXXX", dir ? dir : "/tmp");
    int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    unlink(path);
    const uint64_t capacities[] = {0, 1, 4095, 4096, MIB + 1, UINT64_MAX, UINT64_MAX - 4095,
                                   (uint64_t)1 << 63, (uint64_t)1 << 62};
    for (size_t i = 0; i < sizeof capacities / sizeof *capacities; i++) {
        BRIEFLY(FARHEAP_E_DEVICE, farheap_pool_create(m, NULL, path, capacities[i], &p));
    }
    farheap_pool_config config = FARHEAP_POOL_CONFIG_INIT;
    config.page = UINT64_MAX;
    FAILS(FARHEAP_E_CONFIG, farheap_pool_create(m, &config, path, MIB, &p));
    config.page = 0;
    config.checksum = (farheap_switch)9;
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_create(m, &config, path, MIB, &p));
    config.checksum = FARHEAP_OFF;
    config.deadline_ms = UINT64_MAX;
    OK(farheap_pool_create(m, &config, path, MIB, &p));
    farheap_page page = {0}, pages[4];
    OK(farheap_pool_allocate(p, &page));
    const uint64_t id = page.id;
    OK(farheap_page_unfix(&page));
    const uint64_t ids[] = {0, 255, 256, (uint64_t)1 << 52, (uint64_t)1 << 63, UINT64_MAX - 1,
                            UINT64_MAX, UINT64_MAX / 4096 + 1};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_shared(p, ids[i], &page));
        FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_exclusive(p, ids[i], &page));
        FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_optimistic(p, ids[i], &page));
        FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_many(p, &ids[i], 1, pages));
        CHECK(farheap_pool_try_fix_shared(p, ids[i], &page) != FARHEAP_OK);
        CHECK(farheap_pool_try_fix_exclusive(p, ids[i], &page) != FARHEAP_OK);
        OK(farheap_pool_prefetch(p, &ids[i], 1)); /* advice */
    }
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_fix_many(p, ids, SIZE_MAX, pages));
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_prefetch(p, ids, SIZE_MAX / 8));
    const uint64_t same[] = {id, id, id, id}, half[] = {id, UINT64_MAX};
    OK(farheap_pool_fix_many(p, same, 4, pages));
    for (int i = 0; i < 4; i++) OK(farheap_page_unfix(&pages[i]));
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_pool_fix_many(p, half, 2, pages));
    FAILS(FARHEAP_E_LIMIT_EXCEEDED, farheap_pool_set_floor(p, UINT64_MAX));
    OK(farheap_pool_set_ceiling(p, UINT64_MAX));
    farheap_btree *tree = NULL;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_btree_open(p, ids[i], &tree));
    }
    farheap_pool_stats stats = {.size = SIZE_MAX};
    FAILS(FARHEAP_E_ARGUMENT, farheap_pool_stats_get(p, &stats));
    memset(&page, 0xFF, sizeof page);
    FAILS(FARHEAP_E_HANDLE, farheap_page_unfix(&page));
    page.kind = FARHEAP_PAGE_EXCLUSIVE;
    FAILS(FARHEAP_E_HANDLE, farheap_page_unfix(&page));
    NOTHING(FARHEAP_E_HANDLE, farheap_page_write(&page));
    OK(farheap_pool_free(p)); /* and nothing of it is held */
    OK(farheap_manager_free(m));
    unlink(path);
}

static void a_collective(void) {
    farheap_collective *c = NULL;
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_new("far_limit:8MiB,capacity:64MiB", UINT64_MAX, 0, &c));
    FAILS(FARHEAP_E_CONFIG, farheap_collective_new("far_limit:8MiB,capacity:64MiB", 0, 5000, &c));
    skip_unless_permitted(farheap_collective_new("far_limit:8MiB,capacity:64MiB", 0, 0, &c));
    NOTHING(FARHEAP_E_FULL, farheap_collective_allocate(c, FARHEAP_PURELY_LOCAL, 8, 8));
    for (uint32_t kind = FARHEAP_PURELY_LOCAL; kind <= FARHEAP_NEW_PER_PAGE; kind++) {
        NOTHING(FARHEAP_E_ARGUMENT, farheap_collective_allocate(c, kind, SIZE_MAX, 8));
        NOTHING(FARHEAP_E_ARGUMENT, farheap_collective_allocate(c, kind, 8, 0));
        NOTHING(FARHEAP_E_ARGUMENT, farheap_collective_allocate(c, kind, 8, 3));
        NOTHING(FARHEAP_E_ALIGN, farheap_collective_allocate(c, kind, 8, (size_t)1 << 62));
        CHECK(!farheap_collective_allocate(c, kind, SIZE_MAX / 2 - 4096, 8));
    }
    NOTHING(FARHEAP_E_ARGUMENT, farheap_collective_allocate(c, 0, 8, 8));
    NOTHING(FARHEAP_E_ARGUMENT, farheap_collective_allocate(c, UINT32_MAX, 8, 8));
    farheap_suballocator sub = {0};
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_suballocator(c, 0, &sub));
    OK(farheap_collective_suballocator(c, FARHEAP_NEW_PER_PAGE, &sub));
    CHECK(!farheap_suballocator_is_occupancy_under(&sub, NAN));
    CHECK(!farheap_suballocator_is_occupancy_under(&sub, -1));
    CHECK(farheap_suballocator_is_occupancy_under(&sub, INFINITY));
    void *page = farheap_suballocator_allocate(&sub, 4096, 1);
    CHECK(page);
    NOTHING(FARHEAP_E_FULL, farheap_suballocator_allocate(&sub, 0, 1));
    NOTHING(FARHEAP_E_TOO_LARGE, farheap_suballocator_allocate(&sub, 4097, 1));
    OK(farheap_collective_deallocate(c, page, 4096, 1));
    int on_stack;
    FAILS(FARHEAP_E_BAD_RANGE, farheap_collective_deallocate(c, &on_stack, 4, 4));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_collective_deallocate(c, (void *)UINTPTR_MAX, 4, 4));
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_deallocate(c, &on_stack, SIZE_MAX, 4));
    /* Wrong sizes, the inside of an object, a second time: told, and nothing has changed. */
    char *small = farheap_collective_allocate(c, FARHEAP_SWAPPABLE_PLAIN, 100, 8);
    char *large = farheap_collective_allocate(c, FARHEAP_SWAPPABLE_PLAIN, 10000, 8);
    CHECK(small && large);
    memset(small, 5, 100);
    memset(large, 6, 10000);
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, small, 4000, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, small, 100000, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, small + 1, 100, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, large, 5000, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, large, 100000, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, large, 100, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, large + 4096, 5000, 8));
    CHECK(small[99] == 5 && large[9999] == 6);
    OK(farheap_collective_deallocate(c, small, 100, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, small, 100, 8));
    OK(farheap_collective_deallocate(c, large, 10000, 8));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(c, large, 10000, 8));
    CHECK(farheap_collective_pin(c, page, SIZE_MAX) != FARHEAP_OK);
    CHECK(farheap_collective_advise(c, page, SIZE_MAX, FARHEAP_ADVICE_COLD) != FARHEAP_OK);
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_advise(c, page, 1, (farheap_advice)9));
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_collective_set_limit(c, 0));
    OK(farheap_collective_set_limit(c, UINT64_MAX));
    OK(farheap_suballocator_release(&sub));
    OK(farheap_collective_free(c));
}

static pthread_key_t at_the_end;

/* After the library's own destructors for the thread have run. */
static void allocate_at_the_end(void *block) {
    far_free(block);
    unsigned char *far = far_allocate(FARHEAP_FAR, 100, 16), *any = far_malloc(MIB);
    if (far) { /* there may be none for such a thread any more */
        CHECK(far_contains(far));
        far[99] = 1;
        far_free(far);
    }
    CHECK(any);
    any[MIB - 1] = 1;
    far_free_sized(any, MIB, 16);
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_pop());
}

static void *end(void *with_a_far_block) {
    void *block = far_allocate(with_a_far_block ? FARHEAP_FAR : FARHEAP_LOCAL, 100, 16);
    CHECK(block && !pthread_setspecific(at_the_end, block));
    OK(farheap_scope_push(FARHEAP_FAR)); /* both end with the thread */
    OK(farheap_scope_push(FARHEAP_LOCAL));
    return NULL;
}

static void threads_that_end(farheap_heap *heap) {
    CHECK(!pthread_key_create(&at_the_end, allocate_at_the_end));
    for (int i = 0; i < 16; i++) {
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, end, i % 2 ? heap : NULL));
        CHECK(!pthread_join(thread, NULL));
    }
    farheap_stats stats = {.size = sizeof stats};
    OK(farheap_heap_stats(heap, &stats));
    CHECK(stats.allocated_bytes == 0);
}

int main(void) {
    sizes_and_alignments();
    texts();
    numbers_of_a_manager();
    an_account();
    a_pool();
    a_collective();
    farheap_heap *heap = NULL;
    skip_unless_permitted(farheap_start("far_limit:16MiB,capacity:64MiB,threshold:64KiB,mode:user", &heap));
    sizes_and_alignments();
    OK(farheap_scope_push(FARHEAP_FAR));
    sizes_and_alignments();
    OK(farheap_scope_pop());
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_pop());
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_push((farheap_placement)9));
    threads_that_end(heap);
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_set_far_limit(heap, 0));
    OK(farheap_set_far_limit(heap, UINT64_MAX));
    OK(farheap_set_far_limit(heap, 16 * MIB));
    OK(farheap_shutdown(heap));
    OK(farheap_heap_free(heap));
    return 0;
}
