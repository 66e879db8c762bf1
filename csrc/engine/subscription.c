#define _GNU_SOURCE
#include "driver_state.h"

#include "../base/clock.h"
#include "../base/mem.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define MIN_CAPACITY 8u

/* ---- what a subscription holds ---- */

static size_t token_bytes(const struct subscription *subscription)
{
    return 2 * sizeof(int32_t) + subscription->has_results * sizeof(struct sample_result) +
           subscription->n_logprobs * 3 * sizeof(int32_t);
}

/* Sets the output's pointers to the buffer's arrays. */
static void point(const struct subscription *subscription, const struct token_buffer *buffer, struct output *output)
{
    size_t capacity = buffer->capacity, n_top = capacity * subscription->n_logprobs;
    char *at = buffer->data;
    if (!at) {
        output->ids = output->top_ids = output->top_ranks = NULL;
        output->epochs = NULL;
        output->top_values = NULL;
        output->results = NULL;
        return;
    }
    output->ids = (const int32_t *)at;
    output->epochs = (const uint32_t *)(at + capacity * sizeof(int32_t));
    at += 2 * capacity * sizeof(int32_t);
    output->results = subscription->has_results ? (const struct sample_result *)at : NULL;
    at += subscription->has_results * capacity * sizeof(struct sample_result);
    output->top_ids = (const int32_t *)at;
    output->top_values = (const float *)(at + n_top * sizeof(int32_t));
    output->top_ranks = (const int32_t *)(at + 2 * n_top * sizeof(int32_t));
}

/* Copies the tokens of `from` behind the n that the buffer already has. */
static void write_tokens(const struct subscription *subscription, const struct token_buffer *buffer, uint32_t n,
                         const struct output *from)
{
    struct output to;
    size_t k = subscription->n_logprobs, n_new = from->n_new;
    point(subscription, buffer, &to);
    memcpy((int32_t *)to.ids + n, from->ids, n_new * sizeof *to.ids);
    memcpy((uint32_t *)to.epochs + n, from->epochs, n_new * sizeof *to.epochs);
    if (!subscription->has_results || !from->results)
        return;
    memcpy((struct sample_result *)to.results + n, from->results, n_new * sizeof *to.results);
    if (k) {
        memcpy((int32_t *)to.top_ids + n * k, from->top_ids, n_new * k * sizeof *to.top_ids);
        memcpy((float *)to.top_values + n * k, from->top_values, n_new * k * sizeof *to.top_values);
        memcpy((int32_t *)to.top_ranks + n * k, from->top_ranks, n_new * k * sizeof *to.top_ranks);
    }
}

/* Makes room for n more tokens behind the pending ones. */
static bool reserve(const struct subscription *subscription, struct pending *pending, uint32_t n)
{
    struct token_buffer *buffer = &pending->buffers[pending->filled], larger;
    uint64_t wanted = (uint64_t)pending->output.n_new + n;
    if (wanted <= buffer->capacity)
        return true;
    uint64_t capacity = wanted > 2 * (uint64_t)buffer->capacity ? wanted : 2 * (uint64_t)buffer->capacity;
    larger.capacity = (uint32_t)(capacity < MIN_CAPACITY ? MIN_CAPACITY : capacity);
    if (!(larger.data = mem_alloc(larger.capacity * token_bytes(subscription))))
        return false;
    if (pending->output.n_new) {
        struct output old = pending->output;
        point(subscription, buffer, &old);
        write_tokens(subscription, &larger, 0, &old);
    }
    mem_free(buffer->data);
    *buffer = larger;
    return true;
}

static bool copy_scores(struct subscription *subscription, const struct output *output)
{
    size_t n = output->n_prompt_results, n_top = n * output->n_prompt_logprobs;
    char *block = mem_alloc(n * sizeof *output->prompt_results + 3 * n_top * sizeof(int32_t));
    if (!block)
        return false;
    mem_free((void *)subscription->scores.prompt_results);
    subscription->scores = (struct output){.prompt_results = (const struct sample_result *)block,
                                 .n_prompt_results = output->n_prompt_results,
                                 .n_prompt_logprobs = output->n_prompt_logprobs};
    memcpy(block, output->prompt_results, n * sizeof *output->prompt_results);
    block += n * sizeof *output->prompt_results;
    subscription->scores.prompt_top_ids = (const int32_t *)block;
    subscription->scores.prompt_top_values = (const float *)(block + n_top * sizeof(int32_t));
    subscription->scores.prompt_top_ranks = (const int32_t *)(block + 2 * n_top * sizeof(int32_t));
    if (n_top) {
        memcpy(block, output->prompt_top_ids, n_top * sizeof(int32_t));
        memcpy(block + n_top * sizeof(int32_t), output->prompt_top_values, n_top * sizeof(float));
        memcpy(block + 2 * n_top * sizeof(int32_t), output->prompt_top_ranks, n_top * sizeof(int32_t));
    }
    return true;
}

