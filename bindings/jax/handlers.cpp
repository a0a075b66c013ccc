// XLA FFI handlers, one per op and platform: buffers become views, XLA's threads, stream and memory become the context.
// Patterns arrive as their texts in an attribute, so that an exported program carries them.
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "executor.h"
#include "fretwork/fretwork.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using fretwork::BlockLayout, fretwork::ConstTensorView, fretwork::ConstTwoFour, fretwork::Context, fretwork::DType,
    fretwork::Error, fretwork::TensorView;

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::F64:
      return DType::f64;
    case ffi::F32:
      return DType::f32;
    case ffi::F16:
      return DType::f16;
    case ffi::BF16:
      return DType::bf16;
    case ffi::PRED:
      return DType::boolean;
    case ffi::F8E4M3FN:
      return DType::f8_e4m3;
    case ffi::F8E5M2:
      return DType::f8_e5m2;
    case ffi::S8:
      return DType::i8;
    case ffi::S16:
      return DType::i16;
    case ffi::S32:
      return DType::i32;
    case ffi::U8:
      return DType::u8;
    case ffi::U16:
      return DType::u16;
    case ffi::U32:
      return DType::u32;
    default:
      throw Error("fretwork.jax", "dtype", "float64, float32, float16, bfloat16 or bool",
                  "XLA's type " + std::to_string(static_cast<int>(type)));
  }
}

/// What one call brings.
struct Call {
  ffi::RemainingArgs args;
  ffi::RemainingRets rets;
  ffi::Dictionary attributes;
  Context context;

  ConstTensorView in(std::size_t n) const { return view(unwrap(args.get<ffi::AnyBuffer>(n))); }
  /// The last of `count` inputs, where there are so many.
  std::optional<ConstTensorView> last_of(std::size_t count) const {
    return args.size() < count ? std::nullopt : std::optional(in(count - 1));
  }
  TensorView out(std::size_t n) const { return view(*unwrap(rets.get<ffi::AnyBuffer>(n))); }

  /// An input whose type is no matter.
  const void* memory(std::size_t n) const { return unwrap(args.get<ffi::AnyBuffer>(n)).untyped_data(); }

  template <typename T>
  T attribute(std::string_view name) const {
    return unwrap(attributes.get<T>(name));
  }

  fretwork::BlockLayoutPtr layout() const {
    const auto key = attribute<std::string_view>("layout");
    auto found = std::dynamic_pointer_cast<const BlockLayout>(fretwork::parse_pattern(key));
    if (found == nullptr) {
      throw Error("fretwork.jax", "layout", "a block layout", std::string(key));
    }
    return found;
  }

  fretwork::PatternPtr pattern() const { return fretwork::parse_pattern(attribute<std::string_view>("pattern")); }

 private:
  template <typename T>
  static T unwrap(ffi::ErrorOr<T> got) {
    if (got.has_error()) {
      throw Error(got.error().message());
    }
    return *got;
  }

  TensorView view(const ffi::AnyBuffer& buffer) const {
    const auto sizes = buffer.dimensions();
    return {buffer.untyped_data(), dtype_of(buffer.element_type()), std::span(sizes.begin(), sizes.size()),
            context.device};
  }
};

fretwork::Precision precision_of(std::string_view name) {
  return name == "tf32"     ? fretwork::Precision::tf32
         : name == "tf32x3" ? fretwork::Precision::tf32x3
                            : fretwork::Precision::ieee;
}

void matmul(Call& call) {
  const auto mode = call.attribute<std::string_view>("mode");
  const auto layout = call.layout();
  const fretwork::MatmulOptions options{.trans_a = call.attribute<bool>("trans_a"),
                                        .trans_b = call.attribute<bool>("trans_b"),
                                        .sum_z = call.attribute<bool>("sum_z"),
                                        .sum_h = call.attribute<bool>("sum_h")};
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  const auto product = mode == "sdd" ? fretwork::sdd : mode == "dsd" ? fretwork::dsd : fretwork::dds;
  product(call.in(0), call.in(1), layout, call.out(0), call.context, options);
}

fretwork::MaskMode mask_mode(std::string_view name) {
  return name == "mul" ? fretwork::MaskMode::mul : fretwork::MaskMode::add;
}

