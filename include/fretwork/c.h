/* Patterns, and what is done with them alone, for callers that speak C, such as Python's ctypes. Every function that
 * can fail gives null (or a negative number) and leaves its text in fretwork_error(). */
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
/* A Kronecker pattern; sizes are (a, b, c, d). */
fretwork_pattern* fretwork_kronecker_pattern(const int64_t sizes[4]);
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

/* Regular patterns. What `rows` × `cols` bytes say, each 0 or 1; and one progression for each of `rows` rows. */
fretwork_pattern* fretwork_pattern_from_mask(int64_t rows, int64_t cols, const uint8_t* mask);
fretwork_pattern* fretwork_pattern_from_acsr(const int64_t* start, const int64_t* stride, const int64_t* count,
                                             int64_t rows, int64_t cols);
/* What is in either pattern, or in both. Block layouts of one head and Kronecker patterns count as regular here and
 * below. */
fretwork_pattern* fretwork_pattern_union(const fretwork_pattern* left, const fretwork_pattern* right);
fretwork_pattern* fretwork_pattern_intersection(const fretwork_pattern* left, const fretwork_pattern* right);
/* Whether an element is there: 1, 0, or −1 where the pattern is not regular. */
int fretwork_pattern_contains(const fretwork_pattern* pattern, int64_t row, int64_t col);
/* The blocks that it touches as a block layout, and the share of their elements that it has not; or null. */
fretwork_pattern* fretwork_pattern_block_cover(const fretwork_pattern* pattern, int64_t block_rows, int64_t block_cols,
                                               double* fill_in);
/* Writes a progression for each row; −1 when a row is not one. */
int fretwork_pattern_acsr(const fretwork_pattern* pattern, int64_t* start, int64_t* stride, int64_t* count);
/* What was recognised, in `text` of `size` bytes; gives the length without the end, whether it fits or not. */
int64_t fretwork_pattern_describe(const fretwork_pattern* pattern, char* text, size_t size);

/* Writes (a, b, c, d); −1 when the pattern is no Kronecker pattern. */
int fretwork_kronecker_sizes(const fretwork_pattern* pattern, int64_t sizes[4]);
/* The same pattern as a block layout, or null. */
fretwork_pattern* fretwork_kronecker_block_layout(const fretwork_pattern* pattern);
/* 1 where left·right is a chain, 0 where it is not, −1 when one is no pattern; and the pattern of the product. */
int fretwork_kronecker_chainable(const int64_t left[4], const int64_t right[4]);
int fretwork_kronecker_product(const int64_t left[4], const int64_t right[4], int64_t out[4]);
/* Write (a, b, c, d) of each pattern in order of application and give their number: 2, and at most 62. */
int fretwork_kronecker_monarch(int64_t out_features, int64_t in_features, int64_t p, int64_t q, int64_t* patterns);
int fretwork_kronecker_butterfly(int64_t n, int64_t* patterns);
/* How a chain of `count` patterns (4 numbers each, in order of application) runs on `arch`, "cpu", "sm_90a" and so on,
 * or "cuda:0": a line for each step, in `text` of `size` bytes; gives the length without the end, whether it fits or
 * not. `dtype` is float64, float32, float16 or bfloat16. */
int fretwork_kronecker_plan(const int64_t* patterns, int count, const char* arch, const char* dtype, int bs_last,
                            char* text, size_t size);
/* The weights whose product is near `dense` (rows × cols, row-major). `patterns` holds `count` times (a, b, c, d) in
 * order of application, weights[n] has room for a·b·c·d of pattern n. */
int fretwork_kronecker_project(const double* dense, int64_t rows, int64_t cols, const int64_t* patterns, int count,
                               double* const* weights, double* error);
/* Entries of the longest row of a pattern whose every row is one progression; -1 where that is not so, with an error
 * that names `op`. */
int64_t fretwork_pattern_width(const fretwork_pattern* pattern, const char* op);

#ifdef __cplusplus
}
#endif
