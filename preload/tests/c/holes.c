/* Memory that a program unmaps and maps anew at the same place, in each way that there is: it is its own until it
   unmaps it, whatever is allocated meanwhile, and what is a file's stays the file's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096ul
#define PIECES 12
#define PAGES 512ul /* 2 MiB */
#define BLOCKS 60
#define NONE 0xffffffffu /* A page that may not be read. */

#define CHECK(what) do { if (!(what)) { printf("line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

struct piece { unsigned char *start; uint32_t seeds[PAGES]; long in_file[PAGES]; };
static struct piece pieces[PIECES];
static struct { unsigned char *start; size_t bytes; int is_mapped; unsigned char value; } blocks[BLOCKS];
static int file;
static long file_pages;
static uint64_t state = 88172645463325252ull;

static size_t below(size_t bound) {
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return state % bound;
}

static void *map(void *place, size_t bytes, int protection, int flags) {
    return mmap(place, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static void write_page(struct piece *piece, size_t page) {
    if (piece->seeds[page] == NONE) return;
    uint32_t seed = 1 + below(1u << 30), *words = (uint32_t *)(piece->start + page * PAGE);
    for (size_t word = 0; word < PAGE / 4; word++) words[word] = seed * (uint32_t)(word + 1);
    piece->seeds[page] = seed;
}

static void check_words(const uint32_t *words, uint32_t seed) {
    for (size_t word = 0; word < PAGE / 4; word += 31) CHECK(words[word] == seed * (uint32_t)(word + 1));
}

static void check_piece(const struct piece *piece) {
    for (size_t page = 0; page < PAGES; page++) {
        if (piece->seeds[page] == NONE) continue;
        check_words((const uint32_t *)(piece->start + page * PAGE), piece->seeds[page]);
        if (piece->in_file[page] < 0) continue;
        uint32_t words[PAGE / 4];
        CHECK(pread(file, words, PAGE, piece->in_file[page] * (long)PAGE) == (ssize_t)PAGE);
        check_words(words, piece->seeds[page]);
    }
}

/* A hole in a piece, and what fills it. Nothing is allocated in between. */
static void refill(struct piece *piece, size_t first, size_t pages) {
    unsigned char *place = piece->start + first * PAGE, *other = MAP_FAILED;
    size_t bytes = pages * PAGE;
    int read_write = PROT_READ | PROT_WRITE, way = (int)below(8);
    if (way == 5) CHECK((other = map(NULL, bytes, read_write, MAP_STACK)) != MAP_FAILED);
    CHECK(munmap(place, bytes) == 0);
    for (size_t page = first; page < first + pages; page++) {
        piece->seeds[page] = way == 1 ? NONE : 0;
        piece->in_file[page] = -1;
    }
    switch (way) {
    case 0: CHECK(map(place, bytes, read_write, MAP_FIXED) == place); break;
    case 1: CHECK(map(place, bytes, PROT_NONE, MAP_FIXED | MAP_NORESERVE) == place); break;
    case 2: CHECK(map(place, bytes, read_write, MAP_FIXED_NOREPLACE) == place); break;
    case 3: case 4: { /* Written by all who have it. */
        long at = file_pages;
        file_pages += (long)pages;
        CHECK(ftruncate(file, file_pages * (long)PAGE) == 0);
        int fixed = way == 3 ? MAP_FIXED : MAP_FIXED_NOREPLACE;
        CHECK(mmap(place, bytes, read_write, MAP_SHARED | fixed, file, at * (long)PAGE) == place);
        for (size_t page = 0; page < pages; page++) piece->in_file[first + page] = at + (long)page;
        break;
    }
    case 5:
        memset(other, 0, bytes);
        CHECK(mremap(other, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
        break;
    default: { /* Nobody but the kernel sees it. */
        long flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        CHECK((unsigned char *)syscall(SYS_mmap, place, bytes, read_write, flags, -1l, 0l) == place);
        break;
    }
    }
    if (way != 1) CHECK(map(place, bytes, read_write, MAP_FIXED_NOREPLACE) == MAP_FAILED && errno == EEXIST);
    for (size_t page = first; page < first + pages; page++) write_page(piece, page);
}

static void step(void) {
    struct piece *piece = &pieces[below(PIECES)];
    if (piece->start == NULL) {
        CHECK((piece->start = map(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, 0)) != MAP_FAILED);
        for (size_t page = 0; page < PAGES; page++) {
            piece->seeds[page] = 0;
            piece->in_file[page] = -1;
        }
        check_piece(piece);
    } else {
        check_piece(piece);
        size_t pages = 1 + below(200), first = below(PAGES - pages);
        if (below(8)) refill(piece, first, pages);
        else {
            CHECK(munmap(piece->start, PAGES * PAGE) == 0);
            piece->start = NULL;
        }
    }
    if (piece->start) for (int n = 0; n < 40; n++) write_page(piece, below(PAGES));
    size_t n = below(BLOCKS);
    if (blocks[n].start) {
        for (size_t at = 0; at < blocks[n].bytes; at += 97) CHECK(blocks[n].start[at] == blocks[n].value);
        if (blocks[n].is_mapped) CHECK(munmap(blocks[n].start, blocks[n].bytes) == 0);
        else free(blocks[n].start);
    }
    blocks[n].is_mapped = below(2) == 0;
    blocks[n].bytes = blocks[n].is_mapped ? (64 + below(150)) * PAGE : 1000 + below(400000);
    blocks[n].value = (unsigned char)(1 + below(255));
    blocks[n].start = blocks[n].is_mapped ? map(NULL, blocks[n].bytes, PROT_READ | PROT_WRITE, 0) : malloc(blocks[n].bytes);
    CHECK(blocks[n].start != NULL && blocks[n].start != MAP_FAILED);
    memset(blocks[n].start, blocks[n].value, blocks[n].bytes);
}

/* A file's mapping over memory stays the file's when it is moved, made longer and shorter. */
static void move_file(void) {
    unsigned char *start = map(NULL, 1ul << 20, PROT_READ | PROT_WRITE, 0), *place = start + (256ul << 10);
    CHECK(start != MAP_FAILED);
    memset(start, 1, 1ul << 20);
    long at = file_pages;
    file_pages += 32;
    CHECK(ftruncate(file, file_pages * (long)PAGE) == 0);
    CHECK(mmap(place, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, at * (long)PAGE) == place);
    memset(place, 2, 16 * PAGE);
    unsigned char *moved = mremap(place, 16 * PAGE, 32 * PAGE, MREMAP_MAYMOVE), read[2];
    CHECK(moved != MAP_FAILED && moved != place && moved[15 * PAGE] == 2);
    memset(moved, 3, 32 * PAGE);
    CHECK(mremap(moved, 32 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
    memset(place, 4, PAGE);
    CHECK(pread(file, read, 1, at * (long)PAGE) == 1 && pread(file, read + 1, 1, (at + 31) * (long)PAGE) == 1);
    CHECK(read[0] == 4 && read[1] == 3 && place[15 * PAGE] == 3);
    CHECK(start[0] == 1 && start[(1ul << 20) - 1] == 1 && munmap(start, 1ul << 20) == 0);
    /* A private one, of a file that may not be written. */
    int only_read = open("/proc/self/exe", O_RDONLY);
    CHECK((start = map(NULL, 1ul << 20, PROT_NONE, 0)) != MAP_FAILED && only_read >= 0);
    place = start + (256ul << 10);
    CHECK(mmap(place, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, only_read, 0) == place);
    CHECK((moved = mremap(place, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, start)) == start && moved[1] == 'E');
    CHECK(mmap(place, PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, only_read, 0) == place && place[1] == 'E');
    CHECK(munmap(start, 1ul << 20) == 0);
}

/* Neighbours are unmapped by one call, wherever far memory ends. */
static void unmap_neighbours(void) {
    for (int n = 0; n < 100; n++) {
        size_t bytes = 1ul << 20, more = 16 * PAGE;
        unsigned char *start = map(NULL, bytes, PROT_READ | PROT_WRITE, 0);
        CHECK(start != MAP_FAILED);
        int is_free = map(start + bytes, more, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE) != MAP_FAILED;
        memset(start, n + 1, bytes + (is_free ? more : 0));
        CHECK(munmap(start, bytes + (is_free ? more : 0)) == 0);
        if (is_free) {
            CHECK(map(start + bytes, more, PROT_READ, MAP_FIXED_NOREPLACE) == start + bytes && start[bytes] == 0);
            CHECK(munmap(start + bytes, more) == 0);
        }
        /* All is used in the end. */
        CHECK(map(NULL, bytes, PROT_READ | PROT_WRITE, 0) != MAP_FAILED);
    }
}

/* A call that moves `kept` pages to another place and is refused leaves all of it as it was: memory in two mappings, one at
   page `over`, of a file or, known only to the kernel, anonymous. */
static void refuse_to_move(size_t over, int is_file, size_t kept) {
    enum { LEN = 128 };
    unsigned char *start = map(NULL, LEN * PAGE, PROT_READ | PROT_WRITE, 0), *place = NULL;
    CHECK(start != MAP_FAILED);
    long flags = MAP_FIXED | (is_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS), mapped;
    mapped = syscall(SYS_mmap, start + over * PAGE, PAGE, PROT_READ | PROT_WRITE, flags, is_file ? (long)file : -1l, 0l);
    CHECK((unsigned char *)mapped == start + over * PAGE);
    for (size_t page = 0; page < LEN; page++) memset(start + page * PAGE, (int)page + 1, PAGE);
    place = map(NULL, LEN * PAGE, PROT_READ | PROT_WRITE, 0);
    CHECK(place != MAP_FAILED);
    unsigned char *moved = mremap(start, LEN * PAGE, kept * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    CHECK(moved == place || moved == MAP_FAILED);
    size_t len = moved == place ? kept : LEN;
    if (moved == MAP_FAILED) moved = start;
    for (int n = 0; n < 40; n++) {
        unsigned char *other = map(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, 0);
        CHECK(other != MAP_FAILED);
        memset(other, 255, 64 * PAGE);
    }
    for (size_t page = 0; page < len; page++) CHECK(moved[page * PAGE] == (unsigned char)(page + 1));
}

/* All of them where a long run is asked for, else a quarter, as in other tests. */
static int rounds(int all) {
    return getenv("FARHEAP_TEST_LONG") ? all : all / 4;
}

int main(int argc, char **argv) {
    CHECK(argc == 2 && (file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600)) >= 0);
    unsigned char *first = malloc(24ul << 20);
    CHECK(first != NULL);
    memset(first, 7, 24ul << 20);
    for (int n = 0; n < rounds(600); n++) step();
    for (int n = 0; n < PIECES; n++) if (pieces[n].start) check_piece(&pieces[n]);
    move_file();
    /* A part twice, with a hole in it. */
    unsigned char *start = map(NULL, 1ul << 20, PROT_READ | PROT_WRITE, 0);
    memset(start, 5, 1ul << 20);
    CHECK(munmap(start + 16 * PAGE, 16 * PAGE) == 0 && munmap(start, 1ul << 20) == 0);
    CHECK(map(start, 1ul << 20, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE) == start && start[0] == 0);
    int shared = shmget(IPC_PRIVATE, PAGE, 0600);
    CHECK(shared >= 0);
    void *at = shmat(shared, start, SHM_REMAP), *elsewhere = shmat(shared, NULL, 0);
    CHECK(shmctl(shared, IPC_RMID, NULL) == 0);
    CHECK(at == (void *)-1 && elsewhere != (void *)-1 && shmdt(elsewhere) == 0);
    CHECK(munmap(start, 1ul << 20) == 0);
    unmap_neighbours();
    for (int way = 0; way < 8; way++) refuse_to_move(way & 1 ? 8 : 0, way >> 1 & 1, way >> 2 ? 80 : 128);
    CHECK(first[100] == 7 && first[(24ul << 20) - 1] == 7);
    puts("right");
    return 0;
}
