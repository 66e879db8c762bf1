/* Hosts of one model (csrc/program/hosts.c), each a thread here: values that all agree on, steps, exchanges, gathers of CPU
 * ranks, and ends of every kind. */
#define _GNU_SOURCE
#include "check.h"

#include "../../csrc/base/clock.h"
#include "../../csrc/base/mem.h"
#include "../../csrc/program/hosts.h"
#include "../../csrc/program/wire.h"
#include "../../kernels/cpu/gather.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

#define MAX_HOSTS 3u
#define RANKS 2u     /* of each host */
#define ROWS 3u
#define WIDTH 14u    /* columns; shares of 12 ranks or fewer are unequal */
#define N_STEPS 40u

struct host {
    struct hosts_options options;
    struct hosts *hosts;
    enum rc (*run)(struct host *host, struct err *err);
    useconds_t comes_after;
    enum rc rc;
    struct err err;
    double ended;
    pthread_t thread;
    struct cpu cpus[RANKS];
    void *ctxs[RANKS], *memory[RANKS];
    float values[RANKS][ROWS][WIDTH];
};

struct group {
    uint32_t n;
    struct host hosts[MAX_HOSTS];
};

static void *run_host(void *ctx)
{
    struct host *h = ctx;
    if (h->comes_after)
        usleep(h->comes_after);
    h->rc = hosts_open(&h->options, &h->hosts, &h->err);
    if (!h->rc)
        h->rc = h->run(h, &h->err);
    if (h->rc && h->hosts)
        hosts_end(h->hosts, h->err.message);
    h->ended = seconds_now();
    hosts_close(h->hosts);
    return NULL;
}

static uint16_t free_port(void)
{
    struct err err;
    int listener = -1;
    CHECK_OK(wire_listen("127.0.0.1", 0, &listener, &err));
    uint16_t port = wire_port(listener);
    close(listener);
    return port;
}

static void group_run(struct group *g, uint32_t n, double step_seconds, enum rc (*run)(struct host *host, struct err *err))
{
    uint16_t port = free_port();
    *g = (struct group){.n = n};
    for (uint32_t i = 0; i < n; i++) {
        struct host *h = &g->hosts[i];
        h->run = run;
        h->options = (struct hosts_options){.address = "127.0.0.1", .port = port, .host = i, .n_hosts = n,
                                            .patience = {.seconds = 10}, .step_seconds = step_seconds};
        CHECK_EQ(pthread_create(&h->thread, NULL, run_host, h), 0);
    }
    for (uint32_t i = 0; i < n; i++)
        pthread_join(g->hosts[i].thread, NULL);
}

static void check_all_ended_well(const struct group *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->hosts[i].rc)
            CHECK_FAIL("host %u: %s", i, g->hosts[i].err.message);
}

/* ---- messages ---------------------------------------------------------------------------------------------------------- */

static enum rc agree(struct host *h, struct err *err)
{
    uint64_t values[3] = {h->options.host, 10 - h->options.host, UINT64_MAX};
    enum rc rc = hosts_agree(h->hosts, values, 3, err);
    if (rc)
        return rc;
    CHECK_EQ(values[0], h->options.n_hosts - 1);
    CHECK_EQ(values[1], 10);
    CHECK(values[2] == UINT64_MAX);
    return RC_OK;
}

TEST(hosts_agree_on_the_largest_values)
{
    struct group g;
    for (uint32_t n = 2; n <= MAX_HOSTS; n++) {
        group_run(&g, n, 5, agree);
        check_all_ended_well(&g);
    }
}

/* Each host gives a block of its own size; all others get it whole, in the order of hosts. */
static enum rc exchange(struct host *h, struct err *err)
{
    uint32_t own = h->options.host, n = h->options.n_hosts;
    char block[64], others[256];
    enum rc rc = RC_OK;
    for (uint32_t turn = 0; turn < N_STEPS && !rc; turn++) {
        bool is_to_first = turn % 3 == 2;
        size_t size = 5 * own + turn, n_bytes, at = 0;
        memset(block, (int)(own + turn), sizeof block);
        rc = hosts_exchange(h->hosts, block, size, is_to_first, others, sizeof others, &n_bytes, err);
        for (uint32_t other = 0; other < n && !rc && (!is_to_first || !own); other++)
            for (uint32_t i = 0; other != own && i < 5 * other + turn; i++, at++)
                CHECK_EQ(others[at], (char)(other + turn));
        CHECK_EQ(rc ? 0 : n_bytes, at);
    }
    return rc;
}

