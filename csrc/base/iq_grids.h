/* iq_grids.h: the grids of GGUF's IQ types (iq_grids.def). dtype.c defines them; the CPU's kernels read them, too. */
#ifndef LLMPY_IQ_GRIDS_H
#define LLMPY_IQ_GRIDS_H

#include <stdint.h>

extern const uint16_t grid_iq2_xxs[256], grid_iq2_xs[512], grid_iq2_s[1024], grid_iq3_xxs[256], grid_iq3_s[512], grid_iq1[2048];

#endif
