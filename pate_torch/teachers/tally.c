/* Votes counted at the speed of memory: uint8 predictions [teachers, queries] -> int32 counts [queries, classes].
 *
 * Sixteen rows at a time are walked over a page of queries: few enough streams, long enough for the processor to fetch
 * ahead by itself. Counts of sixteen classes wait meanwhile in the caches, as bytes, which up to 255 votes fit. Adding
 * is done in one of two ways. A label outside 0..classes-1 is counted nowhere.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 32, COLUMNS = 128, WIDTH = LANES * COLUMNS, ROWS = 16, CLASSES = 16, GROUP = 255, MOST = 64 };
typedef uint8_t column[CLASSES][LANES];

/* Anywhere: compares with one class after another. Adds 16 rows, so many columns of them, for 16 classes from `low`. */
static void plain_add(const uint8_t *const *row, ptrdiff_t columns, int low, column *sums)
{
    typedef uint8_t lanes __attribute__((vector_size(16))); /* as wide as any processor of today compares */
    for (ptrdiff_t i = 0; i < 2 * columns; i++) {
        lanes vote[ROWS], sum;
        for (int r = 0; r < ROWS; r++)
            memcpy(&vote[r], row[r] + i * 16, 16);
        for (int c = 0; c < CLASSES; c++) {
            uint8_t *kept = sums[i / 2][c] + i % 2 * 16, label = (uint8_t)(low + c);
            memcpy(&sum, kept, 16);
            for (int r = 0; r < ROWS; r++)
                sum -= (lanes)(vote[r] == label); /* equal: all bits set, minus one */
            memcpy(kept, &sum, 16);
        }
    }
}

/* Writes 16 bytes for each query, `classes` bytes apart. */
static void plain_write(const column *sums, ptrdiff_t columns, ptrdiff_t classes, uint8_t *counts)
{
    for (ptrdiff_t q = 0; q < columns * LANES; q++)
        for (int c = 0; c < CLASSES; c++)
            counts[q * classes + c] = sums[q / LANES][c][q % LANES];
}

#if defined(__x86_64__)
/* With AVX2: a shuffle turns each label into one bit of two bytes, of 8 classes each, and full adders add the bits of
 * 32 queries at once. A byte of sums is then a binary digit of 8 counts ("digit[half][d]": d-th digits), not a count.
 * That takes 15 instructions for 32 votes, comparing two for each class. AVX-512 would save half, but no time: from
 * here on it is the reading that takes it.
 */
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define EIGHT 1, 2, 4, 8, 16, 32, 64, (char)128
#define NONE 0, 0, 0, 0, 0, 0, 0, 0

/* The sum of three bits: its lower digit stays in `sum`, the upper one is returned. */
AVX2 static inline __attribute__((always_inline)) __m256i full_adder(__m256i *sum, __m256i a, __m256i b)
{
    __m256i differ = *sum ^ a, carry = (*sum & a) | (differ & b);
    *sum = differ ^ b;
    return carry;
}

AVX2 static void sliced_add(const uint8_t *const *row, ptrdiff_t columns, int low, column *sums)
{
    const __m256i table[2] = {_mm256_setr_epi8(EIGHT, NONE, EIGHT, NONE), _mm256_setr_epi8(NONE, EIGHT, NONE, EIGHT)};
    const __m256i over = _mm256_set1_epi8(0x70), base = _mm256_set1_epi8((char)low);
    for (ptrdiff_t i = 0; i < columns; i++) {
        __m256i *kept = (__m256i *)sums[i], digit[2][8], waiting[2][5];
        for (int d = 0; d < 16; d++) /* (gcc makes a slow string instruction of memcpy here) */
            digit[d / 8][d % 8] = kept[d];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r += 2) {
            __m256i one = _mm256_loadu_si256((const __m256i *)(row[r] + i * LANES));
            __m256i two = _mm256_loadu_si256((const __m256i *)(row[r + 1] + i * LANES));
            /* A shuffle gives 0 for 128 and more, and that is what all but 0..15 become (sums stop at 255). */
            one = _mm256_adds_epu8(_mm256_sub_epi8(one, base), over);
            two = _mm256_adds_epu8(_mm256_sub_epi8(two, base), over);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m256i carry = full_adder(&digit[half][0], _mm256_shuffle_epi8(table[half], one),
                                           _mm256_shuffle_epi8(table[half], two));
                int d = 1;
                for (; r >> d & 1; d++) /* two carries make one of the next digit; the first of them waits */
                    carry = full_adder(&digit[half][d], waiting[half][d], carry);
                waiting[half][d] = carry;
            }
        }
        for (int half = 0; half < 2; half++)
            for (int d = 4; d < 8; d++) { /* the carry of all 16 rows */
                __m256i carry = digit[half][d] & waiting[half][4];
                digit[half][d] ^= waiting[half][4];
                waiting[half][4] = carry;
            }
        for (int d = 0; d < 16; d++)
            kept[d] = digit[d / 8][d % 8];
    }
}