/// Inputs: values, then those of rpe, key_padding_mask and attn_mask that the attribute "extras" names by r, k and a.
void softmax(Call& call) {
  const auto layout = call.layout();
  const auto extras = call.attribute<std::string_view>("extras");
  fretwork::SoftmaxOptions options{
      .scale = call.attribute<double>("scale"),
      .key_padding_mask_mode = mask_mode(call.attribute<std::string_view>("key_padding_mask_mode")),
      .attn_mask_mode = mask_mode(call.attribute<std::string_view>("attn_mask_mode"))};
  for (std::size_t n = 0; n < extras.size(); ++n) {
    (extras[n] == 'r' ? options.rpe : extras[n] == 'k' ? options.key_padding_mask : options.attn_mask) = call.in(n + 1);
  }
  fretwork::block_softmax(call.in(0), layout, call.out(0), call.context, options);
}

/// Inputs: the softmax and its gradient. Outputs: the gradient of values and, when there are two, of rpe.
void softmax_backward(Call& call) {
  const auto layout = call.layout();
  const auto d_rpe = call.rets.size() > 1 ? std::optional(call.out(1)) : std::nullopt;
  fretwork::block_softmax_backward(call.in(0), call.in(1), layout, call.attribute<double>("scale"), call.out(0), d_rpe,
                                   call.context);
}

void pack(Call& call) { fretwork::block_pack(call.in(0), call.layout(), call.out(0), call.context); }

void unpack(Call& call) {
  fretwork::block_unpack(call.in(0), call.layout(), call.attribute<double>("fill"), call.out(0), call.context);
}

/// Kernel size, stride, padding (top, left, bottom, right) and dilation.
fretwork::ConvOptions conv_options(Call& call) {
  const auto numbers = [&](const char* name) { return call.attribute<ffi::Span<const std::int64_t>>(name).begin(); };
  const auto two = [](const std::int64_t* given) { return std::array{given[0], given[1]}; };
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  fretwork::ConvOptions options;
  options.kernel = two(numbers("kernel_size"));
  options.stride = two(numbers("stride"));
  options.padding = two(numbers("padding"));
  options.padding_end = two(numbers("padding") + 2);
  options.dilation = two(numbers("dilation"));
  return options;
}

/// Inputs: x, values and, when there are three, the bias.
void block_conv2d(Call& call) {
  fretwork::ConvOptions options = conv_options(call);
  options.bias = call.last_of(3);
  fretwork::block_conv2d(call.in(0), call.in(1), call.layout(), call.out(0), call.context, options);
}

/// Inputs: the gradient of the result, and values.
void block_conv2d_backward_x(Call& call) {
  const fretwork::ConvOptions options = conv_options(call);
  fretwork::block_conv2d_backward_x(call.in(0), call.in(1), call.layout(), call.out(0), call.context, options);
}

/// Inputs: x, and the gradient of the result.
void block_conv2d_backward_values(Call& call) {
  const fretwork::ConvOptions options = conv_options(call);
  fretwork::block_conv2d_backward_values(call.in(0), call.in(1), call.layout(), call.out(0), call.context, options);
}

/// Batch × features as the core sees it: batch last is a transposed view.
template <typename View>
View batch_view(View view, bool last) {
  if (last) {
    std::swap(view.sizes[0], view.sizes[1]);
    std::swap(view.strides[0], view.strides[1]);
  }
  return view;
}

fretwork::Activation activation_of(std::string_view name) {
  return name == "relu"   ? fretwork::Activation::relu
         : name == "gelu" ? fretwork::Activation::gelu
         : name == "silu" ? fretwork::Activation::silu
                          : fretwork::Activation::none;
}

/// Inputs: x, w and, when there are three, the bias.
void ksmm(Call& call) {
  const bool last = call.attribute<bool>("bs_last");
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  const fretwork::KsmmOptions options{.bias = call.last_of(3),
                                      .activation = activation_of(call.attribute<std::string_view>("activation"))};
  fretwork::ksmm(batch_view(call.in(0), last), call.in(1), batch_view(call.out(0), last), call.context, options);
}

/// Inputs: x, the weights in order of application and, when the last has one dimension, the bias.
void ksmm_chain(Call& call) {
  const bool last = call.attribute<bool>("bs_last");
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  std::vector<ConstTensorView> weights;
  for (std::size_t n = 1; n < call.args.size(); ++n) {
    weights.push_back(call.in(n));
  }
  fretwork::KsmmOptions options{.bias = {},
                                .activation = activation_of(call.attribute<std::string_view>("activation"))};
  if (!weights.empty() && weights.back().rank == 1) {
    options.bias = weights.back();
    weights.pop_back();
  }
  fretwork::ksmm_chain(batch_view(call.in(0), last), weights, batch_view(call.out(0), last), call.context, options);
}