TEST(blocks_go_to_all_other_hosts)
{
    struct group g;
    for (uint32_t n = 2; n <= MAX_HOSTS; n++) {
        group_run(&g, n, 5, exchange);
        check_all_ended_well(&g);
    }
}

static enum rc follow(struct host *h, struct err *err)
{
    char bytes[64];
    size_t n_bytes;
    enum wire_kind kind;
    for (uint64_t step = 1;; step++) {
        enum rc rc = hosts_read_call(h->hosts, &kind, bytes, sizeof bytes, &n_bytes, err);
        if (rc || kind == WIRE_CLOSE)
            return rc;
        CHECK_EQ(kind, WIRE_STEP);
        CHECK_EQ(n_bytes, step);
        rc = hosts_send_done(h->hosts, step, err);
        if (rc)
            return rc;
    }
}

static enum rc steps(struct host *h, struct err *err)
{
    static const char bytes[64] = "steps of growing sizes";
    enum rc rc = RC_OK;
    if (h->options.host)
        return follow(h, err);
    for (uint64_t step = 1; step <= N_STEPS && !rc; step++) {
        rc = hosts_send_step(h->hosts, bytes, step, err);
        rc = rc ? rc : hosts_await_done(h->hosts, step, err);
    }
    return rc;
}

TEST(followers_end_when_host_0_closes)
{
    struct group g;
    group_run(&g, 3, 5, steps);
    check_all_ended_well(&g);
}

/* Each follower answers with the code that the order has for it. */
static enum rc answer(struct host *h, struct err *err)
{
    uint32_t codes[MAX_HOSTS] = {0};
    size_t n_bytes;
    enum wire_kind kind;
    for (;;) {
        enum rc rc = hosts_read_call(h->hosts, &kind, codes, sizeof codes, &n_bytes, err);
        if (rc || kind == WIRE_CLOSE)
            return rc;
        CHECK_EQ(kind, WIRE_ORDER);
        CHECK_EQ(n_bytes, sizeof codes);
        struct err result = {0};
        err_set(&result, codes[h->options.host], "no room at %u", h->options.host);
        rc = hosts_send_result(h->hosts, codes[h->options.host], h->options.host, &result, err);
        if (rc)
            return rc;
    }
}

static enum rc order(struct host *h, struct err *err)
{
    static const uint32_t orders[][MAX_HOSTS] = {{0, 0, 0}, {0, RC_MEMORY, RC_DEVICE}, {0, 0, RC_DEVICE_MEMORY}, {0, 99, 0}};
    static const enum rc wanted[] = {RC_OK, RC_MEMORY, RC_DEVICE_MEMORY, RC_INTERNAL};
    static const char *const texts[] = {"", "no room at 1", "no room at 2", "no room at 1"};
    if (h->options.host)
        return answer(h, err);
    for (uint32_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct err result = {0};
        uint64_t sum;
        enum rc rc = hosts_send_order(h->hosts, orders[i], sizeof orders[i], err);
        if (rc)
            return rc;
        CHECK_EQ(hosts_await_results(h->hosts, NULL, &sum, &result), wanted[i]);
        CHECK_EQ(sum, 1 + 2); /* the followers' numbers */
        CHECK_CONTAINS(result.message, texts[i]);
        CHECK_EQ(hosts_check(h->hosts, err), RC_OK);
    }
    return RC_OK;
}

TEST(orders_have_the_result_of_the_first_host_that_fails)
{
    struct group g;
    group_run(&g, 3, 5, order);
    check_all_ended_well(&g);
}

#define BIG ((size_t)9 << 20) /* more than one part */

/* What host 0 has for the others: a long list of numbers, and a place for each follower. */
struct shelf {
    uint32_t *numbers, *places[MAX_HOSTS];
};