AVX2 static void sliced_write(const column *sums, ptrdiff_t columns, ptrdiff_t classes, uint8_t *counts)
{
    for (ptrdiff_t i = 0; i < columns; i++) {
        uint64_t word[2][LANES];
        for (int half = 0; half < 2; half++)
            for (int q = 0; q < LANES; q++) {
                uint64_t x = 0, t;
                for (int d = 0; d < 8; d++)
                    x |= (uint64_t)sums[i][8 * half + d][q] << 8 * d;
                /* 8 bytes, a digit of 8 counts each -> 8 counts of 8 digits: a square of bits is transposed. */
                t = (x ^ x >> 7) & 0x00AA00AA00AA00AA, x ^= t ^ t << 7;
                t = (x ^ x >> 14) & 0x0000CCCC0000CCCC, x ^= t ^ t << 14;
                t = (x ^ x >> 28) & 0x00000000F0F0F0F0, x ^= t ^ t << 28;
                word[half][q] = x;
            }
        for (int q = 0; q < LANES; q++, counts += classes) {
            memcpy(counts, &word[0][q], 8);
            memcpy(counts + 8, &word[1][q], 8);
        }
    }
}
#endif

void tally(const uint8_t *prediction, ptrdiff_t stride, ptrdiff_t teachers, ptrdiff_t first, ptrdiff_t end,
           int classes, int32_t *counts)
{
    void (*add)(const uint8_t *const *, ptrdiff_t, int, column *) = plain_add;
    void (*write)(const column *, ptrdiff_t, ptrdiff_t, uint8_t *) = plain_write;
#ifdef AVX2
    if (__builtin_cpu_supports("avx2")) /* asked when called: one file serves all machines of a cluster */
        add = sliced_add, write = sliced_write;
#endif
    __attribute__((aligned(LANES))) column sums[COLUMNS];
    uint8_t nobody[WIDTH], last[ROWS][LANES], byte[WIDTH * MOST + CLASSES];
    memset(nobody, 255, sizeof nobody); /* rows of no votes, where there are no 16 */
    for (ptrdiff_t q = first; q < end; q += WIDTH) {
        ptrdiff_t width = end - q < WIDTH ? end - q : WIDTH, columns = width / LANES, rest = width % LANES;
        int32_t *out = counts + q * classes;
        for (ptrdiff_t start = 0; start < teachers; start += GROUP) {
            ptrdiff_t stop = teachers - start < GROUP ? teachers : start + GROUP;
            /* The highest classes first: what is written beyond a query's own counts is then overwritten. */
            for (int low = (classes - 1) / CLASSES * CLASSES; low >= 0; low -= CLASSES) {
                memset(sums, 0, sizeof sums);
                for (ptrdiff_t k = start; k < stop; k += ROWS) {
                    const uint8_t *row[ROWS];
                    for (int r = 0; r < ROWS; r++)
                        row[r] = k + r < stop ? prediction + (k + r) * stride + q : nobody;
                    add(row, columns, low, sums);
                    if (rest) { /* copied: nothing is read beyond the end of a row */
                        for (int r = 0; r < ROWS; r++)
                            row[r] = memcpy(last[r], row[r] + columns * LANES, rest);
                        add(row, 1, low, sums + columns);
                    }
                }
                write(sums, columns + (rest > 0), classes, byte + low);
            }
            for (ptrdiff_t i = 0; i < width * classes; i++)
                out[i] = (start ? out[i] : 0) + byte[i];
        }
    }
}
