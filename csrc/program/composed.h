/* composed.h: entries that a backend may leave NULL and the core then computes. A model chooses once, when it is made, between
 * the backend's function with the backend's context and the core's function with a struct composed. The core's functions
 * download their inputs, run the CPU backend's function in a context of one thread, and upload the results; those of begin and
 * copy_pages only copy. They are for bringing a backend up, not for speed. One thread at a time; nothing is allocated after the
 * choice. */
#ifndef LLMPY_PROGRAM_COMPOSED_H
#define LLMPY_PROGRAM_COMPOSED_H

#include "program.h"

#include <stddef.h>

#define COMPOSED_ENTRIES(ROW) \
    ROW(rope_table) ROW(scale_logits) ROW(spread_logits) ROW(position_scale) ROW(route) ROW(sample) ROW(copy_pages)

struct composed;

/* The function of each entry and the context that it takes. begin.run is NULL if steps read the host's arrays in place. */
struct entries {
#define ROW(name) \
    struct { \
        enum rc (*run)(void *ctx, const struct name##_args *args, struct err *err); \
        void *ctx; \
    } name;
    COMPOSED_ENTRIES(ROW)
    ROW(begin)
#undef ROW
    struct composed *composed; /* NULL: the backend has all that the program runs */
};

#define RUN_ENTRY(model, name, args, err) ((model)->entries.name.run((model)->entries.name.ctx, args, err))

/* The most that one call works on. */
struct composed_sizes {
    uint32_t max_rows, max_logits_rows, vocab_stride;
    size_t page_bytes;
};

bool entry_is_composed(size_t offset); /* offset of an entry in struct backend: the core can do without it */
/* ctx: the backend's open context. The caller calls entries_clear, also after an error. */
enum rc entries_choose(const struct backend *backend, void *ctx, const struct program *program,
                       const struct composed_sizes *sizes, struct entries *entries, struct err *err);
void entries_clear(struct entries *entries);
bool entries_allow_graphs(const struct entries *entries); /* no recorded step computes on the host */
/* Names of the entries that the program runs on the host, such as "rope_table, sample"; "": none. */
const char *entries_on_host(const struct entries *entries);

#endif
