// Kernels from NVRTC and the folder they are kept in: races, crashes, damage, strangers, limits.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "fretwork/error.h"
#include "runtime/disk_cache.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"

namespace fretwork {
namespace {

namespace fs = std::filesystem;

/// A kernel that no op has; `n` makes different ones.
KernelSpec tiny(int n) {
  return {
      "#include \"device/types.cuh\"\n"
      "namespace fretwork {\n"
      "template <int N> __global__ void tiny(const __grid_constant__ u64 p) {\n"
      "  __shared__ int x[N];\n"
      "  x[threadIdx.x] = N;\n"
      "  __syncthreads();\n"
      "  reinterpret_cast<int*>(p)[threadIdx.x] = x[N - 1 - threadIdx.x];\n"
      "}\n"
      "}\n",
      "fretwork::tiny<" + std::to_string(n) + ">"};
}

/// What store and load need no compiler for.
CompiledKernel fake(std::size_t bytes, char fill = 'c') {
  CompiledKernel kernel;
  kernel.cubin = std::string(bytes, fill);
  kernel.symbol = "symbol";
  kernel.report.registers = 12;
  kernel.report.spill_bytes = 3;
  kernel.report.compile_ms = 1.5;
  kernel.report.log = "log";
  return kernel;
}

/// A fresh folder, and no setting from outside.
class Cache : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "fretwork-cache-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    use(root_ / "cache");
    unsetenv("FRETWORK_CACHE_LIMIT");
  }
  void TearDown() override { fs::remove_all(root_); }

  static void use(const fs::path& folder) { setenv("FRETWORK_CACHE_DIR", folder.c_str(), 1); }

  fs::path folder() const { return root_ / "cache"; }
  /// Those with the name of a kernel; all others are unfinished or foreign.
  std::vector<fs::path> files(bool kernels = true) const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(folder())) {
      if ((entry.path().extension() == ".kernel") == kernels) {
        all.push_back(entry.path());
      }
    }
    return all;
  }
  fs::path only_file() const { return files().at(0); }

  fs::path root_;
};

class Compiler : public Cache {
 protected:
  void SetUp() override {
    Cache::SetUp();
    if (nvrtc::library().path.empty()) {
      GTEST_SKIP() << "no NVRTC: " << nvrtc::library().reason;
    }
  }
};

template <typename Body>
std::string stderr_of(const Body& body) {
  testing::internal::CaptureStderr();
  body();
  return testing::internal::GetCapturedStderr();
}

std::int64_t lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// Runs this program again as `--child what argument`.
pid_t start_child(const std::string& what, const std::string& argument) {
  const pid_t pid = fork();
  if (pid == 0) {
    // The parent looks for leaks; at a child's end NVRTC's threads may still be going, which that search does not bear.
    setenv("LSAN_OPTIONS", "detect_leaks=0", 1);
    execl("/proc/self/exe", "runtime_cache_test", "--child", what.c_str(), argument.c_str(), nullptr);
    _exit(127);
  }
  return pid;
}

