/* outbox.h: which sequences have something to tell, and what. Records of one sequence merge until they are taken, so that a
 * slow reader costs nothing; every sequence gives exactly one final record. Driver's thread only. */
#ifndef LLMPY_OUTBOX_H
#define LLMPY_OUTBOX_H

#include "sequence.h"

struct outbox_list {
    struct sequence *first, *last;
};

struct outbox {
    struct outbox_list fresh;     /* running, with tokens not yet taken */
    struct outbox_list finished;  /* with a final record not yet taken */
    struct outbox_list delivered; /* final record taken: released at the next take */
    uint32_t n_finished;
};

void outbox_note(struct outbox *outbox, struct sequence *sequence);
void outbox_finish(struct outbox *outbox, struct sequence *sequence);
/* Fills at most max records, final ones first. */
uint32_t outbox_take(struct outbox *outbox, bool finished_only, uint32_t epoch, struct news *news, uint32_t max);
/* A sequence whose final record has been read by the caller, and that no step in flight names, to be released; NULL: none. */
struct sequence *outbox_next_delivered(struct outbox *outbox);

#endif
