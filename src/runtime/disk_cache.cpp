// The folder of compiled kernels: who may write it, the form of a file, removal of old ones.
//
// A file is: magic, 16 bytes of checksum over all that follows, then fields of 8 bytes of length and the bytes: key,
// symbol, numbers of the report, log, cubin. It appears under its name by rename only, so readers see a whole file or
// none; the checksum is for disks and crashes, the owner and mode checks for other users.
#include "runtime/disk_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#include "core/hash.h"
#include "core/warn.h"

namespace fretwork::disk_cache {
namespace {

constexpr std::string_view kMagic = "fretwork kernel 1\n";
constexpr std::string_view kSuffix = ".kernel";
constexpr std::string_view kTemporary = ".writing-";
constexpr std::size_t kDigits = 32;
constexpr std::int64_t kStaleSeconds = 600;  // a write takes milliseconds
constexpr off_t kLargestFile = off_t{1} << 30;

void warn(const std::string& line) { warn_once("kernel cache: " + line); }

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
  }
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&&) = delete;
  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::filesystem::path folder_path() {
  if (const std::string set = setting("FRETWORK_CACHE_DIR"); !set.empty()) {
    return set;
  }
  if (const std::string set = setting("XDG_CACHE_HOME"); set.starts_with('/')) {
    return std::filesystem::path(set) / "fretwork";
  }
  if (const std::string home = setting("HOME"); !home.empty()) {
    return std::filesystem::path(home) / ".cache" / "fretwork";
  }
  return {};
}

std::uint64_t limit_bytes() {
  constexpr std::uint64_t kDefaultMiB = 512;
  const std::string set = setting("FRETWORK_CACHE_LIMIT");
  std::uint64_t mebibytes = kDefaultMiB;
  if (!set.empty()) {
    const auto [stop, error] = std::from_chars(set.data(), set.data() + set.size(), mebibytes);
    if (error != std::errc{} || stop != set.data() + set.size() || mebibytes > (std::uint64_t{1} << 40)) {
      warn("FRETWORK_CACHE_LIMIT: expected a number of MiB, got '" + set + "'; using 512");
      mebibytes = kDefaultMiB;
    }
  }
  return mebibytes << 20;
}

/// Nobody else can have written it.
bool ours_alone(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// The folder, made when `create`; nothing when there is none or it cannot be trusted.
File open_folder(bool create) {
  const std::filesystem::path path = folder_path();
  if (path.empty()) {
    return File(-1);
  }
  if (create) {
    std::error_code ignored;
    std::filesystem::create_directories(path.parent_path(), ignored);
    mkdir(path.c_str(), S_IRWXU);
  }
  File folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) {
    if (create || errno != ENOENT) {
      warn(path.string() + ": " + std::strerror(errno) + "; compiled kernels are not kept");
    }
    return File(-1);
  }
  struct stat status {};
  if (fstat(folder.get(), &status) != 0 || !ours_alone(status)) {
    warn(path.string() + " belongs to or is writable by other users; not used");
    return File(-1);
  }
  return folder;
}

// The form of a file.

void put(std::string& out, std::string_view field) {
  const std::uint64_t length = field.size();
  out.append(reinterpret_cast<const char*>(&length), sizeof length);
  out.append(field);
}

template <typename Number>
void put_number(std::string& out, Number number) {
  static_assert(std::is_arithmetic_v<Number>);
  put(out, {reinterpret_cast<const char*>(&number), sizeof number});
}

/// Takes a field off the front; false when it is not all there.
bool take(std::string_view& in, std::string& field) {
  std::uint64_t length = 0;
  if (in.size() < sizeof length) {
    return false;
  }
  std::memcpy(&length, in.data(), sizeof length);
  in.remove_prefix(sizeof length);
  if (length > in.size()) {
    return false;
  }
  field = in.substr(0, length);
  in.remove_prefix(length);
  return true;
}