static enum rc read_shelf(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err)
{
    const struct shelf *shelf = ctx;
    if (first > BIG || n_bytes > BIG - first)
        return err_set(err, RC_WEIGHTS, "the shelf ends");
    memcpy(to, (const char *)shelf->numbers + first, n_bytes);
    return RC_OK;
}

static void *find_on_shelf(void *ctx, uint64_t place, uint64_t first, uint64_t n_bytes)
{
    const struct shelf *shelf = ctx;
    return place < MAX_HOSTS && first + n_bytes <= BIG ? (char *)shelf->places[place] + first : NULL;
}

/* Reads the whole list, gives it back with another sign, and fails to read behind it. is_greedy: gives more than there is. */
static enum rc borrow(struct host *h, bool is_greedy, struct err *err)
{
    uint32_t *numbers = mem_alloc(BIG + 8), order;
    enum wire_kind kind;
    size_t n_bytes;
    struct err result = {0};
    enum rc rc = hosts_read_call(h->hosts, &kind, &order, sizeof order, &n_bytes, err);
    CHECK(rc || kind == WIRE_ORDER);
    rc = rc ? rc : hosts_read(h->hosts, 0, BIG, numbers, err);
    for (size_t i = 0; i < BIG / sizeof *numbers && !rc; i++) {
        CHECK_EQ(numbers[i], (uint32_t)i * 2654435761u);
        numbers[i] = ~numbers[i];
    }
    rc = rc ? rc : hosts_give(h->hosts, h->options.host, numbers, BIG + (is_greedy ? 8 : 0), err);
    enum rc late = rc ? rc : hosts_read(h->hosts, BIG, 4, numbers, &result);
    CHECK(is_greedy || late == RC_WEIGHTS);
    mem_free(numbers);
    rc = rc ? rc : hosts_send_result(h->hosts, late, 0, &result, err);
    return rc ? rc : hosts_read_call(h->hosts, &kind, &order, sizeof order, &n_bytes, err);
}

static enum rc lend(struct host *h, bool is_greedy, struct err *err)
{
    struct shelf shelf = {.numbers = mem_alloc(BIG)};
    const struct hosts_memory memory = {read_shelf, find_on_shelf, &shelf};
    struct err result = {0};
    if (h->options.host) {
        mem_free(shelf.numbers);
        return borrow(h, is_greedy, err);
    }
    for (uint32_t i = 0; i < BIG / sizeof(uint32_t); i++)
        shelf.numbers[i] = i * 2654435761u;
    for (uint32_t i = 0; i < h->options.n_hosts; i++)
        shelf.places[i] = mem_alloc(BIG);
    enum rc rc = hosts_send_order(h->hosts, "all", 4, err);
    enum rc end = rc ? rc : hosts_await_results(h->hosts, &memory, NULL, &result);
    if (is_greedy)
        rc = end;
    else
        CHECK_CONTAINS(result.message, "host 1 (127.0.0.1:");
    CHECK(is_greedy || (end == RC_WEIGHTS && strstr(result.message, "the shelf ends")));
    for (uint32_t i = 1; i < h->options.n_hosts && !is_greedy; i++)
        for (uint32_t k = 0; k < BIG / sizeof(uint32_t); k++)
            CHECK_EQ(shelf.places[i][k], ~shelf.numbers[k]);
    for (uint32_t i = 0; i < h->options.n_hosts; i++)
        mem_free(shelf.places[i]);
    mem_free(shelf.numbers);
    if (rc && err)
        *err = result;
    return rc;
}

static enum rc lend_fairly(struct host *h, struct err *err)
{
    return lend(h, false, err);
}

static enum rc lend_too_much(struct host *h, struct err *err)
{
    return lend(h, true, err);
}

TEST(followers_read_and_give_in_an_order)
{
    struct group g;
    group_run(&g, 3, 5, lend_fairly);
    check_all_ended_well(&g);
}

