/* gather.cu: meet and gather. A gather has several ways (GATHER_WAYS): each rank stores what it has of a value into all ranks'
 * memory, 16 bytes a thread and turn, and meets them (gather_push.cuh); or it sends packets, for few bytes (gather_ll.cuh).
 * Values are final: they are copied, never added, so all bits are kept, also of -0 and of a NaN.
 *
 * A norm of the whole rows runs in the same launch. A block has the threads of rms_norm for rows of this size and that
 * operation's functions (row_norm.cuh), so its bits are equal. Heads, rows at odd addresses and rows of more than 16,384
 * columns are normed by a second launch.
 *
 * All ranks must choose the same way with the same grid. So both depend only on what is equal on all ranks.
 *
 * Bound by a flag's way to the other device, 1.3 us, and from 1 MB on by the link, 360 GB/s a direction. */
#include "gather.cuh"
#include "../core/ways.cuh"
#include "gather_ll.cuh"
#include "gather_push.cuh"
#include "link.cuh"

#define MAX_PARTS 4u     /* chains of a thread */
#define LL_PARTS 2u      /* the same, of rows in packets; one of float32, as the slots have no room for more */

/* The ids that this rank has drawn. The kernel that resolves ids below 0 (staging.cu) reads those of the other slot, so a rank
 * that is still in the step before is not disturbed. */
struct drawn_ids {
    const int32_t *from;
    int32_t *to[MAX_RANKS];
    uint32_t n_to, n;
};

static __global__ void __launch_bounds__(MEETING_THREADS)
meet_step(const __grid_constant__ struct meeting meeting, const __grid_constant__ drawn_ids ids)
{
    start_next_if_alone(meeting);
    wait_for_input();
    const uint32_t number = next_number(meeting);
    for (uint32_t i = threadIdx.x; i < ids.n; i += blockDim.x) {
        const int32_t id = ids.from[i];
        for (uint32_t r = 0; r < ids.n_to; r++)
            ids.to[r][i] = id;
    }
    meet_ranks(meeting, number);
    if (!threadIdx.x)
        meeting.state->step = number;
}

/* ---- what a rank stores -------------------------------------------------------------------------------------------------- */

static enum rc refuse_place(const struct gather_args *args, const struct cuda_team *team, uint32_t purpose, struct err *err)
{
    return err_set(err, RC_INTERNAL, "gather: %u rows of %u columns do not lie in the rank's shared %s of %zu bytes",
                   args->n_rows, args->whole.width, purpose == COMM_LOGITS ? "logits" : "arena", team->size_bytes[purpose]);
}

static enum rc check_args(const struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    const bool has_columns = args->kind == GATHER_COLUMNS || is_of_logits(args);
    const uint32_t a = args->a.width, b = args->b.width, part_columns = args->whole.width / max(args->n_chosen, 1u);
    if (args->kind > GATHER_TO_OWNERS || (args->kind == GATHER_TO_OWNERS && cuda->team->link))
        return err_set(err, RC_INTERNAL, "gather: there is no kind %u", args->kind);
    if (has_columns && (uint64_t)args->first + args->n_columns > part_columns)
        return err_set(err, RC_INTERNAL, "gather: columns %u to %llu do not lie in %u columns", args->first,
                       (unsigned long long)args->first + args->n_columns, part_columns);
    if (a | b && (args->n_chosen || args->kind != GATHER_COLUMNS || a != args->n_columns || (b && b != a)))
        return err_set(err, RC_INTERNAL, "gather: terms of %u and %u columns do not fit %u columns of kind %u", a, b,
                       args->n_columns, args->kind);
    if (args->kind == GATHER_ROWS && !args->token_ids)
        return err_set(err, RC_INTERNAL, "gather: rows have no token ids");
    if (args->kind == GATHER_ROUTES && (!args->routes || !args->n_chosen || args->whole.width % args->n_chosen))
        return err_set(err, RC_INTERNAL, "gather: %u columns are not %u equal parts with routes", args->whole.width,
                       args->n_chosen);
    const uint32_t purpose = is_of_logits(args) ? COMM_LOGITS : COMM_ARENA;
    const size_t item = is_of_logits(args) || cuda->dtype == DTYPE_F32 ? 4 : 2;
    const char *base = cuda->team->memory[purpose][cuda->rank], *data = (const char *)args->whole.data;
    const size_t n_bytes = ((size_t)(args->n_rows - 1) * args->whole.stride + args->whole.width) * item;
    const size_t size = cuda->team->size_bytes[purpose];
    if (!base || data < base || (size_t)(data - base) > size || n_bytes > size - (size_t)(data - base))
        return refuse_place(args, cuda->team, purpose, err);
    return RC_OK;
}

