// The ways of a Kronecker product: every one gives the result of the others, and their names and tables are understood.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/half.h"
#include "fretwork/executor_tbb.h"
#include "ops/kronecker/config.h"
#include "runtime/cuda_driver.h"
#include "runtime/tuned.h"

namespace fretwork::kronecker {
namespace {

namespace driver = fretwork::cuda;

TEST(Config, IsItsText) {
  for (const char* const text :
       {"best", "hopper:128", "regroup:64", "dense:256", "interleaved:64", "ieee", "ieee_regroup", "strided:16x4",
        "cluster", "portable", "simple", "small:64x16", "rows:256", "lanes:192", "few", "direct"}) {
    const auto choice = parse_config(text);
    ASSERT_TRUE(choice) << text;
    EXPECT_EQ(text_of(*choice), text);
  }
  for (const char* const text :
       {"", "frob", "hopper", "hopper:", "hopper:x", "hopper:0", "hopper:-64", "hopper:64x2", "strided:16",
        "strided:16x", "cluster:2x4", "simple:1", "small:64", "rows:1.5", " best", "rows:99999999999"}) {
    EXPECT_FALSE(parse_config(text)) << text;
  }
}

TEST(Bucket, IsItsText) {
  for (const char* const text : {"1,64,64,64 float16 first 16384", "6,64,48,1 float32:tf32x3 last 1",
                                 "1,2,3,4 float64 first 1099511627776", "1,2,3,4 bfloat16 last 2"}) {
    const auto bucket = parse_bucket(text);
    ASSERT_TRUE(bucket) << text;
    EXPECT_EQ(text_of(*bucket), text);
  }
  for (const char* const text : {"", "1,64,64,64", "1,64,64 float16 first 2", "1,2,3,4,5 float16 first 2",
                                 "1,2,3,4 float8 first 2", "1,2,3,4 float16 middle 2", "1,2,3,4 float16 first 3",
                                 "1,2,3,4 float16 first 2 more", "1,2,3,4 float32:fp19 first 2"}) {
    EXPECT_FALSE(parse_bucket(text)) << text;
  }
}

TEST(Bucket, HoldsBatchesUpToTheNextPowerOfTwo) {
  const auto bucket = [](std::int64_t batch, bool last) {
    const TensorView x = last ? TensorView(nullptr, DType::f32, std::vector<std::int64_t>{batch, 6},
                                           std::vector<std::int64_t>{1, batch}, {})
                              : TensorView(nullptr, DType::f32, {batch, 6});
    const TensorView w(nullptr, DType::f32, {1, 3, 3, 2});
    const Context context = Context::cpu();
    return bucket_of(make_problem(x, w, x), context);
  };
  EXPECT_EQ(text_of(*bucket(25088, false)), "1,3,3,2 float32 first 16384");
  EXPECT_EQ(bucket(16384, false), bucket(32767, false));
  EXPECT_FALSE(bucket(16383, false) == bucket(16384, false));
  EXPECT_EQ(text_of(*bucket(100, true)), "1,3,3,2 float32 last 64");
  EXPECT_EQ(text_of(*bucket(1, true)), "1,3,3,2 float32 first 1");
  EXPECT_NE(std::hash<Bucket>()(*bucket(100, true)), std::hash<Bucket>()(*bucket(100, false)));
}

TEST(Tables, ShippedOnesAreUnderstood) {
  for (const EmbeddedTable& shipped : embedded_tables()) {
    const TunedTable table = TunedTable::parse(shipped.text);
    for (const auto& [device, ops] : table.all()) {
      for (const auto& [problem, row] : ops.contains("kronecker") ? ops.at("kronecker") : TunedTable::Rows()) {
        EXPECT_TRUE(parse_bucket(problem)) << shipped.name << ": " << problem;
        EXPECT_TRUE(parse_config(row.choice)) << shipped.name << ": " << row.choice;
      }
    }
  }
}

/// One problem in memory of the host or of a GPU.
class Product {
 public:
  Product(Sizes s, std::int64_t batch, DType dtype, bool last, Context& context)
      : dtype_(dtype), count_(static_cast<std::size_t>(batch * s.a * s.b * s.d)), context_(context) {
    const auto matrix = [&](std::int64_t features) {
      const std::int64_t sizes[] = {batch, features}, strides[] = {last ? 1 : features, last ? batch : 1};
      return TensorView(nullptr, dtype, sizes, strides, context.device);
    };
    x_ = matrix(s.a * s.c * s.d);
    y_ = matrix(s.a * s.b * s.d);
    w_ = TensorView(nullptr, dtype, {s.a, s.b, s.c, s.d}, context.device);
    place(x_, x_bytes_, x_device_);
    place(w_, w_bytes_, w_device_);
    place(y_, y_bytes_, y_device_);
  }
  std::vector<Config> choices() const { return candidates(problem(), context_); }

