/* A C program with more data than its limit: sorts keys in far memory, with the index local. */
#include <farheap.h>

#include <stdio.h>
#include <stdlib.h>

#define KEYS ((size_t)4 << 20) /* 32 MiB under 16 */

static int below(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int report(const char *what) {
    fprintf(stderr, "%s: %s: %s\n", what, farheap_status_name(farheap_last_status()),
            farheap_last_message());
    return farheap_last_status() == FARHEAP_E_UFFD_UNAVAILABLE ? 77 : 1;
}

int main(void) {
    farheap_heap *heap = NULL;
    farheap_config config = FARHEAP_CONFIG_INIT;
    config.far_limit = 16 << 20;
    config.capacity = 256 << 20;
    if (farheap_start_config(&config, &heap) != FARHEAP_OK) return report("start");

    uint64_t *keys = far_malloc(KEYS * sizeof *keys); /* far by its size */
    if (!keys || !far_contains(keys)) return report("far_malloc");
    uint64_t state = 1;
    for (size_t i = 0; i < KEYS; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        keys[i] = state;
    }
    /* In runs that fit, and merged while looking at the first of each. */
    enum { RUNS = 8 };
    const size_t run = KEYS / RUNS;
    for (size_t r = 0; r < RUNS; r++) qsort(keys + r * run, run, sizeof *keys, below);
    farheap_advise(heap, keys, KEYS * sizeof *keys, FARHEAP_ADVICE_SEQUENTIAL);
    size_t next[RUNS] = {0};
    uint64_t last = 0;
    for (size_t i = 0; i < KEYS; i++) {
        size_t least = RUNS;
        for (size_t r = 0; r < RUNS; r++) {
            if (next[r] == run) continue;
            if (least == RUNS || keys[r * run + next[r]] < keys[least * run + next[least]]) least = r;
        }
        const uint64_t key = keys[least * run + next[least]++];
        if (key < last) {
            fprintf(stderr, "not in order\n");
            return 1;
        }
        last = key;
    }
    farheap_stats stats = {.size = sizeof stats};
    if (farheap_heap_stats(heap, &stats) != FARHEAP_OK) return report("statistics");
    printf("%zu keys in order; at most %zu MiB resident, %zu MiB read\n", KEYS,
           (size_t)(stats.resident_bytes_max >> 20), (size_t)(stats.bytes_read >> 20));
    far_free(keys);
    if (farheap_shutdown(heap) != FARHEAP_OK) return report("shutdown");
    farheap_heap_free(heap);
    return stats.resident_bytes_max <= 16 << 20 ? 0 : 1;
}
