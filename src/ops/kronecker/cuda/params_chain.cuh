// Parameters of the fused kernels for two factors, and how they divide the work; shared by host and device.
#pragma once

#include "device/tensor_map.cuh"

namespace fretwork::kronecker::chain {

/// A factor (q, s, r, 1), then a factor (1, p, q, s), by a cluster of `ranks` CTAs. A CTA keeps the weights of q /
/// ranks blocks of the first and of s / ranks δ of the second, and takes the rows of the batch 16 at a time. Groups of
/// `exchange` CTAs swap results, so that each stores wider pieces of fewer rows. 8 warps multiply
/// each factor, or 4 that hold twice the weights and read what they multiply half as often.
struct Monarch {
  int q, r, s, p, ranks, exchange;
  int first_warps = 8, second_warps = 8;

  static constexpr int kRows = 16;
  static constexpr int kMostWords = 8 * 64;  ///< of a factor's weights that are in a CTA's registers, by the lane
  static constexpr int kShared = 227 * 1024, kBarriers = 256;

  constexpr int blocks() const { return q / ranks; }
  constexpr int deltas() const { return s / ranks; }
  constexpr int features() const { return blocks() * r; }
  constexpr int threads() const { return 32 * (first_warps + second_warps); }

  /// Warps divide the pairs of a factor's products among themselves, and where these are few, also the columns.
  struct Share {
    int pairs, columns;  ///< of one warp
    int warps;           ///< that share a pair
    int most;            ///< tiles of 8 columns whose sums a warp has at once
    constexpr int tiles() const {
      int n = most;
      while (columns % (8 * n) != 0) {
        n /= 2;
      }
      return n;
    }
    constexpr int groups() const { return columns / 8 / tiles(); }
    constexpr int words(int depth) const { return pairs * 2 * (depth / 16) * (columns / 8) * 2; }
    constexpr int first_pair(int warp) const { return warp / warps * pairs; }
    constexpr int first_column(int warp) const { return warp % warps * columns; }
  };
  static constexpr Share share(int products, int columns, int warps) {
    const int pairs = products / 2, most = 32 / warps;
    return pairs >= warps ? Share{pairs / warps, columns, 1, most}
                          : Share{1, columns / (warps / pairs), warps / pairs, most};
  }
  static constexpr bool shares(int products, int columns, int warps) {
    const int pairs = products / 2;
    return pairs > 0 && (pairs % warps == 0 || (warps % pairs == 0 && columns % (8 * warps / pairs) == 0));
  }
  constexpr Share first() const { return share(blocks(), s, first_warps); }
  constexpr Share second() const { return share(deltas(), p, second_warps); }
  constexpr int first_words() const { return first().words(r); }
  constexpr int second_words() const { return second().words(q); }
  /// 32-bit words of packed weights.
  constexpr long long words() const {
    return 32LL * ranks * (first_warps * first_words() + second_warps * second_words());
  }

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
           features() % 64 == 0 && features() / 64 <= 256 && p * deltas() % 64 == 0 &&
           shares(blocks(), s, first_warps) && shares(deltas(), p, second_warps) &&
           first_words() * first_warps <= kMostWords && second_words() * second_warps <= kMostWords && x_slots() >= 2 &&
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

/// 64 products of 64 × 64 in each factor, by a cluster of eight CTAs with wgmma. Pairs of CTAs swap results, so that
/// each stores 32 bytes at a time.
struct Wide {
  static constexpr int kRanks = 8, kRows = 16, kThreads = 384, kBarriers = 256;
  static constexpr long long kWords = 1 << 18;  ///< 32-bit words of packed weights

  // Bytes: of a slot of x or y; of 16 rows of one l and eight i, apart so that stores meet all banks; of what one CTA
  // sends another; of a slot of the middle, which is there twice, as it is sent and as it arrives.
  static constexpr int kSlot = 2 * kRows * 512, kLine = 272, kPiece = 8 * kLine, kMiddleBytes = kRanks * kPiece;
  static constexpr int kXSlots = 4, kMiddleSlots = 3, kYSlots = 2, kReceivedSlots = 2;
  static constexpr int kBias = 64 * 8 * 4;
  static constexpr int kShared =
      (kXSlots + kYSlots) * kSlot + kMiddleSlots * 2 * kMiddleBytes + kReceivedSlots * kSlot / 2 + kBias + kBarriers;
};

struct WideParams {
  Map x;  ///< (64 features, batch, pieces of 64 features)
  Map y;  ///< (l, batch, j)
  const void* weights;
  const void* bias;  ///< or null
  long long batch, bias_stride;
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