int wait_for(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(Cache, KeepsWhatIsStored) {
  EXPECT_FALSE(disk_cache::load("key"));
  disk_cache::store("key", fake(1000));
  const auto kernel = disk_cache::load("key");
  ASSERT_TRUE(kernel);
  EXPECT_TRUE(kernel->from_disk);
  EXPECT_EQ(kernel->cubin, std::string(1000, 'c'));
  EXPECT_EQ(kernel->symbol, "symbol");
  EXPECT_EQ(kernel->report.registers, 12);
  EXPECT_EQ(kernel->report.spill_bytes, 3);
  EXPECT_EQ(kernel->report.compile_ms, 1.5);
  EXPECT_EQ(kernel->report.log, "log");
  EXPECT_FALSE(disk_cache::load("another key"));
  struct stat status {};
  ASSERT_EQ(stat(folder().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(only_file().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(Cache, StateAndClear) {
  for (const char* key : {"a", "b", "c"}) {
    disk_cache::store(key, fake(1000));
  }
  write_file(folder() / "notes.txt", "not ours");
  write_file(folder() / ".writing-1-1-1", "unfinished");
  // A file's clock may be ahead of the process's.
  fs::last_write_time(folder() / ".writing-1-1-1", fs::file_time_type::clock::now() + std::chrono::seconds(5));
  const disk_cache::State state = disk_cache::state();
  EXPECT_EQ(state.folder, folder());
  EXPECT_EQ(state.files, 3);
  EXPECT_GT(state.bytes, 3000u);
  EXPECT_EQ(state.limit, 512u << 20);
  EXPECT_EQ(disk_cache::clear(), 3);
  EXPECT_EQ(disk_cache::state().files, 0);
  EXPECT_EQ(files(false), std::vector{folder() / "notes.txt"});
  EXPECT_EQ(disk_cache::clear(), 0);
}

TEST_F(Cache, FollowsTheEnvironment) {
  unsetenv("FRETWORK_CACHE_DIR");
  const char* const home = std::getenv("HOME");
  const std::string home_before = home != nullptr ? home : "";
  const char* const xdg = std::getenv("XDG_CACHE_HOME");
  const std::string xdg_before = xdg != nullptr ? xdg : "";
  setenv("XDG_CACHE_HOME", (root_ / "xdg").c_str(), 1);
  setenv("HOME", (root_ / "home").c_str(), 1);
  EXPECT_EQ(disk_cache::state().folder, root_ / "xdg/fretwork");
  unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(disk_cache::state().folder, root_ / "home/.cache/fretwork");
  unsetenv("HOME");
  EXPECT_EQ(disk_cache::state().folder, "");
  disk_cache::store("key", fake(10));
  EXPECT_FALSE(disk_cache::load("key"));
  setenv("HOME", home_before.c_str(), home_before.empty() ? 0 : 1);
  setenv("XDG_CACHE_HOME", xdg_before.c_str(), 1);
}

TEST_F(Cache, DamagedFilesAreMissing) {
  disk_cache::store("key", fake(300));
  const fs::path path = only_file();
  const std::string good = read_file(path);
  std::mt19937 random(1);
  std::vector<std::string> bad = {"", "x", std::string(good.size(), '\0'), good + "more", "#!/bin/sh\n" + good};
  for (std::size_t at = 0; at < good.size(); at += 1 + random() % 3) {  // a bit anywhere, a cut anywhere
    bad.push_back(good);
    bad.back()[at] = static_cast<char>(bad.back()[at] ^ (1 << random() % 8));
    bad.push_back(good.substr(0, at));
  }
  testing::internal::CaptureStderr();
  for (const std::string& bytes : bad) {
    write_file(path, bytes);
    EXPECT_FALSE(disk_cache::load("key")) << bytes.size();
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said, "fretwork: kernel cache: " + path.string() + " is broken; compiling it anew\n");
  disk_cache::store("key", fake(300));
  EXPECT_TRUE(disk_cache::load("key"));
}

TEST_F(Cache, AFileOfAnotherKeyIsMissing) {
  disk_cache::store("key", fake(300));
  const fs::path mine = only_file();
  const std::string bytes = read_file(mine);
  disk_cache::clear();
  disk_cache::store("other", fake(300));
  write_file(only_file(), bytes);
  stderr_of([&] { EXPECT_FALSE(disk_cache::load("other")); });
}

TEST_F(Cache, WritableByOthersIsRefused) {
  disk_cache::store("key", fake(10));
  for (const mode_t mode : {0620, 0602, 0666}) {
    ASSERT_EQ(chmod(only_file().c_str(), mode), 0);
    stderr_of([&] { EXPECT_FALSE(disk_cache::load("key")); });
  }
  stderr_of([&] { disk_cache::store("key", fake(10)); });
  EXPECT_TRUE(disk_cache::load("key"));
  ASSERT_EQ(chmod(folder().c_str(), 0770), 0);
  const std::string said = stderr_of([&] {
    EXPECT_FALSE(disk_cache::load("key"));
    disk_cache::store("key", fake(10));
    EXPECT_EQ(disk_cache::state().folder, "");
    EXPECT_EQ(disk_cache::clear(), 0);
  });
  EXPECT_EQ(lines(said), 1) << said;
}

TEST_F(Cache, LinksAndFoldersAreNotFollowed) {
  disk_cache::store("key", fake(10));
  const fs::path path = only_file();
  fs::rename(path, root_ / "elsewhere");
  fs::create_symlink(root_ / "elsewhere", path);
  stderr_of([&] { EXPECT_FALSE(disk_cache::load("key")); });
  disk_cache::store("key", fake(10));
  EXPECT_TRUE(disk_cache::load("key"));
  EXPECT_FALSE(fs::is_symlink(path));
  fs::remove(path);
  fs::create_directory(path);
  const std::string said = stderr_of([&] {
    EXPECT_FALSE(disk_cache::load("key"));
    disk_cache::store("key", fake(10));
  });
  EXPECT_EQ(lines(said), 2) << said;
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  stderr_of([&] { EXPECT_FALSE(disk_cache::load("key")); });
}

TEST_F(Cache, OfAnotherUserIsRefused) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can give files away";
  }
  constexpr uid_t kStranger = 12345;
  disk_cache::store("key", fake(10));
  ASSERT_EQ(chown(only_file().c_str(), kStranger, 0), 0);
  EXPECT_NE(stderr_of([&] { EXPECT_FALSE(disk_cache::load("key")); }), "");
  disk_cache::store("key", fake(10));
  EXPECT_TRUE(disk_cache::load("key"));
  ASSERT_EQ(chown(folder().c_str(), kStranger, 0), 0);
  EXPECT_NE(stderr_of([&] { EXPECT_FALSE(disk_cache::load("key")); }), "");
}

TEST_F(Cache, UnusablePlacesWarnOnce) {
  write_file(root_ / "file", "");
  use(root_ / "file" / "cache");
  const std::string said = stderr_of([&] {
    for (int n = 0; n < 3; ++n) {
      disk_cache::store("key", fake(10));
      EXPECT_FALSE(disk_cache::load("key"));
    }
  });
  EXPECT_EQ(lines(said), 1) << said;
}

TEST_F(Cache, ReadOnlyFolderStillReads) {
  constexpr uid_t kNobody = 65534;
  disk_cache::store("old", fake(10));
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
    ASSERT_EQ(chown(folder().c_str(), kNobody, 0), 0);
    ASSERT_EQ(chown(only_file().c_str(), kNobody, 0), 0);
  }
  ASSERT_EQ(chmod(folder().c_str(), 0500), 0);
  if (root) {
    ASSERT_EQ(seteuid(kNobody), 0);
  }
  const std::string said = stderr_of([&] {
    disk_cache::store("new", fake(10));
    disk_cache::store("newer", fake(10));
    EXPECT_FALSE(disk_cache::load("new"));
    EXPECT_TRUE(disk_cache::load("old"));
  });
  if (root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  chmod(folder().c_str(), 0700);
  EXPECT_EQ(lines(said), 1) << said;
}

TEST_F(Cache, AFullDiskOnlyCostsTheCache) {
  disk_cache::store("small", fake(10));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 4096;
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  disk_cache::store("large", fake(100000));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(disk_cache::load("large"));
  EXPECT_TRUE(disk_cache::load("small"));
  EXPECT_TRUE(files(false).empty());
}

TEST_F(Cache, LeastRecentlyUsedGoesFirst) {
  setenv("FRETWORK_CACHE_LIMIT", "1", 1);
  const auto age = [&](int hours) {  // of every file so far
    for (const fs::path& path : files()) {
      fs::last_write_time(path, fs::last_write_time(path) - std::chrono::hours(hours));
    }
  };
  for (const char* key : {"a", "b", "c"}) {
    disk_cache::store(key, fake(300 << 10));
    age(1);
  }
  EXPECT_TRUE(disk_cache::load("a"));  // b is the oldest now
  disk_cache::store("d", fake(300 << 10));
  EXPECT_TRUE(disk_cache::load("a"));
  EXPECT_FALSE(disk_cache::load("b"));
  EXPECT_TRUE(disk_cache::load("c"));
  EXPECT_TRUE(disk_cache::load("d"));
  EXPECT_LE(disk_cache::state().bytes, 1u << 20);
  setenv("FRETWORK_CACHE_LIMIT", "0", 1);
  disk_cache::store("e", fake(10));
  EXPECT_EQ(disk_cache::state().files, 0);
  setenv("FRETWORK_CACHE_LIMIT", "plenty", 1);
  EXPECT_EQ(stderr_of([&] { EXPECT_EQ(disk_cache::state().limit, 512u << 20); }),
            "fretwork: kernel cache: FRETWORK_CACHE_LIMIT: expected a number of MiB, got 'plenty'; using 512\n");
}

TEST_F(Cache, StaleTemporariesAreRemoved) {
  disk_cache::store("a", fake(10));
  const fs::path stale = folder() / ".writing-1-2-3", fresh = folder() / ".writing-4-5-6";
  write_file(stale, "left by a crash");
  write_file(fresh, "being written");
  fs::last_write_time(stale, fs::last_write_time(stale) - std::chrono::hours(1));
  disk_cache::store("b", fake(10));
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::exists(fresh));
}

TEST_F(Cache, SurvivesKilledWriters) {
  std::mt19937 random(3);
  disk_cache::state();  // makes the folder
  for (int round = 0; round < 20; ++round) {
    const std::size_t before = files(false).size();
    const pid_t child = start_child("write", "0");
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (files(false).size() == before && std::chrono::steady_clock::now() < patience) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000 * (round % 2)));
    kill(child, SIGKILL);
    EXPECT_EQ(wait_for(child), 128 + SIGKILL);
    const std::string said = stderr_of([&] {
      const auto kernel = disk_cache::load("shared");
      EXPECT_TRUE(!kernel || kernel->cubin.size() == std::size_t{1} << 20);
    });
    EXPECT_EQ(said, "");
  }
  EXPECT_FALSE(files(false).empty()) << "no child was caught in the middle of a write";
  disk_cache::store("shared", fake(std::size_t{1} << 20));
  EXPECT_TRUE(disk_cache::load("shared"));
  EXPECT_EQ(disk_cache::clear(), 1);
  EXPECT_TRUE(files(false).empty());
}

