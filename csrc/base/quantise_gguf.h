/* quantise_gguf.h: rounds floats to blocks of GGUF.
 *
 * Blocks of 32 values have the bits of gguf-py. The numbers are those of the scale before it is rounded to float16.
 *
 *   type         scale                    number
 *   q8_0         max |w| / 127            w / scale, halves away from zero
 *   q4_1         (max w - min w) / 15     (w - min w) / scale, halves up
 *   q4_0, q5_0   peak / -8, peak / -16    w / scale + 8 or 16, halves up; peak: the first w of the largest magnitude
 *
 * Blocks of 256 values: quantise_k.h. */
#ifndef LLMPY_QUANTISE_GGUF_H
#define LLMPY_QUANTISE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool quantise_gguf_has(uint32_t dtype);
/* Rounds n finite values, whole blocks. The bytes are 0 before. Returns false if float16 cannot hold a scale or a minimum. */
bool quantise_gguf_row(uint32_t dtype, const float *row, size_t n, uint8_t *to);

#endif