TEST(a_follower_that_gives_too_much_ends_the_hosts)
{
    struct group g;
    group_run(&g, 2, 5, lend_too_much);
    CHECK_EQ(g.hosts[0].rc, RC_DEVICE);
    CHECK_EQ(g.hosts[1].rc, RC_DEVICE);
    CHECK_CONTAINS(g.hosts[0].err.message, "has no place in an order");
    CHECK_CONTAINS(g.hosts[1].err.message, "has no place in an order");
}

/* ---- failures ---------------------------------------------------------------------------------------------------------- */

/* Host 2 comes later than a pulse may be late. */
TEST(hosts_wait_for_the_last_one)
{
    struct group g = {.n = 3};
    uint16_t port = free_port();
    for (uint32_t i = 0; i < 3; i++) {
        struct host *h = &g.hosts[i];
        h->run = agree;
        h->comes_after = i == 2 ? 3600000 : 0;
        h->options = (struct hosts_options){.address = "127.0.0.1", .port = port, .host = i, .n_hosts = 3,
                                            .patience = {.seconds = 10}, .step_seconds = 3};
        CHECK_EQ(pthread_create(&h->thread, NULL, run_host, h), 0);
    }
    for (uint32_t i = 0; i < 3; i++)
        pthread_join(g.hosts[i].thread, NULL);
    check_all_ended_well(&g);
}

