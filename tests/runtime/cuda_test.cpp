// The driver on a real GPU: memory, launches, tensor maps, capture. Skipped where there is none.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "fretwork/device_tensor.h"
#include "fretwork/error.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"

namespace fretwork {
namespace {

/// A function of the driver that only this test needs.
template <typename... Arguments>
void call(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  ASSERT_NE(function, nullptr) << name;
  ASSERT_EQ(function(arguments...), 0) << name;
}

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
    scope_ = std::make_unique<cuda::DeviceScope>(0);
  }
  std::unique_ptr<cuda::DeviceScope> scope_;
};

class Launches : public Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (cuda::available() && nvrtc::library().path.empty()) {
      GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
    }
  }
};

/// Writes block · 1000 + the last word of dynamic shared memory, which thread 0 has set to `add`.
struct Params {
  int* out;
  int words, add;
};
const KernelSpec kMark{
    "struct Params { int* out; int words, add; };\n"
    "__global__ void mark(const __grid_constant__ Params p) {\n"
    "  extern __shared__ int shared[];\n"
    "  if (threadIdx.x == 0) { shared[p.words - 1] = p.add; p.out[blockIdx.x] = blockIdx.x * 1000 + shared[p.words - "
    "1]; }\n"
    "}\n",
    "mark"};
const KernelSpec kRank{
    "struct Params { int* out; int words, add; };\n"
    "__global__ void rank(const __grid_constant__ Params p) {\n"
    "  int rank;\n"
    "  asm(\"mov.u32 %0, %%cluster_ctarank;\" : \"=r\"(rank));\n"
    "  p.out[blockIdx.x] = rank;\n"
    "}\n",
    "rank"};

/// The first lets the second start before it writes; the second waits before it reads.
const KernelSpec kEarly{
    "struct Params { int* out; int words, add; };\n"
    "__global__ void early(const __grid_constant__ Params p) {\n"
    "  asm volatile(\"griddepcontrol.launch_dependents;\" ::: \"memory\");\n"
    "  for (long long begin = clock64(); clock64() - begin < 20000;) {}\n"
    "  p.out[blockIdx.x] += p.add;\n"
    "}\n",
    "early"};
const KernelSpec kLate{
    "struct Params { int* out; int words, add; };\n"
    "__global__ void late(const __grid_constant__ Params p) {\n"
    "  asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
    "  p.out[p.words + blockIdx.x] = p.out[blockIdx.x] + 1;\n"
    "}\n",
    "late"};

std::vector<int> read_back(const cuda::DeviceBuffer& buffer, cuda::Handle stream = nullptr) {
  std::vector<int> host(buffer.bytes() / sizeof(int));
  cuda::copy_to_host(host.data(), buffer.data(), buffer.bytes(), stream);
  cuda::synchronize(stream);
  return host;
}

cuda::DeviceBuffer zeros(int count) {
  const std::vector<int> host(static_cast<std::size_t>(count));
  return {0, host.data(), host.size() * sizeof(int)};
}

TEST_F(Cuda, DescribesDevices) {
  const cuda::DeviceInfo& info = cuda::device_info(0);
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.arch, 50);
  EXPECT_GT(info.multiprocessors, 0);
  EXPECT_GE(info.shared_per_block, 48 << 10);
  EXPECT_GT(info.memory, std::size_t{1} << 30);
  EXPECT_GT(info.l2, 0u);
  try {
    cuda::device_info(1000);
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("cuda: device: expected 0 to ")) << error.what();
  }
}

TEST_F(Cuda, ArchitectureMayBeForced) {
  const int arch = cuda::device_info(0).arch;
  unsetenv("FRETWORK_ARCH");
  EXPECT_EQ(cuda::kernel_arch(0), arch == 90 ? "sm_90a" : "sm_" + std::to_string(arch));
  EXPECT_EQ(cuda::binary_arch(0), cuda::kernel_arch(0));
  setenv("FRETWORK_ARCH", "sm_80", 1);
  EXPECT_EQ(cuda::kernel_arch(0), "sm_80");
  EXPECT_EQ(cuda::binary_arch(0), arch / 10 > 8 ? "sm_" + std::to_string(arch) : "sm_80");
  unsetenv("FRETWORK_ARCH");
}

TEST_F(Cuda, ScopesNestAndRestore) {
  scope_.reset();
  void* before = nullptr;
  void* inside = nullptr;
  void* after = nullptr;
  call("cuCtxGetCurrent", &before);
  {
    const cuda::DeviceScope outer(0);
    const cuda::DeviceScope inner(0);
    call("cuCtxGetCurrent", &inside);
  }
  call("cuCtxGetCurrent", &after);
  EXPECT_NE(inside, nullptr);
  EXPECT_EQ(before, after);
  std::thread([] { const cuda::DeviceScope scope(0); }).join();
}

TEST_F(Cuda, BuffersHoldWhatWasGiven) {
  std::vector<int> host(100000);
  std::iota(host.begin(), host.end(), 0);
  cuda::DeviceBuffer buffer(0, host.data(), host.size() * sizeof(int));
  cuda::DeviceBuffer moved = std::move(buffer);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(read_back(moved), host);
  moved = cuda::DeviceBuffer(0, host.data(), 0);
  EXPECT_EQ(moved.data(), nullptr);
}

