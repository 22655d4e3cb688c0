/* SQLite with its memory in far memory: a database in memory that is larger than the limit. What SQLite asks for in
 * blocks of 4 KiB and more are pages and large rows, and those are far; all else is small and in use, and local.
 * Built where sqlite3.h is. The same queries with SQLite's own allocator have to have the same answers. `sqlite far ROWS`
 * and `sqlite own ROWS` are one side alone; far memory then has the limit of the control group or the machine. */
#include <farheap.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define LIMIT ((uint64_t)16 << 20)
#define CAPACITY ((uint64_t)1 << 30)
#define FAR_FROM 4096
#define ANSWER_MAX 256
#define LOAD_MAX 512

static farheap_placement placement(size_t size) { return size >= FAR_FROM ? FARHEAP_FAR : FARHEAP_LOCAL; }

static void *allocate(int size) { return far_allocate(placement((size_t)size), (size_t)size, 16); }

static int size_of(void *block) { return (int)far_usable_size(block); }
static int round_up(int size) { return (size + 15) & ~15; }
static int init(void *none) { return none ? SQLITE_ERROR : SQLITE_OK; }
static void finish(void *none) { (void)none; }

/* A block that grows beyond FAR_FROM moves to the other memory; far_realloc would leave that to the threshold. */
static void *resize(void *block, int size) {
    const size_t old = far_usable_size(block);
    void *moved = allocate(size);
    if (!moved) return NULL;
    memcpy(moved, block, old < (size_t)size ? old : (size_t)size);
    far_free(block);
    return moved;
}

static const sqlite3_mem_methods METHODS = {allocate, far_free, resize, size_of, round_up, init, finish, NULL};

static const char *const LOAD =
    "pragma temp_store = file;" /* In memory a sort has a small block for each row. */
    "create table t(a integer primary key, b text);"
    "with recursive c(x) as (select 1 union all select x + 1 from c where x < %ld)"
    " insert into t select x, hex(x * 7919) || '-' || x || '-' || hex(zeroblob(20)) from c;"
    "create index i on t(b);";
static const char *const QUERY =
    "select count(*) n, sum(length(b)) bytes, min(b) first, (select sum(a) from t where b > '36') found from t;";

static int append(void *answer, int columns, char **values, char **names) {
    for (int at = 0; at < columns; at++) {
        const size_t len = strlen(answer);
        snprintf((char *)answer + len, ANSWER_MAX - len, "%s: %s  ", names[at], values[at] ? values[at] : "null");
    }
    return 0;
}

static int run(const char *what, long rows, char *answer) {
    char load[LOAD_MAX];
    sqlite3 *database = NULL;
    char *message = NULL;
    struct rusage usage;
    const clock_t began = clock();
    answer[0] = 0;
    snprintf(load, sizeof load, LOAD, rows);
    int result = sqlite3_open(":memory:", &database);
    /* Beyond it a statement is SQLITE_NOMEM and rolled back. Far memory refuses no block while there is address space:
     * where the device is full and nothing can leave, a touch is SIGBUS. */
    sqlite3_hard_heap_limit64((sqlite3_int64)(CAPACITY / 4 * 3));
    if (result == SQLITE_OK) result = sqlite3_exec(database, load, NULL, NULL, &message);
    if (result == SQLITE_OK) result = sqlite3_exec(database, QUERY, append, answer, &message);
    if (result != SQLITE_OK) fprintf(stderr, "%s: %s: %s\n", what, sqlite3_errstr(result), message ? message : "");
    getrusage(RUSAGE_SELF, &usage);
    printf("%-8s %.2f s of processor time, SQLite has %lld MiB, the process had at most %ld\n", what,
           (double)(clock() - began) / CLOCKS_PER_SEC, sqlite3_memory_used() >> 20, usage.ru_maxrss >> 10);
    sqlite3_free(message);
    sqlite3_close(database);
    sqlite3_shutdown();
    return result;
}

int main(int count, char **words) {
    sqlite3_mem_methods own;
    const int is_one = count == 3;
    const long rows = is_one ? atol(words[2]) : 300000;
    char far_answer[ANSWER_MAX], own_answer[ANSWER_MAX];
    if (is_one && !strcmp(words[1], "own")) return run("its own", rows, own_answer) || puts(own_answer) < 0;
    farheap_heap *heap = NULL;
    farheap_config config = FARHEAP_CONFIG_INIT;
    if (!is_one) config.far_limit = LIMIT;
    config.capacity = CAPACITY;
    if (farheap_start_config(&config, &heap) != FARHEAP_OK)
        return fprintf(stderr, "%s\n", farheap_last_message()), farheap_last_status() == FARHEAP_E_UFFD_UNAVAILABLE ? 77 : 1;
    /* Before SQLite is initialised, and again after sqlite3_shutdown(). */
    sqlite3_config(SQLITE_CONFIG_GETMALLOC, &own);
    sqlite3_config(SQLITE_CONFIG_MALLOC, &METHODS);
    if (run("farheap", rows, far_answer) != SQLITE_OK) return 1;
    farheap_stats stats = {.size = sizeof stats};
    if (farheap_heap_stats(heap, &stats) != FARHEAP_OK) return 1;
    printf("at most %d MiB of far memory resident, %d MiB written, %d MiB read\n", (int)(stats.resident_bytes_max >> 20),
           (int)(stats.bytes_written >> 20), (int)(stats.bytes_read >> 20));
    /* SQLite has given everything back. */
    if (farheap_shutdown(heap) != FARHEAP_OK) return 1;
    farheap_heap_free(heap);
    if (is_one) return puts(far_answer) < 0;
    sqlite3_config(SQLITE_CONFIG_MALLOC, &own);
    if (run("its own", rows, own_answer) != SQLITE_OK) return 1;
    printf("%s\n", far_answer);
    return strcmp(far_answer, own_answer) == 0 && stats.resident_bytes_max <= LIMIT && stats.bytes_written > LIMIT ? 0 : 1;
}