TEST(hosts_that_came_are_told_of_one_that_did_not)
{
    struct group g = {.n = 2};
    uint16_t port = free_port();
    for (uint32_t i = 0; i < 2; i++) {
        struct host *h = &g.hosts[i];
        h->run = agree;
        h->options = (struct hosts_options){.address = "127.0.0.1", .port = port, .host = i, .n_hosts = 3,
                                            .patience = {.seconds = i ? 20 : 0.5}, .step_seconds = 5};
        CHECK_EQ(pthread_create(&h->thread, NULL, run_host, h), 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        pthread_join(g.hosts[i].thread, NULL);
        CHECK_EQ(g.hosts[i].rc, RC_DEVICE);
        CHECK_CONTAINS(g.hosts[i].err.message, "host 2 of 3 did not connect");
    }
}

/* The host that fails says why; all others end with its reason and its name. */
static enum rc fail_at_host_1(struct host *h, struct err *err)
{
    return h->options.host == 1 ? err_set(err, RC_MEMORY, "out of tea") : follow(h, err);
}

static enum rc fail_at_host_0(struct host *h, struct err *err)
{
    return h->options.host == 0 ? err_set(err, RC_MEMORY, "out of tea") : follow(h, err);
}

static enum rc wait_for_done(struct host *h, struct err *err)
{
    if (h->options.host)
        return fail_at_host_1(h, err);
    return hosts_await_done(h->hosts, 1, err);
}

TEST(a_failure_reaches_all_hosts_with_its_reason)
{
    struct group g;
    double begun = seconds_now();
    group_run(&g, 3, 60, fail_at_host_0);
    for (uint32_t i = 1; i < 3; i++) {
        CHECK_EQ(g.hosts[i].rc, RC_DEVICE);
        CHECK_CONTAINS(g.hosts[i].err.message, "host 0 (127.0.0.1:");
        CHECK_CONTAINS(g.hosts[i].err.message, "out of tea");
    }
    group_run(&g, 3, 60, wait_for_done);
    for (uint32_t i = 0; i < 3; i += 2) {
        CHECK_EQ(g.hosts[i].rc, RC_DEVICE);
        CHECK_CONTAINS(g.hosts[i].err.message, "host 1 (127.0.0.1:");
        CHECK_CONTAINS(g.hosts[i].err.message, "out of tea");
    }
    CHECK(seconds_now() - begun < 20);
}

static atomic_bool has_waited;

/* Host 1 says nothing, but its pulses come. */
static enum rc stay_silent(struct host *h, struct err *err)
{
    if (!h->options.host) {
        enum rc rc = hosts_await_done(h->hosts, 1, err);
        atomic_store(&has_waited, true);
        return rc;
    }
    while (!atomic_load(&has_waited))
        usleep(1000);
    return RC_OK;
}

TEST(a_host_that_does_not_answer_is_late)
{
    struct group g;
    group_run(&g, 2, 0.3, stay_silent);
    CHECK_EQ(g.hosts[0].rc, RC_DEVICE);
    CHECK_CONTAINS(g.hosts[0].err.message, "did not send a done within 0.3 s");
    CHECK_CONTAINS(g.hosts[0].err.message, "host 1 (127.0.0.1:");
}

static enum rc answer_another_step(struct host *h, struct err *err)
{
    return h->options.host ? hosts_send_done(h->hosts, 7, err) : hosts_await_done(h->hosts, 1, err);
}

TEST(an_answer_of_another_step_is_an_error)
{
    struct group g;
    group_run(&g, 2, 5, answer_another_step);
    CHECK_EQ(g.hosts[0].rc, RC_DEVICE);
    CHECK_CONTAINS(g.hosts[0].err.message, "wanted the end of step 1, have that of 7");
}

TEST(no_host_comes_twice)
{
    struct group g;
    struct err err;
    struct hosts *hosts;
    struct hosts_options options = {.address = "127.0.0.1", .port = free_port(), .n_hosts = 1};
    CHECK_EQ(hosts_open(&options, &hosts, &err), RC_CONFIG);
    g = (struct group){.n = 3};
    for (uint32_t i = 0; i < 3; i++) {
        struct host *h = &g.hosts[i];
        h->run = follow;
        h->options = (struct hosts_options){.address = "127.0.0.1", .port = options.port, .host = i ? 1 : 0, .n_hosts = 3,
                                            .patience = {.seconds = 2}, .step_seconds = 5};
        CHECK_EQ(pthread_create(&h->thread, NULL, run_host, h), 0);
    }
    for (uint32_t i = 0; i < 3; i++)
        pthread_join(g.hosts[i].thread, NULL);
    CHECK_EQ(g.hosts[0].rc, RC_CONFIG);
    CHECK_CONTAINS(g.hosts[0].err.message, "two processes are host 1 of 3");
}

/* ---- gathers of CPU ranks ------------------------------------------------------------------------------------------------ */

static uint32_t first_column(uint32_t rank, uint32_t n_ranks)
{
    return WIDTH * rank / n_ranks;
}

struct rank_job {
    struct host *host;
    uint32_t rank; /* here */
    enum rc rc;
    struct err err;
    pthread_t thread;
};

/* Columns, rows by their ids, routes, and logits for the first rank, in turns. */
static struct gather_args gather_of(struct rank_job *job, uint32_t number, const int32_t *ids, const struct route *routes)
{
    const struct host *h = job->host;
    uint32_t n_all = RANKS * h->options.n_hosts, rank = RANKS * h->options.host + job->rank, first = first_column(rank, n_all);
    struct gather_args args = {.kind = number % 4, .n_rows = ROWS, .whole = {(void *)h->values[job->rank], WIDTH, WIDTH}};
    if (args.kind == GATHER_COLUMNS || args.kind == GATHER_TO_FIRST) {
        args.first = first;
        args.n_columns = first_column(rank + 1, n_all) - first;
    } else {
        args.token_ids = ids;
        args.routes = routes;
        args.route_stride = args.n_chosen = args.kind == GATHER_ROUTES ? 2 : 0;
        args.first_id = (int32_t)rank;
        args.end_id = (int32_t)rank + 1;
    }
    return args;
}

static bool is_own(const struct gather_args *args, uint32_t row, uint32_t column)
{
    int32_t id = args->kind == GATHER_ROWS ? args->token_ids[row] : 0;
    if (args->kind == GATHER_ROUTES)
        id = args->routes[2 * row + column / (WIDTH / 2)].expert;
    if (args->kind == GATHER_ROWS || args->kind == GATHER_ROUTES)
        return id >= args->first_id && id < args->end_id;
    return column >= args->first && column < args->first + args->n_columns;
}

static void *run_gathers(void *ctx)
{
    struct rank_job *job = ctx;
    struct host *h = job->host;
    uint32_t n_all = RANKS * h->options.n_hosts;
    bool is_first = !h->options.host && !job->rank;
    float (*values)[WIDTH] = h->values[job->rank];
    job->rc = cpu_comm.meet(&h->cpus[job->rank], &(struct meet_args){0}, &job->err);
    for (uint32_t number = 0; number < N_STEPS && !job->rc; number++) {
        int32_t ids[ROWS];
        struct route routes[ROWS * 2];
        for (uint32_t i = 0; i < ROWS; i++)
            ids[i] = (int32_t)((i + number) % n_all);
        for (uint32_t i = 0; i < 2 * ROWS; i++)
            routes[i] = (struct route){.expert = (int32_t)((i + number / 4) % n_all)};
        struct gather_args args = gather_of(job, number, ids, routes);
        for (uint32_t i = 0; i < ROWS * WIDTH; i++)
            values[i / WIDTH][i % WIDTH] = is_own(&args, i / WIDTH, i % WIDTH) ? (float)(number * 1000 + i) : -1;
        job->rc = cpu_comm.meet(&h->cpus[job->rank], &(struct meet_args){0}, &job->err); /* all have written */
        if (!job->rc)
            job->rc = cpu_comm.gather(&h->cpus[job->rank], &args, &job->err);
        for (uint32_t i = 0; i < ROWS * WIDTH && !job->rc && (args.kind != GATHER_TO_FIRST || is_first); i++)
            if (values[i / WIDTH][i % WIDTH] != (float)(number * 1000 + i))
                CHECK_FAIL("gather %u of kind %u: value %u is %g", number, args.kind, i, (double)values[i / WIDTH][i % WIDTH]);
        if (!job->rc)
            job->rc = cpu_comm.meet(&h->cpus[job->rank], &(struct meet_args){0}, &job->err); /* all have read */
    }
    return NULL;
}

static enum rc gather(struct host *h, struct err *failure)
{
    struct err err;
    struct rank_job jobs[RANKS];
    const struct comm_options options = {.timeout_seconds = 5, .first_rank = RANKS * h->options.host,
                                         .n_all_ranks = RANKS * h->options.n_hosts, .exchange_ctx = h->hosts,
                                         .exchange = hosts_exchange};
    for (uint32_t i = 0; i < RANKS; i++) {
        h->ctxs[i] = &h->cpus[i];
        h->memory[i] = h->values[i];
        h->cpus[i] = (struct cpu){.n_threads = 1, .n_processors = 1, .options = {.device = "cpu"}};
        CHECK_OK(pool_create(1, "test", &h->cpus[i].pool, &err));
    }
    CHECK_OK(cpu_comm.open(h->ctxs, RANKS, &options, &err));
    CHECK_OK(cpu_comm.share(h->ctxs, RANKS, COMM_ARENA, h->memory, sizeof h->values[0], &err));
    CHECK_OK(cpu_comm.share(h->ctxs, RANKS, COMM_LOGITS, h->memory, sizeof h->values[0], &err));
    for (uint32_t i = 0; i < RANKS; i++) {
        jobs[i] = (struct rank_job){.host = h, .rank = i};
        CHECK_EQ(pthread_create(&jobs[i].thread, NULL, run_gathers, &jobs[i]), 0);
    }
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < RANKS; i++) {
        pthread_join(jobs[i].thread, NULL);
        if (jobs[i].rc && !rc) {
            rc = jobs[i].rc;
            *failure = jobs[i].err;
        }
    }
    cpu_comm.close(h->ctxs, RANKS);
    for (uint32_t i = 0; i < RANKS; i++)
        pool_destroy(h->cpus[i].pool);
    return rc;
}

