/* stacks.c: prints the C stacks of all threads of a process that hangs, where there is no debugger.
 *   gcc -shared -fPIC -O1 -o /tmp/stacks.so benchmarks/stacks.c
 *   LD_PRELOAD=/tmp/stacks.so python ... &   # then: kill -USR1 PID; the stacks go to stderr
 * Each thread prints its own stack from a signal handler, 0.1 s after the one before, so that they do not mix. */
#define _GNU_SOURCE
#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FRAMES 48

static void print_own(int number)
{
    void *frames[FRAMES];
    char name[32] = "", path[64], text[128];
    (void)number;
    snprintf(path, sizeof path, "/proc/self/task/%ld/comm", syscall(SYS_gettid));
    int file = open(path, O_RDONLY);
    ssize_t n = file < 0 ? 0 : read(file, name, sizeof name - 1);
    if (file >= 0)
        close(file);
    name[n > 0 ? n - 1 : 0] = 0;
    int length = snprintf(text, sizeof text, "---- thread %ld, %s\n", syscall(SYS_gettid), name);
    if (write(2, text, (size_t)length) < 0)
        return;
    backtrace_symbols_fd(frames, backtrace(frames, FRAMES), 2);
}

static void ask_all(int number)
{
    struct dirent *entry;
    DIR *tasks = opendir("/proc/self/task");
    (void)number;
    while (tasks && (entry = readdir(tasks))) {
        long thread = atol(entry->d_name);
        if (thread && !syscall(SYS_tgkill, getpid(), thread, SIGUSR2))
            usleep(100000);
    }
    if (tasks)
        closedir(tasks);
}

__attribute__((constructor)) static void install(void)
{
    void *frame;
    backtrace(&frame, 1); /* loads the unwinder, which a signal handler must not do */
    signal(SIGUSR2, print_own);
    signal(SIGUSR1, ask_all);
}