template <typename Number>
bool take_number(std::string_view& in, Number& number) {
  std::string field;
  if (!take(in, field) || field.size() != sizeof number) {
    return false;
  }
  std::memcpy(&number, field.data(), sizeof number);
  return true;
}

std::string checksum(std::string_view payload) {
  const Hash128 hash = hash128(payload);
  std::string bytes(sizeof hash.high + sizeof hash.low, '\0');
  std::memcpy(bytes.data(), &hash.high, sizeof hash.high);
  std::memcpy(bytes.data() + sizeof hash.high, &hash.low, sizeof hash.low);
  return bytes;
}

std::string encode(const std::string& key, const CompiledKernel& kernel) {
  std::string payload;
  put(payload, key);
  put(payload, kernel.symbol);
  const KernelReport& report = kernel.report;
  for (const int number : {report.registers, report.spill_bytes, report.stack_bytes, report.static_shared_bytes}) {
    put_number(payload, number);
  }
  put_number(payload, report.compile_ms);
  put(payload, report.log);
  put(payload, kernel.cubin);
  return std::string(kMagic) + checksum(payload) + payload;
}

std::optional<CompiledKernel> decode(std::string_view bytes, const std::string& key) {
  const std::size_t head = kMagic.size() + sizeof(Hash128);
  if (bytes.size() < head || !bytes.starts_with(kMagic)) {
    return std::nullopt;
  }
  std::string_view payload = bytes.substr(head);
  if (bytes.substr(kMagic.size(), sizeof(Hash128)) != checksum(payload)) {
    return std::nullopt;
  }
  std::string stored_key;
  CompiledKernel kernel;
  KernelReport& report = kernel.report;
  const bool whole = take(payload, stored_key) && take(payload, kernel.symbol) &&
                     take_number(payload, report.registers) && take_number(payload, report.spill_bytes) &&
                     take_number(payload, report.stack_bytes) && take_number(payload, report.static_shared_bytes) &&
                     take_number(payload, report.compile_ms) && take(payload, report.log) &&
                     take(payload, kernel.cubin) && payload.empty();
  if (!whole || stored_key != key) {
    return std::nullopt;
  }
  kernel.from_disk = true;
  return kernel;
}

std::string name_for(const std::string& key) { return hash128(key).hex() + std::string(kSuffix); }

bool is_kernel_name(std::string_view name) {
  return name.size() == kDigits + kSuffix.size() && name.ends_with(kSuffix) &&
         name.find_first_not_of("0123456789abcdef") == kDigits;
}

std::optional<std::string> read_all(int file, std::size_t bytes) {
  std::string all(bytes, '\0');
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t got = read(file, all.data() + done, bytes - done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return std::nullopt;
    }
    done += static_cast<std::size_t>(got);
  }
  return all;
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return false;
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

struct Entry {
  std::string name;
  std::uint64_t bytes;
  timespec used;
};

/// Kernels in the folder; `temporary` gets the names of unfinished writes older than `age` seconds, or of all for 0.
std::vector<Entry> list(int folder, std::int64_t age, std::vector<std::string>& temporary) {
  std::vector<Entry> kernels;
  const int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(again >= 0 ? fdopendir(again) : nullptr, &closedir);
  if (stream == nullptr) {
    return kernels;
  }
  while (const dirent* entry = readdir(stream.get())) {
    const std::string name = entry->d_name;
    struct stat status {};
    const bool unfinished = name.starts_with(kTemporary);
    if ((!unfinished && !is_kernel_name(name)) || fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        S_ISDIR(status.st_mode)) {
      continue;
    }
    if (!unfinished) {
      kernels.push_back({name, static_cast<std::uint64_t>(status.st_size), status.st_mtim});
    } else if (age == 0 || std::time(nullptr) - status.st_mtim.tv_sec >= age) {
      temporary.push_back(name);
    }
  }
  return kernels;
}