TEST(gathers_of_all_kinds_cover_all_hosts)
{
    struct group g;
    for (uint32_t n = 2; n <= MAX_HOSTS; n++) {
        group_run(&g, n, 5, gather);
        check_all_ended_well(&g);
    }
}

/* ---- damaged blocks ------------------------------------------------------------------------------------------------------ */

/* What another host would send: a header, the rank's part, and its values. */
struct block {
    uint32_t gather, kind, n_rows, width, n_parts, n_ranks;
    uint32_t first, n_columns;
    int32_t first_id, end_id;
    float values[ROWS * WIDTH];
};

struct other {
    struct block block;
    size_t n_bytes;
};

static enum rc give_block(void *ctx, const void *own, size_t own_bytes, bool is_to_first, void *others, size_t max_bytes,
                          size_t *others_bytes, struct err *err)
{
    const struct other *other = ctx;
    (void)own, (void)own_bytes, (void)is_to_first, (void)err;
    *others_bytes = other->n_bytes < max_bytes ? other->n_bytes : max_bytes;
    memcpy(others, &other->block, *others_bytes);
    return RC_OK;
}

/* Rank 0 of 2 gathers once; its memory is as large as the value. */
static enum rc gather_once(struct other *other, enum gather_kind kind, float *whole)
{
    static const int32_t ids[ROWS] = {0, 1, 1};
    struct cpu cpu = {.n_threads = 1, .n_processors = 1, .options = {.device = "cpu"}};
    void *ctx = &cpu, *memory = whole;
    struct err err;
    const struct comm_options options = {.timeout_seconds = 5, .n_all_ranks = 2, .exchange_ctx = other, .exchange = give_block};
    struct gather_args args = {.kind = kind, .n_rows = ROWS, .whole = {whole, WIDTH, WIDTH}, .n_columns = WIDTH / 2,
                               .token_ids = ids, .end_id = 1};
    CHECK_OK(pool_create(1, "test", &cpu.pool, &err));
    CHECK_OK(cpu_comm.open(&ctx, 1, &options, &err));
    CHECK_OK(cpu_comm.share(&ctx, 1, COMM_ARENA, &memory, ROWS * WIDTH * sizeof *whole, &err));
    enum rc rc = cpu_comm.gather(&cpu, &args, NULL);
    cpu_comm.close(&ctx, 1);
    pool_destroy(cpu.pool);
    return rc;
}

