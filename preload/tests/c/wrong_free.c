/* Frees wrongly, as its argument says, once its heap has started. Prints the address first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *named(void *block) {
    void *volatile unknown = block;
    printf("%p\n", unknown);
    fflush(stdout);
    return unknown;
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    char *much[200], in_the_stack[64] = { 0 };
    for (int n = 0; n < 200; n++) memset(much[n] = malloc(100000), 1, 100000);
    if (!strcmp(what, "stack")) {
        free(named(in_the_stack));
    } else if (!strcmp(what, "middle")) {
        free(named(much[50] + 4096));
    } else if (!strcmp(what, "behind")) {
        char *block = named(malloc(112));
        block[112] = 1;
        free(block);
    } else if (!strcmp(what, "others")) {
        char *block = named(malloc(64)), *other = malloc(64);
        free(block);
        free(other);
        free(block);
    } else {
        char *block = named(malloc(strcmp(what, "large") ? 64 : 300000));
        free(block);
        free(block);
    }
    return 0;
}
