// A Config names one way to run a product: its text, its look-up in tuned tables, and running it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/kronecker/problem.h"
#include "runtime/choose.h"

namespace fretwork::kronecker {

/// `best` is what the backend chooses. Then the families of a GPU, those of a CPU, and `few`, which both have.
enum class Family : std::uint8_t {
  best,
  hopper,
  regroup,
  dense,
  interleaved,
  strided,
  cluster,
  direct,
  ieee,
  ieee_regroup,
  portable,
  simple,
  small,
  cublas,
  rows,
  lanes,
  few
};

/// A way to run a product: "best", "hopper:128" (a tile's columns), "strided:16x4" (neighbouring δ, warps along the
/// batch), "small:64x16" (outputs and batch rows of a tile), "cluster", "rows:256" and "lanes:192" (batch rows that a
/// thread takes at a time), "few", "direct".
struct Config {
  Family family = Family::best;
  int first = 0, second = 0;
  bool operator==(const Config&) const = default;
};
std::string text_of(const Config& config);
/// A config in columns: the kernel's name, and each of `kParameters` that it has, by name.
inline constexpr std::array<std::string_view, 4> kParameters = {"tile_columns", "deltas", "batch_warps", "batch_rows"};
struct Columns {
  std::string_view kernel;
  std::array<int, kParameters.size()> parameters{};  ///< 0 for one that the kernel has not
};
Columns columns_of(const Config& config);
/// Nothing for what is no config.
std::optional<Config> parse_config(std::string_view text);

/// Problems that share a tuned config: one pattern, type and layout, and batches between the same two powers of two.
struct Bucket {
  Sizes sizes{};
  DType dtype = DType::f32;
  Precision precision = Precision::ieee;
  bool last = false;
  int batch_log = 0;
  bool operator==(const Bucket&) const = default;
};
/// Nothing for strides of neither layout, which are not tuned.
std::optional<Bucket> bucket_of(const Problem& problem, const Context& context);
/// "1,64,64,64 float16 first 16384", or "float32:tf32".
std::string text_of(const Bucket& bucket);
std::optional<Bucket> parse_bucket(std::string_view text);

/// The call as the backends see it, checked. Throws Error.
Problem make_problem(const ConstTensorView& x, const ConstTensorView& w, const ConstTensorView& out,
                     const KsmmOptions& options = {});

/// Every config that fits the problem.
std::vector<Config> candidates(const Problem& problem, const Context& context);

/// The config of a call, and the table that names it; `best` and "heuristic" where none does.
struct Chosen {
  Config choice;
  std::string_view source = "heuristic";
};
Chosen chosen(const Problem& problem, const Context& context);

/// False, with nothing done, where the config does not fit the problem. The batch is not empty.
bool run(const Problem& problem, Context& context, const Config& config);

/// Every config but `best`.
namespace cpu {
bool run(const Problem& problem, Context& context, const Config& config);
std::vector<Config> candidates(const Problem& problem);
}  // namespace cpu
namespace cuda {
bool run(const Problem& problem, Context& context, const Config& config);
bool run(const WeightProblem& problem, Context& context, const Config& config);
/// Every config that fits, with its cost. Data pointers count by their alignment.
std::vector<Candidate<Config>> candidates(const Problem& problem, const Machine& machine);
std::vector<Candidate<Config>> candidates(const WeightProblem& problem, const Machine& machine);
}  // namespace cuda

}  // namespace fretwork::kronecker

template <>
struct std::hash<fretwork::kronecker::Bucket> {
  std::size_t operator()(const fretwork::kronecker::Bucket& b) const noexcept {
    std::uint64_t mixed = 0;
    const auto add = [&](std::uint64_t n) {
      mixed = (mixed ^ n) * 0x9e37'79b9'7f4a'7c15;
      mixed ^= mixed >> 32;
    };
    for (const std::int64_t n : {b.sizes.a, b.sizes.b, b.sizes.c, b.sizes.d}) {
      add(static_cast<std::uint64_t>(n));
    }
    add(static_cast<std::uint64_t>(b.dtype) << 24 | static_cast<std::uint64_t>(b.precision) << 16 |
        (b.last ? 256u : 0u) | static_cast<std::uint64_t>(b.batch_log));
    return mixed;
  }
};
