// `fretwork bench conv`: how fast the block-sparse convolution and its gradients are on this machine.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include "bench.h"
#include "commands.h"
#include "fretwork/ops.h"
#include "measure.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

struct ConvBenchOptions {
  std::vector<std::string> layers = {"256x56", "512x28"}, ops = {"forward"}, formats = {"nhwc", "nchw"};
  std::vector<std::int64_t> blocks = {32, 64};
  std::vector<double> densities = {0.25, 0.1};
  std::int64_t batch = 0, kernel = 3, stride = 1, dilation = 1;
  std::int64_t padding = -1;  ///< −1 keeps the size of the image at stride 1
  std::string precision = "ieee";
  RunOptions run;
};

constexpr std::array kOps = {"forward", "backward_x", "backward_values"};

/// One measurement: square images and kernels.
struct ConvCase {
  std::string op;
  bool channels_last;
  std::int64_t in, out, image, block;
  double density;
};

/// "256x56" is 256 → 256 channels at 56 × 56, "128x256x28" 128 → 256 at 28 × 28.
std::array<std::int64_t, 3> read_layer(const std::string& text) {
  std::vector<std::int64_t> numbers;
  const char *at = text.data(), *const end = at + text.size();
  while (numbers.size() < 4) {
    std::int64_t number = 0;
    const auto [behind, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 1 || number > 1 << 20) {
      numbers.clear();
      break;
    }
    numbers.push_back(number);
    if (behind == end) {
      break;
    }
    at = *behind == 'x' ? behind + 1 : end;
  }
  if (numbers.size() == 2) {
    return {numbers[0], numbers[0], numbers[1]};
  }
  if (numbers.size() == 3) {
    return {numbers[0], numbers[1], numbers[2]};
  }
  throw UsageError("bench: --layer: expected CHANNELSxSIZE or INxOUTxSIZE, such as 256x56, got " + text);
}

std::int64_t padding_of(const ConvBenchOptions& options) {
  return options.padding >= 0 ? options.padding : options.dilation * (options.kernel - 1) / 2;
}

/// Rows and columns of the result.
std::int64_t out_size(const ConvBenchOptions& options, std::int64_t image) {
  const std::int64_t reach = options.dilation * (options.kernel - 1) + 1;
  return (image + 2 * padding_of(options) - reach) / options.stride + 1;
}

void check_layer(const ConvBenchOptions& options, const std::string& text) {
  const auto [in, out, image] = read_layer(text);
  for (const std::int64_t block : options.blocks) {
    if (in % block != 0 || out % block != 0) {
      throw UsageError(fmt::format(
          "bench: --layer: expected channels that are a multiple of every block, got {} with block {}", text, block));
    }
  }
  if (image + 2 * padding_of(options) < options.dilation * (options.kernel - 1) + 1) {
    throw UsageError(
        fmt::format("bench: --layer: expected an image of at least the kernel's size, got {} with kernel {}", text,
                    options.kernel));
  }
}

template <typename Known>
void check_names(const char* option, const std::vector<std::string>& given, const Known& known) {
  for (const std::string& name : given) {
    if (std::find(std::begin(known), std::end(known), name) == std::end(known)) {
      std::string all;
      for (const char* one : known) {
        all += (all.empty() ? "" : ", ") + std::string(one);
      }
      throw UsageError(fmt::format("bench: {}: expected one of {}, got {}", option, all, name));
    }
  }
}

/// What was asked for, checked, in the order it is measured.
std::vector<ConvCase> all_cases(const ConvBenchOptions& options) {
  check_names("--op", options.ops, kOps);
  check_names("--format", options.formats, std::array{"nhwc", "nchw"});
  std::vector<ConvCase> cases;
  for (const std::string& text : options.layers) {
    check_layer(options, text);
    const auto [in, out, image] = read_layer(text);
    for (const std::string& op : options.ops) {
      for (const std::string& format : options.formats) {
        for (const std::int64_t block : options.blocks) {
          for (const double density : options.densities) {
            if (std::isnan(density)) {  // which no range refuses
              throw UsageError("bench: --density: expected 0 to 1, got nan");
            }
            cases.push_back({op, format == "nhwc", in, out, image, block, density});
          }
        }
      }
    }
  }
  return cases;
}

/// The dense stand-in for a case: every block there, and blocks as large as fit.
ConvCase dense_case(ConvCase one) {
  one.block = 128;
  while (one.in % one.block != 0 || one.out % one.block != 0) {
    --one.block;
  }
  one.density = 1.0;
  return one;
}