/* is_sent: packets bring the part to the other ranks, so the kernel stores it to this rank's own memory at most. */
template <class T> static struct own_part part_of_rank(const struct cuda *cuda, const struct gather_args *args, bool is_sent)
{
    const struct cuda_team *team = cuda->team;
    const uint32_t purpose = is_of_logits(args) ? COMM_LOGITS : COMM_ARENA;
    const uint32_t n_targets = args->kind == GATHER_TO_FIRST ? 1 : team->n_ranks;
    const T *own = own_values<T>(args);
    struct own_part part = part_of_args<T>(args);
    const size_t offset = (size_t)((char *)own - team->memory[purpose][cuda->rank]);
    const bool is_in_place = part.a == own && !part.b && (args->n_rows == 1 || part.a_stride == part.to_stride);
    part.has_owners = args->kind == GATHER_TO_OWNERS;
    for (uint32_t r = 0; r < team->n_ranks && part.has_owners; r++)
        part.to[part.n_to++] = r == cuda->rank && is_in_place ? NULL : team->memory[purpose][r] + offset;
    if (part.has_owners)
        return part;
    for (uint32_t i = 0; i < team->n_ranks; i++) { /* from this rank on: not all ranks store to the same one at a time */
        const uint32_t r = (cuda->rank + i) % team->n_ranks;
        if (r == cuda->rank ? r < n_targets && !is_in_place : r < n_targets && !is_sent)
            part.to[part.n_to++] = team->memory[purpose][r] + offset;
    }
    return part;
}

/* ---- ways ---------------------------------------------------------------------------------------------------------------- */

struct gather_problem {
    struct cuda *cuda;
    const struct gather_args *args;
    size_t item_bytes, n_bytes; /* of a value; of the whole one */
};

struct gather_way {
    const char *name;
    uint32_t devices;    /* enum way_devices */
    size_t most_bytes;
    bool is_normed, is_combined; /* with the norm of the gathered rows; with the sums over routes */
    bool (*fits)(const struct gather_problem &); /* NULL: takes everything within the limits before */
    void (*run)(const struct gather_problem &);
};

/* Blocks of a meeting, at most. */
static uint32_t most_blocks(const struct gather_problem &p, bool is_normed)
{
    return p.cuda->team->shares_device ? SHARED_BLOCKS : is_normed ? MEETING_BLOCKS : PLAIN_BLOCKS;
}

static uint32_t blocks_of(uint64_t wanted, uint32_t most)
{
    return wanted < 1 ? 1 : wanted < most ? (uint32_t)wanted : most;
}

static uint32_t push_grid(const struct gather_problem &p)
{
    const struct gather_args *args = p.args;
    const uint64_t eights = args->is_stored ? 1 : (uint64_t)args->n_rows * ceil_div(args->whole.width, 8);
    const uint64_t of_rank = (eights / p.cuda->team->n_ranks + MEETING_THREADS - 1) / MEETING_THREADS;
    return blocks_of(args->norm ? args->n_rows : of_rank, most_blocks(p, args->norm));
}

static uint32_t ll_grid(const struct gather_problem &p)
{
    const uint64_t eights = (uint64_t)p.args->n_rows * p.args->whole.width / 8;
    return blocks_of((eights + MEETING_THREADS - 1) / MEETING_THREADS, most_blocks(p, false));
}

static bool has_eights(const struct gather_problem &p, const struct view &v)
{
    return (uintptr_t)v.data % 16 == 0 && v.stride * p.item_bytes % 16 == 0 && v.width % 8 == 0;
}

/* Can a block norm the gathered rows? */
static bool fits_norm(const struct gather_problem &p)
{
    const struct rms_norm_args *norm = p.args->norm;
    return norm->n_heads == 1 && has_eights(p, norm->x) && has_eights(p, norm->out) && (uintptr_t)norm->weight % 16 == 0 &&
           norm->x.width <= 8 * MEETING_THREADS * MAX_PARTS;
}

/* Do the slots of a block have room for its eights of columns? */
static bool fits_slots(const struct gather_problem &p, uint64_t eights_of_block)
{
    return !p.args->is_stored && has_eights(p, p.args->whole) &&
           eights_of_block * 8 * p.item_bytes <= SLOT_PACKETS * sizeof(uint2);
}

/* Do packets bring it: eights of columns? */
static bool fits_packets(const struct gather_problem &p, uint64_t eights_of_block)
{
    const struct gather_args *args = p.args;
    return args->kind == GATHER_COLUMNS && !args->n_chosen && args->unit && args->unit % 8 == 0 &&
           fits_slots(p, eights_of_block);
}

