/* queue.h: the waiting sequences in their order (sequence.h). The queue is a treap whose links are fields of struct sequence,
 * so it never allocates. Insertion and removal at any place cost O(log n). Driver's thread only. */
#ifndef LLMPY_QUEUE_H
#define LLMPY_QUEUE_H

#include "sequence.h"

struct queue {
    struct sequence *root;
    uint64_t n, random;
};

void queue_insert(struct queue *queue, struct sequence *sequence);
void queue_remove(struct queue *queue, struct sequence *sequence);
struct sequence *queue_first(const struct queue *queue);
struct sequence *queue_next(const struct sequence *sequence); /* the next one in order, or NULL */

#endif