static bool copy_states(struct subscription *subscription, const struct output *output)
{
    size_t n_bytes = (size_t)output->n_states * output->states_width * sizeof *subscription->states;
    subscription->states = mem_alloc(n_bytes);
    return subscription->states && memcpy(subscription->states, output->states, n_bytes);
}

static bool copy_error(struct subscription *subscription, const char *error)
{
    size_t n_bytes = strlen(error) + 1;
    if (!subscription->error && (subscription->error = mem_alloc(n_bytes)))
        memcpy(subscription->error, error, n_bytes);
    return subscription->error;
}

struct subscription *subscription_create(struct driver *driver, const struct request_spec *spec, bool ends_only)
{
    uint32_t n_samples = spec->n ? spec->n : 1;
    struct subscription *subscription = mem_calloc(1, sizeof *subscription + n_samples * sizeof *subscription->pending);
    if (!subscription)
        return NULL;
    subscription->driver = driver;
    subscription->n_samples = n_samples;
    subscription->has_results = spec->wants_logprobs && !spec->is_score;
    subscription->n_logprobs = subscription->has_results ? spec->n_logprobs : 0;
    subscription->ends_only = ends_only;
    return subscription;
}

void subscription_free(struct subscription *subscription)
{
    if (!subscription)
        return;
    for (uint32_t i = 0; i < subscription->n_samples; i++) {
        mem_free(subscription->pending[i].buffers[0].data);
        mem_free(subscription->pending[i].buffers[1].data);
    }
    mem_free((void *)subscription->scores.prompt_results);
    mem_free(subscription->states);
    mem_free(subscription->error);
    mem_free(subscription);
}

void subscription_add(struct subscription *subscription, const struct output *output)
{
    struct pending *pending = &subscription->pending[output->sample];
    uint32_t first = pending->has_output ? pending->output.first : output->first;
    uint32_t n = pending->has_output ? pending->output.n_new : 0;
    bool is_lost = false;
    if (!subscription->number) /* output may arrive before driver_submit sets it; after that it is read without the lock */
        subscription->number = output->request;
    subscription->is_done |= output->is_last_of_request;
    if (subscription->is_dropped)
        return;
    if (output->n_new && !subscription->is_lost) {
        pending->output.n_new = n;
        if (reserve(subscription, pending, output->n_new))
            write_tokens(subscription, &pending->buffers[pending->filled], n, output);
        else
            is_lost = true;
    }
    is_lost |= output->prompt_results && !copy_scores(subscription, output);
    is_lost |= output->states && !copy_states(subscription, output);
    is_lost |= output->error && !copy_error(subscription, output->error);
    if (output->drafts)
        pending->drafts = *output->drafts;
    subscription->n_fresh += !pending->has_output;
    pending->has_output = true;
    pending->output = *output;
    pending->output.first = first;
    pending->output.n_new = subscription->is_lost || is_lost ? n : n + output->n_new;
    if (subscription->driver->is_dead && output->finish == FINISH_ABORT)
        pending->output.finish = FINISH_ERROR;
    if (is_lost && !subscription->is_lost) {
        subscription->is_lost = true;
        engine_abort(subscription->driver->engine, &subscription->number, 1, NULL);
    }
    if (subscription->is_done || !subscription->ends_only)
        subscription_announce(subscription);
}

/* ---- notifiers, lock held ---- */

static void list_subscription(struct subscription *subscription)
{
    struct notifier *notifier = subscription->notifier;
    if (!notifier || subscription->is_listed || notifier->descriptor < 0)
        return;
    subscription->is_listed = true;
    subscription->next = NULL;
    subscription->prev = notifier->last;
    *(notifier->last ? &notifier->last->next : &notifier->first) = subscription;
    notifier->last = subscription;
}

