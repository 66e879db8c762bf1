#include "queue.h"

static void replace_child(struct queue *queue, struct sequence *parent, struct sequence *old, struct sequence *new)
{
    if (!parent)
        queue->root = new;
    else if (parent->left == old)
        parent->left = new;
    else
        parent->right = new;
    if (new)
        new->parent = parent;
}

/* Rotates a node above its parent; the order stays the same. */
static void rotate_up(struct queue *queue, struct sequence *node)
{
    struct sequence *parent = node->parent, *inner;
    replace_child(queue, parent->parent, parent, node);
    if (parent->left == node) {
        inner = parent->left = node->right;
        node->right = parent;
    } else {
        inner = parent->right = node->left;
        node->left = parent;
    }
    if (inner)
        inner->parent = parent;
    parent->parent = node;
}

void queue_insert(struct queue *queue, struct sequence *node)
{
    struct sequence *parent = NULL, **place = &queue->root;
    while (*place) {
        parent = *place;
        place = sequence_is_ahead(node, parent) ? &parent->left : &parent->right;
    }
    *place = node;
    node->left = node->right = NULL;
    node->parent = parent;
    queue->random = queue->random * 6364136223846793005u + 1442695040888963407u;
    node->heap = queue->random >> 16;
    while (node->parent && node->parent->heap < node->heap)
        rotate_up(queue, node);
    queue->n++;
}

void queue_remove(struct queue *queue, struct sequence *node)
{
    while (node->left && node->right)
        rotate_up(queue, node->left->heap > node->right->heap ? node->left : node->right);
    replace_child(queue, node->parent, node, node->left ? node->left : node->right);
    node->left = node->right = node->parent = NULL;
    queue->n--;
}

static struct sequence *leftmost(struct sequence *node)
{
    while (node && node->left)
        node = node->left;
    return node;
}

struct sequence *queue_first(const struct queue *queue)
{
    return leftmost(queue->root);
}

struct sequence *queue_next(const struct sequence *node)
{
    if (node->right)
        return leftmost(node->right);
    while (node->parent && node->parent->right == node)
        node = node->parent;
    return node->parent;
}
