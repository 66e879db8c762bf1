/* draft.c: the sources that find drafts in earlier text, by an index of tokens (token_index.h).
 *
 *   ngram   the newest place behind the longest match, of max to min tokens, in the sequence's own tokens; if the number of
 *           drafts adapts, a match of fewer than max tokens gives fewer drafts (most_of_match)
 *   suffix  up to N_VOTES places behind the longest of SUFFIX_LENGTHS, in the sequence's own tokens and in finished outputs;
 *           every draft is the most frequent id there, as long as enough of the places agree */
#include "draft.h"

#include "../base/mem.h"
#include "sequence.h"
#include "token_index.h"

#define ROOM 4096u            /* new tokens that a sequence's index has room for; of more, it keeps the last */
#define SHARED_PROMPT 64u     /* tokens of the prompt that are kept with a finished output */
#define N_VOTES 16u
#define LEAST_FREQUENCY 0.3f  /* of a draft, by the votes for it and for the drafts before it */

static const uint32_t SUFFIX_LENGTHS[] = {32, 8, 3};

struct text_source {
    struct draft_source source;
    struct token_index *shared;  /* of finished outputs; NULL: none are kept */
    uint32_t n_lengths, lengths[INDEX_LENGTHS]; /* descending */
    bool adapts;
};

/* The index of a sequence is at the beginning of its memory, the index's arrays behind it. */
static struct token_index *index_of(const struct sequence *q)
{
    return q->drafts.memory;
}

/* The index's id of a token. Ids of other keys differ, so texts of other adapters do not match; none is INDEX_SEPARATOR. */
static int32_t keyed(const struct sequence *q, int32_t id)
{
    return id ^ (int32_t)q->request->spec.text_key;
}

static size_t text_bytes(void *ctx, uint32_t n_known, uint32_t n_most)
{
    const struct text_source *s = ctx;
    uint32_t n = n_most - n_known > ROOM ? n_known + ROOM : n_most;
    return sizeof(struct token_index) + token_index_bytes(n, s->n_lengths);
}

static void text_begin(void *ctx, struct sequence *q)
{
    const struct text_source *s = ctx;
    uint32_t n_known = sequence_n_known(q), n_most = n_known + q->capacity;
    struct token_index *index = index_of(q);
    token_index_init(index, index + 1, n_most - n_known > ROOM ? n_known + ROOM : n_most, s->lengths, s->n_lengths);
    for (uint32_t i = 0; i < n_known; i++)
        token_index_add(index, keyed(q, sequence_token(q, i)));
}

static void text_accept(void *ctx, struct sequence *q, const int32_t *ids, uint32_t n)
{
    (void)ctx;
    for (uint32_t i = 0; i < n; i++)
        token_index_add(index_of(q), keyed(q, ids[i]));
}

/* ---- ngram ---- */

/* Most drafts of a match of fewer than the most tokens: as many as tokens match. While all drafts of the sequence were
 * rejected, a match of the fewest tokens gives none. */
static uint32_t most_of_match(const struct text_source *s, const struct sequence *q, uint32_t l)
{
    const struct draft_counts *counts = &q->draft_counts;
    bool is_least = l + 1 == s->n_lengths, is_wrong = counts->proposed[0] && !counts->accepted[0];
    return is_least && is_wrong ? 0 : s->lengths[l];
}

static uint32_t ngram_propose(void *ctx, struct sequence *q, uint32_t k, int32_t *ids)
{
    const struct text_source *s = ctx;
    const struct token_index *index = index_of(q);
    uint32_t place = 0, l = 0;
    while (l < s->n_lengths && !token_index_find(index, index, l, &place, 1))
        l++;
    if (l == s->n_lengths)
        return 0;
    uint32_t n, most = s->adapts && l ? most_of_match(s, q, l) : k;
    k = k < most ? k : most;
    for (n = 0; n < k; n++, place++) /* behind the last token the drafts themselves go on */
        ids[n] = (int32_t)(index->n - place) > 0 ? keyed(q, token_index_id(index, place)) : ids[place - index->n];
    return n;
}

/* ---- suffix ---- */

/* A place from which a draft's id is read. */
struct vote {
    const struct token_index *index;
    uint32_t place;
};

static uint32_t find_votes(const struct text_source *s, const struct token_index *own, struct vote *votes)
{
    uint32_t places[N_VOTES], n = 0;
    for (uint32_t l = 0; l < s->n_lengths && !n; l++) {
        const struct token_index *indexes[] = {own, s->shared};
        for (uint32_t i = 0; i < 2 && indexes[i]; i++) {
            uint32_t n_found = token_index_find(indexes[i], own, l, places, N_VOTES - n);
            for (uint32_t j = 0; j < n_found; j++)
                votes[n++] = (struct vote){indexes[i], places[j]};
        }
    }
    return n;
}

