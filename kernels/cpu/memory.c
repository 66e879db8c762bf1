/* Memory of the CPU backend. Small matrices share chunks of huge pages; each buffer is a separate map. Memory of weights and
 * pages can be freed while its addresses stay reserved. Weights already lie in host memory, so saving only keeps them and
 * makes them inaccessible. Bound by the system: freeing and zeroing 1 GiB takes 50 to 100 ms. */
#define _GNU_SOURCE
#include "cpu.h"

#include "../../csrc/base/clock.h"
#include "../../csrc/base/mem.h"

#include <string.h>

#define CHUNK_BYTES ((size_t)32 << 20) /* of weights; pages that are never written take no memory */

/* ---- weights ------------------------------------------------------------------------------------------------------------ */

struct weight_chunk {
    struct weight_chunk *next;
    char *memory;
    size_t size_bytes, used_bytes;
    uint32_t n_matrices;
};

static struct weight_chunk *chunk_create(size_t size_bytes)
{
    struct weight_chunk *chunk = mem_calloc(1, sizeof *chunk);
    if (!chunk)
        return NULL;
    chunk->size_bytes = size_bytes;
    chunk->memory = mem_map(size_bytes);
    if (chunk->memory)
        return chunk;
    mem_free(chunk);
    return NULL;
}

void *cpu_weights_take(struct cpu *cpu, size_t size_bytes, struct weight_chunk **out)
{
    struct weight_chunk *chunk = cpu->chunks;
    size_bytes = (size_bytes + 63) & ~(size_t)63;
    if (!chunk || chunk->size_bytes - chunk->used_bytes < size_bytes) {
        bool is_own = size_bytes > CHUNK_BYTES / 2; /* a separate chunk; small matrices go on filling the current one */
        chunk = chunk_create(is_own ? size_bytes : CHUNK_BYTES);
        if (!chunk)
            return NULL;
        struct weight_chunk **place = is_own && cpu->chunks ? &cpu->chunks->next : &cpu->chunks;
        chunk->next = *place;
        *place = chunk;
    }
    char *memory = chunk->memory + chunk->used_bytes;
    chunk->used_bytes += size_bytes;
    chunk->n_matrices++;
    *out = chunk;
    return memory;
}

void cpu_weights_release(struct cpu *cpu, struct weight_chunk *chunk)
{
    if (--chunk->n_matrices)
        return;
    struct weight_chunk **place = &cpu->chunks;
    while (*place != chunk)
        place = &(*place)->next;
    *place = chunk->next;
    mem_unmap(chunk->memory, chunk->size_bytes);
    mem_free(chunk);
}

/* ---- buffers ------------------------------------------------------------------------------------------------------------ */

struct cpu_buffer { /* allocated by pool_create */
    struct cpu_buffer *next;
    void *memory;
    size_t size_bytes;
    uint32_t use;
};

enum rc cpu_buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err)
{
    (void)ctx;
    *buffer = mem_map(size_bytes);
    if (!*buffer)
        return err_set(err, RC_MEMORY, "cpu: no memory for a buffer of %zu bytes", size_bytes);
    return RC_OK;
}

void cpu_buffer_destroy(void *ctx, void *memory, size_t size_bytes)
{
    struct cpu *cpu = ctx;
    struct cpu_buffer **place = &cpu->buffers, *buffer;
    while (*place && (*place)->memory != memory)
        place = &(*place)->next;
    if ((buffer = *place)) {
        *place = buffer->next;
        mem_free(buffer);
    }
    mem_unmap(memory, size_bytes);
}

enum rc cpu_pool_create(void *ctx, uint32_t use, size_t size_bytes, void **memory, struct err *err)
{
    struct cpu *cpu = ctx;
    struct cpu_buffer *buffer = mem_calloc(1, sizeof *buffer);
    if (!buffer)
        return err_set(err, RC_MEMORY, "cpu: out of memory");
    enum rc rc = cpu_buffer_create(ctx, size_bytes, memory, err);
    if (rc) {
        mem_free(buffer);
        return rc;
    }
    *buffer = (struct cpu_buffer){cpu->buffers, *memory, size_bytes, use};
    cpu->buffers = buffer;
    return RC_OK;
}

/* ---- sleep -------------------------------------------------------------------------------------------------------------- */

