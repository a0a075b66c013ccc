// Packs weights and rows of neighbouring δ into lines of one δ each, on a GPU.
#pragma once

#include "ops/kronecker/cuda/params_hopper.cuh"
#include "ops/kronecker/problem.h"

namespace fretwork::kronecker {

/// How the a·d matrices of packed weights lie: entries of a line are k, else j, and lines are `pitch` elements apart.
struct Lines {
  bool along_k = true;
  std::int64_t pitch = 0;  ///< a multiple of 16 bytes
  bool tf32 = false;       ///< fp32 is rounded to it
};

/// to[i·d + l][line][entry]; what lies between lines is not written. `to` is aligned to 16 bytes. The next kernel may
/// be launched behind this.
void pack(const Weights& w, const Sizes& s, DType dtype, const Lines& lines, void* to, const Context& context);

/// The d products of a block as one dense matrix, with zeros between: to[i][line·d + l][entry·d + l].
void pack_dense(const Weights& w, const Sizes& s, DType dtype, const Lines& lines, void* to, const Context& context);

/// Launches regroup.cuh for elements of `bytes`.
void regroup(const hopper::RegroupParams& params, int bytes, bool back, const Context& context);

/// Batch first with d > 1: whether rows of `width` features of each (i, l) can be brought into a form with the features
/// of one δ together, where the products of d = 1 take them, and back. Three passes over memory instead of one, which
/// pays for large blocks.
bool regroups(const Matrix& m, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes);
/// Does it; rows of `grouped` follow each other.
void regroup(const Matrix& m, void* grouped, std::int64_t width, std::int64_t batch, const Sizes& s, int bytes,
             bool back, const Context& context);

}  // namespace fretwork::kronecker
