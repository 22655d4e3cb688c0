/* B+-trees in a pool's pages, from C. Needs no permission. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <unistd.h>

static size_t key_of(unsigned i, char *key) {
    return (size_t)snprintf(key, 32, "key %07u", i * 7919u % 100003u);
}

/* Gets a value that must be `expected`, or that must not be there (NULL). */
static void expect(const farheap_btree *tree, const char *key, size_t key_len, const char *expected) {
    char value[64] = {0};
    size_t len = 99;
    bool found = !expected;
    OK(farheap_btree_get(tree, key, key_len, value, sizeof value, &len, &found));
    CHECK(found == (expected != NULL));
    CHECK(len == (expected ? strlen(expected) : 0));
    CHECK(!expected || !memcmp(value, expected, len));
}

static void keys_and_values(farheap_btree *tree) {
    bool is = false;
    expect(tree, "a", 1, NULL);
    OK(farheap_btree_insert(tree, "a", 1, "one", 3, &is));
    CHECK(is);
    OK(farheap_btree_insert(tree, "a", 1, "another", 7, &is));
    CHECK(!is);
    expect(tree, "a", 1, "another");
    OK(farheap_btree_insert(tree, "a\0b", 3, "zeros are bytes", 15, NULL));
    expect(tree, "a\0b", 3, "zeros are bytes");
    expect(tree, "a\0", 2, NULL);

    /* Too little room: what fits, and how much there is. */
    char value[4] = "xxx";
    size_t len = 0;
    OK(farheap_btree_get(tree, "a", 1, value, 3, &len, &is));
    CHECK(is && len == 7 && !memcmp(value, "ano", 4));
    OK(farheap_btree_get(tree, "a", 1, NULL, 0, &len, &is));
    CHECK(is && len == 7);

    /* Of no length. */
    OK(farheap_btree_insert(tree, NULL, 0, NULL, 0, &is));
    CHECK(is);
    expect(tree, NULL, 0, "");
    OK(farheap_btree_remove(tree, NULL, 0, &is));
    CHECK(is);
    expect(tree, NULL, 0, NULL);
    OK(farheap_btree_remove(tree, "a", 1, NULL));
    OK(farheap_btree_remove(tree, "a", 1, &is));
    CHECK(!is);
    OK(farheap_btree_remove(tree, "a\0b", 3, &is));
    CHECK(is);
}

static void add_one(void *userdata, void *value, size_t len) {
    CHECK(len == sizeof(uint64_t));
    uint64_t number;
    memcpy(&number, value, sizeof number);
    number += *(const uint64_t *)userdata;
    memcpy(value, &number, sizeof number);
}

static void values_change_in_place(farheap_btree *tree) {
    uint64_t number = 41, by = 1;
    size_t len = 0;
    bool found = false;
    OK(farheap_btree_insert(tree, "n", 1, &number, sizeof number, NULL));
    OK(farheap_btree_update(tree, "n", 1, add_one, &by, &found));
    CHECK(found);
    OK(farheap_btree_get(tree, "n", 1, &number, sizeof number, &len, &found));
    CHECK(found && len == sizeof number && number == 42);
    OK(farheap_btree_update(tree, "m", 1, add_one, &by, &found));
    CHECK(!found);
    OK(farheap_btree_update(tree, "m", 1, add_one, &by, NULL));
    FAILS(FARHEAP_E_NULL, farheap_btree_update(tree, "n", 1, NULL, &by, &found));
    OK(farheap_btree_remove(tree, "n", 1, NULL));
}

/* Entries from a key on: how many; they must ascend, and be what `filled` has put there. */
static unsigned scanned(const farheap_btree *tree, const char *from, size_t from_len) {
    farheap_cursor *cursor = NULL;
    OK(farheap_btree_scan(tree, from, from_len, &cursor));
    farheap_entry entry;
    char last[32] = "";
    size_t last_len = 0;
    unsigned count = 0;
    for (bool found = true;; count++) {
        OK(farheap_cursor_next(cursor, &entry, &found));
        if (!found) break;
        CHECK(entry.key_len == 11 && entry.value_len == 11 && !memcmp(entry.key, entry.value, 11));
        CHECK(count == 0 || memcmp(last, entry.key, 11) < 0);
        CHECK(from_len == 0 || memcmp(from, entry.key, 11) <= 0);
        memcpy(last, entry.key, last_len = entry.key_len);
    }
    bool found = true;
    OK(farheap_cursor_next(cursor, &entry, &found)); /* and it stays there */
    CHECK(!found);
    OK(farheap_cursor_free(cursor));
    FAILS(FARHEAP_E_HANDLE, farheap_cursor_next(cursor, &entry, &found));
    return count;
}

