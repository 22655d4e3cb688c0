/* Collective allocators from C. */
#include "check.h"

static void kinds(farheap_collective *collective) {
    farheap_suballocator local = {0}, page = {0}, plain = {0}, found = {0};
    OK(farheap_collective_suballocator(collective, FARHEAP_PURELY_LOCAL, &local));
    OK(farheap_collective_suballocator(collective, FARHEAP_NEW_PER_PAGE, &page));
    OK(farheap_collective_suballocator(collective, FARHEAP_SWAPPABLE_PLAIN, &plain));
    void *a = farheap_suballocator_allocate(&local, 100, 8);
    void *b = farheap_suballocator_allocate(&page, 100, 8);
    void *c = farheap_suballocator_allocate(&plain, 100, 8);
    void *d = farheap_suballocator_allocate(&page, 200, 64);
    CHECK(a && b && c && d && (uintptr_t)d % 64 == 0);
    CHECK(farheap_collective_is_local(collective, a) && !farheap_collective_is_local(collective, b));
    CHECK(farheap_collective_share_a_page(collective, b, d));
    CHECK(!farheap_collective_share_a_page(collective, b, c));
    CHECK(farheap_suballocator_contains(&local, a) && !farheap_suballocator_contains(&local, b));
    CHECK(farheap_suballocator_contains(&page, b) && !farheap_suballocator_contains(&page, c));
    CHECK(farheap_suballocator_contains(&plain, c) && !farheap_suballocator_contains(&plain, a));
    CHECK(farheap_suballocator_is_occupancy_under(&page, 0.5));
    CHECK(!farheap_suballocator_is_occupancy_under(&page, 0.01));
    CHECK(farheap_suballocator_is_occupancy_under(&plain, 0.0));

    OK(farheap_collective_suballocator_of(collective, b, &found));
    CHECK(found.kind == FARHEAP_NEW_PER_PAGE && farheap_suballocator_contains(&found, d));
    void *handler[100];
    int count = 0;
    while (count < 100 && (handler[count] = farheap_suballocator_allocate(&found, 128, 8))) count++;
    CHECK(count > 10 && count < 100 && farheap_last_status() == FARHEAP_E_FULL);
    NOTHING(FARHEAP_E_TOO_LARGE, farheap_suballocator_allocate(&page, 5000, 8));
    NOTHING(FARHEAP_E_ALIGN, farheap_suballocator_allocate(&page, 16, 8192));
    NOTHING(FARHEAP_E_ARGUMENT, farheap_suballocator_allocate(&page, 16, 3));
    while (count > 0) OK(farheap_collective_deallocate(collective, handler[--count], 128, 8));
    OK(farheap_suballocator_release(&found));
    FAILS(FARHEAP_E_HANDLE, farheap_suballocator_release(&found));
    NOTHING(FARHEAP_E_HANDLE, farheap_suballocator_allocate(&found, 16, 8));
    OK(farheap_collective_suballocator_of(collective, a, &found));
    CHECK(found.kind == FARHEAP_PURELY_LOCAL);
    OK(farheap_suballocator_release(&found));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_collective_suballocator_of(collective, &found, &found));
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_suballocator(collective, 9, &found));

    void *near = farheap_collective_allocate_near(collective, b, 100, 8);
    CHECK(near && farheap_collective_share_a_page(collective, b, near));
    void *anywhere = farheap_collective_allocate_near(collective, NULL, 100, 8);
    CHECK(anywhere);
    OK(farheap_collective_deallocate(collective, near, 100, 8));
    OK(farheap_collective_deallocate(collective, anywhere, 100, 8));
    OK(farheap_collective_deallocate(collective, a, 100, 8));
    OK(farheap_collective_deallocate(collective, b, 100, 8));
    OK(farheap_collective_deallocate(collective, c, 100, 8));
    OK(farheap_collective_deallocate(collective, d, 200, 64));
    FAILS(FARHEAP_E_PANIC, farheap_collective_deallocate(collective, d, 200, 64));
    CHECK(strstr(farheap_last_message(), "twice"));
    OK(farheap_collective_deallocate(collective, NULL, 1, 1));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_collective_deallocate(collective, &found, 100, 8));
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_deallocate(collective, a, 100, 3));
    OK(farheap_suballocator_release(&local));
    OK(farheap_suballocator_release(&page));
    OK(farheap_suballocator_release(&plain));
}

