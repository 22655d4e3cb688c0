/* Loads many libraries with thread-local variables while threads run, which the loader then allocates
   tables for, at their next use of one. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIBRARIES = 60, BLOCKS = 100000 };
static pthread_barrier_t loaded;
static int *(*functions[LIBRARIES])(void);

static void *work(void *unused) {
    free(malloc(100));
    pthread_barrier_wait(&loaded);
    long sum = 0;
    for (int n = 0; n < LIBRARIES; n++) {
        void *block = malloc(1000);
        *functions[n]() += n;
        sum += *functions[n]();
        free(block);
    }
    return (void *)sum;
}

int main(int count, char **arguments) {
    static char *blocks[BLOCKS];
    for (int n = 0; n < BLOCKS; n++) blocks[n] = memset(malloc(200), n, 200);
    pthread_t threads[4];
    pthread_barrier_init(&loaded, NULL, 5);
    for (int n = 0; n < 4; n++) pthread_create(&threads[n], NULL, work, NULL);
    for (int n = 0; n < LIBRARIES; n++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/variable%d.so", arguments[1], n);
        void *library = dlopen(path, RTLD_NOW);
        if (!library) return puts(dlerror()), 1;
        *(void **)&functions[n] = dlsym(library, "place");
    }
    pthread_barrier_wait(&loaded);
    for (int n = 0; n < 4; n++) {
        void *sum;
        pthread_join(threads[n], &sum);
        if ((long)sum != LIBRARIES * (LIBRARIES - 1) / 2 + 5 * LIBRARIES) return 2;
    }
    /* More faults, served by threads that were there before the libraries. */
    for (int n = 0; n < BLOCKS; n++) if (blocks[n][199] != (char)n) return 3;
    puts("right");
    return count != 2;
}
