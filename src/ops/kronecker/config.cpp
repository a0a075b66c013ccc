// Configs and tuning buckets as text, and the look-up in tuned tables.
#include "ops/kronecker/config.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <memory>
#include <utility>

#include "runtime/tuned.h"

namespace fretwork::kronecker {
namespace {

/// A family's name and the parameters that follow it, as places in `kParameters`.
struct Spelling {
  std::string_view name;
  int numbers = 0;
  std::array<std::size_t, 2> parameters{};
};
constexpr std::array<Spelling, 17> kFamilies = {{{"best"},
                                                 {"hopper", 1, {0}},
                                                 {"regroup", 1, {0}},
                                                 {"dense", 1, {0}},
                                                 {"interleaved", 1, {0}},
                                                 {"strided", 2, {1, 2}},
                                                 {"cluster"},
                                                 {"direct"},
                                                 {"ieee"},
                                                 {"ieee_regroup"},
                                                 {"portable"},
                                                 {"simple"},
                                                 {"small", 2, {0, 3}},
                                                 {"cublas"},
                                                 {"rows", 1, {3}},
                                                 {"lanes", 1, {3}},
                                                 {"few"}}};
constexpr std::array kPrecisions = {"ieee", "tf32", "tf32x3"};
constexpr std::array kTypes = {DType::f64, DType::f32, DType::f16, DType::bf16};

/// Cuts what stands before `mark` off the front of `text`; all of it where there is no mark.
std::string_view cut(std::string_view& text, char mark) {
  const std::size_t end = std::min(text.find(mark), text.size());
  const std::string_view front = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return front;
}

/// Above zero.
template <typename Number>
bool read(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0;
}

bool read_type(std::string_view text, Bucket& bucket) {
  const std::string_view name = cut(text, ':');
  const auto type = std::ranges::find_if(kTypes, [&](DType dtype) { return name == name_of(dtype); });
  const auto precision = std::ranges::find(kPrecisions, text.empty() ? "ieee" : text);
  if (type == kTypes.end() || precision == kPrecisions.end()) {
    return false;
  }
  bucket.dtype = *type;
  bucket.precision = static_cast<Precision>(precision - kPrecisions.begin());
  return true;
}

int log_of(std::uint64_t n) { return 63 - std::countl_zero(n); }

using Tuned = TunedChoices<Bucket, Config>;

Tuned& tuned() {
  static Tuned& choices = *std::make_unique<Tuned>("kronecker", parse_bucket, parse_config).release();
  return choices;
}

}  // namespace

std::string text_of(const Config& config) {
  const auto& [name, numbers, parameters] = kFamilies[static_cast<std::size_t>(config.family)];
  std::string text(name);
  text += numbers > 0 ? ":" + std::to_string(config.first) : "";
  return text + (numbers > 1 ? "x" + std::to_string(config.second) : "");
}

Columns columns_of(const Config& config) {
  const Spelling& family = kFamilies[static_cast<std::size_t>(config.family)];
  Columns columns{family.name};
  for (int n = 0; n < family.numbers; ++n) {
    columns.parameters[family.parameters[static_cast<std::size_t>(n)]] = n == 0 ? config.first : config.second;
  }
  return columns;
}

std::optional<Config> parse_config(std::string_view text) {
  const std::string_view name = cut(text, ':');
  const auto family = std::ranges::find(kFamilies, name, &Spelling::name);
  if (family == kFamilies.end()) {
    return std::nullopt;
  }
  Config config{static_cast<Family>(family - kFamilies.begin())};
  const bool read_all = (family->numbers < 1 || read(cut(text, 'x'), config.first)) &&
                        (family->numbers < 2 || read(cut(text, 'x'), config.second)) && text.empty();
  return read_all ? std::optional(config) : std::nullopt;
}

std::optional<Bucket> bucket_of(const Problem& problem, const Context& context) {
  const bool first = problem.x.feature == 1 && problem.y.feature == 1;
  const bool last = problem.batch > 1 && problem.x.batch == 1 && problem.y.batch == 1;
  if (!first && !last) {
    return std::nullopt;
  }
  const bool has_precision = context.device.type == DeviceType::cuda && problem.dtype == DType::f32;
  return Bucket{problem.sizes, problem.dtype, has_precision ? context.precision : Precision::ieee, last,
                log_of(static_cast<std::uint64_t>(problem.batch))};
}

std::string text_of(const Bucket& bucket) {
  const auto& [a, b, c, d] = bucket.sizes;
  std::string text;
  for (const std::int64_t n : {a, b, c, d}) {
    text += (text.empty() ? "" : ",") + std::to_string(n);
  }
  text += std::string(" ") + name_of(bucket.dtype);
  if (bucket.precision != Precision::ieee) {
    text += std::string(":") + kPrecisions[static_cast<std::size_t>(bucket.precision)];
  }
  return text + (bucket.last ? " last " : " first ") + std::to_string(std::int64_t{1} << bucket.batch_log);
}

std::optional<Bucket> parse_bucket(std::string_view text) {
  Bucket bucket;
  std::string_view sizes = cut(text, ' ');
  for (std::int64_t* const size : {&bucket.sizes.a, &bucket.sizes.b, &bucket.sizes.c, &bucket.sizes.d}) {
    if (!read(cut(sizes, ','), *size)) {
      return std::nullopt;
    }
  }
  if (!sizes.empty() || !read_type(cut(text, ' '), bucket)) {
    return std::nullopt;
  }
  const std::string_view layout = cut(text, ' ');
  std::uint64_t batch = 0;
  if ((layout != "first" && layout != "last") || !read(text, batch) || !std::has_single_bit(batch)) {
    return std::nullopt;
  }
  bucket.last = layout == "last";
  bucket.batch_log = log_of(batch);
  return bucket;
}

std::vector<Config> candidates(const Problem& problem, const Context& context) {
  if (context.device.type == DeviceType::cpu) {
    return cpu::candidates(problem);
  }
  std::vector<Config> list;
  for (const auto& [config, microseconds] : cuda::candidates(problem, machine_of(context))) {
    list.push_back(config);
  }
  return list;
}

Chosen chosen(const Problem& problem, const Context& context) {
  if (tuned().any(context.device)) {
    if (const auto bucket = bucket_of(problem, context)) {
      if (const Tuned::Found* const found = tuned().find(context.device, *bucket)) {
        return {found->choice, found->source->name};
      }
    }
  }
  return {};
}

bool run(const Problem& problem, Context& context, const Config& config) {
  const bool on_cuda = context.device.type == DeviceType::cuda;
  if (config.family == Family::best) {
    on_cuda ? cuda::run(problem, context) : cpu::run(problem, context);
    return true;
  }
  return on_cuda ? cuda::run(problem, context, config) : cpu::run(problem, context, config);
}

}  // namespace fretwork::kronecker
