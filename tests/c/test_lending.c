#define _GNU_SOURCE
/* Prompts that go from the pool of one engine into that of another, in one process and over a socket that may fail at every
 * byte. An oracle knows every expected token. Built a second time under ThreadSanitizer. */
#include "fake_model.h"

#include "../../csrc/engine/driver.h"
#include "../../csrc/engine/engine_state.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#define SECONDS 60.0
#define N_PROMPT 42u

static struct err err;

/* Both engines are in this process, so the pool's place says where it is. */
static enum rc share_pool(void *ctx, uint32_t rank, int *descriptor, uint64_t *offset, uint64_t *size_bytes, struct err *e)
{
    (void)rank, (void)e;
    *descriptor = open("/dev/null", O_RDONLY);
    *offset = (uint64_t)(uintptr_t)((struct fake *)ctx)->pool;
    *size_bytes = UINT64_MAX;
    return RC_OK;
}

static int n_imported;

static enum rc import_pool(void *ctx, uint32_t rank, int descriptor, uint64_t offset, uint64_t size_bytes,
                           struct imported **imported, const void **pool, struct err *e)
{
    (void)rank, (void)e, (void)size_bytes;
    CHECK(fcntl(descriptor, F_GETFD) >= 0);
    *imported = ctx;
    *pool = (const void *)(uintptr_t)offset;
    n_imported++;
    return RC_OK;
}

static void release_pool(void *ctx, struct imported *imported)
{
    CHECK((void *)imported == ctx);
    n_imported--;
}

static const struct setup PLAIN = {.block_tokens = 4, .n_pages = 90, .max_num_seqs = 8, .max_num_batched_tokens = 16, .caches = true,
                                   .is_async = true, .n_host_slots = 40, .has_cache_seed = true, .share = share_pool,
                                   .import = import_pool, .release_import = release_pool};

struct side {
    struct fake fake;
    struct engine *engine;
    struct driver *driver;
};

static bool side_open(struct side *s, const struct setup *setup)
{
    s->driver = NULL;
    s->engine = fake_engine(setup, &s->fake, &err);
    if (s->engine && !driver_create(s->engine, 0, &s->driver, &err))
        return true;
    CHECK_FAIL("%s", err.message);
    return false;
}

static void side_close(struct side *s)
{
    struct engine_stats stats;
    driver_close(s->driver);
    CHECK_OK(engine_check(s->engine, &err));
    engine_stats(s->engine, &stats);
    CHECK_EQ(stats.kv_blocks_free, stats.kv_blocks_total);
    driver_release(s->driver);
    fake_close(s->engine, &s->fake);
}

/* Runs a prompt to its end; the tokens must be the oracle's. Returns the stats behind it. */
static struct engine_stats run(struct side *s, uint32_t stream)
{
    struct job *job = plain_job(&s->fake, stream, N_PROMPT, 6);
    struct subscription *subscription = NULL;
    struct engine_stats stats;
    struct output output[2];
    expect(job);
    CHECK_OK(driver_submit(s->driver, NULL, &job->spec, false, &subscription, &err));
    while (subscription && !job->is_done && !check_failures) {
        uint32_t n = 0;
        CHECK(subscription_wait(subscription, SECONDS));
        while (subscription_take_more(subscription, output))
            check_output(job, output);
        CHECK_OK(subscription_take(subscription, output, 2, &n, &err));
        for (uint32_t i = 0; i < n; i++)
            check_output(job, &output[i]);
    }
    if (subscription)
        subscription_drop(subscription);
    CHECK(driver_wait(s->driver, DRIVER_IDLE, 0, SECONDS));
    engine_stats(s->engine, &stats);
    free(job);
    return stats;
}

static struct setup models[] = {PLAIN, PLAIN, PLAIN};

static void fill_models(void)
{
    models[1].n_layers = 2; /* a window in one of two groups */
    models[1].windows[1] = 6;
    models[2].states[0] = (struct kv_need){0, 3, 32};
    models[2].n_states = 1;
    models[2].snapshot_tokens = 16;
}

TEST(blocks_go_from_pool_to_pool)
{
    fill_models();
    for (uint32_t m = 0; m < sizeof models / sizeof *models && !check_failures; m++) {
        struct side one, two;
        uint32_t n_tokens;
        REQUIRE(side_open(&one, &models[m]));
        REQUIRE(side_open(&two, &models[m]));
        for (uint32_t stream = 1; stream < 12 && !check_failures; stream++) {
            struct side *from = stream % 2 ? &one : &two, *to = stream % 2 ? &two : &one;
            struct job *job = plain_job(&from->fake, stream, N_PROMPT, 6);
            run(from, stream);
            CHECK_OK(driver_fetch(to->driver, from->driver, &job->spec, &n_tokens, &err));
            CHECK(n_tokens >= 32 && n_tokens <= 40);
            for (uint32_t i = 0; stream < 4 && i < 10; i++)
                run(from, 100 * stream + i); /* the owner reuses its pages */
            struct engine_stats before, after;
            engine_stats(to->engine, &before);
            after = run(to, stream);
            CHECK(after.prefix_cache_hits - before.prefix_cache_hits >= 32);
            CHECK_EQ(after.fetched_tokens - before.fetched_tokens, 0);
            CHECK_OK(driver_fetch(to->driver, from->driver, &job->spec, &n_tokens, &err)); /* they are there, or gone */
            free(job);
        }
        for (uint32_t stream = 1; stream < 12 && !check_failures; stream++) { /* by what the host tier has, too */
            run(&one, stream);
            run(&two, stream);
        }
        side_close(&one);
        side_close(&two);
    }
}

