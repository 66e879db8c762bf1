/* items.h: the images of a request, and other things that a tower (csrc/program/tower.h) turns into features before the text's
 * program runs. An item stands for a range of the prompt. The tower computes it piece by piece, each alone. The engine copies
 * items with their request; they do not change afterwards. */
#ifndef LLMPY_ITEMS_H
#define LLMPY_ITEMS_H

#include "../base/hash.h"
#include "../base/status.h"

/* Tables of a piece. All have words of 4 bytes; a table that the tower does not read has n = 0. */
enum piece_table {
    PIECE_POSITIONS,      /* [axes][n_rows] for ropes */
    PIECE_SEGMENTS,       /* three tables: first rows of the segments of an attention, and the number of all rows */
    PIECE_TAPS = 4,       /* two tables, of the piece's rows and of its cells: [rows][n_taps] rows of a table of positions */
    PIECE_WEIGHTS = 6,    /* two tables: [rows][n_taps] their float32 factors */
    PIECE_DISTANCES = 8,  /* two tables of squares of n x n rows: [2 n - 1][2] rows of a table of distances */
    PIECE_SHARES = 10,    /* two tables: [2 n - 1][2] their float32 factors */
    PIECE_PLACES = 12,    /* [n_features] the place of each feature in the item; n = 0: features follow those before */
    PIECE_LIST,           /* lists of the operation `rows`, by enum row_list of program.h */
    PIECE_TABLES = PIECE_LIST + 8
};

/* Which tokens see each other, so that they are computed in one step: neighbouring features of an image, or all of a prompt. */
enum spans { SPANS_NONE, SPANS_OF_FEATURES, SPANS_OF_PROMPT };

struct item_piece {
    uint32_t n_rows, n_features;
    const uint8_t *bytes; /* [n_rows][bytes of a row] */
    size_t n_bytes;
    struct {
        const int32_t *values;
        uint32_t n;
    } tables[PIECE_TABLES];
};

struct prompt_item {
    uint32_t first, n_tokens; /* range of the prompt; its tokens with the model's feature id stand for the features, in order */
    uint32_t n_features;
    struct hash content;      /* of all that the features depend on, but the weights */
    const struct item_piece *pieces;
    uint32_t n_pieces;
};

/* Numbers the tokens of a prompt that stand for features, in each item from 0 on; -1: the token stands for none. */
static inline void items_number(const int32_t *ids, uint32_t n_tokens, const struct prompt_item *items, uint32_t n_items,
                                uint32_t feature_id, int32_t *features)
{
    for (uint32_t i = 0; i < n_tokens; i++)
        features[i] = -1;
    for (uint32_t i = 0; i < n_items; i++) {
        int32_t n = 0;
        for (uint32_t at = items[i].first; at < items[i].first + items[i].n_tokens; at++)
            if ((uint32_t)ids[at] == feature_id)
                features[at] = n++;
    }
}

/* Whether a token and the one before are of one span. features: of the prompt's n_tokens, NULL: it has no items. n_prefix:
 * tokens that see each other if a model's prompts do. */
static inline bool items_continue(enum spans spans, const int32_t *features, uint32_t n_tokens, uint32_t n_prefix,
                                  uint32_t position)
{
    switch (spans) {
    case SPANS_OF_FEATURES:
        return features && position < n_tokens && features[position] > 0 &&
               features[position] == features[position - 1] + 1;
    case SPANS_OF_PROMPT: return position && position < n_prefix;
    default: return false;
    }
}

/* Lists the end of the positions that each of n tokens from `first` on sees: of its span, or its own. The tokens end with a
 * span. Returns whether a token sees later ones. */
static inline bool items_list_ends(enum spans spans, const int32_t *features, uint32_t n_tokens, uint32_t n_prefix,
                                   uint32_t first, uint32_t n, int32_t *ends)
{
    bool has_any = false;
    for (uint32_t i = n; i-- > 0;) {
        bool continues = i + 1 < n && items_continue(spans, features, n_tokens, n_prefix, first + i + 1);
        ends[i] = continues ? ends[i + 1] : (int32_t)(first + i + 1);
        has_any |= continues;
    }
    return has_any;
}

/* An item whose features a step computes before its rows. */
struct encoding {
    const struct prompt_item *item;
    uint32_t first;           /* of batch.feature_rows */
};

#endif
