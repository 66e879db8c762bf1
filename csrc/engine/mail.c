#define _GNU_SOURCE
#include "driver_mail.h"

#include "../base/mem.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define MIN_CAPACITY 8u

/* ---- what a mail holds ---- */

static size_t token_bytes(const struct mail *mail)
{
    return 2 * sizeof(int32_t) + mail->has_results * sizeof(struct sample_result) + mail->n_logprobs * 3 * sizeof(int32_t);
}

/* Sets the news' pointers to the paper's arrays. */
static void point(const struct mail *mail, const struct paper *paper, struct news *news)
{
    size_t capacity = paper->capacity, n_top = capacity * mail->n_logprobs;
    char *at = paper->data;
    if (!at) {
        news->ids = news->top_ids = news->top_ranks = NULL;
        news->epochs = NULL;
        news->top_values = NULL;
        news->results = NULL;
        return;
    }
    news->ids = (const int32_t *)at;
    news->epochs = (const uint32_t *)(at + capacity * sizeof(int32_t));
    at += 2 * capacity * sizeof(int32_t);
    news->results = mail->has_results ? (const struct sample_result *)at : NULL;
    at += mail->has_results * capacity * sizeof(struct sample_result);
    news->top_ids = (const int32_t *)at;
    news->top_values = (const float *)(at + n_top * sizeof(int32_t));
    news->top_ranks = (const int32_t *)(at + 2 * n_top * sizeof(int32_t));
}

/* Copies the tokens of `from` behind the n that the paper already has. */
static void write_tokens(const struct mail *mail, const struct paper *paper, uint32_t n, const struct news *from)
{
    struct news to;
    size_t k = mail->n_logprobs, n_new = from->n_new;
    point(mail, paper, &to);
    memcpy((int32_t *)to.ids + n, from->ids, n_new * sizeof *to.ids);
    memcpy((uint32_t *)to.epochs + n, from->epochs, n_new * sizeof *to.epochs);
    if (!mail->has_results || !from->results)
        return;
    memcpy((struct sample_result *)to.results + n, from->results, n_new * sizeof *to.results);
    if (k) {
        memcpy((int32_t *)to.top_ids + n * k, from->top_ids, n_new * k * sizeof *to.top_ids);
        memcpy((float *)to.top_values + n * k, from->top_values, n_new * k * sizeof *to.top_values);
        memcpy((int32_t *)to.top_ranks + n * k, from->top_ranks, n_new * k * sizeof *to.top_ranks);
    }
}

/* Makes room for n more tokens behind those of the letter. */
static bool reserve(const struct mail *mail, struct letter *letter, uint32_t n)
{
    struct paper *paper = &letter->papers[letter->filled], larger;
    uint64_t wanted = (uint64_t)letter->news.n_new + n;
    if (wanted <= paper->capacity)
        return true;
    uint64_t capacity = wanted > 2 * (uint64_t)paper->capacity ? wanted : 2 * (uint64_t)paper->capacity;
    larger.capacity = (uint32_t)(capacity < MIN_CAPACITY ? MIN_CAPACITY : capacity);
    if (!(larger.data = mem_alloc(larger.capacity * token_bytes(mail))))
        return false;
    if (letter->news.n_new) {
        struct news old = letter->news;
        point(mail, paper, &old);
        write_tokens(mail, &larger, 0, &old);
    }
    mem_free(paper->data);
    *paper = larger;
    return true;
}

