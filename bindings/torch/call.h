// One call of torch: tensors become views, torch's stream, memory and threads become a context.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fretwork/fretwork.h"
#include "fretwork/parallel_loop.h"

namespace fretwork_torch {

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
  std::vector<std::int64_t> integers() { return take<std::vector<std::int64_t>>(); }
  Text text() { return Text(*next_++); }
  bool flag() { return take<bool>(); }
  double number() { return take<double>(); }
  std::optional<double> optional_number() { return take<std::optional<double>>(); }
  std::int64_t integer() { return take<std::int64_t>(); }
  std::optional<std::int64_t> optional_integer() { return take<std::optional<std::int64_t>>(); }

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

inline const std::vector<DTypeCode>& dtype_codes() {
  using fretwork::DType;
  static const std::vector<DTypeCode> codes = {{aoti_torch_dtype_float32(), DType::f32},
                                               {aoti_torch_dtype_float16(), DType::f16},
                                               {aoti_torch_dtype_bfloat16(), DType::bf16},
                                               {aoti_torch_dtype_float64(), DType::f64},
                                               {aoti_torch_dtype_bool(), DType::boolean},
                                               {aoti_torch_dtype_int8(), DType::i8},
                                               {aoti_torch_dtype_float8_e4m3fn(), DType::f8_e4m3},
                                               {aoti_torch_dtype_float8_e5m2(), DType::f8_e5m2},
                                               {aoti_torch_dtype_int16(), DType::i16},
                                               {aoti_torch_dtype_int32(), DType::i32},
                                               {aoti_torch_dtype_uint8(), DType::u8},
                                               {aoti_torch_dtype_uint16(), DType::u16},
                                               {aoti_torch_dtype_uint32(), DType::u32}};
  return codes;
}

/// Names of the types that few views have or none, for messages.
inline std::string foreign_dtype_name(std::int32_t code) {
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

inline std::int32_t dtype_code(const Tensor& tensor) {
  std::int32_t code = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

inline fretwork::Device device_of(const Tensor& tensor) {
  const bool cuda = tensor.is_cuda();
  return {cuda ? fretwork::DeviceType::cuda : fretwork::DeviceType::cpu, cuda ? tensor.get_device_index() : 0};
}

/// What an argument may hold, in words. Only what belongs to 2:4 matrices, and lists of blocks, are integers of more
/// than 8 bits or unsigned ones: i16 and what DType has behind it.
struct Kinds {
  const char* words;
  bool integers = false;
};
inline constexpr Kinds kFloating{"float64, float32, float16 or bfloat16"};
inline constexpr Kinds kFloatingOrBool{"bool, float64, float32, float16 or bfloat16"};

/// The tensor as the core sees it, with `data` for its address; `op` and `argument` name it in errors.
template <typename Void>
fretwork::BasicTensorView<Void> view_of(const char* op, const char* argument, const Tensor& tensor, Void* data,
                                        const Kinds& kinds) {
  const std::int32_t code = dtype_code(tensor);
  const auto& codes = dtype_codes();
  const auto known = std::find_if(codes.begin(), codes.end(), [&](const auto& c) { return c.code == code; });
  if (known == codes.end() || (known->dtype >= fretwork::DType::i16 && !kinds.integers)) {
    throw fretwork::Error(op, argument, kinds.words, foreign_dtype_name(code));
  }
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  if (sizes.size() > fretwork::kMaxRank) {
    throw fretwork::Error(op, argument, "at most 8 dimensions", std::to_string(sizes.size()));
  }
  return {data, known->dtype, std::span(sizes.data(), sizes.size()), std::span(strides.data(), strides.size()),
          device_of(tensor)};
}

/// What an op reads.
inline fretwork::ConstTensorView view(const char* op, const char* argument, const Tensor& tensor,
                                      const Kinds& kinds = kFloating) {
  return view_of(op, argument, tensor, tensor.const_data_ptr(), kinds);
}
inline std::optional<fretwork::ConstTensorView> view(const char* op, const char* argument,
                                                     const std::optional<Tensor>& tensor,
                                                     const Kinds& kinds = kFloating) {
  return tensor.has_value() ? std::optional(view(op, argument, *tensor, kinds)) : std::nullopt;
}

/// What it writes.
inline fretwork::TensorView out_view(const char* op, const char* argument, const Tensor& tensor,
                                     const Kinds& kinds = kFloating) {
  return view_of(op, argument, tensor, tensor.mutable_data_ptr(), kinds);
}

/// Uninitialised, on the device of `like`.
inline Tensor empty_strided(std::span<const std::int64_t> sizes, const std::int64_t* strides, std::int32_t dtype,
                            const Tensor& like) {
  std::int32_t type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides,
                                                         dtype, type, index, &made));
  return Tensor(made);
}

/// The same, contiguous.
inline Tensor empty(std::span<const std::int64_t> sizes, std::int32_t dtype, const Tensor& like) {
  std::array<std::int64_t, fretwork::kMaxRank> strides{};
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<std::int64_t>(sizes[d], 1);
  }
  return empty_strided(sizes, strides.data(), dtype, like);
}

