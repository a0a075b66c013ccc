// The plain 2:4 form on a real GPU against the CPU, bit for bit, with what lies around the outputs. Skipped where there
// is none.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/two_four/problem.h"
#include "runtime/cuda_driver.h"
#include "support/device_tensor.h"

namespace fretwork {
namespace {

using two_four::Format;
using two_four::Matrix;
using Index = std::int64_t;
using Bytes = std::vector<std::byte>;

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::i8, DType::u8, DType::f8_e4m3, DType::f8_e5m2};

/// How lines × positions lie in memory: contiguous along a line or across lines, with wider pitches, from odd places.
enum class Lie { lines, lines_wide, lines_odd, across, across_wide, across_odd, scattered };
constexpr Lie kLies[] = {Lie::lines,       Lie::lines_wide, Lie::lines_odd, Lie::across,
                         Lie::across_wide, Lie::across_odd, Lie::scattered};

/// A matrix on the host, where the CPU computes, and on the GPU.
class Twin : public MirroredTensor {
 public:
  Twin(Index lines, Index count, Index size, Lie lie)
      : MirroredTensor(size == 1   ? DType::i8
                       : size == 2 ? DType::i16
                                   : DType::i32,
                       std::array{lines, count}, strides_of(lines, count, size, lie),
                       lie == Lie::lines_odd || lie == Lie::across_odd ? static_cast<std::size_t>(size) : 256) {}
  /// The GPU's storage; the host's stays as it is.
  Bytes download(cuda::Handle stream = nullptr) {
    const Bytes here = storage();
    MirroredTensor::download(stream);
    Bytes there = storage();
    std::ranges::copy(here, data());
    return there;
  }
  void fill_bytes(unsigned char byte) { std::fill_n(data(), bytes(), std::byte{byte}); }
  Matrix on_host() const { return {view.data, view.stride(0), view.stride(1)}; }
  Matrix on_device() const { return {device_view.data, view.stride(0), view.stride(1)}; }
  unsigned char* at(Index line, Index n) { return reinterpret_cast<unsigned char*>(address(line * count() + n)); }
  Index lines() const { return view.size(0); }
  Index count() const { return view.size(1); }

 private:
  static std::array<Index, 2> strides_of(Index lines, Index count, Index size, Lie lie) {
    const Index wide = 16 / size;
    const auto widened = [wide](Index n) { return (n + wide - 1) / wide * wide + wide; };
    switch (lie) {
      case Lie::lines:
        return {count, 1};
      case Lie::lines_wide:
        return {widened(count), 1};
      case Lie::lines_odd:
        return {count + 3, 1};
      case Lie::across:
        return {1, lines};
      case Lie::across_wide:
        return {1, widened(lines)};
      case Lie::across_odd:
        return {1, lines + 5};
      default:
        return {2 * count * 3 + 1, 3};
    }
  }
};

/// Elements for tests: any bits, a few small numbers that tie often, or zeros of both signs among them.
class Elements {
 public:
  Elements(DType dtype, unsigned seed) : size_(static_cast<int>(size_of(dtype))), dtype_(dtype), random_(seed) {}
  std::uint32_t any() { return random() & mask(); }
  std::uint32_t small() {
    const std::uint32_t n = random() % 6;
    if (two_four::is_integer(dtype_)) {
      return n;
    }
    const std::uint32_t ones[] = {0, sign(), one(), one() | sign(), one() + 1, one() + 2};
    return ones[n];
  }
  /// Numbers near one, as weights are.
  std::uint32_t plain() {
    if (two_four::is_integer(dtype_)) {
      return random() & mask();
    }
    const std::uint32_t low = dtype_ == DType::f32 ? 22 : dtype_ == DType::f16 ? 10 : dtype_ == DType::bf16 ? 8 : 3;
    return (one() - (random() & ((4u << low) - 1) & (mask() >> 2))) | (random() % 2 != 0 ? sign() : 0);
  }
  std::uint32_t zero() { return two_four::is_integer(dtype_) || random() % 4 != 0 ? 0 : sign(); }
  std::uint32_t number() {
    const std::uint32_t bits = any();
    return (two_four::is_integer(dtype_) ? bits : bits & ~sign()) == 0 ? one() : bits;
  }
  std::uint32_t random() { return static_cast<std::uint32_t>(random_()); }