static bool copy_scores(struct mail *mail, const struct news *news)
{
    size_t n = news->n_prompt_results, n_top = n * news->n_prompt_logprobs;
    char *block = mem_alloc(n * sizeof *news->prompt_results + 3 * n_top * sizeof(int32_t));
    if (!block)
        return false;
    mem_free((void *)mail->scores.prompt_results);
    mail->scores = (struct news){.prompt_results = (const struct sample_result *)block,
                                 .n_prompt_results = news->n_prompt_results,
                                 .n_prompt_logprobs = news->n_prompt_logprobs};
    memcpy(block, news->prompt_results, n * sizeof *news->prompt_results);
    block += n * sizeof *news->prompt_results;
    mail->scores.prompt_top_ids = (const int32_t *)block;
    mail->scores.prompt_top_values = (const float *)(block + n_top * sizeof(int32_t));
    mail->scores.prompt_top_ranks = (const int32_t *)(block + 2 * n_top * sizeof(int32_t));
    if (n_top) {
        memcpy(block, news->prompt_top_ids, n_top * sizeof(int32_t));
        memcpy(block + n_top * sizeof(int32_t), news->prompt_top_values, n_top * sizeof(float));
        memcpy(block + 2 * n_top * sizeof(int32_t), news->prompt_top_ranks, n_top * sizeof(int32_t));
    }
    return true;
}

static bool copy_states(struct mail *mail, const struct news *news)
{
    size_t n_bytes = (size_t)news->n_states * news->states_width * sizeof *mail->states;
    mail->states = mem_alloc(n_bytes);
    return mail->states && memcpy(mail->states, news->states, n_bytes);
}

static bool copy_error(struct mail *mail, const char *error)
{
    size_t n_bytes = strlen(error) + 1;
    if (!mail->error && (mail->error = mem_alloc(n_bytes)))
        memcpy(mail->error, error, n_bytes);
    return mail->error;
}

struct mail *mail_create(struct driver *driver, const struct request_spec *spec, bool ends_only)
{
    uint32_t n_samples = spec->n ? spec->n : 1;
    struct mail *mail = mem_calloc(1, sizeof *mail + n_samples * sizeof *mail->letters);
    if (!mail)
        return NULL;
    mail->driver = driver;
    mail->n_samples = n_samples;
    mail->has_results = spec->wants_logprobs && !spec->is_score;
    mail->n_logprobs = mail->has_results ? spec->n_logprobs : 0;
    mail->ends_only = ends_only;
    return mail;
}

void mail_free(struct mail *mail)
{
    if (!mail)
        return;
    for (uint32_t i = 0; i < mail->n_samples; i++) {
        mem_free(mail->letters[i].papers[0].data);
        mem_free(mail->letters[i].papers[1].data);
    }
    mem_free((void *)mail->scores.prompt_results);
    mem_free(mail->states);
    mem_free(mail->error);
    mem_free(mail);
}

void mail_add(struct mail *mail, const struct news *news)
{
    struct letter *letter = &mail->letters[news->sample];
    uint32_t first = letter->has_news ? letter->news.first : news->first, n = letter->has_news ? letter->news.n_new : 0;
    bool is_lost = false;
    if (!mail->number) /* news may arrive before driver_submit sets it; after that it is read without the lock */
        mail->number = news->request;
    mail->is_done |= news->is_last_of_request;
    if (mail->is_dropped)
        return;
    if (news->n_new && !mail->is_lost) {
        letter->news.n_new = n;
        if (reserve(mail, letter, news->n_new))
            write_tokens(mail, &letter->papers[letter->filled], n, news);
        else
            is_lost = true;
    }
    is_lost |= news->prompt_results && !copy_scores(mail, news);
    is_lost |= news->states && !copy_states(mail, news);
    is_lost |= news->error && !copy_error(mail, news->error);
    mail->n_fresh += !letter->has_news;
    letter->has_news = true;
    letter->news = *news;
    letter->news.first = first;
    letter->news.n_new = mail->is_lost || is_lost ? n : n + news->n_new;
    if (mail->driver->is_dead && news->finish == FINISH_ABORT)
        letter->news.finish = FINISH_ERROR;
    if (is_lost && !mail->is_lost) {
        mail->is_lost = true;
        engine_abort(mail->driver->engine, &mail->number, 1, NULL);
    }
    if (mail->is_done || !mail->ends_only)
        mail_announce(mail);
}

/* ---- channels, lock held ---- */

