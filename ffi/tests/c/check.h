/* What the C tests share. Not assert(): it must hold in every build. */
#ifndef CHECK_H
#define CHECK_H

#include "farheap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <time.h>

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: %s: last error %s: %s\n", __FILE__, __LINE__, #condition, \
                    farheap_status_name(farheap_last_status()), farheap_last_message());     \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

#define OK(call) CHECK((call) == FARHEAP_OK)

/* A call that must fail with a code, and leave a message. */
#define FAILS(code, call)                                       \
    do {                                                        \
        farheap_clear_error();                                  \
        CHECK((call) == (code));                                \
        CHECK(farheap_last_status() == (code));                 \
        CHECK(farheap_last_message()[0] != '\0');               \
    } while (0)

/* A call that must give nothing (NULL, false, 0), with a code. */
#define NOTHING(code, call)                                     \
    do {                                                        \
        farheap_clear_error();                                  \
        CHECK(!(call));                                         \
        CHECK(farheap_last_status() == (code));                 \
    } while (0)

/* Waits until no page of a pool is fixed: one that it has locked to evict it counts for that moment, too. */
static inline void expect_unfixed(farheap_pool *pool) {
    farheap_pool_stats stats = {.size = sizeof stats};
    OK(farheap_pool_stats_get(pool, &stats));
    for (int looks = 0; stats.holders && looks < 60000; looks++) {
        thrd_sleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* The pool tells nobody when it is done. */
        OK(farheap_pool_stats_get(pool, &stats));
    }
    CHECK(stats.holders == 0);
}

/* Ends the program as skipped when far memory is not permitted. */
static inline void skip_unless_permitted(farheap_status status) {
    if (status == FARHEAP_E_UFFD_UNAVAILABLE) {
        printf("skipped: %s\n", farheap_last_message());
        exit(77);
    }
    CHECK(status == FARHEAP_OK);
}

#define MIB ((size_t)1 << 20)

#endif
