/* What takes the place of Triton-Ascend's sort at level 3: the rows of an fp16 matrix, in ascending order. */
#include <stdint.h>
#include <stdlib.h>

typedef struct { uint16_t *allocated, *aligned; int64_t offset, sizes[2], steps[2]; } Matrix;

/* Bits of an fp16 as a number of the same order; a number that is none ends the process. */
static int32_t key(uint16_t bits) {
  int32_t size = bits & 0x7fff;
  if (size > 0x7c00) abort();
  return bits >> 15 ? -size : size;
}

static int compare(const void *a, const void *b) {
  int32_t left = key(*(const uint16_t *)a), right = key(*(const uint16_t *)b);
  return (left > right) - (left < right);
}

void _mlir_ciface_sort_rows(Matrix *from, Matrix *to, int64_t axis, _Bool descending) {
  if (axis != 1 || descending || to->steps[1] != 1) abort();
  for (int64_t row = 0; row < to->sizes[0]; row++) {
    uint16_t *target = to->aligned + to->offset + row * to->steps[0];
    uint16_t *source = from->aligned + from->offset + row * from->steps[0];
    for (int64_t i = 0; i < to->sizes[1]; i++) target[i] = source[i * from->steps[1]];
    qsort(target, to->sizes[1], sizeof *target, compare);
  }
}
