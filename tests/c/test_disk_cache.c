#define _GNU_SOURCE
/* Engines with a disk tier: random traces whose tokens must be those of the oracle while calls of the system fail; restarts; two
 * engines over one folder; damaged files; and a process that is killed at any instant. */
#include "trace.h"

#include "../../csrc/base/disk.h"
#include "../../csrc/base/mem.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FOLDER "disk_cache"
#define SHARED FOLDER "/07000000000000000000000000000000"

static const struct disk_options PRIVATE = {.path = FOLDER, .bytes = 1 << 20};
static const struct disk_options LASTING = {.path = FOLDER, .bytes = 1 << 20, .fingerprint = {7}, .is_shared = true};

/* Calls visit for the files of a folder; returns how many there are. */
static uint32_t each_file(const char *folder, void (*visit)(const char *path))
{
    char path[512];
    uint32_t n = 0;
    DIR *names = opendir(folder);
    for (struct dirent *entry; names && (entry = readdir(names));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            n++;
            if (visit)
                visit(path);
        }
    if (names)
        closedir(names);
    return n;
}

static void remove_file(const char *path)
{
    CHECK(!unlink(path));
}

/* Works in memory if the system has such a folder: then the threads keep up with the traces. */
static char work_folder[] = "/dev/shm/llmpy_disk_XXXXXX";

static void leave_work_folder(void)
{
    rmdir(FOLDER);
    if (chdir("/") || rmdir(work_folder))
        fprintf(stderr, "%s is left\n", work_folder);
}

__attribute__((constructor)) static void enter_work_folder(void)
{
    if (mkdtemp(work_folder) && !chdir(work_folder))
        atexit(leave_work_folder);
}

static void start_empty(void)
{
    each_file(SHARED, remove_file);
    rmdir(SHARED);
    CHECK_EQ(each_file(FOLDER, NULL), 0);
}

/* ---- past the page cache ---- */

/* Whole units go direct where the file system can; anything else goes on through the page cache. */
TEST(direct_calls_move_every_byte)
{
    char *written = mem_map(4 * DISK_UNIT), *read = mem_map(4 * DISK_UNIT);
    const size_t places[] = {0, 100};
    for (size_t i = 0; i < 4 * DISK_UNIT; i++)
        written[i] = (char)(i * 7 + i / 251);
    for (uint32_t how = 0; how < 4; how++) {
        const size_t to = places[how / 2], from = places[how % 2], n = 3 * DISK_UNIT - (how ? 40 : 0);
        int file;
        uint64_t size_bytes;
        CHECK_EQ(disk_create(AT_FDCWD, "direct", &file), 0);
        disk_go_direct(file);
        CHECK_EQ(disk_write(file, (struct iovec[]){{written + to, DISK_UNIT}, {written + to + DISK_UNIT, n - DISK_UNIT}}, 2), 0);
        disk_close(file);
        memset(read, 0, 4 * DISK_UNIT);
        CHECK_EQ(disk_open(AT_FDCWD, "direct", &size_bytes, &file), 0);
        CHECK_EQ(size_bytes, n);
        disk_go_direct(file);
        CHECK_EQ(disk_read(file, (struct iovec[]){{read + from, DISK_UNIT}, {read + from + DISK_UNIT, n - DISK_UNIT}}, 2), 0);
        CHECK(!memcmp(written + to, read + from, n));
        disk_close(file);
        remove_file("direct");
    }
    mem_unmap(written, 4 * DISK_UNIT);
    mem_unmap(read, 4 * DISK_UNIT);
}

/* ---- one engine after another ---- */

static const struct setup FULL = {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true,
                                  .n_host_slots = 64, .disk = &LASTING, .has_cache_seed = true};
static const struct setup WINDOWS = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true,
                                     .n_host_slots = 90, .windows = {0, 6}, .n_layers = 2, .disk = &LASTING, .has_cache_seed = true};
static const struct setup STATES = {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 4, .max_num_batched_tokens = 32, .caches = true,
                                    .n_host_slots = 90, .states = {{0, 3, 32}}, .n_states = 1, .snapshot_tokens = 16, .disk = &LASTING,
                                    .has_cache_seed = true};

