// Attention over a sliding window and a 2:4 product on a GPU, both checked against plain loops on the host.
#include <fretwork/fretwork.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

using fretwork::Context, fretwork::DeviceTensor, fretwork::DType;

/// bfloat16: the upper half of a float, rounded to nearest even.
using Bits = std::vector<std::uint16_t>;
std::uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
double from_bf16(std::uint16_t x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

/// A tensor on the host; `copy` gives it to the GPU, `read` gets it back.
Bits random_numbers(std::int64_t count) {
  static std::mt19937 generator(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Bits numbers(static_cast<std::size_t>(count));
  std::generate(numbers.begin(), numbers.end(), [&] { return to_bf16(uniform(generator)); });
  return numbers;
}
DeviceTensor copy(const Bits& host, std::initializer_list<std::int64_t> sizes, const Context& context) {
  DeviceTensor tensor(context, DType::bf16, sizes);
  tensor.copy_from(host);
  return tensor;
}
Bits read(const DeviceTensor& tensor) {
  Bits host(static_cast<std::size_t>(tensor.elements()));
  tensor.copy_to(host);
  return host;
}

/// The largest error, relative to numbers above 1. Rounding to bfloat16 alone makes 0.004.
double worst_error(const Bits& got, const std::vector<double>& expected) {
  double worst = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double error = std::abs(from_bf16(got[n]) - expected[n]) / std::max(1.0, std::abs(expected[n]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

/// softmax(q·kᵀ/√depth)·v of every head over the keys that each query sees.
std::vector<double> plain_attention(const Bits& q, const Bits& k, const Bits& v,
                                    const fretwork::RegularPattern& pattern, std::int64_t heads, std::int64_t depth) {
  const std::int64_t rows = pattern.rows(), cols = pattern.cols();
  std::vector<double> out(q.size());
  for (std::int64_t row = 0; row < heads * rows; ++row) {
    const std::int64_t first = row / rows * cols;  // key of this head
    double sum = 0;
    for (std::int64_t col = 0; col < cols; ++col) {
      if (!pattern.contains(row % rows, col)) {
        continue;
      }
      double score = 0;
      for (std::int64_t d = 0; d < depth; ++d) {
        score += from_bf16(q[row * depth + d]) * from_bf16(k[(first + col) * depth + d]);
      }
      const double weight = std::exp(score / std::sqrt(static_cast<double>(depth)));
      sum += weight;
      for (std::int64_t d = 0; d < depth; ++d) {
        out[row * depth + d] += weight * from_bf16(v[(first + col) * depth + d]);
      }
    }
    for (std::int64_t d = 0; d < depth; ++d) {
      out[row * depth + d] /= sum;
    }
  }
  return out;
}

double attention_error(Context& context) {
  const std::int64_t heads = 4, seq = 512, depth = 64, count = heads * seq * depth;
  const Bits q = random_numbers(count), k = random_numbers(count), v = random_numbers(count);
  const DeviceTensor on_gpu[] = {copy(q, {1, heads, seq, depth}, context), copy(k, {1, heads, seq, depth}, context),
                                 copy(v, {1, heads, seq, depth}, context)};
  DeviceTensor out(context, DType::bf16, {1, heads, seq, depth});

  const auto pattern = fretwork::patterns::sliding_window(seq, 100, 0);
  fretwork::attention(on_gpu[0].view(), on_gpu[1].view(), on_gpu[2].view(), pattern, out.view(), {}, context);
  return worst_error(read(out), plain_attention(q, k, v, *pattern, heads, depth));
}

double two_four_error(Context& context) {
  const std::int64_t rows = 256, depth = 512, batch = 100;
  const Bits x = random_numbers(batch * depth);
  const DeviceTensor input = copy(x, {batch, depth}, context);
  DeviceTensor weight = copy(random_numbers(rows * depth), {rows, depth}, context);
  DeviceTensor values(context, DType::bf16, {rows, depth / 2});
  DeviceTensor metadata(context, DType::i16, {rows, fretwork::two_four::words(depth, DType::bf16, DType::i16)});
  DeviceTensor out(context, DType::bf16, {batch, rows});

  // Of every four neighbours the two largest stay; then values and metadata stand for the weight.
  const fretwork::TwoFour sparse{values.view(), metadata.view(), 1};
  fretwork::two_four::prune(weight.view(), 1, false, weight.view(), context);
  fretwork::two_four::compress(weight.view(), sparse, nullptr, context);
  fretwork::two_four::linear(input.view(), sparse, out.view(), context);

  const Bits pruned = read(weight);
  std::vector<double> expected(static_cast<std::size_t>(batch * rows));
  for (std::int64_t n = 0; n < batch * rows; ++n) {
    for (std::int64_t d = 0; d < depth; ++d) {
      expected[n] += from_bf16(x[n / rows * depth + d]) * from_bf16(pruned[n % rows * depth + d]);
    }
  }
  return worst_error(read(out), expected);
}

int run() {
  if (fretwork::cuda_device_count() == 0) {
    std::printf("There is no GPU here, so there is nothing to show. product, beside this, needs none.\n");
    return 0;
  }
  Context context = Context::cuda();
  const double attention = attention_error(context), two_four = two_four_error(context);
  std::printf("largest error of attention %.1e, of the 2:4 product %.1e\n", attention, two_four);
  return std::max(attention, two_four) < 1e-2 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
