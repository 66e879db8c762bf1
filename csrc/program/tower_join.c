#include "tower_join.h"

#include "../base/mem.h"
#include "tower.h"

#include <string.h>

/* Finds which values the lists of rows are read of. */
static void find_readers(struct piece_join *join)
{
    join->can_join = true;
    for (uint32_t i = 0; i < join->program->n_ops; i++) {
        const struct op *op = &join->program->ops[i];
        if (op->code != OP_ROWS)
            continue;
        const struct value *in = &join->program->values[op->in[0]];
        uint32_t list = op->rows.list;
        join->can_join &= !join->read_per[list] || (join->read_list[list] == in->list && join->read_per[list] == in->per);
        join->read_list[list] = in->list;
        join->read_per[list] = in->per;
    }
}

enum rc join_make(struct piece_join *join, const struct program *tower, uint32_t max_rows, size_t n_bytes,
                  const size_t *table_values, struct err *err)
{
    *join = (struct piece_join){.program = tower, .max_rows = max_rows};
    find_readers(join);
    bool is_made = !n_bytes || (join->bytes = mem_calloc(n_bytes, 1));
    for (uint32_t i = 0; i < PIECE_TABLES && is_made; i++) {
        join->table_values[i] = table_values[i];
        is_made = !table_values[i] || (join->tables[i] = mem_calloc(table_values[i], sizeof(int32_t)));
    }
    return is_made ? RC_OK : err_set(err, RC_MEMORY, "tower: out of memory; lower max_encoder_rows");
}

void join_clear(struct piece_join *join)
{
    mem_free(join->bytes);
    for (uint32_t i = 0; i < PIECE_TABLES; i++)
        mem_free(join->tables[i]);
    *join = (struct piece_join){0};
}

/* ---- which pieces go together ------------------------------------------------------------------------------------------ */

static bool is_of_squares(uint32_t table)
{
    return table >= PIECE_DISTANCES && table < PIECE_PLACES;
}

/* Rows that a table of taps is for. */
static uint32_t rows_of_taps(const struct item_piece *piece, uint32_t table)
{
    return piece_rows(piece, table == PIECE_TAPS + 1 || table == PIECE_WEIGHTS + 1 ? ROWS_OF_CELLS : ROWS_OF_PIECE);
}

static bool table_fits(const struct piece_join *join, const struct item_piece *piece, uint32_t table)
{
    const struct item_piece *first = join->pieces[0];
    uint32_t n = piece->tables[table].n;
    if (!join->table_values[table]) /* no operation reads it */
        return true;
    if (is_of_squares(table))
        return n == first->tables[table].n &&
               (!n || !memcmp(piece->tables[table].values, first->tables[table].values, n * sizeof(int32_t)));
    if (table >= PIECE_TAPS && table < PIECE_DISTANCES &&
        (uint64_t)n * rows_of_taps(first, table) != (uint64_t)first->tables[table].n * rows_of_taps(piece, table))
        return false;
    return (size_t)join->all.tables[table].n + n <= join->table_values[table];
}

static bool fits(const struct piece_join *join, const struct item_piece *piece)
{
    const struct item_piece *all = &join->all;
    if (!join->n_pieces)
        return true;
    if (!join->can_join || join->n_pieces == JOIN_PIECES || all->n_rows + piece->n_rows > join->max_rows ||
        all->n_features + piece->n_features > join->max_rows)
        return false;
    for (uint32_t list = 1; list < N_ROW_LISTS; list++)
        if (piece_rows(all, list) + piece_rows(piece, list) > join->max_rows * row_list_room(list))
            return false;
    for (uint32_t table = 0; table < PIECE_TABLES; table++)
        if (!table_fits(join, piece, table))
            return false;
    return true;
}

