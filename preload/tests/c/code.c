/* Constants of a program leave while far memory misses pages, come back page by page, and are the same. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define CONSTANT (24ul << 20)
#define FAR (64ul << 20)
#define LOOKS_MAX 2000
#define CHECK(what) do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

/* Each 8 bytes of it are its number. */
__asm__(".section .rodata\n.balign 4096\nconstant:\n.set n, 0\n.rept 3145728\n.quad n\n.set n, n + 1\n.endr\n.text");
extern const uint64_t constant[CONSTANT / 8];

/* What of the process's memory is files', see proc_pid_status(5). */
static size_t of_files(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long kib = 0;
    CHECK(file);
    while (fgets(line, sizeof line, file)) if (sscanf(line, "RssFile: %ld", &kib) == 1) break;
    fclose(file);
    CHECK(kib > 0);
    return (size_t)kib << 10;
}

/* Pages that the program has written are its own: each 64th, but for the last ones, which are written later. */
static int is_written(size_t page, size_t pages) { return page % 64 == 7 && page < pages; }

static void write_pages(size_t from, size_t pages) {
    for (size_t page = from; page < pages; page++) {
        if (!is_written(page, pages)) continue;
        void *place = (char *)constant + page * PAGE;
        CHECK(mprotect(place, PAGE, PROT_READ | PROT_WRITE) == 0);
        memset(place, 0x5a, PAGE);
        CHECK(mprotect(place, PAGE, PROT_READ) == 0);
    }
}

static void check_constant(size_t pages) {
    const volatile uint64_t *now = constant;
    for (size_t n = 0; n < CONSTANT / 8; n++)
        CHECK(now[n] == (is_written(n * 8 / PAGE, pages) ? 0x5a5a5a5a5a5a5a5aul : n));
}

/* One page of 32 is touched: the kernel would map 16 for each. */
static void check_alone(void) {
    const volatile uint64_t *now = constant;
    size_t before = of_files();
    for (size_t page = 0; page < CONSTANT / PAGE; page += 32) CHECK(now[page * PAGE / 8] == page * PAGE / 8);
    CHECK(of_files() <= before + CONSTANT / 8);
}

static void check_far(const unsigned char *far) {
    for (size_t at = 0; at < FAR; at += PAGE) CHECK(far[at] == at / PAGE % 251 + 1);
}

int main(void) {
    size_t pages = CONSTANT / PAGE, written = pages / 2;
    write_pages(0, written);
    check_constant(written);
    unsigned char *far = malloc(FAR);
    CHECK(far && of_files() > CONSTANT / 2);
    for (size_t at = 0; at < FAR; at += PAGE) memset(far + at, (int)(at / PAGE % 251) + 1, PAGE);
    int looks = 0;
    do check_far(far); while (of_files() > CONSTANT / 4 && ++looks < LOOKS_MAX);
    CHECK(looks < LOOKS_MAX);
    check_alone();
    check_constant(written);
    /* Written while it leaves. */
    for (size_t page = written; page < pages; page += 512) {
        write_pages(page, page + 512);
        check_far(far);
        check_constant(page + 512);
    }
    puts("equal");
    return 0;
}
