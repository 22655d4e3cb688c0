/* The shared library as an engine's plug-in loads it: late, with threads there already, and closed
 * again while its heap runs. Arguments: the library's path. */
#define _POSIX_C_SOURCE 200809L
#include "farheap.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST(use)                                                                       \
    use(farheap_start_abi) use(farheap_last_message) use(farheap_shutdown)              \
    use(farheap_heap_free) use(farheap_evict_all) use(far_allocate) use(far_contains)   \
    use(far_malloc) use(far_free)
#define DECLARE(name) static __typeof__(name) *late_##name;
LIST(DECLARE)

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, late_farheap_last_message ? late_farheap_last_message() : "");
    exit(1);
}

static pthread_barrier_t loaded;
enum { BLOCKS = 64, LEN = 512 << 10 }; /* 32 MiB a thread, with 16 MiB for all */

/* Far memory under pressure. */
static void *work(void *number) {
    unsigned char *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = late_far_allocate(FARHEAP_FAR, LEN, 16);
        if (!blocks[i] || !late_far_contains(blocks[i])) fail("far memory");
        memset(blocks[i], i + *(int *)number, LEN);
    }
    for (int i = 0; i < BLOCKS; i++) {
        for (int at = 0; at < LEN; at += 4096) {
            if (blocks[i][at] != (unsigned char)(i + *(int *)number)) fail("contents");
        }
        late_far_free(blocks[i]);
        late_far_free(late_far_malloc(100));
    }
    return NULL;
}

static void *work_when_loaded(void *number) {
    pthread_barrier_wait(&loaded);
    return work(number);
}

int main(int count, char **arguments) {
    int one = 1, two = 2;
    pthread_t before, after;
    pthread_barrier_init(&loaded, NULL, 2);
    if (pthread_create(&before, NULL, work_when_loaded, &one)) fail("a thread");
    void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "dlopen: %s\n", dlerror());
        return 1;
    }
    void *symbol;
#define LOAD(name)                                                      \
    symbol = dlsym(library, #name);                                     \
    memcpy(&late_##name, &symbol, sizeof symbol);                       \
    if (!symbol) fail(#name);
    LIST(LOAD)
    farheap_heap *heap = NULL;
    const char *config = "far_limit:16MiB,capacity:128MiB";
    farheap_status status = late_farheap_start_abi(FARHEAP_ABI_VERSION, config, &heap);
    if (status == FARHEAP_E_UFFD_UNAVAILABLE) {
        printf("skipped: %s\n", late_farheap_last_message());
        fflush(NULL);
        _Exit(77);
    }
    if (status != FARHEAP_OK) fail("start");
    unsigned char *kept = late_far_allocate(FARHEAP_FAR, LEN, 16);
    memset(kept, 7, LEN);
    if (late_farheap_evict_all(heap) != FARHEAP_OK) fail("evict");
    dlclose(library); /* what runs stays: the heap's threads serve this fault */
    if (kept[LEN / 2] != 7) fail("contents");
    pthread_barrier_wait(&loaded);
    if (pthread_create(&after, NULL, work, &two)) fail("a thread");
    pthread_join(before, NULL);
    pthread_join(after, NULL);
    late_far_free(kept);
    if (late_farheap_shutdown(heap) != FARHEAP_OK) fail("shutdown");
    if (late_farheap_heap_free(heap) != FARHEAP_OK) fail("free");
    return 0;
}
