/* The far heap from C: memory, scopes, hints, statistics, configuration. */
#define _DEFAULT_SOURCE
#include "check.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define WORDS ((size_t)8 << 20) /* 64 MiB, four times the limit */

static void memory_without_a_heap_is_local(void) {
    char *block = far_malloc(100);
    CHECK(block && !far_contains(block) && far_usable_size(block) >= 100);
    memset(block, 7, 100);
    block = far_realloc(block, 1000);
    CHECK(block && block[0] == 7 && block[99] == 7);
    far_free(block);
    unsigned char *zeros = far_calloc(1000, 3);
    CHECK(zeros);
    for (int i = 0; i < 3000; i++) CHECK(zeros[i] == 0);
    far_free_sized(zeros, 3000, 16);
    for (size_t align = 1; align <= 2 * MIB; align *= 2) {
        void *aligned = far_aligned_alloc(align, 100);
        CHECK(aligned && (uintptr_t)aligned % align == 0);
        far_free(aligned);
    }
    void *nothing = far_malloc(0);
    CHECK(nothing);
    far_free(nothing);
    far_free(NULL);
    far_free_sized(NULL, 8, 8);
    CHECK(far_usable_size(NULL) == 0);
    errno = 0;
    NOTHING(FARHEAP_E_NOT_RUNNING, far_allocate(FARHEAP_FAR, 100, 16));
    CHECK(errno == ENOMEM);
    void *local = far_allocate(FARHEAP_LOCAL, 100, 64);
    CHECK(local && (uintptr_t)local % 64 == 0);
    far_free_sized(local, 100, 64);
}

static void version_and_features(void) {
    CHECK(farheap_abi_version() == FARHEAP_ABI_VERSION);
    CHECK(strchr(farheap_version(), '.'));
    OK(farheap_check_abi(FARHEAP_ABI_VERSION));
    FAILS(FARHEAP_E_ABI, farheap_check_abi(FARHEAP_ABI_VERSION + 1));
    for (int feature = 1; feature <= 4; feature++)
        (void)farheap_has_feature((farheap_feature)feature);
    NOTHING(FARHEAP_E_ARGUMENT, farheap_has_feature((farheap_feature)99));
    CHECK(!strcmp(farheap_status_name(FARHEAP_E_CONFIG), "FARHEAP_E_CONFIG"));
    CHECK(!strcmp(farheap_status_name((farheap_status)12345), "FARHEAP_E_UNKNOWN"));
}

static void configurations_are_checked(void) {
    OK(farheap_check_config(NULL));
    OK(farheap_check_config(""));
    OK(farheap_check_config("far_limit:16MiB"));
    FAILS(FARHEAP_E_CONFIG, farheap_check_config("far_limit:16MiB,hendlers:4"));
    CHECK(strstr(farheap_last_message(), "hendlers") && strstr(farheap_last_message(), "handlers"));
    FAILS(FARHEAP_E_CONFIG, farheap_check_config("handlers:65"));
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_check_config("far_limit:1MiB"));
    farheap_config config = FARHEAP_CONFIG_INIT;
    farheap_heap *heap = NULL;
    config.far_limit = 16 * MIB;
    config.mode = "telepathy";
    FAILS(FARHEAP_E_CONFIG, farheap_start_config(&config, &heap));
    CHECK(strstr(farheap_last_message(), "telepathy") && !heap);
    config.mode = NULL;
    config.limit = 512 * MIB;
    config.limit_percent = 50;
    FAILS(FARHEAP_E_ARGUMENT, farheap_start_config(&config, &heap));
    config.limit_percent = 0;
    config.limit = 0;
    config.checksum = (farheap_switch)7;
    FAILS(FARHEAP_E_ARGUMENT, farheap_start_config(&config, &heap));
    config.checksum = FARHEAP_DEFAULT;
    config.dir = "/nonexistent/directory";
    FAILS(FARHEAP_E_DEVICE, farheap_start_config(&config, &heap));
    config.poll_us = 501;
    FAILS(FARHEAP_E_CONFIG, farheap_start_config(&config, &heap));
    config.poll_us = 0;
    config.node = "999";
    FAILS(FARHEAP_E_CONFIG, farheap_start_config(&config, &heap));
    CHECK(strstr(farheap_last_message(), "there is no node 999"));
    config.node = NULL;
    /* What a structure does not have, because the program was built before there was `check`, is not
     * looked at. */
    config.check = (farheap_switch)7;
    FAILS(FARHEAP_E_ARGUMENT, farheap_start_config(&config, &heap));
    config.size = offsetof(farheap_config, check);
    FAILS(FARHEAP_E_DEVICE, farheap_start_config(&config, &heap));
    config.size = 8;
    FAILS(FARHEAP_E_ARGUMENT, farheap_start_config(&config, &heap));
    CHECK(!heap);
}

