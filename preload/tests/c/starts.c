/* Starts a program in every way that the C library has, with seven arguments. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void start(int way, char *path, char *name, char **arguments) {
    switch (way) {
    case 0: execv(path, arguments); break;
    case 1: execve(path, arguments, environ); break;
    case 2: execvp(name, arguments); break;
    case 3: execvpe(name, arguments, environ); break;
    case 4: fexecve(open(path, O_RDONLY | O_CLOEXEC), arguments, environ); break;
    case 5: execl(path, name, "1", "2", "3", "4", "5", "6", "7", NULL); break;
    case 6: execlp(name, name, "1", "2", "3", "4", "5", "6", "7", NULL); break;
    case 7: execle(path, name, "1", "2", "3", "4", "5", "6", "7", NULL, environ); break;
    case 8: execveat(AT_FDCWD, path, arguments, environ, 0); break;
    case 9: execveat(open("/", O_PATH), path + 1, arguments, environ, 0); break;
    }
}

int main(int count, char **given) {
    if (count != 4) return 2;
    char *path = given[1], *name = given[2];
    int is_script = given[3][0] == 's';
    char *arguments[] = {name, "1", "2", "3", "4", "5", "6", "7", NULL};
    for (int way = 0; way < 13; way++) {
        pid_t child = -1;
        int status = 0;
        if (way == 4 && is_script) continue; /* The descriptor is closed when the interpreter opens it. */
        if (way == 10) posix_spawn(&child, path, NULL, NULL, arguments, environ);
        else if (way == 11) posix_spawnp(&child, name, NULL, NULL, arguments, environ);
        else if (way == 12) {
            if ((child = vfork()) == 0) {
                execve(path, arguments, environ);
                _exit(9);
            }
        } else if ((child = fork()) == 0) {
            start(way, path, name, arguments);
            _exit(9);
        }
        if (waitpid(child, &status, 0) != child || status) {
            fprintf(stderr, "way %d: %x\n", way, status);
            return 1;
        }
    }
    return 0;
}
