// torch.ops.fretwork: tensors become views, torch's stream, memory and threads become a context, and the core is
// called. Shapes and errors are the core's business; gradients and shape functions for tracing are Python's.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fretwork/fretwork.h"

namespace {

using torch::stable::Tensor;

/// A string argument. Read in place: the conversion that TORCH_BOX uses copies and leaks it.
class Text {
 public:
  explicit Text(StableIValue value) : handle_(torch::stable::detail::to<StringHandle>(value)) {}
  ~Text() { torch_delete_string(handle_); }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;

  std::string_view view() const {
    const char* data = nullptr;
    std::size_t length = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle_, &length));
    return {data, length};
  }

 private:
  StringHandle handle_;
};

/// The arguments of a boxed call in order. A call takes them all before it does anything that may throw: each owns what
/// it stands for.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}
  Tensor tensor() { return take<Tensor>(); }
  std::optional<Tensor> optional_tensor() { return take<std::optional<Tensor>>(); }
  std::vector<Tensor> tensors() { return take<std::vector<Tensor>>(); }
  Text text() { return Text(*next_++); }
  bool flag() { return take<bool>(); }
  double number() { return take<double>(); }
  std::int64_t integer() { return take<std::int64_t>(); }

 private:
  template <typename T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }
  const StableIValue* next_;
};

struct DTypeCode {
  std::int32_t code;
  fretwork::DType dtype;
};

const std::vector<DTypeCode>& dtype_codes() {
  using fretwork::DType;
  static const std::vector<DTypeCode> codes = {
      {aoti_torch_dtype_float32(), DType::f32},           {aoti_torch_dtype_float16(), DType::f16},
      {aoti_torch_dtype_bfloat16(), DType::bf16},         {aoti_torch_dtype_float64(), DType::f64},
      {aoti_torch_dtype_bool(), DType::boolean},          {aoti_torch_dtype_int8(), DType::i8},
      {aoti_torch_dtype_float8_e4m3fn(), DType::f8_e4m3}, {aoti_torch_dtype_float8_e5m2(), DType::f8_e5m2}};
  return codes;
}