/* Of a block of ll_grid. */
static uint64_t eights_of_ll_block(const struct gather_problem &p)
{
    const uint64_t eights = (uint64_t)p.args->n_rows * p.args->whole.width / 8, lanes = ll_grid(p) * MEETING_THREADS;
    return (eights + lanes - 1) / lanes * MEETING_THREADS;
}

static bool fits_ll(const struct gather_problem &p)
{
    return fits_packets(p, eights_of_ll_block(p));
}

static bool fits_ll_routes(const struct gather_problem &p)
{
    return p.args->kind == GATHER_ROUTES && p.args->whole.width / p.args->n_chosen % 8 == 0 &&
           fits_slots(p, eights_of_ll_block(p));
}

/* Threads of a block of gather_ll_combine: the slots have room for an eight of each route of each. */
static uint32_t combining_threads(const struct gather_problem &p)
{
    const uint32_t room = (uint32_t)(SLOT_PACKETS * sizeof(uint2) / (8 * p.item_bytes * p.args->n_chosen)) / 32 * 32;
    return room < 128 ? room : 128;
}

static uint32_t combining_grid(const struct gather_problem &p)
{
    return p.args->n_rows * ceil_div(p.args->combine->y.width, 8 * combining_threads(p));
}

static bool fits_ll_combine(const struct gather_problem &p)
{
    const struct combine_args *combine = p.args->combine;
    return p.args->kind == GATHER_ROUTES && !p.args->is_stored && combining_threads(p) && has_eights(p, p.args->whole) &&
           has_eights(p, combine->y) && combining_grid(p) <= most_blocks(p, true);
}

/* A block has one row. */
static bool fits_ll_norm(const struct gather_problem &p)
{
    const uint32_t chains = ceil_div(p.args->whole.width, 8), threads = row_threads(chains), parts = ceil_div(chains, threads);
    return fits_norm(p) && parts <= LL_PARTS && p.args->n_rows <= most_blocks(p, true) &&
           fits_packets(p, (uint64_t)parts * threads);
}

static bool has_parts(const struct gather_problem &p)
{
    return p.args->n_chosen;
}

/* Calls f with a value of the gathered type. */
template <class F> static void visit_gathered(const struct gather_problem &p, F f)
{
    if (is_of_logits(p.args))
        f(float());
    else
        visit_type(p.cuda->dtype, f);
}

template <class T> static whole_norm<T> norm_of(const struct gather_args *args)
{
    const struct rms_norm_args *norm = args->norm;
    return {rows<T>(args->whole), rows<T>(norm->out), norm->weight, args->n_rows, args->whole.width, norm->eps};
}

static void run_ll_norm(const struct gather_problem &p)
{
    const uint32_t chains = ceil_div(p.args->whole.width, 8), threads = row_threads(chains);
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        const gathered<T> to = {rows<T>(p.args->whole), p.args->first};
        const auto kernel = chains <= threads ? gather_ll_norm<T, 1> : gather_ll_norm<T, LL_PARTS * 2 / sizeof(T)>;
        launch(p.cuda, kernel, p.args->n_rows, threads, 0, meeting_of(p.cuda, false), part_of_rank<T>(p.cuda, p.args, true),
               to, norm_of<T>(p.args));
    });
}

static void run_push_norm(const struct gather_problem &p)
{
    const uint32_t chains = ceil_div(p.args->whole.width, 8), threads = row_threads(chains), parts = ceil_div(chains, threads);
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        const auto kernel = parts == 1   ? gather_push_norm<T, 1>
                            : parts == 2 ? gather_push_norm<T, 2>
                                         : gather_push_norm<T, MAX_PARTS>;
        launch(p.cuda, kernel, push_grid(p), threads, 0, meeting_of(p.cuda, false), part_of_rank<T>(p.cuda, p.args, false),
               norm_of<T>(p.args));
    });
}

static void run_ll(const struct gather_problem &p)
{
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        const gathered<T> to = {rows<T>(p.args->whole), p.args->first};
        launch(p.cuda, gather_ll<T>, ll_grid(p), MEETING_THREADS, 0, meeting_of(p.cuda, false),
               part_of_rank<T>(p.cuda, p.args, true), to);
    });
}

static void run_ll_routes(const struct gather_problem &p)
{
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        const gathered<T> to = {rows<T>(p.args->whole), 0};
        launch(p.cuda, gather_ll_routes<T>, ll_grid(p), MEETING_THREADS, 0, meeting_of(p.cuda, false),
               part_of_rank<T>(p.cuda, p.args, true), to);
    });
}

static void run_ll_combine(const struct gather_problem &p)
{
    const struct combine_args *combine = p.args->combine;
    struct mixture m = {};
    m.n_chosen = combine->n_chosen;
    m.routes = combine->routes;
    m.route_stride = combine->route_stride;
    m.is_input_scaled = combine->is_input_scaled;
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        launch(p.cuda, gather_ll_combine<T>, combining_grid(p), combining_threads(p), 0, meeting_of(p.cuda, false),
               part_of_rank<T>(p.cuda, p.args, true), m, rows<T>(combine->results), rows<T>(combine->y));
    });
}

