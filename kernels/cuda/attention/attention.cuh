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

#include "../core/e4m3.cuh"
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

/* Four e4m3 values as two pairs of activations' type, exactly. */
static __device__ __forceinline__ uint2 widen_bytes(uint32_t bytes, __half)
{
    return widen_e4m3(bytes);
}

static __device__ __forceinline__ uint2 widen_bytes(uint32_t bytes, __nv_bfloat16 type)
{
    const uint2 halves = widen_bytes(bytes, __half());
    const float2 low = __half22float2(*(const __half2 *)&halves.x), high = __half22float2(*(const __half2 *)&halves.y);
    return make_uint2(pack(low.x, low.y, type), pack(high.x, high.y, type));
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
