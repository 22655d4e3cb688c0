/* Wrong frees, and writes outside of blocks: with `check:on` each ends its process with a message that names address and
 * cause, and some of them always do. What is right is right with `check:on` too. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *PLAIN = "far_limit:16MiB,capacity:64MiB,threshold:1KiB,mode:user";
static const char *CHECKED = "far_limit:16MiB,capacity:64MiB,threshold:1KiB,mode:user,check:on";

static farheap_heap *heap;

/* Says which address is going to be named; what it returns the compiler knows nothing of. */
static char *named(void *ptr) {
    void *volatile unknown = ptr;
    fprintf(stderr, "%p\n", unknown);
    return unknown;
}

static char *far(size_t size) { return named(far_allocate(FARHEAP_FAR, size, 16)); }
static char *local(size_t size) { return named(far_allocate(FARHEAP_LOCAL, size, 16)); }

static void twice(char *block) {
    far_free(block);
    far_free(block);
}

static void large_twice(void) { twice(far(MIB)); }
static void small_twice(void) { twice(far(64)); }
static void local_twice(void) { twice(local(100)); }
static void large_local_twice(void) { twice(local(MIB)); }

static void twice_with_others_between(void) {
    char *block = far(64), *others[100];
    for (int n = 0; n < 100; n++) others[n] = far_allocate(FARHEAP_FAR, 64, 16);
    far_free(block);
    for (int n = 0; n < 100; n++) far_free(others[n]);
    far_free(block);
}

static void twice_found_when_caches_are_emptied(void) {
    char *block = far(64), *other = far_allocate(FARHEAP_FAR, 64, 16);
    far_free(block);
    far_free(other);
    far_free(block);
    farheap_shutdown(heap);
}

static void of_malloc(void) { far_free(named(malloc(100))); }
static void large_of_malloc(void) { far_free(named(malloc(MIB))); }

static void of_the_stack(void) {
    char bytes[64] = {0};
    far_free(named(bytes));
}

static void in_the_first_page(void) {
    char *block = far_allocate(FARHEAP_FAR, MIB, 16);
    far_free(named(block + 100));
}

static void in_a_later_page(void) {
    char *block = far_allocate(FARHEAP_FAR, 16 * MIB, 16);
    far_free(named(block + 5 * 4096));
}

static void in_a_small_block(void) {
    char *block = far_allocate(FARHEAP_FAR, 64, 16);
    far_free(named(block + 32));
}

static void in_a_local_block(void) {
    char *block = far_allocate(FARHEAP_LOCAL, 1000, 16);
    far_free(named(block + 512));
}

static void with_another_size(void) { far_free_sized(far(64), 600, 16); }

static void resized_after_it_was_freed(void) {
    char *block = far(64);
    far_free(block);
    far_free(far_realloc(block, 1000));
}

static void written_behind_its_end(void) {
    char *block = far(112);
    block[112] = 1;
    far_free(block);
}

static void written_after_it_was_freed(void) {
    char *block = far(112);
    far_free(block);
    block[50] = 1;
    farheap_shutdown(heap);
}

/* What is right: bytes stay, sizes are those that were asked for or more. */
static void right(void) {
    enum { BLOCKS = 300, STEPS = 20000 };
    static unsigned char *blocks[BLOCKS];
    static size_t sizes[BLOCKS];
    uint64_t dice = 88172645463325252u;
    bool is_child = false;
    for (int step = 0; step < STEPS; step++) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        size_t at = dice % BLOCKS, size = (dice >> 20) % (step % 50 ? 300 : 100000);
        for (size_t n = 0; n < sizes[at]; n += 37) CHECK(blocks[at][n] == (unsigned char)(at + n));
        CHECK(!blocks[at] || far_usable_size(blocks[at]) >= sizes[at]);
        if (step % 3 == 0) {
            blocks[at] = far_realloc(blocks[at], size);
            for (size_t n = 0; n < size && n < sizes[at]; n += 37)
                CHECK(blocks[at][n] == (unsigned char)(at + n));
        } else {
            far_free(blocks[at]);
            blocks[at] = step % 2 ? far_calloc(1, size) : far_allocate(step % 4 ? FARHEAP_FAR : FARHEAP_LOCAL, size, 64);
            for (size_t n = 0; step % 2 && n < size; n++) CHECK(!blocks[at][n]);
        }
        CHECK(blocks[at]);
        sizes[at] = size;
        for (size_t n = 0; n < size; n++) blocks[at][n] = (unsigned char)(at + n);
        if (step == STEPS / 2) {
            pid_t pid = fork();
            int status = 0;
            if (pid) CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
            else alarm(60);
            is_child = !pid;
        }
        if (is_child && step > STEPS / 2 + 2000) _exit(0);
    }
    for (int at = 0; at < BLOCKS; at++) far_free(blocks[at]);
}