/// Images (N, C, H, W) of a memory format.
class Images {
 public:
  Images(Device device, DType dtype, const std::array<std::int64_t, 4>& sizes, bool channels_last)
      : data_(channels_last ? Data(device, dtype, {sizes[0], sizes[2], sizes[3], sizes[1]})
                            : Data(device, dtype, {sizes[0], sizes[1], sizes[2], sizes[3]})),
        view_(data_.view()) {
    if (channels_last) {
      const auto strides = view_.strides;
      view_.sizes = {sizes[0], sizes[1], sizes[2], sizes[3]};
      view_.strides = {strides[0], strides[3], strides[1], strides[2]};
    }
  }
  const TensorView& view() const { return view_; }

 private:
  Data data_;
  TensorView view_;
};

struct ConvTime {
  std::int64_t nnz = 0;
  double ms = 0, rate = 0;  ///< GFLOP/s on the non-zeros
};

ConvTime measure(const ConvBenchOptions& options, const ConvCase& one, DType dtype, Stopwatch& clock) {
  Context context = clock.context();
  const std::int64_t taps = options.kernel * options.kernel, side = out_size(options, one.image);
  const auto layout =
      random_blocks({taps, one.out / one.block, one.in / one.block, one.block, one.block}, one.density, 0);
  const Images x(clock.device(), dtype, {options.batch, one.in, one.image, one.image}, one.channels_last);
  const Images y(clock.device(), dtype, {options.batch, one.out, side, side}, one.channels_last);
  const Data values(clock.device(), dtype, {layout->nnz(), one.block, one.block});
  const std::int64_t padding = padding_of(options);
  const ConvOptions conv{.kernel = {options.kernel, options.kernel},
                         .stride = {options.stride, options.stride},
                         .padding = {padding, padding},
                         .padding_end = {padding, padding},
                         .dilation = {options.dilation, options.dilation}};
  const auto call = [&] {
    if (one.op == "forward") {
      block_conv2d(x.view(), values.view(), layout, y.view(), context, conv);
    } else if (one.op == "backward_x") {
      block_conv2d_backward_x(y.view(), values.view(), layout, x.view(), context, conv);
    } else {
      block_conv2d_backward_values(x.view(), y.view(), layout, values.view(), context, conv);
    }
  };
  ConvTime time{layout->nnz(), clock.cold(call).ms};
  const double entries = static_cast<double>(layout->nnz()) * static_cast<double>(one.block * one.block);
  time.rate = 2 * entries * static_cast<double>(options.batch * side * side) / time.ms * 1e-6;
  return time;
}

class ConvReport {
 public:
  /// `copy_rate`: bytes a millisecond.
  ConvReport(Run& run, const ConvBenchOptions& options, double copy_rate)
      : run_(run), options_(options), copy_rate_(copy_rate) {}

  void header() {
    fmt::print("{}, {}, median of {} rounds\n", run_.machine(), name_of(run_.dtype()), run_.rounds());
    fmt::print("batch {}, kernel {}, stride {}, padding {}, dilation {}\n", options_.batch, options_.kernel,
               options_.stride, padding_of(options_), options_.dilation);
    fmt::print("of dense: of the rate of the same op with every block there (largest block), measured in this run\n");
    fmt::print("{:<15} {:<6} {:>13} {:>5} {:>8} {:>8} {:>10} {:>17} {:>8}\n", "op", "format", "layer", "block",
               "density", "blocks", "ms", "rate", "of dense");
    run_.csv(
        "device,dtype,threads,op,format,in,out,image,batch,kernel,stride,padding,dilation,block,density,nnz,ms,gflops,"
        "dense_gflops,share");
  }

  /// `dense_ms`: of the same op with every block there.
  void add(const ConvCase& one, const ConvTime& time, double dense_ms) {
    const std::int64_t side = out_size(options_, one.image), taps = options_.kernel * options_.kernel;
    const auto pixels = static_cast<double>(options_.batch * side * side);
    const double dense = 2e-6 * static_cast<double>(taps * one.in * one.out) * pixels / dense_ms;
    const double moved = static_cast<double>(options_.batch * one.image * one.image * one.in) +
                         pixels * static_cast<double>(one.out) + static_cast<double>(time.nnz * one.block * one.block);
    const double floor =
        std::max(time.rate * time.ms / dense, moved * static_cast<double>(size_of(run_.dtype())) / copy_rate_);
    const char* const format = one.channels_last ? "nhwc" : "nchw";
    fmt::print("{:<15} {:<6} {:>13} {:>5} {:>8.4g} {:>8} {:>10.3f} {:>9.1f} {:<7} {:>6.1f} %\n", one.op, format,
               fmt::format("{}x{}x{}", one.in, one.out, one.image), one.block, one.density, time.nnz, time.ms,
               time.rate, "GFLOP/s", 100 * time.rate / dense);
    std::fflush(stdout);
    run_.csv(fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{:.6g},{:.6g},{:.6g},{:.4f}",
                         name_of(run_.device()), name_of(run_.dtype()), run_.threads(), one.op, format, one.in, one.out,
                         one.image, options_.batch, options_.kernel, options_.stride, padding_of(options_),
                         options_.dilation, one.block, one.density, time.nnz, time.ms, time.rate, dense,
                         time.rate / dense));
    rows_.push_back({{"op", one.op},
                     {"format", format},
                     {"in", one.in},
                     {"out", one.out},
                     {"image", one.image},
                     {"block", one.block},
                     {"density", one.density},
                     {"nnz", time.nnz},
                     {"ms", time.ms},
                     {"gflops", time.rate},
                     {"dense_gflops", dense},
                     {"share", time.rate / dense},
                     {"dense_ms", dense_ms},
                     {"floor_ms", floor}});
  }

  void finish() {
    run_.finish({{"batch", options_.batch},
                 {"kernel", options_.kernel},
                 {"stride", options_.stride},
                 {"padding", padding_of(options_)},
                 {"dilation", options_.dilation}},
                rows_,
                {{.title = "Time of each layer",
                  .labels = {"op", "format", "in", "out", "image", "block", "density"},
                  .series = {{"ms", "sparse"}, {"dense_ms", "every block"}, {"floor_ms", "floor"}},
                  .note = std::string("Every block: the same op with nothing left out. ") + kFloorNote}});
  }

 private:
  Run& run_;
  const ConvBenchOptions& options_;
  double copy_rate_;
  Json rows_ = Json::array();
};

