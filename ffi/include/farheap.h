/*
 * farheap for C: a heap larger than RAM, collective allocators, a buffer pool.
 *
 * C11, or C++ (farheap.hpp is the interface that C++ programs want). Linux, 64 bit.
 *
 * Conventions, which hold for every function unless it says otherwise:
 *
 * - A function that can fail returns a farheap_status, or a pointer that is NULL on failure, or a
 *   figure. The reason of the calling thread's last failure is in farheap_last_status() and
 *   farheap_last_message(); a success leaves them as they were.
 * - Results are written through the last parameters, and only on success. NULL for one of them is
 *   FARHEAP_E_NULL.
 * - A pointer to farheap_heap, farheap_bump, farheap_collective, farheap_manager, farheap_account,
 *   farheap_temporary, farheap_pool, farheap_btree or farheap_cursor is a *handle*.
 *   It is not followed but looked up: NULL is FARHEAP_E_NULL; one that was freed, that is of another
 *   kind, or that never was one, is FARHEAP_E_HANDLE; the parent's, in a forked child, is
 *   FARHEAP_E_FORKED. There are at most 4095 of a kind at a time. Who got a handle frees it.
 * - Handles and memory may be used from any thread, at the same time too. What no function can know:
 *   freeing a handle *while* another thread is inside a call with it is undefined, as is freeing
 *   memory twice, using it after it was freed, and passing pointers that came from elsewhere.
 * - Structures with a `size` field grow in later versions: set it to their sizeof (the _INIT macros
 *   do). A size that no version has is FARHEAP_E_ARGUMENT.
 * - Strings are UTF-8 and end with a zero. Those that a function returns belong to the library.
 * - No function throws, unwinds, or calls exit. A broken check inside of the library becomes
 *   FARHEAP_E_PANIC; its message also goes to standard error. Callbacks must not throw or longjmp.
 * - Sizes and lengths are in bytes.
 */
#ifndef FARHEAP_H
#define FARHEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The version of the ABI that this header describes; the library's soname ends with it. The
 * functions that make something from nothing compare it with the library's: FARHEAP_E_ABI. */
#define FARHEAP_ABI_VERSION 1u