enum { ENTRIES = 30000 }; /* more than the limit holds */

static void many_entries(farheap_pool *pool, farheap_btree *tree) {
    char key[32];
    for (unsigned i = 0; i < ENTRIES; i++) {
        const size_t len = key_of(i, key);
        bool is_new = false;
        OK(farheap_btree_insert(tree, key, len, key, len, &is_new));
        CHECK(is_new);
    }
    for (unsigned i = 0; i < ENTRIES; i += 7) expect(tree, key, key_of(i, key), key);
    CHECK(scanned(tree, NULL, 0) == ENTRIES);
    CHECK(scanned(tree, "key 9999999", 11) == 0);
    for (unsigned i = 0; i < ENTRIES; i++) {
        bool found = false;
        if (i % 3) OK(farheap_btree_remove(tree, key, key_of(i, key), &found));
        CHECK(found == (i % 3 != 0));
    }
    CHECK(scanned(tree, NULL, 0) == ENTRIES / 3);
    key_of(3, key);
    const unsigned behind = scanned(tree, key, 11);
    CHECK(behind > 0 && behind < ENTRIES / 3);
    farheap_pool_stats stats = {.size = sizeof stats};
    OK(farheap_pool_stats_get(pool, &stats));
    CHECK(stats.pages_written > 0);
    expect_unfixed(pool);
}

static void a_value_is_lent_under_its_guard(farheap_pool *pool, farheap_btree *tree) {
    farheap_page page = {0}, other = {0};
    const uint8_t *value = NULL;
    size_t len = 9;
    bool found = true;
    OK(farheap_btree_get_ref(tree, "r", 1, &page, &value, &len, &found));
    CHECK(!found && page.kind == FARHEAP_PAGE_NONE && !value && len == 9);
    OK(farheap_btree_insert(tree, "r", 1, "reference", 9, NULL));
    OK(farheap_btree_get_ref(tree, "r", 1, &page, &value, &len, &found));
    CHECK(found && len == 9 && !memcmp(value, "reference", 9));
    CHECK(page.kind == FARHEAP_PAGE_SHARED && value > page.data && value + len <= page.data + page.len);
    OK(farheap_pool_try_fix_shared(pool, page.id, &other)); /* together with other readers */
    OK(farheap_page_unfix(&other));
    FAILS(FARHEAP_E_WOULD_BLOCK, farheap_pool_try_fix_exclusive(pool, page.id, &other));
    OK(farheap_page_unfix(&page));
    FAILS(FARHEAP_E_NULL, farheap_btree_get_ref(tree, "r", 1, NULL, &value, &len, &found));
    FAILS(FARHEAP_E_NULL, farheap_btree_get_ref(tree, "r", 1, &page, NULL, &len, &found));
    OK(farheap_btree_remove(tree, "r", 1, NULL));
}

/* Entries to load: `i` from 0 on, until `end`. Key `broken` is not greater than the one before. */
struct source {
    unsigned i, end, broken;
    char key[16];
};

static bool next_entry(void *userdata, farheap_entry *out) {
    struct source *source = userdata;
    if (source->i == source->end) return false;
    const unsigned number = source->i == source->broken ? 0 : source->i;
    const int len = snprintf(source->key, sizeof source->key, "load %07u", number);
    source->i++;
    *out = (farheap_entry){(const uint8_t *)source->key, (size_t)len, (const uint8_t *)source->key, 4};
    return true;
}

static bool no_value(void *userdata, farheap_entry *out) {
    next_entry(userdata, out);
    out->value = NULL;
    return true;
}

static bool one_more(void *userdata, uint64_t page) {
    (void)page;
    ++*(unsigned *)userdata;
    return true;
}

