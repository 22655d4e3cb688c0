/* A file gets the number of standard error: nothing may stand in it but what is written here. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Has the library say that a descriptor is its own. */
static int is_refused_a_number(void) {
    for (int number = 3; number < 1024; number++)
        if (dup2(1, number) < 0) return errno == EBUSY;
    return 0;
}

int main(int argc, char **argv) {
    int all = argc > 2 && strcmp(argv[2], "all") == 0;
    if (argc < 2) return 2;
    if (all) {
        syscall(SYS_close_range, 2, ~0U, 0);
    } else {
        close(2);
    }
    if (open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600) != 2 || write(2, "data", 4) != 4) return 3;
    if (all) {
        while (dup(2) < 600) {}
    } else if (!is_refused_a_number()) {
        return 4;
    }
    return 0;
}
