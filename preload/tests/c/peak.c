/* What a process has resident at its peak, in KiB: while it fills far memory, or maps small pieces itself. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define PIECE (64ul << 10) /* less than what is far */
#define CHECK(what) do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static unsigned char *far;
static size_t far_bytes;
static atomic_int is_over;

/* The most since the start, see proc_pid_status(5). */
static long peak(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long kib = 0;
    CHECK(file);
    while (fgets(line, sizeof line, file)) if (sscanf(line, "VmHWM: %ld", &kib) == 1) break;
    fclose(file);
    CHECK(kib > 0);
    return kib;
}

static void *fill(void *start) {
    for (size_t at = 0; at < far_bytes / 2; at += PAGE) memset((unsigned char *)start + at, (int)(at / PAGE % 251) + 1, PAGE);
    return NULL;
}

static void check_far(size_t step) {
    for (size_t at = 0; at < far_bytes && !atomic_load(&is_over); at += step)
        CHECK(far[at] == at % (far_bytes / 2) / PAGE % 251 + 1);
}

static void *read_far(void *unused) {
    while (!atomic_load(&is_over)) check_far(PAGE);
    return unused;
}

/* far: two threads write fresh far memory. local: small pieces are mapped and written meanwhile. */
int main(int count, char **words) {
    CHECK(count == 4);
    far_bytes = strtoul(words[2], NULL, 10) << 20;
    size_t local_bytes = strtoul(words[3], NULL, 10) << 20;
    CHECK(far = malloc(far_bytes));
    pthread_t other;
    CHECK(pthread_create(&other, NULL, fill, far + far_bytes / 2) == 0);
    fill(far);
    CHECK(pthread_join(other, NULL) == 0);
    if (strcmp(words[1], "local") == 0) {
        size_t pieces = local_bytes / PIECE;
        unsigned char **all = malloc(pieces * sizeof *all);
        CHECK(all && pthread_create(&other, NULL, read_far, NULL) == 0);
        for (size_t n = 0; n < pieces; n++) {
            all[n] = mmap(NULL, PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(all[n] != MAP_FAILED);
            memset(all[n], (int)(n % 255) + 1, PIECE);
        }
        atomic_store(&is_over, 1);
        CHECK(pthread_join(other, NULL) == 0);
        for (size_t n = 0; n < pieces; n++) CHECK(all[n][n % PIECE] == n % 255 + 1);
    }
    atomic_store(&is_over, 0);
    check_far(PAGE);
    printf("%ld\n", peak());
    return 0;
}
