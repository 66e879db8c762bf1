/* Pieces of images as one piece: their rows, segments, lists and positions; and pieces that do not go together. */
#include "check.h"

#include "../../csrc/program/tower_join.h"
#include "../../kernels/backend.h"

#define MOST 64u

/* The core finds the CPU's operations by this name; a join needs none. */
const struct backend *backend_cpu(void);
const struct backend *backend_cpu(void)
{
    return NULL;
}

/* A tower with two axes that reads a list of its own rows, and one of features with two rows each. */
static struct op ops[2];
static struct value values[2];
static int32_t axes[] = {0, 1};
static struct rope rope;
static struct program program;
static size_t room[PIECE_TABLES];
static int32_t words[2][PIECE_TABLES][32];
static uint8_t bytes[2][32];

static struct item_piece piece_of(uint32_t number, uint32_t n_rows, uint32_t n_features)
{
    struct item_piece piece = {.n_rows = n_rows, .n_features = n_features, .bytes = bytes[number], .n_bytes = 2 * n_rows};
    for (uint32_t i = 0; i < PIECE_TABLES; i++)
        piece.tables[i].values = words[number][i];
    for (uint32_t i = 0; i < 2 * n_rows; i++) {
        bytes[number][i] = (uint8_t)(100 * number + i);
        words[number][PIECE_POSITIONS][i] = (int32_t)(100 * number + i);
    }
    piece.tables[PIECE_POSITIONS].n = 2 * n_rows;
    words[number][PIECE_SEGMENTS][0] = 0;
    words[number][PIECE_SEGMENTS][1] = 1;
    words[number][PIECE_SEGMENTS][2] = (int32_t)n_rows;
    piece.tables[PIECE_SEGMENTS].n = 3;
    piece.tables[PIECE_TAPS].n = n_rows;
    piece.tables[PIECE_WEIGHTS].n = n_rows;
    for (uint32_t i = 0; i < n_features; i++)
        words[number][PIECE_LIST + ROWS_OF_FEATURES][i] = i ? (int32_t)(n_features - i) : -2;
    piece.tables[PIECE_LIST + ROWS_OF_FEATURES].n = n_features;
    return piece;
}

static void make(struct piece_join *join)
{
    struct err err;
    rope = (struct rope){.n_axes = 2, .axes = axes, .n_freqs = 2};
    values[0] = (struct value){.width = 16, .of = NO_INDEX, .per = 2};
    ops[0] = (struct op){.code = OP_PIXELS};
    ops[1] = (struct op){.code = OP_ROWS, .in = {0}, .rows = {.list = ROWS_OF_FEATURES}};
    program = (struct program){.is_tower = true, .ops = ops, .n_ops = 2, .values = values, .n_values = 1, .ropes = &rope,
                               .n_ropes = 1};
    static const uint32_t read[] = {PIECE_POSITIONS, PIECE_SEGMENTS, PIECE_TAPS, PIECE_WEIGHTS, PIECE_DISTANCES,
                                    PIECE_LIST + ROWS_OF_FEATURES};
    for (size_t i = 0; i < sizeof read / sizeof *read; i++)
        room[read[i]] = 2 * (MOST + 1);
    REQUIRE(join_make(join, &program, MOST, 2 * MOST, room, &err) == RC_OK);
}

TEST(one_piece_stays_as_it_is)
{
    struct piece_join join;
    make(&join);
    struct item_piece piece = piece_of(0, 8, 4);
    CHECK(join_add(&join, &piece) && join_all(&join) == &piece);
    join_clear(&join);
}

TEST(rows_follow_each_other)
{
    struct piece_join join;
    make(&join);
    struct item_piece a = piece_of(0, 4, 2), b = piece_of(1, 6, 3);
    CHECK(join_add(&join, &a) && join_add(&join, &b));
    const struct item_piece *all = join_all(&join);
    CHECK_EQ(all->n_rows, 10);
    CHECK_EQ(all->n_features, 5);
    CHECK_EQ(all->n_bytes, 20);
    CHECK(all->bytes[7] == 7 && all->bytes[8] == 100 && all->bytes[19] == 111);
    static const int32_t positions[] = {0, 1, 2, 3, 100, 101, 102, 103, 104, 105, 4, 5, 6, 7, 106, 107, 108, 109, 110, 111};
    static const int32_t segments[] = {0, 1, 4, 5, 10}, features[] = {-2, 1, -2, 4, 3}; /* two rows of a are before b's first */
    CHECK_EQ(all->tables[PIECE_POSITIONS].n, 20);
    CHECK(!memcmp(all->tables[PIECE_POSITIONS].values, positions, sizeof positions));
    CHECK_EQ(all->tables[PIECE_SEGMENTS].n, 5);
    CHECK(!memcmp(all->tables[PIECE_SEGMENTS].values, segments, sizeof segments));
    CHECK_EQ(all->tables[PIECE_LIST + ROWS_OF_FEATURES].n, 5);
    CHECK(!memcmp(all->tables[PIECE_LIST + ROWS_OF_FEATURES].values, features, sizeof features));
    CHECK_EQ(all->tables[PIECE_TAPS].n, 10);
    join_end(&join);
    CHECK(join_add(&join, &b) && join_all(&join) == &b); /* nothing of the pieces before is left */
    join_clear(&join);
}

TEST(pieces_that_do_not_go_together)
{
    struct piece_join join;
    make(&join);
    struct item_piece a = piece_of(0, 4, 2), b = piece_of(1, 6, 3);
    CHECK(join_add(&join, &a));
    b.tables[PIECE_TAPS].n = 2 * b.n_rows; /* two taps a row, one of a */
    CHECK(!join_add(&join, &b));
    b.tables[PIECE_TAPS].n = b.n_rows;
    b.tables[PIECE_DISTANCES].n = 4; /* squares of another side */
    CHECK(!join_add(&join, &b));
    b.tables[PIECE_DISTANCES].n = 0;
    b.n_rows = MOST - a.n_rows + 1;
    CHECK(!join_add(&join, &b));
    b.n_rows = 6;
    CHECK_EQ(join.all.n_rows, 4);
    CHECK(join_add(&join, &b));
    join_clear(&join);
}

TEST(a_list_that_is_read_of_two_kinds_of_rows_joins_nothing)
{
    struct piece_join join;
    make(&join);
    join_clear(&join);
    values[1] = (struct value){.width = 16, .of = NO_INDEX, .per = 1};
    ops[0] = ops[1];
    ops[0].in[0] = 1;
    struct err err;
    REQUIRE(join_make(&join, &program, MOST, 2 * MOST, room, &err) == RC_OK);
    struct item_piece a = piece_of(0, 4, 2), b = piece_of(1, 6, 3);
    CHECK(join_add(&join, &a) && !join_add(&join, &b));
    join_clear(&join);
}