/// Inputs: x and the gradient of the result. Outputs: the gradients of w and of the bias.
void ksmm_backward_weight(Call& call) {
  const bool last = call.attribute<bool>("bs_last");
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  fretwork::ksmm_backward_weight(batch_view(call.in(0), last), batch_view(call.in(1), last), call.out(0), call.out(1),
                                 call.context);
}

/// Options of attention from the attributes and the inputs from `first` on: those of bias, slopes, dropout's seed (64
/// bits in any type), key padding and sinks that the attribute "extras" names by b, s, d, k and z.
fretwork::AttentionOptions attention_options(Call& call, std::size_t first) {
  fretwork::AttentionOptions options;
  options.scale = call.attribute<double>("scale");
  options.softcap = call.attribute<double>("softcap");
  options.dropout = call.attribute<double>("dropout_p");
  for (const char kind : call.attribute<std::string_view>("extras")) {
    if (kind == 'd') {
      options.dropout_seed = static_cast<const std::int64_t*>(call.memory(first++));
    } else {
      (kind == 'b'   ? options.bias
       : kind == 's' ? options.slopes
       : kind == 'k' ? options.key_padding
                     : options.sinks) = call.in(first++);
    }
  }
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  return options;
}

struct AttentionCall {
  AttentionCall(Call& call, std::size_t first)
      : patterns(fretwork::parse_patterns(call.attribute<std::string_view>("patterns"))),
        options(attention_options(call, first)) {}
  std::vector<fretwork::PatternPtr> patterns;
  fretwork::AttentionOptions options;
};

/// Inputs: q, k, v and the extras. Outputs: o and lse.
void attention(Call& call) {
  const AttentionCall own(call, 3);
  fretwork::attention(call.in(0), call.in(1), call.in(2), own.patterns, call.out(0), call.out(1), call.context,
                      own.options);
}

/// Inputs: q, k, v, o, lse, d_o, d_lse and the extras. Outputs: the gradients of q, k, v and, where they
/// are among the extras, of bias and sinks.
void attention_backward(Call& call) {
  const AttentionCall own(call, 7);
  fretwork::AttentionGradients gradients{.q = call.out(0), .k = call.out(1), .v = call.out(2), .bias = {}, .sinks = {}};
  if (own.options.bias.has_value()) {
    gradients.bias = call.out(3);
  }
  if (own.options.sinks.has_value()) {
    gradients.sinks = call.out(call.rets.size() - 1);
  }
  fretwork::attention_backward(call.in(0), call.in(1), call.in(2), own.patterns, call.in(3), call.in(4), call.in(5),
                               call.in(6), gradients, call.context, own.options);
}

/// Keys that only the device knows, and options, of the inputs from `first` on. The attribute "keys" names what comes
/// first: a mask, the counts and indices of lists, what each query selected, or where documents of queries and of keys
/// begin. "sizes" are the rows and columns of a block, causal, left, right, max_q and max_k, −1 for none.
struct DynamicCall {
  DynamicCall(Call& call, std::size_t first) {
    if (const auto text = call.attribute<std::string_view>("pattern"); !text.empty()) {
      pattern = fretwork::parse_pattern(text);
    }
    const auto form = call.attribute<std::string_view>("keys");
    if (form == "mask") {
      keys.mask = call.in(first++);
    } else if (form == "lists") {
      keys.counts = call.in(first++);
      keys.indices = call.in(first++);
    } else if (form == "selected") {
      keys.selected = call.in(first++);
    } else {
      keys.cu_q = call.in(first++);
      keys.cu_k = call.in(first++);
    }
    const auto sizes = call.attribute<ffi::Span<const std::int64_t>>("sizes").begin();
    const auto bound = [&](int n) { return sizes[n] < 0 ? std::nullopt : std::optional(sizes[n]); };
    keys.block_rows = sizes[0];
    keys.block_cols = sizes[1];
    keys.causal = sizes[2] > 0;
    keys.left = bound(3);
    keys.right = bound(4);
    keys.max_q = bound(5);
    keys.max_k = bound(6);
    options = attention_options(call, first);
  }
  fretwork::PatternPtr pattern;
  fretwork::DeviceKeys keys;
  fretwork::AttentionOptions options;
};

