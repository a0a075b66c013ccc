// The kernels that ops can ask for compile without a GPU: one in six of each family, for one of the two classes, one in
// 18 of those of sm_75, and with FRETWORK_ALL_KERNELS every one for all; and the sources are embedded whole.
#include "runtime/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "fretwork/error.h"
#include "runtime/nvrtc.h"

namespace fretwork {
namespace {

/// A few registers saved around a rare path are no harm; spills in a loop are. Attention's gradients with options have
/// none left, neither those who multiply nor the thread that fetches: they save more around items, and the one with a
/// bias 14 of 1024 instructions in its loop. The gradient of a bias in fp32 saves some between heads.
constexpr int kMostSpillBytes = 32, kMostScoredSpillBytes = 112;

/// What is wrong with a kernel, or nothing. C7510, C7512, C7513, C7515 and others mean that ptxas serialised wgmma.
std::string complaint(const ListedKernel& listed, const std::string& arch) {
  try {
    const KernelReport report = compile_kernel(listed.spec, arch).report;
    std::string wrong;
    if (report.registers == 0) {
      wrong += " has no report";
    }
    const std::string& name = listed.spec.instance;
    const bool scored = name.find("::scored_backward") != name.npos || name.find("::bias_gradient<") != name.npos;
    if (report.spill_bytes > (scored ? kMostScoredSpillBytes : kMostSpillBytes)) {
      wrong += " spills " + std::to_string(report.spill_bytes) + " bytes";
    }
    if (report.log.find("are serialized") != report.log.npos) {
      wrong += " has products that wait for each other";
    }
    return wrong.empty() ? "" : listed.op + ": " + listed.spec.instance + wrong;
  } catch (const Error& error) {
    return error.what();
  }
}

/// What is compiled for an architecture. Most kernels come for both architectures, and for f16 and bf16, which differ
/// in two instructions: of a kernel's variants one is compiled, spread evenly over them. And many differ in a number
/// (a width, a depth, a count): of those every sixth, spread alike. With FRETWORK_ALL_KERNELS every one is.
std::vector<ListedKernel> chosen_kernels(const std::string& arch) {
  std::vector<ListedKernel> chosen = all_kernels(arch);
  if (std::getenv("FRETWORK_ALL_KERNELS") != nullptr) {
    return chosen;
  }
  const auto name = [](const KernelSpec& spec) {
    const std::string f16 = device_type(DType::f16), bf16 = device_type(DType::bf16);
    std::string text = spec.source + " " + spec.instance;
    if (text.find(f16) == text.npos) {
      for (std::size_t at = text.find(bf16); at != text.npos; at = text.find(bf16)) {
        text.replace(at, bf16.size(), f16);
      }
    }
    return text;
  };
  std::map<std::string, std::vector<std::pair<std::string, std::string>>> variants;
  const std::vector<const char*> classes =
      arch == "sm_75" ? std::vector{"sm_75"} : std::vector{"sm_80", "sm_90a"};  // older ones are compiled otherwise
  for (const char* each : classes) {
    for (const ListedKernel& listed : all_kernels(each)) {
      variants[name(listed.spec)].emplace_back(each, listed.spec.instance);
    }
  }
  const std::size_t share = arch == "sm_75" ? 18 : 6;
  std::map<std::string, std::size_t> family;  // without numbers: how many came before
  std::map<std::string, bool> left_out;
  for (const auto& [kernel, of_it] : variants) {
    std::string words = kernel;
    std::erase_if(words, [](char c) { return c >= '0' && c <= '9'; });
    left_out[kernel] = family[words]++ % share != 0;
  }
  std::erase_if(chosen, [&](const ListedKernel& listed) {
    const std::string kernel = name(listed.spec);
    const auto& of_it = variants[kernel];
    return left_out[kernel] ||
           of_it[std::hash<std::string>{}(kernel) % of_it.size()] != std::pair(arch, listed.spec.instance);
  });
  return chosen;
}

class AllKernels : public testing::TestWithParam<const char*> {};

TEST_P(AllKernels, CompileCleanly) {
  if (nvrtc::library().path.empty()) {
    ASSERT_EQ(std::getenv("FRETWORK_NEEDS_NVRTC"), nullptr) << "NVRTC is needed here: " << nvrtc::library().reason;
    GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
  }
  const std::vector<ListedKernel> all = chosen_kernels(GetParam());
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

INSTANTIATE_TEST_SUITE_P(Architectures, AllKernels, testing::Values("sm_75", "sm_80", "sm_90a"),
                         [](const auto& arch) { return std::string(arch.param); });

TEST(ListedKernels, HaveSources) {
  std::set<std::string> sources;
  for (const EmbeddedSource& source : embedded_sources()) {
    sources.insert(std::string(source.name));
  }
  for (const char* arch : {"sm_75", "sm_80", "sm_90a"}) {
    for (const ListedKernel& listed : all_kernels(arch)) {
      EXPECT_TRUE(sources.contains(listed.spec.source)) << listed.op << ": " << listed.spec.source;
    }
  }
}

/// There 2:4 products multiply fp8 as it is; elsewhere as f16, or by wgmma.
TEST(ListedKernels, HaveSparseFp8WhereItIsAnInstruction) {
  for (const auto& [arch, count] : {std::pair{"sm_80", 0}, {"sm_89", 2}, {"sm_90a", 0}, {"sm_100", 0}, {"sm_120", 2}}) {
    int found = 0;
    for (const ListedKernel& listed : all_kernels(arch)) {
      if (listed.spec.instance.find("portable::product<fretwork::f8_") != std::string::npos) {
        ++found;
        if (std::string(arch) == "sm_89" && !nvrtc::library().path.empty()) {
          EXPECT_EQ(complaint(listed, arch), "");
        }
      }
    }
    EXPECT_EQ(found, count) << arch;
  }
}

TEST(ListedKernels, SayWhatSharedMemoryTheyAskFor) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    std::map<std::string, bool> asks;  // by source
    for (const ListedKernel& listed : all_kernels(arch)) {
      asks[listed.spec.source] |= listed.spec.dynamic_shared != 0;
    }
    for (const EmbeddedSource& source : embedded_sources()) {
      const bool dynamic = std::string(source.text).find("extern __shared__") != std::string::npos;
      EXPECT_TRUE(!dynamic || !asks.contains(source.name) || asks[source.name])
          << source.name << " has dynamic shared memory, and no KernelSpec of it says how much";
    }
  }
}

TEST(ListedKernels, FitTheSharedMemoryOfTuring) {
  int count = 0;
  for (const ListedKernel& listed : all_kernels("sm_75")) {
    EXPECT_LE(listed.spec.dynamic_shared, 64 * 1024) << listed.spec.instance;
    ++count;
  }
  EXPECT_GT(count, 0);
}

TEST(Compile, SaysWhatAnOldGpuLacks) {
  const auto said = [](const KernelSpec& spec, const char* arch) {
    try {
      compile_kernel(spec, arch);
      return std::string("nothing");
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  const KernelSpec tiny{"__global__ void k() {}\n", "k"};
  EXPECT_EQ(said(tiny, "sm_70"),
            "cuda: device: expected a GPU from sm_75 on (NVRTC 13 compiles for no older one), got sm_70");
  if (nvrtc::library().path.empty()) {
    GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
  }
  EXPECT_EQ(said(tiny, "sm_75"), "nothing");
  const KernelSpec copies{"__global__ void k() { asm volatile(\"cp.async.commit_group;\"); }\n", "k"};
  EXPECT_EQ(said(copies, "sm_75")
                .find("compile_kernel: k: expected a GPU from sm_80 on, whose tensor cores or copies it "
                      "needs, got sm_75"),
            0u);
}

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