  /// The result, or nothing when this way does not take it; NaN where nothing was written.
  std::vector<double> result(const Config& choice) {
    std::fill(y_bytes_.begin(), y_bytes_.end(), 0xff);
    if (on_cuda()) {
      driver::copy_to_device(y_.data, y_bytes_.data(), y_bytes_.size(), nullptr);
    }
    if (!run(problem(), context_, choice)) {
      return {};
    }
    if (on_cuda()) {
      driver::copy_to_host(y_bytes_.data(), y_.data, y_bytes_.size(), nullptr);
      driver::synchronize(nullptr);
    }
    std::vector<double> numbers;
    for (std::size_t n = 0; n < count_; ++n) {
      numbers.push_back(number(n));
    }
    return numbers;
  }

 private:
  bool on_cuda() const { return context_.device.type == DeviceType::cuda; }
  Problem problem() const { return make_problem(x_, w_, y_); }
  double number(std::size_t n) const {
    if (dtype_ == DType::f32) {
      return reinterpret_cast<const float*>(y_bytes_.data())[n];
    }
    if (dtype_ == DType::f64) {
      return reinterpret_cast<const double*>(y_bytes_.data())[n];
    }
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(y_bytes_.data())[n];
    return dtype_ == DType::f16 ? float_from_f16(bits) : float_from_bf16(bits);
  }
  void place(TensorView& view, std::vector<unsigned char>& bytes, driver::DeviceBuffer& buffer) {
    const auto count = static_cast<std::size_t>(view.elements());
    bytes.resize(count * size_of(dtype_));
    for (std::size_t n = 0; n < count; ++n) {
      const float value = numbers_(random_);
      if (dtype_ == DType::f64) {
        reinterpret_cast<double*>(bytes.data())[n] = value;
      } else if (dtype_ == DType::f32) {
        reinterpret_cast<float*>(bytes.data())[n] = value;
      } else {
        reinterpret_cast<std::uint16_t*>(bytes.data())[n] =
            dtype_ == DType::f16 ? f16_from_float(value) : bf16_from_float(value);
      }
    }
    view.data = bytes.data();
    if (on_cuda()) {
      buffer = driver::DeviceBuffer(context_.device.index, bytes.data(), bytes.size());
      view.data = buffer.data();
    }
  }

