/* Votes counted at the speed of memory: uint8 predictions [teachers, queries] -> int32 counts [queries, classes].
 *
 * A block of 128 queries and up to 255 teachers (32 KB, a core's first-level cache) is read once and compared with one
 * class after another, 32 votes an instruction. Up to 255 votes fit a byte, so no sum overflows. A label outside
 * 0..classes-1 is counted nowhere.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 32, PARTS = 4, WIDTH = LANES * PARTS, GROUP = 255 };
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
            }
            for (int c = 0; c < classes; c++) {
                lanes label, sum[PARTS];
                memset(&label, c, sizeof label);
                for (int p = 0; p < PARTS; p++) {
                    lanes s = {0};
                    for (ptrdiff_t k = 0; k < rows; k++)
                        s -= (lanes)(block[k][p] == label); /* where equal all bits are set: minus one */
                    sum[p] = s;
                }
                const uint8_t *votes = (const uint8_t *)sum;
                int32_t *out = counts + q * classes + c;
                for (ptrdiff_t w = 0; w < width; w++)
                    out[w * classes] = (start ? out[w * classes] : 0) + votes[w];
            }
        }
    }
}