/// Inputs: q, k, v, the keys and the extras. Outputs: o and lse.
void dynamic_attention(Call& call) {
  const DynamicCall own(call, 3);
  fretwork::dynamic_attention(call.in(0), call.in(1), call.in(2), own.pattern, own.keys, call.out(0), call.out(1),
                              call.context, own.options);
}

/// Inputs: q, k, v, o, lse, d_o, d_lse, the keys and the extras. Outputs: the gradients of q, k, v and, where it is
/// among the extras, of bias.
void dynamic_attention_backward(Call& call) {
  const DynamicCall own(call, 7);
  fretwork::AttentionGradients gradients{.q = call.out(0), .k = call.out(1), .v = call.out(2), .bias = {}, .sinks = {}};
  if (own.options.bias.has_value()) {
    gradients.bias = call.out(3);
  }
  fretwork::dynamic_attention_backward(call.in(0), call.in(1), call.in(2), own.pattern, own.keys, call.in(3),
                                       call.in(4), call.in(5), call.in(6), gradients, call.context, own.options);
}

/// Inputs: q and k. Outputs: counts and indices.
void select_blocks(Call& call) {
  const fretwork::SelectOptions options{.block_q = call.attribute<std::int64_t>("block_q"),
                                        .block_k = call.attribute<std::int64_t>("block_k"),
                                        .causal = call.attribute<bool>("causal"),
                                        .first = call.attribute<std::int64_t>("first"),
                                        .last = call.attribute<std::int64_t>("last")};
  fretwork::select_blocks(call.in(0), call.in(1), call.out(1).size(3), call.out(0), call.out(1), call.context, options);
}

void r_sddmm(Call& call) { fretwork::r_sddmm(call.in(0), call.in(1), call.pattern(), call.out(0), call.context); }
void r_spmm(Call& call) { fretwork::r_spmm(call.in(0), call.in(1), call.pattern(), call.out(0), call.context); }
void r_spmm_transposed(Call& call) {
  fretwork::r_spmm_transposed(call.in(0), call.in(1), call.pattern(), call.out(0), call.context);
}
void r_softmax(Call& call) {
  fretwork::r_softmax(call.in(0), call.pattern(), call.attribute<double>("scale"), call.out(0), call.context);
}
void r_softmax_backward(Call& call) {
  fretwork::r_softmax_backward(call.in(0), call.in(1), call.pattern(), call.attribute<double>("scale"), call.out(0),
                               call.context);
}

/// 2:4 matrices come as lines × positions, whichever axis is compressed. The place of a bad group is two 32-bit numbers
/// that are one of 64 bits, which XLA has only when asked.
fretwork::TwoFour along(const TensorView& values, const TensorView& metadata, std::int64_t dim) {
  const fretwork::TwoFour lines{values, metadata, 1};
  return dim == 0 ? lines.transpose() : lines;
}

void two_four_compress(Call& call) {
  fretwork::two_four::compress(call.in(0), along(call.out(0), call.out(1), call.attribute<std::int64_t>("dim")),
                               static_cast<std::int64_t*>(call.out(2).data), call.context);
}

void two_four_check(Call& call) {
  fretwork::two_four::check(call.in(0), static_cast<int>(call.attribute<std::int64_t>("dim")),
                            static_cast<std::int64_t*>(call.out(0).data), call.context);
}

void two_four_canonical(Call& call) {
  fretwork::two_four::canonical(ConstTwoFour{call.in(0), call.in(1), 1}, call.out(0),
                                call.attribute<bool>("keep_valid"), static_cast<std::int64_t*>(call.out(1).data),
                                call.context);
}

void two_four_to_dense(Call& call) {
  fretwork::two_four::to_dense(ConstTwoFour{call.in(0), call.in(1), 1}, call.out(0), call.context);
}

void two_four_gather(Call& call) { fretwork::two_four::gather(call.in(0), call.in(1), 1, call.out(0), call.context); }

void two_four_prune(Call& call) {
  fretwork::two_four::prune(call.in(0), static_cast<int>(call.attribute<std::int64_t>("dim")),
                            call.attribute<bool>("transposable"), call.out(0), call.context);
}

