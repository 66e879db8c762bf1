/* quantise.h: rounds rows of float32 to the quantised types that llmpy makes itself. The bytes of a row depend on its own
 * values only, so every number of threads and ranks gives the same. Loads, updates and dummy weights use it.
 *
 *   type        a scale for      scale                    number
 *   fp8         a row            max |w| / 448            e4m3, to nearest even
 *   int8_g*     a block          max |w| / 127            to nearest even
 *   int4_g*     a block          (max w - min w) / 15     to nearest even, plus the zero, from 0 to 15
 *   nf4         64               max |w|                  the nearest of 16 values
 *   q8_0, q5_0, q4_1, q4_0, q6_k, q5_k, q4_k, q2_k: quantise_gguf.h
 *
 * max w and min w of 4-bit numbers are at least and at most 0. Their scale is rounded to bfloat16. */
#ifndef LLMPY_QUANTISE_H
#define LLMPY_QUANTISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QUANTISE_WANTED "finite values below 2^100, whose scales float16 holds for types of GGUF"

bool quantise_has(uint32_t dtype); /* whether rows can be rounded to the type */
bool quantise_on_devices(uint32_t dtype); /* whether backends with rounds_tensors round to it, too */
/* Rounds n values, for types of GGUF whole blocks, to dtype_row_bytes(dtype, n) bytes. Returns false if a value is a NaN or an
 * infinity or beyond 2^100, or a scale of a type of GGUF beyond float16; the bytes are undefined then. */
bool quantise_row(uint32_t dtype, const float *row, size_t n, void *to);
/* Converts rows of floats of one type to another type, of floats or one that quantise_has. floats: room for n_rows * n_cols.
 * Returns what quantise_row returns. */
bool quantise_rows(uint32_t dtype, uint32_t from, const void *rows, size_t n_rows, size_t n_cols, float *floats, void *to);

#endif