TEST(other_keys_are_not_taken)
{
    struct setup secret = PLAIN;
    struct side one, two;
    uint32_t n_tokens;
    secret.has_cache_seed = false;
    REQUIRE(side_open(&one, &PLAIN));
    REQUIRE(side_open(&two, &secret));
    struct job *job = plain_job(&one.fake, 3, N_PROMPT, 6);
    run(&one, 3);
    CHECK_OK(driver_fetch(two.driver, one.driver, &job->spec, &n_tokens, &err));
    CHECK_EQ(n_tokens, 0);
    CHECK_EQ(run(&two, 3).prefix_cache_hits, 0);
    free(job);
    side_close(&one);
    side_close(&two);
}

struct lending {
    struct driver *driver;
    const struct request_spec *spec;
    int socket;
    enum rc rc;
};

static void *lend(void *ctx)
{
    struct lending *l = ctx;
    struct err own;
    l->rc = driver_lend(l->driver, l->spec, l->socket, &own);
    close(l->socket);
    return NULL;
}

/* Passes what comes from one socket on to the other, with descriptors, until so many bytes have passed; then closes both. */
struct relay {
    int from, to;
    size_t left;
};

static void *relay(void *ctx)
{
    struct relay *r = ctx;
    char bytes[16], control[CMSG_SPACE(sizeof(int))]; /* pieces of a size that divides each message: a descriptor stays with its own */
    while (r->left) {
        struct iovec piece = {bytes, r->left < sizeof bytes ? r->left : sizeof bytes};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(r->from, &message, 0);
        if (n <= 0)
            break;
        piece.iov_len = (size_t)n;
        if (sendmsg(r->to, &message, MSG_NOSIGNAL) != n)
            break;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        if (head)
            close(*(int *)(void *)CMSG_DATA(head));
        r->left -= (size_t)n;
    }
    shutdown(r->from, SHUT_RDWR);
    shutdown(r->to, SHUT_RDWR);
    return NULL;
}

/* One handover through relays that end after so many bytes of the owner, or of the reader. Tokens that came. */
static uint32_t hand_over(struct side *from, struct side *to, const struct request_spec *spec, size_t owner_bytes, bool answers)
{
    int owner[2], reader[2];
    uint32_t n_tokens = 0;
    pthread_t lender, there, back;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, owner) && !socketpair(AF_UNIX, SOCK_STREAM, 0, reader));
    fcntl(owner[0], F_SETFL, O_NONBLOCK);
    fcntl(reader[0], F_SETFL, O_NONBLOCK);
    struct lending l = {from->driver, spec, owner[0], RC_OK};
    struct relay forth = {owner[1], reader[1], owner_bytes}, answer = {reader[1], owner[1], answers ? SIZE_MAX : 0};
    pthread_create(&lender, NULL, lend, &l);
    pthread_create(&there, NULL, relay, &forth);
    if (answers)
        pthread_create(&back, NULL, relay, &answer);
    enum rc rc = driver_borrow(to->driver, spec, reader[0], &n_tokens, &err);
    close(reader[0]);
    pthread_join(lender, NULL);
    pthread_join(there, NULL);
    if (answers)
        pthread_join(back, NULL);
    close(owner[1]);
    close(reader[1]);
    CHECK(rc == RC_OK || !n_tokens);
    CHECK(l.rc == RC_OK || !answers || owner_bytes < SIZE_MAX);
    return n_tokens;
}

TEST(a_socket_may_fail_at_every_byte)
{
    struct side one, two;
    fill_models();
    for (uint32_t m = 0; m < 2; m++) {
        REQUIRE(side_open(&one, &models[m]));
        REQUIRE(side_open(&two, &models[m]));
        uint32_t n_failed = 0;
        for (size_t n = 0; n < 200 && !check_failures; n += 3) {
            uint32_t stream = 20 + (uint32_t)n;
            struct job *job = plain_job(&one.fake, stream, N_PROMPT, 6);
            run(&one, stream);
            n_failed += !hand_over(&one, &two, &job->spec, n, true);
            run(&two, stream);
            run(&one, stream);
            free(job);
        }
        CHECK(n_failed > 20);
        struct job *job = plain_job(&one.fake, 5, N_PROMPT, 6);
        run(&one, 5);
        CHECK_EQ(hand_over(&one, &two, &job->spec, SIZE_MAX, true), 40);
        CHECK_EQ(n_imported, 0);
        struct engine_stats stats = run(&two, 5);
        CHECK(stats.fetched_tokens >= 40);
        free(job);
        side_close(&one);
        side_close(&two);
    }
}