TEST_F(Cache, ProcessesShareAFolder) {
  setenv("FRETWORK_CACHE_LIMIT", "3", 1);  // so that they also remove what others use
  std::vector<pid_t> children;
  for (int n = 0; n < 4; ++n) {
    children.push_back(start_child("share", std::to_string(n)));
  }
  for (const pid_t child : children) {
    EXPECT_EQ(wait_for(child), 0);
  }
  EXPECT_TRUE(files(false).empty());
  EXPECT_LE(disk_cache::state().bytes, 3u << 20);
}

TEST_F(Compiler, MemoryThenDisk) {
  const CompiledKernel fresh = compile_kernel(tiny(32), "sm_90a");
  EXPECT_FALSE(fresh.from_disk);
  EXPECT_GT(fresh.cubin.size(), 100u);
  EXPECT_NE(fresh.symbol.find("tiny"), std::string::npos);
  EXPECT_GT(fresh.report.registers, 0);
  EXPECT_EQ(fresh.report.static_shared_bytes, 128);
  EXPECT_EQ(fresh.report.spill_bytes, 0);
  EXPECT_GT(fresh.report.compile_ms, 0);
  const CompiledKernel again = compile_kernel(tiny(32), "sm_90a");
  EXPECT_TRUE(again.from_disk);
  EXPECT_EQ(again.cubin, fresh.cubin);
  EXPECT_EQ(again.symbol, fresh.symbol);
  EXPECT_EQ(again.report.registers, fresh.report.registers);
  EXPECT_EQ(again.report.static_shared_bytes, 128);
  EXPECT_EQ(again.report.log, fresh.report.log);
  EXPECT_FALSE(compile_kernel(tiny(32), "sm_80").from_disk);
  EXPECT_FALSE(compile_kernel(tiny(64), "sm_90a").from_disk);
  EXPECT_EQ(files().size(), 3u);
}