/* A loaded tree, from both ends and from the middle. */
static void loaded_and_gone_through_in_both_directions(farheap_pool *pool) {
    enum { LOADED = 20000 };
    farheap_btree *tree = NULL;
    unsigned before = 0, after = 0;
    OK(farheap_pool_pages_in_use(pool, one_more, &before));
    struct source source = {0, LOADED, LOADED - 1, ""};
    FAILS(FARHEAP_E_BAD_RANGE, farheap_btree_load(pool, next_entry, &source, &tree));
    source = (struct source){0, LOADED, UINT32_MAX, ""};
    FAILS(FARHEAP_E_NULL, farheap_btree_load(pool, no_value, &source, &tree));
    CHECK(source.i == 1);
    FAILS(FARHEAP_E_NULL, farheap_btree_load(pool, NULL, &source, &tree));
    FAILS(FARHEAP_E_NULL, farheap_btree_load(pool, next_entry, &source, NULL));
    OK(farheap_pool_pages_in_use(pool, one_more, &after));
    CHECK(!tree && before == after); /* a load that fails leaves nothing */
    source.i = 0;
    OK(farheap_btree_load(pool, next_entry, &source, &tree));

    farheap_cursor *cursor = NULL;
    farheap_entry entry;
    bool found = false;
    char key[16];
    OK(farheap_btree_scan_back(tree, &cursor));
    OK(farheap_cursor_next(cursor, &entry, &found));
    CHECK(!found);
    for (unsigned i = LOADED; i-- > 0;) {
        OK(farheap_cursor_prev(cursor, &entry, &found));
        const int len = snprintf(key, sizeof key, "load %07u", i);
        CHECK(found && entry.key_len == (size_t)len && !memcmp(entry.key, key, (size_t)len));
        CHECK(entry.value_len == 4 && !memcmp(entry.value, "load", 4));
    }
    OK(farheap_cursor_prev(cursor, &entry, &found));
    CHECK(!found);
    OK(farheap_cursor_next(cursor, &entry, &found)); /* and forward again */
    CHECK(found && !memcmp(entry.key, "load 0000000", 12));
    OK(farheap_cursor_free(cursor));

    OK(farheap_btree_scan(tree, "load 0000100x", 13, &cursor)); /* between two keys */
    OK(farheap_cursor_prev(cursor, &entry, &found));
    CHECK(found && !memcmp(entry.key, "load 0000100", 12));
    OK(farheap_cursor_next(cursor, &entry, &found));
    CHECK(found && !memcmp(entry.key, "load 0000100", 12));
    OK(farheap_cursor_next(cursor, &entry, &found));
    CHECK(found && !memcmp(entry.key, "load 0000101", 12));
    OK(farheap_cursor_free(cursor));
    FAILS(FARHEAP_E_HANDLE, farheap_cursor_prev(cursor, &entry, &found));
    OK(farheap_btree_free(tree));

    source = (struct source){0, 0, 0, ""};
    OK(farheap_btree_load(pool, next_entry, &source, &tree)); /* of nothing */
    OK(farheap_btree_scan_back(tree, &cursor));
    OK(farheap_cursor_prev(cursor, &entry, &found));
    CHECK(!found);
    OK(farheap_cursor_free(cursor));
    OK(farheap_btree_free(tree));
}

static void what_is_refused(farheap_pool *pool, farheap_btree *tree) {
    static char large[65536];
    const size_t most = farheap_pool_payload(pool) / 4 - 8;
    size_t len = 0;
    bool found = false;
    OK(farheap_btree_insert(tree, large, most - 10, large, 10, NULL));
    FAILS(FARHEAP_E_BAD_RANGE, farheap_btree_insert(tree, large, most - 10, large, 11, NULL));
    OK(farheap_btree_remove(tree, large, most - 10, &found));
    CHECK(found);
    FAILS(FARHEAP_E_NULL, farheap_btree_insert(tree, NULL, 1, "v", 1, NULL));
    FAILS(FARHEAP_E_NULL, farheap_btree_insert(tree, "k", 1, NULL, 1, NULL));
    FAILS(FARHEAP_E_ARGUMENT, farheap_btree_insert(tree, "k", SIZE_MAX, "v", 1, NULL));
    FAILS(FARHEAP_E_NULL, farheap_btree_get(tree, "k", 1, NULL, 1, &len, &found));
    FAILS(FARHEAP_E_NULL, farheap_btree_get(tree, "k", 1, NULL, 0, NULL, &found));
    FAILS(FARHEAP_E_NULL, farheap_btree_get(tree, "k", 1, NULL, 0, &len, NULL));
    FAILS(FARHEAP_E_NULL, farheap_btree_scan(tree, NULL, 0, NULL));
    FAILS(FARHEAP_E_NULL, farheap_btree_create(pool, NULL));
    farheap_btree *none = NULL;
    FAILS(FARHEAP_E_NO_SUCH_PAGE, farheap_btree_open(pool, 1 << 30, &none));
    FAILS(FARHEAP_E_HANDLE, farheap_btree_create((farheap_pool *)tree, &none));
    CHECK(!none);
}

