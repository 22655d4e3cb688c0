/* What the C tests share. Not assert(): it must hold in every build. */
#ifndef CHECK_H
#define CHECK_H

#include "farheap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