TEST_F(Compiler, ReportsSpillsOfTheRightKernel) {
  const KernelSpec spilling{
      "__global__ void other(int* p) { __shared__ int x[7]; x[threadIdx.x] = 1; __syncthreads(); *p = x[*p]; }\n"
      "template <int N> __launch_bounds__(1024) __global__ void wide(float* p) {\n"
      "  float x[N];\n"
      "#pragma unroll\n"
      "  for (int n = 0; n < N; ++n) x[n] = p[n * 1024 + threadIdx.x];\n"
      "  __syncthreads();\n"
      "#pragma unroll\n"
      "  for (int n = 0; n < N; ++n) p[(N - 1 - n) * 1024 + threadIdx.x] = x[n] * x[(n * 7) % N];\n"
      "}\n",
      "wide<160>"};
  const KernelReport report = compile_kernel(spilling, "sm_80").report;
  EXPECT_GT(report.registers, 32);
  EXPECT_GT(report.spill_bytes, 0) << report.log;
  EXPECT_GT(report.stack_bytes, 0);
  EXPECT_EQ(report.static_shared_bytes, 0);
}

TEST_F(Compiler, KeepsWarnings) {
  const KernelSpec spec{"#warning look here\n__global__ void k(int* p) { *p = 1; }\n", "k"};
  EXPECT_NE(compile_kernel(spec, "sm_80").report.log.find("look here"), std::string::npos);
  EXPECT_NE(compile_kernel(spec, "sm_80").report.log.find("look here"), std::string::npos);
}

