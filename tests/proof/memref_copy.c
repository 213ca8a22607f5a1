/* What MLIR's lowered copies call: elements of `size` bytes from one strided memref to another of the same shape. */
#include <stdint.h>
#include <string.h>

typedef struct { int64_t rank; int64_t *memref; } Unranked; /* memref: allocated, aligned, offset, sizes, strides */

void memrefCopy(int64_t size, Unranked *from, Unranked *to) {
  int64_t rank = from->rank, place[8] = {0};
  char *source = (char *)from->memref[1] + from->memref[2] * size;
  char *target = (char *)to->memref[1] + to->memref[2] * size;
  int64_t *sizes = from->memref + 3, *source_step = sizes + rank, *target_step = to->memref + 3 + rank;
  if (rank == 0) { memcpy(target, source, size); return; }
  for (int64_t d = 0; d < rank; d++) if (sizes[d] == 0) return;
  for (;;) {
    int64_t a = 0, b = 0, d;
    for (d = 0; d < rank; d++) { a += place[d] * source_step[d]; b += place[d] * target_step[d]; }
    if (source_step[rank - 1] == 1 && target_step[rank - 1] == 1) {
      memcpy(target + b * size, source + a * size, sizes[rank - 1] * size); /* a whole row */
      place[rank - 1] = sizes[rank - 1] - 1;
    } else {
      memcpy(target + b * size, source + a * size, size);
    }
    for (d = rank - 1; d >= 0 && ++place[d] == sizes[d]; d--) place[d] = 0;
    if (d < 0) return;
  }
}
