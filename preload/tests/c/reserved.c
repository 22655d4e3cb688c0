/* Address space that a program reserves without access, and opens in parts, as JavaScript engines do. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define PART (256ul << 10)
#define PARTS 160 /* 40 MiB, beside the reserve of each */

#define CHECK(what) do { if (!(what)) { printf("line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

static unsigned char *parts[PARTS];

static void *reserve(void *hint, size_t bytes) {
    void *start = mmap(hint, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(start != MAP_FAILED);
    return start;
}

/* A part at a multiple of its size: more is reserved, and the ends are given back. */
static unsigned char *reserve_part(size_t n) {
    size_t more = 2 * PART - PAGE;
    unsigned char *start = reserve((void *)(0x100000000000ul + n * 0x7310000000ul), more);
    if (n % 2) CHECK(madvise(start, more, MADV_DONTFORK) == 0);
    unsigned char *part = (unsigned char *)(((uintptr_t)start + PART - 1) / PART * PART);
    if (part > start) CHECK(munmap(start, part - start) == 0);
    size_t tail = start + more - (part + PART);
    if (tail) CHECK(munmap(part + PART, tail) == 0);
    return part;
}

static unsigned char value(size_t n, size_t page) { return (unsigned char)(1 + (n * 31 + page) % 250); }

static void fill(size_t n) {
    for (size_t page = 0; page < PART / PAGE; page++) memset(parts[n] + page * PAGE, value(n, page), PAGE);
}

static void check(size_t n) {
    for (size_t page = 0; page < PART / PAGE; page++)
        for (size_t at = 0; at < PAGE; at += 61) CHECK(parts[n][page * PAGE + at] == value(n, page));
}

static int is_zero(const unsigned char *start, size_t bytes) {
    for (size_t at = 0; at < bytes; at++) if (start[at]) return 0;
    return 1;
}

/* The signal that ends a child that reads there, 0: none. */
static int signal_of(volatile unsigned char *place) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { (void)*place; _exit(0); }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

int main(void) {
    /* Little besides starts the heap. */
    memset(malloc(8ul << 20), 1, 8ul << 20);
    for (size_t n = 0; n < PARTS; n++) {
        parts[n] = reserve_part(n);
        CHECK(mprotect(parts[n], PART, PROT_READ | PROT_WRITE) == 0);
        CHECK(is_zero(parts[n], PART));
        fill(n);
    }
    for (size_t n = 0; n < PARTS; n++) check(n);
    /* A child has those that are not kept from it, as they were. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) { for (size_t n = 0; n < PARTS; n += 2) check(n); _exit(0); }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (size_t n = 0; n < PARTS; n += 3) {
        switch (n / 3 % 5) {
        case 0: /* Closed, and opened again: as it was. */
            CHECK(mprotect(parts[n], PART, PROT_NONE) == 0);
            CHECK(mprotect(parts[n], PART, PROT_READ | PROT_WRITE) == 0);
            break;
        case 1: /* Closed and dropped. */
            CHECK(mprotect(parts[n], PART, PROT_NONE) == 0 && madvise(parts[n], PART, MADV_DONTNEED) == 0);
            CHECK(mprotect(parts[n], PART, PROT_READ | PROT_WRITE) == 0 && is_zero(parts[n], PART));
            fill(n);
            break;
        case 2: /* Taken back by mapping over it. */
            CHECK(mmap(parts[n], PART, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == parts[n]);
            CHECK(mprotect(parts[n], PART, PROT_READ | PROT_WRITE) == 0 && is_zero(parts[n], PART));
            fill(n);
            break;
        case 3: /* Given back, and got anew. */
            CHECK(munmap(parts[n], PART) == 0);
            parts[n] = reserve_part(n);
            CHECK(mprotect(parts[n], PART / 2, PROT_READ | PROT_WRITE) == 0 && is_zero(parts[n], PART / 2));
            CHECK(mprotect(parts[n] + PART / 2, PART / 2, PROT_READ | PROT_WRITE) == 0);
            CHECK(is_zero(parts[n] + PART / 2, PART / 2));
            fill(n);
            break;
        case 4: /* To be read only. */
            CHECK(mprotect(parts[n], PART, PROT_READ) == 0);
            break;
        }
    }
    for (size_t n = 0; n < PARTS; n++) check(n);
    /* What is not opened cannot be read, in what is far and in what is too large for that. */
    unsigned char *some = reserve(NULL, 64ul << 20), *much = reserve(NULL, 64ul << 30);
    CHECK(mprotect(some + PART, PART, PROT_READ | PROT_WRITE) == 0);
    CHECK(mprotect(much + PART, PART, PROT_READ | PROT_WRITE) == 0);
    memset(some + PART, 5, PART);
    memset(much + PART, 6, PART);
    CHECK(signal_of(some) == SIGSEGV && signal_of(some + 2 * PART) == SIGSEGV && signal_of(some + PART) == 0);
    CHECK(signal_of(much) == SIGSEGV && signal_of(much + PART) == 0);
    CHECK(munmap(much, 64ul << 30) == 0);
    /* Code: `lea eax, [rdi + 7]; ret`, in each of the pages. */
    static const unsigned char code[] = {0x8d, 0x47, 0x07, 0xc3};
    for (size_t at = 0; at < PART; at += PAGE) memcpy(some + PART + at, code, sizeof code);
    CHECK(mprotect(some + PART, PART, PROT_READ | PROT_EXEC) == 0);
    for (size_t n = 0; n < PARTS; n++) check(n);
    for (size_t at = 0; at < PART; at += PAGE) CHECK(((int (*)(int))(void *)(some + PART + at))((int)at) == (int)at + 7);
    CHECK(munmap(some, 64ul << 20) == 0);
    for (size_t n = 0; n < PARTS; n++) CHECK(munmap(parts[n], PART) == 0);
    puts("right");
    return 0;
}