bool join_add(struct piece_join *join, const struct item_piece *piece)
{
    struct item_piece *all = &join->all;
    if (!fits(join, piece))
        return false;
    join->pieces[join->n_pieces++] = piece;
    all->n_rows += piece->n_rows;
    all->n_features += piece->n_features;
    all->n_bytes += piece->n_bytes;
    for (uint32_t i = 0; i < PIECE_TABLES; i++)
        all->tables[i].n += piece->tables[i].n;
    return true;
}

/* ---- their tables as one ------------------------------------------------------------------------------------------------ */

/* Tables of one row for each of `n_lines` lines. */
static uint32_t put_lines(const struct piece_join *join, uint32_t table, uint32_t n_lines)
{
    int32_t *at = join->tables[table];
    for (uint32_t line = 0; line < n_lines; line++)
        for (uint32_t i = 0; i < join->n_pieces; i++) {
            uint32_t n = join->pieces[i]->tables[table].n / n_lines;
            if (n)
                memcpy(at, join->pieces[i]->tables[table].values + (size_t)line * n, n * sizeof *at);
            at += n;
        }
    return (uint32_t)(at - join->tables[table]);
}

/* Segments: a piece's last number is where the next piece's first segment begins. */
static uint32_t put_segments(const struct piece_join *join, uint32_t table)
{
    int32_t *at = join->tables[table], begin = 0;
    for (uint32_t i = 0; i < join->n_pieces; i++) {
        uint32_t n = join->pieces[i]->tables[table].n;
        for (uint32_t j = 0; j + 1 < n; j++)
            *at++ = begin + join->pieces[i]->tables[table].values[j];
        begin += n ? join->pieces[i]->tables[table].values[n - 1] : 0;
    }
    *at++ = begin;
    return (uint32_t)(at - join->tables[table]);
}

/* Rows of the value that a list is read of count from the first piece's; negative entries are no rows. */
static uint32_t put_list(const struct piece_join *join, uint32_t list)
{
    int32_t *at = join->tables[PIECE_LIST + list], begin = 0;
    for (uint32_t i = 0; i < join->n_pieces; i++) {
        const struct item_piece *piece = join->pieces[i];
        for (uint32_t j = 0; j < piece->tables[PIECE_LIST + list].n; j++) {
            int32_t row = piece->tables[PIECE_LIST + list].values[j];
            *at++ = row < 0 ? row : begin + row;
        }
        begin += join->read_per[list] ? (int32_t)(piece_rows(piece, join->read_list[list]) / join->read_per[list]) : 0;
    }
    return (uint32_t)(at - join->tables[PIECE_LIST + list]);
}

static uint32_t put_table(const struct piece_join *join, uint32_t table)
{
    if (table == PIECE_POSITIONS)
        return put_lines(join, table, program_n_axes(join->program));
    if (table < PIECE_TAPS)
        return put_segments(join, table);
    if (table >= PIECE_LIST)
        return put_list(join, table - PIECE_LIST);
    return put_lines(join, table, 1);
}

const struct item_piece *join_all(struct piece_join *join)
{
    struct item_piece *all = &join->all;
    if (join->n_pieces == 1)
        return join->pieces[0];
    all->bytes = join->bytes;
    for (uint32_t i = 0, at = 0; i < join->n_pieces && join->bytes; at += (uint32_t)join->pieces[i++]->n_bytes)
        memcpy(join->bytes + at, join->pieces[i]->bytes, join->pieces[i]->n_bytes);
    for (uint32_t i = 0; i < PIECE_TABLES; i++) {
        all->tables[i].values = is_of_squares(i) ? join->pieces[0]->tables[i].values : join->tables[i];
        if (is_of_squares(i))
            all->tables[i].n = join->pieces[0]->tables[i].n;
        else if (join->table_values[i])
            all->tables[i].n = put_table(join, i);
    }
    all->tables[PIECE_PLACES].n = 0;
    return all;
}

void join_end(struct piece_join *join)
{
    join->n_pieces = 0;
    join->all = (struct item_piece){0};
}
