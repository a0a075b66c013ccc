// What is done to the scores of a strip before the softmax (softcap, bias, ALiBi, masks, padding), and which are kept
// after it (dropout): Scores of strips.h.
#include <algorithm>
#include <cmath>

#include "device/random.cuh"
#include "ops/attention/cpu/strips.h"

namespace fretwork::attention_op::cpu {

template <typename Acc>
Scores<Acc>::Scores(const Problem& problem, const Plan& plan, const Columns<Acc>& columns, bool transposed,
                    const Machine<Acc>& machine)
    : p_(problem), plan_(plan), columns_(columns), transposed_(transposed), machine_(machine) {
  if (problem.slopes.data != nullptr) {
    const std::int64_t shift = transposed ? problem.cols - problem.rows : 0;
    positions_.resize(static_cast<std::size_t>(columns.places()));
    for (std::size_t n = 0; n < positions_.size(); ++n) {
      positions_[n] = static_cast<Acc>(columns.tokens()[n] + shift);
    }
  }
}

template <typename Acc>
void Scores<Acc>::add_bias(const Strip& strip, Head head, std::int64_t token, Acc* row, Acc* scratch) const {
  const Bias& bias = p_.bias;
  const std::int64_t along = transposed_ ? bias.row : bias.col, across = transposed_ ? bias.col : bias.row;
  const auto size = static_cast<std::int64_t>(size_of(bias.dtype));
  const auto* const base = static_cast<const std::byte*>(bias.data) +
                           (head.batch * bias.batch + head.head * bias.head + token * across) * size;
  for (const Piece& piece : strip.pieces) {
    const std::int64_t count = piece.end - piece.begin;
    const std::int64_t* const tokens = columns_.tokens() + piece.place;
    // Tokens rise along a tile, so that these are neighbours.
    if (tokens[0] >= 0 && tokens[count - 1] - tokens[0] == count - 1) {
      machine_.rows.widen(base + tokens[0] * along * size, bias.dtype, along, count, Acc{1}, scratch);
    } else {
      for (std::int64_t n = 0; n < count; ++n) {
        scratch[n] = 0;
        if (tokens[n] >= 0) {
          machine_.rows.widen(base + tokens[n] * along * size, bias.dtype, 1, 1, Acc{1}, scratch + n);
        }
      }
    }
    machine_.rows.add(row + piece.at, scratch, count);
  }
}

template <typename Acc>
void Scores<Acc>::mask(const Strip& strip, Acc* scores, std::int64_t stride) const {
  for (const Piece& piece : strip.pieces) {
    if (piece.mask < 0) {
      continue;
    }
    const Mask& mask = plan_.masks[static_cast<std::size_t>(piece.mask)];
    if (mask.rows >= 0) {
      const Interval* const rows = plan_.intervals.data() + mask.rows + strip.first;
      for (std::int64_t n = 0; n < strip.rows; ++n) {
        machine_.rows.band(scores + n * stride + piece.at, stride, 1, piece.end - piece.begin,
                           rows[n].begin - piece.begin, rows[n].end - piece.begin, piece.end - piece.begin);
      }
      continue;
    }
    if (mask.bits < 0) {
      machine_.rows.band(scores + piece.at, stride, strip.rows, piece.end - piece.begin,
                         strip.first + mask.low - piece.begin, strip.first + mask.high + 1 - piece.begin,
                         mask.limit - piece.begin);
      continue;
    }
    const std::uint32_t* words = plan_.bits.data() + mask.bits + strip.first * plan_.shape.cols / 32;
    for (std::int64_t n = 0; n < strip.rows; ++n, words += plan_.shape.cols / 32) {
      select(piece, words, scores + n * stride);
    }
  }
}

template <typename Acc>
void Scores<Acc>::select(const Piece& piece, const std::uint32_t* words, Acc* row) const {
  const std::int64_t lanes = machine_.tiles.lanes;
  Acc* const x = row + piece.at - piece.begin;
  // Panels may begin inside a word.
  const std::int64_t first = std::min(ceil_div(piece.begin, 32) * 32, piece.end);
  for (std::int64_t c = piece.begin; c < first; c += lanes) {
    const std::uint32_t bits = words[c / 32] >> c % 32;
    machine_.rows.select(x + c, &bits, lanes);
  }
  machine_.rows.select(x + first, words + first / 32, piece.end - first);
}

template <typename Acc>
void Scores<Acc>::hide(const Strip& strip, std::int64_t batch, Acc* scores, std::int64_t stride) const {
  const SeenColumns& seen = columns_.seen();
  for (const Piece& piece : strip.pieces) {
    const std::int64_t tile = piece.place / plan_.shape.cols;
    for (std::int64_t n = 0; seen.any(batch, tile) && n < strip.rows; ++n) {
      select(piece, seen.words(batch, tile), scores + n * stride);
    }
  }
}

template <typename Acc>
void Scores<Acc>::adjust(const Strip& strip, Head head, const std::int64_t* tokens, Acc* scores, std::int64_t stride,
                         Acc* slopes, Acc* scratch) const {
  const bool plain = p_.softcap == 0 && p_.bias.data == nullptr && p_.slopes.data == nullptr;
  for (std::int64_t n = 0; !plain && n < strip.rows; ++n) {
    Acc* const row = scores + n * stride;
    const std::int64_t token = tokens[n];
    if (p_.softcap != 0) {
      machine_.rows.cap(row, strip.length, static_cast<Acc>(p_.softcap),
                        slopes != nullptr ? slopes + n * stride : nullptr);
    }
    if (p_.bias.data != nullptr && token >= 0) {
      add_bias(strip, head, token, row, scratch);
    }
    if (p_.slopes.data != nullptr && token >= 0) {
      const Acc slope = static_cast<const Acc*>(p_.slopes.data)[head.head * p_.slopes.head];
      const std::int64_t position = token + (transposed_ ? 0 : p_.cols - p_.rows);
      for (const Piece& piece : strip.pieces) {
        machine_.rows.alibi(row + piece.at, piece.end - piece.begin, positions_.data() + piece.place,
                            static_cast<Acc>(position), slope);
      }
    }
  }
  mask(strip, scores, stride);
  if (columns_.seen().any()) {
    hide(strip, head.batch, scores, stride);
  }
}

template <typename Acc>
unsigned Scores<Acc>::state(Head head, std::int64_t row) const {
  return random_row(*p_.dropout.seed, head.batch * p_.heads + head.head, row);
}

template <typename Acc>
void Scores<Acc>::keep(const Strip& strip, Head head, std::int64_t token, const unsigned* states, Acc* factors) const {
  const double rate = p_.dropout.rate;
  const auto threshold = static_cast<std::uint64_t>(std::floor(rate * 0x1p32));
  const auto factor = static_cast<Acc>(rate < 1 ? 1 / (1 - rate) : 0);
  for (const Piece& piece : strip.pieces) {
    const std::int64_t count = piece.end - piece.begin;
    if (transposed_) {
      machine_.rows.keep_rows(states + piece.place, token, count, threshold, factor, factors + piece.at);
    } else {
      machine_.rows.keep_columns(state(head, token), columns_.tokens() + piece.place, count, threshold, factor,
                                 factors + piece.at);
    }
  }
}

template class Scores<float>;
template class Scores<double>;

}  // namespace fretwork::attention_op::cpu
