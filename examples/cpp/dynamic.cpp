// Attention over keys that only the device knows: blocks of a mask, blocks that are selected there, and packed
// documents with gradients. On a GPU if there is one, else on this thread; checked against plain loops on the host.
#include <fretwork/fretwork.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <random>
#include <vector>

namespace {

using fretwork::Context, fretwork::DeviceTensor, fretwork::DType;
using Numbers = std::vector<float>;

constexpr std::int64_t kHeads = 4, kSeq = 300, kDepth = 64, kBlock = 32, kBlocks = (kSeq + kBlock - 1) / kBlock;
constexpr std::int64_t kCount = kHeads * kSeq * kDepth;

std::mt19937& generator() {
  static std::mt19937 numbers(1);
  return numbers;
}
Numbers random_numbers(std::int64_t count) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  Numbers numbers(static_cast<std::size_t>(count));
  std::generate(numbers.begin(), numbers.end(), [&] { return uniform(generator()); });
  return numbers;
}

/// A tensor of the host, where the context computes.
template <typename T>
DeviceTensor copy(const std::vector<T>& host, DType dtype, std::initializer_list<std::int64_t> sizes,
                  const Context& context) {
  DeviceTensor tensor(context, dtype, sizes);
  tensor.copy_from(host);
  return tensor;
}
template <typename T = float>
std::vector<T> read(const DeviceTensor& tensor) {
  std::vector<T> host(static_cast<std::size_t>(tensor.elements()));
  tensor.copy_to(host);
  return host;
}

/// q, k and v, (1, heads, queries or keys, depth) each, on the host and where the context computes.
struct Operands {
  explicit Operands(const Context& context)
      : q(random_numbers(kCount)),
        k(random_numbers(kCount)),
        v(random_numbers(kCount)),
        device_q(copy(q, DType::f32, {1, kHeads, kSeq, kDepth}, context)),
        device_k(copy(k, DType::f32, {1, kHeads, kSeq, kDepth}, context)),
        device_v(copy(v, DType::f32, {1, kHeads, kSeq, kDepth}, context)) {}
  Numbers q, k, v;
  DeviceTensor device_q, device_k, device_v;
};

/// Which keys a query of a head sees.
using Sees = std::function<bool(std::int64_t head, std::int64_t query, std::int64_t key)>;

/// softmax(q·kᵀ/√depth)·v, and the gradient of v for a gradient of ones.
struct Plain {
  Plain(const Operands& x, const Sees& sees) : out(kCount), d_v(kCount) {
    for (std::int64_t head = 0; head < kHeads; ++head) {
      for (std::int64_t i = 0; i < kSeq; ++i) {
        std::vector<double> weights(kSeq);
        double sum = 0;
        for (std::int64_t j = 0; j < kSeq; ++j) {
          double score = 0;
          for (std::int64_t d = 0; d < kDepth; ++d) {
            score += static_cast<double>(x.q[at(head, i, d)]) * x.k[at(head, j, d)];
          }
          weights[j] = sees(head, i, j) ? std::exp(score / std::sqrt(static_cast<double>(kDepth))) : 0;
          sum += weights[j];
        }
        for (std::int64_t n = 0; sum > 0 && n < kSeq * kDepth; ++n) {
          const double weight = weights[n / kDepth] / sum;
          out[at(head, i, n % kDepth)] += weight * x.v[at(head, 0, n)];
          d_v[at(head, 0, n)] += weight;
        }
      }
    }
  }
  static std::size_t at(std::int64_t head, std::int64_t row, std::int64_t d) {
    return static_cast<std::size_t>((head * kSeq + row) * kDepth + d);
  }
  std::vector<double> out, d_v;
};