TEST_F(Cuda, BuffersGiveTheirMemoryBack) {
  const auto free_bytes = [] {
    std::size_t free = 0, all = 0;
    call("cuMemGetInfo_v2", &free, &all);
    return free;
  };
  const cuda::DeviceScope scope(0);
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  const std::size_t before = free_bytes();
  for (int n = 0; n < 100; ++n) {
    const cuda::DeviceBuffer passing(0, nullptr, kPiece);
  }
  EXPECT_GT(free_bytes() + 12 * kPiece, before);
}

TEST_F(Cuda, ContextsGiveWorkspace) {
  Context context = Context::cuda(0);
  EXPECT_EQ(context.allocator, Context::cuda(0).allocator);
  for (int n = 0; n < 3; ++n) {
    const Workspace space(context, 1 << 20);
    ASSERT_NE(space.data(), nullptr);
    cuda::fill_zero(space.data(), 1 << 20, context.stream);
    std::vector<char> host(1 << 20, 'x');
    cuda::copy_to_host(host.data(), space.data(), host.size(), context.stream);
    cuda::synchronize(context.stream);
    EXPECT_EQ(host, std::vector<char>(1 << 20, 0));
  }
  EXPECT_THROW(Context::cuda(1000), Error);
  EXPECT_THROW(context.allocator->allocate(std::size_t{1} << 50), Error);
}

TEST_F(Cuda, TensorsOwnDeviceMemory) {
  EXPECT_EQ(cuda_device_count(), cuda::device_count());
  const Context context = Context::cuda(0);
  std::vector<int> host(100000), back(host.size());
  std::iota(host.begin(), host.end(), 0);
  DeviceTensor tensor(context, DType::i32, {100, 1000});
  tensor.copy_from(host);
  DeviceTensor moved = std::move(tensor);
  EXPECT_EQ(moved.device(), context.device);
  moved.copy_to(back);
  EXPECT_EQ(back, host);
  moved = DeviceTensor(context, DType::i32, {0});
  EXPECT_EQ(moved.view().data, nullptr);
  EXPECT_THROW(DeviceTensor(context, DType::u8, {std::int64_t{1} << 50}), Error);
}

TEST_F(Cuda, ErrorsNameTheCall) {
  try {
    cuda::copy_to_device(reinterpret_cast<void*>(8), "x", 1, nullptr);
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("cuda: cuMemcpyHtoDAsync_v2: expected success, got CUDA_ERROR_"))
        << error.what();
  }
}

TEST_F(Cuda, TensorMaps) {
  if (cuda::device_info(0).arch < 90) {
    GTEST_SKIP() << "tensor maps need sm_90";
  }
  const cuda::DeviceBuffer buffer = zeros(64 * 64);
  const std::uint64_t sizes[] = {64, 128}, strides[] = {128};
  const std::uint32_t box[] = {64, 32};
  const cuda::TensorMap map = cuda::make_tensor_map(buffer.data(), 2, sizes, strides, box, cuda::Swizzle::b128);
  const cuda::TensorMap empty{};
  EXPECT_NE(std::memcmp(&map, &empty, sizeof map), 0);
  const std::uint64_t odd[] = {130};
  EXPECT_THROW(cuda::make_tensor_map(buffer.data(), 2, sizes, odd, box, cuda::Swizzle::b128), Error);
  EXPECT_THROW(cuda::make_tensor_map(buffer.data(), 3, sizes, strides, box, cuda::Swizzle::b128), Error);
}

TEST_F(Launches, WithLittleAndMuchSharedMemory) {
  const Kernel& kernel = get_kernel(kMark, 0);
  EXPECT_EQ(&kernel, &get_kernel(kMark, 0));
  const cuda::DeviceBuffer out = zeros(8);
  const int most = cuda::device_info(0).shared_per_block;
  for (const int shared : {64, most, 48 << 10, most}) {
    const Params params{static_cast<int*>(out.data()), shared / 4, shared % 997};
    kernel.launch(8, 32, shared, &params, nullptr);
    const std::vector<int> marks = read_back(out);
    for (int n = 0; n < 8; ++n) {
      EXPECT_EQ(marks[static_cast<std::size_t>(n)], n * 1000 + shared % 997);
    }
  }
  EXPECT_GE(kernel.occupancy(128, 1024), 1);
  EXPECT_EQ(kernel.occupancy(128, most), 1);
  kernel.launch(0, 32, 0, nullptr, nullptr);
  EXPECT_THROW(kernel.launch(std::int64_t{1} << 31, 32, 0, nullptr, nullptr), Error);
}

