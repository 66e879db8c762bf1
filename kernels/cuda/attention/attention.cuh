/* attention.cuh: what the two kernels on tensor cores share, attention_decode.cuh for sequences with one row in the step and
 * attention_prefill.cuh for the others: arguments, instructions of sm_90a, and the arithmetic of the canonical order.
 *
 * With c = scale log2 e and e(x) = ex2.approx(x), keys in tiles of 64 at absolute positions, four tiles a split with fresh
 * (m, l, O):
 *   tile   s = chain over head_dim in steps of 16 (one matrix instruction each); n = max(m, max s); a = e((m - n) c);
 *          p = e(fma(s, c, -(n c))); O = a O, then the chain of p rounded to 16 bits times V over 4 steps of 16 keys;
 *          l = fma(a, l, sum of p by a tree that joins bits 3, 4, 5, 0, 1, 2 of the key's number in turn); m = n
 *   split  N = max(M, m); O = fma(O, e((M - N) c), O_split e((m - N) c)); L alike; M = N; in the order 0, 1, 2, ...
 *   out    O rcp(L), rounded
 * A soft cap first turns s into tanh(s scale / cap), and c is cap log2 e. A slope then adds slope (j - i) / scale to s (over
 * cap with a soft cap) in one fma; a sink adds e(sink log2 e - M c) to L at the end. Slopes and sinks are in kernels of their
 * own (HAS_EXTRAS), so that those without have no more registers and instructions than before. A hidden key has p = 0 and a
 * value of zeros: where all of a tile or split is hidden, a = 1 or everything is zero, so no bit changes and a kernel may pass
 * over it. A value of another sequence is never multiplied. A hidden one of the same sequence may be, so it must be finite. */
#ifndef LLMPY_CUDA_ATTENTION_CUH
#define LLMPY_CUDA_ATTENTION_CUH

#include "../core/wgmma.cuh"
#include "kv.cuh"

#include <type_traits>

#define TILE 64u             /* keys */
#define SPLIT 256u           /* keys */
#define TILES (SPLIT / TILE)
#define SLAB_BYTES 1024u     /* 8 tokens of 64 values, as kv.cuh lays them */
#define MINUS_INFINITY (-__builtin_huge_valf())

/* T: the type of activations, C: of pages. */
template <class T, class C> struct attended {
    rows<T> q, out;
    cache<C> kv;
    const int32_t *positions, *row_seq, *seq_first_row;
    uint32_t n_seqs, group; /* query heads of a kv head */
    uint32_t window, chunk;
    bool is_single;   /* every sequence has one row */
    float factor;     /* c */
    float cap_factor; /* 0, or tanh(s scale / cap) = 1 - 2 / (1 + 2^(s cap_factor)) */
    const float *slopes, *sinks; /* [heads] or NULL */
    float slope_factor;          /* of a slope, before c */
    const int32_t *visible_end;  /* as in attention_args; a sequence's only row sees what is before it in any case */
    attended(const struct attention_args &args)
        : q(args.q), out(args.out), kv(args.kv, args.batch->block_tokens), positions(args.batch->positions),
          row_seq(args.batch->row_seq), seq_first_row(args.batch->seq_first_row), n_seqs(args.batch->n_seqs),
          group(args.n_heads / args.kv.n_kv_heads), window(args.window), chunk(args.chunk), is_single(false),
          slopes(args.slopes), sinks(args.sinks), visible_end(args.visible_end)
    {
        const float log2_e = 1.44269504f;
        factor = (args.softcap > 0 ? args.softcap : args.scale) * log2_e;
        cap_factor = args.softcap > 0 ? 2 * args.scale / args.softcap * log2_e : 0;
        slope_factor = 1 / (args.softcap > 0 ? args.softcap : args.scale);
    }
    /* First key that the row at a position sees. */
    __device__ __forceinline__ uint32_t first_seen(uint32_t position) const
    {
        if (chunk)
            return position - position % chunk;
        return window && position >= window ? position - window + 1 : 0;
    }
    /* Of pages of bytes: the chunk c of a position's key or value. */
    template <uint32_t D>
    __device__ __forceinline__ const uint4 *byte_chunk(uint32_t seq, uint32_t position, uint32_t head, uint32_t is_value,
                                                       uint32_t c) const
    {
        const char *keys = kv.head_in(kv.page_of(seq, position), head);
        return (const uint4 *)(keys + (is_value * D << kv.block_shift) +
                               kv_byte_chunk(D, position & (kv.block_tokens - 1), c));
    }
    /* Last key that a row of the step at a position sees. */
    template <bool HAS_EXTRAS> __device__ __forceinline__ uint32_t last_seen(uint32_t row, uint32_t position) const
    {
        return HAS_EXTRAS && visible_end ? (uint32_t)visible_end[row] - 1 : position;
    }
};

