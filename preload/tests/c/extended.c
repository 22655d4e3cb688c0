/* jemalloc's functions, mixed with the malloc family. Its headers need not be installed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <malloc.h>

static void *(*mallocx)(size_t, int), *(*rallocx)(void *, size_t, int);
static size_t (*xallocx)(void *, size_t, size_t, int), (*sallocx)(const void *, int), (*nallocx)(size_t, int);
static void (*dallocx)(void *, int), (*sdallocx)(void *, size_t, int);

enum { ZERO = 0x40, ALIGNED = 12, BLOCKS = 24 * 256, SIZE = 4000 };

static void *find(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        fprintf(stderr, "%s is not there\n", name);
        exit(8);
    }
    return found;
}

int main(void) {
    mallocx = find("mallocx"), rallocx = find("rallocx"), xallocx = find("xallocx"), sallocx = find("sallocx");
    nallocx = find("nallocx"), dallocx = find("dallocx"), sdallocx = find("sdallocx");
    static unsigned char *blocks[BLOCKS];
    for (int n = 0; n < BLOCKS; n++) {
        blocks[n] = n % 3 ? mallocx(SIZE, n % 2 ? ZERO : ALIGNED) : malloc(SIZE);
        if (n % 3 && n % 2 && (blocks[n][0] || blocks[n][SIZE - 1])) return 1;
        if (n % 3 && !(n % 2) && (uintptr_t)blocks[n] % 4096) return 2;
        memset(blocks[n], n, SIZE);
    }
    for (int n = 0; n < BLOCKS; n++) {
        if (sallocx(blocks[n], 0) != malloc_usable_size(blocks[n])) return 3;
        if (nallocx(SIZE, 0) > sallocx(blocks[n], 0)) return 4;
        if (n % 5 == 0) blocks[n] = rallocx(blocks[n], 2 * SIZE, ALIGNED);
        if (n % 5 == 0 && (uintptr_t)blocks[n] % 4096) return 5;
        if (n % 5 == 0 && xallocx(blocks[n], 2 * SIZE, 0, 0) < 2 * SIZE) return 6;
        for (int at = 0; at < SIZE; at += 100) if (blocks[n][at] != (unsigned char)n) return 7;
    }
    for (int n = 0; n < BLOCKS; n++) {
        if (n % 4 == 0) free(blocks[n]);
        else if (n % 4 == 1) dallocx(blocks[n], 0);
        else sdallocx(blocks[n], n % 5 ? SIZE : 2 * SIZE, 0);
    }
    puts("right");
}