#define N_PROMPTS 3u

/* Opens an engine. Its runs have other numbers than those of earlier engines, which stand in the cells that come from files. */
static struct engine *open_engine(const struct setup *setup, struct fake *fake)
{
    static uint64_t n_opened;
    struct err err;
    struct engine *engine = fake_engine(setup, fake, &err);
    if (!engine)
        CHECK_FAIL("%s", err.message);
    fake->n_runs = ((uint64_t)getpid() << 40) + (++n_opened << 20);
    return engine;
}

static void run_prompts(struct engine *engine, const struct fake *fake, uint32_t n_prompt)
{
    struct job *jobs[N_PROMPTS];
    for (uint32_t i = 0; i < N_PROMPTS; i++) {
        jobs[i] = stream_job(fake, i + 1, n_prompt, 4);
        expect(jobs[i]);
        submit_job(engine, jobs[i]);
    }
    drain(engine, jobs, N_PROMPTS);
    for (uint32_t i = 0; i < N_PROMPTS; i++) {
        CHECK(jobs[i]->is_done);
        free(jobs[i]);
    }
}

/* One engine's life; returns the rows that it computed. */
static uint64_t live(const struct setup *setup, uint32_t n_prompt, struct engine_stats *stats)
{
    struct fake fake;
    struct engine *engine = open_engine(setup, &fake);
    if (!engine)
        return 0;
    run_prompts(engine, &fake, n_prompt);
    engine_stats(engine, stats);
    uint64_t n_rows = fake.n_rows;
    fake_close(engine, &fake);
    return n_rows;
}

/* ---- traces ---- */