double worst_error(const Numbers& got, const std::vector<double>& expected) {
  double worst = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double error = std::abs(got[n] - expected[n]);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

/// Blocks of 32 queries × 32 keys, a byte each, under a causal pattern.
double masked_error(const Operands& x, Context& context) {
  std::vector<std::uint8_t> mask(kHeads * kBlocks * kBlocks);
  std::generate(mask.begin(), mask.end(), [] { return generator()() % 3 == 0; });
  const DeviceTensor device_mask = copy(mask, DType::boolean, {1, kHeads, kBlocks, kBlocks}, context);
  DeviceTensor out(context, DType::f32, {1, kHeads, kSeq, kDepth});

  const fretwork::DeviceKeys keys{.mask = device_mask.view(), .block_rows = kBlock, .block_cols = kBlock};
  fretwork::dynamic_attention(x.device_q.view(), x.device_k.view(), x.device_v.view(), fretwork::patterns::causal(kSeq),
                              keys, out.view(), {}, context);
  const Plain plain(x, [&](auto head, auto i, auto j) {
    return j <= i && mask[(head * kBlocks + i / kBlock) * kBlocks + j / kBlock];
  });
  return worst_error(read(out), plain.out);
}

/// The three best blocks of each query block: their lists stay on the device. They are read here to check the result.
double selected_error(const Operands& x, Context& context) {
  constexpr std::int64_t kTop = 3;
  DeviceTensor counts(context, DType::i32, {1, kHeads, kBlocks}),
      indices(context, DType::i32, {1, kHeads, kBlocks, kTop}), out(context, DType::f32, {1, kHeads, kSeq, kDepth});

  fretwork::select_blocks(x.device_q.view(), x.device_k.view(), kTop, counts.view(), indices.view(), context,
                          {.block_q = kBlock, .block_k = kBlock});
  const fretwork::DeviceKeys keys{
      .counts = counts.view(), .indices = indices.view(), .block_rows = kBlock, .block_cols = kBlock};
  fretwork::dynamic_attention(x.device_q.view(), x.device_k.view(), x.device_v.view(), nullptr, keys, out.view(), {},
                              context);
  const auto chosen = read<std::int32_t>(indices);
  const Plain plain(x, [&](auto head, auto i, auto j) {
    const auto list = chosen.begin() + (head * kBlocks + i / kBlock) * kTop;
    return std::find(list, list + kTop, j / kBlock) != list + kTop;
  });
  return worst_error(read(out), plain.out);
}

/// Documents of 100, 30 and 170 tokens side by side, causal, with the gradient of v.
double documents_error(const Operands& x, Context& context) {
  const std::vector<std::int32_t> starts{0, 100, 130, kSeq};
  const DeviceTensor cu = copy(starts, DType::i32, {std::ssize(starts)}, context),
                     ones = copy(Numbers(kCount, 1.0f), DType::f32, {1, kHeads, kSeq, kDepth}, context);
  DeviceTensor out(context, DType::f32, {1, kHeads, kSeq, kDepth}), lse(context, DType::f32, {1, kHeads, kSeq}),
      d_v(context, DType::f32, {1, kHeads, kSeq, kDepth});

  const fretwork::DeviceKeys keys{.cu_q = cu.view(), .causal = true};
  fretwork::dynamic_attention(x.device_q.view(), x.device_k.view(), x.device_v.view(), nullptr, keys, out.view(),
                              lse.view(), context);
  fretwork::dynamic_attention_backward(x.device_q.view(), x.device_k.view(), x.device_v.view(), nullptr, keys,
                                       out.view(), lse.view(), ones.view(), {}, {.v = d_v.view()}, context);
  const auto document = [&](std::int64_t token) { return std::ranges::upper_bound(starts, token) - starts.begin(); };
  const Plain plain(x, [&](auto, auto i, auto j) { return j <= i && document(i) == document(j); });
  return std::max(worst_error(read(out), plain.out), worst_error(read(d_v), plain.d_v));
}

int run() {
  const bool gpu = fretwork::cuda_device_count() > 0;
  Context context = gpu ? Context::cuda() : Context::cpu();
  const Operands operands(context);
  const double masked = masked_error(operands, context), selected = selected_error(operands, context),
               documents = documents_error(operands, context);
  std::printf("on %s, largest error of a mask %.1e, of selected blocks %.1e, of documents %.1e\n",
              gpu ? "a GPU" : "the CPU", masked, selected, documents);
  return std::max({masked, selected, documents}) < 1e-3 ? 0 : 1;
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