template <uint32_t D> using head_size = std::integral_constant<uint32_t, D>;

/* Calls f with a value of the type of activations and the size of heads, for pages that are not plain. */
template <class F> static enum rc visit_heads(const struct cuda *cuda, const struct attention_args *args, F f)
{
    auto with_type = [&](auto value) {
        switch (args->kv.head_dim) {
        case 64: return f(value, head_size<64>());
        case 128: return f(value, head_size<128>());
        default: return f(value, head_size<256>());
        }
    };
    return cuda->dtype == DTYPE_BF16 ? with_type(__nv_bfloat16()) : with_type(__half());
}

/* ---- arithmetic ---------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float power_of_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float capped(float s, float cap_factor)
{
    return fmaf(-2.0f, reciprocal(1.0f + power_of_2(s * cap_factor)), 1.0f);
}

#define E4M3_NANS 0x7f7f7f7fu  /* four bytes of a key, if that or its value has a NaN */
#define TWO_NANS 0x7fff7fffu

static __device__ __forceinline__ uint32_t times_two(uint32_t pair, uint32_t factor, __nv_bfloat16)
{
    uint32_t product;
    asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

static __device__ __forceinline__ uint32_t times_two(uint32_t pair, uint32_t factor, __half)
{
    uint32_t product;
    asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

/* Two bytes with the sign of each before it. SECOND: bytes 1 and 3, else 0 and 2. */
template <bool SECOND> static __device__ __forceinline__ uint32_t spread(uint32_t bytes)
{
    uint32_t pair;
    asm("prmt.b32 %0,%1,0,%2;" : "=r"(pair) : "r"(bytes), "n"(SECOND ? 0xb391 : 0xa280));
    return pair;
}

/* Four e4m3 values as two pairs of a wider type, of bytes 0 and 2 and of bytes 1 and 3; exact but for NaN. A byte's bits
 * in the places of the wider sign, exponent and mantissa are the value over a power of two, also where it is subnormal. */
template <class T> static __device__ __forceinline__ uint2 widen_bytes(uint32_t bytes, T type, __nv_fp8_e4m3)
{
    const bool is_half = std::is_same_v<T, __half>;
    const uint32_t shift = is_half ? 7 : 4, kept = is_half ? 0xbf80bf80u : 0x87f087f0u;
    const uint32_t factor = is_half ? 0x5c005c00u : 0x7b807b80u; /* 2^8, 2^120 */
    return make_uint2(times_two(spread<false>(bytes) << shift & kept, factor, type),
                      times_two(spread<true>(bytes) << shift & kept, factor, type));
}

/* The same of int8 as pages have it, over int8_unit. A magnitude in the lowest bits is a subnormal number. */
template <class T> static __device__ __forceinline__ uint2 widen_bytes(uint32_t bytes, T type, int8_t)
{
    const uint32_t factor = std::is_same_v<T, __half> ? 0x78007800u : 0x7f007f00u, kept = 0x807f807fu; /* 2^15, 2^127 */
    return make_uint2(times_two(spread<false>(bytes) & kept, factor, type),
                      times_two(spread<true>(bytes) & kept, factor, type));
}

/* The factor that scales of INT8 have for it: over that, values of pages are numbers of 16 bits without a sum. */
template <class T> static constexpr __host__ __device__ float int8_unit(void)
{
    return std::is_same_v<T, __half> ? 512 : 64;
}

/* The type of p as an operand. Beside int8 p is multiplied by scales, which may leave the range of float16. */
template <class T, class C> using weight_of = std::conditional_t<std::is_same_v<C, int8_t>, __nv_bfloat16, T>;
#define TILE_SCALES (2 * TILE * 4u) /* bytes of a tile's scales of INT8: of keys, then of values */
template <class C> static constexpr __host__ __device__ uint32_t scale_bytes_of(void)
{
    return std::is_same_v<C, int8_t> ? TILE_SCALES : 0;
}

/* The value that replaces a maximum of no keys. */
static __device__ __forceinline__ float anchor(float m)
{
    return m == MINUS_INFINITY ? 0.0f : m;
}

/* 1 if m = n, 0 if m is minus infinity; n is an anchor. */
static __device__ __forceinline__ float rescale(float m, float n, float c)
{
    return power_of_2((m - n) * c);
}

/* The denominator with a head's sink; m and l belong to all keys. */
static __device__ __forceinline__ float with_sink(float l, float sink, float m, float c)
{
    const float log2_e = 1.44269504f;
    return l + power_of_2(fmaf(sink, log2_e, -(m * c)));
}

static __device__ __forceinline__ float fold(float sum, float a, float split, float d)
{
    return fmaf(sum, a, split * d);
}

#endif
