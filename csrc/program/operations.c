#include "running.h"

static enum rc run_layer_norm(struct running *run, const struct op *op, uint32_t n_rows, struct view x, struct view out)
{
    const struct model *m = run->m;
    struct layer_norm_args args = {n_rows, x, out, weights_vector(m->weights, op->weight[0]),
                                   weights_vector(m->weights, op->weight[1]), op->f[0]};
    return m->backend->layer_norm(m->ctx, &args, run->err);
}

static enum rc run_row_attention(struct running *run, const struct op *op, const struct view *in, struct view out)
{
    const struct model *m = run->m;
    struct row_attention_args args = {&run->view, op->u[0], op->u[1], in[0].width / op->u[0], op->f[0], in[0], in[1], in[2],
                                      out};
    return m->backend->row_attention(m->ctx, &args, run->err);
}

enum rc operation_run(struct running *run, const struct step *step)
{
    const struct model *m = run->m;
    const struct op *op = step->op;
    uint32_t n_rows = step->on_selected ? run->n_wanted_rows : run->view.n_rows;
    struct view in[OP_INPUTS], out = view_of(m, step->out);
    for (uint32_t i = 0; i < OP_INPUTS; i++)
        in[i] = view_of(m, step->in[i]);
    switch (op->code) {
    case OP_ACT: return m->backend->act(m->ctx, &(struct act_args){n_rows, op->u[0], in[0], out}, run->err);
    case OP_LAYER_NORM: return run_layer_norm(run, op, n_rows, in[0], out);
    case OP_ROW_ATTENTION: return run_row_attention(run, op, in, out);
    default: return err_set(run->err, RC_INTERNAL, "%s: wanted an operation that is run alone", op_name(op->code));
    }
}

bool operation_is_known(const struct backend *b, uint32_t code)
{
    switch (code) {
    case OP_ACT: return b->act != NULL;
    case OP_LAYER_NORM: return b->layer_norm != NULL;
    case OP_ROW_ATTENTION: return b->row_attention != NULL;
    default: return true;
    }
}
