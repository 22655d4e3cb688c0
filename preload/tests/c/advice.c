/* What a program drops by madvise(2) reads as zero, whether it had left memory or not. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, PAGES = 8192 };

static char *data;

static void fill(void) {
    for (long page = 0; page < PAGES; page++)
        memset(data + page * PAGE, (int)(page % 251 + 1), PAGE);
}

/* Whether all of a page has a value. */
static int is(long page, int value) {
    for (int at = 0; at < PAGE; at++)
        if ((unsigned char)data[page * PAGE + at] != value)
            return 0;
    return 1;
}

/* Ranges of `count` pages, `every` pages apart, the first at `from`. */
static int drop(long from, long count, long every) {
    fill();
    for (long page = from; page + count <= PAGES; page += every)
        if (madvise(data + page * PAGE, count * PAGE, MADV_DONTNEED) != 0) {
            perror("madvise");
            return 0;
        }
    for (long page = 0; page < PAGES; page++) {
        long at = page - from;
        int dropped = at >= 0 && at % every < count && at - at % every + from + count <= PAGES;
        int want = dropped ? 0 : (int)(page % 251 + 1);
        if (!is(page, want)) {
            printf("page %ld is %d, not %d (%ld %ld %ld)\n", page,
                   (unsigned char)data[page * PAGE], want, from, count, every);
            return 0;
        }
    }
    return 1;
}

int main(void) {
    /* So much that the heap has started before. */
    for (int n = 0; n < 64; n++)
        memset(malloc(1 << 20), 1, 1 << 20);
    if (posix_memalign((void **)&data, 1 << 16, (size_t)PAGES * PAGE) != 0)
        return 1;
    /* Parts of far pages, whole ones, and both. */
    if (!drop(1, 1, 4) || !drop(0, 4, 8) || !drop(3, 10, 32) || !drop(0, PAGES, PAGES))
        return 1;
    /* An end within a page, no bytes, and what is not far: as the kernel has it. */
    fill();
    char *local = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    local[0] = local[PAGE] = 7;
    if (madvise(data, 100, MADV_DONTNEED) != 0 || !is(0, 0) || !is(1, 2)
        || madvise(data + PAGE, 0, MADV_DONTNEED) != 0 || !is(1, 2)
        || madvise(data + PAGE + 1, PAGE, MADV_DONTNEED) == 0 || !is(1, 2)
        || madvise(data + PAGE, PAGE, MADV_WILLNEED) != 0
        || madvise(local, PAGE, MADV_DONTNEED) != 0 || local[0] != 0 || local[PAGE] != 7)
        return 1;
    puts("right");
    return 0;
}
