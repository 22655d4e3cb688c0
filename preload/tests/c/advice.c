/* What a program drops by madvise(2) reads as zero, whether it had left memory or not. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

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

static int all(long from, long to, int value) {
    for (long page = from; page < to; page++)
        if (!is(page, value < 0 ? (int)(page % 251 + 1) : value)) {
            printf("page %ld is %d, not %d\n", page, (unsigned char)data[page * PAGE], value);
            return 0;
        }
    return 1;
}

/* Allocators close memory first, and drop it then. */
static int protected(void) {
    static const int access[] = {PROT_NONE, PROT_READ};
    for (int n = 0; n < 2; n++) {
        fill();
        if (mprotect(data + PAGE, 10 * PAGE, access[n]) != 0
            || madvise(data + 2 * PAGE, 8 * PAGE, MADV_DONTNEED) != 0
            || mprotect(data + PAGE, 10 * PAGE, PROT_READ | PROT_WRITE) != 0)
            return 0;
        if (!all(0, 2, -1) || !all(2, 10, 0) || !all(10, PAGES, -1))
            return 0;
    }
    return 1;
}

/* A file that the program has mapped in the middle stays its own. */
static int mapped_over(void) {
    FILE *file = tmpfile();
    if (file == NULL || ftruncate(fileno(file), 21 * PAGE) != 0)
        return 0;
    fill();
    char *place = data + 19 * PAGE;
    if (mmap(place, 21 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fileno(file), 0) != place)
        return 0;
    memset(place, 9, 21 * PAGE);
    if (madvise(data + 15 * PAGE, 40 * PAGE, MADV_DONTNEED) != 0)
        return 0;
    if (!all(0, 15, -1) || !all(15, 19, 0) || !all(19, 40, 9) || !all(40, 55, 0) || !all(55, PAGES, -1))
        return 0;
    int fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(place, 21 * PAGE, PROT_READ | PROT_WRITE, fixed, -1, 0) != place || !all(19, 40, 0))
        return 0;
    fill();
    char written[PAGE];
    for (long page = 0; page < 21; page++)
        if (pread(fileno(file), written, PAGE, page * PAGE) != PAGE || written[0] != 9 || written[PAGE - 1] != 9)
            return printf("page %ld of the file is %d\n", page, written[0]), 0;
    return all(0, PAGES, -1);
}

/* Advice that the kernel may follow where memory is and not where it has left is refused; freeing is dropping. */
static int other(void) {
    static const int unknown[] = {102 /* MADV_GUARD_INSTALL */, 103 /* MADV_GUARD_REMOVE */, 26, 1000};
    fill();
    for (int n = 0; n < 4; n++)
        if (madvise(data, 20 * PAGE, unknown[n]) == 0 || errno != EINVAL)
            return 0;
    if (!all(0, PAGES, -1))
        return 0;
    return madvise(data + PAGE, 10 * PAGE, MADV_FREE) == 0 && all(0, 1, -1) && all(1, 11, 0) && all(11, PAGES, -1);
}

/* Advice to a process: to this one, in ranges far and local; to another, whose addresses are the same. */
static int of_process(char *local) {
    int own = (int)syscall(SYS_pidfd_open, getpid(), 0);
    struct iovec ranges[] = {{data + PAGE, 10 * PAGE}, {local, PAGE}, {data + 4000 * PAGE, PAGE}};
    fill();
    local[0] = 7;
    /* Before Linux 6.13 a process may not drop its own local memory so. */
    ssize_t advised = process_madvise(own, ranges, 3, MADV_DONTNEED, 0);
    int stops = advised == 10 * PAGE;
    if (advised != 12 * PAGE && !stops)
        return printf("%zd bytes: %d\n", advised, errno), 0;
    if (!all(0, 1, -1) || !all(1, 11, 0) || !all(11, 4000, -1) || !all(4000, 4001, stops ? -1 : 0))
        return 0;
    if (local[0] != (stops ? 7 : 0))
        return 0;
    if (process_madvise(own, ranges, 1, 102, 0) != -1 || errno != EINVAL)
        return printf("guards: %d\n", errno), 0;
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(1);
    }
    fill();
    int others = (int)syscall(SYS_pidfd_open, child, 0);
    if (process_madvise(others, ranges, 1, MADV_DONTNEED, 0) > 0)
        puts("the child was advised");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return close(own) == 0 && close(others) == 0 && all(0, PAGES, -1);
}

/* A forked child drops what it has inherited, wherever that is. */
static int child(void) {
    fill();
    pid_t child = fork();
    if (child == 0)
        _exit(madvise(data + 5 * PAGE, 4000 * PAGE, MADV_DONTNEED) == 0 && all(0, 5, -1)
              && all(5, 4005, 0) && all(4005, PAGES, -1) ? 0 : 1);
    int status = 1;
    return waitpid(child, &status, 0) == child && status == 0 && all(0, PAGES, -1);
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
    if (!protected() || !mapped_over() || !other() || !of_process(local) || !child())
        return 1;
    puts("right");
    return 0;
}