/// Removes what crashed writers left and, beyond the limit, what was used longest ago.
void tidy(int folder) {
  std::vector<std::string> stale;
  std::vector<Entry> kernels = list(folder, kStaleSeconds, stale);
  for (const std::string& name : stale) {
    unlinkat(folder, name.c_str(), 0);
  }
  std::uint64_t bytes = 0;
  for (const Entry& entry : kernels) {
    bytes += entry.bytes;
  }
  const std::uint64_t limit = limit_bytes();
  if (bytes <= limit) {
    return;
  }
  std::sort(kernels.begin(), kernels.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
  });
  for (const Entry& entry : kernels) {
    if (bytes <= limit) {
      return;
    }
    unlinkat(folder, entry.name.c_str(), 0);
    bytes -= entry.bytes;
  }
}

/// A name no other writer uses at the same time.
std::string temporary_name() {
  static std::atomic<unsigned> count = 0;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return std::string(kTemporary) + std::to_string(getpid()) + "-" + std::to_string(count++) + "-" +
         std::to_string(now.tv_nsec);
}

/// Writes the file whole under a temporary name, then gives it its own. Says in errno why not.
bool write_file(int folder, const std::string& name, std::string_view bytes) {
  const std::string temporary = temporary_name();
  const File file(openat(folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file) {
    return false;
  }
  if (write_all(file.get(), bytes) && fsync(file.get()) == 0 &&
      renameat(folder, temporary.c_str(), folder, name.c_str()) == 0) {
    return true;
  }
  const int why = errno;
  unlinkat(folder, temporary.c_str(), 0);
  errno = why;
  return false;
}

}  // namespace

std::optional<CompiledKernel> load(const std::string& key) {
  const File folder = open_folder(false);
  if (!folder) {
    return std::nullopt;
  }
  const std::string name = name_for(key);
  const auto refuse = [&](const char* why) {
    warn((folder_path() / name).string() + " " + why + "; compiling it anew");
    return std::nullopt;
  };
  const File file(openat(folder.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    return errno == ENOENT ? std::nullopt : refuse("cannot be opened");
  }
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || !ours_alone(status)) {
    return refuse("belongs to or is writable by other users");
  }
  if (status.st_size > kLargestFile) {
    return refuse("is too large");
  }
  const auto bytes = read_all(file.get(), static_cast<std::size_t>(status.st_size));
  auto kernel = bytes ? decode(*bytes, key) : std::nullopt;
  if (!kernel) {
    return refuse("is broken");
  }
  futimens(file.get(), nullptr);  // used now
  return kernel;
}

void store(const std::string& key, const CompiledKernel& kernel) {
  const File folder = open_folder(true);
  if (!folder) {
    return;
  }
  if (!write_file(folder.get(), name_for(key), encode(key, kernel)) && errno != ENOENT) {  // ENOENT: cleared meanwhile
    warn(folder_path().string() + ": " + std::strerror(errno) + "; compiled kernels are not kept");
  }
  tidy(folder.get());
}

State state() {
  State now;
  now.limit = limit_bytes();
  const File folder = open_folder(true);
  if (!folder) {
    return now;
  }
  now.folder = folder_path();
  std::vector<std::string> ignored;
  for (const Entry& entry : list(folder.get(), kStaleSeconds, ignored)) {
    ++now.files;
    now.bytes += entry.bytes;
  }
  return now;
}

std::int64_t clear() {
  const File folder = open_folder(false);
  if (!folder) {
    return 0;
  }
  std::vector<std::string> unfinished;
  std::int64_t removed = 0;
  for (const Entry& entry : list(folder.get(), 0, unfinished)) {
    removed += unlinkat(folder.get(), entry.name.c_str(), 0) == 0;
  }
  for (const std::string& name : unfinished) {
    unlinkat(folder.get(), name.c_str(), 0);
  }
  return removed;
}

}  // namespace fretwork::disk_cache
