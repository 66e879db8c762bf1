/* beams.h: beam search. The samples of a beam search are the places of its beams. A live beam is a sequence that computes its
 * next row as any other; instead of a token it takes the row's best candidates. Once all live beams have theirs, the beams of
 * the next length are chosen. A beam keeps its place for its best child; every other child is a fork, which shares the pages
 * of its parent and takes the place of a beam without children.
 *
 * The trellis keeps, for every length, the candidates of each live beam and how that beam was made. So a fork copies ids alone,
 * and a text that is found is written into its sample when the search ends. The submitting thread allocates all memory with
 * the request. Driver's thread only. Semantics: docs/develop/engine.md, Beams. */
#ifndef LLMPY_BEAMS_H
#define LLMPY_BEAMS_H

#include "scheduler.h"

/* How the live beam `beam` with t tokens was made: from this candidate of this beam with t - 1 tokens. */
struct beam_origin {
    uint32_t beam, candidate;
};

struct beam_text {
    uint32_t n_tokens;
    struct beam_origin last; /* its last token */
    double score;
    enum finish finish;
    int32_t stop;
};

struct beam_child {
    struct beam_origin origin;
    int32_t id;
    double sum;
    struct sequence *sequence;
    struct llg_matcher *handle; /* the grammar behind it; NULL: no grammar */
};

struct beams {
    uint32_t width, n_candidates; /* n_candidates: of each row */
    uint32_t n_live, n_ready;     /* live beams; those that have the candidates of their next token */
    uint32_t n_tokens, most_tokens; /* of each live beam; of a text */
    uint32_t n_found;
    struct sequence **live;       /* [width] best first, as in every array by beam */
    double *sums;                 /* [width] logprobs of each live beam, added up */
    struct beam_text *found;      /* [width] best first */

    /* The trellis. Entry [t][beam]: the live beam with t tokens, and the row that follows it. */
    struct beam_origin *origins;  /* [most_tokens][width] */
    struct sample_result *results; /* [most_tokens][width] of the rows */
    uint32_t *epochs;             /* [most_tokens][width] */
    int32_t *ids, *ranks;         /* [most_tokens][width][n_candidates] best first */
    float *values;                /* the same: logprobs before any token is removed; -inf: no candidate */

    /* Used while beams are chosen. */
    struct beam_child *children;  /* [width] */
    uint32_t *next;               /* [width] first candidate of each beam that is not chosen yet */
    uint32_t *stop_states;        /* [n_stop_strings] */
    bool *is_taken;               /* [width] by sample */
};

/* Sets the parameters that every beam search has. */
void beams_complete(struct request_spec *spec);
/* Bytes that beams_begin lays out at request->beams. */
size_t beams_bytes(const struct request *request);
void beams_begin(struct request *request);
/* Adds sample 0, which computes the prompt, to the queue, and parks the others. */
void beams_enter(struct scheduler *scheduler, struct request *request);

/* Takes a row's candidates; b->tasks[task] drew the row. Returns true if the search has ended: then all its samples are parked
 * and have their texts, best first, and their finish. A sample without tokens has no text. */
bool beams_take(struct scheduler *scheduler, struct sequence *sequence, const struct batch *b, uint32_t task, uint32_t epoch);
/* Gives all samples the error of one of them. */
void beams_fail(struct request *request, const struct sequence *failed);
/* Checks the invariants of a search that has not ended; *n_parked: its parked samples. */
enum rc beams_check(const struct request *request, uint32_t *n_parked, struct err *err);

#endif