static unsigned lines_logged;

static void log_line(void *userdata, farheap_log_level level, const char *text) {
    if (level == FARHEAP_LOG_WARNING && strstr(text, "the kernel may end the process"))
        __atomic_add_fetch((unsigned *)userdata, 1, __ATOMIC_RELEASE);
}

/* A manager whose limit is above all memory. */
static void something_is_said(void) {
    farheap_manager *manager;
    OK(farheap_manager_new((uint64_t)1 << 50, &manager));
    OK(farheap_manager_free(manager));
}

static void messages_go_to_a_callback_while_one_is_set(void) {
    OK(farheap_set_log(log_line, &lines_logged));
    something_is_said();
    while (__atomic_load_n(&lines_logged, __ATOMIC_ACQUIRE) != 1) usleep(1000);
    OK(farheap_set_log(NULL, NULL));
    something_is_said();
    CHECK(__atomic_load_n(&lines_logged, __ATOMIC_ACQUIRE) == 1);
}

static farheap_heap *start(void) {
    farheap_config config = FARHEAP_CONFIG_INIT;
    config.far_limit = 16 * MIB;
    config.capacity = 256 * MIB;
    config.threshold = 64 << 10;
    config.span = (uint64_t)64 << 30;
    config.deadline_ms = 30000;
    config.handlers = 1;
    config.mode = "user"; /* so that sizes decide without privileges too */
    config.wipe = "off";
    config.checksum = FARHEAP_ON;
    config.readahead = FARHEAP_ON;
    config.encrypt = FARHEAP_OFF;
    config.overwrite = FARHEAP_OFF;
    config.poll_us = FARHEAP_NONE;
    farheap_heap *heap = NULL;
    skip_unless_permitted(farheap_start_config(&config, &heap));
    CHECK(heap);
    return heap;
}

static void sizes_decide_and_scopes_are_stronger(farheap_heap *heap) {
    uint64_t threshold = 0;
    OK(farheap_threshold(heap, &threshold));
    CHECK(threshold == 64 << 10);
    void *small = far_malloc(100);
    void *large = far_malloc(MIB);
    CHECK(!far_contains(small) && far_contains(large));
    CHECK(farheap_scope_number() == 0);
    OK(farheap_scope_push(FARHEAP_FAR));
    void *sent = far_malloc(100);
    OK(farheap_scope_push(FARHEAP_LOCAL));
    void *kept = far_malloc(MIB);
    OK(farheap_scope_pop());
    void *again = far_calloc(10, 10);
    OK(farheap_scope_pop());
    CHECK(farheap_scope_number() == 0);
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_pop());
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_push(FARHEAP_POLICY));
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_push((farheap_placement)9));
    CHECK(far_contains(sent) && !far_contains(kept) && far_contains(again));
    small = far_realloc(small, MIB); /* grows past the threshold */
    CHECK(far_contains(small));
    void *blocks[] = {small, large, sent, kept, again};
    for (int i = 0; i < 5; i++) far_free(blocks[i]);
}

static void far_blocks_of_all_sizes_come_and_go(void) {
    for (size_t size = 1; size <= 4 * MIB; size = size * 3 / 2 + 1) {
        for (size_t align = 1; align <= 64 << 10; align *= 16) {
            unsigned char *block = far_allocate(FARHEAP_FAR, size, align);
            CHECK(block && far_contains(block) && (uintptr_t)block % align == 0);
            CHECK(far_usable_size(block) >= size);
            block[0] = 1;
            block[size - 1] = 2;
            if (size % 2) far_free(block);
            else far_free_sized(block, size, align);
        }
    }
    OK(farheap_scope_push(FARHEAP_FAR));
    unsigned char *block = far_malloc(10);
    memset(block, 9, 10);
    for (size_t size = 20; size < 2 * MIB; size *= 2) {
        block = far_realloc(block, size);
        CHECK(block && far_contains(block) && block[0] == 9 && block[9] == 9);
    }
    block = far_realloc(block, 10);
    CHECK(block && block[9] == 9);
    far_free(block);
    OK(farheap_scope_pop());
}