static void objects_of_every_kind(farheap_collective *collective) {
    for (uint32_t kind = FARHEAP_PURELY_LOCAL; kind <= FARHEAP_NEW_PER_PAGE; kind++) {
        unsigned char *object = farheap_collective_allocate(collective, kind, 333, 16);
        CHECK(object && farheap_collective_contains(collective, object));
        memset(object, 1, 333);
        OK(farheap_collective_deallocate(collective, object, 333, 16));
    }
    NOTHING(FARHEAP_E_ARGUMENT, farheap_collective_allocate(collective, 0, 16, 8));
    NOTHING(FARHEAP_E_ARGUMENT,
            farheap_collective_allocate(collective, FARHEAP_SWAPPABLE_PLAIN, SIZE_MAX, 8));
    unsigned char *large =
        farheap_collective_allocate(collective, FARHEAP_SWAPPABLE_PLAIN, 64 * MIB, 16);
    CHECK(large);
    for (size_t at = 0; at < 64 * MIB; at += 4096) large[at] = (unsigned char)(at >> 12);
    OK(farheap_collective_evict_all(collective));
    farheap_range range = {large, MIB};
    OK(farheap_collective_prefetch_many(collective, &range, 1));
    OK(farheap_collective_advise(collective, large, MIB, FARHEAP_ADVICE_WILL_NEED));
    OK(farheap_collective_pin(collective, large, 4096));
    OK(farheap_collective_unpin(collective, large, 4096));
    for (size_t at = 0; at < 64 * MIB; at += 4096) CHECK(large[at] == (unsigned char)(at >> 12));
    OK(farheap_collective_deallocate(collective, large, 64 * MIB, 16));
}

static void figures(farheap_collective *collective) {
    CHECK(farheap_collective_page_size(collective) == 4096);
    CHECK(farheap_collective_local_capacity(collective) == MIB);
    CHECK(farheap_collective_local_used(collective) == 0);
    (void)farheap_collective_far_pages(collective);
    farheap_stats stats = {.size = sizeof stats};
    OK(farheap_collective_stats(collective, &stats));
    CHECK(stats.pages_in > 0);
    farheap_latencies took = {.size = sizeof took};
    OK(farheap_collective_latencies(collective, &took));
    CHECK(took.read.count > 0 && took.read.max_ns > 0);
    OK(farheap_collective_set_limit(collective, 8 * MIB));
    FAILS(FARHEAP_E_LIMIT_TOO_SMALL, farheap_collective_set_limit(collective, 1));
}

static void local_memory_is_bounded(farheap_collective *collective) {
    static void *objects[2048];
    int count = 0;
    while (count < 2048) {
        objects[count] = farheap_collective_allocate(collective, FARHEAP_PURELY_LOCAL, 1024, 16);
        if (!objects[count]) break;
        count++;
    }
    CHECK(count == 1024 && farheap_last_status() == FARHEAP_E_FULL);
    while (count > 0) OK(farheap_collective_deallocate(collective, objects[--count], 1024, 16));
}

int main(void) {
    farheap_collective *collective = NULL;
    FAILS(FARHEAP_E_CONFIG, farheap_collective_new("lymit:1MiB", MIB, 0, &collective));
    FAILS(FARHEAP_E_CONFIG, (farheap_collective_new)("lymit:1MiB", MIB, 0, &collective));
    FAILS(FARHEAP_E_ARGUMENT, farheap_collective_new(NULL, UINT64_MAX, 0, &collective));
    skip_unless_permitted(
        farheap_collective_new("far_limit:16MiB,capacity:256MiB", MIB, 0, &collective));
    kinds(collective);
    objects_of_every_kind(collective);
    local_memory_is_bounded(collective);
    figures(collective);
    farheap_suballocator left = {0};
    OK(farheap_collective_suballocator(collective, FARHEAP_NEW_PER_PAGE, &left));
    OK(farheap_collective_free(collective));
    FAILS(FARHEAP_E_HANDLE, farheap_collective_free(collective));
    NOTHING(FARHEAP_E_HANDLE, farheap_suballocator_allocate(&left, 16, 8));
    FAILS(FARHEAP_E_HANDLE, farheap_suballocator_release(&left));
    return 0;
}
