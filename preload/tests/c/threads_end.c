/* Threads end while what the kernel reads and writes for them then has left memory: robust mutexes that they hold, their stacks
 * with the word that a join waits for, a word of their own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MUTEXES = 8, APART = 64 << 10, BLOCKS = 32, STACK = 1 << 20, ROUNDS = 200 };

static char *blocks[BLOCKS];

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(1);
}

static int is_out(const void *place) {
    uint64_t entry = 0;
    int map = open("/proc/self/pagemap", O_RDONLY);
    if (pread(map, &entry, sizeof entry, (uintptr_t)place / 4096 * sizeof entry) != sizeof entry) fail("the page map");
    close(map);
    return !(entry >> 63);
}

/* Asks pages out, and uses other memory, until the page of each place has left. Does not fail: some are in use all the
 * time. */
static int push_out(void *const *places, int count) {
    for (int round = 0; round < ROUNDS; round++) {
        int out = 0;
        for (int n = 0; n < count; n++) {
            if (is_out(places[n])) out++;
            else madvise((void *)((uintptr_t)places[n] & ~(uintptr_t)4095), 4096, MADV_PAGEOUT);
        }
        if (out == count) return 1;
        for (int n = 0; n < BLOCKS; n++) {
            if (!blocks[n]) blocks[n] = malloc(1 << 20);
            memset(blocks[n], n + round, 1 << 20);
        }
    }
    return 0;
}

static pthread_mutex_t *mutexes[MUTEXES];
enum ending { RETURNS, EXITS, IS_CANCELLED };

static void *owner(void *how) {
    for (int n = 0; n < MUTEXES; n++) pthread_mutex_lock(mutexes[n]);
    if (!push_out((void *const *)mutexes, MUTEXES)) fail("mutexes stay in memory");
    if ((intptr_t)how == EXITS) pthread_exit(NULL);
    if ((intptr_t)how == IS_CANCELLED) {
        pthread_cancel(pthread_self());
        pthread_testcancel();
        fail("is not cancelled");
    }
    return NULL;
}

static void robust(int protocol, enum ending ending) {
    char *far = malloc(MUTEXES * APART);
    for (int n = 0; n < MUTEXES; n++) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutexattr_setprotocol(&attributes, protocol);
        mutexes[n] = (pthread_mutex_t *)(far + n * APART);
        pthread_mutex_init(mutexes[n], &attributes);
    }
    pthread_t thread;
    if (pthread_create(&thread, NULL, owner, (void *)(intptr_t)ending)) fail("no thread");
    pthread_join(thread, NULL);
    for (int n = 0; n < MUTEXES; n++) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 5;
        if (pthread_mutex_timedlock(mutexes[n], &until) != EOWNERDEAD) fail("is not told that the owner died");
        pthread_mutex_consistent(mutexes[n]);
        pthread_mutex_unlock(mutexes[n]);
    }
    /* What was kept for the thread leaves again. */
    if (!push_out((void *const *)mutexes, MUTEXES)) fail("mutexes of a thread that has ended stay");
    free(far);
}

static pthread_barrier_t barrier;

static void *sleeper(void *unused) {
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    return unused;
}

/* A stack in far memory: the C library has the word that a join waits for at its end. */
static void far_stack(void) {
    pthread_barrier_init(&barrier, NULL, 2);
    char *stack = aligned_alloc(4096, STACK);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (pthread_attr_setstack(&attributes, stack, STACK)) fail("no such stack");
    pthread_t thread;
    if (pthread_create(&thread, &attributes, sleeper, NULL)) fail("no thread on its own stack");
    pthread_barrier_wait(&barrier);
    void *const places[] = {stack + STACK - 64};
    push_out(places, 1);
    pthread_barrier_wait(&barrier);
    pthread_join(thread, NULL);
    free(stack);
}

static volatile int ends;

static void *with_word(void *word) {
    syscall(SYS_set_tid_address, word);
    if (!push_out(&word, 1)) fail("a word stays in memory");
    ends = 1;
    return NULL;
}

/* A word that the thread has chosen, by which others learn of its end. */
static void own_word(void) {
    volatile int *word = malloc(APART);
    *word = 1;
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, with_word, (void *)word)) fail("no detached thread");
    while (!ends) usleep(1000);
    for (int tries = 0; *word; tries++) {
        if (tries == 30000) fail("the word is not cleared");
        usleep(1000);
    }
    free((void *)word);
}

static volatile sig_atomic_t signals;
static void handler(int number) { signals += number == SIGUSR1; }

/* The kernel puts the frame of a handler on a stack that has left. */
static void far_signal_stack(void) {
    char *stack = malloc(STACK);
    memset(stack, 1, STACK);
    stack_t alternate = {.ss_sp = stack, .ss_size = STACK};
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&alternate, NULL) || sigaction(SIGUSR1, &action, NULL)) fail("no signal stack");
    void *const places[] = {stack + STACK - 128, stack + STACK - 4096};
    if (!push_out(places, 2)) fail("a signal stack stays in memory");
    raise(SIGUSR1);
    if (signals != 1) fail("the handler has not run");
    alternate.ss_flags = SS_DISABLE;
    sigaltstack(&alternate, NULL);
    free(stack);
}

int main(void) {
    alarm(300);
    for (int n = 0; n < 2; n++) {
        for (int block = 0; block < BLOCKS; block++) {
            if (!blocks[block]) blocks[block] = malloc(1 << 20);
            memset(blocks[block], block, 1 << 20);
        }
    }
    robust(PTHREAD_PRIO_NONE, RETURNS);
    robust(PTHREAD_PRIO_NONE, EXITS);
    robust(PTHREAD_PRIO_NONE, IS_CANCELLED);
    robust(PTHREAD_PRIO_INHERIT, RETURNS);
    far_stack();
    own_word();
    far_signal_stack();
    puts("right");
}