static void a_cursor_sees_later_changes_and_outlives_its_handle(farheap_pool *pool) {
    farheap_btree *tree = NULL;
    OK(farheap_btree_create(pool, &tree));
    OK(farheap_btree_insert(tree, "a", 1, "1", 1, NULL));
    OK(farheap_btree_insert(tree, "b", 1, "2", 1, NULL));
    farheap_cursor *cursor = NULL;
    OK(farheap_btree_scan(tree, "a", 1, &cursor));
    OK(farheap_btree_remove(tree, "a", 1, NULL)); /* before the cursor has looked */
    farheap_entry entry;
    bool found = false;
    OK(farheap_cursor_next(cursor, &entry, &found));
    CHECK(found && entry.key_len == 1 && entry.key[0] == 'b' && entry.value[0] == '2');
    OK(farheap_btree_free(tree));
    FAILS(FARHEAP_E_HANDLE, farheap_btree_free(tree));
    FAILS(FARHEAP_E_IN_USE, farheap_pool_free(pool));
    OK(farheap_cursor_next(cursor, &entry, &found));
    CHECK(!found);
    OK(farheap_cursor_free(cursor));
    FAILS(FARHEAP_E_HANDLE, farheap_cursor_free(cursor));
}

static void *add_many(void *tree) {
    const uint64_t by = 1;
    for (int i = 0; i < 20000; i++) {
        bool found = false;
        OK(farheap_btree_update(tree, "sum", 3, add_one, (void *)(uintptr_t)&by, &found));
        CHECK(found);
    }
    return NULL;
}

static void two_threads_change_one_value(farheap_btree *tree) {
    uint64_t sum = 0;
    OK(farheap_btree_insert(tree, "sum", 3, &sum, sizeof sum, NULL));
    pthread_t other;
    CHECK(pthread_create(&other, NULL, add_many, tree) == 0);
    add_many(tree);
    CHECK(pthread_join(other, NULL) == 0);
    size_t len = 0;
    bool found = false;
    OK(farheap_btree_get(tree, "sum", 3, &sum, sizeof sum, &len, &found));
    CHECK(found && len == sizeof sum && sum == 40000);
    OK(farheap_btree_remove(tree, "sum", 3, NULL));
}

int main(void) {
    CHECK(farheap_has_feature(FARHEAP_FEATURE_BTREE));
    farheap_manager *manager = NULL;
    OK(farheap_manager_new(8 * MIB, &manager));
    OK(farheap_manager_set_limit(manager, MIB));
    const char *dir = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/farheap-table-XXXXXX", dir ? dir : "/tmp");
    int file = mkstemp(path);
    CHECK(file >= 0);
    close(file);
    unlink(path);
    farheap_pool *pool = NULL;
    OK(farheap_pool_create(manager, NULL, path, 64 * MIB, &pool));
    farheap_btree *tree = NULL;
    OK(farheap_btree_create(pool, &tree));
    FAILS(FARHEAP_E_IN_USE, farheap_pool_free(pool));
    const uint64_t root = farheap_btree_root(tree);
    keys_and_values(tree);
    values_change_in_place(tree);
    two_threads_change_one_value(tree);
    a_value_is_lent_under_its_guard(pool, tree);
    loaded_and_gone_through_in_both_directions(pool);
    what_is_refused(pool, tree);
    many_entries(pool, tree);
    CHECK(farheap_btree_root(tree) == root);
    a_cursor_sees_later_changes_and_outlives_its_handle(pool);
    OK(farheap_btree_free(tree));
    OK(farheap_pool_flush(pool));
    OK(farheap_pool_free(pool));
    FAILS(FARHEAP_E_HANDLE, farheap_btree_create(pool, &tree));

    OK(farheap_pool_open(manager, NULL, path, &pool));
    OK(farheap_btree_open(pool, root, &tree));
    CHECK(scanned(tree, NULL, 0) == ENTRIES / 3);
    OK(farheap_btree_free(tree));
    OK(farheap_pool_free(pool));
    OK(farheap_manager_free(manager));
    unlink(path);
    return 0;
}
