/* draft.h: sources of drafts. A draft is an id that a source proposes for a position behind a sequence's known tokens. The
 * engine computes drafts as rows of the same step and accepts those that equal the tokens drawn there (drafting.h). So a wrong
 * draft costs time and changes no output. Semantics: docs/develop/engine.md, Drafts. */
#ifndef LLMPY_DRAFT_H
#define LLMPY_DRAFT_H

#include "../base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_DRAFTS 16u  /* most drafts of a sequence in a step */
#define ADAPTIVE_DRAFTS 8u /* the same if their number adapts */
#define FIRST_RATE 0.6f /* share of accepted drafts that is assumed of a new sequence */

struct scheduler;
struct sequence;

enum draft_method { DRAFT_NONE = 0, DRAFT_NGRAM, DRAFT_SUFFIX, DRAFT_MODEL, DRAFT_HEAD, DRAFT_HEADS };

/* Drafts computed and accepted, by place: 0 is the first behind the known tokens. */
struct draft_counts {
    uint32_t proposed[MAX_DRAFTS], accepted[MAX_DRAFTS];
};

struct draft_options {
    enum draft_method method;
    uint32_t k;              /* drafts of a sequence in a step; 0: as many as pay */
    uint32_t min, max;       /* DRAFT_NGRAM: tokens that must match */
    uint64_t shared_bytes;   /* DRAFT_SUFFIX: memory for finished outputs; 0: none are kept */
};

struct draft_source {
    void *ctx;
    /* Bytes of memory for a sequence that begins with n_known tokens and grows to n_most. The memory comes zeroed, at
     * sequence->drafts.memory, and lives as long as the sequence. */
    size_t (*bytes)(void *ctx, uint32_t n_known, uint32_t n_most);
    /* The sequence has its first tokens. Any thread may call this; all other functions are called by the driver's thread. */
    void (*begin)(void *ctx, struct sequence *sequence);
    /* Writes at most k ids that may follow the known tokens; returns how many. Ids outside the vocabulary end the drafts. */
    uint32_t (*propose)(void *ctx, struct sequence *sequence, uint32_t k, int32_t *ids);
    /* The sequence has n more tokens. */
    void (*accept)(void *ctx, struct sequence *sequence, const int32_t *ids, uint32_t n);
    void (*end)(void *ctx, struct sequence *sequence); /* the sequence has finished; NULL: no interest */
    /* In place of propose, for all sequences of the step being built: those that get drafts have drafts.n rows for them. Writes
     * the ids behind the output and sets drafts.n_drawn. NULL: the source proposes. */
    enum rc (*draft)(void *ctx, struct scheduler *scheduler, struct err *err);
};

/* Makes a source that finds drafts in earlier text: DRAFT_NGRAM or DRAFT_SUFFIX. */
enum rc draft_source_create(const struct draft_options *options, struct draft_source **source, struct err *err);
void draft_source_destroy(struct draft_source *source);

#endif