static int32_t vote_id(const struct vote *vote)
{
    return vote->place == vote->index->n ? INDEX_SEPARATOR : token_index_id(vote->index, vote->place);
}

/* The most frequent id of the votes; among equals, that of the newest place. *n_best: its votes. */
static int32_t most_frequent(const struct vote *votes, uint32_t n, uint32_t *n_best)
{
    int32_t best = INDEX_SEPARATOR;
    *n_best = 0;
    for (uint32_t i = 0; i < n && *n_best < n - i; i++) {
        int32_t id = vote_id(&votes[i]);
        uint32_t n_same = 0;
        for (uint32_t j = i; j < n; j++)
            n_same += vote_id(&votes[j]) == id;
        if (n_same > *n_best && id != INDEX_SEPARATOR) {
            best = id;
            *n_best = n_same;
        }
    }
    return best;
}

static uint32_t suffix_propose(void *ctx, struct sequence *q, uint32_t k, int32_t *ids)
{
    struct vote votes[N_VOTES];
    uint32_t n_votes = find_votes(ctx, index_of(q), votes), n = 0, n_best;
    float frequency = 1;
    while (n < k && n_votes) {
        int32_t id = most_frequent(votes, n_votes, &n_best);
        frequency *= (float)n_best / (float)n_votes;
        if (frequency < LEAST_FREQUENCY)
            break;
        ids[n++] = keyed(q, id);
        uint32_t n_kept = 0;
        for (uint32_t i = 0; i < n_votes; i++)
            if (vote_id(&votes[i]) == id)
                votes[n_kept++] = (struct vote){votes[i].index, votes[i].place + 1};
        n_votes = n_kept;
    }
    return n;
}

/* Keeps a finished output, with the end of its prompt. The oldest texts leave the ring. */
static void suffix_end(void *ctx, struct sequence *q)
{
    struct text_source *s = ctx;
    uint32_t n_prompt = q->request->spec.prompt.n, first = n_prompt > SHARED_PROMPT ? n_prompt - SHARED_PROMPT : 0;
    if (!s->shared || !q->n_output)
        return;
    for (uint32_t i = first; i < sequence_n_known(q); i++)
        token_index_add(s->shared, keyed(q, sequence_token(q, i)));
    token_index_add(s->shared, INDEX_SEPARATOR);
}

/* ---- life ---- */

/* Tokens whose index takes at most so many bytes. */
static uint32_t tokens_within(uint64_t n_bytes, uint32_t n_lengths)
{
    uint32_t n = 64;
    while (n < 1u << 30 && token_index_bytes(2 * n, n_lengths) <= n_bytes)
        n *= 2;
    return n;
}

static enum rc make_shared(struct text_source *s, uint64_t n_bytes, struct err *err)
{
    uint32_t n_tokens = tokens_within(n_bytes, s->n_lengths);
    s->shared = mem_calloc(1, sizeof *s->shared + token_index_bytes(n_tokens, s->n_lengths));
    if (!s->shared)
        return err_set(err, RC_MEMORY, "speculative_config: out of memory for %llu bytes of finished outputs; lower shared",
                       (unsigned long long)n_bytes);
    token_index_init(s->shared, s->shared + 1, n_tokens, s->lengths, s->n_lengths);
    return RC_OK;
}

enum rc draft_source_create(const struct draft_options *options, struct draft_source **source, struct err *err)
{
    *source = NULL;
    struct text_source *s = mem_calloc(1, sizeof *s);
    if (!s)
        return err_set(err, RC_MEMORY, "speculative_config: out of memory");
    s->source = (struct draft_source){s, text_bytes, text_begin, ngram_propose, text_accept, NULL, NULL};
    s->adapts = !options->k;
    *source = &s->source;
    if (options->method == DRAFT_NGRAM) {
        for (uint32_t length = options->max; length >= options->min; length--)
            s->lengths[s->n_lengths++] = length;
        return RC_OK;
    }
    s->source.propose = suffix_propose;
    s->source.end = suffix_end;
    for (; s->n_lengths < sizeof SUFFIX_LENGTHS / sizeof *SUFFIX_LENGTHS; s->n_lengths++)
        s->lengths[s->n_lengths] = SUFFIX_LENGTHS[s->n_lengths];
    enum rc rc = options->shared_bytes ? make_shared(s, options->shared_bytes, err) : RC_OK;
    if (rc) {
        draft_source_destroy(*source);
        *source = NULL;
    }
    return rc;
}

void draft_source_destroy(struct draft_source *source)
{
    struct text_source *s = source ? source->ctx : NULL;
    if (s)
        mem_free(s->shared);
    mem_free(s);
}