static void data_larger_than_the_limit_comes_back(farheap_heap *heap) {
    uint64_t *words = far_malloc(WORDS * 8);
    CHECK(words && far_contains(words));
    for (size_t i = 0; i < WORDS; i++) words[i] = i * i;
    OK(farheap_advise(heap, words, WORDS * 8, FARHEAP_ADVICE_SEQUENTIAL));
    for (size_t i = 0; i < WORDS; i++) CHECK(words[i] == i * i);
    farheap_stats stats = {.size = sizeof stats};
    OK(farheap_heap_stats(heap, &stats));
    CHECK(stats.limit_bytes == 16 * MIB && stats.resident_bytes_max <= 16 * MIB);
    CHECK(stats.bytes_written > 0 && stats.bytes_read > 0);
    CHECK(stats.allocated_bytes == WORDS * 8);
    CHECK(stats.metadata_bytes > 0 && stats.metadata_bytes < stats.resident_bytes_max);
    farheap_latencies took = {.size = sizeof took};
    OK(farheap_heap_latencies(heap, &took));
    CHECK(took.read.count > 0 && took.read.p50_ns > 0 && took.read.p50_ns <= took.read.p99_ns);
    CHECK(took.read.p99_9_ns <= took.read.max_ns && took.write.count > 0 && took.evict.count > 0);
    farheap_account *account = NULL;
    FAILS(FARHEAP_E_ARGUMENT, farheap_heap_account(heap, &account)); /* it has a limit of its own */
    CHECK(!account);

    OK(farheap_prefetch(heap, words, MIB));
    farheap_range ranges[] = {{words, 1000}, {words + WORDS / 2, MIB}};
    OK(farheap_prefetch_many(heap, ranges, 2));
    OK(farheap_prefetch_many(heap, NULL, 0));
    OK(farheap_pin(heap, words, MIB));
    OK(farheap_evict_all(heap));
    OK(farheap_unpin(heap, words, MIB));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_unpin(heap, words, MIB));
    OK(farheap_evict(heap, words, MIB));
    FAILS(FARHEAP_E_LIMIT_EXCEEDED, farheap_pin(heap, words, 32 * MIB));
    for (int advice = 0; advice <= 4; advice++)
        OK(farheap_advise(heap, words, MIB, (farheap_advice)advice));
    FAILS(FARHEAP_E_ARGUMENT, farheap_advise(heap, words, MIB, (farheap_advice)99));
    OK(farheap_discard(heap, words, 4 * MIB));
    for (size_t i = 64 << 10; i < 3 * MIB / 8; i++) CHECK(words[i] == 0);
    CHECK(words[WORDS - 1] == (WORDS - 1) * (WORDS - 1));

    /* As the kernel does to ordinary memory, also to what has left: in units of 4 KiB. */
    char *dropped = (char *)words + 6 * MIB + (4096 - (uintptr_t)words % 4096);
    memset(dropped - 4096, 7, 5 * 4096);
    OK(farheap_evict_all(heap));
    CHECK(far_madvise(dropped, 3 * 4096 - 5, MADV_DONTNEED) == 0);
    CHECK(dropped[-1] == 7 && dropped[0] == 0 && dropped[3 * 4096 - 1] == 0 && dropped[3 * 4096] == 7);
    CHECK(far_madvise(dropped + 1, 4096, MADV_DONTNEED) == -1 && errno == EINVAL);
    CHECK(far_madvise(dropped, 4096, MADV_NORMAL) == 0);
    CHECK(far_madvise(dropped, 4096, 102 /* MADV_GUARD_INSTALL */) == -1 && errno == EINVAL);

    OK(farheap_set_far_limit(heap, 12 * MIB));
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_set_far_limit(heap, MIB));
    OK(farheap_set_far_limit(heap, 16 * MIB));
    OK(farheap_set_limit(heap, 512 * MIB));
    bool kernel_faults = false;
    OK(farheap_serves_kernel_faults(heap, &kernel_faults));

    int local = 0;
    FAILS(FARHEAP_E_BAD_RANGE, farheap_prefetch(heap, &local, sizeof local));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_evict(heap, words, 0));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_pin(heap, words, SIZE_MAX));
    FAILS(FARHEAP_E_IN_USE, farheap_shutdown(heap));
    CHECK(words[WORDS - 1] == (WORDS - 1) * (WORDS - 1));
    far_free(words);
    OK(farheap_purge(heap));
}