static void list_mail(struct mail *mail)
{
    struct channel *channel = mail->channel;
    if (!channel || mail->is_listed || channel->descriptor < 0)
        return;
    mail->is_listed = true;
    mail->next = NULL;
    mail->prev = channel->last;
    *(channel->last ? &channel->last->next : &channel->first) = mail;
    channel->last = mail;
}

static void unlist_mail(struct mail *mail)
{
    struct channel *channel = mail->channel;
    if (!mail->is_listed)
        return;
    mail->is_listed = false;
    *(mail->prev ? &mail->prev->next : &channel->first) = mail->next;
    *(mail->next ? &mail->next->prev : &channel->last) = mail->prev;
}

static void channel_release(struct channel *channel)
{
    if (--channel->n_holders == 0)
        mem_free(channel);
}

void mail_set_channel(struct mail *mail, struct channel *channel)
{
    unlist_mail(mail);
    if (channel)
        channel->n_holders++;
    if (mail->channel)
        channel_release(mail->channel);
    mail->channel = channel;
}

void mail_announce(struct mail *mail)
{
    if (!mail->is_announced)
        list_mail(mail);
    mail->is_announced = true;
    mail->driver->has_waited_mail |= mail->n_readers_waiting > 0;
}

void channel_signal(struct channel *channel)
{
    uint64_t one = 1;
    if (channel->descriptor < 0 || channel->is_signalled || !(channel->first || channel->states))
        return;
    channel->is_signalled = true;
    while (write(channel->descriptor, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void channel_update(struct channel *channel, uint32_t states, uint64_t boundary)
{
    if (boundary >= channel->boundary) {
        channel->boundary = UINT64_MAX;
        channel->states |= DRIVER_BOUNDARY;
    }
    channel->states |= channel->watched & states;
    channel->watched &= ~states;
}

/* ---- readers ---- */

uint64_t mail_number(const struct mail *mail)
{
    return mail->number;
}

/* Call with the lock held. */
static void take_letter(struct mail *mail, struct letter *letter, struct news *out)
{
    *out = letter->news;
    point(mail, &letter->papers[letter->filled], out);
    out->n_logprobs = mail->n_logprobs;
    if (out->prompt_results) {
        out->prompt_results = mail->scores.prompt_results;
        out->prompt_top_ids = mail->scores.prompt_top_ids;
        out->prompt_top_values = mail->scores.prompt_top_values;
        out->prompt_top_ranks = mail->scores.prompt_top_ranks;
    }
    out->states = mail->states;
    out->error = out->error ? mail->error : NULL;
    letter->filled ^= 1;
    letter->has_news = false;
    mail->n_fresh--;
    out->is_last_of_request = mail->is_done && !mail->n_fresh; /* samples are taken in another order than they ended */
    if (!mail->n_fresh) {
        unlist_mail(mail);
        mail->is_announced = false;
    }
}

bool mail_take_more(struct mail *mail, struct news *news)
{
    struct letter *letter = &mail->letters[0];
    driver_lock(mail->driver);
    bool is_plain = mail->n_samples == 1 && letter->has_news && !mail->is_lost && letter->news.finish == FINISH_NONE;
    if (is_plain && letter->news.n_new) {
        struct news look = letter->news;
        point(mail, &letter->papers[letter->filled], &look);
        is_plain = look.epochs[0] == look.epochs[look.n_new - 1];
    }
    if (is_plain)
        take_letter(mail, letter, news);
    driver_unlock(mail->driver);
    return is_plain;
}

enum rc mail_take(struct mail *mail, struct news *news, uint32_t max, uint32_t *n, struct err *err)
{
    *n = 0;
    driver_lock(mail->driver);
    for (uint32_t i = 0; i < mail->n_samples && mail->n_fresh && *n < max; i++)
        if (mail->letters[i].has_news)
            take_letter(mail, &mail->letters[i], &news[(*n)++]);
    bool is_lost = mail->is_lost;
    driver_unlock(mail->driver);
    return is_lost ? err_set(err, RC_MEMORY, "output: out of memory for the output of a request") : RC_OK;
}

bool mail_wait(struct mail *mail, double seconds)
{
    struct driver *driver = mail->driver;
    struct timespec deadline = deadline_after(seconds);
    driver_lock(driver);
    mail->n_readers_waiting++;
    while (!mail->is_announced && pthread_cond_timedwait(&driver->changed, &driver->lock, &deadline) != ETIMEDOUT)
        ;
    mail->n_readers_waiting--;
    bool result = mail->is_announced;
    driver_unlock(driver);
    return result;
}

void mail_abort(struct mail *mail)
{
    driver_lock(mail->driver);
    if (!mail->is_done) {
        engine_abort(mail->driver->engine, &mail->number, 1, NULL);
        driver_kick(mail->driver);
    }
    driver_unlock(mail->driver);
}

void mail_move(struct mail *mail, struct channel *channel, bool ends_only)
{
    driver_lock(mail->driver);
    mail_set_channel(mail, channel);
    mail->ends_only = ends_only;
    mail->is_announced = mail->n_fresh && (mail->is_done || !ends_only);
    if (mail->is_announced) {
        list_mail(mail);
        if (channel)
            channel_signal(channel);
        if (mail->n_readers_waiting)
            pthread_cond_broadcast(&mail->driver->changed);
    }
    driver_unlock(mail->driver);
}

void mail_drop(struct mail *mail)
{
    if (!mail)
        return;
    struct driver *driver = mail->driver;
    driver_lock(driver);
    mail_set_channel(mail, NULL);
    mail->is_dropped = true;
    if (mail->is_done) {
        mail_free(mail);
        driver_unlock_release(driver);
    } else {
        engine_abort(driver->engine, &mail->number, 1, NULL);
        driver_kick(driver);
        driver_unlock(driver);
    }
}

enum rc channel_create(struct driver *driver, struct channel **result, struct err *err)
{
    struct channel *channel = mem_calloc(1, sizeof *channel);
    if (!channel)
        return err_set(err, RC_MEMORY, "channel: out of memory");
    channel->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (channel->descriptor < 0) {
        mem_free(channel);
        enum rc rc = err_set(err, RC_IO, "channel: no more file descriptors; close some, or raise ulimit -n");
        if (err)
            err->code = errno;
        return rc;
    }
    channel->driver = driver;
    channel->n_holders = 1;
    channel->boundary = UINT64_MAX;
    driver_lock(driver);
    driver_hold(driver);
    channel->next = driver->channels;
    driver->channels = channel;
    driver_unlock(driver);
    *result = channel;
    return RC_OK;
}

int channel_descriptor(const struct channel *channel)
{
    return channel->descriptor;
}

void channel_take(struct channel *channel, uint64_t *numbers, uint32_t max, uint32_t *n, uint32_t *states)
{
    uint64_t count;
    *n = 0;
    while (read(channel->descriptor, &count, sizeof count) < 0 && errno == EINTR)
        ;
    driver_lock(channel->driver);
    channel->is_signalled = false;
    *states = channel->states;
    channel->states = 0;
    while (*n < max && channel->first) {
        numbers[(*n)++] = channel->first->number;
        unlist_mail(channel->first);
    }
    channel_signal(channel);
    driver_unlock(channel->driver);
}

void channel_watch(struct channel *channel, uint32_t states, uint64_t boundary)
{
    struct driver *driver = channel->driver;
    driver_lock(driver);
    channel->watched |= states;
    if (boundary && boundary < channel->boundary)
        channel->boundary = boundary;
    channel_update(channel, driver_state_now(driver), driver->n_done);
    channel_signal(channel);
    driver_unlock(driver);
}

void channel_destroy(struct channel *channel)
{
    if (!channel)
        return;
    struct driver *driver = channel->driver;
    driver_lock(driver);
    for (struct channel **place = &driver->channels; *place; place = &(*place)->next)
        if (*place == channel) {
            *place = channel->next;
            break;
        }
    while (channel->first)
        unlist_mail(channel->first);
    close(channel->descriptor);
    channel->descriptor = -1;
    channel_release(channel);
    driver_unlock_release(driver);
}