TEST_F(Compiler, ErrorsShowNameOptionsAndLog) {
  try {
    compile_kernel({"template <int N> __global__ void k(int* p) { *p = missing; }\n", "k<3>"}, "sm_80");
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_TRUE(text.starts_with("compile_kernel: k<3>: expected a kernel that compiles with ")) << text;
    EXPECT_NE(text.find("--gpu-architecture=sm_80"), text.npos) << text;
    EXPECT_NE(text.find("identifier \"missing\" is undefined"), text.npos) << text;
  }
  EXPECT_THROW(compile_kernel(tiny(32), "sm_7"), Error);
  try {
    compile_kernel({"device/absent.cuh", "k"}, "sm_80");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "compile_kernel: source: expected an embedded device source, got 'device/absent.cuh'");
  }
}

TEST_F(Compiler, DamageIsCompiledAnew) {
  compile_kernel(tiny(32), "sm_80");
  fs::resize_file(only_file(), 100);
  const std::string said = stderr_of([&] { EXPECT_FALSE(compile_kernel(tiny(32), "sm_80").from_disk); });
  EXPECT_EQ(lines(said), 1) << said;
  EXPECT_TRUE(compile_kernel(tiny(32), "sm_80").from_disk);
}

TEST_F(Compiler, NeedsNoFolder) {
  write_file(root_ / "file", "");
  use(root_ / "file" / "cache");
  const std::string said = stderr_of([&] {
    EXPECT_FALSE(compile_kernel(tiny(32), "sm_80").from_disk);
    EXPECT_FALSE(compile_kernel(tiny(32), "sm_80").from_disk);
  });
  EXPECT_EQ(lines(said), 1) << said;
}

