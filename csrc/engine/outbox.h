/* outbox.h: the sequences that have output, and the records made from them. Output of one sequence merges until it is taken, so
 * a slow reader costs nothing. Every sequence yields exactly one final record. Driver's thread only. */
#ifndef LLMPY_OUTBOX_H
#define LLMPY_OUTBOX_H

#include "sequence.h"

struct outbox_list {
    struct sequence *first, *last;
};

struct outbox {
    struct outbox_list fresh;     /* running sequences with tokens not yet taken */
    struct outbox_list finished;  /* sequences with a final record not yet taken */
    struct outbox_list delivered; /* sequences with their final record taken: released at the next take */
    uint32_t n_finished;
};

void outbox_note(struct outbox *outbox, struct sequence *sequence);
void outbox_finish(struct outbox *outbox, struct sequence *sequence);
/* Fills at most max records, final ones first. */
uint32_t outbox_take(struct outbox *outbox, bool finished_only, uint32_t epoch, struct output *output, uint32_t max);
/* Removes and returns a sequence to release: its final record has been taken, and no step in flight uses it. NULL: none. */
struct sequence *outbox_next_delivered(struct outbox *outbox);

#endif
