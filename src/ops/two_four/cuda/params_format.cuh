// Parameters of the kernels that make and undo the plain form; shared by host and device.
#pragma once

namespace fretwork {

/// A matrix of `lines` lines; strides count elements.
struct FormatMatrix {
  void* data;
  long long line, along;
  int wide;    ///< whole accesses of 16 bytes (8 for values): all is aligned, and no access is cut by an end
  int turned;  ///< neighbours in memory are of different lines: through shared memory
};

/// Values and metadata of a matrix; strides of words count words.
struct FormatPacked {
  FormatMatrix values;
  unsigned char* words;
  long long words_line, words_along;
  long long bytes;  ///< of metadata in a line, padding included
  int word_shift;   ///< a word has 1 << word_shift bytes
  int words_wide;   ///< bytes of a line are neighbours, and lines begin at multiples of 8
};

/// How the bits of an element become a magnitude.
enum class FormatKind : int { f32, f16, bf16, f8_e4m3, f8_e5m2, i8, u8 };

struct FormatParams {
  FormatMatrix dense, out;
  FormatPacked packed, cols;
  unsigned long long* bad;  ///< the least place of something wrong, all ones before; or null
  long long lines, k;
  unsigned tiles_k;
  int plain;       ///< whole tiles of matrices whose lines are aligned and lie along k, metadata for words of 4 bytes
  int transposed;  ///< places are k·lines + line
  unsigned magnitude;  ///< the bits of a word that say whether its elements are zero
  unsigned largest;    ///< of an element: no magnitude has more, so that NaNs are alike
  FormatKind kind;
  unsigned valid;  ///< of a look at metadata: bit n: nibble n is one
  int group, element_bytes, keep_valid;
};

/// A CTA's tile: kFormatTileK elements of as many lines as make 128 bytes.
inline constexpr int kFormatThreads = 256, kFormatTileK = 256, kFormatLineBytes = 128;
/// Metadata alone is looked at in tiles of 32 bytes × 64 lines.
inline constexpr int kFormatCheckBytes = 32, kFormatCheckLines = 64;

constexpr int format_tile_bytes() { return kFormatTileK * kFormatLineBytes; }

}  // namespace fretwork
