/* Memory that a program maps itself: taken back in parts, moved, protected, with a copy of what is in it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define PIECES 40
#define PAGES_MAX 1024ul /* 4 MiB */

#define CHECK(what) do { if (!(what)) { printf("line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

struct piece { unsigned char *start; size_t pages; uint32_t seeds[PAGES_MAX]; };
static struct piece pieces[PIECES];
static uint64_t state = 88172645463325252ull;

static size_t below(size_t bound) {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return state % bound;
}

static void *anonymous(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* A page whose seed is 0 was never written, and reads as zero. */
static void write_page(struct piece *piece, size_t page) {
    uint32_t seed = 1 + below(1u << 30), *words = (uint32_t *)(piece->start + page * PAGE);
    for (size_t word = 0; word < PAGE / 4; word++) words[word] = seed * (uint32_t)(word + 1);
    piece->seeds[page] = seed;
}

static void check_piece(const struct piece *piece) {
    for (size_t page = 0; page < piece->pages; page++) {
        const uint32_t *words = (const uint32_t *)(piece->start + page * PAGE);
        for (size_t word = 0; word < PAGE / 4; word += 31)
            CHECK(words[word] == piece->seeds[page] * (uint32_t)(word + 1));
    }
}

static void give_up_head(struct piece *piece, size_t pages) {
    CHECK(munmap(piece->start, pages * PAGE) == 0);
    piece->start += pages * PAGE;
    piece->pages -= pages;
    memmove(piece->seeds, piece->seeds + pages, piece->pages * sizeof piece->seeds[0]);
}

static void step(void) {
    struct piece *piece = &pieces[below(PIECES)];
    if (piece->start == NULL) {
        piece->pages = 64 + below(PAGES_MAX - 64);
        piece->start = anonymous(piece->pages * PAGE);
        CHECK(piece->start != MAP_FAILED);
        memset(piece->seeds, 0, sizeof piece->seeds);
        for (size_t page = 0; page < piece->pages; page++) if (below(8)) write_page(piece, page);
        return;
    }
    check_piece(piece);
    size_t pages = piece->pages, part = 1 + below(pages);
    switch (below(8)) {
    case 0:
        CHECK(munmap(piece->start, pages * PAGE) == 0);
        piece->start = NULL;
        break;
    case 1:
        if (part < pages) give_up_head(piece, part);
        break;
    case 2: /* Its end. */
        if (part < pages) {
            CHECK(munmap(piece->start + part * PAGE, (pages - part) * PAGE) == 0);
            piece->pages = part;
        }
        break;
    case 3: { /* A hole: what lies before it goes too, as a piece has none. */
        size_t first = below(pages - part + 1);
        if (first + part < pages) {
            CHECK(munmap(piece->start + first * PAGE, part * PAGE) == 0);
            if (first > 0) CHECK(munmap(piece->start, first * PAGE) == 0);
            piece->start += (first + part) * PAGE;
            piece->pages -= first + part;
            memmove(piece->seeds, piece->seeds + first + part, piece->pages * sizeof piece->seeds[0]);
        }
        break;
    }
    case 4: { /* Moved, or shortened. */
        size_t wanted = 1 + below(PAGES_MAX);
        unsigned char *moved = mremap(piece->start, pages * PAGE, wanted * PAGE, MREMAP_MAYMOVE);
        CHECK(moved != MAP_FAILED);
        for (size_t page = pages; page < wanted; page++) piece->seeds[page] = 0;
        piece->start = moved;
        piece->pages = wanted;
        break;
    }
    case 6: { /* Mapped anew where it lies: zeros. */
        size_t first = below(pages - part + 1);
        void *place = piece->start + first * PAGE;
        int fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        CHECK(mmap(place, part * PAGE, PROT_READ | PROT_WRITE, fixed, -1, 0) == place);
        for (size_t page = 0; page < part; page++) piece->seeds[first + page] = 0;
        break;
    }
    case 7: { /* The same, without access for a while. */
        size_t first = below(pages - part + 1);
        void *place = piece->start + first * PAGE;
        int fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        CHECK(mmap(place, part * PAGE, PROT_NONE, fixed, -1, 0) == place);
        CHECK(mprotect(place, part * PAGE, PROT_READ | PROT_WRITE) == 0);
        for (size_t page = 0; page < part; page++) piece->seeds[first + page] = 0;
        break;
    }
    case 5: /* Protected, and given up so: who gets it next can write there. */
        CHECK(mprotect(piece->start, part * PAGE, below(2) ? PROT_READ : PROT_NONE) == 0);
        if (part == pages) {
            CHECK(munmap(piece->start, pages * PAGE) == 0);
            piece->start = NULL;
        } else {
            give_up_head(piece, part);
        }
        break;
    }
    if (piece->start) for (int n = 0; n < 20; n++) write_page(piece, below(piece->pages));
}

/* All of them where a long run is asked for, else a quarter, as in other tests. */
static int rounds(int all) {
    return getenv("FARHEAP_TEST_LONG") ? all : all / 4;
}

int main(void) {
    unsigned char *first = anonymous(32ul << 20);
    CHECK(first != MAP_FAILED);
    for (size_t at = 0; at < 32ul << 20; at++) CHECK(at % 509 || first[at] == 0);
    memset(first, 7, 32ul << 20);
    CHECK(munmap(first + 1, PAGE) == -1 && errno == EINVAL);
    CHECK(munmap(first, 0) == -1 && errno == EINVAL);
    /* To a place of its choice: one that overlaps is refused, another one has the content. */
    unsigned char *from = anonymous(1ul << 20), *to = anonymous(1ul << 20);
    CHECK(from != MAP_FAILED && to != MAP_FAILED);
    memset(from, 9, 1ul << 20);
    int fixed = MREMAP_MAYMOVE | MREMAP_FIXED;
    CHECK(mremap(from, 1ul << 20, 1ul << 20, fixed, from + PAGE) == MAP_FAILED && errno == EINVAL);
    CHECK(from[5] == 9 && mremap(from, 1ul << 20, 1ul << 20, fixed, to) == to);
    for (size_t at = 0; at < 1ul << 20; at++) CHECK(to[at] == 9);
    CHECK(munmap(to, 1ul << 20) == 0);
    for (int n = 0; n < rounds(1500); n++) step();
    /* A child has it all, and gives it up. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (int n = 0; n < PIECES; n++) if (pieces[n].start) check_piece(&pieces[n]);
        for (int n = 0; n < PIECES; n++)
            if (pieces[n].start) CHECK(munmap(pieces[n].start, pieces[n].pages * PAGE) == 0);
        unsigned char *own = anonymous(1ul << 20);
        CHECK(own != MAP_FAILED && own[5] == 0);
        memset(own, 1, 1ul << 20);
        _exit(0);
    }
    for (int n = 0; n < rounds(200); n++) step();
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (int n = 0; n < PIECES; n++) if (pieces[n].start) check_piece(&pieces[n]);
    CHECK(first[100] == 7 && first[(32ul << 20) - 1] == 7);
    /* A call that writes there. */
    FILE *zero = fopen("/proc/self/maps", "r");
    CHECK(zero != NULL && read(fileno(zero), first, 1ul << 20) > 0);
    puts("right");
    return 0;
}
