/* meeting.cuh: how kernels of several ranks meet. A rank's kernel stores into the memory of other ranks. Each of its blocks
 * then stores a number into a flag of the same block on every other rank, and waits for their numbers in its own flags. All
 * ranks start a meeting with the same number of blocks. A block's stores are performed before its flag (release); a block that
 * has seen a flag sees the stores before it (acquire).
 *
 * Numbers. Each block counts the meetings that it has come to, in device memory. So a captured graph needs no numbers of its
 * own and can be replayed any number of times, mixed with other graphs and with launches outside of graphs; and a block of all
 * ranks has the same count, because all ranks make the same meetings with the same grids. Ranks are at most one meeting apart:
 * a flag is one or two behind the number that is waited for, equal to it, or one ahead. So a signed difference of 32 bits is
 * right however often the count has passed 2^32, even for a block that only large grids have.
 *
 * Packets. A few values can travel without flags of their own: 8 bytes of a packet are 4 bytes of data and the number of the
 * meeting, stored and loaded as one. So the data have come when the number has, and no order of stores is needed. A rank has
 * two sets of slots for packets, by the parity of the number. A block stores packets n + 2 over packets n; all other ranks have
 * read those, because it has come to meeting n + 1 with them. Slots belong to one block, as numbers do. A slot may keep the
 * packet of an old number while others are used. So every 2^30 meetings a block clears its slots; thus no number comes again
 * while it lies in a slot. A cleared slot of even numbers has an odd number, and the other way round.
 *
 * Waits end by the clock, or soon after the host has set the abort word. Then the wait records its failure for the host, and
 * the kernel goes on with incomplete values, which the host discards. Later waits of the rank end soon. */
#ifndef LLMPY_CUDA_MEETING_CUH
#define LLMPY_CUDA_MEETING_CUH

#include "../core/launch.cuh"

#define MAX_RANKS 8u
#define MEETING_BLOCKS 128u  /* of a grid that waits, at most */
#define MEETING_THREADS 512u /* of its blocks, at most */
#define PLAIN_BLOCKS 32u     /* of a gather without a norm: they saturate the link */
#define SHARED_BLOCKS 8u     /* of ranks that share a device: all their grids and clusters of 8 blocks fit beside each other */
#define SLOT_PACKETS 2048u   /* that a block stores to a rank in one meeting, at most */
#define CLEAR_EVERY (1u << 30) /* meetings */
#define TURNS 1024u          /* looks at a flag between two looks at the clock and at the abort word */

enum wait_failure { WAIT_OK, WAIT_LATE, WAIT_ABORTED };

/* A rank's first failure, in pinned memory. */
struct rank_failure {
    uint32_t reason, source; /* enum wait_failure; the rank that was waited for */
    uint32_t gather;         /* its number in the step; 0: the start of the step */
};

/* A rank's device memory for meetings. */
struct rank_state {
    uint32_t flags[MAX_RANKS][MEETING_BLOCKS]; /* [rank that stores][block] */
    uint32_t met[MEETING_BLOCKS];              /* meetings that a block has come to */
    uint32_t step;                             /* met[0] at the start of the step */
    uint32_t has_failed;
    alignas(128) uint32_t is_alone; /* no other rank can need the room that the next kernel's blocks take before their wait */
};

/* Packets for a rank, [parity of the number][block]. */
struct rank_slots {
    uint4 packets[2][MEETING_BLOCKS][SLOT_PACKETS];
};

/* A meeting, as a kernel of one rank sees it. */
struct meeting {
    struct rank_state *state;    /* of this rank */
    uint32_t *flags[MAX_RANKS];  /* on each rank, those that this rank stores to */
    struct rank_slots *slots[MAX_RANKS];
    struct rank_failure *failure;
    const uint32_t *aborted;     /* in pinned memory */
    uint64_t timeout_ns;
    uint32_t rank, n_ranks;
    bool is_start;               /* of a step */
};

/* The ranks of one model. */
struct cuda_team {
    struct cuda_team *next; /* team that was opened before */
    uint32_t n_ranks;
    struct cuda *ranks[MAX_RANKS];
    struct rank_state *states[MAX_RANKS];
    struct rank_slots *slots[MAX_RANKS];
    struct rank_failure *failures[MAX_RANKS];
    char *memory[COMM_MEMORIES][MAX_RANKS];
    size_t size_bytes[COMM_MEMORIES];
    uint32_t *aborted; /* in pinned memory */
    double timeout_seconds;
    struct link *link;  /* to the ranks of other processes; NULL: there are none */
    bool shares_device; /* two ranks are on one device */
    bool is_alone;      /* what the ranks' states say */
};