static const char NONE[] = "no block", TWICE[] = "freed twice";

static const struct {
    const char *name;
    void (*run)(void);
    const char *cause; /* NULL: all is right */
    bool always;       /* without `check:on` as well */
} CASES[] = {
    {"large_twice", large_twice, TWICE, true},
    {"small_twice", small_twice, TWICE, true},
    {"local_twice", local_twice, TWICE, false},
    {"large_local_twice", large_local_twice, TWICE, true},
    {"twice_with_others_between", twice_with_others_between, TWICE, false},
    {"twice_found_when_caches_are_emptied", twice_found_when_caches_are_emptied, TWICE, true},
    {"of_malloc", of_malloc, NONE, false},
    {"large_of_malloc", large_of_malloc, NONE, false},
    {"of_the_stack", of_the_stack, NONE, false},
    {"in_the_first_page", in_the_first_page, NONE, true},
    {"in_a_later_page", in_a_later_page, NONE, true},
    {"in_a_small_block", in_a_small_block, NONE, false},
    {"in_a_local_block", in_a_local_block, NONE, false},
    {"with_another_size", with_another_size, "freed as a block of 640 bytes", false},
    {"resized_after_it_was_freed", resized_after_it_was_freed, TWICE, false},
    {"written_behind_its_end", written_behind_its_end, "written to behind its end", false},
    {"written_after_it_was_freed", written_after_it_was_freed, "written to after it was freed", false},
    {"right", right, NULL, true},
};

/* Runs a case in a child whose heap starts there, and compares how it ends and what it says. At the last attempt it must
 * be right. */
static bool run(size_t number, const char *conf, bool is_last) {
    int out[2];
    CHECK(pipe(out) == 0);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(300); /* a hang is a failure */
        dup2(out[1], STDERR_FILENO);
        OK(farheap_start(conf, &heap));
        CASES[number].run();
        OK(farheap_shutdown(heap));
        _exit(0);
    }
    close(out[1]);
    char text[4096] = {0}, wanted[200];
    size_t len = 0;
    for (ssize_t got = 1; got > 0; len += (size_t)got) {
        got = read(out[0], text + len, sizeof text - 1 - len);
        CHECK(got >= 0);
    }
    close(out[0]);
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    const char *cause = CASES[number].cause;
    bool is_right = WIFEXITED(status) && WEXITSTATUS(status) == 0 && !strstr(text, "farheap: 0x");
    if (cause) {
        /* The address that is to be named is a line, after what start-up may have to tell. */
        char *address = strncmp(text, "0x", 2) == 0 ? text : strstr(text, "\n0x");
        address += address && *address == '\n';
        int digits = address ? (int)strcspn(address, "\n") : 0;
        snprintf(wanted, sizeof wanted, "farheap: %.*s: %s", digits, address ? address : "", cause);
        is_right = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && digits && strstr(text, wanted);
    }
    if (!is_right && is_last) {
        fprintf(stderr, "%s with %s: status %d, not `%s`:\n%s\n", CASES[number].name, conf, status,
                cause ? wanted : "right", text);
        exit(1);
    }
    return is_right;
}

int main(void) {
    /* Not this process: its children start heaps of their own. */
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        skip_unless_permitted(farheap_start(PLAIN, &heap));
        return farheap_shutdown(heap) != FARHEAP_OK;
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) return WEXITSTATUS(status);
    for (size_t number = 0; number < sizeof CASES / sizeof *CASES; number++) {
        run(number, CHECKED, true);
        /* The heap may empty the thread's cache between two frees: then jemalloc gets both. */
        int attempts = CASES[number].always ? 20 : 0;
        while (attempts-- > 0 && !run(number, PLAIN, attempts == 0)) continue;
    }
    return 0;
}