/// Inputs: values, metadata, the dense operand and, when there are four, the bias.
void two_four_matmul(Call& call) {
  const ConstTwoFour lines{call.in(0), call.in(1), 1};
  const fretwork::two_four::Options options{
      .bias = call.last_of(4), .activation = activation_of(call.attribute<std::string_view>("activation"))};
  call.context.precision = precision_of(call.attribute<std::string_view>("precision"));
  if (call.attribute<bool>("left")) {
    fretwork::two_four::matmul(lines, call.in(2), call.out(0), call.context, options);
  } else {
    fretwork::two_four::matmul(call.in(2), lines.transpose(), call.out(0), call.context, options);
  }
}

using Op = void (*)(Call&);

ffi::Error run(Op op, Call call) {
  try {
    op(call);
    return ffi::Error::Success();
  } catch (const Error& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

template <Op op>
ffi::Error on_cpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  fretwork::XlaExecutor executor(pool);
  return run(op, {args, rets, attributes, Context::cpu(executor)});
}

/// XLA frees scratch memory when the handler returns, in stream order.
class ScratchMemory final : public fretwork::Allocator {
 public:
  explicit ScratchMemory(ffi::ScratchAllocator& scratch) : scratch_(scratch) {}
  void* allocate(std::size_t bytes) override {
    const auto memory = scratch_.Allocate(bytes + kAlign, kXlaAlign);
    if (!memory) {
      throw Error("fretwork.jax", "workspace", std::to_string(bytes) + " bytes from XLA", "none");
    }
    const auto address = reinterpret_cast<std::uintptr_t>(*memory);
    return static_cast<std::byte*>(*memory) + (kAlign - address % kAlign) % kAlign;
  }
  void release(void* /*memory*/, std::size_t /*bytes*/) noexcept override {}

 private:
  static constexpr std::size_t kXlaAlign = 16;  // the most that XLA lets a caller ask for
  static constexpr std::size_t kAlign = 256;    // what kernels and copy engines expect of an allocation
  ffi::ScratchAllocator& scratch_;
};

template <Op op>
ffi::Error on_cuda(void* stream, std::int32_t device, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary attributes) {
  ScratchMemory memory(scratch);
  Context context;
  context.device = {fretwork::DeviceType::cuda, device};
  context.stream = stream;
  context.allocator = &memory;
  context.executor = &fretwork::serial_executor();
  return run(op, {args, rets, attributes, context});
}

auto cpu_call() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs(); }

auto cuda_call() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

/// What XLA calls for an op on each platform.
struct Handlers {
  const char* op;
  XLA_FFI_Handler *cpu, *cuda;
};

template <Op op>
Handlers handlers(const char* name) {
  XLA_FFI_DEFINE_HANDLER(cpu, on_cpu<op>, cpu_call());
  XLA_FFI_DEFINE_HANDLER(cuda, on_cuda<op>, cuda_call());
  return {name, cpu, cuda};
}

}  // namespace

/// Every op, and an empty name behind the last; fretwork.jax registers them.
extern "C" const Handlers* fretwork_jax_handlers() {
  static const Handlers all[] = {
      handlers<matmul>("matmul"),
      handlers<softmax>("softmax"),
      handlers<softmax_backward>("softmax_backward"),
      handlers<pack>("pack"),
      handlers<unpack>("unpack"),
      handlers<block_conv2d>("block_conv2d"),
      handlers<block_conv2d_backward_x>("block_conv2d_backward_x"),
      handlers<block_conv2d_backward_values>("block_conv2d_backward_values"),
      handlers<ksmm>("ksmm"),
      handlers<ksmm_chain>("ksmm_chain"),
      handlers<ksmm_backward_weight>("ksmm_backward_weight"),
      handlers<attention>("attention"),
      handlers<attention_backward>("attention_backward"),
      handlers<dynamic_attention>("dynamic_attention"),
      handlers<dynamic_attention_backward>("dynamic_attention_backward"),
      handlers<select_blocks>("select_blocks"),
      handlers<r_sddmm>("r_sddmm"),
      handlers<r_spmm>("r_spmm"),
      handlers<r_spmm_transposed>("r_spmm_transposed"),
      handlers<r_softmax>("r_softmax"),
      handlers<r_softmax_backward>("r_softmax_backward"),
      handlers<two_four_compress>("two_four_compress"),
      handlers<two_four_check>("two_four_check"),
      handlers<two_four_canonical>("two_four_canonical"),
      handlers<two_four_to_dense>("two_four_to_dense"),
      handlers<two_four_gather>("two_four_gather"),
      handlers<two_four_prune>("two_four_prune"),
      handlers<two_four_matmul>("two_four_matmul"),
      {},
  };
  return all;
}