static inline struct meeting meeting_of(const struct cuda *cuda, bool is_start)
{
    const struct cuda_team *team = cuda->team;
    struct meeting m = {};
    m.state = team->states[cuda->rank];
    for (uint32_t r = 0; r < team->n_ranks; r++) {
        m.flags[r] = team->states[r]->flags[cuda->rank];
        m.slots[r] = team->slots[r];
    }
    m.failure = team->failures[cuda->rank];
    m.aborted = team->aborted;
    m.timeout_ns = (uint64_t)(team->timeout_seconds * 1e9);
    m.rank = cuda->rank;
    m.n_ranks = team->n_ranks;
    m.is_start = is_start;
    return m;
}

static __device__ __forceinline__ void flag_store(uint32_t *flag, uint32_t number)
{
    asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(flag), "r"(number) : "memory");
}

static __device__ __forceinline__ void flag_store_relaxed(uint32_t *flag, uint32_t number)
{
    asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(flag), "r"(number) : "memory");
}

static __device__ __forceinline__ uint32_t flag_load(const uint32_t *flag)
{
    uint32_t number;
    asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(number) : "l"(flag) : "memory");
    return number;
}

static __device__ __forceinline__ uint32_t load_fresh(const uint32_t *from)
{
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

static __device__ __forceinline__ uint64_t clock_ns(void)
{
    uint64_t ns;
    asm volatile("mov.u64 %0,%globaltimer;" : "=l"(ns));
    return ns;
}

/* Every rank's block 0 comes to every meeting, and a kernel that waits is in one: the difference is its number in the step. */
static __device__ __noinline__ void record_failure(const struct meeting &m, uint32_t source, uint32_t reason)
{
    if (atomicExch(&m.state->has_failed, 1))
        return;
    m.failure->source = source;
    m.failure->gather = m.is_start ? 0 : load_fresh(&m.state->met[0]) - load_fresh(&m.state->step);
    __threadfence_system();
    *(volatile uint32_t *)&m.failure->reason = reason;
    __threadfence_system();
}

static __device__ __noinline__ bool gives_up(const struct meeting &m, uint32_t source, uint64_t start)
{
    if (load_fresh(&m.state->has_failed))
        return true;
    const bool is_aborted = load_fresh(m.aborted), is_late = clock_ns() - start > m.timeout_ns;
    if (is_aborted || is_late)
        record_failure(m, source, is_aborted ? WAIT_ABORTED : WAIT_LATE);
    return is_aborted || is_late;
}

/* ORDERED: what the other rank stored before the flag can be read after the wait. */
template <bool ORDERED>
static __device__ __forceinline__ void flag_wait(const struct meeting &m, uint32_t source, uint32_t number)
{
    const uint32_t *flag = &m.state->flags[source][blockIdx.x];
    uint64_t start = 0;
    for (uint32_t turn = 1; (int32_t)((ORDERED ? flag_load(flag) : load_fresh(flag)) - number) < 0; turn++) {
        if (turn % TURNS)
            continue;
        start = start ? start : clock_ns();
        if (gives_up(m, source, start))
            return;
    }
}

/* At the top of a kernel that waits. */
static __device__ __forceinline__ void start_next_if_alone(const struct meeting &m)
{
    if (load_fresh(&m.state->is_alone))
        start_next();
}

static __device__ __noinline__ void clear_slots(const struct meeting &m, uint32_t parity)
{
    uint4 *packets = m.slots[m.rank]->packets[parity][blockIdx.x];
    const uint32_t none = 1 - parity;
    for (uint32_t i = threadIdx.x; i < SLOT_PACKETS; i += blockDim.x)
        packets[i] = make_uint4(0, none, 0, none);
    __threadfence_system();
    __syncthreads();
}

/* The block's number of this meeting; after wait_for_input(). */
static __device__ __forceinline__ uint32_t next_number(const struct meeting &m)
{
    return load_fresh(&m.state->met[blockIdx.x]) + 1;
}

/* Before the block says that it has come. Then other ranks may store to the slots of the next number. */
static __device__ __forceinline__ void free_slots(const struct meeting &m, uint32_t number)
{
    if (number % CLEAR_EVERY < 2)
        clear_slots(m, (number + 1) % 2);
}

/* All threads of the block call it when they have stored. On return all other ranks' blocks of this number have stored. The
 * count is stored behind the flags, because a release waits for all stores before it. */
static __device__ __forceinline__ void meet_ranks(const struct meeting &m, uint32_t number)
{
    const uint32_t t = threadIdx.x;
    const bool has_other = t < m.n_ranks && t != m.rank;
    free_slots(m, number);
    __syncthreads();
    if (has_other)
        flag_store(m.flags[t] + blockIdx.x, number);
    if (!t)
        m.state->met[blockIdx.x] = number;
    if (has_other)
        flag_wait<true>(m, t, number);
    __syncthreads();
    start_next();
}

#endif
