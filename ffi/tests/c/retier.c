/* Pages that change their device in place, from C. */
#define _DEFAULT_SOURCE
#include "check.h"

#include <unistd.h>

#define WORDS ((size_t)4 << 20) /* 32 MiB, twice the limit */
#define BYTES (WORDS * sizeof(uint64_t))

struct told {
    unsigned calls;
    unsigned most;
    uint64_t bytes;
};

static bool progress(void *userdata, const farheap_retiered *so_far) {
    struct told *told = userdata;
    CHECK(so_far->size == sizeof *so_far && so_far->bytes > told->bytes);
    CHECK(so_far->bytes <= so_far->of_bytes && so_far->read_bytes <= so_far->of_bytes);
    told->bytes = so_far->bytes;
    return ++told->calls < told->most;
}

static void all_are_right(const uint64_t *words) {
    for (size_t i = 0; i < WORDS; i++) CHECK(words[i] == i * i);
}

/* What is in memory has no place; what was read ahead may come in after all was evicted. */
static uint64_t stored_on(farheap_heap *heap, farheap_side side, uint64_t expected) {
    uint64_t bytes = 0;
    for (int look = 0; look < 10000; look++) {
        OK(farheap_evict_all(heap));
        OK(farheap_stored_on(heap, side, &bytes));
        if (bytes >= expected) break;
        usleep(1000);
    }
    return bytes;
}

static void pages_move_and_go_back(farheap_heap *heap, uint64_t *words) {
    CHECK(stored_on(heap, FARHEAP_SIDE_FIRST, BYTES) >= BYTES);
    farheap_retiered done = {.size = sizeof done};
    struct told told = {0, 1000, 0};
    OK(farheap_retier(heap, words, BYTES, FARHEAP_SIDE_SECOND, 0, progress, &told, &done));
    CHECK(done.bytes == done.of_bytes && done.of_bytes >= BYTES && done.elapsed_ns > 0);
    CHECK(told.calls == done.of_bytes / (2 * MIB) && told.bytes == done.bytes);
    CHECK(done.read_bytes >= BYTES - 16 * MIB);
    all_are_right(words);
    CHECK(stored_on(heap, FARHEAP_SIDE_SECOND, BYTES) >= BYTES);
    for (size_t i = 0; i < WORDS; i += 1000) words[i] = i * i;
    OK(farheap_retier(heap, words, BYTES, FARHEAP_SIDE_FIRST, 0, NULL, NULL, &done));
    uint64_t left = 1;
    OK(farheap_stored_on(heap, FARHEAP_SIDE_SECOND, &left));
    CHECK(done.bytes == done.of_bytes && left == 0);
    all_are_right(words);
}

static void its_progress_can_end_it(farheap_heap *heap, uint64_t *words) {
    farheap_retiered done = {.size = sizeof done};
    struct told told = {0, 3, 0};
    OK(farheap_retier(heap, words, BYTES, FARHEAP_SIDE_SECOND, 0, progress, &told, &done));
    CHECK(done.bytes < done.of_bytes && done.bytes >= 6 * MIB && told.calls >= 3);
    all_are_right(words);
    OK(farheap_retier(heap, words, BYTES, FARHEAP_SIDE_FIRST, 0, NULL, NULL, &done));
    CHECK(done.bytes == done.of_bytes);
}

static void what_it_cannot_do_is_said(farheap_heap *heap, uint64_t *words) {
    farheap_retiered done = {.size = sizeof done};
    uint64_t bytes = 0;
    int local = 0;
    FAILS(FARHEAP_E_ARGUMENT, farheap_retier(heap, words, MIB, (farheap_side)2, 0, NULL, NULL, &done));
    FAILS(FARHEAP_E_ARGUMENT, farheap_stored_on(heap, (farheap_side)2, &bytes));
    FAILS(FARHEAP_E_BAD_RANGE,
          farheap_retier(heap, &local, sizeof local, FARHEAP_SIDE_SECOND, 0, NULL, NULL, &done));
    FAILS(FARHEAP_E_NULL, farheap_retier(heap, words, MIB, FARHEAP_SIDE_SECOND, 0, NULL, NULL, NULL));
    FAILS(FARHEAP_E_NULL, farheap_stored_on(heap, FARHEAP_SIDE_FIRST, NULL));
    done.size = 0; /* said before anything moves */
    FAILS(FARHEAP_E_ARGUMENT, farheap_retier(heap, words, MIB, FARHEAP_SIDE_SECOND, 0, NULL, NULL, &done));
    OK(farheap_stored_on(heap, FARHEAP_SIDE_SECOND, &bytes));
    CHECK(bytes == 0 && done.bytes == 0);
    done.size = sizeof done;
    farheap_heap *plain = NULL;
    OK(farheap_add_tier(heap, "plain", "far_limit:8MiB,capacity:64MiB", &plain));
    farheap_placement there = FARHEAP_POLICY;
    OK(farheap_heap_placement(plain, &there));
    char *block = far_allocate(there, MIB, 16);
    CHECK(block);
    FAILS(FARHEAP_E_UNSUPPORTED,
          farheap_retier(plain, block, MIB, FARHEAP_SIDE_SECOND, 0, NULL, NULL, &done));
    far_free(block);
    OK(farheap_shutdown(plain));
    OK(farheap_heap_free(plain));
}

int main(void) {
    char dir[] = "/tmp/farheap_retier_XXXXXX", path[64];
    CHECK(mkdtemp(dir));
    CHECK(snprintf(path, sizeof path, "%s/second", dir) > 0);
    farheap_config config = FARHEAP_CONFIG_INIT;
    config.far_limit = 16 * MIB;
    config.capacity = 64 * MIB;
    config.readahead = FARHEAP_OFF;
    config.second = path;
    farheap_heap *heap = NULL;
    farheap_status status = farheap_start_config(&config, &heap);
    /* As for the first device: what does not exist needs a capacity. */
    CHECK(status == FARHEAP_E_DEVICE && strstr(farheap_last_message(), "second"));
    config.second_capacity = 64 * MIB;
    status = farheap_start_config(&config, &heap);
    if (status == FARHEAP_E_UFFD_UNAVAILABLE) CHECK(unlink(path) == 0 && rmdir(dir) == 0);
    skip_unless_permitted(status);
    uint64_t *words = far_allocate(FARHEAP_FAR, BYTES, 4096);
    CHECK(words && far_contains(words));
    for (size_t i = 0; i < WORDS; i++) words[i] = i * i;
    pages_move_and_go_back(heap, words);
    its_progress_can_end_it(heap, words);
    what_it_cannot_do_is_said(heap, words);
    far_free(words);
    OK(farheap_shutdown(heap));
    farheap_retiered done = {.size = sizeof done};
    FAILS(FARHEAP_E_NOT_RUNNING,
          farheap_retier(heap, words, MIB, FARHEAP_SIDE_SECOND, 0, NULL, NULL, &done));
    OK(farheap_heap_free(heap));
    CHECK(unlink(path) == 0 && rmdir(dir) == 0);
    return 0;
}
