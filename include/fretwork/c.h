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

/* A key that is no text itself is known here for as long as it is held, though no pattern need be there, and a while
 * longer. It is held until let go as often. −1 where there is no memory. */
int fretwork_pattern_hold(const fretwork_pattern* pattern);
void fretwork_key_let_go(const char* key);

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
/* Rows and columns [begin, end) of a pattern, ends as (row, row, column, column); the pattern's first element at (row,
 * col) of rows × cols; `count` patterns along the diagonal; n tokens in front that see all and are seen by all. */
fretwork_pattern* fretwork_pattern_slice(const fretwork_pattern* pattern, const int64_t ends[4]);
fretwork_pattern* fretwork_pattern_place(const fretwork_pattern* pattern, int64_t rows, int64_t cols, int64_t row,
                                         int64_t col);
fretwork_pattern* fretwork_pattern_diag(const fretwork_pattern* const* patterns, size_t count);
fretwork_pattern* fretwork_pattern_with_prefix(const fretwork_pattern* pattern, int64_t n);
/* What `count` runs (row, begin, end) say together, in any order. */
fretwork_pattern* fretwork_pattern_from_runs(int64_t rows, int64_t cols, const int64_t* runs, size_t count);
/* Whether an element is there: 1, 0, or −1 where the pattern is not regular. */
int fretwork_pattern_contains(const fretwork_pattern* pattern, int64_t row, int64_t col);
/* Cuts the rows over `world_size` ranks where their elements come nearest to equal shares, at multiples of `align`:
 * writes for each rank where its rows end, and where its keys end. */
int fretwork_pattern_shard(const fretwork_pattern* pattern, int64_t world_size, int64_t align, int64_t* row_ends,
                           int64_t* key_ends);
/* Elements of rows [begin, end); and the keys that these have, as (rank, begin, end) in order, where rank r has the
 * keys up to key_ends[r]: as many as there is room for. Gives how many there are. −1 with an error. */
int64_t fretwork_pattern_rows_nnz(const fretwork_pattern* pattern, int64_t begin, int64_t end);
int64_t fretwork_pattern_rows_keys(const fretwork_pattern* pattern, int64_t begin, int64_t end, const int64_t* key_ends,
                                   int64_t ranks, int64_t* keys, int64_t room);
/* The blocks that it touches as a block layout, and the share of their elements that it has not; or null. */
fretwork_pattern* fretwork_pattern_block_cover(const fretwork_pattern* pattern, int64_t block_rows, int64_t block_cols,
                                               double* fill_in);
/* Writes a progression for each row; −1 when a row is not one. */
int fretwork_pattern_acsr(const fretwork_pattern* pattern, int64_t* start, int64_t* stride, int64_t* count);
/* What was recognised, in `text` of `size` bytes; gives the length without the end, whether it fits or not. */
int64_t fretwork_pattern_describe(const fretwork_pattern* pattern, char* text, size_t size);

/* A picture of one head in lines of `width` characters, with a terminal's colours or without; and as SVG. As above. */
int64_t fretwork_pattern_draw(const fretwork_pattern* pattern, int64_t head, int width, int colour, char* text,
                              size_t size);
int64_t fretwork_pattern_svg(const fretwork_pattern* pattern, int64_t head, char* text, size_t size);

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
 * not. `dtype` is float64, float32, float16 or bfloat16; `batch` is 0 for many rows. */
int fretwork_kronecker_plan(const int64_t* patterns, int count, const char* arch, const char* dtype, int bs_last,
                            int64_t batch, char* text, size_t size);
/* 1 where a product with the dense matrix of the whole chain is expected to take clearly less time, 0 where it is not
 * or nothing is known, −1 with an error. */
int fretwork_kronecker_dense_wins(const int64_t* patterns, int count, const char* arch, const char* dtype, int bs_last,
                                  int64_t batch);
/* The weights whose product is near `dense` (rows × cols, row-major). `patterns` holds `count` times (a, b, c, d) in
 * order of application, weights[n] has room for a·b·c·d of pattern n. Runs on `threads` threads, with the same result
 * on any number of them. */
int fretwork_kronecker_project(const double* dense, int64_t rows, int64_t cols, const int64_t* patterns, int count,
                               double* const* weights, double* error, int threads);
/* Entries of the longest row of a pattern whose every row is one progression; -1 where that is not so, with an error
 * that names `op`. */
int64_t fretwork_pattern_width(const fretwork_pattern* pattern, const char* op);
/* The columns of each row in ascending order, −1 behind a row's end: rows × width, width that of the widest row. */
int fretwork_pattern_columns(const fretwork_pattern* pattern, int64_t width, int32_t* columns);

/* Kernels of the caller's own: CUDA C++ that may include Fretwork's device headers ("device/mma.cuh" and so on), and
 * the name of a __global__ function in it, with template arguments where it has some. Compiled through the same cache
 * as Fretwork's own. */
typedef struct fretwork_kernel fretwork_kernel;
/* Compiles for an architecture such as "sm_90a", with or without a GPU, and writes registers, bytes of spills, of stack
 * and of static shared memory. 0, or −1 with the compiler's log as the error. */
int fretwork_kernel_compile(const char* source, const char* name, const char* arch, int64_t report[4]);
/* Compiles for this GPU and loads; the kernel lives as long as the process. Null where that fails. */
const fretwork_kernel* fretwork_kernel_load(const char* source, const char* name, int device);
/* Starts it on a CUstream: arguments[n] points to argument n of `count`, which has sizes[n] bytes. */
int fretwork_kernel_launch(const fretwork_kernel* kernel, int device, const unsigned grid[3], const unsigned block[3],
                           int shared_bytes, void** arguments, const size_t* sizes, int count, void* stream);

/* Foreign orders of 2:4 metadata, "torch", "cutlass_sm80" or "cutlass_sm90", for `lines` lines of k elements: writes
 * for each byte of the foreign buffer the byte of the plain one that it holds, or -1, as far as there is `room`. Gives
 * their number, or -1 with an error that names `op`. dtype is "float16", "int8", "float8_e4m3fn" and so on. */
int64_t fretwork_two_four_order(const char* op, const char* layout, int64_t lines, int64_t k, const char* dtype,
                                int64_t tile_k, int64_t* order, int64_t room);
/* 1 where a dense product with n columns is likely to be quicker than the 2:4 one of an (m, k) matrix, else 0; -1 for a
 * dtype that is none. `device` is "cpu" or "cuda" with an index, precision "ieee", "tf32" or "tf32x3". */
int fretwork_two_four_dense_wins(int64_t m, int64_t n, int64_t k, const char* dtype, const char* device, int index,
                                 const char* precision);

#ifdef __cplusplus
}
#endif
