/* A child that is forked while a thread that the library has just started registers what is to be done in children:
 * it has its own manager nevertheless. */
#define _GNU_SOURCE
#include "check.h"

#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_int registering, forked;
static pid_t parent;

/* Part of the C library that each program has for itself: the library is linked with this one. */
int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *);
int pthread_atfork(void (*prepare)(void), void (*in_parent)(void), void (*in_child)(void)) {
    if (getpid() == parent && gettid() != parent) {
        atomic_store(&registering, 1);
        while (!atomic_load(&forked)) usleep(1000);
    }
    return __register_atfork(prepare, in_parent, in_child, NULL);
}

int main(void) {
    farheap_manager *manager = NULL;
    parent = getpid();
    OK(farheap_manager_new(8 * MIB, &manager));
    while (!atomic_load(&registering)) usleep(1000);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60); /* a hang is a failure */
        farheap_manager *own = NULL;
        OK(farheap_manager_new(8 * MIB, &own));
        OK(farheap_manager_free(own));
        _exit(0);
    }
    atomic_store(&forked, 1);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(farheap_manager_free(manager));
    return 0;
}