 private:
  std::uint32_t mask() const { return size_ == 4 ? ~0u : (1u << 8 * size_) - 1; }
  std::uint32_t sign() const { return two_four::is_integer(dtype_) ? 0 : 1u << (8 * size_ - 1); }
  std::uint32_t one() const {
    switch (dtype_) {
      case DType::f32:
        return 0x3f800000;
      case DType::f16:
        return 0x3c00;
      case DType::bf16:
        return 0x3f80;
      case DType::f8_e4m3:
        return 0x38;
      case DType::f8_e5m2:
        return 0x3c;
      default:
        return 1;
    }
  }
  int size_;
  DType dtype_;
  std::mt19937 random_;
};

template <typename Make>
void fill(Twin& twin, DType dtype, const Make& make) {
  for (Index line = 0; line < twin.lines(); ++line) {
    for (Index n = 0; n < twin.count(); ++n) {
      const std::uint32_t bits = make(line, n);
      std::memcpy(twin.at(line, n), &bits, size_of(dtype));
    }
  }
}

/// At most half of each group is not zero.
void fill_sparse(Twin& twin, DType dtype, unsigned seed) {
  Elements elements(dtype, seed);
  const Index group = two_four::group(dtype);
  std::uint32_t kept = 0;
  fill(twin, dtype, [&](Index, Index n) {
    if (n % group == 0) {
      const std::uint32_t a = elements.random() % 4, b = elements.random() % 4, c = elements.random() % 8;
      kept = group == 2 ? (a < 3 ? 1u << a % 2 : 0u) : (c > 0 ? 1u << a : 0u) | (c > 1 ? 1u << b : 0u);
    }
    return (kept >> n % group & 1) != 0 ? elements.number() : elements.zero();
  });
}

/// Everything a conversion may touch.
struct Both {
  Twin dense, values, words, out;
  Format format;