/// Names of the types that no view has, for messages.
std::string foreign_dtype_name(std::int32_t code) {
  const std::pair<std::int32_t, const char*> names[] = {{aoti_torch_dtype_uint8(), "uint8"},
                                                        {aoti_torch_dtype_int16(), "int16"},
                                                        {aoti_torch_dtype_int32(), "int32"},
                                                        {aoti_torch_dtype_int64(), "int64"},
                                                        {aoti_torch_dtype_uint16(), "uint16"},
                                                        {aoti_torch_dtype_uint32(), "uint32"},
                                                        {aoti_torch_dtype_uint64(), "uint64"},
                                                        {aoti_torch_dtype_complex32(), "complex32"},
                                                        {aoti_torch_dtype_complex64(), "complex64"},
                                                        {aoti_torch_dtype_complex128(), "complex128"},
                                                        {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
                                                        {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"}};
  for (const auto& [known, name] : names) {
    if (known == code) {
      return name;
    }
  }
  return "dtype number " + std::to_string(code);
}

std::int32_t dtype_code(const Tensor& tensor) {
  std::int32_t code = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

fretwork::Device device_of(const Tensor& tensor) {
  const bool cuda = tensor.is_cuda();
  return {cuda ? fretwork::DeviceType::cuda : fretwork::DeviceType::cpu, cuda ? tensor.get_device_index() : 0};
}

constexpr const char* kFloating = "float64, float32, float16 or bfloat16";
constexpr const char* kFloatingOrBool = "bool, float64, float32, float16 or bfloat16";

/// The tensor as the core sees it; `op` and `argument` name it in errors.
fretwork::TensorView view(const char* op, const char* argument, const Tensor& tensor, const char* dtypes = kFloating) {
  const std::int32_t code = dtype_code(tensor);
  const auto& codes = dtype_codes();
  const auto known = std::find_if(codes.begin(), codes.end(), [&](const auto& c) { return c.code == code; });
  if (known == codes.end()) {
    throw fretwork::Error(op, argument, dtypes, foreign_dtype_name(code));
  }
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  if (sizes.size() > fretwork::kMaxRank) {
    throw fretwork::Error(op, argument, "at most 8 dimensions", std::to_string(sizes.size()));
  }
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  return {data, known->dtype, std::span(sizes.data(), sizes.size()), std::span(strides.data(), strides.size()),
          device_of(tensor)};
}

/// Uninitialised and contiguous, of the dtype and on the device of `like`.
Tensor empty(std::span<const std::int64_t> sizes, std::int32_t dtype, const Tensor& like) {
  std::array<std::int64_t, fretwork::kMaxRank> strides{};
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<std::int64_t>(sizes[d], 1);
  }
  std::int32_t type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                                         strides.data(), dtype, type, index, &made));
  return Tensor(made);
}

Tensor empty_like(std::span<const std::int64_t> sizes, const Tensor& like) {
  return empty(sizes, dtype_code(like), like);
}

/// torch's own threads. Each takes the next `grain` items when it is free, so that uneven work evens out.
class TorchExecutor final : public fretwork::Executor {
 public:
  int concurrency() const override { return static_cast<int>(torch::stable::get_num_threads()); }

  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    grain = std::max<std::int64_t>(grain, 1);
    const std::int64_t workers = std::min<std::int64_t>(concurrency(), (count + grain - 1) / grain);
    if (workers <= 1) {
      if (count > 0) {
        body(0, count);
      }
      return;
    }
    std::atomic<std::int64_t> next = 0;
    std::once_flag failed;
    std::exception_ptr failure;  // torch's own way across its C border would lose the text
    torch::stable::parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) {
      try {
        for (std::int64_t begin = 0; (begin = next.fetch_add(grain)) < count;) {
          body(begin, std::min(begin + grain, count));
        }
      } catch (...) {
        next.store(count);
        std::call_once(failed, [&] { failure = std::current_exception(); });
      }
    });
    if (failure) {
      std::rethrow_exception(failure);
    }
  }
};

/// Workspace from torch's caching allocator, in the order of its current stream.
class TorchAllocator final : public fretwork::Allocator {
 public:
  explicit TorchAllocator(const Tensor& like) : like_(like) {}

  void* allocate(std::size_t bytes) override {
    const std::int64_t sizes[] = {static_cast<std::int64_t>(bytes)};
    held_.push_back(empty(sizes, aoti_torch_dtype_uint8(), like_));
    return held_.back().mutable_data_ptr();
  }

  void release(void* memory, std::size_t /*bytes*/) noexcept override {
    std::erase_if(held_, [&](const Tensor& tensor) { return tensor.mutable_data_ptr() == memory; });
  }

 private:
  const Tensor& like_;
  std::vector<Tensor> held_;
};