static void unlist_subscription(struct subscription *subscription)
{
    struct notifier *notifier = subscription->notifier;
    if (!subscription->is_listed)
        return;
    subscription->is_listed = false;
    *(subscription->prev ? &subscription->prev->next : &notifier->first) = subscription->next;
    *(subscription->next ? &subscription->next->prev : &notifier->last) = subscription->prev;
}

static void notifier_release(struct notifier *notifier)
{
    if (--notifier->n_holders == 0)
        mem_free(notifier);
}

void subscription_set_notifier(struct subscription *subscription, struct notifier *notifier)
{
    unlist_subscription(subscription);
    if (notifier)
        notifier->n_holders++;
    if (subscription->notifier)
        notifier_release(subscription->notifier);
    subscription->notifier = notifier;
}

void subscription_announce(struct subscription *subscription)
{
    if (!subscription->is_announced)
        list_subscription(subscription);
    subscription->is_announced = true;
    subscription->driver->has_waited_subscription |= subscription->n_readers_waiting > 0;
}

void notifier_signal(struct notifier *notifier)
{
    uint64_t one = 1;
    if (notifier->descriptor < 0 || notifier->is_signalled || !(notifier->first || notifier->states))
        return;
    notifier->is_signalled = true;
    while (write(notifier->descriptor, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void notifier_update(struct notifier *notifier, uint32_t states, uint64_t boundary)
{
    if (boundary >= notifier->boundary) {
        notifier->boundary = UINT64_MAX;
        notifier->states |= DRIVER_BOUNDARY;
    }
    notifier->states |= notifier->watched & states;
    notifier->watched &= ~states;
}

/* ---- readers ---- */

uint64_t subscription_number(const struct subscription *subscription)
{
    return subscription->number;
}

/* Call with the lock held. */
static void take_pending(struct subscription *subscription, struct pending *pending, struct output *out)
{
    *out = pending->output;
    point(subscription, &pending->buffers[pending->filled], out);
    out->n_logprobs = subscription->n_logprobs;
    if (out->prompt_results) {
        out->prompt_results = subscription->scores.prompt_results;
        out->prompt_top_ids = subscription->scores.prompt_top_ids;
        out->prompt_top_values = subscription->scores.prompt_top_values;
        out->prompt_top_ranks = subscription->scores.prompt_top_ranks;
    }
    out->drafts = out->drafts ? &pending->drafts : NULL;
    out->states = subscription->states;
    out->error = out->error ? subscription->error : NULL;
    pending->filled ^= 1;
    pending->has_output = false;
    subscription->n_fresh--;
    /* samples are taken in another order than they ended */
    out->is_last_of_request = subscription->is_done && !subscription->n_fresh;
    if (!subscription->n_fresh) {
        unlist_subscription(subscription);
        subscription->is_announced = false;
    }
}

bool subscription_take_more(struct subscription *subscription, struct output *output)
{
    struct pending *pending = &subscription->pending[0];
    driver_lock(subscription->driver);
    bool is_plain = subscription->n_samples == 1 && pending->has_output && !subscription->is_lost &&
                    pending->output.finish == FINISH_NONE;
    if (is_plain && pending->output.n_new) {
        struct output look = pending->output;
        point(subscription, &pending->buffers[pending->filled], &look);
        is_plain = look.epochs[0] == look.epochs[look.n_new - 1];
    }
    if (is_plain)
        take_pending(subscription, pending, output);
    driver_unlock(subscription->driver);
    return is_plain;
}

enum rc subscription_take(struct subscription *subscription, struct output *output, uint32_t max, uint32_t *n, struct err *err)
{
    *n = 0;
    driver_lock(subscription->driver);
    for (uint32_t i = 0; i < subscription->n_samples && subscription->n_fresh && *n < max; i++)
        if (subscription->pending[i].has_output)
            take_pending(subscription, &subscription->pending[i], &output[(*n)++]);
    bool is_lost = subscription->is_lost;
    driver_unlock(subscription->driver);
    return is_lost ? err_set(err, RC_MEMORY, "output: out of memory for the output of a request") : RC_OK;
}

bool subscription_wait(struct subscription *subscription, double seconds)
{
    struct driver *driver = subscription->driver;
    struct timespec deadline = deadline_after(seconds);
    driver_lock(driver);
    subscription->n_readers_waiting++;
    while (!subscription->is_announced && pthread_cond_timedwait(&driver->changed, &driver->lock, &deadline) != ETIMEDOUT)
        ;
    subscription->n_readers_waiting--;
    bool result = subscription->is_announced;
    driver_unlock(driver);
    return result;
}

void subscription_abort(struct subscription *subscription)
{
    driver_lock(subscription->driver);
    if (!subscription->is_done) {
        engine_abort(subscription->driver->engine, &subscription->number, 1, NULL);
        driver_kick(subscription->driver);
    }
    driver_unlock(subscription->driver);
}

void subscription_end_wait(struct subscription *subscription)
{
    driver_lock(subscription->driver);
    if (!subscription->is_done) {
        engine_end_wait(subscription->driver->engine, subscription->number);
        driver_kick(subscription->driver);
    }
    driver_unlock(subscription->driver);
}

void subscription_move(struct subscription *subscription, struct notifier *notifier, bool ends_only)
{
    driver_lock(subscription->driver);
    subscription_set_notifier(subscription, notifier);
    subscription->ends_only = ends_only;
    subscription->is_announced = subscription->n_fresh && (subscription->is_done || !ends_only);
    if (subscription->is_announced) {
        list_subscription(subscription);
        if (notifier)
            notifier_signal(notifier);
        if (subscription->n_readers_waiting)
            pthread_cond_broadcast(&subscription->driver->changed);
    }
    driver_unlock(subscription->driver);
}

void subscription_drop(struct subscription *subscription)
{
    if (!subscription)
        return;
    struct driver *driver = subscription->driver;
    driver_lock(driver);
    subscription_set_notifier(subscription, NULL);
    subscription->is_dropped = true;
    if (subscription->is_done) {
        subscription_free(subscription);
        driver_unlock_release(driver);
    } else {
        engine_abort(driver->engine, &subscription->number, 1, NULL);
        driver_kick(driver);
        driver_unlock(driver);
    }
}

enum rc notifier_create(struct driver *driver, struct notifier **result, struct err *err)
{
    struct notifier *notifier = mem_calloc(1, sizeof *notifier);
    if (!notifier)
        return err_set(err, RC_MEMORY, "notifier: out of memory");
    notifier->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (notifier->descriptor < 0) {
        mem_free(notifier);
        enum rc rc = err_set(err, RC_IO, "notifier: no more file descriptors; close some, or raise ulimit -n");
        if (err)
            err->code = errno;
        return rc;
    }
    notifier->driver = driver;
    notifier->n_holders = 1;
    notifier->boundary = UINT64_MAX;
    driver_lock(driver);
    driver_hold(driver);
    notifier->next = driver->notifiers;
    driver->notifiers = notifier;
    driver_unlock(driver);
    *result = notifier;
    return RC_OK;
}

int notifier_descriptor(const struct notifier *notifier)
{
    return notifier->descriptor;
}

void notifier_take(struct notifier *notifier, uint64_t *numbers, uint32_t max, uint32_t *n, uint32_t *states)
{
    uint64_t count;
    *n = 0;
    while (read(notifier->descriptor, &count, sizeof count) < 0 && errno == EINTR)
        ;
    driver_lock(notifier->driver);
    notifier->is_signalled = false;
    *states = notifier->states;
    notifier->states = 0;
    while (*n < max && notifier->first) {
        numbers[(*n)++] = notifier->first->number;
        unlist_subscription(notifier->first);
    }
    notifier_signal(notifier);
    driver_unlock(notifier->driver);
}

void notifier_watch(struct notifier *notifier, uint32_t states, uint64_t boundary)
{
    struct driver *driver = notifier->driver;
    driver_lock(driver);
    notifier->watched |= states;
    if (boundary && boundary < notifier->boundary)
        notifier->boundary = boundary;
    notifier_update(notifier, driver_state_now(driver), driver->n_done);
    notifier_signal(notifier);
    driver_unlock(driver);
}

void notifier_destroy(struct notifier *notifier)
{
    if (!notifier)
        return;
    struct driver *driver = notifier->driver;
    driver_lock(driver);
    for (struct notifier **place = &driver->notifiers; *place; place = &(*place)->next)
        if (*place == notifier) {
            *place = notifier->next;
            break;
        }
    while (notifier->first)
        unlist_subscription(notifier->first);
    close(notifier->descriptor);
    notifier->descriptor = -1;
    notifier_release(notifier);
    driver_unlock_release(driver);
}
