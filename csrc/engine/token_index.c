#include "token_index.h"

#include "../base/mix.h"

#include <stdbool.h>

#define BASE 0x9e3779b97f4a7c15u

static uint32_t capacity_for(uint32_t n_tokens)
{
    uint32_t capacity = 2 * LONGEST_MATCH;
    while (capacity < n_tokens && capacity < 1u << 31)
        capacity *= 2;
    return capacity;
}

size_t token_index_bytes(uint32_t n_tokens, uint32_t n_lengths)
{
    return (size_t)capacity_for(n_tokens) * (1 + 2 * n_lengths) * sizeof(uint32_t);
}

void token_index_init(struct token_index *x, void *memory, uint32_t n_tokens, const uint32_t *lengths, uint32_t n_lengths)
{
    size_t capacity = capacity_for(n_tokens);
    *x = (struct token_index){.mask = (uint32_t)capacity - 1, .n_lengths = n_lengths, .ids = memory};
    x->heads = (uint32_t *)memory + capacity;
    x->links = x->heads + n_lengths * capacity;
    for (uint32_t l = 0; l < n_lengths; l++) {
        x->lengths[l] = lengths[l];
        x->leaving[l] = 1;
        for (uint32_t i = 0; i < lengths[l]; i++)
            x->leaving[l] *= BASE;
    }
}

static uint32_t *head_of(const struct token_index *x, uint32_t l, uint64_t hash)
{
    return &x->heads[(size_t)l * (x->mask + 1) + (mix64(hash, 0) & x->mask)];
}

static uint32_t *link_of(const struct token_index *x, uint32_t l, uint32_t place)
{
    return &x->links[(size_t)l * (x->mask + 1) + (place & x->mask)];
}

/* An absent token counts as 0, a present one as its id + 2, so the separator counts, too. */
static uint64_t value_of(int32_t id)
{
    return (uint64_t)(uint32_t)(id + 2);
}

void token_index_add(struct token_index *x, int32_t id)
{
    uint32_t place = x->n + 1;
    for (uint32_t l = 0; l < x->n_lengths; l++) {
        uint32_t length = x->lengths[l];
        x->hashes[l] = x->hashes[l] * BASE + value_of(id);
        if (x->n >= length)
            x->hashes[l] -= x->leaving[l] * value_of(token_index_id(x, x->n - length));
        if (place < length)
            continue;
        uint32_t *head = head_of(x, l, x->hashes[l]);
        *link_of(x, l, place) = *head;
        *head = place;
    }
    x->ids[x->n & x->mask] = id;
    x->n = place;
}

/* Whether the tokens before the place are the last ones of the text. */
static bool is_match(const struct token_index *x, const struct token_index *text, uint32_t place, uint32_t length)
{
    for (uint32_t i = 1; i <= length; i++)
        if (token_index_id(x, place - i) != token_index_id(text, text->n - i))
            return false;
    return true;
}

uint32_t token_index_find(const struct token_index *x, const struct token_index *text, uint32_t l, uint32_t *places,
                          uint32_t n_places)
{
    uint32_t length = x->lengths[l], n = 0, age = 0;
    if (text->n < length)
        return 0;
    uint32_t place = *head_of(x, l, text->hashes[l]);
    for (uint32_t i = 0; i <= n_places && n < n_places && place; i++, place = *link_of(x, l, place)) {
        uint32_t older = x->n - place;
        if (older + length > x->mask + 1 || older < age) /* the tokens have left the ring */
            break;
        age = older + 1;
        if (older && is_match(x, text, place, length))
            places[n++] = place;
    }
    return n;
}
