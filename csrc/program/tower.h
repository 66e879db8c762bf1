/* tower.h: the second program of a model that takes images. A tower turns the pieces of an item into features, rows of a
 * pool, which the text's program reads by the operation `splice`. Its program has no cache and no vocabulary; it shares the
 * model's weights and its backend's context, and has a plan, an arena and rope tables of its own. A piece is computed alone,
 * so its features depend on nothing else. */
#ifndef LLMPY_TOWER_H
#define LLMPY_TOWER_H

#include "../step/items.h"
#include "model.h"

struct running;
struct tower;

/* The phases of a model with a tower, in order (model.c). */
enum rc tower_check_backend(const struct model *model, struct err *err);
enum rc tower_plan(struct model *model, uint32_t fusions, struct err *err);
uint64_t tower_planned_bytes(const struct model *model); /* of its buffers; 0: there is no tower */
enum rc tower_make_buffers(struct model *model, struct err *err);
void tower_destroy(struct model *model);
uint64_t tower_bytes(const struct model *model);
uint64_t tower_features_bytes(const struct model *model); /* of the pool of features, part of tower_bytes */

/* Lets a step of the text read the arrays of a graph: rope positions, and no features. */
void tower_use(struct running *run);
const struct model *tower_model(const struct model *model); /* its program, plan and arena */
uint32_t tower_n_steps(const struct model *model); /* of its plan */
/* Computes the features of a step's encodings, or its part of that, and brings the arrays of its rows to the device. */
enum rc tower_begin(struct running *run);
/* RC_INVALID if a table of the piece is too short or names rows that do not exist. Any thread. */
enum rc tower_check_piece(const struct model *model, const struct item_piece *piece, struct err *err);

/* Rows of a tower's value (enum row_list). */
static inline uint32_t piece_rows(const struct item_piece *piece, uint32_t list)
{
    return list ? piece->tables[PIECE_LIST + list].n : piece->n_rows;
}
/* The segments of an attention over n_rows rows, as sequences. */
struct batch_view tower_segments(const struct running *run, uint32_t table, uint32_t n_rows);
/* The columns of the feature pool from `first` on. */
struct view tower_features(const struct model *model, uint32_t first, uint32_t width);

#endif