  Both(Index lines, Index k, DType dtype, int word_bytes, bool transposed, Lie lie, Lie packed, Lie out_lie)
      : dense(lines, k, static_cast<Index>(size_of(dtype)), lie),
        values(lines, k / 2, static_cast<Index>(size_of(dtype)), packed),
        words(lines, words_of(k, dtype, word_bytes), word_bytes, packed),
        out(lines, k, static_cast<Index>(size_of(dtype)), out_lie) {
    format.lines = lines;
    format.k = k;
    format.dtype = dtype;
    format.word_bytes = word_bytes;
    format.transposed = transposed;
  }
  static Index words_of(Index k, DType dtype, int word_bytes) {
    const Index each = 2 * word_bytes;
    return (k / two_four::group(dtype) + each - 1) / each;
  }
  void upload() {
    for (Twin* twin : {&dense, &values, &words, &out}) {
      twin->upload();
    }
  }
  Format on_host() {
    Format f = format;
    f.dense = dense.on_host(), f.values = values.on_host(), f.words = words.on_host();
    return f;
  }
  Format on_device() const {
    Format f = format;
    f.dense = dense.on_device(), f.values = values.on_device(), f.words = words.on_device();
    return f;
  }
  void compare() {
    EXPECT_EQ(dense.download(), dense.storage()) << "dense";
    EXPECT_EQ(values.download(), values.storage()) << "values";
    EXPECT_EQ(words.download(), words.storage()) << "words";
    EXPECT_EQ(out.download(), out.storage()) << "out";
  }
};

/// A place for *bad on both sides.
struct Bad {
  std::int64_t host = 77;
  cuda::DeviceBuffer device{0, &host, sizeof(host)};
  std::int64_t* at() const { return static_cast<std::int64_t*>(device.data()); }
  std::int64_t read() const {
    std::int64_t place = 0;
    cuda::copy_to_host(&place, device.data(), sizeof(place), nullptr);
    cuda::synchronize(nullptr);
    return place;
  }
};

class TwoFourFormatCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
    scope_ = std::make_unique<cuda::DeviceScope>(0);
  }
  Context cpu = Context::cpu();
  Context gpu = cuda::available() ? Context::cuda(0) : Context::cpu();

  /// Calls test(case) for types, sizes and layouts; every size with every type, layouts by turns.
  void each(const std::vector<std::array<Index, 2>>& sizes, const std::function<void(Both&, unsigned)>& test) {
    unsigned n = 0;
    for (const DType dtype : kTypes) {
      for (const auto& [lines, k] : sizes) {
        for (const Lie lie : kLies) {
          const Lie packed[] = {Lie::lines, Lie::lines_wide, Lie::lines, Lie::lines_odd, Lie::across};
          const int word_bytes = 1 << n % 3;
          const bool transposed = n % 2 != 0;
          Both both(lines, k, dtype, word_bytes, transposed, lie, packed[n % 5], n % 4 == 3 ? kLies[n % 7] : lie);
          SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(lines) + "×" + std::to_string(k) + ", lies " +
                       std::to_string(static_cast<int>(lie)) + ", case " + std::to_string(n));
          test(both, ++n);
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
  const std::vector<std::array<Index, 2>> sizes{{1, 4},    {3, 8},     {5, 20},    {64, 256}, {65, 260},
                                                {128, 64}, {130, 512}, {257, 272}, {7, 1028}, {192, 1024}};
  const std::vector<std::array<Index, 2>> squares{{4, 4},    {4, 8},     {12, 20},   {64, 256}, {68, 260},
                                                  {128, 64}, {132, 512}, {256, 272}, {8, 1028}, {192, 1024}};

 private:
  std::unique_ptr<cuda::DeviceScope> scope_;
};

TEST_F(TwoFourFormatCuda, Compresses) {
  each(sizes, [&](Both& both, unsigned seed) {
    fill_sparse(both.dense, both.format.dtype, seed);
    both.upload();
    Bad bad;
    two_four::cpu::compress(both.on_host(), &bad.host, cpu);
    two_four::cuda::compress(both.on_device(), seed % 3 != 0 ? bad.at() : nullptr, gpu);
    both.compare();
    EXPECT_EQ(bad.host, -1);
    EXPECT_EQ(bad.read(), seed % 3 != 0 ? -1 : 77);
  });
}

/// Nothing is cut or turned, which has a way of its own.
TEST_F(TwoFourFormatCuda, CompressesWholeTiles) {
  unsigned seed = 0;
  for (const DType dtype : kTypes) {
    for (const int word_bytes : {1, 2, 4}) {
      for (const bool transposed : {false, true}) {
        Both both(256, 768, dtype, word_bytes, transposed, Lie::lines, Lie::lines, Lie::lines);
        SCOPED_TRACE(std::string(name_of(dtype)) + ", words of " + std::to_string(word_bytes));
        fill_sparse(both.dense, dtype, ++seed);
        if (seed % 2 == 0) {  // two groups that are not sparse
          std::memset(both.dense.at(251, 740), 1, 4 * size_of(dtype));
          std::memset(both.dense.at(77, 516), 1, 4 * size_of(dtype));
        }
        both.upload();
        Bad bad, looked;
        two_four::cpu::compress(both.on_host(), &bad.host, cpu);
        two_four::cuda::compress(both.on_device(), bad.at(), gpu);
        two_four::cuda::check(both.on_device(), looked.at(), gpu);
        EXPECT_EQ(bad.host == -1, seed % 2 != 0);
        EXPECT_EQ(bad.read(), bad.host);
        EXPECT_EQ(looked.read(), bad.host);
        if (seed % 2 != 0) {
          both.compare();
        }
      }
    }
  }
}

TEST_F(TwoFourFormatCuda, FindsBadGroups) {
  each(sizes, [&](Both& both, unsigned seed) {
    const Format& f = both.format;
    fill_sparse(both.dense, f.dtype, seed);
    Elements elements(f.dtype, seed);
    const Index groups = f.groups(), group = f.group();
    for (unsigned n = 0; n < seed % 4; ++n) {  // none in every fourth case
      const Index line = elements.random() % f.lines, g = elements.random() % groups;
      for (Index e = 0; e < group / 2 + 1; ++e) {
        const std::uint32_t bits = elements.number();
        std::memcpy(both.dense.at(line, g * group + (e + n) % group), &bits, size_of(f.dtype));
      }
    }
    both.upload();
    Bad bad;
    two_four::cpu::check(both.on_host(), &bad.host, cpu);
    EXPECT_EQ(bad.host == -1, seed % 4 == 0);
    two_four::cuda::check(both.on_device(), bad.at(), gpu);
    EXPECT_EQ(bad.read(), bad.host);
    both.compare();  // nothing was written
    Bad again;
    two_four::cuda::compress(both.on_device(), again.at(), gpu);
    EXPECT_EQ(again.read(), bad.host);
    Bad nibbles;
    two_four::cuda::check_metadata(both.on_device(), {}, true, nibbles.at(), gpu);
    EXPECT_EQ(nibbles.read(), -1);
  });
}

TEST_F(TwoFourFormatCuda, ChecksMetadata) {
  each(sizes, [&](Both& both, unsigned seed) {
    const Format& f = both.format;
    fill_sparse(both.dense, f.dtype, seed);
    two_four::cpu::compress(both.on_host(), nullptr, cpu);
    std::mt19937 random(seed);
    const bool pairs = f.group() == 2;
    for (unsigned n = 0; n < seed % 4; ++n) {
      const Index g = random() % f.groups();
      unsigned char* const byte = both.words.at(random() % f.lines, g / 2 / f.word_bytes) + g / 2 % f.word_bytes;
      const unsigned invalid[] = {0, 1, 2, 3, 5, 6, 7, 0xa, 0xb, 0xf}, other[] = {0, 8, 9, 0xc, 0xd, 0xf};
      const unsigned nibble = pairs ? other[random() % 6] : invalid[random() % 10];
      *byte = static_cast<unsigned char>((*byte & (g % 2 != 0 ? 0x0f : 0xf0)) | nibble << 4 * (g % 2));
    }
    both.upload();
    Bad bad;
    two_four::cpu::check_metadata(both.on_host(), {}, true, &bad.host, cpu);
    two_four::cuda::check_metadata(both.on_device(), {}, true, bad.at(), gpu);
    EXPECT_EQ(bad.read(), bad.host);
    both.compare();  // nothing was written
    const bool keep_valid = seed % 2 == 0;
    two_four::cpu::check_metadata(both.on_host(), both.on_host().words, keep_valid, &bad.host, cpu);
    two_four::cuda::check_metadata(both.on_device(), both.on_device().words, keep_valid, bad.at(), gpu);
    EXPECT_EQ(bad.read(), bad.host);
    both.compare();
  });
}

TEST_F(TwoFourFormatCuda, GoesBackToDense) {
  each(sizes, [&](Both& both, unsigned seed) {
    fill_sparse(both.dense, both.format.dtype, seed);
    two_four::cpu::compress(both.on_host(), nullptr, cpu);
    both.dense.fill_bytes(0x5a);
    both.upload();
    two_four::cpu::to_dense(both.on_host(), cpu);
    two_four::cuda::to_dense(both.on_device(), gpu);
    both.compare();
  });
}

TEST_F(TwoFourFormatCuda, Gathers) {
  each(sizes, [&](Both& both, unsigned seed) {
    fill_sparse(both.dense, both.format.dtype, seed);
    two_four::cpu::compress(both.on_host(), nullptr, cpu);
    both.values.fill_bytes(0x5a);
    Elements elements(both.format.dtype, seed);
    fill(both.dense, both.format.dtype, [&](Index, Index) { return elements.any(); });
    both.upload();
    two_four::cpu::gather(both.on_host(), cpu);
    two_four::cuda::gather(both.on_device(), gpu);
    both.compare();
  });
}

TEST_F(TwoFourFormatCuda, PrunesByMagnitude) {
  each(sizes, [&](Both& both, unsigned seed) {
    Elements elements(both.format.dtype, seed);
    fill(both.dense, both.format.dtype,
         [&](Index, Index n) { return (n / 8 + seed) % 2 != 0 ? elements.any() : elements.small(); });
    both.upload();
    two_four::cpu::prune(both.on_host(), both.out.on_host(), false, cpu);
    two_four::cuda::prune(both.on_device(), both.out.on_device(), false, gpu);
    both.compare();
  });
}

/// Any bits, ties, plain numbers, or few non-zeros, by turns.
std::uint32_t square_element(Elements& elements, Index n) {
  switch (n % 5) {
    case 0:
      return elements.any();
    case 1:
      return elements.small();
    case 2:
      return elements.random() % 2 != 0 ? elements.zero() : elements.number();
    default:
      return elements.plain();
  }
}

TEST_F(TwoFourFormatCuda, PrunesSquares) {
  each(squares, [&](Both& both, unsigned seed) {
    Elements elements(both.format.dtype, seed);
    fill(both.dense, both.format.dtype,
         [&](Index line, Index n) { return square_element(elements, n / 4 + line / 4 + seed); });
    both.upload();
    two_four::cpu::prune(both.on_host(), both.out.on_host(), true, cpu);
    two_four::cuda::prune(both.on_device(), both.out.on_device(), true, gpu);
    both.compare();
    // Again, in place: nothing changes.
    Format f = both.on_device();
    f.dense = both.out.on_device();
    two_four::cuda::prune(f, f.dense, true, gpu);
    both.compare();
  });
}

TEST_F(TwoFourFormatCuda, PrunesAndPacksBothWays) {
  each(squares, [&](Both& both, unsigned seed) {
    const Format& f = both.format;
    Elements elements(f.dtype, seed);
    fill(both.dense, f.dtype, [&](Index line, Index n) { return square_element(elements, n / 4 + line / 4 + seed); });
    const Lie lies[] = {Lie::lines, Lie::lines_wide, Lie::lines_odd};
    Both cols(f.k, f.lines, f.dtype, 1 << seed % 3, true, Lie::lines, lies[seed % 3], Lie::lines);
    both.upload();
    cols.upload();
    const auto column_view = [&](Format part, const Format& rows) {
      part.dense = {rows.dense.data, rows.dense.along, rows.dense.line};
      return part;
    };
    two_four::cpu::prune_both(both.on_host(), column_view(cols.on_host(), both.on_host()), cpu);
    two_four::cuda::prune_both(both.on_device(), column_view(cols.on_device(), both.on_device()), gpu);
    both.compare();
    cols.compare();
  });
}

TEST_F(TwoFourFormatCuda, EmptyMatricesAreGood) {
  for (const auto& [lines, k] : {std::array<Index, 2>{0, 16}, {16, 0}, {0, 0}}) {
    Both both(lines, k, DType::bf16, 2, false, Lie::lines, Lie::lines, Lie::lines);
    both.upload();
    const auto look_at_words = [](const Format& f, std::int64_t* bad, Context& context) {
      two_four::cuda::check_metadata(f, f.words, false, bad, context);
    };
    using Look = void (*)(const Format&, std::int64_t*, Context&);
    const auto looks = {Look{two_four::cuda::compress}, Look{two_four::cuda::check}, Look{look_at_words}};
    for (const auto look : looks) {
      Bad bad;
      look(both.on_device(), bad.at(), gpu);
      EXPECT_EQ(bad.read(), -1);
    }
    two_four::cuda::to_dense(both.on_device(), gpu);
    two_four::cuda::gather(both.on_device(), gpu);
    two_four::cuda::prune(both.on_device(), both.out.on_device(), true, gpu);
    two_four::cuda::prune_both(both.on_device(), both.on_device(), gpu);
    both.compare();
  }
}

template <typename... Arguments>
void call(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  ASSERT_NE(function, nullptr) << name;
  ASSERT_EQ(function(arguments...), 0) << name;
}

TEST_F(TwoFourFormatCuda, RunsInGraphs) {
  Both both(64, 512, DType::bf16, 2, false, Lie::lines, Lie::lines, Lie::across);
  fill_sparse(both.dense, DType::bf16, 5);
  both.upload();
  Bad bad;
  void *stream = nullptr, *graph = nullptr, *executable = nullptr;
  call("cuStreamCreate", &stream, 1u);
  Context context = Context::cuda(0, stream);
  call("cuStreamBeginCapture_v2", stream, 0);
  two_four::cuda::compress(both.on_device(), bad.at(), context);
  two_four::cuda::prune(both.on_device(), both.out.on_device(), true, context);
  call("cuStreamEndCapture", stream, &graph);
  EXPECT_EQ(bad.read(), 77);
  call("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  two_four::cpu::compress(both.on_host(), &bad.host, cpu);
  two_four::cpu::prune(both.on_host(), both.out.on_host(), true, cpu);
  for (int n = 0; n < 3; ++n) {
    cuda::fill_zero(both.words.on_device().data, static_cast<std::size_t>(64 * both.words.count() * 2), stream);
    call("cuGraphLaunch", executable, stream);
    cuda::synchronize(stream);
    EXPECT_EQ(bad.read(), -1);
    EXPECT_EQ(both.words.download(), both.words.storage());
    EXPECT_EQ(both.out.download(), both.out.storage());
  }
  call("cuGraphExecDestroy", executable);
  call("cuGraphDestroy", graph);
  call("cuStreamDestroy_v2", stream);
}

}  // namespace
}  // namespace fretwork
