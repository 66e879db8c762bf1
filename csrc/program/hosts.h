/* hosts.h: the processes that run the ranks of one model together, one process a host. Host 0 schedules; the others follow it
 * (follower.h). Each has two connections with host 0: messages of steps and values go over the first, in lockstep. A thread of
 * each process sends a pulse a second over the second one, and reads the others'. A connection that is lost, or a pulse that is
 * late, ends all waits of this process; the error names the host. */
#ifndef LLMPY_HOSTS_H
#define LLMPY_HOSTS_H

#include "wire.h"

#define HOSTS_MOST 64u

struct hosts_options {
    const char *address;           /* of host 0 */
    uint16_t port;
    uint32_t host, n_hosts;        /* of this process; at least 2 */
    struct wire_patience patience; /* seconds: the longest wait for the other hosts to come. All long waits ask goes_on */
    double step_seconds;           /* the longest wait for a message within a step, and for a pulse */
    uint8_t token[WIRE_KEY_BYTES]; /* as in struct wire_greeting */
    uint64_t digests[DIGESTS];
};

struct hosts;

enum rc hosts_open(const struct hosts_options *options, struct hosts **hosts, struct err *err);
/* Says goodbye, so that followers end without an error. NULL is allowed. */
void hosts_close(struct hosts *hosts);
/* Tells the other hosts why this one cannot go on, and ends all waits. */
void hosts_end(struct hosts *hosts, const char *reason);
bool hosts_is_first(const struct hosts *hosts); /* this process is host 0 */
/* Whether all hosts are there, as far as this one knows. Any thread. */
enum rc hosts_check(struct hosts *hosts, struct err *err);
/* Sets each value to the largest one of all hosts. Waits as long as pulses come. */
enum rc hosts_agree(struct hosts *hosts, uint64_t *values, uint32_t n, struct err *err);
/* `exchange` of struct comm_options; ctx is the hosts. */
enum rc hosts_exchange(void *ctx, const void *own, size_t own_bytes, bool is_to_first, void *others, size_t max_bytes,
                       size_t *others_bytes, struct err *err);
/* Host 0: sends a step to all followers. */
enum rc hosts_send_step(struct hosts *hosts, const void *bytes, size_t n_bytes, struct err *err);
/* Host 0: waits until all followers have ended the step of this number. */
enum rc hosts_await_done(struct hosts *hosts, uint64_t step, struct err *err);
/* Host 0, between two steps: sends an order to all followers. */
enum rc hosts_send_order(struct hosts *hosts, const void *bytes, size_t n_bytes, struct err *err);
/* What followers may read from host 0, and give to it, while they carry out an order. */
struct hosts_memory {
    /* Writes bytes first .. first + n_bytes to `to`. An error is the follower's, too. */
    enum rc (*read)(void *ctx, uint64_t first, size_t n_bytes, void *to, struct err *err);
    /* Where bytes first .. first + n_bytes of a place belong; NULL: nowhere, which ends the hosts. */
    void *(*find)(void *ctx, uint64_t place, uint64_t first, uint64_t n_bytes);
    void *ctx;
};
/* Host 0: waits for the results of all followers, one after the other. The first one that is an error is the result. memory
 * and its functions may be NULL. sum: gets the sum of their numbers, modulo 2^64; NULL is allowed. */
enum rc hosts_await_results(struct hosts *hosts, const struct hosts_memory *memory, uint64_t *sum, struct err *err);
/* A follower: waits for the next step or order as long as pulses come. kind: WIRE_STEP, WIRE_ORDER, or WIRE_CLOSE: host 0 has
 * closed the model. */
enum rc hosts_read_call(struct hosts *hosts, enum wire_kind *kind, void *bytes, size_t max_bytes, size_t *n_bytes,
                        struct err *err);
enum rc hosts_send_done(struct hosts *hosts, uint64_t step, struct err *err);
enum rc hosts_send_result(struct hosts *hosts, enum rc rc, uint64_t number, const struct err *result, struct err *err);
/* A follower, before it sends the result of an order: reads from host 0's memory, or gives bytes to it. */
enum rc hosts_read(struct hosts *hosts, uint64_t first, size_t n_bytes, void *to, struct err *err);
enum rc hosts_give(struct hosts *hosts, uint64_t place, const void *bytes, size_t n_bytes, struct err *err);

#endif
