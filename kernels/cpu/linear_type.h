/* linear_type.h: one weight type on one instruction set, as the table that linear.c and matrix.c use. A matrix part is stored
 * as panels of 16 rows, one after the other. A panel is n_blocks blocks of block_values columns, panel_block_bytes each, in a
 * layout that suits the kernels (each instruction set repacks losslessly into its own layout). Activations are packed
 * ("prepared") in strips of 1 to max_rows rows. A tile multiplies one strip by 1 or 2 panels. The type alone fixes the order
 * of the float sums: a tile of any size, the gemv, and any cut of k into slabs give the same bits for a row. */
#ifndef LLMPY_LINEAR_TYPE_H
#define LLMPY_LINEAR_TYPE_H

#include "cpu.h"

#define PANEL_ROWS 16u
#define STRIP_MAX_ROWS 32u
#define MAX_BLOCK_VALUES 512u             /* columns of the longest block; strips are padded to whole blocks */
#define TILE_MAX_PANELS 2u
#define GEMV_PANELS 32u                   /* most panels of one call of a gemv */
#define STRIP_VALUE_BYTES 5u              /* strip_block_bytes <= STRIP_VALUE_BYTES * block_values */
#define EXPANDED_MAX_BYTES (64u << 10)    /* max_panels * slab_blocks * expanded_block_bytes <= this */

/* acc[n_rows][16 * n_panels] += strip x panels^T over n_blocks blocks. acc is aligned to 64 bytes and starts at zero.
 *   w           the first panel's first block; the first block of panel q lies at w + q * panel_stride
 *   x           the strip's first block, of any alignment
 *   next        address of the weights that come after these; any address is allowed
 *   next_lines  cache lines that the tile prefetches in each block, continuing from next */
typedef void linear_tile(const uint8_t *w, size_t panel_stride, const char *x, float *acc, uint32_t n_blocks, const char *next,
                         uint32_t next_lines);

/* acc[16 * n_panels] = one prepared row (a strip of one) x n_panels whole panels^T; panels follow each other in memory. */
typedef void linear_gemv(const uint8_t *w, const char *x, float *acc, uint32_t n_blocks, uint32_t n_panels);

/* Packs n_rows rows x[i * stride + k], k < n_cols; columns from n_cols to the end of the last block count as zero. A strip is
 * [block][strip_block_bytes * n_rows], so that a slab of k can start at any block. A row's numbers depend on that row alone. */
typedef void linear_prepare(const float *x, uint32_t stride, uint32_t n_rows, uint32_t n_cols, char *strip);

/* Writes lanes first_lane .. first_lane + n_lanes - 1 (rows) of a panel from consecutive rows in the file's layout; the other
 * lanes keep their contents. A new panel is all zero bytes. All-zero bytes must mean the value 0,
 * because padding rows and columns stay zero. */
typedef void linear_repack(const uint8_t *rows, size_t row_bytes, uint32_t first_lane, uint32_t n_lanes, uint32_t n_cols,
                           uint8_t *panel);

/* values[n_blocks * block_values][16] = the exact values of the blocks, as dtype_to_float defines them. */
typedef void linear_unpack(const uint8_t *w, uint32_t n_blocks, float *values);

/* Rewrites n_blocks blocks of one panel into the form that the tiles read, expanded_block_bytes each. */
typedef void linear_expand(const uint8_t *w, uint32_t n_blocks, uint8_t *expanded);

struct linear_type {
    const char *name;                /* "q4_0 int8" */
    uint32_t dtype, arithmetic;      /* enum dtype; enum arithmetic, not AUTO */
    uint32_t block_values;           /* columns of a block: 32 to MAX_BLOCK_VALUES */
    uint32_t panel_block_bytes;      /* 16 rows x block_values weights; a multiple of 32, so panels lie on 32 bytes */
    uint32_t strip_block_bytes;      /* one prepared row x block_values */
    uint32_t expanded_block_bytes;   /* 0: tiles read the packed weights (then expand is NULL) */
    uint32_t slab_blocks;            /* blocks of a slab of k, whose weights (as the tiles read them) fit L1 */
    uint32_t max_rows, max_panels;   /* tile[p - 1][r] exists for 1 <= p <= max_panels, 1 <= r <= max_rows */
    linear_tile *tile[TILE_MAX_PANELS][STRIP_MAX_ROWS + 1];
    linear_gemv *gemv;               /* NULL: one row goes through tile[.][1] as well */
    linear_prepare *prepare;
    linear_repack *repack;
    linear_unpack *unpack;
    linear_expand *expand;
};

/* Bytes of linear.c's arrays in a thread's scratch, in this order (matrix.c and embed.c use the expanded panels' place). */
static inline size_t linear_scratch_bytes(uint32_t max_rows, size_t max_cols)
{
    size_t accumulators = (size_t)(max_rows + GEMV_PANELS) * TILE_MAX_PANELS * PANEL_ROWS * sizeof(float);
    return EXPANDED_MAX_BYTES + accumulators + (size_t)STRIP_MAX_ROWS * max_cols * (STRIP_VALUE_BYTES + sizeof(float));
}

/* The types of linear_iq_avx2.c, whose blocks stay as in the file (linear_rows_avx2.h). AVX-512 has kernels for IQ4 alone. */
#define EACH_GRID_TYPE(M)                                                                                                      \
    M(iq3_xxs) M(iq3_s) M(iq2_xxs) M(iq2_xs) M(iq2_s) M(iq1_s) M(iq1_m) M(tq1_0) M(tq2_0)
#define EACH_ROW_TYPE(M) M(iq4_nl) M(iq4_xs) EACH_GRID_TYPE(M)

/* The types of linear_table_avx2.c, which has no kernels of AVX-512. */
#define EACH_TABLE_TYPE(M) M(nf4) M(fp4) M(table4)

/* In linear_types_avx2.c and linear_types_avx512.c. Returns NULL if the type does not have this arithmetic. linear_type_avx512
 * may return a type of AVX2. */
const struct linear_type *linear_type_avx2(uint32_t dtype, uint32_t arithmetic);
const struct linear_type *linear_type_avx512(uint32_t dtype, uint32_t arithmetic);

#endif
