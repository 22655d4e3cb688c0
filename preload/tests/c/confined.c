/* Memory beyond the limit, of two threads and a forked child, each with system calls on it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 3000, LEN = 8192 };
static unsigned char *blocks[2][BLOCKS];

static void *fill(void *half) {
    for (int at = 0; at < BLOCKS; at++) {
        unsigned char *block = malloc(LEN);
        if (!block) return "no memory";
        memset(block, at % 251, LEN);
        ((unsigned char **)half)[at] = block;
    }
    return NULL;
}

static int is_right(void) {
    for (int half = 0; half < 2; half++)
        for (int at = 0; at < BLOCKS; at++)
            if (blocks[half][at][0] != at % 251 || blocks[half][at][LEN - 1] != at % 251) return 0;
    return 1;
}

int main(void) {
    pthread_t thread;
    void *failed = NULL;
    int ends[2], status = 0;
    if (pthread_create(&thread, NULL, fill, blocks[0]) || fill(blocks[1]) || pthread_join(thread, &failed) || failed)
        return 2;
    if (!is_right() || pipe(ends)) return 3;
    pid_t child = fork();
    if (child == 0) {
        for (int at = 0; at < BLOCKS; at++) blocks[0][at][LEN / 2] = 7;
        char *own = malloc(LEN);
        _exit(!is_right() || !own || write(ends[1], blocks[1][9], 1) != 1);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return 4;
    if (read(ends[0], blocks[1][BLOCKS - 1], 1) != 1 || blocks[1][BLOCKS - 1][0] != 9) return 5;
    blocks[1][BLOCKS - 1][0] = (BLOCKS - 1) % 251;
    if (!is_right()) return 6;
    for (int at = 0; at < BLOCKS; at++) free(blocks[0][at]);
    puts("right");
    return 0;
}
