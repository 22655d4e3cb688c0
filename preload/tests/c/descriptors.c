/* Closes what it does not know, and chooses numbers of descriptors: far memory is right all the same. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 24 * 16, SIZE = 64 << 10 };
static unsigned char *blocks[BLOCKS];

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void fill(int version) {
    for (int n = 0; n < BLOCKS; n++) memset(blocks[n], n + version, SIZE);
}

static void check(const char *after, int version) {
    for (int n = 0; n < BLOCKS; n++)
        for (int at = 0; at < SIZE; at += 512)
            if (blocks[n][at] != (unsigned char)(n + version)) fail(after);
}

/* How many descriptors are open below 256, and the highest of all. */
static int low(int *highest) {
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;
    *highest = -1;
    for (struct dirent *entry; (entry = readdir(dir));) {
        int fd = atoi(entry->d_name);
        if (fd == dirfd(dir)) continue;
        count += fd < 256;
        if (fd > *highest) *highest = fd;
    }
    closedir(dir);
    return count;
}

static void in_child(const char *what, void (*act)(void)) {
    pid_t child = fork();
    if (child == 0) {
        act();
        exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) fail(what);
}

static void grandchild(void) { check("in a child of a child that has closed all", 5); }

static void child(void) {
    check("in a child", 5);
    closefrom(3);
    check("in a child that has closed all", 5);
    in_child("a child of the child", grandchild);
}

/* Without standard streams: what is written there goes nowhere, least of all to the device. */
static int without_streams(void) {
    fill(0);
    for (int fd = 0; fd < 3; fd++)
        if (write(fd, "lost", 4) != -1 || errno != EBADF) return 2;
    fill(1);
    check("without streams", 1);
    return 0;
}

int main(int argc, char **argv) {
    for (int n = 0; n < BLOCKS; n++) blocks[n] = malloc(SIZE);
    if (argc > 1 && strcmp(argv[1], "without") == 0) return without_streams();
    int highest, before = low(&highest);
    fill(0);
    if (low(&highest) != before) fail("farheap has a low descriptor");
    for (int fd = 40; fd < 64; fd++)
        if (dup2(1, fd) != fd || dup3(1, fd, O_CLOEXEC) != fd || close(fd) != 0) fail("a number of its choice");
    check("after dup2", 0);
    fill(1);
    if (close(highest) != -1 || errno != EBADF) fail("close of a descriptor that the program does not have");
    if (dup2(1, highest) != -1 || errno != EBUSY) fail("dup2 over a descriptor that the program does not have");
    for (int fd = 3; fd < 4096; fd++) close(fd);
    check("after close", 1);
    fill(2);
    int own = open("/dev/null", O_RDONLY);
    closefrom(3);
    if (fcntl(own, F_GETFD) != -1) fail("closefrom closes nothing");
    check("after closefrom", 2);
    fill(3);
    own = fcntl(1, F_DUPFD, 2000);
    if (close_range(3, ~0U, 0) != 0) fail("close_range");
    if (own < 0 || fcntl(own, F_GETFD) != -1) fail("close_range closes nothing");
    check("after close_range", 3);
    fill(4);
    if (close_range(3, ~0U, CLOSE_RANGE_UNSHARE) != 0) fail("close_range that unshares");
    check("after close_range that unshares", 4);
    fill(5);
    in_child("a child", child);
    check("after a child", 5);
    puts("right");
}
