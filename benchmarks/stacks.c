/* stacks.c: prints the C stacks of all threads of a process that hangs, where there is no debugger.
 *   gcc -shared -fPIC -O1 -o /tmp/stacks.so benchmarks/stacks.c
 *   LD_PRELOAD=/tmp/stacks.so python ... &   # then: kill -USR1 PID; the stacks go to stderr
 * A signal handler prints, for one thread after the other, the words of its stack that are addresses of code in llmpy's
 * libraries or the CUDA driver. Old return addresses that still lie on the stack are printed too. An unwinder would tell them
 * apart, but it crashes in the driver's frames. `nm -C --defined-only LIBRARY | sort` names an offset. */
#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define MAX_RANGES 4096
#define MAX_WORDS 8192 /* of a stack */
#define MAX_LINES 60   /* of a thread */

struct range {
    unsigned long from, to, file_offset;
    int is_code, is_ours;
    char name[32];
};
static struct range ranges[MAX_RANGES];
static int n_ranges;

static void read_ranges(void)
{
    char line[512], mode[8], path[400];
    FILE *maps = fopen("/proc/self/maps", "r");
    n_ranges = 0;
    while (maps && n_ranges < MAX_RANGES && fgets(line, sizeof line, maps)) {
        struct range *r = &ranges[n_ranges];
        path[0] = 0;
        if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %399s", &r->from, &r->to, mode, &r->file_offset, path) < 4)
            continue;
        const char *slash = strrchr(path, '/');
        snprintf(r->name, sizeof r->name, "%.31s", slash ? slash + 1 : path);
        r->is_code = mode[2] == 'x';
        r->is_ours = strstr(path, "llmpy") || strstr(path, "libcuda");
        n_ranges++;
    }
    if (maps)
        fclose(maps);
}

static const struct range *find_range(unsigned long address)
{
    for (int i = 0; i < n_ranges; i++)
        if (address >= ranges[i].from && address < ranges[i].to)
            return &ranges[i];
    return NULL;
}

static void print_own(int number, siginfo_t *info, void *context)
{
    const greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned long *word = (const unsigned long *)registers[REG_RSP];
    const struct range *stack = find_range((unsigned long)word);
    unsigned long address = (unsigned long)registers[REG_RIP];
    (void)number, (void)info;
    dprintf(2, "---- thread %ld of %d\n", syscall(SYS_gettid), getpid());
    for (int i = 0, n_lines = 0; i < MAX_WORDS && n_lines < MAX_LINES; i++) {
        const struct range *code = find_range(address);
        if (code && code->is_code && (code->is_ours || !i))
            n_lines++, dprintf(2, "%s+%lx\n", code->name, address - code->from + code->file_offset);
        if (!stack || (unsigned long)(word + 1) > stack->to)
            break;
        address = *word++;
    }
}

static void ask_all(int number)
{
    struct dirent *entry;
    DIR *tasks = opendir("/proc/self/task");
    (void)number;
    read_ranges();
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
    struct sigaction own = {.sa_sigaction = print_own, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGUSR2, &own, NULL);
    signal(SIGUSR1, ask_all);
}
