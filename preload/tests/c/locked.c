/* Locks all of its memory, before it has far memory and after: it has no more in memory than the limit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BLOCKS = 24 * 16, SIZE = 64 << 10 };

int main(void) {
    static unsigned char *blocks[BLOCKS];
    if (mlockall(MCL_CURRENT | MCL_FUTURE)) perror("skipped: mlockall");
    for (int round = 0; round < 3; round++) {
        for (int n = 0; n < BLOCKS; n++) {
            if (round == 0) blocks[n] = malloc(SIZE);
            memset(blocks[n], n + round, SIZE);
        }
        for (int n = 0; n < BLOCKS; n++)
            if (blocks[n][n] != (unsigned char)(n + round)) return 1;
        if (mlockall(MCL_CURRENT)) perror("skipped: mlockall");
    }
    puts("right");
}