TEST_F(Launches, PreparedAtOnceAndOneThatFails) {
  const KernelSpec fresh{kMark.source + "// of its own\n", kMark.instance}, broken{"no kernel at all\n", "nothing"};
  const KernelSpec specs[] = {broken, fresh, kRank, fresh};
  prepare_kernels(specs, 0);
  EXPECT_THROW(get_kernel(broken, 0), Error);
  const cuda::DeviceBuffer out = zeros(1);
  const Params params{static_cast<int*>(out.data()), 1, 7};
  get_kernel(fresh, 0).launch(1, 32, 4, &params, nullptr);
  EXPECT_EQ(read_back(out), std::vector<int>{7});
}

TEST_F(Launches, InClusters) {
  if (cuda::device_info(0).arch < 90) {
    GTEST_SKIP() << "clusters need sm_90";
  }
  const cuda::DeviceBuffer out = zeros(8);
  const Params params{static_cast<int*>(out.data()), 0, 0};
  get_kernel(kRank, 0).launch_clusters(8, 4, 32, 0, &params, nullptr);
  EXPECT_EQ(read_back(out), (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST_F(Launches, OlderArchitectureRunsHere) {
  setenv("FRETWORK_ARCH", "sm_80", 1);
  const Kernel& kernel = get_kernel(kMark, 0);
  unsetenv("FRETWORK_ARCH");
  EXPECT_NE(&kernel, &get_kernel(kMark, 0));
  const cuda::DeviceBuffer out = zeros(1);
  const Params params{static_cast<int*>(out.data()), 1, 5};
  kernel.launch(1, 32, 4, &params, nullptr);
  EXPECT_EQ(read_back(out), std::vector<int>{5});
}

TEST_F(Launches, UploadsLoadsAndWorkspaceWhileCapturing) {
  void* stream = nullptr;
  void* graph = nullptr;
  void* executable = nullptr;
  call("cuStreamCreate", &stream, 1u);
  EXPECT_FALSE(cuda::is_capturing(stream));
  EXPECT_FALSE(cuda::is_capturing(nullptr));
  call("cuStreamBeginCapture_v2", stream, 0);  // global: the strictest
  EXPECT_TRUE(cuda::is_capturing(stream));
  EXPECT_FALSE(cuda::is_capturing(nullptr));
  const cuda::DeviceBuffer out = zeros(4);
  KernelSpec fresh = kMark;
  fresh.source += "// " + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) + "\n";
  const Params params{static_cast<int*>(out.data()), 1, 9};
  get_kernel(fresh, 0).launch(4, 32, 4, &params, stream);
  {
    Context context = Context::cuda(0, stream);
    const Workspace space(context, 1000);
    cuda::fill_zero(space.data(), 1000, stream);
  }
  call("cuStreamEndCapture", stream, &graph);
  EXPECT_EQ(read_back(out), std::vector<int>(4, 0));
  call("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  call("cuGraphLaunch", executable, stream);
  EXPECT_EQ(read_back(out, stream), (std::vector<int>{9, 1009, 2009, 3009}));
  call("cuGraphExecDestroy", executable);
  call("cuGraphDestroy", graph);
  call("cuStreamDestroy_v2", stream);
}

TEST_F(Launches, StartEarlyInGraphsToo) {
  int version = 0;
  call("cuDriverGetVersion", &version);
  if (cuda::device_info(0).arch < 90 || version < 12030) {
    GTEST_SKIP() << "sm_90 and CUDA 12.3 are needed";
  }
  void* stream = nullptr;
  void* graph = nullptr;
  void* executable = nullptr;
  call("cuStreamCreate", &stream, 1u);
  const cuda::DeviceBuffer out = zeros(8);
  const Params params{static_cast<int*>(out.data()), 4, 10};
  const Kernel &early = get_kernel(kEarly, 0), &late = get_kernel(kLate, 0);
  call("cuStreamBeginCapture_v2", stream, 0);
  early.launch(4, 1, 0, &params, stream);
  late.launch_behind(4, 1, 0, &params, stream);
  call("cuStreamEndCapture", stream, &graph);
  struct Edge {
    unsigned char from_port, to_port, type, rest[5];
  } edge{};
  void *from = nullptr, *to = nullptr;
  std::size_t edges = 1;
  call("cuGraphGetEdges_v2", graph, &from, &to, &edge, &edges);
  EXPECT_EQ(edges, 1u);
  EXPECT_EQ(edge.type, 1);  // CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
  call("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  for (int n = 1; n <= 20; ++n) {
    call("cuGraphLaunch", executable, stream);
    EXPECT_EQ(read_back(out, stream)[7], 10 * n + 1);
  }
  call("cuGraphExecDestroy", executable);
  call("cuGraphDestroy", graph);
  call("cuStreamDestroy_v2", stream);
}

TEST_F(Launches, AreTimed) {
  const Kernel& kernel = get_kernel(kMark, 0);
  const cuda::DeviceBuffer out = zeros(1);
  const Params params{static_cast<int*>(out.data()), 1, 5};
  cuda::Timer timer;
  timer.start(nullptr);
  const cuda::DeviceScope scope(0);
  kernel.launch(1, 32, 4, &params, nullptr);
  EXPECT_GT(timer.stop(nullptr), 0.0f);
}

}  // namespace
}  // namespace fretwork
