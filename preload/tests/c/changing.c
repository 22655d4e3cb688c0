/* Memory is unmapped while constants of the program leave: by children of forks that no function is called for, and by a
   real-time thread on the one processor that there is. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define CONSTANT (48ul << 20)
#define FAR (96ul << 20)
#define CHECK(what) do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

__asm__(".section .rodata\n.balign 4096\nconstant:\n.fill 6291456, 8, 1\n.text");
extern const volatile uint64_t constant[CONSTANT / 8];
static unsigned char *far;

/* Far memory is read all the time, so that code leaves, and constants are, so that they come back. */
static void *read_far(void *sum) {
    for (;;) for (size_t at = 0; at < FAR; at += PAGE) *(volatile uint64_t *)sum += *(volatile unsigned char *)(far + at);
    return NULL;
}

static void *read_constants(void *sum) {
    for (;;) for (size_t n = 0; n < CONSTANT / 8; n += PAGE / 8) *(volatile uint64_t *)sum += constant[n];
    return NULL;
}

/* As much of a work as is asked for: half of it where nobody asks for a long run. */
static int amount(int all) { return getenv("FARHEAP_TEST_LONG") ? all : all / 2; }

static uint64_t time_ms(clockid_t clock) {
    struct timespec now;
    CHECK(clock_gettime(clock, &now) == 0);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Unmaps what is not far: such a call waits while code leaves. */
static void unmap(void) {
    void *place = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(place != MAP_FAILED && munmap(place, PAGE) == 0);
}

/* What of the process's memory is files', see proc_pid_statm(5). */
static long file_pages(FILE *statm) {
    long size, resident, of_files;
    rewind(statm);
    CHECK(fscanf(statm, "%ld %ld %ld", &size, &resident, &of_files) == 3);
    return of_files;
}

/* Whether a child comes to its end. */
static int ends(pid_t child) {
    int status;
    for (int looks = 0; looks < 10000; looks++) {
        if (waitpid(child, &status, WNOHANG) == child) return status == 0;
        usleep(1000);
    }
    kill(child, SIGKILL);
    return 0;
}

/* Forks when constants are just leaving. */
static void fork_by_system_call(void) {
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm);
    setvbuf(statm, NULL, _IONBF, 0);
    long before = file_pages(statm);
    for (int forks = 0; forks < amount(16);) {
        long now = file_pages(statm);
        if (now < before - 1000) {
            pid_t child = (pid_t)syscall(SYS_fork);
            if (child == 0) {
                unmap();
                _exit(0);
            }
            CHECK(child > 0 && ends(child));
            forks++;
            now = file_pages(statm);
        }
        before = now;
    }
}

/* Waits take no time of the processor. */
static void unmap_in_real_time(void) {
    struct sched_param first = { .sched_priority = 1 };
    if (pthread_setschedparam(pthread_self(), SCHED_FIFO, &first) != 0) {
        CHECK(errno != ENOSYS);
        puts("not permitted");
        exit(0);
    }
    uint64_t longest_ms = 0, end_ms = time_ms(CLOCK_MONOTONIC) + (uint64_t)amount(6000);
    while (time_ms(CLOCK_MONOTONIC) < end_ms) {
        usleep(300);
        uint64_t began_ms = time_ms(CLOCK_THREAD_CPUTIME_ID);
        unmap();
        uint64_t took_ms = time_ms(CLOCK_THREAD_CPUTIME_ID) - began_ms;
        if (took_ms > longest_ms) longest_ms = took_ms;
    }
    fprintf(stderr, "longest: %d ms of the processor\n", (int)longest_ms);
    CHECK(longest_ms < 200);
}

int main(int argc, char **argv) {
    uint64_t sums[2] = {0};
    pthread_t threads[2];
    CHECK(argc == 2);
    int is_real_time = strcmp(argv[1], "real-time") == 0;
    if (is_real_time) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(sched_getcpu(), &one);
        CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    }
    alarm(300);
    CHECK((far = malloc(FAR)));
    memset(far, 1, FAR);
    CHECK(pthread_create(&threads[0], NULL, read_far, &sums[0]) == 0);
    CHECK(pthread_create(&threads[1], NULL, read_constants, &sums[1]) == 0);
    if (is_real_time) unmap_in_real_time();
    else fork_by_system_call();
    puts("done");
    exit(0);
}