inline Tensor empty_like(std::span<const std::int64_t> sizes, const Tensor& like) {
  return empty(sizes, dtype_code(like), like);
}

/// A gradient of attention that goes where the core is told, or stays empty when it is not wanted.
struct Gradient {
  Gradient(const char* argument, const Tensor& of, bool wanted)
      : tensor(wanted ? empty_like(sizes_of(of), of) : empty_like(std::array<std::int64_t, 1>{0}, of)),
        place(wanted ? std::optional(out_view("attention_backward", argument, tensor)) : std::nullopt) {}
  static std::vector<std::int64_t> sizes_of(const Tensor& of) {
    const auto sizes = of.sizes();
    return {sizes.begin(), sizes.end()};
  }
  Tensor tensor;
  std::optional<fretwork::TensorView> place;
};

/// torch's own threads.
class TorchExecutor final : public fretwork::Executor {
 public:
  int concurrency() const override { return static_cast<int>(torch::stable::get_num_threads()); }

  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body) override {
    if (count <= grain || concurrency() == 1) {
      if (count > 0) {
        body(0, count);
      }
      return;
    }
    // It keeps a body's exception: torch's own way across its C border would lose the text.
    fretwork::ParallelLoop loop(count, grain, concurrency());
    torch::stable::parallel_for(0, loop.workers(), 1,
                                [&](std::int64_t worker, std::int64_t) { loop.work(worker, body); });
    loop.finish();
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
inline void* current_stream(int device) {
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

/// A thread of autograd's may begin with one of our ops, and go on with cuBLAS, which wants a current context: where
/// there is none, torch's current device gets its own.
inline void give_context(int device) {
  if (std::int32_t current = -1; !fretwork::has_cuda_context() &&
                                 aoti_torch_get_current_device_index(&current) == AOTI_TORCH_SUCCESS &&
                                 current == device) {
    fretwork::set_cuda_context(device);
  }
}

inline fretwork::Precision precision_named(const char* op, std::string_view name) {
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

inline fretwork::Activation activation_named(const char* op, std::string_view name) {
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

inline fretwork::BlockLayoutPtr block_layout(const char* op, const Text& key) {
  auto layout = std::dynamic_pointer_cast<const fretwork::BlockLayout>(fretwork::parse_pattern(key.view()));
  if (layout == nullptr) {
    throw fretwork::Error(op, "layout", "a block layout", std::string(key.view()));
  }
  return layout;
}

using BoxedKernel = void (*)(StableIValue*, std::uint64_t, std::uint64_t);

/// Defines an op and its twin, whose name begins with "_". torch runs the gradient rules of an op in Python at every
/// call, with or without a gradient; they cost more than the call. The twin has none, and Python calls it where it has
/// made the node itself or none is needed (python/fretwork/_torch/differentiable.py).
inline void define_twins(torch::stable::detail::StableLibrary& m, const std::string& schema) {
  m.def(schema.c_str());
  m.def(("_" + schema).c_str());
}

inline void implement_twins(torch::stable::detail::StableLibrary& m, const std::string& name, BoxedKernel kernel) {
  m.impl(name.c_str(), kernel);
  m.impl(("_" + name).c_str(), kernel);
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
      give_context(context_.device.index);
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

}  // namespace fretwork_torch
