#include "follower.h"

#include "../base/mem.h"
#include "hosts.h"
#include "model_state.h"

struct step_limits team_limits(const struct team *team)
{
    const struct model *m = team_model(team, 0);
    const struct kv_layout *layout = model_layout(m);
    uint32_t max_seqs = m->options.max_num_seqs;
    return (struct step_limits){
        .max_rows = m->options.max_num_batched_tokens, .max_seqs = max_seqs,
        .max_copies = max_seqs * (layout->n_groups + layout->n_state_pages), .n_pages = m->n_pages,
        .vocab_size = m->program->vocab_size, .max_model_len = m->options.max_model_len,
        .n_token_types = program_n_token_types(m->program), .n_tables = kv_layout_n_tables(layout), .stride = m->table_stride,
    };
}

/* What the loop needs, allocated once. */
struct follower {
    struct team *team;
    struct step_limits limits;
    struct page_tables tables;
    struct batch batch;
    size_t most_bytes;
    void *message;
};

static enum rc run_step(struct follower *f, size_t n_bytes, struct err *err)
{
    uint64_t step;
    enum rc rc = step_message_read(f->message, n_bytes, &f->limits, &f->tables, &f->batch, &step, err);
    if (!rc)
        rc = team_start(f->team, &f->batch, err);
    page_tables_settle(&f->tables);
    if (!rc)
        rc = team_finish(f->team, &f->batch, err);
    return rc ? rc : hosts_send_done(team_hosts(f->team), step, err);
}

/* An order that fails here leaves everything as it was; host 0 then undoes it on the other hosts. */
static enum rc run_order(struct follower *f, size_t n_bytes, struct err *err)
{
    struct err result = {0};
    uint64_t number;
    enum rc rc = team_obey(f->team, f->message, n_bytes, &number, &result);
    return hosts_send_result(team_hosts(f->team), rc, number, &result, err);
}

static enum rc run_calls(struct follower *f, struct err *err)
{
    for (;;) {
        size_t n_bytes;
        enum wire_kind kind;
        enum rc rc = hosts_read_call(team_hosts(f->team), &kind, f->message, f->most_bytes, &n_bytes, err);
        if (rc || kind == WIRE_CLOSE)
            return rc;
        rc = kind == WIRE_ORDER ? run_order(f, n_bytes, err) : run_step(f, n_bytes, err);
        if (rc)
            return rc;
    }
}

enum rc follower_run(struct team *team, struct err *err)
{
    struct hosts *hosts = team_hosts(team);
    struct err failure = {0};
    if (!hosts || hosts_is_first(hosts))
        return err_set(err, RC_CONFIG, "hosts: wanted a host from 1 on to follow host 0, have %s",
                       hosts ? "host 0" : "a model in one process");
    struct follower f = {.team = team, .limits = team_limits(team)};
    f.most_bytes = step_message_most_bytes(&f.limits);
    if (f.most_bytes < team_most_order_bytes())
        f.most_bytes = team_most_order_bytes();
    f.message = mem_alloc(f.most_bytes);
    enum rc rc = f.message ? RC_OK : err_set(&failure, RC_MEMORY, "hosts: out of memory");
    if (!rc)
        rc = page_tables_create(&f.tables, f.limits.n_tables, f.limits.max_seqs, f.limits.stride, &failure);
    if (!rc)
        rc = batch_create(&f.batch, &f.tables, f.limits.max_rows, 1, f.limits.max_copies + 1, &failure);
    if (!rc)
        rc = run_calls(&f, &failure);
    if (rc) {
        hosts_end(hosts, failure.message);
        if (err)
            *err = failure;
    }
    batch_destroy(&f.batch);
    page_tables_destroy(&f.tables);
    mem_free(f.message);
    return rc;
}
