/* gemm_tiles.cuh: how the blocks of linear_gemm.cuh and linear_fp8_many.cuh share out a product: tiles, clusters of them, the
 * order in which they are walked, and the maps of their slices. */
#ifndef LLMPY_CUDA_GEMM_TILES_CUH
#define LLMPY_CUDA_GEMM_TILES_CUH

#include "../core/tensor_map.cuh"
#include "linear.cuh"

#define GEMM_BAND_ROWS 2048u /* of x that blocks walk down before they go on to the next rows of W */

struct gemm_shape {
    uint32_t n_blocks; /* of 64 columns */
    uint32_t down, down_log2, across, clusters_down, clusters_across, n_clusters;
    uint32_t x_blocks, w_blocks; /* masks of the blocks that share with the cluster's first one */
    uint32_t band;               /* clusters below each other that are walked before the next beside */
    uint32_t x_box_rows, w_box_rows;   /* of a slice of a tile */
    uint32_t x_edge_rows, w_edge_rows; /* of the last tile, where that one is not whole */
    bool is_product;             /* of gate and up: eights of their rows alternate in W, so out.n_out is half of W's rows */
    bool is_read_once;           /* no weight is fetched twice */
    bool is_wide;                /* y and what is added lie on multiples of 16 bytes, in eights of columns */
};

/* Boxes of a slice's rows by 64 columns, of whole tiles and of the last ones. */
struct gemm_maps {
    CUtensorMap w, w_edge, x, x_edge;
};

/* First row of x and of W of a block's tile in a cluster's turn-th rectangle. Rectangles are walked in bands, each from left
 * to right, so that blocks that run together read the same rows. */
struct gemm_place {
    uint32_t row, column;
};
static __device__ __forceinline__ struct gemm_place gemm_place_of(const struct gemm_shape &s, uint32_t turn, uint32_t tile_rows,
                                                                  uint32_t width, uint32_t down, uint32_t across)
{
    uint32_t right = turn, below = 0;
    if (s.clusters_down > 1) {
        uint32_t per_band = s.band * s.clusters_across, top = turn / per_band * s.band, rest = turn % per_band;
        uint32_t height = min(s.band, s.clusters_down - top);
        right = rest / height;
        below = top + rest % height;
    }
    struct gemm_place place;
    place.row = (below * s.down + down) * tile_rows;
    place.column = (right * s.across + across) * width;
    return place;
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* A cluster holds down * across tiles. */
struct gemm_cluster {
    uint32_t down, across;
};
#define GEMM_MAX_CLUSTER 4u

/* Clusters of 1, 2 and 4 blocks that a device runs at a time. */
struct gemm_device {
    uint32_t n_clusters[GEMM_MAX_CLUSTER + 1];
};

/* Makes the maps of x or of W. A tile of tile_rows rows is fetched in n_slices slices; those of the last tile are multiples of
 * edge_step rows. */
static enum rc gemm_map(const struct cuda *cuda, map_encoder encode, const void *data, uint64_t row_bytes, uint32_t n_rows,
                        uint32_t n_blocks, bool is_pairs, uint32_t tile_rows, uint32_t n_slices, CUtensorMap *map,
                        CUtensorMap *edge, uint32_t *edge_rows, struct err *err, uint32_t edge_step = 1)
{
    uint32_t rest = n_rows % tile_rows ? n_rows % tile_rows : tile_rows, half = n_rows / 2, rows = tile_rows / n_slices;
    edge_step = is_pairs ? 16 : edge_step;
    *edge_rows = ceil_div(ceil_div(rest, n_slices), edge_step) * edge_step;
    for (uint32_t i = 0; i < 2; i++) {
        struct map_dims plain = {2, {n_rows, n_blocks}, {row_bytes, 128}, {rows, 1}};
        struct map_dims pairs = {4, {8, 2, half / 8, n_blocks}, {row_bytes, half * row_bytes, 8 * row_bytes, 128},
                                 {8, 2, rows / 16, 1}};
        struct tensor_map made;
        enum rc rc = map_make(encode, cuda->dtype, data, is_pairs ? &pairs : &plain, &made, err);
        if (rc)
            return rc;
        *(i ? edge : map) = map_of(&made);
        rows = *edge_rows;
    }
    return RC_OK;
}

/* Rows of x and rows of W of a tile. */
struct gemm_tile {
    uint32_t rows, width;
};

/* All but the rows of edges. */
static struct gemm_shape gemm_shape_of(const struct gemm_tile &tile, const struct gemm_cluster &cluster, uint32_t n_blocks,
                                       bool is_product, const struct output &out)
{
    struct gemm_shape shape = {};
    shape.n_blocks = n_blocks;
    shape.down = cluster.down;
    while (1u << shape.down_log2 < cluster.down)
        shape.down_log2++;
    shape.across = cluster.across;
    shape.w_blocks = (1u << cluster.down) - 1;
    for (uint32_t i = 0; i < cluster.down * cluster.across; i += cluster.down)
        shape.x_blocks |= 1u << i;
    shape.x_box_rows = tile.rows / cluster.across;
    shape.w_box_rows = tile.width / cluster.down;
    shape.clusters_down = ceil_div(out.n_rows, tile.rows * cluster.down);
    shape.clusters_across = ceil_div(out.n_out << is_product, tile.width * cluster.across);
    shape.n_clusters = shape.clusters_down * shape.clusters_across;
    shape.band = GEMM_BAND_ROWS / (tile.rows * cluster.down);
    shape.is_product = is_product;
    shape.is_read_once = shape.clusters_down == 1;
    shape.is_wide = map_fits(out.y, (size_t)out.y_stride * (out.is_float ? 4 : 2)) && out.n_out % 8 == 0 &&
                    (!out.add || map_fits(out.add, (size_t)out.add_stride * 2));
    return shape;
}

#endif