void bench(ConvBenchOptions options) {
  const std::vector<ConvCase> cases = all_cases(options);
  Run run(options.run);
  if (options.batch == 0) {
    options.batch = run.device().type == DeviceType::cuda ? 64 : 2;
  }
  Stopwatch clock(run.device(), run.executor(), run.rounds(), run.precision(options.precision));
  ConvReport report(run, options, clock.copy_rate());
  report.header();
  Progress progress(static_cast<int>(cases.size()));
  std::optional<ConvCase> stand_in;
  double dense = 0;
  for (const ConvCase& one : cases) {
    progress.show(
        fmt::format("{} {}x{}x{} block={} density={:.4g}", one.op, one.in, one.out, one.image, one.block, one.density));
    if (!stand_in || stand_in->op != one.op || stand_in->channels_last != one.channels_last || stand_in->in != one.in ||
        stand_in->out != one.out || stand_in->image != one.image) {
      stand_in = dense_case(one);
      dense = measure(options, *stand_in, run.dtype(), clock).ms;
    }
    const ConvTime time = measure(options, one, run.dtype(), clock);
    progress.hide();
    report.add(one, time, dense);
    progress.advance();
  }
  report.finish();
}

}  // namespace

void add_bench_conv(CLI::App& bench_command) {
  const auto options = std::make_shared<ConvBenchOptions>();
  CLI::App* const command = bench_command.add_subcommand("conv", "Block-sparse convolution and its gradients");
  const auto number = [&](const char* name, std::int64_t& place, const char* help, std::int64_t least) {
    command->add_option(name, place, help)->check(CLI::Range(least, std::int64_t{1} << 20).description(""));
  };
  command->add_option("--layer", options->layers, "CHANNELSxSIZE or INxOUTxSIZE (256x56,512x28)")->delimiter(',');
  number("--batch", options->batch, "Images (2; on CUDA 64)", 1);
  number("--kernel", options->kernel, "Side of the kernel (3)", 1);
  number("--stride", options->stride, "Stride (1)", 1);
  number("--padding", options->padding, "Padding on every side (what keeps the image's size at stride 1)", 0);
  number("--dilation", options->dilation, "Dilation (1)", 1);
  command->add_option("--block", options->blocks, "Blocks, 8 to 128 (32,64)")
      ->delimiter(',')
      ->check(CLI::Range(8, 128).description(""));
  command->add_option("--density", options->densities, "Shares of blocks that are there (0.25,0.1)")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0).description(""));
  command->add_option("--op", options->ops, "forward, backward_x, backward_values (forward)")->delimiter(',');
  command->add_option("--format", options->formats, "nhwc, nchw (both)")->delimiter(',');
  command->add_option("--precision", options->precision, "ieee, tf32 or tf32x3, for float32 on CUDA (ieee)");
  add_run_options(*command, options->run);
  command->footer(
      "Lists are written with commas. The rate counts non-zeros only. It is set against the same op with every block\n"
      "there, so 100 % means that zeros cost nothing.\n"
      "Examples:\n"
      "  fretwork bench conv --layer 256x56 --block 64\n"
      "  fretwork bench conv --layer 128x256x28 --stride 2 --op forward,backward_x,backward_values --csv conv.csv\n"
      "  fretwork bench conv --device cuda:0 --dtype bfloat16 --format nhwc");
  command->callback([options] { bench(*options); });
}

}  // namespace fretwork::cli
