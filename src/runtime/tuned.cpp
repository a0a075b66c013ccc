// The form of a table, the folder it lies in, and names of devices.
//
// {"format": "fretwork tuned 1", "devices": {DEVICE: {OP: {PROBLEM: {"choice": …, "ms": …, …}}}}}
#include "runtime/tuned.h"

#include <fcntl.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/warn.h"
#include "fretwork/error.h"
#include "runtime/cuda_driver.h"

namespace fretwork {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "fretwork tuned 1";

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name") && line.find(": ") != line.npos) {
      return line.substr(line.find(": ") + 2);
    }
  }
  utsname system{};
  return uname(&system) == 0 ? system.machine : "unknown";
}

/// Times need no more digits than a clock gives.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) {
    return 0;
  }
  const double unit = std::pow(10.0, 3 - std::floor(std::log10(std::abs(value))));
  return std::round(value * unit) / unit;
}

Json written(const TunedRow& row) {
  Json json = {{"choice", row.choice},    {"batch", row.batch},      {"ms", rounded(row.ms)},
               {"std", rounded(row.std)}, {"mse", rounded(row.mse)}, {"heuristic_ms", rounded(row.heuristic_ms)}};
  for (const auto& [name, ms] : row.ms_of) {
    json["ms_of"][name] = rounded(ms);
  }
  return json;
}

TunedRow read_row(const Json& json) {
  TunedRow row;
  row.choice = json.at("choice").get<std::string>();
  row.batch = json.value("batch", std::int64_t{0});
  row.ms = json.value("ms", 0.0);
  row.std = json.value("std", 0.0);
  row.mse = json.value("mse", 0.0);
  row.heuristic_ms = json.value("heuristic_ms", 0.0);
  row.ms_of = json.value("ms_of", std::map<std::string, double>());
  return row;
}

Error cannot(const std::filesystem::path& file, const char* what) {
  return Error(file.string() + ": cannot be " + what + ": " + std::strerror(errno));
}

/// All of it on the disk, or false with errno.
bool write_whole(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno != EINTR) {
      return false;
    }
    text.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  }
  return fsync(descriptor) == 0 || errno == EINVAL;  // of a pipe or a terminal
}

}  // namespace

std::string device_name(Device device) {
  return device.type == DeviceType::cpu ? cpu_model()
                                        : cuda::device_info(device.index).name + " " + cuda::kernel_arch(device.index);
}