  DType dtype_;
  std::size_t count_;
  Context& context_;
  std::mt19937 random_{7};
  std::normal_distribution<float> numbers_;
  TensorView x_, w_, y_;
  std::vector<unsigned char> x_bytes_, w_bytes_, y_bytes_;
  driver::DeviceBuffer x_device_, w_device_, y_device_;
};

/// The families that took it. `usual` is a config that is tested elsewhere.
std::set<Family> expect_same(Product& product, const Config& usual, double tolerance, const std::string& what) {
  const std::vector<double> want = product.result(usual);
  double largest = 0;
  for (const double value : want) {
    largest = std::max(largest, std::abs(value));
  }
  std::set<Family> took;
  for (const Config& choice : product.choices()) {
    const std::vector<double> got = product.result(choice);
    double worst = 0;
    for (std::size_t n = 0; n < got.size(); ++n) {
      const double error = std::abs(got[n] - want[n]);
      worst = error <= worst ? worst : error;  // NaN stays
      if (std::isnan(error)) {
        break;
      }
    }
    if (!got.empty()) {
      took.insert(choice.family);
    }
    EXPECT_LE(worst, tolerance * largest) << what << " " << text_of(choice);
  }
  return took;
}

struct Shape {
  Sizes sizes;
  std::int64_t batch;
};

TEST(CpuChoices, AllGiveTheSame) {
  TbbExecutor executor(2);
  Context context = Context::cpu(executor);
  for (const auto& [sizes, batch] : {Shape{{2, 5, 7, 3}, 41},
                                     {{1, 16, 24, 1}, 300},
                                     {{3, 8, 8, 4}, 5},
                                     {{1, 33, 20, 16}, 1},
                                     {{1, 64, 48, 2}, 700}}) {
    for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-12}, {DType::f32, 2e-5}, {DType::f16, 4e-3}}) {
      for (const bool last : {false, true}) {
        Product product(sizes, batch, dtype, last, context);
        const std::string what = std::to_string(batch) + (last ? " last " : " first ") + name_of(dtype);
        EXPECT_GE(expect_same(product, {}, tolerance, what).size(), 2u);
      }
    }
  }
}

TEST(CpuChoices, ThoseOfAGpuAreRefused) {
  Context context = Context::cpu();
  Product product({2, 4, 4, 2}, 8, DType::f32, false, context);
  EXPECT_TRUE(product.result({Family::hopper, 128}).empty());
  EXPECT_TRUE(product.result({Family::simple}).empty());
  Product large({2, 4, 4, 2}, 80, DType::f32, false, context);
  EXPECT_TRUE(large.result({Family::few}).empty());
}

TEST(CudaChoices, AllGiveTheSame) {
  if (!driver::available()) {
    GTEST_SKIP() << driver::unavailable_reason();
  }
  const driver::DeviceScope scope(0);
  struct Type {
    DType dtype;
    Precision precision;
    double tolerance;
  };
  std::set<Family> seen;
  for (const auto& [sizes, batch] : {Shape{{2, 64, 64, 16}, 300},
                                     {{1, 256, 128, 4}, 1000},
                                     {{6, 64, 64, 1}, 640},
                                     {{2, 72, 40, 2}, 77},
                                     {{1, 7, 5, 3}, 33},
                                     {{3, 128, 96, 8}, 257}}) {
    for (const auto& [dtype, precision, tolerance] : {Type{DType::f16, Precision::ieee, 4e-3},
                                                      {DType::bf16, Precision::ieee, 3e-2},
                                                      {DType::f32, Precision::ieee, 2e-5},
                                                      {DType::f32, Precision::tf32, 4e-3},
                                                      {DType::f32, Precision::tf32x3, 2e-5}}) {
      for (const bool last : {false, true}) {
        Context context = Context::cuda(0);
        context.precision = precision;
        Product product(sizes, batch, dtype, last, context);
        const std::string what = std::to_string(batch) + (last ? " last " : " first ") + name_of(dtype);
        seen.merge(expect_same(product, {Family::simple}, tolerance, what));
      }
    }
  }
  if (driver::kernel_arch(0) == "sm_90a") {
    using enum Family;
    EXPECT_EQ(seen, (std::set{hopper, regroup, dense, interleaved, strided, cluster, direct, ieee, ieee_regroup,
                              portable, simple, small, few}));
  }
}

TEST(CudaChoices, UnknownSizesAreRefused) {
  if (!driver::available()) {
    GTEST_SKIP() << driver::unavailable_reason();
  }
  Context context = Context::cuda(0);
  const driver::DeviceScope scope(0);
  Product product({2, 64, 64, 16}, 300, DType::f16, false, context);
  EXPECT_TRUE(product.result({Family::hopper, 100}).empty());
  EXPECT_TRUE(product.result({Family::regroup, 100}).empty());
  EXPECT_TRUE(product.result({Family::dense, 100}).empty());
  EXPECT_TRUE(product.result({Family::strided, 3, 4}).empty());
  EXPECT_TRUE(product.result({Family::rows, 64}).empty());
}

}  // namespace
}  // namespace fretwork::kronecker
