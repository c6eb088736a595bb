/* Votes counted at the speed of memory: uint8 predictions [teachers, queries] -> int32 counts [queries, classes].
 *
 * A block of 512 queries and up to 255 teachers (128 KB, in a core's second-level cache) is read once, the next one
 * announced meanwhile, and compared with one class after another, 32 votes an instruction. Up to 255 votes fit a byte,
 * so no sum overflows. A label outside 0..classes-1 is counted nowhere. (64 votes an instruction are no faster: from
 * here on it is the reading that takes the time.)
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 32, SUMS = 4, PARTS = 16, WIDTH = LANES * PARTS, GROUP = 255, LINE = 64 };
typedef uint8_t lanes __attribute__((vector_size(LANES)));

#if defined(__x86_64__) && defined(__linux__)
__attribute__((target_clones("avx2", "default"))) /* chosen when loaded: one file serves all machines of a cluster */
#endif
void tally(const uint8_t *prediction, ptrdiff_t stride, ptrdiff_t teachers, ptrdiff_t first, ptrdiff_t end,
           int classes, int32_t *counts)
{
    lanes block[GROUP][PARTS];
    memset(block, 0, sizeof block);
    for (ptrdiff_t q = first; q < end; q += WIDTH) {
        ptrdiff_t width = end - q < WIDTH ? end - q : WIDTH;
        for (ptrdiff_t start = 0; start < teachers; start += GROUP) {
            ptrdiff_t rows = teachers - start < GROUP ? teachers - start : GROUP;
            for (ptrdiff_t k = 0; k < rows; k++) {
                const uint8_t *row = prediction + (start + k) * stride + q;
                if (width == WIDTH) /* a length that the compiler knows takes no call */
                    memcpy(block[k], row, WIDTH);
                else
                    memcpy(block[k], row, width);
                for (int i = 0; i < WIDTH; i += LINE) /* rows lie pages apart: the processor would not guess */
                    __builtin_prefetch(row + WIDTH + i, 0, 2);
            }
            for (int part = 0; part < PARTS && part * LANES < width; part += SUMS) {
                ptrdiff_t own = width - part * LANES < SUMS * LANES ? width - part * LANES : SUMS * LANES;
                for (int c = 0; c < classes; c++) {
                    lanes label, sum[SUMS] = {0};
                    memset(&label, c, sizeof label);
                    for (ptrdiff_t k = 0; k < rows; k++)
                        for (int i = 0; i < SUMS; i++)
                            sum[i] -= (lanes)(block[k][part + i] == label); /* equal: all bits set, minus one */
                    const uint8_t *votes = (const uint8_t *)sum;
                    int32_t *out = counts + (q + part * LANES) * classes + c;
                    for (ptrdiff_t w = 0; w < own; w++)
                        out[w * classes] = (start ? out[w * classes] : 0) + votes[w];
                }
            }
        }
    }
}