static void hide(struct cpu *cpu, uint32_t use)
{
    for (struct weight_chunk *chunk = cpu->chunks; chunk && use == MEMORY_WEIGHTS; chunk = chunk->next)
        mem_hide(chunk->memory, chunk->size_bytes, cpu->is_saved[use]);
    for (struct cpu_buffer *buffer = cpu->buffers; buffer; buffer = buffer->next)
        if (buffer->use == use)
            mem_hide(buffer->memory, buffer->size_bytes, cpu->is_saved[use]);
}

static bool show(struct cpu *cpu, uint32_t use)
{
    bool is_shown = true;
    for (struct weight_chunk *chunk = cpu->chunks; chunk && use == MEMORY_WEIGHTS; chunk = chunk->next)
        is_shown = is_shown && !mem_show(chunk->memory, chunk->size_bytes);
    for (struct cpu_buffer *buffer = cpu->buffers; buffer; buffer = buffer->next)
        if (buffer->use == use)
            is_shown = is_shown && !mem_show(buffer->memory, buffer->size_bytes);
    return is_shown;
}

enum rc cpu_pool_release(void *ctx, uint32_t use, struct err *err)
{
    struct cpu *cpu = ctx;
    (void)err;
    hide(cpu, use);
    cpu->is_hidden[use] = true;
    return RC_OK;
}

enum rc cpu_pool_restore(void *ctx, uint32_t use, struct err *err)
{
    struct cpu *cpu = ctx;
    if (!cpu->is_hidden[use])
        return RC_OK;
    if (!show(cpu, use)) {
        hide(cpu, use);
        return err_set(err, RC_DEVICE_MEMORY, "cpu: the system has no memory for the %s; close() another engine",
                       use == MEMORY_WEIGHTS ? "weights" : "KV cache");
    }
    cpu->is_hidden[use] = false;
    return RC_OK;
}

enum rc cpu_pool_save(void *ctx, uint32_t use, struct err *err)
{
    struct cpu *cpu = ctx;
    (void)err;
    cpu->is_saved[use] = true;
    return RC_OK;
}

void cpu_pool_forget(void *ctx, uint32_t use)
{
    struct cpu *cpu = ctx;
    cpu->is_saved[use] = false;
    if (cpu->is_hidden[use])
        hide(cpu, use);
}

/* ---- pages in host memory ------------------------------------------------------------------------------------------------ */

static enum rc create_slots(void *ctx, size_t size_bytes, void **host, struct err *err)
{
    *host = NULL;
    return size_bytes ? cpu_buffer_create(ctx, size_bytes, host, err) : RC_OK;
}

static void destroy_slots(void *ctx, void *host, size_t size_bytes)
{
    if (host)
        cpu_buffer_destroy(ctx, host, size_bytes);
}

static enum rc cpu_move(void *ctx, const struct move_args *args, struct err *err)
{
    struct cpu *cpu = ctx;
    (void)err;
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN; way++) {
        const struct move_list *list = &args->lists[way];
        double begun = list->n_moves ? seconds_now() : 0;
        const bool is_lent = way == MOVE_IN && args->source;
        char *base = is_lent ? (char *)args->source : (char *)args->host;
        const size_t slot_bytes = is_lent ? args->page_bytes : args->slot_bytes;
        for (uint32_t i = 0; i < list->n_moves; i++) {
            char *page = (char *)args->pool + (size_t)list->moves[i].page * args->page_bytes,
                 *slot = base + (size_t)list->moves[i].slot * slot_bytes;
            memcpy(way == MOVE_OUT ? slot : page, way == MOVE_OUT ? page : slot, args->page_bytes);
        }
        *(is_lent ? &cpu->moved.source_bytes : &cpu->moved.bytes[way]) += list->n_moves * args->page_bytes;
        *(is_lent ? &cpu->moved.source_seconds : &cpu->moved.seconds[way]) += list->n_moves ? seconds_now() - begun : 0;
        cpu->moved.ended[way] = list->number;
    }
    return RC_OK;
}

static enum rc cpu_lend(void *ctx, void *reader, struct err *err)
{
    (void)ctx, (void)reader, (void)err;
    return RC_OK;
}

static enum rc cpu_poll_moves(void *ctx, struct move_state *state, struct err *err)
{
    (void)err;
    *state = ((struct cpu *)ctx)->moved;
    return RC_OK;
}

const struct moves cpu_moves = {sizeof cpu_moves, create_slots, destroy_slots, cpu_move, cpu_poll_moves, cpu_lend, NULL};
