// Every kernel that an op can ask for compiles, without a GPU, for both classes; and the sources are embedded whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "fretwork/error.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"

namespace fretwork {
namespace {

/// A few registers saved around a rare path are no harm; spills in a loop are.
constexpr int kMostSpillBytes = 32;

/// What is wrong with a kernel, or nothing. C7510, C7512 and C7513 mean that ptxas serialised wgmma.
std::string complaint(const ListedKernel& listed, const std::string& arch) {
  try {
    const KernelReport report = compile_kernel(listed.spec, arch).report;
    std::string wrong;
    if (report.registers == 0) {
      wrong += " has no report";
    }
    if (report.spill_bytes > kMostSpillBytes) {
      wrong += " spills " + std::to_string(report.spill_bytes) + " bytes";
    }
    for (const char* code : {"C7510", "C7512", "C7513"}) {
      if (report.log.find(code) != report.log.npos) {
        wrong += std::string(" has warning ") + code;
      }
    }
    return wrong.empty() ? "" : listed.op + ": " + listed.spec.instance + wrong;
  } catch (const Error& error) {
    return error.what();
  }
}

/// Kernels for f16 and bf16 differ in two instructions. Where both architectures have both, sm_80 compiles the one for
/// f16 and sm_90a that for bf16: every instantiation once, every kernel twice.
std::vector<ListedKernel> without_twins(const std::string& arch) {
  const bool sm_80 = arch == "sm_80";
  const std::string own = device_type(sm_80 ? DType::f16 : DType::bf16),
                    other = device_type(sm_80 ? DType::bf16 : DType::f16);
  const auto text = [](const ListedKernel& listed) { return listed.spec.source + " " + listed.spec.instance; };
  std::set<std::string> here, there;
  for (const ListedKernel& listed : all_kernels(arch)) {
    here.insert(text(listed));
  }
  for (const ListedKernel& listed : all_kernels(sm_80 ? "sm_90a" : "sm_80")) {
    there.insert(text(listed));
  }
  std::vector<ListedKernel> left = all_kernels(arch);
  std::erase_if(left, [&](const ListedKernel& listed) {
    std::string twin = text(listed);
    for (std::size_t at = twin.find(other); at != twin.npos; at = twin.find(other)) {
      twin.replace(at, other.size(), own);
    }
    return twin != text(listed) && here.contains(twin) && there.contains(text(listed));
  });
  return left;
}

class AllKernels : public testing::TestWithParam<const char*> {};

TEST_P(AllKernels, CompileCleanly) {
  if (nvrtc::library().path.empty()) {
    ASSERT_EQ(std::getenv("FRETWORK_NEEDS_NVRTC"), nullptr) << "NVRTC is needed here: " << nvrtc::library().reason;
    GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
  }
  const std::vector<ListedKernel> all = without_twins(GetParam());
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::vector<std::string> wrong;
  const auto work = [&] {
    for (std::size_t n = next++; n < all.size(); n = next++) {
      if (const std::string what = complaint(all[n], GetParam()); !what.empty()) {
        const std::lock_guard lock(mutex);
        wrong.push_back(what);
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back(work);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& what : wrong) {
    ADD_FAILURE() << what;
  }
  std::printf("%zu kernels for %s\n", all.size(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Architectures, AllKernels, testing::Values("sm_80", "sm_90a"),
                         [](const auto& arch) { return std::string(arch.param); });

TEST(EmbeddedSources, AreTheFiles) {
  EXPECT_FALSE(embedded_sources().empty());
  for (const EmbeddedSource& source : embedded_sources()) {
    std::ifstream file(std::string(FRETWORK_SOURCE_DIR "/src/") + source.name, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(text, source.text) << source.name;
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(FRETWORK_SOURCE_DIR "/src")) {
    const std::string name = std::filesystem::relative(entry.path(), FRETWORK_SOURCE_DIR "/src").string();
    const auto& all = embedded_sources();
    EXPECT_TRUE(entry.path().extension() != ".cuh" ||
                std::any_of(all.begin(), all.end(), [&](const auto& source) { return source.name == name; }))
        << name << " is not embedded";
  }
}

}  // namespace
}  // namespace fretwork