static void more_than_limit_and_device_hold_is_refused(void) {
    errno = 0;
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, far_malloc(1024 * MIB));
    CHECK(errno == ENOMEM);
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, far_malloc(SIZE_MAX));
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, far_calloc(SIZE_MAX / 2, 3));
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, far_calloc(SIZE_MAX, SIZE_MAX));
    NOTHING(FARHEAP_E_ARGUMENT, far_aligned_alloc(3, 100));
    CHECK(errno == EINVAL);
    NOTHING(FARHEAP_E_ARGUMENT, far_aligned_alloc(0, 100));
    NOTHING(FARHEAP_E_ARGUMENT, far_allocate((farheap_placement)9, 100, 16));
    char *block = far_malloc(100);
    block[0] = 5;
    NOTHING(FARHEAP_E_OUT_OF_MEMORY, far_realloc(block, SIZE_MAX));
    CHECK(block[0] == 5);
    far_free(block);
}

/* By default a large block goes far only where system calls may be given it. */
static void large_blocks_are_buffers_of_system_calls(farheap_heap *heap) {
    bool kernel_faults = false;
    uint64_t threshold = 0;
    OK(farheap_serves_kernel_faults(heap, &kernel_faults));
    OK(farheap_threshold(heap, &threshold));
    CHECK(threshold == (kernel_faults ? 64 << 10 : FARHEAP_NONE));
    char *buffer = far_malloc(MIB);
    CHECK(buffer && far_contains(buffer) == kernel_faults);
    FILE *zeros = fopen("/dev/zero", "rb");
    CHECK(zeros && setvbuf(zeros, NULL, _IONBF, 0) == 0);
    CHECK(fread(buffer, 1, MIB, zeros) == MIB && buffer[MIB - 1] == 0);
    CHECK(fclose(zeros) == 0);
    far_free(buffer);
    void *explicit_one = far_allocate(FARHEAP_FAR, MIB, 16);
    CHECK(explicit_one && far_contains(explicit_one));
    far_free(explicit_one);
}

static void there_is_one_heap(farheap_heap *heap) {
    farheap_heap *second = NULL, *found = NULL;
    FAILS(FARHEAP_E_ALREADY_RUNNING, farheap_start("far_limit:16MiB", &second));
    /* As bindings call them. */
    farheap_config config = FARHEAP_CONFIG_INIT;
    FAILS(FARHEAP_E_ALREADY_RUNNING, (farheap_start)("far_limit:16MiB", &second));
    FAILS(FARHEAP_E_ALREADY_RUNNING, (farheap_start_config)(&config, &second));
    FAILS(FARHEAP_E_ALREADY_RUNNING, (farheap_start_env)(&second));
    CHECK(!second);
    OK(farheap_running(&found));
    CHECK(found && found != heap);
    OK(farheap_shutdown(found));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_shutdown(heap));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_running(&second));
    farheap_stats stats = {.size = sizeof stats};
    OK(farheap_heap_stats(heap, &stats)); /* of the heap that was */
    farheap_range range = {(void *)(uintptr_t)4096, 4096};
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_evict_all(heap));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_set_limit(heap, 64 * MIB));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_evict(heap, range.ptr, range.len));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_prefetch(heap, range.ptr, range.len));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_prefetch_many(heap, &range, 1));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_pin(heap, range.ptr, range.len));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_unpin(heap, range.ptr, range.len));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_discard(heap, (void *)(uintptr_t)range.ptr, range.len));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_advise(heap, range.ptr, range.len, FARHEAP_ADVICE_COLD));
    OK(farheap_heap_free(found));
    OK(farheap_heap_free(heap));
    FAILS(FARHEAP_E_HANDLE, farheap_heap_free(heap));
    FAILS(FARHEAP_E_HANDLE, farheap_heap_stats(heap, &stats));
    CHECK(setenv("FARHEAP_CONF", "far_limit:9MiB,capacity:64MiB", 1) == 0);
    OK(farheap_start_env(&second));
    OK(farheap_heap_stats(second, &stats));
    CHECK(stats.limit_bytes == 9 * MIB);
    large_blocks_are_buffers_of_system_calls(second);
    OK(farheap_shutdown(second));
    OK(farheap_heap_free(second));
    CHECK(setenv("FARHEAP_CONF", "limmit:9MiB", 1) == 0);
    FAILS(FARHEAP_E_CONFIG, farheap_start_env(&second));
}

