/* The malloc family as the C library documents it, before and after the far heap has started. */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#undef NDEBUG
#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%d: %s\n", __LINE__, #what); _exit(1); } } while (0)

static char *early;
__attribute__((constructor)) static void before_main(void) { early = strdup("allocated before main"); }

static void fill(void *block, size_t size, int byte) {
    CHECK(block && malloc_usable_size(block) >= size);
    memset(block, byte, malloc_usable_size(block));
}

static void family(void) {
    static const size_t sizes[] = { 0, 1, 8, 15, 16, 17, 100, 4096, 5000, 70000, 3 << 20 };
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        size_t size = sizes[n];
        errno = 7;
        void *block = malloc(size);
        fill(block, size, 1);
        CHECK((uintptr_t)block % 16 == 0);
        unsigned char *zeros = calloc(size + 1, 3);
        for (size_t at = 0; at < (size + 1) * 3; at++) CHECK(zeros[at] == 0);
        fill(zeros, size, 2);
        unsigned char *grown = realloc(block, size * 2 + 1);
        CHECK(grown && malloc_usable_size(grown) >= size * 2 + 1);
        for (size_t at = 0; at < size; at++) CHECK(grown[at] == 1);
        CHECK((grown = reallocarray(grown, 3, 11)) && malloc_usable_size(grown) >= 33);
        for (size_t align = 8; align <= 65536; align *= 2) {
            void *aligned = NULL;
            CHECK(posix_memalign(&aligned, align, size) == 0 && (uintptr_t)aligned % align == 0);
            fill(aligned, size, 3);
            free(aligned);
            fill(aligned = memalign(align, size), size, 4);
            CHECK((uintptr_t)aligned % align == 0);
            free(aligned);
            fill(aligned = aligned_alloc(align, size), size, 5);
            CHECK((uintptr_t)aligned % align == 0);
            CHECK((aligned = realloc(aligned, size + 100)));
            free(aligned);
        }
        free(zeros);
        free(grown);
        CHECK(errno == 7);
    }
    void *page = valloc(10), *pages = pvalloc(4097);
    CHECK((uintptr_t)page % 4096 == 0 && malloc_usable_size(pages) >= 8192);
    free(page), free(pages), free(NULL);
    CHECK(malloc_usable_size(NULL) == 0);
    volatile size_t huge = SIZE_MAX / 2;
    errno = 0;
    CHECK(!malloc(huge) && errno == ENOMEM);
    errno = 0;
    CHECK(!calloc(huge, 3) && errno == ENOMEM);
    errno = 0;
    CHECK(!reallocarray(NULL, huge, 3) && errno == ENOMEM);
    CHECK(posix_memalign(&page, 24, 8) == EINVAL);
    CHECK(realloc(malloc(5), 0) == NULL);
    char *kept = malloc(10);
    strcpy(kept, "kept");
    CHECK(!realloc(kept, huge) && strcmp(kept, "kept") == 0);
    free(kept);
}

static void *work(void *n) {
    void *kept[400];
    for (int at = 0; at < 400; at++) fill(kept[at] = malloc(at * 7), at * 7, (int)(intptr_t)n);
    for (int at = 0; at < 400; at++) {
        if (at) CHECK(((char *)kept[at])[at * 7 - 1] == (int)(intptr_t)n);
        free(kept[at]);
    }
    return strdup("from a thread that has ended");
}

static void threads(void) {
    pthread_t threads[16];
    for (int n = 0; n < 16; n++) CHECK(pthread_create(&threads[n], NULL, work, (void *)(intptr_t)n) == 0);
    for (int n = 0; n < 16; n++) {
        void *text;
        CHECK(pthread_join(threads[n], &text) == 0 && strlen(text) == 28);
        free(text);
    }
}

/* A child may allocate memory of its own, end, and start programs. */
static void children(void) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        family();
        _exit(5);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 5);
    if ((child = fork()) == 0) {
        execl("/bin/sh", "sh", "-c", "exit 6", (char *)NULL);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 6);
    CHECK(WEXITSTATUS(system("exit 7")) == 7);
}

int main(void) {
    family(), threads(), children();
    enum { BLOCKS = 60000 };
    static char *blocks[BLOCKS];
    for (int n = 0; n < BLOCKS; n++) {
        CHECK(asprintf(&blocks[n], "block %d of many, %0400d", n, n) > 400);
    }
    family(), threads(), children();
    for (int n = 0; n < BLOCKS; n++) CHECK(atoi(blocks[n] + 6) == n);
    struct mallinfo2 info = mallinfo2();
    CHECK(info.uordblks > 14 << 20 && info.hblkhd == 0 && info.arena == info.uordblks + info.fordblks);
    for (int n = 0; n < BLOCKS; n++) free(blocks[n]);
    CHECK(malloc_trim(0) == 1 && mallinfo2().uordblks + (6 << 20) < info.uordblks);
    CHECK(strcmp(early, "allocated before main") == 0);
    free(early);
    puts("right");
    return 0;
}