TunedTable TunedTable::parse(const std::string& text) {
  TunedTable table;
  try {
    const Json json = Json::parse(text);
    if (const std::string format = json.at("format").get<std::string>(); format != kFormat) {
      throw Error(std::string("expected the format '") + kFormat + "', got '" + format + "'");
    }
    for (const auto& [device, ops] : json.at("devices").items()) {
      for (const auto& [op, problems] : ops.items()) {
        Rows& rows = table.rows(device, op);
        for (const auto& [problem, row] : problems.items()) {
          rows[problem] = read_row(row);
        }
      }
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(std::string("not a table of tuned choices: ") + error.what());
  }
  return table;
}

TunedTable TunedTable::read(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (std::error_code ignored; std::filesystem::is_directory(file, ignored)) {  // which opens, but has nothing to read
    stream.setstate(std::ios::failbit);
    errno = EISDIR;
  }
  if (!stream) {
    if (errno == ENOENT) {
      return {};
    }
    throw cannot(file, "read");
  }
  std::ostringstream text;
  text << stream.rdbuf();
  if (stream.bad() || text.bad()) {
    throw cannot(file, "read");
  }
  try {
    return parse(text.str());
  } catch (const Error& error) {
    throw Error(file.string() + ": " + error.what());
  }
}

std::string TunedTable::text() const {
  Json json = {{"format", kFormat}, {"devices", Json::object()}};
  for (const auto& [device, ops] : devices_) {
    for (const auto& [op, rows] : ops) {
      Json& place = json["devices"][device][op] = Json::object();
      for (const auto& [problem, row] : rows) {
        place[problem] = written(row);
      }
    }
  }
  return json.dump(1) + "\n";
}

void TunedTable::write(const std::filesystem::path& file) const {
  std::error_code ignored;                                                         // opening will say it
  const bool in_place = exists(file, ignored) && !is_regular_file(file, ignored);  // such as /dev/stdout
  const std::filesystem::path target = is_symlink(file, ignored) ? weakly_canonical(file, ignored) : file;
  const std::filesystem::path fresh = target.string() + ".writing-" + std::to_string(getpid());
  const int flags = in_place ? 0 : O_CREAT | O_TRUNC;
  const int descriptor = open((in_place ? file : fresh).c_str(), O_WRONLY | O_CLOEXEC | flags, 0644);
  if (descriptor < 0) {
    throw cannot(file, "written");
  }
  const bool whole = write_whole(descriptor, text());
  const int reason = errno;
  close(descriptor);
  const bool moved = whole && (in_place || rename(fresh.c_str(), target.c_str()) == 0);
  if (!moved) {
    errno = whole ? errno : reason;
    const Error error = cannot(file, "written");
    if (!in_place) {
      unlink(fresh.c_str());
    }
    throw error;
  }
}

int TunedTable::merge(const TunedTable& other) {
  // A problem holds batches up to twice the least; a row of fewer is not faster by being of fewer.
  const auto time_of = [](const TunedRow& row) {
    return row.ms / static_cast<double>(std::max<std::int64_t>(row.batch, 1));
  };
  int taken = 0;
  for (const auto& [device, ops] : other.devices_) {
    for (const auto& [op, rows_there] : ops) {
      Rows& here = rows(device, op);
      for (const auto& [problem, row] : rows_there) {
        const auto [place, fresh] = here.try_emplace(problem, row);
        if (!fresh && time_of(row) < time_of(place->second)) {
          place->second = row;
          ++taken;
        }
        taken += fresh ? 1 : 0;
      }
    }
  }
  return taken;
}

const TunedTable::Rows* TunedTable::find(const std::string& device, const std::string& op) const {
  const auto ops = devices_.find(device);
  if (ops == devices_.end()) {
    return nullptr;
  }
  const auto rows = ops->second.find(op);
  return rows != ops->second.end() ? &rows->second : nullptr;
}

std::filesystem::path tuned_folder() {
  if (const std::string set = setting("FRETWORK_TUNE_DIR"); !set.empty()) {
    return set;
  }
  if (const std::string set = setting("XDG_DATA_HOME"); set.starts_with('/')) {
    return std::filesystem::path(set) / "fretwork";
  }
  const std::string home = setting("HOME");
  return home.empty() ? std::filesystem::path() : std::filesystem::path(home) / ".local/share/fretwork";
}

std::vector<TunedSource> read_tuned_sources(const std::filesystem::path& folder) {
  std::vector<TunedSource> sources;
  const auto add = [&](const std::string& name, const auto& read) {
    try {
      sources.push_back({name, read()});
    } catch (const Error& error) {
      warn_once(std::string("tuning table ") + error.what() + "; ignored");
    }
  };
  for (const EmbeddedTable& shipped : embedded_tables()) {
    add(std::string("library: ") + shipped.name, [&] { return TunedTable::parse(shipped.text); });
  }
  std::vector<std::filesystem::path> files;
  std::error_code ignored;  // no folder, no tables
  for (std::filesystem::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (entry->path().extension() == ".json") {
      files.push_back(entry->path());
    }
  }
  std::sort(files.begin(), files.end());
  for (const std::filesystem::path& file : files) {
    add(file.string(), [&] { return TunedTable::read(file); });
  }
  return sources;
}

const std::vector<TunedSource>& tuned_sources() {
  static const auto& sources =
      *std::make_unique<std::vector<TunedSource>>(read_tuned_sources(tuned_folder())).release();
  return sources;
}

void ignore_tuned(const TunedSource& source, std::string_view op, const std::string& problem,
                  const std::string& choice) {
  warn_once("tuning table " + source.name + ": this version knows no " + std::string(op) + " choice '" + choice +
            "' for '" + problem + "'; ignored");
}

}  // namespace fretwork
