/* quantise_k.h: rounds floats to GGUF's blocks of 256 values.
 *
 *   type         sub-blocks   a value                        whole scales and minima
 *   q2_k         16 of 16     d * scale * q - dmin * min     0 to 15
 *   q4_k, q5_k   8 of 32      the same                       0 to 63
 *   q6_k         16 of 16     d * scale * q                  -128 to 127
 *
 * Each sub-block tries 21 steps between neighbouring values. For each it solves the least squares for the scale (and the
 * minimum) of the numbers q that this step gives, and keeps the one with the least squared error. */
#ifndef LLMPY_QUANTISE_K_H
#define LLMPY_QUANTISE_K_H

#include <stdbool.h>
#include <stdint.h>

/* Round 256 finite values. Return false if float16 cannot hold d or dmin. */
bool quantise_q2_k(const float *values, uint8_t *to);
bool quantise_q4_k(const float *values, uint8_t *to);
bool quantise_q5_k(const float *values, uint8_t *to);
bool quantise_q6_k(const float *values, uint8_t *to);

#endif