static void tiers_have_names_and_memory_of_their_own(farheap_heap *heap) {
    farheap_heap *cold = NULL, *found = NULL;
    FAILS(FARHEAP_E_CONFIG, farheap_add_tier(heap, "no name", "far_limit:8MiB", &cold));
    FAILS(FARHEAP_E_NULL, farheap_add_tier(heap, NULL, "far_limit:8MiB", &cold));
    FAILS(FARHEAP_E_NOT_RUNNING, farheap_find_tier("cold", &found));
    OK(farheap_add_tier(heap, "cold", "far_limit:8MiB,capacity:64MiB", &cold));
    OK(farheap_find_tier("cold", &found));
    farheap_placement here = FARHEAP_POLICY, there = FARHEAP_POLICY, by_name = FARHEAP_POLICY;
    OK(farheap_heap_placement(heap, &here));
    OK(farheap_heap_placement(cold, &there));
    OK(farheap_heap_placement(found, &by_name));
    CHECK(here == FARHEAP_FAR && there == by_name && there > FARHEAP_FAR);
    char *block = far_allocate(there, MIB, 16);
    CHECK(block && far_contains(block));
    memset(block, 5, MIB);
    OK(farheap_evict_all(cold));
    CHECK(block[0] == 5 && block[MIB - 1] == 5);
    farheap_usage usage = {.size = sizeof usage};
    OK(farheap_heap_usage(cold, &usage));
    CHECK(usage.allocated_bytes == MIB && usage.large_bytes >= MIB && usage.metadata_bytes > 0);
    OK(farheap_scope_push(there));
    char *sent = far_malloc(100);
    OK(farheap_scope_pop());
    OK(farheap_heap_usage(cold, &usage));
    CHECK(usage.allocated_bytes >= MIB + 100);
    FAILS(FARHEAP_E_IN_USE, farheap_shutdown(cold));
    far_free(block);
    far_free(sent);
    OK(farheap_shutdown(cold));
    NOTHING(FARHEAP_E_NOT_RUNNING, far_allocate(there, 100, 16));
    NOTHING(FARHEAP_E_ARGUMENT, far_allocate((farheap_placement)3, 100, 16));
    FAILS(FARHEAP_E_ARGUMENT, farheap_scope_push((farheap_placement)3));
    OK(farheap_heap_free(found));
    OK(farheap_heap_free(cold));
}

static void bump_allocators_go_at_once(void) {
    farheap_bump *bump = NULL;
    FAILS(FARHEAP_E_ARGUMENT, farheap_bump_new(FARHEAP_POLICY, &bump));
    CHECK(!bump);
    for (int far = 0; far < 2; far++) {
        OK(farheap_bump_new(far ? FARHEAP_FAR : FARHEAP_LOCAL, &bump));
        for (size_t size = 1; size <= MIB; size *= 2) {
            char *block = farheap_bump_allocate(bump, size, 64);
            CHECK(block && (uintptr_t)block % 64 == 0 && far_contains(block) == (far == 1));
            memset(block, 9, size);
        }
        void *last = farheap_bump_allocate(bump, 0, 1);
        CHECK(last);
        OK(farheap_bump_deallocate(bump, last, 0, 1));
        OK(farheap_bump_deallocate(bump, NULL, 0, 1));
        NOTHING(FARHEAP_E_ARGUMENT, farheap_bump_allocate(bump, 8, 3));
        uint64_t reserved = 0;
        OK(farheap_bump_reserved(bump, &reserved));
        CHECK(reserved >= 2 * MIB);
        OK(farheap_bump_free(bump));
        FAILS(FARHEAP_E_HANDLE, farheap_bump_free(bump));
        NOTHING(FARHEAP_E_HANDLE, farheap_bump_allocate(bump, 8, 8));
    }
    OK(farheap_bump_free(NULL));
}

int main(void) {
    memory_without_a_heap_is_local();
    version_and_features();
    configurations_are_checked();
    messages_go_to_a_callback_while_one_is_set();
    farheap_heap *heap = start();
    sizes_decide_and_scopes_are_stronger(heap);
    far_blocks_of_all_sizes_come_and_go();
    data_larger_than_the_limit_comes_back(heap);
    more_than_limit_and_device_hold_is_refused();
    tiers_have_names_and_memory_of_their_own(heap);
    bump_allocators_go_at_once();
    there_is_one_heap(heap);
    CHECK(farheap_last_errno() == 0);
    return 0;
}
