/* fake_drafts.h: draft sources for tests: they know the oracle's answer and are wrong as often as a test wants. */
#ifndef LLMPY_FAKE_DRAFTS_H
#define LLMPY_FAKE_DRAFTS_H

#include "../../csrc/engine/sequence.h"
#include "fake_model.h"

enum fake_drafts { TRUTH, GARBAGE, NOTHING, LIES, MIXED };

struct fake_source {
    struct draft_source source;
    enum fake_drafts kind;
    uint32_t n_wrong;   /* of 100 drafts of TRUTH */
    uint64_t random;
    uint64_t n_proposals, n_noted, n_begun, n_ended;
};

/* The id that the oracle expects at a place of the sequence's output; -1 behind its end. */
static int32_t true_id(const struct sequence *q, uint32_t at)
{
    const struct job *job = q->request->spec.owner;
    uint32_t n_prior = q->request->spec.prior.n;
    return at - n_prior < job->expected[q->sample].n ? job->expected[q->sample].ids[at - n_prior] : -1;
}

static uint32_t fake_propose(void *ctx, struct sequence *q, uint32_t k, int32_t *ids)
{
    struct fake_source *s = ctx;
    enum fake_drafts kind = s->kind == MIXED ? check_below(&s->random, MIXED) : s->kind;
    uint32_t n = 0;
    s->n_proposals++;
    CHECK(k > 0 && k <= MAX_DRAFTS);
    CHECK(!memcmp(q->drafts.memory, "memory", 6)); /* it is the sequence's own */
    for (; n < k && kind != NOTHING; n++) {
        ids[n] = kind == GARBAGE ? (int32_t)check_below(&s->random, VOCAB + 6) - 3 : true_id(q, q->n_output + n);
        if (kind == TRUTH && check_below(&s->random, 100) < s->n_wrong)
            ids[n] = (ids[n] + 1) % (int32_t)VOCAB;
    }
    return kind == LIES ? k + 1 + check_below(&s->random, 1000) : n;
}

static size_t fake_draft_bytes(void *ctx, uint32_t n_known, uint32_t n_most)
{
    (void)ctx;
    CHECK(n_known && n_known < n_most && n_most <= MAX_LENGTH);
    return 6;
}

static void fake_begin(void *ctx, struct sequence *q)
{
    ((struct fake_source *)ctx)->n_begun++;
    memcpy(q->drafts.memory, "memory", 6);
}

static void fake_note(void *ctx, struct sequence *q, const int32_t *ids, uint32_t n)
{
    ((struct fake_source *)ctx)->n_noted += n;
    for (uint32_t i = 0; i < n; i++)
        CHECK_EQ(ids[i], q->output[q->n_output - n + i]);
}

static void fake_end(void *ctx, struct sequence *q)
{
    (void)q;
    ((struct fake_source *)ctx)->n_ended++;
}

/* Fills a source, which must outlive the engine. */
static const struct draft_source *fake_drafts(struct fake_source *s, enum fake_drafts kind, uint32_t n_wrong)
{
    *s = (struct fake_source){.source = {s, fake_draft_bytes, fake_begin, fake_propose, fake_note, fake_end, NULL}, .kind = kind,
                              .n_wrong = n_wrong, .random = 5};
    return &s->source;
}

#endif
