/* Patterns for callers that speak C, such as Python's ctypes. Every function that can fail gives null (or a negative
 * number) and leaves its text in fretwork_error(). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An immutable pattern; freed with fretwork_pattern_free. */
typedef struct fretwork_pattern fretwork_pattern;

/* What went wrong in the last call of this thread that failed: "op: argument: expected …, got …". */
const char* fretwork_error(void);

/* The pattern that a text or key describes, or null. */
fretwork_pattern* fretwork_pattern_parse(const char* text, size_t length);
/* A block layout; sizes are (heads, rows, cols, block_rows, block_cols), mask holds heads·rows·cols bytes, 0 or 1. */
fretwork_pattern* fretwork_block_layout(const int64_t sizes[5], const uint8_t* mask);
fretwork_pattern* fretwork_pattern_transpose(const fretwork_pattern* pattern);
void fretwork_pattern_free(fretwork_pattern* pattern);

/* The strings and the shape live as long as the pattern. */
const char* fretwork_pattern_text(const fretwork_pattern* pattern);
const char* fretwork_pattern_key(const fretwork_pattern* pattern);
int fretwork_pattern_rank(const fretwork_pattern* pattern);
const int64_t* fretwork_pattern_shape(const fretwork_pattern* pattern);
int64_t fretwork_pattern_nnz(const fretwork_pattern* pattern);
double fretwork_pattern_density(const fretwork_pattern* pattern);
/* Writes 0 or 1 for each of `count` elements, row-major; −1 when count is not the pattern's. */
int fretwork_pattern_mask(const fretwork_pattern* pattern, uint8_t* out, int64_t count);
/* Writes (heads, rows, cols, block_rows, block_cols); −1 when the pattern is no block layout. */
int fretwork_block_layout_sizes(const fretwork_pattern* pattern, int64_t sizes[5]);

#ifdef __cplusplus
}
#endif
