/* Has 64 MiB in memory that are not malloc's, until standard error, a file, tells that it is too much. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BYTES = 64 << 20, LOOKS = 60000 };

static char variables[BYTES];

static char *memory(const char *mode) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (strcmp(mode, "variables") == 0) return variables;
    if (strcmp(mode, "fixed") == 0)
        return mmap((void *)0x100000000000, BYTES, PROT_READ | PROT_WRITE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    /* As runtimes do: a place of their own, and more than they use. */
    return mmap((void *)0x200000000000, 16UL * BYTES, PROT_READ | PROT_WRITE | PROT_EXEC, flags | MAP_NORESERVE, -1, 0);
}

static int is_told(void) {
    static char text[4096];
    FILE *said = fopen("/proc/self/fd/2", "r");
    size_t len = said ? fread(text, 1, sizeof text - 1, said) : 0;
    text[len] = 0;
    if (said) fclose(said);
    return strstr(text, "is above its limit") != NULL;
}

int main(int argc, char **argv) {
    char *bytes = argc > 1 ? memory(argv[1]) : MAP_FAILED;
    if (bytes == MAP_FAILED) return 2;
    memset(bytes, 1, BYTES);
    for (int look = 0; look < LOOKS; look++) {
        if (is_told()) return 0;
        usleep(10000);
    }
    return 1;
}
