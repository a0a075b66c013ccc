// Random bits as a function of where they are used: dropout looks the same to every tiling, forward and backward, and
// to the CPU, which includes this file too.
#pragma once

namespace fretwork {

#ifdef __CUDACC__
#define FRETWORK_HOST_DEVICE __device__ __forceinline__
#else
#define FRETWORK_HOST_DEVICE inline
#endif

/// Every bit of the result depends on every bit of x.
FRETWORK_HOST_DEVICE unsigned mix_bits(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

/// What the elements of one (batch, head) share.
FRETWORK_HOST_DEVICE unsigned random_head(long long seed, long long batch_head) {
  unsigned h = mix_bits(static_cast<unsigned>(seed) + 0x9e3779b9u);
  h = mix_bits(h ^ static_cast<unsigned>(static_cast<unsigned long long>(seed) >> 32));
  return mix_bits(h + static_cast<unsigned>(batch_head) * 0x85ebca6bu);
}
/// And those of one of its rows.
FRETWORK_HOST_DEVICE unsigned random_row(unsigned head_state, long long row) {
  return mix_bits(head_state ^ static_cast<unsigned>(row) * 0xc2b2ae35u);
}
FRETWORK_HOST_DEVICE unsigned random_row(long long seed, long long batch_head, long long row) {
  return random_row(random_head(seed, batch_head), row);
}

/// 32 random bits that the elements at `col` and at the column which differs in bit 3 share: those of a fragment of the
/// tensor cores that one thread has.
FRETWORK_HOST_DEVICE unsigned random_pair(unsigned row_state, long long col) {
  return mix_bits(row_state + (static_cast<unsigned>(col) & ~8u) * 0x27d4eb2fu);
}
/// What they are to the column without bit 3: halves change places, and the upper one decides.
FRETWORK_HOST_DEVICE unsigned swap_halves(unsigned bits) { return bits << 16 | bits >> 16; }

/// 32 random bits for the element at `col`. It is kept iff they are at least `threshold` = ⌊rate · 2^32⌋.
FRETWORK_HOST_DEVICE unsigned random_bits(unsigned row_state, long long col) {
  const unsigned bits = random_pair(row_state, col);
  return (static_cast<unsigned>(col) & 8u) != 0 ? bits : swap_halves(bits);
}

}  // namespace fretwork