#ifdef __cplusplus
#define FARHEAP_NOEXCEPT noexcept
extern "C" {
#else
#define FARHEAP_NOEXCEPT
#endif

/* ---- Status codes ------------------------------------------------------------------------- */

typedef enum farheap_status {
    FARHEAP_OK = 0,
    FARHEAP_E_NULL = 1,         /* a pointer is NULL that must not be */
    FARHEAP_E_HANDLE = 2,       /* not a live handle, or a structure that holds nothing */
    FARHEAP_E_ABI = 3,          /* header and library are of different ABI versions */
    FARHEAP_E_ARGUMENT = 4,     /* a value that the function does not take */
    FARHEAP_E_PANIC = 5,        /* a check inside of the library failed */
    FARHEAP_E_FORKED = 6,       /* belongs to the parent of this forked process */
    FARHEAP_E_WOULD_BLOCK = 7,  /* a `try` function did not succeed at once */
    FARHEAP_E_CALLBACK = 8,     /* for callbacks of the host to return */
    FARHEAP_E_OTHER = 9,        /* an error newer than this header; see the message */
    FARHEAP_E_CHANGED = 10,     /* a page is not as it was seen any more */
    FARHEAP_E_OS = 20,          /* a system call failed; farheap_last_errno() */
    FARHEAP_E_UFFD_UNAVAILABLE = 21, /* no permission for userfaultfd; the message helps */
    FARHEAP_E_UNSUPPORTED = 22, /* the kernel lacks what was asked for */
    FARHEAP_E_DEVICE = 23,      /* a device, file or directory cannot be used */
    FARHEAP_E_IO = 24,          /* the device failed; farheap_last_errno() */
    FARHEAP_E_STORE_FULL = 25,  /* no room on the device */
    FARHEAP_E_CORRUPT = 26,     /* a slot of the device has other bytes than were written */
    FARHEAP_E_ADDRESS_SPACE = 27, /* the span is used up */
    FARHEAP_E_BAD_RANGE = 28,   /* a range or pointer that is not of this object */
    FARHEAP_E_LIMIT_TOO_SMALL = 29,
    FARHEAP_E_LIMIT_EXCEEDED = 30, /* too much is pinned, or cannot be written back */
    FARHEAP_E_CORRUPT_PAGE = 31, /* a page of a table file does not match its checksum */
    FARHEAP_E_NO_SUCH_PAGE = 32,
    FARHEAP_E_LATCH_TIMEOUT = 33,
    FARHEAP_E_OUT_OF_MEMORY = 34,
    FARHEAP_E_BAD_SIZE = 35,    /* a text that is no size */
    FARHEAP_E_CONFIG = 36,      /* an unknown key or a wrong value; the message names it */
    FARHEAP_E_ALREADY_RUNNING = 37, /* a process has one far heap */
    FARHEAP_E_NOT_RUNNING = 38,
    FARHEAP_E_IN_USE = 39,      /* memory, pages or blocks are still held */
    FARHEAP_E_JEMALLOC = 40,
    FARHEAP_E_TOO_MANY_CONSUMERS = 41, /* of a memory manager */
    FARHEAP_E_WRITE_REFUSED = 42, /* changed pages stay in memory: `before_write` refused them */
    FARHEAP_E_STALE_PAGE = 43,  /* a crash has torn the tree here: repeat the log */
    FARHEAP_E_FULL = 50,        /* a sub-allocator has no room; another one may have */
    FARHEAP_E_TOO_LARGE = 51,   /* an object larger than a sub-allocator can hold */
    FARHEAP_E_ALIGN = 52        /* an alignment larger than a sub-allocator's pages */
} farheap_status;

/* The code of the calling thread's last failure; FARHEAP_OK if there was none. */
farheap_status farheap_last_status(void) FARHEAP_NOEXCEPT;
/* The errno value of that failure, or 0. */
int farheap_last_errno(void) FARHEAP_NOEXCEPT;
/* Its message: what, which number, what to do; "" if there was none. Valid until the thread's next
 * failure or farheap_clear_error. Never NULL. */
const char *farheap_last_message(void) FARHEAP_NOEXCEPT;
/* Forgets the calling thread's last failure. */
void farheap_clear_error(void) FARHEAP_NOEXCEPT;
/* The name of a code, such as "FARHEAP_E_CONFIG"; "FARHEAP_E_UNKNOWN" for other numbers. */
const char *farheap_status_name(farheap_status status) FARHEAP_NOEXCEPT;

/* ---- Messages ------------------------------------------------------------------------------- */

typedef enum farheap_log_level {
    FARHEAP_LOG_ERROR = 1,   /* something was lost */
    FARHEAP_LOG_WARNING = 2, /* something costs time or memory, or will */
    FARHEAP_LOG_OTHER = 3    /* for later versions */
} farheap_log_level;

/* Told what the library says: one line without its end, valid during the call. It is called by a thread of its
 * own, or by a thread of the program inside of a call, at the same time too, and never by what serves faults: it may
 * allocate, wait, and touch far memory. In it, no heap may be started or shut down. */
typedef void (*farheap_log)(void *userdata, farheap_log_level level, const char *text);

/* From now on `log` is told what the library says, which goes to standard error otherwise; NULL: standard error.
 * `userdata` is only passed on, and must stay valid for good, as a call on another thread may be under way when
 * another callback is set. A heap that runs notices within a tenth of a second. What ends the process, or mostly does
 * (a lost page), goes to standard error as well, and so does what a forked child prints of memory that it has inherited. */
farheap_status farheap_set_log(farheap_log log, void *userdata) FARHEAP_NOEXCEPT;

/* ---- Version and features ------------------------------------------------------------------ */

typedef enum farheap_feature {
    FARHEAP_FEATURE_USERFAULTFD = 1,   /* far memory works at all here */
    FARHEAP_FEATURE_KERNEL_FAULTS = 2, /* system calls may touch far memory that is not resident */
    FARHEAP_FEATURE_MOVE = 3,          /* UFFDIO_MOVE (Linux 6.8) */
    FARHEAP_FEATURE_IO_URING = 4,
    FARHEAP_FEATURE_BTREE = 5          /* this library has farheap_btree */
} farheap_feature;

/* The ABI version of the library. */
uint32_t farheap_abi_version(void) FARHEAP_NOEXCEPT;
/* The version of the library, such as "0.1.0". */
const char *farheap_version(void) FARHEAP_NOEXCEPT;
/* FARHEAP_E_ABI when `abi`, a program's FARHEAP_ABI_VERSION, is not the library's. */
farheap_status farheap_check_abi(uint32_t abi) FARHEAP_NOEXCEPT;
/* True if this machine allows a feature: tried out, which takes about a millisecond. */
bool farheap_has_feature(farheap_feature feature) FARHEAP_NOEXCEPT;

/* ---- Configuration --------------------------------------------------------------------------- */

typedef enum farheap_switch { FARHEAP_DEFAULT = 0, FARHEAP_ON = 1, FARHEAP_OFF = 2 } farheap_switch;

/* The number for "off" and "auto" where the text form has these words. */
#define FARHEAP_NONE UINT64_MAX

/* The options with the names of the text form ("limit:512MiB,device:/dev/nvme1n1"); book/src/reference/options.md
 * has a table of them. In texts 64M is 64MiB (2^26 bytes), and 64MB is 64,000,000 bytes; here sizes are in bytes.
 * A field that is zero or NULL has its default. The library keeps no pointer of it. */
typedef struct farheap_config {
    /* sizeof(farheap_config) */
    size_t size;
    /* instead of limit: its share of memory, 1 to 100 */
    uint64_t limit_percent;
    /* the maximum resident memory of the process, in bytes; size, 25% of memory, auto, or off;
     * default auto */
    uint64_t limit;
    /* the maximum far memory that may be resident, in bytes; size, 25% of memory, or auto; default
     * auto */
    uint64_t far_limit;
    /* the block device or regular file that keeps evicted pages; block device, file, or
     * nbd://HOST/EXPORT; its contents are lost; default a temporary file */
    const char *device;
    /* whether a device that holds data is overwritten; default off */
    farheap_switch overwrite;
    /* the directory of the temporary file; directory; default $TMPDIR, /tmp, or /var/tmp where /tmp
     * is in memory */
    const char *dir;
    /* how many bytes of the device may be used; size; default all of the device */
    uint64_t capacity;
    /* whether the space of a file is taken from its file system at start-up; default off */
    farheap_switch reserve;
    /* the size in bytes from which the global allocator places allocations in far memory; size, 0
     * for all, or off; default 64KiB */
    uint64_t threshold;
    /* the number of handler threads; auto or 1 to 64; default auto */
    uint64_t handlers;
    /* how much address space is reserved for far memory, in bytes; size; default 1TiB */
    uint64_t span;
    /* whether every page read from the store is checked against its checksum; default on */
    farheap_switch checksum;
    /* how long one device request may take before it counts as failed; 1ms to 1day; default 30s */
    uint64_t deadline_ms;
    /* how long a thread that serves faults looks for the device's answer before it sleeps; off, up
     * to 500us; default 200us */
    uint64_t poll_us;
    /* whether sequential and strided faults read the pages to come; default on */
    farheap_switch readahead;
    /* which threads resolve faults, and what happens where only faults from user mode are
     * permitted; auto, user, kernel, in_thread; default auto */
    const char *mode;
    /* whether pages are encrypted before they reach the device; default off */
    farheap_switch encrypt;
    /* what happens at an orderly shutdown to the pages on the device; off, discard, zero; default
     * off */
    const char *wipe;
    /* whether jemalloc keeps its metadata of far memory in the tier itself; default off */
    farheap_switch far_metadata;
    /* the NUMA node whose memory holds the far memory that is resident; any or its number; default
     * any */
    const char *node;
    /* whether wrong frees, and writes outside of blocks, end the process; default off */
    farheap_switch check;
} farheap_config;

#define FARHEAP_CONFIG_INIT \
    { sizeof(farheap_config), 0, 0, 0, 0, FARHEAP_DEFAULT, 0, 0, FARHEAP_DEFAULT, 0, 0, 0, \
      FARHEAP_DEFAULT, 0, 0, FARHEAP_DEFAULT, 0, FARHEAP_DEFAULT, 0, FARHEAP_DEFAULT, 0, \
      FARHEAP_DEFAULT }

/* Checks a text form; NULL and "" are the defaults. FARHEAP_E_CONFIG names the key. */
farheap_status farheap_check_config(const char *config) FARHEAP_NOEXCEPT;

/* ---- The far heap ------------------------------------------------------------------------------ */

/* A handle of the process's one far heap. */
typedef struct farheap_heap farheap_heap;

/* Starts the far heap from a text form; NULL is the defaults. A second one is
 * FARHEAP_E_ALREADY_RUNNING. farheap_start_under() is for a limit shared with table pages. The handle is
 * the caller's, to farheap_heap_free(). */
farheap_status farheap_start(const char *config, farheap_heap **out) FARHEAP_NOEXCEPT;
/* The same from a structure, which must not be NULL. */
farheap_status farheap_start_config(const farheap_config *config,
                                    farheap_heap **out) FARHEAP_NOEXCEPT;
/* The same from the environment variable FARHEAP_CONF, which a set-user-ID program and its like ignore. */
farheap_status farheap_start_env(farheap_heap **out) FARHEAP_NOEXCEPT;

/* The same for a program that was compiled with a farheap.h of this version: FARHEAP_E_ABI if the
 * library has another one. Calls from C and C++ come here; bindings call farheap_check_abi() once. */
farheap_status farheap_start_abi(uint32_t abi, const char *config, farheap_heap **out)
    FARHEAP_NOEXCEPT;
farheap_status farheap_start_config_abi(uint32_t abi, const farheap_config *config,
                                        farheap_heap **out) FARHEAP_NOEXCEPT;
farheap_status farheap_start_env_abi(uint32_t abi, farheap_heap **out) FARHEAP_NOEXCEPT;
#define farheap_start(config, out) farheap_start_abi(FARHEAP_ABI_VERSION, config, out)
#define farheap_start_config(config, out) farheap_start_config_abi(FARHEAP_ABI_VERSION, config, out)
#define farheap_start_env(out) farheap_start_env_abi(FARHEAP_ABI_VERSION, out)

/* Another handle of the heap that runs; FARHEAP_E_NOT_RUNNING if none does. */
farheap_status farheap_running(farheap_heap **out) FARHEAP_NOEXCEPT;
/* Adds a far tier to the heap: with a device and limit of its own, from a text form. What it
 * gives is a handle of that tier, for hints, statistics and farheap_heap_placement(). Nothing goes there
 * unless it is asked for. The name is 1 to 32 letters, digits, '-' and '_'; up to 7 further tiers. */
farheap_status farheap_add_tier(farheap_heap *heap, const char *name, const char *config,
                                farheap_heap **out) FARHEAP_NOEXCEPT;
/* Another handle of the tier of this name; "far" is the heap that was started. FARHEAP_E_NOT_RUNNING if
 * none runs. */
farheap_status farheap_find_tier(const char *name, farheap_heap **out) FARHEAP_NOEXCEPT;
/* Stops the heap and its tiers, or one further tier. FARHEAP_E_IN_USE while far memory of it is allocated: all
 * goes on as before. The handle
 * stays the caller's; statistics can still be read, all else is FARHEAP_E_NOT_RUNNING. */
farheap_status farheap_shutdown(farheap_heap *heap) FARHEAP_NOEXCEPT;
/* Frees the handle, which stops nothing. NULL does nothing. */
farheap_status farheap_heap_free(farheap_heap *heap) FARHEAP_NOEXCEPT;

/* ---- Memory ------------------------------------------------------------------------------------ */

/* Where memory is asked for. */
typedef enum farheap_placement {
    FARHEAP_POLICY = 0, /* by the thread's scope, else by farheap_threshold() */
    FARHEAP_LOCAL = 1,  /* RAM that is never evicted */
    FARHEAP_FAR = 2,    /* the far heap; NULL while none runs. In a forked child that has its parent's far
                         * memory what is new is local, in another child NULL. A system call may fail
                         * with EFAULT on far memory: see farheap_serves_kernel_faults() */
    FARHEAP_PLACEMENT_MAX = 0x7fffffff /* other numbers are added tiers: farheap_heap_placement() */
} farheap_placement;

/* All of these give NULL when there is no memory (errno is ENOMEM, or EINVAL for a bad argument;
 * the last status is set). A size of 0 is one of 1. Blocks of local and far memory mix: each
 * function finds out by the address. Usable without and before a heap: everything is local then.
 * A block goes back by far_free or far_free_sized, never by free(), and the other way round. */

/* A block aligned to 16, its contents unspecified. */
void *far_malloc(size_t size) FARHEAP_NOEXCEPT;
/* A block of zeros; NULL when the product overflows. Zeros of far memory cost nothing. */
void *far_calloc(size_t count, size_t size) FARHEAP_NOEXCEPT;
/* A block aligned to `align`, a power of two; `size` need not be a multiple of it. */
void *far_aligned_alloc(size_t align, size_t size) FARHEAP_NOEXCEPT;
/* A block where `placement` says. */
void *far_allocate(farheap_placement placement, size_t size, size_t align) FARHEAP_NOEXCEPT;
/* Resizes a block, which may move, and keeps its bytes; alignments above 16 are lost. NULL is
 * far_malloc. On failure the block is as it was. A size of 0 does not free. */
void *far_realloc(void *ptr, size_t size) FARHEAP_NOEXCEPT;
/* Frees a block; NULL does nothing. What is no block, or is free, is undefined, unless the heap has `check`: the process then
 * ends with a message. */
void far_free(void *ptr) FARHEAP_NOEXCEPT;
/* Frees a block whose size and alignment, as asked for, are known: faster for far memory. */
void far_free_sized(void *ptr, size_t size, size_t align) FARHEAP_NOEXCEPT;
/* Bytes of a block that may be used; 0 for NULL. */
size_t far_usable_size(const void *ptr) FARHEAP_NOEXCEPT;
/* True if an address, any, lies in the far heap. */
bool far_contains(const void *ptr) FARHEAP_NOEXCEPT;

/* madvise(2), for local and for far memory, with its arguments and answers. The kernel does not know far memory
 * that has left RAM: after its own MADV_DONTNEED that comes back as it was, after this one it reads as zero,
 * also in a forked child, and after MADV_FREE as well. EINVAL for far memory and advice that it does not know, such as
 * MADV_GUARD_INSTALL: the kernel would drop what is in RAM, and not what has left. Far pages leave by MADV_PAGEOUT, come by
 * MADV_WILLNEED, and are the next to leave after MADV_COLD. `#define madvise far_madvise` after the includes makes a source use it. */
int far_madvise(void *start, size_t len, int advice) FARHEAP_NOEXCEPT;

/* Placement in a heap's tier: FARHEAP_FAR, or that of an added tier for ever: once that has ended, there is none. */
farheap_status farheap_heap_placement(farheap_heap *heap, farheap_placement *out) FARHEAP_NOEXCEPT;

/* Memory that goes at once: everything allocated in a bump allocator is freed with it, without a look at it. Any
 * thread may use it. */
typedef struct farheap_bump farheap_bump;

/* Makes a bump allocator whose memory comes from `placement`, which is not FARHEAP_POLICY. */
farheap_status farheap_bump_new(farheap_placement placement, farheap_bump **out) FARHEAP_NOEXCEPT;
/* Frees it with all of its blocks. NULL does nothing. */
farheap_status farheap_bump_free(farheap_bump *bump) FARHEAP_NOEXCEPT;
/* A block, or NULL with the reason; not for far_free(). */
void *farheap_bump_allocate(farheap_bump *bump, size_t size, size_t align) FARHEAP_NOEXCEPT;
/* Frees a block of the bump allocator, with the size and alignment that it was asked for with. Below 32 KiB that is of
 * use only for a thread's last block. NULL does nothing. */
farheap_status farheap_bump_deallocate(farheap_bump *bump, void *block, size_t size,
                                        size_t align) FARHEAP_NOEXCEPT;
/* Bytes that the bump allocator has: blocks, and what it has ready for more. */
farheap_status farheap_bump_reserved(const farheap_bump *bump, uint64_t *out) FARHEAP_NOEXCEPT;

/* From now to farheap_scope_pop() what this thread allocates by policy goes to `placement`, local or
 * far. Scopes nest, up to 1024, and end with their thread. */
farheap_status farheap_scope_push(farheap_placement placement) FARHEAP_NOEXCEPT;
/* Ends this thread's innermost scope; FARHEAP_E_ARGUMENT if it is in none. */
farheap_status farheap_scope_pop(void) FARHEAP_NOEXCEPT;
/* The number of this thread's innermost scope, which no other scope of the process has; 0 if it is in none. Who
 * ends a scope elsewhere than it was begun, as code that may go on in another thread does, compares it first. */
uint64_t farheap_scope_number(void) FARHEAP_NOEXCEPT;

/* ---- Hints on far memory ----------------------------------------------------------------------- */

/* Ranges are of the heap's far memory, else FARHEAP_E_BAD_RANGE. Pages that a range covers in part
 * count whole, except for farheap_discard. */

typedef struct farheap_range {
    const void *ptr;
    size_t len;
} farheap_range;

typedef enum farheap_advice {
    FARHEAP_ADVICE_NORMAL = 0,
    FARHEAP_ADVICE_RANDOM = 1,     /* nothing is read ahead */
    FARHEAP_ADVICE_SEQUENTIAL = 2, /* reading ahead starts at once */
    FARHEAP_ADVICE_WILL_NEED = 3,  /* brought in now */
    FARHEAP_ADVICE_COLD = 4        /* the next to be evicted */
} farheap_advice;

/* Starts to bring a range in, and returns at once. */
farheap_status farheap_prefetch(farheap_heap *heap, const void *ptr, size_t len) FARHEAP_NOEXCEPT;
/* The same for many ranges, with one wake-up. NULL is allowed when `count` is 0. */
farheap_status farheap_prefetch_many(farheap_heap *heap, const farheap_range *ranges,
                                     size_t count) FARHEAP_NOEXCEPT;
/* Evicts a range, and waits until it is out. */
farheap_status farheap_evict(farheap_heap *heap, const void *ptr, size_t len) FARHEAP_NOEXCEPT;
/* Evicts all that is resident. */
farheap_status farheap_evict_all(farheap_heap *heap) FARHEAP_NOEXCEPT;
/* Brings a range in and keeps it until as many farheap_unpin. FARHEAP_E_LIMIT_EXCEEDED when more than
 * three quarters of the limit would be pinned. Pin allocated memory only. */
farheap_status farheap_pin(farheap_heap *heap, const void *ptr, size_t len) FARHEAP_NOEXCEPT;
/* Ends one pin; FARHEAP_E_BAD_RANGE if the range is not pinned. */
farheap_status farheap_unpin(farheap_heap *heap, const void *ptr, size_t len) FARHEAP_NOEXCEPT;
/* Pages that lie whole in the range read as zero from now on; their pins end. */
farheap_status farheap_discard(farheap_heap *heap, void *ptr, size_t len) FARHEAP_NOEXCEPT;
/* Says what to expect of a range. */
farheap_status farheap_advise(farheap_heap *heap, const void *ptr, size_t len,
                              farheap_advice advice) FARHEAP_NOEXCEPT;

/* Changes the limit of the process while it runs; far memory above a lower one leaves soon afterwards.
 * FARHEAP_E_CONFIG for a further tier, under a manager, and with limit:off. */
farheap_status farheap_set_limit(farheap_heap *heap, uint64_t limit) FARHEAP_NOEXCEPT;
/* Changes the limit of this tier's far memory; returns when what is above a lower one is out. */
farheap_status farheap_set_far_limit(farheap_heap *heap, uint64_t limit) FARHEAP_NOEXCEPT;
/* Gives freed memory that is kept for reuse back now. */
farheap_status farheap_purge(farheap_heap *heap) FARHEAP_NOEXCEPT;
/* The size from which FARHEAP_POLICY places memory far now; FARHEAP_NONE if no size does: by the
 * configuration, or because system calls may not be given far memory here and mode is "auto". */
farheap_status farheap_threshold(farheap_heap *heap, uint64_t *out) FARHEAP_NOEXCEPT;
/* True if system calls may be given far memory that is not resident: not without permission for
 * faults of kernel mode, nor with mode "in_thread". They fail with EFAULT then. */
farheap_status farheap_serves_kernel_faults(farheap_heap *heap, bool *out) FARHEAP_NOEXCEPT;

/* ---- Statistics -------------------------------------------------------------------------------- */

/* Counts grow from the start on; sizes are of the moment. Set `size` first. */
typedef struct farheap_stats {
    /* sizeof(farheap_stats) */
    size_t size;
    /* Bytes that are allocated, as callers asked for them. */
    uint64_t allocated_bytes;
    /* Bytes resident now: mapped pages, staging frames, and the tables that describe them. */
    uint64_t resident_bytes;
    /* The maximum number of bytes that may be resident now. With the option limit this is what the
     * rest of the process leaves, and changes with it. */
    uint64_t limit_bytes;
    /* Bytes charged against the limit now: resident, the untouched rest of open chunks, and one
     * page that is kept for copies. */
    uint64_t charged_bytes;
    /* Largest number of charged bytes there ever was; resident bytes never exceeded it. */
    uint64_t resident_bytes_max;
    /* Of the resident bytes, those of tables: page words, the policy's lists, slot hashes, page
     * tables. In proportion to the pages and slots in use; what is left of others is given back
     * within a second or when memory is short. */
    uint64_t metadata_bytes;
    /* Bytes of the pages that hold live data, resident or not. */
    uint64_t committed_bytes;
    /* Bytes of device space in use. */
    uint64_t stored_bytes;
    /* Faults answered with zeros, without I/O. */
    uint64_t faults_zero;
    /* Faults answered by reading the device. */
    uint64_t faults_read;
    /* Faults on pages on their way out that came back without reading the device. */
    uint64_t faults_cooling;
    /* First writes to pages installed write-protected. */
    uint64_t faults_protect;
    /* Faults that another thread's fault had answered already. */
    uint64_t faults_racing;
    /* Faults that waited because the limit left no frame. */
    uint64_t faults_starved;
    /* Pages read from the device. */
    uint64_t pages_in;
    /* Bytes read from the device. */
    uint64_t bytes_read;
    /* Read requests at the device now. */
    uint64_t reads_in_flight;
    /* The maximum number of read requests that were at the device at once. */
    uint64_t reads_in_flight_max;
    /* Pages read that an eighth more of the limit would have kept, by how many others left
     * meanwhile: an estimate. */
    uint64_t reads_saved_by_eighth;
    /* The same of a quarter more. */
    uint64_t reads_saved_by_quarter;
    /* Pages written to the device. */
    uint64_t pages_out;
    /* Bytes written to the device. */
    uint64_t bytes_written;
    /* Write requests at the device now. */
    uint64_t writes_in_flight;
    /* The maximum number of write requests that were at the device at once. */
    uint64_t writes_in_flight_max;
    /* Pages evicted without a write because the device had their content. */
    uint64_t evicted_clean;
    /* Pages evicted without a write because they were all zero. */
    uint64_t evicted_zero;
    /* Pages freed while they were mapped and the device had no copy of them: their data never cost
     * a write. */
    uint64_t discarded_dirty;
    /* Pages freed on their way out, before a write was started; of some the device had a copy. */
    uint64_t died_before_write;
    /* Pages freed while they were being written: a write in vain, counted in pages_out too. */
    uint64_t died_during_write;
    /* Pages read because the program asked for them. */
    uint64_t pages_prefetched;
    /* Ranges that prefetch asked for and that were dropped, because 1,024 waited. */
    uint64_t prefetches_dropped;
    /* Pages read because a stream of faults led to them. */
    uint64_t pages_read_ahead;
    /* Pages read ahead that were then seen to be used: touched while still being read, written, or
     * touched on their way out. A page that is only read while it is mapped leaves no trace, so
     * this is a lower bound of the useful ones. */
    uint64_t prefetch_hits;
    /* Pages read ahead and evicted without a trace of use: an upper bound of the useless ones. What
     * is neither here nor in prefetch_hits is still resident, or was freed. */
    uint64_t prefetch_unused;
    /* Times a handler looked for the device's answer instead of sleeping at once. */
    uint64_t polls;
    /* Of the polls, those that had something to do before the handler gave up. */
    uint64_t poll_hits;
    /* Times that handlers offered their processor to other threads between two looks. */
    uint64_t poll_yields;
    /* Chunks of 2 MiB handed to the kernel to fill. */
    uint64_t chunks_opened;
    /* Chunks taken back under pressure. */
    uint64_t chunks_closed;
    /* Of the chunks closed, those that left memory whole. */
    uint64_t chunks_evicted;
    /* Of the chunks opened, those that took memory which the evictor had ready. */
    uint64_t chunks_reused;
    /* Chunks of 2 MiB that were read ahead and mapped as one. */
    uint64_t chunks_read;
    /* Evictions refused because the kernel was using the page. */
    uint64_t evict_busy;
    /* Installs that fell back to a copy because the kernel was using the frame. */
    uint64_t install_busy;
    /* Device reads that failed or came too late. */
    uint64_t read_errors;
    /* Device writes that failed or came too late. */
    uint64_t write_errors;
    /* Pages whose content was not what had been written. */
    uint64_t checksum_errors;
    /* Pages lost: touching them is SIGBUS. */
    uint64_t poisoned;
    /* Panics that a handler thread survived. */
    uint64_t panics;
} farheap_stats;

/* The heap's statistics, as many fields as `out->size` has room for. */
farheap_status farheap_heap_stats(farheap_heap *heap, farheap_stats *out) FARHEAP_NOEXCEPT;

typedef struct farheap_usage {
    /* sizeof(farheap_usage) */
    size_t size;
    /* Bytes in blocks, as callers asked for them. jemalloc does not count these for local memory:
     * there it is the sum of small_bytes and large_bytes. */
    uint64_t allocated_bytes;
    /* Bytes of small blocks (below 16 KiB), rounded up to their classes; with those that threads
     * keep for their next allocations. */
    uint64_t small_bytes;
    /* Bytes of the other blocks, likewise. */
    uint64_t large_bytes;
    /* Bytes of pages with blocks, unused parts included. Far, they need not be resident. */
    uint64_t active_bytes;
    /* Bytes of pages that are free, and kept for a while for reuse. */
    uint64_t dirty_bytes;
    /* Bytes of addresses that jemalloc keeps without memory, for later. */
    uint64_t retained_bytes;
    /* Bytes of what jemalloc keeps about all this: in RAM, or far by the option far_metadata. */
    uint64_t metadata_bytes;
    /* Bytes of RAM that all of this has, metadata included. */
    uint64_t resident_bytes;
} farheap_usage;

/* Use of the memory of the heap, or of a further tier; zeros once it was stopped. */
farheap_status farheap_heap_usage(farheap_heap *heap, farheap_usage *out) FARHEAP_NOEXCEPT;

/* How long events of one kind have taken since the start, to about 2 %. */
typedef struct farheap_latency {
    uint64_t count;
    uint64_t p50_ns; /* half of them took at most this long */
    uint64_t p90_ns;
    uint64_t p99_ns;
    uint64_t p99_9_ns;
    uint64_t max_ns; /* the longest, exactly */
} farheap_latency;

typedef struct farheap_latencies {
    size_t size;
    farheap_latency fault; /* from the fault's event to its answer */
    farheap_latency read;  /* of the device */
    farheap_latency write;
    farheap_latency evict; /* from choosing a page to having its memory back */
} farheap_latencies;

/* The heap's latencies; takes some 10 us. */
farheap_status farheap_heap_latencies(farheap_heap *heap, farheap_latencies *out) FARHEAP_NOEXCEPT;

/* ---- Collective allocators --------------------------------------------------------------------- */

/* An allocator that is a collection of sub-allocators: one of purely-local memory, which never
 * faults; one for each page that was asked for; and the rest. It has a far region of its own, with
 * its own limit, beside the heap's. */
typedef struct farheap_collective farheap_collective;

typedef enum farheap_kind {
    FARHEAP_PURELY_LOCAL = 1,
    FARHEAP_SWAPPABLE_PLAIN = 2,
    FARHEAP_NEW_PER_PAGE = 3
} farheap_kind;

/* A sub-allocator, in memory of the caller's. Its fields are the library's, except that `kind` may
 * be read: what it hands out; 0 when it has been released. Do not copy it; release it, or its page
 * stays even when it is empty. It must not outlive its collective: then it is FARHEAP_E_HANDLE. */
typedef struct farheap_suballocator {
    farheap_collective *collective;
    uint32_t kind;
    uint32_t reserved;
    uint64_t page[2];
} farheap_suballocator;

farheap_status farheap_collective_new_abi(uint32_t abi, const char *config, uint64_t local_bytes,
                                          uint64_t page_bytes,
                                          farheap_collective **out) FARHEAP_NOEXCEPT;
/* Makes a collective with `local_bytes` of purely-local memory, pages of `page_bytes` (a power of two from 4096 to
 * 2 MiB; 0: 4096), and a region that a text form describes: `limit` is its page cache, `span` 64 GiB unless set. */
farheap_status farheap_collective_new(const char *config, uint64_t local_bytes, uint64_t page_bytes,
                                      farheap_collective **out) FARHEAP_NOEXCEPT;
#define farheap_collective_new(config, local_bytes, page_bytes, out) \
    farheap_collective_new_abi(FARHEAP_ABI_VERSION, config, local_bytes, page_bytes, out)
/* Ends a collective with everything in it. NULL does nothing. */
farheap_status farheap_collective_free(farheap_collective *collective) FARHEAP_NOEXCEPT;

/* The sub-allocator of a kind; a new page for FARHEAP_NEW_PER_PAGE. */
farheap_status farheap_collective_suballocator(farheap_collective *collective, uint32_t kind,
                                               farheap_suballocator *out) FARHEAP_NOEXCEPT;
/* The sub-allocator that an object came from; FARHEAP_E_BAD_RANGE if it is not of the collective. */
farheap_status farheap_collective_suballocator_of(farheap_collective *collective, const void *ptr,
                                                  farheap_suballocator *out) FARHEAP_NOEXCEPT;
/* Ends the use of a sub-allocator; its objects stay. A second time: FARHEAP_E_HANDLE. */
farheap_status farheap_suballocator_release(farheap_suballocator *sub) FARHEAP_NOEXCEPT;
/* An object of the sub-allocator's subspace, or NULL: FARHEAP_E_FULL when there is no room. */
void *farheap_suballocator_allocate(const farheap_suballocator *sub, size_t size,
                                    size_t align) FARHEAP_NOEXCEPT;
/* True if a pointer lies in the sub-allocator's subspace; false on error. */
bool farheap_suballocator_contains(const farheap_suballocator *sub,
                                   const void *ptr) FARHEAP_NOEXCEPT;
/* True if less than `ratio` of the subspace is in use: always for swappable, which has no bound. */
bool farheap_suballocator_is_occupancy_under(const farheap_suballocator *sub,
                                             double ratio) FARHEAP_NOEXCEPT;
/* An object of a kind, without a sub-allocator in between. NULL on failure. */
void *farheap_collective_allocate(farheap_collective *collective, uint32_t kind, size_t size,
                                  size_t align) FARHEAP_NOEXCEPT;
/* An object from the sub-allocator that `hint` (or NULL) came from if that has room, else swappable. */
void *farheap_collective_allocate_near(farheap_collective *collective, const void *hint,
                                       size_t size, size_t align) FARHEAP_NOEXCEPT;
/* Frees an object of any sub-allocator, with the size and alignment it was asked for. NULL does
 * nothing. FARHEAP_E_BAD_RANGE for pointers from elsewhere; FARHEAP_E_PANIC for a free of memory that
 * is not in use, where a double free leads unless the memory has been given out again. */
farheap_status farheap_collective_deallocate(farheap_collective *collective, void *ptr,
                                             size_t size, size_t align) FARHEAP_NOEXCEPT;
/* True if a pointer lies in the collective's memory; in its purely-local memory. */
bool farheap_collective_contains(const farheap_collective *collective,
                                 const void *ptr) FARHEAP_NOEXCEPT;
bool farheap_collective_is_local(const farheap_collective *collective,
                                 const void *ptr) FARHEAP_NOEXCEPT;
/* True if two pointers lie in the same page of far memory. */
bool farheap_collective_share_a_page(const farheap_collective *collective, const void *a,
                                     const void *b) FARHEAP_NOEXCEPT;
/* Figures; 0 on error. */
size_t farheap_collective_page_size(const farheap_collective *collective) FARHEAP_NOEXCEPT;
uint64_t farheap_collective_local_capacity(const farheap_collective *collective) FARHEAP_NOEXCEPT;
uint64_t farheap_collective_local_used(const farheap_collective *collective) FARHEAP_NOEXCEPT;
uint64_t farheap_collective_far_pages(const farheap_collective *collective) FARHEAP_NOEXCEPT;
/* Statistics of the collective's region; see farheap_heap_stats. */
farheap_status farheap_collective_stats(farheap_collective *collective,
                                        farheap_stats *out) FARHEAP_NOEXCEPT;
farheap_status farheap_collective_latencies(farheap_collective *collective,
                                            farheap_latencies *out) FARHEAP_NOEXCEPT;
/* As the functions of the heap with these names. */
farheap_status farheap_collective_set_limit(farheap_collective *collective,
                                            uint64_t limit) FARHEAP_NOEXCEPT;
farheap_status farheap_collective_prefetch_many(farheap_collective *collective,
                                                const farheap_range *ranges,
                                                size_t count) FARHEAP_NOEXCEPT;
farheap_status farheap_collective_advise(farheap_collective *collective, const void *ptr,
                                         size_t len, farheap_advice advice) FARHEAP_NOEXCEPT;
farheap_status farheap_collective_pin(farheap_collective *collective, const void *ptr,
                                      size_t len) FARHEAP_NOEXCEPT;
farheap_status farheap_collective_unpin(farheap_collective *collective, const void *ptr,
                                        size_t len) FARHEAP_NOEXCEPT;
farheap_status farheap_collective_evict_all(farheap_collective *collective) FARHEAP_NOEXCEPT;

/* ---- Memory manager ---------------------------------------------------------------------------- */

/* One hard limit over table pages, temporary memory and, with farheap_start_under(), far memory. */
typedef struct farheap_manager farheap_manager;

typedef enum farheap_pressure {
    FARHEAP_PRESSURE_OTHER = 0,
    FARHEAP_PRESSURE_LOW = 1,     /* background reclaim begins; bytes in use */
    FARHEAP_PRESSURE_DIRECT = 2,  /* a caller reclaims itself; bytes it wants */
    FARHEAP_PRESSURE_SPILLED = 3, /* temporary memory went beyond the limit; its bytes */
    FARHEAP_PRESSURE_FAILED = 4,  /* a caller got an error; bytes it wanted */
    FARHEAP_PRESSURE_BROKEN = 5,  /* a consumer failed and is not asked any more */
    FARHEAP_PRESSURE_MISCOUNTED = 6, /* a consumer took back more than it had charged; how much more */
    FARHEAP_PRESSURE_OVER = 7 /* above the limit for a second, with what cannot be evicted; bytes held */
} farheap_pressure;

/* Told about pressure, from any thread, at the same time too. It must not block, nor call the
 * manager. */
typedef void (*farheap_on_pressure)(void *userdata, farheap_pressure event, uint64_t bytes);

typedef struct farheap_manager_stats {
    /* sizeof(farheap_manager_stats) */
    size_t size;
    /* The limit. */
    uint64_t limit_bytes;
    /* Bytes charged by all consumers. */
    uint64_t used_bytes;
    /* Largest number of charged bytes there ever was. */
    uint64_t used_bytes_max;
    /* Bytes that all consumers have: those charged, and what of counted memory there was no room to
     * charge. What of it is above the limit cannot be evicted. */
    uint64_t held_bytes;
    /* Largest number of held bytes that the manager's thread, which looks every 50 ms, has ever
     * seen. */
    uint64_t held_bytes_max;
    /* Bytes held above the limit: counted memory that nobody can evict, or a limit that was
     * lowered. */
    uint64_t over_bytes;
    /* Bytes of temporary memory, within the limit. */
    uint64_t temporary_bytes;
    /* Bytes of temporary memory beyond the limit, at the moment. */
    uint64_t spilled_bytes;
    /* Bytes reclaimed that held nothing. */
    uint64_t reclaimed_free_bytes;
    /* Bytes reclaimed whose data can be read again. */
    uint64_t reclaimed_reread_bytes;
    /* Bytes reclaimed whose data had to be written first. */
    uint64_t reclaimed_write_back_bytes;
    /* Charges that had to reclaim themselves. */
    uint64_t direct;
    /* Rounds of background reclaim. */
    uint64_t background;
    /* Consumers that have joined and not left, temporary memory included. */
    uint64_t consumers;
    /* Charges and allocations that got an error. */
    uint64_t failed;
} farheap_manager_stats;

/* Bytes of a name, with the zero at its end; what is longer is cut. */
#define FARHEAP_NAME_MAX 64

typedef struct farheap_consumer_stats {
    /* sizeof(farheap_consumer_stats) */
    size_t size;
    /* "temporary", "pool", "far heap", or as an account was named. */
    char name[FARHEAP_NAME_MAX];
    /* Bytes charged. */
    uint64_t used_bytes;
    /* Largest number of bytes it ever had charged. */
    uint64_t used_bytes_max;
    /* Of the bytes charged, those of page states and tables. */
    uint64_t metadata_bytes;
    /* Bytes it has: those charged, and what was counted without room to charge it. */
    uint64_t held_bytes;
    /* Bytes that others cannot take from it. */
    uint64_t floor_bytes;
    /* Maximum number of bytes it may charge. */
    uint64_t ceiling_bytes;
    /* Bytes reclaimed from it. */
    uint64_t reclaimed_bytes;
    /* Bytes it has taken back without having charged them: a mistake of the consumer's. */
    uint64_t miscounted_bytes;
} farheap_consumer_stats;

farheap_status farheap_manager_new_abi(uint32_t abi, uint64_t limit,
                                       farheap_manager **out) FARHEAP_NOEXCEPT;
/* Starts a manager of `limit` bytes. */
farheap_status farheap_manager_new(uint64_t limit, farheap_manager **out) FARHEAP_NOEXCEPT;
#define farheap_manager_new(limit, out) farheap_manager_new_abi(FARHEAP_ABI_VERSION, limit, out)
/* Frees the handle; the manager ends with its last pool, heap and account. FARHEAP_E_IN_USE while temporary
 * memory is allocated. NULL does nothing. */
farheap_status farheap_manager_free(farheap_manager *manager) FARHEAP_NOEXCEPT;
/* The limit; 0 on error. */
uint64_t farheap_manager_limit(const farheap_manager *manager) FARHEAP_NOEXCEPT;
/* Starts the process's far heap, see farheap_start, under a manager: one limit holds for far memory,
 * table pages and temporary memory together, the configuration's limit is the far heap's part of it
 * at most, and temporary memory that does not fit spills to the far heap. The manager stays as long as
 * the heap, its handle need not. `config` may be NULL for the text form, not for the structure. */
farheap_status farheap_start_under(farheap_manager *manager, const char *config,
                                   farheap_heap **out) FARHEAP_NOEXCEPT;
farheap_status farheap_start_config_under(farheap_manager *manager, const farheap_config *config,
                                          farheap_heap **out) FARHEAP_NOEXCEPT;
/* Changes it. FARHEAP_E_OUT_OF_MEMORY when too much is pinned: the old one stays. */
farheap_status farheap_manager_set_limit(farheap_manager *manager, uint64_t limit) FARHEAP_NOEXCEPT;
/* How long an allocation waits for memory before it fails; 30 s unless set. */
farheap_status farheap_manager_set_deadline(farheap_manager *manager,
                                            uint64_t deadline_ms) FARHEAP_NOEXCEPT;
/* The most that temporary memory may take. */
farheap_status farheap_manager_set_temporary_ceiling(farheap_manager *manager,
                                                     uint64_t bytes) FARHEAP_NOEXCEPT;
/* Calls `told` on every event of memory pressure. `userdata` is only passed on, and must stay valid as
 * long as the manager and its pools. A second time: FARHEAP_E_CONFIG. */
farheap_status farheap_manager_on_pressure(farheap_manager *manager, farheap_on_pressure told,
                                           void *userdata) FARHEAP_NOEXCEPT;
/* The figures. */
farheap_status farheap_manager_stats_get(farheap_manager *manager,
                                         farheap_manager_stats *out) FARHEAP_NOEXCEPT;
/* A consumer's figures, by its number from 0 on in the order they joined; temporary memory is the
 * first. FARHEAP_E_BAD_RANGE after the last one. */
farheap_status farheap_manager_consumer(farheap_manager *manager, uint64_t index,
                                        farheap_consumer_stats *out) FARHEAP_NOEXCEPT;
/* Allocates temporary memory of a query, aligned to 4096, contents unspecified: table pages give way
 * for it. FARHEAP_E_OUT_OF_MEMORY when it does not fit. It is whole pages: for small objects
 * there is farheap_temporary. */
farheap_status farheap_manager_allocate_temporary(farheap_manager *manager, size_t len,
                                                  void **out) FARHEAP_NOEXCEPT;
/* Gives it back at once. NULL does nothing; a pointer that is none of this manager's, or was freed, is
 * FARHEAP_E_BAD_RANGE. */
farheap_status farheap_manager_free_temporary(farheap_manager *manager, void *ptr) FARHEAP_NOEXCEPT;
/* True if temporary memory lies beyond the limit, in evictable memory; false on error. */
bool farheap_manager_is_spilled(const farheap_manager *manager, const void *ptr) FARHEAP_NOEXCEPT;

/* An allocator of temporary memory for objects of any size: small ones share pages. One lock: give
 * threads that allocate all the time one each. */
typedef struct farheap_temporary farheap_temporary;

/* Makes one. It may outlive the manager's handle. */
farheap_status farheap_temporary_new(farheap_manager *manager,
                                     farheap_temporary **out) FARHEAP_NOEXCEPT;
/* Frees it with all that was allocated from it. NULL does nothing. */
farheap_status farheap_temporary_free(farheap_temporary *temporary) FARHEAP_NOEXCEPT;
/* An object, or NULL: FARHEAP_E_OUT_OF_MEMORY. */
void *farheap_temporary_allocate(farheap_temporary *temporary, size_t size,
                                 size_t align) FARHEAP_NOEXCEPT;
/* Frees an object, with the size and alignment it was asked for. NULL does nothing. What is not an
 * object of this allocator is FARHEAP_E_PANIC where it can be told. */
farheap_status farheap_temporary_deallocate(farheap_temporary *temporary, void *ptr, size_t size,
                                            size_t align) FARHEAP_NOEXCEPT;

/* ---- Accounts -------------------------------------------------------------------------------- */

/* Pages of a table file at fixed addresses, within a manager's limit; see below. */
typedef struct farheap_pool farheap_pool;

/* A consumer's share of a manager's limit: memory of the host's own, such as a cache of plans or what
 * a library allocates; or that of a pool, of the far heap, of temporary memory, to bound it. */
typedef struct farheap_account farheap_account;

/* Cost of freeing memory, cheapest first. */
typedef enum farheap_reclaim_cost {
    FARHEAP_COST_FREE = 0,      /* memory that holds nothing */
    FARHEAP_COST_REREAD = 1,    /* data that can be read again, or be made again */
    FARHEAP_COST_WRITE_BACK = 2 /* data that has to be written first */
} farheap_reclaim_cost;

/* Asked to free about `want` bytes at no more than `cost`. It takes what it frees off the account
 * by farheap_account_uncharge, and returns how much that was. Called from any thread, at the same time
 * too. It must not touch far memory nor free an account, and charges within it fail at once. */
typedef uint64_t (*farheap_reclaim)(void *userdata, uint64_t want, farheap_reclaim_cost cost);

/* Opens an account of the host's own, for memory that the host allocates by itself and charges here.
 * FARHEAP_E_TOO_MANY_CONSUMERS: a manager has at most 16, pools, heap and temporary memory included. */
farheap_status farheap_account_new(farheap_manager *manager, const char *name,
                                   farheap_account **out) FARHEAP_NOEXCEPT;
/* The account of a pool; of the far heap, which has one if it was started under a manager (else
 * FARHEAP_E_ARGUMENT); of temporary memory. The library charges them: charge, uncharge, set_used and
 * on_reclaim are FARHEAP_E_ARGUMENT. The caller frees the handle. */
farheap_status farheap_pool_account(farheap_pool *pool, farheap_account **out) FARHEAP_NOEXCEPT;
farheap_status farheap_heap_account(farheap_heap *heap, farheap_account **out) FARHEAP_NOEXCEPT;
farheap_status farheap_manager_temporary_account(farheap_manager *manager,
                                                 farheap_account **out) FARHEAP_NOEXCEPT;
/* Frees the handle; of the host's own it ends the account, and what is charged still is no more.
 * Returns when no callback of it runs any more; from within a callback: FARHEAP_E_IN_USE. NULL does
 * nothing. */
farheap_status farheap_account_free(farheap_account *account) FARHEAP_NOEXCEPT;
/* Charges memory before it is allocated: others give way for it. FARHEAP_E_OUT_OF_MEMORY. */
farheap_status farheap_account_charge(farheap_account *account, uint64_t bytes) FARHEAP_NOEXCEPT;
/* The same if nobody has to give way: else FARHEAP_E_WOULD_BLOCK. */
farheap_status farheap_account_try_charge(farheap_account *account, uint64_t bytes) FARHEAP_NOEXCEPT;
/* Takes back what was charged, once it is freed. FARHEAP_E_ARGUMENT for more than is charged: nothing
 * is taken back then. */
farheap_status farheap_account_uncharge(farheap_account *account, uint64_t bytes) FARHEAP_NOEXCEPT;
/* Counts `bytes` to the account, for memory that can only be counted. They are charged as far as there
 * is room beside what others' floors keep, the rest as others give way, in the background. Not
 * together with charge and uncharge: what is charged beside it, this takes back. */
farheap_status farheap_account_set_used(farheap_account *account, uint64_t bytes) FARHEAP_NOEXCEPT;
/* Sets the callback that frees the account's memory when others need it; without one, it is only counted. `userdata` is
 * only passed on, and must stay valid until the account is freed. A second time: FARHEAP_E_CONFIG. */
farheap_status farheap_account_on_reclaim(farheap_account *account, farheap_reclaim asked,
                                          void *userdata) FARHEAP_NOEXCEPT;
/* Bytes that others cannot take from it; a far heap keeps at least what it needs to serve faults.
 * FARHEAP_E_LIMIT_EXCEEDED when all floors are more than the limit: the old one stays. */
farheap_status farheap_account_set_floor(farheap_account *account, uint64_t bytes) FARHEAP_NOEXCEPT;
/* The most it may have. What it has above is reclaimed in the background. */
farheap_status farheap_account_set_ceiling(farheap_account *account,
                                           uint64_t bytes) FARHEAP_NOEXCEPT;
/* Bytes charged; protected from others; the most it may have. 0 on error. */
uint64_t farheap_account_used(const farheap_account *account) FARHEAP_NOEXCEPT;
/* Bytes it has: those charged, and what was counted without room to charge it. */
uint64_t farheap_account_held(const farheap_account *account) FARHEAP_NOEXCEPT;
uint64_t farheap_account_floor(const farheap_account *account) FARHEAP_NOEXCEPT;
uint64_t farheap_account_ceiling(const farheap_account *account) FARHEAP_NOEXCEPT;

/* ---- Buffer pool ------------------------------------------------------------------------------- */

/* Asked before a page is written back, by farheap_pool_flush too, with the number given by
 * farheap_page_set_lsn: it makes the log durable up to that record. If it cannot, anything but
 * FARHEAP_OK keeps the page in memory: eviction takes others, farheap_pool_flush fails. Called from
 * any thread; it must not use the pool. */
typedef farheap_status (*farheap_before_write)(void *userdata, uint64_t page, uint64_t lsn);

/* Is told of a page; returns whether to go on. */
typedef bool (*farheap_visit)(void *userdata, uint64_t page);

/* Which pages leave first. */
typedef enum farheap_replacement {
    FARHEAP_REPLACEMENT_DEFAULT = 0,
    FARHEAP_REPLACEMENT_PROVEN = 1, /* those that have not proved themselves: scans pass by */
    FARHEAP_REPLACEMENT_CLOCK = 2   /* second chance */
} farheap_replacement;

/* A field that is zero has its default. */
typedef struct farheap_pool_config {
    size_t size;
    uint64_t page;           /* 4 KiB to 64 KiB, a power of two; 4 KiB */
    uint64_t deadline_ms;    /* how long a fix waits; 30 s */
    farheap_switch checksum; /* on; off with `whole_pages` */
    farheap_switch cleaner;  /* background writes ahead of eviction; on */
    farheap_before_write before_write;
    void *userdata;          /* only passed on; valid as long as the pool */
    farheap_replacement replacement; /* proven */
    farheap_switch overwrite; /* farheap_pool_create over data, an older table too; off */
    /* farheap_pool_open to read only, of a file that cannot be written too, and beside other readers: what
     * would change a page is FARHEAP_E_DEVICE, an upgrade FARHEAP_E_WOULD_BLOCK; off */
    farheap_switch read_only;
    /* A table under the same manager whose pool this one joins: one limit, one order in which pages leave,
     * one thread for all their tables. File, page numbers, header, flush, log and all else stay each
     * table's own; none is the first, each is freed by itself. NULL: a pool of its own. */
    farheap_pool *beside;
    /* All bytes of a page are the caller's: without the library's trailer of 16 bytes, farheap_pool_payload is
     * the page size. Such pages have no checksum, so one that a power cut has torn, that the device has changed
     * or that is of an older table is read as if it were right: checks are the caller's. They have no number
     * of a log record: farheap_page_lsn is 0, farheap_page_set_lsn FARHEAP_E_ARGUMENT, `before_write` is told
     * 0. Together with `checksum` on FARHEAP_E_CONFIG. The table is opened with the setting that it was created
     * with, or FARHEAP_E_DEVICE; off */
    farheap_switch whole_pages;
} farheap_pool_config;

#define FARHEAP_POOL_CONFIG_INIT \
    { sizeof(farheap_pool_config), 0, 0, FARHEAP_DEFAULT, FARHEAP_DEFAULT, 0, 0, \
      FARHEAP_REPLACEMENT_DEFAULT, FARHEAP_DEFAULT, FARHEAP_DEFAULT, 0, FARHEAP_DEFAULT }

typedef struct farheap_pool_stats {
    /* sizeof(farheap_pool_stats) */
    size_t size;
    /* Fixes at the moment. */
    uint64_t holders;
    /* Bytes of resident pages. */
    uint64_t resident_bytes;
    /* Of the resident bytes, those in huge pages. */
    uint64_t huge_bytes;
    /* Bytes of page words, resident set and page tables, which are within the limit too. */
    uint64_t metadata_bytes;
    /* Bytes that the pool keeps for itself whatever it holds: queues to the device, lists, its
     * thread's stack. Within the limit as well. */
    uint64_t fixed_bytes;
    /* Fixes that found their page absent. */
    uint64_t misses;
    /* Pages read. */
    uint64_t pages_read;
    /* Pages written. */
    uint64_t pages_written;
    /* Of the pages written, those by the background cleaner. */
    uint64_t pages_cleaned;
    /* Pages evicted. */
    uint64_t evicted;
    /* Of the pages evicted, those donated to temporary memory with their frames. */
    uint64_t donated;
    /* Writes that failed. */
    uint64_t write_errors;
    /* Times that before_write refused a page. */
    uint64_t write_refusals;
} farheap_pool_stats;

/* Creates a table file, or takes a raw device, of at most `capacity` bytes. What exists has to hold
 * zeros, or pages that farheap evicted in an earlier run: FARHEAP_E_DEVICE names what it holds else,
 * unless config.overwrite is FARHEAP_ON. `config` may be NULL for the defaults. `path` may be the address of
 * a server, nbd://HOST/EXPORT, or copies on up to four, with commas between. */
farheap_status farheap_pool_create(farheap_manager *manager, const farheap_pool_config *config,
                                   const char *path, uint64_t capacity,
                                   farheap_pool **out) FARHEAP_NOEXCEPT;
/* Opens a table file. */
farheap_status farheap_pool_open(farheap_manager *manager, const farheap_pool_config *config,
                                 const char *path, farheap_pool **out) FARHEAP_NOEXCEPT;
/* Closes a pool. What has not been written is lost: farheap_pool_flush first. FARHEAP_E_IN_USE while
 * pages are fixed, and while handles of its trees and cursors exist. NULL does nothing. */
farheap_status farheap_pool_free(farheap_pool *pool) FARHEAP_NOEXCEPT;
/* Checkpoint: writes all changed pages and makes the table durable: after a power cut each page that was
 * allocated before the call is in use, with its content at the call or a later one. After a failure keep
 * the log from where the last checkpoint began. FARHEAP_E_DEVICE when the device cannot be synced: then no
 * checkpoint of this pool succeeds any more, and the table is to be opened again.
 * FARHEAP_E_WRITE_REFUSED when `before_write` refused pages, which the message counts: they stay in
 * memory, changed; all others are written. FARHEAP_E_IO when the device did: the same. */
farheap_status farheap_pool_flush(farheap_pool *pool) FARHEAP_NOEXCEPT;
/* Makes these pages durable, which is no checkpoint: one that was allocated since the last checkpoint is
 * not in use after a power cut. Fails as farheap_pool_flush, and with FARHEAP_E_NO_SUCH_PAGE. */
farheap_status farheap_pool_flush_pages(farheap_pool *pool, const uint64_t *ids,
                                        size_t count) FARHEAP_NOEXCEPT;
/* Calls `visit` with the number of each page in use; of each that was changed and not written since.
 * They ascend. A page that changes meanwhile may or may not be among them. `visit` may use the pool. */
farheap_status farheap_pool_pages_in_use(farheap_pool *pool, farheap_visit visit,
                                         void *userdata) FARHEAP_NOEXCEPT;
farheap_status farheap_pool_dirty_pages(farheap_pool *pool, farheap_visit visit,
                                        void *userdata) FARHEAP_NOEXCEPT;
/* Evicts all pages that nobody holds, changed ones written, which is no checkpoint; fails as
 * farheap_pool_flush, but does not sync. */
farheap_status farheap_pool_evict_all(farheap_pool *pool) FARHEAP_NOEXCEPT;
/* Evicts about `want` bytes of unchanged pages; writes how many those were. */
farheap_status farheap_pool_evict_clean(farheap_pool *pool, uint64_t want,
                                        uint64_t *out) FARHEAP_NOEXCEPT;
/* Bytes of a page that are the caller's; pages of the table, used and free. 0 on error. */
size_t farheap_pool_payload(const farheap_pool *pool) FARHEAP_NOEXCEPT;
uint64_t farheap_pool_pages(const farheap_pool *pool) FARHEAP_NOEXCEPT;
/* The address of a page's first byte, `data` of its guards: pages do not move, so it is the same as long as
 * the pool exists, whether the page is in use and resident or not. NULL of a page that the table has no room
 * for, and of pages 0 and 1. An address holds nothing: what is read there counts only while a guard
 * holds the page, or when an optimistic guard made before validates afterwards; it is written to only as
 * farheap_page_write says. The page of an address, which may be of any of its bytes: 0 when it is in none;
 * the page may be free, or inside of a buffer. */
const uint8_t *farheap_pool_page_address(const farheap_pool *pool, uint64_t id) FARHEAP_NOEXCEPT;
uint64_t farheap_pool_page_at(const farheap_pool *pool, const void *address) FARHEAP_NOEXCEPT;
/* Starts to read pages in. */
farheap_status farheap_pool_prefetch(farheap_pool *pool, const uint64_t *ids,
                                     size_t count) FARHEAP_NOEXCEPT;
/* Bytes that others cannot take from the pool; the most it may take. */
farheap_status farheap_pool_set_floor(farheap_pool *pool, uint64_t bytes) FARHEAP_NOEXCEPT;
farheap_status farheap_pool_set_ceiling(farheap_pool *pool, uint64_t bytes) FARHEAP_NOEXCEPT;
/* The figures. */
farheap_status farheap_pool_stats_get(farheap_pool *pool, farheap_pool_stats *out) FARHEAP_NOEXCEPT;

typedef enum farheap_page_kind {
    FARHEAP_PAGE_NONE = 0,
    FARHEAP_PAGE_SHARED = 0x46534841,
    FARHEAP_PAGE_EXCLUSIVE = 0x4658434C,
    FARHEAP_PAGE_OPTIMISTIC = 0x464F5054
} farheap_page_kind;

/* A page that is held (a guard), in memory of the caller's, from a fix to its unfix. Its fields may
 * be read. Do not copy it: two unfixes of one fix are undefined; of one structure, the second is
 * FARHEAP_E_HANDLE. A structure may go to another thread. */
typedef struct farheap_page {
    farheap_page_kind kind; /* how it is held */
    uint32_t reserved;
    uint64_t id;            /* the page's number */
    const uint8_t *data;    /* its bytes, to be read; under an optimistic guard see there */
    size_t len;
    farheap_pool *pool;
    uint64_t guard[3];
} farheap_page;

/* Allocates a page, zeroed and held exclusively. FARHEAP_E_STORE_FULL, FARHEAP_E_OUT_OF_MEMORY. */
farheap_status farheap_pool_allocate(farheap_pool *pool, farheap_page *out) FARHEAP_NOEXCEPT;
/* Fixes a page for reading, together with other readers; alone, for changing it. They wait for
 * holders, up to the pool's deadline: FARHEAP_E_LATCH_TIMEOUT. FARHEAP_E_NO_SUCH_PAGE,
 * FARHEAP_E_OUT_OF_MEMORY, FARHEAP_E_IO, FARHEAP_E_CORRUPT_PAGE. */
farheap_status farheap_pool_fix_shared(farheap_pool *pool, uint64_t id,
                                       farheap_page *out) FARHEAP_NOEXCEPT;
farheap_status farheap_pool_fix_exclusive(farheap_pool *pool, uint64_t id,
                                          farheap_page *out) FARHEAP_NOEXCEPT;
/* The same with a deadline of their own. */
farheap_status farheap_pool_fix_shared_within(farheap_pool *pool, uint64_t id, uint64_t deadline_ms,
                                              farheap_page *out) FARHEAP_NOEXCEPT;
farheap_status farheap_pool_fix_exclusive_within(farheap_pool *pool, uint64_t id,
                                                 uint64_t deadline_ms,
                                                 farheap_page *out) FARHEAP_NOEXCEPT;
/* The same if it needs neither waiting nor I/O: else FARHEAP_E_WOULD_BLOCK. */
farheap_status farheap_pool_try_fix_shared(farheap_pool *pool, uint64_t id,
                                           farheap_page *out) FARHEAP_NOEXCEPT;
farheap_status farheap_pool_try_fix_exclusive(farheap_pool *pool, uint64_t id,
                                              farheap_page *out) FARHEAP_NOEXCEPT;
/* Looks at a page without holding it: farheap_page_read, or a look at `data`, then
 * farheap_page_validate. `data` stays readable as long as the pool exists, but others may change the
 * bytes at any time, or evict the page: what was read counts only if the page is validated afterwards,
 * and the compiler is not to read twice what the program reads once (volatile, or atomic loads). */
farheap_status farheap_pool_fix_optimistic(farheap_pool *pool, uint64_t id,
                                           farheap_page *out) FARHEAP_NOEXCEPT;
/* For redo from a log: fixes a page to overwrite all of it, whatever it is, resident or not, damaged,
 * free, or beyond the table's end. It is in use then, zeroed, and held exclusively; what the file has of
 * it is not read. Pages between the table's end and it become free. No other thread should allocate
 * meanwhile. FARHEAP_E_LATCH_TIMEOUT, FARHEAP_E_OUT_OF_MEMORY, FARHEAP_E_STORE_FULL;
 * FARHEAP_E_NO_SUCH_PAGE for pages 0 and 1, which are the pool's. */
farheap_status farheap_pool_fix_to_overwrite(farheap_pool *pool, uint64_t id,
                                             farheap_page *out) FARHEAP_NOEXCEPT;
/* Fixes `count` pages for reading, with one batch of reads, into as many structures; all or none. */
farheap_status farheap_pool_fix_many(farheap_pool *pool, const uint64_t *ids, size_t count,
                                     farheap_page *out) FARHEAP_NOEXCEPT;

/* Ends a fix. NULL does nothing; a structure that holds nothing is FARHEAP_E_HANDLE. */
farheap_status farheap_page_unfix(farheap_page *page) FARHEAP_NOEXCEPT;
/* The bytes of a page that is held exclusively, to be changed: marks it as changed. NULL on error. */
uint8_t *farheap_page_write(farheap_page *page) FARHEAP_NOEXCEPT;
/* True if nobody has changed the page since the optimistic fix: what was read counts. Always true for
 * a page that is held; false on error. */
bool farheap_page_validate(const farheap_page *page) FARHEAP_NOEXCEPT;
/* Copies bytes out of the page. FARHEAP_E_ARGUMENT when they are not all within it. */
farheap_status farheap_page_read(const farheap_page *page, size_t at, void *into,
                                 size_t len) FARHEAP_NOEXCEPT;
/* From shared or optimistic to exclusive, if nobody else holds the page, and for optimistic nobody
 * changed it: else FARHEAP_E_WOULD_BLOCK, and the structure is as before. farheap_page_validate tells whether
 * a page that was looked at was changed then, or is only held: by a reader, or a thread that writes it back. */
farheap_status farheap_page_try_upgrade(farheap_page *page) FARHEAP_NOEXCEPT;
/* From optimistic to exclusive, waiting for holders up to the pool's deadline: FARHEAP_E_LATCH_TIMEOUT.
 * FARHEAP_E_CHANGED when the page was changed or evicted, which waiting does not mend. Either way the structure
 * is as before. Not from shared, FARHEAP_E_ARGUMENT: two of one page would wait for each other; and a thread
 * that holds the page besides waits in vain. FARHEAP_E_DEVICE of a table that is only read. */
farheap_status farheap_page_upgrade(farheap_page *page) FARHEAP_NOEXCEPT;
/* From optimistic to shared, if nobody has changed the page or changes it: else
 * FARHEAP_E_WOULD_BLOCK, and the structure is as before. */
farheap_status farheap_page_try_share(farheap_page *page) FARHEAP_NOEXCEPT;
/* From exclusive to shared, without letting anybody in between. */
farheap_status farheap_page_downgrade(farheap_page *page) FARHEAP_NOEXCEPT;
/* Frees the page, which is held exclusively, and ends the fix: its number will be used again. */
farheap_status farheap_page_free(farheap_page *page) FARHEAP_NOEXCEPT;
/* The number of the log record that changed a held page last; 0 on error, and of `whole_pages`. */
uint64_t farheap_page_lsn(const farheap_page *page) FARHEAP_NOEXCEPT;
/* Notes it, for a page that is held exclusively; FARHEAP_E_ARGUMENT with `whole_pages`. */
farheap_status farheap_page_set_lsn(farheap_page *page, uint64_t lsn) FARHEAP_NOEXCEPT;

/* ---- B+-trees ------------------------------------------------------------------------------------ */

/* An ordered map from bytes to bytes in the pages of a pool, in the order of the keys' bytes. Any number
 * of threads read and change it at the same time. A key, like a value, may be of no length. Key and value
 * together take at most a quarter of farheap_pool_payload, less 8 bytes: FARHEAP_E_BAD_RANGE. Besides
 * that, and what is said below, functions fail as farheap_pool_allocate, farheap_pool_fix_exclusive and
 * farheap_pool_fix_shared do, and with FARHEAP_E_STALE_PAGE when the process or machine failed between
 * writes of the tree's pages: a log is the host's. */
typedef struct farheap_btree farheap_btree;

/* A place between two entries of a tree, or at an end of it. */
typedef struct farheap_cursor farheap_cursor;

/* An entry that a cursor went over. Bytes of no length have a pointer all the same. */
typedef struct farheap_entry {
    const uint8_t *key;
    size_t key_len;
    const uint8_t *value;
    size_t value_len;
} farheap_entry;

/* Changes a value in place; its length stays. The leaf is held meanwhile: it must not use the pool. */
typedef void (*farheap_change)(void *userdata, void *value, size_t len);

/* Gives the next entry to load; returns whether there was one. Its bytes stay as they are until the
 * function is called again, or the load is over. It must not use the pool. */
typedef bool (*farheap_next_entry)(void *userdata, farheap_entry *out);

/* Creates an empty tree, in one page. FARHEAP_E_BAD_RANGE in `whole_pages` of 64 KiB. */
farheap_status farheap_btree_create(farheap_pool *pool, farheap_btree **out) FARHEAP_NOEXCEPT;
/* Creates a tree of entries that come in ascending order of their keys, each key once: its nodes are full,
 * and it takes the least room that it can. FARHEAP_E_BAD_RANGE for a key that is not greater than the
 * one before. After a failure all its pages are free again. */
farheap_status farheap_btree_load(farheap_pool *pool, farheap_next_entry next, void *userdata,
                                  farheap_btree **out) FARHEAP_NOEXCEPT;
/* Opens the tree with this root, of farheap_btree_root: another page gives wrong answers. */
farheap_status farheap_btree_open(farheap_pool *pool, uint64_t root,
                                  farheap_btree **out) FARHEAP_NOEXCEPT;
/* Frees the handle; the tree stays in the pool, and cursors over it go on. NULL does nothing. */
farheap_status farheap_btree_free(farheap_btree *tree) FARHEAP_NOEXCEPT;
/* The page by which the tree is opened again; it never changes. 0 on error. */
uint64_t farheap_btree_root(const farheap_btree *tree) FARHEAP_NOEXCEPT;
/* True if the key is there; if so the length of its value, and as much of that as there is `room` for.
 * Of a key that is not there the length is 0. `into` may be NULL when `room` is 0. */
farheap_status farheap_btree_get(const farheap_btree *tree, const void *key, size_t key_len, void *into,
                                 size_t room, size_t *len, bool *found) FARHEAP_NOEXCEPT;
/* The value of a key in its page, which is held together with other readers then: to be ended by
 * farheap_page_unfix(page). A thread that holds it must not change the tree, or it waits for itself. Of a
 * key that is not there (`found`) nothing is held, and nothing else written. */
farheap_status farheap_btree_get_ref(const farheap_btree *tree, const void *key, size_t key_len,
                                     farheap_page *page, const uint8_t **value, size_t *len,
                                     bool *found) FARHEAP_NOEXCEPT;
/* Sets a key's value. `is_new`, which may be NULL: whether the key was not there before. */
farheap_status farheap_btree_insert(farheap_btree *tree, const void *key, size_t key_len,
                                    const void *value, size_t value_len,
                                    bool *is_new) FARHEAP_NOEXCEPT;
/* Calls `change` with a key's value if the key is there: `found`, which may be NULL. */
farheap_status farheap_btree_update(farheap_btree *tree, const void *key, size_t key_len,
                                    farheap_change change, void *userdata,
                                    bool *found) FARHEAP_NOEXCEPT;
/* Removes a key. `found`, which may be NULL: whether it was there. */
farheap_status farheap_btree_remove(farheap_btree *tree, const void *key, size_t key_len,
                                    bool *found) FARHEAP_NOEXCEPT;
/* A cursor before the first entry whose key is `from` or larger; NULL and 0: before all. */
farheap_status farheap_btree_scan(const farheap_btree *tree, const void *from, size_t from_len,
                                  farheap_cursor **out) FARHEAP_NOEXCEPT;
/* A cursor behind the last entry. */
farheap_status farheap_btree_scan_back(const farheap_btree *tree,
                                       farheap_cursor **out) FARHEAP_NOEXCEPT;
/* The entry behind the cursor, over which it goes; the one before, back over which it goes; if there is
 * one (`found`). Its bytes are the cursor's, until it moves on or is freed.
 * It holds no page: the tree may be changed meanwhile. Entries of one leaf are as they were when the
 * cursor came to it; changes of later ones are seen. Two threads at once: FARHEAP_E_IN_USE. After a
 * failure the cursor is where it was. */
farheap_status farheap_cursor_next(farheap_cursor *cursor, farheap_entry *out,
                                   bool *found) FARHEAP_NOEXCEPT;
farheap_status farheap_cursor_prev(farheap_cursor *cursor, farheap_entry *out,
                                   bool *found) FARHEAP_NOEXCEPT;
/* NULL does nothing. */
farheap_status farheap_cursor_free(farheap_cursor *cursor) FARHEAP_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* FARHEAP_H */
