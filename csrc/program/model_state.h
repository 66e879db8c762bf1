/* model_state.h: the inside of a model, shared by model.c (which makes and inspects it) and executor.c (which runs it). */
#ifndef LLMPY_MODEL_STATE_H
#define LLMPY_MODEL_STATE_H

#include "../step/kv_layout.h"
#include "composed.h"
#include "lora.h"
#include "model.h"
#include "plan.h"

/* A captured graph of a step up to the logits, for n_rows sequences of one row each. With shares_new_keys the keys of all rows
 * are written before any row reads keys: such a graph takes a sequence of several rows as so many sequences. */
struct captured {
    uint32_t n_rows, max_tokens; /* as in struct batch_view */
    bool shares_new_keys, has_adapters;
    void *graph;
};

struct model {
    struct meet_args sampled;     /* what the next step's meeting brings: the last step that sampled */
    struct program *program;
    struct plan plan;
    struct weights *weights;
    struct lora lora;             /* zeros if the model serves no adapters */
    const struct backend *backend;
    void *ctx;
    struct entries entries;
    struct model_options options;
    struct kv_layout layout;
    struct kv_place *places;      /* [n_layers + n_states] */
    uint32_t n_pages;
    char *arena;                  /* items have the type of activations */
    uint32_t item_bytes;          /* of one item of the arena */
    float *logits;                /* [max_logits_rows][vocab_stride] */
    float *head_logits;           /* the same, before they are spread over all token ids; NULL: they are not */
    float **rope_freqs, **rope_tables; /* [n_ropes] */
    int32_t **rope_axes;          /* [n_ropes], NULL: the rope has no axes */
    void *pool;
    void *slots;                  /* this rank's page of the first slot in host memory; NULL: there is none */
    uint32_t n_slots;
    char *kept;                   /* [max_num_batched_tokens][kept_stride] rows that operations keep; NULL: none */
    uint32_t kept_stride;
    char *staged;                 /* the batch's integers in device memory; NULL if steps read them in host memory */
    struct batch_arrays arrays;   /* inside `staged` */
    int32_t *token_types, *source_rows, *row_part; /* inside `staged` */
    struct tower *tower;          /* NULL: the program has none */
    uint32_t table_stride;
    struct captured *graphs;      /* [n_graphs] sorted by n_rows; at equal n_rows, graphs with a max_tokens limit come first */
    uint32_t n_graphs;
    int32_t *each_row;            /* [most rows of a graph + 1] 0, 1, 2, ...: seq_first_row if every row is a sequence */
    size_t logits_bytes, staged_bytes, ropes_bytes;
    uint32_t vocab_stride, max_logits_rows;
    uint32_t least_shared_rows;   /* ranks_least_shared_rows() */
    uint32_t n_undrawn;           /* rows of logits of the last step, whose draws wait for model_draw; 0: none do */
    uint64_t graphs_bytes;
    uint64_t *step_sums;          /* [plan.n_steps] of rank_check.h; NULL: it is off */
    char *read;                   /* host buffer for states that are copied from the arena */
    size_t read_bytes;
    uint32_t asleep;              /* of enum sleep_part */
    bool has_copy;                /* the host holds a copy of the sleeping weights */
};

/* Runs a step of padding rows for each graph that graphs_capture captures, which completes what kernels set up at first launch.
 * There are none if the backend cannot capture or graphs are off. */
enum rc graphs_warm(struct model *model, struct err *err);
/* Making a graph can wait for all work on the device. No rank may still be in a step then, as that step waits for this rank. */
enum rc graphs_capture(struct model *model, struct err *err);
/* After a weight update: captures the graphs again if the backend has chosen other kernels. Nothing is in flight. */
enum rc graphs_refresh(struct model *model, struct err *err);
void graphs_destroy(struct model *model);
/* Draws the tokens of a step whose start left them: the ranks share its rows, and its masks were not there. */
enum rc model_draw(struct model *model, struct batch *batch, struct err *err);
/* Whether a captured graph computes the batch: then its start enqueues few launches. */
bool model_replays(const struct model *model, const struct batch *batch);

/* ---- how a model is made ------------------------------------------------------------------------------------------------- */

/* Takes ownership of the program, also when it fails. */
enum rc model_new(struct program *program, const struct model_options *options, struct model **model, struct err *err);
/* The phases, in order. All ranks end a phase before any rank begins the next one (team.c). After a failure the caller destroys
 * the model. */
enum rc model_open(struct model *model, struct err *err); /* the backend */
enum rc model_load(struct model *model, const struct checkpoint *checkpoint, struct err *err); /* plan and weights */
/* Fills needs [n_layers + n_states]; returns the bytes of the largest attention layer in a page. */
size_t model_needs(const struct model *model, struct kv_need *needs);
enum rc model_lay_cache(struct model *model, const struct kv_need *needs, size_t layer_bytes, struct err *err);
enum rc model_size_pool(struct model *model, struct err *err); /* sets n_pages, which the caller may lower */
enum rc model_make_buffers(struct model *model, struct err *err);
enum rc model_choose_entries(struct model *model, struct err *err);
enum rc model_make_ropes(struct model *model, struct err *err); /* their frequencies and tables in device memory */
void model_free_ropes(struct model *model);
enum rc model_warm(struct model *model, struct err *err);    /* the first steps */
enum rc model_capture(struct model *model, struct err *err); /* their graphs */

/* ---- pages in host memory (moves.c) -------------------------------------------------------------------------------------- */

enum rc model_make_slots(struct model *model, struct err *err);
void model_free_slots(struct model *model);

/* ---- sleep (model_sleep.c): `release` and `restore` of struct runner for one rank ---------------------------------------- */

/* The first half of a release, which changes nothing: checks that the backend can, and copies the weights if `keeps`. It fails
 * if the host lacks memory. All ranks end it before any rank releases, so that such a failure costs no rank its pages. */
enum rc model_save(struct model *model, uint32_t parts, bool keeps, struct err *err);
enum rc model_release(struct model *model, uint32_t parts, bool keeps, struct err *err); /* the second half */
enum rc model_restore(struct model *model, uint32_t parts, struct err *err);

#endif
