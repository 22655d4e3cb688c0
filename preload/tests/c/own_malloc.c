/* A program with a malloc of its own, which maps memory with its lock held, as jemalloc does. Who comes back to it then, or
   another thread that is waited for, would wait for ever. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int is_inside;

/* Each block is a mapping, with its length before it. */
static size_t *block(size_t bytes) {
    if (is_inside) {
        (void)!write(1, "called inside of itself\n", 24);
        _exit(1);
    }
    is_inside = 1;
    pthread_mutex_lock(&lock);
    size_t all = (bytes + 16 + (300ul << 10) + 4095) / 4096 * 4096;
    size_t *start = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start != MAP_FAILED) mprotect(start, all, PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&lock);
    is_inside = 0;
    if (start == MAP_FAILED) return NULL;
    start[0] = all;
    return start + 2;
}

void *malloc(size_t bytes) { return block(bytes); }
void *calloc(size_t count, size_t bytes) { return block(count * bytes); }

void free(void *freed) {
    if (freed == NULL) return;
    size_t *start = (size_t *)freed - 2;
    pthread_mutex_lock(&lock);
    madvise(start, start[0], MADV_FREE);
    munmap(start, start[0]);
    pthread_mutex_unlock(&lock);
}

void *realloc(void *old, size_t bytes) {
    void *new = block(bytes);
    if (new && old) {
        size_t had = ((size_t *)old)[-2] - 16;
        memcpy(new, old, had < bytes ? had : bytes);
        free(old);
    }
    return new;
}

static void *work(void *seed) {
    unsigned char value = (unsigned char)(uintptr_t)seed;
    for (int n = 0; n < 20; n++) {
        unsigned char *some = malloc(1ul << 20);
        memset(some, value, 1ul << 20);
        some = reallocarray(some, 3, 1ul << 20);
        if (some[12345] != value || some[(1ul << 20) - 1] != value) return NULL;
        free(some);
    }
    return seed;
}

int main(void) {
    pthread_t threads[8];
    int right = 0;
    for (uintptr_t n = 0; n < 8; n++) if (pthread_create(&threads[n], NULL, work, (void *)(n + 1))) return 2;
    for (int n = 0; n < 8; n++) {
        void *ended;
        if (pthread_join(threads[n], &ended) == 0 && ended) right++;
    }
    DIR *directory = opendir("/proc/self/task");
    int tasks = 0;
    for (struct dirent *task; (task = readdir(directory));) tasks += task->d_name[0] != '.';
    closedir(directory);
    printf("%d right, %d thread\n", right, tasks);
    return 0;
}
