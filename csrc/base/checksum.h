/* checksum.h: tells damaged bytes. Four lanes, each a bijection of what was before for every word: a change of one word always
 * shows. Not a secret hash. */
#ifndef LLMPY_CHECKSUM_H
#define LLMPY_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint64_t checksum_bytes(const void *bytes, size_t n_bytes, uint64_t seed);
/* Of parts of equal sizes, one behind the other. */
uint64_t checksum_parts(void *const *parts, uint32_t n_parts, size_t part_bytes);

#endif