TEST(damaged_blocks_are_errors_and_stay_in_the_value)
{
    static const int32_t words[] = {0, 1, 2, 3, 7, 8, 14, 15, 1 << 30, INT32_MAX, INT32_MIN, -1};
    uint32_t n_failed = 0, n_taken = 0;
    for (enum gather_kind kind = GATHER_COLUMNS; kind <= GATHER_ROWS; kind++) {
        const uint32_t n_values = kind == GATHER_ROWS ? 2 * WIDTH : ROWS * WIDTH / 2;
        const struct other right = {{1, kind, ROWS, WIDTH, 1, 1, WIDTH / 2, WIDTH / 2, 1, 2, {0}},
                                    offsetof(struct block, values) + n_values * sizeof(float)};
        float *whole = mem_calloc(ROWS * WIDTH, sizeof *whole);
        struct other other = right;
        CHECK_EQ(gather_once(&other, kind, whole), RC_OK);
        for (size_t n_bytes = 0; n_bytes < right.n_bytes; n_bytes++) {
            other.n_bytes = n_bytes;
            CHECK_EQ(gather_once(&other, kind, whole), RC_DEVICE);
        }
        for (size_t at = 0; at < offsetof(struct block, values); at += 4)
            for (uint32_t i = 0; i < sizeof words / sizeof *words; i++) {
                other = right;
                memcpy((char *)&other.block + at, &words[i], 4);
                enum rc rc = gather_once(&other, kind, whole);
                CHECK(rc == RC_OK || rc == RC_DEVICE);
                n_failed += rc != RC_OK;
                n_taken += rc == RC_OK;
            }
        mem_free(whole);
    }
    CHECK(n_failed > 100 && n_taken > 10);
}

/* Host 1 goes after its first gathers. */
static enum rc gather_or_go(struct host *h, struct err *err)
{
    return h->options.host == 1 ? err_set(err, RC_DEVICE, "gone") : gather(h, err);
}

TEST(a_host_that_goes_ends_the_gathers_of_the_others)
{
    struct group g;
    group_run(&g, 3, 30, gather_or_go);
    for (uint32_t i = 0; i < 3; i += 2) {
        CHECK_EQ(g.hosts[i].rc, RC_DEVICE);
        CHECK_CONTAINS(g.hosts[i].err.message, "gone");
    }
}
