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
    PIECE_SEGMENTS,       /* and PIECE_SEGMENTS + 1: first rows of the segments of an attention, and n_rows */
    PIECE_TAPS = 3,       /* [n_rows][n_taps] rows of a table of positions */
    PIECE_WEIGHTS,        /* [n_rows][n_taps] their float32 factors */
    PIECE_LIST,           /* lists of the operation `rows`: [n_rows] for class rows, ... */
    PIECE_PATCHES,        /* ... rows without class rows, ... */
    PIECE_FEATURES,       /* ... features in their order */
    PIECE_TABLES
};

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

/* An item whose features a step computes before its rows. */
struct encoding {
    const struct prompt_item *item;
    uint32_t first;           /* of batch.feature_rows */
};

#endif
