/* rank_check.c: with LLMPY_SYNC=2, whether the ranks of this process have the same bytes in values that are equal on all. */
#include "rank_check.h"

#include "../base/mem.h"
#include "team_state.h"

#include <inttypes.h>
#include <string.h>

bool rank_check_is_on(const struct model *m)
{
    return m->options.is_synchronous && m->options.checks_ranks && m->options.n_ranks > 1;
}

/* Whether all outputs of a step are equal on all ranks. */
static bool is_equal(const struct step *step)
{
    bool has_any = false;
    for (uint32_t role = 0; role < ROLE_COUNT && step->code == STEP_OPERATION; role++) {
        const struct op *op = step->ops[role];
        bool is_before = op && role != ROLE_MAIN && step->ops[ROLE_MAIN]->code == OP_GATHER && role == ROLE_SUM;
        if (op && !op->is_equal && !is_before)
            return false;
        has_any |= op != NULL;
    }
    return has_any;
}

static uint64_t add_bytes(uint64_t sum, const unsigned char *bytes, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        sum = (sum ^ bytes[i]) * 0x100000001B3u;
    return sum;
}

/* width: of a row, in bytes. */
static enum rc add_rows(const struct model *m, const struct place *place, size_t width, uint32_t n_rows, uint64_t *sum,
                        struct err *err)
{
    size_t pitch = (size_t)place->stride * m->item_bytes;
    const char *rows = m->arena + place->offset * m->item_bytes;
    char *read = NULL;
    enum rc rc = RC_OK;
    if (!width || !n_rows)
        return RC_OK;
    if (!m->backend->traits->has_host_memory) {
        size_t n_bytes = (n_rows - 1) * pitch + width;
        if (!(read = mem_alloc(n_bytes)))
            return err_set(err, RC_MEMORY, "LLMPY_SYNC: out of memory");
        rc = m->backend->download(m->ctx, read, rows, n_bytes, err);
        rows = read;
    }
    for (uint32_t row = 0; row < n_rows && !rc; row++)
        *sum = add_bytes(*sum, (const unsigned char *)rows + row * pitch, width);
    mem_free(read);
    return rc;
}

enum rc rank_check_note(struct running *run, uint32_t index)
{
    struct model *m = run->m;
    const struct step *step = &m->plan.steps[index];
    const struct place *places[] = {&step->out, &step->normed, &step->next};
    uint32_t n_rows = step->on_selected ? run->n_wanted_rows : step->of_all_ranks ? run->n_all_rows : run->view.n_rows;
    uint64_t sum = 0xCBF29CE484222325u;
    enum rc rc = RC_OK;
    if (!is_equal(step) || (m->program->is_by_data && !step->of_all_ranks)) /* by data all else is of the rank's own rows */
        return RC_OK;
    const struct op *op = step->ops[ROLE_MAIN];
    for (uint32_t i = 0; i < 3 && !rc; i++) {
        size_t width = (size_t)places[i]->width * m->item_bytes;
        if (op->code == OP_ROUTE) /* its value has room to spare */
            width = i ? 0 : op->route.n_chosen * sizeof(struct route);
        rc = add_rows(m, places[i], width, n_rows, &sum, run->err);
    }
    m->step_sums[index] = sum;
    return rc;
}

enum rc rank_check_compare(struct team *team, struct err *err)
{
    const struct model *first = team->models[0];
    if (!rank_check_is_on(first))
        return RC_OK;
    for (uint32_t i = 0; i < first->plan.n_steps; i++)
        for (uint32_t rank = 1; rank < team->n_ranks; rank++) {
            char text[256] = "";
            if (team->models[rank]->step_sums[i] == first->step_sums[i])
                continue;
            plan_step_text(&first->plan, first->program, i, text, sizeof text);
            err_set(err, RC_DEVICE, "operation %u (%s) has given other values than on rank %u", i, text, team->first_rank);
            err_name(err, "ranks", NULL);
            team_name_rank(team, rank, err);
            return RC_DEVICE;
        }
    return RC_OK;
}