/// torch's current stream on a device. The getter lives in libtorch_cuda, which is there whenever a CUDA tensor is.
void* current_stream(int device) {
  using Getter = AOTITorchError (*)(std::int32_t, void**);
  static const auto getter = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (getter == nullptr) {
    throw fretwork::Error("fretwork", "device", "a torch with CUDA", "one whose libtorch_cuda.so is not loaded");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

fretwork::Precision precision_named(const char* op, std::string_view name) {
  if (name == "ieee") {
    return fretwork::Precision::ieee;
  }
  if (name == "tf32") {
    return fretwork::Precision::tf32;
  }
  if (name == "tf32x3") {
    return fretwork::Precision::tf32x3;
  }
  throw fretwork::Error(op, "precision", "ieee, tf32 or tf32x3", std::string(name));
}

/// The context of one call: where `like` lives, on torch's stream, memory and threads.
class Call {
 public:
  explicit Call(const Tensor& like) : allocator_(like) {
    context_.device = device_of(like);
    context_.allocator = &allocator_;
    context_.executor = &executor_;
    if (context_.device.type == fretwork::DeviceType::cuda) {
      context_.stream = current_stream(context_.device.index);
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  fretwork::Context& context() { return context_; }

 private:
  TorchExecutor executor_;
  TorchAllocator allocator_;
  fretwork::Context context_;
};

std::shared_ptr<const fretwork::BlockLayout> block_layout(const char* op, const Text& key) {
  auto layout = std::dynamic_pointer_cast<const fretwork::BlockLayout>(fretwork::parse_pattern(key.view()));
  if (layout == nullptr) {
    throw fretwork::Error(op, "layout", "a block layout", std::string(key.view()));
  }
  return layout;
}

/// One of the three products: its name, what its operands are called, and the core's functions.
struct Product {
  const char *op, *first, *second;
  decltype(&fretwork::sdd_shape) shape;
  decltype(&fretwork::sdd) run;
};

void product(StableIValue* stack, const Product& p) {
  Arguments arguments(stack);
  const Tensor a = arguments.tensor(), b = arguments.tensor();
  const Text key = arguments.text();
  fretwork::MatmulOptions options;
  options.trans_a = arguments.flag();
  options.trans_b = arguments.flag();
  const Text precision = arguments.text();
  options.sum_z = arguments.flag();
  options.sum_h = arguments.flag();

  const auto layout = block_layout(p.op, key);
  const fretwork::TensorView first = view(p.op, p.first, a), second = view(p.op, p.second, b);
  const Tensor out = empty_like(p.shape(first, second, *layout, options), a);
  Call call(a);
  call.context().precision = precision_named(p.op, precision.view());
  p.run(first, second, *layout, view(p.op, "out", out), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

void sdd(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"sdd", "a", "b", &fretwork::sdd_shape, &fretwork::sdd});
}
void dsd(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"dsd", "values", "b", &fretwork::dsd_shape, &fretwork::dsd});
}
void dds(StableIValue* stack, std::uint64_t, std::uint64_t) {
  product(stack, {"dds", "a", "values", &fretwork::dds_shape, &fretwork::dds});
}

fretwork::Activation activation_named(const char* op, std::string_view name) {
  using fretwork::Activation;
  const std::pair<std::string_view, Activation> known[] = {
      {"none", Activation::none}, {"relu", Activation::relu}, {"gelu", Activation::gelu}, {"silu", Activation::silu}};
  for (const auto& [word, activation] : known) {
    if (word == name) {
      return activation;
    }
  }
  throw fretwork::Error(op, "activation", "none, relu, gelu or silu", std::string(name));
}

/// Batch × features as the core sees it: batch last is a transposed view.
fretwork::TensorView batch_view(const char* op, const char* argument, const Tensor& tensor, bool last) {
  fretwork::TensorView v = view(op, argument, tensor);
  if (v.rank != 2) {
    throw fretwork::Error(op, argument, "2 dimensions, batch and features", fretwork::shape_text(v.shape()));
  }
  if (last) {
    std::swap(v.sizes[0], v.sizes[1]);
    std::swap(v.strides[0], v.strides[1]);
  }
  return v;
}

/// What a Kronecker product does to its sums, with the view of the bias that the options point to.
struct Finish {
  fretwork::TensorView bias;
  fretwork::KsmmOptions options;
  Finish(const char* op, const std::optional<Tensor>& given, std::string_view activation)
      : bias(given.has_value() ? view(op, "bias", *given) : fretwork::TensorView{}),
        options{.bias = given.has_value() ? &bias : nullptr, .activation = activation_named(op, activation)} {}
  Finish(const Finish&) = delete;
  Finish& operator=(const Finish&) = delete;
};

void ksmm(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor(), w = arguments.tensor();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Text activation = arguments.text();
  const bool last = arguments.flag();
  const Text precision = arguments.text();

  const fretwork::TensorView input = batch_view(kOp, "x", x, last), weight = view(kOp, "w", w);
  const Finish finish(kOp, bias, activation.view());
  // A weight of another rank gives some shape; the core refuses it before it looks at the result.
  const std::int64_t batch = input.size(0), features = weight.size(0) * weight.size(1) * weight.size(3);
  const Tensor out = empty_like(last ? std::array{features, batch} : std::array{batch, features}, x);
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::ksmm(input, weight, batch_view(kOp, "out", out, last), call.context(), finish.options);
  stack[0] = torch::stable::detail::from(out);
}

void ksmm_chain(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm_chain";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const std::vector<Tensor> weights = arguments.tensors();
  const std::optional<Tensor> bias = arguments.optional_tensor();
  const Text activation = arguments.text();
  const bool last = arguments.flag();
  const Text precision = arguments.text();

  const fretwork::TensorView input = batch_view(kOp, "x", x, last);
  std::vector<fretwork::TensorView> factors;
  for (const Tensor& w : weights) {
    factors.push_back(view(kOp, ("weights[" + std::to_string(factors.size()) + "]").c_str(), w));
  }
  const Finish finish(kOp, bias, activation.view());
  // As for ksmm: bad weights give some shape, and are refused before it matters.
  const fretwork::TensorView end = factors.empty() ? fretwork::TensorView{} : factors.back();
  const std::int64_t batch = input.size(0), features = end.size(0) * end.size(1) * end.size(3);
  const Tensor out = empty_like(last ? std::array{features, batch} : std::array{batch, features}, x);
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::ksmm_chain(input, factors, batch_view(kOp, "out", out, last), call.context(), finish.options);
  stack[0] = torch::stable::detail::from(out);
}

/// b and c follow from a, d and the features. Without `bias` its gradient is empty.
void ksmm_backward_weight(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "ksmm_backward_weight";
  Arguments arguments(stack);
  const Tensor x = arguments.tensor(), d_out = arguments.tensor();
  const std::int64_t a = arguments.integer(), d = arguments.integer();
  const bool last = arguments.flag();
  const Text precision = arguments.text();
  const bool bias = arguments.flag();

  const fretwork::TensorView input = batch_view(kOp, "x", x, last), upstream = batch_view(kOp, "d_out", d_out, last);
  if (a < 1 || d < 1) {
    throw fretwork::Error(kOp, "a and d", "at least 1", std::to_string(a) + " and " + std::to_string(d));
  }
  const std::int64_t features = upstream.size(1);
  const Tensor d_w = empty_like(std::array{a, features / a / d, input.size(1) / a / d, d}, x);
  const Tensor d_bias = empty_like(std::array{bias ? features : 0}, x);
  const fretwork::TensorView d_bias_view = view(kOp, "d_bias", d_bias);
  Call call(x);
  call.context().precision = precision_named(kOp, precision.view());
  fretwork::ksmm_backward_weight(input, upstream, view(kOp, "d_w", d_w), bias ? &d_bias_view : nullptr, call.context());
  stack[0] = torch::stable::detail::from(d_w);
  stack[1] = torch::stable::detail::from(d_bias);
}

fretwork::MaskMode mask_mode(const char* argument, std::string_view name) {
  if (name != "add" && name != "mul") {
    throw fretwork::Error("block_softmax", argument, "\"add\" or \"mul\"", "\"" + std::string(name) + "\"");
  }
  return name == "add" ? fretwork::MaskMode::add : fretwork::MaskMode::mul;
}

void block_softmax(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_softmax";
  Arguments arguments(stack);
  const Tensor values = arguments.tensor();
  const Text key = arguments.text();
  fretwork::SoftmaxOptions options;
  options.scale = arguments.number();
  const std::optional<Tensor> extras[] = {arguments.optional_tensor(), arguments.optional_tensor(),
                                          arguments.optional_tensor()};
  const Text key_padding_mode = arguments.text(), attn_mode = arguments.text();

  const auto layout = block_layout(kOp, key);
  options.key_padding_mask_mode = mask_mode("key_padding_mask_mode", key_padding_mode.view());
  options.attn_mask_mode = mask_mode("attn_mask_mode", attn_mode.view());
  const char* const names[] = {"rpe", "key_padding_mask", "attn_mask"};
  const fretwork::TensorView** const places[] = {&options.rpe, &options.key_padding_mask, &options.attn_mask};
  fretwork::TensorView views[3];
  for (int n = 0; n < 3; ++n) {
    if (extras[n].has_value()) {
      views[n] = view(kOp, names[n], *extras[n], n == 0 ? kFloating : kFloatingOrBool);
      *places[n] = &views[n];
    }
  }
  const fretwork::TensorView input = view(kOp, "values", values);
  const Tensor out = empty_like(input.shape(), values);
  Call call(values);
  fretwork::block_softmax(input, *layout, view(kOp, "out", out), call.context(), options);
  stack[0] = torch::stable::detail::from(out);
}

/// `rpe` says what shape its gradient has: "none", or a letter for each of its dimensions, 1 where it is broadcast and
/// z, h, m or n where it is full; "11mn", "n" and so on. Sizes themselves would tie a traced graph to one batch.
std::vector<std::int64_t> rpe_shape(std::string_view rpe, const fretwork::TensorView& values,
                                    const fretwork::BlockLayout& layout) {
  std::vector<std::int64_t> sizes;
  for (const char letter : rpe) {
    const auto all = layout.shape();
    sizes.push_back(letter == 'z'   ? values.size(-4)
                    : letter == 'h' ? all[0]
                    : letter == 'm' ? all[1]
                    : letter == 'n' ? all[2]
                                    : 1);
  }
  return sizes;
}

void block_softmax_backward(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "block_softmax_backward";
  Arguments arguments(stack);
  const Tensor out = arguments.tensor(), d_out = arguments.tensor();
  const Text key = arguments.text();
  const double scale = arguments.number();
  const Text rpe = arguments.text();

  const auto layout = block_layout(kOp, key);
  const fretwork::TensorView result = view(kOp, "out", out), upstream = view(kOp, "d_out", d_out);
  const bool with_rpe = rpe.view() != "none";
  const Tensor d_values = empty_like(result.shape(), out);
  const Tensor d_rpe =
      empty_like(with_rpe ? rpe_shape(rpe.view(), result, *layout) : std::vector<std::int64_t>{0}, out);
  const fretwork::TensorView d_rpe_view = view(kOp, "d_rpe", d_rpe);
  Call call(out);
  fretwork::block_softmax_backward(result, upstream, *layout, scale, view(kOp, "d_values", d_values),
                                   with_rpe ? &d_rpe_view : nullptr, call.context());
  stack[0] = torch::stable::detail::from(d_values);
  stack[1] = torch::stable::detail::from(d_rpe);
}

/// Z where the tensor has four dimensions, then the given sizes.
std::vector<std::int64_t> with_batch(const fretwork::TensorView& like, std::initializer_list<std::int64_t> sizes) {
  std::vector<std::int64_t> all;
  if (like.rank == 4) {
    all.push_back(like.size(0));
  }
  all.insert(all.end(), sizes);
  return all;
}

void block_pack(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "pack";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const Text key = arguments.text();

  const auto layout = block_layout(kOp, key);
  const fretwork::TensorView input = view(kOp, "dense", dense);
  const auto& s = layout->sizes();
  const Tensor values = empty_like(with_batch(input, {layout->nnz(), s.block_rows, s.block_cols}), dense);
  Call call(dense);
  fretwork::block_pack(input, *layout, view(kOp, "values", values), call.context());
  stack[0] = torch::stable::detail::from(values);
}

void block_unpack(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "unpack";
  Arguments arguments(stack);
  const Tensor values = arguments.tensor();
  const Text key = arguments.text();
  const double fill = arguments.number();

  const auto layout = block_layout(kOp, key);
  const fretwork::TensorView input = view(kOp, "values", values);
  const auto all = layout->shape();
  const Tensor dense = empty_like(with_batch(input, {all[0], all[1], all[2]}), values);
  Call call(values);
  fretwork::block_unpack(input, *layout, fill, view(kOp, "dense", dense), call.context());
  stack[0] = torch::stable::detail::from(dense);
}

void kronecker_to_dense(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "to_dense";
  const Tensor w = Arguments(stack).tensor();
  const fretwork::TensorView input = view(kOp, "w", w);
  const Tensor dense = empty_like(fretwork::kronecker_to_dense_shape(input), w);
  Call call(w);
  fretwork::kronecker_to_dense(input, view(kOp, "dense", dense), call.context());
  stack[0] = torch::stable::detail::from(dense);
}

void kronecker_from_dense(StableIValue* stack, std::uint64_t, std::uint64_t) {
  constexpr const char* kOp = "from_dense";
  Arguments arguments(stack);
  const Tensor dense = arguments.tensor();
  const std::int64_t a = arguments.integer(), b = arguments.integer(), c = arguments.integer(), d = arguments.integer();

  const fretwork::TensorView input = view(kOp, "dense", dense);
  const Tensor w = empty_like(fretwork::kronecker_from_dense_shape(input, {a, b, c, d}), dense);
  const Tensor outside = empty({}, aoti_torch_dtype_int64(), dense);
  Call call(dense);
  fretwork::kronecker_from_dense(input, view(kOp, "w", w), static_cast<std::int64_t*>(outside.mutable_data_ptr()),
                                 call.context());
  stack[0] = torch::stable::detail::from(w);
  stack[1] = torch::stable::detail::from(outside);
}

/// Allocates a result and does nothing: what a call costs before an op does any work.
void nothing(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Tensor x = Arguments(stack).tensor();
  const auto sizes = x.sizes();
  const Tensor out = empty_like(std::span(sizes.data(), sizes.size()), x);
  stack[0] = torch::stable::detail::from(out);
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("sdd", &sdd);
  m.impl("dsd", &dsd);
  m.impl("dds", &dds);
  m.impl("ksmm", &ksmm);
  m.impl("ksmm_chain", &ksmm_chain);
  m.impl("ksmm_backward_weight", &ksmm_backward_weight);
  m.impl("block_softmax", &block_softmax);
  m.impl("block_softmax_backward", &block_softmax_backward);
  m.impl("block_pack", &block_pack);
  m.impl("block_unpack", &block_unpack);
  m.impl("kronecker_to_dense", &kronecker_to_dense);
  m.impl("kronecker_from_dense", &kronecker_from_dense);
  m.impl("_nothing", &nothing);
}

}  // namespace

STABLE_TORCH_LIBRARY(fretwork, m) {
  m.def(
      "sdd(Tensor a, Tensor b, str layout, bool trans_a, bool trans_b, str precision, bool sum_z, bool sum_h) -> "
      "Tensor");
  m.def(
      "dsd(Tensor values, Tensor b, str layout, bool trans_a, bool trans_b, str precision, bool sum_z, bool sum_h) -> "
      "Tensor");
  m.def(
      "dds(Tensor a, Tensor values, str layout, bool trans_a, bool trans_b, str precision, bool sum_z, bool sum_h) -> "
      "Tensor");
  m.def("ksmm(Tensor x, Tensor w, Tensor? bias, str activation, bool bs_last, str precision) -> Tensor");
  m.def("ksmm_chain(Tensor x, Tensor[] weights, Tensor? bias, str activation, bool bs_last, str precision) -> Tensor");
  m.def(
      "ksmm_backward_weight(Tensor x, Tensor d_out, SymInt a, SymInt d, bool bs_last, str precision, bool bias) -> "
      "(Tensor, Tensor)");
  m.def(
      "block_softmax(Tensor values, str layout, float scale, Tensor? rpe, Tensor? key_padding_mask, Tensor? attn_mask, "
      "str key_padding_mask_mode, str attn_mask_mode) -> Tensor");
  m.def("block_softmax_backward(Tensor out, Tensor d_out, str layout, float scale, str rpe) -> (Tensor, Tensor)");
  m.def("block_pack(Tensor dense, str layout) -> Tensor");
  m.def("block_unpack(Tensor values, str layout, float fill) -> Tensor");
  m.def("kronecker_to_dense(Tensor w) -> Tensor");
  m.def("kronecker_from_dense(Tensor dense, int a, int b, int c, int d) -> (Tensor w, Tensor outside)");
  m.def("_nothing(Tensor x) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fretwork, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fretwork, CUDA, m) { implement(m); }