TEST_F(Compiler, ThreadsCompileOnce) {
  constexpr int kThreads = 8;
  std::barrier start(kThreads);
  std::vector<CompiledKernel> kernels(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      kernels[static_cast<std::size_t>(t)] = compile_kernel(tiny(96 + t % 2), "sm_90a");
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int t = 2; t < kThreads; ++t) {  // one compilation has one duration, from memory or from disk
    EXPECT_EQ(kernels[static_cast<std::size_t>(t)].report.compile_ms,
              kernels[static_cast<std::size_t>(t % 2)].report.compile_ms);
  }
  EXPECT_EQ(files().size(), 2u);
}

TEST_F(Compiler, ProcessesCompileTheSameKernel) {
  std::vector<pid_t> children;
  for (int n = 0; n < 4; ++n) {
    children.push_back(start_child("compile", std::to_string(n)));
  }
  for (const pid_t child : children) {
    EXPECT_EQ(wait_for(child), 0);
  }
  EXPECT_EQ(files().size(), 1u);
  EXPECT_TRUE(files(false).empty());
  EXPECT_TRUE(compile_kernel(tiny(48), "sm_80").from_disk);
}

TEST_F(Compiler, SaysWhatItIs) {
  EXPECT_TRUE(fs::exists(nvrtc::library().path));
  EXPECT_FALSE(nvrtc::library().build.empty());
  EXPECT_GE(std::stoi(nvrtc::version()), 12);
}

std::vector<KernelSpec> list_tiny(const std::string& arch) {
  return arch == "sm_80" ? std::vector{tiny(1), tiny(2)} : std::vector{tiny(1)};
}
const KernelList kTiny{"test", &list_tiny};

TEST(Kernels, AreListed) {
  const auto count = [](const std::string& arch) {
    const auto all = all_kernels(arch);
    return std::count_if(all.begin(), all.end(), [](const ListedKernel& k) { return k.op == "test"; });
  };
  EXPECT_EQ(count("sm_80"), 2);
  EXPECT_EQ(count("sm_90a"), 1);
}

TEST(Kernels, NeedADevice) {
  if (cuda::available()) {
    GTEST_SKIP() << "there is a GPU";
  }
  EXPECT_FALSE(cuda::unavailable_reason().empty());
  EXPECT_EQ(cuda::device_count(), 0);
  EXPECT_THROW(get_kernel(tiny(1), 0), Error);
  const std::vector<KernelSpec> several(8, tiny(1));
  for (int round = 0; round < 100; ++round) {  // threads that fail at once must not wait for one another
    EXPECT_NO_THROW(prepare_kernels(several, 0));
  }
  EXPECT_THROW(Context::cuda(0), Error);
  try {
    const cuda::DeviceScope scope(0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("cuda: device: expected an NVIDIA GPU and its driver, got "));
  }
}

/// What a second process does; its exit code.
int child(const std::string& what, int number) {
  if (what == "write") {  // until killed
    for (;;) {
      disk_cache::store("shared", fake(std::size_t{1} << 20));
    }
  }
  if (what == "compile") {
    return compile_kernel(tiny(48), "sm_80").cubin.empty() ? 1 : 0;
  }
  if (what == "share") {
    std::mt19937 random(static_cast<unsigned>(number));
    for (int n = 0; n < 60; ++n) {
      const unsigned which = static_cast<unsigned>(random() % 5);
      const auto kernel = disk_cache::load("key " + std::to_string(which));
      if (kernel && (kernel->cubin.size() != 900000 + which || kernel->cubin.back() != static_cast<char>(which))) {
        return 1;
      }
      if (!kernel || random() % 4 == 0) {
        disk_cache::store("key " + std::to_string(which), fake(900000 + which, static_cast<char>(which)));
      }
      if (random() % 20 == 0) {
        disk_cache::clear();
      }
    }
    return 0;
  }
  return 2;
}

}  // namespace
}  // namespace fretwork

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--child") {
    return fretwork::child(argv[2], std::stoi(argv[3]));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