/* Some call of the next hundred fails, while the trace goes on. Now and then the threads get time to catch up. */
static void fail_some_call(struct trace *t)
{
    static const int CODES[] = {ENOSPC, EIO, EINTR, 0, EMFILE};
    if (t->setup.disk && check_below(&t->random, 4) == 0)
        disk_fail_after((int64_t)check_below(&t->random, 100), CODES[check_below(&t->random, 5)]);
    uint64_t n_before = ~0ull;
    for (uint32_t i = check_below(&t->random, 16) ? 20 : 0; i < 20 && disk_n_calls() != n_before; i++) {
        n_before = disk_n_calls();
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static uint64_t n_hits, n_errors; /* of all traces: one of them may find its blocks before they are written */

static void look_at_trace(const struct setup *setup, const struct engine_stats *stats)
{
    (void)setup;
    disk_fail_after(-1, 0);
    n_hits += stats->disk_cache_hits;
    n_errors += stats->disk_errors;
    CHECK(stats->disk_stored_bytes > 0);
    if (each_file(FOLDER, NULL)) { /* the call failed that removes the engine's own folder; the next engine does it */
        struct engine_stats other;
        struct setup next = FULL;
        next.disk = &PRIVATE;
        live(&next, 8, &other);
    }
    CHECK_EQ(each_file(FOLDER, NULL), 0);
}

TEST(random_traces_with_a_disk_tier)
{
    const struct setup SETUPS[] = {
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 16, .n_host_slots = 40},
        {.block_tokens = 4, .n_pages = 26, .max_num_seqs = 6, .max_num_batched_tokens = 40, .n_host_slots = 16, .policy = POLICY_PRIORITY},
        {.block_tokens = 1, .n_pages = 110, .max_num_seqs = 5, .max_num_batched_tokens = 64, .n_host_slots = 130, .preemption = PREEMPTION_SWAP},
        {.block_tokens = 4, .n_pages = 60, .max_num_seqs = 6, .max_num_batched_tokens = 12, .windows = {0, 6}, .n_layers = 2, .n_host_slots = 50,
         .has_nan = true},
        {.block_tokens = 4, .n_pages = 50, .max_num_seqs = 6, .max_num_batched_tokens = 40, .states = {{0, 3, 32}, {0, 2, 64}}, .n_states = 2,
         .snapshot_tokens = 24, .n_host_slots = 60},
        {.block_tokens = 4, .n_pages = 40, .max_num_seqs = 8, .max_num_batched_tokens = 24, .states = {{0, 3, 256}, {0, 1, 256}}, .n_states = 2,
         .snapshot_tokens = 16, .has_no_attention = true, .n_host_slots = 30},
    };
    enum { N = sizeof SETUPS / sizeof *SETUPS };
    struct setup setups[N];
    start_empty();
    for (uint32_t i = 0; i < N; i++) {
        setups[i] = SETUPS[i];
        setups[i].caches = true;
        setups[i].disk = &PRIVATE;
        setups[i].between = fail_some_call;
    }
    trace_run_all(setups, N, 6000, look_at_trace);
    if (n_hits < 20 || n_errors < 5)
        CHECK_FAIL("%" PRIu64 " hits, %" PRIu64 " errors", n_hits, n_errors);
}

TEST(the_cache_outlives_the_engine)
{
    const struct setup *SETUPS[] = {&FULL, &WINDOWS, &STATES};
    struct engine_stats stats;
    for (uint32_t i = 0; i < 6 && !check_failures; i++) {
        struct setup setup = *SETUPS[i / 2];
        setup.is_async = i % 2;
        start_empty();
        uint64_t n_cold = live(&setup, 60, &stats);
        CHECK_EQ(stats.disk_cache_hits, 0);
        CHECK(each_file(SHARED, NULL) >= N_PROMPTS * 60 / 4);
        uint64_t n_warm = live(&setup, 61, &stats);
        CHECK_EQ(stats.disk_cache_hits, N_PROMPTS * 60);
        CHECK(n_warm + 160 < n_cold);
        if (check_failures)
            fprintf(stderr, "in setup %u, %u steps in flight: %llu rows, then %llu\n", i / 2, 1 + i % 2, (unsigned long long)n_cold,
                    (unsigned long long)n_warm);
    }
    start_empty();
}

/* Runs the prompts behind commits of weights with these digests (0: unknown); returns the tokens that came from files. */
static uint64_t live_behind(const struct setup *setup, const uint64_t *digests, uint32_t n_digests, struct engine_stats *stats)
{
    struct fake fake;
    struct err err;
    struct engine *engine = open_engine(setup, &fake);
    uint32_t epoch;
    for (uint32_t i = 0; i < n_digests; i++) {
        const struct hash weights = {.lo = digests[i]};
        CHECK_OK(engine_hold_steps(engine, &err));
        CHECK_OK(engine_commit_weights(engine, false, digests[i] ? &weights : NULL, &epoch, &err));
        run_prompts(engine, &fake, 60);
    }
    engine_stats(engine, stats);
    fake_close(engine, &fake);
    return stats->disk_cache_hits;
}

TEST(files_follow_the_weights)
{
    const uint64_t FIRST[] = {1}, SECOND[] = {2}, BOTH[] = {2, 1}, UNKNOWN[] = {0}, LATER[] = {0, 1};
    struct engine_stats stats;
    struct setup secret = FULL;
    struct disk_options own = PRIVATE;
    secret.disk = &own;
    secret.has_cache_seed = false;
    start_empty();
    live(&FULL, 60, &stats);
    CHECK_EQ(live_behind(&FULL, FIRST, 1, &stats), 0);
    uint32_t n_files = each_file(SHARED, NULL);
    CHECK_EQ(live_behind(&FULL, SECOND, 1, &stats), 0);
    CHECK(each_file(SHARED, NULL) > n_files);
    CHECK_EQ(live_behind(&FULL, FIRST, 1, &stats), N_PROMPTS * 60);
    CHECK_EQ(live_behind(&FULL, BOTH, 2, &stats), 2 * N_PROMPTS * 60);
    n_files = each_file(SHARED, NULL);
    CHECK_EQ(live_behind(&FULL, UNKNOWN, 1, &stats), 0);
    CHECK_EQ(each_file(SHARED, NULL), n_files);
    CHECK_EQ(live_behind(&FULL, LATER, 2, &stats), N_PROMPTS * 60);
    CHECK_EQ(live_behind(&secret, BOTH, 2, &stats), 0);

    struct disk_options small = LASTING; /* files of weights that nobody has any more make room */
    struct setup little = FULL;
    small.bytes = 64 * (64 + FULL.block_tokens * sizeof(struct cell));
    little.disk = &small;
    for (uint64_t digest = 10; digest < 14; digest++)
        CHECK_EQ(live_behind(&little, &digest, 1, &stats), 0);
    CHECK_EQ(each_file(SHARED, NULL), 64);
    start_empty();
}

TEST(other_keys_weights_and_resets_find_nothing)
{
    struct engine_stats stats;
    struct err err;
    struct setup secret = FULL, other = FULL;
    struct disk_options newer = LASTING;
    newer.fingerprint[0] = 8;
    other.disk = &newer;
    secret.has_cache_seed = false;
    start_empty();
    live(&FULL, 60, &stats);
    uint32_t n_files = each_file(SHARED, NULL);
    live(&secret, 60, &stats);
    CHECK_EQ(stats.disk_cache_hits, 0);
    live(&other, 60, &stats);
    CHECK_EQ(stats.disk_cache_hits, 0);
    CHECK(n_files && each_file(FOLDER, NULL) == 2);

    struct fake fake;
    struct engine *engine = open_engine(&FULL, &fake);
    uint32_t epoch;
    CHECK_OK(engine_hold_steps(engine, &err));
    CHECK_OK(engine_commit_weights(engine, false, NULL, &epoch, &err));
    run_prompts(engine, &fake, 60);
    engine_stats(engine, &stats);
    CHECK_EQ(stats.disk_cache_hits, 0); /* the files are those of the weights before */
    fake_close(engine, &fake);

    engine = open_engine(&FULL, &fake);
    CHECK_OK(engine_reset_prefix_cache(engine, false, &err));
    run_prompts(engine, &fake, 60);
    engine_stats(engine, &stats);
    CHECK_EQ(stats.disk_cache_hits, 0);
    fake_close(engine, &fake);
    each_file(FOLDER "/08000000000000000000000000000000", remove_file);
    rmdir(FOLDER "/08000000000000000000000000000000");
    start_empty();
}

TEST(two_engines_share_a_folder)
{
    struct fake first, second;
    struct engine_stats stats;
    start_empty();
    struct engine *a = open_engine(&FULL, &first), *b = open_engine(&FULL, &second);
    run_prompts(a, &first, 60);
    fake_close(a, &first);
    run_prompts(b, &second, 60);
    engine_stats(b, &stats);
    CHECK_EQ(stats.disk_cache_hits, N_PROMPTS * 60);
    fake_close(b, &second);
    start_empty();
}

/* ---- damage ---- */

static uint64_t damage_random = 5;

/* Changes a byte, cuts the file, or makes it longer. */
static void damage(const char *path)
{
    struct stat status;
    char byte;
    int file = open(path, O_RDWR);
    CHECK(file >= 0 && !fstat(file, &status));
    off_t at = (off_t)check_below(&damage_random, (uint32_t)status.st_size);
    switch (check_below(&damage_random, 3)) {
    case 0:
        CHECK(pread(file, &byte, 1, at) == 1);
        byte ^= (char)(1 << check_below(&damage_random, 8));
        CHECK(pwrite(file, &byte, 1, at) == 1);
        break;
    case 1:
        CHECK(!ftruncate(file, at));
        break;
    default:
        CHECK(!ftruncate(file, status.st_size + 1));
    }
    close(file);
}

TEST(damaged_files_are_misses_and_go)
{
    struct engine_stats stats;
    start_empty();
    for (uint32_t round = 0; round < 6 && !check_failures; round++) {
        live(&FULL, 60, &stats);
        uint32_t n_files = each_file(SHARED, damage);
        CHECK(n_files >= N_PROMPTS * 15);
        live(&FULL, 60, &stats);
        CHECK(stats.disk_bad_files >= N_PROMPTS && stats.disk_loaded_bytes == 0);
        for (uint32_t i = 0; i < 15 && stats.disk_bad_files; i++) /* files behind a missing one are read later */
            live(&FULL, 60, &stats);
        live(&FULL, 60, &stats);
        CHECK_EQ(stats.disk_bad_files, 0);
        CHECK_EQ(stats.disk_cache_hits, N_PROMPTS * 60);
    }
    start_empty();
}

TEST(every_call_may_fail)
{
    static const int CODES[] = {ENOSPC, EIO, EINTR, 0};
    struct engine_stats stats;
    start_empty();
    live(&FULL, 60, &stats);
    uint64_t before = disk_n_calls();
    live(&FULL, 60, &stats);
    uint64_t n_calls = disk_n_calls() - before;
    CHECK(n_calls > N_PROMPTS * 15 * 2);
    for (uint64_t at = 0; at < n_calls && !check_failures; at += at < 8 ? 1 : 7)
        for (uint32_t i = 0; i < 4; i++) {
            struct fake fake;
            struct err err;
            disk_fail_after((int64_t)at, CODES[i]);
            struct engine *engine = fake_engine(&FULL, &fake, &err);
            if (!engine) { /* the folder cannot be opened, or not be written to */
                CHECK(err.rc == RC_IO && at < 8 && (CODES[i] == ENOSPC || CODES[i] == EIO || CODES[i] == EINTR));
                CHECK_CONTAINS(err.message, FOLDER);
                continue;
            }
            fake.n_runs = (uint64_t)getpid() << 40 | (at * 4 + i + 1) << 30;
            run_prompts(engine, &fake, 60);
            fake_close(engine, &fake);
            disk_fail_after(-1, 0);
        }
    live(&FULL, 60, &stats);
    CHECK_EQ(stats.disk_bad_files, 0);
    start_empty();
}

TEST(the_least_recently_used_files_make_room)
{
    struct disk_options few = LASTING;
    struct setup setup = FULL;
    struct engine_stats stats;
    setup.disk = &few;
    few.bytes = 30 * (64 + 4 * sizeof(struct cell));
    start_empty();
    live(&setup, 60, &stats);
    live(&setup, 61, &stats);
    CHECK(stats.disk_cache_hits > 0);
    CHECK_EQ(each_file(SHARED, NULL), 30);
    few.bytes = 10 * (64 + 4 * sizeof(struct cell)); /* an engine that may have less removes the oldest files */
    live(&setup, 62, &stats);
    CHECK(stats.disk_evictions >= 20);
    CHECK_EQ(each_file(SHARED, NULL), 10);
    few.bytes = 100;
    struct fake fake;
    struct err err;
    CHECK(!fake_engine(&setup, &fake, &err));
    CHECK_EQ(err.rc, RC_CONFIG);
    CHECK_CONTAINS(err.message, "disk_cache: bytes must be at least");
    start_empty();
}

/* ---- kill -9 ---- */

static void temporary_fails(const char *path)
{
    if (strstr(path, ".tmp"))
        CHECK_FAIL("%s is left", path);
}

/* Lives until it is killed. */
static void live_for_ever(const struct setup *setup)
{
    struct engine_stats stats;
    for (uint32_t n = 60;; n = n == 60 ? 40 : 60)
        live(setup, n, &stats);
}

TEST(a_killed_process_leaves_whole_files)
{
    const char *wanted = getenv("KILLS");
    uint32_t n_kills = wanted ? (uint32_t)atoi(wanted) : 8;
    struct engine_stats stats;
    struct disk_options few = LASTING;
    struct setup setup = FULL;
    uint64_t random = 11;
    few.bytes = 30 * (64 + 4 * sizeof(struct cell)); /* files come and go */
    setup.disk = &few;
    start_empty();
    for (uint32_t i = 0; i < n_kills && !check_failures; i++) {
        struct setup own = setup;
        own.has_cache_seed = i % 4 != 3;
        own.disk = i % 4 == 3 ? &PRIVATE : &few;
        pid_t child = fork();
        if (!child)
            live_for_ever(&own);
        nanosleep(&(struct timespec){.tv_nsec = (long)(1 + check_below(&random, 60)) * 1000000}, NULL);
        CHECK(!kill(child, SIGKILL));
        CHECK_EQ(waitpid(child, NULL, 0), child);
        live(&setup, 60, &stats);
        CHECK_EQ(stats.disk_bad_files + stats.disk_errors, 0);
        each_file(SHARED, temporary_fails);
        CHECK_EQ(each_file(FOLDER, NULL), 1); /* the folder that was the killed engine's own is gone */
    }
    start_empty();
}