static void run_push_parts(const struct gather_problem &p)
{
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        launch(p.cuda, gather_push_parts<T>, push_grid(p), MEETING_THREADS, 0, meeting_of(p.cuda, false),
               part_of_rank<T>(p.cuda, p.args, false));
    });
}

static void run_push(const struct gather_problem &p)
{
    visit_gathered(p, [&](auto value) {
        using T = decltype(value);
        launch(p.cuda, gather_push<T>, push_grid(p), MEETING_THREADS, 0, meeting_of(p.cuda, false),
               part_of_rank<T>(p.cuda, p.args, false));
    });
}

static const struct gather_way GATHER_WAYS[] = {
    /* name         devices   bytes     norm   combine fits             run */
    {"ll_norm",     ANY_GPU,  1u << 20, true,  false,  fits_ll_norm,    run_ll_norm},
    {"push_norm",   ANY_GPU,  SIZE_MAX, true,  false,  fits_norm,       run_push_norm},
    {"ll",          ANY_GPU,  1u << 19, false, false,  fits_ll,         run_ll},
    {"ll_combine",  ANY_GPU,  1u << 19, false, true,   fits_ll_combine, run_ll_combine},
    {"ll_routes",   ANY_GPU,  1u << 19, false, false,  fits_ll_routes,  run_ll_routes},
    {"push_parts",  ANY_GPU,  SIZE_MAX, false, false,  has_parts,       run_push_parts},
    {"push",        ANY_GPU,  SIZE_MAX, false, false,  NULL,            run_push},
};

struct way_name cuda_gather_way(uint32_t row)
{
    return name_of_way(GATHER_WAYS, row);
}

static bool takes(const struct gather_way &way, const struct gather_problem &p)
{
    return p.n_bytes <= way.most_bytes && (p.args->norm || !way.is_normed) && (p.args->combine || !way.is_combined) &&
           (!way.fits || way.fits(p));
}

/* ---- calls --------------------------------------------------------------------------------------------------------------- */

/* Runs what the gather has not done of the operations behind it. */
static enum rc finish(struct cuda *cuda, const struct gather_args *args, bool is_normed, bool is_combined, struct err *err)
{
    enum rc rc = args->norm && !is_normed ? cuda_rms_norm(cuda, args->norm, err) : RC_OK;
    return rc || !args->combine || is_combined ? rc : cuda_combine(cuda, args->combine, err);
}

enum rc cuda_gather(void *ctx, const struct gather_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!cuda->team)
        return err_set(err, RC_INTERNAL, "gather: the context is not connected to other ranks");
    if (!args->n_rows)
        return RC_OK;
    enum rc rc = check_args(cuda, args, err);
    if (rc)
        return rc;
    if (cuda->team->link) {
        rc = link_gather(cuda, args, err);
        return rc ? rc : finish(cuda, args, false, false, err);
    }
    const size_t item_bytes = is_of_logits(args) || cuda->dtype == DTYPE_F32 ? 4 : 2;
    const struct gather_problem problem = {cuda, args, item_bytes, (size_t)args->n_rows * args->whole.width * item_bytes};
    const struct gather_way *way = find_way<WAYS_GATHER>(cuda, GATHER_WAYS, problem);
    way->run(problem);
    rc = launched(err, "gather");
    return rc ? rc : finish(cuda, args, way->is_normed, way->is_combined, err);
}

enum rc cuda_meet(void *ctx, const struct meet_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct cuda_team *team = cuda->team;
    if (!team)
        return err_set(err, RC_INTERNAL, "meet: the context is not connected to other ranks");
    enum rc rc = link_check(team->link, err); /* the processes themselves meet in gathers alone */
    if (rc)
        return rc;
    if ((uint64_t)args->first_task + args->n_tasks > cuda->max_tasks)
        return err_set(err, RC_INTERNAL, "meet: wanted at most %u drawn ids, have %llu", cuda->max_tasks,
                       (unsigned long long)args->first_task + args->n_tasks);
    const size_t first = (size_t)(args->slot & 1) * cuda->max_tasks + args->first_task;
    struct drawn_ids ids = {};
    ids.from = cuda->sampled + first;
    ids.n = args->n_tasks;
    for (uint32_t r = 0; r < team->n_ranks; r++)
        if (r != cuda->rank)
            ids.to[ids.n_to++] = team->ranks[r]->sampled + first;
    launch(cuda, meet_step, 1, MEETING_THREADS, 0, meeting_of(cuda, true), ids);
    return launched(err, "meet");
}
