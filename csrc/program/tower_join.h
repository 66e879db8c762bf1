/* tower_join.h: pieces of one or several images as one piece, which a tower computes in one run. Their rows follow each
 * other. Segments stay apart, so no piece's features depend on another one. Pieces join if the tables that all rows share are
 * equal. */
#ifndef LLMPY_TOWER_JOIN_H
#define LLMPY_TOWER_JOIN_H

#include "../step/items.h"
#include "program.h"

#define JOIN_PIECES 256u /* at most */

struct piece_join {
    const struct program *program;
    uint32_t max_rows;
    bool can_join;                   /* every list of rows is read of values with as many rows */
    uint32_t read_list[N_ROW_LISTS], read_per[N_ROW_LISTS]; /* of the value that a list of rows is read of; per 0: of none */
    const struct item_piece *pieces[JOIN_PIECES];
    uint32_t n_pieces;
    struct item_piece all;           /* sums over the pieces */
    uint8_t *bytes;                  /* room for bytes and tables; bytes NULL: they are not joined */
    int32_t *tables[PIECE_TABLES];
    size_t table_values[PIECE_TABLES];
};

/* max_rows, n_bytes, table_values: of the largest piece; n_bytes 0: bytes are not joined. join_clear frees the room, also after
 * a failure. */
enum rc join_make(struct piece_join *join, const struct program *tower, uint32_t max_rows, size_t n_bytes,
                  const size_t *table_values, struct err *err);
void join_clear(struct piece_join *join);
/* Takes a piece, which has to stay until join_end; false: it does not go with the others. The first one always does. */
bool join_add(struct piece_join *join, const struct item_piece *piece);
/* What stands for all pieces until the next call: the piece itself if there is one. */
const struct item_piece *join_all(struct piece_join *join);
void join_end(struct piece_join *join); /* forgets the pieces */

#endif
