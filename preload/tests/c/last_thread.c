/* The first thread ends before others: the process ends with its last one, and keeps to the limit until then. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCKS = 64 * 16, SIZE = 64 << 10, LIMIT = 32 << 10, SLACK = 8 << 10 };
static unsigned char *blocks[BLOCKS];

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(1);
}

static int first_has_ended(void) {
    char text[256] = "", state = 0;
    snprintf(text, sizeof text, "/proc/self/task/%d/stat", getpid());
    FILE *file = fopen(text, "r");
    if (!file || fscanf(file, "%*d %*s %c", &state) != 1) fail("the state of the first thread");
    fclose(file);
    return state == 'Z';
}

static long peak_kib(void) {
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/thread-self/status", "r");
    while (fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %ld", &kib);
    fclose(file);
    return kib;
}

static void *last(void *unused) {
    while (!first_has_ended()) usleep(1000);
    for (int round = 0; round < 2; round++) {
        for (int n = 0; n < BLOCKS; n++) {
            if (round == 0) blocks[n] = malloc(SIZE);
            memset(blocks[n], n + round, SIZE);
        }
        for (int n = 0; n < BLOCKS; n++)
            if (blocks[n][n] != (unsigned char)(n + round)) fail("another byte");
    }
    if (peak_kib() < 0 || peak_kib() > LIMIT + SLACK) {
        fprintf(stderr, "%ld KiB\n", peak_kib());
        fail("above the limit");
    }
    puts("right");
    return unused;
}

int main(void) {
    alarm(100);
    pthread_t thread;
    if (pthread_create(&thread, NULL, last, NULL) != 0) fail("no thread");
    pthread_exit(NULL);
}
