// What the kernel that fuses two factors is launched with, and how it divides its work. Host and device share it.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::kronecker::chain {

/// A factor (q, s, r, 1), then a factor (1, p, q, s), by a cluster of `ranks` CTAs. A CTA keeps the weights of q /
/// ranks blocks of the first and of s / ranks δ of the second, and takes the rows of the batch 16 at a time. Groups of
/// `exchange` CTAs swap results, so that each stores wider pieces of fewer rows.
struct Monarch {
  int q, r, s, p, ranks, exchange;

  static constexpr int kRows = 16;
  static constexpr int kWarps = 8;  ///< of each factor
  static constexpr int kThreads = 2 * kWarps * 32;
  static constexpr int kShared = 227 * 1024, kBarriers = 256;
  static constexpr int kMostWords = 64;  ///< registers of a thread that hold weights

  constexpr int blocks() const { return q / ranks; }
  constexpr int deltas() const { return s / ranks; }
  constexpr int features() const { return blocks() * r; }

  /// Warps divide the pairs of a factor's products among themselves, and where these are few, also the columns.
  struct Share {
    int pairs, columns, warps;  ///< of one warp; and warps that share a pair
    constexpr int tiles() const { return columns % 32 == 0 ? 4 : columns % 16 == 0 ? 2 : 1; }  ///< 8 columns each
    constexpr int groups() const { return columns / 8 / tiles(); }
    constexpr int words(int depth) const { return pairs * 2 * (depth / 16) * (columns / 8) * 2; }
    constexpr int first_pair(int warp) const { return warp / warps * pairs; }
    constexpr int first_column(int warp) const { return warp % warps * columns; }
  };
  static constexpr Share share(int products, int columns) {
    const int pairs = products / 2;
    return pairs >= kWarps ? Share{pairs / kWarps, columns, 1} : Share{1, columns / (kWarps / pairs), kWarps / pairs};
  }
  static constexpr bool shares(int products, int columns) {
    const int pairs = products / 2;
    return pairs > 0 && (pairs % kWarps == 0 || (kWarps % pairs == 0 && columns % (8 * kWarps / pairs) == 0));
  }
  constexpr Share first() const { return share(blocks(), s); }
  constexpr Share second() const { return share(deltas(), p); }
  constexpr int first_words() const { return first().words(r); }
  constexpr int second_words() const { return second().words(q); }
  /// 32-bit words of packed weights.
  constexpr long long words() const { return 32LL * kWarps * ranks * (first_words() + second_words()); }

  // A slot of each ring. Where the cluster is one CTA the middle needs no sending, and likewise the result.
  constexpr int x_bytes() const { return 2 * kRows * features(); }
  constexpr int middle_bytes() const { return 2 * kRows * q * deltas(); }
  constexpr int y_bytes() const { return 2 * kRows * p * deltas(); }
  constexpr int bias_bytes() const { return 2 * p * deltas(); }
  constexpr int middle_slot() const { return (ranks > 1 ? 2 : 1) * middle_bytes(); }
  constexpr int y_slots_bytes() const { return (exchange > 1 ? 4 : 2) * y_bytes(); }
  constexpr int room() const { return kShared - kBarriers - bias_bytes() - y_slots_bytes(); }
  constexpr int middle_slots() const { return room() >= 3 * middle_slot() + 3 * x_bytes() ? 3 : 2; }
  constexpr int x_slots() const {
    const int fit = (room() - middle_slots() * middle_slot()) / x_bytes();
    return fit < 8 ? fit : 8;
  }
  constexpr int shared() const {
    return x_slots() * x_bytes() + middle_slots() * middle_slot() + y_slots_bytes() + bias_bytes() + kBarriers;
  }

  /// Whether the kernel can be made like this. The copy engine takes 64 features at a time, 8 neighbouring i or l are
  /// the 16 bytes that matrices load by.
  constexpr bool valid() const {
    return q % (8 * ranks) == 0 && s % (8 * ranks) == 0 && q % 16 == 0 && r % 16 == 0 && p % 8 == 0 &&
           features() % 64 == 0 && features() / 64 <= 256 && p * deltas() % 64 == 0 && shares(blocks(), s) &&
           shares(deltas(), p) && first_words() <= kMostWords && second_words() <= kMostWords && x_slots() >= 2 &&
           ranks % exchange == 0 && kRows % exchange == 0;
  }
};

struct FusedParams {
  Map x;  ///< (64 features, batch, pieces of 64 features)
  const void* weights;
  void* y;
  const void* bias;  ///< or null
  long long batch, y_stride, bias_stride;
  int activation;  ///< as fretwork::Activation counts
};

/// Weights in the order in which the kernel's threads hold them: [rank][warp][words / 4][lane][4], first factor, then
/// second.
struct PackParams {
  const void *first, *second;
  void* to;
  long long first_a, first_b, first_c, second_b, second_c, second_d;
};
inline constexpr int kPackThreads = 256;

}  // namespace fretwork::kronecker::chain
